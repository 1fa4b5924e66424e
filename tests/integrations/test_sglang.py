"""SGLang itself with our plugin: what it selects, how it loads, one forward; on a CPU.

Needs SGLang, which CI does not have; docs/engines.md has the command.  Its layers are built as in a
server with one process.  `--moe-runner-backend marlin` is what it takes by itself on an H100.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang in an environment of its own (docs/engines.md)")

import sglang.srt.runtime_context as context
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend, resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from blockscale.integrations import layers
from blockscale.integrations import sglang as plugin
from blockscale.integrations.sglang import layers as sglang_layers
from tests.kit import checkpoint_files as files
from tests.kit import engine_facts, engine_layers, hf_models
from tests.kit.engine_layers import (
    SHARDS,
    E,
    I,
    K,
    N,
    dtype_of,
    generator,
    gpt_oss_experts,
    gpt_oss_truth,
    routed,
    silu,
    stored_experts,
    torch_of,
    truth,
    worst,
)
from tests.kit.paths import ROOT

NEAR = 1e-5
"""Largest error of a row over its norm, in float32."""

NAME = "model.layers.0.mlp"


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
    """What a server of one process has published before it builds a model."""
    load_plugins()
    folder = tmp_path_factory.mktemp("model")
    hf_models.config("llama", architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    arguments = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True)
    context.publish(arguments, role="scheduler")
    ranks = dict.fromkeys(("tp_rank", "moe_ep_rank", "moe_tp_rank"), 0)
    sizes = dict.fromkeys(("tp_size", "moe_ep_size", "moe_tp_size"), 1)
    from sglang.srt.layers.moe.fused_moe_triton import layer  # which asks where it runs

    with context.get_parallel().override(**ranks, **sizes):
        context.get_flags().moe.runner_backend = MoeRunnerBackend.MARLIN
        yield layer.FusedMoE


def config_of(scheme):
    said = engine_layers.SCHEMES[scheme].said
    if said["quant_method"] == "modelopt":
        name = "modelopt_fp4"
        said = {"quantization": said}
    else:
        name = "compressed-tensors"
    config = get_quantization_config(name).from_config(dict(said))
    config.packed_modules_mapping = {}
    return config


# ---- Registration -------------------------------------------------------------------------------


def test_the_entry_point_is_found_under_its_group():
    (found,) = metadata.entry_points(group="sglang.srt.plugins", name="blockscale")
    assert found.load() is plugin.register


def test_registering_twice_changes_nothing():
    before = dict(QUANTIZATION_METHODS)
    plugin.register()
    assert before == QUANTIZATION_METHODS
    assert resolve_moe_runner_backend("blockscale").value == "blockscale"
    for name, base in sglang_layers.CONFIGS.items():
        known = QUANTIZATION_METHODS.get(name)
        assert known in (None, sglang_layers.extended(base)), "mxfp4 is known on CUDA alone"


def test_importing_the_plugin_alone_imports_no_engine():
    names = "('sglang', 'tvm', 'torch')"
    code = "import sys, blockscale, blockscale.integrations.sglang\n"
    code += f"print([m for m in {names} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize(
    ("capability", "taken"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), False)]
)
def test_gpus_with_other_kernels_keep_them(monkeypatch, capability, taken):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert sglang_layers.fits_device() is taken


# ---- Linear layers ------------------------------------------------------------------------------

LINEAR = ["modelopt-nvfp4", "modelopt-w4a16", "ct-nvfp4", "ct-int4", "ct-int4-sym"]


def linear_layer(scheme, *, bias=True):
    rng = generator(scheme)
    name = f"{NAME}.down_proj"
    tensors, dense = engine_layers.SCHEMES[scheme].store(name, engine_layers.weight(rng, N, K), rng)
    layer = ReplicatedLinear(
        *(K, N),
        bias=bias,
        params_dtype=dtype_of(scheme),
        quant_config=config_of(scheme),
        prefix=name,
    )
    params = dict(layer.named_parameters())
    for key, value in tensors.items():
        param = params.get(key.rpartition(".")[2])
        if param is not None:
            param.weight_loader(param, torch_of(value))
    if bias:
        layer.bias.data = torch.randn(N).to(dtype_of(scheme))
    return layer, dense


@torch.no_grad()
@pytest.mark.parametrize("scheme", LINEAR)
def test_a_linear_layer_is_adopted_loaded_and_multiplied(scheme, rng, monkeypatch):
    # compressed-tensors asks torch for the GPU, whether or not there is one
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    layer, dense = linear_layer(scheme)
    engine_facts.see(f"linear/{scheme}", layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert [name for name, _ in layer.named_parameters()] == ["bias"], "the engine's are released"
    weights = getattr(layer, layers.HELD).weights
    tensors = [*layer.parameters(), *layer.buffers()]
    assert sum(value.nbytes for value in tensors) == weights.nbytes + layer.bias.nbytes
    x = torch.randn(5, K)
    bias = layer.bias.double().numpy()
    wanted = x.double().numpy() @ dense.T
    assert worst(layer.quant_method.apply(layer, x, layer.bias), wanted + bias) < NEAR
    assert worst(layer.quant_method.apply(layer, x), wanted) < NEAR
    y, _ = layer(x.to(dtype_of(scheme)))
    assert y.dtype == dtype_of(scheme)
    assert worst(y, x.to(y.dtype).double().numpy() @ dense.T + bias) < 1e-2


def test_a_layer_is_compiled_without_a_break(rng):
    layer, dense = linear_layer("modelopt-nvfp4")
    layer.quant_method.process_weights_after_loading(layer)
    compiled = torch.compile(
        lambda x: layer.quant_method.apply(layer, x, layer.bias), fullgraph=True
    )
    x = torch.randn(5, K)
    with torch.no_grad():
        wanted = x.double().numpy() @ dense.T + layer.bias.double().numpy()
        assert worst(compiled(x), wanted) < NEAR


def test_awq_smoothing_is_left_to_sglang(rng):
    config = config_of("modelopt-nvfp4")
    config.is_awq = True
    layer = ReplicatedLinear(K, N, quant_config=config, prefix=f"{NAME}.down_proj")
    assert not hasattr(layer.quant_method, "kind")


# ---- Experts ------------------------------------------------------------------------------------


def experts_layer(fused_moe, config, **changes):
    settings = {"params_dtype": torch.bfloat16, "prefix": f"{NAME}.experts", **changes}
    return fused_moe(
        *(E, K, I), layer_id=0, top_k=2, quant_config=config, reduce_results=False, **settings
    )


def load_experts(layer, tensors):
    for name, value in tensors:
        expert, projection, leaf = name.split(".")
        which, shard = SHARDS[projection]
        param = getattr(layer, f"{which}_{leaf}", None)
        if param is not None:
            whole = f"{NAME}.experts.{which}_{leaf}"
            param.weight_loader(
                param, torch_of(value), whole, shard_id=shard, expert_id=int(expert)
            )


def run_layer(layer, x, ids, factors):
    chosen = StandardTopKOutput(
        torch.from_numpy(factors), torch.from_numpy(ids.astype(np.int32)), torch.zeros(len(x), E)
    )
    sent = SimpleNamespace(hidden_states=x, topk_output=chosen)
    return layer.quant_method.apply(layer, sent).hidden_states


def kind_of(layer):
    found = layer.quant_method if hasattr(layer.quant_method, "kind") else layer.scheme
    return getattr(found, "kind", None)


@pytest.mark.parametrize(
    ("scheme", "kind"), [("modelopt-nvfp4", "modelopt"), ("ct-nvfp4", "ct-nvfp4")]
)
def test_experts_are_adopted_loaded_and_run(server, scheme, kind, rng):
    layer = experts_layer(server, config_of(scheme), routed_scaling_factor=2.5)
    assert kind_of(layer) == kind
    tensors, gate_up, down = stored_experts(scheme, generator(scheme))
    load_experts(layer, tensors)
    engine_facts.see(f"experts/{scheme}", layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters()), "the engine's are released"
    weights = getattr(layer, layers.HELD).weights
    assert sum(value.nbytes for value in layer.buffers()) == weights.nbytes
    holder = layer.quant_method if hasattr(layer.quant_method, "kind") else layer.scheme
    assert isinstance(holder.runner, MoeRunner)
    assert isinstance(holder.runner.runner_core, sglang_layers.BlockscaleRunnerCore)
    assert layer.runner_backend.value == "blockscale"
    x, ids, factors = routed(rng)
    wanted = truth(x, ids, factors * 2.5, gate_up, down, silu)
    assert worst(run_layer(layer, x, ids, factors), wanted) < NEAR


def test_experts_of_another_rank_are_left_out(server, rng):
    layer = experts_layer(server, config_of("modelopt-nvfp4"))
    tensors, gate_up, down = stored_experts("modelopt-nvfp4", rng)
    load_experts(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, factors = routed(rng)
    local = np.where(ids % 2, ids, -1)  # as the dispatcher marks what is elsewhere
    wanted = truth(x, ids, np.where(local < 0, 0, factors), gate_up, down, silu)
    found = run_layer(layer, x, local, factors)
    some = np.linalg.norm(wanted, axis=1) > 0
    assert worst(found[torch.from_numpy(some)], wanted[some]) < NEAR
    assert not found[torch.from_numpy(~some)].any()


def test_gpt_oss_experts_are_taken_apart_into_gates_and_ups(server, rng):
    cls = sglang_layers.extended(sglang_layers.CONFIGS["mxfp4"])
    config = cls.from_config({"quant_method": "mxfp4"})
    layer = experts_layer(
        *(server, config), with_bias=True, gemm1_alpha=1.702, gemm1_clamp_limit=7.0
    )
    assert kind_of(layer) == "sglang-gpt-oss"
    inner = layer.w2_weight.shape[2] * 2
    made, down, biases = gpt_oss_experts(generator("gpt-oss"))
    assert inner == I
    for which, parts, bias in (("w13", made, biases[0]), ("w2", down, biases[1])):
        codes = np.stack([files.nibbles(part[0]) for part in parts])
        getattr(layer, f"{which}_weight").data.copy_(torch_of(codes))
        getattr(layer, f"{which}_weight_scale").data.copy_(
            torch_of(np.stack([part[1] for part in parts]))
        )
        getattr(layer, f"{which}_weight_bias").data.copy_(torch.from_numpy(bias))
    engine_facts.see("experts/gpt-oss", layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters()), "the engine's are released"
    x, ids, factors = routed(rng)
    wanted = gpt_oss_truth(x, ids, factors, (made, down, biases))
    assert worst(run_layer(layer, x, ids, factors), wanted) < NEAR


@pytest.mark.parametrize("changes", [{"activation": "gelu"}, {"no_combine": True}])
def test_experts_that_no_kernel_has_are_left_to_sglang(server, changes):
    layer = experts_layer(server, config_of("modelopt-nvfp4"), **changes)
    assert kind_of(layer) is None


def test_a_backend_that_is_asked_for_is_taken(server):
    layer = experts_layer(server, config_of("modelopt-nvfp4"))
    assert sglang_layers.fits_experts(layer, "modelopt")
    flags = context.get_flags().moe
    flags.runner_backend = MoeRunnerBackend.TRITON
    try:
        assert not sglang_layers.fits_experts(layer, "modelopt")
    finally:
        flags.runner_backend = MoeRunnerBackend.MARLIN


# ---- The record that CI has ---------------------------------------------------------------------


def test_the_record_is_what_this_engine_has():
    """Written by ``python -m tests.kit.engine_facts sglang``; the tests before have seen layers."""
    known = engine_facts.recorded("sglang")["version"]
    found = importlib.import_module("sglang").__version__
    if found != known:
        pytest.skip(f"the record is of {known}, this is {found}")
    assert engine_facts.same("sglang")
