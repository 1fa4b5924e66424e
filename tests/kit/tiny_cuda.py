"""A CUDA library in miniature for tests: host C as TVM writes it and PTX, both by hand and short.

``mix``: out = x * scale + codes + bias, residual_out = a * residual + k, one block per row, with
1024 * k bytes of dynamic shared memory.  ``pair``: y = each block's rank in its cluster of two.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tvm_ffi

from blockscale.base import abi
from blockscale.base.manifest import BLOCKSCALE_ABI
from blockscale.building.export_cuda import write_cuda_library
from blockscale.lower.code import FunctionCode, KernelCode

ARCHS = ("sm_90a", "sm_100a")
WIDTH = 64

_PTX = """
.version 8.7
.target @ARCH@
.address_size 64

.visible .entry mix_kernel(
    .param .u64 x, .param .u64 codes, .param .u64 scale, .param .u64 bias, .param .u64 residual,
    .param .u64 out, .param .u64 residual_out, .param .f32 a, .param .s32 k)
{
    .reg .b64 %p<12>;
    .reg .b32 %r<6>;
    .reg .b16 %h<2>;
    .reg .f32 %f<12>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.s32 %r3, %r1, 64, %r2;
    mul.wide.s32 %p1, %r3, 4;
    ld.param.u64 %p2, [x];
    add.s64 %p2, %p2, %p1;
    ld.global.f32 %f1, [%p2];
    ld.param.u64 %p3, [codes];
    cvt.s64.s32 %p4, %r3;
    add.s64 %p3, %p3, %p4;
    ld.global.u8 %h1, [%p3];
    cvt.rn.f32.u16 %f2, %h1;
    ld.param.u64 %p4, [scale];
    ld.global.f32 %f3, [%p4];
    ld.param.u64 %p5, [bias];
    mul.wide.s32 %p6, %r1, 4;
    add.s64 %p5, %p5, %p6;
    ld.global.f32 %f4, [%p5];
    fma.rn.f32 %f5, %f1, %f3, %f2;
    add.f32 %f5, %f5, %f4;
    ld.param.u64 %p7, [out];
    add.s64 %p7, %p7, %p1;
    st.global.f32 [%p7], %f5;
    ld.param.u64 %p8, [residual];
    add.s64 %p8, %p8, %p1;
    ld.global.f32 %f6, [%p8];
    ld.param.f32 %f7, [a];
    ld.param.s32 %r4, [k];
    cvt.rn.f32.s32 %f8, %r4;
    fma.rn.f32 %f9, %f6, %f7, %f8;
    ld.param.u64 %p9, [residual_out];
    add.s64 %p9, %p9, %p1;
    st.global.f32 [%p9], %f9;
    ret;
}

.visible .entry pair_kernel(.param .u64 y)
{
    .reg .b64 %p<3>;
    .reg .b32 %r<3>;
    griddepcontrol.wait;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %cluster_ctaid.x;
    ld.param.u64 %p1, [y];
    mul.wide.s32 %p2, %r1, 4;
    add.s64 %p1, %p1, %p2;
    st.global.u32 [%p1], %r2;
    ret;
}
"""

_HOST = """
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
void *__tvm_ffi__library_ctx = NULL;
static void *set_device, *kernel;
TVM_FFI_DLL int32_t __tvm_ffi_@NAME@(void *self_handle, void *given, int32_t count, void *result) {
  TVMFFIAny *args = given, stack[12];
  const DLTensor *first = args[0].v_ptr;
  int rows = (int)first->shape[0];
  if (first->ndim != @RANK@) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "@NAME@: wrong rank");
    return -1;
  }
  if (set_device == NULL) {
    if (TVMFFIEnvModLookupFromImports(__tvm_ffi__library_ctx, "__tvm_set_device", &set_device))
      return -1;
  }
  if (TVMFFIFunctionCall(set_device, stack, 2, result)) return -1;
  if (kernel == NULL) {
    if (TVMFFIEnvModLookupFromImports(__tvm_ffi__library_ctx, "@KERNEL@", &kernel))
      return -1;
  }
  @BODY@
  return TVMFFIFunctionCall(kernel, stack, @COUNT@, result);
}
TVM_FFI_DLL int32_t __tvm_ffi_main(void *self_handle, void *args, int count, void *result) {
  return __tvm_ffi_@NAME@(self_handle, args, count, result);
}
"""

_MIX_BODY = """
  int order[] = {0, 1, 2, 3, 6, 7, 8};
  for (int i = 0; i < 7; ++i) {
    const DLTensor *t = args[order[i]].v_ptr;
    if (t->ndim == 2 && (t->shape[0] != rows || t->shape[1] != 64)) {
      TVMFFIErrorSetRaisedFromCStr("ValueError", "mix: shapes differ");
      return -1;
    }
  }
  for (int i = 0; i < 7; ++i) stack[i].v_ptr = ((DLTensor *)args[order[i]].v_ptr)->data;
  stack[7].v_float64 = args[4].v_float64;
  stack[8].v_int64 = args[5].v_int64;
  stack[9].v_int64 = rows;
  stack[10].v_int64 = 64;
  stack[11].v_int64 = 1024 * args[5].v_int64;
"""
_PAIR_BODY = """
  stack[0].v_ptr = first->data;
  stack[1].v_int64 = rows;
  stack[2].v_int64 = 2;
  stack[3].v_int64 = 1;
"""

_KERNELS = {
    "mix": KernelCode(
        "mix_kernel",
        ("handle",) * 7 + ("float32", "int32"),
        ("blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory"),
    ),
    "pair": KernelCode(
        "pair_kernel",
        ("handle",),
        ("blockIdx.x", "clusterCtaIdx.x", "threadIdx.x"),
    ),
}


def code(name: str, arch: str) -> FunctionCode:
    """Return one of the functions for one architecture."""
    kernel = _KERNELS[name]
    text = _HOST
    for key, value in {
        "BODY": _MIX_BODY if name == "mix" else _PAIR_BODY,
        "NAME": f"{name}__{arch}",
        "RANK": "2" if name == "mix" else "1",
        "KERNEL": kernel.name,
        "COUNT": str(len(kernel.params) + len(kernel.launch)),
    }.items():
        text = text.replace(f"@{key}@", value)
    return FunctionCode(name, arch, text, (kernel,), _PTX.replace("@ARCH@", arch).encode())


def _param(name: str, dtype: str, shape: list[int | str] | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, **more}


_ROWS: list[int | str] = ["rows", WIDTH]
_PARAMS = {
    "mix": [
        _param("x", "float32", _ROWS),
        _param("codes", "uint8", _ROWS, storage="byte"),
        _param("scale", "float32", [1], default=1.0),
        _param("bias", "float32", ["rows"], default=0.0),
        _param("a", "float32", None, default=0.1),
        _param("k", "int32", None, default=3),
        _param("residual", "float32", _ROWS),
        _param("out", "float32", _ROWS, output=True),
        _param("residual_out", "float32", _ROWS, output=True, alias="residual"),
    ],
    "pair": [_param("y", "int32", ["rows"], output=True)],
}


def manifest(*names: str, archs: tuple[str, ...] = ARCHS) -> dict[str, Any]:
    """Return a manifest of these functions (default: all); the caller may change it."""
    functions = {
        name: {"base": name, "params": _PARAMS[name], "buckets": [{"tuned": True}]}
        for name in names or _PARAMS
    }
    contents = {
        "format": 1,
        "blockscale": "0.1.0",
        "abi": {
            "tvm_ffi": tvm_ffi.__version__,
            "facts": abi.declared(),
            "blockscale": BLOCKSCALE_ABI,
        },
        "target": {"kind": "cuda", "level": "+".join(archs), "features": [], "archs": list(archs)},
        "built": {},
        "functions": functions,
    }
    return copy.deepcopy(contents)


@cache
def library_file() -> Path:
    """Return the library for all architectures; do not change it."""
    codes = [code(name, arch) for name in _PARAMS for arch in ARCHS]
    return write_cuda_library(codes, manifest(), Path(mkdtemp(prefix="blockscale-test-")) / "c.so")
