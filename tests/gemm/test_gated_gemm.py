"""The grouped GEMM with a gated activation and NVFP4 in its epilogue: the two kernels' bits."""

from typing import Any

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
from blockscale.specs import ActQuantize
from blockscale.tir.gemm.gated_tiles import gated_tiles, interleaved
from tests.fused.test_gpu_fused import SM100, emulated
from tests.kit import gemm_harness as harness
from tests.kit.pairwise import few

RULE = ActQuantize("silu", 16, "e4m3", "bfloat16", "128x4")
GROUPS = [70, 0, 130]
N, K = 256, 320
PLANS: list[dict[str, Any]] = [
    {"epi_cols": 64, "mma_n": 128},
    {"epi_cols": 32, "mma_n": 256, "cta_group": 2, "block_k": 256, "stages": 2},
    {"epi_cols": 64, "mma_n": 64, "cta_group": 2, "raster": "y", "group": 2},
]


def unfused(values: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and 128x4 scales of gates and ups by the activation's own kernel."""
    rows, cols = values.shape
    gates = [j for j in range(cols) if j % 32 < 16]
    ups = [j for j in range(cols) if j % 32 >= 16]
    x = torch.from_numpy(values[:, gates + ups].view(np.int16).copy()).view(torch.bfloat16)
    packed = torch.zeros(rows, cols // 4, dtype=torch.uint8)
    scales = torch.zeros(-(-rows // 128) * 128, cols // 32, dtype=torch.uint8)
    emulated(SM100)(RULE, None)(x, torch.tensor([scale]), packed, scales)
    return packed.numpy(), scales.numpy()


@pytest.mark.parametrize("number", few(range(len(PLANS))))
def test_codes_and_scales_are_those_of_two_kernels(number: int) -> None:
    """Bit for bit: the products rounded to bfloat16, then activated and quantised."""
    rng = np.random.default_rng(number)
    changes = {"n": N, "k": K, "experts": len(GROUPS), "acc_stages": 2, **PLANS[number]}
    of = harness.plan(**changes)
    sch = new_schedule(tvm.IRModule({"main": gated_tiles("nvfp4", RULE, N, K, len(GROUPS))}))
    tcgen05.decided(sch, of, RULE)
    kernel = checked(derive(sch.mod["main"]))
    ptx = compile_cuda_source(emit(kernel, "gemm"), SM100, ptx=True).image.decode()
    m, atoms = sum(GROUPS), sum(-(-g // 128) for g in GROUPS)
    a = harness.operand(rng, 4, "e4m3", 16, GROUPS, K)
    b = harness.operand(rng, 4, "e4m3", 16, [N] * len(GROUPS), K)
    scale = np.float32([0.37])
    named: dict[str, Any] = {
        "a": a.stored, "b": b.stored, "a_scale": a.scale, "b_scale": b.scale,
        "alpha": np.float32([1e-3, 2e-3, 5e-4]), "global_scale": scale,
        "offsets": np.int32([0, *np.cumsum(GROUPS)]),
        "d": np.zeros((m, N // 4), np.uint8),
        "out_scale": np.zeros((atoms, N // 32 * 128), np.uint8),
    }  # fmt: skip
    report = harness.launch(kernel, ptx, named, m, 2)
    report.check()
    assert not report.hazards
    plain = harness.plan(n=N, k=K, experts=len(GROUPS), out_dtype="bfloat16")
    products = dict(named, d=np.zeros((m, N), np.uint16))
    harness.launch(harness.kernel(plain), harness.ptx(plain), products, m, 2).check()
    row = atom = 0
    for count in GROUPS:
        if not count:
            continue
        codes, scales = unfused(products["d"][row : row + count], float(scale[0]))
        np.testing.assert_array_equal(named["d"][row : row + count], codes)
        many = -(-count // 128)
        found = named["out_scale"][atom : atom + many].reshape(scales.shape)
        np.testing.assert_array_equal(found, scales)
        assert len(np.unique(codes)) > 100
        row, atom = row + count, atom + many


def test_rows_of_b_take_turns() -> None:
    """16 gates, 16 ups, and so on."""
    assert interleaved(64)[:33] == [*range(16), *range(32, 48), 16]
    assert sorted(interleaved(96)) == list(range(96))
