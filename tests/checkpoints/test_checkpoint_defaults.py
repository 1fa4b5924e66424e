"""Torch's default dtype and default device belong to the caller: they change no byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.convert.convert import convert
from blockscale.checkpoints.experts.experts import Experts
from blockscale.checkpoints.stats import stats
from blockscale.checkpoints.weight import Weight
from tests.checkpoints.test_checkpoint_convert import contents
from tests.checkpoints.test_checkpoint_fuzz import SOUND
from tests.checkpoints.test_checkpoint_layouts import experts
from tests.kit import checkpoint_files as files


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}
anyhow = pytest.mark.parametrize(
    "default", ["bfloat16", pytest.param("float64", marks=pytest.mark.exhaustive), "meta"]
)


def read(ckpt: Checkpoint) -> Iterator[tuple[torch.Tensor | str, ...]]:
    """All that reading gives."""
    for name in (*ckpt.names, *ckpt.stacks, *ckpt.modules):
        found: Weight | Experts = ckpt[name]
        yield name, *(found.dequantize() if isinstance(found, Experts) else (found.dequantize(),))
        if isinstance(found, Weight):
            yield name, str(stats(found))
        else:
            made = found.quantized("nvfp4")
            yield name, *made.packed, *made.global_scale, *made.dequantize()


def same(found: Iterator, wanted: list) -> None:
    for one, two in zip(found, wanted, strict=True):
        for a, b in zip(one, two, strict=True):
            if isinstance(a, torch.Tensor):
                assert (a.dtype, a.device) == (b.dtype, b.device)
                assert torch.equal(a, b)
            else:
                assert a == b


@anyhow
@pytest.mark.parametrize("kind", sorted(SOUND))
def test_reading(tmp_path, kind, default):
    tensors, said = SOUND[kind]
    path = files.folder(tmp_path / "c", tensors, {"quantization_config": said})
    wanted = list(read(bs.checkpoints.open(path)))
    with DEFAULTS[default]():
        same(read(bs.checkpoints.open(path)), wanted)


@anyhow
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        *(("plain", layout) for layout in ("linear", "128x4", "deepgemm", "tiles64")),
        *(("gpt-oss", "tiles64"), ("awq", "tiles64"), ("awq", "marlin"), ("nvfp4", "tiles64")),
    ],
)
def test_converting(tmp_path, form, layout, default):
    tensors, config = experts(np.random.default_rng(1), form)
    source = files.folder(tmp_path / "in", tensors, config)
    convert(bs.checkpoints.open(source), tmp_path / "wanted", layout=layout)
    wanted = list(read(bs.checkpoints.open(tmp_path / "wanted")))
    with DEFAULTS[default]():
        convert(bs.checkpoints.open(source), tmp_path / "made", layout=layout)
        same(read(bs.checkpoints.open(tmp_path / "made")), wanted)
    assert contents(tmp_path / "made") == contents(tmp_path / "wanted")
