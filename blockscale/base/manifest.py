"""The manifest: what a kernel library holds and which machine it needs, appended to the ELF file.

File layout::

    ELF image | manifest as JSON | length of the JSON, 8 bytes | SHA-256 of all before | magic

The dynamic loader ignores what follows the ELF image.  `read_manifest` never loads the library: a
damaged file, or one for another machine, is refused before any of its code can run.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blockscale.base import shapes
from blockscale.base.errors import LibraryError

FORMAT = 1
"""Version of the manifest's schema; a reader refuses newer ones."""

BLOCKSCALE_ABI = 2
"""Version of the calling convention of exported functions, layouts of weights included; raised when
it changes.  2: revision 2 of "tiles64" (`blockscale.ops.moe.tiles`)."""

REPLAY = ("blockscale_replay", "blockscale_forget")
"""What a CUDA library exports besides its functions: to do recorded launches, to free them."""

MAGIC = b"\x89blockscale.so\r\n"
MARKER = b"blockscale library, format "
"""What native/runtime.c leaves in every library, to tell a truncated one from a foreign one."""

DTYPES = ("float32", "float16", "bfloat16", "uint8", "int8", "int32", "int64", "uint32")
SCALAR_DTYPES = ("float32", "int32", "int64")
"""Dtypes of numbers that are passed by value."""

ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Bytes of which a function may want an address to be a multiple."""

_LENGTH = struct.Struct("<Q")
_FOOTER_BYTES = _LENGTH.size + hashlib.sha256().digest_size + len(MAGIC)

MOST_LEVELS = 64
MOST_PARAMETERS = 256

_ELF_HEADER = struct.Struct("<32xQQ6xHHHH2x")
"""Of both tables: where they begin; then bytes and number of their entries."""
_SEGMENT = struct.Struct("<I4xQQ8xQQ8x")
"""Kind, place in the file, address, bytes in the file, bytes in memory."""
_SECTION = struct.Struct("<4xI16xQQ24x")
"""Kind, place in the file, bytes."""
_PT_LOAD, _PT_DYNAMIC, _SHT_NOBITS = 1, 2, 8

_PARAMETER_KEYS = ("name", "dtype", "shape", "output", "default", "storage", "alias", "align")

Manifest = dict[str, Any]


def append_manifest(elf: bytes, manifest: Mapping[str, Any]) -> bytes:
    """Return the library file: ``elf``, then ``manifest``, then the footer.

    Raises:
        ValueError: the manifest does not fit its schema.
    """
    validate(manifest, "append_manifest")
    text = json.dumps(manifest, separators=(",", ":"), allow_nan=False).encode()
    body = b"".join((elf, text, _LENGTH.pack(len(text))))
    return body + hashlib.sha256(body).digest() + MAGIC


def read_manifest(path: str | Path) -> Manifest:
    """Return the manifest of the library at ``path``, after checking the whole file.

    Raises:
        OSError: the file cannot be read.
        LibraryError: it is no blockscale library, is damaged, or is of a newer format.
    """
    return parse(Path(path).read_bytes(), str(path))


def parse(data: bytes, where: str) -> Manifest:
    """Return the manifest in the library file ``data``; ``where`` names it in errors.

    Raises:
        LibraryError: as `read_manifest`.
    """
    if not data.endswith(MAGIC) or len(data) < _FOOTER_BYTES:
        raise LibraryError(_explain_no_footer(data, where))
    body, digest = data[: -len(MAGIC) - 32], data[-len(MAGIC) - 32 : -len(MAGIC)]
    actual = hashlib.sha256(body).digest()
    if actual != digest:
        raise LibraryError(
            f"{where}: the contents have SHA-256 {actual.hex()[:16]}… but the footer says "
            f"{digest.hex()[:16]}…, so the file was damaged or changed after the build; "
            "copy it again or build it again"
        )
    (length,) = _LENGTH.unpack(body[-_LENGTH.size :])
    text = body[-_LENGTH.size - length : -_LENGTH.size]
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LibraryError(
            f"{where}: the manifest is not JSON ({error}); build the library again"
        ) from None
    _check_depth(manifest, where)
    validate(manifest, where)
    return dict(manifest)


def _check_depth(value: object, where: str) -> None:
    """Check that nobody who walks the manifest runs out of stack."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner if isinstance(values, Iterable) for v in values]
        level = [v for v in level if isinstance(v, (dict, list))]
        if not level:
            return
    raise LibraryError(
        f"{where}: the manifest has more than {MOST_LEVELS} levels; build the library again"
    )


def check_image(data: bytes, where: str) -> None:
    """Check that the ELF image of a library file that `parse` has read is all there.

    The dynamic loader takes that for granted, and a process that reads past the end is killed.

    Raises:
        LibraryError: the image is cut off, or a segment or section lies elsewhere.
    """
    (length,) = _LENGTH.unpack_from(data, len(data) - _FOOTER_BYTES)
    size = len(data) - _FOOTER_BYTES - length

    def check(what: str, at: int, count: int) -> None:
        if at + count > size:
            raise LibraryError(
                f"{where}: {what} reaches from byte {at} to {at + count}, but the ELF image has "
                f"{size} bytes, so it was truncated or changed; build the library again"
            )

    check("the ELF header", 0, _ELF_HEADER.size)
    program, sections, segment, segments, section, count = _ELF_HEADER.unpack_from(data)
    check("the table of segments", program, segment * segments)
    check("the table of sections", sections, section * count)
    if (segment, section) != (_SEGMENT.size, _SECTION.size):
        raise LibraryError(
            f"{where}: entries of the ELF tables have {segment} and {section} bytes, not "
            f"{_SEGMENT.size} and {_SECTION.size}; build the library again"
        )
    loaded = []
    for i in range(segments):
        kind, at, address, stored, taken = _SEGMENT.unpack_from(data, program + i * segment)
        check(f"segment {i}", at, stored)
        if kind == _PT_LOAD:
            loaded.append((address, address + taken))
        elif kind == _PT_DYNAMIC and not any(
            low <= address and address + taken <= high for low, high in loaded
        ):
            raise LibraryError(
                f"{where}: segment {i}, the dynamic section, is not loaded; build the library again"
            )
    for i in range(count):
        kind, at, stored = _SECTION.unpack_from(data, sections + i * section)
        check(f"section {i}", at, 0 if kind == _SHT_NOBITS else stored)


def _explain_no_footer(data: bytes, where: str) -> str:
    if not data:
        return f"{where}: the file is empty, 0 bytes; copy it again or build it again"
    if data[:4] != b"\x7fELF":
        return (
            f"{where}: begins with {data[:4]!r}, not with the ELF magic, so it is not a "
            "blockscale library; pass a file that 'blockscale build' wrote"
        )
    sections_end = elf_sections_end(data)
    if MARKER in data or sections_end is None or sections_end > len(data):
        return (
            f"{where}: ends after {len(data)} bytes without the blockscale footer, so it was "
            "truncated or changed after the build; copy it again or build it again"
        )
    return (
        f"{where}: is a shared library without a blockscale manifest, so blockscale did not "
        "build it; pass a file that 'blockscale build' wrote, or use tvm_ffi.load_module"
    )


def elf_sections_end(data: bytes) -> int | None:
    """Return the offset after a 64-bit ELF image's section table; None if the header is cut off."""
    if len(data) < 64 or data[4] != 2:
        return None
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    return int(offset + size * count)


def elf_machine(data: bytes) -> int | None:
    """Return e_machine of a little-endian 64-bit ELF image; None if it is no such image."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        return None
    return int(struct.unpack_from("<H", data, 18)[0])


def validate(manifest: object, where: str) -> None:
    """Check a manifest against the schema.

    Raises:
        LibraryError: names the key, what it holds, and what it must hold.
    """
    top = _typed(manifest, dict, where, "the manifest")
    number = _key(top, "format", int, where, "")
    if number > FORMAT:
        raise LibraryError(
            f"{where}: manifest format {number} is newer than {FORMAT}, the newest that this "
            "blockscale reads; upgrade blockscale or build the library with this version"
        )
    if number < 1:
        raise _wrong(where, "format", number, "a positive integer")
    _key(top, "blockscale", str, where, "")
    abi = _key(top, "abi", dict, where, "")
    _key(abi, "tvm_ffi", str, where, "abi.")
    _validate_facts(_key(abi, "facts", dict, where, "abi."), where)
    _key(abi, "blockscale", int, where, "abi.")
    target = _key(top, "target", dict, where, "")
    _key(target, "kind", str, where, "target.")
    _key(target, "level", str, where, "target.")
    for i, feature in enumerate(_key(target, "features", list, where, "target.")):
        _typed(feature, str, where, f"target.features[{i}]")
    if target["kind"] == "cuda" and not _key(target, "archs", list, where, "target."):
        raise _wrong(where, "target.archs", [], "at least one architecture")
    for i, arch in enumerate(_key(target, "archs", list, where, "target.", default=[])):
        _typed(arch, str, where, f"target.archs[{i}]")
    _key(top, "built", dict, where, "")
    if "meta" in top:
        _key(top, "meta", dict, where, "")
    functions = _key(top, "functions", dict, where, "")
    if not functions:
        raise _wrong(where, "functions", functions, "at least one function")
    for name, function in functions.items():
        if not name.isidentifier():
            raise _wrong(where, "functions", name, "C identifiers as names")
        _validate_function(function, where, f"functions.{name}")


def _validate_facts(facts: dict[str, Any], where: str) -> None:
    """Check the facts of `base.abi`."""
    for name, fact in facts.items():
        at = f"abi.facts.{name}"
        if not isinstance(fact, dict):
            _typed(fact, int, where, at)
            continue
        _key(fact, "size", int, where, f"{at}.")
        for member, place in _key(fact, "members", dict, where, f"{at}.").items():
            pair = _typed(place, list, where, f"{at}.members.{member}")
            if len(pair) != 2 or not all(type(number) is int for number in pair):
                raise _wrong(where, f"{at}.members.{member}", place, "an offset and a size")


def _validate_function(function: object, where: str, at: str) -> None:
    entry = _typed(function, dict, where, at)
    _key(entry, "base", str, where, f"{at}.")
    if "spec" in entry:
        _key(entry, "spec", dict, where, f"{at}.")
    for i, bucket in enumerate(_key(entry, "buckets", list, where, f"{at}.", default=[])):
        _typed(bucket, dict, where, f"{at}.buckets[{i}]")
        _key(bucket, "tuned", bool, where, f"{at}.buckets[{i}].")
    seen: dict[str, bool] = {}
    params = _key(entry, "params", list, where, f"{at}.")
    if len(params) > MOST_PARAMETERS:
        raise _wrong(where, f"{at}.params", len(params), f"at most {MOST_PARAMETERS}")
    for i, param in enumerate(params):
        here = f"{at}.params[{i}]"
        _validate_param(param, where, here)
        name, output = param["name"], param.get("output", False)
        if name in seen:
            raise _wrong(where, f"{here}.name", name, "a name that no other parameter has")
        if not output and any(seen.values()):
            raise _wrong(where, f"{here}.output", output, "outputs after all inputs")
        seen[name] = output
    for i, _ in enumerate(entry["params"]):
        _validate_alias(entry["params"], i, where, f"{at}.params[{i}]")
    if not any(seen.values()):
        raise _wrong(where, f"{at}.params", list(seen), "at least one output")


def _validate_param(param: object, where: str, at: str) -> None:
    entry = _typed(param, dict, where, at)
    for key in set(entry) - {*_PARAMETER_KEYS}:
        raise _wrong(where, f"{at}", key, f"no keys but {', '.join(_PARAMETER_KEYS)}")
    name = _key(entry, "name", str, where, f"{at}.")
    if not name.isidentifier():
        raise _wrong(where, f"{at}.name", name, "an identifier, to pass it by keyword")
    dtype = _key(entry, "dtype", str, where, f"{at}.")
    if dtype not in DTYPES:
        raise _wrong(where, f"{at}.dtype", dtype, f"one of {', '.join(DTYPES)}")
    output = _key(entry, "output", bool, where, f"{at}.", default=False)
    shape = _key(entry, "shape", (list, type(None)), where, f"{at}.")
    if shape is None and (output or dtype not in SCALAR_DTYPES):
        rule = f"a list: numbers by value are inputs of dtype {', '.join(SCALAR_DTYPES)}"
        raise _wrong(where, f"{at}.shape", shape, rule)
    for i, dim in enumerate(shape or ()):
        try:
            shapes.parse(_typed(dim, (int, str), where, f"{at}.shape[{i}]"))
        except LibraryError:
            raise
        except ValueError as error:
            raise LibraryError(f"{where}: {at}.shape[{i}]: {error}") from None
    default = _key(entry, "default", (int, float, type(None)), where, f"{at}.", default=None)
    if default is not None and not abs(default) < 2**128:  # nor is NaN
        raise _wrong(where, f"{at}.default", default, "a number that float32 can hold")
    _key(entry, "storage", (str, type(None)), where, f"{at}.", default=None)
    align = _key(entry, "align", (int, type(None)), where, f"{at}.", default=None)
    if align is not None and align not in ALIGNMENTS:
        raise _wrong(where, f"{at}.align", align, f"one of {ALIGNMENTS}")
    _key(entry, "alias", (str, type(None)), where, f"{at}.", default=None)


def _validate_alias(params: list[Any], i: int, where: str, at: str) -> None:
    """Check that parameter i may be the very tensor that it names."""
    alias = params[i].get("alias")
    keys = ("dtype", "shape")
    inputs = [p["name"] for p in params if not p.get("output", False)]
    same = [p["name"] for p in params if all(p[key] == params[i][key] for key in keys)]
    fitting = [name for name in inputs if name in same] if params[i].get("output") else []
    if alias is not None and alias not in fitting:
        rule = f"null, or an input of the same dtype and shape: {fitting or 'there is none'}"
        raise _wrong(where, f"{at}.alias", alias, rule)


_WORDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
_REQUIRED = object()


def _key(
    entry: Mapping[str, Any],
    key: str,
    types: type | tuple[type, ...],
    where: str,
    prefix: str,
    default: Any = _REQUIRED,
) -> Any:
    if key not in entry:
        if default is not _REQUIRED:
            return default
        raise LibraryError(
            f"{where}: the manifest has no {prefix}{key}; build the library again with this version"
        )
    return _typed(entry[key], types, where, f"{prefix}{key}")


def _typed(value: Any, types: type | tuple[type, ...], where: str, at: str) -> Any:
    allowed = types if isinstance(types, tuple) else (types,)
    accepted = (*allowed, tuple) if list in allowed else allowed  # before it is JSON
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in allowed):
        raise _wrong(where, at, value, " or ".join(_WORDS[t] for t in allowed))
    return value


def _wrong(where: str, at: str, value: object, rule: str) -> LibraryError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return LibraryError(
        f"{where}: manifest key {at} is {shown}, expected {rule}; build the library again"
    )
