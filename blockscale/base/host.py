"""What this machine's CPU can do, as far as the choice of a kernel goes.

Feature names are those of ``/proc/cpuinfo``, so that a user can look them up.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal

Level = Literal["avx512bf16", "avx512", "avx2", "plain"]

_X86_64_V3 = (
    *("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),  # x86-64-v2
    *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
)
_X86_64_V4 = (*_X86_64_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

LEVEL_FEATURES: dict[Level, tuple[str, ...]] = {
    "avx512bf16": (*_X86_64_V4, "avx512_bf16"),  # and VDPBF16PS, the bfloat16 dot product
    "avx512": _X86_64_V4,  # what LLVM may use for mcpu x86-64-v4
    "avx2": _X86_64_V3,  # x86-64-v3
    "plain": (),  # the baseline of the architecture
}
"""CPU features that code of a level may use; widest level first."""


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


def level(flags: Iterable[str] | None = None) -> Level:
    """Return the widest vector level that a CPU with ``flags`` (default: this one's) can run."""
    present = features() if flags is None else frozenset(flags)
    for name, needed in LEVEL_FEATURES.items():
        if present.issuperset(needed):
            return name
    raise AssertionError("level 'plain' needs nothing")


def required_features(level: str) -> tuple[str, ...]:
    """Return the CPU features that a library built for ``level`` demands, sorted.

    Raises:
        ValueError: there is no such level.
    """
    if level not in LEVEL_FEATURES:
        raise ValueError(
            f"required_features: level={level!r} is not one of {list(LEVEL_FEATURES)}; "
            "host.level() tells this machine's"
        )
    return tuple(sorted(LEVEL_FEATURES[level]))


def same_width(level: str) -> tuple[str, ...]:
    """Return ``level``, then the other levels whose vectors are as wide."""
    width = level.removesuffix("bf16")
    return level, *(other for other in LEVEL_FEATURES if other != level and other.startswith(width))


def cpu_model(cpuinfo: str | None = None) -> str:
    """Return the CPU's name, or its architecture where the system does not tell the name."""
    text = _cpuinfo() if cpuinfo is None else cpuinfo
    return _field(text, "model name", "Processor", "cpu model") or platform.machine() or "unknown"
