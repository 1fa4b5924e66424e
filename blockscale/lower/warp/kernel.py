"""A kernel as it is derived from its TensorIR.

A CTA computes a tile: `cols_tile` rows of the weight, lanes and registers of warps, times
`rows_tile` rows of x.  Consumers first, `warps` for each slice of a stage's K; then a warp that
loads, by bulk copies of its first lane or by cp.async of all; and where rows of x are copied one by
one, warps that do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm.ir import Expr as PrimExpr
from tvm.tirx import Var

from blockscale.base.sizes import round_up
from blockscale.lower.pipe.read import Site, View
from blockscale.lower.warp.read import WarpCoordinates
from blockscale.specs.plans import tensor_memory
from blockscale.specs.plans.moe import E4M3

CONTROL_BYTES = 1024
"""Shared memory for mbarriers; operands of wgmma start at multiples of 1024."""


@dataclass(frozen=True, eq=False)
class Slot:
    """What a stage of a buffer takes.

    Attributes:
        buffer: in the TensorIR.
        base: its first element in a stage, in coordinates.
        shape: elements in the buffer's dimensions.
        strides: bytes to the next index of each.
        at: offset in the stage.
    """

    buffer: object
    base: tuple[PrimExpr, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.strides[-1]

    @property
    def bytes(self) -> int:
        """Of a stage."""
        return max(extent * stride for extent, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, eq=False)
class Runs:
    """Copies of a stage, each of contiguous bytes.

    Attributes:
        view: the parameter.
        slot: where they go.
        first: indices of the first copy's first element, in coordinates.
        parts: of each copy, by how much its indices and its offset in the slot (bytes) differ.
        blocks: copies hold so many along K, of `block_bytes` each.
        per_block: of 64 elements of K, how many a block of this buffer holds.
    """

    view: View
    slot: Slot
    first: tuple[PrimExpr, ...]
    parts: tuple[tuple[tuple[int, ...], int], ...]
    blocks: int
    block_bytes: int
    per_block: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Copies of rows of x of a stage.

    Attributes:
        view: the parameter.
        slot: of rows and blocks of 64 channels.
        row, channel: indices of the first row and its first channel, in coordinates; by "row" that
            of any row, in `WarpCoordinates.sorted` or `.slot`.
        row_stride, block_stride: bytes to the next row and block in the slot.
        how: "tma" loads boxes of all rows, swizzled, "row" 64 channels of a row, swizzled, by the
            lanes of warps of its own; "run" all of a row's by the warp that loads weights.
    """

    view: View
    slot: Slot
    row: PrimExpr
    channel: PrimExpr
    row_stride: int
    block_stride: int
    how: str

    @property
    def tma(self) -> bool:
        """Whether a tensor map describes x."""
        return self.how == "tma"

    @property
    def swizzled(self) -> bool:
        """Whether the 16 bytes of a row lie as ldmatrix and wgmma read them."""
        return self.how != "run"

    @property
    def box_row(self) -> int:
        """Bytes of 64 channels of a row, which swizzling permutes."""
        return 64 * self.slot.item


@dataclass(frozen=True, eq=False)
class Place:
    """Where a warp's instructions read in a slot.

    Attributes:
        first: offset in bytes of its first instruction, in warp and slice.
        steps: of each block of a stage (of the slice's), for each tile of 16 rows (or 8 rows of
            x), by how much the offset differs.
    """

    first: PrimExpr
    steps: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class GroupSums:
    """Sums of the products of a group, which a block multiplies with scales and adds to a tile's.

    Attributes:
        blocks: of 64 k in a group.
        update: the block: of a sum, that of a group, and a scale.
        scale: offset in bytes of the first scale that a lane reads in a stage, in warp and `own`.
        own: the lane's row among 8.
        steps: by how much offsets differ: of each group of a stage, of each tile of 16 rows, of
            rows g and g + 8.
    """

    blocks: int
    update: Site
    scale: PrimExpr
    own: Var
    steps: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, eq=False)
class Format:
    """What is decoded.

    ``fmt``: key of `formats.MOE`; ``group``: elements of a scale; ``zeros``: kind of zeros
    (`MoeGemm.zeros`); ``dtype``: of what is multiplied; ``order``: of K among threads and MMAs, see
    `intrin.warp.decode`.
    """

    fmt: str
    group: int
    zeros: int
    dtype: str
    order: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """All of a kernel.

    Attributes:
        at, views, optional, scalars, grouped, after, addressed: as `read.WarpReader` has them.
        unit: "mma", "wgmma" or "tcgen05".
        copies: "bulk", or "async" (cp.async).
        form: of weights.
        rows_tile, cols_tile: rows of x and of the weight of a tile.
        fastest: the axis along which tiles follow each other.
        warps, slices, ctas: that divide a tile's rows of the weight, a stage's K, and all of K.
        multicast: CTAs with neighbouring tiles of the weight, which load rows of x for each other.
        tiles_m: tiles of 16 rows of a warp.
        blocks: of 64 k in a stage.
        stages: of the ring.
        partial: channels whose products are summed up by themselves, of a stage's; 0: all are
            summed up in the tile's sums.
        k_stages: of a CTA, of K as it is padded.
        k_blocks: that there are.
        weights, scales, rows: loads.
        codes, factors, tokens: where weights, scales and rows of x are read; factors None:
            decoding takes codes alone.
        groups: sums of groups; None: MMAs add to the tile's, or to those that `partial` says.
        acc: the buffer of sums that the epilogue reads.
        epilogue: its block.
        part_rows: rows of x whose sums a warp reads from tensor memory at a time, which slices take
            in turn; 0: sums are registers.
        unit_tiles: tiles of 16 rows of a warp that are stored together.
    """

    at: WarpCoordinates
    views: Mapping[str, View]
    optional: Mapping[str, float]
    scalars: tuple[Var, ...]
    grouped: bool
    after: tuple[str, ...] | None
    addressed: tuple[str, ...]
    unit: str
    copies: str
    form: Format
    rows_tile: int
    cols_tile: int
    fastest: str
    warps: int
    slices: int
    ctas: int
    multicast: int
    tiles_m: int
    blocks: int
    stages: int
    partial: int
    k_stages: int
    k_blocks: int
    weights: Runs
    scales: Runs
    rows: Rows
    codes: Place
    factors: Place | None
    tokens: Place
    groups: GroupSums | None
    acc: str
    epilogue: Site
    part_rows: int
    unit_tiles: int = 1

    @property
    def tensor(self) -> bool:
        """Whether decoded weights and sums are in tensor memory."""
        return self.unit == "tcgen05"

    @property
    def tensor_bars(self) -> tuple[int, int, int, int]:
        """Where mbarriers of tensor memory lie: of banks decoded and free, of sums, made and read.

        Those of stages come first.
        """
        first, banks = 16 * self.stages, 2 * self.blocks
        return first, first + 8 * banks, first + 16 * banks, first + 16 * banks + 8

    @property
    def tmem_at(self) -> int:
        """Where the address of tensor memory lies."""
        return self.tensor_bars[-1] + 8

    @property
    def columns(self) -> int:
        """Of tensor memory that are allocated, a power of two: sums, and banks of two stages."""
        used = tensor_memory.columns(self.rows_tile, self.blocks)
        return 1 << max(5, (used - 1).bit_length())

    @property
    def by_bytes(self) -> bool:
        """Whether operands have 8 bits."""
        return self.form.dtype == E4M3

    @property
    def apart(self) -> int:
        """Channels that MMAs sum up by themselves, or 0."""
        return self.partial if self.groups is None else 64 * self.groups.blocks

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.warps * self.slices

    @property
    def in_pairs(self) -> bool:
        """Whether rows of x come 16 at a time: decoded weights take fewer registers than all."""
        return self.copies == "async" and self.rows_tile > 16 * self.tiles_m

    @property
    def moves_registers(self) -> bool:
        """Whether the warps that load give registers to those that multiply."""
        return self.unit == "wgmma" and self.consumers > 4

    @property
    def row_loaders(self) -> int:
        """Warps that copy rows of x one by one, beside the one that loads weights."""
        return 0 if self.rows.how != "row" else 1 if self.unit == "mma" else 3

    @property
    def has_first(self) -> bool:
        """Whether tiles say where their rows of x begin, and how many these are."""
        return self.grouped or self.rows.how == "row"

    @property
    def loaders(self) -> int:
        """Warps that do not multiply, or decode for tcgen05, whose products another one issues.

        Registers move between groups of four.
        """
        return 4 if self.moves_registers else 1 + self.row_loaders + self.tensor

    @property
    def issuer(self) -> int:
        """The warp that issues products by tcgen05, behind those that load."""
        return self.consumers + 1 + self.row_loaders

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumers + self.loaders)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return round_up(self.rows.slot.at + self.rows.slot.bytes, 1024)

    @property
    def col_tiles(self) -> int:
        """Tiles of rows of the weight."""
        return -(-self.bands * 64 // self.cols_tile)

    @property
    def cluster(self) -> int:
        """CTAs that begin together: those of a tile, or those that share rows of x."""
        return self.ctas * self.multicast

    @property
    def tile_groups(self) -> int:
        """Tiles of rows of the weight, those of a cluster counted once."""
        return self.col_tiles // self.multicast

    @property
    def bands(self) -> int:
        """Blocks of 64 rows of the weight."""
        dim = next(d for d in self.weights.view.dims if d.axis == "cols")
        return (dim.extent or 0) * dim.unit // 64

    @property
    def sums_at(self) -> int:
        """Where sums of slices lie in shared memory; those of other CTAs follow."""
        return CONTROL_BYTES + self.stages * self.stage_bytes

    @property
    def sum_bytes(self) -> int:
        """Of all of a tile's sums."""
        return self.rows_tile * self.cols_tile * 4

    @property
    def gathered_at(self) -> int:
        """Where sums of other CTAs lie."""
        return self.sums_at + (self.own_slices - 1) * self.sum_bytes

    @property
    def own_slices(self) -> int:
        """Slices that have sums of their own; warps of tcgen05 read parts of the same."""
        return 1 if self.tensor else self.slices

    @property
    def shared_sums(self) -> bool:
        """Whether sums are those of several slices or CTAs, which add them up and store them."""
        return self.own_slices * self.ctas > 1

    @property
    def units(self) -> int:
        """Parts of a warp's sums, each stored by one warp of one CTA."""
        return self.tiles_m // self.unit_tiles * (self.part_rows or self.rows_tile) // 8

    @property
    def sums_type(self) -> str:
        """What adds them up."""
        warps = self.consumers if self.tensor else self.warps
        rows = self.part_rows or self.rows_tile
        sizes = self.ctas, self.own_slices, warps, self.tiles_m, rows, self.unit_tiles
        return f"BsSums<{', '.join(map(str, sizes))}>"

    @property
    def sums_bar(self) -> int:
        """Where the mbarrier lies that counts sums of other CTAs."""
        return self.tmem_at + 8 if self.tensor else 16 * self.stages

    @property
    def shared(self) -> int:
        """Dynamic shared memory, with room to begin at a multiple of 1024."""
        unit = self.sum_bytes // self.units
        found = self.gathered_at + (self.ctas - 1) * -(-self.units // self.ctas) * unit + 1024
        return max(found, tensor_memory.ALONE) if self.tensor else found
