"""INT4 weights dequantised: out[e, k, n] = round(q * scale[e, k // group, n] + zero[..]).

q is the code that the layout's index map finds for (e, k, n), see `blockscale.tir.int4.mm`; a zero
that is a point gives (q + (8 - zero)) * scale.  All is float32 until the one rounding.
"""

from __future__ import annotations

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.specs.int4 import Int4Dequantize
from blockscale.tir import formats
from blockscale.tir.common import fix_shape, i64, keep_params
from blockscale.tir.int4.forms import MAPS
from blockscale.tir.int4.mm import code_value


def int4_dequantize(spec: Int4Dequantize, experts: int | None = None) -> PrimFunc:
    """Return the kernel ``(packed[E, K * N / 2], scale, zero) -> out[E, K, N]``; None: any E."""
    N, K, G, group, two = map(i64, (spec.n, spec.k, spec.groups, spec.group, 2))
    size, layout = i64(spec.k * spec.n // 2), MAPS[spec.layout]

    def place(e, k, n):
        return layout.place((i64(0), k, n), (1, K, N))

    def value(packed, scale, zero, e, k, n):
        at = place(e, k, n)
        code = code_value(packed[e, at // two], at, layout.flip)
        if spec.zero == "point":
            code = code + (T.float32(8) - zero[e, k // group, n])
        product = code * scale[e, k // group, n]
        return product + zero[e, k // group, n] if spec.zero == "term" else product

    @T.prim_func(s_tir=True)
    def main(
        packed_handle: T.handle,
        scale_handle: T.handle,
        zero_handle: T.handle,
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        experts = T.int64()
        packed = T.match_buffer(packed_handle, (experts, size), "uint8")
        scale = T.match_buffer(scale_handle, (experts, G, N), "float32")
        zero = T.match_buffer(zero_handle, (experts, G, N), "float32")
        out = T.match_buffer(out_handle, (experts, K, N), spec.dtype)
        for e, k, m, h in T.grid(experts, K, N // two, two):
            with T.sblock("dequantize"):
                ve, vk, vm, vh = T.axis.remap("SSSS", [e, k, m, h])
                out[ve, vk, vm * two + vh] = formats.round_to(
                    spec.dtype, value(packed, scale, zero, ve, vk, vm * two + vh)
                )

    func = keep_params(main, [param.name for param in spec.params()])
    if experts is None:
        return func
    fixed = fix_shape(func, "packed", (experts, spec.k * spec.n // 2))
    return fixed
