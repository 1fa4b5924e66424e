"""The tcgen05 GEMM kernel in full: all formats and sizes, and random legal plans.

About six minutes of one core: 180 cases, and 160 plans; all are marked exhaustive.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest

from blockscale.base.formats import GEMM
from blockscale.specs.plans.gemm import Y_TILES, GemmPlan
from tests.gemm.test_gemm_kernel import COLUMNS, DEPTHS, ROWS, matrix_case, run

pytestmark = pytest.mark.exhaustive

PLANS, EACH = 160, 10


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("fmt", GEMM)
def test_every_format_and_size(fmt: str, m: int) -> None:
    """With the structures in turn, and so the orders in which warps and engines may run."""
    for number, (of, rows, n, k) in enumerate(product(GEMM, ROWS, COLUMNS, DEPTHS)):
        if (of, rows) == (fmt, m):
            _, plan = matrix_case(number, fmt, m, n, k)
            run(plan, m, seed=number % 5, bias=number % 2 == 1, alpha=number % 3 > 0)


class Drawn(NamedTuple):
    """A plan, the rows that it is run on, and the options of the run."""

    plan: GemmPlan
    rows: Any
    options: dict[str, Any]


@cache
def drawn() -> list[Drawn]:
    """Return different legal plans with random sizes."""
    rng, found = Random(20261122), dict[GemmPlan, Drawn]()
    while len(found) < PLANS:
        experts, fmt = rng.choice([0, 0, 3]), rng.choice(list(GEMM))
        group = rng.choice([1, 1, 2])
        plan = GemmPlan(
            fmt=fmt,
            cta_group=group,
            out_dtype=rng.choice(["float32", "bfloat16", "float16"]),
            n=8 * rng.randint(1, 48),
            k=32 * rng.randint(1, 16),
            experts=experts,
            swap=rng.random() < 0.5,
            mma_n=rng.choice(Y_TILES),
            block_k=rng.choice([128, 256]),
            stages=rng.randint(2, 8),
            cluster_x=rng.choice([1, 2, 4]),
            cluster_y=rng.choice([1, 1, 2]),
            split_k=rng.choice([1, 1, 1, 2, 3, 4]),
            acc_stages=rng.choice([1, 2]),
            epi_cols=rng.choice([16, 32, 64]),
            store=rng.choice(["tma", "direct"]),
            raster=rng.choice(["x", "y"]),
            group=rng.choice([1, 2, 4]),
        )
        if plan.illegal() is not None or plan in found:
            continue
        rows: Any = rng.choice([1, 7, 33, 64, 100, 128, 200, 257])
        if experts:
            rows = [rng.choice([0, 1, 16, 70, 130]) for _ in range(3)]
            rows[1] += 0 if any(rows) else 5
        options = {
            "bias": (rng.random() < 0.5) and not experts,
            "alpha": rng.random() < 0.5,
            "clusters": rng.randint(1, 4),
            "seed": rng.randint(0, 9),
        }
        found[plan] = Drawn(plan, rows, options)
    return list(found.values())


@pytest.mark.parametrize("part", range(PLANS // EACH))
def test_random_plans(part: int) -> None:
    """Whatever a plan decides, and whatever it meets."""
    for plan, rows, options in drawn()[part * EACH : part * EACH + EACH]:
        run(plan, rows, **options)
