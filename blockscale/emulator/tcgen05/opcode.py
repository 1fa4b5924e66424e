"""Opcodes of the tcgen05 family, taken apart; modifiers in any order, as ptxas takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from blockscale.emulator.errors import PtxError
from blockscale.emulator.tcgen05.instruction import BLOCK_SCALED, K_OF_KIND

SECTION = {
    "alloc": "9.7.16.7.1",
    "dealloc": "9.7.16.7.1",
    "relinquish_alloc_permit": "9.7.16.7.1",
    "ld": "9.7.16.8.3",
    "st": "9.7.16.8.4",
    "wait": "9.7.16.8.5",
    "cp": "9.7.16.9.2",
    "shift": "9.7.16.9.3",
    "mma": "9.7.16.10.9",
    "commit": "9.7.16.12.1",
    "fence": "9.7.16.11.1",
}
SHAPE_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
CP_MULTICAST = {
    "128x256b": ("",),
    "4x256b": ("",),
    "128x128b": ("",),
    "64x128b": ("warpx2::02_13", "warpx2::01_23"),
    "32x128b": ("warpx4",),
}
VECTORS = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 0, "block32": 0}
COLLECTOR_OPS = ("fill", "use", "lastuse", "discard")


@dataclass(frozen=True)
class Opcode:
    """One tcgen05 opcode; a field that its form has not keeps its default."""

    name: str  # a key of SECTION
    text: str
    cta_group: int = 0
    kind: str = ""
    ws: bool = False
    sparse: bool = False
    block_scale: bool = False
    block: int = 0  # elements of K per scale factor, 16 or 32
    ashift: bool = False
    collector: tuple[str, str] | None = None  # ("a", "fill")
    shape: str = ""
    num: int = 0
    packed: bool = False  # .pack::16b or .unpack::16b
    registers: int = 0
    red: str = ""  # "min" or "max"
    red_type: str = ""  # "f32", "u32" or "s32"
    red_abs: bool = False
    red_nan: bool = False
    target: str = ""  # wait: "ld" or "st"; fence: "before_thread_sync" or "after_thread_sync"
    multicast: str = ""
    source_format: str = ""  # cp: "b6x16_p32" or "b4x16_p64"
    space: str = ""  # "shared::cta" or "shared::cluster"


class _Modifiers:
    """The modifiers of one opcode, consumed by name: ptxas takes them in any order."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts = text.split(".")[1:]
        self.name = ""

    def leading(self, *choices: str) -> str:
        """Consume and return the first modifier if it is one of the choices, else return ''."""
        return self.parts.pop(0) if self.parts and self.parts[0] in choices else ""

    def optional(self, *choices: str) -> str:
        """Consume and return the modifier that is one of the choices, else return ''."""
        for at, part in enumerate(self.parts):
            if part in choices:
                return self.parts.pop(at)
        return ""

    def need(self, what: str, *choices: str) -> str:
        """Consume and return the modifier that must be one of the choices."""
        found = self.optional(*choices)
        if not found:
            self.fail(f"needs {what} (.{', .'.join(choices)})")
        return found

    def fixed(self, *modifiers: str) -> None:
        """Consume modifiers that the form must have."""
        for modifier in modifiers:
            self.need("the modifier", modifier)

    def end(self) -> None:
        """Raise if a modifier is left over: unknown, twice there or not of this form."""
        if self.parts:
            self.fail(f"does not take .{self.parts[0]}")

    def fail(self, rule: str) -> NoReturn:
        """Raise PtxError with the rule and the modifiers that were not understood."""
        rest = f"; not understood: .{' .'.join(self.parts)}" if self.parts else ""
        section = SECTION.get(self.name, "9.7.16")
        raise PtxError(f"{self.text}: tcgen05.{self.name} {rule}{rest} (PTX ISA {section})")

    def cta_group(self) -> int:
        """Consume .cta_group and return its number of CTAs."""
        return int(self.need("a CTA group", "cta_group::1", "cta_group::2")[-1])


@lru_cache(maxsize=1024)
def parse_opcode(text: str) -> Opcode:
    """Return the parts of a tcgen05 opcode; PtxError names the modifier that does not fit."""
    if not text.startswith("tcgen05."):
        raise PtxError(f"{text}: this is no tcgen05 opcode")
    modifiers = _Modifiers(text)
    modifiers.name, _, target = modifiers.parts[0].partition("::")
    if modifiers.name not in _PARSERS or (target and modifiers.name not in ("wait", "fence")):
        raise PtxError(f"{text}: tcgen05 has no instruction .{modifiers.parts[0]} (PTX ISA 9.7.16)")
    if target:
        modifiers.parts[0] = target  # wait::ld, fence::before_thread_sync
    else:
        modifiers.parts.pop(0)
    fields = _PARSERS[modifiers.name](modifiers)
    modifiers.end()
    return Opcode(modifiers.name, text, **fields)


def _parse_wait(m: _Modifiers) -> dict[str, Any]:
    target = m.leading("ld", "st") or m.fail("waits for ::ld or ::st")
    m.fixed("sync", "aligned")
    return {"target": target}


def _parse_fence(m: _Modifiers) -> dict[str, Any]:
    sides = ("before_thread_sync", "after_thread_sync")
    return {"target": m.leading(*sides) or m.fail(f"is one of ::{', ::'.join(sides)}")}


def _parse_alloc(m: _Modifiers) -> dict[str, Any]:
    group = m.cta_group()
    m.fixed("sync", "aligned")
    space = m.optional("shared::cta")
    m.fixed("b32")
    return {"cta_group": group, "space": space}


def _parse_dealloc(m: _Modifiers) -> dict[str, Any]:
    group = m.cta_group()
    m.fixed("sync", "aligned", "b32")
    return {"cta_group": group}


def _parse_relinquish(m: _Modifiers) -> dict[str, Any]:
    group = m.cta_group()
    m.fixed("sync", "aligned")
    return {"cta_group": group}


def _parse_ld(m: _Modifiers) -> dict[str, Any]:
    red = bool(m.leading("red"))
    fields = _parse_movement(m, "pack::16b", ("32x32b", "16x32bx2") if red else None)
    if not red:
        m.fixed("b32")
        return fields
    if fields["packed"]:
        m.fail("has no .pack::16b with .red")
    if fields["num"] < 2:
        m.fail("needs at least .x2 with .red")
    return fields | _parse_reduction(m)


def _parse_reduction(m: _Modifiers) -> dict[str, Any]:
    op = m.need("a reduction", "min", "max")
    absolute, nan = bool(m.optional("abs")), bool(m.optional("NaN"))
    kind = m.need("a type", "f32") if absolute or nan else m.need("a type", "f32", "u32", "s32")
    return {"red": op, "red_type": kind, "red_abs": absolute, "red_nan": nan}


def _parse_st(m: _Modifiers) -> dict[str, Any]:
    fields = _parse_movement(m, "unpack::16b", None)
    m.fixed("b32")
    return fields


def _parse_movement(m: _Modifiers, pack: str, shapes: tuple[str, ...] | None) -> dict[str, Any]:
    m.fixed("sync", "aligned")
    shape = m.need("a shape", *(shapes or SHAPE_REGISTERS))
    per_unit = SHAPE_REGISTERS[shape]
    nums = [f"x{1 << i}" for i in range(8) if (1 << i) * per_unit <= 128]
    num = int(m.need(f"a repeat factor of .{shape}", *nums)[1:])
    packed = bool(m.optional(pack))
    return {"shape": shape, "num": num, "packed": packed, "registers": num * per_unit}


def _parse_cp(m: _Modifiers) -> dict[str, Any]:
    group = m.cta_group()
    shape = m.need("a shape", *CP_MULTICAST)
    legal = CP_MULTICAST[shape]
    multicast = "" if legal == ("",) else m.need(f"a multicast of .{shape}", *legal)
    source = ""
    if "b8x16" in m.parts:
        at = m.parts.index("b8x16")
        source = m.parts[at + 1] if at + 1 < len(m.parts) else ""
        if source not in ("b6x16_p32", "b4x16_p64"):
            m.fail("needs .b6x16_p32 or .b4x16_p64 right after .b8x16")
        del m.parts[at : at + 2]
    return {"cta_group": group, "shape": shape, "multicast": multicast, "source_format": source}


def _parse_shift(m: _Modifiers) -> dict[str, Any]:
    group = m.cta_group()
    m.fixed("down")
    return {"cta_group": group}


def _parse_commit(m: _Modifiers) -> dict[str, Any]:
    group = m.cta_group()
    m.fixed("mbarrier::arrive::one")
    space = m.optional("shared::cluster")
    multicast = m.optional("multicast::cluster").partition("::")[2]
    m.fixed("b64")
    return {"cta_group": group, "space": space, "multicast": multicast}


def _parse_mma(m: _Modifiers) -> dict[str, Any]:
    ws = bool(m.leading("ws"))
    sparse = bool(m.leading("sp"))
    group = 1 if ws and m.need("the CTA group of .ws", "cta_group::1") else m.cta_group()
    kinds = [kind for kind in K_OF_KIND if not (ws and kind in BLOCK_SCALED)]
    kind = m.need("a kind", *(f"kind::{name}" for name in kinds)).partition("::")[2]
    fields: dict[str, Any] = {"cta_group": group, "kind": kind, "ws": ws, "sparse": sparse}
    if kind in BLOCK_SCALED:
        fields |= _parse_block_scale(m, kind)
    elif not ws:
        fields["ashift"] = bool(m.optional("ashift"))
    buffers = ("b0", "b1", "b2", "b3") if ws else ("a",)
    ops = ("lastuse", "discard") if fields.get("ashift") else COLLECTOR_OPS
    found = m.optional(*(f"collector::{buffer}::{op}" for buffer in buffers for op in ops))
    if found:
        fields["collector"] = tuple(found.split("::")[1:])
    return fields


def _parse_block_scale(m: _Modifiers, kind: str) -> dict[str, Any]:
    """`.block_scale` and its vector size: Table 56, aliases of 9.7.16.10.9.1."""
    m.fixed("block_scale")
    legal = {
        "mxf8f6f4": ("scale_vec::1X", "block32"),
        "mxf4": ("scale_vec::2X", "block32"),
        "mxf4nvf4": ("scale_vec::2X", "block32", "scale_vec::4X", "block16"),
    }[kind]
    if kind == "mxf4nvf4":
        vector = m.need(f"a vector size of .kind::{kind}", *legal)
    else:
        vector = m.optional(*legal)
    return {"block_scale": True, "block": 16 if vector in ("scale_vec::4X", "block16") else 32}


_PARSERS: dict[str, Callable[[_Modifiers], dict[str, Any]]] = {
    "alloc": _parse_alloc,
    "dealloc": _parse_dealloc,
    "relinquish_alloc_permit": _parse_relinquish,
    "ld": _parse_ld,
    "st": _parse_st,
    "wait": _parse_wait,
    "fence": _parse_fence,
    "cp": _parse_cp,
    "shift": _parse_shift,
    "mma": _parse_mma,
    "commit": _parse_commit,
}
