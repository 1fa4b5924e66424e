"""Spellings of tcgen05 opcodes: we take what ptxas takes and reject what it rejects."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from blockscale.emulator.errors import PtxError
from blockscale.emulator.tcgen05.opcode import parse_opcode
from tests.emulator.kit import tools

HEAD = """.version 9.0
.target {arch}
.address_size 64
.visible .entry k() {{
.reg .b32 %r<200>; .reg .b64 %rd<20>; .reg .pred %p<4>; .reg .b16 %h<3>;
{body}
ret;
}}
"""


def vector(count):
    return "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"


def operands(opcode):
    """Operands that suit the opcode, so that only its spelling can be wrong."""
    parts = opcode.split(".")
    if parts[1] == "mma":
        a = "[%r4]" if "ashift" in parts else "%rd0"
        meta = "[%r5], " if "sp" in parts else ""
        scales = "[%r2], [%r3], " if "kind::mx" in opcode and "ws" not in parts else ""
        return f"[%r0], {a}, %rd1, {meta}%r1, {scales}%p0"
    if parts[1] in ("ld", "st"):
        shape = next((p for p in parts if "x" in p[1:] and p.endswith(("b", "bx2"))), "32x32b")
        num = next((int(p[1:]) for p in parts if p[0] == "x" and p[1:].isdigit()), 1)
        registers = vector(num * {"16x128b": 2, "16x256b": 4}.get(shape, 1))
        split = ", 4" if shape == "16x32bx2" else ""
        if parts[1] == "st":
            return f"[%r0]{split}, {registers}"
        return f"{registers}, {'%r7, ' if 'red' in parts else ''}[%r0]{split}"
    if parts[1] == "cp":
        return "[%r0], %rd0"
    if parts[1] == "shift":
        return "[%r0]"
    if parts[1] == "alloc":
        return f"[{'%r0' if 'shared' in opcode else '%rd0'}], 32"
    if parts[1] == "dealloc":
        return "%r0, 32"
    if parts[1] == "commit":
        address = "[%r0]" if "shared" in opcode else "[%rd0]"
        return address + (", %h0" if "multicast" in opcode else "")
    return ""


MMA = [
    "kind::f16",
    "kind::tf32",
    "kind::f8f6f4",
    "kind::i8",
    "kind::i8.ashift",
    "kind::f16.ashift.collector::a::lastuse",
    "kind::f16.collector::a::lastuse.ashift",
    "kind::f16.collector::a::fill",
    "collector::a::discard.kind::f16",
    "kind::mxf8f6f4.block_scale",
    "kind::mxf8f6f4.block_scale.block32",
    "kind::mxf8f6f4.block_scale.scale_vec::1X",
    "kind::mxf8f6f4.scale_vec::1X.block_scale",
    "kind::mxf4.block_scale",
    "kind::mxf4.block_scale.scale_vec::2X",
    "kind::mxf4nvf4.block_scale.block16",
    "kind::mxf4nvf4.block_scale.block32",
    "kind::mxf4nvf4.block_scale.scale_vec::2X",
    "kind::mxf4nvf4.block_scale.scale_vec::4X.collector::a::use",
]
LEGAL = [f"tcgen05.mma.cta_group::{group}.{kind}" for kind in MMA for group in (1, 2)] + [
    "tcgen05.mma.kind::f16.cta_group::1",
    "tcgen05.mma.ws.cta_group::1.kind::f16",
    "tcgen05.mma.ws.cta_group::1.kind::i8.collector::b3::lastuse",
    "tcgen05.mma.sp.cta_group::1.kind::f16",
    "tcgen05.mma.ws.sp.cta_group::1.kind::f16",
    "tcgen05.wait::ld.sync.aligned",
    "tcgen05.wait::st.sync.aligned",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.fence::after_thread_sync",
    "tcgen05.cp.cta_group::1.128x256b",
    "tcgen05.cp.cta_group::1.4x256b.b8x16.b4x16_p64",
    "tcgen05.cp.cta_group::2.128x128b.b8x16.b6x16_p32",
    "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13",
    "tcgen05.cp.cta_group::1.64x128b.warpx2::01_23",
    "tcgen05.cp.cta_group::2.32x128b.warpx4.b8x16.b4x16_p64",
    "tcgen05.shift.cta_group::2.down",
    "tcgen05.alloc.cta_group::1.sync.aligned.b32",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
    "tcgen05.dealloc.cta_group::2.sync.aligned.b32",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.multicast::cluster.b64",
    "tcgen05.ld.aligned.sync.x2.32x32b.b32",
]
LEGAL += [
    f"tcgen05.{op}.sync.aligned.{shape}.x{num}{pack}.b32"
    for shape, limit in (
        ("32x32b", 128),
        ("16x64b", 128),
        ("16x128b", 64),
        ("16x256b", 32),
        ("16x32bx2", 128),
    )
    for num in (1, 4, limit)
    for op, packing in (("ld", ".pack::16b"), ("st", ".unpack::16b"))
    for pack in ("", packing)
]
LEGAL_SM103 = [
    "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32",
    "tcgen05.ld.red.sync.aligned.32x32b.x4.min.abs.NaN.f32",
    "tcgen05.ld.red.sync.aligned.16x32bx2.x8.u32.max",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.s32",
]
ILLEGAL = {
    "tcgen05.mma.cta_group::1.kind::f64": "not understood: .kind::f64",
    "tcgen05.mma.cta_group::3.kind::f16": "needs a CTA group",
    "tcgen05.mma.cta_group::1.kind::f16.block_scale": "does not take .block_scale",
    "tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::use": "not take .collector::a::use",
    "tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::fill": "not take .collector::a::fill",
    "tcgen05.mma.cta_group::1.kind::f16.collector::b0::fill": "not take .collector::b0::fill",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4": "needs the modifier .*block_scale",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block16": "does not take .block16",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::2X": "take .scale_vec::2X",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::4X": "take .scale_vec::4X",
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16": "does not take .block16",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale": "needs a vector size of .kind::mxf4nvf4",
    "tcgen05.mma.ws.cta_group::2.kind::f16": "cta_group::2",
    "tcgen05.mma.ws.cta_group::1.kind::f16.collector::a::fill": "take .collector::a::fill",
    "tcgen05.mma.ws.cta_group::1.kind::f16.ashift": "does not take .ashift",
    "tcgen05.mma.ws.cta_group::1.kind::mxf4.block_scale": "needs a kind",
    "tcgen05.mma.sp.ws.cta_group::1.kind::f16": "does not take .ws",
    "tcgen05.ld.sync.aligned.32x32b.x3.b32": "needs a repeat factor of .32x32b",
    "tcgen05.ld.sync.aligned.32x32b.x2.unpack::16b.b32": "does not take .unpack::16b",
    "tcgen05.ld.sync.aligned.16x256b.x64.b32": "needs a repeat factor of .16x256b",
    "tcgen05.ld.sync.aligned.16x128b.x128.b32": "needs a repeat factor of .16x128b",
    "tcgen05.st.sync.aligned.32x32b.x4.pack::16b.b32": "does not take .pack::16b",
    "tcgen05.wait::cp.sync.aligned": "waits for ::ld or ::st",
    "tcgen05.cp.cta_group::1.64x128b": "needs a multicast of .64x128b",
    "tcgen05.cp.cta_group::1.32x128b": "needs a multicast of .32x128b",
    "tcgen05.cp.cta_group::1.64x128b.warpx4": "needs a multicast of .64x128b",
    "tcgen05.cp.cta_group::1.128x256b.warpx4": "does not take .warpx4",
    "tcgen05.cp.cta_group::1.128x256b.b6x16_p32.b8x16": "right after .b8x16",
    "tcgen05.cp.cta_group::1.128x256b.b8x16": "right after .b8x16",
    "tcgen05.shift.cta_group::1.up": "needs the modifier .*down",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cluster.b32": "take .shared::cluster",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cta.b64": "take .shared::cta",
    "tcgen05.ld.red.sync.aligned.32x32b.x1.min.u32": "at least .x2",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.abs.s32": "needs a type",
    "tcgen05.ld.red.sync.aligned.16x64b.x2.min.s32": "needs a shape",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.pack::16b.min.s32": "no .pack::16b with .red",
}


def assemble(arch, opcodes):
    """What ptxas says about one instruction of each opcode."""
    body = "\n".join(f"{opcode} {operands(opcode)};" for opcode in opcodes)
    return tools.assemble(HEAD.format(arch=arch, body=body), arch)


COMPLAINTS = ("odifier", "syntax error", "State space", "Illegal matrix shape")


@pytest.mark.parametrize(
    ("arch", "opcodes"),
    [
        ("sm_100a", [opcode for opcode in LEGAL if "cta_group::2" not in opcode]),
        ("sm_100a", [opcode for opcode in LEGAL if "cta_group::2" in opcode]),
        ("sm_103a", LEGAL_SM103),
    ],
)
def test_ptxas_takes_the_legal_spellings(arch, opcodes):
    result = assemble(arch, opcodes)
    assert result.returncode == 0, result.stderr


def test_ptxas_rejects_the_illegal_spellings():
    def run(opcode):
        return assemble("sm_103a" if ".red" in opcode else "sm_100a", [opcode])

    with ThreadPoolExecutor(2) as pool:
        for opcode, result in zip(ILLEGAL, pool.map(run, ILLEGAL), strict=True):
            assert result.returncode != 0, opcode
            assert any(word in result.stderr for word in COMPLAINTS), opcode  # not the operands


@pytest.mark.parametrize("opcode", LEGAL + LEGAL_SM103)
def test_legal(opcode):
    assert parse_opcode(opcode).text == opcode


@pytest.mark.parametrize(("opcode", "message"), ILLEGAL.items())
def test_illegal(opcode, message):
    with pytest.raises(PtxError, match=message):
        parse_opcode(opcode)


@pytest.mark.parametrize("opcode", ["tcgen05.frobnicate", "tcgen05.mma::ws.kind::f16", "tcgen05."])
def test_unknown_instructions(opcode):
    with pytest.raises(PtxError, match="tcgen05"):
        parse_opcode(opcode)


def test_fields():
    op = parse_opcode(
        "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.scale_vec::4X.collector::a::use"
    )
    assert (op.name, op.cta_group, op.kind, op.block, op.collector) == (
        "mma",
        2,
        "mxf4nvf4",
        16,
        ("a", "use"),
    )
    assert parse_opcode("tcgen05.mma.cta_group::1.kind::mxf4.block_scale").block == 32
    assert parse_opcode("tcgen05.mma.cta_group::1.kind::f16").block == 0
    op = parse_opcode("tcgen05.ld.sync.aligned.16x256b.x8.pack::16b.b32")
    assert (op.shape, op.num, op.registers, op.packed) == ("16x256b", 8, 32, True)
    op = parse_opcode("tcgen05.ld.red.sync.aligned.32x32b.x4.min.abs.NaN.f32")
    assert (op.red, op.red_type, op.red_abs, op.red_nan) == ("min", "f32", True, True)
    op = parse_opcode("tcgen05.cp.cta_group::2.64x128b.warpx2::02_13.b8x16.b4x16_p64")
    assert (op.multicast, op.source_format) == ("warpx2::02_13", "b4x16_p64")
    op = parse_opcode("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64")
    assert (op.space, op.multicast) == ("shared::cluster", "")
    assert parse_opcode("tcgen05.wait::st.sync.aligned").target == "st"
