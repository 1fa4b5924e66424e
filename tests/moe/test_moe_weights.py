"""Prepared weights of MoE layers: every byte of layout "tiles64", and the way back.

The layout is written out once more, element by element, in `slow_codes` and the ``slow_*_scales``.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.ops.moe import tiles as moe_tiles
from blockscale.ops.moe.tiles import K_ORDER, natural_order, paired_order
from blockscale.specs import FusedMoe
from tests.kit.helpers import rejects, same_bytes
from tests.kit.tiles64 import BITS, slow_natural, slow_position
from tests.reference import core as ref
from tests.reference import moe as moe

CASES = {
    "nvfp4": ("nvfp4", 16, False),
    "mxfp4": ("mxfp4", 32, False),
    "int4 32": ("int4", 32, False),
    "int4 32 zeros": ("int4", 32, True),
    "int4 64": ("int4", 64, True),
    "int4 128": ("int4", 128, False),
    "int4 128 zeros": ("int4", 128, True),
}
each_case = pytest.mark.parametrize("case", CASES)


def layer(case, experts=2, hidden=96, intermediate=160, **options):
    """Return a random layer of a case; K is no multiple of 64 where the group allows that."""
    fmt, group, zeros = CASES[case]
    hidden, intermediate = (-(-size // group) * group for size in (hidden, intermediate))
    options.setdefault("scale_dtype", "bfloat16")
    return moe.random_layer(experts, hidden, intermediate, fmt, group=group, zeros=zeros, **options)


def given(made, **changes):
    """Return the arguments of prepare_moe_weights."""
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    names += ("w13_bias", "w2_bias", "w13_zero", "w2_zero")
    values = {name: getattr(made, name) for name in names}
    tensors = {n: torch.from_numpy(v) for n, v in values.items() if v is not None}
    return tensors | {"fmt": made.fmt, "activation": made.activation} | changes


def tiles(made, **changes):
    return bs.prepare_moe_weights(**given(made, layout="tiles64", **changes))


# ---- The layout, slowly -------------------------------------------------------------------------


def slow_order(rows, intermediate, activation, which):
    """Return the matrix's row of each row of the layout, -1 for padding."""
    if which == "w2":
        found = [slow_natural(at) for at in range(-(-rows // 64) * 64)]
        return [row if row < rows else -1 for row in found]
    order, gated = [], activation != "relu2"
    for at in range(-(-intermediate // 64) * (128 if gated else 64)):
        p, up = slow_position(at, gated)
        j, s = p % 64 // 16, p % 16
        within = 16 * (s // 2) + 4 * j + s % 2
        if s >= 8:
            within = 16 * ((s - 8) // 2) + 4 * j + 2 + s % 2
        c = p // 64 * 64 + within
        order.append(-1 if c >= intermediate else c + (intermediate if up else 0))
    return order


def slow_codes(codes, kind):
    """Return [R / 64, K / 64, 4, 32, 4] words of codes [R, K], whole blocks."""
    row, k = np.indices(codes.shape)
    words = np.zeros((len(codes) // 64, codes.shape[1] // 64, 4, 32, 4), np.uint32)
    m, high, g = row % 64 // 16, row % 16 // 8, row % 8
    t, j, i = k % 64 // 16, k % 16 // 4, k % 4
    slot = high + 2 * (i // 2)  # a0..a3
    places = np.array([[BITS[kind][a][bit] for bit in range(4)] for a in range(4)])
    for bit in range(4):
        value = (codes >> bit & 1).astype(np.uint32) << (16 * (i % 2) + places[slot, bit])
        np.bitwise_or.at(words, (row // 64, k // 64, m, 4 * g + t, j), value.astype(np.uint32))
    return words


def slow_nvfp4_scales(byte):
    """Return [R / 64, K / 64, 4, 32, 2] of E4M3 bytes [R, K / 16]."""
    rows, blocks = byte.shape
    out = np.zeros((rows // 64, blocks // 4, 4, 32, 2), np.uint8)
    for row in range(rows):
        for b in range(blocks):
            value = ref.e4m3_decode(byte[row : row + 1, b])[0]
            code = 0x20
            if value:
                mantissa, exponent = np.frexp(value)  # 0.5 <= mantissa < 1
                code = (int(exponent) - 1 + 13) * 8 + int(mantissa * 16) - 8
            out[row // 64, b // 4, row % 64 // 16, 4 * (row % 8) + b % 4, row % 16 // 8] = code
    return out


def slow_mxfp4_scales(byte, top):
    """Return [R / 64, K / 64, 4, 8, 2, 2]; -1: padding."""
    rows, blocks = byte.shape
    out = np.zeros((rows // 64, blocks // 2, 4, 8, 2, 2), np.uint8)
    for row in range(rows):
        for b in range(blocks):
            code = 0 if byte[row, b] < 0 else min(max(int(byte[row, b]) - top + 237, 0), 237)
            out[row // 64, b // 2, row % 64 // 16, row % 8, b % 2, row % 16 // 8] = code
    return out


def slow_int4_scales(scale, zero, group):
    """Return [R / 64, blocks, 4, 8, halves, 2, parts] float64."""
    rows, blocks = scale.shape
    halves = 2 if group == 32 else 1
    parts = 1 if zero is None else 2
    out = np.zeros((rows // 64, blocks // halves, 4, 8, halves, 2, parts))
    for row in range(rows):
        for b in range(blocks):
            place = row // 64, b // halves, row % 64 // 16, row % 8, b % halves, row % 16 // 8
            out[(*place, 0)] = scale[row, b]
            if zero is not None:
                out[(*place, 1)] = zero[row, b]
    return out


def padded(value, order, cols, fill):
    """Return rows ``order`` of ``value``, and columns of ``fill`` behind, as int or float."""
    kind = np.float64 if value.dtype.kind == "f" else np.int64
    out = np.full((len(order), cols), fill, kind)
    for at, row in enumerate(order):
        if row >= 0:
            out[at, : value.shape[1]] = value[row]
    return out


def expected(made, which, e):
    """Return bytes of codes and scales of one expert's matrix."""
    fmt, packed = made.fmt, getattr(made, which)[e]
    scale, zero = getattr(made, f"{which}_scale")[e], getattr(made, f"{which}_zero")
    order = slow_order(len(packed), made.w2.shape[2] * 2, made.activation, which)
    depth = -(-packed.shape[1] * 2 // 64) * 64
    group = packed.shape[1] * 2 // scale.shape[1]
    codes = padded(ref.unpack(packed), order, depth, 8 if fmt == "int4" else 0)
    if fmt == "int4":
        wide = padded(scale, order, depth // group, 0.0)
        zeros = None if zero is None else padded(zero[e], order, depth // group, 8)
        values = torch.from_numpy(slow_int4_scales(wide, zeros, group)).to(torch.bfloat16)
        return slow_codes(codes, "int4").view(np.uint8), values.view(torch.uint8).numpy()
    byte = padded(scale, order, depth // group, 0 if fmt == "nvfp4" else -1)
    top = int(getattr(made, f"{which}_scale")[e].max())
    dead = byte <= 0 if fmt == "nvfp4" else (byte < 0) | (byte - top + 237 <= 0)
    codes = np.where(np.repeat(dead, group, 1), 0, codes)
    if fmt == "nvfp4":
        scales = slow_nvfp4_scales(byte.astype(np.uint8))
    else:
        scales = slow_mxfp4_scales(byte, top)
    return slow_codes(codes, "e2m1").view(np.uint8), scales


@each_case
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_every_byte(case, activation):
    """Codes and scales of both weights, ragged sizes, are where the layout says."""
    made = layer(case, activation=activation, experts=2)
    if made.fmt != "int4":
        extremes = [0, 1, 7, 8, 0x7E] if made.fmt == "nvfp4" else [0, 1, 16, 17, 254]
        made.w13_scale[1].flat[: len(extremes)] = extremes
        made.w2_scale[0].flat[-len(extremes) :] = extremes
    weights = tiles(made)
    for which in ("w13", "w2"):
        for e in range(made.experts):
            codes, scales = expected(made, which, e)
            got = getattr(weights, which)[e].numpy()
            same_bytes(got.reshape(-1), codes.reshape(-1))
            same_bytes(
                getattr(weights, f"{which}_scale")[e].numpy().reshape(-1), scales.reshape(-1)
            )


def test_k_order_is_what_the_mma_multiplies():
    """Position 16 j + 2 t + b (+ 8) of an operand's K is in lane t, k16 step j."""
    assert sorted(K_ORDER) == list(range(64))
    for p, channel in enumerate(K_ORDER):
        j, t, low, high = p // 16, p % 8 // 2, p % 2, p % 16 // 8
        assert channel == 16 * t + 4 * j + 2 * high + low


def test_orders_of_rows():
    """Layout rows of GEMM 1 are of its output positions, in `K_ORDER`; those of w2 natural."""
    for gated in (True, False):
        order = paired_order(128, gated).tolist()
        assert len(order) == 128 * (1 + gated)
        for at, row in enumerate(order):
            p, up = slow_position(at, gated)
            assert row == p // 64 * 64 + K_ORDER[p % 64] + 128 * up
    assert natural_order(128).tolist() == [slow_natural(at) for at in range(128)]
    assert natural_order(3).tolist() == [0, 1, *[-1] * 6, 2, *[-1] * 55]


# ---- Values -------------------------------------------------------------------------------------


def dense(weights):
    """Return both weights of layout "linear" in float64, by the reference."""
    arrays = {name: value.numpy() for name, value in weights.tensors()}
    pairs = []
    for name in ("w13", "w2"):
        scale, zero, factor = (
            arrays[f"{name}_scale"], arrays.get(f"{name}_zero"), arrays[f"{name}_global"]
        )  # fmt: skip
        if factor.ndim == 2 and not weights.gated:
            factor = factor[:, 0]
        pairs.append(moe.expert_weight(arrays[name], scale, weights.fmt, zero, factor))
    return pairs


@each_case
@pytest.mark.parametrize("activation", ["swiglu_oai", "relu2"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_way_back(case, activation, bias):
    """to_linear() of both layouts has exactly the values that were given."""
    made = layer(case, experts=3, activation=activation, bias=bias)
    truth = made.dense()
    for weights in (bs.prepare_moe_weights(**given(made)), tiles(made).to_linear()):
        assert weights.layout == "linear"
        for got, want in zip(dense(weights), truth, strict=True):
            assert (got == want).all()
        for name in ("w13_bias", "w2_bias"):
            wanted = getattr(made, name)
            assert (getattr(weights, name) is None) == (wanted is None)
            if bias:
                assert (getattr(weights, name).numpy() == wanted).all()


def test_every_code_and_scale_comes_back():
    """All 16 codes at all scales that are allowed, those of zero as zero."""
    byte = np.arange(128, dtype=np.uint8).reshape(1, 16, 8)
    byte[0, 15, 7] = 0  # 0x7F is NaN
    packed = ref.pack(np.tile(np.arange(16, dtype=np.uint8), (1, 16, 8)))
    w13, scale = torch.from_numpy(packed), torch.from_numpy(byte)
    w2, w2_scale = torch.zeros(1, 128, 8).byte(), torch.zeros(1, 128, 1).byte()
    weights = bs.prepare_moe_weights(
        w13, w2, w13_scale=scale, w2_scale=w2_scale, activation="relu2", layout="tiles64"
    )
    assert (dense(weights.to_linear())[0] == moe.block_weight(packed, byte, "nvfp4")).all()


def test_mxfp4_scales_far_apart():
    """Scales from 2^-117 to 2^83 of one expert come back, below 127 of its largest too."""
    made = layer("mxfp4", activation="relu2")
    made.w13_scale[0, :3, 0] = 10, 150, 210
    made.w2_scale[1, :2, 0] = 1, 230
    for got, want in zip(dense(tiles(made).to_linear()), made.dense(), strict=True):
        assert (got == want).all()


def test_mxfp4_global_scale():
    """Scales are relative to an expert's largest, which is in the global scale."""
    made = layer("mxfp4")
    made.w13_scale[0, 3, 1] = 200
    weights = tiles(made)
    assert weights.w13_global[0].tolist() == [2.0 ** (200 - 127)] * 2
    assert weights.w13_global[1, 0] == 2.0 ** (int(made.w13_scale[1].max()) - 127)
    assert int(weights.w13_scale[0].max()) == 237


def test_signed_codes():
    """Two's complement codes are the unsigned ones ^ 8."""
    made = layer("int4 128")
    signed = given(made) | {"w13": torch.from_numpy(made.w13 ^ 0x88)}
    signed["w2"] = torch.from_numpy(made.w2 ^ 0x88)
    weights = bs.prepare_moe_weights(**signed, int4_signed=True)
    same_bytes(weights.w13.numpy(), made.w13)
    same_bytes(weights.w2.numpy(), made.w2)


@each_case
@pytest.mark.parametrize("layout", ["linear", "tiles64"])
def test_shapes_are_those_of_the_spec(case, layout):
    """The tensors are the parameters of the exported function, in order."""
    made = layer(case, bias=True)
    weights = bs.prepare_moe_weights(**given(made, layout=layout))
    spec = FusedMoe(
        weights.experts, weights.hidden, weights.intermediate, 2, weights.fmt, weights.group,
        zero=weights.zero, bias=weights.bias, layout=layout,
    )  # fmt: skip
    params = [p for p in spec.params() if p.name.startswith("w")][: len(dict(weights.tensors()))]
    assert [p.name for p in params] == [name for name, _ in weights.tensors()]
    for param, (_, value) in zip(params, weights.tensors(), strict=True):
        assert param.shape == tuple(value.shape)
        assert param.dtype == str(value.dtype).removeprefix("torch.")


def test_large_matrices_are_converted_in_parts(monkeypatch):
    """The parts' borders do not show."""
    made = layer("nvfp4", intermediate=320)
    whole = tiles(made)
    monkeypatch.setattr(moe_tiles, "AT_ONCE", 64 * 128)
    parts = tiles(made)
    for (_, a), (_, b) in zip(whole.tensors(), parts.tensors(), strict=True):
        assert torch.equal(a, b)


@each_case
def test_state_dict(case, tmp_path):
    """Saved and loaded, they are the same."""
    for layout in ("linear", "tiles64"):
        weights = bs.prepare_moe_weights(**given(layer(case), layout=layout))
        torch.save(weights.state_dict(), tmp_path / "w.pt")
        again = bs.MoeWeights.load_state_dict(torch.load(tmp_path / "w.pt"))
        assert again.meta() == weights.meta()
        for (a, x), (b, y) in zip(weights.tensors(), again.tensors(), strict=True):
            assert a == b
            assert torch.equal(x, y)


def test_a_missing_bias_is_zero():
    """One bias is enough for both to be there."""
    made = layer("nvfp4", bias=True)
    arguments = given(made)
    del arguments["w13_bias"]
    weights = bs.prepare_moe_weights(**arguments)
    assert not weights.w13_bias.any()
    assert weights.w2_bias.any()
    assert weights.bias


# ---- What is refused ----------------------------------------------------------------------------

NVFP4, INT4 = layer("nvfp4"), layer("int4 128 zeros")


def prepare(made=NVFP4, **changes):
    return bs.prepare_moe_weights(**given(made, **changes))


ZERO = torch.zeros_like(torch.from_numpy(INT4.w13_zero))
REFUSED = [
    (lambda: prepare(fmt="fp4"), ["fmt='fp4'", "nvfp4", "int4"]),
    (lambda: prepare(activation="silu"), ["activation='silu'", "swiglu"]),
    (lambda: prepare(w13=[1]), ["w13 is a list", "tensor"]),
    (lambda: prepare(w13=torch.zeros(2, 3)), ["w13", "float32", "uint8"]),
    (lambda: prepare(w13=torch.zeros(2, 48, dtype=torch.uint8)), ["w13", "3 dimensions"]),
    (
        lambda: prepare(w13=torch.zeros(2, 5, 48, dtype=torch.uint8)),
        ["w13 has 5 rows", "gate", "relu2"],
    ),
    (lambda: prepare(activation="relu2"), ["w13 has gate rows", r"\[2, 320, 48\]", "activation"]),
    (lambda: prepare(w2_scale=torch.zeros(2, 96, 3)), ["w2_scale", "float32", "float8_e4m3fn"]),
    (
        lambda: prepare(w13_scale=torch.zeros(2, 320, 7, dtype=torch.uint8)),
        ["w13_scale", r"\[2, 320, 7\]", r"\[2, 320, 6\]"],
    ),
    (lambda: prepare(group_size=32), ["group_size=32", "nvfp4", "16"]),
    (lambda: prepare(w13_zero=ZERO), ["w13_zero", "no zero points", "int4"]),
    (lambda: prepare(int4_signed=True), ["int4_signed", "nvfp4"]),
    (
        lambda: prepare(w13_global_scale=torch.ones(3)),
        ["w13_global_scale", r"\[3\]", r"\[2\] or \[2, 2\]"],
    ),
    (lambda: prepare(w2_global_scale=torch.ones(2, 2)), ["w2_global_scale", r"\[2\]"]),
    (lambda: prepare(w2_bias=torch.ones(2, 95)), ["w2_bias", r"\[2, 96\]"]),
    (lambda: prepare(dtype=torch.int8), ["dtype=torch.int8", "bfloat16"]),
    (lambda: prepare(layout="tiles"), ["layout='tiles'", "tiles64"]),
    (lambda: prepare(layout="tiles64", dtype=torch.float32), ["float32", "bfloat16", "CUDA"]),
    (lambda: prepare(INT4, w2_zero=None), ["w2_zero is missing", "8"]),
    (lambda: prepare(INT4, int4_signed=True), ["int4_signed", "0x88"]),
    (
        lambda: prepare(INT4, w13_scale=torch.ones(2, 320, 7)),
        ["w13_scale", r"\[2, 320, 7\]", "groups of 32 or 64 or 128"],
    ),
    (lambda: prepare(INT4, group_size=48), ["group_size=48", "32, 64, 128"]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number):
    """Errors say where, what, the rule and the remedy."""
    call, words = REFUSED[number]
    with rejects("prepare_moe_weights", *words):
        call()


@pytest.mark.parametrize(
    ("fmt", "byte", "words"),
    [("nvfp4", 0x7F, "NaN"), ("nvfp4", 0x81, "below zero"), ("mxfp4", 255, "NaN")],
)
def test_scales_that_no_kernel_decodes(fmt, byte, words):
    """They are found while converting, with their expert."""
    made = layer(fmt)
    made.w2_scale[1, 5, 2] = byte
    with rejects("w2_scale of expert 1", hex(byte), words):
        tiles(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -40000.0])
def test_int4_scales_that_overflow_in_kernels(dtype, scale):
    """Of any group of any expert; the CPU's layout keeps them."""
    made = layer("int4 128")
    made.w2_scale[1, 5, 0] = scale
    with rejects("w2_scale of expert 1", "magnitude", "below"):
        tiles(made, dtype=dtype)
    assert bs.prepare_moe_weights(**given(made, layout="linear")).layout == "linear"


def test_more_experts_than_tables_hold():
    """The limit is that of the specs."""
    codes = torch.zeros(1025, 16, 8, dtype=torch.uint8)
    scale = torch.zeros(1025, 16, 1, dtype=torch.uint8)
    with rejects("1025 experts", "1024"):
        bs.prepare_moe_weights(codes, codes, activation="relu2", w13_scale=scale, w2_scale=scale)
