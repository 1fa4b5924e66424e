"""Linear layers on a GPU, as users call them: against float64, in graphs, compiled, as modules."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import blockscale as bs

pytestmark = pytest.mark.gpu

ROWS = (0, 1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 100, 256, 257, 1000, 4096)
ACT = {
    "none": lambda v: v,
    "silu": functional.silu,
    "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    "relu2": lambda v: functional.relu(v) ** 2,
}


def weight(n, k, fmt, dtype=torch.bfloat16, group=128, zeros=False, **more):
    """Return a prepared weight and its values in float64."""
    made = torch.Generator("cuda").manual_seed(n + k)
    if fmt == "int4":
        codes = torch.randint(0, 256, (n, k // 2), generator=made, device="cuda").to(torch.uint8)
        scale = (torch.rand(n, k // group, generator=made, device="cuda") * 0.02 + 0.005).to(dtype)
        zero = torch.randint(0, 16, scale.shape, generator=made, device="cuda") if zeros else None
        plain = torch.stack((codes & 15, codes >> 4), -1).view(n, -1, group).double()
        point = 8 if zero is None else zero[..., None]
        values = ((plain - point) * scale.double()[..., None]).view(n, k)
        w = bs.prepare_linear_weights(
            codes, scale, fmt=fmt, group_size=group, zero=zero, dtype=dtype, **more
        )
        return w, values
    given = torch.randn(n, k, generator=made, device="cuda", dtype=torch.bfloat16)
    packed, scale = bs.quantize(given, fmt)
    values = bs.dequantize(packed, scale, fmt, dtype=torch.float32).double()
    return bs.prepare_linear_weights(packed, scale, fmt=fmt, **more), values


def error(got, want):
    if not want.numel():
        return 0.0
    return float(((got.detach().double() - want).norm(dim=-1) / want.norm(dim=-1)).max())


CASES = [
    (4096, 4096, "nvfp4", {}),
    (4096, 4096, "nvfp4", {"dtype": torch.float16}),
    (2880, 2880, "nvfp4", {}),
    (512, 7168, "nvfp4", {}),
    (196, 720, "nvfp4", {}),
    (2880, 2880, "mxfp4", {}),
    (4096, 4096, "int4", {"group": 128}),
    (2880, 2880, "int4", {"group": 64}),
    (4096, 4096, "int4", {"group": 32, "zeros": True}),
]


@pytest.mark.parametrize(("n", "k", "fmt", "more"), CASES)
def test_rows_are_right(n, k, fmt, more):
    dtype = more.get("dtype", torch.bfloat16)
    w, values = weight(n, k, fmt, **more)
    for rows in ROWS:
        x = torch.randn(rows, k, device="cuda").to(dtype)
        y = bs.linear(x, w)
        limit = 5e-3 if dtype == torch.bfloat16 else 1e-3
        assert error(y, x.double() @ values.T) < limit, rows
        assert torch.equal(y, bs.linear(x, w)), "it differs from run to run"


def test_gate_and_up():
    w, values = weight(28672, 4096, "nvfp4", gated=True)
    for rows in (1, 7, 16, 64, 300):
        x = torch.randn(rows, 4096, device="cuda").bfloat16() / 16
        gate, up = (x.double() @ values.T).chunk(2, 1)
        want = functional.silu(gate) * up
        assert error(bs.linear(x, w, activation="silu"), want) < 5e-3


@pytest.mark.parametrize("rows", [1, 9, 40, 200])
def test_bias_activation_residual(rows):
    bias = torch.randn(195, device="cuda")
    w, values = weight(195, 2880, "mxfp4", bias=bias)
    x = torch.randn(rows, 2880, device="cuda").bfloat16()
    residual = 30 * torch.randn(rows, 195, device="cuda").bfloat16()
    want = ACT["gelu_tanh"](x.double() @ values.T + bias) + residual
    assert error(bs.linear(x, w, activation="gelu_tanh", residual=residual), want) < 5e-3


def test_float32_results():
    w, values = weight(4096, 4096, "nvfp4")
    for rows in (1, 20, 130):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        y = bs.linear(x, w, out_dtype=torch.float32)
        assert y.dtype == torch.float32
        assert error(y, x.double() @ values.T) < 1e-3


def in_fp8(x):
    """Return rows as "fp8" rounds them, float64."""
    most = torch.full((1,), 448.0, device=x.device)  # torch divides by numbers as it multiplies
    scale = x.float().abs().amax(-1, keepdim=True) / most
    return torch.where(scale == 0, 0, x.float() / scale).to(torch.float8_e4m3fn).double() * scale


def test_rows_of_fp8():
    """In 8 bits from 33 rows on; both layouts multiply the same numbers."""
    w, values = weight(2880, 2880, "mxfp4", act_fmt="fp8")
    sixteen, _ = weight(2880, 2880, "mxfp4")
    assert (w.layout, sixteen.layout) == ("tiles64e", "tiles64")
    for rows in ROWS:
        x = torch.randn(rows, 2880, device="cuda").bfloat16() * torch.rand(rows, 1, device="cuda")
        x = x.bfloat16()
        x[rows // 2 : rows // 2 + 1] = 0
        want = in_fp8(x) @ values.T
        some = want.norm(dim=-1) > 0
        options = {"act_fmt": "fp8", "out_dtype": torch.float32}
        for each in (w, sixteen):
            y = bs.linear(x, each, **options)
            assert error(y[some], want[some]) < 1e-3, (rows, each.layout)
            assert not y[~some].any()
            assert torch.equal(y, bs.linear(x, each, **options)), "it differs from run to run"


@pytest.mark.parametrize("rows", [1, 20, 40, 300])
def test_rows_of_fp8_with_what_follows(rows):
    w, values = weight(28672, 4096, "mxfp4", gated=True, act_fmt="fp8")
    x = torch.randn(rows, 4096, device="cuda").bfloat16() / 16
    gate, up = (in_fp8(x) @ values.T).chunk(2, 1)
    y = bs.linear(x, w, activation="silu", act_fmt="fp8")
    assert error(y, functional.silu(gate) * up) < 5e-3
    bias = torch.randn(195, device="cuda")
    w, values = weight(195, 2880, "mxfp4", bias=bias, act_fmt="fp8")
    x = torch.randn(rows, 2880, device="cuda").half()
    residual = 30 * torch.randn(rows, 195, device="cuda").half()
    want = ACT["gelu_tanh"](in_fp8(x) @ values.T + bias) + residual
    y = bs.linear(x, w, activation="gelu_tanh", residual=residual, act_fmt="fp8")
    assert error(y, want) < 2e-3


def test_graphs_and_no_allocation():
    w, values = weight(4096, 4096, "nvfp4")
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    out = torch.empty(4, 4096, device="cuda", dtype=torch.bfloat16)
    bs.linear(x, w, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.cuda.device(0):
        bs.linear(x, w, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bs.linear(x, w, out=out)
    x.copy_(torch.randn(4, 4096, device="cuda"))
    graph.replay()
    assert error(out, x.double() @ values.T) < 5e-3


def test_compiled():
    w, _ = weight(4096, 4096, "nvfp4")
    x = torch.randn(3, 4096, device="cuda").bfloat16()
    run = torch.compile(lambda v: bs.linear(v * 2, w) + 1, fullgraph=True)
    assert torch.allclose(run(x), bs.linear(x * 2, w) + 1, rtol=2e-2, atol=2e-2)


def test_modules_on_cuda():
    made = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    layer = bs.nn.Linear.from_float(made)
    x = torch.randn(5, 3, 4096, device="cuda").bfloat16()
    y = layer(x)
    assert y.shape == x.shape
    assert error(y.view(15, -1), made(x).double().view(15, -1)) < 0.15  # of 4-bit weights


def test_leading_dimensions_and_streams():
    w, values = weight(4096, 4096, "nvfp4")
    x = torch.randn(2, 3, 4096, device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = bs.linear(x, w)
    torch.cuda.synchronize()
    assert error(y.view(6, -1), x.view(6, -1).double() @ values.T) < 5e-3
