"""Layouts as formulas in NumPy, written from the specifications: where an element of a tensor goes.

Every function takes index arrays and sizes of the plain tensor and returns places, in elements.
Nothing here knows about digits.
"""

import numpy as np


def ceil_to(size, step):
    return -(-size // step) * step


def scales_128x4(e, r, c, sizes):
    """flashinfer_fp4, section 0.5: tiles of 128 x 4, 512 bytes each; experts padded one by one."""
    _, rows, cols = sizes
    width = ceil_to(cols, 4) // 4
    tile = r // 128 * width * 512 + c // 4 * 512
    within = r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return e * ceil_to(rows, 128) * ceil_to(cols, 4) + tile + within


def scales_8x4(e, r, c, sizes):
    """The same section: tiles of 8 x 4, 32 bytes each."""
    _, rows, cols = sizes
    width = ceil_to(cols, 4) // 4
    tile = r // 8 * width * 32 + c // 4 * 32
    return e * ceil_to(rows, 8) * ceil_to(cols, 4) + tile + r % 8 * 4 + c % 4


def deepgemm(e, r, c, sizes):
    """Byte c % 4 of the int32 in row r, word c // 4; words of all rows, a multiple of 4, first."""
    _, rows, cols = sizes
    pitch, words = ceil_to(rows, 4), ceil_to(cols, 4) // 4
    return 4 * ((e * words + c // 4) * pitch + r) + c % 4


def deepgemm_permuted(e, r, c, sizes):
    """Of mega MoE: row r of every 128 first moves to 4 * (r % 32) + r // 32."""
    moved = r // 128 * 128 + 4 * (r % 32) + r % 128 // 32
    return deepgemm(e, moved, c, sizes)


def gate_up(granule):
    """Row g * i + j of gate goes to 2g * i + j, of up to 2g * i + g + j."""

    def place(e, r, b, sizes):
        _, rows, cols = sizes
        half = rows // 2
        up, at = r // half, r % half
        moved = 2 * granule * (at // granule) + granule * up + at % granule
        return (e * rows + moved) * cols + b

    return place


def marlin(order):
    """Positions in pieces of 64 scales of a line ("group", "e4m3"), or of 32 ("column")."""

    def place(g, n, sizes):
        piece = 32 if order == "column" else 64
        m = n % piece
        if order == "group":
            moved = 8 * (m % 8) + m // 8
        elif order == "e4m3":  # m // 8 with its two low bits exchanged
            j = m // 8
            moved = 8 * (m % 8) + (j & 4 | (j & 1) << 1 | (j & 2) >> 1)
        else:
            moved = 8 * (m % 8 // 2) + 2 * (m // 8) + m % 2
        return g * sizes[1] + n // piece * piece + moved

    return place


def w4a8(neighbours):
    """int4_trtllm, 4.1: out[e, g // I, n * I + g % I] = in[e, g, n]."""

    def place(e, g, n, sizes):
        _, groups, cols = sizes
        line = e * (groups // neighbours) + g // neighbours
        return line * cols * neighbours + n * neighbours + g % neighbours

    return place


INVERSE_ROWS = {
    # section 2: destination of source row r in a block of B rows
    "int4_a16": (32, lambda r: 8 * ((r % 8) // 2) + 2 * (r // 8) + r % 2),
    "int4_a8": (32, lambda r: 8 * ((r % 16) // 4) + 4 * (r // 16) + r % 4),
    "int8_a16": (16, lambda r: 4 * ((r % 8) // 2) + 2 * (r // 8) + r % 2),
}
TILES = {"int4_a16": (4, 64), "int4_a8": (2, 128), "int8_a16": (2, 64)}
"""Columns interleaved and rows of a tile, section 2."""


def trtllm(name):
    """int4_trtllm, section 3.5, for all modes of section 3.1."""
    bits, family = int(name[3]), "_".join(name.split("_")[:2])
    plain = name.endswith("transposed")
    interleaved = name in TILES

    def place(e, k, n, sizes):
        _, rows, cols = sizes
        ew = 32 // bits
        if not plain:
            block, inverse = INVERSE_ROWS[family]
            k = k // block * block + inverse(k % block)
        w, j = k // ew, k % ew
        if interleaved:
            i, tile_rows = TILES[family]
            t = tile_rows // ew
            word = n // i * (rows // ew) * i + w // t * t * i + n % i * t + w % t
        else:
            word = n * (rows // ew) + w
        slot = j if plain else j // 2 + ew // 2 * (j % 2)
        return e * rows * cols + word * ew + slot

    return place


PLACES = {
    "128x4": scales_128x4,
    "8x4": scales_8x4,
    "deepgemm": deepgemm,
    "deepgemm_permuted": deepgemm_permuted,
    **{f"gate_up_{granule}": gate_up(granule) for granule in (8, 16, 64)},
    **{
        f"marlin_{order}_{bits}": marlin(order)
        for order in ("group", "column", "e4m3")
        for bits in (8, 16, 32)
    },
    **{
        f"w4a8_{neighbours}{wide}": w4a8(neighbours)
        for neighbours in (2, 4)
        for wide in ("", "_32")
    },
    **{
        f"{family}{columns}": trtllm(f"{family}{columns}")
        for family in TILES
        for columns in ("", "_columns")
    },
    **{f"int{bits}_transposed": trtllm(f"int{bits}_transposed") for bits in (4, 8)},
}


def bits_of(name):
    """Return the bits of an element."""
    if name.startswith("int"):
        return int(name[3])
    if name.startswith("marlin"):
        return int(name.rsplit("_", 1)[1])
    if name.startswith("w4a8"):
        return 32 if name.endswith("_32") else 16
    return 8


def flip_of(name):
    """Return what every element is XORed with: the sign bit where codes become unsigned."""
    if name.startswith("int") and "transposed" not in name:
        return 1 << (bits_of(name) - 1)
    return 0


def padded(name, sizes):
    """Return the sizes of the layout."""
    steps = {"128x4": (128, 4), "8x4": (8, 4), "deepgemm": (4, 4)}.get(name)
    if steps is None:
        return tuple(sizes)
    return (sizes[0], ceil_to(sizes[1], steps[0]), ceil_to(sizes[2], steps[1]))


def grid(sizes):
    """Return the index of every element, an array for each axis."""
    return np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij")


def relayout(name, plain, sizes):
    """Return the bytes of a layout; ``plain``: bytes, ``sizes``: of the tensor in elements."""
    bits = bits_of(name)
    if bits == 4:
        values = np.stack([plain & 15, plain >> 4], -1).reshape(sizes)
    else:
        values = plain.view(f"uint{bits}").reshape(sizes)
    out = np.zeros(np.prod(padded(name, sizes)), values.dtype)
    out[PLACES[name](*grid(sizes), sizes)] = values ^ values.dtype.type(flip_of(name))
    if bits == 4:
        out = out[0::2] | out[1::2] << 4
    return out.view(np.uint8)
