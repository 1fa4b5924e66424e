"""CPU kernels of the block-scaled GEMMs: at every level, every schedule that can be drawn."""

from functools import cache

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.base import host
from blockscale.building.space import replay, trace_json
from blockscale.schedules.gemm import cpu as cpu_gemm
from blockscale.specs import GroupedMmFp4, MmFp4
from blockscale.tuning.worker import Argument
from tests.kit import fresh
from tests.kit.gemm_operands import FORMATS, grouped, operand, tensor
from tests.kit.kernels import LEVELS, call, compiled, needs
from tests.kit.pairwise import each, those
from tests.reference import core as ref

ROWS = (0, 1, 3, 4, 5, 16, 49, 130)
OFFSETS = [([2, 2, 3, 10], 11), ([0, 40, 40, 173], 173), ([0, 0, 0, 0], 0)]
"""Few rows an expert (of 3, up to 24 together), many rows, none."""

# Vectors of 16 and words of codes fit, or N is a multiple of 8 only and K of 32.
SPECS = [MmFp4(n, k, fmt, "float32") for fmt in FORMATS for n, k in ((48, 256), (24, 96))]
GROUPED = [GroupedMmFp4(3, spec.n, spec.k, spec.fmt, "float32") for spec in SPECS]
KINDS = [pytest.param(SPECS, id="mm"), pytest.param(GROUPED, id="grouped")]
WHOLE, RAGGED = 0, 1
"""Which of the two sizes of a format: the place among its specs."""


def spec_of(kind, fmt, size):
    """Return the spec of a format and size."""
    return kind[2 * FORMATS.index(fmt) + size]


@cache
def mm_case(rows, spec):
    return operand(rows, spec.k, spec.fmt, "a"), operand(spec.n, spec.k, spec.fmt, "b")


def check_mm(kernel, spec):
    """Compare any number of rows with float64."""
    bias = np.linspace(-3, 3, spec.n).astype(np.float32)
    for rows in ROWS:
        a, b = mm_case(rows, spec)
        given = [a.stored, b.stored, a.scale, b.scale, torch.tensor([0.37]), tensor(bias)]
        [d] = call(kernel, given, [torch.empty(rows, spec.n)])
        error = ref.row_error(d.numpy(), ref.mm(a.value, b.value, 0.37, bias))
        assert error.max(initial=0) < 1e-5


def check_grouped(kernel, spec):
    """Compare few and many rows; those of no expert keep their bytes, 0xFF."""
    for offsets, rows in OFFSETS:
        case = grouped(offsets, rows, spec.n, spec.k, spec.fmt)
        [d] = call(kernel, case.inputs, [torch.empty(rows, spec.n)])
        used = slice(offsets[0], offsets[-1])
        assert ref.row_error(d.numpy()[used], case.truth[used]).max(initial=0) < 1e-5
        rest = np.delete(d.numpy(), np.r_[used], axis=0)
        assert (rest.view(np.uint32) == 0xFFFFFFFF).all()


def check(kernel, spec):
    (check_mm if isinstance(spec, MmFp4) else check_grouped)(kernel, spec)


@each(kind=KINDS, fmt=FORMATS, size=[WHOLE, RAGGED], level=LEVELS)
def test_default(kind, fmt, size, level):
    """Without search."""
    needs(level)
    spec = spec_of(kind, fmt, size)
    check(compiled(spec, level), spec)


@each(fmt=FORMATS, kind=KINDS, level=["avx512bf16", "plain"])
def test_replay(fmt, kind, level):
    """Traces of the last sketch, found on static workloads, serve the exported function."""
    needs(level)
    spec = spec_of(kind, fmt, WHOLE)
    traces = {}
    for workload in catalog.workloads(spec, level):
        schedules = workload.space(level)(Schedule(workload.mod(level), seed=1))
        traces[workload.tag] = replay(workload.mod(level), trace_json(schedules[-1].trace)).trace
    check(compiled(spec, level, traces), spec)


@those(lambda number: number < 3, number=range(len(SPECS)))
def test_bfloat16_products_only_where_they_are_exact(number):
    """E2M1 times E4M3 has 6 bits; E8M0 scales may make subnormals, which VDPBF16PS takes for 0."""
    spec = SPECS[number]
    script = catalog.exported(spec, "avx512bf16", {}).script()
    used = "blockscale_vdpbf16ps" in script
    assert used == (spec.fmt == "nvfp4" and spec.n % 16 == 0)
    assert cpu_gemm.compute_type(spec, "avx512", 8) == "float32"


def test_the_tuner_divides_rows_among_experts():
    """Its offsets are in order, and static scales have room for each expert's rows."""
    argument = Argument("offsets", "int32", (4,), False, None, value=9)
    assert argument.values.tolist() == [0, 3, 6, 9]
    workload = catalog.workloads(GROUPED[0], "plain")[-1]
    shapes = {p.name: tuple(p.shape) for p in workload.mod("plain")["main"].params}
    assert tuple(map(int, shapes["a_scale"])) == (3 * 128, 16)


def test_bad_offsets_stay_inside_of_the_tensors():
    """The function checks them first; the kernel alone clamps: nothing outside is touched."""
    spec = GroupedMmFp4(3, 48, 256, "nvfp4", "float32")
    kernel = compiled(spec, host.level())
    case = grouped([0, 2, 5, 9], 9, spec.n, spec.k, spec.fmt)
    truth = None
    for offsets in ([0, 2, 5, 900], [-7, 2, 5, 9], [0, 2, 5, 9]):
        inputs = [*case.inputs[:4], torch.tensor(offsets, dtype=torch.int32), case.alpha]
        [d] = call(kernel, inputs, [torch.empty(9, spec.n)])
        truth = d if truth is None else truth
        assert torch.equal(d, truth)
    for offsets in ([9, 5, 2, 0], [900, 800, 700, 600], [0, 2**31 - 1, -(2**31), 9]):
        inputs = [*case.inputs[:4], torch.tensor(offsets, dtype=torch.int32), case.alpha]
        call(kernel, inputs, [torch.empty(9, spec.n)])
    few = [*case.inputs[:2], case.a_scale[:128], *case.inputs[3:]]
    call(kernel, few, [torch.empty(9, spec.n)])


def test_a_fresh_process_registers_what_traces_name():
    """One that has scheduled nothing knows the intrinsics of every level's default schedules."""
    names = set()
    for i, level in enumerate(level for level in LEVELS if level != "plain"):
        for spec in (*SPECS, *GROUPED)[i::5]:
            for workload in catalog.workloads(spec, level):
                sch = Schedule(workload.symbolic(level))
                workload.default(sch, level)
                steps = [step for step in trace_json(sch.trace)[0] if step[0] == "Tensorize"]
                names |= {step[2][0].strip('"') for step in steps}
    assert len(names) >= 6
    assert fresh.registers(names)
