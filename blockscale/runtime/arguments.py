"""The rules of a kernel's arguments: dtype, device, layout, and shapes that agree with each other.

Every error names the function, the parameter, what came, the rule, and what to do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blockscale.base import shapes, tensors
from blockscale.base.tensors import Described
from blockscale.specs.spec import Param


def signature_text(name: str, params: Sequence[Param]) -> str:
    """Return ``name(x: float32[rows, 384], ...) -> y: float32[rows, 64]``."""
    inputs = ", ".join(str(p) for p in params if not p.output)
    outputs = ", ".join(str(p) for p in params if p.output)
    return f"{name}({inputs}) -> {outputs}"


def brief(value: Any) -> str:
    """Return a repr that fits into a sentence."""
    text = repr(value)
    return f"{text[:57]}... ({type(value).__name__})" if len(text) > 60 else text


def scalar(function: str, param: Param, value: Any) -> float | int:
    """Return the number that is passed for a scalar parameter.

    Raises:
        TypeError: it is missing, or no number.
        ValueError: it does not fit into the dtype, is NaN, or below the least that makes sense.
    """
    if value is None:
        if param.default is None:
            raise TypeError(f"{function}: {param.name} is missing; pass a number of {param.type}")
        value = param.default if param.dtype == "float32" else int(param.default)
    if param.dtype == "float32":
        if isinstance(value, float | int | np.floating | np.integer):
            if math.isnan(value) or (param.least is not None and value < param.least):
                rule = "a number" if param.least is None else f"{param.least:g} or more"
                raise ValueError(f"{function}: {param.name} is {value}; pass {rule}")
            return float(value)
    elif isinstance(value, int | np.integer):
        bits = 8 * param.itemsize - 1
        if not -(2**bits) <= value < 2**bits:
            raise ValueError(
                f"{function}: {param.name} is {value}, which is no {param.dtype}; pass a number "
                f"from {-(2**bits)} to {2**bits - 1}"
            )
        return int(value)
    raise TypeError(
        f"{function}: {param.name} is {brief(value)}, expected a number of {param.type}; pass a "
        f"Python {'float' if param.dtype == 'float32' else 'int'}"
    )


def check_one(function: str, param: Param, value: Any, kind: str = "cpu") -> Described | None:
    """Return the description of an argument after the checks that need no other; None for None.

    Args:
        function: its name, for errors.
        param: what the argument is for; not a scalar.
        value: the argument.
        kind: of the library: "cpu" or "cuda".

    Raises:
        TypeError: it is missing, no tensor, or of another dtype.
        ValueError: it is on another device, not contiguous, read-only, requires grad, or its memory
            is not its values.
    """
    where = f"{function}: {param.name}"
    if value is None:
        if param.output or param.default is not None:
            return None
        raise TypeError(f"{where} is missing; pass a tensor of {param.type}")
    got = tensors.describe(value)
    if got is None:
        numpy = ", a NumPy array" if kind == "cpu" else ""
        raise TypeError(
            f"{where} is {brief(value)}, not a tensor; pass a torch tensor{numpy} or "
            f"another DLPack tensor of {param.type}"
        )
    if got.device.partition(":")[0] != kind:
        raise ValueError(
            f"{where} is on {got.device}, but this library runs on {_place(param, got, kind)}"
        )
    if got.dtype not in param.dtypes:
        raise TypeError(
            f"{where} has dtype {got.dtype}, expected {' or '.join(param.dtypes)}; "
            f"{_dtype_remedy(param, got)}"
        )
    if not got.contiguous:
        raise ValueError(
            f"{where} with shape {got.shape} is not contiguous, but the kernel expects one row "
            f"after the other; {_contiguous_remedy(param, got)}"
        )
    strange = tensors.stranger(value)
    if strange is not None:
        what, remedy = strange
        raise ValueError(f"{where} {what}; pass {remedy.format(*2 * [param.name])}")
    if got.grad:
        raise ValueError(
            f"{where} requires grad, but kernels have no backward; call under torch.no_grad(), "
            f"or pass {param.name}.detach()"
        )
    if param.output and not got.writable:
        raise ValueError(f"{where} is read-only, but the kernel writes it; pass a copy")
    return got


def _place(param: Param, got: Described, kind: str) -> str:
    """Return where the library runs, and how to get there."""
    back = " and copy it back" if param.output else ""
    if kind == "cpu":
        return f"the CPU; pass {param.name}.cpu(){back}"
    move = f"torch.from_numpy({param.name})" if got.kind == "numpy" else param.name
    return f"CUDA devices; pass {move}.cuda(){back}"


def flatten(
    params: Sequence[Param], given: Sequence[Described | None]
) -> tuple[list[Described | None], dict[str, tuple[int, ...]]]:
    """Return ``given`` with leading dimensions beyond the declared ones taken as one.

    Returns:
        The descriptions; and for every symbol that is a first dimension, the dimensions that the
        first argument with it has there.
    """
    flat: list[Described | None] = []
    leading: dict[str, tuple[int, ...]] = {}
    for param, got in zip(params, given, strict=True):
        if got is not None and param.flattens and len(got.shape) >= len(param.dims):
            keep = len(got.shape) - len(param.dims) + 1
            symbol = param.dims[0].symbol
            assert symbol is not None, "a parameter that flattens begins with a symbol"
            leading.setdefault(symbol, got.shape[:keep])
            shape = (tensors.numel(got.shape[:keep]), *got.shape[keep:])
            got = replace(got, shape=shape)
        flat.append(got)
    return flat, leading


def check_devices(
    function: str, params: Sequence[Param], given: Sequence[Described | None]
) -> None:
    """Check that all tensors are on one device.

    Raises:
        ValueError: two are not.
    """
    present = [(p, d) for p, d in zip(params, given, strict=True) if d is not None]
    for param, got in present:
        first, other = present[0]
        if got.device != other.device:
            raise ValueError(
                f"{function}: {param.name} is on {got.device}, but {first.name} is on "
                f"{other.device}; pass all tensors on one device"
            )


def _dtype_remedy(param: Param, got: Described) -> str:
    if param.output:
        return "allocate it with that dtype, or leave it out"
    if param.dtype == "uint8":
        return "pass the bytes" + (f" that hold {param.storage}" if param.storage else "")
    call = "to(torch." if got.kind == "torch" else "astype("
    return f"pass {param.name}.{call}{param.dtype}), or call the kernel for {got.dtype}"


def _contiguous_remedy(param: Param, got: Described) -> str:
    if param.output:
        return "pass a contiguous output and copy from it"
    if got.kind == "numpy":
        return f"pass numpy.ascontiguousarray({param.name})"
    return f"pass {param.name}.contiguous()"


def solve_shapes(
    function: str,
    params: Sequence[Param],
    given: Sequence[Described | None],
    sizes: Mapping[str, int],
) -> list[tuple[int, ...]]:
    """Return every parameter's shape, after checking that the given ones agree.

    Args:
        function: its name, for errors.
        params: its parameters.
        given: one description per parameter; None where the caller gave nothing.
        sizes: values of symbols that the caller gave by name.

    Raises:
        ValueError: shapes disagree, or a dimension is no multiple of what it must be.
        TypeError: a shape does not follow from what was given.
    """
    values = dict(sizes)
    origin = dict.fromkeys(sizes, "as given")
    for param, got in zip(params, given, strict=True):
        if got is not None and len(got.shape) != len(param.dims):
            raise ValueError(_rank_error(function, param, got))
    for bare in (True, False):  # a symbol alone says more than an expression: "cols // 2" rounds
        for param, got in zip(params, given, strict=True):
            if got is None:
                continue
            for i, (dim, size) in enumerate(zip(param.dims, got.shape, strict=True)):
                solved = dim.solve(size) if dim.symbol or not bare else None
                if solved is not None and solved[0] not in values:
                    values[solved[0]] = solved[1]
                    origin[solved[0]] = f"from {param.name}.shape[{i}]"
    return [
        tuple(_size(function, param, i, got, values, origin) for i in range(len(param.dims)))
        for param, got in zip(params, given, strict=True)
    ]


def _size(
    function: str,
    param: Param,
    axis: int,
    got: Described | None,
    values: Mapping[str, int],
    origin: Mapping[str, str],
) -> int:
    """Return one dimension, after comparing it with the argument's."""
    dim = param.dims[axis]
    known = ", ".join(f"{s} = {values[s]} {origin[s]}" for s in sorted(dim.symbols & {*values}))
    try:
        size = dim.evaluate(values)
    except shapes.UnboundSymbolError as error:
        if got is not None:  # the kernel reads the size itself; only an allocation needs it here
            return got.shape[axis]
        raise TypeError(
            f"{function}: {param.name} is missing, and its shape {param.type} does not follow "
            f"from the inputs; pass {param.name}, or the size {error.args[0]}=..."
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{function}: {param.name}.shape[{axis}] is to be {dim.text}, but {error} ({known}); "
            "pad the tensor to a multiple"
        ) from None
    if got is not None and got.shape[axis] != size:
        rule = f"{dim.text} = {size} ({known})" if dim.symbols else dim.text
        raise ValueError(
            f"{function}: {param.name} has shape {got.shape}, but shape[{axis}] must be {rule}; "
            f"pass {param.name} as {param.type}"
        )
    return size


WORKSPACE = "workspace"
"""Name of an output that no caller reads, and that may be as large as another call needs it."""


def check_not_empty(
    function: str, params: Sequence[Param], shape: Sequence[tuple[int, ...]]
) -> None:
    """Check that every input of a kernel with something to write has elements.

    A reduction over nothing is an empty loop in compiled code, and its output stays unwritten.

    Raises:
        ValueError: an input is empty.
    """
    for param, size in zip(params, shape, strict=True):
        if not param.output and 0 in size:
            raise ValueError(
                f"{function}: {param.name} has shape {size}, so no elements, but the output has; "
                f"pass at least one element in every dimension of {param.name}"
            )


def _rank_error(function: str, param: Param, got: Described) -> str:
    last = got.shape[-1] if got.shape else 1
    target = "-1" if len(param.dims) == 1 else f"-1, {last}"
    return (
        f"{function}: {param.name} has shape {got.shape}, so {len(got.shape)} dimensions, but "
        f"{param.type} has {len(param.dims)}; pass {param.name}.reshape({target})"
    )
