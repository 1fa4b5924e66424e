"""Linear layers on MXFP4 or NVFP4 weights with FP8 rows on a GPU: right or not, and how fast.

    blockscale build --target sm_90a -o dist/fp8.so $(python -m bench.gpu.linear_fp8 --names)
    python -m bench.gpu.linear_fp8 --library dist/fp8.so --out linear-fp8.json

The first where nvcc is, the second where the GPU is; ``--fmt nvfp4`` for both.  Roads of ours, each
a whole call of `blockscale.linear`:

* "16 bits": rows of x as they are;
* "fp8 in 16 bits": rows in E4M3 with a scale each, multiplied in 16 bits (layout "tiles64");
* "fp8": the same numbers, but an NVFP4 weight rounded to E4M3, many rows multiplied in 8 bits
  (layout "tiles64e");
* "fp8 fast": the same with ``fast_accum``.

Beside them torch's bfloat16 product, and torch._scaled_mm of E4M3 by E4M3 with scales of rows; its
rows were quantised before, and its time is that of the product alone.  Errors are those of rows, of
FP8 against products of the rounded rows (and weight).  Calls are captured in a CUDA graph, each on
another copy of the weight.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import blockscale as bs
from bench import measure
from bench.gpu.linear import BOUND, CALLS, COLD_BYTES, SIZES, microseconds
from bench.moe.fp8 import four_bits, quantised, row_scales
from blockscale.specs import Linear

FORMAT = 2
FMTS = ("mxfp4", "nvfp4")
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


def spec_on(n: int, k: int, road: str, fmt: str = FMTS[0]) -> Linear:
    """Return the function of a road."""
    layout, act_fmt, fast = ROADS[road]
    return Linear(n, k, fmt, "bfloat16", layout=layout, act_fmt=act_fmt, fast_accum=fast)


def options_of(road: str) -> dict[str, Any]:
    """Return what a call of a road is told."""
    _, act_fmt, fast = ROADS[road]
    return {"act_fmt": act_fmt or None, "fast_accum": fast}


def copies(weight: bs.LinearWeights) -> list[bs.LinearWeights]:
    """Return as many copies of a weight as do not fit into the L2 cache, `CALLS` at most."""
    count = max(1, min(CALLS, COLD_BYTES // (weight.packed.nbytes + weight.block_scale.nbytes)))
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
    count = max(1, min(CALLS, COLD_BYTES // dense.nbytes))
    made["torch"] = [partial(functional.linear, x, dense.clone()) for _ in range(count)]
    (codes, scale), (rows, of_rows) = scaled(dense), scaled(x)
    for _ in range(max(1, min(CALLS, COLD_BYTES // codes.nbytes))):
        other = codes.clone().t()
        call = partial(torch._scaled_mm, rows, other, scale_a=of_rows, scale_b=scale.t(),
                       out_dtype=torch.bfloat16)  # fmt: skip
        made.setdefault("_scaled_mm", []).append(call)
    return made


def measured(
    n: int, k: int, session: measure.Session, fmt: str = FMTS[0], device: str = "cuda"
) -> None:
    """Add a row of the table for each number of rows of x."""
    made = torch.Generator(device).manual_seed(0)
    values = torch.randn(n, k, generator=made, device=device, dtype=torch.bfloat16)
    packed, scale = bs.quantize(values, fmt)
    dense = bs.dequantize(packed, scale, fmt, dtype=torch.bfloat16)
    rounded = {road: (fmt, layout) == ("nvfp4", "tiles64e") for road, (layout, *_) in ROADS.items()}
    prepared = {
        road: bs.prepare_linear_weights(
            packed, scale, fmt=fmt, layout=layout, act_fmt="fp8", rounded=rounded[road]
        )
        for road, (layout, *_) in ROADS.items()
    }
    weights = {road: copies(weight) for road, weight in prepared.items()}
    for rows in ROWS:
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        row: dict[str, Any] = {"n": n, "k": k, "rows": rows, "errors": {}}
        for road in ROADS:
            options = options_of(road)
            some = quantised(x[:CHECKED]) if options["act_fmt"] else x[:CHECKED]
            values = four_bits(dense.float()) if rounded[road] else dense
            want = functional.linear(some.double(), values.double())
            got = bs.linear(x, prepared[road], **options)[:CHECKED]
            row["errors"][road] = measure.row_error(got, want)
        row["right"] = all(
            error < (FAST_BOUND if ROADS[road][-1] else BOUND)
            for road, error in row["errors"].items()
        )
        if row["right"]:
            calls = contenders(x, weights, dense)
            row["us"] = {name: microseconds(each) for name, each in calls.items()}
        session.add(row, line(row))


def line(row: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    head = f"{row['n']:6} x {row['k']:6} M={row['rows']:5}"
    errors = ", ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
    if not row["right"]:
        return f"{head}  WRONG: {errors}"
    times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return f"{head}  us: {times}; errors: {errors}"


def main(given: Sequence[str] | None = None) -> int:
    """Print names, or measure; return 1 if a result is wrong."""
    parser = measure.parser("bench.gpu.linear_fp8", __doc__)
    parser.add_argument("--fmt", choices=FMTS, default=FMTS[0], help="of the weight")
    options = measure.parsed(parser, given, needed=())
    sizes = {f"{n}x{k}": (n, k) for n, k in SIZES}
    chosen = [sizes[name] for name in measure.chosen(sizes, options.only)]
    if options.names:
        made = [spec_on(n, k, road, options.fmt).name for n, k in chosen for road in ROADS]
        print("\n".join(made))
        return 0
    if measure.refused("bench.gpu.linear_fp8"):
        return 2
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about["fmt"] = options.fmt
    session = measure.Session("linear-fp8", options, FORMAT, rows="rows", **about)
    torch.manual_seed(1)  # not that of weights: rows of x would be rows of the weight
    for n, k in chosen:
        measured(n, k, session, options.fmt)
    wrong = [f"{row['n']}x{row['k']}" for row in session.cases if not row["right"]]
    return measure.status("bench.gpu.linear_fp8", wrong)


if __name__ == "__main__":
    sys.exit(main())
