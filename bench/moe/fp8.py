"""Measure MoE layers with FP8 activations on this GPU: ``python -m bench.moe.fp8``.

MXFP4 and NVFP4 weights, and INT4 in groups of 128; four roads of ours in CUDA graphs that are
replayed in turns:

* "16 bits": rows of x as they are;
* "fp8 in 16 bits": rows in E4M3 with a scale each, multiplied in 16 bits (layout "tiles64");
* "fp8": the same numbers, but NVFP4's weights rounded to E4M3 (``rounded``), many tokens multiplied
  in 8 bits (layout "tiles64e");
* "fp8 fast": the same with ``fast_accum``; not of INT4, whose sums are those of groups;
* "humming-kernels, ...": its W4A8 of rows that were quantised before, GEMMs alone, where it is
  installed; NVFP4's weights are not rounded.

Of each of ours the two GEMMs alone and the whole layer.  Errors are those of rows, of all but the
first against a layer in float64 whose operands are quantised likewise (of humming's: of each GEMM),
and by how much results in 8 bits differ from those in 16 bits of the same rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import measure
from bench.measure import Captured, bound, row_error
from bench.moe import data
from bench.moe.cases import GROUP, MODELS, Case, Model, spec_of, uniform_ids
from bench.moe.data import Inputs, Weights
from bench.moe.ours import keep_gemms
from bench.peers.moe import Humming, compile_humming
from blockscale.demo.timing import versions
from blockscale.specs import FusedMoe

FORMAT = 4
FORMATS = ("mxfp4", "nvfp4", "int4")
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ROADS = {
    "16 bits": ("tiles64", None, False),
    "fp8 in 16 bits": ("tiles64", "fp8", False),
    "fp8": ("tiles64e", "fp8", False),
    "fp8 fast": ("tiles64e", "fp8", True),
}
"""Layout of the weights, ``act_fmt`` and ``fast_accum``, by road."""

BOUND, FP8_BOUND = 1e-2, 5e-2
"""Relative error of a row, of rows in 16 bits and in FP8: an h beside a tie moves by a whole step
(up to 2.7e-2 on an H200, 2026-11-24)."""

GRAPH_US = 3000.0
GUESS = 300e6
"""FLOP a microsecond, for how many calls a graph has."""


def spec_on(model: Model, fmt: str, road: str) -> FusedMoe:
    """Return the function of a road."""
    layout, act_fmt, fast = ROADS[road]
    return replace(spec_of(model, fmt), layout=layout, act_fmt=act_fmt, fast_accum=fast)


def roads_of(fmt: str) -> list[str]:
    """Return the roads that there are of a format of weights."""
    return [road for road, (*_, fast) in ROADS.items() if fmt != "int4" or not fast]


def cases() -> dict[str, tuple[Model, str]]:
    """Return models and formats of weights whose sizes have whole groups."""
    return {
        f"{key} {fmt}": (model, fmt)
        for fmt in FORMATS
        for key, model in MODELS.items()
        if not (model.hidden % GROUP[fmt] or model.intermediate % GROUP[fmt])
    }


def names(only: Sequence[str] | None = None) -> list[str]:
    """Return the functions to build."""
    found = cases()
    chosen = [found[key] for key in measure.chosen(found, only)]
    return [spec_on(model, fmt, road).name for model, fmt in chosen for road in roads_of(fmt)]


def prepared(weights: Weights, layout: str) -> Any:
    """Return the weights in a layout."""
    from blockscale import prepare_moe_weights

    return prepare_moe_weights(
        *(weights.w13, weights.w2), fmt=weights.fmt, w13_scale=scales_of(weights, "w13"),
        w2_scale=scales_of(weights, "w2"), w13_global_scale=weights.w13_global,
        w2_global_scale=weights.w2_global, activation=weights.model.activation, layout=layout,
        act_fmt="fp8", rounded=is_rounded(weights, layout),
    )  # fmt: skip


def scales_of(weights: Weights, which: str) -> Tensor:
    """Return block scales in a dtype of their format."""
    scale: Tensor = getattr(weights, f"{which}_scale")
    return scale.view(torch.float8_e4m3fn) if weights.fmt == "nvfp4" else scale


def is_rounded(weights: Weights, layout: str) -> bool:
    """Whether weights are rounded to E4M3 in a layout."""
    return (weights.fmt, layout) == ("nvfp4", "tiles64e")


def four_bits(values: Tensor) -> Tensor:
    """Return numbers rounded to four bits, as E4M3 has them, to nearest, ties to even."""
    fraction, exponent = torch.frexp(values)
    return torch.ldexp((fraction * 16).round() / 16, exponent)


def times(weights: Weights, which: str, expert: int, x: Tensor, rounded: bool) -> Tensor:
    """Return `data.times`, of weights rounded to E4M3 where they are."""
    factor = getattr(weights, f"{which}_global")
    if not rounded:
        return data.times(weights, which, expert, x)
    values = data.dequantised(replace(weights, w13_global=None, w2_global=None), which, expert)
    return (x.double() @ (four_bits(values) * factor[expert]).double().T).float()


def quantised(x: Tensor) -> Tensor:
    """Return rows rounded as "fp8" says, float32."""
    scale = data.row_scales(x)
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def wanted(weights: Weights, inputs: Inputs, rounded: bool, token: int) -> Tensor:
    """Return a token's row of the layer whose rows are in FP8, float32 [H]; see `times`."""
    x = quantised(inputs.x[token : token + 1])
    total = torch.zeros(weights.model.hidden, device=x.device)
    for expert, factor in zip(
        inputs.ids[token].tolist(), inputs.weights[token].tolist(), strict=True
    ):
        y = times(weights, "w13", expert, x, rounded)
        h = quantised(data.activated(weights.model, y).to(torch.bfloat16))
        total += factor * times(weights, "w2", expert, h, rounded)[0]
    return total


class Road:
    """Calls of one function on one layer."""

    def __init__(self, kernel: Any, spec: FusedMoe, weights: Any) -> None:
        self.kernel, self.spec, self.weights = kernel, spec, weights

    def call(self, inputs: Inputs) -> tuple[Any, Tensor]:
        """Return what runs the layer, and its result."""
        out = torch.full_like(inputs.x, float("nan"))
        size = self.spec.workspace_bytes(len(inputs.x))
        given = {
            "hidden": inputs.x,
            "topk_ids": inputs.ids,
            "topk_weights": inputs.weights,
            "out": out,
            "workspace": torch.zeros(size, dtype=torch.uint8, device=inputs.x.device),
        }
        for name in ("w13", "w13_scale", "w13_global", "w2", "w2_scale", "w2_global"):
            given[name] = getattr(self.weights, name)
        arguments = bound(self.kernel, given)
        return lambda: self.kernel(*arguments), out


def case(
    weights: Weights,
    roads: Mapping[str, Road],
    tokens: int,
    replays: int,
    peer: Humming | None = None,
) -> dict[str, Any]:
    """Return the results of one number of tokens."""
    model = weights.model
    ids = uniform_ids(model, tokens, seed=0).to("cuda")
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device="cuda")
    factors = torch.rand(tokens, model.top_k, device="cuda").add_(0.1)
    inputs = Inputs(x, ids, factors / factors.sum(1, keepdim=True))
    flop = 6 * tokens * model.top_k * model.hidden * model.intermediate
    count = measure.launches_of(flop / GUESS, 1, GRAPH_US, 64)
    graphs: dict[str, Captured] = {}
    outs: dict[str, Tensor] = {}
    errors: dict[str, dict[str, float]] = {}
    for name, road in roads.items():
        run, out = road.call(inputs)
        run()
        torch.cuda.synchronize()
        outs[name] = out.clone()
        truth = partial(data.layer_of, weights, inputs)
        if road.spec.act_fmt is not None:
            truth = partial(wanted, weights, inputs, is_rounded(weights, road.spec.layout))
        errors[name] = spread([row_error(out[t], truth(t)) for t in data.some(tokens)])
        graphs[f"{name}, GEMMs"] = measure.capture([run], count, partial(keep_gemms, count=count))
        graphs[name] = measure.capture([run], count)
    failed: dict[str, str] = {}
    for variant in Humming.variants if peer else ():
        name = f"{Humming.name}, {variant}"
        try:
            assert peer is not None
            call = peer.pair(Case(model, weights.fmt, tokens), inputs, variant)
            call.run()
            error = call.error()
            errors[name] = {"median": error, "worst": error}
            graphs[name] = measure.capture([call.run], count)
        except Exception as error:  # of another's code: ours is measured all the same
            failed[name] = measure.describe(error)
    base = outs.get("fp8 in 16 bits")
    apart = {name: apart_of(out, base) for name, out in outs.items() if base is not None}
    times = measure.interleaved(graphs, replays)
    return {
        "name": f"{model.key} {weights.fmt} T={tokens}",
        "model": model.key,
        "weights": weights.fmt,
        "tokens": tokens,
        "flop": flop,
        "times": {name: timing.to_json() for name, timing in times.items()},
        "errors": errors,
        "apart": apart,
        "failed": failed,
    }


def spread(errors: Sequence[float]) -> dict[str, float]:
    """Return the median and the worst of some rows' errors."""
    return {"median": median(errors), "worst": max(errors)}


def wrong(found: Mapping[str, Any]) -> list[str]:
    """Return the roads of ours whose results are wrong."""
    return [
        road
        for road, (_, act_fmt, _) in ROADS.items()
        if road in found["errors"]
        and not found["errors"][road]["worst"] < (FP8_BOUND if act_fmt else BOUND)
    ]


def apart_of(out: Tensor, base: Tensor) -> dict[str, float]:
    """Return by how much rows of two results differ."""
    differ = (out.double() - base.double()).norm(dim=1) / base.double().norm(dim=1)
    return spread(differ.tolist())


def line(found: Mapping[str, Any]) -> str:
    """Return a case in one line: microseconds, times faster, errors."""
    us = {name: timing["us"] for name, timing in found["times"].items()}
    parts = [f"{name} {value:.1f}" for name, value in us.items()]
    for kind in (", GEMMs", ""):
        base = min(
            us[f"{road}{kind}"]
            for road, (layout, *_) in ROADS.items()
            if layout == "tiles64" and f"{road}{kind}" in us
        )
        parts += [
            f"{name}: {base / value:.3f} x"
            for name, value in us.items()
            if name.startswith("fp8") and "16" not in name and ("GEMMs" in name) == bool(kind)
        ]
    for kind, key in (("error", "errors"), ("apart", "apart")):
        parts += [
            f"{name} {kind} {value['median']:.1e} (worst {value['worst']:.1e})"
            for name, value in found[key].items()
        ]
    parts += [f"{road} WRONG" for road in wrong(found)]
    return f"{found['name']}: " + ", ".join(parts)


def main(given: Sequence[str] | None = None) -> int:
    """Run."""
    made: argparse.ArgumentParser = measure.parser("bench.moe.fp8", __doc__, replays=11)
    made.add_argument("--tokens", type=int, action="append", help="may be repeated")
    options = measure.parsed(made, given)
    if options.names:
        print("\n".join(names(options.only)))
        return 0
    if measure.refused("bench.moe.fp8"):
        return 1
    session = measure.Session("moe-fp8", options, FORMAT)
    measure.warm_up()
    found = cases()
    tokens_of = options.tokens or TOKENS
    installed = importlib.util.find_spec("humming") is not None
    if installed:
        cells = [
            Case(*found[key], tokens)
            for key in measure.chosen(found, options.only)
            for tokens in tokens_of
        ]
        session.note("not compiled", compile_humming(cells, by_bytes=True))
        session.note("peers", versions({Humming.name: Humming.name}))
    for key in measure.chosen(found, options.only):
        model, fmt = found[key]
        weights = data.random_weights(model, fmt)
        tiles = {layout: prepared(weights, layout) for layout in ("tiles64", "tiles64e")}
        roads = {}
        for road in roads_of(fmt):
            spec = spec_on(model, fmt, road)
            roads[road] = Road(session.kernels[spec.name], spec, tiles[spec.layout])
        peer = None
        if installed:
            try:
                peer = Humming(weights, by_bytes=True)
            except Exception as error:
                session.note(f"{key} failed", f"{Humming.name}: {measure.describe(error)}")
        for tokens in tokens_of:
            row = case(weights, roads, tokens, options.replays, peer)
            session.add(row | {"added_error": tiles["tiles64e"].added_error}, line(row))
    session.end()
    bad = [f"{row['name']}, {road}" for row in session.cases for road in wrong(row)]
    return measure.status("bench.moe.fp8", bad)


if __name__ == "__main__":
    sys.exit(main())
