"""The catalogue: which workloads a spec has, and how an exported function chooses among them."""

import re

import pytest
import tvm
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.catalog import Workload
from blockscale.specs import (
    Dequantize,
    GroupedMmFp4,
    Linear,
    MmFp4,
    Quantize,
    ScaleSweep,
    Spec,
    Swizzle,
    Unswizzle,
)
from tests.kit.kernels import LEVELS

GEMMS = [MmFp4(48, 64), MmFp4(48, 64, "mxfp8"), GroupedMmFp4(3, 48, 64)]
SPECS = [Linear(48, 64), Quantize(), Dequantize(), Swizzle(), Unswizzle(), ScaleSweep(), *GEMMS]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


@each_spec
def test_workloads(spec):
    """Smallest first, named after the spec, each with its own function of the spec's parameters."""
    found = catalog.workloads(spec, "plain")
    rows = [workload.rows for workload in found]
    assert rows == sorted(set(rows))
    for workload in found:
        assert workload.tag == f"{spec.name}_m{workload.rows}"
        assert workload.op == spec.op
        assert workload == Workload(Spec.parse(spec.name), workload.rows)
        [(name, func)] = workload.mod("plain").functions.items()
        assert name.name_hint == "main"
        assert len(func.params) == len(spec.params())
        for param, var in zip(spec.params(), func.params, strict=True):
            assert str(var.dtype) == param.dtype
            if param.shape[0] == "rows" and len(found) > 2:
                assert int(var.shape[0]) == workload.rows


@each_spec
def test_buckets_cover_every_size(spec):
    """Limits rise and the last bucket has none; each is tuned inside of its own range."""
    buckets = catalog.buckets(spec, "plain")
    *limits, last = [bucket.limit for bucket in buckets]
    assert last is None
    assert limits == sorted(set(limits))
    for bucket, below in zip(buckets, [0, *limits], strict=True):
        assert below < bucket.rows
        assert bucket.limit is None or bucket.rows <= bucket.limit


@each_spec
def test_exported_function(spec):
    """One function, called as the spec, that compares the size with every limit."""
    [(name, func)] = catalog.exported(spec, "plain", {}).functions.items()
    assert name.name_hint == spec.name
    assert str(func.attrs["global_symbol"]) == spec.name
    limits = [str(b.limit) for b in catalog.buckets(spec, "plain") if b.limit is not None]
    tests = re.findall(r"if [^\n]* <= (?:T\.int64\()?(\d+)\)?:", func.script())
    assert sorted(set(tests) & set(limits), key=int) == limits


@pytest.mark.parametrize("rows", [1, 4, 16, 128])
def test_every_bucket_has_its_own_trace(rows):
    """A trace is applied to the bucket of its tag, and to no other."""
    spec = Linear(33, 80)
    workload = Workload(spec, rows)
    sch = Schedule(workload.mod("avx2"))
    workload.default(sch, "avx2")
    sch.annotate(sch.get_loops(sch.get_sblock("epilogue"))[0], "pragma_marked", rows)
    script = catalog.exported(spec, "avx2", {workload.tag: sch.trace}).script()
    assert script.count("pragma_marked") == 1
    limits = {1: 1, 4: 4, 16: 48}
    before = re.findall(r"rows <= (?:T\.int64\()?(\d+)", script.split("pragma_marked")[0])
    assert int(before[-1]) == limits.get(rows, 48)
    assert ("else:" in script.split("pragma_marked")[0]) == (rows != 1)


@pytest.mark.parametrize(
    ("dtype", "fmt", "level"),
    [
        *(("bfloat16", "nvfp4", level) for level in LEVELS),
        ("bfloat16", "mxfp4", "avx512bf16"),
        ("float16", "nvfp4", "avx512bf16"),
        ("float32", "nvfp4", "avx512bf16"),
    ],
)
def test_bfloat16_products_only_where_they_are_exact(dtype, fmt, level):
    """E8M0 scales may make subnormal weights, which VDPBF16PS takes for 0; x must be bfloat16."""
    script = catalog.exported(Linear(32, 64, fmt, dtype), level, {}).script()
    used = "blockscale_vdpbf16ps" in script
    assert used == (dtype == "bfloat16" and fmt == "nvfp4" and level == "avx512bf16")


def test_bad_input():
    with pytest.raises(ValueError, match=r"level='sse9' is not one of .*avx512bf16.*choose one"):
        catalog.target("sse9")
    with pytest.raises(
        ValueError, match=r"rows=3 is no bucket of linear_nvfp4_n48_k64_f32; .*1, 4, 16, 128"
    ):
        Workload(Linear(48, 64), 3).mod("plain")

    class Unknown(Spec):
        name = "unknown"

        def params(self):
            return ()

    with pytest.raises(TypeError, match=r"Unknown has no TensorIR; register its op in"):
        Workload(Unknown(), 1).mod("plain")


def test_buckets_that_share_a_function_keep_their_own_schedules():
    """Defaults are scheduled once for all that have the same; others are not among these."""
    from blockscale.catalog import registry
    from blockscale.specs import Spec

    spec = Spec.parse("linear_nvfp4_n192_k512_tiles64_bf16")
    bodies = registry.scheduled(spec, "sm_90a", {})
    for number in (0, len(bodies) // 2, -1):
        workload = registry.workloads(spec, "sm_90a")[number]
        alone = Schedule(workload.symbolic("sm_90a"))
        workload.default(alone, "sm_90a")
        tvm.ir.assert_structural_equal(bodies[number][1], alone.mod["main"])
