"""What kernels are built for: one row a CPU level, one row a GPU architecture, with its facts.

A new architecture whose features the kernels know is a row here and nothing else.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BULK_COPIES = "bulk copies"
WGMMA = "wgmma"
TCGEN05 = "block-scaled tcgen05.mma"
SCALED_MMA = "block-scaled mma.sync"
SCALED = "block-scaled tensor cores"
"""What some architectures have and kernels may need, in the words of an error."""


class Gpu(NamedTuple):
    """An architecture of NVIDIA's GPUs (CUDA C++ Programming Guide, compute capabilities)."""

    sm_shared: int
    """Bytes of shared memory of an SM, of which the system keeps `CTA_RESERVED` for each CTA."""
    features: tuple[str, ...] = ()
    """`BULK_COPIES` (with clusters and programmatic dependent launches), `WGMMA`, `SCALED` with
    either `TCGEN05` or `SCALED_MMA`."""
    sms: int = 0
    """SMs of the GPU for which schedules choose tiles; 0: schedules do not ask."""
    tensor_columns: int = 0
    """Columns of an SM's tensor memory: 128 lanes of 32 bits each."""
    least_shared: int = 0
    """The least `sm_shared` of the architectures that run its code too; 0: none has less."""

    @property
    def cta_shared(self) -> int:
        """Bytes of shared memory that one CTA may ask for."""
        return (self.least_shared or self.sm_shared) - CTA_RESERVED


CTA_RESERVED = 1024
"""Bytes of shared memory that the system keeps for each CTA."""

GPU_TARGETS = {
    "sm_80": Gpu(164 << 10, least_shared=100 << 10),  # A100; its code also runs on 8.6 and 8.9
    "sm_86": Gpu(100 << 10),
    "sm_89": Gpu(100 << 10),
    "sm_90a": Gpu(228 << 10, (BULK_COPIES, WGMMA), 132),  # H100 SXM, H200
    "sm_100a": Gpu(228 << 10, (BULK_COPIES, SCALED, TCGEN05), 148, 512),  # B200
    "sm_100f": Gpu(228 << 10, (BULK_COPIES, SCALED, TCGEN05), 148, 512),
    "sm_103a": Gpu(228 << 10, (BULK_COPIES, SCALED, TCGEN05), 148, 512),
    "sm_120a": Gpu(100 << 10, (BULK_COPIES, SCALED, SCALED_MMA)),
    "sm_121a": Gpu(100 << 10, (BULK_COPIES, SCALED, SCALED_MMA)),
}
"""GPU architectures that kernels are built for, as nvcc spells them."""


class Cpu(NamedTuple):
    """A level of CPUs: what its code may use."""

    features: tuple[str, ...]
    """As ``/proc/cpuinfo`` spells them, so that a user can look them up."""
    width: str
    """Whose vectors it has: a log of one level serves all of the same width."""
    lane_bits: int
    """32-bit words of a vector when elements are reordered, as powers of two.

    16 words of a row go to so many lines of a layout that they leave the L1 cache half-written:
    INT8 weights of 235 MB took 174 ms with 16, 81 ms with 8 (two busy EPYC cores).
    """
    llvm: dict[str, str | list[str]]
    """Options of LLVM."""
    slow_on: tuple[str, ...] = ()
    """Vendors, as ``/proc/cpuinfo`` spells them, on whose CPUs the next level is the faster one."""


_X86_64_V3 = (
    *("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),  # x86-64-v2
    *("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
)
_X86_64_V4 = (*_X86_64_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_V4 = {"mcpu": "x86-64-v4"}

BF16_DOTS = "avx512_bf16"
"""VDPBF16PS, the bfloat16 dot product.

An AMD EPYC multiplies twice as many numbers with it as with FMA (128 rows of 4096 x 4096: 4.8 and
9.3 ms).  An Intel Xeon does half as many: 53.8 and 29.1 ms with one thread, 7.3 and 4.0 with 16
(2026-11-27)."""

CPU_TARGETS = {
    "avx512bf16": Cpu(
        (*_X86_64_V4, BF16_DOTS),
        width="avx512",
        lane_bits=3,
        llvm={**_V4, "mattr": ["+avx512bf16"]},
        slow_on=("GenuineIntel",),
    ),
    "avx512": Cpu(_X86_64_V4, "avx512", 3, {**_V4}),
    "avx2": Cpu(_X86_64_V3, "avx2", 3, {"mcpu": "x86-64-v3"}),
    "plain": Cpu((), "plain", 2, {}),  # the baseline of the architecture
}
"""CPU levels, widest first."""

_GPU = re.compile(r"sm_(\d{1,2})(\d)([af]?)")


def is_gpu(name: str) -> bool:
    """Whether ``name`` is a GPU architecture ("sm_90a") and not a CPU level ("avx512")."""
    return _GPU.fullmatch(name) is not None


def kind(name: str) -> str:
    """Return "cuda" for a GPU architecture, "cpu" for a CPU level.

    Raises:
        ValueError: it is neither.
    """
    if is_gpu(name):
        gpu(name)
        return "cuda"
    if name not in CPU_TARGETS:
        raise ValueError(
            f"target: {name!r} is neither a CPU level ({', '.join(CPU_TARGETS)}) nor a GPU "
            f"architecture ({', '.join(GPU_TARGETS)}); choose one of them"
        )
    return "cpu"


def gpu(name: str) -> Gpu:
    """Return the row of a GPU architecture; ValueError where there is none."""
    if name not in GPU_TARGETS:
        raise ValueError(
            f"target: {name!r} is not one of {list(GPU_TARGETS)}; choose the one of your GPU"
        )
    return GPU_TARGETS[name]


def cpu(name: str) -> Cpu:
    """Return the row of a CPU level; ValueError where there is none."""
    if name not in CPU_TARGETS:
        raise ValueError(
            f"target: level={name!r} is not one of {[*CPU_TARGETS]}; choose one of them"
        )
    return CPU_TARGETS[name]


def having(feature: str) -> list[str]:
    """Return the names of the GPU architectures that have ``feature``."""
    return [name for name, row in GPU_TARGETS.items() if feature in row.features]


def runs_on(name: str, major: int, minor: int) -> bool:
    """Return whether machine code for ``name`` runs on a GPU of this compute capability.

    That for an architecture with an "a" runs on no other, any other on later ones of its major.
    """
    found = _GPU.fullmatch(name)
    if found is None:
        return False
    made = int(found[1]), int(found[2])
    exact = found[3] == "a"
    return made == (major, minor) if exact else made[0] == major and made[1] <= minor


def log_folder(name: str) -> str:
    """Return the name of the folder of tuning logs: "cpu-avx512", "sm_90a"."""
    return name if is_gpu(name) else f"cpu-{name}"


def same_width(level: str) -> tuple[str, ...]:
    """Return ``level``, then the other levels whose vectors are as wide."""
    width = CPU_TARGETS[level].width
    others = (name for name, row in CPU_TARGETS.items() if row.width == width and name != level)
    return level, *others
