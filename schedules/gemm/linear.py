"""Schedules of linear layers for mma.sync and wgmma: tiles, memories, threads, tensor intrinsics.

`blockscale.tir.gemm.linear_tiles` becomes loops over tiles (of rows of x, of rows of w), within
them one over stages of K: copies of codes, scales and rows of x to shared memory, in bulk (for
wgmma TMA loads rows of x) or, where the architecture cannot, by cp.async; then each warp decodes
its tiles of 16 rows into registers and multiplies.  What divides a tile is bound: warps with rows
of their own to "threadIdx.y", warps with slices of K to "threadIdx.z", CTAs of a cluster with parts
of K to "clusterCtaIdx.x".  The ring's depth is annotated, "blockscale.stages" on the loop over K.
`blockscale.lower.warp` makes the kernel of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.base.targets import GPU_TARGETS
from blockscale.schedules.gemm.linear_gpu_tiles import depths, legal_tiles
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs import Linear
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.linear import LinearTile
from blockscale.specs.plans.moe import scale_count
from blockscale.tir.intrin import fragments, warp
from blockscale.tir.moe.tiles import WORDS

STEPS = {"mma": 64, "wgmma": 16}
"""K of what the intrinsics multiply."""

ROW = 64
"""Channels of a block of a row of x."""

ROW_WARPS, SLICES, CTAS = "threadIdx.y", "threadIdx.z", "clusterCtaIdx.x"
"""What loops over parts of a tile are bound to."""


def linear_sketches(spec: Linear, rows: int, level: str) -> list[Sketch]:
    """Sketches of `linear_tiles` for about ``rows`` rows of x, the default's first."""
    arch = GPU_TARGETS[level]
    return [
        partial(linear, spec=spec, tile=tile, stages=depths(spec, tile, rows, arch))
        for tile in legal_tiles(spec, rows, arch)
    ]


def linear(
    sch: Schedule, choose: Choose, spec: Linear, tile: LinearTile, stages: Sequence[int]
) -> None:
    """Schedule the layer in the shape of ``tile``; of ``stages`` the ring's depth is chosen."""
    k_loop = shape(sch, spec, tile)
    sch.annotate(k_loop, f"{PREFIX}stages", choose(sch, list(stages), stages[0]))


def decided(sch: Schedule, spec: Linear, tile: LinearTile, stages: int) -> None:
    """Schedule the layer with no choice left."""
    sch.annotate(shape(sch, spec, tile), f"{PREFIX}stages", stages)


def shape(sch: Schedule, spec: Linear, tile: LinearTile) -> LoopRV:
    """Schedule all that names instructions; return the loop over stages."""
    total = sch.get_sblock("gemm")
    sch.set_scope(total, 0, fragments.LOCAL)
    product = _parts(sch, total, tile)
    copied = ["weights", "scales"]
    for name in copied:
        sch.set_scope(sch.get_sblock(name), 0, fragments.SMEM)
    sch.set_scope(sch.get_sblock("decode"), 0, fragments.LOCAL)
    tokens = sch.get_sblock("tokens")
    rows = tokens
    if tile.unit == "mma":
        rows = sch.cache_read(tokens, 0, fragments.SMEM)
        sch.set_scope(tokens, 0, fragments.LOCAL)
    else:
        sch.set_scope(tokens, 0, fragments.SMEM)
    tiles = _tiles(sch, tile)
    for block in (total, *([product] if product is not total else [])):
        sch.compute_at(block, tiles, preserve_unit_loops=True)
    stages, block, sixteen, cta = _stages(sch, product, total, tile)
    sch.compute_at(sch.get_sblock("decode"), sixteen, preserve_unit_loops=True)
    if tile.unit == "mma":
        sch.compute_at(tokens, block, preserve_unit_loops=True)
    for loaded in (rows, sch.get_sblock("scales"), sch.get_sblock("weights")):
        sch.compute_at(loaded, stages, preserve_unit_loops=True)
    if cta is not None:  # bound earlier, it would make TVM load the parts of all CTAs
        sch.bind(cta, CTAS)
    _tensorize_loads(sch, spec, tile, rows)
    _tensorize_product(sch, spec, tile, product, stages, tokens)
    if product is not total:
        sch.decompose_reduction(total, last_loops(sch, total, 4)[0])
    return stages


def _parts(sch: Schedule, block: SBlockRV, tile: LinearTile) -> SBlockRV:
    """Give each slice and each CTA sums of their own; return the block that multiplies."""
    parts = tile.slices * tile.ctas
    if parts == 1:
        return block
    *_, depth, _ = sch.get_loops(block)
    each = tile.blocks_k // tile.slices
    cta, stage, part, inner = sch.split(depth, [tile.ctas, None, tile.slices, each])
    sch.reorder(cta, part, stage, inner)
    own = sch.rfactor(sch.fuse(cta, part), 0)
    sch.set_scope(own, 0, fragments.LOCAL)
    return own


def _tiles(sch: Schedule, tile: LinearTile) -> LoopRV:
    """Split what is stored into tiles and these among warps; return the last loop over tiles."""
    block = sch.get_sblock("epilogue")
    group, token, row, *rest = sch.get_loops(block)
    token_tile, token_in = sch.split(token, [None, tile.tokens])
    # Rows of a gated layer are tiles of 16 and positions in them.
    height = tile.tiles_m if rest else 16 * tile.tiles_m
    row_tile, own, row_in = sch.split(row, [None, tile.warps, height])
    # Where tiles of rows of x follow each other weights come once from memory, else rows of x.
    tiles = (
        [row_tile, group, token_tile] if tile.raster == "rows" else [group, token_tile, row_tile]
    )
    sch.reorder(*tiles, own, token_in, row_in, *rest)
    sch.bind(own, ROW_WARPS)
    return tiles[-1]


def _stages(
    sch: Schedule, product: SBlockRV, total: SBlockRV, tile: LinearTile
) -> tuple[LoopRV, LoopRV, LoopRV, LoopRV | None]:
    """Split into CTAs, stages, slices, warps, blocks of 64 k and instructions.

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
    step, element = sch.split(position, [None, STEPS[tile.unit]])
    inside = (own, inner, sixteen, step, token_mma, token_in, row_in, element)
    sch.reorder(unit, *bound[:1], stage, *bound[1:], *inside)
    sch.bind(own, ROW_WARPS)
    if bound:
        sch.bind(bound[1], SLICES)
    return stage, inner, sixteen, bound[0] if bound else None


def _tensorize_loads(sch: Schedule, spec: Linear, tile: LinearTile, rows: SBlockRV) -> None:
    """Map the copies onto bulk copies and TMA, or onto those of a warp."""
    run = warp.bulk if tile.copies == "bulk" else warp.run
    sixteens = min(4, tile.rows // 16)
    scales = scale_count(spec.fmt, spec.group, spec.zero)
    for name, count, dtype in (
        ("weights", WORDS, "uint32"),
        ("scales", scales, spec.dtype if spec.fmt == "int4" else "uint8"),
    ):
        deep, last = last_loops(sch, sch.get_sblock(name), 2)
        blocks = int(sch.get(deep).extent) if sixteens == 4 else 1  # what is contiguous
        _, deep = sch.split(deep, [None, blocks])
        first = deep if blocks > 1 else last
        sch.tensorize(sch.blockize(first), run(blocks, sixteens * count, dtype))
    if tile.unit == "wgmma":
        copied = sch.blockize(last_loops(sch, rows, 2)[0])
        sch.tensorize(copied, warp.tma(tile.tokens, spec.dtype))
        return
    first = last_loops(sch, rows, 2)[tile.blocks_k == 1]
    sch.tensorize(sch.blockize(first), run(tile.blocks_k, ROW, spec.dtype))


def _tensorize_product(
    sch: Schedule,
    spec: Linear,
    tile: LinearTile,
    product: SBlockRV,
    stages: LoopRV,
    tokens: SBlockRV,
) -> None:
    """Map what warps do onto their instructions."""
    row, _ = last_loops(sch, sch.get_sblock("decode"), 2)
    wide = tile.unit == "wgmma"
    decoded = warp.decode(spec.fmt, spec.group, spec.zero, spec.dtype, steps=wide)
    sch.tensorize(sch.blockize(row), decoded)
    if not wide:
        token = last_loops(sch, tokens, 2)[0]
        _, token = sch.split(token, [None, 8])
        sch.tensorize(sch.blockize(token), warp.fragment(spec.dtype))
    sch.decompose_reduction(product, stages)
    block = sch.blockize(last_loops(sch, product, 3)[0], preserve_unit_iters=False)
    sch.tensorize(block, warp.wgmma(tile.tokens, spec.dtype) if wide else warp.mma(spec.dtype))
