"""`GemmPlan` -> the five tensor maps of its kernel as data, for host code and for tests.

Addresses must be multiples of 16 bytes, and of 32 where `spread` holds; so must out be where the
plan stores directly.  alpha, bias and offsets are read four bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.base.formats import GEMM
from blockscale.base.sizes import ceil_div
from blockscale.specs.plans.gemm import LANES, OUT_BYTES, GemmPlan

DTYPES = {"UINT8": 0, "UINT32": 2, "FLOAT16": 6, "FLOAT32": 7, "BFLOAT16": 9, "16U4_ALIGN16B": 14}
"""Codes of CUtensorMapDataType."""

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Codes of CUtensorMapSwizzle by the bytes of the pattern's row."""

L2_PROMOTION = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


@dataclass(frozen=True)
class Size:
    """``value``, or ``value`` of something that is known at run time.

    Attributes:
        unit: "" for a constant, "m": rows of a, "atoms": row atoms of a_scale
            (its rows, a multiple of 128, divided by 128).
    """

    value: int
    unit: str = ""

    def at(self, m: int, atoms: int) -> int:
        """Return the number for these run time sizes; a map has no empty dimension."""
        return max(1, self.value * {"": 1, "m": m, "atoms": atoms}[self.unit])


@dataclass(frozen=True)
class TensorMapPlan:
    """Arguments of cuTensorMapEncodeTiled; dimension 0 is the innermost one.

    Element strides are 1, there is no interleave, and what lies outside is zero.

    Attributes:
        tensor: whose address: "a", "b", "a_scale", "b_scale" or "out".
        dtype: key of `DTYPES`.
        dims: sizes.
        strides: bytes, of dimensions 1 and up.
        box: elements of one copy.
        swizzle: key of `SWIZZLES`.
    """

    tensor: str
    dtype: str
    dims: tuple[Size, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class GemmMaps:
    """The maps in the order of the kernel's parameters.

    A plan that stores directly does not read `d`, which is then that of x: rows of d may break the
    rules of a map.
    """

    x: TensorMapPlan
    y: TensorMapPlan
    sx: TensorMapPlan
    sy: TensorMapPlan
    d: TensorMapPlan

    def all(self) -> tuple[TensorMapPlan, ...]:
        """Return the five maps."""
        return (self.x, self.y, self.sx, self.sy, self.d)


def gemm_maps(plan: GemmPlan) -> GemmMaps:
    """Return the tensor maps of a legal plan."""
    x_rows = LANES // plan.cluster_y
    y_rows = plan.mma_n // plan.cluster_x
    x, y = ("b", "a") if plan.swap else ("a", "b")
    map_x = _operand(plan, x, x_rows)
    return GemmMaps(
        map_x,
        _operand(plan, y, y_rows),
        _scales(plan, x, 1),
        _scales(plan, y, plan.y_atoms),
        _output(plan) if plan.store == "tma" else map_x,
    )


SPREAD_ALIGNMENT = 32
"""Bytes of which the address of codes that TMA spreads must be a multiple."""


def spreads_codes(fmt: str, k: int) -> bool:
    """Whether TMA spreads the 4-bit codes of b to bytes.

    It takes rows of a multiple of 128 codes; the kernel spreads others itself.
    """
    return GEMM[fmt].kind == "mxf8f6f4" and GEMM[fmt].b.bits == 4 and k % 128 == 0


def spread(plan: GemmPlan, tensor: str) -> bool:
    """Whether TMA spreads the 4-bit codes of this operand to bytes."""
    return tensor == "b" and spreads_codes(plan.fmt, plan.k)


def _operand(plan: GemmPlan, tensor: str, rows: int) -> TensorMapPlan:
    bits = plan.format.a.bits if tensor == "a" else plan.format.b.bits
    count = Size(1, "m") if tensor == "a" else Size(max(1, plan.experts) * plan.n)
    stride = plan.k * bits // 8
    if spread(plan, tensor):
        box = (plan.block_k, rows)
        return TensorMapPlan(
            tensor, "16U4_ALIGN16B", (Size(plan.k), count), (stride,), box, plan.row_bytes
        )
    box = (plan.block_k * bits // 8, rows)
    packed = plan.format.kind == "mxf8f6f4" and bits == 4
    swizzle = 0 if packed else plan.row_bytes
    return TensorMapPlan(tensor, "UINT8", (Size(stride), count), (stride,), box, swizzle)


def _scales(plan: GemmPlan, tensor: str, atoms: int) -> TensorMapPlan:
    along = ceil_div(plan.k, 4 * plan.format.block)
    b_atoms = max(1, plan.experts) * ceil_div(plan.n, 128)
    rows = Size(1, "atoms") if tensor == "a" else Size(b_atoms)
    dims = (Size(128), Size(along), rows)
    box = (128, plan.atoms_k, atoms)
    return TensorMapPlan(f"{tensor}_scale", "UINT32", dims, (512, 512 * along), box, 0)


def _output(plan: GemmPlan) -> TensorMapPlan:
    item = OUT_BYTES[plan.out_dtype]
    dims = (Size(plan.n), Size(1, "m"))
    box = (32, plan.epi_cols) if plan.swap else (plan.epi_cols, 32)
    swizzle = 0 if plan.swap else plan.epi_cols * item
    return TensorMapPlan("out", plan.out_dtype.upper(), dims, (plan.n * item,), box, swizzle)
