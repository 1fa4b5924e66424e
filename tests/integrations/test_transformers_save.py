"""What `save_pretrained` writes of modules in the layout of GPUs: values are those of the source.

Modules are made for CUDA on the CPU, which moves bytes only; no kernel runs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.nn.linear import Options, load
from blockscale.ops.int4.weight import prepare
from tests.kit import hf_models
from tests.kit.checkpoint_files import folder

pytest.importorskip("blockscale.integrations.transformers")

from blockscale.integrations.hf_experts import Act, ModelExperts
from blockscale.integrations.hf_plan import ExpertsJob, LinearJob, MergedJob
from blockscale.integrations.hf_save import tensors_of

E, H, I = 3, 64, 32  # noqa: E741
P, X = "model.layers.0.q_proj", "model.layers.0.mlp.experts"


def written(path: Any, tensors: dict[str, torch.Tensor], **config: Any) -> Any:
    arrays = {}
    for name, value in tensors.items():
        eight = value.dtype == torch.float8_e4m3fn
        raw = value.view(torch.uint8).numpy() if eight else value.numpy()
        arrays[name] = raw.view(hf_models.files.E4M3) if eight else raw
    return bs.checkpoints.open(folder(path, arrays, config))


def model(module: torch.nn.Module) -> Any:
    return SimpleNamespace(get_submodule=lambda name: module)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers whose rows have scales of their own."""
    return rng.standard_normal(shape) * rng.uniform(0.1, 1, (*shape[:-1], 1)) / 8


@pytest.mark.parametrize("scheme", ["modelopt-nvfp4", "modelopt-mxfp4", "awq"])
@pytest.mark.parametrize("layout", ["linear", "tiles64"])
def test_a_linear_layer(tmp_path, rng, scheme, layout):
    tensors, _ = hf_models.SCHEMES[scheme].store(P, random(rng, 96, H), rng)
    bias = rng.standard_normal(96).astype(np.float32)
    ckpt = bs.checkpoints.open(folder(tmp_path / "in", {**tensors, f"{P}.bias": bias}, {}))
    wanted = ckpt[P].dequantize()
    if scheme == "awq":
        weight = ckpt[P]
        made = prepare(
            *(weight.packed, weight.block_scale, weight.zero),
            group_size=weight.group_size,
            layout="rows",
            bias=torch.from_numpy(bias),
            dtype=torch.float16,  # that of the scales
            target="cuda" if layout == "tiles64" else "cpu",
        )
        module: Any = bs.nn.Int4Linear(made)
    else:
        module = load(ckpt, P, Options(layout=layout))
    again = written(tmp_path / "out", tensors_of(model(module), [LinearJob("m", f"{P}.weight")]))
    assert torch.equal(again[P].dequantize(), wanted)
    np.testing.assert_array_equal(again[f"{P}.bias"].data, bias)
    assert again[P].fmt == ckpt[P].fmt


@pytest.mark.parametrize("scheme", ["modelopt-nvfp4", "modelopt-mxfp4", "awq"])
@pytest.mark.parametrize("layout", ["linear", "tiles64"])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_layers_that_are_rows_of_one(tmp_path, rng, scheme, layout, activation):
    """Parts come back with scales, biases and names of their own; gates and ups have one size."""
    if scheme == "awq" and activation != "none":
        pytest.skip("INT4 layers with an activation are not made of a model's")
    rows = {"gate": 96, "up": 96} if activation != "none" else {"q": 96, "k": 32, "v": 32}
    tensors: dict[str, np.ndarray] = {}
    for leaf, count in rows.items():
        tensors |= hf_models.SCHEMES[scheme].store(f"m.{leaf}", random(rng, count, H), rng)[0]
    tensors["m.gate.bias" if activation != "none" else "m.k.bias"] = rng.standard_normal(
        96 if activation != "none" else 32
    ).astype(np.float32)
    ckpt = bs.checkpoints.open(folder(tmp_path / "in", tensors, {}))
    names = [f"m.{leaf}" for leaf in rows]
    if scheme == "awq":
        parts = [ckpt[name] for name in names]
        joined = [
            torch.cat([getattr(part, name) for part in parts])
            for name in ("packed", "block_scale", "zero")
        ]
        bias = torch.zeros(160)
        bias[96:128] = torch.from_numpy(tensors["m.k.bias"])
        target = "cuda" if layout == "tiles64" else "cpu"
        module: Any = bs.nn.Int4Linear(
            prepare(
                *joined,
                group_size=parts[0].group_size,
                layout="rows",
                bias=bias,
                dtype=torch.float16,
                target=target,
            )
        )
    else:
        module = load(ckpt, names, Options(activation=activation, layout=layout))
    jobs = tuple(LinearJob(name, f"{name}.weight") for name in names)
    job = MergedJob("m", "m", None, 0, jobs, tuple(rows.values()), activation)
    again = written(tmp_path / "out", tensors_of(model(module), [job]))
    for name in names:
        assert torch.equal(again[name].dequantize(), ckpt[name].dequantize()), name
        bias_was = tensors.get(f"{name}.bias")
        count = rows[name.removeprefix("m.")]
        expected = np.zeros(count, np.float32) if bias_was is None else bias_was
        np.testing.assert_array_equal(again[f"{name}.bias"].data, expected)


@pytest.mark.parametrize("scheme", ["modelopt-nvfp4", "modelopt-mxfp4", "awq"])
@pytest.mark.parametrize("layout", ["linear", "tiles64"])
@pytest.mark.parametrize("stored", ["each", "whole", "alternating"])
def test_experts(tmp_path, rng, scheme, layout, stored):
    """One by one with gate apart from up, or all of them and both in one tensor, rows in turns."""
    tensors: dict[str, np.ndarray] = {}
    leaves = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    for e in range(E):
        for role, shape in leaves.items():
            name = f"{X}.{e}.{role}_proj"
            tensors |= hf_models.SCHEMES[scheme].store(name, random(rng, *shape), rng)[0]
    ckpt = bs.checkpoints.open(folder(tmp_path / "in", tensors, {}))
    found = ckpt.experts(X)
    weights = found.prepare(torch.float16, layout)
    if stored == "each":
        names = {role: tuple(f"{X}.{e}.{role}_proj.weight" for e in range(E)) for role in leaves}
        whole: frozenset[str] = frozenset()
    else:
        names = {"gate_up": (f"{X}.gate_up_proj",), "down": (f"{X}.down_proj",)}
        whole = frozenset(names)
    job = ExpertsJob(*("m", X), names=names, whole=whole, alternating=stored == "alternating")
    module = ModelExperts(weights, Act("swiglu"))
    kind = {"model_type": "gpt_oss"} if stored == "alternating" else {}
    again = written(tmp_path / "out", tensors_of(model(module), [job]), **kind).experts(X)
    for one, other in zip(again.dequantize(), found.dequantize(), strict=True):
        assert torch.equal(one, other)
    assert again.fmt == found.fmt
