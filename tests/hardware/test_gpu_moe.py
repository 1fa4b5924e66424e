"""The MoE layer on a GPU: numbers, routings, graphs, streams, memory, and random calls.

The same functions in the emulator: test_moe_library.py.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.runtime import jit
from blockscale.specs import Spec
from tests.hardware import moe as gpu_moe
from tests.hardware.moe import PLAIN, QUANTIZED, ROUTES, SMALL, call, check, expected, rows_of
from tests.kit.gpu_checks import Poisoned, dirty_memory
from tests.reference import moe as moe

GPU = pytest.mark.gpu
SPECS = pytest.mark.parametrize("spec", [*PLAIN, *QUANTIZED], ids=lambda spec: spec.name)
MILLISECOND = 2_000_000
"""Cycles of an H200, for torch.cuda._sleep."""


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    found = jit.function

    def function(spec, *kind):
        assert spec.name in gpu_moe.NAMES, f"add {spec.name} to gpu_moe"
        return found(spec, *kind)

    monkeypatch.setattr(jit, "function", function)


def test_names():
    """Every name is that of a kernel, written as the kernel itself writes it, and there once."""
    assert [Spec.parse(name).name for name in gpu_moe.NAMES] == [*gpu_moe.NAMES]
    assert len(set(gpu_moe.NAMES)) == len(gpu_moe.NAMES)


# ---------------------------------------------------------------------------------------- numbers
@GPU
@SPECS
def test_numbers(spec):
    """Every number of tokens; outputs given and allocated, memory full of NaN before."""
    for tokens in gpu_moe.TOKENS:
        rows = rows_of(spec, tokens)
        some, want = gpu_moe.sampled(spec, rows)
        make = Poisoned("cuda")
        for out in (None, make((tokens, spec.hidden), rows[0].dtype)):
            dirty_memory("cuda", spec.workspace_bytes(tokens), rows[0].nbytes)
            got = call(spec, *rows, out=out)
            assert out is None or got is out
            check(spec, got[some], want)
        make.check()


@GPU
@SPECS
@pytest.mark.parametrize("routing", moe.ROUTINGS)
def test_routings(spec, routing):
    """All to one expert, one each, dropped ids: a row without experts is zero."""
    for tokens in (1, 7, 64, 300):
        rows = rows_of(spec, tokens, routing, seed=1)
        got = call(spec, *rows)
        check(spec, got, expected(spec, *rows))
        none = ((rows[1] < 0) | (rows[1] >= spec.experts)).all(1)
        assert (got[none] == 0).all()


@GPU
@pytest.mark.parametrize("spec", [PLAIN[0], PLAIN[7], QUANTIZED[0]], ids=lambda spec: spec.name)
@pytest.mark.parametrize("tokens", [8192, 8193, 65536])
def test_many_tokens(spec, tokens):
    """Chunks of 8192 tokens in one workspace."""
    rows = rows_of(spec, tokens, "half_dropped")
    some, want = gpu_moe.sampled(spec, rows)
    check(spec, call(spec, *rows)[some], want)


@GPU
def test_edges_of_buckets():
    """A token less and more than each bucket's limit, whose kernels agree."""
    spec = PLAIN[0]
    limits = [b["limit"] for b in jit.function(spec, "cuda").buckets if b["limit"]]
    assert limits
    rows = rows_of(spec, max(limits) + 1)
    some, want = gpu_moe.sampled(spec, rows, len(rows[0]))
    for tokens in sorted({t for limit in limits for t in (limit, limit + 1)}):
        check(spec, call(spec, *(tensor[:tokens] for tensor in rows)), want[some < tokens])


@GPU
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_width(dtype):
    spec = PLAIN[0]
    hidden, ids, weights = rows_of(spec, 33, "half_dropped")
    check(spec, call(spec, hidden, ids.to(dtype), weights), expected(spec, hidden, ids, weights))


@GPU
def test_nothing_depends_on_time():
    """The same bits, call after call."""
    for spec in (PLAIN[0], QUANTIZED[0]):
        for tokens in (1, 64, 4096):
            rows = rows_of(spec, tokens)
            first = call(spec, *rows)
            assert all(torch.equal(call(spec, *rows), first) for _ in range(20))


@GPU
def test_thousand_random_calls():
    """Tokens, routing, layer and memory of before are random; no row of any call is wrong."""
    rng = np.random.default_rng(6)
    for i in range(1000):
        spec = SMALL[rng.integers(len(SMALL))]
        tokens = int(np.exp2(rng.uniform(0, 11)))
        rows = rows_of(spec, tokens, moe.ROUTINGS[rng.integers(len(moe.ROUTINGS))], seed=i)
        check(spec, call(spec, *rows), expected(spec, *rows))


# -------------------------------------------------------------------------------- graphs, streams
@GPU
@SPECS
def test_replay_with_changed_routing(spec):
    """A graph knows no number of rows of an expert: each replay sorts anew."""
    for tokens in (1, 17, 300):
        rows = rows_of(spec, tokens)
        call(spec, *rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(spec, *rows)
        for seed, routing in enumerate((*moe.ROUTINGS, "random")):
            for old, new in zip(rows, rows_of(spec, tokens, routing, seed), strict=True):
                old.copy_(new)
            for _ in range(3):
                graph.replay()
            check(spec, got, expected(spec, *rows))


@GPU
def test_calls_in_a_row():
    """Layer after layer without a pause, the workspace handed on: as with a pause after each."""
    spec = PLAIN[0]
    for tokens in (1, 16, 200):
        hidden, ids, weights = rows_of(spec, tokens)
        plain, fast = [hidden], [hidden]
        for calls, pause in ((plain, True), (fast, False)):
            for _ in range(20):
                calls.append(torch.tanh(call(spec, calls[-1], ids, weights) + hidden))
                if pause:
                    torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))


@GPU
def test_streams_at_once():
    """Calls on two streams have workspaces of their own."""
    spec = PLAIN[0]
    inputs = [rows_of(spec, 200, seed=i) for i in range(2)]
    wants = [call(spec, *rows) for rows in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(10):
        got = []
        for stream, rows in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(call(spec, *rows))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, wants, strict=True))


@GPU
def test_nothing_waits_for_the_gpu():
    """torch sees no synchronisation, and while the GPU is busy all calls return."""
    cases = [(spec, rows_of(spec, t)) for spec in (PLAIN[0], QUANTIZED[0]) for t in (1, 300, 9000)]
    for spec, rows in cases:
        call(spec, *rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200 * MILLISECOND)
        slept = torch.cuda.current_stream().record_event()
        for spec, rows in cases:
            call(spec, *rows)
        assert not slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------ route
@GPU
@pytest.mark.parametrize("spec", ROUTES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("tokens", [1, 5, 1000, 40001])
def test_route(spec, tokens):
    """Ids are those of the float64 reference, but where two choices are next to each other."""
    rng = np.random.default_rng(tokens)
    logits = torch.from_numpy(3 * rng.standard_normal((tokens, spec.experts))).cuda()
    logits = logits.to(getattr(torch, spec.dtype))
    bias = rng.uniform(-0.4, 0.4, spec.experts).astype(np.float32) if spec.bias else None
    groups = {"n_group": spec.n_group, "topk_group": spec.topk_group} if spec.n_group > 1 else {}
    options = {"scoring": spec.scoring, "renormalize": spec.renormalize, "scale": 1.5, **groups}
    shift = None if bias is None else torch.from_numpy(bias).cuda()
    ids, weights = bs.moe_route(logits, spec.top_k, correction_bias=shift, **options)
    want, factors = moe.moe_route(
        logits.double().cpu().numpy(), spec.top_k, correction_bias=bias, **options
    )
    same = (ids.cpu().numpy() == want).all(1)
    assert same.mean() > 0.998  # of 40 million choices few pairs are equal in float32
    np.testing.assert_allclose(weights.cpu().numpy()[same], factors[same], 2e-6)
