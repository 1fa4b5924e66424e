"""Run a kernel of `moe_tiles` in the emulator on random operands, and judge it against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import tvm
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from blockscale import emulator
from blockscale.base.sizes import ceil_div, round_up
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.lower.warp.kernel import Kernel
from blockscale.ops.moe.tiles import K_ORDER
from blockscale.ops.moe.weights import prepare_moe_weights
from blockscale.schedules.moe import wgmma
from blockscale.specs.plans.moe import E4M3, MoeGemm, MoeTile
from blockscale.tir.moe.tiles import moe_tiles
from tests.reference import core as ref
from tests.reference import moe as moe

BYTE_ORDER = tuple(16 * (p % 16 // 4) + 4 * (p // 16) + (0, 2, 1, 3)[p % 4] for p in range(64))
"""The channel at each position of a block's K, of rows of bytes."""

BYTE_TILE: dict[str, Any] = {
    "bytewise": True,
    "operand": E4M3,
    "unit": "wgmma",
    "rows": 256,
    "tokens": 24,
    "slices": 1,
    "partial": 128,
}
"""What a plan of 8-bit operands has beside its format."""

UNWRITTEN = 0x7FC1
"""16 bits that no kernel writes: a NaN of bfloat16 and of float16."""


@dataclass(frozen=True)
class Of:
    """The decisions of a kernel but for the layer's sizes; see `MoeGemm` and `MoeTile`."""

    unit: str = "mma"
    fmt: str = "nvfp4"
    group: int = 16
    zeros: bool = False
    dtype: str = "bfloat16"
    activation: str = "swiglu"
    rows: int = 64
    tokens: int = 8
    slices: int = 2
    stages: int = 3
    blocks_k: int = 2
    bytewise: bool = False
    operand: str = ""
    partial: int = 0
    fast: bool = False

    @property
    def gather(self) -> bool:
        """Whether it is GEMM 1."""
        return self.activation != "none"

    @property
    def tile(self) -> MoeTile:
        """The tile's shape."""
        sizes = self.rows, self.tokens, self.slices, self.blocks_k
        return MoeTile(self.unit, *sizes, partial=self.partial)

    def gemm(self, experts: int, rows: int, k: int, top_k: int, cols: int = 0) -> MoeGemm:
        """The GEMM of these sizes."""
        form = (self.fmt, self.group, self.zeros, self.dtype, self.activation)
        return MoeGemm(*form, experts, rows, k, top_k, cols, self.bytewise, self.operand, self.fast)


def plan(**changes: Any) -> Of:
    """Return a kernel with these decisions; all others are plain ones."""
    return Of(**changes)


@cache
def scheduled(of: Of, gemm: MoeGemm) -> PrimFunc:
    """Return the scheduled GEMM."""
    reason = of.tile.illegal(gemm)
    assert reason is None, reason
    sch = Schedule(tvm.IRModule({"main": moe_tiles(gemm)}))
    wgmma.decided(sch, gemm, of.tile, of.stages)
    return sch.mod["main"]


@cache
def kernel(of: Of, gemm: MoeGemm, arch: str = "") -> tuple[Kernel, str]:
    """Return the kernel of a scheduled GEMM, and its PTX, for what has its instructions."""
    arch = arch or ("sm_100a" if of.tile.tensor else "sm_90a")
    made = derive(scheduled(of, gemm))
    return made, compile_cuda_source(emit(made, "moe"), arch, ptx=True).image.decode()


def blocks_of(ids: np.ndarray, experts: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return order [valid] and blocks [n, 4] int32: native/moe_sort.cuh, in plain words."""
    flat = ids.reshape(-1)
    valid = np.nonzero((flat >= 0) & (flat < experts))[0]
    order = valid[np.argsort(flat[valid], kind="stable")]
    blocks: list[tuple[int, int, int, int]] = []
    first = 0
    for e in range(experts):
        count = int((flat == e).sum())
        begin, number = len(blocks), -(-count // tokens)
        size = round_up(ceil_div(count, number), 8) if number else 0
        for b in range(number):
            rows = min(size, count - b * size)
            blocks.append((e << 16 | rows, first + b * size, begin, number))
        first += count
    return order.astype(np.int32), np.array(blocks, np.int32).reshape(-1, 4)


def bits(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return 16-bit patterns of float values."""
    if dtype == "float16":
        return value.astype(np.float16).view(np.uint16)
    return ref.bf16_bits(value.astype(np.float32))


def values(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Return float64 of 16-bit patterns."""
    if dtype == "float16":
        return stored.view(np.float16).astype(np.float64)
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclass
class Outcome:
    """What a kernel wrote and should have written, float64 [rows, columns], and its report."""

    got: np.ndarray
    want: np.ndarray
    behind: np.ndarray
    report: Any

    def judge(self, limit: float) -> None:
        """Fail unless each row is right, nothing else was written, and nothing was racy."""
        self.report.check()
        kinds = {hazard.kind for hazard in self.report.hazards}
        assert kinds <= {"uninitialised read"}, kinds  # tokens that a block does not have
        assert (self.behind == UNWRITTEN).all(), "more was written than the output"
        length = np.sqrt((self.want**2).sum(1))
        error = np.sqrt(((self.got - self.want) ** 2).sum(1)) / np.maximum(length, 1e-30)
        assert (error <= limit).all(), (  # NaN is not
            f"row {np.argmax(error)} of {len(error)}: relative error {error.max()}"
        )


def run(
    of: Of,
    ids: np.ndarray,
    *,
    experts: int = 3,
    hidden: int = 128,
    intermediate: int = 128,
    bias: bool = False,
    scaled: bool = False,
    rounded: bool = False,
    limits: tuple[float, float] | None = None,
    ctas: int = 2,
    seed: int = 0,
    arch: str = "",
) -> Outcome:
    """Run GEMM 1 (which gathers) or GEMM 2 of a random layer.

    ``scaled``: rows have scales; ``rounded``: weights are judged as the 16 bits that MMAs multiply,
    where codes times scales need more (INT4); ``limits``: alpha and limit of the activation.
    """
    layer = moe.random_layer(
        experts, hidden, intermediate, of.fmt, group=of.group, zeros=of.zeros, bias=bias,
        activation=of.activation if of.gather else "swiglu", scale_dtype=of.dtype, seed=seed,
    )  # fmt: skip
    made = prepared(layer, of.dtype, "tiles64e" if of.bytewise else "tiles64")
    w13, w2 = layer.dense()
    if rounded:
        w13, w2 = (values(bits(w, of.dtype), of.dtype) for w in (w13, w2))
    order, blocks = blocks_of(ids, experts, of.tokens)
    top_k, slots = ids.shape[1], ids.size
    rng = np.random.default_rng(seed)
    k, columns = (hidden, round_up(intermediate, 64)) if of.gather else (intermediate, hidden)
    x = moe.random_hidden(len(ids) if of.gather else slots, k, of.dtype, seed)
    if of.operand:
        x = ref.e4m3_decode(ref.e4m3_encode(x.astype(np.float32) * 64))
    stored = np.zeros((len(x), round_up(k, 64)), np.uint8 if of.operand else np.uint16)
    stored[:, :k] = ref.e4m3_encode(x) if of.operand else bits(x, of.dtype)
    places = list(BYTE_ORDER if of.operand else K_ORDER)
    stored = stored.reshape(len(x), -1, 64)[:, :, places].reshape(len(x), round_up(k, 64))
    factor = np.exp2(rng.uniform(-1, 1, len(x))).astype(np.float32) if scaled else None
    out = np.full((slots + 1, columns), UNWRITTEN, np.uint16)
    part = ("w13", "w13_scale", "w13_global", "w13_bias")
    weights = [getattr(made, name if of.gather else name.replace("13", "2")) for name in part]
    w, ws, overall, shift = (None if t is None else host(t) for t in weights)
    assert w is not None
    assert ws is not None
    defaults = (
        (1.702, 7.0) if of.activation == "swiglu_oai" else (1.0, float(np.finfo(np.float32).max))
    )
    kind = limits or defaults
    scalars = [np.float32(v) for v in kind] if of.gather else []
    gemm = of.gemm(experts, w.shape[1] * 64, round_up(k, 64), top_k, 0 if of.gather else columns)
    made_kernel, code = kernel(of, gemm, arch)
    report = emulator.launch(
        code, entry="moe", grid=ctas, block=made_kernel.threads, dynamic_smem=made_kernel.shared,
        args=[stored, w, ws, overall, shift, factor, order, blocks,
              np.array([len(blocks)], np.int32), out, *scalars],
        seed=seed,
    )  # fmt: skip
    scale = np.ones(len(x)) if factor is None else factor.astype(np.float64)
    want, got = [], []
    for slot, flat in enumerate(order):
        e = ids.reshape(-1)[flat]
        row = flat // top_k if of.gather else slot
        sums = (w13 if of.gather else w2)[e] @ x[row].astype(np.float64) * scale[row]
        stored_bias = layer.w13_bias if of.gather else layer.w2_bias
        sums = sums + (0 if stored_bias is None else stored_bias[e].astype(np.float64))
        if of.gather:
            sums = moe.activate(sums[None], of.activation, *kind)[0]
            line = values(out[slot], of.dtype).reshape(-1, 64)
            natural = np.empty_like(line)
            natural[:, list(K_ORDER)] = line
            got.append(natural.reshape(-1)[:intermediate])
        else:
            got.append(values(out[flat], of.dtype))
        want.append(sums)
    rows = slice(len(order), None) if of.gather else slice(slots, None)
    return Outcome(np.array(got), np.array(want), out[rows], report)


def host(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array."""
    return np.ascontiguousarray(tensor.contiguous().numpy())


def prepared(layer: moe.Layer, dtype: str, layout: str = "tiles64") -> Any:
    """Return the weights in a layout of CUDA kernels; `layer.rounded` becomes what they are.

    That is for references.
    """
    layer.rounded = is_rounded(layer.fmt, layout)
    names = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale", "w13_bias", "w2_bias",
             "w13_zero", "w2_zero")  # fmt: skip
    given = {name: getattr(layer, name) for name in names}
    tensors = {
        n: None if v is None else torch.from_numpy(np.ascontiguousarray(v))
        for n, v in given.items()
    }
    block = layer.about["block"]
    return prepare_moe_weights(
        torch.from_numpy(layer.w13), torch.from_numpy(layer.w2), fmt=layer.fmt, **tensors,
        activation=layer.activation, group_size=block if layer.fmt == "int4" else None,
        dtype=getattr(torch, dtype), layout=layout,
        **({"rounded": True, "act_fmt": "fp8"} if layer.rounded else {}),
    )  # fmt: skip


def is_rounded(fmt: str, layout: str) -> bool:
    """Whether weights of a layout are rounded."""
    return (fmt, layout) == ("nvfp4", "tiles64e")
