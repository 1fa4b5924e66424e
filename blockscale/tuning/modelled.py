"""Tuning without the GPU: candidates are built as ever, and a model says what each takes.

For tcgen05 GEMMs on a machine without a Blackwell GPU.  A candidate fails when its plan is illegal,
when nvcc refuses it or when its machine code spills registers; else `b200.time_us` is its time.
Every record names the model (`Record.model`), as does meta.json, and measured records always come
before modelled ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.base.targets import SCALED, TCGEN05, having, runs_on
from blockscale.specs import Spec
from blockscale.specs.plans import b200
from blockscale.specs.plans.gemm import GemmPlan
from blockscale.tuning.worker import SPEC, Measurement

if TYPE_CHECKING:
    from blockscale.catalog import Workload

LEVELS = tuple(name for name in having(TCGEN05) if runs_on(name, 10, 0))
"""Architectures whose kernels run on a B200."""

EXPORTER = f"{__name__}:export"


def model_name() -> str:
    """Return what records say of the model: its version and the digest of its numbers."""
    return f"b200-v{b200.VERSION}-{b200.B200.digest}"


def stands_in(level: str, workloads: Iterable[Workload]) -> bool:
    """Return whether the model has to do: it knows all ``workloads``, and there is no such GPU."""
    if level not in LEVELS:
        return False
    return all(_modelled(w.spec, level) for w in workloads) and not _has_gpu(level)


def _modelled(spec: Spec, level: str) -> bool:
    from blockscale.catalog import road

    try:
        return SCALED in road(spec, level).needs
    except TypeError:  # there is no such kernel at all
        return False


def _has_gpu(arch: str) -> bool:
    """Return whether there is a GPU that runs code for ``arch``."""
    import torch

    return torch.cuda.is_available() and runs_on(arch, *torch.cuda.get_device_capability(0))


def export(module: Any, target: str, out: Path) -> None:
    """Compile the kernel of ``module`` and write its plan and what ptxas says of it to ``out``.

    Raises:
        LoweringError: there is no such kernel.
        CompileError: nvcc refuses it.
        RuntimeError: its machine code spills registers.
    """
    from tvm.target import Target

    from blockscale.lower import nvcc
    from blockscale.lower.pipe.check import checked
    from blockscale.lower.pipe.derive import derive
    from blockscale.lower.pipe.emit import emit
    from blockscale.lower.pipe.facts import facts

    kernel = checked(derive(module["main"].without_attr(SPEC)))
    plan = facts(kernel)
    arch = str(Target(target).attrs["arch"])
    compiled = nvcc.compile_cuda_source(emit(kernel, "kernel"), arch)
    spills = sum(int(kernel["spills"]) for kernel in compiled.resources)
    if spills:
        raise RuntimeError(f"ptxas spills {spills} bytes of registers for {arch}: {plan}")
    found = {"plan": asdict(plan), "one_launch": kernel.one_launch, "kernels": compiled.resources}
    out.write_text(json.dumps(found))


def measure(library: str, rows: int) -> Measurement:
    """Return the modelled time of what `export` wrote to ``library``, called with ``rows``.

    A GEMM that begins in another one's launch has none of its own.
    """
    found = json.loads(Path(library).read_text())
    us = b200.time_us(GemmPlan(**found["plan"]), rows).us
    us -= b200.B200.launch_us if found.get("one_launch") else 0
    return Measurement((float(f"{us / 1e6:.5g}"),))
