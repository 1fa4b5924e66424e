"""The command ``blockscale tune``: search for fast schedules on this machine."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from blockscale.base.targets import is_gpu
from blockscale.cli.common import (
    JSON,
    LEVEL,
    NAMES,
    committed,
    console,
    counted,
    echo,
    print_json,
    specs_of,
)

if TYPE_CHECKING:
    from blockscale.tuning.tuner import TuneResult


@click.command()
@NAMES
@click.option(
    "--seconds",
    type=float,
    default=60.0,
    show_default=True,
    help="Time for everything, compiling included; 0.1 or more.",
)
@click.option("--trials", type=click.IntRange(min=1), help="Stop after so many measurements.")
@click.option(
    "--trials-each",
    type=click.IntRange(min=1),
    help="Most measurements of one workload, those of earlier runs counted.",
)
@LEVEL
@click.option(
    "--target",
    metavar="ARCH",
    help="Tune for this machine's GPU, for example sm_90a, and not for its CPU. Without such a GPU "
    "a model of a B200 ranks tcgen05 GEMMs for sm_100a.",
)
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
@click.option(
    "--tracker",
    metavar="HOST:PORT",
    help="Measure on the servers that have registered with TVM's RPC tracker there, and not on "
    "this machine.",
)
@click.option("--key", metavar="NAME", help="What the servers of --tracker have registered as.")
@click.option(
    "--strategy",
    type=click.Choice(["decisions", "evolutionary", "replay-trace"]),
    default="decisions",
    show_default=True,
    help="What proposes schedules; the others are TVM's own.",
)
@click.option(
    "--cost-model",
    type=click.Choice(["xgb", "random"]),
    default="xgb",
    show_default=True,
    help="What ranks the proposals.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the search.")
@JSON
def tune(
    names: tuple[str, ...],
    seconds: float,
    trials: int | None,
    trials_each: int | None,
    level: str | None,
    target: str | None,
    work_dir: Path,
    logs_dir: Path | None,
    keep: bool,
    tracker: str | None,
    key: str | None,
    strategy: str,
    cost_model: str,
    seed: int,
    as_json: bool,
) -> None:
    """Search for fast schedules on this machine.

    Trials are saved one by one: Ctrl-C or kill -9 loses nothing, and the same command goes on.

    Example: blockscale tune linear_nvfp4_n384_k384_f32 --seconds 30 --commit
    """
    wanted = specs_of(names)
    from blockscale.building.commit import commit
    from blockscale.tuning.tuner import Interrupted
    from blockscale.tuning.tuner import tune as run

    logs_dir = logs_dir or committed()
    interrupted = False
    try:
        result = run(
            wanted,
            target=_level(level, target),
            seconds=seconds,
            trials=trials,
            trials_each=trials_each,
            work_dir=work_dir,
            seed_logs=[logs_dir] if logs_dir.is_dir() else [],
            seed=seed,
            tracker=tracker,
            key=key,
            strategy=strategy,
            cost_model=cost_model,
        )
    except Interrupted as stop:
        result, interrupted = stop.result, True
    improved = commit(work_dir, logs_dir) if keep and not interrupted else {}
    if as_json:
        print_json(_tuned_json(result, work_dir, improved) | {"interrupted": interrupted})
    else:
        _print_tuned(result, work_dir, logs_dir if improved else None, improved)
    if interrupted:
        echo("Interrupted: every finished trial is saved; the same command goes on.", err=True)
        raise SystemExit(130)


def _level(level: str | None, target: str | None) -> str | None:
    if target is None:
        return level
    if level is not None:
        raise click.UsageError(
            f"--level {level} is for a CPU and --target {target} for a GPU; give one of them"
        )
    if not is_gpu(target):
        raise click.BadParameter(
            f"{target!r} is no architecture of a GPU; write for example sm_90a",
            param_hint="--target",
        )
    return target


def _tuned_json(result: TuneResult, work_dir: Path, improved: dict[str, float]) -> dict[str, Any]:
    def finite(times: dict[str, float]) -> dict[str, float | None]:
        return {tag: us if isfinite(us) else None for tag, us in times.items()}

    unit = "us" if result.model is None else "modelled_us"
    modelled = {} if result.model is None else {"modelled": True, "model": result.model}
    return {
        "work_dir": str(work_dir),
        **modelled,
        "trials": result.trials,
        "elapsed_s": round(result.elapsed_s, 3),
        f"best_{unit}": finite(result.best),
        f"default_{unit}": finite(result.default),
        "failed": result.failed,
        "committed": improved,
    }


def _print_tuned(
    result: TuneResult, work_dir: Path, logs_dir: Path | None, improved: dict[str, float]
) -> None:
    table = Table(title=f"{result.trials} trials in {result.elapsed_s:.0f} s, kept in {work_dir}")
    unit = "us" if result.model is None else "modelled us"
    for name in ("workload", f"default {unit}", f"best {unit}", "speed-up", "failed"):
        table.add_column(name, justify="left" if name == "workload" else "right", overflow="fold")
    for tag, best in result.best.items():
        default = result.default[tag]
        ratio = f"{default / best:.2f}x" if isfinite(default) and isfinite(best) else "-"
        table.add_row(tag, _us(default), _us(best), ratio, str(result.failed[tag]))
    console().print(table)
    if logs_dir is not None:
        echo(f"committed {counted(len(improved), 'improved workload')} to {logs_dir}")


def _us(value: float) -> str:
    """Return microseconds; "-" where nothing was measured."""
    return f"{value:.1f}" if isfinite(value) else "-"
