"""A kernel as it is derived from its TensorIR: roles, slots, loads, steps, the epilogue's blocks.

X is the operand whose rows are lanes of tensor memory, Y the one whose rows are columns of the
accumulator.  Six warps: 0 to 3 store, 4 loads, 5 multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.base.sizes import round_up
from blockscale.base.targets import CTA_RESERVED, GPU_TARGETS, Gpu
from blockscale.lower.pipe.read import Coordinates, Site, View

SM100 = GPU_TARGETS["sm_100a"]

STORE_WARPS, LOAD_WARP, MMA_WARP, THREADS = 4, 4, 5, 192

LANES = 128
"""Of tensor memory: rows of X that a CTA computes."""

CONTROL_BYTES = 1024
"""Shared memory for mbarriers, the base of tensor memory, sums of warps."""

EXPERT_BYTES = 16
"""Of an expert in a grouped kernel's table."""


def shared_share(columns: int) -> int:
    """Bytes that are of an SM's shared memory what ``columns`` are of its tensor memory.

    Without the CTA_RESERVED that the system adds.
    """
    return SM100.sm_shared * columns // SM100.tensor_columns - CTA_RESERVED


@dataclass(frozen=True, eq=False)
class Slot:
    """What one stage of a buffer takes in a CTA.

    Attributes:
        name: of the buffer, in C.
        base: the first element, in coordinates.
        shape: elements in the buffer's dimensions.
        row_bytes: of a row of an operand, over which it is swizzled; 0: of scales, not swizzled.
        bytes: of a stage in shared memory.
        columns: of tensor memory.
    """

    name: str
    base: tuple[PrimExpr, ...]
    shape: tuple[int, ...]
    row_bytes: int = 0
    bytes: int = 0
    columns: int = 0


@dataclass(frozen=True, eq=False)
class MapDim:
    """A dimension of a tensor map.

    Attributes:
        extent: elements; None: known when the kernel runs.
        axis: what it runs along, with `unit`.
        pitch: bytes to the next index; 0 for the innermost.
        box: elements of one load or store, of all CTAs that share it.
        at: its first index, in coordinates.
    """

    extent: int | None
    axis: str
    unit: int
    pitch: int
    box: int
    at: PrimExpr


@dataclass(frozen=True, eq=False)
class Transfer:
    """A load or store by TMA, all boxes of a stage in one.

    Attributes:
        view: the parameter.
        dtype: of the map's elements.
        dims: innermost first.
        swizzle: bytes of its pattern's row, 0: none.
        slot: in shared memory.
        along_x, along_y, along_pair: whether what is moved differs between the CTAs of a cluster
            along X, along Y, and in a pair.
        once: no other tile of rows reads it, where there is one.
        packed: the warp that loads spreads its 4-bit codes to bytes.
        target: of a store, the first element in the parameter's dimensions of the TensorIR.
    """

    view: View
    dtype: str
    dims: tuple[MapDim, ...]
    swizzle: int
    slot: Slot
    along_x: bool = True
    along_y: bool = True
    along_pair: bool = True
    once: bool = False
    packed: bool = False
    target: tuple[PrimExpr, ...] = ()

    @property
    def wide(self) -> bool:
        """Whether it moves rows of an operand, which may be sliced between CTAs."""
        return self.slot.row_bytes > 0

    @property
    def count(self) -> int:
        """Bytes that a barrier is told of: spread codes count as they lie in global memory."""
        spread = self.dtype == "16U4_ALIGN16B" or self.packed
        return self.slot.bytes // 2 if spread else self.slot.bytes


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of a 128x4 tile of scales from shared to tensor memory.

    Attributes:
        side: "x" or "y".
        source: offset in the slot of shared memory, in bytes.
        column: in the slot of tensor memory.
    """

    side: str
    source: int
    column: int


@dataclass(frozen=True, eq=False)
class Multiply:
    """One MMA of a stage.

    Attributes:
        x, y: offsets in the slots of shared memory, in bytes.
        sx, sy: columns of their scales, in the slots of tensor memory.
        x_byte, y_byte: of those columns, at which the scales begin.
    """

    x: int
    y: int
    sx: int
    sy: int
    x_byte: int
    y_byte: int


@dataclass(frozen=True, eq=False)
class Stage:
    """What the multiplying warp issues for one stage."""

    copies: tuple[Copy, ...]
    multiplies: tuple[Multiply, ...]


@dataclass(frozen=True, eq=False)
class Instruction:
    """The MMA: its function, and the constants of its descriptor but N and scale bytes."""

    function: str
    m: int
    n: int
    x_format: int
    y_format: int
    ue8m0: int


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What the storing warps do with a tile.

    Attributes:
        chunk: the number of the part of the tile that is in registers, in its expressions.
        chunks, columns: parts, and columns of each.
        width: columns of one tcgen05.ld.
        sites: plain blocks and instructions of a thread, in order.
        acc: the buffer in registers that the accumulator is read to.
        acc_base: its first element, of lane 0 of a warp.
        stores: by TMA, from a buffer in shared memory (its name).
    """

    chunk: tirx.Var
    chunks: int
    columns: int
    width: int
    sites: tuple[Site, ...]
    acc: str
    acc_base: tuple[PrimExpr, ...]
    stores: dict[str, Transfer]


@dataclass(frozen=True, eq=False)
class Kernel:
    """All of a kernel.

    Attributes:
        at: the coordinates of expressions.
        views, scalars, optional: as `read.Reader` has them.
        x_axis, y_axis: "rows" and "cols" of d, or the other way round.
        x_tile, y_tile: of d of a tile, on lanes (of a pair) and on columns.
        group: CTAs that multiply together, 1 or 2.
        cluster_x, cluster_y, split: CTAs of a cluster along X, Y and K.
        stages, acc_stages: of the ring, accumulators.
        raster_x, band: order of tiles.
        loads: of X, Y, X's scales, Y's scales.
        sx, sy: slots of scales in tensor memory.
        sy_shift: column of a tile's first scales of Y in its slot, in coordinates.
        whole, last: what is issued for a stage, and for the last one if K ends within it.
        k_stages: of a tile, `last` included.
        stage_k: elements of K of a stage.
        experts: 0: not grouped.
        one_launch: whether it is to begin in the launch of the GEMM that makes its rows (`phases`).
        control_at: where tables and barriers begin in shared memory at the earliest.
    """

    at: Coordinates
    views: dict[str, View]
    scalars: tuple[tirx.Var, ...]
    optional: dict[str, float]
    x_axis: str
    y_axis: str
    x_tile: int
    y_tile: int
    group: int
    cluster_x: int
    cluster_y: int
    split: int
    stages: int
    acc_stages: int
    raster_x: bool
    band: int
    loads: tuple[Transfer, Transfer, Transfer, Transfer]
    sx: Slot
    sy: Slot
    sy_shift: PrimExpr
    mma: Instruction
    whole: Stage
    last: Stage | None
    k_stages: int
    stage_k: int
    epilogue: Epilogue
    experts: int
    one_launch: bool = False
    control_at: int = 0

    @property
    def gpu(self) -> Gpu:
        """Its architecture, or one like it."""
        return SM100

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return THREADS

    # ---- Tiles ------------------------------------------------------------------------------

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_x * self.cluster_y * self.split

    @property
    def swap(self) -> bool:
        """Whether rows of d are on columns of the accumulator, whose number then varies."""
        return self.y_axis == "rows"

    def cluster_tile(self, axis: str) -> int:
        """Rows or columns of d of a cluster."""
        if axis == self.x_axis:
            return self.x_tile // self.group * self.cluster_x
        return self.y_tile * self.cluster_y

    @property
    def cols(self) -> int:
        """True columns of the product: rows of b."""
        views = (load.view for load in self.loads[:2])
        return next(d.extent or 0 for view in views for d in view.dims if d.axis == "cols")

    @property
    def out(self) -> View:
        """The output that tiles are of."""
        return next(reversed(self.views.values()))

    @property
    def col_tiles(self) -> int:
        """Clusters along the columns of d."""
        return -(-self.cols // self.cluster_tile("cols"))

    # ---- Tensor memory ----------------------------------------------------------------------

    @property
    def overlap(self) -> int:
        """Columns that two accumulators share for lack of room; the epilogue empties them first."""
        if self.acc_stages == 1:
            return 0
        missing = 2 * self.mma.n + self.sx.columns + self.sy.columns - SM100.tensor_columns
        return round_up(max(0, missing), self.epilogue.columns)

    @property
    def acc_pitch(self) -> int:
        """Columns from one accumulator to the next."""
        return self.mma.n - self.overlap

    @property
    def sx_column(self) -> int:
        """Where X's scales begin, behind the accumulators."""
        return self.acc_stages * self.mma.n - self.overlap

    @property
    def sy_column(self) -> int:
        """Where Y's scales begin."""
        return self.sx_column + self.sx.columns

    @property
    def used_columns(self) -> int:
        """Columns in use."""
        return self.sy_column + self.sy.columns

    @cached_property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two from 32."""
        columns = 32
        while columns < self.used_columns:
            columns *= 2
        return columns

    # ---- Shared memory ----------------------------------------------------------------------

    @property
    def unpacks(self) -> bool:
        """Whether the warp that loads spreads 4-bit codes."""
        return any(load.packed for load in self.loads)

    @property
    def staging(self) -> int:
        """Bytes of the epilogue: two steps of each warp's stores, or the sums of split K."""
        if self.split > 1:
            return LANES * self.mma.n * 4
        return sum(2 * STORE_WARPS * move.slot.bytes for move in self.epilogue.stores.values())

    @cached_property
    def places(self) -> dict[str, int]:
        """Bytes at which slots, staging, table and barriers begin."""
        found: dict[str, int] = {}
        at = 0

        def put(name: str, size: int) -> None:
            nonlocal at
            found[name] = at
            at += size

        x, y, sx, sy = self.loads
        for name, load in (("x", x), ("y", y)):
            put(name, self.stages * load.slot.bytes)
        put("out", self.staging)
        for name, load in (("sx", sx), ("sy", sy)):
            put(name, self.stages * load.slot.bytes)
        at = max(at, self.control_at)
        put("table", EXPERT_BYTES * self.experts)
        at += EXPERT_BYTES
        for name in ("full", "empty", "packed"):
            put(name, 8 * self.stages)
        sizes = {"done": 16, "free": 16, "tmem": 16, "scan": 96, "drained": 16}
        for name, size in sizes.items():
            put(name, size)
        found["end"] = at
        return found

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA, at least as much as keeps tensor memory free of queues.

        A CTA that waits for tensor memory keeps its cluster waiting.  If two clusters did so for
        each other on two SMs, neither would end.  So no more CTAs may fit into the shared memory of
        an SM than into its tensor memory.
        """
        used = self.places["table"] + EXPERT_BYTES * self.experts + CONTROL_BYTES
        if self.control_at:  # beside another one's
            used = self.places["end"]
        one_too_many = SM100.tensor_columns // self.tmem_columns + 1
        return max(used, SM100.sm_shared // one_too_many - CTA_RESERVED + 16)

    @property
    def launch_bytes(self) -> int:
        """Dynamic shared memory of a CTA's launch: of a cluster's, as large a share as of columns.

        Then CTAs of different kernels (of two streams), too, fit into tensor memory where they fit
        into shared memory, and no two clusters wait for each other's columns.
        """
        share = shared_share(self.tmem_columns)
        return max(self.smem_bytes, share) if self.cluster > 1 else self.smem_bytes

    # ---- Barriers ---------------------------------------------------------------------------

    @property
    def senders(self) -> int:
        """Pairs (CTAs) that read what a CTA loads: arrivals that empty a stage."""
        return self.cluster_x // self.group + self.cluster_y - 1

    @property
    def frees(self) -> int:
        """Barriers that say that an accumulator is free: one where they share columns."""
        return 1 if self.overlap else self.acc_stages
