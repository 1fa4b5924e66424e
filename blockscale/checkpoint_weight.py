"""One weight of a checkpoint, whatever stored it: codes, block scales, global scale, zeros.

Every field has one meaning (see `Weight`); `load` brings what each scheme stores to it.  Codes and
scales are never rounded on the way: bytes are moved, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockscale.errors import CheckpointError
from blockscale.safetensors_file import read

if TYPE_CHECKING:
    from blockscale.checkpoint_kinds import Entry, Facts

Tensor = torch.Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS, E8M0_NAN = 127, 255
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word of AWQ holds column ``_AWQ_ORDER[i]`` of its eight."""
_CHUNK = 1 << 21
"""Values that one step of `Weight.dequantize` decodes: 8 MiB as float32."""
_AWQ_COLUMNS = 512


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight W of y = W x, with K along the last dimension.

    Attributes:
        name: as in the dense model, e.g. "model.layers.0.mlp.down_proj.weight".
        fmt: "nvfp4", "mxfp4", "int4", "fp8", or a dtype: "bf16", "f16", "f32", else e.g. "i64".
        shape: [..., N, K], the dense shape; leading: experts.
        data: the tensor itself where it is neither 4 bits nor a block format, else None.
        packed: uint8 [..., N, K / 2], even k in the low nibble: codes of E2M1, or 0 to 15 (int4).
        block_scale: [..., N, K / group_size], linear: float8_e4m3fn (nvfp4), uint8 with the bytes
            of E8M0 (mxfp4), or a float type (int4).  It is multiplied.
        global_scale: float32 [] or [E], multiplied; None: 1.
        zero: int4: uint8 like block_scale: the value is (code - zero) * block_scale.
        group_size: values along K that share a block scale; 0: none do.
        global_divisor: what is stored where a checkpoint divides (compressed-tensors); then
            global_scale is its reciprocal, rounded, and `dequantize` divides.
        group_index: int4 in act-order: int32 [K], the group of each k; None: k // group_size.
        input_scale: float32, of activations, multiplied; None: not given.
        pre_quant_scale: [K], what activations are multiplied by before they meet this weight.
        gate_up: rows are "interleaved" (gate even, up odd) or "halves" (gate first); None: neither.
    """

    name: str
    fmt: str
    shape: tuple[int, ...]
    data: Tensor | None = None
    packed: Tensor | None = None
    block_scale: Tensor | None = None
    global_scale: Tensor | None = None
    zero: Tensor | None = None
    group_size: int = 0
    global_divisor: Tensor | None = None
    group_index: Tensor | None = None
    input_scale: Tensor | None = None
    pre_quant_scale: Tensor | None = None
    gate_up: str | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [..., N, K], computed in float32 and rounded to ``dtype`` once."""
        if self.packed is None:
            assert self.data is not None
            if self.global_scale is None:
                return self.data.to(dtype)
            missing = self.data.dim() - self.global_scale.dim()
            scale = self.global_scale.reshape(*self.global_scale.shape, *[1] * missing)
            return (self.data.float() * scale).to(dtype)
        out = torch.empty(self.shape, dtype=dtype)
        rows = out.view(-1, self.shape[-1])
        step = max(1, _CHUNK // max(1, self.shape[-1]))
        for start in range(0, len(rows), step):
            rows[start : start + step] = self.rows(start, start + step)
        return out

    def rows(self, start: int, stop: int) -> Tensor:
        """Return float32 values of some rows, counted through all experts."""
        assert self.packed is not None
        packed = self.packed.reshape(-1, self.packed.shape[-1])[start:stop]
        codes = _decoded(packed, self.fmt)
        scale = self.row_scales(start, stop)
        if self.group_index is not None:
            assert self.zero is not None
            index = self.group_index.long()
            zero = self.zero.reshape(-1, self.zero.shape[-1])[start:stop].float()
            return (codes - zero[:, index]) * scale[:, index]
        grouped = codes.view(*scale.shape, self.group_size)
        if self.zero is not None:
            zero = self.zero.reshape(-1, self.zero.shape[-1])[start:stop].float()
            grouped = grouped - zero[..., None]
        return grouped.mul_(scale[..., None]).view(codes.shape)

    def row_scales(self, start: int, stop: int) -> Tensor:
        """Return float32 block scales of some rows, with the global scale in them."""
        assert self.block_scale is not None
        raw = self.block_scale.reshape(-1, self.block_scale.shape[-1])[start:stop]
        scale = _e8m0(raw) if self.fmt == "mxfp4" else raw.float()
        top = self.global_divisor if self.global_divisor is not None else self.global_scale
        if top is None:
            return scale
        if top.numel() > 1:
            rows = prod(self.shape[1:-1])
            top = top[torch.arange(start, start + len(raw)) // rows][:, None]
        return scale / top if self.global_divisor is not None else scale * top


def _pairs(values: list[float]) -> np.ndarray:
    """Return for each byte the float32 of its low and its high nibble, as one uint64."""
    table = np.array(values, dtype=np.float32)
    byte = np.arange(256)
    return np.stack([table[byte & 15], table[byte >> 4]], axis=1).view(np.uint64)[:, 0]


_TABLES = {
    **dict.fromkeys(("nvfp4", "mxfp4"), _pairs([*E2M1, *(-v for v in E2M1)])),
    "int4": _pairs([float(v) for v in range(16)]),
}
_POWERS = torch.tensor(
    [2.0 ** (b - E8M0_BIAS) for b in range(E8M0_NAN)] + [float("nan")], dtype=torch.float32
)


def _decoded(packed: Tensor, fmt: str) -> Tensor:
    values = np.take(_TABLES[fmt], packed.numpy()).view(np.float32)
    return torch.from_numpy(values)


def _e8m0(raw: Tensor) -> Tensor:
    return _POWERS[raw.int()]


def load(entry: Entry, facts: Facts) -> Weight:
    """Return the weight of ``entry``.

    Raises:
        CheckpointError: its data are none of its format, or its file changed.
    """
    if entry.scheme == "plain":
        return Weight(entry.name, entry.fmt, entry.shape, data=read(entry.parts["data"]))
    if "lora_a" in entry.parts or "lora_b" in entry.parts:
        raise CheckpointError(
            f"{entry.name} has a low-rank part (SVDQuant), which is not supported; use a "
            "checkpoint in NVFP4 without it"
        )
    parts = {role: read(info) for role, info in entry.parts.items() if role in _KEPT}
    if entry.fmt == "fp8":
        scale = _global(entry, parts, "global_scale")
        return Weight(entry.name, "fp8", entry.shape, data=parts["packed"], global_scale=scale)
    if entry.scheme in ("awq", "gptq"):
        return _int4_words(entry, parts, facts.gptq_v2)
    if entry.scheme == "gpt-oss":
        parts["packed"] = parts["packed"].flatten(-2)
    if entry.transposed:
        for role in ("packed", "block_scale"):
            parts[role] = _transposed(parts[role])
    divisor = _global(entry, parts, "global_divisor")
    inputs = _global(entry, parts, "input_scale")
    input_divisor = _global(entry, parts, "input_divisor")
    return Weight(
        entry.name,
        entry.fmt,
        entry.shape,
        packed=parts["packed"],
        block_scale=parts["block_scale"],
        global_scale=_global(entry, parts, "global_scale") if divisor is None else 1 / divisor,
        zero=parts.get("zero"),
        group_size=entry.group,
        global_divisor=divisor,
        group_index=_group_index(entry, parts.get("group_index")),
        input_scale=inputs if input_divisor is None else 1 / input_divisor,
        pre_quant_scale=parts.get("pre_quant_scale"),
        gate_up=_gate_up(entry, facts),
    )


_KEPT = frozenset(
    ("packed", "block_scale", "global_scale", "global_divisor", "zero", "group_index")
    + ("input_scale", "input_divisor", "pre_quant_scale")
)


def _global(entry: Entry, parts: dict[str, Tensor], role: str) -> Tensor | None:
    if role not in parts:
        return None
    value = parts[role].float().flatten()
    lowest = 0.0 if role.endswith("divisor") else -1.0
    bad = ~(value.isfinite() & (value > lowest) & (value >= 0))
    if bad.any():
        raise CheckpointError(
            f"{entry.parts[role].path}: {entry.parts[role].name} is {value[bad][0].item()}, but "
            f"must be finite and {'above' if lowest == 0 else 'not below'} zero; convert the "
            "checkpoint again"
        )
    return value if value.numel() > 1 else value[0]


def _gate_up(entry: Entry, facts: Facts) -> str | None:
    leaf = entry.name.removesuffix(".weight").rpartition(".")[2]
    if "gate_up" not in leaf and leaf != "mlp1_weight":
        return None
    oss = entry.scheme == "gpt-oss" or leaf == "mlp1_weight" or facts.interleaved
    return "interleaved" if oss else "halves"


def _transposed(value: Tensor) -> Tensor:
    """Return [E, A, B] as [E, B, A]; a byte keeps its two codes, neighbours along K."""
    return value.view(torch.uint8).transpose(1, 2).contiguous().view(value.dtype)


def _group_index(entry: Entry, index: Tensor | None) -> Tensor | None:
    if index is None:
        return None
    inner, index = entry.shape[-1], index.int()
    groups = inner // entry.group
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"{entry.parts['group_index'].path}: {entry.parts['group_index'].name} has values from "
            f"{int(index.min())} to {int(index.max())}, but there are {groups} groups; copy the "
            "checkpoint again"
        )
    linear = torch.arange(inner, dtype=torch.int32) // entry.group
    return None if torch.equal(index, linear) else index


def _int4_words(entry: Entry, parts: dict[str, Tensor], gptq_v2: bool) -> Weight:
    words, zeros = parts["packed"], parts["zero"]
    out = entry.shape[0]
    if entry.scheme == "awq":
        packed = _awq_codes(words)
        zero = _nibbles(zeros)[..., list(np.argsort(_AWQ_ORDER))]
    else:  # little endian: byte j of a word holds the rows 2 j and 2 j + 1
        packed = words.T.contiguous().view(torch.uint8)
        zero = _nibbles(zeros) + (0 if gptq_v2 else 1)
    zero = zero.flatten(-2)[:, :out].T.contiguous()
    return Weight(
        entry.name,
        "int4",
        entry.shape,
        packed=packed,
        block_scale=parts["block_scale"].T.contiguous(),
        zero=zero,
        group_size=entry.group,
        group_index=_group_index(entry, parts.get("group_index")),
    )


def _nibbles(words: Tensor) -> Tensor:
    """Return uint8 [..., W, 8], the nibbles of int32 [..., W] from the lowest on."""
    raw = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack([raw & 15, raw >> 4], -1).flatten(-2)


def _awq_codes(words: Tensor) -> Tensor:
    """Return [N, K / 2] of AWQ's [K, N / 8], a strip of columns at a time."""
    inner, count = words.shape
    packed = torch.empty((count * 8, inner // 2), dtype=torch.uint8)
    for start in range(0, count, _AWQ_COLUMNS // 8):
        strip = _nibbles(words[:, start : start + _AWQ_COLUMNS // 8])
        codes = strip[..., list(np.argsort(_AWQ_ORDER))].flatten(1).T.contiguous()
        packed[start * 8 : start * 8 + len(codes)] = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed
