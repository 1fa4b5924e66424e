"""What a short text could ask for without end is refused, with the line and the limit."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from blockscale.emulator.launching import link
from blockscale.emulator.machine import state
from blockscale.emulator.ptx import lexer, parser, program, reader
from tests.emulator import kit

DEEP = 5000
CALLS = ".func f40 { ret; } " + "".join(
    f".func f{i} {{ {f'call f{i + 1}; ' * 2} ret; }} " for i in reversed(range(40))
)
CHAIN = ".func f99 { ret; } " + "".join(
    f".func f{i} {{ call f{i + 1}; ret; }} " for i in reversed(range(99))
)
TEXTS = {
    "registers": (".reg .b32 %many<2000000000>;", "", "more than 262144 registers"),
    "braces": ("{" * DEEP + "}" * DEEP, "", "nest deeper than the 64 levels"),
    "labels": ("{ M: " * DEEP + "}" * DEEP, "", "nest deeper"),
    "vectors": ("mov.b32 " + "{" * DEEP + "}" * DEEP + ";", "", "nest deeper"),
    "addresses": ("ld.b32 %r1, " + "[" * DEEP + ";", "", "nest deeper"),
    "nots": ("mov.pred %p1, " + "!" * DEEP + "%p1;", "", "'!' where PTX wants a name"),
    "pairs": ("mov.b32 " + "%r1|" * DEEP + ";", "", "where PTX wants"),
    "initial": ("", ".global .b32 x[1] = " + "{" * DEEP + "}" * DEEP + ";", "nest deeper"),
    "local": (".local .b8 x[100000000000];", "", "a .local variable has 524288"),
    "locals": (".local .b8 x[400000], y[400000];", "", "bytes of .local variables; 524288"),
    "param": (".param .b8 x[100000000000];", "", "a .param variable has 32764"),
    "const": ("", ".const .b8 x[65537];", "a .const variable has 65536"),
    "global": ("", ".global .b8 x[100000000000];", "emulator holds 67108864"),
    "globals": ("", ".global .b8 x[60000000], y[60000000];", "are 120000000 so far"),
    "filled": ("", ".global .b32 x[100000000000] = {1};", "emulator holds"),
    "dimensions": ("", ".global .b8 x" + "[9]" * DEEP + ";", "more than 64 dimensions"),
    "align": ("", ".global .align 100000000000 .b8 x[1];", "power of two up to 65536"),
    "align 3": ("", ".global .align 3 .b8 x[1];", "power of two"),
    "shared": ("", ".shared .b32 x = 1;", ".shared variables have no initial value"),
    "integer": ("", f".global .b8 x[{'9' * 10_000}];", "is no number of PTX"),
    "65 bits": ("mov.b64 %d1, 18446744073709551616;", "", "more than 64 bits"),
    "octal": ("mov.b32 %r1, 08;", "", "08 is no number of PTX"),
    "float": ("mov.f64 %d1, 1e999;", "", "beyond the range of .f64"),
    "single": ("mov.f32 %r1, 1e39;", "", "beyond the range of .f32"),
    "calls": ("call f0;", CALLS, "instructions where f40 is expanded in place, more than the"),
    "chain": ("call f0;", CHAIN, "calls that nest where f63 is expanded"),
    "name": ("mov.b32" * 5000 + " %r1, 1;", "", "a name of 35000 characters; the emulator reads"),
    "comment": ("/* " * 300_000, "", "the comment that begins with /\\* has no end"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_without_end_is_refused(name, monkeypatch):
    monkeypatch.setattr(link, "MAX_INSTRUCTIONS", 1 << 12)  # so many are not made in every test
    body, module, sentence = TEXTS[name]
    with pytest.raises(emulator.PtxError, match=sentence) as caught:
        kit.run(body, kit.words(32), module=module)
    assert "line" in str(caught.value) or name == "locals"
    assert len(str(caught.value)) < 400


def test_a_huge_text_is_refused(monkeypatch):
    monkeypatch.setattr(lexer, "MAX_TEXT", 100)
    with pytest.raises(emulator.PtxError, match=r"has \d+ characters and .* at most 100"):
        kit.run("// not read before", kit.words(32))


def test_entangled_branches_are_refused(monkeypatch):
    """The search for where branches meet is quadratic in such code, and linear in compilers'."""
    monkeypatch.setattr(program, "MOST_STEPS", 1 << 12)
    count = 400
    body = "".join(f"L{i}: @%p1 bra L{i * 7919 % count}; " for i in range(count))
    with pytest.raises(emulator.PtxError, match="so entangled"):
        kit.run(body, kit.words(32))
    kit.run("".join(f"@%p1 bra L{i}; L{i}: " for i in range(count)), kit.words(32))


def test_registers_that_no_memory_holds_are_refused(monkeypatch):
    monkeypatch.setattr(state, "REGISTER_BYTES", 1 << 20)
    with pytest.raises(emulator.EmulationError, match=r"1024 threads takes \d+ MiB .* 1 MiB"):
        kit.run(".reg .b64 %many<1000>;", kit.words(32), block=1024)


def test_ctas_with_large_local_memory_take_turns(monkeypatch):
    """As many are resident as there is memory for, which here are five; the others come later."""
    monkeypatch.setattr(state, "REGISTER_BYTES", 3 << 20)
    out = kit.values(
        ".local .b8 l[16384]; st.local.u32 [l + 16380], %t; ld.local.u32 %r1, [l + 16380];"
        "st.global.u32 [%o], %r1;",
        count=16 * 32,
        grid=16,
    )
    assert (out == np.arange(16 * 32)).all()


@pytest.mark.parametrize("target", ["nonsense", "sm_", "sm_1", "sm_100x", "100"])
def test_a_target_that_is_none_is_refused(target):
    with pytest.raises(emulator.PtxError, match=rf"line 2: .target {target} is no architecture"):
        emulator.launch(kit.ptx("", [], target=target), block=32)


def test_a_module_without_a_target_is_refused():
    text = kit.ptx("", [])
    assert ".target sm_" in text
    lines = [line for line in text.splitlines() if not line.startswith(".target")]
    with pytest.raises(emulator.PtxError, match=r"has no \.target"):
        emulator.launch("\n".join(lines), block=32)


def test_more_targets_and_options_are_read():
    emulator.launch(kit.ptx("", [], target="sm_90, debug, texmode_unified"), block=32)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("mov.b32 %r1;", "mov.b32 has 1 operands and takes 2"),
        ("mov %r1, %r2;", "mov ends in no type"),
        ("mov.b64 %d1, {};", "takes no vector of 0"),
        ("mov.b32 {%b1, %b2, %b3}, %r1;", "takes no vector of 3"),
        ("ld.global.u32 %r1;", "ld.global.u32 has 1 operands and takes 2 to 3"),
        ("st.global.u32 [%o], %r1, %d1, %r3;", "has 4 operands and takes 2 to 3"),
        ("bar.warp.sync;", "has 0 operands and takes 1"),
        ("cp.async.ca.shared.global [%r1], [%o];", "has 2 operands and takes 3 to 5"),
        ("shfl.sync.bfly.b32 %r1, %r2, 1;", "has 3 operands and takes 4 to 5"),
    ],
)
def test_operands_are_counted(body, sentence):
    with pytest.raises(emulator.PtxError, match=sentence):
        kit.run(body, kit.words(32))


@pytest.mark.parametrize("opcode", ["div.u32", "rem.s32", "div.s64", "rem.u16"])
@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_division_by_zero_is_said(opcode, guard):
    """The value is unspecified (PTX ISA 9.7.1.8): a warning, since nobody may read it."""
    reg, bits = {"64": ("%d", "b64"), "32": ("%r", "b32"), "16": ("%b", "b16")}[opcode[-2:]]
    body = f"""
        setp.eq.u32 %p1, %x, 5; mov.{bits} {reg}1, 7; mov.{bits} {reg}2, 1;
        @%p1 mov.{bits} {reg}2, 0; {guard}{opcode} {reg}3, {reg}1, {reg}2;"""
    report = kit.run(body, kit.words(32))
    [found] = report.warnings
    assert report.ok
    assert (found.kind, found.lane, found.opcode) == ("division by zero", 5, opcode)
    assert "unspecified" in found.message
    body = body.replace("setp.eq", "setp.gt")  # lanes 6 and up divide by zero, and are left out
    report = kit.run(body.replace("@%p1 div", "@!%p1 div").replace("@%p1 rem", "@!%p1 rem"))
    assert bool(report.warnings) == (not guard)


def test_addresses_and_special_registers_are_signed_where_the_instruction_is():
    """A symbol in a 64-bit signed sum must not make a float64 of it."""
    body = """
        .shared .align 16 .b8 pad[64]; .shared .align 16 .b8 s[64];
        mov.s64 %d1, 8; add.s64 %d1, %d1, s; cvt.u32.u64 %r1, %d1; mov.u32 %r2, s;
        sub.u32 %r1, %r1, %r2; mov.s32 %r3, -1; min.s32 %r3, %r3, %laneid;
        add.s32 %r1, %r1, %r3; st.global.u32 [%o], %r1;"""
    assert (kit.values(body) == 7).all()


def test_a_bulk_copy_larger_than_shared_memory_is_refused():
    body = """
        .shared .align 16 .b8 s[64]; .shared .align 8 .b64 mb; mov.u32 %r1, s; mov.u32 %r2, mb;
        setp.eq.u32 %p1, %x, 0; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
          [%r1], [%a0], 4294967280, [%r2];"""
    with pytest.raises(emulator.IllegalOperation, match="of 4294967280 bytes: one side is shared"):
        kit.run(body, kit.words(32))


def test_the_limits_are_far_from_what_compilers_print():
    """The largest kernels of this project are a hundredth of them."""
    assert reader.MAX_NESTING >= 64
    assert reader.MAX_REGISTERS >= link.MAX_INSTRUCTIONS
    assert parser.MAX_VARIABLES >= 1 << 24
