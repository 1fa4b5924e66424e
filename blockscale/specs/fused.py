"""Specs of the fused ops: RMS norm and activations that end in FP4 codes and block scales."""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base.formats import E2M1, E4M3, FUSED, NUMBERS, QUANTIZED
from blockscale.base.sizes import round_up
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    GLOBAL_SCALE,
    TILE_ROWS,
    Name,
    Param,
    Spec,
    Texts,
    check_choice,
    flag,
    scales,
)

SIXTEEN_BIT = ("bfloat16", "float16")
"""Input dtypes of the fused ops."""

MIN_HIDDEN = 64

CONVENTIONS = {"divide": "", "flashinfer": "_fi"}
"""What is done with the global scale, and how a name spells it."""

_TEXTS: Texts = {
    "block_size,scale_format": {key: row.name for key, row in FUSED.items()},
    "dtype": {dtype: DTYPE_SUFFIX[dtype] for dtype in SIXTEEN_BIT},
}
"""How names spell the fields that both specs have."""


class _Fused(Spec):
    """What both specs have."""

    block_size: int
    scale_format: str

    def __post_init__(self) -> None:
        where, block_size, scale_format = type(self).__name__, self.block_size, self.scale_format
        check_choice(where, "block_size", block_size, dict.fromkeys(block for block, _ in FUSED))
        formats_of_scales = dict.fromkeys(scale for _, scale in FUSED)
        check_choice(where, "scale_format", scale_format, formats_of_scales)
        if (block_size, scale_format) not in FUSED:
            raise ValueError(
                f"{where}: scale_format={scale_format!r} does not go with block_size={block_size}; "
                "choose block_size=32, or scale_format='e4m3'"
            )
        super().__post_init__()

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return self.block_size

    @property
    def scale_storage(self) -> str:
        """What the bytes of block scales are."""
        return NUMBERS[self.scale_format].storage


@dataclass(frozen=True)
class NormQuantize(_Fused):
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
    op = "norm_quantize"
    pattern = Name(
        "{residual}rmsnorm_{block_size,scale_format}_h{hidden}{layout}{y_out}{convention}_{dtype}",
        *("add_rmsnorm_nvfp4_h4096_128x4_bf16", "rmsnorm_mxfp4_h7168_both_y_fi_f16"),
        texts={
            **_TEXTS,
            "residual": flag("add_"),
            "layout": {"linear": "", "128x4": "_128x4", "both": "_both"},
            "y_out": flag("_y"),
            "convention": CONVENTIONS,
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < MIN_HIDDEN or self.hidden % self.block_size:
            up = max(MIN_HIDDEN, round_up(self.hidden, self.block_size))
            raise ValueError(
                f"NormQuantize: hidden={self.hidden} is not a multiple of {self.block_size}, the "
                f"block size, or less than {MIN_HIDDEN}; choose {up}"
            )

    @property
    def blocks(self) -> int:
        """Block scales of a row."""
        return self.hidden // self.block_size

    @property
    def scaled(self) -> bool:
        """Whether the global scale has a meaning: FlashInfer's UE8M0 scales ignore it."""
        return self.convention == "divide" or self.scale_format == "e4m3"

    def params(self) -> tuple[Param, ...]:
        """input, (residual), weight, global_scale, eps, and the outputs.

        Outputs: packed, block_scale, (block_scale_linear), (y_out), (residual_out).
        """
        rows = ("rows", self.hidden)
        main = "linear" if self.layout == "linear" else "128x4"
        residual = Param("residual", self.dtype, rows)
        updated = Param("residual_out", self.dtype, rows, output=True, alias="residual")
        codes, storage = ("rows", self.hidden // 2), self.scale_storage
        linear = scales("block_scale_linear", storage, ("rows",), self.blocks, output=True)
        return (
            Param("input", self.dtype, rows),
            *([residual] if self.residual else []),
            Param("weight", self.dtype, (self.hidden,)),
            GLOBAL_SCALE,
            Param("eps", "float32", None, default=1e-6),
            Param("packed", "uint8", codes, output=True, storage=E2M1.storage),
            scales("block_scale", storage, ("rows",), self.blocks, main, output=True),
            *([linear] if self.layout == "both" else []),
            *([Param("y_out", self.dtype, rows, output=True)] if self.y_out else []),
            *([updated] if self.residual else []),
        )


SWIGLU_DEFAULTS: dict[str, float] = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""Numbers of "swiglu", with the values of gpt-oss."""

FP8 = "float8_e4m3fn"
"""The input dtype of one byte, of "none" alone."""

SCALINGS = {"one": "", "rows": "_rows", "token": "_token"}
"""Global scales: one (per expert), one per row, or one per row that the kernel finds."""

SEARCHES = {
    "none": "",
    **{kind: f"_4over6_{kind}" for kind in ("mae", "mse", "mae_scaled", "mse_scaled")},
}
"""How a block finds its scale: of its maximum over 6, or the better one of that over 6 and over 4.

By the sum of absolute or squared errors; "scaled": of values times the global scale.
"""

SPAN = 448.0 * 6.0
"""What the largest block scale and the largest code make."""


@dataclass(frozen=True)
class ActQuantize(_Fused):
    """Codes and block scales of ``activation(gate) * up``, per expert if ``grouped``.

    Grouped: only the first ``mask[expert]`` rows are read, and their codes written; scales of the
    others are zero.  ``convention`` as in `NormQuantize`; "flashinfer" alone has bytes as input
    (`FP8`), `SCALINGS` and `SEARCHES`.
    """

    activation: str = "silu"
    block_size: int = 16
    scale_format: str = "e4m3"
    dtype: str = "bfloat16"
    layout: str = "linear"
    grouped: bool = False
    convention: str = "divide"
    scaling: str = "one"
    search: str = "none"
    op = "act_quantize"
    pattern = Name(
        "{activation}_{block_size,scale_format}{grouped}{scaling}{search}{layout}{convention}_{dtype}",
        *("silu_and_mul_nvfp4_128x4_bf16", "swiglu_nvfp4_grouped_128x4_fi_bf16"),
        *("quantize_nvfp4_token_4over6_mse_8x4_fi_bf16", "quantize_mxfp4_fi_f8"),
        texts={
            **_TEXTS,
            "dtype": {**{dtype: DTYPE_SUFFIX[dtype] for dtype in SIXTEEN_BIT}, FP8: "f8"},
            "activation": {
                "none": "quantize",
                "silu": "silu_and_mul",
                "gelu_tanh": "gelu_tanh_and_mul",
                "swiglu": "swiglu",
            },
            "layout": {"linear": "", **{layout: f"_{layout}" for layout in TILE_ROWS}},
            "grouped": flag("_grouped"),
            "convention": CONVENTIONS,
            "scaling": SCALINGS,
            "search": SEARCHES,
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grouped and self.layout != "128x4":
            raise ValueError(
                f"ActQuantize: layout={self.layout!r} does not go with grouped=True, whose scales "
                "are in one 128x4 tensor per expert; choose layout='128x4'"
            )
        plain = self.activation == "none" and not self.grouped and self.convention == "divide"
        fmt = FUSED[self.block_size, self.scale_format].name
        if plain and self.layout != "8x4" and fmt in QUANTIZED:
            raise ValueError(
                "ActQuantize: activation='none' with convention='divide' is what Quantize does; "
                "use Quantize, or choose an activation, grouped=True or convention='flashinfer'"
            )
        self._check_options()

    def _check_options(self) -> None:
        """ValueError for options that do not go together."""
        nvfp4 = (self.block_size, self.scale_format) == (16, "e4m3")
        whole = self.activation == "none" and not self.grouped
        rules = (
            ("dtype", self.dtype == FP8, self.activation == "none", "activation='none'"),
            ("dtype", self.dtype == FP8, self.search == "none", "search='none'"),
            ("search", self.search != "none", nvfp4, "block_size=16 and scale_format='e4m3'"),
            ("scaling", self.scaling != "one", not self.grouped, "grouped=False"),
            ("scaling", self.finds_scale, nvfp4 and whole, "NVFP4 and activation='none'"),
            ("scaling", self.finds_scale, self.dtype in SIXTEEN_BIT, "an input of 16 bits"),
        )
        for name, used, fits, needed in rules:
            if used and not (fits and self.convention == "flashinfer"):
                raise ValueError(
                    f"ActQuantize: {name}={getattr(self, name)!r} needs convention='flashinfer' "
                    f"and {needed}; choose these, or leave {name} at its default"
                )

    @property
    def finds_scale(self) -> bool:
        """Whether the kernel finds the global scale of every row."""
        return self.scaling == "token"

    @property
    def held(self) -> str:
        """Dtype of what is quantised: that of the input, of bytes float16."""
        return "float16" if self.dtype == FP8 else self.dtype

    @property
    def gated(self) -> bool:
        """Whether the input is [..., 2 * cols]: gate, then up."""
        return self.activation != "none"

    def params(self) -> tuple[Param, ...]:
        """input, (mask), global_scale, (numbers), packed, block_scale, (row_scale).

        Numbers: alpha, beta, limit of "swiglu"; span, what a row's maximum becomes when it is
        encoded, of "token" with a search in the values themselves.  The global scale of "token" is
        the base, by which a row's maximum becomes row_scale.
        """
        lead: tuple[int | str, ...] = ("experts", "rows") if self.grouped else ("rows",)
        scalars = SWIGLU_DEFAULTS if self.activation == "swiglu" else {}
        if self.finds_scale and self.search in ("mae", "mse"):
            scalars = {"span": SPAN}
        count = "experts" if self.grouped else "rows" if self.scaling == "rows" else 1
        usual = 1 / SPAN if self.finds_scale else 1.0
        storage, blocks = self.scale_storage, f"cols // {self.block}"
        wide = (*lead, "2 * cols" if self.gated else "cols")
        codes = Param("input", "uint8", wide, storage=E4M3.storage)
        return (
            codes if self.dtype == FP8 else Param("input", self.dtype, wide),
            *([Param("mask", "int32", ("experts",))] if self.grouped else []),
            Param("global_scale", "float32", (count,), default=usual),
            *(Param(name, "float32", None, default=value) for name, value in scalars.items()),
            Param("packed", "uint8", (*lead, "cols // 2"), output=True, storage=E2M1.storage),
            scales("block_scale", storage, lead, blocks, self.layout, output=True),
            *([Param("row_scale", "float32", lead, output=True)] if self.finds_scale else []),
        )
