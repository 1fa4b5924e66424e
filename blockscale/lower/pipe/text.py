"""Expressions of the TensorIR as CUDA C++: one rounding where the TensorIR has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from blockscale.base.errors import LoweringError

Load = Callable[[Any, Any], str]
"""Text of an element, of its buffer and indices."""

_FLOAT = {"Add": "__fadd_rn", "Sub": "__fsub_rn", "Mul": "__fmul_rn", "Div": "__fdiv_rn"}
_FLOAT |= {"Max": "fmaxf", "Min": "fminf"}
_OPERATOR = {
    "Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "/", "FloorMod": "%", "Div": "/", "Mod": "%",
    "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "EQ": "==", "NE": "!=", "And": "&&", "Or": "||",
    "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^", "LShift": "<<", "RShift": ">>",
}  # fmt: skip
_CALLS = {
    "tirx.fma": "__fmaf_rn", "tirx.exp": "expf", "tirx.tanh": "tanhf", "tirx.erf": "erff",
    "tirx.sqrt": "sqrtf", "tirx.rsqrt": "rsqrtf", "tirx.fabs": "fabsf",
}  # fmt: skip
_TYPES = {"int64": "int", "int32": "int", "float32": "float", "uint8": "uint8_t", "bool": "bool"}
_TYPES |= {"uint16": "uint16_t", "uint32": "uint32_t"}
_OF_BITS = {
    ("int32", "float32"): "__float_as_int", ("uint32", "float32"): "__float_as_uint",
    ("float32", "int32"): "__int_as_float", ("float32", "uint32"): "__uint_as_float",
}  # fmt: skip


def kind(node: Any) -> str:
    """The node's class."""
    return type(node).__name__


def dtype(node: Any) -> str:
    """The expression's type."""
    return str(node.ty)


def children(node: Any) -> Iterator[Any]:
    """Yield what an expression is made of."""
    if kind(node) == "TensorLoad":
        yield from node.indices
    elif kind(node) == "Call":
        yield from (arg for arg in node.args if kind(arg) != "StringImm")
    elif kind(node) == "Select":
        yield from (node.condition, node.true_value, node.false_value)
    elif hasattr(node, "a") and hasattr(node, "b"):
        yield from (node.a, node.b)
    elif kind(node) in ("Cast", "Not"):
        yield node.value if kind(node) == "Cast" else node.a


def loads(node: Any) -> Iterator[Any]:
    """Yield the elements that an expression reads."""
    if kind(node) == "TensorLoad":
        yield node
    for child in children(node):
        yield from loads(child)


def declarations(node: Any) -> Iterator[str]:
    """Yield the lines that declare the device functions of an expression."""
    if kind(node) == "Call":
        texts = (str(arg.value) for arg in node.args if kind(arg) == "StringImm")
        yield from (text.strip() for text in texts if text.startswith("#include"))
    for child in children(node):
        yield from declarations(child)


def variables(node: Any) -> Iterator[Any]:
    """Yield the variables of an expression."""
    if kind(node) == "Var":
        yield node
    for child in children(node):
        yield from variables(child)


class Text:
    """Prints expressions.

    Attributes:
        names: what variables are called.
        load: how elements of buffers are read.
        pointer: the address of what an instruction's argument points to.
    """

    def __init__(self, names: Mapping[Any, str], load: Load) -> None:
        self.names, self.load, self.pointer = dict(names), load, _no_pointer

    def __call__(self, node: Any) -> str:
        """Return the text of an expression."""
        made = self._leaf(node)
        if made is not None:
            return made
        if kind(node) in _OPERATOR or kind(node) in _FLOAT:
            return self._binary(node)
        if kind(node) == "Cast":
            return self._cast(node)
        if kind(node) == "Call":
            return self._call(node)
        if kind(node) == "Select":
            parts = (node.condition, node.true_value, node.false_value)
            return "({} ? {} : {})".format(*map(self, parts))
        raise LoweringError(f"epilogue: no CUDA for {kind(node)} in {node}")

    def _leaf(self, node: Any) -> str | None:
        name = kind(node)
        if name == "IntImm":
            return str(int(node))
        if name == "FloatImm":
            return number(float(node))
        if name == "Var":
            if node not in self.names:
                raise LoweringError(f"epilogue: {node.name} has no value here")
            return self.names[node]
        return self.load(node.source, node.indices) if name == "TensorLoad" else None

    def _binary(self, node: Any) -> str:
        a, b = self(node.a), self(node.b)
        if dtype(node.a) == "float32" and kind(node) in _FLOAT:
            return f"{_FLOAT[kind(node)]}({a}, {b})"
        if kind(node) in ("Max", "Min"):
            return f"{kind(node).lower()}({a}, {b})"
        return f"({a} {_OPERATOR[kind(node)]} {b})"

    def _cast(self, node: Any) -> str:
        to, of, value = dtype(node), dtype(node.value), self(node.value)
        if {to, of} <= {"int64", "int32"}:
            return value
        if to == "float32" and of in ("bfloat16", "float16"):
            return value  # elements of 16 bits are widened as they are loaded
        if to not in _TYPES or of not in _TYPES:
            raise LoweringError(f"epilogue: no CUDA for a cast of {of} to {to} inside of {node}")
        return f"static_cast<{_TYPES[to]}>({value})"

    def _call(self, node: Any) -> str:
        name = str(node.op.name)
        if name == "tirx.tvm_access_ptr":
            return self.pointer(node.args[1].args[0])
        if name == "tirx.cuda.func_call":
            args = [self(arg) for arg in node.args[1:] if kind(arg) != "StringImm"]
            return f"{node.args[0].value}({', '.join(args)})"
        args = list(map(self, node.args))
        if name == "prim.if_then_else":
            return "({} ? {} : {})".format(*args)
        if name == "tirx.reinterpret":
            return f"{_OF_BITS[dtype(node), dtype(node.args[0])]}({args[0]})"
        if name not in _CALLS or dtype(node) != "float32":
            raise LoweringError(f"epilogue: no CUDA for {name} of {dtype(node)}")
        return f"{_CALLS[name]}({', '.join(args)})"


def number(value: float) -> str:
    """A float32 constant."""
    if math.isnan(value):
        return "__int_as_float(0x7FC00000)"
    if math.isinf(value):
        return f"__int_as_float({'0x7F800000' if value > 0 else '0xFF800000'})"
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _no_pointer(buffer: Any) -> str:
    raise LoweringError(f"an expression points to {buffer.name}")


def indented(lines: Iterable[str], by: int = 1) -> list[str]:
    """Lines further to the right."""
    return ["  " * by + line if line else line for line in lines]
