"""The number formats as the kernels have them: every E2M1 decision, every E4M3 and UE8M0 byte.

A format is reached through an operation that adds nothing to it: a block_amax of 6 makes the scale
1, so the packed codes are E2M1(x); a global scale of 1/6 makes 6 g = 1, so the scale byte is that
of amax.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.helpers import (
    as_bytes,
    golden,
    one,
    packed_tensor,
    same,
    same_bytes,
    scale_tensor,
    tensor,
)
from tests.reference import core as ref

SIXTH = float(np.float32(1) / np.float32(6))  # 6 * fl(1/6) rounds to 1


def e2m1(x, fmt):
    """Return the codes that the kernel gives to x [n], each block having the scale 1."""
    x = np.resize(x, ref.ceil_to(len(x), ref.BLOCK[fmt])).astype(np.float32)
    amax = torch.full((len(x) // ref.BLOCK[fmt],), 6.0)
    packed, scale = bs.quantize(torch.from_numpy(x)[None], fmt=fmt, block_amax=amax)
    assert (ref.scale_value(as_bytes(scale), fmt) == 1).all()
    return x, ref.unpack(as_bytes(packed))[0]


def test_sixth_makes_scales_plain():
    assert np.float32(6) * np.float32(SIXTH) == 1


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_e2m1_against_other_implementations(fmt):
    """Values, ties and their neighbours, +-0, +-inf, denormals: as torchao, but NaN is 7."""
    data = golden("modelopt_fp4_rounding")
    x, codes = e2m1(data["scaled_in"], fmt)
    expected = np.resize(data["torchao_f32_to_f4_nibble"], len(x))
    same_bytes(codes, np.where(np.isnan(x), np.uint8(7), expected))


def test_e2m1_everywhere():
    """One float32 in 2^16 of the whole line (it holds all ties) and random bit patterns."""
    bits = np.concatenate(
        [
            np.arange(0, 1 << 32, 1 << 16, dtype=np.uint64),
            np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint64),
        ]
    )
    x, codes = e2m1(bits.astype(np.uint32).view(np.float32), "nvfp4")
    same_bytes(codes, ref.e2m1_encode(x))


def scale_probes():
    """Return magnitudes: E4M3 values and midpoints, powers of two, neighbours of all, extremes."""
    values = ref.e4m3_decode(np.arange(0x7F))
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2, [448, 464, 480, 1e4]])
    exact = np.concatenate([exact, 2.0 ** np.arange(-149, 128)]).astype(np.float32)
    above, below = np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))
    special = np.array([3.4028235e38, np.inf, np.nan, -np.nan], np.float32)
    return np.concatenate([exact, above, below, special])


@pytest.mark.parametrize(
    ("fmt", "rounding", "encode", "scale"),
    [
        ("nvfp4", "ceil", ref.e4m3_encode, SIXTH),
        ("mxfp4", "ceil", ref.ue8m0_encode_ceil, SIXTH),
        ("mxfp4", "floor", ref.ue8m0_encode_floor, None),
    ],
)
def test_scale_encoding(fmt, rounding, encode, scale):
    """Every byte, every tie of E4M3 and every power of two of UE8M0, with their neighbours."""
    amax = scale_probes()
    x = torch.zeros(len(amax), ref.BLOCK[fmt])
    x[:, 5] = torch.from_numpy(amax) * -1  # the sign must not matter
    _, got = bs.quantize(x, fmt=fmt, global_scale=one(scale), scale_rounding=rounding)
    same_bytes(as_bytes(got)[:, 0], encode(amax))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_scale_division_is_a_division(fmt):
    """Quotients amax / (6 g) at and beside every tie: a product with 1 / (6 g) rounds elsewhere."""
    values = ref.e4m3_decode(np.arange(0x7F))
    edges = (values[1:] + values[:-1]) / 2 if fmt == "nvfp4" else 2.0 ** np.arange(-20, 20)
    for g in np.random.default_rng(0).uniform(0.01, 100, 8).astype(np.float32):
        edge = edges.astype(np.float32) * (np.float32(6) * g)
        amax = np.concatenate(
            [edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, edge * 2)]
        )
        x = torch.zeros(len(amax), ref.BLOCK[fmt])
        x[:, 0] = torch.from_numpy(amax)
        packed, scale = bs.quantize(x, fmt=fmt, global_scale=one(g))
        codes, byte = ref.quantize(x.numpy(), fmt, g)
        same_bytes(as_bytes(scale), byte)
        same_bytes(as_bytes(packed), ref.pack(codes))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_scale_decoding(fmt):
    """All 256 scale bytes times all 16 codes in both nibbles: 2^16 products, bit for bit."""
    codes = ref.unpack(np.arange(256, dtype=np.uint8))  # [512]: all bytes
    codes = np.broadcast_to(codes, (256, 512))
    byte = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (256, 512 // ref.BLOCK[fmt]))
    packed = packed_tensor(codes)
    got = bs.dequantize(packed, scale_tensor(byte, fmt), fmt=fmt, dtype=torch.float32)
    same(got.numpy(), ref.dequantize(codes, byte, fmt))


def test_fp8_scale_candidates():
    """126 ascending float32: ModelOpt's table, which is e4m3 / 448 with a true division."""
    c = bs.fp8_scale_candidates()
    assert c.dtype == torch.float32
    assert c.device.type == "cpu"
    same(c.numpy(), golden("modelopt_fp8_candidates")["candidates_f32"])
    c.zero_()  # the caller's own copy: the next call is not affected
    same(bs.fp8_scale_candidates(device="cpu").numpy(), ref.fp8_scale_candidates())


def test_codes_survive_a_round_trip():
    """Quantising dequantised values gives every code and scale back, the sign of zero too."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    byte = np.arange(256, dtype=np.uint8)[:, None]
    usable = np.flatnonzero((byte[:, 0] != 0) & (byte[:, 0] < 0x7F))  # positive, not NaN
    values = tensor(ref.dequantize(codes[usable], byte[usable], "nvfp4"))
    packed, scale = bs.quantize(values)
    same_bytes(as_bytes(scale), byte[usable])
    same_bytes(as_bytes(packed), ref.pack(codes[usable]))


def test_int4():
    """INT4 has no op yet: its expressions are compiled as they are; -8 .. 7, ties to even."""
    import tvm
    from tvm.script import tirx as T

    from blockscale.tir import formats
    from blockscale.tir.common import i64

    x = np.array([-9, -8.5, -8, -7.5, -2.5, -0.5, -0.0, 0.4, 0.5, 1.5, 6.5, 7.4, 99, np.nan], "f")
    count = i64(len(x))

    @T.prim_func(s_tir=True)
    def main(
        x: T.Buffer((count,), "float32"),
        code: T.Buffer((count,), "int32"),
        back: T.Buffer((count,), "float32"),
    ):
        for i in range(count):
            with T.sblock("code"):
                vi = T.axis.spatial(count, i)
                code[vi] = formats.int4_encode(x[vi])
        for i in range(count):
            with T.sblock("back"):
                vi = T.axis.spatial(count, i)
                back[vi] = formats.int4_decode(code[vi])

    code, back = torch.full((len(x),), -1, dtype=torch.int32), torch.full((len(x),), torch.nan)
    tvm.compile(tvm.IRModule({"main": main}), target="llvm")["main"](tensor(x), code, back)
    expected = np.nan_to_num(np.clip(np.rint(x), -8, 7)) + 0.0  # INT4 has no -0
    same(back.numpy(), expected)
    assert (code.numpy() == expected + 8).all()
