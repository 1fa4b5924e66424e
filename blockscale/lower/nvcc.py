"""The CUDA compiler of this machine: CUDA C++ text in, a cubin or PTX out.

Looked for in this order: ``CUDA_HOME``, ``PATH``, the Python packages nvidia-cuda-nvcc and
nvidia-cuda-cccl/-crt/-runtime (no system toolkit needed).  No GPU is needed either.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blockscale.base import files, formats
from blockscale.base.errors import CompileError
from blockscale.base.files import CUDA_HEADERS, HOST_C

INCLUDES = (
    *(CUDA_HEADERS / "nvcc", CUDA_HEADERS, CUDA_HEADERS / "gemm", CUDA_HEADERS / "moe"),
    HOST_C,
)
"""Folders of our device headers; "nvcc" has short forms of headers of CUDA's, which they hide.

nvcc includes cuda_runtime.h before a source, and TVM's sources include cuda.h, cuda_fp16.h and
cuda_bf16.h.  A norm's kernel took 0.61 CPU seconds to compile with CUDA's own and takes 0.23 with
these, to the same machine code (nvcc 13.0.88, AMD EPYC, 2026-11-27)."""

FLAGS = (
    "-O3",
    "-std=c++17",
    "--fmad=false",  # a * b + c is two roundings unless a kernel says fma: as on the CPU
    "-Wno-deprecated-gpu-targets",
)


@dataclass(frozen=True)
class Compiled:
    """Machine code of one CUDA source.

    ``resources`` has one dict per kernel: name, registers, stack, spills (bytes), shared (bytes);
    ``losses`` what ptxas says of lost speed, such as wgmma that it had to serialise (C7512).
    """

    image: bytes
    resources: tuple[dict[str, int | str], ...]
    losses: tuple[str, ...] = ()


@cache
def nvcc() -> Path:
    """Return the path of nvcc.

    Raises:
        CompileError: there is none.
    """
    names = [Path(home) / "bin" / "nvcc" for home in [os.environ.get("CUDA_HOME")] if home]
    on_path = shutil.which("nvcc")
    names += [Path(on_path)] if on_path else []
    site = Path(sysconfig.get_path("purelib")) / "nvidia"
    names += [Path("/usr/local/cuda/bin/nvcc"), *sorted(site.glob("*/bin/nvcc"))]
    for path in names:
        if path.is_file():
            return path
    raise CompileError(
        "nvcc: no CUDA compiler in CUDA_HOME, on PATH or among the Python packages; install the "
        "CUDA toolkit (12.9 or newer), or pip install nvidia-cuda-nvcc nvidia-cuda-cccl "
        "nvidia-cuda-crt nvidia-cuda-runtime nvidia-nvvm"
    )


@cache
def version() -> str:
    """Return nvcc's version, for example ``13.0.88``."""
    done = subprocess.run([nvcc(), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    return found.group(1) if found else "unknown"


def compile_cuda_source(source: str, arch: str, *, ptx: bool = False) -> Compiled:
    """Return the cubin of ``source`` for ``arch`` ("sm_90a"), or its PTX text.

    Raises:
        CompileError: nvcc is missing or reports an error.
    """
    number = arch.removeprefix("sm_")
    code = f"compute_{number}" if ptx else f"sm_{number}"
    with files.temporary_folder() as folder:
        text, out = folder / "kernel.cu", folder / "kernel.out"
        text.write_text(source)
        (folder / "formats.h").write_text(formats.header())
        command = [
            *[
                str(nvcc()),
                *FLAGS,
                *(f"-I{path}" for path in (*INCLUDES, folder)),
                "-ptx" if ptx else "-cubin",
            ],
            *([] if ptx else ["-Xptxas", "-v"]),
            *["-gencode", f"arch=compute_{number},code={code}", str(text), "-o", str(out)],
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stderr or done.stdout).replace(f"{folder}/", "").strip().splitlines()
            first = next((i for i, line in enumerate(lines) if "error" in line), 0)  # no warning
            raise CompileError(
                f"nvcc: ended with status {done.returncode} for {arch}; it said\n"
                + "\n".join(lines[first : first + 20])
            )
        said = done.stdout + done.stderr
        losses = tuple(line for line in said.splitlines() if "Potential Performance Loss" in line)
        return Compiled(out.read_bytes(), tuple(_resources(done.stderr)), losses)


_USED = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<out>\d+) bytes spill stores, "
    r"(?P<back>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def _resources(text: str) -> list[dict[str, int | str]]:
    """Return what ptxas -v tells of each kernel."""
    found: list[dict[str, int | str]] = []
    for match in _USED.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        found.append(
            {
                "name": match["name"],
                "registers": int(match["registers"]),
                "stack": int(match["stack"]),
                "spills": int(match["out"]) + int(match["back"]),
                "shared": int(shared.group(1)) if shared else 0,
            }
        )
    return found
