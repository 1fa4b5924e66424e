"""Operands of block-scaled GEMMs: tensors for the functions, float64 for the reference."""

from dataclasses import dataclass

import numpy as np
import torch

from tests.reference import core as ref

FORMATS = tuple(ref.GEMM)


@dataclass
class Operand:
    """Codes and scales as stored, and the elements that they stand for."""

    stored: torch.Tensor
    byte: np.ndarray
    value: np.ndarray

    @property
    def scale(self):
        """Scales in the 128x4 layout."""
        return tensor(ref.swizzle(self.byte))


def tensor(array):
    """Return a tensor of its own memory, contiguous also where a size is 0 or 1."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array.reshape(-1).copy()).view(array.shape)


def stored(codes, code):
    """Return codes, one a byte, as an operand holds them."""
    return tensor(ref.pack(codes) if code == "e2m1" else codes.astype(np.uint8))


def operand(rows, k, fmt, which, seed=0):
    """Return random codes (all finite ones) with scales of 2^-4 to 2^4."""
    rng = np.random.default_rng([rows, k, seed, ord(which)])
    a_code, b_code, block, scale = ref.GEMM[fmt]
    code = a_code if which == "a" else b_code
    codes = rng.integers(0, 16 if code == "e2m1" else 256, (rows, k), dtype=np.uint8)
    if code == "e4m3":
        codes = np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)
    low, high = (0x18, 0x58) if scale == "e4m3" else (123, 132)
    byte = rng.integers(low, high, (rows, k // block), dtype=np.uint8)
    return Operand(stored(codes, code), byte, ref.operand(codes, byte, fmt, which))


@dataclass
class Grouped:
    """Everything that a grouped GEMM takes, and its result in float64 (NaN: not written)."""

    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    offsets: torch.Tensor
    alpha: torch.Tensor
    truth: np.ndarray

    @property
    def inputs(self):
        """In the order of the parameters."""
        return [self.a, self.b, self.a_scale, self.b_scale, self.offsets, self.alpha]


def grouped(offsets, rows, n, k, fmt):
    """Return a random case with these ranges among ``rows`` rows of a."""
    experts = len(offsets) - 1
    a = operand(rows, k, fmt, "a", 1)
    each = [operand(n, k, fmt, "b", 2 + e) for e in range(experts)]
    alpha = np.exp2(np.arange(experts) - 1.0).astype(np.float32)
    return Grouped(
        a.stored,
        torch.stack([b.stored for b in each]),
        tensor(ref.group_scales(a.byte, offsets)),
        torch.stack([b.scale for b in each]),
        torch.tensor(offsets, dtype=torch.int32),
        tensor(alpha),
        ref.grouped_mm(a.value, np.stack([b.value for b in each]), offsets, alpha),
    )
