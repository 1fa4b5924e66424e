"""Makers of small checkpoints: safetensors files byte by byte, weights by what a scheme stores.

Nothing here is shared with the package: every weight is made from codes and scales that are drawn,
stored as its scheme says, and its values are worked out in float64.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
DTYPES = {
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
STRAIGHT = list(range(8))
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which code of eight is in nibble i of a word."""


class F4(np.ndarray):
    """Bytes whose dtype in the file is F4: its shape counts codes."""


def header(tensors: dict[str, np.ndarray]) -> dict[str, dict]:
    """The header's entries of tensors that lie back to back."""
    entries, at = {}, 0
    for name, value in tensors.items():
        ends = [at, at + value.nbytes]
        dtype, shape = DTYPES[value.dtype.name], list(value.shape)
        if isinstance(value, F4):
            dtype, shape = "F4", [*shape[:-1], 2 * shape[-1]]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": ends}
        at = ends[1]
    return entries


def file_bytes(entries: dict | bytes, data: bytes, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def save(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    tensors = {name: np.asanyarray(value) for name, value in tensors.items()}
    data = b"".join(np.ascontiguousarray(v).tobytes() for v in tensors.values())
    path.write_bytes(file_bytes(header(tensors), data))
    return path


def folder(path: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> Path:
    path.mkdir(exist_ok=True)
    save(path / "model.safetensors", tensors)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def nibbles(codes: np.ndarray, axis: int = -1) -> np.ndarray:
    """Two codes a byte along ``axis``, the even one low."""
    codes = np.moveaxis(codes, axis, -1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).astype(np.uint8)


def words(codes: np.ndarray, order: list[int]) -> np.ndarray:
    """int32 [..., W]: nibble i of word w holds code 8 w + order[i]."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 8)
    made = sum(grouped[..., order[i]].astype(np.int64) << 4 * i for i in range(8))
    return made.astype(np.uint32).view(np.int32)


def nvfp4(rng: np.random.Generator, *shape: int):
    """Codes [..., N, K], E4M3 scales [..., N, K / 16], a global scale, values in float64."""
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scale = rng.integers(1, 0x7F, (*shape[:-1], shape[-1] // 16)).astype(np.uint8).view(E4M3)
    top = np.float32(rng.uniform(1e-5, 1e-3))
    effective = (scale.astype(np.float32) * top).astype(np.float64)
    return codes, scale, top, E2M1[codes] * np.repeat(effective, 16, -1)


def mxfp4(rng: np.random.Generator, *shape: int):
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    scale = rng.integers(100, 150, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return codes, scale, E2M1[codes] * np.repeat(2.0 ** (scale.astype(float) - 127), 32, -1)


def int4(rng: np.random.Generator, out: int, inner: int, group: int, index=None):
    """Codes [N, K], zeros and fp16 scales [N, G], values."""
    codes = rng.integers(0, 16, (out, inner)).astype(np.uint8)
    zero = rng.integers(1, 16, (out, inner // group)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, zero.shape).astype(np.float16)
    index = np.arange(inner) // group if index is None else index
    values = (codes.astype(float) - zero[:, index]) * scale.astype(float)[:, index]
    return codes, zero, scale, values


def fp4(rng: np.random.Generator, *shape: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """One expert's weight as ModelOpt stores it, and its values."""
    codes, scale, top, values = nvfp4(rng, *shape)
    parts = {"weight": nibbles(codes), "weight_scale": scale, "weight_scale_2": top}
    return parts, values


def same(found: torch.Tensor, wanted: np.ndarray) -> None:
    """Every value is what float64 gives, rounded to float32."""
    np.testing.assert_array_equal(found.numpy(), wanted.astype(np.float32))
