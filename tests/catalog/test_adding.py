"""What it takes to add an op, and an architecture: a throw-away one of each, built.

An op is a spec, a TIR function, a schedule for each kind of target and one registration; all of it
stands in this file.  An architecture whose features the kernels know is one row.
"""

from dataclasses import dataclass

import pytest
import torch
from tvm.script import tirx as T

import blockscale as bs
from blockscale import catalog
from blockscale.base import targets
from blockscale.building.builder import build
from blockscale.catalog import Road, registry
from blockscale.specs import Param, Quantize, Spec, spec
from blockscale.specs.spec import Name, register
from blockscale.tir.common import fix_shape


@dataclass(frozen=True)
class Times(Spec):
    """``y = factor * x``."""

    factor: int
    op = "times"
    pattern = Name("times_{factor}_f32", "times_3_f32")

    def params(self):
        shape = ("rows", "cols")
        return Param("x", "float32", shape), Param("y", "float32", shape, output=True)


def times(spec, shape):
    factor = spec.factor

    @T.prim_func(s_tir=True)
    def main(x: T.handle, y: T.handle):
        rows, cols = T.int64(), T.int64()
        X = T.match_buffer(x, (rows, cols), "float32")
        Y = T.match_buffer(y, (rows, cols), "float32")
        for i, j in T.grid(rows, cols):
            with T.sblock("times"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] * T.float32(factor)

    return main if shape is None else fix_shape(main, "X", shape)


def on_cpu(sch, choose):
    row, col = sch.get_loops(sch.get_sblock("times"))
    _, step = sch.split(col, [None, choose(sch, [2, 4, 8], 4)])
    sch.parallel(row)
    sch.unroll(step)


def on_gpu(sch, choose):
    row, col = sch.get_loops(sch.get_sblock("times"))
    block, thread = sch.split(col, [None, choose(sch, [32, 64], 32)])
    for loop, axis in ((row, "blockIdx.x"), (block, "blockIdx.y"), (thread, "threadIdx.x")):
        sch.bind(loop, axis)


@pytest.fixture
def added(monkeypatch):
    """Register the op for one test."""
    for owner, name, copy in (
        (spec, "SPECS", dict),
        (spec, "NAME_EXAMPLES", list),
        (registry, "ROADS", dict),
    ):
        monkeypatch.setattr(owner, name, copy(getattr(owner, name)))
    register(Times)
    catalog.register(
        Times,
        cpu=Road(
            body=lambda spec, bucket, level, shape: times(spec, shape),
            sketches=lambda spec, bucket, level: [on_cpu],
            tuned=lambda spec, bucket: (bucket.rows, 64),
        ),
        cuda=Road(
            body=lambda spec, bucket, level, shape: times(spec, shape),
            sketches=lambda spec, bucket, level: [on_gpu],
            tuned=lambda spec, bucket: (bucket.rows, 64),
        ),
    )
    return Times(3)


def test_an_op_is_built_and_called(added, tmp_path):
    """By its name, with the library's checks."""
    function = bs.build([added.name], tmp_path / "k.so").functions[added.name]
    for shape in ((0, 5), (1, 1), (7, 33)):
        x = torch.randn(shape)
        assert torch.equal(function(x), 3 * x)
    with pytest.raises(TypeError, match="x has dtype float64, expected float32"):
        function(torch.randn(3, 4, dtype=torch.float64))


def test_an_op_has_workloads_on_every_target(added):
    """Tuned like any other: logs name it, its schedules are drawn."""
    for level, rows in (("avx2", 512), ("sm_90a", 8192)):
        [workload] = catalog.workloads(added, level)
        assert workload.tag == f"{added.name}_m{rows}"
        assert catalog.logged(workload.entry()) == workload
        assert int(workload.mod(level)["main"].params[0].shape[0]) == rows


def test_an_op_is_compiled_for_a_gpu(added, tmp_path):
    contents = build([added], tmp_path / "k.so", level="sm_90a", logs_dirs=[])
    assert contents["functions"][added.name]["buckets"] == [
        {"rows": 8192, "limit": None, "tuned": False, "arch": "sm_90a"}
    ]


def test_an_op_without_a_road_says_so(added, monkeypatch):
    monkeypatch.delitem(registry.ROADS, (Times, "cuda"))
    with pytest.raises(TypeError, match="there is no GPU kernel of times yet"):
        catalog.workloads(added, "sm_90a")


def test_an_architecture_is_one_row(monkeypatch, tmp_path):
    """Jetson Orin: refused, then built for."""
    with pytest.raises(ValueError, match=r"target: 'sm_87' is not one of"):
        build([Quantize()], tmp_path / "k.so", level="sm_87")
    monkeypatch.setitem(targets.GPU_TARGETS, "sm_87", targets.Gpu(164 << 10))
    contents = build([Quantize()], tmp_path / "k.so", level="sm_87", logs_dirs=[])
    assert contents["target"]["archs"] == ["sm_87"]
    library = (tmp_path / "k.so").read_bytes()
    cubin = library[library.index(b"\x7fELF", 4) :]
    assert cubin[18] == 190  # EM_CUDA
    assert 87 in cubin[48:50]  # its flags: in the first byte before CUDA 13, now in the second
    assert targets.runs_on("sm_87", 8, 7)


def test_an_architecture_without_a_feature_is_refused(monkeypatch):
    """What a road needs decides, and the error names who has it."""
    monkeypatch.setitem(targets.GPU_TARGETS, "sm_87", targets.Gpu(164 << 10))
    spec = Spec.parse("mm_nvfp4_n4096_k7168_bf16")
    with pytest.raises(
        TypeError, match=r"for sm_87, which has no block-scaled tensor cores; build"
    ):
        catalog.cuda_source(spec, "sm_87", {})
    monkeypatch.setitem(
        targets.GPU_TARGETS, "sm_110a", targets.Gpu(228 << 10, (targets.SCALED, targets.TCGEN05))
    )
    with pytest.raises(TypeError, match="sm_121a, sm_110a, or for a CPU level"):
        catalog.cuda_source(spec, "sm_87", {})
