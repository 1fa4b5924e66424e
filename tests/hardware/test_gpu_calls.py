"""How the torch functions run on a GPU: streams, threads, memory, graphs, PDL, torch.compile."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.ops.checks import padded_shape
from blockscale.specs import Spec
from tests.kit import gpu_checks, norms
from tests.kit.gpu_checks import U8, bytes_of, floats, norm_call, norm_outputs, one
from tests.kit.helpers import same, same_bytes, tensor
from tests.kit.paths import ROOT
from tests.reference import core as ref

GPU = pytest.mark.gpu
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
PDL = pytest.mark.parametrize("pdl", [False, True])
NORM = Spec.parse("add_rmsnorm_nvfp4_h512_both_y_f16")
MILLISECOND = 2_000_000
"""Cycles of an H200, for torch.cuda._sleep."""


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    gpu_checks.only_listed(monkeypatch)


def inputs(rows, device, seed=0):
    """Return the arguments of the norm on the CPU and on the device."""
    given = norms.inputs(NORM, rows, seed)
    return given, {key: value.clone().to(device) for key, value in given.items()}


def everything(device, rows=130):
    """Return calls of all functions that can be given their outputs, by name."""
    _, on = inputs(rows, device)
    x, wide = on["input"], tensor(np.ones((2, rows, 512)), "bfloat16").to(device)
    outputs = norm_outputs(NORM, (rows,), gpu_checks.Poisoned(device))
    padded = padded_shape(rows, 32)

    def empty(*shape, dtype=U8):
        return torch.zeros(shape, dtype=dtype, device=device)

    g, codes, scale, linear = one(2.0, device), empty(rows, 256), empty(*padded), empty(rows, 32)
    out, half = empty(rows, 512, dtype=torch.float16), empty(rows, 128)
    flat = empty(padded_shape(rows, 16)[0] * 16)
    mask = torch.tensor([rows, 7], dtype=torch.int32, device=device)
    grouped = empty(2, rows, 256), empty(2, *padded)
    return {
        "norm": lambda: norm_call(NORM, on, g, **outputs),
        "silu": lambda: bs.silu_and_mul_fp4quant(x, half, flat, is_sf_swizzled_layout=True),
        "quantize": lambda: bs.quantize(
            x, "nvfp4", g, "128x4", packed=codes, block_scale=scale.view(torch.float8_e4m3fn)
        ),
        "dequantize": lambda: bs.dequantize(
            codes, scale, "nvfp4", None, "128x4", torch.float16, out=out
        ),
        "swizzle": lambda: bs.swizzle_scales(linear, out=scale),
        "unswizzle": lambda: bs.unswizzle_scales(scale, rows, 32, out=linear),
        "grouped": lambda: bs.grouped_quantize(wide, mask, None, *grouped),
    }


def allocating(device):
    """Return calls that allocate their outputs, by name."""
    _, on = inputs(130, device)
    x, weight = on["input"], on["weight"][:256]
    scale = torch.ones(130, 32, dtype=U8, device=device)
    wide, amax = x.to(torch.bfloat16), one(4.0, device)
    return {
        "norm": lambda: norm_call(NORM, on, y_out=torch.empty_like(x)),
        "rmsnorm": lambda: bs.rmsnorm_fp4quant(
            x[:, :256].clone(), weight, output_both_sf_layouts=True, y_out=x[:, 256:].clone()
        ),
        "silu": lambda: bs.silu_and_mul_fp4quant(x, is_sf_swizzled_layout=True),
        "quantize": lambda: bs.quantize(x, scale_layout="128x4"),
        "swizzle": lambda: bs.swizzle_scales(scale),
        "grouped": lambda: bs.grouped_quantize(wide[None]),
        "sweep": lambda: bs.nvfp4_fp8_scale_sweep(wide, amax),
    }


@ON_BOTH
def test_all_calls(device):
    """Those that the tests below use run, again and again, and write what they are given."""
    for calls in (everything(device), allocating(device)):
        for _ in range(3):
            for call in calls.values():
                call()


# ---------------------------------------------------------------------------------------- streams
def check_on(stream, seed):
    """Compare a norm whose inputs come late, on ``stream``; return what was late."""
    given, late = inputs(130, "cuda", seed)
    on = {key: torch.full_like(value, float("nan")) for key, value in late.items()}
    want = norms.expected(NORM, given)
    outputs = norm_outputs(NORM, (130,), gpu_checks.Poisoned("cuda"))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50 * MILLISECOND)
        slept = stream.record_event()
        for key, value in late.items():
            on[key].copy_(value)
        got = norm_call(NORM, on, **outputs)
        again = bs.swizzle_scales(got[2])
        early = not slept.query()
        done = stream.record_event()
    torch.cuda.current_stream().wait_event(done)
    gpu_checks.compare_norm(NORM, (130,), got, want, on["residual"], outputs["y_out"])
    same_bytes(bytes_of(again), ref.swizzle(want["scale"]))
    return early


@GPU
def test_current_stream():
    """Kernels follow what is on torch's current stream, and the call does not wait for it."""
    norm_call(NORM, inputs(130, "cuda")[1], y_out=torch.empty(130, 512, device="cuda").half())
    bs.swizzle_scales(torch.ones(130, 32, dtype=U8, device="cuda"))
    assert check_on(torch.cuda.Stream(), 1)
    assert check_on(torch.cuda.Stream(priority=-1), 2)
    assert check_on(torch.cuda.default_stream(), 3)


@GPU
def test_threads():
    """Threads call at once, each on a stream of its own."""

    def work(seed):
        for i in range(3):
            check_on(torch.cuda.Stream(), 10 * seed + i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@GPU
def test_nothing_waits_for_the_gpu():
    """torch sees no synchronisation, and while the GPU is busy all calls return."""
    calls = [*everything("cuda").values(), *allocating("cuda").values()]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200 * MILLISECOND)
        slept = torch.cuda.current_stream().record_event()
        for call in calls:
            call()
        assert not slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@GPU
def test_nothing_is_allocated():
    """All outputs given: torch's allocator is not asked, be it the second call or the tenth."""
    for name, call in everything("cuda").items():
        call()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(10):
            call()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, name


# ----------------------------------------------------------------------------------------- graphs
@GPU
def test_first_use_in_a_capture(pytestconfig):
    """In a new process: code and constants are loaded while a graph is captured."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [str(Path(p).resolve()) for p in pytestconfig.getoption("--library")]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from tests.kit import gpu_checks; "
            "gpu_checks.first_use_in_capture(sys.argv[1:])",
        ]
        + libraries,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@GPU
@PDL
def test_replay_with_changed_inputs(pdl):
    """The graph reads its inputs anew at each replay, and updates the residual each time."""
    _, on = inputs(130, "cuda")
    outputs = norm_outputs(NORM, (130,), gpu_checks.Poisoned("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = norm_call(NORM, on, pdl=pdl, **outputs)
        values = bs.dequantize(got[0], got[1], "nvfp4", None, "128x4", torch.float16)
    for seed in (3, 4, 5):
        given, changed = inputs(130, "cuda", seed)
        for key, value in changed.items():
            on[key].copy_(value)
        for _ in range(2):
            graph.replay()
            want = norms.expected(NORM, given)
            gpu_checks.compare_norm(NORM, (130,), got, want, on["residual"], outputs["y_out"])
            codes = ref.unpack(want["packed"])
            same(floats(values), ref.dequantize(codes, want["scale"], "nvfp4", 1.0, "float16"))
            given["residual"] = tensor(want["residual"], "float16")


# -------------------------------------------------------------------------------------------- PDL
STEPS = 60


def chain(on, pdl):
    """Return every y, the last outputs and the residual of norms that feed each other."""
    rows, device = len(on["input"]), on["input"].device
    make = gpu_checks.Poisoned(device)
    outputs = [norm_outputs(NORM, (rows,), make) for _ in range(2)]
    ys = make((STEPS, rows, 512), torch.float16)
    x = on["input"]
    for i, y in enumerate(ys):
        last = outputs[i % 2] | {"y_out": y}
        norm_call(NORM, {**on, "input": x}, pdl=pdl, **last)
        x = y
    return ys, last, on["residual"]


@ON_BOTH
@PDL
def test_chain_of_norms(device, pdl):
    """The y of each call is the input of the next, the residual is updated by all."""
    given, on = inputs(9, device)
    x, residual, weight = map(floats, given.values())
    want, residuals = gpu_checks.norm_chain(x, residual, weight, STEPS, "float16")
    ys, last, updated = chain(on, pdl)
    same(floats(ys), np.stack(want))
    same(floats(updated), residuals[-1])
    step = {"input": want[-2], "residual": residuals[-2], "weight": weight}
    rows = norms.expected(NORM, {k: tensor(v, "float16") for k, v in step.items()})
    gpu_checks.compare_norm(NORM, (9,), [last[k] for k in list(last)[:3]], rows)


@GPU
@pytest.mark.parametrize("rows", [1, 64, 1000, 5000])
def test_pdl_changes_no_result(rows):
    """With kernels of any length before and after, in a graph too."""
    given, on = inputs(rows, "cuda")
    plain, expected, residual = chain(on, False)

    def compare(ys, last, updated):
        assert torch.equal(ys.view(U8), plain.view(U8))
        assert torch.equal(updated, residual)
        for name, value in expected.items():
            assert torch.equal(last[name].view(U8), value.view(U8)), name

    for _ in range(3):
        compare(*chain(inputs(rows, "cuda")[1], True))
    _, on = inputs(rows, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(on, True)
    for _ in range(3):
        on["residual"].copy_(given["residual"])
        graph.replay()
        compare(*got)


@ON_BOTH
def test_chain_of_blocks(device):
    """Quantise and dequantise through the same buffers, each step with its own global scale."""
    steps = 40
    scales = [0.3 + 0.11 * (i % 7) for i in range(steps)]
    x = tensor(np.random.default_rng(0).standard_normal((130, 512)), "float16")
    values, on = floats(x), x.to(device)
    packed = torch.empty(130, 256, dtype=U8, device=device)
    scale = torch.empty(256, 32, dtype=U8, device=device)
    gs = [one(g, device) for g in scales]
    for g in gs:
        bs.quantize(on, "nvfp4", g, "128x4", packed=packed, block_scale=scale)
        bs.dequantize(packed, scale, "nvfp4", g, "128x4", torch.float16, out=on)
    for g in scales:
        codes, byte = ref.quantize(values, "nvfp4", g)
        values = ref.dequantize(codes, byte, "nvfp4", g, "float16")
    same(floats(on), values)
    same_bytes(bytes_of(packed), ref.pack(codes))


# ---------------------------------------------------------------------------------- torch.compile
def compiled_norm(x, r, weight, g):
    """Use the norm between operations that Inductor makes kernels of."""
    y = torch.empty_like(x)
    codes, scale, linear = bs.add_rmsnorm_fp4quant(
        x * 2, r, weight, global_scale=g, output_both_sf_layouts=True, y_out=y
    )
    return codes.view(U8), scale, linear, y + 1, r * 2


def compiled_blocks(x, r, weight, g):
    packed, scale = bs.quantize(x * weight, "nvfp4", g, "128x4")
    back = bs.dequantize(packed, scale, "nvfp4", g, "128x4", torch.float16)
    codes, silu = bs.silu_and_mul_fp4quant(back + r, is_sf_swizzled_layout=True)
    return packed, scale, back, codes.view(U8), silu


@GPU
@pytest.mark.timeout(600)
@pytest.mark.parametrize("function", [compiled_norm, compiled_blocks])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "reduce-overhead"])
def test_compile(function, backend):
    """One graph, the bytes of the eager call, for several calls and sizes; CUDA graphs too."""
    if backend != "aot_eager":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    options = {"mode": backend} if backend == "reduce-overhead" else {"backend": backend}
    compiled = torch.compile(function, fullgraph=True, **options)
    g = one(0.5, "cuda")
    for rows in (5, 5, 5, 130):
        _, on = inputs(rows, "cuda", rows)
        _, eager = inputs(rows, "cuda", rows)
        torch.compiler.cudagraph_mark_step_begin()
        got = [value.clone() for value in compiled(*on.values(), g)]
        expected = function(*eager.values(), g)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.view(U8), b.view(U8))
        assert torch.equal(on["residual"], eager["residual"])
