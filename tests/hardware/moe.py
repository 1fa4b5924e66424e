"""Checks of the MoE layer on a GPU, against float64 on the same device.

Functions that a loaded library lacks are built when they are first called.  To build all at once:

    blockscale build --target sm_90a -o moe.so $(python -m tests.hardware.moe)
    pytest -m gpu --library moe.so tests/hardware/test_gpu_moe.py
    python -m tests.hardware.moe --library moe.so     # relative errors of all formats, as a table
"""

import argparse
from functools import cache

import numpy as np
import torch

import blockscale as bs
from blockscale.specs import FusedMoe, MoeRoute
from tests.kit.helpers import DTYPES
from tests.reference import moe as moe

TOKENS = (0, 1, 2, 17, 64, 300, 4096)
"""Numbers of tokens that the issue names."""

PLAIN = (
    FusedMoe(16, 1024, 768, 4, layout="tiles64"),
    FusedMoe(16, 1024, 768, 4, "mxfp4", activation="swiglu_oai", bias=True, layout="tiles64"),
    FusedMoe(16, 1024, 768, 4, "int4", dtype="float16", layout="tiles64"),
    FusedMoe(8, 1056, 736, 2, "int4", 32, "relu2", zero=True, layout="tiles64"),
    FusedMoe(8, 576, 1088, 3, "int4", 64, "gelu_tanh", zero=True, bias=True, layout="tiles64"),
    FusedMoe(8, 1040, 720, 2, activation="gelu_tanh", dtype="float16", layout="tiles64"),
    FusedMoe(8, 784, 592, 5, activation="relu2", bias=True, layout="tiles64"),
    FusedMoe(256, 512, 256, 8, "mxfp4", layout="tiles64"),
    FusedMoe(1, 2880, 2880, 1, "mxfp4", dtype="float16", layout="tiles64"),
)
"""All formats, activations, groups, zeros, biases; sizes that fill no tile; 1 and 256 experts."""

QUANTIZED = (
    FusedMoe(16, 1024, 768, 4, "mxfp4", act_fmt="fp8", layout="tiles64"),
    FusedMoe(16, 1024, 768, 4, "int4", act_fmt="fp8_tensor", dtype="float16", layout="tiles64"),
    FusedMoe(8, 1040, 720, 2, act_fmt="nvfp4", bias=True, layout="tiles64"),
)

SMALL = (
    FusedMoe(8, 256, 128, 2, layout="tiles64"),
    FusedMoe(64, 192, 96, 8, "mxfp4", activation="swiglu_oai", bias=True, layout="tiles64"),
    FusedMoe(5, 128, 256, 3, "int4", layout="tiles64"),
)
"""Of the random calls."""

ROUTES = (
    MoeRoute(128, 8),
    MoeRoute(128, 4, "bfloat16", renormalize=False),
    MoeRoute(256, 8, scoring="sigmoid", bias=True, n_group=8, topk_group=4),
    MoeRoute(1000, 40, "float16", "sigmoid"),
)

SPECS = (*PLAIN, *QUANTIZED, *SMALL)
NAMES = tuple(spec.name for spec in (*SPECS, *ROUTES))

BOUND = 1e-2
"""Relative error of a row: 16-bit rounding of h, of each expert's row, and of the result."""

QUANTIZED_BOUND = 0.06
"""With quantised activations an h next to a tie may move by a step; few of a row's do."""


@cache
def layer_of(spec):
    """Return random weights as stored, prepared on the GPU, and as float64 there."""
    layer = moe.random_layer(
        *(spec.experts, spec.hidden, spec.intermediate, spec.fmt),
        group=spec.group,
        activation=spec.activation,
        zeros=spec.zero,
        bias=spec.bias,
        act_fmt=spec.act_fmt,
        scale_dtype=spec.dtype,
    )
    names = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    names += ("w13_bias", "w2_bias", "w13_zero", "w2_zero")
    given = {name: getattr(layer, name) for name in names if getattr(layer, name) is not None}
    tensors = {name: torch.from_numpy(value).cuda() for name, value in given.items()}
    weights = bs.prepare_moe_weights(
        torch.from_numpy(layer.w13).cuda(),
        torch.from_numpy(layer.w2).cuda(),
        fmt=layer.fmt,
        activation=layer.activation,
        group_size=spec.group if layer.fmt == "int4" else None,
        dtype=DTYPES[spec.dtype],
        **tensors,
    )
    dense = tuple(torch.from_numpy(w).cuda() for w in layer.dense())
    return layer, weights, dense


def double(x):
    """Return a NumPy array as float64 on the GPU."""
    return torch.from_numpy(np.asarray(x, np.float64)).cuda()


def activate(product, layer):
    """`reference_moe.activate` on the GPU."""
    if layer.activation == "relu2":
        return product.clamp(min=0) ** 2
    gate, up = product.chunk(2, dim=-1)
    if layer.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    oai = layer.activation == "swiglu_oai"
    limit = (7.0 if oai else None) if layer.limit is None else layer.limit
    alpha = (1.702 if oai else 1.0) if layer.alpha is None else layer.alpha
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + (1.0 if oai else 0.0))


def qdq(x, act_fmt, scale):
    """`reference_moe.qdq`, which is on the CPU."""
    return x if act_fmt is None else double(moe.qdq(x.float().cpu().numpy(), act_fmt, scale))


def expected(spec, hidden, ids, weights):
    """Return y [T, H] in float64: only what act_fmt rounds is rounded."""
    layer, _, (w13, w2) = layer_of(spec)
    x = qdq(hidden.double(), spec.act_fmt, layer.a1_scale)
    y = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for e in range(spec.experts):
        token, slot = torch.nonzero(ids == e, as_tuple=True)
        if not len(token):
            continue
        product = x[token] @ w13[e].T
        if layer.w13_bias is not None:
            product += double(layer.w13_bias[e])
        h = activate(product, layer)
        if spec.act_fmt is not None:
            h = qdq(h.to(hidden.dtype), spec.act_fmt, layer.a2_scale)
        z = h @ w2[e].T
        if layer.w2_bias is not None:
            z += double(layer.w2_bias[e])
        y.index_add_(0, token, z * weights[token, slot, None].double())
    return y


def rows_of(spec, tokens, routing="random", seed=0):
    """Return hidden, ids (int32) and weights on the GPU."""
    ids, weights = moe.random_routing(tokens, spec.experts, spec.top_k, routing, seed)
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, spec.hidden, device="cuda").to(DTYPES[spec.dtype])
    return hidden, torch.from_numpy(ids).int().cuda(), torch.from_numpy(weights).cuda()


@cache
def static_scales(spec):
    """Return a1_scale and a2_scale on the GPU; made once, for nothing is copied in a capture."""
    layer, _, _ = layer_of(spec)
    pair = {"a1_scale": layer.a1_scale, "a2_scale": layer.a2_scale}
    return {name: torch.tensor([value]).float().cuda() for name, value in pair.items()}


def call(spec, hidden, ids, weights, **options):
    """Call the layer of ``spec``."""
    _, made, _ = layer_of(spec)
    scales = static_scales(spec) if spec.static_scales else {}
    return bs.fused_moe(
        *(hidden, made, ids, weights),
        activation=spec.activation,
        act_fmt=spec.act_fmt,
        **scales,
        **options,
    )


def errors(got, want):
    """Return each row's relative error; infinite where a row that is to be zero is not."""
    length, off = want.norm(dim=1), (got.double() - want).norm(dim=1)
    return torch.where(off == 0, 0.0, off / length)


def check(spec, got, want):
    """Fail unless each row is right; return the largest error."""
    if not len(got):
        return 0.0
    error = errors(got, want)
    most = float(error.max())
    bound = BOUND if spec.act_fmt is None else QUANTIZED_BOUND
    assert most < bound, f"row {int(error.argmax())} of {len(error)}: relative error {most}"
    return most


def sampled(spec, rows, count=300):
    """Return some rows' numbers and what they are to be: of many tokens float64 takes long."""
    some = torch.arange(len(rows[0]), device="cuda")
    if len(some) > count:
        edges = torch.tensor([0, 8191, 8192, len(some) - 1], device="cuda")
        some = torch.cat([torch.randperm(len(some), device="cuda")[:count], edges])
        some = some[some < len(rows[0])]
    return some, expected(spec, *(tensor[some] for tensor in rows))


def report():
    """Print the largest relative error of a row, by spec and number of tokens."""
    print("| kernel |", " | ".join(f"T={t}" for t in TOKENS[1:]), "|")
    for spec in SPECS:
        found = []
        for tokens in TOKENS[1:]:
            rows = rows_of(spec, tokens)
            some, want = sampled(spec, rows, 1000)
            found.append(float(errors(call(spec, *rows)[some], want).max()))
        print(f"| {spec.name} |", " | ".join(f"{e:.2e}" for e in found), "|", flush=True)


def main():
    """Print the names of all kernels; with libraries, the errors on this GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", action="append", default=[])
    libraries = parser.parse_args().library
    if not libraries:
        print(*NAMES)
        return
    for library in libraries:
        bs.load(library)
    report()


if __name__ == "__main__":
    main()
