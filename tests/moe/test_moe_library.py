"""MoE functions as users get them: built into a library, host code and all kernels emulated.

What kernels do by themselves is in test_moe_kernels.py and test_moe_gemm.py; here is how a call
puts them together: buckets, workspace, grids, chunks, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from blockscale import emulator
from blockscale.building.builder import build
from blockscale.catalog import moe as catalog_moe
from blockscale.catalog import road, workloads
from blockscale.lower.moe.kernel import Pair, sources
from blockscale.specs import FusedMoe, MoeRoute
from tests.kit import moe_harness
from tests.kit.gpu_library import library
from tests.kit.pairwise import each, few
from tests.reference import core as ref
from tests.reference import moe as moe

SMS = 3
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def plan(spec, second, **changes):
    """A kernel of GEMM 1, or of GEMM 2, of ``spec``."""
    activation = "none" if second else spec.activation
    form = {"fmt": spec.fmt, "group": spec.group, "zeros": spec.zero, "dtype": spec.dtype}
    return moe_harness.plan(**form, activation=activation, **changes)


def pairs_of(spec, arch):
    """Few tokens with tables of their own, then one table; then wgmma where there is one."""
    narrow = {"tokens": 16, "slices": 1, "blocks_k": 2}
    wide = {"unit": "wgmma", "rows": 128, "slices": 1, "blocks_k": 2, "tokens": 64}
    wide = wide if arch == "sm_90a" else narrow | {"tokens": 64, "rows": 16}
    return [
        (4, plan(spec, False), plan(spec, True, **narrow)),
        (40, plan(spec, False, **narrow), plan(spec, True, **narrow)),
        (None, plan(spec, False, **wide), plan(spec, True, **(wide | {"tokens": 32}))),
    ]


def bodies_of(spec, arch):
    """The scheduled GEMMs of `pairs_of`."""
    gemms = [catalog_moe.gemm_of(spec, part) for part in catalog_moe.PARTS]
    return [
        Pair(limit, *(moe_harness.scheduled(*of) for of in zip(pair, gemms, strict=True)))
        for limit, *pair in pairs_of(spec, arch)
    ]


@pytest.fixture(scope="module")
def built():
    """Return the library of a spec with the kernels of `pairs_of`, built when first asked for."""

    def of(spec, arch="sm_90a"):
        plans = repr(pairs_of(spec, arch)) if isinstance(spec, FusedMoe) else ""
        with pytest.MonkeyPatch.context() as patch:
            of_plans = replace(
                catalog_moe.DECODING, bodies=lambda spec, arch, _: bodies_of(spec, arch)
            )
            patch.setattr(catalog_moe, "DECODING", of_plans)
            return library([spec], arch, plans)

    return of


def layer_of(spec, seed=0, **options):
    return moe.random_layer(
        *(spec.experts, spec.hidden, spec.intermediate, spec.fmt),
        group=spec.group,
        activation=spec.activation,
        zeros=spec.zero,
        bias=spec.bias,
        act_fmt=spec.act_fmt,
        scale_dtype=spec.dtype,
        seed=seed,
        **options,
    )


@cache
def weights_of(spec, seed=0):
    layer = layer_of(spec, seed)
    return layer, moe_harness.prepared(layer, spec.dtype, spec.layout)


class Call:
    """A call of the function of a spec; ``run`` after it holds launches and reports."""

    def __init__(self, spec, tokens, routing="random", seed=0, **options):
        self.spec = spec
        self.layer, self.made = weights_of(spec)
        self.layer.alpha, self.layer.limit = options.get("alpha"), options.get("limit")
        self.ids, self.weights = moe.random_routing(tokens, spec.experts, spec.top_k, routing, seed)
        self.hidden = moe.random_hidden(tokens, spec.hidden, spec.dtype, seed)
        self.out = torch.full((tokens, spec.hidden), float("nan"), dtype=DTYPES[spec.dtype])
        size = spec.workspace_bytes(tokens)
        self.guarded = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
        self.workspace = self.guarded[:size]

    def arguments(self):
        dtype, static = DTYPES[self.spec.dtype], ()
        if self.spec.static_scales:
            scales = (self.layer.a1_scale, self.layer.a2_scale)
            static = tuple(torch.tensor([s], dtype=torch.float32) for s in scales)
        first = ("w13", "w13_scale", "w13_global", "w13_bias")
        second = ("w2", "w2_scale", "w2_global", "w2_bias")
        given = [getattr(self.made, name) for name in (*first, *second)]
        hidden = torch.from_numpy(self.hidden.astype(np.float32)).to(dtype)
        if self.spec.coded:
            rows = moe.coded_rows(self.hidden, self.spec.act_fmt, self.layer.a1_scale)
            hidden = torch.from_numpy(rows)
        return [
            hidden,
            torch.from_numpy(self.ids.astype(np.int32)),
            torch.from_numpy(self.weights),
            *(t for t in given if t is not None),
            *static,
            *(None if v is None else float(v) for v in (self.layer.alpha, self.layer.limit)),
            *(self.out, self.workspace),
        ]

    def __call__(self, library, arch="sm_90a", sms=SMS):
        self.run = emulator.run_module(
            library, self.spec.name, *self.arguments(), target=arch, multiprocessors=sms
        )
        self.run.check()
        for report in self.run.reports:  # GEMMs multiply rows that a block lacks, and store none
            wrong = [h for h in report.hazards if h.kind != "uninitialised read"]
            assert not wrong, "\n".join(map(str, wrong))
        assert (self.guarded[len(self.workspace) :] == 0xFF).all()
        return self

    def judge(self, bound=1e-2, median=6e-3):
        """Rows differ from the float64 reference by what rounding to 16 bits may do."""
        want = moe.fused_moe(self.hidden, self.layer, self.ids, self.weights, self.spec.dtype)
        got = self.out.float().numpy().astype(np.float64)
        length = np.sqrt((want**2).sum(1))
        error = np.sqrt(((got - want) ** 2).sum(1))
        assert (error[length == 0] == 0).all()
        relative = error[length > 0] / length[length > 0]
        assert (relative < bound).all(), relative.max()
        assert not (np.sort(relative)[len(relative) // 2 :][:1] > median).any()


PLAIN = FusedMoe(4, 128, 64, 2, layout="tiles64")


@each(tokens=[1, 4, 40, 41], routing=moe.ROUTINGS)
def test_each_bucket(built, tokens, routing):
    """Every token gets its experts' sum, whoever they are; tokens without experts get zeros."""
    call = Call(PLAIN, tokens, routing)(built(PLAIN))
    call.judge()
    names = [launch.kernel.removeprefix(f"{PLAIN.name}_") for launch in call.run.launches]
    bucket = 0 if tokens <= 4 else 1 if tokens <= 40 else 2
    gemms = [("gemm0", "gemm1"), ("gemm2", "gemm1"), ("gemm3", "gemm4")][bucket]
    assert names == ["prepare", *gemms, "combine"]
    assert [launch.programmatic for launch in call.run.launches] == [False, True, True, True]


@pytest.mark.parametrize(("tokens", "share", "tile"), [(3, 1, 0), (41, 1, 2), (41, 0.5, 1)])
def test_results_of_slots(built, tokens, share, tile):
    """Those that the layer adds up, of the same bits; nobody writes those of slots without one.

    The bucket is that of the slots that are expected to have an expert.
    """
    spec = replace(PLAIN, slots=True)
    whole = Call(PLAIN, tokens, "random")(built(PLAIN))
    hidden, ids, weights, *others, _, _ = whole.arguments()
    out = torch.full((tokens, spec.top_k, spec.hidden), float("nan"), dtype=torch.bfloat16)
    workspace = torch.full((spec.workspace_bytes(tokens),), 0xFF, dtype=torch.uint8)
    given = hidden, ids, *others, float(share), out, workspace
    run = emulator.run_module(built(spec), spec.name, *given, target="sm_90a", multiprocessors=SMS)
    run.check()
    names = [launch.kernel.removeprefix(f"{spec.name}_") for launch in run.launches]
    assert names == ["prepare", *(("gemm0", "gemm1"), ("gemm2", "gemm1"), ("gemm3", "gemm4"))[tile]]
    total = torch.zeros(tokens, spec.hidden, dtype=torch.float64)
    for j in range(spec.top_k):
        there = ((ids[:, j] >= 0) & (ids[:, j] < spec.experts))[:, None]
        added = (weights[:, j, None].double() * out[:, j].double() + total).float().double()
        total = torch.where(there, added, total)
        assert out[:, j].isnan().all(1).equal(~there[:, 0])
    assert torch.equal(total.float().to(torch.bfloat16), whole.out)


def test_slots_want_layout_tiles64():
    with pytest.raises(ValueError, match="slots=True has no kernel with layout='128x4'"):
        FusedMoe(4, 128, 64, 2, act_fmt="nvfp4", layout="128x4", slots=True)


SPECS = (
    FusedMoe(3, 96, 96, 2, "mxfp4", activation="swiglu_oai", bias=True, layout="tiles64"),
    FusedMoe(3, 128, 128, 2, "int4", group=128, dtype="float16", layout="tiles64"),
    FusedMoe(3, 64, 96, 1, "int4", group=32, zero=True, activation="relu2", layout="tiles64"),
    FusedMoe(3, 192, 64, 3, "int4", group=64, zero=True, bias=True, layout="tiles64"),
    FusedMoe(3, 80, 112, 2, "nvfp4", activation="gelu_tanh", dtype="float16", layout="tiles64"),
    FusedMoe(3, 112, 80, 2, activation="relu2", bias=True, layout="tiles64"),
)


@pytest.mark.always
@pytest.mark.parametrize("spec", few(SPECS, every=3), ids=lambda spec: spec.name)
def test_formats_and_activations(built, spec):
    """Sizes that fill no tile, biases, zero points, groups, pairs and single rows."""
    for tokens in (3, 50):
        Call(spec, tokens, "half_dropped")(built(spec)).judge()


@pytest.mark.parametrize(
    "spec", few([SPECS[5], PLAIN, SPECS[0], SPECS[4]], every=2), ids=lambda spec: spec.activation
)
def test_nans_stay(built, spec):
    """A token with a NaN has a row of NaNs, whatever limits its gates; others do not."""
    call, same = Call(spec, 9), Call(spec, 9)
    call.hidden[4, 3] = np.nan
    for each_call in (call, same):
        each_call(built(spec))
    others = np.arange(9) != 4
    assert call.out[4].isnan().all()
    assert torch.equal(call.out[others], same.out[others])


QUANTIZED = (
    FusedMoe(3, 128, 160, 2, "mxfp4", act_fmt="fp8", layout="tiles64"),
    FusedMoe(3, 128, 96, 2, act_fmt="fp8_tensor", dtype="float16", layout="tiles64"),
    FusedMoe(3, 96, 80, 2, act_fmt="nvfp4", activation="swiglu_oai", bias=True, layout="tiles64"),
    FusedMoe(3, 64, 64, 2, "int4", group=64, act_fmt="fp8", activation="relu2", layout="tiles64"),
    FusedMoe(3, 96, 160, 2, "mxfp4", act_fmt="mxfp8", activation="swiglu_oai", layout="tiles64"),
    FusedMoe(3, 160, 96, 2, "mxfp4", act_fmt="mxfp4", bias=True, layout="tiles64"),
)


@pytest.mark.parametrize("spec", few(QUANTIZED, every=3), ids=lambda spec: spec.name)
def test_quantized_activations(built, spec):
    """Both GEMMs' operands are rounded as act_fmt says: an intermediate one next to a tie may move.

    A step of E4M3 is up to 1/8 of a number, of E2M1 1/2: few of a row's numbers, but among squares
    (relu2) one may be most of the row.
    """
    for tokens, routing in ((2, "random"), (50, "half_dropped")):
        call = Call(spec, tokens, routing)(built(spec))
        assert [launch.kernel.rpartition("_")[2] for launch in call.run.launches][2] == "requantize"
        call.judge(0.08, 0.012)


@pytest.mark.parametrize("spec", few([QUANTIZED[0], QUANTIZED[2]]), ids=lambda spec: spec.name)
def test_coded_rows(built, spec):
    """Rows that are codes and scales already: the bits of the layer that makes them itself."""
    own = replace(spec, coded=True)
    for tokens, routing in ((2, "random"), (50, "half_dropped")):
        calls = [Call(each, tokens, routing)(built(each)) for each in (own, spec)]
        assert torch.equal(calls[0].out, calls[1].out)
        assert calls[0].out.abs().sum() > 0


def test_numbers(built):
    """Alpha and limit are those of the call."""
    spec = SPECS[0]
    for alpha, limit in ((1.0, 0.5), (3.0, 2.0)):
        Call(spec, 9, alpha=alpha, limit=limit)(built(spec)).judge()
    Call(PLAIN, 9, limit=0.25)(built(PLAIN)).judge()


@pytest.mark.parametrize("arch", few(["sm_120a", "sm_100a"]))
def test_other_architectures(built, arch):
    """Without wgmma, mma may multiply for any number of tokens."""
    for tokens in (2, 17, 60):
        Call(PLAIN, tokens, "half_dropped")(built(PLAIN, arch), arch).judge()


def test_many_tokens_by_tcgen05(tmp_path):
    """Default schedules for a B200: mma.sync for few tokens of an expert, tcgen05 for many."""
    spec = FusedMoe(3, 64, 64, 2, "nvfp4", layout="tiles64")
    build([spec], tmp_path / "k.so", level="sm_100a", logs_dirs=[], ptx=True)
    threads = []
    for tokens in (2, 200):
        call = Call(spec, tokens, "half_dropped")(tmp_path / "k.so", "sm_100a")
        call.judge()
        threads.append([launch.block[0] for launch in call.run.launches[1:3]])
    decode, load, issue = 8, 4, 1
    assert threads[1] == [32 * (decode + load + issue)] * 2 != threads[0]


@pytest.mark.parametrize("arch", few(["sm_90a", "sm_120a"]))
def test_default_schedules(tmp_path, arch):
    """A library of the catalog's own schedules: every bucket is right."""
    spec = FusedMoe(3, 64, 64, 2, "mxfp4", layout="tiles64")
    made = build([spec], tmp_path / "k.so", level=arch, logs_dirs=[], ptx=True)
    limits = sorted({b["limit"] for b in made["functions"][spec.name]["buckets"]} - {None})
    for tokens in (1, *(limit + 1 for limit in limits[:3])):
        Call(spec, tokens, "half_dropped")(tmp_path / "k.so", arch).judge()


def test_grids(built):
    """GEMMs have no more CTAs than there may be tiles, nor than are resident."""
    call = Call(PLAIN, 1)(built(PLAIN), sms=100)
    assert [launch.grid[0] for launch in call.run.launches] == [2, 2 * 2, 2 * 2, 1]
    call = Call(PLAIN, 20)(built(PLAIN), sms=100)  # 40 slots of 4 experts: 6 blocks of 16
    assert [launch.grid[0] for launch in call.run.launches] == [2, 6 * 2, 6 * 2, 2]
    call = Call(PLAIN, 100)(built(PLAIN), sms=2)
    prepare, first, second, combine = (launch.grid[0] for launch in call.run.launches)
    assert (prepare, combine) == (2, -(-100 * 16 // 256))
    assert first % 2 == second % 2 == 0
    assert max(first, second) <= 8
    call.judge()


FEW = ("prepare", "gemm0", "gemm1", "combine")
"""Kernels of three tokens."""


@pytest.mark.parametrize("act_fmt", few(["fp8", None]))
def test_chunks(built, act_fmt):
    """More than 8192 tokens are so many passes in the workspace of 8192; a cluster sorts them."""
    coded = act_fmt is not None
    spec = FusedMoe(2, 64, 64, 2, layout="tiles64", act_fmt=act_fmt, coded=coded)
    tokens = 8192 + 3
    call = Call(spec, tokens, "dropped")
    assert len(call.workspace) == spec.workspace_bytes(8192) == spec.workspace_bytes(65536)
    used = [0, 1, 4000, 8191, 8192, 8194]
    call.ids[used, 0] = [0, 1, 1, 0, 1, 0]
    call.ids[used, 1] = [1, -1, 0, 1, 0, -1]
    call(built(spec)).judge(*((0.08, 0.012) if coded else ()))
    names = [launch.kernel.removeprefix(f"{spec.name}_") for launch in call.run.launches]
    names = [name for name in names if name != "requantize"]
    assert names == ["prepare_many", "gemm3", "gemm4", "combine", *FEW]
    assert call.run.launches[0].grid[0] % 8 == 0


def test_workspace_of_before(built):
    """Whatever the workspace holds, results are the same: nothing is read before it is written."""
    library, outs = built(QUANTIZED[0]), []
    for fill in (0x00, 0x7F, 0xFF):
        call = Call(QUANTIZED[0], 9, "half_dropped")
        call.workspace.fill_(fill)
        outs.append(call(library).out)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_no_tokens(built):
    """Without tokens, and then without a workspace, nothing is launched."""
    call = Call(PLAIN, 0)
    call.workspace = call.workspace[:0]
    args = call.arguments()
    assert emulator.run_module(built(PLAIN), PLAIN.name, *args, target="sm_90a").launches == []


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (0, lambda t: t[:, :64].contiguous(), "hidden has size 64 in dimension 1, but 128"),
        (1, lambda t: t[:4], "topk_ids has size 4 in dimension 0, but 5 is expected"),
        (1, lambda t: t.long(), "topk_ids has dtype int64"),
        (3, lambda t: t[:3], "w13 has size 3 in dimension 0, but 4 is expected"),
        (4, lambda t: t.reshape(4, 2, 1, 512), "w13_scale has size 1 in dimension 2, but 2"),
        (11, lambda t: t[:-1], "out has size 4 in dimension 0, but 5 is expected"),
        (12, lambda t: t[:-1], r"workspace has \d+ bytes, but \d+ are needed for 5 rows"),
    ],
)
def test_wrong_arguments(built, which, change, message):
    call = Call(PLAIN, 5)
    args = call.arguments()
    args[which] = change(args[which])
    with pytest.raises((ValueError, TypeError), match=message):
        emulator.run_module(built(PLAIN), PLAIN.name, *args, target="sm_90a")
    assert call.out.isnan().all()


def test_workspace_overlaps_no_tensor(built):
    """Memory that the function divides may be none of its tensors."""
    call = Call(PLAIN, 5)
    args = call.arguments()
    args[-1] = call.guarded
    args[-2] = call.guarded[: 5 * 128 * 2].view(torch.bfloat16).view(5, 128)
    with pytest.raises(ValueError, match=r"overlaps (out|workspace) in"):
        emulator.run_module(built(PLAIN), PLAIN.name, *args, target="sm_90a")


def test_what_no_gpu_reads():
    """Architectures and layouts without kernels."""
    with pytest.raises(TypeError, match="no kernel of fused_moe for sm_80"):
        road(PLAIN, "sm_80")
    with pytest.raises(TypeError, match="layout 'linear', which GPU kernels do not read"):
        workloads(FusedMoe(4, 128, 64, 2), "sm_90a")
    with pytest.raises(TypeError, match="no kernel of moe_route for sm_89"):
        road(MoeRoute(8, 2), "sm_89")


def test_equal_kernels_are_one():
    """Of GEMM 2 of the first two buckets, which differ in GEMM 1."""
    made = sources(bodies_of(PLAIN, "sm_90a"), PLAIN, "sm_90a")
    gemms = {code.name for code in made.kernels if "_gemm" in code.name}
    assert len(gemms) == 5
    assert made.host_c.count(f'"{PLAIN.name}_gemm1"') == 2


@pytest.mark.parametrize(
    "spec",
    [
        MoeRoute(8, 2),
        MoeRoute(256, 8, "bfloat16", "sigmoid", bias=True, n_group=8, topk_group=4),
        MoeRoute(40, 33, "float16", renormalize=False),
    ],
    ids=lambda spec: spec.name,
)
def test_route(built, spec):
    """Routing, whose ids and weights the layer takes."""
    rng = np.random.default_rng(spec.experts)
    logits = ref.round_to(3 * rng.standard_normal((7, spec.experts)), spec.dtype)
    bias = rng.uniform(-0.4, 0.4, spec.experts).astype(np.float32) if spec.bias else None
    ids = torch.full((7, spec.top_k), -7, dtype=torch.int32)
    weights = torch.full((7, spec.top_k), float("nan"))
    given = torch.from_numpy(logits.astype(np.float32)).to(getattr(torch, spec.dtype))
    shift = () if bias is None else (torch.from_numpy(bias),)
    for scale in (None, 2.5):
        args = (given, *shift, scale, ids, weights)
        run = emulator.run_module(built(spec), spec.name, *args, target="sm_90a")
        run.check()
        want = moe.moe_route(
            logits,
            spec.top_k,
            scoring=spec.scoring,
            renormalize=spec.renormalize,
            correction_bias=bias,
            n_group=spec.n_group,
            topk_group=spec.topk_group,
            scale=scale or 1.0,
        )
        assert (ids.numpy() == want[0]).all()
        np.testing.assert_allclose(weights.numpy(), want[1], 1e-6)
    empty = (given[:0], *shift, None, ids[:0], weights[:0])
    assert emulator.run_module(built(spec), spec.name, *empty, target="sm_90a").launches == []
