"""The command ``blockscale list``: what names of kernels look like."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import click

from blockscale import specs
from blockscale.cli.common import JSON, completed, console, echo, print_json, signature


@click.command("list")
@click.argument("filters", nargs=-1, metavar="[FILTER]...", shell_complete=completed)
@click.option("--all", "every", is_flag=True, help="Show the details of every family.")
@JSON
def list_names(filters: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Show what names of kernels look like: one line a family, or all about some.

    FILTER is the name of a kernel, or a part of the names that are wanted; of several, all have to
    fit. With it, the choices that names have and the arguments of kernels are shown as well.

    Example: blockscale list moe
    """
    found = _found(filters)
    if as_json:
        shown = [spec for examples in found.values() for spec in examples]
        print_json({"examples": [{"name": s.name, "params": _params(s)} for s in shown]})
    elif filters or every:
        for cls, examples in found.items():
            _details(cls, examples)
    else:
        for cls, examples in found.items():
            echo(f"{cls.op:16} {examples[0].name}")
        echo("")
        _indented(
            "'blockscale list FILTER' shows how names are made. n and k are a weight's rows and "
            "columns; a name without the dtype at its end stands for all dtypes.",
            0,
        )


def _found(filters: tuple[str, ...]) -> dict[type[specs.Spec], list[specs.Spec]]:
    """Return the examples that are asked for, or else the kernel that is named, by family."""
    found: dict[type[specs.Spec], list[specs.Spec]] = {}
    for cls in specs.SPECS.values():
        families = f"{cls.__module__.rpartition('.')[2]} {cls.op}"
        for name in cls.pattern.examples:
            if all(part.lower() in f"{families} {name}" for part in filters):
                found.setdefault(cls, []).append(specs.Spec.parse(name))
    if not found:
        for spec in specs.Spec.parse_all(" ".join(filters)):
            found.setdefault(type(spec), []).append(spec)
    return found


def _details(cls: type[specs.Spec], examples: list[specs.Spec]) -> None:
    """Print how names of a family are made, and the arguments of examples."""
    _template(f"{cls.op}: {cls.pattern.template}")
    for field, texts in cls.pattern.choices.items():
        shown = ", ".join(text.strip("_") or "(nothing)" for text in texts)
        _indented(f"{{{field}}}: {shown}", 2)
    for spec in examples:
        echo(f"  {spec.name}")
        _indented(signature(_params(spec)), 6)
    echo("")


def _template(text: str) -> None:
    """Print a template, broken before a field where the line is full."""
    line, rest = "", re.split(r"(?=[\[{])", text)
    for part in rest:
        if len(line + part) > console().width:
            echo(line)
            line = "    "
        line += part
    echo(line)


def _indented(text: str, columns: int) -> None:
    indent = " " * columns
    echo(
        textwrap.fill(
            text,
            console().width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _params(spec: specs.Spec) -> list[dict[str, Any]]:
    shapes = [None if p.shape is None else list(p.shape) for p in spec.params()]
    return [{**p.to_manifest(), "shape": s} for p, s in zip(spec.params(), shapes, strict=True)]
