"""The HTML report: one self-contained file made from the demo's JSON.

python -m blockscale.demo.report dist/minilm-nvfp4.json --png docs/report.png
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import click

from . import files, tables
from .variants import LABELS

NEEDED = ("layers", "end_to_end", "ops", "latency", "bytes", "machine", "versions", "date")


def render(result: Mapping[str, Any]) -> str:
    """Return the report's HTML for `result`, the content of the demo's JSON file.

    Raises ValueError when a part of `result` is missing.
    """
    import jinja2

    from . import figures

    missing = [key for key in NEEDED if key not in result]
    if missing:
        raise ValueError(
            f"report: the figures have no {', '.join(missing)}; give the JSON file that "
            "`make demo` writes"
        )
    search = result.get("search", {"history": []})
    history = search["history"]
    good = [event for event in history if not event["failed"]]
    pictures = {
        "layers": figures.data_uri(figures.layer_errors, result["layers"], 10.5, 4.2),
        "ops": figures.data_uri(figures.op_times, result["ops"], 10.5, 4.6),
        "latency": figures.data_uri(figures.latency, result["latency"], 10.5, 1.9),
    }
    if good:
        pictures["tuning"] = figures.data_uri(figures.tuning_curve, history, 10.5, 4.4)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": tables.percent, "mebibytes": tables.mebibytes}
    template = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        r=result,
        date=datetime.fromisoformat(result["date"]).strftime("%Y-%m-%d %H:%M %Z"),
        search=search,
        search_summary=tables.search(search) if history else "",
        pictures=pictures,
        labels=LABELS,
        fastest=[_fastest(row) for row in result["latency"]],
        warning=tables.warning,
    )


def _fastest(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the faster of our variants for one input, and torch's times over its time."""
    best = min(("ours_f32", "ours_bf16"), key=lambda variant: row["ms"][variant])
    ratios = tables.speedups(row, "ms")
    return {"input": row["input"], "ms": row["ms"][best], "label": LABELS[best], "ratios": ratios}


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Write the report on `result` to `path`, all at once."""
    files.write_text(path, render(result))


@click.command()
@click.argument("figures_json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--html", type=click.Path(path_type=Path), help="Write the HTML report here.")
@click.option("--png", type=click.Path(path_type=Path), help="Write the main figure here, as PNG.")
def main(figures_json: Path, html: Path | None, png: Path | None) -> None:
    """Make the report, or its main figure, again from the figures of a demo run.

    Example: python -m blockscale.demo.report dist/minilm-nvfp4.json --png docs/report.png
    """
    try:
        files.need_modules("jinja2", "matplotlib")
        result = json.loads(figures_json.read_text(encoding="utf-8"))
        if html is not None:
            write_report(result, html)
        if png is not None:
            from . import figures

            files.write_atomically(png, lambda new: figures.main_figure(result, new))
    except (files.PrerequisiteError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
