"""Scheduled TensorIR of an MoE layer's grouped GEMM -> `MoePlan`: what loops, buffers, calls say.

`moe.wgmma` makes such functions.  Tiles are read off tensor intrinsics and loop
extents, memories off buffers, and each is compared with what it implies elsewhere; the depth of the
ring is an annotation.  What is not such a GEMM raises LoweringError.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm.tirx import PrimFunc

from blockscale.base.errors import LoweringError
from blockscale.base.formats import MOE
from blockscale.base.sizes import round_up
from blockscale.lower.sites import Site, annotated, expect, one, sites
from blockscale.specs.plans.moe import ATTRIBUTE, TILE_K, MoeGemm, MoePlan
from blockscale.tir.moe.tiles import ROW_TILE

TILE_LOOPS = 3
"""Over padded tiles, tiles of tokens, and tiles of rows."""

STEP, STEPS = 16, 4
"""K of an MMA, and MMAs of a block of 64 k."""

LOADS = {"weights": "bulk_load", "scales": "bulk_load", "tokens": "cp_async_row"}
DECODE = "moe_decode"
"""What the blocks call that fill shared memory, and registers."""

UNITS = {"mma16816": ("mma", 16), "wgmma_m64k16": ("wgmma", 64)}
"""What multiplies: unit, and rows of an instruction."""


def read(func: PrimFunc) -> MoePlan:
    """Return the plan of a scheduled `moe_tiles`.

    LoweringError says which block or loop is not that of such a GEMM.
    """
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        raise LoweringError(
            f"function without the attribute {ATTRIBUTE!r}: it is no GEMM of moe_tiles"
        )
    return _Reader(func).plan()


class _Reader:
    """What one function says."""

    def __init__(self, func: PrimFunc) -> None:
        self.gemm = MoeGemm.of(func)
        self.params = {param.name: param for param in func.params}
        self.sites = list(sites(func.body))
        self.loads = {name: self._load(name, what) for name, what in LOADS.items()}
        self.decode = self._tensorized("decode", (DECODE,))
        self.mma = self._mma()
        self.tile_loops, self.k_loop = self._loops()

    def plan(self) -> MoePlan:
        """Return all decisions."""
        unit, high = UNITS[self.mma.what]
        wide = self.mma.shape(1)[0]
        slices, blocks, row_mmas, steps, token_mmas = self._mma_loops()
        expect(self.mma.name, "steps of a block of 64 k", steps, STEPS)
        shapes = [self.mma.shape(number) for number in range(3)]
        expect(self.mma.name, "shapes", shapes, [(high, STEP), (wide, STEP), (wide, high)])
        stages = annotated(self.k_loop, {"stages": None}, "K")["stages"]
        gemm = self.gemm
        made = MoePlan(
            unit=unit,
            fmt=gemm.fmt,
            group=gemm.group,
            zeros=gemm.zeros,
            dtype=gemm.dtype,
            activation=gemm.activation,
            gather=gemm.gather,
            rows=row_mmas * high,
            tokens=token_mmas * wide,
            slices=slices,
            stages=stages,
            blocks_k=slices * blocks,
        )
        self._check_product(made)
        self._check_weights(made)
        self._check_tokens(made)
        self._check_decode(made, high)
        self._check_epilogue(made)
        return made

    # ---- Blocks and loops -------------------------------------------------------------------

    def _tensorized(self, name: str, wanted: tuple[str, ...]) -> Site:
        """The block ``name``, which must call one of ``wanted``."""
        for site in self.sites:
            whole = site.block.name_hint.removesuffix("_o")
            if whole == name and site.what in wanted:
                return site
            if whole == name and not site.what:
                raise LoweringError(
                    f"{site.name} is not tensorized: its loops call nothing; map it onto an "
                    "intrinsic of blockscale.tir.intrin.hopper"
                )
        calls = " or ".join(f"bs_{what}" for what in wanted)
        raise LoweringError(f"there is no block '{name}' that calls {calls}")

    def _load(self, name: str, what: str) -> Site:
        """The block that copies to shared memory."""
        return self._tensorized(name, (what,))

    def _mma(self) -> Site:
        """The block that multiplies."""
        for what in UNITS:
            if any(site.what == what for site in self.sites):
                return one(self.sites, what, "a tile is multiplied by one kind of MMA")
        names = ("gemm_rf_update", "gemm_update", "gemm_rf", "gemm")
        for name in names:
            if any(site.block.name_hint == name for site in self.sites):
                return self._tensorized(name, tuple(UNITS))
        raise LoweringError("there is no block 'gemm': it is no schedule of moe_tiles")

    def _loops(self) -> tuple[tuple[Any, ...], Any]:
        """The loops over tiles and the one over stages: those with the loads in them, too."""
        load = self.loads["weights"]
        common = [a for a, b in zip(self.mma.loops, load.loops, strict=False) if a.same_as(b)]
        if len(common) != TILE_LOOPS + 1:
            raise LoweringError(
                f"{load.name} and {self.mma.name} are inside of {len(common)} common loops, not "
                f"{TILE_LOOPS + 1}: over padded tiles, tiles of tokens, tiles of rows, stages of K"
            )
        for site in (*self.loads.values(), self.decode):
            if not any(loop.same_as(common[-1]) for loop in site.loops):
                raise LoweringError(f"{site.name} is not inside of the loop over stages of K")
        return tuple(common[:-1]), common[-1]

    def _mma_loops(self) -> tuple[int, int, int, int, int]:
        """Slices, blocks of 64 k, MMAs along the rows, steps, MMAs along the tokens."""
        extents = self.mma.extents(self.k_loop)
        if len(extents) != 5:
            raise LoweringError(
                f"{self.mma.name} is inside of {len(extents)} loops of a stage, not 5: slices, "
                "blocks of 64 k, rows, steps of 16 k, tokens"
            )
        first, second, third, fourth, fifth = extents
        return first, second, third, fourth, fifth

    def _memory(self, site: Site, operands: dict[int, str], rule: str) -> None:
        for number, scope in operands.items():
            buffer = site.buffer(number)
            if buffer.scope() != scope:
                raise LoweringError(
                    f"{site.name}: buffer {buffer.name} has scope {buffer.scope()!r}, not "
                    f"{scope!r}: {rule}"
                )

    def _from(self, site: Site, number: int, maker: Site) -> None:
        """LoweringError unless an operand is what the block ``maker`` writes."""
        found, made = site.buffer(number), maker.block.writes[0].source
        if not found.same_as(made):
            raise LoweringError(
                f"{site.name} reads {found.name}, not {made.name}, which {maker.name} writes"
            )

    # ---- Comparisons ------------------------------------------------------------------------

    def _check_product(self, made: MoePlan) -> None:
        """Compare the operands of the MMA, its sums, and K of all stages."""
        self._memory(self.mma, {0: "local", 2: "local"}, "fragments and sums are in registers")
        self._from(self.mma, 0, self.decode)
        self._from(self.mma, 1, self.loads["tokens"])
        k = round_up(self.gemm.k, TILE_K * 8)
        stages = int(self.k_loop.extent)
        expect("loop over K", "K of all stages", stages * made.blocks_k * TILE_K, k)
        sums = self.mma.buffer(2)
        own = int(sums.shape[0]) if len(sums.shape) == 4 else 1
        expect(self.mma.name, "sums of slices", own, made.slices)
        added = [site for site in self.sites if site.block.name_hint == "gemm" and not site.what]
        expect("block 'gemm'", "blocks that add up slices", len(added), int(made.slices > 1))

    def _check_weights(self, made: MoePlan) -> None:
        """Compare the copies of codes and scales with the tile."""
        for name, source, size in (
            ("weights", "w", made.weight_stage),
            ("scales", "scales", made.scale_stage),
        ):
            site = self.loads[name]
            *several, count = site.shape(0)
            whole = int(site.buffer(0).shape[-1])
            if several and count != whole:
                raise LoweringError(
                    f"{site.name}: {several[0]} parts of {count} of {whole} are not contiguous; "
                    "copy blocks of 64 rows, or one at a time"
                )
            copied = int(site.block.body.value.args[3]) * prod(site.extents(self.k_loop))
            expect(site.name, "bytes of a stage", copied, size)
            expect(site.name, "source", site.buffer(0).name, self.params[source].name)
            self._memory(site, {2: "shared.dyn"}, "codes and scales are decoded from there")

    def _check_tokens(self, made: MoePlan) -> None:
        """Compare the copies of rows of x with the tile."""
        site = self.loads["tokens"]
        last = 2 if made.gather else 1
        expect(site.name, "operands of the copy", len(site.block.match_buffers), last + 1)
        rows = prod(site.extents(self.k_loop))
        expect(site.name, "rows of a stage", rows, made.tokens * made.blocks_k)
        expect(site.name, "elements of a row", site.shape(0), (TILE_K,))
        expect(site.name, "source", site.buffer(0).name, self.params["x"].name)
        self._memory(site, {last: "shared.dyn"}, "tensor cores read tokens from there")

    def _check_decode(self, made: MoePlan, high: int) -> None:
        """Compare what is decoded with the formats and the tile."""
        site = self.decode
        self._from(site, 0, self.loads["weights"])
        self._from(site, 1, self.loads["scales"])
        expect(site.name, "what is decoded", site.shape(2), (16, TILE_K))
        fmt, group, zeros = (int(arg) for arg in site.block.body.value.args[4:7])
        found = ([*MOE][fmt], group, bool(zeros))
        expect(site.name, "format", found, (made.fmt, made.group, made.zeros))
        *_, sixteens = extents = site.extents(self.k_loop)
        expect(site.name, "rows of a fragment", 16 * sixteens, high)
        expect(site.name, "rows of a stage", 16 * prod(extents), made.rows * made.blocks_k)

    def _check_epilogue(self, made: MoePlan) -> None:
        """Compare the rows and tokens that are stored with the tile."""
        found = [site for site in self.sites if site.block.name_hint == "epilogue"]
        inner = self.tile_loops[-1]
        if len(found) != 1 or not any(loop.same_as(inner) for loop in found[0].loops):
            raise LoweringError("block 'epilogue' is not inside of the loops over tiles")
        site = found[0]
        stored = prod(site.extents(inner)) * (2 if made.gated else 1)
        expect(site.name, "numbers of a tile", stored, made.rows * made.tokens)
        written = site.block.writes[0].source.name
        expect(site.name, "what it writes", written, self.params["out"].name)
        slots = int(self.params["order"].shape[1])
        _, tokens, rows = self.tile_loops
        expect("loop over tiles", "tiles of tokens", int(tokens.extent), slots // made.tokens)
        padded = round_up(self.gemm.rows, ROW_TILE)
        expect("loop over tiles", "tiles of rows", int(rows.extent), padded // made.rows)
