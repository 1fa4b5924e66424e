"""Names of targets: CPU levels (`base.host`) and GPU architectures, as nvcc spells them."""

from __future__ import annotations

import re

from blockscale.base import host

GPU_TARGETS = (
    *("sm_80", "sm_86", "sm_89", "sm_90a"),
    *("sm_100a", "sm_100f", "sm_103a", "sm_120a", "sm_121a"),
)
"""GPU architectures that kernels are built for."""

_GPU = re.compile(r"sm_\d{2,3}[af]?")


def is_gpu(name: str) -> bool:
    """Whether ``name`` is a GPU architecture ("sm_90a") and not a CPU level ("avx512")."""
    return _GPU.fullmatch(name) is not None


def kind(name: str) -> str:
    """Return "cuda" for a GPU architecture, "cpu" for a CPU level.

    Raises:
        ValueError: it is neither.
    """
    if is_gpu(name):
        if name not in GPU_TARGETS:
            raise ValueError(
                f"target: {name!r} is not one of {list(GPU_TARGETS)}; choose the one of your GPU"
            )
        return "cuda"
    if name not in host.LEVEL_FEATURES:
        raise ValueError(
            f"target: {name!r} is neither a CPU level ({', '.join(host.LEVEL_FEATURES)}) nor a GPU "
            f"architecture ({', '.join(GPU_TARGETS)}); choose one of them"
        )
    return "cpu"


def log_folder(name: str) -> str:
    """Return the name of the folder of tuning logs: "cpu-avx512", "sm_90a"."""
    return name if is_gpu(name) else f"cpu-{name}"


def local(kind: str) -> str:
    """Return the target that this machine's kernels are built for: CPU level or GPU architecture.

    Raises:
        RuntimeError: ``kind`` is "cuda", and torch sees no GPU, or one that we do not build for.
    """
    if kind == "cpu":
        return host.level()
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
