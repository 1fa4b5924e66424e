"""The cases of `bench.moe`: models, formats, tokens; their routing, bytes, FLOP and floors.

A case is gemm1 and gemm2 of one MoE layer for T tokens.  Its floor is the larger of the bytes that
have to move at `BYTES_A_US` and of the multiplications at `FLOP_A_US`, both measured on an H200.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from bench.measure import chosen
from blockscale.specs import FusedMoe

FORMAT = 1
GEMMS, LAYER = "ours", "ours, whole layer"

BYTES_A_US = 4.3e6
"""A copy's bytes a microsecond on an H200, read and written."""

FLOP_A_US = 790e6
"""FLOP a microsecond of a bf16 GEMM of 8192^3 on an H200, random data."""

TOKENS = (1, 8, 64, 512, 4096)
FORMATS = ("nvfp4", "mxfp4", "int4")
GROUP = {"nvfp4": 16, "mxfp4": 32, "int4": 128}
SCALE_BYTES = {"nvfp4": 1, "mxfp4": 1, "int4": 2}
BEST_PEER_DATE = "2026-11-20"


@dataclass(frozen=True)
class Model:
    """One MoE layer; ``hit``: experts that T = 1, 8, 64, 512, 4096 tokens are routed to.

    Numbers for 8 and 64 tokens are those behind the floors of the table of `BEST_PEER`, near what
    is expected of uniform random routing.
    """

    key: str
    title: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str
    hit: tuple[int, int, int, int, int]


_LAYERS = json.loads(Path(__file__).with_name("layers.json").read_text(encoding="utf-8"))

MODELS = {made["key"]: Model(**{**made, "hit": tuple(made["hit"])}) for made in _LAYERS["models"]}

BEST_PEER: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    (row["model"], row["fmt"]): tuple(zip(row["us"], row["floor_us"], strict=True))
    for row in _LAYERS["best_peer"]
}
"""Microseconds of gemm1 + gemm2, best of vLLM's Marlin, humming-kernels 0.1.19, triton_kernels,
FlashInfer and FBGEMM on an H200 on `BEST_PEER_DATE`, and of the floor, by model and format."""


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    model: Model
    fmt: str
    tokens: int

    @property
    def name(self) -> str:
        """Name, as ``qwen3 nvfp4 T=8``."""
        return f"{self.model.key} {self.fmt} T={self.tokens}"

    @property
    def slots(self) -> int:
        """Routed rows."""
        return self.tokens * self.model.top_k

    @property
    def hit(self) -> int:
        """Experts that any token is routed to."""
        return self.model.hit[TOKENS.index(self.tokens)]

    @property
    def best_peer(self) -> int:
        """Microseconds of `BEST_PEER`."""
        return BEST_PEER[self.model.key, self.fmt][TOKENS.index(self.tokens)][0]

    @property
    def asked_floor(self) -> int:
        """Microseconds of the floor given beside `best_peer`."""
        return BEST_PEER[self.model.key, self.fmt][TOKENS.index(self.tokens)][1]

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of codes and scales of the experts that are hit."""
        m = self.model
        values = 3 * m.hidden * m.intermediate
        return self.hit * (values // 2 + values // GROUP[self.fmt] * SCALE_BYTES[self.fmt])

    @cached_property
    def moved(self) -> int:
        """Bytes: weights, x read, h written and read, results of all slots written."""
        m = self.model
        rows = self.tokens * m.hidden + self.slots * (2 * m.intermediate + m.hidden)
        return self.weight_bytes + 2 * rows

    @property
    def flop(self) -> int:
        """Multiplications and additions of both GEMMs."""
        return 6 * self.slots * self.model.hidden * self.model.intermediate

    @property
    def floor_us(self) -> float:
        """The larger of what bytes and FLOP take."""
        return max(self.moved / BYTES_A_US, self.flop / FLOP_A_US)

    @property
    def bound(self) -> str:
        """What the floor is made of."""
        return "bytes" if self.moved / BYTES_A_US >= self.flop / FLOP_A_US else "FLOP"


def rows() -> Iterator[tuple[Model, str]]:
    """Yield the rows of the table."""
    for key, fmt in BEST_PEER:
        yield MODELS[key], fmt


def all_cases() -> Iterator[Case]:
    """Yield the cells of the table, row by row."""
    for model, fmt in rows():
        for tokens in TOKENS:
            yield Case(model, fmt, tokens)


def uniform_ids(model: Model, tokens: int, seed: int) -> Tensor:
    """Return [tokens, top_k] int32: each token's experts are uniform and distinct."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, model.experts, generator=generator)
    return scores.topk(model.top_k, dim=1).indices.to(torch.int32)


def hit_by(ids: Tensor) -> int:
    """Return how many experts occur."""
    return int(ids.unique().numel())


def routings(case: Case, most: int = 16) -> list[Tensor]:
    """Return the ids of consecutive calls, each with `Case.hit` experts.

    One token: calls share no expert, until every expert had its turn.  Few tokens: four random
    routings.  Where all weights are read, one: no cache holds them.
    """
    model = case.model
    if case.tokens == 1:
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(model.experts, generator=generator).to(torch.int32)
        turns = min(most, model.experts // model.top_k)
        return [*order[: turns * model.top_k].view(turns, 1, model.top_k)]
    wanted = {8: 4, 64: 2}.get(case.tokens, 1)
    found: list[Tensor] = []
    for seed in range(100_000):
        ids = uniform_ids(model, case.tokens, seed)
        if hit_by(ids) == case.hit:
            found.append(ids)
        if len(found) == wanted:
            return found
    raise ValueError(
        f"bench: {case.name}: no routing of 100000 hits {case.hit} experts; correct Model.hit"
    )


def sorted_slots(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the flat slots (t * top_k + j) by expert, int32, and the rows of each, int32."""
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True).to(torch.int32)
    return order, torch.bincount(flat, minlength=experts).to(torch.int32)


def aligned_blocks(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Return slots by expert in blocks of ``block`` (filled up with the count), a block's expert.

    The form that vLLM's kernels take, and others after them.
    """
    order, counts = (tensor.cpu() for tensor in sorted_slots(ids, experts))
    slots: list[Tensor] = []
    owners: list[int] = []
    start = 0
    for expert, count in enumerate(counts.tolist()):
        blocks = -(-count // block)
        part = torch.full((blocks * block,), ids.numel(), dtype=torch.int32)
        part[:count] = order[start : start + count]
        slots.append(part)
        owners += [expert] * blocks
        start += count
    return torch.cat(slots), torch.tensor(owners, dtype=torch.int32)


def find(names: Sequence[str] | None = None) -> list[Case]:
    """Return the cases whose name holds one of ``names``; all without names."""
    cases = {case.name: case for case in all_cases()}
    return [cases[name] for name in chosen(cases, names)]


def spec_of(model: Model, fmt: str) -> FusedMoe:
    """Return the function of ours that computes such a layer."""
    return FusedMoe(
        *(model.experts, model.hidden, model.intermediate, model.top_k),
        fmt=fmt,
        group=GROUP[fmt],
        activation=model.activation,
        dtype="bfloat16",
        layout="tiles64",
    )
