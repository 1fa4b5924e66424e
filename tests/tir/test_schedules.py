"""The search space: every schedule that can be drawn is legal and computes the right numbers."""

from functools import cache

import pytest
import tvm
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.building.space import replay, trace_json
from blockscale.lower.cpu import compile_cpu
from blockscale.specs import (
    SPECS,
    Dequantize,
    Linear,
    Quantize,
    ScaleSweep,
    Swizzle,
    Unswizzle,
)
from tests.kit.kernels import LEVELS, check, compiled, needs
from tests.kit.pairwise import each, few, those

LINEAR = [
    Linear(33, 80),  # no vector divides N; in K, vectors of codes but not of words of codes
    Linear(48, 64, dtype="bfloat16"),  # lanes along N for many rows; 4 scales a row
    Linear(16, 256, dtype="bfloat16"),  # words of codes at every level; 16 scales a row
]
MORE_LINEAR = [
    Linear(16, 128, "mxfp4"),
    Linear(16, 96, "mxfp4", "float16"),  # 3 scales a row
    Linear(24, 32),  # vectors of 8 divide N, those of 16 do not
    Linear(64, 64, dtype="bfloat16", activation="silu", gated=True, residual=True),
    Linear(14, 128, "mxfp4", activation="gelu_tanh", gated=True),  # gates one by one
    Linear(33, 80, "nvfp4", "bfloat16", activation="relu2", out_dtype="float32"),
]
OTHERS = [
    Quantize("nvfp4", "float32"),
    Quantize("mxfp4", "float16", "linear", given_amax=True, rounding="floor"),
    Quantize("nvfp4", "bfloat16", "128x4", given_amax=True),
    Dequantize("nvfp4", "float16"),
    Dequantize("mxfp4", "bfloat16", "128x4"),
    Swizzle(),
    Unswizzle(),
    ScaleSweep("float32", 16),
    ScaleSweep("bfloat16", 32),
]
EVERY = [*LINEAR, *MORE_LINEAR, *OTHERS]
SEARCHED = [
    (spec, level)
    for spec in (*LINEAR, *MORE_LINEAR[-3:], *OTHERS)
    for level in LEVELS
    if level != "avx512bf16" or spec.name.endswith("bf16")  # elsewhere the same as avx512
]

searched = pytest.mark.parametrize(
    ("spec", "level"),
    few([pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in SEARCHED], every=4),
)
# The widest vectors, and the fewest registers
EXTREMES = ("avx512bf16", "plain")


@pytest.fixture(autouse=True, scope="module")
def parsed_once():
    """Parse the TVMScript of each workload once: it takes longer than scheduling and compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog.Workload, "mod", cache(catalog.Workload.mod))
        patch.setattr(catalog.Workload, "symbolic", cache(catalog.Workload.symbolic))
        yield


def drawn(workload, level, seed):
    """Return the schedules of all sketches, with decisions drawn from ``seed``."""
    return workload.space(level)(Schedule(workload.mod(level), seed=seed))


def traces(spec, level, seed):
    """Return a trace per workload, that went through JSON as in a log, and all decisions."""
    found, decisions = {}, 0
    for workload in catalog.workloads(spec, level):
        sketches = drawn(workload, level, seed)
        trace = trace_json(sketches[seed % len(sketches)].trace)
        decisions += len(sketches) - 1 + len(trace[1])
        found[workload.tag] = replay(workload.mod(level), trace).trace
    return found, decisions


def compare(kernel, spec, level, rows=None):
    """Compare with the reference; where this machine lacks the level, skip: it was compiled."""
    needs(level)
    check(kernel, spec, rows)


def test_every_op_is_here():
    """But those that have test modules of their own, which do so."""
    elsewhere = {"norm_quantize", "act_quantize", "mm_fp4", "grouped_mm_fp4"}
    elsewhere |= {"grouped_mm_act_fp4quant"}
    elsewhere |= {"fused_moe", "moe_route", "edgellm_up", "edgellm_down", "relayout"}
    elsewhere |= {"int4_mm", "int4_dequantize", "ep_dispatch", "ep_combine", "ep_reduce"}
    assert {spec.op for spec in EVERY} | elsewhere == set(SPECS)


def by_default(spec, level):
    """Each op at one level, in turn; those of a level that few CPUs have also without vectors."""
    own = LEVELS[EVERY.index(spec) % len(LEVELS)]
    return level == own or (own, level) == EXTREMES


@those(by_default, spec=EVERY, level=LEVELS)
def test_default(spec, level):
    """Without search, on sizes at every bucket's edges."""
    compare(compiled(spec, level), spec, level)


@searched
def test_replay(spec, level):
    """Traces found on the static workloads serve the exported function; seed 1: the last sketch."""
    found, decisions = traces(spec, level, seed=1)
    if decisions:  # otherwise it is the default schedule
        compare(compiled(spec, level, found), spec, level)


@each(spec=[*LINEAR, *OTHERS], level=EXTREMES)
def test_static_workloads(spec, level):
    """What the tuner measures: every sketch compiles, linear is right at the workload's rows."""
    functions, rows = {}, {}
    for workload in catalog.workloads(spec, level):
        for seed in (2, 3):
            schedules = drawn(workload, level, seed)
        for i, sch in enumerate(schedules):
            name = f"{workload.tag}_{i}"
            functions[name], rows[name] = sch.mod["main"], workload.rows
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    module = compile_cpu(tvm.IRModule(named), catalog.target(level))
    for name in functions:
        if spec.op == "linear":
            compare(module[name], spec, level, rows[name])


@each(n=[1, 7, 33], level=EXTREMES)
def test_decisions_divide_odd_sizes(n, level):
    """The smallest K, and an N that shares no divisor with a vector: every draw fits."""
    for spec in (Linear(n, 16), Linear(2 * n, 16, activation="silu", gated=True)):
        found, _ = traces(spec, level, seed=1)
        compare(compiled(spec, level, found), spec, level)
