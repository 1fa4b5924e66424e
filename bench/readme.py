"""Put measured tables into README.md: ``python -m bench.readme --bench FILE --demo FILE``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from bench import tables
from bench.cpu import FORMAT
from bench.emulator import FORMAT as EMULATOR
from blockscale.demo.files import write_text
from blockscale.demo.variants import LABELS

DEMO_FORMAT = 1
_BYTES = {"torch_f32": "fp32", "torch_bf16": "bf16", "ours_f32": "nvfp4", "ours_bf16": "nvfp4"}


def fill(text: str, marker: str, content: str) -> str:
    """Return ``text`` with ``content`` between the comments ``marker:start`` and ``marker:end``.

    Raises:
        ValueError: a marker is missing, or is there twice.
    """
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    if not text.count(start) == text.count(end) == 1 or text.index(start) > text.index(end):
        raise ValueError(
            f"fill: the text needs the lines {start} and {end}, once and in this order"
        )
    before, rest = text.split(start)
    return f"{before}{start}\n{content.strip()}\n{end}{rest.split(end)[1]}"


def read(path: Path, version: int) -> dict[str, Any]:
    """Return the results in ``path``.

    Raises:
        ValueError: they are damaged, or of another format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); measure again") from None
    form = found.get("format") if isinstance(found, dict) else None
    if form != version:
        raise ValueError(
            f"{path}: has format {form!r}, this program reads {version}; measure again"
        )
    return dict(found)


def bench_section(results: Mapping[str, Any], source: str) -> str:
    """Return the tables of `bench.cpu` and a link to the figures behind them."""
    return f"{tables.markdown(results)}\n\nAll figures: [{source}]({source})."


def demo_section(result: Mapping[str, Any]) -> str:
    """Return one row for each way in which the demo ran the model, and the conditions."""
    latency = result["latency"]
    headings = ["", "error of the embeddings", "same nearest neighbour", "Linear weights"]
    headings += [f"{row['input']} ({row['sentences']} x {row['tokens']} tokens)" for row in latency]
    rows = []
    for variant, label in LABELS.items():
        found = result["end_to_end"][variant]
        size = result["bytes"][_BYTES[variant]]
        rows.append(
            [
                label,
                f"{100 * found['median']:.2f} %",
                f"{100 * found['top1']:.1f} %",
                f"{size / 2**20:.1f} MiB",
                *(f"{row['ms'][variant]:.2f} ms" for row in latency),
            ]
        )
    machine, versions = result["machine"], result["versions"]
    return "\n\n".join(
        [
            tables.markdown_table(headings, rows),
            f"{result['model']}, {result['sentences']['count']} sentences; the error is "
            "relative to torch fp32 (median of the sentences), a nearest neighbour is the same "
            'when torch fp32 finds it too; "NVFP4 bf16" has 4-bit weights and bf16 activations. '
            f"Measured on {machine['cpu']}, {machine['cores']} cores, torch "
            f"{versions.get('torch', '?')} on {machine['torch_threads']} threads, "
            f"{result['date'][:10]}; interleaved medians.",
        ]
    )


def emulator_section(results: Mapping[str, Any], source: str) -> str:
    """Return one row for each kernel that `bench.emulator` ran, and the conditions."""
    headings = ["kernel", "time", "first run", "warp-instructions", "per second", "peak memory"]
    rows = [
        [
            case["name"],
            f"{case['seconds']['median']:.2f} s",
            f"{case['seconds']['first']:.2f} s",
            f"{case['warp_instructions']:,}",
            f"{case['warp_instructions_per_s']:,.0f}",
            f"{case['peak_bytes'] / 2**20:.0f} MiB",
        ]
        for case in results["cases"]
    ]
    machine = results["machine"]
    return "\n\n".join(
        [
            tables.markdown_table(headings, rows),
            f"Outputs are checked. Medians of {results['repeats']} seeds on {machine['cpu']}, one "
            f"thread of {machine['cores']} cores, NumPy {results['versions']['numpy']}, "
            f"{results['date'][:10]}; the first run compiles the PTX to Python. All figures: "
            f"[{source}]({source}).",
        ]
    )


def _relative(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path.resolve(), root.resolve())).as_posix()


@click.command()
@click.argument("readme", default="README.md", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--bench",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Results of `python -m bench.cpu --out`; keep them in bench/results.",
)
@click.option(
    "--demo",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Figures of the demo, dist/minilm-nvfp4.json.",
)
@click.option(
    "--emulator",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Results of `python -m bench.emulator --out`; keep them in bench/results.",
)
def main(readme: Path, bench: Path | None, demo: Path | None, emulator: Path | None) -> None:
    """Replace the measured tables of README.md by those of result files.

    Example: python -m bench.readme --bench bench/results/cpu-amd-epyc-2026-11-20.json
    """
    if bench is None and demo is None and emulator is None:
        raise click.UsageError(
            "neither --bench, --demo nor --emulator is given: there is nothing to fill in"
        )
    try:
        text = readme.read_text(encoding="utf-8")
        if bench is not None:
            source = _relative(bench, readme.parent)
            text = fill(text, "bench", bench_section(read(bench, FORMAT), source))
        if demo is not None:
            text = fill(text, "demo", demo_section(read(demo, DEMO_FORMAT)))
        if emulator is not None:
            source = _relative(emulator, readme.parent)
            text = fill(text, "emulator", emulator_section(read(emulator, EMULATOR), source))
        write_text(readme, text)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"filled in {readme}")


if __name__ == "__main__":
    main(prog_name="python -m bench.readme")
