"""Our own CUDA kernels on the emulator: right numbers, no error among the hazards, any seed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.kernels import (
    arithmetic_cases,
    cuda_kernels,
    gemm_cases,
    kind_cases,
    movement_cases,
    scalar_cases,
)
from tests.emulator.kit import tools
from tests.emulator.kit.exhaustive import some_seeds

pytestmark = tools.needs_nvcc

FEW = 2
MORE = some_seeds(4, 20)  # correct kernels are right on 20
GEMMS = {
    "one tile": lambda rng: gemm_cases.nvfp4_tile(rng),
    "one tile, ring": lambda rng: gemm_cases.nvfp4_tile(rng, 128, 128, 768),
    "grid of tiles": lambda rng: gemm_cases.nvfp4_tile(rng, 256, 256, 512),
    "pair": lambda rng: gemm_cases.nvfp4_pair(rng),
    "pair, ring": lambda rng: gemm_cases.nvfp4_pair(rng, k=640),
    "two pairs": lambda rng: gemm_cases.nvfp4_pair(rng, m=512),
    "cluster of 2": lambda rng: gemm_cases.cluster_sums(rng, 2, 2),
    "cluster of 4": lambda rng: gemm_cases.cluster_sums(rng, 4),
    "chained": lambda rng: gemm_cases.chained(rng),
    "chained, long": lambda rng: gemm_cases.chained(rng, 256, 384),
}
MANY = ("one tile, ring", "pair", "cluster of 4", "chained")
SCALAR = (
    scalar_cases.block_reduce,
    scalar_cases.warp_words,
    scalar_cases.histogram,
    scalar_cases.axpy,
    scalar_cases.collatz,
    scalar_cases.interpret,
    scalar_cases.grid_rounds,
    scalar_cases.async_copy,
    scalar_cases.gcd_labels,
    scalar_cases.jump_table,
    arithmetic_cases.integers,
    arithmetic_cases.floats,
    arithmetic_cases.halves,
    arithmetic_cases.narrow,
)
MATRICES = {
    "mma.sync": lambda rng: scalar_cases.mma_sync(rng),
    "mma.sync, one step": lambda rng: scalar_cases.mma_sync(rng, 24),
    "wgmma f16": lambda rng: scalar_cases.wgmma(rng, "f16"),
    "wgmma e4m3": lambda rng: scalar_cases.wgmma(rng, "e4m3"),
    "sm_120a nvfp4": lambda rng: scalar_cases.mma_nvfp4(rng),
    "sm_120a mxfp8 x fp4": lambda rng: scalar_cases.mma_mxfp8_fp4(rng),
}


def check(make, seeds):
    """Run the case with data and moments of each seed."""
    for seed in seeds:
        case = make(np.random.default_rng(seed))
        report = case.run(seed)
        errors = [str(hazard) for hazard in report.hazards if hazard.severity == "error"]
        assert not errors, f"seed {seed}: {errors}"
        assert case.judge() is None, f"seed {seed}: {case.judge()}"


@pytest.mark.parametrize("path", sorted(cuda_kernels.FOLDER.glob("*.cu")), ids=lambda p: p.stem)
def test_ptxas_takes_the_kernel(path):
    """It is legal PTX: no test below runs what hardware could not."""
    name = path.stem
    done = tools.assemble(cuda_kernels.ptx(name), cuda_kernels.architecture(name))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in GEMMS if name not in MANY])
def test_asynchronous_kernels(name):
    check(GEMMS[name], range(FEW))


@pytest.mark.parametrize("seeds", MORE)
@pytest.mark.parametrize("name", MANY)
def test_asynchronous_kernels_on_more_seeds(name, seeds):
    check(GEMMS[name], seeds)


@pytest.mark.parametrize("kind", kind_cases.KINDS, ids=str)
def test_every_kind(kind):
    """tcgen05.mma of every kind, format and shared memory layout."""
    name, a, b, options = kind
    check(lambda rng: kind_cases.kind_case(rng, name, a, b, **options), range(2))


@pytest.mark.parametrize("name", MATRICES)
def test_warp_matrices(name):
    check(MATRICES[name], range(FEW))


@pytest.mark.parametrize("make", SCALAR, ids=lambda make: make.__name__)
def test_scalar_kernels(make):
    check(make, range(FEW))


@pytest.mark.parametrize("make", movement_cases.ALL, ids=lambda make: make.__name__)
def test_movement(make):
    """TMA reductions, gather4, st.async, stmatrix, TMEM shapes, cluster launch control."""
    check(make, range(FEW))
