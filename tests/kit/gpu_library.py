"""Libraries of GPU kernels as PTX, which the emulator plays; each is built once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blockscale.building.builder import build
from blockscale.lower import nvcc
from blockscale.runtime import jit
from blockscale.specs import Spec
from tests.kit import compiled


def library(specs: Sequence[Spec | str], arch: str, changed: str = "") -> Path:
    """Return the library of ``specs`` for ``arch``, with default schedules; do not change it.

    ``changed``: what a test has changed in the package that decides the code.
    """
    names = [spec if isinstance(spec, str) else spec.name for spec in specs]
    versions = (compiled.tvm_version(), nvcc.version(), str(nvcc.nvcc()))
    key = compiled.digest("library", jit._digest(arch), *versions, arch, changed, *names)

    def make(path: Path) -> None:
        build(names, path, level=arch, logs_dirs=[], ptx=True)

    return compiled.kept(key, ".so", make)
