"""The command ``blockscale inspect``: what a library or a checkpoint holds.

Of a checkpoint: a table of layers, formats, bytes, ranges and scales.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from blockscale.cli.build import print_library
from blockscale.cli.common import JSON, console, counted, echo, escaped, print_json

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint
    from blockscale.checkpoints.entry import Entry
    from blockscale.checkpoints.stats import Stats

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass
class _Row:
    """Weights of one name but for numbers, of one format and shape."""

    name: str
    entry: Entry
    count: int = 0
    nbytes: int = 0
    members: list[str] = field(default_factory=list)
    stats: Stats | None = None
    unread: list[str] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Return what is wrong with the weights' data."""
        found = self.stats.warnings() if self.stats else []
        if self.unread:
            found.append(f"{len(self.unread)} cannot be read: {self.unread[0]}")
        return found


@click.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="LIB.so|CHECKPOINT")
@click.option("--headers", is_flag=True, help="CHECKPOINT: read no data, so no ranges and scales.")
@click.option("--all", "every", is_flag=True, help="CHECKPOINT: a line for every weight.")
@JSON
def inspect(path: Path, headers: bool, every: bool, as_json: bool) -> None:
    """Show what a library or a checkpoint holds.

    Of a library: functions, shapes, dtypes, target, tuned or not. The file is checked and read,
    never loaded: this is safe with a library for another machine.

    Of a checkpoint (a folder, or a .safetensors file): weights, formats, bytes, ranges of values,
    and the shares of block scales that are zero or subnormal, with a warning; of NVFP4 weights also
    by how much rounding them to E4M3 (rounded=True) would change them.

    Example: blockscale inspect kernels.so --json
    """
    if path.is_dir() or path.suffix == ".safetensors":
        _show(path, headers=headers, every=every, as_json=as_json)
        return
    from blockscale.base.manifest import read_manifest

    manifest = read_manifest(path)
    if as_json:
        print_json({"library": str(path), **manifest})
    else:
        print_library(path, manifest)


def _show(path: Path, *, headers: bool, every: bool, as_json: bool) -> None:
    """Print what the checkpoint holds; with ``headers``, without reading its data."""
    from blockscale import checkpoints

    found = checkpoints.open(path)
    rows: dict[tuple[Any, ...], _Row] = {}
    for name, entry in found.entries.items():
        shown = name if every or as_json else re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        row = rows.setdefault((shown, entry.fmt, entry.shape), _Row(shown, entry))
        row.count, row.nbytes = row.count + 1, row.nbytes + entry.nbytes
        row.members.append(name)
    if not headers:
        _read(found, list(rows.values()))
    if as_json:
        print_json(_json(path, found, list(rows.values())))
    else:
        _print(path, found, list(rows.values()))


def _read(found: Checkpoint, rows: list[_Row]) -> None:
    from blockscale.base.errors import CheckpointError, LinkError
    from blockscale.checkpoints.stats import Stats, stats

    # layouts are undone by kernels, which may need a compiler that is not there
    refusals = CheckpointError, LinkError, RuntimeError
    total = sum(row.nbytes for row in rows)
    screen = Console(stderr=True)
    with Progress(console=screen, disable=not screen.is_terminal, transient=True) as progress:
        task = progress.add_task("reading", total=total)
        for row in rows:
            row.stats = Stats()
            for name in row.members:
                try:
                    row.stats.add(stats(found.weight(name)))
                except refusals as error:
                    row.unread.append(str(error))
                progress.advance(task, found.entries[name].nbytes)


def _json(path: Path, found: Checkpoint, rows: list[_Row]) -> dict[str, Any]:
    from blockscale.checkpoints.stats import COUNTS

    weights = []
    for row in rows:
        entry = row.entry
        facts: dict[str, Any] = {"name": row.name, "fmt": entry.fmt, "scheme": entry.scheme}
        facts |= {"shape": list(entry.shape), "group_size": entry.group, "bytes": row.nbytes}
        if row.stats is not None:
            counts = {name: getattr(row.stats, name) for name in COUNTS}
            counts |= {} if entry.fmt != "nvfp4" else {"rounding_error": row.stats.rounding}
            ends = {k: v if isfinite(v) else None for k, v in _ends(row.stats).items()}
            facts |= {**ends, **counts, "warnings": row.warnings}
        weights.append(facts)
    size = sum(row.nbytes for row in rows)
    about: dict[str, Any] = {"checkpoint": str(path), "kind": found.kind}
    return {
        **about,
        "files": len(found.shards),
        "bytes": size,
        "notes": found.notes,
        "modules": found.modules,
        "weights": weights,
    }


def _ends(stats: Stats) -> dict[str, float]:
    return {"low": stats.low, "high": stats.high}


def _print(path: Path, found: Checkpoint, rows: list[_Row]) -> None:
    size = _size(sum(row.nbytes for row in rows))
    echo(
        f"{path}: {found.kind}, {counted(len(found), 'weight')}, {size} in "
        f"{counted(len(found.shards), 'file')}"
    )
    for note in found.notes:
        echo(f"note: {escaped(note)}")
    table = Table()
    for name in ("weights", "format"):
        table.add_column(name, overflow="fold")
    for name in ("number", "shape", "bytes", "range", "zero", "subnormal"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        cells = [row.name, _format(row.entry), str(row.count)]
        shape = " x ".join(map(str, row.entry.shape)) or "scalar"
        cells += [shape, _size(row.nbytes), *_stat_cells(row.stats)]
        table.add_row(*(Text(cell) for cell in cells))
    console().print(table)
    for row in rows:
        if row.stats is not None and row.stats.rounding is not None:
            echo(f"{escaped(row.name)}: rounded=True would change it by {row.stats.rounding:.2%}")
    warned = [(row.name, warning) for row in rows for warning in row.warnings]
    for name, warning in warned:
        echo(f"warning: {escaped(name)}: {escaped(warning)}")
    if any(row.stats for row in rows) and not warned:
        echo("no scale is degraded: no warnings")


def _format(entry: Entry) -> str:
    return f"{entry.fmt} / {entry.group}" if entry.group else entry.fmt


def _stat_cells(stats: Stats | None) -> list[str]:
    if stats is None or stats.low > stats.high:
        return ["", "", ""]
    ends = f"{stats.low:.3g} .. {stats.high:.3g}"
    if not stats.blocks:
        return [ends, "", ""]
    return [ends, f"{stats.zero / stats.blocks:.1%}", f"{stats.subnormal / stats.blocks:.1%}"]


def _size(nbytes: float) -> str:
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
