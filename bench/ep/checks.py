"""Expert parallelism on the GPUs of a host, checked: ``torchrun -m bench.ep.checks LIBRARY...``.

    torchrun --nproc-per-node 2 -m bench.ep.checks LIBRARY... [--dispatch fp8] [--combine sums]
        [--out FILE]

Every rank checks its own results, bit for bit where rows are not rounded again:

* random routings, tokens of each rank from 0 to the bound, beside a reference that adds up in order
  and, a quarter of them, beside the layer of one rank; the same with experts on several ranks;
* replays of one graph with other routing each time;
* many calls in a row, kernels of all ranks delayed by chance;
* two groups in turn on the same GPUs;
* failures: other arguments, too many tokens, another bound, a rank that does not come or dies.

It ends with status 1 where anything was wrong.  On CPUs (gloo) it runs too, without
graphs and failures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import blockscale
from bench.ep.reference import EXPERTS, HIDDEN, TOP_K, Form, layer, routing, stand_in
from blockscale.base.sizes import ceil_div
from blockscale.ops.distributed import ExpertParallel
from blockscale.ops.distributed.config import COMBINES, DISPATCHES
from blockscale.ops.moe.layer import run_experts
from blockscale.specs.exchange import OWNER_BITS

Tensor = torch.Tensor

MOST = 300
"""Tokens of a rank: some calls have those of the buckets for few, some those for many rows."""

GRAPHED = 50
"""Calls in a graph of many calls in a row."""

DELAY = 20_000
"""Most cycles that a rank waits by chance between calls."""


class Ranks:
    """This process among the ranks, and what it has found."""

    def __init__(self, dispatch: str, combine: str) -> None:
        self.cuda = torch.cuda.is_available()
        self.device: Any = torch.device("cpu")
        if self.cuda:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.cuda else "gloo", timeout=timedelta(seconds=120))
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.form, self.combine = Form(dispatch, self.device), combine

    def group(self, **options: Any) -> ExpertParallel:
        """Return a new group of the layer of `bench.ep.reference`."""
        given: dict[str, Any] = {"experts": EXPERTS, "hidden": HIDDEN, "top_k": TOP_K}
        given |= {"max_tokens": MOST, "dispatch": self.form.dispatch, "device": self.device}
        given["combine"] = self.combine
        return ExpertParallel(None, **(given | options))

    def made(self, seed: int) -> torch.Generator:
        """Return a generator on the device that gives each rank other numbers."""
        return torch.Generator(self.device).manual_seed(1000 * seed + self.rank)

    def call(self, ep: ExpertParallel, given: Any, experts: Callable[..., Tensor]) -> Tensor:
        """Return what comes back of a rank's rows; ``experts(rows, ids)`` makes those of slots."""
        x, ids, weights = given
        came = ep.dispatch(x, ids, weights, self.form.scale)
        return ep.combine(experts(came.kept.rows, came.topk_ids), came)

    def simple(self, ep: ExpertParallel) -> Callable[..., Tensor]:
        """Return the stand-ins for the experts of a rank."""
        own = torch.tensor(ep.local_experts, device=self.device)
        return lambda rows, ids: stand_in(ids, self.form.numbers(rows), own)

    def truth(self, ep: ExpertParallel, given: Any) -> Tensor:
        """Return what has to come back of the stand-ins, bit for bit."""
        x, ids, weights = given
        if not ep.config.sums:
            return self.form.reference(x, ids, weights)
        owner = ep.config.owner_table().to(self.device)
        replica = (torch.arange(len(x), device=self.device) + self.rank) % owner.shape[1]
        to = owner[ids.clamp(min=0).long(), replica[:, None]] >> OWNER_BITS
        return self.form.reference(x, ids, weights, to, self.count)

    def together(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return numbers of all ranks added up; the largest of those that are called so."""
        for name, value in found.items():
            if isinstance(value, Tensor):
                how = dist.ReduceOp.MAX if "largest" in name else dist.ReduceOp.SUM
                kept = value.double() if value.is_floating_point() else value
                dist.all_reduce(kept, how)
                found[name] = kept.item()
        return found

    def raised(self, call: Callable[[], Any]) -> str:
        """Return what a call raises, also later, by kind and words."""
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Return whether bits differ, without waiting."""
    return (a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).any()


def bounds(sizes: torch.Generator, count: int) -> tuple[int, list[int]]:
    """Return a bound, and tokens of each rank from 0 to it, small ones as often as large ones."""
    bound = int(2 ** (8.2 * torch.rand((), generator=sizes)))
    return bound, [int(torch.randint(0, bound + 1, (), generator=sizes)) for _ in range(count)]


def check_routings(ranks: Ranks, count: int) -> dict[str, Any]:
    """Return how many routings gave other bits than the references."""
    ep, made, sizes = ranks.group(), ranks.made(1), torch.Generator().manual_seed(2)
    whole, mine = layer([[*ep.local_experts]], ranks.device)
    form = ranks.form
    how: dict[str, Any] = {"act_fmt": form.act_fmt, "a1_scale": form.scale, "ep": ep}
    wrong = torch.zeros(2, dtype=torch.int64, device=ranks.device)
    largest = torch.zeros((), device=ranks.device)
    beside = 0
    for number in range(count):
        ep.bound, tokens = bounds(sizes, ranks.count)
        given = routing(made, tokens[ranks.rank])
        y = ranks.call(ep, given, ranks.simple(ep))
        wrong[0] += differ(y, ranks.truth(ep, given))
        if number % 4 == 0 and len(y):
            truth = run_experts(given[0], whole, *given[1:], form.options, None)
        if number % 4 == 0:
            x, ids, factors = given
            y = blockscale.fused_moe(x, mine, ids, factors, **how)
        if number % 4 == 0 and len(y):
            beside += 1
            wrong[1] += differ(y, truth)
            apart = (y.float() - truth.float()).norm(dim=1) / truth.float().norm(dim=1)
            largest = torch.maximum(largest, apart.nan_to_num(0).max())
    ep.check()
    return ranks.together(
        {
            "routings": count,
            "ranks' results with other bits than the reference": wrong[0],
            "beside the layer of one rank": torch.tensor(beside, device=ranks.device),
            "of them with other bits": wrong[1],
            "largest difference of a row, relative": largest,
        }
    )


def check_replicas(ranks: Ranks, count: int) -> dict[str, Any]:
    """Return the same for experts of which some lie on all ranks, some on one."""
    owners = [
        [e for e in range(EXPERTS) if e % 3 == 0 or e % ranks.count == rank]
        for rank in range(ranks.count)
    ]
    ep, made, sizes = ranks.group(owners=owners), ranks.made(3), torch.Generator().manual_seed(4)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(count):
        ep.bound, tokens = bounds(sizes, ranks.count)
        given = routing(made, tokens[ranks.rank])
        y = ranks.call(ep, given, ranks.simple(ep))
        wrong += differ(y, ranks.truth(ep, given))
    ep.check()
    return ranks.together({"routings": count, "wrong": wrong})


def check_two_groups(ranks: Ranks, count: int) -> dict[str, Any]:
    """Return the same for two groups that are used in turn."""
    pair, made, sizes = [ranks.group(), ranks.group()], ranks.made(5), torch.Generator()
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for number in range(count):
        kept = []
        for ep in pair if number % 2 else pair[::-1]:
            ep.bound, tokens = bounds(sizes, ranks.count)
            given = routing(made, tokens[ranks.rank])
            kept.append((ep, given, ep.dispatch(*given, ranks.form.scale)))
        for ep, given, came in kept:
            y = ranks.simple(ep)(came.kept.rows, came.topk_ids)
            wrong += differ(ep.combine(y, came), ranks.truth(ep, given))
    for ep in pair:
        ep.check()
    return ranks.together({"routings": 2 * count, "wrong": wrong})


def check_graph(ranks: Ranks, replays: int) -> dict[str, Any]:
    """Return how many replays of one graph, with other routing each time, gave other bits."""
    ep, made = ranks.group(), ranks.made(6)
    ep.bound = 64
    given = routing(made, 64 - 5 * ranks.rank)
    experts = ranks.simple(ep)
    ranks.call(ep, given, experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ranks.call(ep, given, experts)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    for _ in range(replays):
        for old, new in zip(given, routing(made, len(given[0])), strict=True):
            old.copy_(new)
        graph.replay()
        wrong += differ(y, ranks.truth(ep, given))
    ep.check()
    return ranks.together({"replays": replays, "wrong": wrong})


def check_many(ranks: Ranks, count: int) -> dict[str, Any]:
    """Return how many of many calls in a row gave other bits: graphs, each rank with delays."""
    ep, made, sizes = ranks.group(), ranks.made(7), torch.Generator().manual_seed(8 + ranks.rank)
    ep.bound, replays = 64, ceil_div(count, GRAPHED)
    experts = ranks.simple(ep)
    calls = []
    for _ in range(GRAPHED):
        given = routing(made, int(torch.randint(0, ep.bound + 1, (), generator=sizes)))
        calls.append((given, ranks.truth(ep, given)))
    ranks.call(ep, calls[0][0], experts)
    wrong = torch.zeros((), dtype=torch.int64, device=ranks.device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given, truth in calls:
            torch.cuda._sleep(int(torch.randint(1, DELAY, (), generator=sizes)))
            wrong += differ(ranks.call(ep, given, experts), truth)
    began = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    ep.check()
    took = time.perf_counter() - began
    made_calls = replays * GRAPHED
    return ranks.together({"calls": made_calls, "seconds": round(took, 1), "wrong": wrong})


def check_failures(ranks: Ranks) -> dict[str, Any]:
    """Return what each rank says of calls that cannot succeed; one group after the other."""
    last = ranks.rank == ranks.count - 1
    found: dict[str, Any] = {}
    found["other arguments"] = ranks.raised(lambda: ranks.group(hidden=HIDDEN * (1 + last)))

    def after(tokens: int, bound: int, come: bool = True) -> Callable[[], None]:
        def call() -> None:
            ep = ranks.group(timeout=1.0)
            experts, made = ranks.simple(ep), ranks.made(9)
            ep.bound = 8
            ranks.call(ep, routing(made, 8), experts)  # one that succeeds
            ep.check()
            dist.barrier()
            ep.bound = bound
            try:
                if come:
                    ranks.call(ep, routing(made, tokens), experts)
                    ep.check()
                    ranks.call(ep, routing(made, 1), experts)  # raises what the one before did
            finally:
                dist.barrier()

        return call

    found["too many tokens"] = ranks.raised(after(9 if last else 8, 8))
    found["another bound"] = ranks.raised(after(4, 7 if last else 8))
    found["a rank that does not come"] = ranks.raised(after(8, 8, come=not last))
    working = ranks.group(timeout=10.0)
    given = routing(ranks.made(10), 5)
    y = ranks.call(working, given, ranks.simple(working))
    working.check()
    found["a new group after that works"] = not bool(differ(y, ranks.truth(working, given)))
    said: list[dict[str, Any]] = [{}] * ranks.count
    dist.all_gather_object(said, found)
    return {name: [own[name] for own in said] for name in found}


def check_death(ranks: Ranks) -> dict[str, Any]:
    """Let the last rank end in the middle of a call; return what rank 0 says of it."""
    ep = ranks.group(timeout=2.0)
    experts, made = ranks.simple(ep), ranks.made(11)
    ranks.call(ep, routing(made, 5), experts)
    ep.check()
    dist.barrier()
    if ranks.rank == ranks.count - 1:
        os._exit(0)
    time.sleep(0.5)
    began = time.perf_counter()

    def call() -> None:
        ranks.call(ep, routing(made, 5), experts)
        ep.check()

    said = ranks.raised(call)
    return {"said": said, "after seconds": round(time.perf_counter() - began, 2)}


def is_right(name: str, found: Any, count: int) -> bool:
    """Return whether a check has found what it has to find."""
    if not isinstance(found, dict):
        return False
    last = f"rank {count - 1}"
    if name == "death":
        return found["said"].startswith("RuntimeError: ") and last in found["said"]
    if name == "failures":
        return (
            all(text.startswith("ValueError: ") and last in text
                for text in found["other arguments"])
            and found["too many tokens"][-1].startswith("ValueError: ")
            and all(last in text for text in found["too many tokens"])
            and all(text.startswith(("RuntimeError: ", "ValueError: "))
                    for text in found["another bound"])
            and all(text.startswith("RuntimeError: ") and last in text
                    for text in found["a rank that does not come"][:-1])
            and all(found["a new group after that works"])
        )  # fmt: skip
    wrong = [value for key, value in found.items() if key.startswith(("wrong", "ranks'"))]
    return bool(wrong) and not any(wrong)


def main() -> None:
    """Check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("libraries", nargs="*", type=Path)
    parser.add_argument("--dispatch", choices=DISPATCHES, default="bf16")
    parser.add_argument("--combine", choices=COMBINES, default="slots")
    parser.add_argument("--routings", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for library in args.libraries:
        blockscale.load(library)
    ranks = Ranks(args.dispatch, args.combine)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "routings": lambda: check_routings(ranks, args.routings),
        "replicas": lambda: check_replicas(ranks, args.routings // 4),
        "two groups": lambda: check_two_groups(ranks, args.routings // 4),
    }
    if ranks.cuda:
        parts |= {
            "graph": lambda: check_graph(ranks, args.routings),
            "many calls": lambda: check_many(ranks, args.calls),
            "failures": lambda: check_failures(ranks),
            "death": lambda: check_death(ranks),
        }
    name = torch.cuda.get_device_name() if ranks.cuda else "CPU"
    results: dict[str, Any] = {"ranks": ranks.count, "device": name, "torch": torch.__version__}
    results |= {"dispatch": args.dispatch, "combine": args.combine}
    bad: list[str] = []
    for key, part in parts.items():
        if args.only and key not in args.only:
            continue
        results[key] = part()
        if not is_right(key, results[key], ranks.count):
            bad.append(key)
        if ranks.rank == 0:
            print(key, json.dumps(results[key]), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    if bad and ranks.rank == 0:
        print("wrong:", *bad, file=sys.stderr)
    sys.stdout.flush()
    os._exit(bool(bad))  # a group of which a rank has died does not end in order


if __name__ == "__main__":
    main()
