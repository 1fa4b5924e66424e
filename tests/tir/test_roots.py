"""Quotients and roots that kernels compute without branches, emulated: IEEE's bits."""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from blockscale.emulator import launch
from blockscale.lower import cuda, nvcc, roots
from blockscale.schedules.gpu_steps import BRANCH_FREE
from tests.kit.helpers import same

SIZE = 1 << 15
DIVISORS = [1, 3, 16, 98, 2880, 7168, 8191, 16384, 131072, (1 << 24) - 1]


def kernel(expression, marked=True):
    """Return the TensorIR of ``y[i] = expression(x[i])``, a number a thread."""

    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((SIZE,), "float32"), y: T.Buffer((SIZE,), "float32")):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for b in T.thread_binding(SIZE // 256, thread="blockIdx.x"):
            for t in T.thread_binding(256, thread="threadIdx.x"):
                with T.sblock("y"):
                    T.sblock_attr({BRANCH_FREE: 1} if marked else {})
                    i = T.axis.spatial(SIZE, b * 256 + t)
                    y[i] = expression(x[i])

    return main


def run(expression, x):
    """Return what the kernel makes of ``x``, and its CUDA C++."""
    made = cuda.sources(kernel(expression), "f", "sm_90a")
    image = nvcc.compile_cuda_source(made.device, "sm_90a", ptx=True).image.decode()
    y = np.full(SIZE, np.nan, np.float32)
    report = launch(image, grid=SIZE // 256, block=256, args=[x, y])
    assert not report.hazards
    return y, made.device


def numbers(by=1):
    """Return floats of every kind: any bits, the ends of the range, multiples of ``by``."""
    rng = np.random.default_rng(by)
    any_bits = rng.integers(0, 2**32, SIZE, dtype=np.uint32).view(np.float32)
    ends = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.2e-38, 3.4e38, 2.0**-100])
    halves = np.arange(1, min(8192, 2**25 // by), 2) * by // 2  # quotients between two of the least
    few = (halves * 2.0**-149).astype(np.float32)
    near = np.float32(by) * rng.integers(1, 1 << 12, 4096).astype(np.float32)
    x = np.concatenate([ends, few, near, np.nextafter(near, np.float32(0))])
    return np.concatenate([x, any_bits])[:SIZE].astype(np.float32)


@pytest.mark.parametrize("by", DIVISORS)
def test_quotient(by):
    """By powers of two a product; of others every middle of two floats is met."""
    x = numbers(by)
    with np.errstate(all="ignore"):
        wanted = x / np.float32(by)
    got, device = run(lambda v: v / T.float32(by), x)
    same(got, wanted)
    assert ("bs_over(" in device.partition("__global__")[2]) == (by & (by - 1) > 0)


def test_inverse_root():
    """The emulator's approximations are the nearest floats: a GPU's need the last steps more."""
    x = numbers()
    with np.errstate(all="ignore"):
        wanted = np.float32(1) / np.sqrt(x)
    got, device = run(lambda v: T.float32(1) / T.sqrt(v), x)
    same(got, wanted)
    assert "bs_inverse_root(" in device.partition("__global__")[2]


@pytest.mark.parametrize("by", [0.1, -3.0, 2.0**24, np.inf])
def test_other_quotients_stay(by):
    """What as text is not exact, what is negative, no number, or by a variable."""
    x, h = tirx.Var("x", "float32"), tirx.Var("h", "float16")
    for node in (x / T.float32(by), T.float32(2) / T.sqrt(x), T.float32(1) / x, h / T.float16(3)):
        assert roots.quotient(node).same_as(node)


def test_no_branches():
    """What nvcc makes of the row's root: a branch is what it would cost."""
    device = run(lambda v: T.float32(1) / T.sqrt(v / T.float32(7168) + T.float32(1e-6)), numbers())
    ptx = nvcc.compile_cuda_source(device[1], "sm_90a", ptx=True).image.decode()
    assert "bra" not in ptx
    assert "div.rn" not in ptx
    assert "sqrt.rn" not in ptx


def test_other_blocks_stay():
    """Quotients are those of the target where no schedule wants them otherwise."""
    func = kernel(lambda v: T.float32(1) / T.sqrt(v / T.float32(7168)), marked=False)
    tvm.ir.assert_structural_equal(roots.branch_free(func), func)
