"""The warps that multiply: they decode fragments, multiply, add up parts of K, and store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.text import Text, indented
from blockscale.lower.warp.epilogue import Epilogue
from blockscale.lower.warp.frame import Frame
from blockscale.lower.warp.kernel import GroupSums, Place
from blockscale.specs.plans.moe import E4M3
from blockscale.tir.intrin.fragments import SHORT
from blockscale.tir.intrin.warp import wgmma_k


class Products(Frame):
    """Prints the warps that multiply."""

    def lines(self) -> list[str]:
        """All of the role."""
        k = self.kernel
        more = self.registers()
        self.before, self.after = Epilogue(k).text(ahead=k.unit == "mma" and not k.has_first)
        return [
            *([f"bs_more_registers<{more}>();"] if more else []),
            *(["bs_grid_wait();"] if k.after is not None and not self.waits_first() else []),
            *(["bs_cluster_wait();  // all CTAs have begun"] if k.cluster > 1 else []),
            f"[[maybe_unused]] const int warp = warp_id % {k.warps}, slice = warp_id / {k.warps};",
            "const int g = lane / 4, t = lane % 4;",
            "uint32_t stage = 0, parity = 0;",
            *self._first_reads(),
            *self._products(),
        ]

    def _products(self) -> list[str]:
        if self.kernel.unit == "mma":
            return self._mma()
        if self.kernel.groups is not None:
            return self._wgmma_groups(self.kernel.groups)
        return self._wgmma_bytes() if self.kernel.by_bytes else self._wgmma()

    def _first_reads(self) -> list[str]:
        """Where a lane's codes, scales and rows of x lie in a stage."""
        k = self.kernel
        own = {"": "g * 64 + (t + g / 2) % 4 * 16", "steps": "g * 64 + t * 4"}
        lane = own.get(k.form.order, "lane * 16")
        lines = [
            f"const uint32_t codes_at = {k.weights.slot.at} + {self.expr(k.codes.first)} + {lane};",
        ]
        if k.factors is not None:
            first = self.expr(k.factors.first)
            lines.append(f"const uint32_t scales_at = {k.scales.slot.at} + {first};")
        if k.groups is not None:
            first = self._lane_row(k.groups.own)(k.groups.scale)
            lines.append(f"const uint32_t groups_at = {k.scales.slot.at} + {first};")
        rows = f"{k.rows.slot.at} + {self.expr(k.tokens.first)}"
        if k.unit == "mma" and k.rows.swizzled:  # its matrix's row, a piece of 16 bytes
            rows += " + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16"
        elif k.unit == "mma":  # a thread's 16 channels are two pieces of 16 bytes
            rows += f" + lane / 4 * {k.rows.row_stride} + lane % 4 * 32"
        if k.copies == "async":  # which change places in odd rows
            rows += " + g % 2 * 16"
        lines.append(f"const uint32_t rows_at = {rows};")
        if k.copies == "async":
            lines.append("const uint32_t others_at = rows_at ^ 16;")
        elif k.unit == "mma" and k.rows.swizzled:
            lines.append("const uint32_t others_at = rows_at ^ 64;")
        if k.form.order == "steps":
            turns = ", ".join(f"(g / 2 + {j}) % 4 * 16u" for j in range(4))
            lines.append(f"const uint32_t turn[4] = {{{turns}}};")
        return lines

    def _lane_row(self, own: Any) -> Text:
        """What prints indices in which a variable is the lane's row among 8."""
        names = {v: str(v.name) for v in self.kernel.at.all} | {own: "g"}
        return Text(names, self._no_load)

    def _no_load(self, buffer: Any, indices: Any) -> str:
        raise LoweringError(f"an index reads {buffer.name}")

    @property
    def decoder(self) -> str:
        """What decodes."""
        bytewise = self.kernel.form.order == "bytes"
        return f"BsDecode{'Bytes' if bytewise else ''}<{self.format}>"

    @property
    def bf16(self) -> str:
        """Whether the 16-bit numbers are bfloat16."""
        return str(self.kernel.form.dtype == "bfloat16").lower()

    def release(self, bar: str, guard: str = "") -> str:
        """Give a stage back, to each CTA that loads into it."""
        many = self.kernel.multicast
        if many == 1:
            return f"if ({guard}lane == 0) bs_mbar_arrive({bar});"
        return f"if ({guard}lane < {many}) bs_mbar_arrive_read(bs_map_rank({bar}, lane));"

    def _rows_fence(self) -> list[str]:
        """What lets wgmma read rows that cp.async wrote."""
        return ["bs_fence_async();"] if self.kernel.rows.how == "row" else []

    def _place(self, of: Place | None, block: int, tile: int) -> int:
        assert of is not None, "decoding takes codes alone"
        return of.steps[block][tile]

    def _end(self) -> list[str]:
        """Sums of slices and CTAs, then the epilogue."""
        return ["{", *indented([*self.added("slice", "warp"), *self.after]), "}"]

    def added(self, slice_: str, warp: str) -> list[str]:
        """What adds up sums of slices and CTAs, in the warps and CTAs that store them."""
        k, lines = self.kernel, []
        if k.shared_sums:
            lines.append(f"using Sums = {k.sums_type};")
        if k.own_slices > 1:
            lines.append(f"Sums::add_slices(smem + {k.sums_at}, {slice_}, {warp}, c, lane);")
        if k.ctas > 1:
            lines.append(
                f"Sums::add_ctas(smem + {k.gathered_at}, smem + {k.sums_bar}, cta, {slice_}, "
                f"{warp}, c, lane);"
            )
        return lines

    def _block(self, inner: int) -> list[str]:
        """Products of a block of 64 k, of the slice's ``inner`` one."""
        k = self.kernel
        lines = [f"uint4 code[{k.tiles_m}];", f"uint2 scale[{k.tiles_m}];"]
        for i in range(k.tiles_m):
            codes, scales = (self._place(p, inner, i) for p in (k.codes, k.factors))
            lines += [
                f"code[{i}] = bs_load16_shared(at + codes_at + {codes});",
                f"scale[{i}] = {self.decoder}::load(at + scales_at + {scales}, lane);",
            ]
        if k.rows.swizzled:
            return [*lines, *self._in_halves(inner)]
        return [*lines, *(self._in_pairs(inner) if k.in_pairs else self._in_one(inner))]

    def _in_halves(self, inner: int) -> list[str]:
        """Rows of x are in registers for 32 positions at a time."""
        k = self.kernel
        n8 = k.rows_tile // 8
        lines: list[str] = []
        for half, words in enumerate(("xy", "zw")):
            at = ("rows_at", "others_at")[half]
            products = [
                f"uint32_t x[{n8}][4];",
                *(
                    f"bs_ldmatrix4(x[{n}], at + {at} + {self._place(k.tokens, inner, n)});"
                    for n in range(n8)
                ),
                "#pragma unroll",
                f"for (int i = 0; i < {k.tiles_m}; ++i) {{",
                f"  const {self.decoder} scales(scale[i]);",
                f"  const uint32_t word[2] = {{code[i].{words[0]}, code[i].{words[1]}}};",
                "#pragma unroll",
                "  for (int j = 0; j < 2; ++j) {",
                "    uint32_t a[4];",
                "    scales.decode(word[j], a);",
                "#pragma unroll",
                f"    for (int n = 0; n < {n8}; ++n)",
                f"      bs_mma16816<{self.bf16}>(c[i] + 4 * n, a, x[n][2 * j], x[n][2 * j + 1]);",
                "  }",
                "}",
            ]
            lines += ["{", *indented(products), "}"]
        return lines

    def _rows(self, inner: int, numbers: Sequence[int]) -> list[str]:
        """Load ``x``, a thread's channels of some rows of x, 8 rows of them at a number."""
        k = self.kernel
        lines = [f"uint4 x[{len(numbers)}][2];"]
        for i, n in enumerate(numbers):
            at = self._place(k.tokens, inner, n)
            other = f"others_at + {at}" if k.copies == "async" else f"rows_at + {at + 16}"
            lines += [
                f"x[{i}][0] = bs_load16_shared(at + rows_at + {at});",
                f"x[{i}][1] = bs_load16_shared(at + {other});",
            ]
        return lines

    def _in_one(self, inner: int) -> list[str]:
        """All rows of x are in registers while weights are decoded."""
        k = self.kernel
        n8 = k.rows_tile // 8
        return [
            *self._rows(inner, range(n8)),
            "#pragma unroll",
            f"for (int i = 0; i < {k.tiles_m}; ++i) {{",
            f"  const {self.decoder} scales(scale[i]);",
            "#pragma unroll",
            "  for (int j = 0; j < 4; j += 2) {",
            "    uint32_t a[2][4];",
            "    bs_decode_two(scales, code[i], j, a);",
            "#pragma unroll",
            f"    for (int n = 0; n < {n8}; ++n)",
            f"      bs_mma_two<{self.bf16}>(c[i] + 4 * n, a, x[n], j);",
            "  }",
            "}",
        ]

    def _in_pairs(self, inner: int) -> list[str]:
        """Decoded weights are in registers while rows of x come, 16 at a time.

        By words: two words' fragments at once take 20 registers more, and spill.
        """
        k = self.kernel
        lines = [
            f"uint32_t a[{k.tiles_m}][4][4];",
            "#pragma unroll",
            f"for (int i = 0; i < {k.tiles_m}; ++i) {{",
            f"  const {self.decoder} scales(scale[i]);",
            "#pragma unroll",
            "  for (int j = 0; j < 4; ++j) scales.decode(bs_word(code[i], j), a[i][j]);",
            "}",
        ]
        for first in range(0, k.rows_tile // 8, 2):
            numbers = range(first, min(first + 2, k.rows_tile // 8))
            products = [
                *self._rows(inner, numbers),
                "#pragma unroll",
                "for (int j = 0; j < 4; ++j) {",
                "#pragma unroll",
                f"  for (int i = 0; i < {k.tiles_m}; ++i) {{",
                "#pragma unroll",
                f"    for (int n = 0; n < {len(numbers)}; ++n)",
                f"      bs_mma16816<{self.bf16}>(c[i] + {4 * first} + 4 * n, a[i][j], "
                "bs_word(x[n][0], j),",
                "                         bs_word(x[n][1], j));",
                "  }",
                "}",
            ]
            lines += ["{", *indented(products), "}"]
        return lines

    def _mma(self) -> list[str]:
        k = self.kernel
        own = k.blocks // k.slices

        def stage(blocks: int, last: bool) -> list[str]:
            lines = [self.at(), f"bs_mbar_wait({self.full}, parity);"]
            for inner in range(own):
                guard = ""
                if blocks < k.blocks:
                    guard = f"if (slice * {own} + {inner} < {blocks}) "
                lines += [f"{guard}{{", *indented(self._block(inner)), "}"]
            # A bulk copy belongs to another proxy, which does not wait for loads that were issued;
            # ptxas puts the arrival right behind them.
            fence = ["bs_fence_async();"] if k.copies == "bulk" else []
            return [
                *lines,
                *fence,
                "__syncwarp();",
                f"if (lane == 0) bs_mbar_arrive({self.empty});",
                self.next(),
            ]

        return self.tiles(
            [
                f"float c[{k.tiles_m}][{k.rows_tile // 2}] = {{}};",
                *self.before,
                *self.stages(stage),
                *self._end(),
            ]
        )

    def _wgmma(self) -> list[str]:
        """While a group of MMAs runs, the next tile of 16 rows is decoded into the other bank."""
        k = self.kernel
        product = f"BsWgmma<{OPERANDS[k.form.dtype]}, {k.rows_tile}>::run"
        # With few rows of x the latency of loads counts, with many registers do.
        early = k.rows_tile <= 96
        steps = k.form.order == "steps"

        def load(inner: int, i: int) -> list[str]:
            unit = inner * k.tiles_m + i
            codes, scales = (self._place(p, inner, i) for p in (k.codes, k.factors))
            if not steps:
                return [
                    f"const uint4 code{unit} = bs_load16_shared(at + codes_at + {codes});",
                    f"const uint2 scale{unit} = "
                    f"{self.decoder}::load(at + scales_at + {scales}, lane);",
                ]
            return [
                f"const uint4 code{unit} = bs_load_steps(at + codes_at + {codes}, turn);",
                f"const BsStepScales<{self.format}> scale{unit}(at + scales_at + {scales}, g);",
            ]

        def stage(blocks: int, last: bool) -> list[str]:
            units = [(inner, i) for inner in range(blocks) for i in range(k.tiles_m)]
            lines = [
                self.at(),
                f"bs_mbar_wait({self.full}, parity);",
                *self._rows_fence(),
            ]
            for inner, i in units if early else []:
                lines += load(inner, i)
            for number, (inner, i) in enumerate(units):
                bank = f"bank{number % 2}"
                if not last or number > 1:  # all products before the last stage are done
                    lines += ["bs_wgmma_wait<1>();", *self._held([number % 2], 16)]
                if number == 1:  # after the reads of all lanes
                    lines += ["__syncwarp();", self.release("before", "before && ")]
                if not early:
                    lines += load(inner, i)
                x = f"bs_wgmma_rows128(at + rows_at + {self._place(k.tokens, inner, 0)})"
                of = f"scale{number}.of<{{}}>()"
                if not steps:
                    lines.append(f"const {self.decoder} scales{number}(scale{number});")
                    of = f"scales{number}"
                lines += [
                    *(
                        f"{of.format(j)}.decode(code{number}.{c}, {bank} + {4 * j});"
                        for j, c in enumerate("xyzw")
                    ),
                    "bs_wgmma_fence();",
                    *(f"{product}(c[{i}], {bank} + {4 * j}, {x} + {2 * j});" for j in range(4)),
                    "bs_wgmma_commit();",
                ]
            if len(units) == 1:  # the stage before has not been given back
                lines[2:2] = [
                    *([] if last else ["bs_wgmma_wait<0>();"]),
                    "__syncwarp();",
                    self.release("before", "before && "),
                ]
            return [*lines, f"before = {self.empty};", self.next()]

        # Before a stage with fewer blocks: where a bank may be in flight, ptxas serialises all.
        done = ["bs_wgmma_wait<0>();", *self._held(range(2), 16)]
        return self._asynchronous([], [*self.stages(stage, before=done), "bs_wgmma_wait<0>();"])

    def _asynchronous(
        self, declared: list[str], products: list[str], banks: int = 2, size: int = 16
    ) -> list[str]:
        """All tiles by wgmma: ``products`` of one, which are done at the end of them.

        ``banks``: of fragments, ``size`` registers each.
        """
        k = self.kernel
        count = k.rows_tile // 2
        return [
            f"float c[{k.tiles_m}][{count}];",
            *declared,
            f"uint32_t {self._banks(banks, size)};",
            *self.tiles(
                [
                    "uint32_t before = 0;",
                    *self.before,
                    "#pragma unroll",
                    f"for (int q = 0; q < {k.tiles_m * count}; ++q) (&c[0][0])[q] = 0.f;",
                    *products,
                    "__syncwarp();",
                    self.release("before"),
                    *self._end(),
                ]
            ),
        ]

    def _wgmma_bytes(self) -> list[str]:
        """The same of operands of 8 bits, 64 of K of a tile of 16 rows at a time: a unit.

        With `Kernel.partial` some units of a tile, a run, have sums of their own: once they are
        done these are added to the tile's, while other warps' products run.  Else a unit is decoded
        while the products of those before run.
        """
        k = self.kernel
        run = k.partial // 64
        banks = run or min(BYTE_BANKS, k.tiles_m * k.blocks)

        def stage(blocks: int, last: bool) -> list[str]:
            units = [(i, b) for i in range(k.tiles_m) for b in range(blocks)]
            # When the products of the stage before are done, after the reads of all lanes.
            release = 0 if run or last else banks - 1
            lines = [
                self.at(),
                f"bs_mbar_wait({self.full}, parity);",
                *self._rows_fence(),
                *self._byte_codes(0, *units[0]),
            ]
            for number, (i, b) in enumerate(units):
                bank = b % run if run else number % banks
                before = units[number - 1][0] if number else k.tiles_m - 1
                taken = self._take(before, banks) if run and b % run == 0 else []
                if last and taken:  # few units: all before are done
                    lines += taken if number else []
                    taken = []
                elif not last and (taken or not run):
                    lines += [f"bs_wgmma_wait<{banks - 1}>();", *self._held([bank])]
                if number + 1 < len(units):
                    lines += self._byte_codes(number + 1, *units[number + 1])
                lines += [
                    f"const {self.decoder} scales{number}(scale{number});",
                    *(
                        f"scales{number}.decode(code{number}.{c}, bank{bank} + {2 * j});"
                        for j, c in enumerate("xyzw")
                    ),
                    # Without the first fence ptxas decodes when the products are done.
                    *(["bs_wgmma_fence();", *taken] if taken else []),
                ]
                if number == release:
                    lines += ["__syncwarp();", self.release("before", "before && ")]
                lines += [
                    "bs_wgmma_fence();",
                    *self._byte_products(i, b, f"bank{bank}"),
                    "bs_wgmma_commit();",
                ]
            if last:
                lines += self._done(k.tiles_m - 1, banks)
            return [*lines, f"before = {self.empty};", self.next()]

        count = k.rows_tile // 2
        none = ["#pragma unroll", f"for (int q = 0; q < {count}; ++q) part[q] = 0.f;"]
        end = self._done(k.tiles_m - 1, banks)
        ended = self._parts()[1] > 0  # by a stage with fewer blocks
        products = [*self.stages(stage, before=end), *([] if ended else end)]
        products = [*none, *products] if run else products
        declared = [f"float part[{count}];"] if run else []
        return self._asynchronous(declared, products, banks=banks, size=8)

    def _banks(self, banks: int, size: int = 8) -> str:
        """Declare registers of fragments."""
        return ", ".join(f"bank{i}[{size}] = {{}}" for i in range(banks))

    def _held(self, banks: Iterable[int], size: int = 8) -> list[str]:
        """Keep fragments in their registers until here: products read them."""
        lines = ["#pragma unroll", f"for (int q = 0; q < {size}; ++q) {{"]
        return [*lines, *(f'  asm volatile("" : "+r"(bank{i}[q]));' for i in banks), "}"]

    def _done(self, i: int, banks: int) -> list[str]:
        """Wait for all products, the last of the ``i``-th tile."""
        if self.kernel.partial:
            return self._take(i, banks)
        return ["bs_wgmma_wait<0>();", *self._held(range(banks))]

    def _byte_codes(self, number: int, i: int, b: int) -> list[str]:
        """Load codes and scales of a unit: of the ``i``-th tile, the stage's ``b``-th block."""
        codes, scales = (self._place(p, b, i) for p in (self.kernel.codes, self.kernel.factors))
        return [
            f"const uint4 code{number} = bs_load16_shared(at + codes_at + {codes});",
            f"const uint2 scale{number} = {self.decoder}::load(at + scales_at + {scales}, lane);",
        ]

    def _byte_products(self, i: int, b: int, bank: str) -> list[str]:
        """Products of a unit, whose fragments are in a bank."""
        k = self.kernel
        product = f"BsWgmma<{OPERANDS[k.form.dtype]}, {k.rows_tile}>::run"
        x = f"bs_wgmma_rows64(at + rows_at + {self._place(k.tokens, b, 0)})"
        lines = []
        for j in range(2):
            begins = k.partial and j == 0 and 64 * b % k.partial == 0
            first = "<0>" if begins else ""
            sums = "part" if k.partial else f"c[{i}]"
            lines.append(f"{product}{first}({sums}, {bank} + {4 * j}, {x} + {2 * j});")
        return lines

    def _take(self, i: int, banks: int) -> list[str]:
        """Wait for the products of a run, and add its sums to those of the ``i``-th tile."""
        return [
            "bs_wgmma_wait<0>();",
            *self._held(range(banks)),
            "#pragma unroll",
            f"for (int q = 0; q < {self.kernel.rows_tile // 2}; ++q) {{",
            '  asm volatile("" : "+f"(part[q]));',
            f"  c[{i}][q] += part[q];",
            "}",
        ]

    # ---- Sums of groups ---------------------------------------------------------------------

    def _wgmma_groups(self, of: GroupSums) -> list[str]:
        """The same where each group of K has sums of its own, a run of MMAs.

        The next run's weights are decoded while its products run; then its sums are scaled and
        added to the tile's, while another warp group's products run.
        """
        k = self.kernel
        whole, count = self.whole_stages(), k.rows_tile // 2
        add_final = ["bs_wgmma_wait<0>();", *self._add(k.tiles_m - 1)]
        release = ["__syncwarp();", self.release("before", "before && ")]

        def stage(blocks: int, last: bool) -> list[str]:
            runs = [(group, i) for group in range(blocks // of.blocks) for i in range(k.tiles_m)]
            lines = [self.at()]
            if last:
                lines += [f"bs_mbar_wait({self.full}, parity);", *self._ahead(of, *runs[0])]
            lines += self._rows_fence()
            for number, (group, i) in enumerate(runs):
                bank = number % 2
                lines += self._decoded(of, bank)
                if number + 1 < len(runs):
                    lines += self._ahead(of, *runs[number + 1])
                if not last:
                    lines.append(f"bs_decoded(bank{bank}, smem);")
                    done = ["bs_wgmma_wait<0>();", *self._add(runs[number - 1][1])]
                    lines += done if number else [*add_final, *release]
                lines += self._scales(of, group, i)
                lines += ["bs_wgmma_fence();", *self._run(of, group, i, bank)]
                lines.append("bs_wgmma_commit();")
                if last:
                    lines += ["bs_wgmma_wait<0>();", *self._add(i)]
            if last:
                return [*lines, f"before = {self.empty};", self.next()]
            return [
                *lines,
                f"before = {self.empty};",
                "const uint32_t own = stage, own_parity = parity;",
                self.next(),
                # Of no further stage they are loaded from this one: a branch between products
                # makes ptxas serialise them.
                f"const bool more = k + 1 < {whole};",
                *self._first_codes(of, "more ? stage : own", "more ? parity : own_parity"),
            ]

        # Before a stage with fewer blocks, whose products are waited for one run after the other.
        ended = self._parts()[1] > 0
        before = [*add_final, *release] if ended else []
        zeros = [
            "#pragma unroll",
            f"for (int q = 0; q < {count}; ++q) part[q] = 0.f;",
            "group_scale[0] = group_scale[1] = 0.f;",
            *(self._first_codes(of, "stage", "parity") if whole != "0" else []),
        ]
        declared = [
            f"float part[{count}], group_scale[2];",
            f"uint4 code[{of.blocks}];",
            "[[maybe_unused]] uint2 zero{};",
        ]
        products = [*zeros, *self.stages(stage, before=before), *([] if ended else add_final)]
        return self._asynchronous(declared, products, banks=2, size=8 * of.blocks)

    def _first_codes(self, of: GroupSums, stage: str, parity: str) -> list[str]:
        """Wait for a stage, and load codes of its first run."""
        wait = self.full.replace("stage", f"({stage})")
        at = self.at().replace("stage", f"({stage})")
        lines = [at, f"bs_mbar_wait({wait}, {parity});", *self._ahead(of, 0, 0)]
        return ["{", *indented(lines), "}"]

    def _ahead(self, of: GroupSums, group: int, i: int) -> list[str]:
        """Load codes of a run, and zeros: long before they are decoded, as MMAs read memory too."""
        k = self.kernel
        first = group * of.blocks
        lines = [
            f"code[{b}] = bs_load16_shared(at + codes_at + {self._place(k.codes, first + b, i)});"
            for b in range(of.blocks)
        ]
        if k.factors is not None:
            at = self._place(k.factors, first, i)
            lines.append(f"zero = {self.decoder}::load(at + scales_at + {at}, lane);")
        return lines

    def _add(self, i: int) -> list[str]:
        """What the function makes of a group's sums, whose products are done, and of the tile's."""
        k, of = self.kernel, self.kernel.groups
        assert of is not None
        body = of.update.body
        assert body is not None
        lines = []
        for high, b in product(range(2), range(2)):
            place = f"[4 * n + {2 * high + b}]"

            def load(buffer: Any, indices: Any, high: int = high, place: str = place) -> str:
                if str(buffer.name) == str(body.buffer.name):
                    return f"c[{i}]{place}"
                if self._is_scale(buffer):
                    return f"group_scale[{high}]"
                return f"part{place}"

            lines.append(f"  c[{i}]{place} = {Text({}, load)(body.value)};")
        count = k.rows_tile // 2
        return [
            "#pragma unroll",
            f'for (int q = 0; q < {count}; ++q) asm volatile("" : "+f"(part[q]));',
            "#pragma unroll",
            f"for (int n = 0; n < {k.rows_tile // 8}; ++n) {{",
            *lines,
            "}",
        ]

    def _is_scale(self, buffer: Any) -> bool:
        return str(buffer.name) == str(self.kernel.scales.slot.buffer.name)  # type: ignore[attr-defined]

    def _scales(self, of: GroupSums, group: int, i: int) -> list[str]:
        """Load the scales of a group of rows g and g + 8 of the ``i``-th tile."""
        low, high = of.steps[group][i]
        if high - low == 2:
            pair = f"bs_load4_shared(at + groups_at + {low})"
            return [f"bs_bf16_pair({pair}, group_scale);"]
        return [
            f"group_scale[{h}] = bs_load_bf16(at + groups_at + {offset});"
            for h, offset in enumerate((low, high))
        ]

    def _decoded(self, of: GroupSums, bank: int) -> list[str]:
        """Decode a run's weights, whose codes are loaded."""
        lines = [
            "#pragma unroll",
            f'for (int q = 0; q < {8 * of.blocks}; ++q) asm volatile("" : "+r"(bank{bank}[q]));',
            "{",
            f"  const {self.decoder} points(zero);",
        ]
        for b, (j, c) in product(range(of.blocks), enumerate("xyzw")):
            lines.append(f"  points.decode(code[{b}].{c}, bank{bank} + {8 * b + 2 * j});")
        return [*lines, "}"]

    def _run(self, of: GroupSums, group: int, i: int, bank: int) -> list[str]:
        """Products of a run, whose fragments are in a bank."""
        k = self.kernel
        issue = f"BsWgmma<{OPERANDS[k.form.dtype]}, {k.rows_tile}>"
        lines = []
        for own, j in product(range(of.blocks), range(2)):
            at = self._place(k.tokens, group * of.blocks + own, 0)
            x = f"bs_wgmma_rows64(at + rows_at + {at})"
            do = "run" if own or j else "run<0>"
            fragment = f"bank{bank} + {8 * own + 4 * j}"
            lines.append(f"{issue}::{do}(part, {fragment}, {x} + {2 * j});")
        return lines


BYTE_BANKS = 4
"""The most units of 64 k of 8-bit operands whose fragments a warp has: products of three run while
it decodes the fourth."""

OPERANDS = {"float16": "BS_OF_F16", "bfloat16": "BS_OF_BF16", E4M3: "BS_OF_E4M3"}
"""Types of operands in CUDA."""


def wgmma(dtype: str, n: int) -> str:
    """Return BsWgmma<.., n>: wgmma.mma_async.m64nN with A in registers (PTX ISA 9.7.15.5)."""
    count, name = n // 2, SHORT[dtype]
    deep, transposed = wgmma_k(dtype), "" if dtype == E4M3 else ", 0"
    guard = f"BS_WGMMA_{name.upper()}_{n}"
    sums = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    return f"""#ifndef {guard}
#define {guard}
template <>
struct BsWgmma<{OPERANDS[dtype]}, {n}> {{
  template <int ADD = 1>
  static BS_INLINE void run(float *c, const uint32_t *a, uint64_t b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{n}k{deep}.f32.{name}.{name} {{{sums}}}, {{{a}}}, "
        "%{count + 4}, %{count + 5}, 1, 1{transposed};"
        : {outs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD));
  }}
}};
#endif"""
