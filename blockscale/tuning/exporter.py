"""How a candidate becomes a library for measuring: the same objects, flags and runtime as shipped.

Times measured on TVM's own thread pool would rank schedules for a runtime that nobody loads.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.base import files, formats
from blockscale.building import export
from blockscale.specs import Spec
from blockscale.tuning.moe import KERNEL, Launch, gemm_of
from blockscale.tuning.worker import SPEC

if TYPE_CHECKING:
    from blockscale.lower.cuda import Source

OPENMP, CUDA = (f"{__name__}:{name}" for name in ("export_openmp", "export_cuda"))
"""How `worker.build` is told of the functions below."""


def export_openmp(module: Any, target: str, out: Path) -> None:
    """Compile ``module`` and link it with `blockscale.building.export`'s runtime into ``out``."""
    from tvm.target import Target

    from blockscale.lower.cpu import compile_cpu

    with files.temporary_folder() as folder:
        kernel = folder / "kernel.o"
        compile_cpu(module, Target(target)).write_to_file(str(kernel), "o")
        runtime = _runtime(out.parent)
        out.write_bytes(export.link([kernel, runtime], ["main"], folder, "gcc"))


def export_cuda(module: Any, target: str, out: Path) -> None:
    """Compile ``module`` with nvcc and write the CUDA library ``out``; needs no GPU.

    A GEMM of an MoE layer is a kernel, not a function: ``out`` gets what a launch needs, and the
    machine code.

    Raises:
        LoweringError: there is no such kernel.
        CompileError: nvcc refuses it.
    """
    from tvm.target import Target

    from blockscale.building.builder import contents_of
    from blockscale.building.export_cuda import write_cuda_library
    from blockscale.lower.cuda import compile_sources

    arch = str(Target(target).attrs["arch"])
    func = module["main"]
    if gemm_of(module) is not None:
        _export_moe(func, arch, out)
        return
    spec, source = source_of(func, arch)
    params = [param.to_manifest() for param in spec.params()]
    target_of = {"kind": "cuda", "level": arch, "features": [], "archs": [arch]}
    contents = contents_of(target_of, {}, {"main": {"base": "main", "params": params}}, {})
    codes = [compile_sources(source, "main", arch)]
    write_cuda_library(codes, contents, out, runtime=out.parent / "runtime")


def source_of(func: Any, arch: str) -> tuple[Spec, Source]:
    """Return the spec of a candidate, and its code: it is lowered as that of a library is."""
    from blockscale.catalog import road
    from blockscale.lower.cuda import sources

    spec = Spec.from_json(json.loads(str(func.attrs[SPEC])))
    own, func = road(spec, arch), func.without_attr(SPEC)
    if own.lower is None:
        return spec, sources(func, "main", arch)
    return spec, own.lower(spec, arch, [(None, func)], "main")


def _export_moe(func: Any, arch: str, out: Path) -> None:
    from blockscale.lower.warp.derive import derive
    from blockscale.lower.warp.emit import emit

    kernel = derive(func)
    code = compiled(emit(kernel, KERNEL), arch, out.resolve().parent.parent / "kernels")
    launch = Launch(kernel.cols_tile, kernel.rows_tile, kernel.threads, kernel.shared)
    out.write_bytes(json.dumps(launch._asdict()).encode() + b"\n" + code)


def compiled(text: str, arch: str, folder: Path) -> bytes:
    """Return the machine code of ``text``, which buckets and sessions share in ``folder``.

    Raises:
        CompileError: nvcc refuses it.
    """
    from blockscale.lower import nvcc

    folder.mkdir(parents=True, exist_ok=True)
    told = arch, nvcc.version(), *nvcc.FLAGS, formats.header(), text
    digest = hashlib.sha256(" ".join(told).encode())
    for header in sorted(files.CUDA_HEADERS.rglob("*.*h")):
        digest.update(header.read_bytes())
    image = folder / f"{digest.hexdigest()[:24]}.cubin"
    if not image.exists():
        files.write(image, nvcc.compile_cuda_source(text, arch).image)
    return image.read_bytes()


def _runtime(folder: Path) -> Path:
    """Return the runtime's object file, compiled once per session."""
    made = folder / "runtime.o"
    if not made.exists():
        with files.temporary_folder() as own:
            new, source = own / made.name, str(export.RUNTIME_SOURCE)
            export.run(["gcc", *export.CFLAGS, "-c", source, "-o", str(new)])
            files.write(made, new.read_bytes())
    return made
