"""MoE layers whose GEMMs multiply codes by codes, by mma.sync of sm_120a: whole calls emulated.

Stages are judged as those of tcgen05 (`test_moe_codes`).
"""

from __future__ import annotations

import pytest
from tvm.s_tir import Schedule

from blockscale.catalog import cuda_source, workloads
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.sync.emit import SCALED_MMA
from blockscale.schedules.steps import preferred
from blockscale.specs import FusedMoe
from tests.kit.pairwise import exhaustive, few
from tests.moe.test_moe_codes import LAYERS, PLAIN, SPECS, parts_of, run, run_drawn

ARCH = "sm_120a"
ROOM = 99 << 10


@pytest.mark.parametrize(
    ("tokens", "routing"),
    [(1, "random"), (33, "one_expert"), *few([(100, "each_its_own"), (7, "half_dropped")])],
)
def test_tokens(tokens: int, routing: str) -> None:
    """Every stage, whoever gets the tokens; five launches, of kernels that fit an SM."""
    call = run(PLAIN, tokens, routing, arch=ARCH)
    names = [launch.kernel.removeprefix(f"{PLAIN.name}_") for launch in call.run.launches]
    kinds = [name.partition("_kernel")[0] for name in names]
    assert kinds == ["prepare", "gather", "gemm1", "gemm2", "combine"]
    assert [launch.block[0] for launch in call.run.launches[2:4]] == [160, 160]


@pytest.mark.parametrize(
    "spec", few(SPECS[1:4], every=3), ids=lambda spec: getattr(spec, "name", None)
)
def test_activations(spec: FusedMoe) -> None:
    """Formats, biases, other dtypes, sizes that fill no tile."""
    run(spec, 40, "half_dropped", arch=ARCH)


@pytest.mark.parametrize("spec", [PLAIN, SPECS[2]], ids=["nvfp4", "mxfp8"])
def test_the_same_numbers_as_tcgen05(spec: FusedMoe) -> None:
    """Codes of x bit for bit; of h but where float32 sums round to the other side of a tie."""
    outs = [run(spec, 33, arch=arch) for arch in (ARCH, "sm_100a")]
    first, second = (call.out.double() for call in outs)
    error = (first - second).norm(dim=1) / second.norm(dim=1)
    assert (error < 0.05).all()
    assert error.median() < 4e-3
    parts = [parts_of(call) for call in outs]
    for name in ("offsets", "order", "x", "x_scale"):
        used = len(parts[0][name]) if name != "order" else 4 * int((outs[0].ids >= 0).sum())
        assert (parts[0][name][:used] == parts[1][name][:used]).all(), name


@pytest.mark.parametrize("spec", few(LAYERS), ids=["Qwen3-30B-A3B", "gpt-oss-120b"])
def test_real_layers_do_not_spill(spec: FusedMoe) -> None:
    """Default kernels of layers that people have."""
    source = cuda_source(spec, ARCH, {})
    used = compile_cuda_source(source.device, ARCH).resources
    gemms = [kernel for kernel in used if "gemm" in str(kernel["name"])]
    assert len(gemms) >= 3
    assert all(kernel["spills"] == 0 for kernel in used)
    for workload in workloads(spec, ARCH):
        sch = Schedule(workload.symbolic(ARCH))
        workload.sketches(ARCH)[0](sch, preferred)
        assert SCALED_MMA.kernel(sch.mod["main"]).launch_bytes <= ROOM


@exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_points_of_the_space(seed: int) -> None:
    """A random plan of each GEMM."""
    run_drawn(seed, ARCH)
