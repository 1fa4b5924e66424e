"""A small way to write a PTX kernel in a test and launch it.

`run("... st.global.b32 [%o], %r1;", out)` makes a kernel with one parameter per argument.  It has
`%a0 ...`: the arguments (addresses, or values of scalars); `%t`: the thread's number in a grid of
one dimension; `%x`: its number in the block; `%o`, `%o8`: the last array + 4 * %t and + 8 * %t;
`%p0-31`, `%b0-31` (16 bits), `%r0-63`, `%d0-63` (64 bits), `%q0-7` (128 bits).
"""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator.kit.exhaustive import EXHAUSTIVE

SEEDS = [0, 1, 2, *(pytest.param(seed, marks=EXHAUSTIVE) for seed in (3, 4))]
POISON = 0xFFFFFFFF

HOOKS = []  # called with the text of every kernel

PROLOGUE = """
    .reg .pred %p<32>;
    .reg .b16 %b<32>;
    .reg .b32 %r<64>, %x, %t, %y;
    .reg .b64 %d<64>, %o, %o8, %z;
    .reg .b128 %q<8>;
    mov.u32 %x, %tid.z;
    mov.u32 %y, %ntid.y;
    mul.lo.u32 %x, %x, %y;
    mov.u32 %y, %tid.y;
    add.u32 %x, %x, %y;
    mov.u32 %y, %ntid.x;
    mul.lo.u32 %x, %x, %y;
    mov.u32 %y, %tid.x;
    add.u32 %x, %x, %y;
    mov.u32 %t, %ctaid.x;
    mov.u32 %y, %ntid.x;
    mul.lo.u32 %t, %t, %y;
    mov.u32 %y, %ntid.y;
    mul.lo.u32 %t, %t, %y;
    mov.u32 %y, %ntid.z;
    mul.lo.u32 %t, %t, %y;
    add.u32 %t, %t, %x;
"""


def kind(arg):
    """Return the PTX type of a parameter and its bytes."""
    if isinstance(arg, emulator.TensorMap):
        return ".align 64 .b8", 128
    if isinstance(arg, np.generic):
        return f".b{8 * arg.itemsize}", arg.itemsize
    return ".b64", 8


def ptx(body, args, *, module="", params=None, target="sm_100a", directives="", name="kernel"):
    """Return the text of a kernel with one parameter per argument around `body`."""
    declared, loads, last = [], [], None
    for i, arg in enumerate(args):
        text, size = kind(arg)
        if size == 128:  # a tensor map: its address
            declared.append(f".param {text} p{i}[128]")
            loads.append(f"    .reg .b64 %a{i};\n    mov.b64 %a{i}, p{i};\n")
            loads.append(f"    cvta.param.u64 %a{i}, %a{i};\n")
            continue
        declared.append(f".param {text} p{i}")
        cls = "b32" if size == 4 else "b64" if size == 8 else f"b{8 * size}"
        loads.append(f"    .reg .{cls} %a{i};\n    ld.param.{cls} %a{i}, [p{i}];\n")
        last = i if isinstance(arg, np.ndarray) else last
    if last is not None:
        for reg, scale in (("%o", 4), ("%o8", 8)):
            loads.append(f"    mad.wide.u32 {reg}, %t, {scale}, %a{last};\n")
    if params is not None:
        declared, loads = params, []
    head = f".version 9.0\n.target {target}\n.address_size 64\n{module}\n"
    text = ",\n    ".join(declared)
    return (
        f"{head}.visible .entry {name}(\n    {text})\n{directives}\n{{{PROLOGUE}{''.join(loads)}"
        f"{body}\n    ret;\n}}\n"
    )


def run(body, *args, grid=1, block=32, cluster=1, seed=0, smem=0, limit=2_000_000, **options):
    """Run `body` as a kernel on `args` and return the report."""
    text = ptx(body, args, **options)
    for hook in HOOKS:
        hook(text)
    return emulator.launch(
        text, grid=grid, block=block, cluster=cluster, args=args, seed=seed,
        dynamic_smem=smem, max_instructions=limit,
    )  # fmt: skip


def words(count, fill=POISON, dtype=np.uint32):
    """Return an output array full of poison."""
    return np.full(count, fill, dtype)


def values(body, *args, count=32, dtype=np.uint32, clean=True, **options):
    """Run `body`, which stores to %o (or %o8), and return what it stored; no hazard is allowed."""
    out = np.full(count * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)
    report = run(body, *args, out, **options)
    if clean:
        assert not report.hazards, [str(h) for h in report.hazards]
    return out
