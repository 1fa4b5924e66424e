"""Specs of what moves rows of an MoE layer between ranks: to the experts, and back to their tokens.

docs/ep.md has the protocol; `SYMMETRIC` says how a rank's symmetric buffer is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockscale.base.sizes import round_up
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.plans.coded import CODED_FORMATS, CodedRow
from blockscale.specs.plans.launches import MAX_TOP_K
from blockscale.specs.spec import DTYPE_SUFFIX, Name, Param, Spec, check_multiple, flag

MAX_RANKS = 32
"""Ranks of a group: bits of the word that says which ranks a token goes to."""

MAX_TOKENS = 65535
"""Tokens of a rank: a cell has 16 bits for their number."""

CHUNK_ELEMENTS = 8
"""Elements of 16 bits that a thread moves at a time, 16 bytes."""

ALIGNMENT = 256
"""Bytes of which the parts of a symmetric buffer begin at multiples."""

PARTS = ("cells", "ids", "weights", "rows", "slots")
"""Of a symmetric buffer, in order; see `symmetric`."""

FRAME = ("rank", "bound", "timeout", "status", *PARTS)
"""What a group's table of int64 says before the ranks' addresses: own rank; rows of a source in
this call; nanoseconds until a wait is given up; the address of the status record; bytes from the
beginning of a symmetric buffer to its parts."""

STATE = ("epoch", "dispatched", "combined", "failed")
"""Words of int32 that a rank keeps from call to call: calls so far; CTAs of a kernel that are
through, of both kernels that send; whether a call has failed."""

STEPS = ("dispatch", "combine")
"""What ranks wait for each other in."""

STATUS = ("code", "step", "rank", "epoch")
"""Words of int64 of the status record: one of `CODES`, or 0; the step; the rank that is to blame;
the call."""

CODES = ("", "timeout", "gave_up", "bound")
"""A rank did not come; it gave up; it was told another bound."""

OWNER_BITS = 16
"""An entry of the owner table is ``rank << OWNER_BITS | local expert``."""


def row_bytes(hidden: int, act_fmt: str | None) -> int:
    """Return the bytes that a row is sent as: 16 bits an element, or codes and scales."""
    return 2 * hidden if act_fmt is None else CodedRow(act_fmt, hidden).bytes


def returned(ranks: int, top_k: int, sums: bool) -> int:
    """Return the rows that may come back for a token: one a slot, or the sum of each rank."""
    return ranks if sums else top_k


def symmetric(
    ranks: int,
    capacity: int,
    top_k: int,
    hidden: int,
    act_fmt: str | None = None,
    sums: bool = False,
) -> dict[str, tuple[int, int]]:
    """Return offset and bytes of each part of a rank's symmetric buffer.

    cells [2, ranks] of 8 bytes; ids and weights [ranks * capacity, top_k] of 4; rows [ranks *
    capacity] of `row_bytes`: what other ranks send; slots [capacity * `returned`, hidden] of 2:
    what comes back.
    """
    sizes = {
        "cells": len(STEPS) * ranks * 8,
        "ids": ranks * capacity * top_k * 4,
        "weights": ranks * capacity * top_k * 4,
        "rows": ranks * capacity * row_bytes(hidden, act_fmt),
        "slots": capacity * returned(ranks, top_k, sums) * hidden * 2,
    }
    assert tuple(sizes) == PARTS
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = at, size
        at += round_up(size, ALIGNMENT)
    return found


def symmetric_bytes(
    ranks: int,
    capacity: int,
    top_k: int,
    hidden: int,
    act_fmt: str | None = None,
    sums: bool = False,
) -> int:
    """Return the bytes of a rank's symmetric buffer."""
    offset, size = symmetric(ranks, capacity, top_k, hidden, act_fmt, sums)[PARTS[-1]]
    return offset + round_up(size, ALIGNMENT)


A1_SCALE = Param("a1_scale", "float32", (1,), default=1.0)
"""The static scale of nvfp4 rows, what their block scales are multiplied with."""


def _check(spec: Any) -> None:
    where = type(spec).__name__
    limits = {"experts": MAX_EXPERTS, "top_k": MAX_TOP_K, "ranks": MAX_RANKS}
    for name, most in limits.items():
        value = getattr(spec, name, 1)
        if value > most:
            raise ValueError(f"{where}: {name}={value} is more than {most}; use fewer")
    advice = "pad rows to {}"
    what = "the elements that a thread moves"
    check_multiple(where, "hidden", spec.hidden, CHUNK_ELEMENTS, what, advice)


@dataclass(frozen=True)
class _Exchange(Spec):
    """What both directions between ``ranks`` GPUs have in common."""

    ranks: int
    experts: int
    top_k: int
    hidden: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "float32":
            raise ValueError(
                f"{type(self).__name__}: dtype='float32' has no kernel; choose 'bfloat16' or "
                "'float16'"
            )
        _check(self)

    @property
    def owners(self) -> Param:
        """Where each expert lies (`OWNER_BITS`)."""
        return Param("owner", "int32", (self.experts, "replicas"))

    @property
    def group(self) -> tuple[Param, ...]:
        """The table of the group, and the words that a rank keeps."""
        return (
            Param("frame", "int64", (len(FRAME) + self.ranks,)),
            Param("state", "int32", (len(STATE),), output=True),
        )


ACT_TEXTS: dict[str | None, str] = {None: "", **{fmt: f"_a{fmt}" for fmt in CODED_FORMATS}}
"""How names spell what rows are coded as, like those of layers."""


@dataclass(frozen=True)
class EpDispatch(_Exchange):
    """Sends each row of x to the ranks that own an expert of it, once; ids and weights to all.

    Row t of a source s comes to row ``s * bound + t`` of rows, ids and weights of the receiver's
    symmetric buffer, with an id for each slot: the receiver's own expert, or -1.

    Attributes:
        act_fmt: None: rows come as they are; else as `CodedRow`, once quantised.
    """

    act_fmt: str | None = None
    op = "ep_dispatch"
    pattern = Name(
        "ep_dispatch_r{ranks}_e{experts}_k{top_k}_h{hidden}{act_fmt}_{dtype}",
        "ep_dispatch_r4_e256_k8_h7168_bf16",
        "ep_dispatch_r4_e256_k8_h7168_afp8_bf16",
        texts={"dtype": DTYPE_SUFFIX, "act_fmt": ACT_TEXTS},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.act_fmt is not None:
            self.row.check("EpDispatch")

    @property
    def row(self) -> CodedRow:
        """Where the bytes of a coded row are."""
        assert self.act_fmt is not None
        return CodedRow(self.act_fmt, self.hidden)

    def params(self) -> tuple[Param, ...]:
        """Rows, ids and owners; the group; ids of the rows that have come."""
        return (
            Param("x", self.dtype, ("rows", self.hidden)),
            *((A1_SCALE,) if self.act_fmt == "nvfp4" else ()),
            Param("topk_ids", "int32", ("rows", self.top_k)),
            Param("topk_weights", "float32", ("rows", self.top_k)),
            self.owners,
            *self.group,
            Param("landed_ids", "int32", ("landed", self.top_k), output=True),
        )


@dataclass(frozen=True)
class EpCombine(_Exchange):
    """Sends results back to their tokens' ranks, which add them up.

    ``out[t] = sum over j, ascending, of topk_weights[t, j] * slot (t, j)``, float32, as `FusedMoe`.

    Attributes:
        sums: a rank adds up what it has of a token, in this order, and rounds; out is the sum over
            ranks, ascending, of these.
        stored: results of slots have been stored where they belong, by `FusedMoe.sent`.
    """

    sums: bool = False
    stored: bool = False
    op = "ep_combine"
    pattern = Name(
        "ep_combine_r{ranks}_e{experts}_k{top_k}_h{hidden}{sums}{stored}_{dtype}",
        "ep_combine_r4_e256_k8_h7168_bf16",
        "ep_combine_r4_e256_k8_h7168_sums_bf16",
        texts={"dtype": DTYPE_SUFFIX, "sums": flag("_sums"), "stored": flag("_stored")},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sums and self.stored:
            raise ValueError(
                "EpCombine: sums=True and stored=True, but only results of slots are stored by "
                "their GEMM; leave one out"
            )

    def params(self) -> tuple[Param, ...]:
        """Results, ids and weights of the rows that came; of the own rows, who has what; the group.

        Weights are those of the rank that adds up slots.
        """
        ids = Param("topk_ids", "int32", ("rows", self.top_k))
        own = (ids, self.owners) if self.sums else (
            ids, Param("topk_weights", "float32", ("rows", self.top_k))
        )  # fmt: skip
        came = (
            Param("y", self.dtype, ("landed", self.top_k, self.hidden)),
            Param("landed_ids", "int32", ("landed", self.top_k)),
            *((Param("landed_weights", "float32", ("landed", self.top_k)),) if self.sums else ()),
        )
        return (
            *(() if self.stored else came),
            *own,
            Param("slots", self.dtype, ("most", self.hidden)),
            *self.group,
            Param("out", self.dtype, ("rows", self.hidden), output=True),
        )


@dataclass(frozen=True)
class EpReduce(Spec):
    """The sum of `EpCombine` on a CPU, where torch.distributed has moved the rows."""

    experts: int
    top_k: int
    hidden: int
    dtype: str = "bfloat16"
    op = "ep_reduce"
    pattern = Name(
        "ep_reduce_e{experts}_k{top_k}_h{hidden}_{dtype}",
        "ep_reduce_e256_k8_h7168_bf16",
        texts={"dtype": DTYPE_SUFFIX},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    def params(self) -> tuple[Param, ...]:
        """Results of slots, those of dropped ones anything; ids and weights; the sums."""
        return (
            Param("slots", self.dtype, ("rows", self.top_k, self.hidden)),
            Param("topk_ids", "int32", ("rows", self.top_k)),
            Param("topk_weights", "float32", ("rows", self.top_k)),
            Param("out", self.dtype, ("rows", self.hidden), output=True),
        )
