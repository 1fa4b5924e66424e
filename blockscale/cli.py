"""The ``blockscale`` command: tune, build, inspect, emulate, logs check, list.

Only ``tune``, ``build`` and ``logs check`` import tvm.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import click
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"blockscale: the command line needs the package {missing.name!r}; "
        "pip install 'blockscale[build]'"
    ) from None

from blockscale import __version__, host, specs
from blockscale.cli_emulate import emulate

if TYPE_CHECKING:
    from blockscale.tune import TuneResult

_LEVELS = click.Choice(list(host.LEVEL_FEATURES))
_NAMES = click.argument("names", nargs=-1, required=True, metavar="NAMES...")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
_LEVEL = click.option("--level", type=_LEVELS, help="Vector width; this machine's by default.")
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
@click.version_option(__version__, prog_name="blockscale")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Handle the options of the group; each command does its own work."""


@cli.command()
@_NAMES
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    help="Time for everything, compiling included.",
)
@click.option("--trials", type=click.IntRange(min=1), help="Stop after so many measurements.")
@_LEVEL
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("logs"),
    show_default=True,
    help="Every trial is kept here; a second run goes on from it.",
)
@click.option(
    "--logs",
    "logs_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Logs to start from and to commit to; the package's by default.",
)
@click.option(
    "--commit",
    "keep",
    is_flag=True,
    help="Merge the best records into the folder of --logs; without --logs, into the logs inside "
    "the installed package (in a checkout: tuning_logs).",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@_JSON
def tune(
    names: tuple[str, ...],
    seconds: float,
    trials: int | None,
    level: str | None,
    work_dir: Path,
    logs_dir: Path | None,
    keep: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Search for fast schedules on this machine.

    Trials are saved one by one: Ctrl-C or kill -9 loses nothing, and the same command goes on.

    Example: blockscale tune linear_nvfp4_n384_k384_f32 --seconds 30 --commit
    """
    wanted = _specs(names)
    from blockscale.tune import Interrupted, commit
    from blockscale.tune import tune as run

    logs_dir = logs_dir or _committed()
    interrupted = False
    try:
        result = run(
            wanted,
            level=level,
            seconds=seconds,
            trials=trials,
            work_dir=work_dir,
            seed_logs=[logs_dir] if logs_dir.is_dir() else [],
            seed=seed,
        )
    except Interrupted as stop:
        result, interrupted = stop.result, True
    improved = commit(work_dir, logs_dir) if keep and not interrupted else {}
    if as_json:
        _print_json(_tuned_json(result, work_dir, improved) | {"interrupted": interrupted})
    else:
        _print_tuned(result, work_dir, logs_dir if improved else None, improved)
    if interrupted:
        click.echo(
            "Interrupted: every finished trial is saved; the same command goes on.", err=True
        )
        raise SystemExit(130)


@cli.command()
@_NAMES
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="LIB.so",
    help="Library to write.",
)
@_LEVEL
@click.option(
    "--logs",
    "logs_dirs",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where to look schedules up, first one first; the package's logs by default.",
)
@_JSON
def build(
    names: tuple[str, ...],
    output: Path,
    level: str | None,
    logs_dirs: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Compile kernels into a library that torch can load.

    A kernel that no log knows gets its default schedule, and the table says so.

    Example: blockscale build linear_nvfp4_n384_k384 -o kernels.so --logs logs
    """
    wanted = _specs(names)
    from blockscale.build import build as run

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    manifest = run(wanted, output, level=level, logs_dirs=list(logs_dirs) or None)
    if as_json:
        _print_json({"library": str(output), **manifest})
    else:
        _print_library(output, manifest)


@cli.command()
@click.argument("library", type=click.Path(dir_okay=False, path_type=Path), metavar="LIB.so")
@_JSON
def inspect(library: Path, as_json: bool) -> None:
    """Show what a library holds: functions, shapes, dtypes, target, tuned or not.

    The file is checked and read, never loaded: this is safe with a library for another machine.

    Example: blockscale inspect kernels.so --json
    """
    from blockscale.manifest import read_manifest

    manifest = read_manifest(library)
    if as_json:
        _print_json({"library": str(library), **manifest})
    else:
        _print_library(library, manifest)


@cli.group()
def logs() -> None:
    """Look after tuning logs.

    Example: blockscale logs check tuning_logs
    """


@logs.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@_JSON
def check(folders: tuple[Path, ...], as_json: bool) -> None:
    """Check that every entry of the logs still fits its kernel; nothing is run.

    Works on any machine for the logs of every vector width. Exit code 1 when there is a problem;
    a folder without any entry is one.

    Example: blockscale logs check tuning_logs
    """
    from blockscale.logs import check as run
    from blockscale.logs import entries

    chosen = list(folders) or [_committed()]
    problems, count = run(chosen), sum(map(entries, chosen))
    if as_json:
        found = [{"where": p.where, "what": p.what} for p in problems]
        _print_json({"folders": [str(f) for f in chosen], "entries": count, "problems": found})
    else:
        for problem in problems:
            click.echo(str(problem))
        where = ", ".join(map(str, chosen))
        shown = "1 entry" if count == 1 else f"{count} entries"
        if problems:
            click.echo(f"{where}: {shown}, {_count(len(problems), 'problem')}")
        else:
            click.echo(f"{where}: {shown} {'fits' if count == 1 else 'fit'}")
    if problems:
        raise SystemExit(1)


@cli.command("list")
@_JSON
def list_names(as_json: bool) -> None:
    """Show what names of kernels look like.

    Example: blockscale list --json
    """
    found = [specs.Spec.parse(name) for name in specs.NAME_EXAMPLES]
    if as_json:
        _print_json({"examples": [{"name": s.name, "params": _params(s)} for s in found]})
        return
    table = Table(title="names, by example", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("arguments -> results", overflow="fold")
    for spec in found:
        table.add_row(spec.name, Text(_signature(_params(spec))))
    _console().print(table)
    click.echo(
        "n and k are the weight's rows and columns; formats: nvfp4, mxfp4; dtypes of activations: "
        "f32, bf16, f16.\nLeave the dtype out to mean all three."
    )


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
        _print_json({"error": sentence})
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


def _specs(names: Iterable[str]) -> list[specs.Spec]:
    found = {spec.name: spec for name in names for spec in specs.Spec.parse_all(name)}
    return list(found.values())


def _committed() -> Path:
    from blockscale.logs import committed

    return committed()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _print_json(data: dict[str, Any]) -> None:
    click.echo(json.dumps(data, indent=1))


def _params(spec: specs.Spec) -> list[dict[str, Any]]:
    return [{**asdict(p), "shape": list(p.shape)} for p in spec.params()]


def _signature(params: list[dict[str, Any]]) -> str:
    shown = [_declaration(p) for p in sorted(params, key=lambda p: bool(p.get("output")))]
    inputs = sum(not p.get("output") for p in params)
    return f"{', '.join(shown[:inputs])} -> {', '.join(shown[inputs:])}"


def _declaration(param: dict[str, Any]) -> str:
    storage, default = param.get("storage"), param.get("default")
    shown = f"{param['name']}[{', '.join(map(str, param['shape']))}] {param['dtype']}"
    if storage is not None:
        shown += f" ({storage})"
    return shown if default is None else f"{shown} = {default:g}"


def _print_library(path: Path, manifest: dict[str, Any]) -> None:
    target, built = manifest["target"], manifest["built"]
    functions = manifest["functions"]
    size = path.stat().st_size / 1024
    click.echo(
        f"{path}: {_count(len(functions), 'function')}, {size:.0f} KiB, for {target['kind']} level "
        f"{target['level']}; blockscale {manifest['blockscale']}, built {built.get('date', '?')}"
    )
    if target["features"]:
        click.echo(f"needs the CPU features {' '.join(target['features'])}")
    table = Table()
    table.add_column("function", overflow="fold")
    table.add_column("arguments -> results", overflow="fold")
    table.add_column("tuned", overflow="fold")
    for name, function in functions.items():
        buckets = function.get("buckets", [])
        tuned = sum(bool(bucket["tuned"]) for bucket in buckets)
        table.add_row(name, Text(_signature(function["params"])), f"{tuned} of {len(buckets)}")
    _console().print(table)


def _tuned_json(result: TuneResult, work_dir: Path, improved: dict[str, float]) -> dict[str, Any]:
    from math import isfinite

    def finite(times: dict[str, float]) -> dict[str, float | None]:
        return {tag: us if isfinite(us) else None for tag, us in times.items()}

    return {
        "work_dir": str(work_dir),
        "trials": result.trials,
        "elapsed_s": round(result.elapsed_s, 3),
        "best_us": finite(result.best),
        "default_us": finite(result.default),
        "failed": result.failed,
        "committed": improved,
    }


def _print_tuned(
    result: TuneResult, work_dir: Path, logs_dir: Path | None, improved: dict[str, float]
) -> None:
    table = Table(title=f"{result.trials} trials in {result.elapsed_s:.0f} s, kept in {work_dir}")
    for name in ("workload", "default us", "best us", "speed-up", "failed"):
        table.add_column(name, justify="left" if name == "workload" else "right", overflow="fold")
    for tag, best in result.best.items():
        default = result.default[tag]
        ratio = f"{default / best:.2f}x" if best < float("inf") else "-"
        table.add_row(tag, f"{default:.1f}", f"{best:.1f}", ratio, str(result.failed[tag]))
    _console().print(table)
    if logs_dir is not None:
        click.echo(f"committed {_count(len(improved), 'improved workload')} to {logs_dir}")


if __name__ == "__main__":
    main()
