"""ldmatrix, stmatrix, movmatrix and mma.sync (PTX ISA 9.7.14.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blockscale.emulator.errors import PtxError
from blockscale.emulator.machine.gangs import Gang
from blockscale.emulator.machine.grid import LANES
from blockscale.emulator.machine.state import Fragment
from blockscale.emulator.mma.matrix import lookup_ldmatrix, lookup_stmatrix, movmatrix
from blockscale.emulator.mma.sync import lookup
from blockscale.emulator.ops.copies.issuer import aligned
from blockscale.emulator.ops.core import address, register
from blockscale.emulator.ops.memory.loadstore import Space
from blockscale.emulator.ops.operands import Operands
from blockscale.emulator.ptx.syntax import Imm, Instr, items_of


def gather(g: Gang, getters: list[Any], warps: np.ndarray) -> np.ndarray:
    """Return the registers of some warps [warps, 32, registers]."""
    lanes = (warps[:, None] * LANES + np.arange(LANES)).reshape(-1)
    return np.stack([get(g)[lanes] for get in getters], 1).reshape(-1, LANES, len(getters))


def put_all(
    g: Gang, m: np.ndarray | None, puts: list[Any], warps: np.ndarray, values: np.ndarray
) -> None:
    """Write registers [warps, 32, registers] of some warps."""
    full = np.zeros((g.W, LANES, len(puts)), values.dtype)
    full[warps] = values
    for i, put in enumerate(puts):
        put(g, m, full[..., i].reshape(-1))


def row_lanes(g: Gang, m: np.ndarray | None, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the active warps and the lanes that give row addresses, [warps * rows]."""
    warps = g.active_warps(m)
    return warps, (warps[:, None] * LANES + np.arange(rows)).reshape(-1)


@register("ldmatrix", operands=2, waits=True)
def ldmatrix(c: Operands, ins: Instr) -> Callable[..., Any]:
    """ldmatrix (9.7.14.5.15)."""
    op = lookup_ldmatrix(ins.opcode)
    if op is None:
        raise PtxError(f"{ins.opcode} is no ldmatrix")
    at = address(c, ins.operands[1])
    puts = [c.dest(item, "u4") for item in items_of(ins.operands[0])]
    if len(puts) != op.registers:
        raise PtxError(f"{ins.opcode} fills {op.registers} registers and has {len(puts)}")
    space = Space(c, "shared" if op.space else "", op.row_bytes, False, op.data_bytes)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        warps, lanes = row_lanes(g, m, op.rows)
        items = space.read(g, lanes, at(g)[lanes])
        data = op.fn(items.view(np.uint8).reshape(len(warps), op.rows, op.row_bytes))
        put_all(g, m, puts, warps, data)
        return True

    return run


@register("stmatrix", operands=2, waits=True)
def stmatrix(c: Operands, ins: Instr) -> Callable[..., Any]:
    """stmatrix (9.7.14.5.16)."""
    op = lookup_stmatrix(ins.opcode)
    if op is None:
        raise PtxError(f"{ins.opcode} is no stmatrix")
    at = address(c, ins.operands[0])
    gets = [c.lanes_source(item, "u4") for item in items_of(ins.operands[1])]
    if len(gets) != op.registers:
        raise PtxError(f"{ins.opcode} takes {op.registers} registers and has {len(gets)}")
    space = Space(c, "shared" if op.space else "", op.row_bytes, False)

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        warps, lanes = row_lanes(g, m, op.rows)
        data = op.fn(gather(g, gets, warps))
        dtype = f"V{op.row_bytes}" if op.row_bytes > 8 else f"u{op.row_bytes}"
        items = np.ascontiguousarray(data).reshape(len(lanes), -1).view(dtype).reshape(-1)
        space.write(g, lanes, at(g)[lanes], items)
        return True

    return run


@register("movmatrix", operands=2, waits=True)
def mov_matrix(c: Operands, ins: Instr) -> Callable[..., Any]:
    """movmatrix (9.7.14.5.17)."""
    put, get = c.dest(ins.operands[0], "u4"), c.lanes_source(ins.operands[1], "u4")

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        warps = g.active_warps(m)
        put_all(g, m, [put], warps, movmatrix(gather(g, [get], warps)[..., 0])[..., None])
        return True

    return run


@register("mma", operands=(4, 8), waits=True)
def mma(c: Operands, ins: Instr) -> Callable[..., Any]:
    """mma.sync (9.7.14.5.14) of every dense type, block-scaled forms of sm_120a included."""
    op = lookup(ins.opcode)
    if op is None:
        raise PtxError(f"instruction {ins.opcode} is not modelled")
    kinds = {"f64": "u8"}
    parts = [items_of(o) for o in ins.operands[:4]]
    wide = [kinds.get(k, "u4") for k in (op.d_kind, op.ab_kind, op.ab_kind, op.c_kind)]
    for items, count, name in zip(parts, (op.d, op.a, op.b, op.c), "dabc", strict=True):
        if len(items) != count:
            raise PtxError(
                f"{ins.opcode}: operand {name} has {len(items)} registers and wants {count}"
            )
    puts = [c.dest(item, wide[0]) for item in parts[0]]
    gets = [
        [c.lanes_source(i, w) for i in items] for items, w in zip(parts[1:], wide[1:], strict=True)
    ]
    scales: list[Any] = []
    flat = [i for o in ins.operands[4:] for i in items_of(o)]
    for item, kind in zip(flat, op.scales, strict=True):
        if isinstance(item, Imm):
            scales.append(int(item.value))
        else:
            scales.append(c.lanes_source(item, "u4" if kind == "b32" else "u2"))

    def run(g: Gang, m: np.ndarray | None, f: Fragment) -> bool:
        if not aligned(g, m, f):
            return False
        warps = g.active_warps(m)
        a, b, acc = (gather(g, x, warps) for x in gets)
        extra = [x if isinstance(x, int) else gather(g, [x], warps)[..., 0] for x in scales]
        put_all(g, m, puts, warps, op.fn(a, b, acc, *extra))
        return True

    return run
