"""CUDA intrinsic of Edge-LLM's GEMVs: 16 rows of a thread's columns, codes in registers.

The *impl* calls ``bs_edge_dot`` of ``blockscale/lower/native/edgellm.cuh``.
"""

from __future__ import annotations

from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.base.edgellm_index import BLOCK
from blockscale.tir.common import i64
from blockscale.tir.edgellm.passes import code_value
from blockscale.tir.intrin.cuda.blocks import HINTS, call, load, local
from blockscale.tir.intrin.operands import describe, intrinsic

HEADER = '#include "edgellm.cuh"\n'
"""What declares the device function; nvcc looks for it in blockscale/native."""


@intrinsic
def dot(columns: int) -> str:
    """Register and name: ``sums[c] += sum_k a[k] * e2m1(codes[k, c])``, 16 rows k."""
    C, half, K, two = i64(columns), i64(columns // 2), i64(BLOCK), i64(2)

    @T.inline
    def desc(S, A, P):
        for i, k in T.grid(C, K):
            with T.sblock("dot"):
                vi, vk = T.axis.remap("SR", [i, k])
                S[vi] = S[vi] + A[vk] * code_value(P[vk, vi // two], vi)

    def impl(S: T.Buffer, A: T.Buffer, P: T.Buffer) -> PrimExpr:
        args = S.access_ptr("rw"), P.access_ptr("r"), A.access_ptr("r")
        return call(f"bs_edge_dot<{columns}>", *args, header=HEADER)

    operands = (
        local("S", (C,), "float32", "rw"),
        local("A", (K,), "float32"),
        local("P", (K, half), "uint8"),
    )
    return describe(f"cuda_edgellm_dot_x{columns}", operands, desc, impl)


def register_all() -> None:
    """Register what traces of the GEMVs may name."""
    dot(16)
    for hint in HINTS:
        load("uint8", 8, hint)
        load("uint8", 16, hint)
