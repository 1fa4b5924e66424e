"""blockscale.linear against float64 on the dequantised weights, judged row by row.

Tolerances of |y - truth| / |truth| over a row: float32 1e-5 (adding up to 1536 products one after
the other in float32 gives at most 8e-7 for our data); bfloat16 4e-3 and float16 2e-3.  Rounding the
result once costs up to 2^-8 = 3.9e-3 and 2^-11 = 4.9e-4: bfloat16 leaves no room for another loss.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.helpers import (
    DTYPES,
    fill_freed_memory,
    one,
    packed_tensor,
    random_weight,
    rejects,
    same,
    scale_tensor,
    tensor,
    widen,
)
from tests.kit.pairwise import each, few
from tests.reference import core as ref

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 2e-3}
ROWS = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 33, 130)
# (fmt, N, K, dtype): smallest, ragged in N and in K, and the three shapes of MiniLM.
CASES = [
    ("nvfp4", 7, 80, "float32"),
    ("nvfp4", 7, 80, "bfloat16"),
    ("nvfp4", 7, 80, "float16"),
    ("nvfp4", 33, 400, "float32"),
    ("nvfp4", 33, 400, "bfloat16"),
    ("mxfp4", 33, 416, "float32"),
    ("mxfp4", 33, 416, "bfloat16"),
    ("nvfp4", 384, 384, "float32"),
    ("nvfp4", 384, 384, "bfloat16"),
    ("nvfp4", 1536, 384, "float32"),
    ("nvfp4", 384, 1536, "float32"),
    ("nvfp4", 384, 1536, "bfloat16"),
    # K = 64 * odd: half vectors of words
    ("nvfp4", 48, 320, "float32"),
    ("nvfp4", 48, 320, "bfloat16"),
    ("mxfp4", 32, 192, "float32"),
]


def activations(rows, k, dtype, seed=0):
    """Return normal values [rows, k] whose rows differ in size by up to 2^10."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-5, 6, (rows, 1)))
    return tensor(rng.standard_normal((rows, k)) * size, dtype)


def run(x, codes, byte, fmt, **options):
    """Run the kernel on packed weights, its output memory being NaN before."""
    fill_freed_memory(x.numel() // max(x.shape[-1], 1) * len(codes) * x.element_size())
    y = bs.linear(x, packed_tensor(codes), scale_tensor(byte, fmt), fmt=fmt, **options)
    assert y.dtype == x.dtype
    assert y.shape == (*x.shape[:-1], len(codes))
    return y


@pytest.mark.parametrize(("fmt", "n", "k", "dtype"), few(CASES, every=3))
def test_rows(fmt, n, k, dtype):
    """Any number of rows, with bias and global scale and without either."""
    codes, byte = random_weight(n, k, fmt, seed=n + k)
    x = activations(130, k, dtype)
    bias = tensor(np.random.default_rng(1).standard_normal(n))
    plain = ref.linear(widen(x), ref.weight(codes, byte, fmt))
    full = ref.linear(widen(x), ref.weight(codes, byte, fmt, 0.37), bias.numpy())
    for rows in ROWS:
        y = run(x[:rows], codes, byte, fmt)
        assert ref.row_error(widen(y), plain[:rows]).max(initial=0) < TOLERANCE[dtype]
        y = run(x[:rows], codes, byte, fmt, global_scale=one(0.37), bias=bias)
        assert ref.row_error(widen(y), full[:rows]).max(initial=0) < TOLERANCE[dtype]


@pytest.mark.parametrize("option", ["bias", "global_scale"])
def test_one_option(option):
    """Bias alone and global scale alone; the scale is small, the bias is not scaled."""
    codes, byte = random_weight(33, 400, "nvfp4", 2)
    x, bias = activations(3, 400, "float32"), tensor(np.linspace(-50, 50, 33))
    g = 0.001 if option == "global_scale" else 1.0
    truth = ref.linear(widen(x), ref.weight(codes, byte, "nvfp4", g))
    if option == "bias":
        y = run(x, codes, byte, "nvfp4", bias=bias)
        truth = truth + bias.numpy()
    else:
        y = run(x, codes, byte, "nvfp4", global_scale=torch.tensor(g))
    assert ref.row_error(widen(y), truth).max() < TOLERANCE["float32"]


def test_many_rows():
    """More rows than the largest tile: row 299 is computed, and by its own activations."""
    codes, byte = random_weight(33, 400, "nvfp4", 3)
    x = activations(300, 400, "float32")
    y = run(x, codes, byte, "nvfp4")
    truth = ref.linear(widen(x), ref.weight(codes, byte, "nvfp4"))
    assert ref.row_error(widen(y), truth).max() < TOLERANCE["float32"]


def test_single_output():
    """N = 1; values are positive: a single number that cancels has no useful relative error."""
    codes, byte = random_weight(1, 48, "nvfp4", 4)
    x = activations(17, 48, "float32").abs()
    y = run(x, codes & 7, byte, "nvfp4")
    truth = ref.linear(widen(x), ref.weight(codes & 7, byte, "nvfp4"))
    assert ref.row_error(widen(y), truth).max() < TOLERANCE["float32"]


@each(dtype=list(DTYPES), fmt=["nvfp4", "mxfp4"])
def test_every_code_and_scale_is_exact(fmt, dtype):
    """One-hot rows read each weight back: all codes in both nibbles, each block's own scale.

    NVFP4 has all 254 scales that are not NaN; MXFP4 has 2^-125..2^123, whose products are normal
    finite float32 numbers.  The global scale is a power of two, and the weights of one row have
    the scales of three different blocks.
    """
    k = 3 * ref.BLOCK[fmt]
    row, column = np.arange(256)[:, None], np.arange(k // ref.BLOCK[fmt])
    codes = ((np.arange(k) + row) % 16).astype(np.uint8)
    byte = (row + 85 * column) % 256
    byte = np.where(byte & 0x7F == 0x7F, 0x70, byte) if fmt == "nvfp4" else np.clip(byte, 2, 250)
    byte = byte.astype(np.uint8)
    x = tensor(np.eye(k), dtype)
    for g in (None, 0.25 if fmt == "nvfp4" else 1.0):
        y = run(x, codes, byte, fmt, global_scale=one(g))
        w = ref.round_to(ref.weight(codes, byte, fmt, 1.0 if g is None else g), dtype)
        assert (widen(y) == w.T).all()  # a sum of products is +0 where the weight is -0


@pytest.mark.parametrize("lead", [(3, 5), (), (0,), (2, 0, 3)])
def test_leading_dimensions(lead):
    """x [..., K] gives [..., N]."""
    codes, byte = random_weight(7, 80, "nvfp4", 5)
    x = tensor(np.random.default_rng(5).standard_normal((*lead, 80)))
    y = run(x, codes, byte, "nvfp4")
    truth = ref.linear(widen(x), ref.weight(codes, byte, "nvfp4"))
    assert np.max(ref.row_error(widen(y), truth), initial=0) < TOLERANCE["float32"]


def test_nan_stays_where_it_belongs():
    """A NaN activation spoils its row, a NaN scale its output column, and nothing else."""
    codes, byte = random_weight(33, 400, "nvfp4", 6)
    x = activations(17, 400, "float32")
    clean = run(x, codes, byte, "nvfp4")
    x[5, 399] = np.nan
    byte[20, 24] = 0x7F
    y = run(x, codes, byte, "nvfp4")
    spoilt = torch.zeros(17, 33, dtype=torch.bool)
    spoilt[5], spoilt[:, 20] = True, True
    assert torch.equal(y.isnan(), spoilt)
    same(y[~spoilt].numpy(), clean[~spoilt].numpy())


def test_zero_rows_are_zero():
    """Zero activations give zeros, or the bias itself."""
    codes, byte = random_weight(7, 80, "nvfp4", 7)
    x, bias = torch.zeros(3, 80), tensor(np.arange(7))
    assert (run(x, codes, byte, "nvfp4") == 0).all()
    assert (run(x, codes, byte, "nvfp4", bias=bias) == bias).all()


def test_torch_float_types_and_gradients():
    """Packed as float4_e2m1fn_x2, scales as float8_e8m0fnu; x with a gradient under no_grad."""
    if not (hasattr(torch, "float4_e2m1fn_x2") and hasattr(torch, "float8_e8m0fnu")):
        pytest.skip(f"torch {torch.__version__} has no float4_e2m1fn_x2 or no float8_e8m0fnu")
    codes, byte = random_weight(33, 416, "mxfp4", 8)
    x = activations(3, 416, "float32").requires_grad_()
    packed = packed_tensor(codes).view(torch.float4_e2m1fn_x2)
    scale = scale_tensor(byte, "mxfp4").view(torch.float8_e8m0fnu)
    with torch.no_grad():
        y = bs.linear(x, packed, scale, fmt="mxfp4")
    truth = ref.linear(widen(x), ref.weight(codes, byte, "mxfp4"))
    assert ref.row_error(widen(y), truth).max() < TOLERANCE["float32"]


X = torch.ones(3, 80)
PACKED = torch.zeros(7, 40, dtype=torch.uint8)
SCALE = torch.zeros(7, 5, dtype=torch.uint8).view(torch.float8_e4m3fn)
SWIZZLED = torch.zeros(128, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bs.linear(X.double(), PACKED, SCALE), [r"\bx\b", "float64", "float32"]),
        (lambda: bs.linear(X.tolist(), PACKED, SCALE), [r"\bx\b", "list", "tensor"]),
        (lambda: bs.linear(torch.tensor(1.0), PACKED, SCALE), [r"\bx\b", "dimension"]),
        (lambda: bs.linear(X[:, :64].contiguous(), PACKED, SCALE), [r"\bx\b", "64", "80"]),
        (
            lambda: bs.linear(torch.ones(3, 160)[:, ::2], PACKED, SCALE),
            [r"\bx\b", r"contiguous\(\)"],
        ),
        (lambda: bs.linear(X.to("meta"), PACKED, SCALE), [r"\bx\b", "meta", "cpu"]),
        (lambda: bs.linear(X, PACKED.to("meta"), SCALE), ["packed", "meta", "cpu"]),
        (lambda: bs.linear(X, PACKED.float(), SCALE), ["packed", "float32", "uint8"]),
        (lambda: bs.linear(X, PACKED[0], SCALE), ["packed", "dimension"]),
        (
            lambda: bs.linear(X, torch.zeros(7, 80, dtype=torch.uint8)[:, ::2], SCALE),
            ["packed", r"contiguous\(\)"],
        ),
        (
            lambda: bs.linear(torch.ones(3, 72), PACKED[:, :36].contiguous(), SCALE),
            ["72", "multiple of 16"],
        ),
        (
            lambda: bs.linear(X, PACKED, SCALE.view(torch.uint8), fmt="mxfp4"),
            ["80", "multiple of 32"],
        ),
        (lambda: bs.linear(X, PACKED, SCALE.float()), ["block_scale", "float32", "float8_e4m3fn"]),
        (lambda: bs.linear(X, PACKED, SCALE[:6]), ["block_scale", r"6, 5\b", r"7, 5\b"]),
        (
            lambda: bs.linear(X, PACKED, SWIZZLED),
            ["block_scale", r"128, 8\b", r"7, 5\b", "unswizzle_scales"],
        ),
        (lambda: bs.linear(X, PACKED, SCALE, fmt="fp4"), ["fmt", "fp4", "nvfp4"]),
        (lambda: bs.linear(X, PACKED, SCALE, fmt="int4"), ["block_scale", "e4m3", "float32"]),
        (
            lambda: bs.linear(X, PACKED, SCALE, global_scale=torch.ones(6)),
            ["global_scale", "one of the whole weight"],
        ),
        (lambda: bs.linear(X, PACKED, SCALE, bias=torch.ones(8)), ["bias", r"\b8\b", r"\b7\b"]),
        (
            lambda: bs.linear(X, PACKED, SCALE, bias=torch.ones(7, dtype=torch.int64)),
            ["bias", "int64", "float32"],
        ),
        (lambda: bs.linear(X, PACKED, SCALE, bias=torch.ones(14)[::2]), ["bias", "contiguous"]),
    ],
)
def test_bad_input(call, words):
    """One sentence: the argument, its value, the rule and the remedy."""
    with rejects("linear", *words):
        call()
