"""Index functions of Edge-LLM's NVFP4 tensors, for any numbers with ``+ - * // % & | << >>``.

Python integers, arrays, tensors and TensorIR expressions alike: this file is the only place that
knows the layout.  A tile is 64 E2M1 values: 32 bytes, 2 vectors of 16 bytes, 8 words (lanes) of 32
bits.  Element i is in lane i / 8, bits 4 * (i % 8) .. + 3.  A coordinate is c = (x, y, z).

Words are integers 0 .. 2^32 - 1 in a type that holds them: 64 bits where the type is sized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TILE = 64
"""Values of a tile."""

TILE_BYTES = 32
VECTOR_BYTES = 16
VECTORS = 2
"""Vectors ("chunks") of a tile."""

LANES = 4
"""Words of a vector."""

LANE_VALUES = 8
BLOCK = 16
"""Values that share a block scale."""

ATOM_ROWS = 128
"""Rows of a tile of scales, which holds one word of each."""


def tile_offset(c: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Number of the tile's first vector."""
    return c[0] * strides[0] + c[1] * strides[1] + c[2] * strides[2]


def expert_dim(m_dim: int, k_dim: int) -> int:
    """The component that is neither row nor column of the scales."""
    return 3 - m_dim - k_dim


def atom_word(m: Any, k_tile: Any, num_k_tiles: Any) -> Any:
    """Number of the word of row ``m`` and tile ``k_tile``: four scales, of 64 values along K."""
    tile = (m // ATOM_ROWS) * num_k_tiles + k_tile
    return tile * ATOM_ROWS + (m % 32) * 4 + (m % ATOM_ROWS) // 32


def tile_scale_index(
    c: Sequence[Any], num_k_tiles: Any, expert_stride: Any, m_dim: int = 1, k_dim: int = 2
) -> Any:
    """Number of the tile's word of block scales; the K component is a tile already."""
    expert = c[expert_dim(m_dim, k_dim)]
    return expert * expert_stride + atom_word(c[m_dim], c[k_dim], num_k_tiles)


def linear_word(c: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Number of the tile's word where there is one a tile, in the order of the payload."""
    return tile_offset(c, strides) // VECTORS


def exchange(word: Any) -> Any:
    """Bytes (s0, s1, s2, s3) of a word as (s0, s2, s1, s3), and back."""
    return (word & 0xFF0000FF) | ((word >> 8) & 0xFF00) | ((word & 0xFF00) << 8)


def lane_of(element: Any) -> Any:
    """Lane (0 .. 7) that holds ``element`` (0 .. 63)."""
    return element // LANE_VALUES


def shift_of(element: Any) -> Any:
    """Lowest bit of ``element`` in its lane."""
    return element % LANE_VALUES * 4


def block_byte(block: Any) -> Any:
    """Byte of block ``block`` (0 .. 3) of a tile in its exchanged word: 0, 2, 1, 3."""
    return block // 2 + block % 2 * 2


def decode_byte(half_bits: Any) -> Any:
    """Byte (S0E5M3) of a scale whose float16 bits are these: without sign and 7 mantissa bits."""
    return (half_bits >> 7) & 0xFF
