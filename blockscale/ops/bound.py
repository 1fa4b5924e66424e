"""A call that is made over and over: checked once, its arguments packed once, then launched.

What a call costs besides its launch is docs/gpu.md's table of host time; most of it is finding the
kernel, checking tensors, and passing each of them to compiled code.  A bound call has done that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from blockscale.ops import call
from blockscale.ops.checks import dtype_name
from blockscale.runtime.function import BoundKernel

Tensor = torch.Tensor

WHERE = "bind"

_modes, _tracing = torch._C._len_torch_dispatch_stack, torch._C._is_tracing


class _Recorder:
    """Takes the kernels that a function would run."""

    def __init__(self) -> None:
        self.kernels: list[BoundKernel] = []

    def take(self, op: call.Op[Any], options: Any, given: Any) -> Any:
        """Return what the call of ``op`` returns, and keep its kernel, which does not run."""
        spec, arguments, result, enable_pdl = op.check(options, given)
        if spec is None:
            raise ValueError(
                f"{WHERE}: {op.name} has nothing to compute, as its first tensor has no elements; "
                "bind calls that have rows"
            )
        first = given[0]
        flags = call.launch_flags(first.is_cuda, enable_pdl)
        kernel = call.kernel(spec, first.device).bind(*arguments, *flags)
        self.kernels.append(kernel)
        return kernel.results if result is None else result


class _Row(NamedTuple):
    """A tensor that later calls may replace: its parameter, and the argument that it was."""

    name: str
    where: int | str
    tensor: Tensor
    passed: tuple[int, ...]
    """Its shape as the kernel takes it."""


class BoundCall:
    """A call of a function of blockscale on fixed tensors; see `bind`.

    Attributes:
        name: of the function.
        rows: names of the tensors that a call may bring anew, in their order.
        result: what every call returns: always the same tensors, written again.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kernel: BoundKernel,
        result: Any,
    ) -> None:
        self.name = getattr(function, "__name__", repr(function))
        self.result = result
        self._function, self._args, self._kwargs = function, args, kwargs
        self._kernel, self._run = kernel, kernel.run
        self._rows = tuple(_rows(args, kwargs, kernel))
        self._shapes = tuple(row.tensor.shape for row in self._rows)
        self._reshaped = kernel.function.kind == "cpu"
        self.rows = tuple(row.name for row in self._rows)

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.name} {_told(row.tensor)}" for row in self._rows)
        return f"<blockscale.BoundCall of {self.name}: {rows}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """TypeError: a copy would write the result of this one."""
        raise TypeError(
            f"{self.name}: a bound call holds memory, so it is neither copied nor pickled; bind "
            "the copy's tensors, and keep bound calls out of modules"
        )

    def __call__(self, *rows: Tensor) -> Any:
        """Run the kernel on torch's current stream of the tensors' device; return `result`.

        Args:
            rows: tensors in place of those of `rows`, from the first on, of the same shape, dtype
                and device; of those that are left out, the ones that were bound.

        Raises:
            TypeError, ValueError: a tensor is not like the one that was bound.
        """
        if rows:
            return self._anew(rows)
        if is_dynamo_compiling() or _modes() or _tracing():  # transforms see no fixed tensors
            return self._traced(())
        self._run()
        return self.result

    def _anew(self, rows: tuple[Tensor, ...]) -> Any:
        """Return the result of a call with some tensors anew."""
        if is_dynamo_compiling() or call.watched():
            return self._traced(rows)
        if len(rows) > len(self._shapes):
            raise TypeError(
                f"{self.name}: the bound call got {len(rows)} tensors, but takes "
                f"{', '.join(self.rows) or 'none'} anew; bind another call for others"
            )
        grad = is_grad_enabled()
        for tensor, shape in zip(rows, self._shapes, strict=False):
            if type(tensor) not in call.PLAIN or tensor.shape != shape:
                self._refuse(rows)
            if (grad and tensor.requires_grad) or tensor.is_neg():
                return self._traced(rows)  # the function's own words
        try:
            self._kernel.run_on(*(self._laid_out(rows) if self._reshaped else rows))
        except call.REFUSED:
            self._refuse(rows)
            raise
        return self.result

    def _laid_out(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return rows as a CPU's kernel takes them: CUDA libraries count leading dimensions."""
        if not all(tensor.is_contiguous() for tensor in rows):
            self._refuse(rows)
        return [tensor.view(row.passed) for tensor, row in zip(rows, self._rows, strict=False)]

    def _traced(self, rows: Sequence[Tensor]) -> Any:
        """Return what the function itself returns, which torch sees and which checks everything."""
        args, kwargs = [*self._args], {**self._kwargs}
        for row, tensor in zip(self._rows, rows, strict=False):
            if isinstance(row.where, int):
                args[row.where] = tensor
            else:
                kwargs[row.where] = tensor
        return self._function(*args, **kwargs)

    def _refuse(self, rows: Sequence[Tensor]) -> None:
        """Raise TypeError or ValueError for the first tensor that is not like that bound."""
        for row, got in zip(self._rows, rows, strict=False):
            if not isinstance(got, Tensor):
                raise TypeError(
                    f"{self.name}: {row.name} is a {type(got).__name__}, not a torch tensor; pass "
                    f"one like that bound, {_told(row.tensor)}"
                )
            kind = ValueError if got.dtype == row.tensor.dtype else TypeError
            if _facts(got) != _facts(row.tensor):
                raise kind(
                    f"{self.name}: {row.name} is {_told(got)}, but the call was bound for "
                    f"{_told(row.tensor)}; pass one like it, or bind another call"
                )


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()


def _told(tensor: Tensor) -> str:
    """Return a tensor in words."""
    strided = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}{strided}"


def _rows(args: Any, kwargs: Any, kernel: BoundKernel) -> Sequence[_Row]:
    """Return the kernel's first parameters that have rows, and are tensors of the caller's."""
    found: list[_Row] = []
    given = [*enumerate(args), *kwargs.items()]
    for param, passed in zip(kernel.function.params, kernel.values, strict=True):
        if param.output or param.scalar or not (param.dims and param.dims[0].symbols):
            break
        same = [pair for pair in given if _is(pair[1], passed)]
        if not same:
            break
        where, tensor = same[0]
        found.append(_Row(param.name, where, tensor, tuple(passed.shape)))
    return found


def _is(value: Any, passed: Any) -> bool:
    """Return whether an argument is what the kernel got."""
    if not isinstance(value, Tensor) or not isinstance(passed, Tensor):
        return False
    return value.data_ptr() == passed.data_ptr() and value.nbytes == passed.nbytes


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    """Return the call ``function(*args, **kwargs)``, ready to be made over and over.

    The arguments are checked here, and nothing runs; what is called later launches the kernel:

        step = blockscale.bind(blockscale.linear, x, weights, out=y)
        step()       # on the same tensors
        step(other)  # on another x [...] of the same shape, dtype and device

    Kernel, options, weights, outputs and workspaces stay what they were, also when another library
    is loaded: outputs that are not given are allocated here, once, and every call writes them
    again.  What is kept is memory: a tensor that gets other memory (``set_``, ``data``, a module's
    ``to``) has to be bound again.  It may be called under another current stream, within the
    capture of a CUDA graph (whose replays take what the graph has), and by other threads, but two
    calls write the same outputs: let one follow the other.  torch.compile and other tracers see
    the function itself.

    Args:
        function: a function of blockscale that runs one kernel and computes nothing else with
            these arguments: all but unprepared weights on CUDA and conversions, such as of
            topk_ids [T, k] from int64.
        args, kwargs: its arguments.

    Raises:
        TypeError, ValueError: as the function; or it runs no kernel, several, or other operations.
        RuntimeError: torch traces or transforms what this thread does.
    """
    if is_dynamo_compiling() or call.watched():
        raise RuntimeError(
            f"{WHERE}: torch traces or transforms what this thread does; bind calls before"
        )
    name = getattr(function, "__name__", repr(function))
    recorder = _Recorder()
    with call.recording(recorder):
        result = function(*args, **kwargs)
    if len(recorder.kernels) != 1:
        number = f"{len(recorder.kernels)} kernels" if recorder.kernels else "no kernel"
        raise ValueError(
            f"{WHERE}: {name} runs {number} of blockscale with these arguments, and a bound call "
            "is one; bind the functions that it calls"
        )
    [kernel] = recorder.kernels
    _check_memory(name, kernel, (*args, *kwargs.values()), result)
    return BoundCall(function, args, kwargs, kernel, result)


def _check_memory(name: str, kernel: BoundKernel, given: tuple[Any, ...], result: Any) -> None:
    """ValueError unless the kernel reads what the caller gave, and writes what is returned."""
    spans = [_span(tensor) for tensor in call.each(given)]
    written = []
    for param, value in zip(kernel.function.params, kernel.values, strict=True):
        if not isinstance(value, Tensor) or not value.nbytes:
            continue
        if param.output:
            written.append(_span(value))
        elif not _within(value, spans):
            raise ValueError(
                f"{WHERE}: {param.name} of {name}'s kernel is none of the arguments: it would be "
                f"made of them in every call; pass it as {_told(value)}, or prepare weights before"
            )
    if not all(_within(tensor, written) for tensor in call.each((result,))):
        raise ValueError(
            f"{WHERE}: {name} computes its result from that of a kernel, with these arguments; "
            "bind the functions that it calls"
        )


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def _within(tensor: Tensor, spans: list[tuple[int, int]]) -> bool:
    start, end = _span(tensor)
    return any(low <= start and end <= high for low, high in spans)
