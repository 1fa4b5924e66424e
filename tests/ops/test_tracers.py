"""Every function under all that torch does to tensors and calls: equal, or refused in words.

`CALLS` are the functions with all their tensors; the tables below say what becomes of them.
"""

import contextlib
import ctypes
import mmap
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import blockscale as bs
from blockscale.compat import flashinfer as fi
from blockscale.ops.int4 import Int4Weight
from blockscale.runtime import jit
from blockscale.specs import Spec
from tests.kit.helpers import one
from tests.kit.pairwise import those
from tests.ops.test_torch_compile import (
    ALPHA,
    BIAS,
    CODES,
    GATE_UP,
    GATE_UP_SCALE,
    GEMM_SCALE,
    LOGITS,
    MASK,
    MOE_FACTORS,
    MOE_IDS,
    MOE_X,
    OFFSETS,
    PACKED,
    SCALE,
    SWIZZLED,
    E,
    G,
    R,
    W,
    X,
    fresh,
    quantized,
)

X128 = X[:, :128].contiguous()
W13, W13_SCALE = quantized(3, 128, 64, seed=4)
W2, W2_SCALE = quantized(3, 64, 64, seed=5)
INT4 = torch.arange(128 * 8, dtype=torch.int64).view(128, 8).mul(37).to(torch.uint8)
INT4_SCALE = torch.linspace(0.5, 1.5, 16).view(1, 16)


def moe(hidden, w13, w2, ids, factors, w13_scale, w2_scale):
    return bs.fused_moe(hidden, w13, w2, ids, factors, w13_scale=w13_scale, w2_scale=w2_scale)


def library(name):
    """Return the kernel itself, as ``lib[name]`` is."""
    return lambda *arguments: jit.function(Spec.parse(name))(*arguments)


CALLS = {
    "quantize": (lambda x, g: bs.quantize(x, global_scale=g), (X, G)),
    "quantize given": (
        lambda x, p, s: bs.quantize(x, packed=p, block_scale=s),
        (X, fresh(5, 128), fresh(5, 16)),
    ),
    "dequantize": (lambda p, s, g: bs.dequantize(p, s, global_scale=g), (PACKED, SCALE, G)),
    "dequantize given": (lambda p, s, o: bs.dequantize(p, s, out=o), (PACKED, SCALE, X128.clone())),
    "swizzle": (bs.swizzle_scales, (SCALE,)),
    "unswizzle": (lambda s: bs.unswizzle_scales(s, 5, 8), (SWIZZLED,)),
    "sweep": (bs.nvfp4_fp8_scale_sweep, (X, one(4.0))),
    "linear": (lambda x, p, s, g: bs.linear(x, p, s, global_scale=g), (X128, PACKED, SCALE, G)),
    "nn.Linear": (lambda x, p, s: bs.nn.Linear(p, s)(x), (X128, PACKED, SCALE)),
    "add_rmsnorm": (bs.add_rmsnorm_fp4quant, (X, R, W)),
    "rmsnorm": (lambda x, w: bs.rmsnorm_fp4quant(x[None], w), (X, W)),
    "rmsnorm given": (bs.rmsnorm_fp4quant, (X, W, fresh(5, 128), fresh(5, 16))),
    "silu": (lambda x, g: bs.silu_and_mul_fp4quant(x, global_scale=g), (X, G)),
    "gelu": (lambda x: bs.gelu_tanh_and_mul_fp4quant(x, is_sf_swizzled_layout=True), (X,)),
    "swiglu": (lambda x: bs.swiglu_fp4quant(x, limit=3.0), (X,)),
    "grouped": (bs.grouped_quantize, (E, MASK, torch.tensor([0.5, 2.0]), fresh(2, 5, 128))),
    "grouped silu": (bs.silu_and_mul_grouped_fp4quant, (E,)),
    "mm": (
        lambda a, b, s, t, f, bias: bs.mm_fp4(a, b, s, t, f, bias=bias),
        (CODES, CODES, GEMM_SCALE, GEMM_SCALE, ALPHA, BIAS),
    ),
    "grouped mm": (
        bs.grouped_mm_fp4,
        (CODES, CODES[None], GEMM_SCALE, GEMM_SCALE[None], OFFSETS, ALPHA),
    ),
    "grouped mm act": (
        bs.grouped_mm_act_fp4quant,
        (CODES, GATE_UP, GEMM_SCALE, GATE_UP_SCALE[None], OFFSETS, ALPHA, ALPHA),
    ),
    "fused moe": (moe, (MOE_X, W13, W2, MOE_IDS, MOE_FACTORS, W13_SCALE, W2_SCALE)),
    "route": (lambda x: bs.moe_route(x, 3, scoring="sigmoid", scale=2.0), (LOGITS,)),
    "prepare moe": (
        lambda a, b, s, t: bs.prepare_moe_weights(a, b, w13_scale=s, w2_scale=t),
        (W13, W2, W13_SCALE, W2_SCALE),
    ),
    "int4": (bs.int4.linear, (X128, INT4, INT4_SCALE)),
    "int4 grouped": (
        bs.int4.grouped_mm,
        (X128, INT4[None], INT4_SCALE[None], torch.tensor([0, 5], dtype=torch.int32)),
    ),
    "int4 prepare": (bs.int4.prepare, (INT4, INT4_SCALE)),
    "int4 dequantize": (bs.int4.dequantize, (INT4, INT4_SCALE)),
    "Int4Linear": (bs.nn.Int4Linear(bs.int4.prepare(INT4, INT4_SCALE)), (X128,)),
    "marlin": (bs.layouts.marlin_scales, (torch.arange(128.0).view(2, 64),)),
    "flashinfer": (lambda x, g: fi.fp4_quantize(x, g), (X, G)),
    "library": (library("quantize_nvfp4_bf16"), (X, G, fresh(5, 128), fresh(5, 16))),
}


WRITTEN = {
    "quantize given": (1, 2),
    "dequantize given": (2,),
    "add_rmsnorm": (1,),
    "rmsnorm given": (2, 3),
    "grouped": (3,),
    "library": (2, 3),
}
"""The tensors that a call writes, by their place."""


class Plain(torch.Tensor):
    """A subclass as users write them."""


class PlainParameter(torch.nn.Parameter):
    """A subclass as vLLM has them."""


class Wrapped(torch.Tensor):
    """A subclass that gets torch's operations itself."""

    @staticmethod
    def __new__(cls, inner):
        kept = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        kept.inner = inner
        return kept

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        inner = lambda t: t.inner if isinstance(t, cls) else t  # noqa: E731
        return function(*map(inner, args), **{k: inner(v) for k, v in (kwargs or {}).items()})


class Seen(TorchDispatchMode):
    """A mode that writes down what it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def cloned(given):
    return tuple(t.view(torch.uint8).clone().view(t.dtype) for t in given)


def flat(result):
    """Return the tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (Int4Weight, bs.MoeWeights)):
        return [tensor for _, tensor in result.tensors()]
    return list(result)


def bytes_of(values):
    plain = (t.detach().as_subclass(torch.Tensor).contiguous() for t in values)
    return [t.view(torch.uint8).tolist() for t in plain]


def judge(name, run, refusal):
    """Give a call tensors of its own: what they and the results hold is right, or it is refused."""
    function, given = CALLS[name]
    given, own = cloned(given), cloned(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if refusal is not None:
            with pytest.raises((TypeError, ValueError, RuntimeError), match=refusal):
                run(function, given)
            return
        got = bytes_of(flat(run(function, given))) + bytes_of(given)
    assert got == bytes_of(flat(function(*own))) + bytes_of(own)


# ---- What a tensor is ---------------------------------------------------------------------------


def read_only(t):
    """Return the tensor in a page that cannot be written."""
    data = t.view(torch.uint8).numpy().tobytes()
    page = mmap.mmap(-1, len(data))
    page.write(data)
    held = torch.frombuffer(page, dtype=torch.uint8).view(t.dtype).view(t.shape)
    address, prot_read = ctypes.c_void_p(held.data_ptr()), 1
    assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(len(data)), prot_read) == 0
    return held


FLOATS = (torch.float32, torch.bfloat16)
TENSORS = {
    "subclass": (lambda t: t.as_subclass(Plain), None),
    "parameter": (lambda t: PlainParameter(t, requires_grad=False), None),
    "wrapped": (Wrapped, None),
    "read-only": (read_only, None),
    "negative": (torch._neg_view, r"negative bit, .*pass \w+\.resolve_neg\(\)"),
    "meta": (lambda t: t.to("meta"), r"(is|are) on (device )?meta|out of meta tensor"),
    "expanded": (lambda t: t[:1].expand(t.shape), r"must be contiguous|is not contiguous"),
    "grad": (lambda t: t.requires_grad_(), r"requires grad, but kernels have no backward"),
}
"""What is done to one tensor of a call after the other, and how it is refused; None: it works."""

WEIGHTS = {
    *(("sweep", 1), ("mm", 4), ("mm", 5), ("grouped mm", 5), ("marlin", 0)),
    *(("grouped mm act", 5), ("grouped mm act", 6)),
    *(("int4", 2), ("int4 grouped", 2), ("int4 prepare", 1), ("int4 dequantize", 1)),
}
"""Factors, and what is converted: they may require grad, and are taken as they are."""


COPIES = ("flashinfer", "nn.Linear", "Int4Linear")
"""What takes tensors of any strides."""


def expected(name, what, place):
    """Return the words; None: it works; "": there is nothing to try."""
    tensor = CALLS[name][1][place]
    nothing = {
        "read-only": place in WRITTEN.get(name, ()),  # nobody can know it: it is a crash
        "expanded": tensor.dim() == 0 or tensor.shape[0] == 1 or name in COPIES,
        "grad": tensor.dtype not in FLOATS,
    }
    if nothing.get(what):
        return ""
    if what == "wrapped" and name == "library":
        return "is a Wrapped, whose class answers torch's operations itself; pass a plain tensor"
    return None if what == "grad" and (name, place) in WEIGHTS else TENSORS[what][1]


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("name", CALLS)
def test_tensors(name, what):
    change = TENSORS[what][0]
    for place in range(len(CALLS[name][1])):

        def run(function, given, place=place):
            return function(*(change(t) if i == place else t for i, t in enumerate(given)))

        refusal = expected(name, what, place)
        if refusal != "":
            judge(name, run, refusal)


# ---- Who calls ----------------------------------------------------------------------------------


def traced(function, given):
    return make_fx(lambda *t: flat(function(*t)))(*cloned(given))(*given)


def exported(function, given):
    class Module(torch.nn.Module):
        def forward(self, *values):
            return flat(function(*values))

    return torch.export.export(Module(), cloned(given)).module()(*given)


def compiled(function, given):
    torch._dynamo.reset()
    return torch.compile(lambda *t: flat(function(*t)), backend="eager", fullgraph=True)(*given)


def scripted(function, given):
    def call(*values):
        return tuple(flat(function(*values)))

    return torch.jit.trace(call, cloned(given), check_trace=False)(*given)


def vmapped(function, given):
    mapped = torch.vmap(lambda *t: tuple(flat(function(*t))))
    return [t[0] for t in mapped(*(t[None] for t in given))]


def functionalized(function, given):
    return torch.func.functionalize(lambda *t: flat(function(*t)))(*given)


def of_first_float(function, given):
    """Return the call as a function of its first tensor of floats, and that tensor."""
    place = next(i for i, t in enumerate(given) if t.dtype in FLOATS)
    return lambda x: flat(function(*given[:place], x, *given[place + 1 :])), given[place]


def jvp(function, given):
    call, x = of_first_float(function, given)
    return torch.func.jvp(call, (x,), (x,))[0]


def differentiated(function, given):
    call, x = of_first_float(function, given)
    return torch.func.grad(lambda x: call(x)[0].float().sum())(x)


def dual(function, given):
    call, x = of_first_float(function, given)
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(t).primal for t in call(forward_ad.make_dual(x, x))]


def seen(function, given):
    with Seen() as mode:
        result = function(*given)
    if not isinstance(result, (Int4Weight, bs.MoeWeights)):  # which torch's operations make
        assert any(name.startswith("blockscale.") for name in mode.names), mode.names
    return result


def within(context):
    def run(function, given):
        with context():
            return function(*given)

    return run


@contextlib.contextmanager
def other_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


UNSEEN = {"library", "int4 dequantize"}
"""Kernels without an operator: where torch has to see the call, they are refused."""

IN_TORCH = {"prepare moe", "int4 prepare"}
"""Conversions that run no kernel here, but torch's operations."""

WRITES = {
    *("add_rmsnorm", "rmsnorm", "rmsnorm given", "silu", "gelu", "swiglu", "grouped"),
    *(
        "grouped silu",
        "mm",
        "grouped mm",
        "grouped mm act",
        "fused moe",
        "int4",
        "int4 grouped",
        "Int4Linear",
    ),
    "flashinfer",
}
"""Functions whose operators write what they are given."""

NO_FLOATS = {"swizzle", "unswizzle", "prepare moe"}

FUNC = dict.fromkeys(
    WRITES, r"torch\.func cannot transform this call \(.*call it outside, on the who"
)
UNDIFFERENTIATED = {
    **dict.fromkeys(CALLS, r"asks for a derivative .*, but kernels have none; detach it"),
    **dict.fromkeys(UNSEEN, r"(torch\.func .*|forward-mode AD) is at work in this thread"),
    **dict.fromkeys(NO_FLOATS, ""),
    **dict.fromkeys(("int4 prepare", "marlin"), None),  # conversions: the values alone
}
SAYS = "is at work in this thread, and would not see the call of a library's function"
CALLERS = {
    "make_fx": (traced, {}),
    "export": (exported, {}),
    "compile": (compiled, dict.fromkeys(UNSEEN, "Unsupported|cannot be traced")),
    "jit.trace": (
        scripted,
        dict.fromkeys(CALLS, r"jit\.trace cannot hold it; use torch\.export")
        | dict.fromkeys(IN_TORCH, ""),
    ),
    "vmap": (vmapped, FUNC),
    "functionalize": (functionalized, FUNC),
    "jvp": (jvp, UNDIFFERENTIATED),
    "grad": (differentiated, UNDIFFERENTIATED | dict.fromkeys(("int4 prepare", "marlin"), "")),
    "forward AD": (dual, UNDIFFERENTIATED),
    "mode": (seen, {}),
    "autocast": (within(lambda: torch.autocast("cpu", torch.bfloat16)), {}),
    "inference": (within(torch.inference_mode), {}),
    "no_grad": (within(torch.no_grad), {}),
    "dtype": (within(other_dtype), {}),
    "device": (within(lambda: torch.device("meta")), {}),
}
"""Who calls the functions; those that are refused, with the words; "": there is nothing to try."""

QUIET = {"autocast", "inference", "no_grad", "dtype", "device"}
"""Callers who do not look: a library's function may run."""


def by_default(name, what):
    """Dynamo takes its time; `test_torch_compile` has more of it."""
    return what not in ("export", "compile") or name in UNSEEN or not list(CALLS).index(name) % 4


@those(by_default, name=list(CALLS), what=list(CALLERS))
def test_callers(name, what):
    run, refused = CALLERS[what]
    refusal = refused.get(name, None)
    if name in UNSEEN and what not in {*QUIET, "compile"}:
        refusal = SAYS
    if refusal != "":
        judge(name, run, refusal)


def test_compiled_around_a_library():
    """Without fullgraph, torch.compile leaves the call of a library's function to Python."""

    def run(function, given):
        torch._dynamo.reset()
        return torch.compile(function, backend="eager")(*given)

    judge("library", run, None)
