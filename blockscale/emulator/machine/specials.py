"""Special registers (PTX ISA 10)."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockscale.emulator.errors import PtxError
from blockscale.emulator.machine.gangs import Gang, Machine
from blockscale.emulator.machine.grid import LANES, SMS, unravel
from blockscale.emulator.machine.memory import RESERVED

AXES = {"x": 0, "y": 1, "z": 2}


def special(g: Gang, name: str) -> Any:
    """Return special register `name` (PTX ISA 10) per lane, as `compute` does; kept per gang."""
    value = g.specials.get(name)
    if value is None:
        value = compute(g.machine, g, name)
        if "clock" not in name and "timer" not in name:
            g.specials[name] = value
    return value


def compute(m: Machine, g: Gang, name: str) -> Any:
    """Return special register `name` per lane (uint32; 64-bit clocks uint64, flags bool)."""
    head, _, tail = name.partition(".")
    if tail in AXES:
        return axis(m, g, head, AXES[tail])
    lane = np.tile(np.arange(LANES, dtype=np.uint32), g.W)
    number = np.repeat(m.warp_table["number"][g.warps], LANES).astype(np.uint32)
    one = np.ones(g.n, np.uint32)
    if head.startswith("%lanemask_"):
        bit = one << lane
        return {
            "eq": bit, "lt": bit - one, "le": (bit - one) | bit,
            "gt": ~((bit - one) | bit), "ge": ~(bit - one),
        }[head[10:]].astype(np.uint32)  # fmt: skip
    if head in ("%clock64", "%globaltimer"):
        return np.full(g.n, int(g.time) if head == "%clock64" else m.timer(), np.uint64)
    if head in ("%globaltimer_lo", "%globaltimer_hi"):
        return one * np.uint32(m.timer() >> (32 if head[-2:] == "hi" else 0) & 0xFFFFFFFF)
    constants = {
        "%nwarpid": m.cta_warps, "%nsmid": SMS, "%gridid": 0, "WARP_SZ": LANES,
        "%cluster_nctarank": m.cluster_ctas, "%clock": int(g.time) & 0xFFFFFFFF, "%clock_hi": 0,
        "%dynamic_smem_size": m.dynamic_smem, "%total_smem_size": m.shared.end - m.shared.first,
        "%aggr_smem_size": m.shared.end, "%reserved_smem_offset_begin": 0,
        "%reserved_smem_offset_end": RESERVED, "%reserved_smem_offset_cap": RESERVED,
        "%reserved_smem_offset_0": 0, "%reserved_smem_offset_1": 0,
    }  # fmt: skip
    if head in constants:
        return one * np.uint32(constants[head])
    if head == "%laneid":
        return lane
    if head == "%warpid":
        return number
    if head == "%smid":
        return g.lane_slot.astype(np.uint32)
    if head == "%cluster_ctarank":
        return g.lane_rank.astype(np.uint32)
    if head == "%is_explicit_cluster":
        return np.full(g.n, m.cluster_ctas > 1)
    if head.startswith(("%envreg", "%pm", "%current_graph_exec")):
        return np.zeros(g.n, np.uint32)
    raise PtxError(f"special register {name} is not modelled")


def axis(m: Machine, g: Gang, head: str, i: int) -> np.ndarray:
    """Return one axis of a three-dimensional special register."""
    one = np.ones(g.n, np.uint32)
    if head == "%tid":
        lane = np.tile(np.arange(LANES), g.W)
        thread = np.repeat(m.warp_table["number"][g.warps], LANES) * LANES + lane
        return unravel(thread, m.block)[i].astype(np.uint32)
    if head == "%ctaid":
        return m.slot_coords[g.lane_slot, i]
    if head == "%cluster_ctaid":
        return m.slot_cluster[g.lane_slot, i]
    if head == "%clusterid":
        return (m.slot_coords[g.lane_slot, i] // np.uint32(m.cluster[i])).astype(np.uint32)
    sizes = {
        "%ntid": m.block, "%nctaid": m.grid, "%cluster_nctaid": m.cluster,
        "%nclusterid": tuple(a // b for a, b in zip(m.grid, m.cluster, strict=True)),
    }  # fmt: skip
    if head not in sizes:
        raise PtxError(f"special register {head} has no axes")
    return one * np.uint32(sizes[head][i])
