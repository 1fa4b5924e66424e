"""Errors of a bad argument, for those who catch our classes and for those who catch FlashInfer's.

FlashInfer raises AssertionError in Python, RuntimeError in C++, ValueError and TypeError, and the
BackendSupportedError of ``flashinfer.utils`` for what a backend does not do.  It is never imported
here: only a program that has imported it can catch that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar


class BadValueError(ValueError, AssertionError, RuntimeError):
    """A bad value of an argument."""


class BadTypeError(TypeError, AssertionError, RuntimeError):
    """A bad type or dtype of an argument."""


P = ParamSpec("P")
R = TypeVar("R")


@cache
def _also(base: type[Exception], theirs: type[Exception] | None) -> type[Exception]:
    """Return the class of errors that are ``base`` and ``theirs``."""
    return base if theirs is None else type(base.__name__, (base, theirs), {"__module__": __name__})


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, whose errors are also those that FlashInfer's callers catch."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AssertionError:  # one of ours, from a function that this one calls
            raise
        except (ValueError, TypeError) as error:
            base = BadValueError if isinstance(error, ValueError) else BadTypeError
            theirs = getattr(sys.modules.get("flashinfer.utils"), "BackendSupportedError", None)
            raise _also(base, theirs)(str(error)) from error

    return call
