"""vLLM itself with our plugin: what it selects, how it loads, one forward; on a CPU.

Needs vLLM, which CI does not have; docs/engines.md has the command.  Where vLLM's platform is not
the CPU's, it is told that it runs on an H100: tensors stay on the CPU, and so do our kernels.  The
CPU build of vLLM also runs whole models.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM in an environment of its own (docs/engines.md)")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_plugins_by_group

from blockscale.integrations import layers
from blockscale.integrations import vllm as plugin
from blockscale.integrations.vllm import experts as vllm_experts
from blockscale.integrations.vllm import linear as vllm_linear
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

NAMES = {"modelopt": "modelopt_fp4", "compressed-tensors": "compressed-tensors"}
NAMES |= {"awq": "awq", "gptq": "gptq", "mxfp4": "gpt_oss_mxfp4"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    for name, register in load_plugins_by_group("vllm.general_plugins").items():
        if name == "blockscale":
            register()
    get_quantization_config("awq")  # imports modules, which ask where they run


@pytest.fixture
def hopper(monkeypatch):
    """vLLM believes that it runs on a GPU of capability 9.0."""
    pretend(monkeypatch, 9, 0)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is none
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = SimpleNamespace(quantization_config=None, dtype=torch.bfloat16)
    with set_current_vllm_config(config):
        yield


def pretend(monkeypatch, major, minor):
    capability = DeviceCapability(major, minor)
    answers = {
        "is_cuda": lambda: True,
        "is_cuda_alike": lambda: True,
        "is_cpu": lambda: False,
        "is_unspecified": lambda: False,
        "get_device_capability": lambda *_, **__: capability,
        "has_device_capability": lambda least, *_: capability.to_int() >= _number(least),
        "is_device_capability": lambda which, *_: capability.to_int() == _number(which),
        "is_device_capability_family": lambda which, *_: major == _number(which) // 10,
        "is_fp8_fnuz": lambda: False,
        "_enum": PlatformEnum.CUDA,
        "supported_quantization": [],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(current_platform, name, answer, raising=False)


def _number(capability):
    return capability[0] * 10 + capability[1] if isinstance(capability, tuple) else capability


def config_of(scheme):
    said = engine_layers.SCHEMES[scheme].said
    cls = get_quantization_config(NAMES[said["quant_method"]])
    config = cls.from_config(dict(said))
    config.packed_modules_mapping = {}
    return config


def loaded(layer, tensors):
    """Load what a checkpoint has, as vLLM's models do; what a layer has no place for is dropped."""
    params = dict(layer.named_parameters())
    for name, value in tensors.items():
        leaf = name.rpartition(".")[2]
        if leaf in params:
            params[leaf].weight_loader(params[leaf], torch_of(value))


# ---- Registration -------------------------------------------------------------------------------


def test_the_entry_point_is_found_under_its_group():
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="blockscale")
    assert found.load() is plugin.register


def test_registering_twice_leaves_one_kernel_of_each_kind_and_it_is_first():
    plugin.register()
    for kind, kernel in vllm_linear.KERNELS.items():
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            listed = vllm_linear.LISTS[kind][platform]
            assert listed[0] is kernel
            assert listed.count(kernel) == 1
    for name in vllm_experts.CONFIGS:
        assert get_quantization_config(name) is vllm_experts.EXTENDED[name]


def test_importing_the_plugin_alone_imports_no_engine():
    names = "('vllm', 'tvm', 'torch')"
    code = "import sys, blockscale, blockscale.integrations.vllm\n"
    code += f"print([m for m in {names} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize(
    ("capability", "taken"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((10, 0), False)]
)
def test_gpus_with_other_kernels_keep_them(monkeypatch, capability, taken):
    pretend(monkeypatch, *capability)
    assert vllm_linear.fits_device()[0] is taken
    assert vllm_linear.BlockscaleNvFp4LinearKernel.is_supported()[0] is taken


# ---- Linear layers ------------------------------------------------------------------------------

KERNEL_OF = {
    "modelopt-nvfp4": vllm_linear.BlockscaleNvFp4LinearKernel,
    "modelopt-w4a16": vllm_linear.BlockscaleNvFp4LinearKernel,
    "ct-nvfp4": vllm_linear.BlockscaleNvFp4LinearKernel,
    "ct-mxfp4": vllm_linear.BlockscaleMxFp4LinearKernel,
    "ct-int4": vllm_linear.BlockscaleInt4LinearKernel,
    "ct-int4-sym": vllm_linear.BlockscaleInt4LinearKernel,
    "awq": vllm_linear.BlockscaleInt4LinearKernel,
    "gptq": vllm_linear.BlockscaleInt4LinearKernel,
}


def linear_layer(scheme, *, bias=True):
    rng = generator(scheme)
    values = engine_layers.weight(rng, N, K)
    tensors, dense = engine_layers.SCHEMES[scheme].store(
        "model.layers.0.mlp.down_proj", values, rng
    )
    name = "model.layers.0.mlp.down_proj"
    config = config_of(scheme)
    layer = ReplicatedLinear(
        *(K, N), bias=bias, params_dtype=dtype_of(scheme), quant_config=config, prefix=name
    )
    loaded(layer, tensors)
    if bias:
        layer.bias.data = torch.randn(N).to(dtype_of(scheme))
    return layer, dense


def kernel_of(layer):
    method = layer.quant_method
    return getattr(method, "kernel", None) or layer.scheme.kernel


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scheme", KERNEL_OF)
def test_a_linear_layer_is_selected_loaded_and_multiplied(scheme, monkeypatch):
    layer, dense = linear_layer(scheme)
    kernel = kernel_of(layer)
    assert type(kernel) is KERNEL_OF[scheme]
    inside = type(kernel).process_weights_after_loading

    def process(self, layer):  # vLLM's own step comes before ours
        engine_facts.see(f"linear/{scheme}", layer)
        inside(self, layer)

    monkeypatch.setattr(type(kernel), "process_weights_after_loading", process)
    layer.quant_method.process_weights_after_loading(layer)
    assert [name for name, _ in layer.named_parameters()] == ["bias"], "the engine's are released"
    weights = getattr(layer, layers.HELD).weights
    assert weights.packed.numel() == N * K // 2
    tensors = [*layer.parameters(), *layer.buffers()]
    assert sum(value.nbytes for value in tensors) == weights.nbytes + layer.bias.nbytes
    x = torch.randn(5, K)
    bias = layer.bias.double().numpy()
    wanted = x.double().numpy() @ dense.T
    assert worst(kernel_of(layer).apply_weights(layer, x, layer.bias), wanted + bias) < NEAR
    assert worst(kernel_of(layer).apply_weights(layer, x), wanted) < NEAR
    x = x.to(dtype_of(scheme))
    y, _ = layer(x)
    assert y.dtype == x.dtype
    assert worst(y, x.double().numpy() @ dense.T + bias) < 1e-2


@pytest.mark.usefixtures("hopper")
def test_a_bias_that_came_later_is_added(rng):
    layer, dense = linear_layer("ct-mxfp4", bias=False)
    layer.quant_method.process_weights_after_loading(layer)
    x, bias = torch.randn(5, K), torch.randn(N)
    made = kernel_of(layer).apply_weights(layer, x, bias)
    assert worst(made, x.double().numpy() @ dense.T + bias.double().numpy()) < NEAR


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scheme", ["modelopt-nvfp4", "ct-int4"])
def test_a_layer_is_compiled_without_a_break(scheme, rng):
    layer, dense = linear_layer(scheme)
    layer.quant_method.process_weights_after_loading(layer)
    compiled = torch.compile(
        lambda x: layer.quant_method.apply(layer, x, layer.bias), fullgraph=True
    )
    x = torch.randn(5, K)
    with torch.no_grad():
        wanted = x.double().numpy() @ dense.T + layer.bias.double().numpy()
        assert worst(compiled(x), wanted) < NEAR


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scheme", ["modelopt-w4a16", "ct-int4"])
def test_a_kernel_that_is_disabled_by_name_is_not_selected(scheme, rng, monkeypatch):
    names = [kernel.__name__ for kernel in vllm_linear.KERNELS.values()]
    monkeypatch.setattr(vllm_linear.envs, "VLLM_DISABLED_KERNELS", names, raising=False)
    assert type(kernel_of(linear_layer(scheme)[0])) not in vllm_linear.KERNELS.values()


@pytest.mark.usefixtures("hopper")
def test_int4_that_no_kernel_has_is_left_to_vllm():
    config = SimpleNamespace(
        weight_type=vllm_linear.scalar_types.uint4b8,
        zero_points=False,
        has_g_idx=False,
        act_type=torch.bfloat16,
        out_type=None,
        group_size=32,
        partition_weight_shape=(128, 64),
    )
    can = vllm_linear.BlockscaleInt4LinearKernel.can_implement
    assert can(config) == (True, None)
    for name, value, word in [
        ("weight_type", vllm_linear.scalar_types.uint8b128, "INT4"),
        ("zero_points", True, "zero points"),
        ("has_g_idx", True, "act-order"),
        ("act_type", torch.float8_e4m3fn, "activations"),
        ("group_size", 48, "multiples of 32"),
        ("partition_weight_shape", (144, 64), "divide K=144"),
    ]:
        fits, reason = can(SimpleNamespace(**{**vars(config), name: value}))
        assert not fits
        assert word in reason


# ---- Experts ------------------------------------------------------------------------------------

KIND_OF = {
    "modelopt-nvfp4": "modelopt",
    "ct-nvfp4": "ct-nvfp4",
    "ct-mxfp4": "ct-mxfp4",
    "ct-int4": "ct-int4",
    "ct-int4-sym": "ct-int4",
    "awq": "awq",
    "gptq": "gptq",
}
PREFIX = "model.layers.0.mlp.experts"


def experts_layer(config, *, activation=MoEActivation.SILU, dtype=torch.bfloat16, **changes):
    parallel = FusedMoEParallelConfig.make_no_parallel()
    settings = FusedMoEConfig(
        num_experts=E,
        experts_per_token=2,
        hidden_dim=K,
        intermediate_size=I,
        num_local_experts=E,
        num_logical_experts=E,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
        **changes,
    )
    manager = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=2,
        global_num_experts=E,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    return RoutedExperts(PREFIX, dtype, settings, config, manager)


def load_experts(layer, tensors):
    for name, value in tensors:
        expert, projection, leaf = name.split(".")
        which, shard = SHARDS[projection]
        param = getattr(layer, f"{which}_{leaf}", None)
        if param is not None:
            whole = f"{PREFIX}.{which}_{leaf}"
            param.weight_loader(
                param, torch_of(value), whole, shard_id=shard, expert_id=int(expert)
            )


def run_layer(layer, x, ids, factors):
    from vllm.v1.worker import workspace

    workspace.init_workspace_manager(torch.device("cpu"))
    ids, factors = torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(factors)
    return layer.quant_method.apply(layer, x, factors, ids, None, None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scheme", KIND_OF)
def test_experts_are_adopted_loaded_and_run(scheme, rng):
    layer = experts_layer(config_of(scheme), dtype=dtype_of(scheme))
    method = layer.quant_method
    assert getattr(method, "kind", None) == KIND_OF[scheme], vllm_experts.fits(method).reason
    tensors, gate_up, down = stored_experts(scheme, generator(scheme))
    load_experts(layer, tensors)
    engine_facts.see(f"experts/{scheme}", layer)
    before = [value for name, value in layer.named_parameters()]
    method.process_weights_after_loading(layer)
    left = {name for name, value in layer.named_parameters() if value.numel()}
    assert not left, "the engine's are released"
    assert sum(value.numel() for value in before) == 0
    assert type(method.moe_kernel.fused_experts) is vllm_experts.BlockscaleExperts
    x, ids, factors = routed(rng)
    wanted = truth(x, ids, factors, gate_up, down, silu)
    assert worst(run_layer(layer, x, ids, factors), wanted) < NEAR


def test_gpt_oss_experts_are_taken_apart_into_gates_and_ups(hopper, rng):
    config = get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})
    layer = experts_layer(config, activation=MoEActivation.SWIGLUOAI, has_bias=True)
    assert layer.quant_method.kind == "gpt-oss"
    made, down, biases = gpt_oss_experts(generator("gpt-oss"))
    for which, parts, bias in (("w13", made, biases[0]), ("w2", down, biases[1])):
        codes = np.stack([files.nibbles(part[0]) for part in parts])
        getattr(layer, f"{which}_weight").data.copy_(torch_of(codes))
        getattr(layer, f"{which}_weight_scale").data.copy_(
            torch_of(np.stack([part[1] for part in parts]))
        )
        getattr(layer, f"{which}_bias").data.copy_(torch.from_numpy(bias))
    engine_facts.see("experts/gpt-oss", layer)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, factors = routed(rng)
    wanted = gpt_oss_truth(x, ids, factors, (made, down, biases))
    assert worst(run_layer(layer, x, ids, factors), wanted) < NEAR


def test_experts_of_another_rank_are_left_out(hopper, rng):
    layer = experts_layer(config_of("ct-mxfp4"))
    tensors, gate_up, down = stored_experts("ct-mxfp4", rng)
    load_experts(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    layer._expert_map = torch.tensor([-1, 2, 0], dtype=torch.int32)  # of four global experts
    x, ids, factors = routed(rng)
    local = np.array([-1, 2, 0])[ids]
    kept = np.where(local >= 0, factors, 0)
    wanted = truth(x, np.maximum(local, 0), kept, gate_up, down, silu)
    found = run_layer(layer, x, ids, factors)
    some = np.linalg.norm(wanted, axis=1) > 0
    assert worst(found[torch.from_numpy(some)], wanted[some]) < NEAR
    assert not found[torch.from_numpy(~some)].any()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": MoEActivation.GELU}, "activation"),
        ({"activation": MoEActivation.SILU, "is_lora_enabled": True}, "LoRA"),
        ({"activation": MoEActivation.SILU, "moe_backend": "marlin"}, "moe_backend=marlin"),
    ],
)
def test_experts_that_no_kernel_has_are_left_to_vllm(changes, reason):
    layer = experts_layer(config_of("ct-mxfp4"), **changes)
    assert not hasattr(layer.quant_method, "kind")
    assert reason in vllm_experts.fits(layer.quant_method).reason


@pytest.mark.usefixtures("hopper")
def test_a_configuration_survives_pickling():
    import pickle

    config = config_of("modelopt-nvfp4")
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is type(config) is vllm_experts.EXTENDED["modelopt_fp4"]


# ---- Whole models -------------------------------------------------------------------------------

_SERVE = """
import json, os, sys
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, eager = sys.argv[1], sys.argv[2] == "eager"
    how = {"enforce_eager": eager, "max_model_len": 32, "dtype": sys.argv[3]}
    llm = LLM(folder, skip_tokenizer_init=True, **how)
    sampling = SamplingParams(max_tokens=6, temperature=0, detokenize=False, logprobs=5)
    (made,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 33, 70, 12]}], sampling)
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    names = [n for n, m in model.named_modules() if type(m).__module__.startswith("blockscale")]
    logs = [{k: v.logprob for k, v in each.items()} for each in made.outputs[0].logprobs]
    print("RESULT", json.dumps([list(made.outputs[0].token_ids), logs, names]))
"""

CPU = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="whole models run in the CPU build of vLLM alone"
)


@CPU
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scheme", "how", "dtype"),
    [
        ("modelopt-nvfp4", "compiled", "bfloat16"),
        ("modelopt-w4a16", "eager", "bfloat16"),
        ("ct-nvfp4", "eager", "float32"),
        ("ct-mxfp4", "eager", "float32"),
        ("ct-int4", "eager", "float32"),
        ("awq", "eager", "bfloat16"),
    ],
)
def test_vllm_generates_what_the_dequantised_model_does(tmp_path, monkeypatch, scheme, how, dtype):
    """Log-probabilities of the five likeliest tokens differ by 1e-4 in float32, else by 0.1."""
    monkeypatch.setattr(hf_models, "SCHEMES", engine_layers.SCHEMES)
    stored = hf_models.pair(tmp_path, hf_models.config("llama", head_dim=32), scheme)
    (tmp_path / "serve.py").write_text(_SERVE)
    command = [sys.executable, "serve.py", str(stored.folder), how, dtype]
    env = dict(os.environ)
    env.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)  # without them vLLM does not compile
    env["VLLM_CACHE_ROOT"] = str(tmp_path / "cache")
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=env
    )
    found = re.search(r"^RESULT (.*)$", run.stdout, re.M)
    assert found, run.stderr[-3000:]
    tokens, logs, names = json.loads(found[1])
    assert {name.split(".")[-2] for name in names} >= {"qkv_proj", "o_proj", "gate_up_proj"}
    model = hf_models.transformers.AutoModelForCausalLM.from_pretrained(
        stored.dense, dtype=torch.float32
    )
    prompt = [1, 5, 9, 33, 70, 12]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.log_softmax(-1)
    near = 1e-4 if dtype == "float32" else 0.1
    if dtype == "float32":
        assert tokens == wanted.argmax(-1).tolist()
    for row, each in zip(wanted, logs, strict=True):
        assert max(abs(value - row[int(k)].item()) for k, value in each.items()) < near


# ---- The record that CI has ---------------------------------------------------------------------


def test_the_record_is_what_this_engine_has():
    """Written by ``python -m tests.kit.engine_facts vllm``; the tests before have seen layers."""
    known = engine_facts.recorded("vllm")["version"]
    found = importlib.import_module("vllm").__version__
    if found != known:
        pytest.skip(f"the record is of {known}, this is {found}")
    assert engine_facts.same("vllm")
