"""What a GEMM of decoded weights may have of tensor memory: lanes are rows of the weight."""

from __future__ import annotations

from blockscale.base.targets import GPU_TARGETS

ROWS = 128
"""Rows of the weight of a tile: all lanes."""

WARPS = 4
"""Warps that reach all lanes."""

FRAGMENT_COLUMNS = 32
"""Columns that decoded weights of a block of 64 k take."""

PART_ROWS = (64, 32, 16)
"""Rows of x whose sums a warp reads at a time, if they divide a tile."""

MOST_TOKENS = 256
"""Rows of x of an MMA."""

COLUMNS = GPU_TARGETS["sm_100a"].tensor_columns
"""That an SM has."""

ALONE = GPU_TARGETS["sm_100a"].sm_shared // 2
"""Shared memory with which a CTA has an SM, and so its tensor memory, to itself."""


def part_rows(tokens: int, slices: int) -> int:
    """Return how many rows of x a warp reads the sums of at a time; 0: none divides a tile.

    ``slices``: groups of warps that take such parts in turn.
    """
    return next((rows for rows in PART_ROWS if tokens % (rows * slices) == 0), 0)


def columns(tokens: int, blocks_k: int) -> int:
    """Return the columns of sums, and of weights of two stages of so many blocks of 64 k."""
    return tokens + 2 * blocks_k * FRAGMENT_COLUMNS


def illegal(rows: int, tokens: int, warps: int, slices: int, blocks_k: int) -> str | None:
    """Return why there is no such tile, or None."""
    if (rows, warps) != (ROWS, WARPS):
        return f"tcgen05 takes {ROWS} rows of {WARPS} warps"
    if slices > 2 or blocks_k % slices:
        return "tcgen05 takes operands that one or two groups of warps decode"
    if tokens > MOST_TOKENS or not part_rows(tokens, slices):
        return f"{tokens} rows of x are not parts of {PART_ROWS} for each group of warps"
    if columns(tokens, blocks_k) > COLUMNS:
        return f"{columns(tokens, blocks_k)} columns of tensor memory, of {COLUMNS}"
    return None
