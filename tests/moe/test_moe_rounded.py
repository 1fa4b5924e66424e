"""NVFP4 weights rounded to E4M3 (layout "tiles64e"): bytes, scales, layouts, and GEMMs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.catalog import moe as catalog_moe
from blockscale.lower.moe.kernel import Pair
from blockscale.lower.warp.derive import derive
from blockscale.ops.moe import rounded
from blockscale.specs import FusedMoe
from blockscale.specs.plans.moe import E4M3
from tests.kit import moe_harness
from tests.kit.gpu_library import library
from tests.kit.moe_harness import plan
from tests.kit.pairwise import each
from tests.kit.tiles64 import E2M1, codes_of
from tests.moe.test_moe_bytes import BYTES, MXFP4, all_codes, decoded
from tests.moe.test_moe_gemm import ids_of
from tests.moe.test_moe_library import Call
from tests.moe.test_moe_weights import given, slow_order
from tests.reference import core as ref
from tests.reference import moe

NVFP4 = {"fmt": "nvfp4", "group": 16}
FINITE = 0x7F
"""E4M3 bytes that are a scale, 0 to 0x7E."""

rounds = pytest.mark.filterwarnings("ignore:.*rounding nvfp4 weights to E4M3")
"""The warning that says what rounding has changed has a test of its own."""

# ---- Bytes --------------------------------------------------------------------------------------


def stored_bytes() -> np.ndarray:
    """Return every byte that a scale is stored as."""
    scale = np.arange(rounded.LEAST, rounded.MOST + 1)
    times = ref.e4m3_decode(scale.astype(np.uint8)) * 1.5
    return scale | np.where(ref.e4m3_encode(times) == scale + 4, rounded.DOWN, 0)


@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
def test_kernels_round_as_ml_dtypes_do(dtype: str) -> None:
    """All codes in all eight places of a word, by all stored scales in both rows of it."""
    codes, words = all_codes()
    stored = stored_bytes()
    other = np.roll(stored, 37)
    pairs = (other << 8 | stored).astype(np.uint32)
    found = decoded(np.repeat(words, len(pairs)), np.tile(pairs, len(words)), dtype, "NVFP4", 16)
    scale = ref.e4m3_decode(np.stack([stored, other], -1).astype(np.uint8) & 0x7F)[:, [0, 1, 0, 1]]
    value = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]
    exact = value[:, None] * scale[None, :, :, None]
    want = exact.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    left = 1.0 if dtype == E4M3 else 2.0**-22
    assert (found == (want * left).reshape(-1, 4, 2)).all()
    assert (want != exact).any()
    assert np.abs(want - exact).max() <= np.abs(exact).max() / 21
    assert (np.abs(want - exact) <= np.abs(exact) / 21).all()


def matrix(scale: np.ndarray, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes, and these scale bytes, of a matrix."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (len(scale), 8 * scale.shape[1]), dtype=np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scale.astype(np.uint8))


def found_in(of: rounded.Rounded) -> np.ndarray:
    """Return the weights of a matrix, without global scales, float64."""
    return torch.ldexp(rounded.values(of), of.octaves[:, None]).double().numpy()


def test_every_scale_alone_and_with_every_other() -> None:
    """127 rows of each scale by itself, and beside all others: those far below shrink."""
    alone = np.arange(FINITE)[:, None]
    beside = np.stack([np.repeat(alone, FINITE), np.tile(alone[:, 0], FINITE)], -1)
    for scale in (alone, beside):
        codes, byte = matrix(scale)
        of = rounded.rounded(codes, byte)
        low = of.byte.numpy() & 0x7F
        assert low.min() >= rounded.LEAST
        assert low.max() <= rounded.MOST
        assert np.isin(of.byte.numpy(), stored_bytes()).all()
        assert (found_in(of) == ref.rounded_weight(ref.unpack(codes.numpy()), scale)).all()
        exact = ref.weight(ref.unpack(codes.numpy()), scale.astype(np.uint8), "nvfp4")
        gap, most = np.abs(found_in(of) - exact), ref.e4m3_decode(scale.astype(np.uint8)).max(1)
        assert (gap <= np.maximum(np.abs(exact) / 21, most[:, None] / 2700)).all()


def test_blocks_of_zeros_do_not_count() -> None:
    """Neither those whose scale is zero nor those whose codes are; rows of them are zeros."""
    codes, byte = matrix(np.array([[0x7E, 0x20, 0], [0x7E, 0x7E, 0x7E], [0, 0, 0]]))
    codes[0, :8] &= 0x88
    codes[1] &= 0x88
    of = rounded.rounded(codes, byte)
    found = found_in(of)
    assert (of.byte[0, 1] & 0x7F) >= rounded.MOST - 8
    assert not found[0, :16].any()
    assert not found[0, 32:].any()
    assert found[0, 16:32].any()
    assert not found[1:].any()


# ---- Weights ------------------------------------------------------------------------------------


def spread_layer(activation: str, sizes: tuple[int, int] = (128, 96)) -> moe.Layer:
    """Return a layer whose blocks have any scales, none at all, or no codes but zeros."""
    layer = moe.random_layer(2, *sizes, activation=activation, bias=True)
    rng = np.random.default_rng(7)
    for name in ("w13", "w2"):
        scale, codes = getattr(layer, f"{name}_scale"), getattr(layer, name)
        scale[:] = rng.integers(0, FINITE, scale.shape)
        scale[:, ::2] = rng.integers(0x28, 0x40, scale[:, ::2].shape)
        codes.reshape(*scale.shape, 8)[:, ::3, 2] &= 0x88
        codes[:, 5] = 0
        scale[:, 6] = 0
    return layer


def asked(layer: moe.Layer, **changes: Any) -> Any:
    """Return the layer's weights, rounded."""
    options = {"layout": "tiles64e", "act_fmt": "fp8", "rounded": True, **changes}
    return bs.prepare_moe_weights(**given(layer, **options))


def dense_of(made: Any, which: str, activation: str) -> np.ndarray:
    """Return a weight [E, R, K] float64 of layout "tiles64e", read element by element."""
    first = which == "w13"
    cols, count = (made.hidden, made.rows) if first else (made.intermediate, made.hidden)
    order = np.array(slow_order(count, made.intermediate, activation, which))
    out = np.full((made.experts, count, cols), np.nan)
    for e in range(made.experts):
        codes = codes_of(getattr(made, which)[e].numpy(), "e2m1e")
        scale = getattr(made, f"{which}_scale")[e].numpy()
        lanes = scale.reshape(*scale.shape[:2], 4, 32, 2)
        factor = getattr(made, f"{which}_global")[e].double().numpy()
        row, k = np.indices(codes.shape)
        at = row // 64, k // 64, row % 64 // 16, 4 * (row % 8) + k % 64 // 16, row % 16 // 8
        byte = lanes[at] & 0x7F
        exact = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8] * ref.e4m3_decode(byte)
        value = ref.e4m3_decode(ref.e4m3_encode(exact)) * 2.0**-6
        there = order >= 0
        assert (byte[there, :cols] >= rounded.LEAST).all()
        assert not value[~there].any()
        assert not value[:, cols:].any()
        out[e, order[there]] = (value * factor[:, None])[there, :cols]
    return out


@rounds
@each(activation=["swiglu", "relu2"], sizes=[(128, 96), (64, 80)])
def test_values_are_those_of_the_rounded_weight(activation: str, sizes: tuple[int, int]) -> None:
    layer = spread_layer(activation, sizes)
    made = asked(layer)
    exact = layer.dense()
    layer.rounded = True
    for which, want, plain, error in zip(
        ("w13", "w2"), layer.dense(), exact, made.added_error, strict=True
    ):
        found = dense_of(made, which, activation)
        assert np.allclose(found, want, rtol=1e-7, atol=0)  # a factor is rounded once
        gap = np.linalg.norm(want - plain) / np.linalg.norm(plain)
        assert abs(error - gap) < 1e-6
        assert 0.005 < gap < 0.05
    params = FusedMoe(
        2, *sizes, 2, activation=activation, act_fmt="fp8", bias=True, layout="tiles64e"
    ).params()
    shapes = {param.name: param.shape for param in params}
    for name, value in made.tensors():
        assert shapes[name] == tuple(value.shape)


@rounds
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_to_linear_gives_the_weights_before_rounding(activation: str) -> None:
    """Exact ones, where no block shrank; and they make the same rounded ones again."""
    layer = spread_layer(activation)
    made = bs.MoeWeights.load_state_dict(asked(layer).state_dict())
    assert len(made.added_error) == 2
    back = made.to_linear()
    assert (back.layout, back.added_error) == ("linear", None)
    gains = back.w13_global if made.gated else back.w13_global[:, 0].contiguous()
    again = bs.prepare_moe_weights(
        back.w13, back.w2, w13_scale=back.w13_scale, w2_scale=back.w2_scale,
        w13_global_scale=gains, w2_global_scale=back.w2_global, w13_bias=back.w13_bias,
        w2_bias=back.w2_bias, activation=activation, layout="tiles64e", act_fmt="fp8",
        rounded=True,
    )  # fmt: skip
    for which in ("w13", "w2"):
        first, second = (dense_of(w, which, activation) for w in (made, again))
        assert np.allclose(first, second, rtol=1e-6, atol=0)
    plain = moe.random_layer(2, 128, 96, activation=activation)
    back = asked(plain).to_linear()
    for which, want in zip(("w13", "w2"), plain.dense(), strict=True):
        scale, factor = getattr(back, f"{which}_scale"), getattr(back, f"{which}_global")
        if which == "w13" and activation == "relu2":
            factor = factor[:, 0]
        found = moe.expert_weight(getattr(back, which).numpy(), scale.numpy(), "nvfp4", None,
                                  factor.double().numpy())  # fmt: skip
        assert np.allclose(found, want, rtol=1e-6, atol=0)


def test_what_rounding_changes_is_said() -> None:
    layer = moe.random_layer(2, 64, 64)
    with pytest.warns(UserWarning, match=r"has changed w13 by 2\.\d\d% and w2 by 2\.\d\d% of"):
        asked(layer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounded": False}, "nvfp4 ones with rounded=True"),
        ({"layout": None}, "on the CPU, whose kernels multiply exact weights"),
        ({"layout": "tiles64"}, "layout='tiles64' holds exact weights"),
        ({"act_fmt": None}, "act_fmt=None has no products of 8 bits"),
        ({"act_fmt": "nvfp4"}, "pass act_fmt='fp8' or 'fp8_tensor'"),
        ({"dtype": torch.float16}, "rounded=True is for dtype=torch.bfloat16"),
    ],
)
def test_weights_are_rounded_only_if_asked_for(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked(moe.random_layer(2, 64, 64), **changes)


def test_other_weights_are_not_rounded() -> None:
    with pytest.raises(ValueError, match=r"rounded=True is for nvfp4 weights.*not for mxfp4"):
        asked(moe.random_layer(2, 64, 64, "mxfp4"))
    for byte in (0x7F, 0x80, 0xB0):
        layer = moe.random_layer(2, 64, 64)
        layer.w2_scale[1, 3, 2] = byte
        with pytest.raises(ValueError, match=f"w2_scale of expert 1 has the byte {byte:#x}"):
            asked(layer)


# ---- GEMMs --------------------------------------------------------------------------------------


@rounds
@each(
    activation=["swiglu", "relu2", "none"],
    form=[(128, 2), (256, 4), (0, 2)],
    sizes=[(320, 192), (96, 96)],
)
def test_gemms_of_bytes(activation: str, form: tuple[int, int], sizes: tuple[int, int]) -> None:
    (partial, blocks), (hidden, intermediate) = form, sizes
    sums = {"partial": partial, "fast": not partial, "blocks_k": blocks, "stages": 2}
    of = plan(**BYTES | NVFP4 | sums | {"activation": activation})
    options = {"hidden": hidden, "intermediate": intermediate, "bias": True, "scaled": True}
    moe_harness.run(of, ids_of(60), **options).judge(4e-3)


@rounds
@each(unit=["mma", "wgmma"], activation=["swiglu", "none"])
def test_16_bits_of_the_same_weights(unit: str, activation: str) -> None:
    rows = {"mma": 64, "wgmma": 128}[unit]
    of = plan(**MXFP4 | NVFP4, unit=unit, rows=rows, tokens=16, slices=1, activation=activation)
    options = {"hidden": 160, "intermediate": 96, "bias": True, "scaled": True}
    moe_harness.run(of, ids_of(21), **options).judge(4e-3)


LAYER = FusedMoe(4, 320, 192, 2, "nvfp4", act_fmt="fp8", bias=True, layout="tiles64e")


def bodies_of(spec: FusedMoe) -> list[Pair]:
    """Return the GEMMs for up to 4 tokens and for more."""
    made = []
    for limit, form in ((4, {"rows": 128, "tokens": 8}), (None, {})):
        pair = []
        for part in catalog_moe.PARTS:
            of = plan(**BYTES | NVFP4 | form, activation=spec.activation if part == 1 else "none")
            pair.append(moe_harness.scheduled(of, catalog_moe.gemm_of(spec, part, 4096)))
        made.append(Pair(limit, *pair))
    return made


@rounds
def test_layers_of_few_and_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows agree with float64 on rounded weights, and on what act_fmt makes of x and h."""
    road = replace(catalog_moe.DECODING, bodies=lambda spec, arch, traces: bodies_of(spec))
    monkeypatch.setattr(catalog_moe, "DECODING", road)
    built = library([LAYER], "sm_90a", repr(NVFP4))
    for tokens in (1, 3, 60):
        call = Call(LAYER, tokens, "half_dropped")(built)
        names = [launch.kernel.removeprefix(f"{LAYER.name}_") for launch in call.run.launches]
        assert names[0] == "prepare_bytes"
        assert names[2] == "requantize_bytes"
        call.judge(0.08, 0.006)
    assert call.out.abs().sum() > 0


def test_where_8_bits_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and many, on GPUs with wgmma, of a layout that is asked for."""
    buckets = catalog_moe.MOE_BUCKETS
    monkeypatch.setattr(catalog_moe, "MOE_BUCKETS", (buckets[0], buckets[-1]))
    spec = FusedMoe(8, 128, 128, 2, "nvfp4", act_fmt="fp8", layout="tiles64e")
    assert spec.name == "fused_moe_nvfp4_e8_k2_h128_i128_swiglu_afp8_tiles64e_bf16"
    for level, said in (("sm_90a", True), ("sm_100a", False)):
        for rows in (spec, replace(spec, act_fmt=None)):
            made = {derive(pair[1]).by_bytes for pair in catalog_moe.bodies(rows, level, {})}
            assert made == {said and rows is spec}
