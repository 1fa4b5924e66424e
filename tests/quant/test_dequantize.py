"""blockscale.dequantize, bit for bit (test_formats.py has all codes times all scale bytes)."""

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.helpers import DTYPES, golden, one, packed_tensor, rejects, same, scale_tensor
from tests.reference import core as ref


def random_packed(lead, k, fmt, seed):
    """Return random codes [..., k] and any scale bytes [..., k / block], NaN included."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (*lead, k), dtype=np.uint8)
    return codes, rng.integers(0, 256, (*lead, k // ref.BLOCK[fmt]), dtype=np.uint8)


def check(codes, byte, fmt, g=None, layout="linear", dtype="float32"):
    """Dequantise and compare every bit; NaN is any NaN."""
    stored = byte if layout == "linear" else ref.swizzle(byte.reshape(-1, byte.shape[-1]))
    got = bs.dequantize(
        packed_tensor(codes),
        scale_tensor(stored, fmt),
        fmt=fmt,
        global_scale=one(g),
        scale_layout=layout,
        dtype=DTYPES[dtype],
    )
    assert got.dtype == DTYPES[dtype]
    same(got.float().numpy(), ref.dequantize(codes, byte, fmt, 1.0 if g is None else g, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_every_scale_and_code_in_every_dtype(fmt, dtype):
    """Scale bytes vary along both axes; rounding to 16 bits is to nearest even, overflow is inf."""
    codes = np.broadcast_to(ref.unpack(np.arange(256, dtype=np.uint8)), (256, 512))
    blocks = 512 // ref.BLOCK[fmt]
    byte = (np.arange(256)[:, None] + 37 * np.arange(blocks)).astype(np.uint8)
    check(codes, byte, fmt, dtype=dtype)
    check(codes, byte, fmt, g=0.013764881, dtype=dtype)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_rounding_ties_go_to_even(dtype, bits):
    """A global scale of 1 + odd * 2^-bits puts the codes that are powers of two on ties."""
    codes = np.broadcast_to(np.arange(16, dtype=np.uint8), (256, 16))
    byte = np.arange(256, dtype=np.uint8)[:, None]
    for odd in (1, 3, 5):
        check(codes, byte, "nvfp4", g=1 + odd * 2.0**-bits, dtype=dtype)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_shapes(fmt, layout, rows):
    """Ragged rows and columns in both scale layouts, two float32 products in their order."""
    for seed, blocks in enumerate([1, 3, 5, 11, 25]):  # NVFP4: 16, 48, 80, 176 and 400 columns
        codes, byte = random_packed((rows,), blocks * ref.BLOCK[fmt], fmt, seed)
        check(codes, byte, fmt, g=0.37, layout=layout)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("lead", [(3, 5), (), (0,), (2, 0, 3)])
def test_leading_dimensions(fmt, layout, lead):
    """packed [..., K/2] gives [..., K]; 128x4 counts the flattened rows, even none."""
    check(*random_packed(lead, 96, fmt, 1), fmt, layout=layout)


def test_default_dtype_is_bfloat16():
    """And 128x4 scales work with it."""
    codes, byte = random_packed((130,), 48, "nvfp4", 2)
    check(codes, byte, "nvfp4", layout="128x4", dtype="bfloat16")
    w = bs.dequantize(packed_tensor(codes), scale_tensor(byte, "nvfp4"))
    assert w.dtype == torch.bfloat16


def test_padding_is_not_read():
    """NaN bytes in the padding of a 128x4 buffer change nothing."""
    codes, byte = random_packed((7,), 80, "nvfp4", 3)
    byte &= 0x3F
    stored = np.full((128, 8), 0x7F, np.uint8)
    stored.reshape(-1)[ref.swizzle_offset(7, 5)] = byte
    packed, scale = packed_tensor(codes), scale_tensor(stored, "nvfp4")
    got = bs.dequantize(packed, scale, scale_layout="128x4", dtype=torch.float32)
    same(got.numpy(), ref.dequantize(codes, byte, "nvfp4"))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_torch_float_types_are_accepted(fmt):
    """Packed as float4_e2m1fn_x2, MXFP4 scales as float8_e8m0fnu."""
    if not (hasattr(torch, "float4_e2m1fn_x2") and hasattr(torch, "float8_e8m0fnu")):
        pytest.skip(f"torch {torch.__version__} has no float4_e2m1fn_x2 or no float8_e8m0fnu")
    codes, byte = random_packed((7,), 96, fmt, 4)
    packed = packed_tensor(codes).view(torch.float4_e2m1fn_x2)
    scale = scale_tensor(byte, fmt)
    scale = scale if fmt == "nvfp4" else scale.view(torch.float8_e8m0fnu)
    got = bs.dequantize(packed, scale, fmt=fmt, dtype=torch.float32)
    same(got.numpy(), ref.dequantize(codes, byte, fmt))


def test_against_modelopt():
    """A real export, in float32; ModelOpt decodes code 8 as +0, which == accepts."""
    data = golden("modelopt_nvfp4_static_bf16")
    got = bs.dequantize(
        torch.from_numpy(data["sweep_packed"]),
        scale_tensor(data["sweep_weight_scale_e4m3"], "nvfp4"),
        global_scale=one(data["weight_scale_2"]),
        dtype=torch.float32,
    )
    assert (got.numpy() == data["sweep_dequant_f32"]).all()


@pytest.mark.parametrize("kind", ["", "_extreme"])
def test_against_gpt_oss(kind):
    """MXFP4 experts [E, out, in], as the loader decodes them, in bfloat16."""
    data = golden("modelopt_gptoss_mxfp4")
    scale = data[f"scales{kind}"]
    packed = torch.from_numpy(data["blocks"].reshape(*scale.shape[:2], -1))
    got = bs.dequantize(packed, scale_tensor(scale, "mxfp4"), fmt="mxfp4")
    bits = data["dense_bf16_extreme_bits" if kind else "dense_bf16_bits"]
    same(got.float().numpy().transpose(0, 2, 1), ref.bf16_value(bits))


PACKED = torch.zeros(7, 48, dtype=torch.uint8)  # K = 96
SCALE = torch.zeros(7, 6, dtype=torch.uint8).view(torch.float8_e4m3fn)
SWIZZLED = torch.zeros(128, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)
E8M0 = torch.zeros(7, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bs.dequantize(PACKED.int(), SCALE), ["packed", "int32", "uint8"]),
        (lambda: bs.dequantize(PACKED.tolist(), SCALE), ["packed", "list", "tensor"]),
        (
            lambda: bs.dequantize(PACKED, SCALE.float()),
            ["block_scale", "float32", "float8_e4m3fn"],
        ),
        (
            lambda: bs.dequantize(PACKED, E8M0.view(torch.float8_e4m3fn), fmt="mxfp4"),
            ["block_scale", "float8_e4m3fn", "uint8"],
        ),
        (
            lambda: bs.dequantize(PACKED[:, :12].contiguous(), SCALE),
            ["packed", "24", "multiple of 16"],
        ),
        (
            lambda: bs.dequantize(PACKED[:, :24].contiguous(), E8M0, fmt="mxfp4"),
            ["packed", "48", "multiple of 32"],
        ),
        (
            lambda: bs.dequantize(PACKED, SCALE[:, :5].contiguous()),
            ["block_scale", r"7, 5\b", r"7, 6\b"],
        ),
        (
            lambda: bs.dequantize(PACKED, SCALE[:6]),
            ["block_scale", r"6, 6\b", r"7, 6\b"],
        ),
        (
            lambda: bs.dequantize(PACKED, SWIZZLED),
            ["block_scale", r"128, 8\b", r"7, 6\b", "128x4"],
        ),
        (
            lambda: bs.dequantize(PACKED, SCALE, scale_layout="128x4"),
            ["block_scale", r"7, 6\b", r"128, 8\b", "swizzle_scales"],
        ),
        (
            lambda: bs.dequantize(PACKED, SCALE, scale_layout="8x4"),
            ["scale_layout", "8x4", "128x4"],
        ),
        (lambda: bs.dequantize(PACKED, SCALE, fmt="int4"), ["fmt", "int4", "nvfp4"]),
        (
            lambda: bs.dequantize(PACKED, SCALE, dtype=torch.float64),
            ["dtype", "float64", "bfloat16"],
        ),
        (
            lambda: bs.dequantize(PACKED, SCALE, global_scale=torch.ones(7)),
            ["global_scale", "one element"],
        ),
        (lambda: bs.dequantize(PACKED.to("meta"), SCALE), ["packed", "meta", "cpu"]),
        (lambda: bs.dequantize(PACKED, SCALE.to("meta")), ["block_scale", "meta", "cpu"]),
        (
            lambda: bs.dequantize(torch.zeros(7, 96, dtype=torch.uint8)[:, ::2], SCALE),
            ["packed", r"contiguous\(\)"],
        ),
        (
            lambda: bs.dequantize(PACKED, SWIZZLED[:7, :6]),
            ["block_scale", r"contiguous\(\)"],
        ),
    ],
)
def test_bad_input(call, words):
    """One sentence: the argument, its value, the rule and the remedy."""
    with rejects("dequantize", *words):
        call()
