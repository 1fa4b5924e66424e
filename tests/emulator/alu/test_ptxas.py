"""The opcodes that the emulator knows are those that ptxas assembles for sm_100a, and no others."""

import re

import pytest

from blockscale.emulator.alu import forms, lookup
from blockscale.emulator.errors import PtxError
from tests.emulator.kit import tools

REGISTER = {"?": "p", "1": "rh", "2": "rh", "4": "r", "8": "rd"}
HEAD = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry k() {
.reg .pred %p<9>; .reg .b8 %rb<9>; .reg .b16 %rh<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
"""


def line(opcode, alu):
    """An instruction with registers of the operands' widths."""
    names = []
    for index, dtype in enumerate([*alu.outs, *alu.ins]):
        kind = REGISTER[dtype[-1]]
        if dtype in ("u1", "i1") and ("e2m1" in opcode or "bf16" in opcode):
            kind = "rb"  # no wider register there
        names.append(f"%{kind}{index % 9}")
    outs, ins = names[: len(alu.outs)], names[len(alu.outs) :]
    if opcode.startswith("lop3"):
        ins[3] = "0x1b"
    if "x4.f32" in opcode:
        ins = ["{" + ", ".join(ins[:4]) + "}", ins[4]]
    return f"{opcode} {'|'.join(outs)}, {', '.join(ins)};"


def refused(lines):
    """The indices of the lines that ptxas rejects."""
    return tools.refused(HEAD, lines, "sm_100a", "-O0")


def every_opcode():
    """All spellings of all forms that ptxas 13.0 (PTX ISA 9.0) knows, with their functions."""
    for form in forms():
        if form.isa > 9.0:
            continue
        for opcode in form.spellings():
            for n_dst in form.n_dst:
                yield opcode, lookup(opcode, n_dst, form.n_src)


def test_every_opcode_assembles():
    lines = [line(opcode, alu) for opcode, alu in every_opcode()]
    assert len(lines) > 6000
    assert [lines[i] for i in sorted(refused(lines))] == []


WRONG = """
add.ftz.s32 add.sat.u64 add.rn.s32 add.hi.s32 add.ftz.f64 add.sat.f64 add.sat.f32x2 add.b32 add.u8
add.f32.f16x2 add.rn.rz.f32 add.relu.f16 add.ftz.bf16 add.sat.bf16 add.rz.f16 add.wide.s32
sub.sat.u32 sub.u16x2 mul.u32 mul.wide.u64 mul.f32x4 mul.lo.f32 mul.sat.s32 mad.lo.sat.s32 mad.f32
mad.hi.sat.u32 fma.f32 fma.rn.s32 fma.rn.sat.f64 fma.rn.sat.relu.f16 fma.rn.sat.bf16 fma.rna.f32
div.f32 div.approx.f64 div.full.rn.f32 div.rn.sat.f32 div.hi.s32 rem.f32 abs.u32 abs.b32 neg.u32
min.b32 min.sat.s32 min.relu.u32 min.relu.f32 min.ftz.f64 min.NaN.f64 min.NaN.s32 max.xorsign.f32
rcp.f32 rcp.approx.f64 sqrt.f32 sqrt.approx.f64 rsqrt.f32 rsqrt.rn.f32 sin.f32 sin.approx.f64
ex2.f32 ex2.approx.bf16 lg2.approx.f16 tanh.approx.f64 tanh.approx.ftz.f32
popc.u32 clz.s32 bfind.b32 brev.u32 bfe.b32 bfi.u32 bmsk.b32 szext.u32 fns.u32 dp4a.u32 dp2a.u32.u32
and.s32 or.f32 xor.u32 not.s32 cnot.pred lop3.u32 lop3.xor.b32 shl.s32 shl.u32 shr.f32 shf.l.b32
shf.wrap.b32 shf.l.wrap.b64 prmt.b64 prmt.b32.b4f selp.pred selp.b8 slct.b32.u32 slct.ftz.b32.s32
setp.s32 setp.lo.s32 setp.lt.b32 setp.equ.s32 setp.ftz.lt.f64 setp.lt.nand.s32 setp.lt.pred
set.lt.s32 set.lt.f16.f32 set.lt.u64.s32 set.ftz.lt.u32.s32 mov.b8 mov.f16 testp.f16 copysign.f16
cvt.f32 cvt.f32.f64 cvt.f32.s32 cvt.s32.f32 cvt.rn.s32.f32 cvt.rni.f32.s32 cvt.rn.s32.s64
cvt.sat.s64.s32 cvt.rn.f32.f16 cvt.rna.f32.f64 cvt.rn.relu.f32.f64 cvt.rm.f16x2.f32 cvt.ftz.s32.f64
cvt.rn.sat.bf16.f32 cvt.rn.e4m3x2.f32 cvt.rz.satfinite.e4m3x2.f32 cvt.rn.satfinite.e4m3.f32
cvt.rn.satfinite.e2m1x2.f16 cvt.satfinite.e2m1x2.f32 cvt.rn.satfinite.f16x2.e4m3x2
cvt.rn.satfinite.ue8m0x2.f32 cvt.rz.relu.ue8m0x2.f32 cvt.rz.bf16x2.ue8m0x2 cvt.rn.ue8m0x2.bf16x2
cvt.rna.relu.tf32.f32 cvt.rm.tf32.f32 cvt.rs.f16.f32 cvt.rs.e2m1x4.f32 cvt.rn.satfinite.e2m1x4.f32
cvt.pack.u8.s32.b32 cvt.pack.sat.u8.s32 cvt.pack.sat.u16.u32
"""


SOURCES = {
    1: "abs neg rcp sqrt rsqrt sin ex2 lg2 tanh popc clz bfind brev not cnot mov testp",
    3: "mad fma bfe fns shf prmt",
    4: "bfi lop3",
}


def wrong_line(opcode):
    """The opcode with as many registers as a right one of its name has."""
    base = opcode.split(".")[0]
    count = next((n for n, names in SOURCES.items() if base in names.split()), 2)
    out = "%p0" if base in ("setp", "testp") else "%r0"
    return f"{opcode} {out}, " + ", ".join(f"%r{i + 1}" for i in range(count)) + ";"


def test_what_ptxas_rejects_is_rejected():
    opcodes = WRONG.split()
    rejected = refused([wrong_line(opcode) for opcode in opcodes])
    assert [opcode for i, opcode in enumerate(opcodes) if i not in rejected] == []
    for opcode in opcodes:
        with pytest.raises(PtxError, match=re.escape(opcode)):
            lookup(opcode)


@pytest.mark.parametrize(
    ("opcode", "sentence"),
    [
        (
            "add.ftz.s32",
            r"add\.ftz\.s32: the modifier \.ftz does not exist in this form; use a form of add",
        ),
        ("fma.f32", r"fma\.f32: one of \.rn, \.rz, \.rm, \.rp is mandatory"),
        ("add.rn.rz.f32", r"the modifiers \.rn and \.rz exclude each other"),
        ("cvt.rn.f32", r"cvt has no form with the types f32; use one that PTX ISA"),
        ("add", r"add: add has no form with the types \(none\)"),
    ],
)
def test_errors_name_the_modifier(opcode, sentence):
    with pytest.raises(PtxError, match=sentence):
        lookup(opcode)


def test_operand_counts():
    assert lookup("min.f32", 1, 3).ins == ("f4",) * 3
    assert lookup("min.f32").ins == ("f4",) * 2
    assert lookup("setp.lt.f32", 2).outs == ("?", "?")
    with pytest.raises(PtxError, match="2 destination"):
        lookup("add.s32", 2)
    with pytest.raises(PtxError, match="3 source operands"):
        lookup("min.s32", 1, 3)


@pytest.mark.parametrize(
    "opcode", ["ld.global.b32", "bra", "shfl.sync.idx.b32", "cvta.to.global.u64", "tcgen05.ld"]
)
def test_other_instructions_are_not_ours(opcode):
    assert lookup(opcode) is None


def test_modifiers_in_any_order():
    """As in ptxas: before, after and among the types."""
    assert lookup("cvt.f64.bf16.rp").ins == ("u2",)
    assert lookup("add.f32.ftz.rn").ins == ("f4", "f4")
    assert lookup("cvt.satfinite.relu.rn.e2m1x2.f32").outs == ("u1",)
