"""`TensorMap`: what a caller passes to a kernel in place of a CUtensorMap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockscale.emulator.tma.encoding import decode, encode
from blockscale.emulator.tma.modes import DataType, Interleave, L2Promotion, OobFill, Swizzle, parse
from blockscale.emulator.tma.tiling import Tiling, aligned, describe


class TensorMap:
    """A tensor map over `array`, or over a global address (`TensorMap.at`).

    The machine gives the array an address; until then `address` is None. `array` is kept as it is:
    a NumPy array, a torch tensor, anything the caller of `launch` may pass as a buffer.
    """

    def __init__(
        self,
        array: Any,
        *,
        dtype: str | int,
        global_dim: Sequence[int],
        global_strides_bytes: Sequence[int] | None = (),
        box_dim: Sequence[int],
        element_strides: Sequence[int] | None = None,
        interleave: str | int = "NONE",
        swizzle: str | int = "NONE",
        oob_fill: str | int = "NONE",
        l2_promotion: str | int = "NONE",
    ) -> None:
        self.array = array
        self.address: int | None = None
        dims = _integers("global_dim", global_dim)
        steps = (1,) * len(dims) if element_strides is None else element_strides
        self.tiling = Tiling(
            parse(DataType, dtype, "dtype"),
            dims,
            _integers("global_strides_bytes", global_strides_bytes or ()),
            _integers("box_dim", box_dim),
            _integers("element_strides", steps),
            parse(Interleave, interleave, "interleave"),
            parse(Swizzle, swizzle, "swizzle"),
            parse(OobFill, oob_fill, "oob_fill"),
            parse(L2Promotion, l2_promotion, "l2_promotion"),
        )

    @classmethod
    def at(cls, address: int, **arguments: Any) -> TensorMap:
        """The map of the tensor at a 64-bit global address; arguments as for `TensorMap`."""
        made = cls(None, **arguments)
        made.bind(address)
        return made

    def bind(self, address: int) -> None:
        """Give the map its global address, checked for alignment."""
        self.address = aligned(self.tiling, address)

    def encode(self, address: int | None = None) -> bytes:
        """The 128 bytes that stand for this map in param, const, shared or global memory."""
        base = self.address if address is None else aligned(self.tiling, address)
        if base is None:
            raise ValueError("TensorMap.encode: the map has no address yet; pass one or call bind")
        return encode(self.tiling, base)

    @staticmethod
    def decode(data: bytes) -> TensorMap:
        """The map in 128 bytes of memory; `IllegalOperation` if they hold none or a wrong one."""
        tiling, address = decode(bytes(data))
        made = TensorMap.__new__(TensorMap)
        made.array, made.address, made.tiling = None, address, tiling
        return made

    def __repr__(self) -> str:
        where = "unbound" if self.address is None else f"{self.address:#x}"
        return f"TensorMap({where}, {describe(self.tiling)})"


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(value.__index__() for value in values)
    except (TypeError, AttributeError):
        raise TypeError(
            f"TensorMap: {name}={values!r} is no sequence of integers; give one"
        ) from None
