"""The ``blockscale`` command: tune, build, inspect, convert, emulate, logs check, list.

Only ``tune``, ``build`` and ``logs check`` import tvm.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import click
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"blockscale: the command line needs the package {missing.name!r}; "
        "pip install 'blockscale[build]'"
    ) from None

from blockscale import specs
from blockscale.base.version import VERSION
from blockscale.cli import inspect as cli_inspect
from blockscale.cli.common import (
    JSON,
    LEVEL,
    NAMES,
    committed,
    console,
    counted,
    print_json,
    specs_of,
)
from blockscale.cli.convert import convert
from blockscale.cli.emulate import emulate
from blockscale.cli.tune import tune

_FAILURES = (ValueError, TypeError, OSError, RuntimeError, ModuleNotFoundError)


_HELP = """Tune, build and look into libraries of 4-bit block-scaled kernels.

NAMES are names of kernels (see: blockscale list). A name without its dtype at the end stands for
all dtypes.

\b
Example: blockscale tune linear_nvfp4_n384_k384 --seconds 30 &&
         blockscale build linear_nvfp4_n384_k384 -o kernels.so --logs logs
"""
"""``\\b`` keeps the lines of the example, which a shell can run as they are printed."""


@click.group(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="blockscale")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Handle the options of the group; each command does its own work."""


@cli.command()
@NAMES
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="LIB.so",
    help="Library to write.",
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
    help="Where to look schedules up, first one first; the package's logs by default.",
)
@JSON
def build(
    names: tuple[str, ...],
    output: Path,
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
    wanted = specs_of(names)
    from blockscale.build.builder import build as run

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    dirs = list(logs_dirs) or None
    manifest = run(wanted, output, level=chosen or level, logs_dirs=dirs, ptx=ptx)
    if as_json:
        print_json({"library": str(output), **manifest})
    else:
        _print_library(output, manifest)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="LIB.so|CHECKPOINT")
@click.option("--headers", is_flag=True, help="CHECKPOINT: read no data, so no ranges and scales.")
@click.option("--all", "every", is_flag=True, help="CHECKPOINT: a line for every weight.")
@JSON
def inspect(path: Path, headers: bool, every: bool, as_json: bool) -> None:
    """Show what a library or a checkpoint holds.

    Of a library: functions, shapes, dtypes, target, tuned or not. The file is checked and read,
    never loaded: this is safe with a library for another machine.

    Of a checkpoint (a folder, or a .safetensors file): weights, formats, bytes, ranges of values,
    and the shares of block scales that are zero or subnormal, with a warning.

    Example: blockscale inspect kernels.so --json
    """
    if cli_inspect.is_checkpoint(path):
        cli_inspect.show(path, headers=headers, every=every, as_json=as_json)
        return
    from blockscale.base.manifest import read_manifest

    manifest = read_manifest(path)
    if as_json:
        print_json({"library": str(path), **manifest})
    else:
        _print_library(path, manifest)


@cli.group()
def logs() -> None:
    """Look after tuning logs.

    Example: blockscale logs check tuning_logs
    """


@logs.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@JSON
def check(folders: tuple[Path, ...], as_json: bool) -> None:
    """Check that every entry of the logs still fits its kernel; nothing is run.

    Works on any machine for the logs of every vector width. Exit code 1 when there is a problem;
    a folder without any entry is one.

    Example: blockscale logs check tuning_logs
    """
    from blockscale.build.logs import check as run
    from blockscale.build.logs import entries

    chosen = list(folders) or [committed()]
    problems, count = run(chosen), sum(map(entries, chosen))
    if as_json:
        found = [{"where": p.where, "what": p.what} for p in problems]
        print_json({"folders": [str(f) for f in chosen], "entries": count, "problems": found})
    else:
        for problem in problems:
            click.echo(str(problem))
        where = ", ".join(map(str, chosen))
        shown = "1 entry" if count == 1 else f"{count} entries"
        if problems:
            click.echo(f"{where}: {shown}, {counted(len(problems), 'problem')}")
        else:
            click.echo(f"{where}: {shown} {'fits' if count == 1 else 'fit'}")
    if problems:
        raise SystemExit(1)


@cli.command("list")
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
        table.add_row(spec.name, Text(_signature(_params(spec))))
    console().print(table)
    click.echo(
        "n and k are the weight's rows and columns; formats: nvfp4, mxfp4; dtypes of activations: "
        "f32, bf16, f16.\nLeave the dtype out to mean all three."
    )


cli.add_command(tune)
cli.add_command(convert)
cli.add_command(emulate)


def main() -> None:
    """Run the command line; exit code 1: bad logs or a bad kernel, 2: an error, 130: Ctrl-C."""
    arguments = sys.argv[1:]
    try:
        status = cli.main(arguments, prog_name="blockscale", standalone_mode=False)
    except click.Abort:
        click.echo("Interrupted.", err=True)
        raise SystemExit(130) from None
    except click.ClickException as error:
        _fail(error.format_message(), arguments, getattr(error, "ctx", None))
    except _FAILURES as error:
        if "--debug" in arguments:
            traceback.print_exc()
        _fail(_sentence(error), arguments)
    raise SystemExit(status if isinstance(status, int) else 0)


def _fail(sentence: str, arguments: list[str], ctx: click.Context | None = None) -> None:
    if "--json" in arguments:
        print_json({"error": sentence})
    else:
        click.echo(f"blockscale: {sentence}", err=True)
        if ctx is not None:
            click.echo(f"Try '{ctx.command_path} --help'.", err=True)
    raise SystemExit(2)


def _sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name!r} is missing; pip install 'blockscale[build]'"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _params(spec: specs.Spec) -> list[dict[str, Any]]:
    shapes = [None if p.shape is None else list(p.shape) for p in spec.params()]
    return [{**p.to_manifest(), "shape": s} for p, s in zip(spec.params(), shapes, strict=True)]


def _signature(params: list[dict[str, Any]]) -> str:
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


def _print_library(path: Path, manifest: dict[str, Any]) -> None:
    target, built = manifest["target"], manifest["built"]
    functions = manifest["functions"]
    size = path.stat().st_size / 1024
    click.echo(
        f"{path}: {counted(len(functions), 'function')}, {size:.0f} KiB, for {target['kind']} "
        f"level {target['level']}; blockscale {manifest['blockscale']}, "
        f"built {built.get('date', '?')}"
    )
    if target["features"]:
        click.echo(f"needs the CPU features {' '.join(target['features'])}")
    table = Table()
    table.add_column("function", overflow="fold")
    table.add_column("arguments -> results", overflow="fold")
    table.add_column("tuned", overflow="fold")
    for name, function in functions.items():
        buckets = function.get("buckets", [])
        table.add_row(name, Text(_signature(function["params"])), _tuned(buckets))
    console().print(table)


def _tuned(buckets: Sequence[dict[str, Any]]) -> str:
    """Return how many buckets are tuned, and how many of these by a model and not a GPU."""
    tuned = sum(bool(bucket["tuned"]) for bucket in buckets)
    modelled = sum("modelled_us" in bucket for bucket in buckets)
    return f"{tuned} of {len(buckets)}" + (f", {modelled} modelled" if modelled else "")


if __name__ == "__main__":
    main()
