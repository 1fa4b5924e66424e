"""What consumers do with a tile's sums: the block that stores, over a warp's fragments.

A thread (g = lane / 4, t = lane % 4) has, of the tile of 16 rows m and the 8 rows of x n, the sums
of rows g and g + 8 (h) and of rows of x 2 t and 2 t + 1 (b).  Values of 16 bits change places
within 8 x 8 of them before they are stored: then it has, of row n * 8 + g of x, the rows of the
weight 16 m + 8 h + 2 t and its neighbour (e), which the layout of weights makes columns of y that
follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any

from tvm.ir import Expr as PrimExpr
from tvm.sym import Analyzer

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.elements import CLASS
from blockscale.lower.pipe.read import View, substituted, var
from blockscale.lower.pipe.text import Text, indented, kind, loads, number, variables
from blockscale.lower.warp.kernel import Kernel
from blockscale.lower.warp.read import ORDER, Numbers, is_int, is_zero, replaced
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import EXPERT


@dataclass(frozen=True, eq=False)
class Register:
    """Rows of the weight of a thread: of the tile of 16 rows ``m``, g + 8 ``h``.

    ``loops``: the values of the block's loops over rows, where ``own`` stands for g.
    """

    m: int
    h: int
    loops: Mapping[Any, PrimExpr]


class Epilogue:
    """Prints the epilogue of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.site, self.numbers = kernel, kernel.epilogue, Numbers()
        body = self.site.body
        assert body is not None
        self.body = body
        self.view = kernel.views[str(body.buffer.name)]
        self.analyzer = Analyzer()
        self.own, self.t, self.n = var("own"), var("t"), var("n")
        self.b = var("b")
        self.first = var("first")
        self.row = var("row")
        self.part = var("part")
        self.rows = kernel.part_rows or kernel.rows_tile
        # What a table has for a row of x: of what a thread stores, and of any.
        self.slots = {"slot": var("slot"), "slots[i]": var("slots[i]")}
        self.token_loop, self.part_loop, self.row_loops = self._loops()
        self.registers = self._registers()
        self.words = self.view.dtype in CLASS
        self.tile_level: list[str] = []
        self.row_level: list[str] = []
        self.inner_level: dict[str, list[str]] = {}
        self.values: dict[str, str] = {}

    # ---- Which thread computes what ---------------------------------------------------------

    def _sums(self) -> list[Any]:
        """Loads of the sums, in order."""
        return [n for n in loads(self.body.value) if str(n.source.name) == self.kernel.acc]

    def _step(self, index: PrimExpr, variable: Any) -> int:
        return self.numbers(index, {variable: 1}) - self.numbers(index, {})

    def _loops(self) -> tuple[Any, Any, list[tuple[int, Any]]]:
        """The loop over rows of x, that over parts of them, those over rows of w with their steps.

        There are parts, which a warp reads from tensor memory, or None.
        """
        *_, token, row = self._sums()[0].indices
        tokens = [loop for loop in self.site.loops if self._step(token, loop.var)]
        rows = [(self._step(row, loop.var), loop) for loop in self.site.loops if loop not in tokens]
        parts = [loop for loop in tokens if self._step(token, loop.var) > 1]
        tokens = [loop for loop in tokens if loop not in parts]
        step = self.rows * self.kernel.slices
        if any(self._step(token, loop.var) != step or not self.kernel.tensor for loop in parts):
            raise LoweringError(
                f"{self.site.where}: parts of rows of x are not those that are read"
            )
        rows = sorted(((s, loop) for s, loop in rows if s or loop.extent > 1), key=lambda r: -r[0])
        if len(tokens) != 1 or len(parts) > 1 or not rows or rows[-1][0] != 1:
            raise LoweringError(
                f"{self.site.where}: its loops are not one over rows of x and some over rows of w"
            )
        return tokens[0], parts[0] if parts else None, rows

    def _registers(self) -> list[Register]:
        """Those whose first sum is that of the block, once for each of its iterations."""
        found = []
        for m, h in product(range(self.kernel.tiles_m), range(2)):
            left, values = 16 * m + 8 * h, {}
            for step, loop in self.row_loops:
                digit = left // step
                if digit + (7 if step == 1 else 0) >= loop.extent:
                    break
                values[loop.var] = i64(digit) + (self.own if step == 1 else i64(0))
                left -= digit * step
            else:
                found.append(Register(m, h, values))
        count = 1
        for _, loop in self.row_loops:
            count *= loop.extent
        if 8 * len(found) != count:
            raise LoweringError(f"{self.site.where}: rows of w are not divided by 8 among lanes")
        return found

    def _at(self, value: PrimExpr, register: Register, token: PrimExpr, row: Any) -> PrimExpr:
        """An expression of the block in this register; ``row``: the lane's among 8."""
        ones = {loop.var: i64(0) for loop in self.site.loops if loop.extent == 1}
        values = {v: substituted(e, {self.own: row}) for v, e in register.loops.items()}
        part = {} if self.part_loop is None else {self.part_loop.var: self.part}
        if self.kernel.tensor and self.kernel.has_first:  # `first` is that of the part
            part = {variable: i64(0) for variable in (*part, self.kernel.at.slice)}
        return substituted(value, ones | part | values | {self.token_loop.var: token})

    # ---- Text -------------------------------------------------------------------------------

    def text(self, ahead: bool) -> tuple[list[str], list[str]]:
        """What is loaded before the products, and what follows them; for a tile.

        ``ahead``: all parameters that do not depend on the row of x are loaded before.
        """
        groups = []
        size = self._together()
        for at in range(0, len(self.registers), size):
            groups.append(self._group(self.registers[at : at + size]))
        rows = self.kernel.rows_tile
        before: list[str] = []
        if not self.kernel.has_first and not self.kernel.tensor:
            before.append(f"const int left = min({rows}, m - row_tile * {rows});")
        after: list[str] = []
        (before if ahead else after).extend(self.tile_level)
        for row_level, body in groups:
            if ahead:
                before += row_level
                after += ["{", *indented(body), "}"]
            else:
                after += ["{", *indented([*row_level, *body]), "}"]
        return before, after

    def _printer(self, register: Register, load: Any, **more: str) -> Text:
        own = (self.t, self.n, self.b, self.first, self.row, self.part)
        own = (*own, *self.slots.values(), *self.kernel.scalars)
        names = {v: str(v.name) for v in (*self.kernel.at.all, *own)}
        return Text(names | {self.own: "g"}, load)

    def _token(self) -> PrimExpr:
        """The row of x of a tile of the sums of a thread."""
        return self.n * i64(8) + self.t * i64(2) + self.b

    def _stored_token(self) -> PrimExpr:
        """That of what it stores."""
        return self.n * i64(8) + self.own

    def _group(self, registers: Sequence[Register]) -> tuple[list[str], list[str]]:
        """Some registers whose values are stored together: loads, and the loop over rows of x."""
        self.row_level, self.inner_level = [], {}
        values: dict[tuple[Register, int], str] = {}
        for register, b in product(registers, range(2)):
            values[register, b] = self._value(register, b)
        inner: list[str] = []
        if self.words:
            inner += self._residual(registers)
            count = len(registers)
            inner.append(f"uint32_t words[{count}];")
            for i, register in enumerate(registers):
                low, high = values[register, 0], values[register, 1]
                inner.append(
                    f"words[{i}] = bs_transpose8({CLASS[self.view.dtype]}::pack({low}, {high}));"
                )
            inner += self._store_words(registers)
        else:
            for (register, b), value in values.items():
                inner += self._store_element(register, b, value)
        row_level, self.row_level = self.row_level, []
        first = [line for lines in self.inner_level.values() for line in lines]
        return row_level, [
            "#pragma unroll",
            f"for (int n = 0; n < {self.rows // 8}; ++n) {{",
            "  if (8 * n >= left) break;",
            *self._unless_mine(registers),
            *indented([*first, *inner]),
            "}",
        ]

    def _unless_mine(self, registers: Sequence[Register]) -> list[str]:
        """Go on where another warp or CTA has added up the sums of these registers."""
        k = self.kernel
        if not k.shared_sums:
            return []
        unit = min(self._tiles_of(registers)) // k.unit_tiles * self.rows // 8
        cta, own = "cta" if k.ctas > 1 else "0", "slice" if k.own_slices > 1 else "0"
        return [f"  if (!Sums::mine({unit} + n, {cta}, {own})) continue;"]

    # ---- Which sums are stored together -------------------------------------------------------

    def unit_tiles(self) -> int:
        """Tiles of 16 rows whose sums a warp needs to store what lies together."""
        size = self._together()
        groups = [self.registers[i : i + size] for i in range(0, len(self.registers), size)]
        most = max(len(self._tiles_of(group)) for group in groups)
        for count in range(most, self.kernel.tiles_m):
            units = [{m // count for m in self._tiles_of(group)} for group in groups]
            if self.kernel.tiles_m % count == 0 and all(len(unit) == 1 for unit in units):
                return count
        return self.kernel.tiles_m

    def _tiles_of(self, registers: Sequence[Register]) -> set[int]:
        """Tiles of 16 rows whose sums the values of registers are made of."""
        token = substituted(self._token(), {self.b: i64(0)})
        return {
            self._register_of([self._at(i, register, token, self.own) for i in load.indices], 0)[0]
            for register, load in product(registers, self._sums())
        }

    def _value(self, register: Register, b: int) -> str:
        """The float32 of one element before it is rounded."""
        value = self.body.value
        if self.words:
            if kind(value) != "Cast":
                raise LoweringError(f"{self.site.where}: {self.view.dtype} is stored of no cast")
            value = value.value
        token = substituted(self._token(), {self.b: i64(b)})
        placed = self._at(value, register, token, self.own)

        def load(buffer: Any, indices: Sequence[PrimExpr]) -> str:
            return self._load(buffer, indices, register, b)

        return self._printer(register, load)(placed)

    def _load(self, buffer: Any, indices: Sequence[PrimExpr], register: Register, b: int) -> str:
        name = str(buffer.name)
        if name == self.kernel.acc:
            return self._sum(indices, b)
        if name not in self.kernel.views:
            raise LoweringError(f"{self.site.where} reads {name}, neither a parameter nor the sums")
        view = self.kernel.views[name]
        used = {v for index in indices for v in variables(index)}
        if self.n in used:
            if self.words and self._stored_alike(view, indices, register, b):
                i = self.registers.index(register)
                half = ("lo", "hi")[b]
                self.values[f"residual {i}"] = name
                return f"{CLASS[view.dtype]}::{half}({name}_words[{self._place_of(register)}])"
            token = "8 * n + 2 * t" + (" + 1" if b else "")
            if self.own in used and not self.kernel.has_first:
                return self._element(view, indices, token)
            return self._row_element(view, register, b, token)
        key = f"{name}{list(map(str, indices))}"
        per_tile = self.own not in used
        if key not in self.values:
            self.values[key] = f"{name}_{len(self.values)}"
            text = f"const float {self.values[key]} = {self._element(view, indices)};"
            (self.tile_level if per_tile else self.row_level).append(text)
        return self.values[key]

    def _row_element(self, view: View, register: Register, b: int, token: str) -> str:
        """One number of a row of x, the same for all rows of the weight.

        Lane l loads those of rows l, l + 32, .. of the tile, before the loop over rows of x.
        """
        load = next(n for n in loads(self.body.value) if str(n.source.name) == view.name)
        indices = [self._at(index, register, self.row, self.own) for index in load.indices]
        if view.dtype != "float32" or self.own in {v for i in indices for v in variables(i)}:
            raise LoweringError(
                f"{self.site.where}: {view.name}{list(load.indices)} is not one float32 of a row "
                "of x"
            )
        name = f"{view.name}_{b}"
        if name not in self.inner_level:
            shuffled = f"__shfl_sync(0xFFFFFFFFu, {view.name}_of[n / 4], ({token}) % 32)"
            lines = [f"const float {name} = {shuffled};"]
            if view.name in self.kernel.optional:
                null = number(self.kernel.optional[view.name])
                lines = [f"float {name} = {null};", f"if ({view.name}) {name} = {shuffled};"]
            self.inner_level[name] = lines
        if f"{view.name}_of" not in self.values:
            self.values[f"{view.name}_of"] = view.name
            printer = self._printer(self.registers[0], self._no_load)
            address = self._address(view, indices, printer)  # which may need slots
            count = -(-self.rows // 32)
            there = (
                f"{view.name} && row < left" if view.name in self.kernel.optional else "row < left"
            )
            null = number(self.kernel.optional.get(view.name, 0.0))
            self.tile_level += [
                f"float {view.name}_of[{count}];",
                "#pragma unroll",
                f"for (int i = 0; i < {count}; ++i) {{",
                "  const int row = 32 * i + lane;",
                f"  {view.name}_of[i] = {there} ? __ldg({address}) : {null};",
                "}",
            ]
        return name

    def _no_load(self, buffer: Any, indices: Any) -> str:
        raise LoweringError(f"{self.site.where}: an index reads {buffer.name}{list(indices)}")

    def _place_of(self, register: Register) -> int:
        size = self._together()
        return self.registers.index(register) % size

    def _sum(self, indices: Sequence[PrimExpr], b: int) -> str:
        """A register of the sums."""
        m, h = self._register_of(indices, b)
        return f"c[{m}][4 * n + {2 * h + b}]"

    def _register_of(self, indices: Sequence[PrimExpr], b: int) -> tuple[int, int]:
        """Tile of 16 rows, and half of it, of a sum that a thread has."""
        k, at = self.kernel, self.kernel.at
        *_, token, row = indices
        first = at.warp * i64(16 * k.tiles_m) if k.warps > 1 else i64(0)
        moved = {tile: i64(0) for tile in at.tiles.values()}
        offset = self.analyzer.simplify(substituted(row, moved) - first - self.own)
        own = substituted(self._token(), {self.b: i64(b)})
        if k.tensor and not k.has_first:
            parts = i64(0) if self.part_loop is None else self.part * i64(k.slices)
            parts = parts + at.slice if k.slices > 1 else parts
            own = own + parts * i64(self.rows)
        same = self.analyzer.simplify(substituted(token, moved) - own)
        cols = at.tiles["cols"]
        if k.col_tiles > 1 and self.numbers(row, {cols: 1}) - self.numbers(row, {}) != k.cols_tile:
            raise LoweringError(f"{self.site.where}: sums of another tile are read")
        if not is_int(offset) or int(offset) % 8 or not is_int(same) or int(same):
            raise LoweringError(
                f"{self.site.where}: sum {list(indices)} is another thread's than the one that "
                "needs it; a thread has rows of w that are 8 apart"
            )
        return int(offset) // 16, int(offset) % 16 // 8

    # ---- Parameters -------------------------------------------------------------------------

    def _index(self, view: View, indices: Sequence[PrimExpr]) -> list[PrimExpr]:
        return [self._in_group(self.analyzer.simplify(index)) for index in view.index(indices)]

    def _in_group(self, index: PrimExpr) -> PrimExpr:
        """An index by the tile's first row of x, its expert, and what tables have for its rows."""
        if not self.kernel.has_first:
            return index
        index = replaced(index, self._of_table)
        rows = self.kernel.at.tiles["rows"]
        step = self._step(index, rows)
        if step == 0:
            return index
        if step != self.kernel.rows_tile:
            raise LoweringError(f"{self.site.where}: index {index} is no row of x of the tile")
        return self.analyzer.simplify(substituted(index, {rows: i64(0)}) + self.first)

    def _of_table(self, load: Any) -> PrimExpr:
        """What stands for an element of a table: the tile's expert, or what a row of x has."""
        at, name = self.kernel.at, str(load.source.name)
        if name == EXPERT:  # of the loops over tiles, as for the weights that the tile has
            return at.expert
        if name != ORDER:
            raise LoweringError(f"{self.site.where}: an index reads {load}")
        (flat,) = self.kernel.views[ORDER].index(load.indices)
        place = self._in_group(self.analyzer.simplify(flat)) - self.first
        tokens = self._stored_token(), self.row
        for own, token in zip(self.slots.values(), tokens, strict=True):
            if is_zero(place - token):
                if not any("bs_load_slots" in line for line in self.tile_level):
                    count = -(-self.rows // 32)
                    self.tile_level += [
                        f"int slots[{count}];",
                        f"bs_load_slots(slots, {ORDER} + first, left, lane);",
                    ]
                return own
        raise LoweringError(f"{self.site.where}: {load} is not of a row of x that the thread has")

    def _limits(self, view: View, indices: Sequence[PrimExpr], printer: Text) -> list[str]:
        """Conditions that an element is one of those that there are, of its columns."""
        made = []
        at = 0
        for dim, index in zip(view.dims, self._index(view, indices), strict=True):
            padded = 1
            for size in view.shape[at : at + dim.merged]:
                padded = padded * int(size) if is_int(size) else 0
            at += dim.merged
            if dim.extent is not None and padded > dim.extent:
                made.append(f"{printer(index)} < {dim.extent}")
        return made

    def _address(self, view: View, indices: Sequence[PrimExpr], printer: Text) -> str:
        parts = []
        for index, pitch in zip(self._index(view, indices), view.pitches, strict=True):
            text = printer(index)
            parts.append(text if pitch == 1 else f"int64_t({text}) * {pitch}")
        return f"{view.name} + ({' + '.join(parts)})"

    def _element(self, view: View, indices: Sequence[PrimExpr], token: str = "") -> str:
        """One element as float32; where there is none, what stands for a null parameter, or 0."""
        printer = self._printer(self.registers[0], self._no_load)
        address = self._address(view, indices, printer)
        if view.dtype == "float32":
            text = f"__ldg({address})"
        elif view.dtype in CLASS:
            text = f"{CLASS[view.dtype]}::lo(__ldg({address}))"
        else:
            raise LoweringError(f"{self.site.where}: no load of {view.dtype}")
        null = self.kernel.optional.get(view.name)
        conditions = [view.name] if null is not None else []
        conditions += [f"{token} < left"] if token else []
        conditions += self._limits(view, indices, printer)
        other = number(null or 0.0)
        return f"({' && '.join(conditions)} ? {text} : {other})" if conditions else text

    def _stored_alike(
        self, view: View, indices: Sequence[PrimExpr], register: Register, b: int
    ) -> bool:
        """Whether an element lies where the one that is stored does."""
        if view.dtype not in CLASS or view.pitches != self.view.pitches:
            return False
        token = substituted(self._token(), {self.b: i64(b)})
        stored = [self._at(index, register, token, self.own) for index in self.body.indices]
        pairs = zip(view.index(indices), self.view.index(stored), strict=True)
        differ = (self.analyzer.simplify(a - b) for a, b in pairs)
        return all(is_int(d) and int(d) == 0 for d in differ)

    # ---- Stores -----------------------------------------------------------------------------

    def _column(self, register: Register, e: PrimExpr) -> PrimExpr:
        """The column of y of what a thread stores of a register."""
        row = self.t * i64(2) + e
        indices = [self._at(i, register, self._stored_token(), row) for i in self.body.indices]
        return self.view.index(indices)[-1]

    def _samples(self) -> list[dict[Any, int]]:
        at = self.kernel.at
        tiles, warps = range(4), range(self.kernel.warps)
        return [
            {at.tiles["cols"]: c, at.warp: w, self.t: t}
            for c, w, t in product(tiles, warps, range(4))
        ]

    def _run(self, registers: Sequence[Register]) -> int:
        """Bytes to which the first column is aligned, if the registers' words are neighbours."""
        if not self.words:
            return 0
        aligned = 0
        exprs = [self._column(r, i64(e)) for r, e in product(registers, range(2))]
        for sample in self._samples():
            columns = [self.numbers(expr, sample) for expr in exprs]
            if columns != list(range(columns[0], columns[0] + len(columns))):
                return 0
            aligned = gcd(aligned, 2 * columns[0])
        return aligned or 16

    def _together(self) -> int:
        """Registers whose words are stored together."""
        for size in (4, 2, 1):
            whole = len(self.registers) % size == 0
            groups = [self.registers[i : i + size] for i in range(0, len(self.registers), size)]
            if whole and all(self._run(group) for group in groups):
                return size
        if self.words:
            raise LoweringError(
                f"{self.site.where}: neighbouring rows of w of a thread are no neighbours in "
                f"{self.view.name}; order rows so that they are"
            )
        return 1

    def _wide(self, registers: Sequence[Register]) -> int:
        """Bytes of a store: to what columns, rows and the run are aligned."""
        pitch = (self.view.dims[-1].extent or 0) * 2
        return gcd(gcd(self._run(registers), pitch), 4 * len(registers), 16)

    def _first(self, registers: Sequence[Register]) -> tuple[str, str]:
        """Address of the first element of a run in y, and its column; of `addressed` its row."""
        printer = self._printer(registers[0], self._no_load)
        row = self.t * i64(2)
        indices = [self._at(i, registers[0], self._stored_token(), row) for i in self.body.indices]
        *outer, column = self._index(self.view, indices)
        slot = self.slots["slot"]
        if any(v.same_as(slot) for index in outer for v in variables(index)):
            row_of = f"const int {slot.name} = bs_slot(slots, n, 8 * n + g);"
            self.inner_level["slot"] = [row_of]
        if self.view.name in self.kernel.addressed:
            (index,) = outer
            return printer(index), printer(column)
        parts = [
            f"int64_t({printer(index)}) * {pitch}"
            for index, pitch in zip(outer, self.view.pitches, strict=False)
        ]
        return " + ".join([*parts, self._column_name(registers)]), printer(column)

    def _column_name(self, registers: Sequence[Register]) -> str:
        return f"column_{self.registers.index(registers[0])}"

    def _store_words(self, registers: Sequence[Register]) -> list[str]:
        size, wide = 4 * len(registers), self._wide(registers)
        address, column = self._first(registers)
        self.row_level.append(f"const int {self._column_name(registers)} = {column};")
        limit = (self.view.dims[-1].extent or 0) * 2
        to = f"{self.view.name} + ({address})"
        if self.view.name in self.kernel.addressed:
            to = f"bs_row_at({self.view.name}, {address}) + 2 * {self._column_name(registers)}"
        return [
            f"if (8 * n + g < left) bs_store_run<{size}, {wide}>({to}, "
            f"words, {limit} - 2 * {self._column_name(registers)});"
        ]

    def _residual(self, registers: Sequence[Register]) -> list[str]:
        """Words of a parameter that lies as y does, back to where the sums are."""
        names = dict.fromkeys(
            self.values[key]
            for key in [f"residual {self.registers.index(r)}" for r in registers]
            if key in self.values
        )
        lines = []
        count, wide = len(registers), self._wide(registers)
        limit = (self.view.dims[-1].extent or 0) * 2
        for name in names:
            address, _ = self._first(registers)
            lines += [
                f"uint32_t {name}_words[{count}] = {{}};",
                f"if ({name}) {{",
                f"  if (8 * n + g < left) bs_load_words<{4 * count}, {wide}>({name}_words, "
                f"{name} + ({address}), {limit} - 2 * {self._column_name(registers)});",
                "#pragma unroll",
                f"  for (int q = 0; q < {count}; ++q) {name}_words[q] = "
                f"bs_transpose8({name}_words[q]);",
                "}",
            ]
        return lines

    def _store_element(self, register: Register, b: int, value: str) -> list[str]:
        """A float32, where the sums are."""
        printer = self._printer(register, self._no_load)
        token = substituted(self._token(), {self.b: i64(b)})
        indices = [self._at(index, register, token, self.own) for index in self.body.indices]
        guards = [f"8 * n + 2 * t{' + 1' if b else ''} < left"]
        guards += self._limits(self.view, indices, printer)
        address = self._address(self.view, indices, printer)
        return [f"if ({' && '.join(guards)}) *({address}) = {value};"]
