"""Gated activations and quantise: data, and what is sure of their results.  Imports no tvm."""

import numpy as np
import torch

from tests.kit.helpers import tensor
from tests.reference import core as ref
from tests.reference import fused as fused

MARGIN = 2.0**-18
"""Relative error of an activation: 8 roundings, and that of an exponent up to 16 in exp.

Elements whose rounding to 16 bits it may turn are not compared, nor blocks whose maximum is one.
"""

COMPARED = 0.95
"""Part that must be compared: float16 has 2^11 numbers to a power of two, so that 0.98 are sure."""


def inputs(spec, rows, blocks, experts=3, seed=0):
    """Return input and (mask): experts with no row, some rows and all rows; NaN beyond them."""
    rng = np.random.default_rng(seed)
    lead = (experts, rows) if spec.grouped else (rows,)
    width = blocks * spec.block * (2 if spec.gated else 1)
    size = np.exp2(rng.integers(-3, 3, (*lead, width // spec.block))).repeat(spec.block, -1)
    found = {"input": tensor(rng.standard_normal((*lead, width)) * size, spec.dtype)}
    if spec.grouped:
        mask = ([0, rows // 2 + 1, rows] * experts)[:experts]
        found["mask"] = torch.tensor(mask, dtype=torch.int32)
        for values_of, used in zip(found["input"], mask, strict=True):
            values_of[used:] = np.nan  # not read
    return found


def values(spec, x, numbers=()):
    """Return a of float32 input [rows, ...], and its bounds."""
    if not spec.gated:
        return x, x, x
    gate, up = np.split(x, 2, axis=-1)
    exact = fused.activation(spec.activation, gate, up, *([numbers] if numbers else []))
    with np.errstate(all="ignore"):
        bounds = (exact, exact * (1 - MARGIN), exact * (1 + MARGIN))
        return tuple(ref.round_to(bound, spec.dtype) for bound in bounds)


def equal(*arrays):
    """Return where all arrays are the same; NaN is NaN."""
    first, *rest = arrays
    return np.all([(x == first) | (np.isnan(x) & np.isnan(first)) for x in rest], axis=0)


def surely(spec, a, low, high):
    """Return the sure blocks [rows, blocks] and elements [rows, cols]."""
    shape = (len(a), a.shape[1] // spec.block, spec.block)
    blocks = equal(*(np.abs(x).reshape(shape).max(axis=-1) for x in (a, low, high)))
    return blocks, equal(a, low, high) & np.repeat(blocks, spec.block, axis=-1)


def encoded(spec, a, g):
    """Return codes and scale bytes of the spec's convention."""
    mode = fused.exact_mode if spec.convention == "flashinfer" else fused.divide_mode
    return mode(a, spec.block, spec.scale_format, g)


def stored(spec, byte):
    """Return scale bytes in the spec's layout."""
    return {"linear": np.asarray, "128x4": ref.swizzle, "8x4": fused.swizzle_8x4}[spec.layout](byte)
