"""What the torch functions refuse, and what they say."""

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
        (lambda: ADD(X.to("meta"), R, W), ["input", "meta", "cpu"]),
        (lambda: ADD(X, R.to("meta"), W), ["residual", "meta", "cpu"]),
        (lambda: ADD(X[:, :200].clone(), R, W), ["hidden=200", "multiple of block_size=16"]),
        (lambda: ADD(X[:, :48].clone(), R, W), ["hidden=48", "at least 64"]),
        (lambda: bs.rmsnorm_fp4quant(X, W[:16]), ["rmsnorm_fp4quant", "weight"]),
        (lambda: bs.silu_and_mul_fp4quant(X[:, :144].clone()), ["144", "multiple of 16"]),
        (lambda: bs.silu_and_mul_fp4quant(X, Y), ["y_fp4", r"\[4, 128\]", r"\[4, 64\]"]),
        (lambda: bs.swiglu_fp4quant(X, alpha="1"), ["alpha", "str", "float"]),
        (lambda: bs.grouped_quantize(X), ["input", "3 dimensions"]),
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
