"""Specs of the GEMMs: a linear layer on 4-bit weights, and products of block-scaled operands.

Both factors of the latter hold codes and 128x4 block scales.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base import formats
from blockscale.base.sizes import round_up
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    GLOBAL_SCALE,
    TILE_COLS,
    TILE_ROWS,
    FormatSpec,
    Name,
    Param,
    check_multiple,
    scales,
)

K_MULTIPLE = 32
"""K is a multiple of this: 16 bytes of E2M1 codes, the unit of TMA, and whole blocks."""

N_MULTIPLE = 8
"""N is a multiple of this: rows of a 16-bit output are then multiples of 16 bytes, as TMA needs."""

ATOM_ROWS, ATOM_COLS = TILE_ROWS["128x4"], TILE_COLS
"""A 128x4 tile of block scales."""

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


@dataclass(frozen=True)
class Linear(FormatSpec):
    """``y[rows, n] = x[rows, k] @ w[n, k].T * global_scale + bias``.

    The weight w is ``packed`` and ``block_scale``, dequantised.
    """

    n: int
    k: int
    fmt: str = "nvfp4"
    dtype: str = "float32"
    op = "linear"
    pattern = Name(
        "linear_{fmt}_n{n}_k{k}_{dtype}",
        "linear_nvfp4_n384_k1536_bf16",
        texts={"fmt": tuple(formats.QUANTIZED), "dtype": DTYPE_SUFFIX},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        what, advice = f"the block size of {self.fmt}", "pad K to {} when quantising the weight"
        check_multiple("Linear", "k", self.k, self.block, what, advice)

    def params(self) -> tuple[Param, ...]:
        """x, packed, block_scale, global_scale, bias, y."""
        return (
            Param("x", self.dtype, ("rows", self.k)),
            Param("packed", "uint8", (self.n, self.k // 2), storage=self.format.codes.storage),
            scales("block_scale", self.format.scale.storage, (self.n,), self.k // self.block),
            GLOBAL_SCALE,
            Param("bias", "float32", (self.n,), default=0.0),
            Param("y", self.dtype, ("rows", self.n), output=True),
        )


@dataclass(frozen=True)
class MmFp4(FormatSpec):
    """``d[rows, n] = alpha * a[rows, k] @ b[n, k].T + bias``, a and b dequantised.

    Block scales are in the 128x4 layout; ``out_dtype`` is the dtype of d.
    """

    n: int
    k: int
    fmt: str = "nvfp4"
    out_dtype: str = "bfloat16"
    op = "mm_fp4"
    pattern = Name(
        "mm_{fmt}_n{n}_k{k}_{out_dtype}",
        *("mm_nvfp4_n4096_k7168_bf16", "mm_mxfp8xmxfp4_n4096_k7168_f32"),
        texts={"fmt": tuple(formats.GEMM), "out_dtype": DTYPE_SUFFIX},
    )

    def __post_init__(self) -> None:
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
        """a, b, a_scale, b_scale, alpha, bias, d."""
        row, scale = self.format, f"{self.format.scale.storage} 128x4"
        rows = f"ceil_to(rows, {ATOM_ROWS})"
        return (
            Param("a", "uint8", ("rows", self.a_bytes), storage=row.a.storage),
            Param("b", "uint8", (self.n, self.b_bytes), storage=row.b.storage),
            Param("a_scale", "uint8", (rows, self.scale_cols), storage=scale),
            Param("b_scale", "uint8", (self.scale_rows, self.scale_cols), storage=scale),
            Param("alpha", "float32", (1,), default=1.0),
            Param("bias", "float32", (self.n,), default=0.0),
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
