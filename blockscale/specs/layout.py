"""Specs of kernels that reorder a tensor's elements: any layout of `blockscale.base.index_maps`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.base.index_maps import (
    DEEPGEMM,
    DEEPGEMM_PERMUTED,
    SCALES_8X4,
    SCALES_128X4,
    TRTLLM,
    IndexMap,
    gate_up,
    marlin,
    w4a8_scales,
)
from blockscale.specs.spec import Name, Param, Spec, flag

MARLIN_ORDERS = ("group", "column", "e4m3")

LAYOUTS: dict[str, IndexMap] = {
    "128x4": SCALES_128X4,
    "8x4": SCALES_8X4,
    "deepgemm": DEEPGEMM,
    "deepgemm_permuted": DEEPGEMM_PERMUTED,
    **{f"gate_up_{granule}": gate_up(granule) for granule in (8, 16, 64)},
    **{
        f"marlin_{order}_{bits}": marlin(order, bits)
        for order in MARLIN_ORDERS
        for bits in (8, 16, 32)
    },
    **{f"w4a8_{neighbours}": w4a8_scales(neighbours) for neighbours in (2, 4)},
    **{f"w4a8_{neighbours}_32": replace(w4a8_scales(neighbours), bits=32) for neighbours in (2, 4)},
    **TRTLLM,
}
"""Every layout that has kernels, by the name that a kernel's name has."""

SYMBOLS = {2: ("rows", "cols"), 3: ("experts", "rows", "cols")}
"""Names of the sizes, by number of axes."""


@dataclass(frozen=True)
class Relayout(Spec):
    """Elements of a plain tensor in the order of a layout; ``inverse``: back.

    Elements of any size are passed as bytes, which ``cols`` counts.
    """

    layout: str
    inverse: bool = False
    op = "relayout"
    pattern = Name(
        "relayout_{layout}{inverse}",
        *("relayout_int4_a16", "relayout_8x4_back"),
        texts={"layout": tuple(LAYOUTS), "inverse": flag("_back")},
    )

    @property
    def map(self) -> IndexMap:
        """The layout as data."""
        return LAYOUTS[self.layout]

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the sizes of the plain tensor."""
        return SYMBOLS[len(self.map.axes)]

    def params(self) -> tuple[Param, ...]:
        """plain, laid; back: laid, plain, and the caller's ``plain`` says what is no padding."""
        layout = self.map
        padded = tuple(
            name if step == 1 or not layout.pads else f"ceil_to({name}, {step})"
            for name, step in zip(self.symbols, layout.multiples(), strict=True)
        )
        plain = Param("plain", "uint8", self.symbols, output=self.inverse, storage="byte")
        laid = Param("laid", "uint8", padded, output=not self.inverse, storage="byte")
        return (laid, plain) if self.inverse else (plain, laid)
