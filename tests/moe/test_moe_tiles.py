"""The grouped GEMM of an MoE layer in whole tiles, compiled as it is for the CPU, against float64.

Weights are those of `prepare_moe_weights` in layout tiles64, or tiles64e.  Decoded weights are
exact but for int4's, which are rounded to 16 bits once, as is the output: half a step of bfloat16
is 2^-9.
"""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.sym import Analyzer

from blockscale.base.sizes import round_up
from blockscale.ops.moe.tiles import K_ORDER, natural_order
from blockscale.specs.plans.moe import MoeGemm, scale_count
from blockscale.tir.moe.tiles import K_TILE, ROW_TILE, moe_tiles, natural
from tests.kit.half_tensors import fetch, tensor
from tests.kit.moe_harness import bits, blocks_of, host, prepared, values
from tests.reference import moe as moe

EXPERTS, TOP_K, INTERMEDIATE, TOKEN_TILE = 3, 2, 128, 8
LIMIT = 2.0**-7
"""Two roundings to bfloat16, in the norm of a row."""

CASES = [
    ("nvfp4", 16, False, "bfloat16", "swiglu"),
    ("nvfp4", 16, False, "float16", "gelu_tanh"),
    ("mxfp4", 32, False, "bfloat16", "swiglu_oai"),
    ("int4", 128, False, "bfloat16", "swiglu"),
    ("int4", 64, True, "float16", "relu2"),
    ("int4", 32, True, "bfloat16", "swiglu"),
    ("nvfp4", 16, False, "bfloat16", "none"),
    ("mxfp4", 32, False, "float16", "none"),
    ("int4", 32, False, "bfloat16", "none"),
    ("int4", 64, True, "bfloat16", "none"),
    ("mxfp4", 32, False, "bfloat16", "none", "tiles64e"),
    ("nvfp4", 16, False, "bfloat16", "swiglu", "tiles64e"),
]


def padded(array, *shape):
    """Return ``array`` with zeros behind it, in each direction."""
    out = np.zeros(shape, array.dtype)
    out[tuple(slice(size) for size in array.shape)] = array
    return out


def tables(ids):
    """Return padded slots [tiles, 8] and the expert of each tile."""
    order, blocks = blocks_of(ids, EXPERTS, TOKEN_TILE)
    slots = np.full((len(blocks), TOKEN_TILE), ids.size, np.int32)
    for tile, (head, first, _, _) in enumerate(blocks):
        slots[tile, : head & 0xFFFF] = order[first : first + (head & 0xFFFF)]
    return slots, (blocks[:, 0] >> 16).astype(np.int32)


def operands(gemm, made):
    """Return words, scales, factors and biases, padded as the function wants them."""
    names = ("w13", "w13_scale", "w13_global", "w13_bias")
    found = [getattr(made, n if gemm.gather else n.replace("13", "2")) for n in names]
    w, scales, factor, bias = (host(t) for t in found)
    rows, k = round_up(gemm.rows, ROW_TILE), round_up(gemm.k, K_TILE)
    words = w.view(np.uint32).reshape(*w.shape[:3], 512)
    kind = np.uint16 if gemm.fmt == "int4" else np.uint8
    count = 4 * scale_count(gemm.fmt, gemm.group, gemm.zeros)
    stored = scales.view(kind).reshape(*scales.shape[:3], count)
    depth = k // max(64, gemm.group)
    return (
        padded(words, EXPERTS, rows // 64, k // 64, 512),
        padded(stored, EXPERTS, rows // 64, depth, count),
        padded(factor, EXPERTS, rows) if gemm.bytewise else factor,
        padded(bias, EXPERTS, rows),
    )


@pytest.mark.filterwarnings("ignore:.*rounding nvfp4 weights to E4M3")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_against_float64(case):
    """Random routing with an expert of two tiles and one without tokens; bias and row scales."""
    fmt, group, zeros, dtype, activation, *layout = case
    hidden, inner = 256 if group == 128 else 192, INTERMEDIATE
    first = activation != "none"
    layer = moe.random_layer(
        EXPERTS, hidden, inner, fmt, group=group, zeros=zeros, bias=True,
        activation=activation if first else "swiglu", scale_dtype=dtype, seed=3,
    )  # fmt: skip
    made = prepared(layer, dtype, *layout)
    ids = np.array([[0, 2]] * 9 + [[2, 0]] * 3, np.int32)
    slots, experts = tables(ids)
    gated = 2 if first and activation != "relu2" else 1
    rows, k = (
        (round_up(inner, 64) * gated, round_up(hidden, 64))
        if first
        else (round_up(hidden, 64), round_up(inner, 64))
    )
    gemm = MoeGemm(
        fmt, group, zeros, dtype, activation, EXPERTS, rows, k, TOP_K, bytewise=bool(layout)
    )
    columns = hidden if first else inner
    count = len(ids) if first else ids.size
    x = moe.random_hidden(count, columns, dtype, 5)
    factor = np.exp2(np.random.default_rng(1).uniform(-1, 1, count)).astype(np.float32)
    stored = np.zeros((count, round_up(columns, K_TILE)), np.uint16)
    stored[:, :columns] = bits(x, dtype)
    stored = stored.reshape(count, -1, 64)[:, :, list(K_ORDER)].reshape(count, -1)
    got = run(gemm, made, (slots, experts), stored, factor)
    w13, w2 = layer.dense()
    for tile, expert in enumerate(experts):
        for place, flat in enumerate(slots[tile]):
            if flat == ids.size:
                continue
            row = flat // TOP_K if first else flat
            sums = (w13 if first else w2)[expert] @ x[row].astype(np.float64) * factor[row]
            sums += (layer.w13_bias if first else layer.w2_bias)[expert]
            if first:
                sums = moe.activate(sums[None], activation, layer.alpha, layer.limit)[0]
                line = got[tile, place, : round_up(inner, 64)].reshape(-1, 64)
                found = np.empty_like(line)
                found[:, list(K_ORDER)] = line
                found = found.reshape(-1)[:inner]
            else:
                found = got[flat, :hidden]
            assert np.linalg.norm(found - sums) <= LIMIT * np.linalg.norm(sums)


def exact_sigmoid(value):
    """What GPUs approximate."""
    return T.float32(1) / (T.float32(1) + T.exp(-value))


def run(gemm, made, table, stored, factor):
    """Compile and run the function; return its output as float64."""
    slots, experts = table
    words, scales, factors, bias = operands(gemm, made)
    tiles, rows = len(experts), round_up(gemm.rows, ROW_TILE)
    ends = np.zeros((1, stored.shape[1]), np.uint16)
    if gemm.gather:
        x, scale = np.concatenate([stored, ends]), np.append(factor, np.float32(0))
        shape = (tiles, TOKEN_TILE, rows // 2 if gemm.gated else rows)
        alpha, limit = {"swiglu_oai": (1.702, 7.0)}.get(gemm.activation, (1.0, np.inf))
        numbers = [alpha, limit]
    else:  # sorted, tile by tile
        x = np.concatenate([stored, ends])[slots].reshape(tiles, TOKEN_TILE, -1, 64)
        scale = np.append(factor, np.float32(0))[slots]
        shape, numbers = (slots.max() + 1, rows), []
    func = moe_tiles(gemm, None, TOKEN_TILE, exact_sigmoid)
    built = tvm.compile(tvm.IRModule({"main": func}), target="llvm")["main"]
    empty = np.zeros(shape, np.uint16)
    out = tensor(empty, gemm.dtype)
    plain = [factors, bias, scale, slots, experts]
    built(
        tensor(x, gemm.dtype),
        tensor(words, "uint32"),
        tensor(scales, gemm.scale_dtype),
        *(tensor(a, str(a.dtype)) for a in plain),
        out,
        *numbers,
    )
    return values(fetch(out, empty), gemm.dtype)


def test_rows_of_the_layout():
    """TensorIR's idea of the order of rows is that of the layout."""
    order = natural_order(64).tolist()
    analyzer = Analyzer()
    found = [int(analyzer.simplify(natural(tirx.IntImm("int64", r)))) for r in range(64)]
    assert found == order
