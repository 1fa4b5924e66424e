"""blockscale.swizzle_scales and unswizzle_scales: the 128x4 layout, byte for byte."""

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.helpers import as_bytes, fill_freed_memory, golden, rejects, same_bytes, scale_tensor
from tests.reference import core as ref

SHAPES = [(1, 1), (1, 4), (7, 3), (31, 5), (33, 4), (128, 4), (129, 8), (130, 25), (300, 11)]


def distinct(rows, cols, seed=0):
    """Return random non-zero scale bytes, so that padding and values cannot be confused."""
    return np.random.default_rng(seed).integers(1, 256, (rows, cols), dtype=np.uint8)


@pytest.mark.parametrize(("rows", "cols"), [*SHAPES, (0, 5)])
def test_swizzle_and_back(rows, cols):
    """Every byte at its offset, padding zero although the memory was dirty, and the inverse."""
    scale = distinct(rows, cols)
    fill_freed_memory(ref.ceil_to(rows, 128) * ref.ceil_to(cols, 4))
    swizzled = bs.swizzle_scales(torch.from_numpy(scale))
    assert swizzled.dtype == torch.uint8
    same_bytes(swizzled.numpy(), ref.swizzle(scale))
    fill_freed_memory(rows * cols)
    linear = bs.unswizzle_scales(swizzled, rows, cols)
    assert linear.dtype == torch.uint8
    same_bytes(linear.numpy(), scale)


def test_offsets_by_hand():
    """Three offsets of one 256 x 8 buffer, worked out on paper."""
    scale = torch.zeros(256, 8, dtype=torch.uint8)
    scale[33, 2], scale[127, 7], scale[130, 4] = 1, 2, 3
    flat = bs.swizzle_scales(scale).reshape(-1)
    # row 33 is row 1 of the second 32 rows; (127, 7) ends tile (0, 1); row 130 is row 2 of tile 1.
    assert flat.nonzero().flatten().tolist() == [
        16 + 4 + 2,
        512 + 31 * 16 + 12 + 3,
        1024 + 512 + 32,
    ]
    assert flat[[22, 1023, 1568]].tolist() == [1, 2, 3]


@pytest.mark.parametrize("case", ["m1_k64", "m3_k128", "m128_k64", "m200_k256"])
def test_against_flashinfer(case):
    data = golden("flashinfer_mxfp4_swizzle")
    linear = data[f"q_{case}_bf16_random/te_sf_linear"]
    swizzled = bs.swizzle_scales(scale_tensor(linear, "nvfp4"))
    same_bytes(as_bytes(swizzled).reshape(-1), data[f"q_{case}_bf16_random/te_sf_sw128x4"])


def test_dtypes():
    """The dtype of the scales comes back; all 256 bytes pass, NaN included; e8m0 is accepted."""
    scale = np.arange(256, dtype=np.uint8).reshape(32, 8)
    swizzled = bs.swizzle_scales(scale_tensor(scale, "nvfp4"))
    assert swizzled.dtype == torch.float8_e4m3fn
    same_bytes(as_bytes(swizzled), ref.swizzle(scale))
    linear = bs.unswizzle_scales(swizzled, 32, 8)
    assert linear.dtype == torch.float8_e4m3fn
    same_bytes(as_bytes(linear), scale)
    if hasattr(torch, "float8_e8m0fnu"):
        swizzled = bs.swizzle_scales(torch.from_numpy(scale).view(torch.float8_e8m0fnu))
        same_bytes(as_bytes(swizzled), ref.swizzle(scale))


def test_padding_is_not_read():
    """Bytes in the padding do not reach the linear scales."""
    stored = np.full((128, 8), 0xFF, np.uint8)
    scale = distinct(7, 5)
    stored.reshape(-1)[ref.swizzle_offset(7, 5)] = scale
    same_bytes(bs.unswizzle_scales(torch.from_numpy(stored), 7, 5).numpy(), scale)


SCALE = torch.zeros(130, 5, dtype=torch.uint8)
SWIZZLED = torch.zeros(256, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bs.swizzle_scales(SCALE.float()), ["swizzle_scales", "float32", "uint8"]),
        (lambda: bs.swizzle_scales(SCALE.int()), ["swizzle_scales", "int32", "uint8"]),
        (lambda: bs.swizzle_scales(SCALE[0]), ["swizzle_scales", "dimension"]),
        (lambda: bs.swizzle_scales(SCALE[:, ::2]), ["swizzle_scales", r"contiguous\(\)"]),
        (lambda: bs.swizzle_scales(SCALE.to("meta")), ["swizzle_scales", "meta", "cpu"]),
        (lambda: bs.swizzle_scales(SCALE.tolist()), ["swizzle_scales", "list", "tensor"]),
        (
            lambda: bs.unswizzle_scales(SWIZZLED.float(), 130, 5),
            ["unswizzle_scales", "float32", "uint8"],
        ),
        (
            lambda: bs.unswizzle_scales(SCALE, 130, 5),
            ["unswizzle_scales", r"130, 5\b", r"256, 8\b"],
        ),
        (
            lambda: bs.unswizzle_scales(SWIZZLED, 128, 8),
            ["unswizzle_scales", r"256, 8\b", r"128, 8\b"],
        ),
        (
            lambda: bs.unswizzle_scales(SWIZZLED, 130, 9),
            ["unswizzle_scales", r"256, 8\b", r"256, 12\b"],
        ),
        (lambda: bs.unswizzle_scales(SWIZZLED, -1, 5), ["unswizzle_scales", "rows", "-1"]),
        (
            lambda: bs.unswizzle_scales(torch.zeros(256, 16, dtype=torch.uint8)[:, ::2], 130, 5),
            ["unswizzle_scales", r"contiguous\(\)"],
        ),
        (
            lambda: bs.unswizzle_scales(SWIZZLED.to("meta"), 130, 5),
            ["unswizzle_scales", "meta", "cpu"],
        ),
    ],
)
def test_bad_input(call, words):
    """One sentence: the function, the value, the rule and the remedy."""
    with rejects(*words):
        call()
