"""Attention of decoding: ``attn_implementation="blockscale"``.

Of one new token, the queries that share a head of keys are rows of one query, so that keys and
values are read once and not copied for each of them; transformers' "sdpa" repeats them wherever
there is a mask (5.17), or where it is compiled (5.23).  Where a batch has few heads of keys
(`few`), torch's attention, one CTA for each, leaves most of a GPU idle: there it is two products
with a softmax of float32 scores between them.  All else goes to "sdpa".
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

HEADS = 64
"""Of keys, in a batch: up to so many the products take less time than a CTA for each head does if
torch.compile joins what is between them, or `LENGTH` keys or more; up to half of them always."""
LENGTH = 1024
FLOAT_SUMS = "dtype" in torch.ops.aten.bmm.overloads()
"""Whether `torch.bmm` gives float32 of 16-bit operands on GPUs, as from torch 2.8 on.

Not asked when a call is traced: there it would break torch.compile's graph.
"""


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
    plain = not options.get("dropout") and options.get("position_bias") is None
    if (
        tokens != 1
        or heads == groups
        or not plain
        or (attention_mask is None or attention_mask.shape[1] != 1)
    ):
        made: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return made
    rows = query.reshape(batch, groups, heads // groups, size)
    scale = options.get("scaling") or size**-0.5
    if few(rows, key):
        found = products(rows, key, value, attention_mask, scale)
    else:
        found = torch.nn.functional.scaled_dot_product_attention(
            rows, key, value, attn_mask=attention_mask, scale=scale
        )
    return found.reshape(batch, 1, heads, value.shape[-1]), None


def few(rows: Tensor, key: Tensor) -> bool:
    """Return whether the attention of rows [B, groups, R, D] is to be two products on this GPU."""
    if not rows.is_cuda or rows.dtype == torch.float32 or rows.requires_grad or not FLOAT_SUMS:
        return False
    heads, compiling = rows.shape[0] * rows.shape[1], torch.compiler.is_compiling()
    most = HEADS if compiling or key.shape[2] >= LENGTH else HEADS // 2
    return bool(heads <= most)


def products(rows: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return [B, groups, R, D]: softmax of the scores, which stay float32, times the values.

    Args:
        rows: [B, groups, R, D].
        key, value: [B, groups, L, D].
        mask: [B or 1, 1, 1, L], bool (of what is seen) or added to the scores.
        scale: of the scores.
    """
    flat, turned = rows.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    if rows.is_cuda:
        scores = torch.bmm(flat, turned, out_dtype=torch.float32)
    else:
        scores = torch.bmm(flat.float(), turned.float())
    scores = scores.unflatten(0, rows.shape[:2]) * scale
    seen = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(torch.softmax(seen, -1).to(value.dtype), value)


def register() -> None:
    """Let models find it by its name."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
