"""Run a linear layer's kernel in the emulator on random operands, and judge it against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import tvm

from blockscale import emulator
from blockscale.building.space import new_schedule
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit, tensor_maps
from blockscale.lower.warp.kernel import Kernel
from blockscale.ops.linear.weights import prepare_linear_weights
from blockscale.schedules.gemm import linear as schedules
from blockscale.specs import Linear
from blockscale.specs.plans.linear import LinearTile
from blockscale.tir.gemm.linear_tiles import linear_tiles
from tests.kit import moe_harness
from tests.kit.moe_harness import BYTE_ORDER, K_ORDER, UNWRITTEN, bits, values
from tests.reference import core as ref
from tests.reference import moe

GUARD_ROWS = 2


@cache
def kernel(spec: Linear, tile: LinearTile, stages: int) -> Kernel:
    """Return the kernel that is derived from the schedule."""
    sch = new_schedule(tvm.IRModule({"main": linear_tiles(spec, by_bytes=tile.by_bytes)}))
    schedules.decided(sch, spec, tile, stages)
    return derive(sch.mod["main"])


@cache
def ptx(spec: Linear, tile: LinearTile, stages: int, arch: str = "") -> str:
    """Return the PTX of a kernel; without ``arch`` for one that has what the tile needs."""
    arch = arch or ("sm_100a" if tile.tensor else "sm_90a")
    text = emit(kernel(spec, tile, stages), "linear")
    return compile_cuda_source(text, arch, ptx=True).image.decode()


@dataclass(frozen=True)
class Weight:
    """A weight as checkpoints have it, and its values [n, k]."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    value: np.ndarray


def weight(spec: Linear, seed: int) -> Weight:
    """Return a random weight: w2 of a layer of one expert."""
    scales = "bfloat16" if spec.layout == "tiles64e" else spec.dtype
    layer = moe.random_layer(
        1, -(-spec.n // 128) * 128, spec.k, spec.fmt, group=spec.group, zeros=spec.zero,
        activation="relu2", scale_dtype=scales, seed=seed,
    )  # fmt: skip
    layer.rounded = moe_harness.is_rounded(spec.fmt, spec.layout)
    overall = 1.0 if layer.w2_global_scale is None else float(layer.w2_global_scale[0])
    zero = None if layer.w2_zero is None else layer.w2_zero[0, : spec.n]
    value = layer.dense()[1][0, : spec.n] / overall
    return Weight(layer.w2[0, : spec.n], layer.w2_scale[0, : spec.n], zero, value)


def prepared(spec: Linear, made: Weight, overall: np.ndarray) -> Any:
    """Return the weight in the spec's layout."""
    zero = None if made.zero is None else torch.from_numpy(np.ascontiguousarray(made.zero))
    return prepare_linear_weights(
        torch.from_numpy(np.ascontiguousarray(made.codes)),
        torch.from_numpy(np.ascontiguousarray(made.scale)),
        fmt=spec.fmt, global_scale=torch.from_numpy(overall.astype(np.float32)), zero=zero,
        gated=spec.gated, dtype=getattr(torch, spec.dtype), layout=spec.layout,
        group_size=spec.group if spec.fmt == "int4" else None,
        **({"rounded": True, "act_fmt": "fp8"}
           if moe_harness.is_rounded(spec.fmt, spec.layout) else {}),
    )  # fmt: skip


def rows_of(spec: Linear, by_bytes: bool, x: np.ndarray) -> tuple[np.ndarray, Any, np.ndarray]:
    """Return rows as a kernel reads them, their scales (None: it takes none), and their values.

    Of "fp8" layers: E4M3 codes as bytes or 16-bit numbers, in the order of the weight's layout.
    """
    if not spec.act_fmt:
        return bits(x, spec.dtype), None, x.astype(np.float64)
    most = np.abs(x.astype(np.float32)).max(1, keepdims=True)
    scale = most / np.float32(448)
    ratio = np.divide(x.astype(np.float32), scale, out=np.zeros_like(x, np.float32), where=most > 0)
    byte = ref.e4m3_encode(ratio)
    code, value = ref.e4m3_decode(byte), moe.qdq(x, "fp8")
    if spec.layout == "tiles64":
        return bits(code, spec.dtype), scale[:, 0], value
    stored = byte if by_bytes else bits(code, "bfloat16")
    padded = np.zeros((len(x), spec.padded_k), stored.dtype)
    padded[:, : spec.k] = stored
    order = list(BYTE_ORDER if by_bytes else K_ORDER)
    blocks = padded.reshape(len(x), spec.padded_k // 64, 64)
    return blocks[:, :, order].reshape(padded.shape), scale[:, 0], value


ACT = {
    "none": lambda v: v,
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(0.7978845608028654 * (v + 0.044715 * v**3))),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
}


@dataclass
class Outcome(moe_harness.Outcome):
    """What a kernel wrote and should have written, float64 [rows, columns], and its report."""

    sums: np.ndarray
    """x @ w.T * global_scale; with `bias` and `residual`, of a layer that is not gated."""
    bias: Any
    residual: Any


def run(
    spec: Linear,
    tile: LinearTile,
    m: int,
    *,
    stages: int = 3,
    bias: bool = True,
    ctas: int = 2,
    seed: int = 0,
    arch: str = "",
    text: str | None = None,
) -> Outcome:
    """Run a random layer; ``ctas``: clusters of the grid, where tiles are taken in turn."""
    made, rng = weight(spec, seed), np.random.default_rng(seed)
    of = kernel(spec, tile, stages)
    x = moe.random_hidden(m, spec.k, spec.dtype, seed)
    overall = np.array([0.75, 1.25][: 1 + spec.gated])
    if spec.by_row:
        overall = rng.uniform(0.5, 2, spec.n).astype(np.float32).astype(np.float64)
    weights = prepared(spec, made, overall)
    codes, scale, factor = (
        value.contiguous()
        .view(torch.uint8 if value.dtype != torch.float32 else value.dtype)
        .numpy()
        for value in (weights.packed, weights.block_scale, weights.global_scale)
    )
    shift = rng.normal(size=spec.n).astype(np.float32) if bias else None
    other = moe.random_hidden(m, spec.cols, spec.dtype, seed + 1) if spec.residual else None
    sixteen = spec.out_dtype != "float32"
    y = np.full((m + GUARD_ROWS, spec.cols), UNWRITTEN, np.uint16 if sixteen else np.uint32)
    row_tiles = -(-m // of.rows_tile)
    grid = of.col_tiles * row_tiles if of.ctas > 1 else ctas
    stored, row_scale, value = rows_of(spec, tile.by_bytes, x)
    of_x: Any = stored
    for each in tensor_maps(of):
        of_x = emulator.TensorMap(
            stored,
            dtype=each.dtype,
            global_dim=each.sizes(m, 0),
            global_strides_bytes=each.strides,
            box_dim=each.box,
            swizzle=f"{each.swizzle}B",
        )
    report = emulator.launch(
        text or ptx(spec, tile, stages, arch), entry="linear", grid=grid * of.cluster,
        cluster=of.cluster, block=of.threads, dynamic_smem=of.shared,
        args=[of_x, *(() if row_scale is None else (row_scale,)), codes, scale, factor, shift,
              None if other is None else bits(other, spec.dtype), y, np.int32(m)],
        seed=seed,
    )  # fmt: skip
    sums = value @ made.value.T
    halves = np.split(sums, 1 + spec.gated, axis=1)
    shifts = np.split(np.zeros(spec.n) if shift is None else shift, 1 + spec.gated)
    factors = [overall] if spec.by_row else overall
    parts = [h * g + b for h, g, b in zip(halves, factors, shifts, strict=True)]
    want = ACT[spec.activation](parts[0])
    want = want * parts[1] if spec.gated else want
    want = want + (0 if other is None else other.astype(np.float64))
    got = values(y[:m], spec.dtype) if sixteen else y[:m].view(np.float32).astype(np.float64)
    added = 0 if other is None else other.astype(np.float64)
    return Outcome(got, want, y[m:], report, parts[0] - shifts[0], shifts[0], added)
