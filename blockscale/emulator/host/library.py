"""``emulator.run_module``: run a function of an exported GPU library without a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm_ffi

from blockscale.emulator.host.kernels import EmulatedDriver, Options
from blockscale.emulator.host.launches import Launch
from blockscale.emulator.host.standin import Emulated, open_file, open_module
from blockscale.emulator.host.tensors import Arguments
from blockscale.emulator.report import Report


@dataclass(frozen=True)
class Run:
    """What a call of an exported function did.

    Attributes:
        result: what the function returned.
        launches: the sizes of every launch, in order; `reports`: what each left behind.
        target: the architecture of the device that was played.
    """

    result: Any
    launches: list[Launch]
    reports: list[Report]
    target: str

    def check(self) -> None:
        """Raise for the first launch whose report has an error (see `Report.check`)."""
        for report in self.reports:
            report.check()


def run_module(
    lib: Any,
    function: str,
    *tensors: Any,
    target: str | None = None,
    seed: int = 0,
    max_instructions: int | None = None,
    multiprocessors: int | None = None,
) -> Run:
    """Run ``function`` of a library that was exported for a GPU, host code included.

    The host code runs as it is: it checks its arguments, encodes tensor maps, and launches through
    a stand-in for libcuda.  Kernels run in the emulator, one after the other, from the PTX in the
    library.

    Args:
        lib: the path of the .so file, a `blockscale.Library`, or a module of tvm_ffi that has not
            used the driver yet.
        function: its name, without the prefix __tvm_ffi_.
        tensors: the arguments: tensors on the CPU (torch, NumPy, anything with DLPack), which the
            function sees on CUDA device 0 and changes in place, and lists of such; everything else
            is passed as it is.
        target: the device to play, such as "sm_100a"; by default one for which there is PTX.
        seed: of the first launch; the next ones get the numbers that follow.
        max_instructions: the limit for each launch, as in `emulator.launch`.
        multiprocessors: how many the device claims to have, so that persistent kernels launch few.

    Raises:
        EmulationError: a kernel, a launch or a tensor map breaks a rule, or the library holds no
            PTX for the device.
        TypeError, ValueError, ...: the function's own checks, as it raises them.
    """
    library = opened(lib, target, multiprocessors)
    driver = library.driver
    with library.answering():
        compiled = find(library, function)
        driver.begin(Options(seed, max_instructions))
        with Arguments(tensors, driver.memory) as arguments:
            try:
                result = compiled(*arguments.values)
            except Exception as error:
                cause = cause_of(driver, error, f"{library.name}: {function}")
                if cause is error:
                    raise
                raise cause from error
        failure = driver.error or driver.failure(probes=False)
        if failure is not None:
            raise failure
    return Run(result, driver.launches, driver.reports, driver.device.arch)


def opened(lib: Any, target: str | None, multiprocessors: int | None) -> Emulated:
    """Return the library that `run_module` was given."""
    if isinstance(lib, str | os.PathLike):
        return open_file(Path(lib), target, multiprocessors)
    if isinstance(getattr(lib, "path", None), str | os.PathLike):
        return open_file(Path(lib.path), target, multiprocessors)
    if isinstance(lib, tvm_ffi.Module):
        return open_module(lib, target, multiprocessors)
    raise TypeError(
        f"run_module: lib is a {type(lib).__name__}; pass the path of an exported library, a "
        "blockscale.Library or a tvm_ffi.Module"
    )


def find(library: Emulated, function: str) -> Any:
    """Return a function of a library; AttributeError if it has none of this name."""
    try:
        return library.module.get_function(function)
    except AttributeError:
        raise AttributeError(
            f"run_module: {library.name} has no function {function!r} (symbol "
            f"__tvm_ffi_{function}); see its names with nm -D"
        ) from None


def cause_of(driver: EmulatedDriver, error: Exception, what: str) -> BaseException:
    """Return what to raise when the function raised ``error``."""
    refused = driver.failure(probes=True)
    if driver.error is not None or refused is None:
        return driver.error or error
    if isinstance(error, TypeError | ValueError):  # the function's own checks
        error.add_note(f"{what}: before that the driver had refused a call: {refused}")
        return error
    return refused


__all__ = ["Run", "run_module"]
