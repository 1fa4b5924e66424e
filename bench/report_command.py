"""The command line of reports: results of a bench into a page of docs/, plots, and README.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from bench.readme import fill, read
from blockscale.demo.files import write_text

Results = Mapping[str, Any]


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def measured_on(results: Results, method: str) -> str:
    """Return one sentence: GPU, driver, versions, date, and ``method`` of timing."""
    gpu = results["machine"]
    named = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{gpu['gpu']} (capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
        f"{gpu['l2_bytes'] / 2**20:.0f} MiB L2), driver {gpu.get('driver_version', 'unknown')}; "
        f"{named}; {results['date'][:10]}. Medians of {results['replays']} interleaved replays of "
        f"CUDA graphs{method}."
    )


def report_command(
    key: str,
    version: int,
    page: Callable[[Results, str], str],
    short: Callable[[Results, str], str],
    plot: Callable[[Results, Path], object],
    about: str,
) -> click.Command:
    """Return a command that fills the places ``key`` of docs/<key>.md and of the README.

    Args:
        key: of the markers and of the page's file.
        version: of the results' format.
        page: text of the page, of the results and the path of their file from the page.
        short: text of the README, likewise.
        plot: draws into the folder of the page.
        about: what the command's help says.
    """

    @click.command(help=about)
    @click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @click.option(
        "--docs",
        default="docs",
        show_default=True,
        type=click.Path(file_okay=False, path_type=Path),
        help=f"Folder of {key}.md and its plots.",
    )
    @click.option(
        "--readme",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"Put the short form here, between <!-- {key}:start --> and <!-- {key}:end -->.",
    )
    def main(results: Path, docs: Path, readme: Path | None) -> None:
        document = docs / f"{key}.md"
        try:
            found = read(results, version)
            text = document.read_text(encoding="utf-8")
            write_text(document, fill(text, key, page(found, _relative(results, docs))))
            plot(found, docs)
            if readme is not None:
                text = readme.read_text(encoding="utf-8")
                made = short(found, _relative(results, readme.parent))
                write_text(readme, fill(text, key, made))
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"filled in {document}" + ("" if readme is None else f" and {readme}"))

    return main
