"""The front door: from a caller's PTX, grid and arguments to a run of the machine."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.launching.arguments import Buffers, pack
from blockscale.emulator.launching.execute import Execution
from blockscale.emulator.launching.link import linked
from blockscale.emulator.launching.ticker import Ticker
from blockscale.emulator.machine.gangs import Machine
from blockscale.emulator.machine.grid import Dim, Launch
from blockscale.emulator.machine.memory import RESERVED, GlobalMemory
from blockscale.emulator.ptx.program import Program
from blockscale.emulator.report import Report

MAX_THREADS = 1024
MAX_SHARED = 227 * 1024  # without what the system keeps
MAX_CLUSTER = 16  # above 8 a kernel must opt in
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK_Z = 64
MAX_INSTRUCTIONS = 50_000_000


def check_launch(program: Program, grid: Dim, block: Dim, cluster: Dim, dynamic_smem: int) -> Dim:
    """Refuse launches that the driver would refuse; return the cluster's dimensions."""

    def refuse(rule: str) -> EmulationError:
        return EmulationError(f"{program.name}: {rule}")

    threads = math.prod(block)
    if min(*block, *grid, *cluster) < 1:
        raise refuse(f"grid {grid}, block {block}, cluster {cluster}: each dimension is at least 1")
    if threads > MAX_THREADS:
        raise refuse(f"block {block} has {threads} threads; at most {MAX_THREADS}, use more CTAs")
    if any(g > most for g, most in zip(grid, MAX_GRID, strict=True)) or block[2] > MAX_BLOCK_Z:
        raise refuse(
            f"grid {grid}, block {block}: a grid has at most {MAX_GRID} CTAs, a block "
            f"{MAX_BLOCK_Z} threads along z; put more along x"
        )
    wanted = program.directives.get(".reqntid")
    if wanted and dims(wanted) != block:
        raise refuse(f"block {block} is not the kernel's .reqntid {dims(wanted)}; launch with that")
    most = program.directives.get(".maxntid")
    if most and threads > math.prod(most):
        raise refuse(f"block {block} has {threads} threads, more than its .maxntid {dims(most)}")
    ctas = program.directives.get(".reqnctapercluster")
    if ctas and cluster not in ((1, 1, 1), dims(ctas)):
        raise refuse(f"cluster {cluster} is not the kernel's .reqnctapercluster {dims(ctas)}")
    cluster = dims(ctas) if ctas else cluster
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise refuse(f"grid {grid} is not a multiple of the cluster {cluster}; enlarge the grid")
    if math.prod(cluster) > MAX_CLUSTER:
        raise refuse(f"a cluster of {cluster} has more than {MAX_CLUSTER} CTAs")
    total = program.static_shared + dynamic_smem - RESERVED
    if total > MAX_SHARED or dynamic_smem < 0:
        raise refuse(
            f"{total} bytes of shared memory ({dynamic_smem} dynamic) are more than the "
            f"{MAX_SHARED} that an SM gives a CTA; use smaller tiles or fewer stages"
        )
    return cluster


def run(
    ptx: str,
    entry: str | None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    cluster: int | Sequence[int],
    dynamic_smem: int,
    params: bytes | Callable[[Program, GlobalMemory], bytes],
    regions: Sequence[tuple[int, np.ndarray]] = (),
    seed: int = 0,
    max_instructions: int = MAX_INSTRUCTIONS,
    progress: bool | None = None,
) -> Report:
    """Run one kernel with its parameter block on `regions`: (address, bytes), changed in place.

    `params` may be a function that packs the block when the kernel's parameters are known; it may
    add buffers to the memory.
    """
    grid, block, cluster = dims(grid, "grid"), dims(block, "block"), dims(cluster, "cluster")
    seed, dynamic_smem = whole(seed, "seed"), whole(dynamic_smem, "dynamic_smem")
    program = linked(ptx, entry)
    memory = GlobalMemory()
    for address, data in regions:
        memory.add(data.size, f"the buffer at {address:#x}", data, address)
    cluster = check_launch(program, grid, block, cluster, dynamic_smem)
    packed = params if isinstance(params, bytes) else params(program, memory)
    how = Launch(grid, block, cluster, dynamic_smem, seed, max_instructions)
    block_of_params = packed.ljust(program.param_bytes, b"\0")
    machine = Execution(program, how, memory, block_of_params, Ticker(progress))
    place_globals(machine)
    memory.commit()
    try:
        return machine.run()
    finally:
        memory.write_back()


def place_globals(machine: Machine) -> None:
    """Give module variables of .global and .const space their addresses and initial values."""
    later = []
    for var in machine.program.module.variables.values():
        if var.space not in ("global", "const"):
            continue
        data = np.zeros(max(var.size, 1), np.uint8)
        if var.init is not None:
            data[: len(var.init)] = np.frombuffer(var.init, np.uint8)
        machine.places[var.name] = ("global", machine.memory.add(data.size, var.name, data))
        later.append((var, data))
    for var, data in later:
        for at, sym in var.pointers:
            place = machine.places.get(sym.name)
            if place is not None:
                data[at : at + 8] = np.array([place[1] + sym.offset], np.uint64).view(np.uint8)


def whole(value: Any, name: str) -> int:
    """Return an int, or what NumPy has for one."""
    try:
        return operator.index(value)
    except TypeError:
        raise EmulationError(f"{name} is {value!r}; pass an integer") from None


def dims(value: int | Sequence[int], name: str = "a launch") -> Dim:
    """Return three dimensions of an int or a short sequence."""
    several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    values = tuple(whole(v, name) for v in (value if several else (value,)))  # type: ignore[union-attr]
    if len(values) > 3:
        raise EmulationError(f"{values} has {len(values)} dimensions; a launch has at most three")
    x, y, z = (*values, 1, 1, 1)[:3]
    return x, y, z


def launch(
    ptx: str,
    *,
    entry: str | None = None,
    grid: int | Sequence[int] = (1, 1, 1),
    block: int | Sequence[int] = (128, 1, 1),
    cluster: int | Sequence[int] = (1, 1, 1),
    dynamic_smem: int = 0,
    args: Sequence[Any] = (),
    seed: int = 0,
    max_instructions: int = MAX_INSTRUCTIONS,
    progress: bool | None = None,
) -> Report:
    """Run kernel `entry` of PTX text `ptx` and return its `Report`.

    Arrays among `args` are device buffers, changed in place; ints, floats, None (a null pointer)
    and bytes (structs) are by-value parameters, as are `TensorMap` and `Struct`.  `grid`, `block`
    and `cluster` are counted as in a CUDA launch, `dynamic_smem` in bytes.  `seed` chooses how
    warps are interleaved and when asynchronous work happens.  After `max_instructions` executed by
    warps the launch is given up.  A launch of more than some seconds writes how far it is to
    stderr if `progress`, by default if that is a terminal.

    Raises:
        EmulationError: PtxError, IllegalOperation, Deadlock or InstructionLimit with the place and
            the rule; what does not stop a kernel but is wrong or doubtful is in `report.hazards`.
    """
    holder: list[Buffers] = []

    def params(program: Program, memory: GlobalMemory) -> bytes:
        holder.append(Buffers(memory))
        return pack(program, args, holder[0])

    try:
        return run(
            ptx,
            entry,
            grid,
            block,
            cluster,
            dynamic_smem,
            params,
            seed=seed,
            max_instructions=max_instructions,
            progress=progress,
        )
    finally:
        for buffers in holder:
            buffers.write_back()
