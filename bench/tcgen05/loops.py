"""Loops of a control-flow graph: what belongs to one, and the way through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import networkx as nx

Followers = Sequence[Sequence[int]]


def innermost(followers: Followers, wanted: Callable[[set[int]], bool]) -> list[set[int]]:
    """Return the loops whose nodes are wanted and that hold no smaller loop of which that holds."""
    graph = nx.DiGraph(dict(enumerate(followers)))
    found: list[set[int]] = []
    todo = _cycles(graph, wanted)
    while todo:
        nodes = todo.pop()
        body = graph.subgraph(nodes).copy()
        body.remove_edges_from([*body.in_edges(header(nodes, followers))])
        inner = _cycles(body, wanted)
        todo += inner
        if not inner:
            found.append(nodes)
    return sorted(found, key=min)


def _cycles(graph: nx.DiGraph, wanted: Callable[[set[int]], bool]) -> list[set[int]]:
    parts = nx.strongly_connected_components(graph)
    return [
        p for p in parts if (len(p) > 1 or nx.number_of_selfloops(graph.subgraph(p))) and wanted(p)
    ]


def header(nodes: set[int], followers: Followers) -> int:
    """Return where a loop is entered."""
    entries = [n for i, after in enumerate(followers) if i not in nodes for n in after]
    return min((n for n in entries if n in nodes), default=min(nodes))


def best_path(
    nodes: set[int],
    start: int,
    ends: set[int],
    followers: Followers,
    worth: Callable[[int], int],
) -> list[int]:
    """Return the way from start to one of the ends that is worth most; of equals the shortest."""
    graph = nx.DiGraph(dict(enumerate(followers))).subgraph(nodes)
    order = list(nx.dfs_postorder_nodes(graph, start))
    place = {node: i for i, node in enumerate(order)}
    best: dict[int, tuple[tuple[int, int], list[int]]] = {}
    for node in order:  # ends first; an edge to a later node closes a cycle
        after = [n for n in followers[node] if place.get(n, len(order)) < place[node]]
        ways = [best[n] for n in after if n in best]
        if node in ends:
            ways.append(((0, 0), []))
        if ways:
            (value, length), path = max(ways, key=lambda way: way[0])
            best[node] = (value + worth(node), length - 1), [node, *path]
    return best[start][1] if start in best else []
