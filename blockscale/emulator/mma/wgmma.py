"""wgmma.mma_async: opcodes, register fragments and arithmetic of a warpgroup.

PTX ISA 9.2, section 9.7.15.5 "Asynchronous wgmma instruction": 9.7.15.5.1 "Register Fragments and
Shared Memory Matrix Layouts" and 9.7.15.5.2 "wgmma.mma_async".  Warp w of a warpgroup holds rows
16 * w to 16 * w + 15 of D and, in registers, of A; inside a warp the fragments are those of
mma.sync.m16n8k*, eight columns of D after the other.  Every shape's K is 32 bytes of A and of B.
Descriptors and swizzles are those of `tcgen05.descriptor` and `tcgen05.operand`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockscale.emulator import formats
from blockscale.emulator.errors import IllegalOperation, PtxError
from blockscale.emulator.mma import fragments, numerics
from blockscale.emulator.tcgen05.descriptor import SmemDescriptor
from blockscale.emulator.tcgen05.operand import tile_offsets

ROWS = 64
K_BYTES = 32
_F8 = ("e4m3", "e5m2")
_WORDS = frozenset(("f16", "bf16", "tf32", "f32", "s32", "s8", "u8", "b1", *_F8))
# Integer types: n is 8, 24 or a multiple of 16; the other types: any multiple of 8.
_INTEGER_N = frozenset((8, 24, *range(16, 257, 16)))


@dataclass(frozen=True)
class Wgmma:
    """One wgmma.mma_async opcode; `d` and `a` are numbers of registers of a thread.

    Operands in PTX order: d, a (4 registers) or a-desc, b-desc, scale-d (a predicate), then the
    immediates of `immediates`.
    """

    text: str
    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    saturate: bool = False

    @property
    def d(self) -> int:
        """Registers of D."""
        return self.n // (4 if self.d_type == "f16" else 2)

    @property
    def d_kind(self) -> str:
        """The type of one register of D: "f32", "s32", or "b32" for two f16."""
        return "b32" if self.d_type == "f16" else self.d_type

    @property
    def a(self) -> int:
        """Registers of A, if A is in registers."""
        return 4

    @property
    def bits(self) -> int:
        """Bits of one element of A and B."""
        return formats.BITS[self.a_type]

    def immediates(self, a_in_registers: bool) -> tuple[str, ...]:
        """The names of the immediate operands after scale-d: 1 or -1 scales, 0 or 1 transposes."""
        if self.d_type == "s32":
            return ()
        scales = ("imm-scale-a", "imm-scale-b")
        if self.bits != 16:
            return scales
        return (
            (*scales, "imm-trans-b") if a_in_registers else (*scales, "imm-trans-a", "imm-trans-b")
        )

    def a_offsets(self, descriptor: int, trans: int = 0) -> NDArray[Any]:
        """The shared addresses [64, 32] of A's bytes in the order of k."""
        return self._offsets(descriptor, ROWS, trans, "a")

    def b_offsets(self, descriptor: int, trans: int = 0) -> NDArray[Any]:
        """The shared addresses [n, 32] of B's bytes in the order of k."""
        return self._offsets(descriptor, self.n, trans, "b")

    def _offsets(self, descriptor: int, rows: int, trans: int, which: str) -> NDArray[Any]:
        _check_immediate(self.text, f"imm-trans-{which}", trans, (0, 1))
        if trans and self.bits != 16:
            raise IllegalOperation(
                f"{self.text}: imm-trans-{which} is 1, only .f16 and .bf16 can be transposed "
                "(PTX ISA 9.7.15.5.2); store the matrix K-major"
            )
        decoded = SmemDescriptor.decode(descriptor, generation="wgmma")
        bits = max(self.bits, 8)
        return tile_offsets(decoded, rows, K_BYTES, bits=bits, major="MN" if trans else "K")

    def a_bytes(self, registers: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """The bytes [G, 64, 32] of A held in registers [4 * G, 32, 4] of G warpgroups."""
        octets = np.ascontiguousarray(registers, dtype=np.uint32).view(np.uint8)
        flat = octets.reshape(len(octets), -1)
        return flat[:, fragments.a_index(16, K_BYTES, 4)].reshape(-1, ROWS, K_BYTES)

    def d_matrix(self, registers: NDArray[np.uint32]) -> NDArray[Any]:
        """The codes [G, 64, n] of D held in registers [4 * G, 32, d]."""
        bits = 16 if self.d_type == "f16" else 32
        codes = fragments.elements(registers, bits)[:, fragments.c_index(16, self.n)]
        return codes.reshape(-1, ROWS, self.n)

    def d_registers(self, codes: NDArray[Any]) -> NDArray[np.uint32]:
        """The inverse of `d_matrix`: [G, 64, n] -> uint32 [4 * G, 32, d]."""
        flat = codes.reshape(-1, 16 * self.n)[:, fragments.inverse(("c", 16, self.n))]
        return fragments.registers(flat)

    def compute(
        self,
        d: NDArray[np.uint32],
        a: NDArray[np.uint8],
        b: NDArray[np.uint8],
        *,
        scale_d: bool | NDArray[np.bool_] = True,
        scale_a: int = 1,
        scale_b: int = 1,
    ) -> NDArray[np.uint32]:
        """New registers of D = +-A * +-B (+ D if scale_d), of G warpgroups.

        d is uint32 [4 * G, 32, registers]; a uint8 [G, 64, 32] (from `a_bytes`, or shared memory at
        `a_offsets`), b uint8 [G, n, 32] (shared memory at `b_offsets`); scale_d a bool or [G].
        """
        _check_immediate(self.text, "imm-scale-a", scale_a, (-1, 1))
        _check_immediate(self.text, "imm-scale-b", scale_b, (-1, 1))
        with np.errstate(all="ignore"):
            left = self._decode(self.a_type, a) * scale_a
            right = self._decode(self.b_type, b).swapaxes(-1, -2) * scale_b
            old = numerics.decode_c(self.d_type, self.d_matrix(d))
            keep = np.asarray(scale_d, dtype=bool).reshape(-1, 1, 1)
            old = np.where(keep, old, old.dtype.type(0))
            return self.d_registers(
                numerics.accumulate(left, right, old, self.d_type, self.saturate)
            )

    def _decode(self, fmt: str, octets: NDArray[np.uint8]) -> NDArray[np.float64]:
        octets = np.ascontiguousarray(octets)
        if fmt == "b1":
            return np.unpackbits(octets, axis=-1, bitorder="little").astype(np.float64)
        return formats.decode(fmt, octets.view(f"u{self.bits // 8}"))


@cache
def parse_wgmma(opcode: str) -> Wgmma | None:
    """The meaning of a full dotted opcode; None if it is not wgmma.mma_async.

    Raises:
        PtxError: modifiers that do not exist or do not go together, and the sparse forms.
    """
    words = opcode.split(".")
    if words[:2] != ["wgmma", "mma_async"]:
        return None
    left = words[2:]
    if "sp" in left:
        raise PtxError(f"{opcode}: sparse matrices are not modelled; use the dense wgmma.mma_async")
    types = [word for word in left if word in _WORDS]
    shapes = [word for word in left if re.fullmatch(r"m64n\d+k\d+", word)]
    flags = [word for word in left if word not in _WORDS and word not in shapes]
    unknown = set(flags) - {"sync", "aligned", "satfinite", "and", "popc"}
    if unknown:
        raise _error(opcode, f"modifier .{min(unknown)} does not exist")
    if len(types) != 3 or len(shapes) != 1 or not {"sync", "aligned"} <= set(flags):
        raise _error(opcode, "needs .sync, .aligned, one shape and the three types of d, a and b")
    if len(set(flags)) != len(flags):
        raise _error(opcode, "has a modifier twice")
    _, n, k = (int(size) for size in re.findall(r"\d+", shapes[0]))
    op = Wgmma(opcode, n, k, types[0], types[1], types[2], "satfinite" in flags)
    _check(op, "and" in flags, "popc" in flags)
    return op


def _check(op: Wgmma, bit_and: bool, popc: bool) -> None:
    """Types, shape and flags of section 9.7.15.5.2 go together."""
    kinds = {
        "f16": (("f16",), ("f16", "f32"), 16),
        "bf16": (("bf16",), ("f32",), 16),
        "tf32": (("tf32",), ("f32",), 8),
        "e4m3": (_F8, ("f16", "f32"), 32),
        "e5m2": (_F8, ("f16", "f32"), 32),
        "s8": (("s8", "u8"), ("s32",), 32),
        "u8": (("s8", "u8"), ("s32",), 32),
        "b1": (("b1",), ("s32",), 256),
    }
    if op.a_type not in kinds:
        raise _error(op.text, f"type .{op.a_type} of a does not exist; use .{', .'.join(kinds)}")
    partners, results, k = kinds[op.a_type]
    if op.b_type not in partners or op.d_type not in results:
        raise _error(
            op.text, f"types .{op.d_type}.{op.a_type}.{op.b_type} of d, a and b do not go together"
        )
    legal_n = _INTEGER_N if op.d_type == "s32" else range(8, 257, 8)
    if op.k != k or op.n not in legal_n:
        rule = "8, 24 or a multiple of 16" if op.d_type == "s32" else "a multiple of 8"
        raise _error(op.text, f"shape n{op.n} k{op.k}: k is {k}, n is {rule}, at most 256")
    if op.saturate and op.a_type not in ("s8", "u8"):
        raise _error(op.text, ".satfinite is for .s8 and .u8 only")
    if bit_and != popc or bit_and != (op.a_type == "b1"):
        raise _error(op.text, ".and.popc is needed with .b1, and only there")


def _error(opcode: str, what: str) -> PtxError:
    return PtxError(f"{opcode}: {what} (PTX ISA 9.7.15.5.2 wgmma.mma_async)")


def _check_immediate(where: str, name: str, value: int, legal: tuple[int, ...]) -> None:
    if value not in legal:
        raise IllegalOperation(
            f"{where}: {name} is {value}; it is {legal[0]} or {legal[1]} (PTX ISA 9.7.15.5.2)"
        )
