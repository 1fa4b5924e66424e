"""A grouped GEMM of an MoE layer in whole tiles, which the schedules for Hopper split.

GEMM 1 gathers, multiplies, and applies the activation to pairs of rows (gate, up):

    acc[r] = sum_k x[order[s] / top_k, k] * w[e, r, k]        row r of the weights, sorted slot s
    out[s, p] = round(act(fma(acc[gate of p], factor[e, 0] * f, bias), fma(acc[up of p], ..)))

GEMM 2 reads what GEMM 1 wrote, and scatters: out[order[s], r] = round(fma(acc[r], factor[e] * f,
bias[e, r])).  f is the row's scale (activations in FP8 or NVFP4), sums are float32.  Rows of this
out may lie anywhere (`ADDRESSED`): a kernel then has their addresses.

Weights are "tiles64" (`moe.tiles`): [experts, rows / 64, K / 64, 4 tiles of 16 rows x
32 lanes x 4 words] of 32 bits; K is in the order of positions, 16 to a step of the MMA.  Word j of
lane 4 g + t holds rows g and g + 8, positions 16 j + 2 t, + 1, + 8, + 9.  Scales likewise, per
tile of 16 rows.  A decoded weight is w * 2^-LEFT_OVER, rounded to the dtype of x.  With a gate,
tiles of 16 rows are 8 of gate, then 8 of up; `natural` and `column` say which columns rows of the
layout become.

Of layout "tiles64e" (`MoeGemm.bytewise`) words have their bits elsewhere (`bytewise_code`), a row's
scales are relative to its largest, and each row has a factor.  Weights of nvfp4 are rounded to E4M3
there (`bytewise_weight`).  They may become E4M3, with x in E4M3 (`MoeGemm.operand`): then word j
has positions 16 j + 4 t to 16 j + 4 t + 3, of which 1 and 2 are the channels 2 and 1 of the
thread's four.

Slots are padded: those of an expert to tiles of `TOKEN_TILE`.  A padding slot's order is the
number of slots: it reads the row behind the last one of x (zeros), and writes the row behind the
last one of out, which nobody reads.  Rows and K are padded to `ROW_TILE` and `K_TILE`.  Padding
exists on paper only: a kernel's tiles end where the block of tokens, rows and K do; the true sizes
are in the attribute "blockscale.shapes".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import cuda_func_call
from tvm.ir import Expr as PrimExpr
from tvm.script import tirx as T
from tvm.tirx import PrimFunc

from blockscale.base.formats import E4M3, MOE
from blockscale.base.sizes import ceil_div, round_up
from blockscale.specs.plans.moe import (
    ADDRESSED,
    AFTER,
    ATTRIBUTE,
    FAST,
    TERM,
    MoeGemm,
    scale_count,
)
from blockscale.specs.plans.moe import E4M3 as E4M3_DTYPE
from blockscale.tir import activations, formats
from blockscale.tir.common import i64
from blockscale.tir.gemm.tiles import OPTIONAL, PARAMS

TOKEN_TILE = 8 * 6983776800
"""Slots of a padded tile, which every plan's tokens divide: multiples of 8 up to 256, but those of
23, 29 and 31.  A function to be run takes fewer."""

ROW_TILE = 256
"""Rows of the weights are a multiple of this, the highest tile."""

K_TILE = 512
"""K is a multiple of this, the longest stage: 8 blocks of 64."""

WORDS = 128
"""32-bit words of codes of 16 rows and 64 k: four for each lane."""

BLOCK_WORDS = 4 * WORDS
"""Of 64 rows and 64 k."""


def code(fmt: str, word: PrimExpr, high: PrimExpr, pair: PrimExpr, odd: PrimExpr) -> PrimExpr:
    """Value in ``word``: row g + 8 if ``high``, positions 8, 9 if ``pair``, the odd one if ``odd``.

    It is float32.  The fields of e2m1 lie where a shift and an AND make 16-bit numbers of them: of
    the fragment's registers a0 to a3 sign bits are 15, 12, 9, 13, and the others 8..6, 5..3, 2..0
    and (11..10, 14).
    """
    register = tirx.Cast("uint32", high + pair * i64(2))
    start = tirx.Cast("uint32", odd) * _u32(16)
    if fmt == "int4":
        bits = (word >> (start + register * _u32(4))) & _u32(15)
        return tirx.Cast("float32", tirx.Cast("int32", bits))

    def field(first: int, of_last: int, width: int) -> PrimExpr:
        step = tirx.Select(register < _u32(3), _u32(first) - register * _u32(3), _u32(of_last))
        return (word >> (start + step)) & _u32((1 << width) - 1)

    bits = (field(15, 13, 1) << _u32(31)) | (field(7, 10, 2) << _u32(23))
    tiny = tirx.reinterpret("float32", bits | (field(6, 14, 1) << _u32(22)))
    return tiny * tirx.const(2.0**126, "float32")  # also of the subnormal 0.5


def bytewise_code(word: PrimExpr, high: PrimExpr, pair: PrimExpr, odd: PrimExpr) -> PrimExpr:
    """The same of layout "tiles64e", of e2m1.

    In each half of the word nibble ``pair + 2 high`` has the magnitude; the sign is bit 7 + 8 pair
    of row g, and bit 3 + 8 pair of row g + 8.
    """
    high, pair = (tirx.Cast("uint32", value) for value in (high, pair))
    start = tirx.Cast("uint32", odd) * _u32(16)
    sign = (word >> (start + _u32(7) + pair * _u32(8) - high * _u32(4))) & _u32(1)
    magnitude = (word >> (start + pair * _u32(4) + high * _u32(8))) & _u32(7)
    bits = (sign << _u32(31)) | (magnitude << _u32(22))
    return tirx.reinterpret("float32", bits) * tirx.const(2.0**126, "float32")


def f32(value: PrimExpr) -> PrimExpr:
    """A number of 16 or 8 bits as float32, exactly."""
    return tirx.Cast("float32", value)


def _u32(value: int) -> PrimExpr:
    return tirx.const(value, "uint32")


def scale_index(group: int, zeros: int, row: PrimExpr, quad: PrimExpr, high: PrimExpr) -> PrimExpr:
    """Where the scale of row ``row`` (g; + 8 if ``high``) for the k of thread ``quad`` lies."""
    if group == 16:
        return (row * i64(4) + quad) * i64(2) + high
    if group == 32:
        at = (row * i64(2) + quad // i64(2)) * i64(2) + high
    else:
        at = row * i64(2) + high
    return at * i64(2) if zeros else at


def left_over(fmt: str, zeros: int, dtype: str) -> float:
    """What instructions that decode leave to be multiplied after the sum, a power of two."""
    if dtype == E4M3_DTYPE:
        return 2.0**9 if fmt == "int4" else 2.0**-6
    if fmt == "int4":
        return 2.0**21 if dtype == "bfloat16" and not zeros else 1.0
    return 2.0**16 if dtype == "bfloat16" else 2.0**7 if fmt == "nvfp4" else 1.0


def scaled_sums(fmt: str, dtype: str) -> bool:
    """Whether a group's scale is multiplied with its sum of products, not with its weights.

    Those of int4 are numbers that E4M3 could not hold; differences of codes and zeros it does.
    """
    return fmt == "int4" and dtype == E4M3_DTYPE


def weight(
    fmt: str,
    dtype: str,
    number: PrimExpr,
    scale: PrimExpr | None,
    zero: PrimExpr | None,
    left: float,
    term: bool = False,
) -> PrimExpr:
    """A weight / ``left``, rounded to ``dtype``: of its code's value and of its stored scale.

    ``scale``: None: it is not the weight's (`scaled_sums`).  ``term``: ``zero`` is added to the
    product; else it is what codes are counted from.
    """
    if scale is None:
        value = number - (tirx.const(8.0, "float32") if zero is None else f32(zero))
    elif fmt != "int4":
        value = number * _power_scale(fmt, scale)
    elif term:
        value = T.fma(number - T.float32(8), f32(scale), f32(zero))
    else:
        origin = tirx.const(8.0, "float32") if zero is None else f32(zero)
        value = (number - origin) * f32(scale)
    return tirx.Cast(dtype, value if left == 1.0 else value * tirx.const(1 / left, "float32"))


def bytewise_weight(
    fmt: str, dtype: str, number: PrimExpr, scale: PrimExpr, left: float
) -> PrimExpr:
    """The same of layout "tiles64e"; nvfp4 is rounded to E4M3 (`blockscale.ops.moe.rounded`).

    Bit 7 of a scale's byte says how, and is no part of the scale.
    """
    if fmt != "nvfp4":
        return weight(fmt, dtype, number, scale, None, left)
    value = _four_bits(number * _power_scale(fmt, scale & tirx.const(0x7F, "uint8")))
    return tirx.Cast(dtype, value * tirx.const(1 / left, "float32"))


def _four_bits(value: PrimExpr) -> PrimExpr:
    """Round float32 to four bits of significand, to nearest, ties to even: as E4M3 does.

    A cast to E4M3 and back is not that everywhere: TVM computes float8 in wider types on a CPU.
    """
    bits = formats.bits_of(value)
    up = tirx.const(0x7FFFF, "int32") + ((bits >> 20) & tirx.const(1, "int32"))
    return formats.from_bits((bits + up) & tirx.const(-0x100000, "int32"))


def _power_scale(fmt: str, byte: PrimExpr) -> PrimExpr:
    """Float32 scale of a stored byte: of E4M3 (exponent + 13, 3 bits), of UE8M0 2^(byte - 237)."""
    bits = tirx.Cast("int32", byte)
    if MOE[fmt].scale is E4M3:
        return formats.from_bits((bits << 20) + (tirx.const(127 - 13, "int32") << 23))
    field = tirx.Max(bits - 110, tirx.const(0, "int32"))
    return formats.from_bits(field << 23)


def decoded(
    fmt: str,
    group: int,
    zeros: int,
    dtype: str,
    words: T.Buffer,
    scales: T.Buffer | None,
    row: PrimExpr,
    position: PrimExpr,
    tile: tuple[PrimExpr, ...] | None = None,
    block: PrimExpr | None = None,
    *,
    order: str = "",
) -> PrimExpr:
    """The weight of ``row`` and ``position`` of a block of 64 k, without what is `left_over`.

    Of buffers of 16 rows and such a block; or of all of them with ``tile``, indices of the block of
    64 rows, and ``block``, its number along K.  With `scaled_sums` it has no scale: ``scales`` of
    16 rows begin with the first zero, and may be None where there are no zeros.

    ``order``: "positions" and "bytes" (layout "tiles64e"): of MMAs' K; else that of a linear
    layer: ``position`` is the channel, each thread has 16 neighbouring ones, and the words of a
    quad's threads begin with the thread g / 2.
    """
    lane_row, high = row % i64(8), row % i64(16) // i64(8)
    quad, word = position % i64(8) // i64(2), position // i64(16)
    pair, odd = position % i64(16) // i64(8), position % i64(2)
    if dtype == E4M3_DTYPE:
        quad, pair, odd = (
            position % i64(16) // i64(4),
            position % i64(2),
            position % i64(4) // i64(2),
        )
    turned = quad
    if order not in ("positions", "bytes"):
        quad, word = position // i64(16), position % i64(8) // i64(2)
        turned = (quad + lane_row // i64(2)) % i64(4)
    of_word = lane_row * i64(16) + turned * i64(4) + word
    of_block: tuple[PrimExpr, ...] = ()
    if tile is not None:
        of_block, of_word = (*tile, block), row % i64(64) // i64(16) * i64(WORDS) + of_word
    bits = words[(*of_block, of_word)]
    own = scaled_sums(fmt, dtype)
    at = scale_place(fmt, group, zeros, row, quad, tile, block)
    behind = 0 if own and tile is None else 1  # what reads zeros alone begins with the first one
    numbers: Any = scales
    zero = numbers[(*at[:-1], at[-1] + i64(behind))] if zeros else None
    scale = None if own else numbers[at]
    left = left_over(fmt, zeros, dtype)
    if order == "bytes" and fmt != "int4":
        return bytewise_weight(fmt, dtype, bytewise_code(bits, high, pair, odd), scale, left)
    number = code(fmt, bits, high, pair, odd)
    return weight(fmt, dtype, number, scale, zero, left, term=zeros == TERM)


def scale_place(
    fmt: str,
    group: int,
    zeros: int,
    row: PrimExpr,
    quad: PrimExpr,
    tile: tuple[PrimExpr, ...] | None,
    block: PrimExpr | None,
) -> tuple[PrimExpr, ...]:
    """Indices of the scale of ``row`` for the channels of thread ``quad``; see `decoded`."""
    at = scale_index(group, zeros, row % i64(8), quad, row % i64(16) // i64(8))
    if tile is None:
        return (at,)
    at = row % i64(64) // i64(16) * i64(scale_count(fmt, group, zeros)) + at
    return (*tile, block if group <= 64 else block // i64(group // 64), at)


def approximate_sigmoid(value: PrimExpr) -> PrimExpr:
    """1 / (1 + exp(-value)) by the approximations of exp and of a quotient."""
    return cuda_func_call(
        "bs_sigmoid", value, source_code='#include "mma.cuh"\n', return_type="float32"
    )


Sigmoid = Callable[[PrimExpr], PrimExpr]


def activated(
    activation: str,
    gate: PrimExpr,
    up: PrimExpr,
    alpha: PrimExpr,
    limit: PrimExpr,
    sigmoid: Sigmoid,
) -> PrimExpr:
    """Float32 activation of a gate and its up."""
    if activation == "gelu_tanh":
        inner = T.float32(0.7978845608028654) * (gate + T.float32(0.044715) * gate * gate * gate)
        return gate * sigmoid(T.float32(2) * inner) * up  # (1 + tanh(z)) / 2 = sigmoid(2 z)
    gate, up = activations.limited(gate, up, limit)
    if activation == "swiglu_oai":
        up = up + T.float32(1)
    return gate * sigmoid(alpha * gate) * up


def relu2(value: PrimExpr) -> PrimExpr:
    """The square of what is positive; a NaN stays one."""
    return activations.of("relu2", value)


@cache
def moe_tiles(
    gemm: MoeGemm,
    tokens: int | None = None,
    token_tile: int = TOKEN_TILE,
    sigmoid: Sigmoid = approximate_sigmoid,
) -> PrimFunc:
    """Return the unscheduled GEMM for any number of tokens and tiles, or tuned at ``tokens``.

    Parameters of GEMM 1 are (x [tokens + 1, K], w, scales, factor [experts, 2], bias [experts,
    rows], row_scale [tokens + 1], order [tiles, slots], expert_of_tile [tiles], out [tiles, slots,
    positions], alpha, limit), of GEMM 2 (x [tiles, slots, K], .., row_scale [tiles, slots], order,
    expert_of_tile, out [slots + 1, rows]).  bias and row_scale may be null.
    """
    if gemm.gated:
        func = _gated(gemm, token_tile, sigmoid)
    else:
        func = _square(gemm, token_tile) if gemm.gather else _scattered(gemm, token_tile)
    optional = {"bias": 0.0, "row_scale": 1.0}
    func = func.with_attrs(
        {
            ATTRIBUTE: gemm.attribute(),
            PARAMS: true_shapes(gemm),
            OPTIONAL: optional,
        }
    )
    # What the kernel before it writes: prepare the tables too, GEMM 1 and requantise the rows.
    tables = ["order", "expert_of_tile"] if gemm.gather else []
    func = func.with_attr(AFTER, ["x", "row_scale", *tables])
    if gemm.fast:
        func = func.with_attr(FAST, True)
    if gemm.sent:
        func = func.with_attr(ADDRESSED, ["out"])
    # Whole tiles are the same for several numbers of tokens, whose best schedules are not.
    return func if tokens is None else func.with_attr("blockscale.tokens", tokens)


def true_shapes(gemm: MoeGemm) -> dict[str, list[tuple[str, int, int, int]]]:
    """Return the true dimensions of the parameters; see `gemm.tiles.true_shapes`."""
    experts, rows = ("experts", 1, gemm.experts, 1), ("rows", 1, -1, 2)
    any_row, cols = ("", 1, -1, 1), ("", 1, gemm.columns, 1)
    deep = max(64, gemm.group)
    k_blocks, bands = gemm.k // 64, ("cols", 64, gemm.rows // 64, 1)
    return {
        "x": [any_row if gemm.gather else rows, ("k", 1, gemm.k, 1 if gemm.gather else 2)],
        "w": [experts, bands, ("k", 64, k_blocks, 1), ("", 1, BLOCK_WORDS, 1)],
        "scales": [
            experts,
            bands,
            ("k", deep, ceil_div(gemm.k, deep), 1),
            ("", 1, 4 * gemm.scales, 1),
        ],
        "factor": [experts, *_of_factor(gemm)],
        "bias": [experts, ("", 1, gemm.rows, 1)],
        "row_scale": [any_row if gemm.gather else rows],
        "order": [rows],
        "expert_of_tile": [any_row],
        "out": [rows if gemm.gather else any_row, cols],
    }


def _of_factor(gemm: MoeGemm) -> list[tuple[str, int, int, int]]:
    """Return the dimensions of factors behind that of experts."""
    if gemm.bytewise:
        return [("", 1, gemm.rows, 1)]
    return [("", 1, 2, 1)] if gemm.gather else []


def sizes(gemm: MoeGemm) -> tuple[PrimExpr, ...]:
    """Experts; rows; blocks of 64 rows, of 64 k, and of scales; numbers in one of these."""
    rows, k = round_up(gemm.rows, ROW_TILE), round_up(gemm.k, K_TILE)
    shared = max(1, gemm.group // 64)
    found = (gemm.experts, rows, rows // 64, k // 64, k // 64 // shared, 4 * gemm.scales)
    return tuple(i64(size) for size in found)


def natural(row: PrimExpr) -> PrimExpr:
    """The row of the matrix at a row of the layout: 32 of them are 8 q + 2 t + b for 8 t + 2 q + b.

    A thread of an epilogue, t, then has neighbours.
    """
    quarter, pair = row % i64(32) // i64(8), row % i64(8) // i64(2)
    return row // i64(32) * i64(32) + pair * i64(8) + quarter * i64(2) + row % i64(2)


def column(sixteen: PrimExpr, row: PrimExpr) -> PrimExpr:
    """The column of a gate: two tiles of 16 rows have 16, and a thread four neighbours."""
    pair = row // i64(2) * i64(4) + sixteen % i64(2) * i64(2) + row % i64(2)
    return sixteen // i64(2) * i64(16) + pair


def products(gemm: MoeGemm, token_tile: int) -> Any:
    """Steps from rows of x, an element of which ``read`` returns, to sums C [tiles, slots, rows].

    ``expert``: returns that of a padded tile.
    """
    _, R, RB, KB, SB, SN = sizes(gemm)
    N, dtype = i64(token_tile), gemm.multiplied
    decode = partial(decoded, gemm.fmt, gemm.group, gemm.zeros, dtype, order=gemm.order)

    multiply = summed(gemm.fmt, gemm.group, gemm.zeros, dtype, sizes(gemm)[1:], token_tile)

    @T.inline
    def steps(read, expert, w, scales, C, tiles):
        W = T.sblock_alloc_buffer((tiles, RB, KB, i64(BLOCK_WORDS)), "uint32")
        S = T.sblock_alloc_buffer((tiles, RB, SB, SN), gemm.scale_dtype)
        X = T.sblock_alloc_buffer((tiles, KB, N, i64(64)), dtype)
        A = T.sblock_alloc_buffer((tiles, KB, R, i64(64)), dtype)
        for t, r, k, b in T.grid(tiles, RB, KB, i64(BLOCK_WORDS)):
            with T.sblock("weights"):
                vt, vr, vk, vb = T.axis.remap("SSSS", [t, r, k, b])
                W[vt, vr, vk, vb] = w[expert(vt), vr, vk, vb]
        for t, r, k, b in T.grid(tiles, RB, SB, SN):
            with T.sblock("scales"):
                vt, vr, vk, vb = T.axis.remap("SSSS", [t, r, k, b])
                S[vt, vr, vk, vb] = scales[expert(vt), vr, vk, vb]
        for t, k, i, p in T.grid(tiles, KB, N, i64(64)):
            with T.sblock("tokens"):
                vt, vk, vi, vp = T.axis.remap("SSSS", [t, k, i, p])
                X[vt, vk, vi, vp] = read(vt, vi, vk, vp)
        for t, k, r, p in T.grid(tiles, KB, R, i64(64)):
            with T.sblock("decode"):
                vt, vk, vr, vp = T.axis.remap("SSSS", [t, k, r, p])
                A[vt, vk, vr, vp] = decode(W, S, vr, vp, (vt, vr // i64(64)), vk)
        multiply(
            lambda t, k, r, p: A[t, k, r, p],
            lambda t, k, i, p: X[t, k, i, p],
            lambda t, r: (t, r // i64(64)),
            S,
            C,
            tiles,
        )

    return steps


def summed(
    fmt: str,
    group: int,
    zeros: int,
    dtype: str,
    sizes: tuple[PrimExpr, ...],
    token_tile: int,
) -> Any:
    """Step from operands of ``dtype`` to sums C [tiles, slots, rows].

    It takes what returns an element of the weight and one of x, what returns the indices of a
    row's scales but the last two, the scales, and C.  With `scaled_sums` there are sums P of each
    group, C adds up its scale times each.
    """
    R, _, KB, *_ = sizes
    N, each = i64(token_tile), i64(max(1, group // 64))
    groups = KB // each

    @T.inline
    def products(weight, x, tile, S, C, tiles):
        for t, i, r, k, p in T.grid(tiles, N, R, KB, i64(64)):
            with T.sblock("gemm"):
                vt, vi, vr, vk, vp = T.axis.remap("SSSRR", [t, i, r, k, p])
                with T.init():
                    C[vt, vi, vr] = T.float32(0)
                C[vt, vi, vr] = C[vt, vi, vr] + f32(weight(vt, vk, vr, vp)) * f32(x(vt, vk, vi, vp))

    @T.inline
    def scaled(weight, x, tile, S, C, tiles):
        P = T.sblock_alloc_buffer((groups, tiles, N, R), "float32")
        for t, i, r, g, k, p in T.grid(tiles, N, R, groups, each, i64(64)):
            with T.sblock("partial"):
                vt, vi, vr, vg, vk, vp = T.axis.remap("SSSSRR", [t, i, r, g, k, p])
                with T.init():
                    P[vg, vt, vi, vr] = T.float32(0)
                P[vg, vt, vi, vr] = P[vg, vt, vi, vr] + f32(
                    weight(vt, vg * each + vk, vr, vp)
                ) * f32(x(vt, vg * each + vk, vi, vp))
        for t, i, r, g in T.grid(tiles, N, R, groups):
            with T.sblock("gemm"):
                vt, vi, vr, vg = T.axis.remap("SSSR", [t, i, r, g])
                with T.init():
                    C[vt, vi, vr] = T.float32(0)
                C[vt, vi, vr] = T.fma(
                    f32(S[scale_place(fmt, group, zeros, vr, i64(0), tile(vt, vr), vg * each)]),
                    P[vg, vt, vi, vr],
                    C[vt, vi, vr],
                )

    return scaled if scaled_sums(fmt, dtype) else products


def factors_of(gemm: MoeGemm) -> tuple[PrimExpr, ...]:
    """Return the shape of factors: of experts, of gates and ups, of rows."""
    E, R, *_ = sizes(gemm)
    if gemm.bytewise:
        return E, R
    return (E, i64(2)) if gemm.gather else (E,)


def factor_of(
    gemm: MoeGemm, factor: T.Buffer, expert: PrimExpr, half: int | None, row: PrimExpr
) -> PrimExpr:
    """A row's factor; ``half``: that of gates, 0, or ups, 1; None: there is one of all."""
    if gemm.bytewise:
        return factor[expert, row]
    return factor[expert] if half is None else factor[expert, half]


def _gathered(x: T.Buffer, order: T.Buffer, top_k: int) -> Callable[..., PrimExpr]:
    """Return what reads an element of the row of x of a slot's token."""
    return lambda t, i, k, p: x[order[t, i] // i64(top_k), k * i64(64) + p]


def in_table(expert_of_tile: T.Buffer) -> Callable[[PrimExpr], PrimExpr]:
    """Return what finds the expert of a padded tile."""
    return lambda t: expert_of_tile[t]


def sorted_rows(x: T.Buffer) -> Callable[..., PrimExpr]:
    """Return what reads an element of the row of a slot."""
    return lambda t, i, k, p: x[t, i, k, p]


def _gated(gemm: MoeGemm, token_tile: int, sigmoid: Sigmoid) -> PrimFunc:
    """GEMM 1 whose rows of w are gates and ups, 8 of each in turn."""
    E, R, RB, KB, SB, SN = sizes(gemm)
    N, TK, dtype = i64(token_tile), i64(gemm.top_k), gemm.dtype
    multiply, act = products(gemm, token_tile), partial(activated, gemm.activation)
    left = T.float32(left_over(gemm.fmt, gemm.zeros, gemm.multiplied))
    eight, sixteen = i64(8), i64(16)
    factors, of_row = factors_of(gemm), partial(factor_of, gemm)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        w: T.Buffer((E, RB, KB, i64(BLOCK_WORDS)), "uint32"),
        scales: T.Buffer((E, RB, SB, SN), gemm.scale_dtype),
        factor: T.Buffer(factors, "float32"),
        bias: T.Buffer((E, R), "float32"),
        row_scale_handle: T.handle,
        order_handle: T.handle,
        expert_handle: T.handle,
        out_handle: T.handle,
        alpha: T.float32,
        limit: T.float32,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles, tokens = T.int64(), T.int64()
        x = T.match_buffer(x_handle, (tokens, KB * i64(64)), gemm.multiplied)
        row_scale = T.match_buffer(row_scale_handle, (tokens,), "float32")
        order = T.match_buffer(order_handle, (tiles, N), "int32")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        out = T.match_buffer(out_handle, (tiles, N, R // i64(2)), dtype)
        C = T.sblock_alloc_buffer((tiles, N, R), "float32")
        multiply(_gathered(x, order, gemm.top_k), in_table(expert_of_tile), w, scales, C, tiles)
        for t, i, q, p in T.grid(tiles, N, R // sixteen, eight):
            with T.sblock("epilogue"):
                vt, vi, vq, vp = T.axis.remap("SSSS", [t, i, q, p])
                out[vt, vi, column(vq, vp)] = tirx.Cast(
                    dtype,
                    act(
                        T.fma(
                            C[vt, vi, vq * sixteen + vp],
                            of_row(factor, expert_of_tile[vt], 0, vq * sixteen + vp)
                            * left
                            * row_scale[order[vt, vi] // TK],
                            bias[expert_of_tile[vt], vq * sixteen + vp],
                        ),
                        T.fma(
                            C[vt, vi, vq * sixteen + eight + vp],
                            of_row(factor, expert_of_tile[vt], 1, vq * sixteen + eight + vp)
                            * left
                            * row_scale[order[vt, vi] // TK],
                            bias[expert_of_tile[vt], vq * sixteen + eight + vp],
                        ),
                        alpha,
                        limit,
                        sigmoid,
                    ),
                )

    return main


def _square(gemm: MoeGemm, token_tile: int) -> PrimFunc:
    """GEMM 1 without gates: relu2."""
    E, R, RB, KB, SB, SN = sizes(gemm)
    N, TK, dtype = i64(token_tile), i64(gemm.top_k), gemm.dtype
    multiply = products(gemm, token_tile)
    left = T.float32(left_over(gemm.fmt, gemm.zeros, gemm.multiplied))
    factors, of_row = factors_of(gemm), partial(factor_of, gemm)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        w: T.Buffer((E, RB, KB, i64(BLOCK_WORDS)), "uint32"),
        scales: T.Buffer((E, RB, SB, SN), gemm.scale_dtype),
        factor: T.Buffer(factors, "float32"),
        bias: T.Buffer((E, R), "float32"),
        row_scale_handle: T.handle,
        order_handle: T.handle,
        expert_handle: T.handle,
        out_handle: T.handle,
        alpha: T.float32,
        limit: T.float32,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles, tokens = T.int64(), T.int64()
        x = T.match_buffer(x_handle, (tokens, KB * i64(64)), gemm.multiplied)
        row_scale = T.match_buffer(row_scale_handle, (tokens,), "float32")
        order = T.match_buffer(order_handle, (tiles, N), "int32")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        out = T.match_buffer(out_handle, (tiles, N, R), dtype)
        C = T.sblock_alloc_buffer((tiles, N, R), "float32")
        multiply(_gathered(x, order, gemm.top_k), in_table(expert_of_tile), w, scales, C, tiles)
        for t, i, r in T.grid(tiles, N, R):
            with T.sblock("epilogue"):
                vt, vi, vr = T.axis.remap("SSS", [t, i, r])
                out[vt, vi, natural(vr)] = tirx.Cast(
                    dtype,
                    relu2(
                        T.fma(
                            C[vt, vi, vr],
                            of_row(factor, expert_of_tile[vt], 0, vr)
                            * left
                            * row_scale[order[vt, vi] // TK],
                            bias[expert_of_tile[vt], vr],
                        )
                    ),
                )

    return main


def _scattered(gemm: MoeGemm, token_tile: int) -> PrimFunc:
    """GEMM 2: its rows of x are sorted, and its results are scattered."""
    E, R, RB, KB, SB, SN = sizes(gemm)
    N, dtype = i64(token_tile), gemm.dtype
    multiply = products(gemm, token_tile)
    left = T.float32(left_over(gemm.fmt, gemm.zeros, gemm.multiplied))
    factors, of_row = factors_of(gemm), partial(factor_of, gemm)

    @T.prim_func(s_tir=True)
    def main(
        x_handle: T.handle,
        w: T.Buffer((E, RB, KB, i64(BLOCK_WORDS)), "uint32"),
        scales: T.Buffer((E, RB, SB, SN), gemm.scale_dtype),
        factor: T.Buffer(factors, "float32"),
        bias: T.Buffer((E, R), "float32"),
        row_scale_handle: T.handle,
        order_handle: T.handle,
        expert_handle: T.handle,
        out_handle: T.handle,
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        tiles, slots = T.int64(), T.int64()
        x = T.match_buffer(x_handle, (tiles, N, KB, i64(64)), gemm.multiplied)
        row_scale = T.match_buffer(row_scale_handle, (tiles, N), "float32")
        order = T.match_buffer(order_handle, (tiles, N), "int32")
        expert_of_tile = T.match_buffer(expert_handle, (tiles,), "int32")
        out = T.match_buffer(out_handle, (slots, R), dtype)
        C = T.sblock_alloc_buffer((tiles, N, R), "float32")
        multiply(sorted_rows(x), in_table(expert_of_tile), w, scales, C, tiles)
        for t, i, r in T.grid(tiles, N, R):
            with T.sblock("epilogue"):
                vt, vi, vr = T.axis.remap("SSS", [t, i, r])
                out[order[vt, vi], natural(vr)] = tirx.Cast(
                    dtype,
                    T.fma(
                        C[vt, vi, vr],
                        of_row(factor, expert_of_tile[vt], None, vr) * left * row_scale[vt, vi],
                        bias[expert_of_tile[vt], vr],
                    ),
                )

    return main
