"""Steps that schedules of GEMMs whose weights become fragments of warps have in common.

What divides a tile is bound: warps with rows of their own to "threadIdx.y", warps with slices of K
to "threadIdx.z", CTAs of a cluster with parts of K to "clusterCtaIdx.x", those with neighbouring
tiles of the weight, which have rows of x in common, to "clusterCtaIdx.y".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.schedules.steps import last_loops
from blockscale.specs.plans.moe import scale_count
from blockscale.tir.intrin import fragments, tma, warp
from blockscale.tir.moe.tiles import WORDS, scaled_sums

MMA_K = 64
"""K of what the intrinsic of mma.sync multiplies."""

ROW_WARPS, SLICES, CTAS = "threadIdx.y", "threadIdx.z", "clusterCtaIdx.x"
"""What loops over parts of a tile are bound to."""

MULTICAST = "clusterCtaIdx.y"
"""What a loop over tiles is bound to whose CTAs load rows of x for each other."""


class Tile(Protocol):
    """The shape of a tile; see `specs.plans.linear.LinearTile`."""

    @property
    def unit(self) -> str:
        """What multiplies: "mma", "wgmma" or "tcgen05"."""

    @property
    def rows(self) -> int:
        """Of the weight."""

    @property
    def tokens(self) -> int:
        """The most rows of x."""

    @property
    def warps(self) -> int:
        """That share the rows."""

    @property
    def tiles_m(self) -> int:
        """Tiles of 16 rows of a warp."""

    @property
    def slices(self) -> int:
        """Of a stage's K."""

    @property
    def ctas(self) -> int:
        """Of a cluster, which share K."""

    @property
    def blocks_k(self) -> int:
        """Blocks of 64 k in a stage."""

    @property
    def tensor(self) -> bool:
        """Whether decoded weights and sums are in tensor memory: of tcgen05."""

    @property
    def part_rows(self) -> int:
        """Then, rows of x whose sums a warp reads at a time."""


Order = Callable[[LoopRV, LoopRV, LoopRV], Sequence[LoopRV]]
"""Loops over padded tiles of rows of x, tiles in these, and tiles of rows of w, as they are to
follow each other."""


class Weight(NamedTuple):
    """What a weight's codes and scales are."""

    fmt: str
    group: int
    zeros: int
    dtype: str

    @property
    def scales(self) -> tuple[int, str]:
        """Numbers of 16 rows and 64 k, and their dtype."""
        dtype = "bfloat16" if self.scaled_sums else self.dtype
        count = scale_count(self.fmt, self.group, self.zeros)
        return count, dtype if self.fmt == "int4" else "uint8"

    @property
    def scaled_sums(self) -> bool:
        """Whether scales are multiplied with sums of groups, which have a buffer of their own."""
        return scaled_sums(self.fmt, self.dtype)


def parts(sch: Schedule, block: SBlockRV, tile: Tile) -> SBlockRV:
    """Give each slice and each CTA sums of their own; return the block that multiplies."""
    if tile.slices * tile.ctas == 1:
        return block
    *_, depth, _ = sch.get_loops(block)
    each = tile.blocks_k // tile.slices
    cta, stage, part, inner = sch.split(depth, [tile.ctas, None, tile.slices, each])
    sch.reorder(cta, part, stage, inner)
    own = sch.rfactor(sch.fuse(cta, part), 0)
    sch.set_scope(own, 0, fragments.LOCAL)
    return own


def own_sums(sch: Schedule, total: SBlockRV, weight: Weight, tile: Tile) -> SBlockRV:
    """Return the block that multiplies: groups, or else slices and CTAs, have sums of their own."""
    if not weight.scaled_sums:
        return parts(sch, total, tile)
    sums = sch.get_sblock("partial")
    sch.set_scope(sums, 0, fragments.LOCAL)
    return sums


def tiles(sch: Schedule, tile: Tile, order: Order, multicast: int = 1) -> LoopRV:
    """Split what is stored into tiles and these among warps; return the last loop over tiles.

    ``multicast``: how many neighbours along rows of the weight are a loop of their own, the last.
    """
    group, token, row, *rest = sch.get_loops(sch.get_sblock("epilogue"))
    token_tile, token_in = sch.split(token, [None, tile.tokens])
    # Rows of a gated layer are tiles of 16 and positions in them.
    height = tile.tiles_m if rest else 16 * tile.tiles_m
    mates = [multicast] if multicast > 1 else []
    row_tile, *mate, own, row_in = sch.split(row, [None, *mates, tile.warps, height])
    ordered = [*order(group, token_tile, row_tile), *mate]
    sch.reorder(*ordered, own, token_in, row_in, *rest)
    sch.bind(own, ROW_WARPS)
    return ordered[-1]


def stages(
    sch: Schedule, product: SBlockRV, total: SBlockRV, tile: Tile, dtype: str
) -> tuple[LoopRV, LoopRV, LoopRV, LoopRV | None]:
    """Split into CTAs, stages, slices, warps, blocks of 64 k and instructions of ``dtype``.

    Returns the loops over stages, over blocks of a stage, over tiles of 16 rows, and over CTAs.
    """
    bound: list[LoopRV] = []
    if product is total:
        unit, token, row, depth, position = last_loops(sch, product, 5)
        stage, inner = sch.split(depth, [None, tile.blocks_k])
    else:
        part, unit, token, row, stage, inner, position = last_loops(sch, product, 7)
        cta, part = sch.split(part, [tile.ctas, tile.slices])
        bound = [cta, part]
    wide = tile.tokens if tile.unit == "wgmma" else 8
    token_mma, token_in = sch.split(token, [None, wide])
    own, sixteen, row_in = sch.split(row, [tile.warps, None, 16])
    deep = warp.wgmma_k(dtype) if tile.unit == "wgmma" else MMA_K
    step, element = sch.split(position, [None, deep])
    inside = (own, inner, sixteen, step, token_mma, token_in, row_in, element)
    sch.reorder(unit, *bound[:1], stage, *bound[1:], *inside)
    sch.bind(own, ROW_WARPS)
    if bound:
        sch.bind(bound[1], SLICES)
    return stage, inner, sixteen, bound[0] if bound else None


def in_tiles(
    sch: Schedule, sums: tuple[SBlockRV, SBlockRV], weight: Weight, tile: Tile, last: LoopRV
) -> tuple[LoopRV, LoopRV, LoopRV, LoopRV | None]:
    """Compute sums within ``last``, the innermost loop over tiles; see `stages`.

    ``sums``: the block that multiplies, and the one that adds up parts of K.
    """
    product, total = sums
    if weight.scaled_sums:
        sch.compute_at(total, last, preserve_unit_loops=True)
        stage, deep = group_stages(sch, product, total, weight, tile)
        return stage, deep, deep, None
    for block in dict.fromkeys((total, product)):
        sch.compute_at(block, last, preserve_unit_loops=True)
    return stages(sch, product, total, tile, weight.dtype)


def group_stages(
    sch: Schedule, sums: SBlockRV, total: SBlockRV, weight: Weight, tile: Tile
) -> tuple[LoopRV, LoopRV]:
    """The same where groups have sums of their own: ``sums``, which ``total`` scales and adds up.

    A warp holds those of one tile of 16 rows.  Returns the loop over stages, and the one over
    blocks in which weights are decoded.
    """
    unit, token, row, group = last_loops(sch, total, 4)
    groups = tile.blocks_k * MMA_K // weight.group
    stage, group = sch.split(group, [None, groups])
    own, sixteen, row_in = sch.split(row, [tile.warps, None, 16])
    sch.reorder(unit, stage, own, group, sixteen, token, row_in)
    sch.bind(own, ROW_WARPS)
    sch.compute_at(sums, sixteen, preserve_unit_loops=True)
    *_, token, row, group, deep, position = last_loops(sch, sums, 6)
    row, row_in = sch.split(row, [None, 16])
    step, position = sch.split(position, [None, warp.wgmma_k(weight.dtype)])
    sch.reorder(group, row, deep, step, token, row_in, position)
    return stage, deep


def tensorize_weights(
    sch: Schedule, weight: Weight, tile: Tile, run: Callable[[int, int, str], str]
) -> None:
    """Map the copies of codes and scales onto ``run``."""
    sixteens = min(4, tile.rows // 16)
    for name, (count, dtype) in {"weights": (WORDS, "uint32"), "scales": weight.scales}.items():
        deep, last = last_loops(sch, sch.get_sblock(name), 2)
        blocks = int(sch.get(deep).extent) if sixteens == 4 else 1  # what is contiguous
        _, deep = sch.split(deep, [None, blocks])
        first = deep if blocks > 1 else last
        sch.tensorize(first, run(blocks, sixteens * count, dtype))


def tensorize_product(
    sch: Schedule,
    weight: Weight,
    tile: Tile,
    blocks: tuple[SBlockRV, SBlockRV, SBlockRV | None],
    stage: LoopRV,
    names: tuple[str, str],
) -> None:
    """Map what warps do onto their instructions.

    ``blocks``: that multiplies, that adds up parts of K (the same one: there are none), and that
    makes fragments of rows of x (mma.sync); ``stage``: the loop over stages; ``names``: intrinsics
    that decode, and that make such fragments.

    Here and in `tensorize_weights` loops become intrinsics without a block around them first, which
    took TVM most of the time of a schedule.  It does not note who then reads what: no block may be
    moved afterwards.
    """
    product, total, fragment = blocks
    decode, load = names
    row, _ = last_loops(sch, sch.get_sblock("decode"), 2)
    sch.tensorize(row, decode)
    if fragment is not None:
        token = last_loops(sch, fragment, 2)[0]
        _, token = sch.split(token, [None, 8])
        sch.tensorize(token, load)
    if weight.scaled_sums:
        sch.decompose_reduction(total, stage)
        stage = last_loops(sch, product, 8)[0]
    sch.decompose_reduction(product, stage)
    inner = last_loops(sch, product, 3)[0]
    wgmma = tile.unit == "wgmma"
    multiply = warp.wgmma(tile.tokens, weight.dtype) if wgmma else warp.mma(weight.dtype)
    sch.tensorize(inner, multiply, preserve_unit_iters=False)
    if product is not total and not weight.scaled_sums:
        sch.decompose_reduction(total, last_loops(sch, total, 4)[0])


def in_tensor_memory(
    sch: Schedule,
    weight: Weight,
    tile: Tile,
    loads: tuple[Order, Callable[[int, int, str], str], Callable[[SBlockRV], None]],
    positions: str,
) -> LoopRV:
    """Schedule a GEMM for tcgen05: decoded weights and sums are in tensor memory.

    Slices of a stage's K are decoded by warps of their own.  Sums come back to registers some rows
    of x at a time, parts that slices take in turn; CTAs that divide K add them up there.

    Returns the loop over stages.  ``loads``: the order of tiles, the intrinsic that copies codes
    and scales, and what tensorizes the copies of rows of x; ``positions``: the order of K, see
    `intrin.warp.decode`.
    """
    order, run, load_rows = loads
    total, decode = sch.get_sblock("gemm"), sch.get_sblock("decode")
    product = total
    if tile.ctas > 1:
        sch.set_scope(total, 0, fragments.LOCAL)
        *_, depth, _ = sch.get_loops(total)
        product = sch.rfactor(sch.split(depth, [tile.ctas, None])[0], 0)
    sch.set_scope(product, 0, tma.TMEM)
    sch.set_scope(decode, 0, fragments.LOCAL)
    for name in ("weights", "scales", "tokens"):
        sch.set_scope(sch.get_sblock(name), 0, tma.SMEM)
    stored = sch.cache_read(product, _read(sch, product, decode), tma.TMEM)
    epilogue = sch.get_sblock("epilogue")
    reader = epilogue if product is total else total
    sums = sch.cache_read(reader, _read(sch, reader, product), fragments.LOCAL)
    last = tiles(sch, tile, order)
    _, _, _, _, token, *_ = sch.get_loops(epilogue)
    _, part, _ = sch.split(token, [None, tile.slices, tile.part_rows])
    sch.bind(part, SLICES)
    if product is not total:
        sch.compute_at(total, part, preserve_unit_loops=True)
    sch.compute_at(sums, part, preserve_unit_loops=True)
    sch.compute_at(product, last, preserve_unit_loops=True)
    *_, unit, token, row, depth, position = sch.get_loops(product)
    cta = last_loops(sch, product, 6)[:1] if product is not total else []
    stage, inner = sch.split(depth, [None, tile.blocks_k])
    step, element = sch.split(position, [None, warp.TENSOR_K])
    sch.reorder(unit, *cta, stage, inner, step, token, row, element)
    sch.compute_at(stored, stage, preserve_unit_loops=True)
    depth, row, position = last_loops(sch, stored, 3)
    block, part = sch.split(depth, [None, tile.slices])
    own, sixteen, row_in = sch.split(row, [tile.warps, None, 16])
    sch.reorder(part, own, block, sixteen, row_in, position)
    sch.bind(part, SLICES)
    sch.bind(own, ROW_WARPS)
    sch.compute_at(decode, sixteen, preserve_unit_loops=True)
    rows = sch.get_sblock("tokens")
    for loaded in (rows, sch.get_sblock("scales"), sch.get_sblock("weights")):
        sch.compute_at(loaded, stage, preserve_unit_loops=True)
    if cta:  # bound earlier, it would make TVM load the parts of all CTAs
        sch.bind(cta[0], CTAS)
        sch.bind(last_loops(sch, sums, 4)[0], CTAS)
    tensorize_weights(sch, weight, tile, run)
    load_rows(rows)
    sch.tensorize(last_loops(sch, decode, 2)[0], warp.decode(*weight, positions))
    sch.tensorize(row_in, warp.store_fragment(weight.dtype))
    sch.decompose_reduction(product, stage)
    first = last_loops(sch, product, 3)[0]
    instruction = warp.tcgen05(tile.tokens, weight.dtype)
    sch.tensorize(first, instruction, preserve_unit_iters=False)
    if product is not total:
        sch.decompose_reduction(total, last_loops(sch, total, 4)[0])
    token, row = last_loops(sch, sums, 2)
    sixteen, row_in = sch.split(row, [None, 16])
    sch.reorder(sixteen, token, row_in)
    sch.tensorize(token, warp.load_sums(tile.part_rows))
    return stage


def _read(sch: Schedule, reader: SBlockRV, writer: SBlockRV) -> int:
    """Which of the buffers that ``reader`` reads is the one that ``writer`` writes."""
    made = sch.get(writer).writes[0].source
    return [region.source.same_as(made) for region in sch.get(reader).reads].index(True)


def by_rows(
    sch: Schedule,
    weight: Weight,
    tile: Tile,
    *,
    gathered: bool = False,
    table: bool = True,
    order: str = "positions",
) -> LoopRV:
    """Schedule a GEMM whose rows of x are copied one by one; return the loop over stages.

    ``gathered``: a table says which row; ``table``: one says which expert a tile's rows have;
    ``order``: of K, see `intrin.warp.decode`.
    """

    def of_tiles(group: LoopRV, token: LoopRV, row: LoopRV) -> Sequence[LoopRV]:
        # In tiles of an expert those of its rows follow each other: weights come once from memory.
        return (group, row, token) if table else (row, group, token)

    run = partial(warp.bulk, table=table)

    def row_by_row(block: SBlockRV) -> None:
        sch.tensorize(last_loops(sch, block, 1)[0], warp.row(weight.dtype, gathered))

    if tile.tensor:
        return in_tensor_memory(sch, weight, tile, (of_tiles, run, row_by_row), order)
    total = sch.get_sblock("gemm")
    sch.set_scope(total, 0, fragments.LOCAL)
    product = own_sums(sch, total, weight, tile)
    for name in ("weights", "scales", "tokens"):
        sch.set_scope(sch.get_sblock(name), 0, tma.SMEM)
    sch.set_scope(sch.get_sblock("decode"), 0, fragments.LOCAL)
    last = tiles(sch, tile, of_tiles)
    fragment = matrices(sch, product) if tile.unit == "mma" else None
    stage, block, sixteen, _ = in_tiles(sch, (product, total), weight, tile, last)
    sch.compute_at(sch.get_sblock("decode"), sixteen, preserve_unit_loops=True)
    if fragment is not None:
        sch.compute_at(fragment, block, preserve_unit_loops=True)
    for name in ("tokens", "scales", "weights"):
        sch.compute_at(sch.get_sblock(name), stage, preserve_unit_loops=True)
    tensorize_weights(sch, weight, tile, run)
    row_by_row(sch.get_sblock("tokens"))
    load = warp.matrices(weight.dtype) if fragment is not None else ""
    names = (warp.decode(*weight, order), load)
    tensorize_product(sch, weight, tile, (product, total, fragment), stage, names)
    return stage


def matrices(sch: Schedule, product: SBlockRV) -> SBlockRV:
    """Let rows of x in shared memory go through registers; return the block that loads them."""
    rows = sch.get(sch.get_sblock("tokens")).writes[0].source
    read = [region.source.same_as(rows) for region in sch.get(product).reads]
    return sch.cache_read(product, read.index(True), fragments.LOCAL)
