"""Traces of GPU schedules: a process that only reads logs knows every intrinsic that they name."""

import re
import subprocess
import sys

import pytest
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.building.space import trace_json
from blockscale.specs import Spec
from tests.kit.pairwise import few
from tests.kit.paths import without_torch

NAMES = [
    "add_rmsnorm_nvfp4_h256_both_y_bf16",
    "add_rmsnorm_mxfp4_h512_f16",
    "rmsnorm_e4m3b32_h256_128x4_fi_bf16",
    "quantize_nvfp4_bf16",
    "quantize_mxfp4_128x4_amax_floor_f32",
    "dequantize_nvfp4_128x4_f16",
    "dequantize_mxfp4_f32",
    "silu_and_mul_nvfp4_128x4_bf16",
    "swiglu_mxfp4_fi_f16",
    "quantize_nvfp4_grouped_128x4_fi_bf16",
    "swizzle_128x4",
    "unswizzle_128x4",
    "scale_sweep_b16_bf16",
]


def fresh(code):
    """Return the words that a fresh process prints, which has not scheduled anything."""
    options = {"capture_output": True, "text": True, "check": True, "env": without_torch()}
    run = subprocess.run([sys.executable, "-c", code], **options)
    return set(run.stdout.split())


@pytest.fixture(scope="module")
def known():
    """Return what a fresh process can register, whatever a trace names."""
    return fresh("""
from blockscale.tir import intrin
from blockscale.tir.intrin import operands
intrin.register_named("cuda_")
print("\\n".join(operands._makers))
""")


ROWS = """
from tvm.s_tir import TensorIntrin
from blockscale.tir import intrin
names = {names!r}
intrin.register_named(repr([["Tensorize", ["l1"], names]]))
print("\\n".join(name for name in names if TensorIntrin.get(name, allow_missing=True)))
"""
"""Registers what is there for rows of any length."""


@pytest.mark.parametrize("name", few(NAMES, every=3))
def test_every_intrinsic_is_known(request, name, known):
    """All sketches, drawn and default, of the widest bucket: the others have the same."""
    workloads = catalog.workloads(Spec.parse(name), "sm_90a")
    for workload in workloads if request.config.getoption("--exhaustive") else workloads[-1:]:
        drawn = workload.space("sm_90a")(Schedule(workload.mod("sm_90a"), seed=1))
        named = set(re.findall(r"'(cuda_\w+)'", repr([trace_json(s.trace) for s in drawn])))
        assert named
        of_rows = sorted(named - known)
        assert all(name.startswith("cuda_store_row_") for name in of_rows)
        assert not of_rows or fresh(ROWS.format(names=of_rows)) == {*of_rows}
