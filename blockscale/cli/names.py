"""The command ``blockscale list``: what names of kernels look like."""

from __future__ import annotations

from typing import Any

import click
from rich.table import Table
from rich.text import Text

from blockscale import specs
from blockscale.cli.common import JSON, console, print_json, signature


@click.command("list")
@JSON
def list_names(as_json: bool) -> None:
    """Show what names of kernels look like.

    Example: blockscale list --json
    """
    found = [specs.Spec.parse(name) for name in specs.NAME_EXAMPLES]
    if as_json:
        print_json({"examples": [{"name": s.name, "params": _params(s)} for s in found]})
        return
    table = Table(title="names, by example", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("arguments -> results", overflow="fold")
    for spec in found:
        table.add_row(spec.name, Text(signature(_params(spec))))
    console().print(table)
    click.echo(
        "n and k are the weight's rows and columns; formats: nvfp4, mxfp4; dtypes of activations: "
        "f32, bf16, f16.\nLeave the dtype out to mean all three."
    )


def _params(spec: specs.Spec) -> list[dict[str, Any]]:
    shapes = [None if p.shape is None else list(p.shape) for p in spec.params()]
    return [{**p.to_manifest(), "shape": s} for p, s in zip(spec.params(), shapes, strict=True)]
