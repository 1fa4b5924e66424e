"""The stand-in for libcuda.so.1: a real shared object, whose functions Python answers.

A library file is loaded from a copy in which every "libcuda.so" is "libbemu.so", the name of the
stand-in: a driver that the process uses for real is not in the way, and nobody else in the process
ever sees the stand-in.  This works because the dynamic loader takes a library for loaded when one
with that soname is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi

from blockscale.base import cache as kept
from blockscale.base.errors import LinkError
from blockscale.emulator.errors import EmulationError
from blockscale.emulator.host import fatbin
from blockscale.emulator.host.devices import device, guess
from blockscale.emulator.host.driver import Driver
from blockscale.emulator.host.kernels import EmulatedDriver

SOURCE = Path(__file__).resolve().parent / "cuda_standin.c"
REAL_SONAME = "libcuda.so.1"
OWN_SONAME = "libbemu.so.1"  # as long as the real one: it takes its place in a copy of a library
_COMPILER = "gcc"
_CFLAGS = ("-std=c11", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-Wl,--build-id=none")

_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))
_lock = threading.RLock()
_current: list[Driver] = []  # the driver that answers, last


@_Callback
def _answer(name: bytes, args: Any) -> int:
    return _current[-1].answer(name.decode(), args)


@cache
def _loaded(soname: str) -> ctypes.CDLL:
    """Load the stand-in with this soname, for the life of the process; compile it on first use.

    Raises:
        LinkError: the C compiler is missing or reports an error.
    """
    command = [_COMPILER, *_CFLAGS, f"-Wl,-soname,{soname}", str(SOURCE), "-o"]
    key = SOURCE.read_bytes() + "\0".join([*_CFLAGS, soname, platform.machine()]).encode()

    def make(path: Path, _: str) -> None:
        try:
            done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        except OSError as error:
            raise LinkError(
                f"the emulator's stand-in for the driver: the C compiler {_COMPILER!r} does not "
                f"run ({error.strerror}); install gcc and see that it is on PATH"
            ) from error
        if done.returncode:
            raise LinkError(
                f"the emulator's stand-in for the driver: {_COMPILER!r} ended with status "
                f"{done.returncode} and said\n{done.stderr.strip()}"
            )

    name = f"{soname}-{hashlib.sha256(key).hexdigest()[:16]}"
    return kept.fetch(name, make, lambda path: ctypes.CDLL(str(path)))


def _symbol(standin: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(standin, name), ctypes.c_void_p).value
    except AttributeError:
        return None


class Emulated:
    """A library that talks to the stand-in, and the driver that answers it.

    Attributes:
        driver: keeps its handles, context and memory from call to call.
        name: what messages call the library.
    """

    def __init__(self, name: str, soname: str, target: str, multiprocessors: int | None) -> None:
        self.name = name
        self.module: Any = None
        self._standin = _loaded(soname)
        self.driver = EmulatedDriver(
            device(target, multiprocessors), lambda symbol: _symbol(self._standin, symbol)
        )

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let the driver answer the stand-in's calls; one thread at a time may."""
        with _lock:
            _current.append(self.driver)
            self._standin.blockscale_standin_answer(_answer)
            try:
                yield
            finally:
                _current.pop()
                if not _current:
                    self._standin.blockscale_standin_answer(None)

    def load(self, image: bytes) -> None:
        """Load the library from its bytes, in which the driver's name is replaced by ours.

        Raises:
            EmulationError: the dynamic loader refuses it.
        """
        own, real = (n.removesuffix(".1").encode() for n in (OWN_SONAME, REAL_SONAME))
        handle = os.memfd_create("blockscale-emulated", os.MFD_CLOEXEC)
        with open(handle, "wb", closefd=False) as file:
            file.write(image.replace(real, own))
        try:
            # The descriptor stays open: its number is the name of the loaded file.
            loader = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
            self.module = loader(f"/proc/self/fd/{handle}", "so")
        except Exception as error:
            reason = str(error).strip().splitlines()[-1].replace(f"/proc/self/fd/{handle}: ", "")
            raise EmulationError(
                f"{self.name}: the dynamic loader refused it ({reason}); a library for the "
                "emulator may use the driver functions of blockscale/emulator/host/cuda_standin.c"
            ) from error


_libraries: dict[tuple[Any, ...], Emulated] = {}


def open_file(path: Path, target: str | None, multiprocessors: int | None) -> Emulated:
    """Return the library of a file; the same file and device give the same loaded copy.

    Raises:
        OSError: the file cannot be read.
        EmulationError: it cannot be loaded, or there is no such device.
    """
    image = path.read_bytes()
    if target is None:
        images = fatbin.find(image, str(path))
        target = guess([i.arch for i in images if i.kind == "ptx"] or [i.arch for i in images])
    key = hashlib.sha256(image).hexdigest(), target, multiprocessors
    with _lock:
        if key not in _libraries:
            library = Emulated(str(path), OWN_SONAME, target, multiprocessors)
            with library.answering():  # constructors may call the driver
                library.load(image)
            _libraries[key] = library
        return _libraries[key]


def open_module(module: Any, target: str | None, multiprocessors: int | None) -> Emulated:
    """Return a loaded module that will find the stand-in when it looks for the driver.

    Raises:
        EmulationError: the process has the real driver loaded already.
    """
    try:
        present = ctypes.CDLL(REAL_SONAME, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        present = None
    if present is not None and _symbol(present, "blockscale_standin_answer") is None:
        raise EmulationError(
            "run_module: this process uses the real CUDA driver, so a module that is loaded "
            "already would too; pass the path of the library's file instead"
        )
    key = "module", target, multiprocessors
    with _lock:
        if key not in _libraries:
            _libraries[key] = Emulated("module", REAL_SONAME, target or guess([]), multiprocessors)
        library = _libraries[key]
        library.module = module
        return library
