"""Stands in for `blockscale.tuning.gpu` where there is no GPU: candidates run on the CPU."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from blockscale.base.targets import runs_on
from blockscale.tuning.worker import Argument, Measurement, Timing
from tests.kit import fake_workload

MACHINE = {"gpu": "Fake GPU", "driver": "1.2", "cuda": "13.0", "torch": "0", "l2_bytes": 1 << 20}


def describe(arch: str) -> dict[str, Any]:
    if not runs_on(arch, 9, 0):
        raise RuntimeError(f"this machine's GPU does not run code for {arch}")
    return MACHINE


def describe_any(arch: str) -> dict[str, Any]:
    """Describe a GPU that runs everything."""
    return MACHINE


def measure(library: str, arguments: list[Argument], timing: Timing, reference: str) -> Measurement:
    result = fake_workload.measure(library, arguments, timing, reference)
    broken = result.error is not None  # as after an illegal address
    return Measurement(result.run_secs, result.error, broken)


def measure_slowly(
    library: str, arguments: list[Argument], timing: Timing, reference: str
) -> Measurement:
    """Hang, but for default schedules."""
    if library != reference:
        time.sleep(1000)
    return measure(library, arguments, timing, reference)


def export_source(module: Any, target: str, out: Path) -> None:
    """Write the candidate's code: nothing is compiled."""
    from tvm.target import Target

    from blockscale.tuning.exporter import source_of

    _, source = source_of(module["main"], str(Target(target).attrs["arch"]))
    out.write_text(f"{source.host_c}\n{source.device}")


def measure_bytes(
    library: str, arguments: list[Argument], timing: Timing, reference: str
) -> Measurement:
    """Return a time that is the same for the same library, which is not run."""
    assert Path(reference).exists()
    digest = hashlib.sha256(Path(library).read_bytes()).hexdigest()
    return Measurement((1e-5 + 1e-9 * int(digest[:3], 16),) * 3)
