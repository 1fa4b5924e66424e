"""The loop over tiles, which every role runs alike, and coordinates in the tile that is next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.ir import Expr as PrimExpr

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.kernel import Kernel, MapDim
from blockscale.lower.pipe.text import Text, indented
from blockscale.tir.gemm.tiles import EXPERT


class Tile:
    """Text about tiles of one kernel.

    In the loop there are: row_tile, col_tile (this CTA's, along both axes), rows (of d, or of the
    expert, that there are), first and first_atom (the expert's first row, and its first 128x4 tile
    of scales; not of a plain GEMM), expert, columns (of the MMA, where rows are on columns).

    Attributes:
        before_loads, after_stores: what the loading and the storing warps do besides, for a tile.
        at_end: what the storing warps do after all tiles.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        names = {var: str(var.name) for var in kernel.at.all}
        names |= {var: str(var.name) for var in kernel.scalars}
        self.names: dict[Any, str] = names | {kernel.epilogue.chunk: "chunk"}
        self.before_loads: list[str] = []
        self.after_stores: list[str] = []
        self.at_end: list[str] = []

    # ---- The loop ---------------------------------------------------------------------------

    def table(self) -> list[str]:
        """The table of experts that have rows."""
        k = self.kernel
        if not k.experts:
            return []
        place = f"bs_smem + {k.places['table']}, bs_smem + {k.places['scan']}"
        size = f"{k.experts}, {k.cluster_tile('rows')}, {k.threads}"
        return [f"bs_build_table<{size}>({place}, offsets, m);"]

    def total(self) -> list[str]:
        """How many tiles the clusters have to do."""
        k = self.kernel
        if k.experts:
            table = f"smem + {k.places['table']}"
            return [f"const int tiles = bs_expert_entry({table}, {k.experts}).x * {k.col_tiles};"]
        rows = k.cluster_tile("rows")
        return [
            f"const int row_tiles = (m + {rows - 1}) / {rows}, tiles = row_tiles * {k.col_tiles};"
        ]

    def loop(self, body: Sequence[str], count: str = "") -> list[str]:
        """``body`` for every tile of this cluster; ``count``: a variable that counts them."""
        after = f", ++{count}" if count else ""
        own = self._own_number()
        return [
            f"for (int t = {own}; t < tiles; t += {self._clusters()}{after}) {{",
            *indented(self.place()),
            *indented(body),
            "}",
        ]

    def _own_number(self) -> str:
        many = self.kernel.cluster
        return f"blockIdx.x / {many}" if many > 1 else "blockIdx.x"

    def _clusters(self) -> str:
        many = self.kernel.cluster
        return f"gridDim.x / {many}" if many > 1 else "gridDim.x"

    def place(self) -> list[str]:
        """Where tile ``t`` is."""
        k = self.kernel
        run = "rows" if k.raster_x == (k.x_axis == "rows") else "cols"
        order = f"bs_order<{k.band}, {str(run == 'rows').lower()}>"
        lines = ["int row_tile, col_tile;"]
        if k.experts:
            table = f"smem + {k.places['table']}"
            lines += [
                f"const BsExpert of = bs_expert_of({table}, {k.experts}, t / {k.col_tiles});",
                "[[maybe_unused]] const int expert = of.expert, rows = of.rows, first = of.row;",
                "[[maybe_unused]] const int first_atom = of.atom;",
                f"const int own = t - of.tile * {k.col_tiles};",
                f"{order}(own, of.tiles, {k.col_tiles}, row_tile, col_tile);",
            ]
        else:
            lines += [
                "[[maybe_unused]] const int rows = m;",
                f"{order}(t, row_tiles, {k.col_tiles}, row_tile, col_tile);",
            ]
        for axis, name in (("rows", "row_tile"), ("cols", "col_tile")):
            many, own = self._in_cluster(axis)
            if many > 1:
                lines.append(f"{name} = {name} * {many} + {own};")
        if k.swap:
            lines.append(f"[[maybe_unused]] const int columns = {self._columns()};")
        return lines

    def _in_cluster(self, axis: str) -> tuple[int, str]:
        """Tiles of a cluster along an axis, and this CTA's among them."""
        k = self.kernel
        if axis == k.x_axis:
            return k.cluster_x // k.group, f"cta_x / {k.group}" if k.group > 1 else "cta_x"
        return k.cluster_y, "cta_y"

    def _columns(self) -> str:
        """Columns of the MMA: no more than there are rows, in steps of 16."""
        k = self.kernel
        left = f"rows - row_tile * {k.y_tile}"
        return f"min({k.y_tile}, max({left} + 15, 16) & ~15)"

    def only_rows(self) -> str:
        """Whether no other tile of rows reads the same columns."""
        return f"rows <= {self.kernel.cluster_tile('rows')}"

    # ---- Coordinates ------------------------------------------------------------------------

    def text(self, value: PrimExpr, **names: str) -> str:
        """An index as text; ``names``: other text for coordinates."""
        by = {var: names.get(name, name) for var, name in self.names.items()}
        return Text(by, self._table_entry)(value)

    @staticmethod
    def _table_entry(buffer: Any, indices: Any) -> str:
        """The only buffer that an address may read is the table of experts."""
        if str(buffer.name) != EXPERT:
            raise LoweringError(f"an address reads {buffer.name}{list(indices)}")
        return "expert"

    def begin(self, axis: str, unit: int) -> str:
        """Where an expert's rows begin, before its tiles' own indices; empty if at 0."""
        if axis != "rows" or not self.kernel.experts:
            return ""
        return "first" if unit == 1 else "first_atom"

    def coordinate(self, dim: MapDim, **names: str) -> str:
        """The first index of a transfer along a dimension of its map."""
        begin, value = self.begin(dim.axis, dim.unit), self.text(dim.at, **names)
        return f"{begin} + {value}" if begin else value
