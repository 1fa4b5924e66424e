"""`blockscale convert`: what it writes, that it goes on after a kill, what it refuses."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.convert import (
    convert as checkpoint_convert,
)
from blockscale.checkpoints.convert import (
    writer as checkpoint_writer,
)
from blockscale.checkpoints.convert.convert import convert
from blockscale.checkpoints.convert.writer import Output, ShardWriter
from tests.kit import checkpoint_files as files
from tests.kit.pairwise import few
from tests.kit.paths import CHECKPOINTS as GOLDEN


def plain(path: Path, layers: int = 2, rows: int = 96, cols: int = 64, dtype=np.float32) -> Path:
    rng = np.random.default_rng(3)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((32, cols)).astype(dtype)}
    for i in range(layers):
        base = f"model.layers.{i}."
        tensors[base + "mlp.up_proj.weight"] = rng.standard_normal((rows, cols)).astype(dtype)
        tensors[base + "mlp.gate.weight"] = rng.standard_normal((4, cols)).astype(dtype)
        tensors[base + "odd.weight"] = rng.standard_normal((4, cols - 3)).astype(dtype)
        tensors[base + "norm.weight"] = np.ones(cols, dtype)
    path = files.folder(path, tensors, {"model_type": "llama", "torch_dtype": "float32"})
    (path / "tokenizer.json").write_text('{"a": 1}')
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_plain_weights_are_quantised_and_others_copied(tmp_path, fmt):
    source = bs.checkpoints.open(plain(tmp_path / "in"))
    convert(source, tmp_path / "out", fmt, keep=("*.layers.1.*",))
    made = bs.checkpoints.open(tmp_path / "out")
    assert made.names == source.names
    assert {n: made[n].fmt for n in made if made[n].fmt != "f32"} == {
        "model.layers.0.mlp.up_proj.weight": fmt
    }
    for name in made:
        if made[name].packed is None:
            assert torch.equal(made[name].data, source[name].data)
    weight, values = made["model.layers.0.mlp.up_proj"], source["model.layers.0.mlp.up_proj"].data
    top = values.abs().max() / 2688
    if fmt == "nvfp4":
        assert weight.global_scale == top
    packed, scale = bs.quantize(values, fmt, top[None] if fmt == "nvfp4" else None)
    assert torch.equal(weight.packed, packed)
    assert torch.equal(weight.block_scale.view(torch.uint8), scale.view(torch.uint8))
    error = (weight.dequantize() - values).norm() / values.norm()
    assert error < 0.15  # 9.5 % of Gaussian weights in NVFP4, 12 % in MXFP4 with scales rounded up
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == fmt.upper()
    assert "model.embed_tokens" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 3000])
@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.iterdir()))
def test_repacked_exports_have_the_same_values(tmp_path, name, shard_bytes):
    source = bs.checkpoints.open(GOLDEN / name)
    convert(source, tmp_path / "out", shard_bytes=shard_bytes)
    made = bs.checkpoints.open(tmp_path / "out")
    assert made.names == source.names
    assert len(made.shards) > 5 or shard_bytes > 3000
    for key in made:
        a, b = source[key], made[key]
        assert (a.fmt, a.shape, a.gate_up) == (b.fmt, b.shape, b.gate_up)
        rtol = 2.0**-22 if a.global_divisor is not None else 0  # its reciprocal is rounded
        torch.testing.assert_close(b.dequantize(), a.dequantize(), rtol=rtol, atol=0)


@pytest.mark.parametrize("act_order", [False, True])
def test_int4_is_repacked_without_rounding(tmp_path, act_order):
    rng = np.random.default_rng(1)
    index = rng.permutation(64) // 32 if act_order else np.arange(64) // 32
    codes, zero, scale, values = files.int4(rng, 24, 64, 32, index)
    straight = list(range(8))
    tensors = {
        "p.qweight": np.ascontiguousarray(files.words(codes, straight).T),
        "p.qzeros": files.words((zero - 1).T, straight),
        "p.scales": scale.T,
        "p.g_idx": index.astype(np.int32),
    }
    convert(bs.checkpoints.open(files.folder(tmp_path / "in", tensors)), tmp_path / "out")
    made = bs.checkpoints.open(tmp_path / "out")
    assert made.kind == "blockscale-int4"
    np.testing.assert_array_equal(made["p"].dequantize().numpy(), values.astype(np.float32))


def test_a_second_run_changes_nothing_and_other_contents_are_refused(tmp_path):
    source = bs.checkpoints.open(plain(tmp_path / "in"))
    convert(source, tmp_path / "out", shard_bytes=4000)
    before = contents(tmp_path / "out")
    convert(source, tmp_path / "out", shard_bytes=4000)
    assert contents(tmp_path / "out") == before
    with pytest.raises(CheckpointError, match="another checkpoint, or with other options"):
        convert(source, tmp_path / "out", "mxfp4", shard_bytes=4000)
    with pytest.raises(CheckpointError, match=r"has other contents, e.g. 'config.json'"):
        convert(source, tmp_path / "in")
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="is being written by another process"):
        convert(source, tmp_path / "out", shard_bytes=4000)
    os.close(descriptor)


class Killed(BaseException):
    """Ends a run like a kill does: nothing is cleaned up after it."""


def moe(path: Path) -> Path:
    """Plain experts in one tensor, K second."""
    rng = np.random.default_rng(4)
    experts = "model.layers.0.mlp.experts."
    tensors = {
        experts + "gate_up_proj": rng.standard_normal((2, 64, 64)).astype(np.float32),
        experts + "down_proj": rng.standard_normal((2, 32, 64)).astype(np.float32),
        "model.layers.0.self_attn.o_proj.weight": rng.standard_normal((64, 64)).astype(np.float32),
    }
    return files.folder(path, tensors, {"model_type": "llama4"})


@pytest.mark.parametrize(
    "options",
    [
        {"target": "sm_90a"},
        *(pytest.param(o, marks=pytest.mark.exhaustive) for o in ({}, {"layout": "128x4"})),
    ],
)
def test_a_run_cut_before_any_write_or_rename_gives_the_same_bytes(tmp_path, monkeypatch, options):
    source = bs.checkpoints.open(
        moe(tmp_path / "in") if options else plain(tmp_path / "in", layers=1)
    )
    options = {"shard_bytes": 6000, **options}
    convert(source, tmp_path / "whole", **options)
    whole, names = contents(tmp_path / "whole"), bs.checkpoints.open(tmp_path / "whole").names
    real = {
        "replace": os.replace,
        "_put": checkpoint_writer.ShardWriter._put,
        "fsync": os.fsync,
    }
    left = [0]

    def counted(real):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments, **named)

        return call

    monkeypatch.setattr(os, "replace", counted(real["replace"]))
    monkeypatch.setattr(os, "fsync", counted(real["fsync"]))
    monkeypatch.setattr(checkpoint_writer.ShardWriter, "_put", counted(real["_put"]))
    monkeypatch.setattr(checkpoint_writer.ShardWriter, "abandon", lambda self: None)
    out, cuts = tmp_path / "out", 0
    while True:
        left[0] = cuts
        try:
            convert(source, out, **options)
            break
        except Killed:
            cuts += 1
        if contents(out) == whole:  # all but the last name was on the disk
            assert bs.checkpoints.open(out).names == names
        elif (out / checkpoint_convert.RECORD).exists():
            with pytest.raises(CheckpointError, match="holds an unfinished conversion"):
                bs.checkpoints.open(out)
        else:
            with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
                bs.checkpoints.open(out)
        left[0] = 1 << 30
        convert(source, out, **options)
        assert contents(out) == whole
        shutil.rmtree(out)
    assert cuts > 20
    assert contents(out) == whole


@pytest.mark.always
def test_a_killed_process_is_finished_by_the_next(tmp_path):
    path = plain(tmp_path / "in", layers=12, rows=1024, cols=1024)
    command = [
        sys.executable,
        "-m",
        "blockscale.cli.command",
        "convert",
        str(path),
        "--shard-mib",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    options = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    out = tmp_path / "out"
    process = subprocess.Popen([*command, "-o", str(out)], **options)
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        if len(list(out.glob("model-*.safetensors"))) >= 3:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="holds an unfinished conversion"):
        bs.checkpoints.open(out)
    assert subprocess.run([*command, "-o", str(out)], **options).returncode == 0
    convert(bs.checkpoints.open(path), tmp_path / "whole", shard_bytes=1 << 20)
    assert contents(out) == contents(tmp_path / "whole")


def test_values_that_no_format_holds_and_bad_options_are_refused(tmp_path):
    value = np.ones((4, 64), np.float32)
    value[3, 5] = np.nan
    source = bs.checkpoints.open(files.folder(tmp_path / "in", {"p.weight": value}))
    with pytest.raises(CheckpointError, match=r"p.weight has values that are NaN or infinite"):
        convert(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    with pytest.raises(ValueError, match="fmt is 'int4', but must be one of nvfp4, mxfp4"):
        convert(source, tmp_path / "other", "int4")
    with pytest.raises(ValueError, match="shard_bytes is 0, but must be positive"):
        convert(source, tmp_path / "other", shard_bytes=0)


def test_files_of_the_model_are_copied(tmp_path):
    """All small ones of a folder; beside a single file, that may lie anywhere, only a model's."""
    source = plain(tmp_path / "in", layers=1)
    own = {"modeling_x.py", "configuration_x.py", "merges.txt", "generation_config.json"}
    other = {"diary.txt", "photos.json", "utils.py", "vocab.bpe"}
    for name in own | other:
        (source / name).write_text("{}")
    (source / "old.safetensors.index.json").write_text("{}")
    convert(bs.checkpoints.open(source / "model.safetensors"), str(tmp_path / "one"))
    written = {"model.safetensors", "config.json", "blockscale_convert.json", "tokenizer.json"}
    assert contents(tmp_path / "one").keys() == written | own | {"vocab.bpe"}
    (source / "old.safetensors.index.json").unlink()
    convert(bs.checkpoints.open(source), tmp_path / "all")
    assert contents(tmp_path / "all").keys() == written | own | other


def test_a_weight_of_zeros_stays_zero(tmp_path):
    source = files.folder(tmp_path / "in", {"p.weight": np.zeros((4, 64), np.float32)})
    convert(bs.checkpoints.open(source), tmp_path / "out")
    assert not bs.checkpoints.open(tmp_path / "out")["p"].dequantize().any()


@pytest.mark.parametrize("limit", [100, 1000, 30_000])
def test_a_full_disk_is_said_and_the_next_run_goes_on(tmp_path, limit):
    """No file may grow beyond the limit, like on a disk that is full; then there is room again."""
    source = bs.checkpoints.open(plain(tmp_path / "in", rows=1024))
    convert(source, tmp_path / "whole", shard_bytes=60_000)
    out = tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: File too large; make room"):
            convert(source, out, shard_bytes=60_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.glob(".*.partial"))  # what was begun takes no room
    words = "unfinished conversion" if (out / "blockscale_convert.json").exists() else "has no "
    with pytest.raises(CheckpointError, match=words):
        bs.checkpoints.open(out)
    convert(source, out, shard_bytes=60_000)
    assert contents(out) == contents(tmp_path / "whole")


MEMORY = """
import sys, threading, time
from pathlib import Path
from blockscale import checkpoints
from blockscale.checkpoints.convert.convert import convert

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

small, large, out, target = sys.argv[1:]
convert(checkpoints.open(small), Path(out + "-small"), target=target)
before, most, running = anonymous(), [0], [True]

def watch():
    while running:
        most[0] = max(most[0], anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
convert(checkpoints.open(large), Path(out), target=target)
running.clear()
thread.join()
print(most[0] - before)
"""


@pytest.mark.parametrize(
    "kind", few(["stacked", "plain, not aligned", "transposed codes"], every=3)
)
def test_memory_stays_below_twice_the_largest_tensor(tmp_path, kind):
    """Of a process of its own, which has converted a small checkpoint before: torch, kernels.

    RssAnon leaves out mapped files, whose pages go when others need memory.
    """
    rng = np.random.default_rng(5)

    def tensors(scale: int) -> dict[str, np.ndarray]:
        head = "model.layers.0.mlp.experts."
        if kind.startswith("plain"):
            value = rng.standard_normal((64 * scale, 64 * scale)).astype(np.float32)
            return {f"m.{i}.o_proj.weight": value for i in range(2)}
        if kind == "stacked":
            shapes = (4, 32 * scale, 64 * scale), (4, 32 * scale, 32 * scale)
            names = ("gate_up_proj", "down_proj")
            values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
            return {head + n: value for n, value in zip(names, values, strict=True)}
        codes = rng.integers(0, 256, (4, 16 * scale, 64 * scale)).astype(np.uint8)
        scales = rng.integers(1, 120, (4, 2 * scale, 64 * scale)).astype(np.uint8)
        names = {"gate_up_proj": codes, "gate_up_proj_weight_scale": scales.view(files.E4M3)}
        codes = rng.integers(0, 256, (4, 16 * scale, 32 * scale)).astype(np.uint8)
        scales = rng.integers(1, 120, (4, 2 * scale, 32 * scale)).astype(np.uint8)
        names |= {"down_proj": codes, "down_proj_weight_scale": scales.view(files.E4M3)}
        names |= {
            f"{n}_proj_weight_scale_2": np.asarray(1, np.float32) for n in ("gate_up", "down")
        }
        return {head + name: value for name, value in names.items()}

    large = tensors(48)
    small = files.folder(tmp_path / "small", tensors(2), {})
    files.folder(tmp_path / "large", large, {})
    if kind == "plain, not aligned":
        path = tmp_path / "large" / "model.safetensors"
        raw = path.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        text = raw[8:size] + b" " * (1 + -size % 4)
        path.write_bytes(files.file_bytes(text, raw[size:]))
    target = "cpu" if kind.startswith("plain") else "sm_90a"
    arguments = [str(small), str(tmp_path / "large"), str(tmp_path / "out"), target]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", MEMORY, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    largest = max(value.nbytes for value in large.values())
    assert int(done.stdout) * 1024 < 2 * largest


def test_a_file_has_no_name_until_it_is_whole(tmp_path):
    """The last piece may come first, so that a size says nothing; what is given up is gone."""
    out = Output("a", "U8", (8,))
    path = tmp_path / "model.safetensors"
    for whole in (False, True):
        writer = ShardWriter(path, [out])
        writer.write(out, torch.arange(4, dtype=torch.uint8), 4)
        assert not [p for p in tmp_path.iterdir() if p.suffix == ".safetensors"]
        assert len([*tmp_path.iterdir()]) == 1
        if whole:
            writer.write(out, torch.zeros(4, dtype=torch.uint8))
            writer.close()
        writer.abandon()
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"] * whole
    assert path.read_bytes()[-8:] == bytes([0, 0, 0, 0, 0, 1, 2, 3])
