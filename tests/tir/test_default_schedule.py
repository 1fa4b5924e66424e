"""A kernel that no log knows gets the default schedule: never slower than a plain parallel loop.

The swizzles are not here: their default is the plain parallel loop.
"""

from __future__ import annotations

import time

import pytest
import torch

from blockscale import catalog
from blockscale.base import host
from blockscale.lower.cpu import compile_cpu
from blockscale.specs import Spec
from tests.kit.pairwise import few

ROWS, COLS = 64, 2048
NAMES = (
    "linear_nvfp4_n256_k512_f32",
    "linear_nvfp4_n256_k512_bf16",
    "linear_nvfp4_n7_k80_f32",
    "quantize_nvfp4_bf16",
    "quantize_mxfp4_128x4_f32",
    "dequantize_nvfp4_bf16",
    "dequantize_mxfp4_128x4_f32",
    "scale_sweep_b16_f32",
)


def plain_parallel(spec, level):
    """The op's own loops, the outermost one of every block in parallel."""
    from tvm.s_tir import Schedule

    sch = Schedule(catalog.workloads(spec, level)[-1].symbolic(level))
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        sch.parallel(sch.get_loops(block)[0])
    return sch.mod


def arguments(spec, rows):
    """Tensors of all parameters, filled with small valid bytes or random numbers."""
    from blockscale.base import shapes

    sizes = {"rows": rows, "cols": COLS, "blocks": rows * 64, "count": 126}
    found = []
    for param in spec.params():
        shape = [shapes.parse(dim).evaluate(sizes) for dim in param.shape]
        if param.dtype == "uint8":
            found.append(torch.randint(40, 80, shape, dtype=torch.uint8))
        else:
            found.append(torch.rand(shape).to(getattr(torch, param.dtype)) + 0.5)
    return found


def best_time(run, values):
    run(*values)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        run(*values)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("name", few(NAMES))
def test_default_beats_plain_loops(name):
    """Measured here it wins by 2 to 150 times, so that a busy machine does not turn the result."""
    level, spec = host.level(), Spec.parse(name)
    target = catalog.target(level)
    default = compile_cpu(catalog.exported(spec, level, {}), target)[spec.name]
    plain = compile_cpu(plain_parallel(spec, level), target)["main"]
    for rows in (1, 4, 16, ROWS) if spec.op == "linear" else (ROWS,):
        values = arguments(spec, rows)
        ours, theirs = best_time(default, values), best_time(plain, values)
        assert ours <= theirs
