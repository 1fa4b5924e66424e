"""What a GEMM by block-scaled mma.sync is (sm_120a, sm_121a): every decision of its schedule.

X is the operand whose rows are the rows of the MMA, Y the one whose rows are its columns: X is a
and Y is b, or with ``swap`` X is b and Y is a.  Four warps multiply, each 32 rows of X with all
rows of Y of a tile; sums are in their registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base import formats
from blockscale.base.formats import Format
from blockscale.base.targets import GPU_TARGETS
from blockscale.specs.plans.gemm import (
    CTRL_BYTES,
    OUT_BYTES,
    SCALE_ATOM_BYTES,
    illegal_stages,
    illegal_stores,
)

SM120 = GPU_TARGETS["sm_120a"]

WARPS, WARP_ROWS = 4, 32
"""Warps that multiply, and rows of X of each."""

X_ROWS = WARPS * WARP_ROWS

Y_ROWS = (32, 64, 128)
"""Rows of Y of a tile: columns of 32 of a 128x4 tile of scales, of which 4 * 128 sums of a thread
are as many as registers hold."""

READ_COLUMNS = 32
"""The most columns of sums in shared memory at a time."""

PITCH_PAD = 4
"""Words behind a row of sums in shared memory: lanes that read rows then meet no bank twice."""


@dataclass(frozen=True)
class SyncPlan:
    """One kernel: ``d[m, n] = alpha * a[m, k] x b[n, k].T + bias``, m known when it runs.

    Attributes:
        fmt: key of `formats.GEMM`.
        out_dtype: key of `OUT_BYTES`.
        n, k: the true sizes; the last tiles may be ragged.
        experts: 0 for a plain GEMM, else b is [experts, n, k] and rows of a are grouped.
        swap: X is b: for few rows of a.
        mma_n: rows of Y in a tile.
        block_k: elements of K in a stage.
        stages: of the ring from TMA to the warps.
        epi_cols: columns of sums that the epilogue takes at a time.
        store: "tma": through shared memory, or "direct".
        raster: which tile index runs first, "x" or "y".
        group: tiles of the other index that are kept together for the L2 cache.
    """

    fmt: str
    out_dtype: str
    n: int
    k: int
    experts: int
    swap: bool
    mma_n: int
    block_k: int
    stages: int
    epi_cols: int
    store: str
    raster: str
    group: int

    cta_group = 1
    """CTAs that multiply together."""

    @property
    def format(self) -> Format:
        """The row of the format."""
        return formats.GEMM[self.fmt]

    @property
    def tile_rows(self) -> int:
        """Rows of a (tokens) of a tile."""
        return self.mma_n if self.swap else X_ROWS

    @property
    def tile_cols(self) -> int:
        """Columns of d (rows of b) of a tile."""
        return X_ROWS if self.swap else self.mma_n

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of either operand in a stage; kind mxf8f6f4 holds 4 bits in a byte."""
        return self.block_k // (2 if self.format.a.bits == 4 else 1)

    @property
    def atoms_k(self) -> int:
        """128x4 tiles of scales along K in one stage."""
        return self.block_k // (4 * self.format.block)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage."""
        rows = X_ROWS + self.mma_n
        return rows * self.row_bytes + 2 * SCALE_ATOM_BYTES * self.atoms_k

    @property
    def read_cols(self) -> int:
        """Columns of sums that are in shared memory at a time."""
        return min(self.epi_cols, READ_COLUMNS)

    @property
    def sum_bytes(self) -> int:
        """Shared memory through which sums go from the MMAs' order to a row a thread."""
        return X_ROWS * (self.read_cols + PITCH_PAD) * 4

    @property
    def store_bytes(self) -> int:
        """Staging of TMA stores: two steps of each warp."""
        return 2 * X_ROWS * self.epi_cols * OUT_BYTES[self.out_dtype] if self.store == "tma" else 0

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return (
            CTRL_BYTES
            + 16 * self.experts
            + self.stages * self.stage_bytes
            + self.store_bytes
            + self.sum_bytes
        )

    def illegal(self) -> str | None:
        """Why there is no such kernel; None if there is."""
        if self.mma_n not in Y_ROWS:
            return f"mma_n={self.mma_n} is none of {Y_ROWS}; choose one of them"
        reason = illegal_stages(self) or illegal_stores(self)
        if reason is not None:
            return reason
        if self.smem_bytes > SM120.cta_shared:
            return (
                f"{self.stages} stages of {self.stage_bytes} bytes and others are "
                f"{self.smem_bytes} bytes of shared memory, and {SM120.cta_shared} are the limit; "
                "take fewer stages"
            )
        return None
