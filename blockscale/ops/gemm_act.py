"""The torch function that multiplies each expert's rows, activates and quantises; its weights.

Formats and rounding: `blockscale.tir.gemm.grouped_act`; what it shares with `grouped_mm_fp4`:
`blockscale.ops.gemm`.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from blockscale.base.formats import GEMM
from blockscale.ops import call, checks, gemm
from blockscale.ops.call import Checked
from blockscale.specs import GroupedMmActFp4Quant
from blockscale.specs.gemm import GATED_ROWS, check_gated

Tensor = torch.Tensor

_FORMATS, _ACTIVATIONS = (
    tuple(GroupedMmActFp4Quant.pattern.texts(field)) for field in ("fmt", "activation")
)


def grouped_mm_act_fp4quant(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    alpha: Tensor | None = None,
    global_scale: Tensor | None = None,
    activation: str = "silu",
    fmt: str = "nvfp4",
    dtype: torch.dtype = torch.bfloat16,
    *,
    gate_alpha: float = 1.702,
    beta: float = 1.0,
    limit: float = 7.0,
    packed: Tensor | None = None,
    block_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what the next `grouped_mm_fp4` takes as a and a_scale, in one kernel.

    ``c = grouped_mm_fp4(...)`` rounded to ``dtype``; ``activation(gate) * up`` of it, rounded to
    ``dtype``; codes and scales of that over the expert's global scale: bit for bit what
    `grouped_mm_fp4` and the quantising activations give one after the other.

    Args:
        a, a_scale, offsets, alpha: as in `grouped_mm_fp4`.
        b: codes [experts, N, K / 2]: 16 gates, 16 ups, and so on, as `interleave_gate_up` orders
            rows; N a multiple of 128 (nvfp4) or 256 (mxfp4).
        b_scale: [experts, N, ceil_to(K / block, 4)], or flat; rows in the order of b's.
        global_scale: [experts] float32 that divide what is quantised; None: 1.
        activation: "silu", "gelu_tanh", or "swiglu", gpt-oss's, with numbers as in
            `swiglu_fp4quant`, where ``gate_alpha`` is called alpha.
        fmt: "nvfp4" or "mxfp4", of a, b and the result.  There are no MXFP8 results.
        dtype: bfloat16 or float16.
        gate_alpha, beta, limit: of "swiglu"; without meaning for the others.
        packed: output, [rows, N / 4], the even element in the low nibble; None: allocated, uint8.
            Rows of no expert are not written.
        block_scale: output, [scale rows, N / 2 / block] with the scale rows of a_scale; None:
            allocated, float8_e4m3fn (nvfp4) or uint8 (mxfp4).  Scales of the rows that fill an
            expert's last 128 are written as zero, scale rows of no expert not at all.

    Raises:
        TypeError, ValueError: as `blockscale.ops.gemm` says.
    """
    options = activation, fmt, dtype, getattr(b, "shape", None)
    numbers = (gate_alpha, beta, limit) if activation == "swiglu" else ()
    given = a, b, a_scale, b_scale, offsets, alpha, global_scale, numbers, packed, block_scale
    return _OP.run(options, given)


class _Op(call.Op[tuple[Tensor, Tensor]]):
    flattens = False

    def recorded(self, options: Any, given: Any) -> tuple[Tensor, Tensor]:
        *inputs, numbers, packed, block_scale = given
        a, b, a_scale = inputs[:3]
        made = _outputs(a, a_scale, b.shape[-2], options[1], packed, block_scale)
        call.operator(self.name)(*inputs, *options[:3], list(map(float, numbers)), *made)
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        a, b, a_scale, b_scale, offsets, alpha, g, numbers, packed, block_scale = given
        a_scale = checks.tiles(a_scale, gemm.scale_cols(spec))
        if type(a_scale) not in call.PLAIN or a_scale.dim() != 2:
            return None
        if not a.is_cuda and gemm.wrong_offsets(offsets, a.shape[0], a_scale.shape[0]):
            return None
        made = _outputs(a, a_scale, spec.n, spec.fmt, packed, block_scale)
        return (a, b, a_scale, b_scale, offsets, alpha, g, *numbers, *made), made

    def check(self, options: Any, given: Any) -> Checked:
        *inputs, numbers, packed, block_scale = given
        spec, scales = _check(*inputs, *options[:3], numbers=numbers)
        a, b, _, _, offsets, alpha, g = inputs
        made = _outputs(a, scales[0], spec.n, spec.fmt, packed, block_scale)
        _check_outputs(spec, a, scales[0], *made)
        read = {"a": a, "b": b, "a_scale": scales[0], "b_scale": scales[1]}
        for name, out in zip(("packed", "block_scale"), made, strict=True):
            for other, value in (read | {"alpha": alpha, "global_scale": g}).items():
                if value is not None:
                    checks.no_overlap(self.name, name, out, other, value)
        if offsets.device.type == "cpu":
            wrong = gemm.wrong_offsets(offsets, a.shape[0], scales[0].shape[0])
            if wrong:
                raise ValueError(f"{self.name}: {wrong}")
        codes = a.view(torch.uint8), b.view(torch.uint8)
        factors = [None if value is None else value.detach() for value in (alpha, g)]
        empty = not scales[0].numel()  # no expert has rows, and a kernel takes no empty input
        arguments = (*codes, *scales, offsets, *factors, *map(float, numbers), *made)
        return Checked(None if empty else spec, arguments, made)


_OP = _Op("grouped_mm_act_fp4quant")


def _outputs(
    a: Tensor, a_scale: Tensor, n: int, fmt: str, packed: Tensor | None, block_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return those that are given, the others new."""
    if packed is None:
        packed = a.new_empty((a.shape[0], n // 4), dtype=torch.uint8)
    if block_scale is None:
        cols = n // 2 // GEMM[fmt].block
        rows = a_scale.numel() // gemm.padded_cols(a.shape[-1] * 2, fmt)
        block_scale = a.new_empty((rows, cols), dtype=checks.SCALES[fmt][0])
    return packed, block_scale


def _check(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    alpha: Tensor | None,
    global_scale: Tensor | None,
    activation: str,
    fmt: str,
    dtype: torch.dtype,
    *,
    numbers: tuple[Any, ...],
) -> tuple[GroupedMmActFp4Quant, tuple[Tensor, Tensor]]:
    """Return the spec and both scales, as bytes of their padded shapes."""
    where = "grouped_mm_act_fp4quant"
    checks.choice(where, "activation", activation, _ACTIVATIONS)
    checks.choice(where, "fmt", fmt, _FORMATS)
    checks.choice(where, "dtype", dtype, checks.SIXTEEN_BIT)
    for name, value in zip(("gate_alpha", "beta", "limit"), numbers, strict=False):
        checks.number(where, name, value, 0 if name == "limit" else -inf)
    product, scales = gemm.check_grouped(where, a, b, a_scale, b_scale, offsets, alpha, fmt, dtype)
    check_gated(where, product.n, fmt)
    if global_scale is not None:
        float32, shape = (torch.float32,), (product.experts,)
        checks.like(where, "global_scale", global_scale, float32, "a", a, shape)
    sizes = product.experts, product.n, product.k
    return GroupedMmActFp4Quant(*sizes, fmt, activation, checks.dtype_name(dtype)), scales


def _check_outputs(
    spec: GroupedMmActFp4Quant, a: Tensor, a_scale: Tensor, packed: Tensor, block_scale: Tensor
) -> None:
    """Check the outputs against the inputs, ``a_scale`` as bytes of its padded shape."""
    shape = a.shape[0], spec.n // 4
    checks.like(spec.op, "packed", packed, checks.PACKED, "a", a, shape, output=True)
    shape = a_scale.shape[0], spec.n // 2 // spec.block
    dtypes = checks.SCALES[spec.fmt]
    checks.like(spec.op, "block_scale", block_scale, dtypes, "a", a, shape, output=True)


def _run(*given: Any) -> None:
    *inputs, activation, fmt, dtype, numbers, packed, block_scale = given
    options = activation, fmt, dtype, inputs[1].shape
    _OP.run(options, (*inputs, tuple(numbers), packed, block_scale))


def _fake(*given: Any) -> None:
    *inputs, numbers, packed, block_scale = given
    spec, scales = _check(*inputs, numbers=tuple(numbers))
    _check_outputs(spec, given[0], scales[0], packed, block_scale)


call.define(
    "grouped_mm_act_fp4quant",
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor offsets, Tensor? alpha, "
    "Tensor? global_scale, str activation, str fmt, ScalarType dtype, float[] numbers, "
    "Tensor! packed, Tensor! block_scale) -> ()",
    _run,
    _fake,
)


def interleave_gate_up(weight: Tensor, dim: int = -2) -> Tensor:
    """Return the rows of ``weight`` as `grouped_mm_act_fp4quant` takes them: 16 gates, 16 ups, ...

    Args:
        weight: [..., 2 I, X]: I gate rows, then I up rows; floats, codes, or linear block scales
            (those in the 128x4 layout only before they are laid out).
        dim: the dimension of the rows, a multiple of 32 of them.

    Raises:
        ValueError: another number of rows.
    """
    rows = weight.shape[dim]
    if rows % (2 * GATED_ROWS):
        raise ValueError(
            f"interleave_gate_up: weight has {rows} rows, no multiple of {2 * GATED_ROWS}; pad "
            "gates and ups with rows of zeros"
        )
    halves = weight.unflatten(dim, (2, rows // 2 // GATED_ROWS, GATED_ROWS))
    first = dim % weight.dim()
    return halves.transpose(first, first + 1).flatten(first, first + 2)
