"""GPU schedules of the scale sweep: a block a thread, the table of scales in shared memory."""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV

from blockscale.schedules.gpu_steps import bind, in_registers, last_loop, move, tensorize
from blockscale.schedules.steps import Choose, Sketch
from blockscale.specs import ScaleSweep
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.cuda import sweep as cuda_sweep
from blockscale.tir.quant.scale_sweep import REGISTER_BLOCK

THREADS = (128, 256)
"""Threads of a CTA, which share a table; 48 registers a thread leave 1280 threads on an SM."""

PARTS = (1, 2, 4, 8)
"""Blocks of a thread, one after the other, so that the table is made less often."""


def scale_sweep_sketches(spec: ScaleSweep) -> list[Sketch]:
    """Sketches of `blockscale.tir.scale_sweep_threads`: how far the intrinsic is unrolled.

    Blocks of any size but 16 evaluate every candidate.
    """
    if spec.block_size != cuda_sweep.BLOCK:
        return [partial(scale_sweep, spec=spec, unroll=None)]
    return [partial(scale_sweep, spec=spec, unroll=unroll) for unroll in cuda_sweep.UNROLLS]


def scale_sweep(sch: Schedule, choose: Choose, spec: ScaleSweep, unroll: int | None) -> None:
    """Load a block, pick a candidate, store; ``unroll`` None: plain loops over the candidates."""
    blocks = sch.get_loops(sch.get_sblock("pick"))[0]
    threads = choose(sch, list(THREADS), 256)
    cta, _, thread = sch.split(blocks, [None, choose(sch, list(PARTS), 2), threads])
    kept = spec.block_size <= REGISTER_BLOCK
    if kept:
        sch.compute_at(sch.get_sblock("load"), thread, preserve_unit_loops=True)
        in_registers(sch, "load")
    move(sch, thread, "more", "best_amax")
    for name in ("pick", "more"):
        for output in range(3):
            sch.set_scope(sch.get_sblock(name), output, "local")
    _make_table(sch, cta, threads)
    bind(sch, (cta, thread), ("blockIdx.x", "threadIdx.x"))
    if unroll is not None:
        tensorize(sch, "load", cuda_blocks.load(spec.dtype, spec.block_size, cuda_blocks.HINTS[1]))
        pick = sch.get_sblock("pick")
        sch.blockize(sch.add_unit_loop(pick))  # takes the bounds check, which tensorize refuses
        sch.tensorize(pick, cuda_sweep.pick(spec.dtype, unroll))
    elif kept:
        sch.unroll(last_loop(sch, "load"))


def _make_table(sch: Schedule, cta: LoopRV, threads: ExprRV) -> None:
    """Each thread of a CTA makes some entries and checks some candidates."""
    for name in ("scale", "others"):
        sch.compute_at(sch.get_sblock(name), cta, preserve_unit_loops=True)
    sch.set_scope(sch.get_sblock("scale"), 0, "shared")
    in_registers(sch, "others")
    row, column = sch.get_loops(sch.get_sblock("scale"))[-2:]
    _, entry = sch.split(sch.fuse(row, column), [None, threads])
    _, candidate = sch.split(last_loop(sch, "others"), [None, threads])
    for loop in (entry, candidate):
        sch.bind(loop, "threadIdx.x")
