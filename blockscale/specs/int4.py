"""Specs of the INT4 ops: dequantise, and matrix products with groups along K.

A weight is w[k, n] = q * scale[k // group, n] + zero[k // group, n], q from -8 to 7.  `LAYOUTS`
says how its codes lie in memory, `blockscale.tir.int4.mm` what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.gemm import check_experts
from blockscale.specs.plans.launches import (
    INT4_PARTS,
    PART,
    Part,
    most_tiles,
    workspace_bytes,
)
from blockscale.specs.plans.moe import scale_bytes
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    Name,
    Param,
    Spec,
    check_choice,
    flag,
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
    op = "int4_mm"
    pattern = Name(
        "int4_mm_{layout}[_e{experts}]_n{n}_k{k}_g{group}{zero}_{activation}{pre_quant}"
        "[_to_{out_dtype}]_{dtype}",
        *("int4_mm_plain_n4096_k4096_g128_a16_bf16", "int4_mm_tiles64_e8_n512_k256_g64z_a8_f16"),
        texts={
            "dtype": DTYPE_SUFFIX,
            "out_dtype": DTYPE_SUFFIX,
            "layout": (*LAYOUTS, TILES),
            "activation": ACTIVATIONS,
            "zero": ZEROS,
            "pre_quant": flag("_pre"),
        },
        absent=lambda fields: {"experts": 0, "out_dtype": fields["dtype"]},
    )

    def __post_init__(self) -> None:
        where = "Int4Mm"
        super().__post_init__()
        for name, step in (("n", 2), ("k", 2 if self.layout == "rows" else 1)):
            if getattr(self, name) % step:
                raise ValueError(
                    f"{where}: {name}={getattr(self, name)} is odd, but two codes are one byte; "
                    "pad the weight"
                )
        if self.experts:  # 0: dense
            check_experts(where, self.experts)
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

    def params(self) -> tuple[Param, ...]:
        """x, offsets, packed, scale, zero, pre_quant_scale, alpha, bias, out, workspace."""
        e, tiles = self.matrices, self.layout == TILES
        offsets = (Param("offsets", "int32", (e + 1,)),)
        packed: tuple[int, ...] = (e, self.k * self.n // 2)
        scale = Param("scale", "float32", (e, self.groups, self.n))
        zero = () if tiles or self.zero == "none" else (replace(scale, name="zero"),)
        pre = Param("pre_quant_scale", "float32", (e, self.k), default=1.0)
        if tiles:
            packed = (e, self.padded_n // TILE, self.padded_k // TILE, TILE_BYTES)
            scale = Param("scale", "uint8", (e, self.padded_n // TILE, *self.scale_blocks))
            pre = Param("pre_quant_scale", self.dtype, ("scales", self.k))
        return (
            Param("x", self.dtype, ("rows", self.k)),
            *(offsets if self.experts else ()),
            Param("packed", "uint8", packed),
            scale,
            *zero,
            *((pre,) if self.pre_quant or not tiles else ()),
            Param("alpha", "float32", (e,), default=1.0),
            Param("bias", "float32", (e, self.n), default=0.0),
            Param("out", self.out_dtype, ("rows", self.n), output=True),
            *((Param("workspace", "uint8", ("bytes",), output=True),) if tiles else ()),
        )

    @property
    def scale_blocks(self) -> tuple[int, int]:
        """Blocks of scales along K of 64 rows in "tiles64", and bytes of one."""
        blocks = ceil_div(self.padded_k, max(TILE, self.group))
        return blocks, scale_bytes("int4", self.group, self.zero != "none")

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
    op = "int4_dequantize"
    pattern = Name(
        "int4_dequantize_{layout}_n{n}_k{k}_g{group}{zero}_{dtype}",
        "int4_dequantize_plain_n4096_k4096_g128_bf16",
        texts={"layout": (*LAYOUTS, TILES), "dtype": DTYPE_SUFFIX, "zero": ZEROS},
    )

    def __post_init__(self) -> None:
        check_choice("Int4Dequantize", "layout", self.layout, LAYOUTS)
        super().__post_init__()

    @property
    def groups(self) -> int:
        """Groups along K."""
        return ceil_div(self.k, self.group)

    def params(self) -> tuple[Param, ...]:
        """packed, scale, zero, out."""
        term = (Param("zero", "float32", ("experts", self.groups, self.n)),)
        return (
            Param("packed", "uint8", ("experts", self.k * self.n // 2)),
            Param("scale", "float32", ("experts", self.groups, self.n)),
            *(term if self.zero != "none" else ()),
            Param("out", self.dtype, ("experts", self.k, self.n), output=True),
        )
