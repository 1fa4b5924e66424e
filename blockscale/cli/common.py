"""What the commands share: options, and how they print."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from blockscale import specs
from blockscale.base.targets import CPU_TARGETS


def completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names for the shell to complete to: one kernel of each kind."""
    return [name for name in specs.NAME_EXAMPLES if name.startswith(incomplete)]


LEVELS = click.Choice(list(CPU_TARGETS))
NAMES = click.argument(
    "names", nargs=-1, required=True, metavar="NAMES...", shell_complete=completed
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
LEVEL = click.option("--level", type=LEVELS, help="Vector width; this machine's by default.")


def specs_of(names: Iterable[str]) -> list[specs.Spec]:
    """Return the kernels that ``names`` stand for, each once."""
    found = {spec.name: spec for name in names for spec in specs.Spec.parse_all(name)}
    return list(found.values())


def committed() -> Path:
    """Return the folder of the package's logs."""
    from blockscale.building import logs

    return logs.committed()


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return for example ``2 problems``; ``plural`` where an s is not enough."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def escaped(text: object, keep: str = "") -> str:
    """Return ``text`` as one line of printable characters.

    What a file says may reach a terminal, where control characters clear the screen, rename the
    window or turn the text around; ``keep`` are those that stay.
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode()
        for c in str(text)
    )


def echo(text: str, *, err: bool = False) -> None:
    """Print ``text``, of which lines are all that is not printable."""
    click.echo(escaped(text, keep="\n"), err=err)


class _Console(Console):
    """Prints what is not printable as `escaped` does, whatever it is asked to print."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(escaped(part.text, keep="\n"), part.style)


def console() -> Console:
    """Return what tables are printed with: as wide as the terminal or COLUMNS, else 120."""
    return _Console(width=shutil.get_terminal_size((120, 24)).columns)


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object to stdout."""
    echo(json.dumps(data, indent=1))


def signature(params: list[dict[str, Any]]) -> str:
    """Return a kernel's arguments and results, for example ``x[n] bfloat16 -> y[n] bfloat16``."""
    shown = [_declaration(p) for p in sorted(params, key=lambda p: bool(p.get("output")))]
    inputs = sum(not p.get("output") for p in params)
    return f"{', '.join(shown[:inputs])} -> {', '.join(shown[inputs:])}"


def _declaration(param: dict[str, Any]) -> str:
    storage, default = param.get("storage"), param.get("default")
    shape = param["shape"]
    dims = "" if shape is None else f"[{', '.join(map(str, shape))}]"
    shown = f"{param['name']}{dims} {param['dtype']}"
    if storage is not None:
        shown += f" ({storage})"
    return shown if default is None else f"{shown} = {default:g}"
