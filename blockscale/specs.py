"""What a kernel is called, what it takes and returns: one frozen dataclass per op.

A spec is the identity of an exported function.  It is valid by construction, knows its symbol
name, and lists its parameters in the order of the exported function.  This module imports neither
tvm nor torch, so that the process that only *calls* kernels can name and check them;
`blockscale.tir` turns a spec into TensorIR.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

BLOCK_SIZE: dict[str, int] = {"nvfp4": 16, "mxfp4": 32}
"""Elements that share one block scale, by format."""

SCALE_STORAGE: dict[str, str] = {"nvfp4": "e4m3", "mxfp4": "e8m0"}
"""Number format of the block scale bytes, by format."""

DTYPE_SUFFIX: dict[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Activation dtypes that kernels read and write, and how a function's name spells them."""

_SUFFIX_DTYPE = {suffix: dtype for dtype, suffix in DTYPE_SUFFIX.items()}

Layout = Literal["linear", "128x4"]
Rounding = Literal["ceil", "floor"]


@dataclass(frozen=True)
class Param:
    """One parameter of an exported function.

    ``shape`` holds integers, symbols (``"rows"``), or expressions of symbols (``"cols // 16"``,
    ``"ceil_to(rows, 128)"``).  ``default`` is the constant that stands for ``None`` (None:
    required).  ``storage`` says what the bytes of a uint8 parameter encode.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    output: bool = False
    default: float | None = None
    storage: str | None = None


def _check_choice(where: str, name: str, value: object, allowed: object) -> None:
    choices = list(allowed)  # type: ignore[call-overload]
    if value not in choices:
        raise ValueError(f"{where}: {name}={value!r} is not one of {choices}; choose one of them")


def _check_positive(where: str, name: str, value: object) -> None:
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
        _check_choice("Spec", "op", data.get("op"), SPECS)
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
            for suffix in _SUFFIX_DTYPE:
                try:
                    overloads.append(Spec.parse(f"{name}_{suffix}"))
                except ValueError:
                    continue
            if overloads:
                return overloads
            raise


def _scale_shape(layout: str, block: int) -> tuple[int | str, ...]:
    if layout == "linear":
        return ("rows", f"cols // {block}")
    return ("ceil_to(rows, 128)", f"ceil_to(cols // {block}, 4)")


def _scale_storage(fmt: str, layout: str) -> str:
    return SCALE_STORAGE[fmt] if layout == "linear" else f"{SCALE_STORAGE[fmt]} 128x4"


@dataclass(frozen=True)
class Linear(Spec):
    """``y[rows, n] = x[rows, k] @ w[n, k].T * global_scale + bias``.

    The weight w is ``packed`` and ``block_scale``, dequantised.
    """

    n: int
    k: int
    fmt: str = "nvfp4"
    dtype: str = "float32"
    op: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        _check_choice("Linear", "fmt", self.fmt, BLOCK_SIZE)
        _check_choice("Linear", "dtype", self.dtype, DTYPE_SUFFIX)
        _check_positive("Linear", "n", self.n)
        _check_positive("Linear", "k", self.k)
        if self.k % self.block:
            up = -(-self.k // self.block) * self.block
            raise ValueError(
                f"Linear: k={self.k} is not a multiple of {self.block}, the block size of "
                f"{self.fmt}; pad K to {up} when quantising the weight"
            )

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return BLOCK_SIZE[self.fmt]

    @property
    def name(self) -> str:
        """For example ``linear_nvfp4_n384_k1536_bf16``."""
        return f"linear_{self.fmt}_n{self.n}_k{self.k}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """x, packed, block_scale, global_scale, bias, y."""
        return (
            Param("x", self.dtype, ("rows", self.k)),
            Param("packed", "uint8", (self.n, self.k // 2), storage="e2m1x2"),
            Param(
                "block_scale",
                "uint8",
                (self.n, self.k // self.block),
                storage=SCALE_STORAGE[self.fmt],
            ),
            Param("global_scale", "float32", (1,), default=1.0),
            Param("bias", "float32", (self.n,), default=0.0),
            Param("y", self.dtype, ("rows", self.n), output=True),
        )


@dataclass(frozen=True)
class Quantize(Spec):
    """Codes and block scales of ``x[rows, cols]``; ``given_amax``: block maxima are an input."""

    fmt: str = "nvfp4"
    dtype: str = "float32"
    layout: str = "linear"
    given_amax: bool = False
    rounding: str = "ceil"
    op: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        _check_choice("Quantize", "fmt", self.fmt, BLOCK_SIZE)
        _check_choice("Quantize", "dtype", self.dtype, DTYPE_SUFFIX)
        _check_choice("Quantize", "layout", self.layout, ("linear", "128x4"))
        _check_choice("Quantize", "rounding", self.rounding, ("ceil", "floor"))
        if self.fmt == "nvfp4" and self.rounding != "ceil":
            raise ValueError(
                f"Quantize: rounding={self.rounding!r} has no meaning for nvfp4, whose E4M3 scales "
                "are rounded to nearest; leave it at 'ceil', or choose fmt='mxfp4'"
            )

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return BLOCK_SIZE[self.fmt]

    @property
    def name(self) -> str:
        """For example ``quantize_nvfp4_128x4_amax_bf16``."""
        flags = ("_128x4" if self.layout == "128x4" else "") + ("_amax" if self.given_amax else "")
        floor = "_floor" if self.rounding == "floor" else ""
        return f"quantize_{self.fmt}{flags}{floor}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """x, (block_amax), global_scale, packed, block_scale."""
        amax = Param("block_amax", "float32", (f"rows * cols // {self.block}",))
        return (
            Param("x", self.dtype, ("rows", "cols")),
            *([amax] if self.given_amax else []),
            Param("global_scale", "float32", (1,), default=1.0),
            Param("packed", "uint8", ("rows", "cols // 2"), output=True, storage="e2m1x2"),
            Param(
                "block_scale",
                "uint8",
                _scale_shape(self.layout, self.block),
                output=True,
                storage=_scale_storage(self.fmt, self.layout),
            ),
        )


@dataclass(frozen=True)
class Dequantize(Spec):
    """``out[rows, cols] = code * (block scale * global scale)``, rounded once to ``dtype``."""

    fmt: str = "nvfp4"
    dtype: str = "bfloat16"
    layout: str = "linear"
    op: ClassVar[str] = "dequantize"

    def __post_init__(self) -> None:
        _check_choice("Dequantize", "fmt", self.fmt, BLOCK_SIZE)
        _check_choice("Dequantize", "dtype", self.dtype, DTYPE_SUFFIX)
        _check_choice("Dequantize", "layout", self.layout, ("linear", "128x4"))

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return BLOCK_SIZE[self.fmt]

    @property
    def name(self) -> str:
        """For example ``dequantize_mxfp4_128x4_bf16``."""
        layout = "_128x4" if self.layout == "128x4" else ""
        return f"dequantize_{self.fmt}{layout}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """packed, block_scale, global_scale, out."""
        return (
            Param("packed", "uint8", ("rows", "cols // 2"), storage="e2m1x2"),
            Param(
                "block_scale",
                "uint8",
                _scale_shape(self.layout, self.block),
                storage=_scale_storage(self.fmt, self.layout),
            ),
            Param("global_scale", "float32", (1,), default=1.0),
            Param("out", self.dtype, ("rows", "cols"), output=True),
        )


@dataclass(frozen=True)
class Swizzle(Spec):
    """Linear block scales to the 128x4 layout; padding is written as zero."""

    op: ClassVar[str] = "swizzle"

    @property
    def name(self) -> str:
        """Always ``swizzle_128x4``."""
        return "swizzle_128x4"

    def params(self) -> tuple[Param, ...]:
        """scale, out."""
        padded = ("ceil_to(rows, 128)", "ceil_to(cols, 4)")
        return (
            Param("scale", "uint8", ("rows", "cols"), storage="byte"),
            Param("out", "uint8", padded, output=True, storage="byte 128x4"),
        )


@dataclass(frozen=True)
class Unswizzle(Spec):
    """Block scales in the 128x4 layout back to linear; padding is dropped."""

    op: ClassVar[str] = "unswizzle"

    @property
    def name(self) -> str:
        """Always ``unswizzle_128x4``."""
        return "unswizzle_128x4"

    def params(self) -> tuple[Param, ...]:
        """scale, out: the caller's ``out`` says how many rows and columns are real."""
        padded = ("ceil_to(rows, 128)", "ceil_to(cols, 4)")
        return (
            Param("scale", "uint8", padded, storage="byte 128x4"),
            Param("out", "uint8", ("rows", "cols"), output=True, storage="byte"),
        )


@dataclass(frozen=True)
class ScaleSweep(Spec):
    """Per block, the candidate scale with the least squared FP4 rounding error."""

    dtype: str = "float32"
    block_size: int = 16
    op: ClassVar[str] = "scale_sweep"

    def __post_init__(self) -> None:
        _check_choice("ScaleSweep", "dtype", self.dtype, DTYPE_SUFFIX)
        _check_positive("ScaleSweep", "block_size", self.block_size)

    @property
    def name(self) -> str:
        """For example ``scale_sweep_b16_bf16``."""
        return f"scale_sweep_b{self.block_size}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """x, global_amax, candidates, best_amax."""
        return (
            Param("x", self.dtype, ("blocks", self.block_size)),
            Param("global_amax", "float32", (1,)),
            Param("candidates", "float32", ("count",)),
            Param("best_amax", "float32", ("blocks",), output=True),
        )


SPECS: dict[str, type[Spec]] = {
    cls.op: cls for cls in (Linear, Quantize, Dequantize, Swizzle, Unswizzle, ScaleSweep)
}
"""Every op, by name."""

NAME_EXAMPLES = (
    "linear_nvfp4_n384_k1536_bf16",
    "quantize_nvfp4_128x4_amax_f32",
    "quantize_mxfp4_floor_bf16",
    "dequantize_mxfp4_bf16",
    "swizzle_128x4",
    "unswizzle_128x4",
    "scale_sweep_b16_bf16",
)
"""One name of each kind, for help texts and errors."""


def _matcher(pattern: str, make: Callable[..., Spec]) -> Callable[[str], Spec | None]:
    regex = re.compile(pattern)

    def parse(name: str) -> Spec | None:
        found = regex.fullmatch(name)
        return make(**found.groupdict()) if found else None

    return parse


_FMT = "(?P<fmt>nvfp4|mxfp4)"
_DTYPE = "_(?P<dtype>f32|bf16|f16)"
_PARSERS = (
    _matcher(
        rf"linear_{_FMT}_n(?P<n>\d+)_k(?P<k>\d+){_DTYPE}",
        lambda fmt, n, k, dtype: Linear(int(n), int(k), fmt, _SUFFIX_DTYPE[dtype]),
    ),
    _matcher(
        rf"quantize_{_FMT}(?P<layout>_128x4)?(?P<amax>_amax)?(?P<floor>_floor)?{_DTYPE}",
        lambda fmt, layout, amax, floor, dtype: Quantize(
            fmt,
            _SUFFIX_DTYPE[dtype],
            "128x4" if layout else "linear",
            bool(amax),
            "floor" if floor else "ceil",
        ),
    ),
    _matcher(
        rf"dequantize_{_FMT}(?P<layout>_128x4)?{_DTYPE}",
        lambda fmt, layout, dtype: Dequantize(
            fmt, _SUFFIX_DTYPE[dtype], "128x4" if layout else "linear"
        ),
    ),
    _matcher("swizzle_128x4", Swizzle),
    _matcher("unswizzle_128x4", Unswizzle),
    _matcher(
        rf"scale_sweep_b(?P<block_size>\d+){_DTYPE}",
        lambda block_size, dtype: ScaleSweep(_SUFFIX_DTYPE[dtype], int(block_size)),
    ),
)
