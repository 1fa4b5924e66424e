"""Linear layers on GPUs without bulk copies and clusters: sm_80, sm_86, sm_89."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import tvm
from tvm.s_tir import Schedule

from blockscale import emulator
from blockscale.base import host
from blockscale.base.errors import LoweringError
from blockscale.base.targets import GPU_TARGETS, Gpu
from blockscale.catalog import registry
from blockscale.catalog.gemm import LINEAR, LINEAR_GPU_BUCKETS
from blockscale.lower import nvcc
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.schedules.gemm import linear as schedules
from blockscale.schedules.gemm.linear_gpu_tiles import depths, legal_tiles
from blockscale.specs import Linear
from blockscale.specs.plans.linear import LinearTile
from blockscale.tir.gemm.linear_tiles import linear_tiles
from tests.gemm.test_linear_kernel import GATED, LIMITS, mma, spec
from tests.gemm.test_linear_library import call
from tests.kit.gpu_library import library as gpu_library
from tests.kit.linear_harness import kernel, prepared, run, weight

ARCHS = ("sm_80", "sm_86", "sm_89")


def lone(rows: int, tokens: int, warps: int, slices: int = 1, blocks: int = 4) -> LinearTile:
    return replace(mma(rows, tokens, warps, slices, 1, blocks), copies="async")


CASES = {
    # structures
    "slices": (spec(192, 512), lone(64, 8, 2, 2), 5),
    "16 rows": (spec(128, 512), lone(16, 8, 1, 8, 8), 3),
    "32 rows": (spec(192, 512, "mxfp4"), lone(32, 8, 1, 4), 3),
    "256 rows": (spec(320, 512), lone(256, 8, 8, 1, 2), 8),
    "pairs of rows of x": (spec(192, 512, "mxfp4"), lone(128, 64, 4, 2, 2), 57),
    "an odd number of them": (spec(128, 512), lone(32, 40, 2, 1, 2), 41),
    "one block": (spec(128, 512), lone(64, 16, 4, 1, 1), 13),
    # epilogues
    "gated": (spec(192, 512, **GATED, residual=True), lone(64, 8, 2, 2), 9),
    "gelu, residual": (
        spec(200, 512, "mxfp4", activation="gelu_tanh", residual=True),
        lone(64, 16, 4),
        9,
    ),
    "relu2 to float32": (
        spec(196, 512, "mxfp4", activation="relu2", residual=True, out_dtype="float32"),
        lone(64, 16, 4),
        9,
    ),
    "gated to float32": (
        spec(196, 512, "mxfp4", "float16", **GATED, residual=True, out_dtype="float32"),
        lone(64, 8, 4),
        9,
    ),
    # ragged sizes
    "odd n": (spec(195, 512, residual=True), lone(64, 8, 4, 1, 2), 9),
    "odd n, high tiles": (spec(200, 528), lone(128, 8, 4, 2), 3),
    "odd k": (spec(128, 720), lone(64, 8, 2, 2), 9),
    "odd k, whole stages": (spec(128, 752), lone(64, 8, 2, 2, 2), 9),
    "one block of k": (spec(1, 16, dtype="float16"), lone(16, 8, 1, 8, 8), 1),
    # int4
    "int4": (spec(128, 512, "int4", group=128), lone(64, 8, 2, 2), 9),
    "int4, zeros": (spec(128, 704, "int4", "float16", group=64, zero=True), lone(64, 8, 2, 2), 9),
    "int4, groups of 32": (spec(128, 512, "int4", group=32, zero=True), lone(64, 8, 2, 2), 9),
    "int4, half a group": (spec(128, 640, "int4", "float16", group=128), lone(64, 8, 2), 9),
}
QUICK = ("slices", "pairs of rows of x", "odd n, high tiles", "odd k", "gated", "int4, zeros")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES]
)
def test_kernels_multiply(name):
    of, tile, rows = CASES[name]
    run(of, tile, rows, arch="sm_80").judge(LIMITS[of.dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "seed"), [(name, 1 + i % 2) for i, name in enumerate(CASES)])
def test_kernels_multiply_whatever_the_interleaving(name, seed):
    of, tile, rows = CASES[name]
    made = run(of, tile, rows, arch="sm_89", seed=seed, stages=2, bias=seed == 1)
    made.judge(LIMITS[of.dtype])


DEFAULTS = [
    *(spec(195, 528, residual=True), spec(64, 16, dtype="float16"), spec(256, 1088, **GATED)),
    spec(100, 544, "mxfp4", activation="gelu_tanh", residual=True),
    spec(196, 544, "mxfp4", "float16", activation="relu2", out_dtype="float32"),
    *(
        spec(130, 640, "int4", dtype, group=group, zero=zero)
        for dtype, group, zero in itertools.product(LIMITS, (32, 64, 128), (False, True))
        if dtype != "float32"
    ),
]


ROWS = [1, 3, 8, 16, 17, 33, 64, 100]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("of", "rows"),
    [(of, rows) for i, of in enumerate(DEFAULTS) for rows in ROWS[i % 2 :: 2]],
    ids=lambda value: getattr(value, "name", value),
)
def test_defaults_multiply(of, rows):
    """Half a minute for a spec; most of it compiles."""
    bucket = next(b for b in LINEAR_GPU_BUCKETS if b.limit is None or rows <= b.limit)
    arch = ARCHS[rows % 3]
    tile = legal_tiles(of, bucket.rows, GPU_TARGETS[arch])[0]
    [stages, *_] = depths(of, tile, bucket.rows, GPU_TARGETS[arch])
    run(of, tile, rows, arch=arch, stages=stages).judge(LIMITS[of.dtype])


# ---- Numbers ------------------------------------------------------------------------------------

ROUNDED = """#include "moe_decode.cuh"
extern "C" __global__ void both(const uint32_t *a, uint32_t b, uint32_t *product, uint32_t *sum) {
  int i = blockIdx.x * 1024 + threadIdx.x;
  product[i] = bs_mul2<true>(a[i], b), sum[i] = bs_add2<true>(a[i], b);
}
"""
NUMBERS = np.arange(65536, dtype=np.uint32)
TWICE = NUMBERS[::2] | NUMBERS[1::2] << 16


@cache
def rounded(arch: str) -> str:
    return nvcc.compile_cuda_source(ROUNDED, arch, ptx=True).image.decode()


@pytest.mark.parametrize("b", [0x7780, 0xB680, 0xC300, 0x0000, 0x8000, 0x0001, 0x3F81, 0xFF80])
def test_products_and_sums_of_bfloat16_are_those_of_sm_90(b):
    """All numbers: what sm_80 has no instruction for is one FMA, zeros' signs included."""
    made = []
    for arch in ("sm_80", "sm_90a"):
        assert ("mul.rn.bf16x2" in rounded(arch)) == (arch == "sm_90a")
        out = [np.zeros_like(TWICE) for _ in range(2)]
        given = [TWICE, np.uint32(b | b << 16), *out]
        emulator.launch(rounded(arch), entry="both", grid=32, block=1024, args=given).check()
        made.append([word.view(np.uint16) for word in out])
    for got, want in zip(*made, strict=True):
        nan = (want & 0x7FFF) > 0x7F80
        assert ((got & 0x7FFF) > 0x7F80)[nan].all()
        assert (got == want)[~nan].all()
        assert len(np.unique(want)) > 1 or b == 0xFF80


# ---- Which kernels there are --------------------------------------------------------------------


def test_what_these_architectures_lack_is_refused():
    of, room = spec(192, 1024), GPU_TARGETS["sm_80"]
    for tile, words in (
        (mma(64, 8, 2, 2), "no bulk copies"),
        (replace(lone(64, 8, 2, 2), ctas=2), "no clusters"),
        (LinearTile("wgmma", 128, 16, 4, 1, 1, 2), "no wgmma"),
    ):
        assert words in (tile.illegal(of, room) or "")
    assert lone(64, 8, 2, 2).illegal(of, room) is None
    hopper = LinearTile("wgmma", 128, 16, 4, 1, 1, 2, copies="async")
    assert "as TMA stores them" in (hopper.illegal(of, GPU_TARGETS["sm_90a"]) or "")


def test_one_kind_of_copies_loads_all():
    of = spec(128, 512)
    sch = Schedule(tvm.IRModule({"main": linear_tiles(of)}))
    schedules.decided(sch, of, lone(64, 8, 2, 2), 3)
    text = sch.mod["main"].script()
    for one in ("uint32", "uint8", "bfloat16"):
        assert derive(tvm.script.from_source(text)).copies == "async"
        line = next(t for t in text.splitlines() if "bs_warp_async" in t and one in t)
        mixed = text.replace(line, line.replace("bs_warp_async", "bs_warp_bulk"))
        with pytest.raises(LoweringError, match=r"is filled by \['warp_(bulk|async)'\]"):
            derive(tvm.script.from_source(mixed))


@pytest.mark.parametrize(
    "n", [512, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (64, 4096))]
)
def test_every_tile_makes_the_kernel_that_it_says(n, request):
    """They need no more shared memory than a GPU of 8.6 has, which runs code for sm_80 too.

    Without ``--exhaustive`` every fourth kernel.
    """
    of, least = spec(n, 1024), min(GPU_TARGETS[arch].sm_shared for arch in ARCHS) - 1024
    step, number = 1 if request.config.getoption("--exhaustive") else 4, 0
    for arch, rows in (("sm_80", 1), ("sm_86", 16), ("sm_80", 64), ("sm_86", 1000)):
        room = GPU_TARGETS[arch]
        tiles = legal_tiles(of, rows, room)
        assert len(tiles) == len(set(tiles)) > 3
        for tile in tiles:
            assert (tile.unit, tile.copies, tile.ctas) == ("mma", "async", 1)
            for stages in depths(of, tile, rows, room):
                number += 1
                if number % step:
                    continue
                made = kernel(of, tile, stages)
                said = (tile.rows, tile.tokens, tile.threads, tile.shared(of, stages))
                assert (made.cols_tile, made.rows_tile, made.threads, made.shared) == said
                assert (made.warps, made.slices, made.ctas) == (tile.warps, tile.slices, 1)
                assert made.shared <= room.cta_shared == least
                assert made.copies == "async"


def test_few_rows_of_the_weight_have_lower_tiles():
    room = GPU_TARGETS["sm_80"]
    heights = [legal_tiles(spec(n, 4096), 8, room)[0].rows for n in (28672, 8192, 4096, 512)]
    assert heights == [128, 64, 32, 16]


def compiled(of: Linear, arch: str, most: int | None = None) -> list[dict[str, int | str]]:
    """Return what machine code of the kernels of all buckets takes; ``most`` tiles of each."""
    room: Gpu = GPU_TARGETS[arch]
    texts: dict[str, str] = {}
    for bucket in LINEAR_GPU_BUCKETS:
        for tile in legal_tiles(of, bucket.rows, room)[:most]:
            for stages in depths(of, tile, bucket.rows, room)[:most]:
                sizes = tile.rows, tile.tokens, tile.warps, tile.slices, tile.blocks_k, stages
                name = "_".join(map(str, ("kernel", *sizes)))
                if name not in texts:
                    texts[name] = emit(kernel(of, tile, stages), name)
    made = nvcc.compile_cuda_source("\n".join(texts.values()), arch)
    assert {resource["name"] for resource in made.resources} == set(texts)
    assert not made.losses
    return list(made.resources)


KINDS = [
    *(
        Linear(4096, 4096, fmt, dtype, layout="tiles64", **more)
        for fmt, dtype in itertools.product(("nvfp4", "mxfp4"), ("bfloat16", "float16"))
        for more in (
            {},
            {**GATED, "residual": True},
            {"activation": "gelu_tanh", "residual": True, "out_dtype": "float32"},
        )
    ),
    *(
        Linear(4096, 4096, "int4", dtype, group, zero, layout="tiles64", **more)
        for group, zero in itertools.product((32, 64, 128), (False, True))
        for dtype, more in zip(
            ("bfloat16", "float16")[:: -1 if zero else 1],
            (
                {},
                {**GATED, "activation": "relu2", "residual": True, "out_dtype": "float32"},
            ),
            strict=True,
        )
    ),
    *(spec(195, 2896, residual=True), spec(100, 720, dtype="float16"), spec(512, 7168)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("of", "arch"),
    [(of, ARCHS[(i + i // 3) % 3]) for i, of in enumerate(KINDS)],
    ids=lambda value: getattr(value, "name", value),
)
def test_nothing_spills(of, arch):
    """ptxas takes every tile that is tried, and keeps all of it in registers; 14 s a spec."""
    for resource in compiled(of, arch):
        assert (resource["spills"], resource["stack"]) == (0, 0), resource


def test_defaults_do_not_spill():
    for resource in compiled(spec(4096, 4096, "int4", group=128), "sm_86", 1):
        assert (resource["spills"], resource["stack"]) == (0, 0), resource


# ---- As users get them --------------------------------------------------------------------------

PLAIN = Linear(192, 512, "nvfp4", "bfloat16", layout="tiles64")


@pytest.mark.parametrize(
    ("rows", "device"), [(1, "sm_80"), (20, "sm_86"), (70, "sm_89"), (70, "sm_90a")]
)
def test_a_library_for_sm_80_serves_all_of_them(rows, device):
    """Its launches ask for no clusters of two, and for no more shared memory than the least have.

    Nor do they begin early, not even on a GPU that could let them: its code waits for no kernel.
    """
    [launch], got, want = call(PLAIN, rows, device, arch="sm_80")
    assert (launch.cluster, launch.programmatic) == ((1, 1, 1), False)
    assert launch.asks_for_clusters == (device == "sm_90a")  # of one CTA
    assert launch.dynamic_smem <= 99 << 10
    error = np.sqrt(((got - want) ** 2).sum(1) / (want**2).sum(1))
    assert error.max() < LIMITS["bfloat16"]


def test_no_rows_are_no_launch():
    w = prepared(PLAIN, weight(PLAIN, 0), np.ones(1))
    x, y = (torch.zeros((0, size), dtype=torch.bfloat16) for size in (512, 192))
    made = emulator.run_module(
        gpu_library([PLAIN], "sm_80"),
        PLAIN.name,
        x,
        w.packed,
        w.block_scale,
        w.global_scale,
        None,
        y,
        target="sm_80",
    )
    made.check()
    assert not made.launches


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_80"), ((8, 9), "sm_89")],
)
def test_kernels_are_built_for_the_gpu_at_hand(monkeypatch, capability, arch):
    """On first use: what `runtime.jit` asks for, and which kernels that has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert host.local("cuda") == arch
    assert [work.rows for work in registry.workloads(PLAIN, arch)] == [
        bucket.rows for bucket in LINEAR_GPU_BUCKETS
    ]


@pytest.mark.parametrize("arch", GPU_TARGETS)
def test_every_architecture_has_the_layer(arch):
    assert registry.road(PLAIN, arch) is LINEAR
    assert all(workload.sketches(arch) for workload in registry.workloads(PLAIN, arch))
