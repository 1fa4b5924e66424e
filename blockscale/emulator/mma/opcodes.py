"""The opcodes of mma.sync: parsed and checked.

PTX ISA 9.2, section 9.7.14.5.14 "mma".  As in ptxas, the modifiers' order is free except for the
types, which are d, a, b, c and then the scales' type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blockscale.emulator import formats
from blockscale.emulator.errors import PtxError

F8 = ("e4m3", "e5m2")
F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
_TYPES = frozenset(
    ("f16", "bf16", "tf32", "f32", "f64", "s32", "s8", "u8", "s4", "u4", "b1", *F8F6F4)
)
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")

# Type of the multiplicands: the shapes, and the types of d and c.
_FLOAT = ("f16", "f32")
_CLASSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "f16": (("m8n8k4", "m16n8k8", "m16n8k16"), _FLOAT),
    "bf16": (("m16n8k8", "m16n8k16"), ("f32",)),
    "tf32": (("m16n8k4", "m16n8k8"), ("f32",)),
    "f8": (("m16n8k16", "m16n8k32"), _FLOAT),
    "f64": (("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"), ("f64",)),
    "8": (("m8n8k16", "m16n8k16", "m16n8k32"), ("s32",)),
    "4": (("m8n8k32", "m16n8k32", "m16n8k64"), ("s32",)),
    "b1": (("m8n8k128", "m16n8k128", "m16n8k256"), ("s32",)),
    "f8f6f4": (("m16n8k32",), _FLOAT),
    "mxf8f6f4": (("m16n8k32",), ("f32",)),
    "mxf4": (("m16n8k64",), ("f32",)),
    "mxf4nvf4": (("m16n8k64",), ("f32",)),
}
# Table 36: kind, scale type -> scale_vec sizes.
_SCALES = {
    ("mxf8f6f4", "ue8m0"): (1,),
    ("mxf4", "ue8m0"): (2,),
    ("mxf4nvf4", "ue8m0"): (2, 4),
    ("mxf4nvf4", "ue4m3"): (4,),
}
_DEFAULT_VEC = {"mxf8f6f4": 1, "mxf4": 2}


@dataclass(frozen=True)
class MmaOpcode:
    """What the modifiers of one mma.sync say."""

    text: str
    m: int
    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    c_type: str
    a_layout: str
    b_layout: str
    saturate: bool = False
    bit_op: str = ""
    kind: str = ""
    scale_type: str = ""
    scale_vec: int = 0

    @property
    def in_containers(self) -> bool:
        """Whether 4- and 6-bit elements sit in bytes of their own."""
        return self.kind in ("f8f6f4", "mxf8f6f4")

    @property
    def element_bits(self) -> int:
        """Bits from one multiplicand element to the next."""
        return 8 if self.in_containers else formats.BITS[self.a_type]


class _Modifiers:
    """The modifiers of one opcode, taken out one by one."""

    def __init__(self, opcode: str) -> None:
        self.opcode = opcode
        self.left = opcode.split(".")[1:]

    def error(self, what: str) -> PtxError:
        return PtxError(f"{self.opcode}: {what} (PTX ISA 9.7.14.5.14 mma)")

    def take(self, *names: str) -> list[str]:
        """Those of the modifiers that are among the names, in their order."""
        found = [word for word in self.left if word in names]
        self.left = [word for word in self.left if word not in names]
        return found

    def one(self, *names: str, required: bool = True) -> str:
        found = self.take(*names)
        if len(found) > 1 or (required and not found):
            number = "no" if not found else "more than one"
            raise self.error(f"has {number} modifier of .{', .'.join(names)}; write one")
        return found[0] if found else ""

    def prefixed(self, prefix: str) -> str:
        found = [word for word in self.left if word.startswith(prefix)]
        self.left = [word for word in self.left if not word.startswith(prefix)]
        if len(found) > 1:
            raise self.error(f"has more than one .{prefix} modifier; write one")
        return found[0][len(prefix) :] if found else ""


def parse_mma(opcode: str) -> MmaOpcode | None:
    """The meaning of a dotted opcode; None if it is not mma.sync.

    Raises:
        PtxError: modifiers that do not exist or do not go together.
    """
    words = opcode.split(".")
    if words[0] != "mma" or "sync" not in words:
        return None
    mods = _Modifiers(opcode)
    if words[1].startswith("sp"):
        raise mods.error("sparse matrices are not modelled; use the dense mma.sync")
    mods.one("sync")
    mods.one("aligned")
    kind = mods.prefixed("kind::")
    block_scale = bool(mods.one("block_scale", required=False))
    vec = mods.prefixed("scale_vec::")
    saturate = bool(mods.one("satfinite", required=False))
    bit_op = mods.one("xor", "and", required=False)
    popc = bool(mods.one("popc", required=False))
    layouts = mods.take("row", "col")
    stype = mods.one("ue8m0", "ue4m3", required=False)
    types = mods.take(*_TYPES)
    shapes = [word for word in mods.left if _SHAPE.fullmatch(word)]
    unknown = [word for word in mods.left if not _SHAPE.fullmatch(word)]
    if unknown:
        raise mods.error(f"modifier .{unknown[0]} does not exist for mma.sync")
    if len(shapes) != 1 or len(types) != 4 or len(layouts) != 2:
        raise mods.error("needs one shape, two layouts and the four types of d, a, b and c")
    m, n, k = (int(size) for size in re.findall(r"\d+", shapes[0]))
    op = MmaOpcode(
        text=opcode,
        m=m,
        n=n,
        k=k,
        d_type=types[0],
        a_type=types[1],
        b_type=types[2],
        c_type=types[3],
        a_layout=layouts[0],
        b_layout=layouts[1],
        saturate=saturate,
        bit_op=bit_op,
        kind=kind,
        scale_type=stype,
        scale_vec=_scale_vec(mods, kind, vec),
    )
    _check(mods, op, shapes[0])
    _check_flags(mods, op, block_scale, popc)
    return op


def _scale_vec(mods: _Modifiers, kind: str, written: str) -> int:
    if not written:
        return _DEFAULT_VEC.get(kind, 0)
    if written not in ("1X", "2X", "4X"):
        raise mods.error(f"modifier .scale_vec::{written} does not exist; it is 1X, 2X or 4X")
    return int(written[0])


def _class(mods: _Modifiers, op: MmaOpcode) -> str:
    """The row of _CLASSES of the multiplicand types."""
    a, b = op.a_type, op.b_type
    if op.kind:
        allowed = F8F6F4 if op.in_containers else ("e2m1",)
        if op.kind not in _CLASSES or "f" not in op.kind:
            raise mods.error(f"modifier .kind::{op.kind} does not exist for mma.sync")
        if a in allowed and b in allowed:
            return op.kind
    elif a in F8 and b in F8:
        return "f8"
    elif a[0] in "su" and b[0] in "su" and a[1:] == b[1:] and a[1:] in _CLASSES:
        return a[1:]
    elif a == b and a in _CLASSES:
        return a
    kind = f" with .kind::{op.kind}" if op.kind else ""
    raise mods.error(f"types .{a} and .{b} of a and b do not go together{kind}")


def _check(mods: _Modifiers, op: MmaOpcode, shape: str) -> None:
    """Shape, types and layouts go together."""
    name = _class(mods, op)
    shapes, accumulators = _CLASSES[name]
    if shape not in shapes:
        raise mods.error(
            f"shape .{shape} does not exist for .{op.a_type}; use .{', .'.join(shapes)}"
        )
    if op.d_type not in accumulators or op.c_type not in accumulators:
        raise mods.error(
            f"types .{op.d_type} of d and .{op.c_type} of c do not go with .{op.a_type}; "
            f"use .{', .'.join(accumulators)}"
        )
    volta = shape == "m8n8k4" and name == "f16"
    if op.d_type != op.c_type and not (volta and op.d_type == "f32"):
        raise mods.error(f"types .{op.d_type} of d and .{op.c_type} of c must be the same")
    if (op.a_layout, op.b_layout) != ("row", "col") and not volta:
        raise mods.error(
            f"layouts .{op.a_layout}.{op.b_layout}: only .m8n8k4 with .f16 has others than .row.col"
        )


def _check_flags(mods: _Modifiers, op: MmaOpcode, block_scale: bool, popc: bool) -> None:
    """.satfinite, .xor.popc, .block_scale and the scales' type and size are where they may be."""
    if op.saturate and (op.d_type != "s32" or op.a_type == "b1"):
        raise mods.error(".satfinite is for the integer types only")
    if (op.a_type == "b1") != (bool(op.bit_op) and popc) or bool(op.bit_op) != popc:
        raise mods.error(".xor.popc or .and.popc is needed with .b1, and only there")
    scaled = op.kind.startswith("mx")
    if scaled != block_scale or scaled != bool(op.scale_type) or (op.scale_vec and not scaled):
        raise mods.error(
            ".block_scale, .scale_vec and a scale type go with .kind::mxf8f6f4, .kind::mxf4 and "
            ".kind::mxf4nvf4, and only with these"
        )
    legal = _SCALES.get((op.kind, op.scale_type), ())
    if scaled and not op.scale_vec:
        sizes = " or ".join(f".scale_vec::{size}X" for size in legal)
        raise mods.error(f".kind::{op.kind} with scale type .{op.scale_type} needs {sizes}")
    if scaled and op.scale_vec not in legal:
        raise mods.error(
            f".kind::{op.kind} with scale type .{op.scale_type} has no .scale_vec::{op.scale_vec}X "
            "(Table 36)"
        )
