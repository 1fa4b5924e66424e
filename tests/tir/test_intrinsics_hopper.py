"""Tensor intrinsics of Hopper's MoE GEMMs: desc, compiled for the CPU, and impl, emulated, agree.

What an impl's call names is issued as the kernels of ``moe_*.cuh`` issue it; operands of registers
are spread over the lanes, and results gathered, by the tables of the PTX manual alone.
"""

import re
from functools import cache

import numpy as np
import pytest
import tvm
from tvm.s_tir import TensorIntrin

from blockscale.emulator import launch
from blockscale.lower import nvcc
from blockscale.lower.moe.source import constants, wgmma
from blockscale.specs.plans.moe import scale_count
from blockscale.tir.intrin import hopper
from tests.kit.half_tensors import fetch, tensor
from tests.kit.moe_harness import bits, plan, values
from tests.kit.tcgen05_kernels import call_text

FORMATS = [
    ("nvfp4", 16, False, "bfloat16"),
    ("nvfp4", 16, False, "float16"),
    ("mxfp4", 32, False, "bfloat16"),
    ("mxfp4", 32, False, "float16"),
    ("int4", 128, False, "bfloat16"),
    ("int4", 64, False, "float16"),
    ("int4", 32, False, "bfloat16"),
    ("int4", 64, True, "bfloat16"),
    ("int4", 32, True, "float16"),
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


def bulk_kernel(call, size):
    """Return a kernel that copies ``size`` bytes by bulk copy and shows shared memory."""
    return f"""
#include "moe_gemm.cuh"
extern "C" __global__ void copy(const uint8_t *S, uint8_t *out) {{
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t barrier;
  uint32_t D = bs_shared(smem), bar = bs_shared(&barrier);
  if (threadIdx.x == 0) {{
    bs_mbar_init(bar, 1);
    bs_mbar_init_fence();
    bs_mbar_expect(bar, {size});
    {call};
  }}
  __syncthreads();
  bs_mbar_wait(bar, 0);
  for (int i = threadIdx.x; i < {size} + 64; i += 32) out[i] = i < {size} ? smem[i] : 0;
}}
"""


@pytest.mark.parametrize(
    ("blocks", "count", "dtype"), [(4, 512, "uint32"), (1, 128, "uint32"), (2, 256, "uint8")]
)
def test_bulk_copy(blocks, count, dtype):
    """Contiguous bytes, nothing behind them."""
    name = hopper.bulk_copy(blocks, count, dtype)
    shape = (blocks, count) if blocks > 1 else (count,)
    data = np.random.default_rng(blocks).integers(0, 256, shape).astype(dtype)
    size = data.nbytes
    call = call_text(name)
    assert call == f"bs_bulk_load(D, S, {size})"
    call = call.replace(")", ", bar, bs_policy(true))")
    out = np.full(size + 64, 0xEE, np.uint8)
    ptx = compiled(bulk_kernel(call, size))
    report = launch(ptx, entry="copy", grid=1, block=32, dynamic_smem=size, args=[data, out])
    report.check()
    table = np.zeros(1, np.int32)
    want = run_desc(name, S=data, E=table, D=np.zeros_like(data))
    assert np.array_equal(out[:size], want.view(np.uint8).reshape(-1))
    assert not out[size:].any()


ROW_COPY = """
#include "moe_gemm.cuh"
// As bs_moe_load_tokens: 8 lanes a row, swizzled by its number.
__device__ void bs_cp_async_row(uint32_t to, const uint16_t *from) {
  int chunk = threadIdx.x % 8, row = to / 128 % 8;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + ((chunk ^ row) << 4)),
               "l"(from + chunk * 8)
               : "memory");
}
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gather", [True, False])
def test_row_copy(gather, dtype):
    """Rows of x, where the swizzle of 128 bytes says; gathered by the order of slots."""
    name = hopper.row_copy(dtype, gather)
    call = call_text(name)
    assert call == "bs_cp_async_row(D, S)"
    x = np.random.default_rng(1).integers(0, 2**16, (9, 64)).astype(np.uint16)
    order = np.random.default_rng(2).permutation(9)[:8].astype(np.int32)
    kernel = f"""{ROW_COPY}
extern "C" __global__ void copy(const uint16_t *x, const int *order, uint8_t *out) {{
  extern __shared__ __align__(1024) uint8_t smem[];
  int row = threadIdx.x / 8;
  const uint16_t *S = x + order[row] * 64;
  uint32_t D = bs_shared(smem) + row * 128;
  {call};
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  for (int i = threadIdx.x; i < 1024; i += 64) out[i] = smem[i];
}}
"""
    out = np.zeros((8, 128), np.uint8)
    report = launch(
        compiled(kernel), entry="copy", grid=1, block=64, dynamic_smem=1024, args=[x, order, out]
    )
    report.check()
    for row, slot in enumerate(order):
        arrays = {"S": x[slot], "D": np.zeros(64, np.uint16)}
        if gather:
            arrays["E"] = np.array([slot], np.int32)
        want = run_desc(name, **arrays).view(np.uint8).reshape(8, 16)
        chunks = out[row].reshape(8, 16)
        assert all(np.array_equal(chunks[c ^ row], want[c]) for c in range(8))


# ---- Decoding -----------------------------------------------------------------------------------


def decode_kernel(of):
    """Return a kernel that decodes 16 rows x 64 k and shows each lane's fragments, and FACTOR."""
    lines = [f"  static constexpr int {name} = {value};" for name, value in constants(of).items()]
    return "\n".join(
        [
            '#include "moe_gemm.cuh"',
            "struct P {",
            *lines,
            "};",
            """
__device__ void bs_moe_decode(uint32_t *A, uint32_t W, uint32_t S, int, int, int) {
  int lane = threadIdx.x % 32;
  uint4 codes = bs_load16_shared(W + lane * 16);
  BsDecode<P> scales(BsDecode<P>::load(S, lane));
  scales.decode(codes.x, A), scales.decode(codes.y, A + 4);
  scales.decode(codes.z, A + 8), scales.decode(codes.w, A + 12);
}
extern "C" __global__ void decode(const uint32_t *words, const uint32_t *scales, int count,
                                  uint32_t *out, float *factor) {
  __shared__ __align__(128) uint32_t smem[256];
  for (int i = threadIdx.x; i < 128; i += 32) smem[i] = words[i];
  for (int i = threadIdx.x; i < count; i += 32) smem[128 + i] = scales[i];
  __syncthreads();
  uint32_t A[16], W = bs_shared(smem), S = W + 512;
  CALL;
  for (int i = 0; i < 16; ++i) out[threadIdx.x * 16 + i] = A[i];
  *factor = BsDecode<P>::FACTOR;
}
""",
        ]
    )


def gathered(fragments):
    """Return [16, 64] patterns from the lanes' registers [32, 4 steps, a0..a3, 2]."""
    out = np.zeros((16, 64), np.uint16)
    for step in range(4):
        for register in range(4):
            row = ROW + 8 * (register % 2)
            column = 16 * step + 2 * QUAD + 8 * (register // 2)
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


@pytest.mark.parametrize(("fmt", "group", "zeros", "dtype"), FORMATS)
def test_decode(fmt, group, zeros, dtype):
    """Every code in every place; what is left of powers of two is the kernel's FACTOR."""
    name = hopper.decode(fmt, group, zeros, dtype)
    call = call_text(name)
    numbers = f"{['nvfp4', 'mxfp4', 'int4'].index(fmt)}, {group}, {int(zeros)}"
    assert call == f"bs_moe_decode(A, W, S, {numbers})"
    of = plan(fmt=fmt, group=group, zeros=zeros, dtype=dtype)
    ptx = compiled(decode_kernel(of).replace("CALL", call))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        words = rng.integers(0, 2**32, 128).astype(np.uint32)
        count = scale_count(fmt, group, zeros)
        scales = stored_scales(rng, fmt, zeros, dtype, count)
        out, factor = np.zeros((32, 16), np.uint32), np.zeros(1, np.float32)
        padded = scales.view(np.uint32)
        args = [words, padded, padded.size, out, factor]
        launch(ptx, entry="decode", grid=1, block=32, args=args).check()
        fragments = out.view(np.uint16).reshape(32, 4, 4, 2)
        got = values(gathered(fragments), dtype) * float(factor[0])
        want = values(run_desc(name, W=words, S=scales, A=np.zeros((16, 64), np.uint16)), dtype)
        assert np.array_equal(got, want)
        assert np.unique(want).size > 50


# ---- Products -----------------------------------------------------------------------------------


def operands(rows, tokens, dtype, seed):
    """Return patterns of a [rows, 16] and x [tokens, 64], and sums d [tokens, rows]."""
    rng = np.random.default_rng(seed)
    a, x = rng.standard_normal((rows, 16)), rng.standard_normal((tokens, 64))
    d = rng.standard_normal((tokens, rows)).astype(np.float32)
    return bits(a, dtype), bits(x, dtype), d


def fragment(a):
    """Return the registers [rows / 16 * 32, 4] of an operand A of 16-row tiles."""
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


def judge(name, a, x, d, got):
    """Fail unless the registers hold what the desc makes of the operands, up to rounding."""
    want = run_desc(name, A=a, X=x, D=d.copy())
    size = np.abs(d) + np.abs(want) + 64
    assert (np.abs(got - spread(want)) <= spread(size) * 2.0**-20).all()
    assert not (np.abs(got - spread(d)) <= spread(size) * 2.0**-20).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mma(dtype):
    """Fragments are spread as table 9.7.14.5.8 says: weights are rows, tokens columns."""
    name = hopper.mma(dtype)
    assert call_text(name) == "bs_mma16816(D, A, X)"
    flag = str(dtype == "bfloat16").lower()
    kernel = f"""
#include "moe_mma.cuh"
__device__ void bs_mma16816(float *D, const uint32_t *A, uint32_t X) {{
  uint32_t tokens[4];
  int lane = threadIdx.x;  // rows of x are 128 bytes, swizzled
  bs_ldmatrix4(tokens, X + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4));
  bs_mma16816<{flag}>(D, A, tokens[0], tokens[1]);
}}
extern "C" __global__ void product(const uint32_t *a, const uint4 *x, float *d) {{
  __shared__ __align__(1024) uint4 smem[64];
  for (int i = threadIdx.x; i < 64; i += 32) smem[i / 8 * 8 + (i % 8 ^ i / 8)] = x[i];
  __syncthreads();
  uint32_t A[4], X = bs_shared(smem);
  float D[4];
  for (int i = 0; i < 4; ++i) A[i] = a[threadIdx.x * 4 + i], D[i] = d[threadIdx.x * 4 + i];
  {call_text(name)};
  for (int i = 0; i < 4; ++i) d[threadIdx.x * 4 + i] = D[i];
}}
"""
    ptx = compiled(kernel)
    for seed in range(3):
        a, x, d = operands(16, 8, dtype, seed)
        registers = spread(d)
        args = [fragment(a), x, registers]
        launch(ptx, entry="product", grid=1, block=32, args=args).check()
        judge(name, a, np.ascontiguousarray(x[:, :16]), d, registers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_wgmma(tokens, dtype):
    """A from registers, x from swizzled rows, at each of a block's four steps of K."""
    name = hopper.wgmma(tokens, dtype)
    assert call_text(name) == f"bs_wgmma_m64k16<{tokens}>(D, A, X)"
    flag = str(dtype == "bfloat16").lower()
    kernel = f"""
#include "moe_wgmma.cuh"
{wgmma(dtype == "bfloat16", tokens)}
template <int N>
__device__ void bs_wgmma_m64k16(float *D, const uint32_t *A, uint64_t X) {{
  bs_wgmma_fence();
  BsWgmma<{flag}, N>::run(D, A, X);
  bs_wgmma_commit();
  bs_wgmma_wait<0>();
}}
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
  {call_text(name)};
  for (int i = 0; i < {tokens // 2}; ++i) d[threadIdx.x * {tokens // 2} + i] = D[i];
}}
"""
    ptx = compiled(kernel)
    for step in range(4):
        a, x, d = operands(64, tokens, dtype, step)
        registers = spread(d)
        args = [fragment(a), x, registers, step]
        smem = 128 * tokens
        launch(ptx, entry="product", grid=1, block=128, dynamic_smem=smem, args=args).check()
        own = np.ascontiguousarray(x[:, 16 * step : 16 * step + 16])
        judge(name, a, own, d, registers)


def test_names():
    """A trace's text is enough to register what it names."""
    names = [
        hopper.bulk_copy(2, 256, "uint8"),
        hopper.row_copy("float16", True),
        hopper.row_copy("bfloat16", False),
        hopper.decode("int4", 32, True, "float16"),
        hopper.mma("bfloat16"),
        hopper.wgmma(152, "float16"),
    ]
    assert sorted(hopper.register_named(repr(names))) == sorted(names)
