"""Specs of quantise, dequantise, of the scales' layout and of the sweep of scales."""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base import formats
from blockscale.base.formats import E4M3
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    GLOBAL_SCALE,
    FormatSpec,
    Name,
    Param,
    Spec,
    Texts,
    flag,
    scales,
)

_TEXTS: Texts = {
    "fmt": tuple(formats.QUANTIZED),
    "dtype": DTYPE_SUFFIX,
    "layout": {"linear": "", "128x4": "_128x4"},
}


def check_rounding(where: str, name: str, fmt: str, rounding: str) -> None:
    """ValueError for a way to round block scales that those of ``fmt`` do not have."""
    if formats.QUANTIZED[fmt].scale is E4M3 and rounding != "ceil":
        raise ValueError(
            f"{where}: {name}={rounding!r} has no meaning for {fmt}, whose E4M3 scales are rounded "
            "to nearest; leave it at 'ceil', or choose fmt='mxfp4'"
        )


@dataclass(frozen=True)
class Quantize(FormatSpec):
    """Codes and block scales of ``x[rows, cols]``; ``given_amax``: block maxima are an input."""

    fmt: str = "nvfp4"
    dtype: str = "float32"
    layout: str = "linear"
    given_amax: bool = False
    rounding: str = "ceil"
    op = "quantize"
    pattern = Name(
        "quantize_{fmt}{layout}{given_amax}{rounding}_{dtype}",
        *("quantize_nvfp4_128x4_amax_f32", "quantize_mxfp4_floor_bf16"),
        texts={
            **_TEXTS,
            "given_amax": flag("_amax"),
            "rounding": {"ceil": "", "floor": "_floor"},
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rounding("Quantize", "rounding", self.fmt, self.rounding)

    def params(self) -> tuple[Param, ...]:
        """x, (block_amax), global_scale, packed, block_scale."""
        codes = self.format.codes.storage
        amax = Param("block_amax", "float32", (f"rows * cols // {self.block}",))
        return (
            Param("x", self.dtype, ("rows", "cols")),
            *([amax] if self.given_amax else []),
            GLOBAL_SCALE,
            Param("packed", "uint8", ("rows", "cols // 2"), output=True, storage=codes),
            _block_scale(self, output=True),
        )


@dataclass(frozen=True)
class Dequantize(FormatSpec):
    """``out[rows, cols] = code * (block scale * global scale)``, rounded once to ``dtype``."""

    fmt: str = "nvfp4"
    dtype: str = "bfloat16"
    layout: str = "linear"
    op = "dequantize"
    pattern = Name(
        "dequantize_{fmt}{layout}_{dtype}",
        "dequantize_mxfp4_bf16",
        texts=_TEXTS,
    )

    def params(self) -> tuple[Param, ...]:
        """packed, block_scale, global_scale, out."""
        return (
            Param("packed", "uint8", ("rows", "cols // 2"), storage=self.format.codes.storage),
            _block_scale(self),
            GLOBAL_SCALE,
            Param("out", self.dtype, ("rows", "cols"), output=True),
        )


def _block_scale(spec: Quantize | Dequantize, *, output: bool = False) -> Param:
    storage, blocks = spec.format.scale.storage, f"cols // {spec.block}"
    return scales("block_scale", storage, ("rows",), blocks, spec.layout, output=output)


def _reordered(layout: str, to: str) -> tuple[Param, ...]:
    """Return scale, out: the same scales in two layouts."""
    return (
        scales("scale", "byte", ("rows",), "cols", layout),
        scales("out", "byte", ("rows",), "cols", to, output=True),
    )


@dataclass(frozen=True)
class Swizzle(Spec):
    """Linear block scales to the 128x4 layout; padding is written as zero."""

    op = "swizzle"
    pattern = Name("swizzle_128x4", "swizzle_128x4")

    def params(self) -> tuple[Param, ...]:
        """scale, out."""
        return _reordered("linear", "128x4")


@dataclass(frozen=True)
class Unswizzle(Spec):
    """Block scales in the 128x4 layout back to linear; padding is dropped."""

    op = "unswizzle"
    pattern = Name("unswizzle_128x4", "unswizzle_128x4")

    def params(self) -> tuple[Param, ...]:
        """scale, out: the caller's ``out`` says how many rows and columns are real."""
        return _reordered("128x4", "linear")


@dataclass(frozen=True)
class ScaleSweep(Spec):
    """Per block, the candidate scale with the least squared FP4 rounding error."""

    dtype: str = "float32"
    block_size: int = 16
    op = "scale_sweep"
    pattern = Name(
        "scale_sweep_b{block_size}_{dtype}",
        "scale_sweep_b16_bf16",
        texts={"dtype": DTYPE_SUFFIX},
    )

    def params(self) -> tuple[Param, ...]:
        """x, global_amax, candidates, best_amax."""
        return (
            Param("x", self.dtype, ("blocks", self.block_size)),
            Param("global_amax", "float32", (1,)),
            Param("candidates", "float32", ("count",)),
            Param("best_amax", "float32", ("blocks",), output=True),
        )
