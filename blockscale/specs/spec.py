"""What every spec is: a frozen dataclass that names a kernel and lists its parameters.

`blockscale.specs` has the specs themselves, one per op, and fills the registry of this module.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from string import ascii_letters
from typing import Any, ClassVar, Literal

from blockscale.base import formats, shapes

DTYPE_SUFFIX: dict[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Activation dtypes that kernels read and write, and how a function's name spells them."""

SUFFIX_DTYPE = {suffix: dtype for dtype, suffix in DTYPE_SUFFIX.items()}
"""The reverse of `DTYPE_SUFFIX`."""

Layout = Literal["linear", "128x4"]
Rounding = Literal["ceil", "floor"]


@dataclass(frozen=True)
class Param:
    """One parameter of an exported function, as spec and manifest describe it.

    ``shape`` holds integers, symbols (``"rows"``), or expressions of symbols (``"cols // 16"``,
    ``"ceil_to(rows, 128)"``); None: a number passed by value.  ``default`` is the constant that
    stands for ``None`` (None: required).  ``storage`` says what the bytes of a uint8 parameter
    encode.  ``alias`` names the input that this output may be the very same tensor as; a caller
    who leaves the output out passes that input, which is then updated in place.  ``align``: the
    bytes of which the data address must be a multiple; None: those of an element.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None
    output: bool = False
    default: float | None = None
    storage: str | None = None
    alias: str | None = None
    align: int | None = None

    @staticmethod
    def from_manifest(entry: Mapping[str, Any]) -> Param:
        """Return the parameter that a manifest describes."""
        shape = entry["shape"]
        return Param(**{**entry, "shape": None if shape is None else tuple(shape)})

    def to_manifest(self) -> dict[str, Any]:
        """Return how a manifest describes the parameter."""
        said = asdict(self)
        return said if self.align is not None else {k: v for k, v in said.items() if k != "align"}

    @property
    def scalar(self) -> bool:
        """Whether it is a number passed by value."""
        return self.shape is None

    @property
    def flattens(self) -> bool:
        """Whether leading dimensions beyond the declared ones are taken as one (on CUDA)."""
        return bool(self.dims) and self.dims[0].symbol is not None

    @property
    def alignment(self) -> int:
        """Bytes of which the data address must be a multiple."""
        return self.align or self.itemsize

    @cached_property
    def dims(self) -> tuple[shapes.Dim, ...]:
        """The shape, parsed; empty for a scalar."""
        return tuple(shapes.parse(dim) for dim in self.shape or ())

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.dtype.lstrip(ascii_letters)) // 8

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that an argument may have: the declared one, and those with the same bytes."""
        words = (self.storage or "").split() if self.dtype == "uint8" else []
        found = (dtype for word in words for dtype in formats.STORAGE_DTYPES.get(word, ()))
        return tuple(dict.fromkeys((self.dtype, *found)))

    @property
    def type(self) -> str:
        """For example ``float32[rows, 384]``, or ``float32`` for a scalar."""
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        default = "" if self.default is None else f" = {self.default:g}"
        return f"{self.name}: {self.type}{default}"


def check_choice(where: str, name: str, value: object, allowed: object) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    choices = list(allowed)  # type: ignore[call-overload]
    if value not in choices:
        raise ValueError(f"{where}: {name}={value!r} is not one of {choices}; choose one of them")


def check_positive(where: str, name: str, value: object) -> None:
    """ValueError unless ``value`` is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{where}: {name}={value!r} is not a positive integer; pass the matrix size"
        )


class Spec(ABC):
    """Base of all specs; subclasses are frozen dataclasses of plain values."""

    op: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """Exported symbol, for example ``linear_nvfp4_n384_k384_bf16``."""

    @property
    def base_name(self) -> str:
        """The name without its activation dtype: the overload set that it belongs to."""
        return re.sub(r"_(f32|bf16|f16)$", "", self.name)

    @abstractmethod
    def params(self) -> tuple[Param, ...]:
        """Parameters in the order of the exported function: inputs, then outputs."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `from_json` makes an equal spec."""
        return {"op": self.op, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(data: dict[str, Any]) -> Spec:
        """Return the spec that `to_json` described; ValueError names a field that does not fit."""
        check_choice("Spec", "op", data.get("op"), SPECS)
        cls = SPECS[data["op"]]
        values = {key: value for key, value in data.items() if key != "op"}
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        if not set(values) <= known:
            unknown = sorted(set(values) - known)
            raise ValueError(f"{cls.__name__}: unknown fields {unknown}; known are {sorted(known)}")
        return cls(**values)

    @staticmethod
    def parse(name: str) -> Spec:
        """Return the spec whose `name` is ``name``; ValueError lists the name patterns."""
        for parser in _PARSERS:
            spec = parser(name)
            if spec is not None and spec.name == name:
                return spec
        raise ValueError(f"'{name}' names no kernel; names look like {', '.join(NAME_EXAMPLES)}")

    @staticmethod
    def parse_all(name: str) -> list[Spec]:
        """Return the spec called ``name``, or, for a base name, one spec per activation dtype."""
        try:
            return [Spec.parse(name)]
        except ValueError:
            overloads = []
            for suffix in SUFFIX_DTYPE:
                try:
                    overloads.append(Spec.parse(f"{name}_{suffix}"))
                except ValueError:
                    continue
            if overloads:
                return overloads
            raise


SPECS: dict[str, type[Spec]] = {}
"""Every op, by name."""

NAME_EXAMPLES: list[str] = []
"""One name of each kind, for help texts and errors."""

_PARSERS: list[Callable[[str], Spec | None]] = []

FMT_PATTERN = f"(?P<fmt>{'|'.join(formats.QUANTIZED)})"
DTYPE_PATTERN = "_(?P<dtype>f32|bf16|f16)"


def register(
    cls: type[Spec], examples: tuple[str, ...], pattern: str, make: Callable[..., Spec | None]
) -> None:
    """Make a spec known: example names, the pattern of its names, ``make(**groups)`` -> spec."""
    regex = re.compile(pattern)

    def parse(name: str) -> Spec | None:
        found = regex.fullmatch(name)
        return make(**found.groupdict()) if found else None

    SPECS[cls.op] = cls
    NAME_EXAMPLES.extend(examples)
    _PARSERS.append(parse)
