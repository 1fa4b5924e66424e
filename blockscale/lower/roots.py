"""Quotients and roots of TensorIR that are lowered without branches: ``native/roots.cuh``."""

from __future__ import annotations

from functools import partial
from math import frexp
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.tirx import PrimFunc

LARGEST = 2.0**24
"""Divisors that are constants are smaller, and integers: as text they are exact."""

_call = partial(cuda_func_call, source_code='#include "roots.cuh"\n', return_type="float32")


def branch_free(func: PrimFunc) -> PrimFunc:
    """Return ``func`` with the float32 quotients that `quotient` knows as calls: the same bits."""
    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.Div, quotient)))


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
