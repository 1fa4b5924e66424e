"""torch.compile keeps every function in one graph; the operators are what they claim to be."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blockscale as bs
from blockscale.compat import flashinfer as fi
from blockscale.ops import call, checks
from tests.kit.helpers import (
    as_bytes,
    one,
    packed_tensor,
    same,
    same_bytes,
    scale_tensor,
    widen,
)
from tests.kit.pairwise import those
from tests.reference import core as ref

BACKENDS = ["eager", "aot_eager", "inductor"]
OPS = torch.ops.blockscale


def normal(*shape, seed=0):
    """Return normal bfloat16 values."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)


X, R, W = normal(5, 256), normal(5, 256, seed=1), normal(256, seed=2)
E, MASK = normal(2, 5, 256), torch.tensor([5, 2], dtype=torch.int32)
G, G2 = one(0.5), torch.tensor([0.5, 2.0])


def quantized(*shape, seed=0):
    """Return packed codes and scales of normal values, without a kernel: this is import time."""
    codes, byte = ref.quantize(widen(normal(*shape, seed=seed)), "nvfp4")
    return packed_tensor(codes), scale_tensor(byte, "nvfp4")


def swizzled(scale):
    return scale_tensor(ref.swizzle(as_bytes(scale)), "nvfp4")


PACKED, SCALE = quantized(5, 128)
SWIZZLED = swizzled(SCALE)
CODES, GEMM_SCALE = quantized(8, 128, seed=3)
GEMM_SCALE = swizzled(GEMM_SCALE)
ALPHA, BIAS, OFFSETS = one(0.5), torch.arange(8.0), torch.tensor([0, 8], dtype=torch.int32)
BYTES = SCALE.view(torch.uint8)  # opcheck multiplies tensors, and float8 has no product


def fresh(*shape):
    return torch.full(shape, 0xFF, dtype=torch.uint8)


MOE = bs.prepare_moe_weights(
    quantized(3, 128, 64, seed=4)[0],
    quantized(3, 64, 64, seed=5)[0],
    w13_scale=quantized(3, 128, 64, seed=4)[1],
    w2_scale=quantized(3, 64, 64, seed=5)[1],
)
LINEAR = bs.prepare_linear_weights(PACKED, SCALE, global_scale=G)
W4A4 = bs.prepare_linear_weights(*quantized(8, 128, seed=3), layout="128x4")
INT4 = bs.prepare_linear_weights(
    quantized(6, 64, seed=4)[0], torch.full((6, 2), 0.01), fmt="int4", bias=torch.ones(6)
)
GATE_UP, GATE_UP_SCALE = quantized(128, 128, seed=6)
GATE_UP, GATE_UP_SCALE = GATE_UP[None], swizzled(GATE_UP_SCALE)
MOE_X, MOE_IDS = normal(5, 64), torch.tensor([[0, 2]] * 3 + [[1, -1]] * 2, dtype=torch.int32)
MOE_FACTORS = torch.full((5, 2), 0.5)
LOGITS = torch.arange(40.0).view(5, 8).sin()


def add_with_everything(x, r):
    """Use every option, with what is given and what is not."""
    y = torch.empty_like(x)
    codes, scale, linear = bs.add_rmsnorm_fp4quant(
        x * 2, r, W, global_scale=G, eps=1e-5, output_both_sf_layouts=True, y_out=y
    )
    return codes, scale, linear, y + 1, r * 2


FUNCTIONS = {
    "add_rmsnorm": (lambda x, r: (*bs.add_rmsnorm_fp4quant(x + 1, r, W), r), (X, R)),
    "add_rmsnorm everything": (add_with_everything, (X, R)),
    "add_rmsnorm given": (
        lambda x, r, y, s: (*bs.add_rmsnorm_fp4quant(x, r, W, y, s), r + 1),
        (X, R, fresh(5, 128), fresh(5, 16)),
    ),
    "add_rmsnorm mxfp4": (
        lambda x, r: bs.add_rmsnorm_fp4quant(
            x, r.clone(), W, block_size=32, is_sf_swizzled_layout=True
        ),
        (X, R),
    ),
    "rmsnorm": (lambda x: bs.rmsnorm_fp4quant(x.view(1, 5, 256), W), (X,)),
    "silu": (lambda x: bs.silu_and_mul_fp4quant(x, global_scale=G), (X,)),
    "gelu": (lambda x: bs.gelu_tanh_and_mul_fp4quant(x, is_sf_swizzled_layout=True), (X,)),
    "swiglu": (lambda x: bs.swiglu_fp4quant(x, limit=3.0), (X,)),
    "grouped": (
        lambda x, p: bs.grouped_quantize(x, MASK, G2, p),
        (E, torch.zeros(2, 5, 128, dtype=torch.uint8)),
    ),
    "grouped silu": (lambda x: bs.silu_and_mul_grouped_fp4quant(x), (E,)),
    "quantize": (lambda x: bs.quantize(x * 2, "mxfp4", G, "128x4"), (X,)),
    "quantize given": (
        lambda x, p, s: bs.quantize(x, packed=p, block_scale=s),
        (X, fresh(5, 128), fresh(5, 16)),
    ),
    "dequantize": (lambda p, s: bs.dequantize(p, s, global_scale=G) + 1, (PACKED, SCALE)),
    "swizzle": (lambda s: bs.swizzle_scales(s), (SCALE,)),
    "unswizzle": (lambda s: bs.unswizzle_scales(s, 5, 8), (SWIZZLED,)),
    "sweep": (lambda x: bs.nvfp4_fp8_scale_sweep(x, x.abs().max()), (X,)),
    "linear": (
        lambda x, p, s: bs.linear(x[:, :128].contiguous(), p, s, global_scale=G),
        (X, PACKED, SCALE),
    ),
    "linear gated": (
        lambda x, p, s, r: bs.linear(
            x[:, :128].contiguous(), p, s, activation="silu", gated=True, residual=r
        ),
        (X, *(t[:4].contiguous() for t in (PACKED, SCALE)), normal(5, 2)),
    ),
    "linear prepared": (
        lambda x, y: bs.linear(x[:, :128].contiguous(), LINEAR, out=y) + y,
        (X, torch.zeros(5, 5, dtype=X.dtype)),
    ),
    "linear int4": (lambda x: bs.linear(x, INT4, activation="gelu_tanh"), (MOE_X,)),
    "linear w4a4": (lambda x: bs.linear(x, W4A4, act_fmt="nvfp4"), (X[:, :128].contiguous(),)),
    "mm": (lambda s: bs.mm_fp4(CODES, CODES, s, s, ALPHA, bias=BIAS) + 1, (GEMM_SCALE,)),
    "mm activation residual": (
        lambda s, r: bs.mm_fp4(CODES, CODES, s, s, residual=r * 2, activation="silu") + r,
        (GEMM_SCALE, normal(8, 8)),
    ),
    "mm given": (
        lambda s, d: bs.mm_fp4(CODES, CODES, s, s, out_dtype=torch.float32, out=d) + d,
        (GEMM_SCALE, torch.zeros(8, 8)),
    ),
    "grouped mm": (
        lambda s: bs.grouped_mm_fp4(CODES, CODES[None], s, s[None], OFFSETS, ALPHA),
        (GEMM_SCALE,),
    ),
    "grouped mm given": (
        lambda s, o, d: bs.grouped_mm_fp4(CODES, CODES[None], s, s[None], o, out=d),
        (GEMM_SCALE, torch.tensor([2, 7], dtype=torch.int32), normal(8, 8)),
    ),
    "grouped mm act": (
        lambda a, s: bs.grouped_mm_act_fp4quant(
            a, GATE_UP, s, GATE_UP_SCALE[None], OFFSETS, ALPHA, ALPHA
        ),
        (CODES, GEMM_SCALE),
    ),
    "grouped mm act given": (
        lambda s, p, o: bs.grouped_mm_act_fp4quant(
            CODES,
            GATE_UP,
            s,
            GATE_UP_SCALE[None],
            OFFSETS,
            activation="swiglu",
            limit=3.0,
            packed=p,
            block_scale=o,
        ),
        (GEMM_SCALE, fresh(8, 32), fresh(128, 4)),
    ),
    "fused moe": (
        lambda x, i, w: bs.fused_moe(x * 2, MOE, i, w) + 1,
        (MOE_X, MOE_IDS, MOE_FACTORS),
    ),
    "fused moe given": (
        lambda x, w, y: bs.fused_moe(x, MOE, MOE_IDS.long(), w, limit=3.0, out=y) + y,
        (MOE_X, MOE_FACTORS, torch.zeros_like(MOE_X)),
    ),
    "moe layer": (
        lambda x: bs.fused_moe(x, MOE, *bs.moe_route(x[:, :3].contiguous(), 2)),
        (MOE_X,),
    ),
    "route": (lambda x: bs.moe_route(x + 1, 3, scoring="sigmoid", scale=2.0), (LOGITS,)),
    "fi add_rmsnorm": (lambda x, r: (*fi.add_rmsnorm_fp4quant(x, r, W, None, None, G), r), (X, R)),
    "fi fp4_quantize": (lambda x: fi.fp4_quantize(x, G), (X,)),
    "fi mxfp4_quantize": (lambda x: fi.mxfp4_quantize(x, sfLayout=fi.SfLayout.layout_8x4), (X,)),
    "fi silu": (lambda x: fi.silu_and_mul_nvfp4_quantize(x, G), (X,)),
    "fi experts": (
        lambda x: fi.silu_and_mul_scaled_nvfp4_experts_quantize(x, torch.full_like(MASK, 5), G2),
        (E,),
    ),
}


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def cloned(arguments):
    return [a.clone() if a.dtype != checks.FP4 else a for a in arguments]


def by_default(name: str, backend: str) -> bool:
    """Inductor compiles C++ for seconds, around the same operators."""
    place = list(FUNCTIONS).index(name)
    return place % {"aot_eager": 3, "eager": 8, "inductor": 13}[backend] == 0


@those(by_default, name=list(FUNCTIONS), backend=BACKENDS)
def test_full_graph(name, backend):
    """Compiled and eager calls return the same bytes and leave the same in what they write."""
    function, arguments = FUNCTIONS[name]
    torch._dynamo.reset()
    eager, compiled = cloned(arguments), cloned(arguments)
    expected = tensors(function(*eager))
    got = tensors(torch.compile(function, fullgraph=True, backend=backend)(*compiled))
    assert len(got) == len(expected)
    for a, b in zip(got + compiled, expected + eager, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.element_size() == 1:
            same_bytes(as_bytes(a), as_bytes(b))
        else:
            same(widen(a), widen(b))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_any_number_of_rows(backend):
    """One graph serves them all."""
    torch._dynamo.reset()

    def function(x, r):
        codes, scale = bs.add_rmsnorm_fp4quant(x, r, W, is_sf_swizzled_layout=True)
        return codes.view(torch.uint8), scale, bs.silu_and_mul_fp4quant(x)[1]

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 130, 7):
            x, r = normal(rows, 256), normal(rows, 256, seed=1)
            expected, got = function(x, r.clone()), compiled(x, r)
            for a, b in zip(got, expected, strict=True):
                same_bytes(as_bytes(a), as_bytes(b))


def test_graph_holds_the_operator():
    """It is kept as one node, with what it writes as its arguments."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compile(FUNCTIONS["add_rmsnorm"][0], fullgraph=True, backend=backend)(X, R.clone())
    targets = [node.target for node in graphs[0].graph.nodes]
    assert OPS.add_rmsnorm_fp4quant in targets or OPS.add_rmsnorm_fp4quant.default in targets


def test_export():
    """torch.export keeps the functions too."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return bs.dequantize(*bs.quantize(x))

    program = torch.export.export(Module(), (X,))
    same(widen(program.module()(X)), widen(bs.dequantize(*bs.quantize(X))))


def test_errors_while_tracing():
    """A bad shape is said when the graph is made, in the words of the eager call."""
    torch._dynamo.reset()

    def function(x, r):
        return bs.add_rmsnorm_fp4quant(x, r[:3], W)

    with pytest.raises(Exception, match=r"residual has shape \[3, 256\], but must have \[5, 256\]"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(X, R.clone())


def test_fake_tensors():
    """Outside of torch.compile, fake tensors give fake tensors, on their own device."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(5, 256, dtype=torch.bfloat16, device="cuda:1")
        weight = torch.empty(256, dtype=torch.bfloat16, device="cuda:1")
        codes, scale = bs.rmsnorm_fp4quant(x, weight)
        assert codes.dtype == checks.FP4
        assert codes.shape == (5, 128)
        packed, other = bs.quantize(x, scale_layout="128x4")
        assert other.shape == (128, 16)
        for tensor in (codes, scale, packed, other, bs.dequantize(packed, scale)):
            assert str(tensor.device) == "cuda:1"
        with pytest.raises(ValueError, match=r"weight is on device cpu, but input is on cuda:1"):
            bs.rmsnorm_fp4quant(x, torch.empty(256, dtype=torch.bfloat16))


def test_meta_tensors():
    """The operators take meta tensors, which the functions refuse."""
    codes, scale = OPS.quantize(X.to("meta"))
    assert codes.is_meta
    assert (codes.shape, scale.shape) == ((5, 128), (5, 16))
    assert scale.dtype == torch.float8_e4m3fn


norm_outputs = (fresh(5, 128), fresh(5, 16))
GEMM_BYTES = GEMM_SCALE.view(torch.uint8)
act_outputs = (fresh(5, 64), fresh(5, 8))
SAMPLES = {
    "add_rmsnorm_fp4quant": ((X, R.clone(), W, *norm_outputs, None, None), {}),
    "rmsnorm_fp4quant": ((X, W, *norm_outputs, None, torch.empty_like(X)), {}),
    "silu_and_mul_fp4quant": ((X, None, *act_outputs, G, 16, None, "linear", None, []), {}),
    "swiglu_fp4quant": ((X, None, *act_outputs, G, 16, None, "linear", None, [1.0, 1.0, 7.0]), {}),
    "silu_and_mul_grouped_fp4quant": (
        (E, MASK, torch.zeros(2, 5, 64, dtype=torch.uint8), fresh(2, 128, 8), G2, 16, None)
        + ("128x4", None, []),
        {},
    ),
    "quantize": ((X,), {}),
    "dequantize": ((PACKED, BYTES), {}),
    "swizzle_scales": ((BYTES,), {}),
    "unswizzle_scales": ((SWIZZLED.view(torch.uint8), 5, 8), {}),
    "nvfp4_fp8_scale_sweep": ((X, X.abs().max()), {}),
    "linear": ((X[:, :128].contiguous(), PACKED, BYTES), {}),
    "mm_fp4": (
        (CODES, CODES, GEMM_BYTES, GEMM_BYTES, None, "nvfp4", torch.float32, BIAS)
        + (torch.ones(8, 8), "silu", torch.zeros(8, 8)),
        {},
    ),
    "grouped_mm_fp4": (
        (CODES, CODES[None], GEMM_BYTES, GEMM_BYTES[None], OFFSETS, ALPHA, "nvfp4")
        + (torch.float32, torch.zeros(8, 8)),
        {},
    ),
    "grouped_mm_act_fp4quant": (
        (CODES, GATE_UP, GEMM_BYTES, GATE_UP_SCALE[None].view(torch.uint8), OFFSETS, None, ALPHA)
        + ("swiglu", "nvfp4", torch.float16, [1.0, 0.0, 7.0], fresh(8, 32), fresh(128, 4)),
        {},
    ),
    "fused_moe": (
        (MOE_X, MOE_IDS, MOE_FACTORS, MOE.w13, MOE.w13_scale, None, MOE.w13_global, None, MOE.w2)
        + (MOE.w2_scale, None, MOE.w2_global, None, "nvfp4", 16, 3, 64, 64, True, False)
        + ("linear", None, "swiglu", None, 7.0, None, False, None, None, torch.zeros_like(MOE_X)),
        {},
    ),
    "moe_route": ((LOGITS, 3, "softmax", True, None, 2, 1, 2.5), {}),
    "flashinfer_add_rmsnorm_fp4quant": ((X, R.clone(), W, *norm_outputs, None, None, G), {}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    """torch's own checks: the schema, what is written, the fake implementation."""
    args, kwargs = SAMPLES[name]
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


def test_every_function_is_an_operator():
    """Under its own name; FlashInfer's with a prefix."""
    public = {name for name in bs.__all__ if name.islower() and name[0] != "_"}
    others = {"bind", "build", "fp8_scale_candidates", "load", "tune"}
    others |= {"interleave_gate_up", "prepare_linear_weights", "prepare_moe_weights"}
    assert public - others <= set(call.NAMES)
    assert "flashinfer_fp4_quantize" in call.NAMES
    assert len(set(call.NAMES)) == len(call.NAMES)


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (torch.empty(5, 8, dtype=torch.float16), TypeError),
        (torch.empty(8, 5, dtype=torch.bfloat16), ValueError),
        (torch.empty(5, 8, dtype=torch.bfloat16), None),
    ],
    ids=["dtype", "shape", "right"],
)
def test_outputs_are_checked_while_tracing(out, error):
    """Bits of one dtype are none of another's, though they are as many."""
    weights, x = bs.prepare_linear_weights(CODES, quantized(8, 128, seed=3)[1]), normal(5, 128)
    traced = torch.compile(lambda x, out: bs.linear(x, weights, out=out), backend="eager")
    if error is None:
        assert traced(x, out) is out
        assert torch.equal(out, bs.linear(x, weights))
        return
    with pytest.raises(error, match="out has"):
        traced(x, out)


def test_bytes_are_copied_to_bytes_alone():
    made = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="must have bfloat16"):
        call.copied("f", "y", torch.zeros(4, dtype=torch.float16), made)
    codes = torch.arange(4, dtype=torch.uint8)
    out = fresh(4).view(torch.float8_e4m3fn)
    assert call.copied("f", "y", out, codes).view(torch.uint8).equal(codes)


def test_outputs_of_quantisers_are_checked_while_tracing():
    """As eager calls do it: two rows are not four, and bytes alone hold codes."""
    x, fake = normal(4, 256), FakeTensorMode()
    for packed in (fresh(2, 256), fresh(4, 128).view(torch.int8), fresh(4, 256)[:, ::2]):
        with fake, pytest.raises((TypeError, ValueError), match="packed"):
            bs.quantize(fake.from_tensor(x), packed=fake.from_tensor(packed))
        with pytest.raises((TypeError, ValueError), match="packed"):
            bs.quantize(x, packed=packed)
    with fake:
        out = fake.from_tensor(fresh(4, 128))
        assert bs.quantize(fake.from_tensor(x), packed=out)[0] is out
