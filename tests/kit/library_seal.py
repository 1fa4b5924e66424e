"""A library file as its parts, and signed again after they were changed."""

import hashlib
import struct

from blockscale.base.manifest import MAGIC

FOOTER_BYTES = 8 + 32 + len(MAGIC)


def image_and_text(data: bytes) -> tuple[bytes, bytes]:
    """Return the ELF image and the manifest of a library file."""
    (length,) = struct.unpack_from("<Q", data, len(data) - FOOTER_BYTES)
    end = len(data) - FOOTER_BYTES
    return data[: end - length], data[end - length : end]


def seal(image: bytes, text: bytes, length: int | None = None) -> bytes:
    """Return the library file; ``length`` is what it says of the manifest's."""
    body = image + text + struct.pack("<Q", len(text) if length is None else length)
    return body + hashlib.sha256(body).digest() + MAGIC
