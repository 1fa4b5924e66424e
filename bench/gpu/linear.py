"""Linear layers on a GPU: right or not, and how fast beside torch's bfloat16 product and others.

    blockscale build --target sm_90a -o dist/linear-sm90a.so $(python -m bench.gpu.linear --names)
    python -m bench.gpu.linear --library dist/linear-sm90a.so --out linear.json

The first where nvcc is, the second where the GPU is.  Calls are captured in a CUDA graph, each on
another copy of the weight: each graph reads more than three times the L2 cache.  A case that is
wrong is not timed.  The others are those of `bench.peers.linear` that are installed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import blockscale as bs
from bench import measure
from bench.peers.linear import PEERS, Humming, Weight
from blockscale.demo.timing import versions
from blockscale.specs import Linear

FORMAT = 2
OURS, TORCH = "blockscale", "torch"
CALLS, REPLAYS = 40, 15
WARM_S = 0.03
"""Seconds of copies before each row: clocks fall while a weight is prepared."""

FEWER, FEWER_FROM = 10, 512
"""Calls in a graph, at least, of so many rows and more, each of which takes long."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
BOUND, OTHERS_BOUND = 5e-3, 1e-2
"""Relative error of a row, ours and others': results are rounded to bfloat16."""

BYTES_A_US = 4.3e6
"""What an H200's memory gives."""

SIZES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096)),
    *((8192, 8192), (7168, 2048), (2880, 2880), (512, 7168)),
)


class Case(NamedTuple):
    """A weight."""

    n: int
    k: int
    fmt: str
    group: int = 0

    @property
    def spec(self) -> Linear:
        """What is built."""
        return Linear(self.n, self.k, self.fmt, "bfloat16", self.group, layout="tiles64")


WEIGHTS = (
    *("quantize_nvfp4_bf16", "quantize_mxfp4_bf16"),
    *("dequantize_nvfp4_bf16", "dequantize_mxfp4_bf16"),
)
"""What makes weights of random values."""

CASES = (
    *(Case(n, k, fmt) for fmt in ("nvfp4", "mxfp4") for n, k in SIZES),
    *(Case(n, k, "int4", 128 if k % 128 == 0 else 64) for n, k in SIZES),
)


def weight_of(case: Case, seed: int) -> Weight:
    """Return a random weight."""
    made = torch.Generator("cuda").manual_seed(seed)
    n, k = case.n, case.k
    if case.fmt != "int4":
        values = torch.randn(n, k, generator=made, device="cuda", dtype=torch.bfloat16)
        packed, scale = bs.quantize(values, case.fmt)
        dense = bs.dequantize(packed, scale, case.fmt, dtype=torch.bfloat16)
        return Weight(case.fmt, k // scale.shape[1], packed, scale, dense)
    codes = torch.randint(0, 256, (n, k // 2), generator=made, device="cuda").to(torch.uint8)
    scale = torch.rand((n, k // case.group), generator=made, device="cuda") * 0.02 + 0.005
    scale = scale.bfloat16()
    plain = torch.stack((codes & 15, codes >> 4), -1).view(n, -1, case.group).float() - 8
    dense = (plain * scale.float()[..., None]).view(n, k).bfloat16()
    return Weight("int4", case.group, codes, scale, dense)


def copies_of(held: int) -> int:
    """Return how many weights of so many bytes are more than the L2 cache holds, three times."""
    return measure.cold_sets(held, measure.l2_bytes())


def ours(weight: Weight, x: Tensor, copies: int) -> list[Callable[[], Tensor]]:
    """Return calls of ours, each on another copy of the weight."""
    group = weight.group if weight.fmt == "int4" else None
    given = weight.packed, weight.block_scale
    first = bs.prepare_linear_weights(*given, fmt=weight.fmt, group_size=group)
    more = [
        bs.LinearWeights.of(first.meta(), {name: t.clone() for name, t in first.tensors()})
        for _ in range(copies - 1)
    ]
    return [partial(bs.linear, x, each) for each in (first, *more)]


class Bench:
    """All contenders on one weight."""

    def __init__(self, case: Case, replays: int) -> None:
        self.case, self.replays, self.weight = case, replays, weight_of(case, 0)
        self.held = self.weight.packed.nbytes + self.weight.block_scale.nbytes
        self.copies = copies_of(self.held)
        dense = self.weight.dense
        self.denses = [dense.clone() for _ in range(copies_of(dense.nbytes))]
        self.contenders: dict[str, Callable[[Tensor, int], list[Callable[[], Tensor]]]] = {
            OURS: partial(ours, self.weight)
        }
        self.failed: dict[str, str] = {}
        for peer in PEERS:
            if peer.missing():
                continue
            try:
                self.contenders[peer.name] = peer(self.weight).calls
            except Exception as error:  # of another's code: the rest is measured all the same
                self._fails(peer.name, error)

    def _fails(self, name: str, error: Exception) -> None:
        traceback.print_exception(error)
        self.failed[name] = measure.describe(error)

    def row(self, rows: int) -> dict[str, Any]:
        """Return one row of the table."""
        case, dense = self.case, self.weight.dense
        x = torch.randn(rows, case.k, device=dense.device, dtype=torch.bfloat16)
        torch.backends.cuda.matmul.allow_tf32 = False
        kind = torch.float64 if rows <= 256 else torch.float32
        want = functional.linear(x.to(kind), dense.to(kind))
        least = CALLS if rows < FEWER_FROM else FEWER
        graphs: dict[str, measure.Captured] = {}
        errors: dict[str, float] = {}
        for name, make in self.contenders.items():
            try:
                calls = make(x, self.copies)
                errors[name] = measure.row_error(calls[0](), want)
                if errors[name] < (BOUND if name == OURS else OTHERS_BOUND):
                    launches = measure.whole_turns(least, len(calls))
                    graphs[name] = measure.capture(calls, launches)
            except Exception as failure:  # of another's code, or of ours: said in the results
                self._fails(f"{name}, {rows} rows", failure)
        denses = [partial(functional.linear, x, each) for each in self.denses]
        graphs[TORCH] = measure.capture(denses, measure.whole_turns(least, len(denses)))
        measure.warm_up(WARM_S)
        us = {name: each.us for name, each in measure.interleaved(graphs, self.replays).items()}
        others = [name for name in errors if name != OURS]
        return {
            "kernel": case.spec.name,
            "rows": rows,
            "right": OURS in us,
            "error": errors.pop(OURS, None),
            "us": us.get(OURS),
            "torch_us": us[TORCH],
            "floor_us": (self.held + 2 * rows * (case.n + case.k)) / BYTES_A_US,
            "peers": {name: us.get(name) for name in others},
            "errors": errors,
        }


def microseconds(calls: list[Any], replays: int) -> float:
    """Return the median time of a call; ``calls`` follow each other in a graph."""
    return measure.capture(calls, measure.whole_turns(CALLS, len(calls))).median_us(replays)


def line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    head = f"{row['kernel']:44} M={row['rows']:5}  "
    if not row["right"]:
        return f"{head}WRONG, or failed: error {row['error']}"
    head += f"error {row['error']:.1e}"
    said = (
        f"{row['us']:8.1f} us  torch {row['torch_us']:8.1f} us  x{row['torch_us'] / row['us']:.2f}"
    )
    for name, time in row["peers"].items():
        said += f"  {name} " + (f"{time:.1f} us x{time / row['us']:.2f}" if time else "WRONG")
    return f"{head}  {said}  {row['floor_us'] / row['us']:.0%} of the bytes' speed"


def main(given: Sequence[str] | None = None) -> int:
    """Print names, or measure; return 1 if a result is wrong."""
    parser = measure.parser("bench.gpu.linear", __doc__, REPLAYS)
    options = measure.parsed(parser, given, needed=())
    cases = {case.spec.name: case for case in CASES}
    if options.names:
        print("\n".join((*cases, *WEIGHTS)))
        return 0
    if measure.refused("bench.gpu.linear"):
        return 2
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    found = versions({peer.package: peer.package for peer in PEERS if not peer.missing()})
    peers = {peer.name: peer.of + found[peer.package] for peer in PEERS if peer.package in found}
    about["cache_multiple"] = str(measure.CACHES)
    session = measure.Session("linear", options, FORMAT, rows="rows", peers=peers, **about)
    torch.manual_seed(0)
    if not Humming.missing():
        Humming.compile_all(
            (case.fmt, case.n, case.k, case.spec.group, rows)
            for case in (cases[name] for name in measure.chosen(cases, options.only))
            for rows in ROWS
        )
        session.note("compiled", Humming.name)
    failed: dict[str, str] = {}
    for name in measure.chosen(cases, options.only):
        bench = Bench(cases[name], options.replays)
        for rows in ROWS:
            row = bench.row(rows)
            session.add(row, line(row))
        failed |= {f"{name}, {which}": why for which, why in bench.failed.items()}
    session.note("failed", failed)
    return measure.status(
        "bench.gpu.linear", [r["kernel"] for r in session.cases if not r["right"]]
    )


if __name__ == "__main__":
    sys.exit(main())
