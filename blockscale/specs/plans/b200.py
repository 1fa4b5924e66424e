"""A model of the time that one launch of a tcgen05 GEMM takes on an NVIDIA B200.

Nobody here has a B200: this ranks the candidates of a search, and says by how much it errs where
others have published times (docs/b200_model.md).  What it gives is called modelled everywhere.

The kernel is persistent: clusters take tiles in rounds (*waves*), the last of which is partial.  In
a wave every CTA does ``k / block_k`` stages, and the slowest of these resources sets their pace:

* the tensor core and, for narrow tiles, the port from shared memory that feeds it or the warp that
  issues its instructions,
* the port that fills an SM's shared memory,
* the L2 cache, shared by all SMs; multicast and CTA pairs ask it for less,
* the ring: a slot is used again after a load's latency and its own MMAs,
* the HBM, by wave: what the wave touches first, and again what the L2 cache could not keep,
* the epilogue warps, by tile: they run beside the next tile, which waits for the part of the
  accumulator that it shares with them.

Before the first wave stand launch and pipeline fill; after the last its epilogue.  Numbers are
physical, from the places that `Machine` names; three are fitted, once, over all published points.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property

from blockscale.base.targets import GPU_TARGETS
from blockscale.specs.plans.gemm import LANES, OUT_BYTES, SCALE_ATOM_BYTES, GemmPlan

VERSION = 1
"""Of the formulas; with `Machine.digest` it says what made a modelled time."""

FITTED = ("sustained_ghz", "l2_tbps", "launch_us")
"""The fields of `Machine` that were fitted, over all points of `bench.tcgen05.b200_model`."""

ROW_STEP_BYTES = 32
"""Bytes of a row of an operand that one MMA reads: 64 elements of 4 bits, 32 of (padded) 8."""


@dataclass(frozen=True)
class Machine:
    """Numbers of a B200.

    Sources: [S] github.com/SemiAnalysisAI/microbench-blackwell, measured on B200; [N] NVIDIA's
    B200 data sheet; [P] PTX ISA 9.0, chapter tcgen05; [C] github.com/NVIDIA/cutlass issue 2923;
    [A] assumed, with the reason.

    Attributes:
        sms: [N].
        max_ghz: [S] clock of kernels that move data only (1.93 to 1.99 GHz).
        sustained_ghz: FITTED: clock under full tensor load with random data.  The data sheet's 9
            PFLOP/s are 148 SMs at 1.86 GHz; no GEMM of 8192 or more runs at it, of any data type,
            and boards with more power are faster (github.com/pytorch/FBGEMM pull 4172).
        mma_columns: columns of an MMA of 128 rows and 32 bytes of K per clock and SM: 32768
            FLOP/clock/SM for 4-bit kinds, 16384 for mxf8f6f4.  [S]: 128.0 clocks for N 256.
        operand_bytes: of operands from shared memory per clock.  [S]: 48 clocks for one CTA's
            N 64, 43 for a pair's (this port would give 40).
        issue_clocks: per instruction of the issuing warp, MMA or copy.  [S]: 11 to 12.
        stage_clocks: of that warp per stage: wait for the loads, commit the slot.  [A]
        mma_latency: clocks from an MMA's issue to its arrival at an mbarrier.  [S]: 237 and 301.
        copy_bytes: that tcgen05.cp reads per clock; copies share the operands' port.  [A]
        port_gbps: fill of one SM: 64 bytes per clock at max_ghz, as NVIDIA states for A100.
        l2_tbps: FITTED: from L2 to all SMs.  [S] saw 8.4 with HBM as the limit.
        l2_bytes: [N] 126 MB; two dies keep copies of what both read, so half of it is counted.
        hbm_tbps: [S] 7.0 to 7.3 of 8 nominal.
        l2_latency_us: of a TMA load that hits.  [S]: the fastest one took 927 clocks.
        hbm_latency_us: of a TMA load that misses.  [S]: 0.72 to 1.06 us for 1 to 8 KiB.
        tmem_bytes: that tcgen05.ld reads per clock: one register of each of four warps.  [A]
        math_clocks: per accumulator column of 128 rows: scale, convert and pack.  [A]
        step_clocks: per step of the epilogue: wait for loads, barriers, fences.  [A]
        share_bytes: of partial sums read from another SM per clock.  [A]: half a port's.
        barrier_us: of a barrier of a cluster.  [A]
        launch_us: FITTED: launch, tensor maps, allocation of tensor memory, last stores, exit.
    """

    sms: int = GPU_TARGETS["sm_100a"].sms
    max_ghz: float = 1.95
    sustained_ghz: float = 1.45
    mma_columns: float = 2.0
    operand_bytes: float = 128.0
    issue_clocks: float = 12.0
    stage_clocks: float = 40.0
    mma_latency: float = 240.0
    copy_bytes: float = 128.0
    port_gbps: float = 124.8
    l2_tbps: float = 14.9
    l2_bytes: float = 63e6
    hbm_tbps: float = 7.2
    l2_latency_us: float = 0.47
    hbm_latency_us: float = 0.94
    tmem_bytes: float = 512.0
    math_clocks: float = 3.0
    step_clocks: float = 60.0
    share_bytes: float = 32.0
    barrier_us: float = 0.25
    launch_us: float = 2.3

    def clusters(self, size: int) -> int:
        """Return clusters of ``size`` CTAs that run at once.

        A cluster stays within a GPC, and these have 16 to 20 SMs: [C] saw 33 clusters of 4.
        """
        return {1: self.sms, 2: self.sms // 2, 4: 33}.get(size, 128 // size)

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with any number or formula."""
        text = json.dumps([VERSION, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


B200 = Machine()


@dataclass(frozen=True)
class Modelled:
    """What the model says of one launch; times in microseconds.

    Attributes:
        us: of the whole kernel: the sum of the next four.
        launch, fill, main, tail: launch cost; until the first MMA; all waves; last epilogue.
        waves: rounds of the persistent clusters.
        limit: what most of the time goes to: "tensor", "operands", "issue", "port", "l2", "ring",
            "hbm" or "epilogue".
        flops: the GEMM's own, without padding.
        l2_bytes, hbm_bytes: that are read from each, and written.
    """

    us: float
    launch: float
    fill: float
    main: float
    tail: float
    waves: int
    limit: str
    flops: float
    l2_bytes: float
    hbm_bytes: float

    @property
    def pflops(self) -> float:
        """Useful PFLOP/s."""
        return self.flops / self.us / 1e9


@dataclass(frozen=True)
class Grid:
    """Tiles of a launch, in clusters: ``along_x`` by ``along_y`` of each of ``groups`` GEMMs."""

    along_x: int
    along_y: int
    groups: int
    rows: float
    """Of a in each group."""

    @property
    def clusters(self) -> int:
        """Tiles, counted in clusters."""
        return self.along_x * self.along_y * self.groups


def grid(plan: GemmPlan, m: int) -> Grid:
    """Return the tiles of ``m`` rows; those of a grouped GEMM fall equally on its experts."""
    groups = min(plan.experts, m) if plan.experts else 1
    rows = m / max(1, groups)
    x, y = (plan.n, rows) if plan.swap else (rows, plan.n)
    tile_x = plan.mma_m * plan.cluster_x // plan.cta_group
    return Grid(math.ceil(x / tile_x), math.ceil(y / (plan.mma_n * plan.cluster_y)), groups, rows)


@dataclass(frozen=True)
class _Pace:
    """What one stage costs one CTA, by resource."""

    tensor: float
    operands: float
    issue: float
    port: float
    ring: float
    l2_bytes: float
    """That the CTA asks the L2 cache for."""

    def us(self, ctas: int, stored: float, machine: Machine) -> tuple[float, str]:
        """Return a stage's time when ``ctas`` run, and the resource that sets it.

        ``stored``: bytes of output that the L2 cache takes meanwhile.
        """
        l2 = (self.l2_bytes * ctas + stored) / machine.l2_tbps / 1e6
        costs = {
            "tensor": self.tensor,
            "operands": self.operands,
            "issue": self.issue,
            "port": self.port,
            "l2": l2,
            "ring": self.ring,
        }
        limit = max(costs, key=lambda name: costs[name])
        return costs[limit], limit


def _pace(plan: GemmPlan, machine: Machine) -> _Pace:
    clock = machine.sustained_ghz * 1e3
    tensor = plan.steps * plan.mma_n / machine.mma_columns / clock
    rows = LANES + plan.mma_n // plan.cta_group
    reads = plan.steps * rows * ROW_STEP_BYTES / machine.operand_bytes
    copies = plan.scale_bytes / machine.copy_bytes
    instructions = plan.steps + plan.scale_bytes // SCALE_ATOM_BYTES
    issued = machine.stage_clocks + instructions * machine.issue_clocks
    loaded = loaded_bytes(plan, 1, 1)
    ring = machine.l2_latency_us + tensor + machine.mma_latency / clock
    return _Pace(
        tensor,
        (reads + copies) / clock,
        issued / clock,
        loaded / machine.port_gbps / 1e3,
        ring / plan.stages,
        loaded_bytes(plan, plan.cluster_y, plan.cluster_x),
    )


def loaded_bytes(plan: GemmPlan, x_share: int, y_share: int) -> float:
    """Return the bytes of a stage that a CTA fetches when so many share X and Y by multicast.

    In a pair each CTA holds half of Y but all of its scales.  The 4-bit operand of mxf8f6f4 is
    padded to 8 bits on its way into shared memory, so it comes from L2 unpadded.
    """
    scale = SCALE_ATOM_BYTES * plan.atoms_k
    wide = 4 if plan.format.a.bits == 4 else 8
    x, y = plan.x_bytes * plan.x_bits / wide, plan.y_bytes * plan.y_bits / wide
    y_copies = max(1, y_share // plan.cta_group)
    return (x + scale) / x_share + y / y_copies + scale * plan.y_atoms / y_share


def out_bytes(plan: GemmPlan) -> float:
    """Return the bytes that a column of the product has in d: a gate and an up are 4 bits."""
    return 0.25 if plan.out_dtype == "uint8" else OUT_BYTES[plan.out_dtype]


def epilogue_clocks(plan: GemmPlan, machine: Machine = B200) -> tuple[float, float]:
    """Return what the epilogue of a CTA's tile costs: emptying tensor memory, and everything."""
    size = out_bytes(plan)
    columns = plan.mma_n / plan.split_k
    load = LANES * 4 / machine.tmem_bytes + machine.math_clocks
    if plan.store == "tma":  # into shared memory and out of it
        store = 2 * LANES * size / machine.operand_bytes
    elif plan.swap:  # 32 lanes write neighbouring elements
        store = LANES / 32
    else:  # each lane writes 16 bytes into a row of its own, one line per clock
        store = LANES / (16 / size)
    steps = max(1.0, columns / plan.epi_cols)
    empty = columns * load + steps * machine.step_clocks / 2
    return empty, columns * (load + store) + steps * machine.step_clocks


def _reduction_us(plan: GemmPlan, machine: Machine) -> float:
    """Return the time in which a cluster adds up its partial sums through shared memory."""
    if plan.split_k == 1:
        return 0.0
    data = LANES * plan.mma_n * 4
    others = data * (plan.split_k - 1) / plan.split_k
    clocks = data / machine.operand_bytes + others / machine.share_bytes
    load = plan.mma_n * LANES * 4 / machine.tmem_bytes
    return (clocks + load) / machine.sustained_ghz / 1e3 + 2 * machine.barrier_us


@dataclass(frozen=True)
class _Operands:
    """Bytes of the launch's tensors, scales included, and how often HBM gives them."""

    x_tile: float
    y_tile: float
    out_tile: float
    """Of one cluster."""
    hbm: float
    """That all waves read, again and again what L2 cannot keep, and write."""


def _operands(plan: GemmPlan, tiles: Grid) -> _Operands:
    fmt = plan.format
    scale = 8 / fmt.block
    a_bytes = tiles.rows * plan.k * (fmt.a.bits + scale) / 8
    b_bytes = plan.n * plan.k * (fmt.b.bits + scale) / 8
    x, y = (b_bytes, a_bytes) if plan.swap else (a_bytes, b_bytes)
    out = tiles.rows * plan.n * out_bytes(plan)
    x_tile, y_tile = x / tiles.along_x, y / tiles.along_y
    out_tile = out / tiles.along_x / tiles.along_y
    return _Operands(x_tile, y_tile, out_tile, (x + y + out) * tiles.groups)


def _hbm_bytes(plan: GemmPlan, tiles: Grid, running: int, found: _Operands, l2: float) -> float:
    """Return what all waves read from HBM and write.

    The tiles of ``group`` clusters of one index are walked along the other one, ``raster``; the
    slab of the group stays in L2 if it fits, and what is walked along comes again for each slab.
    """
    once = found.hbm
    fast, slow = (
        (tiles.along_x, tiles.along_y) if plan.raster == "x" else (tiles.along_y, tiles.along_x)
    )
    fast_tile, slow_tile = (
        (found.x_tile, found.y_tile) if plan.raster == "x" else (found.y_tile, found.x_tile)
    )
    group = min(plan.group, slow)
    walked, kept = fast * fast_tile, slow * slow_tile
    if walked + kept <= l2:
        return once
    passes = math.ceil(slow / group)
    if walked > l2 - group * slow_tile:  # else what is walked along stays, too
        once += walked * (passes - 1) * tiles.groups
    if group * slow_tile > l2:  # a slab too large is read again by every wave
        side = max(1, running // group)
        once += kept * (math.ceil(fast / side) - 1) * tiles.groups
    return once


def time_us(plan: GemmPlan, m: int, machine: Machine = B200) -> Modelled:
    """Return the modelled time of one launch with ``m`` rows of a, whose data come from HBM."""
    tiles = grid(plan, m)
    if tiles.clusters == 0 or m == 0:
        us = machine.launch_us
        return Modelled(us, us, 0.0, 0.0, 0.0, 0, "tensor", 0.0, 0.0, 0.0)
    running = min(tiles.clusters, machine.clusters(plan.cluster))
    if plan.split_k > 1:  # one tile a cluster, but no more at once than fit
        running = min(tiles.clusters, machine.clusters(plan.split_k))
    pace = _pace(plan, machine)
    stages = math.ceil(math.ceil(plan.k / plan.block_k) / plan.split_k)
    found = _operands(plan, tiles)
    hbm = _hbm_bytes(plan, tiles, running, found, machine.l2_bytes)
    empty, whole = (c / machine.sustained_ghz / 1e3 for c in epilogue_clocks(plan, machine))
    waves = math.ceil(tiles.clusters / running)
    last = tiles.clusters - (waves - 1) * running
    main, l2_bytes = 0.0, 0.0
    spent: dict[str, float] = {}
    for clusters, times, ends in ((running, waves - 1, False), (last, 1, True)):
        ctas = clusters * plan.cluster
        stored = found.out_tile * clusters
        stage, limit = pace.us(ctas, stored / stages, machine)
        us = stage * stages
        share = hbm * clusters / tiles.clusters / machine.hbm_tbps / 1e6
        if share > us:
            us, limit = share, "hbm"
        if not ends:  # the last wave's epilogue is the tail
            us, limit = _with_epilogue(plan, us, limit, empty, whole)
        main += us * times
        spent[limit] = spent.get(limit, 0.0) + us * times
        l2_bytes += times * (pace.l2_bytes * stages * ctas + stored)
    clock = machine.sustained_ghz * 1e3
    fill = machine.hbm_latency_us + machine.mma_latency / clock
    tail = whole + _reduction_us(plan, machine)
    return Modelled(
        us=machine.launch_us + fill + main + tail,
        launch=machine.launch_us,
        fill=fill,
        main=main,
        tail=tail,
        waves=waves,
        limit=max(spent, key=lambda name: spent[name]),
        flops=2.0 * m * plan.n * plan.k,
        l2_bytes=l2_bytes,
        hbm_bytes=hbm,
    )


def _with_epilogue(
    plan: GemmPlan, us: float, limit: str, empty: float, whole: float
) -> tuple[float, str]:
    """Return the time from one tile to the next: MMAs wait for the accumulator's shared part."""
    if plan.acc_stages == 1:
        us += empty
    else:
        us += empty * plan.overlap / plan.mma_n
    return (us, limit) if us >= whole else (whole, "epilogue")
