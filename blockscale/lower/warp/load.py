"""The warp that loads: codes, scales and rows of x, by bulk copies (TMA) or by cp.async."""

from __future__ import annotations

from blockscale.lower.pipe.text import indented
from blockscale.lower.warp.frame import Frame
from blockscale.lower.warp.kernel import CONTROL_BYTES, Runs
from blockscale.lower.warp.read import ORDER

AHEAD_BYTES = 20 << 10
"""Of a CTA, that come from memory while the kernel before ends.  Rows of x queue up behind them."""


class Loads(Frame):
    """Prints the warp that loads."""

    def lines(self) -> list[str]:
        """Codes, scales and rows of x of all tiles."""
        k, rows = self.kernel, self.kernel.rows
        if rows.how == "row":
            return self._divided()
        body = [*self._first_weights(), *self._first_rows()]
        # Where tiles of rows of w follow each other, those of the next rows of x read w again.
        once = "true" if k.fastest == "rows" else "false"
        first = ["uint32_t stage = 0, parity = 0;", f"const uint64_t policy = bs_policy({once});"]
        if k.copies == "async":  # none may be on its way when the warp ends
            tiles = self.tiles([*body, *self.stages(self._async_stage)])
            return [*first, *tiles, "bs_cp_async_wait_all();"]
        keep = [] if rows.tma else ["const uint64_t keep = bs_policy(false);"]
        loop = self.tiles([*body, *self.stages(self._bulk_stage)])
        begun = ["bs_cluster_wait();  // all CTAs have begun"] if k.multicast > 1 else []
        if k.after is None:
            return [*first, *keep, *begun, *loop]
        return [*first, *keep, *self._ahead(), *begun, "bs_grid_wait();", *loop]

    def _ahead(self) -> list[str]:
        """Codes and scales of the first tile's first stages: no kernel before writes them."""
        k = self.kernel
        number = self.whole_stages()
        few = min(k.stages, AHEAD_BYTES // k.stage_bytes + 1)
        most = str(min(int(number), few)) if number.isdigit() else f"min({number}, {few})"
        size = self._row_loads(k.blocks, False)[-1]
        stage = [
            f"const uint32_t at = smem + {CONTROL_BYTES} + k * {k.stage_bytes};",
            "const uint32_t full = smem + 8 * k;",
            f"bs_mbar_expect(full, {self._expected(k.blocks)} + {size});",
            *self._weight_runs(k.blocks, "full"),
        ]
        return [
            "int ahead = 0;  // stages whose codes and scales are on their way",
            *self.tiles(
                [
                    *self._first_weights(),
                    *self._first_rows(),
                    f"ahead = {most};",
                    "for (int k = 0; k < ahead && lane == 0; ++k) {",
                    *indented(stage),
                    "}",
                ],
                first_alone=True,
            ),
        ]

    def _divided(self) -> list[str]:
        """The first warp loads weights, by one lane; the others rows of x."""
        k = self.kernel
        weights = [
            "uint32_t stage = 0, parity = 0;",
            "const uint64_t policy = bs_policy(true);",
            *self.tiles([*self._first_weights(), *self.stages(self._weight_stage)]),
        ]
        step = 4 * k.row_loaders
        count = -(-k.rows_tile // step)
        names = {"sorted": "from", "slot": "__ldg(order + from)"}
        pitch = self.channels * k.rows.slot.item // 16
        rows = [
            "uint32_t stage = 0, parity = 0;",
            f"const int begin = (warp_id - {k.consumers + 1}) * 4 + lane / 8, piece = lane % 8;",
            f"const uint32_t to = {k.rows.slot.at} + begin * {k.rows.row_stride} + "
            f"{self._piece()};",
            f"const uint4 *row = reinterpret_cast<const uint4 *>({k.rows.view.name}) + piece;",
            *self.tiles(
                [
                    f"const int mine = (left - begin + {step - 1}) / {step};",
                    f"uint32_t source[{count}];  // in 16 bytes",
                    "#pragma unroll",
                    f"for (int i = 0; i < {count}; ++i) {{",
                    f"  const int from = first + begin + i * {step};",
                    f"  source[i] = i < mine ? {self.expr(k.rows.row, **names)} * {pitch}u : 0;",
                    "}",
                    *self.stages(self._row_stage),
                ]
            ),
            "bs_cp_async_wait_all();",
        ]
        waits = [name for name in self._read_by_rows() if name in (k.after or ())]
        wait = ["bs_grid_wait();"] if waits and not self.waits_first() else []
        return [
            f"if (warp_id == {k.consumers}) {{",
            "  if (lane == 0) {",
            *indented(weights, 2),
            "  }",
            "} else {",
            *indented([*wait, *rows]),
            "}",
        ]

    def _piece(self) -> str:
        """Where a lane's 16 bytes of a row lie behind the row's beginning."""
        if not self.kernel.by_bytes:
            return "(piece ^ begin & 7) * 16"
        return f"piece / 4 * {self.kernel.rows.block_stride} + (piece % 4 ^ begin / 2 & 3) * 16"

    def _read_by_rows(self) -> list[str]:
        """Parameters that the warps which copy rows of x read."""
        return [self.kernel.rows.view.name, ORDER]

    def _weight_stage(self, blocks: int, last: bool) -> list[str]:
        """Bulk copies of codes and scales."""
        return [
            self.at(),
            f"bs_mbar_wait({self.empty}, parity ^ 1);",
            f"bs_mbar_expect({self.full}, {self._expected(blocks)});",
            *self._weight_runs(blocks, self.full),
            self.next(),
        ]

    def _expected(self, blocks: int) -> str:
        """Bytes of codes and scales in a stage."""
        both = (self.kernel.weights, self.kernel.scales)
        counts = sum(self._stage_bytes(load, blocks) for load in both)
        return f"{self.ragged()} * {counts}" if self.ragged() else str(counts)

    def _weight_runs(self, blocks: int, full: str) -> list[str]:
        """Bulk copies of codes and scales, which arrive at ``full``."""
        both = (self.kernel.weights, self.kernel.scales)
        return [line for load in both for line in self._runs(load, blocks, full)]

    def _row_stage(self, blocks: int, last: bool) -> list[str]:
        """Rows of x, 16 bytes of a lane; rows that a tile does not have are not loaded."""
        k, rows = self.kernel, self.kernel.rows
        step = 4 * k.row_loaders
        channel = self.expr(rows.channel)
        sizes = f"{-(-k.rows_tile // step)}, {step}, {blocks}, {rows.block_stride}"
        if k.by_bytes:
            copy = f"bs_async_halves<{sizes}>(at + to, row + {channel} / 16, source, mine, piece);"
        else:
            copy = f"bs_async_pieces<{sizes}>(at + to, row + {channel} / 8, source, mine);"
        return [
            self.at(),
            f"bs_mbar_wait({self.empty}, parity ^ 1);",
            copy,
            f"bs_cp_async_arrive({self.full});",
            self.next(),
        ]

    def _bulk_stage(self, blocks: int, last: bool) -> list[str]:
        """Bulk copies by the first lane, those of rows of x by a lane each."""
        before, by_one, by_lanes, size = self._row_loads(blocks, last)
        early = self.kernel.after is not None
        weights = [
            f"bs_mbar_expect({self.full}, {self._expected(blocks)} + {size});",
            *self._weight_runs(blocks, self.full),
        ]
        return [
            self.at(),
            f"bs_mbar_wait({self.empty}, parity ^ 1);",
            *before,
            f"if (lane == 0{' && ahead <= 0' if early else ''}) {{",
            *indented(weights),
            "}",
            *(["--ahead;"] if early else []),
            "__syncwarp();",
            *(["if (lane == 0) {", *indented(by_one), "}"] if by_one else []),
            *by_lanes,
            self.next(),
        ]

    def _async_stage(self, blocks: int, last: bool) -> list[str]:
        """Copies by all lanes; each lane arrives when its own are done."""
        k, rows, extent = self.kernel, self.kernel.rows, self.channels
        pieces = 8 * blocks
        held = pieces - (64 - extent % 64) // 8 if last and extent % 64 else pieces
        sizes = f"{pieces}, {held}, {rows.row_stride}, {extent}"
        return [
            self.at(),
            f"bs_mbar_wait({self.empty}, parity ^ 1);",
            *self._runs(k.weights, blocks, self.full),
            *self._runs(k.scales, blocks, self.full),
            f"bs_async_rows<{sizes}>(at + {rows.slot.at}, from + k * {64 * k.blocks}, left, lane);",
            f"bs_cp_async_arrive({self.full});",
            self.next(),
        ]

    def _row_loads(self, blocks: int, last: bool) -> tuple[list[str], list[str], list[str], str]:
        """Of rows of x in a stage: what comes first, loads of one lane and of all, and bytes."""
        k, rows = self.kernel, self.kernel.rows
        if rows.tma:
            box = k.rows_tile * rows.box_row
            loads = [self._box(b) for b in range(blocks)]
            return [], loads, [], str(blocks * box)
        extent, channels = self.channels, 64 * blocks
        before: list[str] = []
        if last and extent % 64:
            channels -= 64 - extent % 64
            before = self._zeros(blocks, extent % 64)
        copies = [
            "for (int i = lane; i < left; i += 32)",
            f"  bs_bulk_load(at + {rows.slot.at} + i * {rows.row_stride}, "
            f"from + int64_t(i) * {extent} + k * {64 * k.blocks}, {2 * channels}, "
            f"{self.full}, keep);",
        ]
        return before, [], copies, f"left * {2 * channels}"

    def _box(self, block: int) -> str:
        """The copy of a block of rows of x; of CTAs that share them, each copies some for all."""
        k, rows = self.kernel, self.kernel.rows
        to, channel = rows.slot.at + block * rows.block_stride, f"(k * {k.blocks} + {block}) * 64"
        args = f"at + {to}, &map_{rows.view.name}, channel + {channel}, row, {self.full}"
        if k.multicast == 1:
            return f"bs_tma_load_2d<1>({args});"
        turn = f"if (mate == {block % k.multicast}) "
        return f"{turn}bs_tma_load_2d_multicast<1>({args}, {(1 << k.multicast) - 1}u);"

    def _zeros(self, blocks: int, rest: int) -> list[str]:
        """Zeros in the channels of the last block that x does not have: a NaN times 0 is no 0."""
        rows = self.kernel.rows
        first = rows.slot.at + (blocks - 1) * rows.block_stride + 2 * rest
        pieces = (64 - rest) // 8
        return [
            f"for (int i = lane; i < left * {pieces}; i += 32)",
            f"  bs_store16_shared(at + {first} + i / {pieces} * {rows.row_stride} + "
            f"i % {pieces} * 16, make_uint4(0, 0, 0, 0));",
            "__syncwarp();",
        ]

    def _first_rows(self) -> list[str]:
        """Where a tile's rows of x begin, and how many there are."""
        k, rows, extent = self.kernel, self.kernel.rows, self.channels
        row, channel = self.expr(rows.row), self.expr(rows.channel, k="0")
        if rows.tma:
            return [f"const int row = {row}, channel = {channel};"]
        return [
            f"const int left = min({k.rows_tile}, m - row_tile * {k.rows_tile});",
            f"const uint16_t *from = {rows.view.name} + (int64_t({row}) * {extent} + {channel});",
        ]

    def _stage_bytes(self, load: Runs, blocks: int) -> int:
        """Bytes of a stage, or of a block of 64 rows of it where their number varies."""
        along = -(-blocks // load.per_block)
        rows = 1 if self.ragged() else self.bands()
        return along * load.block_bytes * rows

    def _first_weights(self) -> list[str]:
        """Where a tile's weights begin."""
        lines = []
        if self.ragged():
            bands, whole = self.bands(), self.kernel.bands
            lines.append(f"const int bands = min({bands}, {whole} - col_tile * {bands});")
        for load in (self.kernel.weights, self.kernel.scales):
            address = self._global(load)
            lines.append(f"const uint8_t *{load.view.name}_at = {load.view.name} + {address};")
        return lines

    def _global(self, load: Runs) -> str:
        parts = []
        for index, pitch in zip(load.first, load.view.pitches, strict=True):
            text = self.expr(index, k="0")
            parts.append(f"int64_t({text}) * {pitch * load.slot.item}")
        return f"({' + '.join(parts)})"

    def _runs(self, load: Runs, blocks: int, full: str) -> list[str]:
        """Copies of one buffer of a stage of so many blocks of 64 k."""
        along = -(-blocks // load.per_block)
        per_stage = self.kernel.blocks // load.per_block or 1
        step = load.view.pitches[-2] * load.slot.item * per_stage
        lines = []
        for differ, offset in load.parts:
            band, block = differ[-3], differ[-2]
            if block >= along:
                continue
            size = min(load.blocks, along - block) * load.block_bytes
            pitches = [pitch * load.slot.item for pitch in load.view.pitches]
            moved = sum(d * p for d, p in zip(differ, pitches, strict=True))
            guard = f"if ({band} < bands) " if self.ragged() and band else ""
            to = f"at + {load.slot.at + offset}"
            source = f"{load.view.name}_at + int64_t(k) * {step} + {moved}"
            if self.kernel.copies == "async":
                lines.append(f"{guard}bs_async_run<{size}>({to}, {source}, lane, policy);")
            else:
                lines.append(f"{guard}bs_bulk_load({to}, {source}, {size}, {full}, policy);")
        return lines
