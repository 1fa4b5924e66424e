"""Blackwell without Blackwell: a functional model of sm_90a, sm_100a and sm_120a PTX on NumPy.

`launch` runs a kernel's PTX text on arrays and returns a `Report`, or says precisely what is
illegal.  `run_module` runs a function of an exported library, its host code included.

The way through the house, from text to result:

* `ptx`: `lexer`, `reader` and `parser` make the tree of `syntax`; a `program` is one kernel of it,
  in units, and `analysis` sees what can be seen before it runs;
* `alu`, `tma`, `tcgen05`, `mma`: what instructions compute, as pure functions of arrays;
* `machine`: `memory` holds the bytes, `engine` the asynchronous work in flight, `clocks` what is
  ordered after what; `state` is all of one launch, on which `gangs` of warps run; `residents` lets
  the clusters of `grid` in and out; `hazards` and `diagnose` say what is wrong;
* `ops`: the handlers of all instructions that are not scalar;
* `launching`: the `front_door` checks a launch, packs its `arguments` and has its kernel linked
  (`link`: calls expanded, variables placed); `compiler` makes Python functions of units, and
  `execute` runs them;
* `report` keeps what happened, `timeline` draws it; `case` reads a launch from files, and
  `case_outputs` judges it; `host` plays the driver behind a library's host code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockscale.emulator.errors import (
    Deadlock,
    EmulationError,
    IllegalOperation,
    InstructionLimit,
    Place,
    PtxError,
)
from blockscale.emulator.launching.arguments import Struct
from blockscale.emulator.launching.front_door import launch
from blockscale.emulator.launching.world import World
from blockscale.emulator.report import Hazard, HazardError, Report
from blockscale.emulator.tma import TensorMap

if TYPE_CHECKING:
    from blockscale.emulator.host import LibraryWorld, Run, run_module

__all__ = [
    "Deadlock",
    "EmulationError",
    "Hazard",
    "HazardError",
    "IllegalOperation",
    "InstructionLimit",
    "LibraryWorld",
    "Place",
    "PtxError",
    "Report",
    "Run",
    "Struct",
    "TensorMap",
    "World",
    "launch",
    "run_module",
]


def __getattr__(name: str) -> Any:
    """Import the host side when asked for: it brings tvm_ffi, which `launch` does not need."""
    if name in ("LibraryWorld", "Run", "run_module"):
        from blockscale.emulator import host

        return getattr(host, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
