"""`read.WarpReader` -> `kernel.Kernel`: what buffers, loops, instructions of a schedule imply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.tirx import PrimFunc

from blockscale.base.errors import LoweringError
from blockscale.base.formats import MOE
from blockscale.base.sizes import round_up
from blockscale.lower.pipe.read import Operand, Site, View, box, substituted, thread_of, var
from blockscale.lower.pipe.text import loads, variables
from blockscale.lower.warp.epilogue import Epilogue
from blockscale.lower.warp.kernel import Format, GroupSums, Kernel, Place, Rows, Runs, Slot
from blockscale.lower.warp.read import MULTICAST, ORDER, Numbers, WarpReader, is_zero, replaced
from blockscale.specs.plans import PREFIX, tensor_memory
from blockscale.specs.plans.moe import E4M3, FAST
from blockscale.tir.common import i64

ITEM = {"uint32": 4, "uint8": 1, "bfloat16": 2, "float16": 2, E4M3: 1}

COPIES = {"warp_bulk": "bulk", "warp_async": "async"}
"""Instructions that copy runs of bytes to shared memory."""

ORDERS = {
    "mma": ("warp_decode", "warp_decode_positions", "warp_decode_bytes"),
    "wgmma": ("warp_decode_steps", "warp_decode_positions", "warp_decode_bytes"),
    "tcgen05": ("warp_decode_steps", "warp_decode_positions", "warp_decode_bytes"),
}
"""Instructions that decode for each unit."""

LOADS = {"warp_tma": "tma", "warp_row": "row", "warp_bulk": "run", "warp_async": "run"}
"""Of instructions that copy rows of x, how they do."""

SAMPLES = ((0, 0, 0, 0), (1, 1, 0, 0), (5, 3, 1, 1), (2, 7, 2, 1))
"""Tiles, stages and CTAs at which offsets in a stage must be the same."""


def derive(func: PrimFunc) -> Kernel:
    """Return the kernel of a scheduled `linear_tiles`.

    LoweringError says which block or loop is not that of such a GEMM.
    """
    return _Derivation(WarpReader(func)).kernel()


class _Derivation:
    """What is found on the way."""

    def __init__(self, reader: WarpReader) -> None:
        self.reader, self.at, self.numbers = reader, reader.at, Numbers()
        self.sites = reader.sites
        self.mma = self._one(lambda site: site.what.endswith("mma"), "multiplies")
        self.unit = self.mma.what.removeprefix("warp_").removesuffix("_mma")
        made = self.mma.operands["A"].buffer
        self.stored = self.sums = None
        if self.unit == "tcgen05":  # through tensor memory, and back
            self.stored = self._writer(made, "warp_tcgen05_st")
            self.sums = self._one(lambda site: site.what == "warp_tcgen05_ld", "reads sums")
            made = self.stored.operands["S"].buffer
        self.decode = self._writer(made, *ORDERS[self.unit])
        self.order = self.decode.what.removeprefix("warp_decode").removeprefix("_")
        by_rows = self.order in ("positions", "bytes")
        if self.unit == "mma":
            load = "warp_matrices" if by_rows else "warp_fragment"
            self.fragment = self._writer(self.mma.operands["X"].buffer, load)
            x = self.fragment.operands["S"]
        else:
            self.fragment, x = self.mma, self.mma.operands["X"]
        self.weights = self._writer(self.decode.operands["W"].buffer, *COPIES)
        copy = self.weights.what
        self.update = self._update()
        self.scales = self._writer(self._scale_buffer(), copy)
        whole = copy if self.unit == "mma" else "warp_tma"
        self.loader = self._writer(x.buffer, *(("warp_row", "warp_tma") if by_rows else (whole,)))

    # ---- Finding ----------------------------------------------------------------------------

    def _one(self, wanted: Any, what: str) -> Site:
        found = [site for site in self.sites if wanted(site)]
        if len(found) != 1:
            raise LoweringError(f"{len(found)} blocks are such that each {what}; one is lowered")
        return found[0]

    def _writer(self, buffer: Any, *whats: str) -> Site:
        """The block that fills ``buffer``, by one of these instructions."""
        found = [site for site in self.sites if site.writes().same_as(buffer)]
        if len(found) != 1 or found[0].what not in whats:
            by = [site.what or site.name for site in found]
            raise LoweringError(
                f"{buffer.name} is filled by {by}, not by one block that calls {' or '.join(whats)}"
            )
        if not any(loop.same_as(self.reader.k_loop) for loop in found[0].outer):
            raise LoweringError(f"{found[0].where} is not inside of the loop over stages of K")
        return found[0]

    def _update(self) -> Site | None:
        """The block that adds up sums of groups; None: MMAs add to sums that are no group's."""
        sums = self.mma.operands["D"].buffer
        found = [
            site
            for site in self.sites
            if site.body is not None
            and any(loop.same_as(self.reader.k_loop) for loop in site.outer)
            and any(load.source.same_as(sums) for load in loads(site.body.value))
        ]
        if len(found) > 1:
            names = ", ".join(site.where for site in found)
            raise LoweringError(f"{names} read the sums {sums.name} of a stage; one is lowered")
        return found[0] if found else None

    def _scale_buffer(self) -> Any:
        """The buffer of scales in shared memory."""
        if self.update is None:
            return self.decode.operands["S"].buffer
        body = self.update.body
        assert body is not None
        known = (self.mma.operands["D"].buffer, body.buffer)
        others = [n for n in loads(body.value) if not any(n.source.same_as(k) for k in known)]
        if len(others) != 1:
            raise LoweringError(
                f"{self.update.where} reads {[str(n.source.name) for n in others]} beside sums; "
                "one scale of a row and group is lowered"
            )
        return others[0].source

    def _scope(self, site: Site, operand: str, scope: str) -> None:
        found = site.operands[operand]
        if found.scope != scope:
            raise LoweringError(
                f"{site.where}: buffer {found.buffer.name} has scope {found.scope!r}, not {scope!r}"
            )

    def _extent(self, tag: str, *sites: Site) -> int:
        """How many ``tag`` there are, the same around each of the blocks; 1: it is not bound."""
        counts = set()
        for site in sites:
            bound = [
                int(loop.extent)
                for loop in site.outer
                if loop.thread_binding is not None and str(loop.thread_binding.thread_tag) == tag
            ]
            counts.add(prod(bound))
        if len(counts) != 1:
            names = ", ".join(site.where for site in sites)
            raise LoweringError(f"{names}: loops bound to {tag} have extents {sorted(counts)}")
        return counts.pop()

    # ---- The kernel -------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        """Put all of it together."""
        reader, size = self.reader, self.reader.tile_size
        products = "local" if self.stored is None else "shared.tmem"
        for site, operand, scope in (
            (self.mma, "A", products),
            (self.mma, "D", products),
            (self.decode, "A", "local"),
            (self.decode, "W", "shared.dyn"),
            *([(self.decode, "S", "shared.dyn")] if "S" in self.decode.operands else []),
            (self.loader, "D", "shared.dyn"),
        ):
            self._scope(site, operand, scope)
        own = (self.mma, self.fragment) if self.stored is None else (self.stored,)
        warps = self._extent("threadIdx.y", self.decode, *own)
        slices = self._extent("threadIdx.z", self.decode, *own)
        ctas = self._extent("clusterCtaIdx.x", self.mma, self.loader, self.weights)
        multicast = self._extent(MULTICAST, self.mma, self.loader, self.weights)
        self.counts = warps, slices, ctas
        stages, partial = self._annotated()
        weights = self._runs(self.weights, 0)
        scales = self._runs(self.scales, weights.slot.bytes)
        at = round_up(weights.slot.bytes + scales.slot.bytes, 1024)
        rows = self._rows(at)
        blocks = rows.slot.shape[-2 if rows.how == "run" else -3]
        tiles_m = size["cols"] // (16 * warps)
        groups = None if self.update is None else self._groups(scales.slot, blocks, tiles_m)
        self._check_partial(partial, blocks)
        numbers = [arg for arg in self.decode.call.args if type(arg).__name__ == "IntImm"]
        args = [int(arg) for arg in numbers[-3:]]
        dtype = str(self.mma.operands["A"].buffer.dtype)
        form = Format([*MOE][args[0]], args[1], args[2], dtype, self.order)
        k_dim = next(d for d in weights.view.dims if d.axis == "k")
        self.tiles_m = tiles_m
        codes = self._place(self.decode, "W", weights.slot, blocks // slices, tiles_m)
        factors = None
        if "S" in self.decode.operands:
            factors = self._place(self.decode, "S", scales.slot, blocks // slices, tiles_m)
        n8 = size["rows"] // 8 if self.unit == "mma" else 1
        own_blocks = blocks // self._sum_slices
        tokens = self._place(
            self.fragment, "S" if self.unit == "mma" else "X", rows.slot, own_blocks, n8
        )
        self._check_product(size, tiles_m, blocks)
        acc, epilogue = self._epilogue()
        part_rows = self._tensor(size)
        if ctas > 1 and (k_dim.extent or 0) // blocks <= (ctas - 1) * int(reader.k_loop.extent):
            raise LoweringError(
                f"loop over K: {k_dim.extent} blocks of 64 k leave a CTA of {ctas} without a whole "
                f"stage of {blocks}; divide K among fewer CTAs"
            )
        kernel = Kernel(
            at=self.at,
            views=reader.views,
            optional=reader.optional,
            scalars=reader.scalars,
            grouped=reader.grouped,
            # GPUs that have no bulk copies let no kernel begin before the one before has ended.
            after=reader.after if COPIES[self.weights.what] == "bulk" else None,
            addressed=reader.addressed,
            unit=self.unit,
            copies=COPIES[self.weights.what],
            form=form,
            rows_tile=size["rows"],
            cols_tile=size["cols"],
            fastest=self._fastest(),
            warps=warps,
            slices=slices,
            ctas=ctas,
            multicast=multicast,
            tiles_m=tiles_m,
            blocks=blocks,
            stages=stages,
            partial=partial,
            k_stages=int(reader.k_loop.extent),
            k_blocks=k_dim.extent or 0,
            weights=weights,
            scales=scales,
            rows=rows,
            codes=codes,
            factors=factors,
            tokens=tokens,
            groups=groups,
            acc=acc,
            epilogue=epilogue,
            part_rows=part_rows,
        )
        self._check_multicast(kernel)
        return replace(kernel, unit_tiles=Epilogue(kernel).unit_tiles())

    def _check_multicast(self, kernel: Kernel) -> None:
        """CTAs that load rows of x for each other have the same, and a part of a stage each."""
        many, reader = kernel.multicast, self.reader
        if many == 1:
            return
        where = f"loop bound to {MULTICAST}"
        (loop,) = (loop for loop in reader.tile_loops if thread_of(loop) == MULTICAST)
        place = reader.placed.get(loop.loop_var)
        cols = self.at.tiles["cols"]
        numbers = range(kernel.col_tiles)
        if place is None or any(self.numbers(place, {cols: c}) != c % many for c in numbers):
            raise LoweringError(f"{where}: it is not the innermost over tiles of rows of w")
        read = (v for index in (kernel.rows.row, kernel.rows.channel) for v in variables(index))
        if any(v.same_as(cols) for v in read):
            raise LoweringError(f"{where}: its CTAs do not have the same rows of x")
        if not kernel.rows.tma or kernel.unit != "wgmma" or kernel.ctas > 1 or kernel.grouped:
            raise LoweringError(
                f"{where}: rows of x are multicast by TMA, for wgmma, in clusters whose CTAs do "
                "not divide K"
            )
        if kernel.blocks % many or kernel.col_tiles % many:
            raise LoweringError(
                f"{where}: {many} CTAs share neither {kernel.blocks} blocks of 64 k of a stage nor "
                f"{kernel.col_tiles} tiles of rows of w evenly"
            )

    @property
    def _sum_slices(self) -> int:
        """Slices of a stage's K with sums of their own: those of tcgen05 are decoded alone."""
        return self.counts[1] if self.stored is None else 1

    def _annotated(self) -> tuple[int, int]:
        """The ring's depth, and how many channels' products are summed up by themselves, or 0."""
        stages, partial = f"{PREFIX}stages", f"{PREFIX}partial"
        found = {str(key): value for key, value in self.reader.k_loop.annotations.items()}
        by_bytes = str(self.mma.operands["A"].buffer.dtype) == E4M3
        by_bytes = by_bytes and self.update is None  # sums of groups are blocks of their own
        known = {stages, partial} if by_bytes else {stages}
        if set(found) - known or stages not in found:
            raise LoweringError(
                f"loop over K: annotations {sorted(found)} are not '{PREFIX}stages' alone"
                + (f" or with '{partial}'" if by_bytes else "")
            )
        return int(found[stages]), int(found.get(partial, 0))

    def _check_partial(self, partial: int, blocks: int) -> None:
        """MMAs sum up part of a stage, or all of K where the function allows it."""
        name = f"{PREFIX}partial"
        if partial % 64 or (partial and blocks % (partial // 64)):
            raise LoweringError(
                f"loop over K: '{name}' is {partial}, which does not divide the {64 * blocks} "
                "channels of a stage into parts of whole blocks of 64"
            )
        by_bytes = str(self.mma.operands["A"].buffer.dtype) == E4M3
        if by_bytes and self.update is None and not partial and not self.reader.fast:
            raise LoweringError(
                f"loop over K: without '{name}' MMAs of 8 bits sum up all of K in some 14 bits, "
                f"but the function has no attribute '{FAST}'; annotate '{name}'"
            )

    def _fastest(self) -> str:
        """The axis of the innermost loop over tiles."""
        for loop in reversed(self.reader.tile_loops):
            if thread_of(loop) is not None:
                continue
            for axis, variable in self.at.tiles.items():
                value = self.reader.placed.get(loop.loop_var)
                if value is not None and any(v.same_as(variable) for v in variables(value)):
                    self._check_order(axis)
                    return axis
        raise LoweringError("no loop over tiles")

    def _check_order(self, fastest: str) -> None:
        """Tiles of experts' rows are found in a table, in which those of an expert are together."""
        outer, rows = self.reader.tile_loops[0], self.at.tiles["rows"]
        place = self.reader.placed.get(outer.loop_var)
        of_rows = place is not None and any(v.same_as(rows) for v in variables(place))
        if self.reader.grouped and (fastest != "rows" or not of_rows):
            raise LoweringError(
                "loops over tiles: tiles of an expert follow each other, and in them those of rows "
                "of x; put the loop over padded tiles first, and the one over tiles in these last"
            )

    # ---- Slots and loads --------------------------------------------------------------------

    def _samples(self) -> list[dict[Any, int]]:
        """Values of coordinates that are not a thread's."""
        rows, cols = self.at.tiles.values()
        return [
            {rows: r, cols: c, self.at.k: k, self.at.cta: cta if self.counts[2] > 1 else 0}
            for r, c, k, cta in SAMPLES
        ]

    def _places(self, site: Site) -> dict[Any, np.ndarray]:
        """Values of a site's loops and of `_samples`: at each point of the loops, all samples."""
        samples, extents = self._samples(), [loop.extent for loop in site.loops]
        found = {v: np.tile([s[v] for s in samples], prod(extents)) for v in samples[0]}
        for loop, values in zip(site.loops, np.indices(extents), strict=True):
            found[loop.var] = np.repeat(values.reshape(-1), len(samples))
        return found

    @staticmethod
    def _offset(mins: Sequence[PrimExpr], slot: Slot) -> PrimExpr:
        """Bytes of an element's place in a slot."""
        total: PrimExpr = i64(0)
        for index, base, stride in zip(mins, slot.base, slot.strides, strict=True):
            total = total + (index - base) * i64(stride)
        return total

    def _box(self, site: Site, operand: Operand) -> tuple[tuple[PrimExpr, ...], tuple[int, ...]]:
        """First element of a stage, and extents of what the block writes in one."""
        zero = {loop.var: i64(0) for loop in site.loops}
        base = tuple(substituted(index, zero) for index in operand.mins)
        places = self._places(site)
        column = self.numbers.column
        parts = [
            {*np.unique(column(index, places) - column(first, places)).tolist()}
            for index, first in zip(operand.mins, base, strict=True)
        ]
        return base, box(site, operand, parts, prod(loop.extent for loop in site.loops))

    def _slot(self, site: Site, at: int) -> Slot:
        target = site.operands["D"]
        base, shape = self._box(site, target)
        strides = [ITEM[str(target.buffer.dtype)]]
        for extent in shape[:0:-1]:
            strides.append(strides[-1] * extent)
        return Slot(target.buffer, base, shape, tuple(strides[::-1]), at)

    def _view(self, site: Site) -> View:
        name = str(site.operands["S"].buffer.name)
        if name not in self.reader.views:
            raise LoweringError(f"{site.where}: source {name} is no parameter")
        return self.reader.views[name]

    def _runs(self, site: Site, at: int) -> Runs:
        """Copies of codes or scales."""
        slot, view, source = self._slot(site, at), self._view(site), site.operands["S"]
        target = site.operands["D"]
        zero = {loop.var: i64(0) for loop in site.loops}
        first = view.index([substituted(index, zero) for index in source.mins])
        parts = set()
        offset = self._offset(target.mins, slot)
        for point in site.points():
            found = set()
            for sample in self._samples():
                indices = tuple(
                    self.numbers(index, sample | point) - self.numbers(begin, sample)
                    for index, begin in zip(view.index(source.mins), first, strict=True)
                )
                found.add((indices, self.numbers(offset, sample | point)))
            if len(found) != 1:
                raise LoweringError(f"{site.where}: its copies differ between tiles: {found}")
            parts |= found
        blocks = source.shape[-2] if len(source.shape) > 1 else 1
        count = source.shape[-1]
        if blocks > 1 and count != int(source.buffer.shape[-1]):
            raise LoweringError(
                f"{site.where}: {blocks} parts of {count} of {source.buffer.shape[-1]} elements "
                "are not contiguous; copy blocks of 64 rows, or one at a time"
            )
        per = next(d.unit for d in view.dims if d.axis == "k") // 64
        ordered = tuple(sorted(parts, key=lambda part: part[1]))
        return Runs(view, slot, first, ordered, blocks, count * slot.item, per)

    def _rows(self, at: int) -> Rows:
        """Copies of rows of x."""
        site = self.loader
        slot, view, source = self._slot(site, at), self._view(site), site.operands["S"]
        rows, how = self.reader.tile_size["rows"], LOADS[site.what]
        of_row, of_block = (-3, -2) if how == "run" else (-2, -3)
        if slot.shape[-1] != 64 or slot.shape[of_row] != rows:
            raise LoweringError(f"{site.where}: a stage of x is {slot.shape}, not of {rows} x 64")
        zero = {loop.var: i64(0) for loop in site.loops}
        at_row, at_channel = view.index(source.mins)
        first = self.reader.simplify(substituted(at_channel, zero))
        if how == "row":
            place = site.operands["D"].mins[of_row] - slot.base[of_row]
            own = self.reader.simplify(place)
            row = self._row_of(site, at_row, own)
        else:
            row = self.reader.simplify(substituted(at_row, zero))
            own = at_row - row
        made = Rows(view, slot, row, first, slot.strides[of_row], slot.strides[of_block], how)
        # The copy of row i and block b is to that place in the slot, and from there in x.
        target = self._offset(site.operands["D"].mins, slot)
        places, column = self._places(site), self.numbers.column
        block = column(at_channel, places) - column(first, places)
        wanted = column(own, places) * made.row_stride + block // 64 * made.block_stride
        if np.any(block % 64) or np.any(column(target, places) != wanted):
            raise LoweringError(f"{site.where}: rows of x are not copied in their order")
        whole = {"tma": rows, "run": slot.shape[of_block], "row": 1}[how]
        if prod(source.shape) != 64 * whole:
            raise LoweringError(
                f"{site.where}: a copy is of {source.shape}, neither all rows nor a stage of one, "
                "nor a block of one"
            )
        return made

    def _row_of(self, site: Site, row: PrimExpr, place: PrimExpr) -> PrimExpr:
        """The row of x that is copied to ``place`` of a tile, in the number of a sorted row."""
        wanted = self.at.tiles["rows"] * i64(self.reader.tile_size["rows"]) + place
        places = self._places(site)

        def check(found: PrimExpr) -> None:
            if np.any(self.numbers.column(found, places) != self.numbers.column(wanted, places)):
                raise LoweringError(f"{site.where}: row {row} of x is not that of its place")

        def slot(load: Any) -> PrimExpr:
            if str(load.source.name) != ORDER:
                raise LoweringError(f"{site.where}: an index reads {load}")
            (flat,) = self.reader.views[ORDER].index(load.indices)
            check(flat)
            return self.at.slot

        made = replaced(row, slot)
        if made.same_as(row):
            check(row)
            return self.at.sorted
        return made

    def _place(self, site: Site, operand: str, slot: Slot, blocks: int, tiles: int) -> Place:
        """Where a block's instructions read, by its loops over blocks and over tiles."""
        mins = site.operands[operand].mins
        linear = self._offset(mins, slot)
        inside = [loop for loop in site.loops if loop.extent > 1]
        each = self._blocks_of_group(blocks)
        extents = (blocks // each, self.tiles_m, each) if self.update else (blocks, tiles)
        wanted = [extent for extent in extents if extent > 1]
        if site is self.mma and self.update is None:
            # the same rows of x for all tiles of 16 rows, and steps of K
            inside = inside[: 1 if blocks > 1 else 0]
        elif site is self.mma:
            inside = inside[: len(wanted)]
        if [loop.extent for loop in inside] != wanted:
            raise LoweringError(
                f"{site.where}: loops of {[loop.extent for loop in inside]} inside of a stage, not "
                f"{wanted}: blocks of 64 k, or groups of them, and tiles"
            )
        zero = {loop.var: i64(0) for loop in site.loops}
        others = {v: i64(0) for v in (*self.at.tiles.values(), self.at.k, self.at.cta)}
        first = self.reader.simplify(substituted(linear, zero | others))
        warps, slices, _ = self.counts
        own = [{self.at.warp: w, self.at.slice: s} for w, s in product(range(warps), range(slices))]
        steps = []
        for block in range(blocks):
            line: list[int] = []
            for tile in range(tiles):
                values = (block // each, tile, block % each) if self.update else (block, tile)
                pairs = zip(values, extents, strict=True)
                digits = [value for value, extent in pairs if extent > 1]
                point = {loop.var: i64(v) for loop, v in zip(inside, digits, strict=True)}
                at = substituted(linear, point)
                line.append(self._beyond(at, first, own, (site, slot)))
            steps.append(tuple(line))
        return Place(first, tuple(steps))

    def _beyond(
        self,
        at: PrimExpr,
        first: PrimExpr,
        threads: Sequence[dict[Any, Any]],
        of: tuple[Site, Slot],
    ) -> int:
        """By how much ``at`` lies behind ``first``, which each thread has its own of.

        ``of``: what reads there, and of which slot.

        Raises:
            LoweringError: threads, or tiles, differ by more than where they begin.
        """
        found = {
            self.numbers(at, thread | sample) - self.numbers(first, thread)
            for thread, sample in product(threads, self._samples())
        }
        if len(found) != 1:
            site, slot = of
            raise LoweringError(
                f"{site.where}: what it reads of {slot.buffer.name} differs between warps, "  # type: ignore[attr-defined]
                "lanes or tiles by more than where these begin"
            )
        return found.pop()

    # ---- Sums of groups ---------------------------------------------------------------------

    def _blocks_of_group(self, blocks: int) -> int:
        """Blocks of 64 k whose products are summed up; without sums of groups a stage's."""
        if self.update is None:
            return blocks
        places = [self.mma.operands["D"].mins[0], self.mma.operands["A"].mins[-3]]
        found: dict[int, set[int]] = {}
        for point in self.mma.points():
            group, block = (self.numbers(place, point) for place in places)
            found.setdefault(group, set()).add(block)
        sizes = {len(some) for some in found.values()}
        if len(sizes) != 1 or len(found) * len(next(iter(found.values()))) != blocks:
            raise LoweringError(f"{self.mma.where}: sums are not those of groups of whole blocks")
        return sizes.pop()

    def _groups(self, slot: Slot, blocks: int, tiles_m: int) -> GroupSums:
        """What a block makes of the sums of groups, and where it reads their scales."""
        site = self.update
        assert site is not None
        body = site.body
        assert body is not None
        each = self._blocks_of_group(blocks)
        inside = [loop for loop in site.loops if loop.extent > 1]
        extents = (blocks // each, tiles_m, self.reader.tile_size["rows"], 16)
        if [loop.extent for loop in inside] != [extent for extent in extents if extent > 1]:
            raise LoweringError(
                f"{site.where}: loops of {[loop.extent for loop in inside]} inside of a stage, not "
                f"{list(extents)}: groups, tiles of 16 rows, rows of x, and rows"
            )
        own, zero = var("own"), {loop.var: i64(0) for loop in site.loops}

        def point(group: int, tile: int, high: int) -> dict[Any, Any]:
            values = (i64(group), i64(tile), i64(0), own + i64(8 * high))
            pairs = zip(values, extents, strict=True)
            digits = [value for value, extent in pairs if extent > 1]
            return zero | {loop.var: v for loop, v in zip(inside, digits, strict=True)}

        self._check_update(site, point, blocks // each, tiles_m)
        (scale,) = (n for n in loads(body.value) if n.source.same_as(self._scale_buffer()))
        offset = self._offset(scale.indices, slot)
        tiles = {v: i64(0) for v in (*self.at.tiles.values(), self.at.k, self.at.cta)}
        first = substituted(substituted(offset, point(0, 0, 0)), tiles)
        threads = [{self.at.warp: w, own: g} for w in range(self.counts[0]) for g in range(8)]
        steps = []
        for group in range(blocks // each):
            line = []
            for tile in range(tiles_m):
                pair: list[int] = []
                for high in range(2):
                    at = substituted(offset, point(group, tile, high))
                    pair.append(self._beyond(at, first, threads, (site, slot)))
                line.append((pair[0], pair[1]))
            steps.append(tuple(line))
        held = blocks // each * tiles_m
        for loop in site.loops:
            if any(loop.var.same_as(other.var) for other in self.mma.loops):
                held //= loop.extent
        if held > 1:
            raise LoweringError(
                f"{self.mma.where}: a warp holds {held} sums of groups of its rows at a time; one "
                "is lowered, of a tile of 16 rows"
            )
        if blocks // each * tiles_m % 2:
            raise LoweringError(
                f"{self.mma.where}: {blocks // each * tiles_m} sums of a stage, whose fragments "
                "lie in two banks; an odd number would decode the next stage's into the bank that "
                "is being multiplied"
            )
        return GroupSums(each, site, first, own, tuple(steps))

    def _check_update(self, site: Site, point: Any, groups: int, tiles_m: int) -> None:
        """It reads the sum that it writes, and the one that MMAs made of its rows and group."""
        body, made = site.body, self.mma.operands["D"]
        assert body is not None
        own: list[Sequence[PrimExpr]] = []
        for load in loads(body.value):
            buffer, indices = site.element(load.source, load.indices)
            if buffer.same_as(body.buffer):
                pairs = zip(indices, body.indices, strict=True)
                if any(not is_zero(a - b) for a, b in pairs):
                    raise LoweringError(f"{site.where} reads another sum than it writes")
            elif buffer.same_as(made.buffer):
                own.append(indices)
        if len(own) != 1 or any(
            not is_zero(a - b) for a, b in zip(own[0][-3:], body.indices[-3:], strict=True)
        ):
            raise LoweringError(f"{site.where} does not add a group's sum to that of its rows")
        places = {
            tuple(
                self.numbers(value, found | sample)
                for value in (made.mins[0], made.mins[-1])
                for sample in self._samples()
            )
            for found in self.mma.points()
        }
        for group, tile in product(range(groups), range(tiles_m)):
            at = [substituted(own[0][i], point(group, tile, 0)) for i in (0, -1)]
            wanted = tuple(
                self.numbers(value, sample) for value in at for sample in self._samples()
            )
            if wanted not in places:
                raise LoweringError(f"{site.where} reads a sum that no MMA of the stage makes")

    # ---- Products and what follows ----------------------------------------------------------

    def _check_product(self, size: Mapping[str, int], tiles_m: int, blocks: int) -> None:
        """Every product of the stage is there once, and adds to the sums of its part."""
        warps, _, ctas = self.counts
        slices = self._sum_slices
        n = 8 if self.unit == "mma" else size["rows"]
        each = self._blocks_of_group(blocks)
        wanted = [
            *(
                (blocks // each, tiles_m, each)
                if self.update
                else (blocks // slices, tiles_m if self.stored is None else 1)
            ),
            1 if n == 8 and self.unit == "mma" else 64 // self.mma.operands["A"].shape[-1],
            size["rows"] // n,
        ]
        found = [loop.extent for loop in self.mma.loops if loop.extent > 1]
        if found != [extent for extent in wanted if extent > 1]:
            raise LoweringError(
                f"{self.mma.where}: loops of {found} inside of a stage, not {wanted}: blocks of "
                "64 k, tiles of 16 rows, steps of the MMA's k, tiles of rows of x"
            )
        if self.unit == "wgmma" and (slices > 1 or warps % 4):
            raise LoweringError(f"{self.mma.where}: warps of a wgmma are four, and have all of K")
        part = self.mma.operands["D"].mins[:-3]
        if self.update is not None:
            if slices * ctas > 1:
                raise LoweringError(f"{self.mma.where}: sums of groups are those of one CTA")
            return
        if slices * ctas == 1 and not part:
            return
        for s, c in product(range(slices), range(ctas)):
            values = {self.at.slice: s, self.at.cta: c}
            if len(part) != 1 or self.numbers(part[0], values) != c * slices + s:
                raise LoweringError(f"{self.mma.where}: slices and CTAs have no sums of their own")

    def _epilogue(self) -> tuple[str, Site]:
        """The sums that are read at the end, and the block that stores."""
        sums = self.mma.operands["D"].buffer
        if self.update is not None:
            sums = self.update.writes()
        stores = [s for s in self.sites if s.body and str(s.writes().name) in self.reader.views]
        if len(stores) != 1:
            raise LoweringError(f"{len(stores)} blocks write parameters; one is lowered")
        warps, _, ctas = self.counts
        slices = self._sum_slices
        total = sums
        if self.sums is not None:
            if not self.sums.operands["S"].buffer.same_as(sums):
                raise LoweringError(f"{self.sums.where} does not read the sums {sums.name}")
            total = sums = self.sums.operands["D"].buffer
        for site in self.sites:
            body = site.body
            if body is None or site is stores[0] or site is self.update:
                continue
            zero = isinstance(body.value, tirx.FloatImm) and float(body.value) == 0
            adds = [load.source for load in loads(body.value)]
            if not zero:
                own = slices * ctas > 1 and type(body.value).__name__ == "Add" and len(adds) == 2
                if not own or not adds[0].same_as(body.buffer) or not adds[1].same_as(sums):
                    raise LoweringError(
                        f"{site.where} is neither a sum over slices of K, nor does it store"
                    )
                total = body.buffer
        if (total is sums) != (slices * ctas == 1):
            raise LoweringError("parts of K have sums of their own, and no block adds them up")
        if self._extent("threadIdx.y", stores[0]) != warps:
            raise LoweringError(f"{stores[0].where}: it is not divided among {warps} warps")
        if self.stored is not None and self._extent("threadIdx.z", stores[0]) != self.counts[1]:
            raise LoweringError(f"{stores[0].where}: it is not divided among the slices' warps")
        read = [load.source for load in loads(stores[0].body.value)]  # type: ignore[union-attr]
        if not any(source.same_as(total) for source in read):
            raise LoweringError(f"{stores[0].where} does not read the sums {total.name}")
        return str(total.name), stores[0]

    # ---- Tensor memory ----------------------------------------------------------------------

    def _tensor(self, size: Mapping[str, int]) -> int:
        """What goes through tensor memory keeps its place; return the rows of x that come back.

        0: nothing does.
        """
        if self.stored is None or self.sums is None:
            return 0
        warps, slices, _ = self.counts
        if (warps, size["cols"]) != (tensor_memory.WARPS, tensor_memory.ROWS):
            raise LoweringError(
                f"{self.decode.where}: {warps} warps decode {size['cols']} rows; tensor memory "
                f"has {tensor_memory.ROWS} lanes, 32 for each of {tensor_memory.WARPS} warps"
            )
        decoded, stored = self.decode.operands["A"], self.stored.operands["S"]
        for site, first, second in (
            (self.stored, stored.mins, decoded.mins),
            (self.stored, self.stored.operands["D"].mins, stored.mins),
            (self.sums, self.sums.operands["D"].mins, self.sums.operands["S"].mins),
        ):
            if any(not is_zero(a - b) for a, b in zip(first, second, strict=True)):
                raise LoweringError(f"{site.where} moves what it copies to another place")
        a, x, d = (self.mma.operands[name].mins for name in "AXD")
        pairs = ((a[-3], x[-3]), (a[-2], d[-1]), (a[-1], x[-1]))
        for point, sample in product(self.mma.points(), self._samples()):
            values = point | sample
            if any(
                self.numbers(one, values) != self.numbers(other, values) for one, other in pairs
            ):
                raise LoweringError(
                    f"{self.mma.where} multiplies other channels of x than of w, or adds to sums "
                    "of other rows"
                )
        return self._part_rows(size, slices)

    def _part_rows(self, size: Mapping[str, int], slices: int) -> int:
        """Rows of x whose sums a warp reads at a time, parts that slices take in turn."""
        site = self.sums
        assert site is not None
        read = site.operands["S"]
        rows = read.shape[-2]
        inside = [loop for loop in site.loops if loop.extent > 1]
        extents = (size["rows"] // (rows * slices), self.tiles_m)
        at = self.at
        token = read.mins[-3] * read.buffer.shape[-2] + read.mins[-2]
        of_cta = read.mins[0] if len(read.mins) > 3 else at.cta
        part = tirx.Var("part", "int64"), tirx.Var("tile", "int64")
        wanted_token = at.tiles["rows"] * i64(size["rows"]) + (
            part[0] * i64(slices) + at.slice
        ) * i64(rows)
        wanted_row = at.tiles["cols"] * i64(size["cols"])
        wanted_row = wanted_row + (at.warp * i64(self.tiles_m) + part[1]) * i64(16)
        right = [loop.extent for loop in inside] == [extent for extent in extents if extent > 1]
        for numbers in product(*map(range, extents)) if right else ():
            digits = [n for n, extent in zip(numbers, extents, strict=True) if extent > 1]
            point = {loop.var: n for loop, n in zip(inside, digits, strict=True)}
            point |= dict(zip(part, numbers, strict=True))
            for sample, w, s in product(self._samples(), range(self.counts[0]), range(slices)):
                values = point | sample | {at.warp: w, at.slice: s}
                pairs = (token, wanted_token), (read.mins[-1], wanted_row), (of_cta, at.cta)
                for found, wanted in pairs:
                    right = right and self.numbers(found, values) == self.numbers(wanted, values)
        if not right or prod(extents) * rows * slices != size["rows"] * self.tiles_m:
            raise LoweringError(
                f"{site.where}: warps do not read the sums of their rows of w, {rows} rows of x at "
                f"a time, which {slices} slices take in turn"
            )
        if self.counts[2] > 1 and rows * slices != size["rows"]:
            raise LoweringError(
                f"{site.where}: CTAs of a cluster add up once, and {slices} slices read the sums "
                f"of {size['rows']} rows of x in {extents[0]} parts; divide K among no CTAs, or "
                "take tiles of which each slice has one part"
            )
        return rows
