"""Products by tcgen05: warps that decode into tensor memory and store sums, one that multiplies.

A stage's blocks of 64 k have banks of 32 columns of tensor memory, and two stages have banks: while
the MMAs of one read theirs, warps decode the next one's.  Slices take blocks of a stage in turn,
and then parts of the tile's rows of x.  Mbarriers tell that a bank is decoded, that it is free (its
MMAs are done), that sums are there, that they have been read.  MMAs that are done also free the
stage's memory, for they came after all that warps read of it.
"""

from __future__ import annotations

from blockscale.lower.pipe.text import indented
from blockscale.lower.warp.kernel import Kernel
from blockscale.lower.warp.multiply import Products
from blockscale.specs.plans import tensor_memory
from blockscale.tir.intrin.warp import TENSOR_K


class TensorProducts(Products):
    """Prints the warps that decode, and the one that multiplies."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        bars = [f"smem + {at}" for at in kernel.tensor_bars]
        self.decoded, self.free, self.sums, self.read = bars
        self.step = TENSOR_K // 2  # columns of an MMA's weights

    def _products(self) -> list[str]:
        """The warps that decode."""
        k = self.kernel
        own = k.blocks // k.slices

        def stage(blocks: int, last: bool) -> list[str]:
            lines = [self.at(), f"bs_mbar_wait({self.full}, parity);"]
            for inner in range(own):
                lines += ["{", *indented(self._bank(inner, blocks)), "}"]
            return [*lines, *self._turn(), self.next()]

        return [
            f"const uint32_t tmem = bs_load4_shared(smem + {k.tmem_at});",
            "const uint32_t lanes = tmem + (32 * warp << 16);",
            "uint32_t bank = 0, bank_parity = 0, tile_parity = 0;",
            *self.tiles([*self.before, *self.stages(stage), *self._stores()]),
        ]

    def _bank(self, inner: int, blocks: int) -> list[str]:
        """Decode the ``inner``-th block of the slice, of a stage of so many, into its bank."""
        k = self.kernel
        stored = []
        for i in range(k.tiles_m):
            codes, scales = (self._place(p, inner, i) for p in (k.codes, k.factors))
            stored += [f"uint32_t fragment{i}[16];", "{", *indented(self._decode(i, codes, scales))]
            stored.append("}")
        columns = f"{k.rows_tile} + {tensor_memory.FRAGMENT_COLUMNS} * own"
        wait = f"bs_mbar_wait({self.free} + 8 * own, bank_parity ^ 1);"
        stored += [wait, "bs_tcgen05_fence_after();"]
        stored += [
            f"bs_tcgen05_st_fragments(lanes + {16 * i << 16} + {columns}, fragment{i});"
            for i in range(k.tiles_m)
        ]
        stored += ["bs_tcgen05_wait_st();", "bs_tcgen05_fence_before();"]
        first = inner * k.slices
        if blocks < k.blocks:  # a block that there is not has a turn of its bank
            stored = [
                f"if ({first} + slice < {blocks}) {{",
                *indented(stored),
                f"}} else {wait}",
            ]
        return [
            f"const uint32_t own = bank + {first} + slice;",
            *stored,
            "__syncwarp();",
            f"if (lane == 0) bs_mbar_arrive({self.decoded} + 8 * own);",
        ]

    def _decode(self, i: int, codes: int, scales: int) -> list[str]:
        """Decode 16 rows x 64 k to ``fragment{i}``."""
        words = list(zip("xyzw", range(0, 16, 4), strict=True))
        if self.kernel.form.order == "steps":
            return [
                f"const uint4 code = bs_load_steps(at + codes_at + {codes}, turn);",
                f"const BsStepScales<{self.format}> scale(at + scales_at + {scales}, g);",
                *(
                    f"scale.of<{at // 4}>().decode(code.{c}, fragment{i} + {at});"
                    for c, at in words
                ),
            ]
        return [
            f"const uint4 code = bs_load16_shared(at + codes_at + {codes});",
            f"const {self.decoder} scale({self.decoder}::load(at + scales_at + {scales}, lane));",
            *(f"scale.decode(code.{c}, fragment{i} + {at});" for c, at in words),
        ]

    def _turn(self) -> list[str]:
        """Go on to the other banks."""
        blocks = self.kernel.blocks
        return [f"if (bank) bank = 0, bank_parity ^= 1; else bank = {blocks};"]

    def _stores(self) -> list[str]:
        """Read a part of the sums after the other, and store what follows of it."""
        k = self.kernel
        rows = k.part_rows
        first = f"(part * {k.slices} + slice) * {rows}"
        whole, left = [], f"m - row_tile * {k.rows_tile}"
        if k.has_first:
            whole, left = ["const int all = left, begin = first;"], "all"
        part = [
            f"const int left = min({rows}, {left} - {first});",
            *([f"[[maybe_unused]] const int first = begin + {first};"] if k.has_first else []),
            *(["if (left <= 0) break;"] if k.ctas == 1 else []),
            f"float c[{k.tiles_m}][{rows // 2}];",
            *(
                f"bs_tcgen05_ld_sums<{rows}>(c[{i}], lanes + {16 * i << 16} + {first});"
                for i in range(k.tiles_m)
            ),
            "bs_tcgen05_wait_ld();",
            *self.added("0", "warp_id"),  # all warps of CTAs of a cluster have one part
            *self.after,
        ]
        return [
            *whole,
            f"bs_mbar_wait({self.sums}, tile_parity);",
            "tile_parity ^= 1;",
            "bs_tcgen05_fence_after();",
            "#pragma unroll 1",
            f"for (int part = 0; part < {k.rows_tile // (rows * k.slices)}; ++part) {{",
            *indented(part),
            "}",
            "bs_tcgen05_fence_before();",
            "__syncwarp();",
            f"if (lane == 0) bs_mbar_arrive({self.read});",
        ]

    # ---- The warp that multiplies -----------------------------------------------------------

    def issues(self) -> list[str]:
        """All of the role: a bank's MMAs once it is decoded."""
        k = self.kernel
        bf16 = str(k.form.dtype == "bfloat16").lower()

        def stage(blocks: int, last: bool) -> list[str]:
            lines = [self.at(), f"bs_mbar_wait({self.full}, parity);", *self._rows_fence()]
            for block in range(k.blocks):
                lines += [
                    f"bs_mbar_wait({self.decoded} + 8 * (bank + {block}), bank_parity);",
                    "bs_tcgen05_fence_after();",
                    "if (lane == 0) {",
                    *indented(self._mmas(block) if block < blocks else []),
                    f"  bs_tcgen05_commit<1>({self.free} + 8 * (bank + {block}));",
                    *([f"  bs_tcgen05_commit<1>({self.empty});"] * (block == k.blocks - 1)),
                    "}",
                    "__syncwarp();",
                ]
            return [*lines, *self._turn(), self.next()]

        tile = [
            f"bs_mbar_wait({self.read}, tile_parity ^ 1);  // of the tile before",
            "bs_tcgen05_fence_after();",
            *self.stages(stage),
            f"if (lane == 0) bs_tcgen05_commit<1>({self.sums});",
            "__syncwarp();",
            "tile_parity ^= 1;",
        ]
        return [
            f"const uint32_t tmem = bs_load4_shared(smem + {k.tmem_at});",
            f"constexpr uint32_t kind = bs_half_desc({bf16}, {tensor_memory.ROWS}, {k.rows_tile});",
            f"const uint32_t rows_at = {k.rows.slot.at} + {self.expr(k.tokens.first)};",
            "uint32_t stage = 0, parity = 0, bank = 0, bank_parity = 0, tile_parity = 0;",
            *self.tiles(tile),
            *(["bs_cluster_wait();"] if k.ctas > 1 else []),
        ]

    def _mmas(self, block: int) -> list[str]:
        """Products of a stage's block."""
        k = self.kernel
        rows = f"at + rows_at + {self._place(k.tokens, block, 0)}"
        columns = f"{k.rows_tile} + {tensor_memory.FRAGMENT_COLUMNS} * (bank + {block})"
        lines = [
            f"const uint64_t x = bs_matrix_desc<128>({rows});",
            f"const uint32_t w = tmem + {columns};",
        ]
        for j in range(4):
            more = "1" if block or j else "k > 0"
            lines.append(
                f"bs_tcgen05_mma_f16(tmem, w + {self.step * j}, x + {2 * j}, kind, {more});"
            )
        return lines
