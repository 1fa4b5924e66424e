"""The instruction descriptor of tcgen05.mma (PTX ISA 9.7.16.4.2): shapes, formats and majors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from blockscale.emulator.errors import IllegalOperation

BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
K_OF_KIND = {
    "f16": 16,
    "tf32": 8,
    "f8f6f4": 32,
    "i8": 32,
    "mxf8f6f4": 32,
    "mxf4": 64,
    "mxf4nvf4": 64,
}
_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
D_FORMATS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
SCALE_FORMATS = {
    "mxf8f6f4": {1: "ue8m0"},
    "mxf4": {1: "ue8m0"},
    "mxf4nvf4": {0: "ue4m3", 1: "ue8m0"},
}
_BITS_ERROR = "PTX ISA 9.7.16.4.2, Tables 42 to 44"
_SHAPE_ERROR = "PTX ISA 9.7.16.2.1, Table 39"


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded instruction descriptor; every instance is legal for its kind and CTA group."""

    kind: str
    m: int
    n: int
    k: int
    a_format: str
    b_format: str
    d_format: str  # "f32", "f16" or "s32"
    a_negate: bool
    b_negate: bool
    a_major: str  # "K" or "MN"
    b_major: str
    scale_format: str  # "ue8m0", "ue4m3" or ""
    sfa_id: int
    sfb_id: int
    saturate: bool
    max_shift: int  # columns, .ws only

    @staticmethod
    def decode(
        value: int, kind: str, cta_group: int = 1, ws: bool = False
    ) -> InstructionDescriptor:
        """Return the descriptor in `value`; IllegalOperation when a bit breaks a rule of `kind`."""
        return _decode(int(value) & 0xFFFF_FFFF, kind, cta_group, ws)


@lru_cache(maxsize=1024)
def _decode(value: int, kind: str, cta_group: int, ws: bool) -> InstructionDescriptor:
    if kind not in K_OF_KIND:
        raise ValueError(
            f"InstructionDescriptor: kind {kind!r} is not one of {', '.join(K_OF_KIND)}"
        )
    where = f"instruction descriptor 0x{value:08x} of .kind::{kind}"
    scaled = kind in BLOCK_SCALED
    if value >> 2 & 1:
        raise IllegalOperation(
            f"{where}: bit 2 marks A as sparse and the instruction is a dense tcgen05.mma; clear "
            "the bit (the emulator has no tcgen05.mma.sp)"
        )
    _check_reserved(value, kind, ws, where)
    a_format = _lookup(FORMATS[kind], value >> 7 & 7, "A format, bits 7-9", where)
    b_format = _lookup(FORMATS[kind], value >> 10 & 7, "B format, bits 10-12", where)
    d_format, scale_format = "f32", ""
    if scaled:
        scale_format = _lookup(SCALE_FORMATS[kind], value >> 23 & 1, "scale type, bit 23", where)
    else:
        d_format = _lookup(D_FORMATS[kind], value >> 4 & 3, "D format, bits 4-5", where)
        if kind == "f16" and d_format == "f16" and "bf16" in (a_format, b_format):
            raise IllegalOperation(
                f"{where}: an f16 accumulator needs f16 operands, not {a_format} and {b_format} "
                f"({_SHAPE_ERROR}); set bits 4-5 to 1 (f32)"
            )
    result = InstructionDescriptor(
        kind=kind,
        m=(value >> 24 & 0x1F) << 4 if not scaled else (value >> 27 & 3) << 7,
        n=(value >> 17 & 0x3F) << 3,
        k=K_OF_KIND[kind],
        a_format=a_format,
        b_format=b_format,
        d_format=d_format,
        a_negate=bool(value >> 13 & 1),
        b_negate=bool(value >> 14 & 1),
        a_major="MN" if value >> 15 & 1 else "K",
        b_major="MN" if value >> 16 & 1 else "K",
        scale_format=scale_format,
        sfa_id=value >> 29 & 3 if scaled else 0,
        sfb_id=value >> 4 & 3 if scaled else 0,
        saturate=bool(value >> 3 & 1),
        max_shift=(0, 8, 16, 32)[value >> 30 & 3] if not scaled else 0,
    )
    _check_features(result, where)
    _check_shape(result, cta_group, ws, where)
    return result


def _lookup(codes: dict[int, str], code: int, field: str, where: str) -> str:
    if code not in codes:
        legal = ", ".join(f"{value} ({name})" for value, name in codes.items())
        raise IllegalOperation(f"{where}: {field}, is {code} and must be {legal} ({_BITS_ERROR})")
    return codes[code]


def _check_reserved(value: int, kind: str, ws: bool, where: str) -> None:
    """Reserved bits: Table 42 (no scales), Table 43 (mxf8f6f4), Table 44 (mxf4, mxf4nvf4)."""
    reserved = {"0-1": 3, "6": 1 << 6}
    if kind in BLOCK_SCALED:
        reserved |= {"3": 1 << 3, "24-26": 7 << 24}
        if kind == "mxf8f6f4":
            reserved["31"] = 1 << 31
        elif value >> 31:
            raise IllegalOperation(
                f"{where}: bit 31 asks for K = 96, which needs sm_103a (PTX ISA 9.7.16.2.1); clear "
                "it and use K = 64"
            )
    else:
        reserved |= {"23": 1 << 23, "29": 1 << 29}
        if kind != "i8":
            reserved["3 (saturation is for .kind::i8)"] = 1 << 3
        if not ws:
            reserved["30-31 (maximum shift is for .ws)"] = 3 << 30
    for bits, mask in reserved.items():
        if value & mask:
            raise IllegalOperation(f"{where}: bits {bits} must be 0 ({_BITS_ERROR}); clear them")


def _check_features(idesc: InstructionDescriptor, where: str) -> None:
    """Transpose and negate (Table 51), scale factor ids (9.7.16.10.7)."""
    if idesc.kind == "i8" and (idesc.a_negate or idesc.b_negate):
        raise IllegalOperation(
            f"{where}: .kind::i8 has no negation (PTX ISA 9.7.16.10.1, Table 51); clear bits 13 "
            "and 14"
        )
    if idesc.kind in ("mxf4", "mxf4nvf4"):
        if "MN" in (idesc.a_major, idesc.b_major):
            raise IllegalOperation(
                f"{where}: .kind::{idesc.kind} reads K-major operands only (PTX ISA 9.7.16.10.1, "
                "Table 51); clear bits 15 and 16"
            )
        for name, factor in (("A", idesc.sfa_id), ("B", idesc.sfb_id)):
            if factor not in (0, 2):
                raise IllegalOperation(
                    f"{where}: the scale factor id of {name} is {factor} and must be 0 or 2 "
                    f"({_BITS_ERROR})"
                )


def _check_shape(idesc: InstructionDescriptor, cta_group: int, ws: bool, where: str) -> None:
    """M and N per kind, CTA group and .ws (Table 39), and for a transposed 8-bit B (Table 52)."""
    scaled = idesc.kind in BLOCK_SCALED
    if ws and (scaled or cta_group == 2):
        raise IllegalOperation(
            f"{where}: .ws exists for cta_group::1 without block scaling only ({_SHAPE_ERROR})"
        )
    legal_m: Sequence[int]
    legal_n: Sequence[int]
    if ws:
        legal_m, legal_n, n_rule = (32, 64, 128), (64, 128, 256), "64, 128 or 256"
    elif cta_group == 2:
        step = 32 if idesc.kind == "i8" else 16
        legal_m, legal_n, n_rule = (128, 256), range(step, 257, step), f"a multiple of {step}"
    else:
        legal_m = (128,) if scaled else (64, 128)
        legal_n, n_rule = range(8, 257, 8), "a multiple of 8"
        if idesc.kind == "i8":
            legal_n, n_rule = (8, 16, 24, *range(32, 257, 16)), "8, 16, 24 or a multiple of 16"
    form = f"cta_group::{cta_group}{' with .ws' if ws else ''}"
    if idesc.m not in legal_m:
        raise IllegalOperation(
            f"{where}: M is {idesc.m} and must be {' or '.join(map(str, legal_m))} for {form} "
            f"({_SHAPE_ERROR})"
        )
    if idesc.n not in legal_n:
        raise IllegalOperation(
            f"{where}: N is {idesc.n} and must be {n_rule} up to 256 for {form} ({_SHAPE_ERROR})"
        )
    eight_bits = idesc.kind in ("f8f6f4", "mxf8f6f4", "i8")
    step = 16 * cta_group
    if eight_bits and idesc.b_major == "MN" and idesc.n % step:
        raise IllegalOperation(
            f"{where}: N is {idesc.n} and must be a multiple of {step} when an 8-bit B is "
            f"transposed in {form} (PTX ISA 9.7.16.10.1, Table 52)"
        )
