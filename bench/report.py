"""Results as tables, plots and pages, once for all benches.

A page is a Jinja template beside its family; it goes between the comments ``<key>:start`` and
``<key>:end`` of a page of docs/ or of README.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import click
import jinja2
import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown

from bench import measure
from blockscale.demo.figures import STYLE
from blockscale.demo.files import write_atomically, write_json, write_text

Results = Mapping[str, Any]

ROOT = Path(__file__).resolve().parent.parent
PLAIN_WIDTH = 180
"""Columns of the tables where there is no terminal."""

# ---- Numbers ------------------------------------------------------------------------------------


def time_text(seconds: float) -> str:
    """Return three digits and a unit: 0.000412 -> "412 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * scale
        if value >= 1 or unit == "us":
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("the last unit takes everything")


def us_text(us: float | None) -> str:
    """Return three digits: 4.27, 43.1, 143, 2,100."""
    if us is None:
        return ""
    return f"{us:,.{2 if us < 10 else 1 if us < 100 else 0}f}"


def yes(met: object) -> str:
    """Return "yes", or what stands out."""
    return "yes" if met else "**no**"


# ---- Tables -------------------------------------------------------------------------------------


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first ``left`` columns are text, the others numbers."""
    marks = ["---"] * left + ["---:"] * (len(headings) - left)
    lines = [headings, marks, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(markdown: str) -> None:
    """Print Markdown as the terminal can; where there is none, wide tables stay whole."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(Markdown(markdown))


# ---- Pages --------------------------------------------------------------------------------------


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


def fill_page(page: Path, contents: Mapping[str, str]) -> None:
    """Put contents between the markers of a page, all or none."""
    text = page.read_text(encoding="utf-8")
    for marker, content in contents.items():
        text = fill(text, marker, content)
    write_text(page, text)


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


def relative(path: Path, page: Path) -> str:
    """Return the path of a link from ``page``."""
    return Path(os.path.relpath(path.resolve(), page.parent.resolve())).as_posix()


def render(template: str, **facts: Any) -> str:
    """Return the text of ``bench/<template>``; paragraphs without content leave no gap."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "bench"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"us": us_text, "time": time_text, "yes": yes}
    text = environment.get_template(template).render(**facts)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


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


def schedules(results: Results) -> str:
    """Return where the schedules of the libraries came from, as far as the results tell."""
    libraries = results["libraries"]

    def total(key: str) -> int:
        return sum(library[key] for library in libraries)

    if all("buckets" in library for library in libraries):
        tuned, every = total("tuned_buckets"), total("buckets")
        return f"logged schedules in {tuned} of {every} kernels by size, else default ones"
    return (
        f"logged schedules for all sizes in {total('tuned')} of {total('functions')} functions, "
        "in the others for some sizes or none"
    )


# ---- Plots --------------------------------------------------------------------------------------


def save_plots(folder: Path, plots: Callable[[], Mapping[str, Figure]]) -> None:
    """Write figures into ``folder`` under their names, .svg or .png; equal data, equal bytes."""
    fixed = {".svg": {"Date": None}, ".png": {"Software": None}}
    with matplotlib.rc_context(STYLE):
        for name, figure in plots().items():
            suffix = Path(name).suffix
            save = partial(figure.savefig, format=suffix[1:], dpi=150, metadata=fixed[suffix])
            write_atomically(folder / name, save)


# ---- Commands -----------------------------------------------------------------------------------


def report_command(
    key: str,
    version: int,
    page: Callable[[Results, str], str],
    short: Callable[[Results, str], str] | None,
    plots: Callable[[Results], Mapping[str, Figure]],
    about: str,
) -> click.Command:
    """Return a command that fills the place ``key`` of docs/<key>.md, and of the README if it asks.

    Args:
        key: of the markers and of the page's file.
        version: of the results' format.
        page: text of the page, of the results and the path of their file from the page.
        short: text of the README, likewise; None: the README has none.
        plots: what is drawn beside the page, by file name.
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
    def main(results: Path, docs: Path, readme: Path | None = None) -> None:
        document = docs / f"{key}.md"
        try:
            found = read(results, version)
            fill_page(document, {key: page(found, relative(results, document))})
            save_plots(docs, partial(plots, found))
            if short is not None and readme is not None:
                fill_page(readme, {key: short(found, relative(results, readme))})
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"filled in {document}" + ("" if readme is None else f" and {readme}"))

    if short is not None:
        option = click.option(
            "--readme",
            type=click.Path(dir_okay=False, path_type=Path),
            help=f"Put the short form here, between <!-- {key}:start --> and <!-- {key}:end -->.",
        )
        main = option(main)
    return main


def measuring_options(kind: str, least: int, repeats: int) -> Callable[[Any], Any]:
    """Return the options that every bench on a CPU has: --json, --out, --repeats, --only."""
    options = [
        click.option("--json", "as_json", is_flag=True, help="Print the results as JSON."),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            help=f"Write the results here; in a folder, as {kind}-<model>-<date>.json.",
        ),
        click.option(
            "--repeats", type=click.IntRange(min=least), default=repeats, show_default=True
        ),
        click.option(
            "--only", metavar="PATTERN", help="Cases whose name holds this text (or glob)."
        ),
    ]
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def chosen(names: Iterable[str], pattern: str | None, noun: str) -> list[str]:
    """Return the names that hold ``pattern``.

    Raises:
        ClickException: there is none.
    """
    found = measure.chosen(names, pattern and [pattern])
    if not found:
        raise click.ClickException(
            f"--only {pattern!r} matches no {noun}; the {noun}s are {', '.join(names)}"
        )
    return found


def deliver(kind: str, results: Results, as_json: bool, out: Path | None, shown: str) -> None:
    """Print results, as JSON or as Markdown ``shown``; write them to ``out`` if it is given."""
    if as_json:
        click.echo(json.dumps(results, indent=1))
    else:
        show(shown)
    if out is not None:
        path = measure.place(out, kind, results["machine"]["cpu"], results["date"])
        write_json(path, results)
        click.echo(f"wrote {path}", err=as_json)
