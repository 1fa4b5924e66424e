"""`launch`: from a caller's PTX, grid and arguments to a run of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import ops
from .errors import EmulationError
from .machine import Dim, Machine
from .memory import RESERVED, GlobalMemory
from .parser import parse
from .program import Program, link
from .report import Report
from .values import Buffers, pack

MAX_SHARED = 227 * 1024 + RESERVED
MAX_CLUSTER = 16
MAX_INSTRUCTIONS = 50_000_000


def check_launch(program: Program, grid: Dim, block: Dim, cluster: Dim, dynamic_smem: int) -> Dim:
    """Refuse launches that the driver would refuse; return the cluster's dimensions."""
    name, d = program.name, program.directives
    threads = int(np.prod(block))
    if not 1 <= threads <= 1024 or min(block) < 1 or min(grid) < 1:
        raise EmulationError(f"{name}: block {block}, grid {grid}: 1 to 1024 threads, no zero")
    wanted = d.get(".reqntid")
    if wanted and dims(wanted) != block:
        raise EmulationError(f"{name}: block {block} is not the kernel's .reqntid {wanted}")
    most = d.get(".maxntid")
    if most and threads > int(np.prod(most)):
        raise EmulationError(f"{name}: {threads} threads exceed the kernel's .maxntid {most}")
    ctas = d.get(".reqnctapercluster")
    if ctas and dims(ctas) != cluster:
        if cluster != (1, 1, 1):
            raise EmulationError(f"{name}: cluster {cluster} is not .reqnctapercluster {ctas}")
        cluster = dims(ctas)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise EmulationError(f"{name}: grid {grid} is not a multiple of the cluster {cluster}")
    if int(np.prod(cluster)) > MAX_CLUSTER:
        raise EmulationError(f"{name}: a cluster of {cluster} has more than {MAX_CLUSTER} CTAs")
    total = program.static_shared + dynamic_smem
    if total > MAX_SHARED or dynamic_smem < 0:
        raise EmulationError(
            f"{name}: {total - RESERVED} bytes of shared memory ({dynamic_smem} dynamic) exceed the "
            f"{MAX_SHARED - RESERVED} of an SM"
        )
    return cluster


def run(
    ptx: str, entry: str | None, grid: Dim, block: Dim, cluster: Dim, dynamic_smem: int,
    params: bytes | Callable[[Program, GlobalMemory], bytes], regions: Sequence[tuple[int, np.ndarray]] = (),
    seed: int = 0, max_instructions: int = MAX_INSTRUCTIONS,
) -> Report:  # fmt: skip
    """Run one kernel on identity-mapped `regions` (address, bytes) with a packed parameter block."""
    program = link(parse(ptx), entry)
    memory = GlobalMemory()
    for address, data in regions:
        memory.add(data.size, f"the buffer at {address:#x}", data, address)
    cluster = check_launch(program, dims(grid), dims(block), dims(cluster), dynamic_smem)
    block_bytes = params if isinstance(params, bytes) else params(program, memory)
    machine = Machine(
        program, dims(grid), dims(block), cluster, dynamic_smem, seed, max_instructions, memory
    )
    machine.params = block_bytes.ljust(program.param_bytes, b"\0")
    ops.place_globals(machine)
    memory.commit()
    try:
        return machine.run()
    finally:
        memory.write_back()


def dims(value: int | Sequence[int]) -> Dim:
    """Return three dimensions of an int or a short sequence."""
    values = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    return (*values, 1, 1, 1)[:3]  # type: ignore[return-value]


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
) -> Report:
    """Run kernel `entry` of PTX text `ptx` and return its `Report`.

    Arrays among `args` are device buffers, changed in place; ints, floats, None (a null pointer) and
    bytes (structs) are by-value parameters, as are `TensorMap` and `Struct`.  `grid`, `block` and
    `cluster` are counted as in a CUDA launch, `dynamic_smem` in bytes.  `seed` chooses how warps are
    interleaved and when asynchronous work happens.  Raises `EmulationError` (PtxError,
    IllegalOperation, Deadlock) with the place and the rule; what does not stop a kernel but is wrong or
    doubtful is in `report.hazards`.
    """
    holder: list[Buffers] = []

    def params(program: Program, memory: GlobalMemory) -> bytes:
        holder.append(Buffers(memory))
        return pack(program, args, holder[0])

    try:
        return run(
            ptx,
            entry,
            dims(grid),
            dims(block),
            dims(cluster),
            dynamic_smem,
            params,
            (),
            seed,
            max_instructions,
        )
    finally:
        for buffers in holder:
            buffers.write_back()
