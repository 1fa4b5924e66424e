"""The torch functions on a GPU, byte for byte; some on the CPU, where the same checks must pass."""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.compat import flashinfer as fi
from blockscale.specs import Spec
from tests.hardware.kernels import ACTS, BLOCKS, DEQUANTIZES, FI_GOLDEN, FI_NORMS, NAMES, NORMS
from tests.kit import gpu_checks, norms
from tests.kit.gpu_checks import bytes_of, floats, norm_call, norm_outputs, one, sweep_index
from tests.kit.helpers import DTYPES, golden, same, same_bytes, scale_tensor, tensor
from tests.reference import core as ref
from tests.reference import fused as fused

LEADS = ((1,), (7,), (2, 64), (130,), (5, 2, 100))
"""Shapes of 1, 7, 128, 130 and 1000 rows."""

EDGES = ((64,), (65,), (512,), (513,), (2048,), (2049,), (3, 3001))
"""Rows at the limits of the size buckets of the norm (catalog.fused), and beyond the last."""

SIZES = ((1, 1), (7, 3), (7, 16), (130, 5), (33, 33), (1000, 24), (4097, 2))
"""Rows and blocks."""


def both(names, on_cpu=()):
    """Run a test of (device, name) for all on the GPU, for some on the CPU."""
    cuda = [pytest.param("cuda", n, marks=pytest.mark.gpu, id=f"cuda-{n}") for n in names]
    cpu = [pytest.param("cpu", n, id=f"cpu-{n}") for n in on_cpu]
    return pytest.mark.parametrize(("device", "name"), cuda + cpu)


ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    gpu_checks.only_listed(monkeypatch)


def test_names():
    """Every name is that of a kernel, written as the kernel itself writes it, and there once."""
    assert [Spec.parse(name).name for name in NAMES] == [*NAMES]
    assert len(set(NAMES)) == len(NAMES)


# ------------------------------------------------------------------------------------------ norms
CPU_NORMS = (
    "add_rmsnorm_nvfp4_h256_bf16",
    "add_rmsnorm_nvfp4_h512_both_y_f16",
    "rmsnorm_mxfp4_h512_fi_f16",
)


@both((*NORMS, *FI_NORMS), CPU_NORMS)
def test_norm(device, name):
    """All row counts, allocated and given outputs, with and without PDL."""
    given = norms.inputs(Spec.parse(name), gpu_checks.DISTINCT)
    gpu_checks.check_norm(name, given, LEADS, device)


@both(["add_rmsnorm_nvfp4_h256_bf16", "rmsnorm_nvfp4_h4096_128x4_bf16"])
def test_norm_in_every_bucket(device, name):
    given = norms.inputs(Spec.parse(name), gpu_checks.DISTINCT, seed=1)
    gpu_checks.check_norm(name, given, EDGES, device)


@both(["add_rmsnorm_nvfp4_h512_both_y_f16", "add_rmsnorm_mxfp4_h512_both_y_fi_bf16"], CPU_NORMS[:1])
@pytest.mark.parametrize(("g", "eps"), [(None, 1e-5), (305.0, 0.0), (1e-30, 1.0), (3e8, 1e30)])
def test_norm_numbers(device, name, g, eps):
    """Without a global scale, and with scales that saturate or vanish; eps; rows of zeros."""
    given = norms.inputs(Spec.parse(name), 9, spread=0)
    for key in given:
        given[key][3:5] = given[key][3:5] if key == "weight" else 0
    gpu_checks.check_norm(name, given, [(9,)], device, g, eps)


SPECIAL_NORMS = (
    "add_rmsnorm_nvfp4_h256_bf16",
    "add_rmsnorm_nvfp4_h512_both_y_f16",
    "add_rmsnorm_mxfp4_h256_128x4_y_f16",
    "add_rmsnorm_nvfp4_h512_both_y_fi_bf16",
    "add_rmsnorm_nvfp4_h512_both_y_fi_f16",
    "add_rmsnorm_mxfp4_h512_both_y_fi_bf16",
    "add_rmsnorm_e4m3b32_h512_both_y_fi_bf16",
    "rmsnorm_nvfp4_h256_both_y_f16",
    "rmsnorm_e4m3b32_h512_128x4_bf16",
    "rmsnorm_mxfp4_h512_fi_f16",
)


@both(SPECIAL_NORMS, SPECIAL_NORMS[:1])
def test_norm_of_special_values(device, name):
    """NaN, infinities, zeros of both signs, tiny and large numbers: alone, in a block, in a row."""
    spec = Spec.parse(name)
    given = norms.inputs(spec, 3 * len(norms.SPECIAL))
    for i, value in enumerate(norms.SPECIAL):
        for row, stop in ((3 * i, 18), (3 * i + 1, 17 + spec.block), (3 * i + 2, spec.hidden)):
            for which in ("input", "residual")[: 1 + spec.residual]:
                given[which][row, 17 if stop < spec.hidden else 0 : stop] = value
    given["weight"][3], given["weight"][70] = -0.0, 0.0
    gpu_checks.check_norm(name, given, [(len(given["input"]),)], device)


@both(["add_rmsnorm_nvfp4_h256_bf16"], CPU_NORMS[:1])
def test_sums_of_squares(device, name):
    """Next to the g at which a block's scale turns, nearly every bit of S counts."""
    spec = Spec.parse(name)
    for seed in range(20):
        given = norms.inputs(spec, 1, seed, spread=0)
        if spec.residual:
            given["residual"] *= 300

        def number(bits):
            return float(np.int32(bits).view(np.float32))

        def byte(bits, given=given):
            return norms.expected(spec, given, number(bits), 0.0)["scale"][0, 0]

        low, high = (int(np.float32(g).view(np.int32)) for g in (0.01, 0.02))
        turned = byte(high)
        assert byte(low) != turned
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if byte(middle) == turned else (middle, high)
        for bits in (low, high):
            gpu_checks.check_norm(name, given, [(1,)], device, number(bits), 0.0)


def golden_bits(data, key, device, dtype="bfloat16"):
    """Return the 16-bit numbers of a golden file."""
    return torch.from_numpy(data[key].view(np.int16).copy()).view(DTYPES[dtype]).to(device)


@both(FI_NORMS[:3], FI_NORMS[:1])
@pytest.mark.parametrize("case", ["nogs", "gs"])
def test_flashinfer_golden(device, name, case):
    """Robust entries of the kernel's model, the residual, 95 % of FlashInfer's own reference."""
    data, base = golden("flashinfer_add_rmsnorm_7x512_bf16"), "b7_h512_bf16"
    spec = Spec.parse(name)
    part = f"{base}/{spec.scale_format}{spec.block_size}_{case}"
    words = {"input": "x", "residual": "residual_in", "weight": "w"}
    given = {k: golden_bits(data, f"{base}/{v}_u16", device) for k, v in words.items()}
    g = torch.from_numpy(data[f"{base}/global_scale_f32"]).to(device) if case == "gs" else None
    outputs = norm_outputs(spec, (7,), gpu_checks.Poisoned(device))
    packed, swizzled, linear = map(bytes_of, norm_call(spec, given, g, **outputs))
    same(floats(given["residual"]), ref.bf16_value(data[f"{base}/residual_out_u16"]))
    same(floats(outputs["y_out"]), ref.bf16_value(data[f"{base}/km_y_out_u16"]))
    codes = ref.unpack(packed)
    robust = np.unpackbits(data[f"{part}/km_fp4_robust"])[: codes.size].reshape(codes.shape) == 1
    assert robust.mean() > 0.999
    same_bytes(codes[robust], ref.unpack(data[f"{part}/km_fp4"])[robust])
    robust = data[f"{part}/km_sf_robust"]
    same_bytes(linear[robust], data[f"{part}/km_sf_linear"][robust])
    same_bytes(swizzled, ref.swizzle(linear).reshape(-1))
    assert not swizzled[~data[f"{part}/sw128x4_valid"]].any()
    assert (packed == data[f"{part}/fi_fp4"]).mean() >= 0.95
    assert (linear == data[f"{part}/fi_sf_linear"]).mean() >= 0.95


EDGE_CASES = ("e4m316_gs1", "e4m316_gs672", "e4m316_gs1e+06", "ue8m032_gs1")


@both(["bf16", "fp16"])
@pytest.mark.parametrize("case", EDGE_CASES)
def test_flashinfer_golden_edges(device, name, case):
    """FlashInfer's model on zeros, tiny, large, infinite and NaN rows and on ties."""
    data = golden("flashinfer_add_rmsnorm_edges")
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[name]
    fmt, _, g = case.partition("_gs")
    kind = {"e4m316": "nvfp4", "ue8m032": "mxfp4"}[fmt]
    spec = Spec.parse(f"add_rmsnorm_{kind}_h512_both_y_fi_{name.replace('fp', 'f')}")
    words = {"input": "x", "residual": "residual_in", "weight": "w"}
    given = {k: golden_bits(data, f"{name}/{v}_u16", device, dtype) for k, v in words.items()}
    outputs = norm_outputs(spec, (9,), gpu_checks.Poisoned(device))
    packed, _, linear = norm_call(spec, given, one(float(g), device), **outputs)
    want = golden_bits(data, f"{name}/{case}/residual_out_u16", "cpu", dtype)
    same(floats(given["residual"]), floats(want))
    same_bytes(bytes_of(linear), data[f"{name}/{case}/sf"])
    same_bytes(bytes_of(packed), data[f"{name}/{case}/fp4"])


# ----------------------------------------------------------------------------------------- blocks
@both(BLOCKS, ["quantize_nvfp4_128x4_f16", "quantize_mxfp4_floor_bf16"])
def test_quantize(device, name):
    for rows, blocks in SIZES:
        gpu_checks.check_quantize(name, rows, blocks, device)
    gpu_checks.check_quantize(name, 7, 16, device, None)


@both(DEQUANTIZES, DEQUANTIZES[1:2])
def test_dequantize(device, name):
    for rows, blocks in SIZES:
        gpu_checks.check_dequantize(name, rows, blocks, device)
    gpu_checks.check_dequantize(name, 7, 16, device, None)


@ON_BOTH
def test_swizzle(device):
    """Odd sizes; the dtype of scales comes back; all 256 bytes pass."""
    for rows, cols in ((1, 1), (1, 4), (31, 5), (128, 4), (129, 8), (300, 11), (1000, 257), (0, 5)):
        gpu_checks.check_swizzle(rows, cols, device)
    scale = scale_tensor(np.arange(256, dtype=np.uint8).reshape(32, 8), "nvfp4").to(device)
    swizzled = bs.swizzle_scales(scale)
    assert swizzled.dtype == torch.float8_e4m3fn
    same_bytes(bytes_of(swizzled), ref.swizzle(bytes_of(scale)))
    same_bytes(bytes_of(bs.swizzle_scales(scale.view(4, 8, 8))), ref.swizzle(bytes_of(scale)))


@ON_BOTH
def test_quantize_special_values(device):
    """NaN makes its block NaN and nothing else, infinity saturates, zeros keep their sign."""
    x = tensor(np.random.default_rng(0).standard_normal((8, 64)), "bfloat16")
    x[1, 5], x[2, 20], x[3, 40], x[4, :], x[5, ::3] = np.nan, np.inf, -np.inf, -0.0, 1e-38
    codes, byte = ref.quantize(floats(x), "nvfp4", 0.37)
    packed, scale = bs.quantize(x.to(device), "nvfp4", one(0.37, device))
    same_bytes(bytes_of(packed), ref.pack(codes))
    same_bytes(bytes_of(scale), byte)


# ------------------------------------------------------------------------------------ activations
@both(ACTS, ["silu_and_mul_nvfp4_bf16", "quantize_nvfp4_grouped_128x4_bf16"])
def test_act(device, name):
    """Rows and blocks on both sides of whole tiles; a global scale for each expert."""
    for rows, blocks in ((1, 1), (7, 5), (130, 9), (300, 33)):
        gpu_checks.check_act(name, rows, blocks, device, seed=rows)


@both(["swiglu_nvfp4_f16"])
def test_swiglu_numbers(device, name):
    for numbers in ((1.0, 0.0, 100.0), (1.702, 1.0, 2.0), (0.5, -2.0, 0.25)):
        gpu_checks.check_act(name, 16, 8, device, numbers=numbers)


@ON_BOTH
def test_grouped_quantize_without_a_mask(device):
    """All rows are in use; the mask is made on the device."""
    x = tensor(np.random.default_rng(0).standard_normal((3, 130, 320)), "bfloat16")
    packed, scale = bs.grouped_quantize(x.to(device))
    for e in range(3):
        codes, byte = fused.divide_mode(floats(x[e]), 16, "e4m3", 1.0)
        same_bytes(bytes_of(packed[e]), ref.pack(codes))
        same_bytes(bytes_of(scale[e]), ref.swizzle(byte))


@both(FI_GOLDEN, FI_GOLDEN[:1])
@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxes"])
@pytest.mark.parametrize("shape", ["m1_k64", "m3_k128", "m128_k64"])
def test_flashinfer_quantize_golden(device, name, shape, kind):
    """FlashInfer's exact mode, byte for byte."""
    spec = Spec.parse(name)
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[spec.dtype]
    data, case = golden("flashinfer_fp4_exact"), f"q_{shape}_{dtype}_{kind}"
    x = golden_bits(data, f"{case}/x_u16", device, spec.dtype)
    g = torch.from_numpy(data[f"{case}/global_scale_f32"]).to(device)
    packed, scale = fi.fp4_quantize(x, g, is_sf_swizzled_layout=spec.layout == "128x4")
    same_bytes(bytes_of(packed), data[f"{case}/te_fp4"])
    linear = data[f"{case}/te_sf_linear"]
    same_bytes(bytes_of(scale), linear if spec.layout == "linear" else ref.swizzle(linear))


# ------------------------------------------------------------------------------------------ sweep
@both(
    ["modelopt_sweep_fp4_midpoints", "modelopt_sweep_zero_blocks"], ["modelopt_sweep_zero_blocks"]
)
def test_sweep_golden(device, name):
    """ModelOpt's indices, ties included."""
    data = golden(name)
    x, g = tensor(data["x_f32"], str(data["x_dtype"])), float(data["global_amax"])
    index = sweep_index(x, g, device)
    assert str(data["x_dtype"]) == "float32"
    assert (index == data["best_idx_fused"]).all()


@both([("bfloat16", 16), ("float32", 16), ("float16", 32)])
def test_sweep(device, name):
    """Blocks of differing size; global_amax is the true maximum, half of it, and twice it."""
    dtype, block = name
    x = tensor(gpu_checks.random_matrix((64, 1024), "nvfp4", 0, spread=3), dtype)
    top = float(x.abs().max())
    for g in (top, top / 2, top * 2):
        wrong = gpu_checks.check_sweep(x, g, device, block)
        assert wrong == 0 or dtype != "float32"


@both(["scale_sweep_b16_bf16"])
def test_sweep_as_on_the_cpu(device, name):
    """A quarter of a million blocks of a weight, against the CPU's kernel."""
    x = tensor(np.random.default_rng(7).standard_normal((1024, 4096)) / 64, "bfloat16")
    g = float(x.abs().max())
    gpu_checks.check_losses(x, g, sweep_index(x, g, device), sweep_index(x, g, "cpu"))


@ON_BOTH
def test_sweep_of_special_blocks(device):
    """Zero, too small, NaN, inf and overflowing blocks give index 0; the others are as alone."""
    x = tensor(np.random.default_rng(3).standard_normal((8, 16)))
    normal = sweep_index(x, 4.0, device)
    x[1], x[2] = 0.0, 1e-9
    x[3, 5], x[4, 0], x[5, 7], x[6, 1] = np.nan, np.inf, -np.inf, 1e20
    index = sweep_index(x, 4.0, device)
    assert index[1:7].tolist() == [0] * 6
    assert index[[0, 7]].tolist() == normal[[0, 7]].tolist()
    zero = bs.nvfp4_fp8_scale_sweep(x.to(device), one(0.0, device))
    assert not floats(zero).any()
    assert bs.nvfp4_fp8_scale_sweep(x.to(device), one(np.nan, device)).isnan().all()


@ON_BOTH
def test_sweep_then_quantize(device):
    """Block maxima go from one function to the other; g as the documentation says."""
    x = tensor(np.random.default_rng(4).standard_normal((130, 64)))
    top = float(x.abs().max())
    amax = bs.nvfp4_fp8_scale_sweep(x.to(device), one(top, device))
    g = np.float32(top) / np.float32(448 * 6)
    packed, scale = bs.quantize(x.to(device), "nvfp4", one(g, device), "128x4", amax)
    codes, byte = ref.quantize(floats(x), "nvfp4", g, floats(amax))
    same_bytes(bytes_of(packed), ref.pack(codes))
    same_bytes(bytes_of(scale), ref.swizzle(byte))


# -------------------------------------------------------------------------- the checks themselves
def test_checks_see_one_wrong_byte(monkeypatch):
    """Whatever the name of the output."""
    name = "add_rmsnorm_nvfp4_h512_both_y_f16"
    given = norms.inputs(Spec.parse(name), 5)
    real = bs.add_rmsnorm_fp4quant
    for place in ("y_fp4", "block_scale", "block_scale_unswizzled", "y_out", "residual"):

        def broken(*args, place=place, **named):
            got = real(*args, **named)
            by_name = dict(
                zip(("y_fp4", "block_scale", "block_scale_unswizzled"), got, strict=True)
            )
            by_name.get(place, named.get(place)).view(torch.uint8).view(-1)[-1] ^= 64
            return got

        monkeypatch.setattr(bs, "add_rmsnorm_fp4quant", broken)
        with pytest.raises(AssertionError):
            gpu_checks.check_norm(name, given, [(5,)], "cpu")
