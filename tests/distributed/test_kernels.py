"""Dispatch and combine on emulated GPUs, of 1 to 4 ranks, against NumPy; races are failures.

The library is the one that `blockscale.build` makes, host code included; every rank has memory of
its own, and the seed decides which rank runs when.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from blockscale import emulator
from blockscale.catalog import exchange
from blockscale.specs import EpCombine, EpDispatch
from blockscale.specs.exchange import (
    CODES,
    FRAME,
    STATE,
    STATUS,
    STEPS,
    row_bytes,
    symmetric,
    symmetric_bytes,
)
from tests.kit.gpu_library import library
from tests.kit.pairwise import exhaustive, those
from tests.reference import moe as moe

ARCH, HIDDEN, EXPERTS = "sm_90a", 24, 6
BF16 = np.dtype(ml_dtypes.bfloat16)
TIMEOUT = 2_000_000_000
"""Nanoseconds of the emulator's clock: none is reached where all ranks come."""


CODED_HIDDEN = 96
"""Elements of coded rows: of nvfp4, 48 bytes of codes, 6 of scales and 10 of padding."""

A1_SCALE = 0.013


def few_ctas(monkeypatch):
    """Let each CTA have several of few rows; return what was changed, for `library`."""
    changed = {"SMS": 2, "MANY": 3, "WAITING": 2}
    for name, count in changed.items():
        monkeypatch.setattr(exchange, name, count)
    return str(changed)


def specs(ranks, act_fmt=None, hidden=HIDDEN, dtype="bfloat16", sums=False, top_k=2):
    sizes = ranks, EXPERTS, top_k, hidden, dtype
    return [EpDispatch(*sizes, act_fmt=act_fmt), EpCombine(*sizes, sums=sums)]


@dataclass
class Rank:
    """One emulated rank's tensors."""

    buffer: np.ndarray
    state: np.ndarray
    status: np.ndarray
    owner: np.ndarray
    frames: dict


class Group:
    """Ranks with symmetric buffers, and the layer that they compute: y = (expert + 1) * x."""

    def __init__(
        self,
        ranks,
        capacity,
        seed=0,
        owners=None,
        timeout=TIMEOUT,
        act_fmt=None,
        hidden=HIDDEN,
        dtype="bfloat16",
        built=None,
        sums=False,
        top_k=2,
        changed="",
    ):
        own = specs(ranks, act_fmt, hidden, dtype, sums, top_k)
        path = library(built or own, ARCH, changed)
        self.world = emulator.LibraryWorld(path, ranks, target=ARCH, seed=seed, multiprocessors=4)
        self.n, self.capacity, self.k = ranks, capacity, top_k
        self.act_fmt, self.hidden, self.dtype = act_fmt, hidden, np.dtype(dtype)
        self.sums = sums
        self.names = [spec.name for spec in own]
        padding = {"nvfp4": -(hidden // 2 + hidden // 16) % 16}.get(act_fmt, 0)
        self.sent = row_bytes(hidden, act_fmt) - padding
        self.parts = symmetric(ranks, capacity, self.k, hidden, act_fmt, sums)
        size = symmetric_bytes(ranks, capacity, self.k, hidden, act_fmt, sums)
        each = EXPERTS // ranks if EXPERTS % ranks == 0 else None
        self.owners = owners or [
            [e for e in range(EXPERTS) if (e // each if each else e % ranks) == r]
            for r in range(ranks)
        ]
        places = [[] for _ in range(EXPERTS)]
        for rank, own in enumerate(self.owners):
            for local, expert in enumerate(own):
                places[expert].append((rank, local))
        most = max(map(len, places))
        self.places = [[own[i % len(own)] for i in range(most)] for own in places]
        table = np.array([[r << 16 | e for r, e in own] for own in self.places], np.int32)
        self.ranks = []
        for r in range(ranks):
            new = self.world.tensor
            buffer = new(r, np.zeros(size, np.uint8), "buffer")
            at, ids = self.parts["ids"]  # nobody may rely on what is not sent: an expert, or NaN
            buffer[at : at + ids], buffer[at + ids :] = 0, 0xFF
            state = new(r, np.zeros(len(STATE), np.int32), "state")
            status = new(r, np.zeros(len(STATUS), np.int64), "status")
            self.ranks.append(Rank(buffer, state, status, new(r, table, "owner"), {}))
        self.timeout = timeout

    def frame(self, r, bound):
        own = self.ranks[r]
        if bound not in own.frames:
            said = {"rank": r, "bound": bound, "timeout": self.timeout}
            said["status"] = self.world.address(own.status)
            said |= {name: at for name, (at, _) in self.parts.items()}
            peers = [self.world.address(rank.buffer) for rank in self.ranks]
            values = np.array([said[name] for name in FRAME] + peers, np.int64)
            own.frames[bound] = self.world.tensor(r, values, "frame")
        return own.frames[bound]

    def part(self, r, name, dtype, *shape):
        at, _ = self.parts[name]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.ranks[r].buffer[at : at + size].view(dtype).reshape(shape)

    def dispatch(self, given, bounds, races=False):
        for r, (x, ids, weights) in enumerate(given):
            if x is None:
                continue
            own = self.ranks[r]
            landed = self.part(r, "ids", np.int32, self.n * bounds[r], self.k)
            rows = zip(padded(x, ids, weights), ("x", "ids", "weights"), strict=True)
            x, ids, weights = (self.world.tensor(r, value, name) for value, name in rows)
            scale = self.world.tensor(r, np.full(1, A1_SCALE, np.float32), "scale")
            given = (x, scale) if self.act_fmt == "nvfp4" else (x,)
            frame = self.frame(r, bounds[r])
            group = own.owner, frame, own.state
            self.world.call(r, self.names[0], *given, ids, weights, *group, landed)
        reports = self.world.run()
        if not races:
            self.check(reports)

    def combine(self, given, bounds, results):
        outs = []
        for r, rows in enumerate(given):
            x, ids, weights = padded(*rows)
            own, new = self.ranks[r], self.world.tensor
            landed = self.part(r, "ids", np.int32, self.n * bounds[r], self.k)
            most = self.capacity * (self.n if self.sums else self.k)
            slots = self.part(r, "slots", self.dtype, most, self.hidden)
            out = new(r, np.full(x.shape, np.nan, self.dtype), "out")
            choice = new(r, ids, "ids"), new(r, weights, "weights")
            if self.sums:
                came = self.part(r, "weights", np.float32, self.n * bounds[r], self.k)
                choice = came, choice[0], own.owner
            y = new(r, results[r], "y")
            frame = self.frame(r, bounds[r])
            self.world.call(r, self.names[1], y, landed, *choice, slots, frame, own.state, out)
            outs.append(out[: len(rows[0])])
        self.check(self.world.run())
        return outs

    @staticmethod
    def check(reports):
        for report in (report for own in reports for report in own):
            report.check()


def padded(x, ids, weights):
    """Return one row that goes nowhere in place of none, as `distributed.cuda` does."""
    if len(x):
        return x, ids, weights
    return (
        np.zeros((1, x.shape[1]), x.dtype),
        np.full((1, ids.shape[1]), -1, np.int32),
        np.zeros((1, ids.shape[1]), np.float32),
    )


def coded(x, act_fmt):
    """Return the bytes that rows are sent as."""
    if act_fmt is None:
        return np.ascontiguousarray(x).view(np.uint8)
    return moe.coded_rows(x.astype(np.float32), act_fmt, A1_SCALE)


def decoded(rows, act_fmt, hidden, dtype=BF16):
    """Return the numbers of rows as bytes, rounded to ``dtype``."""
    if act_fmt is None:
        return rows.view(dtype)
    return moe.decoded_rows(rows, act_fmt, hidden, A1_SCALE).astype(dtype)


def routing(seed, ranks, bound, top_k=2, none=(), hidden=HIDDEN):
    made = np.random.default_rng(seed)
    given = []
    for r in range(ranks):
        count = 0 if r in none else int(made.integers(0, bound + 1))
        x = made.standard_normal((count, hidden)) * made.choice(
            [0, 2.0**-12, 1, 2.0**12], (count, 1)
        )
        x = x.astype(BF16)  # rows of zeros, and of what nvfp4 with a static scale cannot hold
        ids = np.stack([made.permutation(EXPERTS + 1)[:top_k] for _ in range(count)] or
                       [np.zeros(top_k, int)])[:count].astype(np.int32)  # fmt: skip
        ids = np.where(ids == EXPERTS, made.choice([-1, EXPERTS, 1 << 20]), ids).astype(np.int32)
        given.append((x, ids, made.random((count, top_k)).astype(np.float32)))
    return given


def expert(e, x):
    return ((e + 1) * x.astype(np.float32)).astype(x.dtype)


def landed_truth(group, given, bound):
    """Return ids [ranks, ranks * bound, k] and the rows that have to be there, by (rank, row)."""
    ids = np.full((group.n, group.n * bound, group.k), -1, np.int32)
    rows = {}
    for source, (x, chosen, _) in enumerate(given):
        for t in range(len(x)):
            for j in range(group.k):
                e = chosen[t, j]
                if 0 <= e < EXPERTS:
                    places = group.places[e]
                    rank, local = places[(t + source) % len(places)]
                    ids[rank, source * bound + t, j] = local
                    rows[rank, source * bound + t] = x[t]
    return ids, rows


def sums(given, act_fmt=None, owners=None):
    """Return the float32 sums, one rounding a step (a fused multiply-add), rounded to 16 bits.

    ``owners``: the experts of each rank, if each rounds its sum before these are added up.
    """
    found = []
    for source, (x, ids, weights) in enumerate(given):
        x = decoded(coded(x, act_fmt), act_fmt, x.shape[1], x.dtype)
        ranks = len(owners) if owners else 1
        total = np.zeros((ranks, *x.shape), np.float32)
        for t, j in np.ndindex(*ids.shape):
            if 0 <= ids[t, j] < EXPERTS:
                places = [r for r in range(ranks) if not owners or ids[t, j] in owners[r]]
                r = places[(t + source) % len(places)]
                z = expert(ids[t, j], x[t]).astype(np.float64)
                total[r, t] = (np.float64(weights[t, j]) * z + total[r, t]).astype(np.float32)
        rounded = total.astype(x.dtype)
        if owners:
            rounded = rounded.astype(np.float32)
            rounded = np.add.accumulate(rounded, dtype=np.float32)[-1:].astype(x.dtype)
        found.append(rounded[0])
    return found


def one_call(group, given, bound):
    bounds = [bound] * group.n
    group.dispatch(given, bounds)
    ids, rows = landed_truth(group, given, bound)
    results = []
    for r in range(group.n):
        landed = group.part(r, "ids", np.int32, group.n * bound, group.k)
        assert (landed == ids[r]).all()
        size = row_bytes(group.hidden, group.act_fmt)
        came = group.part(r, "rows", np.uint8, group.n * bound, size)
        hidden = decoded(came, group.act_fmt, group.hidden, group.dtype)
        y = np.full((*landed.shape, group.hidden), np.nan, group.dtype)
        for i, j in np.ndindex(*landed.shape):
            if landed[i, j] >= 0:
                truth = coded(rows[r, i][None], group.act_fmt)[0]
                assert (came[i] == truth)[: group.sent].all()
                y[i, j] = expert(group.owners[r][landed[i, j]], hidden[i])
        results.append(y)
    sent_back = group.combine(given, bounds, results)
    truths = sums(given, group.act_fmt, group.owners if group.sums else None)
    for out, truth in zip(sent_back, truths, strict=True):
        assert (out.view(np.uint16) == truth.view(np.uint16)).all()


@those(
    lambda ranks, sums: (ranks, sums) in ((2, False), (3, True)),
    ranks=[1, 2, 3, 4],
    sums=[False, True],
)
def test_rows_go_and_come_back(ranks, sums):
    group = Group(ranks, capacity=3, seed=ranks, sums=sums)
    for call, none in enumerate(((0,), (ranks - 1,), ())):  # epochs 1 to 3
        bound = 3 - call % 2
        one_call(group, routing(10 * ranks + call, ranks, bound, none=none), bound)


@pytest.mark.always
@those(lambda bound, sums: sums == (bound > 3), bound=[3, 40], sums=[False, True])
def test_many_rows(bound, sums, monkeypatch):
    """CTAs have several rows, with more slots than are loaded together; two kernels return many."""
    built = [*dict.fromkeys(specs(2, top_k=9) + specs(2, top_k=9, sums=True))]
    form = {"sums": sums, "top_k": 9, "built": built, "changed": few_ctas(monkeypatch)}
    group, made = Group(2, capacity=bound, seed=9, **form), np.random.default_rng(90)
    given = []
    for n in (bound, 2):
        x = made.standard_normal((n, HIDDEN)).astype(BF16)
        ids = made.integers(-1, EXPERTS + 1, (n, 9), np.int32)  # some twice
        given.append((x, ids, made.random((n, 9), np.float32)))
    one_call(group, given, bound)


@those(
    lambda ranks, act_fmt: (ranks, act_fmt) in ((2, "nvfp4"), (3, "fp8")),
    ranks=[1, 2, 3, 4],
    act_fmt=["nvfp4", "fp8"],
)
def test_coded_rows(act_fmt, ranks):
    """Quantised on the way, byte for byte; what their numbers make comes back."""
    form = {"act_fmt": act_fmt, "hidden": CODED_HIDDEN}
    group = Group(ranks, capacity=3, seed=20 + ranks, **form)
    for call, none in enumerate(((), (ranks - 1,))):
        bound = 3 - call
        given = routing(20 * ranks + call, ranks, bound, none=none, hidden=CODED_HIDDEN)
        one_call(group, given, bound)


@pytest.mark.parametrize(("act_fmt", "hidden"), [("fp8", 8208), ("nvfp4", 16416)])
def test_threads_with_several_pieces_of_a_row(act_fmt, hidden):
    """float16; one piece more than threads; the largest element in the last, and in the middle."""
    forms = (("fp8", 8208, "float16"), ("nvfp4", 16416, "float16"))
    built = [spec for form in forms for spec in specs(1, *form)]
    form = {"act_fmt": act_fmt, "hidden": hidden, "dtype": "float16", "built": built}
    group = Group(1, capacity=2, **form)
    x = np.random.default_rng(hidden).standard_normal((2, hidden)).astype(np.float16)
    x[[0, 1], [-1, hidden // 2]] = 40
    one_call(group, [(x, np.array([[5, 0], [1, -1]], np.int32), np.ones((2, 2), np.float32))], 2)


@pytest.mark.parametrize("sums", [pytest.param(False, marks=exhaustive), True])
def test_an_expert_on_several_ranks_shares_its_tokens(sums):
    owners = [[5, 0, 1, 2], [3, 0, 4], [0, 5]]
    group = Group(3, capacity=3, seed=7, owners=owners, sums=sums)
    for call in range(3):
        one_call(group, routing(70 + call, 3, 3), bound=3)


@pytest.mark.always
@pytest.mark.parametrize(("step", "told"), [("dispatch", "timeout"), ("dispatch", "bound")])
def test_who_does_not_come_is_named_by_all(step, told):
    """A rank is missing, or has another bound: all others report it, and send nothing more."""
    group = Group(3, capacity=3, seed=5, timeout=2_000_000 if told == "timeout" else TIMEOUT)
    one_call(group, routing(1, 3, 3), bound=3)
    given, bounds = routing(2, 3, 2), [3, 3, 2]
    if told == "timeout":
        given[2], bounds[2] = (None, None, None), 3
    group.dispatch(given, bounds, races=told == "bound")  # rows of other bounds overlap
    for r in (0, 1):
        code, at, rank, epoch = group.ranks[r].status
        assert CODES[code] in (told, "gave_up")
        assert (STEPS[at], epoch) == (step, 2)
        assert rank == 2 or told == "bound"  # to rank 2 it is the others that have another one
        landed = group.part(r, "ids", np.int32, 3 * 3, 2)
        assert told == "bound" or (landed.reshape(3, 3, 2)[2] == -1).all()
        assert group.ranks[r].state[STATE.index("failed")] == 1
    if told == "timeout":
        before = group.ranks[2].buffer.copy()
        group.dispatch([*given[:2], routing(3, 3, 3)[2]], [3, 3, 3])  # it comes too late
        assert STEPS[group.ranks[2].status[1]] == step
        assert CODES[group.ranks[2].status[0]] == "gave_up"
        at, size = group.parts["rows"]
        own = slice(at + 2 * 3 * HIDDEN * 2, at + 3 * 3 * HIDDEN * 2)  # what it sends itself
        after = group.ranks[2].buffer.copy()
        after[own] = before[own]
        assert (after[at : at + size] == before[at : at + size]).all()
        cells = group.part(2, "cells", np.uint64, len(STEPS), 3)
        assert (cells[:, :2] >> np.uint64(32) == 0xFFFFFFFF).all()  # given up, not another call's
        rows = given[:2] + [(np.zeros((0, HIDDEN), BF16), np.zeros((0, 2), np.int32),
                             np.zeros((0, 2), np.float32))]  # fmt: skip
        y = [np.ones((9, 2, HIDDEN), BF16)] * 3
        assert all(np.isnan(out.astype(float)).all() for out in group.combine(rows, [3] * 3, y))
