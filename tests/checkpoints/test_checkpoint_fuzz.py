"""Whatever bytes a folder holds, opening and reading it gives CheckpointError or a sound result.

Hypothesis draws files from nothing, and mutations of sound ones; the same ones in every run.  For a
long run: ``BLOCKSCALE_FUZZ=20000 pytest tests/checkpoints/test_checkpoint_fuzz.py``.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import blockscale as bs
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.experts.experts import Experts
from blockscale.checkpoints.files.safetensors import BITS
from blockscale.checkpoints.stats import stats
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import BF16, E4M3, nibbles, words

LONG = int(os.environ.get("BLOCKSCALE_FUZZ", "0"))
MOST_BYTES = 1 << 22
"""Bytes of values that one example may make; its files hold some 10^4."""


def fuzz(examples: int):
    return settings(
        max_examples=LONG or examples,
        derandomize=not LONG,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def quiet(value: np.ndarray) -> np.ndarray:
    """The same shape of bytes from 0x30 to 0x3B, which are finite and positive in every dtype."""
    raw = np.arange(value.nbytes, dtype=np.uint64) * 7 % 12 + 0x30
    return raw.astype(np.uint8).view(value.dtype).reshape(value.shape)


def sound() -> dict[str, tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """Small checkpoints of every kind: tensors and quantization_config."""
    rng = np.random.default_rng(0)
    codes, scale, top, _ = files.nvfp4(rng, 4, 32)
    fp4 = {"weight": nibbles(codes), "weight_scale": scale, "weight_scale_2": top}
    mx_codes, mx_scale, _ = files.mxfp4(rng, 2, 4, 32)
    ints, zero, int_scale, _ = files.int4(rng, 8, 32, 16)
    base = "m.experts"
    shapes = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}
    one = {
        f"{base}.{e}.{p}.{name}": value
        for e in range(2)
        for p, shape in shapes.items()
        for name, value in zip(
            fp4,
            (
                np.empty((shape[0], shape[1] // 2), np.uint8),
                np.empty((shape[0], shape[1] // 16), E4M3),
                top,
            ),
            strict=True,
        )
    }
    fused = {
        f"{base}.gate_up_proj": np.empty((2, 16, 32), np.uint8),
        f"{base}.gate_up_proj_weight_scale": np.empty((2, 2, 32), E4M3),
        f"{base}.gate_up_proj_weight_scale_2": np.empty((2, 1), np.float32),
        f"{base}.gate_up_proj_bias": np.empty((2, 32), BF16),
        f"{base}.down_proj": np.empty((2, 8, 32), np.uint8),
        f"{base}.down_proj_weight_scale": np.empty((2, 1, 32), E4M3),
        f"{base}.down_proj_weight_scale_2": np.empty((), np.float32),
    }
    word = words(ints, files.STRAIGHT)
    gptq = {
        "p.qweight": np.ascontiguousarray(word.T),
        "p.qzeros": words(zero.T, files.STRAIGHT),
        "p.scales": np.ascontiguousarray(int_scale.T),
        "p.g_idx": (np.arange(32) // 16).astype(np.int32),
    }
    packed = {"p.weight_packed": word, "p.weight_scale": int_scale.astype(BF16)}
    packed["p.weight_zero_point"] = np.ascontiguousarray(words(zero.T, files.STRAIGHT).T)
    packed["p.weight_shape"] = np.array([8, 32])
    awq = {"p.qweight": words(ints.T, files.AWQ), **{k: gptq[k] for k in ("p.qzeros", "p.scales")}}
    mx = {"m.mlp.mlp1_weight.blocks": nibbles(mx_codes).reshape(2, 4, 1, 16)}
    mx["m.mlp.mlp1_weight.scales"] = mx_scale
    ct = {"p.weight_packed": fp4["weight"], "p.weight_scale": scale}
    ct |= {"p.weight_global_scale": np.ones(1, "f4"), "p.input_global_scale": np.ones(1, "f4")}
    fp8 = {"p.weight": np.empty((4, 8), E4M3), "p.weight_scale_inv": np.empty((1, 1), np.float32)}
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    keep = ("g_idx", "weight_shape")
    made = {
        "modelopt": ({f"p.{k}": v for k, v in fp4.items()}, modelopt),
        "experts": (one, modelopt),
        "fused": (fused, modelopt),
        "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16}),
        "awq": (awq, {"quant_method": "awq", "bits": 4}),
        "int4": (packed, {"quant_method": "compressed-tensors"}),
        "ct": (ct, {"quant_method": "compressed-tensors"}),
        "gpt-oss": (mx, {"quant_method": "mxfp4"}),
        "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "plain": ({f"{base}.{p}": np.empty((2, *s), BF16) for p, s in shapes.items()}, {}),
    }
    return {
        kind: ({k: v if k.endswith(keep) else quiet(np.asarray(v)) for k, v in t.items()}, config)
        for kind, (t, config) in made.items()
    }


SOUND = sound()
SUFFIXES = sorted(
    {"." + name.rpartition(".")[2] for tensors, _ in SOUND.values() for name in tensors}
)
KEYS = (
    *("quant_method", "quant_algo", "group_size", "bits", "config_groups", "weight_block_size"),
    *("checkpoint_format", "version", "sym", "zero_point", "format", "dynamic", "packing_format"),
)
NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 32, 64, 1 << 31, (1 << 62) + 1, 1 << 63, -1])
WORDS = st.sampled_from([*KEYS, "awq", "gptq", "gptq_v2", "modelopt", "weights", "num_bits", "int"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)
TRICKS = (
    *("../x.safetensors", "/etc/passwd", "/dev/zero", "a/../model.safetensors", "..", ".", ""),
    *("model.safetensors\0", "..\\model.safetensors", "\ud800", "model.safetensors", "x" * 5000),
    *("./model.safetensors", "pipe.safetensors", "folder.safetensors", "zero.safetensors"),
)


def attempt(folder: Path, finite: bool = False) -> None:
    """Open and read all there is; only CheckpointError may come, and values have their shape."""
    try:
        ckpt = bs.checkpoints.open(folder)
    except CheckpointError as error:
        assert len(str(error)) < 2000  # noqa: PT017 - short, whatever was in the file
        return
    assert all(name in ckpt for name in ckpt.names)
    for name, read in (
        *((name, ckpt.weight) for name in (*ckpt.names, *ckpt.stacks)),
        *((name, ckpt.experts) for name in ckpt.modules),
    ):
        try:
            made = read(name)
        except CheckpointError:
            continue
        pair = (made.gate_up, made.down) if isinstance(made, Experts) else (made,)
        for weight in pair:
            values = weight.dequantize()
            assert tuple(values.shape) == weight.shape
            assert values.dtype == torch.float32
            assert values.nbytes < MOST_BYTES
            if finite:
                assert values.isfinite().all()
            stats(weight)
        if isinstance(made, Experts):
            with suppress(ValueError, TypeError):
                made.prepare(layout="linear")


def write(folder: Path, header: Any, data: bytes, config: Any) -> None:
    """A folder of one file and its configuration, from values that need not make sense."""
    text = header if isinstance(header, bytes) else dumped(header)
    (folder / "model.safetensors").write_bytes(files.file_bytes(text, data))
    (folder / "config.json").write_bytes(dumped(config))


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def mutations(draw: st.DrawFn):
    """A sound checkpoint with up to four of its parts changed: header, data, configuration."""
    kind = draw(st.sampled_from(sorted(SOUND)))
    tensors, said = SOUND[kind]
    tensors, said, header_changes = dict(tensors), dict(said), []
    model = draw(st.sampled_from(["llama4", "gpt_oss", "qwen3_moe", 3]))
    config: dict[str, Any] = {"model_type": model, "hidden_size": draw(NUMBERS)}
    for _ in range(draw(st.integers(0, 4))):
        action = draw(
            st.sampled_from(["drop", "rename", "cut", "turn", "dtype", "shape", "config"])
        )
        name = draw(st.sampled_from(sorted(tensors))) if tensors else None
        if action == "config":
            said[draw(st.sampled_from(KEYS))] = draw(JSON)
        elif name is None:
            continue
        elif action == "drop":
            del tensors[name]
        elif action == "rename":
            tensors[name[: name.rindex(".")] + draw(st.sampled_from(SUFFIXES))] = tensors.pop(name)
        elif action == "cut" and tensors[name].ndim:
            axis = draw(st.integers(0, tensors[name].ndim - 1))
            size = draw(st.integers(0, tensors[name].shape[axis]))
            tensors[name] = np.ascontiguousarray(np.take(tensors[name], range(size), axis))
        elif action == "turn":
            tensors[name] = np.ascontiguousarray(tensors[name].T)
        elif action in ("dtype", "shape"):
            header_changes.append((action, name))
    header = files.header(tensors)
    for action, name in header_changes:
        if name in header and action == "dtype":
            header[name]["dtype"] = draw(st.sampled_from(sorted(BITS)))
        elif name in header:
            shape = header[name]["shape"]
            header[name]["shape"] = draw(st.permutations(shape) | st.lists(NUMBERS, max_size=4))
    config["quantization_config"] = said
    return header, b"".join(v.tobytes() for v in tensors.values()), config


def refused_or_finite(case):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), *case)
        attempt(Path(folder), finite=True)


@fuzz(150)
@given(mutations())
def test_mutated_checkpoints_are_refused_or_have_finite_values(case):
    refused_or_finite(case)


@pytest.mark.exhaustive
@fuzz(2000)
@given(mutations())
def test_many_mutated_checkpoints_are_refused_or_have_finite_values(case):
    refused_or_finite(case)


@fuzz(200)
@given(st.sampled_from(sorted(SOUND)), st.data())
def test_changed_bytes_are_refused_or_read(kind, data):
    tensors, said = SOUND[kind]
    with tempfile.TemporaryDirectory() as name:
        folder = files.folder(Path(name), tensors, {"quantization_config": said})
        path = folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at] = data.draw(st.integers(0, 255))
        path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) - 1, len(raw) // 2]))])
        attempt(folder)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(BITS)) | JSON,
        "shape": st.lists(NUMBERS, max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(0, 64) | NUMBERS, min_size=2, max_size=2) | JSON,
    }
)
NAMES = st.sampled_from(SUFFIXES).map(lambda s: "p" + s) | st.text(max_size=9)


@pytest.mark.always
@fuzz(200)
@given(st.dictionaries(NAMES, ENTRY | JSON, max_size=4) | JSON, st.binary(max_size=64), JSON)
def test_headers_of_anything_are_refused_or_read(header, data, config):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), header, data, config)
        attempt(Path(folder))


@fuzz(100)
@given(st.binary(max_size=200), st.binary(max_size=64), st.booleans())
def test_bytes_of_anything_are_refused(header, data, braces):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), b"{" + header + b"}" if braces else header, data, {})
        attempt(Path(folder))


@fuzz(150)
@given(
    st.dictionaries(st.sampled_from(["x", "y", "z", "../x"]), st.sampled_from(TRICKS) | JSON),
    st.none() | st.binary(max_size=40) | JSON.map(dumped),
)
def test_an_index_of_anything_leads_nowhere(weight_map, other):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files.save(folder / "model.safetensors", {"x": np.ones(2, "f4"), "y": np.ones(2, "f4")})
        os.mkfifo(folder / "pipe.safetensors")
        (folder / "folder.safetensors").mkdir()
        (folder / "zero.safetensors").symlink_to("/dev/zero")
        index = dumped({"weight_map": weight_map}) if other is None else other
        (folder / "model.safetensors.index.json").write_bytes(index)
        attempt(folder)
