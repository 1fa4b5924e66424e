"""Scheduled TensorIR of a tcgen05 GEMM -> `GemmPlan`: what its loops, buffers and calls say.

`gemm.tcgen05` makes such functions.  Tiles are read off tensor intrinsics and loop
extents, memories off buffers, and each is compared with what it implies elsewhere; decisions that
loops cannot say are annotations.  What is not such a GEMM raises LoweringError.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm.tirx import PrimFunc

from blockscale.base.errors import LoweringError
from blockscale.base.formats import GEMM, UE8M0
from blockscale.base.sizes import ceil_div, round_up
from blockscale.lower.sites import Site, annotated, constant, expect, function, one, sites
from blockscale.specs.plans.gemm import K_LOOP, LANES, RASTERS, GemmPlan
from blockscale.tir.gemm.tiles import ATTRIBUTE, K_TILE

TILE_LOOP = {"cluster_x": None, "cluster_y": 1, "acc_stages": 1, "raster": 0, "group": 1}
"""Annotations of the loop over tiles, and what holds without them; cluster_x: cta_group."""

WARPS, WARP = 4, 32
"""Of the epilogue, and their lanes."""


def read(func: PrimFunc) -> GemmPlan:
    """Return the plan of a scheduled `gemm_tiles`.

    LoweringError says which block or loop is not that of a tcgen05 GEMM.
    """
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        raise LoweringError(
            f"function without the attribute {ATTRIBUTE!r}: it is no GEMM of gemm_tiles"
        )
    return _Reader(func).plan()


class _Reader:
    """What one function says."""

    def __init__(self, func: PrimFunc) -> None:
        self.sizes = dict(func.attrs[ATTRIBUTE])
        self.fmt = str(self.sizes["fmt"])
        self.format = GEMM[self.fmt]
        self.params = {param.name: param for param in func.params}
        self.sites = list(sites(func.body))
        self.mma = self._mma()
        self.tile_loop, self.k_loop = self._loops()

    def plan(self) -> GemmPlan:
        """Return all decisions."""
        call = self.mma.block.body.value
        group = self.mma.number
        mma_m, mma_n, swap = self._instruction(call)
        block_k = prod(self.mma.extents(self.k_loop)) * self.format.step
        stages = constant(self.k_loop.extent, "loop over K")
        k = round_up(int(self.sizes["k"]), K_TILE)
        expect("loop over K", "K of all stages", stages * block_k, k)
        expect(self.mma.name, "M of the MMA", mma_m, LANES * group)
        self._operands(group, mma_n, block_k, swap)
        self._scales(group, mma_n, block_k, swap)
        store, epi_cols = self._epilogue(group, mma_n, swap)
        on_tiles = annotated(self.tile_loop, TILE_LOOP, "tiles")
        on_k = annotated(self.k_loop, K_LOOP, "K")
        if on_tiles["raster"] not in (0, 1):
            raise LoweringError(f"loop over tiles: raster={on_tiles['raster']} is neither 0 nor 1")
        return GemmPlan(
            fmt=self.fmt,
            out_dtype=str(self.sizes["out_dtype"]),
            n=int(self.sizes["n"]),
            k=int(self.sizes["k"]),
            experts=int(self.sizes["experts"]),
            swap=swap,
            cta_group=group,
            mma_n=mma_n,
            block_k=block_k,
            stages=on_k["stages"],
            cluster_x=on_tiles["cluster_x"] or group,
            cluster_y=on_tiles["cluster_y"],
            split_k=on_k["split_k"],
            acc_stages=on_tiles["acc_stages"],
            epi_cols=epi_cols,
            store=store,
            raster=RASTERS[on_tiles["raster"]],
            group=on_tiles["group"],
        )

    # ---- The MMA ----------------------------------------------------------------------------

    def _mma(self) -> Site:
        """The block that issues MMAs."""
        for site in self.sites:
            if not site.what and site.block.name_hint.removesuffix("_update") == "gemm":
                raise LoweringError(
                    f"{site.name} is not tensorized: its loops have no MMA; map it onto an "
                    "intrinsic of blockscale.tir.intrin.tcgen05"
                )
        kind = self.format.kind
        for site in self.sites:
            if site.what.startswith("tcgen05_mma_"):
                expect(site.name, "MMA kind", site.what.removeprefix("tcgen05_mma_"), kind)
        return one(self.sites, f"tcgen05_mma_{kind}", f"{self.fmt} is multiplied by it")

    def _loops(self) -> tuple[Any, Any]:
        """The loop over tiles and the one over stages: that with the loads of operands in it."""
        load = next((s for s in self.sites if s.what == "tma_load_2d"), None)
        if load is None:
            raise LoweringError("no block calls tma_load_2d: operands are loaded by TMA")
        common = [a for a, b in zip(self.mma.loops, load.loops, strict=False) if a.same_as(b)]
        if len(common) != 2:
            raise LoweringError(
                f"{load.name} and {self.mma.name} are inside of {len(common)} common loops, not "
                "two, over tiles and over stages of K"
            )
        return common[0], common[1]

    def _instruction(self, call: Any) -> tuple[int, int, bool]:
        """M and N of the MMA, and whether X is b, from its descriptors and buffers."""
        desc = call.args[4]
        if function(desc) != "bs_instruction_desc":
            raise LoweringError(f"{self.mma.name}: its argument 4 is no instruction descriptor")
        m, n, x_format, y_format, ue8m0 = (int(arg) for arg in desc.args[1:6])
        expect(self.mma.name, "shape of the accumulator", self.mma.shape(4), (m, n))
        expect(self.mma.name, "E8M0 scales", bool(ue8m0), self.format.scale is UE8M0)
        swap = call.args[2].args[1].args[1].args[0].same_as(self.mma.block.match_buffers[2].buffer)
        wide = self.format.a.bits == 8
        codes = [
            0 if bits == 8 else 5 if wide else 1
            for bits in (self.format.a.bits, self.format.b.bits)
        ]
        expect(
            self.mma.name, "formats of X and Y", [x_format, y_format], codes[:: -1 if swap else 1]
        )
        self._memory(self.mma, (0, 2), "shared.dyn", "operands are in shared memory")
        self._memory(self.mma, (1, 3, 4), "shared.tmem", "scales and sums are in tensor memory")
        init = [
            site
            for site in self.sites
            if site.block.writes and site.block.writes[0].source.same_as(self.mma.buffer(4))
        ]
        expect(self.mma.name, "blocks that write the accumulator", len(init), 2)
        return m, n, swap

    def _memory(self, site: Site, operands: tuple[int, ...], scope: str, rule: str) -> None:
        for number in operands:
            buffer = site.buffer(number)
            if buffer.scope() != scope:
                raise LoweringError(
                    f"{site.name}: buffer {buffer.name} has scope {buffer.scope()!r}, not "
                    f"{scope!r}: {rule}"
                )

    # ---- Loads ------------------------------------------------------------------------------

    def _writer(self, what: str, buffer: Any) -> Site:
        """The block that fills ``buffer`` by ``what``."""
        for site in self.sites:
            if site.what == what and site.block.writes[0].source.same_as(buffer):
                if not any(loop.same_as(self.k_loop) for loop in site.loops):
                    raise LoweringError(f"{site.name} is not inside of the loop over K")
                return site
        raise LoweringError(f"no block fills buffer {buffer.name} by {what}")

    def _operands(self, group: int, mma_n: int, block_k: int, swap: bool) -> None:
        """Compare the loads of operands with the MMA."""
        call = self.mma.block.body.value
        row_bytes = block_k // (2 if self.format.a.bits == 4 else 1)
        for number, side in ((0, "a"), (2, "b")):
            is_x = (side == "b") == swap
            site = self._writer("tma_load_2d", self.mma.buffer(number))
            bits = self.format.a.bits if side == "a" else self.format.b.bits
            rows = LANES if is_x else mma_n // group
            expect(site.name, "CTA group", site.number, group)
            expect(site.name, "tile", site.shape(-1), (rows, block_k * bits // 8))
            expect(site.name, "loads of a stage", prod(site.extents(self.k_loop)), group)
            expect(site.name, "source", site.buffer(0).name, self.params[side].name)
            matrix = function(call.args[2 if is_x else 3])
            expect(self.mma.name, f"matrix of {side}", matrix, f"bs_matrix_desc<{row_bytes}>")

    def _scales(self, group: int, mma_n: int, block_k: int, swap: bool) -> None:
        """Compare the loads and copies of scales with the MMA."""
        atoms_k = block_k // (4 * self.format.block)
        for number, side in ((1, "a"), (3, "b")):
            is_x = (side == "b") == swap
            atoms = atoms_k * (group if is_x else ceil_div(mma_n, LANES))
            copy = self._writer("tcgen05_cp", self.mma.buffer(number))
            load = self._writer("tma_load_3d", copy.buffer(0))
            for site in (copy, load):
                expect(site.name, "CTA group", site.number, group)
                tiles = prod(site.extents(self.k_loop))
                expect(site.name, "128x4 tiles of scales of a stage", tiles, atoms)
            self._memory(copy, (0,), "shared.dyn", "scales are copied from there")
            expect(load.name, "source", load.buffer(0).name, self.params[f"{side}_scale"].name)

    # ---- The epilogue -----------------------------------------------------------------------

    def _epilogue(self, group: int, mma_n: int, swap: bool) -> tuple[str, int]:
        """How d is stored, and columns that are taken at a time."""
        read = one(self.sites, "tcgen05_ld", "the accumulator is read by it")
        expect(read.name, "source", read.buffer(0).name, self.mma.buffer(4).name)
        self._memory(read, (1,), "local", "the accumulator is read to registers")
        extents = read.extents(self.tile_loop)
        if len(extents) != 4:
            raise LoweringError(
                f"{read.name} is inside of {len(extents)} loops of a tile, not 4: CTAs, columns, "
                "warps, reads"
            )
        ctas, chunks, warps, reads = extents
        expect(read.name, "columns of a read", read.shape(0)[1], read.number)
        epi_cols = reads * read.number
        expect(read.name, "CTAs and warps", (ctas, warps), (group, WARPS))
        expect(read.name, "columns of the accumulator", chunks * epi_cols, mma_n)
        blocks = [site for site in self.sites if site.block.name_hint == "epilogue"]
        if len(blocks) != 1 or not blocks[0].block.reads[0].source.same_as(read.buffer(1)):
            raise LoweringError(f"block 'epilogue' does not read what {read.name} has read")
        written = blocks[0].block.writes[0].source
        stores = [site for site in self.sites if site.what == "tma_store_2d"]
        if not stores:
            expect("block 'epilogue'", "what it writes", written.name, self.params["d"].name)
            return "direct", epi_cols
        store = stores[0]
        expect(store.name, "source", store.buffer(0).name, written.name)
        expect(store.name, "tile", store.shape(0), (epi_cols, WARP) if swap else (WARP, epi_cols))
        count = prod(store.extents(self.tile_loop))
        expect(store.name, "stores of a tile", count, ctas * chunks * WARPS)
        return "tma", epi_cols
