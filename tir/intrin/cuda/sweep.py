"""CUDA intrinsic of the scale sweep: one thread picks the best of 126 candidates for its block.

The *impl* calls ``bs_sweep_pick`` of ``native/sweep.cuh``, which skips most candidates
where the table's flag says that they are the default ones, and evaluates all of them elsewhere.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T

from blockscale.specs import DTYPE_SUFFIX
from blockscale.tir.common import i64
from blockscale.tir.intrin.cuda.blocks import CLASS, HINTS, call, load, local
from blockscale.tir.intrin.operands import Operand, describe, intrinsic
from blockscale.tir.quant.scale_sweep import CANDIDATES, COLUMNS, error_of, fused, magnitude

BLOCK = 16
"""Weights of a block: the device function keeps them in registers."""

UNROLLS = (8, 4, 2, 1)
"""Candidates of the first octave whose losses are computed together, best on an H200 first."""

HEADER = '#include "sweep.cuh"\n'
"""What declares the device function; nvcc looks for it in blockscale/native."""


@intrinsic
def pick(dtype: str, unroll: int) -> str:
    """Register and name: index and loss of the best candidate, weights in registers.

    ``trial`` is scratch.  ``least`` of the impl may be off by up to 2^-15 where the table's flag is
    set; then there are no candidates but these, and nobody reads it.
    """
    size, columns, one, two = i64(BLOCK), i64(COLUMNS), i64(1), i64(2)
    function = f"bs_sweep_pick<{CLASS.get(dtype, 'BsF32')}, {unroll}>"

    operands = (
        local("raw", (size,), dtype),
        Operand("table", (two, columns), "float32", scope="shared"),
        local("index", (one,), "int32", "w"),
        local("least", (one,), "float32", "w"),
        local("trial", (two,), "float32", "w"),
    )

    @T.inline
    def desc(raw, table, index, least, trial):
        index[0] = T.int32(0)
        least[0] = tirx.infinity("float32")
        for k in T.serial(i64(CANDIDATES)):
            trial[0] = T.float32(0)
            for e in T.serial(size):
                trial[1] = magnitude(raw[e]) / table[0, k]
                trial[1] = error_of(raw[e], trial[1], table[0, k])
                trial[0] = fused(trial[1], trial[1], trial[0])
            index[0] = T.Select(trial[0] < least[0], T.Cast("int32", k), index[0])
            least[0] = T.Select(trial[0] < least[0], trial[0], least[0])

    def impl(
        raw: T.Buffer, table: T.Buffer, index: T.Buffer, least: T.Buffer, trial: T.Buffer
    ) -> PrimExpr:
        made = (index.access_ptr("w"), least.access_ptr("w"))
        return call(function, *made, raw.access_ptr("r"), table.access_ptr("r"), header=HEADER)

    return describe(f"cuda_sweep_pick_{dtype}_u{unroll}", operands, desc, impl)


def register_all() -> None:
    """Register what traces of the sweep may name."""
    for dtype in DTYPE_SUFFIX:
        load(dtype, BLOCK, HINTS[1])
        for unroll in UNROLLS:
            pick(dtype, unroll)
