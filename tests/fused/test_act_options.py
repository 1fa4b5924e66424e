"""FlashInfer's options of quantisers: FP8 input, global scales of rows, a search; bit for bit."""

from functools import cache

import numpy as np
import pytest
import torch

from blockscale.specs import ActQuantize, Spec
from blockscale.specs.fused import FP8, SPAN
from tests.kit.act_options import expected, inputs
from tests.kit.acts import stored
from tests.kit.fused_kernels import run
from tests.kit.helpers import as_bytes, same_bytes, tensor, widen
from tests.kit.kernels import LEVELS, needs
from tests.reference import core as ref
from tests.reference import fused as fused


def check(spec, given, span=SPAN, **how):
    """Compare every output."""
    named = {"span": span} if any(p.name == "span" for p in spec.params()) else {}
    got = run(spec, **how, **given, **named)
    codes, byte, *row = expected(spec, given, span)
    same_bytes(as_bytes(got["packed"]), ref.pack(codes))
    same_bytes(as_bytes(got["block_scale"]), stored(spec, byte))
    for scale in row:
        same_bytes(got["row_scale"].numpy().view(np.uint8), scale.view(np.uint8))


CASES = [
    (5, 9, "quantize_nvfp4_fi_f8"),
    (130, 4, "quantize_mxfp4_128x4_fi_f8"),
    (3, 5, "quantize_nvfp4_rows_8x4_fi_f8"),
    (7, 5, "quantize_nvfp4_rows_128x4_fi_bf16"),
    (9, 6, "quantize_nvfp4_4over6_mae_fi_bf16"),
    (17, 5, "quantize_nvfp4_4over6_mse_8x4_fi_f16"),
    (9, 6, "quantize_nvfp4_4over6_mae_scaled_128x4_fi_f16"),
    (9, 6, "quantize_nvfp4_rows_4over6_mse_scaled_fi_bf16"),
    (5, 9, "quantize_nvfp4_token_fi_bf16"),
    (130, 7, "quantize_nvfp4_token_128x4_fi_f16"),
    (9, 6, "quantize_nvfp4_token_4over6_mae_fi_f16"),
    (9, 6, "quantize_nvfp4_token_4over6_mse_8x4_fi_bf16"),
    (9, 6, "quantize_nvfp4_token_4over6_mae_scaled_fi_bf16"),
    (1, 1, "quantize_nvfp4_token_4over6_mse_scaled_fi_bf16"),
]


@pytest.mark.parametrize(
    ("rows", "blocks", "name"), CASES, ids=[f"{n}-{r}x{b}" for r, b, n in CASES]
)
def test_sizes_and_options(rows, blocks, name):
    spec = Spec.parse(name)
    assert spec.name == name
    assert Spec.from_json(spec.to_json()) == spec
    check(spec, inputs(spec, rows, blocks, seed=rows))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name", ["quantize_nvfp4_token_4over6_mse_128x4_fi_bf16", "quantize_mxfp4_fi_f8"]
)
def test_levels(level, name):
    needs(level)
    spec = Spec.parse(name)
    check(spec, inputs(spec, 33, 5), level=level)


@cache
def near_ties():
    """Return blocks [n, 16] whose candidates err alike, of many random ones, and a global scale."""
    x = widen(tensor(np.random.default_rng(1).standard_normal((40_000, 16)), "bfloat16"))
    g = np.float32(SPAN / np.abs(x).max())
    each = []
    for more in (1, 1.5):
        byte = ref.e4m3_encode(np.abs(x).max(1, keepdims=True) / np.float32(6) * g * more)
        s = ref.e4m3_decode(byte) / g
        each.append(np.abs(ref.e2m1_decode(ref.e2m1_encode(x / s)) * s - x))
    near = [np.isclose((a**p).sum(1), (b**p).sum(1), 1e-5, 0) for a, b in [each] for p in (1, 2)]
    return x[near[0] | near[1]], g


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["mae", "mse"])
def test_levels_of_near_ties(level, kind):
    """A product that is fused with a sum, as FMA does it, decides otherwise."""
    needs(level)
    x, g = near_ties()
    assert 40 < len(x) < 200
    spec = Spec.parse(f"quantize_nvfp4_4over6_{kind}_fi_bf16")
    given = {"input": tensor(x, "bfloat16"), "global_scale": torch.tensor([g])}
    check(spec, given, level=level)


@pytest.mark.parametrize("kind", ["mae", "mse", "mae_scaled", "mse_scaled"])
def test_search_takes_both_candidates(kind):
    """Many blocks, and each candidate in a good part of them; the lesser error is the better."""
    spec = Spec.parse(f"quantize_nvfp4_4over6_{kind}_fi_bf16")
    given = inputs(spec, 16, 32, seed=3)
    check(spec, given)
    byte = as_bytes(run(spec, **given)["block_scale"])
    plain = ActQuantize("none", convention="flashinfer")
    usual = as_bytes(run(plain, **given)["block_scale"])
    assert 0.2 < (byte != usual).mean() < 0.8


@pytest.mark.parametrize("kind", ["mae", "mae_scaled"])
@pytest.mark.parametrize("scaling", ["", "_token"])
def test_near_ties(kind, scaling):
    """Halves of small integers: errors that differ by a rounding, so that its place decides."""
    values = np.random.default_rng(0).integers(-12, 13, (3, 40, 128))[0 if scaling else 2] / 2
    spec = Spec.parse(f"quantize_nvfp4{scaling}_4over6_{kind}_fi_bf16")
    other = "mae" if kind == "mae_scaled" else "mae_scaled"
    g = 1 / SPAN if scaling else 100.0
    given = {"input": tensor(values, "bfloat16"), "global_scale": torch.tensor([g])}
    check(spec, given)
    otherwise = expected(Spec.parse(f"quantize_nvfp4{scaling}_4over6_{other}_fi_bf16"), given)
    assert (as_bytes(run(spec, **given)["block_scale"]) != otherwise[1]).any()


@pytest.mark.parametrize("g", [1e-6, 1.0, 3e8])
@pytest.mark.parametrize("name", ["quantize_nvfp4_4over6_mse_fi_bf16", "quantize_nvfp4_fi_f8"])
def test_global_scale(name, g):
    """Scales that are zero, usual and clipped."""
    spec = Spec.parse(name)
    given = inputs(spec, 9, 10)
    check(spec, {**given, "global_scale": torch.tensor([g])})


def test_scales_at_ties():
    """(amax / 6) * gs in that order: gs puts it next to a tie of E4M3, where it shows."""
    spec = Spec.parse("quantize_nvfp4_4over6_mae_fi_f16")
    table = ref.e4m3_decode(np.arange(0x30, 0x70))
    for seed in range(63):
        x = inputs(spec, 2, 1, seed=seed)["input"][:1].contiguous()
        tie = (table[seed] + table[seed + 1]) / 2
        g = torch.tensor([6 * tie / np.abs(widen(x)).max()], dtype=torch.float32)
        check(spec, {"input": x, "global_scale": g})


def test_span_and_base():
    """Of a recipe with scales up to 256."""
    for kind in ("mae", "mse"):
        spec = Spec.parse(f"quantize_nvfp4_token_4over6_{kind}_fi_bf16")
        given = inputs(spec, 9, 16)
        check(spec, {**given, "global_scale": torch.tensor([1 / 1536])}, span=1536.0)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("search", ["", "_4over6_mse"])
def test_ends_of_the_range(dtype, search):
    """Rows of the largest number, of the least, of zeros of both signs."""
    spec = Spec.parse(f"quantize_nvfp4_token{search}_fi_{dtype}")
    given = inputs(spec, 5, 4)
    limits = torch.finfo(given["input"].dtype)
    given["input"][0], given["input"][1] = limits.max, limits.smallest_normal
    given["input"][2], given["input"][2, ::3] = 0.0, -0.0
    given["input"][3, 5] = torch.inf
    check(spec, given)
    assert run(spec, **given)["row_scale"][2] == 0


def test_not_a_number():
    """A NaN has no part in its row's scale, and spoils its own block alone."""
    for search in ("", "_4over6_mae"):
        spec = Spec.parse(f"quantize_nvfp4_token{search}_fi_bf16")
        given = inputs(spec, 4, 6)
        clean = run(spec, **given)
        given["input"][1, 20] = torch.nan
        got = run(spec, **given)
        assert torch.equal(got["row_scale"], clean["row_scale"])
        byte = as_bytes(got["block_scale"])
        assert np.argwhere(byte == 0x7F).tolist() == [[1, 1]]
        assert (as_bytes(got["packed"])[1, 8:16] == 0x77).all()
    spec = Spec.parse("quantize_nvfp4_fi_f8")
    given = inputs(spec, 4, 6)
    given["input"][2, 3] = 0x7F
    check(spec, given)
    assert as_bytes(run(spec, **given)["block_scale"])[2, 0] == 0x7F


def test_every_byte():
    """All FP8 values, each in a block of its own."""
    spec = Spec.parse("quantize_nvfp4_fi_f8")
    x = np.zeros((256, 16), np.uint8)
    x[:, 3] = np.arange(256)
    check(spec, {"input": torch.from_numpy(x), "global_scale": torch.tensor([5.0])})


def test_grouped_and_activated():
    """A search in the other quantisers: each expert, each activation, as in one that is alone."""
    alone = Spec.parse("quantize_nvfp4_4over6_mse_fi_bf16")
    grouped = Spec.parse("quantize_nvfp4_grouped_4over6_mse_128x4_fi_bf16")
    x = torch.stack([inputs(alone, 7, 6, seed=seed)["input"] for seed in range(2)])
    g, mask = torch.tensor([3.0, 200.0]), torch.tensor([7, 4], dtype=torch.int32)
    got = run(grouped, input=x, mask=mask, global_scale=g)
    for e, rows in enumerate(mask.tolist()):
        one = run(alone, input=x[e, :rows].contiguous(), global_scale=g[e : e + 1])
        same_bytes(as_bytes(got["packed"][e, :rows]), as_bytes(one["packed"]))
        linear = ref.unswizzle(as_bytes(got["block_scale"][e]), 7, 6)
        same_bytes(linear[:rows], as_bytes(one["block_scale"]))
    silu = Spec.parse("silu_and_mul_nvfp4_4over6_mse_fi_bf16")
    gate, up = x
    value = torch.nn.functional.silu(gate.double()) * up.double()
    one = run(alone, input=value.bfloat16(), global_scale=g[:1])
    both = run(silu, input=torch.cat((gate, up), -1).contiguous(), global_scale=g[:1])
    assert (as_bytes(both["packed"]) != as_bytes(one["packed"])).mean() < 0.01


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"search": "4over6"}, "search='4over6' is not known"),
        ({"scaling": "columns"}, "scaling='columns' is not known"),
        ({"search": "mae", "convention": "divide"}, "search='mae' needs convention='flashinfer'"),
        ({"search": "mae", "block_size": 32}, "search='mae' needs .* block_size=16"),
        ({"dtype": FP8, "search": "mae"}, "dtype='float8_e4m3fn' needs .* search='none'"),
        ({"dtype": FP8, "activation": "silu"}, "needs .* activation='none'"),
        ({"dtype": FP8, "scaling": "token"}, "scaling='token' needs .* an input of 16 bits"),
        ({"scaling": "token", "activation": "silu"}, "scaling='token' needs .* activation='none'"),
        ({"scaling": "rows", "grouped": True, "layout": "128x4"}, "needs .* grouped=False"),
    ],
)
def test_bad_spec(fields, sentence):
    usual = {"activation": "none", "convention": "flashinfer"}
    if fields.get("convention") == "divide":
        usual["activation"] = "silu"
    with pytest.raises(ValueError, match=sentence):
        ActQuantize(**{**usual, **fields})
