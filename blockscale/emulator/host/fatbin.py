"""What a fat binary holds: containers of PTX and cubins -> the PTX text that a device would get.

A container (what ``nvcc -fatbin`` and ``fatbinary`` write) is a header of 16 bytes, magic
0xBA55ED50, then images: each a header with kind, architecture, compression and size, and the data.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blockscale.base import words
from blockscale.emulator.errors import EmulationError

MAGIC = 0xBA55ED50
WRAPPER_MAGIC = 0x466243B1  # the 24-byte struct that points to a container (fatbinary_section.h)
HEADER_BYTES = 16
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_IMAGE_HEADER = struct.Struct("<HHIQ")  # kind, version, header bytes, data bytes
_KINDS: dict[int, Literal["ptx", "cubin"]] = {1: "ptx", 2: "cubin"}
_LZ4, _ZSTD = 0x2000, 0x8000  # in the flags of an image
_ONE_ARCHITECTURE, _FAMILY = 0x100000, 0x200000
_LZ4_MIN_MATCH = 4


@dataclass(frozen=True)
class Image:
    """One entry of a container, decompressed.

    Attributes:
        kind: "ptx", "cubin", or "kind <number>" for what the emulator has no name for.
        arch: as ptxas spells it: "sm_100a", "sm_100f", "sm_80".
        data: the text or the ELF file; empty for kinds without a name.
    """

    kind: str
    arch: str
    data: bytes

    @property
    def ptx(self) -> str:
        """The PTX text."""
        assert self.kind == "ptx"
        return self.data.rstrip(b"\0").decode()

    def __str__(self) -> str:
        return f"{self.kind} {self.arch}"


def container_size(header: bytes, where: str = "fat binary") -> int:
    """Return the bytes of the whole container whose first 16 bytes are ``header``.

    Raises:
        EmulationError: these are not the first bytes of a container.
    """
    if len(header) < HEADER_BYTES or header[:4] != _MAGIC_BYTES:
        raise EmulationError(
            f"{where}: begins with {header[:4].hex() or 'nothing'}, not with the magic number of a "
            "fat binary (50ed55ba); pass what fatbinary or nvcc -fatbin wrote"
        )
    header_bytes, size = struct.unpack_from("<HQ", header, 6)
    return int(header_bytes + size)


def read(data: bytes, where: str = "fat binary") -> list[Image]:
    """Return the images of a container, in order.

    Raises:
        EmulationError: it is no container, is cut off, or an image cannot be decompressed.
        ModuleNotFoundError: an image is compressed with Zstandard, and the package is missing.
    """
    end = container_size(data, where)
    if end > len(data):
        raise EmulationError(
            f"{where}: the container says {end} bytes, but {len(data)} are there; it was cut off"
        )
    offset = struct.unpack_from("<H", data, 6)[0]
    images: list[Image] = []
    while offset < end:
        if offset + 64 > end:
            raise EmulationError(
                f"{where}: image {len(images)} at byte {offset} has no room for its header before "
                f"the end at {end}; the container is damaged"
            )
        kind, _, header_bytes, size = _IMAGE_HEADER.unpack_from(data, offset)
        if header_bytes < 64 or offset + header_bytes + size > end:
            raise EmulationError(
                f"{where}: image {len(images)} at byte {offset} claims {header_bytes} + {size} "
                f"bytes, and the container ends at {end}; it is damaged"
            )
        header = data[offset : offset + header_bytes]
        body = data[offset + header_bytes : offset + header_bytes + size]
        images.append(_image(kind, header, body, f"{where}, image {len(images)}"))
        offset += header_bytes + size
    return images


def _image(kind: int, header: bytes, body: bytes, where: str) -> Image:
    compressed, _, _, number = struct.unpack_from("<4I", header, 16)
    (flags,) = struct.unpack_from("<Q", header, 40)
    (full_size,) = struct.unpack_from("<Q", header, 56)
    suffix = "a" if flags & _ONE_ARCHITECTURE else "f" if flags & _FAMILY else ""
    arch = f"sm_{number}{suffix}"
    if kind not in _KINDS:
        return Image(f"kind {kind}", arch, b"")
    if flags & (_LZ4 | _ZSTD):
        unpack = decompress_lz4 if flags & _LZ4 else decompress_zstd
        try:
            body = unpack(body[:compressed], full_size)
        except (IndexError, ValueError) as error:
            raise EmulationError(
                f"{where} ({_KINDS[kind]} {arch}): cannot be decompressed ({error}); build it with "
                "--no-compress"
            ) from error
    if kind == 1 and (target := re.search(rb"^\s*\.target\s+(sm_\d+[af]?)", body, re.MULTILINE)):
        arch = target.group(1).decode()  # the text knows best
    return Image(_KINDS[kind], arch, body)


def decompress_zstd(data: bytes, size: int) -> bytes:
    """Return the ``size`` bytes that a Zstandard frame stands for.

    Raises:
        ValueError: the frame is damaged.
        ModuleNotFoundError: the package zstandard is not installed.
    """
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this fat binary is compressed with Zstandard, and the package 'zstandard' is missing; "
            f"{words.install()}, or build the library with nvcc --no-compress",
            name=error.name,
        ) from None
    try:  # a frame may claim any size: read no more than there should be
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            out = reader.read(size + 1)
    except zstandard.ZstdError as error:
        raise ValueError(f"Zstandard: {error}") from error
    if len(out) != size:
        raise ValueError(f"Zstandard: {len(out)} bytes or more instead of {size}")
    return bytes(out)


def decompress_lz4(data: bytes, size: int) -> bytes:
    """Return the ``size`` bytes that an LZ4 block (without frame) stands for.

    Raises:
        ValueError: the block is damaged.
        IndexError: the block ends early.
    """
    out, at = bytearray(), 0

    def length(nibble: int) -> int:
        nonlocal at
        total = nibble
        while nibble == 15:
            more = data[at]
            at += 1
            total += more
            if more != 255:
                break
        return total

    while len(out) < size:
        token = data[at]
        at += 1
        literals = length(token >> 4)
        out += data[at : at + literals]
        at += literals
        if len(out) >= size:
            break
        distance = data[at] | data[at + 1] << 8
        at += 2
        copy = length(token & 15) + _LZ4_MIN_MATCH
        if not 0 < distance <= len(out):
            raise ValueError(f"LZ4: a match reaches {distance} bytes back of {len(out)}")
        start = len(out) - distance
        while copy > 0:  # a match may overlap what it makes
            piece = out[start : start + copy]
            out += piece
            copy -= len(piece)
    if len(out) != size:
        raise ValueError(f"LZ4: {len(out)} bytes instead of {size}")
    return bytes(out)


def find(data: bytes, where: str = "library") -> list[Image]:
    """Return the images of every fat binary that lies somewhere in the bytes of a library file.

    What merely begins with the magic number is passed over.
    """
    images: list[Image] = []
    at = data.find(_MAGIC_BYTES)
    while at >= 0:
        version, header_bytes = struct.unpack_from("<HH", data[at : at + 8].ljust(8, b"\0"), 4)
        step = 4
        if version == 1 and header_bytes == HEADER_BYTES and at + HEADER_BYTES <= len(data):
            size = container_size(data[at : at + HEADER_BYTES])
            try:
                images += read(data[at : at + size], f"{where}, fat binary at byte {at}")
                step = size
            except EmulationError:
                pass  # a constant in some code, or cut off: loading it will say so
        at = data.find(_MAGIC_BYTES, at + step)
    return images


def capability(arch: str) -> tuple[int, int]:
    """Return the compute capability of an architecture: (10, 0) for "sm_100a".

    Raises:
        EmulationError: it is not spelled like one.
    """
    match = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", arch)
    if match is None:
        raise EmulationError(
            f"architecture {arch!r} is not spelled sm_<number>, sm_<number>a or sm_<number>f; "
            "write for example 'sm_100a'"
        )
    return int(match.group(1)), int(match.group(2))


def runs_on(arch: str, device: str) -> bool:
    """Return whether PTX for ``arch`` runs on ``device`` (PTX ISA, section .target).

    Suffix a: on this very architecture; f: on its family from there up; none: on any that follows.
    """
    made_for, has = capability(arch), capability(device)
    if arch.endswith("a"):
        return made_for == has
    if arch.endswith("f"):
        return made_for[0] == has[0] and made_for <= has
    return made_for <= has


def _rank(arch: str) -> tuple[tuple[int, int], int]:
    """Return what grows with how well code that runs on a device was made for it."""
    return capability(arch), "fa".find(arch[-1])


def choose(images: Sequence[Image], device: str, where: str = "fat binary") -> Image:
    """Return the PTX of the code that a ``device`` such as "sm_100a" would run.

    Raises:
        EmulationError: no PTX in it fits, or there is machine code that fits better; the sentence
            says what there is.
    """
    major = capability(device)[0]
    fitting = [i for i in images if i.kind == "ptx" and runs_on(i.arch, device)]
    if fitting:
        chosen = max(fitting, key=lambda i: _rank(i.arch))
        for other in images:
            fits = runs_on(other.arch, device) and capability(other.arch)[0] == major
            if other.kind == "cubin" and fits and _rank(other.arch) > _rank(chosen.arch):
                raise EmulationError(
                    f"{where}: {device} would run the {other}, and the nearest PTX is for "
                    f"{chosen.arch}, which may be other code; build it with PTX for {other.arch}"
                )
        return chosen
    inside = ", ".join(dict.fromkeys(map(str, images))) or "nothing"
    machine_code = [i.arch for i in images if i.kind == "cubin"]
    if machine_code and not any(i.kind == "ptx" for i in images):
        raise EmulationError(
            f"{where}: holds only machine code ({', '.join(dict.fromkeys(machine_code))}), and the "
            f"emulator reads PTX; build it with PTX for {device} as well (nvcc -gencode "
            f"arch=compute_{device[3:]},code=compute_{device[3:]})"
        )
    raise EmulationError(
        f"{where}: holds {inside}, of which no PTX runs on {device}; build it with PTX for "
        f"{device}, or run it with target= one of what is there"
    )
