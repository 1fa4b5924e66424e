"""What the op tests share: test data, and the way between torch tensors and reference arrays."""

import numpy as np
import pytest
import torch

from tests.kit.paths import GOLDEN
from tests.reference import core as ref

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def golden(name):
    """Return the arrays of one golden file."""
    return np.load(GOLDEN / f"{name}.npz", allow_pickle=False)


def says(*words):
    """Return a pattern for ``match=``: every word occurs, in any order and case."""
    return "(?is)" + "".join(f"(?=.*{word})" for word in words)


def rejects(*words):
    """Return the context in which a TypeError or ValueError must name all words."""
    return pytest.raises((TypeError, ValueError), match=says(*words))


def tensor(values, dtype="float32"):
    """Return a torch tensor of float32 values, rounded to dtype."""
    return torch.tensor(np.asarray(values, dtype=np.float32)).to(DTYPES[dtype])


def widen(x):
    """Return a torch tensor as float32 values; exact for bfloat16 and float16."""
    return x.detach().to(torch.float32).numpy()


def one(value):
    """Return a global scale: a float32 tensor of one element, or None for None."""
    return None if value is None else torch.tensor([float(value)], dtype=torch.float32)


def packed_tensor(codes):
    """Return codes [..., K] as a packed uint8 tensor [..., K/2]."""
    return torch.tensor(ref.pack(codes))


def scale_tensor(byte, fmt):
    """Return scale bytes as the dtype that a format's scales have in torch."""
    byte = torch.tensor(np.asarray(byte, dtype=np.uint8))
    return byte.view(torch.float8_e4m3fn) if fmt == "nvfp4" else byte


def as_bytes(x):
    """Return the bytes of a one-byte tensor."""
    return x.contiguous().view(torch.uint8).numpy()


def same(got, expected):
    """Compare two float arrays bit for bit, except that every NaN equals every NaN."""
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    assert got.shape == expected.shape
    equal = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    wrong = np.argwhere(~equal)
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {first(got, expected, wrong)}"
    )


def same_bytes(got, expected):
    """Compare two uint8 arrays."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype == np.uint8
    assert got.shape == expected.shape
    wrong = np.argwhere(got != expected)
    assert not len(wrong), (
        f"{len(wrong)} differ, first at {wrong[0]}: {first(got, expected, wrong)}"
    )


def first(got, expected, wrong):
    """Return the text of the first difference."""
    return f"got {got[tuple(wrong[0])]!r}, expected {expected[tuple(wrong[0])]!r}"


def random_matrix(shape, fmt, seed, spread=6):
    """Return normal float32 values [..., K] whose blocks differ in size by up to 2^(2 spread)."""
    rng = np.random.default_rng(seed)
    blocks = (*shape[:-1], shape[-1] // ref.BLOCK[fmt])
    size = np.exp2(rng.integers(-spread, spread + 1, blocks)).repeat(ref.BLOCK[fmt], axis=-1)
    return (rng.standard_normal(shape) * size).astype(np.float32)


def random_weight(n, k, fmt, seed):
    """Return codes [n, k] (all 16) and scale bytes [n, k / block] (a range of 2^8 around 2^-3)."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    low, high = (0x08, 0x48) if fmt == "nvfp4" else (120, 128)
    return codes, rng.integers(low, high, (n, k // ref.BLOCK[fmt]), dtype=np.uint8)


def neighbours(x, step):
    """Return the next representable numbers away from zero (step 1) or towards it (step -1)."""
    integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    return (x.view(integer) + step).view(x.dtype)  # the magnitude of a float is ordered as its bits


def fill_freed_memory(*sizes):
    """Leave 0xFF (NaN in every float type) in the memory that the allocator hands out next.

    The functions of the package allocate their outputs themselves: an element that a kernel forgets
    then holds what the memory held before.
    """
    dirty = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in sizes for _ in range(16)]
    del dirty
