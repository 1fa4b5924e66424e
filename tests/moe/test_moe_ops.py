"""bs.fused_moe and bs.moe_route: what they take, pass to kernels, and refuse.

Numbers of all formats, sizes and options: test_moe_cpu.py.  Here, of one layer, the relative
error of each row against float64 is below 1e-5 (float32) and 1e-2 (bfloat16: three roundings to 8
bits, between the GEMMs, of each expert's row, of the sum).
"""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockscale as bs
from blockscale.ops.moe import layer as ops_moe
from blockscale.ops.moe.layer import Options
from blockscale.specs import FusedMoe, MoeRoute, Spec
from tests.kit.helpers import DTYPES, fill_freed_memory, rejects, same
from tests.reference import core as ref
from tests.reference import moe as moe

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 64, 96
LAYER = moe.random_layer(EXPERTS, HIDDEN, INTERMEDIATE, "nvfp4")
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}


def tensors(layer):
    """Return a layer's arguments of fused_moe by name."""
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    return {name: torch.from_numpy(getattr(layer, name)) for name in names}


GIVEN = tensors(LAYER)
PREPARED = bs.prepare_moe_weights(**GIVEN)


def rows(tokens, kind="random", dtype="float32"):
    """Return hidden, ids and weights as tensors."""
    ids, weights = moe.random_routing(tokens, EXPERTS, TOP_K, kind)
    hidden = torch.from_numpy(moe.random_hidden(tokens, HIDDEN, dtype)).to(DTYPES[dtype])
    return hidden, torch.from_numpy(ids).to(torch.int32), torch.from_numpy(weights)


def judge(y, hidden, ids, weights, dtype="float32"):
    """Compare with float64, row by row; a row without experts is zero."""
    truth = moe.fused_moe(hidden.float().numpy(), LAYER, ids.numpy(), weights.numpy())
    got = y.float().numpy()
    empty = ~((ids.numpy() >= 0) & (ids.numpy() < EXPERTS)).any(1)
    assert (got[empty] == 0).all()
    error = ref.row_error(got[~empty], truth[~empty])
    assert error.max(initial=0) < LIMITS[dtype]


# ---- Numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", ["random", "one_expert", "half_dropped", "dropped"])
def test_against_reference(dtype, kind):
    """Any number of tokens, all ways to distribute them."""
    for tokens in (1, 2, 17):
        given = rows(tokens, kind, dtype)
        fill_freed_memory(given[0].nbytes)
        judge(bs.fused_moe(given[0], PREPARED, *given[1:]), *given, dtype)


def test_ways_to_call():
    """Tensors or prepared weights, ids of 32 or 64 bits, by name, into an output: the same."""
    hidden, ids, weights = rows(9, "half_dropped")
    expected = bs.fused_moe(hidden, PREPARED, ids, weights)
    judge(expected, hidden, ids, weights)
    given = dict(GIVEN)
    first = given.pop("w13"), given.pop("w2")
    again = [
        bs.fused_moe(hidden, *first, ids, weights, **given),
        bs.fused_moe(hidden, PREPARED, ids.long(), weights),
        bs.fused_moe(hidden, PREPARED, topk_ids=ids, topk_weights=weights),
        bs.fused_moe(hidden, w13=PREPARED, topk_ids=ids, topk_weights=weights),
    ]
    out = torch.full_like(hidden, torch.nan)
    again.append(bs.fused_moe(hidden, PREPARED, ids, weights, out=out))
    assert again[-1] is out
    for y in again:
        same(y, expected)


def test_ids_beyond_32_bits_are_dropped():
    """They must not wrap around to an expert."""
    hidden, ids, weights = rows(3)
    far = ids.long()
    far[1] = 2**32
    ids[1] = -1
    same(bs.fused_moe(hidden, PREPARED, far, weights), bs.fused_moe(hidden, PREPARED, ids, weights))


def test_no_tokens():
    """No kernel is called, and out is returned as it is."""
    hidden, ids, weights = rows(0)
    y = bs.fused_moe(hidden, PREPARED, ids, weights)
    assert y.shape == (0, HIDDEN)
    assert bs.fused_moe(hidden, PREPARED, ids, weights, out=y) is y
    ids, weights = bs.moe_route(torch.zeros(0, 8), 3)
    assert ids.shape == weights.shape == (0, 3)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)


def test_route():
    """Ids and weights are the reference's, also into given outputs."""
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32))
    ids, weights = moe.moe_route(logits.numpy(), 3, scale=2.5)
    got = bs.moe_route(logits, 3, scale=2.5)
    out = torch.empty(9, 3, dtype=torch.int32), torch.empty(9, 3)
    again = bs.moe_route(logits, 3, scale=2.5, topk_ids=out[0], topk_weights=out[1])
    assert again[0] is out[0]
    assert again[1] is out[1]
    for found, factors in (got, again):
        assert (found.numpy() == ids).all()
        assert np.abs(factors.numpy() - weights).max() < 1e-6


# ---- What is passed to a kernel -----------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("act_fmt", [None, "fp8", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("fmt", ["mxfp4", "int4"])
@pytest.mark.parametrize("layout", ["linear", "tiles64"])
def test_arguments_are_the_spec_s(activation, act_fmt, fmt, layout):
    """One for each parameter, in order, of its dtype and shape."""
    extras = {"zeros": fmt == "int4", "bias": activation == "swiglu_oai"}
    made = moe.random_layer(3, 64, 32, fmt, activation=activation, **extras)
    names = ("w13_bias", "w2_bias", "w13_zero", "w2_zero", "w13_scale", "w2_scale")
    given = {n: torch.from_numpy(v) for n in names if (v := getattr(made, n)) is not None}
    codes = torch.from_numpy(made.w13), torch.from_numpy(made.w2)
    weights = bs.prepare_moe_weights(*codes, fmt=fmt, activation=activation, layout=layout, **given)
    hidden = torch.zeros(5, 64, dtype=torch.bfloat16)
    ids, factors = torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2)
    static = torch.tensor(0.5) if act_fmt == "fp8_tensor" else None
    options = Options(activation, None, None, act_fmt, False, static, static)
    checked = bs.prepare_moe_weights(*codes, fmt=fmt, activation=activation, **given)
    spec = ops_moe.check_call(hidden, checked, ids, factors, options)
    spec = Spec.from_json(spec.to_json() | {"layout": layout})
    rows, out = (hidden, ids, factors), torch.empty_like(hidden)
    arguments = ops_moe._arguments(spec, rows, weights, options, out)
    for param, value in zip(spec.params(), arguments, strict=True):
        if param.shape is None:
            assert isinstance(value, float)
        elif value is None:
            assert param.default is not None
        else:
            assert str(value.dtype) == f"torch.{param.dtype}"
            sizes = {"rows": 5, "workspace_bytes": spec.workspace_bytes(5)}
            assert tuple(value.shape) == tuple(sizes.get(size, size) for size in param.shape)
    alpha, limit = arguments[-2 - (layout == "tiles64") - 1 :][:2]
    assert alpha == (1.702 if activation == "swiglu_oai" else 1.0)
    assert limit == (7.0 if activation == "swiglu_oai" else np.inf)


def test_fast_sums_are_those_of_8_bits():
    """The spec has them in layout "tiles64e" alone: others, and CPUs, sum up in float32."""
    made = moe.random_layer(2, 64, 64, "mxfp4")
    given = {n: torch.from_numpy(getattr(made, n)) for n in ("w13", "w2", "w13_scale", "w2_scale")}
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, factors = torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32), torch.ones(3, 2)
    fast = Options(act_fmt="fp8", fast_accum=True)
    for layout in ("tiles64", "tiles64e"):
        tiled = bs.prepare_moe_weights(**given, fmt="mxfp4", layout=layout)
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = {n: torch.empty_like(t, device="cuda") for n, t in tiled.tensors()}
            weights = bs.MoeWeights.of(tiled.meta(), tensors)
            on = [torch.empty_like(t, device="cuda") for t in (hidden, ids, factors)]
            spec = ops_moe.check_call(on[0], weights, *on[1:], fast)
            assert spec.fast_accum == (layout == "tiles64e")
            assert ("_afp8_fast_" in spec.name) == spec.fast_accum
            assert Spec.parse(spec.name) == spec
    weights = bs.prepare_moe_weights(**given, fmt="mxfp4")
    y = [
        bs.fused_moe(hidden, weights, ids, factors, act_fmt="fp8", fast_accum=kind)
        for kind in (False, True)
    ]
    assert torch.equal(*y)
    module = bs.nn.FusedMoE(weights, 2, act_fmt="fp8", fast_accum=True)
    assert torch.equal(module(hidden, topk_ids=ids, topk_weights=factors), y[0])
    with rejects("fast_accum=True", "act_fmt='nvfp4'"):
        bs.nn.FusedMoE(weights, 2, act_fmt="nvfp4", fast_accum=True)(hidden, torch.zeros(3, 2))


def test_fake_tensors_on_cuda():
    """Without a GPU: what is recorded for one has its checks and its shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = {
            name: torch.empty(value.shape, dtype=value.dtype, device="cuda")
            for name, value in TILED.tensors()
        }
        weights = bs.MoeWeights.of(TILED.meta(), tensors)
        hidden = torch.empty(5, HIDDEN, dtype=torch.bfloat16, device="cuda")
        ids, factors = bs.moe_route(torch.empty(5, EXPERTS, device="cuda"), TOP_K)
        assert (ids.shape, ids.dtype, str(ids.device)) == ((5, TOP_K), torch.int32, "cuda:0")
        y = bs.fused_moe(hidden, weights, ids, factors)
        assert (y.shape, y.dtype, y.device) == (hidden.shape, hidden.dtype, hidden.device)
        with rejects("hidden has dtype float32", "CUDA"):
            bs.fused_moe(hidden.float(), weights, ids, factors)
        with rejects("'linear'", "cuda", "'tiles64'"):
            bs.fused_moe(hidden, PREPARED, ids, factors)
        codes = CODED.meta(), {n: torch.empty_like(v, device="cuda") for n, v in CODED.tensors()}
        weights = bs.MoeWeights.of(*codes)
        y = bs.fused_moe(hidden, weights, ids, factors, act_fmt="nvfp4")
        assert (y.shape, y.dtype) == (hidden.shape, hidden.dtype)
        with rejects("act_fmt=None", "'128x4'", "pass act_fmt='nvfp4'"):
            bs.fused_moe(hidden, weights, ids, factors)
        weights = bs.MoeWeights.of(TILED.meta(), tensors)
        with rejects("act_fmt='mxfp8'", "float16", "bfloat16"):
            bs.fused_moe(hidden.half(), weights, ids, factors, act_fmt="mxfp8")
        with rejects("weights are on device cpu", "cuda:0", r"weights.to\(hidden.device\)"):
            bs.fused_moe(hidden, TILED, ids, factors)


def test_workspace():
    """It grows with the tokens, up to those of a chunk."""
    spec = FusedMoe(8, 2880, 2880, 4, "mxfp4", layout="tiles64")
    sizes = [spec.workspace_bytes(t) for t in (0, 1, 8, 4096, 8192, 8193, 65536)]
    assert sizes == sorted(sizes)
    assert sizes[4] == sizes[5] == sizes[6]
    slots, padded = 8192 * 4, 2880
    parts = (8192 * padded * 2, slots * padded * 2, slots * 2880 * 2)
    assert sum(parts) < sizes[-1] < 1.01 * sum(parts) + 256 * 12


# ---- Specs --------------------------------------------------------------------------------------

NAMES = {
    "fused_moe_nvfp4_e8_k2_h1024_i2816_swiglu_bf16": FusedMoe(8, 1024, 2816, 2),
    "fused_moe_int4g32z_e128_k8_h2048_i768_swiglu_oai_afp8_tensor_bias_tiles64_f16": FusedMoe(
        *(128, 2048, 768, 8, "int4", 32, "swiglu_oai", "float16", "fp8_tensor"),
        *(True, True, "tiles64"),
    ),
    "fused_moe_mxfp4_e4_k1_h64_i64_relu2_anvfp4_f32": FusedMoe(
        *(4, 64, 64, 1, "mxfp4", 0, "relu2", "float32", "nvfp4")
    ),
    "moe_route_e256_k8_sigmoid_norm_bias_g8x4_f32": MoeRoute(
        256, 8, scoring="sigmoid", bias=True, n_group=8, topk_group=4
    ),
    "moe_route_e64_k6_softmax_bf16": MoeRoute(64, 6, "bfloat16", renormalize=False),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    """A name says all of the spec."""
    spec = NAMES[name]
    assert spec.name == name
    assert Spec.parse(name) == spec == Spec.from_json(spec.to_json())


SPECS = [
    (lambda: FusedMoe(0, 64, 64, 1), ["experts=0", "from 1 to 1024"]),
    (lambda: FusedMoe(1025, 64, 64, 1), ["experts=1025", "1024"]),
    (lambda: FusedMoe(8, 64, 64, 65), ["top_k=65", "64"]),
    (lambda: FusedMoe(8, 72, 64, 1), ["hidden=72", "multiple of 16", "80"]),
    (lambda: FusedMoe(8, 64, 48, 1, "mxfp4"), ["intermediate=48", "32", "64"]),
    (lambda: FusedMoe(8, 64, 64, 1, "int4", 16), ["group=16", "32"]),
    (lambda: FusedMoe(8, 64, 64, 1, zero=True), ["zero=True", "int4"]),
    (lambda: FusedMoe(8, 64, 64, 1, dtype="float32", layout="tiles64"), ["dtype='float32'"]),
    (lambda: FusedMoe(8, 64, 64, 1, act_fmt="fp4"), ["act_fmt='fp4'", "fp8"]),
    (
        lambda: FusedMoe(8, 64, 64, 1, act_fmt="fp8", fast_accum=True),
        ["fast_accum=True is for layout='tiles64e'", "layout='linear'", "float32"],
    ),
    (lambda: MoeRoute(8, 9), ["top_k=9", "8"]),
    (lambda: MoeRoute(8, 1, n_group=3), ["n_group=3", "divisor"]),
    (lambda: MoeRoute(8, 1, n_group=2, topk_group=3), ["topk_group=3", "n_group=2"]),
    (lambda: MoeRoute(8, 3, n_group=4, topk_group=1), ["top_k=3", "2"]),
]


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_specs_are_valid(number):
    """Or they are not made."""
    call, words = SPECS[number]
    with rejects(*words):
        call()


# ---- What is refused ----------------------------------------------------------------------------

HIDDEN_ROWS, IDS, FACTORS = rows(5)


def call(*, prepared=PREPARED, hidden=HIDDEN_ROWS, ids=IDS, factors=FACTORS, **options):
    """Call fused_moe with some arguments changed."""
    return bs.fused_moe(hidden, prepared, ids, factors, **options)


TILED = bs.prepare_moe_weights(**GIVEN, layout="tiles64")
CODED = bs.prepare_moe_weights(**GIVEN, layout="128x4")
REFUSED = [
    (lambda: call(hidden=[1]), ["hidden is a list", "tensor"]),
    (lambda: call(hidden=HIDDEN_ROWS.double()), ["hidden", "float64", "bfloat16"]),
    (lambda: call(hidden=HIDDEN_ROWS[None]), [r"\[1, 5, 64\]", r"\[T, 64\]", "flatten"]),
    (lambda: call(hidden=HIDDEN_ROWS.repeat(1, 2)), [r"\[5, 128\]", "H=64"]),
    (lambda: call(hidden=HIDDEN_ROWS.repeat(1, 2)[:, ::2]), ["hidden", "contiguous"]),
    (lambda: call(hidden=HIDDEN_ROWS.to("meta")), ["hidden", "meta", "cpu"]),
    (lambda: call(ids=None, factors=None), ["topk_ids is missing", "tensor"]),
    (lambda: call(ids=IDS.float()), ["topk_ids", "float32", "int32 or int64"]),
    (lambda: call(ids=IDS[:4]), ["topk_ids", r"\[4, 2\]", r"\[5, k\]"]),
    (lambda: call(ids=IDS.repeat(1, 33), factors=FACTORS.repeat(1, 33)), [r"\[5, 66\]", "64"]),
    (lambda: call(factors=FACTORS.bfloat16()), ["topk_weights", "bfloat16", "float32"]),
    (lambda: call(factors=FACTORS[:, :1].clone()), ["topk_weights", r"\[5, 1\]", r"\[5, 2\]"]),
    (lambda: call(prepared=TILED), ["'tiles64'", "cpu", "'linear'", "prepare_moe_weights"]),
    (lambda: call(activation="relu2"), ["activation='relu2'", "has gate rows"]),
    (lambda: call(activation="silu"), ["activation='silu'", "swiglu_oai"]),
    (lambda: call(activation="gelu_tanh", limit=7.0), ["limit=7.0", "gelu_tanh", "leave it out"]),
    (lambda: call(limit=0.0), ["limit=0.0", "above 0"]),
    (lambda: call(alpha="1"), ["alpha", "str", "number"]),
    (lambda: call(act_fmt="fp4"), ["act_fmt='fp4'", "fp8_tensor"]),
    (lambda: call(act_fmt="fp8_tensor"), ["a1_scale is missing", "act_fmt='fp8'"]),
    (lambda: call(fast_accum=True), ["fast_accum=True", "act_fmt=None", "'fp8'"]),
    (lambda: call(a1_scale=torch.ones(1)), ["a1_scale", "act_fmt=None", "no static"]),
    (
        lambda: call(act_fmt="nvfp4", a1_scale=torch.ones(4)),
        ["a1_scale", r"\[4\]", "one element"],
    ),
    (lambda: call(w13_scale=GIVEN["w13_scale"]), ["prepared", "prepare_moe_weights"]),
    (lambda: bs.fused_moe(HIDDEN_ROWS, PREPARED, IDS, IDS, FACTORS), ["w2 is given", "both"]),
    (lambda: bs.fused_moe(HIDDEN_ROWS, GIVEN["w13"], GIVEN["w2"], IDS, FACTORS), ["w13_scale"]),
    (lambda: call(out=torch.empty(4, 64)), ["out", r"\[4, 64\]", r"\[5, 64\]"]),
    (lambda: call(out=torch.empty(5, 64).bfloat16()), ["out", "bfloat16", "float32"]),
    (lambda: call(out=HIDDEN_ROWS), ["out overlaps hidden", "clone"]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number):
    """Errors say where, what, the rule and the remedy."""
    made, words = REFUSED[number]
    with rejects("fused_moe", *words):
        made()


def test_refused_on_cuda():
    """Without a CUDA device: the checks of the weights that only matter there."""
    int4 = moe.random_layer(2, 64, 64, "int4")
    given = {n: torch.from_numpy(getattr(int4, n)) for n in ("w13", "w2", "w13_scale", "w2_scale")}
    weights = bs.prepare_moe_weights(**given, fmt="int4", layout="tiles64")
    hidden = torch.zeros(1, 64, dtype=torch.float16, device="meta")
    with rejects("hidden has dtype float16", "prepared for torch.bfloat16", "dtype=hidden.dtype"):
        ops_moe._check_layout(hidden, weights)
    with rejects("float32", "bfloat16 or float16"):
        ops_moe._check_layout(hidden.float(), weights)


LOGITS = torch.zeros(5, 8)
ROUTES = [
    (lambda: bs.moe_route([1], 1), ["logits is a list"]),
    (lambda: bs.moe_route(LOGITS[0], 1), ["logits", r"\[8\]", "2 dimensions"]),
    (lambda: bs.moe_route(torch.zeros(5, 0), 1), ["logits", r"\[5, 0\]", "1024"]),
    (lambda: bs.moe_route(LOGITS.int(), 1), ["logits", "int32", "float32"]),
    (lambda: bs.moe_route(LOGITS, 9), ["top_k=9", "8"]),
    (lambda: bs.moe_route(LOGITS, 2.0), ["top_k=2.0", "positive integer"]),
    (lambda: bs.moe_route(LOGITS, 1, scoring="relu"), ["scoring='relu'", "sigmoid"]),
    (lambda: bs.moe_route(LOGITS, 1, n_group=3), ["n_group=3", "8 experts", "divisor"]),
    (lambda: bs.moe_route(LOGITS, 1, n_group=2, topk_group=3), ["topk_group=3", "n_group=2"]),
    (lambda: bs.moe_route(LOGITS, 3, n_group=4, topk_group=1), ["top_k=3", "2"]),
    (
        lambda: bs.moe_route(LOGITS, 1, correction_bias=torch.zeros(7)),
        ["correction_bias", r"\[7\]", r"\[8\]"],
    ),
    (lambda: bs.moe_route(LOGITS, 1, scale="1"), ["scale", "str", "number"]),
    (
        lambda: bs.moe_route(LOGITS, 1, topk_ids=torch.zeros(5, 1)),
        ["topk_ids", "float32", "int32"],
    ),
]


@pytest.mark.parametrize("number", range(len(ROUTES)))
def test_route_refused(number):
    """Errors say where, what, the rule and the remedy."""
    made, words = ROUTES[number]
    with rejects("moe_route", *words):
        made()
