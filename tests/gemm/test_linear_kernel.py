"""Linear layers by mma.sync, wgmma, tcgen05: what their TensorIR says is what their kernels do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.ir import assert_structural_equal
from tvm.s_tir import Schedule

from blockscale.base.errors import LoweringError
from blockscale.base.targets import GPU_TARGETS, TCGEN05, having
from blockscale.building.space import new_schedule
from blockscale.catalog import road, workloads
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.lower.warp.facts import decisions
from blockscale.schedules.gemm import linear as schedules
from blockscale.schedules.gemm.linear_clocks import ctas
from blockscale.schedules.gemm.linear_gpu_tiles import depths, legal_tiles
from blockscale.specs import Linear
from blockscale.specs.plans.linear import LinearTile
from blockscale.tir.gemm.linear_tiles import linear_tiles
from tests.kit.linear_harness import ACT, kernel, run
from tests.kit.pairwise import each

LIMITS = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 4e-3}


def spec(n: int, k: int, fmt: str = "nvfp4", dtype: str = "bfloat16", **more: Any) -> Linear:
    return Linear(n, k, fmt, dtype, layout="tiles64", **more)


def mma(
    rows: int, tokens: int, warps: int, slices: int = 1, ctas: int = 1, blocks: int = 4
) -> LinearTile:
    return LinearTile("mma", rows, tokens, warps, slices, ctas, blocks)


def wgmma(
    rows: int, tokens: int, warps: int, ctas: int = 1, blocks: int = 2, **more: Any
) -> LinearTile:
    return LinearTile("wgmma", rows, tokens, warps, 1, ctas, blocks, **more)


def tensor(
    tokens: int, slices: int = 2, blocks: int = 2, raster: str = "rows", ctas: int = 1
) -> LinearTile:
    return LinearTile("tcgen05", 128, tokens, 4, slices, ctas, blocks, raster)


GATED = {"activation": "silu", "gated": True}
CASES = {
    # structures of mma.sync
    "slices": (spec(192, 512), mma(64, 8, 2, 2), 5),
    "ctas": (spec(192, 1024), mma(64, 8, 2, 2, 2), 5),
    "4 ctas": (spec(192, 1024, dtype="float16"), mma(32, 16, 2, 1, 4, 2), 13),
    "uneven ctas": (spec(67, 1344, residual=True), mma(64, 8, 4, 1, 2), 9),
    "16 rows": (spec(128, 512), mma(16, 8, 1, 8, 1, 8), 3),
    "32 rows": (spec(192, 512, "mxfp4"), mma(32, 8, 1, 4), 3),
    "128 rows": (spec(192, 512, "mxfp4"), mma(128, 24, 4, 2, 1, 2), 30),
    "256 rows": (spec(320, 512), mma(256, 8, 8, 1, 1, 2), 8),
    "128 rows, 4 slices, 8 blocks": (spec(192, 1024), mma(128, 8, 2, 4, 1, 8), 7),
    "128 rows, 8 warps": (spec(192, 512, "mxfp4"), mma(128, 16, 8, 2, 1, 2), 13),
    "16 rows, 8 slices, 2 ctas": (spec(72, 1024), mma(16, 8, 1, 8, 2, 8), 3),
    "32 rows, 4 slices, 2 ctas": (spec(72, 1024, residual=True), mma(32, 16, 2, 4, 2), 12),
    "4 units, 4 slices": (spec(128, 512), mma(64, 16, 1, 4, 1, 4), 13),
    "4 units, 4 slices, 2 ctas": (spec(64, 1024, residual=True), mma(64, 16, 1, 4, 2, 4), 13),
    # structures of wgmma
    "wgmma": (spec(320, 512), wgmma(256, 64, 8), 70),
    "wgmma, 64 rows": (spec(192, 576, dtype="float16", residual=True), wgmma(64, 32, 4), 33),
    "wgmma, ctas": (spec(128, 1024, residual=True), wgmma(128, 40, 8, 2), 41),
    "wgmma, uneven ctas": (spec(67, 1344, residual=True), wgmma(128, 24, 8, 4), 19),
    "wgmma, 256 rows, ctas": (spec(320, 1024), wgmma(256, 64, 8, 2), 50),
    "wgmma, 96 tokens": (spec(192, 1024, residual=True), wgmma(128, 96, 4), 100),
    "wgmma, 192 tokens": (spec(128, 512), wgmma(64, 192, 4), 200),
    "wgmma, 128 tokens, ctas": (spec(128, 512), wgmma(64, 128, 4, 2), 190),
    "wgmma, odd stages": (spec(128, 704, "mxfp4"), wgmma(128, 16, 4), 10),
    "wgmma, half a stage": (spec(128, 704), wgmma(64, 24, 4), 30),
    "wgmma, multicast": (spec(512, 704, residual=True), wgmma(128, 32, 8, multicast=2), 70),
    "wgmma, multicast, cols": (
        spec(440, 512, "mxfp4", residual=True),
        wgmma(256, 64, 8, raster="cols", multicast=2),
        130,
    ),
    # structures of tcgen05
    "tcgen05": (spec(320, 512, residual=True), tensor(64), 150),
    "tcgen05, one slice": (spec(192, 512), tensor(64, 1), 70),
    "tcgen05, 256 tokens": (spec(128, 512, "mxfp4", "float16"), tensor(256), 300),
    "tcgen05, three parts": (spec(256, 512, residual=True), tensor(96, raster="cols"), 100),
    "tcgen05, 16 tokens": (spec(256, 512, "mxfp4"), tensor(16, 1), 19),
    "tcgen05, one block": (spec(128, 512), tensor(32, 1, 1), 30),
    "tcgen05, four blocks": (spec(128, 1152), tensor(64, 2, 4), 30),
    "tcgen05, odd stages": (spec(128, 704, "mxfp4"), tensor(32), 33),
    "tcgen05, ctas": (spec(256, 1024, residual=True), tensor(64, ctas=2), 100),
    "tcgen05, uneven ctas": (spec(67, 1344, residual=True), tensor(32, ctas=4), 19),
    "tcgen05, 128 tokens, ctas": (spec(128, 1024, "mxfp4", **GATED), tensor(128, ctas=2), 130),
    "tcgen05, one slice, ctas": (spec(128, 1024), tensor(64, 1, ctas=4), 70),
    "tcgen05, one block of K": (spec(128, 64), tensor(32), 33),
    "tcgen05, odd k and n": (spec(195, 720, residual=True), tensor(64), 66),
    "tcgen05, gated": (spec(256, 1088, "mxfp4", **GATED, residual=True), tensor(128), 130),
    "tcgen05, by row": (spec(200, 512, "mxfp4", by_row=True), tensor(32), 35),
    "tcgen05, gelu to float32": (
        spec(196, 512, activation="gelu_tanh", out_dtype="float32", residual=True),
        tensor(64),
        70,
    ),
    # epilogues
    "gated": (spec(192, 512, **GATED, residual=True), mma(64, 8, 2, 2), 9),
    "gelu, residual": (
        spec(200, 512, "mxfp4", activation="gelu_tanh", residual=True),
        mma(64, 16, 4),
        9,
    ),
    "wgmma, gated": (spec(256, 1088, "mxfp4", **GATED), wgmma(128, 40, 4), 41),
    "relu2 to float32": (
        spec(196, 512, "mxfp4", activation="relu2", residual=True, out_dtype="float32"),
        mma(64, 16, 4),
        9,
    ),
    "gated to float32": (
        spec(196, 512, "mxfp4", "float16", **GATED, residual=True, out_dtype="float32"),
        mma(64, 8, 4),
        9,
    ),
    "by row": (spec(195, 512, by_row=True, residual=True), mma(64, 8, 2, 2), 5),
    "wgmma, by row": (spec(200, 512, "mxfp4", by_row=True), wgmma(128, 24, 8), 19),
    "by row to float32": (
        spec(196, 512, by_row=True, activation="silu", out_dtype="float32"),
        mma(64, 16, 4),
        9,
    ),
    # ragged sizes
    "odd n": (spec(195, 512, residual=True), mma(64, 8, 4, 1, 1, 2), 9),
    "odd k": (spec(128, 720), mma(64, 8, 2, 2), 9),
    "odd k, ctas": (spec(128, 1360), mma(64, 8, 2, 2, 2), 9),
    "odd k, whole stages": (spec(128, 752), mma(64, 8, 2, 2, 2, 2), 9),
    "odd k, a CTA with the last stage alone": (spec(196, 720), mma(64, 8, 2, 4, 2), 5),
    "wgmma, odd k": (spec(128, 720), wgmma(128, 16, 4, 1, 1), 10),
    "wgmma, odd k, ctas": (spec(128, 1520), wgmma(128, 16, 8, 2), 9),
    **{
        f"tcgen05, int4 {group}{', zeros' if zero else ''}": (
            spec(128, 640, "int4", dtype, group=group, zero=zero),
            tensor(32),
            40,
        )
        for group, zero, dtype in (
            *((32, False, "bfloat16"), (32, True, "float16"), (64, False, "float16")),
            *((64, True, "bfloat16"), (128, False, "bfloat16"), (128, True, "float16")),
        )
    },
    # int4
    "int4": (spec(128, 512, "int4", group=128), mma(64, 8, 2, 2), 9),
    "int4, zeros": (spec(128, 704, "int4", "float16", group=64, zero=True), mma(64, 8, 2, 2), 9),
    "int4, groups of 32": (spec(128, 512, "int4", group=32, zero=True), mma(64, 8, 2, 2), 9),
    "int4, half a group": (spec(128, 640, "int4", "float16", group=128), mma(64, 8, 2), 9),
    **{
        f"wgmma, int4 {group}{', zeros' if zero else ''}": (
            spec(128, 640, "int4", dtype, group=group, zero=zero),
            wgmma(128, 16, 4),
            10,
        )
        for group, zero, dtype in (
            *((32, False, "bfloat16"), (32, True, "float16"), (64, False, "float16")),
            *((64, True, "bfloat16"), (128, False, "bfloat16"), (128, True, "float16")),
        )
    },
}
QUICK = (
    *(
        "by row",
        "wgmma, by row",
        "slices",
        "4 units, 4 slices",
        "4 units, 4 slices, 2 ctas",
        "uneven ctas",
        "16 rows",
        "128 rows",
        "wgmma",
        "wgmma, uneven ctas",
        "wgmma, multicast",
        "wgmma, multicast, cols",
    ),
    *(
        "wgmma, gated",
        "gelu, residual",
        "gated to float32",
        "odd k, ctas",
        "odd k, a CTA with the last stage alone",
        "int4, groups of 32",
        "wgmma, int4 32",
        "wgmma, int4 32, zeros",
        "wgmma, int4 128",
    ),
    *(
        "tcgen05",
        "tcgen05, one slice",
        "tcgen05, three parts",
        "tcgen05, uneven ctas",
        "tcgen05, odd k and n",
        "tcgen05, one block of K",
        "tcgen05, gated",
        "tcgen05, by row",
        "tcgen05, int4 32, zeros",
    ),
)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES]
)
def test_kernels_multiply(name):
    of, tile, rows = CASES[name]
    run(of, tile, rows).judge(LIMITS[of.dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "seed"), [(name, 1 + i % 2) for i, name in enumerate(CASES)])
def test_kernels_multiply_whatever_the_interleaving(name, seed):
    of, tile, rows = CASES[name]
    run(of, tile, rows, seed=seed, stages=2, bias=seed == 1).judge(LIMITS[of.dtype])


def test_results_do_not_differ_from_run_to_run():
    of, tile, rows = CASES["4 ctas"]
    first, second = (run(of, tile, rows, seed=7) for _ in range(2))
    assert np.array_equal(first.got, second.got)


@pytest.mark.parametrize("arch", having(TCGEN05))
def test_kernels_of_tcgen05_keep_their_registers(arch):
    """Two banks of fragments, or the sums of a part, beside addresses: nothing is spilled."""
    of = spec(256, 512, "int4", "float16", group=64, zero=True)
    text = emit(kernel(of, tensor(128, ctas=2), 3), "linear")
    [found] = compile_cuda_source(text, arch).resources
    assert (found["stack"], found["spills"]) == (0, 0)


@pytest.mark.parametrize("name", ["4 ctas", "wgmma, uneven ctas", "tcgen05, uneven ctas"])
def test_ctas_of_a_cluster_store_each_element_once(name):
    """Of a unit of sums one has all; the others would store parts of them."""
    of, tile, rows = CASES[name]
    assert run(of, tile, rows).report.bytes["global"]["written"] == rows * of.cols * 2


# ---- Kernels follow the function ----------------------------------------------------------------

EDITED = spec(128, 256, residual=True), mma(64, 8, 2, 2)


def edited(old: str, new: str, count: int = 1) -> Any:
    """Return the PTX of a layer in whose TensorIR a text is replaced before it is scheduled."""
    of, tile = EDITED
    text = linear_tiles(of).script()
    assert text.count(old) >= 1, f"{old} is not in the function"
    sch = Schedule(tvm.script.from_source(text.replace(old, new, count)))
    schedules.decided(sch, of, tile, 3)
    return compile_cuda_source(emit(derive(sch.mod["main"]), "linear"), "sm_90a", ptx=True)


FMA = "T.fma(C[vt, vi, vr], global_scale[0] * T.float32(65536.0), bias["


@pytest.mark.parametrize(
    ("old", "new", "follows"),
    [
        ("T.float32(65536.0)", "T.float32(131072.0)", lambda s, b, r: 2 * s + b + r),
        (
            f'T.Cast("bfloat16", {FMA}',
            f'T.Cast("bfloat16", T.float32(2) * {FMA}',
            lambda s, b, r: 2 * (s + b) + r,
        ),
        (
            ' + T.Cast("float32", residual[',
            ' - T.Cast("float32", residual[',
            lambda s, b, r: s + b - r,
        ),
        (
            f'T.Cast("bfloat16", {FMA}',
            'T.Cast("bfloat16", T.Cast("float32", residual[vt, vi, vr // T.int64(32) * T.int64(32)'
            " + vr % T.int64(8) // T.int64(2) * T.int64(8) + vr % T.int64(32) // T.int64(8) * "
            f"T.int64(2) + vr % T.int64(2)]) * {FMA}",
            lambda s, b, r: r * (s + b) + r,
        ),
    ],
)
def test_kernels_follow_the_epilogue(old, new, follows):
    of, tile = EDITED
    image = edited(old, new)
    made = run(of, tile, 5, text=image.image.decode())
    parts = run(of, tile, 5, bias=True)
    assert not np.allclose(made.got, parts.got, rtol=1e-2)
    made.want = follows(made.sums, made.bias, made.residual)
    made.judge(LIMITS["bfloat16"])


def test_kernels_follow_the_null_value():
    of, tile = EDITED
    func = linear_tiles(of)
    changed = dict(func.attrs["blockscale.optional"]) | {"bias": 3.0}
    sch = new_schedule(tvm.IRModule({"main": func.with_attr("blockscale.optional", changed)}))
    schedules.decided(sch, of, tile, 3)
    text = emit(derive(sch.mod["main"]), "linear")
    image = compile_cuda_source(text, "sm_90a", ptx=True).image.decode()
    made = run(of, tile, 5, bias=False, text=image)
    made.want = made.want + 3
    made.judge(LIMITS["bfloat16"])


def test_what_cannot_be_lowered_says_where():
    of, tile = EDITED
    for old, new, words in (
        (
            "T.float32(65536.0)",
            'T.Cast("float32", T.Cast("int32", packed[T.int64(0), T.int64(0), T.int64(0)]))',
            "no load of uint32",
        ),
        (
            "T.fma(C[vt, vi, vr]",
            "T.fma(C[vt, vi, vr // T.int64(8) * T.int64(8) + (vr + T.int64(4)) % T.int64(8)]",
            "another thread",
        ),
    ):
        with pytest.raises(LoweringError, match=words):
            edited(old, new)
    sch = new_schedule(tvm.IRModule({"main": linear_tiles(of)}))
    schedules.shape(sch, of, tile)
    with pytest.raises(LoweringError, match="stages"):
        derive(sch.mod["main"])
    with pytest.raises(LoweringError, match="MMA"):
        derive(linear_tiles(of))


@pytest.mark.parametrize(
    ("buffer", "old", "new", "words"),
    [
        ("D = T.match_buffer(A_local_shared_tmem", "v0_o", "(T.int64(7) - v0_o)", "another place"),
        ("S = T.match_buffer(C_local_rf", "v2_o", "(v2_o + T.int64(1))", "another place"),
        ("T.match_buffer(C_local_rf", "v0_o", "(T.int64(1) - v0_o)", "rows of x at a time"),
        ("A = T.match_buffer(A_local_shared_tmem", "vp_o", "(T.int64(3) - vp_o)", "other channels"),
        ("A = T.match_buffer(A_local_shared_tmem", "vr_o", "(vr_o + T.int64(1))", "other rows"),
        ("C_local_rf", "i_0 * T.int64(2) + i_1_1", "i_0 * T.int64(2)", "rows of x at a time"),
    ],
)
def test_what_goes_through_tensor_memory_keeps_its_place(buffer, old, new, words):
    of = spec(256, 1024)
    sch = new_schedule(tvm.IRModule({"main": linear_tiles(of)}))
    schedules.decided(sch, of, tensor(128, ctas=2), 3)
    lines = sch.mod["main"].script().splitlines()
    if "i_1_1" in old:
        changed = [line.replace(old, new) for line in lines]
    else:
        changed = [line.replace(old, new) if buffer in line else line for line in lines]
    assert changed != lines
    derive(sch.mod["main"])
    with pytest.raises(LoweringError, match=words):
        derive(tvm.script.from_source("\n".join(changed)))


def test_ctas_of_a_cluster_add_up_one_part_of_a_tile():
    """Three parts, of which two slices have one or two, would come to the same memory."""
    of = spec(128, 1024)
    sch = new_schedule(tvm.IRModule({"main": linear_tiles(of)}))
    schedules.decided(sch, of, tensor(96, ctas=2), 3)
    with pytest.raises(LoweringError, match="add up once"):
        derive(sch.mod["main"])


@pytest.mark.parametrize(
    ("n", "tile", "words"),
    [
        (256, replace(mma(64, 8, 4), multicast=2), "by TMA, for wgmma"),
        (256, wgmma(64, 32, 4, 2, multicast=2), "do not divide K"),
        (256, wgmma(64, 32, 4, blocks=1, multicast=2), "share neither 1 blocks"),
        (192, wgmma(64, 32, 4, multicast=2), "nor 3 tiles of rows of w evenly"),
    ],
)
def test_ctas_that_cannot_load_rows_for_each_other_say_why(n, tile, words):
    of = spec(n, 1024)
    sch = new_schedule(tvm.IRModule({"main": linear_tiles(of)}))
    schedules.decided(sch, of, tile, 3)
    with pytest.raises(LoweringError, match=words):
        derive(sch.mod["main"])
    assert tile.illegal(of, GPU_TARGETS["sm_90a"]) is not None


def test_ctas_that_load_rows_for_each_other_have_the_same_and_neighbouring_tiles():
    of = spec(512, 512)
    sch = new_schedule(tvm.IRModule({"main": linear_tiles(of)}))
    schedules.decided(sch, of, wgmma(64, 32, 4, multicast=2), 3)
    text = sch.mod["main"].script()
    [bound] = re.findall(r"for (\w+) in T.thread_binding\(.*clusterCtaIdx.y", text)
    lines = text.splitlines()
    [at] = [i for i, line in enumerate(lines) if "T.match_buffer(x[" in line]
    name = next(i for i in range(at, 0, -1) if "vi_o = " in lines[i])
    pad = lines[name][: lines[name].index("vi_o")]
    changed = lines[at].replace("vi_o * T.int64(32)", "(vi_o + vc) * T.int64(32)")
    assert changed != lines[at]
    lines[at] = changed
    lines.insert(name, f"{pad}vc = T.axis.spatial(T.int64(2), {bound})")
    with pytest.raises(LoweringError, match="the same rows of x"):
        derive(tvm.script.from_source("\n".join(lines)))
    for inner, outer in ((128, 64), (2, 1), (8, 4)):  # a CTA's tiles follow each other
        old = f"r_0 * T.int64({inner}) + {bound}" + (f" * T.int64({outer})" if outer > 1 else "")
        assert old in text
        text = text.replace(old, f"r_0 * T.int64({outer}) + {bound} * T.int64({4 * outer})")
    with pytest.raises(LoweringError, match="not the innermost"):
        derive(tvm.script.from_source(text))


def test_no_stage_is_overwritten_before_both_ctas_have_read_it():
    """Also where loads are far ahead of one of them: rings of two stages, four interleavings."""
    of, tile, rows = CASES["wgmma, multicast"]
    for seed in range(4):
        run(of, tile, rows, seed=seed, stages=2, ctas=1).judge(LIMITS[of.dtype])


def test_many_rows_are_multicast_and_the_smaller_operand_stays_in_the_cache():
    """As measured on an H200: docs/linear.md, "Many rows"."""
    room = GPU_TARGETS["sm_90a"]
    for n, k, rows, multicast, raster in (
        (4096, 4096, 1536, 1, "rows"),
        (4096, 4096, 2048, 2, "rows"),
        (4096, 14336, 3072, 2, "rows"),
        (4096, 14336, 4096, 2, "cols"),
        (14336, 4096, 4096, 2, "cols"),
        (28672, 4096, 4096, 2, "rows"),
        (2880, 2880, 2048, 1, "rows"),
    ):
        tiles = legal_tiles(spec(n, k), rows, room)
        assert (tiles[0].multicast, tiles[0].raster) == (multicast, raster)
        assert {tile.multicast for tile in tiles} == ({1} if n == 2880 else {1, 2})
        assert {tile.raster for tile in tiles} == {"rows", "cols"}
    more = {"layout": "tiles64e", "act_fmt": "fp8", "fast_accum": True}
    fp8 = Linear(8192, 8192, "mxfp4", "bfloat16", **more)
    for of, multicast in ((fp8, 2), (replace(fp8, fast_accum=False), 1)):
        first = legal_tiles(of, 4096, room)[0]
        assert first.by_bytes
        assert (first.multicast, first.raster) == (multicast, "rows")  # of 1 byte x is smaller


def test_the_cost_model_tells_who_loads_rows():
    facts = []
    for multicast in (1, 2):
        sch = new_schedule(tvm.IRModule({"main": linear_tiles(spec(512, 512))}))
        schedules.decided(sch, spec(512, 512), wgmma(64, 32, 4, multicast=multicast), 3)
        facts.append(decisions(sch))
    assert facts[0] != facts[1]


def test_weights_that_are_read_again_stay_in_the_cache():
    of = spec(512, 512)
    for raster, once in (("rows", "true"), ("cols", "false")):
        text = emit(kernel(of, wgmma(64, 32, 4, raster=raster), 3), "linear")
        assert f"const uint64_t policy = bs_policy({once});" in text


@pytest.mark.parametrize(
    ("tile", "arch", "words"),
    [
        (tensor(64), "sm_90a", "no tcgen05"),
        (tensor(64), "sm_120a", "no tcgen05"),
        (replace(tensor(64), rows=256, warps=8), "sm_100a", "128 rows"),
        (tensor(256, ctas=2), "sm_100a", "in registers at once"),
        (tensor(48), "sm_100a", "are not parts"),
        (tensor(288), "sm_100a", "are not parts"),
        (tensor(256, blocks=8), "sm_100a", "768 columns"),
        (replace(tensor(64), copies="async"), "sm_100a", "as TMA stores them"),
        (tensor(256), "sm_100a", None),
        (tensor(128, ctas=2), "sm_100a", None),
        (wgmma(128, 256, 8, multicast=2), "sm_90a", None),
        (wgmma(128, 128, 8, 2, multicast=2), "sm_90a", "none of which divide K"),
        (wgmma(256, 64, 8, blocks=1, multicast=2), "sm_90a", "1 blocks of a stage"),
        (wgmma(256, 128, 8, multicast=3), "sm_90a", "2 blocks of a stage"),
        (replace(tensor(64), multicast=2), "sm_100a", "for wgmma"),
    ],
)
def test_tiles_of_tensor_memory_that_there_are_not_say_why(tile, arch, words):
    reason = tile.illegal(spec(4096, 4096), GPU_TARGETS[arch])
    assert reason is None if words is None else words in reason


def test_kernels_follow_the_schedule():
    of = spec(256, 1024)
    first = kernel(of, mma(64, 8, 2, 2), 3)
    for tile, stages in ((mma(64, 8, 2, 2), 4), (mma(64, 8, 4), 3), (mma(32, 8, 2, 2), 3)):
        assert emit(kernel(of, tile, stages), "linear") != emit(first, "linear")


def test_activations_are_those_of_the_reference():
    assert ACT["silu"](np.float64(1.0)) == pytest.approx(0.7310585786)
    assert ACT["gelu_tanh"](np.float64(1.0)) == pytest.approx(0.8411919906)


# ---- The search space ---------------------------------------------------------------------------

SIZES = [(512, 7168), (64, 64)]
MORE_SIZES = [(4096, 4096), (2880, 2880), (100, 720), (28672, 4096)]


@pytest.mark.exhaustive
def test_every_tile_of_more_sizes_makes_the_kernel_that_it_says(monkeypatch):
    monkeypatch.setattr("tests.gemm.test_linear_kernel.SIZES", MORE_SIZES)
    for arch in ("sm_90a", "sm_100a", "sm_120a"):
        test_tiles_make_the_kernels_that_they_say(arch, "nvfp4", {}, 1)


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize(
    ("fmt", "more"),
    [
        ("nvfp4", {}),
        ("mxfp4", GATED),
        ("int4", {"group": 128}),
        ("int4", {"group": 32, "zero": True}),
    ],
)
def test_tiles_make_the_kernels_that_they_say(arch, fmt, more, step):
    """Every ``step``-th tile and depth, beginning at another one for each number of rows."""
    for n, k in SIZES if fmt == "nvfp4" else SIZES[:1]:
        of = spec(n, -(-k // 128) * 128 if fmt == "int4" else k, fmt, **more)
        room = GPU_TARGETS[arch]
        for first, rows in enumerate((1, 64, 1000) if fmt == "nvfp4" else (1, 200)):
            tiles = legal_tiles(of, rows, room)
            assert tiles, (n, k, rows)
            points = [(tile, stages) for tile in tiles for stages in depths(of, tile, rows, room)]
            for tile, stages in points[first % step :: step]:
                made = kernel(of, tile, stages)
                said = (tile.rows, tile.tokens, tile.threads, tile.shared(of, stages))
                assert (made.cols_tile, made.rows_tile, made.threads, made.shared) == said
                assert made.shared <= room.cta_shared
                assert (made.warps, made.slices, made.ctas) == (
                    tile.warps,
                    tile.slices,
                    tile.ctas,
                )
                assert (made.multicast, made.fastest) == (tile.multicast, tile.raster)


def test_the_default_fills_the_machine_where_a_tile_can():
    """The first of few rows has CTAs for most SMs, and divides K where rows of w are too few."""
    room = GPU_TARGETS["sm_90a"]
    for n, parts in ((28672, 1), (4096, 2), (512, 8)):
        of = spec(n, 7168)
        for rows in (1, 8):
            first = legal_tiles(of, rows, room)[0]
            assert first.ctas == parts
            assert ctas(of, first, rows) >= (0.8 * room.sms if n > 512 else 64)


def test_many_rows_take_the_width_that_fills_the_sms():
    """As measured on an H200; two stages, where CTAs' sums leave room for no more, were slow."""
    room = GPU_TARGETS["sm_90a"]
    for n, k, rows, best in (
        (4096, 4096, 320, (64, 160, 1)),
        (4096, 14336, 384, (64, 192, 1)),
        (8192, 8192, 384, (128, 192, 1)),
        (14336, 4096, 1024, (256, 152, 1)),
        (28672, 4096, 4096, (256, 152, 1)),
        (512, 7168, 512, (64, 64, 2)),
    ):
        tiles = legal_tiles(spec(n, k), rows, room)
        assert (tiles[0].rows, tiles[0].tokens, tiles[0].ctas) == best
        assert all(depths(spec(n, k), tile, rows, room)[0] > 2 for tile in tiles)


def test_all_that_reads_waits_for_the_kernel_before():
    """A GPU that lets the kernel begin early: warps that load and that multiply wait before."""
    for name in ("slices", "wgmma"):
        of, tile, _ = CASES[name]
        text = emit(kernel(of, tile, 2), "linear")
        multiplies, loads = _roles(text)
        assert multiplies.index("bs_grid_wait();") < multiplies.index("bs_mbar_wait(")
        before, _, after = loads.partition("bs_grid_wait();")
        assert "bs_mbar_wait(" not in before
        assert all("map_x" not in part and "from +" not in part for part in _copies(before))
        assert _copies(before)
        assert any("packed_at" in part for part in _copies(after))
        assert text.index("bs_grid_launch();") < text.index("bs_grid_wait();")


def _copies(text: str) -> list[str]:
    """Return the lines that start copies."""
    return re.findall(r"bs_(?:bulk_load|tma_load_2d<1>)\(.*", text)


@each(name=["slices", "uneven ctas", "wgmma, ctas", "wgmma, 64 rows"], stages=[2, 5])
def test_weights_that_come_ahead_are_not_loaded_again(name, stages, monkeypatch):
    """As many stages as a ring has, or a tile: each is awaited once, and has its bytes once."""
    of, tile, rows = CASES[name]
    monkeypatch.setattr("blockscale.lower.warp.load.AHEAD_BYTES", 1 << 20)
    source = emit(kernel(of, tile, stages), "linear")
    text = compile_cuda_source(source, "sm_90a", ptx=True).image.decode()
    run(of, tile, rows, stages=stages, text=text).judge(LIMITS[of.dtype])


@pytest.mark.parametrize("tile", [wgmma(64, 160, 4), wgmma(256, 64, 8)], ids=str)
def test_half_a_stage_at_the_end_serialises_no_products(tile: LinearTile) -> None:
    """Where K ends with it ptxas had all wgmma wait for each other: 1.2 to 1.4 times the time."""
    made = compile_cuda_source(emit(kernel(spec(2880, 2880), tile, 4), "linear"), "sm_90a")
    assert not made.losses
    assert not any(found["spills"] for found in made.resources)


def test_slots_are_given_back_when_they_were_read():
    """Loads of mma.sync are through, not only issued, before a bulk copy may overwrite them."""
    of, tile, _ = CASES["slices"]
    multiplies, _ = _roles(emit(kernel(of, tile, 2), "linear"))
    before, _, _ = multiplies.partition("bs_mbar_arrive(")
    assert "bs_fence_async();" in before[before.rindex("bs_load16_shared(") :]


def _roles(text):
    """The texts of the warps that multiply and of those that load."""
    begin = text.index("if (warp_id <")
    end = text.index("\n  } else {\n", begin)
    return text[begin:end], text[end:]


@pytest.mark.parametrize(
    ("fmt", "n", "k", "rows", "shape", "stages"),
    [
        ("nvfp4", 28672, 4096, 1, ("mma", 256, 2, 8, 1, 8), 2),
        ("int4", 28672, 4096, 8, ("mma", 128, 2, 4, 1, 8), 2),
        ("nvfp4", 14336, 4096, 8, ("mma", 128, 2, 4, 1, 8), 2),
        ("mxfp4", 8192, 8192, 8, ("mma", 128, 2, 4, 2, 8), 2),
        ("nvfp4", 5120, 2880, 1, ("mma", 128, 2, 4, 2, 8), 2),
        ("nvfp4", 4096, 14336, 8, ("mma", 64, 2, 4, 2, 8), 3),
        ("nvfp4", 2880, 2880, 8, ("mma", 64, 2, 4, 2, 8), 3),
        ("nvfp4", 512, 7168, 8, ("wgmma", 64, 4, 1, 8, 2), 7),
        ("mxfp4", 8192, 8192, 16, ("mma", 128, 2, 4, 2, 8), 3),
        ("nvfp4", 4096, 4096, 16, ("mma", 64, 2, 4, 2, 8), 4),
        ("nvfp4", 7168, 2048, 16, ("wgmma", 64, 4, 1, 2, 2), 8),
        ("nvfp4", 14336, 4096, 16, ("wgmma", 128, 4, 1, 1, 2), 8),
        ("mxfp4", 512, 7168, 64, ("wgmma", 64, 4, 1, 8, 2), 7),
        ("nvfp4", 2048, 4096, 32, ("wgmma", 64, 4, 1, 8, 2), 4),
        ("nvfp4", 2048, 4096, 64, ("wgmma", 64, 4, 1, 4, 2), 4),
        ("int4", 2880, 4096, 64, ("wgmma", 64, 4, 1, 4, 2), 4),
        ("nvfp4", 5120, 2048, 128, ("wgmma", 64, 4, 1, 2, 2), 3),
        ("mxfp4", 6144, 4096, 64, ("wgmma", 64, 4, 1, 2, 2), 4),
        ("nvfp4", 28672, 4096, 32, ("wgmma", 128, 4, 1, 1, 2), 6),
        ("nvfp4", 4096, 14336, 64, ("wgmma", 64, 4, 1, 2, 2), 8),
        ("nvfp4", 14336, 4096, 128, ("wgmma", 128, 8, 1, 1, 2), 5),
    ],
)
def test_defaults_of_few_rows_are_those_that_were_fast_on_an_h200(fmt, n, k, rows, shape, stages):
    """Among some 13,000 tiles of 2026-11-27: docs/linear.md, tuning_logs/linear/sm_90a."""
    of, arch = (
        Linear(n, k, fmt, "bfloat16", 128 if fmt == "int4" else 0, layout="tiles64"),
        "sm_90a",
    )
    tile = legal_tiles(of, rows, GPU_TARGETS[arch])[0]
    found = tile.unit, tile.rows, tile.warps, tile.slices, tile.ctas, tile.blocks_k
    assert found == shape
    assert depths(of, tile, rows, GPU_TARGETS[arch])[0] == stages


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_kin_takes_over_the_tile(activation):
    """Of a tuned layer, whose CTAs load rows for each other."""
    of, tile = spec(256, 512), wgmma(64, 128, 4, multicast=2)
    own = next(w for w in workloads(replace(of, activation=activation), "sm_90a") if w.rows == 2048)
    sch, adopted = Schedule(linear_tiles(of)), Schedule(own.symbolic("sm_90a"))
    schedules.decided(sch, of, tile, 4)
    road(own.spec, "sm_90a").adopt(adopted, own, "sm_90a", sch.mod["main"])
    made = derive(adopted.mod["main"])
    assert (made.multicast, made.cols_tile, made.rows_tile, made.stages) == (2, 64, 128, 4)


def test_kin_without_such_a_tile_keeps_its_default():
    """17 warps decode 128 rows of the weight into bfloat16 alone."""
    of, tile = spec(256, 1024), mma(256, 8, 2, 8, 1, 8)
    assert tile.illegal(of, GPU_TARGETS["sm_90a"]) is None
    half = replace(of, dtype="float16", out_dtype="float16")
    assert tile.illegal(half, GPU_TARGETS["sm_90a"]) is not None
    own = workloads(half, "sm_90a")[0]
    sch, adopted, plain = (Schedule(m) for m in (linear_tiles(of), *[own.symbolic("sm_90a")] * 2))
    schedules.decided(sch, of, tile, 2)
    road(half, "sm_90a").adopt(adopted, own, "sm_90a", sch.mod["main"])
    own.default(plain, "sm_90a")
    assert_structural_equal(adopted.mod, plain.mod)


def test_gates_are_padded_before_tiles_are_counted():
    """130 rows of gates and ups are 4 tiles of 64, which come in pairs."""
    of = spec(130, 512, **GATED)
    assert wgmma(64, 128, 4, multicast=2).illegal(of, GPU_TARGETS["sm_90a"]) is None
