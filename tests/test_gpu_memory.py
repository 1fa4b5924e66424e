"""GPU kernels of quantise, dequantise and swizzle, played by the emulator, against the reference.

Arguments lie between bytes of 0xFF, as in `kernels`; outputs start as 0xFF.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import reference as ref
import torch
from helpers import packed_tensor, random_matrix, same, same_bytes, tensor
from helpers import widen as wide
from kernels import byte_tensor

from blockscale.build import build
from blockscale.emulator import run_module
from blockscale.specs import Spec

ARCHS = ("sm_90a", "sm_100a")


@cache
def library(name, arch):
    """Build the exported function ``name``, with its default schedule, as PTX."""
    out = Path(mkdtemp(prefix="blockscale-test-")) / "kernels.so"
    build([name], out, level=arch, logs_dirs=[], ptx=True)
    return out


def emulated(name, arch):
    """Return a function that runs kernel ``name``; the emulator finds what is wrong with it."""

    def run(*values):
        played = run_module(library(name, arch), name, *values, target=arch)
        assert not [hazard for report in played.reports for hazard in report.hazards]

    return run


GUARD = 64  # bytes around an argument; allocations of torch begin at multiples of 64


def call(kernel, inputs, outputs):
    """Call a kernel with copies of ``inputs``; return outputs like those given."""
    memory = []
    for value in (*inputs, *outputs):
        size = value.numel() * value.element_size()
        memory.append(torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8))
    views = [
        bytes_[GUARD:-GUARD].view(value.dtype).view(value.shape)
        for bytes_, value in zip(memory, (*inputs, *outputs), strict=True)
    ]
    for view, value in zip(views, inputs, strict=False):
        view.copy_(value)
    kernel(*views)
    for bytes_ in memory:
        assert (bytes_[:GUARD] == 0xFF).all()
        assert (bytes_[-GUARD:] == 0xFF).all()
    return views[len(inputs) :]


def blocks_at_the_edges(spec, g):
    """Return x [rows, 8 blocks] for which a shortcut would go wrong at global scale ``g``.

    Zeros of both signs, NaN, infinity, maxima on both sides of where a scale is 0, subnormal,
    saturated, and elements next to what rounds to another code.
    """
    block, rng = spec.block, np.random.default_rng(5)
    with np.errstate(all="ignore"):
        sizes = np.float32(g) * np.exp2(np.arange(-14.0, 14)).astype(np.float32)
        x = rng.standard_normal((len(sizes), block)).astype(np.float32) * sizes[:, None]
        ties = np.float32(g) * np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * (block // 8))
        special = np.zeros((12, block), np.float32)
        special[1] = -0.0
        special[2, 3], special[3, 1], special[4, 0] = np.nan, np.inf, -np.inf
        special[5, ::2] = -0.0
        special[5, 1] = 1e-30
        special[6], special[7] = ties, -ties
        special[8] = ties * np.float32(1.0078125)
        special[9, 2], special[10] = 3e38, 1e-38
        special[11, 5] = -np.nan
        return np.concatenate([x, special]).reshape(-1, 8 * block)


def check_quantize(spec, arch, x, g):
    """Compare codes and scale bytes of ``x``, a tensor."""
    amax = ref.block_amax(wide(x), spec.fmt) * np.float32(0.7) if spec.given_amax else None
    codes, byte = ref.quantize(wide(x), spec.fmt, g, amax, spec.rounding)
    byte = byte if spec.layout == "linear" else ref.swizzle(byte)
    given = [torch.from_numpy(amax.reshape(-1))] if spec.given_amax else []
    outputs = [byte_tensor(len(x), x.shape[1] // 2), byte_tensor(*byte.shape)]
    packed, scale = call(emulated(spec.name, arch), [x, *given, tensor([g])], outputs)
    same_bytes(scale.numpy(), byte)
    same_bytes(packed.numpy(), ref.pack(codes))


QUANTIZE = [
    "quantize_nvfp4_bf16",
    "quantize_nvfp4_f16",
    "quantize_nvfp4_f32",
    "quantize_mxfp4_bf16",
    "quantize_mxfp4_floor_f16",
    "quantize_mxfp4_f32",
    "quantize_nvfp4_amax_bf16",
    "quantize_mxfp4_amax_f16",
    "quantize_nvfp4_128x4_bf16",
    "quantize_nvfp4_128x4_amax_f16",
    "quantize_mxfp4_128x4_floor_bf16",
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", QUANTIZE)
@pytest.mark.parametrize("g", [1.0, 0.0137, 1e-30, 1e30])
def test_quantize(name, arch, g):
    spec = Spec.parse(name)
    x = tensor(blocks_at_the_edges(spec, g), spec.dtype)
    check_quantize(spec, arch, x, g)
