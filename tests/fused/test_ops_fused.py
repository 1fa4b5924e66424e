"""The torch functions that end in FP4: every option, what they allocate, and what they refuse."""

from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.ops import call, checks
from blockscale.runtime import jit
from blockscale.specs import ActQuantize, NormQuantize
from tests.kit.helpers import DTYPES, as_bytes, fill_freed_memory, one, same, same_bytes, widen
from tests.kit.pairwise import each
from tests.reference import core as ref
from tests.reference import fused as fused

FP4 = checks.FP4
FORMATS = [(16, "e4m3"), (32, "ue8m0"), (32, "e4m3")]
GATED = {
    "silu": bs.silu_and_mul_fp4quant,
    "gelu_tanh": bs.gelu_tanh_and_mul_fp4quant,
    "swiglu": bs.swiglu_fp4quant,
}


def normal(*shape, dtype="bfloat16", seed=0):
    """Return normal values."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(DTYPES[dtype])


def norm_inputs(*lead, hidden=256, dtype="bfloat16"):
    """Return input, residual and weight."""
    x, r = normal(*lead, hidden, dtype=dtype), normal(*lead, hidden, dtype=dtype, seed=1)
    return x, r, normal(hidden, dtype=dtype, seed=2)


def expected_norm(x, residual, weight, block, scale_format, g=1.0, eps=1e-6):
    """Return packed codes, linear scales, rounded residual and y of flattened rows."""
    rows = [None if t is None else widen(t).reshape(-1, t.shape[-1]) for t in (x, residual)]
    dtype = str(x.dtype).removeprefix("torch.")
    y, h = fused.norm(*rows, widen(weight), eps, dtype)
    codes, byte = fused.encode(y, block, scale_format, np.float32(1) / np.float32(g))
    return ref.pack(codes), byte, h, ref.round_to(y, dtype)


def rows_of(tensor):
    """Return the bytes of a tensor as rows."""
    return as_bytes(tensor).reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
@pytest.mark.parametrize("lead", [(7,), (2, 65)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_add_rmsnorm(block, scale_format, lead, dtype):
    """Allocated outputs: bytes, shapes, dtypes, the residual; the second call is the short one."""
    x, residual, weight = norm_inputs(*lead, dtype=dtype)
    packed, byte, h, _ = expected_norm(x, residual, weight, block, scale_format, 0.37, 1e-5)
    for _ in range(2):
        r = residual.clone()
        fill_freed_memory(packed.size, byte.size)
        y_fp4, scale = bs.add_rmsnorm_fp4quant(
            x, r, weight, None, None, one(0.37), 1e-5, block, scale_format
        )
        assert y_fp4.dtype == FP4
        assert y_fp4.shape == (*lead, 128)
        assert scale.dtype == (torch.float8_e4m3fn if scale_format == "e4m3" else torch.uint8)
        assert scale.shape == (*lead, 256 // block)
        same_bytes(rows_of(y_fp4), packed)
        same_bytes(rows_of(scale), byte)
        same(widen(r).reshape(h.shape), h)


@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
@pytest.mark.parametrize("name", ["add", "plain"])
def test_layouts(block, scale_format, name):
    """Swizzled scales are flat, with zeros as padding; both layouts at once; y_out; no option."""
    x, residual, weight = norm_inputs(130, hidden=320)
    given = residual if name == "add" else None
    packed, byte, _, y = expected_norm(x, given, weight, block, scale_format)

    def run(**options):
        if name == "add":
            args = (x, residual.clone(), weight)
            return bs.add_rmsnorm_fp4quant(*args, block_size=block, **options)
        return bs.rmsnorm_fp4quant(x, weight, block_size=block, **options)

    for _ in range(2):
        fill_freed_memory(ref.swizzle(byte).size)
        y_fp4, scale = run(is_sf_swizzled_layout=True, scale_format=scale_format)
        same_bytes(rows_of(y_fp4), packed)
        assert scale.dim() == 1
        same_bytes(as_bytes(scale), ref.swizzle(byte).reshape(-1))
        y_out = torch.full_like(x, float("nan"))
        y_fp4, scale, linear = run(
            output_both_sf_layouts=True, scale_format=scale_format, y_out=y_out, enable_pdl=True
        )
        same_bytes(rows_of(y_fp4), packed)
        same_bytes(as_bytes(scale), ref.swizzle(byte).reshape(-1))
        same_bytes(rows_of(linear), byte)
        same(widen(y_out), y)
    default = {16: "e4m3", 32: "ue8m0"}[block]
    if scale_format == default:
        same_bytes(rows_of(run()[1]), byte)
        same_bytes(rows_of(run(scale_format="")[1]), byte)


def given_outputs(lead, hidden, block, byte_dtype, two_dims):
    """Return y_fp4, 128x4 scales, linear scales and y_out, full of 0xFF."""
    blocks = hidden // block
    padded = checks.padded_shape(prod(lead), blocks)

    def full(shape, dtype):
        return torch.full((*shape[:-1], shape[-1]), 0xFF, dtype=torch.uint8).view(dtype)

    return (
        full((*lead, hidden // 2), torch.uint8 if two_dims else FP4),
        full(padded if two_dims else (prod(padded),), byte_dtype),
        full((*lead, blocks), byte_dtype),
        torch.full((*lead, hidden), float("nan"), dtype=torch.bfloat16),
    )


@pytest.mark.parametrize("two_dims", [False, True])
@pytest.mark.parametrize(("block", "dtype"), [(16, "float8_e4m3fn"), (16, "uint8"), (32, "uint8")])
def test_given_outputs(two_dims, block, dtype):
    """They are written and returned, as bytes or as torch's dtypes, flat or with two dimensions."""
    lead = (3, 5)
    x, residual, weight = norm_inputs(*lead, hidden=512)
    scale_format = {16: "e4m3", 32: "ue8m0"}[block]
    packed, byte, h, y = expected_norm(x, residual, weight, block, scale_format)
    for _ in range(2):
        outputs = given_outputs(lead, 512, block, getattr(torch, dtype), two_dims)
        r = residual.clone()
        got = bs.add_rmsnorm_fp4quant(
            *(x, r, weight, *outputs[:2], None, 1e-6, block, None, False, True, outputs[2]),
            y_out=outputs[3],
        )
        assert all(a is b for a, b in zip(got, outputs, strict=False))
        same_bytes(rows_of(got[0]), packed)
        same_bytes(as_bytes(got[1]).reshape(-1), ref.swizzle(byte).reshape(-1))
        same_bytes(rows_of(got[2]), byte)
        same(widen(outputs[3]).reshape(y.shape), y)
        same(widen(r).reshape(h.shape), h)


def test_options_do_not_change_the_other_outputs():
    """Bytes are the same with and without y_out, both layouts and given outputs."""
    x, residual, weight = norm_inputs(9, hidden=512)
    plain = bs.add_rmsnorm_fp4quant(x, residual.clone(), weight)
    more = bs.add_rmsnorm_fp4quant(
        x, residual.clone(), weight, output_both_sf_layouts=True, y_out=torch.empty_like(x)
    )
    same_bytes(as_bytes(more[0]), as_bytes(plain[0]))
    same_bytes(as_bytes(more[2]), as_bytes(plain[1]))


def test_views_with_an_offset():
    """Contiguous rows out of a larger tensor are taken where they lie."""
    x, residual, weight = norm_inputs(12, hidden=256)
    part = residual.clone()
    got = bs.add_rmsnorm_fp4quant(x[4:8], part[4:8], weight)
    packed, byte, h, _ = expected_norm(x[4:8], residual[4:8], weight, 16, "e4m3")
    same_bytes(rows_of(got[0]), packed)
    same_bytes(rows_of(got[1]), byte)
    same(widen(part[4:8]), h)
    same(widen(part[:4]), widen(residual[:4]))
    same(widen(part[8:]), widen(residual[8:]))


@pytest.mark.parametrize("lead", [(0,), (3, 0)])
def test_no_rows(lead):
    """Empty in, empty out, in every layout."""
    x, residual, weight = norm_inputs(*lead)
    for _ in range(2):
        y_fp4, scale, linear = bs.add_rmsnorm_fp4quant(
            x, residual, weight, output_both_sf_layouts=True
        )
        assert y_fp4.shape == (*lead, 128)
        assert scale.shape == (0,)
        assert linear.shape == (*lead, 16)
        assert bs.rmsnorm_fp4quant(x, weight)[1].shape == (*lead, 16)
        assert bs.silu_and_mul_fp4quant(x)[0].shape == (*lead, 64)


def expected_act(name, x, block, scale_format, g=1.0):
    """Return packed codes and linear scales of flattened rows, by the activation in float64.

    Rounding it once to 16 bits gives what the kernels have, but where float32 steps end on the
    other side of a tie: the tests' values have none.
    """
    x64 = widen(x).reshape(-1, x.shape[-1])
    half = x64.shape[1] // 2
    a = fused.activation(name, x64[:, :half], x64[:, half:])
    a = ref.round_to(a.astype(np.float32), str(x.dtype).removeprefix("torch."))
    codes, byte = fused.divide_mode(a, block, scale_format, g)
    return ref.pack(codes), byte


@each(form=FORMATS, name=list(GATED))
def test_activations(name, form):
    """Both layouts, allocated and given, against the activation in float64."""
    block, scale_format = form
    x = normal(2, 9, 2 * 320, dtype="float16")
    packed, byte = expected_act(name, x, block, scale_format, 0.11)
    options = {"block_size": block, "scale_format": scale_format, "global_scale": one(0.11)}
    for _ in range(2):
        y_fp4, scale = GATED[name](x, **options)
        assert y_fp4.dtype == FP4
        assert scale.shape == (2, 9, 320 // block)
        close_bytes(rows_of(y_fp4), packed)
        close_bytes(rows_of(scale), byte)
        swizzled = GATED[name](x, is_sf_swizzled_layout=True, **options)[1]
        assert swizzled.dim() == 1
        same_bytes(as_bytes(swizzled), ref.swizzle(rows_of(scale)).reshape(-1))
        given = torch.empty(swizzled.shape, dtype=torch.uint8).view(-1, swizzled.numel() // 128)
        again = GATED[name](
            x, y_fp4.view(torch.uint8), given, is_sf_swizzled_layout=True, **options
        )
        assert again[1] is given
        same_bytes(as_bytes(given).reshape(-1), as_bytes(swizzled))


def close_bytes(got, expected):
    """At most one byte in a thousand differs: where float32 and float64 round to two sides."""
    assert got.shape == expected.shape
    assert (got != expected).mean() <= 1e-3


def test_swiglu_numbers():
    """alpha, beta and limit change what they say."""
    x = normal(5, 128, dtype="float16") * 6
    for numbers in ((1.0, 0.0, 100.0), (1.702, 1.0, 2.0)):
        keys = dict(zip(("alpha", "beta", "limit"), numbers, strict=True))
        y_fp4, scale = bs.swiglu_fp4quant(x, **keys)
        values = widen(x)
        a = fused.activation("swiglu", values[:, :64], values[:, 64:], numbers)
        a = ref.round_to(a.astype(np.float32), "float16")
        codes, byte = fused.divide_mode(a, 16, "e4m3", 1.0)
        close_bytes(rows_of(y_fp4), ref.pack(codes))
        close_bytes(rows_of(scale), byte)


@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
def test_grouped_quantize(block, scale_format):
    """Codes of rows in use, nothing else; all scales beyond them are zero; a scale per expert."""
    x, mask = normal(3, 130, 320), torch.tensor([130, 0, 7], dtype=torch.int32)
    scales = torch.tensor([0.5, 1.0, 3.0])
    options = {"block_size": block, "scale_format": scale_format, "global_scale": scales}
    for _ in range(2):
        packed = torch.full((3, 130, 160), 0xAB, dtype=torch.uint8)
        got, scale = bs.grouped_quantize(x, mask, packed=packed, **options)
        assert got is packed
        assert scale.shape == (3, 256, ref.ceil_to(320 // block, 4))
        for e, rows in enumerate(mask.tolist()):
            codes, byte = fused.divide_mode(
                widen(x[e, :rows]).reshape(rows, 320), block, scale_format, float(scales[e])
            )
            same_bytes(packed[e, :rows].numpy(), ref.pack(codes))
            assert (packed[e, rows:] == 0xAB).all()
            full = np.zeros((130, 320 // block), np.uint8)
            full[:rows] = byte
            same_bytes(as_bytes(scale[e]), ref.swizzle(full))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grouped_silu(dtype):
    """Each expert as if alone; without a mask, all rows."""
    x = normal(2, 5, 256, dtype=dtype)
    for mask in (None, torch.tensor([5, 2], dtype=torch.int32)):
        y_fp4, scale = bs.silu_and_mul_grouped_fp4quant(x, mask)
        assert y_fp4.dtype == FP4
        for e, rows in enumerate([5, 5] if mask is None else [5, 2]):
            alone = bs.silu_and_mul_fp4quant(x[e, :rows].contiguous())
            same_bytes(as_bytes(y_fp4[e, :rows]), as_bytes(alone[0]))
            linear = ref.unswizzle(as_bytes(scale[e]), 5, 8)
            same_bytes(linear[:rows], as_bytes(alone[1]))
            assert not linear[rows:].any()


def test_quantize_with_given_outputs():
    """Of both dtypes and both shapes; the functions return what they were given."""
    x = normal(130, 96)
    packed, scale = bs.quantize(x, scale_layout="128x4")
    own = torch.empty(130, 48, dtype=torch.uint8).view(FP4)
    flat = torch.empty(scale.numel(), dtype=torch.uint8)
    for _ in range(2):
        got = bs.quantize(x, scale_layout="128x4", packed=own, block_scale=flat)
        assert got[0] is own
        assert got[1] is flat
        same_bytes(as_bytes(own), as_bytes(packed))
        same_bytes(as_bytes(flat), as_bytes(scale).reshape(-1))
        out = torch.empty(130, 96, dtype=torch.bfloat16)
        assert bs.dequantize(own, scale, scale_layout="128x4", out=out) is out
        same(widen(out), widen(bs.dequantize(packed, scale, scale_layout="128x4")))
        linear = torch.empty(130, 6, dtype=torch.uint8)
        assert bs.unswizzle_scales(scale, 130, 6, out=linear) is linear
        again = torch.empty_like(scale)
        assert bs.swizzle_scales(linear, out=again) is again
        same_bytes(as_bytes(again), as_bytes(scale))


def test_short_way(monkeypatch):
    """The second call of a kind hands the caller's tensors to the kernel, in its order."""
    specs, calls = [], []
    x, r, w = norm_inputs(4)
    y, s = torch.empty(4, 128, dtype=torch.uint8), torch.empty(4, 16, dtype=torch.uint8)

    def function(spec, *kind):
        specs.append(spec)
        return SimpleNamespace(call=lambda *args: calls.append(args))

    monkeypatch.setattr(jit, "function", function)
    monkeypatch.setattr(call, "remembered", {})
    g, flat = one(2.0), torch.empty(2048, dtype=torch.uint8)
    for _ in range(2):
        bs.add_rmsnorm_fp4quant(x, r, w, y, flat, g, 1e-5, 16, None, False, True, s, y_out=x)
        bs.silu_and_mul_fp4quant(x, y[:, :64].clone(), s[:, :8].clone(), g)
    assert specs == [NormQuantize(256, layout="both", y_out=True), ActQuantize("silu")]
    short = calls[2]
    assert [short[i] is t for i, t in ((0, x), (1, r), (2, w), (3, g), (5, y), (7, s), (8, x))]
    assert short[4] == 1e-5
    assert short[6].shape == (128, 16)
    assert short[6].data_ptr() == flat.data_ptr()
    assert short[9] is r
    assert len(short) == len(specs[0].params())
    assert len(calls[3]) == len(specs[1].params())
