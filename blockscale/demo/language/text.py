"""What the language model reads: Python's own documentation, as `pydoc` ships it, and its tokens.

Topics repeat one another; each paragraph counts once, where it comes first.  Some topics are held
out, and with them their paragraphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END = "<end>"
"""Before each topic; token 0."""
VOCABULARY = 2048
HELD_EVERY, HELD_AT = 12, 5
"""Of so many topics one is held out: which."""


class Text(NamedTuple):
    """Topics as text: paragraphs are lines."""

    train: list[str]
    held: list[str]


def topics() -> Text:
    """Return Python's topics without what an earlier one says, apart into read and held out."""
    from pydoc_data.topics import topics as found

    seen: set[str] = set()
    text = Text([], [])
    for number, name in enumerate(sorted(found)):
        lines = [" ".join(part.split()) for part in found[name].split("\n\n")]
        new = [line for line in dict.fromkeys(lines) if line and line not in seen]
        seen.update(new)
        if new:
            held = number % HELD_EVERY == HELD_AT
            (text.held if held else text.train).append("\n".join(new))
    return text


def trained_tokenizer(texts: Sequence[str], size: int = VOCABULARY) -> Tokenizer:
    """Return a tokenizer of ``size`` pieces of bytes that are frequent in the texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return the tokens of all texts, int64, `END` before each."""
    return torch.tensor([token for text in texts for token in (0, *tokenizer.encode(text).ids)])
