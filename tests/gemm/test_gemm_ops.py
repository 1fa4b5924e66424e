"""bs.mm_fp4 and bs.grouped_mm_fp4 against float64 on the dequantised operands, row by row.

Tolerances of |d - truth| / |truth| over a row: float32 1e-5 (adding up to 512 products in float32
gives at most 1e-6 for our data); bfloat16 and float16 must be the float32 result, rounded once.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.building.builder import build
from blockscale.runtime.function import Function
from blockscale.specs import GroupedMmFp4, MmFp4, Spec
from tests.kit.gemm_operands import FORMATS, grouped, operand, stored, tensor
from tests.kit.helpers import DTYPES, fill_freed_memory, one, rejects, same, widen
from tests.kit.pairwise import each, few, those
from tests.reference import core as ref

ROWS = (0, 1, 7, 128, 200)
SIZES = [
    pytest.param((n, k), id=f"{n}-{k}")
    for n, k in ((64, 128), (256, 512), (384, 448), (384, 128), (64, 512), (256, 32 * 9), (72, 32))
]
"""N and K: K = 448 is no whole stage of a GPU kernel, 288 and 32 are odd multiples of 32; 72 is no
multiple of a vector of 16."""

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "ue8m0": getattr(torch, "float8_e8m0fnu", torch.uint8)}
each_format = pytest.mark.parametrize("fmt", FORMATS)


def run(a, b, fmt, out_dtype="float32", **options):
    """Call mm_fp4 with memory around that is not zero."""
    fill_freed_memory(4 * len(a.stored) * len(b.stored))
    given = (a.stored, b.stored, a.scale, b.scale)
    d = bs.mm_fp4(*given, fmt=fmt, out_dtype=DTYPES[out_dtype], **options)
    assert d.dtype == DTYPES[out_dtype]
    assert d.shape == (len(a.stored), len(b.stored))
    return d


@each(size=SIZES, fmt=FORMATS)
def test_rows(size, fmt):
    """Any number of rows, plain, and with alpha and bias."""
    n, k = size
    b, bias = operand(n, k, fmt, "b"), np.linspace(-9, 9, n).astype(np.float32)
    for rows in ROWS:
        a = operand(rows, k, fmt, "a")
        error = ref.row_error(run(a, b, fmt).numpy(), ref.mm(a.value, b.value))
        assert error.max(initial=0) < 1e-5
        d = run(a, b, fmt, alpha=one(0.37), bias=tensor(bias))
        error = ref.row_error(d.numpy(), ref.mm(a.value, b.value, 0.37, bias))
        assert error.max(initial=0) < 1e-5


@those(
    lambda fmt, dtype: (fmt, dtype) in ((FORMATS[0], "bfloat16"), (FORMATS[-1], "float16")),
    fmt=FORMATS,
    dtype=["bfloat16", "float16"],
)
def test_rounded_once(fmt, dtype):
    """16 bits are the float32 result rounded to nearest even, alpha and bias before that."""
    b, bias = operand(64, 128, fmt, "b"), torch.linspace(-9, 9, 64)
    for rows in ROWS:
        a = operand(rows, 128, fmt, "a")
        options = {"alpha": one(2.0**-6), "bias": bias}
        wide = run(a, b, fmt, **options).numpy()
        same(widen(run(a, b, fmt, dtype, **options)), ref.round_to(wide, dtype))
    half = run(a, b, fmt, dtype, bias=bias.to(DTYPES[dtype]))
    wide = run(a, b, fmt, bias=bias.to(DTYPES[dtype]).float()).numpy()
    same(widen(half), ref.round_to(wide, dtype))


ACTIVATIONS = ["none", "silu", "gelu_tanh", "relu2"]


@each(activation=ACTIVATIONS, residual=[False, True], fmt=FORMATS)
def test_activation_and_residual(activation, residual, fmt):
    """In float32, in this order; few rows and many take different schedules."""
    n, k = 64, 128
    b, bias = operand(n, k, fmt, "b"), np.linspace(-2, 2, n).astype(np.float32)
    for rows in (0, 1, 7, 130):
        a = operand(rows, k, fmt, "a")
        alpha = float(np.float32(1 / max(1.0, np.abs(ref.mm(a.value, b.value)).max(initial=0) / 9)))
        wide = ref.activation(activation, ref.mm(a.value, b.value, alpha, bias))
        r = np.random.default_rng(rows).normal(0, 2, (rows, n)).astype(np.float32)
        options = {"residual": tensor(r)} if residual else {}
        d = run(a, b, fmt, alpha=one(alpha), bias=tensor(bias), activation=activation, **options)
        error = ref.row_error(d.numpy(), wide + r if residual else wide)
        assert error.max(initial=0) < 1e-5


@those(
    lambda **of: (
        tuple(of.values()) in (("silu", "bfloat16", False), ("gelu_tanh", "float16", True))
    ),
    activation=ACTIVATIONS,
    dtype=["bfloat16", "float16"],
    residual=[True, False],
)
def test_activation_is_rounded_once(activation, dtype, residual):
    """With a residual of the output's dtype; the second call takes the short way."""
    a, b = operand(130, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
    r = tensor(np.random.default_rng(1).normal(0, 2, (130, 64)).astype(np.float32)).to(
        DTYPES[dtype]
    )
    options = {"alpha": one(2.0**-9), "activation": activation}
    added = {"residual": r.float()} if residual else {}
    wide = run(a, b, "nvfp4", **options, **added).numpy()
    for _ in range(2):
        half = run(a, b, "nvfp4", dtype, **options, **({"residual": r} if residual else {}))
        same(widen(half), ref.round_to(wide, dtype))


def test_residual_has_leading_dimensions():
    """Those of a."""
    a, b = operand(6, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
    r, given = torch.randn(2, 3, 64), (b.stored, a.scale, b.scale)
    d = bs.mm_fp4(a.stored.view(2, 3, 64), *given, residual=r, out_dtype=torch.float32)
    flat = bs.mm_fp4(a.stored, *given, residual=r.view(6, 64), out_dtype=torch.float32)
    same(d.view(6, 64).numpy(), flat.numpy())


def test_a_residual_that_requires_grad(monkeypatch):
    """It is refused in first calls and in known ones, even those of a library that sees bytes."""
    a, b = operand(6, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
    given, r = (a.stored, b.stored, a.scale, b.scale), torch.randn(6, 64, dtype=torch.bfloat16)

    def blind(function):
        return lambda *values: function.call(*(v if v is None else v.detach() for v in values))

    monkeypatch.setattr(Function, "direct", property(blind), raising=False)
    wanted = r.clone().requires_grad_()
    for _ in range(2):
        with rejects("residual", "requires grad"):
            bs.mm_fp4(*given, residual=wanted)
        with torch.no_grad():
            d = bs.mm_fp4(*given, residual=wanted)
        same(widen(d), widen(bs.mm_fp4(*given, residual=r)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_what_is_not_finite(activation):
    """A NaN stays one; zeros of either sign, and the ends of float32, as the formula has them."""
    a, b = operand(3, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")  # a kernel used above
    bias = torch.tensor([np.nan, 0.0, -0.0, 1e30, -1e30, np.inf, 100.0, -100.0]).repeat(8)
    d = run(a, b, "nvfp4", alpha=one(0.0), bias=bias, activation=activation)
    assert d[:, 0].isnan().all()
    assert (d[:, 1:3] == 0).all()
    top = torch.tensor(1e30 if activation != "relu2" else np.inf)
    assert (d[:, 3] == top).all()
    low = -1e30 if activation == "none" else 0
    assert (d[:, 4] == low).all()
    assert d[:, 5].isinf().all()
    assert (d[:, 6] == (1e4 if activation == "relu2" else 100)).all()
    assert (d[:, 7] == (-100 if activation == "none" else 0)).all() or activation == "silu"


def one_hot(k, fmt):
    """Return a [k, k] whose elements are 1 on the diagonal: code and scale are 1."""
    a_code, _, block, scale = ref.GEMM[fmt]
    codes = (np.eye(k) * (2 if a_code == "e2m1" else 0x38)).astype(np.uint8)
    byte = np.full((k, k // block), 0x38 if scale == "e4m3" else 127, np.uint8)
    return stored(codes, a_code), tensor(ref.swizzle(byte))


def every_code(fmt, which):
    """Return codes [256, 96] and scales: all codes at all scales but those that are NaN.

    E8M0 scales keep the products normal and finite: subnormal ones are flushed by some CPUs.
    """
    a_code, b_code, block, scale = ref.GEMM[fmt]
    code = a_code if which == "a" else b_code
    row, column = np.arange(256)[:, None], np.arange(96 // block)
    codes = (np.arange(96) + row) % (16 if code == "e2m1" else 256)
    if code == "e4m3":
        codes = np.where(codes & 0x7F == 0x7F, 0, codes)
    byte = (row + 85 * column) % 256
    if scale == "e4m3":
        byte = np.where(byte & 0x7F == 0x7F, 0x70, byte)
    else:
        byte = np.clip(byte, 2 if code == "e2m1" else 10, 250 if code == "e2m1" else 245)
    return code, codes.astype(np.uint8), byte.astype(np.uint8)


@pytest.mark.always
@each_format
def test_every_code_and_scale_of_b_is_exact(fmt):
    """One-hot rows of a read each element of b back."""
    code, codes, byte = every_code(fmt, "b")
    a, a_scale = one_hot(96, fmt)
    b, b_scale = stored(codes, code), tensor(ref.swizzle(byte))
    for rows in (96, 1, 4):
        part = a[:rows].clone()
        scale = a_scale if rows == 96 else a_scale.clone()
        d = bs.mm_fp4(part, b, scale, b_scale, fmt=fmt, out_dtype=torch.float32)
        assert (d.numpy() == ref.operand(codes, byte, fmt, "b").T[:rows]).all()


@pytest.mark.always
@each_format
def test_every_code_and_scale_of_a_is_exact(fmt):
    """One-hot rows of b do for a; b may hold the codes of a in formats of one code."""
    code, codes, byte = every_code(fmt, "a")
    b_code = ref.GEMM[fmt][1]
    eye = (np.eye(96) * (2 if b_code == "e2m1" else 0x38)).astype(np.uint8)
    _, b_scale = one_hot(96, fmt)
    a, a_scale = stored(codes, code), tensor(ref.swizzle(byte))
    for rows in (256, 4, 1):
        scale = tensor(ref.swizzle(byte[:rows]))
        given = (a[:rows].clone(), stored(eye, b_code), scale, b_scale)
        d = bs.mm_fp4(*given, fmt=fmt, out_dtype=torch.float32)
        assert (d.numpy() == ref.operand(codes, byte, fmt, "a")[:rows]).all()
    assert a_scale.shape == (256, -(-96 // ref.GEMM[fmt][2] // 4) * 4)


@pytest.mark.parametrize("fmt", few(FORMATS))
def test_nan_stays_where_it_belongs(fmt):
    """A NaN scale of a spoils its row, of b its column; NaN in the padding spoils nothing."""
    block, scale = ref.GEMM[fmt][2:]
    nan = 0x7F if scale == "e4m3" else 255
    a, b = operand(17, 96, fmt, "a"), operand(96, 96, fmt, "b")  # a kernel used above
    clean = run(a, b, fmt)
    a.byte[5, -1], b.byte[33, 0] = nan, nan
    scales = [np.full((128, -(-96 // block // 4) * 4), nan, np.uint8) for _ in "ab"]
    for padded, byte in zip(scales, (a.byte, b.byte), strict=True):
        padded.reshape(-1)[ref.swizzle_offset(*byte.shape)] = byte
    given = (a.stored, b.stored, tensor(scales[0]), tensor(scales[1]))
    d = bs.mm_fp4(*given, fmt=fmt, out_dtype=torch.float32)
    spoilt = torch.zeros(17, 96, dtype=torch.bool)
    spoilt[5], spoilt[:, 33] = True, True
    assert torch.equal(d.isnan(), spoilt)
    same(d[~spoilt].numpy(), clean[~spoilt].numpy())


OFFSETS = [
    ([0, 0, 1, 129, 429], 429),  # experts of 0, 1, 128 and 300 rows
    ([3, 10, 10, 10, 140], 141),  # rows of no expert before and after
    ([0, 1, 2, 3, 4], 4),
    ([0, 0, 0, 0, 0], 0),
    ([5, 5, 5, 5, 5], 7),
]


@each(fmt=FORMATS, size=[(64, 512), (72, 96)])
def test_grouped(fmt, size):
    """Every expert's rows by its matrix and its alpha; rows of no expert are not written."""
    n, k = size
    for offsets, rows in OFFSETS:
        case = grouped(offsets, rows, n, k, fmt)
        out = torch.full((rows, n), 12.5)
        d = bs.grouped_mm_fp4(*case.inputs, fmt=fmt, out_dtype=torch.float32, out=out)
        assert d is out
        used = slice(offsets[0], offsets[-1])
        error = ref.row_error(d.numpy()[used], case.truth[used])
        assert error.max(initial=0) < 1e-5
        assert (d[: offsets[0]] == 12.5).all()
        assert (d[offsets[-1] :] == 12.5).all()


def test_grouped_defaults():
    """No alpha, bfloat16, allocated output, more scale rows than are needed, flat scales."""
    case = grouped([0, 2, 130], 130, 64, 128, "nvfp4")
    plain = bs.grouped_mm_fp4(*case.inputs[:5])
    assert plain.dtype == torch.bfloat16
    wide = bs.grouped_mm_fp4(*case.inputs[:5], out_dtype=torch.float32)
    same(widen(plain), ref.round_to(wide.numpy(), "bfloat16"))
    more = torch.cat([case.a_scale, torch.full((128, 8), 0xFF, dtype=torch.uint8)])
    for scales in [(more, case.b_scale), (more.view(-1), case.b_scale.view(-1))]:
        given = (case.a, case.b, *scales, case.offsets)
        for _ in range(2):  # the second call goes straight to the kernel
            same(widen(bs.grouped_mm_fp4(*given)), widen(plain))


def test_leading_dimensions_and_flat_scales():
    """a [..., K / 2] gives [..., N]; scales may be flat; the second call takes the short way."""
    a, b = operand(15, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
    expected = run(a, b, "nvfp4")
    for lead in ((3, 5), (15,), (5, 1, 3)):
        for scales in ((a.scale, b.scale), (a.scale.view(-1), b.scale.view(-1))):
            for _ in range(2):
                given = (a.stored.view(*lead, 64), b.stored, *scales)
                d = bs.mm_fp4(*given, out_dtype=torch.float32)
                assert d.shape == (*lead, 64)
                same(d.numpy().reshape(15, 64), expected.numpy())


def test_leading_dimensions_of_several_tiles_of_scales():
    """Scales are of all rows: 3 x 50 are two tiles of 128."""
    a, b = operand(150, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
    given = (a.stored.view(3, 50, 64), b.stored, a.scale, b.scale)
    d = bs.mm_fp4(*given, out_dtype=torch.float32)
    assert ref.row_error(d.reshape(150, 64).numpy(), ref.mm(a.value, b.value)).max() < 1e-5


@each_format
def test_torch_float_types(fmt):
    """Codes and scales as torch's own types."""
    if not (hasattr(torch, "float4_e2m1fn_x2") and hasattr(torch, "float8_e8m0fnu")):
        pytest.skip(f"torch {torch.__version__} has no float4_e2m1fn_x2 or no float8_e8m0fnu")
    a_code, b_code, _, scale = ref.GEMM[fmt]
    types = {"e2m1": torch.float4_e2m1fn_x2, **FLOAT8}
    a, b = operand(7, 128, fmt, "a"), operand(64, 128, fmt, "b")
    given = a.stored.view(types[a_code]), b.stored.view(types[b_code])
    scales = [x.scale.view(types[scale]) for x in (a, b)]
    for _ in range(2):
        d = bs.mm_fp4(*given, *scales, fmt=fmt, out_dtype=torch.float32)
        same(d.numpy(), run(a, b, fmt).numpy())


def test_out():
    """It is written and returned; bfloat16, with leading dimensions."""
    a, b = operand(6, 128, "nvfp4", "a"), operand(64, 128, "nvfp4", "b")
    out = torch.full((2, 3, 64), 9.0, dtype=torch.bfloat16)
    given = (a.stored.view(2, 3, 64), b.stored, a.scale, b.scale)
    assert bs.mm_fp4(*given, out=out) is out
    same(widen(out).reshape(6, 64), ref.round_to(run(a, b, "nvfp4").numpy(), "bfloat16"))


def test_of_quantised_tensors():
    """What `quantize` makes goes in as it is; global scales are multiplied in alpha."""
    x, w = torch.randn(9, 128), torch.randn(64, 128)
    for fmt in ("nvfp4", "mxfp4"):
        codes = [bs.quantize(t, fmt, one(g), "128x4") for t, g in ((x, 0.5), (w, 0.25))]
        (a, a_scale), (b, b_scale) = codes
        d = bs.mm_fp4(a, b, a_scale, b_scale, one(0.125), fmt, torch.float32)
        wide = [
            bs.dequantize(*pair, fmt, one(g), "128x4", torch.float32).double()
            for pair, g in zip(codes, (0.5, 0.25), strict=True)
        ]
        assert ref.row_error(d.numpy(), (wide[0] @ wide[1].T).numpy()).max() < 1e-5


def test_library(tmp_path):
    """Both as functions of a library file, called by name; defaults stand for None."""
    specs = [MmFp4(64, 128, "mxfp8", "float32"), GroupedMmFp4(2, 64, 128, "mxfp4", "float32")]
    assert [Spec.parse(spec.name) for spec in specs] == specs
    build(specs, tmp_path / "gemm.so")
    library = bs.load(tmp_path / "gemm.so")
    a, b = operand(5, 128, "mxfp8", "a"), operand(64, 128, "mxfp8", "b")
    d = library[specs[0].name](a.stored, b.stored, a.scale, b.scale, None, None)
    assert ref.row_error(d.numpy(), ref.mm(a.value, b.value)).max() < 1e-5
    case = grouped([0, 3, 5], 5, 64, 128, "mxfp4")
    d = library[specs[1].name](*case.inputs)
    assert ref.row_error(d.numpy(), case.truth).max() < 1e-5
