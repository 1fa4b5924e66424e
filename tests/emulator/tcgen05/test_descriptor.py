"""The instruction descriptor of tcgen05.mma: fields, and a sentence for each broken rule."""

import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05.instruction import InstructionDescriptor
from blockscale.emulator.tcgen05.mma import plan_mma
from blockscale.emulator.tcgen05.opcode import parse_opcode


def plain(m, n, d=1, a=0, b=0, **bits):
    extra = sum(value << int(at[1:]) for at, value in bits.items())
    return extra | d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24


def scaled(m, n, a=1, b=1, ue8m0=0, sfa=0, sfb=0, **bits):
    extra = sum(value << int(at[1:]) for at, value in bits.items())
    shape = n >> 3 << 17 | m >> 7 << 27
    return extra | sfb << 4 | a << 7 | b << 10 | shape | ue8m0 << 23 | sfa << 29


def test_triton_instruction_descriptor():
    """144708608 of the sample kernel: mxf8f6f4, e4m3 x e2m1, 128 x 128, UE8M0."""
    got = InstructionDescriptor.decode(144708608, "mxf8f6f4")
    assert (got.m, got.n, got.k) == (128, 128, 32)
    assert (got.a_format, got.b_format, got.scale_format) == ("e4m3", "e2m1", "ue8m0")
    assert (got.sfa_id, got.sfb_id, got.a_major, got.b_major) == (0, 0, "K", "K")
    for sf, value in enumerate((144708608, 681579536, 1218450464, 1755321392)):
        step = InstructionDescriptor.decode(value, "mxf8f6f4")
        assert (step.sfa_id, step.sfb_id, step.m, step.n) == (sf, sf, 128, 128)
    got = InstructionDescriptor.decode(136316032, "mxf4nvf4")
    assert (got.m, got.n, got.k, got.scale_format) == (128, 128, 64, "ue4m3")


def test_fields():
    got = InstructionDescriptor.decode(plain(64, 24, d=0, a=0, b=0, b13=1, b15=1), "f16")
    assert (got.m, got.n, got.d_format, got.a_major, got.b_major) == (64, 24, "f16", "MN", "K")
    assert (got.a_negate, got.b_negate) == (True, False)
    got = InstructionDescriptor.decode(plain(32, 64, a=2, b=2, b30=2), "tf32", 1, ws=True)
    assert (got.m, got.max_shift, got.a_format) == (32, 16, "tf32")
    got = InstructionDescriptor.decode(plain(256, 32, d=2, a=1, b=0, b3=1), "i8", 2)
    assert (got.a_format, got.b_format, got.saturate, got.d_format) == ("s8", "u8", True, "s32")


@pytest.mark.parametrize(
    ("value", "kind", "group", "ws", "message"),
    [
        (plain(64, 24, b2=1), "f16", 1, False, "marks A as sparse"),
        (plain(128, 24, d=2), "f16", 1, False, "D format, bits 4-5, is 2"),
        (plain(128, 24, a=2), "f16", 1, False, r"A format, bits 7-9, is 2 and must be 0 \(f16\)"),
        (plain(128, 24, d=0, a=1), "f16", 1, False, "an f16 accumulator needs f16 operands"),
        (plain(96, 24), "f16", 1, False, "M is 96 and must be 64 or 128 for cta_group::1"),
        (plain(64, 24), "f16", 2, False, "M is 64 and must be 128 or 256"),
        (plain(128, 24), "f16", 2, False, "N is 24 and must be a multiple of 16"),
        (plain(128, 0), "f16", 1, False, "N is 0"),
        (plain(128, 264), "f16", 1, False, "N is 264"),
        (plain(128, 96), "f16", 1, True, "N is 96 and must be 64, 128 or 256"),
        (plain(128, 64, b6=1), "f16", 1, False, "bits 6 must be 0"),
        (plain(128, 64, b3=1), "f16", 1, False, "saturation is for .kind::i8"),
        (plain(128, 64, b30=1), "f16", 1, False, "maximum shift is for .ws"),
        (plain(128, 40, d=2), "i8", 1, False, "N is 40 and must be 8, 16, 24 or a multiple of 16"),
        (plain(128, 48, d=2), "i8", 2, False, "N is 48 and must be a multiple of 32"),
        (plain(128, 64, d=2, b13=1), "i8", 1, False, "has no negation"),
        (plain(128, 24, b16=1), "f8f6f4", 1, False, "multiple of 16 when an 8-bit B is transposed"),
        (plain(128, 48, b16=1), "f8f6f4", 2, False, "multiple of 32 when an 8-bit B is transposed"),
        (scaled(128, 64, a=5), "mxf4nvf4", 1, False, r"A format, bits 7-9, is 5 and must be 1"),
        (scaled(128, 64), "mxf4", 1, False, "scale type, bit 23, is 0 and must be 1"),
        (scaled(128, 64, b31=1), "mxf4nvf4", 1, False, "K = 96"),
        (scaled(128, 64, b15=1), "mxf4nvf4", 1, False, "K-major operands only"),
        (scaled(128, 64, sfa=1), "mxf4nvf4", 1, False, "scale factor id of A is 1"),
        (scaled(256, 64), "mxf4nvf4", 1, False, "M is 256 and must be 128"),
        (scaled(128, 24), "mxf4nvf4", 2, False, "N is 24 and must be a multiple of 16"),
        (scaled(128, 64, a=0, b=0, ue8m0=1, b24=1), "mxf8f6f4", 1, False, "bits 24-26 must be 0"),
        (scaled(128, 64, a=2, b=0, ue8m0=1), "mxf8f6f4", 1, False, "bits 7-9, is 2"),
    ],
)
def test_illegal(value, kind, group, ws, message):
    with pytest.raises(IllegalOperation, match=message):
        InstructionDescriptor.decode(value, kind, group, ws)


@pytest.mark.parametrize(
    ("opcode", "idesc", "message"),
    [
        ("mma.cta_group::1.kind::mxf4nvf4.block_scale.block32", scaled(128, 64), "UE4M3"),
        (
            "mma.cta_group::1.kind::mxf4nvf4.block_scale.block16",
            scaled(128, 64, sfa=2),
            "scale factor id of A is 2 and must be 0 with scale_vec::4X",
        ),
        ("mma.sp.cta_group::1.kind::f16", plain(128, 64), "sparse"),
        ("mma.cta_group::1.kind::f16.ashift", plain(128, 64), "needs A in tensor memory"),
    ],
)
def test_illegal_with_the_opcode(opcode, idesc, message):
    with pytest.raises(IllegalOperation, match=message):
        plan_mma(parse_opcode("tcgen05." + opcode), idesc)
