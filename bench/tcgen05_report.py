"""The table of bench.tcgen05_quality: ours beside tirx-kernels', line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from bench.tables import markdown_table
from bench.tcgen05_kernels import OURS, SIZES, TIRX

Results = Mapping[str, Any]
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """One line: what it says, its value, how that is written, and which is better.

    ``better`` is -1 where less is better, 1 where more is, 0 where neither is.
    """

    name: str
    value: Callable[[Figures], Any]
    text: Callable[[Any], str] = "{:,}".format
    better: int = 0

    def cell(self, figures: Figures) -> str:
        """Return the value as text; "-" where there is none."""
        value = self.value(figures)
        return "-" if value is None else self.text(value)

    def worse(self, ours: Figures, other: Figures) -> bool:
        """Whether ours is worse."""
        return bool(self.better and self.better * (self.value(ours) - self.value(other)) < 0)


def _emulated(name: str) -> Callable[[Figures], Any]:
    return lambda figures: figures["emulated"][name]


def _kind(name: str) -> Callable[[Figures], Any]:
    return lambda figures: figures["kinds_per_mma"][name]


def _of(name: str) -> Callable[[Figures], Any]:
    return lambda figures: figures[name]


def _loads(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _stages(figures: Figures) -> str:
    return f"{figures['stages']} x {figures['in_flight_bytes'] // figures['stages']:,}"


LINES = (
    Line("tile of a cluster: M x N x K of a stage", _of("tile"), lambda t: " x ".join(map(str, t))),
    Line("SASS the MMA warp issues per MMA", _of("instructions_per_mma"), "{:.2f}".format, -1),
    Line("- tcgen05: MMA, scale copies, commit", _kind("tensor"), "{:.2f}".format),
    Line("- uniform datapath: descriptors", _kind("uniform"), "{:.2f}".format),
    Line("- moves to the uniform datapath", _kind("move"), "{:.2f}".format),
    Line("- vector", _kind("vector"), "{:.2f}".format),
    Line("- waits and control", lambda f: _kind("sync")(f) + _kind("control")(f), "{:.2f}".format),
    Line("PTX of that loop per MMA, as run", _emulated("ptx_per_mma"), "{:.2f}".format),
    Line("SASS per TMA load, each load loop", lambda f: f["instructions_per_load"] or None, _loads),
    Line("shared loads and stores in these loops", _of("shared_in_loops"), better=-1),
    Line("registers of a thread", _of("registers"), better=-1),
    Line("threads", _of("threads")),
    Line("spilled bytes", _of("spilled_bytes"), better=-1),
    Line("shared memory, bytes", _of("smem_bytes")),
    Line("stages x bytes", _stages, str),
    Line("shared memory in flight, bytes", _of("in_flight_bytes"), better=1),
    Line("bytes loaded per 1000 FLOP", _emulated("bytes_per_flop"), lambda v: f"{1e3 * v:.3f}", -1),
    Line("TMEM columns allocated", _of("tmem_allocated"), better=-1),
    Line("TMEM columns used", _of("tmem_used")),
    Line("accumulators", _of("accumulators"), better=1),
    Line("first error in the emulator", lambda f: _emulated("first_error")(f) or "none", str),
)


REASONS = {
    "registers of a thread": (
        "its four storing warps keep 32 accumulators, their bias and their addresses at hand. "
        "Shared memory leaves room for one CTA on an SM, whose registers are less than a third of "
        "the SM's 65,536."
    ),
}
"""Why a line may be worse."""


def pairs(results: Results) -> Iterator[tuple[int, Figures, Figures]]:
    """Yield size, ours, tirx-kernels'."""
    found = {(kernel["kernel"], kernel["size"]): kernel for kernel in results["kernels"]}
    for size in SIZES:
        yield size, found[OURS, size], found[TIRX, size]


def missed(results: Results) -> dict[str, list[int]]:
    """Return the lines on which ours is worse, with the sizes."""
    found = {
        line.name: [size for size, ours, other in pairs(results) if line.worse(ours, other)]
        for line in LINES
    }
    return {name: sizes for name, sizes in found.items() if sizes}


def unexplained(results: Results) -> list[str]:
    """Return the lines on which ours is worse without a reason."""
    return [name for name in missed(results) if name not in REASONS]


def _rows(results: Results) -> Iterator[list[str]]:
    worse = missed(results)
    for line in LINES:
        cells = [line.cell(side) for _, *sides in pairs(results) for side in sides]
        sizes = ", ".join(map(str, worse.get(line.name, [])))
        yield [line.name, *cells, f"no: {sizes}" if sizes else "yes" if line.better else ""]


def _heads(results: Results) -> list[str]:
    heads = [f"{size} {side}" for size, *_ in pairs(results) for side in ("ours", "tirx")]
    return ["M = N = K", *heads, "at least as good"]


def console_table(results: Results) -> Table:
    """Return the table for a terminal."""
    table = Table(*_heads(results))
    for row in _rows(results):
        table.add_row(*row, style="bold red" if row[-1].startswith("no") else "")
    return table


def document(results: Results) -> str:
    """Return the table as Markdown, under a line of versions."""
    v = results["versions"]
    head = (
        f"blockscale {v['blockscale']}, {results['date'][:10]}; {TIRX} {v[TIRX]} with apache-tvm "
        f"{v['apache-tvm']}, {v['tirx_date']}; nvcc {v['nvcc']} for {results['arch']}, nvdisasm "
        f"{v['nvdisasm']}."
    )
    reasons = "\n".join(f"* {name}: {REASONS.get(name, '?')}" for name in missed(results))
    table = markdown_table(_heads(results), [*_rows(results)])
    return "\n\n".join(filter(None, [head, table, reasons and f"Why not:\n\n{reasons}"]))
