"""Linear layers that quantise their rows to FP8: kernels, what comes before them, calls.

Truth is float64 on quantised rows and dequantised weights: the emulator's sums are float32, so that
rows agree to 1e-3 where results are not rounded to 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm.s_tir import Schedule

from blockscale import emulator
from blockscale.base.manifest import REPLAY
from blockscale.base.targets import GPU_TARGETS
from blockscale.building.space import new_schedule
from blockscale.catalog import registry
from blockscale.emulator.host.standin import open_file
from blockscale.emulator.host.tensors import Arguments
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.runtime.function import RECORD
from blockscale.runtime.function_cuda import PROGRAMMATIC
from blockscale.schedules.gemm import linear as schedules
from blockscale.schedules.gemm.linear_gpu_tiles import legal_tiles, multiplies_bytes
from blockscale.specs import Linear
from blockscale.specs.plans.linear import LinearTile
from blockscale.tir.gemm.linear_tiles import linear_tiles
from tests.kit import linear_harness
from tests.kit.gpu_library import library as gpu_library
from tests.kit.linear_harness import ACT, kernel, prepared, rows_of, run, weight
from tests.kit.pairwise import exhaustive, few
from tests.reference import moe

LIMITS = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-5}


def spec(n: int, k: int, dtype: str = "bfloat16", **more: Any) -> Linear:
    options = {"layout": "tiles64e", "act_fmt": "fp8", **more}
    return Linear(n, k, options.pop("fmt", "mxfp4"), dtype, **options)


def mma(rows: int, tokens: int, warps: int, slices: int = 1, ctas: int = 1) -> LinearTile:
    return LinearTile("mma", rows, tokens, warps, slices, ctas, 4)


def wgmma(rows: int, tokens: int, warps: int, ctas: int = 1) -> LinearTile:
    return LinearTile("wgmma", rows, tokens, warps, 1, ctas, 2)


def tensor(tokens: int, ctas: int = 1) -> LinearTile:
    return LinearTile("tcgen05", 128, tokens, 4, 2, ctas, 2)


def groups(rows: int, tokens: int, group: int, blocks: int = 2, raster: str = "rows") -> LinearTile:
    sizes = rows, tokens, min(8, rows // 16), 1, 1, blocks, raster
    return LinearTile("wgmma", *sizes, by_bytes=True, partial=group)


def byte(
    rows: int,
    tokens: int,
    ctas: int = 1,
    raster: str = "rows",
    blocks: int = 2,
    partial: int = 128,
    multicast: int = 1,
) -> LinearTile:
    sizes = rows, tokens, rows // 32, 1, ctas, blocks, raster
    return LinearTile("wgmma", *sizes, by_bytes=True, partial=partial, multicast=multicast)


GATED = {"activation": "silu", "gated": True}
FLOAT = {"out_dtype": "float32"}
INT4 = {"fmt": "int4", "group": 128}
CASES = {
    "bytes": (spec(320, 704, **FLOAT), byte(256, 64), 70),
    "bytes, 16 bits out": (spec(195, 512, residual=True), byte(128, 32), 41),
    "bytes, cols": (spec(512, 320, "float16"), byte(256, 112, raster="cols"), 230),
    "bytes, ctas": (spec(200, 1408, **FLOAT, residual=True), byte(128, 40, 2), 33),
    "bytes, uneven ctas": (spec(128, 1344, "float16", **FLOAT), byte(128, 16, 4), 17),
    "bytes, one unit": (
        spec(195, 704, "float16", **FLOAT, residual=True),
        LinearTile("wgmma", 128, 152, 8, 1, 1, 2, by_bytes=True, partial=128),
        155,
    ),
    "bytes, 256 of K": (spec(320, 1472, **FLOAT), byte(256, 40, blocks=4, partial=256), 37),
    "bytes, fast": (
        spec(320, 1472, **FLOAT, fast_accum=True),
        byte(256, 40, blocks=2, partial=0),
        37,
    ),
    "bytes, fast, ctas": (
        spec(128, 2880, **FLOAT, fast_accum=True),
        byte(128, 16, 4, blocks=4, partial=0),
        17,
    ),
    "bytes, four CTAs' rows": (
        spec(512, 704, **FLOAT, residual=True, fast_accum=True),
        byte(128, 40, blocks=4, partial=0, multicast=4),
        100,
    ),
    "bytes, gated": (spec(330, 416, **GATED, **FLOAT, residual=True), byte(256, 48), 50),
    "bytes, relu2": (spec(129, 96, activation="relu2"), byte(128, 80), 81),
    "groups": (spec(320, 640, **INT4, **FLOAT, residual=True), groups(256, 64, 128), 70),
    "groups, long stages": (
        spec(200, 896, **INT4, zero=True, **FLOAT),
        groups(256, 24, 128, 4),
        37,
    ),
    "groups of 64": (
        spec(195, 704, "float16", fmt="int4", group=64, zero=True, residual=True),
        groups(128, 48, 64, 4, raster="cols"),
        100,
    ),
    "groups, four warps": (spec(64, 512, **INT4, **FLOAT), groups(64, 40, 128, 4), 41),
    "groups, gated": (spec(330, 384, **INT4, **GATED, **FLOAT), groups(256, 48, 128, 4), 50),
    "mma, groups": (spec(192, 512, **INT4, zero=True), mma(64, 8, 2, 2), 5),
    "wgmma, groups": (spec(320, 640, **INT4), wgmma(128, 40, 4), 77),
    "mma": (spec(192, 512, **FLOAT), mma(64, 8, 2, 2), 5),
    "mma, gated": (spec(66, 672, "float16", **GATED, residual=True), mma(64, 16, 2, 2), 13),
    "mma, ctas": (spec(195, 1440, **FLOAT), mma(64, 8, 4, 1, 2), 8),
    "wgmma": (spec(320, 672, **FLOAT), wgmma(128, 40, 4), 77),
    "wgmma, ctas": (spec(128, 1024, "float16", activation="gelu_tanh"), wgmma(64, 32, 4, 2), 30),
    "tcgen05": (spec(200, 672, **FLOAT, residual=True), tensor(64), 77),
    "tcgen05, ctas, int4": (spec(128, 1024, **INT4, zero=True), tensor(128, 2), 130),
    "tcgen05, nvfp4": (spec(256, 656, fmt="nvfp4", **GATED, **FLOAT), tensor(32), 33),
    "16 bits, tcgen05": (
        spec(195, 720, "float16", fmt="nvfp4", layout="tiles64", by_row=True, **FLOAT),
        tensor(96),
        99,
    ),
    "bytes, nvfp4": (spec(320, 720, fmt="nvfp4", **FLOAT), byte(256, 64), 70),
    "bytes, nvfp4, gated": (
        spec(330, 416, fmt="nvfp4", **GATED, **FLOAT, residual=True),
        byte(128, 48, blocks=4, partial=256),
        50,
    ),
    "mma, nvfp4": (spec(195, 1440, "float16", fmt="nvfp4", **FLOAT), mma(64, 8, 4, 1, 2), 8),
    "wgmma, nvfp4": (spec(320, 656, fmt="nvfp4", **FLOAT), wgmma(128, 40, 4), 77),
    "16 bits of any format": (
        spec(128, 512, fmt="nvfp4", layout="tiles64", **FLOAT),
        mma(64, 8, 2, 2),
        9,
    ),
    "16 bits, by row": (
        spec(195, 720, "float16", fmt="nvfp4", layout="tiles64", by_row=True, **FLOAT),
        wgmma(128, 24, 4),
        30,
    ),
    "16 bits of int4": (
        spec(128, 512, "float16", fmt="int4", group=128, layout="tiles64"),
        wgmma(128, 16, 4),
        19,
    ),
}


LATER = (
    *("groups", "groups, gated", "wgmma, groups", "bytes, cols", "bytes, relu2", "mma, gated"),
    *("wgmma", "16 bits of any format", "bytes, ctas", "bytes, fast, ctas", "groups, four warps"),
    *("tcgen05, nvfp4", "tcgen05, ctas, int4"),
)
"""Of parts that others have, too: exhaustive."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=exhaustive if n in LATER else ()) for n in CASES]
)
def test_kernels_multiply(name: str) -> None:
    of, tile, rows = CASES[name]
    run(of, tile, rows).judge(LIMITS[of.out_dtype])


@pytest.mark.parametrize("name", ["bytes, nvfp4", "mma, nvfp4"])
def test_rounded_weights_of_any_scales(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales from 2^-9 to 448 in a row, and blocks without any."""

    def scales(rng: np.random.Generator, shape: tuple[int, ...], fmt: str, k: int) -> np.ndarray:
        return rng.integers(0, 0x7F, shape, dtype=np.uint8)

    monkeypatch.setattr(moe, "_scales", scales)
    of, tile, rows = CASES[name]
    run(of, tile, rows).judge(LIMITS["float32"])


@pytest.mark.parametrize("name", ["groups, long stages", "groups of 64"])
def test_small_integers_are_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose scale is 1, scales that are powers of two: every sum is a float32 number."""
    of, tile, rows = CASES[name]
    of = replace(of, dtype="bfloat16", out_dtype="float32", residual=False)
    rng, made = np.random.default_rng(0), weight(of, 0)
    old = np.asarray(made.scale, np.float64).repeat(of.group, 1)
    scale = np.exp2(rng.integers(-2, 3, made.scale.shape)).astype(made.scale.dtype)
    value = np.round(made.value / old) * scale.astype(np.float64).repeat(of.group, 1)
    known = replace(made, scale=scale, value=value)
    x = rng.choice([-64.0, -8, 0, 8, 64], (rows, of.k))
    x[:, rng.integers(of.k)] = 448
    monkeypatch.setattr(linear_harness, "weight", lambda spec, seed: known)
    monkeypatch.setattr(linear_harness.moe, "random_hidden", lambda *_: x)
    run(of, tile, rows, bias=False).judge(0)


@pytest.mark.parametrize("name", ["bytes", "bytes, uneven ctas", "mma", "wgmma"])
def test_plans_know_the_memory_of_kernels(name: str) -> None:
    of, tile, _ = CASES[name]
    assert kernel(of, tile, 3).shared == tile.shared(of, 3)


@pytest.mark.parametrize("k", [512, 2880])
def test_products_run_beside_decoding(k: int) -> None:
    """Of whole stages of K and half a one at the end, ptxas serialises no wgmma."""
    of = kernel(spec(2880, k, residual=True), byte(256, 96), 4)
    made = compile_cuda_source(emit(of, "linear"), "sm_90a")
    assert not made.losses
    assert not any(found["spills"] for found in made.resources)


def test_kernels_follow_the_function() -> None:
    """A text of the TensorIR is replaced before it is scheduled: scales of rows count twice."""
    of, tile = spec(128, 256, **FLOAT), byte(128, 16)
    text = linear_tiles(of, by_bytes=True).script()
    assert text.count("* row_scale[vt, vi]") == 1
    twice = text.replace("* row_scale[vt, vi]", "* (row_scale[vt, vi] + row_scale[vt, vi])")
    sch = Schedule(tvm.script.from_source(twice))
    schedules.decided(sch, of, tile, 3)
    image = compile_cuda_source(emit(derive(sch.mod["main"]), "linear"), "sm_90a", ptx=True)
    made = run(of, tile, 9, text=image.image.decode())
    made.want = 2 * made.sums + made.bias
    made.judge(LIMITS["float32"])


def test_where_8_bits_are_multiplied() -> None:
    """Where the model says so; by mma.sync, where rows are few or there is no wgmma."""
    of, fast = spec(4096, 4096), spec(4096, 4096, fast_accum=True)
    for asked, arch, least in (
        (of, "sm_90a", 1025),
        (fast, "sm_90a", 129),
        (fast, "sm_100a", math.inf),
    ):
        for workload in registry.workloads(asked, arch):
            sch = new_schedule(workload.symbolic(arch))
            workload.default(sch, arch)
            made = derive(sch.mod["main"])
            assert bool(made.partial) == (made.by_bytes and asked is of)
            assert made.by_bytes == (workload.rows >= least), workload.tag
            if workload.rows <= 8:
                assert made.unit == "mma"
            if workload.rows > 256:
                assert made.unit == {"sm_90a": "wgmma", "sm_100a": "tcgen05"}[arch]
    with pytest.raises(TypeError, match="bulk copies"):
        registry.road(of, "sm_80")
    plain = replace(of, layout="tiles64")
    assert not any(tile.by_bytes for tile in legal_tiles(plain, 4096, GPU_TARGETS["sm_90a"]))


@pytest.mark.parametrize(
    ("n", "k", "rows", "options", "want"),
    [
        (4096, 4096, 1024, {}, False),
        (4096, 4096, 4096, {}, True),
        (8192, 8192, 256, {}, False),
        (14336, 4096, 1024, {}, True),
        (8192, 8192, 1024, {}, True),
        (8192, 8192, 1024, {"zero": True}, False),
        (8192, 8192, 4096, {"zero": True}, True),
        (8192, 8192, 4096, {"group": 64}, False),
    ],
)
def test_where_int4_is_multiplied_in_8_bits(
    n: int, k: int, rows: int, options: dict[str, Any], want: bool
) -> None:
    """Where an H200 was faster."""
    of, arch = spec(n, k, **INT4 | options), GPU_TARGETS["sm_90a"]
    assert multiplies_bytes(of, rows, arch) == want
    first = legal_tiles(of, rows, arch)[0]
    assert (first.partial, first.rows) == ((128, 128) if want else (0, first.rows))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unit": "mma", "warps": 4}, "wgmma multiplies operands of 8 bits"),
        ({"blocks_k": 1}, "has 2 or 4 blocks of K"),
        ({"partial": 192}, "192 channels do not divide the 128 of a stage"),
        ({"rows": 256, "tokens": 32}, "one or two tiles of 16 rows"),
        ({"rows": 256, "warps": 8, "tokens": 128}, "192 sums of a thread are more than 168"),
    ],
)
def test_illegal_tiles(changes: dict[str, Any], said: str) -> None:
    tile = replace(byte(128, 64), **changes)
    assert said in str(tile.illegal(spec(128, 512), GPU_TARGETS["sm_90a"]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "tiles64", "fast_accum": True}, "fast_accum=True is for layout='tiles64e'"),
        ({"fmt": "int4", "group": 32}, "with groups of 64 or 128, not for fmt='int4', group=32"),
        ({"act_fmt": ""}, "'tiles64e' is for act_fmt='fp8' and fmt='mxfp4'"),
        ({"fmt": "int4", "fast_accum": True}, "sums of int4 are those of groups"),
        ({"by_row": True}, "each row has a global scale in any case"),
        ({"act_fmt": "int8"}, "act_fmt='int8' is not known"),
    ],
)
def test_no_such_function(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec(128, 512, **options)


# ---- Functions ----------------------------------------------------------------------------------

PLAIN = spec(195, 544, residual=True)
FULL = spec(264, 448, "float16", **GATED, **FLOAT)
SIXTEEN = spec(136, 480, "float16", fmt="nvfp4", layout="tiles64", activation="relu2")
SMS = 4


def library(of: Linear) -> Path:
    """Return the library that has this function."""
    return gpu_library([of], "sm_90a")


def call(of: Linear, rows: int, flags: int = PROGRAMMATIC) -> Any:
    """Return the launches, y and what it should be, of rows one of which is zeros."""
    made, gains = weight(of, rows), np.array([0.5, 1.5][: 1 + of.gated])
    w = prepared(of, made, gains)
    dtype = getattr(torch, of.dtype)
    x = moe.random_hidden(rows, of.k, of.dtype, rows).astype(np.float32)
    x[rows // 2 : rows // 2 + (rows > 1)] = 0
    bias = torch.linspace(-1, 1, of.n)
    residual = [torch.linspace(-3, 3, rows * of.cols).view(rows, of.cols).to(dtype)]
    y = torch.full((rows, of.cols), float("nan"), dtype=getattr(torch, of.out_dtype))
    workspace = torch.full((of.workspace_bytes(rows or 3),), 0xFF, dtype=torch.uint8)
    given = [w.packed, w.block_scale, w.global_scale, bias, *residual[: of.residual], y, workspace]
    ran = emulator.run_module(
        library(of), of.name, torch.from_numpy(x).to(dtype), *given, flags, target="sm_90a",
        multiprocessors=SMS,
    )  # fmt: skip
    ran.check()
    hazards = [hazard.kind for report in ran.reports for hazard in report.hazards]
    assert "programmatic launch" not in hazards
    value = rows_of(of, False, x)[2]
    sums = np.split(value @ made.value.T, 1 + of.gated, 1)
    shifts = np.split(bias.numpy().astype(np.float64), 1 + of.gated)
    parts = [s * g + b for s, g, b in zip(sums, gains, shifts, strict=True)]
    want = ACT[of.activation](parts[0]) * (parts[1] if of.gated else 1)
    want = want + (residual[0].double().numpy() if of.residual else 0)
    return ran.launches, y.double().numpy(), want


@pytest.mark.parametrize(
    ("of", "rows"),
    few(
        [
            *((PLAIN, 1), (PLAIN, 64), (FULL, 3), (PLAIN, 17)),
            *((PLAIN, 200), (SIXTEEN, 70), (FULL, 40), (FULL, 130), (SIXTEEN, 9)),
        ]
    ),
)
def test_a_call_quantises_and_multiplies(of: Linear, rows: int) -> None:
    flags = PROGRAMMATIC if rows > 1 else 0
    launches, got, want = call(of, rows, flags)
    first, second = launches
    assert first.programmatic == bool(flags)
    form = "natural" if of is SIXTEEN else "bytes" if rows > 128 else "permuted"
    assert first.kernel == f"{of.name}_quantize_{form}"
    assert second.programmatic
    error = np.sqrt(((got - want) ** 2).sum(1) / (want**2).sum(1))
    assert error.max() < LIMITS[of.out_dtype]


def test_a_gemm_begins_early_whatever_its_caller_says() -> None:
    """It waits for the kernel before it, of its own call; that may begin early only if told so."""
    first, second = call(SIXTEEN, 9, 0)[0]
    assert (first.programmatic, second.programmatic) == (False, True)


def test_recorded_launches_are_done_again() -> None:
    """Both, with the tensor maps and the numbers of the call that was recorded."""
    rows, w = 3, prepared(SIXTEEN, weight(SIXTEEN, 0), np.ones(1))
    x = torch.from_numpy(moe.random_hidden(rows, SIXTEEN.k, "float16", 1)).half()
    y = torch.full((2, rows, SIXTEEN.cols), float("nan"), dtype=torch.float16)
    workspace = torch.full((SIXTEEN.workspace_bytes(rows),), 0xFF, dtype=torch.uint8)
    given = [x, w.packed, w.block_scale, w.global_scale, torch.zeros(SIXTEEN.n), *y, workspace]
    emulated = open_file(library(SIXTEEN), "sm_90a", SMS)
    with emulated.answering():
        emulated.driver.begin()
        run, replay = map(emulated.module.get_function, (SIXTEEN.name, REPLAY[0]))
        with Arguments(given, emulated.driver.memory) as arguments:
            *inputs, first, second, space = arguments.values
            run(*inputs, first, space, PROGRAMMATIC)
            handle = run(*inputs, second, space, PROGRAMMATIC | RECORD)
            assert len(emulated.driver.launches) == 2
            replay(handle)
            assert len(emulated.driver.launches) == 4
    assert torch.equal(y[0], y[1])


def test_a_small_workspace_is_refused() -> None:
    w = prepared(PLAIN, weight(PLAIN, 0), np.ones(1))
    x = torch.zeros((3, 544)).bfloat16()
    residual, y = (torch.zeros((3, 195)).bfloat16() for _ in range(2))
    workspace = torch.zeros(PLAIN.workspace_bytes(3) - 1, dtype=torch.uint8)
    with pytest.raises(Exception, match=r"workspace has \d+ bytes, but \d+ are needed for 3"):
        emulator.run_module(
            library(PLAIN), PLAIN.name, x, w.packed, w.block_scale, w.global_scale, None, residual,
            y, workspace, target="sm_90a", multiprocessors=SMS,
        )  # fmt: skip


def test_no_rows() -> None:
    """Nor is anything written to the workspace, which is another call's."""
    launches, got, _ = call(PLAIN, 0)
    assert (len(launches), got.shape) == (0, (0, 195))
