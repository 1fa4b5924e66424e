"""The committed logs: each entry hits the IR that its spec has today, and its trace replays."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from blockscale import catalog
from blockscale.base.targets import is_gpu, log_folder, same_width
from blockscale.building import logs
from blockscale.building.logs import committed as committed_logs
from blockscale.specs import Spec
from tests.kit.helpers import random_matrix, tensor
from tests.kit.kernels import call, check, check_linear, compiled, needs
from tests.kit.pairwise import exhaustive
from tests.quant.test_scale_sweep import judge
from tests.reference import core as ref

FOLDERS = sorted(path.parent for path in committed_logs().glob("*/*/meta.json"))


def entries():
    """Yield every entry; the first of each kind runs by default."""
    kinds = set()
    for folder in FOLDERS:
        meta = json.loads((folder / "meta.json").read_text())
        for tag, entry in meta["workloads"].items():
            marks = later(kinds, meta["level"], entry)
            yield pytest.param(meta["level"], entry, marks=marks, id=f"{meta['level']}-{tag}")


def later(kinds, level, entry):
    """Return the marks of an entry; ``kinds`` are those before: all but sizes and dtypes."""
    said = {k: v for k, v in entry["spec"].items() if type(v) is not int or k == "group"}
    said.pop("dtype", None)
    kind = json.dumps([level, said, entry.get("part")], sort_keys=True)
    marks = exhaustive if kind in kinds else ()
    kinds.add(kind)
    return marks


def test_there_are_logs_for_the_model_of_the_demo():
    shapes = {(384, 384), (1536, 384), (384, 1536)}
    folder = committed_logs() / "linear" / "cpu-avx512bf16" / "meta.json"
    found = [entry["spec"] for entry in json.loads(folder.read_text())["workloads"].values()]
    for dtype in ("float32", "bfloat16"):
        assert shapes <= {(s["n"], s["k"]) for s in found if s["dtype"] == dtype}


@pytest.mark.parametrize(("level", "entry"), list(entries()))
def test_entry_hits(level, entry):
    """The look-up that `blockscale build` does finds it, at its level and at those as wide."""
    workload = catalog.logged(entry)
    hit = logs.find(workload, level, [committed_logs()])
    assert hit is not None
    assert Path(hit.source.partition(":")[0]).parent.name == log_folder(level)
    assert 0 < hit.us < 1e6


def test_float32_logs_serve_every_cpu_of_the_width():
    """A CPU with AVX-512 and without VDPBF16PS runs the same float32 functions."""
    workload = catalog.workloads(Spec.parse("linear_nvfp4_n384_k384_f32"), "avx512")[0]
    assert logs.find(workload, "avx512", [committed_logs()]) is not None
    assert logs.find(workload, "avx2", [committed_logs()]) is None
    assert set(same_width("avx512")) == {"avx512", "avx512bf16"}


def test_changed_ir_misses():
    """Another shape is another workload: the look-up does not answer with a neighbour's trace."""
    workload = catalog.workloads(Spec.parse("linear_nvfp4_n384_k400_f32"), "avx512")[0]
    assert logs.find(workload, "avx512bf16", [committed_logs()]) is None


def kernels():
    """Yield every spec with a committed log of a CPU, with the level of the log.

    What a GPU runs is compared in the tests of the kernels; that its traces replay, in the last
    test here.
    """
    found, kinds = {}, set()
    for folder in FOLDERS:
        meta = json.loads((folder / "meta.json").read_text())
        if is_gpu(meta["level"]):
            continue
        for entry in meta["workloads"].values():
            spec, name = Spec.from_json(entry["spec"]), meta["level"]
            if (name, spec.name) not in found:
                marks = later(kinds, name, entry)
                found[name, spec.name] = pytest.param(
                    name, spec, marks=marks, id=f"{name}-{spec.name}"
                )
    return found.values()


def check_sweep(kernel, spec):
    """As `test_scale_sweep.judge`: rounding decides between candidates that are equally good."""
    x = tensor(random_matrix((64, 64 * spec.block_size), "nvfp4", 0, spread=3), spec.dtype)
    g, candidates = float(x.abs().max()), ref.fp8_scale_candidates()
    x = x.reshape(-1, spec.block_size)
    inputs = [x, tensor([g]), torch.from_numpy(candidates)]
    [best] = call(kernel, inputs, [torch.empty(len(x))])
    index = np.argmax(best.numpy()[:, None] == candidates * np.float32(g), axis=1)
    wrong = judge(index, x, g, spec.block_size)
    assert wrong == 0 or spec.dtype != "float32"


@pytest.mark.parametrize(("level", "spec"), list(kernels()))
def test_committed_traces_compute_the_right_numbers(level, spec):
    """What `blockscale build` exports, on both sides of every bucket's limit."""
    needs(level)
    hits = {w.tag: logs.find(w, level, [committed_logs()]) for w in catalog.workloads(spec, level)}
    traces = {tag: hit.trace for tag, hit in hits.items() if hit is not None}
    assert traces
    kernel = compiled(spec, level, traces)
    if spec.op == "linear":
        for rows in (1, 5) if spec.n * spec.k > 1 << 22 else (1, 4, 5, 48, 49):
            check_linear(kernel, spec, rows)
    elif spec.op == "scale_sweep":
        check_sweep(kernel, spec)
    else:
        check(kernel, spec)


LARGE = ("act_quantize", "fused_moe", "int4_mm", "linear", "mm_fp4", "norm_quantize", "relayout")
"""Ops with many records, of which `test_entry_hits` replays the best ones."""


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(folder, marks=exhaustive if folder.parent.name in LARGE else (), id=name)
        for folder in FOLDERS
        for name in [f"{folder.parent.name}-{folder.name}"]
    ],
)
def test_check_finds_nothing(folder, tmp_path):
    """Each record belongs to a workload and replays."""
    (tmp_path / folder.parent.name).mkdir()
    (tmp_path / folder.parent.name / folder.name).symlink_to(folder)
    assert logs.check([tmp_path]) == []
