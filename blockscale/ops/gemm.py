"""Torch functions that multiply by block-scaled operands: one matrix, or one for each expert.

Formats and rounding: `blockscale.tir.gemm.mm`, `.grouped_gemm`.  What `mm_fp4` and
`grouped_mm_fp4` share:

* fmt says what a and b hold: "nvfp4" (E2M1 codes, E4M3 scales of 16 elements), "mxfp4" (E2M1, E8M0
  of 32), "mxfp8xmxfp4" (a: E4M3 bytes, b: E2M1), "mxfp8" (E4M3 bytes both), all MX scales E8M0.
* Codes: E2M1 as uint8 or float4_e2m1fn_x2, two a byte, the even element in the low nibble; E4M3 as
  uint8 or float8_e4m3fn.  Scales: uint8, or float8_e4m3fn or float8_e8m0fnu as fmt says, in the
  128x4 layout with its padded shape, or flat.  Scales that pad K must not be NaN: a GPU multiplies
  them with zeros (`quantize` and `swizzle_scales` write zeros).
* K is a multiple of 32, N of 8.
* The sum is accumulated in float32; all else is applied to it before the one rounding.
* Errors: TypeError for an argument that is no tensor or of another dtype; ValueError for an unknown
  option, a shape, stride or device that does not fit, tensors that overlap.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import torch

from blockscale.base.formats import GEMM
from blockscale.base.sizes import round_up
from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import dtype_name, padded_shape
from blockscale.runtime.arguments import brief
from blockscale.specs import GroupedMmActFp4Quant, GroupedMmFp4, MmFp4
from blockscale.specs.gemm import ACTIVATIONS, ATOM_ROWS, check_gemm

Tensor = torch.Tensor


def mm_fp4(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None = None,
    fmt: str = "nvfp4",
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
    out: Tensor | None = None,
) -> Tensor:
    """Return ``activation(alpha * a @ b.T + bias) + residual`` [..., N], a and b dequantised.

    Args:
        a: codes [..., K / 2], or E4M3 bytes [..., K].
        b: codes [N, K / 2], or E4M3 bytes [N, K].
        a_scale: [ceil_to(rows, 128), ceil_to(K / block, 4)], leading dimensions of a flattened to
            rows; or flat.
        b_scale: [ceil_to(N, 128), ceil_to(K / block, 4)], or flat.
        alpha: [1] float32, the product of both global scales; None: 1.
        fmt: "nvfp4", "mxfp4", "mxfp8xmxfp4" or "mxfp8".
        out_dtype: bfloat16, float16 or float32.
        bias: [N] float32, bfloat16 or float16; None: 0.
        residual: [..., N] of ``out_dtype``, apart from out; None: none.
        activation: "none", "silu", "gelu_tanh" (GELU in its tanh form) or "relu2" (max(x, 0)^2).
        out: output, [..., N] of ``out_dtype``; None: allocated.

    Raises:
        TypeError, ValueError: as the module says.
    """
    options = fmt, out_dtype, activation, residual is not None, getattr(b, "shape", None)
    return _MM.run(options, (a, b, a_scale, b_scale, alpha, bias, residual, out))


class _Mm(call.Op[Tensor]):
    flattens = False

    def recorded(self, options: Any, given: Any) -> Tensor:
        fmt, out_dtype, activation, *_ = options
        *inputs, bias, residual, out = given
        made = _output(given[0], given[1].shape[0], out_dtype) if out is None else out
        call.operator(self.name)(*inputs, fmt, out_dtype, bias, residual, activation, made)
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        a, b, a_scale, b_scale, alpha, bias, residual, out = given
        cols = scale_cols(spec)
        if bias is not None:
            if type(bias) not in call.PLAIN or bias.dtype not in checks.ACTIVATIONS:
                return None
            bias = bias.detach().float()
        if residual is not None:
            if type(residual) not in call.PLAIN:
                return None
            if torch.is_grad_enabled() and residual.requires_grad:
                return None
        if out is None:
            out = _output(a, spec.n, options[1])
        scales = checks.tiles(a_scale, cols), checks.tiles(b_scale, cols)
        added = () if residual is None else (residual,)
        return (a, b, *scales, alpha, bias, *added, out), out

    def check(self, options: Any, given: Any) -> Checked:
        fmt, out_dtype, activation, *_ = options
        a, b, a_scale, b_scale, alpha, bias, residual, out = given
        spec, scales = _check_mm(
            a, b, a_scale, b_scale, alpha, fmt, out_dtype, bias, residual, activation
        )
        d = _output(a, spec.n, out_dtype) if out is None else out
        inputs = {"a": a, "b": b, "bias": bias, "alpha": alpha, "residual": residual}
        _check_output(self.name, d, out_dtype, a, spec.n, inputs)
        rows = prod(a.shape[:-1])
        arguments = (
            a.view(torch.uint8).view(rows, spec.a_bytes),
            b.view(torch.uint8),
            *scales,
            None if alpha is None else alpha.detach().reshape(1),
            None if bias is None else bias.detach().float(),
            *([] if residual is None else [residual.view(rows, spec.n)]),
            d.view(rows, spec.n),
        )
        return Checked(spec, arguments, d)


_MM = _Mm("mm_fp4")


def grouped_mm_fp4(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    alpha: Tensor | None = None,
    fmt: str = "nvfp4",
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return [rows, N] of ``out_dtype``: ``alpha[e] * a[i] @ b[e].T`` for each row i of expert e.

    Args:
        a: codes [rows, K / 2], or E4M3 bytes [rows, K], sorted by expert.
        b: codes [experts, N, K / 2], or E4M3 bytes [experts, N, K].
        a_scale: [scale rows, ceil_to(K / block, 4)]: the rows of each expert padded to a multiple
            of 128, one expert after the other, so that each starts at one; more may follow.  Or
            flat.
        b_scale: [experts, ceil_to(N, 128), ceil_to(K / block, 4)], or flat.
        offsets: [experts + 1] int32: expert e has the rows offsets[e] to offsets[e + 1].  Checked
            on the CPU; on a GPU it is up to the caller that they rise and end within a.
        alpha: [experts] float32; None: 1.
        fmt, out_dtype: as in `mm_fp4`.
        out: output, [rows, N] of ``out_dtype``; None: allocated.  Rows of no expert (before the
            first offset, from the last on) are not written.

    Raises:
        TypeError, ValueError: as the module says.
    """
    given = a, b, a_scale, b_scale, offsets, alpha, out
    return _GROUPED.run((fmt, out_dtype, getattr(b, "shape", None)), given)


class _Grouped(call.Op[Tensor]):
    flattens = False

    def recorded(self, options: Any, given: Any) -> Tensor:
        a, b, *others, out = given
        made = _output(a, b.shape[-2], options[1]) if out is None else out
        call.operator(self.name)(a, b, *others, *options[:2], made)
        return made

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        a, b, a_scale, b_scale, offsets, alpha, out = given
        a_scale = checks.tiles(a_scale, scale_cols(spec))
        if not a.is_cuda:
            if type(a_scale) not in call.PLAIN or a_scale.dim() != 2:
                return None
            if wrong_offsets(offsets, a.shape[0], a_scale.shape[0]):
                return None
        if out is None:
            out = _output(a, spec.n, options[1])
        return (a, b, a_scale, b_scale, offsets, alpha, out), out

    def check(self, options: Any, given: Any) -> Checked:
        fmt, out_dtype, _ = options
        a, b, a_scale, b_scale, offsets, alpha, out = given
        spec, scales = check_grouped(
            self.name, a, b, a_scale, b_scale, offsets, alpha, fmt, out_dtype
        )
        d = _output(a, spec.n, out_dtype) if out is None else out
        inputs = {"a": a, "b": b, "alpha": alpha}
        _check_output(self.name, d, out_dtype, a, spec.n, inputs)
        if offsets.device.type == "cpu":
            wrong = wrong_offsets(offsets, a.shape[0], scales[0].shape[0])
            if wrong:
                raise ValueError(f"{self.name}: {wrong}")
        codes = a.view(torch.uint8), b.view(torch.uint8)
        alpha = None if alpha is None else alpha.detach()
        empty = not scales[0].numel()  # no expert has rows, and a kernel takes no empty input
        return Checked(None if empty else spec, (*codes, *scales, offsets, alpha, d), d)


_GROUPED = _Grouped("grouped_mm_fp4")


def _output(a: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return a.new_empty((*a.shape[:-1], n), dtype=dtype)


def scale_cols(spec: MmFp4 | GroupedMmFp4 | GroupedMmActFp4Quant) -> int:
    """Return columns of the operands' scales, padding included."""
    return padded_cols(spec.k, spec.fmt)


def padded_cols(k: int, fmt: str) -> int:
    """Return columns of the scales of rows of ``k`` elements, padding included."""
    return round_up(k // GEMM[fmt].block, 4)


def _check_format(where: str, fmt: str, out_dtype: torch.dtype) -> None:
    checks.choice(where, "fmt", fmt, tuple(GEMM))
    checks.activation(where, "out_dtype", out_dtype)


def _check_operands(
    where: str, a: Tensor, b: Tensor, b_dims: int, fmt: str, out_dtype: torch.dtype
) -> tuple[int, int]:
    """Return N and K."""
    _check_format(where, fmt, out_dtype)
    row = GEMM[fmt]
    checks.tensor(where, "a", a, checks.dtypes_of(row.a), dims=2)
    checks.beside(where, "b", b, checks.dtypes_of(row.b), "a", a, dims=2)
    if b.dim() != b_dims:
        wanted = "[N, K]" if b_dims == 2 else "[experts, N, K]"
        raise ValueError(
            f"{where}: b has shape {list(b.shape)}, but must have {b_dims} dimensions, {wanted}, "
            "where two 4-bit codes of K are one element"
        )
    n, k = int(b.shape[-2]), int(b.shape[-1]) * row.b.per_byte
    if a.shape[-1] * row.a.per_byte != k:
        own = a.shape[-1] * row.a.per_byte
        remedy = f"; pass operands of one K, stored as fmt={fmt!r} says"
        stored = [*b.shape[:-2], b.shape[-1], own // row.b.per_byte]
        raise ValueError(
            f"{where}: a of shape {list(a.shape)} holds rows of {own} elements, but b of shape "
            f"{list(b.shape)} holds rows of {k}{checks.transposed('b', b.shape, stored) or remedy}"
        )
    check_gemm(where, n, k, fmt, dtype_name(out_dtype))
    return n, k


def _scale(
    where: str, name: str, value: Tensor, fmt: str, a: Tensor, shape: tuple[int, ...], k: int
) -> Tensor:
    """Return scales as bytes of the padded shape, the one of rows of ``k`` elements."""
    scale = checks.beside(where, name, value, checks.dtypes_of(GEMM[fmt].scale), "a", a)
    if tuple(scale.shape) not in (shape, (prod(shape),)):

        def shapes(block: int) -> list[tuple[int, ...]]:
            padded = (*shape[:-1], round_up(k // block, 4))
            return [padded, (prod(padded),)]

        made = "swizzle_scales(), or quantize() with scale_layout='128x4'"
        made = made if len(shape) == 2 else "layouts.to_128x4(), which pads each expert"
        remedy = checks.other_format(scale.shape, fmt, GEMM, shapes) or f"; make it with {made}"
        raise ValueError(
            f"{where}: {name} has shape {list(scale.shape)}, but must have {list(shape)} in the "
            f"128x4 layout, or be flat{remedy}"
        )
    return scale.view(torch.uint8).view(shape)


def _check_alpha(where: str, alpha: Tensor | None, count: int, a: Tensor) -> None:
    if alpha is None:
        return
    checks.beside(where, "alpha", alpha, (torch.float32,), "a", a, dims=0)
    if alpha.numel() != count or (count > 1 and alpha.dim() != 1):
        raise ValueError(
            f"{where}: alpha has shape {list(alpha.shape)}, but must have [{count}]: one factor "
            + ("for each expert" if where.startswith("grouped") else "for the whole product")
        )


def _check_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None,
    fmt: str,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> tuple[MmFp4, tuple[Tensor, Tensor]]:
    """Return the spec and both scales, as bytes of their padded shapes."""
    where = "mm_fp4"
    n, k = _check_operands(where, a, b, 2, fmt, out_dtype)
    checks.choice(where, "activation", activation, ACTIVATIONS)
    spec = MmFp4(n, k, fmt, dtype_name(out_dtype), activation, residual is not None)
    height = padded_shape(prod(a.shape[:-1]), 0)[0]
    scales = (
        _scale(where, "a_scale", a_scale, fmt, a, (height, spec.scale_cols), k),
        _scale(where, "b_scale", b_scale, fmt, a, (spec.scale_rows, spec.scale_cols), k),
    )
    _check_alpha(where, alpha, 1, a)
    if bias is not None:
        checks.beside(where, "bias", bias, checks.ACTIVATIONS, "a", a)
        checks.sized(where, "bias", bias, [[n]], ", one per row of b")
    if residual is not None:
        checks.like(where, "residual", residual, (out_dtype,), "a", a, (*a.shape[:-1], n))
    return spec, scales


def check_grouped(
    where: str,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    alpha: Tensor | None,
    fmt: str,
    out_dtype: torch.dtype,
) -> tuple[GroupedMmFp4, tuple[Tensor, Tensor]]:
    """Return the spec and both scales, as bytes of their padded shapes."""
    n, k = _check_operands(where, a, b, 3, fmt, out_dtype)
    if a.dim() != 2:
        raise ValueError(
            f"{where}: a has shape {list(a.shape)}, but must have 2 dimensions; pass its rows "
            "sorted by expert"
        )
    experts = int(b.shape[0])
    spec = GroupedMmFp4(experts, n, k, fmt, dtype_name(out_dtype))
    one = spec.matrix
    checks.beside(where, "offsets", offsets, (torch.int32,), "a", a)
    rest = f": the first row of each of the {experts} experts of b, and the end of the last"
    checks.sized(where, "offsets", offsets, [[experts + 1]], rest)
    wanted = (experts, one.scale_rows, one.scale_cols)
    scales = (
        _grouped_scale(where, a_scale, fmt, a, one.scale_cols),
        _scale(where, "b_scale", b_scale, fmt, a, wanted, k),
    )
    _check_alpha(where, alpha, experts, a)
    return spec, scales


def _grouped_scale(where: str, value: Tensor, fmt: str, a: Tensor, cols: int) -> Tensor:
    """Return a_scale as bytes [scale rows, cols]; how many rows there are is the caller's."""
    scale = checks.beside(where, "a_scale", value, checks.dtypes_of(GEMM[fmt].scale), "a", a)
    rows = scale.numel() // cols
    if (
        scale.numel() % cols
        or rows % ATOM_ROWS
        or list(scale.shape) not in ([rows, cols], [rows * cols])
    ):
        raise ValueError(
            f"{where}: a_scale has shape {list(scale.shape)}, but must have a multiple of "
            f"{ATOM_ROWS} rows of {cols}, or be flat; pad the scales of each expert in the 128x4 "
            "layout: layouts.grouped_128x4(a_scale, offsets) does it for linear ones"
        )
    return scale.view(torch.uint8).view(rows, cols)


def wrong_offsets(offsets: Any, rows: int, scale_rows: int) -> str:
    """Return what is wrong, unless the ranges are in order, in a, and have their scales."""
    if type(offsets) not in call.PLAIN or not offsets.is_cpu or offsets.dim() != 1:
        return "offsets is no vector on the CPU"
    ends = offsets.tolist()
    counts = [end - start for start, end in pairwise(ends)]
    if not counts or ends[0] < 0 or ends[-1] > rows or min(counts) < 0:
        return (
            f"offsets is {brief(ends)}, but must rise from 0 or more to at most {rows}, the rows "
            "of a; pass the first row of each expert and the end of the last"
        )
    needed = sum(round_up(count, ATOM_ROWS) for count in counts)
    if needed > scale_rows:
        return (
            f"a_scale has {scale_rows} rows, but the experts need {needed}: each has its rows "
            f"padded to a multiple of {ATOM_ROWS}; pad the scales of each expert, as "
            "layouts.grouped_128x4() does"
        )
    return ""


def _check_output(
    where: str,
    out: Tensor,
    dtype: torch.dtype,
    a: Tensor,
    n: int,
    inputs: dict[str, Tensor | None],
) -> None:
    checks.like(where, "out", out, (dtype,), "a", a, (*a.shape[:-1], n), output=True)
    for name, value in inputs.items():
        if value is not None:
            checks.no_overlap(where, "out", out, name, value)


def _mm_op(*given: Any) -> None:
    *inputs, residual, activation, out = given
    mm_fp4(*inputs, residual=residual, activation=activation, out=out)


def _fake_mm(a: Tensor, *given: Any) -> None:
    *inputs, out = given
    spec, _ = _check_mm(a, *inputs)
    _check_output("mm_fp4", out, inputs[5], a, spec.n, {})


def _grouped_op(*given: Any) -> None:
    grouped_mm_fp4(*given[:-1], out=given[-1])


def _fake_grouped(a: Tensor, *given: Any) -> None:
    *inputs, out = given
    spec, _ = check_grouped("grouped_mm_fp4", a, *inputs)
    _check_output("grouped_mm_fp4", out, inputs[6], a, spec.n, {})


call.define(
    "mm_fp4",
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha, str fmt, "
    "ScalarType out_dtype, Tensor? bias, Tensor? residual, str activation, Tensor! out) -> ()",
    _mm_op,
    _fake_mm,
)
call.define(
    "grouped_mm_fp4",
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor offsets, Tensor? alpha, str fmt, "
    "ScalarType out_dtype, Tensor! out) -> ()",
    _grouped_op,
    _fake_grouped,
)
