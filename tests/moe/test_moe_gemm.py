"""The GEMMs of MoE layers that decode weights in the emulator, and what ptxas makes of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from bench.tcgen05 import sass
from blockscale import catalog
from blockscale.base.formats import MOE
from blockscale.catalog import moe as catalog_moe
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import LOADER_REGISTERS, emit
from blockscale.specs import FusedMoe
from blockscale.specs.plans.moe import MoeGemm
from tests.kit import moe_harness
from tests.kit.moe_harness import Of, plan
from tests.kit.pairwise import each, few, seeds, those
from tests.reference import moe as moe

LIMIT = {"bfloat16": 4e-3, "float16": 6e-4}
"""Relative error of a row: the output's rounding, and for GEMM 1 that of nothing else."""

INT4_LIMIT = {"bfloat16": 6e-3, "float16": 8e-4}
"""Weights are rounded to the activations' dtype, too."""

UNITS: dict[str, dict[str, Any]] = {
    "mma": {"unit": "mma", "rows": 64, "tokens": 16, "slices": 2, "blocks_k": 2},
    "wgmma": {"unit": "wgmma", "rows": 128, "tokens": 16, "slices": 1, "blocks_k": 2},
    "tcgen05": {"unit": "tcgen05", "rows": 128, "tokens": 32, "slices": 2, "blocks_k": 2},
}
KINDS = [(fmt, group, False) for fmt in MOE for group in MOE[fmt].blocks] + [
    ("int4", group, True) for group in MOE["int4"].blocks
]


def ids_of(tokens: int, top_k: int = 2, experts: int = 3, seed: int = 0) -> np.ndarray:
    """Return random choices, some of which are dropped."""
    ids, _ = moe.random_routing(tokens, experts, top_k, "random", seed)
    ids[np.random.default_rng(seed).random(ids.shape) < 0.1] = -1
    return ids


def right(of: Of, ids: np.ndarray, **options: Any) -> None:
    """Fail unless the kernel's rows are right."""
    limit = (INT4_LIMIT if of.fmt == "int4" else LIMIT)[of.dtype]
    moe_harness.run(of, ids, **options).judge(limit)


@each(kind=KINDS, unit=UNITS, dtype=["bfloat16", "float16"], activation=["swiglu", "none"])
def test_formats(kind: tuple[str, int, bool], unit: str, dtype: str, activation: str) -> None:
    fmt, group, zeros = kind
    of = plan(fmt=fmt, group=group, zeros=zeros, dtype=dtype, activation=activation, **UNITS[unit])
    right(of, ids_of(21), hidden=256, intermediate=128, scaled=True, bias=True)


@each(activation=["swiglu", "swiglu_oai", "gelu_tanh", "relu2"], unit=UNITS)
def test_activations(unit: str, activation: str) -> None:
    right(plan(activation=activation, **UNITS[unit]), ids_of(9), bias=True)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_limits(activation: str) -> None:
    """Gates are clamped from above only, ups on both sides."""
    right(plan(activation=activation), ids_of(9), bias=True, limits=(1.25, 0.5))


@each(
    unit=UNITS,
    sizes=[(192, 96), (48, 32), (320, 208), (64, 64)],
    activation=["swiglu", "relu2", "none"],
)
def test_ragged_sizes(unit: str, sizes: tuple[int, int], activation: str) -> None:
    """Rows that end within a tile, K within a stage, outputs within 8 columns."""
    hidden, intermediate = sizes
    right(plan(activation=activation, **UNITS[unit]), ids_of(11), hidden=hidden,
          intermediate=intermediate, bias=True)  # fmt: skip


@each(activation=["swiglu", "none"], unit=["mma", "wgmma"])
def test_ragged_sizes_of_neighbouring_tiles(unit: str, activation: str) -> None:
    """A thread that stores 16 bytes of two tiles at once stores none beyond a row's end."""
    of = plan(**UNITS[unit] | {"rows": 256, "tokens": 8, "slices": 1}, activation=activation)
    assert of.tile.tiles_m == 2
    right(of, ids_of(11), hidden=48, intermediate=48, bias=True)


MMA = [
    (16, 8, 4, 4), (16, 8, 8, 8), (32, 8, 4, 4), (32, 24, 2, 4), (64, 32, 1, 1), (128, 8, 2, 4),
    (128, 48, 1, 2), (256, 8, 1, 1), (256, 64, 1, 2),
]  # fmt: skip
WGMMA = [
    (64, 16, 2),
    (64, 64, 2),
    (128, 40, 2),
    (128, 256, 2),
    (256, 8, 1),
    (256, 24, 2),
    (256, 152, 1),
]


@those(
    lambda tile, activation: tile in MMA[activation == "none" :: 3],
    tile=MMA,
    activation=["swiglu", "none"],
)
def test_mma_tiles(tile: tuple[int, ...], activation: str) -> None:
    rows, tokens, slices, blocks_k = tile
    of = plan(activation=activation, rows=rows, tokens=tokens, slices=slices, blocks_k=blocks_k)
    m = 3 * rows  # of the outputs: a few tiles are as good as many
    hidden, intermediate = (320, min(m, 192)) if of.gather else (min(m, 320), 192)
    right(of, ids_of(40, seed=1), hidden=hidden, intermediate=intermediate, ctas=3)


@each(
    tile=[(32, 1, 1), (64, 1, 2), (96, 2, 2), (128, 2, 4), (256, 2, 2)],
    activation=["swiglu", "none"],
)
def test_tcgen05_tiles(tile: tuple[int, int, int], activation: str) -> None:
    tokens, slices, blocks_k = tile
    of = plan(
        unit="tcgen05",
        activation=activation,
        rows=128,
        tokens=tokens,
        slices=slices,
        blocks_k=blocks_k,
        stages=2,
    )
    ids = ids_of(2 * tokens, seed=1)
    right(of, ids, hidden=320, intermediate=192, ctas=3, scaled=True, bias=True)


@those(
    lambda tile, activation: tile in WGMMA[activation == "none" :: 3],
    tile=WGMMA,
    activation=["swiglu", "none"],
)
def test_wgmma_tiles(tile: tuple[int, ...], activation: str) -> None:
    rows, tokens, blocks_k = tile
    of = plan(
        unit="wgmma", activation=activation, rows=rows, tokens=tokens, slices=1, blocks_k=blocks_k
    )
    tall = tokens > 32  # experts have more rows than a warp has lanes
    right(of, ids_of(160 if tall else 40, seed=1), hidden=320, intermediate=192, ctas=3)


@each(unit=UNITS, ctas=[1, 7, 64])
def test_any_number_of_ctas(unit: str, ctas: int) -> None:
    right(plan(**UNITS[unit]), ids_of(60), ctas=ctas, experts=5)


@each(unit=UNITS, stages=[2, 5])
@seeds(3)
def test_rings(unit: str, stages: int, seed: int) -> None:
    """Few and many stages, on other interleavings of the emulator."""
    right(plan(stages=stages, **UNITS[unit]), ids_of(33, seed=seed), hidden=448, seed=seed)


@each(unit=UNITS, kind=["one_expert", "each_its_own", "half_dropped", "dropped"])
def test_routings(unit: str, kind: str) -> None:
    ids, _ = moe.random_routing(37, 6, 2, kind)
    outcome = moe_harness.run(plan(**UNITS[unit]), ids, experts=6)
    if kind == "dropped":
        assert not len(outcome.got)
        assert (outcome.behind == moe_harness.UNWRITTEN).all()
    else:
        outcome.judge(LIMIT["bfloat16"])


def test_what_cp_async_wrote_is_fenced_before_wgmma_reads_it() -> None:
    """By its text: cp.async is of the generic proxy, wgmma of the asynchronous one.

    What bulk copies wrote is given back by those that read it for mma.sync, behind a fence.
    """
    for unit, before in (("wgmma", "cp.async.wait"), ("mma", "mma.sync")):
        of = plan(**UNITS[unit])
        _, code = moe_harness.kernel(of, of.gemm(3, 256, 128, 2))
        found = re.findall(r"cp\.async\.wait|mma\.sync|fence\.proxy\.async", code)
        fences = [i for i, each in enumerate(found) if each == "fence.proxy.async"]
        assert fences
        assert all(found[i - 1].startswith(before) for i in fences), found


def test_mma_is_right_on_blackwell() -> None:
    right(plan(), ids_of(9), arch="sm_100a")


SPECS = [
    FusedMoe(128, 2048, 768, 8, fmt="nvfp4", layout="tiles64"),
    FusedMoe(8, 4096, 14336, 2, fmt="int4", group=128, layout="tiles64"),
    FusedMoe(32, 2880, 2880, 4, fmt="mxfp4", activation="swiglu_oai", layout="tiles64"),
]


def test_ptxas_keeps_wgmma_asynchronous_and_spills_nothing_where_it_runs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of default plans: serialised, wgmma waits after each; only loading warps may spill."""
    every, buckets = request.config.getoption("--exhaustive"), catalog_moe.MOE_BUCKETS
    if not every:
        monkeypatch.setattr(catalog_moe, "MOE_BUCKETS", (buckets[0], buckets[-1]))
    kernels = [
        derive(body)
        for spec in SPECS
        for _, *pair in catalog_moe.bodies(spec, "sm_90a", {})
        for body in pair
    ]
    if not every:  # seconds each: one of a format and unit
        kernels = [*{(one.form.fmt, one.unit): one for one in kernels}.values()]
    of = plan(unit="wgmma", rows=256, tokens=160, slices=1, blocks_k=2)
    widest, _ = moe_harness.kernel(of, of.gemm(8, 1536, 2048, 2))
    assert any(one.unit == "wgmma" for one in kernels)
    for text in dict.fromkeys(emit(one, "moe") for one in [*kernels, widest]):
        made = compile_cuda_source(text, "sm_90a")
        assert not made.losses, f"{text[-300:]}: {made.losses}"
        if "wgmma" not in text:
            assert made.resources[0]["spills"] == 0, made.resources
            continue
        stems = [
            instruction.stem for instruction in sass.disassemble(made.image, "moe").instructions
        ]
        first, last = (f(i for i, stem in enumerate(stems) if stem == "HGMMA") for f in (min, max))
        assert not {"STL", "LDL"} & set(stems[first : last + 1]), made.resources


def test_registers_of_a_cta_stay_what_they_were() -> None:
    """More than at the start would wait for ever."""
    for rows, tokens in ((128, 64), (256, 8), (256, 160)):
        of = plan(unit="wgmma", rows=rows, tokens=tokens, slices=1, blocks_k=2)
        made, code = moe_harness.kernel(of, of.gemm(3, 256, 128, 2))
        (more,) = (int(n) for n in re.findall(r"setmaxnreg.inc\S* (\d+)", code))
        start = 65536 // made.threads // 8 * 8 * made.threads
        assert more * 32 * made.consumers + LOADER_REGISTERS * 32 * made.loaders <= start
        assert more % 8 == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": "fma"}, "neither"),
        ({"tokens": 12}, "12 tokens"),
        ({"rows": 48}, "48 rows"),
        ({"slices": 3}, "3 slices"),
        ({"slices": 4, "blocks_k": 2}, "do not make 4 slices"),
        ({"rows": 256, "tokens": 64, "slices": 8, "blocks_k": 8}, "registers"),
        ({"rows": 256, "tokens": 16, "slices": 8, "blocks_k": 8}, "shared memory"),
        ({"unit": "wgmma", "slices": 1, "rows": 128, "blocks_k": 1}, "even number"),
        ({"unit": "wgmma", "slices": 2, "rows": 128}, "one slice"),
    ],
)
def test_illegal_tiles(changes: dict[str, Any], said: str) -> None:
    of = plan(**changes)
    reason = of.tile.illegal(of.gemm(3, 256, 128, 2))
    assert reason is not None
    assert said in reason


def test_groups_of_128_are_whole_in_a_stage() -> None:
    gemm = MoeGemm("int4", 128, False, "bfloat16", "swiglu", 3, 256, 256, 2)
    assert "groups of 128" in str(plan(slices=1, blocks_k=1).tile.illegal(gemm))


@pytest.mark.parametrize(
    ("level", "number"),
    few([("sm_90a", 0), ("sm_90a", 1), ("sm_90a", 2), ("sm_120a", 2), ("sm_100a", 0)], every=3),
)
def test_every_bucket_has_a_plan_at_every_level(level: str, number: int) -> None:
    found = catalog_moe.bodies(SPECS[number], level, {})
    assert found[-1][0] is None
    assert len(found) == len(catalog_moe.MOE_BUCKETS)
    assert len(catalog.workloads(SPECS[number], level)) == 2 * len(found)
