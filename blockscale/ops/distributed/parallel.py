"""`ExpertParallel`: an MoE layer's experts on the ranks of a group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from blockscale.ops import call, checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.distributed import cpu, cuda
from blockscale.ops.distributed.config import WHERE, Config, agree, checked_timeout, owners_of
from blockscale.ops.moe.layer import MODES, Options, check_call, check_output, run_slots
from blockscale.ops.moe.weights import MoeWeights
from blockscale.specs.exchange import symmetric_bytes
from blockscale.specs.plans.coded import CodedRow

Tensor = torch.Tensor

TIMEOUT = 30.0
"""Seconds that a rank waits for another."""


class Dispatched(NamedTuple):
    """What `ExpertParallel.dispatch` returns.

    Attributes:
        hidden: [n, H] rows that came to this rank; codes of dispatch="fp8", float8_e4m3fn, and of
            "nvfp4", [n, H / 2] uint8, the even element in the low nibble.
        topk_ids: [n, k] int32 this rank's experts, by the number of their weights here; -1: none.
        kept: what `ExpertParallel.combine` needs besides.
        scale: what codes are multiplied with: of "fp8" [n] float32; of "nvfp4" [n, H / 16]
            float8_e4m3fn, and `a1_scale`.
    """

    hidden: Tensor
    topk_ids: Tensor
    kept: Kept
    scale: Tensor | None = None


class Kept(NamedTuple):
    """What a rank keeps between dispatch and combine.

    Attributes:
        sent: what the exchange needs to bring results back.
        topk_ids, topk_weights: of its own tokens.
        rows: that came, as they lie in memory.
    """

    sent: Any
    topk_ids: Tensor
    topk_weights: Tensor
    rows: Tensor


class ExpertParallel:
    """Sends rows to the ranks of their experts and brings the results back.

    A rank calls `dispatch`, computes with its experts, and calls `combine`; or all of it by
    ``blockscale.fused_moe(..., ep=ep)``.  All ranks make the same calls in the same order, each
    with its own number of tokens.  The calls need no synchronisation with the host; on CUDA they
    may be captured in a graph, after one call with the same `bound`.

    Attributes:
        config: what all ranks have agreed upon.
        rank: of this process in the group.
        local_experts: the experts whose weights this rank has to have, in this order.
        bound: most tokens of a rank in the calls that follow, the same on all ranks, up to
            ``max_tokens``, as it is at first; time on CUDA grows with it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        dispatch: str = "bf16",
        *,
        combine: str = "slots",
        owners: Sequence[Sequence[int]] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
        timeout: float = TIMEOUT,
    ) -> None:
        """Allocate the buffers; all ranks of the group call it.

        Args:
            group: None: the default group; if there is none, this process alone.
            experts: of the layer, on all ranks together.
            hidden: elements of a row, a multiple of 8.
            top_k: experts of a token, up to 64.
            max_tokens: of a rank, in one call.
            dispatch: what rows are sent as: "bf16", as they are; "fp8" or "nvfp4", codes and scales
                of what `blockscale.fused_moe` with this ``act_fmt`` makes of them, at half or 28 %
                of the bytes.
            combine: what results come back as: "slots", that of each slot, added up as one rank
                does, with its bits; "sums", each rank's sum of what it has of a token, rounded to
                the dtype of the rows: fewer bytes where a token has several experts on a rank.
            owners: the experts of each rank; one may lie on several ranks, which then share its
                tokens.  None: equal shares of neighbours.
            device: None: the current GPU if the group has NCCL, else the CPU.
            dtype: of the rows.
            timeout: seconds that a rank waits for another before a call fails.

        Raises:
            ValueError: an argument does not fit; or it differs between ranks: then on all of them.
        """
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        ranks = 1 if alone else dist.get_world_size(group)
        self.device = _device(device, group, alone)
        checks.choice(WHERE, "device", self.device.type, ("cpu", "cuda"))
        dtypes = checks.ACTIVATIONS if self.device.type == "cpu" else checks.SIXTEEN_BIT
        checks.activation(WHERE, "dtype", dtype, dtypes, "has no kernels")
        timeout = checked_timeout(timeout)
        shares = owners_of(ranks, experts, owners)
        self.config = Config(
            *(ranks, experts, hidden, top_k, max_tokens, dispatch),
            *(dtype_name(dtype), self.device.type, shares, combine),
        )
        self.dtype = dtype
        if not alone:
            agree(self.config, group)
        self._bound = max_tokens
        self.local_experts = self.config.owners[self.rank]
        self._open: Dispatched | None = None
        self._failed: Exception | None = None
        self._known: set[Any] = set()  # layers that were checked
        self._exchange: Any
        if self.device.type == "cuda":
            memory = cuda.symmetric_memory(self.config, group, self.device)
            self._exchange = cuda.Exchange(self.config, self.rank, memory, timeout)
            self._beside = torch.cuda.Stream(self.device)
        else:
            self._exchange = cpu.Exchange(self.config, self.rank, group, timeout)

    @property
    def bound(self) -> int:
        """Most tokens of a rank in the calls that follow."""
        return self._bound

    @bound.setter
    def bound(self, value: int) -> None:
        most = self.config.max_tokens  # the buffers of all ranks are for so many
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(
                f"{WHERE}: bound={value!r} is not an integer from 1 to max_tokens={most}; set "
                "one of these, or construct it with more max_tokens"
            )
        self._bound = value

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's symmetric buffer; 0 on a CPU."""
        c = self.config
        if self.device.type == "cpu":
            return 0
        return symmetric_bytes(*c.sizes)

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, a1_scale: Tensor | None = None
    ) -> Dispatched:
        """Send each row once to every rank that has an expert of it; return what came here.

        Args:
            x: [T, H], T from 0 to `bound`.
            topk_ids: [T, k] int32 or int64; others than 0 to experts - 1 are dropped.
            topk_weights: [T, k] float32.
            a1_scale: [1] float32, of dispatch="nvfp4": what block scales are multiplied with, the
                same on all ranks; None: 1.

        Raises:
            ValueError, TypeError: an argument does not fit; too many tokens; or the last dispatch
                has had no combine.
            RuntimeError: a rank did not come in time.  Every later call raises the same, as it
                does what else a call has failed with after rows were sent.
        """
        return self._send(self._rows(x, topk_ids, topk_weights, a1_scale), a1_scale)

    def _rows(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, a1_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is to be sent, after all checks of `dispatch`."""
        self._check_alive()
        if not self._plain(x, topk_ids, topk_weights):
            self._check_rows("dispatch", x, topk_ids, topk_weights)
        if self._open is not None:
            raise ValueError(
                f"{WHERE}.dispatch: the last dispatch has had no combine; call combine() first"
            )
        if topk_ids.dtype == torch.int64:
            topk_ids = topk_ids.clamp(-1, self.config.experts).to(torch.int32)
        if a1_scale is not None:
            self._check_scale("dispatch", a1_scale, x)
        return x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()

    def _send(self, rows: tuple[Tensor, Tensor, Tensor], a1_scale: Tensor | None) -> Dispatched:
        scale = None if a1_scale is None else a1_scale.reshape(1)
        landed, sent = self._step("dispatch", self._exchange.send, *rows, self._bound, scale)
        ids = sent.landed_ids if isinstance(sent, cpu.Sent) else sent
        kept = Kept(sent, *rows[1:], landed)
        row = self.config.row
        came = Dispatched(landed, ids, kept) if row is None else _codes(landed, row, ids, kept)
        self._open = came
        return came

    def combine(self, y: Tensor, dispatched: Dispatched, out: Tensor | None = None) -> Tensor:
        """Return [T, H]: the sum of the slots of each token, weighted, in float32, rounded once.

        Args:
            y: [n, k, H] the result of each slot of ``dispatched``, not weighted; where its id is
                -1, anything.
            dispatched: what the last `dispatch` returned.
            out: output, in memory of its own; None: allocated.

        Raises:
            ValueError, TypeError, RuntimeError: as `dispatch`.
        """
        self._check_alive()
        if self._open is None:
            raise ValueError(f"{WHERE}.combine: there is no open dispatch; call dispatch() first")
        if dispatched is not self._open:
            raise ValueError(
                f"{WHERE}.combine: dispatched is of another dispatch, whose rows are gone; pass "
                "what the last dispatch() returned"
            )
        self._check_results(y, dispatched)
        out = None if out is None else self._output(out, y, dispatched)
        return self._bring_back(y.contiguous(), dispatched, out)

    def _bring_back(self, y: Tensor, dispatched: Dispatched, out: Tensor | None) -> Tensor:
        sent, ids, weights, _ = dispatched.kept
        made = y.new_empty((len(ids), self.config.hidden)) if out is None else out
        given = y, sent, ids, weights, made
        result: Tensor = self._step("combine", self._exchange.bring_back, *given)
        self._open = None
        return result

    def run(
        self,
        hidden: Tensor,
        weights: MoeWeights,
        topk_ids: Tensor,
        topk_weights: Tensor,
        options: Options,
        out: Tensor | None = None,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Return the whole layer [T, H]: dispatch, this rank's experts, combine.

        ``beside``: makes what is added, such as shared experts; on CUDA on a stream of its own.
        """
        scale = options.a1_scale if self.config.act_fmt == "nvfp4" else None
        rows = self._rows(hidden, topk_ids, topk_weights, scale)
        if weights.experts != len(self.local_experts):
            raise ValueError(
                f"{WHERE}: the weights are of {weights.experts} experts, but rank {self.rank} has "
                f"{len(self.local_experts)}; pass those of ep.local_experts"
            )
        self.check_act_fmt(WHERE, options.act_fmt)
        self._check_layer(rows, weights, options)
        if out is not None and not _is_output(out, hidden, hidden.shape):
            check_output(out, hidden)
            _check_grad(WHERE, "out", out)
            out = out.view(hidden.shape)
        added = None if beside is None else self._aside(beside)
        came = self._send(rows, scale)
        coded = None if self.config.row is None else self.dtype
        share = len(self.local_experts) / self.config.places
        made = self._results(came, weights, options, coded, share, out)
        if added is None:
            return made
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(self._beside)
        return made.add_(added)

    def _results(
        self,
        came: Dispatched,
        weights: MoeWeights,
        options: Options,
        coded: torch.dtype | None,
        share: float,
        out: Tensor | None,
    ) -> Tensor:
        """Return the sums of this rank's tokens, after its experts have computed.

        On CUDA the experts' last GEMM stores results of slots in the memory of their ranks.
        """
        _, own, factors, rows = came.kept
        given = rows, weights, came.topk_ids, options, coded, share
        if self.device.type == "cpu" or self.config.sums:
            return self._bring_back(self._step("combine", run_slots, *given), came, out)
        bound = len(rows) // self.config.ranks
        self._step("combine", run_slots, *given, self._exchange.addresses(bound))
        if out is None:
            out = torch.empty((len(own), self.config.hidden), dtype=self.dtype, device=rows.device)
        result: Tensor = self._step("combine", self._exchange.collect, own, factors, bound, out)
        self._open = None
        return result

    def _check_layer(
        self, rows: tuple[Tensor, Tensor, Tensor], weights: MoeWeights, options: Options
    ) -> None:
        """Raise what the layer would, whose results other ranks wait for once rows were sent."""
        hidden, ids, factors = rows
        first, second = options.a1_scale, options.a2_scale
        key = options[:MODES], first is None, second is None, weights.bias, weights.facts
        try:
            known = key in self._known and weights.device == hidden.device
        except TypeError:  # an option that cannot be hashed is wrong, and the checks name it
            known = False
        if known and _is_scale(first, hidden) and _is_scale(second, hidden):
            return
        spec = check_call(hidden, weights, ids, factors, options)
        for name, scale in (("a1_scale", first), ("a2_scale", second)):
            if scale is not None:
                _check_grad(WHERE, name, scale)
        on_gpu = self.device.type == "cuda"
        coded, sent = self.config.row is not None, on_gpu and not self.config.sums
        replace(spec, slots=True, coded=coded, sent=sent)  # whose checks are its own
        self._known.add(key)

    def check_act_fmt(self, where: str, act_fmt: str | None) -> None:
        """ValueError unless a layer with this ``act_fmt`` takes the rows that come."""
        sent = self.config.act_fmt
        if sent not in (None, act_fmt):
            raise ValueError(
                f"{where}: act_fmt={act_fmt!r}, but ep sends rows as dispatch={sent!r} codes; pass "
                f"act_fmt={sent!r}, or construct ep with dispatch='bf16'"
            )

    def check(self) -> None:
        """Wait for the GPU; RuntimeError with rank and step if a call has failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._exchange.check()

    def _aside(self, beside: Callable[[], Tensor]) -> Tensor:
        if self.device.type == "cpu":
            return beside()
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            made = beside()
        made.record_stream(torch.cuda.current_stream(self.device))
        return made

    def _check_alive(self) -> None:
        """Raise again what a call has failed with."""
        if self._failed is not None:
            raise type(self._failed)(*self._failed.args)

    def _step(self, step: str, function: Callable[..., Any], *given: Any) -> Any:
        """Return what a function returns on the way to what ranks wait for each other in."""
        try:
            return function(*given)
        except Exception as error:
            self._failed = error  # what has been sent cannot be taken back
            with suppress(RuntimeError):  # there may be nobody left to be told
                self._exchange.give_up(step)
            raise

    def _plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> bool:
        """Return whether rows are what callers mostly pass, so that no check is needed."""
        if not type(x) is type(ids) is type(weights) is Tensor or x.dim() != 2 or x.is_neg():
            return False
        rows = x.shape[0]
        slots = (rows, self.config.top_k)
        return (
            x.dtype == self.dtype
            and x.shape == (rows, self.config.hidden)
            and ids.shape == slots
            and weights.shape == slots
            and ids.dtype == torch.int32
            and weights.dtype == torch.float32
            and x.device == ids.device == weights.device
            and x.device.type == self.device.type
            and not ((x.requires_grad or weights.requires_grad) and torch.is_grad_enabled())
        )

    def _check_scale(self, step: str, scale: Tensor, x: Tensor) -> None:
        where = f"{WHERE}.{step}"
        checks.one_element(where, "a1_scale", scale, "x", x)
        _check_grad(where, "a1_scale", scale)
        if self.config.act_fmt != "nvfp4":
            raise ValueError(
                f"{where}: a1_scale is given, but dispatch={self.config.dispatch!r} has no static "
                "scale; leave it out, or construct it with dispatch='nvfp4'"
            )

    def _check_results(self, y: Tensor, dispatched: Dispatched) -> None:
        where, kept = f"{WHERE}.combine", dispatched.kept
        wanted = (*dispatched.topk_ids.shape, self.config.hidden)
        if isinstance(y, Tensor) and (y.shape != wanted or y.dtype != self.dtype):
            raise ValueError(
                f"{where}: y is {dtype_name(y.dtype)} {list(y.shape)}, but must be "
                f"{dtype_name(self.dtype)} {list(wanted)}: the result of each slot of the rows "
                "that came"
            )
        if type(y) is not Tensor or y.device != kept.rows.device or y.is_neg() or y.requires_grad:
            checks.beside(where, "y", y, (self.dtype,), "dispatched", kept.rows)
            _check_grad(where, "y", y)

    def _output(self, out: Tensor, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return a caller's output as [T, H], after all checks."""
        where, kept = f"{WHERE}.combine", dispatched.kept
        shape = len(kept.topk_ids), self.config.hidden
        checks.like(where, "out", out, (self.dtype,), "dispatched", kept.rows, shape, output=True)
        checks.no_overlap(where, "out", out, "y", y)
        checks.no_overlap(where, "out", out, "dispatched.hidden", kept.rows)
        _check_grad(where, "out", out)
        return out if out.shape == shape else out.view(shape)

    def _check_rows(self, step: str, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        where, c = f"{WHERE}.{step}", self.config
        checks.tensor(where, "x", x, (self.dtype,), dims=2)
        checks.beside(where, "topk_ids", ids, (torch.int32, torch.int64), "x", x)
        checks.beside(where, "topk_weights", weights, (torch.float32,), "x", x)
        wanted = {
            "x": (x, [len(x), c.hidden]),
            "topk_ids": (ids, [len(x), c.top_k]),
            "topk_weights": (weights, [len(x), c.top_k]),
        }
        for name, (tensor, shape) in wanted.items():
            if list(tensor.shape) != shape:
                raise ValueError(
                    f"{where}: {name} has shape {list(tensor.shape)}, but must have {shape}; pass "
                    "rows, ids and weights of the same tokens"
                )
        _check_grad(where, "x", x)
        _check_grad(where, "topk_weights", weights)
        if x.device.type != self.device.type:
            raise ValueError(
                f"{where}: x is on {x.device}, but the group is on {self.device}; pass "
                f"x.to({str(self.device)!r})"
            )


def _codes(rows: Tensor, row: CodedRow, ids: Tensor, kept: Kept) -> Dispatched:
    """Return views of coded rows."""
    codes, scales = rows[:, : row.codes], rows[:, row.codes : row.codes + row.scales]
    if row.act_fmt == "nvfp4":
        return Dispatched(codes, ids, kept, scales.view(torch.float8_e4m3fn))
    return Dispatched(
        codes.view(torch.float8_e4m3fn), ids, kept, scales.view(torch.float32).squeeze(1)
    )


def _is_scale(scale: Tensor | None, hidden: Tensor) -> bool:
    """Return whether a static scale is what callers mostly pass, so that no check is needed."""
    return scale is None or (
        type(scale) in call.PLAIN
        and scale.dtype == torch.float32
        and scale.numel() == 1
        and scale.device == hidden.device
        and not scale.is_neg()
        and not scale.requires_grad
    )


def _is_output(out: Tensor, read: Tensor, shape: Sequence[int]) -> bool:
    """Return whether an output is what callers mostly pass, apart from what is read."""
    if type(out) is not Tensor or out.dtype != read.dtype or out.shape != shape:
        return False
    first, other = out.data_ptr(), read.data_ptr()
    return (
        out.is_contiguous()
        and out.device == read.device
        and not out.is_neg()
        and not out.requires_grad
        and (first + out.nbytes <= other or other + read.nbytes <= first)
    )


def _check_grad(where: str, name: str, value: Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{where}: {name} requires grad, but kernels have no backward; call under "
            f"torch.no_grad(), or pass {name}.detach()"
        )


def _device(given: str | torch.device | None, group: Any, alone: bool) -> torch.device:
    if given is not None:
        return torch.device(given)
    if alone:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nccl = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
