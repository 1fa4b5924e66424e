"""What this machine is, as far as the choice of a kernel goes: rows of `base.targets`."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from blockscale.base.targets import CPU_TARGETS, GPU_TARGETS, cpu


@cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # no procfs: nothing is known about the CPU
        return ""


def _field(cpuinfo: str, *names: str) -> str:
    """Return the value of the first line called one of ``names``, or an empty string."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


@cache
def _features(cpuinfo: str) -> frozenset[str]:
    return frozenset(_field(cpuinfo, "flags", "Features").split())


def features(cpuinfo: str | None = None) -> frozenset[str]:
    """Return the CPU's feature flags; empty where the system does not tell.

    Args:
        cpuinfo: text in the format of ``/proc/cpuinfo`` to read instead of this machine's.
    """
    return _features(_cpuinfo() if cpuinfo is None else cpuinfo)


def vendor(cpuinfo: str | None = None) -> str:
    """Return who made the CPU ("GenuineIntel"); empty where the system does not tell."""
    return _field(_cpuinfo() if cpuinfo is None else cpuinfo, "vendor_id")


def level(flags: Iterable[str] | None = None, made_by: str | None = None) -> str:
    """Return the vector level that kernels are built for unless another one is asked for.

    It is the widest that a CPU with ``flags``, ``made_by`` this vendor, can run and is not slower
    with than with the next (`targets.Cpu.slow_on`).  Default: this machine's.
    """
    present = features() if flags is None else frozenset(flags)
    maker = made_by if made_by is not None else vendor() if flags is None else ""
    for name, row in CPU_TARGETS.items():
        if present.issuperset(row.features) and maker not in row.slow_on:
            return name
    raise AssertionError("level 'plain' needs nothing")


def lacking(name: str) -> list[str]:
    """Return the features that the CPU level ``name`` needs and this machine's CPU lacks, sorted.

    Raises:
        ValueError: there is no such level.
    """
    return sorted(set(cpu(name).features) - features())


def cpu_model(cpuinfo: str | None = None) -> str:
    """Return the CPU's name, or its architecture where the system does not tell the name."""
    text = _cpuinfo() if cpuinfo is None else cpuinfo
    return _field(text, "model name", "Processor", "cpu model") or platform.machine() or "unknown"


def capability() -> tuple[int, int] | None:
    """Return the compute capability of torch's current GPU; None: there is none, or no torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def local(kind: str) -> str:
    """Return the target that this machine's kernels are built for: CPU level or GPU architecture.

    Raises:
        RuntimeError: ``kind`` is "cuda", and torch sees no GPU, or one that we do not build for.
    """
    if kind == "cpu":
        return level()
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "target: torch sees no CUDA device, so there is nothing to build kernels for; see that "
            "the driver and a CUDA build of torch are installed"
        )
    major, minor = torch.cuda.get_device_capability()
    for name in (f"sm_{major}{minor}a", f"sm_{major}{minor}", f"sm_{major}0f", f"sm_{major}0"):
        if name in GPU_TARGETS:
            return name
    raise RuntimeError(
        f"target: {torch.cuda.get_device_name()} has compute capability {major}.{minor}, for which "
        f"there are no kernels among {', '.join(GPU_TARGETS)}; use a newer GPU"
    )
