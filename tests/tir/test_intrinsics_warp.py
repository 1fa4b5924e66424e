"""Tensor intrinsics of warps: desc, compiled for the CPU, and what kernels issue, emulated, agree.

Device functions are called as `lower.warp` calls them; operands of registers are spread over the
lanes, and results gathered, by the tables of the PTX manual alone.
"""

import re
from functools import cache

import numpy as np
import pytest
import tvm
from tvm.s_tir import TensorIntrin

from blockscale.emulator import launch
from blockscale.lower import nvcc
from blockscale.lower.warp.multiply import OPERANDS, wgmma
from blockscale.specs.plans.moe import TERM, scale_count
from blockscale.tir.intrin import warp
from blockscale.tir.moe.tiles import left_over
from tests.kit import fresh
from tests.kit.half_tensors import fetch, tensor
from tests.kit.moe_harness import bits, values
from tests.kit.pairwise import each
from tests.kit.tcgen05_kernels import call_text

FORMATS = [
    ("nvfp4", 16, 0, "bfloat16"),
    ("nvfp4", 16, 0, "float16"),
    ("mxfp4", 32, 0, "bfloat16"),
    ("mxfp4", 32, 0, "float16"),
    ("int4", 128, 0, "bfloat16"),
    ("int4", 64, 0, "float16"),
    ("int4", 32, 0, "bfloat16"),
    ("int4", 64, 1, "bfloat16"),
    ("int4", 32, 1, "float16"),
    ("int4", 64, TERM, "float16"),
    ("int4", 128, TERM, "bfloat16"),
]
LANE = np.arange(32)
ROW, QUAD = LANE // 4, LANE % 4
TOKENS = (8, 48, 152)


def compiled(*texts):
    """Return the PTX of CUDA text."""
    return nvcc.compile_cuda_source("\n".join(texts), "sm_90a", ptx=True).image.decode()


@cache
def desc(name):
    """Return the compiled desc of an intrinsic and its parameters as (name, dtype)."""
    text = re.sub(r', scope="[a-z.]+"', "", TensorIntrin.get(name).desc.script())
    function = tvm.script.from_source(text)
    params = [(var.name, str(var.dtype)) for var in function.params]
    return tvm.compile(tvm.IRModule({"main": function}), target="llvm")["main"], params


def run_desc(name, **arrays):
    """Run the desc on ``arrays`` by parameter; return what the last one holds then."""
    function, params = desc(name)
    tensors = [tensor(arrays[param], dtype) for param, dtype in params]
    function(*tensors)
    return fetch(tensors[-1], arrays[params[-1][0]])


# ---- Loads --------------------------------------------------------------------------------------


COPY = """
#include "mma.cuh"
extern "C" __global__ void copy(const uint8_t *S, uint8_t *out) {{
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t barrier;
  uint32_t D = bs_shared(smem), bar = bs_shared(&barrier);
  if (threadIdx.x == 0) {{
    bs_mbar_init(bar, 1);
    bs_mbar_init_fence();
    bs_mbar_expect(bar, {size});
    bs_bulk_load(D, S, {size}, bar, bs_policy(true));
  }}
  __syncthreads();
  bs_mbar_wait(bar, 0);
  for (int i = threadIdx.x; i < {size} + 64; i += 32) out[i] = i < {size} ? smem[i] : 0;
}}
"""


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize(
    ("blocks", "count", "dtype"), [(4, 512, "uint32"), (1, 128, "uint32"), (2, 256, "uint8")]
)
def test_bulk(blocks, count, dtype, table):
    """Contiguous bytes, nothing behind them; of the expert that a table names."""
    name = warp.bulk(blocks, count, dtype, table)
    assert call_text(name) == "bs_warp_bulk(D, S)"
    shape = (blocks, count) if blocks > 1 else (count,)
    data = np.random.default_rng(blocks).integers(0, 256, shape).astype(dtype)
    size = data.nbytes
    out = np.full(size + 64, 0xEE, np.uint8)
    ptx = compiled(COPY.format(size=size))
    report = launch(ptx, entry="copy", grid=1, block=32, dynamic_smem=size, args=[data, out])
    report.check()
    given = {"E": np.zeros(1, np.int32)} if table else {}
    want = run_desc(name, S=data, D=np.zeros_like(data), **given)
    assert np.array_equal(out[:size], want.view(np.uint8).reshape(-1))
    assert not out[size:].any()


ROWS = """
#include "warp_groups.cuh"
extern "C" __global__ void copy(const uint4 *x, const int *order, uint8_t *out) {
  extern __shared__ __align__(1024) uint8_t smem[];
  int begin = threadIdx.x / 8, piece = threadIdx.x % 8;
  for (int i = threadIdx.x; i < 3072; i += 32) smem[i] = 0;
  __syncthreads();
  uint32_t to = bs_shared(smem) + begin * 128 + (piece ^ begin & 7) * 16;
  uint32_t source[3];
  for (int i = 0; i < 3; ++i) source[i] = order[begin + 4 * i] * 16u;
  bs_async_pieces<3, 4, 2, 1536>(to, x + piece, source, 3 - begin / 3);
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  for (int i = threadIdx.x; i < 3072; i += 32) out[i] = smem[i];
}
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("table", [True, False])
def test_row(table, dtype):
    """Rows of x, where the swizzle of 128 bytes says; as many as a tile has, of two blocks."""
    name = warp.row(dtype, table)
    assert call_text(name) == "bs_warp_row(D, S)"
    x = np.random.default_rng(1).integers(0, 2**16, (12, 128)).astype(np.uint16)
    order = np.random.default_rng(2).permutation(12).astype(np.int32)
    out = np.zeros((2, 12, 128), np.uint8)
    report = launch(
        compiled(ROWS), entry="copy", grid=1, block=32, dynamic_smem=3072, args=[x, order, out]
    )
    report.check()
    for row, slot in enumerate(order):
        for block in range(2):
            chunks = out[block, row].reshape(8, 16)
            if row == 11:  # the one that there is not
                assert not chunks.any()
                continue
            arrays = {"S": x[slot, 64 * block : 64 * block + 64].copy()}
            arrays["D"] = np.zeros(64, np.uint16)
            if table:
                arrays["E"] = np.array([slot], np.int32)
            want = run_desc(name, **arrays).view(np.uint8).reshape(8, 16)
            assert all(np.array_equal(chunks[c ^ row % 8], want[c]) for c in range(8))


# ---- Decoding -----------------------------------------------------------------------------------


DECODE = {
    "positions": """
  uint4 codes = bs_load16_shared(W + lane * 16);
  BsDecode<P> scales(BsDecode<P>::load(S, lane));
  scales.decode(codes.x, A), scales.decode(codes.y, A + 4);
  scales.decode(codes.z, A + 8), scales.decode(codes.w, A + 12);""",
    "": """
  uint4 codes = bs_load16_shared(W + lane / 4 * 64 + (lane % 4 + lane / 4 / 2) % 4 * 16);
  BsDecode<P> scales(BsDecode<P>::load(S, lane));
  scales.decode(codes.x, A), scales.decode(codes.y, A + 4);
  scales.decode(codes.z, A + 8), scales.decode(codes.w, A + 12);""",
    "steps": """
  uint32_t turn[4];
  for (int j = 0; j < 4; ++j) turn[j] = (lane / 4 / 2 + j) % 4 * 16;
  uint4 codes = bs_load_steps(W + lane / 4 * 64 + lane % 4 * 4, turn);
  BsStepScales<P> scales(S, lane / 4);
  scales.of<0>().decode(codes.x, A), scales.of<1>().decode(codes.y, A + 4);
  scales.of<2>().decode(codes.z, A + 8), scales.of<3>().decode(codes.w, A + 12);""",
}
"""How kernels decode in each order of K."""


def decode_kernel(fmt, group, zeros, dtype, order):
    """Return a kernel that decodes 16 rows x 64 k and shows each lane's fragments, and FACTOR."""
    constants = {
        "FORMAT": f"BS_MOE_{fmt.upper()}",
        "GROUP": group,
        "ZEROS": zeros,
        "BF16": int(dtype == "bfloat16"),
    }
    lines = [f"  static constexpr int {name} = {value};" for name, value in constants.items()]
    return "\n".join(
        [
            '#include "warp_steps.cuh"',
            "struct P {",
            *lines,
            "};",
            """
extern "C" __global__ void decode(const uint32_t *words, const uint32_t *scales_in, int count,
                                  uint32_t *out, float *factor) {
  __shared__ __align__(128) uint32_t smem[256];
  int lane = threadIdx.x;
  for (int i = threadIdx.x; i < 128; i += 32) smem[i] = words[i];
  for (int i = threadIdx.x; i < count; i += 32) smem[128 + i] = scales_in[i];
  __syncthreads();
  uint32_t A[16], W = bs_shared(smem), S = W + 512;
""",
            DECODE[order],
            """
  for (int i = 0; i < 16; ++i) out[threadIdx.x * 16 + i] = A[i];
  *factor = BsDecode<P>::FACTOR;
}
""",
        ]
    )


def gathered(fragments, order):
    """Return [16, 64] patterns from the lanes' registers [32, 4 steps, a0..a3, 2].

    In the order of channels a thread has, of an MMA or of all four, 16 neighbours: word j those of
    2 j, 2 j + 1, 2 j + 8 and 2 j + 9.
    """
    out = np.zeros((16, 64), np.uint16)
    for step in range(4):
        for register in range(4):
            row = ROW + 8 * (register % 2)
            column = 16 * step + 2 * QUAD + 8 * (register // 2)
            if order == "":
                column = 16 * QUAD + 2 * step + 8 * (register // 2)
            for half in range(2):
                out[row, column + half] = fragments[:, step, register, half]
    return out


def stored_scales(rng, fmt, zeros, dtype, count):
    """Return random scales as they are stored, whose products are normal numbers."""
    if fmt == "nvfp4":
        return rng.integers(0x20, 0xA0, count).astype(np.uint8)
    if fmt == "mxfp4":
        return rng.integers(226, 238, count).astype(np.uint8)
    scale = rng.uniform(0.01, 1, count)
    if zeros:
        scale[1::2] = rng.integers(0, 16, count // 2)
    return bits(scale, dtype)


@each(
    legal=lambda order, form: form[2] != TERM or order == "positions",  # of INT4's products alone
    order=list(DECODE),
    form=[pytest.param(form, id="-".join(map(str, form))) for form in FORMATS],
)
def test_decode(order, form):
    """Every code in every place; what is left of powers of two is the kernels' FACTOR."""
    fmt, group, zeros, dtype = form
    name = warp.decode(fmt, group, zeros, dtype, order)
    call = call_text(name)
    numbers = f"{['nvfp4', 'mxfp4', 'int4'].index(fmt)}, {group}, {zeros}"
    assert call == f"bs_warp_decode{'_' if order else ''}{order}(A, W, S, {numbers})"
    ptx = compiled(decode_kernel(fmt, group, zeros, dtype, order))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        words = rng.integers(0, 2**32, 128).astype(np.uint32)
        count = scale_count(fmt, group, zeros)
        scales = stored_scales(rng, fmt, zeros, dtype, count)
        out, factor = np.zeros((32, 16), np.uint32), np.zeros(1, np.float32)
        padded = scales.view(np.uint32)
        args = [words, padded, padded.size, out, factor]
        launch(ptx, entry="decode", grid=1, block=32, args=args).check()
        assert factor[0] == left_over(fmt, zeros, dtype)
        fragments = out.view(np.uint16).reshape(32, 4, 4, 2)
        got = values(gathered(fragments, order), dtype)
        want = values(run_desc(name, W=words, S=scales, A=np.zeros((16, 64), np.uint16)), dtype)
        assert np.array_equal(got, want)
        assert np.unique(want).size > 50


# ---- Products -----------------------------------------------------------------------------------


def operands(rows, tokens, dtype, seed):
    """Return patterns of a [rows, 64] and x [tokens, 64], and sums d [tokens, rows]."""
    rng = np.random.default_rng(seed)
    a, x = rng.standard_normal((rows, 64)), rng.standard_normal((tokens, 64))
    d = rng.standard_normal((tokens, rows)).astype(np.float32)
    return bits(a, dtype), bits(x, dtype), d


def fragment(a):
    """Return the registers [rows / 16 * 32, 4] of an operand A [rows, 16] of 16-row tiles."""
    tiles = a.reshape(-1, 16, 16)
    out = np.zeros((len(tiles), 32, 4, 2), np.uint16)
    for register in range(4):
        row, column = ROW + 8 * (register % 2), 2 * QUAD + 8 * (register // 2)
        for half in range(2):
            out[:, :, register, half] = tiles[:, row, column + half]
    return out.reshape(-1, 8).view(np.uint32)


def spread(d):
    """Return sums d [tokens, rows] as registers [rows / 16 * 32, tokens / 2]."""
    tokens, rows = d.shape
    tiles = d.T.reshape(-1, 16, tokens // 8, 8)
    out = np.zeros((rows // 16, 32, tokens // 8, 4), np.float32)
    for register in range(4):
        out[..., register] = tiles[
            :, ROW + 8 * (register // 2), :, 2 * QUAD + register % 2
        ].swapaxes(0, 1)
    return out.reshape(-1, tokens // 2)


def judge(want, d, got):
    """Fail unless the registers hold what the descs make of the operands, up to rounding."""
    size = np.abs(d) + np.abs(want) + 64
    assert (np.abs(got - spread(want)) <= spread(size) * 2.0**-20).all()
    assert not (np.abs(got - spread(d)) <= spread(size) * 2.0**-20).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_and_mma(dtype):
    """Fragments are spread as table 9.7.14.5.8 says: weights are rows, tokens columns."""
    load, name = warp.matrices(dtype), warp.mma(dtype)
    assert (call_text(load), call_text(name)) == ("bs_warp_matrices(D, S)", "bs_warp_mma(D, A, X)")
    flag = str(dtype == "bfloat16").lower()
    kernel = f"""
#include "mma.cuh"
extern "C" __global__ void product(const uint32_t *a, const uint4 *x, float *d) {{
  __shared__ __align__(1024) uint4 smem[64];
  int lane = threadIdx.x;  // rows of x are 128 bytes, swizzled
  for (int i = lane; i < 64; i += 32) smem[i / 8 * 8 + (i % 8 ^ i / 8)] = x[i];
  __syncthreads();
  uint32_t at = bs_shared(smem) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16, X[8];
  bs_ldmatrix4(X, at), bs_ldmatrix4(X + 4, at ^ 64);
  float D[4];
  for (int i = 0; i < 4; ++i) D[i] = d[lane * 4 + i];
  for (int j = 0; j < 4; ++j) {{
    uint32_t A[4];
    for (int i = 0; i < 4; ++i) A[i] = a[(j * 32 + lane) * 4 + i];
    bs_mma16816<{flag}>(D, A, X[2 * j], X[2 * j + 1]);
  }}
  for (int i = 0; i < 4; ++i) d[lane * 4 + i] = D[i];
}}
"""
    ptx = compiled(kernel)
    for seed in range(3):
        a, x, d = operands(16, 8, dtype, seed)
        registers = spread(d)
        steps = np.concatenate([fragment(a[:, 16 * j : 16 * j + 16].copy()) for j in range(4)])
        launch(ptx, entry="product", grid=1, block=32, args=[steps, x, registers]).check()
        loaded = run_desc(load, S=x, D=np.zeros_like(x))
        judge(run_desc(name, A=a, X=loaded, D=d.copy()), d, registers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_wgmma(tokens, dtype):
    """A from registers of four warps, x from swizzled rows, at each of a block's steps of K."""
    name = warp.wgmma(tokens, dtype)
    assert call_text(name) == f"bs_warp_wgmma<{tokens}>(D, A, X)"
    kernel = f"""
#include "mma.cuh"
{wgmma(dtype, tokens)}
extern "C" __global__ void product(const uint32_t *a, const uint4 *x, float *d, int step) {{
  extern __shared__ __align__(1024) uint4 rows[];
  for (int i = threadIdx.x; i < {8 * tokens}; i += 128)
    rows[i / 8 * 8 + (i % 8 ^ i / 8 % 8)] = x[i];
  bs_fence_async();
  __syncthreads();
  uint32_t A[4];
  float D[{tokens // 2}];
  uint64_t X = bs_wgmma_rows128(bs_shared(rows)) + 2 * step;
  for (int i = 0; i < 4; ++i) A[i] = a[threadIdx.x * 4 + i];
  for (int i = 0; i < {tokens // 2}; ++i) D[i] = d[threadIdx.x * {tokens // 2} + i];
  bs_wgmma_fence();
  BsWgmma<{OPERANDS[dtype]}, {tokens}>::run(D, A, X);
  bs_wgmma_commit();
  bs_wgmma_wait<0>();
  for (int i = 0; i < {tokens // 2}; ++i) d[threadIdx.x * {tokens // 2} + i] = D[i];
}}
"""
    ptx = compiled(kernel)
    for step in range(4):
        a, x, d = operands(64, tokens, dtype, step)
        own, mine = (t[:, 16 * step : 16 * step + 16].copy() for t in (a, x))
        registers = spread(d)
        args = [fragment(own), x, registers, step]
        smem = 128 * tokens
        launch(ptx, entry="product", grid=1, block=128, dynamic_smem=smem, args=args).check()
        warps = [slice(16 * i, 16 * i + 16) for i in range(4)]
        parts = [run_desc(name, A=own[w], X=mine, D=d[:, w].copy()) for w in warps]
        judge(np.concatenate(parts, 1), d, registers)


def test_names():
    """A trace's text is enough to register what it names."""
    names = [
        warp.bulk(2, 256, "uint8"),
        warp.bulk(4, 512, "uint32", table=True),
        warp.row("float16", table=True),
        warp.row("bfloat16", table=False),
        warp.matrices("float16"),
        warp.decode("int4", 32, 1, "float16", "positions"),
        warp.decode("int4", 64, TERM, "bfloat16", "positions"),
        warp.decode("nvfp4", 16, 0, "bfloat16", "steps"),
        warp.mma("bfloat16"),
        warp.wgmma(152, "float16"),
    ]
    assert fresh.registers(names)
