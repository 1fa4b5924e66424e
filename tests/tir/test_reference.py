"""The reference itself: against torch's casts, and against the outputs of other implementations."""

import numpy as np
import pytest
import torch

from tests.kit.helpers import golden, same, same_bytes
from tests.reference import core as ref

# Every float32 with few mantissa bits, and both float neighbours of each: all ties of all formats.
COARSE = np.arange(0, 0x7F800000, 1 << 17, dtype=np.uint32)
PROBES = np.unique(np.clip(COARSE[:, None].astype(np.int64) + [-1, 0, 1], 0, 0x7F800000))
PROBES = PROBES.astype(np.uint32).view(np.float32)
SWEEPS = ("fp4_midpoints", "randn_bfloat16_n1024_s1", "randn_float32_n4_s0", "zero_blocks")


def test_e2m1_against_the_table_of_codes():
    """The 16 values, and every value returns to its code."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    same(ref.e2m1_decode(np.arange(16)), values + [-v for v in values])
    same_bytes(ref.e2m1_encode(ref.e2m1_decode(np.arange(16))), np.arange(16, dtype=np.uint8))


def test_e2m1_against_other_implementations():
    """ModelOpt differs from our rule only in -0 -> 0, torchao only in NaN -> 3."""
    data = golden("modelopt_fp4_rounding")
    x, ours = data["scaled_in"], ref.e2m1_encode(data["scaled_in"])
    negative_zero = (x == 0) & np.signbit(x)
    assert (ours[negative_zero] == 8).all()
    assert (ours[np.isnan(x)] == 7).all()
    same_bytes(ours[~negative_zero], data["modelopt_cast_fp4_nibble"][~negative_zero])
    same_bytes(ours[~np.isnan(x)], data["torchao_f32_to_f4_nibble"][~np.isnan(x)])


def test_e4m3_against_torch():
    """All 256 bytes decode, and all ties and their neighbours encode, as torch's float8_e4m3fn."""
    byte = np.arange(256, dtype=np.uint8)
    same(ref.e4m3_decode(byte), torch.from_numpy(byte).view(torch.float8_e4m3fn).float().numpy())
    x = np.concatenate([PROBES, -PROBES])
    x = x[np.abs(x) <= 448]  # above, releases of torch differ: NaN or 448
    same_bytes(ref.e4m3_encode(x), as_torch(x, torch.float8_e4m3fn))
    special = np.array([449, 464, 1e30, np.inf, np.nan, -np.nan, -449, -np.inf], np.float32)
    same_bytes(ref.e4m3_encode(special), np.array([0x7E] * 4 + [0x7F] * 2 + [0xFE] * 2, np.uint8))


def test_ue8m0_against_torch():
    """All 256 bytes decode as float8_e8m0fnu; encoding rounds up, or down by the OCP rule."""
    byte = np.arange(256, dtype=np.uint8)
    if hasattr(torch, "float8_e8m0fnu"):
        values = torch.from_numpy(byte).view(torch.float8_e8m0fnu).float().numpy()
        same(ref.ue8m0_decode(byte), values)
    up, down = ref.ue8m0_encode_ceil(PROBES), ref.ue8m0_encode_floor(PROBES)
    x = PROBES.astype(np.float64)
    inside = (x > 2.0**-127) & (x <= 2.0**127)
    assert (x <= ref.ue8m0_decode(up))[inside].all()
    assert (x > ref.ue8m0_decode(up) / 2)[inside].all()
    inside = (x >= 2.0**-125) & np.isfinite(x)
    assert (ref.ue8m0_decode(down) * 4 <= x)[inside].all()
    assert (ref.ue8m0_decode(down) * 8 > x)[inside].all()
    special = np.array([0, 1e-45, 2.0**-127, 2.0**127, 3e38, np.inf, np.nan], np.float32)
    same_bytes(ref.ue8m0_encode_ceil(special), np.array([0, 0, 0, 254, 254, 254, 255], np.uint8))
    same_bytes(ref.ue8m0_encode_floor(special), np.array([0, 0, 0, 252, 252, 254, 255], np.uint8))


def test_bfloat16_and_float16_against_torch():
    """Rounding to 16 bits, overflow to infinity included."""
    x = np.concatenate([PROBES, -PROBES, np.array([np.nan], np.float32)])
    x = np.concatenate([x, np.random.default_rng(0).standard_normal(1000).astype(np.float32)])
    same(ref.round_to(x, "bfloat16"), torch.from_numpy(x).bfloat16().float().numpy())
    same(ref.round_to(x, "float16"), torch.from_numpy(x).half().float().numpy())


def as_torch(x, dtype):
    return torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()


def test_pack_is_low_nibble_first():
    """Element 0 is the low nibble; unpack is the inverse for all 256 bytes."""
    same_bytes(ref.pack(np.array([1, 2, 3, 15])), np.array([0x21, 0xF3], np.uint8))
    byte = np.arange(256, dtype=np.uint8)
    same_bytes(ref.pack(ref.unpack(byte)), byte)


@pytest.mark.parametrize("case", ["m1_k64", "m3_k128", "m128_k64", "m200_k256"])
def test_swizzle_against_flashinfer(case):
    """The 128x4 buffer with its zero padding, and back."""
    data = golden("flashinfer_mxfp4_swizzle")
    linear = data[f"q_{case}_bf16_random/te_sf_linear"]
    swizzled = ref.swizzle(linear)
    same_bytes(swizzled.reshape(-1), data[f"q_{case}_bf16_random/te_sf_sw128x4"])
    same_bytes(ref.unswizzle(swizzled, *linear.shape), linear)


def test_quantize_nvfp4_against_modelopt():
    """Scales and codes of a real export; it writes -0 as code 0 and never a scale below 2^-9."""
    data = golden("modelopt_nvfp4_static_bf16")
    w, g = data["w_f32"], data["weight_scale_2"]
    codes, scale = ref.quantize(w, "nvfp4", g, amax=data["sweep_best_amax"])
    same_bytes(scale, data["sweep_weight_scale_e4m3"])
    same_bytes(ref.pack(without_negative_zero(codes, w)), data["sweep_packed"])
    codes, scale = ref.quantize(w, "nvfp4", g)
    normal = ref.block_amax(w, "nvfp4") / (6 * g) > 2.0**-9
    assert normal.sum() == normal.size - 3
    same_bytes(scale[normal], data["maxstatic_weight_scale_e4m3"][normal])
    packed, element = ref.pack(without_negative_zero(codes, w)), normal.repeat(8, axis=-1)
    same_bytes(packed[element], data["maxstatic_packed"][element])


def without_negative_zero(codes, w):
    """Return the codes with those of inputs that are -0.0 replaced by 0, as ModelOpt has it."""
    return np.where((w == 0) & np.signbit(w), np.uint8(0), codes)


@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxes"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["m1_k64", "m3_k128"])
def test_quantize_mxfp4_against_flashinfer(shape, dtype, kind):
    """UE8M0 rounded up; a power of two as scale makes its reciprocal product a true division."""
    data, case = golden("flashinfer_mxfp4_swizzle"), f"q_{shape}_{dtype}_{kind}"
    bits = data[f"{case}/x_u16"]
    x = ref.bf16_value(bits) if dtype == "bf16" else bits.view(np.float16).astype(np.float32)
    codes, scale = ref.quantize(x, "mxfp4")
    same_bytes(scale, data[f"{case}/mx_sf_linear"])
    same_bytes(ref.pack(codes), data[f"{case}/mx_fp4"])


def test_dequantize_nvfp4_against_modelopt_and_compressed_tensors():
    """ModelOpt: equal, but its code 8 is +0.  compressed-tensors: two bf16 roundings of 2^-8."""
    data = golden("modelopt_nvfp4_static_bf16")
    codes, scale = ref.unpack(data["sweep_packed"]), data["sweep_weight_scale_e4m3"]
    got = ref.dequantize(codes, scale, "nvfp4", data["weight_scale_2"])
    assert (got == data["sweep_dequant_f32"]).all()
    data = golden("modelopt_ct_nvfp4_bf16")
    codes, scale = ref.unpack(data["weight_packed"]), data["weight_scale_e4m3"]
    got = ref.dequantize(codes, scale, "nvfp4", np.float32(1) / data["weight_global_scale"][0])
    assert (np.abs(got - data["decompressed_f32"]) <= np.abs(got) * 2.0**-7).all()


@pytest.mark.parametrize("kind", ["", "_extreme"])
def test_dequantize_mxfp4_against_gpt_oss(kind):
    """The loader's weights [E, in, out] in float32 and bfloat16, scale bytes 0 and 254 too."""
    data = golden("modelopt_gptoss_mxfp4")
    scale = data[f"scales{kind}"]
    codes = ref.unpack(data["blocks"].reshape(*scale.shape[:2], -1))
    single = ref.dequantize(codes, scale, "mxfp4").transpose(0, 2, 1)
    same(single, data[f"dense_f32{kind}"])
    half = ref.dequantize(codes, scale, "mxfp4", dtype="bfloat16").transpose(0, 2, 1)
    same(half, ref.bf16_value(data["dense_bf16_extreme_bits" if kind else "dense_bf16_bits"]))


def test_candidates_against_modelopt():
    data = golden("modelopt_fp8_candidates")
    same(ref.fp8_scale_candidates(), data["candidates_f32"])


@pytest.mark.parametrize("case", SWEEPS)
def test_sweep_against_modelopt(case):
    """Index and amax of both ModelOpt versions; losses to 2e-5: scales 3 ulp apart, few terms."""
    data = golden(f"modelopt_sweep_{case}")
    g = data["global_amax"]
    index, amax = ref.scale_sweep(data["x_f32"], g, int(data["block_size"]))
    assert (index == data["best_idx_fused"]).all()
    assert (index == data["best_idx_ref"]).all()
    same(amax, data["best_amax_fused"])
    if "losses_ref" in data:
        scales = ref.sweep_scales(g, ref.fp8_scale_candidates())
        losses = ref.sweep_losses(data["x_f32"], scales)
        np.testing.assert_allclose(losses, data["losses_ref"], rtol=2e-5)


def test_row_error_sees_one_bad_row():
    """A zeroed row has error 1, a NaN row error inf, a zero row must be zero."""
    truth = np.arange(12.0).reshape(4, 3)
    y = truth.copy()
    y[1], y[2, 0] = 0, np.nan
    assert ref.row_error(y, truth).tolist() == [0, 1, np.inf, 0]
    assert ref.row_error([[0.0, 0.0], [0.0, 1e-9]], [[0, 0], [0, 0]]).tolist() == [0, np.inf]


def test_grouped_gemm_is_a_gemm_for_each_expert():
    """By hand: two experts, of one row and of none, and a row of no expert."""
    a, b = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[[1.0, 1.0]], [[5.0, 5.0]]])
    d = ref.grouped_mm(a, b, np.array([1, 2, 2]), np.array([0.5, 9.0]))
    same(d, [[np.nan], [3.5]])
    byte = np.arange(1, 9, dtype=np.uint8).reshape(2, 4)
    scales = ref.group_scales(byte, np.array([0, 1, 2]))
    assert scales.shape == (256, 4)
    assert scales[0].tolist() == [1, 2, 3, 4]
    assert scales[128].tolist() == [5, 6, 7, 8]


def test_operands_of_a_gemm():
    """Two codes and a scale of each kind, by hand."""
    code, byte = np.repeat([0x38, 0x01], 16)[None], np.array([[128]], np.uint8)
    assert set(ref.operand(code, byte, "mxfp8", "a")[0]) == {2.0, 2.0**-8}
    assert set(ref.operand(code & 7, byte, "mxfp8xmxfp4", "b")[0]) == {0.0, 1.0}
    assert set(ref.operand(code[:, :16] & 15, byte + 0xB8, "nvfp4", "a")[0]) == {-0.0}
