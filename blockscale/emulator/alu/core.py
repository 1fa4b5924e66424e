"""The table of scalar instructions: what an opcode looks like, and which function computes it.

A *form* is one line of the PTX ISA's syntax boxes: a base name, types in order and modifiers, each
a slot that is mandatory, optional or a choice.  Modifiers may come in any order, as in ptxas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.emulator.errors import PtxError

DTYPES: dict[str, str] = {
    "pred": "?", "b8": "u1", "u8": "u1", "s8": "i1",
    "b16": "u2", "u16": "u2", "s16": "i2", "f16": "f2", "bf16": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "tf32": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8", "f32x2": "u8",
    "u16x2": "u4", "s16x2": "u4", "f16x2": "u4", "bf16x2": "u4", "u8x4": "u4", "s8x4": "u4",
    "e4m3x2": "u2", "e5m2x2": "u2", "e2m3x2": "u2", "e3m2x2": "u2", "ue8m0x2": "u2",
    "s2f6x2": "u2", "e2m1x2": "u1", "e2m1x4": "u2", "e4m3x4": "u4", "e5m2x4": "u4",
    "e2m3x4": "u4", "e3m2x4": "u4", "u2": "u4", "s2": "u4", "u4": "u4", "s4": "u4",
}  # fmt: skip
"""The NumPy dtype of an operand of each PTX type (PTX ISA 5.2; u2..s4 are those of cvt.pack)."""

SLOTS: dict[str, tuple[str, ...]] = {
    "rnd": ("rn", "rz", "rm", "rp"),
    "rnz": ("rn", "rz"),
    "rzp": ("rz", "rp"),
    "irnd": ("rni", "rzi", "rmi", "rpi"),
    "cc": ("cc",),
    "hilo": ("hi", "lo"),
    "clampwrap": ("clamp", "wrap"),
    "bool": ("and", "or", "xor"),
    "scaled": ("scaled::n2::ue8m0",),
}
"""Slots with several spellings; any other slot is the modifier of its own name."""


@dataclass(frozen=True)
class Alu:
    """One scalar instruction: NumPy dtypes of its operands and the function of arrays (n,).

    `outs`, `ins`: a dtype per operand ('?' is a predicate).  `ufunc`: fn accepts out=.
    `reads_cc`, `writes_cc`: the carry is an extra last input, an extra last output ('?').
    `divides`: the result is unspecified where the last input is 0.
    """

    outs: tuple[str, ...]
    ins: tuple[str, ...]
    fn: Callable[..., Any]
    ufunc: bool = False
    reads_cc: bool = False
    writes_cc: bool = False
    divides: bool = False


class Mods(dict[str, str]):
    """The modifiers of one opcode by slot; a slot that is absent is ''."""

    def __missing__(self, key: str) -> str:
        return ""


Build = Callable[[Mods], Alu]


@dataclass(frozen=True)
class Form:
    """One syntax line; `slots` maps a slot to whether it is mandatory."""

    base: str
    types: tuple[str, ...]
    slots: Mapping[str, bool]
    build: Build
    n_dst: tuple[int, ...] = (1,)
    n_src: int | None = None  # only where the opcode alone does not tell (three-input min and max)
    isa: float = 9.0  # the PTX ISA version that introduced it, where newer than 9.0

    def spellings(self) -> Iterator[str]:
        """Every opcode of this form, modifiers in the order of the slots."""
        choices = []
        for slot, needed in self.slots.items():
            names = [f".{name}" for name in SLOTS.get(slot, (slot,))]
            choices.append(names if needed else ["", *names])
        types = "".join(f".{t}" for t in self.types)
        for mods in itertools.product(*choices):
            yield self.base + "".join(mods) + types


_FORMS: dict[str, list[Form]] = {}


def form(
    bases: str,
    types: str,
    slots: str,
    build: Callable[..., Alu],
    *,
    n_dst: tuple[int, ...] = (1,),
    n_src: int | None = None,
    isa: float = 9.0,
) -> None:
    """Register syntax lines: `build(base, types, mods) -> Alu`.

    bases: names separated by spaces; types: alternatives separated by spaces, each dotted in order
    ('f32 f64', 'u32.s32'; '-' for none); slots: 'rnd ftz? sat?', '?' marks an optional one.
    """
    parsed = {slot.rstrip("?"): not slot.endswith("?") for slot in slots.split()}
    for base in bases.split():
        for alternative in types.split():
            order = () if alternative == "-" else tuple(alternative.split("."))
            made = functools.partial(build, base, order)
            _FORMS.setdefault(base, []).append(
                Form(base, order, parsed, made, n_dst=n_dst, n_src=n_src, isa=isa)
            )


def forms() -> list[Form]:
    """Every registered form, for tests that compare them with an assembler."""
    return [one for several in _FORMS.values() for one in several]


def _slot_of(candidate: Form, name: str) -> str | None:
    for slot in candidate.slots:
        if name in SLOTS.get(slot, (slot,)):
            return slot
    return None


def _match(candidate: Form, tokens: list[str]) -> tuple[Mods, str, int]:
    """The modifiers of an opcode in this form; what does not fit, and how near it comes."""
    mods = Mods()
    for name in tokens:
        slot = _slot_of(candidate, name)
        if slot is None:
            return mods, f"the modifier .{name} does not exist in this form", 0
        if mods[slot]:
            return mods, f"the modifiers .{mods[slot]} and .{name} exclude each other", 1
        mods[slot] = name
    for slot, needed in candidate.slots.items():
        if needed and not mods[slot]:
            names = ", ".join(f".{name}" for name in SLOTS.get(slot, (slot,)))
            return mods, f"one of {names} is mandatory", 2
    return mods, "", 3


@functools.cache
def lookup(opcode: str, n_dst: int = 1, n_src: int | None = None) -> Alu | None:
    """Return what a scalar opcode computes, None for other instructions.

    n_dst: destinations as written (2 for `p|q`); n_src: sources, those of a vector counted one by
    one, which only three-input min and max need.  An opcode whose types or modifiers no form has
    raises PtxError.
    """
    base, *tokens = opcode.split(".")
    if base not in _FORMS:
        return None
    types = tuple(name for name in tokens if name in DTYPES)
    candidates = [one for one in _FORMS[base] if one.types == types]
    if not candidates:
        known = list(dict.fromkeys(".".join(one.types) for one in _FORMS[base]))
        listed = ", ".join(known[:16]) + (", ..." if len(known) > 16 else "")
        raise PtxError(
            f"{opcode}: {base} has no form with the types {'.'.join(types) or '(none)'}; "
            f"use one that PTX ISA section 9.7 lists ({listed})"
        )
    reasons: list[tuple[str, int]] = []
    for candidate in candidates:
        mods, why, near = _match(candidate, [name for name in tokens if name not in DTYPES])
        reasons.append((why, near))
        if why:
            continue
        if n_dst not in candidate.n_dst or (n_src is None and candidate.n_src):
            continue
        if n_dst > 1:
            mods["n_dst"] = str(n_dst)
        alu = candidate.build(mods)
        if n_src is None or len(alu.ins) == n_src:
            return alu
    why = max(reasons, key=lambda reason: reason[1])[0] or (
        f"{n_dst} destination and {'these' if n_src is None else n_src} source operands do not fit"
    )
    raise PtxError(f"{opcode}: {why}; use a form of {base} that PTX ISA section 9.7 lists")
