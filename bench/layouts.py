"""Measure the layout kernels: ``python -m bench.layouts --library X --out FILE`` (a GPU or a CPU).

Every kernel is checked against torch's own view and permute on the same device, then timed over
data that no cache holds, in turns with a copy of as many bytes.  The names of all kernels, for
``blockscale build``: ``python -m bench.layouts --names``.  Table of a results file:
``python -m bench.layouts --table FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import gpu_timing
from blockscale.base.index_maps import IndexMap
from blockscale.demo.files import write_json
from blockscale.specs import Relayout, Swizzle, Unswizzle
from blockscale.specs.layout import LAYOUTS

FORMAT = 1
BAR = 0.6
"""Share of the copy's bandwidth that is asked of every kernel on a GPU."""

CPU_RUNS = 7

WEIGHTS = (8, 4096, 7168)
"""Bytes of 8 experts' INT4 weights, K = 4096 and N = 14336."""

SCALES = (8, 28672, 448)
"""Bytes of 8 experts' block scales: 28672 rows of K = 7168 in blocks of 16."""

GATE_UP = (8, 28672, 1792)
"""A quarter of the packed codes of such rows."""


@dataclass(frozen=True)
class Case:
    """One kernel and the plain tensor's shape, in bytes."""

    spec: Relayout | Swizzle | Unswizzle
    shape: tuple[int, ...]

    @property
    def map(self) -> IndexMap:
        """The layout as data."""
        return self.spec.map if isinstance(self.spec, Relayout) else LAYOUTS["128x4"]

    @property
    def inverse(self) -> bool:
        """Whether the plain tensor comes out."""
        spec = self.spec
        return spec.inverse if isinstance(spec, Relayout) else isinstance(spec, Unswizzle)


def cases() -> list[Case]:
    """Return every layout, both ways."""
    found = [Case(spec, (prod(SCALES[:2]), SCALES[2])) for spec in (Swizzle(), Unswizzle())]
    for name, layout in LAYOUTS.items():
        if name.startswith(("128", "8x4", "deepgemm")):
            shape: tuple[int, ...] = SCALES
        elif name.startswith("gate_up"):
            shape = GATE_UP
        elif len(layout.axes) == 2:
            shape = (1, 2 * prod(SCALES))
        elif name.startswith("w4a8"):
            shape = (8, 56, 8 * 28672)
        else:
            shape = WEIGHTS
        found += [Case(Relayout(name, inverse), shape) for inverse in (False, True)]
    return found


def by_torch(layout: IndexMap, plain: Tensor) -> Tensor:
    """Return the bytes of the layout of ``plain``, whole digits: views and one permutation."""
    bits = layout.bits
    if bits == 4:
        plain = torch.stack((plain & 15, plain >> 4), -1).flatten(-2)
    elif bits > 8:
        plain = plain.view(torch.int16 if bits == 16 else torch.int32)
    if len(layout.axes) > plain.dim():
        plain = plain[None]
    sizes = [
        size if size is not None else plain.shape[axis] // step
        for axis, ((_, digits), step) in enumerate(
            zip(layout.axes, layout.multiples(), strict=True)
        )
        for size in digits
    ]
    places = {
        digit: i
        for i, digit in enumerate(
            (name, d) for name, digits in layout.axes for d in range(len(digits))
        )
    }
    made = plain.reshape(sizes).permute([places[digit] for digit in layout.digits]).reshape(-1)
    if layout.flip:
        made = made ^ layout.flip
    if bits == 4:
        made = made[0::2] | made[1::2] << 4
    return made.view(torch.uint8).reshape(-1)


def _sets(case: Case, count: int, device: str) -> list[gpu_timing.Data]:
    fill: Callable[[Tensor], object] = lambda pool: pool.random_(0, 256)  # noqa: E731
    given, made = ("laid", "plain") if case.inverse else ("plain", "laid")
    if not isinstance(case.spec, Relayout):
        given, made = "scale", "out"
    buffers = {
        given: gpu_timing.Buffer(case.shape, torch.uint8, fill),
        made: gpu_timing.Buffer(case.shape, torch.uint8),
    }
    return gpu_timing.rotating(buffers, count, device)


def right(case: Case, kernel: Any, data: gpu_timing.Data) -> bool:
    """Return whether the kernel's result equals torch's."""
    given, made = data.values()
    made.fill_(0xA5)
    kernel(given, made)
    plain, laid = (made, given) if case.inverse else (given, made)
    return torch.equal(by_torch(case.map, plain), laid.reshape(-1))


def measure(case: Case, kernel: Any, device: str, cache: int, replays: int) -> dict[str, Any]:
    """Return the times of a kernel and of copies, in microseconds."""
    size = prod(case.shape)
    found: dict[str, Any] = {"name": case.spec.name, "shape": case.shape, "bytes": 2 * size}
    count = gpu_timing.cold_sets(2 * size, cache) if device == "cuda" else 2
    sets = _sets(case, count, device)
    found["right"] = right(case, kernel, sets[0])
    if device == "cuda":
        launches = gpu_timing.launches_of(2 * size, count)
        copies = gpu_timing.rotating(gpu_timing.copy_buffers(2 * size), count, device)
        contenders = {"ours": gpu_timing.capture(lambda d: kernel(*d.values()), sets, launches)}
        for name, call in gpu_timing.COPIES.items():
            contenders[name] = gpu_timing.capture(call, copies, launches)
        times = gpu_timing.interleaved(contenders, replays)
        found["us"] = {name: timing.us for name, timing in times.items()}
    else:
        given, made = sets[0].values()
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda: kernel(given, made),
            "copy": lambda: made.copy_(given),
        }
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(CPU_RUNS):
            for name, again in runs.items():
                start = time.perf_counter()
                again()
                samples[name].append(1e6 * (time.perf_counter() - start))
        found["us"] = {name: median(values) for name, values in samples.items()}
    best = min(us for name, us in found["us"].items() if name != "ours")
    found["of_copy"] = best / found["us"]["ours"]
    found["tb_s"] = found["bytes"] / found["us"]["ours"] / 1e6
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    rows = []
    for case in results["cases"]:
        copy = min(us for name, us in case["us"].items() if name != "ours")
        size = case["bytes"] / 2 / 2**20
        words = "" if case["right"] else " WRONG"
        told = f"{case['of_copy']:.0%}{words}"
        cells = (f"{case['us']['ours']:.1f}", f"{copy:.1f}", f"{case['tb_s']:.3g}", told)
        rows.append((f"`{case['name']}`", f"{size:.0f}", *cells))
    head = [("kernel", "MiB", "us", "copy us", "TB/s", "of the copy"), ("---", *["---:"] * 5)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (*head, *rows))


@torch.no_grad()
def run(given: argparse.Namespace) -> dict[str, Any]:
    """Return all results, written after each case."""
    import blockscale

    libraries = [blockscale.load(path) for path in given.library]
    kernels = {name: f for library in libraries for name, f in library.functions.items()}
    cuda = given.device == "cuda"
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "library": [path.name for path in given.library],
        "cases": [],
    }
    if cuda:
        from bench.gpu import machine, versions

        results |= {"machine": machine(), "versions": versions()}
        gpu_timing.warm_up()
    cache = results["machine"]["l2_bytes"] if cuda else 0
    for case in cases():
        name = case.spec.name
        if name in kernels and (given.only is None or given.only in name):
            found = measure(case, kernels[name], given.device, cache, given.replays)
            results["cases"].append(found)
            us = ", ".join(f"{key} {value:.1f}" for key, value in found["us"].items())
            wrong = "" if found["right"] else "  WRONG"
            print(f"{name}: us {us}; {found['of_copy']:.1%} of the copy{wrong}", flush=True)
            write_json(given.out, results)
    return results


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description=__doc__)
    parser.add_argument("--library", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, help="the results, a JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", help="kernels whose name holds this text")
    parser.add_argument("--replays", type=int, default=11)
    parser.add_argument("--names", action="store_true", help="print the names of all kernels")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(given)
    if options.names:
        print(*(case.spec.name for case in cases()))
        return 0
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    if not options.library or options.out is None:
        parser.error("name the kernels and the results: --library FILE --out FILE")
    results = run(options)
    print(table(results))
    bad = [case["name"] for case in results["cases"] if not case["right"]]
    if bad:
        print(f"bench.layouts: wrong: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
