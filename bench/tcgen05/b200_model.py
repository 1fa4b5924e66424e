"""How far the model of a B200 is off where others have published times, and its best plans.

``python -m bench.tcgen05.b200_model`` prints the tables and fills docs/b200_model.md; with
``--fit`` it searches the fitted numbers of `specs.plans.b200.Machine` anew and prints them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import click

from bench.report import ROOT, fill_page, markdown_table, render, show, us_text
from bench.tcgen05.kernels import pair
from blockscale.base.formats import GEMM
from blockscale.specs.plans.b200 import B200, FITTED, VERSION, Machine, Modelled, time_us
from blockscale.specs.plans.gemm import Y_TILES, GemmPlan

POINTS = Path(__file__).with_name("b200_points.json")
"""Times of block-scaled GEMMs on B200 that others have published."""

CLUSTERS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))
"""CTAs along X and Y of a cluster."""
SPLITS = (2, 4, 8)
GROUPS = (1, 4, 8, 16)
MAX_STAGES = 12
BEST_SIZES = (4096, 8192)
"""M = N = K of the NVFP4 GEMMs whose best plans are shown."""

_FIT_STEPS: Mapping[str, float] = {"sustained_ghz": 0.05, "l2_tbps": 0.4, "launch_us": 0.2}
_FIT_SMALLEST = 0.004
"""Step, as a part of the number, at which the fit ends."""


@cache
def legal_plans(fmt: str, out_dtype: str, n: int, k: int) -> tuple[GemmPlan, ...]:
    """Return every legal plan of these choices, each with as many stages as fit."""
    return tuple(_legal_plans(fmt, out_dtype, n, k))


def _legal_plans(fmt: str, out_dtype: str, n: int, k: int) -> Iterator[GemmPlan]:
    clusters = [(x, y, 1) for x, y in CLUSTERS] + [(1, 1, split) for split in SPLITS]
    widths = (128, 256) if GEMM[fmt].a.bits == 4 else (128,)
    tiles = product((False, True), (1, 2), Y_TILES, widths, clusters)
    epilogues = [*product((1, 2), (16, 32, 64), ("tma", "direct"))]
    for swap, group, mma_n, block_k, (x, y, split) in tiles:
        for acc, cols, store in epilogues:
            plan = GemmPlan(
                fmt=fmt,
                out_dtype=out_dtype,
                n=n,
                k=k,
                experts=0,
                swap=swap,
                cta_group=group,
                mma_n=mma_n,
                block_k=block_k,
                stages=2,
                cluster_x=x,
                cluster_y=y,
                split_k=split,
                acc_stages=acc,
                epi_cols=cols,
                store=store,
                raster="x",
                group=1,
            )
            if plan.illegal() is None:
                yield _deepest(plan)


def _deepest(plan: GemmPlan) -> GemmPlan:
    """Return ``plan`` with as many stages as fit: by the model more are never slower."""

    def too_many(stages: int) -> bool:
        return replace(plan, stages=stages).illegal() is not None

    more = bisect_left(range(plan.stages + 1, MAX_STAGES + 1), True, key=too_many)
    return replace(plan, stages=plan.stages + more)


def ranked(
    fmt: str, out_dtype: str, m: int, n: int, k: int, machine: Machine = B200, count: int = 1
) -> list[tuple[GemmPlan, Modelled]]:
    """Return the ``count`` fastest legal plans by the model, each with its best tile order."""

    def cost(plan: GemmPlan) -> tuple[float, float]:
        found = time_us(plan, m, machine)
        return found.us, found.hbm_bytes

    first = sorted(legal_plans(fmt, out_dtype, n, k), key=cost)[: 4 * count]
    orders = [
        min((replace(plan, raster=r, group=g) for r in ("x", "y") for g in GROUPS), key=cost)
        for plan in first
    ]
    return [(plan, time_us(plan, m, machine)) for plan in sorted(orders, key=cost)[:count]]


@dataclass(frozen=True)
class Point:
    """One published time of a whole kernel.

    Attributes:
        kernel: whose.
        us: microseconds, or those that follow from the published FLOP/s.
        plan: the plan nearest to the kernel's own; None where its tiles are not known, and the
            model's best plan stands for it.
        fitted: whether the model's fitted numbers saw it.
    """

    kernel: str
    fmt: str
    out_dtype: str
    m: int
    n: int
    k: int
    us: float
    source: str
    plan: GemmPlan | None = None
    fitted: bool = True

    @property
    def shape(self) -> str:
        """``M x N x K``."""
        same = self.m == self.n == self.k
        return f"{self.m}³" if same else f"{self.m} x {self.n} x {self.k}"


@cache
def points() -> list[Point]:
    """Return all points: those that the fit saw first, by kernel and size.

    Of several kernels that are published for a shape the fastest counts.
    """
    found = []
    for group in json.loads(POINTS.read_text(encoding="utf-8")):
        about = (group["fmt"], group["out_dtype"])
        for point in group["points"]:
            m, n, k = point["shape"]
            rates = point.get("tflops", {})
            times = point.get("us", {name: 2e-6 * m * n * k / t for name, t in rates.items()})
            kernel = min(times, key=lambda name: times[name])
            # tirx-kernels': a pair of CTAs, one accumulator, no multicast
            plan = pair(m, acc_stages=1, **point["plan"]) if "plan" in point else None
            shape = (m, n, k, times[kernel], group["source"])
            found.append(Point(kernel, *about, *shape, plan, group["fitted"]))
    return found


@dataclass(frozen=True)
class Compared:
    """A published time beside the modelled one."""

    point: Point
    plan: GemmPlan
    modelled: Modelled

    @property
    def error(self) -> float:
        """Of the model, as a part of the published time."""
        return self.modelled.us / self.point.us - 1


def compared(machine: Machine = B200, fitted_only: bool = False) -> list[Compared]:
    """Return every published point with what the model says of it."""
    best: dict[tuple[object, ...], tuple[GemmPlan, Modelled]] = {}
    found = []
    for point in points():
        if fitted_only and not point.fitted:
            continue
        key = (point.fmt, point.out_dtype, point.m, point.n, point.k)
        if point.plan is not None:
            pair = point.plan, time_us(point.plan, point.m, machine)
        else:
            if key not in best:
                [best[key]] = ranked(*key, machine=machine)
            pair = best[key]
        found.append(Compared(point, *pair))
    return found


def spread(found: Sequence[Compared]) -> float:
    """Return the root mean square of the logarithms of modelled by published time."""
    return math.sqrt(sum(math.log1p(c.error) ** 2 for c in found) / len(found))


def fit(machine: Machine = B200) -> tuple[Machine, float]:
    """Return ``machine`` with the numbers of `FITTED` that err least over the fitted points.

    A walk along one number at a time, with smaller and smaller steps.
    """
    steps = dict(_FIT_STEPS)
    least = spread(compared(machine, fitted_only=True))
    while max(steps[name] / getattr(machine, name) for name in FITTED) > _FIT_SMALLEST:
        moved = False
        for name, sign in product(FITTED, (1, -1)):
            tried = replace(machine, **{name: getattr(machine, name) + sign * steps[name]})
            err = spread(compared(tried, fitted_only=True))
            if err < least - 1e-6:
                machine, least, moved = tried, err, True
        if not moved:
            steps = {name: step / 2 for name, step in steps.items()}
    return machine, least


def plan_text(plan: GemmPlan) -> str:
    """Return the decisions of a plan in a few words."""
    cluster = f"cluster {plan.cluster_x}x{plan.cluster_y}"
    if plan.split_k > 1:
        cluster = f"split-K {plan.split_k}"
    words = [
        f"MMA {plan.mma_m}x{plan.mma_n}",
        f"K {plan.block_k} x {plan.stages}",
        *(["swap"] if plan.swap else []),
        *(["pair"] if plan.cta_group == 2 else []),
        cluster,
        f"{plan.acc_stages} acc.",
        f"{plan.epi_cols} cols {plan.store}",
        f"{plan.raster}/{plan.group}",
    ]
    return ", ".join(words)


POINT_HEADINGS = ("kernel", "M x N x K", "plan", "limit", "published, us", "modelled, us", "error")


def point_rows(found: Sequence[Compared]) -> list[list[str]]:
    """Return a row for each published time."""
    return [
        [
            f"{c.point.kernel} ({c.point.fmt})",
            c.point.shape,
            f"{'' if c.point.plan else 'best: '}{plan_text(c.plan)}",
            c.modelled.limit,
            us_text(c.point.us),
            us_text(c.modelled.us),
            f"{c.error:+.1%}",
        ]
        for c in found
    ]


def markdown(found: Sequence[Compared]) -> str:
    """Return what docs/b200_model.md shows between its comments."""
    return render(
        "tcgen05/b200.md.j2",
        version=VERSION,
        machine=B200,
        fitted=FITTED,
        seen=[c for c in found if c.point.fitted],
        unseen=[c for c in found if not c.point.fitted],
        spread=spread,
        table=lambda shown: markdown_table(POINT_HEADINGS, point_rows(shown), left=4),
        plan_text=plan_text,
        best=[
            (size, plan, modelled)
            for size in BEST_SIZES
            for plan, modelled in ranked("nvfp4", "bfloat16", size, size, size, count=3)
        ],
    )


@click.command()
@click.option("--fit", "search", is_flag=True, help="Search the fitted numbers and print them.")
@click.option(
    "--docs",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    default=ROOT / "docs" / "b200_model.md",
    help="The page to fill.",
)
def main(search: bool, docs: Path) -> None:
    """Compare the model of a B200 with published times.

    Example: python -m bench.tcgen05.b200_model
    """
    if search:
        machine, err = fit()
        numbers = ", ".join(f"{name}={getattr(machine, name):.4g}" for name in FITTED)
        click.echo(f"{numbers}: rms {err:.2%}")
        return
    text = markdown(compared())
    show(text)
    fill_page(docs, {"b200": text})


if __name__ == "__main__":
    main()
