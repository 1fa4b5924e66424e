"""What one tcgen05.mma reads, computes and writes (PTX ISA 9.7.16.10).

Products and their sum are exact (float64 holds every product of two operands and scales, and sums
of them up to 53 bits apart); D is added in float64 and the result is rounded once to D's format, to
nearest even. The manual does not define the order or the intermediate precision of the
accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator import formats
from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05 import layout
from blockscale.emulator.tcgen05.descriptor import SmemDescriptor
from blockscale.emulator.tcgen05.instruction import InstructionDescriptor
from blockscale.emulator.tcgen05.opcode import Opcode
from blockscale.emulator.tcgen05.operand import Offsets, tile_offsets
from blockscale.emulator.tcgen05.unpack import from_shared, from_tensor_memory

Values = NDArray[np.float64]
Words = NDArray[np.uint32]
CONTAINER_BITS = {"f16": 16, "tf32": 32}  # other kinds: bytes (packed pairs for mxf4 and mxf4nvf4)
COPY_LANES = layout.PARTITION


@dataclass(frozen=True, eq=False)
class MmaPlan:
    """Shapes, cells and numerics of one tcgen05.mma for one CTA of its group."""

    idesc: InstructionDescriptor
    cta_group: int
    ws: bool
    ashift: bool
    block: int  # elements per scale factor, 0 without block scaling
    d_cells: layout.Cells
    a_cells: layout.Cells | None  # A in tensor memory
    sfa_cells: layout.ScaleCells | None
    sfb_cells: layout.ScaleCells | None

    @property
    def m(self) -> int:
        """Rows of A and D over the CTA group."""
        return self.idesc.m

    @property
    def n(self) -> int:
        """Columns of B and D."""
        return self.idesc.n

    @property
    def k(self) -> int:
        """Elements of one row of A."""
        return self.idesc.k

    @property
    def rows(self) -> int:
        """Rows of A and D in one CTA."""
        return self.idesc.m // self.cta_group

    @property
    def columns(self) -> int:
        """Columns of D, which every CTA of the group has all of."""
        return self.idesc.n

    @property
    def b_rows(self) -> int:
        """Rows (n) of B that lie in one CTA's shared memory: CTA rank r has r * b_rows and up."""
        return self.idesc.n // self.cta_group

    @property
    def bits(self) -> int:
        """Bits of the container of one operand element in shared memory."""
        return CONTAINER_BITS.get(self.idesc.kind, 8)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of A or B in shared memory: always 32."""
        packed = 2 if self.idesc.kind in ("mxf4", "mxf4nvf4") else 1
        return self.k * self.bits // 8 // packed

    def a_offsets(self, descriptor: int) -> Offsets:
        """Return the addresses int32 [rows, row_bytes] of A in each CTA's own shared memory."""
        decoded = SmemDescriptor.decode(descriptor)
        self._check_major("A", self.idesc.a_major, decoded)
        return tile_offsets(decoded, self.rows, self.row_bytes, self.bits, self.idesc.a_major)

    def b_offsets(self, descriptor: int) -> Offsets:
        """Return the addresses int32 [b_rows, row_bytes] of B in each CTA's own shared memory."""
        decoded = SmemDescriptor.decode(descriptor)
        self._check_major("B", self.idesc.b_major, decoded)
        return tile_offsets(decoded, self.b_rows, self.row_bytes, self.bits, self.idesc.b_major)

    def _check_major(self, operand: str, major: str, decoded: SmemDescriptor) -> None:
        """128B swizzling with 32B atoms is for transposed tf32 and nothing else (Table 54)."""
        atoms = decoded.swizzle == "128B_base32B"
        if major == "MN" and atoms != (self.idesc.kind == "tf32"):
            must = "must" if self.idesc.kind == "tf32" else "cannot"
            raise IllegalOperation(
                f"tcgen05.mma .kind::{self.idesc.kind}: {operand} is transposed and its descriptor "
                f"has swizzle {decoded.swizzle}; it {must} be 128B with 32B atomicity (PTX ISA "
                "9.7.16.10.1); change the layout or clear the transpose bit"
            )

    def check_address(self, operand: str, address: int, cells: layout.Cells) -> tuple[int, int]:
        """Return (lane, column) of D's or A's address; raise when the matrix does not fit."""
        lane, column = address >> 16, address & 0xFFFF
        half = layout.layout_name(self.m, self.cta_group, self.ws) == "F"
        if lane not in ((0, 16) if half else (0,)):
            raise IllegalOperation(
                f"tcgen05.mma: {operand} at tensor memory address 0x{address:08x} has lane {lane}, "
                f"which must be {'0 or 16' if half else '0'} for M = {self.m} (PTX ISA 9.7.16.10.5)"
            )
        width = int(cells.column[..., -1].max()) + 1
        if column + width > layout.COLUMNS:
            raise IllegalOperation(
                f"tcgen05.mma: {operand} at tensor memory address 0x{address:08x} needs columns "
                f"{column} to {column + width - 1} of {layout.COLUMNS} (PTX ISA 9.7.16.1)"
            )
        return lane, column

    def check_d_address(self, address: int) -> tuple[int, int]:
        """Return (lane, column) of d-tmem, checked."""
        return self.check_address("D", address, self.d_cells)

    def check_a_address(self, address: int, d_address: int = -1) -> tuple[int, int]:
        """Return (lane, column) of a-tmem, checked; with M = 64 its lane must be D's."""
        assert self.a_cells is not None
        lane, column = self.check_address("A", address, self.a_cells)
        if d_address >= 0 and lane != d_address >> 16:
            raise IllegalOperation(
                f"tcgen05.mma: A is at lane {lane} and D at lane {d_address >> 16} of tensor "
                "memory; M = 64 needs the same lane (PTX ISA 9.7.16.10.5)"
            )
        return lane, column

    def check_scale_address(self, operand: str, address: int) -> tuple[int, int]:
        """Return (lane, column) of a scale factor address, checked; bits 30-31 are ignored.

        CUTLASS leaves the scale factor id, which the instruction descriptor repeats, in these two
        bits.
        """
        cells = self.sfa_cells if operand == "A" else self.sfb_cells
        assert cells is not None
        lane, column = address >> 16 & 0x3FFF, address & 0xFFFF
        width = int(cells.column.max()) + 1
        if lane or column + width > layout.COLUMNS:
            raise IllegalOperation(
                f"tcgen05.mma: scale factors of {operand} at tensor memory address 0x{address:08x} "
                f"are lane {lane}, columns {column} to {column + width - 1}; the lane must be 0 "
                f"and the columns below {layout.COLUMNS} (PTX ISA 9.7.16.10.7)"
            )
        return lane, column

    def decode_a(self, raw: NDArray[Any]) -> Values:
        """Return A float64 [rows, K]; from tensor memory [copies, rows, K] of words likewise."""
        idesc = self.idesc
        if raw.dtype == np.uint32:
            values = from_tensor_memory(raw, idesc.kind, idesc.a_format)
        else:
            values = from_shared(raw, idesc.kind, idesc.a_format, idesc.a_major)
        if self.ashift:
            values = shift_rows(values)
        return -values if idesc.a_negate else values

    def decode_b(self, raw: NDArray[np.uint8]) -> Values:
        """Return B float64 [n, K] from bytes [n, row_bytes] (both CTAs' rows, rank order)."""
        idesc = self.idesc
        parts = [raw] if self.cta_group == 1 else [raw[: self.b_rows], raw[self.b_rows :]]
        values = [from_shared(part, idesc.kind, idesc.b_format, idesc.b_major) for part in parts]
        joined = values[0] if len(values) == 1 else np.concatenate(values)
        return -joined if idesc.b_negate else joined

    def decode_sfa(self, words: Words) -> Values:
        """Return A's scale factors float64 [4, rows, count] from words [4, rows] of `sfa_cells`."""
        assert self.sfa_cells is not None
        return self._decode_scales(words, self.sfa_cells)

    def decode_sfb(self, words: Words) -> Values:
        """Return B's scale factors float64 [4, n or n / 2, count] from words of `sfb_cells`."""
        assert self.sfb_cells is not None
        return self._decode_scales(words, self.sfb_cells)

    def _decode_scales(self, words: Words, cells: layout.ScaleCells) -> Values:
        raw = np.ascontiguousarray(words, dtype="<u4")[..., None].view(np.uint8)
        return formats.decode(
            self.idesc.scale_format, raw[..., cells.first : cells.first + cells.count]
        )

    def multiply(
        self,
        d: Words | None,
        a: Values,
        b: Values,
        sfa: Values | None = None,
        sfb: Values | None = None,
        scale_d: int = 0,
    ) -> Words:
        """Return the words uint32 [rows, n] of A * B + D * 2^-scale_d for one CTA; no D: A * B."""
        if scale_d and (self.idesc.kind not in ("f16", "tf32") or not 0 <= scale_d <= 15):
            raise IllegalOperation(
                f"tcgen05.mma .kind::{self.idesc.kind}: scale-input-d is {scale_d}; it exists for "
                "f16 and tf32 and is 0 to 15 (PTX ISA 9.7.16.10.9.1)"
            )
        with np.errstate(all="ignore"):
            product = self._product(a, b, sfa, sfb)
            return _round(product, d, self.idesc, scale_d)

    def _product(self, a: Values, b: Values, sfa: Values | None, sfb: Values | None) -> Values:
        folds = layout.FOLDS[layout.layout_name(self.m, self.cta_group, self.ws)]
        if sfa is None and a.ndim == 2:
            return a @ b.T
        width = self.n // folds
        parts = []
        for fold in range(folds):
            left = a if a.ndim == 2 else a[fold]
            right = b[fold * width : (fold + 1) * width]
            if sfa is None or sfb is None:
                parts.append(left @ right.T)
                continue
            first = fold * 4 // folds  # the partition of the first row
            parts.append(self._scaled_product(left, right, sfa, sfb, first))
        return parts[0] if folds == 1 else np.concatenate(parts, axis=1)

    def _scaled_product(
        self, left: Values, right: Values, sfa: Values, sfb: Values, first: int
    ) -> Values:
        """Rows 32 p and up of the data path use the copies of partition first + p."""
        blocks = len(left) // COPY_LANES
        rows = np.arange(len(left))
        scaled = _scale(left, sfa[first + rows // COPY_LANES, rows])
        copies = sfb[first : first + blocks]
        if np.array_equal(copies, np.broadcast_to(copies[:1], copies.shape), equal_nan=True):
            return scaled @ _scale(right, copies[0]).T
        return np.concatenate(
            [
                scaled[p * COPY_LANES : (p + 1) * COPY_LANES] @ _scale(right, copies[p]).T
                for p in range(blocks)
            ]
        )

    def keep_mask(self, words: tuple[int, ...], rank: int = 0, lane: int = 0) -> NDArray[np.bool_]:
        """Return bool [rows, n]: cells of D that disable-output-lane protects in CTA `rank`.

        `words` has 4 words (cta_group::2: 8, the second four for the odd CTA); `lane` is d-tmem's
        lane.
        """
        if len(words) != 4 * self.cta_group:
            raise IllegalOperation(
                f"tcgen05.mma.cta_group::{self.cta_group}: disable-output-lane has {len(words)} "
                f"words and must have {4 * self.cta_group} (PTX ISA 9.7.16.10.9.1)"
            )
        own = np.array(words[4 * rank : 4 * rank + 4], dtype="<u4").view(np.uint8)
        disabled = np.unpackbits(own, bitorder="little").astype(bool)
        return disabled[self.d_cells.lane + lane]


def check_zero_column_mask(value: int) -> None:
    """Raise unless a zero-column mask descriptor masks nothing.

    Bit 39, "non-zero mask": 0 means that the mask is all zeros and every column of B is used (PTX
    ISA 9.7.16.4.3); 1 asks for a generated mask, which is not modelled.
    """
    if value >> 39 & 1:
        raise IllegalOperation(
            f"tcgen05.mma.ws: zero-column mask descriptor 0x{value:016x} masks columns of B (PTX "
            "ISA 9.7.16.4.3, bit 39), which the emulator does not model; pass 0"
        )


def shift_rows(values: Values) -> Values:
    """Return A as .ashift reads it: row i of each 32-lane partition is row i + 1, the last stays.

    The manual says only "shifts the rows of A down by one row, except for the last row"; direction
    and partition are those of tcgen05.shift.down, whose freed rows 31, 63, 95, 127
    tcgen05.cp.4x256b refills.
    """
    source = np.arange(values.shape[-2])
    source = np.where(source % COPY_LANES == COPY_LANES - 1, source, source + 1)
    return values[..., source, :]


@lru_cache(maxsize=512)
def plan_mma(op: Opcode, idesc: int, a_in_tmem: bool = False) -> MmaPlan:
    """Return the plan of one tcgen05.mma opcode with this instruction descriptor."""
    if op.sparse:
        raise IllegalOperation(f"{op.text}: the emulator does not model sparse A; use tcgen05.mma")
    decoded = InstructionDescriptor.decode(idesc, op.kind, op.cta_group, op.ws)
    if op.ashift and (not a_in_tmem or decoded.m not in (128, 256)):
        raise IllegalOperation(
            f"{op.text}: .ashift needs A in tensor memory and M of 128 or 256, not {decoded.m} "
            "(PTX ISA 9.7.16.10.9.1)"
        )
    if a_in_tmem and decoded.a_major == "MN":
        raise IllegalOperation(
            f"{op.text}: A in tensor memory cannot be transposed (PTX ISA 9.7.16.10.2); clear bit "
            "15 of the instruction descriptor"
        )
    sfa_cells = sfb_cells = None
    if op.block_scale:
        count = layout.scale_count(op.kind, op.block, decoded.k)
        if decoded.scale_format == "ue4m3" and op.block != 16:
            raise IllegalOperation(
                f"{op.text}: UE4M3 scale factors need blocks of 16 elements (PTX ISA "
                "9.7.16.10.7.1, Table 57); use .block16 or set bit 23 of the instruction descriptor"
            )
        sfa_cells = layout.scale_a_cells(decoded.m, op.cta_group, count, decoded.sfa_id)
        sfb_cells = layout.scale_b_cells(decoded.m, decoded.n, op.cta_group, count, decoded.sfb_id)
    a_bytes = decoded.k * {"f16": 16, "tf32": 32, "mxf4": 4, "mxf4nvf4": 4}.get(op.kind, 8) // 8
    a_cells = None
    if a_in_tmem:
        a_cells = layout.operand_a_cells(decoded.m, a_bytes, op.cta_group, op.ws)
    d_cells = layout.accumulator_cells(decoded.m, decoded.n, op.cta_group, op.ws)
    block = op.block if op.block_scale else 0
    return MmaPlan(
        decoded, op.cta_group, op.ws, op.ashift, block, d_cells, a_cells, sfa_cells, sfb_cells
    )


def _scale(values: Values, factors: Values) -> Values:
    rows, count = factors.shape
    return (values.reshape(rows, count, -1) * factors[:, :, None]).reshape(rows, -1)


def _round(product: Values, d: Words | None, idesc: InstructionDescriptor, scale_d: int) -> Words:
    if idesc.d_format == "s32":
        total = product.astype(np.int64)
        if d is not None:
            total += d.view(np.int32)
        if idesc.saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return total.astype(np.uint32)
    if d is not None:
        raw = d.astype(np.uint16) if idesc.d_format == "f16" else d
        old = formats.decode(idesc.d_format, raw)
        product = product + (np.ldexp(old, -scale_d) if scale_d else old)
    if idesc.d_format == "f16":
        return formats.encode("f16", product).astype(np.uint32)
    result = product.astype(np.float32)
    words = result.view(np.uint32)
    nan = np.isnan(result)
    if nan.any():
        words[nan] = formats.CANONICAL_NAN["f32"]
    return words
