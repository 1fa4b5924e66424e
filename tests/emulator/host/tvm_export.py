"""A kernel through TVM's passes to a GPU library without TVM's runtime: host C, a shim, PTX.

A small prototype of the road that exports take (DESIGN.md, section 4).
"""

import os
import subprocess
from pathlib import Path

import tvm
from tvm.script import tirx as T
from tvm.tirx.build import split_host_device_mods
from tvm_ffi import libinfo

SHIM = Path(__file__).with_name("tvm_shim.c")


@T.prim_func(s_tir=True)
def axpy(x: T.handle, y: T.handle, out: T.handle):
    T.func_attr({"global_symbol": "axpy"})
    n = T.int64()
    X = T.match_buffer(x, (n,), "float32")
    Y = T.match_buffer(y, (n,), "float32")
    OUT = T.match_buffer(out, (n,), "float32")
    for b in T.thread_binding((n + 127) // 128, thread="blockIdx.x"):
        for t in T.thread_binding(128, thread="threadIdx.x"):
            with T.sblock("add"):
                i = T.axis.spatial(n, b * 128 + t)
                T.where(b * 128 + t < n)
                OUT[i] = X[i] + T.float32(2) * Y[i]


def export(folder: Path, arch: str) -> Path:
    """Return a library with ``axpy(x, y, out)``: out = x + 2 y, in PTX for ``arch``."""
    os.environ["TVM_COMPILE_FORCE_FALLBACK"] = "1"  # source, also where there is a GPU
    target = tvm.target.Target({"kind": "cuda", "arch": arch}, host={"kind": "c"})
    passes, finish_host, finish_device = tvm.tirx.get_tir_pipeline("s_tir")
    module = tvm.tirx.transform.BindTarget(target)(tvm.IRModule({"axpy": axpy}))
    host, devices = split_host_device_mods(passes(module))
    [(device_target, device)] = devices.items()
    device = finish_device()(device)
    source = tvm.get_global_func("target.build.cuda")(device, device_target)
    host_module = tvm.get_global_func("target.build.c")(finish_host()(host), target.host)
    (folder / "host.c").write_text(host_module.inspect_source())
    (folder / "device.cu").write_text(source.inspect_source("cuda") or source.inspect_source())
    (folder / "kernels.inc").write_text("".join(_entry(f) for f in device.functions.items()))
    generate = f"arch=compute_{arch[3:]},code=compute_{arch[3:]}"
    _run(
        folder,
        "nvcc",
        "-fatbin",
        "--no-compress",
        "-gencode",
        generate,
        "device.cu",
        "-o",
        "code.bin",
    )
    tvm_include = Path(tvm.__file__).parent / "include"
    include = [libinfo.find_include_path(), libinfo.find_dlpack_include_path(), str(tvm_include)]
    _run(
        folder,
        *["gcc", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,defs"],
        "-DTVMFFIEnvModLookupFromImports=shim_lookup",
        *[f"-I{path}" for path in (*include, str(folder))],
        *["host.c", str(SHIM), libinfo.find_libtvm_ffi(), "-ldl", "-o", "library.so"],
    )
    return folder / "library.so"


def _entry(item) -> str:
    """Return a line of the shim's table: kernel, parameters, what the launch arguments mean."""
    variable, function = item
    tags = list(function.attrs["tirx.kernel_launch_params"])
    places = ["blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z"]
    numbers = ", ".join(str(places.index(tag)) for tag in tags)
    count, launch = len(function.params), len(tags)
    return f'{{"{variable.name_hint}", {count}, {launch}, {{{numbers}}}, NULL}},\n'


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True)
