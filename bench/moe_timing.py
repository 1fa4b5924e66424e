"""Times of MoE calls: CUDA graphs of consecutive calls whose weights no cache holds."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench import moe_graph
from bench.gpu_timing import Captured
from bench.moe_cases import Case

GRAPH_US = 1500.0  # a replay takes at least about so long
MOST_CALLS = 256
Call = Callable[[], object]


def calls_of(case: Case, turns: int) -> int:
    """Return a multiple of ``turns``: the calls of one graph."""
    return turns * max(1, min(MOST_CALLS // turns, math.ceil(GRAPH_US / case.floor_us / turns)))


def capture(calls: Sequence[Call], count: int, *, gemms: bool = False) -> Captured:
    """Return the graph of ``count`` calls in turns, after a replay.

    Args:
        calls: run once each before, so that whatever they compile or leave behind is there.
        count: calls of the graph.
        gemms: take out all kernels that are no GEMMs.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    gc.disable()  # torch.cuda.graph collects garbage before, which takes 0.1 s a graph
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(count):
                calls[number % len(calls)]()
        finally:
            graph.capture_end()
            gc.enable()
    if gemms:
        _keep_gemms(graph, count)
    graph.instantiate()
    captured = Captured(graph, count, len(calls), calls)
    captured.replay_us()
    return captured


def _keep_gemms(graph: Any, count: int) -> None:
    names = moe_graph.keep_kernels(
        moe_graph.Driver(), graph.raw_cuda_graph(), lambda name: moe_graph.WORD in name
    )
    if len(names) != 2 * count:
        raise RuntimeError(
            f"bench: {count} calls have {len(names)} kernels with {moe_graph.WORD!r} in their "
            f"names ({sorted(set(names))}), not two each; correct moe_graph.WORD"
        )
