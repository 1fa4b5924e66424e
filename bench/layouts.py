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
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.gpu.cases import Case, differing, random_bytes
from bench.gpu.contest import Settings, measured
from bench.measure import Buffer, Data
from blockscale.base.index_maps import IndexMap
from blockscale.demo import timing
from blockscale.specs import Relayout, Swizzle, Unswizzle
from blockscale.specs.layout import LAYOUTS

FORMAT = 1
BAR = 0.6
"""Share of the copy's bandwidth that is asked of every kernel on a GPU."""

WEIGHTS = (8, 4096, 7168)
"""Bytes of 8 experts' INT4 weights, K = 4096 and N = 14336."""

SCALES = (8, 28672, 448)
"""Bytes of 8 experts' block scales: 28672 rows of K = 7168 in blocks of 16."""

GATE_UP = (8, 28672, 1792)
"""A quarter of the packed codes of such rows."""


Spec = Relayout | Swizzle | Unswizzle


def case_of(spec: Spec, shape: tuple[int, ...]) -> Case:
    """Return the case of one kernel and the plain tensor's shape, in bytes."""
    if isinstance(spec, Relayout):
        layout, inverse = spec.map, spec.inverse
        given, made = ("laid", "plain") if inverse else ("plain", "laid")
    else:
        layout, inverse = LAYOUTS["128x4"], isinstance(spec, Unswizzle)
        given, made = "scale", "out"
    plain, laid = (made, given) if inverse else (given, made)

    def judge(before: Data, after: Data) -> dict[str, Any]:
        return {"differ": differing(after[laid], by_torch(layout, after[plain])), "of": prod(shape)}

    return Case(
        *("relayout", spec.name, spec.name),
        {str(axis): size for axis, size in enumerate(shape)},
        {given: Buffer(shape, torch.uint8, random_bytes()), made: Buffer(shape, torch.uint8)},
        dict,
        judge,
        asked={"of_copy": BAR},
    )


def cases() -> list[Case]:
    """Return every layout, both ways."""
    found = [case_of(spec, (prod(SCALES[:2]), SCALES[2])) for spec in (Swizzle(), Unswizzle())]
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
        found += [case_of(Relayout(name, inverse), shape) for inverse in (False, True)]
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


class CpuClock:
    """Times calls on a CPU as `bench.measure` does graphs of them."""

    def capture(self, calls: Sequence[measure.Call], launches: int) -> Sequence[measure.Call]:
        """Return the calls."""
        return calls

    def interleaved(
        self, contenders: Mapping[str, Sequence[measure.Call]], replays: int
    ) -> dict[str, measure.Timing]:
        """Return the times of all, in turns."""
        calls = {
            name: lambda number, calls=calls: calls[number % len(calls)]()
            for name, calls in contenders.items()
        }
        times, _ = timing.interleaved(calls, replays)
        return {
            name: measure.Timing(
                us=1e6 * t.median,
                low=1e6 * t.low,
                high=1e6 * t.high,
                replays=t.samples,
                launches=t.calls,
                sets=len(contenders[name]),
            )
            for name, t in times.items()
        }


def row(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of a kernel and of copies, in microseconds."""
    kept: dict[str, Any] = {"name": found["kernel"], "shape": [*found["shape"].values()]}
    kept |= {"bytes": found["bytes"], "right": False}
    if "failed" in found:
        return {**kept, "failed": found["failed"]}
    return {
        **kept,
        "right": found["checks"]["ours"]["right"],
        "us": {name: found["times"][name]["us"] for name in ("ours", *measure.COPIES)},
        "of_copy": found["of_copy"],
        "tb_s": found["gb_s"]["ours"] / 1e3,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    from bench.report import markdown_table  # needs what a machine with a GPU may lack

    rows = []
    for case in results["cases"]:
        if "us" not in case:
            rows.append([f"`{case['name']}`", case["failed"], "", "", "", ""])
            continue
        copy = min(us for name, us in case["us"].items() if name != "ours")
        size = case["bytes"] / 2 / 2**20
        told = f"{case['of_copy']:.0%}{'' if case['right'] else ' WRONG'}"
        cells = (f"{case['us']['ours']:.1f}", f"{copy:.1f}", f"{case['tb_s']:.3g}", told)
        rows.append([f"`{case['name']}`", f"{size:.0f}", *cells])
    return markdown_table(("kernel", "MiB", "us", "copy us", "TB/s", "of the copy"), rows)


def line(found: Mapping[str, Any]) -> str:
    """Return one line on a case for the console."""
    if "us" not in found:
        return f"{found['name']}: {found['failed']}"
    us = ", ".join(f"{key} {value:.1f}" for key, value in found["us"].items())
    wrong = "" if found["right"] else "  WRONG"
    return f"{found['name']}: us {us}; {found['of_copy']:.1%} of the copy{wrong}"


@torch.no_grad()
def run(given: argparse.Namespace) -> dict[str, Any]:
    """Return all results."""
    session = measure.Session("layouts", given, FORMAT, library=[p.name for p in given.library])
    settings = Settings(given.device, replays=given.replays)
    if given.device == "cuda":
        settings.cache_bytes = session.results["machine"]["l2_bytes"]
        measure.warm_up()
    else:
        settings.cache_bytes, settings.clock = 0, CpuClock()
    for case in cases():
        if case.kernel in session.kernels and measure.chosen([case.kernel], given.only):
            found = row(measured(case, session.kernels, settings))
            session.add(found, line(found))
    return session.end()


def main(given: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a result is wrong."""
    parser = measure.parser("bench.layouts", __doc__, replays=11)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = measure.parsed(parser, given, needed=())
    if options.names:
        print(*(case.kernel for case in cases()))
        return 0
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    if not options.library or options.out is None:
        parser.error("name the kernels and the results: --library FILE --out FILE")
    results = run(options)
    return measure.status("bench.layouts", [c["name"] for c in results["cases"] if not c["right"]])


if __name__ == "__main__":
    sys.exit(main())
