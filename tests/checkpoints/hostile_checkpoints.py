"""Checkpoints of every kind that are sound, but for some changes; opened and read in full."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from blockscale import checkpoints
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.experts.experts import Experts
from blockscale.checkpoints.stats import stats
from blockscale.nn import FusedMoE, Linear
from tests.checkpoints.test_checkpoint_fuzz import SOUND, TRICKS
from tests.kit import checkpoint_files as files
from tests.kit.fuzz import changed_bytes, changed_json

ERRORS = (CheckpointError,)
CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")


def changed(rng: random.Random, data: bytes) -> bytes:
    """A JSON file with some of its values, or of its bytes, changed."""
    if rng.random() < 0.2:
        return changed_bytes(rng, data)
    value: Any = json.loads(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = changed_json(rng, value)
    return json.dumps(value).encode()


def attempt(rng: random.Random, folder: Path) -> str:
    """Write a folder with changes in header, data, configuration or index; read all of it."""
    tensors, said = SOUND[rng.choice(sorted(SOUND))]
    tensors = dict(tensors)
    kinds = ("llama4", "gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3")
    config = {"model_type": rng.choice(kinds), "hidden_size": 32, "num_experts_per_tok": 1}
    name = "config.json" if rng.random() < 0.7 else rng.choice(CONFIGS)
    config |= {"quantization_config": said} if name == "config.json" else {"quantization": said}
    made = {name: json.dumps(config | said if rng.random() < 0.3 else config).encode()}
    header = json.dumps(files.header(tensors)).encode()
    data = b"".join(v.tobytes() for v in tensors.values())
    shard = "model.safetensors"
    if rng.random() < 0.3:
        shard = "model-00001-of-00001.safetensors"
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
        if rng.random() < 0.3:
            index["weight_map"][rng.choice(sorted(tensors))] = rng.choice(TRICKS)
        made["model.safetensors.index.json"] = json.dumps(index).encode()
    for part in rng.sample([*made, "header", "data", "length"], rng.choice([1, 1, 2])):
        if part in made:
            made[part] = changed(rng, made[part])
        elif part == "header":
            header = changed(rng, header)
        elif part == "data":
            data = changed_bytes(rng, data)
    length = None if rng.random() < 0.97 else rng.choice([0, 1, 2**31, 2**63, len(header) + 1])
    made[shard] = files.file_bytes(header, data, length)
    for file, content in made.items():
        (folder / file).write_bytes(content)
    found = checkpoints.open(folder)
    return f"opened, {'some' if read(found) else 'nothing'} read"


def read(found: checkpoints.Checkpoint) -> int:
    """Read every weight, all experts and the modules made of them; return how many could be."""
    count = 0
    for name in [*found.names, *found.stacks]:
        with suppress(CheckpointError):
            weight = found.weight(name)
            assert tuple(weight.dequantize().shape) == weight.shape
            stats(weight).warnings()
            count += 1
        with suppress(CheckpointError, ValueError, TypeError):  # of arguments that fit no kernel
            Linear.from_checkpoint(found, name)
    for name in found.modules:
        with suppress(CheckpointError):
            experts = found.experts(name)
            assert isinstance(experts, Experts)
            count += 1
        with suppress(CheckpointError, ValueError, TypeError):
            FusedMoE.from_checkpoint(found, name, layout="linear")
    return count
