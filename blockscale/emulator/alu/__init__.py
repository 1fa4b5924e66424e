"""Scalar instructions: `lookup("add.rn.ftz.f32")` says what an opcode computes on NumPy arrays.

PTX ISA 9.7.1 to 9.7.9 without memory, control flow and cross-lane instructions: integer arithmetic,
extended precision, floating point, half and mixed precision, comparison and selection, logic and
shift, mov and cvt.  NaN payloads of plain ufuncs are NumPy's, all others canonical.
"""

from blockscale.emulator.alu import (  # noqa: F401 - the import registers the instructions
    approx,
    bits,
    cvt,
    cvt_packed,
    half,
    integer,
    real,
    select,
)
from blockscale.emulator.alu.core import Alu, Form, forms, lookup

__all__ = ["Alu", "Form", "forms", "lookup"]
