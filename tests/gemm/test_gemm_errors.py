"""What the GEMMs and their specs refuse, and what they say."""

import pytest
import torch

import blockscale as bs
from blockscale.specs import GroupedMmActFp4Quant, GroupedMmFp4, MmFp4, Spec
from tests.kit import gated
from tests.kit.gemm_operands import grouped, operand
from tests.kit.helpers import rejects, says

A, B = operand(9, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
GIVEN = (A.stored, B.stored, A.scale, B.scale)
CASE = grouped([0, 2, 130], 130, 64, 128, "nvfp4")
HALF = torch.ones(9, 64, dtype=torch.bfloat16)
EIGHT = torch.zeros(64, 128, dtype=torch.uint8)


def mm(*changed, **options):
    """Call mm_fp4 with arguments in place of the first ones that are not None."""
    given = [new if new is not None else old for new, old in zip(changed, GIVEN, strict=False)]
    return bs.mm_fp4(*given, *GIVEN[len(changed) :], **options)


def group(**changed):
    """Call grouped_mm_fp4 with some arguments changed."""
    given = dict(vars(CASE)) | changed
    del given["truth"]
    return bs.grouped_mm_fp4(**given)


MM = [
    (lambda: mm(A.stored.float()), [r"\ba\b", "float32", "uint8"]),
    (lambda: mm(A.stored.tolist()), [r"\ba\b", "list", "tensor"]),
    (lambda: mm(A.stored[0]), [r"\ba\b", "dimension"]),
    (lambda: mm(A.stored.repeat(1, 2)[:, ::2]), [r"\ba\b", "contiguous"]),
    (lambda: mm(A.stored.to("meta")), [r"\ba\b", "meta", "cpu"]),
    (lambda: mm(A.stored[:, :32].clone()), [r"\ba\b", "64", "128", "one K"]),
    (lambda: mm(None, B.stored.int()), [r"\bb\b", "int32", "uint8"]),
    (lambda: mm(None, B.stored[None]), [r"\bb\b", r"\[1, 64, 64\]", "2 dimensions"]),
    (lambda: mm(None, B.stored.to("meta")), [r"\bb\b", "meta"]),
    (lambda: mm(None, B.stored[:60]), ["n=60", "multiple of 8", "N=64"]),
    (lambda: mm(None, B.stored[:0]), ["n=0", "positive"]),
    (lambda: mm(EIGHT[:9, :24], EIGHT[:, :24]), ["contiguous"]),
    (
        lambda: mm(EIGHT[:9, :24].clone(), EIGHT[:, :24].clone()),
        ["k=48", "multiple of 32", "pad K", "64"],
    ),
    (lambda: mm(None, None, A.scale.float()), ["a_scale", "float32", "float8_e4m3fn"]),
    (
        lambda: mm(None, None, A.scale[:9]),
        ["a_scale", r"\[9, 8\]", r"\[128, 8\]", "swizzle_scales"],
    ),
    (lambda: mm(None, None, None, B.scale[:64]), ["b_scale", r"\[64, 8\]", r"\[128, 8\]", "128x4"]),
    (lambda: mm(None, None, None, B.scale[:, :4].clone()), ["b_scale", r"\[128, 4\]"]),
    (lambda: mm(None, None, None, [1]), ["b_scale", "list", "tensor"]),
    (lambda: mm(alpha=torch.ones(2)), ["alpha", r"\[2\]", r"\[1\]"]),
    (lambda: mm(alpha=torch.ones(1).double()), ["alpha", "float64", "float32"]),
    (lambda: mm(alpha=1.0), ["alpha", "float", "tensor"]),
    (lambda: mm(bias=torch.ones(63)), ["bias", r"\[63\]", r"\[64\]"]),
    (lambda: mm(bias=torch.ones(64).int()), ["bias", "int32", "float32"]),
    (lambda: mm(bias=torch.ones(128)[::2]), ["bias", "contiguous"]),
    (lambda: mm(activation="relu"), ["activation", "'relu'", "relu2"]),
    (lambda: mm(residual=torch.ones(9, 64)), ["residual", "float32", "bfloat16"]),
    (lambda: mm(residual=torch.ones(64).bfloat16()), ["residual", r"\[64\]", r"\[9, 64\]"]),
    (lambda: mm(residual=HALF.t().contiguous().t()), ["residual", "contiguous"]),
    (lambda: mm(residual=HALF, out=HALF), ["out overlaps residual", "clone"]),
    (lambda: mm(fmt="int4"), ["fmt", "int4", "nvfp4", "mxfp8xmxfp4"]),
    (lambda: mm(fmt="mxfp8"), ["a_scale", r"\[128, 8\]", r"\[128, 4\]"]),
    (lambda: mm(out_dtype=torch.int8), ["out_dtype", "int8", "bfloat16"]),
    (lambda: mm(out=torch.empty(9, 64)), ["out", "float32", "bfloat16"]),
    (lambda: mm(out=torch.empty(8, 64).bfloat16()), ["out", r"\[8, 64\]", r"\[9, 64\]"]),
    (
        lambda: mm(out_dtype=torch.float32, out=A.stored.view(-1)[:0].view(torch.float32)),
        ["out", r"\[9, 64\]"],
    ),
]
GROUPED = [
    (lambda: group(a=CASE.a[None]), [r"\ba\b", r"\[1, 130, 64\]", "2 dimensions"]),
    (lambda: group(b=CASE.b[0]), [r"\bb\b", "3 dimensions", "experts"]),
    (lambda: group(offsets=CASE.offsets.long()), ["offsets", "int64", "int32"]),
    (lambda: group(offsets=CASE.offsets[:2]), ["offsets", r"\[2\]", r"\[3\]", "experts"]),
    (lambda: group(offsets=[0, 1, 2]), ["offsets", "list", "tensor"]),
    (lambda: group(offsets=CASE.offsets.to("meta")), ["offsets", "meta"]),
    (lambda: group(offsets=CASE.offsets.flip(0)), ["offsets", "130, 2, 0", "rise"]),
    (lambda: group(offsets=CASE.offsets + 1), ["offsets", "131", "130, the rows of a"]),
    (lambda: group(offsets=CASE.offsets - 1), ["offsets", "-1", "rise from 0"]),
    (lambda: group(a_scale=CASE.a_scale[:128]), ["a_scale has 128 rows", "need 256", "pad"]),
    (lambda: group(a_scale=CASE.a_scale[:130]), ["a_scale", r"\[130, 8\]", "multiple of 128"]),
    (lambda: group(a_scale=CASE.a_scale[:, :4].clone()), ["a_scale", "8"]),
    (lambda: group(b_scale=CASE.b_scale[0]), ["b_scale", r"\[128, 8\]", r"\[2, 128, 8\]"]),
    (lambda: group(alpha=torch.ones(1)), ["alpha", r"\[1\]", r"\[2\]", "each expert"]),
    (lambda: group(fmt="nvfp8"), ["fmt", "nvfp8", "mxfp4"]),
    (lambda: group(out_dtype=torch.float64), ["out_dtype", "float64"]),
    (lambda: group(out=torch.empty(130, 63).bfloat16()), ["out", r"\[130, 63\]", r"\[130, 64\]"]),
]


GATED_SPEC = GroupedMmActFp4Quant(2, 128, 64)
GATED_CASE = gated.case(GATED_SPEC, [0, 2, 130], 130)
CODES, SCALES = GATED_CASE.outputs(GATED_SPEC)


def act(**changed):
    """Call grouped_mm_act_fp4quant with some arguments changed."""
    names = ["a", "b", "a_scale", "b_scale", "offsets", "alpha", "global_scale"]
    return bs.grouped_mm_act_fp4quant(
        **dict(zip(names, GATED_CASE.tensors(), strict=True)) | changed
    )


ACT = [
    (lambda: act(activation="relu2"), ["activation", "'relu2'", "swiglu"]),
    (lambda: act(fmt="mxfp8"), ["fmt", "'mxfp8'", "nvfp4"]),
    (lambda: act(dtype=torch.float32), ["dtype", "float32", "bfloat16"]),
    (lambda: act(b_scale=GATED_CASE.b_scale[0]), ["b_scale", r"\[128, 4\]", r"\[2, 128, 4\]"]),
    (
        lambda: act(b=GATED_CASE.b[:, :64].clone(), b_scale=GATED_CASE.b_scale),
        ["n=64", "multiple of 128", "gates and ups", "N=128"],
    ),
    (lambda: act(offsets=GATED_CASE.tensors()[4].flip(0)), ["offsets", "130, 2, 0", "rise"]),
    (lambda: act(a_scale=GATED_CASE.a_scale[:128]), ["a_scale has 128 rows", "need 256"]),
    (lambda: act(alpha=torch.ones(1)), ["alpha", r"\[1\]", r"\[2\]", "each expert"]),
    (lambda: act(global_scale=torch.ones(1)), ["global_scale", r"\[1\]", r"\[2\]"]),
    (lambda: act(global_scale=0.5), ["global_scale", "float", "tensor"]),
    (lambda: act(activation="swiglu", limit=-1.0), ["limit=-1.0", "0 or more"]),
    (lambda: act(activation="swiglu", gate_alpha=None), ["gate_alpha", "NoneType", "float"]),
    (lambda: act(packed=CODES[:, :16].clone()), ["packed", r"\[130, 16\]", r"\[130, 32\]"]),
    (lambda: act(packed=CODES.float()), ["packed", "float32", "uint8"]),
    (lambda: act(block_scale=SCALES[:256].clone()), ["block_scale", r"\[256, 4\]", r"\[512, 4\]"]),
    (lambda: act(packed=GATED_CASE.a), ["packed overlaps a", "clone"]),
]


@pytest.mark.parametrize(("call", "words"), ACT)
def test_grouped_mm_act(call, words):
    for _ in range(2):
        with rejects("grouped_mm_act_fp4quant", *words):
            call()
        act()


@pytest.mark.parametrize(("call", "words"), MM)
def test_mm(call, words):
    """Before and after a call that went well: both ways to the kernel."""
    for _ in range(2):
        with rejects("mm_fp4", *words):
            call()
        bs.mm_fp4(*GIVEN)


@pytest.mark.parametrize(("call", "words"), GROUPED)
def test_grouped_mm(call, words):
    for _ in range(2):
        with rejects("grouped_mm_fp4", *words):
            call()
        group()


def test_overlap():
    """An output in the memory of an input."""
    memory = torch.zeros(64 * 64 * 4, dtype=torch.uint8)
    b, out = memory[: 64 * 64].view(64, 64), memory[: 9 * 64 * 2].view(torch.bfloat16).view(9, 64)
    with rejects("mm_fp4", "out", "overlaps b", "clone"):
        mm(None, b, out=out)


def test_gradients():
    """There is no backward pass: under no_grad, and for what needs none."""
    bias = torch.nn.Parameter(torch.ones(64))
    with torch.no_grad():
        mm(bias=bias)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MmFp4(64, 48), ["MmFp4", "k=48", "multiple of 32", "16 bytes", "64"]),
        (lambda: MmFp4(12, 64), ["MmFp4", "n=12", "multiple of 8", "16 bytes", "N=16"]),
        (lambda: MmFp4(0, 64), ["MmFp4", "n=0", "positive integer"]),
        (lambda: MmFp4(8, True), ["MmFp4", "k=True", "positive integer"]),
        (lambda: MmFp4(8, 32, "mxfp6"), ["MmFp4", "fmt='mxfp6'", "mxfp8xmxfp4"]),
        (lambda: MmFp4(8, 32, out_dtype="int8"), ["MmFp4", "out_dtype='int8'", "bfloat16"]),
        (lambda: GroupedMmFp4(0, 8, 32), ["GroupedMmFp4", "experts=0", "1 to 1024"]),
        (lambda: GroupedMmFp4(1025, 8, 32), ["GroupedMmFp4", "experts=1025", "several calls"]),
        (lambda: GroupedMmActFp4Quant(2, 96, 32), ["n=96", "multiple of 128", "N=128"]),
        (lambda: GroupedMmActFp4Quant(2, 128, 32, "mxfp4"), ["n=128", "multiple of 256", "N=256"]),
        (lambda: GroupedMmActFp4Quant(2, 128, 32, "mxfp8"), ["fmt='mxfp8'", "nvfp4"]),
        (lambda: GroupedMmActFp4Quant(0, 128, 32), ["experts=0", "1 to 1024"]),
        (lambda: GroupedMmFp4(2, 8, 16), ["GroupedMmFp4", "k=16", "multiple of 32"]),
    ],
)
def test_specs(make, words):
    with pytest.raises(ValueError, match=says(*words)):
        make()


@pytest.mark.parametrize(
    "name",
    ["mm_nvfp4_n12_k64_bf16", "mm_int4_n8_k32_bf16", "grouped_mm_nvfp4_n8_k32_bf16", "mm_nvfp4_n8"],
)
def test_names(name):
    with pytest.raises(ValueError, match=r"n=12 is not a multiple of 8|names no kernel"):
        Spec.parse(name)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8xmxfp4", "mxfp8"])
def test_names_of_specs(fmt):
    """A name leads back to its spec; without the dtype at the end it stands for three."""
    for spec in (MmFp4(64, 96, fmt, "float16"), GroupedMmFp4(7, 64, 96, fmt, "float32")):
        assert Spec.parse(spec.name) == spec == Spec.from_json(spec.to_json())
        assert {found.out_dtype for found in Spec.parse_all(spec.base_name)} == {
            "float32",
            "bfloat16",
            "float16",
        }
