"""Edge-LLM's decode ops: float32 against float64, float16 bit for bit against plain Python.

Tolerance: sums of up to 2688 float32 products in the order of 16 at a time; the error of a row was
at most 2e-7 where it was measured, and 1e-5 leaves room for other orders.  The original's
description asks for 1e-3.
"""

from functools import cache

import numpy as np
import pytest
import torch

from blockscale import edgellm
from blockscale.base import host
from blockscale.compat.edgellm import Nvfp4Tensor
from blockscale.specs import EdgeDown, EdgeUp, Spec
from tests.kit.helpers import DTYPES
from tests.kit.kernels import call, compiled, needs
from tests.kit.pairwise import each, few
from tests.reference import edgellm as ref

TOLERANCE = 1e-5
ROUNDED = {"float32": TOLERANCE, "bfloat16": 4e-3, "float16": 5e-4}
"""Half a unit of the last place of bfloat16 and float16, relative to the row."""

tensor = torch.from_numpy


class Case:
    """Weights, ids, weights of slots and activations of one call."""

    def __init__(self, hidden, intermediate, experts=3, tokens=2, top_k=2, seed=0, bytes_=None):
        rng = np.random.default_rng(seed)
        low, high = bytes_ or (0x28, 0x50)
        self.h, self.i, self.experts = hidden, intermediate, experts
        self.up, self.down = (
            rng.integers(0, 256, (experts, rows, columns // 2), dtype=np.uint8)
            for rows, columns in ((hidden, intermediate), (intermediate, hidden))
        )
        self.up_scales, self.down_scales = (
            rng.integers(low, high, (experts, rows // 16, columns), dtype=np.uint8)
            for rows, columns in ((hidden, intermediate), (intermediate, hidden))
        )
        self.up_g, self.down_g = (
            (rng.random(experts) * 0.02 + 0.001).astype(np.float32) for _ in range(2)
        )
        self.ids = rng.integers(0, experts, (tokens, top_k)).astype(np.int32)
        if tokens * top_k > 2:
            self.ids[0, 0], self.ids[-1, -1] = -1, experts  # left out
        self.weights = rng.random((tokens, top_k)).astype(np.float32)
        self.x = rng.standard_normal((tokens, hidden)).astype(np.float16)
        self.z = (rng.standard_normal((tokens, top_k, intermediate)) * 3).astype(np.float32)

    def views(self):
        """Return the weights' views."""
        return (
            Nvfp4Tensor.up_weights(tensor(self.up), tensor(self.up_g)),
            Nvfp4Tensor.down_weights(tensor(self.down), tensor(self.down_g)),
        )

    def truth_up(self, x):
        """Return z in float64."""
        return ref.up(x, self.up, self.up_scales, self.up_g, self.ids)

    def truth_down(self, z, activation):
        """Return out in float64."""
        rest = (self.down, self.down_scales, self.down_g, self.ids, self.weights, activation)
        return ref.down(z, *rest)

    def coded(self, g=0.37):
        """Return an activation's view, and its values in float64 without and with ``g``."""
        rng = np.random.default_rng(9)
        packed = rng.integers(0, 256, (len(self.ids), self.h // 2), dtype=np.uint8)
        words = rng.integers(0x20, 0x50, (len(self.ids), self.h // 16), dtype=np.uint8)
        view = Nvfp4Tensor.activation(tensor(packed), tensor(words.view(np.int32)), g)
        unsigned = words.view(np.uint32)
        rows = range(len(self.ids))
        values = [ref.activation_w4a4(packed[t], unsigned[t], g) for t in rows]
        return view, np.array(values)


def kernel_inputs(case, spec, x):
    """Return the inputs of a compiled function."""
    if spec.op == "edgellm_up":
        rest = (case.up, case.up_scales, case.up_g, case.ids)
    else:
        rest = (case.down, case.down_scales, case.down_g, case.ids, case.weights)
    return [*x, *map(tensor, rest)]


@cache
def function(spec, level):
    """Return the compiled function of ``spec``."""
    return compiled(spec, level)


LEVELS = ("avx512bf16", "avx2", "plain")  # avx512 has the code of avx512bf16
LEVELS = (*(v for v in LEVELS if not host.lacking(v)), *filter(host.lacking, LEVELS))
"""Those that this machine has come first."""
SIZES = [(64, 64), (320, 192)]
"""One tile; several.  A task has 8 of the strips of 64 columns, the last one of 1088 has one."""


@pytest.mark.parametrize(
    ("sizes", "level"),
    few([((64, 1088), level) for level in LEVELS] + [(s, LEVELS[0]) for s in SIZES]),
)
def test_up_kernel(sizes, level):
    """Every level, all scale bytes that are finite, between bytes that must stay."""
    needs(level)
    case = Case(*sizes, tokens=3, bytes_=(0, 200))
    spec = EdgeUp(*sizes, "bfloat16")
    x = tensor(case.x).bfloat16()
    out = torch.empty(*case.ids.shape, case.i)
    [z] = call(function(spec, level), kernel_inputs(case, spec, [x]), [out])
    error = ref.row_error(z.numpy(), case.truth_up(x.float().numpy()))
    assert error.max() < TOLERANCE
    assert (z[0, 0] == 0).all()
    assert (z[-1, -1] == 0).all()


@pytest.mark.parametrize("level", few(LEVELS))
def test_down_kernel(level):
    """Every level; slots that are left out have weights that are NaN."""
    needs(level)
    case = Case(192, 320, tokens=3, bytes_=(0, 200))
    case.weights[case.ids < 0], case.weights[case.ids >= case.experts] = np.nan, np.inf
    spec = EdgeDown(192, 320, "silu")
    outs = [torch.empty(*case.ids.shape, case.h), torch.empty(3, case.h)]
    _, out = call(function(spec, level), kernel_inputs(case, spec, [tensor(case.z)]), outs)
    assert ref.row_error(out.numpy(), case.truth_down(case.z, "silu")).max() < TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES)
def test_up(dtype):
    """The torch function: dtypes of x, ids of 64 bits, one global scale for all, none."""
    case = Case(128, 192, tokens=3)
    up, _ = case.views()
    x = tensor(case.x).to(DTYPES[dtype])
    z = edgellm.decode_up(x, up, tensor(case.up_scales), tensor(case.ids))
    assert z.dtype == torch.float32
    truth = case.truth_up(x.float().numpy())
    assert ref.row_error(z.numpy(), truth).max() < TOLERANCE
    wide = tensor(case.ids.astype(np.int64))
    wide[0, 0], wide[-1, -1] = -(2**40), 2**32
    again = edgellm.decode_up(x, up, tensor(case.up_scales), wide)
    assert torch.equal(again, z)
    for g in (None, 0.5, torch.tensor([0.5])):
        view = Nvfp4Tensor.up_weights(tensor(case.up), g)
        got = edgellm.decode_up(x, view, tensor(case.up_scales), tensor(case.ids))
        case.up_g[:] = 1 if g is None else 0.5
        assert ref.row_error(got.numpy(), case.truth_up(x.float().numpy())).max() < TOLERANCE


@pytest.mark.parametrize("g", [None, 0.37])
def test_up_w4a4(g):
    """Activations as codes with exchanged scales."""
    case = Case(192, 128, tokens=3)
    up, _ = case.views()
    x, values = case.coded(g)
    z = edgellm.decode_up(x, up, tensor(case.up_scales), tensor(case.ids))
    assert ref.row_error(z.numpy(), case.truth_up(values)).max() < TOLERANCE


@each(activation=["relu2", "silu"], dtype=list(DTYPES))
def test_down(activation, dtype):
    """The torch function: activations (some beyond silu's limits), dtypes of out and of z."""
    case = Case(192, 128, tokens=3, top_k=3)
    case.z[:, :, ::7] *= 40
    _, down = case.views()
    z = tensor(case.z).to(DTYPES[dtype])
    rest = (down, tensor(case.down_scales), tensor(case.ids), tensor(case.weights))
    out = edgellm.decode_down(z, *rest, activation=activation, dtype=DTYPES[dtype])
    assert out.dtype == DTYPES[dtype]
    truth = case.truth_down(z.float().numpy(), activation)
    assert ref.row_error(out.float().numpy(), truth).max() < ROUNDED[dtype]


def test_down_of_a_nan():
    """With silu it spoils its token, as in the mode that computes like the original."""
    case = Case(192, 128, tokens=3, top_k=3)
    case.z[1, 0, 5] = np.nan
    _, down = case.views()
    rest = (down, tensor(case.down_scales), tensor(case.ids), tensor(case.weights))
    out = edgellm.decode_down(tensor(case.z), *rest, activation="silu")
    exact = edgellm.decode_down(tensor(case.z), *rest, activation="silu", exact_fp16=True)
    assert torch.equal(out.isnan(), exact.isnan())
    assert out.isnan().all(1).tolist() == [False, True, False]


HARD = [(0.02, 1.0), (0.05, 1.0), (0.01, 0.5), (0.02, 0.1)]
"""Sizes of weights and activations for which the original's float16 is 2e-3 to 7e-2 off."""


def gaussian_weight(rng, sigma, experts, k, n):
    """Return payload, decode scales and global scales of Gaussian weights, as a checkpoint's."""
    w = tensor(rng.standard_normal((experts, n, k)).astype(np.float32)) * sigma
    g = w.abs().amax((1, 2)) / (6 * 448)
    blocks = w.reshape(experts, n, -1, 16)
    wanted = blocks.abs().amax(-1) / (6 * g[:, None, None])
    scale = wanted.clamp(max=448).to(torch.float8_e4m3fn)
    value = blocks / (scale.float() * g[:, None, None])[..., None]
    table = torch.tensor([ref.e2m1(code) for code in range(8)])
    code = (value.abs()[..., None] - table).abs().argmin(-1).to(torch.uint8)
    code = (code | (value < 0).to(torch.uint8) << 3).reshape(experts, n, k)
    payload, decode = edgellm.pack_weight(code[..., 0::2] | code[..., 1::2] << 4, scale)
    return payload, decode, g


@pytest.mark.parametrize(("sigma_w", "sigma_x"), HARD)
def test_hard_sizes(sigma_w, sigma_x):
    """Both passes of one expert where global scales are about 4e-5: no row is off by 1e-5."""
    rng = np.random.default_rng(round(sigma_w * 1000))
    hidden, intermediate = 704, 448
    up, up_scales, up_g = gaussian_weight(rng, sigma_w, 1, hidden, intermediate)
    down, down_scales, down_g = gaussian_weight(rng, sigma_w, 1, intermediate, hidden)
    x = tensor(rng.standard_normal((4, hidden)) * sigma_x).half()
    ids, weights = torch.zeros(4, 1, dtype=torch.int32), torch.full((4, 1), 0.3)
    out = edgellm.decode_moe(
        x,
        Nvfp4Tensor.up_weights(up, up_g),
        up_scales,
        Nvfp4Tensor.down_weights(down, down_g),
        down_scales,
        ids,
        weights,
    )
    given = (up.numpy(), up_scales.numpy(), up_g.numpy(), ids.numpy())
    z = ref.up(x.float().numpy(), *given)
    given = (down.numpy(), down_scales.numpy(), down_g.numpy(), ids.numpy(), weights.numpy())
    assert ref.row_error(out.numpy(), ref.down(z, *given, "relu2")).max() < TOLERANCE


EXACT = [
    (64, 128, 1, 1, "relu2", False),
    (128, 64, 2, 2, "silu", False),
    (192, 64, 2, 3, "relu2", False),  # strips of 96
    (256, 192, 1, 2, "silu", True),  # 64
    (192, 192, 2, 1, "relu2", True),  # 192
    (320, 64, 1, 2, "silu", False),  # five strips of 64
    (384, 128, 1, 1, "silu", True),  # three strips of 128
]


@pytest.mark.parametrize(("h", "i", "tokens", "top_k", "activation", "w4a4"), EXACT)
def test_exact_fp16(h, i, tokens, top_k, activation, w4a4):
    """Every bit of z and out; global scales from small, for subnormal halves, to large."""
    case = Case(h, i, tokens=tokens, top_k=top_k, seed=h + i)
    case.up_g *= 1e5 if w4a4 else 500
    case.down_g *= np.array([0.02, 5, 5], np.float32)
    up, down = case.views()
    if w4a4:
        x, act = case.coded(0.37)
        strips = [ref.strip_w4a4(h, i)] * 2
    else:
        x, act = tensor(case.x), case.x.astype(np.float32)
        strips = [ref.strip_w4a16(h), ref.strip_w4a16(i)]
    ids, weights = tensor(case.ids), tensor(case.weights)
    z = edgellm.decode_up(x, up, tensor(case.up_scales), ids, exact_fp16=True)
    want = ref.up_fp16(act, case.up, case.up_scales, case.up_g, case.ids, strips[0])
    assert z.dtype == torch.float16
    assert (z.numpy().view(np.uint16) == want.view(np.uint16)).all()
    assert np.any(want)
    down_args = (down, tensor(case.down_scales), ids, weights)
    modes = {"activation": activation, "exact_fp16": True}
    out = edgellm.decode_down(z, *down_args, w4a4=w4a4, **modes)
    given = (case.down, case.down_scales, case.down_g, case.ids, case.weights)
    sums = ref.down_fp16(want, *given, activation, strips[1])
    assert (out.numpy().view(np.uint16) == sums.view(np.uint16)).all()
    assert np.isfinite(sums).all()
    assert np.mean(np.abs(sums) > 1e-5) > 0.2
    both = edgellm.decode_moe(x, up, tensor(case.up_scales), *down_args[:2], ids, weights, **modes)
    assert torch.equal(both.view(torch.int16), out.view(torch.int16))


def test_strips():
    """The first of the original's sizes that divides."""
    from blockscale.compat.edgellm.ops import strip_rows

    for h in range(64, 1100, 64):
        assert strip_rows(h) == ref.strip_w4a16(h)
        for i in range(64, 700, 64):
            assert strip_rows(h, i) == ref.strip_w4a4(h, i)


def test_nothing_to_do():
    """No tokens; no slots; all slots left out."""
    case = Case(64, 64)
    up, down = case.views()
    scales = tensor(case.up_scales), tensor(case.down_scales)
    x = tensor(case.x)
    for ids in (torch.zeros(0, 2, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)):
        rows = x[: len(ids)]
        z = edgellm.decode_up(rows, up, scales[0], ids)
        assert z.shape == (*ids.shape, 64)
        out = edgellm.decode_down(z, down, scales[1], ids, torch.ones(ids.shape))
        assert out.shape == (len(ids), 64)
        assert (out == 0).all()
    ids = torch.full((2, 2), -1, dtype=torch.int32)
    weights = torch.ones(2, 2)
    for exact in (False, True):
        out = edgellm.decode_moe(x, up, scales[0], down, scales[1], ids, weights, exact_fp16=exact)
        assert (out == 0).all()


def test_specs():
    """Names, and what they refuse."""
    for spec in (EdgeUp(64, 128, "nvfp4"), EdgeUp(128, 64), EdgeDown(64, 128, "silu", "bfloat16")):
        assert Spec.parse(spec.name) == spec
        assert Spec.from_json(spec.to_json()) == spec
    for made, match in (
        (lambda: EdgeUp(60, 64), "EdgeUp: hidden=60 is not a multiple of 64, .* to 64"),
        (lambda: EdgeDown(64, 100), "EdgeDown: intermediate=100 is not a multiple of 64, .* 128"),
        (lambda: EdgeUp(64, 0), "EdgeUp: intermediate=0 is not a positive integer"),
        (lambda: EdgeUp(64, 64, "int8"), "EdgeUp: dtype='int8' is not known"),
        (lambda: EdgeDown(64, 64, "gelu"), "EdgeDown: activation='gelu' is not known"),
    ):
        with pytest.raises(ValueError, match=match):
            made()


def test_errors():
    """What the torch functions refuse."""
    case = Case(64, 128)
    up, down = case.views()
    x, z = tensor(case.x), tensor(case.z)
    up_scales, down_scales = tensor(case.up_scales), tensor(case.down_scales)
    ids, weights = tensor(case.ids), tensor(case.weights)

    def bad(error, match, run, *args, **options):
        with pytest.raises(error, match=match):
            run(*args, **options)

    run = edgellm.decode_up
    bad(TypeError, "the weight is a Tensor, not an Nvfp4Tensor", run, x, up.payload, up_scales, ids)
    bad(TypeError, "float8_e4m3fn, but must be bytes S0E5M3", run, x, up,
        up_scales.view(torch.float8_e4m3fn), ids)  # fmt: skip
    bad(ValueError, r"shape \[3, 4\], but must have \[E, K / 16, N\]", run, x, up,
        up_scales[:, :, 0].contiguous(), ids)  # fmt: skip
    bad(ValueError, r"has strides \[256, 4, 2\] .* belong to strides \[256, 2, 2\]", run, x, up,
        down_scales, ids)  # fmt: skip
    bad(ValueError, r"x has shape \[2, 32\], but must have \[T, 64\]", run,
        x[:, :32].contiguous(), up, up_scales, ids)  # fmt: skip
    bad(TypeError, "x has dtype int32", run, x.int(), up, up_scales, ids)
    bad(ValueError, r"topk_ids has shape \[1, 2\], but must have \[2, K_top\]", run, x, up,
        up_scales, ids[:1])  # fmt: skip
    bad(TypeError, "topk_ids has dtype float32", run, x, up, up_scales, ids.float())
    two = Nvfp4Tensor.up_weights(tensor(case.up), torch.ones(2))
    bad(ValueError, "2 global scales, but 3 experts", run, x, two, up_scales, ids)
    bad(ValueError, r"x is a view of tiles \(3, 64, 2\)", run, up, up, up_scales, ids)
    bare = Nvfp4Tensor.activation(torch.zeros(2, 32, dtype=torch.uint8), None)
    bad(ValueError, "x has 0 bytes of scales", run, bare, up, up_scales, ids)
    run = edgellm.decode_down
    rest = (down, down_scales, ids, weights)
    bad(ValueError, "activation='gelu' is not known", run, z, *rest, activation="gelu")
    bad(TypeError, "dtype=torch.float64 is not float32", run, z, *rest, dtype=torch.float64)
    bad(ValueError, r"z has shape \[2, 1, 128\], but must have \[2, 2, 128\]", run,
        z[:, :1].contiguous(), *rest)  # fmt: skip
    bad(ValueError, r"topk_weights has shape \[2, 1\]", run, z, *rest[:3],
        weights[:, :1].contiguous())  # fmt: skip
