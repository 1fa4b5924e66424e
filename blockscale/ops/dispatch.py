"""How a torch function reaches its kernel: at once, or through torch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from blockscale.runtime import jit
from blockscale.runtime.function import Function
from blockscale.runtime.function_cuda import PROGRAMMATIC
from blockscale.specs import Spec

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that kernels take; others (fake, functional) go through the dispatcher."""


def traced(tensor: object) -> bool:
    """Return whether torch records the call instead of running it."""
    return is_compiling() or (type(tensor) not in PLAIN and isinstance(tensor, torch.Tensor))


def kernel(spec: Spec, device: torch.device) -> Function:
    """Return the function of ``spec`` for the kind of ``device``."""
    return jit.function(spec) if device.type == "cpu" else jit.function(spec, device.type)


def direct(function: Function) -> Any:
    """Return what a checked call may use in place of ``function``.

    A CUDA library checks arguments by itself, but cannot allocate outputs and knows no autograd.
    """
    return getattr(function, "direct", function)


def launch_flags(cuda: bool, enable_pdl: bool | None) -> tuple[int, ...]:
    """Return the arguments that follow a function's parameters: none on the CPU.

    None is on: every kernel waits for its predecessor before it touches memory.
    """
    if not cuda:
        return ()
    return (0,) if enable_pdl is False else (PROGRAMMATIC,)
