"""What a tcgen05 GEMM does with its sums, activation and residual, as shipped: in the emulator.

Float32 results differ from float64 by less than 1e-5 of the element and 1e-6 of the row's largest
product: sums are float32, and so are exp and the division.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm

from blockscale.building.space import new_schedule
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import emit
from blockscale.schedules.gemm import tcgen05
from blockscale.specs import MmFp4, Spec
from blockscale.tir.gemm.tiles import gemm_tiles
from tests.gemm.test_gemm_library import call, operands, scales
from tests.gemm.test_pipe_truth import PLANS as STORES
from tests.gemm.test_pipe_truth import ROWS, K, N
from tests.kit import gemm_harness as harness
from tests.kit.pairwise import those
from tests.reference import core as ref

PLANS = {
    **STORES,
    "split_columns": {"split_k": 2, "acc_stages": 1, "mma_n": 64, "swap": True},
}
RULES = [
    (activation, residual)
    for activation in ("none", "silu", "gelu_tanh", "relu2")
    for residual in (None, "float32", "bfloat16", "float16")
    if activation != "none" or residual is not None
]


def by_default(plan: str, rule: tuple[str, str | None]) -> bool:
    """Each plan once, with each activation and each residual among the rules."""
    at = (len(RULES) - 1) * [*PLANS].index(plan) // (len(PLANS) - 1)
    return rule == RULES[at]


def by_turns(plan: str, rule: tuple[str, str | None]) -> bool:
    """Half of all: each plan with each activation and each residual, every other pair of these."""
    turn = ([*PLANS].index(plan) + RULES.index(rule)) % 2
    return by_default(plan, rule) or turn == 0


@those(
    by_default,
    by_turns,
    plan=list(PLANS),
    rule=[pytest.param(rule, id=f"{rule[0]}-{rule[1]}") for rule in RULES],
)
def test_epilogue(plan: str, rule: tuple[str, str | None]) -> None:
    """Every way to store; rows and columns of a residual beyond d are not read; a NaN stays one."""
    activation, residual = rule
    dtype = residual or "float32"
    of = harness.plan(n=N, k=K, out_dtype=dtype, **PLANS[plan])
    func = gemm_tiles("nvfp4", dtype, N, K, activation=activation, residual=residual is not None)
    sch = new_schedule(tvm.IRModule({"main": func}))
    tcgen05.decided(sch, of)
    kernel = checked(derive(sch.mod["main"]))
    text = compile_cuda_source(emit(kernel, "gemm"), "sm_100a", ptx=True).image.decode()
    rng = np.random.default_rng(7)
    a = harness.operand(rng, 4, "e4m3", 16, [ROWS], K)
    b = harness.operand(rng, 4, "e4m3", 16, [N], K)
    alpha, bias = np.float32([1 / 64]), rng.normal(0, 1, N).astype(np.float32)
    bias[3] = np.nan
    bits = np.uint32 if dtype == "float32" else np.uint16
    out = np.full((ROWS, N), harness.UNWRITTEN[dtype], bits)
    r = harness.rounded(rng.normal(0, 3, (ROWS, N)), dtype) if residual else np.zeros((ROWS, N))
    named = {
        "a": a.stored, "b": b.stored, "a_scale": a.scale, "b_scale": b.scale, "alpha": alpha,
        "bias": bias, "residual": harness.encoded(r, dtype), "d": out,
    }  # fmt: skip
    tiles = harness.clusters_of(of, [ROWS])
    limit = tiles if of.split_k > 1 else min(2, tiles)
    report = harness.launch(kernel, text, named, ROWS, limit)
    report.check()
    assert not report.hazards
    c = ref.mm(a.value, b.value, alpha[0])
    want = ref.activation(activation, c + bias) + r
    # 1e-6 of the row beside a tie either neighbour is right; relu2 squares the error
    slack = 1e-5 * np.abs(want) + 1e-6 * np.abs(c).max(axis=1, keepdims=True)
    low, high = (harness.rounded(want + s, dtype) for s in (-slack, slack))
    got = harness.decode(out, dtype)
    right = (got >= low) & (got <= high)
    right[:, 3] = np.isnan(got[:, 3])
    assert right.all()


def test_a_piece_of_split_k_loads_what_it_holds() -> None:
    """Four elements of a residual of 16 bits are 8 bytes: 16 would end behind their registers."""
    of = harness.plan(n=N, k=K, out_dtype="bfloat16", **PLANS["split"])
    func = gemm_tiles("nvfp4", "bfloat16", N, K, residual=True)
    sch = new_schedule(tvm.IRModule({"main": func}))
    tcgen05.decided(sch, of)
    text = emit(checked(derive(sch.mod["main"])), "gemm")
    assert "bs_load_run_16<BsBf16, 4, true>(residual" in text
    ptx = compile_cuda_source(text, "sm_100a", ptx=True).image.decode()
    sizes = [
        line.split(".v")[1][0] for line in ptx.splitlines() if "ld.global" in line and ".v" in line
    ]
    assert sizes == ["4", "2"]  # of the bias, of the residual


def test_library() -> None:
    """As users get it: a name of its own, one parameter more, every bucket's kernel."""
    spec = MmFp4(128, 256, "nvfp4", "bfloat16", "gelu_tanh", True)
    assert spec.name == "mm_nvfp4_n128_k256_gelu_tanh_residual_bf16"
    assert Spec.parse(spec.name) == spec
    assert [p.name for p in spec.params()][-2:] == ["residual", "d"]
    for rows in (5, 300):
        a, b = operands(spec, [rows])
        r = torch.randn(rows, 128).to(torch.bfloat16)
        d = torch.full((rows, 128), float("nan"), dtype=torch.bfloat16)
        stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
        alpha = torch.tensor([1 / 64])
        given = (*stored, scales(a), scales(b), alpha, None, r, d)
        call(spec, *given)
        want = ref.activation("gelu_tanh", ref.mm(a.value, b.value, 1 / 64)) + r.double().numpy()
        assert ref.row_error(d.double().numpy(), want).max() < 2**-8
    short = torch.zeros(rows - 1, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"residual has size 299 in dimension 0, but 300"):
        call(spec, *given[:6], short, d)
