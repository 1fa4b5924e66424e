"""A kernel that no log knows gets the default schedule: never slower than a plain parallel loop.

The swizzles are not here: their default is the plain parallel loop.
"""

from __future__ import annotations

import time

import pytest
import torch

from blockscale import catalog
from blockscale.base import host
from blockscale.building import logs
from blockscale.building.space import new_schedule, trace_json
from blockscale.lower.cpu import compile_cpu
from blockscale.schedules.gemm.cpu_linear import LOOP_REGISTERS
from blockscale.specs import Spec
from blockscale.tir.intrin.x86.width import WIDTHS
from tests.kit.pairwise import few

ROWS, COLS = 64, 2048
NAMES = (
    "linear_nvfp4_n256_k512_f32",
    "linear_nvfp4_n256_k512_bf16",
    "linear_nvfp4_n7_k80_f32",
    "quantize_nvfp4_bf16",
    "quantize_mxfp4_128x4_f32",
    "dequantize_nvfp4_bf16",
    "dequantize_mxfp4_128x4_f32",
    "scale_sweep_b16_f32",
)


def plain_parallel(spec, level):
    """The op's own loops, the outermost one of every block in parallel."""
    from tvm.s_tir import Schedule

    sch = Schedule(catalog.workloads(spec, level)[-1].symbolic(level))
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        sch.parallel(sch.get_loops(block)[0])
    return sch.mod


def arguments(spec, rows):
    """Tensors of all parameters, filled with small valid bytes or random numbers."""
    from blockscale.base import shapes

    sizes = {"rows": rows, "cols": COLS, "blocks": rows * 64, "count": 126}
    found = []
    for param in spec.params():
        shape = [shapes.parse(dim).evaluate(sizes) for dim in param.shape]
        if param.dtype == "uint8":
            found.append(torch.randint(40, 80, shape, dtype=torch.uint8))
        else:
            found.append(torch.rand(shape).to(getattr(torch, param.dtype)) + 0.5)
    return found


def best_time(run, values):
    run(*values)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run(*values)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("name", few(NAMES))
def test_default_beats_plain_loops(name):
    """Measured here it wins by 2 to 150 times, so that a busy machine does not turn the result."""
    level, spec = host.level(), Spec.parse(name)
    target = catalog.target(level)
    default = compile_cpu(catalog.exported(spec, level, {}), target)[spec.name]
    plain = compile_cpu(plain_parallel(spec, level), target)["main"]
    for rows in (1, 4, 16, ROWS) if spec.op == "linear" else (ROWS,):
        values = arguments(spec, rows)
        ours, theirs = best_time(default, values), best_time(plain, values)
        assert ours <= theirs


def chosen(workload, level):
    """What the default schedule takes of each choice, in order."""
    sch = new_schedule(workload.mod(level))
    workload.default(sch, level)
    instructions, decisions = trace_json(sch.trace)
    choices = [one[2][0] for one in instructions if one[0] == "SampleCategorical"]
    return [choice[index] for choice, (_, index) in zip(choices, decisions, strict=True)]


@pytest.mark.parametrize("level", ["avx512bf16", "avx512"])
def test_few_rows_have_the_tiles_that_the_logs_found(level):
    """Each log of 2 to 4 rows, of an AMD EPYC, has two columns a tile and two tiles a task."""
    for name in ("n384_k384", "n1536_k384", "n384_k1536"):
        [work] = (
            w for w in catalog.workloads(Spec.parse(f"linear_nvfp4_{name}_bf16"), level)
            if w.rows == 4
        )  # fmt: skip
        hit = logs.find(work, level, [logs.committed()])
        sch = new_schedule(work.mod(level))
        work.default(sch, level)
        assert trace_json(hit.trace)[1] == trace_json(sch.trace)[1]
        assert chosen(work, level) == [2, 2]


@pytest.mark.parametrize("name", ["linear_nvfp4_n4096_k4096_f32", "mm_mxfp4_n4096_k4096_bf16"])
@pytest.mark.parametrize("level", ["avx512", "avx2"])
def test_accumulators_of_many_rows_fit_the_registers(name, level):
    """Vectors times rows of a tile take a third or more of what the loop leaves."""
    left = WIDTHS[level].registers - LOOP_REGISTERS
    for work in catalog.workloads(Spec.parse(name), level):
        if work.rows >= 16:
            vectors, rows = chosen(work, level)
            assert left / 3 < vectors * rows <= left


@pytest.mark.parametrize(
    ("level", "one_row", "few_rows"), [("avx512", [4, 2], [2, 2]), ("avx2", [4, 4], [1, 4])]
)
def test_columns_and_tasks_of_few_rows(level, one_row, few_rows):
    """Columns of a tile, tiles of a task; with AVX2 a tile of several rows has one column."""
    one, several, *_ = catalog.workloads(Spec.parse(NAMES[0]), level)
    assert chosen(one, level) == one_row
    assert chosen(several, level) == few_rows
