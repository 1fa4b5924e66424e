"""Which opcodes exist: ours against ptxas, over the products of all shapes, types and modifiers."""

from __future__ import annotations

import itertools
import re

import pytest

from blockscale.emulator.errors import PtxError
from blockscale.emulator.mma.matrix import is_movmatrix, lookup_ldmatrix, lookup_stmatrix
from blockscale.emulator.mma.sync import lookup
from blockscale.emulator.mma.wgmma import parse_wgmma
from tests.emulator.kit import tools

pytestmark = tools.needs_ptxas
HEADER = """.version 9.0
.target {arch}
.address_size 64
.visible .entry kernel()
{{
.reg .b32 %r<260>; .reg .b16 %h<9>; .reg .b64 %rd<9>; .reg .f32 %f<260>; .reg .f64 %fd<40>;
.reg .pred %p<2>; .shared .align 128 .b8 sm[4096];
"""
F8F6F4 = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
# Forms that ptxas 13.0 takes although no section of the manual has them, nor their fragments.
UNDOCUMENTED = {
    "mma.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32",
    "mma.sync.aligned.m8n8k4.row.col.f32.bf16.bf16.f32",
}
REGISTER = {"b32": "%r", "s32": "%r", "f32": "%f", "f64": "%fd"}


def accepted(arch, instructions):
    """The instructions that ptxas takes, by position: list of bool."""
    bad = tools.refused(HEADER.format(arch=arch), instructions, arch)
    return [i not in bad for i in range(len(instructions))]


def group(kind, number, start=0):
    registers = (f"{REGISTER[kind]}{start + i}" for i in range(number))
    return "{" + ", ".join(registers) + "}"


def ours(function, opcode):
    """What the package makes of an opcode: None if it rejects it."""
    try:
        return function(opcode)
    except PtxError:
        return None


def mma_text(opcode, op):
    """One instruction with the operands that we believe in."""
    text = ", ".join(
        [
            group(op.d_kind, op.d),
            group(op.ab_kind, op.a, 8),
            group(op.ab_kind, op.b, 20),
            group(op.c_kind, op.c, 30),
        ]
    )
    return f"{opcode} {text}" + (", %r1, {0, 1}, %r2, {0, 3};" if op.scales else ";")


def compare(function, text, opcodes, arch):
    """Every opcode that we take assembles with our operands; returns those that we do not take."""
    parsed = [(opcode, ours(function, opcode)) for opcode in opcodes]
    good = [(opcode, op) for opcode, op in parsed if op]
    result = accepted(arch, [text(opcode, op) for opcode, op in good])
    assert [opcode for (opcode, _), ok in zip(good, result, strict=True) if not ok] == []
    return [opcode for opcode, op in parsed if not op]


def rejected(opcodes, operands, arch):
    """The opcodes that assemble with any of the operands: to be none but undocumented ones."""
    found = set()
    for operand in operands:
        result = accepted(arch, [f"{opcode} {operand};" for opcode in opcodes])
        found |= {opcode for opcode, ok in zip(opcodes, result, strict=True) if ok}
    return found


def mma_operands(scaled):
    """Operand lists of every size and kind that some mma has."""
    tail = ", %r1, {0, 0}, %r2, {0, 0}" if scaled else ""
    kinds = [("b32", "b32"), ("f32", "f32"), ("s32", "s32"), ("f64", "f64"), ("f32", "b32")]
    sizes = [(4, 4, 2, 4), (2, 1, 1, 2), (4, 2, 1, 4), (2, 4, 2, 2), (2, 2, 1, 2), (8, 2, 2, 8)]
    sizes += [(4, 8, 4, 4), (8, 2, 2, 4), (4, 2, 2, 4), (4, 2, 2, 8)]
    for (d_kind, c_kind), (d, a, b, c) in itertools.product(kinds, sizes):
        ab = "f64" if d_kind == "f64" else "b32"
        yield (
            f"{group(d_kind, d)}, {group(ab, a, 8)}, {group(ab, b, 20)}, "
            f"{group(c_kind, c, 30)}{tail}"
        )


def mma_opcodes():
    shapes = [f"m{m}n8k{k}" for m in (8, 16) for k in (4, 8, 16, 32, 64, 128, 256)]
    for shape, kind in itertools.product(
        shapes, ("f16", "bf16", "tf32", "e4m3", "f64", "s8", "u4", "b1")
    ):
        for d in ("f16", "f32", "f64", "s32"):
            tail = ".xor.popc" if kind == "b1" else ""
            yield f"mma.sync.aligned.{shape}.row.col.{d}.{kind}.{kind}.{d}{tail}"
    for a, b in itertools.product(("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m1", "s8"), repeat=2):
        yield f"mma.sync.aligned.m16n8k16.row.col.f32.{a}.{b}.f32"
    for a, b, sat in itertools.product(*[("s8", "u8", "s4", "u4")] * 2, ("", ".satfinite")):
        yield f"mma.sync.aligned.m16n8k32.row.col{sat}.s32.{a}.{b}.s32"
    for d, c, left, right in itertools.product(*[("f16", "f32")] * 2, *[("row", "col")] * 2):
        for shape in ("m8n8k4", "m16n8k8", "m16n8k16"):
            yield f"mma.sync.aligned.{shape}.{left}.{right}.{d}.f16.f16.{c}"
        yield f"mma.sync.aligned.m16n8k32.{left}.{right}.{d}.e4m3.e5m2.{c}"
    yield "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32"
    yield "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32"
    yield "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc"
    yield "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32.xor.popc"


@pytest.mark.always
def test_mma_of_all_architectures():
    opcodes = list(dict.fromkeys(mma_opcodes()))
    others = compare(lookup, mma_text, opcodes, "sm_90a")
    assert len(others) > 150
    assert rejected(others, mma_operands(False), "sm_90a") == UNDOCUMENTED


def scaled_opcodes():
    """.kind::f8f6f4 and the block-scaled kinds, right and wrong."""
    for d, a, b, k in itertools.product(("f16", "f32"), F8F6F4, F8F6F4, (16, 32)):
        yield f"mma.sync.aligned.kind::f8f6f4.m16n8k{k}.row.col.{d}.{a}.{b}.{d}"
    kinds = ("mxf8f6f4", "mxf4", "mxf4nvf4")
    vectors = ("", ".scale_vec::1X", ".scale_vec::2X", ".scale_vec::4X")
    for kind, vec, a, k, stype in itertools.product(
        kinds, vectors, ("e4m3", "e2m1"), (32, 64), (".ue8m0", ".ue4m3", "")
    ):
        # Newer than ptxas 13.0: .kind::mxf4nvf4 with .ue8m0 and .scale_vec::4X (Table 36).
        if (kind, vec, stype, a, k) == ("mxf4nvf4", ".scale_vec::4X", ".ue8m0", "e2m1", 64):
            continue
        tail = f"m16n8k{k}.row.col.f32.{a}.{a}.f32{stype}"
        yield f"mma.sync.aligned.kind::{kind}.block_scale{vec}.{tail}"
    yield "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32"
    yield "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
    yield "mma.sync.aligned.m16n8k32.row.col.block_scale.f32.e4m3.e4m3.f32.ue8m0"


@pytest.mark.always
def test_mma_of_sm_120a():
    opcodes = list(scaled_opcodes())
    others = compare(lookup, mma_text, opcodes, "sm_120a")
    operands = [*mma_operands(False), *mma_operands(True)]
    found = rejected(others, operands, "sm_120a")
    # Undocumented: the manual has .kind::f8f6f4 with .m16n8k32 only.
    assert {opcode for opcode in found if "kind::f8f6f4.m16n8k16" not in opcode} == set()


def matrix_opcodes(name):
    shapes = ("m8n8", "m8n16", "m16n16") if name == "ldmatrix" else ("m8n8", "m16n8")
    types = ("b16", "b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64") if name == "ldmatrix" else None
    for shape, number, trans, space, kind in itertools.product(
        shapes, (1, 2, 4), ("", ".trans"), ("", ".shared", ".shared::cta"), types or ("b16", "b8")
    ):
        yield f"{name}.sync.aligned.{shape}.x{number}{trans}{space}.{kind}"


@pytest.mark.parametrize(
    ("name", "function"), [("ldmatrix", lookup_ldmatrix), ("stmatrix", lookup_stmatrix)]
)
def test_matrix_opcodes(name, function):
    def text(opcode, registers):
        operands = [group("b32", registers), "[sm]"]
        return f"{opcode} {', '.join(operands if name == 'ldmatrix' else operands[::-1])};"

    opcodes = list(matrix_opcodes(name))
    parsed = {opcode: ours(function, opcode) for opcode in opcodes}
    good = [opcode for opcode, op in parsed.items() if op]
    texts = [text(opcode, parsed[opcode].registers) for opcode in good]
    assert all(accepted("sm_100a", texts))
    bad = [opcode for opcode, op in parsed.items() if not op]
    for registers in (1, 2, 4):
        result = accepted("sm_100a", [text(opcode, registers) for opcode in bad])
        assert [opcode for opcode, ok in zip(bad, result, strict=True) if ok] == []


def test_movmatrix():
    opcode = "movmatrix.sync.aligned.m8n8.trans.b16"
    assert accepted("sm_90a", [f"{opcode} %r0, %r1;"]) == [True]
    assert is_movmatrix(opcode)


def wgmma_text(opcode, op, in_registers):
    a = group("b32", 4, 200) if in_registers else "%rd0"
    values = {"imm-scale-a": "-1", "imm-scale-b": "1", "imm-trans-a": "1", "imm-trans-b": "0"}
    immediates = "".join(f", {values[name]}" for name in op.immediates(in_registers))
    return f"{opcode} {group(op.d_kind, op.d)}, {a}, %rd1, %p0{immediates};"


def wgmma_opcodes():
    types = ("f16", "bf16", "tf32", "e4m3", "s8", "u8", "b1")
    for a, k, d in itertools.product(types, (8, 16, 32, 256), ("f16", "f32", "s32")):
        tail = ".and.popc" if a == "b1" else ""
        yield f"wgmma.mma_async.sync.aligned.m64n64k{k}.{d}.{a}.{a}{tail}"
    for a, b in itertools.product((*types[:4], "e5m2", *types[4:6]), repeat=2):
        for k, d in ((16, "f32"), (8, "f32"), (32, "f32"), (32, "s32")):
            yield f"wgmma.mma_async.sync.aligned.m64n8k{k}.{d}.{a}.{b}"
    for n in range(4, 269, 4):
        yield f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
        yield f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.u8"
        yield f"wgmma.mma_async.sync.aligned.m64n{n}k256.s32.b1.b1.and.popc"
    yield "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.u8.satfinite"
    yield "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3.satfinite"


@pytest.mark.always
def test_wgmma():
    opcodes = list(dict.fromkeys(wgmma_opcodes()))
    for in_registers in (False, True):
        others = compare(
            parse_wgmma,
            lambda opcode, op, r=in_registers: wgmma_text(opcode, op, r),
            opcodes,
            "sm_90a",
        )
    known_n = [o for o in others if int(re.search(r"n(\d+)k", o)[1]) in (8, 16, 64)]
    operands = [
        f"{group(kind, number)}, %rd0, %rd1, %p0{tail}"
        for kind, number in itertools.product(("f32", "b32"), (2, 4, 8, 16, 32))
        for tail in ("", ", 1, 1", ", 1, 1, 0, 0")
    ]
    assert rejected(known_n, operands, "sm_90a") == set()
