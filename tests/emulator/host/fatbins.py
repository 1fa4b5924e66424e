"""Fat binaries for tests, written without NVIDIA's tools: containers as fatbinary makes them."""

import struct

PTX, CUBIN = 1, 2
ONE_ARCHITECTURE, FAMILY = 0x100000, 0x200000
LZ4, ZSTD = 0x2000, 0x8000


def image(arch: str, data: bytes, kind: int = PTX, packed: bytes | None = None, flags: int = 0):
    """Return one image; `packed` is what is stored, if that is not `data`."""
    number = arch.removeprefix("sm_").rstrip("af")
    flags |= {"a": ONE_ARCHITECTURE, "f": FAMILY}.get(arch[-1], 0) | 0x11
    stored = data if packed is None else packed
    padded = stored + bytes(-len(stored) % 8)
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(padded))
    header += struct.pack("<4I", 0 if packed is None else len(packed), 0x40, 0x90000, int(number))
    header += struct.pack("<4Q", 0, flags, 0, 0 if packed is None else len(data))
    return header + padded


def container(*images: bytes) -> bytes:
    """Return a fat binary of these images."""
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def ptx_container(text: str, arch: str) -> bytes:
    """Return a fat binary with one PTX text."""
    return container(image(arch, text.encode() + b"\0"))
