"""Tensors of 16-bit floats for functions that TVM compiles for the CPU; NumPy has no bfloat16."""

import ctypes

import numpy as np
import tvm


def tensor(array, dtype):
    """Return an array (patterns of 16 bits for floats of 16) as a tensor of ``dtype``."""
    array = np.ascontiguousarray(array)
    made = tvm.runtime.empty(array.shape, dtype)
    ctypes.memmove(made.data_ptr(), array.ctypes.data, array.nbytes)
    return made


def fetch(made, like):
    """Return what a tensor holds as an array of the shape and type of ``like``."""
    out = np.empty_like(like)
    ctypes.memmove(out.ctypes.data, made.data_ptr(), out.nbytes)
    return out
