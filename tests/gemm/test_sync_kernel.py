"""GEMMs by block-scaled mma.sync in the emulator: formats, structures, sizes, against float64.

The tolerances are those of `test_gemm_kernel`.  No GPU that has such instructions was at hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
import tvm
from tvm.s_tir import Schedule, TensorIntrin

from blockscale import emulator
from blockscale.base.errors import LoweringError
from blockscale.base.formats import GEMM
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.catalog import cuda_source, workloads
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.kernel import Kernel
from blockscale.lower.pipe.simulate import Barrier
from blockscale.lower.sync import check
from blockscale.lower.sync.derive import derive
from blockscale.lower.sync.emit import SCALED_MMA, emit
from blockscale.lower.sync.kernel import SyncKernel
from blockscale.schedules.gemm import sync, tcgen05
from blockscale.schedules.steps import sampled
from blockscale.specs import GroupedMmActFp4Quant, GroupedMmFp4, MmFp4
from blockscale.specs.plans.sync import Y_ROWS, SyncPlan
from blockscale.tir import intrin
from blockscale.tir.gemm.tiles import gemm_tiles
from tests.gemm.test_gemm_library import errors, operands, scales
from tests.kit import gated
from tests.kit import gemm_harness as harness
from tests.kit.gpu_library import library
from tests.kit.pairwise import each, exhaustive, few, pairs, seeds, those

ARCH = "sm_120a"

STRUCTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "store_tma": {"store": "tma", "raster": "y", "group": 2, "epi_cols": 16},
    "narrow": {"mma_n": 64, "stages": 3, "epi_cols": 64},
    "swap": {"swap": True, "mma_n": 32, "stages": 3},
    "swap_tma": {"swap": True, "mma_n": 64, "store": "tma", "epi_cols": 16, "group": 4},
    "swap_wide": {"swap": True, "mma_n": 128, "epi_cols": 64},
}


def run(plan: SyncPlan, rows: Any, **options: Any) -> None:
    """Run a plan and fail unless it is right."""
    harness.judge(plan, harness.run(plan, rows, **options))


QUICK = (
    *(("plain", "nvfp4", 1), ("plain", "mxfp8xmxfp4", 200), ("store_tma", "nvfp4", 40)),
    *(("store_tma", "mxfp8", 200), ("narrow", "nvfp4", 200), ("narrow", "mxfp8", 40)),
    *(("swap", "nvfp4", 1), ("swap", "mxfp8xmxfp4", 40), ("swap", "mxfp4", 200)),
    *(("swap_tma", "nvfp4", 1), ("swap_tma", "mxfp4", 40), ("swap_tma", "mxfp8", 200)),
    *(("swap_wide", "mxfp4", 40), ("swap_wide", "mxfp8xmxfp4", 1)),
)
"""Of each structure two or three formats, with operands as they are and swapped."""


@those(
    lambda name, fmt, rows: (name, fmt, rows) in QUICK,
    name=list(STRUCTURES),
    fmt=list(GEMM),
    rows=[1, 40, 200],
)
def test_structures(name: str, fmt: str, rows: int) -> None:
    """Every structure with every format, on ragged sizes, several tiles a CTA."""
    plan = harness.sync_plan(fmt=fmt, n=200, k=448, **STRUCTURES[name])
    run(plan, rows, bias=rows == 40, alpha=rows != 1)


@each(k=[32, 64, 96, 160, 512], fmt=GEMM, swap=[False, True])
def test_ends_of_k(k: int, fmt: str, swap: bool) -> None:
    """K that ends in a stage, in a 128x4 tile of scales; 4-bit rows that TMA cannot spread."""
    run(harness.sync_plan(fmt=fmt, n=72, k=k, swap=swap, mma_n=64), 40)


@each(fmt=["nvfp4", "mxfp4"], swap=[False, True])
def test_long_stages(fmt: str, swap: bool) -> None:
    """Rows of 128 bytes of codes: 256 elements of K, and the last stage of one MMA."""
    run(harness.sync_plan(fmt=fmt, n=72, k=576, swap=swap, mma_n=64, block_k=256), 70)


@seeds(5, default=2)
def test_interleavings(seed: int) -> None:
    """Orders in which warps and asynchronous work may run."""
    run(harness.sync_plan(n=256, k=448, store="tma", mma_n=64), 150, seed=seed, bias=True)


@pairs(dtype=["bfloat16", "float16"], swap=[False, True], store=["tma", "direct"])
def test_rounding(dtype: str, swap: bool, store: str) -> None:
    """16-bit results are the float64 result rounded to nearest."""
    plan = harness.sync_plan(n=64, k=128, out_dtype=dtype, swap=swap, store=store, mma_n=64)
    run(plan, 40, bias=True, alpha=True)


GROUPED: tuple[dict[str, Any], ...] = (
    {"fmt": "nvfp4", "store": "tma", "out_dtype": "bfloat16"},
    {"fmt": "mxfp4", "swap": True, "mma_n": 32, "store": "tma", "group": 4},
    {"fmt": "mxfp8xmxfp4", "swap": True, "mma_n": 64, "raster": "y"},
    {"fmt": "mxfp8", "mma_n": 64, "group": 2},
)


@pytest.mark.always
@pytest.mark.parametrize("number", few(range(len(GROUPED))))
def test_grouped(number: int) -> None:
    """Experts with 0, 1, 128 and 300 rows, an alpha each."""
    plan = harness.sync_plan(experts=4, n=200, k=256, **GROUPED[number])
    run(plan, [0, 1, 128, 300], alpha=True, clusters=3)


@each(swap=[False, True], store=["tma", "direct"])
def test_rows_of_no_expert(swap: bool, store: str) -> None:
    """Rows of d behind the last expert's are not written, in tiles that hold both."""
    plan = harness.sync_plan(experts=2, n=72, k=128, swap=swap, store=store, mma_n=64)
    run(plan, [40, 23], spare=100)


@pytest.mark.parametrize("experts", [0, 3])
def test_no_rows(experts: int) -> None:
    """M = 0 ends, and touches nothing."""
    run(harness.sync_plan(experts=experts, store="tma"), [0] * experts if experts else 0)


# ---- What is compiled ---------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", few(list(GEMM)))
def test_default_kernels_do_not_spill(fmt: str) -> None:
    """ptxas keeps sums, fragments and words in registers; the MMA is that of the format."""
    source = cuda_source(MmFp4(4096, 7168, fmt), ARCH, {})
    used = compile_cuda_source(source.device, ARCH).resources
    assert len(used) == 4
    assert all(kernel["spills"] == 0 for kernel in used)
    text = compile_cuda_source(source.device, ARCH, ptx=True).image.decode()
    kinds = set(re.findall(r"kind::(\w+)\.block_scale\.scale_vec::(\dX)", text))
    wanted = {"nvfp4": ("mxf4nvf4", "4X"), "mxfp4": ("mxf4", "2X")}
    assert kinds == {wanted.get(fmt, ("mxf8f6f4", "1X"))}


def test_lanes_exchange_sums_between_barriers() -> None:
    """The emulator lets lanes of a warp wait for each other: the text has what hardware needs."""
    text = harness.text(harness.sync_plan(mma_n=128, epi_cols=64))
    found = re.findall(r"__syncwarp|bs_sync_stage|bs_sync_row", text[text.index("int chunk = 0") :])
    assert found == 2 * ["__syncwarp", *2 * ["bs_sync_stage"], "__syncwarp", "bs_sync_row"]


def test_sm_121a() -> None:
    """The same text is accepted for the other architecture."""
    source = cuda_source(GroupedMmFp4(4, 512, 512), "sm_121a", {})
    assert all(k["spills"] == 0 for k in compile_cuda_source(source.device, "sm_121a").resources)


def test_every_decision_reaches_the_kernel() -> None:
    """Its text or its maps."""
    base = harness.sync_plan(n=1024, k=2048, store="tma", mma_n=64, epi_cols=16)
    changes: dict[str, Any] = {
        "fmt": "mxfp4", "out_dtype": "bfloat16", "n": 512, "k": 1024, "swap": True, "mma_n": 128,
        "block_k": 256, "stages": 3, "epi_cols": 32, "store": "direct", "raster": "y", "group": 4,
    }  # fmt: skip
    texts = {harness.text(base)}
    for name, value in changes.items():
        texts.add(harness.text(replace(base, **{name: value})))
        assert len(texts) == 1 + list(changes).index(name) + 1, name


def test_shared_memory_is_that_of_the_plan() -> None:
    """What a plan says is what a kernel asks for; what fits is legal, a stage more is not."""
    for number, (name, given) in enumerate(STRUCTURES.items()):
        for fmt in list(GEMM)[number % 2 :: 2]:
            plan = harness.sync_plan(fmt=fmt, **given | {"stages": 2, "experts": 40})
            kernel = harness.kernel(plan)
            assert kernel.launch_bytes == plan.smem_bytes, (name, fmt)
            assert kernel.places["end"] <= kernel.launch_bytes
            deep = [n for n in range(2, 40) if replace(plan, stages=n).illegal() is None]
            assert deep == list(range(2, 2 + len(deep)))
            assert harness.kernel(replace(plan, stages=deep[-1])).smem_bytes <= 99 << 10


@pytest.mark.parametrize(("size", "legal"), [(99 << 10, True), ((99 << 10) + 1, False)])
def test_the_limit_of_shared_memory(monkeypatch: Any, size: int, legal: bool) -> None:
    """Of a CTA on SM 12.0 (CUDA C++ Programming Guide, compute capabilities): 99 KiB."""
    plan = harness.sync_plan(fmt="nvfp4", stages=2)
    monkeypatch.setattr(SyncPlan, "smem_bytes", property(lambda self: size))
    assert (plan.illegal() is None) == legal


# ---- Libraries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", few([1, 40, 100, 300]))
def test_mm_fp4_of_a_library(rows: int) -> None:
    """Each bucket's kernel, through its host code."""
    spec = MmFp4(264, 448, "nvfp4", "float32", "silu", True)
    a, b = operands(spec, [rows])
    alpha, bias = torch.tensor([2.0**-9]), torch.arange(spec.n, dtype=torch.float32) / 16
    residual = torch.arange(rows * spec.n, dtype=torch.float32).reshape(rows, -1) % 7
    d = torch.full((rows, spec.n), float("nan"))
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    run_of = emulator.run_module(
        library([spec], ARCH), spec.name, *stored, scales(a), scales(b), alpha, bias, residual, d,
        target=ARCH, multiprocessors=4,
    )  # fmt: skip
    run_of.check()
    assert run_of.launches[0].block[0] == 160
    product = 2.0**-9 * (a.value @ b.value.T) + bias.numpy()
    want = product / (1 + torch.exp(torch.from_numpy(-product)).numpy()) + residual.numpy()
    assert errors(d.numpy().astype(float), want).max() < 1e-5


@pytest.mark.parametrize(("fmt", "rule"), [("nvfp4", "swiglu"), ("mxfp4", "silu")])
def test_grouped_gemm_with_an_activation(fmt: str, rule: str) -> None:
    """Codes and scales of a library's kernel are those of the unfused ops."""
    spec = GroupedMmActFp4Quant(3, 256, 320, fmt, rule, "bfloat16")
    offsets = [0, 70, 70, 201]
    given = gated.case(spec, offsets, 208)
    outs = given.outputs(spec)
    run_of = emulator.run_module(
        library([spec], ARCH), spec.name, *given.tensors(), *gated.numbers(spec), *outs,
        target=ARCH, multiprocessors=3,
    )  # fmt: skip
    run_of.check()
    gated.judge(spec, given, *outs)


# ---- What is refused ----------------------------------------------------------------------------


def scheduled(plan: SyncPlan) -> Any:
    """The scheduled function of a plan."""
    func = gemm_tiles(plan.fmt, plan.out_dtype, plan.n, plan.k, plan.experts)
    sch = new_schedule(tvm.IRModule({"main": func}))
    sync.decided(sch, plan)
    return sch.mod["main"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mma_n": 256}, "mma_n=256 is none of"),
        ({"fmt": "mxfp8", "block_k": 256}, "block_k=256 is none of"),
        ({"stages": 1}, "stages=1: loads overlap"),
        ({"experts": 2000}, "experts=2000 are more than 1024"),
        ({"epi_cols": 48}, "epi_cols=48 is not 16, 32 or 64"),
        ({"store": "bulk"}, "store='bulk' is neither"),
        ({"store": "tma", "epi_cols": 64}, "rows of 256 bytes has no swizzle"),
        ({"store": "tma", "n": 33}, "n=33: rows of d are no multiple of 16 bytes"),
        ({"stages": 6}, r"6 stages of 18432 bytes .* 101376 are the limit"),
    ],
)
def test_plans_that_there_are_not(changes: dict[str, Any], message: str) -> None:
    reason = replace(harness.sync_plan(), **changes).illegal()
    assert reason is not None
    assert re.search(message, reason)


def _loads(number: int, **changes: Any) -> Callable[[Kernel], Kernel]:
    def made(of: Kernel) -> Kernel:
        loads = list(of.loads)
        loads[number] = replace(loads[number], **changes)
        return replace(of, loads=tuple(loads))  # type: ignore[arg-type]

    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: replace(of, mma=replace(of.mma, n=192)), "192 rows of Y are none of"),
        (lambda of: replace(of, acc_stages=2), "into one set of registers"),
        (lambda of: replace(of, stages=12), "101376 are the limit"),
        (lambda of: replace(of, whole=replace(of.whole, copies=())), "never copied"),
        (lambda of: replace(of, stages=1), "from 2 stages on"),
    ],
)
def test_kernels_that_there_are_not(change: Any, message: str) -> None:
    kernel = harness.kernel(harness.sync_plan())
    assert isinstance(kernel, SyncKernel)
    with pytest.raises(LoweringError, match=message):
        check.checked(change(kernel))


def test_who_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a stage to wait for another warp than there are, loads would never go on."""
    made: list[int] = []

    class One(Barrier):
        def __post_init__(self) -> None:
            made.append(self.count)
            self.count += self.count == 4
            super().__post_init__()

    kernel = harness.kernel(harness.sync_plan())
    assert check.illegal(kernel) is None  # type: ignore[arg-type]
    monkeypatch.setattr(check, "Barrier", One)
    assert "wait for ever" in (check.illegal(kernel) or "")  # type: ignore[arg-type]
    assert 4 in made


def test_schedules_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tcgen05; without instructions; warps that do not have 32 rows each."""
    func = gemm_tiles("nvfp4", "float32", 256, 512)
    sch = new_schedule(tvm.IRModule({"main": func}))
    with pytest.raises(LoweringError, match=r"no block issues MMAs.*tir\.intrin\.sync"):
        derive(sch.mod["main"])
    tcgen05.decided(sch, harness.plan())
    with pytest.raises(LoweringError, match="0 blocks call sync_mma_"):
        derive(sch.mod["main"])
    bind = Schedule.bind
    monkeypatch.setattr(
        Schedule, "bind", lambda self, loop, to: to == "threadIdx.y" or bind(self, loop, to)
    )
    with pytest.raises((LoweringError, AssertionError)):
        derive(scheduled(harness.sync_plan()))


# ---- The space ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    few([MmFp4(512, 1024), MmFp4(40, 96, "mxfp8xmxfp4"), GroupedMmFp4(8, 512, 512, "mxfp4")]),
)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=exhaustive)])
def test_the_space_is_of_kernels(spec: Any, step: int) -> None:
    """Sketches of every bucket, with random decisions; traces can be read again."""
    for first, workload in enumerate(workloads(spec, ARCH)):
        sketches = workload.sketches(ARCH)
        assert sketches
        for seed, sketch in list(enumerate(sketches))[first % min(step, len(sketches)) :: step]:
            sch = Schedule(workload.symbolic(ARCH), seed=seed + 1)
            sketch(sch, sampled)
            kernel = SCALED_MMA.kernel(sch.mod["main"])
            assert "bs_sync_mma" in SCALED_MMA.emit(kernel, "gemm")
    again = replay(workload.symbolic(ARCH), trace_json(sch.trace))
    assert emit(derive(again.mod["main"]), "gemm") == emit(derive(sch.mod["main"]), "gemm")


PLANS, EACH = 72, 6


@cache
def drawn() -> list[tuple[SyncPlan, Any, dict[str, Any]]]:
    """Different legal plans with random sizes, rows and options."""
    rng, found = Random(20261123), dict[SyncPlan, Any]()
    while len(found) < PLANS:
        experts = rng.choice([0, 0, 3])
        plan = SyncPlan(
            fmt=rng.choice(list(GEMM)),
            out_dtype=rng.choice(["float32", "bfloat16", "float16"]),
            n=8 * rng.randint(1, 48),
            k=32 * rng.randint(1, 16),
            experts=experts,
            swap=rng.random() < 0.5,
            mma_n=rng.choice(Y_ROWS),
            block_k=rng.choice([128, 256]),
            stages=rng.randint(2, 6),
            epi_cols=rng.choice([16, 32, 64]),
            store=rng.choice(["tma", "direct"]),
            raster=rng.choice(["x", "y"]),
            group=rng.choice([1, 2, 4, 8]),
        )
        if plan.illegal() is not None or plan.k % (32 if plan.fmt != "nvfp4" else 16):
            continue
        many = [rng.choice([0, 1, 33, 130]) for _ in range(experts)]
        rows = many if experts else rng.choice([1, 7, 64, 129, 260])
        options = {"bias": not experts and rng.random() < 0.5, "alpha": rng.random() < 0.5}
        found[plan] = rows, options | {"seed": len(found), "clusters": rng.choice([1, 2, 3])}
    return [(plan, rows, options) for plan, (rows, options) in found.items()]


@exhaustive
@pytest.mark.parametrize("first", range(0, PLANS, EACH))
def test_random_plans(first: int) -> None:
    for plan, rows, options in drawn()[first : first + EACH]:
        run(plan, rows, **options)


def test_traces_name_loads_of_tcgen05() -> None:
    """They are registered when a trace is read that names no other instruction of tcgen05's."""
    name = "tma_load_24x64_sw64_cg1"  # of no schedule
    assert TensorIntrin.get(name, allow_missing=True) is None
    intrin.register_named(f'sch.tensorize(b0, "sync_scales")\nsch.tensorize(b1, "{name}")')
    assert TensorIntrin.get(name, allow_missing=True) is not None
