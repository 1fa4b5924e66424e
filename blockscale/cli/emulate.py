"""The command ``blockscale emulate``: run one kernel in the emulator and judge it by a case."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from blockscale.cli.common import console, echo

if TYPE_CHECKING:
    from blockscale.emulator.case import Case
    from blockscale.emulator.case_outputs import Outcome
    from blockscale.emulator.report import Report

PICTURES = (".svg", ".png")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@dataclass
class _Run:
    """What one seed gave; a kernel that broke a rule has an error, and perhaps no report."""

    seed: int
    report: Report | None
    outcomes: list[Outcome]
    error: str | None = None

    @property
    def passed(self) -> bool:
        good = self.error is None and self.report is not None and self.report.ok
        return good and all(outcome.passed for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "passed": self.passed,
            "error": self.error,
            "outputs": [outcome.to_json() for outcome in self.outcomes],
            "report": None if self.report is None else self.report.to_json(),
        }


@click.command()
@click.argument("kernel", type=_FILE, metavar="KERNEL.ptx")
@click.option(
    "--case",
    "case_path",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    metavar="CASE.json",
    help="Arguments, launch sizes and expected outputs; files lie beside it.",
)
@click.option("--seed", type=int, help="Moments of asynchronous work and turns of warps; 0.")
@click.option("--seeds", type=click.IntRange(min=1), help="Run with the seeds 0, 1, ... N-1.")
@click.option(
    "--timeline", type=_NEW_FILE, metavar="OUT.svg", help="Draw warps and engines: .svg or .png."
)
@click.option(
    "--window",
    nargs=2,
    type=float,
    metavar="FIRST LAST",
    help="Virtual cycles to draw; all by default.",
)
@click.option("--json", "json_path", type=_NEW_FILE, metavar="OUT.json", help="Write every figure.")
@click.option(
    "--max-instructions", type=click.IntRange(min=1), help="Give up after so many instructions."
)
def emulate(
    kernel: Path,
    case_path: Path,
    seed: int | None,
    seeds: int | None,
    timeline: Path | None,
    window: tuple[float, float] | None,
    json_path: Path | None,
    max_instructions: int | None,
) -> None:
    """Run a kernel in the emulator: no GPU is needed.

    Exit code 1 when an output differs, an error hazard is found or the kernel breaks a rule, 2 when
    it cannot be run. With several seeds the table and the picture are those of the first failure.

    Example: blockscale emulate kernel.ptx --case case.json --timeline timeline.svg
    """
    if seed is not None and seeds is not None:
        raise click.UsageError("--seed and --seeds exclude each other; give one of them")
    if timeline is not None and timeline.suffix.lower() not in PICTURES:
        raise click.UsageError(f"--timeline {timeline}: a picture ends in .svg or .png")
    for out in (timeline, json_path):
        if out is not None and not out.resolve().parent.is_dir():
            raise click.UsageError(f"{out}: there is no folder {out.parent}; make it first")
    if window is not None and timeline is None:
        raise click.UsageError("--window is of the picture that --timeline draws; give both")
    from blockscale.emulator.case import Case

    case = Case.load(case_path)
    wanted = [seed or 0] if seeds is None else range(seeds)
    shown, runs = _run_all(case, kernel, wanted, max_instructions)
    if json_path is not None:
        _write_json(json_path, kernel, case_path, runs)
    _print(shown, runs)
    if timeline is not None:
        _draw(shown, timeline, *(window or (None, None)))
    if not all(run["passed"] for run in runs):
        raise SystemExit(1)


def _run_all(
    case: Case, kernel: Path, seeds: Iterable[int], max_instructions: int | None
) -> tuple[_Run, list[dict[str, Any]]]:
    """Return the run to show (the first that fails, or the first), and all of them as JSON."""
    from blockscale.emulator.case import read_ptx

    ptx = read_ptx(kernel)
    shown: _Run | None = None
    found = []
    for seed in seeds:
        run = _run_one(case, ptx, seed, max_instructions)
        if shown is None or (shown.passed and not run.passed):
            shown = run
        found.append(run.to_json())
    assert shown is not None
    return shown, found


def _run_one(case: Case, ptx: str, seed: int, max_instructions: int | None) -> _Run:
    from blockscale.emulator.errors import EmulationError, PtxError

    try:
        report, outcomes = case.run(seed, ptx=ptx, max_instructions=max_instructions)
    except PtxError:
        raise  # not the kernel's fault alone: exit code 2
    except EmulationError as error:
        return _Run(seed, error.report, [], f"{type(error).__name__}: {error}")
    return _Run(seed, report, outcomes)


def _write_json(path: Path, kernel: Path, case: Path, runs: list[dict[str, Any]]) -> None:
    data = {
        "kernel": str(kernel),
        "case": str(case),
        "passed": all(run["passed"] for run in runs),
        "runs": runs,
    }
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _draw(shown: _Run, path: Path, first: float | None, last: float | None) -> None:
    if shown.report is None or not shown.report.events:
        echo(f"{path}: not drawn, the run left no events", err=True)
        return
    from blockscale.emulator import timeline

    timeline.draw(shown.report, path, first=first, last=last)
    echo(f"timeline: {path}")


def _print(shown: _Run, runs: list[dict[str, Any]]) -> None:
    screen = console()
    if shown.report is not None:
        screen.print(shown.report.table())
    if shown.outcomes:
        table = Table(title="outputs", title_justify="left", title_style="bold", box=None)
        for outcome in shown.outcomes:
            table.add_row(_verdict(outcome.passed), Text(outcome.sentence))
        table.show_header = False
        screen.print("", table)
    if shown.error is not None:
        screen.print(Text(shown.error, style="red"))
    if len(runs) > 1:
        screen.print("", _seeds_table(runs))
    failed = sum(not run["passed"] for run in runs)
    seeds = f"seed {shown.seed}" if len(runs) == 1 else f"{len(runs)} seeds"
    if failed:
        screen.print(Text(f"FAILED with {failed} of {seeds}" if len(runs) > 1 else "FAILED"))
    else:
        screen.print(Text(f"passed with {seeds}", style="green"))


def _verdict(passed: bool) -> Text:
    return Text("passed", style="green") if passed else Text("FAILED", style="red")


def _seeds_table(runs: list[dict[str, Any]]) -> Table:
    table = Table(title="seeds", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("seed", "", "virtual cycles", "seconds", "errors", "warnings", "largest error"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_column("why", overflow="fold")
    for run in runs:
        report = run["report"]
        figures = ["-"] * 4
        if report is not None:
            kinds = [hazard["severity"] for hazard in report["hazards"]]
            counts = (str(kinds.count("error")), str(kinds.count("warning")))
            figures = [f"{report['cycles']:,.0f}", f"{report['wall_seconds']:.2f}", *counts]
        errors = [o["max_rel_row_error"] for o in run["outputs"]]
        known = [error for error in errors if error is not None]
        largest = f"{max(known):.3g}" if known else "-"
        table.add_row(str(run["seed"]), _verdict(run["passed"]), *figures, largest, _why(run))
    return table


def _why(run: dict[str, Any]) -> Text:
    """Return the first reason for a failure, in few words."""
    if run["error"] is not None:
        return Text(run["error"].splitlines()[0])
    hazards = [] if run["report"] is None else run["report"]["hazards"]
    kinds = dict.fromkeys(h["kind"] for h in hazards if h["severity"] == "error")
    wrong = [output["sentence"] for output in run["outputs"] if not output["passed"]]
    return Text("; ".join([*kinds, *wrong[:1]]))
