"""DeepGEMM's mega MoE calls on our kernels, for one rank.

Names and order of arguments, shapes and bytes of weights are those of DeepGEMM's
`fp8_fp4_mega_moe` (MXFP8 rows, MXFP4 weights) and of its NVFP4 fork's `fp4_fp4_mega_moe`: allocate
a buffer once, transform weights once, and for each step copy rows, scales and top-k into the
buffer's views and call.  A row's scales are int32 words of four: byte j of word w is that of block
4 w + j.

What differs:

* one rank: ``group`` is None or of one process; nothing is dispatched, and the buffer holds inputs
  alone, whose rows a call turns back to 16 bits, which is exact, and `fused_moe` quantises again:
  MXFP8 to the same values, NVFP4 where the largest code of a block is 6, as quantisers make it
  (checked on a CPU; on a GPU it is up to the caller);
* gate and up stay float32 until the activation's result is rounded to 16 bits, and top-k weights
  multiply rows of the second GEMM; DeepGEMM rounds gate and up to bfloat16, and multiplies weights
  in before it quantises (MXFP8);
* between the GEMMs, a block of NVFP4 whose scale rounds to zero becomes zeros; the NVFP4 fork has
  no scale below 2^-9;
* transformed weights hold ours beside DeepGEMM's bytes; bytes from elsewhere are converted in every
  call;
* ``fast_math`` changes nothing, and ``a2_scales`` of experts must be one number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from blockscale.ops import layouts
from blockscale.ops.moe.layer import fused_moe
from blockscale.ops.moe.weights import MoeWeights, prepare_moe_weights

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

GRANULE = 8
"""Rows of gate, then of up, that follow each other."""

WORD = 4
"""Block scales of an int32."""

ROWS_STEP = 384
"""Of which the rows of a buffer are a multiple."""

BIAS = 127
"""Of the exponents that UE8M0 bytes are."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TOP = 7
"""Magnitudes of 4-bit codes, and the code of the largest."""


@dataclass(frozen=True)
class MmaType:
    """What is multiplied: formats of weights and rows, elements of a scale, codes in a byte."""

    fmt: str
    act_fmt: str
    block: int
    per_byte: int
    recipe: tuple[int, int, int]


MMA_TYPES = {
    "fp8xfp4": MmaType("mxfp4", "mxfp8", 32, 1, (1, 1, 32)),
    "fp4xfp4": MmaType("nvfp4", "nvfp4", 16, 2, (1, 1, 16)),
}
"""By DeepGEMM's name."""


class Transformed(tuple[Tensor, Tensor]):
    """Codes and scales of a weight as DeepGEMM reads them; ``both``: ours, of both weights."""

    both: MoeWeights


@dataclass
class SymmBuffer:
    """Inputs of a call: views to copy into, of ``num_max_tokens`` rows.

    Attributes:
        x: E4M3 [rows, H], or of "fp4xfp4" uint8 [rows, H / 2].
        x_sf: int32 [rows, H / block / 4].
        topk_idx: int64 [rows, k], -1 for none.
        topk_weights: float32 [rows, k].
    """

    mma_type: str
    num_experts: int
    hidden: int
    intermediate: int
    x: Tensor
    x_sf: Tensor
    topk_idx: Tensor
    topk_weights: Tensor

    def destroy(self) -> None:
        """Give its memory back."""
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            setattr(self, name, getattr(self, name).new_empty(0))


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = "fp8xfp4",
    activation: str = "swiglu",
    device: torch.device | str | None = None,
) -> SymmBuffer:
    """Return a buffer of zeros on ``device`` (None: the current GPU, or the CPU where is none).

    Raises:
        ValueError: more ranks than one, another type or activation, sizes of no whole words.
    """
    where = "get_symm_buffer_for_mega_moe"
    kind = _kind(where, mma_type)
    if group is not None and group.size() > 1:
        raise ValueError(
            f"{where}: group has {group.size()} ranks, and one is computed here; pass None, and "
            "divide experts by other means"
        )
    if activation != "swiglu":
        raise ValueError(f"{where}: activation={activation!r} is not 'swiglu', the only one")
    for name, size in (("hidden", hidden), ("intermediate_hidden", intermediate_hidden)):
        if size % (WORD * kind.block) or size % 128:
            raise ValueError(
                f"{where}: {name}={size} is not a multiple of 128, whose scales are whole words; "
                "pad the weights with zeros"
            )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = -(-num_max_tokens_per_rank // ROWS_STEP) * ROWS_STEP
    dtype = torch.float8_e4m3fn if kind.per_byte == 1 else torch.uint8
    made: dict[str, Tensor] = {
        "x": torch.zeros((rows, hidden // kind.per_byte), dtype=torch.uint8, device=device),
        "x_sf": torch.zeros((rows, hidden // kind.block // WORD), dtype=torch.int32, device=device),
        "topk_idx": torch.full((rows, num_topk), -1, dtype=torch.int64, device=device),
        "topk_weights": torch.zeros((rows, num_topk), device=device),
    }
    made["x"] = made["x"].view(dtype)
    return SymmBuffer(mma_type, num_experts, hidden, intermediate_hidden, **made)


def transform_weights_for_mega_moe(
    l1: Pair, l2: Pair, activation: str = "swiglu", mma_type: str = "fp8xfp4"
) -> tuple[Transformed, Transformed]:
    """Return both weights as DeepGEMM's mega MoE reads them; no value is changed.

    Gate and up rows of l1 and of its scales go in turns of 8; scales are int32, rows innermost,
    rows of every 128 moved (`layouts.deepgemm_scales`).

    Args:
        l1: codes [E, 2 I, H / 2] of one byte, gate rows first, and scales: bytes
            [E, 2 I, H / block], or int32 words of `deepgemm_scales(..., permute=False)`.
        l2: codes [E, H, I / 2] and scales, likewise.
        activation: "swiglu".
        mma_type: key of `MMA_TYPES`.
    """
    where = "transform_weights_for_mega_moe"
    kind = _kind(where, mma_type)
    if activation != "swiglu":
        raise ValueError(f"{where}: activation={activation!r} is not 'swiglu', the only one")
    codes, bytes_ = zip(*((w.view(torch.uint8), _bytes(sf)) for w, sf in (l1, l2)), strict=True)
    both = _prepare(kind, codes, bytes_)
    first = [layouts.interleave_gate_up(value, GRANULE) for value in (codes[0], bytes_[0])]
    made = []
    for w, sf, given in ((*first, l1[0]), (codes[1], bytes_[1], l2[0])):
        pair = Transformed((w.view(given.dtype), layouts.deepgemm_scales(sf)))
        pair.both = both
        made.append(pair)
    return made[0], made[1]


def fp8_fp4_mega_moe(
    y: Tensor,
    l1: Pair,
    l2: Pair,
    buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 32),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Write the layer's output for the first rows of ``buffer`` to y [T, H] bfloat16.

    Args:
        y: output.
        l1, l2: of `transform_weights_for_mega_moe`.
        buffer: of "fp8xfp4", its views filled.
        cumulative_local_expert_recv_stats: int32 [E], to which rows of each expert are added.
        recipe, activation: (1, 1, 32) and "swiglu".
        activation_clamp: gate <= clamp, -clamp <= up <= clamp; None: no bounds.
        fast_math: no effect.
    """
    _run(
        "fp8_fp4_mega_moe",
        *("fp8xfp4", y, l1, l2, buffer, cumulative_local_expert_recv_stats),
        *(recipe, activation, activation_clamp, (None, None, None)),
    )


def fp4_fp4_mega_moe(
    y: Tensor,
    l1: Pair,
    l2: Pair,
    buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 16),
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    l1_alphas: Tensor | None = None,
    l2_alphas: Tensor | None = None,
    a2_scales: Tensor | None = None,
) -> None:
    """The same of NVFP4 rows and weights, with global scales.

    Args:
        l1_alphas: float32 [E, 2], of gate and up: the weights' global scales times that of rows;
            None: 1.
        l2_alphas: float32 [E]: the weights' global scales times ``a2_scales``; None: the latter.
        a2_scales: float32 [E], global scales of the rows between the GEMMs, all the same; None: 1.
    """
    _run(
        "fp4_fp4_mega_moe",
        *("fp4xfp4", y, l1, l2, buffer, cumulative_local_expert_recv_stats),
        *(recipe, activation, activation_clamp, (l1_alphas, l2_alphas, a2_scales)),
    )


def _kind(where: str, mma_type: str) -> MmaType:
    if mma_type not in MMA_TYPES:
        raise ValueError(
            f"{where}: mma_type={mma_type!r} is none of {list(MMA_TYPES)}; choose one of them"
        )
    return MMA_TYPES[mma_type]


def _bytes(sf: Tensor) -> Tensor:
    """Block scales as bytes [E, rows, blocks]."""
    if sf.dtype == torch.int32:
        return layouts.undo_deepgemm_scales(sf, permute=False)
    return sf.view(torch.uint8)


def _prepare(kind: MmaType, codes: Any, scales: Any) -> MoeWeights:
    """The weights as our kernels read them."""
    layout = "linear" if codes[0].device.type == "cpu" else "128x4"
    return prepare_moe_weights(
        *codes, fmt=kind.fmt, w13_scale=scales[0], w2_scale=scales[1], layout=layout
    )


def _weights(kind: MmaType, l1: Pair, l2: Pair) -> MoeWeights:
    """Those of transformed weights, or of their bytes."""
    if isinstance(l1, Transformed) and isinstance(l2, Transformed) and l1.both is l2.both:
        return l1.both
    codes = [pair[0].view(torch.uint8) for pair in (l1, l2)]
    scales = [layouts.undo_deepgemm_scales(pair[1]) for pair in (l1, l2)]
    for value in (codes, scales):
        value[0] = layouts.deinterleave_gate_up(value[0], GRANULE)
    return _prepare(kind, codes, scales)


def _run(
    where: str,
    mma_type: str,
    y: Tensor,
    l1: Pair,
    l2: Pair,
    buffer: SymmBuffer,
    stats: Tensor | None,
    recipe: tuple[int, int, int],
    activation: str,
    clamp: float | None,
    factors: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    kind = MMA_TYPES[mma_type]
    for name, got, wanted in (
        ("buffer.mma_type", buffer.mma_type, mma_type),
        ("recipe", tuple(recipe), kind.recipe),
        ("activation", activation, "swiglu"),
    ):
        if got != wanted:
            raise ValueError(f"{where}: {name} is {got!r}, not {wanted!r}, the only one")
    rows = y.shape[0]
    if rows > len(buffer.x):
        raise ValueError(
            f"{where}: y has {rows} rows, and the buffer {len(buffer.x)}; make one for more tokens"
        )
    weights, a2_scale = _weights(kind, l1, l2), None
    if mma_type == "fp4xfp4":
        weights, a2_scale = _scaled(where, weights, *factors)
    ids = buffer.topk_idx[:rows]
    fused_moe(
        _values(where, kind, buffer, rows),
        weights,
        ids,
        buffer.topk_weights[:rows],
        limit=clamp,
        act_fmt=kind.act_fmt,
        a2_scale=a2_scale,
        out=y,
    )
    if stats is not None:
        used = ids[(ids >= 0) & (ids < weights.experts)]
        stats += torch.bincount(used, minlength=weights.experts).to(stats.dtype)


def _scaled(
    where: str,
    weights: MoeWeights,
    l1_alphas: Tensor | None,
    l2_alphas: Tensor | None,
    a2_scales: Tensor | None,
) -> tuple[MoeWeights, Tensor | None]:
    """Weights with these global scales, and that of the rows between the GEMMs."""
    found: dict[str, Tensor] = {}
    if l1_alphas is not None:
        found["w13_global"] = l1_alphas.float().contiguous()
    one = None
    if a2_scales is not None:
        if a2_scales.device.type == "cpu" and bool((a2_scales != a2_scales[0]).any()):
            raise ValueError(
                f"{where}: a2_scales differ between experts, and rows are quantised with one; pass "
                "the largest for all, and l2_alphas with it"
            )
        one = a2_scales[:1].float().contiguous()
    if l2_alphas is not None:
        found["w2_global"] = (l2_alphas / (1 if one is None else one)).float().contiguous()
    return replace(weights, **found), one  # type: ignore[arg-type]


def _values(where: str, kind: MmaType, buffer: SymmBuffer, rows: int) -> Tensor:
    """The first rows of x as bfloat16, which holds each code times its scale."""
    scales = buffer.x_sf[:rows].contiguous().view(torch.uint8)
    if kind.per_byte == 1:
        factor = torch.where(scales == 255, torch.nan, torch.exp2(scales.float() - BIAS))
        values = buffer.x[:rows].float()
    else:
        factor = scales.view(torch.float8_e4m3fn).float()
        codes = torch.stack((buffer.x[:rows] & 15, buffer.x[:rows] >> 4), -1).flatten(1)
        values = torch.tensor(E2M1, device=codes.device)[(codes & TOP).long()]
        _check_blocks(where, (codes & TOP).unflatten(1, (-1, kind.block)), factor)
        values = torch.where(codes > TOP, -values, values)
    blocks = values.unflatten(1, (-1, kind.block)) * factor[:, :, None]
    return blocks.flatten(1).bfloat16()


def _check_blocks(where: str, magnitudes: Tensor, factor: Tensor) -> None:
    """Blocks that `fused_moe` quantises to the same codes have the largest one, or are zero."""
    if magnitudes.device.type != "cpu":
        return
    top = magnitudes.amax(-1)
    wrong = ((top != TOP) & (top > 0) & (factor > 0)).nonzero()
    if len(wrong):
        row, block = wrong[0].tolist()
        raise ValueError(
            f"{where}: block {block} of row {row} of x has the largest code "
            f"{int(top[row, block])}, not 7 (6.0), so that it would be rounded again; quantise "
            "rows with amax / 6"
        )
