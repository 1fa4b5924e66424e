"""The demo: encoder, metrics, report and refusals, without kernels and without a network.

A tiny random BERT stands for the real one; where the package with the real weights is installed,
the encoder is also held against the embedding that the model's authors publish.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("click")

from blockscale.base.errors import (  # noqa: E402
    CheckpointError,
    CompileError,
    LibraryError,
)
from blockscale.demo import (  # noqa: E402
    command,
    files,
    measure,
    metrics,
    model,
    quantise,
    tables,
    timing,
    variants,
)
from blockscale.demo.infer import wrong_kernels  # noqa: E402
from tests.kit.paths import ROOT  # noqa: E402

CONFIG = model.BertConfig(hidden=32, intermediate=64, layers=2, heads=4, eps=1e-12, positions=24)
VOCABULARY = 50


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A random checkpoint of CONFIG, with the names of a real one."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    hidden = CONFIG.hidden
    found = {
        "embeddings.word_embeddings.weight": random(VOCABULARY, hidden),
        "embeddings.position_embeddings.weight": random(CONFIG.positions, hidden),
        "embeddings.token_type_embeddings.weight": random(2, hidden),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(CONFIG.layers):
        at = f"encoder.layer.{layer}"
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        found |= {f"{name}.weight": 1 + random(hidden), f"{name}.bias": random(hidden)}
    for name, (n, k) in CONFIG.linears().items():
        prefix = model.checkpoint_name(name)
        found |= {f"{prefix}.weight": random(n, k), f"{prefix}.bias": random(n)}
    return found


def encoder(dtype: torch.dtype = torch.float32) -> model.Encoder:
    checkpoint = tensors()
    linears = model.torch_linears(CONFIG, checkpoint, dtype)
    return model.Encoder(CONFIG, checkpoint, linears, dtype)


def by_numpy(checkpoint: dict[str, torch.Tensor], ids: list[int]) -> np.ndarray:
    """The embedding of one sentence, in float64 and loops: no batch, no mask, no shared code."""
    w = {name: t.double().numpy() for name, t in checkpoint.items()}

    def norm(x: np.ndarray, at: str) -> np.ndarray:
        mean = x.mean(1, keepdims=True)
        spread = np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + CONFIG.eps)
        return (x - mean) / spread * w[f"{at}.weight"] + w[f"{at}.bias"]

    def linear(x: np.ndarray, at: str) -> np.ndarray:
        return x @ w[f"{at}.weight"].T + w[f"{at}.bias"]

    x = np.stack(
        [
            w["embeddings.word_embeddings.weight"][token]
            + w["embeddings.position_embeddings.weight"][i]
            + w["embeddings.token_type_embeddings.weight"][0]
            for i, token in enumerate(ids)
        ]
    )
    x = norm(x, "embeddings.LayerNorm")
    size = CONFIG.hidden // CONFIG.heads
    for layer in range(CONFIG.layers):
        at = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{at}.attention.self.{p}") for p in ("query", "key", "value"))
        context = np.empty_like(x)
        for head in range(CONFIG.heads):
            part = slice(head * size, (head + 1) * size)
            score = np.exp(q[:, part] @ k[:, part].T / math.sqrt(size))
            context[:, part] = score / score.sum(1, keepdims=True) @ v[:, part]
        y = linear(context, f"{at}.attention.output.dense")
        x = norm(x + y, f"{at}.attention.output.LayerNorm")
        y = linear(x, f"{at}.intermediate.dense")
        y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        x = norm(x + linear(y, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def padded(sentences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, sentences))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sentences])
    mask = torch.tensor([[i < len(s) for i in range(longest)] for s in sentences])
    return ids, mask


SENTENCES = [[1, 7, 9, 2], [1, 30, 31, 32, 33, 34, 49, 2], [1, 2]]


def test_encoder_equals_a_loop_in_float64():
    """float32 arithmetic over two layers: 1e-5 of the embedding's length 1."""
    found = encoder()(*padded(SENTENCES)).numpy()
    expected = np.stack([by_numpy(tensors(), ids) for ids in SENTENCES])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_padding_changes_nothing():
    batch = encoder()(*padded(SENTENCES))
    alone = torch.cat([encoder()(*padded([ids])) for ids in SENTENCES])
    assert batch.shape == (3, CONFIG.hidden)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch, alone, rtol=0, atol=1e-5)


def test_encoder_is_deterministic_and_bfloat16_is_near():
    """bfloat16 keeps 8 bits: some ten roundings of at most 2^-8 in a row stay below 5 %."""
    once, again = (encoder()(*padded(SENTENCES)) for _ in range(2))
    assert torch.equal(once, again)
    errors = metrics.row_errors(encoder(torch.bfloat16)(*padded(SENTENCES)), once)
    assert 1e-4 < errors.max() < 0.05


def test_encoder_refuses_what_it_cannot_run():
    linears = model.torch_linears(CONFIG, tensors(), torch.float32)
    del linears["1.key"]
    with pytest.raises(KeyError, match=r"no Linear given for 1\.key"):
        model.Encoder(CONFIG, tensors(), linears)
    with pytest.raises(ValueError, match=r"25 tokens exceed the model's 24 positions"):
        encoder()(*padded([[1] * 25]))


def test_config_refuses_another_activation(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"hidden_act='relu'.*is not 'gelu'"):
        model.BertConfig.read(path)


def real_model() -> files.ModelFiles:
    try:
        return files.find_model()
    except files.PrerequisiteError as error:
        pytest.skip(str(error))


def test_real_model_gives_the_published_embedding():
    """First values for this sentence on the model's public page; they have 4 digits."""
    from safetensors.torch import load_file

    found = real_model()
    config, checkpoint = model.BertConfig.read(found.config), load_file(found.weights)
    linears = model.torch_linears(config, checkpoint, torch.float32)
    run = model.Encoder(config, checkpoint, linears)
    text = ["This is an example sentence", "Each sentence is converted"]
    embedding = run(*model.tokenise(model.load_tokenizer(found.tokenizer), text))
    expected = [0.0677, 0.0635, 0.0487, 0.0793]
    torch.testing.assert_close(embedding[0, :4], torch.tensor(expected), rtol=0, atol=1e-4)
    assert len(config.linears()) == 36


def test_sentences_are_groups_without_duplicates():
    groups = files.sentence_groups()
    every = [sentence for group in groups for sentence in group]
    assert len(groups) == 30
    assert len(set(every)) == len(every) == 120
    assert {len(group) for group in groups} == {4}


def test_tokenise_masks_the_padding():
    tokenizer = model.load_tokenizer(real_model().tokenizer)
    ids, mask = model.tokenise(tokenizer, ["Hello", "Hello there, you two"])
    assert ids.shape == mask.shape == (2, 7)
    assert mask.sum(1).tolist() == [3, 7]
    assert ids[0].tolist()[3:] == [0] * 4
    assert model.tokenise(tokenizer, ["word " * 1000])[0].shape == (1, model.MAX_TOKENS)


def test_row_errors_and_spread():
    ref = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    errors = metrics.row_errors(ref + torch.tensor([[0.0, 0.5], [0.0, 0.0], [0.0, 2.0]]), ref)
    assert errors.tolist() == [0.1, 0.0, 1.0]
    assert metrics.spread(errors) == {"median": 0.1, "max": 1.0}
    assert math.isnan(metrics.spread(torch.tensor([0.0, math.nan]))["max"])
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(3, 2\) differ"):
        metrics.row_errors(torch.zeros(2, 3), torch.zeros(3, 2))


def test_neighbours_of_points_on_a_line():
    """Points at 0, 1, 3, 7: nearest others by hand; moving the last one changes some of them."""
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert metrics.neighbours(line, 2).tolist() == [[1, 2], [0, 2], [1, 0], [2, 1]]
    moved = torch.tensor([[0.0], [1.0], [3.0], [-1.5]])
    assert metrics.neighbours(moved, 2).tolist() == [[1, 3], [0, 2], [1, 0], [0, 1]]
    same = metrics.agreement(moved, line, count=2)
    assert same == {"top1": 0.75, "top2": (0.5 + 1 + 1 + 0.5) / 4}
    assert metrics.agreement(line, line, 3) == {"top1": 1.0, "top3": 1.0}
    assert metrics.group_hits(line, [0, 0, 1, 1]) == 0.75
    with pytest.raises(ValueError, match=r"count=4 is not in 1..3"):
        metrics.neighbours(line, 4)


def test_decode_reads_every_code():
    """All 16 codes, low nibble first, under scales 1 and 2 and a global scale of one half."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = (codes[::2] | codes[1::2] << 4)[None]
    scale = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    expected = [[v / 2 for v in values] + values]
    assert metrics.decode_nvfp4(packed, scale, torch.tensor([0.5])).tolist() == expected


def test_interleaved_takes_turns(monkeypatch: pytest.MonkeyPatch):
    """One untimed and one timed call each, as often as is asked for however long it takes."""
    monkeypatch.setattr(timing, "LEAST_SAMPLE_S", 0.0)
    order: list[str] = []
    calls = {name: lambda _, name=name: order.append(name) for name in "ab"}
    times, _ = timing.interleaved(calls, 100, seconds=0, least=3)
    assert "".join(order).endswith("aabb" * 3)
    assert "".join(order).removesuffix("aabb" * 3) == "aaaabbbb"  # how long a call takes
    assert {name: time.samples for name, time in times.items()} == {"a": 3, "b": 3}


# Milliseconds of a matrix product, AMD EPYC, 2 cores: alone, and beside two busy loops.
QUIET = (1.42, 1.44, 1.45, 1.47, 1.48, 1.49, 1.50, 1.51, 1.53)
BUSY = (1.44, 2.55, 5.42, 5.45, 5.48, 5.62, 5.67, 9.48, 17.9)


@pytest.mark.parametrize(
    ("busy", "own", "switches", "repeats", "words"),
    [
        (2.00, 1.98, 38, QUIET, []),
        (2.00, 1.84, 38, QUIET, []),  # 8 % for others
        (2.02, 1.00, 255, BUSY, ["took 51% of", "leave a core 128 times a second", "over 3.8"]),
        (2.02, 1.00, 255, QUIET, ["took 51% of"]),
        (None, 1.00, 255, BUSY, ["leave a core 128 times a second", "over 3.8 times the fastest"]),
        (None, 2.00, 255, QUIET, []),  # more threads than cores, but no call the slower for it
        (2.00, 2.00, 10, BUSY, ["half of the repeats took over 3.8 times the fastest one"]),
    ],
)
def test_a_busy_machine_is_noticed(monkeypatch, busy, own, switches, repeats, words):
    """From one second on two cores: what all used, what we used, what the repeats look like."""
    seconds = iter((5.0, 6.0))
    totals = iter((0.0 if busy is not None else None, busy))
    used = iter(
        SimpleNamespace(ru_utime=0.9 * t, ru_stime=0.1 * t, ru_nivcsw=n)
        for t, n in ((0.0, 7), (own, 7 + switches))
    )
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(timing, "busy_seconds", lambda: next(totals))
    monkeypatch.setattr(timing.resource, "getrusage", lambda who: next(used))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    watched = timing.Clock().watched([QUIET, repeats])
    said = watched.disturbed()
    assert all(part in said for part in words)
    assert said.count(", ") == max(0, len(words) - 1)
    assert bool(said) == bool(words) == ("disturbed" in watched.to_json())


def test_seconds_of_the_cores_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only our cores, without idle and iowait; guests are in user already."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 5000 700 1 2 47 90 9\n"
        "cpu1 999 999 999 999 999 999 999 999 0 0\n"
        "cpu12 10 0 0 1 1 0 0 0 0 0\nintr 1 2\n"
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 12})
    assert timing.busy_seconds(stat) == 210 / os.sysconf("SC_CLK_TCK")
    assert timing.busy_seconds(tmp_path / "none") is None


def test_real_load_is_noticed():
    """As many busy loops as cores, beside a second of calls that use them all; 2 s."""
    loop = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    loops = [subprocess.Popen(loop, stdout=subprocess.PIPE) for _ in os.sched_getaffinity(0)]
    try:
        for each in loops:
            each.stdout.readline()
        x = torch.randn(256, 256)
        _, watched = timing.interleaved({"mm": lambda _: x @ x}, 1000, seconds=1)
    finally:
        for each in loops:
            each.kill()
            each.wait()
            each.stdout.close()
    assert "other programs took" in watched.disturbed()
    assert watched.others > 0.2


def stored(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file as `quantise_model` writes it, with random bytes for the weights."""
    from safetensors.torch import save_file

    saved = {n: t for n, t in tensors().items() if "embeddings" in n or "LayerNorm" in n}
    for name, (n, k) in CONFIG.linears().items():
        prefix = model.checkpoint_name(name)
        saved |= {
            f"{prefix}.packed": torch.randint(256, (n, k // 2), dtype=torch.uint8),
            f"{prefix}.block_scale": torch.ones(n, k // 16).to(torch.float8_e4m3fn),
            f"{prefix}.global_scale": torch.ones(1),
            f"{prefix}.bias": torch.zeros(n),
        }
    path = tmp_path / "model.safetensors"
    save_file(saved, path, metadata={"format": quantise.FORMAT})
    return path, saved


def test_quantised_file_is_read_back(tmp_path: Path):
    path, saved = stored(tmp_path)
    found, linears = quantise.load_quantised(CONFIG, path)
    assert set(linears) == set(CONFIG.linears())
    assert torch.equal(linears["1.output"].packed, saved["encoder.layer.1.output.dense.packed"])
    assert found["embeddings.word_embeddings.weight"].data_ptr() % 64 == 0
    count = sum(n * k for n, k in CONFIG.linears().values())
    sizes = variants.weight_bytes(CONFIG, tensors(), linears)
    assert sizes["fp32"] == 4 * count
    assert sizes["nvfp4"] == count // 2 + count // 16 + 4 * len(linears)


def test_damaged_quantised_files_are_refused(tmp_path: Path):
    from safetensors.torch import save_file

    path, saved = stored(tmp_path)
    save_file(saved, path, metadata={"format": "another"})
    with pytest.raises(files.PrerequisiteError, match=r"has the format 'another'.*make demo"):
        quantise.load_quantised(CONFIG, path)
    del saved["encoder.layer.1.attention.self.key.block_scale"]
    save_file(saved, path, metadata={"format": quantise.FORMAT})
    with pytest.raises(files.PrerequisiteError, match=r"no .*key\.block_scale, which every"):
        quantise.load_quantised(CONFIG, path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(files.PrerequisiteError, match=r"not a readable safetensors file"):
        quantise.load_quantised(CONFIG, path)


def measured(tmp_path: Path, wrong: str = "") -> measure.Measurement:
    """A Measurement whose fp32 checkpoint is what the 4-bit file stands for, so nothing is lost.

    The kernels are torch's; the one called `wrong` forgets the bias.
    """
    path, _ = stored(tmp_path)
    found, linears = quantise.load_quantised(CONFIG, path)
    checkpoint = dict(found)
    for name, weight in linears.items():
        prefix = model.checkpoint_name(name)
        checkpoint[f"{prefix}.weight"] = weight.decoded().float()
        found[f"{prefix}.bias"] = checkpoint[f"{prefix}.bias"] = torch.ones(len(weight.packed))

    def kernel(name):
        def call(x, packed, scale, global_scale, bias):
            assert scale.dtype == torch.uint8
            weight = metrics.decode_nvfp4(packed, scale.view(torch.float8_e4m3fn), global_scale)
            return (x.double() @ weight.T + (0 if name == wrong else bias)).to(x.dtype)

        return call

    functions = {name: kernel(name) for name in variants.needed_functions(CONFIG).values()}
    made = measure.Measurement(CONFIG, checkpoint, found, linears, functions)
    ids = [[1, 5 + i, 6 + i // 2, 2][: 3 + i % 2] for i in range(8)]
    made.ids, made.mask = padded(ids)
    made.group = [i // 2 for i in range(8)]
    return made


def test_measurement_of_a_lossless_model(tmp_path: Path):
    made = measured(tmp_path)
    rows = made.layers()
    assert [row["layer"] for row in rows] == list(CONFIG.linears())
    for row in rows:
        assert row["weight_error"] < 1e-15
        assert row["ours_f32"]["max"] < 1e-5
        assert row["kernel_ours_f32"]["max"] < 1e-6
        assert 1e-4 < row["kernel_ours_bf16"]["max"] < 4e-3
    assert wrong_kernels(rows) == []
    end = made.end_to_end()
    assert end["torch_f32"]["max"] == 0
    assert end["ours_f32"]["max"] < 1e-4
    assert end["ours_f32"]["top1"] == end["ours_f32"]["top5"] == 1


def test_measurement_finds_a_wrong_kernel(tmp_path: Path):
    rows = measured(tmp_path, wrong="linear_nvfp4_n64_k32_f32").layers()
    sentences = wrong_kernels(rows)
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "layer 0.intermediate",
        "layer 1.intermediate",
    ]


def test_library_without_a_function_is_refused():
    names = list(variants.needed_functions(CONFIG).values())
    assert names[:2] == ["linear_nvfp4_n32_k32_f32", "linear_nvfp4_n32_k32_bf16"]
    assert [spec.name for spec in variants.needed_specs(CONFIG)] == names
    variants.check_library(CONFIG, dict.fromkeys(names), "x.so")
    with pytest.raises(files.PrerequisiteError, match=rf"x\.so has no function {names[-1]}, but"):
        variants.check_library(CONFIG, dict.fromkeys(names[:-1]), "x.so")


def test_missing_prerequisites_are_named(tmp_path: Path):
    with pytest.raises(files.PrerequisiteError, match=r"no_such_model.*not installed; run `python"):
        files.find_model("no_such_model")
    with pytest.raises(files.PrerequisiteError, match=r"modules no_a, no_b are not installed"):
        files.need_modules("json", "no_a", "no_b")
    with pytest.raises(files.PrerequisiteError, match=r"the library .*x\.so is not there; build"):
        files.need_file(tmp_path / "x.so", "the library", "build it")


def infer(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the second process, importing this checkout."""
    command = [sys.executable, "-m", "blockscale.demo.infer", *map(str, arguments)]
    root = str(ROOT)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_faster_machine_is_no_gain_of_the_search():
    """Earlier sessions were three times slower: the default, measured again, counts as the best."""
    from blockscale.tuning.task import Task

    said: list[str] = []
    task: Any = SimpleNamespace(default_us=30.0, best_us=27.0, refused=0, tag="w", say=said.append)
    again: Any = SimpleNamespace(kind="default", record=False)
    Task.finish(task, again, 10.0, None)
    assert (task.default_us, task.best_us, task.ready) == (10.0, 10.0, True)
    found = {"default": {"w": task.default_us}, "best": {"w": task.best_us}, "history": []}
    assert "the best are 1.00 x as fast" in tables.search(found)
    Task.finish(task, again, math.inf, "RuntimeError: no")
    assert task.default_us == 10.0


def test_infer_without_a_library_says_so(tmp_path: Path):
    path, _ = stored(tmp_path)
    done = infer("--library", tmp_path / "no.so", "--weights", path)
    assert done.returncode == 1
    assert "the library" in done.stderr
    assert "no.so is not there; run `make demo`" in " ".join(done.stderr.split())


def test_infer_refuses_what_is_not_a_library(tmp_path: Path):
    real_model()
    path, _ = stored(tmp_path)
    library = tmp_path / "bad.so"
    library.write_bytes(b"no ELF file")
    done = infer("--library", library, "--weights", path, "--out", tmp_path / "out.json")
    assert done.returncode == 1
    assert f"{library} does not load" in " ".join(done.stderr.split())
    assert not (tmp_path / "out.json").exists()


def test_writes_are_all_or_nothing(tmp_path: Path):
    path = tmp_path / "new" / "file.json"
    files.write_json(path, {"a": [1.0, math.inf, math.nan]})
    assert json.loads(path.read_text()) == {"a": [1.0, None, None]}

    def fail(new: Path) -> None:
        new.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, fail)
    assert json.loads(path.read_text())["a"][0] == 1.0
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def refused(*given: str) -> str:
    """Return what the demo's command says, which ends before it quantises anything."""
    from click.testing import CliRunner

    done = CliRunner().invoke(command.main, given)
    assert done.exit_code == 1, done.output
    assert not isinstance(done.exception, Exception)
    assert "Quantise" not in done.output
    return " ".join(done.output.split())


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo start without the real model and without transformers."""
    monkeypatch.setattr(files, "need_modules", lambda *names: None)
    monkeypatch.setattr(files, "find_model", lambda: None)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("seconds", ["0.05", "-1", "nan", "inf"])
def test_times_that_are_none_are_refused_first(tmp_path: Path, seconds: str):
    for name in ("--seconds", "--language-seconds"):
        said = refused(name, seconds, "--out", str(tmp_path))
        assert f"demo: {name} {seconds} is no time to work in; give 0.1 or more" in said


@pytest.mark.usefixtures("found")
def test_a_folder_that_cannot_be_used_is_refused_first(tmp_path: Path):
    """Not writable, or in use by another demo, or by a search."""
    from blockscale.building.store import Lock

    (tmp_path / "file").write_text("")
    said = refused("--out", str(tmp_path / "file" / "dist"))
    assert "dist (Not a directory); name another folder with --out" in said
    for folder, doing in ((tmp_path, "running the demo"), (tmp_path / "tuning", "tuning")):
        with Lock(folder, doing):
            said = refused("--out", str(tmp_path))
        assert f"is {doing} here; only one may" in said


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "x.so"), "demo: x.so: No space left on device; "),
        (CompileError("link: gcc is not there"), "link: gcc is not there"),
        (CheckpointError("model: has no file"), "model: has no file"),
        (LibraryError("x.so: is none"), "x.so: is none"),
    ],
)
def test_what_ends_a_run_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
):
    def run(self: object, *given: object) -> None:
        raise error

    monkeypatch.setattr(command.Demo, "run", run)
    assert f"Error: {words}" in refused("--out", str(tmp_path))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_of_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch):
    """What it lacks is "?"; the spinner needs nothing that it lacks."""
    import io

    from rich.console import Console

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    files.replace_what_cannot_be_printed()
    console = Console(file=sys.stdout, width=80, force_terminal=True)
    with files.status(console, "training"):
        console.print("a \ufffd \u201cq\u201d", markup=False)
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert ("a \ufffd \u201cq\u201d" if encoding == "utf-8" else "a ? ?q?") in text
    assert (text.replace("\x1b[?", "").count("?") == 3) == (encoding != "utf-8")
