"""Our half of the plugins, without vLLM or SGLang: against what was recorded of them.

`tests.kit.engine_facts` says what is recorded and how; `test_vllm.py` and `test_sglang.py` compare
the record with the engine, where there is one.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="tiny models are made with transformers")

import blockscale as bs
from blockscale.integrations import interfaces, layers, stored_experts
from blockscale.integrations.layers import Activation
from tests.kit import engine_facts, engine_layers
from tests.kit.engine_layers import (
    I,
    K,
    N,
    dtype_of,
    generator,
    gpt_oss_experts,
    gpt_oss_truth,
    routed,
    silu,
    truth,
    worst,
)
from tests.kit.paths import ROOT

ENGINES = ("vllm", "sglang")
MODULES = {"vllm": ("linear", "experts"), "sglang": ("layers",)}
NEAR = 1e-5
"""Largest error of a row over its norm, in float32."""
FOLDER = ROOT / "blockscale" / "integrations"


# ---- Names and signatures -----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_our_modules_import_and_have_what_the_engine_asks_for(engine):
    """Each class of ours over one of the engine's has its abstract methods, by their parameters."""
    classes = {
        key.rpartition(":")[2]: fact
        for key, fact in engine_facts.recorded(engine)["names"].items()
        if fact["kind"] == "class"
    }
    checked = 0
    with engine_facts.standing_in(engine) as stand:
        for name in MODULES[engine]:
            module = stand.module(name)
            for ours in vars(module).values():
                if not inspect.isclass(ours) or ours.__module__ != module.__name__:
                    continue
                for base in ours.__bases__:
                    fact = classes.get(base.__name__)
                    if fact is None or "get_quant_method" in vars(ours):
                        continue
                    assert not ours.__abstractmethods__, ours
                    for method in [*fact["abstract"], *vars(ours)]:
                        wanted, made = fact["methods"].get(method), getattr(ours, method)
                        if wanted is None or not inspect.isroutine(made):
                            continue
                        found = list(inspect.signature(made).parameters)
                        wanted = wanted[len(wanted) - len(found) :]  # with or without self
                        assert found == wanted, (ours, method)
                        checked += 1
    assert checked >= {"vllm": 20, "sglang": 1}[engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_methods_that_end_in_ours_are_called_as_the_engine_calls_them(engine):
    """Mixins define methods of the engine's classes with the parameters that these have."""
    names = engine_facts.recorded(engine)["names"]
    facts = [
        fact["methods"]
        for key, fact in names.items()
        if key.endswith(("MoEMethod", "FusedMoE", "LinearMethod")) and fact["kind"] == "class"
    ]
    with engine_facts.standing_in(engine) as stand:
        module = stand.module(MODULES[engine][-1])
        ours = [module._Adopted] if engine == "vllm" else [module._Linear, module._Experts]
        found = {
            (name, tuple(inspect.signature(value).parameters))
            for cls in ours
            for name, value in vars(cls).items()
            if inspect.isfunction(value) and name != "apply_weights"
        }
    assert len(found) >= 4
    for name, parameters in found:
        known = {tuple(methods[name]) for methods in facts if name in methods}
        assert parameters in known, (name, known)


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_of_the_engine_fit_its_parameters(engine):
    names = {
        key.rpartition(":")[2]: fact["parameters"]
        for key, fact in engine_facts.recorded(engine)["names"].items()
        if fact.get("parameters")
    }
    renamed = {"make_prepare_finalize": "maybe_make_prepare_finalize"}
    calls = 0
    for path in (FOLDER / engine).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            parameters = names.get(renamed.get(node.func.id, node.func.id))
            if parameters is not None:
                calls += 1
                assert len(node.args) + len(node.keywords) <= len(parameters), ast.unparse(node)
                assert {word.arg for word in node.keywords} <= {*parameters}, ast.unparse(node)
    assert calls >= 3


def test_int4_in_act_order_is_left_to_vllm(monkeypatch):
    """Its groups' scales are not those of neighbouring channels."""
    with engine_facts.standing_in("vllm") as stand:
        linear, experts = stand.module("linear"), stand.module("experts")
        monkeypatch.setattr(linear, "fits_device", lambda: (True, None))
        monkeypatch.setattr(linear, "scalar_types", SimpleNamespace(uint4b8=8, uint4=0))
        monkeypatch.setattr(linear, "current_platform", SimpleNamespace(is_cpu=lambda: True))
        config = {"weight_type": 8, "zero_points": False, "act_type": torch.bfloat16}
        config |= {"out_type": None, "group_size": 32, "partition_weight_shape": (128, 64)}
        can = linear.BlockscaleInt4LinearKernel.can_implement
        assert can(SimpleNamespace(**config, has_g_idx=False)) == (True, None)
        fits, reason = can(SimpleNamespace(**config, has_g_idx=True))
        assert not fits
        assert "act-order" in reason
        method = {"num_bits": 4, "group_size": 32}
        for order, fits in (None, True), ("static", True), ("group", False):
            assert experts._int4_fits("ct-int4", SimpleNamespace(**method, actorder=order)) == fits


@pytest.mark.parametrize("engine", ENGINES)
def test_the_entry_point_names_a_function_that_needs_no_engine_to_be_imported(engine):
    group = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}[engine]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["entry-points"][group]["blockscale"].split(":")
    code = f"import sys, {module}\nassert callable({module}.{function})\n"
    code += f"print([m for m in ('{engine}', 'tvm', 'torch') if m in sys.modules])"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_lacks_something_is_named_with_its_version(engine, tmp_path):
    """A package of the engine's name that has nothing in it."""
    (tmp_path / engine).mkdir()
    (tmp_path / engine / "__init__.py").write_text("__version__ = '0.1.2'\n")
    code = f"import blockscale.integrations.{engine} as plugin; plugin.register()"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: blockscale.integrations.{engine}: {engine} 0.1.2 has no ")
    assert f"{engine.upper()}_PLUGINS" in last


def test_an_engine_that_is_not_there_is_named():
    engine = interfaces.Engine("no_such_engine", "1.0", "install it")
    with pytest.raises(ModuleNotFoundError, match="needs no_such_engine, which is not installed"):
        engine.module("no_such_engine.layers")


def test_a_module_of_an_engine_that_lacks_the_one_above_it_is_named():
    engine = interfaces.Engine("json", "3.0", "install another")
    said = r"json [\d.]+ has no json\.nothing\.more, but must have what 3\.0 have"
    with pytest.raises(ImportError, match=said) as failed:
        engine.module("json.nothing.more")
    assert type(failed.value) is ImportError


# ---- Parameters of layers of the engines --------------------------------------------------------

LINEAR = [
    *(("vllm", f"linear/{name}") for name in engine_layers.SCHEMES),
    *(
        ("sglang", f"linear/{name}")
        for name in ("modelopt-nvfp4", "modelopt-w4a16", "ct-nvfp4", "ct-int4", "ct-int4-sym")
    ),
]


def process(engine, scheme, layer):
    """Our step after loading, as the engine calls it."""
    with engine_facts.standing_in(engine) as stand:
        if engine == "sglang":
            kind = "linear-modelopt" if scheme.startswith("modelopt") else f"linear-{scheme[:8]}"
            stand.module("layers")._take_linear(layer, kind.removesuffix("-"))
            return
        kernels = stand.module("linear").KERNELS
        if "fp4" in scheme or scheme.endswith("w4a16"):
            kernel = kernels["mxfp4" if "mxfp4" in scheme else "nvfp4"]
            kernel.process_weights_after_loading(SimpleNamespace(), layer)
            return
        stems = ("weight_packed", "weight_scale", "weight_zero_point")
        stems = stems if scheme.startswith("ct") else ("qweight", "scales", "qzeros")
        has_points = scheme in ("ct-int4", "awq")
        config = SimpleNamespace(act_type=torch.float16, zero_points=has_points)
        names = dict(zip(("w_q_name", "w_s_name", "w_zp_name"), stems, strict=True))
        itself = SimpleNamespace(**names, config=config)
        kernels["mp"].process_weights_after_loading(itself, layer)


@pytest.mark.parametrize(("engine", "name"), LINEAR)
def test_a_recorded_linear_layer_multiplies_as_its_values(engine, name):
    scheme = name.partition("/")[2]
    layer = engine_facts.layer_of(engine_facts.layers(engine)[name])
    bias = layer.bias.data.double().numpy()
    process(engine, scheme, layer)
    assert [left for left, _ in layer.named_parameters()] == ["bias"]
    rng = generator(scheme)
    _, dense = engine_layers.SCHEMES[scheme].store("", engine_layers.weight(rng, N, K), rng)
    x = torch.randn(5, K)
    held = getattr(layer, layers.HELD)
    wanted = x.double().numpy() @ dense.T
    assert worst(held.product(x, layer.bias), wanted + bias) < NEAR
    assert worst(held.product(x, None), wanted) < NEAR


KINDS = {
    "modelopt-nvfp4": "modelopt",
    "ct-nvfp4": "ct-nvfp4",
    "ct-mxfp4": "ct-mxfp4",
    "ct-int4": "ct-int4",
    "ct-int4-sym": "ct-int4",
    "awq": "awq",
    "gptq": "gptq",
}
EXPERTS = [
    *(("vllm", f"experts/{name}") for name in KINDS),
    *(("sglang", f"experts/{name}") for name in ("modelopt-nvfp4", "ct-nvfp4")),
]


@pytest.mark.parametrize(("engine", "name"), EXPERTS)
def test_recorded_experts_run_as_their_values(engine, name, rng):
    scheme = name.partition("/")[2]
    layer = engine_facts.layer_of(engine_facts.layers(engine)[name])
    if scheme == "gptq":  # allocated by vLLM, not loaded, and taken off by `_Adopted`
        layers.release(layer, ["w13_bias", "w2_bias"])
    stored_experts.take(layer, KINDS[scheme], Activation("swiglu"), dtype_of(scheme))
    assert not list(layer.parameters())
    _, gate_up, down = engine_layers.stored_experts(scheme, generator(scheme))
    x, ids, factors = routed(rng)
    made = getattr(layer, layers.HELD)(
        x, topk_ids=torch.from_numpy(ids), topk_weights=torch.from_numpy(factors)
    )
    assert worst(made, truth(x, ids, factors, gate_up, down, silu)) < NEAR


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "gpt-oss"), ("sglang", "sglang-gpt-oss")])
def test_recorded_gpt_oss_experts_run_as_their_values(engine, kind, rng):
    layer = engine_facts.layer_of(engine_facts.layers(engine)["experts/gpt-oss"])
    act = Activation("swiglu_oai", 1.702, 7.0)
    stored_experts.take(layer, kind, act, torch.bfloat16, alternating=True)
    assert not list(layer.parameters())
    x, ids, factors = routed(rng)
    made = getattr(layer, layers.HELD)(
        x, topk_ids=torch.from_numpy(ids), topk_weights=torch.from_numpy(factors)
    )
    wanted = gpt_oss_truth(x, ids, factors, gpt_oss_experts(generator("gpt-oss")))
    assert worst(made, wanted) < NEAR


# ---- What needs no record -----------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_codes_come_out_of_words_in_the_order_that_is_told(dim, rng):
    words = rng.integers(-(2**31), 2**31, (8, 16)).astype(np.int32)
    order = rng.permutation(8)
    found = layers.unpacked(torch.from_numpy(words), dim, order.tolist()).numpy()
    axis = dim % 2
    for index in np.ndindex(*found.shape):
        at = [*index]
        at[axis], which = divmod(index[axis], 8)
        assert found[index] == (int(words[tuple(at)]) >> (4 * int(order[which]))) & 15


def test_a_parameter_that_is_released_is_empty_whoever_holds_it():
    layer = torch.nn.Module()
    held = layer.weight = torch.nn.Parameter(torch.ones(3))
    layers.release(layer, ["weight", "no_such_thing"])
    assert not hasattr(layer, "weight")
    assert held.numel() == 0


def test_experts_without_gates_have_one_global_scale_each(rng):
    stored = [
        engine_layers.nvfp4("", engine_layers.weight(rng, *shape)) for shape in ((I, K), (K, I))
    ]
    layer = torch.nn.Module()
    for which, (tensors, _) in zip(("w13", "w2"), stored, strict=True):
        for leaf in ("weight", "weight_scale"):
            value = engine_layers.torch_of(tensors[f".{leaf}"])[None]
            layer.register_parameter(f"{which}_{leaf}", torch.nn.Parameter(value, False))
    layer.w13_weight_scale_2 = torch.nn.Parameter(torch.full((1, 1), float(engine_layers.TOP)))
    layer.w2_weight_scale_2 = torch.nn.Parameter(torch.full((1,), float(engine_layers.TOP)))
    stored_experts.take(layer, "modelopt", Activation("relu2"), torch.bfloat16)
    x = torch.randn(4, K)
    ids, ones = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    made = bs.fused_moe(x, getattr(layer, layers.HELD).weights, ids, ones, activation="relu2")
    h = np.maximum(x.double().numpy() @ stored[0][1].T, 0) ** 2
    assert worst(made, h @ stored[1][1].T) < NEAR
