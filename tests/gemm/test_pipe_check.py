"""Rules of derived kernels: each refuses a kernel that breaks it, and no other rule does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe import check, read, simulate
from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.kernel import Kernel, Stage
from tests.kit import gemm_harness as harness

PLANS: dict[str, dict[str, Any]] = {
    "single": {"store": "tma"},
    "pair": {"cta_group": 2, "n": 384},
    "multicast": {"cluster_x": 2, "cluster_y": 2, "n": 384},
    "split": {"split_k": 2, "acc_stages": 1},
    "partial": {"k": 448, "block_k": 256},
}

Change = Callable[[Kernel], Kernel]


def kernel(name: str) -> Kernel:
    """Return the derived kernel of one of `PLANS`."""
    return harness.kernel(harness.plan(**PLANS[name]))


def refusing(of: Kernel) -> dict[str, str]:
    """Return the checks that refuse a kernel, with their reasons."""
    found = {each.__name__: each(of) for each in check.CHECKS}
    return {name: reason for name, reason in found.items() if reason is not None}


def load(number: int, **changes: Any) -> Change:
    """Change a load: 0 X, 1 Y, 2 and 3 their scales."""

    def made(of: Kernel) -> Kernel:
        loads = list(of.loads)
        loads[number] = replace(loads[number], **changes)
        return replace(of, loads=tuple(loads))

    return made


def both(number: int, **changes: Any) -> Change:
    """Change the load of an operand and that of its scales."""
    return lambda of: load(number + 2, **changes)(load(number, **changes)(of))


def odd(of: Kernel) -> Kernel:
    """Share Y between the halves of pairs, of which a row of three CTAs has one and a half."""
    wide = replace(of, cluster_x=3)
    return load(1, along_x=True, along_y=True, along_pair=False)(wide)


def rows(number: int, box: int) -> Change:
    """Let a load of an operand bring another number of rows, to a slot that holds as many."""

    def made(of: Kernel) -> Kernel:
        was = of.loads[number]
        *inner, outer = was.dims
        slot = replace(was.slot, bytes=was.slot.row_bytes * box)
        return load(number, dims=(*inner, replace(outer, box=box)), slot=slot)(of)

    return made


def box(number: int) -> Change:
    """Let a load bring a row less than its slot holds."""

    def made(of: Kernel) -> Kernel:
        *inner, outer = of.loads[number].dims
        return load(number, dims=(*inner, replace(outer, box=outer.box - 1)))(of)

    return made


def stage(change: Callable[[Stage], Stage], name: str = "whole") -> Change:
    """Change what is issued for a stage."""
    return lambda of: replace(of, **{name: change(getattr(of, name))})


def step(number: int, **changes: Any) -> Change:
    """Change one MMA of a stage."""

    def made(of: Stage) -> Stage:
        steps = list(of.multiplies)
        steps[number] = replace(steps[number], **changes)
        return replace(of, multiplies=tuple(steps))

    return stage(made)


def copy(side: str, **changes: Any) -> Change:
    """Change the last copy of a side's scales."""

    def made(of: Stage) -> Stage:
        last = max(i for i, each in enumerate(of.copies) if each.side == side)
        copies = list(of.copies)
        copies[last] = replace(copies[last], **changes)
        return replace(of, copies=tuple(copies))

    return stage(made)


def epilogue(**changes: Any) -> Change:
    """Change the epilogue."""
    return lambda of: replace(of, epilogue=replace(of.epilogue, **changes))


def stored(change: Callable[[Any], Any]) -> Change:
    """Change the TMA store."""

    def made(of: Kernel) -> Kernel:
        moves = {name: change(move) for name, move in of.epilogue.stores.items()}
        return epilogue(stores=moves)(of)

    return made


def pitch(move: Any) -> Any:
    """Let rows of d begin at multiples of 8 bytes."""
    inner, outer = move.dims
    return replace(move, dims=(inner, replace(outer, pitch=1016)))


def narrow(move: Any) -> Any:
    """Stage rows of 16 bytes."""
    slot = replace(move.slot, row_bytes=16)
    return replace(move, slot=slot)


def slot(side: str, **changes: Any) -> Change:
    """Change a slot of scales in tensor memory."""
    return lambda of: replace(of, **{side: replace(getattr(of, side), **changes)})


ALONE: tuple[tuple[str, str, Change, str], ...] = (
    ("_shape", "single", lambda k: replace(k, mma=replace(k.mma, n=96)), "96 columns of the MMA"),
    ("_shape", "single", lambda k: replace(k, stages=1), "from 2 stages on"),
    ("_shape", "single", lambda k: replace(k, acc_stages=3), "neither 1 nor 2"),
    ("_shape", "single", lambda k: replace(k, experts=1025), "1025 experts are more than 1024"),
    ("_shape", "single", lambda k: replace(k, band=0), "no number of clusters"),
    ("_cluster", "multicast", lambda k: replace(k, cluster_x=8), "16 CTAs is larger than 8"),
    ("_cluster", "multicast", lambda k: replace(k, cluster_y=3), "slice of 42.6667 rows of a"),
    ("_cluster", "multicast", lambda k: replace(k, experts=2), "nothing to share"),
    ("_split", "pair", lambda k: replace(k, split=2, acc_stages=1), "takes the whole cluster"),
    ("_split", "split", lambda k: replace(k, split=5), "leaves CTAs without K"),
    ("_split", "split", lambda k: replace(k, acc_stages=2), "acc_stages is 1"),
    ("_boxes", "single", box(0), "a box of a has 8128 bytes, its slot 8192"),
    ("_boxes", "single", box(1), "a box of b has 8128 bytes"),
    ("_boxes", "single", box(3), "a box of b_scale has 0 bytes"),
    ("_boxes", "single", stored(lambda m: replace(m, dtype="BFLOAT16")), "a box of d has"),
    ("_boxes", "single", rows(1, 272), r"\[64, 272\] elements of b exceeds 256"),
    ("_operands", "single", step(1, x=0), r"read a at bytes \[0, 0\]"),
    ("_operands", "single", step(1, y=64), r"read b at bytes \[0, 64\]"),
    ("_operands", "single", stage(lambda s: Stage(s.copies, s.multiplies[:1])), r"bytes \[0\]"),
    (
        "_operands",
        "partial",
        stage(lambda s: Stage(s.copies, s.multiplies[::-1]), "last"),
        "read a",
    ),
    ("_scales", "single", step(1, sx=16), "never copied"),
    ("_scales", "single", copy("y", column=64), "never copied"),
    ("_scales", "single", copy("x", source=0), "a tile of a_scale is copied twice"),
    ("_scales", "partial", copy("y", source=1 << 14), "a copy of b_scale lies outside"),
    ("_scales", "single", slot("sx", columns=4), "a copy of a_scale lies outside of its slot"),
    ("_senders", "multicast", odd, r"CTA 2 loads for pairs \[0, 1, 2, 3, 5\], and 4 report to it"),
    ("_shared", "single", lambda k: replace(k, stages=14), "take fewer stages"),
    ("_shared", "single", rows(0, 120), "slots of a do not begin at multiples of 1024"),
    ("_tensor_memory", "single", slot("sy", columns=360), "more than half"),
    ("_epilogue", "single", epilogue(columns=48), "parts of 48 columns"),
    ("_epilogue", "single", epilogue(width=24), "do not divide parts of 32"),
    ("_epilogue", "single", stored(narrow), "rows of 16 bytes has no swizzle"),
    ("_epilogue", "single", stored(pitch), "1016 bytes are no multiple of 16"),
    ("_epilogue", "pair", lambda k: replace(k, x_tile=128), "tiles of 128 lanes; 2 CTAs have 256"),
)


@pytest.mark.parametrize(("name", "plan", "change", "reason"), ALONE)
def test_one_check_refuses(name: str, plan: str, change: Change, reason: str) -> None:
    """The kernel was legal; changed in one place it breaks one rule, and `checked` says which."""
    legal = kernel(plan)
    assert refusing(legal) == {}
    broken = change(legal)
    assert list(refusing(broken)) == [name], refusing(broken)
    with pytest.raises(LoweringError, match=f"no such kernel: .*{reason}"):
        check.checked(broken)


def test_every_check_refuses_something() -> None:
    """Those that never are alone have tests of their own below."""
    apart = {"_bytes", "_progress"}  # a CTA without a sender also reports to a wrong number
    assert {each.__name__ for each in check.CHECKS} == {name for name, *_ in ALONE} | apart


def test_too_many_columns_are_refused() -> None:
    """Shared memory, which keeps CTAs from queueing for columns, has no answer to 536 either."""
    broken = slot("sx", columns=400)(replace(kernel("single"), acc_stages=1))
    assert set(refusing(broken)) == {"_shared", "_tensor_memory"}
    assert refusing(broken)["_tensor_memory"].startswith("536 columns of tensor memory, and 512")


def test_a_slot_that_nobody_fills_is_refused() -> None:
    """In a cluster of three, the last CTA has no neighbour that loads its half of Y."""
    of = replace(kernel("pair"), group=1, cluster_x=1, cluster_y=3, x_tile=128)
    broken = load(0, along_y=True, along_pair=False)(of)
    assert refusing(of).keys() <= {"_cluster"}
    assert set(refusing(broken)) - set(refusing(of)) == {"_bytes", "_senders"}
    assert refusing(broken)["_bytes"] == "CTA 2 of a cluster gets a from [2], and 2 share it"


@pytest.mark.parametrize(
    ("change", "pairs"), [(both(0, along_y=True), "[0, 1]"), (both(1, along_x=True), "[0, 2]")]
)
def test_readers_that_do_not_report_are_found(change: Change, pairs: str) -> None:
    """Of 2 x 2 CTAs three report to each; where an operand is not shared, two."""
    broken = change(kernel("multicast"))
    assert list(refusing(broken)) == ["_senders", "_progress"]
    assert refusing(broken)["_senders"] == f"CTA 0 loads for pairs {pairs}, and 3 report to it"


@pytest.mark.parametrize("stages", [2, 3])
def test_fewer_arrivals_than_a_barrier_counts_stop_the_ring(stages: int) -> None:
    """The load waits for stages that are never empty; more arrivals than it counts are no wait."""

    class Wrong(Kernel):
        senders = 4  # type: ignore[assignment]

    of = replace(kernel("multicast"), stages=stages)
    broken = Wrong(**{name: getattr(of, name) for name in of.__dataclass_fields__})
    assert refusing(of) == {}
    assert list(refusing(broken)) == ["_senders", "_progress"]
    assert "loads" in refusing(broken)["_progress"]
    assert "wait for ever" in refusing(broken)["_progress"]


def test_roles_that_wait_for_each_other_are_found() -> None:
    """Each arrives only when the other has; neither does."""
    first, second = simulate.Barrier(1), simulate.Barrier(1)

    def role(wait: simulate.Barrier, then: simulate.Barrier) -> simulate.Role:
        yield wait, 0
        then.arrive(1)

    assert simulate.stepped({"a": role(first, second), "b": role(second, first)}) == ["a", "b"]
    first.arrive(1)
    assert simulate.stepped({"a": role(first, second), "b": role(second, first)}) == []


def test_a_barrier_s_phase_ends_with_the_last_arrival() -> None:
    """`try_wait.parity` of the phase before the first one succeeds."""
    barrier = simulate.Barrier(3)
    assert barrier.done(1)
    barrier.arrive(2)
    assert not barrier.done(0)
    barrier.arrive(2)
    assert barrier.done(0)
    assert not barrier.done(1)
    barrier.arrive(2)
    assert barrier.done(1)


@pytest.mark.parametrize("k", [64, 96, 128, 448, 512, 544])
def test_no_mma_is_beyond_k(k: int) -> None:
    """A tile has as many stages as K begins, and the last one as many MMAs; padding has none."""
    of = harness.kernel(harness.plan(k=k, block_k=256))
    last = of.whole if of.last is None else of.last
    assert of.k_stages == -(-k // 256)
    assert len(of.whole.multiplies) == 4
    assert len(last.multiplies) == -(-(k - 256 * (of.k_stages - 1)) // 64)
    assert len(last.copies) == 2 * len(last.multiplies)


@pytest.mark.parametrize(("k", "split"), [(640, 3), (896, 4), (512, 2), (384, 3)])
def test_ctas_divide_the_stages_of_k(k: int, split: int) -> None:
    """Each stage is one CTA's, and no CTA has two more than another."""
    of = harness.kernel(harness.plan(k=k, split_k=split, acc_stages=1))
    first, last = re.findall(r"k_first = (.*), k_last = (.*);", emit(of, "gemm"))[0]
    ranges = [
        range(
            *(eval(text.replace("/", "//"), {"rank": rank, "int": int}) for text in (first, last))
        )
        for rank in range(split)
    ]
    assert [stage for each in ranges for stage in each] == [*range(of.k_stages)]
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


# ---- Before there is a kernel -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "count", "said"),
    [
        (({0, 64, 128}, {0, 16}), 6, None),
        (({0, 64, 192}, {0}), 3, r"parts of S begin at \[0, 64, 192\], each 64 long"),
        (({64, 128}, {0}), 2, r"begin at \[64, 128\]"),
        (({0, 32}, {0, 16}), 4, r"begin at \[0, 32\]"),
        (({0, 64}, {0, 16}), 2, r"do not fill a box of \[128, 32\]"),
    ],
)
def test_what_a_block_fills_in_a_stage_is_a_box(parts: Any, count: int, said: str | None) -> None:
    """Parts adjoin from the first on, and there are as many as fill it."""
    site: Any = SimpleNamespace(where="block 'codes'")
    operand: Any = SimpleNamespace(shape=(64, 16), buffer=SimpleNamespace(name="S"))
    if said is None:
        assert read.box(site, operand, parts, count) == (192, 32)
        return
    with pytest.raises(LoweringError, match=f"block 'codes'.*{said}"):
        read.box(site, operand, parts, count)
