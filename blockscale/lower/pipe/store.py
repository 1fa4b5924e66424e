"""The warps that store: the epilogue's blocks over the registers of a thread.

Thread i of warp w has lane 32 w + i of tensor memory; columns of the accumulator are its registers.
A buffer in registers is indexed by what its indices have beyond the first element that the warp
has: the lane, which must be the thread's own, and numbers of registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.sym import Analyzer

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.kernel import STORE_WARPS, Kernel, Transfer
from blockscale.lower.pipe.read import Loop, Site, View, substituted
from blockscale.lower.pipe.text import (
    Text,
    declarations,
    dtype,
    indented,
    kind,
    loads,
    number,
    variables,
)
from blockscale.lower.pipe.tile import Tile
from blockscale.tir.common import i64

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int32": 4}
_CLASS = {"bfloat16": "BsBf16", "float16": "BsF16"}
_LOCAL = {"float32": "float", "int32": "int", "uint8": "alignas(16) uint8_t"}
_LOCAL |= dict.fromkeys(_CLASS, "alignas(16) uint16_t")


def written(kernel: Kernel) -> set[str]:
    """Parameters that threads write themselves."""
    names = {str(site.writes().name) for site in kernel.epilogue.sites}
    staged = (
        {move.view.name for move in kernel.epilogue.stores.values()} if kernel.experts else set()
    )
    return {name for name in names | staged if name in kernel.views}


def pointers(kernel: Kernel) -> list[str]:
    """Parameters that threads read or write themselves, in order."""
    used = written(kernel)
    for site in kernel.epilogue.sites:
        values = [site.body.value, *site.body.indices] if site.body else []
        read = [site.element(load.source, []) for value in values for load in loads(value)]
        used |= {str(buffer.name) for buffer, _ in read}
        used |= {str(operand.buffer.name) for operand in site.operands.values()}
    return [name for name in kernel.views if name in used]


def headers(kernel: Kernel) -> list[str]:
    """What declares the instructions of threads, as lines of C."""
    found: dict[str, None] = {}
    for site in kernel.epilogue.sites:
        for value in [site.body.value if site.body else site.call]:
            found |= dict.fromkeys(declarations(value))
    return list(found)


def store(kernel: Kernel, tile: Tile) -> list[str]:
    """The loop of the storing warps over all tiles."""
    return _Store(kernel, tile).text()


def store_split(kernel: Kernel, tile: Tile) -> list[str]:
    """The end of a tile whose K several CTAs share, by all threads of the cluster."""
    return _Store(kernel, tile).split()


class Fragment(NamedTuple):
    """A buffer in registers: its first element, and the registers of each dimension."""

    base: tuple[PrimExpr, ...]
    shape: tuple[int, ...]

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        total = 1
        for extent in self.shape:
            total *= extent
        return total


class _Store:
    """Prints the epilogue of one kernel."""

    def __init__(self, kernel: Kernel, tile: Tile) -> None:
        self.kernel, self.tile, self.epilogue = kernel, tile, kernel.epilogue
        self.lane, self.chunk = kernel.at.lane, kernel.epilogue.chunk
        self.analyzer = Analyzer()
        shape = (1,) * (len(self.epilogue.acc_base) - 1) + (self.epilogue.columns,)
        self.fragments = {self.epilogue.acc: Fragment(self.epilogue.acc_base, shape)}
        self.tile_level: list[str] = []
        self.chunk_level: list[str] = []
        self.values: dict[str, str] = {}
        self.split_index: str | None = None
        self.around: dict[Any, str] = {}

    # ---- Tiles ------------------------------------------------------------------------------

    def text(self) -> list[str]:
        """All of the role."""
        k, at = self.kernel, self.kernel.places
        body = self._chunk()
        staging = sum(2 * move.slot.bytes for move in self.epilogue.stores.values())
        lines = []
        if self.epilogue.stores:
            lines.append(f"const uint32_t staging = smem + {at['out']} + warp * {staging};")
            lines.append("uint32_t buffer = 0;")
        free = f"smem + {at['free']}"
        leader = f"bs_map_rank({free}, rank & ~1u)" if k.group == 2 else free
        loop = self.tile.loop(
            [
                f"const uint32_t slot = number % {k.acc_stages};",
                *self._extents(),
                f"const uint32_t sums = tmem + slot * {k.acc_pitch} + (warp << 21);",
                f"bs_mbar_wait(smem + {at['done']} + 8 * slot, number / {k.acc_stages} & 1);",
                "bs_tcgen05_fence_after();",
                *self.tile_level,
                "#pragma unroll 1",
                f"for (int i = 0; i < {self.epilogue.chunks}; ++i) {{",
                *indented(body),
                "}",
            ],
            count="number",
        )
        end = ["if (lane == 0) bs_bulk_wait<0>();"] if self.epilogue.stores else []
        return [f"const uint32_t free = {leader};", "uint32_t number = 0;", *lines, *loop, *end]

    def _extents(self) -> list[str]:
        """How much of d there is from this warp's first lane and first column on."""
        k = self.kernel
        pair = " + cta * 128" if k.group == 2 else ""
        own = {"rows": "row_tile", "cols": "col_tile"}
        limit = {"rows": "rows", "cols": str(k.cols)}
        first = f"{own[k.x_axis]} * {k.x_tile}{pair} + warp * 32"
        return [
            f"const int x_left = {limit[k.x_axis]} - ({first});",
            f"const int y_left = {limit[k.y_axis]} - {own[k.y_axis]} * {k.y_tile};",
        ]

    def _chunk(self) -> list[str]:
        """One part of a tile."""
        k, e = self.kernel, self.epilogue
        shared = k.overlap // e.columns if k.overlap else e.chunks
        turned = f"slot == 0 ? {e.chunks - 1} - i : i" if k.overlap else "i"
        blocks = self._nest(e.sites)
        return [
            *(["// Shared columns are the last of accumulator 0 and the first of accumulator 1."]
              if k.overlap else []),
            f"const int chunk = {turned};",
            f"const bool used = x_left > 0 && chunk * {e.columns} < y_left;",
            f"uint32_t acc[{e.columns}];",
            "if (used) {",
            *indented(self._read(f"sums + chunk * {e.columns}", f"columns - chunk * {e.columns}")),
            "}",
            f"if (i == {shared - 1}) {{",
            "  bs_tcgen05_fence_before();",
            "  __syncwarp();",
            f"  if (lane == 0) bs_mbar_arrive_cluster(free + 8 * (number % {k.frees}));",
            "}",
            "if (!used) continue;",
            *self.chunk_level,
            *blocks,
            *self._send(),
        ]  # fmt: skip

    def _read(self, place: str, left: str) -> list[str]:
        """The accumulator's columns to registers; no more than the MMA has written."""
        e = self.epilogue
        lines = []
        for at in range(0, e.columns, e.width):
            guard = f"if ({at} < {left}) " if self.kernel.swap else ""
            lines.append(f"{guard}bs_tcgen05_ld<{e.width}>(acc + {at}, {place} + {at});")
        return [*lines, "bs_tcgen05_wait_ld();"]

    # ---- Blocks -----------------------------------------------------------------------------

    def _nest(self, sites: Sequence[Site]) -> list[str]:
        """Blocks in their order, loops that several share around all of these."""
        lines: list[str] = []
        at = 0
        while at < len(sites):
            loops, end = sites[at].loops, at + 1
            while loops and end < len(sites) and _begins_with(sites[end], loops[0]):
                end += 1
            group, at = sites[at:end], end
            if len(group) == 1:
                lines += self._site(group[0])
                continue
            name = _c(loops[0].var.name)
            self.around[loops[0].var] = name
            known = set(self.fragments)
            body = self._nest([replace(site, loops=site.loops[1:]) for site in group])
            for made in set(self.fragments) - known:
                del self.fragments[made]
            head = f"for (int {name} = 0; {name} < {loops[0].extent}; ++{name}) {{"
            lines += ["#pragma unroll", head, *indented(body), "}"]
        return lines

    def _site(self, site: Site) -> list[str]:
        """A plain block, or an instruction of a thread."""
        if site.what:
            return self._call(site)
        body = site.body
        assert body is not None
        name = str(body.buffer.name)
        if name in self.epilogue.stores:
            return self._staged(site, self.epilogue.stores[name])
        if name in self.kernel.views:
            return self._direct(site, self.kernel.views[name])
        if str(body.buffer.scope()) != "local":
            raise LoweringError(
                f"{site.where} writes {name} in {body.buffer.scope()!r}: the epilogue writes "
                "registers, parameters, and what a TMA store sends"
            )
        return self._registers(site)

    def _registers(self, site: Site) -> list[str]:
        """A plain block that writes registers."""
        body = site.body
        assert body is not None
        name, of = _c(body.buffer.name), str(body.buffer.dtype)
        declared = self._declare(site, body.buffer, body.indices)
        place = self._register(body.buffer, body.indices)
        if of in _CLASS:
            (loop,) = site.loops
            if self._step(place, loop.var) != 1 or loop.extent % 2:
                raise LoweringError(f"{site.where}: {of} is kept in pairs of neighbours")
            first = self._printer(site)(substituted(place, {loop.var: i64(0)}))
            pair = f"reinterpret_cast<uint32_t *>({name} + {first})[q]"
            return [*declared, *self._in_words(site, loop, of, pair)]
        text = self._printer(site)
        return [*declared, *self._loops(site, [f"{name}[{text(place)}] = {text(body.value)};"])]

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
        return [f"{_LOCAL[str(buffer.dtype)]} {_c(name)}[{self.fragments[name].registers}];"]

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
            name = _c(loop.var.name)
            head = f"for (int {name} = 0; {name} < {loop.extent}; ++{name}) {{"
            body = ["#pragma unroll", head, *indented(body), "}"]
        return body

    def _printer(self, site: Site, names: Mapping[Any, str] | None = None) -> Text:
        """Prints expressions of a block."""
        own = {loop.var: _c(loop.var.name) for loop in site.loops}
        known = self.tile.names | self.around | own
        printer = Text(known | dict(names or {}), lambda buffer, indices: "")
        inner = {loop.var: loop.extent for loop in site.loops}

        def load(buffer: Any, indices: Sequence[PrimExpr]) -> str:
            buffer, indices = site.element(buffer, indices)
            name = str(buffer.name)
            if name in self.fragments:
                if name == self.epilogue.acc and self.split_index is not None:
                    return f"sum[{self.split_index}]"
                text = f"{_c(name)}[{printer(self._register(buffer, indices))}]"
                if name == self.epilogue.acc:
                    return f"__uint_as_float(acc[{printer(self._register(buffer, indices))}])"
                return text
            if name in self.kernel.views:
                return self._parameter(self.kernel.views[name], indices, inner, printer)
            if name == "expert_of_tile":
                return "expert"
            raise LoweringError(f"epilogue: {site.where} reads {name}, which is no parameter")

        def pointer(buffer: Any) -> str:
            buffer, indices = site.element(buffer, [])
            name = str(buffer.name)
            if name in self.fragments:
                return f"{_c(name)} + {printer(self._register(buffer, indices))}"
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
        around = any(v.same_as(u) for v in self.around for u in used)
        if around or (self.split_index is not None and looped):
            return self._element(view, indices, printer)
        if not looped:
            key = f"{view.name}{list(map(str, indices))}"
            if key not in self.values:
                name = f"{_c(view.name)}_{len(self.values)}"
                text = f"const float {name} = {self._element(view, indices, printer)};"
                late = any(v.same_as(self.chunk) for v in used) and self.split_index is None
                (self.chunk_level if late else self.tile_level).append(text)
                self.values[key] = name
            return self.values[key]
        (loop,) = looped if len(looped) == 1 else (None,)
        step = None if loop is None else self._step(view.index(indices)[-1], loop)
        if step != 1 or any(self._step(i, loop) for i in view.index(indices)[:-1]):
            return self._element(view, indices, printer)
        first = [substituted(index, {loop: i64(0)}) for index in indices]
        key = f"run {view.name}{list(map(str, first))}"
        if key not in self.values:
            name = f"{_c(view.name)}_{len(self.values)}"
            self.values[key] = name
            self.chunk_level += self._run(name, view, first, inner[loop], printer)
        return f"{self.values[key]}[{printer(loop)}]"

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
            f"bs_load_run_16<{_CLASS[view.dtype]}, {count}, {aligned}>"
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
        elif view.dtype in _CLASS:
            text = f"{_CLASS[view.dtype]}::lo(*({address}))"
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
        found = []
        pairs = list(zip(view.dims, view.index(indices), strict=True))
        for dim, index in pairs[:-1] if but_last else pairs:
            if dim.axis == "rows" and dim.unit == 1:
                found.append(f"{printer(self.analyzer.simplify(index))} < rows")
            elif dim.axis == "cols":
                found.append(f"{printer(self.analyzer.simplify(index))} < {dim.extent}")
        return found

    def _stored(
        self, view: View, indices: Sequence[PrimExpr], printer: Text, but_last: bool = False
    ) -> list[str]:
        """The same, but that the thread's own lane is one of d's, which is asked before."""
        k = self.kernel
        pair = k.at.cta * i64(128) if k.group == 2 else i64(0)
        first = k.at.tiles[k.x_axis] * i64(k.x_tile) + pair + k.at.warp * i64(32)
        own = self.analyzer.simplify(first + self.lane)
        found = self._inside(view, indices, printer, but_last)
        return [each for each in found if not each.startswith(f"{printer(own)} <")]

    def _address(self, view: View, indices: Sequence[PrimExpr], printer: Text) -> str:
        """Number of an element in a parameter."""
        parts = []
        for dim, index, pitch in zip(view.dims, view.index(indices), view.pitches, strict=True):
            text = printer(self.analyzer.simplify(index))
            begin = self.tile.begin(dim.axis, dim.unit)
            text = f"{begin} + {text}" if begin else text
            parts.append(text if pitch == 1 else f"int64_t({text}) * {pitch}")
        return f"({' + '.join(parts)})"

    # ---- Stores -----------------------------------------------------------------------------

    def _along(self, site: Site, view: View, indices: Sequence[PrimExpr]) -> Any:
        """The loop along neighbours of a parameter's last dimension; None if there is none."""
        *outer, last = view.index(indices)
        for loop in site.loops:
            if self._step(last, loop.var) == 1 and not any(self._step(i, loop.var) for i in outer):
                return loop
        return None

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
        if of in _CLASS:
            made = f"{_CLASS[of]}::pack({parts[0]}, {parts[1]})"
        elif of == "uint8":
            made = " | ".join(f"uint32_t({part}) << {8 * at}" for at, part in enumerate(parts))
        else:
            made = f"__float_as_uint({parts[0]})"
        count = loop.extent // each
        return ["#pragma unroll", f"for (int q = 0; q < {count}; ++q) {to} = {made};"]

    @staticmethod
    def _code(value: Any, of: str, printer: Text) -> str:
        """The float32 that is rounded to ``of``, or the value itself."""
        if of in _CLASS:
            if kind(value) != "Cast" or dtype(value.value) != "float32":
                raise LoweringError(f"epilogue: {of} is stored of a float32 that is cast to it")
            return printer(value.value)
        return printer(value)

    def _bits(self, site: Site, of: str) -> str:
        """The bits of one element."""
        assert site.body is not None
        text = self._code(site.body.value, of, self._printer(site))
        if of in _CLASS:
            return f"{_CLASS[of]}::pack({text}, 0.0f)"
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

    def _direct(self, site: Site, view: View) -> list[str]:
        """A block that writes a parameter."""
        body = site.body
        assert body is not None
        loop = self._along(site, view, body.indices)
        printer = self._printer(site)
        if loop is not None and loop.extent * view.item >= 4 and len(site.loops) == 1:
            first = [substituted(index, {loop.var: i64(0)}) for index in body.indices]
            words = self._words(site, loop, view.dtype)
            guard = self._guard([*self._own_lane(), *self._stored(view, first, printer, True)])
            return [
                "{",
                *indented([*words, f"{guard}{self._run_out(view, first, loop.extent, printer)}"]),
                "}",
            ]
        guard = self._guard([*self._own_lane(), *self._stored(view, body.indices, printer)])
        address = f"{view.name} + {self._address(view, body.indices, printer)}"
        bits = self._bits(site, view.dtype)
        return self._loops(site, [f"{guard}bs_store_element({address}, {bits});"])

    @staticmethod
    def _own_lane() -> list[str]:
        return ["lane < x_left"]

    @staticmethod
    def _guard(conditions: Sequence[str]) -> str:
        unique = list(dict.fromkeys(conditions))
        return f"if ({' && '.join(unique)}) " if unique else ""

    def _staged(self, site: Site, move: Transfer) -> list[str]:
        """A block that writes what a TMA store sends; rows of another expert it may not write."""
        body, view = site.body, move.view
        assert body is not None
        ragged = self.kernel.experts > 0
        *_, rows, cols = move.slot.shape
        swap = self.kernel.swap
        lines = [
            "if (lane == 0) bs_bulk_wait_read<1>();",
            "__syncwarp();",
            "buffer ^= 1;",
            f"const uint32_t from = staging + buffer * {move.slot.bytes};",
        ]
        if ragged:
            e = self.epilogue
            whole = f"y_left - chunk * {e.columns} >= {rows}" if swap else f"x_left >= {rows}"
            place = lines[3].removeprefix("const uint32_t ")
            taken = indented([*lines[:3], place])
            lines = [
                f"const bool whole = {whole};",
                "uint32_t from = 0;",
                "if (whole) {",
                *taken,
                "}",
            ]
        printer = self._printer(site)
        offsets = [
            self._offset(index, base)
            for index, base in zip(body.indices, move.slot.base, strict=True)
        ]
        at = [tirx.const(0, "int64"), *offsets][-2] * i64(cols) + offsets[-1]
        out = [self._outside(move, offset, d) for d, offset in enumerate(offsets)]
        loop = self._last_loop(site, offsets)
        if loop is not None and not swap:
            lines += self._words(site, loop, view.dtype)
            stage = f"bs_stage_run<{loop.extent * view.item}>(from, words, lane);"
            if not ragged:
                return [*lines, stage]
            first = [substituted(index, {loop.var: i64(0)}) for index in out]
            guard = self._guard(self._own_lane())
            row = self._run_out(view, first, loop.extent, printer)
            return [*lines, f"if (whole) {stage}", f"else {guard}{row}"]
        place = f"from + ({printer(self.analyzer.simplify(at))}) * {view.item}"
        made = [f"const uint32_t code = {self._bits(site, view.dtype)};"]
        shared = f"bs_store_shared<{view.item}>({place}, code);"
        if ragged:
            guard = self._guard([*self._own_lane(), *self._stored(view, out, printer)])
            address = f"{view.name} + {self._address(view, out, printer)}"
            made += [f"if (whole) {shared}", f"else {guard}bs_store_element({address}, code);"]
        else:
            made.append(shared)
        return [*lines, *self._loops(site, made)]

    def _last_loop(self, site: Site, offsets: Sequence[PrimExpr]) -> Any:
        """The only loop, if it runs along the staged rows."""
        if len(site.loops) != 1 or self._step(offsets[-1], site.loops[0].var) != 1:
            return None
        return site.loops[0]

    def _outside(self, move: Transfer, offset: PrimExpr, dim: int) -> PrimExpr:
        """Index of a staged element in the parameter, by the store's own description."""
        base = self.target[move.view.name][dim]
        return self.analyzer.simplify(base + offset)

    @property
    def target(self) -> dict[str, tuple[PrimExpr, ...]]:
        """First elements of what is stored by TMA, in the parameters' own dimensions."""
        return {move.view.name: move.target for move in self.epilogue.stores.values()}

    def _send(self) -> list[str]:
        """TMA stores of what has been staged."""
        lines: list[str] = []
        for move in self.epilogue.stores.values():
            where = ", ".join(self.tile.coordinate(dim) for dim in move.dims)
            send = [
                "bs_fence_async();",
                "__syncwarp();",
                "if (lane == 0) {",
                f"  bs_tma_store_2d(&map_{move.view.name}, {where}, from);",
                "  bs_bulk_commit();",
                "}",
            ]
            lines += ["if (whole) {", *indented(send), "}"] if self.kernel.experts else send
        return lines

    def _call(self, site: Site) -> list[str]:
        """An instruction of a thread, on its registers."""
        written = {str(region.source.name) for region in site.block.writes}
        lines: list[str] = []
        for operand in site.operands.values():
            if operand.scope == "local" and str(operand.buffer.name) in written:
                lines += self._declare(site, operand.buffer, operand.mins)
        guard = self._guard(self._own_lane()) if written & set(self.kernel.views) else ""
        return [*lines, *self._loops(site, [f"{guard}{self._printer(site)(site.call)};"])]

    # ---- Split K ----------------------------------------------------------------------------

    def split(self) -> list[str]:
        """Sums of all CTAs, each a share of the columns, in the order of the CTAs."""
        k, e, at = self.kernel, self.epilogue, self.kernel.places
        if len(e.sites) != 1 or e.sites[0].body is None or len(e.sites[0].loops) != 1:
            raise LoweringError("split_k: its epilogue is one block of single elements")
        (site,) = e.sites
        pieces = k.mma.n // 4
        share = -(-pieces // k.split)
        finish = self._finish(site)
        wait = [
            f"bs_mbar_wait(smem + {at['done']}, 0);",
            "bs_tcgen05_fence_after();",
            f"const uint32_t to = smem + {at['out']} + threadIdx.x * 16;",
            "#pragma unroll 1",
            f"for (int c = 0; c < {'columns' if k.swap else k.mma.n}; c += {e.columns}) {{",
            f"  uint32_t acc[{e.columns}];",
            *indented(self._read("tmem + (warp << 21) + c", "columns - c")),
            "#pragma unroll",
            f"  for (int i = 0; i < {e.columns}; i += 4)",
            "    bs_store16_shared(to + (c + i) * 512,",
            "                      make_uint4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));",
            "}",
            "bs_tcgen05_fence_before();",
        ]
        works = f"t < tiles && warp < {STORE_WARPS}"
        return [
            f"const int t = blockIdx.x / {k.cluster};",
            f"if ({works}) {{",
            *indented(self.tile.place()),
            *indented(wait),
            "}",
            "__syncwarp();",
            "bs_cluster_sync();",
            f"if ({works}) {{",
            *indented(self.tile.place()),
            *indented(self._extents()),
            *indented(self.tile_level),
            f"  const int end = min({pieces}, (int(rank) + 1) * {share});",
            "#pragma unroll 1",
            f"  for (int piece = int(rank) * {share}; piece < end; ++piece) {{",
            *indented(finish, 2),
            "  }",
            "}",
        ]

    def _finish(self, site: Site) -> list[str]:
        """One piece of 4 columns, from all CTAs, to d."""
        k, body = self.kernel, site.body
        assert body is not None
        view, (loop,) = k.views[str(body.buffer.name)], site.loops
        zero = {self.chunk: i64(0)}
        indices = [substituted(index, zero) for index in body.indices]
        value = substituted(body.value, zero)
        of = view.dtype
        lines = [
            "if (lane >= x_left || 4 * piece >= y_left) continue;",
            "float sum[4];",
            f"bs_sum_cluster<{k.split}>(sum, smem + {k.places['out']} + piece * 2048 + "
            "threadIdx.x * 16);",
            "uint32_t code[4];",
        ]
        codes, stores = [], []
        for i in range(4):
            self.split_index = str(i)
            printer = self._printer(site, {loop.var: f"(4 * piece + {i})"})
            text = self._code(value, of, printer)
            bits = (
                f"{_CLASS[of]}::pack({text}, 0.0f)" if of in _CLASS else f"__float_as_uint({text})"
            )
            codes.append(f"code[{i}] = {bits};")
            if k.swap:
                address = f"{view.name} + {self._address(view, indices, printer)}"
                guard = self._guard([f"4 * piece + {i} < y_left"])
                stores.append(f"{guard}bs_store_element({address}, code[{i}]);")
        if not k.swap:
            printer = self._printer(site, {loop.var: "4 * piece"})
            if of in _CLASS:
                stores.append(
                    "const uint32_t words[2] = {code[0] | code[1] << 16, code[2] | code[3] << 16};"
                )
            size = 4 * view.item
            name = "words" if of in _CLASS else "code"
            address = f"{view.name} + {self._address(view, indices, printer)}"
            stores.append(
                f"bs_store_run<{size}, {self._rows(view, size)}>({address}, {name}, "
                f"(y_left - 4 * piece) * {view.item});"
            )
        return [*lines, *codes, *stores]


def _begins_with(site: Site, loop: Loop) -> bool:
    """Whether a block's outermost loop is this one."""
    return bool(site.loops) and site.loops[0].var.same_as(loop.var)


def _c(name: Any) -> str:
    """A buffer's name as C has it."""
    return str(name).replace(".", "_")
