"""Outputs of a case: exact, bit for bit, within a bound on the error of rows, in a region."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale.emulator.case_outputs import judge, region
from tests.emulator.cases.case_kit import GOT, REFERENCE


def outcome(got, *, initial=None, dtype="float32", **output):
    files = {name: array for name, array in output.items() if isinstance(array, np.ndarray)}
    named = {name: name if name in files else value for name, value in output.items()}
    if initial is None:
        initial = np.full(got.nbytes, 0xFF, np.uint8).view(got.dtype).reshape(got.shape)
    return judge({"dtype": dtype, **named}, "c.npy", got, initial, files.__getitem__)


def test_exact_is_by_value_raw_bits_is_not():
    bits = np.array([[0.0, np.nan, 1.0]], np.float32)
    got = np.array([[-0.0, np.nan, 1.0]], np.float32)
    got.view(np.uint32)[0, 1] = 0x7FFFFFFF
    assert outcome(got, expected_bits=bits, exact=True).passed
    raw = outcome(got, expected_bits=bits, raw_bits=True)
    assert not raw.passed
    assert raw.differing == 2
    assert "2 of 3 elements differ bit for bit, the first at [0, 0]: -0.0 instead of 0.0" in (
        raw.sentence
    )


def test_one_wrong_element_is_counted_and_shown():
    got = GOT.copy()
    got[1, 2] = 70
    found = outcome(got, expected=REFERENCE, expected_bits=GOT, exact=True, max_rel_row_error=0)
    assert (found.passed, found.differing, found.elements) == (False, 4, 12)  # a row is wrong
    assert "1 of 12 elements differ by value, the first at [1, 2]: 70.0 instead of 7.0" in (
        found.sentence
    )
    assert found.max_row_error == pytest.approx(63 / np.linalg.norm(REFERENCE[1]))


def test_the_bound_is_on_the_worst_row():
    got = GOT.copy()
    got[0] *= 1 + 1e-5
    assert outcome(got, expected=REFERENCE, max_rel_row_error=2e-5).passed
    found = outcome(got, expected=REFERENCE, max_rel_row_error=2e-6)
    assert (found.passed, found.differing) == (False, 4)
    assert "1 of 3 rows have a relative error above 2e-06, row 0 one of 1e-05" in found.sentence


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_fails_unless_expected(value):
    got = GOT.copy()
    got[2, 3] = value
    assert outcome(got, expected=REFERENCE, max_rel_row_error=1.0).max_row_error == np.inf
    reference = REFERENCE.copy()
    reference[2, 3] = value
    assert outcome(got, expected=reference, max_rel_row_error=0.0).passed


def test_a_zero_row_must_be_zero():
    zero = np.zeros((2, 2))
    assert outcome(np.zeros((2, 2), np.float32), expected=zero).max_row_error == 0
    got = np.array([[0, 0], [0, 1e-30]], np.float32)
    found = outcome(got, expected=zero, max_rel_row_error=0.1)
    assert not found.passed
    assert found.max_row_error == np.inf


def test_unwritten_elements_are_named():
    got = GOT.copy()
    got.view(np.uint32)[0] = 0xFFFFFFFF
    found = outcome(got, expected=REFERENCE, max_rel_row_error=1e-6)
    assert "4 elements still hold the poison 0xFFFFFFFF" in found.sentence


def test_dtypes_that_numpy_does_not_have():
    bf16 = (GOT.view(np.uint32) >> 16).astype(np.uint16)
    assert outcome(bf16, dtype="bfloat16", expected=REFERENCE, max_rel_row_error=0.0).passed
    e4m3 = np.array([[0x38, 0xB8, 0x7E]], np.uint8)
    assert outcome(e4m3, dtype="e4m3", expected=np.array([[1, -1, 448.0]])).passed
    packed = np.array([[0x42, 0xF1]], np.uint8)  # the low nibble is the even element
    assert outcome(packed, dtype="e2m1", expected=np.array([[1, 2, 0.5, -6]])).passed
    big = np.array([[(1 << 62) + 1]], np.int64)
    assert not outcome(big, dtype="int64", expected_bits=big - 1, exact=True).passed


@pytest.mark.parametrize(
    "box",
    [[[0, 2], [1, 3]], {"start": [0, 1], "stop": [2, 3]}, {"offset": [0, 1], "shape": [2, 2]}],
)
def test_only_the_region_may_be_written(box):
    got = np.full((3, 4), 0xFFFFFFFF, np.uint32).view(np.float32)
    got[0:2, 1:3] = GOT[0:2, 1:3]
    assert outcome(got, expected=REFERENCE, region=box).passed
    assert outcome(got, expected=REFERENCE[0:2, 1:3], region=box).passed
    got[2, 0] = 0
    found = outcome(got, expected=REFERENCE, region=box)
    assert not found.passed
    assert "1 elements outside of the region were written" in found.sentence


def test_outputs_that_cannot_be_judged():
    with pytest.raises(ValueError, match=r"region \[\[0, 5\]\] is no box in a buffer of shape \("):
        region([[0, 5]], (3, 4))
    with pytest.raises(ValueError, match="is exact, but has no expected_bits; name a"):
        outcome(GOT, exact=True)
    with pytest.raises(ValueError, match="has neither expected nor expected_bits"):
        outcome(GOT)
    with pytest.raises(ValueError, match=r"expected has shape \(2, 4\), the buffer \(3, 4\)"):
        outcome(GOT, expected=REFERENCE[:2])
    with pytest.raises(ValueError, match="expected_bits holds float64, the buffer float32"):
        outcome(GOT, expected_bits=REFERENCE, exact=True)
