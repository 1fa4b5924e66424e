"""The shape of a linear layer's GEMM on GPUs: how a tile is divided, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import BULK_COPIES, TCGEN05, WGMMA, Gpu
from blockscale.specs.gemm import Linear
from blockscale.specs.plans import tensor_memory
from blockscale.specs.plans.moe import (
    LOADER_REGISTERS,
    illegal_bytes,
    illegal_groups,
    scale_bytes,
)

TILE_K = 64
"""K of a block of weights, and of a row of x in shared memory."""

CONTROL_BYTES = 1024
"""Shared memory for mbarriers; operands of wgmma start at multiples of 1024."""

MAX_CLUSTER = 8
"""CTAs of a cluster that every GPU with clusters has."""

SUMS = {"mma": 256, "wgmma": 320}
"""The most accumulators of a thread, times two."""


@dataclass(frozen=True)
class LinearTile:
    """One shape.

    Attributes:
        unit: "mma" (mma.sync), "wgmma" or "tcgen05".
        rows: of the weight in a CTA's tile.
        tokens: the most rows of x of a tile.
        warps: that share the rows; of a wgmma each four.
        slices: of a stage's K, multiplied by other warps, which add up at the end; of tcgen05
            decoded by other warps.
        ctas: of a cluster, which share K and add up at the end.
        blocks_k: blocks of 64 k in a stage.
        raster: along which tiles follow each other, "rows" (of x) or "cols" (rows of the weight).
        copies: to shared memory, "bulk" (of rows of x for wgmma by TMA) or "async" (cp.async).
        by_bytes: whether operands are E4M3.
        partial: then, how many channels' products are summed up by themselves; see `MoeTile`.
        multicast: CTAs of a cluster that have neighbouring tiles of the weight and load rows of x
            for each other.
    """

    unit: str
    rows: int
    tokens: int
    warps: int
    slices: int
    ctas: int
    blocks_k: int
    raster: str = "rows"
    copies: str = "bulk"
    by_bytes: bool = False
    partial: int = 0
    multicast: int = 1

    @property
    def tiles_m(self) -> int:
        """Tiles of 16 rows of a warp."""
        return self.rows // (16 * self.warps)

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.warps * self.slices

    @property
    def loaders(self) -> int:
        """Warps that do not multiply; one loads, and registers move between groups of four.

        Of tcgen05 another one issues the products.
        """
        return 4 if self.moves_registers else 1 + self.tensor

    @property
    def tensor(self) -> bool:
        """Whether decoded weights and sums are in tensor memory."""
        return self.unit == "tcgen05"

    @property
    def part_rows(self) -> int:
        """Rows of x whose sums a warp reads from tensor memory at a time; 0: none."""
        return tensor_memory.part_rows(self.tokens, self.slices) if self.tensor else 0

    @property
    def moves_registers(self) -> bool:
        """Whether those that load give registers to those that multiply."""
        return self.unit == "wgmma" and self.consumers > 4

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumers + self.loaders)

    @property
    def consumer_registers(self) -> int:
        """Of a thread that multiplies once loaders gave theirs up; 0: nothing is moved."""
        if not self.moves_registers:
            return 0
        whole = 65536 // self.threads // 8 * 8 * self.threads
        return (whole - LOADER_REGISTERS * 32 * self.loaders) // (32 * self.consumers) // 8 * 8

    def stage_bytes(self, spec: Linear) -> int:
        """Shared memory of a stage of the ring."""
        blocks = ceil_div(self.blocks_k, 2) if spec.group == 128 else self.blocks_k
        scales = self.rows * scale_bytes(spec.fmt, spec.group, spec.zero) // 64 * blocks
        weights = self.rows * TILE_K // 2 * self.blocks_k
        item = 1 if self.by_bytes else 2
        return round_up(weights + scales, 1024) + self.tokens * TILE_K * item * self.blocks_k

    def units(self, spec: Linear) -> int:
        """Parts of a warp's sums, each stored by one warp of one CTA: 16 rows, or 32, and 8 of x.

        32 of 16-bit numbers, of which a thread stores 16 bytes at a time, or 8 of gated pairs.
        """
        together = 1 if spec.out_dtype == "float32" or self.tiles_m % 2 else 2
        return self.tiles_m // together * (self.part_rows or self.tokens) // 8

    def sum_bytes(self, spec: Linear) -> int:
        """Shared memory in which slices and CTAs add up: a CTA has its own units of the others."""
        tile, units = self.rows * self.tokens * 4, self.units(spec)
        slices = 0 if self.tensor else (self.slices - 1) * tile
        return slices + (self.ctas - 1) * ceil_div(units, self.ctas) * (tile // units)

    def shared(self, spec: Linear, stages: int) -> int:
        """Dynamic shared memory of a CTA."""
        found = CONTROL_BYTES + 1024 + stages * self.stage_bytes(spec) + self.sum_bytes(spec)
        return max(found, tensor_memory.ALONE) if self.tensor and stages else found

    def stages_in(self, spec: Linear, room: int) -> int:
        """The most stages in so many bytes."""
        return (room - self.shared(spec, 0)) // self.stage_bytes(spec)

    def illegal(self, spec: Linear, arch: Gpu) -> str | None:
        """Return why there is no such kernel, or None."""
        wgmma, per = self.unit == "wgmma", 4 if self.unit == "wgmma" else 1
        blocks = round_up(spec.padded_k, 512) // TILE_K
        if wgmma and WGMMA not in arch.features:
            return "the architecture has no wgmma"
        if self.copies == "bulk" and BULK_COPIES not in arch.features:
            return "the architecture has no bulk copies"
        if self.ctas > 1 and BULK_COPIES not in arch.features:
            return "the architecture has no clusters, whose CTAs could share K"
        if self.copies == "async" and (wgmma or self.tensor or spec.layout == "tiles64e"):
            return "wgmma, tcgen05, and weights of tiles64e, take rows of x as TMA stores them"
        if self.tensor and (reason := self._illegal_tensor(arch)):
            return reason
        if self.warps % per or self.rows % (16 * self.warps):
            return f"{self.rows} rows are not divided among {self.warps} warps"
        if self.blocks_k % self.slices or blocks % (self.blocks_k * self.ctas):
            return f"K is not divided into {self.slices} slices and {self.ctas} CTAs"
        each = blocks // (self.blocks_k * self.ctas)
        if self.ctas > 1 and spec.padded_k // TILE_K // self.blocks_k <= (self.ctas - 1) * each:
            return "a CTA has no whole stage of K"
        if spec.group == 128 and self.blocks_k % 2 and blocks > 1:
            return "a stage has whole groups of 128"
        if not self.tensor and self.tiles_m * self.tokens > SUMS[self.unit]:
            return "accumulators do not fit into registers"
        if self._tight and (spec.fmt == "int4" or spec.dtype != "bfloat16"):
            return "decoding takes more registers than 17 warps have"
        if reason := self._illegal_units(spec) or self._illegal_multicast(spec):
            return reason
        if self.stages_in(spec, arch.cta_shared) < 2:
            return "two stages do not fit into shared memory"
        return None

    def _illegal_multicast(self, spec: Linear) -> str | None:
        """Why CTAs cannot load rows of x for each other, or None."""
        if self.multicast == 1:
            return None
        if self.unit != "wgmma" or self.ctas > 1 or self.multicast > MAX_CLUSTER:
            return "rows of x are multicast for wgmma, to 8 CTAs, none of which divide K"
        if self.blocks_k % self.multicast:
            return f"{self.multicast} CTAs do not share the {self.blocks_k} blocks of a stage"
        if ceil_div(spec.padded_n, self.rows) % self.multicast:
            return f"tiles of {self.rows} rows of the weight do not come in {self.multicast}s"
        return None

    @property
    def _tight(self) -> bool:
        """Whether 17 warps, whose threads have 96 registers each, decode 128 rows of the weight."""
        return self.unit == "mma" and self.tiles_m >= 8 and self.warps * self.slices >= 16

    def _illegal_tensor(self, arch: Gpu) -> str | None:
        """Why there is no such tile of tcgen05, or None."""
        if TCGEN05 not in arch.features:
            return "the architecture has no tcgen05"
        if self.by_bytes:
            return "tcgen05 takes operands of 16 bits"
        if self.ctas > 1 and self.tokens != self.part_rows * self.slices:
            return "CTAs add up what warps have in registers at once"
        sizes = self.rows, self.tokens, self.warps, self.slices, self.blocks_k
        return tensor_memory.illegal(*sizes)

    def _illegal_units(self, spec: Linear) -> str | None:
        """Why a stage is not divided into what wgmma multiplies, or None."""
        wgmma = self.unit == "wgmma"
        if wgmma and self.slices > 1:
            return "wgmma takes K in one slice"
        if not self.by_bytes:
            odd = wgmma and (self.tiles_m * self.blocks_k % 2 or self.blocks_k > 2)
            return "wgmma takes an even number of units in a stage" if odd else None
        if not wgmma or self.tiles_m > 2:
            return "wgmma multiplies operands of 8 bits, one or two tiles of 16 rows of a warp"
        if spec.fmt == "int4" and self.ctas > 1:
            return "sums of groups are those of one CTA"
        sums = self.blocks_k, self.partial, self.tiles_m
        return illegal_bytes(*sums, self.tokens) or illegal_groups(spec.fmt, spec.group, *sums)
