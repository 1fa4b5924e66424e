"""A CUDA program that runs mma.sync, ldmatrix, stmatrix, movmatrix and wgmma on an sm_90a GPU.

It stores inputs and outputs for test_hardware.py. From the root of the repository:

    .venv/bin/python -m tests.emulator.mma.hardware.generate build/mma_h200.cu  # here
    tests/emulator/mma/hardware/run.sh build/mma_h200.cu build/mma_h200.bin     # beside the GPU
    .venv/bin/python -m tests.emulator.mma.hardware.golden build/mma_h200.bin   # here

The .cu is complete: the GPU's machine needs it, run.sh and nvcc, but neither Python nor the rest of
the repository. harness.cuh has the kernels' frames and the inputs; here are the instructions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from blockscale.emulator.mma.sync import WarpMma, lookup
from blockscale.emulator.mma.wgmma import Wgmma, parse_wgmma

HARNESS = Path(__file__).with_name("harness.cuh")
# What harness.cuh calls the types; all others are random bits, "i".
LETTER = {"f16": "h", "bf16": "b", "tf32": "t", "e4m3": "4", "e5m2": "5", "f32": "f", "f64": "d"}
FP8 = ("e4m3", "e5m2")
FLOATS = ("f16", "f32")
MAJORS = ("row", "col")

Item = tuple[str, str]  # the struct of an instruction, the call that runs it


def letters(*types: str) -> str:
    """One letter for each type."""
    return "".join(LETTER.get(name, "i") for name in types)


def listed(template: str, count: int, first: int = 0) -> str:
    """``template % i`` for `count` numbers, with commas."""
    return ", ".join(template % i for i in range(first, first + count))


# --- mma.sync


def mma_opcodes() -> list[str]:
    """Every shape and type that sm_90 has; signs, saturation and layouts by example."""
    tails = [
        *(f"m16n8k{k}.row.col.{d}.f16.f16.{d}" for k in (8, 16) for d in FLOATS),
        *(f"m16n8k{k}.row.col.f32.bf16.bf16.f32" for k in (8, 16)),
        *(f"m16n8k{k}.row.col.f32.tf32.tf32.f32" for k in (4, 8)),
        *(
            f"m16n8k{k}.row.col.{d}.{a}.{b}.{d}"
            for k, d, a, b in product((16, 32), FLOATS, FP8, FP8)
        ),
        *(
            f"{shape}.row.col{types}.s32"
            for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
            for types in (".s32.s8.u8", ".satfinite.s32.u8.s8")
        ),
        *(
            f"{shape}.row.col.s32.{types}.s32"
            for shape in ("m8n8k32", "m16n8k32", "m16n8k64")
            for types in ("s4.u4", "u4.s4")
        ),
        *(
            f"{shape}.row.col.s32.b1.b1.s32.{bit_op}.popc"
            for shape in ("m8n8k128", "m16n8k128", "m16n8k256")
            for bit_op in ("xor", "and")
        ),
        "m8n8k4.row.col.f64.f64.f64.f64",
        *(f"m16n8k{k}.row.col.f64.f64.f64.f64" for k in (4, 8, 16)),
        *(
            f"m8n8k4.{a}.{b}.{types}"
            for a, b in product(MAJORS, MAJORS)
            for types in ("f16.f16.f16.f16", "f32.f16.f16.f16", "f32.f16.f16.f32")
        ),
    ]
    return [f"mma.sync.aligned.{tail}" for tail in tails]


def mma_asm(opcode: str, op: WarpMma) -> str:
    """The statement; its operands are d, a, b, c, and float registers get theirs by mov."""
    bits = 64 if op.ab_kind == "f64" else 32
    declared, before, after, vectors = [], [], [], []
    number = 0
    for name, kind in (("d", op.d_kind), ("a", op.ab_kind), ("b", op.ab_kind), ("c", op.c_kind)):
        count = getattr(op, name)
        if kind in ("f32", "f64"):
            declared.append(f".reg .{kind} {name}<{count}>;")
            for i in range(count):
                if name == "d":
                    after.append(f"mov.b{bits} %{number + i}, d{i};")
                else:
                    before.append(f"mov.b{bits} {name}{i}, %{number + i};")
            vectors.append(f"{{{listed(name + '%d', count)}}}")
        else:
            vectors.append(f"{{{listed('%%%d', count, number)}}}")
        number += count
    text = " ".join([*declared, *before, f"{opcode} {', '.join(vectors)};", *after])
    constraint = "l" if bits == 64 else "r"
    outputs = listed(f'"=&{constraint}"(d[%d])', op.d)
    inputs = ", ".join(
        listed(f'"{constraint}"({name}[%d])', getattr(op, name)) for name in ("a", "b", "c")
    )
    return f'asm volatile("{{{text}}}" : {outputs} : {inputs});'


def mma_items() -> Iterator[Item]:
    """All of mma_opcodes()."""
    for i, opcode in enumerate(mma_opcodes()):
        op = lookup(opcode)
        assert op is not None, opcode
        types = letters(op.opcode.a_type, op.opcode.b_type, op.opcode.c_type)
        yield (
            f"""struct Mma{i} {{
  typedef {"u64" if op.ab_kind == "f64" else "u32"} T;
  enum {{ A = {op.a}, B = {op.b}, C = {op.c}, D = {op.d} }};
  DEV void run(const T *a, const T *b, const T *c, T *d) {{
    {mma_asm(opcode, op)}
  }}
}};
""",
            f'run_mma<Mma{i}>("{opcode}", "{types}");',
        )


# --- ldmatrix, stmatrix, movmatrix


def matrix_items() -> Iterator[Item]:
    """8x8 matrices of b16, one, two and four, transposed or not."""
    cases = product(("ldmatrix", "stmatrix"), (1, 2, 4), ("", ".trans"))
    for i, (kind, count, trans) in enumerate(cases):
        opcode = f"{kind}.sync.aligned.m8n8.x{count}{trans}.shared.b16"
        if kind == "ldmatrix":
            text = f"{opcode} {{{listed('%%%d', count)}}}, [%{count}];"
            registers = listed('"=r"(r[%d])', count)
            operands = f'{registers} : "r"(address)'
        else:
            text = f"{opcode} [%0], {{{listed('%%%d', count, 1)}}};"
            registers = listed('"r"(r[%d])', count)
            operands = f': "r"(address), {registers}'
        yield (
            f"""struct Matrix{i} {{
  enum {{ R = {count} }};
  DEV void run(u32 address, u32 *r) {{
    asm volatile("{text}" : {operands} : "memory");
  }}
}};
""",
            f'run_words("matrix|{opcode}", matrix_kernel<Matrix{i}>, 256);',
        )
    yield "", 'run_words("movmatrix", movmatrix_kernel, 32);'


# --- wgmma

A_START, B_START = 0, 10240  # bytes, as in harness.cuh
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


class Case(NamedTuple):
    """One wgmma: the opcode after .aligned, and its operands."""

    tail: str
    a_desc: int
    b_desc: int
    trans_a: int = 0
    trans_b: int = 0
    scale_d: int = 1
    scale_a: int = 1
    scale_b: int = 1
    in_registers: int = 0  # whether A is
    also_wide: bool = False


def descriptor(start: int, leading: int, stride: int, mode: str, base_offset: int = 0) -> int:
    """A matrix descriptor (PTX ISA 9.2, section 9.7.15.5.1.2); distances in bytes."""
    distances = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32
    return distances | base_offset << 49 | MODES[mode] << 62


def k_major(mode: str, start: int) -> int:
    """The descriptor of a K-major matrix whose groups of 8 rows follow each other."""
    if mode == "none":
        return descriptor(start, 256, 512, mode)
    return descriptor(start, 16, 8 * int(mode[:-1]), mode)


def mn_major(mode: str, start: int) -> int:
    """The descriptor of an MN-major matrix; LBO and SBO differ, so that swapping them shows."""
    leading = 640 if mode == "none" else 2048
    stride = {"128B": 1024, "64B": 1024, "32B": 512, "none": 128}[mode]
    return descriptor(start, leading, stride, mode)


def layout_cases() -> Iterator[Case]:
    """Every swizzle with every major, starts inside the pattern, base offsets."""
    f16 = "m64n64k16.f32.f16.f16"
    for mode in MODES:
        a, b = k_major(mode, A_START), k_major(mode, B_START)
        a_mn, b_mn = mn_major(mode, A_START), mn_major(mode, B_START)
        others = ("m64n16k8.f32.tf32.tf32", "m64n32k32.f32.e4m3.e5m2", "m64n32k32.s32.s8.u8")
        for tail in (f16, *others):
            yield Case(tail, a, b)
        bf16 = f"m64n{128 if mode == '128B' else 64}k16.f32.bf16.bf16"
        yield Case(bf16, a, b_mn, trans_b=1)
        yield Case(bf16, a_mn, b, trans_a=1)
        yield Case(bf16, a_mn, b_mn, trans_a=1, trans_b=1)
        yield Case("m64n72k16.f32.f16.f16", a, b_mn, trans_b=1, scale_b=-1)
    for offset in (32, 64, 96):  # the next K steps of a tile that is wider than one instruction
        yield Case(f16, k_major("128B", A_START + offset), k_major("128B", B_START + offset))
    a, b = k_major("64B", A_START + 32), k_major("64B", B_START + 32)
    yield Case(f16, a, b, scale_d=0, scale_a=-1)
    narrow = "m64n16k16.f32.f16.f16"
    for row in (1, 3, 5):  # a start off the pattern's boundary, with the base offset and without
        shifted = [
            descriptor(start + 128 * row, 16, 1024, "128B", row) for start in (A_START, B_START)
        ]
        yield Case(narrow, *shifted)
        off = descriptor(A_START + 128 * row, 16, 1024, "128B")
        yield Case(narrow, off, k_major("128B", B_START))


def numeric_cases() -> Iterator[Case]:
    """Types, scales and A in registers, on one layout; floats also on wide values."""
    a, b, b_mn = k_major("128B", A_START), k_major("128B", B_START), mn_major("128B", B_START)
    for tail, scale_a, scale_b, scale_d in (
        ("m64n64k16.f32.f16.f16", 1, -1, 1),
        ("m64n64k16.f16.f16.f16", -1, -1, 1),
        ("m64n160k16.f32.bf16.bf16", -1, 1, 1),
        ("m64n8k16.f32.f16.f16", 1, 1, 0),
        ("m64n8k8.f32.tf32.tf32", -1, 1, 1),
        ("m64n96k32.f32.e5m2.e5m2", 1, 1, 1),
        ("m64n24k32.f16.e4m3.e4m3", 1, -1, 1),
        ("m64n48k32.s32.u8.s8.satfinite", 1, 1, 1),
        ("m64n16k256.s32.b1.b1.and.popc", 1, 1, 1),
    ):
        also_wide = ".s32." not in tail
        for in_registers in (0, 1):
            rest = (scale_d, scale_a, scale_b, in_registers, also_wide)
            yield Case(tail, a, b, 0, 0, *rest)
            if ".f16.f16" in tail:
                yield Case(tail, a, b_mn, 0, 1, *rest)


def wgmma_asm(opcode: str, op: Wgmma, case: Case) -> str:
    """The statement; its operands are d, a or its descriptor, b's descriptor, scale-d."""
    number = op.d + (4 if case.in_registers else 1)  # of b's descriptor
    floats = op.d_kind == "f32"
    before = [".reg .pred p;", f"setp.ne.s32 p, %{number + 1}, 0;"]
    after = []
    if floats:
        before.append(f".reg .f32 d<{op.d}>;")
        before += [f"mov.b32 d{i}, %{i};" for i in range(op.d)]
        after = [f"mov.b32 %{i}, d{i};" for i in range(op.d)]
    d = listed("d%d" if floats else "%%%d", op.d)
    a = f"{{{listed('%%%d', 4, op.d)}}}" if case.in_registers else f"%{op.d}"
    given = {
        "imm-scale-a": case.scale_a,
        "imm-scale-b": case.scale_b,
        "imm-trans-a": case.trans_a,
        "imm-trans-b": case.trans_b,
    }
    immediates = [str(given[name]) for name in op.immediates(bool(case.in_registers))]
    operands = ", ".join([f"{{{d}}}", a, f"%{number}", "p", *immediates])
    text = " ".join(
        [
            *before,
            "wgmma.fence.sync.aligned;",
            f"{opcode} {operands};",
            "wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 0;",
            *after,
        ]
    )
    outputs = listed('"+r"(d[%d])', op.d)
    a_input = listed('"r"(a[%d])', 4) if case.in_registers else '"l"(a_desc)'
    inputs = f'{a_input}, "l"(b_desc), "r"(scale_d)'
    return f'asm volatile("{{{text}}}" : {outputs} : {inputs} : "memory");'


def wgmma_items() -> Iterator[Item]:
    """Layouts first, then numbers."""
    for i, case in enumerate([*layout_cases(), *numeric_cases()]):
        opcode = f"wgmma.mma_async.sync.aligned.{case.tail}"
        op = parse_wgmma(opcode)
        assert op is not None, opcode
        descriptors = f"{case.a_desc:#x}|{case.b_desc:#x}"
        flags = (case.trans_a, case.trans_b, case.scale_d, case.scale_a, case.scale_b)
        words = "|".join(map(str, flags))
        name = f"wgmma|{opcode}|{case.in_registers}|{descriptors}|{words}"
        types = f"{op.a_type}|{op.b_type}"
        initials = letters(op.a_type, op.b_type, op.d_type)
        numbers = f"{case.a_desc:#x}, {case.b_desc:#x}, {case.scale_d}, {int(case.also_wide)}"
        yield (
            f"""struct Wgmma{i} {{
  enum {{ D = {op.d} }};
  DEV void run(const u32 *a, u64 a_desc, u64 b_desc, int scale_d, u32 *d) {{
    {wgmma_asm(opcode, op, case)}
  }}
}};
""",
            f'run_wgmma<Wgmma{i}>("{name}", "{types}", "{initials}", {numbers});',
        )


def program() -> str:
    """The whole .cu."""
    items = [*mma_items(), *matrix_items(), *wgmma_items()]
    structs = "".join(struct for struct, _ in items)
    calls = "".join(f"  {call}\n" for _, call in items)
    return f"""{HARNESS.read_text(encoding="utf-8")}
{structs}
int main(int argc, char **argv) {{
  file = argc == 2 ? fopen(argv[1], "wb") : nullptr;
  if (!file) return fprintf(stderr, "give the name of a file that can be written\\n"), 2;
{calls}  printf("{len(items)} instructions ran\\n");
  return fclose(file);
}}
"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(program(), encoding="utf-8")
