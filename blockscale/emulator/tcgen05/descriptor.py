"""Matrix descriptors of tcgen05 (PTX ISA 9.7.16.4.1) and wgmma: where an operand lies in smem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from blockscale.emulator.errors import IllegalOperation

ADDRESS_MASK = 0x3FFFF  # matrix-descriptor-encode(x) = (x & 0x3FFFF) >> 4
SWIZZLES = {
    "tcgen05": {0: "none", 1: "128B_base32B", 2: "128B", 4: "64B", 6: "32B"},
    "wgmma": {0: "none", 1: "128B", 2: "64B", 3: "32B"},
}
SECTION = {"tcgen05": "PTX ISA 9.7.16.4.1, Table 40", "wgmma": "PTX ISA 9.7.15.5.1.2.2"}


@dataclass(frozen=True)
class SmemDescriptor:
    """A decoded matrix descriptor; addresses and offsets in bytes."""

    start: int  # matrix start address, the 18 low bits of a shared address
    leading: int  # leading dimension byte offset (LBO)
    stride: int  # stride dimension byte offset (SBO)
    base_offset: int  # (pattern start address >> 7) & 7, 0 when the swizzle pattern is aligned
    swizzle: str  # "none", "32B", "64B", "128B" or "128B_base32B"

    @staticmethod
    def decode(value: int, generation: str = "tcgen05") -> SmemDescriptor:
        """Return the descriptor in `value`; IllegalOperation when a bit breaks a rule."""
        return _decode(int(value), generation)

    @property
    def width(self) -> int:
        """Bytes of one row of the swizzle atom: 16, 32, 64 or 128."""
        return 16 if self.swizzle == "none" else int(self.swizzle.partition("B")[0])


@lru_cache(maxsize=4096)
def _decode(value: int, generation: str) -> SmemDescriptor:
    where = f"matrix descriptor 0x{value:016x}"
    section = SECTION[generation]
    if generation == "tcgen05":
        _check_tcgen05(value, where)
        code = value >> 61 & 7
        reserved = {"14-15": 0xC000, "30-31": 0xC000_0000}
    else:
        code = value >> 62 & 3
        reserved = {"14-15": 0xC000, "30-31": 0xC000_0000, "46-48": 7 << 46, "52-61": 0x3FF << 52}
    for bits, mask in reserved.items():
        if value & mask:
            raise IllegalOperation(
                f"{where}: bits {bits} are reserved and must be 0 ({section}); mask the address "
                "with 0x3FFFF before it is shifted right by 4"
            )
    if code not in SWIZZLES[generation]:
        raise IllegalOperation(
            f"{where}: swizzle code {code} is invalid; use one of "
            f"{', '.join(f'{k} ({v})' for k, v in SWIZZLES[generation].items())} ({section})"
        )
    swizzle = SWIZZLES[generation][code]
    base_offset = value >> 49 & 7
    if swizzle == "none":  # no pattern, no phase: Triton writes 4 here, which the hardware ignores
        base_offset = 0
    return SmemDescriptor(
        start=(value & 0x3FFF) << 4,
        leading=(value >> 16 & 0x3FFF) << 4,
        stride=(value >> 32 & 0x3FFF) << 4,
        base_offset=base_offset,
        swizzle=swizzle,
    )


def _check_tcgen05(value: int, where: str) -> None:
    version = value >> 46 & 7
    if version != 1:
        hint = "; this is a wgmma descriptor" if version == 0 else ""
        raise IllegalOperation(
            f"{where}: bits 46-48 are 0b{version:03b} and must be 0b001 "
            f"({SECTION['tcgen05']}){hint}; set bit 46"
        )
    if value >> 53 & 0xFF:
        raise IllegalOperation(
            f"{where}: bits 53-60 are 0x{value >> 53 & 0xFF:x} and must be 0 ({SECTION['tcgen05']})"
        )
    if value >> 52 & 1:
        raise IllegalOperation(
            f"{where}: bit 52 asks for an absolute leading dimension address, which needs sm_103a "
            "and K = 96 (PTX ISA 9.7.16.4.1.1); clear it and give a relative offset"
        )
