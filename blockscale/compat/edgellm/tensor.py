"""Edge-LLM's NVFP4 tensor: a view of tiles of 64 E2M1 values by coordinates (x, y, z).

`base.edgellm_index` has the layout.  A scale byte is S0E5M3, the upper bits of a float16:
``half_bits = byte << 7``; plain E4M3 bytes read so give value / 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blockscale.base import edgellm_index as index
from blockscale.base.sizes import round_up

Tensor = torch.Tensor

_WHERE = "Nvfp4Tensor"
INTEGERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
)
"""Dtypes that may hold packed codes."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return the values (float32) of integer codes 0 .. 15."""
    return torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)[codes.long()]


def scale_halfs(byte: Tensor) -> Tensor:
    """Return the values (float16) of S0E5M3 bytes (any integer dtype, 0 .. 255)."""
    return (byte.to(torch.int16) << 7).view(torch.float16)


def byte_values(packed: Tensor) -> Tensor:
    """Return the codes [..., 2 n] of packed bytes [..., n] uint8, low nibble first."""
    pair = torch.stack((packed & 15, packed >> 4), dim=-1)
    return pair.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _of_array(given: Any) -> Any:
    """Return an array as a tensor of its memory, anything else as it is."""
    return torch.from_numpy(given) if isinstance(given, np.ndarray) else given


class Nvfp4Tensor:
    """A view of packed codes and block scales; it owns nothing and copies nothing.

    Coordinates are integers, or integer tensors or arrays, which are broadcast; the index functions
    take TensorIR expressions, too.  Words and lanes are unsigned: Python integers 0 .. 2^32 - 1, or
    int64 tensors (arrays) of them.

    Attributes:
        quantized_data: the payload as given.
        block_scale: the words of block scales as given, or None.
        global_scale: float32 [1] or [E] (indexed by x), or None: 1.
        strides: vectors of 16 bytes between neighbours in x, y and z.
        tiles: sizes of x, y and z, or None where they are not known.
    """

    def __init__(
        self,
        quantized_data: Tensor,
        block_scale: Tensor | None = None,
        global_scale: Tensor | float | None = None,
        *,
        strides: Sequence[int],
        scale_num_k_tiles: int = 0,
        scale_expert_stride: int = 0,
        scale_m_dim: int = 1,
        scale_k_dim: int = 2,
        tiles: Sequence[int] | None = None,
    ) -> None:
        """See the class; NumPy arrays do in place of tensors, and their memory is used.

        Args:
            quantized_data: contiguous, any integer dtype, whole vectors of 16 bytes.
            block_scale: contiguous int32 words, or their bytes as uint8 or float8_e4m3fn.
            global_scale: a number, or float32 [], [1] or [E].
            strides: three, not negative.
            scale_num_k_tiles: tiles along K of the scales, cdiv(K / 16, 4).
            scale_expert_stride: words of an expert's scales, cdiv(M, 128) * scale_num_k_tiles *
                128.
            scale_m_dim, scale_k_dim: the components of a coordinate that are row and tile of the
                scales; the third is the expert.
            tiles: sizes of x, y and z; coordinates are then checked against them.

        Raises:
            TypeError: an argument of another type or dtype.
            ValueError: a stride, size or dimension that does not fit.
        """
        quantized_data, block_scale = _of_array(quantized_data), _of_array(block_scale)
        global_scale = _of_array(global_scale)
        self.quantized_data = quantized_data
        self._bytes = _as_bytes("quantized_data", quantized_data, INTEGERS, index.VECTOR_BYTES)
        self.block_scale = block_scale
        dtypes = (*INTEGERS, torch.float8_e4m3fn)
        given = block_scale is not None
        self._scales = _as_bytes("block_scale", block_scale, dtypes, 4) if given else None
        self.strides = _three_sizes("strides", strides)
        self.tiles = None if tiles is None else _three_sizes("tiles", tiles)
        self.scale_num_k_tiles = _size_of("scale_num_k_tiles", scale_num_k_tiles)
        self.scale_expert_stride = _size_of("scale_expert_stride", scale_expert_stride)
        self.scale_m_dim, self.scale_k_dim = _scale_dims(scale_m_dim, scale_k_dim)
        self.global_scale = _global_scales(global_scale, self._bytes.device)
        if self.tiles is not None and 0 not in self.tiles:
            last = index.tile_offset([size - 1 for size in self.tiles], self.strides)
            self._within("quantized_data", last, index.VECTORS, self.vectors, "vectors")

    @staticmethod
    def up_weights(
        payload: Tensor,
        global_scale: Tensor | float | None = None,
        block_scale: Tensor | None = None,
    ) -> Nvfp4Tensor:
        """Return the view of payload [E, H, I / 2]: tiles (e, h, i / 64)."""
        return _weights("up_weights", payload, global_scale, block_scale)

    @staticmethod
    def down_weights(
        payload: Tensor,
        global_scale: Tensor | float | None = None,
        block_scale: Tensor | None = None,
    ) -> Nvfp4Tensor:
        """Return the view of payload [E, I, H / 2]: tiles (e, i, h / 64)."""
        return _weights("down_weights", payload, global_scale, block_scale)

    @staticmethod
    def activation(
        packed: Tensor, block_scale: Tensor | None, global_scale: Tensor | float | None = None
    ) -> Nvfp4Tensor:
        """Return the view of packed [T, H / 2]: tiles (token, h / 64, 0).

        ``block_scale``: a word a tile, [T, H / 64] int32, its bytes (s0, s2, s1, s3).
        """
        tokens, per_row = _rows("activation", packed, 2)
        return Nvfp4Tensor(
            packed,
            block_scale,
            global_scale,
            strides=(per_row * index.VECTORS, index.VECTORS, 0),
            scale_num_k_tiles=per_row,
            scale_expert_stride=_padded(tokens[0]) * per_row,
            scale_m_dim=0,
            scale_k_dim=1,
            tiles=(*tokens, per_row, 1),
        )

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes in the payload."""
        return self._bytes.numel() // index.VECTOR_BYTES

    @property
    def payload(self) -> Tensor:
        """The payload as bytes [n]."""
        return self._bytes

    @property
    def scale_bytes(self) -> Tensor | None:
        """The block scales as bytes [n]."""
        return self._scales

    @property
    def device(self) -> torch.device:
        """Where the payload is."""
        return self._bytes.device

    def tile_offset_int4(self, c: Sequence[Any]) -> Any:
        """Number of the first vector of tile ``c``."""
        return index.tile_offset(_coordinate(c), self.strides)

    def tile_scale_index(self, c: Sequence[Any]) -> Any:
        """Number of the word of block scales of tile ``c``."""
        sizes = self.scale_num_k_tiles, self.scale_expert_stride
        return index.tile_scale_index(_coordinate(c), *sizes, self.scale_m_dim, self.scale_k_dim)

    def read_block_scale_word(self, c: Sequence[Any]) -> Any:
        """Word of scales of tile ``c``, bytes (s0, s2, s1, s3): stored as s0 .. s3 (atoms)."""
        self._check_tile(c)
        return index.exchange(self._scale_word(self.tile_scale_index(c)))

    def read_block_scale_word_linear(self, c: Sequence[Any]) -> Any:
        """Word of scales of tile ``c`` as stored, one word a tile in the order of the payload."""
        self._check_tile(c)
        return self._scale_word(index.linear_word(_coordinate(c), self.strides))

    def load_tile_uint4(self, c: Sequence[Any], chunk: int) -> Any:
        """Lanes [..., 4] of a vector of tile ``c``; a tuple where coordinates are integers."""
        lanes = [self.load_tile_uint32_lane(c, chunk, lane) for lane in range(index.LANES)]
        if isinstance(lanes[0], int):
            return tuple(lanes)
        stack = torch.stack if isinstance(lanes[0], Tensor) else np.stack
        return stack(lanes, -1)

    def load_tile_uint32_lane(self, c: Sequence[Any], chunk: int, lane: int) -> Any:
        """Lane ``lane`` (0 .. 3) of vector ``chunk`` (0, 1): elements 32 chunk + 8 lane .. + 7."""
        for name, value, count in (("chunk", chunk, index.VECTORS), ("lane", lane, index.LANES)):
            if not _is_integer(value) or not 0 <= value < count:
                raise ValueError(
                    f"{_WHERE}: {name}={value!r} is not an integer from 0 to {count - 1}; a tile "
                    f"has {index.VECTORS} vectors of {index.LANES} lanes"
                )
        self._check_tile(c)
        offset = self.tile_offset_int4(c)
        self._within("quantized_data", offset, index.VECTORS, self.vectors, "vectors")
        return _word(self._bytes, (offset + chunk) * index.LANES + lane)

    def tile_half(self, c: Sequence[Any], *, scaled: bool = False, linear: bool = False) -> Tensor:
        """Values [..., 64] float16 of tile ``c``: half(scale * e2m1).

        ``scaled``: times the global scale, rounded to half, in half.  ``linear``: scales through
        the linear reader (activations).
        """
        value = self._product(c, linear).half()
        if not scaled or self.global_scale is None:
            return value
        return value * self.global_of(c[0]).half()[..., None]

    def activation_elements(self, c: Sequence[Any]) -> Tensor:
        """Values [..., 64] float32 of tile ``c``, rounded to half; without the global scale."""
        return self.tile_half(c, linear=True).float()

    def tile_dot(self, c: Sequence[Any], activation: Nvfp4Tensor, a: Sequence[Any]) -> Tensor:
        """Dot product [...] float32 of tile ``c`` with tile ``a`` of an activation.

        In half, element by element: ``acc + (a * w) * (sa * sw)``; then times the product of the
        global scales in float32.
        """
        w, sw = self._codes(c), self._scale(c, linear=False)
        x, sx = activation._codes(a), activation._scale(a, linear=True)
        values = (x * w).half() * (sx * sw).repeat_interleave(index.BLOCK, -1)
        acc = torch.zeros(values.shape[:-1], dtype=torch.float16, device=values.device)
        for i in range(index.TILE):
            acc = acc + values[..., i]
        one = torch.ones((), device=values.device)
        factor = one if activation.global_scale is None else activation.global_scale[0]
        return acc.float() * (factor * (one if self.global_scale is None else self.global_of(c[0])))

    def global_of(self, x: Any) -> Tensor:
        """Global scale [...] float32 of coordinate ``x``; one for all if there is but one."""
        if self.global_scale is None:
            return torch.ones((), device=self.device)
        at = _tensor(x, self.device)
        if self.global_scale.numel() == 1:
            return self.global_scale[torch.zeros_like(at)]
        self._within("global_scale", at, 1, self.global_scale.numel(), "numbers")
        return self.global_scale[at]

    def dequantize(self, *, linear: bool = False) -> Tensor:
        """Values of all tiles [x, y, 64 z] float32, e2m1 * scale * global scale.

        The first product is exact.  ``linear``: scales through the linear reader.
        """
        if self.tiles is None:
            raise ValueError(
                f"{_WHERE}: the sizes of x, y and z are not known; pass tiles=(X, Y, Z), or make "
                "the view with up_weights, down_weights or activation"
            )
        axes = [torch.arange(size, device=self.device) for size in self.tiles]
        c = torch.meshgrid(*axes, indexing="ij")
        value = self._product(c, linear)
        if self.global_scale is not None:
            value = value * self.global_of(c[0])[..., None]
        return value.flatten(2)

    def _product(self, c: Sequence[Any], linear: bool) -> Tensor:
        scale = self._scale(c, linear).float().repeat_interleave(index.BLOCK, -1)
        return self._codes(c) * scale

    def _codes(self, c: Sequence[Any]) -> Tensor:
        """E2M1 values [..., 64] float32 of a tile."""
        self._check_tile(c)
        offset = _tensor(self.tile_offset_int4(c), self.device)
        self._within("quantized_data", offset, index.VECTORS, self.vectors, "vectors")
        byte = offset[..., None] * index.VECTOR_BYTES + torch.arange(
            index.TILE_BYTES, device=self.device
        )
        return e2m1_values(byte_values(self._bytes[byte]))

    def _scale(self, c: Sequence[Any], linear: bool) -> Tensor:
        """Scales [..., 4] float16 of a tile."""
        read = self.read_block_scale_word_linear if linear else self.read_block_scale_word
        word = _tensor(read(c), self.device)
        shifts = [8 * index.block_byte(block) for block in range(index.LANES)]
        return scale_halfs(torch.stack([(word >> shift) & 0xFF for shift in shifts], -1))

    def _scale_word(self, number: Any) -> Any:
        if self._scales is None:
            raise ValueError(
                f"{_WHERE}: there is no block_scale to read; pass one, or use the decode scales "
                "with decode_up and decode_down"
            )
        self._within("block_scale", number, 1, self._scales.numel() // 4, "words")
        return _word(self._scales, number)

    def _check_tile(self, c: Sequence[Any]) -> None:
        if self.tiles is None:
            return
        for axis, value, size in zip("xyz", _coordinate(c), self.tiles, strict=True):
            most = _extremes(value)[1]
            if most >= size:
                raise ValueError(
                    f"{_WHERE}: {axis}={most} is outside of the tensor, which has "
                    f"{size} tiles in {axis}; coordinates are of tiles of {index.TILE} values"
                )

    def _within(self, name: str, first: Any, count: int, size: int, unit: str) -> None:
        least, most = _extremes(first)
        if least < 0 or most + count > size:
            raise ValueError(
                f"{_WHERE}: the coordinate names {name} number {most}, but there are {size} {unit};"
                " see strides, scale_num_k_tiles and scale_expert_stride"
            )


def _weights(
    where: str, payload: Tensor, global_scale: Tensor | float | None, block_scale: Tensor | None
) -> Nvfp4Tensor:
    (experts, rows), per_row = _rows(where, payload, 3)
    vectors = per_row * index.VECTORS
    return Nvfp4Tensor(
        payload,
        block_scale,
        global_scale,
        strides=(rows * vectors, vectors, index.VECTORS),
        scale_num_k_tiles=per_row,
        scale_expert_stride=_padded(rows) * per_row,
        tiles=(experts, rows, per_row),
    )


def _padded(rows: int) -> int:
    return round_up(rows, index.ATOM_ROWS)


def _rows(where: str, payload: Tensor, dims: int) -> tuple[tuple[int, ...], int]:
    """Sizes before the last one, and tiles of a row, of packed codes."""
    if not isinstance(payload, Tensor):
        raise TypeError(
            f"{_WHERE}.{where}: payload is a {type(payload).__name__}, not a torch tensor; pass "
            "packed codes"
        )
    width = payload.shape[-1] * payload.element_size() if payload.dim() else 0
    if payload.dim() != dims or width % index.TILE_BYTES:
        shape = "[T, H / 2]" if dims == 2 else "[E, K, N / 2]"
        raise ValueError(
            f"{_WHERE}.{where}: payload has shape {list(payload.shape)}, but must have {shape}, "
            f"its rows whole tiles of {index.TILE_BYTES} bytes; pad them to {index.TILE} values"
        )
    return tuple(int(size) for size in payload.shape[:-1]), width // index.TILE_BYTES


def _tensor(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value, device=device).to(torch.int64)


def _word(data: Tensor, number: Any) -> Any:
    """Little-endian word ``number`` of bytes, unsigned; of the kind of ``number``."""
    at = _tensor(number, data.device)
    part = data[at[..., None] * 4 + torch.arange(4, device=data.device)].to(torch.int64)
    word = part[..., 0] | part[..., 1] << 8 | part[..., 2] << 16 | part[..., 3] << 24
    if isinstance(number, int):
        return int(word)
    return word.numpy() if isinstance(number, np.ndarray | np.generic) else word


# ---- Checks -------------------------------------------------------------------------------------


def _as_bytes(name: str, value: Any, dtypes: Sequence[torch.dtype], unit: int) -> Tensor:
    """Return the bytes [n] of a contiguous tensor, ``unit`` of which are one thing."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{_WHERE}: {name} is a {type(value).__name__}, not a torch tensor; pass a tensor of "
            "codes or words"
        )
    if value.dtype not in dtypes:
        raise TypeError(
            f"{_WHERE}: {name} has dtype {str(value.dtype).removeprefix('torch.')}, which is no "
            "storage of bytes or words; pass uint8 or int32"
        )
    if not value.is_contiguous():
        raise ValueError(
            f"{_WHERE}: {name} of shape {list(value.shape)} has strides {list(value.stride())}, "
            f"but must be contiguous; pass {name}.contiguous()"
        )
    size = value.numel() * value.element_size()
    if size % unit:
        raise ValueError(
            f"{_WHERE}: {name} has {size} bytes, which is not a multiple of {unit}; pass whole "
            f"{'vectors' if unit == index.VECTOR_BYTES else 'words'}"
        )
    return value.detach().reshape(-1).view(torch.uint8)


def _is_integer(value: object) -> bool:
    """Return whether ``value`` is an integer, NumPy's included."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _size_of(name: str, value: Any) -> int:
    """Return ``value``; ValueError unless it is an integer >= 0."""
    if not _is_integer(value) or value < 0:
        raise ValueError(f"{_WHERE}: {name}={value!r} is not an integer >= 0; pass a size")
    return int(value)


def _three_sizes(name: str, values: Any) -> tuple[int, int, int]:
    """Return three sizes."""
    if not isinstance(values, Sequence) or len(values) != 3:
        raise ValueError(
            f"{_WHERE}: {name}={values!r} are not three numbers; pass one for each of x, y and z"
        )
    x, y, z = (_size_of(name, value) for value in values)
    return x, y, z


def _scale_dims(m_dim: Any, k_dim: Any) -> tuple[int, int]:
    """Return the components that are row and tile of the scales."""
    for name, value in (("scale_m_dim", m_dim), ("scale_k_dim", k_dim)):
        if not _is_integer(value) or not 0 <= value <= 2:
            raise ValueError(f"{_WHERE}: {name}={value!r} is not 0, 1 or 2; choose x, y or z")
    if m_dim == k_dim:
        raise ValueError(
            f"{_WHERE}: scale_m_dim and scale_k_dim are both {m_dim}; choose two components"
        )
    return int(m_dim), int(k_dim)


def _global_scales(value: Any, device: torch.device) -> Tensor | None:
    """Return global scales [n] float32, or None."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor([value], dtype=torch.float32, device=device)
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"{_WHERE}: global_scale is {kind}, not a number or float32; pass float32 [1] or [E]"
        )
    if value.dim() > 1 or not value.numel():
        raise ValueError(
            f"{_WHERE}: global_scale has shape {list(value.shape)}, but must have [1] or [E], a "
            "number for each expert"
        )
    return value.detach().reshape(-1)


def _coordinate(c: Sequence[Any]) -> list[Any]:
    """Return x, y and z; integers must not be negative, expressions pass."""
    try:
        values = list(c)
    except TypeError:
        values = []
    if len(values) != 3:
        raise ValueError(
            f"{_WHERE}: the coordinate {c!r} has no three components; pass (x, y, z), z=0 for a "
            "matrix"
        )
    parts = [_component(axis, value) for axis, value in zip("xyz", values, strict=True)]
    if any(isinstance(part, Tensor) for part in parts):
        return [torch.from_numpy(p) if isinstance(p, np.ndarray) else p for p in parts]
    return parts


def _component(axis: str, value: Any) -> Any:
    if _is_integer(value):
        value = int(value)
    elif isinstance(value, Tensor | np.ndarray):
        whole = (
            value.dtype in INTEGERS
            if isinstance(value, Tensor)
            else np.issubdtype(value.dtype, np.integer)
        )
        if not whole:
            raise TypeError(
                f"{_WHERE}: {axis} has dtype {value.dtype}, not an integer one; pass tile numbers"
            )
        value = value.to(torch.int64) if isinstance(value, Tensor) else value.astype(np.int64)
    elif isinstance(value, bool | float | str) or value is None:
        raise TypeError(
            f"{_WHERE}: {axis}={value!r} is not an integer; pass tile numbers or tensors of them"
        )
    else:
        return value  # an expression
    if _extremes(value)[0] < 0:
        raise ValueError(
            f"{_WHERE}: {axis}={_extremes(value)[0]} is negative; tiles are counted from 0"
        )
    return value


def _extremes(value: Any) -> tuple[int, int]:
    """Least and greatest of an integer, array or tensor; none: nothing to object to."""
    if isinstance(value, int):
        return value, value
    size = value.numel() if isinstance(value, Tensor) else value.size
    return (int(value.min()), int(value.max())) if size else (0, -(2**62))
