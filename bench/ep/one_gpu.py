"""What one GPU can tell of expert parallelism: two ranks as two streams of one process.

    python -m bench.ep.one_gpu LIBRARY... [--dispatch fp8] [--routings 1000] [--out FILE]

Both ranks' buffers are plain memory of the same GPU, so the kernels and their protocol run for
real, the links between GPUs do not.  Ranks must be able to run at the same time: few tokens.
Checks, bit for bit: random routings against the layer of one rank and against a reference in torch,
one CUDA graph with changed routing.  Times: dispatch and combine of a group of one rank, in graphs.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import blockscale
from bench.ep.reference import EXPERTS, HIDDEN, TOP_K, Form, layer, routing, stand_in
from blockscale.ops.distributed import cuda
from blockscale.ops.distributed.config import DISPATCHES, Config, owners_of
from blockscale.ops.moe.layer import run_experts, run_slots
from blockscale.specs.exchange import symmetric_bytes

Tensor = torch.Tensor

MOST = 32
"""Tokens of a rank of the layer that is checked."""

SHARES = [[*own] for own in owners_of(2, EXPERTS, None)]
"""Experts of each rank."""

TIMED = (256, 7168, 8)
"""Experts, hidden and top_k of what is timed."""

TOKENS = (1, 8, 64, 128, 512, 4096)


def group(
    ranks: int, experts: int, hidden: int, top_k: int, most: int, form: Form
) -> list[cuda.Exchange]:
    """Return the exchanges of ranks that share this GPU."""
    config = Config(
        *(ranks, experts, hidden, top_k, most, form.dispatch, "bfloat16", "cuda"),
        owners_of(ranks, experts, None),
    )
    size = symmetric_bytes(*config.sizes)
    buffers = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    return [
        cuda.Exchange(config, rank, cuda.Memory(buffers[rank], buffers), 10.0)
        for rank in range(ranks)
    ]


class Pair:
    """Two ranks on two streams."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self.own = torch.tensor(SHARES, device="cuda")
        self.ranks = group(2, EXPERTS, HIDDEN, TOP_K, MOST, form)
        alone, _ = group(2, EXPERTS, HIDDEN, TOP_K, MOST, form)
        # Loading a kernel may wait for those that run: load all while none waits for another.
        alone.timeout, alone.check = 1e-3, lambda: None  # type: ignore[method-assign]
        x, ids, weights = routing(torch.Generator("cuda").manual_seed(0), MOST)
        rows, landed = alone.send(x, ids, weights, MOST, form.scale)
        y = self.stand_in(0, rows, landed)
        alone.bring_back(y, landed, ids, weights, torch.empty_like(x))
        for rank in self.ranks:
            for bound in range(1, MOST + 1):
                rank.frame(bound)
        torch.cuda.synchronize()

    def run(self, given: list[Any], bound: int, expert: Any) -> list[Tensor]:
        """Return both ranks' results; ``expert(rank, rows, ids)`` makes those of slots."""
        start, found = torch.cuda.current_stream(), []
        for rank, (x, ids, weights) in enumerate(given):
            stream = self.streams[rank]
            stream.wait_stream(start)
            with torch.cuda.stream(stream):
                own = self.ranks[rank]
                rows, landed = own.send(x, ids, weights, bound, self.form.scale)
                y = expert(rank, rows, landed)
                found.append(own.bring_back(y, landed, ids, weights, torch.empty_like(x)))
        for stream in self.streams:
            start.wait_stream(stream)
        return found

    def check(self) -> None:
        """Raise what a kernel has reported."""
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.check()

    def stand_in(self, rank: int, rows: Tensor, ids: Tensor) -> Tensor:
        """Return [n, k, H] of stand-ins for the experts of a rank."""
        return stand_in(ids, self.form.numbers(rows), self.own[rank])


def check_routings(pair: Pair, count: int) -> dict[str, Any]:
    """Return how many routings gave other bits than the references."""
    made = torch.Generator("cuda").manual_seed(1)
    sizes = torch.Generator().manual_seed(2)
    whole, *shares = layer(SHARES)
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    largest, form = torch.zeros((), device="cuda"), pair.form
    coded = None if form.act_fmt is None else torch.bfloat16

    def experts(rank: int, rows: Tensor, ids: Tensor) -> Tensor:
        return run_slots(rows, shares[rank], ids, form.options, coded)

    for rows in (2, 20, 2 * MOST):  # of each bucket
        for rank in range(2):
            ids = torch.zeros(rows, TOP_K, dtype=torch.int32, device="cuda")
            x = torch.zeros(rows, HIDDEN, device="cuda").bfloat16()
            experts(rank, form.bytes(x), ids)
    torch.cuda.synchronize()

    for number in range(count):
        bound = int(torch.randint(1, MOST + 1, (), generator=sizes))
        tokens = [int(torch.randint(0, bound + 1, (), generator=sizes)) for _ in range(2)]
        given = [routing(made, t) for t in tokens]
        truths = [
            [form.reference(*own) for own in given],
            [run_experts(own[0], whole, *own[1:], form.options, None) for own in given],
        ]
        for which, expert in enumerate((pair.stand_in, experts)):
            if which and number % 4:
                continue
            for y, truth in zip(pair.run(given, bound, expert), truths[which], strict=True):
                wrong[which] += (y.view(torch.int16) != truth.view(torch.int16)).any()
                if which and len(y):
                    apart = (y.float() - truth.float()).abs().max() / truth.float().abs().max()
                    largest = torch.maximum(largest, apart)
        if number % 50 == 49:
            pair.check()
    pair.check()
    return {
        "routings": count,
        "ranks with other bits than the reference": int(wrong[0]),
        "ranks with other bits than the layer (of a quarter of the routings)": int(wrong[1]),
        "largest difference from the layer, relative": float(largest),
    }


def check_graph(pair: Pair, replays: int = 1000) -> dict[str, Any]:
    """Return how many replays of one graph, with other routing each time, gave other bits."""
    made = torch.Generator("cuda").manual_seed(3)
    given = [routing(made, t) for t in (MOST, MOST - 5)]
    pair.run(given, MOST, pair.stand_in)
    pair.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = pair.run(given, MOST, pair.stand_in)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(replays):
        for own in given:
            for old, new in zip(own, routing(made, len(own[0])), strict=True):
                old.copy_(new)
        graph.replay()
        for own, y in zip(given, found, strict=True):
            wrong += (y.view(torch.int16) != pair.form.reference(*own).view(torch.int16)).any()
    pair.check()
    return {"replays": replays, "ranks with other bits": int(wrong)}


def timings(form: Form) -> list[dict[str, Any]]:
    """Return microseconds of a group of one rank, by tokens: medians of 7 replays of graphs."""
    experts, hidden, top_k = TIMED
    found = []
    for tokens in TOKENS:
        (own,) = group(1, experts, hidden, top_k, tokens, form)
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        ids = torch.rand(tokens, experts, device="cuda").topk(top_k, 1).indices.to(torch.int32)
        weights, out = torch.rand(tokens, top_k, device="cuda"), torch.empty_like(x)
        given = x, ids, weights, tokens, form.scale
        _, landed = own.send(*given)
        y = torch.randn(tokens, top_k, hidden, device="cuda").bfloat16()
        own.bring_back(y, landed, ids, weights, out)
        torch.cuda.synchronize()
        own.check()
        row: dict[str, Any] = {"tokens": tokens}
        calls: dict[str, Any] = {
            "dispatch": partial(own.send, *given),
            "combine": partial(own.bring_back, y, landed, ids, weights, out),
        }
        for name, call in calls.items():
            times = []
            graph, count = torch.cuda.CUDAGraph(), 50
            with torch.cuda.graph(graph):
                for _ in range(count):
                    call()
            for _ in range(8):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1000 / count)
            row[name] = round(median(times[1:]), 2)
        own.check()
        found.append(row)
        print(row, flush=True)
    return found


def dies(form: Form) -> str:
    """Return what a rank says whose peer does not come."""
    own = group(2, EXPERTS, HIDDEN, TOP_K, MOST, form)[0]
    own.timeout = 0.2
    own.send(*routing(torch.Generator("cuda").manual_seed(4), 3), MOST, form.scale)
    torch.cuda.synchronize()
    try:
        own.check()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    """Check, time, print, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", type=Path)
    parser.add_argument("--dispatch", choices=DISPATCHES, default="bf16")
    parser.add_argument("--routings", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for library in args.libraries:
        blockscale.load(library)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    form = Form(args.dispatch)
    results["dispatch"] = args.dispatch
    parts = {
        "times": lambda: timings(form),
        "absent": lambda: dies(form),
        "graph": lambda: check_graph(Pair(form)),
        "random": lambda: check_routings(Pair(form), args.routings),
    }
    for name, part in parts.items():
        try:
            results[name] = part()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        print(name, results[name], flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
