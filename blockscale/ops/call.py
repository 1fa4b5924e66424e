"""How a torch function reaches its kernel: the one call protocol, and the operators of torch.

A call goes one of three ways:

* *Recorded*: where torch has to see the call, it gets the function's operator,
  ``torch.ops.blockscale.<name>``: torch.compile and torch.export, dispatch modes (make_fx, fake
  tensors), the transforms of torch.func, and tensors whose class has ``__torch_dispatch__``.  When
  torch is through with them, the operator runs one of the other ways.  What would be lost on the
  way is refused: derivatives, and jit.trace.
* *Known*: a call like one before (the same function and options, the same dtype, dimensions and
  kind of device of its first tensor) hands its tensors to the kernel that is kept for such calls.
  The kernel checks them itself.
* *In full*: every first call, and what a kernel refuses, goes through the checks of the function,
  which say in its words what is wrong, or find the kernel and keep it.

The operators of fused functions write tensors that the caller passes (declared as mutated) and
return nothing: torch may then plan that memory.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from blockscale.base import tensors
from blockscale.ops import checks
from blockscale.runtime import jit
from blockscale.runtime.function import Function
from blockscale.runtime.function_cuda import PROGRAMMATIC
from blockscale.runtime.library import generation, remembered
from blockscale.specs import Spec

Result = TypeVar("Result")
"""What a function returns."""

Ready = tuple[tuple[Any, ...], Any] | None
"""Arguments of a kernel and the result of the function, or None: to be checked in full."""

PLAIN = {torch.Tensor, torch.nn.Parameter}
"""Classes of tensors that kernels take, those of callers among them once they were seen; others
(fake, wrapped) have ``__torch_dispatch__`` and go through the dispatcher."""

REFUSED = (TypeError, ValueError)
"""What kernels raise for arguments that they do not take; anything else is nobody's refusal."""

NAMESPACE = "blockscale"

BYTES = tuple({*checks.PACKED, *checks.SCALE_BYTES})
"""Dtypes of codes and of block scales."""

NAMES: list[str] = []
"""Every registered operator."""


watched = tensors.watcher(torch)


class _Operator(threading.local):
    running = False


_operator = _Operator()


class Recorder(Protocol):
    """Takes calls in place of kernels: `blockscale.bind`."""

    def take(self, op: Op[Any], options: Any, given: Any) -> Any:
        """Return what the call returns."""


RECORDERS: dict[int, Recorder] = {}
"""What takes the calls of a thread, by its identity."""


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Let a recorder take the calls of this thread, each after all checks."""
    RECORDERS[threading.get_ident()] = recorder
    try:
        yield
    finally:
        del RECORDERS[threading.get_ident()]


def each(given: Any) -> Iterator[torch.Tensor]:
    """Return all tensors among arguments, those of prepared weights too."""
    for value in given:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from each(value)
        elif hasattr(value, "tensors"):
            yield from (tensor for _, tensor in value.tensors())


def traced(*given: Any) -> bool:
    """Return whether torch is to see a call with these arguments, before a kernel runs."""
    if is_dynamo_compiling():
        return True
    new = {type(value) for value in each(given)} - PLAIN
    redirected = any(map(tensors.redirects, new))
    if not redirected:
        PLAIN.update(new)
    return not _operator.running and (redirected or is_compiling() or watched())


def kernel(spec: Spec, device: torch.device) -> Function:
    """Return the function of ``spec`` for the kind of ``device``."""
    return jit.function(spec) if device.type == "cpu" else jit.function(spec, device.type)


def launch_flags(cuda: bool, enable_pdl: bool | None = None) -> tuple[int, ...]:
    """Return the arguments that follow a function's parameters: none on the CPU.

    None is on: every kernel waits for its predecessor before it touches memory, but for those of
    linear layers, which load codes and scales of the weight: what writes these is to have ended.
    """
    if not cuda:
        return ()
    return (0,) if enable_pdl is False else (PROGRAMMATIC,)


class Checked(NamedTuple):
    """What the full checks of a call lead to.

    Attributes:
        spec: of the kernel; None: there is nothing to compute.
        arguments: of the kernel, with the dimensions that it has.
        result: what the function returns; None: what the kernel does.
        enable_pdl: see `launch_flags`.
    """

    spec: Spec | None
    arguments: tuple[Any, ...]
    result: Any
    enable_pdl: bool | None = None


class Op(Generic[Result]):
    """A torch function that runs a kernel: a class for each family, an object for each function.

    ``options`` are the arguments that choose a kernel, hashable where they are right; ``given``
    are the others, the tensor that decides on dtype and device first.

    Attributes:
        name: of the function, and of its operator.
    """

    flattens = True
    """Whether CUDA kernels take the leading dimensions of the first tensor as one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.keeps = type(self).ready is not Op.ready

    def run(self, options: tuple[Any, ...], given: tuple[Any, ...]) -> Result:
        """Return the result of a call, whichever way it goes."""
        first = given[0]
        if RECORDERS or is_dynamo_compiling() or type(first) not in PLAIN or watched():
            return self._in_full(options, given, None)
        key = self, options, first.dtype, first.is_cuda, first.dim()
        try:
            known = remembered.get(key)
        except TypeError:  # an option that cannot be hashed is wrong, and the checks name it
            return self._in_full(options, given, None)
        odd = (first.requires_grad and is_grad_enabled()) or first.is_neg()
        if known is not None and not odd:  # a CUDA library knows nothing of either
            run, spec, flags, tell = known
            ready = self.ready(spec, options, given)
            if ready is not None:
                arguments, result = ready
                try:
                    made = run(*(arguments + flags))
                except REFUSED:
                    pass  # the full checks say it in our words
                else:
                    if tell is not None and is_grad_enabled():
                        tell(arguments)
                    return made if result is None else result
        return self._in_full(options, given, key)

    def recorded(self, options: tuple[Any, ...], given: tuple[Any, ...]) -> Result:
        """Return the result by way of the function's operator."""
        raise NotImplementedError

    def ready(self, spec: Any, options: tuple[Any, ...], given: tuple[Any, ...]) -> Ready:
        """Return arguments and result for the kernel of ``spec``; None: check in full.

        The first tensor has the dtype and dimensions of a call that was checked; all else may be
        anything, and is left to the kernel.  A family without this method checks every call.
        """
        return None

    def check(self, options: tuple[Any, ...], given: tuple[Any, ...]) -> Checked:
        """Return what to run after all checks, whose errors are the function's."""
        raise NotImplementedError

    def _in_full(self, options: tuple[Any, ...], given: tuple[Any, ...], key: Any) -> Result:
        """Check everything, run the kernel, and keep it for calls like this one."""
        if RECORDERS and threading.get_ident() in RECORDERS:
            return RECORDERS[threading.get_ident()].take(self, options, given)
        if traced(*given):
            return self._seen(options, given)
        before = generation()
        spec, arguments, result, enable_pdl = self.check(options, given)
        if spec is None:
            return result
        first, passed = given[0], arguments[0]
        function = kernel(spec, first.device)
        flags = launch_flags(first.is_cuda, enable_pdl)
        made = function.call(*arguments, *flags)
        flat = self.flattens and first.is_cuda and first.dim() > passed.dim()
        if key is not None and self.keeps and (flat or first.shape == passed.shape):
            # a CUDA library checks arguments by itself, but cannot allocate outputs
            direct = getattr(function, "direct", None)
            tell = None if direct is None else function.tell_autograd
            remembered[key] = direct or function.call, spec, flags, tell
            if generation() != before:
                remembered.pop(key, None)
        return made if result is None else result

    def _seen(self, options: tuple[Any, ...], given: tuple[Any, ...]) -> Result:
        """Return the result by way of the operator, or say why torch cannot have it."""
        if is_dynamo_compiling():
            return self.recorded(options, given)
        if torch._C._is_tracing():  # TorchScript has no view of bytes as another dtype
            raise RuntimeError(f"{self.name}: torch.jit.trace cannot hold it; use torch.export")
        if not transformed():
            return self.recorded(options, given)
        for tensor in each(given):
            if differentiated(tensor):
                raise ValueError(
                    f"{self.name}: a tensor of shape {list(tensor.shape)} asks for a derivative "
                    "(torch.func.grad, jvp, forward-mode AD), but kernels have none; detach it"
                )
        try:
            return self.recorded(options, given)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name}: torch.func cannot transform this call ({error}); call it outside, "
                "on the whole batch: leading dimensions are rows"
            ) from error


def transformed() -> bool:
    """Return whether a transform of torch.func, or forward-mode AD, is at work in this thread."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiated(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a tangent or requires grad, at any level of torch.func."""
    functorch = torch._C._functorch
    while True:
        if tensor.requires_grad and is_grad_enabled():
            return True
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = functorch.get_unwrapped(tensor)


# ---- Operators ----------------------------------------------------------------------------------


def define(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any] | None = None
) -> None:
    """Register ``torch.ops.blockscale.<name>``.

    Args:
        name: its name; dots become underscores.
        schema: parameters and results in torch's words; ``Tensor!`` is one that is written.
        function: what it runs on plain tensors, arguments by position.
        fake: checks the same arguments, all by position, without data, and returns tensors like
            the results; None: function does, where `checks.has_data` says no.
    """
    name = name.replace(".", "_")
    given, results = schema.split(" -> ")
    parameters = given.strip("()").split(", ")
    mutates = [p.split()[-1] for p in parameters if "!" in p]
    numbered = [p.replace("!", f"(a{i}!)") for i, p in enumerate(parameters)]

    def run(*arguments: Any) -> Any:
        outer, _operator.running = _operator.running, True
        try:
            return function(*arguments)
        finally:
            _operator.running = outer

    op = torch.library.custom_op(
        f"{NAMESPACE}::{name}",
        run,
        mutates_args=mutates,
        schema=f"({', '.join(numbered)}) -> {results}",
    )
    signature = inspect.signature(function)

    def without_data(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)  # torch leaves out what is as the default
        bound.apply_defaults()
        with checks.without_data():
            return (fake or function)(*bound.args)

    op.register_fake(without_data)
    NAMES.append(name)


def operator(name: str) -> Callable[..., Any]:
    """Return the operator that `define` made under ``name``."""
    found: Callable[..., Any] = getattr(torch.ops.blockscale, name.replace(".", "_"))
    return found


def copied(
    where: str, name: str, given: torch.Tensor | None, made: torch.Tensor, flat: bool = False
) -> torch.Tensor:
    """Return the caller's output ``name``, after copying ``made`` to it; ``made`` if it is None.

    One that holds bytes may have any dtype that does; ``flat``: it may also have one dimension.
    """
    if given is None:
        return made
    dtypes = BYTES if made.itemsize == 1 else (made.dtype,)
    shapes = made.shape, *([(made.numel(),)] if flat else [])
    checks.like(where, name, given, dtypes, "the result", made, *shapes, output=True)
    if given.dtype == made.dtype:
        given.view(made.shape).copy_(made)
    else:
        given.view(torch.uint8).view(made.shape).copy_(made.view(torch.uint8))
    return given
