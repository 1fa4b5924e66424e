"""CUDA graphs of calls whose other kernels are taken out: gemm1 and gemm2 of a whole MoE layer.

One library function launches all kernels of a layer.  Captured calls are a graph; without the nodes
of sorting, permuting and combining it runs the GEMMs alone, on what an earlier whole call left in
the workspace.  The programmatic edge from gemm1 to gemm2 stays; calls follow one another by full
edges.  Through the driver's C functions, so that no bindings are needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

KERNEL = 0  # CUgraphNodeType
WORD = "gemm"
"""What the names of kernels that stay contain."""


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


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
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

    def edges(self, graph: int) -> list[tuple[int, int]]:
        """Return all edges, of any kind."""
        count = ctypes.c_size_t()
        handle, size = ctypes.c_void_p(graph), ctypes.byref(count)
        self._call("cuGraphGetEdges_v2", handle, None, None, None, size)
        starts, ends = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        data = (_EdgeData * count.value)()
        self._call("cuGraphGetEdges_v2", handle, starts, ends, data, size)
        return [(int(a or 0), int(b or 0)) for a, b in zip(starts, ends, strict=True)]

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


def in_order(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the nodes so that every edge leads forward."""
    waits = dict.fromkeys(nodes, 0)
    after: dict[int, list[int]] = {node: [] for node in nodes}
    for start, end in edges:
        waits[end] += 1
        after[start].append(end)
    ready = [node for node in nodes if not waits[node]]
    for node in ready:
        for end in after[node]:
            waits[end] -= 1
            if not waits[end]:
                ready.append(end)
    return ready


def keep_kernels(driver: Any, graph: int, wanted: Callable[[str], bool]) -> list[str]:
    """Take all other nodes out of a graph, chain those that stay; return their names in order."""
    edges = driver.edges(graph)
    kept: list[tuple[int, str]] = []
    for node in in_order(driver.nodes(graph), edges):
        name = driver.name(node)
        if name is not None and wanted(name):
            kept.append((node, name))
        else:
            driver.remove(node)
    present = set(edges)
    for (start, _), (end, _) in pairwise(kept):
        if (start, end) not in present:
            driver.connect(graph, start, end)
    return [name for _, name in kept]
