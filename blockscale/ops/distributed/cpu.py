"""Rows between the ranks of a group of CPUs: the same numbers as on GPUs, by torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from blockscale.ops import call
from blockscale.ops.checks import dtype_name
from blockscale.ops.distributed.config import WHERE, Config
from blockscale.ops.quant import quantize
from blockscale.specs.exchange import OWNER_BITS, EpReduce
from blockscale.specs.plans.coded import CodedRow

Tensor = torch.Tensor


class Sent(NamedTuple):
    """What a rank keeps of its tokens until their results come back.

    Attributes:
        to: [T, k] the rank of each slot; -1: dropped.
        landed_ids, landed_weights: [n, k] the own experts of the rows that came; the weights of
            their slots.
        came: of each source, how many rows.
    """

    to: Tensor
    landed_ids: Tensor
    landed_weights: Tensor
    came: list[int]


E4M3_MAX = 448.0

GONE = -1
"""In place of the tokens of a rank: it has given up."""


def coded(x: Tensor, row: CodedRow, a1_scale: Tensor | None) -> Tensor:
    """Return x [T, H] as coded rows [T, bytes]: the bytes that the kernels of GPUs make."""
    rows = torch.zeros((len(x), row.bytes), dtype=torch.uint8, device=x.device)
    if not len(x):
        return rows
    if row.act_fmt == "nvfp4":
        codes, scales = quantize(x, "nvfp4", a1_scale)
    else:
        most = torch.full((1,), E4M3_MAX, device=x.device)  # by a number torch multiplies on GPUs
        scales = x.float().abs().amax(1, keepdim=True) / most
        ratio = torch.where(scales == 0, 0, x.float() / scales)
        ratio = ratio.clamp(-E4M3_MAX, E4M3_MAX)  # torch does not promise to saturate
        codes = ratio.to(torch.float8_e4m3fn)
    rows[:, : row.codes] = codes.view(torch.uint8)
    rows[:, row.codes : row.codes + row.scales] = scales.view(torch.uint8)
    return rows


class Exchange:
    """One rank's part: `send`, `bring_back`.

    Attributes:
        step: what this rank has come to last.
        words: what is under way of a rank that has given up.
    """

    def __init__(self, config: Config, rank: int, group: Any, timeout: float) -> None:
        self.config, self.rank, self.group = config, rank, group
        self.timeout = timedelta(seconds=timeout)
        self.owner = config.owner_table()
        self.others = [r for r in range(config.ranks) if r != rank]
        self.epoch, self.step = 0, ""
        self.words: list[Any] = []

    def send(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        bound: int,
        a1_scale: Tensor | None = None,
    ) -> tuple[Tensor, Sent]:
        """Return rows that came, [n, H], or coded ones [n, bytes], and what is kept."""
        self.epoch += 1
        tokens = self._meet("dispatch", len(x), bound)
        for rank, count in enumerate(tokens):
            if count > bound:
                raise ValueError(
                    f"{WHERE}.dispatch: rank {rank} has {count} tokens, but the bound is {bound}; "
                    "pass fewer at a time, or set a larger bound on all ranks"
                )
        given = x if self.config.row is None else coded(x, self.config.row, a1_scale)
        place = self._places(ids)
        to = torch.where(place < 0, -1, place >> OWNER_BITS)
        local = place & (1 << OWNER_BITS) - 1
        rows, mine, shares, counts = [], [], [], []
        for rank in range(self.config.ranks):
            there = to == rank
            picked = there.any(1)
            rows.append(given[picked])
            mine.append(torch.where(there, local, -1)[picked].to(torch.int32))
            shares.append(weights[picked])
            counts.append(int(picked.sum()))
        came = self._swap_counts(counts)
        landed = self._swap(torch.cat(rows), counts, came)
        landed_ids = self._swap(torch.cat(mine), counts, came)
        landed_weights = self._swap(torch.cat(shares), counts, came)
        return landed, Sent(to, landed_ids, landed_weights, came)

    def bring_back(
        self, y: Tensor, sent: Sent, ids: Tensor, weights: Tensor, out: Tensor
    ) -> Tensor:
        """Return out [T, H], the sums of the slots' results y [n, k, H] of all ranks."""
        self._meet("combine", len(ids), 0)
        if self.config.sums:
            return self._sums(y, sent, out)
        ours = sent.landed_ids >= 0
        back = [int(part.sum()) for part in ours.split(sent.came)]
        slots = y.new_empty((*ids.shape, y.shape[-1]))
        counts = [int((sent.to == rank).sum()) for rank in range(self.config.ranks)]
        results = self._swap(y[ours], back, counts)
        for rank, part in enumerate(results.split(counts)):
            slots[sent.to == rank] = part
        self._add(slots, ids, weights, out)
        return out

    def _sums(self, y: Tensor, sent: Sent, out: Tensor) -> Tensor:
        """Return out [T, H]: the sum over ranks of what each has added up of a token."""
        own = y.new_empty((len(y), y.shape[-1]))
        self._add(y, sent.landed_ids, sent.landed_weights, own)
        there = [(sent.to == rank).any(1) for rank in range(self.config.ranks)]
        counts = [int(rows.sum()) for rows in there]
        total = torch.zeros((len(out), y.shape[-1]))
        for rows, part in zip(there, self._swap(own, sent.came, counts).split(counts), strict=True):
            total[rows] += part.float()
        return out.copy_(total)

    def _add(self, slots: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """Put the sums of slots [T, k, H] with valid ids, weighted, into out [T, H]."""
        c = self.config
        if len(ids):
            spec = EpReduce(c.experts, c.top_k, c.hidden, dtype_name(slots.dtype))
            call.kernel(spec, slots.device).call(slots, ids, weights, out)

    def _places(self, ids: Tensor) -> Tensor:
        """Return entries of the owner table [T, k]; -1 where an id is none of an expert."""
        replica = (torch.arange(len(ids)) + self.rank) % self.owner.shape[1]
        inside = (ids >= 0) & (ids < self.config.experts)
        found = self.owner[torch.where(inside, ids, 0).long(), replica[:, None]].long()
        return torch.where(inside, found, -1)

    def _meet(self, step: str, tokens: int, bound: int) -> list[int]:
        """Return the tokens of each rank; RuntimeError names one that does not come in time."""
        self.step = step
        own = torch.tensor([self.epoch, tokens, bound])
        cells = [torch.empty_like(own) for _ in range(self.config.ranks)]
        self._trade([own] * self.config.ranks, cells)
        for rank, cell in enumerate(cells):
            if int(cell[1]) == GONE:
                raise RuntimeError(
                    f"{WHERE}.{step}: rank {rank} is why call {self.epoch} was given up (seen by "
                    f"rank {self.rank}); see what it said, and start the group anew"
                )
            if int(cell[2]) != bound:
                raise ValueError(
                    f"{WHERE}.{step}: rank {rank} has bound={int(cell[2])}, but rank {self.rank} "
                    f"has {bound}; set the same on all ranks"
                )
        return [int(cell[1]) for cell in cells]

    def give_up(self, step: str) -> None:
        """Let ranks that are to meet this one in ``step`` know that it does not come."""
        if self.step == step:  # it has come, and they see for themselves
            return
        cell = torch.tensor([self.epoch, GONE, 0])
        for rank in self.others:  # what they say is read, or they would wait until it is
            self.words.append(dist.isend(cell, group=self.group, group_dst=rank))
            unread = torch.empty_like(cell)
            self.words.append(dist.irecv(unread, group=self.group, group_src=rank))

    def _swap_counts(self, counts: list[int]) -> list[int]:
        came = torch.empty(len(counts), dtype=torch.int64)
        self._trade(torch.tensor(counts).split(1), came.split(1))
        return [int(count) for count in came]

    def _swap(self, rows: Tensor, counts: list[int], came: list[int]) -> Tensor:
        """Return the rows that other ranks have for this one, by rank."""
        flat = rows.contiguous().view(torch.uint8)
        landed = flat.new_empty((sum(came), *flat.shape[1:]))
        self._trade(flat.split(counts), landed.split(came))
        return landed.view(rows.dtype)

    def _trade(self, given: Sequence[Tensor], landed: Sequence[Tensor]) -> None:
        """Send each rank what is given, and fill what lands from it, whose size is known.

        RuntimeError names a rank that does not come in time, or whose process ends.
        """
        landed[self.rank].copy_(given[self.rank])
        blamed = self.rank
        ended, sends, waits = [], [], []
        for rank in self.others:  # those behind one that has ended get what they wait for
            try:
                if given[rank].numel():
                    work = dist.isend(given[rank], group=self.group, group_dst=rank)
                    sends.append((rank, work))
                if landed[rank].numel():
                    work = dist.irecv(landed[rank], group=self.group, group_src=rank)
                    waits.append((rank, work))
            except RuntimeError as error:
                ended.append((rank, error))
        try:
            for blamed, why in ended:  # noqa: B007 - kept for the error
                raise why
            for blamed, work in waits + sends:  # noqa: B007
                if work is not None:
                    work.wait(self.timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"{WHERE}.{self.step}: rank {blamed} did not come to call {self.epoch} within "
                f"{self.timeout.total_seconds():g} s (seen by rank {self.rank}); see what it said, "
                "and start the group anew"
            ) from error
