"""Specs of the fused ops: RMS norm and activations that end in FP4 codes and block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockscale.base.formats import E2M1, FUSED, NUMBERS, QUANTIZED
from blockscale.base.sizes import round_up
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    SUFFIX_DTYPE,
    Param,
    Spec,
    check_choice,
    check_positive,
    register,
)

SIXTEEN_BIT = ("bfloat16", "float16")
"""Input dtypes of the fused ops."""

MIN_HIDDEN = 64

_NAMED = {row.name: row for row in FUSED.values()}
CONVENTIONS = ("divide", "flashinfer")
_ROWS_OF_LAYOUT = {"128x4": 128, "8x4": 8}


def _check_format(where: str, block_size: object, scale_format: object) -> None:
    check_choice(where, "block_size", block_size, dict.fromkeys(block for block, _ in FUSED))
    check_choice(where, "scale_format", scale_format, dict.fromkeys(scale for _, scale in FUSED))
    if (block_size, scale_format) not in FUSED:
        raise ValueError(
            f"{where}: scale_format={scale_format!r} does not go with block_size={block_size}; "
            "choose block_size=32, or scale_format='e4m3'"
        )


def _codes(lead: tuple[int | str, ...], cols: int | str) -> Param:
    return Param("packed", "uint8", (*lead, cols), output=True, storage=E2M1.storage)


def _scales(
    name: str, lead: tuple[int | str, ...], blocks: int | str, scale_format: str, layout: str
) -> Param:
    """Return the parameter of scales [*lead, blocks]; tiled layouts pad the last two sizes."""
    storage = NUMBERS[scale_format].storage
    shape: tuple[int | str, ...] = (*lead, blocks)
    if layout != "linear":
        tile = _ROWS_OF_LAYOUT[layout]
        width = round_up(blocks, 4) if isinstance(blocks, int) else f"ceil_to({blocks}, 4)"
        shape = (*lead[:-1], f"ceil_to({lead[-1]}, {tile})", width)
        storage = f"{storage} {layout}"
    return Param(name, "uint8", shape, output=True, storage=storage)


@dataclass(frozen=True)
class NormQuantize(Spec):
    """Codes and block scales of ``rmsnorm(input (+ residual)) * weight``.

    ``convention``: "divide": dequantised values are code * scale * global_scale; "flashinfer": code
    * scale / global_scale, or code * scale with UE8M0 scales, which ignore it.
    """

    hidden: int
    block_size: int = 16
    scale_format: str = "e4m3"
    dtype: str = "bfloat16"
    residual: bool = True
    layout: str = "linear"
    y_out: bool = False
    convention: str = "divide"
    op: ClassVar[str] = "norm_quantize"

    def __post_init__(self) -> None:
        _check_format("NormQuantize", self.block_size, self.scale_format)
        check_choice("NormQuantize", "dtype", self.dtype, SIXTEEN_BIT)
        check_choice("NormQuantize", "residual", self.residual, (False, True))
        check_choice("NormQuantize", "layout", self.layout, ("linear", "128x4", "both"))
        check_choice("NormQuantize", "y_out", self.y_out, (False, True))
        check_choice("NormQuantize", "convention", self.convention, CONVENTIONS)
        check_positive("NormQuantize", "hidden", self.hidden)
        if self.hidden < MIN_HIDDEN or self.hidden % self.block_size:
            up = max(MIN_HIDDEN, round_up(self.hidden, self.block_size))
            raise ValueError(
                f"NormQuantize: hidden={self.hidden} is not a multiple of {self.block_size}, the "
                f"block size, or less than {MIN_HIDDEN}; choose {up}"
            )

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return self.block_size

    @property
    def blocks(self) -> int:
        """Block scales of a row."""
        return self.hidden // self.block_size

    @property
    def scaled(self) -> bool:
        """Whether the global scale has a meaning: FlashInfer's UE8M0 scales ignore it."""
        return self.convention == "divide" or self.scale_format == "e4m3"

    @property
    def name(self) -> str:
        """For example ``add_rmsnorm_nvfp4_h4096_128x4_y_fi_bf16``."""
        add = "add_" if self.residual else ""
        fmt = FUSED[self.block_size, self.scale_format].name
        layout = {"linear": "", "128x4": "_128x4", "both": "_both"}[self.layout]
        flags = ("_y" if self.y_out else "") + ("_fi" if self.convention == "flashinfer" else "")
        return f"{add}rmsnorm_{fmt}_h{self.hidden}{layout}{flags}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """input, (residual), weight, global_scale, eps, and the outputs.

        Outputs: packed, block_scale, (block_scale_linear), (y_out), (residual_out).
        """
        rows = ("rows", self.hidden)
        main = "linear" if self.layout == "linear" else "128x4"
        residual = Param("residual", self.dtype, rows)
        updated = Param("residual_out", self.dtype, rows, output=True, alias="residual")
        linear = _scales("block_scale_linear", ("rows",), self.blocks, self.scale_format, "linear")
        return (
            Param("input", self.dtype, rows),
            *([residual] if self.residual else []),
            Param("weight", self.dtype, (self.hidden,)),
            Param("global_scale", "float32", (1,), default=1.0),
            Param("eps", "float32", None, default=1e-6),
            _codes(("rows",), self.hidden // 2),
            _scales("block_scale", ("rows",), self.blocks, self.scale_format, main),
            *([linear] if self.layout == "both" else []),
            *([Param("y_out", self.dtype, rows, output=True)] if self.y_out else []),
            *([updated] if self.residual else []),
        )


_PREFIX = {
    "none": "quantize",
    "silu": "silu_and_mul",
    "gelu_tanh": "gelu_tanh_and_mul",
    "swiglu": "swiglu",
}

SWIGLU_DEFAULTS: dict[str, float] = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""Numbers of "swiglu", with the values of gpt-oss."""


@dataclass(frozen=True)
class ActQuantize(Spec):
    """Codes and block scales of ``activation(gate) * up``, per expert if ``grouped``.

    Grouped: only the first ``mask[expert]`` rows are read, and their codes written; scales of the
    others are zero.  ``convention`` as in `NormQuantize`.
    """

    activation: str = "silu"
    block_size: int = 16
    scale_format: str = "e4m3"
    dtype: str = "bfloat16"
    layout: str = "linear"
    grouped: bool = False
    convention: str = "divide"
    op: ClassVar[str] = "act_quantize"

    def __post_init__(self) -> None:
        check_choice("ActQuantize", "activation", self.activation, _PREFIX)
        _check_format("ActQuantize", self.block_size, self.scale_format)
        check_choice("ActQuantize", "dtype", self.dtype, SIXTEEN_BIT)
        check_choice("ActQuantize", "layout", self.layout, ("linear", *_ROWS_OF_LAYOUT))
        check_choice("ActQuantize", "grouped", self.grouped, (False, True))
        check_choice("ActQuantize", "convention", self.convention, CONVENTIONS)
        if self.grouped and self.layout != "128x4":
            raise ValueError(
                f"ActQuantize: layout={self.layout!r} does not go with grouped=True, whose scales "
                "are in one 128x4 tensor per expert; choose layout='128x4'"
            )
        plain = self.activation == "none" and not self.grouped and self.convention == "divide"
        if plain and self.layout != "8x4" and self._fmt in QUANTIZED:
            raise ValueError(
                "ActQuantize: activation='none' with convention='divide' is what Quantize does; "
                "use Quantize, or choose an activation, grouped=True or convention='flashinfer'"
            )

    @property
    def _fmt(self) -> str:
        return FUSED[self.block_size, self.scale_format].name

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return self.block_size

    @property
    def gated(self) -> bool:
        """Whether the input is [..., 2 * cols]: gate, then up."""
        return self.activation != "none"

    @property
    def name(self) -> str:
        """For example ``silu_and_mul_nvfp4_grouped_128x4_fi_bf16``."""
        grouped = "_grouped" if self.grouped else ""
        layout = "" if self.layout == "linear" else f"_{self.layout}"
        fi = "_fi" if self.convention == "flashinfer" else ""
        suffix = DTYPE_SUFFIX[self.dtype]
        return f"{_PREFIX[self.activation]}_{self._fmt}{grouped}{layout}{fi}_{suffix}"

    def params(self) -> tuple[Param, ...]:
        """input, (mask), global_scale, (alpha, beta, limit), packed, block_scale."""
        lead: tuple[int | str, ...] = ("experts", "rows") if self.grouped else ("rows",)
        scalars = SWIGLU_DEFAULTS if self.activation == "swiglu" else {}
        count = "experts" if self.grouped else 1
        return (
            Param("input", self.dtype, (*lead, "2 * cols" if self.gated else "cols")),
            *([Param("mask", "int32", ("experts",))] if self.grouped else []),
            Param("global_scale", "float32", (count,), default=1.0),
            *(Param(name, "float32", None, default=value) for name, value in scalars.items()),
            _codes(lead, "cols // 2"),
            _scales("block_scale", lead, f"cols // {self.block}", self.scale_format, self.layout),
        )


def _norm_of_name(
    add: str | None,
    fmt: str,
    hidden: str,
    layout: str | None,
    y: str | None,
    fi: str | None,
    dtype: str,
) -> NormQuantize:
    row = _NAMED[fmt]
    return NormQuantize(
        int(hidden),
        row.block,
        row.scale.name,
        SUFFIX_DTYPE[dtype],
        bool(add),
        (layout or "_linear")[1:],
        bool(y),
        "flashinfer" if fi else "divide",
    )


def _act_of_name(
    prefix: str, fmt: str, grouped: str | None, layout: str | None, fi: str | None, dtype: str
) -> ActQuantize | None:
    row = _NAMED[fmt]
    activation = next(key for key, value in _PREFIX.items() if value == prefix)
    if not (grouped or fi or layout == "_8x4" or fmt not in QUANTIZED) and activation == "none":
        return None  # a Quantize
    return ActQuantize(
        activation,
        row.block,
        row.scale.name,
        SUFFIX_DTYPE[dtype],
        (layout or "_linear")[1:],
        bool(grouped),
        "flashinfer" if fi else "divide",
    )


def register_fused() -> None:
    """Make the specs of this module known."""
    fmt, dtype = f"(?P<fmt>{'|'.join(_NAMED)})", "_(?P<dtype>bf16|f16)"
    register(
        NormQuantize,
        ("add_rmsnorm_nvfp4_h4096_128x4_bf16", "rmsnorm_mxfp4_h7168_both_y_fi_f16"),
        rf"(?P<add>add_)?rmsnorm_{fmt}_h(?P<hidden>\d+)(?P<layout>_128x4|_both)?(?P<y>_y)?"
        rf"(?P<fi>_fi)?{dtype}",
        _norm_of_name,
    )
    register(
        ActQuantize,
        ("silu_and_mul_nvfp4_128x4_bf16", "swiglu_nvfp4_grouped_128x4_fi_bf16"),
        rf"(?P<prefix>{'|'.join(_PREFIX.values())})_{fmt}(?P<grouped>_grouped)?"
        rf"(?P<layout>_128x4|_8x4)?(?P<fi>_fi)?{dtype}",
        _act_of_name,
    )
