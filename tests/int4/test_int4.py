"""bs.int4: every byte of TensorRT-LLM's weight layouts, the way back, scales and numbers."""

import itertools

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.ops.int4 import layout
from tests.kit.helpers import DTYPES, golden, rejects, same_bytes
from tests.kit.pairwise import each, few
from tests.reference import int4 as ref

GOLDEN = {
    "w4a16_sm80": {},
    "w4a16_sm90_moe": {"sm": 90},
    "w4a16_sm90_dense2d": {"sm": 90, "moe": False},
    "w4a16_sm90_v010_legacy": {"sm": 100, "moe": False},
    "w4afp8_sm90_dense2d": {"sm": 90, "moe": False, "activation": "a8"},
    "w4afp8_sm90_moe": {"sm": 90, "activation": "a8"},
    "w8a16_sm80": {"bits": 8},
    "w8a16_sm90_dense2d": {"sm": 90, "moe": False, "bits": 8},
}

MODES = [  # sm, activation, moe, what is done
    *((sm, "a16", moe, "full") for sm in (75, 80, 86, 87, 89, 120, 121) for moe in (True, False)),
    *((sm, "a16", True, "full") for sm in (90, 100, 103)),
    (90, "a16", False, "no columns"),
    *((sm, a, False, "transpose") for sm in (100, 103) for a in ("a16", "a8")),
    *((sm, "a8", moe, "full") for sm in (89, 120, 121) for moe in (True, False)),
    (90, "a8", True, "transpose"),
    (90, "a8", False, "no columns"),
]
CASES = [(*mode, bits) for mode in MODES for bits in (4, 8) if (mode[1], bits) != ("a8", 8)]


def weight(e, k, n, bits=4, seed=0):
    rng = np.random.default_rng([seed, e, k, n, bits])
    return rng.integers(0, 256, (e, k, n * bits // 8), dtype=np.uint8)


# ---- Weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(list(GOLDEN)))
def test_golden(name):
    """The bytes of TensorRT-LLM's own code, from uint8 and int8, with and without experts."""
    data, options = golden("int4_E1_K64_N64"), GOLDEN[name]
    source = data["q_int8" if options.get("bits") == 8 else "packed_rowmajor"].view(np.uint8)
    for dtype in (np.uint8, np.int8):
        packed = torch.from_numpy(source.view(dtype).copy())
        made = bs.int4.preprocess_weights(packed, **options)
        assert (made.dtype, made.shape) == (packed.dtype, packed.shape)
        same_bytes(made.numpy().view(np.uint8), data[name])
        assert torch.equal(bs.int4.unprocess_weights(made, **options), packed)
    if options.get("moe") is False:
        flat = bs.int4.preprocess_weights(packed[0], **options)
        same_bytes(flat.numpy().view(np.uint8), data[name][0])


@pytest.mark.parametrize(("sm", "activation", "moe", "steps", "bits"), few(CASES, every=3))
def test_every_mode(sm, activation, moe, steps, bits):
    """All architectures and activations, against the steps one by one, and back."""
    options = {"sm": sm, "activation": activation, "moe": moe, "bits": bits}
    for e, k, n in itertools.product((1, 3), (128, 384), (16, 80, 192)):
        packed = weight(e, k, n, bits)
        made = bs.int4.preprocess_weights(torch.from_numpy(packed), **options)
        same_bytes(made.numpy(), ref.preprocess(packed, activation, bits, steps))
        same_bytes(bs.int4.unprocess_weights(made, **options).numpy(), packed)


def test_one_code_by_hand():
    """Row 8 of column 1: row 2 of the order, slot 1 of word 8, so byte 32, high nibble."""
    packed = torch.zeros(1, 64, 32, dtype=torch.uint8)
    packed[0, 8, 0] = 0x50
    flat = bs.int4.preprocess_weights(packed).view(-1)
    assert flat[32] == 0xD8
    flat[32] = 0x88
    assert (flat == 0x88).all()


def test_unaligned_weight():
    """Bytes that begin at an odd address, as tensors of a file may."""
    packed = weight(2, 64, 32)
    buffer = torch.zeros(packed.size + 1, dtype=torch.uint8)
    view = buffer[1:].view(packed.shape)
    view.copy_(torch.from_numpy(packed))
    made = bs.int4.preprocess_weights(view)
    same_bytes(made.numpy(), ref.preprocess(packed, "a16", 4, "full"))
    same_bytes(view.numpy(), packed)


@pytest.mark.parametrize(
    ("k", "n", "options", "words"),
    [
        (96, 64, {}, ("K=96", "multiple of 64", "K=128")),
        (32, 64, {}, ("K=32", "64")),
        (64, 64, {"sm": 89, "activation": "a8"}, ("K=64", "128")),
        (192, 64, {"sm": 89, "activation": "a8"}, ("K=192", "128", "K=256")),
        (48, 64, {"sm": 90, "moe": False}, ("K=48", "32", "K=64")),
        (48, 64, {"sm": 90, "activation": "a8"}, ("K=48", "32", "K=64")),
        (64, 24, {}, ("N=24", "16", "N=32")),
        (96, 64, {"bits": 8}, ("K=96", "64")),
        (40, 64, {"sm": 90, "moe": False, "bits": 8}, ("K=40", "16")),
        (64, 12, {"bits": 8}, ("N=12", "8", "N=16")),
        (0, 64, {}, ("empty",)),
        (64, 64, {"sm": 70}, ("sm=70", "75")),
        (64, 64, {"sm": 110, "moe": False}, ("sm=110",)),
        (64, 64, {"activation": "fp8"}, ("activation='fp8'", "'a8'")),
        (64, 64, {"bits": 2}, ("bits=2",)),
        (128, 64, {"sm": 80, "activation": "a8"}, ("sm=80", "89")),
        (128, 64, {"sm": 100, "activation": "a8"}, ("sm=100", "no kernel")),
        (128, 64, {"sm": 89, "activation": "a8", "bits": 8}, ("bits=8", "a8")),
    ],
)
def test_bad_weight(k, n, options, words):
    """What the original refuses, and what it would convert to bytes that no kernel reads."""
    packed = torch.zeros(1, k, n * options.get("bits", 4) // 8, dtype=torch.uint8)
    for function in (bs.int4.preprocess_weights, bs.int4.unprocess_weights):
        with rejects(f"int4.{function.__name__}", *words):
            function(packed, **options)


def test_bad_tensor():
    packed = torch.zeros(1, 64, 32, dtype=torch.uint8)
    with rejects("packed", "int32", "uint8"):
        bs.int4.preprocess_weights(packed.int())
    with rejects("contiguous"):
        bs.int4.preprocess_weights(packed.transpose(1, 2))
    with rejects(r"\[64, 32\]", "moe=False"):
        bs.int4.preprocess_weights(packed[0])
    with rejects(r"\[E, K, N/2\]"):
        bs.int4.preprocess_weights(packed[None])
    with rejects("ndarray", "torch tensor"):
        bs.int4.preprocess_weights(packed.numpy())


# ---- Scales -------------------------------------------------------------------------------------


@each(
    step=[(8, 4), (4, 4), (6, 2), (2, 2), (5, 1), (1, 1)], dtype=["float16", "bfloat16", "float32"]
)
def test_interleave_scales(step, dtype):
    """out[e, g // I, n * I + g % I] = in[e, g, n], in bfloat16, and back."""
    groups, factor = step
    scales = torch.rand(2, groups, 24, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    made = bs.int4.interleave_scales(scales, 128)
    assert made.dtype == torch.bfloat16
    assert made.shape == (2, groups // factor, 24 * factor)
    assert made.is_contiguous()
    for e, g, n in itertools.product(range(2), range(groups), range(24)):
        assert made[e, g // factor, n * factor + g % factor] == scales[e, g, n].bfloat16()
    assert torch.equal(bs.int4.uninterleave_scales(made, 24, 128), scales.bfloat16())


def test_scales_of_other_architectures():
    """Only sm 90 interleaves; elsewhere scales come back as they are."""
    scales = torch.rand(2, 8, 24).half()
    for sm in (80, 89, 100, 120):
        made = bs.int4.interleave_scales(scales, 128, sm=sm)
        assert made.dtype == scales.dtype
        assert torch.equal(made, scales)
        assert torch.equal(bs.int4.uninterleave_scales(scales, 24, 128, sm=sm), scales)


def test_bad_scales():
    scales = torch.rand(2, 8, 24)
    with rejects("interleave_scales", r"\[8, 24\]", r"\[E, G, N\]"):
        bs.int4.interleave_scales(scales[0], 128)
    with rejects("group_size=0", "positive"):
        bs.int4.interleave_scales(scales, 0)
    with rejects("sm=91"):
        bs.int4.interleave_scales(scales, 128, sm=91)
    with rejects("dtype", "uint8"):
        bs.int4.interleave_scales(scales.to(torch.uint8), 128)
    for n in (0, 7, 12, 24, 48):  # what 8 groups of 24 columns gives has 2 rows of 96
        made = bs.int4.interleave_scales(scales, 128)
        with rejects(f"n={n}", "N of the weight") if n != 24 else torch.no_grad():
            bs.int4.uninterleave_scales(made, n, 128)


# ---- Numbers ------------------------------------------------------------------------------------


def close(got, want):
    """Check for one rounding to the dtype of ``got``, after two of float32 numbers below 32."""
    unit = torch.finfo(got.dtype).eps / 2 + 2**-23
    got = got.double().numpy()
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= unit * np.abs(want) + 2**-23 * 32 + 2**-25).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dequantize_symmetric(bits, dtype):
    """Every code times its group's scale: one rounding of the true product."""
    packed, rng = weight(2, 128, 48, bits), np.random.default_rng(0)
    scale = rng.uniform(0.001, 2, (2, 4, 48)).astype(np.float16)
    got = bs.int4.dequantize(
        torch.from_numpy(packed), torch.from_numpy(scale), None, 32, DTYPES[dtype], bits=bits
    )
    want = torch.from_numpy(ref.dequantize(packed, scale, None, 32, bits))
    assert got.shape == (2, 128, 48)
    assert torch.equal(got, want.to(DTYPES[dtype]))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_taken_apart_by_torch(bits):
    """As on a GPU."""
    packed, rng = weight(1, 128, 48, bits), np.random.default_rng(2)
    scale, out = rng.uniform(0.001, 2, (1, 4, 48)).astype(np.float16), torch.empty(128, 48)
    layout._dequantize(torch.from_numpy(packed[0]), torch.from_numpy(scale[0]), None, 32, bits, out)
    assert torch.equal(out, torch.from_numpy(ref.dequantize(packed, scale, None, 32, bits)[0]))


def test_every_code_is_exact():
    """All 256 bytes with scale 1: 16 signed codes in both nibbles, low nibble first."""
    packed = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    got = bs.int4.dequantize(packed, torch.ones(1, 1, 512), None, 1, torch.float32).view(256, 2)
    codes = [*range(8), *range(-8, 0)]
    assert got[:, 0].tolist() == codes * 16
    assert got[:, 1].tolist() == [code for code in codes for _ in range(16)]


def test_dequantize_zeros():
    """Float zeros are added; integers are zero points, as AWQ and GPTQ store them."""
    packed, rng = weight(2, 256, 32), np.random.default_rng(1)
    scale = rng.uniform(0.01, 1, (2, 2, 32)).astype(np.float32)
    points = rng.integers(0, 16, (2, 2, 32))
    true = ref.dequantize(packed, scale, (8 - points) * scale.astype(np.float64), 128)
    p, s, z = map(torch.from_numpy, (packed, scale, points))
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        close(bs.int4.dequantize(p, s, z.to(dtype), dtype=torch.float32), true)
    added = bs.int4.zeros_of_points(z, s)
    assert added.dtype == s.dtype
    close(bs.int4.dequantize(p, s, added), true)
    assert torch.equal(bs.int4.zeros_of_points(z - 1, s, stored="gptq"), added)
    assert torch.equal(bs.int4.zeros_of_points(z + 120, s, bits=8), added)


@pytest.mark.parametrize(("sm", "activation", "moe", "steps", "bits"), few(CASES, every=3))
def test_dequantize_preprocessed(sm, activation, moe, steps, bits):
    """The layout of the kernels gives the numbers of the plain weight, bit for bit."""
    options = {"sm": sm, "activation": activation, "moe": moe, "bits": bits}
    packed = torch.from_numpy(weight(2, 256, 32, bits))
    scale = torch.rand(2, 2, 32).half()
    made = bs.int4.preprocess_weights(packed, **options)
    got = bs.int4.dequantize(made, scale, layout="preprocessed", **options)
    assert torch.equal(got, bs.int4.dequantize(packed, scale, bits=bits))


def test_dense_and_one_group():
    """[K, N] weights, a shorter last group, scales per column."""
    packed = weight(1, 80, 16)
    scale = np.random.default_rng(2).uniform(0.5, 1, (1, 3, 16)).astype(np.float32)
    got = bs.int4.dequantize(torch.from_numpy(packed[0]), torch.from_numpy(scale[0]), group_size=32)
    assert torch.equal(got, torch.from_numpy(ref.dequantize(packed, scale, None, 32)[0]).half())
    one = torch.from_numpy(scale[:, 0])
    got = bs.int4.dequantize(torch.from_numpy(packed), one, group_size=80)
    assert torch.equal(got, torch.from_numpy(ref.dequantize(packed, scale[:, :1], None, 80)).half())


def test_slabs_of_numbers(monkeypatch):
    packed, scale = torch.from_numpy(weight(2, 96, 32)), torch.rand(2, 3, 32)
    zero = torch.rand(2, 3, 32)
    whole = bs.int4.dequantize(packed, scale, zero, 32)
    monkeypatch.setattr("blockscale.ops.int4.layout.SLAB_VALUES", 5 * 32)
    assert torch.equal(bs.int4.dequantize(packed, scale, zero, 32), whole)


def test_bad_numbers():
    packed, scale = torch.zeros(2, 256, 16, dtype=torch.uint8), torch.ones(2, 2, 32)
    with rejects("dequantize", "scale", r"\[2, 2, 31\]", r"\[2, 2, 32\]"):
        bs.int4.dequantize(packed, scale[..., 1:].contiguous())
    with rejects("zero", r"\[2, 1, 32\]"):
        bs.int4.dequantize(packed, scale, scale[:, :1].contiguous())
    with rejects("group_size=100", "K=256"):
        bs.int4.dequantize(packed, scale, group_size=100)
    with rejects("group_size=-1", "positive"):
        bs.int4.dequantize(packed, scale, group_size=-1)
    with rejects("dtype", "float64"):
        bs.int4.dequantize(packed, scale, dtype=torch.float64)
    with rejects("layout='tiles'", "preprocessed"):
        bs.int4.dequantize(packed, scale, layout="tiles")
    with rejects("scale", "float64"):
        bs.int4.dequantize(packed, scale.double())
    with rejects("points", "float32"):
        bs.int4.zeros_of_points(scale, scale)
    with rejects("points", "unpacked"):
        bs.int4.zeros_of_points(torch.zeros(2, 2, 4, dtype=torch.int32), scale)
    with rejects("stored='autogptq'", "'gptq'"):
        bs.int4.zeros_of_points(torch.zeros(2, 2, 32, dtype=torch.int32), scale, stored="autogptq")
