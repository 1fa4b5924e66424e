"""bench.gpu.engines on a CPU with tiny models: everything but graphs and real sizes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.pairwise import exhaustive, few
from tests.reference.core import e2m1_decode

pytest.importorskip("transformers")
engine_models = pytest.importorskip("bench.gpu.engine_models")
engines = pytest.importorskip("bench.gpu.engines")

FEW = ("--tiny", "--no-compile", "--batches", "1", "2", "--prompt", "24", "--context", "12")
STEPS = ("--steps", "2", "--replays", "3")


def test_a_checkpoint_holds_what_its_headers_say(tmp_path):
    """Random values of the deviation that is asked for; without data the same headers."""
    shape = engine_models.TINY["tiny-qwen3-moe"]
    size = engine_models.write(shape, tmp_path / "whole")
    assert engine_models.write(shape, tmp_path / "hollow", data=False) == size
    whole, hollow = (bs.checkpoints.open(tmp_path / name) for name in ("whole", "hollow"))
    assert whole.kind == hollow.kind == "modelopt-nvfp4"
    assert whole.names == hollow.names
    weight = whole["model.layers.1.mlp.experts.3.down_proj"]
    assert weight.shape == (256, 128)
    codes = np.stack([weight.packed.numpy() & 15, weight.packed.numpy() >> 4], -1)
    assert np.bincount(codes.ravel(), minlength=16).min() > codes.size / 32
    values = e2m1_decode(codes.reshape(256, 128)) * np.repeat(
        weight.block_scale.float().numpy(), 16, 1
    )
    values *= float(weight.global_scale)
    assert np.allclose(values, weight.dequantize(), rtol=1e-6, atol=0)
    assert 0.8 < values.std() / engine_models.STD < 1.25
    assert not torch.equal(weight.packed, whole["model.layers.0.mlp.experts.3.down_proj"].packed)


def test_names_are_all_kernels_of_the_models_that_are_chosen(capsys):
    assert engines.main(["--names", "--only", "gpt-oss-20b"]) == 0
    names = capsys.readouterr().out.split()
    assert "fused_moe_mxfp4_e32_k4_h2880_i2880_swiglu_oai_bias_tiles64_bf16" in names
    assert "linear_nvfp4_n512_k256_tiles64_bf16" in names, "the tiny models are checked too"
    assert not any("n128256" in name for name in names), "nobody asked for Llama"


def test_headers_are_described(tmp_path):
    assert engines.main(["--describe", str(tmp_path), "--only", "llama-3-8b-head"]) == 0
    ckpt = bs.checkpoints.open(tmp_path / "llama-3-8b-head")
    assert ckpt.entries["lm_head.weight"].shape == (128256, 4096)
    assert ckpt.entries["lm_head.weight"].fmt == "nvfp4"


@pytest.mark.parametrize("names", few([["tiny-llama"], [*engine_models.TINY]]))
def test_tiny_models_are_right(tmp_path, monkeypatch, names):
    """The check that runs first on a GPU: logits, and those of steps with a static cache."""
    tiny = {name: engine_models.TINY[name] for name in names}
    monkeypatch.setattr(engines, "TINY", tiny)
    out = tmp_path / "check.json"
    given = ["--part", "tiny", "check", "--folder", str(tmp_path), "--out", str(out), *STEPS]
    assert engines.main([*given, "--context", "12"]) == 0
    found = json.loads(out.read_text())
    assert not engines.bad([found])
    assert {*tiny} <= {*found}
    for name in tiny:
        assert 1e-4 < found[name]["error"] < engines.BOUND, "bfloat16 beside float32"


START = subprocess.run


def here(command, **options):
    """Run a part in this process, which has imported what it needs; compilers as they are."""
    if command[2:3] != ["bench.gpu.engines"]:
        return START(command, **options)
    try:
        return subprocess.CompletedProcess(command, engines.main(command[3:]))
    except ValueError as error:
        return subprocess.CompletedProcess(command, 1, stderr=str(error))


@pytest.mark.parametrize("name", ["tiny-llama", pytest.param("tiny-gpt-oss", marks=exhaustive)])
def test_every_road_is_measured(tmp_path, capfd, monkeypatch, name):
    """Results as they come, the table; the next test has a part in a process of its own."""
    if name == "tiny-llama":
        monkeypatch.setattr(engines.subprocess, "run", here)
    out = tmp_path / "engines.json"
    given = [*FEW, *STEPS, "--only", name, "--folder", str(tmp_path), "--out", str(out)]
    assert engines.main(given) == 0
    results = json.loads(out.read_text())
    roads = {row["road"]: row for row in results["rows"]}
    kind = engine_models.TINY[name].kind
    wanted = ["ours", "apart", "bfloat16"] if kind == "llama" else ["ours", "stock", "bfloat16"]
    assert [*roads] == wanted
    for road, row in roads.items():
        batches = [each["batch"] for each in row["decode"]]
        twice = row["road"] == "ours" if kind == "llama" else row["road"] != "ours"
        assert batches == [1, 2] * (2 if twice else 1)
        assert all(each["error"] < engines.BOUND for each in row["decode"])
        assert row["prefill"]["tokens"] == 24
        assert ("write_s" in row) == (road != "bfloat16")
        assert ("load_s" in row) == (road != "bfloat16"), "random weights are not loaded"
    assert roads["ours"]["generated"] == [2, 9]
    assert roads["ours"]["bytes"] < 0.6 * roads["bfloat16"]["bytes"]
    assert "x1.00 of bfloat16" in capfd.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["engines.json"], "checkpoints are removed"


def test_a_part_that_fails_is_told(tmp_path, capfd, monkeypatch):
    """And does not stop the others: it is a process of its own, as every part."""

    def started(command, **options):
        return (START if "ours" in command else here)(command, **options)

    monkeypatch.setattr(engines.subprocess, "run", started)
    monkeypatch.setattr(engines, "write", lambda _, folder: folder.mkdir())
    out = tmp_path / "engines.json"
    given = [*FEW, *STEPS, "--only", "tiny-llama", "--folder", str(tmp_path), "--out", str(out)]
    assert engines.main(given) == 1
    ours, apart, plain = json.loads(out.read_text())["rows"]
    assert "config.json" in ours["failed"]
    assert "config.json" in apart["failed"]
    assert [each["batch"] for each in plain["decode"]] == [1, 2]
    assert "wrong or failed: tiny-llama ours" in capfd.readouterr().err


def test_bounds_count_the_experts_that_are_hit():
    """Of four experts one token meets all of its four; of 32 some."""
    shape = engine_models.Shape(
        "qwen3_moe", {**engine_models.TINY["tiny-qwen3-moe"].config, "num_experts": 32}
    )
    model = engines.plain(shape)
    experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    others = sum(p.nbytes for n, p in model.named_parameters() if ".experts." not in n)
    others -= model.model.embed_tokens.weight.nbytes
    buffers = sum(b.nbytes for b in model.buffers())
    assert engines.weight_bytes(model, 1) == others + buffers + experts * 4 // 32
    assert engines.weight_bytes(model, 1000) == pytest.approx(others + buffers + experts, rel=1e-6)
    layer = 256 * 64 * 2 * (4 + 2) + 3 * 256 * 128 * 4
    assert engines.active(shape) == 2 * layer


def test_the_table_says_how_much_faster():
    row = {"how": "graph", "batch": 1, "tokens_s": 100.0, "floor_us": 1.0, "error": 0.0}
    rows = [
        {
            "case": "m-head",
            "road": "ours",
            "decode": [{**row, "us": 40.0}],
            "load_s": 2.0,
            "bytes": 5e9,
            "load_peak_bytes": 6e9,
        },
        {
            "case": "m",
            "road": "bfloat16",
            "bytes": 16e9,
            "load_peak_bytes": 17e9,
            "decode": [{**row, "us": 120.0}, {**row, "us": 100.0}, {"failed": "memory"}],
        },
    ]
    loaded, first, made, *others = engines.lines(rows)
    assert loaded.endswith("loaded in 2.0 s, 5.0 GB, peak meanwhile 6.0")
    assert made.endswith("made, not loaded, 16.0 GB, peak meanwhile 17.0")
    assert first.endswith("x2.50 of bfloat16"), "the faster of both ways to run experts"
    assert [line[-18:] for line in others[:2]] == [" x0.83 of bfloat16", " x1.00 of bfloat16"]
    assert "memory" in others[2]


def test_roomier_of_both_places():
    assert Path(engines.spacious()).is_dir()
