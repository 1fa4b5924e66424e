"""MoE layers whose GEMMs multiply codes by codes: built for tcgen05, all of a call emulated.

The stages are judged one by one, from what the workspace holds after the call, each against float64
on what the stage before it wrote: so a code that falls on the other side of a tie counts once.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

import blockscale as bs
from blockscale import emulator
from blockscale.catalog import cuda_source, road, workloads
from blockscale.catalog import moe as catalog_moe
from blockscale.catalog.gemm import lowering
from blockscale.catalog.moe import PARTS
from blockscale.lower.moe.codes import sources
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.schedules.steps import sampled
from blockscale.specs import FusedMoe, GroupedMmFp4, Spec
from blockscale.specs.moe import GATED
from tests.kit.gpu_library import library
from tests.kit.moe_harness import prepared, values
from tests.kit.pairwise import covering, exhaustive, few
from tests.moe.test_moe_library import Call, layer_of
from tests.reference import core as ref
from tests.reference import moe as moe

ARCH = "sm_100a"


def spec_of(experts: int, hidden: int, intermediate: int, top_k: int, **more: Any) -> FusedMoe:
    """A layer of the kind."""
    sizes = experts, hidden, intermediate, top_k
    return FusedMoe(*sizes, **{"act_fmt": "nvfp4", "layout": "128x4", **more})


def parts_of(call: Call) -> dict[str, np.ndarray]:
    """The parts of a call's workspace, as bytes."""
    spec, slots = call.spec, call.ids.size
    found, at = {}, 0
    for part in spec.workspace:
        size = part.size(len(call.ids), slots, min(slots, spec.experts))
        found[part.name] = call.workspace[at : at + size].numpy()
        at += size
    assert at == len(call.workspace)
    return found


class Stages:
    """What the kernels of a call left behind."""

    def __init__(self, call: Call) -> None:
        self.call, self.spec, self.parts = call, call.spec, parts_of(call)
        spec, slots = self.spec, call.ids.size
        self.offsets = self.parts["offsets"].view(np.int32)[: spec.experts + 1]
        self.order = self.parts["order"].view(np.int32)[: self.offsets[-1]]
        self.place = self.parts["place"].view(np.int32)[:slots]

    def operand(self, name: str, cols: int, padded: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes [rows, cols] and scale bytes [rows, blocks] of a part; padding is zeros."""
        rows, eight = len(self.order), self.spec.act_fmt == "mxfp8"
        pitch, blocks = padded if eight else padded // 2, padded // self.spec.group
        codes = self.parts[name][: rows * pitch].reshape(rows, pitch)
        codes = codes if eight else ref.unpack(codes)
        assert (codes[:, cols:] == 0).all()
        stored, found, at = self.parts[f"{name}_scale"], [], 0
        for first, end in pairwise(self.offsets):
            tiles = -(-(end - first) // 128)
            own = stored[at : at + tiles * 128 * blocks].reshape(tiles * 128, blocks)
            found.append(ref.unswizzle(own, end - first, blocks))
            at += tiles * 128 * blocks
        return codes[:, :cols], np.concatenate(found)[:, : cols // self.spec.group]

    def factor(self, number: int) -> float:
        """The static scale of the rows before a GEMM."""
        given = (self.call.layer.a1_scale, self.call.layer.a2_scale)[number - 1]
        return 1.0 if given is None else float(np.float32(given))

    def judge(self) -> None:
        """Compare all stages."""
        call, spec = self.call, self.spec
        flat = call.ids.reshape(-1)
        used = np.nonzero((flat >= 0) & (flat < spec.experts))[0]
        assert sorted(self.order) == sorted(used)
        counts = np.bincount(flat[used], minlength=spec.experts)
        np.testing.assert_array_equal(np.diff(self.offsets), counts)
        assert (np.diff(flat[self.order]) >= 0).all()
        np.testing.assert_array_equal(self.place[self.order], np.arange(len(self.order)))
        x = call.hidden[self.order // spec.top_k]
        codes, byte = self.operand("x", spec.hidden, spec.padded_hidden)
        want_codes, want_byte = moe.codes_of(x, spec.act_fmt, self.factor(1))
        np.testing.assert_array_equal(byte, want_byte)
        np.testing.assert_array_equal(codes, want_codes)
        left = moe.coded(codes, byte, spec.act_fmt, self.factor(1))
        own = self.operand("y1", spec.intermediate, spec.padded_intermediate)
        self._between(left, *own)
        self._after(moe.coded(*own, spec.act_fmt, self.factor(2)))

    def _products(self, left: np.ndarray, weight: int, bias: Any) -> np.ndarray:
        """Each expert's rows times its ``weight``: 0 is w13, 1 is w2."""
        rows = self.call.layer.w13.shape[1] if weight == 0 else self.spec.hidden
        made = [np.empty((0, rows))]
        for e, (first, end) in enumerate(pairwise(self.offsets)):
            if end > first:  # a real layer's experts fill the memory, all in float64
                product = left[first:end] @ self.call.layer.expert(e).dense()[weight][0].T
                made.append(product + (0 if bias is None else bias[e].astype(np.float64)))
        return np.concatenate(made)

    def _between(self, left: np.ndarray, codes: np.ndarray, byte: np.ndarray) -> None:
        """Codes of the activation: those of float64, but next to a tie."""
        layer, spec = self.call.layer, self.spec
        product = self._products(left, 0, layer.w13_bias)
        h = moe.activate(product, layer.activation, layer.alpha, layer.limit)
        h = ref.round_to(h, spec.dtype)
        want_codes, want_byte = moe.codes_of(h, spec.act_fmt, self.factor(2))
        same = byte == want_byte
        assert (np.abs(byte.astype(int) - want_byte) <= 1).all()
        alike = np.repeat(same, spec.group, axis=1)
        top = 0x80 if spec.act_fmt == "mxfp8" else 8
        sign, low = (codes ^ want_codes) & top, top - 1
        steps = np.abs((codes & low).astype(int) - (want_codes & low))
        small = (codes & low == 0) & (want_codes & low == 0)
        assert ((sign == 0) | small | (steps <= 1))[alike].all()
        assert (steps[alike] <= 1).all()
        if codes.size:
            assert same.mean() > 0.98
            assert (steps == 0)[alike].mean() > 0.99
            assert len(np.unique(codes)) > 8

    def _after(self, middle: np.ndarray) -> None:
        """Rows of GEMM 2 within its rounding, and the sums of each token's rows."""
        call, layer, spec = self.call, self.call.layer, self.spec
        want = self._products(middle, 1, layer.w2_bias)
        rows = len(self.order)
        stored = self.parts["y2"][: rows * spec.hidden * 2].view(np.uint16)
        got = values(stored.reshape(rows, spec.hidden), spec.dtype)
        if rows:
            assert ref.row_error(got, want).max() <= (4e-3 if spec.dtype == "bfloat16" else 5e-4)
        total = np.zeros((len(call.ids), spec.hidden), np.float32)
        for j in range(spec.top_k):
            valid = (call.ids[:, j] >= 0) & (call.ids[:, j] < spec.experts)
            at = self.place.reshape(call.ids.shape)[valid, j]
            factor = call.weights[valid, j, None].astype(np.float64)
            total[valid] = (factor * got[at] + total[valid]).astype(np.float32)
        out = call.out.float().numpy()
        np.testing.assert_array_equal(out, ref.round_to(total, spec.dtype))


def run(
    spec: FusedMoe, tokens: int, routing: str = "random", seed: int = 0, arch: str = ARCH
) -> Call:
    """Judge a call; return it."""
    call = Call(spec, tokens, routing, seed)
    if not tokens:
        call.workspace = call.workspace[:0]
        args = call.arguments()
        made = emulator.run_module(library([spec], arch), spec.name, *args, target=arch)
        assert not made.launches
        return call
    call(library([spec], arch), arch)
    hazards = [h for report in call.run.reports for h in report.hazards]
    assert not hazards, "\n".join(map(str, hazards[:5]))
    Stages(call).judge()
    return call


PLAIN = spec_of(4, 128, 64, 2)


@pytest.mark.parametrize(
    ("tokens", "routing"),
    [(1, "random"), (7, "half_dropped"), (33, "one_expert"), (100, "each_its_own"), (5, "dropped")],
)
def test_tokens(tokens: int, routing: str) -> None:
    """Every stage, whoever gets the tokens; tokens without experts get zeros."""
    call = run(PLAIN, tokens, routing)
    names = [launch.kernel.removeprefix(f"{PLAIN.name}_") for launch in call.run.launches]
    kinds = [name.partition("_kernel")[0] for name in names]
    assert kinds == ["prepare", "gather", "gemm1", "gemm2", "combine"]
    assert [launch.programmatic for launch in call.run.launches] == [
        False,
        True,
        False,
        False,
        True,
    ]
    if routing == "dropped":
        assert (call.out == 0).all()


MXFP8: dict[str, Any] = {"fmt": "mxfp4", "act_fmt": "mxfp8"}
SPECS = (
    spec_of(3, 192, 128, 3, activation="swiglu_oai", bias=True),
    spec_of(4, 144, 80, 2, activation="gelu_tanh", dtype="float16"),
    spec_of(3, 160, 96, 2, activation="gelu_tanh", bias=True, **MXFP8),
    spec_of(3, 160, 96, 2, fmt="mxfp4", act_fmt="mxfp4"),
    *(
        pytest.param(spec, marks=exhaustive, id=spec.name)
        for spec in (
            spec_of(8, 272, 176, 2, activation="gelu_tanh", dtype="float16"),
            spec_of(3, 288, 160, 2, fmt="mxfp4", act_fmt="mxfp4"),
            spec_of(3, 64, 320, 1, bias=True, dtype="float16"),
            spec_of(4, 256, 128, 2, activation="gelu_tanh", **MXFP8),
        )
    ),
)


@pytest.mark.parametrize("spec", few(SPECS), ids=lambda spec: getattr(spec, "name", None))
def test_activations(spec: FusedMoe) -> None:
    """Biases, other dtypes, sizes that fill no tile."""
    run(spec, 40, "half_dropped")


@pytest.mark.parametrize(
    "spec",
    few([SPECS[0], PLAIN, SPECS[1], spec_of(3, 160, 96, 2, **MXFP8)], every=4),
    ids=["swiglu_oai", "swiglu", "gelu_tanh", "mxfp8"],
)
def test_nans_stay(spec: FusedMoe) -> None:
    """A token with a NaN has a row of NaNs, whatever limits its gates; others do not."""
    call, same = Call(spec, 9), Call(spec, 9)
    call.hidden[4, 3] = np.nan
    for each in (call, same):
        each(library([spec], ARCH), ARCH)
    others = np.arange(9) != 4
    assert call.out[4].isnan().all()
    assert torch.equal(call.out[others], same.out[others])


@pytest.mark.always
def test_experts_without_rows() -> None:
    """One of several has none, another exactly a tile; and there is only one."""
    call = Call(PLAIN, 129)
    call.ids[:] = [0, 3]
    call.ids[128] = [2, 3]
    call(library([PLAIN], ARCH), ARCH)
    assert list(Stages(call).offsets) == [0, 128, 128, 129, 258]
    Stages(call).judge()
    run(spec_of(1, 64, 64, 1), 40)


def test_many_slots() -> None:
    """More than one CTA sorts, in a cluster; the largest bucket."""
    spec = spec_of(2, 64, 64, 2)
    call = Call(spec, 2051, "dropped")
    used = [0, 1, 1000, 2049, 2050]
    call.ids[used, 0] = [0, 1, 1, 0, 1]
    call.ids[used, 1] = [1, -1, 0, 1, 0]
    call(library([spec], ARCH), ARCH)
    assert call.run.launches[0].kernel.endswith("prepare_many")
    Stages(call).judge()


def sigmoid(x: np.ndarray) -> np.ndarray:
    """As a GPU approximates it in float32: __expf is a power of two, each step rounded."""
    with np.errstate(over="ignore"):
        power = np.exp2((-x * np.float32(1.4426950408889634)).astype(np.float64))
    power = power.astype(np.float32)
    return (1 / (np.float32(1) + power).astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize(
    ("fmt", "act_fmt"), [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), MXFP8.values()]
)
def test_codes_are_those_of_kernels_in_turn(fmt: str, act_fmt: str) -> None:
    """Bit for bit: float32 sums of `grouped_mm_fp4`; factors, activation, rounding, quantising."""
    spec = spec_of(3, 160, 96, 2, fmt=fmt, act_fmt=act_fmt)
    call = run(spec, 40, "half_dropped")
    stages, parts, made = Stages(call), parts_of(call), call.made
    rows, n, k = len(stages.order), spec.padded_rows, spec.padded_hidden
    gemm = GroupedMmFp4(spec.experts, n, k, spec.product, "float32")
    x = parts["x"][: rows * k // (1 if act_fmt == "mxfp8" else 2)].reshape(rows, -1)
    tiles = sum(-(-int(count) // 128) for count in np.diff(stages.offsets))
    scales = parts["x_scale"][: tiles * 128 * k // spec.group].reshape(tiles * 128, -1)
    d, ends = np.full((rows, n), np.nan, np.float32), stages.offsets.copy()
    given = x, made.w13, scales, made.w13_scale, ends, None, d
    emulator.run_module(library([gemm], ARCH), gemm.name, *given, target=ARCH).check()
    found = d.reshape(rows, n // 32, 2, 16).transpose(2, 0, 1, 3).reshape(2, rows, n // 2)
    expert = np.repeat(np.arange(spec.experts), np.diff(stages.offsets))
    factors = made.w13_global.numpy()[expert] * np.float32(stages.factor(1))
    gate, up = (half * factors[:, i, None] for i, half in enumerate(found))
    h = ref.round_to(gate * sigmoid(gate) * up, spec.dtype)[:, : spec.intermediate]
    want_codes, want_byte = moe.codes_of(h, act_fmt, stages.factor(2))
    codes, byte = stages.operand("y1", spec.intermediate, spec.padded_intermediate)
    np.testing.assert_array_equal(byte, want_byte)
    np.testing.assert_array_equal(codes, want_codes)


def test_numbers() -> None:
    """Alpha and limit are those of the call; scales that are not given are 1."""
    spec = SPECS[0]
    for alpha, limit in ((1.0, 0.5), (3.0, 2.0)):
        call = Call(spec, 9, alpha=alpha, limit=limit)(library([spec], ARCH), ARCH)
        Stages(call).judge()
    call = Call(PLAIN, 9)
    call.layer.a1_scale, kept = 1.0, call.layer.a1_scale
    try:
        given = call.arguments()
        given[9] = None  # a1_scale
        run_of = emulator.run_module(
            library([PLAIN], ARCH), PLAIN.name, *given, target=ARCH, multiprocessors=3
        )
        run_of.check()
        Stages(call).judge()
    finally:
        call.layer.a1_scale = kept


def test_what_the_workspace_held() -> None:
    """Whatever it was, results are the same."""
    outs = []
    for fill in (0x00, 0x7F):  # and 0xFF everywhere else
        call = Call(PLAIN, 9, "half_dropped")
        call.workspace.fill_(fill)
        outs.append(call(library([PLAIN], ARCH), ARCH).out)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_too_small_a_workspace() -> None:
    """The last byte is needed, and nothing is written without it."""
    call = Call(PLAIN, 5)
    args = call.arguments()
    args[-1] = args[-1][:-1]
    with pytest.raises(ValueError, match=r"workspace has \d+ bytes, but \d+ are needed for 5 rows"):
        emulator.run_module(library([PLAIN], ARCH), PLAIN.name, *args, target=ARCH)
    assert call.out.isnan().all()


@pytest.mark.parametrize("spec", few([PLAIN, SPECS[2]]), ids=["nvfp4", "mxfp8"])
def test_a_cpu_gives_the_same_numbers(spec: FusedMoe) -> None:
    """From the same prepared weights, up to ties of the codes between GEMMs; float64 too."""
    call = run(spec, 33)
    call.judge(0.08, 0.012)
    static = (call.layer.a1_scale, call.layer.a2_scale) if spec.static_scales else (None, None)
    y = bs.fused_moe(
        torch.from_numpy(call.hidden.astype(np.float32)).bfloat16(),
        call.made.to_linear(),
        torch.from_numpy(call.ids.astype(np.int32)),
        torch.from_numpy(call.weights),
        activation=spec.activation,
        act_fmt=spec.act_fmt,
        a1_scale=None if static[0] is None else torch.tensor([static[0]], dtype=torch.float32),
        a2_scale=None if static[1] is None else torch.tensor([static[1]], dtype=torch.float32),
    )
    error = ref.row_error(call.out.float().numpy(), y.double().numpy())
    assert error.max() < 0.08
    assert np.median(error) < 6e-3


# ---- Weights, and what is refused ---------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("bias", [False, True])
def test_weights_go_and_come_back(fmt: str, bias: bool) -> None:
    """Bytes and biases of `to_linear` are what was given; of sizes that are padded too."""
    layer = layer_of(spec_of(3, 160, 96, 2, bias=bias, fmt=fmt, act_fmt=fmt))
    made = prepared(layer, "bfloat16", "128x4")
    linear = made.to_linear()
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        np.testing.assert_array_equal(getattr(linear, name).numpy(), getattr(layer, name))
    if bias:
        np.testing.assert_array_equal(linear.w13_bias.numpy(), layer.w13_bias)
        gates = made.w13_bias.reshape(3, 8, 2, 16)[:, :, 0].reshape(3, 128)
        np.testing.assert_array_equal(gates[:, :96].numpy(), layer.w13_bias[:, :96])
        assert (gates[:, 96:] == 0).all()
    again = type(made).of(made.meta(), dict(made.tensors()))
    assert again.layout == "128x4"
    assert torch.equal(again.w13, made.w13)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_weights_that_have_no_such_layout(activation: str) -> None:
    """Those without gates, and those that tensor cores do not multiply as codes."""
    fmt = "nvfp4" if activation == "relu2" else "int4"
    layer = moe.random_layer(2, 64, 64, fmt, activation=activation)
    message = "weights without gates" if fmt == "nvfp4" else "int4"
    with pytest.raises(ValueError, match=f"gated weights in nvfp4 or mxfp4.* not for {message}"):
        prepared(layer, "bfloat16", "128x4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act_fmt": None}, "act_fmt=None; choose one of nvfp4 with nvfp4, mxfp4 with mxfp4"),
        ({"fmt": "mxfp4"}, "fmt='mxfp4' with act_fmt='nvfp4'"),
        ({"fmt": "mxfp4", "act_fmt": "mxfp8", "dtype": "float16"}, "'float16' cannot hold"),
        ({"activation": "relu2"}, "activation='relu2' has no kernel with layout='128x4'"),
        ({"hidden": 72}, "hidden"),
        ({"hidden": 48, "act_fmt": "mxfp8", "layout": "tiles64"}, "hidden"),
        ({"dtype": "float32"}, "dtype='float32' has no kernel with layout='128x4'"),
    ],
)
def test_specs_that_there_are_not(changes: dict[str, Any], message: str) -> None:
    given = {"experts": 4, "hidden": 128, "intermediate": 64, "top_k": 2, "act_fmt": "nvfp4"}
    with pytest.raises(ValueError, match=message):
        FusedMoe(**({"layout": "128x4"} | given | changes))


def test_other_gpus() -> None:
    """Kernels are for GPUs whose tensor cores multiply codes."""
    with pytest.raises(TypeError, match="sm_90a, which has no block-scaled tensor cores"):
        road(PLAIN, "sm_90a")
    tags = [workload.tag for workload in workloads(PLAIN, ARCH)]
    assert tags[:2] == [f"{PLAIN.name}_gemm1_m64", f"{PLAIN.name}_gemm2_m64"]
    assert Spec.parse(PLAIN.name) == PLAIN


LAYERS: list[Any] = [
    FusedMoe(128, 2048, 768, 8, act_fmt="nvfp4", layout="128x4"),
    spec_of(128, 2880, 2880, 4, activation="swiglu_oai", bias=True, **MXFP8),
]


@pytest.mark.parametrize(
    ("spec", "arch"),
    [
        (LAYERS[0], "sm_100a"),
        (LAYERS[1], "sm_103a"),
        pytest.param(LAYERS[0], "sm_103a", marks=exhaustive),
        pytest.param(LAYERS[1], "sm_100a", marks=exhaustive),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_real_layers_do_not_spill(spec: FusedMoe, arch: str) -> None:
    """Default kernels of Qwen3-30B-A3B and gpt-oss-120b, all buckets."""
    used = compile_cuda_source(cuda_source(spec, arch, {}).device, arch).resources
    assert len([kernel for kernel in used if "gemm" in str(kernel["name"])]) >= 4
    assert all(kernel["spills"] == 0 for kernel in used)


# ---- Other schedules, other sizes ---------------------------------------------------------------

KINDS = [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8")]


def layer_drawn(rng: Random, seed: int) -> FusedMoe:
    """A layer of random sizes."""
    fmt, act_fmt = KINDS[seed % 3]
    step = 32 if fmt == "mxfp4" else 16
    sizes = rng.choice([2, 3, 4]), step * rng.randint(2, 20), step * rng.randint(2, 20)
    kind = {"fmt": fmt, "act_fmt": act_fmt, "bias": rng.random() < 0.5}
    return spec_of(*sizes, rng.choice([1, 2]), activation=rng.choice(GATED), **kind)


def drawn(seed: int, arch: str = ARCH) -> tuple[FusedMoe, list[Schedule]]:
    """A layer of random sizes, and a random point of the space of each of its GEMMs."""
    rng = Random(seed)
    spec = layer_drawn(rng, seed)
    found = []
    for part in PARTS:
        own = [workload for workload in workloads(spec, arch) if workload.part == part]
        workload = rng.choice(own)
        sch = Schedule(workload.symbolic(arch), seed=rng.randint(1, 10**6))
        rng.choice(workload.sketches(arch))(sch, sampled)
        found.append(sch)
    return spec, found


def run_points(spec: FusedMoe, found: list[Schedule], seed: int, arch: str = ARCH) -> Call:
    """Judge a call of the kernels of two scheduled GEMMs; return it."""
    first, second = ([(None, sch.mod["main"])] for sch in found)
    rng = Random(seed + 10**6)
    with pytest.MonkeyPatch.context() as patch:
        made = sources(first, second, spec, arch, lowering(arch))
        own = {"bodies": lambda *_: [], "lower": lambda *_: made}  # no default schedules
        patch.setattr(catalog_moe, "CODES", replace(catalog_moe.CODES, **own))
        path = library([spec], arch, hashlib.sha256(made.device.encode()).hexdigest())
    call = Call(spec, rng.choice([1, 7, 40, 150]), rng.choice(["random", "half_dropped"]), seed)
    call(path, arch, rng.choice([1, 3, 8]))
    assert not [h for report in call.run.reports for h in report.hazards]
    Stages(call).judge()
    return call


def run_drawn(seed: int, arch: str = ARCH) -> None:
    """Judge a call of the kernels that `drawn` gives."""
    run_points(*drawn(seed, arch), seed, arch)


@exhaustive
@pytest.mark.parametrize("seed", range(16))
def test_points_of_the_space(seed: int) -> None:
    """Two plans each."""
    run_drawn(seed)


TOKENS, EXPERTS, TOP_K, SIZES = [0, 1, 7, 33, 128, 300], [4, 8, 32], [1, 2, 8], [256, 384, 512]
ROUTINGS, SEEDS = ["random", "one_expert", "half_dropped", "dropped"], range(4)
VALUES: list[Any] = [TOKENS, EXPERTS, TOP_K, SIZES, SIZES, ROUTINGS, SEEDS, KINDS]


def run_cell(cell: list[Any]) -> None:
    """Judge a layer and a call of these values."""
    tokens, experts, top_k, hidden, intermediate, routing, seed, (fmt, act_fmt) = cell
    kind = {"fmt": fmt, "act_fmt": act_fmt}
    run(spec_of(experts, hidden, intermediate, min(top_k, experts), **kind), tokens, routing, seed)


@exhaustive
@pytest.mark.parametrize("chosen", list(covering([len(v) for v in VALUES])))
def test_sizes(chosen: tuple[int, ...]) -> None:
    """Every two values of tokens, experts, top k, sizes, routings and seeds meet."""
    run_cell([values_[i] for values_, i in zip(VALUES, chosen, strict=True)])


@exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_more_sizes(seed: int) -> None:
    """Any of their product."""
    rng = Random(seed)
    run_cell([rng.choice(values_) for values_ in VALUES])
