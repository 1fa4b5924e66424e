"""The registry of handlers, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, NamedTuple

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_SIZE,
)
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.reader import SIZES
from blockscale.emulator.ptx.syntax import Imm, Instr, Mem, Operand, Reg, Sym

Handler = Callable[..., Any]
Build = Callable[[Operands, Instr], Handler]


class Builder(NamedTuple):
    """Who builds a handler; whether that may wait; the least and the most operands."""

    build: Build
    waits: bool
    least: int
    most: int


_BUILDERS: dict[str, Builder] = {}
ANY = (0, 99)  # the builder counts the operands itself


def register(
    *prefixes: str, waits: bool = False, operands: int | tuple[int, int] = ANY
) -> Callable[[Build], Build]:
    """Register a builder for opcodes that begin with a prefix (whole components)."""
    least, most = (operands, operands) if isinstance(operands, int) else operands

    def add(build: Build) -> Build:
        for prefix in prefixes:
            _BUILDERS[prefix] = Builder(build, waits, least, most)
        return build

    return add


def lookup(opcode: str) -> Builder | None:
    """Return the entry of the longest registered prefix."""
    text = opcode
    while text:
        if text in _BUILDERS:
            return _BUILDERS[text]
        cut = max(text.rfind("."), text.rfind("::"))
        text = text[:cut] if cut > 0 else ""
    return None


def find(ins: Instr) -> Build | None:
    """Return the builder of an instruction's handler, or None; the operands are counted."""
    entry = lookup(ins.opcode)
    if entry is None:
        return None
    count_operands(ins, entry.least, entry.most)
    return entry.build


def count_operands(ins: Instr, least: int, most: int) -> None:
    """Refuse an instruction with too few or too many operands."""
    number = len(ins.operands)
    if not least <= number <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise PtxError(f"{ins.opcode} has {number} operands and takes {wanted}; see PTX ISA 9.7")


def may_wait(ins: Instr) -> bool:
    """Return whether an instruction is a unit's tail because it may have to wait."""
    entry = lookup(ins.opcode)
    return entry is not None and entry.waits


# types ----------------------------------------------------------------------------------------
def type_of(ins: Instr) -> tuple[str, int]:
    """Return (NumPy dtype, bytes) of the last type modifier; 128-bit types give ("V16", 16)."""
    for mod in reversed(ins.mods):
        if mod in SIZES and mod != "pred":
            size = SIZES[mod]
            if size == 16:
                return "V16", 16
            kind = "i" if mod[0] == "s" else "u"
            return f"{kind}{size}", size
    raise PtxError(f"{ins.opcode} has no type")


def known_modifiers(ins: Instr, allowed: Container[str]) -> None:
    """Refuse modifiers that are no type, state space, vector, cache hint, nor `allowed`."""
    for mod in ins.mods:
        if mod in allowed or mod in SIZES or mod in SPACES or mod in VECTORS:
            continue
        if not mod.startswith(("L1::", "L2::")):
            raise PtxError(f"{ins.opcode}: {ins.base} has no modifier .{mod}; check its spelling")


def vector_of(ins: Instr) -> int:
    """Return 1, or the length of the .v modifier."""
    return next((VECTORS[m] for m in ins.mods if m in VECTORS), 1)


VECTORS = {"v2": 2, "v4": 4, "v8": 8}
SPACES = {
    "global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry",
    "param::func", "const",
}  # fmt: skip


def space_of(ins: Instr) -> str:
    """Return the state space of a memory instruction; "" is generic."""
    space = next((m for m in ins.mods if m in SPACES), "")
    return "param" if space.startswith("param") else space


# addresses ------------------------------------------------------------------------------------
def address(c: Operands, op: Operand, dtype: str = "u8") -> Callable[[Gang], np.ndarray]:
    """Return a function that gives the address operand per lane as uint64 (zero-extended)."""
    base, offset = (op.base, op.offset) if isinstance(op, Mem) else (op, 0)
    if isinstance(base, Reg):
        cls, row = c.reg(base)
        if cls not in ("4", "8"):
            raise PtxError(f"{base.name} is no address: it has neither 32 nor 64 bits")
        shift = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        if cls == "8":
            return (lambda g: g.u8[row] + shift) if offset else (lambda g: g.u8[row])
        small = np.uint32(offset & 0xFFFFFFFF)
        if offset:
            return lambda g: (g.u4[row] + small).astype(np.uint64)
        return lambda g: g.u4[row].astype(np.uint64)
    if isinstance(base, Sym):
        space, at = c.place(base)
        at += offset
        if space == "shared":
            return lambda g: g.rank_bits.astype(np.uint64) + np.uint64(at)
        return lambda g: np.full(g.n, at, np.uint64)
    if isinstance(base, Imm):
        value = np.uint64((int(base.value) + offset) & 0xFFFFFFFFFFFFFFFF)
        return lambda g: np.full(g.n, value, np.uint64)
    raise PtxError(f"{base} is no address")


def pick(values: np.ndarray, mask: np.ndarray | None, lanes: np.ndarray) -> np.ndarray:
    """Return the values of the lanes that take part."""
    return values if mask is None else values[lanes]


def window(addresses: np.ndarray) -> np.ndarray:
    """Return 0 (global), 1 (shared), 2 (local), 3 (param) for generic addresses."""
    part = addresses // np.uint64(WINDOW_SIZE)
    out = np.zeros(addresses.shape, np.int8)
    for i, base in enumerate((SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW)):
        out[part == np.uint64(base // WINDOW_SIZE)] = i + 1
    return out


def shared_offsets(
    g: Gang, lanes: np.ndarray, addresses: np.ndarray, size: int, own: bool = False
) -> np.ndarray:
    """Return absolute offsets in shared memory of accesses of `size` bytes, checked.

    `addresses` are shared (32-bit) or generic; `own` refuses other CTAs' windows.
    """
    machine: Machine = g.machine
    low = (addresses & np.uint64(0xFFFFFF)).astype(np.int64)
    try:
        machine.shared.check(low, size)
    except IllegalOperation as error:
        raise at_lane(error, lanes) from None
    if machine.cluster_ctas == 1:
        rank_ok = (addresses & np.uint64(0xFF000000)) == 0
        if not rank_ok.all():
            at = int(np.flatnonzero(~rank_ok)[0])
            raise bad_rank(int(addresses[at]), 1, int(lanes[at]))
        return low + g.lane_slot[lanes] * machine.shared.stride
    rank = ((addresses >> np.uint64(24)) & np.uint64(0xFF)).astype(np.int64)
    wrong = rank >= machine.cluster_ctas
    if own:
        wrong |= rank != g.lane_rank[lanes]
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        if own and rank[at] < machine.cluster_ctas:
            raise IllegalOperation(
                f"address {int(addresses[at]):#x} is in the window of CTA rank {rank[at]}, and the "
                f"instruction reaches .shared::cta of rank {int(g.lane_rank[lanes[at]])} only (PTX "
                "ISA 5.1.6); use .shared::cluster",
                lane=int(lanes[at]),
            )
        raise bad_rank(int(addresses[at]), machine.cluster_ctas, int(lanes[at]))
    slots = g.lane_slot0[lanes] + rank
    ended = machine.slot_ended[slots]
    if ended.any():
        at = int(np.flatnonzero(ended)[0])
        raise has_ended(int(rank[at]), int(lanes[at]))
    return low + slots * machine.shared.stride


def has_ended(rank: int, lane: int) -> IllegalOperation:
    """Return the error for shared memory of a CTA of the cluster that is no longer there."""
    return IllegalOperation(
        f"CTA rank {rank} of the cluster, whose shared memory this uses, has ended; it must be "
        "there until the access is done (PTX ISA 9.7.13.3): end with a cluster barrier",
        lane=lane,
    )


def at_lane(error: IllegalOperation, lanes: np.ndarray) -> IllegalOperation:
    """Return an error whose lane is an index into `lanes` with the lane itself."""
    if error.lane is not None:
        error.lane = int(lanes[error.lane])
    return error


def bad_rank(address: int, ctas: int, lane: int) -> IllegalOperation:
    """Return the error for a shared address of a CTA that the cluster does not have."""
    return IllegalOperation(
        f"shared address {address:#x} names CTA rank {(address >> 24) & 0xFF} of a cluster of "
        f"{ctas}; make it with mapa from an address of this CTA",
        lane=lane,
    )


def same_in_warp(
    g: Gang, mask: np.ndarray | None, values: np.ndarray, what: str
) -> list[tuple[int, int]]:
    """Return (warp position, value) per active warp; the lanes of a warp must agree."""
    result = []
    for w in g.active_warps(mask):
        part = values[w * LANES : (w + 1) * LANES]
        if mask is not None:
            part = part[mask[w * LANES : (w + 1) * LANES]]
        if (part != part[0]).any():
            raise IllegalOperation(
                f"{what} differs between the lanes of a warp ({int(part[0]):#x}, ...); all lanes "
                "must give the same value",
                lane=int(w) * LANES,
            )
        result.append((int(w), int(part[0])))
    return result


def split_keys(g: Gang, active: np.ndarray, ready: np.ndarray) -> Any:
    """Return a handler's answer: True (all `active` warps are ready), False (none), or the keys.

    There is one key per warp, to split the gang by: not ready, ready, not here.
    """
    if ready.all():
        return True
    if not ready.any():
        return False
    keys = np.full(g.W, 2)
    keys[active] = ready
    return keys


def converged(
    g: Gang, mask: np.ndarray | None, f: Fragment, need: np.ndarray | None = None
) -> bool:
    """Return whether all live lanes of `need` (default: of the active warps) are in `mask`.

    If not, the fragment is parked until the missing lanes have come to the same instruction, and
    then takes them in (PTX ISA 9.7.9.6: membermask).
    """
    if mask is None or (f.full and mask is f.mask):
        return True
    have = mask
    if need is None:
        need = np.repeat(have.reshape(-1, LANES).any(1), LANES)
    missing = need & g.live & ~have
    if not missing.any():
        return True
    if not (missing & ~f.mask).any():
        return True  # the guard left lanes out that are here: their own business
    for other in list(g.fragments):
        if other is not f and other in g.fragments and other.at == f.at and other.parked:
            g.join(f, other)
            if not (missing & ~f.mask).any():
                f.parked = False
                f.tried = -1
                g.machine.progress += 1  # the machine tries the instruction again with all
                return False
    f.parked = True
    f.reason = "waiting for the other lanes of its member mask"
    return False
