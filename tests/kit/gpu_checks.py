"""The torch functions on tensors of any device, held against the NumPy reference.

Outputs that are passed start as 0xFF and lie between bytes of 0xFF; memory that the functions
allocate held 0xFF before.
"""

from functools import cache
from math import prod

import numpy as np
import torch

import blockscale as bs
from blockscale.compat import flashinfer as fi
from blockscale.ops import checks
from blockscale.runtime import jit
from blockscale.specs import Spec
from tests.hardware.kernels import NAMES
from tests.kit import acts, norms
from tests.kit.helpers import DTYPES, packed_tensor, random_matrix, same, same_bytes, tensor
from tests.quant.test_scale_sweep import judge
from tests.reference import core as ref
from tests.reference import fused as fused

FP4 = checks.FP4
U8 = torch.uint8
GUARD = 256
DISTINCT = 131
"""Rows that the reference computes; more rows repeat them, at a distance that no tile has."""


def only_listed(monkeypatch):
    """Let a kernel that gpu_kernels does not list fail the test that asks for it."""
    found = jit.function

    def function(spec, *kind):
        assert spec.name in NAMES, f"add {spec.name} to gpu_kernels"
        return found(spec, *kind)

    monkeypatch.setattr(jit, "function", function)


def bytes_of(value):
    """Return the bytes of a tensor of one-byte elements, in its shape."""
    return value.view(U8).cpu().numpy()


def floats(value):
    """Return a float tensor's values as float32."""
    return value.detach().cpu().to(torch.float32).numpy()


def one(value, device):
    """Return a global scale, or None for None."""
    return None if value is None else torch.tensor([value], dtype=torch.float32, device=device)


class Poisoned:
    """Makes outputs of 0xFF between bytes of 0xFF, and knows whether the latter still are."""

    def __init__(self, device):
        self.device = device
        self.memories = []

    def __call__(self, shape, dtype):
        """Return an output."""
        size = prod(shape) * dtype.itemsize
        memory = torch.full((size + 2 * GUARD,), 0xFF, dtype=U8, device=self.device)
        self.memories.append(memory)
        return memory[GUARD : GUARD + size].view(dtype).view(shape)

    def check(self):
        """Assert that nothing beside the outputs was written."""
        for memory in self.memories:
            assert bool((memory[:GUARD] == 0xFF).all() and (memory[-GUARD:] == 0xFF).all())


def dirty_memory(device, *sizes):
    """Leave 0xFF in memory that the allocator hands out next to requests of these sizes."""
    held = [torch.full((size,), 0xFF, dtype=U8, device=device) for size in sizes for _ in range(4)]
    del held


# ------------------------------------------------------------------------------------------ norms
def norm_outputs(spec, lead, make, flat=True):
    """Return all outputs that the function of ``spec`` can be given, by its names."""
    padded = checks.padded_shape(prod(lead), spec.blocks)
    linear, dtype = (*lead, spec.blocks), checks.SCALE_DTYPES[spec.scale_format][0]
    tiled = (prod(padded),) if flat else padded
    shape = linear if spec.layout == "linear" else tiled
    found = {"y_fp4": make((*lead, spec.hidden // 2), FP4 if flat else U8)}
    found["block_scale"] = make(shape, dtype if flat else U8)
    if spec.layout == "both":
        found["block_scale_unswizzled"] = make(linear, dtype)
    if spec.y_out:
        found["y_out"] = make((*lead, spec.hidden), DTYPES[spec.dtype])
    return found


def norm_call(spec, given, g=None, eps=1e-6, pdl=None, **outputs):
    """Call the function whose kernel ``spec`` is; return what it returns."""
    module = fi if spec.convention == "flashinfer" else bs
    function = module.add_rmsnorm_fp4quant if spec.residual else module.rmsnorm_fp4quant
    options = {"output_both_sf_layouts": True} if spec.layout == "both" else {}
    default = checks.SCALE_FORMAT[spec.block_size]
    got = function(
        **given,
        global_scale=g,
        eps=eps,
        block_size=spec.block_size,
        scale_format=None if spec.scale_format == default else spec.scale_format,
        is_sf_swizzled_layout=spec.layout == "128x4",
        enable_pdl=pdl,
        **options,
        **outputs,
    )
    assert len(got) == (3 if spec.layout == "both" else 2)
    for name, value in zip(("y_fp4", "block_scale", "block_scale_unswizzled"), got, strict=False):
        assert name not in outputs or value is outputs[name]
    return got


def compare_norm(spec, lead, got, want, residual=None, y_out=None):
    """Compare every byte with the reference's, [rows, ...]; padding must be zero."""
    packed, scale, *linear = got
    assert packed.shape == (*lead, spec.hidden // 2)
    same_bytes(bytes_of(packed).reshape(want["packed"].shape), want["packed"])
    stored = want["scale"] if spec.layout == "linear" else ref.swizzle(want["scale"])
    same_bytes(bytes_of(scale).reshape(stored.shape), stored)
    if linear:
        assert linear[0].shape == (*lead, spec.blocks)
        same_bytes(bytes_of(linear[0]).reshape(want["scale"].shape), want["scale"])
    if y_out is not None:
        same(floats(y_out).reshape(want["y"].shape), want["y"])
    if residual is not None:
        same(floats(residual).reshape(want["residual"].shape), want["residual"])


def check_norm(name, given, leads, device, g=0.013, eps=1e-6):
    """Compare all outputs, allocated and given, for rows that begin with ``given``'s.

    ``leads``: shapes of the rows.
    """
    spec = Spec.parse(name)
    want = norms.expected(spec, given, 1.0 if g is None else g, eps)
    for lead in leads:
        index = np.arange(prod(lead)) % len(given["input"])
        rows = {key: value[index] for key, value in want.items() if value is not None}
        for own in (False, True, True):
            on = {k: v if k == "weight" else v[index] for k, v in given.items()}
            on = {k: v.to(device) for k, v in on.items()}
            on = {k: v if k == "weight" else v.view(*lead, -1) for k, v in on.items()}
            make = Poisoned(device)
            outputs = norm_outputs(spec, lead, make, flat=lead[0] % 2 == 0)
            if not own:
                dirty_memory(device, *(value.nbytes for value in outputs.values()))
                outputs = {k: v for k, v in outputs.items() if k == "y_out"}
            got = norm_call(spec, on, one(g, device), eps, own or None, **outputs)
            compare_norm(spec, lead, got, rows, on.get("residual"), outputs.get("y_out"))
            same(floats(on["input"]).reshape(len(index), -1), floats(given["input"])[index])
            make.check()


# ------------------------------------------------------------------------------------ activations
GATED = {
    "silu": bs.silu_and_mul_fp4quant,
    "gelu_tanh": bs.gelu_tanh_and_mul_fp4quant,
    "swiglu": bs.swiglu_fp4quant,
}


def act_call(spec, given, g, packed=None, scale=None, pdl=None, numbers=()):
    """Call the function whose kernel ``spec`` is."""
    if spec.convention == "flashinfer":
        tiled, eight = spec.layout != "linear", spec.layout == "8x4"
        if spec.gated:
            return fi.silu_and_mul_nvfp4_quantize(given["input"], g, 16, tiled, eight, pdl)
        ue8m0 = spec.scale_format == "ue8m0"
        options = {"is_sf_8x4_layout": eight, "enable_pdl": pdl}
        return fi.fp4_quantize(given["input"], g, spec.block_size, ue8m0, tiled, **options)
    options = {"block_size": spec.block_size, "scale_format": spec.scale_format, "enable_pdl": pdl}
    if spec.grouped:
        x, mask = given["input"], given["mask"]
        if spec.gated:
            return bs.silu_and_mul_grouped_fp4quant(x, mask, packed, scale, g, **options)
        return bs.grouped_quantize(x, mask, g, packed, scale, **options)
    options["is_sf_swizzled_layout"] = spec.layout == "128x4"
    options |= dict(zip(("alpha", "beta", "limit"), numbers, strict=False))
    return GATED[spec.activation](given["input"], packed, scale, g, **options)


def compare_act(spec, given, scales, got, numbers=(), unwritten=None):
    """Compare what is not next to a tie, as `test_act_quantize`; ``unwritten``: see check_act."""
    lead = (slice(None),) if spec.grouped else (None,)
    cols = given["input"].shape[-1] // (2 if spec.gated else 1)
    rows = given["input"].shape[-2]
    byte = bytes_of(got[1])
    packed = bytes_of(got[0]).reshape(-1, rows, cols // 2)
    for e, x in enumerate(floats(given["input"])[lead]):
        used = int(given["mask"][e]) if spec.grouped else rows
        found = acts.values(spec, x, numbers)
        for bound in found:
            bound[used:] = 0
        blocks, elements = acts.surely(spec, *found)
        assert min(blocks.mean(), elements.mean()) >= acts.COMPARED
        codes, linear = acts.encoded(spec, found[0], scales[e])
        want, sure = acts.stored(spec, linear), acts.stored(spec, ~blocks) == 0
        part = byte[e] if spec.grouped else byte.reshape(want.shape)
        same_bytes(np.where(sure, part, want), want)
        found_codes = ref.unpack(packed[e])
        same_bytes(np.where(elements, found_codes, codes)[:used], codes[:used])
        if unwritten is not None:
            assert (packed[e, used:] == unwritten).all()


def check_act(name, rows, blocks, device, g=0.37, numbers=(), seed=0):
    """Compare allocated and given outputs; codes of rows that no mask uses stay 0xFF."""
    spec = Spec.parse(name)
    given = acts.inputs(spec, rows, blocks, seed=seed)
    experts = len(given["input"]) if spec.grouped else 1
    scales = (g * np.exp2(np.arange(experts))).astype(np.float32)
    on = {key: value.to(device) for key, value in given.items()}
    gs = torch.from_numpy(scales).to(device)
    lead = given["input"].shape[:-1]
    cols = blocks * spec.block
    for own in (False, True, True):
        if not own or spec.convention == "flashinfer":
            dirty_memory(device, prod(lead) * cols // 2, prod(lead) * blocks, 512 * rows * blocks)
            got = act_call(spec, on, gs, pdl=own, numbers=numbers)
            compare_act(spec, given, scales, got, numbers)
            continue
        make = Poisoned(device)
        padded = checks.padded_shape(rows, blocks)
        shape = (*lead, blocks)
        if spec.layout != "linear":
            shape = (*lead[:-1], *padded) if spec.grouped else (prod(padded),)
        packed = make((*lead, cols // 2), U8)
        scale = make(shape, checks.SCALE_DTYPES[spec.scale_format][0])
        got = act_call(spec, on, gs, packed, scale, True, numbers)
        assert got[0] is packed
        assert got[1] is scale
        compare_act(spec, given, scales, got, numbers, 0xFF)
        make.check()


# ----------------------------------------------------------------------------------------- blocks
def check_quantize(name, rows, blocks, device, g=0.37):
    """Compare codes and scale bytes, allocated and given."""
    spec = Spec.parse(name)
    x = tensor(random_matrix((rows, blocks * spec.block), spec.fmt, rows), spec.dtype)
    amax = ref.block_amax(floats(x), spec.fmt) * np.float32(0.7) if spec.given_amax else None
    codes, byte = ref.quantize(floats(x), spec.fmt, 1.0 if g is None else g, amax, spec.rounding)
    byte = byte if spec.layout == "linear" else ref.swizzle(byte)
    given = None if amax is None else torch.from_numpy(amax).to(device)
    for own in (False, True, True):
        make, outputs = Poisoned(device), {}
        if own:
            outputs = {
                "packed": make((rows, x.shape[1] // 2), U8),
                "block_scale": make(byte.shape, U8),
            }
        dirty_memory(device, codes.size // 2, byte.size)
        args = (x.to(device), spec.fmt, one(g, device), spec.layout, given, spec.rounding)
        packed, scale = bs.quantize(*args, **outputs)
        same_bytes(bytes_of(packed), ref.pack(codes))
        same_bytes(bytes_of(scale), byte)
        make.check()


def check_dequantize(name, rows, blocks, device, g=0.37):
    """Compare every bit of any codes at any scales, NaN and the ends of the range included."""
    spec = Spec.parse(name)
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 16, (rows, blocks * spec.block), dtype=np.uint8)
    byte = rng.integers(0, 256, (rows, blocks), dtype=np.uint8)
    want = ref.dequantize(codes, byte, spec.fmt, 1.0 if g is None else g, spec.dtype)
    stored = torch.from_numpy(byte if spec.layout == "linear" else ref.swizzle(byte)).to(device)
    for own in (False, True, True):
        make = Poisoned(device)
        out = make(codes.shape, DTYPES[spec.dtype]) if own else None
        dirty_memory(device, want.size * DTYPES[spec.dtype].itemsize)
        args = (packed_tensor(codes).to(device), stored, spec.fmt, one(g, device), spec.layout)
        got = bs.dequantize(*args, DTYPES[spec.dtype], out=out)
        same(floats(got), want)
        make.check()


def check_swizzle(rows, cols, device):
    """Compare every byte there and back; padding is zero although the memory was not."""
    scale = np.random.default_rng(rows).integers(1, 256, (rows, cols), dtype=np.uint8)
    want, given = ref.swizzle(scale), torch.from_numpy(scale).to(device)
    for own in (False, True, True):
        make = Poisoned(device)
        dirty_memory(device, want.size, scale.size)
        swizzled = bs.swizzle_scales(given, out=make(want.shape, U8) if own else None)
        same_bytes(bytes_of(swizzled), want)
        out = make(scale.shape, U8) if own else None
        same_bytes(bytes_of(bs.unswizzle_scales(swizzled, rows, cols, out=out)), scale)
        make.check()


# ------------------------------------------------------------------------------------------ sweep
@cache
def sweep_table():
    """Return the candidates [126]."""
    return ref.fp8_scale_candidates()


def sweep_index(x, g, device, block_size=16):
    """Return the index of each block's result in the table of fl(g * candidate)."""
    dirty_memory(device, x.numel() // block_size * 4)
    got = floats(bs.nvfp4_fp8_scale_sweep(x.to(device), one(g, device), block_size))
    table = sweep_table() * np.float32(g)
    index = np.searchsorted(table, got)
    same(got, table[index])  # every result is a table entry, bit for bit
    return index


def check_sweep(x, g, device, block_size=16):
    """Hold the indices against the reference by the rule of test_scale_sweep."""
    return judge(sweep_index(x, g, device, block_size), x, g, block_size)


def check_losses(x, g, ours, theirs, share=1e-3):
    """Indices are equal, or their float64 losses are to 1e-6, in fewer than ``share`` blocks."""
    wrong = np.flatnonzero(ours != theirs)
    assert len(wrong) < share * len(ours)
    blocks, column = floats(x).reshape(len(ours), -1)[wrong], np.arange(len(wrong))
    losses = ref.sweep_losses(blocks, ref.sweep_scales(g, sweep_table()), np.float64)
    np.testing.assert_allclose(losses[ours[wrong], column], losses[theirs[wrong], column], 1e-6)


# ----------------------------------------------------------------------------------- CUDA graphs
def first_use_in_capture(libraries):
    """Capture the first call of all in this process; replay, and compare.

    No function is known, no code is loaded, and the tensor of the default scale does not exist.
    """
    for library in libraries:
        bs.load(library)
    spec = Spec.parse("add_rmsnorm_nvfp4_h512_both_y_f16")
    given = norms.inputs(spec, 9, seed=1)
    on = {key: value.cuda() for key, value in given.items()}
    outputs = norm_outputs(spec, (9,), Poisoned("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = norm_call(spec, on, **outputs)
        again = bs.swizzle_scales(got[2])
    same(floats(on["residual"]), floats(given["residual"]))  # nothing ran yet
    graph.replay()
    torch.cuda.synchronize()
    want = norms.expected(spec, given)
    compare_norm(spec, (9,), got, want, on["residual"], outputs["y_out"])
    same_bytes(bytes_of(again), ref.swizzle(want["scale"]))


def norm_chain(x, residual, weight, steps, dtype):
    """Return y and h of each step, rounded: y is the next input, h the next residual."""
    ys, residuals = [], [residual]
    for _ in range(steps):
        y, residual = fused.norm(x, residual, weight, 1e-6, dtype)
        x = ref.round_to(y, dtype)
        ys.append(x)
        residuals.append(residual)
    return ys, residuals
