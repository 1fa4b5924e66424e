"""INT4 products on a GPU: right or not, and how fast next to torch's bfloat16 matmul.

    blockscale build --target sm_90a -o dist/int4-sm90a.so $(python -m bench.int4 --names)
    python -m bench.int4 --library dist/int4-sm90a.so --out int4.json

The first where nvcc is, the second where the GPU is.  Calls are captured in a CUDA graph, each on
another copy of the weight: each graph reads more than three times the L2 cache.  A case that is
wrong is not timed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import blockscale as bs
from bench import measure
from bench.gpu.linear import REPLAYS, copies_of, microseconds
from blockscale.specs.int4 import TILES, Int4Mm

FORMAT = 1
ROWS = (1, 16, 64, 256, 4096)
BOUND = {torch.bfloat16: 6e-3, torch.float16: 2e-3}
"""Relative error of a row: weights and results are rounded to 16 bits, 2^-9 and 2^-12 at most."""


class Case(NamedTuple):
    """A weight, and how it is used."""

    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    zero: str = "none"
    activation: str = "a16"
    pre: bool = False
    experts: int = 0
    group: int = 128

    @property
    def spec(self) -> Int4Mm:
        """What is built."""
        name = str(self.dtype).removeprefix("torch.")
        return Int4Mm(
            *(self.n, self.k, self.group, name, name, self.experts, TILES, self.activation),
            *(self.zero, self.pre),
        )


CASES = (
    Case(4096, 4096),
    Case(14336, 4096),
    Case(28672, 4096),
    Case(4096, 14336),
    Case(4096, 4096, zero="point"),
    Case(4096, 4096, torch.float16, zero="term"),
    Case(4096, 4096, activation="a8", pre=True),
    Case(4096, 4096, group=32),
    Case(2048, 2048, experts=8),
)


def weight_of(case: Case, seed: int) -> tuple[Any, torch.Tensor]:
    """Return a prepared weight, and its values [E, K, N] float32, with zeros and alpha applied."""
    made = torch.Generator("cuda").manual_seed(seed)
    e, groups = max(1, case.experts), case.k // case.group
    shape = e, groups, case.n
    packed = torch.randint(0, 256, (e, case.k, case.n // 2), generator=made, device="cuda")
    scale = torch.rand(shape, generator=made, device="cuda") * 0.02 + 0.005
    zero = None
    if case.zero == "point":
        zero = torch.randint(0, 17, shape, generator=made, device="cuda")
    elif case.zero == "term":
        zero = torch.randn(shape, generator=made, device="cuda") * 0.02
    pre = None
    if case.pre:
        pre = (torch.rand(case.k, generator=made, device="cuda") + 0.5).to(case.dtype)
    parts: list[Any] = [packed.to(torch.uint8), scale.to(case.dtype), zero]
    if not case.experts:
        parts = [part if part is None else part[0] for part in parts]
    packed, scale, zero = parts
    values = bs.int4.dequantize(packed, scale, zero, group_size=case.group, dtype=torch.float32)
    weight = bs.int4.prepare(
        *(packed, scale, zero),
        group_size=case.group,
        activation=case.activation,
        pre_quant_scale=pre,
        dtype=case.dtype,
    )
    return weight, values.view(e, case.k, case.n)


def offsets_of(case: Case, rows: int) -> torch.Tensor | None:
    """Return the rows of each expert: unequal, one with none."""
    if not case.experts:
        return None
    cuts = [rows * i * i // (case.experts - 1) ** 2 for i in range(case.experts)]
    return torch.tensor([*cuts, rows], dtype=torch.int32, device="cuda")


def call(x: torch.Tensor, weight: Any, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return the product."""
    if offsets is None:
        return bs.int4.linear(x, weight)
    return bs.int4.grouped_mm(x, weight, offsets=offsets)


def error_of(case: Case, rows: int, weight: Any, values: torch.Tensor) -> float:
    """Return the largest relative error of a row against float64."""
    x = torch.randn(rows, case.k, device="cuda").to(case.dtype)
    offsets = offsets_of(case, rows)
    got = call(x, weight, offsets)
    if weight.pre_quant_scale is not None:
        x = x * weight.pre_quant_scale[0]
    if case.activation == "a8":
        x = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    ends = [0, rows] if offsets is None else offsets.tolist()
    parts = [slice(start, end) for start, end in pairwise(ends)]
    want = [x[part].double() @ value.double() for part, value in zip(parts, values, strict=True)]
    return measure.row_error(got, torch.cat(want))


def measured(case: Case, session: measure.Session, replays: int) -> None:
    """Add a row of the table for each number of rows."""
    weight, values = weight_of(case, 0)
    copies = copies_of(weight.packed.nbytes)
    weights = [weight] + [weight_of(case, i)[0] for i in range(1, copies)]
    dense = values.to(case.dtype)
    many = 0 if case.experts else copies_of(dense.nbytes)
    denses = [dense[0].clone() for _ in range(many)]
    for rows in ROWS:
        row: dict[str, Any] = {"kernel": case.spec.name, "rows": rows}
        row["error"] = error_of(case, rows, weight, values)
        row["right"] = row["error"] < BOUND[case.dtype]
        if row["right"]:
            x = torch.randn(rows, case.k, device="cuda").to(case.dtype)
            offsets = offsets_of(case, rows)
            calls = [partial(call, x, each, offsets) for each in weights]
            row["us"] = microseconds(calls, replays)
            if denses:
                calls = [partial(torch.matmul, x, d) for d in denses]
                row["torch_us"] = microseconds(calls, replays)
        session.add(row, line(row))


def line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    head = f"{row['kernel']:52} M={row['rows']:5}  error {row['error']:.1e}"
    if not row["right"]:
        return f"{head}  WRONG"
    said = f"{head}  {row['us']:8.1f} us"
    if "torch_us" in row:
        said += f"  torch {row['torch_us']:8.1f} us  x{row['torch_us'] / row['us']:.2f}"
    return said


def main(given: Sequence[str] | None = None) -> int:
    """Print names, or measure; return 1 if a result is wrong."""
    options = measure.parsed(measure.parser("bench.int4", __doc__, REPLAYS), given, needed=())
    cases = {case.spec.name: case for case in CASES}
    if options.names:
        print("\n".join(cases))
        return 0
    if measure.refused("bench.int4"):
        return 2
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    session = measure.Session("int4", options, FORMAT, rows="rows", **about)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    for name in measure.chosen(cases, options.only):
        measured(cases[name], session, options.replays)
    return measure.status("bench.int4", [r["kernel"] for r in session.cases if not r["right"]])


if __name__ == "__main__":
    sys.exit(main())
