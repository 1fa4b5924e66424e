"""The demo's command: quantise, tune, build, measure in a second process, report."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import track

from blockscale.building import logs
from blockscale.building.records import LogError

from . import files, tables, timing

if TYPE_CHECKING:
    from blockscale.specs import Spec

NAME = "minilm-nvfp4"
LANGUAGE_LIBRARY = "kernels.so"
SHORTEST_S = 0.1
"""Of a search, where `tune` refuses less, and of training."""


class Demo:
    """One run: what it found so far, and where it writes."""

    def __init__(self, out: Path, seconds: float, console: Console) -> None:
        """Look for all that the run needs; PrerequisiteError says what is missing."""
        needed = ("torch", "tvm", "safetensors", "tokenizers", "matplotlib", "jinja2")
        files.need_modules(*needed, "transformers", "pydoc_data")
        self.model = files.find_model()
        self.out, self.seconds, self.console = out, seconds, console
        self.weights = out / f"{NAME}.safetensors"
        self.library = out / f"{NAME}-cpu.so"
        self.figures = out / f"{NAME}.json"
        self.report = out / "report.html"
        self.language = out / "demo-language-model"
        self.work = out / "tuning"  # every trial of every run: a later run goes on from there
        self.stages: dict[str, float] = {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block with the folder for itself; PrerequisiteError: another process has it."""
        from blockscale.building.store import Lock

        files.check_writable(self.out)
        try:
            with Lock(self.work, "tuning"):
                pass  # the search takes it again, minutes from now
            held = Lock(self.out, "running the demo")
        except RuntimeError as error:
            raise files.PrerequisiteError(f"demo: {error}") from error
        with held:
            yield

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print a heading, run the block, print how long it took."""
        self.console.rule(f"[bold]{len(self.stages) + 1}. {title}", align="left")
        start = time.monotonic()
        yield
        self.stages[title] = time.monotonic() - start
        self.console.print(f"  [dim]{self.stages[title]:.1f} s[/dim]")

    def quantise(self) -> list[dict[str, Any]]:
        """Write the quantised model; return one row of figures for each Linear."""
        from safetensors.torch import load_file

        from .model import BertConfig
        from .quantise import quantise_model
        from .variants import needed_specs

        config = BertConfig.read(self.model.config)
        self.specs = needed_specs(config)
        names = iter(track(config.linears(), "  encoder Linears", console=self.console))
        rows = quantise_model(
            config, load_file(self.model.weights), self.weights, lambda _: next(names, None)
        )
        next(names, None)
        self.console.print(tables.quantised(rows))
        self.console.print(f"  wrote {self.weights}")
        return rows

    def tune(self) -> dict[str, Any]:
        """Search for `seconds`, starting from the committed logs and from earlier runs' trials."""
        from blockscale.tuning.tuner import tune

        before = timing.idling().disturbed()
        found = tune(
            self.specs, seconds=self.seconds, work_dir=self.work, seed_logs=[logs.committed()]
        )
        search = {
            "history": found.history,
            "best": found.best,
            "default": found.default,
            "disturbed": before or timing.idling().disturbed(),
        }
        self.console.print(f"  {tables.search(search)}")
        return search

    def build(self) -> None:
        """Build the encoder's library."""
        self.write_library(self.specs, self.library)

    def write_library(self, specs: Sequence[Spec], path: Path) -> None:
        """Build a library from this machine's trials, then from the committed logs."""
        from blockscale.building.builder import build

        dirs = [path for path in (self.work, logs.committed()) if path.is_dir()]
        build(specs, path, logs_dirs=dirs, meta={"model": NAME})
        self.console.print(f"  wrote {path}, {path.stat().st_size / 1024:.0f} KiB")

    def infer(self) -> dict[str, Any]:
        """Measure in a second process, which prints its tables; return what it found."""
        options = {"--library": self.library, "--weights": self.weights}
        return self.process("blockscale.demo.infer", options)

    def process(self, module: str, options: Mapping[str, Path]) -> dict[str, Any]:
        """Return what a module of the demo wrote, in a process of its own, which prints tables."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", module, "--out", str(result)]
            command += [str(word) for pair in options.items() for word in pair]
            self.console.file.flush()
            # With --json, standard output is for the summary alone.
            target = sys.stderr if self.console.stderr else None
            code = subprocess.run(command, stdout=target, check=False).returncode
            if code:
                raise files.PrerequisiteError(
                    f"demo: the process of {module} ended with status {code}; its message is "
                    f"above, and {self.figures} and {self.report} stay as they were"
                )
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found

    def train(self, seconds: float) -> dict[str, Any]:
        """Train the language model, convert it, build its kernels; return how training went."""
        from blockscale import checkpoints
        from blockscale.checkpoints.convert.convert import convert

        from .language.run import needed_specs
        from .language.train import make

        shutil.rmtree(self.language, ignore_errors=True)
        plain, quantised = self.language / "float32", self.language / "nvfp4"
        with files.status(self.console, "training") as status:

            def told(second: float, step: int, loss: float) -> None:
                status.update(f"training: {second:.0f} s, step {step}, loss {loss:.2f}")

            training = make(plain, seconds, told)
        convert(checkpoints.open(plain), quantised)
        specs = needed_specs(checkpoints.open(quantised))
        self.write_library(specs, self.language / LANGUAGE_LIBRARY)
        first, last = training.history[0][1], training.history[-1][1]
        self.console.print(
            f"  {training.steps} steps, {training.tokens} tokens of a text of {training.read}; "
            f"loss {first:.2f} at first, {last:.2f} at last"
        )
        self.console.print(f"  wrote {plain} and {quantised}")
        return asdict(training)

    def write(self) -> dict[str, Any]:
        """Measure the language model in a process of its own; return what it found."""
        options = {"--folder": self.language, "--library": self.language / LANGUAGE_LIBRARY}
        return self.process("blockscale.demo.language.run", options)

    def run(self, tuned: bool, language: float) -> dict[str, Any]:
        """Run all stages and return every figure; writes the JSON file and the report last."""
        from .report import write_report

        with self.stage("Quantise the encoder to NVFP4, block scales by the 126-candidate sweep"):
            quantised = self.quantise()
        search: dict[str, Any] = {"history": [], "best": {}, "default": {}}
        if tuned:
            with self.stage(f"Search for better schedules, {self.seconds:.0f} s"):
                search = self.tune()
        with self.stage("Build the library"):
            self.build()
        with self.stage("Run the model in a process without tvm"):
            found = self.infer()
        model: dict[str, Any] = {}
        if language > 0:
            with self.stage(f"Train a language model on Python's documentation, {language:.0f} s"):
                training = self.train(language)
            with self.stage("Run it through transformers in a process without tvm"):
                model = {"language": {**self.write(), "training": training}}
        result = {
            "format": 1,
            "model": "all-MiniLM-L6-v2",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **found,
            **model,
            "quantised": quantised,
            "search": search,
            "stages": self.stages,
        }
        with self.stage("Report"):
            files.write_json(self.figures, result)
            write_report(files.plain(result), self.report)
            self.console.print(f"  figures {self.figures}\n  report  {self.report}")
        return result


def summary(result: dict[str, Any], demo: Demo) -> dict[str, Any]:
    """Return what `--json` prints: all figures but the trials, and where the files lie."""
    history = result["search"]["history"]
    kept = {
        **result,
        "search": {
            **result["search"],
            "history": len(history),
            "failed": sum(bool(event["failed"]) for event in history),
        },
    }
    paths = {
        "weights": demo.weights,
        "library": demo.library,
        "figures": demo.figures,
        "report": demo.report,
        "language": demo.language,
    }
    return {**kept, "files": {name: str(path) for name, path in paths.items()}}


def check_seconds(name: str, seconds: float) -> None:
    """Raise PrerequisiteError unless ``seconds`` are none, or `SHORTEST_S` and more."""
    if seconds != 0 and not SHORTEST_S <= seconds < math.inf:
        raise files.PrerequisiteError(
            f"demo: {name} {seconds:g} is no time to work in; give {SHORTEST_S:g} or more, or 0 to "
            "leave it out"
        )


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Time for the search.")
@click.option(
    "--language-seconds",
    default=60.0,
    show_default=True,
    help="Time for training the language model; 0 leaves it out.",
)
@click.option(
    "--out",
    default="dist",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write to.",
)
@click.option("--no-tune", is_flag=True, help="Do not search; use the logs that are there.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output."
)
def main(seconds: float, language_seconds: float, out: Path, no_tune: bool, as_json: bool) -> None:
    """Put a sentence encoder (MiniLM) into 4 bits and run it with kernels tuned for this machine.

    Then train a small language model, and run it in 4 bits through transformers.

    Example: python -m blockscale.demo --seconds 120 --out dist
    """
    files.replace_what_cannot_be_printed()
    console = Console(stderr=as_json)
    if said := timing.avoid_broken_amx():
        console.print(said)
    try:
        check_seconds("--seconds", seconds)
        check_seconds("--language-seconds", language_seconds)
        demo = Demo(out, seconds, console)
        with demo.alone():
            result = demo.run(not no_tune and seconds > 0, language_seconds)
    except (*files.FAILURES, LogError) as error:
        raise click.ClickException(files.sentence(error)) from error
    except KeyboardInterrupt:
        console.print("\ninterrupted; run it again to go on from the trials that finished")
        sys.exit(130)
    if as_json:
        click.echo(json.dumps(files.plain(summary(result, demo))))
