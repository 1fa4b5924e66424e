"""The grouped GEMM with a gated activation and FP4 in its epilogue: tcgen05, in the emulator."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import tvm

from blockscale import emulator
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.facts import plan as read
from blockscale.schedules.gemm import tcgen05
from blockscale.schedules.gemm.tcgen05_tiles import gated_tiles as tiles_of
from blockscale.schedules.steps import preferred, sampled
from blockscale.specs import GroupedMmActFp4Quant, GroupedMmFp4
from blockscale.tir.gemm.gated_tiles import gated_tiles
from tests.fused.test_gpu_fused import SM100, emulated
from tests.kit import gated
from tests.kit import gemm_harness as harness
from tests.kit.gemm_operands import operand
from tests.kit.gpu_library import library
from tests.kit.pairwise import exhaustive, few
from tests.reference import core as ref

GROUPS = [70, 0, 130]
N, K = 256, 320
PLANS: list[dict[str, Any]] = [
    {"epi_cols": 64, "mma_n": 128},
    {"epi_cols": 32, "mma_n": 256, "cta_group": 2, "block_k": 256, "stages": 2},
    {"epi_cols": 64, "mma_n": 192, "fmt": "mxfp4"},
    {"epi_cols": 64, "mma_n": 64, "cta_group": 2, "raster": "y", "group": 2},
]
RULES = [
    ("silu", "bfloat16"),
    ("gelu_tanh", "float16"),
    ("swiglu", "bfloat16"),
    ("silu", "float16"),
]


def function(spec: GroupedMmActFp4Quant, rows: int | None = None) -> tvm.IRModule:
    """The unscheduled kernel of a spec."""
    made = gated_tiles(spec.fmt, spec.rule, spec.n, spec.k, spec.experts, rows)
    return tvm.IRModule({"main": made})


def unfused(
    spec: GroupedMmActFp4Quant, values: np.ndarray, scale: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and 128x4 scales of gates and ups by the activation's own kernel."""
    rows, cols = values.shape
    back = np.argsort(gated.interleaved(np.arange(cols)))
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float16
    x = torch.from_numpy(values[:, back].view(np.int16).copy()).view(dtype)
    packed = torch.zeros(rows, cols // 4, dtype=torch.uint8)
    shape = -(-rows // 128) * 128, cols // 2 // spec.block
    scales = torch.zeros(shape, dtype=torch.uint8)
    numbers = gated.numbers(spec)
    emulated(SM100)(spec.rule, None)(x, torch.tensor([scale]), *numbers, packed, scales)
    return packed.numpy(), scales.numpy()


@pytest.mark.parametrize("number", few([2, 0, 1, 3], every=4))
def test_codes_and_scales_are_those_of_two_kernels(number: int) -> None:
    """Bit for bit: products rounded to 16 bits, activated, quantised; zeros fill the last 128."""
    rng = np.random.default_rng(number)
    activation, dtype = RULES[number]
    changes = {"n": N, "k": K, "experts": len(GROUPS), "acc_stages": 2, **PLANS[number]}
    of = harness.plan(**changes)
    spec = GroupedMmActFp4Quant(len(GROUPS), N, K, of.fmt, activation, dtype)
    sch = new_schedule(function(spec))
    tcgen05.decided(sch, of, spec.rule)
    kernel = checked(derive(sch.mod["main"]))
    ptx = compile_cuda_source(emit(kernel, "gemm"), SM100, ptx=True).image.decode()
    m, atoms = sum(GROUPS), sum(-(-g // 128) for g in GROUPS)
    row = of.format
    a = harness.operand(rng, 4, row.scale.name, row.block, GROUPS, K)
    b = harness.operand(rng, 4, row.scale.name, row.block, [N] * len(GROUPS), K)
    scale = np.float32([0.37, 0.5, 0.02])
    along = N // 2 // spec.block * 128
    named: dict[str, Any] = {
        "a": a.stored, "b": b.stored, "a_scale": a.scale, "b_scale": b.scale,
        "alpha": np.float32([1e-3, 2e-3, 5e-4]), "global_scale": scale,
        "offsets": np.int32([0, *np.cumsum(GROUPS)]),
        "packed": np.full((m, N // 4), 0xFF, np.uint8),
        "block_scale": np.full((atoms + 1, along), 0xFF, np.uint8),
        **dict(zip(("gate_alpha", "beta", "limit"), gated.numbers(spec), strict=False)),
    }  # fmt: skip
    report = harness.launch(kernel, ptx, named, m, 2)
    report.check()
    assert not report.hazards
    plain = harness.plan(fmt=of.fmt, n=N, k=K, experts=len(GROUPS), out_dtype=dtype)
    products = dict(named, d=np.zeros((m, N), np.uint16))
    harness.launch(harness.kernel(plain), harness.ptx(plain), products, m, 2).check()
    at = atom = 0
    for e, count in enumerate(GROUPS):
        if not count:
            continue
        codes, scales = unfused(spec, products["d"][at : at + count], scale[e])
        np.testing.assert_array_equal(named["packed"][at : at + count], codes)
        many = -(-count // 128)
        found = named["block_scale"][atom : atom + many].reshape(scales.shape)
        np.testing.assert_array_equal(found, scales)
        assert len(np.unique(codes)) > 100
        at, atom = at + count, atom + many
    assert (named["block_scale"][atom:] == 0xFF).all()


def test_library() -> None:
    """As users get it: few rows and many, against NumPy; the next GEMM takes what it gives."""
    spec = GroupedMmActFp4Quant(3, 256, 96, "nvfp4", "swiglu", "bfloat16")
    after = GroupedMmFp4(3, 64, 128, "nvfp4", "float32")
    path = library([spec, after], SM100)

    def call(name: str, *given: Any) -> None:
        run = emulator.run_module(path, name, *given, target=SM100, multiprocessors=4)
        run.check()
        assert not [hazard for report in run.reports for hazard in report.hazards]

    for offsets, rows in (([2, 3, 4, 6], 9), ([0, 830, 830, 900], 900)):
        case = gated.case(spec, offsets, rows)
        packed, block_scale = case.outputs(spec)
        call(spec.name, *case.tensors(), *gated.numbers(spec), packed, block_scale)
        gated.judge(spec, case, packed, block_scale)
    b = [operand(64, 128, "nvfp4", "b", seed) for seed in range(3)]
    weights, b_scale = torch.stack([x.stored for x in b]), torch.stack([x.scale for x in b])
    d = torch.full((rows, 64), float("nan"))
    ends = torch.tensor(offsets, dtype=torch.int32)
    call(after.name, packed, weights, block_scale, b_scale, ends, None, d)
    at = 0
    for e, (first, end) in enumerate(pairwise(offsets)):
        byte = ref.unswizzle(block_scale[at : at + 1024].numpy(), end - first, 8)
        left = ref.operand(ref.unpack(packed[first:end].numpy()), byte, "nvfp4", "a")
        error = ref.row_error(d[first:end].numpy(), ref.mm(left, b[e].value))
        assert error.max(initial=0) < 1e-5
        at += -(-(end - first) // 128) * 128
    short = block_scale[:-128].contiguous()
    with pytest.raises(ValueError, match=r"block_scale has size \d+ in dimension 0, but \d+"):
        call(spec.name, *case.tensors(), *gated.numbers(spec), packed, short)


def sketches(fmt: str, rows: int) -> tuple[GroupedMmActFp4Quant, list[Any]]:
    """A spec, and the sketches for so many rows."""
    spec = GroupedMmActFp4Quant(8, 4096, 7168, fmt, "swiglu")
    found = tcgen05.gated_sketches(fmt, spec.rule, spec.n, spec.k, spec.experts, rows)
    assert len(found) == len(tiles_of(fmt, spec.block, spec.n, spec.k, spec.experts, rows)) >= 6
    return spec, found


@pytest.mark.parametrize(("fmt", "rows"), few([("nvfp4", 128), ("mxfp4", 2048)]))
def test_the_space(fmt: str, rows: int) -> None:
    """Traces serve any number of rows."""
    spec, found = sketches(fmt, rows)
    for sketch, choose in ((found[0], preferred), (found[-1], sampled)):
        sch = new_schedule(function(spec, rows), seed=3)
        sketch(sch, choose)
        plan = read(sch.mod["main"]).check()
        assert (plan.out_dtype, plan.n, plan.swap, plan.store) == ("uint8", 4096, False, "direct")
        again = replay(function(spec), trace_json(sch.trace))
        assert read(again.mod["main"]) == plan


@exhaustive
@pytest.mark.parametrize(("fmt", "every"), [("nvfp4", 1), ("mxfp4", 4)])
def test_every_tile(fmt: str, every: int) -> None:
    """Makes a kernel without spills; ptxas takes seconds for each."""
    spec, found = sketches(fmt, 2048)
    for sketch in found[::every]:
        again = new_schedule(function(spec))
        sketch(again, preferred)
        (used,) = compile_cuda_source(emit(derive(again.mod["main"]), "gemm"), SM100).resources
        assert used["spills"] == used["stack"] == 0
