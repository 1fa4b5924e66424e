"""The tables of `bench.gpu.linear`'s results, for docs/linear.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from bench.report import Results, render
from blockscale.specs import Linear, Spec

COLUMNS = (1, 8, 16, 64, 128, 256, 512, 1024, 4096)
RANGES = ((1, 16), (32, 64), (128, 256), (384, 768), (1024, 4096))
"""Rows of x, from and to, over which means are taken."""

FEWER, FEWER_FROM = 10, 512
"""Launches of a graph of so many rows and more, in results without "cache_multiple"."""

BYTES_A_US = 4.3e6
"""What floors are made with."""

Means = list[tuple[float, float, float] | None]


def _spec(name: str) -> Linear:
    spec = Spec.parse(name)
    assert isinstance(spec, Linear)
    return spec


def weight_of(spec: Linear) -> str:
    """Return a weight's format as a table has it."""
    return spec.fmt.upper() if spec.fmt != "int4" else f"INT4 g{spec.group}"


def section(result: Results, source: str = "") -> str:
    """Return a row for each weight, and means beside torch and each of the others."""
    cells: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["rows"]:
        best = min((us for us in row["peers"].values() if us), default=None)
        cells.setdefault(row["kernel"], {})[row["rows"]] = row | {"best": best}
    specs = {name: _spec(name) for name in cells}
    return render(
        "pages/linear.md.j2",
        r=result,
        source=source,
        columns=COLUMNS,
        ranges=RANGES,
        table=[
            (weight_of(specs[name]), specs[name].n, specs[name].k, cells[name]) for name in cells
        ],
        means=list(_means(result["rows"])),
        peers=list(result["peers"]),
        worst=max(row["error"] for row in result["rows"] if row["right"]),
        wrong=sum(not row["right"] for row in result["rows"]),
        cached=_cached(result),
        cached_from=FEWER_FROM,
        cached_launches=FEWER,
    )


def _cached(result: Results) -> list[str]:
    """Return the sizes whose weights may have come from the L2 cache: a graph's have fewer bytes.

    Since results say their "cache_multiple" no graph reads less than so many times the cache.
    """
    if "cache_multiple" in result:
        return []
    found: dict[str, None] = {}
    for row in result["rows"]:
        spec = _spec(row["kernel"])
        held = row["floor_us"] * BYTES_A_US - 2 * row["rows"] * (spec.n + spec.k)
        if row["rows"] >= FEWER_FROM and FEWER * held < result["machine"]["l2_bytes"]:
            found[f"{spec.n} x {spec.k}"] = None
    return [*found]


def _means(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, Means]]:
    """Yield a format, who is beside, and mean, least and most for each of `RANGES`."""
    formats: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        formats.setdefault(_spec(row["kernel"]).fmt.upper(), []).append(row)
    for name, own in formats.items():
        for beside in ("torch", *dict.fromkeys(peer for row in own for peer in row["peers"])):
            means: Means = []
            for low, high in RANGES:
                ratios = [
                    other / row["us"]
                    for row in own
                    if low <= row["rows"] <= high and row["right"]
                    if (other := row["torch_us"] if beside == "torch" else row["peers"].get(beside))
                ]
                mean = (geometric_mean(ratios), min(ratios), max(ratios)) if ratios else None
                means.append(mean)
            yield name, beside, means
