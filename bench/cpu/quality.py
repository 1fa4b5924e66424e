"""What 4-bit weights and FP8 rows cost two small language models that are trained here: perplexity.

    python -m bench.cpu.quality --seconds 180 --out quality.json

A Llama and a Mixtral (8 experts, 2 of them a token) read Python's documentation for ``--seconds``
each, as in the demo; topics that they have not read are then predicted with weights of each format
and rows in bfloat16 or FP8, by the CPU kernels of `blockscale.linear` and `fused_moe` through
transformers.  "nvfp4, rounded" has the weights that ``rounded=True`` makes of NVFP4's, E4M3 times a
factor of the row (`blockscale.ops.moe.rounded`): no CPU kernel multiplies them, torch does it here.
Beside the perplexities: by how much rounding changes each of these weights, and those of the demo's
encoder (MiniLM) in NVFP4, relative to their norms.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.cpu.__main__ import machine
from bench.measure import now
from blockscale.demo.files import find_model, write_json
from blockscale.demo.language import run, text, train
from blockscale.demo.quantise import quantise_linear
from blockscale.ops.moe import rounded

FORMATS = ("nvfp4", "mxfp4", "int4")
ROUNDED = "nvfp4, rounded"
MOE = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8}


def mixtral(vocabulary: int) -> Any:
    """Return a Mixtral of transformers with random weights; token 0 ends a text."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    sizes: dict[str, Any] = {**train.SIZES, **MOE, **heads, **special}
    return MixtralForCausalLM(MixtralConfig(vocab_size=vocabulary, **sizes))


MODELS: dict[str, Callable[[int], Any]] = {"Llama": train.model_of, "Mixtral": mixtral}


def loaded(folder: Path, fmt: str | None, rows: str | None, dtype: torch.dtype) -> Any:
    """Return a model with weights of a format, quantised while it loads; ``rows``: ``act_fmt``."""
    from transformers import AutoModelForCausalLM

    from blockscale.integrations.transformers import BlockscaleConfig
    from blockscale.nn import FusedMoE, Linear

    more = {} if fmt is None else {"quantization_config": BlockscaleConfig(fmt)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).eval()
    quantised = [m for m in model.modules() if isinstance(m, (Linear, FusedMoE))]
    assert bool(quantised) == (fmt is not None), "no layer is quantised"
    for module in quantised:
        module.act_fmt = rows
    return model


def in_e4m3(rows: Tensor) -> Tensor:
    """Return rows rounded to E4M3 times a float32 scale each, as "fp8" does."""
    scale = rows.float().abs().amax(-1, keepdim=True) / 448.0
    ratio = torch.where(scale == 0, 0, rows.float() / scale)
    return (ratio.to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


def rounded_values(weight: Any) -> tuple[Tensor, float]:
    """Return an NVFP4 weight of a checkpoint rounded to E4M3, and what that changed of its norm."""
    exact = weight.dequantize(torch.float32)
    codes = weight.packed.view(torch.uint8).flatten(0, -2)
    scale = weight.block_scale.view(torch.uint8).flatten(0, -2)
    of = rounded.rounded(codes, scale)
    made = torch.ldexp(rounded.values(of), of.octaves[:, None]).view(exact.shape)
    top = weight.global_scale
    if top is not None:  # one, or one of each expert
        made = made * top.float().view(-1, *[1] * (made.dim() - 1))
    return made, float((made - exact).norm() / exact.norm())


def with_rounded(folder: Path, out: Path, errors: dict[str, float]) -> Any:
    """Return a plain model whose quantised layers have rounded weights, and FP8 rows.

    ``errors`` takes what rounding changes, by weight.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig

    import blockscale as bs

    loaded(folder, "nvfp4", None, torch.float32).save_pretrained(out / "nvfp4")
    ckpt = bs.checkpoints.open(out / "nvfp4")
    found = {}
    for name, entry in ckpt.entries.items():
        weight = ckpt.weight(name)
        if entry.fmt == "nvfp4":
            found[name], errors[name] = rounded_values(weight)
        else:
            found[name] = weight.dequantize(torch.float32).contiguous()
    AutoConfig.from_pretrained(folder).save_pretrained(out)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    model = loaded(out, None, None, torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given: (in_e4m3(given[0]),))
        elif isinstance(getattr(module, "gate_up_proj", None), Tensor):
            module.forward = partial(experts, module)
    return model


def experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return what a Mixtral's experts make of rows x [T, H], in FP8 before both GEMMs."""
    total, codes = torch.zeros_like(x), in_e4m3(x)
    for expert in range(len(module.gate_up_proj)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (codes[token] @ module.gate_up_proj[expert].T).chunk(2, 1)
        h = in_e4m3(torch.nn.functional.silu(gate) * up)
        y = h @ module.down_proj[expert].T
        total.index_add_(0, token, y * weights[token, slot, None])
    return total


def perplexity(model: Any, tokens: Tensor) -> float:
    """Return that of windows of a text."""
    lost, count = 0.0, 0
    with torch.inference_mode():
        for rows in run.windows(tokens):
            logits = model(rows[:, :-1], use_cache=False).logits.float().flatten(0, 1)
            wanted = rows[:, 1:].flatten()
            lost += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            count += len(wanted)
    return math.exp(lost / count)


def measured(name: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Return the perplexities of one model, by its weights and rows."""
    read = text.topics()
    tokenizer = text.trained_tokenizer(read.train)
    held = text.encoded(tokenizer, read.held)
    model = MODELS[name](tokenizer.get_vocab_size())
    trained = train.trained(model, text.encoded(tokenizer, read.train), seconds)
    train.write(model, tokenizer, folder)
    found: dict[str, Any] = {"model": name, "steps": trained.steps, "tokens": len(held)}
    roads: dict[str, Callable[[], Any]] = {
        "float32": partial(loaded, folder, None, None, torch.float32),
        "bfloat16": partial(loaded, folder, None, None, torch.bfloat16),
    }
    for fmt in FORMATS:
        roads[fmt] = partial(loaded, folder, fmt, None, torch.bfloat16)
        if fmt != "int4":  # whose linear layers, in a model, take rows as they are
            roads[f"{fmt} x fp8"] = partial(loaded, folder, fmt, "fp8", torch.bfloat16)
    errors: dict[str, float] = {}
    roads[f"{ROUNDED} x fp8"] = partial(with_rounded, folder, folder / "rounded", errors)
    for road, make in roads.items():
        found[road] = perplexity(make(), held)
        print(f"{name:8} {road:24} perplexity {found[road]:.3f}", flush=True)
    found["rounding"] = said(name, errors)
    return found


def said(name: str, errors: dict[str, float]) -> dict[str, float]:
    """Return, and print, the least, the median and the largest error of a model's weights."""
    of = sorted(errors.values())
    found = {"weights": len(of), "least": of[0], "median": median(of), "largest": of[-1]}
    print(f"{name:8} rounding {found}", flush=True)
    return found


def encoder() -> dict[str, float]:
    """Return the same of the demo's encoder, whose weights are quantised to NVFP4 here."""
    from safetensors.torch import load_file

    import blockscale as bs

    errors = {}
    for name, value in load_file(find_model().weights).items():
        if value.dim() == 2 and "embeddings" not in name:
            of, _ = quantise_linear(value.float())
            made = bs.prepare_linear_weights(
                of.packed, of.block_scale, global_scale=of.global_scale, layout="tiles64e",
                act_fmt="fp8", rounded=True,
            )  # fmt: skip
            assert made.added_error is not None
            errors[name] = made.added_error[0]
    return said("MiniLM", errors)


def main() -> None:
    """Train, quantise, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180, help="of training, each model")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, given.seconds, Path(folder)))
    if given.out:
        result = {"date": now(), "machine": machine(), "seconds": given.seconds, "rows": rows}
        result["encoder"] = encoder()
        write_json(given.out, result)


if __name__ == "__main__":
    main()
