"""The byte layout of INT4 and INT8 weights of TensorRT-LLM's mixed GEMMs, and the way back.

A plain weight is [E, K, N] in two's complement, row by row, two int4 a byte (low nibble: even n).
The kernels read 32-bit words of 32 / bits weights of one column, from rows that go together in an
MMA; `layout_of` says which index map (`blockscale.base.index_maps.TRTLLM`, `docs/layouts.md`) each
architecture reads.  Most also add 2^(bits-1) to the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockscale.base.index_maps import TRTLLM, IndexMap
from blockscale.base.sizes import round_up
from blockscale.ops import checks
from blockscale.ops.layouts import relayout

Tensor = torch.Tensor

ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
"""Compute capabilities whose layout is known."""

ACTIVATIONS = ("a16", "a8")
CODES = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class WeightLayout:
    """Where `preprocess_weights` puts a weight, and which sizes it takes."""

    map_name: str
    """Name of its index map, in `blockscale.base.index_maps.TRTLLM`."""

    @property
    def map(self) -> IndexMap:
        """The layout as data."""
        return TRTLLM[self.map_name]

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return self.map.bits

    @property
    def block(self) -> int:
        """What K must be a multiple of: the rows that the layout keeps together, or 128 bits."""
        return max(self.map.multiples()[1], 128 // self.bits)

    @property
    def n_multiple(self) -> int:
        """What N must be a multiple of: 8 bytes of a row."""
        return 64 // self.bits


def layout_of(
    *, sm: int = 80, activation: str = "a16", moe: bool = True, bits: int = 4, where: str = ""
) -> WeightLayout:
    """Return the layout that the kernels of an architecture read.

    Dense weights of sm 100 and 103 are only transposed, as TensorRT-LLM's Python code of 2026 does;
    its C++ code uses the layout of ``sm=80`` there.

    Raises:
        ValueError: an unknown argument, or a combination that no kernel of TensorRT-LLM reads.
    """
    where = where or "int4.layout_of"
    check_sm(where, sm)
    checks.choice(where, "activation", activation, ACTIVATIONS)
    check_bits(where, bits)
    if activation == "a8":
        _check_a8(where, sm, moe, bits)
    transposed = WeightLayout(f"int{bits}_transposed")
    if sm == 90 and moe and activation == "a8":
        return transposed
    full = WeightLayout(f"int{bits}_{activation}")
    if moe or sm < 90 or sm >= 120:
        return full
    return WeightLayout(f"{full.map_name}_columns") if sm == 90 else transposed


def check_sm(where: str, sm: int) -> None:
    """ValueError unless ``sm`` is one of `ARCHITECTURES`."""
    if sm not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"{where}: sm={sm!r} is not known; choose one of {known}")


def check_bits(where: str, bits: int) -> None:
    """ValueError unless ``bits`` is 4 or 8."""
    if bits not in (4, 8):
        raise ValueError(f"{where}: bits={bits!r}, but weights have 4 or 8; pass bits=4 or bits=8")


def _check_a8(where: str, sm: int, moe: bool, bits: int) -> None:
    """ValueError where TensorRT-LLM has no kernel with FP8 activations."""
    if bits == 8:
        raise ValueError(
            f"{where}: bits=8 with activation='a8' has no layout: FP8 activations go with 4-bit "
            "weights; pass activation='a16' or bits=4"
        )
    if sm < 89:
        raise ValueError(
            f"{where}: activation='a8' on sm={sm}, but FP8 activations need sm 89 or later; pass "
            "activation='a16', or the sm of the GPU that will run it"
        )
    if moe and sm in (100, 103):
        raise ValueError(
            f"{where}: activation='a8' with moe=True on sm={sm}, for which TensorRT-LLM has no "
            "kernel; pass activation='a16', or sm=89 or sm=90 for the layouts of those kernels"
        )


# ---- Weights ------------------------------------------------------------------------------------


def preprocess_weights(
    packed: Tensor, *, sm: int = 80, activation: str = "a16", moe: bool = True, bits: int = 4
) -> Tensor:
    """Return the bytes that TensorRT-LLM's kernels read, in the shape and dtype of ``packed``.

    The shape of the result only names its size: each expert is one run of 32-bit words.  The MoE
    kernel with FP8 activations of sm 90 gets a layout of its own (its caller in TensorRT-LLM has to
    ask for that with ``do_weight_interleave=False``).

    Args:
        packed: uint8 or int8, signed codes, [E, K, N/2] for 4 bits, [E, K, N] for 8; a dense weight
            may come without E.
        sm: compute capability of the GPU, one of `ARCHITECTURES`.
        activation: "a16" for float16 and bfloat16, "a8" for FP8.
        moe: for a grouped GEMM; False for a dense one.
        bits: 4 or 8.

    Raises:
        ValueError, TypeError: an argument that TensorRT-LLM refuses, or would convert to something
            that no kernel reads.
    """
    where = "int4.preprocess_weights"
    layout = layout_of(sm=sm, activation=activation, moe=moe, bits=bits, where=where)
    source = weight_bytes(where, packed, layout, moe, bits)
    out = relayout(source, layout.map_name, source.shape)
    return out.view(packed.dtype).view(packed.shape)


def unprocess_weights(
    processed: Tensor, *, sm: int = 80, activation: str = "a16", moe: bool = True, bits: int = 4
) -> Tensor:
    """Return the plain weight of which `preprocess_weights` made ``processed``; arguments alike."""
    where = "int4.unprocess_weights"
    layout = layout_of(sm=sm, activation=activation, moe=moe, bits=bits, where=where)
    source = weight_bytes(where, processed, layout, moe, bits)
    out = relayout(source, layout.map_name, source.shape, inverse=True)
    return out.view(processed.dtype).view(processed.shape)


def weight_bytes(
    where: str, packed: Tensor, layout: WeightLayout | None, moe: bool, bits: int
) -> Tensor:
    """Return a weight, plain if it has no layout, as uint8 [E, K, bytes of N], after all checks."""
    value = checks.tensor(where, "packed", packed, CODES, 2)
    got = list(value.shape)
    wanted = "[E, K, N/2]" if bits == 4 else "[E, K, N]"
    if value.dim() > 3 or (moe and value.dim() == 2):
        remedy = "add the axis of experts, or pass moe=False for a dense weight [K, ...]"
        raise ValueError(f"{where}: packed has shape {got}, but must be {wanted}; {remedy}")
    if not value.numel():
        raise ValueError(
            f"{where}: packed has shape {got}, which is empty; leave such a weight out"
        )
    sizes = (("K", got[-2]), ("N", got[-1] * 8 // bits))
    multiples = (1, 1) if layout is None else (layout.block, layout.n_multiple)
    for (name, size), multiple in zip(sizes, multiples, strict=True):
        if size % multiple:
            up = round_up(size, multiple)
            raise ValueError(
                f"{where}: {name}={size} of packed {got} is not a multiple of {multiple}, as this "
                f"layout needs; pad the weight with zeros to {name}={up}"
            )
    return value.view(torch.uint8).view(-1, *got[-2:])


def restore(source: Tensor, out: Tensor, layout: WeightLayout) -> None:
    """Write the plain weight of one expert to ``out``; both are bytes [K, bytes of N]."""
    relayout(source[None], layout.map_name, out[None].shape, inverse=True, out=out[None])
