"""Text that all warps of a kernel have in common: the loop over tiles, and that over stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blockscale.lower.pipe.text import Text, indented
from blockscale.lower.warp.kernel import CONTROL_BYTES, Kernel
from blockscale.specs.plans.moe import LOADER_REGISTERS
from blockscale.tir.gemm.tiles import EXPERT


class Frame:
    """Prints parts of one kernel."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel, self.format = kernel, f"{name}_format"
        self.full, self.empty = "smem + 8 * stage", f"smem + {8 * kernel.stages} + 8 * stage"

    def tiles(self, body: list[str], first_alone: bool = False) -> list[str]:
        """``body`` for every tile of this CTA or cluster, or for its first one."""
        k = self.kernel
        first, step = ("blockIdx.x", "gridDim.x")
        if k.cluster > 1:
            first, step = f"blockIdx.x / {k.cluster}", f"gridDim.x / {k.cluster}"
        # Neighbouring tiles of rows of w are those of a cluster that shares rows of x.
        mate = f" * {k.multicast} + mate" if k.multicast > 1 else ""
        place = [f"const int row_tile = tile % row_tiles, col_tile = tile / row_tiles{mate};"]
        if k.grouped:
            place = [
                f"const BsGroupTile at_tile = bs_group_tile(blocks, tile, {k.col_tiles});",
                "[[maybe_unused]] const int expert = at_tile.expert, col_tile = at_tile.col;",
                "[[maybe_unused]] const int first = at_tile.first, left = at_tile.left;",
            ]
        elif k.fastest == "cols":
            groups = k.tile_groups
            place = [f"const int row_tile = tile / {groups}, col_tile = tile % {groups}{mate};"]
        if k.has_first and not k.grouped:
            place += [
                f"[[maybe_unused]] const int first = row_tile * {k.rows_tile};",
                f"const int left = min({k.rows_tile}, m - first);",
            ]
        loop = f"for (int tile = {first}; tile < tiles; tile += {step}) {{"
        return [
            f"if (const int tile = {first}; tile < tiles) {{" if first_alone else loop,
            *indented([*place, *body]),
            "}",
        ]

    def stages(
        self, make: Callable[[int, bool], list[str]], before: Sequence[str] = ()
    ) -> list[str]:
        """A loop over stages; ``make(blocks, last)``: lines for one of so many blocks of 64 k.

        The last of all is by itself where it has fewer blocks, or bulk copies of x fewer channels.
        ``before``: what comes before it where one of the CTAs alone has it.
        """
        k = self.kernel
        (whole, rest), each, mine = self._parts(), k.k_stages, self.whole_stages()
        if mine.isdigit():
            lines = [
                f"for (int k = 0; k < {mine}; ++k) {{",
                *indented(make(k.blocks, False)),
                "}",
            ]
        elif k.unit == "mma":
            lines = [
                f"const int whole = {mine};",
                "for (int k = 0; k < whole; ++k) {",
                *indented(make(k.blocks, False)),
                "}",
            ]
        else:  # each CTA has a stage: a loop that may have none would copy sums that are in flight
            lines = [
                f"const int whole = {mine};",
                "int k = 0;",
                "do {",
                *indented(make(k.blocks, False)),
                "} while (++k < whole);",
            ]
        if rest:
            number = whole % each if k.ctas > 1 else whole
            lines += [
                *before,
                f"if (cta == {whole // each}) {{" if k.ctas > 1 else "{",
                f"  const int k = {number};",
                *indented(make(rest, True)),
                "}",
            ]
        return lines

    def whole_stages(self) -> str:
        """How many stages of all its blocks this CTA has in a tile."""
        k, (whole, _) = self.kernel, self._parts()
        if whole >= k.ctas * k.k_stages or k.ctas == 1:
            return str(min(whole, k.k_stages))
        least = f"min({k.k_stages}, {whole} - cta * {k.k_stages})"
        return f"max(0, {least})" if k.unit == "mma" else least

    def _parts(self) -> tuple[int, int]:
        """Stages of a tile that are alike, and blocks of the one that is by itself."""
        k = self.kernel
        whole, rest = divmod(k.k_blocks, k.blocks)
        if not rest and self.channels % 64 and k.rows.how == "run":
            return whole - 1, k.blocks
        return whole, rest

    def waits_first(self) -> bool:
        """Whether all warps wait for the kernel before: it writes the table of tiles."""
        return EXPERT in (self.kernel.after or ())

    @property
    def channels(self) -> int:
        """Of a row of x."""
        return self.kernel.rows.view.dims[-1].extent or 0

    def next(self) -> str:
        """Go on to the next stage of the ring."""
        return f"if (++stage == {self.kernel.stages}) stage = 0, parity ^= 1;"

    def at(self) -> str:
        """Where the stage lies in shared memory."""
        k = self.kernel
        return f"const uint32_t at = smem + {CONTROL_BYTES} + stage * {k.stage_bytes};"

    def expr(self, value: object, **names: str) -> str:
        """An index as text; ``names``: other text for coordinates."""
        own = {v: names.get(str(v.name), str(v.name)) for v in self.kernel.at.all}

        def no_load(buffer: object, indices: object) -> str:
            raise AssertionError(f"an address reads {buffer}")

        return Text(own, no_load)(value)

    def registers(self) -> int:
        """Of a consumer once loaders gave theirs up; 0: nothing is moved."""
        k = self.kernel
        if not k.moves_registers:
            return 0
        whole = 65536 // k.threads // 8 * 8 * k.threads
        loaders = k.threads - 32 * k.consumers
        return (whole - LOADER_REGISTERS * loaders) // (32 * k.consumers) // 8 * 8

    def ragged(self) -> str:
        """How many blocks of 64 rows a tile has, if the last one has fewer."""
        return "bands" if self.kernel.bands % self.bands() else ""

    def bands(self) -> int:
        """Blocks of 64 rows of the weight of a tile."""
        return max(1, self.kernel.cols_tile // 64)
