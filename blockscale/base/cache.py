"""The folder of what is built on demand, and the one way to take a file from it or to make it.

What lies there is code, which this process runs.  So nobody else may have written it: folder and
file belong to this user or to root, and others cannot write them; else they are passed over.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from blockscale.base import files
from blockscale.base.errors import LibraryError

T = TypeVar("T")


def folder() -> Path | None:
    """Return BLOCKSCALE_CACHE or ~/.cache/blockscale; None where nobody knows what ~ is."""
    path = os.path.expanduser(os.environ.get("BLOCKSCALE_CACHE") or "~/.cache/blockscale")
    return None if path.startswith("~") else Path(path)


def fetch(name: str, make: Callable[[Path, str], None], use: Callable[[Path], T]) -> T:
    """Return what ``use`` makes of the file called ``name``, for example the loaded library.

    A file that is not there, is not to be trusted, or that ``use`` refuses with LibraryError or
    OSError, is made and kept.  Processes that want the same file wait for the first one of them.
    Where none can be kept, the reason is said on stderr, and the file is gone after its use.

    Args:
        name: of the file, which holds a digest of all that decides its contents.
        make: writes the file; gets its path, and in words what becomes of it.
        use: gets the path; the file may be gone when it has returned.
    """
    with suppress(OSError, LibraryError):
        return use(_checked(name))
    with _alone(name):
        where = None
        try:
            where = _made_folder()
            return use(_checked(name))  # by now another process may have made it
        except (OSError, LibraryError) as error:
            if where is None:
                _say_alone(error)
            elif not isinstance(error, FileNotFoundError):
                _say(f"{_sentence(error)}; building it again")
        with files.temporary_folder() as own:
            path = own / name
            make(path, f"kept in {where}" if where else "for this process alone")
            if where is not None:
                try:
                    files.write(_made_folder() / name, path.read_bytes(), 0o755)
                    return use(_checked(name))
                except OSError as error:
                    _say_alone(error)
            return use(path)


def _say(sentence: str) -> None:
    print(f"blockscale: {sentence}", file=sys.stderr)


def _say_alone(error: Exception) -> None:
    _say(
        f"the cache folder cannot be used ({_sentence(error)}), so this process builds for itself "
        "alone; set BLOCKSCALE_CACHE to a folder that you can write and others cannot"
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = error.filename2 or error.filename
        return f"{place}: {error.strerror}" if place else error.strerror
    return str(error)


def _made_folder() -> Path:
    """Return the folder, which is there now; OSError says why nothing can be kept."""
    path = folder()
    if path is None:
        raise OSError("there is no home folder for ~/.cache/blockscale")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path, path.stat())
    if not os.access(path, os.W_OK):
        raise OSError(f"{path} cannot be written")
    return path


def _checked(name: str) -> Path:
    """Return the path of a file that may be used; OSError says why not."""
    where = folder()
    if where is None:
        raise FileNotFoundError
    _check(where, where.stat())
    path = where / name
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
    _check(path, found)
    return path


def _check(path: Path, found: os.stat_result) -> None:
    """Raise PermissionError where others could have written what this process would run."""
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {found.st_uid}, whose code would run as you")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{path} can be written by others (mode {mode:o}), whose code would run as you"
        )


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let one process at a time make a file: each has a byte of its own in one locked file.

    Such locks end with their process and do not pass on to its children.  Without a folder, or on
    a file system without locks, nobody waits.
    """
    handle = None
    byte = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    with suppress(OSError):
        path = _made_folder() / ".lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            _say(f"another process builds {name}; waiting for it")
            fcntl.lockf(handle, fcntl.LOCK_EX, 1, byte)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
