"""Kernels made of index maps, both ways, against formulas; and the functions built on them.

Compiling a kernel takes seconds, so that each level has some of the layouts: together, all
exchanges (nibbles, bytes, halves; in a word, between registers), padding, and ragged tiles.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

import blockscale as bs
from blockscale import catalog, layouts
from blockscale.base import host
from blockscale.building.space import replay, trace_json
from blockscale.emulator import run_module
from blockscale.lower.cpu import compile_cpu
from blockscale.specs import Relayout, Spec
from blockscale.specs.layout import LAYOUTS
from blockscale.tir.layout.plan import cpu_plans, exchanges, gpu_plans
from blockscale.tir.layout.relayout import elements
from tests.kit.gpu_library import library
from tests.kit.helpers import rejects, same_bytes
from tests.kit.kernels import compiled, needs, place, untouched
from tests.kit.pairwise import few, seeds
from tests.reference import layouts as ref

SHAPES = {
    # vectors, words, single elements; whole tiles and not
    "128x4": [(2, 130, 64), (1, 129, 20), (2, 3, 5), (0, 4, 4), (2, 0, 4)],
    "8x4": [(2, 13, 64), (3, 9, 20), (2, 3, 5)],
    "deepgemm": [(2, 130, 64), (2, 5, 12), (1, 3, 5)],
    "deepgemm_permuted": [(2, 128, 64), (1, 256, 12)],
}


def shapes(name):
    """Return sizes in elements."""
    if name in SHAPES:
        return SHAPES[name]
    if name.startswith("int"):
        return [(2, 128, 256), (1, 384, 48), (3, 128, 16)]
    if name.startswith("w4a8"):
        return [(2, 8, 96), (3, 4, 10), (2, 12, 7)]
    if name.startswith("gate"):
        step = LAYOUTS[name].multiples()[1]
        return [(2, step, 64), (1, 3 * step, 20), (2, step, 6)]
    piece = LAYOUTS[name].multiples()[-1]
    return [(3, 16 * piece), (5, 3 * piece)]


def in_bytes(name, sizes):
    """Return a shape whose last axis counts bytes."""
    return (*sizes[:-1], sizes[-1] * ref.bits_of(name) // 8)


def check(name, into, back):
    """Compare both kernels of a layout; arguments lie between bytes of 0xFF, at odd addresses."""
    for number, sizes in enumerate(shapes(name)):
        shape, rng = in_bytes(name, sizes), np.random.default_rng(number)
        plain = rng.integers(0, 256, shape, dtype=np.uint8)
        want = ref.relayout(name, plain, sizes).reshape(in_bytes(name, ref.padded(name, sizes)))
        for kernel, given, wanted in ((into, plain, want), (back, want, plain)):
            if kernel is None:
                continue
            memory, view = place(torch.from_numpy(given))
            view.copy_(torch.from_numpy(given))
            made, out = place(torch.from_numpy(wanted))
            kernel(view, out)
            same_bytes(out.numpy(), wanted)
            assert untouched(made, out)
            assert untouched(memory, view)


def both(name, level):
    """Return the kernels of a layout."""
    return (compiled(Relayout(name, inverse), level) for inverse in (False, True))


CHECKED = [
    *((name, host.level()) for name in ("int4_a16", "8x4", "deepgemm", "gate_up_16")),
    *((name, host.level()) for name in ("marlin_e4m3_8", "marlin_group_16", "w4a8_2")),
    *((name, "avx2") for name in ("int4_a8", "int8_transposed", "marlin_column_32")),
    *((name, "plain") for name in ("int4_a16_columns", "w4a8_2_32", "deepgemm_permuted")),
]
"""The functions on top of the kernels test the others: test_int4, test_layouts."""


@pytest.mark.parametrize(("name", "level"), few(CHECKED, every=3))
def test_kernels(name, level):
    """Default schedules, every size at run time."""
    needs(level)
    check(name, *both(name, level))


def test_plain_loops():
    """The op itself, unscheduled."""
    import tvm

    for name in ("8x4", "int4_a16", "w4a8_4"):
        for inverse in (False, True):
            spec = Relayout(name, inverse)
            func = elements(spec).with_attr("global_symbol", "main")
            kernel = compile_cpu(tvm.IRModule({"main": func}), catalog.target("plain"))["main"]
            check(name, *((None, kernel) if inverse else (kernel, None)))


@pytest.mark.parametrize(("name", "seed"), few([("8x4", 2), ("int4_a16", 1)]))
def test_cpu_space(name, seed):
    """Traces found on the static instance serve the exported function."""
    level, kernels = host.level(), []
    for inverse in (False, True):
        spec = Relayout(name, inverse)
        [workload] = catalog.workloads(spec, level)
        found = workload.space(level)(Schedule(workload.mod(level), seed=seed + 1))
        trace = trace_json(found[seed % len(found)].trace)
        traces = {workload.tag: replay(workload.mod(level), trace).trace}
        kernels.append(compiled(spec, level, traces))
    check(name, *kernels)


# ---- GPUs ---------------------------------------------------------------------------------------


def emulated(name, arch):
    """Return both kernels of a layout, played by the emulator."""
    specs = [Relayout(name, inverse) for inverse in (False, True)]
    names = tuple(spec.name for spec in specs)

    def player(own):
        def run(*values):
            aligned = [value.clone() for value in values]
            played = run_module(library(names, arch), own, *aligned, target=arch)
            assert not [hazard for report in played.reports for hazard in report.hazards]
            values[1].copy_(aligned[1])

        return run

    return map(player, names)


@pytest.mark.parametrize(
    ("name", "arch"),
    few(
        [
            ("int4_a16", "sm_90a"),
            ("int4_transposed", "sm_90a"),
            ("int8_a16", "sm_100a"),
            ("8x4", "sm_90a"),
            ("w4a8_4", "sm_90a"),
            ("marlin_e4m3_8", "sm_90a"),
        ]
    ),
)
def test_gpu_kernels(name, arch):
    """PTX in the emulator: wide tiles, words and elements; no hazard."""
    check(name, *emulated(name, arch))


@seeds(4)
def test_gpu_space(seed):
    """Schedules that are drawn lower to CUDA C++; each sketch once."""
    name = ("int4_a8", "128x4", "marlin_column_16", "w4a8_2")[seed]
    spec, level = Relayout(name, bool(seed % 2)), "sm_90a"
    [workload] = catalog.workloads(spec, level)
    found = workload.space(level)(Schedule(workload.mod(level), seed=seed + 1))
    assert len(found) == 4
    trace = trace_json(found[seed].trace)
    again: Trace = replay(workload.mod(level), trace).trace
    source = catalog.cuda_source(spec, level, {workload.tag: again})
    assert len(source.kernels) == len(gpu_plans(spec.map)) + 1


# ---- Exchanges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_exchanges(name):
    """The stages bring every element of every register to its place."""
    for plan in (*gpu_plans(LAYOUTS[name]), *cpu_plans(LAYOUTS[name], 4)):
        for source, target in ((plan.plain, plan.laid), (plan.laid, plan.plain)):
            word = plan.word
            bits, stages = exchanges(word, source, target)
            order = [*source.low[:word], *source.regs]
            for stage in stages:
                other = stage.other if stage.reg is None else word + stage.reg
                order[stage.place], order[other] = order[other], order[stage.place]
            assert order == [*target.low[:word], *bits]
            assert sorted(bits) == sorted(target.regs)


# ---- Functions ----------------------------------------------------------------------------------


def scales(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize(("name", "rows"), [("128x4", 128), ("8x4", 8)])
def test_padded_scales(name, rows):
    """Experts are padded one by one, with zeros; one expert may come without its axis; and back."""
    into, back = getattr(layouts, f"to_{name}"), getattr(layouts, f"from_{name}")
    for shape in ((3, 2 * rows + 1, 7), (1, 5, 16)):
        given = scales(*shape)
        made = into(given)
        assert made.shape == ref.padded(name, shape)
        same_bytes(made.numpy().reshape(-1), ref.relayout(name, given.numpy(), shape))
        assert torch.equal(back(made, *shape[1:]), given)
        assert torch.equal(into(given[0]), made[0])
        assert torch.equal(back(made[0], *shape[1:]), given[0])
    floats = into(scales(9, 4).view(torch.float8_e4m3fn))
    assert floats.dtype == torch.float8_e4m3fn


def test_one_expert_is_swizzle_scales():
    given = scales(130, 9)
    assert torch.equal(layouts.to_128x4(given), bs.swizzle_scales(given))


def test_grouped_scales():
    """Each expert's rows at the tiles after those of the experts before it; and back."""
    given = scales(300, 6)
    offsets = [2, 2, 130, 140, 140, 296]
    ends = torch.tensor(offsets, dtype=torch.int32)
    made = layouts.grouped_128x4(given, ends)
    parts = [
        bs.swizzle_scales(given[first:last].contiguous())
        for first, last in pairwise(offsets)
        if last > first
    ]
    want = torch.cat(parts)
    assert made.shape == ((300 + 127 * 5) // 128 * 128, 8)
    assert torch.equal(made[: len(want)], want)
    assert not made[len(want) :].any()
    plain = layouts.from_grouped_128x4(made, ends, 300, 6)
    assert torch.equal(plain[2:296], given[2:296])
    assert not plain[:2].any()
    assert not plain[296:].any()


def test_bad_scales():
    given = scales(2, 8, 4)
    for name in ("128x4", "8x4"):
        into, back = getattr(layouts, f"to_{name}"), getattr(layouts, f"from_{name}")
        with rejects(f"to_{name}", "no empty axis"):
            into(given[None])
        with rejects("float32", "convert"):
            into(given.float())
        with rejects(f"from_{name}", "rows=900", "blocks=4", "before padding"):
            back(into(given), 900, 4)
        with rejects("rows=0"):
            back(into(given), 0, 4)
    with rejects("grouped_128x4", r"\[2, 8, 4\]", r"\[rows, blocks\]"):
        layouts.grouped_128x4(given, torch.tensor([0, 8]))
    with rejects("offsets", r"\[E \+ 1\]"):
        layouts.grouped_128x4(given[0], torch.tensor([0]))
    with rejects("offsets", "float32", "int32"):
        layouts.grouped_128x4(given[0], torch.tensor([0.0, 8.0]))
    with rejects("from_grouped_128x4", "rows=8"):
        layouts.from_grouped_128x4(given[0], torch.tensor([0, 8]), 8, 4)


def test_names():
    """Names and specs are each other's; an unknown layout is refused."""
    assert Spec.parse("relayout_int4_a16_back") == Relayout("int4_a16", inverse=True)
    for name in LAYOUTS:
        for inverse in (False, True):
            spec = Relayout(name, inverse)
            assert Spec.parse(spec.name) == spec
            assert Spec.from_json(spec.to_json()) == spec
    with rejects("Relayout", "layout='tiles'", "choose"):
        Relayout("tiles")


def test_compiled_by_torch():
    """torch.compile keeps a layout function in one graph."""
    given = scales(2, 9, 8)
    compiled_one = torch.compile(layouts.to_8x4, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled_one(given), layouts.to_8x4(given))
    turns = torch.compile(
        lambda x: layouts.interleave_gate_up(x, 8), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(
        turns(given[:, :8].repeat(1, 4, 1)),
        layouts.interleave_gate_up(given[:, :8].repeat(1, 4, 1), 8),
    )
