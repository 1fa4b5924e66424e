"""The end of a tile whose K several CTAs share: each adds up a share of the columns.

Sums lie in shared memory in pieces of 4 columns, 128 lanes of 16 bytes each.  They are added in the
order of the CTAs, so that results do not depend on time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.ir import Expr as PrimExpr

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.elements import CLASS, Elements
from blockscale.lower.pipe.kernel import STORE_WARPS, Kernel
from blockscale.lower.pipe.read import Site, View, substituted
from blockscale.lower.pipe.text import Text, indented
from blockscale.lower.pipe.tile import Tile
from blockscale.tir.common import i64


def store_split(kernel: Kernel, tile: Tile) -> list[str]:
    """The statements of all threads of the cluster."""
    return _Split(kernel, tile).text()


class _Split(Elements):
    """Prints them.

    Attributes:
        number: of the column in its piece that is printed.
    """

    number = 0

    def _sum(self, place: str) -> str:
        return f"sum[{self.number}]"

    def _neighbour(
        self, view: View, indices: Sequence[PrimExpr], loop: Any, count: int, printer: Text
    ) -> str:
        """One of the 4 neighbours of a piece."""
        first = Text(printer.names | {loop: "(4 * piece)"}, printer.load)
        return f"{self._loaded(view, indices, 4, first)}[{self.number}]"

    def text(self) -> list[str]:
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
            self.number = i
            printer = self._printer(site, {loop.var: f"(4 * piece + {i})"})
            codes.append(f"code[{i}] = {self._bits(value, of, printer)};")
            if k.swap:
                address = f"{view.name} + {self._address(view, indices, printer)}"
                guard = self._guard([f"4 * piece + {i} < y_left"])
                stores.append(f"{guard}bs_store_element({address}, code[{i}]);")
        if not k.swap:
            printer = self._printer(site, {loop.var: "4 * piece"})
            if of in CLASS:
                stores.append(
                    "const uint32_t words[2] = {code[0] | code[1] << 16, code[2] | code[3] << 16};"
                )
            size = 4 * view.item
            name = "words" if of in CLASS else "code"
            address = f"{view.name} + {self._address(view, indices, printer)}"
            stores.append(
                f"bs_store_run<{size}, {self._rows(view, size)}>({address}, {name}, "
                f"(y_left - 4 * piece) * {view.item});"
            )
        return [*lines, *self.chunk_level, *codes, *stores]
