"""Replays cases that ran on an H200: named arrays of inputs and outputs -> differences.

Names are "mma|opcode|exact|a", "matrix|opcode|in", "movmatrix|in" and "wgmma|opcode|A in
registers|a-desc|b-desc|trans-a|trans-b|scale-d|scale-a|scale-b|exact|d"; shared memory is that of
"smem|type of a|type of b|exact|sm".  In "exact" cases every
partial sum is exact in the hardware's accumulator, so that the results are equal bit by bit; in
"wide" cases the hardware's alignment truncates and the results differ in the last bits.
"""

from __future__ import annotations

import numpy as np

from blockscale.emulator.mma import matrix
from blockscale.emulator.mma.sync import lookup
from blockscale.emulator.mma.wgmma import parse_wgmma


def cases(arrays):
    """The arrays grouped by case: {name without its last part: {last part: array}}."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        case, _, part = name.rpartition("|")
        found.setdefault(case, {})[part] = array
    memories = {case: found.pop(case) for case in list(found) if case.startswith("smem|")}
    for case, group in found.items():
        if case.startswith("wgmma|"):
            op, mode = parse_wgmma(case.split("|")[1]), case.rpartition("|")[2]
            group |= memories[f"smem|{op.a_type}|{op.b_type}|{mode}"]
    return found


def replay(case, arrays):
    """What the package makes of one case's inputs, and what the GPU made."""
    kind, *words = case.split("|")
    return {"mma": _mma, "matrix": _matrix, "movmatrix": _movmatrix, "wgmma": _wgmma}[kind](
        words, arrays
    )


def _mma(words, arrays):
    op = lookup(words[0])
    dtype = np.uint64 if op.ab_kind == "f64" else np.uint32
    a, b, c, d = (
        arrays[name].view(dtype).reshape(-1, 32, getattr(op, name)) for name in ("a", "b", "c", "d")
    )
    return op.opcode.d_type, op.fn(a, b, c), d


def _matrix(words, arrays):
    """The first words are registers, shared memory is from word 128; row t lies in slot 5 * t."""
    load, store = matrix.lookup_ldmatrix(words[0]), matrix.lookup_stmatrix(words[0])
    op = load or store
    given, want = arrays["in"], arrays["out"]
    slots = np.arange(op.rows) * 5 % 32
    memory = given[128:].view(np.uint8).reshape(32, 16).copy()
    registers = given[: 32 * op.registers].reshape(1, 32, op.registers)
    if load:
        registers = op.fn(memory[slots][None])
    else:
        memory[slots] = op.fn(registers)[0]
    got = np.concatenate([registers.ravel(), memory.view(np.uint32).ravel()])
    return "b32", got, np.concatenate([want[: 32 * op.registers], want[128:]])


def _movmatrix(words, arrays):
    return "b32", matrix.movmatrix(arrays["in"][None])[0], arrays["out"]


def _wgmma(words, arrays):
    opcode, *numbers, _ = words
    op = parse_wgmma(opcode)
    in_registers, a_desc, b_desc, *rest = (int(number, 0) for number in numbers)
    trans_a, trans_b, scale_d, scale_a, scale_b = rest
    memory = arrays["sm"].view(np.uint8)
    start = int(arrays["base"][0]) >> 4
    base = int(arrays["base"][0])
    if in_registers:
        a = op.a_bytes(arrays["a"].reshape(4, 32, 4))
    else:
        a = memory[op.a_offsets(a_desc + start, trans_a) - base][None]
    b = memory[op.b_offsets(b_desc + start, trans_b) - base][None]
    old, want = (arrays[name].reshape(4, 32, op.d) for name in ("c", "d"))
    got = op.compute(old, a, b, scale_d=bool(scale_d), scale_a=scale_a, scale_b=scale_b)
    return op.d_type, got, want


def error(dtype, got, want):
    """Number of differing registers, and the biggest difference relative to the biggest result."""
    wrong = int((got != want).sum())
    if dtype not in ("f16", "f32", "f64") or not wrong:
        return wrong, 0.0
    view = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[dtype]
    x, y = (np.ascontiguousarray(v).view(view).astype(np.float64) for v in (got, want))
    return wrong, float(np.abs(x - y).max() / np.abs(y).max())


def report(arrays):
    """Prints every case that differs; returns the "exact" ones among them."""
    bad = []
    for case, group in cases(arrays).items():
        try:
            dtype, got, want = replay(case, group)
        except Exception as problem:  # to see all cases of a first run
            print(f"{case}: {type(problem).__name__}: {problem}")
            bad.append(case)
            continue
        wrong, size = error(dtype, got, want)
        if wrong:
            print(f"{case}: {wrong} of {got.size} registers differ, relative {size:.3g}")
        if wrong and not case.endswith("wide"):
            bad.append(case)
    print(f"{len(bad)} cases wrong that are exact, of {len(cases(arrays))}")
    return bad
