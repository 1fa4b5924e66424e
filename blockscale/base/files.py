"""Folders of this package and of the user, and how files are written: whole, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

PACKAGE = Path(__file__).resolve().parent.parent
"""The folder `blockscale`."""

CUDA_HEADERS = PACKAGE / "lower" / "native"
"""Folder of our device headers, which the instructions of kernels live in."""

HOST_C = PACKAGE / "runtime" / "native"
"""Folder of the C that is linked into libraries."""


def source_folders() -> tuple[Path, ...]:
    """Return the folders that hold this package: in a checkout, tir/ and others lie beside it."""
    return (PACKAGE,) if (PACKAGE / "tir").is_dir() else (PACKAGE, PACKAGE.parent)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed in the end, by this process alone.

    A child that was forked meanwhile would remove a tempfile.TemporaryDirectory when it exits.
    """
    owner, path = os.getpid(), Path(tempfile.mkdtemp(prefix="blockscale-"))
    try:
        yield path
    finally:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)


PARTIAL = ".partial"
"""How the name of a file ends while it is being written; it begins with a dot."""


class NewFile:
    """A file that is written beside ``path`` and then takes its name in one step.

    Its bytes are on the disk before that: a reader, or a crash, finds the old file or the whole new
    one.  As a context manager it yields the open file, and leaves the old one if the block raises.
    ``mode``: permissions, of which the process's umask takes some away.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        try:
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            error.filename = str(path)
            raise
        self.file: BinaryIO = os.fdopen(descriptor, "wb")

    def commit(self) -> None:
        """Bring the bytes to the disk, then give the file its name."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._partial, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self) -> None:
        """Remove what was written so far; after `commit`: do nothing."""
        try:
            self.file.close()
        finally:
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> BinaryIO:
        return self.file

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abandon()


def write(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Write all of a file, text as UTF-8, as `NewFile` does."""
    with NewFile(path, mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def append(path: Path, data: bytes) -> None:
    """Add bytes to the end of a file, all of them or, where that raises OSError, none."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(handle).st_size
        try:
            while data:  # a short write does not say why, but the next one does
                data = data[os.write(handle, data) :]
        except OSError:
            os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Remove what processes left there that were killed while they wrote."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink()
