"""Scheduled TensorIR with GPU threads -> host C, CUDA C++ and machine code for one architecture."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.target import Target
from tvm.tirx.build import split_host_device_mods

from blockscale.base.targets import gpu
from blockscale.lower import nvcc, roots
from blockscale.lower.code import FunctionCode, KernelCode
from blockscale.tir.intrin.cuda import blocks as cuda_blocks

MAX_THREADS = 1024
"""Threads of a CTA, on every architecture."""

WARP = 32

CTAS = "blockscale.ctas"
"""Attribute of a function: CTAs of each of its kernels for which an SM must have registers."""


@dataclass(frozen=True)
class Source:
    """What TVM's passes make of a function: C for the host, CUDA C++ for the device."""

    host_c: str
    device: str
    kernels: tuple[KernelCode, ...]


@cache
def target(arch: str) -> Target:
    """Return the TVM target of ``arch`` ("sm_90a"), its host code in C."""
    return Target(
        {
            "kind": "cuda",
            "arch": arch,
            "max_threads_per_block": MAX_THREADS,
            "max_shared_memory_per_block": gpu(arch).cta_shared,
            "thread_warp_size": WARP,
        },
        host={"kind": "c"},
    )


@contextmanager
def _source_only() -> Iterator[None]:
    """Keep TVM from compiling for the GPU of this machine: the driver is none of its business."""
    name = "TVM_COMPILE_FORCE_FALLBACK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def symbol(name: str, arch: str) -> str:
    """Return the name of the host function of kernel function ``name`` for ``arch``."""
    return f"{name}__{arch}"


def sources(func: tirx.PrimFunc, name: str, arch: str) -> Source:
    """Return host and device code of the scheduled ``func``, exported as ``name``."""
    own = symbol(name, arch)
    mod = tvm.IRModule({own: roots.branch_free(func).with_attr("global_symbol", own)})
    kind = target(arch)
    with _source_only(), kind:
        passes, finish_host, finish_device = tirx.get_tir_pipeline("s_tir")
        host, devices = split_host_device_mods(passes(tirx.transform.BindTarget(kind)(mod)))
        [(device_target, device)] = devices.items()
        device = _between_its_neighbours(finish_device()(device))
        built = tvm.get_global_func("target.build.cuda")(device, device_target)
        host_built = tvm.get_global_func("target.build.c")(finish_host()(host), kind.host)
    return Source(
        host_built.inspect_source(),
        _bounded(_of_whole_warps(built.inspect_source("cuda") or built.inspect_source()), func),
        tuple(_kernel(variable, function) for variable, function in device.functions.items()),
    )


DEPENDENCIES = """
__device__ __forceinline__ void blockscale_after_predecessor(bool lets_next_begin) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (lets_next_begin) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
"""

LETS_NEXT_BEGIN = "bs_let_next_begin"
"""The device function by which a kernel says itself when the next one may be launched."""


def _between_its_neighbours(mod: tvm.IRModule) -> tvm.IRModule:
    """Let every kernel wait for the kernel before it, then let the next one be launched.

    Without the launch attribute of programmatic dependent launch both do nothing.  With it, a
    kernel is on the SMs before its predecessor has ended, and its successor likewise: that hides
    the launch.  No kernel touches memory before the wait.  One that calls `LETS_NEXT_BEGIN` waits
    for others than its predecessor: successors that took the SMs meanwhile could keep them from
    what these others wait for.
    """
    made = {}
    for variable, function in mod.functions.items():
        script = function.script()
        early = tirx.const(LETS_NEXT_BEGIN not in script, "bool")
        name = "blockscale_after_predecessor"
        wait = tirx.Evaluate(cuda_func_call(name, early, source_code=DEPENDENCIES))
        body = [wait, function.body]
        if cuda_blocks.STORE_ROW in script:
            body.append(tirx.Evaluate(cuda_blocks.stored_rows()))
        made[variable] = function.with_body(tirx.SeqStmt(body))
    return tvm.IRModule(made, attrs=mod.attrs)


def _of_whole_warps(device: str) -> str:
    """Let reductions among threads name all lanes of a warp.

    TVM asks which lanes are active.  After a branch that only some lanes take, CUDA does not
    promise that all are, and sums would lack the others'.  TVM reduces where all threads of a CTA
    come; only a partial warp has fewer lanes.
    """
    threads = re.findall(r"__launch_bounds__\((\d+)", device)
    if any(int(count) % WARP for count in threads):
        return device
    return device.replace("__activemask()", "0xFFFFFFFFu")


def _bounded(device: str, func: tirx.PrimFunc) -> str:
    """Let ptxas use no more registers than leave room for the function's `CTAS` on an SM."""
    ctas = int((func.attrs or {}).get(CTAS, 0))
    bounds = re.compile(r"__launch_bounds__\((\d+)\)")
    return bounds.sub(rf"__launch_bounds__(\1, {ctas})", device) if ctas else device


def _kernel(variable: tvm.ir.GlobalVar, function: tirx.PrimFunc) -> KernelCode:
    return KernelCode(
        name=str(variable.name_hint),
        params=tuple(_param_type(param) for param in function.params),
        launch=tuple(str(tag) for tag in function.attrs["tirx.kernel_launch_params"]),
    )


def _param_type(param: tirx.Var) -> str:
    """Return "handle" for a pointer, else the scalar's dtype."""
    kind: Any = param.ty
    dtype = getattr(kind, "dtype", None)
    return "handle" if dtype is None or str(dtype) == "handle" else str(dtype)


def compile_cuda(func: tirx.PrimFunc, name: str, arch: str, *, ptx: bool = False) -> FunctionCode:
    """Return the compiled function ``name`` for ``arch``.

    Args:
        func: scheduled, one or more kernels.
        name: of the exported function.
        arch: "sm_90a", "sm_100a", ...
        ptx: embed PTX text, which the driver (or the emulator) compiles, instead of a cubin.

    Raises:
        CompileError: nvcc is missing or refuses the source.
    """
    return compile_sources(sources(func, name, arch), name, arch, ptx=ptx)


def compile_sources(made: Source, name: str, arch: str, *, ptx: bool = False) -> FunctionCode:
    """Return the compiled function whose sources are ``made``; see `compile_cuda`."""
    compiled = nvcc.compile_cuda_source(made.device, arch, ptx=ptx)
    return FunctionCode(
        name=name,
        arch=arch,
        host_c=made.host_c,
        kernels=made.kernels,
        image=compiled.image,
    )
