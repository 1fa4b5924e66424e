"""Linear layers on a GPU: right or not, and how fast next to torch's bfloat16 product.

    blockscale build --target sm_90a -o dist/linear-sm90a.so $(python -m bench.gpu.linear --names)
    python -m bench.gpu.linear --library dist/linear-sm90a.so --out linear.json

The first where nvcc is, the second where the GPU is.  Calls are captured in a CUDA graph, each on
another copy of the weight, so that no weight comes from the L2 cache.  A case that is wrong is not
timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import blockscale as bs
from bench import measure
from blockscale.specs import Linear

FORMAT = 1
COLD_BYTES = 200 << 20
"""Copies of a weight are as large together: four times the L2 cache of an H200."""

CALLS, REPLAYS = 40, 15
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
BOUND = 5e-3
"""Relative error of a row: results are rounded to bfloat16."""

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


CASES = (
    *(Case(n, k, fmt) for fmt in ("nvfp4", "mxfp4") for n, k in SIZES),
    *(Case(n, k, "int4", 128 if k % 128 == 0 else 64) for n, k in SIZES),
)


def weight_of(case: Case, seed: int) -> tuple[bs.LinearWeights, torch.Tensor]:
    """Return a prepared weight, and its values [N, K] in bfloat16, global scale applied."""
    made = torch.Generator("cuda").manual_seed(seed)
    n, k = case.n, case.k
    if case.fmt != "int4":
        values = torch.randn(n, k, generator=made, device="cuda", dtype=torch.bfloat16)
        packed, scale = bs.quantize(values, case.fmt)
        return (
            bs.prepare_linear_weights(packed, scale, fmt=case.fmt),
            bs.dequantize(packed, scale, case.fmt, dtype=torch.bfloat16),
        )
    codes = torch.randint(0, 256, (n, k // 2), generator=made, device="cuda").to(torch.uint8)
    scale = torch.rand((n, k // case.group), generator=made, device="cuda") * 0.02 + 0.005
    scale = scale.bfloat16()
    weight = bs.prepare_linear_weights(codes, scale, fmt="int4", group_size=case.group)
    plain = torch.stack((codes & 15, codes >> 4), -1).view(n, -1, case.group).float() - 8
    return weight, (plain * scale.float()[..., None]).view(n, k).bfloat16()


def measured(case: Case, session: measure.Session) -> None:
    """Add a row of the table for each number of rows."""
    weight, dense = weight_of(case, 0)
    held = weight.packed.nbytes + weight.block_scale.nbytes
    weights = [weight] + [weight.to("cuda") for _ in range(min(CALLS, COLD_BYTES // held))]
    weights = [
        bs.LinearWeights.of(w.meta(), {n: t.clone() for n, t in w.tensors()}) for w in weights
    ]
    denses = [dense.clone() for _ in range(max(1, min(CALLS, COLD_BYTES // dense.nbytes)))]
    for rows in ROWS:
        x = torch.randn(rows, case.k, device="cuda", dtype=torch.bfloat16)
        want = functional.linear(x.double(), dense.double()) if rows <= 256 else None
        if want is None:
            torch.backends.cuda.matmul.allow_tf32 = False
            want = functional.linear(x.float(), dense.float())
        row: dict[str, Any] = {"kernel": case.spec.name, "rows": rows}
        row["error"] = measure.row_error(bs.linear(x, weight), want)
        row["right"] = row["error"] < BOUND
        if row["right"]:
            row["us"] = microseconds([partial(bs.linear, x, each) for each in weights])
            row["torch_us"] = microseconds([partial(functional.linear, x, d) for d in denses])
            row["floor_us"] = (held + 2 * rows * (case.n + case.k)) / BYTES_A_US
        session.add(row, line(row))


def microseconds(calls: list[Any]) -> float:
    """Return the median time of a call; ``calls`` follow each other in a graph."""
    return measure.capture(calls, CALLS).median_us(REPLAYS)


def line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    head = f"{row['kernel']:44} M={row['rows']:5}  error {row['error']:.1e}"
    if not row["right"]:
        return f"{head}  WRONG"
    said = (
        f"{row['us']:8.1f} us  torch {row['torch_us']:8.1f} us  x{row['torch_us'] / row['us']:.2f}"
    )
    return f"{head}  {said}  {row['floor_us'] / row['us']:.0%} of the bytes' speed"


def main(given: Sequence[str] | None = None) -> int:
    """Print names, or measure; return 1 if a result is wrong."""
    options = measure.parsed(measure.parser("bench.gpu.linear", __doc__), given, needed=())
    cases = {case.spec.name: case for case in CASES}
    if options.names:
        print("\n".join(cases))
        return 0
    if measure.refused("bench.gpu.linear"):
        return 2
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    session = measure.Session("linear", options, FORMAT, rows="rows", **about)
    torch.manual_seed(0)
    for name in measure.chosen(cases, options.only):
        measured(cases[name], session)
    return measure.status(
        "bench.gpu.linear", [r["kernel"] for r in session.cases if not r["right"]]
    )


if __name__ == "__main__":
    sys.exit(main())
