"""The GEMM in whole tiles, compiled as it is for the CPU, against float64.

Products and sums are float32, K of them: the tolerance is 2^-23 of the sum of magnitudes for each.
"""

import numpy as np
import pytest
import tvm

from blockscale.base.formats import E2M1, E4M3, GEMM
from blockscale.tir.gemm.tiles import COL_TILE, K_TILE, ROW_TILE, gemm_tiles
from tests.kit.pairwise import few
from tests.reference import core as ref

CHECKED = 40
"""Rows and columns of each tile that float64 checks."""


def operand(rng, code, rows):
    """Return the bytes of random rows, and their values."""
    packed = rng.integers(0, 256, (rows, K_TILE // code.per_byte), dtype=np.uint8)
    if code is E2M1:
        return packed, ref.e2m1_decode(ref.unpack(packed))
    packed[packed & 0x7F == 0x7F] = 0x2A  # no NaN
    return packed, ref.e4m3_decode(packed)


def scales(rng, form, rows):
    """Return random scales as 128x4 tiles [rows / 128, 512 bytes a tile], and a row's K values."""
    low, high = (0x20, 0x48) if form.scale is E4M3 else (120, 134)
    byte = rng.integers(low, high, (rows, K_TILE // form.block)).astype(np.uint8)
    tiles = ref.swizzle(byte).reshape(rows // 128, -1)
    decode = ref.e4m3_decode if form.scale is E4M3 else ref.ue8m0_decode
    return tiles, np.repeat(decode(byte), form.block, axis=1)


def product(alpha, a, b):
    """Rows and columns that are checked: alpha a b^T in float64."""
    return alpha * (a[:CHECKED] @ b[:CHECKED].T)


@pytest.mark.parametrize("fmt", few(list(GEMM)))
def test_plain(fmt):
    """One tile of rows and one of columns, with bias."""
    form, rng = GEMM[fmt], np.random.default_rng(1)
    a, a_value = operand(rng, form.a, ROW_TILE)
    b, b_value = operand(rng, form.b, COL_TILE)
    (sa, a_scale), (sb, b_scale) = scales(rng, form, ROW_TILE), scales(rng, form, COL_TILE)
    bias, alpha = rng.standard_normal(COL_TILE).astype(np.float32), np.float32([0.75])
    d = np.full((1, ROW_TILE, COL_TILE), np.nan, np.float32)
    func = gemm_tiles(fmt, "float32", COL_TILE, K_TILE, 0, None)
    run(func, a[None], b, sa[None], sb, alpha, bias, d)
    left, right = a_value * a_scale, b_value * b_scale
    want = product(0.75, left, right) + bias[:CHECKED]
    size = product(0.75, np.abs(left), np.abs(right)) + np.abs(bias[:CHECKED])
    assert (np.abs(d[0, :CHECKED, :CHECKED] - want) <= size * K_TILE * 2.0**-23).all()
    assert np.isfinite(d).all()


def test_grouped():
    """Each tile of rows is multiplied by the matrix of its expert, in any order."""
    form, rng = GEMM["nvfp4"], np.random.default_rng(2)
    table = np.array([2, 0], np.int32)
    a, a_value = operand(rng, form.a, 2 * ROW_TILE)
    b, b_value = operand(rng, form.b, 3 * COL_TILE)
    sa, a_scale = scales(rng, form, 2 * ROW_TILE)
    sb, b_scale = scales(rng, form, 3 * COL_TILE)
    alpha = np.array([0.5, np.nan, 2], np.float32)
    d = np.full((2, ROW_TILE, COL_TILE), np.nan, np.float32)
    func = gemm_tiles("nvfp4", "float32", COL_TILE, K_TILE, 3, None)
    arrays = (x.reshape(count, -1, x.shape[1]) for x, count in ((a, 2), (b, 3), (sa, 2), (sb, 3)))
    run(func, *arrays, alpha, table, d)
    left = (a_value * a_scale).reshape(2, ROW_TILE, K_TILE)
    right = (b_value * b_scale).reshape(3, COL_TILE, K_TILE)
    for tile, expert in enumerate(table):
        want = product(alpha[expert], left[tile], right[expert])
        size = product(alpha[expert], np.abs(left[tile]), np.abs(right[expert]))
        got = d[tile, :CHECKED, :CHECKED]
        assert (np.abs(got - want) <= size * K_TILE * 2.0**-23).all()


def run(func, *arrays):
    """Run the unscheduled function; the last array is what it writes."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
    tvm.compile(tvm.IRModule({"main": func}), target="llvm")["main"](*tensors)
    arrays[-1][...] = tensors[-1].numpy()
