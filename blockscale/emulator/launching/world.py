"""Several devices at once: each runs its launches in turn, all of them side by side.

Every device has its own memory; an address of one is valid on all others, as those of peers are.
The seed chooses which device goes on, and for how long: one may stand still while the others do
all they can.  `machine.watch` reports races, between devices and on one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.launching import front_door
from blockscale.emulator.launching.arguments import Buffers, pack
from blockscale.emulator.launching.execute import Execution
from blockscale.emulator.launching.link import linked
from blockscale.emulator.launching.ticker import Ticker
from blockscale.emulator.machine.grid import SMS, Dim, Launch
from blockscale.emulator.machine.memory import GlobalMemory
from blockscale.emulator.machine.watch import Watch
from blockscale.emulator.ptx.program import Program
from blockscale.emulator.report import Report

MAX_INSTRUCTIONS = 5_000_000
"""Of a launch; one that waits for ever for another device ends here."""

STEP = 10
"""Nanoseconds of %globaltimer that an instruction takes, whichever device runs it."""

LONG = 400
"""Turns that a device may have before another one comes, at most."""


@dataclass
class _Queued:
    """A launch that waits for its turn."""

    program: Program
    grid: Dim
    block: Dim
    cluster: Dim
    dynamic_smem: int
    params: bytes


@dataclass
class _Device:
    """A device: what it has to run, what it runs, what it left behind."""

    number: int
    queue: deque[_Queued] = field(default_factory=deque)
    machine: Execution | None = None
    reports: list[Report] = field(default_factory=list)
    seen: int = 0  # progress of all the others when it went on last


class World:
    """Devices with their memories and streams.

    `add` gives a device memory, `launch` puts a kernel into its stream, `run` runs all streams.
    """

    def __init__(self, devices: int, seed: int = 0) -> None:
        self.devices = [_Device(number) for number in range(devices)]
        self.memory = GlobalMemory()
        self.seed = seed
        self.steps = 0  # of launches that have ended

    def add(self, device: int, array: np.ndarray, name: str, address: int | None = None) -> int:
        """Return the address of an array in the memory of a device; it is changed in place."""
        data = array.reshape(-1).view(np.uint8)
        return self.memory.add(data.size, f"{name} of device {device}", data, address)

    def launch(
        self,
        device: int,
        ptx: str,
        *,
        entry: str | None = None,
        grid: int | Sequence[int] = 1,
        block: int | Sequence[int] = 128,
        cluster: int | Sequence[int] = 1,
        dynamic_smem: int = 0,
        args: Sequence[Any] | bytes = (),
    ) -> None:
        """Put a kernel into the stream of a device; arguments as in `emulator.launch`, no arrays.

        ``args`` may be the parameter block itself.
        """
        program = linked(ptx, entry)
        ctas, threads = front_door.dims(grid, "grid"), front_door.dims(block, "block")
        asked = front_door.dims(cluster, "cluster")
        together = front_door.check_launch(program, ctas, threads, asked, dynamic_smem)
        if not isinstance(args, bytes):
            args = pack(program, args, Buffers(self.memory))
        block_of_params = args.ljust(program.param_bytes, b"\0")
        self.devices[device].queue.append(
            _Queued(program, ctas, threads, together, dynamic_smem, block_of_params)
        )

    def run(self, max_instructions: int = MAX_INSTRUCTIONS) -> list[list[Report]]:
        """Run all streams to their ends; return the reports of each device, in order.

        Raises:
            EmulationError: as `emulator.launch`, with the number of the device.
        """
        self.memory.commit()
        rng = np.random.default_rng(self.seed)
        self.watch = Watch(len(self.devices), self._warps(), self.memory.size)
        self.max_instructions = max_instructions
        try:
            with np.errstate(all="ignore"):
                while live := [d for d in self.devices if d.machine or d.queue]:
                    device = live[int(rng.integers(len(live)))]
                    turns = int(rng.integers(1, LONG if rng.integers(4) == 0 else 8))
                    self._go(device, turns, live)
        finally:
            self.memory.write_back()
        return [device.reports for device in self.devices]

    def _warps(self) -> int:
        """Return the most warps that a device may have resident."""
        return max(
            -(-int(np.prod(q.block)) // 32) * min(int(np.prod(q.grid)), SMS)
            for device in self.devices
            for q in device.queue
        )

    def now(self) -> int:
        """Return nanoseconds since the world began."""
        running = sum(d.machine.steps for d in self.devices if d.machine is not None)
        return STEP * (self.steps + running)

    def _go(self, device: _Device, turns: int, live: list[_Device]) -> None:
        """Let a device run for some turns."""
        if device.machine is None:
            device.machine = self._begin(device)
        machine = device.machine
        others = sum(d.machine.advanced for d in live if d.machine is not None and d is not device)
        if others != device.seen:  # what the others stored may be what it polls for
            device.seen = others
            machine.wake()
        machine.alone = len(live) == 1
        try:
            if machine.go(turns):
                return
        except EmulationError as error:
            error.add_note(f"device {device.number}, launch {len(device.reports) + 1}")
            raise
        self.watch.end(device.number)
        self.steps += machine.steps
        device.reports.append(machine.report)
        device.machine = None

    def _begin(self, device: _Device) -> Execution:
        q = device.queue.popleft()
        seed = self.seed * 1009 + 31 * device.number + len(device.reports)
        launch = Launch(q.grid, q.block, q.cluster, q.dynamic_smem, seed, self.max_instructions)
        machine = Execution(q.program, launch, self.memory, q.params, Ticker(False))
        front_door.place_globals(machine)
        machine.device, machine.watch, machine.timer = device.number, self.watch, self.now
        self.watch.begin(device.number)
        return machine
