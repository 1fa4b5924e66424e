"""What a scheduled function says: its blocks, in the coordinates of the tile that a CTA computes.

Every block's iterators are replaced by loops, loops over tiles by the number of the tile along each
axis, loops bound to threads by `Coordinates`; so an operand's place is an expression in those, the
stage of K, and the loops that remain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.sym import Analyzer
from tvm.tirx import IndexMap, PrimFunc
from tvm.tirx.buffer import BufferType

from blockscale.base.errors import LoweringError
from blockscale.lower.sites import called, constant, function
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import OPTIONAL, PARAMS

BOUND = {
    "clusterCtaIdx.x": "cta",
    "threadIdx.z": "slice",
    "threadIdx.y": "warp",
    "threadIdx.x": "lane",
}
"""Threads that loops are bound to, and the coordinate that each is."""


def var(name: str) -> tirx.Var:
    """A new 64-bit integer."""
    return tirx.Var(name, "int64")


class Dim(NamedTuple):
    """One dimension of a parameter as it lies in memory: some neighbouring ones of its TensorIR."""

    axis: str
    """ "rows", "cols", "k", "experts", or "" """
    unit: int
    """Elements of the axis that an index stands for: 128 for tiles of scales."""
    extent: int | None
    """The true number of indices; None: known when the kernel runs."""
    merged: int
    """Dimensions of the TensorIR that it is."""


@dataclass(frozen=True)
class View:
    """A parameter's true shape, outermost dimension first."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    shape: tuple[PrimExpr, ...]
    """Of the TensorIR, padded."""

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return int(re.sub(r"\D", "", self.dtype) or 8) // 8

    def index(self, mins: Sequence[PrimExpr]) -> tuple[PrimExpr, ...]:
        """Indices of the true dimensions of an element of the TensorIR."""
        found, at = [], 0
        for dim in self.dims:
            value: PrimExpr = i64(0)
            for number in range(at, at + dim.merged):
                value = mins[number] if number == at else value * self.shape[number] + mins[number]
            found.append(value)
            at += dim.merged
        return tuple(found)

    @property
    def pitches(self) -> tuple[int, ...]:
        """Elements from an index of each dimension to the next one."""
        made = [1]
        for dim in self.dims[:0:-1]:
            if dim.extent is None:
                raise LoweringError(
                    f"{self.name}: only its first dimension may be known at run time"
                )
            made.append(made[-1] * dim.extent)
        return tuple(made[::-1])


@dataclass(frozen=True)
class Operand:
    """A part of a buffer: where it begins, and its shape in the buffer's dimensions."""

    name: str
    buffer: Any
    mins: tuple[PrimExpr, ...]
    shape: tuple[int, ...]
    match: Any = None
    """The block's own name for it."""

    @property
    def scope(self) -> str:
        """The buffer's memory."""
        return str(self.buffer.scope())


@dataclass(frozen=True)
class Loop:
    """A loop inside of a tile that no coordinate stands for."""

    var: tirx.Var
    extent: int


class Raw(NamedTuple):
    """A block as it stands in the function."""

    block: Any
    loops: tuple[Any, ...]
    values: Mapping[Any, PrimExpr]
    """Of the iterators of the block and of those around it."""
    matched: tuple[Any, ...]
    """Parts of buffers that it and those around it have names for."""


class Store(NamedTuple):
    """An assignment to an element of a buffer."""

    buffer: Any
    indices: tuple[PrimExpr, ...]
    value: PrimExpr


@dataclass(eq=False)
class Site:
    """A block."""

    name: str
    block: Any
    outer: tuple[Any, ...]
    """For nodes around it, outermost first."""
    loops: tuple[Loop, ...]
    """Those of `outer` that are neither tiles, stages nor coordinates."""
    bound: tuple[str, ...]
    """Coordinates that its loops are bound to."""
    what: str = ""
    """The instruction that it calls; empty: a plain block."""
    number: int = 0
    """The instruction's template argument."""
    call: Any = None
    operands: dict[str, Operand] = field(default_factory=dict)
    """By the name of the intrinsic's buffer."""
    body: Store | None = None
    """A plain block's."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"block '{self.name}'"

    def writes(self) -> Any:
        """The buffer that it writes."""
        return self.block.writes[0].source

    def element(self, buffer: Any, indices: Sequence[PrimExpr]) -> tuple[Any, tuple[PrimExpr, ...]]:
        """The buffer and the indices of an element that may be one of a named part."""
        for operand in self.operands.values():
            if operand.match is not None and operand.match.same_as(buffer):
                skip = len(operand.mins) - len(indices)
                inner = (*(i64(0) for _ in range(skip)), *indices)
                places = zip(operand.mins, inner, strict=True)
                return operand.buffer, tuple(first + index for first, index in places)
        return buffer, tuple(indices)

    def points(self) -> Iterator[dict[tirx.Var, int]]:
        """Yield the values of its loops, in their order."""
        for values in product(*(range(loop.extent) for loop in self.loops)):
            yield {loop.var: value for loop, value in zip(self.loops, values, strict=True)}

    @property
    def annotations(self) -> dict[str, Any]:
        """Of the block."""
        return {str(key): value for key, value in self.block.annotations.items()}


class Coordinates:
    """What expressions are in: the tile along each axis, CTA, stage, slice of it, warp, lane."""

    def __init__(self) -> None:
        self.tiles = {"rows": var("row_tile"), "cols": var("col_tile")}
        self.cta, self.warp, self.lane = var("cta"), var("warp"), var("lane")
        self.k, self.slice = var("k"), var("slice")

    @property
    def all(self) -> tuple[tirx.Var, ...]:
        """All of them."""
        return (*self.tiles.values(), self.cta, self.k, self.slice, self.warp, self.lane)


class Reader:
    """A scheduled function.

    Attributes:
        views: true shapes of the parameters, by name.
        scalars: parameters that are numbers.
        optional: what stands for a parameter that is null, by name.
        at: the coordinates.
        tile_size: rows and columns of d of a tile, by axis.
        sites: all blocks with something to do.
        placed: what loops over tiles are, in coordinates.
        tile_loop, k_loop: the innermost loop over tiles, and that over stages of K.
    """

    MMA = "_mma_"
    """What is in the names of instructions that multiply."""
    LOADS: tuple[str, ...] = ("tma_load_2d",)
    """Names of those that load an operand."""
    TILE_THREADS: tuple[str, ...] = ()
    """What loops over tiles may be bound to: CTAs of a cluster with tiles of their own."""
    INTRINSICS = "blockscale.tir.intrin.tcgen05"

    at: Coordinates

    def __init__(self, func: PrimFunc) -> None:
        attrs = func.attrs or {}
        if PARAMS not in attrs:
            raise LoweringError(
                f"function without the attribute {PARAMS!r}: it is no GEMM of gemm_tiles"
            )
        self.func, self.at = func, self.coordinates()
        given = {str(param.name): param.ty for param in func.params}
        self.scalars = tuple(p for p in func.params if not isinstance(p.ty, BufferType))
        shapes = {str(name): dims for name, dims in attrs[PARAMS].items()}
        ordered = sorted(shapes, key=[*given].index) if shapes.keys() <= given.keys() else shapes
        self.views = {name: self._view(name, given, shapes[name]) for name in ordered}
        self.optional = {str(k): float(v) for k, v in attrs.get(OPTIONAL, {}).items()}
        self.analyzer = Analyzer()
        raw = list(_blocks(func.body))
        self.tile_loops, self.k_loop = self._loops(raw)
        self.placed: dict[tirx.Var, PrimExpr] = {}
        self.tile_size = self._axes(raw)
        self.sites = [self._site(each) for each in raw]

    @staticmethod
    def coordinates() -> Coordinates:
        """Return what expressions are to be in."""
        return Coordinates()

    @staticmethod
    def _view(name: str, given: Mapping[str, Any], dims: Any) -> View:
        if name not in given:
            raise LoweringError(f"attribute {PARAMS!r} names {name!r}, which is no parameter")
        buffer = given[name]
        made = []
        for axis, unit, extent, count in dims:
            made.append(
                Dim(str(axis), int(unit), None if int(extent) < 0 else int(extent), int(count))
            )
        if sum(dim.merged for dim in made) != len(buffer.shape):
            raise LoweringError(
                f"attribute {PARAMS!r}: {name} has {len(buffer.shape)} dimensions, and "
                f"{sum(dim.merged for dim in made)} are described"
            )
        return View(name, str(buffer.dtype), tuple(made), tuple(buffer.shape))

    @property
    def tile_loop(self) -> Any:
        """The innermost loop over tiles."""
        return self.tile_loops[-1]

    # ---- Loops ------------------------------------------------------------------------------

    def _loops(self, raw: Sequence[Raw]) -> tuple[list[Any], Any]:
        """The loops over tiles, and that over stages: those that loads and MMAs have in common."""
        mma = [r.loops for r in raw if self.MMA in called(r.block.body)[0]]
        load = [r.loops for r in raw if called(r.block.body)[0] in self.LOADS]
        if not mma:
            sums = [str(r.block.name_hint) for r in raw if _accumulates(r.block)]
            raise LoweringError(
                f"no block issues MMAs: {', '.join(f'block {n!r}' for n in sums) or 'none'} is not "
                f"tensorized; map its loops onto an intrinsic of {self.INTRINSICS}"
            )
        if not load:
            names = " or ".join(self.LOADS)
            raise LoweringError(f"no block calls {names}, as loads of operands do")
        common = [a for a, b in zip(mma[0], load[0], strict=False) if a.same_as(b)]
        if len(common) < 2:
            raise LoweringError(
                f"loads and MMAs are inside of {len(common)} common loops; they have loops over "
                "tiles and one over stages of K around them"
            )
        known = (None, *self.TILE_THREADS)
        return [loop for loop in common[:-1] if thread_of(loop) in known], common[-1]

    def _axes(self, raw: Sequence[Raw]) -> dict[str, int]:
        """Find which axis each loop over tiles runs along; return the sizes of tiles.

        Rows of a and of b are loaded as rows and columns of the product.
        """
        sizes: dict[str, int] = {}
        for each in raw:
            if called(each.block.body)[0] != "tma_load_2d":
                continue
            source = each.block.match_buffers[0].source
            view = self.views.get(str(source.source.name))
            if view is None:
                raise LoweringError(
                    f"block '{each.block.name_hint}' loads {source.source.name}, no parameter"
                )
            mins = [substituted(r.min, each.values) for r in source.region]
            for dim, index in zip(view.dims, view.index(mins), strict=True):
                if dim.axis in self.at.tiles:
                    sizes |= self._steps(dim, index)
        unknown = [
            str(loop.loop_var.name)
            for loop in self.tile_loops
            if loop.loop_var not in self.placed and not _once(loop)
        ]
        if unknown or len(sizes) != 2:
            raise LoweringError(
                f"loops over tiles: {unknown} do not make tiles of rows of a and of b"
            )
        return sizes

    def _steps(self, dim: Dim, index: PrimExpr) -> dict[str, int]:
        """Let the loops over tiles that ``index`` grows with be those along its axis."""
        variable = self.at.tiles[dim.axis]
        steps = []
        for loop in self.tile_loops:
            step = self.step(index, loop.loop_var)
            if step:
                steps.append((step * dim.unit, loop))
        steps.sort(key=lambda pair: -pair[0])
        left: PrimExpr = variable
        for (big, outer), (small, inner) in pairwise(steps):
            count = constant(inner.extent, f"loop {inner.loop_var.name}")
            if big != small * count:
                raise LoweringError(
                    f"loops {outer.loop_var.name} and {inner.loop_var.name} over tiles step by "
                    f"{big} and {small} {dim.axis}, and the inner one runs {count} times"
                )
            self.placed[outer.loop_var] = tirx.floordiv(left, i64(count))
            left = tirx.floormod(left, i64(count))
        if not steps:
            return {}
        self.placed[steps[-1][1].loop_var] = left
        return {dim.axis: steps[-1][0]}

    def step(self, index: PrimExpr, variable: tirx.Var) -> int:
        """By how much an index grows with a loop."""
        grown = substituted(index, {variable: variable + i64(1)})
        step = self.simplify(grown - index)
        return int(step) if isinstance(step, tirx.IntImm) else 0

    def simplify(self, value: PrimExpr) -> PrimExpr:
        """Return a shorter form."""
        return self.analyzer.simplify(value)

    # ---- Blocks -----------------------------------------------------------------------------

    def _site(self, raw: Raw) -> Site:
        block, loops, values, matched = raw
        name = str(block.name_hint)
        replaced: dict[Any, PrimExpr] = dict(self.placed)
        free, bound = [], []
        for loop in loops:
            if loop.loop_var in replaced:
                continue
            if any(loop.same_as(tile) for tile in self.tile_loops):  # of one iteration
                replaced[loop.loop_var] = i64(0)
                continue
            if loop.same_as(self.k_loop):
                replaced[loop.loop_var] = self.at.k
                continue
            extent = constant(loop.extent, f"block '{name}'")
            thread = loop.thread_binding
            if thread is None:
                free.append(Loop(loop.loop_var, extent))
                continue
            tag = str(thread.thread_tag)
            if tag not in BOUND:
                raise LoweringError(f"block '{name}': a loop is bound to {tag}, not {list(BOUND)}")
            bound.append(BOUND[tag])
            replaced[loop.loop_var] = getattr(self.at, BOUND[tag]) if extent > 1 else i64(0)
        settled = {v: substituted(value, replaced) for v, value in values.items()} | replaced
        what, number = called(block.body)
        if type(block.body).__name__ == "Evaluate":
            what = what or function(block.body.value)
        site = Site(name, block, loops, tuple(free), tuple(bound), what, number)
        for match in matched:
            region = match.source
            mins = tuple(self.simplify(substituted(r.min, settled)) for r in region.region)
            shape = tuple(constant(r.extent, site.where) for r in region.region)
            key = str(match.buffer.name)
            site.operands[key] = Operand(key, region.source, mins, shape, match.buffer)
        if what:
            site.call = block.body.value
        else:
            site.body = self._store(site, block.body, settled)
        return site

    @staticmethod
    def _store(site: Site, stmt: Any, settled: Mapping[Any, PrimExpr]) -> Store:
        if type(stmt).__name__ != "BufferStore" or site.block.init is not None:
            raise LoweringError(
                f"{site.where} is no single assignment; decompose reductions, and tensorize what "
                "an instruction does"
            )
        indices = tuple(substituted(index, settled) for index in stmt.indices)
        buffer, indices = site.element(stmt.buffer, indices)
        return Store(buffer, indices, substituted(stmt.value, settled))


def box(site: Site, operand: Operand, parts: Sequence[set[int]], count: int) -> tuple[int, ...]:
    """Return the extents of what ``count`` runs of a block's instruction fill in a stage.

    ``parts``: along each axis, where they begin, counted from the first.

    Raises:
        LoweringError: they do not adjoin, or leave out a part of the box.
    """
    extents = []
    for size, offsets in zip(operand.shape, parts, strict=True):
        if sorted(offsets) != [size * i for i in range(len(offsets))]:
            raise LoweringError(
                f"{site.where}: parts of {operand.buffer.name} begin at {sorted(offsets)}, "
                f"each {size} long; one stage's must adjoin"
            )
        extents.append(size * len(offsets))
    if prod(len(offsets) for offsets in parts) != count:
        raise LoweringError(f"{site.where}: its loops do not fill a box of {extents}")
    return tuple(extents)


def _accumulates(block: Any) -> bool:
    """Whether a block adds to what it writes."""
    written = [region.source for region in block.writes]
    reads = (region.source for region in block.reads)
    return block.init is not None or any(r.same_as(w) for r in reads for w in written)


def thread_of(loop: Any) -> str | None:
    """What a loop is bound to."""
    bound = loop.thread_binding
    return None if bound is None else str(bound.thread_tag)


def _once(loop: Any) -> bool:
    return isinstance(loop.extent, tirx.IntImm) and int(loop.extent) == 1


def substituted(value: PrimExpr, by: Mapping[Any, PrimExpr]) -> PrimExpr:
    """Return ``value`` with variables replaced, simplified."""
    if not by:
        return value
    (made,) = IndexMap(list(by), [value], None).map_indices(list(by.values()))
    return made


def _blocks(
    stmt: Any,
    loops: tuple[Any, ...] = (),
    outer: Mapping[Any, PrimExpr] = MappingProxyType({}),
    matched: tuple[Any, ...] = (),
) -> Iterator[Raw]:
    """Yield every innermost block with the loops around it and the values of iterators.

    ``outer``: values of the iterators of blocks around it, and ``matched``: their parts of buffers.
    """
    kind = type(stmt).__name__
    if kind == "For":
        yield from _blocks(stmt.body, (*loops, stmt), outer, matched)
    elif kind == "SeqStmt":
        for part in stmt.seq:
            yield from _blocks(part, loops, outer, matched)
    elif kind == "SBlockRealize":
        block = stmt.block
        if not isinstance(stmt.predicate, tirx.IntImm) or not int(stmt.predicate):
            raise LoweringError(
                f"block '{block.name_hint}' has the predicate {stmt.predicate}; tiles are whole, "
                "so split loops without a remainder"
            )
        values = {v.var: value for v, value in zip(block.iter_vars, stmt.iter_values, strict=True)}
        values = {v: substituted(value, outer) for v, value in values.items()} | dict(outer)
        if type(block.body).__name__ in ("BufferStore", "Evaluate"):
            yield Raw(block, loops, values, (*matched, *block.match_buffers))
        else:
            yield from _blocks(block.body, loops, values, (*matched, *block.match_buffers))
    elif kind not in ("BufferStore", "Evaluate"):
        raise LoweringError(
            f"a {kind} inside of {len(loops)} loops: only loops, blocks and tensor intrinsics are "
            "lowered; schedule without it"
        )
