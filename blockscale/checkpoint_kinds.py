"""Which tensors of a checkpoint make up which weight, from names, dtypes and shapes alone.

Every scheme of storing 4-bit weights has a rule here, which finds the tensors of one weight and
checks that they fit each other; no data is read.  The configuration only decides what the
tensors cannot say, and is compared with them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoint_folder import Folder
from blockscale.errors import CheckpointError
from blockscale.safetensors_file import TensorInfo, shown

BLOCK = {"nvfp4": 16, "mxfp4": 32}
PLAIN = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_SCALE_BYTES = ("U8", "F8_E8M0")
_FLOATS = ("F16", "BF16", "F32")
_WORD = 8
"""Codes of one int32 of AWQ and GPTQ."""
_KV = re.compile(
    r".*[._](k|v|q|kv|qkv|prob)_(scale|zero_point)|.*\.output_scale|.*kv_cache.*(scale|zero_point)"
)
_KV_ENDS = ("_scale", "zero_point")
_COMPANIONS = (
    *("weight_scale", "weight_scale_2", "weight_global_scale", "weight_shape", "weight_zero"),
    *("weight_zero_point", "input_scale", "input_global_scale", "pre_quant_scale"),
    *("qzeros", "g_idx", "scales"),
)
_ORPHANS = tuple(f"{dot}{name}" for dot in "._" for name in _COMPANIONS)


@dataclass(frozen=True)
class Entry:
    """One weight: its format, the scheme that stores it, its tensors by role, its dense shape.

    ``shape`` ends in [N, K] of y = W x; ``group`` is how many values along K share a block scale.
    """

    name: str
    fmt: str
    scheme: str
    parts: dict[str, TensorInfo]
    shape: tuple[int, ...]
    group: int = 0
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors of the weight."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class Facts:
    """What decides how data are read, beyond names and shapes.

    ``gptq_v2``: zeros of GPTQ are stored as they are, and not less one.  ``interleaved``: the model
    is gpt-oss, whose gate and up rows alternate.
    """

    gptq_v2: bool = False
    interleaved: bool = False


def find_entries(folder: Folder) -> tuple[str, list[Entry], list[str]]:
    """Return the kind of the checkpoint, its weights in natural order, and notes for the user.

    Raises:
        CheckpointError: a tensor is missing or does not fit the others of its weight.
    """
    finder = _Finder(folder.tensors, folder.quantization)
    entries = [entry for info in folder.tensors.values() if (entry := finder.packed(info))]
    rest = [info for name, info in folder.tensors.items() if name not in finder.used]
    ignored = [i.name for i in rest if i.name.endswith(_KV_ENDS) and _KV.fullmatch(i.name)]
    skipped = set(ignored)
    for info in rest:
        if info.name not in skipped:
            entries.append(finder.plain(info))
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


def facts(folder: Folder) -> Facts:
    """Return what the configuration says that tensors do not."""
    form = folder.quantization.get("checkpoint_format")
    model = folder.configs.get("config.json", {}).get("model_type")
    return Facts(isinstance(form, str) and form.lower() == "gptq_v2", model == "gpt_oss")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 2 before layer 10."""
    parts = re.split(r"0*([0-9]+)", name)
    return [(len(p), p) if i % 2 else (-1, p) for i, p in enumerate(parts)]


class _Finder:
    """Finds the weight that a tensor leads, and remembers which tensors are taken."""

    def __init__(self, tensors: dict[str, TensorInfo], quantization: dict[str, Any]) -> None:
        self.tensors = tensors
        self.quantization = quantization
        self.used: set[str] = set()
        self.rules: dict[str, Callable[[TensorInfo, str], Entry | None]] = {
            ".weight_packed": self._compressed_tensors,
            ".qweight": self._int4_words,
            ".weight": self._modelopt,
            "_blocks": self._gpt_oss,
            ".blocks": self._gpt_oss,
        }

    def packed(self, info: TensorInfo) -> Entry | None:
        """Return the quantised weight whose codes are in ``info``, if any."""
        for suffix, rule in self.rules.items():
            if info.name.endswith(suffix):
                return rule(info, info.name[: -len(suffix)])
        if info.name + "_weight_scale" in self.tensors:
            return self._fp4(info.name, "modelopt", info, info.name + "_")
        return None

    def plain(self, info: TensorInfo) -> Entry:
        """Return a tensor that stands for itself."""
        if info.name.endswith(_ORPHANS):
            raise CheckpointError(
                f"{info.path}: tensor {shown(info.name)} belongs to a quantised weight, which is "
                "not there; copy all files of the checkpoint"
            )
        fmt = PLAIN.get(info.dtype, info.dtype.lower())
        return Entry(info.name, fmt, "plain", {"data": info}, info.shape)

    def _take(self, lead: TensorInfo, **names: str) -> dict[str, TensorInfo]:
        parts = {"packed": lead}
        parts.update({role: self.tensors[n] for role, n in names.items() if n in self.tensors})
        self.used.update(part.name for part in parts.values())
        return parts

    def _compressed_tensors(self, info: TensorInfo, base: str) -> Entry:
        if info.dtype == "I32":
            raise CheckpointError(
                f"{info.path}: tensor {shown(info.name)} is INT4 of compressed-tensors' "
                "pack-quantized, which is not supported; use nvfp4-pack-quantized, "
                "mxfp4-pack-quantized, AWQ or GPTQ"
            )
        return self._fp4(base + ".weight", "compressed-tensors", info, base + ".")

    def _modelopt(self, info: TensorInfo, base: str) -> Entry | None:
        scale = self.tensors.get(base + ".weight_scale")
        if info.dtype.startswith("F8_E"):
            return self._fp8(info, base, scale)
        if info.dtype != "U8":
            return None
        if base + ".weight_zero" in self.tensors:
            return self._int4_bytes(info, base)
        return self._fp4(info.name, "modelopt", info, base + ".")

    def _fp4(self, name: str, scheme: str, info: TensorInfo, base: str) -> Entry:
        parts = self._take(
            info,
            block_scale=base + "weight_scale",
            global_scale=base + "weight_scale_2",
            global_divisor=base + "weight_global_scale",
            input_scale=base + "input_scale",
            input_divisor=base + "input_global_scale",
            pre_quant_scale=base + "pre_quant_scale",
            lora_a=base + "svdquant_lora_a",
            lora_b=base + "svdquant_lora_b",
        )
        scale = _need(info, parts, "block_scale", base + "weight_scale")
        _dtype(info, ("U8",))
        if scale.dtype == "F8_E4M3":
            fmt, role = "nvfp4", "global_scale"
            if scheme == "compressed-tensors":
                role = "global_divisor"
            suffix = "weight_scale_2" if role == "global_scale" else "weight_global_scale"
            _need(info, parts, role, base + suffix)
        else:
            fmt = "mxfp4"
            _dtype(scale, _SCALE_BYTES, " or F8_E4M3")
            if {"global_scale", "global_divisor"} & parts.keys():
                raise CheckpointError(
                    f"{info.path}: {shown(info.name)} has E8M0 block scales and a global scale, "
                    "but MXFP4 has none; convert it again"
                )
        shape, transposed = _fp4_shape(info, scale, BLOCK[fmt])
        experts = shape[0] if len(shape) == 3 else 1
        for role in ("global_scale", "global_divisor", "input_scale", "input_divisor"):
            if role in parts:
                _per_expert(parts[role], experts)
        return Entry(name, fmt, scheme, parts, shape, BLOCK[fmt], transposed)

    def _fp8(self, info: TensorInfo, base: str, scale: TensorInfo | None) -> Entry | None:
        if base + ".weight_scale_inv" in self.tensors:
            scale = self.tensors[base + ".weight_scale_inv"]
        if scale is None:
            return None
        if scale.dtype not in _FLOATS or scale.shape not in ((), (1,), (*info.shape[:1], 1)):
            raise CheckpointError(
                f"{scale.path}: {shown(scale.name)} is {scale.dtype} {list(scale.shape)}, but the "
                "scale of an FP8 weight must be one float of the tensor or of each row; FP8 in "
                "blocks is not supported, use the BF16 checkpoint"
            )
        names = {"global_scale": scale.name, "input_scale": base + ".input_scale"}
        return Entry(info.name, "fp8", "modelopt", self._take(info, **names), info.shape)

    def _gpt_oss(self, info: TensorInfo, base: str) -> Entry | None:
        other = base + info.name[len(base)] + "scales"
        if info.dtype != "U8":
            return None
        parts = self._take(info, block_scale=other)
        scale = _need(info, parts, "block_scale", other)
        _dtype(scale, _SCALE_BYTES)
        half = BLOCK["mxfp4"] // 2
        if len(info.shape) < 3 or info.shape[-1] != half or scale.shape != info.shape[:-1]:
            raise CheckpointError(
                f"{info.path}: {shown(info.name)} is {list(info.shape)} and its scales are "
                f"{list(scale.shape)}, but must be [..., N, K / 32, {half}] and [..., N, K / 32]; "
                "copy it again"
            )
        shape = (*info.shape[:-2], info.shape[-2] * BLOCK["mxfp4"])
        return Entry(base, "mxfp4", "gpt-oss", parts, shape, BLOCK["mxfp4"])

    def _int4_words(self, info: TensorInfo, base: str) -> Entry:
        names = {"block_scale": "scales", "zero": "qzeros", "group_index": "g_idx"}
        parts = self._take(info, **{role: f"{base}.{n}" for role, n in names.items()})
        scale = _need(info, parts, "block_scale", base + ".scales")
        zero = _need(info, parts, "zero", base + ".qzeros")
        _dtype(info, ("I32",))
        _dtype(zero, ("I32",))
        _dtype(scale, _FLOATS)
        _refuse_other_int4(info, self.quantization)
        two = len(info.shape) == len(scale.shape) == 2
        rows, cols = info.shape if two else (0, 0)
        groups, out = scale.shape if two else (0, 0)
        awq = two and cols * _WORD == out
        inner = rows if awq else rows * _WORD
        fits = two and (awq or cols == out) and groups > 0 and inner % groups == 0
        if not fits or zero.shape != (groups, -(-out // _WORD)) or inner % 2:
            raise CheckpointError(
                f"{info.path}: {shown(info.name)} is {list(info.shape)} with scales "
                f"{list(scale.shape)} and zeros {list(zero.shape)}, but must be [K, N / 8] (AWQ) "
                "or [K / 8, N] (GPTQ) with [K / group, N] and [K / group, N / 8]; copy it again"
            )
        index = parts.get("group_index")
        if index is not None and (index.shape != (inner,) or index.dtype not in ("I32", "I64")):
            raise CheckpointError(
                f"{index.path}: {shown(index.name)} is {index.dtype} {list(index.shape)}, but must "
                f"be I32 [{inner}], one group of each input; copy it again"
            )
        shape = (out, inner)
        scheme = "awq" if awq else "gptq"
        return Entry(base + ".weight", "int4", scheme, parts, shape, inner // groups)

    def _int4_bytes(self, info: TensorInfo, base: str) -> Entry:
        """Return INT4 as `blockscale convert` writes it."""
        parts = self._take(
            info,
            block_scale=base + ".weight_scale",
            zero=base + ".weight_zero",
            group_index=base + ".weight_group_index",
        )
        scale = _need(info, parts, "block_scale", base + ".weight_scale")
        zero = parts["zero"]
        _dtype(scale, _FLOATS)
        _dtype(zero, ("U8",))
        *lead, half = info.shape or (0,)
        groups = scale.shape[-1] if scale.shape else 0
        index = parts.get("group_index")
        bad_index = index is not None and (index.shape != (2 * half,) or index.dtype != "I32")
        if (*lead, groups) != scale.shape or zero.shape != scale.shape or bad_index:
            raise CheckpointError(
                f"{info.path}: {shown(info.name)} is {list(info.shape)} with scales "
                f"{list(scale.shape)} and zeros {list(zero.shape)}, but must be [..., N, K / 2] "
                "with [..., N, K / group] twice; copy it again"
            )
        if not groups or 2 * half % groups:
            raise CheckpointError(
                f"{info.path}: {shown(info.name)} has K={2 * half} and {groups} groups, but K must "
                "be a multiple of the groups; copy it again"
            )
        shape = (*lead, 2 * half)
        return Entry(base + ".weight", "int4", "blockscale", parts, shape, 2 * half // groups)


def _need(lead: TensorInfo, parts: dict[str, TensorInfo], role: str, name: str) -> TensorInfo:
    if role not in parts:
        raise CheckpointError(
            f"{lead.path}: {shown(lead.name)} is a {lead.dtype} weight without {shown(name)}, so "
            "it has no values; copy all files of the checkpoint"
        )
    return parts[role]


def _dtype(info: TensorInfo, allowed: tuple[str, ...], more: str = "") -> None:
    if info.dtype not in allowed:
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} has dtype {info.dtype}, but must have "
            f"{' or '.join(allowed)}{more}; convert the checkpoint again"
        )


def _fp4_shape(info: TensorInfo, scale: TensorInfo, block: int) -> tuple[tuple[int, ...], bool]:
    """Return the dense shape, and whether K is the second of three dimensions and not the last."""
    half, p, s = block // 2, info.shape, scale.shape
    if len(p) in (2, 3) and s[:-1] == p[:-1] and p[-1] == half * s[-1]:
        return (*p[:-1], 2 * p[-1]), False
    if len(p) == len(s) == 3 and (s[0], s[2]) == (p[0], p[2]) and p[1] == half * s[1]:
        return (p[0], p[2], 2 * p[1]), True
    raise CheckpointError(
        f"{info.path}: {shown(info.name)} is {list(p)} and its block scales are {list(s)}, but "
        f"must be [N, K / 2] and [N, K / {block}], or these of each expert with K last or second; "
        "convert the checkpoint again"
    )


def _per_expert(info: TensorInfo, experts: int) -> None:
    ones = [d for d in info.shape if d != 1]
    if info.dtype != "F32" or ones not in ([], [experts]):
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} is {info.dtype} {list(info.shape)}, but must be one "
            f"F32{f' or {experts}, one of each expert' if experts > 1 else ''}; convert the "
            "checkpoint again"
        )


def _refuse_other_int4(info: TensorInfo, config: dict[str, Any]) -> None:
    bits, version = config.get("bits", 4), str(config.get("version", "gemm")).lower()
    form = str(config.get("checkpoint_format", "gptq")).lower()
    if bits != 4 or (config.get("quant_method") == "awq" and version != "gemm"):
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} has bits={shown(bits)}, version={shown(version)}, "
            "but only 4 bits in AWQ's version gemm or GPTQ's layout are read; export it so"
        )
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"{info.path}: {shown(info.name)} is stored for {shown(form)}, but only "
            "checkpoint_format gptq and gptq_v2 are read; export it so"
        )


def _kind(entries: list[Entry], folder: Folder) -> tuple[str, list[str]]:
    counts = Counter((e.scheme, e.fmt) for e in entries if e.scheme != "plain")
    config, notes = folder.quantization, list(folder.notes)
    method = config.get("quant_method")
    if not counts:
        if method:
            notes.append(f"the configuration says {shown(method)}, but no weight is quantised")
        return "plain", notes
    scheme, fmt = max(counts, key=lambda key: counts[key])
    kind = f"{scheme}-{fmt}" if len(counts) == 1 else f"{scheme}-mixed"
    found = ", ".join(f"{n} x {s} {f}" for (s, f), n in sorted(counts.items()))
    notes.append(found + " by names and dtypes of tensors")
    said = {"mxfp4": "gpt-oss"}.get(str(method), str(method or ""))
    if said and said not in {s for s, _ in counts}:
        notes.append(f"the configuration says {shown(method)}; the tensors count")
    algo = config.get("quant_algo")
    if algo:
        notes.append(f"quant_algo {shown(algo)}")
    fp4 = [e for e in entries if e.fmt == "nvfp4"]
    if fp4 and not any({"input_scale", "input_divisor"} & e.parts.keys() for e in fp4):
        notes.append("no input scales: weights only (W4A16), or activations scaled at run time")
    return kind, notes


def _check_groups(entries: list[Entry], folder: Folder) -> None:
    """Compare the one group size of the configuration, if it has one, with that of the shapes."""
    config = folder.quantization
    groups = config.get("config_groups")
    values = list(groups.values()) if isinstance(groups, dict) else []
    inner = [v["weights"] for v in values if isinstance(v, dict)]
    said = [w.get("group_size") for w in inner if isinstance(w, dict)] or [config.get("group_size")]
    sizes = {s for s in said if type(s) is int}
    if (
        len(sizes) != 1
        or any(type(s) is not int for s in said)
        or config.get("quant_algo") == "MIXED_PRECISION"
    ):
        return
    size = sizes.pop()
    for entry in entries:
        wanted = entry.shape[-1] if size == -1 and entry.fmt == "int4" else size
        if entry.group and entry.group != wanted:
            raise CheckpointError(
                f"{folder.path}: {entry.name} has block scales of {entry.group} values, but the "
                f"configuration says group_size {size}; copy both again, from one version"
            )
