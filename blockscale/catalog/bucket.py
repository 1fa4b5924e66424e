"""The size buckets of an exported function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """A range of sizes that share a schedule.

    It ends at ``limit`` (None: no end), is computed in tiles of ``tile`` and tuned at ``rows``.
    The size is the number of rows, or of blocks in a run (`layouts.BlockGrid`), see `size` of the
    target's catalog.
    """

    rows: int
    limit: int | None
    tile: int = 1
