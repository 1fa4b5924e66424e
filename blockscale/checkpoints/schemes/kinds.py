"""What the tensors of a checkpoint are: which make up which weight, and what a weight's are worth.

Every scheme of storing weights has a module here.  Its rules find the tensors of one weight and
check that they fit each other, from names, dtypes and shapes alone; the configuration only decides
what the tensors cannot say, and is compared with them.  Its ``values`` bring the data to the one
meaning of `Weight`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.entry import (
    FLOATS,
    Entry,
    Facts,
    Tensors,
    alternates,
    ones_dropped,
    weight_groups,
)
from blockscale.checkpoints.files.folder import Folder
from blockscale.checkpoints.files.safetensors import TensorInfo, read, shown
from blockscale.checkpoints.schemes import fp4, fp8, int4, layout, tiles
from blockscale.checkpoints.schemes.layout import Laid, of_experts
from blockscale.checkpoints.weight import Weight

Tensor = torch.Tensor

_KV = re.compile(
    r".*[._](k|v|q|kv|qkv|prob|p)(_global)?_(scale|scale_2|zero_point|bias_value)|.*\.output_scale|"
    r".*kv_cache.*(scale|zero_point)|.*\.prob_output_scale|.*\.[kv]_proj\.[kv]_bias"
)
_KV_ENDS = ("_scale", "zero_point", "_scale_2", "_bias_value", ".k_bias", ".v_bias")
_COMPANIONS = (
    *("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "weight_shape"),
    *("weight_zero", "weight_zero_point", "weight_g_idx", "weight_group_index"),
    *("input_scale", "input_global_scale", "pre_quant_scale", "svdquant_lora_a"),
    *("svdquant_lora_b", "qzeros", "g_idx", "scales"),
)
_ORPHANS = tuple(f"{dot}{name}" for dot in "._" for name in _COMPANIONS)
_FUSED_FP8 = ("_weight_scale", "_weight_scale_inv", "_scale_inv", "_scale")
_INTERLEAVED = ("gpt_oss", "GptOssForCausalLM")
_MIXED = ("MIXED_PRECISION", "mixed-precision")


def find_entries(folder: Folder) -> tuple[str, list[Entry], list[str]]:
    """Return the kind of the checkpoint, its weights in natural order, and notes for the user.

    Raises:
        CheckpointError: a tensor is missing or does not fit the others of its weight.
    """
    tensors = Tensors(folder.tensors, folder.quantization)
    entries: list[Entry] = []
    said = tensors.config.get("blockscale")
    if isinstance(said, dict):
        entries += tiles.find(tensors, said)
        entries += layout.find(tensors, said)
    free = [info for info in folder.tensors.values() if info.name not in tensors.used]
    entries += [e for info in free if (e := _quantized(tensors, info))]
    rest = [info for name, info in folder.tensors.items() if name not in tensors.used]
    quantised = bool(entries or folder.quantization)
    ignored = [i.name for i in rest if quantised and _of_cache(i)]
    skipped = set(ignored)
    entries += [_plain(tensors, info) for info in rest if info.name not in skipped]
    for entry in entries:
        if entry.scheme != "plain" and 0 in entry.shape:
            raise CheckpointError(
                f"{folder.path}: {shown(entry.name)} has the shape {list(entry.shape)}, but a "
                "quantised weight must not be empty; convert the checkpoint again"
            )
    entries.sort(key=lambda entry: natural(entry.name))
    kind, notes = _kind(entries, folder)
    if ignored:
        notes.append(f"{len(ignored)} scales of an FP8 KV cache are ignored, e.g. {ignored[0]}")
    _check_groups(entries, folder)
    return kind, entries, notes


def _of_cache(info: TensorInfo) -> bool:
    """Return whether a tensor is a scale of an FP8 KV cache: a learned parameter is no number."""
    one = not ones_dropped(info.shape)
    return one and info.name.endswith(_KV_ENDS) and _KV.fullmatch(info.name) is not None


def facts(folder: Folder) -> Facts:
    """Return what the configuration says that tensors do not."""
    said = folder.quantization
    form = said.get("checkpoint_format") or said.get("packing_format")
    if said.get("quant_method") == "auto-round":  # only its form "auto_gptq" has zeros less one
        v2 = form in ("auto_round", "auto_round:gptqmodel", None)
    else:
        v2 = isinstance(form, str) and form.lower() == "gptq_v2"
    config = folder.configs.get("config.json", {})
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    models = [config.get("model_type"), inner.get("model_type")]
    classes = config.get("architectures")
    names = [*models, *(classes if isinstance(classes, list) else [])]
    sizes = [inner.get("hidden_size"), config.get("hidden_size")]
    return Facts(
        gptq_v2=v2,
        gptq_words=any(str(q).startswith("gptqmodel") for q in _quantizers(said)),
        interleaved=any(n in _INTERLEAVED for n in names) or said.get("gate_up") == "interleaved",
        model=next((m for m in reversed(models) if isinstance(m, str)), ""),
        hidden=next((s for s in sizes if type(s) is int and s > 0), 0),
    )


def _quantizers(said: dict[str, Any]) -> list[Any]:
    """Return which programs a GPTQ configuration names, e.g. ["gptqmodel:7.7.0"]."""
    meta = said.get("meta")
    found = meta.get("quantizer") if isinstance(meta, dict) else None
    return found if isinstance(found, list) else [found]


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    parts = re.split(r"0*([0-9]+)", name)
    return [(len(p), p) if i % 2 else (-1, p) for i, p in enumerate(parts)]


def _quantized(tensors: Tensors, info: TensorInfo) -> Entry | None:
    """Return the quantised weight whose codes are in ``info``, if any."""
    name = info.name
    if name.endswith(".weight"):
        base = name.removesuffix("weight")
        found = _weight(tensors, info, base)
        if found is not None and base + "comfy_quant" in tensors and "block_scale" in found.parts:
            raise _unknown(info, "of ComfyUI, which orders block scales in a way of its own")
        return found
    if name.endswith("_packed"):
        stem = name.removesuffix("_packed")
        if stem.endswith(".weight") or stem + "_scale" in tensors:
            if info.dtype == "I32":
                return int4.compressed_tensors(tensors, info, stem)
            return fp4.compressed_tensors(tensors, info, stem)
    if name.endswith(".qweight"):
        return int4.words(tensors, info, name.removesuffix(".qweight"))
    if name.endswith(("_blocks", ".blocks")):
        return fp4.gpt_oss(tensors, info, name[: -len("_blocks")])
    if info.dtype.startswith("F8_E") and any(name + end in tensors for end in _FUSED_FP8):
        if name.endswith(("_scale", "_scale_inv")):
            return None
        weight = any(name + end in tensors for end in _FUSED_FP8[:2])
        return fp8.rule(tensors, info, name + "_") if weight or info.shape[2:] else None
    if name + "_weight_scale" in tensors:
        return _weight(tensors, info, name + "_")
    return None


def _weight(tensors: Tensors, info: TensorInfo, base: str) -> Entry | None:
    """Return the weight of which ``base`` + "weight_scale" and the like are parts; None: plain."""
    if info.dtype.startswith("F8_E"):
        return fp8.rule(tensors, info, base)
    if info.dtype not in fp4.CODE_BYTES:
        if base + "weight_scale" in tensors and info.dtype not in FLOATS:
            raise _unknown(info, f"{info.dtype} with scales")
        return None
    if base + "weight.absmax" in tensors:
        raise _unknown(info, "of bitsandbytes (NF4 or FP4)")
    if base + "weight_zero" in tensors:
        return int4.ours(tensors, info, base)
    scale = tensors.by_name.get(tensors.first(base + "weight_scale", base + "scale"))
    if info.dtype == "I8" and scale is None:
        if base + "SCB" in tensors or tensors.config.get("quant_method") == "bitsandbytes":
            raise _unknown(info, "of bitsandbytes (INT8)")
        return None
    if scale is not None and scale.dtype in FLOATS and info.dtype != "F4":
        found = int4.modelopt(tensors, info, base)
        if found is not None:
            return found
        if info.dtype == "I8":
            raise _unknown(info, "of integers of 8 bits")
    return fp4.modelopt(tensors, info, base)


def _unknown(info: TensorInfo, what: str) -> CheckpointError:
    return info.refused(
        f"is a weight {what}, which is not supported; use a checkpoint in NVFP4, MXFP4, INT4, FP8 "
        "or BF16"
    )


def _plain(tensors: Tensors, info: TensorInfo) -> Entry:
    """Return a tensor that stands for itself."""
    orphan = info.name.endswith(_ORPHANS)
    if info.name.endswith("_scales") and info.dtype in FLOATS:  # gpt-oss's are bytes
        orphan = False
    if orphan and info.name.endswith(".input_scale"):  # may be of a layer that was left in BF16
        lead = tensors.by_name.get(info.name.removesuffix("input_scale") + "weight")
        orphan = lead is None or lead.dtype not in FLOATS
    method = tensors.config.get("quant_method")
    bare = info.dtype.startswith("F8_E") and info.name.endswith(".weight") and method
    left = tensors.config.get("ignore")  # what was quantised by nobody has no scales
    bare = bare and not (isinstance(left, list) and info.name.removesuffix(".weight") in left)
    if orphan or bare or info.dtype == "F4":
        why = "belongs to a quantised weight, which is not there"
        if not orphan:
            why = f"has values of {info.dtype}, but no scales"
        raise CheckpointError(
            f"{info.path}: tensor {shown(info.name)} {why}; copy all files of the checkpoint"
        )
    return Entry(info.name, info.dtype.lower(), "plain", {"data": info}, info.shape)


def _kind(entries: list[Entry], folder: Folder) -> tuple[str, list[str]]:
    counts = Counter((e.scheme, e.fmt) for e in entries if e.scheme != "plain")
    config, notes = folder.quantization, list(folder.notes)
    method = config.get("quant_method")
    if _tied(folder):
        notes.append("lm_head is not stored: it is the embeddings' weight")
    if not counts:
        if method:
            notes.append(f"the configuration says {shown(method)}, but no weight is quantised")
        return "plain", notes
    scheme, fmt = max(counts, key=lambda key: counts[key])
    kind = fmt if scheme == fmt else f"{scheme}-{fmt}"
    if len(counts) > 1:
        kind = f"{scheme}-mixed"
    found = ", ".join(f"{n} x {s} {f}" for (s, f), n in sorted(counts.items()))
    notes.append(found + " by names and dtypes of tensors")
    said = {"mxfp4": "gpt-oss"}.get(str(method), str(method or ""))
    schemes = {s for s, _ in counts}
    if said == "auto-round":
        schemes.add(said)
    if said and said not in schemes:
        notes.append(f"the configuration says {shown(method)}; the tensors count")
    algo = config.get("quant_algo")
    if algo:
        notes.append(f"quant_algo {shown(algo)}")
    notes += _remarks(entries)
    return kind, notes


def _remarks(entries: list[Entry]) -> list[str]:
    notes = []
    fp4 = [e for e in entries if e.fmt == "nvfp4"]
    if fp4 and not any({"input_scale", "input_divisor"} & e.parts.keys() for e in fp4):
        notes.append("no input scales: weights only (W4A16), or activations scaled at run time")
    wide = sum(e.group > QUANTIZED["nvfp4"].block for e in fp4)
    if wide:
        notes.append(
            f"{wide} weights have scales of more than 16 values; each is read as one for each 16"
        )
    eight = sum("fp8_scale" in e.parts for e in entries)
    if eight:
        notes.append(
            f"{eight} weights have a weight_scale_2 for kernels that make FP8 of them (W4A8_AWQ); "
            "it is no part of their values"
        )
    smoothed = sum("pre_quant_scale" in e.parts for e in entries)
    if smoothed:
        notes.append(
            f"{smoothed} weights have a pre_quant_scale, which multiplies what they are given; it "
            "is not in their values"
        )
    low = [e.name for e in entries if {"lora_a", "lora_b"} & e.parts.keys()]
    if low:
        notes.append(f"{len(low)} weights have a low-rank part (SVDQuant) and cannot be read")
    return notes


def _tied(folder: Folder) -> bool:
    config = folder.configs.get("config.json", {})
    return config.get("tie_word_embeddings") is True and not any(
        name.endswith("lm_head.weight") for name in folder.tensors
    )


def _check_groups(entries: list[Entry], folder: Folder) -> None:
    """Compare the one group size of the configuration, if it has one, with that of the shapes."""
    config = folder.quantization
    said = [w.get("group_size") for w in weight_groups(config)] or [config.get("group_size")]
    sizes = {s for s in said if type(s) is int}
    mixed = {str(config.get("quant_algo")), str(config.get("format"))} & set(_MIXED)
    if len(sizes) != 1 or any(type(s) is not int for s in said) or mixed or config.get("dynamic"):
        return
    size = sizes.pop()
    for entry in entries:
        wanted = entry.shape[-1] if size == -1 and entry.fmt == "int4" else size
        if entry.group and entry.group != wanted:
            raise CheckpointError(
                f"{folder.path}: {entry.name} has block scales of {entry.group} values, but the "
                f"configuration says group_size {size}; copy both again, from one version"
            )


# ---- Values -------------------------------------------------------------------------------------


def load(entry: Entry, facts: Facts) -> Weight:
    """Return the weight of ``entry``.

    Raises:
        CheckpointError: its data are none of its format, or its file changed.
    """
    if isinstance(entry, Laid):
        made = tiles.undo(entry) if "role" in entry.facts else layout.undo(entry)
        return replace(made, gate_up=_gate_up(entry, facts))
    if entry.scheme == "plain":
        return Weight(entry.name, entry.fmt, entry.shape, data=read(entry.parts["data"]))
    if "lora_a" in entry.parts or "lora_b" in entry.parts:
        raise CheckpointError(
            f"{entry.name} has a low-rank part (SVDQuant), which is not supported; use a "
            "checkpoint in NVFP4 without it"
        )
    parts = {role: read(info) for role, info in entry.parts.items() if role in _KEPT}
    if entry.fmt == "fp8":
        found = fp8.values(entry, parts)
    elif entry.fmt == "int4":
        found = int4.values(entry, parts, facts)
    else:
        found = fp4.values(entry, parts)
    divisor = _global(entry, parts, "global_divisor")
    input_divisor = _global(entry, parts, "input_divisor")
    inputs = _global(entry, parts, "input_scale")
    return Weight(
        entry.name,
        entry.fmt,
        entry.shape,
        **found,
        global_scale=_global(entry, parts, "global_scale") if divisor is None else 1 / divisor,
        group_size=entry.group_in(entry.fmt),
        global_divisor=divisor,
        input_scale=inputs if input_divisor is None else 1 / input_divisor,
        pre_quant_scale=_smoothing(entry, parts.get("pre_quant_scale")),
        gate_up=None if entry.fmt == "fp8" else _gate_up(entry, facts),
    )


_KEPT = frozenset(
    ("packed", "block_scale", "global_scale", "global_divisor", "zero", "group_index")
    + ("input_scale", "input_divisor", "pre_quant_scale", "dense_shape")
)


def _smoothing(entry: Entry, scale: Tensor | None) -> Tensor | None:
    if scale is None:
        return None
    if scale.numel() != entry.shape[-1]:
        info = entry.parts["pre_quant_scale"]
        raise CheckpointError(
            f"{info.path}: {info.name} is {list(info.shape)}, but must have {entry.shape[-1]} "
            "values, one of each input; convert the checkpoint again"
        )
    return scale.reshape(-1)


def _global(entry: Entry, parts: dict[str, Tensor], role: str) -> Tensor | None:
    if role not in parts:
        return None
    value = parts[role].float()
    lowest = 0.0 if role.endswith("divisor") else -1.0
    bad = ~(value.isfinite() & (value > lowest) & (value >= 0))
    if bad.any():
        raise CheckpointError(
            f"{entry.parts[role].path}: {entry.parts[role].name} is {value[bad][0].item()}, but "
            f"must be finite and {'above' if lowest == 0 else 'not below'} zero; convert the "
            "checkpoint again"
        )
    return of_experts(value, entry.shape)


def _gate_up(entry: Entry, facts: Facts) -> str | None:
    leaf = entry.name.removesuffix(".weight").rpartition(".")[2]
    if "gate_up" not in leaf and leaf != "mlp1_weight":
        return None
    return "interleaved" if alternates(entry, facts) else "halves"
