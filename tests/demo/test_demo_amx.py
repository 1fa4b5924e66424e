"""Torch is kept from AMX where that does not run, and nowhere else."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from blockscale.base import host
from blockscale.demo import timing


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set before or after."""
    monkeypatch.setenv(timing.ISA, "")  # so that it is as before in the end
    monkeypatch.delenv(timing.ISA)


def machine(monkeypatch: pytest.MonkeyPatch, flags: set[str], code: int) -> list[list[str]]:
    """Return the trials on a machine with such a CPU, which end so."""
    trials: list[list[str]] = []

    def run(command: list[str], **given: object) -> SimpleNamespace:
        trials.append(command)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(host, "features", lambda: frozenset(flags))
    monkeypatch.setattr(subprocess, "run", run)
    return trials


@pytest.mark.parametrize("code", [-4, 1])
def test_amx_that_does_not_run_is_avoided(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """By signal or error: what comes later has no AMX, and the user is told."""
    trials = machine(monkeypatch, {"amx_bf16", "avx512f"}, code)
    said = timing.avoid_broken_amx()
    assert "shown but does not run" in said
    assert f"{timing.ISA}={timing.BEFORE_AMX}" in said
    assert os.environ[timing.ISA] == "AVX512_CORE_FP16"
    assert len(trials) == 1


def test_amx_that_runs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what it has."""
    trials = machine(monkeypatch, {"amx_bf16"}, 0)
    assert timing.avoid_broken_amx() == ""
    assert len(trials) == 1
    assert timing.ISA not in os.environ


@pytest.mark.parametrize("flags", [{"avx512f"}, set()])
def test_without_amx_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, flags: set[str]) -> None:
    """A trial takes seconds."""
    assert not machine(monkeypatch, flags, -4)
    assert timing.avoid_broken_amx() == ""


def test_a_users_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has set one knows."""
    trials = machine(monkeypatch, {"amx_bf16"}, -4)
    monkeypatch.setenv(timing.ISA, "AVX2")
    assert timing.avoid_broken_amx() == ""
    assert not trials
    assert os.environ[timing.ISA] == "AVX2"


def test_the_trial_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is right: torch without AMX ends well."""
    monkeypatch.setenv(timing.ISA, timing.BEFORE_AMX)
    trials = machine(monkeypatch, {"amx_bf16"}, 0)
    monkeypatch.delenv(timing.ISA)
    timing.avoid_broken_amx()
    monkeypatch.undo()
    monkeypatch.setenv(timing.ISA, timing.BEFORE_AMX)
    assert subprocess.run(trials[0]).returncode == 0
