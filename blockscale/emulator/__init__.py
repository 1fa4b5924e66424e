"""Blackwell without Blackwell: a functional model of sm_90a, sm_100a and sm_120a PTX on NumPy.

`launch` runs a kernel's PTX text on arrays and returns a `Report`, or says precisely what is illegal.
"""

from .errors import Deadlock, EmulationError, IllegalOperation, Place, PtxError
from .machine import launch
from .report import Hazard, HazardError, Report
from .tma import TensorMap
from .values import Struct

__all__ = [
    "Deadlock",
    "EmulationError",
    "Hazard",
    "HazardError",
    "IllegalOperation",
    "Place",
    "PtxError",
    "Report",
    "Struct",
    "TensorMap",
    "launch",
]
