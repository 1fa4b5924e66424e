"""One weight of a checkpoint, whatever stored it: codes, block scales, global scale, zeros.

Every field has one meaning (see `Weight`); `schemes.kinds.load` brings what each scheme stores to
it.  Codes and scales are never rounded on the way: bytes are moved, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from blockscale.base.formats import E2M1, QUANTIZED, UE8M0
from blockscale.base.sizes import ceil_div

Tensor = torch.Tensor

E8M0_BIAS, E8M0_NAN = 127, 255
ROWS = ("data", "packed", "block_scale", "zero")
"""Fields of a `Weight` whose tensors have its rows."""
_CHUNK = 1 << 21
"""Values that one step of `Weight.dequantize` decodes: 8 MiB as float32."""


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
            fp8: [..., rows / block, columns / block], see ``block``.
        global_scale: float32 [] or [E], multiplied; [E, 2] of gate and up in one weight, each half
            of the rows; None: 1.
        zero: int4: uint8 like block_scale, from 0 to 16: the value is (code - zero) * block_scale.
        group_size: values along K that share a block scale; 0: none do.
        global_divisor: what is stored where a checkpoint divides (compressed-tensors); then
            global_scale is its reciprocal, rounded, and `dequantize` divides.
        group_index: int4 in act-order: int32 [K], the group of each k; [E, K] of experts that
            differ; None: k // group_size.
        input_scale: float32, of activations, multiplied; None: not given.
        pre_quant_scale: [K], what activations are multiplied by before they meet this weight;
            [E, K] of experts that differ.
        gate_up: rows are "interleaved" (gate even, up odd) or "halves" (gate first); None: neither.
        block: fp8: how many rows and columns share a block scale; None: there are none.
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
    block: tuple[int, int] | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [..., N, K], computed in float32 and rounded to ``dtype`` once."""
        if self.packed is None and not self.scaled:
            assert self.data is not None
            return self.data.to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device="cpu")
        cols = self.shape[-1] if self.shape else 1
        rows = out.view(-1, cols)
        step = max(1, _CHUNK // max(1, cols))
        for start in range(0, len(rows), step):
            rows[start : start + step] = self.rows(start, start + step)
        return out

    def rows(self, start: int, stop: int) -> Tensor:
        """Return float32 values of some rows, counted through all experts."""
        if self.packed is None:
            assert self.data is not None
            flat = self.data.reshape(-1, self.shape[-1] if self.shape else 1)
            return flat[start:stop].float() * self._factors(start, stop)
        packed = self.packed.reshape(-1, self.packed.shape[-1])[start:stop]
        codes = _decoded(packed, self.fmt)
        scale = self.row_scales(start, stop)
        if self.group_index is not None:
            assert self.zero is not None
            index = self.group_index.long()
            if index.dim() == 2:  # of each expert
                rows = torch.arange(start, start + len(codes), device="cpu")
                index = index[rows // self.shape[-2]]
            index = index.expand(codes.shape)
            zero = self.zero.reshape(-1, self.zero.shape[-1])[start:stop].float()
            return (codes - zero.gather(1, index)) * scale.gather(1, index)
        grouped = codes.view(*scale.shape, self.group_size)
        if self.zero is not None:
            zero = self.zero.reshape(-1, self.zero.shape[-1])[start:stop].float()
            grouped = grouped - zero[..., None]
        return grouped.mul_(scale[..., None]).view(codes.shape)

    def moved(self, move: Callable[[Tensor], Tensor], **changes: Any) -> Weight:
        """Return the weight with ``move`` done to all that has its rows, and with ``changes``."""
        found = {name: getattr(self, name) for name in ROWS}
        changes |= {name: move(value) for name, value in found.items() if value is not None}
        return replace(self, **changes)

    @property
    def scaled(self) -> bool:
        """Return whether values are anything but the data themselves."""
        return self.block_scale is not None or self.global_scale is not None

    def row_scales(self, start: int, stop: int) -> Tensor:
        """Return float32 block scales of some rows, with the global scale in them."""
        assert self.block_scale is not None
        raw = self.block_scale.reshape(-1, self.block_scale.shape[-1])[start:stop]
        scale = _ue8m0(raw) if self.fmt == "mxfp4" else raw.float()
        if self.global_divisor is not None:
            return scale / self._top(self.global_divisor, start, stop)
        if self.global_scale is not None:
            return scale * self._top(self.global_scale, start, stop)
        return scale

    def _top(self, top: Tensor, start: int, stop: int) -> Tensor:
        """Return the global scale of each row, [rows, 1] or []."""
        if top.numel() == 1:
            return top.reshape(())
        total = prod(self.shape[:-1])
        rows = torch.arange(start, min(stop, total), device="cpu")
        if self.gate_up == "interleaved" and top.dim() == 2:
            index = rows // self.shape[-2] * 2 + rows % 2
        else:
            index = rows // (total // top.numel())
        return top.reshape(-1)[index][:, None]

    def _factors(self, start: int, stop: int) -> Tensor:
        """Return what data of FP8 are multiplied by, [rows, K] or what broadcasts to it."""
        factor = torch.ones((), dtype=torch.float32, device="cpu")
        if self.global_scale is not None:
            factor = self._top(self.global_scale, start, stop)
        if self.block_scale is None or self.block is None:
            return factor
        high, wide = self.block
        count, cols = self.shape[-2:]
        rows = torch.arange(start, min(stop, prod(self.shape[:-1])), device="cpu")
        blocks = ceil_div(count, high)
        index = rows // count * blocks + rows % count // high
        scale = self.block_scale.reshape(-1, self.block_scale.shape[-1])[index]
        floats = _ue8m0(scale) if scale.dtype == torch.uint8 else scale.float()
        return factor * floats.repeat_interleave(wide, 1)[:, :cols]


def _pairs(values: list[float]) -> np.ndarray:
    """Return for each byte the float32 of its low and its high nibble, as one uint64."""
    table = np.array(values, dtype=np.float32)
    byte = np.arange(256)
    return np.stack([table[byte & 15], table[byte >> 4]], axis=1).view(np.uint64)[:, 0]


_TABLES = {
    **dict.fromkeys(QUANTIZED, _pairs([*E2M1.values, *(-v for v in E2M1.values)])),
    "int4": _pairs([float(v) for v in range(16)]),
}
_POWERS = torch.tensor(UE8M0.values, dtype=torch.float32, device="cpu")


def _decoded(packed: Tensor, fmt: str) -> Tensor:
    values = np.take(_TABLES[fmt], packed.numpy()).view(np.float32)
    return torch.from_numpy(values)


def _ue8m0(raw: Tensor) -> Tensor:
    return _POWERS[raw.int()]
