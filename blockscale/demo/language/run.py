"""The language model in a process of its own, without tvm: perplexity, text, tokens a second.

transformers loads one checkpoint in float32 and bfloat16, and the same in NVFP4 through
`blockscale.integrations.transformers`, on kernels of a library; a stock model of the NVFP4 values
tells whether these are right.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blockscale.demo import files, metrics, timing

if TYPE_CHECKING:
    from blockscale.specs import Spec

LENGTH, ROWS = 128, 8
"""Tokens of a window of held-out text, whose first one is not predicted; windows of a batch."""
PROMPTS = ("The expression", "A function definition", "If a class")
SAMPLE_TOKENS, REPETITION = 48, 1.3
"""Of the texts that are shown: their length, and what a token's probability falls by when it
comes again (transformers' repetition_penalty), without which small models go round in circles."""
DECODED = 24
"""Tokens that are generated when it is timed."""
BOUND = {"ours_f32": 1e-4, "ours_bf16": 4e-2}
"""Relative error of a row of logits beside a float32 model of the same values: float32 sums in
another order; bfloat16 activations in every layer."""


def models(plain: Path, quantised: Path) -> dict[str, Any]:
    """Return the model in the demo's four variants, and as "decoded" with the values of NVFP4."""
    import torch
    from transformers import AutoModelForCausalLM

    import blockscale as bs
    import blockscale.integrations.transformers  # from_pretrained asks it first
    from blockscale.demo.variants import LABELS, dtype_of

    def loaded(folder: Path, dtype: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    found = {
        variant: loaded(quantised if variant.startswith("ours") else plain, dtype_of(variant))
        for variant in LABELS
    }
    decoded = loaded(plain, torch.float32)
    ckpt = bs.checkpoints.open(quantised)
    for name, entry in ckpt.entries.items():
        if entry.fmt == "nvfp4":
            decoded.get_parameter(name).data.copy_(ckpt[name].dequantize())
    return {**found, "decoded": decoded}


def windows(tokens: Any) -> Iterator[Any]:
    """Yield batches [rows, `LENGTH` + 1] of a text of tokens, one after the other."""
    whole = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    yield from whole.split(ROWS)


def accuracy(found: Mapping[str, Any], tokens: Any) -> dict[str, Any]:
    """Return what the models make of held-out tokens.

    "perplexity"; "same_token": how often the likeliest next token is that of the float32 model;
    "kernel_error": the largest of a row of logits beside the decoded weights.
    """
    import torch

    from blockscale.demo.variants import LABELS, REFERENCE

    lost = dict.fromkeys([*LABELS, "decoded"], 0.0)
    same, error, count = dict.fromkeys(LABELS, 0), dict.fromkeys(BOUND, 0.0), 0
    with torch.inference_mode():
        for rows in windows(tokens):
            logits = {
                name: model(rows[:, :-1], use_cache=False).logits.float().flatten(0, 1)
                for name, model in found.items()
            }
            wanted = rows[:, 1:].flatten()
            count += len(wanted)
            for name, each in logits.items():
                total = torch.nn.functional.cross_entropy(each, wanted, reduction="sum")
                lost[name] += total.item()
            best = {name: logits[name].argmax(1) for name in LABELS}
            for name in LABELS:
                same[name] += int((best[name] == best[REFERENCE]).sum())
            for name, worst in error.items():
                now = metrics.row_errors(logits[name], logits["decoded"]).max().item()
                error[name] = math.nan if math.isnan(now) else max(worst, now)
    return {
        "tokens": count,
        "perplexity": {name: math.exp(total / count) for name, total in lost.items()},
        "same_token": {name: number / count for name, number in same.items()},
        "kernel_error": error,
    }


def wrong(found: Mapping[str, float]) -> list[str]:
    """Return a sentence on each variant whose logits err more than rounding does."""
    return [
        f"language model: logits of {variant} differ from those of the same weights in float32 by "
        f"{found[variant]:.1e}, allowed {bound:.0e}"
        for variant, bound in BOUND.items()
        if not found[variant] <= bound  # NaN is wrong too
    ]


def samples(found: Mapping[str, Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Return how each variant goes on with each prompt: the likeliest tokens."""
    from blockscale.demo.variants import LABELS

    rows = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        texts = {}
        for name in LABELS:
            made = found[name].generate(
                **given,
                max_new_tokens=SAMPLE_TOKENS,
                do_sample=False,
                repetition_penalty=REPETITION,
                pad_token_id=0,
            )
            texts[name] = tokenizer.decode(made[0, given["input_ids"].shape[1] :])
        rows.append({"prompt": prompt, "texts": texts})
    return rows


def speed(found: Mapping[str, Any], tokens: Any, seconds: float) -> list[dict[str, Any]]:
    """Return tokens a second of reading a batch of windows, and of generating one by one."""
    import torch

    from blockscale.demo.variants import LABELS

    rows = tokens[: ROWS * LENGTH].view(ROWS, LENGTH)
    prompt = rows[:1, :16]

    def reading(model: Any) -> timing.Call:
        return lambda _: model(rows, use_cache=False)

    def writing(model: Any) -> timing.Call:
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": DECODED}
        return lambda _: model.generate(prompt, min_new_tokens=DECODED, **options)

    made = []
    for label, of, count in (
        (f"reading {ROWS} x {LENGTH} tokens", reading, rows.numel()),
        (f"writing {DECODED} tokens, one by one", writing, DECODED),
    ):
        calls = {name: of(found[name]) for name in LABELS}
        with torch.inference_mode():
            times, watched = timing.interleaved(calls, 1000, seconds / 2, 5)
        rates = {name: count / time.median for name, time in times.items()}
        made.append({"what": label, "tokens_s": rates, "watched": watched.to_json()})
    return made


def weight_bytes(model: Any, ckpt: Any) -> dict[str, int]:
    """Return the bytes of the linear layers' weights in each form."""
    entries = [entry for entry in ckpt.entries.values() if entry.fmt == "nvfp4"]
    count = sum(entry.shape[0] * entry.shape[1] for entry in entries)
    packed = sum(info.nbytes for entry in entries for info in entry.parts.values())
    whole = sum(value.numel() for value in model.parameters())
    return {"fp32": 4 * count, "bf16": 2 * count, "nvfp4": packed, "parameters": whole}


def needed_specs(ckpt: Any) -> list[Spec]:
    """Return the kernels that the model calls, of each dtype of its activations."""
    from blockscale.demo.variants import DTYPES
    from blockscale.nn.kernels import kernels_of

    found = [spec for dtype in DTYPES for spec in kernels_of(ckpt, cuda=False, dtype=dtype)]
    return [*{spec.name: spec for spec in found}.values()]


def check_library(ckpt: Any, functions: Mapping[str, Any], path: Path) -> None:
    """Raise PrerequisiteError unless ``functions`` has all that the model calls."""
    missing = [spec.name for spec in needed_specs(ckpt) if spec.name not in functions]
    if missing:
        raise files.PrerequisiteError(
            f"demo: the library {path} has no function {', '.join(missing)}, but the language "
            "model has linear layers of that shape; run `make demo` to build it again"
        )


def run(folder: Path, library: Path, seconds: float) -> dict[str, Any]:
    """Return all figures of the language model in ``folder``, "float32" and "nvfp4" below it.

    Raises PrerequisiteError when a file, a package or a function of the library is missing.
    """
    files.need_modules("safetensors", "tokenizers", "torch", "transformers", "tvm_ffi")
    plain, quantised = folder / "float32", folder / "nvfp4"
    remedy = "run `make demo`, which makes it"
    files.need_file(library, "the library", remedy)
    for path in (plain / "config.json", quantised / "config.json"):
        files.need_file(path, "the language model's", remedy)
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    import blockscale as bs
    from blockscale.demo.language.text import encoded, topics

    ckpt = bs.checkpoints.open(quantised)
    check_library(ckpt, bs.load(library).functions, library)
    tokenizer = AutoTokenizer.from_pretrained(quantised)
    tokens = encoded(tokenizer.backend_tokenizer, topics().held)
    found = models(plain, quantised)
    made = {
        **accuracy(found, tokens),
        "samples": samples(found, tokenizer),
        "speed": speed(found, tokens, seconds),
        "bytes": weight_bytes(found["torch_f32"], ckpt),
        "kind": ckpt.kind,
        "tvm_imported": "tvm" in sys.modules,
    }
    made["wrong"] = wrong(made["kernel_error"])
    assert not made["tvm_imported"], "the language model's process imported tvm"
    return made


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="The model's.")
@click.option("--library", type=click.Path(path_type=Path), required=True, help="Its kernels.")
@click.option("--seconds", default=12.0, show_default=True, help="Time for the speed.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures here as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, not as tables.")
def main(folder: Path, library: Path, seconds: float, out: Path | None, as_json: bool) -> None:
    """Run the demo's language model with the kernels of a library, beside torch.

    Example: python -m blockscale.demo.language.run --folder dist/demo-language-model
    --library dist/demo-language-model/kernels.so
    """
    files.replace_what_cannot_be_printed()
    try:
        files.need_modules("rich")
        from rich.console import Console

        from blockscale.demo import tables

        result = run(folder, library, seconds)
        if out is not None:
            files.write_json(out, result)
    except files.FAILURES as error:
        raise click.ClickException(files.sentence(error)) from error
    if as_json:
        click.echo(json.dumps(files.plain(result)))
    else:
        tables.print_language(Console(), result)
    if result["wrong"]:
        raise click.ClickException("; ".join(result["wrong"]))


if __name__ == "__main__":
    main()
