"""Specs of quantise, dequantise, of the scales' layout and of the sweep of scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockscale.base import formats
from blockscale.base.formats import E4M3, Format
from blockscale.specs.spec import (
    DTYPE_PATTERN,
    DTYPE_SUFFIX,
    FMT_PATTERN,
    SUFFIX_DTYPE,
    Param,
    Spec,
    check_choice,
    check_positive,
    register,
)


def _scale_shape(layout: str, block: int) -> tuple[int | str, ...]:
    if layout == "linear":
        return ("rows", f"cols // {block}")
    return ("ceil_to(rows, 128)", f"ceil_to(cols // {block}, 4)")


def _scale_storage(row: Format, layout: str) -> str:
    return row.scale.storage if layout == "linear" else f"{row.scale.storage} 128x4"


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
        check_choice("Quantize", "fmt", self.fmt, formats.QUANTIZED)
        check_choice("Quantize", "dtype", self.dtype, DTYPE_SUFFIX)
        check_choice("Quantize", "layout", self.layout, ("linear", "128x4"))
        check_choice("Quantize", "rounding", self.rounding, ("ceil", "floor"))
        if self.format.scale is E4M3 and self.rounding != "ceil":
            raise ValueError(
                f"Quantize: rounding={self.rounding!r} has no meaning for {self.fmt}, whose E4M3 "
                "scales are rounded to nearest; leave it at 'ceil', or choose fmt='mxfp4'"
            )

    @property
    def format(self) -> Format:
        """The row of its format."""
        return formats.QUANTIZED[self.fmt]

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return self.format.block

    @property
    def name(self) -> str:
        """For example ``quantize_nvfp4_128x4_amax_bf16``."""
        flags = ("_128x4" if self.layout == "128x4" else "") + ("_amax" if self.given_amax else "")
        floor = "_floor" if self.rounding == "floor" else ""
        return f"quantize_{self.fmt}{flags}{floor}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """x, (block_amax), global_scale, packed, block_scale."""
        codes = self.format.codes.storage
        amax = Param("block_amax", "float32", (f"rows * cols // {self.block}",))
        return (
            Param("x", self.dtype, ("rows", "cols")),
            *([amax] if self.given_amax else []),
            Param("global_scale", "float32", (1,), default=1.0),
            Param("packed", "uint8", ("rows", "cols // 2"), output=True, storage=codes),
            Param(
                "block_scale",
                "uint8",
                _scale_shape(self.layout, self.block),
                output=True,
                storage=_scale_storage(self.format, self.layout),
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
        check_choice("Dequantize", "fmt", self.fmt, formats.QUANTIZED)
        check_choice("Dequantize", "dtype", self.dtype, DTYPE_SUFFIX)
        check_choice("Dequantize", "layout", self.layout, ("linear", "128x4"))

    @property
    def format(self) -> Format:
        """The row of its format."""
        return formats.QUANTIZED[self.fmt]

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return self.format.block

    @property
    def name(self) -> str:
        """For example ``dequantize_mxfp4_128x4_bf16``."""
        layout = "_128x4" if self.layout == "128x4" else ""
        return f"dequantize_{self.fmt}{layout}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """packed, block_scale, global_scale, out."""
        return (
            Param("packed", "uint8", ("rows", "cols // 2"), storage=self.format.codes.storage),
            Param(
                "block_scale",
                "uint8",
                _scale_shape(self.layout, self.block),
                storage=_scale_storage(self.format, self.layout),
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
        check_choice("ScaleSweep", "dtype", self.dtype, DTYPE_SUFFIX)
        check_positive("ScaleSweep", "block_size", self.block_size)

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


def register_quant() -> None:
    """Make the specs of this module known."""
    register(
        Quantize,
        ("quantize_nvfp4_128x4_amax_f32", "quantize_mxfp4_floor_bf16"),
        rf"quantize_{FMT_PATTERN}(?P<layout>_128x4)?(?P<amax>_amax)?(?P<floor>_floor)?{DTYPE_PATTERN}",
        lambda fmt, layout, amax, floor, dtype: Quantize(
            fmt,
            SUFFIX_DTYPE[dtype],
            "128x4" if layout else "linear",
            bool(amax),
            "floor" if floor else "ceil",
        ),
    )
    register(
        Dequantize,
        ("dequantize_mxfp4_bf16",),
        rf"dequantize_{FMT_PATTERN}(?P<layout>_128x4)?{DTYPE_PATTERN}",
        lambda fmt, layout, dtype: Dequantize(
            fmt, SUFFIX_DTYPE[dtype], "128x4" if layout else "linear"
        ),
    )
    register(Swizzle, ("swizzle_128x4",), "swizzle_128x4", Swizzle)
    register(Unswizzle, ("unswizzle_128x4",), "unswizzle_128x4", Unswizzle)
    register(
        ScaleSweep,
        ("scale_sweep_b16_bf16",),
        rf"scale_sweep_b(?P<block_size>\d+){DTYPE_PATTERN}",
        lambda block_size, dtype: ScaleSweep(SUFFIX_DTYPE[dtype], int(block_size)),
    )
