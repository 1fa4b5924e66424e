"""Put measured tables into pages of docs/: ``python -m bench.readme --bench FILE --demo FILE``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from bench import emulator
from bench.cpu import report as cpu_report
from bench.cpu.report import FORMAT
from bench.report import Results, fill_page, read, relative, render
from blockscale.demo.tables import disturbed
from blockscale.demo.variants import LABELS

_BYTES = {"torch_f32": "fp32", "torch_bf16": "bf16", "ours_f32": "nvfp4", "ours_bf16": "nvfp4"}


def demo_section(result: Results, source: str = "") -> str:
    """Return one row for each way in which the demo ran the model, and the conditions."""
    busy = disturbed(result["latency"])
    return render("pages/demo.md.j2", r=result, labels=LABELS, weights=_BYTES, disturbed=busy)


SECTIONS: dict[str, tuple[str, int, Callable[[Results, str], str]]] = {
    "bench": ("docs/cpu.md", FORMAT, cpu_report.section),
    "demo": ("docs/demo.md", 1, demo_section),
    "emulator": ("docs/emulator.md", emulator.FORMAT, emulator.section),
}
"""By marker: page, the results' format, and what makes the text of them and of their path."""


def _results(option: str, about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option(option, type=path, help=about)


@click.command()
@click.argument("page", required=False, type=click.Path(dir_okay=False, path_type=Path))
@_results("--bench", "Results of `python -m bench.cpu --out`; keep them in bench/results.")
@_results("--demo", "Figures of the demo, dist/minilm-nvfp4.json.")
@_results("--emulator", "Results of `python -m bench.emulator --out`; keep them in bench/results.")
def main(page: Path | None, **files: Path | None) -> None:
    """Replace the measured tables of PAGE (else of the pages of docs/) by those of result files.

    Example: python -m bench.readme --bench bench/results/cpu-amd-epyc-2026-11-20.json
    """
    given = {marker: path for marker, path in files.items() if path is not None}
    if not given:
        raise click.UsageError(
            "neither --bench, --demo nor --emulator is given: there is nothing to fill in"
        )
    try:
        contents: dict[Path, dict[str, str]] = {}
        for marker, path in given.items():
            own, version, make = SECTIONS[marker]
            target = page or Path(own)
            found = make(read(path, version), relative(path, target))
            contents.setdefault(target, {})[marker] = found
        for target, sections in contents.items():
            fill_page(target, sections)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"filled in {', '.join(map(str, contents))}")


if __name__ == "__main__":
    main(prog_name="python -m bench.readme")
