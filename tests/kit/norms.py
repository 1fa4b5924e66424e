"""RMS norm and quantise: data, and what the reference says of them.  Imports no tvm."""

import numpy as np

from tests.kit.helpers import tensor, widen
from tests.reference import core as ref
from tests.reference import fused as fused

SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-7, 6e-8, 60000.0, -60000.0]
"""What a row may hold."""


def inputs(spec, rows, seed=0, spread=4):
    """Return input, (residual) and weight: rows and blocks of different sizes."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-spread, spread + 1, (rows, spec.blocks)))
    size = np.repeat(size, spec.block, axis=1) * np.exp2(rng.integers(-3, 4, (rows, 1)))
    shape = (rows, spec.hidden)
    found = {"input": tensor(rng.standard_normal(shape) * size, spec.dtype)}
    if spec.residual:
        found["residual"] = tensor(rng.standard_normal(shape) * size, spec.dtype)
    found["weight"] = tensor(rng.standard_normal(spec.hidden), spec.dtype)
    return found


def expected(spec, given, global_scale=1.0, eps=1e-6):
    """Return the outputs of the reference by name, scales linear."""
    residual = widen(given["residual"]) if spec.residual else None
    flashinfer = spec.convention == "flashinfer"
    first = flashinfer and not spec.residual
    x, weight = widen(given["input"]), widen(given["weight"])
    y, h = fused.norm(x, residual, weight, eps, spec.dtype, weight_first=first)
    gs = np.float32(global_scale) if flashinfer else np.float32(1) / np.float32(global_scale)
    ignored = flashinfer and spec.scale_format == "ue8m0"
    codes, byte = fused.encode(y, spec.block, spec.scale_format, None if ignored else gs)
    return {
        "packed": ref.pack(codes),
        "scale": byte,
        "residual": h,
        "y": ref.round_to(y, spec.dtype),
    }
