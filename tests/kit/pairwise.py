"""Parameters of a test: few combinations that hold every pair of values, or all of them.

A product of many parameters mostly repeats itself: what breaks, breaks for one value or for two
that meet.  `pairs` chooses combinations in which every two values of any two parameters meet at
least once; with ``--exhaustive`` (``make test-all``) the whole product runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive
"""Marks what ``make test-all`` runs and ``make test`` does not."""

Combination = tuple[int, ...]


def covering(sizes: Sequence[int]) -> Iterator[Combination]:
    """Yield combinations of indices below ``sizes`` in which every two of any two places meet."""
    places = list(itertools.combinations(range(len(sizes)), 2))
    missing = {(a, i, b, j) for a, b in places for i in range(sizes[a]) for j in range(sizes[b])}
    while missing:
        a, i, b, j = min(missing)
        chosen = {a: i, b: j}
        for place in sorted(set(range(len(sizes))) - {a, b}, key=lambda p: -sizes[p]):
            chosen[place] = max(
                range(sizes[place]), key=lambda value: (_met(chosen, place, value, missing), -value)
            )
        made = tuple(chosen[place] for place in range(len(sizes)))
        missing -= {(a, made[a], b, made[b]) for a, b in places}
        yield made


def _met(chosen: dict[int, int], place: int, value: int, missing: set[tuple[int, ...]]) -> int:
    """Return how many missing pairs ``value`` at ``place`` makes with what is chosen already."""
    count = 0
    for other, index in chosen.items():
        pair = (other, index, place, value) if other < place else (place, value, other, index)
        count += pair in missing
    return count


def pairs(
    *, legal: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]
) -> Callable[[Any], Any]:
    """Return the mark that parametrises a test by combinations of ``values``.

    Args:
        legal: which combinations make sense.  Where it refuses one that was chosen, combinations
            of the product that hold its pairs take its place.
        values: of each parameter, by name; ``pytest.param`` with an id where text would not do.
    """
    return _marked(legal, values, 2)


def each(
    *, legal: Callable[..., bool] = lambda **_: True, **values: Sequence[Any]
) -> Callable[[Any], Any]:
    """Return a mark like that of `pairs`, by combinations in which each single value occurs.

    For parameters that do not meet in the code: whose combinations tell nothing new.
    """
    return _marked(legal, values, 1)


def those(
    default: Callable[..., bool],
    legal: Callable[..., bool] = lambda **_: True,
    **values: Sequence[Any],
) -> Callable[[Any], Any]:
    """Return a mark like that of `pairs`, by the combinations that ``default`` picks."""
    return _marked(legal, values, 0, default)


def _marked(
    legal: Callable[..., bool],
    values: dict[str, Sequence[Any]],
    strength: int,
    default: Callable[..., bool] = lambda **_: False,
) -> Callable[[Any], Any]:
    """Return the mark of all legal combinations.

    By default run those that ``default`` picks, and such that hold all ``strength`` values at once.
    """
    names, lists = list(values), [list(given) for given in values.values()]
    sizes = [len(given) for given in lists]

    def passes(test: Callable[..., bool], made: Combination) -> bool:
        return test(**{n: _value(v[i]) for n, v, i in zip(names, lists, made, strict=True)})

    allowed = [c for c in itertools.product(*map(range, sizes)) if passes(legal, c)]
    few = {c for c in allowed if passes(default, c)}
    if strength:
        turns = (tuple(i % size for size in sizes) for i in range(max(sizes)))
        few |= set(_covered(allowed, covering(sizes) if strength == 2 else turns, strength))
    made = [
        pytest.param(
            *(_value(given[i]) for given, i in zip(lists, c, strict=True)),
            id="-".join(_name(v[i], n, i) for v, i, n in zip(lists, c, names, strict=True)),
            marks=() if c in few else exhaustive,
        )
        for c in allowed
    ]
    return pytest.mark.parametrize(names if len(names) > 1 else names[0], made)


def _covered(
    allowed: Sequence[Combination], proposed: Iterable[Combination], strength: int
) -> Iterator[Combination]:
    """Yield those of ``allowed`` that hold what any of them holds; ``proposed`` ones first."""
    legal = set(allowed)

    def held(made: Combination) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(made), min(strength, len(made))))

    missing = set().union(*map(held, allowed)) if allowed else set()
    for made in proposed:
        if made in legal and held(made) & missing:
            missing -= held(made)
            yield made
    while missing:
        made = max(allowed, key=lambda c: len(held(c) & missing))  # the first of the best
        missing -= held(made)
        yield made


def seeds(count: int, default: int = 1) -> Any:
    """Return the mark that parametrises a test by ``seed``: ``default`` of them, or ``count``."""
    made = [pytest.param(s, marks=() if s < default else exhaustive) for s in range(count)]
    return pytest.mark.parametrize("seed", made)


def few(values: Sequence[Any], *, every: int = 2) -> list[Any]:
    """Return ``values`` as parameters: each ``every``-th runs by default, from the first on.

    A tuple is what several parameters take, as for ``pytest.mark.parametrize``.
    """
    made = []
    for i, value in enumerate(values):
        marks = () if i % every == 0 else (exhaustive,)
        if _is_param(value):
            made.append(pytest.param(*value.values, id=value.id, marks=[*value.marks, *marks]))
        else:
            made.append(
                pytest.param(*(value if isinstance(value, tuple) else [value]), marks=marks)
            )
    return made


def _is_param(given: Any) -> bool:
    return hasattr(given, "values") and hasattr(given, "marks")


def _value(given: Any) -> Any:
    return given.values[0] if _is_param(given) else given


def _name(given: Any, name: str, index: int) -> str:
    """Return the text of a value in a test's id."""
    if _is_param(given) and given.id is not None:
        return str(given.id)
    value = _value(given)
    if value is None or isinstance(value, str | int | float | bool):
        return str(value)
    own = getattr(value, "name", None) or getattr(value, "__name__", None)
    return str(own) if own is not None else f"{name}{index}"
