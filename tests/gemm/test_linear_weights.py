"""Prepared weights of linear layers: what layout "tiles64" holds, the way back, what is refused.

The layout is read element by element, by the second definition of `tests.kit.tiles64`.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.ops.linear import weights as weights_of_linear
from blockscale.ops.moe.tiles import gated_order
from blockscale.specs import Linear
from tests.kit.helpers import rejects, scale_tensor
from tests.kit.pairwise import pairs
from tests.kit.tiles64 import slow_position, weight_of
from tests.reference import core as ref
from tests.reference import moe

CASES = {
    "nvfp4": ("nvfp4", 16, False),
    "mxfp4": ("mxfp4", 32, False),
    "int4 32": ("int4", 32, False),
    "int4 32 zeros": ("int4", 32, True),
    "int4 64": ("int4", 64, False),
    "int4 64 zeros": ("int4", 64, True),
    "int4 128": ("int4", 128, False),
    "int4 128 zeros": ("int4", 128, True),
    "int4 96 zeros": ("int4", 96, True),
    "int4 256": ("int4", 256, False),
}
GATED = np.float32([0.37, 2.5])


def arrays(case, n, blocks, seed=0):
    """Return a random weight of so many blocks of K: fmt, codes, scales, zeros."""
    fmt, group, zeros = CASES[case]
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, group * blocks // 2), dtype=np.uint8)
    if fmt == "int4":  # scales are bfloat16 numbers, which a layout does not round
        scale = ref.round_to(rng.uniform(0.01, 0.1, (n, blocks)), "bfloat16")
        return fmt, packed, scale, rng.integers(0, 16, (n, blocks), np.uint8) if zeros else None
    low, high = (0, 0x7F) if fmt == "nvfp4" else (100, 140)
    return fmt, packed, rng.integers(low, high, (n, blocks), dtype=np.uint8), None


def dense(fmt, packed, scale, zero, factors=(1.0,)):
    """Return the weight in float64; two factors are of gates and of ups."""
    if fmt == "int4":
        w = moe.int4_weight(packed, scale, zero)
    else:
        w = moe.block_weight(packed, scale, fmt)
    return w * np.repeat(np.asarray(factors, np.float64), len(w) // len(factors))[:, None]


def given(fmt, packed, scale, zero, **options):
    """Return the arguments of prepare_linear_weights."""
    scales = torch.from_numpy(scale) if fmt == "int4" else scale_tensor(scale, fmt)
    points = None if zero is None else torch.from_numpy(zero)
    tensors = {"packed": torch.from_numpy(packed), "block_scale": scales, "zero": points}
    return {**tensors, "fmt": fmt, **options}


def prepare(case, n, blocks, layout, **options):
    return bs.prepare_linear_weights(**given(*arrays(case, n, blocks), layout=layout, **options))


@pairs(case=list(CASES), gated=[False, True], size=[(6, 1), (70, 3), (128, 4)])
def test_tiles(case, gated, size):
    """Every element and global scale is where the layout says; padding is zero; and back."""
    made, factors = arrays(case, *size), GATED if gated else GATED[:1]
    bias = np.arange(size[0], dtype=np.float32)
    options = {"gated": gated, "global_scale": torch.from_numpy(factors)}
    options |= {"bias": torch.from_numpy(bias).bfloat16()}
    tiles = bs.prepare_linear_weights(**given(*made, layout="tiles64", **options))
    want = dense(*made, factors)
    assert (weight_of(tiles) == want).all()
    assert (tiles.bias.numpy() == bias).all()
    assert tiles.bias.dtype == torch.float32
    assert tiles.n, tiles.k == (size[0], 2 * made[1].shape[1])
    back = tiles.to_linear()
    plain = bs.prepare_linear_weights(**given(*made, layout="linear", **options))
    assert back.meta() == plain.meta()
    assert torch.equal(back.bias, plain.bias)
    if made[0] == "int4":
        for name in ("packed", "block_scale", "zero"):
            a, b = getattr(back, name), getattr(plain, name)
            assert a is b is None or torch.equal(a, b), name
    else:
        again = dense(made[0], back.packed.numpy(), back.block_scale.numpy(), None)
        count = len(factors)
        gains = np.repeat(back.global_scale.double().numpy(), size[0] // count)
        assert (again * gains[:, None] == want).all()


def spread(n, k, apart, seed=0):
    """Return a random MXFP4 weight, each of whose rows has blocks so many exponents apart."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    top = rng.integers(40, 180, (n, 1))
    scale = top - rng.integers(0, apart + 1, (n, k // 32))
    scale[:, :1], scale[:, 1:2] = top, top - apart
    packed.reshape(n, k // 32, 16)[::3, 2] &= 0x88  # of zeros, some of them negative
    scale[::3, 2] = rng.integers(0, 255, scale[::3, 2].shape)
    packed[5] = 0
    return "mxfp4", packed, scale.astype(np.uint8), None


@pairs(
    legal=lambda factors, gated, **_: (factors == 2) == gated,
    apart=[0, 11],
    factors=[1, 2, 70],
    gated=[False, True],
    k=[96, 320],
)
def test_rows_that_become_e4m3(apart, factors, gated, k):
    """Layout tiles64e: every element, a factor of each row, and back."""
    made = spread(70, k, apart)
    gains = np.random.default_rng(1).uniform(0.5, 2, factors).astype(np.float32)
    options = {"gated": gated, "global_scale": torch.from_numpy(gains)}
    tiles = bs.prepare_linear_weights(**given(*made, layout="tiles64e", **options))
    assert tiles.layout == "tiles64e"
    want = dense(*made, gains)
    assert np.allclose(weight_of(tiles), want, rtol=1e-7, atol=0)  # a factor is rounded once
    params = Linear(70, k, "mxfp4", "bfloat16", layout="tiles64e", act_fmt="fp8", gated=gated,
                    activation="silu").params()  # fmt: skip
    shapes = {param.name: param.shape for param in params}
    for name, value in tiles.tensors():
        assert shapes[name] == tuple(value.shape)
    back = bs.LinearWeights.load_state_dict(tiles.state_dict()).to_linear()
    assert (back.layout, back.global_scale.numel()) == ("linear", factors)
    again = dense("mxfp4", back.packed.numpy(), back.block_scale.numpy(), None,
                  back.global_scale.double().numpy())  # fmt: skip
    assert np.allclose(again, want, rtol=1e-6, atol=0)


@pairs(
    legal=lambda factors, gated, **_: (factors == 2) == gated,
    factors=[1, 2, 70],
    gated=[False, True],
    k=[96, 336],
)
def test_rows_that_are_rounded(factors, gated, k):
    """NVFP4 in layout tiles64e: every element, and back to what was rounded."""
    rng = np.random.default_rng(factors + k)
    packed = rng.integers(0, 256, (70, k // 2), dtype=np.uint8)
    scale = rng.integers(0x18, 0x7F, (70, k // 16), dtype=np.uint8)
    scale[:, 1] = 0
    packed[5] = 0
    gains = rng.uniform(0.5, 2, factors).astype(np.float32)
    options = {"gated": gated, "global_scale": torch.from_numpy(gains), "act_fmt": "fp8"}
    asked = {**options, "layout": "tiles64e", "rounded": True}
    with pytest.warns(UserWarning, match=r"E4M3 has changed the weight by \d\.\d\d% of"):
        tiles = bs.prepare_linear_weights(**given("nvfp4", packed, scale, None, **asked))
    each = np.repeat(gains.astype(np.float64), 70 // factors)[:, None]
    want = ref.rounded_weight(ref.unpack(packed), scale) * each
    assert np.allclose(weight_of(tiles), want, rtol=1e-7, atol=0)  # a factor is rounded once
    exact = dense("nvfp4", packed, scale, None, gains)
    gap = np.linalg.norm(want - exact) / np.linalg.norm(exact)
    assert np.allclose(tiles.added_error, (gap,), rtol=1e-5)
    params = Linear(70, k, "nvfp4", "bfloat16", layout="tiles64e", act_fmt="fp8", gated=gated,
                    activation="silu").params()  # fmt: skip
    shapes = {param.name: param.shape for param in params}
    for name, value in tiles.tensors():
        assert shapes[name] == tuple(value.shape)
    again = bs.LinearWeights.load_state_dict(tiles.state_dict())
    assert again.added_error == tiles.added_error
    assert again.facts == tiles.facts
    back = again.to_linear()
    assert (back.layout, back.added_error, back.global_scale.numel()) == ("linear", None, factors)
    found = dense("nvfp4", back.packed.numpy(), back.block_scale.numpy(), None,
                  back.global_scale.double().numpy())  # fmt: skip
    tiny = np.repeat(scale < scale.max(1, keepdims=True) - 8 * 10, 16, 1)
    assert np.allclose(found[~tiny], exact[~tiny], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rounded": False}, ["nvfp4 ones with rounded=True"]),
        ({"layout": None}, ["rounded=True", "on the CPU", "layout='tiles64e'"]),
        ({"act_fmt": "nvfp4"}, ["act_fmt='nvfp4' has no products of 8 bits", "act_fmt='fp8'"]),
        ({"layout": "128x4"}, ["layout='128x4' holds exact weights"]),
    ],
)
def test_weights_are_rounded_only_if_asked_for(changes, said):
    packed, scale = np.zeros((8, 16), np.uint8), np.full((8, 2), 0x38, np.uint8)
    options = {"layout": "tiles64e", "act_fmt": "fp8", "rounded": True, **changes}
    with rejects(*said):
        bs.prepare_linear_weights(**given("nvfp4", packed, scale, None, **options))


@pairs(group=[64, 128], zeros=[False, True], gated=[False, True], dtype=["bfloat16", "float16"])
def test_int4_rows_that_become_e4m3(group, zeros, gated, dtype):
    """Layout tiles64e: every element, scales in bfloat16 whatever x is, and back."""
    rng, (n, k) = np.random.default_rng(group), (70, 384)
    codes = torch.from_numpy(rng.integers(0, 256, (n, k // 2)).astype(np.uint8))
    scale = torch.from_numpy(rng.uniform(-1, 1, (n, k // group)).astype(np.float32))
    zero = torch.from_numpy(rng.integers(0, 17, (n, k // group))) if zeros else None
    gains = torch.tensor([0.5, 3.0][: 1 + gated])
    made = bs.prepare_linear_weights(
        codes, scale, fmt="int4", zero=zero, gated=gated, global_scale=gains,
        dtype=getattr(torch, dtype), layout="tiles64e",
    )  # fmt: skip
    assert (made.layout, made.dtype) == ("tiles64e", None)
    plain = torch.stack((codes & 15, codes >> 4), -1).view(n, -1, group).double()
    points = 8 if zero is None else zero[..., None].double()
    value = ((plain - points) * scale.bfloat16().double()[..., None]).view(n, k)
    value *= gains.double().repeat_interleave(n // len(gains))[:, None]
    assert (weight_of(made) == value.numpy()).all()
    params = Linear(n, k, "int4", dtype, group, zeros, "tiles64e", act_fmt="fp8", gated=gated,
                    activation="silu" if gated else "none").params()  # fmt: skip
    shapes = {param.name: param.shape for param in params}
    for name, held in made.tensors():
        assert shapes[name] == tuple(held.shape)
    back = bs.LinearWeights.load_state_dict(made.state_dict()).to_linear()
    want = bs.prepare_linear_weights(
        codes, scale.bfloat16(), fmt="int4", zero=zero, gated=gated, global_scale=gains,
        layout="linear",
    )  # fmt: skip
    for (name, held), (other, wanted) in zip(back.tensors(), want.tensors(), strict=True):
        assert name == other
        assert torch.equal(held, wanted), name


def test_int4_that_it_does_not_hold():
    codes, scale = torch.zeros((8, 64), dtype=torch.uint8), torch.ones((8, 4))
    with rejects("not for int4 in groups of 32", "leave layout out"):
        bs.prepare_linear_weights(codes, scale, fmt="int4", layout="tiles64e")


def test_exponents_too_far_apart():
    """An error where the layout is asked for; else a warning, and the layout of 16 bits."""
    made = spread(70, 96, 12)
    with rejects("block_scale of row", "exponents 12 apart", "leave layout out"):
        bs.prepare_linear_weights(**given(*made, layout="tiles64e"))
    plain = bs.prepare_linear_weights(**given(*made, layout="linear"))
    with pytest.warns(UserWarning, match="at most 11 apart.*'tiles64', for products of 16 bits"):
        assert weights_of_linear._to_rows("here", plain, must=False) is None


@pytest.mark.parametrize(
    ("fmt", "act_fmt", "layout", "on_cpu", "want"),
    [
        ("mxfp4", "fp8", None, True, ("linear", False)),
        ("nvfp4", "nvfp4", None, True, ("128x4", False)),
        ("mxfp4", "fp8", None, False, ("tiles64e", True)),
        ("mxfp4", "fp8", "tiles64e", False, ("tiles64e", False)),
        ("mxfp4", "fp8", "tiles64", False, ("tiles64", False)),
        ("mxfp4", None, None, False, ("tiles64", False)),
        ("nvfp4", "fp8", None, False, ("tiles64", False)),
        ("int4", "fp8", None, False, ("tiles64e", True)),
        ("int4 64", "fp8", None, False, ("tiles64", False)),
        ("int4 64", "fp8", "tiles64e", False, ("tiles64e", False)),
        ("int4", None, None, False, ("tiles64", False)),
    ],
)
def test_act_fmt_asks_for_a_layout(fmt, act_fmt, layout, on_cpu, want):
    """Of a CPU for none but that of nvfp4; elsewhere of what 8 bits are faster of."""
    group = {"mxfp4": 32, "nvfp4": 16, "int4": 128, "int4 64": 64}[fmt]
    form = fmt.removesuffix(" 64"), group
    assert weights_of_linear._layout(form, act_fmt, layout, on_cpu) == want
    if on_cpu:
        assert prepare(fmt, 8, 2, layout, act_fmt=act_fmt).layout == want[0]


def test_gated_order():
    """A tile of 16 rows is the gates of 8 columns and then their ups."""
    order = gated_order(72).tolist()
    assert len(order) == 256
    for at, row in enumerate(order):
        p, up = slow_position(at, True)
        assert row == (p + 72 * up if p < 72 else -1)
    for tile in range(0, 144, 16):
        gates = [row for row in order[tile : tile + 8] if row >= 0]
        assert [row + 72 for row in gates] == [r for r in order[tile + 8 : tile + 16] if r >= 0]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_the_spec(case, gated):
    """The tensors are the parameters of the exported function, in order."""
    weights = prepare(case, 70, 2, "tiles64", gated=gated, bias=torch.zeros(70))
    spec = Linear(
        *(70, weights.k, weights.fmt, "bfloat16", weights.group, weights.zeros, "tiles64"),
        *("silu", gated),
    )
    params = {param.name: param for param in spec.params()}
    for name, value in weights.tensors():
        assert params[name].shape == tuple(value.shape)
        assert params[name].dtype == str(value.dtype).removeprefix("torch.")


def test_one_global_scale_of_both_halves():
    """Gates and ups each have it; without one it is 1."""
    for layout in ("linear", "tiles64"):
        one = prepare("nvfp4", 8, 2, layout, gated=True, global_scale=torch.tensor(0.5))
        assert one.global_scale.tolist() == [0.5, 0.5]
        assert prepare("nvfp4", 8, 2, layout, gated=True).global_scale.tolist() == [1.0, 1.0]
        assert prepare("nvfp4", 8, 2, layout).global_scale.tolist() == [1.0]


def test_signed_codes():
    """Two's complement codes are the unsigned ones ^ 8."""
    fmt, packed, scale, _ = arrays("int4 64", 8, 2)
    for layout in ("linear", "tiles64"):
        plain = bs.prepare_linear_weights(**given(fmt, packed, scale, None, layout=layout))
        signed = bs.prepare_linear_weights(
            **given(fmt, packed ^ 0x88, scale, None, layout=layout, int4_signed=True)
        )
        assert torch.equal(plain.packed, signed.packed)


def test_scales_128x4():
    """Codes stay, scales are swizzled; and back."""
    _, packed, scale, _ = arrays("nvfp4", 72, 4)
    weights = prepare("nvfp4", 72, 4, "128x4")
    assert (weights.packed.numpy() == packed).all()
    assert (weights.block_scale.numpy() == ref.swizzle(scale)).all()
    assert (weights.to_linear().block_scale.numpy() == scale).all()


@pytest.mark.parametrize("layout", ["linear", "tiles64", "128x4"])
@pytest.mark.parametrize("case", ["nvfp4", "int4 32 zeros"])
def test_state_dict(case, layout, tmp_path):
    """Saved and loaded, they are the same; nbytes and device are those of the tensors."""
    if (case, layout) == ("int4 32 zeros", "128x4"):
        with rejects("layout='128x4'", "int4"):
            prepare(case, 72, 4, layout)
        return
    weights = prepare(case, 72, 4, layout, bias=torch.ones(72))
    torch.save(weights.state_dict(), tmp_path / "w.pt")
    again = bs.LinearWeights.load_state_dict(torch.load(tmp_path / "w.pt"))
    assert again.meta() == weights.meta()
    pairs_of = zip(weights.tensors(), again.to("cpu").tensors(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs_of)
    assert weights.nbytes == sum(value.nbytes for _, value in weights.tensors())
    assert weights.device == torch.device("cpu")


FP4, INT4 = arrays("nvfp4", 8, 2), arrays("int4 64", 8, 2)


def call(made=FP4, **changes):
    return bs.prepare_linear_weights(**{**given(*made), **changes})


REFUSED = [
    (lambda: call(fmt="fp4"), ["fmt='fp4'", "nvfp4", "int4"]),
    (lambda: call(packed=[1]), ["packed is a list", "tensor"]),
    (lambda: call(packed=torch.zeros(8, 16)), ["packed", "float32", "uint8"]),
    (lambda: call(packed=torch.zeros(0, 16, dtype=torch.uint8)), [r"\[0, 16\]", "none of them 0"]),
    (lambda: call(made=arrays("nvfp4", 7, 2), gated=True), ["7 rows", "gated=True", "ups"]),
    (lambda: call(gated=True, global_scale=torch.ones(3)), ["global_scale", r"\[3\]", r"\[2\]"]),
    (lambda: call(global_scale=torch.ones(2)), ["global_scale", "one of the whole weight"]),
    (lambda: call(bias=torch.ones(4)), ["bias", r"\[4\]", r"\[8\]", "one per row"]),
    (lambda: call(group_size=32), ["group_size=32", "nvfp4", "16"]),
    (lambda: call(zero=torch.zeros(8, 2)), ["zero", "no zero points", "int4"]),
    (lambda: call(int4_signed=True), ["int4_signed", "nvfp4"]),
    (lambda: call(dtype=torch.int8), ["dtype=torch.int8", "bfloat16"]),
    (lambda: call(layout="tiles"), ["layout='tiles'", "tiles64"]),
    (lambda: call(layout="tiles64", dtype=torch.float32), ["float32", "bfloat16", "CUDA"]),
    (lambda: call(layout="128x4", gated=True), ["layout='128x4'", "gated"]),
    (lambda: call(arrays("nvfp4", 7, 2), layout="128x4"), ["n=7", "multiple of 8"]),
    (lambda: call(INT4, group_size=48), ["group_size=48", "multiples of 32", "K=128"]),
    (lambda: call(INT4, block_scale=torch.ones(8, 3)), [r"\[8, 3\]", "multiples of 32"]),
    (lambda: call(INT4, group_size=32), ["block_scale", r"\[8, 2\]", r"\[8, 4\]", "group of 32"]),
    (lambda: call(INT4, zero=torch.zeros(8, 2)), ["zero", "float32", "uint8"]),
    (lambda: call(INT4, zero=torch.zeros(8, 3).byte()), ["zero", r"\[8, 3\]", r"\[8, 2\]"]),
    (
        lambda: call(INT4, zero=torch.full((8, 2), 17), layout="tiles64"),
        ["zero", "from 17 to 17", "0 to 16"],
    ),
    (
        lambda: call(INT4, zero=torch.zeros(8, 2).byte(), int4_signed=True),
        ["int4_signed", "0x88"],
    ),
    (
        lambda: call(INT4, block_scale=torch.full((8, 2), -4e4), layout="tiles64"),
        ["block_scale", "magnitude 40000", "bfloat16"],
    ),
    (
        lambda: call(block_scale=torch.full((8, 2), 0x7F, dtype=torch.uint8), layout="tiles64"),
        ["block_scale", "0x7f", "NaN"],
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number):
    """Errors say where, what, the rule and the remedy."""
    made, words = REFUSED[number]
    with rejects("prepare_linear_weights", *words):
        made()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_weights_of_the_layouts_first_revision_are_refused(fmt):
    """Codes of e2m1 lay otherwise: they would be read as other numbers."""
    values = torch.randn(64, 64)
    weight = bs.prepare_linear_weights(*bs.quantize(values, fmt), fmt=fmt, layout="tiles64")
    state = weight.state_dict()
    assert bs.LinearWeights.load_state_dict(state).meta() == weight.meta()
    state["meta"].pop("revision")
    with pytest.raises(ValueError, match=r"revision 1 of layout 'tiles64', .* prepare them again"):
        bs.LinearWeights.load_state_dict(state)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("gain", [3.0, -2.0])
def test_the_sign_of_a_global_scale_comes_back(fmt, gain):
    codes, scale = bs.quantize(torch.randn(64, 128), fmt)
    told = {"fmt": fmt, "global_scale": torch.tensor([gain])}
    asked = {"layout": "tiles64e", "act_fmt": "fp8", "rounded": fmt == "nvfp4"}
    rows = bs.prepare_linear_weights(codes, scale, **told, **asked)
    x, plain = torch.randn(3, 128), bs.prepare_linear_weights(codes, scale, **told)
    assert torch.equal(bs.linear(x, rows.to_linear()), bs.linear(x, plain))
