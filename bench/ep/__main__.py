"""Dispatch, combine and whole MoE layers on several GPUs, beside NCCL.

    torchrun --nproc-per-node 4 -m bench.ep [--layers deepseek qwen gptoss] [--dispatch fp8]
        [--halves] [--out FILE]

Every rank needs a GPU; kernels are built on first use.  Times are medians of replays of CUDA
graphs of `CALLS` calls, of the slowest rank.  "nccl" is all_to_all_single of equal splits of T rows
of 16 bits to each rank, there and back.  The layer beside ours sends rows by all_to_all_single and
computes with the same experts.  ``--halves``: also the layer as two half batches on two streams,
each with an `ExpertParallel` of its own.  On CPUs (gloo) it runs too, to try it out: those times
mean nothing.
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
from blockscale.base.formats import MOE
from blockscale.ops.distributed.config import DISPATCHES

Tensor = torch.Tensor

CALLS, REPLAYS = 20, 7
TOKENS = (1, 8, 64, 128, 512, 4096)


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


class Ranks:
    """This process among the ranks."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else "cpu"

    def us(self, call: Callable[[], Any]) -> float:
        """Return microseconds of a call, of the slowest rank."""
        call()
        repeat = self._graph(call) if self.cuda else (lambda: [call() for _ in range(2)])
        count, times = (CALLS if self.cuda else 2), []
        for _ in range(REPLAYS):
            self._wait()
            began = time.perf_counter()
            repeat()
            self._wait(together=False)
            times.append(1e6 * (time.perf_counter() - began) / count)
        slowest = torch.tensor([median(times)], device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return round(float(slowest), 1)

    def _wait(self, together: bool = True) -> None:
        if together:
            dist.barrier()
        if self.cuda:
            torch.cuda.synchronize()

    def _graph(self, call: Callable[[], Any]) -> Callable[[], Any]:
        self._wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        return graph.replay


def prepared(layer: Layer, count: int, device: Any) -> blockscale.MoeWeights:
    """Return random weights of ``count`` experts, one after the other the same ones."""
    made, block = torch.Generator().manual_seed(0), MOE[layer.fmt].block
    scale = (110, 120) if layer.fmt == "mxfp4" else (40, 56)

    def numbers(low: int, high: int, *shape: int) -> Tensor:
        one = torch.randint(low, high, shape, dtype=torch.uint8, generator=made)
        return one[None].repeat(count, 1, 1)

    gates, factor = 2 * layer.intermediate, torch.full((count,), 2.0**-6)
    weights = blockscale.prepare_moe_weights(
        numbers(0, 256, gates, layer.hidden // 2),
        numbers(0, 256, layer.hidden, layer.intermediate // 2),
        fmt=layer.fmt,
        w13_scale=numbers(*scale, gates, layer.hidden // block),
        w2_scale=numbers(*scale, layer.hidden, layer.intermediate // block),
        w13_global_scale=factor[:, None].repeat(1, 2) if layer.fmt == "nvfp4" else None,
        w2_global_scale=factor if layer.fmt == "nvfp4" else None,
        layout="linear" if device == "cpu" else "tiles64",
        dtype=torch.bfloat16,
    )
    return weights.to(device)


class Halves:
    """A layer as two half batches, each on a stream of its own."""

    def __init__(self, ranks: Ranks, layer: Layer, tokens: int, dispatch: str) -> None:
        sizes = layer.experts, layer.hidden, layer.top_k, -(-tokens // 2), dispatch
        self.eps = [blockscale.distributed.ExpertParallel(None, *sizes) for _ in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)] if ranks.cuda else []

    def __call__(
        self, mine: blockscale.MoeWeights, rows: list[Tensor], how: dict[str, Any]
    ) -> None:
        """Start both halves at the same time."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for i, (x, ids, weights) in enumerate(zip(*(part.chunk(2) for part in rows), strict=True)):
            with torch.cuda.stream(self.streams[i] if self.streams else None):
                blockscale.fused_moe(x, mine, ids, weights, ep=self.eps[i], **how)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def load(self, mine: blockscale.MoeWeights, rows: list[Tensor], how: dict[str, Any]) -> None:
        """Call one after the other: loading a kernel may wait for those that run and wait."""
        for ep, *half in zip(self.eps, *(part.chunk(2) for part in rows), strict=True):
            x, ids, weights = half
            blockscale.fused_moe(x, mine, ids, weights, ep=ep, **how)
            ep.check()


def one(
    ranks: Ranks,
    layer: Layer,
    tokens: int,
    mine: blockscale.MoeWeights,
    dispatch: str,
    halves: bool,
) -> dict[str, Any]:
    """Return the times of a layer with so many tokens on each rank."""
    ep = blockscale.distributed.ExpertParallel(
        *(None, layer.experts, layer.hidden, layer.top_k, tokens, dispatch)
    )
    how: dict[str, Any] = {"act_fmt": None if dispatch == "bf16" else dispatch}
    made = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(tokens, layer.hidden, generator=made).bfloat16().to(ranks.device)
    scores = torch.rand(tokens, layer.experts, generator=made)
    ids = scores.topk(layer.top_k, 1).indices.to(torch.int32).to(ranks.device)
    weights = torch.rand(tokens, layer.top_k, generator=made).to(ranks.device)

    def pair() -> None:
        came = ep.dispatch(x, ids, weights)
        y = x.new_empty((*came.topk_ids.shape, layer.hidden))
        ep.combine(y, came)

    rows = x.repeat(ranks.count, 1)
    back = torch.empty_like(rows)
    local = torch.arange(len(rows) * layer.top_k, device=ranks.device) % mine.experts
    local = local.view(len(rows), layer.top_k).to(torch.int32)
    shares = weights.repeat(ranks.count, 1)

    def nccl_layer() -> None:
        dist.all_to_all_single(back, rows)
        y = blockscale.fused_moe(back, mine, local, shares, **how)
        dist.all_to_all_single(rows, y)

    found = {
        "tokens": tokens,
        "dispatch and combine": ranks.us(pair),
        "nccl, there and back": ranks.us(
            lambda: [dist.all_to_all_single(back, rows) for _ in range(2)]
        ),
        "layer": ranks.us(lambda: blockscale.fused_moe(x, mine, ids, weights, ep=ep, **how)),
        "layer by nccl": ranks.us(nccl_layer),
    }
    if halves and tokens > 1:
        both, given = Halves(ranks, layer, tokens, dispatch), [x, ids, weights]
        both.load(mine, given, how)
        found["layer in halves"] = ranks.us(lambda: both(mine, given, how))
        for own in both.eps:
            own.check()
    ep.check()
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    names = [name for name in LAYERS if name != "tiny"]
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=names)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--dispatch", choices=DISPATCHES, default="bf16", help="what rows go as")
    parser.add_argument(
        "--halves", action="store_true", help="two half batches on two streams, too"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ranks = Ranks()
    name = torch.cuda.get_device_name() if ranks.cuda else "CPU"
    results: dict[str, Any] = {"ranks": ranks.count, "device": name, "torch": torch.__version__}
    results["dispatch"] = args.dispatch
    for key in args.layers:
        layer = LAYERS[key]
        mine = prepared(layer, layer.experts // ranks.count, ranks.device)
        results[key] = []
        for tokens in args.tokens:
            results[key].append(one(ranks, layer, tokens, mine, args.dispatch, args.halves))
            if ranks.rank == 0:
                print(key, results[key][-1], flush=True)
    if ranks.rank == 0 and args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
