"""ld, st, ldu, st.async, prefetch and their kin, in every state space (PTX ISA 9.7.9.8 to .15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.memory import misaligned
from blockscale.emulator.machine.watch import SYSTEM
from blockscale.emulator.ops.core import (
    address,
    at_lane,
    known_modifiers,
    pick,
    register,
    shared_offsets,
    space_of,
    type_of,
    vector_of,
    window,
)
from blockscale.emulator.ops.memory.sync import acquire, release
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Instr, Mem, Operand, Sink, Sym, items_of

CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt"}
SCOPES = {"cta", "cluster", "gpu", "sys"}
LOADS = {"weak", "acquire", "relaxed", "volatile", "mmio", "nc", "unified"} | CACHE | SCOPES
STORES = {"weak", "release", "relaxed", "volatile", "mmio", "unified"} | CACHE | SCOPES
SYNC = {"acquire", "release", "relaxed", "volatile", "mmio"}
MOST_BYTES = 32  # of one load or store
BANKS = 32  # of 4 bytes
SAMPLES = 16  # executions per line whose bank conflicts are counted


class Space:
    """Reads and writes of one access size in one state space; "" finds the window per address.

    ``looked``: of the bytes of an access to shared memory those that it looks at, the first ones.
    """

    def __init__(
        self, c: Operands, space: str, size: int, sync: bool, looked: int | None = None
    ) -> None:
        self.machine = c.machine
        self.space, self.size, self.sync = space, size, sync
        self.looked = looked or size
        self.sampled = 0
        self.last: dict[int, np.uint64] = {}  # gang -> where it read last

    def read(self, g: Gang, lanes: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the items at addresses `at`, unsigned (or void) ones of `size` bytes."""
        space = self.space or self.resolve(g, lanes, at, None)
        if isinstance(space, np.ndarray):
            return space
        m, size = self.machine, self.size
        if self.last.get(id(g)) != at[0]:  # a load that moves on is no polling
            self.last[id(g)] = at[0]
            m.motion += 1
        if space in ("global", "const"):
            m.report.moved(space, read=len(at) * size)
            offsets = self.globally(at, lanes)
            if m.watch is not None and not self.sync:
                m.watch.access(g, lanes, offsets, size, writes=False)
            return m.memory.views[size].take(offsets >> (size.bit_length() - 1))
        if space.startswith("shared"):
            offsets = shared_offsets(g, lanes, at, size, own=space != "shared::cluster")
            m.report.moved("shared", read=len(at) * size)
            m.hazards.shared(g, lanes, offsets, self.looked, False, self.sync)
            self.banks(g, lanes, offsets)
            return m.shared.views[size].take(offsets >> (size.bit_length() - 1))
        if space == "local":
            offsets = self.local(g, lanes, at)
            return g.local_view(size).take(offsets >> (size.bit_length() - 1))
        m.report.moved("param", read=len(at) * size)
        return self.parameters(lanes, at)

    def parameters(self, lanes: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return items of the kernel's parameter block."""
        m, size = self.machine, self.size
        low = (at & np.uint64(0xFFFFFFFF)).astype(np.int64)
        past = low + size > len(m.params)
        if past.any():
            i = int(np.flatnonzero(past)[0])
            raise IllegalOperation(
                f"a load of {size} bytes at parameter offset {int(low[i])} is out of bounds: the "
                f"kernel has {len(m.params)} bytes of parameters (PTX ISA 5.1.7)",
                lane=int(lanes[i]),
            )
        self.aligned(low, lanes)
        data = np.frombuffer(m.params, np.uint8)
        items = np.ascontiguousarray(data[low[:, None] + np.arange(size)])
        return items.view(m.memory.views[size].dtype).reshape(-1)

    def aligned(self, low: np.ndarray, lanes: np.ndarray) -> None:
        """Refuse addresses that are not a multiple of the access's size."""
        wrong = low & (self.size - 1)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise IllegalOperation(misaligned(int(low[i]), self.size), lane=int(lanes[i]))

    def globally(self, at: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Return offsets in the arena; an error's lane is one of `lanes`."""
        try:
            return self.machine.memory.offsets(at, self.size)
        except IllegalOperation as error:
            raise at_lane(error, lanes) from None

    def write(self, g: Gang, lanes: np.ndarray, at: np.ndarray, items: np.ndarray) -> None:
        """Write `items` (unsigned or void items of `size` bytes) to addresses `at`."""
        space = self.space or self.resolve(g, lanes, at, items)
        if isinstance(space, np.ndarray):
            return
        m, size = self.machine, self.size
        m.progress += 1
        if space == "global":
            m.report.moved("global", written=len(at) * size)
            offsets = self.globally(at, lanes)
            if m.watch is not None and not self.sync:
                m.watch.access(g, lanes, offsets, size, writes=True)
            m.memory.views[size][offsets >> (size.bit_length() - 1)] = items
        elif space.startswith("shared"):
            offsets = shared_offsets(g, lanes, at, size, own=space != "shared::cluster")
            m.report.moved("shared", written=len(at) * size)
            m.hazards.shared(g, lanes, offsets, size, True, self.sync, items)
            self.banks(g, lanes, offsets)
            m.shared.views[size][offsets >> (size.bit_length() - 1)] = items
        elif space == "local":
            offsets = self.local(g, lanes, at)
            g.local_view(size)[offsets >> (size.bit_length() - 1)] = items
        else:
            raise IllegalOperation(
                f"a store to the .{space} state space, which is read-only (PTX ISA 5.1); copy what "
                "is to change to another space",
                lane=int(lanes[0]),
            )

    def note(self, g: Gang, lanes: np.ndarray, at: np.ndarray, write: bool) -> None:
        """Record accesses of shared memory whose bytes another lane reads or writes for these."""
        if not self.space.startswith("shared"):
            shared = window(at) == 1 if self.space == "" else np.zeros(len(at), bool)
            lanes, at = lanes[shared], at[shared]
        if len(at):
            offsets = shared_offsets(g, lanes, at, self.size)
            self.machine.hazards.shared(g, lanes, offsets, self.size, write, self.sync)

    def local(self, g: Gang, lanes: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return offsets into the gang's local memory."""
        low = (at & np.uint64(0xFFFFFFFF)).astype(np.int64)
        width, size = g.local.shape[1], self.machine.program.local_bytes
        past = low + self.size > size
        if past.any():
            i = int(np.flatnonzero(past)[0])
            raise IllegalOperation(
                f"a local access of {self.size} bytes at offset {int(low[i])} is out of bounds: a "
                f"thread has {size} bytes of local memory; mask the access or enlarge the array",
                lane=int(lanes[i]),
            )
        self.aligned(low, lanes)
        return low + lanes * width

    def resolve(self, g: Gang, lanes: np.ndarray, at: np.ndarray, items: np.ndarray | None) -> Any:
        """Find the window of generic addresses; where lanes differ, access window by window."""
        which = window(at)
        names = ("global", "shared::cluster", "local", "param")
        if (which == which[0]).all():
            return names[which[0]]
        out = np.zeros(len(at), self.machine.memory.views[self.size].dtype)
        saved = self.space
        try:
            for i in np.unique(which):
                sub = np.flatnonzero(which == i)
                self.space = names[i]
                if items is None:
                    out[sub] = self.read(g, lanes[sub], at[sub])
                else:
                    self.write(g, lanes[sub], at[sub], items[sub])
        finally:
            self.space = saved
        return out

    def banks(self, g: Gang, lanes: np.ndarray, offsets: np.ndarray) -> None:
        """Count bank conflicts of the first executions of a line (32 banks of 4 bytes)."""
        if self.sampled >= SAMPLES:
            return
        self.sampled += 1
        words = max(self.size // 4, 1)
        per = max(LANES // words, 1)  # lanes per wavefront at best
        groups = lanes // LANES * LANES + lanes % LANES // per
        names, group = np.unique(groups, return_inverse=True)
        word = (offsets >> 2)[:, None] + np.arange(words)
        pairs = np.unique((group[:, None] << 40) + word)  # one word is read once per wavefront
        loads = np.bincount((pairs >> 40) * BANKS + pairs % BANKS, minlength=len(names) * BANKS)
        wavefronts = int(loads.reshape(-1, BANKS).max(1).sum())
        warps = len(np.unique(lanes // LANES))
        self.machine.report.banked(g.ins.line if g.ins else 0, wavefronts, len(names), warps)


def effective_space(c: Operands, ins: Instr, mem: Operand) -> str:
    """Return the space of a memory operand; parameters of calls lie in local memory."""
    space = space_of(ins)
    base = mem.base if isinstance(mem, Mem) else mem
    if isinstance(base, Sym):
        place = c.place(base)[0]
        if place == "local":
            return "local"
        if place == "kernel param":
            return "param"
        if space == "":
            return "shared::cluster" if place == "shared" else place
    return space


def rows(c: Operands, op: Operand, dtype: str) -> list[Callable[..., None] | None]:
    """Return writers (gang, lanes or None, values) of the registers of a destination."""
    items = items_of(op)
    result: list[Callable[..., None] | None] = []
    for item in items:
        if isinstance(item, Sink):
            result.append(None)
            continue
        cls, row = c.reg(item)
        if cls == "16":
            result.append(_wide_row(row))
            continue
        result.append(_row(c.row(item, dtype)))
    return result


def _row(row_of: Callable[[Any], np.ndarray]) -> Callable[..., None]:
    def write(g: Any, lanes: np.ndarray | None, values: np.ndarray) -> None:
        row = row_of(g)
        if lanes is None:
            row[:] = values
        else:
            row[lanes] = values

    return write


def _wide_row(row: int) -> Callable[..., None]:
    def write(g: Any, lanes: np.ndarray | None, values: np.ndarray) -> None:
        pairs = np.ascontiguousarray(values).view("u8").reshape(-1, 2)
        for i in range(2):
            g.u8[row + i][slice(None) if lanes is None else lanes] = pairs[:, i]

    return write


@register("ld", "ldu", operands=(2, 3))
def load(c: Operands, ins: Instr) -> Callable[..., None]:
    """ld (9.7.9.8), ldu: scalars and vectors, any space, plain or synchronising."""
    known_modifiers(ins, LOADS)
    dtype, size = type_of(ins)
    count = vector_of(ins)
    check_width(ins, size * count)
    target, mem = ins.operands[0], ins.operands[1]
    outs = rows(c, target, dtype)
    if len(outs) != count and not (count == 1 and len(outs) == 1):
        raise PtxError(f"{ins.opcode} wants {count} registers and has {len(outs)}")
    at = address(c, mem)
    sync = bool(SYNC & set(ins.mods))
    gains = bool({"acquire", "volatile", "relaxed"} & set(ins.mods))
    space = Space(c, effective_space(c, ins, mem), size * count, sync)

    def run(g: Gang, m: np.ndarray | None) -> None:
        lanes = g.lanes(m)
        where = pick(at(g), m, lanes)
        items = space.read(g, lanes, where)
        if gains:
            acquire(g, lanes, where)
            if g.machine.watch is not None:
                g.machine.watch.take(g, lanes, where, ins.mods, SYSTEM)
        some = None if m is None else lanes
        if count == 1:
            if outs[0] is not None:
                outs[0](g, some, items if size == 16 else items.view(dtype))
            return
        parts = items.view(dtype).reshape(-1, count)
        for i, out in enumerate(outs):
            if out is not None:
                out(g, some, parts[:, i])

    return run


@register("st", operands=(2, 3))
def store(c: Operands, ins: Instr) -> Callable[..., None]:
    """st (9.7.9.12): scalars and vectors, any space, plain or synchronising."""
    known_modifiers(ins, STORES)
    dtype, size = type_of(ins)
    count = vector_of(ins)
    check_width(ins, size * count)
    mem, value = ins.operands[0], ins.operands[1]
    get = values_of(c, value, dtype, size)
    if len(get) != count:
        raise PtxError(f"{ins.opcode} wants {count} values and has {len(get)}")
    at = address(c, mem)
    sync = bool(SYNC & set(ins.mods))
    gives = bool({"release", "volatile", "relaxed"} & set(ins.mods))
    space = Space(c, effective_space(c, ins, mem), size * count, sync)

    def run(g: Gang, m: np.ndarray | None) -> None:
        lanes = g.lanes(m)
        where = pick(at(g), m, lanes)
        if count == 1:
            items = pick(get[0](g), m, lanes)
        else:
            buffer = np.empty((len(lanes), count), dtype if size < 16 else "V16")
            for i, part in enumerate(get):
                buffer[:, i] = pick(part(g), m, lanes)
            items = buffer.reshape(-1).view(whole_type(size * count))
        space.write(g, lanes, where, items)
        if gives:  # after the store, which is told, too
            release(g, lanes, where)
            if g.machine.watch is not None:
                g.machine.watch.give(g, lanes, where, ins.mods, SYSTEM)

    return run


def check_width(ins: Instr, width: int) -> None:
    """Refuse accesses of 32 bytes outside .global, as ptxas does."""
    if width > MOST_BYTES or (width == MOST_BYTES and space_of(ins) != "global"):
        raise PtxError(
            f"{ins.opcode} accesses {width} bytes at once: 32 bytes in .global and 16 elsewhere "
            "are the "
            "most (PTX ISA 9.7.9.8); split the access"
        )


def whole_type(size: int) -> str:
    """Return the NumPy type of an access of `size` bytes."""
    return f"u{size}" if size <= 8 else f"V{size}"


def values_of(c: Operands, op: Operand, dtype: str, size: int) -> list[Callable[[Any], np.ndarray]]:
    """Return getters of the values of a store, as unsigned items."""
    items = items_of(op)
    kind = "u" + dtype[1:] if size < 16 else "V16"
    if kind == "V16":
        return [_wide_get(c.reg(i)[1]) for i in items]
    return [c.lanes_source(i, kind) for i in items]


def _wide_get(row: int) -> Callable[[Any], np.ndarray]:
    def get(g: Any) -> np.ndarray:
        return np.stack([g.u8[row], g.u8[row + 1]], 1).reshape(-1).view("V16")

    return get


@register(
    "prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "cp.async.bulk.prefetch"
)
def nothing(c: Operands, ins: Instr) -> Callable[..., None]:
    """Cache hints: no effect on values. createpolicy gives some 64-bit policy."""
    if ins.base == "createpolicy":
        put = c.dest(ins.operands[0], "u8")
        return lambda g, m: put(g, m, np.uint64(0))
    return lambda g, m: None
