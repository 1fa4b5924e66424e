"""A small Llama, trained for as many seconds as it is given, and written as a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from blockscale.base import host, targets
from blockscale.demo.language.text import END, encoded, topics, trained_tokenizer

SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
BATCH, LENGTH = 4, 128
RATE, WARM_STEPS = 3e-3, 20
"""Of AdamW: the learning rate rises for so many steps, then falls to 0 with the time left."""


@dataclass
class Training:
    """What a training was.

    Attributes:
        steps, tokens, seconds: how much of it there was.
        history: (second, loss) of each `KEPT_EVERY`th step.
        read, held: tokens of the text, and of what is held out.
    """

    read: int
    held: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[tuple[float, float]] = field(default_factory=list)


KEPT_EVERY = 10


def model_of(vocabulary: int, **changes: Any) -> Any:
    """Return a Llama of transformers with random weights; token 0 is `END`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **special, **{**SIZES, **changes}))


def trained(
    model: Any,
    tokens: Tensor,
    seconds: float,
    told: Callable[[float, int, float], object] = lambda *_: None,
) -> Training:
    """Train ``model`` on a text of tokens for some seconds, at least one step; return what it was.

    ``told`` is called after each step with the seconds so far, the step and its loss.
    """
    chance = torch.Generator().manual_seed(0)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    found = Training(len(tokens), 0)
    model.train()
    start = time.monotonic()
    while not found.steps or found.seconds < seconds:
        left = max(0.0, 1 - found.seconds / seconds) if seconds > 0 else 1.0
        for group in adam.param_groups:
            group["lr"] = RATE * min(1.0, (found.steps + 1) / WARM_STEPS) * left
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=chance).tolist()
        rows = torch.stack([tokens[at : at + LENGTH + 1] for at in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            loss = loss_of(model, rows)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        found.seconds = time.monotonic() - start
        if found.steps % KEPT_EVERY == 0:
            found.history.append((found.seconds, loss.item()))
        found.steps += 1
        found.tokens += BATCH * LENGTH
        told(found.seconds, found.steps, found.history[-1][1])
    model.eval()
    return found


def has_bfloat16() -> bool:
    """Return whether this CPU multiplies bfloat16 numbers, which makes a step 1.5 times as fast."""
    return targets.BF16_DOTS in host.features()


def loss_of(model: Any, rows: Tensor) -> Tensor:
    """Return the mean negative logarithm of the probability of each row's tokens but the first."""
    logits = model(rows[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def write(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint, float32, with its tokenizer."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    wrapped.save_pretrained(folder)


def make(
    folder: Path, seconds: float, told: Callable[[float, int, float], object] = lambda *_: None
) -> Training:
    """Read the text, train, and write a checkpoint to ``folder``."""
    text = topics()
    tokenizer = trained_tokenizer(text.train)
    model = model_of(tokenizer.get_vocab_size())
    found = trained(model, encoded(tokenizer, text.train), seconds, told)
    found.held = len(encoded(tokenizer, text.held))
    write(model, tokenizer, folder)
    return found
