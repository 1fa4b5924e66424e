"""A kernel of any spec, compiled in this process for any level, held against the reference.

Arguments lie at addresses aligned to their elements and no further, between bytes of 0xFF: what a
kernel reads beside an input is NaN, what it writes beside an output is seen, and what it forgets in
an output stays 0xFF (NaN in every float type).
"""

import json

import numpy as np
import pytest
import torch

from blockscale import catalog
from blockscale.base import host
from blockscale.base.targets import CPU_TARGETS
from blockscale.building.space import trace_json
from blockscale.lower.cpu import compile_cpu
from blockscale.runtime import jit
from tests.kit import compiled as compiler
from tests.kit.helpers import (
    DTYPES,
    packed_tensor,
    random_matrix,
    random_weight,
    same,
    same_bytes,
    tensor,
)
from tests.kit.helpers import widen as wide
from tests.reference import core as ref
from tests.reference import linear as layers

LEVELS = tuple(CPU_TARGETS)
TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 2e-3}  # see test_linear.py
GUARD = 64


device = "cpu"
"""Where kernels run: ``pytest --device cuda`` repeats the tests of the ops on a GPU."""


def needs(level):
    """Skip the test where the machine lacks what ``level`` needs, and say what."""
    if device == "cuda" and level != host.level():
        pytest.skip("CPU levels make no difference to a GPU")
    if missing := host.lacking(level):
        pytest.skip(f"this CPU lacks {', '.join(missing)}, which level {level} needs")


def compiled(spec, level, traces=None, changed=""):
    """Return the exported function of ``spec`` with these traces (None: default schedules).

    ``changed``: what a test has changed in the package that decides the code.
    """
    if device == "cuda":
        return on_gpu(jit.function(spec, "cuda"))

    def made():
        return compile_cpu(catalog.exported(spec, level, traces or {}), catalog.target(level))

    steps = {tag: trace_json(trace) for tag, trace in (traces or {}).items()}
    key = jit._digest(level), spec.name, json.dumps(steps), changed
    return compiler.module(key, made)[spec.name]


def on_gpu(function):
    """Return ``function`` for CPU tensors: they go to the GPU, between bytes of 0xFF, and back."""

    def call(*values):
        there = {}
        for value in values:
            if isinstance(value, torch.Tensor) and value.data_ptr() not in there:
                size = value.numel() * value.element_size()
                memory = torch.full((size + 2 * GPU_GUARD,), 0xFF, dtype=torch.uint8, device="cuda")
                view = memory[GPU_GUARD : GPU_GUARD + size].view(value.dtype).view(value.shape)
                there[value.data_ptr()] = memory, view.copy_(value)
        function(*(there[v.data_ptr()][1] if isinstance(v, torch.Tensor) else v for v in values))
        for value in values:
            if isinstance(value, torch.Tensor):
                memory, view = there[value.data_ptr()]
                assert (memory[:GPU_GUARD] == 0xFF).all()
                assert (memory[-GPU_GUARD:] == 0xFF).all()
                value.copy_(view)

    return call


GPU_GUARD = 256


def place(like):
    """Return memory of 0xFF and a view of ``like``'s shape and dtype in its middle."""
    item, size = like.element_size(), like.numel() * like.element_size()
    memory = torch.full((2 * GUARD + item + size,), 0xFF, dtype=torch.uint8)
    return memory, memory[GUARD + item : GUARD + item + size].view(like.dtype).view(like.shape)


def untouched(memory, view):
    """Return whether the bytes around ``view`` are still 0xFF."""
    start = GUARD + view.element_size()
    size = view.numel() * view.element_size()
    return bool((memory[:start] == 0xFF).all() and (memory[start + size :] == 0xFF).all())


def call(kernel, inputs, outputs):
    """Call a compiled function with copies of ``inputs``; return outputs like those given."""
    placed = [place(value) for value in (*inputs, *outputs)]
    for (_, view), value in zip(placed, inputs, strict=False):
        view.copy_(value)
    kernel(*(view for _, view in placed))
    for (memory, view), value in zip(placed, inputs, strict=False):
        assert untouched(memory, view)
        assert torch.equal(view.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    for memory, view in placed[len(inputs) :]:
        assert untouched(memory, view)
    return [view for _, view in placed[len(inputs) :]]


def byte_tensor(*shape):
    """Return an uninitialised uint8 tensor."""
    return torch.empty(shape, dtype=torch.uint8)


def check_linear(kernel, spec, rows):
    """Compare a linear kernel with float64, row by row."""
    codes, byte = random_weight(spec.n, spec.k, spec.fmt, seed=rows)
    rng = np.random.default_rng(rows)
    x = tensor(rng.standard_normal((rows, spec.k)) * np.exp2(rng.integers(-5, 6, (rows, 1))))
    if spec.activation != "none":  # sums of size 1: far from it, activations lose many digits
        x = tensor(rng.standard_normal((rows, spec.k)) / (4 * spec.k**0.5))
    x, bias = x.to(DTYPES[spec.dtype]), tensor(rng.standard_normal(spec.n))
    g = np.float32([0.37, 0.21] if spec.gated else [0.37])
    # With one column, a sum that cancels would have no useful relative error.
    codes, x, bias = (codes & 7, x.abs(), bias.abs()) if spec.cols == 1 else (codes, x, bias)
    inputs = [x, packed_tensor(codes), torch.from_numpy(byte), tensor(g), bias]
    added = tensor(rng.standard_normal((rows, spec.cols)), spec.dtype) if spec.residual else None
    y = torch.empty(rows, spec.cols, dtype=DTYPES[spec.out_dtype])
    [y] = call(kernel, [*inputs, *([] if added is None else [added])], [y])
    w = ref.weight(codes, byte, spec.fmt) * np.repeat(g.astype(float), spec.n // len(g))[:, None]
    residual = None if added is None else wide(added)
    truth = layers.layer(wide(x), w, bias.numpy(), spec.activation, spec.gated, residual)
    assert ref.row_error(wide(y), truth).max(initial=0) < TOLERANCE[spec.out_dtype]


def check_weights(kernel, spec, rows):
    """Read every weight back with one-hot rows, ``rows`` at a time: exact in every dtype."""
    codes, byte = random_weight(spec.n, spec.k, spec.fmt, seed=rows)
    truth = ref.round_to(ref.weight(codes, byte, spec.fmt), spec.dtype).T
    eye, weights = torch.eye(spec.k, dtype=DTYPES[spec.dtype]), torch.from_numpy(byte)
    rest = [packed_tensor(codes), weights, tensor([1.0]), torch.zeros(spec.n)]
    for start in range(0, spec.k, rows):
        x = eye[start : start + rows]
        [y] = call(kernel, [x, *rest], [x.new_empty(len(x), spec.n)])
        assert (wide(y) == truth[start : start + rows]).all()


def check_quantize(kernel, spec, rows, blocks):
    """Compare codes and scale bytes."""
    x = tensor(random_matrix((rows, blocks * spec.block), spec.fmt, rows), spec.dtype)
    amax = ref.block_amax(wide(x), spec.fmt) * np.float32(0.7) if spec.given_amax else None
    codes, byte = ref.quantize(wide(x), spec.fmt, 0.37, amax, spec.rounding)
    byte = byte if spec.layout == "linear" else ref.swizzle(byte)
    given = [torch.from_numpy(amax.reshape(-1))] if spec.given_amax else []
    outputs = [byte_tensor(rows, x.shape[1] // 2), byte_tensor(*byte.shape)]
    packed, scale = call(kernel, [x, *given, tensor([0.37])], outputs)
    same_bytes(packed.numpy(), ref.pack(codes))
    same_bytes(scale.numpy(), byte)


def check_dequantize(kernel, spec, rows, blocks):
    """Compare every bit of any codes at any scales."""
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 16, (rows, blocks * spec.block), dtype=np.uint8)
    byte = rng.integers(0, 256, (rows, blocks), dtype=np.uint8)
    stored = torch.from_numpy(byte if spec.layout == "linear" else ref.swizzle(byte))
    out = torch.empty(codes.shape, dtype=DTYPES[spec.dtype])
    [out] = call(kernel, [packed_tensor(codes), stored, tensor([0.37])], [out])
    same(wide(out), ref.dequantize(codes, byte, spec.fmt, 0.37, spec.dtype))


def check_copy(kernel, spec, rows, cols):
    """Compare swizzled or unswizzled bytes."""
    scale = np.random.default_rng(rows).integers(1, 256, (rows, cols), dtype=np.uint8)
    pair = [torch.from_numpy(scale), torch.from_numpy(ref.swizzle(scale))]
    given, wanted = pair if spec.op == "swizzle" else pair[::-1]
    [out] = call(kernel, [given], [torch.empty_like(wanted)])
    same_bytes(out.numpy(), wanted.numpy())


def check_sweep(kernel, spec, blocks):
    """Compare the best maxima; float32 blocks of 16 and more have no near-ties."""
    x = tensor(np.random.default_rng(blocks).standard_normal((blocks, spec.block_size)))
    candidates = torch.from_numpy(ref.fp8_scale_candidates())
    inputs = [x.to(DTYPES[spec.dtype]), tensor([4.25]), candidates]
    [best] = call(kernel, inputs, [torch.empty(blocks)])
    same(best.numpy(), ref.scale_sweep(wide(inputs[0]), 4.25, spec.block_size)[1])


def linear_rows():
    """Return row counts at and beside every bucket's limit and every whole tile of rows."""
    edges = {0, 1, 2, 3, 5, 130}
    for bucket in catalog.gemm.LINEAR_BUCKETS:
        for edge in (bucket.tile, 2 * bucket.tile, bucket.limit or 0):
            edges |= {max(edge - 1, 0), edge, edge + 1}
    return sorted(edges)


SHAPES = [(1, 1), (2, 3), (5, 3), (1, 16), (1, 17), (7, 16), (3, 17), (130, 5), (33, 33)]
"""Rows and blocks (or columns of scales) of the ops with any number of columns."""


def check(kernel, spec, rows=None):
    """Compare a compiled function of ``spec`` with the reference, on ``rows`` or on many sizes."""
    if spec.op == "linear":
        for count in linear_rows() if rows is None else [rows]:
            check_linear(kernel, spec, count)
        plain = spec.activation == "none" and not spec.residual
        for bucket in catalog.gemm.LINEAR_BUCKETS if rows is None and plain else []:
            check_weights(kernel, spec, bucket.rows)
    elif spec.op == "scale_sweep":
        for count in (1, 15, 16, 17, 130):
            check_sweep(kernel, spec, count)
    else:
        one = {"quantize": check_quantize, "dequantize": check_dequantize}.get(spec.op, check_copy)
        for shape in SHAPES:
            one(kernel, spec, *shape)
