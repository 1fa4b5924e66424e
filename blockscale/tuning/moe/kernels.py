"""How candidates of MoE GEMMs are built: a kernel for each distinct plan, compiled once.

A kernel's text depends on its plan alone, as sizes of the layer are arguments, so the workloads of
all models, buckets and sessions in a work folder share its machine code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockscale.base import files, formats
from blockscale.base.files import CUDA_HEADERS

KERNEL = "moe_gemm"
"""Name of the kernel in its machine code."""

FOLDER = "kernels"
"""In the work folder."""


def export(func: Any, arch: str, out: Path) -> None:
    """Compile the kernel of a scheduled `moe_tiles`, unless it is there; write plan and code.

    Raises:
        LoweringError: it is no schedule of such a GEMM.
        PlanError: there is no such kernel.
        RuntimeError: nvcc refuses it.
    """
    from blockscale.lower.moe.read import read
    from blockscale.lower.moe.source import source

    plan = read(func).check()
    text = source(plan, KERNEL)
    image = compiled(text, arch, out.resolve().parent.parent / FOLDER)
    out.write_bytes(json.dumps(asdict(plan)).encode() + b"\n" + image.read_bytes())


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
