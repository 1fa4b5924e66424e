"""`blockscale.bind` on a GPU: values, streams, graphs, early launches, another device."""

import gc

import pytest
import torch

import blockscale as bs
from blockscale.specs import Spec
from tests.kit import gpu_checks, norms
from tests.kit.gpu_checks import U8, bytes_of
from tests.kit.helpers import same_bytes

GPU = pytest.mark.gpu
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
NORM = Spec.parse("add_rmsnorm_nvfp4_h512_both_y_f16")
MILLISECOND = 2_000_000
"""Cycles of an H200, for torch.cuda._sleep."""


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    gpu_checks.only_listed(monkeypatch)


def given(rows, device, seed=0):
    """Return input, residual, weight and y_out."""
    made = norms.inputs(NORM, rows, seed)
    found = [made[name].clone().to(device) for name in ("input", "residual", "weight")]
    return (*found, torch.empty_like(found[0]))


def norm(x, residual, weight, y, **options):
    return bs.add_rmsnorm_fp4quant(
        *(x, residual, weight), output_both_sf_layouts=True, y_out=y, **options
    )


def written(results, residual, y):
    """Return copies of all that a norm has written."""
    return [bytes_of(value).copy() for value in (*results, residual, y)]


def expected(x, residual, weight):
    """Return what a call of the function writes, given copies."""
    residual, y = residual.clone(), torch.empty_like(x)
    return written(norm(x, residual, weight, y), residual, y)


def compare(got, want):
    for one, other in zip(got, want, strict=True):
        same_bytes(one, other)


@ON_BOTH
@pytest.mark.parametrize("pdl", [None, False])
def test_values(device, pdl):
    """Bytes are those of the function, of tensors as bound, changed in place, and given anew."""
    x, residual, weight, y = given(130, device)
    step = bs.bind(norm, x, residual, weight, y, enable_pdl=pdl)
    for seed in (1, 2):
        x.copy_(given(130, device, seed)[0])
        want = expected(x, residual, weight)
        compare(written(step(), residual, y), want)
    other, more = given(130, device, 3)[:2]
    kept, want = bytes_of(residual).copy(), expected(other, more, weight)
    compare(written(step(other, more), more, y), want)
    same_bytes(bytes_of(residual), kept)
    with pytest.raises(
        ValueError, match=r"is float16 \[7, 512\] on .*, but the call was bound for"
    ):
        step(other[:7])


@ON_BOTH
def test_copies(device):
    """Another function, whose tensors the caller drops."""
    scale = torch.arange(130 * 32, device=device).to(U8).view(130, 32)
    want = bytes_of(bs.swizzle_scales(scale))
    step = bs.bind(bs.swizzle_scales, scale.clone())
    gc.collect()
    _ = [torch.zeros(130, 32, dtype=U8, device=device) for _ in range(8)]
    same_bytes(bytes_of(step()), want)


@GPU
def test_current_stream():
    """It is asked for in each call, which does not wait."""
    x, residual, weight, y = given(130, "cuda")
    step = bs.bind(norm, x, residual, weight, y)
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()):
        late = given(130, "cuda", 5)[0]
        want = expected(late, residual, weight)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50 * MILLISECOND)
            slept = stream.record_event()
            x.copy_(late)
            got = step()
            assert not slept.query()
        stream.synchronize()
        compare(written(got, residual, y), want)


@GPU
@pytest.mark.parametrize("anew", [False, True])
def test_graph(anew):
    """Replays read inputs anew; binding within a capture launches nothing."""
    x, residual, weight, y = given(130, "cuda")
    outer = bs.bind(norm, x, residual, weight, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = bs.bind(norm, x, residual, weight, y)
        got = inner(x, residual) if anew else outer()
    for seed in (6, 7):
        x.copy_(given(130, "cuda", seed)[0])
        want = expected(x, residual, weight)
        graph.replay()
        torch.cuda.synchronize()
        compare(written(got, residual, y), want)


@GPU
def test_nothing_is_allocated_or_waited_for():
    x, residual, weight, y = given(130, "cuda")
    step = bs.bind(norm, x, residual, weight, y)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
            step(x, residual)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("current", [0, 1])
def test_another_device(current):
    """Calls run where their tensors are, whatever the current device is."""
    x, residual, weight, y = given(130, "cuda:1")
    step = bs.bind(norm, x, residual, weight, y)
    want = expected(x, residual, weight)
    with torch.cuda.device(current):
        got = step()
        assert torch.cuda.current_device() == current
    torch.cuda.synchronize(1)
    compare(written(got, residual, y), want)
    with pytest.raises(ValueError, match=r"on cuda:0, but the call was bound for .* on cuda:1"):
        step(x.to("cuda:0"))
