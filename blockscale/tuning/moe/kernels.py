"""How candidates of MoE GEMMs are built: a kernel for each distinct text, compiled once.

Buckets and sessions in a work folder share its machine code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from blockscale.base import files, formats
from blockscale.base.files import CUDA_HEADERS

KERNEL = "moe_gemm"
"""Name of the kernel in its machine code."""

FOLDER = "kernels"
"""In the work folder."""


def export(func: Any, arch: str, out: Path) -> None:
    """Compile the kernel of a scheduled `moe_tiles`, unless it is there.

    ``out`` gets what a launch needs, and the code.

    Raises:
        LoweringError: it is no schedule of such a GEMM.
        RuntimeError: nvcc refuses it.
    """
    from blockscale.lower.warp.derive import derive
    from blockscale.lower.warp.emit import emit

    kernel = derive(func)
    image = compiled(emit(kernel, KERNEL), arch, out.resolve().parent.parent / FOLDER)
    launch = Launch(kernel.cols_tile, kernel.rows_tile, kernel.threads, kernel.shared)
    out.write_bytes(json.dumps(launch._asdict()).encode() + b"\n" + image.read_bytes())


class Launch(NamedTuple):
    """What a launch needs: the tile, threads, dynamic shared memory in bytes."""

    rows: int
    tokens: int
    threads: int
    shared: int


def compiled(text: str, arch: str, folder: Path) -> Path:
    """Return the file in ``folder`` with the machine code of ``text``; made by one process.

    Raises:
        RuntimeError: nvcc refuses it, now or at an earlier try.
    """
    from blockscale.base.errors import CompileError
    from blockscale.lower import nvcc

    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{arch} {nvcc.version()} {headers()} {text}".encode()).hexdigest()[:24]
    image, refused = folder / f"{key}.cubin", folder / f"{key}.error"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.exists() and not refused.exists():
            try:
                code = nvcc.compile_cuda_source(text, arch).image
            except CompileError as error:
                refused.write_text(str(error))
            else:
                files.write(image, code)
    if refused.exists():
        raise RuntimeError(" ".join(refused.read_text().split())[:300])
    return image


def headers() -> str:
    """Return the digest of the device headers that the kernels include."""
    digest = hashlib.sha256(formats.header().encode())
    for path in sorted(CUDA_HEADERS.rglob("*.cuh")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
