"""Rows between GPUs: symmetric buffers, and the kernels that store into them; docs/ep.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from blockscale.ops import call
from blockscale.ops.distributed.config import WHERE, Config
from blockscale.runtime.library import generation, remembered
from blockscale.specs.exchange import (
    CODES,
    FRAME,
    STATE,
    STATUS,
    STEPS,
    EpCombine,
    EpDispatch,
    symmetric,
    symmetric_bytes,
)

Tensor = torch.Tensor

ABORTED = 0xFFFFFFFF
"""The epoch in a cell whose writer has given up (BS_EP_ABORTED of native/moe/moe_peers.cuh)."""


class Memory(NamedTuple):
    """A rank's symmetric buffer and those of all ranks, as bytes that this rank may write."""

    own: Tensor
    peers: Sequence[Tensor]
    handle: Any = None
    """What keeps the mapping of other ranks' memory."""


def symmetric_memory(config: Config, group: Any, device: torch.device) -> Memory:
    """Return zeroed buffers; all ranks call it."""
    size = symmetric_bytes(*config.sizes)
    if config.ranks == 1:
        own = torch.zeros(size, dtype=torch.uint8, device=device)
        return Memory(own, [own])
    import torch.distributed._symmetric_memory as symm

    own = symm.empty(size, dtype=torch.uint8, device=device)
    world = dist.group.WORLD if group is None else group
    assert world is not None
    handle = symm.rendezvous(own, world)
    own.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    peers = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(config.ranks)]
    return Memory(own, peers, handle)


class Exchange:
    """One rank's part: `send`, `bring_back`; nothing waits for the GPU.

    Attributes:
        status: what the kernels say of a failure, memory of the host that they write.
    """

    def __init__(self, config: Config, rank: int, memory: Memory, timeout: float) -> None:
        self.config, self.rank, self.memory, self.timeout = config, rank, memory, timeout
        device = memory.own.device
        self.owner = config.owner_table().to(device)
        self.state = torch.zeros(len(STATE), dtype=torch.int32, device=device)
        self.status = torch.zeros(len(STATUS), dtype=torch.int64).pin_memory()
        self._status = self.status.numpy()
        sizes = config.ranks, config.experts, config.top_k, config.hidden, config.dtype
        self.specs = (
            EpDispatch(*sizes, act_fmt=config.act_fmt),
            EpCombine(*sizes, sums=config.sums),
            EpCombine(*sizes, stored=not config.sums),
        )
        self._names = tuple(f"ep {spec.name}" for spec in self.specs)
        self.parts = symmetric(*config.sizes)
        self.frames: dict[int, Tensor] = {}
        self.places: dict[int, Tensor] = {}
        self.views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        row = torch.zeros((1, config.hidden), dtype=getattr(torch, config.dtype), device=device)
        dropped = torch.full((1, config.top_k), -1, dtype=torch.int32, device=device)
        self.nothing = row, dropped, dropped.float()
        at, size = self.parts["slots"]
        dtype = getattr(torch, config.dtype)
        self.slots = memory.own[at : at + size].view(dtype).view(-1, config.hidden)

    def _kernel(self, which: int) -> Any:
        """Return the function of `specs`, which loading a library may change."""
        found = remembered.get(self._names[which])
        if found is None:
            before = generation()
            found = call.kernel(self.specs[which], self.state.device)
            remembered[self._names[which]] = found
            if generation() != before:
                remembered.pop(self._names[which], None)
        return found

    def frame(self, bound: int) -> Tensor:
        """Return the table of the group for calls with this bound, made at the first of them."""
        if bound not in self.frames:
            said = {
                "rank": self.rank,
                "bound": bound,
                "timeout": int(self.timeout * 1e9),
                "status": self.status.data_ptr(),
                **{name: at for name, (at, _) in self.parts.items()},
            }
            peers = [peer.data_ptr() for peer in self.memory.peers]
            values = [said[name] for name in FRAME] + peers
            self.frames[bound] = torch.tensor(values, device=self.state.device)
        return self.frames[bound]

    def landed(self, bound: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the own buffer: rows [ranks * bound, H]; ids and weights [.., k].

        Coded rows are bytes, [ranks * bound, bytes].
        """
        found = self.views.get(bound)
        if found is None:
            c, count = self.config, self.config.ranks * bound

            def part(name: str, pitch: int, dtype: torch.dtype) -> Tensor:
                at, _ = self.parts[name]
                return self.memory.own[at : at + count * pitch].view(dtype).view(count, -1)

            dtype = torch.uint8 if c.row is not None else getattr(torch, c.dtype)
            found = self.views[bound] = (
                part("rows", c.row_bytes, dtype),
                part("ids", 4 * c.top_k, torch.int32),
                part("weights", 4 * c.top_k, torch.float32),
            )
        return found

    def send(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        bound: int,
        a1_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return rows that came and their ids [ranks * bound, k], as `landed`."""
        self.check()
        if len(x) > bound:
            raise ValueError(
                f"{WHERE}.dispatch: rank {self.rank} has {len(x)} tokens, but the bound is "
                f"{bound}; pass fewer at a time, or set a larger bound on all ranks"
            )
        if not len(x):  # kernels take no empty tensors: a row that goes nowhere
            x, ids, weights = self.nothing
        rows, landed_ids, _ = self.landed(bound)
        flags = call.launch_flags(True)
        given = (x, a1_scale) if self.config.act_fmt == "nvfp4" else (x,)
        group = self.owner, self.frame(bound), self.state
        self._kernel(0).call(*given, ids, weights, *group, landed_ids, *flags)
        return rows, landed_ids

    def bring_back(
        self, y: Tensor, landed_ids: Tensor, ids: Tensor, weights: Tensor, out: Tensor
    ) -> Tensor:
        """Return out [T, H], the sums of the slots' results y [ranks * bound, k, H]."""
        self.check()
        bound = len(y) // self.config.ranks
        frame = self.frame(bound)
        flags = call.launch_flags(True)
        to = out
        if not len(out):
            row, ids, weights = self.nothing
            to = torch.empty_like(row)
        chosen: tuple[Tensor, ...] = (ids, weights)
        if self.config.sums:
            chosen = (self.landed(bound)[2], ids, self.owner)
        group = self.slots, frame, self.state
        self._kernel(1).call(y, landed_ids, *chosen, *group, to, *flags)
        return out

    def addresses(self, bound: int) -> Tensor:
        """Return [ranks * bound, k] int64: where the result of each slot that comes belongs.

        Made at the first call with this bound; not with `Config.sums`.
        """
        if bound not in self.places:
            c = self.config
            at, _ = self.parts["slots"]
            first = torch.tensor([peer.data_ptr() + at for peer in self.memory.peers])
            row = torch.arange(bound * c.top_k) * (2 * c.hidden)
            found = (first[:, None] + row).view(-1, c.top_k)
            self.places[bound] = found.to(self.state.device)
        return self.places[bound]

    def collect(self, ids: Tensor, weights: Tensor, bound: int, out: Tensor) -> Tensor:
        """Return out [T, H] as `bring_back`, of results stored at `addresses` of all ranks."""
        self.check()
        to = out
        if not len(out):
            row, ids, weights = self.nothing
            to = torch.empty_like(row)
        group = self.slots, self.frame(bound), self.state
        self._kernel(2).call(ids, weights, *group, to, *call.launch_flags(True))
        return out

    def give_up(self, step: str) -> None:
        """Let the other ranks know that this one does not come to ``step``, unless they do."""
        if self._status[STATUS.index("code")]:
            return
        value = ABORTED << 32 | STEPS.index(step) << 16 | self.rank
        value -= 1 << 64  # as a signed number
        at, size = self.parts["cells"]
        for peer in self.memory.peers:
            cells = peer[at : at + size].view(torch.int64).view(len(STEPS), self.config.ranks)
            cells[:, self.rank].fill_(value)
        self.state[STATE.index("failed")] = 1

    def check(self) -> None:
        """RuntimeError with rank and step if a kernel has said that a call failed."""
        code, step, rank, epoch = (int(value) for value in self._status)
        if not code:
            return
        how = {
            "timeout": f"did not come to call {epoch} within {self.timeout:g} s",
            "gave_up": f"is why call {epoch} was given up by another rank",
            "bound": f"has another bound in call {epoch}",
        }[CODES[code]]
        raise RuntimeError(
            f"{WHERE}.{STEPS[step]}: rank {rank} {how} (seen by rank {self.rank}); see what it "
            "said, and start the group anew"
        )
