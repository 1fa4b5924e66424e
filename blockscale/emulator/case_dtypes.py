"""The names of element types in a case.json: how each is stored in a .npy file, and its value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import formats

# Types that NumPy does not have: names -> format of `formats`.
_FORMATS = {
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3", "e4m3", "e4m3fn", "fp8_e4m3"), "e4m3"),
    **dict.fromkeys(("float8_e5m2", "e5m2", "fp8_e5m2"), "e5m2"),
    **dict.fromkeys(("float8_e8m0fnu", "float8_e8m0", "ue8m0", "e8m0"), "ue8m0"),
    **dict.fromkeys(("ue4m3",), "ue4m3"),
    **dict.fromkeys(("float4_e2m1fn_x2", "float4_e2m1fn", "e2m1x2", "e2m1", "fp4"), "e2m1"),
}
_NUMPY = {"f16": "float16", "f32": "float32", "f64": "float64", "bool": "uint8"}
_PACKED = "e2m1"  # two to a byte, the even element in the low nibble


def storage(name: str) -> np.dtype:
    """Return the NumPy dtype that holds a type: bfloat16 in uint16, FP4 and FP8 in uint8."""
    small = str(name).lower()
    if small in _FORMATS:
        return np.dtype(np.uint16 if _FORMATS[small] == "bf16" else np.uint8)
    try:
        found = np.dtype(_NUMPY.get(small, small))
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iufb":
        known = ", ".join(["NumPy's numbers", *_FORMATS])
        raise ValueError(f"dtype {name!r} is unknown; use one of {known}")
    return found


def values(name: str, array: NDArray) -> NDArray[np.float64]:
    """Return the values of stored elements; packed FP4 doubles the last dimension."""
    fmt = _FORMATS.get(str(name).lower())
    if fmt is None:
        return bits(name, array).astype(np.float64)
    if fmt == _PACKED:
        array = np.stack([array & 15, array >> 4], axis=-1).reshape(*array.shape[:-1], -1)
    return formats.decode(fmt, array)


def bits(name: str, array: NDArray) -> NDArray:
    """Return the stored elements seen as the type's own NumPy dtype."""
    return array.view(storage(name))


def map_dtype(name: str | int) -> str | int:
    """Return a tensor map's name of a buffer's type; names of cuda.h pass through."""
    fmt = _FORMATS.get(str(name).lower())
    return name if fmt is None else "BFLOAT16" if fmt == "bf16" else "UINT8"
