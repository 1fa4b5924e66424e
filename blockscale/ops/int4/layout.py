"""INT4 and INT8 weights of TensorRT-LLM's mixed GEMMs: byte layout, scales, zeros, numbers.

A plain weight is [E, K, N] in two's complement, row by row, two int4 a byte (low nibble: even n).
The kernels read 32-bit words of 32 / bits weights of one column, from rows that go together in an
MMA; `layout_of` says which index map (`blockscale.base.index_maps.TRTLLM`, `docs/layouts.md`) each
architecture reads.  Most also add 2^(bits-1) to the codes.  Scales and zeros are of groups along K:
w = q * scale + zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockscale.base.index_maps import TRTLLM, IndexMap
from blockscale.base.sizes import ceil_div, round_up
from blockscale.ops import call, checks
from blockscale.ops.layouts import relayout
from blockscale.specs.int4 import Int4Dequantize

Tensor = torch.Tensor

ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
"""Compute capabilities whose layout is known."""

ACTIVATIONS = ("a16", "a8")
CODES = (torch.uint8, torch.int8)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of zero points."""

SLAB_VALUES = 2**15
"""Values that a CPU dequantises at a time, as float32 in between: see `int4_layout.SLAB_BYTES`."""

GPU_SLAB_VALUES = 2**26
"""The same on a GPU."""


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


# ---- Scales and numbers -------------------------------------------------------------------------


def interleave_scales(scales: Tensor, group_size: int, sm: int = 90) -> Tensor:
    """Return block scales as the W4A8 MoE kernel of sm 90 reads them, bfloat16 [E, G/I, N*I].

    I consecutive blocks of a column become neighbours; I is 4, 2 or 1, the largest that divides G.
    Scales of any other dtype are rounded to bfloat16, the only one that this kernel has.  Kernels
    of other architectures read ``scales`` as they are, and get a copy.

    Args:
        scales: [E, G, N], G = K / group_size.
        group_size: values of K that share a scale; the kernel is built for 128.
        sm: compute capability of the GPU, one of `ARCHITECTURES`.
    """
    where = "int4.interleave_scales"
    e, g, n = _scale_sizes(where, scales, group_size, sm)
    if sm != 90:
        return scales.clone()
    i = _scale_factor(g)
    rounded = scales.bfloat16()
    if i == 1:
        return rounded.clone() if rounded is scales else rounded
    made = relayout(rounded, f"w4a8_{i}", (e, g, 2 * n))
    return made.view(e, g // i, 2 * n * i).view(torch.bfloat16)


def uninterleave_scales(scales: Tensor, n: int, group_size: int, sm: int = 90) -> Tensor:
    """Return block scales [E, G, N] of those that `interleave_scales` made, N = ``n``."""
    where = "int4.uninterleave_scales"
    e, lines, width = _scale_sizes(where, scales, group_size, sm)
    i = width // n if n > 0 else 0
    if not i or width != n * i or i != (_scale_factor(lines * i) if sm == 90 else 1):
        raise ValueError(
            f"{where}: scales have shape {list(scales.shape)}, which interleaving for sm={sm} does "
            f"not make of n={n} columns; pass the N of the weight"
        )
    if i == 1:
        return scales.clone()
    size = scales.element_size()
    name = f"w4a8_{i}" if size == 2 else f"w4a8_{i}_32"
    plain = relayout(scales, name, (e, lines * i, size * n), inverse=True)
    return plain.view(scales.dtype)


def _scale_factor(groups: int) -> int:
    """Return how many blocks of a column are neighbours."""
    return next(i for i in (4, 2, 1) if groups % i == 0)


def _scale_sizes(where: str, scales: Tensor, group_size: int, sm: int) -> tuple[int, int, int]:
    """Return the shape of scales, after all checks."""
    checks.tensor(where, "scales", scales, checks.ACTIVATIONS, 2)
    if scales.dim() != 3 or not scales.numel():
        raise ValueError(
            f"{where}: scales have shape {list(scales.shape)}, but must be [E, G, N] with no empty "
            "axis; add the axis of experts"
        )
    _check_group(where, group_size)
    check_sm(where, sm)
    e, g, n = scales.shape
    return e, g, n


def _check_group(where: str, group_size: int) -> None:
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(
            f"{where}: group_size={group_size!r}, but must be a positive integer; pass K for one "
            "scale per column"
        )


def zeros_of_points(points: Tensor, scale: Tensor, *, stored: str = "awq", bits: int = 4) -> Tensor:
    """Return the zeros that TensorRT-LLM's kernels add, (2^(bits-1) - z) * scale, like ``scale``.

    Args:
        points: integer zero points [E, G, N], one code each.
        scale: block scales [E, G, N].
        stored: "awq": z as it is; "gptq": z - 1, as checkpoints of GPTQ's first format have it.
        bits: 4 or 8.
    """
    where = "int4.zeros_of_points"
    checks.choice(where, "stored", stored, ("awq", "gptq"))
    check_bits(where, bits)
    checks.tensor(where, "points", points, INTEGERS)
    checks.tensor(where, "scale", scale, checks.ACTIVATIONS)
    if points.shape != scale.shape:
        raise ValueError(
            f"{where}: points have shape {list(points.shape)}, but scale has {list(scale.shape)}; "
            "pass one zero point for every scale, unpacked"
        )
    checks.same_device(where, "points", points, "scale", scale)
    middle = 2 ** (bits - 1) - (1 if stored == "gptq" else 0)
    return ((middle - points.long()) * scale.float()).to(scale.dtype)


def dequantize(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    *,
    bits: int = 4,
    layout: str = "plain",
    sm: int = 80,
    activation: str = "a16",
    moe: bool = True,
) -> Tensor:
    """Return the weight [E, K, N] in ``dtype``: q * scale + zero, in float32 and rounded once.

    A float zero is added to the product by a fused multiply-add at CPU levels that have it, to the
    rounded product elsewhere: a float32 result may differ in its last bits.

    Args:
        packed: uint8 or int8, signed codes q, [E, K, N/2] for 4 bits, [E, K, N] for 8; a dense
            weight may come without E, and then scale and zero do, too.
        scale: float [E, G, N], G = K / group_size; [E, N] also does where G is 1.  Scales of
            `interleave_scales` have to go through `uninterleave_scales` first.
        zero: like scale, and of two kinds.  Float: it is added, as TensorRT-LLM's kernels do
            (`zeros_of_points` makes it).  Integer: the zero point z of the unsigned code
            q + 2^(bits-1), as AWQ stores it (add 1 to those of GPTQ's first format), so
            w = (q + 2^(bits-1) - z) * scale.
        group_size: values of K that share a scale; it divides K, but a dense weight's last group
            may be shorter.
        dtype: float32, bfloat16 or float16.
        bits: 4 or 8.
        layout: "plain", or "preprocessed" for what `preprocess_weights` made with the same sm,
            activation, moe and bits.
        sm, activation, moe: see `preprocess_weights`; not looked at where the layout is plain.
    """
    where = "int4.dequantize"
    checks.choice(where, "layout", layout, ("plain", "preprocessed"))
    check_bits(where, bits)
    checks.activation(where, "dtype", dtype)
    form = None
    if layout == "preprocessed":
        form = layout_of(sm=sm, activation=activation, moe=moe, bits=bits, where=where)
    codes = weight_bytes(where, packed, form, moe and form is not None, bits)
    e, k, n = codes.shape[0], codes.shape[1], codes.shape[2] * 8 // bits
    groups = _groups(where, k, group_size, packed.dim() == 2)
    scales = _per_group(where, "scale", scale, checks.ACTIVATIONS, packed, (e, groups, n))
    zeros = None
    if zero is not None:
        zeros = _per_group(where, "zero", zero, checks.ACTIVATIONS + INTEGERS, packed, scales.shape)
    out = packed.new_empty((e, k, n), dtype=dtype)
    if bits == 4 and n % 2 == 0 and packed.device.type == "cpu":
        _on_cpu(codes, scales, zeros, group_size, form, out)
        return out.view(*packed.shape[:-1], n)
    plain = torch.empty_like(codes[0]) if form is not None else None
    for i in range(e):
        expert = codes[i]
        if form is not None and plain is not None:
            relayout(expert[None], form.map_name, plain[None].shape, True, plain[None])
            expert = plain
        zero = None if zeros is None else zeros[i].detach()
        _dequantize(expert, scales[i].detach(), zero, group_size, bits, out[i])
    return out.view(*packed.shape[:-1], n)


def _on_cpu(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    form: WeightLayout | None,
    out: Tensor,
) -> None:
    """Write the values of int4 codes by `blockscale.tir.int4.dequantize`."""
    e, k, n = map(int, out.shape)  # jit.trace has tensors there; the kernel says that it refuses
    spec = Int4Dequantize(
        *(n, k, group, checks.dtype_name(out.dtype)),
        "plain" if form is None else form.map_name,
        "none" if zeros is None else "term" if zeros.is_floating_point() else "point",
    )
    more = () if zeros is None else (zeros.detach().float(),)
    run = call.kernel(spec, out.device)
    run(codes.contiguous().view(e, -1), scales.detach().float(), *more, out)


def _dequantize(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: int, bits: int, out: Tensor
) -> None:
    """Write the values of one expert's codes, bytes [K, bytes of N]."""
    k, n = out.shape
    step = max(1, (GPU_SLAB_VALUES if out.is_cuda else SLAB_VALUES) // n)
    for first in range(0, k, step):
        rows = codes[first : first + step].view(torch.int8)
        at = torch.arange(first, first + len(rows), device=codes.device) // group
        # an int8 shifted left and right again keeps the sign of its low nibble
        q = torch.stack(((rows << 4) >> 4, rows >> 4), -1) if bits == 4 else rows
        value = q.view(-1, n).float()
        factor = scale.index_select(0, at).float()
        if zero is None:
            value *= factor
        elif zero.is_floating_point():
            value *= factor
            value += zero.index_select(0, at).float()
        else:
            value += 2 ** (bits - 1) - zero.index_select(0, at).long()
            value *= factor
        out[first : first + step] = value


def _groups(where: str, k: int, group_size: int, dense: bool) -> int:
    """Return the number of groups along K."""
    _check_group(where, group_size)
    if k % group_size and not dense:
        raise ValueError(
            f"{where}: group_size={group_size} does not divide K={k}; only a dense weight [K, N] "
            "may end in a shorter group, so pass the group size of the scales"
        )
    return ceil_div(k, group_size)


def _per_group(
    where: str,
    name: str,
    value: Tensor,
    dtypes: tuple[torch.dtype, ...],
    packed: Tensor,
    sizes: tuple[int, ...] | torch.Size,
) -> Tensor:
    """Return scales or zeros as [E, G, N], after all checks."""
    checks.beside(where, name, value, dtypes, "packed", packed)
    e, g, n = sizes
    allowed: list[tuple[int, ...]] = [(g, n)] if packed.dim() == 2 else [(e, g, n)]
    if g == 1:
        allowed.append((n,) if packed.dim() == 2 else (e, n))
    rest = (
        f" for packed {list(packed.shape)} and this group_size; pass one value per group and column"
    )
    checks.sized(where, name, value, allowed, rest)
    return value.view(e, g, n)
