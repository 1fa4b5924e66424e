"""The arithmetic of matrix instructions: exact products, one sum, one rounding.

PTX ISA 9.2, section 9.7.14.5.14 "mma": element-wise multiplication is at least as precise as the
accumulator, and the order of the additions is not specified.  This model sums in float64 and rounds
once, to nearest even; results that depend on the order differ from hardware in the last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator import formats

Values = NDArray[Any]
INT32 = np.iinfo(np.int32)


def container(fmt: str, octets: Values) -> Values:
    """The codes in the 8-bit containers of .kind::f8f6f4 (section 9.7.14.5.14).

    A 4-bit element is bits 2 to 5 of its byte, a 6-bit element is bits 0 to 5.
    """
    if fmt == "e2m1":
        return (octets >> 2) & 15
    return octets & 63 if formats.BITS[fmt] == 6 else octets


def accumulate(a: Values, b: Values, c: Values, dtype: str, saturate: bool = False) -> Values:
    """The codes of a @ b + c in dtype f16, f32, s32 or f64; operands are values, see `decode_c`."""
    if dtype == "s32":
        total = np.matmul(a, b).astype(np.int64) + c
        if saturate:
            total = np.clip(total, INT32.min, INT32.max)
        return total.astype(np.uint32)
    if dtype == "f64":
        wide = np.matmul(a.astype(np.longdouble), b.astype(np.longdouble)) + c
        return wide.astype(np.float64).view(np.uint64)
    return formats.encode(dtype, np.matmul(a, b) + c)


def decode_c(dtype: str, codes: NDArray[Any]) -> Values:
    """The values of accumulator codes: float64, or int64 for s32."""
    if dtype == "s32":
        return codes.view(np.int32).astype(np.int64)
    return formats.decode(dtype, codes)
