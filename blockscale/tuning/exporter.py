"""How a candidate becomes a library for measuring: the same objects, flags and runtime as shipped.

Times measured on TVM's own thread pool would rank schedules for a runtime that nobody loads.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tvm_ffi import libinfo

from blockscale import export


def export_openmp(module: Any, target: str, out: Path) -> None:
    """Compile ``module`` and link it with `blockscale.export`'s runtime into ``out``."""
    from tvm.target import Target

    from blockscale.lowering import compile_cpu

    kernel = out.with_suffix(".o")
    compile_cpu(module, Target(target)).write_to_file(str(kernel), "o")
    try:
        _cc(
            *export.LDFLAGS,
            str(kernel),
            str(_runtime(out.parent)),
            libinfo.find_libtvm_ffi(),
            *export.LDLIBS,
            "-o",
            str(out),
        )
    finally:
        kernel.unlink(missing_ok=True)


def _runtime(folder: Path) -> Path:
    """Return the runtime's object file, compiled once per session."""
    made = folder / "runtime.o"
    if not made.exists():
        temporary = folder / f"runtime.{os.getpid()}.o"
        _cc(*export.CFLAGS, "-c", str(export.RUNTIME_SOURCE), "-o", str(temporary))
        os.replace(temporary, made)
    return made


def _cc(*arguments: str) -> None:
    done = subprocess.run(["gcc", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"gcc failed: {done.stderr.strip()[-200:]}")
