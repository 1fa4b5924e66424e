"""The small kernels of an MoE layer in the emulator: sort, permute, quantise, combine, route.

Outputs start as a pattern that no kernel writes, so that what is missing or too much is seen.
"""

from functools import cache

import numpy as np
import pytest

from blockscale import emulator
from blockscale.lower.moe import small as moe_small
from blockscale.lower.nvcc import compile_cuda_source
from tests.kit.pairwise import each, few
from tests.reference import core as ref
from tests.reference import moe as moe

UNWRITTEN = 0x5A5A5A5A
SORT_SHARED = 8 * 32
"""Bytes of shared memory of the sort beside its counts."""


@cache
def ptx(source):
    return compile_cuda_source(source, "sm_90a", ptx=True).image.decode()


def launch(source, entry, grid, block, args, **options):
    report = emulator.launch(ptx(source), entry=entry, grid=grid, block=block, args=args, **options)
    report.check()
    assert not report.hazards, "\n".join(map(str, report.hazards))


def bits(values, dtype):
    """The 16-bit codes of numbers of ``dtype``."""
    if dtype == "bfloat16":
        return ref.bf16_bits(np.asarray(values, np.float32)).astype(np.uint16)
    return np.asarray(values, np.float16).view(np.uint16)


def decode(codes, dtype):
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return codes.view(np.float16).astype(np.float64)


def ceil_to(value, step):
    return -(-value // step) * step


def k_order(cols):
    """Channel at each position of rows of ``cols`` channels, a multiple of 64."""
    found = np.empty(cols, np.int64)
    for p in range(cols):
        base, j, r = p // 64 * 64, p % 64 // 16, p % 16
        channel = 16 * (r // 2) + 4 * j + r % 2 if r < 8 else 16 * (r // 2 - 4) + 4 * j + 2 + r % 2
        found[p] = base + channel
    return found


def most_blocks(slots, experts, tokens):
    """The bound that the host uses: experts that have rows have 1 too many, all others are full."""
    used = min(slots, experts)
    return (slots + used * (tokens - 1)) // tokens


class Prepared:
    """What prepare makes of ids [T, top_k] and hidden [T, cols]."""

    def __init__(self, ids, hidden, experts, tokens=(8, 64), act_fmt=None, scale=None, **options):
        dtype = options.pop("dtype", "bfloat16")
        rows, top_k = ids.shape
        cols = hidden.shape[1]
        pitch = ceil_to(cols, 64)
        one = tokens[0] == tokens[1]
        self.slots = rows * top_k
        self.order = np.full(self.slots + 8, UNWRITTEN, np.int32)
        self.tables, self.counts = [], []
        for size in tokens:
            most = most_blocks(self.slots, experts, size)
            self.tables.append(np.full((most + 1, 4), UNWRITTEN, np.int32))
            self.counts.append(np.full(4, UNWRITTEN, np.int32))
        self.x = np.full((rows + 1, pitch), 0x5A5A, np.uint16)
        self.row_scale = np.full(rows + 1, -1, np.float32)
        factor = None if scale is None else np.array([scale], np.float32)
        coded = options.pop("coded", False)
        given = moe.coded_rows(hidden, act_fmt, scale) if coded else bits(hidden, dtype)
        second = (None, None) if one else (self.tables[1], self.counts[1])
        args = [
            *(ids, given, factor, self.order, self.tables[0], self.counts[0]),
            *(*second, self.x, self.row_scale, int(ids.dtype == np.int64), experts, top_k),
            *(rows, cols, pitch, *tokens),
        ]
        many = options.pop("many", False)
        text = moe_small.prepare_source("prepare", dtype, act_fmt, many=many, coded=coded)
        source = moe_small.HEADER + text
        shared = SORT_SHARED + 4 * (33 if many else 32) * experts
        grid = options.pop("grid", 16 if many else 3)
        launch(source, "prepare", grid, 1024, args, dynamic_smem=shared, **options)


def check_sort(got, ids, experts, tokens):
    """Order and tables are those of a stable sort by expert."""
    flat = ids.reshape(-1)
    valid = np.flatnonzero((flat >= 0) & (flat < experts))
    want = valid[np.argsort(flat[valid], kind="stable")]
    assert (got.order[: len(want)] == want).all()
    assert (got.order[len(want) :] == UNWRITTEN).all()
    count = np.bincount(flat[valid].astype(np.int64), minlength=experts)
    start = np.cumsum(count) - count
    for table, made, size in zip(got.tables, got.counts, tokens, strict=True):
        entries = []
        for e in range(experts):
            own, first = int(count[e]), len(entries)
            blocks = -(-own // size)
            each = ceil_to(-(-own // blocks), 8) if blocks else 0
            for i in range(blocks):
                rows = min(each, own - i * each)
                assert 0 < rows <= size
                entries.append((e << 16 | rows, start[e] + i * each, first, blocks))
        assert (made[:2] == (len(entries), len(want))).all()
        assert (made[2:] == UNWRITTEN).all()
        assert (table[: len(entries)] == np.array(entries, np.int64).reshape(-1, 4)).all()
        assert (table[len(entries) :] == UNWRITTEN).all()


NO_ROWS = np.zeros((0, 64))


def hidden_of(tokens, cols=64, dtype="bfloat16"):
    return moe.random_hidden(tokens, cols, dtype, seed=cols)


# ------------------------------------------------------------------------------------------- sort
FEW_SLOTS = [(1, 1, 1), (1, 128, 8), (4, 256, 8)]
MANY_SLOTS = [(17, 8, 2), (17, 128, 4), (300, 256, 8), (300, 5, 3)]


@each(
    sizes=[*FEW_SLOTS, *MANY_SLOTS],
    kind=moe.ROUTINGS,
    dtype=[np.int32, np.int64],
)
def test_sort(sizes, kind, dtype):
    """Few slots (one warp) and many, of every kind of routing; int32 and int64."""
    tokens, experts, top_k = sizes
    ids, _ = moe.random_routing(tokens, experts, min(top_k, experts), kind)
    got = Prepared(ids.astype(dtype), hidden_of(tokens), experts)
    check_sort(got, ids, experts, (8, 64))


def test_sort_of_many_equals():
    """More blocks of an expert than a thread writes alone, and 1024 experts."""
    for experts, top_k, tokens in ((4, 2, 700), (1024, 3, 400)):
        ids, _ = moe.random_routing(tokens, experts, top_k, "one_expert")
        got = Prepared(ids.astype(np.int32), hidden_of(tokens), experts, (16, 24))
        check_sort(got, ids, experts, (16, 24))


@each(kind=moe.ROUTINGS, sizes=[(3, 4, 2), (500, 128, 8), (3000, 256, 3)])
def test_sort_by_a_cluster(kind, sizes):
    """Slots of eight CTAs: fewer than warps, of some CTAs, of all; more experts than a warp."""
    tokens, experts, top_k = sizes
    ids, _ = moe.random_routing(tokens, experts, top_k, kind)
    got = Prepared(ids.astype(np.int32), hidden_of(tokens), experts, (8, 24), many=True)
    check_sort(got, ids, experts, (8, 24))


def test_sort_of_a_whole_pass():
    """8192 tokens of 18 choices: threads hold more ranks than they load at a time."""
    ids, _ = moe.random_routing(8192, 32, 18, "half_dropped")
    got = Prepared(ids.astype(np.int32), hidden_of(8192), 32, many=True)
    check_sort(got, ids, 32, (8, 64))


def test_ids_of_64_bits_are_not_cut():
    """2^32 is no expert, though its low half is."""
    ids = np.array([[1 << 32, 2], [-1 << 32, (1 << 63) - 1]], np.int64)
    got = Prepared(ids, hidden_of(2), 4)
    assert got.order[0] == 1
    assert (got.counts[0][:2] == 1).all()


def test_one_table():
    """GEMMs with tiles of equal size share the table."""
    ids, _ = moe.random_routing(50, 8, 2)
    got = Prepared(ids, hidden_of(50), 8, (16, 16))
    assert (got.tables[1] == UNWRITTEN).all()
    got.tables[1], got.counts[1] = got.tables[0], got.counts[0]
    check_sort(got, ids, 8, (16, 16))


def test_bound_of_blocks():
    """The bound is met where each expert has a row more than full blocks, and never passed."""
    rng = np.random.default_rng(0)
    for tokens in (8, 16, 128):
        for experts in (1, 8, 100):
            for slots in (1, 7, 500):
                count = np.bincount(rng.integers(0, experts, slots), minlength=experts)
                assert (-(-count // tokens)).sum() <= most_blocks(slots, experts, tokens)
        worst = np.array([1, tokens + 1, 3 * tokens + 1])
        assert (-(-worst // tokens)).sum() == most_blocks(worst.sum(), 3, tokens)


# ---------------------------------------------------------------------------------------- permute
@each(sizes=[(1, 64), (17, 2880), (5, 16), (200, 96)], dtype=["bfloat16", "float16"])
def test_permute(sizes, dtype):
    """Every channel is where its position says, padding is zero, nothing else is written."""
    tokens, cols = sizes
    ids, _ = moe.random_routing(tokens, 4, 1)
    hidden = hidden_of(tokens, cols, dtype)
    got = Prepared(ids, hidden, 4, dtype=dtype)
    order = k_order(got.x.shape[1])
    padded = np.zeros((tokens, len(order)))
    padded[:, :cols] = hidden
    assert (decode(got.x[:-1], dtype) == padded[:, order]).all()
    assert (got.x[-1] == 0x5A5A).all()


def quantized(x, act_fmt, scale):
    """x as it is stored, and the factors of rows, from the reference."""
    whole = moe.qdq(x, act_fmt, scale)
    factor = np.full(len(x), np.float32(1 if scale is None else scale))
    if act_fmt == "fp8":
        factor = np.abs(x).max(1).astype(np.float32) / np.float32(448)
    with np.errstate(invalid="ignore"):
        return np.where(factor[:, None] == 0, 0, whole / factor[:, None].astype(np.float64)), factor


SCALES = {"fp8": None, "fp8_tensor": 0.013, "nvfp4": 0.0011, "mxfp4": None, "mxfp8": None}


def holds_scales(act_fmt, dtype, **_):
    """Whether numbers of ``dtype`` hold what is quantised."""
    return dtype == "bfloat16" or not act_fmt.startswith("mx")


@each(
    act_fmt=[*SCALES],
    sizes=[(6, 2880), (1, 64), (7, 96)],
    dtype=["bfloat16", "float16"],
    legal=holds_scales,
)
def test_quantized_rows(act_fmt, sizes, dtype):
    """Before GEMM 1: codes times block scales, and the factors of rows; a row of zeros."""
    tokens, cols = sizes
    ids, _ = moe.random_routing(tokens, 4, 1)
    hidden = hidden_of(tokens, cols, dtype)
    if tokens > 2:
        hidden[1], hidden[2] = 0, hidden[2] * 128
    got = Prepared(ids, hidden, 4, act_fmt=act_fmt, scale=SCALES[act_fmt], dtype=dtype)
    order = k_order(got.x.shape[1])
    want, factor = quantized(hidden, act_fmt, SCALES[act_fmt])
    padded = np.zeros((tokens, len(order)))
    padded[:, :cols] = want
    assert (got.row_scale[:-1] == factor).all()
    np.testing.assert_allclose(decode(got.x[:-1], dtype), padded[:, order], 1e-12)
    assert (got.x[-1] == 0x5A5A).all()


@each(
    act_fmt=["fp8", "nvfp4"],
    sizes=[(7, 96), (6, 2880), (1, 64)],
    dtype=["bfloat16", "float16"],
)
def test_coded_rows(act_fmt, sizes, dtype):
    """Rows that are codes and scales already: as test_quantized_rows, by other loads."""
    tokens, cols = sizes
    ids, _ = moe.random_routing(tokens, 4, 1)
    hidden = hidden_of(tokens, cols, dtype)
    if tokens > 2:
        hidden[1], hidden[2] = 0, hidden[2] * 128
    form = {"act_fmt": act_fmt, "scale": SCALES[act_fmt], "dtype": dtype}
    got, own = Prepared(ids, hidden, 4, coded=True, **form), Prepared(ids, hidden, 4, **form)
    assert (got.row_scale == own.row_scale).all()
    assert (decode(got.x[:-1], dtype) == decode(own.x[:-1], dtype)).all()  # zeros have no sign
    assert (got.x[-1] == 0x5A5A).all()


@each(
    act_fmt=[*SCALES],
    sizes=[(5, 64), (3, 2880)],
    dtype=["bfloat16", "float16"],
    legal=holds_scales,
)
def test_requantized_rows(act_fmt, sizes, dtype):
    """Between the GEMMs: permuted rows in place, as many as there are."""
    rows, cols = sizes
    hidden = hidden_of(rows + 2, cols, dtype)
    y = bits(hidden[:, k_order(cols)], dtype)
    row_scale = np.full(rows + 2, -1, np.float32)
    scale, count = SCALES[act_fmt], np.array([99, rows], np.int32)
    factor = None if scale is None else np.array([scale], np.float32)
    source = moe_small.HEADER + moe_small.requantize_source("requantize", dtype, act_fmt)
    before = y.copy()
    launch(source, "requantize", 2, 256, [y, factor, row_scale, count, cols])
    want, factors = quantized(hidden[:rows], act_fmt, scale)
    assert (row_scale[:rows] == factors).all()
    assert (row_scale[rows:] == -1).all()
    np.testing.assert_allclose(decode(y[:rows], dtype), want[:, k_order(cols)], 1e-12)
    assert (y[rows:] == before[rows:]).all()


# ---------------------------------------------------------------------------------------- combine
@each(
    sizes=[(1, 1, 64), (17, 11, 96), (5, 8, 2880)],
    kind=["random", "half_dropped", "dropped"],
    dtype=["bfloat16", "float16"],
    placed=[False, True],
)
def test_combine(sizes, kind, dtype, placed):
    """Weighted rows in float32, in order; rows of dropped slots are NaN and do not count.

    Placed, rows are found by a table, which is not read for dropped slots.
    """
    tokens, top_k, cols = sizes
    ids, weights = moe.random_routing(tokens, 16, top_k, kind)
    valid = (ids >= 0) & (ids < 16)
    z = hidden_of(tokens * top_k, cols, dtype)
    codes = bits(z, dtype)
    codes[~valid.reshape(-1)] = 0x7FFF
    place = None
    if placed:
        place = np.random.default_rng(0).permutation(len(codes)).astype(np.int32)
        moved = np.empty_like(codes)
        moved[place] = codes
        codes = moved
        place[~valid.reshape(-1)] = 2**30
    out = np.full((tokens + 1, cols), 0x5A5A, np.uint16)
    source = moe_small.HEADER + moe_small.combine_source("combine", dtype, placed=placed)
    grid = -(-tokens * cols // 8 // 256)
    args = [codes, ids, weights, place, out, 1, 16, top_k, tokens, cols]
    launch(source, "combine", grid, 256, args)
    want = np.zeros((tokens, cols), np.float32)
    for j in range(top_k):
        part = weights[:, j, None].astype(np.float64) * z.reshape(tokens, top_k, cols)[:, j]
        want = np.where(valid[:, j, None], (want + part).astype(np.float32), want)
    assert (decode(out[:-1], dtype) == ref.round_to(want, dtype)).all()
    assert (out[-1] == 0x5A5A).all()


# ------------------------------------------------------------------------------------------ route
def route(logits, top_k, dtype="float32", scoring="softmax", norm=True, bias=None, groups=(1, 1),
          scale=1.0):  # fmt: skip
    """Ids and weights of the kernel."""
    rows, experts = logits.shape
    constants = {
        "EXPERTS": experts, "TOP_K": top_k, "SIGMOID": scoring == "sigmoid", "NORM": norm,
        "BIAS": bias is not None, "GROUPS": groups[0], "KEPT": groups[1],
    }  # fmt: skip
    source = moe_small.ROUTE_HEADER + moe_small.route_source("route", dtype, constants)
    ids = np.full((rows + 1, top_k), UNWRITTEN, np.int32)
    weights = np.full((rows + 1, top_k), -1, np.float32)
    stored = logits.astype(np.float32) if dtype == "float32" else bits(logits, dtype)
    shift = None if bias is None else bias.astype(np.float32)
    launch(source, "route", -(-rows // 4), 128, [stored, shift, scale, ids, weights, rows])
    assert (ids[-1] == UNWRITTEN).all()
    assert (weights[-1] == -1).all()
    return ids[:-1], weights[:-1]


ROUTES = (
    {"experts": 1, "top_k": 1},
    {"experts": 8, "top_k": 2, "norm": False},
    {"experts": 128, "top_k": 8, "dtype": "bfloat16"},
    {"experts": 100, "top_k": 4, "dtype": "float16", "bias": True},
    {"experts": 256, "top_k": 8, "scoring": "sigmoid", "bias": True, "groups": (8, 4)},
    {"experts": 160, "top_k": 6, "groups": (8, 3), "norm": False, "scale": 16.0},
    {"experts": 1024, "top_k": 10, "scoring": "sigmoid"},
    {"experts": 48, "top_k": 5, "scoring": "sigmoid", "bias": True, "groups": (16, 5)},
    {"experts": 90, "top_k": 40, "norm": False, "groups": (45, 33)},
    {"experts": 384, "top_k": 64, "scoring": "sigmoid", "bias": True, "scale": 2.5},
)


@pytest.mark.parametrize("case", few(ROUTES), ids=lambda case: "-".join(map(str, case.values())))
def test_route(case):
    """Ids and weights of all scorings, with bias and groups, are those of the float64 reference."""
    case = dict(case)
    experts, top_k = case.pop("experts"), case.pop("top_k")
    rng = np.random.default_rng(experts)
    dtype, groups = case.get("dtype", "float32"), case.get("groups", (1, 1))
    logits = ref.round_to(3 * rng.standard_normal((19, experts)), dtype).astype(np.float64)
    bias = rng.uniform(-0.4, 0.4, experts).astype(np.float32) if case.pop("bias", False) else None
    ids, weights = route(logits, top_k, bias=bias, **case)
    want, want_weights = moe.moe_route(
        logits,
        top_k,
        scoring=case.get("scoring", "softmax"),
        renormalize=case.get("norm", True),
        correction_bias=bias,
        n_group=groups[0],
        topk_group=groups[1],
        scale=case.get("scale", 1.0),
    )
    assert (ids == want).all()
    np.testing.assert_allclose(weights, want_weights, 1e-6)


def test_equal_choices():
    """Of equal choices the lower expert comes first, of equal groups the lower one."""
    logits = np.zeros((3, 64))
    logits[1, [40, 9, 33]] = 2
    ids, weights = route(logits, 4, groups=(4, 2))
    assert (ids == [[0, 1, 2, 3], [9, 33, 40, 0], [0, 1, 2, 3]]).all()
    np.testing.assert_allclose(weights.sum(1), 1, 1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 4)])
def test_logits_that_are_no_finite_numbers(scoring, groups):
    """NaN, of either sign, is the lowest number, infinities the largest; as on a CPU."""
    logits = np.zeros((4, 16), np.float32)
    logits[0, 3], logits[1, [2, 5]] = np.nan, (-np.inf, 1)
    logits[2:] = np.array([0xFFFFFFFF], np.uint32).view(np.float32)
    logits[3, 5] = np.inf
    ids, weights = route(logits, 4, scoring=scoring, groups=groups)
    assert (ids == [[0, 1, 2, 4], [5, 0, 1, 3], [0, 1, 2, 3], [5, 0, 1, 2]]).all()
    np.testing.assert_allclose(weights[0], 0.25, rtol=1e-6)
    np.testing.assert_allclose(weights[2], 0.25 if scoring == "softmax" else 0, rtol=1e-6)
    np.testing.assert_allclose(weights[3], [1, 0, 0, 0], atol=1e-6)
    shift = np.zeros(16, np.float32)
    shift[[1, 7]] = np.nan, np.inf
    ids, _ = route(logits[:1], 15, scoring=scoring, bias=shift)
    assert ids[0, 0] == 7
    assert 1 not in ids


def test_groups_with_bias_count_their_two_best():
    """One large choice in a group is less than two good ones."""
    logits, bias = np.zeros((1, 32)), np.zeros(32)
    bias[3], bias[8:10], bias[17:19] = 0.9, 0.6, -0.1
    ids, _ = route(logits, 2, scoring="sigmoid", bias=bias, groups=(4, 1))
    assert (ids == [[8, 9]]).all()
    ids, _ = route(logits, 2, scoring="sigmoid", bias=bias)
    assert (ids == [[3, 8]]).all()
