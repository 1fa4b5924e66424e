"""What emulated launches did, kept by content as `tests.kit.compiled` keeps what compilers made.

`install` puts itself before the machine that the emulator's front door makes.  The key of an entry
is all that decides what a launch does: the emulator's source, the PTX, sizes, seed and limit, the
parameters, and every byte of the memory that the kernel may reach.  An entry is the launch's
report, or the error that ended it, and the bytes that it changed.  So whoever changes a kernel, a
schedule, the emulator or an operand has it emulated again.

Tensors of a library's host code have other addresses in each process.  An address in the
parameters, or in memory, counts as a place in a piece of memory: the number of the piece, in the
order in which a kernel finds them, and the offset.  Whether a word that a launch stored is an
address or a number that looks like one, nothing tells: such a launch is not kept.

Emulated for real is what is short, what reads the clock, what tells how far it is, what may have
stored an address, and everything while a test has replaced a part of the emulator.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from operator import is_
from typing import Any

import numpy as np

from tests.kit import compiled

WORTH_S = 0.01
"""Seconds from which a launch is kept: to find one takes some milliseconds."""

WORD = 8
"""Bytes of an address, which are aligned to as many."""

FIXED = 1 << 40
"""Bytes of addresses that the emulator itself gives, from its `GLOBAL_BASE` on: always the same."""

FORM = "2"
"""Of entries; those of another form are not read."""

_CLOCK = "%globaltimer"
_HEX = re.compile("0x[0-9a-f]+")


# ---- Memory, wherever it lies --------------------------------------------------------------------


class Places:
    """The allocations of a launch, numbered in the order in which a kernel finds them."""

    def __init__(self, memory: Any, params: bytes) -> None:
        from blockscale.emulator.machine.memory import GLOBAL_BASE

        self.memory, self.regions = memory, memory.regions
        self.starts, self.ends = memory.starts, memory.ends
        self.fixed = [GLOBAL_BASE <= r.address < GLOBAL_BASE + FIXED for r in self.regions]
        moving = [r for r, fixed in zip(self.regions, self.fixed, strict=True) if not fixed]
        self.low = np.uint64(min((r.address for r in moving), default=0))
        self.high = np.uint64(max((r.address + r.size for r in moving), default=0))
        self.params = np.frombuffer(_whole_words(params), np.uint8)
        self.order = [i for i, fixed in enumerate(self.fixed) if fixed]
        self.number = {i: n for n, i in enumerate(self.order)}
        self._visit(self.params)
        self._follow(0)
        lost = [i for i in range(len(self.regions)) if i not in self.number and self.owns(i)]
        for i in sorted(lost, key=self._told):
            self._take(i)
        self._follow(len(self.order) - len(lost))

    def owns(self, i: int) -> bool:
        """Return whether a region is memory of its own, not another name for some."""
        region = self.regions[i]
        return self.fixed[i] or region.home is not None

    def content(self, i: int) -> np.ndarray:
        """Return the bytes of a region."""
        region = self.regions[i]
        return self.memory.arena[region.offset : region.offset + region.size]

    def name(self, i: int) -> str:
        """Return what a region is called, without the address that may be in its name."""
        return _HEX.sub("", self.regions[i].name)

    def _told(self, i: int) -> tuple[str, int, bytes]:
        """Return what tells a region from others to which no address leads."""
        return self.name(i), self.regions[i].size, self.content(i).tobytes()

    def _follow(self, first: int) -> None:
        """Take what addresses in the regions lead to, from a number on."""
        for number in itertools.count(first):
            if number >= len(self.order):
                return
            self._visit(self.content(self.order[number]))

    def _take(self, i: int) -> None:
        if i not in self.number:
            self.number[i] = len(self.order)
            self.order.append(i)

    def _visit(self, data: np.ndarray) -> None:
        for i in self.pointers(data)[1]:
            self._take(int(i))

    def pointers(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which words of ``data`` are addresses that move, of which regions, the offsets."""
        words = data[: data.size // WORD * WORD].view(np.uint64)
        at = np.flatnonzero((words >= self.low) & (words <= self.high)) if self.high else []
        if not len(at):
            return (np.zeros(0, np.int64),) * 3
        found = words[at]
        which = np.searchsorted(self.starts, found, "right").astype(np.int64) - 1
        good = (which >= 0) & (found <= self.ends[which])
        good &= ~np.array(self.fixed)[which]
        at, which, found = at[good], which[good], found[good]
        return at, which, (found - self.starts[which]).astype(np.int64)

    def portable(self, data: np.ndarray) -> tuple[bytes, bytes]:
        """Return bytes with zeros for addresses that move, and what these are."""
        at, which, offsets = self.pointers(data)
        if not len(at):
            return data.tobytes(), b""
        plain = data.copy()
        plain[: plain.size // WORD * WORD].view(np.uint64)[at] = 0
        numbers = np.array([self.number.get(int(i), -1) for i in which], np.int64)
        return plain.tobytes(), np.stack([at, numbers, offsets]).tobytes()

    def parts(self) -> Iterator[str | bytes]:
        """Yield what decides, of the parameters and the memory."""
        yield from self.portable(self.params)
        for i in self.order:
            region = self.regions[i]
            address = region.address if self.fixed[i] else region.address % 256
            yield f"{self.name(i)} {address} {region.size} {self.owns(i)}"
            yield from self.portable(self.content(i)) if self.owns(i) else (b"", b"")


# ---- Launches ------------------------------------------------------------------------------------


class Launched:
    """Stands for the machine of a launch: has the launch been made before?"""

    def __init__(self, program: Any, launch: Any, memory: Any, params: bytes, ticker: Any) -> None:
        self.program, self.memory = program, memory
        self.launch, self.params, self.ticker = launch, params, ticker
        self.places: dict[str, tuple[str, int]] = {}  # of the module's variables; others fill it

    def run(self) -> Any:
        """Return the launch's report, its outcome in memory; raise what ended it."""
        if self.program.clock or self.ticker.next != float("inf") or _replaced():
            return self._emulated()
        said = "launch", self.program.text, self.program.name, repr(self.launch)
        return _kept(said, self.memory, self.params, self._emulated)

    def _emulated(self) -> Any:
        machine = _execution(self.program, self.launch, self.memory, self.params, self.ticker)
        machine.places.update(self.places)
        return machine.run()


def _keeping_worlds(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `World.run` with a memory; time passes there as launches go on."""

    @wraps(run)
    def kept_run(world: Any, *limit: int, **named: int) -> Any:
        if _replaced() or world.steps or any(device.reports for device in world.devices):
            return run(world, *limit, **named)
        said, params = ["world", repr((len(world.devices), world.seed, limit, named))], b""
        for device in world.devices:
            for queued in device.queue:
                sizes = queued.grid, queued.block, queued.cluster, queued.dynamic_smem
                said += [queued.program.text, queued.program.name, repr((device.number, sizes))]
                params += _whole_words(queued.params)
        world.memory.commit()
        try:
            reports = _kept(said, world.memory, params, lambda: run(world, *limit, **named))
        finally:
            world.memory.write_back()
        for device, own in zip(world.devices, reports, strict=True):
            device.queue.clear()
            device.reports = own
        return reports

    return kept_run


def _whole_words(params: bytes) -> bytes:
    return params.ljust(-(-len(params) // WORD) * WORD, b"\0")


def _kept(said: Sequence[str], memory: Any, params: bytes, emulate: Callable[[], Any]) -> Any:
    """Return what ``emulate`` does, of which ``said`` and the bytes decide; or raise it."""
    places = Places(memory, params)
    source = FORM, compiled.emulators_source(), np.__version__
    key = compiled.digest(*source, *said, *places.parts())
    path = compiled.place(key, ".launch")
    if path.exists():
        os.utime(path)  # as `compiled.kept` does
        told, error, changes = pickle.loads(_compression().decompress(path.read_bytes()))
        for number, first, new in changes:
            places.content(places.order[number])[first : first + len(new)] = np.frombuffer(
                new, np.uint8
            )
    else:
        before, began = memory.arena.copy(), time.perf_counter()
        told = error = None
        try:
            told = emulate()
        except _errors() as ended:
            error = ended
        slow = time.perf_counter() - began > WORTH_S
        if slow and (changes := _changes(places, before)) is not None:
            entry = pickle.dumps((told, error, changes), pickle.HIGHEST_PROTOCOL)
            compiled.kept(key, ".launch", lambda file: _write(file, entry))
    if error is not None:
        raise error
    return told


def _write(path: Any, entry: bytes) -> None:
    path.write_bytes(_compression().compress(entry, 1))


def _compression() -> Any:
    import zstandard  # not where only tests on a GPU run

    return zstandard


def _changes(places: Places, before: np.ndarray) -> list[tuple[int, int, bytes]] | None:
    """Return the bytes that changed: number of the region, first byte, and the bytes from there.

    None if a word of them may be an address, which another process would have elsewhere.
    """
    found = []
    for number, i in enumerate(places.order):
        region, now = places.regions[i], places.content(i)
        changed = np.flatnonzero(now != before[region.offset : region.offset + region.size])
        if changed.size and places.owns(i):
            first, end = int(changed[0]) // WORD * WORD, -(-int(changed[-1] + 1) // WORD) * WORD
            if len(places.pointers(now[first:end])[0]):
                return None
            found.append((number, first, now[first:end].tobytes()))
    return found


# ---- The door ------------------------------------------------------------------------------------

_execution: Any = None
_own: list[tuple[Callable[[str], Any], list[str], list[Any]]] = []
"""Of modules and classes of the emulator: their names, and what these were when seen first."""

_seen: set[str] = set()
_modules = 0
"""How many there were when they were looked through last."""


def _errors() -> type[BaseException]:
    from blockscale.emulator.errors import EmulationError

    return EmulationError


def _replaced() -> bool:
    """Return whether a part of the emulator is not what its source says."""
    global _modules
    if len(sys.modules) != _modules:
        _modules = len(sys.modules)
        for name in [n for n in sys.modules if n.startswith("blockscale.emulator")]:
            if name not in _seen:
                _seen.add(name)
                _note(sys.modules[name])
    return not all(all(map(is_, map(now, names), first)) for now, names, first in _own)


def _note(module: Any) -> None:
    """Note what a module of the emulator has, and its classes."""
    own = [c for c in vars(module).values() if isinstance(c, type)]
    for space in (module, *(c for c in own if c.__module__ == module.__name__)):
        names = [name for name in vars(space) if not name.startswith("__")]
        _own.append((vars(space).get, names, [vars(space)[name] for name in names]))


def _with_text(linked: Callable[..., Any]) -> Callable[..., Any]:
    """Return `linked` whose programs say what their text is, and whether they read the clock."""

    @wraps(linked)
    def noted(ptx: str, entry: str | None) -> Any:
        program = linked(ptx, entry)
        if not hasattr(program, "text"):
            program.text, program.clock = compiled.digest(ptx), _CLOCK in ptx
        return program

    return noted


def install() -> None:
    """Keep what emulated launches do from now on in this process, if the emulator is loaded."""
    global _execution
    door = sys.modules.get("blockscale.emulator.launching.front_door")
    if door is not None and _execution is None:
        _execution = door.Execution  # type: ignore[attr-defined]
        door.Execution = Launched  # type: ignore[attr-defined]
        door.linked = _with_text(door.linked)  # type: ignore[attr-defined]
        world = sys.modules["blockscale.emulator.launching.world"]
        world.linked = _with_text(world.linked)  # type: ignore[attr-defined]
        world.World.run = _keeping_worlds(world.World.run)  # type: ignore[attr-defined]
        _replaced()
