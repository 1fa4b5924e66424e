"""Instructions that are not scalar, by prefix of their opcode.

A handler takes (gang, mask); where an instruction may have to wait it takes (gang, mask,
fragment) and returns True (done), False (not yet) or one key per warp (the gang must be split,
and each part tries again).  A module registers its builders when it is imported
(`core.register`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..reader import SIZES
from ..syntax import Instr
from . import (  # noqa: F401 - the import registers the handlers
    atomic,
    barrier,
    bulk,
    control,
    copy,
    launchcontrol,
    loadstore,
    matrix,
    mbarrier,
    tensor,
    tensoralloc,
    tensorcopy,
    tensormem,
    warp,
    wgmma,
)
from .core import Handler, find, may_wait

if TYPE_CHECKING:
    from ..program import Program

ASYNCHRONOUS = ("cp.", "mbarrier", "tcgen05", "wgmma", "st.async")
ELSEWHERE = {"global", "local", "param", "const"}  # state spaces that are not shared memory


@dataclass(frozen=True)
class Traits:
    """What a program uses, found before it runs; `granule` is the bytes of a shadow cell."""

    shared: bool
    tcgen05: bool
    asynchronous: bool
    granule: int
    cta_groups: dict[int, Instr]  # .cta_group of tcgen05 -> the first instruction with it

    @staticmethod
    def of(program: Program) -> Traits:
        """Return the traits of a program."""
        instrs = [i for u in program.units for i in u.everything]
        opcodes = {i.opcode for i in instrs}
        shared = any(place[0] == "shared" for place in program.places.values())
        tcgen05 = any(o.startswith("tcgen05") for o in opcodes)
        asynchronous = any(o.startswith(ASYNCHRONOUS) for o in opcodes)
        granule = min([16, *map(access_size, instrs)])
        groups: dict[int, Instr] = {}
        for ins in (i for i in instrs if i.opcode.startswith("tcgen05")):
            for mod in ins.mods:
                if mod.startswith("cta_group"):
                    groups.setdefault(int(mod[-1]), ins)
        return Traits(shared, tcgen05, asynchronous, granule, groups)


def access_size(ins: Instr) -> int:
    """Return the bytes of shared memory that an instruction touches at a time (16: or more)."""
    mods = ins.mods
    if ins.base in ("ld", "st", "atom", "red") and not ELSEWHERE & set(mods):
        size = next((SIZES[m] for m in reversed(mods) if m in SIZES), 16)
        count = next((int(m[1:]) for m in mods if m in ("v2", "v4", "v8")), 1)
        return min(size * count, 16)
    if ins.opcode.startswith("cp.async") and "bulk" not in ins.opcode:
        return 4
    if ins.opcode.startswith("tcgen05.alloc"):
        return 4
    if ins.opcode.startswith(("mbarrier", "stmatrix", "st.async")):
        return 8
    return 16


__all__ = ["Handler", "Traits", "find", "may_wait"]
