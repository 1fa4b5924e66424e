"""`Tiling`: the arguments of cuTensorMapEncodeTiled but the address, checked.

Rules: the documentation of cuTensorMapEncodeTiled (cuda.h, CUDA 13.0) and PTX ISA 5.5 "Tensors".
Dimension 0 is the innermost one everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.emulator.tma.modes import (
    FLOATS,
    PADDED,
    SPAN,
    DataType,
    Interleave,
    L2Promotion,
    OobFill,
    Swizzle,
    bits,
    spelling,
)

MAX_RANK = 5
ADDRESS_BITS = 57  # of a global virtual address
MAX_ELEMENT_STRIDE = 8
_MAX_BOX = 256


@dataclass(frozen=True)
class Tiling:
    """A tensor map without its address: hashable, and valid by construction."""

    dtype: DataType
    global_dim: tuple[int, ...]
    global_strides: tuple[int, ...]  # bytes, of dimensions 1 and up
    box_dim: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    oob_fill: OobFill = OobFill.NONE
    l2_promotion: L2Promotion = L2Promotion.NONE

    def __post_init__(self) -> None:
        _check_shape(self)
        _check_box(self)
        _check_modes(self)

    def __hash__(self) -> int:
        return self._hash

    @property
    def _hash(self) -> int:
        found = self.__dict__.get("hash_")
        if found is None:
            fields = (self.dtype, self.global_dim, self.global_strides, self.box_dim)
            modes = (self.element_strides, self.interleave, self.swizzle, self.oob_fill)
            found = self.__dict__["hash_"] = hash((fields, modes))
        return found

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.global_dim)

    @property
    def bits(self) -> int:
        """Bits of one element in global memory."""
        return bits(self.dtype)

    @property
    def alignment(self) -> int:
        """Bytes to which the address and the strides must be aligned."""
        return 32 if self.interleave == Interleave.B32 or self.dtype in PADDED else 16

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that one box moves along each dimension: ceil(box / element stride).

        Interleaved (NC/8HWC8 and so on) the dimensions are W, [H, [D]], C, N: dimension 0 counts
        slices of 16 or 32 bytes, dimension rank-2 counts channels, and whole slices move.
        """
        pairs = zip(self.box_dim, self.element_strides, strict=True)
        counts = [-(-box // step) for box, step in pairs]
        if self.interleave == Interleave.NONE:
            counts[0] = self.box_dim[0]
        else:
            counts[-2] = -(-self.box_dim[-2] // self.slice_channels)
        return tuple(counts)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one channel slice of an interleaved tensor, 0 without interleave."""
        return 16 * self.interleave

    @property
    def slice_channels(self) -> int:
        """Channels in one slice of an interleaved tensor."""
        return self.slice_bytes * 8 // self.bits

    @property
    def inner_bytes(self) -> int:
        """Bytes of global memory in one row of the box (interleaved: in one slice row)."""
        if self.interleave != Interleave.NONE:
            return self.counts[0] * self.slice_bytes
        return self.box_dim[0] * self.bits // 8

    @property
    def span(self) -> int:
        """Bytes of one row of the swizzle pattern, 0 without a swizzle."""
        return SPAN[self.swizzle]


def _check_shape(tiling: Tiling) -> None:
    """Rank, dimensions and strides."""
    rank, kind = tiling.rank, spelling(tiling.dtype)
    lowest = 1 if tiling.interleave == Interleave.NONE else 3
    if not lowest <= rank <= MAX_RANK:
        because = "" if lowest == 1 else f" with interleave={spelling(tiling.interleave)}"
        raise ValueError(
            f"TensorMap: global_dim has {rank} dimensions, the rank must be {lowest} to "
            f"5{because}; merge dimensions or add some of size 1"
        )
    for name, values, size in (
        ("global_strides_bytes", tiling.global_strides, rank - 1),
        ("box_dim", tiling.box_dim, rank),
        ("element_strides", tiling.element_strides, rank),
    ):
        if len(values) != size:
            rule = "one per dimension" + (" but the innermost" if size < rank else "")
            raise ValueError(
                f"TensorMap: {name} has {len(values)} entries for rank {rank}; give {size}, {rule}"
            )
    for index, size in enumerate(tiling.global_dim):
        if not 1 <= size <= 1 << 32:
            raise ValueError(
                f"TensorMap: global_dim[{index}]={size} is not within 1..2^32; "
                "leave an empty tensor out of the launch, or split a larger one"
            )
    multiple = 128 if tiling.dtype in PADDED else 2 if tiling.dtype == DataType.U4_ALIGN8B else 1
    if tiling.global_dim[0] % multiple:
        up = -(-tiling.global_dim[0] // multiple) * multiple
        raise ValueError(
            f"TensorMap: global_dim[0]={tiling.global_dim[0]} elements is not a multiple of "
            f"{multiple} as {kind} needs; pad the rows to {up} elements"
        )
    for index, stride in enumerate(tiling.global_strides):
        if stride % tiling.alignment:
            raise ValueError(
                f"TensorMap: global_strides_bytes[{index}]={stride} is not a multiple of "
                f"{tiling.alignment} (dtype {kind}, interleave {spelling(tiling.interleave)}); "
                f"pad the rows to {-(-stride // tiling.alignment) * tiling.alignment} bytes"
            )
        if not 0 <= stride < 1 << 40:
            raise ValueError(
                f"TensorMap: global_strides_bytes[{index}]={stride} is not within 0..2^40-1; "
                "move the far dimension into the base address"
            )


def _check_box(tiling: Tiling) -> None:
    """Box sizes and element strides."""
    for index, size in enumerate(tiling.box_dim):
        if not 1 <= size <= _MAX_BOX:
            raise ValueError(
                f"TensorMap: box_dim[{index}]={size} is not within 1..{_MAX_BOX}; "
                "cover larger boxes with several copies"
            )
    for index, step in enumerate(tiling.element_strides):
        if index == 0 and tiling.interleave == Interleave.NONE:
            continue  # ignored: TMA has no stride for dimension 0
        if not 1 <= step <= MAX_ELEMENT_STRIDE:
            raise ValueError(
                f"TensorMap: element_strides[{index}]={step} is not within "
                f"1..{MAX_ELEMENT_STRIDE}; put larger steps into global_strides_bytes"
            )
    kind, inner = spelling(tiling.dtype), tiling.box_dim[0]
    if tiling.dtype in PADDED and inner != 128:
        raise ValueError(
            f"TensorMap: box_dim[0]={inner} elements, and {kind} needs exactly 128; "
            "use box_dim[0]=128 and one copy for every 128 elements"
        )
    if tiling.interleave != Interleave.NONE:
        return
    if inner * tiling.bits % 128:
        per = 128 // tiling.bits
        raise ValueError(
            f"TensorMap: box_dim[0]={inner} of {kind} is {inner * tiling.bits / 8:g} bytes, not a "
            f"multiple of 16; use a multiple of {per} elements"
        )
    if tiling.span and tiling.inner_bytes > tiling.span:
        raise ValueError(
            f"TensorMap: box_dim[0]={inner} of {kind} is {tiling.inner_bytes} bytes, more than the "
            f"{tiling.span} of swizzle {spelling(tiling.swizzle)}; use box_dim[0]<="
            f"{tiling.span * 8 // tiling.bits} and several copies"
        )


def _check_modes(tiling: Tiling) -> None:
    """Which interleave, swizzle, type and fill go together."""
    kind, swizzle = spelling(tiling.dtype), spelling(tiling.swizzle)
    if tiling.interleave == Interleave.B32 and tiling.swizzle != Swizzle.B32:
        raise ValueError(
            f"TensorMap: swizzle={swizzle} with interleave=32B, which needs swizzle 32B; "
            "use swizzle='32B'"
        )
    if tiling.interleave != Interleave.NONE and tiling.bits < 8:
        raise ValueError(
            f"TensorMap: dtype={kind} with interleave={spelling(tiling.interleave)}; "
            "sub-byte types need interleave NONE"
        )
    if tiling.dtype in PADDED:
        allowed = [Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B]
        if tiling.dtype == DataType.U6_ALIGN16B:
            allowed.append(Swizzle.B128_ATOM_64B)
        if tiling.swizzle not in allowed:
            raise ValueError(
                f"TensorMap: swizzle={swizzle} does not exist for dtype {kind}; "
                f"use one of {', '.join(map(spelling, allowed))}"
            )
    if tiling.oob_fill != OobFill.NONE and tiling.dtype not in FLOATS:
        raise ValueError(
            f"TensorMap: oob_fill={spelling(tiling.oob_fill)} with dtype {kind}, which is no "
            "floating-point type; use oob_fill='NONE' (zeros)"
        )


def describe(tiling: Tiling) -> str:
    """One line for reports: type, sizes, box and modes."""
    modes = (
        ("interleave", tiling.interleave),
        ("swizzle", tiling.swizzle),
        ("oob", tiling.oob_fill),
    )
    extra = "".join(f", {name} {spelling(mode)}" for name, mode in modes if mode)
    dims, box = ("x".join(map(str, sizes)) for sizes in (tiling.global_dim, tiling.box_dim))
    return f"{spelling(tiling.dtype)} {dims}, box {box}{extra}"


def aligned(tiling: Tiling, address: int) -> int:
    """`address`, if a map of this tiling may have it."""
    if not 0 <= address < 1 << ADDRESS_BITS or address % tiling.alignment:
        raise ValueError(
            f"TensorMap: address {address:#x} is no multiple of {tiling.alignment} below "
            f"2^{ADDRESS_BITS} as dtype {spelling(tiling.dtype)} and interleave "
            f"{spelling(tiling.interleave)} need; allocate the tensor aligned to 128 bytes"
        )
    return address
