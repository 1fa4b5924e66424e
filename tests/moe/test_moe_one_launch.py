"""Both GEMMs of an MoE layer in one launch: rows are waited for across CTAs, all of it emulated."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import tvm
from tvm.s_tir import Schedule

from blockscale.base.errors import LoweringError
from blockscale.base.targets import CTA_RESERVED
from blockscale.catalog import moe as catalog_moe
from blockscale.catalog import workloads
from blockscale.catalog.moe import PARTS
from blockscale.lower import nvcc
from blockscale.lower.moe.codes import sources
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.kernel import SM100, Kernel
from blockscale.lower.pipe.phases import apart, emit_phases, joined
from blockscale.schedules.steps import Choose, preferred, sampled
from blockscale.specs import FusedMoe
from blockscale.specs.plans.b200 import B200
from blockscale.tuning import modelled
from tests.kit.gpu_library import library
from tests.kit.pairwise import exhaustive
from tests.moe.test_moe_codes import (
    ARCH,
    MXFP8,
    PLAIN,
    Stages,
    drawn,
    layer_drawn,
    run_drawn,
    run_points,
    spec_of,
)
from tests.moe.test_moe_library import Call

Bodies = list[tuple[int | None, Any]]


def choosing(one_launch: int) -> Choose:
    """Preferred decisions, and where GEMM 2 begins."""

    def choose(sch: Schedule, candidates: list[int], prefer: int) -> Any:
        return preferred(sch, candidates, one_launch if list(candidates) == [0, 1] else prefer)

    return choose


def scheduled(spec: FusedMoe, part: int, bucket: int, sketch: int, one_launch: int = 1) -> Any:
    """GEMM ``part`` as a sketch of a bucket schedules it."""
    workload = [w for w in workloads(spec, ARCH) if w.part == part][bucket]
    sch = Schedule(workload.symbolic(ARCH))
    workload.sketches(ARCH)[sketch](sch, choosing(one_launch))
    return sch.mod["main"]


def second_for(spec: FusedMoe, first: Any, bucket: int, one_launch: int = 1) -> Any:
    """The first schedule of GEMM 2 that goes with one of GEMM 1."""
    count = len([w for w in workloads(spec, ARCH) if w.part == 2][bucket].sketches(ARCH))
    for sketch in range(count):
        made = scheduled(spec, 2, bucket, sketch, one_launch)
        if apart(derive(first), derive(made)) is None:
            return made
    raise AssertionError("no schedule goes with it")


def built(spec: FusedMoe, first: Bodies, second: Bodies) -> Path:
    """A library of these GEMMs."""
    made = sources(first, second, spec, ARCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog_moe, "CODES", replace(catalog_moe.CODES, lower=lambda *_: made))
        text = made.device + made.host_c
        return library([spec], ARCH, hashlib.sha256(text.encode()).hexdigest())


def judged(spec: FusedMoe, path: Path, tokens: int, routing: str, sms: int) -> list[str]:
    """Judge a call; return its kernels."""
    call = Call(spec, tokens, routing)(path, ARCH, sms)
    assert not [h for report in call.run.reports for h in report.hazards]
    Stages(call).judge()
    together = [launch.cooperative for launch in call.run.launches]
    assert together == ["gemms_kernel" in launch.kernel for launch in call.run.launches]
    return [launch.kernel.removeprefix(f"{spec.name}_") for launch in call.run.launches]


QWEN = spec_of(128, 2048, 768, 8)
"""Two tables of 128 experts are 4 KiB."""

REAL = [
    pytest.param(QWEN, 4, id="Qwen3-30B-A3B"),
    pytest.param(spec_of(8, 7168, 2048, 3), 1, id="DeepSeek-V3, 3 of 8 experts"),
    pytest.param(
        spec_of(32, 2880, 2880, 4, activation="swiglu_oai", bias=True, **MXFP8), 1, id="gpt-oss-20b"
    ),
]


@exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("spec", "tokens"), REAL)
def test_real_layers(spec: FusedMoe, tokens: int) -> None:
    """Layers that people have; a minute or two each, for they are 10,000 MMAs."""
    first = scheduled(spec, 1, 0, 0)
    path = built(spec, [(None, first)], [(None, second_for(spec, first, 0))])
    names = judged(spec, path, tokens, "random", 8)
    assert names == ["prepare", "gather", "gemms_kernel0", "combine"]


CASES = [
    # a pair; few rows, which are columns of GEMM 2's MMA: as where accumulators overlap
    pytest.param(PLAIN, 0, 0, marks=exhaustive),
    (PLAIN, 0, -1),  # one CTA
    (spec_of(3, 160, 96, 2, activation="swiglu_oai", bias=True, **MXFP8), 0, 0),  # spreads codes
    (PLAIN, 2, 0),  # a pair; rows are rows of both
]


@pytest.mark.parametrize(("spec", "bucket", "sketch"), CASES)
def test_rows_are_waited_for(spec: FusedMoe, bucket: int, sketch: int) -> None:
    """With one cluster, and with as many as there are tiles, whose work overlaps."""
    first = scheduled(spec, 1, bucket, sketch)
    second = second_for(spec, first, bucket)
    path = built(spec, [(None, first)], [(None, second)])
    many = 300 if bucket else 100
    for tokens, routing, sms in ((7, "half_dropped", 2), (many, "one_expert", 16)):
        names = judged(spec, path, tokens, routing, sms)
        assert names == ["prepare", "gather", "gemms_kernel0", "combine"]


def test_the_same_bits() -> None:
    """As the same GEMMs in two launches."""
    outs = []
    for one_launch in (0, 1):
        first = scheduled(PLAIN, 1, 0, 0)
        second = second_for(PLAIN, first, 0, one_launch)
        call = Call(PLAIN, 33)(built(PLAIN, [(None, first)], [(None, second)]), ARCH, 3)
        assert len(call.run.launches) == 5 - one_launch
        outs.append(call.out)
    assert torch.equal(*outs)


def test_accumulators_that_overlap() -> None:
    """They are given back before they have been read: GEMM 2 waits longer."""
    seed = 51
    _, (first, second) = drawn(seed)
    kernels = derive(first.mod["main"]), derive(second.mod["main"])
    assert kernels[0].overlap
    assert kernels[1].one_launch
    assert apart(*kernels) is None
    run_drawn(seed)


def drawn_together(seed: int) -> tuple[FusedMoe, list[Schedule]]:
    """A random layer, and random points of its GEMMs that go into one launch."""
    rng = Random(seed)
    spec = layer_drawn(rng, seed)
    while True:
        found: list[Schedule] = []
        for part in PARTS:
            workload = rng.choice([w for w in workloads(spec, ARCH) if w.part == part])
            sch = Schedule(workload.symbolic(ARCH), seed=rng.randint(1, 10**6))
            rng.choice(workload.sketches(ARCH))(sch, sampled)
            found.append(sch)
        first, second = (derive(sch.mod["main"]) for sch in found)
        if second.one_launch and apart(first, second) is None:
            return spec, found


@exhaustive
@pytest.mark.parametrize("seed", range(8))
def test_points_of_the_space(seed: int) -> None:
    """Both plans at random, in one launch."""
    call = run_points(*drawn_together(seed), seed)
    names = [launch.kernel.removeprefix(f"{call.spec.name}_") for launch in call.run.launches]
    assert names == ["prepare", "gather", "gemms_kernel0", "combine"]


@exhaustive
@pytest.mark.parametrize("sms", [1, 3, 5, 8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_any_number_of_ctas(sms: int, tokens: int) -> None:
    spec = spec_of(8, 256, 256, 2)
    first = scheduled(spec, 1, 0, 0)
    path = built(spec, [(None, first)], [(None, second_for(spec, first, 0))])
    judged(spec, path, tokens, "random", max(sms, derive(first).group))


def test_a_launch_for_some_sizes() -> None:
    """Each bucket is one launch, or two."""
    first = scheduled(PLAIN, 1, 0, -1)
    later = scheduled(PLAIN, 1, 1, -1)
    second, apart_ = second_for(PLAIN, first, 0), second_for(PLAIN, later, 1, one_launch=0)
    path = built(PLAIN, [(16, first), (None, later)], [(16, second), (None, apart_)])
    assert judged(PLAIN, path, 8, "random", 3)[2] == "gemms_kernel0"
    kinds = [name.partition("_kernel")[0] for name in judged(PLAIN, path, 9, "random", 3)]
    assert kinds == ["prepare", "gather", "gemm1", "gemm2", "combine"]


def pair() -> tuple[Kernel, Kernel]:
    first = scheduled(PLAIN, 1, 0, 0)
    return checked(derive(first)), checked(derive(second_for(PLAIN, first, 0)))


def test_what_does_not_go_together() -> None:
    """Why, in words; and schedules that ask for it make two launches."""
    first, second = pair()
    assert apart(first, second) is None
    for one, other, message in (
        (first, replace(second, group=1, cluster_x=1), "2 and 1 CTAs multiply together"),
        (first, replace(second, cluster_y=2), "the second one divides K or tiles"),
        (second, second, "the first one does not store its rows directly"),
    ):
        with pytest.raises(LoweringError, match=message):
            joined(one, other)
    single = scheduled(PLAIN, 1, 0, -1)  # and a pair
    path = built(PLAIN, [(None, single)], [(None, second_for(PLAIN, scheduled(PLAIN, 1, 0, 0), 0))])
    assert len(judged(PLAIN, path, 3, "random", 2)) == 5


def test_tables_of_many_experts() -> None:
    """Rings that leave no room for both: two launches, and why; the largest tiles still fit."""
    first, second = scheduled(QWEN, 1, 0, 0), scheduled(QWEN, 2, 0, 0)
    message = "a table of 128 experts and barriers .* they take 2[0-9]{5} bytes .* fewer stages"
    with pytest.raises(LoweringError, match=message):
        joined(derive(first), derive(second))
    made = sources([(None, first)], [(None, second)], QWEN, ARCH)
    assert not [code.name for code in made.kernels if "_gemms" in code.name]
    large = joined(derive(scheduled(QWEN, 1, -1, 0)), derive(scheduled(QWEN, 2, -1, 0)))
    assert large.second.places["end"] <= large.launch_bytes <= 232448


def test_shared_memory_is_shared() -> None:
    """The rings lie on each other, tables and barriers behind both, each for itself."""
    first, second = pair()
    both = joined(first, second)
    one, other = both.first.places, both.second.places
    assert one["x"] == other["x"] == 0
    assert one["table"] >= max(first.places["table"], second.places["table"])
    assert one["end"] <= other["table"]
    assert both.launch_bytes >= other["end"]
    assert both.tmem_columns == max(first.tmem_columns, second.tmem_columns)


@pytest.mark.parametrize("seed", range(2))
def test_shares_of_tensor_memory(seed: int) -> None:
    """CTAs of any kernels that fit into an SM's shared memory fit into its tensor memory.

    Those of a launch wait for each other, so a single one that waits for columns stops all.
    """
    single = scheduled(PLAIN, 1, 0, -1)
    kernels = [derive(single), derive(second_for(PLAIN, single, 0))]
    drawn_ones = [derive(sch.mod["main"]) for sch in drawn_together(seed)[1]]
    shallow = [replace(kernel, stages=2) for kernel in kernels]
    for both in (joined(*kernels), joined(*shallow), joined(*drawn_ones)):
        share = (both.launch_bytes + CTA_RESERVED) / SM100.sm_shared
        assert share >= both.tmem_columns / SM100.tensor_columns
        assert both.launch_bytes <= SM100.cta_shared


def test_what_is_printed() -> None:
    """Roles empty what they share before the second GEMM; counts are those of all stores."""
    text = emit_phases(joined(*pair()), "gemms")
    load = text[text.rindex("if (warp == 4) {") : text.rindex("else if (warp == 5) {")]
    assert load.index("MMAs still report") < load.index("bs_await_rows(ready + first_atom + i, ")
    assert text.count("bs_signal_rows(") == text.count("bs_await_rows(") == 1
    assert text.count("bs_grid_launch();") == 1
    assert f"first_atom + i, {4 * pair()[0].col_tiles})" in text


def test_fences_between_ctas() -> None:
    """The emulator does not judge the order of global memory: the PTX has what the manual asks for.

    A release after a barrier of the warp, for stores of all its lanes; an acquire, then a fence
    between it and TMA, which is another proxy (PTX ISA 8.6, 9.7.13.4).
    """
    text = emit_phases(joined(*pair()), "gemms")
    ptx = nvcc.compile_cuda_source(text, ARCH, ptx=True).image.decode()
    orders = re.findall(
        r"(bar\.warp\.sync|red\.\w+\.gpu\.global\.add\.u32|ld\.\w+\.gpu\.global\.u32|"
        r"fence\.proxy\.async\.global)",
        ptx,
    )
    gives = [i for i, name in enumerate(orders) if name.startswith("red")]
    takes = [i for i, name in enumerate(orders) if name.startswith("ld")]
    assert {orders[i] for i in gives} == {"red.release.gpu.global.add.u32"}
    assert {orders[i] for i in takes} == {"ld.acquire.gpu.global.u32"}
    assert all(orders[i - 1] == "bar.warp.sync" for i in gives)
    assert all(orders[i + 1] == "fence.proxy.async.global" for i in takes)
    assert len(gives) == len(takes) == 1


def test_the_model_knows_of_it(tmp_path: Path) -> None:
    """A GEMM in another one's launch has none of its own."""
    times = []
    for one_launch in (0, 1):
        module = tvm.IRModule({"main": scheduled(PLAIN, 2, 0, 0, one_launch)})
        modelled.export(module, json.dumps({"kind": "cuda", "arch": ARCH}), tmp_path / "plan")
        (seconds,) = modelled.measure(str(tmp_path / "plan"), 64).run_secs
        times.append(seconds * 1e6)
    assert times[0] - times[1] == pytest.approx(B200.launch_us, rel=1e-3)


def test_every_part_has_the_choice() -> None:
    """GEMM 2's space holds it, GEMM 1's does not; by default there are two."""
    for part in PARTS:
        text = scheduled(PLAIN, part, 0, 0).script()
        assert ("blockscale.one_launch" in text) == (part == 2)
    workload = next(w for w in workloads(PLAIN, ARCH) if w.part == 2)
    sch = Schedule(workload.symbolic(ARCH))
    workload.sketches(ARCH)[0](sch, preferred)
    assert "blockscale.one_launch" in sch.mod["main"].script()
    assert not derive(sch.mod["main"]).one_launch
