"""Edge-LLM's GPU kernels, run as PTX in the emulator, against float64; see test_edgellm_ops.py."""

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

from blockscale.emulator import run_module
from blockscale.lower import cuda
from blockscale.schedules.edgellm import gpu as gpu_edgellm
from blockscale.schedules.steps import preferred
from blockscale.specs import EdgeDown, EdgeUp
from blockscale.tir.edgellm.passes_threads import CTAS, PARTS, down_rows, groups, up_rows
from tests.edgellm.test_edgellm_ops import TOLERANCE, Case, kernel_inputs, tensor
from tests.kit.gpu_library import library
from tests.kit.pairwise import few
from tests.quant.test_gpu_memory import call
from tests.reference import edgellm as ref

SPECS = {
    "sm_90a": (EdgeUp(1088, 64, "nvfp4"), EdgeUp(64, 192), EdgeDown(128, 192, "silu", "bfloat16")),
    "sm_100a": (EdgeUp(192, 64, "bfloat16"), EdgeDown(64, 64)),
}
"""Several trips (68 blocks) with a part of the last one idle; one block for some groups only."""


def emulated(spec, arch):
    """Return a function that runs the kernel of ``spec``; hazards fail the test."""

    def run(*values):
        played = run_module(library(SPECS[arch], arch), spec.name, *values, target=arch)
        assert not [hazard for report in played.reports for hazard in report.hazards]

    return run


CASES = [(arch, spec) for arch, specs in SPECS.items() for spec in specs]


@pytest.mark.parametrize(
    ("arch", "spec"), few(CASES), ids=lambda value: getattr(value, "name", value)
)
def test_kernels(arch, spec):
    """Slots that are left out are zero; outputs and what is beside them are as they should be."""
    case = Case(spec.hidden, spec.intermediate, bytes_=(0, 200))
    if spec.op == "edgellm_up":
        z = torch.empty(*case.ids.shape, case.i)
        if spec.dtype == "nvfp4":
            view, values = case.coded()
            codes = view.payload.view(len(values), -1)
            x = [codes, view.scale_bytes.view(len(values), -1), torch.tensor([0.37])]
        else:
            x = [tensor(case.x).to(getattr(torch, spec.dtype))]
            values = x[0].float().numpy()
        [z] = call(emulated(spec, arch), kernel_inputs(case, spec, x), [z])
        assert ref.row_error(z.numpy(), case.truth_up(values)).max() < TOLERANCE
        return
    case.weights[case.ids < 0] = np.nan
    dtype = getattr(torch, spec.dtype)
    outs = [torch.empty(*case.ids.shape, case.h), torch.empty(len(case.ids), case.h, dtype=dtype)]
    inputs = kernel_inputs(case, spec, [tensor(case.z)])
    _, out = call(emulated(spec, arch), inputs, outs)
    truth = case.truth_down(case.z, spec.activation)
    bound = TOLERANCE if dtype == torch.float32 else 4e-3
    assert ref.row_error(out.float().numpy(), truth).max() < bound


def test_groups():
    """Whole warps, no more than 256 threads, no idle round."""
    for blocks in range(4, 1200, 4):
        count = groups(16 * blocks)
        assert count * PARTS % 32 == 0
        assert count * PARTS <= 256
        assert -(-blocks // count) == -(-blocks // 64)
    assert (groups(2688), groups(1856)) == (56, 64)


@pytest.mark.parametrize("hint", [0, 1])
@pytest.mark.parametrize("spec", [EdgeUp(2688, 1856), EdgeDown(2688, 1856)], ids=lambda s: s.name)
def test_source(spec, hint):
    """Real sizes: bounds for registers; codes are loaded by 8 bytes, scales by 16."""
    sch = Schedule((up_rows if isinstance(spec, EdgeUp) else down_rows)(spec))
    gpu_edgellm.sketches(spec)[hint](sch, preferred)
    device = cuda.sources(sch.mod["main"], "main", "sm_90a").device
    assert f"__launch_bounds__({groups(spec.rows) * PARTS}, {CTAS})" in device
    kind = ("BS_STREAM", "BS_KEEP")[hint]
    rounds = -(-spec.rows // 16 // groups(spec.rows))  # 3: two loads of a trip, one before
    assert device.count(f"bs_load<8, {kind}>") == rounds * 16
    assert device.count(f"bs_load<16, {kind}>") == rounds
    assert "bs_edge_dot<16>" in device
