"""The MoE functions on tensors of any device, held against float64 on that device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import reference_moe as moe
import torch
from gpu_checks import Poisoned, dirty_memory
from helpers import DTYPES

import blockscale as bs
from blockscale.specs import FusedMoe, Spec

LIMIT = 1e-2
"""|y - truth| / |truth| of a row: three roundings to 8 bits (bfloat16), and int4 scales rounded to
8 bits are given as such.  Rounded activations (act_fmt) are in the truth, but one that is next to a
tie may go the other way, so `LIMIT_ROUNDED`."""

LIMIT_ROUNDED = 3e-2


@dataclass
class Layer:
    """A random layer: what the function takes, and its weights in float64."""

    spec: FusedMoe
    made: moe.Layer
    weights: bs.MoeWeights
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def options(self):
        """Options of the call."""
        found = {"activation": self.spec.activation, "act_fmt": self.spec.act_fmt}
        for name in ("a1_scale", "a2_scale"):
            value = getattr(self.made, name)
            if value is not None:
                found[name] = torch.tensor([value], dtype=torch.float32, device=self.w13.device)
        return found

    def __call__(self, hidden, ids, factors, out=None):
        """Return fused_moe of these rows."""
        return bs.fused_moe(hidden, self.weights, ids, factors, out=out, **self.options)


@cache
def layer(name, device):
    """Return the layer of a kernel of layout tiles64; on the CPU, that of the linear one."""
    spec = Spec.parse(name)
    if device == "cpu":
        spec = replace(spec, layout="linear")
    made = moe.random_layer(
        *(spec.experts, spec.hidden, spec.intermediate, spec.fmt),
        group=spec.group,
        activation=spec.activation,
        zeros=spec.zero,
        bias=spec.bias,
        act_fmt=spec.act_fmt,
        scale_dtype=spec.dtype,
    )
    names = ("w13", "w2", "w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    names += ("w13_bias", "w2_bias", "w13_zero", "w2_zero")
    found = {n: getattr(made, n) for n in names if getattr(made, n) is not None}
    weights = bs.prepare_moe_weights(
        **{n: torch.from_numpy(v).to(device) for n, v in found.items()},
        fmt=spec.fmt,
        activation=spec.activation,
        dtype=DTYPES[spec.dtype],
    )
    assert weights.layout == spec.layout
    dense = [torch.from_numpy(w).to(device) for w in made.dense()]
    return Layer(spec, made, weights, *dense)


def rows(of, tokens, kind="random", seed=0):
    """Return hidden, ids (int32) and weights on the layer's device."""
    spec, device = of.spec, of.w13.device
    hidden = moe.random_hidden(tokens, spec.hidden, spec.dtype, seed)
    ids, factors = moe.random_routing(tokens, spec.experts, spec.top_k, kind, seed)
    x = torch.from_numpy(hidden).to(DTYPES[spec.dtype]).to(device)
    return (
        x,
        torch.from_numpy(ids.astype(np.int32)).to(device),
        torch.from_numpy(factors).to(device),
    )


def truth(of, hidden, ids, factors):
    """Return y [T, H] float64 on the device: real numbers, but for act_fmt."""
    made, spec = of.made, of.spec
    y = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    x = quantised(hidden.double(), spec, made.a1_scale)
    for e in range(spec.experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        product = x[token] @ of.w13[e].T
        if made.w13_bias is not None:
            product += torch.from_numpy(made.w13_bias[e]).to(product)
        h = torch.from_numpy(moe.activate(product.cpu().numpy(), spec.activation)).to(product)
        z = quantised(h, spec, made.a2_scale) @ of.w2[e].T
        if made.w2_bias is not None:
            z += torch.from_numpy(made.w2_bias[e]).to(z)
        y.index_add_(0, token, factors[token, slot].double()[:, None] * z)
    return y


def quantised(x, spec, scale):
    """Return x after act_fmt; h is rounded to the dtype first, as kernels do."""
    if spec.act_fmt is None:
        return x
    values = x.to(DTYPES[spec.dtype]).float().cpu().numpy()
    return torch.from_numpy(moe.qdq(values, spec.act_fmt, scale)).to(x)


def judge(of, y, hidden, ids, factors):
    """Fail unless each row is right; those without experts must be zero.  Return the worst."""
    want = truth(of, hidden, ids, factors)
    size = want.norm(dim=1)
    error = (y.double() - want).norm(dim=1)
    none = size == 0
    assert not error[none].any(), "a row without experts is not zero"
    relative = error[~none] / size[~none]
    assert not relative.isnan().any()
    worst = float(relative.max()) if relative.numel() else 0.0
    limit = LIMIT if of.spec.act_fmt is None else LIMIT_ROUNDED
    assert worst < limit, f"row {int(relative.argmax())} of {len(y)}: relative error {worst:.3g}"
    return worst


def check_layer(of, tokens, kind, own):
    """Call it once and judge every row; ``own``: into an output between bytes of 0xFF."""
    given = rows(of, tokens, kind)
    before = [value.clone() for value in given]
    make = Poisoned(given[0].device)
    out = make(given[0].shape, given[0].dtype) if own else None
    dirty_memory(given[0].device, given[0].nbytes, of.spec.workspace_bytes(tokens))
    y = of(*given, out=out)
    assert out is None or y is out
    make.check()
    for value, was in zip(given, before, strict=True):
        assert torch.equal(value, was), "an input was written"
    return judge(of, y, *given)


def check_route(name, tokens, device, seed=0):
    """Compare ids and weights of random logits, some of them equal, with the reference."""
    spec = Spec.parse(name)
    rng = np.random.default_rng([seed, tokens, spec.experts])
    logits = torch.from_numpy(rng.standard_normal((tokens, spec.experts)).astype(np.float32))
    logits[::3] = (logits[::3] * 2).round() / 2  # ties
    bias = rng.standard_normal(spec.experts).astype(np.float32) if spec.bias else None
    logits = logits.to(DTYPES[spec.dtype])
    options = {"scoring": spec.scoring, "renormalize": spec.renormalize, "scale": 2.5}
    options |= {"n_group": spec.n_group, "topk_group": spec.topk_group}
    ids, factors = bs.moe_route(
        logits.to(device),
        spec.top_k,
        correction_bias=None if bias is None else torch.from_numpy(bias).to(device),
        **options,
    )
    want = moe.moe_route(logits.float().numpy(), spec.top_k, correction_bias=bias, **options)
    same = (ids.cpu().numpy() == want[0]).all(1)
    assert same.mean() > 0.99, "ids differ"  # scores that are equal but for float32's rounding
    error = np.abs(factors.cpu().numpy() - want[1])[same]
    assert error.max(initial=0) < 1e-5
