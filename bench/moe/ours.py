"""Our MoE layer in `bench.moe`: the whole layer, and its GEMMs alone.

One library function launches all kernels of a layer.  Captured calls are a graph; without the nodes
of sorting, permuting and combining it runs the GEMMs alone, on what an earlier whole call left in
the workspace.  The programmatic edge from gemm1 to gemm2 stays; calls follow one another by full
edges.  Through the driver's C functions, so that no bindings are needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any

import torch

from bench.measure import bound, row_error
from bench.moe import data
from bench.moe.cases import GROUP, Case, spec_of
from bench.moe.data import Inputs, Pair, Weights

KERNEL = 0  # CUgraphNodeType
WORD = "gemm"
"""What the names of kernels that stay contain."""


class Ours:
    """Our function on one layer; ValueError if the libraries lack it."""

    variants = ("",)

    def __init__(self, weights: Weights, kernels: Mapping[str, Any]) -> None:
        from blockscale import prepare_moe_weights

        model = weights.model
        self.weights = weights
        self.spec = spec_of(model, weights.fmt)
        if self.spec.name not in kernels:
            raise ValueError(f"no given library has {self.spec.name}")
        self.kernel = kernels[self.spec.name]
        self.prepared = prepare_moe_weights(
            *(weights.w13, weights.w2),
            fmt=weights.fmt,
            w13_scale=weights.w13_scale,
            w2_scale=weights.w2_scale,
            w13_global_scale=weights.w13_global,
            w2_global_scale=weights.w2_global,
            activation=model.activation,
            group_size=GROUP[weights.fmt],
            dtype=torch.bfloat16,
        )

    def pair(self, case: Case, inputs: Inputs, variant: str) -> Pair:
        """Return a call of the whole layer with a workspace and a result of its own."""
        out = torch.full_like(inputs.x, float("nan"))
        size = self.spec.workspace_bytes(case.tokens)
        given = {
            "hidden": inputs.x,
            "topk_ids": inputs.ids.to(torch.int32),
            "topk_weights": inputs.weights,
            "out": out,
            "workspace": torch.zeros(size, dtype=torch.uint8, device=inputs.x.device),
        }
        names = {param.name for param in self.kernel.params}
        for name in ("w13", "w13_scale", "w13_global", "w2", "w2_scale", "w2_global"):
            if name in names:
                given[name] = getattr(self.prepared, name)
        arguments = bound(self.kernel, given)

        def error() -> float:
            return max(
                row_error(out[token], data.layer_of(self.weights, inputs, token))
                for token in data.some(case.tokens)
            )

        return Pair(lambda: self.kernel(*arguments), error)


# ---- GEMMs alone --------------------------------------------------------------------------------


class _Params(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of version 2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Driver:
    """The driver's graph functions, by node handles as integers."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            raise RuntimeError(f"bench: {name} failed with CUresult {code}")

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes."""
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        found = (ctypes.c_void_p * count.value)()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(count))
        return [int(node or 0) for node in found]

    def edges(self, graph: int) -> dict[tuple[int, int], bytes]:
        """Return all edges, of any kind, and their CUgraphEdgeData."""
        count = ctypes.c_size_t()
        handle, size = ctypes.c_void_p(graph), ctypes.byref(count)
        self._call("cuGraphGetEdges_v2", handle, None, None, None, size)
        starts, ends = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        data_of_edges = (ctypes.c_ubyte * 8 * count.value)()  # CUgraphEdgeData
        self._call("cuGraphGetEdges_v2", handle, starts, ends, data_of_edges, size)
        return {
            (int(a or 0), int(b or 0)): bytes(data)
            for a, b, data in zip(starts, ends, data_of_edges, strict=True)
        }

    def disconnect(self, graph: int, start: int, end: int) -> None:
        """Remove an edge."""
        data = self.edges(graph)[start, end]
        self._call(
            "cuGraphRemoveDependencies_v2",
            *(ctypes.c_void_p(graph), ctypes.byref(ctypes.c_void_p(start))),
            *(ctypes.byref(ctypes.c_void_p(end)), data, ctypes.c_size_t(1)),
        )

    def name(self, node: int) -> str | None:
        """Return the kernel's name; None of a node that is no kernel."""
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != KERNEL:
            return None
        params = _Params()
        self._call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
        text = ctypes.c_char_p()
        if params.func:
            self._call("cuFuncGetName", ctypes.byref(text), ctypes.c_void_p(params.func))
        else:
            self._call("cuKernelGetName", ctypes.byref(text), ctypes.c_void_p(params.kern))
        return (text.value or b"").decode()

    def remove(self, node: int) -> None:
        """Remove a node and its edges."""
        self._call("cuGraphDestroyNode", ctypes.c_void_p(node))

    def connect(self, graph: int, start: int, end: int) -> None:
        """Add a full edge."""
        self._call(
            "cuGraphAddDependencies_v2",
            *(ctypes.c_void_p(graph), ctypes.byref(ctypes.c_void_p(start))),
            *(ctypes.byref(ctypes.c_void_p(end)), None, ctypes.c_size_t(1)),
        )


def keep_kernels(driver: Any, graph: int, wanted: Callable[[str], bool]) -> list[tuple[int, str]]:
    """Take all other nodes out of a graph, chain those that stay; return these in order."""
    edges = driver.edges(graph)
    order = TopologicalSorter(dict.fromkeys(driver.nodes(graph), ()))
    for start, end in edges:
        order.add(end, start)
    kept: list[tuple[int, str]] = []
    for node in order.static_order():
        name = driver.name(node)
        if name is not None and wanted(name):
            kept.append((node, name))
        else:
            driver.remove(node)
    present = set(edges)
    for (start, _), (end, _) in pairwise(kept):
        if (start, end) not in present:
            driver.connect(graph, start, end)
    return kept


def keep_gemms(graph: Any, count: int) -> list[int]:
    """Take out of a captured graph of ``count`` calls all kernels that are no GEMMs."""
    kept = keep_kernels(Driver(), graph.raw_cuda_graph(), lambda name: WORD in name)
    if len(kept) != 2 * count:
        raise RuntimeError(
            f"bench: {count} calls have {len(kept)} kernels with {WORD!r} in their "
            f"names ({sorted({name for _, name in kept})}), not two each; correct ours.WORD"
        )
    return [node for node, _ in kept]


def loose_gemms(graph: Any, count: int) -> None:
    """The same, and GEMM 2 of a call waits for the call before, not for its own GEMM 1."""
    driver, raw = Driver(), graph.raw_cuda_graph()
    kept = keep_gemms(graph, count)
    calls = list(zip(kept[::2], kept[1::2], strict=True))
    for first, second in calls:
        driver.disconnect(raw, first, second)
    for (first, second), later in pairwise(calls):
        for start, end in ((first, later[0]), (first, later[1]), (second, later[1])):
            driver.connect(raw, start, end)
