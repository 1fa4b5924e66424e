"""Words that errors share: what an unknown name was meant to be, and where things are to be had."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 5
"""Most names that an error lists."""


def install(extra: str = "build") -> str:
    """Return what installs all that tuning and building need, or the packages of another extra."""
    return f"pip install '.[{extra}]' in a checkout of blockscale"


def missing(error: ModuleNotFoundError) -> str:
    """Return what to do about a package of the extra "build" that is not installed."""
    package = (error.name or "a package").partition(".")[0]
    return f"it needs {package}, which is not installed; {install()}"


def near(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` was probably meant to be; None: there is none."""
    low, names = str(name).lower(), [*known]
    begun = [name for name in names if len(low) > 2 and name.startswith(low)]
    return next(iter(begun or difflib.get_close_matches(low, names, 1)), None)


def choose(value: object, allowed: Iterable[object]) -> str:
    """Return what to do about an unknown ``value``: the rest of a sentence."""
    known = {str(item): item for item in allowed}
    listed = [*known]
    if len(listed) > SHOWN:
        listed = difflib.get_close_matches(str(value), listed, SHOWN, 0.0)
    shown = ", ".join(repr(known[name]) for name in listed)
    more = f", ... ({len(known)} in all)" if len(known) > SHOWN else ""
    meant = near(value, known)
    hint = "" if meant is None else f" (did you mean {known[meant]!r}?)"
    return f"choose one of {shown}{more}{hint}"
