"""Load a kernel library and call its functions: ``load("kernels.so")["linear_..."](x, ...)``.

Needs apache-tvm-ffi and NumPy, and torch only for torch tensors; never the compiler.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import platform
import threading
from collections.abc import Collection, Hashable, Iterator
from pathlib import Path
from typing import Any

import tvm_ffi

from blockscale.base import abi, forks, host, manifest
from blockscale.base.errors import LibraryError
from blockscale.base.targets import runs_on
from blockscale.runtime.function import Function, Overloads
from blockscale.runtime.function_cuda import CudaFunction
from blockscale.specs.spec import Param

__all__ = ["Function", "Library", "LibraryError", "Overloads", "Param", "load"]

_MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}  # ELF's e_machine

# Libraries stay loaded for the life of the process, and their memory holds the files, so that no
# other gets their identity.  Their descriptors stay open for debuggers, which ask for the names.
_loaded: dict[tuple[int, int], tuple[str, Any]] = {}
_names: set[str] = set()
"""Under which the dynamic loader knows libraries, or may."""
_lock = threading.Lock()
_in_use: list[Library] = []  # newest first


def _after_fork_in_child() -> None:
    """Renew the lock, which a thread that was not forked along may hold."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)

remembered: dict[Hashable, Any] = {}
"""What a caller found in the libraries, to spare itself the look-up; `load` forgets it."""


class Library:
    """The kernels of one file.

    Attributes:
        path: the file, as it was when loaded.
        kind: "cpu" or "cuda": where its kernels run.
        manifest: what the file says about itself.
        functions: every kernel, by name.
    """

    def __init__(self, path: Path, contents: manifest.Manifest, module: Any) -> None:
        self.path = path
        self.manifest = contents
        self.kind: str = contents["target"]["kind"]
        function = CudaFunction if self.kind == "cuda" else Function
        self.functions = {
            name: function(name, entry, _symbol(module, name, path))
            for name, entry in contents["functions"].items()
        }
        replay = _replay(module) if self.kind == "cuda" else None
        for found in self.functions.values():
            found.replay = replay

    @property
    def meta(self) -> dict[str, Any]:
        """What the builder of the library wrote about it."""
        meta: dict[str, Any] = self.manifest.get("meta", {})
        return meta

    def _base(self, name: str) -> list[Function]:
        return [f for f in self.functions.values() if f.base == name]

    def __getitem__(self, name: str) -> Function | Overloads:
        """Return the kernel called ``name``, or the overload set with that base name.

        Raises:
            KeyError: the library has neither; the message names what is near.
        """
        if name in self.functions:
            return self.functions[name]
        overloads = self._base(name)
        if overloads:
            return Overloads(name, overloads)
        near = difflib.get_close_matches(name, self.functions, 3, 0.4) or [*self.functions][:3]
        raise KeyError(
            f"{self.path}: has no function {name!r} among {len(self.functions)}; near are "
            f"{', '.join(near)}; add it to the list of functions to build"
        )

    def __contains__(self, name: object) -> bool:
        return name in self.functions or any(f.base == name for f in self.functions.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self.functions)

    def __len__(self) -> int:
        return len(self.functions)

    def __repr__(self) -> str:
        target, names = self.manifest["target"], [*self.functions]
        shown = ", ".join(names[:4]) + (f", ... {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"<blockscale.Library {str(self.path)!r}, {target['kind']} {target['level']}, "
            f"{sum(f.tuned for f in self.functions.values())} of {len(names)} tuned: {shown}>"
        )


def load(path: str | os.PathLike[str], *, cpu_features: Collection[str] | None = None) -> Library:
    """Return the kernel library at ``path``, whose kernels the torch functions use from now on.

    Loading a library runs its code with your rights: load none that you would not run.  (The
    command ``blockscale inspect`` shows what a file holds without loading it.)

    See `open_library` for arguments and errors.  The library loaded last wins.
    """
    library = open_library(path, cpu_features=cpu_features)
    with _lock:
        _in_use.insert(0, library)
        remembered.clear()
    return library


def generation() -> int:
    """Return a number that `load` changes before it forgets what is `remembered`.

    Who remembers what it found asks before it looks, and again after: a load between the two may
    have come too early to forget it.
    """
    return len(_in_use)


def loaded_function(name: str, kind: str = "cpu") -> Function | None:
    """Return the function called ``name`` of the library for ``kind`` loaded last that has it.

    Libraries with machine code for the current GPU come before others, whose calls say what they
    have and what the GPU is.
    """
    found = [lib for lib in _in_use if lib.kind == kind and name in lib.functions]
    gpu = host.capability() if len(found) > 1 and kind == "cuda" else None
    if gpu is not None:
        found.sort(
            key=lambda lib: not any(runs_on(a, *gpu) for a in lib.manifest["target"]["archs"])
        )
    return found[0].functions[name] if found else None


def open_library(
    path: str | os.PathLike[str], *, cpu_features: Collection[str] | None = None
) -> Library:
    """Return the kernel library at ``path`` for the caller alone.

    Loading a library runs its code, so trust whoever wrote it.  The checks before that find damage
    and what does not run here, not malice.  Loading the same file again is cheap; a file that was
    replaced since (by renaming a new one over it) is loaded anew.

    Args:
        path: a file that ``blockscale build`` wrote.
        cpu_features: features to assume the CPU has, instead of asking it.

    Raises:
        OSError: the file cannot be read.
        LibraryError: it is not a blockscale library, is damaged, or does not run on this machine or
            with these versions.
    """
    path = Path(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT, "load: there is no such kernel library; build it first", str(path)
        ) from None
    keep = False
    try:
        status = os.fstat(handle)
        data = _read(handle, path)
        contents = manifest.parse(data, str(path))
        check_machine(contents, manifest.elf_machine(data), str(path), cpu_features)
        manifest.check_image(data, str(path))
        identity, digest = (status.st_dev, status.st_ino), hashlib.sha256(data).hexdigest()
        del data
        with _lock:
            if identity not in _loaded:
                _loaded[identity] = digest, _load_module(handle, path)
                keep = True
            loaded_digest, module = _loaded[identity]
        if loaded_digest != digest:
            raise LibraryError(
                f"{path}: was overwritten in place after this process had loaded it, so its old "
                "code is still in use; replace libraries by renaming a new file over the old, as "
                "'blockscale build' does, and restart this process"
            )
    finally:
        if not keep:
            os.close(handle)
    return Library(path, contents, module)


def _read(handle: int, path: Path) -> bytes:
    try:
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    except IsADirectoryError:
        raise IsADirectoryError(
            errno.EISDIR, "load: this is a folder; pass the .so file in it", str(path)
        ) from None


def _load_module(handle: int, path: Path) -> Any:
    """Load the very file that was checked, under a name that no other file will ever have.

    The dynamic loader takes a file for loaded when its *name* is that of a loaded one, even if the
    file was replaced since.  A daemon closes the descriptors that it inherits, and then the next
    one has a number that a library's name has already: more slashes make it another name.
    """
    name = f"/proc/self/fd/{handle}"
    while name in _names:
        name = name.replace("fd/", "fd//")
    _names.add(name)
    if forks.threads_lost:  # native/runtime.c asks for this name
        tvm_ffi.register_global_func("blockscale.forked", lambda: None, override=True)
    try:
        loader = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
        return loader(name if os.path.exists(name) else str(path.resolve()), "so")
    except Exception as error:
        reason = str(error).strip().splitlines()[-1].replace(name, str(path))
        raise LibraryError(
            f"{path}: the dynamic loader refused it ({reason}); build it on a system like this one"
        ) from error


def _symbol(module: Any, name: str, path: Path) -> Any:
    try:
        return module.get_function(name)
    except AttributeError:
        raise LibraryError(
            f"{path}: the manifest lists {name}, but the code has no such function; build it again"
        ) from None


def _replay(module: Any) -> tuple[Any, ...] | None:
    """Return a CUDA library's functions for recorded launches; None: an older one has none."""
    try:
        return tuple(module.get_function(name) for name in manifest.REPLAY)
    except AttributeError:
        return None


def _check_abi(built: dict[str, Any], where: str) -> None:
    """LibraryError unless the installed apache-tvm-ffi declares what the library was built for."""
    installed, remedy = tvm_ffi.__version__, "install another release or build the library again"
    try:
        different = abi.differences(built["facts"], abi.declared())
    except (OSError, RuntimeError, ValueError) as error:
        raise LibraryError(
            f"{where}: cannot tell whether it fits the installed apache-tvm-ffi {installed}, whose "
            f"headers cannot be read ({error}); {remedy}"
        ) from error
    if different:
        more = f", and {len(different) - 3} more" if len(different) > 3 else ""
        raise LibraryError(
            f"{where}: was built with apache-tvm-ffi {built['tvm_ffi']}, but in the installed "
            f"{installed} {', '.join(different[:3])}{more}; {remedy}"
        )


def check_machine(
    contents: manifest.Manifest,
    elf_machine: int | None,
    where: str,
    cpu_features: Collection[str] | None = None,
) -> None:
    """Check that a library with this manifest runs here.

    Raises:
        LibraryError: names what differs.
    """
    machine = platform.machine()
    if elf_machine != _MACHINES.get(machine, elf_machine):
        names = {number: name for name, number in _MACHINES.items()}
        made_for = names.get(elf_machine or 0, f"ELF machine {elf_machine}")
        raise LibraryError(
            f"{where}: holds code for {made_for}, but this machine is {machine}; build the "
            "library for this architecture"
        )
    built, target = contents["abi"], contents["target"]
    if built["blockscale"] != manifest.BLOCKSCALE_ABI:
        raise LibraryError(
            f"{where}: uses calling convention {built['blockscale']}, but blockscale "
            f"{contents['blockscale']} that built it and this one ({manifest.BLOCKSCALE_ABI}) "
            "differ; build the library with this version"
        )
    _check_abi(built, where)
    if target["kind"] not in ("cpu", "cuda"):
        raise LibraryError(
            f"{where}: is for target {target['kind']!r}, but this version runs 'cpu' and 'cuda' "
            "libraries; build the library for one of these or upgrade blockscale"
        )
    present = host.features() if cpu_features is None else frozenset(cpu_features)
    missing = [feature for feature in target["features"] if feature not in present]
    if missing:
        raise LibraryError(
            f"{where}: level {target['level']!r} needs the CPU features {', '.join(missing)}, "
            f"which this CPU ({host.cpu_model()}) lacks; build the library with level "
            f"{host.level(present)!r}"
        )
