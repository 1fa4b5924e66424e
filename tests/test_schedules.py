"""The search space: every schedule that can be drawn is legal and computes the right numbers."""

from functools import cache

import pytest
from kernels import LEVELS, check, compiled, runs
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.lowering import compile_cpu
from blockscale.specs import (
    SPECS,
    Dequantize,
    Linear,
    Quantize,
    ScaleSweep,
    Swizzle,
    Unswizzle,
)
from blockscale.tuning.space import replay, trace_json

LINEAR = [
    Linear(33, 80),  # lanes along k for any number of rows
    Linear(48, 64, dtype="bfloat16"),  # lanes along n from 8 rows; bfloat16 products
    Linear(32, 96, "mxfp4", "float16"),
]
OTHERS = [
    Quantize("nvfp4", "float32"),
    Quantize("nvfp4", "bfloat16", "128x4"),
    Quantize("mxfp4", "float16", "linear", given_amax=True, rounding="floor"),
    Quantize("mxfp4", "bfloat16", "128x4", given_amax=True),
    Dequantize("nvfp4", "float16"),
    Dequantize("mxfp4", "bfloat16", "128x4"),
    Swizzle(),
    Unswizzle(),
    ScaleSweep("float32", 16),
    ScaleSweep("bfloat16", 32),
]
SEEDS = range(1, 4)

each_level = pytest.mark.parametrize("level", LEVELS)
each_spec = pytest.mark.parametrize("spec", [*LINEAR, *OTHERS], ids=lambda spec: spec.name)


@pytest.fixture(autouse=True, scope="module")
def parsed_once():
    """Parse the TVMScript of each workload once: otherwise two thirds of the time of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_module", cache(catalog._module))
        yield


def drawn(workload, level, seed):
    """Return the schedules of all sketches, with decisions drawn from ``seed``."""
    return workload.space(level)(Schedule(workload.mod(level), seed=seed))


def test_every_op_is_here():
    assert {spec.op for spec in (*LINEAR, *OTHERS)} == set(SPECS)


@each_level
@each_spec
def test_default_schedules(spec, level):
    """Without search: right on every size, or at least compiled where this CPU cannot run it."""
    kernel = compiled(spec, level)
    if runs(level):
        check(kernel, spec)


@each_level
@each_spec
def test_sampled_schedules(spec, level):
    """A trace found on the static workload, through JSON as in a log, serves the exported function."""
    for seed in SEEDS:
        traces, decisions = {}, 0
        for workload in catalog.workloads(spec):
            sketches = drawn(workload, level, seed)
            trace = trace_json(sketches[seed % len(sketches)].trace)
            decisions += len(sketches) - 1 + len(trace[1])
            traces[workload.tag] = replay(workload.mod(level), trace).trace
        kernel = compiled(spec, level, traces)
        if runs(level):
            check(kernel, spec)
        if not decisions:  # every seed draws the same
            break


@each_level
@each_spec
def test_static_workloads(spec, level):
    """What the tuner measures: each sketch at its row count, compiled, and for linear also right."""
    for workload in catalog.workloads(spec):
        for sch in drawn(workload, level, seed=7):
            kernel = compile_cpu(sch.mod, catalog.target(level))["main"]
            if runs(level) and spec.op == "linear":
                check(kernel, spec, workload.rows)


@each_level
@pytest.mark.parametrize("n", [1, 7, 33])
def test_decisions_divide_odd_sizes(n, level):
    """The smallest K and no common divisor with any vector width: every draw fits."""
    spec = Linear(n, 16)
    for seed in SEEDS:
        for workload in catalog.workloads(spec):
            for sch in drawn(workload, level, seed):
                assert sch.mod is not None
    kernel = compiled(spec, level)
    if runs(level):
        check(kernel, spec)
