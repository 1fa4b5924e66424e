"""Attention of decoding: ``attn_implementation="blockscale"``.

Of one new token, the queries that share a head of keys are rows of one query, so that keys and
values are read once and not copied for each of them; transformers' "sdpa" repeats them wherever
there is a mask (5.17), or where it is compiled (5.23).  All else goes to "sdpa".
"""

from __future__ import annotations

from typing import Any

import torch

from blockscale.integrations.hf_interfaces import (
    AttentionInterface,
    AttentionMaskInterface,
    sdpa_attention_forward,
    sdpa_mask,
)

Tensor = torch.Tensor

NAME = "blockscale"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return [B, T, heads, D] of queries [B, heads, T, D], keys and values [B, groups, L, D].

    Raises:
        ValueError: the model's attention has sinks, which "sdpa" leaves out.
    """
    if options.get("s_aux") is not None:
        raise ValueError(
            f"attn_implementation={NAME!r}: {type(module).__name__} has sinks, which it does not "
            "add; leave it out"
        )
    batch, heads, tokens, size = query.shape
    groups = key.shape[1]
    alike = attention_mask is not None and attention_mask.shape[1] == 1
    plain = not options.get("dropout") and options.get("position_bias") is None
    if tokens != 1 or heads == groups or not alike or not plain:
        made: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return made
    found = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
    )
    return found.reshape(batch, 1, heads, value.shape[-1]), None


def register() -> None:
    """Let models find it by its name."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
