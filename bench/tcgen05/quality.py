"""Quality of GEMM kernels' machine code: ``python -m bench.tcgen05.quality``.

Compiles our GEMMs, reads their machine code, and runs small cases in the emulator; needs nvcc and
nvdisasm, and no GPU.  Writes docs/tcgen05_quality.md (between its comments) and a file in
bench/results/.  tirx-kernels' figures are kept from that file (with --tirx they are measured anew
from its CUDA source), and so are those of the templates that our kernels were before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import blockscale
from bench.measure import now
from bench.report import ROOT, fill_page, markdown_table, read, render, show
from bench.tcgen05 import sass, structures
from bench.tcgen05.emulated import run_ours, run_tirx
from bench.tcgen05.kernels import (
    ENTRY,
    OURS,
    SIZES,
    TIRX,
    TIRX_ENTRY,
    Geometry,
    derived,
    geometry,
    plan,
    tirx,
)
from blockscale.demo.files import write_json
from blockscale.lower import nvcc
from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.kernel import THREADS

FORMAT = 2
ARCH = "sm_100a"
Results = Mapping[str, Any]
Figures = Mapping[str, Any]
RESULTS = ROOT / "bench" / "results" / "tcgen05-quality-sm_100a.json"
DOCUMENT = ROOT / "docs" / "tcgen05_quality.md"


def figures(text: str, entry: str, shape: Geometry) -> dict[str, Any]:
    """Return what the compiler and the disassembler say of a kernel in CUDA C++ for sm_100a."""
    made = nvcc.compile_cuda_source(text, ARCH)
    (used,) = (found for found in made.resources if found["name"] == entry)
    code = sass.disassemble(made.image, entry)
    main, loads = code.main_loop(), code.load_loops()
    return {
        "tile": [shape.tile_m, shape.tile_n, shape.block_k],
        "cluster": shape.cluster,
        "threads": shape.threads,
        "instructions_per_mma": len(main.instructions) / main.mmas,
        "kinds_per_mma": {kind: count / main.mmas for kind, count in main.kinds.items()},
        "loop_instructions": len(main.instructions),
        "loop_mmas": main.mmas,
        "unrolled": main.unrolled,
        "instructions_per_load": [
            len(turn.instructions) / turn.count(sass.is_load) for turn in loads
        ],
        "shared_in_loops": sum(turn.shared_accesses for turn in (main, *loads)),
        "registers": used["registers"],
        "spilled_bytes": used["spills"],
        "stack_bytes": used["stack"],
        "local_accesses": code.has(sass.LOCAL),
        "smem_bytes": shape.smem_bytes + int(used["shared"]),
        "stages": shape.stages,
        "in_flight_bytes": shape.in_flight,
        "bytes_per_flop": shape.stage_loads / shape.stage_flops,
        "accumulators": shape.accumulators,
        "tmem_used": shape.tmem_used,
        "tmem_allocated": shape.tmem_allocated,
    }


def measure_ours(size: int, *, emulate: bool = True) -> dict[str, Any]:
    """Return the figures of our kernel for M = N = K = size."""
    made = plan(size)
    shape = geometry(made, THREADS)
    found = figures(emit(derived(made), ENTRY), ENTRY, shape)
    if emulate:
        found["emulated"] = run_ours(made).figures(shape)
    return {"kernel": OURS, "size": size, **found}


def measure_tirx(text: str, size: int) -> dict[str, Any]:
    """Return the figures of tirx-kernels' CUDA source for M = N = K = size."""
    shape = tirx(size)
    ptx = nvcc.compile_cuda_source(text, ARCH, ptx=True).image.decode()
    found = figures(text, TIRX_ENTRY, shape)
    found["emulated"] = run_tirx(ptx, size).figures(shape)
    return {"kernel": TIRX, "size": size, **found}


def results(sources: dict[int, Path], versions: dict[str, str], console: Console) -> dict[str, Any]:
    """Return all figures: ours measured, tirx-kernels' measured or those of the last time."""
    kernels, peer, kept = [], versions, read(RESULTS, FORMAT)
    for size in SIZES:
        with console.status(f"{OURS} {size}"):
            kernels.append(measure_ours(size))
    if sources:
        for size in SIZES:
            with console.status(f"{TIRX} {size}"):
                kernels.append(measure_tirx(sources[size].read_text(), size))
    else:
        kernels += [kernel for kernel in kept["kernels"] if kernel["kernel"] == TIRX]
        peer = {name: kept["versions"][name] for name in (TIRX, "apache-tvm", "tirx_date")}
    with console.status("structures"):
        shapes = structures.measured(kept["structures"])
    return {
        "format": FORMAT,
        "date": now(),
        "arch": ARCH,
        "versions": {
            "blockscale": blockscale.__version__,
            "nvcc": nvcc.version(),
            "nvdisasm": sass.version(),
            **peer,
        },
        "kernels": kernels,
        "structures": shapes,
        "build": kept["build"],
    }


# ---- The table: ours beside tirx-kernels', line by line ------------------------------------------


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


STRUCTURE_REASONS: Mapping[tuple[str, str], str] = {
    ("direct", "registers"): (
        "four more, without spills; shared memory leaves room for one CTA on an SM, whose threads "
        "may have 255"
    ),
}
"""Why a figure of a structure may be worse than before."""


def unexplained(results: Results) -> list[str]:
    """Return the lines on which ours is worse, than tirx-kernels' or before, without a reason."""
    lost = structures.worse(results["structures"])
    before = [
        f"{name}: {figure}" for name, figure in lost if (name, figure) not in STRUCTURE_REASONS
    ]
    return [name for name in missed(results) if name not in REASONS] + before


def _rows(results: Results) -> Iterator[list[str]]:
    worse = missed(results)
    for line in LINES:
        cells = [line.cell(side) for _, *sides in pairs(results) for side in sides]
        sizes = ", ".join(map(str, worse.get(line.name, [])))
        yield [line.name, *cells, f"no: {sizes}" if sizes else "yes" if line.better else ""]


def _heads(results: Results) -> list[str]:
    heads = [f"{size} {side}" for size, *_ in pairs(results) for side in ("ours", "tirx")]
    return ["M = N = K", *heads, "at least as good"]


def structures_document(results: Results) -> str:
    """Return the table of structures as Markdown, before and after."""
    found = results["structures"]
    return render(
        "tcgen05/structures.md.j2",
        table=markdown_table(structures.HEADS, [*structures.rows(found)]),
        worse=[(*lost, STRUCTURE_REASONS.get(lost, "?")) for lost in structures.worse(found)],
        other=structures.other(found),
        heads={column.name: column.head for column in structures.COLUMNS},
        build=results["build"],
    )


def pages(results: Results) -> dict[str, str]:
    """Return what the document shows, by marker."""
    return {"tcgen05": document(results), "structures": structures_document(results)}


def document(results: Results) -> str:
    """Return the table as Markdown, under a line of versions."""
    return render(
        "tcgen05/quality.md.j2",
        r=results,
        v=results["versions"],
        tirx=TIRX,
        table=markdown_table(_heads(results), [*_rows(results)]),
        missed=missed(results),
        reasons=REASONS,
    )


# ---- The command --------------------------------------------------------------------------------


def _sources(folder: Path | None) -> dict[int, Path]:
    if folder is None:
        return {}
    found = {size: folder / f"{ENTRY}_{size}.cu" for size in SIZES}
    for path in found.values():
        if not path.is_file():
            raise click.UsageError(f"--tirx {folder}: there is no {path.name}; {DOCUMENT} says how")
    return found


@click.command()
@click.option(
    "--tirx",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Folder of tirx-kernels' CUDA sources {ENTRY}_<size>.cu; without it, its last figures.",
)
@click.option("--tirx-version", help="Of the package that wrote these sources.")
@click.option("--tvm-version", help="Of the apache-tvm that it used.")
@click.option("--write", is_flag=True, help="Update the committed results and the document.")
def main(
    folder: Path | None, tirx_version: str | None, tvm_version: str | None, write: bool
) -> None:
    """Compare our GEMMs with tirx-kernels' NVFP4 GEMM, and with what they were before.

    Example: python -m bench.tcgen05.quality --write
    """
    console = Console()
    if folder is not None and not (tirx_version and tvm_version):
        raise click.UsageError("--tirx needs --tirx-version and --tvm-version, for the record")
    versions = {TIRX: tirx_version or "", "apache-tvm": tvm_version or "", "tirx_date": now()[:10]}
    found = results(_sources(folder), versions, console)
    for text in pages(found).values():
        show(text)
    if write:
        write_json(RESULTS, found)
        fill_page(DOCUMENT, pages(found))
        console.print(f"wrote {RESULTS} and {DOCUMENT}")
    if unexplained(found):
        raise click.ClickException(f"worse: {'; '.join(unexplained(found))}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.tcgen05.quality"))
