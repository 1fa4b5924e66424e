"""x86 vector code for E2M1 weights: vector widths, the table look-up, prefetch, registration.

The intrinsics are in `x86_rows` (lanes run along a row) and `x86_panels` (lanes run over rows).
Each is a *desc* in plain loops (the same expressions as the ops) and an *impl* on whole vectors.
A `Width` says which instructions are there:

* "avx512": 16 float32 lanes; VPERMPS looks all 16 codes up in one register.
* "avx2": 8 lanes; VPERMPS looks up the 8 magnitudes, the sign is or-ed in.
* "plain": 8 lanes, which LLVM splits as the CPU needs; the arithmetic of `formats.e2m1_decode`.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: VPERMPS.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.s_tir import TensorIntrin
from tvm.tirx import PrimFunc

from blockscale.base.formats import E2M1
from blockscale.base.targets import CPU_TARGETS
from blockscale.tir import formats
from blockscale.tir.common import i64


@dataclass(frozen=True)
class Width:
    """A vector width: float32 lanes and vector registers."""

    level: str
    lanes: int
    registers: int


_WIDTHS = (Width("avx512", 16, 32), Width("avx2", 8, 16), Width("plain", 8, 8))
WIDTHS = {
    level: width
    for level, row in CPU_TARGETS.items()
    for width in _WIDTHS
    if width.level == row.width
}
"""Vector widths by CPU level."""


def vector(values: list[PrimExpr]) -> PrimExpr:
    """Vector of scalar expressions."""
    return tirx.Shuffle(values, [tirx.const(i, "int32") for i in range(len(values))])


def _table(values: tuple[float, ...]) -> PrimExpr:
    return vector([tirx.const(value, "float32") for value in values])


def e2m1_lookup(level: str, codes: PrimExpr) -> PrimExpr:
    """E2M1 values (float32) of the low four bits of every int32 lane of ``codes``."""
    positive = E2M1.values
    if level == "avx512":
        table = _table(positive + tuple(-value for value in positive))
        name = "llvm.x86.avx512.permvar.sf.512"
        return tirx.call_llvm_pure_intrin("float32x16", name, table, codes)
    if level == "avx2":
        name = "llvm.x86.avx2.permps"
        magnitude = tirx.call_llvm_pure_intrin("float32x8", name, _table(positive), codes)
        sign = (codes & formats.const(8, codes, "int32")) << formats.const(28, codes, "int32")
        return formats.from_bits(formats.bits_of(magnitude) | sign)
    return formats.e2m1_decode(codes)


PREFETCH_BYTES = 8192
"""How far ahead of the packed codes in use the next ones are requested from memory."""


def prefetch(buffer: PrimExpr, distance: int) -> PrimExpr:
    """Request the cache line ``distance`` bytes into uint8 ``buffer`` (PREFETCHT0)."""
    address = tirx.address_of(buffer[i64(distance)])
    return tirx.call_llvm_intrin("void", "llvm.prefetch", address, 0, 3, 1)


def register(name: str, desc: PrimFunc, impl: PrimFunc) -> str:
    """Register a tensor intrinsic and return its name, for `Schedule.tensorize`."""
    TensorIntrin.register(name, desc, impl)
    return name
