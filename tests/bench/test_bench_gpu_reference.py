"""The torch formulas and the Triton kernels that `bench.gpu` compares with: right on a CPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.kit.helpers import random_matrix, same, same_bytes, tensor, widen
from tests.kit.paths import ROOT
from tests.reference import core as ref

gpu_reference = pytest.importorskip(
    "bench.reference", reason="bench/ is part of the checkout, not of the wheel"
)

f32 = np.float32
G = f32(0.0123)


def one(value):
    return torch.tensor([float(value)])


def test_codes_of_every_rounding():
    """All midpoints of E2M1 with their neighbours, both signs, zeros, what saturates."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0, 6, 7, 1e30, 1e-30], f32)
    around = [np.nextafter(middles, f32(side)) for side in (-np.inf, np.inf)]
    q = np.concatenate([middles, *around]).astype(f32)
    q = np.concatenate([q, -q])
    codes = gpu_reference.e2m1_codes(torch.tensor(q)).numpy()
    assert np.array_equal(codes, ref.e2m1_encode(q))
    values = gpu_reference.e2m1_values(torch.arange(16, dtype=torch.int32)).numpy()
    same(values, ref.e2m1_decode(np.arange(16)))
    assert np.array_equal(np.signbit(values), np.arange(16) >= 8), "-0 is code 8"
    steps = torch.fx.symbolic_trace(gpu_reference.e2m1_values).graph.nodes
    assert not [step for step in steps if "neg" in step.name], "compilers lose its sign of zero"


def test_scale_bytes_of_every_rounding(rng):
    """All E4M3 values up to 448, the midpoints between them, and random numbers."""
    values = ref.e4m3_decode(np.arange(0x7F))
    same(gpu_reference.e4m3_values(torch.arange(0x7F, dtype=torch.int32)).numpy(), values)
    random = rng.uniform(0, 448, 5000) * np.exp2(-rng.integers(0, 20, 5000))
    s = np.concatenate([values, (values[1:] + values[:-1]) / 2, random]).astype(f32)
    assert np.array_equal(gpu_reference.e4m3_bytes(torch.tensor(s)).numpy(), ref.e4m3_encode(s))
    s = np.concatenate([np.exp2(np.arange(-126, 127)), random, [0]]).astype(f32)
    found = gpu_reference.ue8m0_bytes(torch.tensor(s)).numpy()
    assert np.array_equal(found, ref.ue8m0_encode_ceil(s))


@pytest.mark.parametrize("g", [1.0, 0.0123])
def test_quantise_and_back(g):
    values = random_matrix((33, 64), "nvfp4", seed=5, spread=12)
    values[3, 16:32], values[4, :16] = 0.0, 1e-9
    x = tensor(values, "bfloat16")
    packed, scale = gpu_reference.quantize(x, one(g))
    codes, byte = ref.quantize(widen(x), "nvfp4", f32(g))
    same_bytes(scale.numpy(), byte)
    same_bytes(packed.numpy(), ref.pack(codes))
    back = gpu_reference.dequantize(packed, scale, one(g))
    same(widen(back), ref.dequantize(codes, byte, "nvfp4", f32(g), "bfloat16"))


def test_layouts(rng):
    scale = rng.integers(0, 256, (200, 10), dtype=np.uint8)
    swizzled = gpu_reference.swizzle(torch.tensor(scale)).numpy()
    same_bytes(swizzled, ref.swizzle(scale).reshape(-1))
    scale = torch.tensor(rng.integers(0, 256, (256, 12), dtype=np.uint8))
    swizzled = gpu_reference.swizzle(scale)
    assert torch.equal(gpu_reference.swizzle_words(scale), swizzled)
    assert torch.equal(gpu_reference.unswizzle(swizzled, 256, 12), scale)


def fused(y, fmt):
    """Codes and scale bytes of float32 y, each step one float32 operation."""
    block = ref.BLOCK[fmt]
    gs = f32(1) / G
    s = (gs * ref.block_amax(y, fmt)) * (f32(1) / f32(6))
    if fmt == "nvfp4":
        byte = ref.e4m3_encode(np.minimum(s, f32(448)))
    else:
        byte = np.where(s == 0, 0, ref.ue8m0_encode_ceil(s)).astype(np.uint8)
    with np.errstate(divide="ignore"):
        inverse = f32(1) / ref.scale_value(byte, fmt).astype(f32)
    inverse = np.where(byte == 0, f32(0), inverse) * gs
    codes = ref.e2m1_encode(y * np.repeat(inverse, block, axis=-1))
    return ref.pack(codes), byte


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_norm(rng, fmt):
    """Against NumPy with a sum in float64 throughout: rstd is the same float32 in these rows."""
    x, r = (tensor(rng.standard_normal((7, 256)), "bfloat16") for _ in range(2))
    x[3, 32:64] = r[3, 32:64] = 0  # a block of zeros
    w = tensor(rng.standard_normal(256), "bfloat16")
    h = widen(x) + widen(r)
    h16 = ref.round_to(h, "bfloat16")
    mean = f32(np.sum(h.astype(np.float64) ** 2, axis=-1, keepdims=True)) / f32(256)
    rstd = f32(1) / np.sqrt(mean + f32(1e-6))
    packed, byte = fused((h16 * rstd) * widen(w), fmt)
    codes, scale, residual = gpu_reference.add_rmsnorm(x, r, w, one(G), fmt)
    same(widen(residual), h16)
    same_bytes(scale.numpy(), byte)
    same_bytes(codes.numpy(), packed)
    if fmt == "nvfp4":  # what torch.compile is given sums otherwise: the same bytes here
        codes, scale = gpu_reference.add_rmsnorm_in_place(x, r, w, one(G))
        same(widen(r), h16)
        same_bytes(scale.numpy(), byte)
        assert (codes.numpy() != packed).mean() < 1e-2


def test_silu(rng):
    x = tensor(3 * rng.standard_normal((5, 128)), "bfloat16")
    gate, up = widen(x)[:, :64], widen(x)[:, 64:]
    e = np.exp(-gate.astype(np.float64)).astype(f32)
    packed, byte = fused(ref.round_to((gate / (f32(1) + e)) * up, "bfloat16"), "nvfp4")
    codes, scale = gpu_reference.silu_and_mul(x, one(G))
    same_bytes(scale.numpy(), byte)
    same_bytes(codes.numpy(), packed)


def test_sweep(rng):
    x = tensor(rng.standard_normal((300, 16)), "bfloat16")
    x[7] = 0
    candidates = ref.fp8_scale_candidates()
    losses = ref.sweep_losses(widen(x), ref.sweep_scales(5.5, candidates), np.float64)
    index, least = gpu_reference.sweep(x, one(5.5), torch.tensor(candidates))
    assert np.array_equal(index.numpy(), ref.first_smallest(losses))
    # A quotient rounded to float32 may pass a midpoint, where both neighbours err nearly the same.
    np.testing.assert_allclose(least.numpy(), losses.min(0), rtol=1e-6)


INTERPRETED = """
import torch
from bench import reference as r
from bench.peers import triton_ops as t
torch.manual_seed(0)
g, cols = torch.tensor([0.0123]), 176  # 11 blocks: no power of two

def normal(*shape):  # float16: the interpreter does not round to bfloat16
    return (torch.randn(shape) * torch.exp2(torch.randint(-4, 5, shape))).half()

def outputs(rows):
    size = (rows, cols // 2), (rows, cols // 16)
    return tuple(torch.full(s, 0xA5, dtype=torch.uint8) for s in size)

def show(name, got, expected):
    of = sum(e.numel() for e in expected)
    print(name, sum((a.view(e.shape) != e).sum().item() for a, e in zip(got, expected)), of)

x, got = normal(8, cols), outputs(8)
x[3, 16:32] = 0
t.quantize(32, 4)(x, g, *got)
show("quantize", got, r.quantize(x, g))
back = torch.empty(8, cols, dtype=torch.half)
t.dequantize(64, 4)(*got, g, back)
show("dequantize", [back], [r.dequantize(*got, g, torch.half)])
residual, weight, got = normal(8, cols), normal(cols), outputs(8)
expected = r.add_rmsnorm(x, residual, weight, g)
t.add_rmsnorm(4)(x, residual, weight, g, *got)
show("add_rmsnorm", [*got, residual], expected)
x, got = torch.randn(8, 2 * cols).half(), outputs(8)
t.silu_and_mul(8, 4)(x, g, *got)
show("silu_and_mul", got, r.silu_and_mul(x, g))
scale = torch.randint(256, (256, 48), dtype=torch.uint8)
out = torch.empty_like(scale)
t.swizzle(8, 4)(scale, out)
show("swizzle", [out], [r.swizzle(scale)])
"""


def test_triton_kernels_interpreted():
    """Right on a CPU; only the sum of squares and exp may move a rounding."""
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        cwd=ROOT,
        env=environ,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    found = {name: (int(n), int(of)) for name, n, of in map(str.split, done.stdout.splitlines())}
    assert [*found] == ["quantize", "dequantize", "add_rmsnorm", "silu_and_mul", "swizzle"]
    for name in ("quantize", "dequantize", "swizzle"):
        assert found[name][0] == 0, found
    for name in ("add_rmsnorm", "silu_and_mul"):
        assert found[name][0] <= 0.01 * found[name][1], found
