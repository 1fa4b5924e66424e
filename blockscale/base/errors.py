"""Exceptions that callers may want to tell apart; each is also the built-in that it resembles."""

from __future__ import annotations


class LibraryError(ValueError):
    """A kernel library cannot be used: foreign, damaged, or made for another machine or version."""


class LinkError(OSError):
    """The C compiler that turns object files into a library is missing or refused them."""


class CompileError(RuntimeError):
    """The CUDA compiler is missing or refused a kernel."""


class LoweringError(ValueError):
    """A schedule has no kernel: the message says which block or loop, and why."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, hostile, or in a format that nobody here reads."""


class UnknownNameError(CheckpointError, KeyError):
    """A checkpoint has no weight or module of this name."""

    __str__ = Exception.__str__  # the sentence; that of a KeyError is its repr
