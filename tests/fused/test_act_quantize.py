"""Gated activations and quantise: the kernels, bit for bit but for values next to a tie."""

import numpy as np
import pytest
import torch
import tvm
from tvm.script import tirx as T

from blockscale import catalog
from blockscale.specs import ActQuantize, Spec
from blockscale.tir import activations
from tests.kit.acts import COMPARED, MARGIN, encoded, inputs, stored, surely, values
from tests.kit.fused_kernels import drawn, run
from tests.kit.helpers import DTYPES, as_bytes, golden, same_bytes, widen
from tests.kit.kernels import LEVELS, needs
from tests.reference import core as ref
from tests.reference import fused as fused


def check(spec, given, g=0.37, numbers=(), **how):
    """Compare codes, scales, padding and rows that must stay unwritten."""
    experts = given["input"].shape[0] if spec.grouped else 1
    scale = (g * np.exp2(np.arange(experts))).astype(np.float32)
    named = dict(zip(("alpha", "beta", "limit"), numbers, strict=False))
    got = run(spec, **how, **given, **named, global_scale=torch.from_numpy(scale))
    lead = (slice(None),) if spec.grouped else (None,)
    packed, byte = as_bytes(got["packed"])[lead], as_bytes(got["block_scale"])[lead]
    for e, x in enumerate(widen(given["input"])[lead]):
        used = int(given["mask"][e]) if spec.grouped else len(x)
        found = values(spec, x, numbers)
        for bound in found:
            bound[used:] = 0
        blocks, elements = surely(spec, *found)
        assert min(blocks.mean(), elements.mean()) >= COMPARED
        codes, scales = encoded(spec, found[0], scale[e])
        codes[used:] = 15  # not written: still 0xFF
        want, sure = stored(spec, scales), stored(spec, ~blocks) == 0
        same_bytes(np.where(sure, byte[e], want), want)
        same_bytes(np.where(elements, ref.unpack(packed[e]), codes), codes)


CASES = [
    (1, 1, "silu_and_mul_nvfp4_bf16"),
    (7, 5, "silu_and_mul_nvfp4_128x4_bf16"),
    (130, 9, "silu_and_mul_nvfp4_128x4_fi_f16"),
    (1000, 4, "silu_and_mul_mxfp4_128x4_f16"),
    (128, 16, "gelu_tanh_and_mul_nvfp4_fi_bf16"),
    (9, 6, "gelu_tanh_and_mul_e4m3b32_8x4_f16"),
    (17, 4, "swiglu_mxfp4_fi_bf16"),
    (7, 11, "swiglu_nvfp4_128x4_f16"),
    (7, 5, "silu_and_mul_nvfp4_grouped_128x4_fi_bf16"),
    (130, 4, "swiglu_nvfp4_grouped_128x4_f16"),
    (129, 3, "quantize_nvfp4_grouped_128x4_bf16"),
    (5, 9, "quantize_mxfp4_grouped_128x4_fi_f16"),
    (17, 5, "quantize_nvfp4_8x4_f16"),
    (8, 4, "quantize_nvfp4_fi_bf16"),
    (3, 3, "quantize_e4m3b32_128x4_bf16"),
]


@pytest.mark.parametrize(
    ("rows", "blocks", "name"), CASES, ids=[f"{n}-{r}x{b}" for r, b, n in CASES]
)
def test_sizes_and_options(rows, blocks, name):
    spec = Spec.parse(name)
    check(spec, inputs(spec, rows, blocks, seed=rows))


@pytest.mark.parametrize("level", LEVELS)
def test_levels(level):
    needs(level)
    spec = Spec.parse("silu_and_mul_nvfp4_128x4_bf16")
    check(spec, inputs(spec, 33, 5), level=level)


def test_space():
    """A trace of the static instance serves any number of experts, rows and columns."""
    spec = Spec.parse("silu_and_mul_nvfp4_grouped_128x4_bf16")
    check(spec, inputs(spec, 9, 5), function=drawn(spec, "plain", 1))


@pytest.mark.parametrize("g", [1e-6, 0.0137, 1.0, 77.0, 3e8])
@pytest.mark.parametrize("name", ["silu_and_mul_nvfp4_bf16", "quantize_nvfp4_fi_bf16"])
def test_global_scale(name, g):
    spec = Spec.parse(name)
    check(spec, inputs(spec, 9, 10), g)


def test_scales_at_ties():
    """amax * (gs * (1/6)) in that order: gs puts it next to a tie of E4M3, where it shows."""
    spec = Spec.parse("quantize_nvfp4_fi_f16")
    table = ref.e4m3_decode(np.arange(0x30, 0x70))
    for seed in range(63):
        given = inputs(spec, 1, 1, seed=seed)
        tie = (table[seed] + table[seed + 1]) / 2
        check(spec, given, 6 * tie / np.abs(widen(given["input"])).max())


@pytest.mark.parametrize("numbers", [(1.702, 1.0, 7.0), (1.0, 0.0, np.inf), (0.5, -2.0, 0.25)])
def test_swiglu_numbers(numbers):
    """gpt-oss's; those that make it silu; others."""
    spec = Spec.parse("swiglu_nvfp4_bf16")
    check(spec, inputs(spec, 16, 8), numbers=numbers)


@pytest.mark.parametrize("name", ["silu_and_mul_nvfp4_bf16", "gelu_tanh_and_mul_nvfp4_fi_f16"])
def test_large_gates(name):
    """exp overflows, or what it is divided into is tiny: the limits of the formula."""
    spec = Spec.parse(name)
    given = inputs(spec, 4, 8)
    given["input"][0, :128] = torch.linspace(-120, -80, 128).to(DTYPES[spec.dtype])
    given["input"][1, :128] = torch.linspace(20, 120, 128).to(DTYPES[spec.dtype])
    given["input"][2, :128] = torch.linspace(-20, -5, 128).to(DTYPES[spec.dtype])
    check(spec, given)
    assert not as_bytes(run(spec, **given)["block_scale"])[0, :8].any()


@pytest.mark.parametrize(
    "name",
    [
        "silu_and_mul_nvfp4_bf16",
        "swiglu_nvfp4_fi_bf16",
        "gelu_tanh_and_mul_mxfp4_fi_f16",
        "quantize_nvfp4_fi_f16",
        "quantize_mxfp4_fi_bf16",
    ],
)
def test_not_a_number(name):
    """A NaN in gate or up makes the scale NaN and all the block's codes 7, and no other block."""
    spec = Spec.parse(name)
    given = inputs(spec, 4, 6)
    cols = 6 * spec.block
    given["input"][1, 5] = np.nan
    if spec.gated:
        given["input"][2, cols + spec.block] = np.nan
    check(spec, given)
    byte = as_bytes(run(spec, **given)["block_scale"])
    nan = 0x7F if spec.scale_format == "e4m3" else 0xFF
    assert np.argwhere(byte == nan).tolist() == ([[1, 0], [2, 1]] if spec.gated else [[1, 0]])


ENDS = ["quantize_nvfp4_fi_bf16", "quantize_mxfp4_fi_bf16", "quantize_mxfp4_fi_f16"]


@pytest.mark.parametrize("name", ENDS)
def test_zeros_and_infinities(name):
    """Zeros keep their sign and have the scale byte 0; infinity saturates.

    In bfloat16 the last row has the largest maximum whose E8M0 byte is 0, and the next number.
    """
    spec = Spec.parse(name)
    given = inputs(spec, 5, 4)
    given["input"][0], given["input"][1, ::3] = 0.0, -0.0
    given["input"][0, ::5] = -0.0
    given["input"][2, 3], given["input"][3, 40] = np.inf, -np.inf
    given["input"][4] = 6 * 2.0**-127
    given["input"][4, ::64] = 193 * 2.0**-132
    check(spec, given, g=1e-20)
    check(spec, given)


def test_no_rows():
    """Nor experts.  An empty expert [3, 0, 64] is no compact array to TVM: the caller skips it."""
    grouped, plain = (f"silu_and_mul_nvfp4_{x}128x4_bf16" for x in ("grouped_", ""))
    for spec, sizes in ((Spec.parse(plain), {}), (Spec.parse(grouped), {"experts": 0})):
        given = inputs(spec, 4 if sizes else 0, 4, **sizes)
        got = run(spec, **given)
        assert got["packed"].numel() == got["block_scale"].numel() == 0


def test_masks_beyond_the_rows():
    """A mask above the number of rows means all of them, one below zero none."""
    spec = Spec.parse("quantize_nvfp4_grouped_128x4_bf16")
    given = inputs(spec, 5, 4, experts=2)
    got = run(spec, **{**given, "mask": torch.tensor([-1, 99], dtype=torch.int32)})
    want = run(spec, **{**given, "mask": torch.tensor([0, 5], dtype=torch.int32)})
    for name, value in want.items():
        same_bytes(as_bytes(got[name]), as_bytes(value))


@pytest.mark.parametrize("kind", ["random", "boundary", "zeros", "maxes"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["m1_k64", "m3_k128", "m128_k64"])
def test_golden(shape, dtype, kind):
    """FlashInfer's exact mode, bit for bit, in all layouts; zeros of either sign have code 0."""
    data, case = golden("flashinfer_fp4_exact"), f"q_{shape}_{dtype}_{kind}"
    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    x = torch.from_numpy(data[f"{case}/x_u16"].view(np.int16).copy()).view(DTYPES[name])
    g = torch.from_numpy(data[f"{case}/global_scale_f32"])
    byte = data[f"{case}/te_sf_linear"]
    for layout in ("linear", "128x4", "8x4"):
        spec = ActQuantize("none", dtype=name, layout=layout, convention="flashinfer")
        got = run(spec, input=x, global_scale=g)
        codes = ref.unpack(as_bytes(got["packed"]))
        codes = np.where(widen(x) == 0, 0, codes)
        same_bytes(ref.pack(codes), data[f"{case}/te_fp4"])
        same_bytes(as_bytes(got["block_scale"]), stored(spec, byte))


def elementwise(level, function, *arrays):
    """Return function(*elements) of float32 arrays [n], compiled for ``level``."""
    size, count = len(arrays[0]), len(arrays)

    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((count, size), "float32"), y: T.Buffer((size,), "float32")):
        for i in range(size):
            with T.sblock("element"):
                vi = T.axis.spatial(size, i)
                y[vi] = function(*[x[j, vi] for j in range(count)])

    out = tvm.runtime.tensor(np.full(size, np.nan, np.float32))
    given = tvm.runtime.tensor(np.stack(arrays).astype(np.float32))
    tvm.compile(main, target=catalog.target(level))["main"](given, out)
    return out.numpy()


@pytest.mark.parametrize("level", LEVELS)
def test_exp(level):
    """Within 2 units in the last place of float32, to the ends of the range."""
    needs(level)
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-104, 89, 40001), rng.standard_normal(9999)])
    x = np.concatenate([x, [0.0, -0.0, np.inf, -np.inf, 88.72, -87.4, 1e-30, 200.0, -200.0]])
    x = x.astype(np.float32)
    got = elementwise(level, activations.exp, x)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.exp(x.astype(np.float64))
        unit = np.spacing(np.minimum(exact, np.finfo(np.float32).max).astype(np.float32))
        error = np.abs(got.astype(np.float64) - exact) / unit
        assert (np.where(exact.astype(np.float32) == got, 0.0, error) <= 2).all()


@pytest.mark.parametrize("level", ["avx2", "plain"])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "swiglu"])
def test_activation(name, level):
    """Before it is rounded to 16 bits: within the margin that the other tests assume.

    Where the result is below 1e-9, its exponent t may be below -20, and more than 16 units off.
    """
    needs(level)
    rng = np.random.default_rng(0)
    gate, up = (rng.standard_normal((2, 20000)) * 3).astype(np.float32)
    numbers = (1.702, 1.0, 7.0)
    constants = [tvm.tirx.const(number, "float32") for number in numbers]
    got = elementwise(level, lambda g, u: activations.gated(name, g, u, constants), gate, up)
    exact = fused.activation(name, gate, up, tuple(np.float32(number) for number in numbers))
    assert (np.abs(got - exact) <= MARGIN * np.abs(exact) + 1e-12).all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ActQuantize("relu"), r"activation='relu' is not known"),
        (lambda: ActQuantize("none"), r"'none' with convention='divide' is what Quantize does"),
        (lambda: ActQuantize(block_size=16, scale_format="ue8m0"), r"'ue8m0' does not go with"),
        (lambda: ActQuantize(grouped=True), r"layout='linear' does not go with grouped=True"),
        (lambda: ActQuantize(layout="both"), r"layout='both' is not known"),
        (lambda: ActQuantize(dtype="float32"), r"dtype='float32' is not known"),
    ],
)
def test_bad_spec(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_names():
    """Every option is in the name, and the name says it all; Quantize keeps its own names."""
    for _, _, name in CASES:
        spec = Spec.parse(name)
        assert spec.name == name
        assert Spec.from_json(spec.to_json()) == spec
    assert Spec.parse("quantize_nvfp4_128x4_bf16").op == "quantize"
    with pytest.raises(ValueError, match="layout='linear' does not go with grouped=True"):
        Spec.parse("silu_and_mul_nvfp4_grouped_bf16")
