"""The command ``blockscale build``: kernels into a library; and what a library holds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from blockscale.cli.common import (
    JSON,
    LEVEL,
    committed,
    completed,
    console,
    counted,
    echo,
    escaped,
    print_json,
    signature,
    specs_of,
)
from blockscale.specs import Spec

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAMES...]", shell_complete=completed)
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, path_type=Path),
    metavar="DIR",
    help="Build what the modules of a 4-bit checkpoint call; NAMES come on top.",
)
@click.option(
    "--dtype",
    type=click.Choice([*_DTYPES]),
    help="Of the activations, with --checkpoint; what config.json says by default.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="LIB.so",
    help="Library to write; required, but with --names.",
)
@click.option(
    "--names",
    "only_names",
    is_flag=True,
    help="Print the names of the kernels, a line each, and build nothing; needs no compiler.",
)
@LEVEL
@click.option(
    "--target",
    "archs",
    multiple=True,
    metavar="ARCH",
    help="Build for a GPU architecture, for example sm_90a, and not for a CPU; several go into one "
    "library: --target sm_90a,sm_100a. No GPU is needed.",
)
@click.option("--ptx", is_flag=True, help="Embed PTX for the driver to compile: --target only.")
@click.option(
    "--logs",
    "logs_dirs",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to look schedules up, first one first; the package's logs come last.",
)
@JSON
def build(
    names: tuple[str, ...],
    checkpoint: Path | None,
    dtype: str | None,
    output: Path | None,
    only_names: bool,
    level: str | None,
    archs: tuple[str, ...],
    ptx: bool,
    logs_dirs: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compile kernels into a library that torch can load.

    A kernel that no log knows gets its default schedule, and the table says so.

    Example: blockscale build linear_nvfp4_n384_k384 -o kernels.so --logs logs
    """
    chosen = [arch.strip() for listed in archs for arch in listed.split(",")]
    if chosen and level:
        raise click.UsageError("--level is for CPUs and --target for GPUs; give one of them")
    if not names and checkpoint is None:
        raise click.UsageError("Missing argument 'NAMES...', or --checkpoint.")
    if dtype and checkpoint is None:
        raise click.UsageError("--dtype is for --checkpoint; NAMES say theirs")
    if ptx and not chosen:
        raise click.UsageError("--ptx is for GPUs; name their architecture with --target")
    if output is None and not only_names:
        raise click.UsageError("Missing option '-o' / '--output', or --names.")
    wanted = specs_of(names)
    if checkpoint is not None:
        known = {spec.name for spec in wanted}
        more = _of_checkpoint(checkpoint, cuda=bool(chosen), dtype=dtype)
        wanted += [spec for spec in more if spec.name not in known]
    if output is None or only_names:
        _print_names(wanted, as_json=as_json)
        return
    from blockscale.building.builder import build as run

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    dirs = [*logs_dirs, committed()]  # as `blockscale.build` has them
    manifest = run(wanted, output, level=chosen or level, logs_dirs=dirs, ptx=ptx)
    if as_json:
        print_json({"library": str(output), **manifest})
    else:
        print_library(output, manifest)


def _print_names(wanted: Sequence[Spec], *, as_json: bool) -> None:
    names = [spec.name for spec in wanted]
    if as_json:
        print_json({"names": names})
    else:
        echo("\n".join(names))


def _of_checkpoint(path: Path, *, cuda: bool, dtype: str | None) -> list[Spec]:
    """Return what the modules of a checkpoint call."""
    from blockscale import checkpoints
    from blockscale.nn.kernels import kernels_of

    return kernels_of(
        checkpoints.open(path), cuda=cuda, dtype=None if dtype is None else _DTYPES[dtype]
    )


def print_library(path: Path, manifest: dict[str, Any]) -> None:
    """Print what a library holds, as its manifest says."""
    target, built = manifest["target"], manifest["built"]
    functions = manifest["functions"]
    size = path.stat().st_size / 1024
    kind, level, version, date = map(
        escaped, (target["kind"], target["level"], manifest["blockscale"], built.get("date", "?"))
    )
    echo(
        f"{path}: {counted(len(functions), 'function')}, {size:.0f} KiB, for {kind} level {level}; "
        f"blockscale {version}, built {date}"
    )
    if target["features"]:
        echo(f"needs the CPU features {escaped(' '.join(target['features']))}")
    table = Table()
    table.add_column("function", overflow="fold")
    table.add_column("arguments -> results", overflow="fold")
    table.add_column("tuned", overflow="fold")
    for name, function in functions.items():
        buckets = function.get("buckets", [])
        table.add_row(Text(name), Text(signature(function["params"])), _tuned(buckets))
    console().print(table)


def _tuned(buckets: Sequence[dict[str, Any]]) -> str:
    """Return how many buckets are tuned, and how many of these by a model and not a GPU."""
    tuned = sum(bool(bucket["tuned"]) for bucket in buckets)
    modelled = sum("modelled_us" in bucket for bucket in buckets)
    return f"{tuned} of {len(buckets)}" + (f", {modelled} modelled" if modelled else "")
