"""The layout "tiles64" of 4-bit matrices, in which kernels of MoE and linear layers load weights.

A matrix [R, K] is padded with zeros to multiples of 64.  Of block (rb, kb) of 64 x 64, the row
``16 m + 8 r + g`` (m16 tile m, r and g of a lane) and the column ``16 t + 4 j + i``:

* Codes [R / 64, K / 64, m 4, lane 32, j 4] words of 32 bits, little endian; lane 4 g + t.  Word j
  has both rows of g and i = 0..3: what the lane needs for a k16 step j of ``mma.sync.m16n8k16``.
  `CODE_BITS` says which bits.  So K of the other operand is permuted within each 64: position
  16 j + 2 t + (i & 1) + 8 (i >> 1) of the MMAs' K holds channel 16 t + 4 j + i (`K_ORDER`).
* Scales of nvfp4: bytes [R / 64, K / 64, m 4, lane 32, r 2], of the lane's 16 columns; see
  `E4M3_BIAS`.
* Of mxfp4: bytes [R / 64, K / 64, m 4, g 8, half of K 2, r 2]; see `E8M0_TOP`.
* Of int4: 16-bit floats [R / 64, K / 64, m 4, g 8, (half of K 2,) r 2, (scale and zero 2)]: halves
  where a group has 32 columns; K / 128 where it has 128; a zero is a number from 0 to 15.

Everything here runs on the device of its arguments, a bounded number of codes at a time.
"""

from __future__ import annotations

from functools import cache

import torch

from blockscale.base.sizes import round_up

Tensor = torch.Tensor

TILE = 64
"""Rows and columns of a block."""

CODES = 2048
"""Bytes of codes of a block."""

AT_ONCE = 1 << 24
"""Codes that are converted in one go: temporary memory is about 12 bytes per code."""

REVISION = 2
"""Of the layout.  Before 2026-11-27, in 1, code a3 of e2m1 had bit 3 in 14, and bit 0 in 13."""

CODE_BITS = {
    "e2m1": ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14)),
    "int4": ((3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12)),
    "e2m1e": ((7, 2, 1, 0), (3, 10, 9, 8), (15, 6, 5, 4), (11, 14, 13, 12)),
}
"""Where bits 3, 2, 1, 0 of the codes a0..a3 are in a half of a word.

a0: row g, k 0 and 1 of the word's four; a1: row g + 8, k 0, 1; a2: row g, k 2, 3; a3: row g + 8,
k 2, 3.  The even k is in the low half.  "e2m1e" is that of the layout "tiles64e" (`moe.rows`).
"""

E4M3_BIAS, E4M3_ZERO, E4M3_LARGEST = 13, 0x20, 0x7E
"""Scale byte of nvfp4: ((exponent + 13) << 3) | mantissa, normalised; zero is the byte of 2^-9,
whose codes are then all zero; the byte of the largest finite E4M3 value."""

E8M0_TOP = 237
"""Scale byte of mxfp4 of an expert's largest scale: 2^0; less by one is half of it; 0 is zero."""


def outdated(fmt: str, layout: str, revision: object) -> bool:
    """Whether weights that were stored are in an earlier revision of the layout, and differ."""
    return layout == "tiles64" and fmt != "int4" and revision != REVISION


def _k_order() -> tuple[int, ...]:
    places = ((p // 16, p % 16) for p in range(TILE))
    return tuple(16 * (r % 8 // 2) + 4 * j + 2 * (r // 8) + r % 2 for j, r in places)


K_ORDER = _k_order()
"""The channel at each position of a block's K."""


def natural_order(rows: int) -> Tensor:
    """Return the row of the matrix at each row of the layout [rounded up to `TILE`]; -1: padding.

    Of each 32 rows, 8 q + 2 t + b holds row 8 t + 2 q + b: once the sums of an MMA are transposed,
    a thread (t) has 8 rows that are neighbours, 16 bytes to store.
    """
    position = torch.arange(round_up(rows, TILE)).view(-1, 4, 4, 2)
    order = position.transpose(1, 2).reshape(-1)
    return torch.where(order < rows, order, -1)


def paired_order(intermediate: int, gated: bool) -> Tensor:
    """Return the row of w13 at each row of the layout; -1: padding.

    The output position p of GEMM 1 has channel `K_ORDER` [p % 64] of its 64.  Gated: 32 rows are
    two tiles, each the gates of 8 positions and then their ups, so that one thread has both; tile
    u has the positions 4 t + 2 u + b of 16, so that a thread's outputs of both are neighbours.
    """
    position = torch.arange(round_up(intermediate, TILE))
    channel = position // TILE * TILE + torch.tensor(K_ORDER)[position % TILE]
    row = torch.where(channel < intermediate, channel, -1)
    return _in_pairs(row, intermediate) if gated else row[natural_order(len(row))]


def gated_order(cols: int) -> Tensor:
    """Return the row of a gated linear layer's weight at each row of the layout; -1: padding.

    As in `paired_order`, but the output position p is column p.
    """
    column = torch.arange(round_up(cols, TILE))
    return _in_pairs(torch.where(column < cols, column, -1), cols)


def _in_pairs(row: Tensor, count: int) -> Tensor:
    """Return gate rows and their ups, which are ``count`` rows below, in tiles of 8 of each."""
    row = row.view(-1, 4, 2, 2).transpose(1, 2).reshape(-1, 8)  # t, u, b -> u, (t, b)
    ups = torch.where(row < 0, -1, row + count)
    return torch.stack((row, ups), 1).reshape(-1)


# ---- Linear layers ------------------------------------------------------------------------------


def in_steps(codes: Tensor) -> Tensor:
    """Return codes [rows, K / 2] in the order in which a linear layer's words have them.

    Of each 16 channels word j of a thread then holds 2 j, 2 j + 1, 2 j + 8 and 2 j + 9, those of
    thread j in an MMA's step of 16: x is taken as it is.
    """
    return codes.reshape(len(codes), -1, 2, 4).transpose(2, 3).reshape(codes.shape)


def out_of_steps(codes: Tensor) -> Tensor:
    """Return the codes of which `in_steps` returned these."""
    return codes.reshape(len(codes), -1, 4, 2).transpose(2, 3).reshape(codes.shape)


def turned(blocks: Tensor, back: bool = False) -> Tensor:
    """Return blocks of codes with a quad's 16-byte words turned by g / 2, as linear layers have it.

    Those of thread t lie at (t + g / 2) % 4: the words j of four rows are in different banks of
    shared memory.  ``back``: the other way round.
    """
    words = blocks.view(*blocks.shape[:-1], TILE // 16, 8, 4, 16)  # m16, g, t, bytes
    g, t = torch.arange(8, device=blocks.device)[:, None], torch.arange(4, device=blocks.device)
    of = (t + g // 2) % 4 if back else (t - g // 2) % 4
    return words[..., g, of, :].reshape(blocks.shape)


# ---- Codes --------------------------------------------------------------------------------------


@cache
def _word_table(kind: str) -> Tensor:
    """Return [4, 256] int32: what a byte (two codes along K) adds to a word as a0..a3."""
    table = torch.zeros(4, 256, dtype=torch.int64)
    byte = torch.arange(256)
    for slot, places in enumerate(CODE_BITS[kind]):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            table[slot] |= ((byte >> bit) & 1) << place
            table[slot] |= ((byte >> (4 + bit)) & 1) << (16 + place)
    return torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32)


def pack_codes(codes: Tensor, kind: str) -> Tensor:
    """Return blocks [R / 64, K / 64, 2048] uint8 of codes [R, K / 2] uint8, whole blocks.

    Args:
        codes: two a byte, even k in the low nibble.
        kind: of `CODE_BITS`.
    """
    rows, cols = codes.shape[0] // TILE, codes.shape[1] * 2 // TILE
    table = _word_table(kind).to(codes.device)
    halves = codes.view(rows, 4, 2, 8, cols, 4, 4, 2)  # m16, row g or g + 8, g, kb, t, j, k pair
    word = torch.zeros((rows, cols, 4, 8, 4, 4), dtype=torch.int32, device=codes.device)
    for slot in range(4):
        byte = halves[:, :, slot % 2, ..., slot // 2].permute(0, 3, 1, 2, 4, 5).int()
        word |= table[slot].index_select(0, byte.reshape(-1)).view(word.shape)
    return word.view(torch.uint8).view(rows, cols, CODES)


def unpack_codes(blocks: Tensor, kind: str) -> Tensor:
    """Return the codes [R, K / 2] of `pack_codes`."""
    rows, cols = blocks.shape[:2]
    word = blocks.contiguous().view(torch.int32).view(rows, cols, 4, 8, 4, 4)
    shape = (rows, 4, 2, 8, cols, 4, 4, 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=blocks.device)
    for slot, places in enumerate(CODE_BITS[kind]):
        byte = torch.zeros_like(word)
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            byte |= ((word >> place) & 1) << bit
            byte |= ((word >> (16 + place)) & 1) << (4 + bit)
        codes[:, :, slot % 2, ..., slot // 2] = byte.permute(0, 2, 3, 1, 4, 5).to(torch.uint8)
    return codes.view(rows * TILE, cols * TILE // 2)


# ---- Scales -------------------------------------------------------------------------------------


@cache
def e4m3_table() -> Tensor:
    """Return [256] uint8: the scale byte of each E4M3 byte from 0 to `E4M3_LARGEST`."""
    table = torch.full((256,), E4M3_ZERO, dtype=torch.uint8)
    for byte in range(1, E4M3_LARGEST + 1):
        exponent, mantissa = (byte >> 3) - 7, byte & 7
        if byte < 8:  # subnormal: mantissa * 2^-9
            top = byte.bit_length() - 1
            exponent, mantissa = top - 9, (byte << (3 - top)) & 7
        table[byte] = (exponent + E4M3_BIAS) << 3 | mantissa
    return table


@cache
def e4m3_inverse() -> Tensor:
    """Return [256] uint8: the E4M3 byte of each scale byte; `E4M3_ZERO` as the least subnormal."""
    table = torch.zeros(256, dtype=torch.uint8)
    table[e4m3_table()[1 : E4M3_LARGEST + 1].long()] = torch.arange(
        1, E4M3_LARGEST + 1, dtype=torch.uint8
    )
    return table


def pack_scales(scale: Tensor, group: int) -> Tensor:
    """Return [R / 64, blocks of scales, n] of scales [R, K / group(, 2)], whole blocks.

    A block of codes has 64 / group scales of a row, at least one.
    """
    per_block = max(1, TILE // group)
    rows, cols = scale.shape[0] // TILE, scale.shape[1] // per_block
    parts = scale.shape[2] if scale.dim() == 3 else 1
    view = scale.reshape(rows, 4, 2, 8, cols, per_block, parts)
    return view.permute(0, 4, 1, 3, 5, 2, 6).reshape(rows, cols, -1)


def unpack_scales(blocks: Tensor, group: int, parts: int = 1) -> Tensor:
    """Return the scales [R, K / group, parts] of `pack_scales`."""
    per_block = max(1, TILE // group)
    rows, cols = blocks.shape[:2]
    view = blocks.reshape(rows, cols, 4, 8, per_block, 2, parts).permute(0, 2, 5, 3, 1, 4, 6)
    return view.reshape(rows * TILE, cols * per_block, parts)


# ---- Matrices -----------------------------------------------------------------------------------


def _padded(value: Tensor, order: Tensor, cols: int, fill: float) -> Tensor:
    """Return the rows ``order`` of ``value`` [R, C(, parts)], with ``cols`` columns."""
    taken = value.index_select(0, order.clamp(min=0))
    outside = (order < 0).view(-1, *[1] * (value.dim() - 1))
    taken.masked_fill_(outside, fill)
    if cols == value.shape[1]:
        return taken
    wide = torch.full((len(order), cols, *value.shape[2:]), fill).to(value)
    wide[:, : value.shape[1]] = taken
    return wide


def pack_fp4(codes: Tensor, scale: Tensor, top: int | None, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [R / 64, K / 64, 2048] and scales [R / 64, K / 64, 256 or 128] of a matrix.

    Args:
        codes: [rows, K / 2] uint8, E2M1.
        scale: bytes [rows, K / block]: E4M3 from 0 to `E4M3_LARGEST`, or E8M0 below 255.
        top: None: nvfp4; else mxfp4, and the largest E8M0 byte of the expert.
        order: the matrix's row at each row of the layout; -1: padding.
    """
    block = 16 if top is None else 32
    if top is None:
        zero = scale == 0
        byte = e4m3_table().to(scale.device)[scale.long()]
    else:
        byte = (scale.int() - top + E8M0_TOP).clamp(0).to(torch.uint8)
        zero = byte == 0
    depth = round_up(2 * codes.shape[1], TILE)
    outs = []
    for part in _parts(order, depth):
        dead = _padded(zero, part, depth // block, True)
        plain = _padded(codes, part, depth // 2, 0).view(len(part), depth // block, block // 2)
        plain.masked_fill_(dead[..., None], 0)
        fill = E4M3_ZERO if top is None else 0
        scales = _padded(byte, part, depth // block, fill)
        packed = pack_codes(plain.view(len(part), depth // 2), "e2m1")
        outs.append((packed, pack_scales(scales, block)))
    return _joined(outs)


def pack_bytes(codes: Tensor, byte: Tensor, order: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a matrix of E2M1 codes with a scale byte a block, as they are.

    Args:
        codes: [rows, K / 2] uint8.
        byte: [rows, K / block] uint8; of padding 0.
        order: the matrix's row at each row of the layout; -1: padding.
        kind: of `CODE_BITS`.
    """
    block, depth = 2 * codes.shape[1] // byte.shape[1], round_up(2 * codes.shape[1], TILE)
    outs = []
    for part in _parts(order, depth):
        plain = _padded(codes, part, depth // 2, 0)
        scales = _padded(byte, part, depth // block, 0)
        outs.append((pack_codes(plain, kind), pack_scales(scales, block)))
    return _joined(outs)


def pack_int4(
    codes: Tensor, scale: Tensor, zero: Tensor | None, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return codes [R / 64, K / 64, 2048] and scales [R / 64, K / max(64, group), n] of a matrix.

    Args:
        codes: [rows, K / 2] uint8, from 0 to 15.
        scale: [rows, K / group] of the dtype that the kernel multiplies in.
        zero: [rows, K / group] of this dtype, from 0 to 15; None: 8 everywhere, not stored.
        order: the matrix's row at each row of the layout; -1: padding.
    """
    group = 2 * codes.shape[1] // scale.shape[1]
    depth = round_up(2 * codes.shape[1], TILE)
    outs = []
    for part in _parts(order, depth):
        plain = _padded(codes, part, depth // 2, 0x88)
        scales = _padded(scale, part, depth // group, 0.0)
        if zero is not None:
            zeros = _padded(zero, part, depth // group, 8.0)
            scales = torch.stack((scales, zeros), -1)
        bits = pack_scales(scales, group)
        outs.append((pack_codes(plain, "int4"), bits.view(torch.uint8)))
    return _joined(outs)


def _parts(order: Tensor, depth: int) -> tuple[Tensor, ...]:
    """Return ``order`` in pieces of whole blocks of rows."""
    return order.split(max(1, AT_ONCE // (depth * TILE)) * TILE)


def _joined(outs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(outs) == 1:
        return outs[0]
    return torch.cat([codes for codes, _ in outs]), torch.cat([scales for _, scales in outs])
