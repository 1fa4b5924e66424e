"""Search spaces as data: how often a space function is drawn."""

from __future__ import annotations

import pytest
import tvm
from tvm.script import tirx as T

from blockscale.building import space as space_module
from blockscale.building.space import Space
from blockscale.catalog import workloads
from blockscale.schedules.steps import Drawing
from blockscale.specs import Spec

EIGHTH = [0.125] * 8
DRAWS = 8


@T.prim_func(s_tir=True)
def main(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
    z = T.sblock_alloc_buffer((8,))
    for i in range(8):
        with T.sblock("twice"):
            at = T.axis.spatial(8, i)
            z[at] = x[at] * T.float32(2)
    for i in range(8):
        with T.sblock("more"):
            at = T.axis.spatial(8, i)
            y[at] = z[at] + T.float32(1)


class Sketch:
    """A space function that counts its draws, and schedules by ``steps``."""

    def __init__(self, steps):
        self.steps, self.draws = steps, 0

    def __call__(self, sch):
        self.draws += 1
        made = Drawing(sch.mod, sch.fork_seed())
        self.steps(made)
        return [made]


def by_category(sch):
    return sch.sample_categorical(list(range(8)), EIGHTH)


def annotated(sch, value):
    sch.annotate(sch.get_loops(sch.get_sblock("more"))[0], "choice", value)


def split(sch, block):
    [loop] = sch.get_loops(sch.get_sblock(block))
    factors = sch.sample_perfect_tile(loop, 2)
    return sch.split(loop, list(factors))


def blind(sch):
    assert sch.get(sch.get_loops(sch.get_sblock("more"))[0]).extent == 8  # before any draw
    annotated(sch, by_category(sch))


def asking_a_value(sch):
    value = by_category(sch)
    if int(sch.get(value)) % 2:
        annotated(sch, value)


def asking_an_extent(sch):
    _, inner = split(sch, "more")
    if int(sch.get(inner).extent) > 2:
        sch.vectorize(inner)


def asking_the_module(sch):
    _, inner = split(sch, "more")
    if "T.grid(4, 2)" in sch.mod.script():
        sch.unroll(inner)


def counting_loops(move):
    """Return a sketch that moves a block under a split loop, and unrolls all its loops."""

    def steps(sch):
        names = ("twice", "more") if move == "compute_at" else ("more", "twice")
        outer, _ = split(sch, names[1])
        getattr(sch, move)(sch.get_sblock(names[0]), outer)
        for loop in sch.get_loops(sch.get_sblock(names[0]))[1:]:
            sch.unroll(loop)

    return steps


def keeping_loops(sch):
    outer, _ = split(sch, "more")
    sch.compute_at(sch.get_sblock("twice"), outer, preserve_unit_loops=True)
    for loop in sch.get_loops(sch.get_sblock("twice"))[1:]:
        sch.unroll(loop)


@pytest.mark.parametrize("steps", [blind, keeping_loops], ids=lambda steps: steps.__name__)
def test_a_sketch_that_does_not_look_is_drawn_once(steps):
    sketch = Sketch(steps)
    space = Space(tvm.IRModule({"main": main}), sketch)
    assert (sketch.draws, len(space.designs)) == (1, 1)


@pytest.mark.parametrize(
    "steps",
    [
        asking_a_value,
        asking_an_extent,
        asking_the_module,
        counting_loops("compute_at"),
        counting_loops("reverse_compute_at"),
    ],
    ids=["value", "extent", "module", "compute_at", "reverse_compute_at"],
)
def test_branches_taken_by_what_was_drawn_are_designs(steps):
    sketch = Sketch(steps)
    space = Space(tvm.IRModule({"main": main}), sketch)
    assert sketch.draws == DRAWS
    assert len(space.designs) == 2


def test_plain_schedules_are_drawn_often():
    """Nobody knows whether who made them looked."""
    draws = []
    Space(tvm.IRModule({"main": main}), lambda sch: draws.append(by_category(sch)))
    assert len(draws) == DRAWS


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("swizzle_128x4", "avx2"),
        ("silu_and_mul_nvfp4_128x4_bf16", "sm_90a"),
        ("scale_sweep_b16_bf16", "avx512"),
    ],
)
def test_one_draw_shows_all_designs(monkeypatch, name, level):
    """As many draws show no other."""
    workload = workloads(Spec.parse_all(name)[0], level)[0]
    mod = workload.mod(level)

    def found():
        space = Space(mod, workload.space(level))
        return [(d.instructions, d.choices, d.drawn) for d in space.designs]

    once = found()
    monkeypatch.setattr(space_module, "Drawing", int)  # no schedule is one
    assert found() == once
