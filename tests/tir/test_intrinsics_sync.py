"""Intrinsics of block-scaled mma.sync: desc, compiled for the CPU, and the instructions, emulated.

A kernel of one warp issues what `lower.sync` prints for an intrinsic: the manual's fragments by
ldmatrix, words of scales, MMAs, and sums to rows.  Tolerances are those of test_intrinsics_tcgen05.
"""

from functools import cache

import numpy as np
import pytest

from blockscale.base.formats import E2M1, GEMM
from blockscale.emulator import launch
from blockscale.lower import nvcc
from blockscale.tir.intrin import register_named, sync
from tests.kit.pairwise import few
from tests.kit.tcgen05_kernels import call_text, run_desc
from tests.tir.test_intrinsics_tcgen05 import operand, scale_bytes, words

N = 64
SHAPES = [
    sync.Mma(fmt, N, row_bytes, swap)
    for fmt, row_bytes in (
        *(("nvfp4", 128), ("nvfp4", 64), ("mxfp4", 128), ("mxfp4", 64)),
        *(("mxfp8xmxfp4", 128), ("mxfp8", 128)),
    )
    for swap in (False, True)
]
FORMATS = {False: {"e4m3": 0, "e2m1": 5}, True: {"e2m1": 1}}
"""Numbers of formats, with 8 bits an element and with 4."""


def kernel(shape, entry):
    """A warp's products of 32 rows of x and N of y, and a row of sums to each lane."""
    row, bytes_ = GEMM[shape.fmt], shape.row_bytes
    x, y = (FORMATS[row.a.bits == 4][c.name] for c in (row.a, row.b)[:: -1 if shape.swap else 1])
    load_x, load_y = ("bs_ldmatrix4_of_8" if f == 5 else "bs_ldmatrix4" for f in (x, y))
    turn = "lane % 8" if bytes_ == 128 else "lane % 8 / 2"
    return f"""
extern "C" __global__ void {entry}(const uint4 *x, const uint4 *y, const uint32_t *sfx,
                                   const uint32_t *sfy, float *d, int offset, int byte) {{
  int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int i = lane; i < {2 * bytes_}; i += 32) stage[i] = x[i];
  for (int i = lane; i < {N * bytes_ // 16}; i += 32) stage[{2 * bytes_} + i] = y[i];
  __syncwarp();
  uint32_t at = bs_shared(stage), a[2][4], b[4], acc[{N}];
  float sums[{N}] = {{}};
  uint32_t sx = sfx[8 * t + g];
  BsWords<{N // 32}> sy;
  for (int q = 0; q < {N // 32}; ++q) sy.w[q] = sfy[32 * q + 8 * t + g];
  for (int i = 0; i < 2; ++i)
    {load_x}(a[i], at + (16 * i + lane % 16) * {bytes_}
             + ((offset / 16 + lane / 16) ^ {turn}) * 16);
  for (int p = 0; p < {N // 16}; ++p) {{
    {load_y}(b, at + (32 + 16 * p + lane / 16 * 8 + lane % 8) * {bytes_}
             + ((offset / 16 + lane / 8 % 2) ^ {turn}) * 16);
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j)
        bs_sync_mma_{row.kind}<{x}, {y}, 0>(sums + 16 * p + 8 * j + 4 * i, a[i], b + 2 * j, sx,
                                            byte, i, sy.w[p / 2], byte, 2 * p % 4 + j);
  }}
  for (int c = 0; c < {N}; c += 32) {{
    __syncwarp();
    bs_sync_stage<32>(at, sums + c, lane);
    __syncwarp();
    bs_sync_row<32>(acc + c, at, lane);
  }}
  for (int c = 0; c < {N}; ++c) d[lane * {N} + c] = __uint_as_float(acc[c]);
}}
"""


@cache
def ptx():
    """All kernels."""
    head = '#include "scaled_mma.cuh"\n__shared__ __align__(1024) uint4 stage[1024];\n'
    texts = [kernel(shape, f"mma{i}") for i, shape in enumerate(SHAPES)]
    return nvcc.compile_cuda_source(head + "".join(texts), "sm_120a", ptx=True).image.decode()


@pytest.mark.parametrize("number", few(range(len(SHAPES))), ids=[shape.name for shape in SHAPES])
def test_mma(number):
    """Every kind, both swizzles, both orders of operands; any step of K, any byte of the words."""
    shape, rng = SHAPES[number], np.random.default_rng(number)
    row = GEMM[shape.fmt]
    rows, columns = ((N, 32) if shape.swap else (32, N)), row.step // row.block
    both = [operand(rng, c, n, shape) for c, n in zip((row.a, row.b), rows, strict=True)]
    scales = [scale_bytes(rng, shape.fmt, n) for n in rows]
    byte, at = int(rng.integers(4 // columns)) * columns, int(rng.integers(len(both[0][0])))
    own = [np.ascontiguousarray(s[:, byte : byte + s.shape[1] - 4 + columns]) for s in scales]
    signs = [np.uint8(0x77 if c is E2M1 else 0x7F) for c in (row.a, row.b)]
    want, size = (np.zeros((32, N), np.float32) for _ in range(2))
    name = sync.mma(shape)
    codes = [packed[at] for packed, _ in both]
    run_desc(name, A=codes[0], SA=own[0], B=codes[1], SB=own[1], D=want)
    plain = [code & sign for code, sign in zip(codes, signs, strict=True)]
    run_desc(name, A=plain[0], SA=own[0], B=plain[1], SB=own[1], D=size)
    turn = -1 if shape.swap else 1
    stages, found = [stage for _, stage in both][::turn], np.full((32, N), np.nan, np.float32)
    given = [*stages, *[words(s) for s in scales][::turn], found, 32 * at, byte]
    report = launch(ptx(), entry=f"mma{number}", grid=1, block=32, args=given)
    assert not report.hazards
    tolerance = size * (row.step + 4) * 2.0**-23
    assert (np.abs(found.astype(np.float64) - want) <= tolerance).all()
    assert np.abs(want).max() > 0


def test_names():
    """A trace's names bring the intrinsics back; calls say shapes and formats."""
    shape = SHAPES[9]
    text = " ".join([shape.name, sync.scales(), sync.stage(16), sync.row_of(16)])
    register_named(text)
    call = call_text(shape.name)
    assert call.startswith("bs_sync_mma_mxf8f6f4(D, bs_sync_rows<128>(B), bs_sync_rows<128>(A), ")
    assert "bs_sync_shape(32, 64, 5, 0, 1)" in call
    with pytest.raises(ValueError, match="no format multiplies e4m3e4m3 by kind mxf4"):
        register_named(shape.name.replace("mxf8f6f4", "mxf4").replace("e2m1e4m3", "e4m3e4m3"))
