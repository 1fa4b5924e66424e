"""What the demo measures: error of each layer, the embeddings, time of each op and of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files, metrics, timing
from .model import (
    BertConfig,
    Encoder,
    LinearCall,
    checkpoint_name,
    load_tokenizer,
    tokenise,
    torch_linears,
)
from .quantise import Quantised
from .variants import LABELS, REFERENCE, all_linears, dtype_of, encoders, weight_bytes

BATCH = 32
LEAST_ROUNDS, MOST_ROUNDS = 7, 10_000


class Measurement:
    """Four variants of one encoder on the demo's sentences."""

    def __init__(
        self,
        config: BertConfig,
        fp32: Mapping[str, Tensor],
        stored: Mapping[str, Tensor],
        weights: Mapping[str, Quantised],
        functions: Mapping[str, Any],
    ) -> None:
        """Compare the checkpoint `fp32` with the quantised file (`stored`, `weights`)."""
        self.config, self.fp32, self.weights = config, fp32, weights
        self.linears = all_linears(config, fp32, stored, weights, functions)
        self.encoders = encoders(config, fp32, stored, self.linears)

    def read_sentences(self, tokenizer: Path) -> None:
        """Tokenise the demo's sentences with `tokenizer` (tokenizer.json)."""
        groups = files.sentence_groups()
        self.sentences = [sentence for group in groups for sentence in group]
        self.group = [i for i, group in enumerate(groups) for _ in group]
        self.tokenizer = load_tokenizer(tokenizer)
        self.ids, self.mask = tokenise(self.tokenizer, self.sentences)

    def all(self, seconds: float, console: Any) -> dict[str, Any]:
        """Return every figure as plain data; about `seconds` go into timing."""
        console.print(f"  {len(self.sentences)} sentences, {int(self.mask.sum())} tokens")
        with files.status(console, "error of each layer"):
            layers = self.layers()
        with files.status(console, "embeddings"):
            end_to_end = self.end_to_end()
        with files.status(console, "time of each op"):
            ops = self.ops(seconds / 2)
        with files.status(console, "latency of the whole model"):
            latency = self.latency(seconds / 2)
        return {
            "sentences": {
                "count": len(self.sentences),
                "groups": self.group[-1] + 1,
                "tokens": int(self.mask.sum()),
            },
            "layers": layers,
            "end_to_end": end_to_end,
            "ops": ops,
            "latency": latency,
            "bytes": weight_bytes(self.config, self.fp32, self.weights),
        }

    def _layer(self, name: str, x: Tensor, ref: Tensor) -> dict[str, Any]:
        """Return the figures of one Linear on the fp32 model's own input x [tokens, K]."""
        prefix = checkpoint_name(name)
        decoded = self.weights[name].decoded()
        weight = self.fp32[f"{prefix}.weight"].double()
        bias = self.fp32[f"{prefix}.bias"].double()
        row: dict[str, Any] = {
            "layer": name,
            "n": weight.shape[0],
            "k": weight.shape[1],
            "weight_error": ((decoded - weight).norm() / weight.norm()).item(),
        }
        for variant, calls in self.linears.items():
            given = x.to(dtype_of(variant))
            y = calls[name](given)
            if variant != REFERENCE:
                row[variant] = metrics.spread(metrics.row_errors(y, ref))
            if variant.startswith("ours"):
                exact = given.double() @ decoded.T + bias
                row[f"kernel_{variant}"] = metrics.spread(metrics.row_errors(y, exact))
        return row

    @torch.inference_mode()
    def layers(self) -> list[dict[str, Any]]:
        """Return one row for each Linear, in forward order.

        "torch_bf16", "ours_...": error of each token's output against the fp32 layer on the same
        input; "kernel_...": the kernel alone, against float64 on the decoded weights.
        """
        rows: list[dict[str, Any]] = []
        real = self.mask.flatten()
        plain = torch_linears(self.config, self.fp32, torch.float32)

        def observed(name: str) -> LinearCall:
            def call(x: Tensor) -> Tensor:
                y = plain[name](x)
                rows.append(self._layer(name, x[real], y[real]))
                return y

            return call

        calls = {name: observed(name) for name in plain}
        Encoder(self.config, self.fp32, calls)(self.ids, self.mask)
        return rows

    def end_to_end(self) -> dict[str, dict[str, float]]:
        """Return for each variant the error of the embeddings and how well neighbours agree."""
        found = {v: encoder(self.ids, self.mask) for v, encoder in self.encoders.items()}
        ref = found[REFERENCE]
        return {
            variant: {
                **metrics.spread(metrics.row_errors(embeddings, ref)),
                **metrics.agreement(embeddings, ref),
                "group": metrics.group_hits(embeddings, self.group),
            }
            for variant, embeddings in found.items()
        }

    def _inputs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (ids, mask) of one sentence of middling length and of a batch."""
        order = self.mask.sum(1).argsort(stable=True)
        one = int(order[len(order) // 2])
        return {
            "one sentence": tokenise(self.tokenizer, [self.sentences[one]]),
            f"batch of {BATCH}": tokenise(self.tokenizer, self.sentences[:BATCH]),
        }

    @torch.inference_mode()
    def ops(self, seconds: float) -> list[dict[str, Any]]:
        """Return the median microseconds of one call, by shape and number of rows.

        One timed run calls all Linears of that shape once, layer after layer, as the model does,
        so that no variant has its weights in a nearer cache than in real use.
        """
        shapes = dict.fromkeys(self.config.linears().values())
        counts = {1, *(ids.numel() for ids, _ in self._inputs().values())}
        cases = [(n, k, rows) for n, k in shapes for rows in sorted(counts)]
        return [self._op(n, k, rows, seconds / len(cases)) for n, k, rows in cases]

    def _op(self, n: int, k: int, rows: int, seconds: float) -> dict[str, Any]:
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(0))
        names = [name for name, shape in self.config.linears().items() if shape == (n, k)]

        def once(variant: str) -> Any:
            given = x.to(dtype_of(variant))
            calls = [self.linears[variant][name] for name in names]

            def run(_: int) -> None:
                for call in calls:
                    call(given)

            return run

        medians, watched = _timed({variant: once(variant) for variant in LABELS}, seconds)
        us = {variant: 1e6 * time / len(names) for variant, time in medians.items()}
        return {"n": n, "k": k, "rows": rows, "us": us, "watched": watched}

    def latency(self, seconds: float) -> list[dict[str, Any]]:
        """Return the median milliseconds of the whole model for one sentence and for a batch."""
        rows = []
        inputs = self._inputs()
        for label, (ids, mask) in inputs.items():

            def once(encoder: Encoder, ids: Tensor = ids, mask: Tensor = mask) -> Any:
                return lambda _: encoder(ids, mask)

            calls = {variant: once(encoder) for variant, encoder in self.encoders.items()}
            medians, watched = _timed(calls, seconds / len(inputs))
            rows.append(
                {
                    "input": label,
                    "sentences": ids.shape[0],
                    "tokens": ids.shape[1],
                    "ms": {variant: 1e3 * time for variant, time in medians.items()},
                    "watched": watched,
                }
            )
        return rows


def _timed(
    calls: Mapping[str, timing.Call], seconds: float
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the median seconds of each call, and what the machine did meanwhile."""
    times, watched = timing.interleaved(calls, MOST_ROUNDS, seconds, LEAST_ROUNDS)
    return {name: time.median for name, time in times.items()}, watched.to_json()
