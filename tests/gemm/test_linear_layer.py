"""blockscale.linear with activations, gates, residuals and prepared weights, against float64.

Tolerances are those of test_linear.py; where x and w are drawn so that sums are of size 1, what
follows them (an activation, a product of gate and up) loses no more than a few units in the last
place of float32.  float16 loses a little more where results are subnormal.
"""

from itertools import product

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.ops import call as protocol
from blockscale.ops import checks
from blockscale.ops.linear import layer as ops_linear
from blockscale.specs import Linear
from blockscale.specs.gemm import ACTIVATIONS, TILED
from tests.gemm.test_linear_weights import CASES, arrays, dense, given
from tests.kit.helpers import DTYPES, fill_freed_memory, rejects, tensor, widen
from tests.kit.pairwise import exhaustive, pairs
from tests.kit.tiles64 import weight_of
from tests.reference import core as ref
from tests.reference import linear as reference
from tests.reference import moe

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 2e-3}
ROWS = (1, 2, 3, 8, 17, 33)
GLOBAL = {False: np.float32([0.5]), True: np.float32([0.5, 0.25])}


class Case:
    """A layer whose sums are of size 1: its arguments, and the truth of its result."""

    def __init__(
        self, case, n, blocks, dtype, activation="none", gated=False, residual=False, act_fmt=None
    ):
        self.made = arrays(case, n, blocks, seed=n + blocks)
        fmt, packed, scale, _ = self.made
        if fmt != "int4":
            scale %= 16
            scale += 0x28 if fmt == "nvfp4" else 118
        if fmt == "mxfp4" and act_fmt:  # what tiles64e holds
            scale[:] = scale % 12 + 118
        self.n, self.k, self.dtype = n, 2 * packed.shape[1], dtype
        self.activation, self.gated, self.residual = activation, gated, residual
        self.act_fmt = act_fmt
        rng = np.random.default_rng(7)
        factors = GLOBAL[gated]
        w = dense(*self.made, factors)
        size = 1 / np.linalg.norm(w, axis=1).mean()
        self.x = tensor(rng.standard_normal((max(ROWS), self.k)) * size, dtype)
        self.bias = tensor(rng.standard_normal(n))
        cols = n // 2 if gated else n
        self.added = tensor(rng.standard_normal((max(ROWS), cols)), dtype) if residual else None
        added = None if self.added is None else widen(self.added)
        x = moe.qdq(widen(self.x), "fp8") if act_fmt else widen(self.x)
        self.truth = reference.layer(x, w, self.bias, activation, gated, added)
        self.tensors = given(*self.made, gated=gated, global_scale=torch.from_numpy(factors))
        self.tensors["bias"] = self.bias

    def prepared(self, **options):
        return bs.prepare_linear_weights(**self.tensors, dtype=DTYPES[self.dtype], **options)

    def run(self, rows, weights=None, **options):
        """Return the result for the first rows."""
        x = self.x[:rows]
        options.setdefault("activation", self.activation)
        options.setdefault("act_fmt", self.act_fmt)
        if self.residual:
            options["residual"] = self.added[:rows]
        fill_freed_memory(rows * self.truth.shape[1] * 4)
        if weights is None:
            return bs.linear(x, **self.tensors, **options)
        return bs.linear(x, weights, **options)

    def check(self, y, rows, out_dtype=None):
        name = out_dtype or self.dtype
        assert y.dtype == DTYPES[name]
        assert y.shape == (rows, self.truth.shape[1])
        error = ref.row_error(widen(y), self.truth[:rows])
        assert error.max() < TOLERANCE[name], error


def gates_need_an_activation(activation, gated, **_):
    return activation != "none" or not gated


PICKED = [
    ("nvfp4", (96, 8), "bfloat16", "silu", True, True, None),
    ("nvfp4", (14, 3), "float32", "gelu_tanh", True, False, None),
    ("mxfp4", (96, 8), "float16", "relu2", False, True, "float32"),
    ("nvfp4", (96, 8), "float32", "silu", False, False, None),
    ("mxfp4", (14, 3), "bfloat16", "gelu_tanh", True, True, "float32"),
    ("nvfp4", (15, 3), "bfloat16", "none", False, True, "float16"),
]
"""Each takes seconds to compile; others are exhaustive."""

OTHERS = [
    case
    for case in product(
        ["nvfp4", "mxfp4"],
        [(14, 3), (96, 8)],
        DTYPES,
        ACTIVATIONS,
        [False, True],
        [False, True],
        [None, "float32"],
    )
    if case not in PICKED and gates_need_an_activation(case[3], case[4])
][::3]
"""A third: the last three values change faster, and have two each."""


@pytest.mark.parametrize(
    ("case", "size", "dtype", "activation", "gated", "residual", "out_dtype"),
    [*PICKED, *(pytest.param(*case, marks=exhaustive) for case in OTHERS)],
)
def test_numerics(case, size, dtype, activation, gated, residual, out_dtype):
    """Any number of rows, ragged N and whole vectors, tensors and prepared weights alike."""
    made = Case(case, *size, dtype, activation, gated, residual)
    options = {} if out_dtype is None else {"out_dtype": DTYPES[out_dtype]}
    weights = made.prepared()
    for rows in ROWS:
        y = made.run(rows, **options)
        made.check(y, rows, out_dtype)
        assert torch.equal(made.run(rows, weights, **options), y)


@pytest.mark.parametrize("case", ["nvfp4", "mxfp4"])
def test_each_row_may_have_a_global_scale(case):
    """Of tensors and of prepared weights, which come back from a state and from tiles."""
    made = Case(case, 15, 3, "float32")
    factors = np.random.default_rng(3).uniform(0.25, 4, 15).astype(np.float32)
    plain = dense(*made.made, np.float32([1])) * factors[:, None].astype(np.float64)
    made.truth = reference.layer(widen(made.x), plain, made.bias, "none", False, None)
    made.tensors["global_scale"] = torch.from_numpy(factors)
    weights = made.prepared()
    for rows in (1, 17):
        y = made.run(rows)
        made.check(y, rows)
        assert torch.equal(made.run(rows, weights), y)
    again = bs.LinearWeights.load_state_dict(weights.state_dict())
    assert again.by_row
    assert torch.equal(made.run(3, again), made.run(3, weights))
    tiles = bs.prepare_linear_weights(
        **made.tensors, dtype=torch.bfloat16, layout="tiles64"
    ).to_linear()
    made.check(made.run(3, tiles), 3)
    with rejects("global_scale has shape", "one of each row"):
        bs.linear(made.x, **{**made.tensors, "global_scale": torch.ones(14)})
    if case == "nvfp4":
        with rejects("a global scale of each row"):
            made.prepared(layout="128x4")


def test_each_row_may_have_a_global_scale_in_tiles64e(fake_cuda):
    made = Case("mxfp4", 70, 3, "bfloat16", act_fmt="fp8")
    factors = np.random.default_rng(3).uniform(0.25, 4, 70).astype(np.float32)
    w = dense(*made.made, np.float32([1])) * factors[:, None].astype(np.float64)
    made.truth = reference.layer(moe.qdq(widen(made.x), "fp8"), w, made.bias)
    made.tensors["global_scale"] = torch.from_numpy(factors)
    made.check(made.run(3, made.prepared(layout="tiles64e")), 3)


def test_int4_and_gates_have_no_global_scale_of_each_row():
    with pytest.raises(ValueError, match="by_row=True, but gates and ups have"):
        Linear(32, 64, activation="silu", gated=True, by_row=True)
    with pytest.raises(ValueError, match="by_row=True, but int4 has"):
        Linear(32, 128, "int4", "bfloat16", layout="tiles64", by_row=True)


INT4_CASES = [
    ("int4 32 zeros", "bfloat16", "silu", True, True),
    ("int4 128", "float32", "none", False, False),
    ("int4 96 zeros", "float16", "gelu_tanh", False, True),
]
OTHER_INT4 = [
    made
    for made in product(
        [case for case in CASES if "int4" in case],
        *(DTYPES, ACTIVATIONS, [False, True], [False, True]),
    )
    if made not in INT4_CASES and gates_need_an_activation(*made[2:4])
]


@pytest.mark.parametrize(
    ("case", "dtype", "activation", "gated", "residual"),
    [*INT4_CASES, *(pytest.param(*made, marks=exhaustive) for made in OTHER_INT4)],
)
def test_int4(case, dtype, activation, gated, residual):
    """On the CPU the product is a kernel's, what follows is torch's; all in float32."""
    made = Case(case, 14, 2, dtype, activation, gated, residual)
    weights = made.prepared()
    for rows in (1, 3, 17):
        made.check(made.run(rows, weights), rows)
        made.check(made.run(rows, weights, out_dtype=torch.float32), rows, "float32")
    made.check(made.run(3), 3)
    out = torch.full((3, made.truth.shape[1]), torch.nan, dtype=DTYPES[dtype])
    assert made.run(3, weights, out=out) is out
    made.check(out, 3)


def test_out_and_leading_dimensions():
    """An output of the caller's, for every kind of weight and rows in several dimensions."""
    made = Case("nvfp4", 96, 8, "bfloat16", "silu", True, True)
    want = made.run(6)
    for weights in (None, made.prepared()):
        for _ in range(2):  # checked in full, then known
            out = torch.full_like(want, torch.nan)
            assert made.run(6, weights, out=out) is out
            assert torch.equal(out, want)
    out = torch.full((2, 3, 48), torch.nan, dtype=torch.bfloat16)
    x, residual = made.x[:6].view(2, 3, -1), made.added[:6].view(2, 3, 48)
    for _ in range(2):
        y = bs.linear(x, made.prepared(), activation="silu", residual=residual, out=out)
        assert torch.equal(y.view(6, 48), want)
    empty = bs.linear(made.x[:0], made.prepared(), activation="silu")
    assert empty.shape == (0, 48)


def test_one_rounding():
    """1 + 2^-9 is 1 in bfloat16, and so is 1 + 3 * 2^-10; the sum of all three is not."""
    packed = torch.from_numpy(ref.pack(np.full((15, 48), 2, np.uint8)))  # 1.0
    scale = torch.full((15, 3), 0x38, dtype=torch.uint8)  # 1.0
    x = torch.zeros(1, 48, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1.0, 2.0**-9
    residual = torch.full((1, 15), 3 * 2.0**-10, dtype=torch.bfloat16)
    assert (bs.linear(x, packed, scale, residual=residual) == 1 + 2.0**-7).all()


def test_large_gates():
    """Activations at the ends of float32: no overflow where the result has none."""
    values = torch.tensor([-3e38, -1e4, -200.0, -90.0, 0.0, 90.0, 1e4, 3e38])
    x = torch.zeros(8, 16)
    x[:, 0] = values
    packed = torch.from_numpy(ref.pack(np.full((2, 16), 2, np.uint8)))
    scale = torch.full((2, 1), 0x38, dtype=torch.uint8)
    for activation in ("silu", "gelu_tanh"):
        y = bs.linear(x, packed, scale, activation=activation)
        assert torch.equal(y[:, 0], torch.where(values > 0, values, torch.zeros(())))


# ---- Quantised activations ----------------------------------------------------------------------


@pytest.mark.parametrize("given_scale", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_w4a4(prepared, given_scale):
    """It is quantize and mm_fp4: x with a global scale, that of both in alpha."""
    made = Case("nvfp4", 16, 4, "bfloat16")
    weights = made.prepared(layout="128x4") if prepared else None
    x, w = made.x[:5], dense(*made.made, GLOBAL[False])
    g = torch.tensor([0.01]) if given_scale else None
    options = {"act_fmt": "nvfp4"} | ({"act_global_scale": g} if given_scale else {})
    y = made.run(5, weights, **options)
    used = 0.01 if given_scale else float(x.abs().amax().float() / (448 * 6))
    codes, byte = ref.quantize(widen(x), "nvfp4", used)
    truth = reference.layer(ref.weight(codes, byte, "nvfp4", used), w, made.bias)
    assert ref.row_error(widen(y), truth).max() < TOLERANCE["bfloat16"]
    out = torch.full_like(y, torch.nan)
    assert made.run(5, weights, out=out, **options) is out
    assert torch.equal(out, y)
    assert made.run(0, weights, **options).shape == (0, 16)
    residual = torch.linspace(-2, 2, 5 * 16).view(5, 16).bfloat16()
    y = made.run(5, weights, activation="silu", residual=residual, **options)
    truth = truth / (1 + np.exp(-truth)) + widen(residual)
    assert ref.row_error(widen(y), truth).max() < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(
    ("case", "size", "dtype", "activation", "gated", "residual"),
    [
        ("mxfp4", (96, 8), "bfloat16", "silu", True, True),
        ("nvfp4", (15, 3), "float32", "none", False, False),
        ("mxfp4", (14, 3), "float16", "relu2", False, True),
        ("int4 64 zeros", (14, 2), "bfloat16", "gelu_tanh", True, True),
        pytest.param(
            *("int4 64 zeros", (14, 2), "float16", "none", False, False),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_rows_of_fp8(case, size, dtype, activation, gated, residual):
    """Each row is e4m3(x / s) * s, s = max |x| / 448; rows of zeros stay zeros."""
    made = Case(case, *size, dtype, activation, gated, residual, "fp8")
    weights = made.prepared(act_fmt="fp8")
    assert weights.layout == "linear"
    for rows in ROWS:
        y = made.run(rows, weights)
        made.check(y, rows)
        if "int4" not in case:
            assert torch.equal(made.run(rows), y)
    exact = made.run(3, weights, out_dtype=torch.float32)
    made.check(exact, 3, "float32")
    zeros = bs.linear(torch.zeros_like(made.x[:2]), weights, act_fmt="fp8", activation=activation)
    assert torch.equal(
        zeros, bs.linear(torch.zeros_like(made.x[:2]), weights, activation=activation)
    )


@pytest.mark.parametrize(("case", "size"), [("nvfp4", (15, 3)), ("int4 64 zeros", (14, 2))])
def test_rows_of_fp8_with_a_nan(case, size):
    """It spoils its row, wherever it is, and whatever is beside it; no other row."""
    made = Case(case, *size, "float32", act_fmt="fp8")
    clean, x = made.run(17), made.x
    for row, places in enumerate(([0], [1], [7], [made.k - 1], [made.k // 2], range(made.k))):
        x[row, places] = torch.nan
    x[6:9] = 0
    x[[6, 7], [0, made.k // 2]] = torch.nan
    spoiled = np.isnan(moe.qdq(widen(x), "fp8")).any(-1)
    assert spoiled.nonzero()[0].tolist() == [*range(8)]
    for rows in (1, 3, 17):
        y = made.run(rows)
        assert y[spoiled[:rows]].isnan().all()
        assert torch.equal(y[9:], clean[9:rows])
    assert made.run(17)[8].isfinite().all()


# ---- What CUDA kernels are handed ---------------------------------------------------------------


class FakeKernel:
    """Stands in for a CUDA kernel: judges its arguments by the spec, computes from the tiles."""

    calls = 0

    def __init__(self, spec):
        assert isinstance(spec, Linear)
        assert spec.layout in TILED
        self.spec = FakeKernel.last = spec

    def call(self, *arguments):
        params = self.spec.params()
        assert len(arguments) == len(params)
        rows, values = len(arguments[0]), {}
        sizes = {"rows": rows, "bytes": self.spec.workspace_bytes(rows)}
        for param, value in zip(params, arguments, strict=True):
            if value is None:
                assert param.default is not None
                continue
            shape = tuple(sizes.get(size, size) for size in param.shape)
            assert tuple(value.shape) == shape, param.name
            assert str(value.dtype) == f"torch.{param.dtype}", param.name
            assert value.is_contiguous()
            values[param.name] = value
        FakeKernel.calls += 1
        values["y"].copy_(self.result(values))

    def result(self, values):
        s = self.spec
        weights = bs.LinearWeights(
            *(values["packed"], values["block_scale"], None, values["global_scale"], None),
            *(s.fmt, s.n, s.k, s.group, s.gated, s.zero, s.layout),
            dtype=values["x"].dtype if s.fmt == "int4" else None,
        )
        bias = values["bias"].numpy() if "bias" in values else None
        added = widen(values["residual"]) if "residual" in values else None
        x = moe.qdq(widen(values["x"]), "fp8") if s.act_fmt else widen(values["x"])
        truth = reference.layer(x, weight_of(weights), bias, s.activation, s.gated, added)
        return torch.from_numpy(truth)


@pytest.fixture
def fake_cuda(monkeypatch):
    """Let CPU tensors go the way of CUDA tensors, to `FakeKernel`."""
    monkeypatch.setattr(protocol, "kernel", lambda spec, device: FakeKernel(spec))
    monkeypatch.setattr(protocol, "remembered", {})
    monkeypatch.setattr(ops_linear, "_check_layout", lambda x, facts: None)
    monkeypatch.setattr(FakeKernel, "calls", 0)


@pairs(
    legal=gates_need_an_activation,
    case=["nvfp4", "mxfp4", "int4 32", "int4 64 zeros", "int4 128 zeros", "mxfp4 tiles64e"],
    size=[(6, 1), (70, 3)],
    dtype=["bfloat16", "float16"],
    activation=ACTIVATIONS,
    gated=[False, True],
    residual=[False, True],
    out_dtype=[None, "float32"],
    act_fmt=[None, "fp8"],
)
def test_cuda_contract(
    case, size, dtype, activation, gated, residual, out_dtype, act_fmt, fake_cuda
):
    """Calls in full and known ones hand over what the spec says, whose numbers are right."""
    case, layout, _ = case.partition(" tiles64e")
    made = Case(case, *size, dtype, activation, gated, residual, "fp8" if layout else act_fmt)
    weights = made.prepared(layout="tiles64e" if layout else "tiles64")
    options = {} if out_dtype is None else {"out_dtype": DTYPES[out_dtype]}
    for rows in (3, 3, 5):
        made.check(made.run(rows, weights, **options), rows, out_dtype)
    out = torch.full((3, made.truth.shape[1]), torch.nan, dtype=DTYPES[out_dtype or dtype])
    assert made.run(3, weights, out=out, **options) is out
    made.check(out, 3, out_dtype)
    assert FakeKernel.calls == 4
    assert not made.run(0, weights, **options).numel()
    assert FakeKernel.calls == 4


def test_cuda_output_is_all_that_is_allocated(fake_cuda, monkeypatch):
    """A known call with out= allocates nothing, and converts nothing."""
    made = Case("nvfp4", 70, 3, "bfloat16", "silu", True, True)
    weights = made.prepared(layout="tiles64")
    out = made.run(3, weights)

    def refuse(*_, **__):
        raise AssertionError("allocated")

    seen = []
    monkeypatch.setattr(FakeKernel, "call", lambda self, *arguments: seen.append(arguments))
    protocol.remembered.clear()
    made.run(3, weights, out=out)
    for name in ("new_empty", "contiguous", "to", "float", "clone", "expand"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    x, residual = made.x[:3], made.added[:3]
    bs.linear(x, weights, activation="silu", residual=residual, out=out)
    assert len(seen) == 2
    tensors = x, weights.packed, weights.block_scale, weights.global_scale, weights.bias
    for value, passed in zip((*tensors, residual, out), seen[1], strict=True):
        assert value is passed


def test_a_weight_that_the_call_converts_is_not_loaded_ahead(fake_cuda, monkeypatch):
    """A kernel that begins early would read it while torch's kernels still write."""
    made, asked = Case("int4 32", 70, 3, "bfloat16"), []
    weights = made.prepared(layout="tiles64")
    monkeypatch.setattr(protocol, "launch_flags", lambda cuda, pdl=None: asked.append(pdl) or ())
    made.run(3, weights)
    monkeypatch.setattr(ops_linear, "prepared", lambda *_: weights)
    bs.linear(made.x[:3], weights.packed, weights.block_scale, fmt="int4")
    assert asked == [None, False]


def test_tiles64e_is_for_rows_of_fp8(fake_cuda):
    made = Case("mxfp4", 14, 2, "bfloat16", act_fmt="fp8")
    weights = made.prepared(layout="tiles64e")
    with rejects("layout 'tiles64e'", "pass act_fmt='fp8'", "layout='tiles64'"):
        bs.linear(made.x, weights)
    with rejects("fast_accum=True", "act_fmt=None", "'fp8'"):
        bs.linear(made.x, weights, fast_accum=True)


@pytest.mark.parametrize("case", ["int4 64 zeros", "mxfp4"])
def test_cuda_weights_compile(case, fake_cuda):
    """One graph: the operator takes a weight in tiles, and knows the shape of the result."""
    act_fmt = "fp8" if case == "mxfp4" else None
    made = Case(case, 70, 3, "bfloat16", "silu", True, True, act_fmt)
    weights = made.prepared(layout="tiles64e" if act_fmt else "tiles64")
    torch._dynamo.reset()
    options = {"activation": "silu", "out_dtype": torch.float32, "act_fmt": act_fmt}
    options["fast_accum"] = bool(act_fmt)
    function = torch.compile(
        lambda x, residual: bs.linear(x, weights, residual=residual, **options),
        fullgraph=True,
        backend="aot_eager",
    )
    y = function(made.x[:3], made.added[:3])
    made.check(y, 3, "float32")
    assert FakeKernel.calls == 1
    assert FakeKernel.last.fast_accum == bool(act_fmt)  # of a layout of 8 bits


def test_cuda_tensors_are_not_converted_in_a_graph():
    """The device of fake tensors says cuda without a GPU."""
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        x = torch.empty(3, 64, dtype=torch.bfloat16, device="cuda")
        with rejects("linear: packed is a tensor", "cuda", "prepare_linear_weights"):
            bs.linear(x, LAYER.tensors["packed"], LAYER.tensors["block_scale"])


def test_layouts_of_devices():
    """Errors for weights of another device, which no GPU is needed for."""
    made = Case("int4 32", 14, 2, "bfloat16")
    facts, x = made.prepared(layout="tiles64").facts, torch.zeros(1, 64, device="meta")
    with checks.without_data():
        with rejects("linear: x has dtype float32", "bfloat16 or float16"):
            ops_linear._check_layout(x, facts)
        with rejects("x has dtype float16", "prepared for bfloat16", "dtype=x.dtype"):
            ops_linear._check_layout(x.half(), facts)
    with rejects("linear: the weight is in layout 'tiles64'", "cpu", "'linear'", "to_linear"):
        made.run(3, made.prepared(layout="tiles64"))


# ---- What is refused ----------------------------------------------------------------------------

LAYER, GATED = Case("nvfp4", 16, 4, "bfloat16"), Case("nvfp4", 16, 4, "bfloat16", "silu", True)
WEIGHTS, INT4 = LAYER.prepared(), Case("int4 64", 16, 1, "bfloat16").prepared()
X = LAYER.x[:3]
Y = torch.empty(3, 16, dtype=torch.bfloat16)

REFUSED = [
    (lambda: bs.linear(X, WEIGHTS, activation="swish"), ["activation='swish'", "silu"]),
    (lambda: bs.linear(X, WEIGHTS, gated=True, activation="silu"), ["gated=True", "prepare"]),
    (lambda: bs.linear(X, GATED.prepared()), ["activation='none'", "gated", "'silu'"]),
    (lambda: bs.linear(X, **GATED.tensors), ["activation='none'", "gated", "'silu'"]),
    (lambda: bs.linear(X, WEIGHTS, bias=LAYER.bias), ["prepared", "bias"]),
    (lambda: bs.linear(X, WEIGHTS, residual=Y[:2]), ["residual", r"\[2, 16\]", r"\[3, 16\]"]),
    (lambda: bs.linear(X, WEIGHTS, residual=Y.float()), ["residual", "float32", "bfloat16"]),
    (lambda: bs.linear(X, INT4, residual=Y.float()), ["residual", "float32", "bfloat16"]),
    (lambda: bs.linear(X, INT4, activation="swish"), ["activation='swish'", "silu"]),
    (lambda: bs.linear(X, WEIGHTS, out=Y[:2]), ["out", r"\[2, 16\]", r"\[3, 16\]"]),
    (lambda: bs.linear(X, WEIGHTS, out=Y.float()), ["out", "float32", "bfloat16"]),
    (lambda: bs.linear(X, WEIGHTS, residual=Y, out=Y), ["out overlaps residual", "clone"]),
    (lambda: bs.linear(X, WEIGHTS, out_dtype=torch.int8), ["out_dtype", "int8", "bfloat16"]),
    (lambda: bs.linear(X, INT4, out_dtype=torch.int8), ["out_dtype", "int8", "bfloat16"]),
    (lambda: bs.linear(X[:, :32].contiguous(), WEIGHTS), ["32 columns", "64"]),
    (lambda: bs.linear(X, WEIGHTS, act_fmt="int8"), ["act_fmt='int8'", "nvfp4"]),
    (
        lambda: bs.linear(X, WEIGHTS, act_fmt="fp8", act_global_scale=torch.ones(1)),
        ["act_global_scale", "act_fmt='fp8'", "act_fmt='nvfp4'"],
    ),
    (lambda: LAYER.prepared(act_fmt="int8"), ["act_fmt='int8'", "fp8"]),
    (lambda: LAYER.prepared(layout="tiles64e"), ["tiles64e", "mxfp4", "not for nvfp4"]),
    (lambda: bs.linear(X, WEIGHTS, act_fmt="nvfp4"), ["layout '128x4'", "'linear'"]),
    (lambda: bs.linear(X, LAYER.prepared(layout="128x4")), ["layout '128x4'", "cpu", "'linear'"]),
    (
        lambda: bs.linear(X, WEIGHTS, act_global_scale=torch.ones(1)),
        ["act_global_scale", "act_fmt='nvfp4'"],
    ),
    (
        lambda: bs.linear(X.requires_grad_(), WEIGHTS),
        ["requires grad", "no backward"],
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refused(number):
    """Errors say where, what, the rule and the remedy."""
    made, words = REFUSED[number]
    try:
        with rejects("linear", *words):
            made()
    finally:
        X.requires_grad_(False)


@pytest.mark.parametrize("known", [False, True])
def test_gradients_of_a_residual(known):
    """There is no backward, and nothing is left out of one in silence."""
    residual = torch.zeros(3, 16, dtype=torch.bfloat16)
    if known:
        bs.linear(X, WEIGHTS, residual=residual)
    with rejects("residual", "requires grad"):
        bs.linear(X, WEIGHTS, residual=residual.requires_grad_())
    with rejects("linear: residual is a list"):
        bs.linear(X, WEIGHTS, residual=residual.tolist())


def test_known_calls_leave_what_a_library_cannot_see_to_the_checks():
    """A CUDA library knows nothing of gradients, and takes no other classes."""
    weights = LAYER.prepared(layout="tiles64")
    spec = Linear(16, 64, dtype="bfloat16", layout="tiles64", residual=True)
    options, tensors = ("none", None, False, weights.facts), (weights.packed, weights.block_scale)
    given = X, *tensors, weights.global_scale, weights.bias
    ready = ops_linear._LINEAR.ready
    assert ready(spec, options, (*given, Y, None)) is not None
    for residual in (torch.zeros_like(Y).requires_grad_(), Y.tolist()):
        assert ready(spec, options, (*given, residual, None)) is None
    with torch.no_grad():
        assert ready(spec, options, (*given, Y.clone().requires_grad_(), None)) is not None
