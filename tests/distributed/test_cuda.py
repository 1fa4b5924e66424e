"""The class that runs on GPUs, over emulated ones: torch tensors of the CPU are their memory."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blockscale import emulator, prepare_moe_weights
from blockscale.catalog import moe as catalog_moe
from blockscale.ops.distributed import ExpertParallel, cuda
from blockscale.ops.distributed.config import Config, owners_of
from blockscale.runtime import library as runtime
from blockscale.specs import EpCombine, FusedMoe
from blockscale.specs.exchange import STATE, symmetric_bytes
from blockscale.specs.plans.launches import CHUNK
from tests.distributed import test_kernels as kernels
from tests.kit.gpu_library import library
from tests.kit.pairwise import exhaustive, few

MOST = 3


class Kernel:
    """Stands in for a kernel of a loaded library: its launches wait until all ranks have called."""

    def __init__(self, ranks, name):
        self.ranks, self.name = ranks, name

    def call(self, *args):
        self.ranks.call(self.name, args)


class Ranks:
    """Ranks of one group, of the class itself."""

    def __init__(
        self, monkeypatch, count, timeout=2.0, dispatch="bf16", combine="slots", built=None,
        hidden=None, most=MOST, changed="",
    ):  # fmt: skip
        coded = dispatch != "bf16"
        hidden = hidden or (kernels.CODED_HIDDEN if coded else kernels.HIDDEN)
        act_fmt = dispatch if coded else None
        built = built or kernels.specs(count, act_fmt, hidden, sums=combine == "sums")
        self.world = emulator.LibraryWorld(
            library(built, kernels.ARCH, changed), count, target=kernels.ARCH, multiprocessors=4
        )
        self.mine, self.now, self.spans = [], 0, []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(cuda, "remembered", {})
        monkeypatch.setattr(cuda.call, "kernel", lambda spec, device: Kernel(self, spec.name))
        monkeypatch.setattr(cuda.call, "launch_flags", lambda on: ())
        config = Config(
            *(count, kernels.EXPERTS, hidden, 2, most, dispatch, "bfloat16", "cuda"),
            owners_of(count, kernels.EXPERTS, None),
            combine,
        )
        size = symmetric_bytes(*config.sizes)
        buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(count)]
        for rank, buffer in enumerate(buffers):
            self.adopt(rank, buffer)
        self.ranks = [
            cuda.Exchange(config, rank, cuda.Memory(buffers[rank], buffers), timeout)
            for rank in range(count)
        ]
        for rank, own in enumerate(self.ranks):
            self.adopt(rank, own.status)

    def adopt(self, rank, tensor):
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if not any(low <= begin and end <= high for low, high in self.spans):
            self.mine.append(tensor)  # it must live as long
            self.spans.append((begin, end))
            self.world.adopt(rank, tensor.reshape(-1).view(torch.uint8).numpy())

    def call(self, name, args):
        given = []
        for tensor in args:
            if not isinstance(tensor, torch.Tensor):
                given.append(tensor)
                continue
            self.adopt(self.now, tensor)
            bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
            array = bits.numpy()
            given.append(array.view(kernels.BF16) if tensor.dtype == torch.bfloat16 else array)
        self.world.call(self.now, name, *given)

    def all(self, function):
        """Return what ``function(rank, exchange)`` returns, after the kernels of all have run."""
        found = []
        for rank, own in enumerate(self.ranks):
            self.now = rank
            found.append(function(rank, own))
        kernels.Group.check(self.world.run())
        return found


WHOLE = FusedMoe(3, 128, 64, 2, layout="tiles64", slots=True)
"""Experts of a rank."""


BYTES = replace(WHOLE, fmt="mxfp4", group=32, act_fmt="fp8", layout="tiles64e")
"""The same, multiplied in 8 bits where tokens are many."""


def few_kernels(monkeypatch):
    """Let layers have a pair for few, some and many tokens; return what `kernels.few_ctas` does."""
    buckets = tuple(b for b in catalog_moe.MOE_BUCKETS if b.rows in (8, 96, 4096))
    monkeypatch.setattr(catalog_moe, "MOE_BUCKETS", buckets)
    return repr(buckets)


def experts(rank, spec):
    """Return weights of the experts of a rank."""
    made = torch.Generator().manual_seed(rank)
    scales, ones = (
        (40, 56),
        {"w13_global_scale": torch.ones(3, 2), "w2_global_scale": torch.ones(3)},
    )
    if spec.fmt == "mxfp4":
        scales, ones = (124, 130), {}

    def numbers(low, high, *shape):
        return torch.randint(low, high, (3, *shape), dtype=torch.uint8, generator=made)

    return prepare_moe_weights(
        numbers(0, 256, 128, 64), numbers(0, 256, 128, 32), fmt=spec.fmt,
        w13_scale=numbers(*scales, 128, 128 // spec.group),
        w2_scale=numbers(*scales, 128, 64 // spec.group), layout=spec.layout, **ones,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("plain", "bound"),
    [
        pytest.param(WHOLE, 3, id="few"),
        pytest.param(BYTES, 3, id="bytes", marks=exhaustive),
        pytest.param(WHOLE, 40, id="many", marks=exhaustive),
        pytest.param(BYTES, 40, id="many bytes", marks=exhaustive),
    ],
)
def test_results_stored_by_the_last_gemm(monkeypatch, plain, bound):
    """Those of the same experts that are given back: the same bits.

    Only kernels wait for other ranks: a run has two layers.
    """
    changed = kernels.few_ctas(monkeypatch) + few_kernels(monkeypatch)
    sent = replace(plain, sent=True)
    sizes = 2, kernels.EXPERTS, 2, plain.hidden
    built = [*kernels.specs(2, hidden=plain.hidden), EpCombine(*sizes, stored=True), plain, sent]
    ranks = Ranks(monkeypatch, 2, built=built, hidden=plain.hidden, most=bound, changed=changed)
    numbers = kernels.routing(60, 2, bound, hidden=plain.hidden)
    given = [rows_of([np.resize(part, (n, *part.shape[1:])) for part in own])
             for own, n in zip(numbers, (bound, 2), strict=True)]  # fmt: skip
    weights = [experts(rank, plain) for rank in range(2)]

    def layer(r, spec, rows, ids, to):
        workspace = torch.full((spec.workspace_bytes(len(rows)),), 0xFF, dtype=torch.uint8)
        ranks.call(spec.name, (rows, ids, *weights[r].passed, 1.0, 1e30, 0.5, to, workspace))

    def out(r):
        return torch.full_like(given[r][0], float("nan"))

    def given_back(r, own):
        rows, ids = own.send(*given[r], bound)
        y = torch.full((*ids.shape, plain.hidden), float("nan"), dtype=torch.bfloat16)
        layer(r, plain, rows, ids, y)
        return own.bring_back(y, ids, *given[r][1:], out(r))

    def stored(r, own):
        layer(r, sent, *own.send(*given[r], bound), own.addresses(bound))
        return own.collect(*given[r][1:], bound, out(r))

    found = ranks.all(lambda r, own: (given_back(r, own), stored(r, own)))
    for one, other in found:
        assert not one.isnan().any()
        assert torch.equal(one, other)


@exhaustive
def test_more_rows_than_a_pass(monkeypatch):
    """Results of slots, and those stored at addresses, behind the 8192 rows of the first pass."""
    sent, rows = replace(WHOLE, sent=True), CHUNK + 3
    changed = few_kernels(monkeypatch)
    ranks = Ranks(monkeypatch, 1, built=[WHOLE, sent], hidden=WHOLE.hidden, changed=changed)
    made = torch.Generator().manual_seed(5)
    x = torch.randn(rows, WHOLE.hidden, generator=made).bfloat16()
    ids, used = torch.full((rows, 2), -1, dtype=torch.int32), [0, 4000, CHUNK - 1, CHUNK, rows - 1]
    ids[used] = torch.tensor([[0, 1], [2, -1], [1, 0], [0, 2], [-1, 1]], dtype=torch.int32)
    weights, size = experts(0, WHOLE), WHOLE.workspace_bytes(CHUNK)
    results = [torch.full((rows, 2, WHOLE.hidden), float("nan")).bfloat16() for _ in range(2)]
    ranks.adopt(0, results[1])
    to = results[1].data_ptr() + torch.arange(2 * rows).view(rows, 2) * 2 * WHOLE.hidden
    for spec, out in ((WHOLE, results[0]), (sent, to)):
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
        ranks.call(spec.name, (x, ids, *weights.passed, 1.0, 1e30, 1e-3, out, workspace))
    kernels.Group.check(ranks.world.run())
    assert (~results[0].isnan().all(2)).equal(ids >= 0)
    assert torch.equal(*(result.view(torch.int16) for result in results))


def rows_of(given):
    x, ids, weights = given
    bits = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return bits, torch.from_numpy(ids), torch.from_numpy(weights)


@pytest.mark.parametrize(
    ("dispatch", "combine"),
    few([("bf16", "sums"), ("fp8", "slots"), ("nvfp4", "slots")], every=3),
)
def test_calls_in_a_row(monkeypatch, dispatch, combine):
    ranks = Ranks(monkeypatch, 2, dispatch=dispatch, combine=combine)
    form = None if dispatch == "bf16" else dispatch
    hidden = kernels.HIDDEN if form is None else kernels.CODED_HIDDEN
    scale = torch.tensor([kernels.A1_SCALE]) if dispatch == "nvfp4" else None
    for call, bound in enumerate((3, 2, 3)):
        numbers = kernels.routing(40 + call, 2, bound, none=(call,), hidden=hidden)
        given = [rows_of(own) for own in numbers]
        came = ranks.all(lambda r, own, given=given, b=bound: own.send(*given[r], b, scale))
        results = []
        for r, (rows, ids) in enumerate(came):
            if form is not None:
                made = kernels.decoded(rows.numpy(), form, hidden).view(np.int16)
                rows = torch.from_numpy(made).view(torch.bfloat16)
            whole = torch.where(ids >= 0, ids + 3 * r, 0)[..., None]
            results.append(((whole + 1).float() * rows[:, None].float()).bfloat16())
        outs = ranks.all(
            lambda r, own, given=given, came=came, y=results: own.bring_back(
                y[r], came[r][1], *given[r][1:], torch.full_like(given[r][0], float("nan"))
            )
        )
        owners = [(0, 1, 2), (3, 4, 5)] if combine == "sums" else None
        for out, truth in zip(outs, kernels.sums(numbers, form, owners), strict=True):
            assert (out.view(torch.int16).numpy() == truth.view(np.int16)).all()
        for own in ranks.ranks:
            own.check()


def step(own, *given):
    """Dispatch by the class of both kinds of devices."""
    return ExpertParallel._step(SimpleNamespace(_exchange=own), "dispatch", own.send, *given)


@pytest.mark.parametrize("count", [MOST, MOST + 1])
def test_a_rank_that_fails_ends_the_call_on_all(monkeypatch, count):
    """Too many tokens, or no kernel; who is told by another rank does not take the blame."""
    ranks = Ranks(monkeypatch, 2)
    given = [rows_of(own) for own in kernels.routing(2, 2, 3)]
    x = torch.zeros(count, kernels.HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(count, 2, dtype=torch.int32)

    def missing(which):
        raise ValueError("no kernel; rank 1 has 4 tokens, but the bound is 3")

    monkeypatch.setattr(ranks.ranks[1], "_kernel", missing)

    def send(r, own):
        if r == 0:
            return own.send(*given[r], MOST)
        with pytest.raises(ValueError, match="rank 1 has 4 tokens, but the bound is 3"):
            step(own, x, ids, ids.float(), MOST)
        return None

    ranks.all(send)
    before = ranks.ranks[1].memory.own.clone()
    said = r"ExpertParallel.dispatch: rank 1 is why call 1 was given up .*\(seen by rank 0\)"
    with pytest.raises(RuntimeError, match=said):
        step(ranks.ranks[0], *given[0], MOST)
    assert before.equal(ranks.ranks[1].memory.own)
    assert ranks.ranks[1].state[STATE.index("failed")] == 1


def test_a_rank_that_does_not_come(monkeypatch):
    ranks = Ranks(monkeypatch, 2, timeout=3e-4)  # of the emulator's clock
    given = rows_of(kernels.routing(3, 2, 3)[0])
    ranks.all(lambda r, own: own.send(*given, MOST) if r == 0 else None)
    with pytest.raises(RuntimeError, match=r"rank 1 did not come to call 1 within 0.0003 s"):
        ranks.ranks[0].check()


def test_a_library_that_is_loaded_while_a_kernel_is_looked_up(monkeypatch):
    """It forgets what is remembered before the old kernel would be."""
    monkeypatch.setattr(cuda, "remembered", {})
    monkeypatch.setattr(runtime, "_in_use", [])
    looked_up = []

    def kernel(spec, device):
        looked_up.append(spec)
        if len(looked_up) == 1:
            runtime._in_use.insert(0, None)
            cuda.remembered.clear()
        return len(looked_up)

    monkeypatch.setattr(cuda.call, "kernel", kernel)
    own = SimpleNamespace(_names=("ep",), specs=("ep",), state=torch.zeros(1))
    assert [cuda.Exchange._kernel(own, 0) for _ in range(3)] == [1, 2, 2]
