"""The table of host code: which kernels there are, and what a launch takes from a derived one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from blockscale.lower.pipe.host import Bucket, host_code, merged
from tests.kit import gemm_harness as harness

PARAMS = ("a", "b", "a_scale", "b_scale", "alpha", "bias", "d")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"mma_n": 64}, {"cluster_rows": 128, "cluster_cols": 7, "cluster": 1, "persistent": 1}),
        ({"mma_n": 64, "swap": True}, {"cluster_rows": 64, "cluster_cols": 4}),
        ({"cta_group": 2, "cluster_x": 4, "cluster_y": 2}, {"cluster_rows": 512, "cluster": 8}),
        ({"split_k": 2, "acc_stages": 1}, {"cluster": 2, "persistent": 0, "cluster_cols": 4}),
    ],
)
def test_a_launch_follows_the_kernel(changes: dict[str, Any], wanted: dict[str, int]) -> None:
    """Rows of a cluster's tile, clusters along columns (of 400), CTAs, and up to how many rows."""
    kernel = harness.kernel(harness.plan(n=400, **changes))
    buckets = [Bucket("small", kernel, "", 32), Bucket("large", kernel, "", None)]
    text = host_code("gemm", buckets, PARAMS)
    small, large = (
        {name: int(value) for name, value in re.findall(r"\.(\w+) = (\d+)[,}]", row)}
        for row in re.findall(r'\{\.name = "(?:small|large)".*', text)
    )
    assert (small.pop("limit"), large.pop("limit")) == (32, 0)
    assert small == large
    given = {"shared": kernel.launch_bytes, "threads": 192, "ragged": 0, "map_count": 4}
    assert small.items() >= (wanted | given | {"pointer_count": 3}).items()


def test_kernels_of_the_same_text_are_one() -> None:
    """Neighbours are one bucket, too."""
    given = [(1, "a"), (8, "a"), (16, "b"), (32, "b"), (None, "a")]
    made = merged(given, "f", lambda kernel, name: f"{name}: {kernel}")
    assert made == [
        Bucket("f_kernel0", "a", "f_kernel0: a", 8),
        Bucket("f_kernel1", "b", "f_kernel1: b", 32),
        Bucket("f_kernel0", "a", "", None),
    ]
