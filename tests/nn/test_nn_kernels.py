"""The kernels that are built ahead are those that modules of a checkpoint call, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.cli.command import cli
from blockscale.nn import FusedMoE, Linear
from blockscale.nn.kernels import kernels_of
from blockscale.ops import call
from tests.kit import checkpoint_files as files
from tests.kit.pairwise import few

P, MLP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp"
QWEN = {
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}


def fp4(rng: np.random.Generator, name: str, rows: int, cols: int) -> dict[str, np.ndarray]:
    parts, _ = files.fp4(rng, rows, cols)
    return {f"{name}.{key}": np.asarray(value) for key, value in parts.items()}


def awq(rng: np.random.Generator, name: str, rows: int, cols: int) -> dict[str, np.ndarray]:
    codes, zero, scale, _ = files.int4(rng, rows, cols, 32)
    words = {"qweight": codes, "qzeros": zero}
    found = {k: files.words(np.ascontiguousarray(v.T), files.AWQ) for k, v in words.items()}
    found["scales"] = np.ascontiguousarray(scale.T)
    return {f"{name}.{key}": value for key, value in found.items()}


def tensors(rng: np.random.Generator, store: Any, experts: int = 4) -> dict[str, np.ndarray]:
    """A linear layer, and experts with their router."""
    found = store(rng, P, 96, 64)
    for e in range(experts):
        for leaf, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            found |= store(rng, f"{MLP}.experts.{e}.{leaf}_proj", *shape)
    router = rng.standard_normal((experts, 64)).astype(np.float32)
    return {**found, f"{MLP}.gate.weight": router}


@pytest.mark.parametrize(
    ("store", "dtype", "experts"),  # kernels that are known already are not looked up again
    few([(fp4, "float32", 5), (fp4, "bfloat16", 6), (awq, "bfloat16", 9), (awq, "float32", 7)]),
)
def test_modules_call_what_was_built(opened, rng, monkeypatch, store, dtype, experts):
    """Every kernel that is looked up is in the list; INT4 without zeros alone is one too many."""
    ckpt = opened(tensors(rng, store, experts), {}, **QWEN, dtype=dtype)
    asked: set[str] = set()
    original = call.kernel

    def noted(spec: Any, *arguments: Any) -> Any:
        asked.add(spec.name)
        return original(spec, *arguments)

    monkeypatch.setattr(call, "kernel", noted)
    with torch.no_grad():
        x = torch.randn(3, 64, dtype=getattr(torch, dtype))
        Linear.from_checkpoint(ckpt, P)(x)
        FusedMoE.from_checkpoint(ckpt, MLP, dtype=x.dtype)(x)
    names = {spec.name for spec in kernels_of(ckpt, cuda=False)}
    assert len(asked) >= 2, "no call looks a kernel up any more as this test thinks"
    assert asked <= names
    # the linear layer is of one size in all of these, and so may be known
    beyond = {name.partition(f"_e{experts}")[0] for name in names - asked}
    assert {name for name in beyond if "n96" not in name} <= {"fused_moe_int4g32"}


@pytest.mark.parametrize(
    ("store", "wanted"),
    [
        (
            fp4,
            [
                "fused_moe_nvfp4_e4_k2_h64_i32_swiglu_tiles64_bf16",
                "linear_nvfp4_n96_k64_tiles64_bf16",
                "moe_route_e4_k2_softmax_norm_f32",
            ],
        ),
        (
            awq,
            [
                "fused_moe_int4g32_e4_k2_h64_i32_swiglu_tiles64_bf16",
                "fused_moe_int4g32z_e4_k2_h64_i32_swiglu_tiles64_bf16",
                "int4_mm_tiles64_n96_k64_g32z_a16_bf16",
                "linear_int4g32_n96_k64_tiles64_bf16",
                "linear_int4g32z_n96_k64_tiles64_bf16",
                "moe_route_e4_k2_softmax_norm_f32",
            ],
        ),
    ],
)
def test_names_for_a_gpu(opened, rng, store, wanted):
    ckpt = opened(tensors(rng, store), {}, **QWEN, dtype="float32")  # which no GPU kernel takes
    assert sorted(spec.name for spec in kernels_of(ckpt, cuda=True)) == wanted


def test_names_for_a_cpu(opened, rng):
    ckpt = opened(tensors(rng, awq), {}, **QWEN, dtype="float32")
    assert sorted(spec.name for spec in kernels_of(ckpt, cuda=False)) == [
        "fused_moe_int4g32_e4_k2_h64_i32_swiglu_f32",
        "fused_moe_int4g32z_e4_k2_h64_i32_swiglu_f32",
        "int4_mm_rows_n96_k64_g32t_a16_f32",
        "moe_route_e4_k2_softmax_norm_f32",
    ]


@pytest.mark.parametrize(
    ("store", "act", "wanted"),
    [
        (
            fp4,
            "silu",
            [
                "linear_nvfp4_n160_k64_byrow_tiles64_bf16",
                "linear_nvfp4_n160_k64_tiles64_bf16",
                "linear_nvfp4_n192_k64_byrow_tiles64_bf16",
                "linear_nvfp4_n192_k64_silu_gated_tiles64_bf16",
                "linear_nvfp4_n192_k64_tiles64_bf16",
            ],
        ),
        (
            fp4,
            "gelu",
            [
                "linear_nvfp4_n160_k64_byrow_tiles64_bf16",
                "linear_nvfp4_n160_k64_tiles64_bf16",
                "linear_nvfp4_n192_k64_byrow_tiles64_bf16",
                "linear_nvfp4_n192_k64_tiles64_bf16",
            ],
        ),
        (
            awq,
            "silu",
            [
                "int4_mm_tiles64_n160_k64_g32z_a16_bf16",
                "int4_mm_tiles64_n192_k64_g32z_a16_bf16",
                *(
                    f"linear_int4g32{zero}_n{n}_k64_tiles64_bf16"
                    for zero in ("", "z")
                    for n in (160, 192)
                ),
            ],
        ),
    ],
)
def test_layers_that_engines_have_as_one(opened, rng, store, act, wanted):
    """Beside each by itself; what is plain, or has another K, is with none."""
    layer = "model.layers.0"
    sizes = {"self_attn.q": (96, 64), "self_attn.k": (32, 64), "self_attn.v": (32, 64)}
    sizes |= {"mlp.gate": (96, 64), "mlp.up": (96, 64), "other.q": (96, 64), "other.k": (32, 64)}
    sizes |= {"wide.gate": (96, 64), "wide.up": (96, 128)}
    found = {}
    for name, size in sizes.items():
        found |= store(rng, f"{layer}.{name}_proj", *size)
    found[f"{layer}.other.v_proj.weight"] = rng.standard_normal((32, 64)).astype(np.float32)
    ckpt = opened(found, {}, model_type="llama", hidden_act=act)
    names = [spec.name for spec in kernels_of(ckpt, cuda=True)]
    assert sorted(n for n in names if "n160" in n or "n192" in n) == wanted
    alone = [n for n in names if "n96" in n or "n32" in n]
    assert len(alone) == (9 if store is awq else 3), "and each by itself"


def test_gpt_oss_and_deepseek(opened, rng):
    """Biases and all experts in one tensor, with gates or without; a correction and groups."""
    oss = {}
    for leaf, rows, cols in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        codes, scale, _ = files.mxfp4(rng, 4, rows, cols)
        name = f"{MLP}.experts.{leaf}"
        oss[f"{name}_blocks"] = files.nibbles(codes).reshape(4, rows, cols // 32, 16)
        oss |= {f"{name}_scales": scale, f"{name}_bias": np.ones((4, rows), np.float32)}
    config = {"model_type": "gpt_oss", "num_experts_per_tok": 2}
    found = {spec.name for spec in kernels_of(opened(oss, {}, **config), cuda=False)}
    assert found == {
        "fused_moe_mxfp4_e4_k2_h64_i32_swiglu_oai_bias_bf16",
        "moe_route_e4_k2_softmax_norm_f32",
    }
    whole = {}
    for leaf, rows, cols in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        codes, scale, _, _ = files.nvfp4(rng, 4, rows, cols)
        name = f"{MLP}.experts.{leaf}"
        whole |= {name: files.nibbles(codes), f"{name}_weight_scale": scale}
        whole[f"{name}_weight_scale_2"] = np.ones(4, np.float32)
    found = {spec.name for spec in kernels_of(opened(whole, {}, **QWEN), cuda=False)}
    assert "fused_moe_nvfp4_e4_k2_h64_i32_swiglu_bf16" in found
    config = {
        **QWEN,
        "model_type": "deepseek_v3",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    }
    bias = {f"{MLP}.gate.e_score_correction_bias": np.ones(4, np.float32)}
    ckpt = opened({**tensors(rng, fp4), **bias}, {}, **config)
    names = [spec.name for spec in kernels_of(ckpt, cuda=False)]
    assert "moe_route_e4_k2_sigmoid_norm_bias_g2x1_f32" in names


def test_a_plain_checkpoint_calls_none(opened):
    with pytest.raises(CheckpointError, match=r"has no weight of 4 bits.*blockscale convert"):
        kernels_of(opened({"p.weight": np.ones((4, 64), np.float32)}), cuda=False)


def test_the_command_builds_them(opened, rng, tmp_path):
    ckpt = opened(fp4(rng, P, 96, 64), {})
    out = tmp_path / "model.so"
    words = ["build", "--checkpoint", str(ckpt.path), "--dtype", "f32", "-o", str(out)]
    run = CliRunner().invoke(cli, words)
    assert run.exit_code == 0, run.output
    assert [*bs.load(out).manifest["functions"]] == ["linear_nvfp4_n96_k64_f32"]
    for words, said in (
        (["build", "-o", str(out)], "Missing argument 'NAMES...', or --checkpoint"),
        (["build", "swizzle_128x4", "--dtype", "f32", "-o", str(out)], "--dtype is for --check"),
    ):
        run = CliRunner().invoke(cli, words)
        assert run.exit_code == 2
        assert said in run.output
