"""Steps that GPU schedules share: registers, intrinsics behind a bounds check, thread bindings."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.schedules.steps import last_loops

MAX_THREADS = 1024
"""Threads of a CTA that the hardware allows."""

WARP = 32

BRANCH_FREE = "blockscale.branch_free"
"""Annotation of a block whose quotients and roots are lowered without branches: `lower.roots`."""


def move(sch: Schedule, loop: LoopRV, *names: str) -> None:
    """Compute these blocks, each after what it reads, inside of ``loop``."""
    for name in names:
        sch.reverse_compute_at(sch.get_sblock(name), loop, preserve_unit_loops=True)


def in_registers(sch: Schedule, *names: str) -> None:
    """Keep what these blocks write in the registers of a thread."""
    for name in names:
        sch.set_scope(sch.get_sblock(name), 0, "local")


def last_loop(sch: Schedule, block: SBlockRV | str) -> LoopRV:
    """Return the innermost loop of ``block``."""
    found = sch.get_sblock(block) if isinstance(block, str) else block
    return last_loops(sch, found, 1)[0]


def tensorize(sch: Schedule, block: SBlockRV | str, intrinsic: str) -> None:
    """Map the innermost loop of ``block`` onto ``intrinsic``.

    TVM's tensorize fails on a block with a bounds check: a block around it takes the check.
    """
    found = sch.get_sblock(block) if isinstance(block, str) else block
    sch.blockize(sch.add_unit_loop(last_loop(sch, found)))
    sch.tensorize(last_loop(sch, found), intrinsic)


def tensorize_reduction(sch: Schedule, name: str, intrinsic: str) -> None:
    """Map the innermost, reducing loop of block ``name`` onto ``intrinsic``, its init apart."""
    block = sch.get_sblock(name)
    sch.decompose_reduction(block, last_loop(sch, block))
    tensorize(sch, sch.get_sblock(f"{name}_update"), intrinsic)


def bind(sch: Schedule, loops: Sequence[LoopRV], axes: Sequence[str]) -> None:
    """Bind each loop to its thread axis."""
    for loop, axis in zip(loops, axes, strict=True):
        sch.bind(loop, axis)
