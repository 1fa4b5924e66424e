"""The formats of quantised tensors: one row each, of which every table elsewhere is made.

A row names its number formats (`Number`), the elements that share a scale, and the ops that take
it.  To add a format whose numbers are known: add a row.  Genuinely new numbers also need their
expressions in `blockscale.tir.formats`, and on GPUs a decode in `blockscale/lower/native`; device
code reads the rows as `formats.h`, which is made of them when a kernel is compiled (`header`).
Nothing here imports torch: dtypes are names.

E2M1, E4M3, E8M0: OCP Microscaling Formats v1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Number:
    """A number format as data.

    Attributes:
        bits: of a code.
        values: of every non-negative code, in the order of the codes.
        signed: whether the highest bit is a sign.
        storage: the word of a parameter's ``storage`` that says that its bytes hold such codes.
        dtypes: torch dtypes of tensors that hold them, the one that we return first.
    """

    name: str
    bits: int
    values: tuple[float, ...]
    signed: bool
    storage: str
    dtypes: tuple[str, ...]

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        return max(value for value in self.values if value == value)


E2M1 = Number(
    *("e2m1", 4, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), True),
    storage="e2m1x2",
    dtypes=("uint8", "float4_e2m1fn_x2"),
)
"""FP4: bit 3 is the sign, no infinity, no NaN."""

E4M3 = Number(
    "e4m3",
    8,
    tuple(
        (m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10))
        if (e, m) != (15, 7)
        else float("nan")
        for e in range(16)
        for m in range(8)
    ),
    True,
    storage="e4m3",
    dtypes=("float8_e4m3fn", "uint8"),
)
"""FP8, also NVFP4's block scale: no infinity, NaN is 0x7F, at most 448; a scale's sign bit is 0."""

UE8M0 = Number(
    *("ue8m0", 8, (*(2.0 ** (b - 127) for b in range(255)), float("nan")), False),
    storage="e8m0",
    dtypes=("uint8", "float8_e8m0fnu"),
)
"""Power-of-two block scale of the MX formats: byte b is 2^(b - 127), 255 is NaN."""

INT4 = Number("int4", 4, tuple(float(v - 8) for v in range(16)), False, "byte", ("uint8",))
"""Symmetric INT4, stored as value + 8."""

FLOAT = Number("float", 16, (), True, "", ())
"""INT4's block scales: floats in the dtype of the activations, which are no codes."""

NUMBERS = {number.name: number for number in (E2M1, E4M3, UE8M0, INT4)}
"""Every number format, by name."""

STORAGE_DTYPES: dict[str, tuple[str, ...]] = {
    **{n.storage: n.dtypes for n in NUMBERS.values()},
    "byte": tuple({d: None for n in NUMBERS.values() if n.bits == 8 for d in n.dtypes}),
}
"""Dtypes of the bytes of a uint8 parameter, by word of its ``storage``."""


@dataclass(frozen=True, eq=False)
class Format:
    """One row.

    Attributes:
        codes: of the elements.
        scale: of the block scales.
        blocks: elements along K that may share a scale.
        ops: families of ops that take it.
        first: codes of a GEMM's first operand, where they are others.
        mma: the kind of tcgen05.mma that multiplies it (PTX ISA 9.7.16.10), and the elements of K
            in one instruction.
    """

    name: str
    codes: Number
    scale: Number
    blocks: tuple[int, ...]
    ops: tuple[str, ...]
    first: Number | None = None
    mma: tuple[str, int] = ("", 0)

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.blocks[0]

    @property
    def a(self) -> Number:
        """Codes of a GEMM's first operand."""
        return self.first or self.codes

    @property
    def b(self) -> Number:
        """Codes of a GEMM's second operand."""
        return self.codes

    @property
    def kind(self) -> str:
        """Kind of tcgen05.mma."""
        return self.mma[0]

    @property
    def step(self) -> int:
        """Elements of K in one instruction of that kind."""
        return self.mma[1]


_ALL = ("quantize", "fused", "gemm", "moe")

ROWS = (
    Format("nvfp4", E2M1, E4M3, (16,), _ALL, mma=("mxf4nvf4", 64)),
    Format("mxfp4", E2M1, UE8M0, (32,), _ALL, mma=("mxf4", 64)),
    Format("mxfp8xmxfp4", E2M1, UE8M0, (32,), ("gemm",), first=E4M3, mma=("mxf8f6f4", 32)),
    Format("mxfp8", E4M3, UE8M0, (32,), ("gemm",), mma=("mxf8f6f4", 32)),
    Format("int4", INT4, FLOAT, (32, 64, 128), ("moe",)),
    Format("e4m3b32", E2M1, E4M3, (32,), ("fused",)),
)


def _taken_by(op: str) -> dict[str, Format]:
    return {row.name: row for row in ROWS if op in row.ops}


QUANTIZED = _taken_by("quantize")
"""What `quantize`, `dequantize` and `linear` take, by name."""

FUSED = {(row.block, row.scale.name): row for row in _taken_by("fused").values()}
"""What the fused ops write, by block size and number format of the scales."""

GEMM = _taken_by("gemm")
"""What GEMMs of two quantised operands take, by name."""

MOE = _taken_by("moe")
"""Weights of an MoE layer, by name."""


def first_with(scale: Number) -> Format:
    """Return the first row with such scales, after which intrinsics for them are named."""
    return next(row for row in QUANTIZED.values() if row.scale is scale)


def header() -> str:
    """Return ``formats.h``: the rows as device code reads them."""

    def enum(name: str, prefix: str, rows: dict[str, Format]) -> str:
        return f"enum {name} {{ {', '.join(prefix + row.upper() for row in rows)} }};"

    def rows(item: Callable[[Format], str]) -> str:
        return " ".join(map(item, QUANTIZED.values()))

    with_e4m3 = [f"FORMAT == BS_{r.name.upper()}" for r in QUANTIZED.values() if r.scale is E4M3]
    return "\n".join(
        [
            "// The rows of blockscale/base/formats.py.",
            "#pragma once",
            enum("BsFormat", "BS_", QUANTIZED),
            enum("BsMoeFormat", "BS_MOE_", MOE),
            f"#define BS_EACH_FORMAT(X) {rows(lambda r: f'X({r.name}, {r.scale.name})')}",
            f"template <int FORMAT> constexpr bool BS_E4M3_SCALES = {' || '.join(with_e4m3)};",
            "",
        ]
    )
