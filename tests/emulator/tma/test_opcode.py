"""Opcodes of asynchronous copies: fields, operands, and the same verdict as ptxas."""

import re

import pytest

from blockscale.emulator.errors import PtxError
from blockscale.emulator.tma import parse
from tests.emulator.kit import tools

TX = "mbarrier::complete_tx::bytes"
HINT = "L2::cache_hint"
LOAD = f"cp.async.bulk.tensor.2d.shared::cluster.global.{TX}"
CTA_LOAD = f"cp.async.bulk.tensor.2d.shared::cta.global.{TX}"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
TENSOR_RED = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.bulk_group"
PREFETCH = "cp.async.bulk.prefetch.tensor.3d.L2.global"
BULK = f"cp.async.bulk.shared::cluster.global.{TX}"
CTA_BULK = f"cp.async.bulk.shared::cta.global.{TX}"
DSMEM = f"cp.async.bulk.shared::cluster.shared::cta.{TX}"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
RED = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
DSMEM_RED = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{TX}"
REPLACE = "tensormap.replace.tile"
FENCE = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release"

# What stands for an operand of each role in the generated PTX.
OPERAND = {
    "dst": "[{dst}]",
    "src": "[{src}]",
    "size": "%r8",
    "mbar": "[%r1]",
    "tensor": "[%rd3, {{{coordinates}}}]",
    "im2col": "{{{im2col}}}",
    "cta_mask": "%h1",
    "byte_mask": "%h1",
    "cache_policy": "%rd4",
    "count": "1",
    "value": "{value}",
    "ordinal": "0",
    "address": "[{address}]",
}
LEGAL = [
    *(f"cp.async.bulk.tensor.{d}d.shared::cluster.global.{TX}" for d in range(1, 6)),
    *(f"cp.async.bulk.tensor.{d}d.global.shared::cta.bulk_group" for d in range(1, 6)),
    f"cp.async.bulk.tensor.2d.tile.shared::cluster.global.{TX}",
    f"cp.async.bulk.tensor.tile.2d.{TX}.shared::cluster.global",
    LOAD + ".tile",
    LOAD + ".multicast::cluster",
    f"{LOAD}.multicast::cluster.{HINT}",
    f"{LOAD}.{HINT}.multicast::cluster.cta_group::2",
    CTA_LOAD + ".cta_group::1",
    CTA_LOAD + ".cta_group::2",
    CTA_LOAD + ".tile::gather4",
    LOAD + ".tile::gather4",
    *(LOAD.replace("2d", f"{d}d") + ".im2col" for d in (3, 4, 5)),
    LOAD.replace("2d", "4d") + ".im2col::w",
    f"{LOAD.replace('2d', '4d')}.im2col::w::128.{HINT}",
    STORE + ".tile::scatter4",
    f"{STORE}.{HINT}",
    STORE.replace("2d", "4d") + ".im2col_no_offs",
    *(f"{TENSOR_RED}.{op}" for op in ("add", "min", "max", "inc", "dec", "and", "or", "xor")),
    f"{TENSOR_RED}.add.tile.{HINT}",
    TENSOR_RED + ".add.tile::scatter4",
    TENSOR_RED.replace("2d", "3d") + ".xor.im2col_no_offs",
    PREFETCH,
    f"{PREFETCH}.im2col.{HINT}",
    PREFETCH.replace("3d", "2d") + ".tile::gather4",
    "cp.async.bulk.prefetch.L2.global",
    f"cp.async.bulk.prefetch.L2.global.{HINT}",
    CTA_BULK,
    f"{CTA_BULK}.{HINT}",
    BULK,
    BULK + ".multicast::cluster",
    f"{BULK}.multicast::cluster.{HINT}",
    DSMEM,
    BULK_STORE,
    f"{BULK_STORE}.{HINT}.cp_mask",
    BULK_STORE + ".cp_mask",
    *(f"{DSMEM_RED}.{op}" for op in ("add.u64", "add.s32", "min.s32", "dec.u32", "xor.b32")),
    *(f"{RED}.{op}" for op in ("add.u32", "add.u64", "add.f32", "add.f64", "min.f16")),
    *(f"{RED}.{op}" for op in ("add.noftz.f16", "add.noftz.bf16", "max.s64", "inc.u32")),
    *(f"{RED}.{op}" for op in ("max.bf16", "or.b64", "and.b32", f"{HINT}.xor.b32")),
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "cp.async.bulk.wait_group.read",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "cp.async.ca.shared.global",
    "cp.async.ca.shared::cta.global.L2::128B",
    "cp.async.cg.shared.global.L2::64B",
    f"cp.async.cg.shared.global.{HINT}.L2::256B",
    f"cp.async.cg.shared.global.L2::256B.{HINT}",
    "cp.async.mbarrier.arrive.b64",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64",
    "cp.async.mbarrier.arrive.noinc.shared.b64",
    "prefetch.tensormap",
    "prefetch.param.tensormap",
    "prefetch.const.tensormap",
    REPLACE + ".global_address.shared::cta.b1024.b64",
    REPLACE + ".global_address.b1024.b64",
    REPLACE + ".rank.global.b1024.b32",
    REPLACE + ".box_dim.global.b1024.b32",
    REPLACE + ".global_dim.global.b1024.b32",
    REPLACE + ".global_stride.global.b1024.b64",
    REPLACE + ".element_stride.shared::cta.b1024.b32",
    *(f"{REPLACE}.{name}.global.b1024.b32" for name in ("elemtype", "interleave_layout")),
    *(f"{REPLACE}.{name}.global.b1024.b32" for name in ("swizzle_mode", "swizzle_atomicity")),
    REPLACE + ".fill_mode.global.b1024.b32",
    *(f"{FENCE}.{scope}.sync.aligned" for scope in ("cta", "cluster", "gpu", "sys")),
]
# Opcode that is wrong, and what of it the sentence names.
ILLEGAL = [
    (f"cp.async.bulk.tensor.2d.global.shared::cluster.{TX}", "as destination and source"),
    (STORE.replace("shared::cta", "shared::cluster"), "as destination and source"),
    (STORE.replace("shared::cta", "shared"), "unknown modifier .shared"),
    (STORE + ".foo", "unknown modifier .foo"),
    (STORE.replace("2d", "6d"), "unknown modifier .6d"),
    (STORE.replace(".2d", ""), "no .1d to .5d"),
    (STORE.replace("2d", "2d.2d"), "modifier .2d conflicts"),
    (STORE + ".tile.tile", "modifier .tile conflicts"),
    (STORE + ".cta_group::1", ".cta_group on a store"),
    (STORE.replace("2d", "4d") + ".im2col", ".im2col with .global.shared::cta"),
    (STORE + ".tile::gather4", ".tile::gather4 with .global.shared::cta"),
    (STORE.replace("2d", "1d") + ".tile::scatter4", ".tile::scatter4 of .1d"),
    (STORE.replace("bulk_group", TX), "completion mechanism mbarrier"),
    (LOAD.replace(TX, "bulk_group"), "completion mechanism bulk_group"),
    (LOAD + ".tile::scatter4", ".tile::scatter4 with .shared::cluster.global"),
    (LOAD + ".im2col", ".im2col of .2d"),
    (CTA_LOAD + ".multicast::cluster", ".multicast::cluster into .shared::cta"),
    (TENSOR_RED, "no reduction"),
    (TENSOR_RED.replace("2d", "3d") + ".add.im2col", "unknown modifier .im2col"),
    (PREFETCH.replace(".L2", ""), "modifier .L2 is missing"),
    ("cp.async.bulk.prefetch.global", "modifier .L2 is missing"),
    (f"cp.async.bulk.shared::cta.shared::cta.{TX}", "modifier .shared::cta conflicts"),
    ("cp.async.bulk.global.shared::cluster.bulk_group", "as destination and source"),
    (BULK_STORE.replace("bulk_group", TX), "completion mechanism mbarrier"),
    (DSMEM + ".multicast::cluster", ".multicast::cluster with .shared::cluster.shared::cta"),
    (f"{DSMEM}.{HINT}", f".{HINT} with .shared::cluster.shared::cta"),
    (BULK + ".cp_mask", ".cp_mask with .shared::cluster.global"),
    (DSMEM_RED + ".min.u64", "reduction .min of .u64 into .shared::cluster"),
    (DSMEM_RED + ".and.b64", "reduction .and of .b64"),
    (DSMEM_RED + ".add.s64", "reduction .add of .s64"),
    (RED + ".add.s64", "reduction .add of .s64"),
    (RED + ".add.f16", ".add.f16 without .noftz"),
    (RED + ".add.noftz.f32", ".add.f32 with .noftz"),
    (RED + ".min.noftz.f16", ".min.f16 with .noftz"),
    (RED + ".min.f32", "reduction .min of .f32"),
    (RED + ".xor.s32", "reduction .xor of .s32"),
    (RED + ".inc.u64", "reduction .inc of .u64"),
    ("cp.async.shared.global", "needs .ca or .cg"),
    ("cp.async.mbarrier.arrive.shared::cluster.b64", "unknown modifier .shared::cluster"),
    ("cp.async.mbarrier.arrive.noinc", "modifier .b64 is missing"),
    (REPLACE + ".global_stride.global.b1024.b32", "field global_stride of type .b32"),
    (FENCE.replace("release", "acquire") + ".sys.sync.aligned", "unknown modifier .acquire"),
    ("multimem.cp.async.bulk.global.shared::cta.bulk_group", "memory of several GPUs"),
]


def instruction(opcode):
    """One line of PTX with the operands that `parse` names."""
    op = parse(opcode)
    shared, far = "%r1", "%rd1"
    values = {
        "dst": shared if op.dst.startswith("shared") else far,
        "src": shared if op.src.startswith("shared") else far,
        "coordinates": ", ".join(["%r2"] * op.coordinates),
        "im2col": ", ".join(["%h2"] * op.im2col_info),
        "address": shared if op.space == "shared::cta" else "%rd2" if op.space else "%rd3",
        "value": "%rd4" if op.element == "b64" else "%r2",
    }
    if op.kind == "tensormap.replace" and op.space == "global":
        values["address"] = far
    if op.field in ("elemtype", "interleave_layout", "fill_mode") or "swizzle" in op.field:
        values["value"] = "1"
    texts = [OPERAND[role].format(**values) for role in op.operands if role != "src_size?"]
    if op.kind in ("cp.async", "tensormap.cp_fenceproxy"):
        texts[2] = "16" if op.kind == "cp.async" else "128"
    return f"{opcode} {', '.join(texts)};"


HEADER = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 out, .param .align 64 .b8 map[128])
{
.reg .b32 %r<9>; .reg .b64 %rd<5>; .reg .b16 %h<3>;
.shared .align 1024 .b8 buffer[4096];
mov.u32 %r1, buffer; mov.u32 %r2, 0; mov.u32 %r8, 128; mov.u16 %h1, 3; mov.u16 %h2, 1;
ld.param.u64 %rd1, [out]; mov.b64 %rd2, map; cvta.param.u64 %rd3, %rd2; mov.b64 %rd4, 0;
"""


def refused(lines):
    """Which of the lines ptxas refuses, by number; its first error may hide later ones."""
    return tools.refused(HEADER, lines, "sm_100a")


def test_ptxas_takes_every_legal_opcode():
    lines = [instruction(opcode) for opcode in LEGAL]
    assert [lines[number] for number in refused(lines)] == []


@pytest.mark.always
def test_ptxas_refuses_every_illegal_opcode():
    """Each with operands of a right neighbour, so that the modifiers are what is wrong."""
    right = {opcode: instruction(opcode).partition(" ")[2] for opcode in LEGAL}
    for opcode, _ in ILLEGAL:
        name = ".".join(opcode.split(".")[:4])
        near = [args for other, args in right.items() if other.startswith(name)]
        near = near or [args for other, args in right.items() if other[:12] == opcode[:12]]
        assert refused([f"{opcode} {(near or ['%r1;'])[0]}"]) == {0}, opcode


@pytest.mark.parametrize(("opcode", "problem"), ILLEGAL)
def test_a_wrong_opcode_is_named(opcode, problem):
    with pytest.raises(PtxError, match=re.escape(problem)) as raised:
        parse(opcode)
    assert str(raised.value).startswith(opcode + ": ")
    assert ";" in str(raised.value)


@pytest.mark.parametrize("opcode", ["ld.global.u32", "mbarrier.init.b64", "prefetch.global.L2"])
def test_other_opcodes_are_not_ours(opcode):
    assert parse(opcode) is None


@pytest.mark.parametrize("opcode", ["cp.sync.bulk", "cp.reduce.async", "tensormap.copy"])
def test_an_unknown_name_is_an_error(opcode):
    with pytest.raises(PtxError, match=r"no such instruction; known are cp\.async"):
        parse(opcode)


def test_fields_and_operands():
    op = parse(f"{LOAD}.multicast::cluster.cta_group::2.{HINT}")
    assert (op.kind, op.dim, op.dst, op.src) == (
        "cp.async.bulk.tensor",
        2,
        "shared::cluster",
        "global",
    )
    assert (op.completion, op.multicast, op.cta_group, op.cache_hint) == ("mbarrier", True, 2, True)
    assert op.is_load
    assert op.load_mode == "tile"
    assert op.operands == ("dst", "tensor", "mbar", "cta_mask", "cache_policy")
    gather = parse(CTA_LOAD + ".tile::gather4")
    assert (gather.coordinates, gather.im2col_info, gather.cta_group) == (5, 0, 1)
    im2col = parse(LOAD.replace("2d", "5d") + ".im2col")
    assert (im2col.coordinates, im2col.im2col_info, im2col.operands[3]) == (5, 3, "im2col")
    store = parse(STORE)
    assert (store.is_load, store.operands, store.completion) == (
        False,
        ("tensor", "src"),
        "bulk_group",
    )
    red = parse(f"{RED}.add.noftz.bf16")
    assert (red.reduction, red.element, red.noftz) == ("add", "bf16", True)
    assert red.operands == ("dst", "src", "size")
    assert parse(f"{DSMEM_RED}.add.u64").operands == ("dst", "src", "size", "mbar")
    masked = parse(f"{BULK_STORE}.{HINT}.cp_mask")
    assert masked.operands == ("dst", "src", "size", "cache_policy", "byte_mask")
    oob = parse(CTA_BULK + ".ignore_oob")  # PTX ISA 9.2, newer than the ptxas of CUDA 13.0
    assert oob.operands == ("dst", "src", "size", "ignore_left", "ignore_right", "mbar")
    plain = parse(f"cp.async.ca.shared.global.{HINT}.L2::128B")
    assert (plain.cache, plain.prefetch_bytes) == ("ca", 128)
    assert plain.operands == ("dst", "src", "size", "src_size?", "cache_policy")
    assert parse("cp.async.bulk.wait_group.read").read
    assert parse("cp.async.mbarrier.arrive.noinc.shared.b64").noinc
    edit = parse(f"{REPLACE}.box_dim.shared::cta.b1024.b32")
    assert (edit.field, edit.space, edit.element) == ("box_dim", "shared::cta", "b32")
    assert edit.operands == ("address", "ordinal", "value")
    fence = parse(f"{FENCE}.gpu.sync.aligned")
    assert (fence.scope, fence.operands) == ("gpu", ("dst", "src", "size"))
    assert parse("prefetch.param.tensormap").kind == "prefetch.tensormap"
