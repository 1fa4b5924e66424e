"""The space of MoE GEMMs on Hopper: every point is legal, and the kernel is as it was drawn."""

import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest
import tvm

from blockscale import catalog
from blockscale.base.errors import LoweringError
from blockscale.base.targets import GPU_TARGETS, TCGEN05, WGMMA
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.catalog import moe as catalog_moe
from blockscale.catalog.moe import tile_of
from blockscale.catalog.registry import cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.schedules.moe import wgmma as sm90
from blockscale.schedules.moe import wgmma_tiles as sm90_tiles
from blockscale.schedules.steps import preferred, sampled
from blockscale.specs import FusedMoe, Spec
from blockscale.specs.plans.moe import MMA_TOKENS, SMEM_BYTES, WGMMA_TOKENS, MoeGemm, MoeTile
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


def read(func):
    """Return the tile and the depth of the ring of the kernel that is derived from a schedule."""
    made = derive(func)
    return tile_of(made), made.stages


def drawn(gemm, tokens, seed):
    """Return a random point: its schedule, and its tile and depth."""
    sketch = Random(seed).choice(sm90.moe_sketches(gemm, tokens))
    values = []

    def choose(sch, candidates, prefer):
        values.append(sampled(sch, candidates, prefer))
        return values[-1]

    sch = new_schedule(module(gemm, tokens), seed=seed + 1)
    sketch(sch, choose)
    (stages,) = values
    return sch, (sketch.keywords["tile"], int(sch.get(stages)))


def points(gemm, tokens, level="sm_90a"):
    """Every point of the space, tile and depth, the default's first."""
    room = GPU_TARGETS[level]
    for tile in sm90_tiles.legal_tiles(gemm, tokens, room):
        for stages in sm90_tiles.depths(gemm, tile, room):
            yield tile, stages


@each(gemm=GEMMS, tokens=TOKENS)
def test_every_point_is_legal(gemm, tokens):
    """On each level; no two are one kernel, and there is something to choose."""
    for level in LEVELS:
        found = list(points(gemm, tokens, level))
        assert [tile.illegal(gemm) for tile, _ in found if tile.illegal(gemm)] == []
        assert len(set(found)) == len(found) >= (10 if level == "sm_90a" else 2)
        room = GPU_TARGETS[level]
        most = min(SMEM_BYTES, room.cta_shared)
        assert all(stages >= 2 and tile.shared(gemm, stages) <= most for tile, stages in found)
        if WGMMA not in room.features:
            many = TCGEN05 in room.features and sm90_tiles.expected_tokens(gemm, tokens) >= 24
            assert {tile.unit for tile, _ in found} == {"tcgen05" if many else "mma"}


def test_there_are_few_kernels():
    """Each is compiled once for all models, 0.5 s of nvcc."""
    for gemm in GEMMS:
        assert len({point for tokens in TOKENS for point in points(gemm, tokens)}) <= 150


@pytest.mark.parametrize(("gemm", "tokens", "seed"), few(DRAWS, every=3), ids=str)
def test_a_kernel_is_as_it_was_drawn(gemm, tokens, seed):
    """From the module of a bucket and from the one for any number of tokens, by its trace."""
    sch, point = drawn(gemm, tokens, seed)
    made = derive(sch.mod["main"])
    assert (tile_of(made), made.stages) == point
    tile, stages = point
    assert made.shared == tile.shared(gemm, stages)
    assert (made.warps, made.slices) == (tile.warps, tile.slices)
    again = replay(module(gemm, None), trace_json(sch.trace))
    assert emit(derive(again.mod["main"]), "moe") == emit(made, "moe")


def test_a_trace_serves_every_size():
    """It says nothing of the layer: another model's GEMM of the same format takes it."""
    sch, point = drawn(QWEN1, 64, 3)
    other = replace(QWEN1, experts=8, rows=512, k=448, top_k=2)
    assert read(replay(module(other, None), trace_json(sch.trace)).mod["main"]) == point


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
        tile = MoeTile(unit, rows, tokens, slices, blocks)
        if tile.illegal(gemm):
            continue
        sch = new_schedule(module(gemm, None))
        sm90.moe_gemm(sch, preferred, gemm, tile, [2])
        assert read(sch.mod["main"]) == (tile, 2)
        assert TOKEN_TILE % tokens == 0


def test_defaults():
    """Few tokens of an expert: mma.sync and small tiles; many: wgmma and 256 rows."""
    for gemm, tokens in product(GEMMS[:5], TOKENS):
        plan, _ = next(points(gemm, tokens))
        each = sm90_tiles.expected_tokens(gemm, tokens)
        assert plan.unit == ("mma" if each <= 12 else "wgmma"), (gemm, tokens)
        assert plan.tokens <= max(8, 2 * each)
        if each <= 4:
            assert plan.tokens == 8
        if plan.unit == "wgmma":
            assert (plan.rows, plan.blocks_k) == (256, 2)


BYTES = replace(QWEN1, fmt="mxfp4", group=32, bytewise=True, operand="float8_e4m3fn")
"""GEMM 1 of Qwen3, whose 128 experts get 256 tokens each of 4096, in 8 bits."""
INT4 = replace(BYTES, fmt="int4", group=128)
DEEP = {"k": 4096}


@pytest.mark.parametrize(
    ("gemm", "tokens", "found"),
    [
        (BYTES, 2048, (128, 152)),  # 128 an expert: one tile
        (BYTES, 4096, (256, 104)),
        (replace(BYTES, **DEEP), 4096, (128, 144)),  # two tiles
        (replace(BYTES, **DEEP, fast=True), 4096, (256, 152)),
        (replace(BYTES, **DEEP), 8192, (256, 104)),
        (INT4, 2048, (128, 152)),
        (INT4, 4096, (256, 96)),
        (replace(INT4, **DEEP), 4096, (128, 144)),
        (INT4, 8192, (256, 104)),
        (INT4, 16384, (128, 152)),
    ],
)
def test_defaults_of_bytes(gemm, tokens, found):
    """Half the rows where an expert's tokens fill a tile, or of deep GEMMs two, so far as known."""
    first, *others = sm90_tiles.legal_tiles(gemm, tokens)
    assert (first.rows, first.tokens) == found
    assert first not in others


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


@cache
def example(point):
    """Return the trace, the tile and the depth of a point."""
    sch, plan = drawn(*point)
    return trace_json(sch.trace), plan


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_tensorize_is_needed(point):
    """A block that keeps its loops is an error that names it, or what needs it."""
    trace, _ = example(point)
    numbers = [i for i, step in enumerate(trace[0]) if step[0] == "Tensorize"]
    wgmma = "warp_wgmma" in repr(trace)
    assert len(numbers) == 5 + (not wgmma)
    messages = []
    for number in numbers:
        less = deepcopy(trace)
        del less[0][number]
        less[1] = [[i - (i > number), value] for i, value in less[1]]
        sch = replay(module(point[0], point[1]), less)
        with pytest.raises(LoweringError) as error:
            derive(sch.mod["main"])
        messages.append(str(error.value))
    assert "W" in messages[0]
    assert "S" in messages[1]
    assert all("is filled by" in message for message in messages[2:-1])
    assert "no block issues MMAs: block 'gemm" in messages[-1]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_decision_changes_the_kernel(point):
    """Another candidate changes the depth of the ring, and nothing else."""
    trace, (tile, _) = example(point)
    ((number, _),) = trace[1]
    candidates = trace[0][number][2][0]
    assert len(candidates) > 1
    for other, stages in enumerate(candidates):
        changed = [trace[0], [[number, other]]]
        assert read(replay(module(point[0], point[1]), changed).mod["main"]) == (tile, stages)


WRONG = [
    ("warp_decode_nvfp4_g16_bf16_positions", "warp_decode_mxfp4_g32_bf16_positions", None),
    ("warp_row64_bf16_of", "warp_row64_bf16", None),
    ("blockscale.stages", "blockscale.stagse", r"annotations \['blockscale.stagse'\] are not"),
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
        derive(sch.mod["main"])


def test_what_is_no_schedule_of_a_gemm():
    """Unscheduled, or of no known shapes."""
    func = module(QWEN1, None)["main"]
    with pytest.raises(LoweringError, match="no block issues MMAs: block 'gemm' is not tensorized"):
        derive(func)
    with pytest.raises(LoweringError, match="without the attribute 'blockscale\\.shapes'"):
        derive(func.without_attr("blockscale.shapes"))


def text_of(gemm=QWEN1, old="", new="", tile=None, change=None):
    """Return the kernel of a GEMM in whose TensorIR a text, or attribute, is replaced."""
    func = moe_tiles(gemm)
    if old:
        script = func.script()
        assert old in script, script
        func = tvm.script.from_source(script.replace(old, new))
    if change is not None:
        func = change(func)
    sch = new_schedule(tvm.IRModule({"main": func}))
    sm90.decided(sch, gemm, tile or MoeTile("mma", 64, 8, 2, 2), 3)
    return emit(derive(sch.mod["main"]), "moe")


EDITS = [
    (
        "order[vt, vi]) // T.int64(8)",
        "order[vt, vi]) // T.int64(4)",
        ("/ 4) * 256u", "slots[i] / 4"),
    ),
    ("T.float32(65536.0)", "T.float32(32768.0)", ("32768.0f",)),
    ("bias[expert_of_tile[vt], vq", "bias[expert_of_tile[vt], T.int64(16) + vq", ("+ 16)",)),
    ("factor[expert_of_tile[vt], 1]", "factor[expert_of_tile[vt], 0]", ()),
]


@pytest.mark.parametrize(("old", "new", "found"), EDITS, ids=lambda value: str(value)[:24])
def test_kernels_follow_the_tensorir(old, new, found):
    """What the function says of rows, factors and biases is what the kernel does."""
    plain, changed = text_of(), text_of(old=old, new=new)
    assert plain != changed
    for text in found:
        assert text in changed
        assert text not in plain


def test_kernels_follow_what_is_written_before():
    """Tables of the kernel before make all warps wait, its rows those that read them; or none."""

    def after(*names):
        return text_of(change=lambda func: func.with_attr("blockscale.after", list(names)))

    assert text_of() == after("x", "row_scale", "order", "expert_of_tile")
    head, _, tail = text_of().partition("const int tiles")
    assert "bs_grid_wait" in head
    assert "bs_grid_wait" not in tail
    head, _, tail = after("x").partition("const int tiles")
    assert "bs_grid_wait" not in head
    assert tail.count("bs_grid_wait();") == 2
    assert "bs_grid" not in text_of(change=lambda func: func.without_attr("blockscale.after"))


def test_kernels_follow_the_null_value():
    """What stands for a bias that is null."""
    other = {"bias": 0.25, "row_scale": 1.0}
    text = text_of(change=lambda func: func.with_attr("blockscale.optional", other))
    assert ": 0.25f)" in text
    assert ": 0.25f)" not in text_of()


SLOT, NEXT = "order[vt, vi])", "order[vt, vi + T.int64(1)])"
REFUSED = [
    ("expert_of_tile[vt], vr, vk, vb]", "expert_of_tile[0], vr, vk, vb]", "is not the expert of"),
    (f'x[T.Cast("int64", {SLOT}', f'x[T.Cast("int64", {NEXT}', "is not that of its place"),
    (f'row_scale[T.Cast("int64", {SLOT}', f'row_scale[T.Cast("int64", {NEXT}', "thread has"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED, ids=["expert", "row", "scale"])
def test_what_cannot_be_lowered_says_where(old, new, message):
    with pytest.raises(LoweringError, match=message):
        text_of(old=old, new=new)


NAME = "fused_moe_nvfp4_e128_k8_h2048_i768_swiglu_tiles64_bf16"


def test_buckets_end_an_eighth_beyond_what_they_are_tuned_at():
    rows = [bucket.rows for bucket in catalog_moe.MOE_BUCKETS]
    limits = [bucket.limit for bucket in catalog_moe.MOE_BUCKETS]
    assert limits == [2, 9, *(n * 9 // 8 for n in rows[2:-1]), None]


def test_buckets_of_a_layer():
    """Both GEMMs of each; the plans of neighbours are one bucket where they are equal."""
    spec = Spec.parse(NAME)
    found = catalog.workloads(spec, "sm_90a")
    assert [w.tag for w in found][:2] == [f"{NAME}_gemm1_m1", f"{NAME}_gemm2_m1"]
    rows = [w.rows for w in found][::2]
    assert rows == sorted(rows) == [w.rows for w in found][1::2]
    assert {*TOKENS} < {*rows}
    limits = [w.limit("sm_90a") for w in found][::2]
    assert limits == [2, 9, *(n * 9 // 8 for n in rows[2:-1]), None]
    bodies = catalog_moe.bodies(spec, "sm_90a", {})
    assert [pair.limit for pair in bodies] == limits
    pairs = [tuple(read(body) for body in pair[1:]) for pair in bodies]
    kept = [
        limit
        for limit, own, after in zip(limits, pairs, [*pairs[1:], ()], strict=True)
        if own != after
    ]
    host = cuda_source(spec, "sm_90a", {}).host_c
    listed = re.findall(r"\.limit = (\d+), \.gemm1", host)
    assert [int(n) or None for n in listed] == kept != limits


def test_tiles_hold_what_most_experts_get():
    """An expert whose tokens fill a second tile has its weights decoded twice."""
    deepseek_v2 = replace(QWEN1, experts=160, top_k=6)
    for gemm, bucket in product([*GEMMS, deepseek_v2], catalog_moe.MOE_BUCKETS):
        tile = sm90_tiles.legal_tiles(gemm, bucket.rows)[0]
        wanted = sm90_tiles.expected_tokens(gemm, bucket.rows)
        if tile.unit == "wgmma":
            assert min(wanted, 152) <= tile.tokens <= max(24, 1.3 * wanted)


def test_a_trace_wins_over_the_default():
    """The plans of a bucket are those of the logs."""
    spec = Spec.parse(NAME)
    work = next(w for w in catalog.workloads(spec, "sm_90a") if (w.rows, w.part) == (8, 1))
    *_, sketch = work.sketches("sm_90a")
    sch = new_schedule(work.mod("sm_90a"))
    sketch(sch, preferred)
    wanted = read(sch.mod["main"])
    found, plain = (catalog_moe.bodies(spec, "sm_90a", t) for t in ({work.tag: sch.trace}, {}))
    assert read(found[1].first) == wanted != read(plain[1].first)
    assert read(found[1].second) == read(plain[1].second)


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
    plain = replace(own.spec, act_fmt="fp8")
    coded = replace(own, spec=replace(plain, slots=True, coded=True))
    assert coded.kin("sm_90a")[0].spec == plain
    assert [w.spec.dtype for w in replace(other, part=2).kin("sm_90a")] == ["bfloat16"]
    *_, sketch = own.sketches("sm_90a")
    sch = new_schedule(own.mod("sm_90a"))
    sketch(sch, preferred)
    found = catalog_moe.bodies(other.spec, "sm_90a", {other.tag: sch.trace})[1].first
    assert read(found) == read(sch.mod["main"])
    assert derive(found).form.dtype == "float16"
    assert "0.044715" in emit(derive(found), "moe")
