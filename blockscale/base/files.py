"""Folders of this package and of the user, said once."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
"""The folder `blockscale`."""

CUDA_HEADERS = PACKAGE / "lower" / "native"
"""Folder of our device headers, which the instructions of kernels live in."""

HOST_C = PACKAGE / "runtime" / "native"
"""Folder of the C that is linked into libraries."""


def source_folders() -> tuple[Path, ...]:
    """Return the folders that hold this package: in a checkout, tir/ and others lie beside it."""
    return (PACKAGE,) if (PACKAGE / "tir").is_dir() else (PACKAGE, PACKAGE.parent)


def cache_folder() -> Path:
    """Return the folder of kernels built on demand: ~/.cache/blockscale or BLOCKSCALE_CACHE."""
    chosen = os.environ.get("BLOCKSCALE_CACHE")
    return Path(chosen or os.path.expanduser("~/.cache/blockscale"))
