"""What a thread of the storing warps has of a tile, and what it loads: elements as text.

Thread i of warp w has lane 32 w + i of tensor memory; columns of the accumulator are its registers.
A buffer in registers is indexed by what its indices have beyond the first element that the warp
has: the lane, which must be the thread's own, and numbers of registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.sym import Analyzer

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.kernel import Kernel
from blockscale.lower.pipe.read import Site, View, substituted
from blockscale.lower.pipe.text import Text, dtype, indented, kind, number, variables
from blockscale.lower.pipe.tile import Tile
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import EXPERT, ROW_TILE, ROWS

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int32": 4}
"""Bytes of an element."""

CLASS = {"bfloat16": "BsBf16", "float16": "BsF16"}
"""Device classes of 16-bit numbers, which lie in words of two."""

_LOCAL = {"float32": "float", "int32": "int", "uint8": "alignas(16) uint8_t"}
_LOCAL |= dict.fromkeys(CLASS, "alignas(16) uint16_t")


class Fragment(NamedTuple):
    """A buffer in registers: its first element, and the registers of each dimension."""

    base: tuple[PrimExpr, ...]
    shape: tuple[int, ...]

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return prod(self.shape)


class Elements:
    """Text of elements in one kernel's epilogue.

    Attributes:
        fragments: buffers in registers, by name.
        tile_level, chunk_level: what is loaded ahead of a tile's parts, and of one part.
        values: what has been loaded, by a key of its place.
        around: loops that several blocks share, and their names.
    """

    def __init__(self, kernel: Kernel, tile: Tile) -> None:
        self.kernel, self.tile, self.epilogue = kernel, tile, kernel.epilogue
        self.lane, self.chunk = kernel.at.lane, kernel.epilogue.chunk
        self.analyzer = Analyzer()
        shape = (1,) * (len(self.epilogue.acc_base) - 1) + (self.epilogue.columns,)
        self.fragments = {self.epilogue.acc: Fragment(self.epilogue.acc_base, shape)}
        self.tile_level: list[str] = []
        self.chunk_level: list[str] = []
        self.values: dict[str, str] = {}
        self.around: dict[Any, str] = {}

    # ---- The accumulator --------------------------------------------------------------------

    def _sum(self, place: str) -> str:
        """A register of the accumulator as float32."""
        return f"__uint_as_float(acc[{place}])"

    def _extents(self) -> list[str]:
        """How much of d there is from this warp's first lane and first column on."""
        k = self.kernel
        pair = " + cta * 128" if k.group == 2 else ""
        own = {"rows": "row_tile", "cols": "col_tile"}
        limit = {"rows": "rows", "cols": str(k.cols)}
        first = f"{own[k.x_axis]} * {k.x_tile}{pair} + warp * 32"
        padded = f"const int x_padded = (({limit[k.x_axis]} + 127) & ~127) - ({first});"
        return [
            f"const int x_left = {limit[k.x_axis]} - ({first});",
            *([padded] if self.pads else []),
            f"const int y_left = {limit[k.y_axis]} - {own[k.y_axis]} * {k.y_tile};",
        ]

    def _read(self, place: str, left: str) -> list[str]:
        """The accumulator's columns to registers; no more than the MMA has written."""
        e = self.epilogue
        lines = []
        for at in range(0, e.columns, e.width):
            guard = f"if ({at} < {left}) " if self.kernel.swap else ""
            lines.append(f"{guard}bs_tcgen05_ld<{e.width}>(acc + {at}, {place} + {at});")
        return [*lines, "bs_tcgen05_wait_ld();"]

    # ---- Registers --------------------------------------------------------------------------

    def _declare(self, site: Site, buffer: Any, indices: Sequence[PrimExpr]) -> list[str]:
        """The array of a buffer that is written for the first time.

        One of a thread has the buffer's shape, one of the tile the part that a thread has of it.
        """
        name = str(buffer.name)
        if name in self.fragments:
            return []
        whole = [int(n) if isinstance(n, tirx.IntImm) else 0 for n in buffer.shape]
        tiled = {*self.tile.names} - {loop.var for loop in site.loops}
        if any(v in tiled for index in indices for v in variables(index)):
            base, shape = self._part(site, indices)
        else:
            base, shape = tuple(i64(0) for _ in whole), tuple(whole)
        self.fragments[name] = Fragment(base, shape)
        return [f"{_LOCAL[str(buffer.dtype)]} {c_name(name)}[{self.fragments[name].registers}];"]

    def _part(
        self, site: Site, indices: Sequence[PrimExpr]
    ) -> tuple[tuple[PrimExpr, ...], tuple[int, ...]]:
        """First element and extents of what the threads of a warp write in turn."""
        zero = {self.lane: i64(0)} | {loop.var: i64(0) for loop in site.loops}
        base = tuple(substituted(index, zero) for index in indices)
        shape = []
        for index, begin in zip(indices, base, strict=True):
            offsets = [
                self._offset(substituted(index, {v: i64(n) for v, n in point.items()}), begin)
                for point in site.points()
            ]
            numbers = [int(o) for o in offsets if isinstance(o, tirx.IntImm)]
            shape.append(max(numbers) + 1 if len(numbers) == len(offsets) else 1)
        return base, tuple(shape)

    def _offset(self, index: PrimExpr, base: PrimExpr) -> PrimExpr:
        return self.analyzer.simplify(index - base)

    def _register(self, buffer: Any, indices: Sequence[PrimExpr]) -> PrimExpr:
        """The number of the register that holds an element for its own thread."""
        name = str(buffer.name)
        if name not in self.fragments:
            raise LoweringError(f"epilogue: {name} is read before it is written")
        fragment = self.fragments[name]
        number: PrimExpr = i64(0)
        for index, base, extent in zip(indices, fragment.base, fragment.shape, strict=True):
            offset = self._offset(index, base)
            if any(v.same_as(self.lane) for v in variables(offset)):
                offset = self.analyzer.simplify(offset - self.lane)
                if not isinstance(offset, tirx.IntImm) or int(offset):
                    raise LoweringError(
                        f"epilogue: {name}{list(indices)} is in the registers of another lane; "
                        "a transposition would bring it"
                    )
                continue
            number = number * i64(extent) + offset
        return self.analyzer.simplify(number)

    @staticmethod
    def _loops(site: Site, body: list[str]) -> list[str]:
        """Unrolled loops around statements."""
        for loop in reversed(site.loops):
            name = c_name(loop.var.name)
            head = f"for (int {name} = 0; {name} < {loop.extent}; ++{name}) {{"
            body = ["#pragma unroll", head, *indented(body), "}"]
        return body

    def _printer(self, site: Site, names: Mapping[Any, str] | None = None) -> Text:
        """Prints expressions of a block."""
        own = {loop.var: c_name(loop.var.name) for loop in site.loops}
        known = self.tile.names | self.around | own
        printer = Text(known | dict(names or {}), lambda buffer, indices: "")
        inner = {loop.var: loop.extent for loop in site.loops}

        def load(buffer: Any, indices: Sequence[PrimExpr]) -> str:
            buffer, indices = site.element(buffer, indices)
            name = str(buffer.name)
            if name in self.fragments:
                place = self._register(buffer, indices)
                if name == self.epilogue.acc:
                    return self._sum(printer(place))
                return f"{c_name(name)}[{printer(place)}]"
            if name in self.kernel.views:
                return self._parameter(self.kernel.views[name], indices, inner, printer)
            if name == EXPERT:
                return "expert"
            if name == ROWS:  # tiles of the TensorIR are of ROW_TILE rows each
                return f"(rows - {printer(indices[0])} * {ROW_TILE})"
            raise LoweringError(f"epilogue: {site.where} reads {name}, which is no parameter")

        def pointer(buffer: Any) -> str:
            buffer, indices = site.element(buffer, [])
            name = str(buffer.name)
            if name in self.fragments:
                return f"{c_name(name)} + {printer(self._register(buffer, indices))}"
            if name not in self.kernel.views:
                raise LoweringError(f"{site.where} points to {name}, no parameter and no register")
            return f"{name} + {self._address(self.kernel.views[name], indices, printer)}"

        printer.load, printer.pointer = load, pointer
        return printer

    # ---- Parameters -------------------------------------------------------------------------

    def _parameter(
        self, view: View, indices: Sequence[PrimExpr], inner: Mapping[Any, int], printer: Text
    ) -> str:
        """An element of a parameter: loaded where it is known first."""
        used = {v for index in indices for v in variables(index)}
        looped = [v for v in inner if any(v.same_as(u) for u in used)]
        if any(v.same_as(u) for v in self.around for u in used):
            return self._element(view, indices, printer)
        if not looped:
            return self._once(view, indices, any(v.same_as(self.chunk) for v in used), printer)
        *outer, last = view.index(indices)
        alone = len(looped) == 1 and self._step(last, looped[0]) == 1
        if not alone or any(self._step(index, looped[0]) for index in outer):
            return self._element(view, indices, printer)
        return self._neighbour(view, indices, looped[0], inner[looped[0]], printer)

    def _once(self, view: View, indices: Sequence[PrimExpr], late: bool, printer: Text) -> str:
        """An element that a whole tile has in common, or (``late``) a part of it."""
        key = f"{view.name}{list(map(str, indices))}"
        if key not in self.values:
            self.values[key] = f"{c_name(view.name)}_{len(self.values)}"
            text = f"const float {self.values[key]} = {self._element(view, indices, printer)};"
            (self.chunk_level if late else self.tile_level).append(text)
        return self.values[key]

    def _neighbour(
        self, view: View, indices: Sequence[PrimExpr], loop: Any, count: int, printer: Text
    ) -> str:
        """One of ``count`` neighbours along a loop, which are loaded together."""
        first = [substituted(index, {loop: i64(0)}) for index in indices]
        return f"{self._loaded(view, first, count, printer)}[{printer(loop)}]"

    def _loaded(self, view: View, first: Sequence[PrimExpr], count: int, printer: Text) -> str:
        """The array of neighbours that begin at ``first``."""
        key = f"run {view.name}{list(map(str, first))}"
        if key not in self.values:
            self.values[key] = f"{c_name(view.name)}_{len(self.values)}"
            self.chunk_level += self._run(self.values[key], view, first, count, printer)
        return self.values[key]

    def _step(self, index: PrimExpr, loop: Any) -> int | None:
        grown = self.analyzer.simplify(substituted(index, {loop: loop + i64(1)}) - index)
        return int(grown) if isinstance(grown, tirx.IntImm) else None

    def _run(
        self, name: str, view: View, first: Sequence[PrimExpr], count: int, printer: Text
    ) -> list[str]:
        """Neighbours along a parameter's last dimension, to registers."""
        extent = view.dims[-1].extent or 0
        last = printer(view.index(first)[-1])
        guards = self._inside(view, first, printer, but_last=True)
        null = self.kernel.optional.get(view.name)
        aligned = str(extent % (16 // view.item) == 0).lower()
        function = f"bs_load_run<{count}, {aligned}>" if view.item == 4 else (
            f"bs_load_run_16<{CLASS[view.dtype]}, {count}, {aligned}>"
        )  # fmt: skip
        address = f"{view.name} + {self._address(view, first, printer)}"
        conditions = [*([view.name] if null is not None else []), *guards]
        call = f"{function}({name}, {address}, {extent} - {last});"
        if not conditions:
            return [f"float {name}[{count}];", call]
        return [
            f"float {name}[{count}];",
            f"if ({' && '.join(conditions)}) {{",
            f"  {call}",
            "} else {",
            "#pragma unroll",
            f"  for (int q = 0; q < {count}; ++q) {name}[q] = {number(null or 0.0)};",
            "}",
        ]

    def _element(self, view: View, indices: Sequence[PrimExpr], printer: Text) -> str:
        """One element; where there is none, what stands for a null parameter, or 0."""
        address = f"{view.name} + {self._address(view, indices, printer)}"
        if view.dtype == "float32":
            text = f"__uint_as_float(bs_load4<BS_KEEP>({address}))"
        elif view.dtype in CLASS:
            text = f"{CLASS[view.dtype]}::lo(*({address}))"
        else:
            text = f"*({address})"
        null = self.kernel.optional.get(view.name)
        conditions = [*([view.name] if null is not None else [])]
        conditions += self._inside(view, indices, printer)
        return (
            f"({' && '.join(conditions)} ? {text} : {number(null or 0.0)})" if conditions else text
        )

    def _inside(
        self, view: View, indices: Sequence[PrimExpr], printer: Text, but_last: bool = False
    ) -> list[str]:
        """Conditions that an element is one of d's true rows and columns."""
        limits = self._limits(view, indices, but_last)
        return [f"{printer(self.analyzer.simplify(index))} < {end}" for _, index, end in limits]

    @staticmethod
    def _limits(
        view: View, indices: Sequence[PrimExpr], but_last: bool = False
    ) -> list[tuple[int, PrimExpr, str]]:
        """Dimensions of true rows and columns of d, an element's index, and where these end."""
        pairs = list(zip(view.dims, view.index(indices), strict=True))
        return [
            (number, index, "rows" if dim.axis == "rows" else str(dim.extent))
            for number, (dim, index) in enumerate(pairs[:-1] if but_last else pairs)
            if dim.axis == "cols" or (dim.axis == "rows" and dim.unit == 1)
        ]

    def _address(self, view: View, indices: Sequence[PrimExpr], printer: Text) -> str:
        """Number of an element in a parameter."""
        parts = []
        for dim, index, pitch in zip(view.dims, view.index(indices), view.pitches, strict=True):
            text = printer(self.analyzer.simplify(index))
            begin = self.tile.begin(dim.axis, dim.unit)
            text = f"{begin} + {text}" if begin else text
            parts.append(text if pitch == 1 else f"int64_t({text}) * {pitch}")
        return f"({' + '.join(parts)})"

    # ---- Values -----------------------------------------------------------------------------

    def _words(self, site: Site, loop: Any, of: str) -> list[str]:
        """The bits of all elements along a loop, in words."""
        count = loop.extent * ITEM[of] // 4
        return [f"uint32_t words[{count}];", *self._in_words(site, loop, of, "words[q]")]

    def _in_words(self, site: Site, loop: Any, of: str, to: str) -> list[str]:
        """The bits of all elements along a loop to ``to``, where q is the word's number."""
        body = site.body
        assert body is not None
        each = 4 // ITEM[of]
        parts = []
        for at in range(each):
            index = f"({each} * q + {at})" if each > 1 else "q"
            parts.append(self._code(body.value, of, self._printer(site, {loop.var: index})))
        if of in CLASS:
            made = f"{CLASS[of]}::pack({parts[0]}, {parts[1]})"
        elif of == "uint8":
            made = " | ".join(f"uint32_t({part}) << {8 * at}" for at, part in enumerate(parts))
        else:
            made = f"__float_as_uint({parts[0]})"
        count = loop.extent // each
        return ["#pragma unroll", f"for (int q = 0; q < {count}; ++q) {to} = {made};"]

    @staticmethod
    def _code(value: Any, of: str, printer: Text) -> str:
        """The float32 that is rounded to ``of``, or the value itself."""
        if of in CLASS:
            if kind(value) != "Cast" or dtype(value.value) != "float32":
                raise LoweringError(f"epilogue: {of} is stored of a float32 that is cast to it")
            return printer(value.value)
        return printer(value)

    def _bits(self, value: Any, of: str, printer: Text) -> str:
        """The bits of one element."""
        text = self._code(value, of, printer)
        if of in CLASS:
            return f"{CLASS[of]}::pack({text}, 0.0f)"
        return text if of == "uint8" else f"__float_as_uint({text})"

    def _rows(self, view: View, wide: int) -> int:
        """Bytes of a store that rows of a parameter are aligned to."""
        row = (view.dims[-1].extent or 0) * view.item
        return next(w for w in (16, 8, 4, 2, 1) if row % w == 0 and w <= wide)

    def _run_out(self, view: View, first: Sequence[PrimExpr], count: int, printer: Text) -> str:
        """The store of `words` to neighbours in a row of a parameter."""
        size = count * view.item
        left = f"({view.dims[-1].extent} - {printer(view.index(first)[-1])}) * {view.item}"
        address = f"{view.name} + {self._address(view, first, printer)}"
        return f"bs_store_run<{size}, {self._rows(view, size)}>({address}, words, {left});"

    @property
    def pads(self) -> bool:
        """Whether it writes whole tiles of 128 rows, those of scales."""
        written = (str(site.writes().name) for site in self.epilogue.sites)
        return any(self._whole_tiles(n) for n in written if n in self.kernel.views)

    def _whole_tiles(self, name: str) -> bool:
        """Whether lanes are rows of tiles of 128, of which a group of rows fills its last one."""
        dims = self.kernel.views[name].dims
        return not self.kernel.swap and any(d.axis == "rows" and d.unit > 1 for d in dims)

    def _own_lane(self, name: str = "") -> list[str]:
        """The condition that a thread's lane is one of d, or of what is written of tiles of it."""
        return [] if name and self._whole_tiles(name) else ["lane < x_left"]

    @staticmethod
    def _guard(conditions: Sequence[str]) -> str:
        """Conditions ahead of a statement, each once."""
        unique = list(dict.fromkeys(conditions))
        return f"if ({' && '.join(unique)}) " if unique else ""


def c_name(name: Any) -> str:
    """A buffer's name as C has it."""
    return str(name).replace(".", "_")
