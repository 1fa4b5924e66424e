"""GPU kernels of the fused ops, played by the emulator: the bits of the CPU's kernels."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import fused_kernels
import pytest
import test_norm_quantize as norms
import torch

from blockscale.build import build
from blockscale.emulator import run_module
from blockscale.specs import Spec

ARCHS = ("sm_90a", "sm_100a")


@cache
def library(spec, arch):
    """Build the exported function of ``spec``, with default schedules, as PTX."""
    out = Path(mkdtemp(prefix="blockscale-test-")) / "kernels.so"
    build([spec], out, level=arch, logs_dirs=[], ptx=True)
    return out


def emulated(arch):
    """Return what takes the place of `fused_kernels.kernel`: the emulator finds what is wrong."""

    def kernel(spec, level):
        def call(*values):
            there = {}
            for value in values:
                if isinstance(value, torch.Tensor):
                    there.setdefault(value.data_ptr(), (value.clone(), value))
            given = [
                there[value.data_ptr()][0] if isinstance(value, torch.Tensor) else value
                for value in values
            ]
            run = run_module(library(spec, arch), spec.name, *given, target=arch)
            assert not [hazard for report in run.reports for hazard in report.hazards]
            for copy, value in there.values():
                value.copy_(copy)

        return call

    return kernel


@pytest.fixture(params=ARCHS)
def arch(request, monkeypatch):
    """Let `fused_kernels.run` use the GPU's kernels."""
    monkeypatch.setattr(fused_kernels, "kernel", emulated(request.param))
    return request.param


NORMS = [
    (1, "add_rmsnorm_nvfp4_h256_bf16"),
    (7, "add_rmsnorm_nvfp4_h1536_128x4_y_f16"),
    (130, "add_rmsnorm_nvfp4_h512_both_bf16"),
]


@pytest.mark.parametrize(("rows", "name"), NORMS, ids=[f"{n}-{r}" for r, n in NORMS])
def test_norm(arch, rows, name):
    spec = Spec.parse(name)
    norms.check(spec, norms.inputs(spec, rows, seed=rows), global_scale=0.013)
