"""Calls of the kernels that reorder elements (`blockscale.specs.Relayout`), of bytes to bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockscale.ops import dispatch, torch_ops
from blockscale.specs import Relayout

Tensor = torch.Tensor

VECTOR_BYTES = 16
"""Of which CUDA kernels take addresses to be multiples."""


def relayout(source: Tensor, layout: str, shape: Sequence[int], inverse: bool = False) -> Tensor:
    """Return uint8 of ``shape``: the elements of ``source`` in the order of a layout, or back.

    Args:
        source: any dtype, contiguous: the plain tensor [(experts), rows, cols], or, for the way
            back, the bytes of the layout in any shape.
        layout: a name of `blockscale.specs.layout.LAYOUTS`.
        shape: of the result, the last axis in bytes; the kernel's rules are the caller's.
        inverse: from the layout to the plain tensor.
    """
    if dispatch.traced(source):
        made: Tensor = torch_ops.operator("relayout")(source, layout, list(shape), inverse)
        return made
    return _run(source, layout, shape, inverse)


def relayout_into(source: Tensor, out: Tensor, layout: str, inverse: bool = False) -> None:
    """Write to ``out``, contiguous bytes, what `relayout` returns."""
    if not out.numel():
        return
    given = source.detach().view(torch.uint8)
    if given.is_cuda and given.data_ptr() % VECTOR_BYTES:
        given = given.clone()
    spec = Relayout(layout, inverse)
    if inverse:
        given = given.view(spec.map.padded(out.shape) if spec.map.pads else out.shape)
    dispatch.kernel(spec, given.device)(given, out)


def _run(source: Tensor, layout: str, shape: Sequence[int], inverse: bool) -> Tensor:
    out = torch.empty(tuple(shape), dtype=torch.uint8, device=source.device)
    relayout_into(source, out, layout, inverse)
    return out


def _op(source: Tensor, layout: str, shape: Sequence[int], inverse: bool) -> Tensor:
    return _run(source, layout, shape, inverse)


def _fake(source: Tensor, layout: str, shape: Sequence[int], inverse: bool) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.uint8, device=source.device)


torch_ops.define("relayout", _op, _fake)
