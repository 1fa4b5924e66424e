"""Registration of the functions as operators of torch: ``torch.ops.blockscale.<name>``.

The functions use them when torch records a call, as torch.compile and torch.export do; a call that
runs at once is spared the dispatcher.  The operators of fused functions write tensors that the
caller passes (declared as mutated) and return nothing: torch may then plan that memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from blockscale.ops import checks

NAMESPACE = "blockscale"

NAMES: list[str] = []
"""Every registered operator."""


def define(
    name: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> None:
    """Register ``torch.ops.blockscale.<name>``.

    Args:
        name: its name; dots become underscores.
        function: what it runs on plain tensors; its annotations are the schema.
        fake: checks the same arguments, all by position, without data, and returns tensors like
            the results.
        mutates: parameters that ``function`` writes.
    """
    name = name.replace(".", "_")
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=mutates)

    signature = inspect.signature(function)

    def without_data(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)  # torch leaves out what is as the default
        bound.apply_defaults()
        with checks.without_data():
            return fake(*bound.args)

    op.register_fake(without_data)
    NAMES.append(name)


def operator(name: str) -> Callable[..., Any]:
    """Return the operator that `define` made under ``name``."""
    found: Callable[..., Any] = getattr(torch.ops.blockscale, name.replace(".", "_"))
    return found


def copied(given: torch.Tensor | None, made: torch.Tensor) -> torch.Tensor:
    """Return the caller's tensor, after copying ``made`` to it; ``made`` if there is none."""
    if given is None:
        return made
    if given.dtype == made.dtype:
        return given.copy_(made)
    given.view(torch.uint8).copy_(made.view(torch.uint8))
    return given
