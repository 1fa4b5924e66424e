"""What a tcgen05 GEMM kernel is: every decision of its schedule, and the room that it takes.

The lowering reads a `GemmPlan` off the scheduled TensorIR (`gemm_read`), the kernel of
`native/gemm_sm100.cuh` is compiled for it (`gemm_source`), the model of a B200 times it.  X is the
operand whose rows are the rows of the MMA (its M, on the lanes of tensor memory), Y the one whose
rows are its columns (its N): X is a and Y is b, or with ``swap`` X is b and Y is a.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from blockscale.base import formats
from blockscale.base.formats import Format
from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import CTA_RESERVED, GPU_TARGETS

SM100 = GPU_TARGETS["sm_100a"]

SMEM_BYTES, SM_SMEM_BYTES, TMEM_COLUMNS = SM100.cta_shared, SM100.sm_shared, SM100.tensor_columns
"""Shared memory that one CTA may use on sm_100, that of an SM, columns of its tensor memory."""

LANES = 128
"""Rows of X that a CTA computes: the lanes of tensor memory."""

SCALE_ATOM_BYTES, SCALE_ATOM_COLUMNS = 512, 4
"""A 128x4 tile of scale bytes, in shared memory and in tensor memory."""

MAX_CLUSTER = 8
"""CTAs of a cluster that every sm_100 runs without opting in."""

CTRL_BYTES = 1024
"""Shared memory for mbarriers, the base of tensor memory, and alignment."""

MAX_EXPERTS = 1024
"""Experts of a grouped GEMM, whose table (16 bytes each) is kept in shared memory."""

Y_TILES = (32, 64, 128, 192, 256)
"""Columns of the MMA: where a tile starts within a 128x4 tile of scales, whole columns of tensor
memory (of 32 rows) must start; 192 starts at multiples of 64."""

K_LOOP = {"stages": None, "split_k": 1}
"""Annotations of the loop over K; stages must be there."""

RASTERS = ("x", "y")
"""What the number of a raster means."""


OUT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
"""Of an element of d by its dtype; uint8: codes that an epilogue has made of gates and ups."""


class PlanError(ValueError):
    """A combination of decisions that the hardware or the kernel does not have."""


class Stored(Protocol):
    """What plans of all kinds of MMAs decide on stages and stores; see `GemmPlan`."""

    @property
    def out_dtype(self) -> str:
        """Key of `OUT_BYTES`."""

    @property
    def n(self) -> int:
        """Columns of d."""

    @property
    def experts(self) -> int:
        """0 for a plain GEMM."""

    @property
    def swap(self) -> bool:
        """Whether X is b."""

    @property
    def mma_n(self) -> int:
        """Rows of Y in a tile."""

    @property
    def block_k(self) -> int:
        """Elements of K in a stage."""

    @property
    def stages(self) -> int:
        """Of the ring."""

    @property
    def epi_cols(self) -> int:
        """Columns of sums that the epilogue takes at a time."""

    @property
    def store(self) -> str:
        """Either "tma" or "direct"."""

    @property
    def format(self) -> Format:
        """The row of the format."""


def illegal_stages(plan: Stored) -> str | None:
    """Why there is no ring of such stages; None if there is."""
    widths = (128, 256) if plan.format.a.bits == 4 else (128,)
    if plan.block_k not in widths:
        return (
            f"block_k={plan.block_k} is none of {widths}, which make rows of 64 or 128 bytes, "
            "the swizzles of shared memory"
        )
    if plan.stages < 2:
        return f"stages={plan.stages}: loads overlap with MMAs from 2 stages on"
    if plan.experts > MAX_EXPERTS:
        return f"experts={plan.experts} are more than {MAX_EXPERTS}"
    return None


def illegal_stores(plan: Stored) -> str | None:
    """Why there is no epilogue that stores so; None if there is."""
    if plan.epi_cols not in (16, 32, 64) or plan.mma_n % plan.epi_cols:
        return f"epi_cols={plan.epi_cols} is not 16, 32 or 64, or does not divide {plan.mma_n}"
    if plan.store not in ("tma", "direct"):
        return f"store={plan.store!r} is neither 'tma' nor 'direct'"
    wide = plan.epi_cols * OUT_BYTES[plan.out_dtype]
    if plan.store == "tma" and not plan.swap and wide not in (32, 64, 128):
        return f"a TMA store of rows of {wide} bytes has no swizzle; it has for 32, 64 and 128"
    if plan.store == "tma" and plan.n * OUT_BYTES[plan.out_dtype] % 16:
        return f"n={plan.n}: rows of d are no multiple of 16 bytes, which TMA wants"
    return None


@dataclass(frozen=True)
class GemmPlan:
    """One kernel: ``d[m, n] = alpha * a[m, k] x b[n, k].T + bias``, m known when it runs.

    Attributes:
        fmt: key of `formats.GEMM`.
        out_dtype: key of `OUT_BYTES`.
        n, k: the true sizes; the last tiles may be ragged.
        experts: 0 for a plain GEMM, else b is [experts, n, k] and rows of a are grouped.
        swap: X is b: for few rows of a.
        cta_group: 1, or 2: a pair of CTAs computes 256 rows of X and shares Y.
        mma_n: columns of the MMA: rows of Y in a tile.
        block_k: elements of K in a pipeline stage.
        stages: of the ring from TMA to MMA.
        cluster_x: CTAs of a cluster along X, of which each pair counts two; Y is multicast to them.
        cluster_y: CTAs of a cluster along Y; X is multicast to them.
        split_k: CTAs of a cluster that share a tile's K and add up through shared memory.
        acc_stages: accumulators in tensor memory; two let the epilogue overlap the next tile.
        epi_cols: accumulator columns that the epilogue takes at a time.
        store: "tma": through shared memory, or "direct".
        raster: which tile index runs first, "x" or "y".
        group: clusters of the other index that are kept together for the L2 cache.
    """

    fmt: str
    out_dtype: str
    n: int
    k: int
    experts: int
    swap: bool
    cta_group: int
    mma_n: int
    block_k: int
    stages: int
    cluster_x: int
    cluster_y: int
    split_k: int
    acc_stages: int
    epi_cols: int
    store: str
    raster: str
    group: int

    # ---- Sizes ------------------------------------------------------------------------------

    @property
    def format(self) -> Format:
        """The row of the format."""
        return formats.GEMM[self.fmt]

    @property
    def mma_m(self) -> int:
        """Rows of X of one MMA."""
        return LANES * self.cta_group

    @property
    def tile_rows(self) -> int:
        """Rows of a (tokens) of one tile: of a CTA pair, or a CTA."""
        return self.mma_n if self.swap else self.mma_m

    @property
    def tile_cols(self) -> int:
        """Columns of d (rows of b) of one tile."""
        return self.mma_m if self.swap else self.mma_n

    @property
    def steps(self) -> int:
        """MMA instructions of one stage."""
        return self.block_k // self.format.step

    @property
    def x_bits(self) -> int:
        """Bits of an element of X."""
        return self.format.b.bits if self.swap else self.format.a.bits

    @property
    def y_bits(self) -> int:
        """Bits of an element of Y."""
        return self.format.a.bits if self.swap else self.format.b.bits

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of either operand in a stage; kind mxf8f6f4 holds 4 bits in a byte."""
        return self.block_k // (2 if self.format.a.bits == 4 else 1)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_x * self.cluster_y * self.split_k

    # ---- Scales -----------------------------------------------------------------------------

    @property
    def atoms_k(self) -> int:
        """128x4 tiles of scales along K in one stage."""
        return self.block_k // (4 * self.format.block)

    @property
    def y_atoms(self) -> int:
        """128x4 tiles of scales along the rows of Y that a tile may touch."""
        return ceil_div(self.mma_n, 128)

    # ---- Shared memory ----------------------------------------------------------------------

    @property
    def x_bytes(self) -> int:
        """Of X in one stage of one CTA."""
        return LANES * self.row_bytes

    @property
    def y_bytes(self) -> int:
        """Of Y in one stage of one CTA."""
        return self.mma_n // self.cta_group * self.row_bytes

    @property
    def scale_bytes(self) -> int:
        """Of both operands' scales in one stage of one CTA: all of Y's in each CTA of a pair."""
        return SCALE_ATOM_BYTES * self.atoms_k * (1 + self.y_atoms)

    @property
    def stage_bytes(self) -> int:
        """Of one stage of one CTA."""
        return self.x_bytes + self.y_bytes + self.scale_bytes

    @property
    def store_bytes(self) -> int:
        """Staging of the epilogue: two steps of a TMA store, or the partial sums of split-K."""
        if self.split_k > 1:
            return LANES * self.mma_n * 4
        return 2 * LANES * self.epi_cols * OUT_BYTES[self.out_dtype] if self.store == "tma" else 0

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA, at least as much as keeps tensor memory free of queues.

        A CTA that waits for tensor memory keeps its cluster waiting.  If two clusters did so for
        each other on two SMs, neither would end.  So no more CTAs may fit into the shared memory of
        an SM than into its tensor memory.
        """
        table = 16 * self.experts
        used = CTRL_BYTES + self.stages * self.stage_bytes + self.store_bytes + table
        one_too_many = TMEM_COLUMNS // self.tmem_columns + 1
        return max(used, SM_SMEM_BYTES // one_too_many - CTA_RESERVED + 16)

    @property
    def launch_bytes(self) -> int:
        """Dynamic shared memory of a CTA's launch: of a cluster's, as large a share as of columns.

        Then CTAs of different kernels (of two streams), too, fit into tensor memory where they fit
        into shared memory, and no two clusters wait for each other's columns.
        """
        share = SM_SMEM_BYTES * self.tmem_columns // TMEM_COLUMNS - CTA_RESERVED
        return max(self.smem_bytes, share) if self.cluster > 1 else self.smem_bytes

    # ---- Tensor memory ----------------------------------------------------------------------

    @property
    def scale_columns(self) -> int:
        """Columns of scales: a place of its own for every 128x4 tile of a stage."""
        return SCALE_ATOM_COLUMNS * self.atoms_k * (1 + self.y_atoms)

    @property
    def overlap(self) -> int:
        """Columns that two accumulators share for lack of room; the epilogue empties them first."""
        if self.acc_stages == 1:
            return 0
        missing = max(0, 2 * self.mma_n + self.scale_columns - TMEM_COLUMNS)
        return round_up(missing, self.epi_cols)

    @property
    def used_columns(self) -> int:
        """Columns that are in use."""
        return self.acc_stages * self.mma_n - self.overlap + self.scale_columns

    @cached_property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two from 32."""
        columns = 32
        while columns < self.used_columns:
            columns *= 2
        return columns

    # ---- Legality ---------------------------------------------------------------------------

    def check(self) -> GemmPlan:
        """Return the plan; PlanError says which limit it breaks, with the number."""
        reason = self.illegal()
        if reason is not None:
            raise PlanError(f"GemmPlan: {reason}")
        return self

    def illegal(self) -> str | None:
        """Why there is no such kernel; None if there is."""
        for rule in (self._illegal_tile, self._illegal_cluster, self._illegal_epilogue):
            reason = rule()
            if reason is not None:
                return reason
        if self.smem_bytes > SMEM_BYTES:
            return (
                f"{self.stages} stages of {self.stage_bytes} bytes, {self.store_bytes} of the "
                f"epilogue and {CTRL_BYTES + 16 * self.experts} others are {self.smem_bytes} bytes "
                f"of shared memory, and {SMEM_BYTES} are the limit; take fewer stages"
            )
        if self.used_columns > TMEM_COLUMNS:
            return (
                f"{self.used_columns} columns of tensor memory, and {TMEM_COLUMNS} are the limit; "
                "take fewer accumulators"
            )
        return None

    def _illegal_tile(self) -> str | None:
        if self.cta_group not in (1, 2):
            return f"cta_group={self.cta_group} is neither 1 nor 2"
        if self.mma_n not in Y_TILES:
            return f"mma_n={self.mma_n} is none of {Y_TILES}; choose one of them"
        return illegal_stages(self)

    def _illegal_cluster(self) -> str | None:
        if self.cluster > MAX_CLUSTER:
            return f"a cluster of {self.cluster} CTAs is larger than {MAX_CLUSTER}"
        if self.cluster_x % self.cta_group:
            return f"cluster_x={self.cluster_x} is no multiple of cta_group={self.cta_group}"
        if self.split_k > 1 and (self.cta_group > 1 or self.cluster != self.split_k):
            return (
                f"split_k={self.split_k} takes the whole cluster, of single CTAs; leave cta_group, "
                "cluster_x and cluster_y at 1"
            )
        if self.split_k > 1 and self.split_k > ceil_div(self.k, self.block_k):
            return f"split_k={self.split_k} leaves CTAs without K; k={self.k} has fewer stages"
        x_rows, y_rows = LANES // self.cluster_y, self.mma_n // self.cluster_x
        if x_rows % 8 or y_rows % 8:
            return (
                f"a multicast slice of {x_rows} or {y_rows} rows is no multiple of 8, the rows of "
                "a swizzle atom; take a smaller cluster"
            )
        if self.experts and self.cluster // self.split_k > self.cta_group:
            return (
                "tiles of a grouped GEMM belong to different experts, so there is nothing to "
                "multicast; leave cluster_x at cta_group and cluster_y at 1"
            )
        return None

    def _illegal_epilogue(self) -> str | None:
        if self.acc_stages not in (1, 2):
            return f"acc_stages={self.acc_stages} is neither 1 nor 2"
        stores = illegal_stores(self)
        if stores is not None:
            return stores
        if self.split_k > 1 and (self.acc_stages > 1 or self.store != "direct"):
            return "split_k computes one tile a cluster and stores directly; acc_stages is 1"
        if self.overlap > self.mma_n // 2:
            return (
                f"two accumulators of {self.mma_n} columns would share {self.overlap}, more than "
                "half; take one accumulator"
            )
        if self.raster not in ("x", "y") or self.group < 1:
            return f"raster={self.raster!r}, group={self.group} is no order of tiles"
        return None
