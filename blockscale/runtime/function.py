"""One callable kernel: checks its arguments, allocates its outputs, calls the compiled function.

The checks run once per signature (shapes, dtypes, layout); a repeated signature finds its `_Plan`.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from blockscale.base import tensors
from blockscale.base.tensors import Described, numel
from blockscale.runtime.arguments import (
    WORKSPACE,
    brief,
    check_not_empty,
    check_one,
    scalar,
    signature_text,
    solve_shapes,
)
from blockscale.specs.spec import Param

RECORD = 2
"""Launch flag: launches are kept, and the call returns their handle."""

MAX_PLANS = 1024
"""Signatures that a function remembers; after that it forgets them all and starts again."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a call with one signature does besides the call; numbers are parameter indices."""

    constants: tuple[tuple[int, Any], ...]
    aliases: tuple[tuple[int, int], ...]  # an output left out, and the input that it is
    allocations: tuple[tuple[int, Callable[[], Any]], ...]
    # (parameter, its address, alignment - 1, bytes) of every argument that is not empty
    spans: tuple[tuple[int, Callable[[Any], int], int, int], ...]
    overlaps: bool  # the caller gave outputs, which could overlap
    views: tuple[int, ...]  # to be passed as bytes
    wraps: tuple[int, ...]  # NumPy arrays that tvm_ffi does not take as they are
    launch: bool  # False: every output is empty, a workspace aside
    written: tuple[int, ...]  # torch tensors of the caller's


class Function:
    """A kernel of a loaded library; call it with its inputs, then optionally its outputs.

    Attributes:
        name: the exported name.
        kind: "cpu" or "cuda": where its tensors are.
        base: the name without its activation dtype.
        params: inputs, then outputs, in the order of the call.
        buckets: the manifest's list of size buckets.
        tuned: whether every size bucket runs a tuned schedule.
    """

    kind = "cpu"

    replay: tuple[Callable[..., Any], ...] | None = None
    """Of a CUDA library: what does recorded launches again, and what frees them."""

    def __init__(self, name: str, entry: Mapping[str, Any], compiled: Callable[..., Any]) -> None:
        self.name = name
        self.base: str = entry["base"]
        self.params = tuple(Param.from_manifest(p) for p in entry["params"])
        self.buckets: list[dict[str, Any]] = entry.get("buckets", [])
        self.tuned = bool(self.buckets) and all(b["tuned"] for b in self.buckets)
        self._compiled = compiled
        self._count = len(self.params)
        self._outputs = tuple(i for i, p in enumerate(self.params) if p.output)
        self._inputs = self._count - len(self._outputs)
        self._scalars = tuple((i, p) for i, p in enumerate(self.params) if p.scalar)
        index = {p.name: i for i, p in enumerate(self.params)}
        self._alias = {i: index[p.alias] for i, p in enumerate(self.params) if p.alias is not None}
        self._constants: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    @property
    def doc(self) -> str:
        """The signature: parameters with dtypes, shapes and defaults, and the outputs."""
        return signature_text(self.name, self.params)

    def __repr__(self) -> str:
        return f"<blockscale.Function {self.doc}{'' if self.tuned else ' (not tuned)'}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel and return its output, or a tuple if it has several.

        Outputs that are left out are allocated: as torch tensors if the first argument is one, else
        as NumPy arrays.  One that may be an input (``alias``) is that input, updated in place.
        Where autograd records, it is told of the torch tensors that are written, so that a backward
        pass which needs what they were says so; elsewhere that would cost each call 0.2 us.

        Args:
            args: inputs in order, then outputs; None stands for a parameter's default, and for an
                output to be allocated.
            kwargs: the same by parameter name; also sizes by symbol (``rows=5``), for a kernel
                whose output shape does not follow from its inputs.

        Raises:
            TypeError: an argument is missing, unknown, no tensor, or of another dtype.
            ValueError: an argument has another shape, device, layout or alignment, or needs grad.
            RuntimeError: torch records or transforms what this thread does.
        """
        tensors.check_unwatched(self.name)
        return self._checked(args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel, unseen by torch: for callers who have asked `tensors.watcher`."""
        return self._checked(args, kwargs)

    def bind(self, *args: Any) -> BoundKernel:
        """Return the call with these arguments, by position as for `call`, to be made repeatedly.

        Raises:
            TypeError, ValueError: as `__call__`.
        """
        kept: list[Any] = []
        count = self._count
        flagged = self.kind == "cuda" and len(args) == count + 1
        flags = args[count] if flagged else 0
        results = self._checked(args[:count] if flagged else args, {}, flags, kept)
        return BoundKernel(self, kept, results, flags)

    def _checked(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        flags: int = 0,
        kept: list[Any] | None = None,
    ) -> Any:
        """Return the results of a call; with ``kept``, which gets what is passed, do not run it."""
        sizes: dict[str, int] = {}
        if kwargs or len(args) > self._count:
            values, sizes = self._bind(args, kwargs)
        else:
            values = [*args, *[None] * (self._count - len(args))]
        for i, param in self._scalars:
            values[i] = scalar(self.name, param, values[i])
        given = None
        torch = tensors.torch_module()
        key = None if sizes else self._signature(values, torch)
        plan = None if key is None else self._plans.get(key)
        if plan is None:
            given = [*values]
            plan = self._make_plan(values, sizes)
            if key is not None:
                if len(self._plans) >= MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        return self._run(plan, values, given, torch, flags, kept)

    def _run(
        self,
        plan: _Plan,
        values: list[Any],
        given: list[Any] | None,
        torch: Any,
        flags: int,
        kept: list[Any] | None,
    ) -> Any:
        for i, j in plan.aliases:
            values[i] = values[j]
        for i, address, mask, _ in plan.spans:
            if address(values[i]) & mask:
                raise self._misaligned(i, mask + 1, address(values[i]))
        if plan.overlaps:
            self._check_overlap(plan, values)
        for i, constant in plan.constants:
            values[i] = constant
        for i, allocate in plan.allocations:
            values[i] = allocate()
        results = values[self._inputs :]
        if given is not None:  # foreign tensors were replaced by views: return what the caller gave
            for i, j in plan.aliases:
                given[i] = given[j]
            theirs = given[self._inputs :]
            results = [r if g is None else g for r, g in zip(results, theirs, strict=True)]
        if plan.launch:
            for i in plan.views:
                values[i] = tensors.as_bytes(values[i])
            for i in plan.wraps:
                values[i] = tensors.pass_numpy(values[i])
            if kept is None:
                self._launch(values, torch, flags)
                if plan.written and torch.is_grad_enabled():
                    _count_writes(torch, [values[i] for i in plan.written])
            else:
                kept += values
        return results[0] if len(results) == 1 else tuple(results)

    def tell_autograd(self, args: Sequence[Any]) -> None:
        """Count a write to the torch tensors that were written, where autograd records."""
        torch = tensors.torch_module()
        if torch is None or not torch.is_grad_enabled():
            return
        found = [args[self._alias[i] if args[i] is None else i] for i in self._outputs]
        _count_writes(torch, [v for v in found if isinstance(v, torch.Tensor)])

    def _launch(self, values: Sequence[Any], torch: Any, flags: int) -> None:
        if torch is not None:
            tensors.honour_torch_threads(torch)
        self._compiled(*values)

    def _signature(self, values: Sequence[Any], torch: Any) -> tuple[Any, ...] | None:
        return _signature(values, torch)

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, int]]:
        """Return one value per parameter, and the sizes given by symbol."""
        surplus = len(args) - self._count
        if surplus > 0:
            raise TypeError(
                f"{self.name}: got {len(args)} arguments for {self._count} parameters of "
                f"{self.doc}; leave out the last {surplus}"
            )
        values: list[Any] = [*args, *[None] * -surplus]
        index = {p.name: i for i, p in enumerate(self.params)}
        symbols = {s for p in self.params for dim in p.dims for s in dim.symbols}
        sizes: dict[str, int] = {}
        for name, value in kwargs.items():
            if name in index and index[name] >= len(args):
                values[index[name]] = value
            elif name in index:
                raise TypeError(
                    f"{self.name}: {name} is given twice, as argument number {index[name]} and by "
                    "name; leave one out"
                )
            elif name in symbols and isinstance(value, int) and value >= 0:
                sizes[name] = value
            else:
                near = difflib.get_close_matches(name, [*index, *symbols], 1)
                hint = f"did you mean {near[0]}?" if near else f"the parameters are {[*index]}"
                raise TypeError(f"{self.name}: {name}={brief(value)} names no parameter; {hint}")
        return values, sizes

    def _describe(
        self, values: Sequence[Any]
    ) -> tuple[list[Described | None], dict[str, tuple[int, ...]]]:
        """Return the arguments' descriptions, and the dimensions that some symbols stand for."""
        params = zip(self.params, values, strict=True)
        return [None if p.scalar else check_one(self.name, p, v) for p, v in params], {}

    def _make_plan(self, values: list[Any], sizes: Mapping[str, int]) -> _Plan:
        """Check the arguments; replaces foreign tensors in ``values`` by views of tvm_ffi."""
        params = self.params
        values[:] = [tensors.adopt(value) for value in values]
        given, leading = self._describe(values)
        shape = solve_shapes(self.name, params, given, sizes)
        first = next((d for d in given if d is not None), None)
        missing = [i for i, d in enumerate(given) if d is None and not params[i].scalar]
        present = [(i, d) for i, d in enumerate(given) if d is not None]
        launch = any(numel(shape[i]) for i in self._outputs if params[i].name != WORKSPACE)
        if launch:
            check_not_empty(self.name, params, shape)
        aliases = tuple((i, self._alias[i]) for i in missing if i in self._alias)
        for i, j in aliases:
            self._check_writable(i, j, given[j])
        placed = [*present, *((i, d) for i, j in aliases if (d := given[j]) is not None)]
        overlaps = any(params[i].output for i, _ in placed)
        allocated = [i for i in missing if params[i].output and i not in self._alias]
        views = [i for i, d in present if d.dtype != params[i].dtype]
        wraps = [i for i, d in present if _needs_wrap(d)]
        if first is None or first.kind != "torch":
            wraps += [i for i in allocated if params[i].dtype == "bfloat16"]
        return _Plan(
            constants=tuple(
                (i, self._constant(i, shape[i])) for i in missing if not params[i].output
            ),
            aliases=aliases,
            allocations=tuple(
                (i, self._allocator(params[i], _unflatten(params[i], shape[i], leading), first))
                for i in allocated
            ),
            spans=tuple(
                (i, tensors.address_of(d), params[i].alignment - 1, size)
                for i, d in placed
                if (size := numel(shape[i]) * params[i].itemsize)
                and (overlaps or params[i].alignment > 1)
            ),
            overlaps=overlaps,
            views=(*views, *(i for i, j in aliases if j in views)),
            wraps=(*wraps, *(i for i, j in aliases if j in wraps)),
            launch=launch,
            written=tuple(i for i, d in placed if params[i].output and d.kind == "torch"),
        )

    def _check_writable(self, output: int, alias: int, got: Described | None) -> None:
        if got is not None and not got.writable:
            name, own = self.params[alias].name, self.params[output].name
            raise ValueError(
                f"{self.name}: {name} is read-only, but without {own} it is updated in place; "
                f"pass {own}, or a copy of {name}"
            )

    def _constant(self, index: int, shape: tuple[int, ...]) -> Any:
        """Return the tensor that stands for None; one per shape."""
        if (index, shape) not in self._constants:
            param = self.params[index]
            assert param.default is not None, "check_one refuses None without a default"
            self._constants[index, shape] = tensors.constant(shape, param.dtype, param.default)
        return self._constants[index, shape]

    def _allocator(
        self, param: Param, shape: tuple[int, ...], first: Described | None
    ) -> Callable[[], Any]:
        if first is not None and first.kind == "torch":
            torch = tensors.torch_module()
            assert torch is not None, "an argument is a torch tensor"
            empty, cpu = torch.empty, torch.device("cpu")  # whatever the default device is
            torch_dtype = getattr(torch, param.dtype)
            return lambda: empty(shape, dtype=torch_dtype, device=cpu)
        try:
            dtype = tensors.numpy_dtype(param.dtype)
        except TypeError as error:
            raise TypeError(f"{self.name}: {param.name} is to be bfloat16, but {error}") from None
        return lambda: np.empty(shape, dtype)

    def _misaligned(self, index: int, alignment: int, address: int) -> ValueError:
        name = self.params[index].name
        return ValueError(
            f"{self.name}: {name} lies at address {address:#x}, which is not a "
            f"multiple of {alignment} bytes, as the kernel relies on; pass a copy of {name}"
        )

    def _check_overlap(self, plan: _Plan, values: Sequence[Any]) -> None:
        """Raise ValueError if an output shares memory with another argument."""
        ranges = [(i, s := address(values[i]), s + size) for i, address, _, size in plan.spans]
        for i, start, end in ranges:
            if i < self._inputs:
                continue
            for j, other_start, other_end in ranges:
                if self._alias.get(i) == j and (start, end) == (other_start, other_end):
                    continue
                if start < other_end and other_start < end and i != j:
                    name = self.params[i].name
                    raise ValueError(
                        f"{self.name}: {name} overlaps {self.params[j].name} in memory, but the "
                        "kernel may write an output before it has read every input; pass memory "
                        f"of its own for {name}"
                    )


class BoundKernel:
    """A kernel and the arguments of a call, checked, packed and held; call it without arguments.

    What it holds is memory: of a tensor that gets other memory (``set_``, ``data``), the old one.

    Attributes:
        function: the kernel.
        values: what the kernel gets.
        results: of every call.
    """

    def __init__(self, function: Function, kept: list[Any], results: Any, flags: int) -> None:
        self.function = function
        self.results = results
        self.values = tuple(kept)  # none: every output is empty
        packed = [tensors.pack(value) for value in kept]
        self._held = tuple(packed)
        if function.kind == "cuda" and kept:
            first = next(i for i, p in enumerate(function.params) if not p.scalar)
            packed[first] = kept[first]  # a torch tensor brings torch's current stream
            packed.append(flags)
        self._packed = tuple(packed)
        pairs = zip(function.params, self.values, strict=False)
        torch = tensors.torch_module()
        kind: Any = () if torch is None else torch.Tensor
        self._written = tuple(v for p, v in pairs if p.output and isinstance(v, kind))
        self._tails: dict[int, tuple[Any, ...]] = {}
        self._checked = function._compiled if function.kind == "cuda" else function.call
        self.run = self._runner()

    def _runner(self) -> Callable[[], Any]:
        """Return what runs the kernel."""
        compiled, packed, torch = self.function._compiled, self._packed, tensors.torch_module()
        written = self._written
        if not packed:
            return lambda: None
        if self.function.kind == "cuda":
            return self._marked(
                partial(compiled, *packed) if self.function.replay is None else self._recorded()
            )

        def run() -> None:
            if torch is not None:
                tensors.honour_torch_threads(torch)
            compiled(*packed)
            if written and torch is not None and torch.is_grad_enabled():
                _count_writes(torch, written)

        return run

    def _marked(self, launch: Callable[[], Any]) -> Callable[[], None]:
        """Return ``launch`` for callers whose autograd may record."""
        written, torch = self._written, tensors.torch_module()
        if not written or torch is None:
            return launch

        def run() -> None:
            launch()
            if torch.is_grad_enabled():
                _count_writes(torch, written)

        return run

    def _recorded(self) -> Callable[[], Any]:
        """Return what does the launches of the call again: its arguments are checked once more."""
        assert self.function.replay is not None, "there is what replays"
        replay, forget = self.function.replay
        handle = self.function._compiled(*self._packed[:-1], self._packed[-1] | RECORD)
        held, device = self._held, tensors.cuda_index(self.values)
        if device is None:
            run = partial(_replayed, replay, handle, held)
        else:
            run = partial(_replayed_on, replay, handle, tensors.cuda_stream(), device, held)
        weakref.finalize(run, forget, handle).atexit = False
        return run

    def __call__(self) -> Any:
        """Run the kernel and return `results`."""
        self.run()
        return self.results

    def run_on(self, *first: Any) -> None:
        """Run the kernel on other tensors in place of the first arguments, which are checked."""
        tail = self._tails.get(len(first))
        if tail is None:
            given = self._packed if self.function.kind == "cuda" else self.values
            tail = self._tails[len(first)] = self._tail(len(first), given)
        self._checked(*first, *tail)
        if self._written and self.function.kind == "cuda":  # others tell it themselves
            self.function.tell_autograd((*first, *self._tail(len(first), self.values)))

    def _tail(self, count: int, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``values`` from ``count`` on; outputs that are one of the first inputs: None."""
        tail = [*values[count:]]
        for i, j in self.function._alias.items():
            if j < count <= i:
                tail[i - count] = None
        return tuple(tail)


def _count_writes(torch: Any, written: Iterable[Any]) -> None:
    for value in written:  # one by one, as every release of torch takes them
        torch.autograd.graph.increment_version(value)


def _replayed(replay: Callable[..., Any], handle: int, held: Any) -> None:
    replay(handle)


def _replayed_on(
    replay: Callable[..., Any], handle: int, stream: Callable[[int], int], device: int, held: Any
) -> None:
    replay(handle, stream(device))


def _unflatten(
    param: Param, shape: tuple[int, ...], leading: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the shape of an output to be allocated, with as many dimensions as the inputs have."""
    symbol = param.dims[0].symbol if param.dims else None
    return shape if symbol is None else (*leading.get(symbol, shape[:1]), *shape[1:])


def _signature(values: Sequence[Any], torch: Any) -> tuple[Any, ...] | None:
    """Return all that the checks depend on, hashable; None if some argument has no cheap one."""
    key: list[Any] = []
    tensor_type: Any = () if torch is None else torch.Tensor
    for value in values:
        if value is None:
            key.append(None)
        elif isinstance(value, tensor_type):
            if value.layout is not torch.strided or value.is_neg():
                return None
            grad = value.requires_grad and torch.is_grad_enabled()
            kind = value.__class__
            key += (kind, value.shape, value.dtype, value.is_cpu, value.is_contiguous(), grad)
        elif isinstance(value, float | int):  # a scalar, checked; as a tensor it is refused
            key.append(float)
        elif value.__class__ is np.ndarray:
            flags = value.flags
            key += (value.shape, value.dtype, flags.c_contiguous, flags.writeable)
        else:
            return None
    return tuple(key)


def _needs_wrap(got: Described) -> bool:
    return got.kind == "numpy" and (not got.writable or got.dtype == "bfloat16")


class Overloads:
    """The kernels of a base name, one per activation dtype."""

    def __init__(self, name: str, functions: Sequence[Function]) -> None:
        self.name = name
        self.functions = tuple(functions)
        self._first = self.functions[0].params[0].name
        self._by_dtype: dict[Any, Function] = {}

    def __repr__(self) -> str:
        return f"<blockscale.Overloads {self.name}: {', '.join(f.name for f in self.functions)}>"

    def __iter__(self) -> Iterator[Function]:
        return iter(self.functions)

    def select(self, *args: Any, **kwargs: Any) -> Function:
        """Return the kernel whose first parameter (or else whose outputs) have these dtypes.

        Raises:
            TypeError: none has, or several have.
        """
        first = args[0] if args else kwargs.get(self._first)
        fitting = [f for f in self.functions if _fits(f.params[0], first)]
        if len(fitting) == 1:
            self._by_dtype[getattr(first, "dtype", None)] = fitting[0]
        elif fitting:
            fitting = [f for f in fitting if _outputs_fit(f, args, kwargs)]
        if len(fitting) == 1:
            return fitting[0]
        got = tensors.describe(tensors.adopt(first))
        names = ", ".join(f.name for f in self.functions)
        raise TypeError(
            f"{self.name}: {self._first} is {brief(first) if got is None else got.dtype}, which "
            f"fits {'several' if fitting else 'none'} of {names}; call one by its full name"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel that takes these arguments; see `Function.__call__`."""
        dtype = getattr(args[0], "dtype", None) if args else None
        function = self._by_dtype.get(dtype) or self.select(*args, **kwargs)
        return function(*args, **kwargs)


def _outputs_fit(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    bound = dict(zip((p.name for p in function.params), args, strict=False)) | dict(kwargs)
    return all(_fits(p, bound.get(p.name)) for p in function.params if p.output)


def _fits(param: Param, value: Any) -> bool:
    got = None if value is None else tensors.describe(tensors.adopt(value))
    return got is not None and got.dtype in param.dtypes
