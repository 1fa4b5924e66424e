"""A schedule of `schedules.gemm.sync` -> `kernel.SyncKernel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.ir import Expr as PrimExpr
from tvm.tirx import PrimFunc

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.derive import Derivation
from blockscale.lower.pipe.kernel import Instruction, Slot
from blockscale.lower.pipe.read import Operand, Reader, Site, substituted
from blockscale.lower.sync.kernel import SyncKernel
from blockscale.specs.plans.sync import WARP_ROWS, WARPS
from blockscale.tir.common import i64


class SyncReader(Reader):
    """A scheduled GEMM of `blockscale.tir.intrin.sync`."""

    INTRINSICS = "blockscale.tir.intrin.sync"


def derive(func: PrimFunc) -> SyncKernel:
    """Return the kernel of a scheduled `gemm_tiles`.

    LoweringError says which block or loop is not that of a GEMM by mma.sync.
    """
    made = SyncDerivation(SyncReader(func)).kernel()
    assert isinstance(made, SyncKernel)
    return made


class SyncDerivation(Derivation):
    """What is found on the way."""

    MMA, SCALES, READ = "sync_mma_", "sync_scales", "sync_row"
    MOVES = (READ, "sync_stage", "tma_store_2d")
    SUMS = "local"
    ROWS, SHAPE = "bs_sync_rows", "bs_sync_shape"
    MADE = SyncKernel

    def _group(self) -> int:
        return 1

    def _of_group(self, copies: Any) -> list[Site]:
        return [site for site in self.in_k if site.what.startswith("tma_load")]

    def _instruction(self, acc: Operand, x: Operand, y: Operand, group: int) -> Instruction:
        m, n, x_format, y_format, ue8m0 = self._shape_of()
        self._expect(self.mma, "shape of the sums", acc.shape[-2:], (m, n))
        self._expect(self.mma, "rows of X of a warp", (m, x.shape[-2]), (WARP_ROWS, WARP_ROWS))
        self._expect(self.mma, "rows of Y", y.shape[-2], n)
        for operand in (x, y):
            self._scope(self.mma, operand, "shared.dyn", "operands are in shared memory")
        self._warps()
        return Instruction(f"bs_{self.mma.what}", m * WARPS, n, x_format, y_format, ue8m0)

    def _warps(self) -> None:
        """Each warp has 32 rows of X and the words of their scales, and all rows of Y."""
        x, y = (self._operand(self.call[i].args[1]) for i in (2, 3))
        sx, sy = self._operand(self.call[5]), self._operand(self.call[6])
        for operand, index, step in (
            (self._operand(self.call[1]), -2, WARP_ROWS),
            (x, -2, WARP_ROWS),
            (sx, -1, 4),
            (y, -2, 0),
            (sy, -1, 0),
        ):
            for index_of, wanted in ((index, step), (-3 - index, 0)):
                value = operand.mins[index_of]
                warp = self.at.warp
                moved = substituted(value, {warp: warp + i64(1)}) - value
                if self.reader.simplify(moved - i64(wanted)) != i64(0):
                    raise LoweringError(
                        f"{self.mma.where}: {operand.buffer.name} of a warp begins at {value}; "
                        f"warps are to be {wanted} apart there"
                    )

    def _offset(
        self, site: Site, operand: Operand, slot: Slot, point: Mapping[Any, int]
    ) -> list[PrimExpr]:
        """That of the first warp: `_warps` says where the others read."""
        found = super()._offset(site, operand, slot, point)
        if site is not self.mma:
            return found
        return [self.reader.simplify(substituted(o, {self.at.warp: i64(0)})) for o in found]

    def _behind(self, site: Site) -> bool:
        sums = self._operand(self.call[1]).buffer  # warps set their own to zero
        return super()._behind(site) and not site.writes().same_as(sums)

    def _reads(self, acc: Operand) -> Site:
        reads, staged = (self._one(what, "sums go to rows by it") for what in self.MOVES[:2])
        self._expect_source(staged, acc.buffer)
        self._expect_source(reads, staged.operands["D"].buffer)
        self._scope(staged, staged.operands["D"], "shared.dyn", "rows are read there")
        self._expect(staged, "part", staged.operands["D"].shape, reads.operands["S"].shape)
        return reads
