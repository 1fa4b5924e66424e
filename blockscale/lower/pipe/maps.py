"""The tensor maps of a kernel as data, for host code and for tests.

Addresses must be multiples of 16 bytes, and of 32 where `spreads_codes` holds; so must out be where
a kernel stores directly.  alpha, bias and offsets are read four bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base.formats import GEMM
from blockscale.lower.pipe.kernel import Kernel, Transfer
from blockscale.lower.pipe.share import slices

DTYPES = {"UINT8": 0, "UINT32": 2, "FLOAT16": 6, "FLOAT32": 7, "BFLOAT16": 9, "16U4_ALIGN16B": 14}
"""Codes of CUtensorMapDataType."""

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Codes of CUtensorMapSwizzle by the bytes of the pattern's row."""

SPREAD_ALIGNMENT = 32
"""Bytes of which the address of codes that TMA spreads must be a multiple."""


def spreads_codes(fmt: str, k: int) -> bool:
    """Whether TMA spreads the 4-bit codes of b to bytes.

    It takes rows of a multiple of 128 codes; the kernel spreads others itself.
    """
    return GEMM[fmt].kind == "mxf8f6f4" and GEMM[fmt].b.bits == 4 and k % 128 == 0


@dataclass(frozen=True)
class MapPlan:
    """Arguments of cuTensorMapEncodeTiled; dimension 0 is the innermost one.

    Element strides are 1, there is no interleave, and what lies outside is zero.

    Attributes:
        tensor: the parameter's name.
        dtype: key of `DTYPES`.
        dims: sizes, each with the rows of a that one of it stands for; None: known at run time.
        strides: bytes, of dimensions 1 and up.
        box: elements of one copy.
        swizzle: key of `SWIZZLES`.
    """

    tensor: str
    dtype: str
    dims: tuple[tuple[int | None, int], ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    def sizes(self, rows: int, row_atoms: int) -> list[int]:
        """Return the sizes for these many rows and 128-row tiles of scales; no map has a size 0."""
        known = {1: rows, 128: row_atoms}
        return [max(1, known[unit] if extent is None else extent) for extent, unit in self.dims]


def tensor_maps(kernel: Kernel) -> list[MapPlan]:
    """Return the maps in the order of the kernel's parameters."""
    loads = [_described(load, slices(kernel, load)) for load in kernel.loads]
    return loads + [_described(move, 1) for move in kernel.epilogue.stores.values()]


def _described(of: Transfer, sliced: int) -> MapPlan:
    """Describe a transfer, whose rows CTAs share between ``sliced`` boxes."""
    *inner, rows = (dim.box for dim in of.dims)
    return MapPlan(
        of.view.name,
        of.dtype,
        tuple((dim.extent, dim.unit) for dim in of.dims),
        tuple(dim.pitch for dim in of.dims[1:]),
        (*inner, rows // sliced),
        of.swizzle,
    )
