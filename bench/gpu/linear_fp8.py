"""Linear layers on 4-bit weights with FP8 rows on a GPU: right or not, and how fast.

    blockscale build --target sm_90a -o dist/fp8.so $(python -m bench.gpu.linear_fp8 --names)
    python -m bench.gpu.linear_fp8 --library dist/fp8.so --out linear-fp8.json

The first where nvcc is, the second where the GPU is (``--only nvfp4`` for both).  Roads of ours,
each a whole call of `blockscale.linear`:

* "16 bits": rows of x as they are;
* "fp8 in 16 bits": rows in E4M3 with a scale each, multiplied in 16 bits (layout "tiles64");
* "fp8": the same numbers, but an NVFP4 weight rounded to E4M3, many rows multiplied in 8 bits
  (layout "tiles64e");
* "fp8 fast": the same with ``fast_accum``; not of INT4, whose sums are those of groups.

Beside them torch's bfloat16 product, and torch._scaled_mm of E4M3 by E4M3 with scales of rows; its
rows were quantised before, and its time is that of the product alone.  Errors are those of rows, of
FP8 against products of the rounded rows (and weight).  Calls are captured in a CUDA graph, each on
another copy of the weight: each graph reads more than three times the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import blockscale as bs
from bench import measure
from bench.gpu.linear import BOUND, REPLAYS, SIZES, WEIGHTS, copies_of, microseconds
from bench.moe.data import row_scales
from bench.moe.fp8 import four_bits, quantised
from blockscale.specs import Linear

FORMAT = 3


class Kind(NamedTuple):
    """A weight's format."""

    fmt: str
    group: int
    zero: bool = False


KINDS = {
    "mxfp4": Kind("mxfp4", 32),
    "nvfp4": Kind("nvfp4", 16),
    "int4g128": Kind("int4", 128),
    "int4g128z": Kind("int4", 128, True),
    "int4g64": Kind("int4", 64),
}
ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)
ROADS = {
    "16 bits": ("tiles64", "", False),
    "fp8 in 16 bits": ("tiles64", "fp8", False),
    "fp8": ("tiles64e", "fp8", False),
    "fp8 fast": ("tiles64e", "fp8", True),
}
"""Layout of the weight, ``act_fmt`` and ``fast_accum``, by road."""

CHECKED = 64
"""Rows that are compared."""

FAST_BOUND = 1e-2
"""The same as `BOUND` with ``fast_accum``."""


def roads_of(kind: Kind) -> list[str]:
    """Return the roads that there are."""
    return [road for road, (*_, fast) in ROADS.items() if kind.fmt != "int4" or not fast]


def spec_on(kind: Kind, n: int, k: int, road: str) -> Linear:
    """Return the function of a road."""
    layout, act_fmt, fast = ROADS[road]
    return Linear(
        *(n, k, kind.fmt, "bfloat16", kind.group, kind.zero),
        layout=layout, act_fmt=act_fmt, fast_accum=fast,
    )  # fmt: skip


def weight_of(kind: Kind, n: int, k: int, device: str) -> tuple[dict[str, Any], Tensor]:
    """Return a random weight as `prepare_linear_weights` takes it, and its values [N, K]."""
    made = torch.Generator(device).manual_seed(0)
    if kind.fmt != "int4":
        values = torch.randn(n, k, generator=made, device=device, dtype=torch.bfloat16)
        packed, scale = bs.quantize(values, kind.fmt)
        given = {"packed": packed, "block_scale": scale, "fmt": kind.fmt}
        return given, bs.dequantize(packed, scale, kind.fmt, dtype=torch.float32)
    codes = torch.randint(0, 256, (n, k // 2), generator=made, device=device).to(torch.uint8)
    groups = n, k // kind.group
    scale = (torch.rand(groups, generator=made, device=device) * 0.02 + 0.005).bfloat16()
    given = {"packed": codes, "block_scale": scale, "fmt": "int4", "group_size": kind.group}
    value = torch.stack((codes & 15, codes >> 4), -1).view(*groups, kind.group).float()
    if kind.zero:
        point = torch.randint(0, 16, groups, generator=made, device=device).to(torch.uint8)
        given["zero"] = point
        value -= point[..., None].float()
    else:
        value -= 8
    return given, (value * scale[..., None].float()).view(n, k)


def options_of(road: str) -> dict[str, Any]:
    """Return what a call of a road is told."""
    _, act_fmt, fast = ROADS[road]
    return {"act_fmt": act_fmt or None, "fast_accum": fast}


def copies(weight: bs.LinearWeights) -> list[bs.LinearWeights]:
    """Return as many copies of a weight as do not fit into the L2 cache."""
    count = copies_of(weight.packed.nbytes + weight.block_scale.nbytes)
    return [
        bs.LinearWeights.of(weight.meta(), {name: t.clone() for name, t in weight.tensors()})
        for _ in range(count)
    ]


def scaled(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes of rows, and their scales [rows, 1]."""
    scale = row_scales(dense)
    return (dense.float() / scale).to(torch.float8_e4m3fn), scale


def contenders(
    x: Tensor, weights: Mapping[str, Sequence[bs.LinearWeights]], dense: Tensor
) -> dict[str, list[Any]]:
    """Return what is timed: calls, each on another copy of the weight."""
    made: dict[str, list[Any]] = {}
    for road, each in weights.items():
        made[road] = [partial(bs.linear, x, weight, **options_of(road)) for weight in each]
    count = copies_of(dense.nbytes)
    made["torch"] = [partial(functional.linear, x, dense.clone()) for _ in range(count)]
    (codes, scale), (rows, of_rows) = scaled(dense), scaled(x)
    for _ in range(copies_of(codes.nbytes)):
        other = codes.clone().t()
        call = partial(torch._scaled_mm, rows, other, scale_a=of_rows, scale_b=scale.t(),
                       out_dtype=torch.bfloat16)  # fmt: skip
        made.setdefault("_scaled_mm", []).append(call)
    return made


def measured(
    key: str, n: int, k: int, session: measure.Session, replays: int, device: str = "cuda"
) -> None:
    """Add a row of the table for each number of rows of x."""
    kind = KINDS[key]
    given, exact = weight_of(kind, n, k, device)
    dense, roads = exact.bfloat16(), roads_of(kind)
    rounded = {road for road in roads if (kind.fmt, ROADS[road][0]) == ("nvfp4", "tiles64e")}
    prepared = {
        road: bs.prepare_linear_weights(
            **given, layout=ROADS[road][0], act_fmt="fp8", rounded=road in rounded
        )
        for road in roads
    }
    weights = {road: copies(weight) for road, weight in prepared.items()}
    for rows in ROWS:
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        row: dict[str, Any] = {"weight": key, "n": n, "k": k, "rows": rows, "errors": {}}
        for road in roads:
            options = options_of(road)
            some = quantised(x[:CHECKED]) if options["act_fmt"] else x[:CHECKED]
            values = four_bits(exact) if road in rounded else exact
            want = functional.linear(some.double(), values.double())
            got = bs.linear(x, prepared[road], **options)[:CHECKED]
            row["errors"][road] = measure.row_error(got, want)
        row["right"] = all(
            error < (FAST_BOUND if ROADS[road][-1] else BOUND)
            for road, error in row["errors"].items()
        )
        if row["right"]:
            calls = contenders(x, weights, dense)
            row["us"] = {name: microseconds(each, replays) for name, each in calls.items()}
        session.add(row, line(row))


def fits(key: str, k: int) -> bool:
    """Whether K has whole groups."""
    return k % KINDS[key].group == 0


def line(row: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    head = f"{row['weight']:9} {row['n']:6} x {row['k']:6} M={row['rows']:5}"
    errors = ", ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
    if not row["right"]:
        return f"{head}  WRONG: {errors}"
    times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return f"{head}  us: {times}; errors: {errors}"


def main(given: Sequence[str] | None = None) -> int:
    """Print names, or measure; return 1 if a result is wrong."""
    parser = measure.parser("bench.gpu.linear_fp8", __doc__, REPLAYS)
    options = measure.parsed(parser, given, needed=())
    cases = {f"{key} {n}x{k}": (key, n, k) for key in KINDS for n, k in SIZES if fits(key, k)}
    chosen = [cases[name] for name in measure.chosen(cases, options.only)]
    if options.names:
        for key, n, k in chosen:
            print("\n".join(spec_on(KINDS[key], n, k, road).name for road in roads_of(KINDS[key])))
        print("\n".join(WEIGHTS))
        return 0
    if measure.refused("bench.gpu.linear_fp8"):
        return 2
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    session = measure.Session("linear-fp8", options, FORMAT, rows="rows", **about)
    torch.manual_seed(1)  # not that of weights: rows of x would be rows of the weight
    for key, n, k in chosen:
        measured(key, n, k, session, options.replays)
    wrong = [f"{row['weight']} {row['n']}x{row['k']}" for row in session.cases if not row["right"]]
    return measure.status("bench.gpu.linear_fp8", wrong)


if __name__ == "__main__":
    sys.exit(main())
