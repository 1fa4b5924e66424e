"""From scheduled TensorIR to machine code: the one place that knows how kernels are compiled."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Var
from tvm.target import Target
from tvm.tirx.buffer import BufferType

from blockscale.base.targets import cpu


def target(level: str) -> Target:
    """Return the TVM target of CPU ``level``; ValueError for an unknown level."""
    return Target({"kind": "llvm", **cpu(level).llvm})


def compile_cpu(mod: tvm.IRModule, target: Target) -> tvm.runtime.Module:
    """Return the LLVM module of scheduled CPU kernels."""
    aligned = {
        name: natural_alignment(func) if isinstance(func, tirx.PrimFunc) else func
        for name, func in mod.functions.items()
    }
    return tirx.build(tvm.IRModule(aligned), target)


def natural_alignment(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return ``func`` promising LLVM no more of its parameters than alignment to their elements.

    TVM promises 64 bytes and checks nothing: a view of a tensor, or any numpy array, would crash.
    """
    swap = [(param, _relaxed(param)) for param in func.params if isinstance(param.ty, BufferType)]

    def renamed(var: Var) -> Var:
        return next((new for old, new in swap if var.same_as(old)), var)

    return tvm_ffi.structural_map(func, (Var, renamed))


def _relaxed(param: Var) -> Var:
    kind = param.ty
    return tirx.decl_buffer(
        kind.shape,
        str(kind.dtype),
        param.name,
        strides=kind.strides,
        elem_offset=kind.elem_offset,
        data_alignment=tvm_ffi.dtype(str(kind.dtype)).itemsize,
        offset_factor=kind.offset_factor,
    )
