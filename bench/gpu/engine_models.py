"""Checkpoints of real models' shapes with random weights, for `bench.gpu.engines`.

Bytes come from small pools of random ones, so that a checkpoint is written as fast as its file
system takes it.  Codes are uniform, scales such that a weight's standard deviation is about that
of the model's initialisation; there is never a dense model.  `write` with ``data=False`` makes
files of which only the headers are there (the rest is a hole): enough to build kernels from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHARD_BYTES = 2 << 30
POOL = 1 << 26
"""Bytes of a pool."""

STD = 0.02
E2M1_RMS = sqrt(137 / 16)
"""Of all 16 codes of E2M1, which are equally frequent."""


@dataclass(frozen=True)
class Shape:
    """A model: the class of its configuration, what that is told, and how it is stored.

    Attributes:
        kind: "llama", "qwen3_moe" or "gpt_oss".
        config: arguments of transformers' configuration.
        head: whether lm_head has 4 bits as well; exporters leave it out by default.
    """

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    head: bool = False

    def of(self, **changes: Any) -> Shape:
        """Return the same with some arguments of the configuration changed."""
        return Shape(self.kind, {**self.config, **changes}, self.head)


_CLASSES = {"llama": "LlamaConfig", "qwen3_moe": "Qwen3MoeConfig", "gpt_oss": "GptOssConfig"}
_LLAMA = Shape(
    "llama",
    {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
)
SHAPES = {
    "llama-3-8b": _LLAMA,
    "llama-3-8b-head": Shape("llama", _LLAMA.config, head=True),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
        },
    ),
}
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
# every token goes to all experts: of two that are nearly equal rounding may choose either
_ALL = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
TINY = {
    "tiny-llama": Shape("llama", _SMALL, head=True),
    "tiny-qwen3-moe": Shape("qwen3_moe", {**_SMALL, **_ALL, "num_experts": 4}),
    "tiny-gpt-oss": Shape(
        "gpt_oss", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 8}
    ),
}
"""Of the same three architectures; their kernels are in the library too."""


def config_of(shape: Shape) -> Any:
    """Return transformers' configuration of a model that is not quantised."""
    import transformers

    common = {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None}
    found = getattr(transformers, _CLASSES[shape.kind])
    return found(**{**shape.config, **common, "pad_token_id": 0, "dtype": "bfloat16"})


# ---- Tensors ------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """One tensor of a file; ``pool``: which bytes it has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pool: str

    @property
    def nbytes(self) -> int:
        """Return the size of its bytes."""
        return prod(self.shape) * {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}[self.dtype]


def _plain(name: str, *shape: int, pool: str = "weights") -> Stored:
    return Stored(name, "BF16", shape, pool)


def _nvfp4(name: str, n: int, k: int) -> list[Stored]:
    """Return the tensors of ModelOpt's NVFP4 weight."""
    return [
        Stored(f"{name}.weight", "U8", (n, k // 2), "codes"),
        Stored(f"{name}.weight_scale", "F8_E4M3", (n, k // 16), "e4m3"),
        Stored(f"{name}.weight_scale_2", "F32", (), "global"),
    ]


def tensors(shape: Shape, config: Any) -> Iterator[list[Stored]]:
    """Yield the tensors of a checkpoint: what is around the layers, then each layer's."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    ends = [_plain("model.embed_tokens.weight", vocabulary, hidden)]
    ends.append(_plain("model.norm.weight", hidden, pool="ones"))
    if shape.head:
        ends += _nvfp4("lm_head", vocabulary, hidden)
    else:
        ends.append(_plain("lm_head.weight", vocabulary, hidden))
    yield ends
    for number in range(config.num_hidden_layers):
        stem = f"model.layers.{number}"
        made = [
            _plain(f"{stem}.{name}_layernorm.weight", hidden, pool="ones")
            for name in ("input", "post_attention")
        ]
        yield [*made, *_attention(shape, config, f"{stem}.self_attn"), *_mlp(shape, config, stem)]


def _attention(shape: Shape, config: Any, stem: str) -> Iterator[Stored]:
    hidden, size = config.hidden_size, config.head_dim
    wide, narrow = config.num_attention_heads * size, config.num_key_value_heads * size
    for name, n, k in (
        *(("q", wide, hidden), ("k", narrow, hidden), ("v", narrow, hidden)),
        ("o", hidden, wide),
    ):
        if shape.kind == "gpt_oss":  # plain, as OpenAI stores it
            yield _plain(f"{stem}.{name}_proj.weight", n, k)
            yield _plain(f"{stem}.{name}_proj.bias", n)
        else:
            yield from _nvfp4(f"{stem}.{name}_proj", n, k)
    if shape.kind == "qwen3_moe":
        yield _plain(f"{stem}.q_norm.weight", size, pool="ones")
        yield _plain(f"{stem}.k_norm.weight", size, pool="ones")
    if shape.kind == "gpt_oss":
        yield _plain(f"{stem}.sinks", config.num_attention_heads)


def _mlp(shape: Shape, config: Any, stem: str) -> Iterator[Stored]:
    hidden = config.hidden_size
    if shape.kind == "gpt_oss":
        inner, experts = config.intermediate_size, config.num_local_experts
        yield _plain(f"{stem}.mlp.router.weight", experts, hidden)
        yield _plain(f"{stem}.mlp.router.bias", experts)
        for name, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            head = f"{stem}.mlp.experts.{name}_proj"
            yield Stored(f"{head}_blocks", "U8", (experts, n, k // 32, 16), "codes")
            yield Stored(f"{head}_scales", "U8", (experts, n, k // 32), "e8m0")
            yield _plain(f"{head}_bias", experts, n)
        return
    heads, inner = [f"{stem}.mlp"], config.intermediate_size
    if shape.kind == "qwen3_moe":
        yield _plain(f"{stem}.mlp.gate.weight", config.num_experts, hidden)
        inner = config.moe_intermediate_size
        heads = [f"{stem}.mlp.experts.{e}" for e in range(config.num_experts)]
    for head in heads:
        yield from _nvfp4(f"{head}.gate_proj", inner, hidden)
        yield from _nvfp4(f"{head}.up_proj", inner, hidden)
        yield from _nvfp4(f"{head}.down_proj", hidden, inner)


# ---- Files --------------------------------------------------------------------------------------


def _bfloat16(values: np.ndarray) -> bytes:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def pools(size: int = POOL) -> dict[str, bytes]:
    """Return random bytes by kind, ``size`` of them or fewer; a tensor has some of them in turn."""
    made = np.random.default_rng(0)
    # 0.5 to 2, of mean 1.1 and with the codes of E2M1 of a standard deviation of 3.4
    e4m3 = made.integers(0x30, 0x41, size // 16, dtype=np.uint8)
    middle = round(127 + np.log2(STD / E2M1_RMS))
    return {
        "codes": made.bytes(size),
        "e4m3": e4m3.tobytes(),
        "e8m0": made.integers(middle - 1, middle + 2, size // 16, dtype=np.uint8).tobytes(),
        "global": np.float32(STD / 3.4).tobytes(),
        "weights": _bfloat16(made.standard_normal(size // 2, np.float32) * STD),
        "ones": _bfloat16(np.ones(1 << 14)),
    }


def _pieces(stored: Stored, pool: bytes, at: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor: those of the pool from ``at`` on, again and again."""
    left, start = stored.nbytes, at % len(pool)
    view = memoryview(pool)
    while left:
        piece = view[start : start + left]
        yield piece
        left, start = left - len(piece), 0


def _shards(groups: Iterator[list[Stored]]) -> list[list[Stored]]:
    """Return the tensors of each file, layers together."""
    found: list[list[Stored]] = [[]]
    size = 0
    for group in groups:
        more = sum(stored.nbytes for stored in group)
        if found[-1] and size + more > SHARD_BYTES:
            found.append([])
            size = 0
        found[-1] += group
        size += more
    return found


def _write_shard(path: Path, stored: list[Stored], data: Mapping[str, bytes] | None) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for each in stored:
        ends = [at, at := at + each.nbytes]
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": ends}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if data is None:
            os.truncate(file.fileno(), 8 + len(text) + at)
            return
        for number, each in enumerate(stored):
            # another start for each tensor, at a multiple of 4 bytes, which all elements are
            for piece in _pieces(each, data[each.pool], 4 * 7919 * number):
                file.write(piece)


def quantization(shape: Shape) -> dict[str, Any]:
    """Return what config.json says on it."""
    if shape.kind == "gpt_oss":
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*left, "lm_head"]}
    ignored = ["*.mlp.gate"] if shape.kind == "qwen3_moe" else []
    ignored += [] if shape.head else ["lm_head"]
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}


def write(shape: Shape, folder: Path, *, data: bool = True) -> int:
    """Write a checkpoint; return the bytes of its tensors.  Without data: headers alone."""
    config = config_of(shape)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors(shape, config))
    config.save_pretrained(folder)
    path = folder / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "quantization_config": quantization(shape)}, indent=2))
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    index = {each.name: file for file, of in zip(names, shards, strict=True) for each in of}
    total = sum(each.nbytes for of in shards for each in of)
    told = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    filled = pools() if data else None
    with ThreadPoolExecutor(min(8, len(shards))) as threads:  # writing lets go of the lock
        jobs = [
            threads.submit(_write_shard, folder / name, of, filled)
            for name, of in zip(names, shards, strict=True)
        ]
        for job in jobs:
            job.result()
    return total


def kernels(shapes: Mapping[str, Shape], folder: Path, *, cuda: bool = True) -> list[str]:
    """Return the names of all kernels that the models call, from headers in ``folder``."""
    from blockscale import checkpoints
    from blockscale.nn.kernels import kernels_of

    found: dict[str, None] = {}
    for name, shape in shapes.items():
        write(shape, folder / name, data=False)
        for spec in kernels_of(checkpoints.open(folder / name), cuda=cuda):
            found[spec.name] = None
    return [*found]
