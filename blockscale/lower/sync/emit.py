"""`kernel.SyncKernel` -> the CUDA C++ of its kernel: warps that multiply and store, one that loads.

Lane 4 g + t of a warp (PTX ISA 9.7.14.5): ldmatrix brings it codes of the rows g, words of scales
are those of rows g + 8 t of each 32 (`tir.intrin.sync`), and of the sums it has rows g and g + 8,
columns 2 t and 2 t + 1 of every tile of 16 x 8.
"""

from __future__ import annotations

from blockscale.lower.pipe import store
from blockscale.lower.pipe.emit import HEADER, Emitter
from blockscale.lower.pipe.host import Lowering
from blockscale.lower.pipe.kernel import LOAD_WARP, STORE_WARPS, Multiply, Slot, Stage
from blockscale.lower.pipe.text import indented
from blockscale.lower.sync.check import checked
from blockscale.lower.sync.derive import derive
from blockscale.lower.sync.kernel import TILE_8, TILE_16, SyncKernel
from blockscale.specs.plans.sync import WARP_ROWS

STEP_BYTES = 32
"""Of a row that one step of K takes, of codes in 4 or 8 bits."""

E2M1_OF_8 = 5
"""Number of a format: codes of 4 bits that mxf8f6f4 takes in bytes; enum BsElement."""


def emit(kernel: SyncKernel, name: str) -> str:
    """Return the CUDA text of ``kernel``, whose function is ``name``."""
    return _SyncEmitter(kernel).text(name)


SCALED_MMA = Lowering(lambda func: checked(derive(func)), emit)  # type: ignore[arg-type]


class _SyncEmitter(Emitter):
    """Prints one kernel."""

    kernel: SyncKernel

    # ---- The whole --------------------------------------------------------------------------

    def text(self, name: str) -> str:
        """The kernel."""
        k = self.kernel
        lines = [
            *dict.fromkeys((HEADER, '#include "scaled_mma.cuh"', *store.headers(k))),
            "",
            f'extern "C" __global__ void __launch_bounds__({k.threads}, 1) {name}(',
            f"    {self._params()}) {{",
            "  extern __shared__ __align__(1024) char bs_smem[];",
            "  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // uniform",
            "  const int lane = threadIdx.x % 32;",
            "  const uint32_t smem = bs_shared(bs_smem);",
            f"  if (warp == {LOAD_WARP} && bs_elect()) {{",
            *indented(self.init(), 2),
            "  }",
            "  __syncthreads();",
            "  bs_grid_wait();",
            *indented([*self.tile.table(), *self.tile.total()]),
            f"  if (warp == {LOAD_WARP}) {{",
            *indented(self.load(), 2),
            "  } else {",
            *indented(_Rows(k, self.tile).lines(self.multiply()), 2),
            "  }",
            "}",
            "",
        ]
        return "\n".join(lines)

    def barriers(self) -> list[tuple[str, int, int]]:
        """Names, how many, and arrivals that each counts."""
        k = self.kernel
        packed = [("packed", k.stages, 1)] if k.unpacks else []
        return [("full", k.stages, 1), ("empty", k.stages, STORE_WARPS), *packed]

    # ---- The warps that multiply ------------------------------------------------------------

    def multiply(self) -> list[str]:
        """A tile's sums in ``sums``: [tiles of 8 rows of Y][2 tiles of 16 rows of X][4]."""
        k = self.kernel
        whole = k.k_stages - (k.last is not None)
        lines = [
            f"float sums[{k.sums}];",
            "#pragma unroll",
            f"for (int i = 0; i < {k.sums}; ++i) sums[i] = 0.0f;",
        ]
        if whole:
            lines += [f"for (int k = 0; k < {whole}; ++k) {{", *indented(self._stage(k.whole)), "}"]
        if k.last is not None:
            lines += ["{", *indented(self._stage(k.last)), "}"]
        return lines

    def _stage(self, stage: Stage) -> list[str]:
        """The next stage of the ring when it is full; then it may be filled again."""
        k, at = self.kernel, self.at
        lines: list[str] = []
        for line in dict.fromkeys(self._line(k.sx, step.sx) for step in stage.multiplies):
            steps = [step for step in stage.multiplies if self._line(k.sx, step.sx) == line]
            lines += ["{", *indented(self._scales(stage, steps[0]))]
            for step in steps:
                lines += indented(self._step(step))
            lines.append("}")
        return [
            f"bs_mbar_wait(smem + {at['full']} + 8 * stage, parity);",
            "if (x_left > 0) {",
            *indented(lines),
            "}",
            "__syncwarp();",
            f"if (lane == 0) bs_mbar_arrive(smem + {at['empty']} + 8 * stage);",
            self._ring(),
        ]

    @staticmethod
    def _line(slot: Slot, column: int) -> int:
        """The number of the 128x4 tile along K of a word of scales."""
        return column // (slot.shape[-1] // 4)

    def _source(self, stage: Stage, side: str, slot: Slot, column: int) -> int:
        """Offset in a stage of shared memory of that tile."""
        line = self._line(slot, column)
        return next(
            c.source for c in stage.copies if c.side == side and self._line(slot, c.column) == line
        )

    def _scales(self, stage: Stage, step: Multiply) -> list[str]:
        """A lane's words of scales of a 128x4 tile along K: one of X, of Y one for 32 rows."""
        k, at = self.kernel, self.at
        count = k.mma.n // WARP_ROWS
        found = []
        for side, slot, column, load in (
            ("x", k.sx, step.sx, k.loads[2]),
            ("y", k.sy, step.sy, k.loads[3]),
        ):
            source = at[f"s{side}"] + self._source(stage, side, slot, column)
            found.append(f"smem + {source} + stage * {load.slot.bytes} + scale_row")
        shift = f"({self.tile.text(k.sy_shift)}) * 4"
        return [
            f"const uint32_t sx = bs_load_word<1>({found[0]} + warp * 4).w[0];",
            f"const BsWords<{count}> sy = bs_load_word<{count}>({found[1]} + {shift});",
        ]

    def _step(self, step: Multiply) -> list[str]:
        """Products of one step of K: fragments of X, then two tiles of 8 rows of Y at a time."""
        k, at = self.kernel, self.at
        x, y = k.loads[:2]
        kind = k.mma.function.removeprefix("bs_sync_mma_")
        formats = f"{k.mma.x_format}, {k.mma.y_format}, {k.mma.ue8m0}"
        of_x = f"x_rows + {at['x']} + stage * {x.slot.bytes}"
        of_y = f"y_rows + {at['y']} + stage * {y.slot.bytes}"
        load_x, load_y = (
            "bs_ldmatrix4_of_8" if number == E2M1_OF_8 else "bs_ldmatrix4"
            for number in (k.mma.x_format, k.mma.y_format)
        )
        pair = [
            "uint32_t b[4];",
            f"{load_y}(b, ({of_y} + p * {2 * TILE_8 * y.slot.row_bytes}) ^ {step.y});",
            "#pragma unroll",
            "for (int i = 0; i < 4; ++i)",
            f"  bs_sync_mma_{kind}<{formats}>(sums + 16 * p + 8 * (i / 2) + 4 * (i % 2), a[i % 2], "
            f"b + i / 2 * 2, sx, {step.x_byte}, i % 2, sy.w[p / 2], {step.y_byte}, "
            "2 * p % 4 + i / 2);",
        ]
        if k.swap:
            pair = ["if (16 * p < columns) {", *indented(pair), "}"]
        return [
            "{",
            "  uint32_t a[2][4];",
            *(
                f"  {load_x}(a[{i}], ({of_x} + {i * TILE_16 * x.slot.row_bytes}) ^ {step.x});"
                for i in range(2)
            ),
            "#pragma unroll",
            f"  for (int p = 0; p < {k.mma.n // (2 * TILE_8)}; ++p) {{",
            *indented(pair, 2),
            "  }",
            "}",
        ]


class _Rows(store.Store):
    """Prints what the warps do with a tile: products, and a row of sums a thread to store."""

    kernel: SyncKernel

    def lines(self, products: list[str]) -> list[str]:
        """All of the role."""
        k, at = self.kernel, self.kernel.places
        chunk = self._chunk()
        x, y = k.loads[:2]
        rows = f"const uint32_t rows_at = smem + {at['sums']} + warp * {WARP_ROWS * k.pitch};"
        begin = [
            "uint32_t stage = 0, parity = 0;",
            rows,
            "const uint32_t scale_row = (lane % 4 * 8 + lane / 4) * 16;",
            f"const uint32_t x_rows = smem + (warp * {WARP_ROWS} + lane % 16) * "
            f"{x.slot.row_bytes} + (lane / 16 ^ {self._turn(x.slot)}) * 16;",
            f"const uint32_t y_rows = smem + (lane / 16 * 8 + lane % 8) * {y.slot.row_bytes} + "
            f"(lane / 8 % 2 ^ {self._turn(y.slot)}) * 16;",
        ]
        begin += self._staging()
        loop = self.tile.loop(
            [
                *self._extents(),
                *products,
                *self.tile_level,
                "#pragma unroll 1",
                f"for (int chunk = 0; chunk < {self.epilogue.chunks}; ++chunk) {{",
                *indented(chunk),
                "}",
                *self.tile.after_stores,
            ]
        )
        return [*begin, *loop, *self._sent(), *self.tile.at_end]

    @staticmethod
    def _turn(slot: Slot) -> str:
        """What pieces of 16 bytes of a row are exchanged with, as TMA swizzles them."""
        return "lane % 8" if slot.row_bytes == 128 else "lane % 8 / 2"

    def _chunk(self) -> list[str]:
        """One part of a tile."""
        e = self.epilogue
        blocks = self._nest(e.sites)
        reads: list[str] = []
        for part in range(0, e.columns, e.width):
            stage = f"bs_sync_stage<{e.width}>(rows_at, sums + {{}}, lane);"
            places = [i * e.columns + part for i in range(e.chunks)]
            reads += [
                "__syncwarp();  // what was staged has been read",
                *(f"if (chunk == {i}) {stage.format(at)}" for i, at in enumerate(places)),
                "__syncwarp();",
                f"bs_sync_row<{e.width}>(acc + {part}, rows_at, lane);",
            ]
        return [
            self._used(),
            "if (!used) break;",
            f"uint32_t acc[{e.columns}];",
            *reads,
            *self.chunk_level,
            *blocks,
            *self._send(),
        ]
