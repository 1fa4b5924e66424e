"""`read.Reader` -> `kernel.Kernel`: what buffers, loops and instructions of a schedule imply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.tirx import PrimFunc

from blockscale.base.errors import LoweringError
from blockscale.base.formats import GEMM
from blockscale.lower.pipe.kernel import (
    Copy,
    Epilogue,
    Instruction,
    Kernel,
    MapDim,
    Multiply,
    Slot,
    Stage,
    Transfer,
)
from blockscale.lower.pipe.read import Operand, Reader, Site, box, substituted, var
from blockscale.lower.sites import function
from blockscale.specs.plans import ONCE, PREFIX
from blockscale.tir.common import i64

TILE_LOOP = {"cluster_x": 0, "cluster_y": 1, "acc_stages": 1, "raster": 0, "group": 1}
TILE_LOOP |= {"one_launch": 0}
"""Annotations of the innermost loop over tiles, and what holds without them (cluster_x: a pair)."""

K_LOOP = {"stages": 0, "split_k": 1}
"""Annotations of the loop over stages; stages must be there."""

STEP = {row.kind: row.step for row in GEMM.values()}
"""Elements of K of a kind of MMA."""

WORD, ATOM, SCALE_LANES = 4, 512, 32
"""Bytes of an element of scales' maps and of a 128x4 tile of scales; lanes of that tile."""


def derive(func: PrimFunc) -> Kernel:
    """Return the kernel of a scheduled `gemm_tiles`.

    LoweringError says which block or loop is not that of a tcgen05 GEMM.
    """
    return Derivation(Reader(func)).kernel()


class Derivation:
    """What is found on the way."""

    MMA, SCALES, READ = "tcgen05_mma_", "tcgen05_cp", "tcgen05_ld"
    """Instructions that multiply, bring scales to where MMAs read them, and sums to registers."""
    MOVES: tuple[str, ...] = (READ, "tma_store_2d")
    """Those of the epilogue that are not printed as its blocks are."""
    SUMS = "shared.tmem"
    """The memory of sums and of their scales."""
    ROWS, SHAPE = "bs_matrix_desc", "bs_instruction_desc"
    """What the MMA's call has of operands, and of its own shape and formats."""
    MADE: type[Kernel] = Kernel

    def __init__(self, reader: Reader) -> None:
        self.reader, self.at = reader, reader.at
        self.sites = reader.sites
        self.in_k = [site for site in self.sites if self._inside(site, reader.k_loop)]
        self.mma = self._one(self.MMA, "it multiplies")
        self.call = self.mma.call.args
        self.group = self._group()
        self.step = STEP[self.mma.what.removeprefix(self.MMA)]

    # ---- Finding ----------------------------------------------------------------------------

    @staticmethod
    def _inside(site: Site, loop: Any) -> bool:
        return any(each.same_as(loop) for each in site.outer)

    def _group(self) -> int:
        """CTAs that multiply together."""
        return self.mma.number

    def _one(self, what: str, why: str) -> Site:
        found = [site for site in self.sites if site.what.startswith(what)]
        if len(found) != 1:
            raise LoweringError(f"{len(found)} blocks call {what}*, not one; {why}")
        return found[0]

    def _operand(self, pointer: Any) -> Operand:
        """The operand of the MMA that an argument of its call points to."""
        return self.mma.operands[str(pointer.args[1].args[0].name)]

    def _writer(self, buffer: Any, what: str, reader: Site) -> Site:
        """The block that fills ``buffer`` by an instruction."""
        found = [site for site in self.sites if site.what and site.writes().same_as(buffer)]
        if len(found) != 1 or found[0].what != what:
            by = [site.what for site in found]
            raise LoweringError(
                f"{reader.where} reads {buffer.name}, which is filled by {by or 'no instruction'}, "
                f"not by one block that calls {what}"
            )
        if not self._inside(found[0], self.reader.k_loop):
            raise LoweringError(f"{found[0].where} is not inside of the loop over K")
        return found[0]

    def _scope(self, site: Site, operand: Operand, scope: str, rule: str) -> None:
        if operand.scope != scope:
            raise LoweringError(
                f"{site.where}: buffer {operand.buffer.name} has scope {operand.scope!r}, not "
                f"{scope!r}: {rule}"
            )

    def _annotated(self, loop: Any, known: Mapping[str, int], name: str) -> dict[str, int]:
        values = dict(known)
        for key, value in ((str(key), value) for key, value in loop.annotations.items()):
            decision = key.removeprefix(PREFIX)
            if not key.startswith(PREFIX) or decision not in known:
                raise LoweringError(
                    f"loop over {name}: annotation {key!r} is none of "
                    f"{[PREFIX + decision for decision in known]}"
                )
            values[decision] = int(value)
        return values

    # ---- The kernel -------------------------------------------------------------------------

    def kernel(self) -> Kernel:
        """Put all of it together."""
        loops, size = self.reader, self.reader.tile_size
        on_tiles = self._annotated(loops.tile_loop, TILE_LOOP, "tiles")
        on_k = self._annotated(loops.k_loop, K_LOOP, "K")
        if not on_k["stages"]:
            raise LoweringError(f"loop over K: annotation '{PREFIX}stages' is missing")
        if on_tiles["raster"] not in (0, 1):
            raise LoweringError(f"loop over tiles: raster={on_tiles['raster']} is neither 0 nor 1")
        acc, group = self._operand(self.call[1]), self.group
        self._scope(self.mma, acc, self.SUMS, "sums are where MMAs add to them")
        x_axis, y_axis = self._sides(acc)
        x, y = self._operand(self.call[2].args[1]), self._operand(self.call[3].args[1])
        sx, sy = self._operand(self.call[5]), self._operand(self.call[6])
        instruction = self._instruction(acc, x, y, group)
        loads = [self._load(operand, "tma_load_2d") for operand in (x, y)]
        copies = [self._writer(operand.buffer, self.SCALES, self.mma) for operand in (sx, sy)]
        for operand in (sx, sy):
            self._scope(self.mma, operand, self.SUMS, "scales are where MMAs read them")
        loads += [self._load(site.operands["S"], "tma_load_3d", site) for site in copies]
        for site in self._of_group(copies):
            self._expect(site, "CTA group", site.number, group)
        self._same_k(loads)
        slots = [self._columns(site) for site in copies]
        self._shapes(x, y, loads, instruction, group)
        shift = self._shift(sy, slots[1])
        if loops.simplify(self._shift(sx, slots[0])) != i64(0):
            raise LoweringError(f"{self.mma.where}: tiles of X do not begin with a tile of scales")
        whole, last, k_stages = self._stages(x, y, sx, sy, loads, copies, slots)
        epilogue = self._epilogue(acc, instruction, group)
        experts = next(
            (d.extent for v in loops.views.values() for d in v.dims if d.axis == "experts"), 0
        )
        self._expect_blocks(acc, epilogue)
        return self.MADE(
            at=self.at,
            views=loops.views,
            scalars=loops.scalars,
            optional=loops.optional,
            x_axis=x_axis,
            y_axis=y_axis,
            x_tile=size[x_axis],
            y_tile=size[y_axis],
            group=group,
            cluster_x=on_tiles["cluster_x"] or group,
            cluster_y=on_tiles["cluster_y"],
            split=on_k["split_k"],
            stages=on_k["stages"],
            acc_stages=on_tiles["acc_stages"],
            raster_x=on_tiles["raster"] == 0,
            band=on_tiles["group"],
            loads=tuple(loads),  # type: ignore[arg-type]
            sx=slots[0],
            sy=slots[1],
            sy_shift=shift,
            mma=instruction,
            whole=whole,
            last=last,
            k_stages=k_stages,
            stage_k=len(whole.multiplies) * self.step,
            epilogue=epilogue,
            experts=experts or 0,
            one_launch=on_tiles["one_launch"] == 1,
        )

    def _of_group(self, copies: Sequence[Site]) -> list[Site]:
        """Blocks whose instructions name the CTAs that multiply together."""
        return [*copies, *(s for s in self.in_k if s.what.startswith("tma_load"))]

    def _same_k(self, loads: Sequence[Transfer]) -> None:
        """All parameters have as many stages of K, and no more than the loop."""
        most = int(self.reader.k_loop.extent)
        counts = {
            load.view.name: -(-(load.view.dims[-1].extent or 0) // load.slot.shape[-1])
            for load in loads
            if load.view.dims[-1].axis == "k"
        }
        if len(set(counts.values())) != 1 or max(counts.values()) > most:
            raise LoweringError(f"loop over K: {most} stages, and the parameters have {counts}")

    def _expect(self, site: Site, what: str, found: Any, wanted: Any) -> None:
        if found != wanted:
            raise LoweringError(
                f"{site.where}: {what} is {found}, and the rest of the schedule implies {wanted}"
            )

    def _expect_blocks(self, acc: Operand, epilogue: Epilogue) -> None:
        """Every block is one that the kernel has."""
        known = {id(site) for site in (*self.in_k, *epilogue.sites)}
        for site in self.sites:
            if id(site) in known or site.what in self.MOVES:
                continue
            body = site.body
            zero = body is not None and isinstance(body.value, tirx.FloatImm)
            if body is None or not zero or float(body.value) or not body.buffer.same_as(acc.buffer):
                raise LoweringError(
                    f"{site.where} is neither in the loop over K nor in the epilogue, and does not "
                    "set the accumulator to zero"
                )
        for site in self.in_k:
            if site.what not in ("tma_load_2d", "tma_load_3d", self.SCALES, self.mma.what):
                raise LoweringError(
                    f"{site.where} is not tensorized: inside of the loop over K there are loads, "
                    "copies of scales and MMAs; map it onto an intrinsic of "
                    f"{self.reader.INTRINSICS}"
                )

    def _sides(self, acc: Operand) -> tuple[str, str]:
        """The axes on lanes and on columns of the accumulator."""
        found = []
        for index in acc.mins[-2:]:
            axes = [name for name, tile in self.at.tiles.items() if self._depends(index, tile)]
            if len(axes) != 1:
                raise LoweringError(
                    f"{self.mma.where}: index {index} of the accumulator is along {axes}, not "
                    "along rows or columns of d"
                )
            found += axes
        return found[0], found[1]

    def _depends(self, value: PrimExpr, variable: tirx.Var) -> bool:
        moved = [substituted(value, {variable: i64(number)}) for number in (0, 1, 7)]
        return any(not _same(self.reader.simplify(m - moved[0]), 0) for m in moved[1:])

    # ---- The MMA ----------------------------------------------------------------------------

    def _instruction(self, acc: Operand, x: Operand, y: Operand, group: int) -> Instruction:
        m, n, x_format, y_format, ue8m0 = self._shape_of()
        self._expect(self.mma, "shape of the accumulator", acc.shape[-2:], (m, n))
        self._expect(self.mma, "M of the MMA", m, 128 * group)
        self._expect(self.mma, "rows of X", x.shape[-2], m)
        self._expect(self.mma, "rows of Y", y.shape[-2], n)
        for operand in (x, y):
            self._scope(self.mma, operand, "shared.dyn", "operands are in shared memory")
        return Instruction(f"bs_{self.mma.what}", m, n, x_format, y_format, ue8m0)

    def _shape_of(self) -> list[int]:
        """M, N, formats of both operands, and whether scales are UE8M0."""
        desc = self.call[4]
        if function(desc) != self.SHAPE:
            raise LoweringError(f"{self.mma.where}: argument 4 is no {self.SHAPE}")
        return [int(arg) for arg in desc.args[1:6]]

    # ---- Slots and loads --------------------------------------------------------------------

    def _slot(self, site: Site, operand: Operand) -> tuple[tuple[PrimExpr, ...], tuple[int, ...]]:
        """First element and extents of what ``site`` writes in one stage and CTA."""
        zero = {loop.var: i64(0) for loop in site.loops}
        base = tuple(self._at(index, zero) for index in operand.mins)
        points = list(_points(site))
        parts = [
            {self._number(self._at(index, point) - first, site) for point in points}
            for index, first in zip(operand.mins, base, strict=True)
        ]
        return base, box(site, operand, parts, len(points))

    @staticmethod
    def _at(value: PrimExpr, point: Mapping[tirx.Var, Any]) -> PrimExpr:
        by = {v: n if not isinstance(n, int) else i64(n) for v, n in point.items()}
        return substituted(value, by) if by else value

    def _number(self, value: PrimExpr, site: Site) -> int:
        made = self.reader.simplify(value)
        if not isinstance(made, tirx.IntImm):
            raise LoweringError(f"{site.where}: an offset inside of a stage is {made}, no number")
        return int(made)

    def _load(self, read: Operand, what: str, reader: Site | None = None) -> Transfer:
        """The load that fills the buffer of ``read``."""
        site = self._writer(read.buffer, what, reader or self.mma)
        source, target = site.operands["S"], site.operands["D"]
        self._scope(site, target, "shared.dyn", "loads are to shared memory")
        base, shape = self._slot(site, target)
        wide = what == "tma_load_2d"
        row_bytes = int(site.call.args[3]) if wide else 0
        held = shape[-2] * row_bytes if wide else shape[-1] * shape[-2]
        name = read.buffer.name
        slot = Slot(str(name), base, shape, row_bytes, held)
        view = self._source(site, source)
        spread = wide and row_bytes == 2 * shape[-1]
        if wide and row_bytes != shape[-1] and not spread:
            raise LoweringError(f"{site.where}: {shape[-1]} bytes do not make rows of {row_bytes}")
        zero = {loop.var: i64(0) for loop in site.loops}
        first = view.index([self._at(index, zero) for index in source.mins])
        packed = spread and bool((view.dims[-1].extent or 0) % 64)
        dims = self._dims(view, first, shape, "rows" if wide else "scales", spread and not packed)
        dtype = "16U4_ALIGN16B" if spread and not packed else "UINT8" if wide else "UINT32"
        return Transfer(
            view=view,
            dtype=dtype,
            dims=dims,
            swizzle=0 if packed else row_bytes,
            slot=slot,
            along_x=any(self._depends(index, self.at.tiles[self._x]) for index in source.mins),
            along_y=any(self._depends(index, self.at.tiles[self._y]) for index in source.mins),
            along_pair="cta" in site.bound or self.group == 1,
            once=ONCE in site.annotations,
            packed=packed,
        )

    @property
    def _x(self) -> str:
        return self._sides(self._operand(self.call[1]))[0]

    @property
    def _y(self) -> str:
        return self._sides(self._operand(self.call[1]))[1]

    def _source(self, site: Site, source: Operand) -> Any:
        view = self.reader.views.get(str(source.buffer.name))
        if view is None:
            raise LoweringError(f"{site.where}: source {source.buffer.name} is no parameter")
        return view

    def _dims(
        self,
        view: Any,
        first: Sequence[PrimExpr],
        shape: Sequence[int],
        kind: str,
        halves: bool,
    ) -> tuple[MapDim, ...]:
        """Dimensions of a tensor map, innermost first; outer dimensions are one of rows.

        ``halves``: elements of the map are half of a byte.
        """
        *outer, inner = zip(view.dims, first, strict=True)
        row: PrimExpr = outer[0][1]
        extent = outer[0][0].extent
        for dim, index in outer[1:]:
            row = row * i64(dim.extent) + index
            extent = None if extent is None else extent * dim.extent
        axis, unit = outer[-1][0].axis, outer[-1][0].unit
        pitch = inner[0].extent * view.item
        rows = MapDim(extent, axis, unit, pitch, shape[-2], self.reader.simplify(row))
        if kind == "scales":
            along = inner[0].extent // ATOM
            atom = MapDim(
                along, "k", 1, ATOM, shape[-1] // ATOM,
                self.reader.simplify(tirx.floordiv(inner[1], i64(ATOM))),
            )  # fmt: skip
            return MapDim(ATOM // WORD, "", 1, 0, ATOM // WORD, i64(0)), atom, rows
        times = 2 if halves else 1
        at = self.reader.simplify(inner[1] * i64(times))
        return MapDim(inner[0].extent * times, "k", 1, 0, shape[-1] * times, at), rows

    def _columns(self, site: Site) -> Slot:
        """The slot of scales in tensor memory: 32 lanes of the buffer are four bytes a column."""
        target = site.operands["D"]
        base, shape = self._slot(site, target)
        columns = shape[-2] // SCALE_LANES * (shape[-1] // WORD)
        return Slot(str(target.buffer.name), base, shape, columns=columns)

    def _offset(
        self, site: Site, operand: Operand, slot: Slot, point: Mapping[Any, int]
    ) -> list[PrimExpr]:
        """Where ``operand`` begins in its slot, by dimension.

        What one instruction reads of both CTAs of a pair begins where the first CTA's part does.
        """
        made = []
        for index, base in zip(operand.mins, slot.base, strict=True):
            offset = self.reader.simplify(self._at(index, point) - base)
            if self._depends(offset, self.at.cta):
                offset = self.reader.simplify(
                    self._at(index, point) - substituted(base, {self.at.cta: i64(0)})
                )
            made.append(offset)
        return made

    def _shift(self, operand: Operand, slot: Slot) -> PrimExpr:
        """Column of its slot at which a tile's scales begin."""
        first = next(_points(self.mma))
        shift = self._offset(self.mma, operand, slot, first)[-1]
        return self.reader.simplify(tirx.floordiv(shift, i64(WORD)))

    def _shapes(
        self, x: Operand, y: Operand, loads: Sequence[Transfer], made: Instruction, group: int
    ) -> None:
        """Operands are what was loaded, in the layout that descriptors name."""
        for operand, load, number, rows in (
            (x, loads[0], 2, made.m // group),
            (y, loads[1], 3, made.n // group),
        ):
            matrix = function(self.call[number])
            wanted = f"{self.ROWS}<{load.slot.row_bytes}>"
            self._expect(self.mma, f"matrix of {operand.buffer.name}", matrix, wanted)
            name = f"tile of {operand.buffer.name}"
            self._expect(self.mma, name, load.slot.shape[-2], rows)

    # ---- Stages -----------------------------------------------------------------------------

    def _stages(
        self,
        x: Operand,
        y: Operand,
        sx: Operand,
        sy: Operand,
        loads: Sequence[Transfer],
        copies: Sequence[Site],
        slots: Sequence[Slot],
    ) -> tuple[Stage, Stage | None, int]:
        """What is issued for a whole stage and for the last one, and how many there are."""
        extent = loads[0].view.dims[-1].extent or 0
        padded = int(self.reader.k_loop.extent)
        steps: list[tuple[Multiply, PrimExpr]] = []
        for point in _points(self.mma):
            numbers = {}
            for key, operand, load in (("x", x, loads[0]), ("y", y, loads[1])):
                row, byte = self._offset(self.mma, operand, load.slot, point)[-2:]
                wide = load.slot.row_bytes // load.slot.shape[-1]
                at = self._number(row, self.mma) * load.slot.row_bytes
                numbers[key] = at + self._number(byte, self.mma) * wide
            for key, operand, slot in (("x", sx, slots[0]), ("y", sy, slots[1])):
                lane, byte = self._offset(self.mma, operand, slot, point)[-2:]
                own = self._number(byte - self._first_byte(operand, slot), self.mma)
                column = self._number(lane, self.mma) // SCALE_LANES * (slot.shape[-1] // WORD)
                numbers[f"s{key}"] = column + own // WORD
                numbers[f"{key}_byte"] = own % WORD
            steps.append((Multiply(**numbers), self._at(x.mins[-1], point)))
        moved: list[tuple[int, Copy]] = []
        for side, site, slot, load in (
            ("x", copies[0], slots[0], loads[2]),
            ("y", copies[1], slots[1], loads[3]),
        ):
            for point in _points(site):
                source, target = site.operands["S"], site.operands["D"]
                row, byte = self._offset(site, source, load.slot, point)[-2:]
                at = self._number(row, site) * load.slot.shape[-1] + self._number(byte, site)
                lane, column = self._offset(site, target, slot, point)[-2:]
                place = self._number(lane, site) // SCALE_LANES * (slot.shape[-1] // WORD)
                line = self._number(lane, site)
                moved.append((line, Copy(side, at, place + self._number(column, site) // WORD)))
        self._order(copies)
        # They are independent; those of the first MMAs go first.
        brought = [copy for _, copy in sorted(moved, key=lambda pair: pair[0])]

        def real(stage: int) -> list[Multiply]:
            at = {self.at.k: i64(stage)}
            return [
                step for step, k in steps if self._number(substituted(k, at), self.mma) < extent
            ]

        counts = [len(real(stage)) for stage in range(padded)]
        k_stages = sum(count > 0 for count in counts)
        whole = Stage(tuple(brought), tuple(step for step, _ in steps))
        if any(count != len(steps) for count in counts[: k_stages - 1]) or not k_stages:
            raise LoweringError(
                f"loop over K: stages do {counts} MMAs inside of K; only the last may be partial"
            )
        if counts[k_stages - 1] == len(steps):
            return whole, None, k_stages
        kept = real(k_stages - 1)
        needed = {"x": {s.sx for s in kept}, "y": {s.sy for s in kept}}
        lines = {
            side: {c // self._line(slot) for c in needed[side]}
            for side, slot in zip("xy", slots, strict=True)
        }
        some = [
            c for c in brought if c.column // self._line(slots["xy".index(c.side)]) in lines[c.side]
        ]
        return whole, Stage(tuple(some), tuple(kept)), k_stages

    @staticmethod
    def _line(slot: Slot) -> int:
        """Columns of the scales of 4 blocks along K."""
        return slot.shape[-1] // WORD

    def _first_byte(self, operand: Operand, slot: Slot) -> PrimExpr:
        return self._shift(operand, slot) * i64(WORD)

    def _order(self, copies: Sequence[Site]) -> None:
        """Copies stand before the MMAs that read what they bring."""
        at = {id(site): number for number, site in enumerate(self.sites)}
        for site in copies:
            if at[id(site)] > at[id(self.mma)]:
                raise LoweringError(f"{site.where} stands behind {self.mma.where}, which needs it")

    # ---- The epilogue -----------------------------------------------------------------------

    def _epilogue(self, acc: Operand, made: Instruction, group: int) -> Epilogue:
        reads = self._reads(acc)
        source, target = reads.operands["S"], reads.operands["D"]
        self._scope(reads, target, "local", "the accumulator is read to registers")
        self._expect(reads, "columns of a read", source.shape[-1], reads.number)
        after = [site for site in self.sites if self._behind(site)]
        chunk_loop = self._chunk_loop(after)
        chunk = var("chunk")
        chunks = int(chunk_loop.extent) if chunk_loop is not None else 1
        sites = []
        for site in after:
            if chunk_loop is not None:
                self._rename(site, chunk_loop.loop_var, chunk)
            if site.what not in self.MOVES:
                sites.append(site)
        parts = sorted(
            self._number(
                self._at(reads.operands["D"].mins[-1], p)
                - self._at(reads.operands["D"].mins[-1], dict.fromkeys(p, 0)),
                reads,
            )
            for p in _points(reads)
        )
        if parts != [reads.number * i for i in range(len(parts))]:
            raise LoweringError(f"{reads.where}: columns begin at {parts}, which do not adjoin")
        columns = reads.number * len(parts)
        self._expect(reads, "columns of the accumulator", chunks * columns, made.n)
        stores = {}
        for site in after:
            if site.what == "tma_store_2d":
                stores[str(site.operands["S"].buffer.name)] = self._store(site)
        zero = {loop.var: i64(0) for loop in reads.loops}
        base = tuple(self._at(index, zero) for index in reads.operands["D"].mins)
        name = str(target.buffer.name)
        return Epilogue(chunk, chunks, columns, reads.number, tuple(sites), name, base, stores)

    def _reads(self, acc: Operand) -> Site:
        """The block that brings sums to registers."""
        reads = self._one(self.READ, "the accumulator is read by it")
        self._expect_source(reads, acc.buffer)
        return reads

    def _expect_source(self, site: Site, buffer: Any) -> None:
        source = site.operands["S"].buffer
        if not source.same_as(buffer):
            self._expect(site, "source", source.name, buffer.name)

    def _behind(self, site: Site) -> bool:
        """Whether a block is in the epilogue: in the loops over tiles, with lanes or warps."""
        return not self._inside(site, self.reader.k_loop) and "warp" in site.bound

    def _chunk_loop(self, after: Sequence[Site]) -> Any:
        """The loop over parts of a tile: the only free one around all of the epilogue."""
        tiles = self.reader.tile_loops
        common = [loop for loop in after[0].outer if not any(loop.same_as(t) for t in tiles)]
        for site in after[1:]:
            common = [loop for loop in common if self._inside(site, loop)]
        free = [loop for loop in common if loop.thread_binding is None]
        many = [loop for loop in free if int(loop.extent) > 1] or free[:1]
        if len(many) > 1:
            raise LoweringError(
                f"the epilogue is inside of {len(many)} loops of a tile, not of one over its parts"
            )
        return many[0] if many else None

    def _rename(self, site: Site, old: tirx.Var, new: tirx.Var) -> None:
        """Let ``new`` be the number of the part in all of a block's expressions."""
        by = {old: new}
        site.loops = tuple(loop for loop in site.loops if not loop.var.same_as(old))
        site.operands = {
            name: replace(o, mins=tuple(substituted(m, by) for m in o.mins))
            for name, o in site.operands.items()
        }
        if site.body is not None:
            indices = tuple(substituted(index, by) for index in site.body.indices)
            site.body = site.body._replace(indices=indices, value=substituted(site.body.value, by))
        elif site.call is not None:
            site.call = substituted(site.call, by)

    def _store(self, site: Site) -> Transfer:
        """A store by TMA of what a warp has staged."""
        source, target = site.operands["S"], site.operands["D"]
        self._scope(site, source, "shared.dyn", "stores are from shared memory")
        view = self._source(site, target)
        if site.loops:
            raise LoweringError(f"{site.where}: a warp stores once a part of the tile")
        shape = source.shape
        swap = self._y == "rows"
        span = shape[-1] * view.item
        held = shape[-2] * span
        slot = Slot(str(source.buffer.name), source.mins, shape, 0 if swap else span, held)
        first = [self.reader.simplify(index) for index in view.index(target.mins)]
        dims = (
            MapDim(view.dims[-1].extent, view.dims[-1].axis, 1, 0, shape[-1], first[-1]),
            MapDim(None, "rows", 1, (view.dims[-1].extent or 0) * view.item, shape[-2], first[-2]),
        )
        swizzle = 0 if swap else span
        return Transfer(view, view.dtype.upper(), dims, swizzle, slot, target=target.mins)


def _points(site: Site) -> Any:
    return site.points()


def _same(value: PrimExpr, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number
