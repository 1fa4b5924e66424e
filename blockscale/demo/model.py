"""A BERT sentence encoder in plain torch, whose Linear layers are given from outside.

The same code runs in float32 and bfloat16, with torch's Linear and with 4-bit kernels: only the
callables differ.  Embeddings, LayerNorm, attention and the residual stream are in the model's
dtype; mean pooling over the real tokens and the final L2 normalisation are in float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

LinearCall = Callable[[Tensor], Tensor]  # x [rows, K] -> [rows, N], dtype of x
MAX_TOKENS = 256  # the model's own sentence_bert_config.json
KINDS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT encoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    eps: float
    positions: int

    def __post_init__(self) -> None:
        """Raise ValueError when the heads do not divide the hidden size."""
        if self.hidden % self.heads:
            raise ValueError(
                f"BertConfig: hidden={self.hidden} is not a multiple of heads={self.heads}; "
                "use a config.json whose num_attention_heads divides hidden_size"
            )

    @staticmethod
    def read(path: Path) -> BertConfig:
        """Return the configuration in `path`, a config.json of a BertModel with GELU."""
        data = json.loads(path.read_text(encoding="utf-8"))
        expected = {
            "model_type": "bert",
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
        }
        for key, value in expected.items():
            if data.get(key, value) != value:
                raise ValueError(
                    f"BertConfig: {key}={data[key]!r} in {path} is not {value!r}; "
                    "this encoder implements no other: use another model"
                )
        return BertConfig(
            hidden=data["hidden_size"],
            intermediate=data["intermediate_size"],
            layers=data["num_hidden_layers"],
            heads=data["num_attention_heads"],
            eps=data["layer_norm_eps"],
            positions=data["max_position_embeddings"],
        )

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return the (N, K) of every encoder Linear by short name ("0.query"), in forward order."""
        shapes = dict.fromkeys(KINDS, (self.hidden, self.hidden))
        shapes["intermediate"] = (self.intermediate, self.hidden)
        shapes["output"] = (self.hidden, self.intermediate)
        return {
            f"{layer}.{kind}": shape
            for layer in range(self.layers)
            for kind, shape in shapes.items()
        }


def checkpoint_name(linear: str) -> str:
    """Return the checkpoint's prefix: "0.query" -> "encoder.layer.0.attention.self.query"."""
    layer, kind = linear.split(".")
    return f"encoder.layer.{layer}.{KINDS[kind]}"


class Encoder:
    """Sentence encoder: token ids -> embeddings [batch, hidden] float32 of length 1."""

    def __init__(
        self,
        config: BertConfig,
        tensors: Mapping[str, Tensor],
        linears: Mapping[str, LinearCall],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Keep `tensors` (embeddings and LayerNorms, checkpoint names) in `dtype`.

        `linears` has one callable for each short name of `config.linears()`.

        Raises:
            KeyError: names what is missing.
        """
        self.config, self.dtype, self.linears = config, dtype, linears
        missing = sorted(set(config.linears()) - set(linears))
        if missing:
            raise KeyError(f"Encoder: no Linear given for {', '.join(missing)}; give one for each")
        self._embedding = [
            tensors[f"embeddings.{kind}_embeddings.weight"].to(dtype)
            for kind in ("word", "position", "token_type")
        ]
        prefixes = ["embeddings.LayerNorm"]
        for layer in range(config.layers):
            at = f"encoder.layer.{layer}"
            prefixes += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
        self._norms = [
            (tensors[f"{prefix}.weight"].to(dtype), tensors[f"{prefix}.bias"].to(dtype))
            for prefix in prefixes
        ]

    def _norm(self, which: int, x: Tensor) -> Tensor:
        weight, bias = self._norms[which]
        return F.layer_norm(x, (self.config.hidden,), weight, bias, self.config.eps)

    def _attention(self, layer: int, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens = mask.shape

        def heads(kind: str) -> Tensor:
            y = self.linears[f"{layer}.{kind}"](x)
            return y.view(batch, tokens, self.config.heads, -1).transpose(1, 2)

        seen = mask[:, None, None, :].expand(batch, 1, tokens, tokens)
        context = F.scaled_dot_product_attention(
            heads("query"), heads("key"), heads("value"), attn_mask=seen
        )
        return context.transpose(1, 2).reshape(batch * tokens, self.config.hidden)

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last states [batch * tokens, hidden]; ids int64, mask bool [batch, tokens]."""
        if ids.shape[1] > self.config.positions:
            raise ValueError(
                f"Encoder: {ids.shape[1]} tokens exceed the model's {self.config.positions} "
                f"positions; truncate the input to {self.config.positions} tokens"
            )
        word, position, kind = self._embedding
        x = word[ids] + position[: ids.shape[1]] + kind[0]
        x = self._norm(0, x.reshape(-1, self.config.hidden))
        for layer in range(self.config.layers):
            y = self.linears[f"{layer}.attention"](self._attention(layer, x, mask))
            x = self._norm(2 * layer + 1, x + y)
            y = F.gelu(self.linears[f"{layer}.intermediate"](x))
            x = self._norm(2 * layer + 2, x + self.linears[f"{layer}.output"](y))
        return x

    @torch.inference_mode()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the embeddings [batch, hidden] float32; ids int64, mask bool [batch, tokens]."""
        hidden = self.hidden(ids, mask).float().view(*ids.shape, self.config.hidden)
        weight = mask.float()[:, :, None]
        mean = (hidden * weight).sum(1) / weight.sum(1)
        return F.normalize(mean, dim=1)


def torch_linears(
    config: BertConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, LinearCall]:
    """Return torch's own Linear for every encoder Linear, weights and bias in `dtype`."""

    def one(name: str) -> LinearCall:
        prefix = checkpoint_name(name)
        weight = tensors[f"{prefix}.weight"].to(dtype)
        bias = tensors[f"{prefix}.bias"].to(dtype)
        return lambda x: F.linear(x, weight, bias)

    return {name: one(name) for name in config.linears()}


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in `path` (tokenizer.json), cut at MAX_TOKENS, without padding."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def tokenise(tokenizer: Tokenizer, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return ids int64 and mask bool [sentences, longest]; padding has id 0 and mask False."""
    encoded = [torch.tensor(e.ids) for e in tokenizer.encode_batch(list(sentences))]
    ids = torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True)
    length = torch.tensor([len(e) for e in encoded])
    return ids, torch.arange(ids.shape[1])[None, :] < length[:, None]
