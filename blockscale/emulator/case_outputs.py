"""Judging an output buffer: by value, by bits, or by the relative error of its rows.

Types that NumPy does not have are stored as unsigned integers; `storage` and `values` know them.

A row is what the last dimension runs over. Its error is ||got - expected|| / ||expected||, in
float64; the largest one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator import formats

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
# Half a unit in the last place, relative: how far exact results may be from a float64 reference.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
POISON = 0xFF
Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """One output of one run."""

    name: str
    passed: bool
    max_row_error: float | None
    """None where no reference was given, only bits."""
    differing: int
    """Elements that are wrong: unequal, or with a tolerance in a row above it."""
    elements: int
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as JSON types; an infinite error is null."""
        error = self.max_row_error
        finite = error is not None and np.isfinite(error)
        return {
            "output": self.name,
            "passed": self.passed,
            "max_rel_row_error": float(error) if finite and error is not None else None,
            "differing": self.differing,
            "elements": self.elements,
            "sentence": self.sentence,
        }


def judge(
    output: Mapping[str, Any], name: str, got: NDArray, initial: NDArray, read: Read
) -> Outcome:
    """Compare a buffer after the run with what an output of a case.json asks for."""
    dtype = output.get("dtype", str(got.dtype))
    whole, initial = bits(dtype, got), bits(dtype, initial)
    box = region(output.get("region"), got.shape)
    got = whole[box]
    wrong = np.zeros(got.shape, bool)
    failures: list[str] = []
    compared: list[str] = []
    file = _bits_file(output)
    if file is not None:
        reference = _inside(read(file), whole.shape, box, file)
        wrong, how = _unequal(output, dtype, got, reference)
        compared.append(f"equal {how}")
        if wrong.any():
            failures.append(_first(wrong, got, reference, how))
    error = None
    expected = output.get("expected")
    if isinstance(expected, str):
        errors = _row_errors(dtype, got, box, whole.shape, read(expected), expected)
        error = float(errors.max(initial=0.0))
        bound = output.get("max_rel_row_error", None if file else 0.0)
        if (
            file and bound is not None
        ):  # the bits are judged; a narrow result is a rounded reference
            bound = max(bound, ROUNDING.get(dtype, 0.0))
        if bound is not None and not error <= bound:
            wrong = wrong | _rows(got.shape, errors > bound)
            failures.append(
                f"{int((errors > bound).sum())} of {errors.size} rows have a relative error above "
                f"{bound:g}, row {int(np.argmax(errors))} one of {error:.3g}"
            )
        compared.append(f"largest relative error of a row {error:.3g}")
    if not compared:
        raise ValueError("has neither expected nor expected_bits; name a .npy file")
    outside = _outside(box, whole, initial)
    if outside:
        failures.append(f"{outside} elements outside of the region were written")
    missing = int((_raw(got) == POISON).all(-1).sum())
    if failures and missing:
        failures.append(f"{missing} elements still hold the poison 0x{'FF' * got.itemsize}")
    sentence = f"{name}: {'; '.join(failures or compared)}"
    count = int(wrong.sum()) + outside
    return Outcome(name, not failures, error, count, int(wrong.size), sentence)


def region(
    spec: Sequence[Sequence[int]] | Mapping[str, Sequence[int]] | None, shape: tuple[int, ...]
) -> tuple[slice, ...]:
    """Return the box of a region: [start, stop] of each dimension, or {start, stop | shape}."""
    if spec is None:
        return tuple(slice(0, size) for size in shape)
    try:
        if isinstance(spec, Mapping):
            start = list(spec.get("start", spec.get("offset", [0] * len(shape))))
            stop = spec.get("stop", spec.get("end"))
            if stop is None:
                stop = [a + n for a, n in zip(start, spec["shape"], strict=True)]
            pairs = list(zip(start, stop, strict=True))
        else:
            pairs = [(int(start), int(stop)) for start, stop in spec]
    except (TypeError, ValueError, KeyError):
        pairs = []
    good = len(pairs) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(pairs, shape, strict=True)
    )
    if not good:
        raise ValueError(
            f"region {spec!r} is no box in a buffer of shape {shape}; give [start, stop] for each "
            "dimension"
        )
    return tuple(slice(start, stop) for start, stop in pairs)


def _bits_file(output: Mapping[str, Any]) -> str | None:
    """Return the file with the expected bits, if the output is compared with one."""
    named = output.get("expected_bits", output.get("raw_bits"))
    if isinstance(named, str):
        return named
    if output.get("exact") or output.get("raw_bits"):
        raise ValueError("is exact, but has no expected_bits; name a .npy file")
    return None


def _inside(array: NDArray, shape: tuple[int, ...], box: tuple[slice, ...], file: str) -> NDArray:
    """Return the part of a reference inside the region; it may hold that part only."""
    inner = tuple(s.stop - s.start for s in box)
    if array.shape == inner:
        return array
    if array.shape == shape:
        return array[box]
    raise ValueError(
        f"{file} has shape {array.shape}, the buffer {shape}; save the reference in the buffer's "
        "shape"
    )


def _raw(array: NDArray) -> NDArray[np.uint8]:
    """Return the bytes of each element, [..., itemsize]."""
    contiguous = np.ascontiguousarray(array)
    return contiguous.view(np.uint8).reshape(*array.shape, array.itemsize)


def _unequal(
    output: Mapping[str, Any], dtype: str, got: NDArray, expected: NDArray
) -> tuple[NDArray[np.bool_], str]:
    """Return where elements differ, bit by bit or by value (NaN = NaN, -0 = +0)."""
    if expected.itemsize != got.itemsize:
        raise ValueError(
            f"expected_bits holds {expected.dtype}, the buffer {got.dtype}; save the buffer's dtype"
        )
    different: NDArray[np.bool_] = (_raw(got) != _raw(expected)).any(-1)
    if output.get("raw_bits"):
        return different, "bit for bit"
    stored = np.ascontiguousarray(expected).view(got.dtype)
    a, b = values(dtype, got), values(dtype, stored)
    if a.shape != got.shape:  # packed FP4: two values in an element
        same = ((a == b) | (np.isnan(a) & np.isnan(b))).reshape(*got.shape, 2).all(-1)
    elif got.dtype.kind in "iu" and got.itemsize == 8:
        same = ~different  # float64 cannot tell all of them apart
    else:
        same = (a == b) | (np.isnan(a) & np.isnan(b))
    return different & ~same, "by value"


def _first(unequal: NDArray[np.bool_], got: NDArray, expected: NDArray, how: str) -> str:
    """Return the sentence about the elements that differ, with the first one."""
    place = tuple(int(i) for i in np.argwhere(unequal)[0])
    shown = ", ".join(map(str, place))
    return (
        f"{int(unequal.sum())} of {unequal.size} elements differ {how}, the first at [{shown}]: "
        f"{got[place]} instead of {expected[place]}"
    )


def _row_errors(
    dtype: str,
    got: NDArray,
    box: tuple[slice, ...],
    shape: tuple[int, ...],
    expected: NDArray,
    file: str,
) -> NDArray[np.float64]:
    """Return the relative error of each row; infinite where only one side is finite."""
    ours = values(dtype, got)
    if ours.shape == got.shape:
        expected = _inside(expected, shape, box, file)
    elif ours.shape != expected.shape:
        raise ValueError(f"{file} has shape {expected.shape}; the output's values {ours.shape}")
    columns = ours.shape[-1] if ours.ndim else 1
    ours, reference = ours.reshape(-1, columns), expected.astype(np.float64).reshape(-1, columns)
    same = (ours == reference) | (np.isnan(ours) & np.isnan(reference))
    with np.errstate(all="ignore"):
        difference = np.where(same, 0.0, ours - reference)
        size = np.linalg.norm(np.where(np.isfinite(reference), reference, 0.0), axis=1)
        error = np.linalg.norm(difference, axis=1)
        relative = np.where(error == 0, 0.0, error / size)
    return np.where(np.isnan(relative), np.inf, relative)


def _rows(shape: tuple[int, ...], bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which elements of a buffer lie in bad rows."""
    columns = shape[-1] if shape else 1
    return np.broadcast_to(bad[:, None], (bad.size, columns)).reshape(shape)


def _outside(box: tuple[slice, ...], got: NDArray, initial: NDArray) -> int:
    """Return how many elements outside of the box changed."""
    changed = (_raw(got) != _raw(initial)).any(-1)
    changed[box] = False
    return int(changed.sum())


# types of elements -----------------------------------------------------------------------------
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
