"""Edge-LLM's tensor view, words and packers, held against golden data and plain Python."""

from itertools import product

import numpy as np
import pytest
import torch
import tvm
from tvm.script import tirx as T

import blockscale as bs
from blockscale import edgellm
from blockscale.base import edgellm_index as index
from blockscale.compat.edgellm import Nvfp4Tensor
from blockscale.compat.edgellm import ops as edgellm_ops
from blockscale.tir.edgellm import passes as tir
from tests.kit.paths import GOLDEN
from tests.reference import edgellm as ref

TILES = np.load(GOLDEN / "edgellm_tiles.npz")
TABLES = np.load(GOLDEN / "edgellm_dequant_tables.npz")
tensor = torch.from_numpy
WEIGHT = {"strides": (256, 4, 2), "scale_num_k_tiles": 2, "scale_expert_stride": 256}
GRID = np.meshgrid(range(2), range(64), range(2), indexing="ij")
TOKENS = np.meshgrid(range(3), range(3), [0], indexing="ij")


def weight(**options):
    """Return the golden up weight [2, 64, 128]."""
    payload, scales = tensor(TILES["payload_u32"]), tensor(TILES["atom_sf_u8"])
    return Nvfp4Tensor(payload, scales, tensor(TILES["global_scale"]), **{**WEIGHT, **options})


def activation(g=True):
    """Return the golden activation [3, 192]."""
    packed = tensor(TILES["act_payload_u32"].reshape(3, 24))
    scale = tensor(TILES["act_global_scale"]) if g else None
    return Nvfp4Tensor.activation(packed, tensor(TILES["act_sf_word"]), scale)


def bits(value):
    """Return the bits of 16-bit floats."""
    return value.view(torch.int16).numpy().view(np.uint16)


# ------------------------------------------------------------------------------------------- golden
def test_payload_lanes():
    """Every lane of every tile, one by one and all at once."""
    t, want = weight(), TILES["payload_u32"].reshape(2, 64, 2, 2, 4)
    for chunk in (0, 1):
        lanes = t.load_tile_uint4(GRID, chunk)
        assert lanes.dtype == np.int64
        assert (lanes == want[:, :, :, chunk]).all()
    for e, h, z, chunk, lane in product((0, 1), (0, 1, 63), (0, 1), (0, 1), range(4)):
        got = t.load_tile_uint32_lane((e, h, z), chunk, lane)
        assert type(got) is int
        assert got == want[e, h, z, chunk, lane]
        assert t.load_tile_uint4((e, h, z), chunk) == tuple(want[e, h, z, chunk])
    assert t.tile_offset_int4((1, 63, 1)) == 256 + 63 * 4 + 2


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint32", "int64"])
def test_storage(dtype):
    """Any integer dtype of the same bytes, payload and scales."""
    payload = tensor(TILES["payload_u32"].view(dtype))
    scales = tensor(TILES["atom_sf_u8"].view(dtype))
    for words in (scales, scales.view(torch.uint8).view(torch.float8_e4m3fn)):
        t = Nvfp4Tensor(payload, words, **WEIGHT)
        assert (bits(t.tile_half(GRID)) == TILES["half_bits"]).all()
    assert t.payload.data_ptr() == payload.data_ptr()  # a view


def test_arrays():
    """NumPy arrays do as well."""
    t = Nvfp4Tensor(TILES["payload_u32"], TILES["atom_sf_u8"], np.ones(2, np.float32), **WEIGHT)
    assert (bits(t.tile_half(GRID)) == TILES["half_bits"]).all()


def test_tiles_in_half():
    """Without and with the global scale in half; coordinates as arrays, tensors, one by one."""
    t = weight()
    assert (bits(t.tile_half(GRID)) == TILES["half_bits"]).all()
    assert (bits(t.tile_half(GRID, scaled=True)) == TILES["half_scaled_bits"]).all()
    at = [tensor(c) for c in GRID]
    assert (bits(t.tile_half(at)) == TILES["half_bits"]).all()
    assert (bits(t.tile_half((1, 5, 0), scaled=True)) == TILES["half_scaled_bits"][1, 5, 0]).all()
    assert torch.equal(Nvfp4Tensor.tile_half(activation(g=False), (0, 0, 0), scaled=True,
                       linear=True), activation().tile_half((0, 0, 0), linear=True))  # fmt: skip


def test_activation_elements():
    """Through the linear reader, in float32."""
    got = activation().activation_elements(TOKENS).reshape(3, 192)
    assert got.dtype == torch.float32
    assert (got.numpy() == TILES["act_elem_f32"]).all()


def test_tile_dot():
    """The half dot product; the golden pairs go round over all sizes.  Column 1: no scale of x."""
    i = np.arange(64)
    for column, act in enumerate((activation(), activation(g=False))):
        got = weight().tile_dot((i % 2, i, i % 2), act, (i % 3, i % 3, 0 * i))
        assert (got.numpy() == TILES["tiledot_full_noact"][:, column]).all()


def test_tile_dot_of_tiny_scales():
    """Products of scales are rounded to half by themselves, and may be subnormal."""
    rng = np.random.default_rng(4)
    codes, byte = (
        rng.integers(0, high, (2, size), dtype=np.uint8) for high, size in ((256, 32), (90, 4))
    )
    views = [
        Nvfp4Tensor.activation(tensor(codes[i : i + 1]), tensor(byte[i].view(np.int32)))
        for i in range(2)
    ]
    weight = Nvfp4Tensor(tensor(codes[0]), tensor(np.tile(byte[0], 128)), strides=(0, 0, 0),
                         scale_num_k_tiles=1)  # fmt: skip
    acc, half = np.float16(0), np.float16
    for i in range(64):
        scales = half(
            ref.scale_half(byte[1][(0, 2, 1, 3)[i // 16]]) * ref.scale_half(byte[0][i // 16])
        )
        value = half(ref.e2m1(ref.code_at(codes[0], i)) * ref.e2m1(ref.code_at(codes[1], i)))
        acc = half(acc + half(value * scales))
    assert float(weight.tile_dot((0, 0, 0), views[1], (0, 0, 0))) == float(acc) != 0


def test_words():
    """Both releases' decoders of scale words, and codes."""
    words = tensor(TABLES["word"])
    assert (bits(edgellm.scale_word(words)) == TABLES["v07_scale_half_bits"]).all()
    assert (bits(edgellm.scale_word(words, "bfloat16")) == TABLES["v07_scale_bf16_bits"]).all()
    assert (bits(edgellm.code_word(words)) == TABLES["v07_e2m1_half_bits"]).all()
    later = tensor(TABLES["v10_word"])
    for form, dtype in (("e4m3_half", "half"), ("e4m3_bfloat16", "bf16")):
        assert (bits(edgellm.scale_word(later, form)) == TABLES[f"v10_scale_{dtype}_bits"]).all()
    fragments = bits(edgellm.code_word(later))[:, [2, 6, 3, 7]]
    assert (fragments == TABLES["v10_e2m1_half_full_bits"]).all()
    with pytest.raises(ValueError, match="form='fp8' is not known; choose one of half"):
        edgellm.scale_word(words, "fp8")


def test_scale_bytes():
    """All 256, as numbers, and back from every one that is finite."""
    every = torch.arange(256, dtype=torch.uint8)
    want = TABLES["v07_decode_sf_byte_to_float"]
    assert np.array_equal(edgellm.scale_values(every).numpy(), want, equal_nan=True)
    finite = every[:248]
    assert torch.equal(edgellm.decode_scales(edgellm.scale_values(finite)), finite)
    decode = tvm.compile(_decoder(), target="llvm")
    got = torch.full((256,), 7.0)
    decode(every, got)
    assert np.array_equal(got.numpy(), want, equal_nan=True)


def _decoder():
    """Return a kernel that decodes 256 bytes."""

    @T.prim_func(s_tir=True)
    def main(byte: T.Buffer((256,), "uint8"), out: T.Buffer((256,), "float32")):
        for i in range(256):
            with T.sblock("decode"):
                vi = T.axis.spatial(256, i)
                out[vi] = tir.scale_decode(T.Cast("int32", byte[vi]))

    return main


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_activations(activation):
    """The original's, on 807 numbers; TensorIR's exp is within two units of the last place."""
    x, want = tensor(TABLES["act_in"]), TABLES[f"act_{activation}"]
    assert (edgellm_ops.exact_activation(activation, x).numpy() == want).all()
    assert [ref.gate(activation, v) for v in TABLES["act_in"]] == list(want)

    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((807,), "float32"), out: T.Buffer((807,), "float32")):
        for i in range(807):
            with T.sblock("act"):
                vi = T.axis.spatial(807, i)
                out[vi] = tir.activated(activation, x[vi])

    got = torch.full((807,), torch.nan)
    tvm.compile(main, target="llvm")(x, got)
    assert np.allclose(got.numpy(), want, rtol=5e-7 if activation == "silu" else 0, atol=0)


# ---------------------------------------------------------------------------------- index functions
def plain_scale_index(m, k_tile, e, num_k_tiles, expert_stride):
    """Return the word of a row and a tile, by the byte formula of a column of 16 values."""
    k = 4 * k_tile
    byte = (m // 128) * num_k_tiles * 512 + (k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    assert byte % 4 == 0
    return byte // 4 + e * expert_stride


@pytest.mark.parametrize(("m_dim", "k_dim"), [(1, 2), (0, 1), (2, 0), (1, 0)])
def test_scale_index(m_dim, k_dim):
    """Rows over several atoms, all roles of the components."""
    t = weight(scale_num_k_tiles=5, scale_expert_stride=1920, scale_m_dim=m_dim, scale_k_dim=k_dim)
    for m, k, e in product((0, 1, 31, 32, 127, 128, 300), (0, 1, 4), (0, 3)):
        c = [0, 0, 0]
        c[m_dim], c[k_dim], c[3 - m_dim - k_dim] = m, k, e
        got = t.tile_scale_index(c)
        assert type(got) is int
        assert got == plain_scale_index(m, k, e, 5, 1920)
        assert (t.tile_scale_index([np.array([v]) for v in c]) == got).all()


def test_scale_words():
    """Bytes 1 and 2 change places, or do not where there is one word a tile; words are unsigned."""
    data = np.arange(8 * 256, dtype=np.uint32) * 0x01030507 + 0x80FFC001
    t = Nvfp4Tensor(torch.zeros(4096, dtype=torch.uint8), tensor(data.view(np.int32)), **WEIGHT)
    for c in ((0, 0, 0), (1, 33, 1), (0, 63, 0)):
        stored = int(data[plain_scale_index(c[1], c[2], c[0], 2, 256)])
        a, b, d, e = stored.to_bytes(4, "little")
        assert t.read_block_scale_word(c) == int.from_bytes(bytes([a, d, b, e]), "little")
        linear = int(data[(c[0] * 256 + c[1] * 4 + c[2] * 2) // 2])
        assert t.read_block_scale_word_linear(c) == linear
    assert t.read_block_scale_word((0, 0, 0)) > 2**31


def test_index_functions_are_tensorir():
    """A kernel made of them, on every tile of the golden weight and activation."""
    golden = {
        name: TILES[name].reshape(-1).view(np.int32) for name in ("payload_u32", "atom_sf_u8")
    }
    t, act = weight(), activation()
    sizes, strides = (2, 256, 1, 2), t.strides

    @T.prim_func(s_tir=True)
    def main(
        payload: T.Buffer((2048,), "int32"),
        words: T.Buffer((512,), "int32"),
        x_words: T.Buffer((9,), "int32"),
        out: T.Buffer((2, 64, 2, 12), "int64"),
        x_out: T.Buffer((3, 3), "int64"),
    ):
        for e, h, z in T.grid(2, 64, 2):
            with T.sblock("tile"):
                ve, vh, vz = T.axis.remap("SSS", [e, h, z])
                c = T.meta_var([T.Cast("int64", v) for v in (ve, vh, vz)])
                out[ve, vh, vz, 8] = t.tile_offset_int4(c)
                out[ve, vh, vz, 9] = t.tile_scale_index(c)
                out[ve, vh, vz, 10] = tir.scale_word(words, c, *sizes)
                out[ve, vh, vz, 11] = tir.scale_word_linear(words, c, strides)
                for lane in range(8):
                    out[ve, vh, vz, lane] = tir.tile_lane(payload, c, strides, lane)
        for m, k in T.grid(3, 3):
            with T.sblock("x"):
                vm, vk = T.axis.remap("SS", [m, k])
                c = T.meta_var([T.Cast("int64", vm), T.Cast("int64", vk), T.int64(0)])
                x_out[vm, vk] = tir.scale_word_linear(x_words, c, act.strides)

    out = torch.full((2, 64, 2, 12), -1, dtype=torch.int64)
    x_out = torch.full((3, 3), -1, dtype=torch.int64)
    arguments = (*golden.values(), TILES["act_sf_word"].reshape(-1))
    tvm.compile(main, target="llvm")(*map(tensor, arguments), out, x_out)
    assert (out.numpy()[..., :8] == TILES["payload_u32"]).all()
    parts = (
        t.tile_offset_int4(GRID),
        t.tile_scale_index(GRID),
        t.read_block_scale_word(GRID),
        t.read_block_scale_word_linear(GRID),
    )
    assert (out.numpy()[..., 8:] == np.stack(parts, -1)).all()
    assert (x_out.numpy() == TILES["act_sf_word"].view(np.uint32)).all()
    got = act.read_block_scale_word_linear(TOKENS)[..., 0]
    assert (got == TILES["act_sf_word"].view(np.uint32)).all()


# ------------------------------------------------------------------------------------------ weights
def test_dequantize():
    """All tiles at once, with global scales of the experts."""
    payload = tensor(TILES["payload_u32"].view(np.uint8).reshape(2, 64, 64))
    g, scales = tensor(TILES["global_scale"]), tensor(TILES["atom_sf_u8"])
    t = Nvfp4Tensor.up_weights(payload, g, scales)
    want = TILES["half_bits"].view(np.float16).astype(np.float32).reshape(2, 64, 128)
    want = want * TILES["global_scale"][:, None, None]
    assert (t.dequantize().numpy() == want).all()
    assert t.tiles == (2, 64, 2)
    assert (t.scale_num_k_tiles, t.scale_expert_stride) == (2, 256)
    got = activation().dequantize(linear=True).numpy()
    assert (got.reshape(3, 192) == TILES["act_elem_f32"] * np.float32(0.75)).all()
    down = Nvfp4Tensor.down_weights(torch.zeros(2, 192, 32, dtype=torch.uint8), 0.5)
    assert (down.strides, down.scale_expert_stride) == ((384, 2, 2), 256)
    assert float(down.global_of(1)) == 0.5


def random_checkpoint(lead, n, k, seed=0):
    """Return codes and E4M3 bytes of a ModelOpt weight, subnormal and zero scales too."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8)
    return packed, rng.integers(0, 0x7F, (*lead, n, k // 16), dtype=np.uint8)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_pack_weight(lead):
    """A checkpoint's weight is the same numbers afterwards, and comes back bit for bit."""
    packed, byte = random_checkpoint(lead, 128, 192)
    payload, decode = edgellm.pack_weight(tensor(packed), tensor(byte))
    assert payload.shape == (*lead, 192, 64)
    assert decode.shape == (*lead, 12, 128)
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(*lead, 128, 192)
    e4m3 = tensor(byte).view(torch.float8_e4m3fn).double().numpy()
    table = np.array([ref.e2m1(code) for code in range(16)])
    dense = table[codes] * np.repeat(e4m3, 16, -1)
    assert (ref.weight(payload.numpy(), decode.numpy()) == dense.swapaxes(-1, -2)).all()
    g = torch.tensor([0.5, 2.0, 0.25]) if lead else 0.5
    factor = np.array([0.5, 2.0, 0.25])[:, None, None] if lead else 0.5
    got = edgellm.dequantize_weight(payload, decode, g).numpy()
    assert (got == dense.swapaxes(-1, -2) * factor).all()
    assert (edgellm.dequantize_weight(payload, decode).numpy() == dense.swapaxes(-1, -2)).all()
    back, scales = edgellm.unpack_weight(payload, decode)
    assert (back.numpy() == packed).all()
    assert (scales.view(torch.uint8).numpy() == byte).all()


def test_decode_scales_truncate():
    """Three bits of mantissa are kept, of float16; smaller than half's least: 0."""
    scales = torch.tensor([1.0, 1.124, 1.125, 447.0, 57344.0, 2.0**-17, 2.0**-18, 0.0, 1.99999])
    want = [1.0, 1.0, 1.125, 416.0, 57344.0, 2.0**-17, 0.0, 0.0, 2.0]
    for dtype in (torch.float32, torch.float64):
        assert edgellm.scale_values(edgellm.decode_scales(scales.to(dtype))).tolist() == want


# ------------------------------------------------------------------------------------- activations
def test_quantize_activation():
    """Codes, and words with the bytes exchanged, by a loop over blocks."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((3, 128)) * np.exp2(rng.integers(-6, 6, (3, 1)))).astype(np.float32)
    x[0, :16], x[1, 16:20] = 0, (np.nan, -0.0, np.float32(1e-30), -1e-30)
    x[2, :16] = np.array([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2) * ([1] * 8 + [-1] * 8)
    for g in (0.0371, 1.0):
        t = edgellm.quantize_activation(tensor(x), g)
        words = t.read_block_scale_word_linear(np.meshgrid(range(3), range(2), [0], indexing="ij"))
        packed = t.payload.numpy().reshape(3, 64)
        for row, block in product(range(3), range(8)):
            part = x[row, 16 * block : 16 * block + 16]
            forward = np.float32(1) / np.float32(g)
            amax = np.float32(np.nanmax(np.abs(part)))
            want = torch.tensor(forward * (amax * np.float32(1 / 6)))
            scale = want.clamp(max=448).to(torch.float8_e4m3fn).float().numpy()
            place = 16 * (block % 4 % 2) + 8 * (block % 4 // 2)
            byte = int(words[row, block // 4, 0]) >> place & 255
            assert ref.scale_half(byte) == scale
            with np.errstate(divide="ignore"):
                mul = np.float32(1) / np.float32(scale * (np.float32(1) / forward))
            for i, v in enumerate(part):
                code = ref.code_at(packed[row], 16 * block + i)
                assert code == (slow_code(v * mul) if amax else slow_code(v * np.float32(0)))
    assert torch.equal(t.global_scale, torch.tensor([1.0]))


def slow_code(v):
    """Return the nearest code; of two, the one with the even mantissa."""
    if np.isnan(v):
        return 7
    magnitude = min(abs(float(v)), 6.0)
    best = min(range(8), key=lambda c: (abs(ref.MAGNITUDES[c] - magnitude), c % 2))
    return best + 8 * int(np.signbit(v))


# ------------------------------------------------------------------------------------------- errors
def bad(error, match, call, *args, **options):
    """Assert that the call fails with this sentence."""
    with pytest.raises(error, match=match):
        call(*args, **options)


def test_bad_tensors():
    """Construction."""
    payload, strides = torch.zeros(64, dtype=torch.uint8), (4, 2, 2)
    made = Nvfp4Tensor
    bad(TypeError, "quantized_data is a list, not a torch tensor", made, [1], strides=strides)
    bad(TypeError, "quantized_data has dtype float32", made, payload.float(), strides=strides)
    bad(TypeError, "block_scale has dtype float16", made, payload, payload.half(), strides=strides)
    bad(ValueError, "has strides .* contiguous", made, payload.view(8, 8).T, strides=strides)
    bad(ValueError, "60 bytes, which is not a multiple of 16", made, payload[:60], strides=strides)
    bad(ValueError, "6 bytes, .* multiple of 4; pass whole words", made, payload, payload[:6],
        strides=strides)  # fmt: skip
    bad(ValueError, r"strides=\(4, 2\) are not three numbers", made, payload, strides=(4, 2))
    bad(ValueError, "strides=-4 is not an integer >= 0", made, payload, strides=(-4, 2, 2))
    bad(ValueError, "scale_expert_stride=1.5", made, payload, strides=strides,
        scale_expert_stride=1.5)  # fmt: skip
    bad(ValueError, "scale_m_dim=3 is not 0, 1 or 2", made, payload, strides=strides, scale_m_dim=3)
    bad(ValueError, "are both 2; choose two", made, payload, strides=strides, scale_m_dim=2)
    bad(TypeError, "global_scale is torch.float16", made, payload, None, payload[0].half(),
        strides=strides)  # fmt: skip
    bad(ValueError, r"global_scale has shape \[1, 1\]", made, payload, None, torch.ones(1, 1),
        strides=strides)  # fmt: skip
    bad(ValueError, "number 6, but there are 4 vectors", made, payload, strides=strides,
        tiles=(2, 1, 2))  # fmt: skip
    bad(ValueError, r"up_weights: payload has shape \[64\]", made.up_weights, payload)
    bad(
        ValueError,
        r"activation: payload .* \[T, H / 2\]",
        made.activation,
        payload.view(8, 8),
        None,
    )
    bad(TypeError, "down_weights: payload is a int, not", made.down_weights, 3)


def test_bad_coordinates():
    """Reading."""
    t = weight()
    bad(ValueError, r"coordinate \(1, 2\) has no three components", t.tile_offset_int4, (1, 2))
    bad(ValueError, "coordinate 5 has no three", t.tile_offset_int4, 5)
    bad(ValueError, "y=-1 is negative", t.tile_scale_index, (0, -1, 0))
    bad(TypeError, "x=1.0 is not an integer", t.tile_offset_int4, (1.0, 0, 0))
    bad(TypeError, "z has dtype float64", t.tile_offset_int4, (0, 0, np.zeros(2)))
    bad(ValueError, "quantized_data number 512, but there are 512 vectors",
        t.load_tile_uint4, (2, 0, 0), 0)  # fmt: skip
    bad(ValueError, "block_scale number 512, but there are 512 words", t.read_block_scale_word,
        (2, 0, 0))  # fmt: skip
    bad(ValueError, "chunk=2 is not an integer from 0 to 1", t.load_tile_uint4, (0, 0, 0), 2)
    bad(
        ValueError, "lane=4 is not an integer from 0 to 3", t.load_tile_uint32_lane, (0, 0, 0), 0, 4
    )
    bad(ValueError, "sizes of x, y and z are not known", t.dequantize)
    act = activation()
    bad(ValueError, "y=3 is outside of the tensor, which has 3 tiles in y", act.load_tile_uint4,
        (0, 3, 0), 0)  # fmt: skip
    plain = Nvfp4Tensor(tensor(TILES["payload_u32"]), **WEIGHT)
    bad(ValueError, "there is no block_scale to read", plain.read_block_scale_word, (0, 0, 0))
    bad(ValueError, "global_scale number 2, but there are 2 numbers", t.global_of, 2)


def test_bad_weights():
    """Packing."""
    packed, byte = map(tensor, random_checkpoint((), 64, 64))
    scales = byte.view(torch.float8_e4m3fn)
    bad(TypeError, "scales is torch.uint8, not a tensor of floats", edgellm.decode_scales, byte)
    for value in (-1.0, float("nan"), 1e6):
        bad(ValueError, "a scale is negative, NaN or above", edgellm.decode_scales,
            torch.tensor([1.0, value]))  # fmt: skip
    bad(TypeError, "packed is torch.int32", edgellm.pack_weight, packed.int(), byte)
    bad(ValueError, "rows must be a multiple of 64", edgellm.pack_weight, packed[:60], byte[:60])
    bad(ValueError, r"block_scale has shape \[64, 3\], but must have \[64, 4\]",
        edgellm.pack_weight, packed, byte[:, :3])  # fmt: skip
    payload, decode = edgellm.pack_weight(packed, scales)
    bad(
        TypeError, "decode scales are torch.float32", edgellm.unpack_weight, payload, decode.float()
    )
    bad(
        ValueError,
        r"decode scales have shape \[3, 64\]",
        edgellm.unpack_weight,
        payload,
        decode[:3],
    )
    decode[0, 0] = 247
    bad(ValueError, "no E4M3 number", edgellm.unpack_weight, payload, decode)
    quantize = edgellm.quantize_activation
    bad(TypeError, "x is torch.float64", quantize, torch.zeros(1, 64).double(), 1.0)
    bad(ValueError, r"x has shape \[1, 60\]", quantize, torch.zeros(1, 60), 1.0)
    bad(ValueError, "one positive number", quantize, torch.zeros(1, 64), 0.0)


def test_lazy_module():
    """`bs.edgellm` is there without an import, and its words need no tvm."""
    assert bs.edgellm is edgellm
    assert index.exchange(0x03020100) == 0x03010200
