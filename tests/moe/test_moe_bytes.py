"""MXFP4 weights that become E4M3 (layout "tiles64e"): words, scales, and GEMMs of 8 bits."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm

import blockscale as bs
from blockscale import emulator
from blockscale.base.errors import LoweringError
from blockscale.catalog import moe as catalog_moe
from blockscale.lower.moe.kernel import Pair
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.ops.moe import rows as moe_rows
from blockscale.ops.moe import weights as moe_weights
from blockscale.specs import FusedMoe
from blockscale.specs.plans.moe import E4M3
from tests.kit import moe_harness
from tests.kit.gpu_library import library
from tests.kit.moe_harness import BYTE_ORDER, BYTE_TILE, Of, plan
from tests.kit.pairwise import each, few
from tests.kit.tiles64 import BITS, E2M1, codes_of
from tests.moe.test_moe_gemm import ids_of
from tests.moe.test_moe_kernels import SORT_SHARED, bits, launch
from tests.moe.test_moe_library import Call
from tests.moe.test_moe_weights import given, slow_order
from tests.reference import core as ref
from tests.reference import moe as moe

MXFP4 = {"fmt": "mxfp4", "group": 32, "bytewise": True}
BYTES: dict[str, Any] = MXFP4 | BYTE_TILE

# ---- Decoding -----------------------------------------------------------------------------------

DECODE = """#include "moe_bytes.cuh"
struct Form {{
  static constexpr int FORMAT = BS_MOE_{fmt}, GROUP = {group}, ZEROS = 0;
  static constexpr int BF16 = {bf16}, E4M3 = {e4m3};
}};
extern "C" __global__ void decode(const uint32_t *words, const uint32_t *pairs, uint32_t *out,
                                  int count) {{
  int i = blockIdx.x * 32 + threadIdx.x;
  if (i >= count) return;
  BsDecodeBytes<Form>(uint2{{pairs[i], 0}}).decode(words[i], out + {made} * i);
}}
"""


def decoded(
    words: np.ndarray, pairs: np.ndarray, dtype: str, fmt: str = "MXFP4", group: int = 32
) -> np.ndarray:
    """Return [words, slot a0..a3, k even or odd] of what device code makes of words, float64."""
    by_bytes = dtype == E4M3
    made = 2 if by_bytes else 4
    form = {"bf16": int(not by_bytes), "e4m3": int(by_bytes), "fmt": fmt, "group": group}
    text = DECODE.format(**form, made=made)
    out = np.zeros((len(words), made), np.uint32)
    code = compile_cuda_source(text, "sm_90a", ptx=True).image.decode()
    report = emulator.launch(
        code, entry="decode", grid=-(-len(words) // 32), block=32,
        args=[words, pairs, out, len(words)],
    )  # fmt: skip
    report.check()
    if not by_bytes:
        return moe_harness.values(out.view(np.uint16).reshape(-1, 4, 2), "bfloat16")
    taken = out.view(ml_dtypes.float8_e4m3fn).reshape(-1, 2, 2, 2)  # row, odd, pair
    return taken.astype(np.float64).transpose(0, 3, 1, 2).reshape(-1, 4, 2)


def all_codes() -> tuple[np.ndarray, np.ndarray]:
    """Return codes [16, slot, odd], each in every place once, and the words [16] that have them."""
    codes = np.array([np.roll(np.arange(16), n)[:8] for n in range(16)]).reshape(-1, 4, 2)
    words = np.zeros(len(codes), np.uint32)
    for slot, places in BITS["e2m1e"].items():
        for bit, place in places.items():
            for odd in range(2):
                field = (codes[:, slot, odd].astype(np.uint32) >> bit & 1) << (16 * odd + place)
                words |= field.astype(np.uint32)
    return codes, words


@pytest.mark.parametrize("dtype", [E4M3, "bfloat16"])
def test_every_code_at_every_exponent_is_exact(dtype: str) -> None:
    """All codes in all eight places of a word, rows of all pairs of scale bytes."""
    least, most = moe_rows.LEAST, 237
    codes, words = all_codes()
    low, high = np.meshgrid(np.arange(least, most + 1), np.arange(least, most + 1))
    pairs = (high << 8 | low).reshape(-1).astype(np.uint32)
    found = decoded(np.repeat(words, len(pairs)), np.tile(pairs, len(words)), dtype)
    value = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]
    scale = np.stack([low.reshape(-1), high.reshape(-1)], -1)[:, [0, 1, 0, 1]]  # of rows g, g + 8
    left = 231 if dtype == E4M3 else 237 + 16
    want = value[:, None] * 2.0 ** (scale[None, :, :, None] - left)
    assert (found == want.reshape(-1, 4, 2)).all()
    assert len(np.unique(np.abs(want))) > 8


# ---- Weights ------------------------------------------------------------------------------------


def spread_layer(spread: int, activation: str = "swiglu") -> moe.Layer:
    """Return a layer, each of whose rows has blocks so many exponents apart, and dead ones."""
    layer = moe.random_layer(2, 128, 96, "mxfp4", activation=activation, bias=True)
    rng = np.random.default_rng(spread)
    for name in ("w13", "w2"):
        scale, codes = getattr(layer, f"{name}_scale"), getattr(layer, name)
        top = rng.integers(40, 180, scale.shape[:2])[..., None]
        scale[:] = top - rng.integers(0, spread + 1, scale.shape)
        scale[..., :1], scale[..., 1:2] = top, top - spread
        dead = codes.reshape(*scale.shape, 16)
        dead[:, ::3, 2] &= 0x88  # of zeros, some of them negative
        scale[:, ::3, 2] = rng.integers(0, 255, scale[:, ::3, 2].shape)
        codes[:, 5] = 0
    rows = layer.w13.shape[1]
    halves = (2, 2) if activation != "relu2" else (2,)
    layer.w13_global_scale = np.exp2(rng.uniform(-1, 1, halves)).astype(np.float32)
    layer.w2_global_scale = np.exp2(rng.uniform(-1, 1, 2)).astype(np.float32)
    assert rows in (96, 192)
    return layer


def dense_of(made: Any, which: str, activation: str) -> np.ndarray:
    """Return a weight [E, R, K] float64 of layout "tiles64e", read element by element."""
    first = which == "w13"
    cols = made.hidden if first else made.intermediate
    count = made.rows if first else made.hidden
    order = np.array(slow_order(count, made.intermediate, activation, which))
    out = np.full((made.experts, count, cols), np.nan)
    for e in range(made.experts):
        codes = codes_of(getattr(made, which)[e].numpy(), "e2m1e")
        scale = getattr(made, f"{which}_scale")[e].numpy()
        halves = scale.reshape(*scale.shape[:2], 4, 8, 2, 2).astype(np.int64)
        factor = getattr(made, f"{which}_global")[e].double().numpy()
        row, k = np.indices(codes.shape)
        byte = halves[row // 64, k // 64, row % 64 // 16, row % 8, k % 64 // 32, row % 16 // 8]
        value = np.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8] * 2.0 ** (byte - 237)
        there = order >= 0
        assert (byte[there, :cols] >= moe_rows.LEAST).all()
        assert not value[~there].any()
        assert not value[:, cols:].any()
        out[e, order[there]] = (value * factor[:, None])[there, :cols]
    return out


@each(activation=["swiglu", "relu2"], spread=[0, 11])
def test_values_are_those_of_the_weight(activation: str, spread: int) -> None:
    layer = spread_layer(spread, activation)
    made = bs.prepare_moe_weights(**given(layer, layout="tiles64e"))
    assert made.layout == "tiles64e"
    for which, want in zip(("w13", "w2"), layer.dense(), strict=True):
        found = dense_of(made, which, activation)
        assert np.allclose(found, want, rtol=1e-7, atol=0)  # a factor is rounded once
    back = made.to_linear()
    assert back.layout == "linear"
    again = bs.prepare_moe_weights(
        back.w13, back.w2, fmt="mxfp4", w13_scale=back.w13_scale, w2_scale=back.w2_scale,
        w13_global_scale=back.w13_global if made.gated else back.w13_global[:, 0].contiguous(),
        w2_global_scale=back.w2_global, w13_bias=back.w13_bias, w2_bias=back.w2_bias,
        activation=activation, layout="tiles64e",
    )  # fmt: skip
    for which, want in zip(("w13", "w2"), layer.dense(), strict=True):
        assert np.allclose(dense_of(again, which, activation), want, rtol=1e-6, atol=0)


def test_exponents_too_far_apart_are_refused_or_keep_16_bits() -> None:
    layer = spread_layer(12)
    with pytest.raises(ValueError, match=r"w13_scale of expert 0, row \d+ has exponents 12 apart"):
        bs.prepare_moe_weights(**given(layer, layout="tiles64e"))
    plain = bs.prepare_moe_weights(**given(layer, layout="linear"))
    with pytest.warns(UserWarning, match="at most 11 apart.*'tiles64', for products of 16 bits"):
        kept = moe_weights._to_rows("here", plain, torch.bfloat16, must=False)
    assert kept is None


def test_act_fmt_alone_asks_for_nothing_on_a_cpu() -> None:
    layer = moe.random_layer(2, 64, 64, "mxfp4")
    assert bs.prepare_moe_weights(**given(layer, act_fmt="fp8")).layout == "linear"
    with pytest.raises(ValueError, match="act_fmt='e4m3' is not known"):
        bs.prepare_moe_weights(**given(layer, act_fmt="e4m3"))
    nvfp4 = given(moe.random_layer(2, 64, 64, "nvfp4"), layout="tiles64e")
    with pytest.raises(ValueError, match="and nvfp4 ones with rounded=True, not for nvfp4"):
        bs.prepare_moe_weights(**nvfp4)


# ---- GEMMs --------------------------------------------------------------------------------------


def right(of: Of, ids: np.ndarray, limit: float = 4e-3, **options: Any) -> None:
    """Fail unless the kernel's rows are right."""
    moe_harness.run(of, ids, **options).judge(limit)


@each(
    activation=["swiglu", "relu2", "none"],
    form=[(128, 2), (256, 4), (128, 4), (0, 2), (0, 4)],
    sizes=[(320, 192), (96, 96), (256, 448)],
)
def test_gemms_of_bytes(activation: str, form: tuple[int, int], sizes: tuple[int, int]) -> None:
    """K that ends within a stage, rows within a tile, several tiles and stages in a small ring."""
    hidden, intermediate = sizes
    partial, blocks = form
    sums = {"partial": partial, "fast": not partial, "blocks_k": blocks, "stages": 2}
    of = plan(**BYTES | sums | {"activation": activation})
    right(of, ids_of(60), hidden=hidden, intermediate=intermediate, bias=True, scaled=True)


@pytest.mark.parametrize(("rows", "tokens"), few([(256, 8), (256, 40), (128, 152), (256, 112)]))
def test_widths(rows: int, tokens: int) -> None:
    of = plan(**BYTES | {"rows": rows, "tokens": tokens})
    right(of, ids_of(170), hidden=192, intermediate=64)


@each(activation=["swiglu", "none"], sizes=[(320, 192), (96, 96)], stages=[2, 3])
def test_one_unit_of_a_warp(activation: str, sizes: tuple[int, int], stages: int) -> None:
    """128 rows: it is decoded when the products of the stage before are done."""
    hidden, intermediate = sizes
    of = plan(**BYTES | {"activation": activation, "rows": 128, "stages": stages})
    right(of, ids_of(60), hidden=hidden, intermediate=intermediate, bias=True, scaled=True)


@each(unit=["mma", "wgmma"], activation=["swiglu", "none"])
def test_16_bits_of_the_same_bytes(unit: str, activation: str) -> None:
    rows = {"mma": 64, "wgmma": 128}[unit]
    of = plan(**MXFP4, unit=unit, rows=rows, tokens=16, slices=1, activation=activation)
    right(of, ids_of(21), hidden=160, intermediate=96, bias=True, scaled=True)


@pytest.mark.parametrize(
    "form",
    [
        {"tokens": 96, "blocks_k": 4, "partial": 256},
        {"tokens": 152, "partial": 0, "fast": True},
    ],
)
def test_part_of_a_stage_at_the_end_serialises_no_products(form: dict[str, Any]) -> None:
    """K of 45 blocks of 64, as gpt-oss has it."""
    of = plan(**BYTES | form | {"stages": 3})
    text = emit(derive(moe_harness.scheduled(of, of.gemm(3, 256, 2880, 2))), "moe")
    made = compile_cuda_source(text, "sm_90a")
    assert not made.losses
    if form["partial"]:
        assert not any(found["spills"] for found in made.resources)


def test_sums_apart_are_what_the_function_says() -> None:
    """An edit of the annotation's text changes when sums are added; one that does not fit fails."""
    of = plan(**BYTES | {"partial": 256, "blocks_k": 4})
    text = moe_harness.scheduled(of, of.gemm(3, 256, 512, 2)).script()
    said = '"blockscale.partial": 256'
    assert text.count(said) == 1
    for channels, count in ((256, 2), (128, 4), (64, 8)):
        edited = derive(
            tvm.script.from_source(text.replace(said, said.replace("256", str(channels))))
        )
        assert edited.partial == channels
        # Of a loop, and of the last run behind it.
        assert emit(edited, "moe").count("+= part[q];") == count + 1
    with pytest.raises(LoweringError, match="192, which does not divide the 256 channels"):
        derive(tvm.script.from_source(text.replace(said, said.replace("256", "192"))))


def test_fast_sums_want_an_attribute() -> None:
    of = plan(**BYTES | {"partial": 0})
    with pytest.raises(LoweringError, match=r"without 'blockscale\.partial'.*no attribute"):
        derive(moe_harness.scheduled(of, of.gemm(3, 256, 256, 2)))
    fast = replace(of, fast=True)
    made = derive(moe_harness.scheduled(fast, fast.gemm(3, 256, 256, 2)))
    assert "part[" not in emit(made, "moe")


def test_partial_is_for_bytes_alone() -> None:
    of = plan(unit="wgmma", rows=256, tokens=24, slices=1, partial=128)
    with pytest.raises(LoweringError, match=r"are not 'blockscale\.stages' alone"):
        derive(moe_harness.scheduled(of, of.gemm(3, 256, 128, 2)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": "mma", "rows": 128}, "eight warps of wgmma"),
        ({"blocks_k": 1}, "has 2 or 4 blocks of K"),
        ({"partial": 96}, "96 channels do not divide the 128 of a stage"),
        ({"partial": 256}, "256 channels do not divide the 128 of a stage"),
        ({"rows": 64}, "eight warps"),
        ({"rows": 128, "tokens": 176}, "176 sums"),
        ({"tokens": 128}, "192 sums"),
    ],
)
def test_illegal_tiles(changes: dict[str, Any], said: str) -> None:
    of = plan(**BYTES | changes)
    assert said in str(of.tile.illegal(of.gemm(3, 256, 128, 2)))


def test_where_8_bits_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens an expert on GPUs with wgmma, of rows in E4M3; buckets beside the limit."""
    spec = FusedMoe(8, 128, 128, 2, "mxfp4", act_fmt="fp8", layout="tiles64e")
    buckets = catalog_moe.MOE_BUCKETS
    few = sum(bucket.rows < 8 for bucket in buckets)
    chosen = (buckets[0], *buckets[few - 1 : few + 1], buckets[-1])
    monkeypatch.setattr(catalog_moe, "MOE_BUCKETS", chosen)
    for level, least in (("sm_90a", 8), ("sm_100a", math.inf)):  # two tokens an expert
        found = catalog_moe.bodies(spec, level, {})
        made = [derive(pair[1]).by_bytes for pair in found]
        assert made == [bucket.rows >= least for bucket in chosen]
    with pytest.raises(
        ValueError, match="layout='tiles64e' is for fmt='mxfp4', 'nvfp4', or 'int4'"
    ):
        FusedMoe(8, 128, 128, 2, "int4", 32, act_fmt="fp8", layout="tiles64e")


# ---- Rows of codes ------------------------------------------------------------------------------


@cache
def source(name: str) -> str:
    """Return the device code of the kernel that quantises rows between the GEMMs."""
    from blockscale.lower.moe import small

    return small.HEADER + small.requantize_bytes_source(name, "bfloat16", "fp8")


@pytest.mark.parametrize(
    ("cols", "ctas"), [(64, 2), (192, 2), (4160, 2), (576, 11), (4160, 3), (16448, 3)]
)
def test_rows_between_become_codes(cols: int, ctas: int) -> None:
    """Of as many rows as the table says; more chunks than a lane holds; a row of zeros.

    Of two CTAs each warp makes a row, of more each CTA.
    """
    rng, rows = np.random.default_rng(cols), 11
    h = ref.round_to(rng.standard_normal((rows + 1, cols)), "bfloat16")
    h[3] = 0
    stored = bits(h, "bfloat16").reshape(len(h), -1, 64)[:, :, list(moe_harness.K_ORDER)]
    scale, codes = np.full(rows + 1, -1, np.float32), np.full((rows + 1, cols), 0x5A, np.uint8)
    count = np.array([1, rows], np.int32)
    args = [np.ascontiguousarray(stored), None, scale, count, codes, cols]
    launch(source("between"), "between", ctas, 256, args)
    found = np.empty((rows + 1, cols // 64, 64), np.uint8)
    found[:, :, list(BYTE_ORDER)] = codes.reshape(rows + 1, -1, 64)
    got = ref.e4m3_decode(found.reshape(rows + 1, cols)) * scale[:, None].astype(np.float64)
    assert (got[:rows] == moe.qdq(h[:rows], "fp8")).all()
    assert (codes[rows:] == 0x5A).all()
    assert scale[rows] == -1


@pytest.mark.parametrize(("rows", "cols"), [(100, 64), (9, 4160)])
def test_rows_of_hidden_become_codes(rows: int, cols: int) -> None:
    """By warps where they are many; few wide ones by teams of eight, one of which makes two."""
    from blockscale.lower.moe import small

    rng = np.random.default_rng(rows)
    x = ref.round_to(rng.standard_normal((rows, cols)), "bfloat16")
    ids, order = np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32)
    table, count = np.zeros((rows, 4), np.int32), np.zeros(4, np.int32)
    codes, scale = np.full((rows + 1, cols), 0x5A, np.uint8), np.full(rows + 1, -1, np.float32)
    args = [
        *(ids, bits(x, "bfloat16"), None, order, table, count, None, None, codes, scale, 0, 1, 1),
        *(rows, cols, cols, 64, 64),
    ]
    text = small.prepare_source("prepare", "bfloat16", "fp8", by_bytes=True)
    launch(small.HEADER + text, "prepare", 3, 1024, args, dynamic_smem=SORT_SHARED + 4 * 32)
    found = np.empty((rows + 1, cols // 64, 64), np.uint8)
    found[:, :, list(BYTE_ORDER)] = codes.reshape(rows + 1, -1, 64)
    got = ref.e4m3_decode(found.reshape(rows + 1, cols)) * scale[:, None].astype(np.float64)
    assert (got[:rows] == moe.qdq(x, "fp8")).all()
    assert (codes[rows:] == 0x5A).all()
    assert scale[rows] == -1


# ---- Functions ----------------------------------------------------------------------------------

LAYERS = (
    FusedMoe(4, 320, 192, 2, "mxfp4", act_fmt="fp8", bias=True, layout="tiles64e"),
    FusedMoe(
        3, 96, 96, 2, "mxfp4", activation="swiglu_oai", act_fmt="fp8_tensor", layout="tiles64e"
    ),
)


def bodies_of(spec: FusedMoe) -> list[Pair]:
    """Return the GEMMs for up to 4 tokens, in 16 bits, and for more, in 8 bits."""
    made = []
    few = {**MXFP4, "tokens": 16, "slices": 1}
    for limit, rows, form in ((4, 1, few), (None, 4096, BYTES)):
        pair = []
        for part in catalog_moe.PARTS:
            of = plan(**form, activation=spec.activation if part == 1 else "none")
            pair.append(moe_harness.scheduled(of, catalog_moe.gemm_of(spec, part, rows)))
        made.append(Pair(limit, *pair))
    return made


@pytest.mark.parametrize("spec", few(LAYERS), ids=lambda spec: spec.name)
def test_layers_are_those_of_their_operands(
    spec: FusedMoe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both roads of a function: rows agree with float64 on what act_fmt makes of x and h."""
    road = replace(catalog_moe.DECODING, bodies=lambda spec, arch, traces: bodies_of(spec))
    monkeypatch.setattr(catalog_moe, "DECODING", road)
    built = library([spec], "sm_90a", repr(BYTES))
    for tokens, tail in ((3, "requantize"), (60, "requantize_bytes")):
        call = Call(spec, tokens, "half_dropped")(built)
        names = [launch.kernel.removeprefix(f"{spec.name}_") for launch in call.run.launches]
        assert names[2] == tail
        assert names[0] == tail.replace("requantize", "prepare")
        call.judge(0.08, 0.006)
        assert call.out.abs().sum() > 0


def test_coded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are codes and scales already: the bits of the layer that makes them itself."""
    road = replace(catalog_moe.DECODING, bodies=lambda spec, arch, traces: bodies_of(spec))
    monkeypatch.setattr(catalog_moe, "DECODING", road)
    specs = [replace(LAYERS[0], coded=coded) for coded in (True, False)]
    for tokens in (3, 60):
        calls = [
            Call(spec, tokens, "half_dropped")(library([spec], "sm_90a", repr(BYTES)))
            for spec in specs
        ]
        assert torch.equal(calls[0].out, calls[1].out)
        assert calls[0].out.abs().sum() > 0
