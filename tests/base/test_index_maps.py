"""Every index map against the formula of its specification, and back."""

import numpy as np
import pytest
from tvm.sym import Analyzer

from blockscale.base.index_maps import IndexMap
from blockscale.ops.int4.layout import layout_of
from blockscale.specs.layout import LAYOUTS
from blockscale.tir import block_grid
from blockscale.tir.common import i64
from blockscale.tir.layout.plan import cpu_plans, gpu_plans, low_bits, plain_order
from tests.reference import layouts as ref

SIZES = {
    "128x4": [(2, 130, 9), (1, 1, 1), (2, 256, 8)],
    "8x4": [(2, 13, 9), (1, 1, 1), (3, 16, 8)],
    "deepgemm": [(2, 7, 9), (1, 130, 4)],
    "deepgemm_permuted": [(2, 256, 12)],
}


def sizes_of(name):
    """Return sizes of small tensors."""
    if name in SIZES:
        return SIZES[name]
    if name.endswith("transposed"):  # the formula counts whole words
        return [(2, 96, 16)]
    steps = LAYOUTS[name].multiples()
    return [tuple(step * count for step, count in zip(steps, (2, 3, 5), strict=False))]


every = pytest.mark.parametrize("name", LAYOUTS)


def test_every_layout_has_a_formula():
    assert set(ref.PLACES) == set(LAYOUTS)


@every
def test_places(name):
    """Every element's place, and from the place its index; no place twice, padding is the rest."""
    layout = LAYOUTS[name]
    assert (layout.bits, layout.flip) == (ref.bits_of(name), ref.flip_of(name))
    for sizes in sizes_of(name):
        index = ref.grid(sizes)
        want = ref.PLACES[name](*index, sizes)
        got = layout.place(index, sizes)
        assert (got == want).all()
        total = int(np.prod(ref.padded(name, sizes)))
        assert layout.elements(sizes) == total
        assert layout.padded(sizes) == ref.padded(name, sizes)
        back = np.stack(np.broadcast_arrays(*layout.index(np.arange(total), sizes)))
        assert (back[:, want.reshape(-1)] == np.stack(index).reshape(len(sizes), -1)).all()
        others = np.setdiff1d(np.arange(total), want)
        assert len(others) == total - want.size
        assert (back[:, others] >= np.array(sizes)[:, None]).any(0).all()


def test_worked_example():
    """The specification's: k = 8, n = 1 is word 8, slot 1."""
    assert LAYOUTS["int4_a16"].place((0, 8, 1), (1, 64, 64)) == 8 * 8 + 1


def test_block_grid_is_the_map():
    """The expressions on which tuning logs hang are the same layout."""
    analyzer = Analyzer()
    layout, sizes = LAYOUTS["128x4"], (1, 300, 11)
    for r, c in np.random.default_rng(0).integers(0, (300, 11), (64, 2)):
        offset = block_grid.offset_128x4(i64(int(r)), i64(int(c)), i64(11))
        assert int(analyzer.simplify(offset)) == layout.place((0, int(r), int(c)), sizes)


MODES = [
    ({"sm": 80}, "int4_a16"),
    ({"sm": 80, "bits": 8}, "int8_a16"),
    ({"sm": 90}, "int4_a16"),
    ({"sm": 90, "moe": False}, "int4_a16_columns"),
    ({"sm": 90, "moe": False, "bits": 8}, "int8_a16_columns"),
    ({"sm": 89, "activation": "a8"}, "int4_a8"),
    ({"sm": 90, "activation": "a8", "moe": False}, "int4_a8_columns"),
    ({"sm": 90, "activation": "a8"}, "int4_transposed"),
    ({"sm": 100, "moe": False}, "int4_transposed"),
    ({"sm": 100, "moe": False, "bits": 8}, "int8_transposed"),
]


@pytest.mark.parametrize(("options", "name"), MODES)
def test_layout_of_names_its_map(options, name):
    found = layout_of(**options)
    assert found.map_name == name
    assert found.map is LAYOUTS[name]


def test_bad_map():
    """A map must name every digit once, and have one open digit an axis."""
    with pytest.raises(AssertionError, match="not every digit"):
        IndexMap("twice", (("r", (None, 4)),), "r.0 r.0")
    with pytest.raises(AssertionError, match="one is open"):
        IndexMap("closed", (("r", (2, 4)),), "r.0 r.1")


@every
def test_plans(name):
    """Tiles hold the low bits of both sides, each bit once; lanes and vectors fill sectors."""
    layout = LAYOUTS[name]
    for plan in (*gpu_plans(layout), *cpu_plans(layout, 4), *cpu_plans(layout, 2)):
        word = plan.word
        for side, order in ((plan.plain, plain_order(layout)), (plan.laid, layout.digits)):
            assert side.low == low_bits(layout, order, len(side.low))
            assert len({*side.low[:word], *side.regs, *plan.lanes}) == (
                word + len(side.regs) + len(plan.lanes)
            )
        bits = {*plan.plain.low[:word], *plan.plain.regs, *plan.lanes}
        assert bits == {*plan.laid.low[:word], *plan.laid.regs, *plan.lanes}
        assert {digit: count for digit, count in plan.taken.items() if count} == {
            digit: 1 + max(j for *at, j in bits if tuple(at) == digit)
            for digit in {(axis, i) for axis, i, _ in bits}
        }
    for plan in gpu_plans(layout):
        assert len(plan.lanes) == 5
        assert len(plan.plain.regs) <= 5
