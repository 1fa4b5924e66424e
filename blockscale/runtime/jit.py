"""A compiled function for a spec: from a loaded library, from the disk cache, or built once.

The cache is that of `blockscale.base.cache`.  Its file names hold a digest of what decides the
machine code: the sources of this package, the tuning logs, the version of apache-tvm-ffi, the CPU
level or GPU architecture.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from blockscale.base import cache as kept
from blockscale.base import host, words
from blockscale.base.errors import LibraryError
from blockscale.base.files import source_folders
from blockscale.base.targets import is_gpu
from blockscale.runtime import library as runtime
from blockscale.runtime.function import Function
from blockscale.runtime.library import Library
from blockscale.specs import Spec

_FUNCTIONS: dict[tuple[str, str], Function] = {}
_LOCK = threading.Lock()
_forked_within_build = False
ROOMS = (
    *("base", "specs", "tir", "schedules", "tuning_logs", "lower", "catalog", "building"),
    "runtime/native",
)
"""Folders whose sources decide what is compiled (test_jit.py compares with imports)."""
SUFFIXES = ("py", "c", "h", "cuh", "json", "json.xz")
"""Files that decide what is compiled."""


def _after_fork_in_child() -> None:
    """Leave the locks, and the half-done work, of threads that were not forked along."""
    global _LOCK, _forked_within_build
    _forked_within_build |= _LOCK.locked()
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def function(spec: Spec, kind: str = "cpu") -> Function:
    """Return the function of ``spec`` for "cpu" or "cuda" tensors; build it on first use.

    Raises:
        RuntimeError: it has to be built, and the compiler is not installed, or there is no GPU, or
            the process was forked while its parent was building.
    """
    loaded = runtime.loaded_function(spec.name, kind)
    if loaded is not None:
        return loaded
    key = spec.name, kind
    known = _FUNCTIONS.get(key)
    if known is None:
        with _LOCK:  # threads that meet here build once
            known = _FUNCTIONS.get(key) or _cached_or_built(spec, host.local(kind))
            _FUNCTIONS[key] = known
    return known


def build(
    specs: Sequence[Spec | str],
    output: Path | str,
    *,
    target: str | Sequence[str] | None = None,
    logs: Sequence[Path | str] = (),
    ptx: bool = False,
) -> Library:
    """Compile ``specs`` into the library ``output``, load it, and return it.

    Args:
        specs: `blockscale.specs`, or names of kernels (`blockscale list`).
        output: the ``.so`` to write; it appears complete or not at all.
        target: a CPU level, or one or more GPU architectures ("sm_100a"), for which no GPU is
            needed; this machine's CPU when None.
        logs: folders of tuning logs that come before the package's.
        ptx: embed PTX instead of machine code; the driver, or the emulator, compiles it.

    Raises:
        ValueError: an unknown name or target, or no spec at all.
        TypeError: the target has no kernel of a spec's op.
        RuntimeError: the compiler is not installed.
        LogError, LinkError, CompileError: a log is damaged, a compiler is missing or fails.
    """
    builder = _builder("build: ")
    if isinstance(specs, str):
        raise TypeError(f"build: specs is a str; pass a list of names, [{specs!r}]")
    builder.build(specs, output, level=target, logs_dirs=[*logs, builder.committed_logs()], ptx=ptx)
    return runtime.load(output)


def _builder(why: str, remedy: str = "") -> ModuleType:
    """Return the module that builds; RuntimeError, ``why`` to ``remedy``: it has no compiler."""
    try:
        from blockscale.building import builder
    except ModuleNotFoundError as error:
        raise RuntimeError(why + words.missing(error) + remedy) from error
    return builder


def _cached_or_built(spec: Spec, target: str) -> Function:
    def make(path: Path, fate: str) -> None:
        if _forked_within_build:
            raise RuntimeError(
                f"{spec.name}: this process was forked while another thread of its parent built a "
                "kernel, and the compiler does not survive that; build or load kernels before "
                "forking, or start processes with multiprocessing's 'spawn'"
            )
        none = "no loaded library has it (blockscale.load() loads one), and to be built "
        named = f"{spec.name} {'--target' if is_gpu(target) else '--level'} {target}"
        elsewhere = f", or build it where that is: blockscale build {named} -o kernels.so"
        builder = _builder(f"{spec.name}: {none}", elsewhere)
        print(f"blockscale: building {spec.name} for {target} (first use; {fate})", file=sys.stderr)
        builder.build([spec], path, level=target)

    def use(path: Path) -> Function:
        found = runtime.open_library(path).functions.get(spec.name)
        if found is None:
            raise LibraryError(f"{path}: is a library without {spec.name}")
        return found

    return kept.fetch(f"{spec.name}-{_digest(target)}.so", make, use)


@cache
def _digest(target: str) -> str:
    """Digest of what decides a kernel's machine code, apart from its spec and the compiler.

    The compiler's version is pinned, and cached kernels are to be found where it is not installed.
    """
    digest = hashlib.sha256(target.encode())
    digest.update(metadata.version("apache-tvm-ffi").encode())
    for path in _sources():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    """Every source that decides what is compiled, and the tuning logs, but for half-made ones."""
    found: set[Path] = set()
    for room in (root / room for root in source_folders() for room in ROOMS):
        for path in (path for suffix in SUFFIXES for path in room.rglob(f"*.{suffix}")):
            if not any(part.startswith(".") for part in path.relative_to(room).parts):
                found.add(path)
    return sorted(found)
