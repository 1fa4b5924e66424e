"""The pipeline of the NVFP4 GEMM as a picture: ``python -m bench.tcgen05.timeline``; needs nvcc.

One pair of CTAs computes two tiles in the emulator; docs/gemm_timeline.svg shows its warps and
engines.  Virtual cycles order what happens; they are no times.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bench.report import ROOT
from bench.tcgen05.emulated import run_ours, small
from bench.tcgen05.kernels import plan
from blockscale.emulator import timeline

SIZE = 4096
OUT = ROOT / "docs" / "gemm_timeline.svg"


def draw(path: Path, seed: int) -> Path:
    """Draw the run of our kernel for M = N = K = 4096 on two tiles."""
    made, rows = small(plan(SIZE))
    report = run_ours(plan(SIZE), seed).report
    title = (
        f"NVFP4 GEMM {rows} x {made.n} x {made.k}: a pair of CTAs, two tiles of "
        f"{made.mma_m} x {made.mma_n}, {made.stages} stages of {made.block_k}, seed {seed}"
    )
    return timeline.draw(report, path, title=title)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help=".svg or .png")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, seed: int) -> None:
    """Draw the pipeline of one pair of CTAs over two tiles.

    Example: python -m bench.tcgen05.timeline --out timeline.png
    """
    click.echo(f"wrote {draw(out, seed)}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.tcgen05.timeline"))
