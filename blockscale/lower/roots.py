"""Quotients and roots that a schedule wants without branches: ``native/roots.cuh``."""

from __future__ import annotations

from functools import partial
from math import frexp
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.s_tir.stmt import SBlock
from tvm.tirx import PrimFunc

from blockscale.schedules.gpu_steps import BRANCH_FREE

LARGEST = 2.0**24
"""Divisors that are constants are smaller, and integers: as text they are exact."""

_call = partial(cuda_func_call, source_code='#include "roots.cuh"\n', return_type="float32")


def branch_free(func: PrimFunc) -> PrimFunc:
    """Return ``func``, in its blocks with `BRANCH_FREE` what `quotient` makes: the same bits."""
    return func.with_body(tvm_ffi.structural_map(func.body, (SBlock, _block)))


def _block(block: Any) -> Any:
    if BRANCH_FREE not in block.annotations:
        return block
    return SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        tvm_ffi.structural_map(block.body, (tirx.Div, quotient)),
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        {key: value for key, value in block.annotations.items() if key != BRANCH_FREE},
    )


def quotient(node: Any) -> Any:
    """Return ``1 / sqrt(x)`` or ``x / integer`` as a call or a product; others as they are."""
    if str(node.ty) != "float32":
        return node
    by = node.b
    if isinstance(by, tirx.FloatImm) and by.value.is_integer() and 0 < by.value < LARGEST:
        if frexp(by.value)[0] == 0.5:  # a power of two: the product is rounded as the quotient
            return node.a * tirx.FloatImm("float32", 1 / by.value)
        return _call("bs_over", node.a, tirx.FloatImm("float64", by.value))
    inverse = isinstance(node.a, tirx.FloatImm) and node.a.value == 1.0
    if inverse and getattr(getattr(by, "op", None), "name", "") == "tirx.sqrt":
        return _call("bs_inverse_root", by.args[0])
    return node
