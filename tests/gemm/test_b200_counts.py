"""What the model of a B200 says that a kernel does, beside what its PTX did in the emulator."""

from __future__ import annotations

import pytest

from blockscale.specs.plans import b200
from blockscale.specs.plans.gemm import SCALE_ATOM_BYTES
from tests.kit import gemm_harness as harness
from tests.kit.pairwise import few

PLANS = {
    "single": {"mma_n": 64, "store": "tma"},
    "pair": {"cta_group": 2, "mma_n": 256, "block_k": 256, "stages": 3, "epi_cols": 16},
    "cluster": {"cta_group": 2, "cluster_x": 4, "cluster_y": 2, "mma_n": 128, "acc_stages": 1},
    "swap": {"swap": True, "cta_group": 2, "mma_n": 64},
    "split": {"swap": True, "mma_n": 32, "split_k": 4, "acc_stages": 1},
    "mxfp4": {"fmt": "mxfp4", "mma_n": 192, "acc_stages": 1},
    "mxfp8xmxfp4": {"fmt": "mxfp8xmxfp4", "mma_n": 64, "k": 512},
}


@pytest.mark.parametrize("name", few(list(PLANS), every=6))
def test_counts(name):
    """Bytes that TMA fetches, MMAs and copies of scales of whole tiles are exactly the model's."""
    of = harness.plan(**PLANS[name])
    x, y = 128 * of.cluster_x, of.mma_n * of.cluster_y
    rows, n = (y, 2 * x) if of.swap else (x, 2 * y)
    of = harness.plan(**PLANS[name], n=n)
    result = harness.run(of, rows)
    harness.judge(of, result)
    tiles = b200.grid(of, rows).clusters
    assert tiles == harness.clusters_of(of, [rows]) == 2
    stages = tiles * of.k // of.block_k // of.split_k  # of one CTA
    loaded = b200.loaded_bytes(of, of.cluster_y, of.cluster_x) * stages * of.cluster
    engines, ran = result.report.engines, result.report.instructions
    assert engines["tma.load"]["bytes"] == loaded
    leaders = of.cluster // of.cta_group
    assert engines["tensor core"]["operations"] == stages * of.steps * leaders
    copies = sum(count for opcode, count in ran.items() if opcode.startswith("tcgen05.cp"))
    assert copies == stages * of.scale_bytes // SCALE_ATOM_BYTES * leaders
