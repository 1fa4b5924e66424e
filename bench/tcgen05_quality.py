"""Quality of the GEMM's main loop: ``python -m bench.tcgen05_quality``; needs nvcc and nvdisasm.

Compiles our NVFP4 GEMM, reads its machine code, and runs a small case in the emulator; no GPU.
Writes docs/tcgen05_quality.md (between its comments) and a file in bench/results/.  tirx-kernels'
figures are kept from that file; with --tirx they are measured anew from its CUDA source.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import blockscale
from bench import sass
from bench.readme import fill, read
from bench.tcgen05_emulated import run_ours, run_tirx
from bench.tcgen05_kernels import (
    ENTRY,
    OURS,
    SIZES,
    TIRX,
    TIRX_ENTRY,
    Geometry,
    geometry,
    plan,
    tirx,
)
from bench.tcgen05_report import console_table, document, unexplained
from blockscale.demo.files import write_json, write_text
from blockscale.lower import nvcc
from blockscale.lower.gemm.source import THREADS, source

FORMAT = 1
ARCH = "sm_100a"
ROOT = Path(__file__).resolve().parent.parent
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
    found = figures(source(made, ENTRY), ENTRY, shape)
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
    kernels, peer = [], versions
    for size in SIZES:
        with console.status(f"{OURS} {size}"):
            kernels.append(measure_ours(size))
    if sources:
        for size in SIZES:
            with console.status(f"{TIRX} {size}"):
                kernels.append(measure_tirx(sources[size].read_text(), size))
    else:
        kept = read(RESULTS, FORMAT)
        kernels += [kernel for kernel in kept["kernels"] if kernel["kernel"] == TIRX]
        peer = {name: kept["versions"][name] for name in (TIRX, "apache-tvm", "tirx_date")}
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "arch": ARCH,
        "versions": {
            "blockscale": blockscale.__version__,
            "nvcc": nvcc.version(),
            "nvdisasm": sass.version(),
            **peer,
        },
        "kernels": kernels,
    }


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
    """Compare the main loop of our NVFP4 GEMM with tirx-kernels', line by line.

    Example: python -m bench.tcgen05_quality --write
    """
    console = Console()
    if folder is not None and not (tirx_version and tvm_version):
        raise click.UsageError("--tirx needs --tirx-version and --tvm-version, for the record")
    date = datetime.now(UTC).date().isoformat()
    versions = {TIRX: tirx_version or "", "apache-tvm": tvm_version or "", "tirx_date": date}
    found = results(_sources(folder), versions, console)
    wide = console if console.is_terminal else Console(width=150)
    wide.print(console_table(found))
    if write:
        write_json(RESULTS, found)
        text = fill(DOCUMENT.read_text(encoding="utf-8"), "tcgen05", document(found))
        write_text(DOCUMENT, text)
        console.print(f"wrote {RESULTS} and {DOCUMENT}")
    if unexplained(found):
        raise click.ClickException(f"worse than {TIRX}: {'; '.join(unexplained(found))}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.tcgen05_quality"))
