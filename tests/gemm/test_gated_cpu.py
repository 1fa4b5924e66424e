"""bs.grouped_mm_act_fp4quant on a CPU: the reference's bits, and those of two kernels in turn."""

from typing import Any

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

import blockscale as bs
from blockscale import catalog
from blockscale.building.builder import build
from blockscale.building.space import replay, trace_json
from blockscale.specs import GroupedMmActFp4Quant, Spec
from tests.kit import gated
from tests.kit.helpers import DTYPES, as_bytes, same_bytes
from tests.kit.kernels import LEVELS, call, compiled, needs
from tests.kit.pairwise import each, those
from tests.reference import core as ref

ACTIVATIONS = ["silu", "gelu_tanh", "swiglu"]
OFFSETS = [([0, 70, 70, 200], 200), ([2, 3, 4, 6], 9), ([1, 129, 257, 300], 300)]
"""Many rows and none, few with rows of no expert around them, whole tiles of scales."""

FUNCTIONS = {
    "silu": bs.silu_and_mul_fp4quant,
    "gelu_tanh": bs.gelu_tanh_and_mul_fp4quant,
    "swiglu": bs.swiglu_fp4quant,
}


PAIRS = (("swiglu", "nvfp4", "bfloat16"), ("gelu_tanh", "mxfp4", "float16"))


def spec_of(fmt: str, activation: str = "silu", dtype: str = "bfloat16") -> GroupedMmActFp4Quant:
    return GroupedMmActFp4Quant(3, 256, 96, fmt, activation, dtype)


def with_numbers(kernel: Any, spec: GroupedMmActFp4Quant, at: int) -> Any:
    """The kernel as a function of tensors; its numbers stand behind ``at`` of them."""
    return lambda *given: kernel(*given[:at], *gated.numbers(spec), *given[at:])


def check(kernel: Any, spec: GroupedMmActFp4Quant) -> None:
    """Compare few and many rows with the reference."""
    for offsets, rows in OFFSETS:
        case = gated.case(spec, offsets, rows)
        given, made = case.tensors(), case.outputs(spec)
        gated.judge(spec, case, *call(with_numbers(kernel, spec, len(given)), given, made))


@each(activation=ACTIVATIONS, fmt=["nvfp4", "mxfp4"], dtype=["bfloat16", "float16"], level=LEVELS)
def test_default(activation: str, fmt: str, dtype: str, level: str) -> None:
    """Without search."""
    needs(level)
    spec = spec_of(fmt, activation, dtype)
    check(compiled(spec, level), spec)


def test_an_expert_of_one_row() -> None:
    """One row may hold few elements that are sure; all rows together are judged."""
    spec = GroupedMmActFp4Quant(2, 384, 224, "nvfp4", "swiglu", "float16")
    case = gated.case(spec, [0, 260, 261], 261, seed=0)
    given, made = case.tensors(), case.outputs(spec)
    kernel = with_numbers(compiled(spec, "plain"), spec, len(given))
    outs = call(kernel, given, made)
    gated.judge(spec, case, *outs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated, "COMPARED", 1.1)
        with pytest.raises(AssertionError, match="of the codes are sure, which is less"):
            gated.judge(spec, case, *outs)


@pytest.mark.parametrize("level", ["avx512bf16", "plain"])
def test_replay(level: str) -> None:
    """Traces of the last sketch, found on static workloads, serve the exported function."""
    needs(level)
    spec, traces = spec_of("nvfp4"), {}
    for workload in catalog.workloads(spec, level):
        schedules = workload.space(level)(Schedule(workload.mod(level), seed=1))
        traces[workload.tag] = replay(workload.mod(level), trace_json(schedules[-1].trace)).trace
    check(compiled(spec, level, traces), spec)


@those(
    lambda **of: tuple(of.values()) in PAIRS,
    activation=ACTIVATIONS,
    fmt=["nvfp4", "mxfp4"],
    dtype=["bfloat16", "float16"],
)
def test_the_pair_and_the_next_gemm(activation: str, fmt: str, dtype: str) -> None:
    """Random weights and scales: bit for bit the two functions' results, as a next GEMM's a."""
    counts, n, k = [70, 0, 130], 256, 96
    offsets = torch.tensor([0, 70, 70, 200], dtype=torch.int32)
    a, a_linear = bs.quantize(torch.randn(200, k), fmt)
    b, b_linear = bs.quantize(torch.randn(3, n, k) * 0.3, fmt)
    a_scale = bs.layouts.grouped_128x4(a_linear, offsets)
    alpha, g = torch.tensor([0.5, 1.0, 1.5]), torch.tensor([0.02, 0.03, 0.04])
    numbers = gated.NUMBERS if activation == "swiglu" else ()
    given = a_scale, bs.layouts.to_128x4(b_linear), offsets, alpha
    c = bs.grouped_mm_fp4(a, b, *given, fmt, DTYPES[dtype])
    block, names = {"nvfp4": 16, "mxfp4": 32}[fmt], ("alpha", "beta", "limit")
    made = [
        FUNCTIONS[activation](
            rows, global_scale=g[e : e + 1], block_size=block,
            **dict(zip(names, numbers, strict=False)),
        )
        for e, rows in enumerate(c.split(counts)) if len(rows)
    ]  # fmt: skip
    codes = np.concatenate([as_bytes(part) for part, _ in made])
    scales = ref.group_scales(np.concatenate([as_bytes(part) for _, part in made]), offsets)
    order = bs.interleave_gate_up(b), bs.interleave_gate_up(b_linear.view(torch.uint8))
    ours = {"gate_alpha": 0.75, "beta": 0.5, "limit": 2.5} if numbers else {}
    for _ in range(2):  # the second call takes the short way
        packed, block_scale = bs.grouped_mm_act_fp4quant(
            a, order[0], a_scale, bs.layouts.to_128x4(order[1]), offsets, alpha, g,
            activation, fmt, DTYPES[dtype], **ours,
        )  # fmt: skip
        assert packed.dtype == torch.uint8
        same_bytes(packed.numpy(), codes)
        same_bytes(as_bytes(block_scale)[: len(scales)], scales)
    w, w_linear = bs.quantize(torch.randn(3, 64, n // 2), fmt)
    next_scale = bs.layouts.to_128x4(w_linear)
    y = bs.grouped_mm_fp4(packed, w, block_scale, next_scale, offsets, fmt=fmt)
    z = bs.grouped_mm_fp4(
        torch.from_numpy(codes), w, torch.from_numpy(scales), next_scale, offsets, fmt=fmt
    )
    assert torch.equal(y, z)
    assert y.isfinite().all()


def test_a_library_and_defaults(tmp_path: Any) -> None:
    """By name, outputs allocated, no alpha and no global scale."""
    spec = spec_of("nvfp4", "swiglu")
    assert spec.name == "grouped_mm_nvfp4_e3_n256_k96_swiglu_fp4quant_bf16"
    assert Spec.parse(spec.name) == Spec.from_json(spec.to_json()) == spec
    build([spec], tmp_path / "k.so")
    case = gated.case(spec, [0, 70, 70, 200], 200)
    inputs = case.tensors()[:5]
    packed, block_scale = bs.load(tmp_path / "k.so")[spec.name](*inputs)
    direct = bs.grouped_mm_act_fp4quant(*inputs, activation="swiglu")
    ones = torch.ones(3)
    same_bytes(packed.numpy(), direct[0].numpy())
    given = bs.grouped_mm_act_fp4quant(
        *inputs, ones, ones, "swiglu", gate_alpha=1.702, beta=1, limit=7
    )
    for left, right in zip(direct, given, strict=True):
        same_bytes(as_bytes(left)[:200], as_bytes(right)[:200])
    assert block_scale.shape == direct[1].shape == (len(case.a_scale), 8)


def test_outputs_that_are_given() -> None:
    """They are written and returned, as bytes or as torch's types; rows of no expert stay."""
    spec = spec_of("nvfp4")
    case = gated.case(spec, [5, 9, 9, 12], 20)
    packed, block_scale = case.outputs(spec)
    made = bs.grouped_mm_act_fp4quant(*case.tensors(), packed=packed, block_scale=block_scale)
    assert made[0] is packed
    assert made[1] is block_scale
    gated.judge(spec, case, packed, block_scale)
    none = bs.grouped_mm_act_fp4quant(
        case.a[:0], case.b, case.a_scale[:0], case.b_scale, torch.zeros(4, dtype=torch.int32)
    )
    assert [tuple(t.shape) for t in none] == [(0, 64), (0, 8)]


def test_interleaved_rows() -> None:
    """16 gates, 16 ups, in any dimension, of any dtype."""
    rows = torch.arange(96)
    assert gated.interleaved(rows.numpy()).tolist() == bs.interleave_gate_up(rows, 0).tolist()
    stacked = torch.stack([rows, rows + 100])[..., None].expand(2, 96, 3)
    made = bs.interleave_gate_up(stacked)
    assert made.shape == (2, 96, 3)
    assert made[1, :, 2].tolist() == [i + 100 for i in gated.interleaved(rows.numpy())]
    with pytest.raises(ValueError, match=r"48 rows, no multiple of 32; pad gates and ups"):
        bs.interleave_gate_up(rows[:48], 0)
