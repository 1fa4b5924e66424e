"""Products of INT4 weights: every layout, zeros, factors and sizes, on the CPU and emulated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import tvm
from tvm.s_tir import Schedule

import blockscale as bs
from blockscale import catalog, emulator
from blockscale.base.index_maps import TRTLLM
from blockscale.base.targets import GPU_TARGETS
from blockscale.building.space import new_schedule, replay, trace_json
from blockscale.catalog import registry
from blockscale.catalog.moe import tile_of
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.schedules.int4 import wgmma
from blockscale.schedules.steps import preferred
from blockscale.specs import Int4Dequantize, Int4Mm, Spec
from blockscale.specs.plans.moe import SMEM_BYTES, MoeTile
from blockscale.tir.int4.forms import MAPS, form_of
from blockscale.tir.int4.tiles import gemm_of, int4_tiles
from tests.kit.gpu_library import library as gpu_library
from tests.kit.helpers import DTYPES, rejects
from tests.kit.kernels import LEVELS, compiled, needs
from tests.kit.pairwise import each, exhaustive, few
from tests.reference import int4 as ref

LAYOUTS = {
    "plain": {},
    "int4_a16": {"sm": 80, "moe": True},
    "int4_a8": {"sm": 89, "activation": "a8", "moe": True},
    "int4_a16_columns": {"sm": 90, "moe": False},
    "int4_a8_columns": {"sm": 90, "activation": "a8", "moe": False},
    "int4_transposed": {"sm": 90, "activation": "a8", "moe": True},
    "rows": {},
}
BOUND = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative error of a row: the result's one rounding, half of an ulp of each number."""

SUMS = 3e-6
"""The same of float32 results: sums of up to 512 float32 products."""


class Weight:
    """A random weight of E experts in NumPy, and as each layout's tensors."""

    def __init__(self, k, n, group, experts=1, zero=None, seed=0, dtype="bfloat16"):
        rng = np.random.default_rng(seed)
        groups = -(-k // group)
        self.k, self.n, self.group = k, n, group
        self.q = rng.integers(-8, 8, (experts, k, n))
        scale = torch.from_numpy(rng.uniform(0.01, 0.1, (experts, groups, n)))
        self.scale_tensor = scale.to(DTYPES[dtype])
        self.scale = self.scale_tensor.double().numpy()
        self.zero_tensor = self.zero = None
        if zero == "point":
            points = rng.integers(0, 17, (experts, groups, n))
            self.zero_tensor = torch.from_numpy(points).to(torch.uint8)
            self.zero = (8 - points) * self.scale
        elif zero == "term":
            self.zero_tensor = torch.from_numpy(rng.normal(0, 0.2, scale.shape)).to(DTYPES[dtype])
            self.zero = self.zero_tensor.double().numpy()

    def plain(self):
        codes = (self.q & 15).astype(np.uint8)
        return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)

    def tensors(self, layout, dense):
        """Return packed, scale, zero and the options that say how they lie."""
        scale, zero = self.scale_tensor, self.zero_tensor
        if layout == "rows":
            codes = (self.q + 8).astype(np.uint8).transpose(0, 2, 1)
            packed = torch.from_numpy(
                np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4)
            )
            scale = scale.transpose(1, 2).contiguous()
            zero = None if zero is None else zero.transpose(1, 2).contiguous()
            options = {"layout": "rows"}
        elif layout == "plain":
            packed, options = self.plain(), {}
        else:
            chosen = LAYOUTS[layout]
            steps = {"int4_transposed": "transpose"}.get(layout, "full")
            steps = "no columns" if layout.endswith("columns") else steps
            activation = "a8" if "a8" in layout else "a16"
            made = ref.preprocess(self.plain().numpy(), activation, 4, steps)
            packed, options = torch.from_numpy(made), {"layout": "preprocessed", **chosen}
        if dense:
            packed, scale = packed[0], scale[0]
            zero = None if zero is None else zero[0]
        return packed, scale, zero, {"group_size": self.group, **options}

    def reference(self, x, expert=0, alpha=1.0, bias=0.0):
        zero = None if self.zero is None else self.zero[expert]
        return ref.product(x, self.q[expert], self.scale[expert], zero, self.group, alpha, bias)


def rows_of(m, k, dtype, seed=0):
    """Return random rows, with an odd size that no tile has."""
    rng = np.random.default_rng(seed + m)
    return torch.from_numpy(rng.normal(0, 1, (m, k)).astype(np.float32)).to(DTYPES[dtype])


def prepared_rows(x, pre, activation):
    """Return x' in float64, by torch's multiplication and our E4M3."""
    if pre is not None:
        x = x * pre.to(x.dtype)
    values = x.double().numpy()
    return ref.to_e4m3(values) if activation == "a8" else values


def judge(got, want, bound):
    """Every row's relative error is below the bound; nothing is NaN."""
    got = got.double().numpy()
    length = np.sqrt((want**2).sum(-1))
    error = np.sqrt(((got - want) ** 2).sum(-1))
    assert np.isfinite(got).all()
    assert (error <= bound * length).all(), (error / length).max()


def layout_options(layout, activation):
    """Whether an activation may go with a layout: the layout's own, where it names one."""
    return layout in ("plain", "rows") or LAYOUTS[layout].get("activation", "a16") == activation


# ---- Layouts -------------------------------------------------------------------------------------


def test_maps_are_those_of_trtllm():
    assert set(MAPS) == {"plain", "rows"} | {n for n in TRTLLM if n.startswith("int4")}
    assert set(MAPS) == set(LAYOUTS)


@pytest.mark.parametrize("lanes", [16, 8, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forms_are_the_index_maps(layout, lanes):
    """Vector, word and slot of every code lie where the index map says."""
    k, n = 256, 256
    form = form_of(layout, k, n, 128, lanes)
    if form is None:
        assert (layout, lanes) in {("int4_a8", 8), ("int4_a8", 4), ("int4_a16", 4)}
        return
    places = set()
    for kk in range(0, k, 37):
        for nn in range(0, n, 5):
            place = MAPS[layout].place((0, kk, nn), (1, k, n))
            slot, lane, vector = place % 8, place // 8 % form.lanes, place // 8 // form.lanes
            places.add(place)
            if form.along == "n":
                assert (vector // (n // form.columns), vector % (n // form.columns)) == (
                    kk,
                    nn // form.columns,
                )
                assert nn % form.columns == lane * 8 + slot
                continue
            inner, rest = vector % form.inner, vector // form.inner
            step, band = rest % (k // form.span), rest // (k // form.span)
            share = form.lanes // form.columns
            assert kk == step * form.span + form.rows(slot, lane)
            assert nn == (band * form.inner + inner) * form.columns + lane // share
    assert len(places) == len(range(0, k, 37)) * len(range(0, n, 5))


@pytest.mark.parametrize(
    ("layout", "k", "n"),
    few([*((layout, 256, 256) for layout in LAYOUTS), ("plain", 128, 66), ("rows", 96, 66)]),
)
def test_every_code_is_exact(layout, k, n):
    """One-hot rows read every weight back, bit for bit: all codes, in all places."""
    weight = Weight(k, n, 32 if k == 96 else 128, seed=3)
    weight.scale_tensor = torch.ones_like(weight.scale_tensor)
    packed, scale, _, options = weight.tensors(layout, dense=True)
    activation = options.pop("activation", "a16")
    got = bs.int4.linear(
        torch.eye(k, dtype=torch.bfloat16), packed, scale, activation=activation, **options
    )
    assert torch.equal(got.double(), torch.from_numpy(weight.q[0]).double())


# ---- One weight ----------------------------------------------------------------------------------

CASES = [
    # layout, k, n, group, dtype, activation, zero
    ("plain", 256, 256, 128, "bfloat16", "a16", None),
    ("plain", 256, 128, 32, "float32", "a16", "term"),
    ("plain", 384, 128, 64, "float16", "a8", "point"),
    ("plain", 200, 64, 96, "bfloat16", "a16", "term"),  # a shorter last group
    ("plain", 60, 14, 60, "float16", "a16", "point"),  # no vectors; a scale per column
    ("rows", 256, 64, 128, "bfloat16", "a16", "point"),
    ("rows", 192, 34, 64, "float32", "a8", "term"),
    ("int4_a16", 512, 64, 128, "bfloat16", "a16", "point"),
    ("int4_a16", 256, 128, 64, "float16", "a16", None),
    ("int4_a8", 256, 64, 128, "bfloat16", "a8", "term"),
    ("int4_a8", 128, 64, 64, "float16", "a8", None),  # no vectors of half a tile
    ("int4_a16_columns", 256, 64, 256, "float32", "a16", "term"),
    ("int4_a8_columns", 256, 64, 128, "float16", "a8", "point"),
    ("int4_transposed", 256, 64, 128, "bfloat16", "a8", None),
]


@pytest.mark.parametrize(
    ("layout", "k", "n", "group", "dtype", "activation", "zero"), few(CASES, every=3), ids=str
)
def test_linear(layout, k, n, group, dtype, activation, zero):
    """Ragged rows, with all factors and with none, prepared and not."""
    weight = Weight(k, n, group, zero=zero, dtype="float32" if dtype == "float32" else dtype)
    packed, scale, zeros, options = weight.tensors(layout, dense=True)
    options["activation"] = activation
    rng = np.random.default_rng(1)
    pre = torch.from_numpy(rng.uniform(0.5, 2, k)).to(DTYPES[dtype])
    bias = torch.from_numpy(rng.normal(0, 1, n)).float()
    more = {"pre_quant_scale": pre, "alpha": 0.625, "bias": bias}
    made = bs.int4.prepare(packed, scale, zeros, **more, **options)
    for m in (0, 1, 3, 17, 130):
        x = rows_of(m, k, dtype)
        got = bs.int4.linear(x, packed, scale, zeros, **options, out_dtype=torch.float32)
        assert (got.dtype, got.shape) == (torch.float32, (m, n))
        judge(got, weight.reference(prepared_rows(x, None, activation)), SUMS)
        want = weight.reference(prepared_rows(x, pre, activation), 0, 0.625, bias.double().numpy())
        full = bs.int4.linear(x, made, out_dtype=torch.float32)
        judge(full, want, SUMS)
        again = bs.int4.linear(x, packed, scale, zeros, **more, **options, out_dtype=torch.float32)
        assert torch.equal(full, again)


@each(layout=["plain", "rows", "int4_a16", "int4_a8"], level=LEVELS)
def test_every_level(layout, level):
    """What is compiled for other CPUs is right, too, where this one can run it."""
    spec = Int4Mm(128, 128, 128, "bfloat16", "float32", 0, layout, "a16", "term")
    weight = Weight(128, 128, 128, zero="term", seed=5)
    packed, scale, zero, _ = weight.tensors(layout, dense=False)
    if layout == "rows":
        scale, zero = (v.transpose(1, 2).contiguous() for v in (scale, zero))
    kernel = compiled(spec, level)
    needs(level)
    for m in (1, 5, 17):
        x, out = rows_of(m, 128, "bfloat16"), torch.full((m, 128), float("nan"))
        one = torch.ones(1)
        kernel(
            *(x, packed.view(1, -1), scale.float(), zero.float(), torch.ones(1, 128), one),
            *(torch.zeros(1, 128), out),
        )
        judge(out, weight.reference(x.double().numpy()), SUMS)


def test_act_order():
    """Groups of scattered columns: x is brought into their order."""
    weight = Weight(128, 32, 32, zero="point", seed=7)
    index = np.random.default_rng(0).permutation(np.arange(128) // 32)
    packed, scale, zero, options = weight.tensors("rows", dense=True)
    x, pre = rows_of(5, 128, "float32"), torch.rand(128) + 0.5
    got = bs.int4.linear(
        x, packed, scale, zero, group_index=torch.from_numpy(index), pre_quant_scale=pre, **options
    )
    w = weight.q[0] * weight.scale[0][index] + weight.zero[0][index]
    judge(got, (x * pre).double().numpy() @ w, SUMS)


def test_leading_dimensions_and_outputs():
    weight = Weight(64, 16, 64)
    packed, scale, _, options = weight.tensors("plain", dense=True)
    x = rows_of(6, 64, "bfloat16").view(2, 3, 64)
    out = torch.full((2, 3, 16), float("nan"), dtype=torch.float16)
    got = bs.int4.linear(x, packed, scale, out_dtype=torch.float16, out=out, **options)
    assert got is out
    judge(out.view(6, 16), weight.reference(x.view(6, 64).double().numpy()), 2.0**-11 + SUMS)
    one = bs.int4.linear(x[0, 0], packed, scale, **options)
    assert one.shape == (16,)


def test_saturation():
    """E4M3 saturates at 448, rounds to even, and keeps NaN."""
    weight = Weight(64, 16, 64, dtype="float32")
    packed, scale, _, options = weight.tensors("plain", dense=True)
    x = torch.zeros(3, 64)
    x[0, :6] = torch.tensor([1e6, -500.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
    x[1, 0], x[2, 0] = float("inf"), float("nan")
    got = bs.int4.linear(x, packed, scale, activation="a8", **options)
    row = np.zeros((2, 64))
    row[0, :6] = [448, -448, 16, 20, 0, 2 * 2.0**-9]
    row[1, 0] = 448
    judge(got[:2], weight.reference(row), SUMS)
    assert got[2].isnan().all()


def test_compiled_by_torch():
    """A recorded call does what a call does."""
    weight = Weight(64, 16, 32, experts=2, zero="term")
    packed, scale, zero, options = weight.tensors("plain", dense=False)
    made = bs.int4.prepare(packed, scale, zero, **options)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    x = rows_of(5, 64, "bfloat16")

    def twice(x):
        return 2 * bs.int4.grouped_mm(x, made, offsets=offsets)

    assert torch.equal(torch.compile(twice, fullgraph=True, backend="aot_eager")(x), twice(x))


# ---- Experts -------------------------------------------------------------------------------------


@each(layout=["plain", "int4_a16", "rows", "int4_transposed"], own=[False, True])
def test_grouped(layout, own):
    """Experts without rows, rows of none, factors of each expert."""
    weight = Weight(256, 64, 128, 4, "point", seed=2)
    packed, scale, zero, options = weight.tensors(layout, dense=False)
    activation = options.pop("activation", "a16")
    rng = np.random.default_rng(3)
    pre = torch.from_numpy(rng.uniform(0.5, 2, (4, 256) if own else 256)).bfloat16()
    alpha = torch.from_numpy(rng.uniform(0.5, 2, 4)).float()
    bias = torch.from_numpy(rng.normal(0, 1, (4, 64))).bfloat16()
    more = {"pre_quant_scale": pre, "alpha": alpha, "bias": bias, "activation": activation}
    for ends in ([0, 0, 3, 3, 20], [1, 5, 5, 60, 62], [0, 0, 0, 0, 1], [2, 2, 2, 2, 2]):
        m = ends[-1] + 2
        x, offsets = rows_of(m, 256, "bfloat16"), torch.tensor(ends, dtype=torch.int32)
        out = torch.full((m, 64), float("nan"), dtype=torch.bfloat16)
        bs.int4.grouped_mm(x, packed, scale, offsets, zero, out=out, **more, **options)
        assert out[: ends[0]].isnan().all()
        assert out[ends[-1] :].isnan().all()
        for e in range(4):
            mine = slice(ends[e], ends[e + 1])
            rows = prepared_rows(x[mine], pre[e] if own else pre, activation)
            want = weight.reference(rows, e, float(alpha[e]), bias[e].double().numpy())
            judge(out[mine], want, BOUND["bfloat16"] + SUMS)


def test_no_rows():
    weight = Weight(64, 16, 64, 2)
    packed, scale, _, options = weight.tensors("plain", dense=False)
    offsets = torch.zeros(3, dtype=torch.int32)
    x = torch.empty(0, 64, dtype=torch.bfloat16)
    assert bs.int4.grouped_mm(x, packed, scale, offsets, **options).shape == (0, 16)


# ---- What is refused -----------------------------------------------------------------------------


@cache
def plain_one():
    return Weight(64, 16, 32, zero="point").tensors("plain", dense=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 32).bfloat16()}, (r"x has shape \[2, 32\]", "K=64")),
        ({"x": torch.zeros(2, 64).double()}, ("x has dtype float64",)),
        ({"x": None}, ("x is missing",)),
        ({"scale": torch.ones(2, 8)}, (r"scale has shape \[2, 8\]", r"\[2, 16\]")),
        ({"scale": None}, ("scale is missing",)),
        ({"zero": torch.ones(2, 8)}, (r"zero has shape \[2, 8\]",)),
        ({"group_size": 0}, ("group_size=0", "positive")),
        ({"layout": "tiles"}, ("layout='tiles' is not known",)),
        ({"activation": "a4"}, ("activation='a4' is not known",)),
        ({"packed": torch.zeros(2, 64, 8).byte()}, ("2 dimensions", "grouped_mm")),
        ({"packed": torch.zeros(0, 8).byte()}, ("none of them 0",)),
        ({"pre_quant_scale": torch.ones(16)}, ("pre_quant_scale has shape", r"\[64\]")),
        ({"bias": torch.ones(8)}, (r"bias has shape \[8\]", r"\[16\]")),
        ({"alpha": torch.ones(2)}, (r"alpha has shape \[2\]", "the whole product")),
        ({"alpha": "1"}, ("alpha is a str, not a number",)),
        ({"out_dtype": torch.int8}, ("out_dtype=torch.int8 cannot be produced",)),
        ({"out": torch.zeros(2, 8).bfloat16()}, (r"out has shape \[2, 8\]",)),
        ({"group_index": torch.zeros(64).int()}, ("only a dense weight in layout 'rows'",)),
        ({"layout": "preprocessed", "sm": 89, "activation": "a8"}, ("K=64", "multiple of 128")),
        ({"layout": "preprocessed", "sm": 81}, ("sm=81 is not known",)),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_refused(change, words):
    packed, scale, zero, options = plain_one()
    given = {"x": torch.zeros(2, 64).bfloat16(), "packed": packed, "scale": scale, "zero": zero}
    with rejects("int4.linear", *words):
        bs.int4.linear(**(given | options | change))


def test_overlap():
    packed, scale, zero, options = plain_one()
    memory = torch.zeros(2, 64).bfloat16()
    with rejects("out overlaps x"):
        bs.int4.linear(memory, packed, scale, zero, out=memory.view(-1)[:32].view(2, 16), **options)


def test_refused_with_experts():
    weight = Weight(64, 16, 32, 2)
    packed, scale, _, options = weight.tensors("plain", dense=False)
    x, offsets = torch.zeros(4, 64).bfloat16(), torch.tensor([0, 2, 4], dtype=torch.int32)
    made = bs.int4.prepare(packed, scale, **options)
    for ends in ([0, 3, 2], [-1, 2, 4], [0, 2, 5]):
        with rejects("offsets is", "must rise from 0 or more to at most 4"):
            bs.int4.grouped_mm(x, made, offsets=torch.tensor(ends, dtype=torch.int32))
    with rejects("offsets has shape", r"\[3\]"):
        bs.int4.grouped_mm(x, made, offsets=offsets[:2])
    with rejects("offsets is missing"):
        bs.int4.grouped_mm(x, made)
    with rejects("the weight has 2 experts; call int4.grouped_mm"):
        bs.int4.linear(x, made)
    with rejects("the weight is prepared, but scales"):
        bs.int4.grouped_mm(x, made, scale, offsets)
    with rejects("activation='a8' is given, but the weight was prepared for 'a16'"):
        bs.int4.grouped_mm(x, made, offsets=offsets, activation="a8")
    with rejects("group_size=48 does not divide K=64"):
        bs.int4.grouped_mm(x, packed, scale, offsets, group_size=48)
    with rejects("packed has shape", "3 dimensions", "int4.linear takes one weight"):
        bs.int4.grouped_mm(x, packed[0], scale[0], offsets)
    with rejects("alpha has shape", r"\[2\]", "each expert"):
        bs.int4.grouped_mm(x, packed, scale, offsets, alpha=torch.ones(3), **options)
    with rejects("x has shape", r"\[rows, 64\]"):
        bs.int4.grouped_mm(x[None], made, offsets=offsets)


def test_refused_group_index():
    packed, scale, _, options = Weight(64, 16, 32).tensors("rows", dense=True)
    for index, words in (
        (torch.zeros(32).int(), ("group_index has shape", r"\[64\]")),
        (torch.zeros(64).int(), ("does not give every group 32 of K=64",)),
    ):
        with rejects("int4.prepare", *words):
            bs.int4.prepare(packed, scale, group_index=index, **options)


def test_refused_for_cuda():
    packed, scale, zero, options = plain_one()
    with rejects("dtype=torch.float32 has no kernel on CUDA"):
        bs.int4.prepare(packed, scale, zero, dtype=torch.float32, target="cuda", **options)
    with rejects("scale has a magnitude of 39936", "below 32768"):
        bs.int4.prepare(packed, scale * 0 + 40000, zero, target="cuda", **options)
    with rejects("zero has points from 0 to 17", "from 0 to 16"):
        wrong = zero.clone()
        wrong[0, 0], wrong[0, 1] = 17, 0
        bs.int4.prepare(packed, scale, wrong, target="cuda", **options)
    with rejects("group_size=16 of K=64 has no kernel on CUDA"):
        some = torch.ones(4, 16)
        bs.int4.prepare(packed, some, target="cuda", group_size=16)
    with rejects("target='gpu' is not known"):
        bs.int4.prepare(packed, scale, zero, target="gpu", **options)
    made = bs.int4.prepare(packed, scale, zero, target="cuda", **options)
    with rejects("the weight was prepared for cuda, but x is on cpu"):
        bs.int4.linear(torch.zeros(1, 64).bfloat16(), made)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n": 15}, ("n=15 is odd",)),
        ({"k": 0}, ("k=0 is not a positive integer",)),
        ({"layout": "rows", "k": 65}, ("k=65 is odd",)),
        ({"experts": 2000}, ("experts=2000", "divide")),
        ({"layout": "tiles64", "group": 48}, ("k=64 in groups of 48 has no CUDA kernel",)),
        ({"layout": "tiles64", "group": 64, "dtype": "float32"}, ("x of float32",)),
        ({"zero": "maybe"}, ("zero='maybe'",)),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_refused_specs(values, words):
    with rejects("Int4Mm", *words):
        Int4Mm(**({"n": 16, "k": 64, "group": 32} | values))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("order", [False, True])
def test_rows_come_back(rng, target, group, points, order):
    """Codes, scales, zeros and the order of groups are those given, also out of tiles of CUDA."""
    n, k = 72, 256
    codes = torch.from_numpy(rng.integers(0, 256, (n, k // 2)).astype(np.uint8))
    scale = torch.from_numpy(rng.uniform(0.01, 0.1, (n, k // group))).bfloat16()
    zero = torch.from_numpy(rng.integers(0, 17, scale.shape).astype(np.uint8)) if points else None
    index = torch.from_numpy(rng.permutation(np.arange(k) // group)).int() if order else None
    smooth, bias = torch.from_numpy(rng.uniform(0.5, 2, k)).bfloat16(), torch.ones(n)
    made = bs.int4.prepare(
        *(codes, scale, zero),
        layout="rows",
        group_size=group,
        group_index=index,
        pre_quant_scale=smooth,
        bias=bias,
        target=target,
    )
    rows = made.to_rows()
    assert torch.equal(rows.packed, codes)
    assert torch.equal(rows.scale, scale.float())
    assert torch.equal(rows.pre_quant_scale.float(), smooth.float())
    assert torch.equal(rows.bias, bias)
    for found, given in ((rows.zero, zero), (rows.group_index, index)):
        assert (found is None) == (given is None)
        assert given is None or torch.equal(found, given)


def test_rows_that_do_not_come_back():
    weight = Weight(64, 16, 32, 2)
    packed, scale, zero, options = weight.tensors("plain", dense=False)
    with pytest.raises(ValueError, match=r"to_rows: layout='plain', experts=2.* prepare"):
        bs.int4.prepare(packed, scale, zero, **options).to_rows()


def test_names():
    """Every spec is what its name says."""
    for spec in (
        Int4Mm(16, 64, 32),
        Int4Mm(16, 64, 32, "float16", "float32", 3, "int4_a16_columns", "a8", "term"),
        Int4Mm(64, 64, 64, "float16", "float16", 3, "tiles64", "a8", "point", True),
        Int4Dequantize(16, 64, 32, "float16", "rows", "point"),
    ):
        assert Spec.parse(spec.name) == spec
        assert Spec.from_json(spec.to_json()) == spec


def test_no_kernel_there():
    with pytest.raises(TypeError, match="layout tiles64, that of CUDA kernels"):
        catalog.exported(Int4Mm(64, 64, 64, layout="tiles64"), "avx2", {})
    with pytest.raises(TypeError, match="no kernel of int4_mm for sm_80"):
        catalog.cuda_source(Int4Mm(64, 64, 64, layout="tiles64"), "sm_80", {})
    with pytest.raises(TypeError, match="layout 'plain', which GPU kernels do not read"):
        catalog.cuda_source(Int4Mm(64, 64, 64), "sm_90a", {})


# ---- Hopper, emulated ----------------------------------------------------------------------------

MMA, WGMMA = ("mma", 8, 32, 4, 4, 2), ("wgmma", 64, 64, 1, 2, 3)
TCGEN05 = ("tcgen05", 64, 128, 2, 2, 3)


def emulated(monkeypatch, weight, layout, dtype, m, shape, ends=None, **more):
    """Return out of a weight's CUDA kernel with one plan, and its launches."""
    packed, scale, zero, options = weight.tensors(layout, dense=ends is None)
    made = bs.int4.prepare(
        *(packed, scale, zero), dtype=DTYPES[dtype], target="cuda", **more, **options
    )
    spec = Int4Mm(
        *(weight.n, weight.k, made.group, dtype, dtype, made.experts, "tiles64"),
        *(made.activation, made.zeros, made.pre_quant_scale is not None),
    )

    unit, tokens, high, slices, blocks, stages = shape
    arch = "sm_100a" if unit == "tcgen05" else "sm_90a"
    tile = MoeTile(unit, high, tokens, slices, blocks)
    sch = Schedule(tvm.IRModule({"main": int4_tiles(spec)}))
    wgmma.int4_mm(sch, preferred, spec, tile, (stages,))
    body = sch.mod["main"]
    one = replace(catalog.road(spec, arch), bodies=lambda *_: [(None, body)])
    monkeypatch.setitem(registry.ROADS, (Int4Mm, "cuda"), one)
    library = gpu_library([spec], arch, repr(shape))
    x = rows_of(m, weight.k, dtype)
    out = torch.full((m, weight.n), float("nan"), dtype=DTYPES[dtype])
    size = spec.workspace_bytes(m)
    guarded = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
    offsets = () if ends is None else (torch.tensor(ends, dtype=torch.int32),)
    pre = () if made.pre_quant_scale is None else (made.pre_quant_scale,)
    inputs = (x, *offsets, made.packed, made.scale, *pre, made.alpha, made.bias, out)
    with pytest.raises(ValueError, match=rf"workspace has {size - 1} bytes, but {size} are needed"):
        emulator.run_module(library, spec.name, *inputs, guarded[: size - 1], target=arch)
    run = emulator.run_module(
        library, spec.name, *inputs, guarded[:size], target=arch, multiprocessors=3
    )
    run.check()
    for report in run.reports:  # tiles multiply rows that they lack, and store none
        assert not [h for h in report.hazards if h.kind != "uninitialised read"]
    assert (guarded[size:] == 0xFF).all()
    return x, out, [launch.kernel.rpartition("_")[2] for launch in run.launches]


ROUNDED = {"bfloat16": 5e-3, "float16": 7e-4}
"""Weights and results are rounded to 16 bits: relative error of a row."""


@pytest.mark.parametrize(
    ("layout", "group", "dtype", "zero", "shape"),
    [
        pytest.param("plain", 128, "bfloat16", None, MMA, marks=exhaustive),
        ("int4_a16", 64, "float16", "point", MMA),
        ("rows", 128, "bfloat16", "term", WGMMA),
        pytest.param("int4_a16_columns", 128, "float16", "term", MMA, marks=exhaustive),
        ("plain", 256, "bfloat16", "point", WGMMA),  # groups of two blocks of scales
        ("rows", 128, "float16", "term", TCGEN05),
    ],
)
def test_emulated_dense(monkeypatch, layout, group, dtype, zero, shape):
    """x is read as it is, in one kernel; N is no whole block."""
    n = 64 if layout.startswith("int4") else 70
    weight = Weight(256, n, group, zero=zero, dtype=dtype)
    more = {"alpha": 0.5, "bias": torch.linspace(-2, 2, n)}
    m = 11 if shape == MMA else 140  # three tiles, the last one of 12 rows
    x, out, kernels = emulated(monkeypatch, weight, layout, dtype, m, shape, **more)
    want = weight.reference(x.double().numpy(), 0, 0.5, more["bias"].double().numpy())
    judge(out, want, ROUNDED[dtype])
    assert kernels == ["kernel0"]


@pytest.mark.parametrize(
    ("group", "dtype", "zero", "shape", "k", "activation", "each"),
    [
        (32, "bfloat16", "term", MMA, 96, "a16", True),  # x is permuted, K padded
        (128, "float16", "point", WGMMA, 256, "a8", False),
        (64, "bfloat16", "term", TCGEN05, 192, "a16", False),
        (64, "bfloat16", None, MMA, 128, "a8", True),
    ],
)
def test_emulated_experts(monkeypatch, group, dtype, zero, shape, k, activation, each):
    """Experts without rows, rows of none; x multiplied and rounded before the product."""
    weight = Weight(k, 64, group, 3, zero, dtype=dtype)
    rng = np.random.default_rng(4)
    pre = torch.from_numpy(rng.uniform(0.5, 2, (3, k) if each else k)).to(DTYPES[dtype])
    alpha = torch.from_numpy(rng.uniform(0.5, 2, 3)).float()
    bias = torch.from_numpy(rng.normal(0, 1, (3, 64))).float()
    more = {"pre_quant_scale": pre, "alpha": alpha, "bias": bias, "activation": activation}
    ends = [1, 1, 12, 27]
    given = monkeypatch, weight, "plain", dtype, 30, shape, ends
    x, out, kernels = emulated(*given, **more)
    assert kernels == ["prepare", "kernel0"]
    assert out[:1].isnan().all()
    assert out[27:].isnan().all()
    for e in range(3):
        mine = slice(ends[e], ends[e + 1])
        rows = prepared_rows(x[mine], pre[e] if each else pre, activation)
        want = weight.reference(rows, e, float(alpha[e]), bias[e].double().numpy())
        judge(out[mine], want, ROUNDED[dtype])


def test_tiles_are_legal():
    """Every bucket of real sizes has kernels to choose from, on every architecture."""
    for n, k, experts in ((4096, 4096, 0), (28672, 4096, 0), (64, 128, 0), (2048, 2048, 64)):
        spec = Int4Mm(n, k, 128, experts=experts, layout="tiles64")
        for arch in ("sm_90a", "sm_100a", "sm_120a"):
            found = catalog.workloads(spec, arch)
            limits = [workload.limit(arch) for workload in found]
            assert limits[-1] is None
            assert limits[:-1] == sorted(limits[:-1])
            for workload in found:
                sketches = workload.sketches(arch)
                tiles = [sketch.keywords["tile"] for sketch in sketches]
                gemm = gemm_of(spec)
                assert all(tile.illegal(gemm) is None for tile in tiles)
                assert all(
                    tile.shared(gemm, depth) <= SMEM_BYTES
                    for tile, sketch in zip(tiles, sketches, strict=True)
                    for depth in sketch.keywords["stages"]
                )
                others = {"sm_90a": {"mma", "wgmma"}, "sm_100a": {"mma", "tcgen05"}}
                assert {tile.unit for tile in tiles} <= others.get(arch, {"mma"})


def test_tiles_of_one_weight_fill_the_machine():
    """Few rows of x: the highest tiles that make a CTA for most SMs; many: wgmma."""
    gemm, arch = gemm_of(Int4Mm(28672, 4096, 128, layout="tiles64")), GPU_TARGETS["sm_90a"]
    few, small = wgmma.dense_tiles(gemm, 8, arch)[0], gemm_of(Int4Mm(512, 4096, layout="tiles64"))
    assert (few.unit, few.rows, few.tokens) == ("mma", 128, 8)
    assert wgmma.dense_tiles(gemm, 8, GPU_TARGETS["sm_120a"])[0].rows == 64
    assert wgmma.dense_tiles(small, 8, arch)[0].rows == 16
    assert wgmma.dense_tiles(gemm, 4096, arch)[0].unit == "wgmma"
    # As measured on an H200: higher tiles of fewer rows of x, less so where zeros are subtracted.
    for zero, rows, high in (("none", 128, 128), ("point", 128, 64), ("point", 256, 128)):
        own = gemm_of(Int4Mm(4096, 4096, zero=zero, layout="tiles64"))
        assert wgmma.dense_tiles(own, rows, arch)[0].rows == high


@pytest.mark.parametrize(
    ("rows", "unit", "tokens"), [(8, "mma", 8), (64, "mma", 64), (4096, "tcgen05", 256)]
)
def test_tiles_of_one_weight_on_blackwell(rows, unit, tokens):
    """tcgen05 where its tiles fill the SMs."""
    own = gemm_of(Int4Mm(4096, 4096, 128, layout="tiles64"))
    first = wgmma.dense_tiles(own, rows, GPU_TARGETS["sm_100a"])[0]
    assert (first.unit, first.tokens) == (unit, tokens)


@pytest.mark.parametrize("level", few(["sm_90a", "sm_120a", "sm_100a"]))
def test_every_sketch_is_lowered(level):
    """The kernel that is derived has the sketch's tile; a trace of it is replayed."""
    for spec in (
        Int4Mm(256, 512, 128, zero="term", layout="tiles64"),
        Int4Mm(320, 448, 64, "float16", "float16", 3, "tiles64", zero="point"),
    ):
        for workload in catalog.workloads(spec, level)[::3]:
            for sketch in workload.sketches(level)[:2]:
                sch = new_schedule(workload.mod(level))
                sketch(sch, preferred)
                made = derive(sch.mod["main"])
                assert tile_of(made) == sketch.keywords["tile"]
                assert made.stages == sketch.keywords["stages"][0]
                again = replay(workload.symbolic(level), trace_json(sch.trace))
                assert emit(derive(again.mod["main"]), "mm") == emit(made, "mm")
