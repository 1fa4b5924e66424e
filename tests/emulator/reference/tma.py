"""A slow reference of tensor copies: one byte at a time, from the manual's text and tables."""

import itertools

BASE = 0x7F00_0000_0000
SIZE = {"UINT8": 1, "UINT16": 2, "FLOAT16": 2, "BFLOAT16": 2, "UINT64": 8, "FLOAT64": 8}
# PTX ISA 5.5.7: which 16-byte chunk lies at each place of the 128-byte lines of one pattern.
TABLES = {
    "NONE": ["01234567"],
    "32B": ["01234567", "10325476"],
    "64B": ["01234567", "10325476", "23016745", "32107654"],
    "128B": [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    "128B_ATOM_32B": ["01234567", "23016745", "45670123", "67452301"],
    "128B_ATOM_32B_FLIP_8B": ["01234567", "23016745", "45670123", "67452301"],
    "128B_ATOM_64B": ["01234567", "45670123"],
}
SPAN = {"NONE": 0, "32B": 32, "64B": 64}


def placed(address, swizzle):
    """Shared address of the byte that belongs at `address`, by the manual's tables."""
    line, place = divmod(address, 128)
    chunk, within = divmod(place, 16)
    table = TABLES[swizzle]
    place = table[line % len(table)].index(str(chunk))
    if swizzle.endswith("FLIP_8B") and line % 2:
        within = (within + 8) % 16
    return line * 128 + place * 16 + within


def reference(arguments, coordinates, shared_address):
    """[(byte of global memory or None if outside, shared address)] of one tiled box, row by row."""
    dims, box = arguments["global_dim"], arguments["box_dim"]
    strides = arguments.get("global_strides_bytes", ())
    steps = list(arguments.get("element_strides") or [1] * len(dims))
    steps[0] = 1
    swizzle = arguments.get("swizzle", "NONE")
    size = SIZE.get(arguments["dtype"], 4)
    pitch = max(box[0] * size, SPAN.get(swizzle, 128))
    counts = [-(-length // step) for length, step in zip(box, steps, strict=True)]
    moved = []
    outer = [range(count) for count in reversed(counts[1:])]
    for row, place in enumerate(itertools.product(*outer)):
        for column in range(box[0]):
            at = [column, *reversed(place)]
            where = [c + i * s for c, i, s in zip(coordinates, at, steps, strict=True)]
            inside = all(0 <= w < d for w, d in zip(where, dims, strict=True))
            start = where[0] * size + sum(w * s for w, s in zip(where[1:], strides, strict=True))
            for byte in range(size):
                shared = placed(shared_address + row * pitch + column * size + byte, swizzle)
                moved.append((start + byte if inside else None, shared))
    return moved
