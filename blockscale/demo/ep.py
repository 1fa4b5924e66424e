"""A whole MoE layer on the ranks of a group: checked against one rank, timed.

    torchrun --nproc-per-node 4 -m blockscale.demo.ep [--library FILE]
    python -m blockscale.demo.ep --device cpu

Every rank has its share of the experts' random NVFP4 weights.  The check computes the same tokens
with all experts on the rank itself; times are medians over calls, of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import blockscale
from blockscale.base.formats import MOE
from blockscale.ops.distributed.config import DISPATCHES

Tensor = torch.Tensor


def options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64], help="of each rank")
    parser.add_argument("--dispatch", choices=DISPATCHES, default="bf16", help="what rows go as")
    parser.add_argument("--calls", type=int, default=20, help="that are timed")
    parser.add_argument(
        "--library", type=Path, action="append", default=[], help="kernels; else built at first use"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    return parser.parse_args()


def join(device: str) -> tuple[int, int]:
    """Return rank and ranks; without torchrun, a process alone."""
    if "RANK" not in os.environ:
        return 0, 1
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return rank, ranks


def weights(args: argparse.Namespace, own: list[int], device: str) -> blockscale.MoeWeights:
    """Return prepared weights of the experts ``own``; an expert has the same ones on every rank."""
    block, found = MOE["nvfp4"].block, []
    for expert in own:
        made = torch.Generator().manual_seed(expert)

        def numbers(low: int, high: int, *shape: int, made: Any = made) -> Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=made)

        gates = 2 * args.intermediate
        found.append(
            (
                numbers(0, 256, gates, args.hidden // 2),
                numbers(0, 256, args.hidden, args.intermediate // 2),
                numbers(40, 56, gates, args.hidden // block),
                numbers(40, 56, args.hidden, args.intermediate // block),
            )
        )
    w13, w2, s13, s2 = (torch.stack(parts) for parts in zip(*found, strict=True))
    factor = torch.full((len(own),), 2.0**-6)
    prepared = blockscale.prepare_moe_weights(
        *(w13, w2), fmt="nvfp4", w13_scale=s13, w2_scale=s2,
        w13_global_scale=factor[:, None].repeat(1, 2), w2_global_scale=factor,
        layout="tiles64" if device == "cuda" else "linear", dtype=torch.bfloat16,
    )  # fmt: skip
    return prepared.to(device)


def timed(call: Any, calls: int, device: str, ranks: int) -> float:
    """Return microseconds of a call: the median of the slowest rank."""
    times = []
    for _ in range(calls):
        if ranks > 1:
            dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    slowest = torch.tensor([median(times)], device=device)
    if ranks > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    """Check and time a layer; rank 0 prints the table."""
    args = options()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    rank, ranks = join(device)
    for library in args.library:
        blockscale.load(library)
    most = max(args.tokens)
    ep = blockscale.distributed.ExpertParallel(
        *(None, args.experts, args.hidden, args.top_k, most, args.dispatch), device=device
    )
    act_fmt = ep.config.act_fmt
    mine = weights(args, list(ep.local_experts), device)
    whole = weights(args, list(range(args.experts)), device)
    table = Table(title=f"{args.experts} experts, top {args.top_k}, on {ranks} x {device}")
    for name in ("tokens a rank", "all experts here, us", f"on {ranks} ranks, us", "rows equal"):
        table.add_column(name, justify="right")
    wrong = 0
    for tokens in args.tokens:
        made = torch.Generator().manual_seed(1000 + rank)
        x = torch.randn(tokens, args.hidden, generator=made).bfloat16().to(device)
        logits = torch.randn(tokens, args.experts, generator=made).to(device)
        ids, factors = blockscale.moe_route(logits, args.top_k)
        ep.bound = tokens

        def sent(x: Tensor = x, ids: Tensor = ids, factors: Tensor = factors) -> Tensor:
            return blockscale.fused_moe(x, mine, ids, factors, act_fmt=act_fmt, ep=ep)

        def here(x: Tensor = x, ids: Tensor = ids, factors: Tensor = factors) -> Tensor:
            return blockscale.fused_moe(x, whole, ids, factors, act_fmt=act_fmt)

        y = sent()
        ep.check()
        truth = here()
        equal = torch.tensor([int((y == truth).all(1).sum())], device=device)
        if ranks > 1:
            dist.all_reduce(equal)
        wrong += tokens * ranks - int(equal)
        one = timed(here, args.calls, device, ranks)
        all_of = timed(sent, args.calls, device, ranks)
        table.add_row(
            str(tokens), f"{one:.0f}", f"{all_of:.0f}", f"{int(equal)} / {tokens * ranks}"
        )
    if rank == 0:
        Console().print(table)
    if ranks > 1:
        dist.destroy_process_group()
    if wrong and device == "cpu":
        raise SystemExit(f"Error: {wrong} rows differ from those of one rank")


if __name__ == "__main__":
    main()
