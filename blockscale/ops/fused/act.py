"""The torch functions that apply an activation and quantise: see `blockscale.ops.fused`."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch

from blockscale.base.formats import FUSED, QUANTIZED
from blockscale.base.sizes import round_up
from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import FP4, SCALE_DTYPES, SCALE_FORMAT, padded_shape
from blockscale.specs import ActQuantize, Quantize

Tensor = torch.Tensor

_SCHEMA = (
    "(Tensor input, Tensor? mask, Tensor! y_fp4, Tensor! block_scale, Tensor? global_scale, "
    "SymInt block_size, str? scale_format, str layout, bool? enable_pdl, float[] scalars) -> ()"
)
_FI_SCHEMA = _SCHEMA.replace("Tensor? global_scale", "Tensor!? row_scale, Tensor? global_scale")
_FI_SCHEMA = _FI_SCHEMA.replace("scalars)", "scalars, str scaling, str search)")
LAYOUTS = ("linear", "128x4", "8x4")


class ActOp(call.Op[tuple[Tensor, ...]]):
    """One of the functions that quantise activations; with its operator.

    Its options are (block_size, scale_format, layout, enable_pdl), given are (input, mask, y_fp4,
    block_scale, global_scale, scalars); see `silu_and_mul_fp4quant`.  FlashInfer's may have two
    more options, scaling and search of `ActQuantize`, and a third result, the scales of rows.

    Attributes:
        activation: see `ActQuantize`.
        grouped: whether the input is [experts, rows, ...], with a mask and a scale per expert.
        convention: what the global scale means.
        codes: the dtype of codes that are allocated.
        flat: whether scales in a tiled layout are allocated with one dimension.
        names: what errors call input and codes.
    """

    def __init__(
        self,
        name: str,
        activation: str,
        grouped: bool = False,
        convention: str = "divide",
        codes: torch.dtype = FP4,
        flat: bool = True,
        names: tuple[str, str] = ("input", "y_fp4"),
    ) -> None:
        super().__init__(name)
        self.activation = activation
        self.grouped = grouped
        self.convention = convention
        self.codes = codes
        self.flat = flat
        self.names = names
        plain = convention == "divide"
        call.define(name, _SCHEMA if plain else _FI_SCHEMA, self.operate)

    def operate(self, *arguments: Any) -> None:
        """Run the operator, or check its arguments where they have no data."""
        row: list[Tensor] = []
        more: tuple[str, ...] = ()
        if self.convention != "divide":
            row = [tensor for tensor in arguments[4:5] if tensor is not None]
            arguments, more = (*arguments[:4], *arguments[5:-2]), arguments[-2:]
        *tensors, block_size, chosen, layout, enable_pdl, scalars = arguments
        options = block_size, chosen, layout, enable_pdl, *more
        given = *tensors, tuple(scalars), *row
        if checks.has_data():
            self.run(options, given)
        else:
            self.spec(options, given)
            self.check_tensors(options, given)

    def recorded(self, options: Any, given: Any) -> tuple[Tensor, ...]:
        """Return the results of the operator."""
        block_size, chosen, *others = options
        input, mask, y_fp4, _, global_scale, scalars, *_ = given
        chosen = checks.scale_format(self.name, block_size, chosen)
        options = block_size, chosen, *others
        # Inductor (torch 2.13) cannot allocate float4_e2m1fn_x2; it can view bytes as such.
        codes, scale, *row = self.outputs(options, given, torch.uint8)
        tensors: list[Tensor | None] = [input, mask, codes, scale]
        more: tuple[str, ...] = ()
        if self.convention != "divide":
            tensors.append(row[0] if row else None)
            more = _more(options)
        call.operator(self.name)(*tensors, global_scale, *options[:4], list(scalars), *more)
        return codes.view(self.codes) if y_fp4 is None else codes, scale, *row

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        """Return what the kernel takes."""
        row: list[Tensor]
        x, mask, codes, scale, g, scalars, *row = given
        if codes is None or scale is None:
            codes, scale, *row = self.outputs(options, given, self.codes)
        rows = scale
        if options[2] != "linear" and getattr(scale, "ndim", 0) == 1:
            rows = checks.tiles(scale, round_up(self.sizes(x)[1] // options[0], 4))
        if not self.grouped:
            given = (x, g, *scalars, codes, rows) if scalars else (x, g, codes, rows)
            return (*given, *row), (codes, scale, *row)
        mask = _full_mask(x) if mask is None else mask
        return (x, mask, g, *scalars, codes, rows), (codes, scale)

    def check(self, options: Any, given: Any) -> Checked:
        """Return the call with flattened rows, but for experts."""
        spec = self.spec(options, given)
        x, mask, _, _, g, scalars, *_ = given
        codes, scale, *row = self.outputs(options, given, self.codes)
        self.check_tensors(options, (x, mask, codes, scale, g, scalars, *row))
        lead, cols = self.sizes(x)
        flat = lead if self.grouped else (prod(lead),)
        shape: tuple[int, ...] = (*flat, cols // options[0])
        arguments: list[Any] = [x.view(*flat, x.shape[-1])]
        if self.grouped:
            arguments.append(_full_mask(x) if mask is None else mask)
            shape = tuple(scale.shape)
        elif options[2] != "linear":
            shape = _padded(flat[0], shape[-1], options[2])
        if g is not None and not self.grouped:
            g = g.reshape(-1)
        arguments += [g, *map(float, scalars), codes.view(*flat, cols // 2), scale.view(shape)]
        return Checked(spec, (*arguments, *row), (codes, scale, *row), options[3])

    def sizes(self, x: Tensor) -> tuple[tuple[int, ...], int]:
        """Return the leading dimensions of ``x``, and the columns of what is quantised."""
        *lead, cols = x.shape
        return tuple(lead), cols if self.activation == "none" else cols // 2

    def scale_shapes(
        self, lead: tuple[int, ...], blocks: int, layout: str
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shapes that scales may have, the one that is allocated first."""
        if self.grouped:
            return ((lead[0], *_padded(lead[1], blocks, layout)),)
        if layout == "linear":
            return ((*lead, blocks),)
        padded = _padded(prod(lead), blocks, layout)
        flat = (padded[0] * padded[1],)
        return (flat, padded) if self.flat else (padded, flat)

    def outputs(self, options: Any, given: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return codes, scales and, of "token", those of rows: given ones, or new ones.

        ``dtype``: of new codes.
        """
        block_size, chosen, layout, *_ = options
        input, _, y_fp4, block_scale, _, _, *row = given
        lead, cols = self.sizes(input)
        if y_fp4 is None:
            y_fp4 = input.new_empty((*lead, cols // 2), dtype=dtype)
        if block_scale is None:
            dtype = SCALE_DTYPES[chosen or SCALE_FORMAT[block_size]][0]
            shape = self.scale_shapes(lead, cols // block_size, layout)[0]
            block_scale = input.new_empty(shape, dtype=dtype)
        if _more(options)[0] != "token":
            return y_fp4, block_scale
        if not row:
            row = [input.new_empty((prod(lead),), dtype=torch.float32)]
        return y_fp4, block_scale, row[0]

    def spec(self, options: Any, given: Any) -> ActQuantize | Quantize:
        """Return the spec of a call after the checks of its options and of ``input``."""
        where, (block, chosen, layout, *_) = self.name, options
        chosen = checks.scale_format(where, block, chosen)
        checks.choice(where, "layout", layout, LAYOUTS)
        for name, value in zip(("alpha", "beta", "limit"), given[5], strict=False):
            checks.number(where, name, value, 0 if name == "limit" else -inf)
        source = self.names[0]
        bytes_too = self.convention != "divide" and self.activation == "none"
        dtypes = (*checks.SIXTEEN_BIT, torch.float8_e4m3fn) if bytes_too else checks.SIXTEEN_BIT
        x = checks.tensor(where, source, given[0], dtypes)
        if self.grouped and x.dim() != 3:
            raise ValueError(
                f"{where}: {source} has shape {list(x.shape)}, but must have 3 dimensions, "
                "[experts, rows, columns]; reshape it"
            )
        cols, halves = int(x.shape[-1]), 1 if self.activation == "none" else 2
        if cols % (halves * block):
            kind = "two halves of a multiple" if halves == 2 else "a multiple"
            raise ValueError(
                f"{where}: {source} has {cols} columns, but must have {kind} of {block}, the block "
                f"size; pad the rows to {round_up(cols, halves * block)}"
            )
        dtype = checks.dtype_name(x.dtype)
        name = FUSED[block, chosen].name
        plain = self.activation == "none" and self.convention == "divide" and not self.grouped
        if plain and name in QUANTIZED and layout != "8x4":
            return Quantize(name, dtype, layout)
        shape = layout, self.grouped, self.convention
        return ActQuantize(self.activation, block, chosen, dtype, *shape, *options[4:])

    def check_tensors(self, options: Any, given: Any) -> None:
        """Check all tensors but ``input``, outputs included."""
        block, chosen, layout, *_ = options
        x, mask, codes, scale, g, _, *row = given
        lead, cols = self.sizes(x)

        where, (source, packed) = self.name, self.names
        if mask is not None:
            checks.like(where, "mask", mask, (torch.int32,), source, x, lead[:1])
        if self.grouped and g is not None:
            checks.like(where, "global_scale", g, (torch.float32,), source, x, lead[:1])
        elif g is not None and _more(options)[0] == "rows":
            rows = (prod(lead),)
            checks.like(where, "global_scale", g, (torch.float32,), source, x, rows)
        elif not self.grouped:
            checks.one_element(where, "global_scale", g, source, x)
        if row:
            rows = (prod(lead),)
            checks.like(where, "row_scale", row[0], (torch.float32,), source, x, rows, output=True)
        half, dtypes = (*lead, cols // 2), SCALE_DTYPES[chosen or SCALE_FORMAT[block]]
        checks.like(where, packed, codes, checks.PACKED, source, x, half, output=True)
        shapes = self.scale_shapes(lead, cols // block, layout)
        checks.like(where, "block_scale", scale, dtypes, source, x, *shapes, output=True)


def _more(options: tuple[Any, ...]) -> tuple[str, ...]:
    """Return scaling and search."""
    return options[4:] or ("one", "none")


def _full_mask(input: Tensor) -> Tensor:
    """Return the mask that says that every row is in use."""
    return torch.full((input.shape[0],), input.shape[1], dtype=torch.int32, device=input.device)


def _padded(rows: int, blocks: int, layout: str) -> tuple[int, int]:
    return padded_shape(rows, blocks, 8 if layout == "8x4" else 128)


_SILU = ActOp("silu_and_mul_fp4quant", "silu")
_GELU = ActOp("gelu_tanh_and_mul_fp4quant", "gelu_tanh")
_SWIGLU = ActOp("swiglu_fp4quant", "swiglu")
_GROUPED = ActOp("grouped_quantize", "none", grouped=True, codes=torch.uint8, names=("x", "packed"))
_GROUPED_SILU = ActOp("silu_and_mul_grouped_fp4quant", "silu", grouped=True)


def silu_and_mul_fp4quant(
    input: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``silu(gate) * up``, rounded once to input's dtype.

    Args:
        input: [..., 2 K] bfloat16 or float16, contiguous: gate, then up; K a multiple of
            block_size.
        y_fp4, block_scale, global_scale, block_size, scale_format, enable_pdl: see `ops.fused`.
        is_sf_swizzled_layout: write block_scale in the 128x4 layout.
    """
    options = block_size, scale_format, "128x4" if is_sf_swizzled_layout else "linear", enable_pdl
    given = input, None, y_fp4, block_scale, global_scale, ()
    return _SILU.run(options, given)


def gelu_tanh_and_mul_fp4quant(
    input: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``gelu(gate) * up``, GELU in its tanh form.

    Arguments and results as in `silu_and_mul_fp4quant`.
    """
    options = block_size, scale_format, "128x4" if is_sf_swizzled_layout else "linear", enable_pdl
    given = input, None, y_fp4, block_scale, global_scale, ()
    return _GELU.run(options, given)


def swiglu_fp4quant(
    input: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
    *,
    alpha: float = 1.702,
    beta: float = 1.0,
    limit: float = 7.0,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of gpt-oss's SwiGLU.

    That is ``g * sigmoid(alpha * g) * (u + beta)`` of ``g = min(gate, limit)`` and
    ``u = clamp(up, -limit, limit)``.  Arguments and results as in `silu_and_mul_fp4quant`.
    """
    options = block_size, scale_format, "128x4" if is_sf_swizzled_layout else "linear", enable_pdl
    given = input, None, y_fp4, block_scale, global_scale, (alpha, beta, limit)
    return _SWIGLU.run(options, given)


def grouped_quantize(
    x: Tensor,
    mask: Tensor | None = None,
    global_scale: Tensor | None = None,
    packed: Tensor | None = None,
    block_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of the rows of every expert that are in use.

    Args:
        x: [experts, rows, K] bfloat16 or float16, contiguous; K a multiple of block_size.
        mask: [experts] int32, how many rows of each expert are in use, 0 to rows; None: all (a
            mask made for this call, by a kernel of its own).
        global_scale: [experts] float32 that divide x before it is quantised; None: 1.
        packed: output, [experts, rows, K / 2], uint8 where it is allocated, as by `quantize`; rows
            that are not in use are not written.
        block_scale: output, [experts, ceil_to(rows, 128), ceil_to(K / block_size, 4)], the 128x4
            layout of each expert; scales of rows that are not in use are written as zero.
        block_size, scale_format, enable_pdl: see `ops.fused`.
    """
    options = block_size, scale_format, "128x4", enable_pdl
    given = x, mask, packed, block_scale, global_scale, ()
    return _GROUPED.run(options, given)


def silu_and_mul_grouped_fp4quant(
    input: Tensor,
    mask: Tensor | None = None,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    enable_pdl: bool | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``silu(gate) * up`` of every expert's rows in use.

    Args:
        input: [experts, rows, 2 K] bfloat16 or float16, contiguous: gate, then up.
        y_fp4: output, [experts, rows, K / 2]; rows that are not in use are not written.
        mask, block_scale, global_scale: as in `grouped_quantize`.
        block_size, scale_format, enable_pdl: see `ops.fused`.
    """
    options = block_size, scale_format, "128x4", enable_pdl
    given = input, mask, y_fp4, block_scale, global_scale, ()
    return _GROUPED_SILU.run(options, given)
