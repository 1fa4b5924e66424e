"""INT4 weights that become E4M3 (layout "tiles64e"): words, and GEMMs that scale groups' sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from tvm.s_tir import Schedule

import blockscale as bs
from blockscale import emulator
from blockscale.base.errors import LoweringError
from blockscale.catalog import moe as catalog_moe
from blockscale.lower.moe.kernel import Pair
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.ops.moe import weights as weights_of_moe
from blockscale.schedules.moe import wgmma
from blockscale.schedules.moe.wgmma_tiles import expected_tokens
from blockscale.specs import FusedMoe
from blockscale.tir.moe.tiles import moe_tiles
from tests.kit import moe_harness
from tests.kit.gpu_library import library
from tests.kit.moe_harness import BYTE_TILE, Of, plan
from tests.kit.pairwise import each, few
from tests.kit.tiles64 import codes_of
from tests.moe.test_moe_gemm import ids_of
from tests.moe.test_moe_library import Call
from tests.moe.test_moe_weights import given, slow_order
from tests.reference import moe as moe

INT4: dict[str, Any] = {"fmt": "int4", "group": 128, "bytewise": True}
BYTES: dict[str, Any] = INT4 | BYTE_TILE

# ---- Decoding -----------------------------------------------------------------------------------

DECODE = """#include "moe_bytes.cuh"
struct Form {{
  static constexpr int FORMAT = BS_MOE_INT4, GROUP = 128, ZEROS = {zeros}, BF16 = 0, E4M3 = 1;
}};
extern "C" __global__ void decode(const uint32_t *words, const uint32_t *zeros, uint32_t *out,
                                  int count) {{
  int i = blockIdx.x * 32 + threadIdx.x;
  if (i >= count) return;
  BsDecodeBytes<Form>(uint2{{zeros[2 * i], zeros[2 * i + 1]}}).decode(words[i], out + 2 * i);
}}
"""


@pytest.mark.parametrize("zeros", [False, True])
def test_every_difference_is_exact(zeros: bool) -> None:
    """All codes in all eight places of a word, with all zero points of rows g and g + 8."""
    codes = np.array([np.roll(np.arange(16), n)[:8] for n in range(16)])  # nibble: row, byte
    words = sum(codes[:, n].astype(np.uint32) << (4 * n) for n in range(8))
    low, high = np.meshgrid(np.arange(17), np.arange(17)) if zeros else (np.array([8]),) * 2
    points = np.stack([low.reshape(-1), high.reshape(-1)], -1)
    stored = points.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    words, pairs = np.repeat(words, len(points)), np.tile(stored, (len(codes), 1))
    text, out = DECODE.format(zeros=int(zeros)), np.zeros((len(words), 2), np.uint32)
    report = emulator.launch(
        compile_cuda_source(text, "sm_90a", ptx=True).image.decode(), entry="decode",
        grid=-(-len(words) // 32), block=32, args=[words, pairs, out, len(words)],
    )  # fmt: skip
    report.check()
    found = out.view(ml_dtypes.float8_e4m3fn).reshape(-1, 2, 4).astype(np.float64)
    nibbles = codes.reshape(-1, 4, 2).transpose(0, 2, 1)[:, None]  # row, byte
    want = (nibbles - points[None, :, :, None]).reshape(-1, 2, 4)
    assert (found * 2.0**9 == want).all()
    assert len(np.unique(want)) == (32 if zeros else 16)


# ---- Weights ------------------------------------------------------------------------------------


def dense_of(made: Any, which: str, activation: str) -> np.ndarray:
    """Return a weight [E, R, K] float64 of layout "tiles64e", read element by element."""
    first = which == "w13"
    cols = made.hidden if first else made.intermediate
    count = made.rows if first else made.hidden
    order = np.array(slow_order(count, made.intermediate, activation, which))
    out = np.full((made.experts, count, cols), np.nan)
    for e in range(made.experts):
        codes = codes_of(getattr(made, which)[e].numpy(), "int4")
        scale = getattr(made, f"{which}_scale")[e].contiguous().numpy()
        parts = scale.view(ml_dtypes.bfloat16).reshape(*scale.shape[:2], 4, 8, 2, -1)
        factor = getattr(made, f"{which}_global")[e].double().numpy()
        row, k = np.indices(codes.shape)
        own = parts[row // 64, k // made.group, row % 64 // 16, row % 8, row % 16 // 8]
        own = own.astype(np.float64)
        value = (codes - (own[..., 1] if made.zero else 8)) * own[..., 0]
        there = order >= 0
        assert not value[~there].any()
        assert not value[:, cols:].any()
        out[e, order[there]] = (value * factor[:, None])[there, :cols]
    return out


@each(activation=["swiglu", "relu2"], group=[64, 128], zeros=[False, True])
def test_values_are_those_of_the_weight(activation: str, group: int, zeros: bool) -> None:
    layer = moe.random_layer(
        2, 256, 128, "int4", group=group, zeros=zeros, activation=activation, bias=True,
        scale_dtype="bfloat16",
    )  # fmt: skip
    halves = (2, 2) if activation != "relu2" else (2,)
    layer.w13_global_scale = np.linspace(0.5, 2, 4)[: np.prod(halves)].reshape(halves)
    layer.w13_global_scale = layer.w13_global_scale.astype(np.float32)
    layer.w2_global_scale = np.array([0.75, 3], np.float32)
    made = bs.prepare_moe_weights(**given(layer, layout="tiles64e"))
    assert (made.layout, made.dtype) == ("tiles64e", torch.bfloat16)
    for which, want in zip(("w13", "w2"), layer.dense(), strict=True):
        assert np.allclose(dense_of(made, which, activation), want, rtol=1e-7, atol=0)
    back, plain = made.to_linear(), bs.prepare_moe_weights(**given(layer, layout="linear"))
    assert (back.layout, back.dtype) == ("linear", None)
    for (name, value), (other, wanted) in zip(back.tensors(), plain.tensors(), strict=True):
        assert name == other
        assert torch.equal(value, wanted), name


@pytest.mark.parametrize(
    ("form", "zeros", "dtype", "act_fmt", "want"),
    [
        (("int4", 128), False, torch.bfloat16, "fp8", True),
        (("int4", 128), False, torch.bfloat16, "fp8_tensor", True),
        (("int4", 128), False, torch.bfloat16, None, False),
        (("int4", 128), False, torch.float16, "fp8", False),
        (("int4", 128), True, torch.bfloat16, "fp8", False),
        (("int4", 64), False, torch.bfloat16, "fp8", False),
        (("mxfp4", 32), False, torch.bfloat16, "fp8", True),
    ],
)
def test_which_weights_act_fmt_brings_into_it(
    form: tuple[str, int], zeros: bool, dtype: torch.dtype, act_fmt: str | None, want: bool
) -> None:
    """On a GPU, of which 8 bits are faster."""
    assert weights_of_moe._prefers_bytes(form, zeros, dtype, act_fmt) == want


@pytest.mark.parametrize(
    ("group", "dtype", "said"),
    [
        (32, torch.bfloat16, "not for int4 in groups of 32"),
        (128, torch.float16, "dtype=torch.bfloat16, not for torch.float16"),
    ],
)
def test_weights_that_it_does_not_hold(group: int, dtype: torch.dtype, said: str) -> None:
    layer = moe.random_layer(2, 128, 128, "int4", group=group)
    with pytest.raises(ValueError, match=said):
        bs.prepare_moe_weights(**given(layer, layout="tiles64e") | {"dtype": dtype})


# ---- GEMMs --------------------------------------------------------------------------------------


def right(of: Of, ids: np.ndarray, limit: float = 4e-3, **options: Any) -> None:
    """Fail unless the kernel's rows are right."""
    moe_harness.run(of, ids, **options).judge(limit)


FORMS = [(256, 2), (256, 4), (128, 4)]
"""Rows, and blocks of 64 k in a stage."""


@each(
    activation=["swiglu", "relu2", "none"],
    form=FORMS,
    kind=[(128, 0), (128, 1), (64, 0), (64, 1)],
    k=[128, 384, 640],
)
def test_sums_of_groups(activation: str, form: tuple[int, int], kind: Any, k: int) -> None:
    """K that ends within a stage, rows within a tile, several tiles and stages in a small ring."""
    (rows, blocks), (group, zeros) = form, kind
    sums = {"partial": group, "group": group, "zeros": zeros, "stages": 2}
    of = plan(**BYTES | sums | {"rows": rows, "blocks_k": blocks, "activation": activation})
    hidden, intermediate = (k, 128) if of.gather else (256, k)
    if group == 64:
        hidden, intermediate = hidden + 64, intermediate - 64
    right(of, ids_of(60), hidden=hidden, intermediate=intermediate, bias=True, scaled=True)


@pytest.mark.parametrize(("rows", "tokens"), few([(256, 8), (256, 80), (128, 152), (256, 112)]))
def test_widths(rows: int, tokens: int) -> None:
    of = plan(**BYTES | {"rows": rows, "tokens": tokens, "blocks_k": 2 if rows == 256 else 4})
    right(of, ids_of(170), hidden=256, intermediate=128)


@each(unit=["mma", "wgmma"], activation=["swiglu", "none"], zeros=[0, 1], group=[64, 128])
def test_16_bits_of_the_same_bytes(unit: str, activation: str, zeros: int, group: int) -> None:
    rows = {"mma": 64, "wgmma": 128}[unit]
    form = INT4 | {"group": group, "zeros": zeros}
    of = plan(**form, unit=unit, rows=rows, tokens=16, slices=1, activation=activation)
    sizes = {"hidden": 256, "intermediate": 128}
    right(of, ids_of(21), **sizes, bias=True, scaled=True, rounded=True)


def test_a_scale_and_a_factor_twice() -> None:
    """A text of the TensorIR is replaced: the kernel is another one."""
    of = plan(**BYTES)
    text = moe_harness.scheduled(of, of.gemm(3, 256, 512, 2)).script()
    said = "C_local[vt, vi, vr])"
    assert text.count(f", {said}") == 1
    twice = text.replace(f", {said}", f", T.float32(2.0) * {said}")
    plain, edited = (emit(derive(tvm.script.from_source(one)), "moe") for one in (text, twice))
    assert "__fmul_rn(2.0f, c[0]" in edited
    assert "__fmul_rn(2.0f, c[0]" not in plain


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("P_local[vg, vt, vi, vr], C_local", "P_local[vg + 1, vt, vi, vr], C_local", "no MMA"),
        ("C_local[vt, vi, vr])", "C_local[vt, vi, vr + 8])", "another sum than it writes"),
        (
            "P_local[vg, vt, vi, vr], C_local",
            "P_local[vg, vt, vi, vr + 1], C_local",
            "to that of its rows",
        ),
    ],
)
def test_updates_that_are_not_lowered(old: str, new: str, said: str) -> None:
    of = plan(**BYTES)
    text = moe_harness.scheduled(of, of.gemm(3, 256, 512, 2)).script()
    assert text.count(old) >= 1
    edited = text.replace(f", {old}", f", {new}")
    assert edited != text
    with pytest.raises(LoweringError, match=said):
        derive(tvm.script.from_source(edited))


@pytest.mark.parametrize("blocks", [2, 4])
def test_sums_of_groups_are_those_that_the_text_says(blocks: int) -> None:
    of = plan(**BYTES | {"blocks_k": blocks})
    made = derive(moe_harness.scheduled(of, of.gemm(3, 256, 512, 2)))
    assert made.apart == 128
    text = emit(made, "moe")
    assert text.count("bs_decoded(bank") == blocks  # before each wait for products but the last
    assert text.count("bs_wgmma_wait<0>") == blocks + 1
    assert "bs_wgmma_wait<1>" not in text


def test_an_odd_number_of_sums_of_a_stage_is_not_lowered() -> None:
    """Its fragments would be decoded into those that the stage before multiplies."""
    of = plan(**BYTES | {"rows": 128})
    gemm = of.gemm(3, 256, 512, 2)
    sch = Schedule(tvm.IRModule({"main": moe_tiles(gemm)}))
    wgmma.decided(sch, gemm, of.tile, of.stages)
    with pytest.raises(LoweringError, match="1 sums of a stage, whose fragments lie in two banks"):
        derive(sch.mod["main"])


@pytest.mark.parametrize(
    "form",
    [
        {"tokens": 104},
        {"tokens": 104, "blocks_k": 4},
        {"tokens": 96, "zeros": 1},
        {"tokens": 96, "group": 64, "partial": 64},
    ],
)
def test_products_run_beside_decoding(form: dict[str, Any]) -> None:
    """ptxas serialises no products, and nothing spills; K of 45 blocks of 64 or of 46."""
    of = plan(**BYTES | form | {"stages": 3})
    k = 2880 if of.group == 64 else 2944
    made = compile_cuda_source(
        emit(derive(moe_harness.scheduled(of, of.gemm(3, 256, k, 2))), "moe"), "sm_90a"
    )
    assert not made.losses
    assert not any(found["spills"] for found in made.resources)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"partial": 64}, "int4 in groups of 128 are not summed up by 64"),
        ({"group": 32, "partial": 64}, "int4 in groups of 32 are not summed up by 64"),
        ({"tokens": 128}, "192 sums of a thread are more than 168"),
        ({"rows": 128}, "a stage with sums of groups has four blocks of K"),
    ],
)
def test_illegal_tiles(changes: dict[str, Any], said: str) -> None:
    of = plan(**BYTES | changes)
    assert said in str(of.tile.illegal(of.gemm(3, 256, 128, 2)))


# ---- Functions ----------------------------------------------------------------------------------


def spec_of(**more: Any) -> FusedMoe:
    options: dict[str, Any] = {"act_fmt": "fp8", "group": 128, "layout": "tiles64e"}
    return FusedMoe(4, 256, 128, 2, "int4", **options | more)


def test_where_8_bits_are_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of an expert on GPUs with wgmma, of rows in E4M3; buckets beside the limit."""
    spec, limit = spec_of(), catalog_moe.BYTE_TOKENS["int4"]
    gemm, buckets = catalog_moe.gemm_of(spec, 1), catalog_moe.MOE_BUCKETS
    few = sum(expected_tokens(gemm, bucket.rows) < limit for bucket in buckets)
    chosen = (buckets[0], *buckets[few - 1 : few + 1], buckets[-1])
    monkeypatch.setattr(catalog_moe, "MOE_BUCKETS", chosen)
    for level, least in (("sm_90a", limit), ("sm_100a", math.inf)):
        found = catalog_moe.bodies(spec, level, {})
        made = [derive(pair[1]).by_bytes for pair in found]
        each = [expected_tokens(gemm, bucket.rows) for bucket in chosen]
        assert made == [tokens >= least for tokens in each]
        assert not made[0]
    for options, said in (
        ({"fast_accum": True}, "sums of int4 are those of groups"),
        ({"group": 32}, "groups of 64 or 128.*group=32"),
        ({"dtype": "float16"}, "dtype='float16'"),
    ):
        with pytest.raises(ValueError, match=said):
            spec_of(**options)


def bodies_of(spec: FusedMoe) -> list[Pair]:
    """Return the GEMMs for up to 4 tokens, in 16 bits, and for more, in 8 bits."""
    made = []
    few = {**INT4, "tokens": 16, "slices": 1}
    for limit, rows, form in ((4, 1, few), (None, 4096, BYTES)):
        pair = []
        for part in catalog_moe.PARTS:
            own = {"group": spec.group, "zeros": spec.zero}
            own |= {"partial": spec.group} if form is BYTES else {}
            of = plan(**form | own, activation=spec.activation if part == 1 else "none")
            pair.append(moe_harness.scheduled(of, catalog_moe.gemm_of(spec, part, rows)))
        made.append(Pair(limit, *pair))
    return made


def test_layers_are_those_of_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both roads of a function: rows agree with float64 on what act_fmt makes of x and h."""
    spec = spec_of(group=64, zero=True, bias=True, act_fmt="fp8_tensor")
    road = replace(catalog_moe.DECODING, bodies=lambda spec, arch, traces: bodies_of(spec))
    monkeypatch.setattr(catalog_moe, "DECODING", road)
    built = library([spec], "sm_90a", repr(BYTES))
    # In 16 bits weights are rounded, so that codes of h become their neighbours.
    for tokens, tail, bound in ((3, "requantize", 0.02), (60, "requantize_bytes", 1e-3)):
        call = Call(spec, tokens, "half_dropped")(built)
        names = [launch.kernel.removeprefix(f"{spec.name}_") for launch in call.run.launches]
        assert names[2] == tail
        call.judge(0.08, bound)
        assert call.out.abs().sum() > 0
