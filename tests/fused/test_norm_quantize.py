"""RMS norm and quantise: the kernels, bit for bit."""

import numpy as np
import pytest
import torch

from blockscale.specs import NormQuantize, Spec
from tests.kit.fused_kernels import drawn, kernel, run
from tests.kit.helpers import DTYPES, as_bytes, golden, same, same_bytes, tensor, widen
from tests.kit.kernels import LEVELS, needs
from tests.kit.norms import SPECIAL, expected, inputs
from tests.kit.pairwise import each, few
from tests.reference import core as ref
from tests.reference import fused as fused

GOLDEN_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
GOLDEN_FORMAT = {"e4m316": (16, "e4m3"), "ue8m032": (32, "ue8m0"), "e4m332": (32, "e4m3")}


def check(spec, given, global_scale=1.0, eps=1e-6, **how):
    """Compare every byte of every output."""
    g = tensor([global_scale])
    got = run(spec, **how, **given, global_scale=g, eps=eps)
    want = expected(spec, given, global_scale, eps)
    same_bytes(as_bytes(got["packed"]), want["packed"])
    linear = spec.layout == "linear"
    same_bytes(
        as_bytes(got["block_scale"]), want["scale"] if linear else ref.swizzle(want["scale"])
    )
    if spec.layout == "both":
        same_bytes(as_bytes(got["block_scale_linear"]), want["scale"])
    if spec.y_out:
        same(widen(got["y_out"]), want["y"])
    if spec.residual:
        same(widen(got["residual_out"]), want["residual"])


CASES = [
    (1, "add_rmsnorm_nvfp4_h256_bf16"),
    (7, "add_rmsnorm_nvfp4_h1536_128x4_y_f16"),
    (130, "add_rmsnorm_nvfp4_h1536_both_bf16"),
    (128, "add_rmsnorm_mxfp4_h512_128x4_bf16"),
    (1000, "add_rmsnorm_nvfp4_h512_128x4_fi_bf16"),
    (130, "add_rmsnorm_nvfp4_h4096_both_y_fi_bf16"),
    (7, "add_rmsnorm_nvfp4_h16384_y_fi_f16"),
    (1, "add_rmsnorm_mxfp4_h32768_both_y_fi_bf16"),
    (7, "add_rmsnorm_e4m3b32_h4096_y_f16"),
    (1000, "add_rmsnorm_mxfp4_h256_both_f16"),
    (7, "add_rmsnorm_mxfp4_h2880_128x4_bf16"),
    (130, "rmsnorm_nvfp4_h4096_128x4_bf16"),
    (7, "rmsnorm_nvfp4_h512_y_fi_f16"),
    (128, "rmsnorm_nvfp4_h256_128x4_y_fi_bf16"),
    (7, "rmsnorm_mxfp4_h1536_both_fi_bf16"),
    (1, "rmsnorm_nvfp4_h32768_f16"),
    (3, "rmsnorm_e4m3b32_h96_both_y_fi_bf16"),
    (1, "rmsnorm_mxfp4_h16384_128x4_y_bf16"),
    (5, "add_rmsnorm_nvfp4_h80_128x4_y_bf16"),
]


@pytest.mark.parametrize(("rows", "name"), few(CASES, every=3), ids=[f"{n}-{r}" for r, n in CASES])
def test_sizes_and_options(rows, name):
    """Every option somewhere; 80 and 96 columns leave padding columns beside the scales."""
    spec = Spec.parse(name)
    check(spec, inputs(spec, rows, seed=rows), global_scale=0.013)


@each(
    level=["avx512", "plain"], name=["add_rmsnorm_nvfp4_h1536_both_y_bf16", "rmsnorm_mxfp4_h96_f16"]
)
def test_space(name, level):
    """Whatever is drawn computes the same; 3 blocks a row have one size of tile only."""
    needs(level)
    spec = Spec.parse(name)
    for seed in (1, 2, 3) if spec.hidden > 96 else (1,):
        check(spec, inputs(spec, 9, seed), function=drawn(spec, level, seed))


@each(level=LEVELS, name=["add_rmsnorm_nvfp4_h64_y_bf16", "add_rmsnorm_mxfp4_h96_y_f16"])
def test_sums_of_squares(level, name):
    """Every bit of S counts: eps takes all but its last five away.

    The squares of two elements of a pair or those of a group are all there is, so that nothing
    hides how they are rounded: h has more than 12 bits, and a fused product shows.
    """
    needs(level)
    spec = Spec.parse(name)
    for seed in range(20):
        given = inputs(spec, 1, seed, spread=0)
        given["residual"] *= 300
        kept = [3, 11] if seed % 2 else range(32, 48)
        for x in (given["input"], given["residual"]):
            x[:, [i for i in range(spec.hidden) if i not in kept]] = 0
        mean = fused.square_sums(widen(given["input"]) + widen(given["residual"])) / spec.hidden
        eps = float(np.float32(mean[0]) * np.float32(2.0**-19 - 1))
        check(spec, given, eps=eps, level=level)


@pytest.mark.parametrize("convention", ["divide", "flashinfer"])
@pytest.mark.parametrize("key", GOLDEN_FORMAT.values(), ids=GOLDEN_FORMAT)
@pytest.mark.parametrize("g", [1.2e-38, 1e-30, 1e-6, 305.0, 1e6, 3e8, 1e38])
def test_global_scale(key, convention, g):
    """Scales in saturation, in the middle and at zero; reciprocals of both ends."""
    spec = NormQuantize(256, *key, convention=convention)
    check(spec, inputs(spec, 9), g)


def test_scales_at_ties():
    """(gs * amax) * (1/6) in that order: gs puts it next to a tie of E4M3, where it shows."""
    spec = Spec.parse("rmsnorm_nvfp4_h64_fi_bf16")
    table = ref.e4m3_decode(np.arange(0x30, 0x70))
    for seed in range(63):
        given = inputs(spec, 1, seed, spread=0)
        x, weight = widen(given["input"]), widen(given["weight"])
        y, _ = fused.norm(x, None, weight, 1e-6, spec.dtype, weight_first=True)
        tie = (table[seed] + table[seed + 1]) / 2
        check(spec, given, 6 * tie / np.abs(y[0, :16]).max())


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0, 1e30])
def test_eps(eps):
    spec = NormQuantize(64, y_out=True)
    given = inputs(spec, 5, spread=0)
    given["input"][3:], given["residual"][3:] = 0, 0
    check(spec, given, eps=eps)


def test_not_in_place():
    """residual_out may be other memory; the residual is then not touched."""
    spec = NormQuantize(256, y_out=True)
    check(spec, inputs(spec, 7), in_place=False)


def test_no_rows():
    spec = NormQuantize(64, layout="both", y_out=True)
    check(spec, inputs(spec, 0))


SPECIAL_NAMES = [
    "add_rmsnorm_nvfp4_h128_y_bf16",
    "add_rmsnorm_nvfp4_h128_y_f16",
    "add_rmsnorm_nvfp4_h128_y_fi_f16",
    "add_rmsnorm_mxfp4_h128_y_bf16",
    "add_rmsnorm_mxfp4_h128_y_fi_f16",
    "add_rmsnorm_e4m3b32_h128_y_fi_bf16",
    "rmsnorm_nvfp4_h128_y_fi_f16",
    "rmsnorm_nvfp4_h128_y_bf16",
    "rmsnorm_mxfp4_h128_y_fi_bf16",
]


@pytest.mark.parametrize("name", few(SPECIAL_NAMES))
def test_special_values(name):
    """A row for each special value, alone, in a whole block and everywhere; -0 in the weight.

    In float16, 60000 + 60000 is infinite after rounding and finite before.
    """
    spec = Spec.parse(name)
    given = inputs(spec, 3 * len(SPECIAL))
    for i, value in enumerate(SPECIAL):
        for row, stop in ((3 * i, 18), (3 * i + 1, 17 + spec.block), (3 * i + 2, spec.hidden)):
            for which in ("input", "residual")[: 1 + spec.residual]:
                given[which][row, 17 if stop < spec.hidden else 0 : stop] = value
    given["weight"][3], given["weight"][70] = -0.0, 0.0
    check(spec, given)


@pytest.mark.parametrize("dtype", GOLDEN_DTYPE.values(), ids=GOLDEN_DTYPE)
def test_large_values(dtype):
    """S overflows to infinity: y is 0, or NaN where h is infinite."""
    spec = NormQuantize(64, dtype=dtype, y_out=True)
    given = inputs(spec, 4)
    given["input"] = (given["input"].float() * 1e38).clamp(-3e38, 3e38).to(DTYPES[dtype])
    check(spec, given)


def bits(array, dtype):
    """Return the tensor of stored 16-bit words."""
    return torch.from_numpy(array.view(np.int16).copy()).view(DTYPES[dtype])


@pytest.mark.parametrize("case", ["nogs", "gs"])
@pytest.mark.parametrize("fmt", GOLDEN_FORMAT)
def test_golden(fmt, case):
    """FlashInfer: robust entries of the kernel's model, the residual, 95 % of its own oracle."""
    data, where = golden("flashinfer_add_rmsnorm_7x512_bf16"), "b7_h512_bf16"
    spec = NormQuantize(
        512, *GOLDEN_FORMAT[fmt], layout="both", y_out=True, convention="flashinfer"
    )
    words = {"input": "x", "residual": "residual_in", "weight": "w"}
    given = {k: bits(data[f"{where}/{v}_u16"], "bfloat16") for k, v in words.items()}
    g = data[f"{where}/global_scale_f32"] if case == "gs" else np.ones(1, np.float32)
    got = run(spec, **given, global_scale=torch.from_numpy(g))
    same(widen(got["residual_out"]), ref.bf16_value(data[f"{where}/residual_out_u16"]))
    same(widen(got["y_out"]), ref.bf16_value(data[f"{where}/km_y_out_u16"]))
    want = {k: data[f"{where}/{fmt}_{case}/{k}"] for k in (
        "km_fp4", "km_fp4_robust", "km_sf_linear", "km_sf_robust", "km_sf_sw128x4",
        "sw128x4_valid", "fi_fp4", "fi_sf_linear",
    )}  # fmt: skip
    codes = ref.unpack(as_bytes(got["packed"]))
    robust = np.unpackbits(want["km_fp4_robust"])[: codes.size].reshape(codes.shape) == 1
    assert robust.mean() > 0.999
    assert (codes == ref.unpack(want["km_fp4"]))[robust].all()
    scale, swizzled = as_bytes(got["block_scale_linear"]), as_bytes(got["block_scale"]).reshape(-1)
    assert (scale == want["km_sf_linear"])[want["km_sf_robust"]].all()
    valid = want["sw128x4_valid"]
    if want["km_sf_robust"].all():
        assert (swizzled == want["km_sf_sw128x4"])[valid].all()
    assert not swizzled[~valid].any()
    assert (scale == want["fi_sf_linear"]).mean() >= 0.95
    assert (as_bytes(got["packed"]) == want["fi_fp4"]).mean() >= 0.95


@pytest.mark.parametrize("case", ["e4m316_gs1", "e4m316_gs672", "e4m316_gs1e+06", "ue8m032_gs1"])
@pytest.mark.parametrize("dtype", GOLDEN_DTYPE)
def test_golden_edges(dtype, case):
    """FlashInfer's model on zeros, tiny, large, infinite and NaN rows and on ties."""
    data, name = golden("flashinfer_add_rmsnorm_edges"), GOLDEN_DTYPE[dtype]
    fmt, _, g = case.partition("_gs")
    spec = NormQuantize(512, *GOLDEN_FORMAT[fmt], name, convention="flashinfer")
    words = {"input": "x", "residual": "residual_in", "weight": "w"}
    given = {k: bits(data[f"{dtype}/{v}_u16"], name) for k, v in words.items()}
    got = run(spec, **given, global_scale=tensor([float(g)]))
    residual = bits(data[f"{dtype}/{case}/residual_out_u16"], name)
    same(widen(got["residual_out"]), widen(residual))
    same_bytes(as_bytes(got["block_scale"]), data[f"{dtype}/{case}/sf"])
    same_bytes(as_bytes(got["packed"]), data[f"{dtype}/{case}/fp4"])


def test_scales_are_of_e4m3():
    """A reference that is itself checked by hand: one block of 1 .. 16, weight 1."""
    x = np.zeros((1, 64), np.float32)
    x[0, :16] = np.arange(1, 17)
    spec = NormQuantize(64, residual=False, dtype="float16", y_out=True)
    got = run(spec, input=tensor(x, "float16"), weight=torch.ones(64).half(), eps=0.0)
    rms = np.sqrt(1496 / 64)
    assert np.allclose(widen(got["y_out"]), x / rms, rtol=1e-3)
    scale = ref.e4m3_decode(as_bytes(got["block_scale"]))[0]
    assert abs(scale[0] - 16 / rms / 6) < scale[0] / 16
    assert not scale[1:].any()
    codes = ref.e2m1_decode(ref.unpack(as_bytes(got["packed"])))[0, :16] * scale[0]
    assert (np.abs(codes - x[0, :16] / rms) <= scale[0]).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: NormQuantize(100), r"hidden=100 is not a multiple of 16.*choose 112"),
        (lambda: NormQuantize(48), r"hidden=48 .*less than 64; choose 64"),
        (lambda: NormQuantize(64, 16, "ue8m0"), r"'ue8m0' does not go with block_size=16"),
        (lambda: NormQuantize(64, 8), r"block_size=8 is not known; choose one of 16, 32"),
        (lambda: NormQuantize(64, dtype="float32"), r"dtype='float32' is not known"),
        (lambda: NormQuantize(64, layout="8x4"), r"layout='8x4' is not known"),
        (lambda: NormQuantize(64, convention="fi"), r"convention='fi' is not known"),
        (lambda: NormQuantize("64"), r"hidden='64' is not a positive integer"),
    ],
)
def test_bad_spec(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_names():
    """Every option is in the name, and the name says it all."""
    for rows_and_name in CASES:
        spec = Spec.parse(rows_and_name[1])
        assert spec.name == rows_and_name[1]
        assert Spec.from_json(spec.to_json()) == spec


def test_kernel_is_compiled_once():
    assert kernel(NormQuantize(64), LEVELS[-1]) is kernel(NormQuantize(64), LEVELS[-1])
