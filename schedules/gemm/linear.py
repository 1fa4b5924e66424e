"""Schedules of linear layers' GEMMs: tiles, memories, threads, tensor intrinsics.

`blockscale.tir.gemm.linear_tiles` becomes loops over tiles (of rows of x, of rows of w), within
them one over stages of K: copies of codes, scales and rows of x to shared memory, in bulk (for
wgmma TMA loads rows of x) or, where the architecture cannot, by cp.async; then each warp decodes
its tiles of 16 rows into registers and multiplies (`schedules.gemm.warps`), by mma.sync or wgmma;
or stores them in tensor memory, where tcgen05 multiplies them.  The ring's depth is
annotated, "blockscale.stages" on the loop over K, and of 8-bit operands how many channels' products
are summed up by themselves, "blockscale.partial".  `blockscale.lower.warp` makes the kernel of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from blockscale.base.targets import GPU_TARGETS
from blockscale.schedules.gemm import warps
from blockscale.schedules.gemm.linear_gpu_tiles import depths, legal_tiles
from blockscale.schedules.steps import Choose, Sketch, last_loops
from blockscale.specs import Linear
from blockscale.specs.plans import PREFIX
from blockscale.specs.plans.linear import LinearTile
from blockscale.tir.gemm.linear_tiles import operand_of
from blockscale.tir.intrin import fragments, tma, warp

ROW = 64
"""Channels of a block of a row of x."""


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
    weight = warps.Weight(spec.fmt, spec.group, spec.zero, operand_of(spec, tile.by_bytes))
    total = sch.get_sblock("gemm")
    if tile.tensor:
        order = "bytes" if spec.layout == "tiles64e" else "steps"

        def rows_by_tma(block: SBlockRV) -> None:
            _tensorize_rows(sch, spec, tile, block, weight.dtype)

        return warps.in_tensor_memory(
            sch, weight, tile, (_order(tile), warp.bulk, rows_by_tma), order
        )
    sch.set_scope(total, 0, fragments.LOCAL)
    product = warps.own_sums(sch, total, weight, tile)
    for name in ("weights", "scales"):
        sch.set_scope(sch.get_sblock(name), 0, tma.SMEM)
    sch.set_scope(sch.get_sblock("decode"), 0, fragments.LOCAL)
    rows = tokens = sch.get_sblock("tokens")
    fragment = None
    if tile.unit == "mma" and spec.layout == "tiles64":
        rows, fragment = sch.cache_read(tokens, 0, tma.SMEM), tokens
        sch.set_scope(tokens, 0, fragments.LOCAL)
    else:
        sch.set_scope(tokens, 0, tma.SMEM)
        fragment = warps.matrices(sch, product) if tile.unit == "mma" else None
    last = warps.tiles(sch, tile, _order(tile), tile.multicast)
    stages, block, sixteen, cta = warps.in_tiles(sch, (product, total), weight, tile, last)
    sch.compute_at(sch.get_sblock("decode"), sixteen, preserve_unit_loops=True)
    if fragment is not None:
        sch.compute_at(fragment, block, preserve_unit_loops=True)
    for loaded in (rows, sch.get_sblock("scales"), sch.get_sblock("weights")):
        sch.compute_at(loaded, stages, preserve_unit_loops=True)
    if cta is not None:  # bound earlier, it would make TVM load the parts of all CTAs
        sch.bind(cta, warps.CTAS)
    if tile.multicast > 1:  # likewise
        sch.bind(last, warps.MULTICAST)
    run = warp.bulk if tile.copies == "bulk" else warp.run
    warps.tensorize_weights(sch, weight, tile, run)
    _tensorize_rows(sch, spec, tile, rows, weight.dtype)
    order, load = "steps" if tile.unit == "wgmma" else "", warp.fragment
    if spec.layout == "tiles64e":
        order, load = "bytes", warp.matrices
    names = (warp.decode(*weight, order), load(weight.dtype) if tile.unit == "mma" else "")
    warps.tensorize_product(sch, weight, tile, (product, total, fragment), stages, names)
    if tile.partial and not weight.scaled_sums:  # groups' sums are blocks of their own
        sch.annotate(stages, f"{PREFIX}partial", tile.partial)
    return stages


def _order(tile: LinearTile) -> warps.Order:
    """How tiles follow each other.

    Where tiles of rows of x follow each other weights come once from memory, else rows of x.
    """
    by_rows = tile.raster == "rows"
    return lambda group, token, row: (row, group, token) if by_rows else (group, token, row)


def _tensorize_rows(
    sch: Schedule, spec: Linear, tile: LinearTile, rows: SBlockRV, dtype: str
) -> None:
    """Map the copies of rows of x onto bulk copies and TMA, or onto those of a warp."""
    if tile.unit != "mma" or spec.layout == "tiles64e":
        sch.tensorize(last_loops(sch, rows, 2)[0], warp.tma(tile.tokens, dtype))
        return
    run = warp.bulk if tile.copies == "bulk" else warp.run
    first = last_loops(sch, rows, 2)[tile.blocks_k == 1]
    sch.tensorize(first, run(tile.blocks_k, ROW, dtype))
