"""blockscale.quantize, bit for bit."""

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.helpers import (
    DTYPES,
    as_bytes,
    fill_freed_memory,
    golden,
    neighbours,
    one,
    random_matrix,
    rejects,
    same,
    same_bytes,
    tensor,
    widen,
)
from tests.reference import core as ref

MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def check(x, fmt, g=None, amax=None, layout="linear", rounding="ceil"):
    """Quantise x, compare every byte with the reference, and see that x is unchanged."""
    before = x.clone()
    packed, scale = bs.quantize(
        x,
        fmt=fmt,
        global_scale=one(g),
        scale_layout=layout,
        block_amax=None if amax is None else torch.from_numpy(amax),
        scale_rounding=rounding,
    )
    assert packed.dtype == torch.uint8
    assert scale.dtype == (torch.float8_e4m3fn if fmt == "nvfp4" else torch.uint8)
    codes, byte = ref.quantize(widen(x), fmt, 1.0 if g is None else g, amax, rounding)
    if layout == "128x4":
        byte = ref.swizzle(byte.reshape(-1, byte.shape[-1]))
    same_bytes(as_bytes(scale), byte)
    same_bytes(as_bytes(packed), ref.pack(codes))
    same(widen(x), widen(before))


def ties(scales, fmt, dtype):
    """Return [scales, K]: per row every tie of E2M1 and its two neighbours, both signs, at a scale.

    The largest magnitude, 6 scales, makes the block scale; K = 48 (NVFP4) or 96 (MXFP4).
    """
    tie = torch.tensor(scales, dtype=torch.float64)[:, None] * MIDPOINTS
    tie = tie.to(DTYPES[dtype])
    top = (torch.tensor(scales, dtype=torch.float64)[:, None] * 6).to(DTYPES[dtype])
    blocks = []
    for x in (tie, neighbours(tie, 1), neighbours(tie, -1)):
        block = torch.cat([top, x, -x, -top], dim=1)
        blocks += [block, torch.zeros(len(scales), ref.BLOCK[fmt] - 16, dtype=DTYPES[dtype])]
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_ties_at_every_scale(dtype):
    """126 scales x 7 ties x {below, on, above} x {+, -}; the products are exact in all dtypes."""
    check(ties(ref.e4m3_decode(np.arange(1, 0x7F)), "nvfp4", dtype), "nvfp4")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_ties_at_every_scale(dtype):
    """As above for each power of two that the dtype can hold six of, denormals included."""
    low, high = (-20, 14) if dtype == "float16" else (-127, 126)
    check(ties(2.0 ** np.arange(low, high), "mxfp4", dtype), "mxfp4")


def test_mxfp4_ties_with_floor():
    """The OCP rule: amax 6 s gives the scale 2^(floor(log2(6 s)) - 2) = s."""
    check(ties(2.0 ** np.arange(-127, 126), "mxfp4", "float32"), "mxfp4", rounding="floor")


def special_rows(fmt):
    """Return float32 [n, 3 blocks]: each row has one peculiar block between two ordinary ones."""
    block, rows = ref.BLOCK[fmt], []
    tiny, huge = np.float32(1e-45), np.float32(3.4028235e38)
    for values in (
        [0.0],
        [-0.0],
        [0.0, -0.0],
        [np.nan, 1.0, -2.0],
        [-np.nan, 0.0, -0.0, np.inf],
        [np.inf, 1.0, -1.0, 0.0, -0.0],
        [-np.inf, huge, -huge],
        [np.inf, -np.inf],
        [huge, -huge, 1.0],
        [tiny, -tiny, 0.0],  # denormal: the NVFP4 scale is 0, and the codes are signed zeros
        [1e-40, -1e-40, 3e-40, -tiny],
        [1.1754944e-38, -2e-38],
        [6 * 2.0**-10, -(2.0**-10)],  # the scale is the tie between 0 and the smallest E4M3: 0
        [np.nextafter(np.float32(6 * 2.0**-10), np.float32(1)), -1e-3],
        [6 * 448.0, -1.0],
        [6 * 465.0, -5000.0, 600.0],
        [1e20, -3e18, 1e3],
    ):
        row = np.tile(np.array([1.5, -0.3], np.float32), 3 * block // 2)
        row[block : 2 * block] = np.resize(np.array(values, np.float32), block)
        rows.append(row)
    return np.stack(rows)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(fmt, dtype):
    """+-0, +-NaN, +-inf, denormals, saturation; a bad block leaves its neighbours alone."""
    check(tensor(special_rows(fmt), dtype), fmt)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_special_values_mean_what_is_said(fmt):
    """The same facts written out by hand, without the reference."""
    nan, inf = float("nan"), float("inf")
    rows = torch.ones(4, ref.BLOCK[fmt])
    rows[0] = torch.tensor([0.0, -0.0] * (ref.BLOCK[fmt] // 2))
    rows[1, 3] = nan
    rows[2, :3] = torch.tensor([inf, -inf, -0.0])
    packed, scale = bs.quantize(rows, fmt=fmt)
    codes, scale = ref.unpack(as_bytes(packed)), as_bytes(scale)[:, 0].tolist()
    assert codes[0].tolist() == [0, 8] * (ref.BLOCK[fmt] // 2)
    assert (codes[1] == 7).all()
    assert codes[2, :4].tolist() == [7, 15, 8, 0]
    # 1 / 6 is nearest to the E4M3 byte 0x23 (0.171875), and at most the power of two 2^-2 (125).
    assert scale == ([0, 0x7F, 0x7E, 0x23] if fmt == "nvfp4" else [0, 255, 254, 125])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_shapes(fmt, layout, rows):
    """Ragged rows and columns; the 128x4 padding is zero although the memory was dirty."""
    for seed, blocks in enumerate([1, 3, 5, 11, 25]):  # NVFP4: 16, 48, 80, 176 and 400 columns
        shape = (rows, blocks * ref.BLOCK[fmt])
        fill_freed_memory(ref.ceil_to(rows, 128) * ref.ceil_to(blocks, 4), rows * shape[1] // 2)
        check(tensor(random_matrix(shape, fmt, seed)), fmt, g=0.37, layout=layout)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("lead", [(3, 5), (), (0,), (2, 0, 3)])
def test_leading_dimensions(fmt, layout, lead):
    """x [..., K] gives packed [..., K/2]; 128x4 counts the flattened rows, even none."""
    check(tensor(random_matrix((*lead, 96), fmt, 0)), fmt, layout=layout)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_inputs(fmt, dtype):
    """Random values with a small and a large global scale."""
    x = tensor(random_matrix((37, 160), fmt, 3, spread=3), dtype)
    check(x, fmt, g=1 / 2688)
    check(x, fmt, g=3.0)


def test_sixteen_bit_swizzled():
    check(tensor(random_matrix((130, 400), "nvfp4", 4), "bfloat16"), "nvfp4", layout="128x4")


@pytest.mark.parametrize("g", [1e-6, 0.013764881, 1.0, 77.0, 3e8])
@pytest.mark.parametrize(
    ("fmt", "rounding"), [("nvfp4", "ceil"), ("mxfp4", "ceil"), ("mxfp4", "floor")]
)
def test_global_scale(fmt, rounding, g):
    """Divides; large and small ones drive E4M3 into saturation and to zero."""
    check(tensor(random_matrix((9, 160), fmt, 5)), fmt, g=g, rounding=rounding)


def test_global_scale_without_dimensions():
    """A scalar tensor [] is one element, as well as [1]."""
    x = tensor(random_matrix((3, 48), "nvfp4", 6))
    packed, scale = bs.quantize(x, global_scale=torch.tensor(0.37))
    codes, byte = ref.quantize(widen(x), "nvfp4", 0.37)
    same_bytes(as_bytes(packed), ref.pack(codes))
    same_bytes(as_bytes(scale), byte)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_block_amax_replaces_the_maximum(fmt):
    """Smaller than the data saturates; 0, inf and NaN are taken as they come; x may hold a NaN."""
    x = random_matrix((7, 5 * ref.BLOCK[fmt]), fmt, 7)
    x[2, 3] = np.nan
    amax = np.nan_to_num(ref.block_amax(x, fmt).reshape(-1), nan=1.0)
    amax = amax * np.random.default_rng(0).uniform(0.3, 1.7, amax.shape).astype(np.float32)
    amax[[4, 9, 30]] = 0.0, np.inf, np.nan
    check(tensor(x), fmt, amax=amax)
    check(tensor(x), fmt, g=0.05, amax=amax)


def test_block_amax_of_a_sweep_against_modelopt():
    """bf16 weights, swept maxima and global scale of a real export give its scales and codes."""
    data = golden("modelopt_nvfp4_static_bf16")
    x = tensor(data["w_f32"] + 0.0, "bfloat16")  # + 0.0: ModelOpt has code 0 for -0.0
    packed, scale = bs.quantize(
        x,
        global_scale=one(data["weight_scale_2"]),
        block_amax=torch.from_numpy(data["sweep_best_amax"]),
    )
    same_bytes(as_bytes(scale), data["sweep_weight_scale_e4m3"])
    same_bytes(as_bytes(packed), data["sweep_packed"])


@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxes"])
def test_mxfp4_against_flashinfer(kind):
    data = golden("flashinfer_mxfp4_swizzle")
    for shape in ("m1_k64", "m3_k128"):
        case = f"q_{shape}_bf16_{kind}"
        x = torch.from_numpy(data[f"{case}/x_u16"].view(np.int16)).view(torch.bfloat16)
        packed, scale = bs.quantize(x, fmt="mxfp4")
        same_bytes(as_bytes(scale), data[f"{case}/mx_sf_linear"])
        same_bytes(as_bytes(packed), data[f"{case}/mx_fp4"])


def test_gradients_are_not_in_the_way():
    """A parameter is quantised under no_grad."""
    x = tensor(random_matrix((3, 48), "nvfp4", 8)).requires_grad_()
    with torch.no_grad():
        packed, _ = bs.quantize(x)
    same_bytes(as_bytes(packed), ref.pack(ref.quantize(widen(x), "nvfp4")[0]))


X = torch.ones(4, 96)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bs.quantize(X.double()), [r"\bx\b", "float64", "float32"]),
        (lambda: bs.quantize(X.to(torch.int32)), [r"\bx\b", "int32", "float32"]),
        (lambda: bs.quantize(X.tolist()), [r"\bx\b", "list", "tensor"]),
        (lambda: bs.quantize(torch.tensor(1.0)), [r"\bx\b", "dimension"]),
        (lambda: bs.quantize(X[:, :40].contiguous()), [r"\bx\b", "40", "multiple of 16"]),
        (lambda: bs.quantize(X[:, :48].contiguous(), fmt="mxfp4"), ["48", "multiple of 32"]),
        (lambda: bs.quantize(X.to("meta")), [r"\bx\b", "meta", "cpu"]),
        (lambda: bs.quantize(X[:, ::2]), [r"\bx\b", r"contiguous\(\)"]),
        (lambda: bs.quantize(X.reshape(96, 4).t()), [r"\bx\b", r"contiguous\(\)"]),
        (lambda: bs.quantize(X, fmt="fp5"), ["fmt", "fp5", "nvfp4", "mxfp4"]),
        (lambda: bs.quantize(X, scale_layout="8x4"), ["scale_layout", "8x4", "linear", "128x4"]),
        (
            lambda: bs.quantize(X, fmt="mxfp4", scale_rounding="up"),
            ["rounding", "up", "ceil", "floor"],
        ),
        (lambda: bs.quantize(X, scale_rounding="floor"), ["rounding", "floor", "nvfp4"]),
        (lambda: bs.quantize(X, global_scale=torch.ones(2)), ["global_scale", "one element"]),
        (
            lambda: bs.quantize(X, global_scale=torch.ones(1, dtype=torch.float64)),
            ["global_scale", "float64", "float32"],
        ),
        (lambda: bs.quantize(X, block_amax=torch.ones(23)), ["block_amax", "23", "24"]),
        (
            lambda: bs.quantize(X, block_amax=torch.ones(24).half()),
            ["block_amax", "float16", "float32"],
        ),
        (lambda: bs.quantize(X, block_amax=torch.ones(48)[::2]), ["block_amax", "contiguous"]),
    ],
)
def test_bad_input(call, words):
    """One sentence: the argument, its value, the rule and the remedy."""
    with rejects("quantize", *words):
        call()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("scale", [1e-6, 1e-7, 1e-8, 1e-30, 0.0])
def test_zero_blocks_with_a_tiny_global_scale(fmt, scale):
    """Where s * g underflows to 0, zeros stay zeros, with their sign; amax / 2688 of zeros is 0."""
    x = np.zeros((4, 64), np.float32)
    x[1, ::3] = -0.0
    x[2, :32] = 1.0
    check(tensor(x), fmt, scale)
    packed, _ = bs.quantize(tensor(x[:2]), fmt=fmt, global_scale=one(scale))
    assert not (packed.numpy() & 0x77).any()


def test_another_default_device():
    """Results are on the CPU, where x is, whatever device torch makes new tensors on."""
    x = torch.randn(2, 32, device="cpu")
    with torch.device("meta"):
        packed, scale = bs.quantize(x)
        assert bs.dequantize(packed, scale).device.type == "cpu"
        assert bs.fp8_scale_candidates().device.type == "cpu"
        assert bs.nvfp4_fp8_scale_sweep(x, x.abs().max()).device.type == "cpu"
        assert bs.unswizzle_scales(bs.swizzle_scales(scale), 2, 2).device.type == "cpu"
    assert packed.device.type == "cpu"
