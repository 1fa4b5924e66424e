"""Cases of kernels/kinds.cu: one tile of every tcgen05.mma kind, in every shared memory layout."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from tests.emulator.kernels.cuda_kernels import Case, atoms, equal, tensor_map

ROW = 128  # bytes of K in the tile
MMA_BYTES = 32  # bytes of K in one MMA
WIDTHS = {"NONE": 16, "32B": 32, "64B": 64, "128B": 128}
CODES = {"NONE": 0, "32B": 6, "64B": 4, "128B": 2}  # of the shared memory descriptor


@dataclass(frozen=True)
class Format:
    """An element type: its code in the instruction descriptor, TMA's name, bits of E and M."""

    code: int
    tma: str
    bits: int
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0

    def values(self) -> np.ndarray:
        """Return the value of every code of a narrow float; inf and NaN codes of E5M2 are NaN."""
        code = np.arange(1 << self.bits)
        e, m = code >> self.mantissa & (1 << self.exponent) - 1, code & (1 << self.mantissa) - 1
        step = 2.0 ** (np.maximum(e, 1) - self.bias - self.mantissa)
        value = (m + (e > 0) * (1 << self.mantissa)) * step
        value[(e == 31) if self.exponent == 5 else code & 0x7F == 0x7F] = np.nan
        return np.where(code >> self.bits - 1, -value, value)


FORMATS = {
    "f16": Format(0, "FLOAT16", 16),
    "bf16": Format(1, "BFLOAT16", 16),
    "tf32": Format(2, "FLOAT32", 32),
    "u8": Format(0, "UINT8", 8),
    "s8": Format(1, "UINT8", 8),
    "e4m3": Format(0, "UINT8", 8, 4, 3, 7),
    "e5m2": Format(1, "UINT8", 8, 5, 2, 15),
    "e2m3": Format(3, "16U6_ALIGN16B", 6, 2, 3, 1),
    "e3m2": Format(4, "16U6_ALIGN16B", 6, 3, 2, 3),
    "e2m1": Format(5, "16U4_ALIGN16B", 4, 2, 1, 1),
}


def draw(rng: np.random.Generator, name: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return stored elements [rows, k] (codes where they are narrow) and their float64 values."""
    if name in ("u8", "s8"):
        data = rng.integers(0, 256, (rows, k), dtype=np.uint8)
        return data, (data if name == "u8" else data.view(np.int8)).astype(np.float64)
    if name in ("f16", "bf16", "tf32"):
        value = rng.integers(-15, 16, (rows, k)) / 4.0
        bits = value.astype(np.float32)
        stored = {"f16": value.astype(np.float16), "tf32": bits}
        return stored.get(name, (bits.view(np.uint32) >> 16).astype(np.uint16)), value
    table = FORMATS[name].values()
    usable = np.flatnonzero((np.abs(table) >= 0.25) & (np.abs(table) <= 8) | (table == 0))
    codes = rng.choice(usable, (rows, k)).astype(np.uint8)
    return codes, table[codes]


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return narrow codes [rows, k] as the byte stream of global memory, low bits first."""
    if bits not in (4, 6):
        return codes
    stream = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")


def k_major(name: str, rows: int, swizzle: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the TMA box and the Operand of ``rows`` rows with K innermost."""
    fmt, width = FORMATS[name], WIDTHS[swizzle]
    item = max(fmt.bits // 8, 1)
    boxes, box_bytes = ROW // width, rows * width
    tx = rows * ROW * fmt.bits // 8 if fmt.bits < 8 else box_bytes
    lbo = box_bytes if swizzle == "NONE" else 0
    outer = box_bytes * max(MMA_BYTES // width, 1)
    per_box = max(width // MMA_BYTES, 1)
    operand = (boxes, box_bytes, tx, width // item, 0, lbo, 8 * width, per_box, outer, MMA_BYTES)
    return (width // item, rows), (*operand, CODES[swizzle])


def mn_major(name: str, rows: int, swizzle: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the box and the Operand of a matrix stored [k, rows]: M or N innermost."""
    item, width = FORMATS[name].bits // 8, WIDTHS[swizzle]
    k = ROW // item
    boxes, box_bytes = rows * item // width, k * width
    inner = MMA_BYTES // item * width
    operand = (boxes, box_bytes, box_bytes, width // item, 0, box_bytes, 8 * width, 4, 0, inner)
    return (width // item, k), (*operand, CODES[swizzle])


def kind_case(
    rng: np.random.Generator,
    kind: str,
    a: str,
    b: str,
    *,
    m: int = 128,
    n: int = 64,
    swizzles: tuple[str, str] = ("128B", "128B"),
    mn: tuple[bool, bool] = (False, False),
) -> Case:
    """Return D[m, n] of formats a and b; ``mn``: the operand is stored with M or N innermost."""
    scaled, integer = kind == "mxf8f6f4", kind == "i8"
    k = ROW * 8 // max(FORMATS[a].bits, 8)
    maps, values, operands, scales = [], [], [], []
    for name, rows, swizzle, turned in zip((a, b), (m, n), swizzles, mn, strict=True):
        data, value = draw(rng, name, rows, k)
        box, operand = (mn_major if turned else k_major)(name, rows, swizzle)
        stored = np.ascontiguousarray(data.T) if turned else packed(data, FORMATS[name].bits)
        columns = k if FORMATS[name].bits < 8 else 0
        maps.append(tensor_map(stored, FORMATS[name].tma, box, swizzle, columns=columns))
        operands.append(struct.pack("11i", *operand))
        byte = rng.integers(126, 129, (128, 4)).astype(np.uint8)
        scales.append(atoms(byte).reshape(-1))
        factor = 2.0 ** (byte[:rows].astype(np.float64) - 127)
        values.append(value * np.repeat(factor, k // 4, axis=1) if scaled else value)
    want = values[0] @ values[1].T
    result = 2 if integer else 0 if scaled else 1  # D: s32, float32 by the kind, float32
    idesc = result << 4 | FORMATS[a].code << 7 | FORMATS[b].code << 10 | mn[0] << 15 | mn[1] << 16
    idesc |= n // 8 << 17 | m // 16 << 24 | int(scaled) << 23
    d = np.full((m, n), -1, np.int32) if integer else np.full((m, n), np.nan, np.float32)
    return Case(
        source="kinds",
        entry=f"kind_{kind}",
        args=[*maps, *scales, d, m, n, idesc, *operands],
        judge=equal((d, want)),
        shared=2 * 16384 + 1024 + 32,
    )


KINDS = (  # kind, formats, options
    ("f16", "f16", "f16", {}),
    ("f16", "bf16", "bf16", {"m": 64, "swizzles": ("64B", "32B")}),
    ("f16", "f16", "f16", {"swizzles": ("NONE", "NONE"), "n": 32}),
    ("f16", "bf16", "bf16", {"mn": (True, True)}),
    ("f16", "f16", "f16", {"mn": (True, False), "swizzles": ("64B", "64B")}),
    ("tf32", "tf32", "tf32", {"swizzles": ("128B", "64B")}),
    ("f8f6f4", "e4m3", "e5m2", {"swizzles": ("32B", "NONE")}),
    ("f8f6f4", "e5m2", "e4m3", {"mn": (True, False), "m": 128}),
    ("f8f6f4", "e2m3", "e4m3", {}),
    ("f8f6f4", "e2m1", "e3m2", {"n": 128}),
    ("i8", "s8", "s8", {"swizzles": ("64B", "128B")}),
    ("i8", "u8", "s8", {"m": 64}),
    ("mxf8f6f4", "e4m3", "e4m3", {}),
    ("mxf8f6f4", "e5m2", "e2m1", {"n": 128}),
    ("mxf8f6f4", "e2m1", "e4m3", {}),
    ("mxf8f6f4", "e3m2", "e2m3", {}),
)
