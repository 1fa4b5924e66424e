"""What torch does to tensors on a GPU: subclasses, the negative bit, streams, graphs, processes."""

import multiprocessing

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import blockscale as bs
from blockscale.runtime import jit
from blockscale.specs import Spec
from tests.kit import gpu_checks
from tests.kit.gpu_checks import U8

pytestmark = pytest.mark.gpu
NORM = Spec.parse("add_rmsnorm_nvfp4_h256_bf16")


class Plain(torch.Tensor):
    """A subclass as users write them."""


class PlainParameter(torch.nn.Parameter):
    """A subclass as vLLM has them."""


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    gpu_checks.only_listed(monkeypatch)


def inputs(rows=5):
    values = torch.randn(2, rows, 256, generator=torch.Generator().manual_seed(rows))
    x, residual = values.to("cuda", torch.bfloat16)
    return x, residual, torch.ones(256, dtype=torch.bfloat16, device="cuda")


def called(change, place):
    """Return the bytes of a norm, one of whose tensors was changed."""
    given = [change(t) if i == place else t for i, t in enumerate(inputs())]
    made = (*bs.add_rmsnorm_fp4quant(*given), given[1])
    plain = (t.as_subclass(torch.Tensor).contiguous() for t in made)
    return [t.view(U8).tolist() for t in plain]


KINDS = {
    "subclass": lambda t: t.as_subclass(Plain),
    "parameter": lambda t: PlainParameter(t, requires_grad=False),
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_subclasses(kind, place):
    """They run like tensors, in the first call and in later ones."""
    want = called(lambda t: t, 0)
    for _ in range(3):
        assert called(KINDS[kind], place) == want


def test_subclasses_on_a_stream_and_in_a_graph():
    x, residual, weight = inputs()
    kept = PlainParameter(weight, requires_grad=False)
    before = residual.clone()
    want = bs.add_rmsnorm_fp4quant(x, residual, weight)
    residual.copy_(before)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        got = bs.add_rmsnorm_fp4quant(x.as_subclass(Plain), residual, kept)
    for _ in range(2):
        residual.copy_(before)
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.as_subclass(torch.Tensor).view(U8), b.view(U8))


def test_the_negative_bit():
    """It is refused in the first call and, of the first tensor, in later ones."""
    for _ in range(2):
        with pytest.raises(ValueError, match=r"input is a view with the negative bit"):
            called(torch._neg_view, 0)
        called(lambda t: t, 0)


def test_the_negative_bit_in_a_library():
    """A library's function refuses it in every tensor."""
    function = jit.function(NORM, "cuda")
    x, residual, weight = inputs()
    codes, scale = bs.add_rmsnorm_fp4quant(x, residual, weight)
    given = [x, residual, weight, None, 1e-6, codes.view(U8), scale, residual]
    for place in (0, 2, 6):
        changed = [torch._neg_view(t) if i == place else t for i, t in enumerate(given)]
        with pytest.raises(ValueError, match="is a view with the negative bit"):
            function(*changed)
    with pytest.raises(ValueError, match="eps is -1; pass 0 or more"):
        function.direct(*given[:4], -1.0, *given[5:])


def test_what_is_traced():
    """make_fx records the operator, and torch.func.jvp is refused."""
    x = inputs()[0]
    graph = make_fx(lambda t: bs.quantize(t)[0])(x + 1)
    assert torch.equal(graph(x), bs.quantize(x)[0])
    with pytest.raises(ValueError, match="asks for a derivative"):
        torch.func.jvp(lambda t: bs.quantize(t)[1], (x,), (x,))


def spawned(queue, libraries):
    for library in libraries:
        bs.load(library)
    queue.put(called(lambda t: t, 0))


def test_a_spawned_process(pytestconfig):
    """It has a CUDA context of its own, and the same bytes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    libraries = pytestconfig.getoption("--library")
    process = context.Process(target=spawned, args=(queue, libraries))
    process.start()
    try:
        assert queue.get(timeout=240) == called(lambda t: t, 0)
    finally:
        process.join(30)
