"""The demo's language model: its text, training, figures, and the process that runs it."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytest.importorskip("tvm")

from blockscale import checkpoints  # noqa: E402
from blockscale.building.builder import build  # noqa: E402
from blockscale.checkpoints.convert.convert import convert  # noqa: E402
from blockscale.demo import variants  # noqa: E402
from blockscale.demo.language import run, text, train  # noqa: E402
from tests.kit.paths import ROOT  # noqa: E402

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "num_hidden_layers": 1}


def small(vocabulary: int = 16):
    return train.model_of(vocabulary, **SMALL).eval()


def test_nothing_that_is_held_out_is_read():
    found = text.topics()
    read = {line for topic in found.train for line in topic.splitlines()}
    held = {line for topic in found.held for line in topic.splitlines()}
    assert not read & held
    assert len("".join(read)) > 10 * len("".join(held)) > 100_000
    assert found == text.topics()
    assert not any("  " in line for line in read), "lines are joined"


def test_tokens_stand_for_the_text():
    given = text.topics().held[0]
    tokenizer = text.trained_tokenizer([given], 300)
    tokens = text.encoded(tokenizer, [given, "naïve 漢字"])
    first, second = (tokens == 0).nonzero().flatten().tolist()
    assert first == 0
    assert tokenizer.decode(tokens[1:second].tolist()) == given
    assert tokenizer.decode(tokens[second + 1 :].tolist()) == "naïve 漢字", "no byte is unknown"
    assert tokenizer.get_vocab_size() == 300 > tokens.max()
    assert len(tokens) < 0.7 * len(given)


def test_training_learns_what_repeats_itself(monkeypatch):
    """Of a text that goes round, every token is known once the model has seen it.

    A step takes 1 / 32 s by a clock of the test's own, so that a busy machine takes as many.
    """
    ticks = itertools.count()
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 32))
    monkeypatch.setattr(train, "LENGTH", 32)
    model = small()
    before = {name: value.clone() for name, value in model.named_parameters()}
    told = []
    found = train.trained(model, torch.arange(4000) % 7, 4.0, lambda *row: told.append(row))
    assert not model.training
    assert any(not torch.equal(before[n], v) for n, v in model.named_parameters())
    assert found.tokens == found.steps * train.BATCH * train.LENGTH
    assert len(told) == found.steps == 128
    assert found.seconds == told[-1][0] == 4.0
    first, last = found.history[0][1], found.history[-1][1]
    assert abs(first - math.log(16)) < 0.5, "nothing is known at first"
    assert last < 0.5


def test_a_training_without_time_is_one_step():
    assert train.trained(small(), torch.arange(500) % 7, 0.0).steps == 1


def by_loops(model, rows) -> float:
    """Perplexity in float64, token by token."""
    lost = []
    for row in rows:
        logits = model(row[None, :-1]).logits[0].double().detach().numpy()
        for scores, token in zip(logits, row[1:].tolist(), strict=True):
            weights = np.exp(scores - scores.max())
            lost.append(-math.log(weights[token] / weights.sum()))
    return math.exp(sum(lost) / len(lost))


def test_perplexity_is_that_of_loops(monkeypatch):
    monkeypatch.setattr(run, "LENGTH", 9)
    tokens = torch.randint(16, (203,), generator=torch.Generator().manual_seed(0))
    model, other = small(), small()
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(1.5)
    models = {**dict.fromkeys(variants.LABELS, model), "decoded": model, "ours_f32": other}
    found = run.accuracy(models, tokens)
    rows = tokens[:200].view(20, 10)
    assert found["tokens"] == 180
    for name, each in (("torch_f32", model), ("ours_f32", other)):
        assert found["perplexity"][name] == pytest.approx(by_loops(each, rows), rel=1e-5)
    same = [
        bool(
            model(row[None, :-1]).logits[0, at].argmax()
            == other(row[None, :-1]).logits[0, at].argmax()
        )
        for row in rows
        for at in range(9)
    ]
    assert found["same_token"]["ours_f32"] == pytest.approx(sum(same) / len(same))
    assert found["same_token"]["torch_bf16"] == 1.0
    assert found["kernel_error"]["ours_bf16"] == 0.0
    (sentence,) = run.wrong(found["kernel_error"])
    assert sentence.startswith("language model: logits of ours_f32 differ")
    assert run.wrong({"ours_f32": 0.0, "ours_bf16": math.nan})


def test_a_library_that_lacks_a_kernel_is_refused(tmp_path):
    """Kernels are those of joined projections, and of both dtypes."""
    train.write(small(300), text.trained_tokenizer(["a"], 300), tmp_path / "plain")
    convert(checkpoints.open(tmp_path / "plain"), tmp_path / "nvfp4")
    ckpt = checkpoints.open(tmp_path / "nvfp4")
    names = dict.fromkeys(spec.name for spec in run.needed_specs(ckpt))
    assert {"linear_nvfp4_n96_k32_f32", "linear_nvfp4_n128_k32_silu_gated_bf16"} <= {*names}
    run.check_library(ckpt, names, Path("x.so"))
    names.popitem()
    with pytest.raises(
        run.files.PrerequisiteError, match=r"x\.so has no function linear_.*language"
    ):
        run.check_library(ckpt, names, Path("x.so"))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small model that was trained for a step, in float32 and NVFP4, and its library."""
    folder = tmp_path_factory.mktemp("language")
    tokenizer = text.trained_tokenizer(text.topics().held[:1], 300)
    train.write(small(300), tokenizer, folder / "float32")
    convert(checkpoints.open(folder / "float32"), folder / "nvfp4")
    ckpt = checkpoints.open(folder / "nvfp4")
    build(run.needed_specs(ckpt), folder / "kernels.so")
    return folder


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the model's process, importing this checkout."""
    command = [sys.executable, "-m", "blockscale.demo.language.run", *map(str, arguments)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_the_model_runs_through_transformers_without_tvm(made):
    done = process(
        "--folder", made, "--library", made / "kernels.so", "--seconds", "0.02", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "modelopt-nvfp4"
    assert not found["tvm_imported"]
    assert not found["wrong"]
    perplexity = found["perplexity"]
    assert perplexity["ours_f32"] == pytest.approx(perplexity["decoded"], rel=1e-5)
    assert perplexity["ours_f32"] != pytest.approx(perplexity["torch_f32"], rel=1e-6)
    count = 32 * (4 * 32 + 3 * 64)
    sizes = {key: found["bytes"][key] for key in ("fp32", "bf16", "nvfp4")}
    assert sizes == {"fp32": 4 * count, "bf16": 2 * count, "nvfp4": count * 9 // 16 + 4 * 7}
    for row in found["samples"]:
        assert set(row["texts"]) == set(variants.LABELS)
        assert all(row["texts"].values())
    assert all(rate > 0 for row in found["speed"] for rate in row["tokens_s"].values())


def test_what_is_missing_is_named(made, tmp_path):
    def said(*arguments: object) -> str:
        done = CliRunner().invoke(run.main, [str(argument) for argument in arguments])
        assert done.exit_code == 1
        return " ".join(done.output.split())

    assert "the language model's" in said("--folder", tmp_path, "--library", made / "kernels.so")
    given = "--folder", made, "--library", tmp_path / "no.so", "--out", tmp_path / "x.json"
    assert "no.so is not there; run `make demo`" in said(*given)
    assert not (tmp_path / "x.json").exists()
