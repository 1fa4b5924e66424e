"""CUDA intrinsic of the scale sweep: one thread picks the best of 126 candidates for its block.

The *impl* calls ``bs_sweep_pick`` of ``native/sweep.cuh``, which skips most candidates
where the table's flag says that they are the default ones, and evaluates all of them elsewhere.
"""

from __future__ import annotations

from functools import cache

from tvm import tirx
from tvm.script import tirx as T

from blockscale.specs import DTYPE_SUFFIX
from blockscale.tir.common import i64
from blockscale.tir.intrin.cuda.blocks import CLASS, HINTS, call, load, register
from blockscale.tir.quant.scale_sweep import CANDIDATES, COLUMNS, error_of, fused, magnitude

BLOCK = 16
"""Weights of a block: the device function keeps them in registers."""

UNROLLS = (8, 4, 2, 1)
"""Candidates of the first octave whose losses are computed together, best on an H200 first."""

HEADER = '#include "sweep.cuh"\n'
"""What declares the device function; nvcc looks for it in blockscale/native."""


@cache
def pick(dtype: str, unroll: int) -> str:
    """Register and name: index and loss of the best candidate, weights in registers.

    ``trial`` is scratch.  ``least`` of the impl may be off by up to 2^-15 where the table's flag is
    set; then there are no candidates but these, and nobody reads it.
    """
    size, columns, one, two = i64(BLOCK), i64(COLUMNS), i64(1), i64(2)
    function = f"bs_sweep_pick<{CLASS.get(dtype, 'BsF32')}, {unroll}>"

    @T.prim_func(s_tir=True)
    def desc(block: T.handle, rows: T.handle, winner: T.handle, best: T.handle, scratch: T.handle):
        raw = T.match_buffer(block, (size,), dtype, offset_factor=1, scope="local")
        table = T.match_buffer(rows, (two, columns), "float32", offset_factor=1, scope="shared")
        index = T.match_buffer(winner, (one,), "int32", offset_factor=1, scope="local")
        least = T.match_buffer(best, (one,), "float32", offset_factor=1, scope="local")
        trial = T.match_buffer(scratch, (two,), "float32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(raw[0:size], table[0:two, 0:columns])
            T.writes(index[0:one], least[0:one], trial[0:two])
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

    @T.prim_func(s_tir=True)
    def impl(block: T.handle, rows: T.handle, winner: T.handle, best: T.handle, scratch: T.handle):
        raw = T.match_buffer(block, (size,), dtype, offset_factor=1, scope="local")
        table = T.match_buffer(rows, (two, columns), "float32", offset_factor=1, scope="shared")
        index = T.match_buffer(winner, (one,), "int32", offset_factor=1, scope="local")
        least = T.match_buffer(best, (one,), "float32", offset_factor=1, scope="local")
        trial = T.match_buffer(scratch, (two,), "float32", offset_factor=1, scope="local")
        with T.sblock("root"):
            T.reads(raw[0:size], table[0:two, 0:columns])
            T.writes(index[0:one], least[0:one], trial[0:two])
            T.evaluate(
                call(
                    function,
                    index.access_ptr("w"),
                    least.access_ptr("w"),
                    raw.access_ptr("r"),
                    table.access_ptr("r"),
                    header=HEADER,
                )
            )

    return register(f"cuda_sweep_pick_{dtype}_u{unroll}", desc, impl)


def register_all() -> None:
    """Register what traces of the sweep may name."""
    for dtype in DTYPE_SUFFIX:
        load(dtype, BLOCK, HINTS[1])
        for unroll in UNROLLS:
            pick(dtype, unroll)
