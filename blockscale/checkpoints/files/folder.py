"""The files of a checkpoint: which shards there are, the tensors in them, and its configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.files.safetensors import (
    TensorInfo,
    opened,
    parse_json,
    read_header,
    shown,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
RECORD = "blockscale_convert.json"
"""What `blockscale convert` keeps in a folder; its "state" is "complete" when the folder is."""
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors")
_MAX_INDEX, _MAX_CONFIG = 400_000_000, 64_000_000
_OTHERS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.npz")
"""Weights in formats that are not read; the first hint counts."""
CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")


@dataclass
class Folder:
    """The tensors of a checkpoint by name, and its JSON files that there are, by file name."""

    path: Path
    shards: list[Path]
    tensors: dict[str, TensorInfo]
    configs: dict[str, dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def quantization(self) -> dict[str, Any]:
        """Return what the configuration says on quantisation, from whichever file has it."""
        return quantization_of(self.configs)


def quantization_of(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what JSON files, by name, say on quantisation; {}: nothing."""
    config = configs.get("config.json", {})
    text = config.get("text_config")
    places = [config, text if isinstance(text, dict) else {}]
    inner = [p.get(k) for k in ("quantization_config", "compression_config") for p in places]
    found = next((value for value in inner if isinstance(value, dict) and value), None)
    old = configs.get("quant_config.json", {})
    gptq = configs.get("quantize_config.json", {})
    if found is not None:
        return {**gptq, **found} if found.get("quant_method") == "gptq" else found
    modelopt = configs.get("hf_quant_config.json", {}).get("quantization")
    if isinstance(modelopt, dict):
        return {"quant_method": "modelopt", **modelopt}
    if gptq:
        return {"quant_method": "gptq", **gptq}
    if "w_bit" in old:
        renamed = {"bits": old["w_bit"], "group_size": old.get("q_group_size")}
        return {"quant_method": "awq", **old, **renamed}
    return {}


def quantization_in(path: Path) -> dict[str, Any]:
    """Return what the JSON files of a folder say on quantisation; {}: nothing.

    Raises:
        CheckpointError: one of them is damaged.
    """
    return quantization_of(_configs(path))


def read_folder(path: Path) -> Folder:
    """Return the files of the checkpoint at ``path``: a folder, or one .safetensors file.

    Raises:
        CheckpointError: a file is missing, damaged or contradicts another one.
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint's folder")
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is neither a folder nor a .safetensors file; give a checkpoint's folder"
        )
    tensors, _ = read_header(path)
    return Folder(path, [path], tensors, _configs(path.parent))


def _read_folder(path: Path) -> Folder:
    record = path / RECORD
    if record.exists() and _json_file(record).get("state") != "complete":
        raise CheckpointError(
            f"{path} holds an unfinished conversion; run the same `blockscale convert` again, "
            "which finishes it, or remove the folder"
        )
    notes: list[str] = []
    shards, weight_map = _shards(path, notes)
    folder = Folder(path, shards, {}, _configs(path), notes)
    for shard in shards:
        found, _ = read_header(shard)
        twice = folder.tensors.keys() & found.keys()
        if twice:
            name = min(twice)
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is in {folder.tensors[name].path.name} and in "
                f"{shard.name}; remove the file that does not belong to the checkpoint"
            )
        folder.tensors.update(found)
    if weight_map is not None:
        _check_map(folder, weight_map)
    if not folder.tensors:
        raise CheckpointError(f"{path} has no tensor in {len(shards)} file(s); copy it again")
    return folder


def _shards(path: Path, notes: list[str]) -> tuple[list[Path], dict[str, str] | None]:
    files = sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob("*.safetensors.index.json"))
    index = path / INDEX if path / INDEX in indices else (indices[0] if len(indices) == 1 else None)
    if index is not None:
        weight_map = _weight_map(index)
        shards = [path / name for name in sorted(set(weight_map.values()))]
        for shard in shards:
            if not shard.is_file():
                raise CheckpointError(
                    f"{index} names the file {shard.name!r}, which is not in the folder; copy all "
                    f"{len(shards)} files of the checkpoint"
                )
        _note_others(files, shards, "the index names", notes)
        return shards, weight_map
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has {len(indices)} index files and none is {INDEX}; leave one of them"
        )
    if not files:
        others = [p.name for kind in _OTHERS for p in sorted(path.glob(kind))[:1]]
        hint = f"; {others[0]} must be saved as safetensors first" if others else ""
        raise CheckpointError(f"{path} has no .safetensors file, so it is no checkpoint{hint}")
    if path / SINGLE in files:
        _note_others(files, [path / SINGLE], f"there is {SINGLE}", notes)
        return [path / SINGLE], None
    _check_numbers(path, files)
    numbered = [file for file in files if _SHARD.fullmatch(file.name)]
    if numbered and len(numbered) < len(files):  # e.g. consolidated.safetensors: all of it again
        _note_others(files, numbered, "others are numbered", notes)
        return numbered, None
    return files, None


def _note_others(files: list[Path], shards: list[Path], why: str, notes: list[str]) -> None:
    left = sorted({file.name for file in files} - {shard.name for shard in shards})
    if left:
        notes.append(f"{len(left)} files are left out, since {why}: {left[0]}")


def _check_numbers(path: Path, files: list[Path]) -> None:
    """Refuse ``model-00001-of-00003.safetensors`` without its two others."""
    seen: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = _SHARD.fullmatch(file.name)
        if match:
            key = match["stem"], int(match["count"])
            seen.setdefault(key, set()).add(int(match["number"]))
    for (stem, count), numbers in seen.items():
        if len(numbers) != count or numbers != set(range(1, count + 1)):
            raise CheckpointError(
                f"{path} has {len(numbers)} of the {count} files {stem}-*-of-{count:05d}"
                ".safetensors; copy all of them"
            )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _json_file(index, _MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: weight_map is {shown(weight_map)}, but must be an object of tensor names "
            "and file names; copy it again"
        )
    for name, file in weight_map.items():
        plain = isinstance(file, str) and re.fullmatch(r"[\w.+=@ -]+\.safetensors", file)
        if not plain or file.startswith("."):
            raise CheckpointError(
                f"{index}: tensor {shown(name)} is said to be in {shown(file)}, but it must be in "
                "a .safetensors file of the same folder, named without any path; this index is not "
                "to be trusted"
            )
    return weight_map


def _check_map(folder: Folder, weight_map: dict[str, str]) -> None:
    for name, file in weight_map.items():
        info = folder.tensors.get(name)
        if info is None or info.path.name != file:
            where = "in no file" if info is None else f"in {info.path.name}"
            raise CheckpointError(
                f"{folder.path}: the index says that tensor {shown(name)} is in {file}, but it is "
                f"{where}; copy the index and the files again, from one version"
            )
    extra = len(folder.tensors) - len(weight_map)
    if extra:
        folder.notes.append(f"{extra} tensors are in the files, but not in the index; they count")


def _configs(path: Path) -> dict[str, dict[str, Any]]:
    return {name: _json_file(path / name) for name in CONFIGS if (path / name).is_file()}


def _json_file(path: Path, most: int = _MAX_CONFIG) -> dict[str, Any]:
    with opened(path, "copy it again") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise CheckpointError(
            f"{path} has more than {most} bytes, which are not read; it is no such file of a "
            "checkpoint"
        )
    return parse_json(text, str(path))
