"""GPU schedules of Edge-LLM's GEMVs: what `edgellm.passes_threads` says, bound to threads."""

from __future__ import annotations

from functools import partial

from tvm.s_tir import Schedule

from blockscale.schedules.gpu_steps import bind, in_registers, tensorize
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs.edgellm import EdgeDown, EdgeUp
from blockscale.tir.edgellm.passes_threads import COLUMNS, PARTS, groups
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from blockscale.tir.intrin.cuda import edgellm as cuda_edgellm

COMBINE_THREADS = 256
"""Threads of a CTA that adds up slots, a column each."""

LOADS = ("", "_1", "_2")
"""The loads before the first block, and of both blocks of a trip, as TVM numbers them."""


def sketches(spec: EdgeUp | EdgeDown) -> list[Sketch]:
    """Sketches of `edgellm.passes_threads`: weights streamed, and with default caching."""
    return [partial(_gemv, spec=spec, hint=hint) for hint in reversed(cuda_blocks.HINTS)]


def _gemv(sch: Schedule, choose: Choose, spec: EdgeUp | EdgeDown, hint: str) -> None:
    """A strip of a slot a CTA; groups along K by parts of the strip are its threads."""
    threads = groups(spec.rows) * PARTS
    axes = ("blockIdx.z", "blockIdx.y", "blockIdx.x")
    bind(sch, sch.get_loops(sch.get_sblock("task")), axes)
    bind(sch, [sch.fuse(*last_loops(sch, sch.get_sblock("thread"), 2))], ["threadIdx.x"])
    for name, count in (("share", 2), ("store", 1)):
        loops = last_loops(sch, sch.get_sblock(name), count)
        _, thread = sch.split(sch.fuse(*loops[:2]) if count > 1 else loops[0], [None, threads])
        bind(sch, [thread], ["threadIdx.x"])
    for name in ("meet", "put"):
        sch.set_scope(sch.get_sblock(name), 0, "shared")
    in_registers(sch, "clear", "load_x", "load_codes", "load_scales")
    in_registers(sch, "act", "act_1", "dot", "dot_1", "add")
    sch.unroll(last_loops(sch, sch.get_sblock("add"), 1)[0])
    coded = isinstance(spec, EdgeUp) and spec.dtype == "nvfp4"
    if coded:
        in_registers(sch, "load_side")
    for suffix in LOADS:
        x = ("uint8", 8) if coded else (spec.dtype if isinstance(spec, EdgeUp) else "float32", 16)
        tensorize(sch, f"load_x{suffix}", cuda_blocks.load(*x, "BS_KEEP"))
        codes = cuda_blocks.load("uint8", COLUMNS // 2, hint)
        sch.unroll(last_loops(sch, sch.get_sblock(f"load_codes{suffix}"), 2)[0])
        tensorize(sch, f"load_codes{suffix}", codes)
        tensorize(sch, f"load_scales{suffix}", cuda_blocks.load("uint8", COLUMNS, hint))
    for suffix in LOADS[:2]:
        for name in ("act", "scale"):
            sch.unroll(last_loops(sch, sch.get_sblock(f"{name}{suffix}"), 1)[0])
        dot = sch.get_sblock(f"dot{suffix}")
        column = last_loops(sch, dot, 2)[0]
        init = sch.decompose_reduction(dot, column)
        sch.unroll(last_loops(sch, init, 1)[0])
        sch.tensorize(last_loops(sch, dot, 2)[0], cuda_edgellm.dot(COLUMNS))
    for name in ("clear", "meet"):
        sch.unroll(last_loops(sch, sch.get_sblock(name), 1)[0])
    if isinstance(spec, EdgeDown):
        _combine(sch)


def _combine(sch: Schedule) -> None:
    """A column a thread, its slots in turn."""
    in_registers(sch, "combine")
    t, n = sch.get_loops(sch.get_sblock("out"))
    group, thread = sch.split(sch.fuse(t, n), [None, COMBINE_THREADS])
    bind(sch, (group, thread), ("blockIdx.x", "threadIdx.x"))
