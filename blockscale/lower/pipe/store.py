"""The warps that store: the epilogue's blocks, a part of a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.elements import CLASS, Elements, c_name
from blockscale.lower.pipe.kernel import Kernel, Transfer
from blockscale.lower.pipe.read import Loop, Site, View, substituted
from blockscale.lower.pipe.text import declarations, indented, loads
from blockscale.lower.pipe.tile import Tile
from blockscale.tir.common import i64


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
    return Store(kernel, tile).text()


class Store(Elements):
    """Prints the storing warps of one kernel."""

    # ---- Tiles ------------------------------------------------------------------------------

    def text(self) -> list[str]:
        """All of the role."""
        k, at = self.kernel, self.kernel.places
        body = self._chunk()
        lines = self._staging()
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
                *self.tile.after_stores,
            ],
            count="number",
        )
        begin = [f"const uint32_t free = {leader};", "uint32_t number = 0;"]
        return [*begin, *lines, *loop, *self._sent(), *self.tile.at_end]

    def _staging(self) -> list[str]:
        """Where a warp stages what TMA stores."""
        if not self.epilogue.stores:
            return []
        staging = sum(2 * move.slot.bytes for move in self.epilogue.stores.values())
        place = self.kernel.places["out"]
        return [
            f"const uint32_t staging = smem + {place} + warp * {staging};",
            "uint32_t buffer = 0;",
        ]

    def _sent(self) -> list[str]:
        """Wait for the last stores."""
        return ["if (lane == 0) bs_bulk_wait<0>();"] if self.epilogue.stores else []

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
            self._used(),
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

    def _used(self) -> str:
        """Whether d, or what fills its last tile of scales, has any of a part of a tile."""
        rows = "x_padded" if self.pads else "x_left"
        return f"const bool used = {rows} > 0 && chunk * {self.epilogue.columns} < y_left;"

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
            name = c_name(loops[0].var.name)
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
        name, of = c_name(body.buffer.name), str(body.buffer.dtype)
        declared = self._declare(site, body.buffer, body.indices)
        place = self._register(body.buffer, body.indices)
        if of in CLASS:
            (loop,) = site.loops
            if self._step(place, loop.var) != 1 or loop.extent % 2:
                raise LoweringError(f"{site.where}: {of} is kept in pairs of neighbours")
            first = self._printer(site)(substituted(place, {loop.var: i64(0)}))
            pair = f"reinterpret_cast<uint32_t *>({name} + {first})[q]"
            return [*declared, *self._in_words(site, loop, of, pair)]
        text = self._printer(site)
        return [*declared, *self._loops(site, [f"{name}[{text(place)}] = {text(body.value)};"])]

    # ---- Stores -----------------------------------------------------------------------------

    def _along(self, site: Site, view: View, indices: Sequence[PrimExpr]) -> Any:
        """The loop along neighbours of a parameter's last dimension; None if there is none."""
        *outer, last = view.index(indices)
        for loop in site.loops:
            if self._step(last, loop.var) == 1 and not any(self._step(i, loop.var) for i in outer):
                return loop
        return None

    def _direct(self, site: Site, view: View) -> list[str]:
        """A block that writes a parameter."""
        body = site.body
        assert body is not None
        loop = self._along(site, view, body.indices)
        printer = self._printer(site)
        if loop is not None and loop.extent * view.item >= 4 and len(site.loops) == 1:
            first = [substituted(index, {loop.var: i64(0)}) for index in body.indices]
            words = self._words(site, loop, view.dtype)
            guard = self._guard([*self._own_lane(), *self._inside(view, first, printer, True)])
            return [
                "{",
                *indented([*words, f"{guard}{self._run_out(view, first, loop.extent, printer)}"]),
                "}",
            ]
        bits = self._bits(body.value, view.dtype, printer)
        steps = [
            self._step(index, each.var) for each in site.loops for index in view.index(body.indices)
        ]
        if len(site.loops) == 1 and [step for step in steps if step != 0] == [1]:
            return self._column(site, view, steps.index(1), bits)
        own = self._own_lane(view.name)
        guard = self._guard([*own, *self._inside(view, body.indices, printer)])
        address = f"{view.name} + {self._address(view, body.indices, printer)}"
        return self._loops(site, [f"{guard}bs_store_element({address}, {bits});"])

    def _column(self, site: Site, view: View, dim: int, bits: str) -> list[str]:
        """Elements along a dimension that is not the last: what they share is ahead of the loop."""
        (loop,), printer = site.loops, self._printer(site)
        assert site.body is not None
        first = [substituted(index, {loop.var: i64(0)}) for index in site.body.indices]
        name, own = c_name(loop.var.name), ""
        lines = [f"auto *to = {view.name} + {self._address(view, first, printer)};"]
        guards = self._own_lane()
        for own_dim, index, end in self._limits(view, first):
            text = printer(self.analyzer.simplify(index))
            if own_dim == dim:
                lines.append(f"const int left = {end} - {text};")
                own = f"if ({name} < left) "
            else:
                guards.append(f"{text} < {end}")
        store = f"{own}bs_store_element(to + {name} * {view.pitches[dim]}, {bits});"
        lines += self._loops(site, [store])
        return [f"{self._guard(guards)}{{", *indented(lines), "}"]

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
        made = [f"const uint32_t code = {self._bits(body.value, view.dtype, printer)};"]
        shared = f"bs_store_shared<{view.item}>({place}, code);"
        if ragged:
            guard = self._guard([*self._own_lane(), *self._inside(view, out, printer)])
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


def _begins_with(site: Site, loop: Loop) -> bool:
    """Whether a block's outermost loop is this one."""
    return bool(site.loops) and site.loops[0].var.same_as(loop.var)
