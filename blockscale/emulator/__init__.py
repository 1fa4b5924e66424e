"""Blackwell without Blackwell: a functional model of sm_90a, sm_100a and sm_120a PTX on NumPy.

`launch` runs a kernel's PTX text on arrays and returns a `Report`, or says precisely what is illegal.
`run_module` runs a function of an exported library, its host code included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Deadlock, EmulationError, IllegalOperation, Place, PtxError
from .launching import launch
from .report import Hazard, HazardError, Report
from .tma import TensorMap
from .values import Struct

if TYPE_CHECKING:
    from .host import Run, run_module

__all__ = [
    "Deadlock",
    "EmulationError",
    "Hazard",
    "HazardError",
    "IllegalOperation",
    "Place",
    "PtxError",
    "Report",
    "Run",
    "Struct",
    "TensorMap",
    "launch",
    "run_module",
]


def __getattr__(name: str) -> Any:
    """Import the host side when it is asked for: it brings tvm_ffi, which `launch` does not need."""
    if name in ("Run", "run_module"):
        from . import host

        return getattr(host, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
