"""What the torch functions refuse, and what they say."""

import inspect
import math

import pytest
import torch

import blockscale as bs
from blockscale.ops import call, checks
from blockscale.runtime import jit
from blockscale.specs import NormQuantize
from tests.fused.test_ops_fused import norm_inputs
from tests.kit.helpers import one, rejects, same, widen

X, R, W = norm_inputs(4)
Y, S = torch.empty(4, 128, dtype=torch.uint8), torch.empty(4, 16, dtype=torch.uint8)
ADD = bs.add_rmsnorm_fp4quant


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ADD(X.float(), R, W), ["input", "float32", "bfloat16"]),
        (lambda: ADD(X.tolist(), R, W), ["input", "list", "tensor"]),
        (lambda: ADD(X, R.half(), W), ["residual", "float16", "bfloat16"]),
        (lambda: ADD(X, R, W.float()), ["weight", "float32", "bfloat16"]),
        (lambda: ADD(X, R[:2], W), ["residual", r"\[2, 256\]", r"\[4, 256\]"]),
        (lambda: ADD(X, R, W[:128]), ["weight", r"\[128\]", r"\[256\]"]),
        (lambda: ADD(X, X, W), ["residual", "overlaps", "input"]),
        (lambda: ADD(X[1:], X[:-1], W), ["residual", "overlaps", "input"]),
        (lambda: ADD(X, R.repeat(1, 2)[:, ::2], W), ["residual", "contiguous"]),
        (lambda: ADD(X, R.t().contiguous().t(), W), ["residual", "contiguous"]),
        (lambda: ADD(X.repeat(1, 2)[:, ::2], R, W), ["input", "contiguous"]),
        (lambda: ADD(X, R, W, Y[:3]), ["y_fp4", r"\[3, 128\]", r"\[4, 128\]"]),
        (lambda: ADD(X, R, W, Y.float()), ["y_fp4", "float32", "uint8"]),
        (lambda: ADD(X, R, W, Y, S[:, :8].contiguous()), ["block_scale", r"\[4, 8\]", "16"]),
        (lambda: ADD(X, R, W, Y, S, is_sf_swizzled_layout=True), ["block_scale", "2048"]),
        (
            lambda: ADD(X, R, W, block_scale=S[:, :8].float(), block_size=32),
            ["block_scale", "float32", "uint8"],
        ),
        (
            lambda: ADD(
                X, R, W, block_scale=S[:, :8].clone().view(torch.float8_e4m3fn), block_size=32
            ),
            ["block_scale", "float8_e4m3fn", "uint8"],
        ),
        (
            lambda: ADD(X, R, W, output_both_sf_layouts=True, block_scale_unswizzled=S[:3]),
            ["block_scale_unswizzled", r"\[3, 16\]"],
        ),
        (lambda: ADD(X, R, W, block_scale_unswizzled=S), ["output_both_sf_layouts"]),
        (lambda: ADD(X, R, W, y_out=X[:2].clone()), ["y_out", r"\[2, 256\]"]),
        (lambda: ADD(X, R, W, y_out=X.half()), ["y_out", "float16", "bfloat16"]),
        (lambda: ADD(X, R, W, y_out=X), ["y_out", "overlaps", "input"]),
        (lambda: ADD(X, R, W, Y, Y.view(-1)[:64].view(4, 16)), ["block_scale", "overlaps"]),
        (lambda: ADD(X, R, W, block_size=8), ["block_size", "8", "16", "32"]),
        (lambda: ADD(X, R, W, scale_format="ue8m0"), ["ue8m0", "block_size=16"]),
        (lambda: ADD(X, R, W, scale_format="e5m2"), ["scale_format", "e5m2", "ue8m0"]),
        (lambda: ADD(X, R, W, global_scale=torch.ones(2)), ["global_scale", "one element"]),
        (lambda: ADD(X, R, W, global_scale=torch.ones(1).half()), ["global_scale", "float16"]),
        (lambda: ADD(X, R, W, eps=torch.ones(1)), ["eps", "Tensor", "float"]),
        (lambda: ADD(X, R, W, eps=math.nan), ["eps=nan", "must be 0 or more"]),
        (lambda: ADD(X, R, W, eps=-1e-6), ["eps=-1e-06", "must be 0 or more"]),
        (lambda: bs.swiglu_fp4quant(X, alpha=math.nan), ["alpha=nan", "must be a number"]),
        (lambda: bs.swiglu_fp4quant(X, limit=-1.0), ["limit=-1.0", "must be 0 or more"]),
        (lambda: bs.moe_route(X, 2, scale=math.nan), ["scale=nan", "must be a number"]),
        (lambda: ADD(X.to("meta"), R, W), ["input", "meta", "cpu"]),
        (lambda: ADD(X, R.to("meta"), W), ["residual", "meta", "cpu"]),
        (lambda: ADD(X[:, :200].clone(), R, W), ["hidden=200", "multiple of block_size=16"]),
        (lambda: ADD(X[:, :48].clone(), R, W), ["hidden=48", "at least 64"]),
        (lambda: bs.rmsnorm_fp4quant(X, W[:16]), ["rmsnorm_fp4quant", "weight"]),
        (lambda: bs.silu_and_mul_fp4quant(X[:, :144].clone()), ["144", "multiple of 16"]),
        (lambda: bs.silu_and_mul_fp4quant(X, Y), ["y_fp4", r"\[4, 128\]", r"\[4, 64\]"]),
        (lambda: bs.swiglu_fp4quant(X, alpha="1"), ["alpha", "str", "float"]),
        (lambda: bs.grouped_quantize(X), ["x has shape", "3 dimensions"]),
        (
            lambda: bs.grouped_quantize(X[None], torch.ones(1)),
            ["mask", "float32", "int32"],
        ),
        (
            lambda: bs.grouped_quantize(X[None], torch.ones(2, dtype=torch.int32)),
            ["mask", r"\[2\]", r"\[1\]"],
        ),
        (
            lambda: bs.grouped_quantize(X[None], global_scale=torch.ones(3)),
            ["global_scale", r"\[3\]", r"\[1\]"],
        ),
        (lambda: bs.quantize(X, packed=Y[:3]), ["packed", r"\[3, 128\]"]),
        (lambda: bs.quantize(X, block_scale=S.int()), ["block_scale", "int32"]),
        (lambda: bs.dequantize(Y, S, out=X.half()), ["out", "float16", "bfloat16"]),
        (lambda: bs.swizzle_scales(S, out=S), ["out", r"\[4, 16\]", r"\[128, 16\]"]),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_bad_input(call, words, known):
    """One sentence, be it the first call of its kind or not; the residual is not touched."""
    before = R.clone()
    if known:
        ADD(X, R.clone(), W)
        ADD(X, R.clone(), W, y_out=torch.empty_like(X))
        bs.silu_and_mul_fp4quant(X)
        bs.grouped_quantize(X[None])
    with rejects(*words):
        call()
    same(widen(R), widen(before))


def test_misaligned_views():
    """A view at an odd address is refused by name."""
    odd = torch.frombuffer(bytearray(9), dtype=torch.float32, count=1, offset=1)
    for _ in range(2):
        with rejects("global_scale", "address", "multiple of 4"):
            bs.rmsnorm_fp4quant(X, W, global_scale=odd)
        bs.rmsnorm_fp4quant(X, W)


def test_gradients():
    """A parameter is taken under no_grad, and refused where autograd would have to record."""
    weight = torch.nn.Parameter(W.clone())
    for _ in range(2):
        with rejects("weight", "requires grad"):
            bs.rmsnorm_fp4quant(X, weight)
        with torch.no_grad():
            bs.rmsnorm_fp4quant(X, weight)


class OnDevice(torch.Tensor):
    """A tensor that says that it is on another device."""

    @property
    def device(self):
        return torch.device("cuda:1")


def test_two_devices():
    """Both devices are named."""
    with rejects("residual", "cuda:1", "input", "cpu"):
        checks.same_device("f", "residual", R.as_subclass(OnDevice), "input", X)
    with rejects("global_scale", "cuda:1", "x is on cpu"):
        checks.one_element("f", "global_scale", one(1).as_subclass(OnDevice), "x", X)


def test_kernels_of_the_right_kind(monkeypatch):
    """CPU tensors ask for a CPU kernel, CUDA tensors for a CUDA kernel."""
    asked = []
    monkeypatch.setattr(jit, "function", lambda *args: asked.append(args))
    spec = NormQuantize(256)
    call.kernel(spec, torch.device("cpu"))
    call.kernel(spec, torch.device("cuda:1"))
    assert asked == [(spec,), (spec, "cuda")]
    assert call.launch_flags(True, False) == (0,)
    for default_or_on in (None, True):
        assert call.launch_flags(True, default_or_on) == (call.PROGRAMMATIC,)
    assert call.launch_flags(False, True) == ()


# ---- Remedies -----------------------------------------------------------------------------------

ROWS, K, N = torch.randn(32, 384), 384, 64


def filled(*shape, dtype=torch.uint8):
    """Return bytes of some dtype."""
    return torch.full(shape, 0x38, dtype=torch.uint8).view(dtype)


CODES, SCALE = filled(N, K // 2), filled(N, K // 16)
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
W13, W2 = filled(4, 192, 32), filled(4, 64, 48)
S13, S2 = filled(4, 192, 4), filled(4, 64, 6)
INT4, INT4_SCALE = filled(256, 32), torch.ones(2, 64)
BF16 = torch.bfloat16


def prepared(w13=W13, w2=W2, **options):
    """Return MoE weights."""
    return bs.prepare_moe_weights(w13, w2, **{"w13_scale": S13, "w2_scale": S2, **options})


def linear(packed=CODES, scale=SCALE, *options, **named):
    return bs.linear(ROWS, packed, scale, *options, **named)


REMEDIES = [
    # scales in another layout: what the function has, or the call that undoes it
    (lambda: linear(scale=filled(128, 24)), ["unswizzle_scales(block_scale, 64, 24)"], ["layout="]),
    (
        lambda: linear(scale=filled(128 * 24)),
        ["unswizzle_scales(block_scale, 64, 24)"],
        ["layout="],
    ),
    (lambda: bs.dequantize(CODES, filled(128, 24)), ["scale_layout='128x4'"], []),
    (lambda: bs.dequantize(CODES, SCALE, scale_layout="128x4"), ["swizzle_scales()"], []),
    (lambda: prepared(w13_scale=filled(4, 256, 4)), ["layouts.from_128x4(w13_scale, 192, 4)"], []),
    (
        lambda: bs.grouped_mm_fp4(
            *(filled(32, 192), filled(4, 64, 192), filled(512, 24), filled(4, 64, 24)),
            torch.tensor([0, 8, 16, 24, 32], dtype=torch.int32),
        ),
        ["b_scale", "layouts.to_128x4()"],
        [" swizzle_scales()"],
    ),
    # values where codes are needed: to be quantised, not converted
    (lambda: prepared(torch.randn(4, 192, 64).bfloat16()), ["w13", "quantize()"], ["convert it"]),
    (lambda: prepared(w13_scale=S13.float()), ["w13_scale", "quantize()"], ["convert it", ".to("]),
    (lambda: linear(torch.randn(N, K)), ["packed", "quantize()"], [".to("]),
    (lambda: linear(CODES.view(torch.int8)), ["packed.view(torch.uint8)"], []),
    (lambda: bs.quantize(CODES), ["dequantize()"], [".to("]),
    (lambda: bs.int4.prepare(torch.randn(256, 64), INT4_SCALE), ["checkpoints", "AWQ"], [".to("]),
    # scales of another format
    (lambda: linear(CODES, filled(N, 24, dtype=E4M3), "mxfp4"), ["those of nvfp4"], [".to("]),
    (lambda: linear(CODES, filled(N, 12, dtype=E8M0)), ["those of mxfp4"], [".to("]),
    (lambda: linear(CODES, SCALE, "mxfp4"), ["size for nvfp4", "fmt='nvfp4'"], []),
    (lambda: linear(CODES, filled(N, 12)), ["size for mxfp4", "fmt='mxfp4'"], []),
    (
        lambda: prepared(fmt="mxfp4", w13_scale=filled(4, 192, 2, dtype=E4M3)),
        ["w13_scale", "those of nvfp4"],
        ["convert it"],
    ),
    (lambda: prepared(fmt="mxfp4"), ["w13_scale", "fmt='nvfp4'"], []),
    (
        lambda: bs.mm_fp4(filled(32, 192), CODES, filled(128, 24), filled(128, 24), fmt="mxfp4"),
        ["a_scale", "fmt='nvfp4'"],
        ["swizzle_scales"],
    ),
    # numbers of another dtype: to be converted, to the one that is needed
    (lambda: bs.linear(ROWS.double(), CODES, SCALE), ["x.to(torch.float32)"], []),
    (lambda: linear(global_scale=torch.ones(1).half()), ["global_scale.to(torch.float32)"], []),
    (lambda: ADD(X, R, W.float()), ["weight.to(torch.bfloat16)"], []),
    (lambda: ADD(X, R, W, Y.float()), ["y_fp4", "allocate it", "leave it out"], [".to("]),
    (lambda: bs.grouped_quantize(X[None], torch.tensor([4])), ["mask.to(torch.int32)"], []),
    (
        lambda: bs.fused_moe(X[:, :64].clone(), prepared(), torch.ones(4, 2), torch.ones(4, 2)),
        ["topk_ids", "whole numbers"],
        [".to("],
    ),
    # what is no tensor
    (lambda: linear(scale=None), ["block_scale is missing"], ["NoneType"]),
    (lambda: linear(global_scale=0.5), ["torch.tensor([0.5], dtype=torch.float32)"], []),
    (lambda: bs.linear(ROWS.numpy(), CODES, SCALE), ["torch.from_numpy(x)"], []),
    (lambda: prepared([*W13]), ["torch.stack(w13)"], []),
    (
        lambda: bs.rmsnorm_fp4quant(X, W, 1e-6),
        ["y_fp4 is a float", "leave it out"],
        ["for example"],
    ),
    (lambda: bs.linear(ROWS.to_sparse(), CODES, SCALE), ["x.to_dense()"], ["contiguous"]),
    (lambda: bs.linear(ROWS.to("meta"), CODES, SCALE), ["meta"], [".cpu()", ".cuda()"]),
    # dtypes by name
    (lambda: bs.dequantize(CODES, SCALE, dtype="float32"), ["pass torch.float32"], ["choose"]),
    (lambda: prepared(dtype="bfloat16"), ["pass torch.bfloat16"], ["choose"]),
    (
        lambda: bs.int4.linear(ROWS[:, :256].clone(), INT4, INT4_SCALE, out_dtype="float32"),
        ["torch.float32"],
        [],
    ),
    (lambda: bs.int4.dequantize(INT4, INT4_SCALE, dtype="float16"), ["pass torch.float16"], []),
    (lambda: bs.dequantize(CODES, SCALE, dtype=torch.int8), ["torch.int8", "torch.bfloat16"], []),
    (
        lambda: prepared(dtype=torch.float32, layout="tiles64"),
        ["no kernel on CUDA", "torch.bfloat16, torch.float16"],
        ["torch.float32,"],
    ),
    # shapes that are right but for the order
    (lambda: linear(filled(192, 64)), ["packed.T.contiguous()"], ["features"]),
    (lambda: linear(filled(384, 32)), ["[N, K]"], ["features", ".T"]),
    (lambda: linear(scale=filled(24, 64)), ["block_scale.T.contiguous()"], ["one scale per"]),
    (
        lambda: bs.mm_fp4(filled(32, 192), filled(192, 64), filled(128, 24), filled(128, 24)),
        ["b.T.contiguous()"],
        [],
    ),
    (lambda: prepared(W2, W13), ["are exchanged"], ["H=", "I="]),
    (lambda: prepared(filled(4, 32, 192)), ["w13.transpose(1, 2).contiguous()"], ["H=", "w2 is"]),
    (lambda: prepared(filled(4, 64, 96)), ["w13 was transposed before"], ["H=", "w2 was"]),
    (lambda: prepared(w2=filled(4, 48, 64)), ["w2.transpose(1, 2).contiguous()"], ["w13 is"]),
    (lambda: prepared(w2=filled(4, 96, 32)), ["w2 was transposed before"], ["w13 was"]),
    (
        lambda: prepared(filled(4, 64, 96), filled(4, 96, 32)),
        ["w13 was transposed before", "w2 was transposed before"],
        [],
    ),
    (lambda: prepared(activation="relu2"), ["has gate rows"], []),
    (lambda: prepared(filled(4, 96, 32)), ["no gate rows", "'relu2'"], []),
    (lambda: prepared(w2=filled(4, 63, 48)), ["both weights of one layer"], ["transposed"]),
    (
        lambda: prepared(w13_scale=filled(4, 4, 192)),
        ["w13_scale.transpose(-2, -1).contiguous()"],
        [],
    ),
    (lambda: bs.int4.prepare(INT4, INT4_SCALE.T.contiguous()), ["scale.T.contiguous()"], []),
    (lambda: bs.int4.prepare(INT4, INT4_SCALE, group_size=64), ["group_size=128"], []),
    (lambda: bs.int4.prepare(filled(64, 128), INT4_SCALE), ["layout='rows'"], []),
    (
        lambda: prepared(
            fmt="int4", w13_scale=torch.ones(4, 192, 4), w2_scale=torch.ones(4, 64, 6)
        ),
        ["2 or 1 scales", "32 or 64"],
        [" 0 scales", "128"],
    ),
    (lambda: bs.swizzle_scales(SCALE[0]), ["block_scale.reshape(1, -1)"], ["cut into blocks"]),
    (
        lambda: bs.fused_moe(X[:, :48].clone(), prepared(), Y, Y),
        ["weights of this layer"],
        ["flatten"],
    ),
    (lambda: bs.fused_moe(X[None, :, :64].clone(), prepared(), Y, Y), ["reshape(-1, 64)"], []),
    (lambda: bs.rmsnorm_fp4quant(X, W[:128].clone()), ["weight"], ["leave"]),
    # options
    (lambda: linear(CODES, SCALE, "nvpf4"), ["did you mean 'nvfp4'?"], []),
    (lambda: prepared(activation="gelu"), ["did you mean 'gelu_tanh'?"], []),
    (lambda: bs.quantize(ROWS, scale_rounding="floor"), ["scale_rounding='floor'"], ["Quantize"]),
    (lambda: bs.rmsnorm_fp4quant(X, W, block_size=[16]), ["block_size=[16]", "choose 16"], []),
    # modules: at their construction, in the words of their arguments
    (lambda: bs.nn.Linear(CODES, SCALE, "nvpf4"), ["Linear", "did you mean 'nvfp4'?"], []),
    (lambda: bs.nn.Linear(fmt="dense")(ROWS), ["pass weight"], ["packed"]),
    (lambda: bs.nn.Linear.from_float(ROWS[:, :380]), ["from_float", "weight", "384"], ["x has"]),
    (lambda: bs.nn.Linear.from_float(ROWS, "int4"), ["from_float", "'nvfp4'"], ["quantize:"]),
    (lambda: bs.nn.Linear.from_float(torch.nn.Embedding(2, 16)), ["weight.weight"], []),
    (lambda: bs.nn.Int4Linear(INT4), ["int4.prepare()"], ["meta"]),
    (lambda: bs.nn.FusedMoE(W13, 2), ["prepare_moe_weights()"], ["meta"]),
    (lambda: bs.nn.FusedMoE(None, 2, scoring="sigmod"), ["did you mean 'sigmoid'?"], []),
    (lambda: bs.build("swizzle_128x4", "out.so"), ["['swizzle_128x4']"], ["'s'"]),
    (lambda: bs.tune("swizzle_128x4"), ["['swizzle_128x4']"], ["'s'"]),
]


@pytest.mark.parametrize(("call", "said", "unsaid"), REMEDIES)
def test_remedies(call, said, unsaid):
    """Who does what the sentence says gets on: words that it has, and that it must not have."""
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    sentence = str(error.value)
    assert all(words in sentence for words in said), sentence
    assert not [words for words in unsaid if words in sentence], sentence
    assert "convert it first" not in sentence
    assert ";" in sentence, "there is no remedy"


def test_remedies_that_are_obeyed():
    """Some of them, word for word: the next call goes through its checks."""
    laid = bs.swizzle_scales(SCALE)
    with rejects(r"pass unswizzle_scales\(block_scale, 64, 24\)$"):
        linear(scale=laid)
    assert torch.equal(linear(scale=bs.unswizzle_scales(laid, 64, 24)), linear())
    turned = CODES.T.contiguous()
    with rejects(r"pass packed\.T\.contiguous\(\)$"):
        linear(turned)
    assert torch.equal(linear(turned.T.contiguous()), linear())
    laid = bs.layouts.to_128x4(S13)
    with rejects(r"pass layouts\.from_128x4\(w13_scale, 192, 4\)$"):
        prepared(w13_scale=laid)
    assert torch.equal(prepared(w13_scale=bs.layouts.from_128x4(laid, 192, 4)).w13_scale, S13)


class Nothing:
    """What no argument may be."""


GOOD = {
    "quantize": (bs.quantize, {"x": ROWS}),
    "dequantize": (bs.dequantize, {"packed": CODES, "block_scale": SCALE}),
    "swizzle_scales": (bs.swizzle_scales, {"block_scale": SCALE}),
    "unswizzle_scales": (
        bs.unswizzle_scales,
        {"swizzled": filled(128, 24), "rows": 64, "cols": 24},
    ),
    "nvfp4_fp8_scale_sweep": (bs.nvfp4_fp8_scale_sweep, {"x": ROWS, "global_amax": one(1)}),
    "linear": (bs.linear, {"x": ROWS, "packed": CODES, "block_scale": SCALE}),
    "prepare_linear_weights": (
        bs.prepare_linear_weights,
        {"packed": CODES, "block_scale": SCALE},
    ),
    "mm_fp4": (
        bs.mm_fp4,
        {"a": CODES, "b": CODES, "a_scale": filled(128, 24), "b_scale": filled(128, 24)},
    ),
    "grouped_mm_act_fp4quant": (
        bs.grouped_mm_act_fp4quant,
        {
            "activation": "swiglu",
            "a": CODES,
            "b": filled(1, 128, 192),
            "a_scale": filled(128, 24),
            "b_scale": filled(1, 128, 24),
            "offsets": torch.tensor([0, 64], dtype=torch.int32),
        },
    ),
    "add_rmsnorm_fp4quant": (ADD, {"input": X, "residual": R, "weight": W}),
    "rmsnorm_fp4quant": (bs.rmsnorm_fp4quant, {"input": X, "weight": W}),
    "silu_and_mul_fp4quant": (bs.silu_and_mul_fp4quant, {"input": X}),
    "swiglu_fp4quant": (bs.swiglu_fp4quant, {"input": X}),
    "grouped_quantize": (bs.grouped_quantize, {"x": X[None]}),
    "silu_and_mul_grouped_fp4quant": (bs.silu_and_mul_grouped_fp4quant, {"input": X[None]}),
    "prepare_moe_weights": (
        bs.prepare_moe_weights,
        {"w13": W13, "w2": W2, "w13_scale": S13, "w2_scale": S2},
    ),
    "moe_route": (bs.moe_route, {"logits": ROWS, "top_k": 2}),
    "int4.prepare": (bs.int4.prepare, {"packed": INT4, "scale": INT4_SCALE, "target": "cuda"}),
    "layouts.to_128x4": (bs.layouts.to_128x4, {"scales": SCALE}),
    "layouts.marlin_scales": (bs.layouts.marlin_scales, {"scales": INT4_SCALE}),
}
ANYTHING = {  # truth values, and what depends on other options
    *(
        "is_sf_swizzled_layout",
        "output_both_sf_layouts",
        "enable_pdl",
        "renormalize",
        "gated",
        "int4_signed",
    ),
    *("block_scale_unswizzled", "moe", "sm"),
}


@pytest.mark.parametrize("name", GOOD)
def test_errors_name_the_argument(name):
    """Each argument in turn is nothing of its kind: the sentence names it as the signature does."""
    function, good = GOOD[name]
    wrong = {}
    for parameter in inspect.signature(function).parameters:
        if parameter in ANYTHING:
            continue
        with pytest.raises((TypeError, ValueError)) as error:
            function(**{**good, parameter: Nothing()})
        sentence = str(error.value)
        if f"{name}: {parameter}" not in sentence:
            wrong[parameter] = sentence
    assert not wrong


def test_numbers_are_judged_in_every_call():
    """A call like one that was right before asks the kernel, which knows the rule too."""
    right = bs.rmsnorm_fp4quant(X, W)
    for eps in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"^rmsnorm_fp4quant: eps=.* must be 0 or more"):
            bs.rmsnorm_fp4quant(X, W, eps=eps)
        with pytest.raises(ValueError, match=r"^rmsnorm_nvfp4_h256_bf16: eps is .*; pass 0 or mor"):
            jit.function(NormQuantize(256, 16, "e4m3", "bfloat16", False))(X, W, None, eps, Y, S)
    assert torch.equal(
        right[1].view(torch.uint8), bs.rmsnorm_fp4quant(X, W, eps=0)[1].view(torch.uint8)
    )
