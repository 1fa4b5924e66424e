"""Rows of activations as codes and scales: what ranks send each other, and layers take, of a row.

A row is one run of bytes, codes first, padded to a multiple of 16: "fp8" has an E4M3 code for each
element and one float32 scale; "nvfp4" an E2M1 code (two a byte, the even element low) and an E4M3
scale for 16 elements.  They are the numbers that an MoE layer with this ``act_fmt`` makes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base.sizes import round_up
from blockscale.specs.spec import check_choice, check_multiple

CODED_FORMATS = ("fp8", "nvfp4")
"""Formats of such rows."""

ALIGNMENT = 16
"""Bytes of which a row begins at a multiple, and that a thread moves at a time."""

SCALE_BLOCK = 16
"""Elements that share a block scale of nvfp4."""

FLOAT_BYTES = 4


@dataclass(frozen=True)
class CodedRow:
    """Where the bytes of a row of ``cols`` elements are."""

    act_fmt: str
    cols: int

    def __post_init__(self) -> None:
        check_choice("CodedRow", "act_fmt", self.act_fmt, CODED_FORMATS)

    @property
    def step(self) -> int:
        """Elements whose codes take 16 bytes; ``cols`` is a multiple of it."""
        return ALIGNMENT if self.act_fmt == "fp8" else 2 * ALIGNMENT

    @property
    def codes(self) -> int:
        """Bytes of the codes, behind which are the scales."""
        return self.cols * ALIGNMENT // self.step

    @property
    def scales(self) -> int:
        """Bytes of the scales."""
        return FLOAT_BYTES if self.act_fmt == "fp8" else self.cols // SCALE_BLOCK

    @property
    def bytes(self) -> int:
        """Bytes of the row."""
        return round_up(self.codes + self.scales, ALIGNMENT)

    def check(self, where: str) -> None:
        """ValueError unless codes are whole multiples of 16 bytes."""
        what = f"the elements whose {self.act_fmt} codes take {ALIGNMENT} bytes"
        check_multiple(where, "hidden", self.cols, self.step, what, "pad rows to {}")
