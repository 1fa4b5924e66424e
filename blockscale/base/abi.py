"""What kernel libraries rely on of apache-tvm-ffi's C ABI, as its headers declare it.

A library holds machine code that was compiled with one release's headers: layouts of structures,
type indices, codes of dtypes.  `declared` reads them out of the installed headers, `differences`
says what another release declares otherwise.  A release may add members of a union, or type
indices; what a library knows must have its size, its place and its value.

The layouts are those of the System V ABI for x86-64 and of AArch64, where they are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
"""By name: a number, or of a structure its size and its members as [offset, size], in bytes."""

HEADERS = {"find_include_path": "tvm/ffi/c_api.h", "find_dlpack_include_path": "dlpack/dlpack.h"}
"""By function of ``tvm_ffi.libinfo`` that names the folder: the header."""

VERSIONS = ("TVM_FFI_VERSION_MAJOR", "TVM_FFI_VERSION_MINOR", "DLPACK_MAJOR_VERSION")
STRUCTURES = (
    *("DLDevice", "DLDataType", "DLTensor"),
    *("TVMFFIObject", "TVMFFIAny", "TVMFFIByteArray"),
)
VALUES = (
    *("kTVMFFINone", "kTVMFFIInt", "kTVMFFIBool", "kTVMFFIFloat", "kTVMFFIOpaquePtr"),
    *("kTVMFFIDLTensorPtr", "kTVMFFIRawStr", "kTVMFFISmallStr", "kTVMFFIStr", "kTVMFFITensor"),
    *("kDLCPU", "kDLCUDA", "kDLInt", "kDLUInt", "kDLFloat", "kDLBfloat", "kDLBool"),
    *("kDLFloat8_e4m3fn", "kDLFloat8_e8m0fnu", "kDLFloat4_e2m1fn"),
)

_POINTER = 8
_SIZES = {
    **{f"{sign}int{bits}_t": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "char": 1,
    "float": 4,
    "double": 8,
    "size_t": 8,
    "int": 4,
    "DLDeviceType": 4,
}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*|^\s*#(?!\s*define)[^\n]*", re.DOTALL | re.MULTILINE)
_MEMBER = re.compile(r"(?:const\s+)?(\w+)\s*(\**)\s*(\w+)\s*(?:\[(\d+)\])?")
_FUNCTION = re.compile(r"\w+\s*\(\*(\w+)\)\(.*\)", re.DOTALL)


class _Layout:
    """A structure as it is laid out, or an anonymous union in one."""

    def __init__(self, members: Iterator[tuple[str, int, int]], union: bool) -> None:
        self.size, self.align = 0, 1
        self.members: dict[str, list[int]] = {}
        for name, size, align in members:
            at = 0 if union else -(-self.size // align) * align
            self.members[name] = [at, size]
            self.size, self.align = max(self.size, at + size), max(self.align, align)
        self.size = -(-self.size // self.align) * self.align


def _body(text: str, end: int) -> str:
    """Return what stands between the brace at ``end`` and the one that opens it."""
    depth, at = 1, end
    while depth:
        at -= 1
        depth += {"}": 1, "{": -1}.get(text[at], 0)
    return text[at + 1 : end]


def _layout(body: str, known: dict[str, _Layout], union: bool = False) -> _Layout:
    """Lay out the members that ``body`` declares; those of anonymous unions count as its own."""
    inner: dict[str, dict[str, list[int]]] = {}

    def members() -> Iterator[tuple[str, int, int]]:
        rest = body.strip()
        while rest:
            if rest.startswith("union"):
                end = rest.index("}")
                part = _layout(rest[rest.index("{") + 1 : end], known, union=True)
                name = f"union {len(inner)}"
                inner[name] = part.members
                yield name, part.size, part.align
                rest = rest[rest.index(";", end) + 1 :].strip()
                continue
            said, _, rest = rest.partition(";")
            rest = rest.strip()
            pointer, member = _FUNCTION.fullmatch(said.strip()), _MEMBER.fullmatch(said.strip())
            if pointer is not None:
                yield pointer[1], _POINTER, _POINTER
                continue
            if member is None:
                raise ValueError(f"a member that is not understood: {said.strip()!r}")
            kind, stars, name, count = member.groups()
            one = known.get(kind)
            size = _POINTER if stars else one.size if one else _SIZES[kind]
            align = one.align if one and not stars else size
            yield name, size * int(count or 1), align

    made = _Layout(members(), union)
    for name, parts in inner.items():
        at, _ = made.members.pop(name)
        made.members |= {part: [at + offset, size] for part, (offset, size) in parts.items()}
    return made


def read(texts: Mapping[str, str]) -> Facts:
    """Return the facts that headers declare, by name; one that they lack is left out.

    Args:
        texts: the headers, by what they are called.

    Raises:
        ValueError: a structure has members that are not understood.
    """
    facts: Facts = {}
    known: dict[str, _Layout] = {}
    text = "\n".join(_COMMENT.sub("", texts[name]) for name in reversed(HEADERS.values()))
    for name in VERSIONS:
        found = re.search(rf"#define\s+{name}\s+(\d+)", text)
        facts |= {name: int(found[1])} if found else {}
    for name in STRUCTURES:
        end = re.search(rf"\}}\s*{name}\s*;", text)
        if end is None:
            continue
        try:
            made = known[name] = _layout(_body(text, end.start()), known)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
        facts[name] = {"size": made.size, "members": made.members}
    for name in VALUES:
        found = re.search(rf"\b{name}\s*=\s*(-?\d+)", text)
        facts |= {name: int(found[1])} if found else {}
    return facts


@cache
def declared() -> Facts:
    """Return the facts of the installed release.

    Raises:
        OSError: it has no headers.
        ValueError: as `read`.
    """
    from tvm_ffi import libinfo

    folders = {header: getattr(libinfo, finder)() for finder, header in HEADERS.items()}
    return read({name: Path(folder, name).read_text() for name, folder in folders.items()})


def differences(built: Facts, here: Facts) -> list[str]:
    """Return in words what a library was ``built`` for and is otherwise ``here``."""
    found = []
    for name, want in built.items():
        got = here.get(name)
        if got == want:
            continue
        if got is None or not isinstance(want, dict) or not isinstance(got, dict):
            found.append(f"{name} is {'missing' if got is None else got} instead of {want}")
            continue
        if got["size"] != want["size"]:
            found.append(f"{name} has {got['size']} bytes instead of {want['size']}")
        for member, place in want["members"].items():
            other = got["members"].get(member)
            if other is None:
                found.append(f"{name}.{member} is missing")
            elif other != place:
                at, was = (f"{size} bytes at {offset}" for offset, size in (other, place))
                found.append(f"{name}.{member} has {at} instead of {was}")
    return found
