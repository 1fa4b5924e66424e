"""CUDA intrinsics of quantise and dequantise: desc, compiled for the CPU, and impl, emulated."""

import re
from functools import cache

import numpy as np
import pytest
import torch
import tvm
from tvm.s_tir import TensorIntrin

from blockscale.emulator import launch
from blockscale.lower import cuda, nvcc
from blockscale.tir.intrin import operands
from blockscale.tir.intrin.cuda import blocks as cuda_blocks
from tests.kit.helpers import DTYPES, same, same_bytes
from tests.kit.pairwise import each, those
from tests.reference import core as ref

ARCHS = ("sm_80", "sm_90a", "sm_100a")


def in_memory(function, bound):
    """Return ``function`` with all its buffers in global memory, its call ``bound`` to a thread."""
    lines = []
    text = function.script().replace(', scope="local"', "")
    for line in text.splitlines():
        if bound and "T.cuda.func_call" in line:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f'{indent}for t in T.thread_binding(1, thread="threadIdx.x"):')
            line = "    " + line
        lines.append(line)
    return tvm.script.from_source("\n".join(lines))


@cache
def desc(name):
    """Return the compiled desc and its parameters as (name, dtype, size)."""
    of_kind("")
    function = in_memory(TensorIntrin.get(name).desc, bound=False)
    params = [(var.name, str(var.dtype), int(var.shape[0])) for var in function.params]
    compiled = tvm.compile(tvm.IRModule({"main": function}), target="llvm")
    return compiled["main"], params


@cache
def impls(arch):
    """Return the PTX of all impls, and by intrinsic the kernel and the names of its parameters."""
    head, headers, texts, entries = "", {}, [], {}
    for number, name in enumerate(of_kind("")):
        function = in_memory(TensorIntrin.get(name).impl, bound=True)
        device = cuda.sources(function, f"f{number}", arch).device
        head, _, body = device.partition('extern "C"')
        headers |= dict.fromkeys(re.findall(r'#include "[^"]+"', head))
        texts.append('extern "C"' + body)
        entry, params = re.search(r"(\w+)\(([^)]*)\);", body).groups()
        words = [re.findall(r"\w+", param)[-1] for param in params.split(",")]
        entries[name] = entry, [word.removesuffix("_ptr") for word in words]
    types = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
    source = "\n".join([types, head, *headers, *texts])
    return nvcc.compile_cuda_source(source, arch, ptx=True).image.decode(), entries


def random_floats(rng, size, dtype):
    """Return numbers of every kind: any bits, common sizes, and next to what rounds differently."""
    kind = rng.integers(4)
    if kind == 0:
        bits = rng.integers(0, 2**32, size, dtype=np.uint32)
        values = torch.from_numpy(bits.view(np.float32).copy())
    elif kind == 1:
        ties = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 448, np.inf, np.nan])
        values = torch.from_numpy(rng.choice(ties, size).astype(np.float32))
        values = values * float(np.exp2(rng.integers(-8, 9)))
    else:
        spread = np.exp2(rng.uniform(-12, 12))
        values = torch.from_numpy((rng.standard_normal(size) * spread).astype(np.float32))
    return values.to(DTYPES[dtype])


def inputs(name, params, rng):
    """Return random arguments of an intrinsic; of an encoding, those that belong together."""
    made = {}
    for param, dtype, size in params:
        if dtype in DTYPES:
            made[param] = random_floats(rng, size, dtype)
        elif dtype == "int32":
            made[param] = torch.from_numpy(rng.integers(0, 256, size, dtype=np.int32))
        else:
            made[param] = torch.from_numpy(rng.integers(0, 256, size).astype(dtype))
    if name.startswith("cuda_scale_"):  # the maximum of elements of the dtype
        dtype = name.removesuffix("_held").rsplit("_", 1)[1]
        short = random_floats(rng, 1, dtype).abs().float()
        made["A"] = short.view(torch.int32)
    if name.startswith("cuda_encode_") and name.endswith("_own"):
        _, _, fmt, dtype, _ = name.split("_")
        most = [made["V"].abs().float().view(torch.int32).max().reshape(1)]
        g = random_floats(rng, 1, "float32").abs()
        byte, divisor = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
        desc(f"cuda_scale_{fmt}_ceil_{dtype}")[0](*most, g, byte)
        desc(f"cuda_divisor_{fmt}")[0](byte, g, divisor)
        made.update({"B": byte, "D": divisor})
    return made


def compare(got, expected):
    """Compare bits, except that every NaN equals every NaN."""
    if expected.dtype in (torch.uint8, torch.uint32):
        same_bytes(got.view(torch.uint8).numpy(), expected.view(torch.uint8).numpy())
    elif expected.dtype == torch.int32:  # a byte, or the bits of a float32
        same(got.view(torch.float32).numpy(), expected.view(torch.float32).numpy())
    else:
        same(got.float().numpy(), expected.float().numpy())


KINDS = ("load", "store", "amax", "scale", "divisor", "encode", "decode")
STAGED = "stage"
"""What a CTA does together: kernels show it (`fused/test_gpu_fused.py`, rows in bulk)."""


@cache
def of_kind(kind):
    """Return the names of the intrinsics of a kind, or of all; to make them takes seconds."""
    names = [name for name in cuda_blocks.register_all() if name.startswith(f"cuda_{kind}")]
    operands.registered(names)  # others may only have described them
    return names


def test_every_kind_is_here():
    assert sum(len(of_kind(kind)) for kind in (*KINDS, STAGED)) == len(of_kind(""))
    assert all(of_kind(kind) for kind in KINDS)


def run_both(name, arch, given):
    """Run desc on ``given`` and impl on a copy; compare all that they leave there."""
    function, params = desc(name)
    ptx, entries = impls(arch)
    entry, order = entries[name]
    copy = {param: value.clone() for param, value in given.items()}
    function(*(given[param] for param, _, _ in params))
    words = {param: value.view(torch.uint8).numpy() for param, value in copy.items()}
    words.update(dict.fromkeys(set(order) - set(words), 0))  # offsets
    report = launch(ptx, entry=entry, grid=1, block=1, args=[words[param] for param in order])
    assert not report.hazards
    for param, value in given.items():
        compare(copy[param], value)


@those(
    lambda kind, arch: arch == "sm_90a" or kind == {"sm_80": "scale", "sm_100a": "decode"}[arch],
    kind=KINDS,
    arch=ARCHS,
)
def test_impl_equals_desc(kind, arch):
    """Those of sm_80, which has no instruction for E4M3, differ in conversions alone."""
    for name in of_kind(kind):
        if arch != "sm_80" or "nvfp4" in name:
            _, params = desc(name)
            rng = np.random.default_rng(7)
            for _ in range(2):
                run_both(name, arch, inputs(name, params, rng))


@pytest.mark.parametrize("arch", ARCHS)
def test_scales_half_way(arch):
    """Maxima whose E4M3 scales are ties: in the middle of every two bytes, the even one."""
    values = ref.e4m3_decode(np.arange(0x7F))
    for byte, middle in enumerate((values[1:] + values[:-1]) / 2):
        amax = torch.tensor([6 * middle], dtype=torch.float32)
        made = torch.zeros(1, dtype=torch.int32)
        given = {"A": amax.view(torch.int32), "G": torch.ones(1), "B": made}
        run_both("cuda_scale_nvfp4_ceil_float32", arch, given)
        assert made.item() == byte + byte % 2


@each(arch=ARCHS, fmt=["nvfp4", "mxfp4"])
def test_divisor_of_every_byte(fmt, arch):
    """Subnormal numbers and NaN too."""
    g = torch.tensor([0.25])
    for byte, value in enumerate(ref.scale_value(np.arange(256), fmt)):
        made = torch.zeros(1)
        given = {"A": torch.tensor([byte], dtype=torch.int32), "G": g, "B": made}
        run_both(f"cuda_divisor_{fmt}", arch, given)
        same(made.numpy(), np.float32([value / 4]))
