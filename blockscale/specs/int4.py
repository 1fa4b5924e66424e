"""Specs of the INT4 ops: dequantise, and matrix products with groups along K.

A weight is w[k, n] = q * scale[k // group, n] + zero[k // group, n], q from -8 to 7.  `LAYOUTS`
says how its codes lie in memory, `blockscale.tir.int4.mm` what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.gemm import MAX_EXPERTS
from blockscale.specs.plans.launches import (
    INT4_PARTS,
    PART,
    Part,
    most_tiles,
    workspace_bytes,
)
from blockscale.specs.spec import (
    DTYPE_PATTERN,
    DTYPE_SUFFIX,
    SUFFIX_DTYPE,
    Param,
    Spec,
    check_choice,
    check_positive,
    register,
)

PREPROCESSED = (
    *("int4_a16", "int4_a8", "int4_a16_columns", "int4_a8_columns"),
    "int4_transposed",
)
"""Names of TensorRT-LLM's layouts of 4-bit weights, those of `blockscale.base.index_maps`."""

LAYOUTS = ("plain", "rows", *PREPROCESSED)
"""Layouts that CPU kernels read; "rows": codes 0 to 15 [N, K / 2], as checkpoints have them."""

TILES = "tiles64"
"""The layout that CUDA kernels read, and no CPU kernel (`blockscale.ops.moe.tiles`)."""

ZEROS = {"none": "", "point": "z", "term": "t"}
"""What is subtracted from codes, or added to products; and how a name spells it."""

ACTIVATIONS = ("a16", "a8")
"""Activations as they are, or rounded to E4M3."""

TILE_GROUPS = (128, 64, 32)
"""Groups along K of the layout "tiles64"."""

TILE, TILE_BYTES = 64, 2048
"""Rows and columns of a block of "tiles64", and bytes of its codes."""


@dataclass(frozen=True)
class Int4Mm(Spec):
    """``out[i] = alpha[e] * x'[i] @ w[e] + bias[e]`` for the rows i of expert e.

    x' is x * pre_quant_scale, rounded to the dtype of x, and for "a8" to E4M3 after it.

    Attributes:
        n, k, group: sizes; the last group may be shorter in layouts of a CPU.
        dtype: of x.
        out_dtype: of out.
        experts: 0: dense, one weight for all rows.
        layout: of `LAYOUTS`, or `TILES`.
        activation: of `ACTIVATIONS`.
        zero: of `ZEROS`; CPU kernels know terms, a point z is the term (8 - z) * scale.
        pre_quant: whether a CUDA kernel multiplies x; CPU kernels always do, by 1 if need be.
    """

    n: int
    k: int
    group: int = 128
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    experts: int = 0
    layout: str = "plain"
    activation: str = "a16"
    zero: str = "none"
    pre_quant: bool = False
    op: ClassVar[str] = "int4_mm"

    def __post_init__(self) -> None:
        where = "Int4Mm"
        check_choice(where, "dtype", self.dtype, DTYPE_SUFFIX)
        check_choice(where, "out_dtype", self.out_dtype, DTYPE_SUFFIX)
        check_choice(where, "layout", self.layout, (*LAYOUTS, TILES))
        check_choice(where, "activation", self.activation, ACTIVATIONS)
        check_choice(where, "zero", self.zero, ZEROS)
        for name in ("n", "k", "group"):
            check_positive(where, name, getattr(self, name))
        for name, step in (("n", 2), ("k", 2 if self.layout == "rows" else 1)):
            if getattr(self, name) % step:
                raise ValueError(
                    f"{where}: {name}={getattr(self, name)} is odd, but two codes are one byte; "
                    "pad the weight"
                )
        if not 0 <= self.experts <= MAX_EXPERTS:
            raise ValueError(
                f"{where}: experts={self.experts!r} is not from 0 (dense) to {MAX_EXPERTS}; divide "
                "the experts among several calls"
            )
        if self.layout == TILES:
            self._check_tiles()

    def _check_tiles(self) -> None:
        if self.group not in TILE_GROUPS or self.k % self.group:
            raise ValueError(
                f"Int4Mm: k={self.k} in groups of {self.group} has no CUDA kernel; groups are "
                f"{', '.join(map(str, TILE_GROUPS))} and divide K, a multiple of these can be cut"
            )
        if self.out_dtype != self.dtype or self.dtype == "float32":
            raise ValueError(
                f"Int4Mm: x of {self.dtype} to out of {self.out_dtype} has no CUDA kernel; both "
                "are bfloat16, or both float16"
            )

    @property
    def matrices(self) -> int:
        """Weights: one, or one for each expert."""
        return max(1, self.experts)

    @property
    def groups(self) -> int:
        """Groups along K."""
        return ceil_div(self.k, self.group)

    @property
    def padded_n(self) -> int:
        """N in the layout "tiles64"."""
        return round_up(self.n, TILE)

    @property
    def padded_k(self) -> int:
        """K in the layout "tiles64"."""
        return round_up(self.k, TILE)

    @property
    def copies_rows(self) -> bool:
        """Whether a CUDA kernel multiplies, rounds or permutes x before the product."""
        return self.pre_quant or self.activation == "a8" or self.group == 32

    @property
    def name(self) -> str:
        """For example ``int4_mm_plain_e8_n4096_k4096_g128z_a16_bf16``."""
        experts = f"_e{self.experts}" if self.experts else ""
        pre = "_pre" if self.pre_quant else ""
        to = "" if self.out_dtype == self.dtype else f"_to_{DTYPE_SUFFIX[self.out_dtype]}"
        return (
            f"int4_mm_{self.layout}{experts}_n{self.n}_k{self.k}_g{self.group}{ZEROS[self.zero]}"
            f"_{self.activation}{pre}{to}_{DTYPE_SUFFIX[self.dtype]}"
        )

    def params(self) -> tuple[Param, ...]:
        """x, offsets, packed, scale, zero, pre_quant_scale, alpha, bias, out, workspace."""
        e = self.matrices
        offsets = (Param("offsets", "int32", (e + 1,)),) if self.experts else ()
        tail = Param("out", self.out_dtype, ("rows", self.n), output=True)
        if self.layout == TILES:
            pre = (Param("pre_quant_scale", self.dtype, ("scales", self.k)),)
            return (
                *(Param("x", self.dtype, ("rows", self.k)), *offsets),
                Param(
                    "packed", "uint8", (e, self.padded_n // TILE, self.padded_k // TILE, TILE_BYTES)
                ),
                Param("scale", "uint8", (e, self.padded_n // TILE, *self.scale_blocks)),
                *(pre if self.pre_quant else ()),
                Param("alpha", "float32", (e,), default=1.0),
                Param("bias", "float32", (e, self.n), default=0.0),
                tail,
                Param("workspace", "uint8", ("bytes",), output=True),
            )
        term = (Param("zero", "float32", (e, self.groups, self.n)),)
        return (
            *(Param("x", self.dtype, ("rows", self.k)), *offsets),
            Param("packed", "uint8", (e, self.k * self.n // 2)),
            Param("scale", "float32", (e, self.groups, self.n)),
            *(term if self.zero != "none" else ()),
            Param("pre_quant_scale", "float32", (e, self.k), default=1.0),
            Param("alpha", "float32", (e,), default=1.0),
            Param("bias", "float32", (e, self.n), default=0.0),
            tail,
        )

    @property
    def scale_blocks(self) -> tuple[int, int]:
        """Blocks of scales along K of 64 rows in "tiles64", and bytes of one."""
        parts = 1 if self.zero == "none" else 2
        blocks = ceil_div(self.padded_k, max(TILE, self.group))
        return blocks, TILE * 2 * parts * (2 if self.group == 32 else 1)

    @property
    def workspace(self) -> tuple[Part, ...]:
        """Parts of the memory that a CUDA kernel needs: its table of tiles, copies of rows."""
        sizes: dict[str, dict[str, int]] = {
            "blocks": {"tile": 16},
            "count": {"fixed": PART},
            "x": {"token": 2 * self.padded_k} if self.copies_rows else {},
        }
        return tuple(Part(name, **sizes[name]) for name in INT4_PARTS)

    def workspace_bytes(self, rows: int) -> int:
        """Return the bytes of `workspace` for so many rows."""
        tiles = most_tiles(rows, self.matrices) if self.experts else 0
        return workspace_bytes(self.workspace, rows, rows, tiles)


@dataclass(frozen=True)
class Int4Dequantize(Spec):
    """``out[e, k, n] = q * scale + zero`` in layouts of a CPU, rounded once; any number of experts.

    ``zero``: of `ZEROS`; "point": (q + 8 - zero) * scale.
    """

    n: int
    k: int
    group: int = 128
    dtype: str = "bfloat16"
    layout: str = "plain"
    zero: str = "none"
    op: ClassVar[str] = "int4_dequantize"

    def __post_init__(self) -> None:
        check_choice("Int4Dequantize", "layout", self.layout, LAYOUTS)
        check_choice("Int4Dequantize", "dtype", self.dtype, DTYPE_SUFFIX)
        check_choice("Int4Dequantize", "zero", self.zero, ZEROS)
        for name in ("group", "n", "k"):
            check_positive("Int4Dequantize", name, getattr(self, name))

    @property
    def groups(self) -> int:
        """Groups along K."""
        return ceil_div(self.k, self.group)

    @property
    def name(self) -> str:
        """For example ``int4_dequantize_plain_n4096_k4096_g128_bf16``."""
        return (
            f"int4_dequantize_{self.layout}_n{self.n}_k{self.k}_g{self.group}{ZEROS[self.zero]}"
            f"_{DTYPE_SUFFIX[self.dtype]}"
        )

    def params(self) -> tuple[Param, ...]:
        """packed, scale, zero, out."""
        term = (Param("zero", "float32", ("experts", self.groups, self.n)),)
        return (
            Param("packed", "uint8", ("experts", self.k * self.n // 2)),
            Param("scale", "float32", ("experts", self.groups, self.n)),
            *(term if self.zero != "none" else ()),
            Param("out", self.dtype, ("experts", self.k, self.n), output=True),
        )


_ZERO_OF = {text: zero for zero, text in ZEROS.items()}


def _int4_mm(**found: str | None) -> Int4Mm:
    """Return the spec of a name's parts."""
    dtype = SUFFIX_DTYPE[found["dtype"] or ""]
    return Int4Mm(
        int(found["n"] or 0),
        int(found["k"] or 0),
        int(found["group"] or 0),
        dtype,
        SUFFIX_DTYPE[found["to"]] if found["to"] else dtype,
        int(found["experts"] or 0),
        found["layout"] or "",
        found["activation"] or "",
        _ZERO_OF[found["zero"] or ""],
        bool(found["pre"]),
    )


def register_int4() -> None:
    """Make the specs of this module known."""
    layouts = "|".join(sorted((*LAYOUTS, TILES), key=len, reverse=True))
    sizes = rf"(?P<layout>{layouts})(?:_e(?P<experts>\d+))?_n(?P<n>\d+)_k(?P<k>\d+)"
    group = r"_g(?P<group>\d+)(?P<zero>[zt])?"
    register(
        Int4Mm,
        ("int4_mm_plain_n4096_k4096_g128_a16_bf16", "int4_mm_tiles64_e8_n512_k256_g64z_a8_f16"),
        rf"int4_mm_{sizes}{group}_(?P<activation>a16|a8)(?P<pre>_pre)?"
        rf"(?:_to_(?P<to>f32|bf16|f16))?{DTYPE_PATTERN}",
        _int4_mm,
    )
    register(
        Int4Dequantize,
        ("int4_dequantize_plain_n4096_k4096_g128_bf16",),
        rf"int4_dequantize_{sizes}{group}{DTYPE_PATTERN}",
        lambda layout, experts, n, k, group, zero, dtype: Int4Dequantize(
            int(n), int(k), int(group), SUFFIX_DTYPE[dtype], layout, _ZERO_OF[zero or ""]
        ),
    )
