"""The space of MoE GEMMs on Hopper: every point is legal, and is read back as it was drawn."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from random import Random

import pytest
import tvm

from blockscale import catalog
from blockscale.base.errors import LoweringError
from blockscale.base.targets import GPU_TARGETS, WGMMA
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.catalog import moe as catalog_moe
from blockscale.lower.moe.read import read
from blockscale.schedules.moe import wgmma as sm90
from blockscale.schedules.moe import wgmma_tiles as sm90_tiles
from blockscale.schedules.steps import preferred, sampled
from blockscale.specs import FusedMoe, Spec
from blockscale.specs.plans.moe import MMA_TOKENS, SMEM_BYTES, WGMMA_TOKENS, MoeGemm, MoePlan
from blockscale.tir.moe.tiles import TOKEN_TILE, moe_tiles
from tests.kit import fresh
from tests.kit.pairwise import each, few

TOKENS = (1, 8, 64, 512, 4096)
LEVELS = ("sm_90a", "sm_100a", "sm_120a")
QWEN1 = MoeGemm("nvfp4", 16, False, "bfloat16", "swiglu", 128, 1536, 2048, 8)
GEMMS = [
    QWEN1,
    MoeGemm("nvfp4", 16, False, "bfloat16", "none", 128, 2048, 768, 8),
    MoeGemm("mxfp4", 32, False, "float16", "swiglu_oai", 128, 5760, 2880, 4),
    MoeGemm("int4", 128, False, "bfloat16", "swiglu", 8, 28672, 4096, 2),
    MoeGemm("int4", 32, True, "bfloat16", "none", 32, 7168, 2048, 8),
    MoeGemm("int4", 64, True, "bfloat16", "relu2", 8, 1024, 512, 2),
    MoeGemm("mxfp4", 32, False, "bfloat16", "gelu_tanh", 4, 128, 64, 1),
]
DRAWS = [
    (gemm, tokens, 7 * number + tokens % 5)
    for number, (gemm, tokens) in enumerate(product(GEMMS, TOKENS))
]


@cache
def module(gemm, tokens):
    """Return the unscheduled GEMM."""
    return tvm.IRModule({"main": moe_tiles(gemm, tokens)})


def drawn(gemm, tokens, seed):
    """Return a random point: its schedule, and the plan that its decision makes."""
    sketch = Random(seed).choice(sm90.moe_sketches(gemm, tokens))
    values = []

    def choose(sch, candidates, prefer):
        values.append(sampled(sch, candidates, prefer))
        return values[-1]

    sch = new_schedule(module(gemm, tokens), seed=seed + 1)
    sketch(sch, choose)
    (stages,) = values
    return sch, replace(sketch.keywords["tile"], stages=int(sch.get(stages)))


def plans(gemm, tokens, level="sm_90a"):
    """Every point of the space, as a plan, the default's first."""
    room = GPU_TARGETS[level]
    for tile in sm90_tiles.legal_tiles(gemm, tokens, room):
        for stages in sm90_tiles.depths(tile, room):
            yield replace(tile, stages=stages)


@each(gemm=GEMMS, tokens=TOKENS)
def test_every_point_is_legal(gemm, tokens):
    """On each level; no two are one kernel, and there is something to choose."""
    for level in LEVELS:
        found = list(plans(gemm, tokens, level))
        assert [plan.illegal() for plan in found if plan.illegal()] == []
        assert len(set(found)) == len(found) >= (10 if level == "sm_90a" else 2)
        room = GPU_TARGETS[level]
        most = min(SMEM_BYTES, room.cta_shared)
        assert all(plan.smem_bytes <= most for plan in found)
        if WGMMA not in room.features:
            assert {plan.unit for plan in found} == {"mma"}


def test_there_are_few_kernels():
    """Each is compiled once for all models, 0.5 s of nvcc."""
    for gemm in GEMMS:
        assert len({plan for tokens in TOKENS for plan in plans(gemm, tokens)}) <= 150


@pytest.mark.parametrize(("gemm", "tokens", "seed"), few(DRAWS, every=3), ids=str)
def test_a_point_is_read_as_it_was_drawn(gemm, tokens, seed):
    """From the module of a bucket and from the one for any number of tokens, by its trace."""
    sch, plan = drawn(gemm, tokens, seed)
    assert read(sch.mod["main"]) == plan
    trace = trace_json(sch.trace)
    assert read(replay(module(gemm, None), trace).mod["main"]) == plan


def test_a_trace_serves_every_size():
    """It says nothing of the layer: another model's GEMM of the same format takes it."""
    sch, plan = drawn(QWEN1, 64, 3)
    other = replace(QWEN1, experts=8, rows=512, k=448, top_k=2)
    assert read(replay(module(other, None), trace_json(sch.trace)).mod["main"]) == plan


def test_every_shape_of_a_tile():
    """Heights from 16 rows, all tokens, all slices, and one block of K: all are lowered."""
    shapes = {
        *(("mma", rows, 8, 2, 2) for rows in (16, 32, 64, 128, 256)),
        *(("mma", 64, tokens, 2, 4) for tokens in MMA_TOKENS),
        *(("mma", 32, 8, slices, 8) for slices in (1, 2, 4, 8)),
        *(("wgmma", 128, tokens, 1, 2) for tokens in WGMMA_TOKENS),
        *(("wgmma", rows, 48, 1, 2) for rows in (64, 128, 256)),
        ("wgmma", 256, 48, 1, 1),
    }
    for number, (unit, rows, tokens, slices, blocks) in enumerate(sorted(shapes)):
        gemm = GEMMS[number % len(GEMMS)]
        fixed = (gemm.fmt, gemm.group, gemm.zeros, gemm.dtype, gemm.activation, gemm.gather)
        plan = MoePlan(unit, *fixed, rows, tokens, slices, 2, blocks)
        if plan.illegal():
            continue
        sch = new_schedule(module(gemm, None))
        sm90.moe_gemm(sch, preferred, gemm, plan, [2])
        assert read(sch.mod["main"]) == plan
        assert TOKEN_TILE % tokens == 0


def test_defaults():
    """Few tokens of an expert: mma.sync and small tiles; many: wgmma and 256 rows."""
    for gemm, tokens in product(GEMMS[:5], TOKENS):
        plan = next(plans(gemm, tokens))
        each = sm90_tiles.expected_tokens(gemm, tokens)
        assert plan.unit == ("mma" if each <= 12 else "wgmma"), (gemm, tokens)
        assert plan.tokens <= max(8, 2 * each)
        if each <= 4:
            assert plan.tokens == 8
        if plan.unit == "wgmma":
            assert (plan.rows, plan.blocks_k) == (256, 2)


def test_expected_tokens():
    """One token has experts of its own; many are spread over all."""
    assert sm90_tiles.busy_experts(QWEN1, 1) == pytest.approx(8)
    assert sm90_tiles.expected_tokens(QWEN1, 1) == pytest.approx(1)
    assert sm90_tiles.busy_experts(QWEN1, 4096) == pytest.approx(128)
    assert sm90_tiles.expected_tokens(QWEN1, 4096) == pytest.approx(256 + 16)


def test_a_fresh_process_registers_what_traces_name():
    """One that has scheduled nothing replays the traces of every format and unit."""
    names = set()
    for gemm, tokens in product(GEMMS, (1, 64, 512)):
        for sketch in sm90.moe_sketches(gemm, tokens)[::5]:
            sch = new_schedule(module(gemm, None))
            sketch(sch, preferred)
            names |= {step[2][0] for step in trace_json(sch.trace)[0] if step[0] == "Tensorize"}
    assert len(names) > 20
    assert fresh.registers(names)


POINTS = [(QWEN1, 8, 1), (QWEN1, 512, 7), (GEMMS[4], 64, 4)]
BLOCKS = ("weights", "scales", "tokens", "decode")


@cache
def example(point):
    """Return the trace and the plan of a point."""
    sch, plan = drawn(*point)
    return trace_json(sch.trace), plan


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_tensorize_is_needed(point):
    """A block that keeps its loops is an error that names it."""
    trace, _ = example(point)
    numbers = [i for i, step in enumerate(trace[0]) if step[0] == "Tensorize"]
    assert len(numbers) == 5
    messages = []
    for number in numbers:
        less = deepcopy(trace)
        del less[0][number]
        less[1] = [[i - (i > number), value] for i, value in less[1]]
        sch = replay(module(point[0], point[1]), less)
        with pytest.raises(LoweringError, match="is not tensorized") as error:
            read(sch.mod["main"])
        messages.append(str(error.value))
    for name, message in zip(BLOCKS, messages, strict=False):
        assert f"block '{name}" in message
    assert "block 'gemm" in messages[-1]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_decision_changes_its_field(point):
    """Another candidate changes the depth of the ring, and nothing else."""
    trace, plan = example(point)
    ((number, _),) = trace[1]
    candidates = trace[0][number][2][0]
    assert len(candidates) > 1
    for other, stages in enumerate(candidates):
        changed = [trace[0], [[number, other]]]
        found = read(replay(module(point[0], point[1]), changed).mod["main"])
        assert found == replace(plan, stages=stages)


WRONG = [
    ("decode_nvfp4_g16_16x64_bf16", "decode_mxfp4_g32_16x64_bf16", None),
    ("cp_async_row64_bf16_gather", "cp_async_row64_bf16", None),
    ("blockscale.stages", "blockscale.stagse", "annotation 'blockscale.stagse' is none of"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_schedule_must_agree_with_itself(old, new, message):
    """An intrinsic of another format does not fit; an annotation that nothing reads is an error."""
    trace, _ = example(POINTS[0])
    changed = [
        [step[0], step[1], [new if a == old else a for a in step[2]], *step[3:]]
        for step in trace[0]
    ]
    assert changed != trace[0]
    if message is None:
        with pytest.raises(Exception, match=r"match|mismatch|shape|buffer"):
            replay(module(QWEN1, 8), [changed, trace[1]])
        return
    sch = replay(module(QWEN1, 8), [changed, trace[1]])
    with pytest.raises(LoweringError, match=message):
        read(sch.mod["main"])


def test_what_is_no_schedule_of_a_gemm():
    """Unscheduled, of other true sizes, or another function."""
    func = module(QWEN1, None)["main"]
    with pytest.raises(LoweringError, match="block 'weights' is not tensorized"):
        read(func)
    with pytest.raises(LoweringError, match="without the attribute 'blockscale\\.moe'"):
        read(func.without_attr("blockscale.moe"))
    sch, _ = drawn(*POINTS[0])
    func = sch.mod["main"]
    sizes = dict(func.attrs["blockscale.moe"])
    with pytest.raises(LoweringError, match=r"K of all stages is 2048, .* implies 2560"):
        read(func.with_attr("blockscale.moe", sizes | {"k": 2560}))
    with pytest.raises(LoweringError, match=r"bytes of a stage is 1024, .* implies 512"):
        read(func.with_attr("blockscale.moe", sizes | {"fmt": "mxfp4", "group": 32}))
    sch, _ = drawn(GEMMS[6], 8, 1)
    func = sch.mod["main"]
    sizes = dict(func.attrs["blockscale.moe"])
    with pytest.raises(LoweringError, match=r"format is .*'mxfp4', 32, .* implies .*'int4', 64"):
        read(func.with_attr("blockscale.moe", sizes | {"fmt": "int4", "group": 64}))


NAME = "fused_moe_nvfp4_e128_k8_h2048_i768_swiglu_tiles64_bf16"


def test_buckets_of_a_layer():
    """Both GEMMs of five buckets; neighbours of one pair of kernels are one bucket."""
    spec = Spec.parse(NAME)
    found = catalog.workloads(spec, "sm_90a")
    assert [w.tag for w in found][:2] == [f"{NAME}_gemm1_m1", f"{NAME}_gemm2_m1"]
    assert [w.rows for w in found] == [t for t in TOKENS for _ in (1, 2)]
    assert [w.limit("sm_90a") for w in found][::2] == [2, 24, 160, 1536, None]
    buckets = catalog_moe.buckets(spec, "sm_90a", {})
    limits = [bucket.limit for bucket in buckets]
    assert limits[-1] is None
    assert sorted(limits[:-1]) == limits[:-1]
    pairs = [bucket[1:] for bucket in buckets]
    assert all(first != second for first, second in pairwise(pairs))
    for bucket in buckets:
        assert (bucket.gemm1.gather, bucket.gemm2.gather) == (True, False)


def test_a_trace_wins_over_the_default():
    """The plans of a bucket are those of the logs."""
    spec = Spec.parse(NAME)
    work = next(w for w in catalog.workloads(spec, "sm_90a") if (w.rows, w.part) == (8, 1))
    *_, sketch = work.sketches("sm_90a")
    sch = new_schedule(work.mod("sm_90a"))
    sketch(sch, preferred)
    wanted = read(sch.mod["main"])
    buckets = catalog_moe.buckets(spec, "sm_90a", {work.tag: sch.trace})
    assert next(bucket for bucket in buckets if bucket.limit == 24).gemm1 == wanted
    assert buckets != catalog_moe.buckets(spec, "sm_90a", {})


def test_sizes_are_padded():
    """2880 is 45 blocks of 64; 100 channels are two."""
    spec = FusedMoe(4, 100 * 16, 96, 2, layout="tiles64")
    first, second = (catalog_moe.gemm_of(spec, part) for part in (1, 2))
    assert (first.rows, first.k, first.gated) == (256, 1600, True)
    assert (second.rows, second.k, second.activation) == (1600, 128, "none")


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        (NAME, "sm_80", "no kernel of fused_moe for sm_80"),
        (NAME.replace("_tiles64", ""), "sm_90a", "layout"),
    ],
)
def test_what_a_gpu_does_not_have(name, level, message):
    """Another architecture, or weights in another layout."""
    with pytest.raises(TypeError, match=message):
        catalog.workloads(Spec.parse(name), level)


def test_kin_lend_their_schedules():
    """A layer in float16, or with another gate, takes the schedules of bfloat16 and swiglu."""
    spec = Spec.parse(NAME)
    own = next(w for w in catalog.workloads(spec, "sm_90a") if (w.rows, w.part) == (8, 1))
    assert [w.spec.activation for w in own.kin("sm_90a")] == ["swiglu_oai"]
    other = replace(own, spec=replace(spec, dtype="float16", activation="gelu_tanh"))
    assert [w.spec.activation for w in other.kin("sm_90a")] == ["gelu_tanh", "swiglu", "swiglu_oai"]
    assert other.kin("sm_90a")[1] == own
    assert [w.spec.dtype for w in replace(other, part=2).kin("sm_90a")] == ["bfloat16"]
    *_, sketch = own.sketches("sm_90a")
    sch = new_schedule(own.mod("sm_90a"))
    sketch(sch, preferred)
    buckets = catalog_moe.buckets(other.spec, "sm_90a", {other.tag: sch.trace})
    found = next(bucket for bucket in buckets if bucket.limit == 24).gemm1
    wanted = replace(read(sch.mod["main"]), dtype="float16", activation="gelu_tanh")
    assert found == wanted
