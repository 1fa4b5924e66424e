"""The space of tcgen05 GEMMs: every point is legal, and is read back as it was drawn."""

import re
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest
import tvm

from blockscale.base.errors import LoweringError
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.facts import plan as read
from blockscale.lower.pipe.host import sources
from blockscale.schedules.gemm import tcgen05 as sm100
from blockscale.schedules.gemm import tcgen05_tiles as sm100_tiles
from blockscale.schedules.steps import preferred, sampled
from blockscale.specs.plans.gemm import RASTERS, SMEM_BYTES, GemmPlan
from blockscale.tir.gemm.tiles import PARAMS, gemm_tiles
from tests.kit import fresh
from tests.kit.pairwise import each, few

NVFP4 = ("nvfp4", "bfloat16", 4096, 7168, 0)
ROWS = (16, 64, 128, 256, 512, 2048, 8192)
GEMMS = [
    NVFP4,
    ("mxfp4", "float16", 384, 448, 0),
    ("mxfp8xmxfp4", "float32", 64, 512, 0),
    ("mxfp8", "bfloat16", 256, 128, 0),
    ("nvfp4", "bfloat16", 4096, 7168, 16),
    ("mxfp8xmxfp4", "bfloat16", 384, 448, 3),
]
DRAWS = [
    (gemm, rows, seed)
    for seed, (gemm, rows) in enumerate(
        [(NVFP4, rows) for rows in (*ROWS, *ROWS)]
        + [(gemm, rows) for gemm in GEMMS[1:] for rows in (16, 128, 2048)]
        + [(("nvfp4", "float32", 4096, 7168, 0), 4096)]
    )
]


@cache
def module(gemm, rows):
    """Return the unscheduled GEMM."""
    return tvm.IRModule({"main": gemm_tiles(*gemm, rows)})


def drawn(gemm, rows, seed):
    """Return a random point: its schedule, and the plan that its decisions make."""
    sketch = Random(seed).choice(sm100.gemm_sketches(*gemm, rows))
    tile, values = sketch.keywords["tile"], []

    def choose(sch, candidates, prefer):
        values.append(sampled(sch, candidates, prefer))
        return values[-1]

    sch = new_schedule(module(gemm, rows), seed=seed + 1)
    sketch(sch, choose)
    names = sm100_tiles.options(tile, rows).candidates
    decisions = {name: int(sch.get(v)) for name, v in zip(names, values, strict=True)}
    return sch, sm100_tiles.decided(tile, decisions)


def plans(gemm, rows):
    """Every point of the space, as a plan."""
    for tile in sm100_tiles.legal_tiles(*gemm, rows):
        candidates = sm100_tiles.options(tile, rows).candidates
        for values in product(*candidates.values()):
            yield sm100_tiles.decided(tile, dict(zip(candidates, values, strict=True)))


@each(rows=ROWS, gemm=GEMMS)
def test_every_point_is_legal(gemm, rows):
    """No combination of candidates breaks a limit, and no two are one kernel."""
    found = list(plans(gemm, rows))
    assert [plan.illegal() for plan in found if plan.illegal()] == []
    assert len(set(found)) == len(found) >= 60


@pytest.mark.parametrize("gemm", GEMMS)
def test_tensor_memory_is_never_waited_for(gemm):
    """An SM's shared memory (228 KiB, 1 KiB a CTA is the system's) holds no CTA too many."""
    for rows, stages, split in product((16, 128, 2048), (2, 3), (1, 2)):
        for tile in sm100_tiles.legal_tiles(*gemm, rows):
            plan = replace(tile, stages=stages)
            if plan.illegal() is None and plan.split_k >= split:
                resident = 228 * 1024 // (plan.smem_bytes + 1024)
                assert resident * plan.tmem_columns <= 512, plan


@pytest.mark.parametrize("rows", [128, 8192])
def test_tiles_of_32_rows_are_never_second(rows):
    """Their scales would start at an odd column of tensor memory."""
    for gemm in GEMMS:
        assert all(tile.mma_n > 32 for tile in sm100_tiles.legal_tiles(*gemm, rows))
    assert all(t.mma_n > 32 for t in sm100_tiles.legal_tiles("nvfp4", "bfloat16", 512, 512, 4, 8))


@pytest.mark.parametrize("rows", few(ROWS, every=3))
def test_there_are_many_points(rows):
    """Structurally different: two plans that differ in the order of tiles alone count once."""
    structures = {replace(plan, raster="x", group=1) for plan in plans(NVFP4, rows)}
    assert len(structures) >= 200


@pytest.mark.parametrize(("gemm", "rows", "seed"), few(DRAWS, every=3), ids=str)
def test_a_point_is_read_as_it_was_drawn(gemm, rows, seed):
    """From the static module and from the one for any number of rows, by its trace."""
    sch, plan = drawn(gemm, rows, seed)
    assert read(sch.mod["main"]) == plan
    replayed = replay(module(gemm, None), trace_json(sch.trace))
    assert read(replayed.mod["main"]) == plan


@pytest.mark.parametrize("rows", ROWS)
def test_the_default(rows):
    """Few rows are columns of the MMA and share K; many are tiles of pairs that overlap."""
    sch = new_schedule(module(NVFP4, None))
    sm100.gemm_sketches(*NVFP4, rows)[0](sch, preferred)
    plan = read(sch.mod["main"]).check()
    if rows <= 128:
        assert plan.swap
        assert plan.split_k == 4  # 32 tiles of 128 columns: 128 CTAs on 148 SMs
        assert plan.mma_n == max(32, rows)
    else:
        assert not plan.swap
        assert plan.cta_group == 2
    if rows >= 2048:
        assert (plan.mma_n, plan.acc_stages) == (256, 2)
    assert replace(plan, stages=plan.stages + 1).illegal() is not None


def test_a_fresh_process_registers_what_traces_name():
    """One that has scheduled nothing replays the traces of every format, store and read."""
    traces = []
    for gemm, rows in product(GEMMS, (16, 2048)):
        sketches = sm100.gemm_sketches(*gemm, rows)
        for sketch in sketches[:: max(1, len(sketches) // 2)]:
            sch = new_schedule(module(gemm, None))
            sketch(sch, preferred)
            traces.append(trace_json(sch.trace))
    steps = [step for trace in traces for step in trace[0] if step[0] == "Tensorize"]
    assert fresh.registers({step[2][0] for step in steps})


POINTS = [(NVFP4, 4096, 3), (NVFP4, 64, 1), (GEMMS[5], 2048, 2)]


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
    assert len(numbers) >= 8
    for number in numbers:
        less = deepcopy(trace)
        del less[0][number]
        less[1] = [[i - (i > number), value] for i, value in less[1]]
        sch = replay(module(point[0], point[1]), less)
        with pytest.raises(LoweringError) as error:
            emit(derive(sch.mod["main"]), "kernel")
        if "_mma_" in trace[0][number][2][0]:
            assert "block 'gemm_update' is not tensorized" in str(error.value)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_decision_changes_its_field(point):
    """Another candidate changes the field that it is named after, and no other."""
    trace, plan = example(point)
    changes = 0
    for at, (number, value) in enumerate(trace[1]):
        name = trace[0][number + 1][2][0].removeprefix("blockscale.")
        for other, candidate in enumerate(trace[0][number][2][0]):
            changed = deepcopy(trace)
            changed[1][at][1] = other
            found = read(replay(module(point[0], point[1]), changed).mod["main"])
            wanted = RASTERS[candidate] if name == "raster" else candidate
            assert found == replace(plan, **{name: wanted})
            changes += other != value
    assert changes >= 3


WRONG = [
    ("tcgen05_mma_mxf4nvf4_(.*)_sw128", r"tcgen05_mma_mxf4nvf4_\1_sw64", "matrix of a"),
    ("tcgen05_cp_32x128b_warpx4_cg2", "tcgen05_cp_32x128b_warpx4_cg1", "CTA group is 1"),
    ("tma_load_scales_cg2", "tma_load_scales_cg1", "CTA group is 1"),
    ("(tma_load_.*)_cg2", r"\1_cg1", "CTA group is 1"),
    ("blockscale.stages", "blockscale.stagse", "annotation 'blockscale.stagse' is none of"),
    ("blockscale.group", "ours.group", "annotation 'ours.group' is none of"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_schedule_must_agree_with_itself(old, new, message):
    """An intrinsic of another kind, or an annotation that nothing reads, is an error."""
    sketch = sm100.gemm_sketches(*NVFP4, 4096)[0]
    sch = new_schedule(module(NVFP4, 4096))
    sketch(sch, preferred)
    trace = trace_json(sch.trace)
    changed = [
        [
            step[0],
            step[1],
            [re.sub(f"^{old}$", new, a) if isinstance(a, str) else a for a in step[2]],
        ]
        + step[3:]
        for step in trace[0]
    ]
    assert changed != trace[0]
    sch = replay(module(NVFP4, 4096), [changed, trace[1]])
    with pytest.raises(LoweringError, match=message):
        read(sch.mod["main"])


def test_what_is_no_schedule_of_a_gemm():
    """Unscheduled, without stages, or another function."""
    func = module(NVFP4, None)["main"]
    with pytest.raises(LoweringError, match="block 'gemm' is not tensorized"):
        read(func)
    with pytest.raises(LoweringError, match="without the attribute 'blockscale\\.shapes'"):
        read(func.without_attr(PARAMS))
    trace, _ = example(POINTS[0])
    less = [step for step in trace[0] if step[2] != ["blockscale.stages"]]
    gone = next(i for i, step in enumerate(trace[0]) if step[2] == ["blockscale.stages"])
    decisions = [[i - (i > gone), value] for i, value in trace[1]]
    sch = replay(module(NVFP4, 4096), [less, decisions])
    with pytest.raises(LoweringError, match="'blockscale\\.stages' is missing"):
        read(sch.mod["main"])


def test_the_reasons_of_what_is_refused():
    """Each names the number that forbids it."""
    tile = next(t for t in sm100_tiles.legal_tiles(*NVFP4, 4096) if t.mma_n == 256)
    refused = sm100_tiles.options(tile, 4096).refused
    assert f"{SMEM_BYTES} are the limit" in refused["stages=8"]
    found = sm100_tiles.tiles("nvfp4", "float32", 4096, 7168, 0, 4096)
    reasons = {
        reason for tile, reason in found.items() if tile.store == "tma" and tile.epi_cols == 64
    }
    assert reasons == {"a TMA store of rows of 256 bytes has no swizzle; it has for 32, 64 and 128"}
    assert all(isinstance(tile, GemmPlan) for tile in found)


@pytest.mark.parametrize(("name", "times"), [("a", 2), ("b", 2), ("b_scale", 0.5)])
def test_what_disagrees_with_the_sizes(name, times):
    """The attribute of true shapes is of another GEMM than the loops, or disagrees with itself."""
    sch = new_schedule(module(NVFP4, 4096))
    sm100.gemm_sketches(*NVFP4, 4096)[0](sch, preferred)
    func = sch.mod["main"]
    shapes = {key: list(map(list, dims)) for key, dims in func.attrs[PARAMS].items()}
    shapes[name][-1][2] = int(shapes[name][-1][2] * times)
    with pytest.raises(LoweringError, match="loop over K: 28 stages, and the parameters have"):
        read(func.with_attr(PARAMS, shapes))


def test_what_disagrees_in_a_load(monkeypatch):
    """A load of half of the rows that the MMA reads, twice as often."""
    load = sm100.load_operand

    def halves(sch, copy, stages, tile, side):
        load(sch, copy, stages, replace(tile, mma_n=128) if side == "b" else tile, side)

    monkeypatch.setattr(sm100, "load_operand", halves)
    sch = new_schedule(module(NVFP4, 4096))
    sm100.gemm_sketches(*NVFP4, 4096)[0](sch, preferred)
    with pytest.raises(LoweringError, match=r"tile of b_shared\.dyn is 64, .* implies 128"):
        read(sch.mod["main"])


def test_a_raster_that_there_is_not():
    """Its number is 0 or 1."""

    def choose(sch, candidates, prefer):
        return 2 if candidates == [0, 1] else prefer

    sch = new_schedule(module(NVFP4, 4096))
    sm100.gemm_sketches(*NVFP4, 4096)[0](sch, choose)
    with pytest.raises(LoweringError, match="raster=2 is neither 0 nor 1"):
        read(sch.mod["main"])


@pytest.mark.parametrize("rows", few(ROWS))
def test_clusters_have_tiles(rows):
    """No cluster is longer than there are tiles: its other CTAs would have nothing to do."""
    narrow = ("nvfp4", "bfloat16", 256, 512, 0)
    for gemm in (NVFP4, narrow):
        for plan in plans(gemm, rows):
            tokens, cols = -(-rows // plan.tile_rows), -(-plan.n // plan.tile_cols)
            x_tiles, y_tiles = (cols, tokens) if plan.swap else (tokens, cols)
            assert plan.cluster_x <= max(1, x_tiles) * plan.cta_group
            assert plan.cluster_y <= max(1, y_tiles)
            if min(x_tiles, y_tiles) == 1:  # there is one order
                assert (plan.raster, plan.group) == ("x", 1)
            if plan.split_k > 1:
                assert plan.k >= 4 * plan.block_k
                assert plan.cta_group == 1


def test_buckets_of_one_kernel_are_one():
    """Neighbouring buckets whose plans agree share a kernel, up to the larger limit."""
    few, many = (new_schedule(module(NVFP4, None)) for _ in range(2))
    for sch, rows in ((few, 16), (many, 8192)):
        sm100.gemm_sketches(*NVFP4, rows)[0](sch, preferred)
    first, last = few.mod["main"], many.mod["main"]
    params = ("a", "b", "a_scale", "b_scale", "alpha", "bias", "d")
    made = sources([(32, first), (64, first), (None, last)], "mm", "sm_100a", params)
    assert made.device.count("__global__") == len(made.kernels) == 2
    assert re.findall(r"\.limit = (\d+)", made.host_c) == ["64", "0"]


@pytest.mark.parametrize("rows", few(ROWS, every=3))
def test_the_deepest_ring_is_offered(rows):
    """As many stages as shared memory holds, whether or not that is one of the usual numbers."""
    depths = set()
    for gemm in GEMMS:
        for tile in sm100_tiles.legal_tiles(*gemm, rows):
            deepest = sm100_tiles.options(tile, rows).candidates["stages"][-1]
            depths.add(deepest)
            assert replace(tile, stages=deepest).illegal() is None
            most = sm100_tiles.STAGES[-1]
            assert deepest == most or replace(tile, stages=deepest + 1).illegal() is not None
    assert depths


def test_experts_without_rows_are_no_work():
    """8 rows are of 8 experts at most: 64 tiles, so that K is split; 64 rows fill the SMs."""
    for rows, split in ((8, True), (64, False)):
        tiles = sm100_tiles.legal_tiles("nvfp4", "bfloat16", 1024, 4096, 256, rows)
        assert any(tile.split_k > 1 for tile in tiles) == split
