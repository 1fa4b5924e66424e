"""FlashInfer's functions by its names: golden data, shapes, dtypes, conventions, refusals."""

import copy
import inspect
import pickle
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.compat import flashinfer as fi
from blockscale.compat.flashinfer import errors as fi_errors
from blockscale.compat.flashinfer import recipes as fi_recipes
from blockscale.ops.checks import FP4
from tests.kit.helpers import as_bytes, golden, one, rejects, same, same_bytes, widen
from tests.reference import core as ref
from tests.reference import fused as fused

LAYOUTS = fi.SfLayout


def normal(*shape, seed=0, dtype=torch.bfloat16):
    """Return normal values."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(dtype)


def bits(data, key, dtype=torch.bfloat16):
    """Return the 16-bit numbers of a golden file."""
    return torch.from_numpy(data[key].view(np.int16)).view(dtype)


@pytest.mark.parametrize(
    ("case", "block", "scale_format"),
    [("e4m316", 16, None), ("ue8m032", 32, None), ("e4m332", 32, "e4m3")],
)
@pytest.mark.parametrize("scaled", ["nogs", "gs"])
def test_add_rmsnorm_golden(case, block, scale_format, scaled):
    """The kernel model's robust entries exactly; FlashInfer's own test reference at 95 %."""
    data, base = golden("flashinfer_add_rmsnorm_7x512_bf16"), "b7_h512_bf16"
    part = f"{base}/{case}_{scaled}"
    x, weight = bits(data, f"{base}/x_u16"), bits(data, f"{base}/w_u16")
    residual = bits(data, f"{base}/residual_in_u16").clone()
    g = torch.from_numpy(data[f"{base}/global_scale_f32"]) if scaled == "gs" else None
    y_out = torch.empty_like(x)
    y_fp4, swizzled, linear = fi.add_rmsnorm_fp4quant(
        *(x, residual, weight, None, None, g, 1e-6, block, scale_format, False, True),
        y_out=y_out,
    )
    same(widen(residual), widen(bits(data, f"{base}/residual_out_u16")))
    robust = np.unpackbits(data[f"{part}/km_fp4_robust"])[: 7 * 512].astype(bool).reshape(7, 512)
    codes, expected = ref.unpack(as_bytes(y_fp4)), ref.unpack(data[f"{part}/km_fp4"])
    assert robust.mean() > 0.99
    same_bytes(codes[robust], expected[robust])
    robust = data[f"{part}/km_sf_robust"]
    same_bytes(as_bytes(linear)[robust], data[f"{part}/km_sf_linear"][robust])
    assert (as_bytes(y_fp4) == data[f"{part}/fi_fp4"]).mean() >= 0.95
    assert (as_bytes(linear) == data[f"{part}/fi_sf_linear"]).mean() >= 0.95
    same_bytes(as_bytes(swizzled), ref.swizzle(as_bytes(linear)).reshape(-1))
    assert (widen(y_out) == widen(bits(data, f"{base}/km_y_out_u16"))).mean() > 0.999


def test_global_scale_multiplies():
    """Ours divides: with powers of two, its reciprocal gives the same bytes."""
    x, residual, weight = normal(4, 256), normal(4, 256, seed=1), normal(256, seed=2)
    theirs = fi.add_rmsnorm_fp4quant(x, residual.clone(), weight, None, None, one(8))
    ours = bs.add_rmsnorm_fp4quant(x, residual.clone(), weight, None, None, one(1 / 8))
    same_bytes(as_bytes(theirs[0]), as_bytes(ours[0]))
    same_bytes(as_bytes(theirs[1]), as_bytes(ours[1]))
    without = fi.add_rmsnorm_fp4quant(x, residual.clone(), weight, block_size=32)
    scaled = fi.add_rmsnorm_fp4quant(x, residual.clone(), weight, None, None, one(8), block_size=32)
    same_bytes(as_bytes(without[1]), as_bytes(scaled[1]))
    same_bytes(as_bytes(without[0]), as_bytes(scaled[0]))


@pytest.mark.parametrize("swizzled", [False, True])
def test_rmsnorm(swizzled):
    """The weight is multiplied first, in 16 bits; scales are flat in the 128x4 layout."""
    x, weight = normal(2, 5, 512), normal(512, seed=2)
    y_fp4, scale = fi.rmsnorm_fp4quant(x, weight, None, None, one(40.0), 1e-5, 16, None, swizzled)
    assert y_fp4.dtype == FP4
    assert y_fp4.shape == (2, 5, 256)
    assert scale.dtype == torch.float8_e4m3fn
    rows = widen(x).reshape(10, 512)
    y, _ = fused.norm(rows, None, widen(weight), 1e-5, "bfloat16", weight_first=True)
    codes, byte = fused.encode(y, 16, "e4m3", 40.0)
    same_bytes(as_bytes(y_fp4).reshape(10, 256), ref.pack(codes))
    assert scale.shape == ((128 * 32,) if swizzled else (2, 5, 32))
    expected = ref.swizzle(byte) if swizzled else byte
    same_bytes(as_bytes(scale).reshape(-1), expected.reshape(-1))


def test_input_that_is_not_contiguous():
    """It is copied; a residual is refused, as its update would be lost."""
    wide, residual, weight = normal(4, 512), normal(4, 256, seed=1), normal(256, seed=2)
    x = wide[:, ::2]
    got = fi.add_rmsnorm_fp4quant(x, residual.clone(), weight)
    expected = fi.add_rmsnorm_fp4quant(x.contiguous(), residual.clone(), weight)
    same_bytes(as_bytes(got[0]), as_bytes(expected[0]))
    with rejects("flashinfer.add_rmsnorm_fp4quant", "residual", "contiguous"):
        fi.add_rmsnorm_fp4quant(residual, x, weight)


SHAPES = ["m1_k64", "m3_k128", "m128_k64"]
KINDS = ["random", "boundary", "zeros", "maxes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_fp4_quantize_golden(shape, kind, name):
    """Every layout of NVFP4, and MXFP4, byte for byte."""
    data, case = golden("flashinfer_fp4_exact"), f"q_{shape}_{name}_{kind}"
    x = bits(data, f"{case}/x_u16", {"bf16": torch.bfloat16, "fp16": torch.float16}[name])
    g = torch.from_numpy(data[f"{case}/global_scale_f32"])
    rows, blocks = x.shape[0], x.shape[1] // 16
    packed, scale = fi.fp4_quantize(x, g)
    assert packed.dtype == scale.dtype == torch.uint8
    assert scale.shape == (ref.ceil_to(rows, 128), ref.ceil_to(blocks, 4))
    same_bytes(packed.numpy(), data[f"{case}/te_fp4"])
    linear = data[f"{case}/te_sf_linear"]
    same_bytes(scale.numpy(), ref.swizzle(linear))
    packed, scale = fi.nvfp4_quantize(x, g, LAYOUTS.layout_linear)
    same_bytes(packed.numpy(), data[f"{case}/te_fp4"])
    same_bytes(scale.numpy(), linear)
    scale = fi.nvfp4_quantize(x, float(g), LAYOUTS.layout_8x4)[1]
    same_bytes(scale.numpy(), fused.swizzle_8x4(linear))
    packed, scale = fi.mxfp4_quantize(x, sfLayout=LAYOUTS.layout_linear)
    codes, byte = fused.exact_mode(widen(x), 32, "ue8m0", 1.0)
    same_bytes(packed.numpy(), ref.pack(codes))
    same_bytes(scale.numpy(), byte)
    if f"{case}/mx_fp4" in data:
        same_bytes(packed.numpy(), data[f"{case}/mx_fp4"])


def test_fp4_quantize_options():
    """Leading dimensions, the inverse scale, other dtypes of it, columns instead of rows."""
    x, g = normal(3, 5, 64), one(0.25)
    packed, scale = fi.fp4_quantize(x, g, is_sf_swizzled_layout=False)
    assert packed.shape == (3, 5, 32)
    assert scale.shape == (15, 4)
    for other, options in (
        (one(4.0), {"is_global_scale_inversed": True}),
        (g.to(torch.bfloat16), {}),
        (g.double(), {}),
    ):
        again = fi.fp4_quantize(x, other, is_sf_swizzled_layout=False, **options)
        same_bytes(again[0].numpy(), packed.numpy())
        same_bytes(again[1].numpy(), scale.numpy())
    columns = x.transpose(-2, -1)
    across, scales = fi.fp4_quantize(columns, g, is_sf_swizzled_layout=False)
    same_bytes(across.transpose(-2, -1).numpy(), packed.numpy())
    same_bytes(scales.transpose(-2, -1).numpy(), scale.numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trips(layout):
    """Both formats come back through the functions that dequantise, in every layout."""
    x, g = normal(37, 320), one(100.0)
    swizzled, eight = layout != LAYOUTS.layout_linear, layout == LAYOUTS.layout_8x4
    packed, scale = fi.nvfp4_quantize(x, g, layout)
    got = fi.e2m1_and_ufp8sf_scale_to_float(packed, scale, 1 / g, 16, 1, swizzled, eight)
    codes, byte = fused.exact_mode(widen(x), 16, "e4m3", 100.0)
    same(got.numpy(), ref.dequantize(codes, byte, "nvfp4", 1 / np.float32(100)))
    packed, scale = fi.mxfp4_quantize(x, sfLayout=layout)
    codes, byte = fused.exact_mode(widen(x), 32, "ue8m0", 1.0)
    same(fi.mxfp4_dequantize(packed, scale, layout).numpy(), ref.dequantize(codes, byte, "mxfp4"))
    if not swizzled:
        same(fi.mxfp4_dequantize_host(packed, scale).numpy(), ref.dequantize(codes, byte, "mxfp4"))


def test_batched_quantize():
    """Each batch as if alone, its scales in a row."""
    a, g = normal(3, 130, 320), one(33.0)
    packed, scale = fi.nvfp4_batched_quantize(a, g)
    assert packed.dtype == scale.dtype == torch.uint8
    assert scale.shape == (3, 256 * 20)
    for part, codes, byte in zip(a, packed, scale, strict=True):
        alone = fi.fp4_quantize(part, g)
        same_bytes(codes.numpy(), alone[0].numpy())
        same_bytes(byte.numpy(), alone[1].numpy().reshape(-1))


@pytest.mark.parametrize("activation", [False, True])
def test_experts(activation):
    """The logical views of the grouped GEMM; one scale per expert; rows in use only."""
    mask, g = torch.tensor([130, 7], dtype=torch.int32), torch.tensor([33.0, 2.0])
    a = normal(2, 130, 640 if activation else 320)
    run = fi.silu_and_mul_scaled_nvfp4_experts_quantize if activation else None
    packed, scale = (run or fi.scaled_fp4_grouped_quantize)(a, mask, g)
    assert packed.shape == (130, 160, 2)
    assert packed.permute(2, 0, 1).is_contiguous()
    assert scale.shape == (32, 4, 2, 4, 5, 2)
    assert scale.dtype == torch.float8_e4m3fn
    physical = scale.permute(5, 2, 4, 0, 1, 3)
    assert physical.is_contiguous()
    for e, rows in enumerate(mask.tolist()):
        part = a[e, :rows].contiguous()
        single = fi.silu_and_mul_nvfp4_quantize if activation else fi.fp4_quantize
        alone = single(part, g[e : e + 1], is_sf_swizzled_layout=False)
        same_bytes(packed[:rows, :, e].numpy(), alone[0].numpy())
        linear = ref.unswizzle(as_bytes(physical[e]), 130, 20)
        same_bytes(linear[:rows], alone[1].numpy())
        assert not linear[rows:].any()


def test_silu_and_mul():
    """In float64, rounded once, it is the same but for ties that float32 steps move."""
    x, g = normal(9, 256, dtype=torch.float16), one(50.0)
    values = widen(x)
    a = fused.activation("silu", values[:, :128], values[:, 128:])
    a = ref.round_to(a.astype(np.float32), "float16")
    codes, byte = fused.exact_mode(a, 16, "e4m3", 50.0)
    for options, layout in (
        ({"is_sf_swizzled_layout": False}, lambda scale: scale),
        ({}, ref.swizzle),
        ({"is_sf_8x4_layout": True}, fused.swizzle_8x4),
    ):
        packed, scale = fi.silu_and_mul_nvfp4_quantize(x, g, **options)
        assert (packed.numpy() != ref.pack(codes)).mean() < 1e-2
        assert scale.shape == layout(byte).shape
        assert (scale.numpy() != layout(byte)).mean() < 1e-2


def test_block_scale_interleave():
    """Bytes and bfloat16 elements, two and three dimensions; flat, padding zero."""
    scale = torch.randint(1, 256, (130, 11), dtype=torch.uint8)
    flat = fi.block_scale_interleave(scale)
    same_bytes(flat.numpy(), ref.swizzle(scale.numpy()).reshape(-1))
    many = torch.stack([scale, scale + 1, 255 - scale])
    expected = np.concatenate([ref.swizzle(part.numpy()).reshape(-1) for part in many])
    same_bytes(fi.nvfp4_block_scale_interleave(many).numpy(), expected)
    wide = fi.block_scale_interleave(scale.to(torch.bfloat16))
    assert wide.dtype == torch.bfloat16
    same(widen(wide), flat.float().numpy())


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("block", [16, 32])
def test_fp8_input(block):
    """Codes and scales of ``input * 6 / global_scale``; experts, columns, scales of rows."""
    x, g = (normal(10, 128, dtype=torch.float32) * 20).to(FP8), one(40.0)
    ue8m0 = block == 32
    packed, scale = fi.fp4_quantize(x, g, block, ue8m0, is_sf_swizzled_layout=False)
    codes, byte = fused.byte_mode(as_bytes(x), block, "ue8m0" if ue8m0 else "e4m3", 40.0)
    same_bytes(packed.numpy(), ref.pack(codes))
    same_bytes(scale.numpy(), byte)
    values = fi.e2m1_and_ufp8sf_scale_to_float(
        packed, scale, 1 / g, block, int(not ue8m0), is_sf_swizzled_layout=False
    )
    meant = x.float() * 6 / (1 if ue8m0 else g)
    meant = meant / g if ue8m0 else meant
    error = (values / (g if ue8m0 else 1) - meant).norm() / meant.norm()
    assert error < (0.2 if ue8m0 else 0.12)
    each = torch.full((10,), 40.0)
    rows = fi.fp4_quantize(x, each, block, ue8m0, is_sf_swizzled_layout=False)
    same_bytes(rows[0].numpy(), packed.numpy())
    same_bytes(rows[1].numpy(), scale.numpy())
    if not ue8m0:
        batch = fi.nvfp4_batched_quantize(torch.stack((x, x)), one(40.0))
        same_bytes(batch[0][1].numpy(), packed.numpy())
        same_bytes(fi.nvfp4_quantize(x, 40.0)[0].numpy(), packed.numpy())
    else:
        plain = fi.mxfp4_quantize(x)[0]
        same_bytes(plain.numpy(), fi.mxfp4_quantize((x.float() * 6).half())[0].numpy())


def test_scales_of_rows():
    """One given for each row, as for that row alone; MXFP4 ignores them."""
    x, g = normal(6, 64), torch.tensor([1.0, 3.0, 30.0, 300.0, 0.2, 7.0])
    packed, scale = fi.fp4_quantize(x, g, is_sf_swizzled_layout=False)
    again = fi.fp4_quantize(x, 1 / g, is_sf_swizzled_layout=False, is_global_scale_inversed=True)
    for r in range(6):
        alone = fi.fp4_quantize(x[r : r + 1], g[r : r + 1], is_sf_swizzled_layout=False)
        same_bytes(packed[r].numpy(), alone[0][0].numpy())
        same_bytes(scale[r].numpy(), alone[1][0].numpy())
    assert (again[0] == packed).float().mean() > 0.99
    for one_scale in (None, g):
        same_bytes(
            fi.fp4_quantize(x, one_scale, 32, True)[0].numpy(), fi.mxfp4_quantize(x)[0].numpy()
        )


RECIPES = [
    (None, "none", 2688.0),
    (fi.NVFP44Over6Config(), "mae", 2688.0),
    (fi.NVFP44Over6Config(256, "mse"), "mse", 1536.0),
    (fi.NVFP44Over6Config(448, 1, True), "mse_scaled", 2688.0),
]


@pytest.mark.parametrize(("recipe", "search", "span"), RECIPES, ids=[str(r[0]) for r in RECIPES])
def test_per_token(recipe, search, span):
    """Rows find their own scales; its reciprocal and the base belong together."""
    x = normal(130, 128) * torch.logspace(-3, 3, 130, dtype=torch.bfloat16)[:, None]
    x[7] = 0
    base = fi.make_nvfp4_global_scale(x, True, nvfp4_4over6_config=recipe)
    factor, stored, top = fused.token_scales(widen(x), base.numpy()[0])
    assert base.item() == pytest.approx(1 / span)
    if recipe is None:
        each = zip(widen(x)[:, None], factor, strict=True)
        made = [fused.exact_mode(row, 16, "e4m3", own) for row, own in each]
        codes, byte = (np.concatenate(part) for part in zip(*made, strict=True))
    else:
        codes, byte = fused.four_over_six(widen(x), factor, search, span, top)
    for layout, as_stored in (
        (LAYOUTS.layout_linear, lambda scale: scale),
        (LAYOUTS.layout_128x4, ref.swizzle),
        (LAYOUTS.layout_8x4, fused.swizzle_8x4),
    ):
        packed, scale, row = fi.nvfp4_quantize(
            x, base, layout, per_token_activation=True, nvfp4_4over6=recipe
        )
        same_bytes(packed.numpy(), ref.pack(codes))
        same_bytes(scale.numpy(), as_stored(byte))
        same(row.numpy(), stored)
    more = fi.nvfp4_quantize(
        *(x, base.item()),
        backend="cute-dsl",
        per_token_activation=True,
        nvfp4_4over6=recipe,
        out_scale=one(2.0),
    )
    same(more[2].numpy(), 2 * stored)
    again = {"expanded_idx_to_permuted_idx": torch.arange(130, dtype=torch.int32)}
    listed = fi.nvfp4_quantize(x, base, per_token_activation=True, nvfp4_4over6=recipe, **again)
    same_bytes(listed[0].numpy(), packed.numpy())


def test_per_token_in_a_graph():
    """torch.compile sees one operator with three results."""
    x, base = normal(5, 64), one(1 / 2688)

    def run(x, base):
        return fi.nvfp4_quantize(x, base, per_token_activation=True, nvfp4_4over6=None)

    torch._dynamo.reset()
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(x, base)
    for made, want in zip(got, run(x, base), strict=True):
        assert torch.equal(made, want)


SETTINGS = [
    ({}, None),
    ({"": "1"}, fi.NVFP44Over6Config()),
    ({"": "true"}, None),
    ({"": "1", "_ERR_MODE": "mse"}, fi.NVFP44Over6Config(err_mode="MSE")),
    ({"": "1", "_E4M3_USE_256": "1"}, fi.NVFP44Over6Config(256)),
    (
        {"": "1", "_ERR_USE_FAST_MATH": "1", "_E4M3_USE_256": "0"},
        fi.NVFP44Over6Config(err_use_fast_math=True),
    ),
]


@pytest.mark.parametrize(("said", "recipe"), SETTINGS, ids=[str(said) for said, _ in SETTINGS])
def test_environment(monkeypatch, said, recipe):
    """Read at every call that leaves the argument out, with a warning; not merged with one."""
    for suffix, value in said.items():
        monkeypatch.setenv(f"FLASHINFER_NVFP4_4OVER6{suffix}", value)
    x, g = normal(8, 256, seed=4), one(300.0)
    warned = nullcontext() if recipe is None else pytest.warns(FutureWarning, match="nvfp4_4over6=")
    with warned:
        assert fi.resolve_nvfp4_4over6() == recipe
    with warned if recipe is None else pytest.warns(FutureWarning, match=r"OVER6") as caught:
        left_out = fi.fp4_quantize(x, g)
    assert recipe is None or caught[0].filename == __file__
    explicit = fi.fp4_quantize(x, g, nvfp4_4over6=recipe)
    other = fi.fp4_quantize(x, g, nvfp4_4over6=None if recipe else fi.NVFP44Over6Config())
    for got, want in zip(left_out, explicit, strict=True):
        same_bytes(got.numpy(), want.numpy())
    assert (left_out[1] != other[1]).any()
    fp8 = x.to(FP8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        fi.fp4_quantize(fp8, g)  # ignored, as FlashInfer's CUDA kernels do
        if recipe is not None:
            with pytest.raises(ValueError, match="float8_e4m3fn"):
                fi.fp4_quantize(fp8, g, backend="cute-dsl")
        fi.mxfp4_quantize(x)


def test_recipes():
    """Names of modes, what is refused, copies."""
    recipe = fi.NVFP44Over6Config(256, "mse", True)
    assert recipe.err_mode is fi.NVFP44Over6ErrMode.MSE
    assert recipe.err_mode_name == "MSE"
    assert fi_recipes.searched(recipe) == "mse_scaled"
    assert fi_recipes.searched(fi.NVFP44Over6Config(256)) == "mae"
    known = {"NVFP44Over6Config": fi.NVFP44Over6Config, "NVFP44Over6ErrMode": fi.NVFP44Over6ErrMode}
    for one_of_them in (recipe, fi.NVFP44Over6Config()):
        assert eval(repr(one_of_them), known) == one_of_them
        assert hash(copy.deepcopy(one_of_them)) == hash(one_of_them)
    assert repr(fi.NVFP44Over6Config()) == "NVFP44Over6Config()"
    assert pickle.loads(pickle.dumps(fi_recipes.UNSET)) is fi_recipes.UNSET
    for bad, words in ((300, "256 or 448"), (448, "MAE or MSE")):
        with pytest.raises(ValueError, match=words):
            fi.NVFP44Over6Config(bad, "MAE" if bad == 300 else "MAX")
    x = normal(4, 64)
    assert fi.make_nvfp4_global_scale(x, False, 3.0).item() == 3.0
    assert fi.make_nvfp4_global_scale(x, False).item() == pytest.approx(2688 / x.abs().max().item())
    assert fi.make_nvfp4_global_scale(torch.tensor([1, torch.nan]), False).isnan()
    codes = torch.full((2, 16), 3.0).to(torch.float8_e4m3fn)
    assert fi.make_nvfp4_global_scale(codes, False).item() == 2688 / 3
    zeros = fi.make_nvfp4_global_scale(torch.zeros(2, 16), False)
    assert zeros.item() == torch.finfo(torch.float32).max


def test_silu_and_experts_with_a_recipe():
    """Other quantisers take the recipe as well: each expert as alone."""
    recipe = fi.NVFP44Over6Config(err_mode="MSE")
    mask, g = torch.tensor([9, 5], dtype=torch.int32), torch.tensor([300.0, 500.0])
    for gated in (False, True):
        a = normal(2, 9, 256 if gated else 128)
        run = fi.silu_and_mul_scaled_nvfp4_experts_quantize if gated else None
        packed, _ = (run or fi.scaled_fp4_grouped_quantize)(a, mask, g, nvfp4_4over6=recipe)
        single = fi.silu_and_mul_nvfp4_quantize if gated else fi.fp4_quantize
        for e, rows in enumerate(mask.tolist()):
            part = a[e, :rows].contiguous()
            alone = single(part, g[e : e + 1], nvfp4_4over6=recipe)[0]
            same_bytes(packed[:rows, :, e].numpy(), alone.numpy())
            assert (alone != single(part, g[e : e + 1], nvfp4_4over6=None)[0]).any()


@pytest.mark.parametrize("per_token", [False, True])
def test_shuffle(per_token):
    """Of every 32 rows, row 4 i + j goes to place 8 j + i; scales and rows' scales go with it."""
    x = normal(256, 128)
    base = 1 / 2688 if per_token else 300.0
    options = {"per_token_activation": per_token, "nvfp4_4over6": None}
    plain = fi.nvfp4_quantize(x, base, LAYOUTS.layout_linear, **options)
    shuffled = fi.nvfp4_quantize(x, base, do_shuffle=True, **options)
    places = [32 * (r // 32) + 8 * (r % 4) + r % 32 // 4 for r in range(256)]
    for got, want in zip(shuffled, plain, strict=True):
        linear = got.numpy()
        if got.dtype == torch.uint8 and got.shape[1] == 8:
            linear = ref.unswizzle(linear, 256, 8)
        assert (linear[places] == want.numpy()).all()
    rows = torch.arange(32)[:, None].expand(32, 4).to(torch.uint8)
    sixteen = fi.shuffle_matrix_a(rows, 64)[:, 0].tolist()
    assert sixteen[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]


@pytest.mark.parametrize("layout", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize(("block", "kind"), [(16, 0), (32, 1)])
def test_other_pairs_are_dequantised(block, kind, layout):
    """UE8M0 scales of 16 elements, E4M3 scales of 32, in every layout."""
    rng = np.random.default_rng(0)
    codes, blocks = rng.integers(0, 16, (10, 96)).astype(np.uint8), 96 // block
    byte = rng.integers(1, 120, (10, blocks)).astype(np.uint8)
    swizzled, eight = layout
    stored = byte if not swizzled else fused.swizzle_8x4(byte) if eight else ref.swizzle(byte)
    got = fi.e2m1_and_ufp8sf_scale_to_float(
        *(torch.from_numpy(ref.pack(codes)), torch.from_numpy(np.ascontiguousarray(stored))),
        *(one(0.5), block, kind, swizzled, eight),
    )
    scale = ref.e4m3_decode(byte) * 0.5 if kind else ref.ue8m0_decode(byte)
    want = ref.e2m1_decode(codes) * np.repeat(scale, block, axis=-1)
    same(got.numpy(), want.astype(np.float32))


def test_interleave_into_a_buffer():
    """The caller's memory is filled and returned."""
    for scale in (torch.randint(0, 256, (130, 11)).byte(), normal(2, 130, 11)):
        want = fi.block_scale_interleave(scale)
        out = torch.empty_like(want)
        assert fi.block_scale_interleave(scale, out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, want)
    with pytest.raises(ValueError, match="out has shape"):
        fi.block_scale_interleave(scale, out=out[:512])


X, G = normal(4, 64), one(1)
CODES = torch.zeros(2, 16, dtype=torch.uint8)
RECIPE = fi.NVFP44Over6Config()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: fi.fp4_quantize(X), ValueError, "global_scale is missing"),
        (
            lambda: fi.mxfp4_dequantize_host(CODES, torch.ones(2, 1)),
            TypeError,
            "scale has dtype float32",
        ),
        (
            lambda: fi.e2m1_and_ufp8sf_scale_to_float(CODES, torch.ones(2, 1), one(1)),
            TypeError,
            "ufp8_scale_tensor has dtype float32",
        ),
        (
            lambda: fi.e2m1_and_ufp8sf_scale_to_float(CODES, None, one(1)),
            TypeError,
            "ufp8_scale_tensor is missing",
        ),
        (
            lambda: fi.nvfp4_batched_quantize(X[None], "1"),
            TypeError,
            "a_global_sf is a str; pass a tensor or a number",
        ),
        (
            lambda: fi.silu_and_mul_nvfp4_quantize(None, one(1)),
            TypeError,
            "input is missing",
        ),
        (
            lambda: fi.make_nvfp4_global_scale(X[:0], False),
            ValueError,
            "input_tensor has no elements",
        ),
        (lambda: fi.fp4_quantize(X, G, 8), NotImplementedError, "sf_vec_size=8"),
        (lambda: fi.fp4_quantize(X, G, 32), ValueError, "sf_use_ue8m0"),
        (lambda: fi.fp4_quantize(X, torch.ones(3)), ValueError, r"shape \[3\]"),
        (lambda: fi.fp4_quantize(X, G, backend="trtllm"), ValueError, "backend='trtllm'"),
        (
            lambda: fi.fp4_quantize(X, None, 32, True, nvfp4_4over6=RECIPE),
            ValueError,
            "E4M3 scales",
        ),
        (
            lambda: fi.fp4_quantize(X.to(torch.float8_e4m3fn), G, nvfp4_4over6=RECIPE),
            ValueError,
            "float8_e4m3fn",
        ),
        (lambda: fi.fp4_quantize(X, G, nvfp4_4over6="MAE"), TypeError, "is a str"),
        (lambda: fi.fp4_quantize(X.float(), G), TypeError, "float32"),
        (lambda: fi.fp4_quantize(X[:, :40], G), ValueError, "multiple of 16"),
        (lambda: fi.nvfp4_quantize(X, G, do_shuffle=True), ValueError, "4 rows"),
        (
            lambda: fi.nvfp4_quantize(X, G, LAYOUTS.layout_linear, True),
            ValueError,
            "do_shuffle=True needs",
        ),
        (lambda: fi.nvfp4_quantize(X, G, sf_vec_size=32), ValueError, "sf_vec_size=32"),
        (lambda: fi.nvfp4_quantize(X, G, backend="cake"), ValueError, "needs per_token"),
        (lambda: fi.nvfp4_quantize(X, G, out_scale=G), ValueError, "out_scale needs"),
        (
            lambda: fi.nvfp4_quantize(X, G, expanded_idx_to_permuted_idx=torch.arange(4)),
            ValueError,
            "needs per_token_activation",
        ),
        (
            lambda: fi.nvfp4_quantize(X, 1 / 2688, per_token_activation=True, out_scale=G),
            ValueError,
            "does not go with backend='cuda'",
        ),
        (
            lambda: fi.nvfp4_quantize(
                X, 1 / 2688, per_token_activation=True, nvfp4_4over6=fi.NVFP44Over6Config(256)
            ),
            ValueError,
            "the recipe .* implies 0.00065",
        ),
        (
            lambda: fi.nvfp4_quantize(X.to(torch.float8_e4m3fn), G, per_token_activation=True),
            NotImplementedError,
            "needs bfloat16 or float16",
        ),
        (lambda: fi.shuffle_matrix_a(X, 128), ValueError, "4 rows"),
        (lambda: fi.shuffle_matrix_sf_a(X[:, :8], 64), ValueError, "multiple of 128"),
        (lambda: fi.nvfp4_batched_quantize(X, G), ValueError, "3 dimension"),
        (
            lambda: fi.scaled_fp4_grouped_quantize(X[None], torch.ones(1).int(), torch.ones(3)),
            ValueError,
            "3 elements",
        ),
        (
            lambda: fi.silu_and_mul_nvfp4_quantize(X, G, 32),
            NotImplementedError,
            "sf_vec_size=32",
        ),
        (lambda: fi.block_scale_interleave(X.float()), TypeError, "float32"),
        (
            lambda: fi.e2m1_and_ufp8sf_scale_to_float(X.view(torch.uint8), CODES, G),
            ValueError,
            "elements",
        ),
        (
            lambda: fi.add_rmsnorm_fp4quant(X, X.clone(), X[0], None, None, None, 1e-6, 24),
            ValueError,
            "block_size=24",
        ),
    ],
)
def test_refusals(call, error, words):
    """Our class, and those of FlashInfer's own checks: assert in Python, RuntimeError in C++."""
    for caught in (error, RuntimeError) + (AssertionError,) * (error is not NotImplementedError):
        with pytest.raises(caught, match=words):
            call()


def test_theirs_is_caught(monkeypatch):
    """A program that has FlashInfer catches its class, too; ours is one and the same otherwise."""

    class BackendSupportedError(Exception):
        pass

    utils = SimpleNamespace(BackendSupportedError=BackendSupportedError)
    monkeypatch.setitem(sys.modules, "flashinfer.utils", utils)
    for error in (BackendSupportedError, ValueError, fi_errors.BadValueError):
        with pytest.raises(error, match="backend='trtllm'"):
            fi.fp4_quantize(X, G, backend="trtllm")
    with pytest.raises(BackendSupportedError, match="is a str"):
        fi.fp4_quantize(X, G, nvfp4_4over6="MAE")


LEFT_OUT = "nvfp4_4over6=<left out: FLASHINFER_NVFP4_4OVER6 decides>"
SIGNATURES = {
    "add_rmsnorm_fp4quant": "input residual weight y_fp4=None block_scale=None global_scale=None "
    "eps=1e-06 block_size=16 scale_format=None is_sf_swizzled_layout=False "
    "output_both_sf_layouts=False block_scale_unswizzled=None enable_pdl=None y_out=None",
    "rmsnorm_fp4quant": "input weight y_fp4=None block_scale=None global_scale=None eps=1e-06 "
    "block_size=16 scale_format=None is_sf_swizzled_layout=False enable_pdl=None",
    "fp4_quantize": "input global_scale=None sf_vec_size=16 sf_use_ue8m0=False "
    "is_sf_swizzled_layout=True is_sf_8x4_layout=False is_global_scale_inversed=False "
    f"enable_pdl=None backend='cuda' {LEFT_OUT}",
    "nvfp4_quantize": "a a_global_sf sfLayout=<SfLayout.layout_128x4: 0> do_shuffle=False "
    "sf_vec_size=16 enable_pdl=None backend='cuda' per_token_activation=False "
    f"expanded_idx_to_permuted_idx=None out_scale=None {LEFT_OUT}",
    "nvfp4_batched_quantize": f"a a_global_sf sf_vec_size=16 {LEFT_OUT}",
    "scaled_fp4_grouped_quantize": f"a mask a_global_sf {LEFT_OUT}",
    "silu_and_mul_scaled_nvfp4_experts_quantize": f"a mask a_global_sf {LEFT_OUT}",
    "make_nvfp4_global_scale": "input_tensor per_token_activation global_scale=None "
    "nvfp4_4over6_config=None",
    "silu_and_mul_nvfp4_quantize": "input global_scale sf_vec_size=16 is_sf_swizzled_layout=True "
    f"is_sf_8x4_layout=False enable_pdl=None {LEFT_OUT}",
    "mxfp4_dequantize_host": "weight scale group_size=32",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    """Names, order and defaults, as a caller by position or by name sees them."""
    parameters = inspect.signature(getattr(fi, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
    text = [p.name if p.default is empty else f"{p.name}={p.default!r}" for p in parameters]
    assert " ".join(text) == SIGNATURES[name]
    assert [int(layout) for layout in LAYOUTS] == [0, 1, 2]
