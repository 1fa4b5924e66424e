"""CPU kernels of the MoE layer and its router: every format, activation, option and CPU level.

float32 layers differ from the float64 truth by less than 1e-5 of a row.  Quantised activations are
compared with quantised ones; a value next to a tie may take the other neighbour in float32 than in
float64, so that rows have 0.05 and all together 1e-3.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

from blockscale import build, catalog, load
from blockscale.base import host
from blockscale.building.space import replay, trace_json
from blockscale.specs import FusedMoe, MoeRoute
from blockscale.tir.moe import fused_moe as tir_moe
from tests.kit import fresh
from tests.kit.helpers import DTYPES
from tests.kit.kernels import LEVELS, call, compiled, needs
from tests.kit.pairwise import each, few
from tests.reference import core as ref
from tests.reference import moe as moe

EXPERTS, TOP_K = 5, 2
TOKENS = (0, 1, 2, 17, 64, 300)
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def spec_of(hidden, intermediate, fmt="nvfp4", **options):
    return FusedMoe(EXPERTS, hidden, intermediate, TOP_K, fmt, **{"dtype": "float32"} | options)


# Whole vectors of 16 words, of 8, and none; every format, activation and option.
SPECS = [
    spec_of(256, 128),
    spec_of(128, 192, activation="swiglu_oai", bias=True),
    spec_of(80, 48, activation="relu2", bias=True),
    spec_of(192, 64, "mxfp4", activation="gelu_tanh"),
    spec_of(256, 128, "mxfp4", activation="swiglu_oai", bias=True),
    spec_of(192, 128, "int4", group=32, zero=True, bias=True),
    spec_of(128, 192, "int4", group=64, activation="gelu_tanh"),
    spec_of(96, 32, "int4", group=32),
    spec_of(256, 128, "int4", group=128, zero=True, activation="relu2"),
    spec_of(256, 128, dtype="bfloat16"),
    spec_of(128, 128, "int4", group=32, dtype="float16", activation="swiglu_oai", bias=True),
]
QUANTISED = [
    spec_of(128, 64, act_fmt="fp8_tensor", activation="relu2"),
    spec_of(128, 64, act_fmt="fp8", bias=True),
    spec_of(128, 64, act_fmt="nvfp4", activation="swiglu_oai"),
    spec_of(80, 48, act_fmt="nvfp4", dtype="bfloat16"),
    spec_of(96, 64, "mxfp4", act_fmt="mxfp8", activation="swiglu_oai", bias=True),
    spec_of(64, 96, "mxfp4", act_fmt="mxfp4", dtype="bfloat16"),
    spec_of(64, 96, "mxfp4", act_fmt="fp8", dtype="float16"),
]
by_name = {"ids": lambda spec: spec.name}


def layer_of(spec, **options):
    """Return random weights for ``spec``."""
    return moe.random_layer(
        spec.experts,
        spec.hidden,
        spec.intermediate,
        spec.fmt,
        group=spec.group,
        activation=spec.activation,
        zeros=spec.zero,
        bias=spec.bias,
        act_fmt=spec.act_fmt,
        **options,
    )


def rows_of(spec, layer, hidden):
    """Return hidden as the function takes it."""
    return moe.coded_rows(hidden, spec.act_fmt, layer.a1_scale) if spec.coded else hidden


def arguments(spec, layer, hidden, ids, weights):
    """Return what the function takes but for out, in order."""
    ones = np.ones(spec.experts, np.float32)
    first = ones if layer.w13_global_scale is None else layer.w13_global_scale
    oai = spec.activation == "swiglu_oai"
    values = vars(layer) | {
        "hidden": rows_of(spec, layer, hidden),
        "topk_ids": ids.astype(np.int32),
        "topk_weights": weights,
        "w13_global": first if first.ndim == 2 else np.stack([first, first], axis=1),
        "w2_global": ones if layer.w2_global_scale is None else layer.w2_global_scale,
        "a1_scale": np.array([layer.a1_scale or 1], np.float32),
        "a2_scale": np.array([layer.a2_scale or 1], np.float32),
    }
    defaults = {"alpha": 1.702 if oai else 1.0, "limit": 7.0 if oai else float("inf")}
    made = []
    for param in spec.params()[:-1]:
        if param.shape is None:
            given = getattr(layer, param.name)
            made.append(defaults[param.name] if given is None else given)
        else:
            array = np.ascontiguousarray(values[param.name])
            tensor = torch.from_numpy(array.reshape(-1).copy()).view(array.shape)
            rows = param.name == "hidden" and not spec.coded
            made.append(tensor.to(DTYPES[spec.dtype]) if rows else tensor)
    return made


def run(kernel, spec, layer, hidden, ids, weights):
    """Return the layer's result; its memory was NaN, and what is beside it is untouched."""
    given = arguments(spec, layer, hidden, ids, weights)
    numbers = [value for value in given if not isinstance(value, torch.Tensor)]
    tensors = [value for value in given if isinstance(value, torch.Tensor)]

    def with_numbers(*views):
        kernel(*views[:-1], *numbers, views[-1])

    slots = (spec.top_k,) if spec.slots else ()
    shape = len(hidden), *slots, spec.hidden
    out = torch.empty(shape, dtype=DTYPES[spec.dtype])
    return call(with_numbers, tensors, [out])[0].float().numpy()


def check(kernel, spec, tokens=TOKENS, kinds=moe.ROUTINGS, **options):
    """Compare all routings of any number of tokens with float64."""
    layer = layer_of(spec, **options)
    for count in tokens:
        hidden = moe.random_hidden(count, spec.hidden, spec.dtype)
        for kind in kinds if count in (1, 17) else kinds[:1]:
            ids, weights = moe.random_routing(count, spec.experts, spec.top_k, kind)
            y = run(kernel, spec, layer, hidden, ids, weights)
            quantised = spec.act_fmt is not None
            truth = moe.fused_moe(hidden, layer, ids, weights, spec.dtype if quantised else None)
            if not quantised:
                assert ref.row_error(y, truth).max(initial=0) < TOLERANCE[spec.dtype]
            elif count:
                assert ref.row_error(y, truth).max() < 5e-2
                assert ref.row_error(y.reshape(1, -1), truth.reshape(1, -1)).max() < 1e-3


@pytest.mark.parametrize("spec", [*few(SPECS, every=4), *few(QUANTISED, every=4)], **by_name)
def test_layer(spec):
    """This machine's level, all routings."""
    check(compiled(spec, host.level()), spec)


@pytest.mark.parametrize("act_fmt", ["fp8", "nvfp4", "mxfp8", "mxfp4"])
def test_small_numbers_beside_a_large_one(act_fmt):
    """What is left of them tells the scale of their row or block: E4M3 keeps them, E2M1 does not.

    Of NVFP4 those stay whose 16 have no large one.
    """
    spec = spec_of(64, 64, "nvfp4" if act_fmt == "nvfp4" else "mxfp4", act_fmt=act_fmt)
    layer = layer_of(spec)
    layer.w13[:, :, [0, 16]] &= 0xF0  # nothing meets the large ones, in columns 0 and 32
    hidden = moe.random_hidden(17, 64, spec.dtype) / 8
    hidden[:, [0, 32]] = 448
    ids, weights = moe.random_routing(17, spec.experts, spec.top_k)
    y = run(compiled(spec, host.level()), spec, layer, hidden, ids, weights)
    truth = moe.fused_moe(hidden, layer, ids, weights, spec.dtype)
    assert (y == 0).all() == (act_fmt == "mxfp4")
    if act_fmt != "mxfp4":
        assert ref.row_error(y.reshape(1, -1), truth.reshape(1, -1)).max() < 1e-3


@pytest.mark.parametrize("act_fmt", ["fp8", "nvfp4", "mxfp8", "mxfp4"])
def test_not_a_number(act_fmt):
    """It spoils its token, wherever it is, whatever is beside it; one in h that of its expert."""
    spec = spec_of(64, 64, "nvfp4" if act_fmt == "nvfp4" else "mxfp4", act_fmt=act_fmt)
    layer, kernel = layer_of(spec), compiled(spec, host.level())
    hidden = moe.random_hidden(17, spec.hidden, spec.dtype)
    for token, places in enumerate(([0], [1], [7], [15], [31], [33], [63], range(32))):
        hidden[token, places] = np.nan
    hidden[8:11] = 0
    hidden[[8, 9], [0, 40]] = np.nan
    ids, weights = moe.random_routing(17, spec.experts, spec.top_k)
    truth = moe.fused_moe(hidden, layer, ids, weights, spec.dtype)
    y = run(kernel, spec, layer, hidden, ids, weights)
    assert np.array_equal(np.isnan(y), np.isnan(truth))
    assert np.isnan(y[:10]).all()
    assert np.isfinite(y[10:]).all()
    hidden = moe.random_hidden(17, spec.hidden, spec.dtype)
    clean = run(kernel, spec, layer, hidden, ids, weights)
    for place in (0, 5, 40, 63):
        spoiled = replace(layer, w13_scale=layer.w13_scale.copy())
        spoiled.w13_scale[1, place, 0] = 0x7F if spec.fmt == "nvfp4" else 0xFF
        y = run(kernel, spec, spoiled, hidden, ids, weights)
        assert np.array_equal(np.isnan(y).all(-1), (ids == 1).any(-1))
        assert np.array_equal(y[~(ids == 1).any(-1)], clean[~(ids == 1).any(-1)])


CODED = [
    spec_of(128, 64, act_fmt="fp8", bias=True),
    spec_of(96, 64, "mxfp4", act_fmt="fp8", dtype="float16"),
    spec_of(96, 48, act_fmt="nvfp4", dtype="bfloat16", slots=True),
]


@pytest.mark.parametrize("spec", few(CODED), **by_name)
def test_coded_rows(spec):
    """Rows that are codes and scales already: the bits of the layer that makes them itself."""
    layer, own = layer_of(spec), replace(spec, coded=True)
    kernels = [(compiled(each, "plain"), each) for each in (own, spec)]
    for count in (0, 2, 17):
        hidden = moe.random_hidden(count, spec.hidden, spec.dtype)
        hidden[1:2] = 0
        ids, weights = moe.random_routing(count, spec.experts, spec.top_k)
        y, truth = (run(*kernel, layer, hidden, ids, weights) for kernel in kernels)
        assert np.array_equal(y, truth)
        assert count == 0 or np.abs(y).max() > 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"act_fmt": None}, "coded=True is for act_fmt 'fp8' or 'nvfp4'"),
        ({"act_fmt": "fp8_tensor"}, "coded=True is for act_fmt 'fp8' or 'nvfp4'"),
        ({"act_fmt": "nvfp4", "layout": "128x4"}, "layouts other than '128x4'"),
        ({"act_fmt": "nvfp4"}, "hidden=80 is not a multiple of 32"),
    ],
)
def test_rows_that_cannot_be_coded(fields, said):
    with pytest.raises(ValueError, match=said):
        spec_of(80, 48, dtype="bfloat16", coded=True, **fields)


@each(level=LEVELS, spec=[SPECS[0], SPECS[5]])
def test_levels(spec, level):
    """Vectors of other widths."""
    needs(level)
    check(compiled(spec, level), spec, tokens=(1, 17))


def test_many_tokens_in_chunks(monkeypatch):
    """4096 tokens, 512 at a time, and the last chunk with fewer; ids in and out of range."""
    monkeypatch.setattr(tir_moe, "MOST_SLOTS", 1024)
    spec = spec_of(64, 32)
    assert tir_moe.chunk_tokens(spec) == 512
    kernel = compiled(spec, host.level(), changed="MOST_SLOTS=1024")
    check(kernel, spec, tokens=(511, 513, 4096))


def test_memory_has_a_bound():
    """Rows between the steps fill about 128 MiB, of a large layer too."""
    for spec in (FusedMoe(8, 4096, 14336, 2), FusedMoe(128, 2048, 768, 8), spec_of(64, 32)):
        slots = tir_moe.chunk_tokens(spec) * spec.top_k
        assert 64 - spec.top_k < slots <= tir_moe.MOST_SLOTS
        assert slots * 8 * (spec.hidden + spec.intermediate) <= tir_moe.CHUNK_BYTES


@pytest.mark.parametrize("options", [{"limit": 0.5}, {"alpha": 0.7, "limit": 2.0}, {"alpha": 1.5}])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_alpha_and_limit(activation, options):
    """Numbers of the call, not of the function."""
    spec = spec_of(256, 128, activation=activation, bias=activation == "swiglu_oai")
    check(kernel_of(spec), spec, tokens=(17,), kinds=("random",), **options)


KERNELS = {}


def kernel_of(spec):
    """Return the compiled function of a spec, made once."""
    if spec not in KERNELS:
        KERNELS[spec] = compiled(spec, host.level())
    return KERNELS[spec]


@pytest.mark.parametrize("spec", few([SPECS[0], SPECS[3], SPECS[8]]), **by_name)
def test_every_weight_is_read_back(spec):
    """One-hot tokens: h is a column of w13, so each element counts in its own place."""
    spec = replace(spec, top_k=1, activation="relu2")
    layer = layer_of(spec)
    hidden = np.eye(spec.hidden, dtype=np.float32)
    for expert in (0, spec.experts - 1):
        ids = np.full((len(hidden), 1), expert)
        weights = np.ones((len(hidden), 1), np.float32)
        y = run(kernel_of(spec), spec, layer, hidden, ids, weights)
        assert ref.row_error(y, moe.fused_moe(hidden, layer, ids, weights)).max() < 1e-5


def test_replay():
    """Traces found on static workloads serve the exported function."""
    spec, level = SPECS[5], host.level()
    traces = {}
    for workload in catalog.workloads(spec, level):
        schedules = workload.space(level)(Schedule(workload.mod(level), seed=1))
        traces[workload.tag] = replay(workload.mod(level), trace_json(schedules[-1].trace)).trace
    check(compiled(spec, level, traces), spec, tokens=(1, 17))


def test_a_fresh_process_registers_what_traces_name():
    """One that has scheduled nothing can read the trace of a log."""
    sch = Schedule(catalog.workloads(SPECS[0], "avx2")[0].mod("avx2"))
    catalog.workloads(SPECS[0], "avx2")[0].default(sch, "avx2")
    text = json.dumps(trace_json(sch.trace))
    names = set(re.findall(r'"(\w+_(?:dots|sum)_avx2\w+)\\*"', text))
    assert len(names) == 2
    assert fresh.registers(names)


def test_a_library_that_torch_calls(tmp_path):
    """Layer and router in one file, loaded without the compiler."""
    router = MoeRoute(EXPERTS, TOP_K)
    library = tmp_path / "moe.so"
    build([SPECS[0], router], library)
    functions = load(library).functions
    layer, hidden = layer_of(SPECS[0]), moe.random_hidden(7, SPECS[0].hidden)
    logits = np.random.default_rng(1).standard_normal((7, EXPERTS)).astype(np.float32)
    ids, weights = functions[router.name](torch.from_numpy(logits), 1.0)
    given = arguments(SPECS[0], layer, hidden, ids.numpy(), weights.numpy())
    y = functions[SPECS[0].name](*given)
    truth = moe.fused_moe(hidden, layer, *moe.moe_route(logits, TOP_K))
    assert ref.row_error(y.numpy(), truth).max() < 1e-5


def test_weights_of_gpu_kernels_are_refused():
    """They are in another layout."""
    spec = FusedMoe(EXPERTS, 128, 64, TOP_K, layout="tiles64")
    with pytest.raises(TypeError, match=r"tiles64.*layout='linear'"):
        catalog.workloads(spec, host.level())[0].symbolic(host.level())


# ---------------------------------------------------------------------------------------- routing
ROUTERS = [
    MoeRoute(16, 4),
    MoeRoute(7, 7, renormalize=False),
    MoeRoute(1, 1, dtype="float16"),
    MoeRoute(64, 6, scoring="sigmoid", bias=True, n_group=8, topk_group=4),
    MoeRoute(64, 6, "bfloat16", scoring="sigmoid", n_group=8, topk_group=3),
    MoeRoute(32, 4, renormalize=False, n_group=4, topk_group=2),
    MoeRoute(32, 4, bias=True, n_group=32, topk_group=5),
]


def route(kernel, spec, logits, bias, scale):
    """Return ids and weights of a compiled router."""
    rows = len(logits)
    outputs = [torch.empty(rows, spec.top_k, dtype=torch.int32), torch.empty(rows, spec.top_k)]

    def with_scale(*views):
        kernel(*views[:-2], scale, *views[-2:])

    given = [torch.from_numpy(logits).to(DTYPES[spec.dtype]), *([bias] if spec.bias else [])]
    return (value.numpy() for value in call(with_scale, given, outputs))


@pytest.mark.parametrize("spec", ROUTERS, **by_name)
def test_route(spec):
    """Random logits, some equal: of equal choices the lower expert comes first."""
    rng = np.random.default_rng(spec.experts)
    logits = ref.round_to(rng.standard_normal((301, spec.experts)), spec.dtype)
    logits[:100] = np.round(2 * logits[:100]) / 2
    bias = torch.from_numpy(np.round(rng.standard_normal(spec.experts)).astype(np.float32) / 4)
    kernel = compiled(spec, host.level())
    for rows in (0, 1, 301):
        ids, weights = route(kernel, spec, logits[:rows], bias, 2.5)
        expected = moe.moe_route(
            logits[:rows],
            spec.top_k,
            scoring=spec.scoring,
            renormalize=spec.renormalize,
            correction_bias=bias.numpy() if spec.bias else None,
            n_group=spec.n_group,
            topk_group=spec.topk_group,
            scale=2.5,
        )
        assert (ids == expected[0]).all()
        np.testing.assert_allclose(weights, expected[1], rtol=2e-6)


def test_route_of_extreme_logits():
    """Infinite and NaN logits: ids stay experts, each once."""
    logits = np.zeros((3, 16), np.float32)
    logits[0, 3], logits[1, 3], logits[2, :] = np.nan, -np.inf, np.nan
    spec = MoeRoute(16, 4, scoring="sigmoid")
    ids, weights = route(compiled(spec, host.level()), spec, logits, None, 1.0)
    assert (ids[:2] == [0, 1, 2, 4]).all()
    np.testing.assert_allclose(weights[:2], 0.25, rtol=1e-6)
    assert (ids[2] == [0, 1, 2, 3]).all()
    logits = np.full((2, 16), -np.inf, np.float32)
    logits[1, 5] = np.inf
    spec = MoeRoute(16, 4)
    ids, weights = route(compiled(spec, host.level()), spec, logits, None, 1.0)
    assert (ids == [[0, 1, 2, 3], [5, 0, 1, 2]]).all()
    assert (weights == [[0.25] * 4, [1, 0, 0, 0]]).all()
