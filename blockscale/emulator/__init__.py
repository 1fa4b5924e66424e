"""Blackwell without Blackwell: a functional model of sm_90a, sm_100a and sm_120a PTX on NumPy.

`launch` runs a kernel's PTX text on arrays and returns a `Report`, or says precisely what is
illegal.  `run_module` runs a function of an exported library, its host code included.

The way through the house, from text to result:

* `lexer`, `reader`, `parser` make the tree of `syntax`; `program` links one kernel of it (calls
  expanded, variables placed, control flow cut into the units of `flow`);
* `launching` checks a launch, packs its arguments (`values`) and makes a `machine`, which keeps the
  clusters of `grid` resident (`residents`) and runs `gang`s of warps (`execute`);
* `compiler` makes Python functions of units: scalar instructions from `alu`, all others from the
  handlers in `ops`, which stand on the pure libraries `tma`, `tcgen05` and `mma`;
* `memory` holds the bytes, `engine` the asynchronous work in flight, `clocks` what is ordered after
  what; `hazards`, `analysis` and `diagnose` say what is wrong, and `report` keeps it all.
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
    """Import the host side when asked for: it brings tvm_ffi, which `launch` does not need."""
    if name in ("Run", "run_module"):
        from . import host

        return getattr(host, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
