"""The torch functions that normalise rows and quantise them: see `blockscale.ops.fused`."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import is_grad_enabled

from blockscale.base.sizes import round_up
from blockscale.ops import call, checks
from blockscale.ops.call import Checked
from blockscale.ops.checks import FP4, SCALE_DTYPES, SCALE_FORMAT
from blockscale.specs import NormQuantize

Tensor = torch.Tensor
Tensors = tuple[torch.Tensor, ...]

MIN_HIDDEN = 64

# What is written has no default: torch 2.11 fails on arguments that are written and left out.
_SCHEMA = (
    "(Tensor input, Tensor weight, Tensor! y_fp4, Tensor! block_scale, "
    "Tensor!? block_scale_unswizzled, Tensor!? y_out, Tensor? global_scale=None, float eps=1e-06, "
    "SymInt block_size=16, str? scale_format=None, bool is_sf_swizzled_layout=False, "
    "bool output_both_sf_layouts=False, bool? enable_pdl=None) -> ()"
)
_ADD_SCHEMA = _SCHEMA.replace("Tensor weight", "Tensor! residual, Tensor weight")


class NormOp(call.Op[Tensors]):
    """One of the functions that normalise; with its operator.

    Its options are (block_size, scale_format, swizzled, both, enable_pdl, y_out is None,
    size of weight), given are (input, residual, weight, y_fp4, block_scale,
    unswizzled, y_out, global_scale, eps); see `add_rmsnorm_fp4quant`.

    Attributes:
        residual: whether it adds one.
        convention: what the global scale means.
    """

    def __init__(self, name: str, residual: bool, convention: str = "divide") -> None:
        super().__init__(name)
        self.residual = residual
        self.convention = convention
        call.define(name, _ADD_SCHEMA if residual else _SCHEMA, self.operate)

    def operate(self, input: Tensor, *given: Any) -> None:
        """Run the operator, or check its arguments where they have no data."""
        if self.residual:
            self._operate(input, *given)
        else:
            self._operate(input, None, *given)

    def _operate(
        self,
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        codes: Tensor,
        scale: Tensor,
        linear: Tensor | None,
        y_out: Tensor | None,
        global_scale: Tensor | None = None,
        eps: float = 1e-6,
        block_size: int = 16,
        chosen: str | None = None,
        swizzled: bool = False,
        both: bool = False,
        enable_pdl: bool | None = None,
    ) -> None:
        given = input, residual, weight, codes, scale, linear, y_out, global_scale, eps
        options = block_size, chosen, swizzled, both, enable_pdl, y_out is None, weight.numel()
        if checks.has_data():
            self.run(options, given)
        else:
            self.check_tensors(self.spec(options, given), given)

    def recorded(self, options: Any, given: Any) -> Tensors:
        """Return the results of the operator."""
        block_size, chosen, swizzled, both, enable_pdl, *_ = options
        input, residual, weight, y_fp4, block_scale, unswizzled, y_out, *others = given
        chosen = checks.scale_format(self.name, block_size, chosen)
        # Inductor (torch 2.13) cannot allocate float4_e2m1fn_x2; it can view bytes as such.
        codes, scale, linear = _outputs(
            *(input, y_fp4, block_scale, unswizzled, block_size, chosen, swizzled, both),
            torch.uint8,
        )
        call.operator(self.name)(
            *((input, residual, weight) if self.residual else (input, weight)),
            *(codes, scale, linear if both else None, y_out, *others),
            *(block_size, chosen, swizzled, both, enable_pdl),
        )
        if y_fp4 is None:
            codes = codes.view(FP4)
        return (codes, scale, linear) if both else (codes, scale)  # type: ignore[return-value]

    def ready(self, spec: Any, options: Any, given: Any) -> call.Ready:
        """Return what the kernel takes; a CUDA library takes flat scales, too."""
        x, residual, weight, codes, scale, linear, y_out, g, eps = given
        both = options[3]
        if linear is not None and not both:
            return None  # not to be written: an error in one convention
        grad = residual is not None and getattr(residual, "requires_grad", False)
        if (grad or weight.requires_grad) and is_grad_enabled():
            return None  # a CUDA library knows no autograd
        if codes is None or scale is None or (both and linear is None):
            codes, scale, linear = _outputs(x, codes, scale, linear, *options[:4])
        rows = scale
        if spec.layout != "linear" and not x.is_cuda:
            rows = checks.tiles(scale, round_up(spec.blocks, 4))
        more: tuple[Any, ...] = ()
        if residual is None:
            arguments: tuple[Any, ...] = x, weight, g, eps, codes, rows
        else:  # updated in place, it is named among the outputs, too: it is checked for overlaps
            arguments, more = (x, residual, weight, g, eps, codes, rows), (residual,)
        if y_out is not None:
            more = (y_out, *more)
        if both:
            return (*arguments, linear, *more), (codes, scale, linear)
        return arguments + more, (codes, scale)

    def check(self, options: Any, given: Any) -> Checked:
        """Return the call with flattened rows."""
        spec = self.spec(options, given)
        x, residual, weight, codes, scale, linear, y_out, g, eps = given
        codes, scale, linear = _outputs(x, codes, scale, linear, *options[:4])
        self.check_tensors(spec, (*given[:3], codes, scale, linear, y_out, g, eps))
        rows, both = prod(x.shape[:-1]), options[3]
        g = checks.one_element(self.name, "global_scale", g, "input", x)
        wide = rows, spec.hidden
        shape = rows, spec.blocks
        tiled = shape if spec.layout == "linear" else checks.padded_shape(*shape)
        arguments: list[Any] = [x.view(wide)]
        if self.residual:
            checks.no_overlap(self.name, "residual", residual, "input", x)
            arguments.append(residual.view(wide))
        arguments += [weight, g, float(eps), codes.view(rows, spec.hidden // 2), scale.view(tiled)]
        if both:
            arguments.append(linear.view(shape))  # type: ignore[union-attr]
        if y_out is not None:
            arguments.append(y_out.view(wide))
        if self.residual:
            arguments.append(residual.view(wide))
        result = (codes, scale, linear) if both else (codes, scale)
        return Checked(spec, tuple(arguments), result, options[4])

    def spec(self, options: Any, given: Any) -> NormQuantize:
        """Return the spec of a call after the checks of its options and of ``input``."""
        where, (block, chosen, swizzled, both, *_) = self.name, options
        input, *_, unswizzled, y_out, _, eps = given
        chosen = checks.scale_format(where, block, chosen)
        checks.number(where, "eps", eps, 0)
        x = checks.tensor(where, "input", input, checks.SIXTEEN_BIT)
        hidden = int(x.shape[-1])
        if hidden % block or hidden < MIN_HIDDEN:
            raise ValueError(
                f"{where}: hidden={hidden}, the last dimension of input, must be a multiple of "
                f"block_size={block} and at least {MIN_HIDDEN}; pad the rows to "
                f"{max(MIN_HIDDEN, round_up(hidden, block))}"
            )
        if unswizzled is not None and not both and self.convention == "divide":
            raise ValueError(
                f"{where}: block_scale_unswizzled is given, but is written only with "
                "output_both_sf_layouts=True; pass that, or leave it out"
            )
        layout = "both" if both else "128x4" if swizzled else "linear"
        dtype, y = checks.dtype_name(x.dtype), y_out is not None
        return NormQuantize(hidden, block, chosen, dtype, self.residual, layout, y, self.convention)

    def check_tensors(self, spec: NormQuantize, given: Any) -> None:
        """Check all tensors but ``input`` and ``global_scale``, outputs included."""
        x, residual, weight, codes, scale, linear, y_out, *_ = given
        lead, own = x.shape[:-1], (x.dtype,)
        dtypes, wide = SCALE_DTYPES[spec.scale_format], (*lead, spec.blocks)
        padded = checks.padded_shape(prod(lead), spec.blocks)

        def check(name: str, value: object, allowed: tuple[torch.dtype, ...], *shapes: Any) -> None:
            checks.like(self.name, name, value, allowed, "input", x, *shapes, output=True)

        if self.residual:
            checks.like(self.name, "residual", residual, own, "input", x, x.shape)
        checks.like(self.name, "weight", weight, own, "input", x, (spec.hidden,))
        check("y_fp4", codes, checks.PACKED, (*lead, spec.hidden // 2))
        if spec.layout == "linear":
            check("block_scale", scale, dtypes, wide)
        else:
            check("block_scale", scale, dtypes, (prod(padded),), padded)
        if spec.layout == "both":
            check("block_scale_unswizzled", linear, dtypes, wide)
        if y_out is not None:
            check("y_out", y_out, own, x.shape)


def _outputs(
    input: Tensor,
    y_fp4: Tensor | None,
    block_scale: Tensor | None,
    unswizzled: Tensor | None,
    block_size: int,
    scale_format: str | None,
    swizzled: bool,
    both: bool,
    fp4: torch.dtype = FP4,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, scales and, for both layouts, linear scales: those given, the others new."""
    *lead, hidden = input.shape
    dtype = SCALE_DTYPES[scale_format or SCALE_FORMAT[block_size]][0]
    wide = (*lead, hidden // block_size)
    if y_fp4 is None:
        y_fp4 = input.new_empty((*lead, hidden // 2), dtype=fp4)
    if block_scale is None:
        shape: tuple[int, ...] = wide
        if swizzled or both:
            shape = (prod(checks.padded_shape(prod(lead), wide[-1])),)
        block_scale = input.new_empty(shape, dtype=dtype)
    if unswizzled is None and both:
        unswizzled = input.new_empty(wide, dtype=dtype)
    return y_fp4, block_scale, unswizzled


_ADD = NormOp("add_rmsnorm_fp4quant", residual=True)
_NORM = NormOp("rmsnorm_fp4quant", residual=False)


def add_rmsnorm_fp4quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: Tensor | None = None,
    enable_pdl: bool | None = None,
    *,
    y_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and scales of ``rmsnorm(input + residual) * weight``; update residual.

    Args:
        input: [..., H] bfloat16 or float16, contiguous; H a multiple of block_size, 64 or more.
        residual: like input; input + residual is written to it, rounded to its dtype.
        weight: [H], dtype of input.
        y_fp4, block_scale, global_scale, block_size, scale_format, enable_pdl: see `ops.fused`.
        eps: added to the mean of squares.
        is_sf_swizzled_layout: write block_scale in the 128x4 layout.
        output_both_sf_layouts: write it in the 128x4 layout and the linear scales as well.
        block_scale_unswizzled: output, the linear scales if both layouts are written.
        y_out: output, like input: the norm itself, rounded, e.g. for a router.

    Returns:
        ``(y_fp4, block_scale)``, and block_scale_unswizzled as third with both layouts.
    """
    size = weight.numel() if isinstance(weight, Tensor) else None
    swizzled, both, plain = is_sf_swizzled_layout, output_both_sf_layouts, y_out is None
    options = block_size, scale_format, swizzled, both, enable_pdl, plain, size
    linear = block_scale_unswizzled
    given = input, residual, weight, y_fp4, block_scale, linear, y_out, global_scale, eps
    return _ADD.run(options, given)


def rmsnorm_fp4quant(
    input: Tensor,
    weight: Tensor,
    y_fp4: Tensor | None = None,
    block_scale: Tensor | None = None,
    global_scale: Tensor | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
    *,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: Tensor | None = None,
    y_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return FP4 codes and block scales of ``rmsnorm(input) * weight``.

    Arguments and results as in `add_rmsnorm_fp4quant`, without the residual.
    """
    size = weight.numel() if isinstance(weight, Tensor) else None
    swizzled, both, plain = is_sf_swizzled_layout, output_both_sf_layouts, y_out is None
    options = block_size, scale_format, swizzled, both, enable_pdl, plain, size
    linear = block_scale_unswizzled
    given = input, None, weight, y_fp4, block_scale, linear, y_out, global_scale, eps
    return _NORM.run(options, given)
