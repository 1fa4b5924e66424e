"""PTX text to the syntax tree: every directive and operand form, scopes, calls, syntax errors."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from blockscale import emulator
from blockscale.emulator.errors import PtxError
from blockscale.emulator.launching.link import link
from blockscale.emulator.ptx.lexer import number, tokens
from blockscale.emulator.ptx.parser import parse
from blockscale.emulator.ptx.syntax import (
    Group,
    Imm,
    Instr,
    Label,
    Mem,
    Not,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
    Vec,
)
from tests.emulator import kit

HEAD = ".version 8.6\n.target sm_100a, debug\n.address_size 64\n"


def kernel(body, module="", directives=""):
    return parse(f"{HEAD}{module}.visible .entry k(.param .u64 p) {directives}\n{{\n{body}\n}}\n")


def one(text):
    """Return the only instruction of a kernel whose registers are %p<4>, %r<8>, %d<8>."""
    module = kernel(f".reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<8>; {text}")
    (ins,) = module.functions["k"].body
    return ins


def variable(text, name="x"):
    return parse(f"{HEAD}{text};").variables[name]


# tokens ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", (0, "int")),
        ("42", (42, "int")),
        ("42U", (42, "int")),
        ("017", (15, "int")),
        ("0x1F", (31, "int")),
        ("0XffU", (255, "int")),
        ("0b101", (5, "int")),
        ("0f3F800000", (0x3F800000, "f32")),
        ("0F3f800000", (0x3F800000, "f32")),
        ("0d3FF0000000000000", (0x3FF0000000000000, "f64")),
        ("1.5", (1.5, "dec")),
        ("1.", (1.0, "dec")),
        ("2e3", (2000.0, "dec")),
        ("1.5E-1", (0.15, "dec")),
    ],
)
def test_literals(text, value):
    """Each form of literal is one token with its value (PTX ISA 4.5)."""
    assert [t.kind for t in tokens(text)] == ["number", "end"]
    assert number(text) == value


def test_comments_and_debug_lines_keep_line_numbers():
    """Comments vanish, .loc and .file end with their line, and lines count on."""
    text = '// a\n/* b\n c */ x\n.loc 1 2 3, function_name $L, inlined_at 1 4 5\n"s;" y'
    assert [(t.text, t.line) for t in tokens(text)[:-1]] == [("x", 3), ('"s;"', 5), ("y", 5)]


def test_names_and_directives():
    """Dots and double colons belong to opcodes, modifiers and special registers."""
    text = "tcgen05.mma.cta_group::1.kind::f16 %tid.x $L__BB0_1 _Z3foo .shared::cta a"
    kinds = [(t.kind, t.text) for t in tokens(text)[:-1]]
    assert kinds == [
        ("name", "tcgen05.mma.cta_group::1.kind::f16"),
        ("name", "%tid.x"),
        ("name", "$L__BB0_1"),
        ("name", "_Z3foo"),
        ("directive", ".shared::cta"),
        ("name", "a"),
    ]


# operands -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("%r1", Reg("%r1")),
        ("%tid.x", Special("%tid.x")),
        ("%envreg3", Special("%envreg3")),
        ("WARP_SZ", Special("WARP_SZ")),
        ("-7", Imm(-7)),
        ("+7", Imm(7)),
        ("~0", Imm(-1)),
        ("-0f3F800000", Imm(0xBF800000, "f32")),
        ("-0d3FF0000000000000", Imm(0xBFF0000000000000, "f64")),
        ("-1.5", Imm(-1.5, "dec")),
        ("_", Sink()),
        ("!%p1", Not(Reg("%p1"))),
        ("%r1|%p1", Pair(Reg("%r1"), Reg("%p1"))),
        ("{%r1, _, 3}", Vec((Reg("%r1"), Sink(), Imm(3)))),
        ("p", Sym("p")),
        ("p+8", Sym("p", 8)),
        ("p-8+2", Sym("p", -6)),
        ("[%d1]", Mem(Reg("%d1"))),
        ("[%d1+16]", Mem(Reg("%d1"), 16)),
        ("[%d1+-16]", Mem(Reg("%d1"), -16)),
        ("[%d1-0x10]", Mem(Reg("%d1"), -16)),
        ("[p+4]", Mem(Sym("p", 4))),
        ("[1024]", Mem(Imm(1024))),
        ("[%d1, {%r1, %r2}]", Mem(Reg("%d1"), 0, (Vec((Reg("%r1"), Reg("%r2"))),))),
        ("(%r1, %r2)", Group((Reg("%r1"), Reg("%r2")))),
    ],
)
def test_operands(text, operand):
    """Each form of operand (PTX ISA 6.4)."""
    assert one(f"op.b32 {text};").operands == (operand,)


def test_instruction():
    """Guards, opcodes with modifiers, several operands, the line."""
    ins = one("\n@!%p2 setp.lt.and.s32 %p1|%p0, %r1, -2, !%p3;")
    assert (ins.base, ins.mods) == ("setp", ["lt", "and", "s32"])
    assert ins.guard == (Reg("%p2"), True)
    assert len(ins.operands) == 4
    assert ins.line == 7
    assert one("bar.warp.sync 0xffffffff;").guard is None
    assert one("ret;").operands == ()


# directives -----------------------------------------------------------------------------------
def test_module_directives():
    """What stands around functions is read or skipped."""
    module = parse(
        HEAD
        + """
.pragma "nounroll";
.section .debug_str { .b8 1, 2 L: .b8 "x" { } }
.alias a, b;
;
.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);
.weak .func f() { ret; }
.visible .func f2(.param .b32 x)
.noreturn
{ ret; }
.visible .entry k()
.maxntid 128, 2, 1
.reqntid 64
.minnctapersm 2
.reqnctapercluster 2, 1, 1
.explicitcluster
{ .pragma "nounroll"; ret; }
"""
    )
    assert (module.version, module.target) == ("8.6", "sm_100a")
    assert set(module.functions) == {"vprintf", "f", "f2", "k"}
    k = module.entry()
    assert k.directives[".maxntid"] == [128, 2, 1]
    assert k.directives[".reqntid"] == [64]
    assert k.directives[".reqnctapercluster"] == [2, 1, 1]
    assert k.directives[".explicitcluster"] == []
    assert module.entry("k") is k
    with pytest.raises(PtxError, match=r"no kernel named 'f'; its kernels: k; pass entry="):
        module.entry("f")


def test_a_declaration_does_not_replace_a_definition():
    text = ".func f(.param .b32 x); .func f(.param .b32 x) { ret; } .func f(.param .b32 x);"
    assert parse(HEAD + text).functions["f"].body


def test_parameters():
    """Alignment and bytes of parameters; .align behind .ptr is about what is pointed to."""
    text = (
        ".param .u64 .ptr .global .align 16 a, .param .align 64 .b8 m[128], .param .u8 c,"
        ".param .align 16 .b32 v[4], .param .f64 d"
    )
    module = parse(f"{HEAD}.entry k({text}) {{ ret; }}")
    sizes = [(p.name, p.size, p.align) for p in module.entry().params]
    assert sizes == [("a", 8, 8), ("m", 128, 64), ("c", 1, 1), ("v", 16, 16), ("d", 8, 8)]
    program = link(module, None)
    assert program.param_offsets == [0, 64, 192, 208, 224]
    assert program.param_bytes == 232


def test_variables():
    """Sizes and alignment of variables, extern ones, vectors, several in one statement."""
    x = variable(".visible .global .align 16 .b8 x[24]")
    assert (x.space, x.size, x.align, x.init, x.extern) == ("global", 24, 16, None, False)
    assert variable(".extern .shared .align 1024 .b8 x[]").size == 0
    assert variable(".extern .shared .b8 x[]").extern
    x = variable(".global .v4 .f32 x[2]")
    assert (x.size, x.align) == (32, 16)
    assert variable(".const .s16 x[2][3]").size == 12
    assert variable(".global .attribute(.managed) .u32 x").size == 4
    assert variable(".shared .b32 y, x[3]").size == 12


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (".s32 x = -2", struct.pack("<i", -2)),
        (".u8 x[4] = {1, 0x10, 010}", bytes([1, 16, 8, 0])),
        (".f32 x = 0f3F800000", struct.pack("<f", 1.0)),
        (".f32 x = 0d3FF8000000000000", struct.pack("<f", 1.5)),
        (".f32 x[2] = {1.5, 2}", struct.pack("<2f", 1.5, 2.0)),
        (".f64 x = 0f3FC00000", struct.pack("<d", 1.5)),
        (".b16 x[] = {1, 2, 3}", struct.pack("<3H", 1, 2, 3)),
        (".s32 x[][2] = {{-1, 0}, {5}, {7, 8}}", struct.pack("<6i", -1, 0, 5, 0, 7, 8)),
        (".s32 x[2][2] = {1, 2, 3}", struct.pack("<4i", 1, 2, 3, 0)),
        (".v2 .u16 x[] = {{1, 2}, {3}}", struct.pack("<4H", 1, 2, 3, 0)),
    ],
)
def test_initial_values(text, data):
    """Initial values become bytes, missing ones zeros (PTX ISA 5.4.4)."""
    x = variable(f".global {text}")
    assert x.init == data
    assert x.size == len(data)


def test_initial_addresses_are_filled_in_at_launch():
    """Addresses among initial values: variables plus bytes, generic() too (PTX ISA 5.4.4)."""
    x = variable(".global .u32 y[4]; .global .u64 x[4] = {y, y+4, generic(y)+8, 7}")
    assert x.pointers == ((0, Sym("y")), (8, Sym("y", 4)), (16, Sym("y", 8)))
    module = ".global .u32 y[4] = {10, 20, 30, 40};\n.global .u64 x[3] = {y, y+4, generic(y)+8};"
    body = """
        mov.u64 %d0, x;  mov.u32 %r1, 0;
        ld.global.u64 %d1, [%d0+16];  ld.u32 %r1, [%d1+4];
        st.global.u32 [%o], %r1;"""
    assert (kit.values(body, module=module) == 40).all()


# scopes ---------------------------------------------------------------------------------------
def test_nested_scopes_reuse_names():
    """Inline assembly brings scopes whose registers and labels repeat; branches may come first."""
    block = """
        {
            .reg .pred p; .reg .b32 r;
            mov.u32 r, {0};
        LOOP:
            add.u32 %r1, %r1, r;
            add.u32 r, r, -1;
            setp.ne.u32 p, r, 0;
            @p bra LOOP;
            bra.uni DONE;
            trap;
        DONE:
        }"""
    body = "mov.u32 %r1, 100;\nLOOP:" + block.replace("{0}", "3") + block.replace("{0}", "4")
    assert (kit.values(body + "\nst.global.u32 [%o], %r1;") == 116).all()
    module = kernel(".reg .b32 a; { .reg .b32 a; mov.b32 a, 1; L: bra L; } L: mov.b32 a, 2;")
    inner, label, branch, outer, last = module.functions["k"].body
    assert inner.operands[0] == Reg("a@1")
    assert branch.operands[0] == Sym("L@1")
    assert (label, outer) == (Label("L@1", 6), Label("L", 6))
    assert last.operands[0] == Reg("a")


def test_branch_targets():
    """brx.idx goes where its table says, lanes apart (PTX ISA 9.7.12.3)."""
    body = """
        and.b32 %r0, %x, 3;
        brx.idx %r0, TABLE;
        TABLE: .branchtargets A, B, C, A;
        A: mov.u32 %r1, 10; bra D;
        B: mov.u32 %r1, 11; bra D;
        C: mov.u32 %r1, 12;
        D: st.global.u32 [%o], %r1;"""
    for seed in range(5):
        got = kit.values(body, seed=seed, block=64, count=64)
        assert (got == np.array([10, 11, 12, 10] * 16)).all()
    with pytest.raises(emulator.IllegalOperation, match=r"index 7 and 4 targets .*9\.7\.12\.3"):
        kit.values(body.replace("%x, 3", "%x, 7"))


def test_variables_of_functions_do_not_collide():
    """Two functions may have static variables of one name."""
    one_of = ".func (.reg .b32 r) {0}() {{ .global .u32 n = {1}; ld.global.u32 r, [n]; ret; }}\n"
    module = one_of.format("f", 5) + one_of.format("g", 6)
    body = "call (%r1), f; call (%r2), g, (); sub.u32 %r1, %r2, %r1; st.global.u32 [%o], %r1;"
    assert (kit.values(body, module=module) == 1).all()


# errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n`", r"^line 5: '`' is not PTX; pass the text that nvcc"),
        ("\n\n.foo 1;", r"^line 6: '\.foo' is not a directive of a PTX module"),
        (".address_size 32", "only .address_size 64 is modelled"),
        (".global x;", "a variable without a type"),
        (".global .b48 x;", r"\.b48 is not a type or attribute of a variable"),
        (".global .align y .b8 x;", "'y' where PTX wants a number"),
        (".global .align 1.5 .b8 x;", "1.5 where PTX wants an integer"),
        (".global .b8 x[2] = {1, 2, 3};", "3 initial values for 2 elements"),
        (".global .b32 x = {1 2};", "'2' where PTX wants ','"),
        (".global .b32 x = {{[1]}};", "an initial value that is neither a number nor an address"),
        (".entry k(.param x) { ret; }", "a parameter without a type"),
        (".entry k(.const .b32 x) { ret; }", r"'\.const' where PTX wants '\.param'"),
        (".entry k() { ret;", r"^kernel k, line 4: the text ends inside a function"),
        (".entry k() { ret }", r"kernel k, line 4: '}' where PTX wants"),
        (".entry k() { add.u32 a b; }", r"'b' where PTX wants ';'"),
        (".entry k() { ld.b32 a, [b; }", r"';' where PTX wants '\]'"),
        (".entry k() { mov.b32 a, x[1]; }", r"x\[\.\.\.\] is not modelled as an operand; write"),
        (".entry k() { 7; }", "'7' where PTX wants a statement"),
        (".entry k() { .reg .v4 .f32 a; }", r"registers of type \.v4 are not modelled"),
        (".entry k() { .weird 3; }", r"'\.weird' is not a directive that a function may hold"),
        (".entry k() { @%p bra L; L: ret; }", r"line 4, bra: the guard %p is not declared"),
        (".entry k() { .reg .b32 r; @r exit; }", r"line 4, exit: the guard r is not a predicate"),
        (".entry k() { bra L; }", r"line 4, bra: the branch names L, which is no label of k"),
        (".entry k() { .reg .b32 r; brx.idx r, T; }", r"T \(\.branchtargets\), which is no label"),
        (".global .attribute(.managed", "the text ends in the middle of a statement"),
        (".section .debug {", "the text ends in the middle of a statement"),
        (".pragma", "the text ends in the middle of a statement"),
    ],
)
def test_syntax_errors_name_line_and_rule(text, sentence):
    """Whatever is wrong with a text, a PtxError says where and what PTX wants."""
    with pytest.raises(PtxError, match=sentence):
        link(parse(HEAD + text), "k")


MODULE = """
.global .align 8 .b8 x[4] = {1, 2, 3, 4};
.func (.param .b32 out) f(.param .b32 a)
{ .reg .b32 %r<2>; ld.param.b32 %r1, [a]; { L: bra.uni L; } st.param.b32 [out+0], %r1; ret; }
"""


def test_every_truncation_of_a_kernel_is_a_syntax_error():
    """Half a file is never read as a whole one, and never crashes the parser."""
    text = kit.ptx("st.global.u32 [%o], %t;", [kit.words(1)], module=MODULE).rstrip()
    at = text.index(".global")
    for end in range(at + 1, len(text), 3):
        try:
            parse.__wrapped__(text[:end]).entry()
        except PtxError:
            continue
        pytest.fail(f"{text[end - 20 : end]!r} ends a module")


def test_instr_is_found_by_the_line_of_the_original_text():
    """Errors at run time name the line of the caller's text."""
    text = kit.ptx("\n\nst.global.u32 [%o+4096], %t;", [kit.words(1)])
    line = 1 + text[: text.index("st.global")].count("\n")
    with pytest.raises(emulator.IllegalOperation) as caught:
        kit.run("\n\nst.global.u32 [%o+4096], %t;", kit.words(32))
    assert caught.value.place.line == line
    assert isinstance(parse(text).entry().body[-2], Instr)
