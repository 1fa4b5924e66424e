"""Specs of the GEMMs: a linear layer on 4-bit weights, and products of block-scaled operands.

Both factors of the latter hold codes and 128x4 block scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockscale.base import formats
from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.fused import SIXTEEN_BIT, SWIGLU_DEFAULTS, ActQuantize
from blockscale.specs.plans.launches import LINEAR_PARTS, Part, workspace_bytes
from blockscale.specs.plans.moe import BYTE_FORMS, BYTE_GROUPS, scale_bytes
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    GLOBAL_SCALE,
    TILE_COLS,
    TILE_ROWS,
    FormatSpec,
    Name,
    Param,
    check_choice,
    check_multiple,
    flag,
    scales,
)

K_MULTIPLE = 32
"""K is a multiple of this: 16 bytes of E2M1 codes, the unit of TMA, and whole blocks."""

N_MULTIPLE = 8
"""N is a multiple of this: rows of a 16-bit output are then multiples of 16 bytes, as TMA needs."""

ATOM_ROWS, ATOM_COLS = TILE_ROWS["128x4"], TILE_COLS
"""A 128x4 tile of block scales."""

ACTIVATIONS = ("none", "silu", "gelu_tanh", "relu2")
"""What a GEMM or a linear layer may apply to its elements (`blockscale.tir.activations.of`); of
gated layers, to the gate, which is multiplied by the up."""

GATED_ROWS = 16
"""Rows of b that are gates, and then those that are ups, of a GEMM with a gated activation."""

MAX_EXPERTS = 1024
"""Experts of a grouped GEMM: a GPU kernel keeps a table of them in shared memory."""


def check_experts(where: str, experts: object) -> None:
    """ValueError unless kernels take so many experts."""
    if type(experts) is not int or not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"{where}: experts={experts!r} is not an integer from 1 to {MAX_EXPERTS}; divide more "
            "experts among several calls"
        )


def check_gemm(where: str, n: int, k: int, fmt: str, out_dtype: str) -> None:
    """ValueError unless there is such a GEMM."""
    MmFp4.pattern.check(where, {"fmt": fmt, "out_dtype": out_dtype, "n": n, "k": k})
    loaded = "16 bytes of 4-bit codes, in which rows of operands are loaded"
    stored = "16 bytes of 16-bit values, in which rows of d are stored"
    check_multiple(where, "k", k, K_MULTIPLE, loaded, "pad K of a and b with zeros to {}")
    check_multiple(where, "n", n, N_MULTIPLE, stored, "pad b with rows of zeros to N={}")


def check_gated(where: str, n: int, fmt: str) -> None:
    """ValueError unless rows of the quantised result have whole 128x4 tiles of scales."""
    what = f"the rows of b of 4 blocks of {fmt}, gates and ups"
    advice = "pad gates and ups with rows of zeros to N={}"
    check_multiple(where, "n", n, 8 * formats.GEMM[fmt].block, what, advice)


_ACTIVATION_TEXTS = {"none": "", **{name: f"_{name}" for name in ACTIVATIONS[1:]}}

LINEAR_FORMATS = (*formats.QUANTIZED, "int4")
"""Weights of a linear layer."""

TILE = 64
"""Rows and columns of a block of the layout "tiles64" (`blockscale.ops.moe.tiles`)."""

TILED = ("tiles64", "tiles64e")
"""Layouts of a linear layer's weight that CUDA kernels decode."""

ACT_FORMATS = ("", "fp8")
"""What a linear layer's kernel rounds rows of x to: E4M3, each with a scale; "": nothing."""


def _only_group(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The group of formats that have one, which names leave out, and no zeros."""
    blocks = next(row.blocks for row in formats.ROWS if row.name == fields["fmt"])
    return {"group": blocks[0], "zero": False} if len(blocks) == 1 else {}


@dataclass(frozen=True)
class Linear(FormatSpec):
    """``y[rows, n] = act(x[rows, k] @ w[n, k].T * global_scale + bias) + residual``.

    The weight w is ``packed`` and ``block_scale``, dequantised.  Gated: of the rows of w half are
    gates and half are ups, and y is [rows, n / 2], ``act(gate) * up + residual``.

    "fp8": x is first rounded to e4m3(x / s) * s, s the largest magnitude of its row / 448; codes
    are multiplied, and s after the sum.

    Attributes:
        n, k: rows and columns of w.
        fmt: of `LINEAR_FORMATS`; int4 in layout "tiles64" alone.
        dtype: of x and residual.
        group: elements of K that share a scale; 0: the only one of the format.
        zero: whether int4 codes have zero points.
        layout: of the weight: "linear" (CPU; gates, then ups), "tiles64" (CUDA), or "tiles64e"
            ("fp8", and weights of `BYTE_GROUPS`; `blockscale.ops.moe.rows`, `.rounded`), which has
            a global scale for each row, and many rows of which are multiplied as E4M3.
        activation: of `ACTIVATIONS`.
        gated, residual: see above.
        out_dtype: of y; "": that of x.
        by_row: whether each row of w has a global scale of its own, as rows of several weights
            have; not gated, and not int4.
        act_fmt: of `ACT_FORMATS`.
        fast_accum: in layout "tiles64e", MMAs of 8 bits may sum up all of K, in some 14 bits
            (Hopper); what is multiplied in 16 bits is the same.  Not of int4, whose sums are those
            of groups.
    """

    n: int
    k: int
    fmt: str = "nvfp4"
    dtype: str = "float32"
    group: int = 0
    zero: bool = False
    layout: str = "linear"
    activation: str = "none"
    gated: bool = False
    residual: bool = False
    out_dtype: str = ""
    by_row: bool = False
    act_fmt: str = ""
    fast_accum: bool = False
    op = "linear"
    pattern = Name(
        "linear_{fmt}[g{group}{zero}]_n{n}_k{k}{by_row}{activation}{gated}{residual}{act_fmt}"
        "{fast_accum}{layout}[_to_{out_dtype}]_{dtype}",
        *("linear_nvfp4_n384_k1536_bf16", "linear_mxfp4_n5632_k1024_silu_gated_tiles64_bf16"),
        "linear_mxfp4_n4096_k4096_fp8_tiles64e_bf16",
        "linear_int4g128_n4096_k4096_fp8_tiles64e_bf16",
        texts={
            "fmt": LINEAR_FORMATS,
            "dtype": DTYPE_SUFFIX,
            "out_dtype": DTYPE_SUFFIX,
            "activation": _ACTIVATION_TEXTS,
            "layout": {"linear": "", **{name: f"_{name}" for name in TILED}},
            "act_fmt": {"": "", "fp8": "_fp8"},
            "zero": flag("z"),
            "by_row": flag("_byrow"),
            "gated": flag("_gated"),
            "residual": flag("_res"),
            "fast_accum": flag("_fast"),
        },
        absent=lambda fields: {"out_dtype": fields["dtype"], **_only_group(fields)},
    )

    def __post_init__(self) -> None:
        where = "Linear"
        check_choice(where, "fmt", self.fmt, LINEAR_FORMATS)
        object.__setattr__(self, "group", self.group or self.format.blocks[-1])
        object.__setattr__(self, "out_dtype", self.out_dtype or self.dtype)
        super().__post_init__()
        check_choice(where, "group", self.group, self.format.blocks)
        if self.zero and self.fmt != "int4":
            raise ValueError(f"{where}: only int4 has zero points; leave zero out for {self.fmt}")
        what, advice = f"the block size of {self.fmt}", "pad K to {} when quantising the weight"
        check_multiple(where, "k", self.k, self.group, what, advice)
        if self.gated:
            check_multiple(where, "n", self.n, 2, "a gate and an up for each column", "pass {}")
            if self.activation == "none":
                raise ValueError(
                    f"{where}: gated=True without an activation of the gates; choose one of "
                    f"{', '.join(ACTIVATIONS[1:])}"
                )
        if self.by_row and (self.gated or self.fmt == "int4"):
            raise ValueError(
                f"{where}: by_row=True, but {'gates and ups have' if self.gated else 'int4 has'} "
                "no global scale of each row; leave by_row out"
            )
        if self.layout == "linear" and self.fmt == "int4":
            raise ValueError(
                f"{where}: int4 in layout 'linear' has no kernel; Int4Mm has, or layout='tiles64'"
            )
        if self.tiled:
            check_choice(where, "dtype", self.dtype, ("bfloat16", "float16"))
            check_choice(where, "out_dtype", self.out_dtype, {self.dtype, "float32"})
        known = self.group in BYTE_GROUPS.get(self.fmt, ())
        if self.layout == "tiles64e" and not (known and self.act_fmt == "fp8"):
            raise ValueError(
                f"{where}: layout='tiles64e' is for act_fmt='fp8' and {BYTE_FORMS}, not for fmt="
                f"{self.fmt!r}, group={self.group} and act_fmt={self.act_fmt!r}; choose "
                "layout='tiles64'"
            )
        if self.fast_accum and self.fmt == "int4":
            raise ValueError(
                f"{where}: fast_accum=True, but sums of int4 are those of groups; leave it out"
            )
        if self.fast_accum and self.layout != "tiles64e":
            raise ValueError(
                f"{where}: fast_accum=True is for layout='tiles64e', not for layout="
                f"{self.layout!r}, whose sums are float32; leave it out"
            )
        if self.layout == "tiles64e" and self.by_row:
            raise ValueError(
                f"{where}: by_row=True, but in layout='tiles64e' each row has a global scale in "
                "any case; leave by_row out"
            )

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.group

    @property
    def cols(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n

    @property
    def factors(self) -> int:
        """How many global scales there are; in layout "tiles64e", in the order of its rows."""
        if self.layout == "tiles64e":
            return self.padded_n
        return self.n if self.by_row else 2 if self.gated else 1

    @property
    def tiled(self) -> bool:
        """Whether it is for CUDA, where kernels decode blocks of the weight."""
        return self.layout in TILED

    @property
    def copies_rows(self) -> bool:
        """Whether a CUDA kernel quantises x before the one that multiplies, in a workspace."""
        return self.tiled and bool(self.act_fmt)

    @property
    def workspace(self) -> tuple[Part, ...]:
        """Parts of the memory that `copies_rows` needs: rows of 8 or 16 bits, and their scales."""
        sizes = {"x": 2 * self.padded_k, "row_scale": 4}
        return tuple(Part(name, token=sizes[name]) for name in LINEAR_PARTS)

    def workspace_bytes(self, rows: int) -> int:
        """Return the bytes of `workspace` for so many rows."""
        return workspace_bytes(self.workspace, rows, rows, 0)

    @property
    def padded_n(self) -> int:
        """Rows of the weight in layout "tiles64": gates and ups are padded alike."""
        return round_up(self.cols, TILE) * (2 if self.gated else 1)

    @property
    def padded_k(self) -> int:
        """Columns of the weight in layout "tiles64"."""
        return round_up(self.k, TILE)

    def params(self) -> tuple[Param, ...]:
        """x, packed, block_scale, global_scale, bias, [residual,] y[, workspace].

        The global scale of gated layers is [2], of gates and of ups; by row, [n].
        """
        storage, scale = self.format.codes.storage, self.format.scale.storage
        factor = replace(GLOBAL_SCALE, shape=(self.factors,))
        weight: tuple[Param, ...] = (
            Param("packed", "uint8", (self.n, self.k // 2), storage=storage),
            scales("block_scale", scale, (self.n,), self.k // self.group),
            factor,
        )
        if self.tiled:
            rows, wide = self.padded_n // TILE, scale_bytes(self.fmt, self.group, self.zero)
            blocks = ceil_div(self.padded_k, max(TILE, self.group))
            packed = (rows, self.padded_k // TILE, TILE * TILE // 2)
            weight = (
                Param("packed", "uint8", packed),
                Param("block_scale", "uint8", (rows, blocks, wide)),
                factor,
            )
        residual = (Param("residual", self.dtype, ("rows", self.cols)),)
        return (
            Param("x", self.dtype, ("rows", self.k)),
            *weight,
            Param("bias", "float32", (self.n,), default=0.0),
            *(residual if self.residual else ()),
            Param("y", self.out_dtype, ("rows", self.cols), output=True),
            *((Param("workspace", "uint8", ("bytes",), output=True),) if self.copies_rows else ()),
        )


@dataclass(frozen=True)
class MmFp4(FormatSpec):
    """``d[rows, n] = activation(alpha * a[rows, k] @ b[n, k].T + bias) + residual``, dequantised.

    Block scales are in the 128x4 layout; ``out_dtype`` is the dtype of d and of the residual, which
    there is only with ``residual``.
    """

    n: int
    k: int
    fmt: str = "nvfp4"
    out_dtype: str = "bfloat16"
    activation: str = "none"
    residual: bool = False
    op = "mm_fp4"
    pattern = Name(
        "mm_{fmt}_n{n}_k{k}{activation}{residual}_{out_dtype}",
        *("mm_nvfp4_n4096_k7168_bf16", "mm_mxfp8xmxfp4_n4096_k7168_f32"),
        "mm_nvfp4_n4096_k7168_silu_residual_bf16",
        texts={
            "fmt": tuple(formats.GEMM),
            "out_dtype": DTYPE_SUFFIX,
            "activation": _ACTIVATION_TEXTS,
            "residual": flag("_residual"),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_gemm("MmFp4", self.n, self.k, self.fmt, self.out_dtype)

    @property
    def a_bytes(self) -> int:
        """Bytes of a row of a."""
        return self.k // self.format.a.per_byte

    @property
    def b_bytes(self) -> int:
        """Bytes of a row of b."""
        return self.k // self.format.b.per_byte

    @property
    def scale_cols(self) -> int:
        """Columns of both scale tensors, padding included."""
        return round_up(self.k // self.block, ATOM_COLS)

    @property
    def scale_rows(self) -> int:
        """Rows of the scales of one matrix b, padding included."""
        return round_up(self.n, ATOM_ROWS)

    def params(self) -> tuple[Param, ...]:
        """a, b, a_scale, b_scale, alpha, bias, (residual), d."""
        residual = Param("residual", self.out_dtype, ("rows", self.n))
        row, scale = self.format, f"{self.format.scale.storage} 128x4"
        rows = f"ceil_to(rows, {ATOM_ROWS})"
        return (
            Param("a", "uint8", ("rows", self.a_bytes), storage=row.a.storage),
            Param("b", "uint8", (self.n, self.b_bytes), storage=row.b.storage),
            Param("a_scale", "uint8", (rows, self.scale_cols), storage=scale),
            Param("b_scale", "uint8", (self.scale_rows, self.scale_cols), storage=scale),
            Param("alpha", "float32", (1,), default=1.0),
            Param("bias", "float32", (self.n,), default=0.0),
            *([residual] if self.residual else []),
            Param("d", self.out_dtype, ("rows", self.n), output=True),
        )


@dataclass(frozen=True)
class GroupedMmFp4(FormatSpec):
    """``d[i] = alpha[e] * a[i] @ b[e].T`` for the rows ``offsets[e] <= i < offsets[e + 1]``.

    Rows of d in no range are not written.  In a_scale, each expert's rows start at a multiple of
    128: the first tile of expert e is the number of tiles that the experts before it fill.
    """

    experts: int
    n: int
    k: int
    fmt: str = "nvfp4"
    out_dtype: str = "bfloat16"
    op = "grouped_mm_fp4"
    pattern = Name(
        "grouped_mm_{fmt}_e{experts}_n{n}_k{k}_{out_dtype}",
        "grouped_mm_nvfp4_e8_n4096_k7168_bf16",
        texts={"fmt": tuple(formats.GEMM), "out_dtype": DTYPE_SUFFIX},
    )

    def __post_init__(self) -> None:
        check_experts("GroupedMmFp4", self.experts)
        check_gemm("GroupedMmFp4", self.n, self.k, self.fmt, self.out_dtype)

    @property
    def matrix(self) -> MmFp4:
        """The GEMM of one expert."""
        return MmFp4(self.n, self.k, self.fmt, self.out_dtype)

    def params(self) -> tuple[Param, ...]:
        """a, b, a_scale, b_scale, offsets, alpha, d."""
        one, row = self.matrix, self.format
        scale, cols = f"{row.scale.storage} 128x4", one.scale_cols
        b, b_scale = (self.experts, self.n, one.b_bytes), (self.experts, one.scale_rows, cols)
        return (
            Param("a", "uint8", ("rows", one.a_bytes), storage=row.a.storage),
            Param("b", "uint8", b, storage=row.b.storage),
            Param("a_scale", "uint8", ("scale_rows", cols), storage=scale),
            Param("b_scale", "uint8", b_scale, storage=scale),
            Param("offsets", "int32", (self.experts + 1,)),
            Param("alpha", "float32", (self.experts,), default=1.0),
            Param("d", self.out_dtype, ("rows", self.n), output=True),
        )


@dataclass(frozen=True)
class GroupedMmActFp4Quant(FormatSpec):
    """`GroupedMmFp4` rounded to ``dtype``, and `ActQuantize` of it with a scale for each expert.

    Rows of b are 16 gates, 16 ups, and so on.  Codes and scales are those of a of a `GroupedMmFp4`
    with the same offsets: scales of the rows that fill an expert's last 128 are zero, and what is
    of no expert is not written.
    """

    experts: int
    n: int
    k: int
    fmt: str = "nvfp4"
    activation: str = "silu"
    dtype: str = "bfloat16"
    op = "grouped_mm_act_fp4quant"
    pattern = Name(
        "grouped_mm_{fmt}_e{experts}_n{n}_k{k}_{activation}_fp4quant_{dtype}",
        "grouped_mm_nvfp4_e8_n4096_k7168_swiglu_fp4quant_bf16",
        texts={
            "fmt": tuple(name for name, row in formats.GEMM.items() if row.a is formats.E2M1),
            "activation": {
                "silu": "silu_and_mul",
                "gelu_tanh": "gelu_tanh_and_mul",
                "swiglu": "swiglu",
            },
            "dtype": {dtype: DTYPE_SUFFIX[dtype] for dtype in SIXTEEN_BIT},
        },
    )

    def __post_init__(self) -> None:
        where = type(self).__name__
        check_experts(where, self.experts)
        super().__post_init__()
        check_gemm(where, self.n, self.k, self.fmt, self.dtype)
        check_gated(where, self.n, self.fmt)

    @property
    def product(self) -> GroupedMmFp4:
        """The GEMM."""
        return GroupedMmFp4(self.experts, self.n, self.k, self.fmt, self.dtype)

    @property
    def rule(self) -> ActQuantize:
        """What is done with its result."""
        scale = self.format.scale.name
        return ActQuantize(self.activation, self.block, scale, self.dtype, "128x4")

    def params(self) -> tuple[Param, ...]:
        """a, b, a_scale, b_scale, offsets, alpha, global_scale, (numbers), packed, block_scale."""
        *inputs, _ = self.product.params()
        numbers = SWIGLU_DEFAULTS if self.activation == "swiglu" else {}
        row, cols = self.format, self.n // 2
        scale = f"{row.scale.storage} 128x4"
        return (
            *inputs,
            Param("global_scale", "float32", (self.experts,), default=1.0),
            *(
                Param("gate_alpha" if name == "alpha" else name, "float32", None, default=value)
                for name, value in numbers.items()
            ),
            Param("packed", "uint8", ("rows", cols // 2), output=True, storage=row.a.storage),
            Param(
                *("block_scale", "uint8", ("scale_rows", cols // self.block)),
                output=True,
                storage=scale,
            ),
        )
