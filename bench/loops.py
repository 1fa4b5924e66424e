"""Loops of a control-flow graph: what belongs to one, and the way through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Followers = Sequence[Sequence[int]]


def innermost(followers: Followers, wanted: Callable[[set[int]], bool]) -> list[set[int]]:
    """Return the loops whose nodes are wanted and that hold no smaller loop of which that holds."""
    found: list[set[int]] = []
    todo = _wanted_cycles(set(range(len(followers))), followers, set(), wanted)
    while todo:
        nodes = todo.pop()
        inner = _wanted_cycles(nodes, followers, {header(nodes, followers)}, wanted)
        todo += inner
        if not inner:
            found.append(nodes)
    return sorted(found, key=min)


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
    order, forward = _without_back_edges(nodes, start, followers)
    best: dict[int, tuple[int, int]] = {}
    following: dict[int, int | None] = {}
    for node in order:  # ends first
        choices: list[tuple[tuple[int, int], int | None]] = [
            (best[n], n) for n in forward[node] if n in best
        ]
        if node in ends:
            choices.append(((0, 0), None))
        if choices:
            (value, length), following[node] = max(choices, key=lambda choice: choice[0])
            best[node] = (value + worth(node), length - 1)
    path: list[int] = []
    at = start if start in best else None
    while at is not None:
        path.append(at)
        at = following[at]
    return path


def _wanted_cycles(
    nodes: set[int], followers: Followers, cut: set[int], wanted: Callable[[set[int]], bool]
) -> list[set[int]]:
    return [part for part in _cycles(nodes, followers, cut) if wanted(part)]


def _cycles(nodes: set[int], followers: Followers, cut: set[int]) -> Iterator[set[int]]:
    """Yield the strongly connected parts of nodes when no edge leads to ``cut`` (Tarjan)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    work: list[tuple[int, Iterator[int]]] = []

    def enter(node: int) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        on_stack.add(node)
        work.append((node, iter([n for n in followers[node] if n in nodes and n not in cut])))

    def leave(node: int) -> set[int]:
        part: set[int] = set()
        while node not in part:
            part.add(stack.pop())
        on_stack.difference_update(part)
        return part

    for root in sorted(nodes):
        if root not in number:
            enter(root)
        while work:
            at, rest = work[-1]
            following = next(rest, None)
            if following is not None:
                if following not in number:
                    enter(following)
                elif following in on_stack:
                    low[at] = min(low[at], number[following])
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[at])
            if low[at] == number[at]:
                part = leave(at)
                if len(part) > 1 or (at in followers[at] and at not in cut):
                    yield part


def _without_back_edges(
    nodes: set[int], start: int, followers: Followers
) -> tuple[list[int], dict[int, list[int]]]:
    """Return the nodes in postorder from start, and their edges but those that close a cycle."""
    order: list[int] = []
    forward: dict[int, list[int]] = {start: []}
    under_way = {start}
    work = [(start, iter(followers[start]))]
    while work:
        at, rest = work[-1]
        following = next(rest, None)
        if following is None:
            under_way.discard(at)
            order.append(at)
            work.pop()
        elif following in nodes and following not in under_way:
            forward[at].append(following)
            if following not in forward:
                forward[following] = []
                under_way.add(following)
                work.append((following, iter(followers[following])))
    return order, forward
