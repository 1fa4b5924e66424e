"""The class that runs on GPUs, over emulated ones: torch tensors of the CPU are their memory."""

import numpy as np
import pytest
import torch

from blockscale import emulator
from blockscale.ops.distributed import cuda
from blockscale.ops.distributed.config import Config, owners_of
from blockscale.specs.exchange import STATE, symmetric_bytes
from tests.distributed import test_kernels as kernels
from tests.kit.gpu_library import library
from tests.kit.pairwise import few

MOST = 3


class Kernel:
    """Stands in for a kernel of a loaded library: its launches wait until all ranks have called."""

    def __init__(self, ranks, name):
        self.ranks, self.name = ranks, name

    def call(self, *args):
        self.ranks.call(self.name, args)


class Ranks:
    """Ranks of one group, of the class itself."""

    def __init__(self, monkeypatch, count, timeout=2.0, dispatch="bf16"):
        coded = dispatch != "bf16"
        built = [*kernels.CODED.values()] if coded else kernels.ALL
        hidden = kernels.CODED_HIDDEN if coded else kernels.HIDDEN
        self.world = emulator.LibraryWorld(
            library(built, kernels.ARCH), count, target=kernels.ARCH, multiprocessors=4
        )
        self.mine, self.now, self.spans = [], 0, []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        monkeypatch.setattr(cuda.call, "kernel", lambda spec, device: Kernel(self, spec.name))
        monkeypatch.setattr(cuda.call, "launch_flags", lambda on: ())
        config = Config(
            *(count, kernels.EXPERTS, hidden, 2, MOST, dispatch, "bfloat16", "cuda"),
            owners_of(count, kernels.EXPERTS, None),
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
            if tensor is None:
                given.append(None)
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


def rows_of(given):
    x, ids, weights = given
    bits = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return bits, torch.from_numpy(ids), torch.from_numpy(weights)


@pytest.mark.parametrize("dispatch", few(["nvfp4", "bf16", "fp8"], every=3))
def test_calls_in_a_row(monkeypatch, dispatch):
    ranks = Ranks(monkeypatch, 2, dispatch=dispatch)
    form = None if dispatch == "bf16" else dispatch
    hidden = kernels.HIDDEN if form is None else kernels.CODED_HIDDEN
    scale = torch.tensor([kernels.A1_SCALE]) if dispatch == "nvfp4" else None
    for call, bound in enumerate((3, 2, 3)):
        numbers = kernels.routing(40 + call, 2, bound, none=(call,), hidden=hidden)
        given = [rows_of(own) for own in numbers]
        came = ranks.all(lambda r, own, given=given, b=bound: own.send(*given[r][:2], b, scale))
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
        for out, truth in zip(outs, kernels.sums(numbers, form), strict=True):
            assert (out.view(torch.int16).numpy() == truth.view(np.int16)).all()
        for own in ranks.ranks:
            own.check()


def test_too_many_tokens_end_the_call_on_all_ranks(monkeypatch):
    ranks = Ranks(monkeypatch, 2)
    given = [rows_of(own) for own in kernels.routing(2, 2, 3)]
    x = torch.zeros(MOST + 1, kernels.HIDDEN, dtype=torch.bfloat16)

    def send(r, own):
        if r == 0:
            return own.send(*given[r][:2], MOST)
        with pytest.raises(ValueError, match="rank 1 has 4 tokens, but the bound is 3"):
            own.send(x, torch.zeros(MOST + 1, 2, dtype=torch.int32), MOST)
        return None

    ranks.all(send)
    said = r"ExpertParallel.dispatch: rank 1 is why call 1 was given up .*\(seen by rank 0\)"
    with pytest.raises(RuntimeError, match=said):
        ranks.ranks[0].send(*given[0][:2], MOST)
    assert ranks.ranks[1].state[STATE.index("failed")] == 1


def test_a_rank_that_does_not_come(monkeypatch):
    ranks = Ranks(monkeypatch, 2, timeout=3e-4)  # of the emulator's clock
    given = rows_of(kernels.routing(3, 2, 3)[0])
    ranks.all(lambda r, own: own.send(*given[:2], MOST) if r == 0 else None)
    with pytest.raises(RuntimeError, match=r"rank 1 did not come to call 1 within 0.0003 s"):
        ranks.ranks[0].check()
