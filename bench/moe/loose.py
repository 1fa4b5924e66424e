"""What readiness counters could gain on this GPU: ``python -m bench.moe.loose``.

A kernel that does both GEMMs of an MoE layer lets GEMM 2 of some rows begin when their GEMM 1 is
done.  It gains at most what is gained where GEMM 2 waits for nothing: the two kernels of a call run
side by side, and GEMM 2 multiplies rows that an earlier call has left.  Inputs are those of
`bench.moe`, weights larger than the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench import measure
from bench.moe import cases, data
from bench.moe.ours import Ours, keep_gemms, loose_gemms

FORMAT = 1
FORMS = {"qwen3": "nvfp4", "deepseek": "nvfp4", "gpt-oss": "mxfp4"}
"""Formats of the weights, by model."""

GRAPH_US, MOST_CALLS = 3000.0, 64


@torch.no_grad()
def main(given: Sequence[str] | None = None) -> int:
    """Measure all cases; return 1 where one is wrong."""
    made = measure.parser("bench.moe.loose", __doc__)
    options = measure.parsed(made, given)
    rows = [(model, fmt) for model, fmt in cases.rows() if FORMS.get(model.key) == fmt]
    if options.names:
        print(*(cases.spec_of(model, fmt).name for model, fmt in rows))
        return 0
    if measure.refused("bench.moe.loose"):
        return 2
    session = measure.Session("moe-loose", options, FORMAT)
    measure.warm_up()
    bad = []
    for model, fmt in rows:
        weights = data.random_weights(model, fmt)
        ours = Ours(weights, session.kernels)
        for case in (c for c in cases.find(options.only) if (c.model, c.fmt) == (model, fmt)):
            found = measured(case, ours, options.replays)
            session.add(found, f"{case.name}: {found}")
            bad += [case.name] * (found["error"] > data.ROW_ERROR)
        del weights, ours
        torch.cuda.empty_cache()
    session.end()
    return measure.status("bench.moe.loose", bad)


def measured(case: cases.Case, ours: Ours, replays: int) -> dict[str, Any]:
    """Return microseconds of the GEMMs of a case, one after the other and side by side."""
    inputs = [data.random_inputs(case, ids) for ids in cases.routings(case)]
    count = measure.launches_of(case.floor_us, len(inputs), GRAPH_US, MOST_CALLS)
    pairs = [ours.pair(case, each, "") for each in inputs]
    runs = [pair.run for pair in pairs]
    runs[-1]()
    torch.cuda.synchronize()
    error = pairs[-1].error()
    graphs = {
        "in turn": measure.capture(runs, count, edit=partial(keep_gemms, count=count)),
        "side by side": measure.capture(runs, count, edit=partial(loose_gemms, count=count)),
    }
    times = measure.interleaved(graphs, replays)
    us = {name: round(timing.us, 2) for name, timing in times.items()}
    gain = round(us["in turn"] / us["side by side"], 3)
    return {"name": case.name, "tokens": case.tokens, "error": error, **us, "times as fast": gain}


if __name__ == "__main__":
    sys.exit(main())
