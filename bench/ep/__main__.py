"""Dispatch, combine and whole MoE layers on several GPUs, beside NCCL.

    torchrun --nproc-per-node 2 -m bench.ep [--library FILE] [--layers deepseek qwen gptoss]
        [--forms bf16 fp8 nvfp4] [--layer-forms bf16 fp8] [--combines slots sums] [--halves]
        [--beside FILE] [--out FILE]

Every rank needs a GPU; kernels are built on first use.  Times are medians of replays of CUDA
graphs of `CALLS` calls, of the slowest rank.

"exchange": rows of `TIMED` there and back, without experts.  Ranks wait for each other in both
directions, so one cannot be timed without the other: "dispatch" is what a dispatch with a combine
of nothing takes, less half of what a dispatch and a combine of nothing take; "combine" likewise.
NCCL's is all_to_all_single of T rows to each rank, of 2 bytes or 1 an element.

"layers": ours, beside

* "all_to_all": rows and results by all_to_all_single, ids and weights by all_gather, our fused_moe
  of the same experts, ranks' sums added up;
* "all_gather": the same by all_gather and reduce_scatter;
* "tensor parallel": all experts on each rank, with their share of the intermediate, in whole blocks
  of scales, of the tokens of all ranks, which each of them has, and an all_reduce.

``--halves``: also the layer as two half batches on two streams, each with an `ExpertParallel` of
its own.  On CPUs (gloo) it runs too, to try it out: those times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import blockscale
from bench import measure
from blockscale.base.formats import MOE
from blockscale.base.sizes import ceil_div, round_up
from blockscale.demo.files import write_json
from blockscale.ops.distributed.config import COMBINES, DISPATCHES

Tensor = torch.Tensor

FORMAT = 1
CALLS, REPLAYS = 20, 7
TOKENS = (1, 8, 64, 128, 512, 4096)
SHARE = 32
"""A rank's share of an expert's intermediate is padded to whole blocks of the weights' scales."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the format of its weights."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    fmt: str


LAYERS = {
    "deepseek": Layer(256, 7168, 2048, 8, "nvfp4"),
    "qwen": Layer(128, 2048, 768, 8, "nvfp4"),
    "gptoss": Layer(128, 2880, 2880, 4, "mxfp4"),
    "tiny": Layer(16, 256, 128, 4, "nvfp4"),
}

TIMED = "deepseek"
"""The layer whose rows are sent without experts."""


class Ranks:
    """This process among the ranks."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device: Any = (
            torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        )

    def us(self, call: Callable[[], Any]) -> float:
        """Return microseconds of a call, of the slowest rank."""
        for _ in range(2):
            call()
        times = self._graph(call) if self.cuda else self._calls(call)
        slowest = torch.tensor([median(times)], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return round(float(slowest), 2)

    def _calls(self, call: Callable[[], Any]) -> list[float]:
        times = []
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - began))
        return times

    def _graph(self, call: Callable[[], Any]) -> list[float]:
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        times = []
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(REPLAYS + 1):
            dist.barrier()
            torch.cuda.synchronize()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / CALLS)
        return times[1:]


class Batch:
    """A rank's random tokens, and where they go."""

    def __init__(self, ranks: Ranks, layer: Layer, tokens: int) -> None:
        made = torch.Generator().manual_seed(ranks.rank)
        k = layer.top_k
        self.x = torch.randn(tokens, layer.hidden, generator=made).bfloat16().to(ranks.device)
        scores = torch.rand(tokens, layer.experts, generator=made)
        self.ids = scores.topk(k, 1).indices.to(torch.int32).to(ranks.device)
        self.weights = torch.rand(tokens, k, generator=made).to(ranks.device)
        to = self.ids.long() // (layer.experts // ranks.count)
        there = torch.stack([to == rank for rank in range(ranks.count)])
        away = torch.arange(ranks.count, device=ranks.device) != ranks.rank
        self.rows = int(there.any(2)[away].sum())
        self.slots = int(there[away].sum())


def prepared(layer: Layer, count: int, intermediate: int, device: Any) -> blockscale.MoeWeights:
    """Return random weights of ``count`` experts, one after the other the same ones."""
    made, block = torch.Generator().manual_seed(0), MOE[layer.fmt].block
    scale = (110, 120) if layer.fmt == "mxfp4" else (40, 56)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        one = torch.randint(low, high, shape, dtype=torch.uint8, generator=made)
        return one.to(device)[None].repeat(count, 1, 1)

    gates, factor = 2 * intermediate, torch.full((count,), 2.0**-6, device=device)
    return blockscale.prepare_moe_weights(
        numbers(0, 256, gates, layer.hidden // 2),
        numbers(0, 256, layer.hidden, intermediate // 2),
        fmt=layer.fmt,
        w13_scale=numbers(*scale, gates, layer.hidden // block),
        w2_scale=numbers(*scale, layer.hidden, intermediate // block),
        w13_global_scale=factor[:, None].repeat(1, 2) if layer.fmt == "nvfp4" else None,
        w2_global_scale=factor if layer.fmt == "nvfp4" else None,
        dtype=torch.bfloat16,
    )


Form = tuple[str, str]
"""What rows are sent as, and what results come back as."""


def group(layer: Layer, tokens: int, form: Form) -> Any:
    """Return the `ExpertParallel` of a layer."""
    sizes = layer.experts, layer.hidden, layer.top_k, tokens, form[0]
    return blockscale.distributed.ExpertParallel(None, *sizes, combine=form[1])


# ---- Rows there and back ------------------------------------------------------------------------


def exchange(ranks: Ranks, tokens: int, forms: list[Form]) -> dict[str, Any]:
    """Return the times of rows that go and come back, without experts."""
    layer = LAYERS[TIMED]
    batch = Batch(ranks, layer, tokens)
    found: dict[str, Any] = {"tokens": tokens, "rows": batch.rows, "slots": batch.slots}
    for form in forms:
        found[", ".join(form)] = _directions(ranks, group(layer, tokens, form), batch)
    for size, dtype in ((2, torch.bfloat16), (1, torch.uint8)):
        rows = torch.zeros(ranks.count * tokens, layer.hidden, device=ranks.device, dtype=dtype)
        back = torch.empty_like(rows)
        found[f"nccl, {size} bytes"] = ranks.us(
            lambda back=back, rows=rows: dist.all_to_all_single(back, rows)  # type: ignore[misc]
        )
    return found


def _directions(ranks: Ranks, ep: Any, batch: Batch) -> dict[str, float]:
    """Return times with rows and without, in either direction."""
    nowhere = torch.full_like(batch.ids, -1)
    scale = torch.ones(1, device=ranks.device) if ep.config.act_fmt == "nvfp4" else None
    own = ep._exchange
    out = torch.empty_like(batch.x)

    def pair(ids: Tensor, y: Tensor, sent: Any, back: Tensor) -> None:
        _, kept = own.send(batch.x, ids, batch.weights, ep.bound, scale)
        own.bring_back(y, kept if sent is None else sent, back, batch.weights, out)

    came = ep.dispatch(batch.x, batch.ids, batch.weights, scale)
    y = batch.x.new_empty((*came.topk_ids.shape, batch.x.shape[1]))
    ep.combine(y, came)
    if not ranks.cuda:
        return {"both": ranks.us(lambda: pair(batch.ids, y, None, batch.ids))}
    nothing = torch.full_like(came.topk_ids, -1)
    kept_ids = came.topk_ids.clone()
    both = ranks.us(lambda: pair(batch.ids, y, None, batch.ids))
    there = ranks.us(lambda: pair(batch.ids, y, nothing, nowhere))
    back = ranks.us(lambda: pair(nowhere, y, kept_ids, batch.ids))
    empty = ranks.us(lambda: pair(nowhere, y, nothing, nowhere))
    ep.check()
    made = {"dispatch": there - empty / 2, "combine": back - empty / 2}
    return {"both": both, "nothing": empty, **{k: round(v, 2) for k, v in made.items()}}


# ---- Layers -------------------------------------------------------------------------------------


class Others:
    """The same layer by collectives of torch.distributed, around our kernels."""

    def __init__(self, ranks: Ranks, layer: Layer, batch: Batch, how: dict[str, Any]) -> None:
        self.ranks, self.layer, self.batch, self.how = ranks, layer, batch, how
        x, count = batch.x, ranks.count
        self.rows, self.back, self.came = (
            x.new_empty((count * len(x), layer.hidden)) for _ in range(3)
        )
        self.ids = batch.ids.new_empty((count * len(x), layer.top_k))
        self.weights = batch.weights.new_empty(self.ids.shape)
        self.share = layer.experts // count

    def _chosen(self) -> Tensor:
        """Return the own experts of the rows of all ranks."""
        dist.all_gather_into_tensor(self.ids, self.batch.ids)
        dist.all_gather_into_tensor(self.weights, self.batch.weights)
        local = self.ids - self.ranks.rank * self.share
        return torch.where((local >= 0) & (local < self.share), local, -1)

    def all_to_all(self, mine: blockscale.MoeWeights) -> Tensor:
        """Rows and sums by all_to_all_single."""
        self.rows.view(self.ranks.count, *self.batch.x.shape).copy_(self.batch.x)
        dist.all_to_all_single(self.came, self.rows)
        y = blockscale.fused_moe(self.came, mine, self._chosen(), self.weights, **self.how)
        dist.all_to_all_single(self.back, y)
        return self.back.view(self.ranks.count, *self.batch.x.shape).sum(0)

    def all_gather(self, mine: blockscale.MoeWeights) -> Tensor:
        """Rows by all_gather, sums by reduce_scatter."""
        dist.all_gather_into_tensor(self.came, self.batch.x)
        y = blockscale.fused_moe(self.came, mine, self._chosen(), self.weights, **self.how)
        out = torch.empty_like(self.batch.x)
        dist.reduce_scatter_tensor(out, y)
        return out

    def tensor_parallel(self, shared: blockscale.MoeWeights) -> Tensor:
        """Share of each expert, of rows that all ranks have."""
        y = blockscale.fused_moe(self.came, shared, self.ids, self.weights, **self.how)
        dist.all_reduce(y)
        return y


class Halves:
    """A layer as two half batches, each on a stream of its own."""

    def __init__(self, ranks: Ranks, layer: Layer, tokens: int, form: Form) -> None:
        self.eps = [group(layer, -(-tokens // 2), form) for _ in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)] if ranks.cuda else []

    def __call__(self, mine: blockscale.MoeWeights, batch: Batch, how: dict[str, Any]) -> None:
        """Start both halves at the same time."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        parts = zip(*(part.chunk(2) for part in (batch.x, batch.ids, batch.weights)), strict=True)
        for i, (x, ids, weights) in enumerate(parts):
            with torch.cuda.stream(self.streams[i] if self.streams else None):
                blockscale.fused_moe(x, mine, ids, weights, ep=self.eps[i], **how)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def load(self, mine: blockscale.MoeWeights, batch: Batch, how: dict[str, Any]) -> None:
        """Call one after the other: loading a kernel may wait for those that run and wait."""
        parts = zip(*(part.chunk(2) for part in (batch.x, batch.ids, batch.weights)), strict=True)
        for ep, (x, ids, weights) in zip(self.eps, parts, strict=True):
            blockscale.fused_moe(x, mine, ids, weights, ep=ep, **how)
            ep.check()


def one(
    ranks: Ranks,
    layer: Layer,
    tokens: int,
    weights: tuple[blockscale.MoeWeights, blockscale.MoeWeights],
    forms: list[Form],
    halves: bool,
) -> dict[str, Any]:
    """Return the times of a layer with so many tokens on each rank."""
    mine, shared = weights
    batch = Batch(ranks, layer, tokens)
    found: dict[str, Any] = {"tokens": tokens}
    others = Others(ranks, layer, batch, {})
    beside = {
        "all_to_all": lambda: others.all_to_all(mine),
        "all_gather": lambda: others.all_gather(mine),
        "tensor parallel": lambda: others.tensor_parallel(shared),
    }
    for name, call in beside.items():
        found[name] = ranks.us(call)
    want = others.all_gather(mine).float()
    for form in forms:
        ep = group(layer, tokens, form)
        how: dict[str, Any] = {"act_fmt": ep.config.act_fmt}

        def layer_call(ep: Any = ep, how: dict[str, Any] = how) -> Tensor:
            return blockscale.fused_moe(batch.x, mine, batch.ids, batch.weights, ep=ep, **how)

        y = layer_call().float()
        error = (y - want).norm(dim=1) / want.norm(dim=1)
        name = ", ".join(form)
        found[f"{name}: differs from all_gather by"] = round(float(error.max()), 5)
        found[name] = ranks.us(layer_call)
        ep.check()
        if halves and tokens > 1:
            both = Halves(ranks, layer, tokens, form)
            both.load(mine, batch, how)
            found[f"{name}, in halves"] = ranks.us(
                lambda both=both, how=how: both(mine, batch, how)  # type: ignore[misc]
            )
            for own in both.eps:
                own.check()
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    names = [name for name in LAYERS if name != "tiny"]
    parser.add_argument("--library", type=Path, nargs="+", default=[])
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument(
        "--forms", nargs="+", choices=DISPATCHES, default=["bf16"], help="what rows go as"
    )
    parser.add_argument(
        "--layer-forms", nargs="+", choices=DISPATCHES, default=["bf16"], help="of whole layers"
    )
    parser.add_argument(
        "--combines", nargs="+", choices=COMBINES, default=COMBINES, help="what results come as"
    )
    parser.add_argument(
        "--halves", action="store_true", help="two half batches on two streams, too"
    )
    parser.add_argument(
        "--beside", type=Path, help="results of bench.peers.ep on this machine, kept with these"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for library in args.library:
        blockscale.load(library)
    forms, layer_forms = (
        [(form, combine) for form in chosen for combine in args.combines]
        for chosen in (args.forms, args.layer_forms)
    )
    ranks = Ranks()
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": measure.now(),
        "machine": measure.machine(),
        "versions": measure.gpu_versions(),
        "replays": REPLAYS,
        "ranks": ranks.count,
        "beside": None if args.beside is None else json.loads(args.beside.read_text()),
        "exchange": [],
        "layers": {},
    }

    def say(key: str, value: dict[str, Any]) -> None:
        if ranks.rank == 0:
            print(key, value, flush=True)
            if args.out is not None:
                write_json(args.out, results)

    for tokens in args.tokens:
        results["exchange"].append(exchange(ranks, tokens, forms))
        say("exchange", results["exchange"][-1])
    for key in args.layers:
        layer = LAYERS[key]
        share = round_up(ceil_div(layer.intermediate, ranks.count), SHARE)
        weights = (
            prepared(layer, layer.experts // ranks.count, layer.intermediate, ranks.device),
            prepared(layer, layer.experts, share, ranks.device),
        )
        results["layers"][key] = []
        for tokens in args.tokens:
            found = one(ranks, layer, tokens, weights, layer_forms, args.halves)
            results["layers"][key].append(found)
            say(key, found)
        del weights
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
