"""A callable CUDA kernel: the library's C code checks the arguments, Python says what is wrong.

A call with all its outputs goes straight to the library, whose checks take less time than any in
Python.  If they refuse it, or if outputs are to be allocated, the full checks of `Function` follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockscale.base import tensors
from blockscale.base.tensors import Described
from blockscale.runtime.arguments import check_devices, check_one, flatten
from blockscale.runtime.function import Function
from blockscale.specs.spec import Param

PROGRAMMATIC = 1
"""Launch flag: the kernels may begin before the one before them in the stream has ended (PDL)."""


class CudaFunction(Function):
    """A kernel of a loaded CUDA library; see `Function`.

    Its tensors are torch tensors on one CUDA device, or other DLPack tensors there.  A tensor whose
    first dimension is declared as a symbol may have more dimensions: the leading ones count as one,
    and outputs that are allocated get them too.  Kernels run on torch's current stream.
    """

    kind = "cuda"

    direct: Callable[..., Any]
    """The library's own function: takes every parameter and then optionally the launch flags, None
    for a default and for an output that is an input; returns None.  It checks its arguments, in
    fewer words, but knows no autograd."""

    def __init__(self, name: str, entry: Mapping[str, Any], compiled: Callable[..., Any]) -> None:
        super().__init__(name, entry, compiled)
        self.direct = compiled
        self._allocated = tuple(i for i in self._outputs if i not in self._alias)
        self._aliases = tuple((i, j, i - self._inputs) for i, j in self._alias.items())
        self._tensors = tuple(i for i, p in enumerate(self.params) if not p.scalar)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel and return its output, or a tuple if it has several.

        Args:
            args: inputs in order, then outputs, as for `Function`; then optionally the launch
                flags (`PROGRAMMATIC`), which are also accepted by the name ``flags``.
            kwargs: as for `Function`.

        Raises:
            TypeError, ValueError: as `Function.__call__`.
            RuntimeError: as `Function.__call__`; or the driver or the device refuses: the message
                has CUDA's name for it.
        """
        tensors.check_unwatched(self.name)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, unseen by torch: see `Function.call`."""
        count = len(args)
        if kwargs or count < self._count or count > self._count + 1:
            return self._checked(args, kwargs, kwargs.pop("flags", 0))
        for i in self._allocated:
            if args[i] is None:
                break
        else:
            if self._is_plain(args):
                try:
                    self._compiled(*args)
                except (TypeError, ValueError):
                    pass  # the full checks below find the words for it
                else:
                    self.tell_autograd(args)
                    return self._results(args)
        return self._checked(args[: self._count], {}, args[-1] if count > self._count else 0)

    def _is_plain(self, args: Sequence[Any]) -> bool:
        """Return whether the library, which sees addresses alone, may judge the arguments."""
        torch = tensors.torch_module()
        if torch is None:
            return True
        kinds, grad = (torch.Tensor, torch.nn.Parameter), torch.is_grad_enabled()
        for i in self._tensors:
            value = args[i]
            if value.__class__ in kinds:
                if value.is_neg() or (grad and value.requires_grad):
                    return False
            elif isinstance(value, torch.Tensor):
                return False
        return True

    def _results(self, args: tuple[Any, ...]) -> Any:
        results = args[self._inputs : self._count]
        for i, j, place in self._aliases:
            if args[i] is None:
                results = (*results[:place], args[j], *results[place + 1 :])
        return results if len(results) > 1 else results[0]

    def _signature(self, values: Sequence[Any], torch: Any) -> tuple[Any, ...] | None:
        key: list[Any] = []
        for value in values:
            if value is None or isinstance(value, float | int):
                key.append(None if value is None else float)
            elif torch is not None and isinstance(value, torch.Tensor):
                if value.layout is not torch.strided or value.is_neg():
                    return None
                grad = value.requires_grad and torch.is_grad_enabled()
                kind = value.__class__
                key += (kind, value.shape, value.dtype, value.device, value.is_contiguous(), grad)
            else:
                return None
        return tuple(key)

    def _describe(
        self, values: Sequence[Any]
    ) -> tuple[list[Described | None], dict[str, tuple[int, ...]]]:
        params = zip(self.params, values, strict=True)
        given = [None if p.scalar else check_one(self.name, p, v, "cuda") for p, v in params]
        check_devices(self.name, self.params, given)
        return flatten(self.params, given)

    def _constant(self, index: int, shape: tuple[int, ...]) -> Any:
        return None  # the library keeps its own, on the device

    def _allocator(
        self, param: Param, shape: tuple[int, ...], first: Described | None
    ) -> Callable[[], Any]:
        torch = tensors.torch_module()
        if torch is None or first is None or first.kind != "torch":
            raise TypeError(
                f"{self.name}: {param.name} is missing, and only for torch tensors are outputs "
                f"allocated on a CUDA device; pass {param.name} as {param.type}"
            )
        empty, dtype, device = torch.empty, getattr(torch, param.dtype), torch.device(first.device)
        return lambda: empty(shape, dtype=dtype, device=device)

    def _launch(self, values: Sequence[Any], torch: Any, flags: int) -> None:
        self._compiled(*values, flags)
