"""CUDA kernels around the calls of tcgen05 and TMA intrinsics, for the emulator.

Everything but the call under test is done another way: bytes are placed in shared memory by NumPy's
idea of the swizzle, tensor memory is filled by tcgen05.st and read a column at a time.
"""

import re
from functools import cache

import numpy as np
import tvm
from tvm import tirx
from tvm.s_tir import TensorIntrin

from blockscale.emulator import launch
from blockscale.lower import nvcc

HEAD = r"""
#include <cuda.h>
#include "tcgen05.cuh"
extern __shared__ __align__(1024) uint8_t smem[];

__device__ void put(uint32_t at, uint32_t value) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(at), "r"(value)
               : "memory");
}
__device__ void put_done() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
__device__ uint32_t take(uint32_t at) {
  uint32_t value;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(value) : "r"(at)
               : "memory");
  bs_tcgen05_wait_ld();
  return value;
}
__device__ void fill(uint32_t offset, const uint8_t *from, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
    reinterpret_cast<uint4 *>(smem + offset)[i] = reinterpret_cast<const uint4 *>(from)[i];
  bs_fence_async();
}
template <int G> struct Fixture {
  uint32_t tmem, bar;
  int rank, warp, lane, row;
  __device__ Fixture() {
    __shared__ uint64_t barrier;
    __shared__ uint32_t base;
    rank = G == 2 ? bs_cluster_rank() : 0;
    warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = rank * 128 + threadIdx.x;
    bar = bs_shared(&barrier);
    if (threadIdx.x == 0) {
      bs_mbar_init(bar, 1);
      bs_mbar_init_fence();
    }
    if (warp == 0) bs_tcgen05_alloc<G>(bs_shared(&base), 512);
    meet();
    tmem = base;
  }
  __device__ void meet() {
    bs_tcgen05_fence_before();
    if (G == 2) bs_cluster_sync();
    else __syncthreads();
    bs_tcgen05_fence_after();
  }
  __device__ uint32_t lanes(int column) { return tmem + (warp << 21) + column; }
  __device__ bool issues() { return rank == 0 && warp == 0 && bs_elect(); }
  __device__ void commit() {
    if (G == 2) bs_tcgen05_commit_multicast<2>(bar, 3);
    else bs_tcgen05_commit<1>(bar);
  }
  __device__ void wait() {
    bs_mbar_wait_cluster(bar, 0);
    bs_tcgen05_fence_after();
  }
  __device__ ~Fixture() {
    meet();
    if (warp == 0) bs_tcgen05_dealloc<G>(tmem, 512);
  }
};
"""


def call_text(name):
    """Return the call of an intrinsic's impl as CUDA; a buffer's address is the buffer's name."""
    calls = []

    def visit(stmt):
        if isinstance(stmt, tirx.Evaluate):
            calls.append(text(stmt.value))
        elif isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                visit(part)
        else:
            visit(stmt.block.body if hasattr(stmt, "block") else stmt.body)

    def text(value):
        if isinstance(value, tirx.IntImm):
            return str(int(value))
        if isinstance(value, tirx.Cast):  # elem_offset % 4 of the scales
            offset = value.value.a
            (scales,) = [p.name for p in impl.params if p.elem_offset.same_as(offset)]
            return f"byte_of_{scales}"
        if value.op.name == "tirx.tvm_access_ptr":
            return str(value.args[1].args[0].name)
        function, *args = value.args
        args = [text(arg) for arg in args if type(arg).__name__ != "StringImm"]
        return f"{function.value}({', '.join(args)})"

    impl = TensorIntrin.get(name).impl
    visit(impl.body)
    (call,) = calls
    return call


@cache
def desc(name):
    """Return the compiled desc and its parameters as (name, shape, dtype)."""
    text = re.sub(r', scope="[a-z.]+"', "", TensorIntrin.get(name).desc.script())
    text = re.sub('"b?float16"', '"uint16"', text)  # NumPy has no bfloat16; a copy has no type
    function = tvm.script.from_source(text)
    params = [
        (var.name, tuple(int(size) for size in var.shape), str(var.dtype))
        for var in function.params
    ]
    return tvm.compile(tvm.IRModule({"main": function}), target="llvm")["main"], params


def run_desc(name, **arrays):
    """Run the desc on ``arrays`` by parameter, in place."""
    function, params = desc(name)
    tensors = []
    for param, shape, dtype in params:
        assert arrays[param].shape == shape
        assert str(arrays[param].dtype) == dtype
        tensors.append(tvm.runtime.tensor(arrays[param]))
    function(*tensors)
    for (param, _, _), made in zip(params, tensors, strict=True):
        arrays[param][...] = made.numpy()


def kernel(entry, group, body, params):
    """Return a kernel of 128 threads: one CTA, or a pair."""
    cluster = " __cluster_dims__(2)" if group == 2 else ""
    return (
        f'extern "C" __global__{cluster} void __launch_bounds__(128) {entry}({params}) {{\n'
        f"  Fixture<{group}> f;\n{body}}}\n"
    )


def compiled(kernels):
    """Return the PTX of kernels."""
    return nvcc.compile_cuda_source(HEAD + "\n".join(kernels), "sm_100a", ptx=True).image.decode()


def run(entry_kernel, args, group=1, smem=0):
    """Run a kernel of one CTA or a pair on ``args``; there must be no hazard."""
    report = launch(
        compiled([entry_kernel]),
        grid=group,
        block=128,
        cluster=group,
        args=args,
        dynamic_smem=smem,
    )
    assert not report.hazards


def swizzled(tile):
    """Return rows of 32, 64 or 128 bytes with their 16-byte chunks where the hardware swaps them.

    PTX ISA 5.5.6: the chunk's number is exclusive-or'ed with the row's, counted in 128 bytes.
    """
    rows, width = tile.shape
    chunks = width // 16
    out = np.empty_like(tile)
    for row in range(rows):
        line = row * width // 128 % chunks
        for chunk in range(chunks):
            to = chunk ^ line
            out[row, 16 * to : 16 * to + 16] = tile[row, 16 * chunk : 16 * chunk + 16]
    return out


def padded(packed):
    """Return packed 4-bit rows as kind mxf8f6f4 has them: 8 bytes of codes, 8 of padding."""
    rows, width = packed.shape
    out = np.zeros((rows, width // 8, 16), np.uint8)
    out[:, :, :8] = packed.reshape(rows, width // 8, 8)
    return out.reshape(rows, 2 * width)
