"""CUDA intrinsic of Edge-LLM's GEMVs: 16 rows of a thread's columns, codes in registers.

The *impl* calls ``bs_edge_dot`` of ``blockscale/lower/native/edgellm.cuh``.
"""

from __future__ import annotations

from functools import cache

from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.edgellm_index import BLOCK
from blockscale.tir.common import i64
from blockscale.tir.edgellm.passes import code_value
from blockscale.tir.intrin.cuda.blocks import HINTS, call, load, register

HEADER = '#include "edgellm.cuh"\n'
"""What declares the device function; nvcc looks for it in blockscale/native."""


@cache
def dot(columns: int) -> str:
    """Register and name: ``sums[c] += sum_k a[k] * e2m1(codes[k, c])``, 16 rows k."""
    C, half, K, two = i64(columns), i64(columns // 2), i64(BLOCK), i64(2)

    def function(body: bool) -> PrimFunc:
        @T.prim_func(s_tir=True)
        def step(sums: T.handle, a: T.handle, packed: T.handle):
            S = T.match_buffer(sums, (C,), "float32", offset_factor=1, scope="local")
            A = T.match_buffer(a, (K,), "float32", offset_factor=1, scope="local")
            P = T.match_buffer(packed, (K, half), "uint8", offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(S[0:C], A[0:K], P[0:K, 0:half])
                T.writes(S[0:C])
                if body:
                    T.evaluate(
                        call(
                            f"bs_edge_dot<{columns}>",
                            S.access_ptr("rw"),
                            P.access_ptr("r"),
                            A.access_ptr("r"),
                            header=HEADER,
                        )
                    )
                else:
                    for i, k in T.grid(C, K):
                        with T.sblock("dot"):
                            vi, vk = T.axis.remap("SR", [i, k])
                            S[vi] = S[vi] + A[vk] * code_value(P[vk, vi // two], vi)

        return step

    return register(f"cuda_edgellm_dot_x{columns}", function(False), function(True))


def register_all() -> None:
    """Register what traces of the GEMVs may name."""
    dot(16)
    for hint in HINTS:
        load("uint8", 8, hint)
        load("uint8", 16, hint)
