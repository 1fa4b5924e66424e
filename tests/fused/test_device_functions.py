"""Device functions of native/fp4_fused.cuh by themselves: 16-bit outputs of ops would hide much."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from blockscale.emulator import launch
from blockscale.lower import nvcc

SOURCE = """
#include "fp4_fused.cuh"
extern "C" __global__ void gelu(const float *gate, float *out) {
  out[threadIdx.x] = bs_gated<BS_GELU_TANH>(gate[threadIdx.x], 1.0f, nullptr);
}
extern "C" __global__ void powers(const float *s, int *out) {
  out[threadIdx.x] = bs_power_of(s[threadIdx.x]);
}
extern "C" __global__ void exact(const int *amax, const float *gs, int *out) {
  out[threadIdx.x] = bs_exact_scale_e4m3(amax[threadIdx.x], gs[threadIdx.x]);
}
"""


@cache
def ptx() -> str:
    return nvcc.compile_cuda_source(SOURCE, "sm_90a", ptx=True).image.decode()


def run(entry: str, out: np.ndarray, *given: np.ndarray) -> np.ndarray:
    report = launch(ptx(), entry=entry, grid=1, block=len(out), args=[*given, out])
    assert not report.hazards
    return out


def test_gelu_tanh_to_single_precision() -> None:
    """x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as torch has it (approximate="tanh")."""
    x = np.linspace(-5, 5, 1001)[:1000].astype(np.float32)
    got = run("gelu", np.empty_like(x), x)
    want = torch.nn.functional.gelu(torch.from_numpy(x).double(), approximate="tanh").numpy()
    assert np.abs(got - want).max() < 2e-6


def test_powers_of_two_at_their_edges() -> None:
    """E8M0 (OCP MX 1.0): 2^(byte - 127); bits of float32, and the byte of the next power."""
    table = {
        0x00000000: 0,
        0x00000001: 0,  # the least of all numbers
        0x003FFFFF: 0,
        0x00400000: 0,  # 2^-127
        0x00400001: 1,
        0x00800000: 1,  # 2^-126
        0x00800001: 2,
        0x3F800000: 127,
        0x3F800001: 128,
        0x7F000000: 254,
        0x7F000001: 254,  # there is no greater one
        0x7F800000: 254,
        0x7FC00000: 127,  # not a number
        0x80000000: 0,
        0x80000001: 0,
        0xBF800000: 0,
        0xFF800000: 0,
    }
    bits = np.array([*table], np.uint32)
    got = run("powers", np.empty(len(bits), np.int32), bits.view(np.float32))
    assert got.tolist() == [*table.values()]


def test_exact_scales_are_rounded_as_flashinfer_does() -> None:
    """amax times a sixth of the global scale, rounded in this order: others give other bytes."""
    rng, sixth = np.random.default_rng(0), np.float32(1 / 6)
    values = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    middles = rng.choice((values[1:] + values[:-1]) / 2, (4000, 1))
    gs = rng.uniform(1, 2, middles.shape).astype(np.float32)
    near = (middles / gs.astype(np.float64) * 6).astype(np.float32).view(np.int32)
    amax = (near + np.arange(-2, 3)).astype(np.int32).view(np.float32)
    wanted, other = amax * (gs * sixth), (amax * gs) * sixth
    bytes_of = [
        torch.from_numpy(v).to(torch.float8_e4m3fn).view(torch.uint8) for v in (wanted, other)
    ]
    at = (bytes_of[0] != bytes_of[1]).nonzero()[:512]
    assert len(at) > 100, "no pair tells one order from the other"
    picked = amax.view(np.int32)[at[:, 0], at[:, 1]], gs[at[:, 0], 0]
    got = run("exact", np.empty(len(at), np.int32), *map(np.ascontiguousarray, picked))
    assert got.tolist() == bytes_of[0][at[:, 0], at[:, 1]].tolist()
