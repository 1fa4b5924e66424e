"""Calls are expanded in place (PTX ISA 9.7.12.5): parameters, guards, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale.emulator.errors import PtxError
from tests.emulator import kit

PARAM_FUNCTION = """
.func (.param .b32 out) scale(.param .b32 a, .param .align 8 .b8 s[8])
{
    .reg .b32 %r<4>; .reg .pred %p;
    ld.param.b32 %r1, [a];
    ld.param.b32 %r2, [s+4];
    mul.lo.u32 %r3, %r1, %r2;
    setp.gt.u32 %p, %r1, 15;
    st.param.b32 [out], %r3;
    @%p ret;
    add.u32 %r3, %r3, 1;
    st.param.b32 [out+0], %r3;
    ret;
}
"""


def test_call_with_parameters_in_memory():
    """.param arguments and results, a struct, a guarded ret, two calls in one kernel."""
    call = """
        {{
            .param .b32 p0; .param .align 8 .b8 p1[8]; .param .b32 ret0;
            st.param.b32 [p0], {0};
            st.param.v2.b32 [p1], {{0, 3}};
            call.uni (ret0), scale, (p0, p1);
            ld.param.b32 {0}, [ret0];
        }}"""
    body = "mov.u32 %r1, %x;" + call.format("%r1") + call.format("%r1")
    x = np.arange(32)
    once = 3 * x + (x <= 15)
    for seed in range(5):
        got = kit.values(body + "st.global.u32 [%o], %r1;", module=PARAM_FUNCTION, seed=seed)
        assert (got == 3 * once + (once <= 15)).all()


def test_call_with_registers_and_a_guard():
    """.reg arguments and results; lanes whose guard is false skip the call and its moves."""
    module = ".func (.reg .b32 r) twice(.reg .b32 a) { add.u32 r, a, a; ret; }"
    body = """
        mov.u32 %r1, %x;
        setp.lt.u32 %p1, %x, 7;
        @%p1 call (%r1), twice, (%r1);
        st.global.u32 [%o], %r1;"""
    x = np.arange(32)
    assert (kit.values(body, module=module) == np.where(x < 7, 2 * x, x)).all()


@pytest.mark.parametrize(
    ("module", "call", "sentence"),
    [
        (
            ".func f() { call g; ret; } .func g() { call f; ret; }",
            "call f;",
            r"f calls itself \(kernel -> f -> g -> f\); .*recursion is not modelled: write it as",
        ),
        ("", "call %d1, ();", r"line \d+.*an indirect call is not modelled; compile so that"),
        ("", "call (%r1), %d1, (%r1), proto;", "an indirect call is not modelled"),
        ("", "call nobody;", r"line \d+.*nobody is called but not defined in this module"),
        (".extern .func g();", "call g;", "g is called but not defined in this module"),
        (
            ".func f(.reg .b32 a) { ret; }",
            "call f;",
            r"f takes 1 arguments and gives 0 results; the call has 0 and 0",
        ),
    ],
)
def test_calls_that_are_refused(module, call, sentence):
    with pytest.raises(PtxError, match=sentence):
        kit.run(call, kit.words(32), module=module)
