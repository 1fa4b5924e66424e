"""From scheduled TensorIR to machine code: the one place that knows how kernels are compiled."""

from __future__ import annotations

import tvm
from tvm.target import Target


def compile_cpu(mod: tvm.IRModule, target: Target) -> tvm.runtime.Module:
    """Return the LLVM module of scheduled CPU kernels."""
    return tvm.tirx.build(mod, target)
