"""PTX texts that are sound, but for some changes; launched as if they were not."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

import numpy as np

from blockscale import emulator
from blockscale.emulator.ptx.parser import parse
from tests.emulator import kit
from tests.kit.paths import ROOT

ERRORS = (emulator.EmulationError,)
FILES = "tests/**/*.ptx"
TOKEN = re.compile(r"[\w$%.:]+|\s+|.", re.DOTALL)
SMALL = """
    setp.lt.u32 %p1, %x, 16; selp.b32 %r1, %x, 7, %p1; @%p1 bra A; add.cc.u32 %r1, %r1, %r2;
 A: shfl.sync.bfly.b32 %r3|%p2, %r1, 1, 31, -1; vote.sync.ballot.b32 %r4, %p1, -1;
    div.u32 %r5, %r1, %x; cvt.rn.f32.u32 %r6, %r5; fma.rn.f32 %r7, %r6, 0f3F800000, 1.5;
    mov.b64 {%r8, %r9}, %d1; ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%a0 + 16];
    cvt.rn.satfinite.e2m1x2.f32 %b1, %r6, %r7; prmt.b32 %r14, %r1, %r3, 0x5410;
    st.global.u32 [%o], %r7; bar.sync 0; lop3.b32 %r1, %r1, %r2, %r3, 0x96;"""
MEMORY = """
    .shared .align 16 .b8 s[1024]; .shared .align 8 .b64 mb; .local .align 8 .b8 l[64];
    mov.u32 %r60, mb; mov.u32 %r61, s; setp.eq.u32 %p1, %x, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r60], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r60], 64;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
      [%r61], [%a0], 64, [%r60];
 W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r60], 0; @!%p2 bra W;
    ld.shared.v2.b32 {%r1, %r2}, [s + 8]; st.local.b32 [l], %r1; atom.global.add.u32 %r3, [%a0], 1;
    mad.wide.u32 %d2, %x, 4, %a0; cp.async.ca.shared.global [%r61], [%d2], 4;
    cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; red.shared.add.u32 [%r61], 1;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r61];
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r10, %r11, %r12, %r13},
      {%r4, %r5, %r4, %r5}, {%r4, %r5}, {%r10, %r11, %r12, %r13};
    st.global.u32 [%o], %r10;"""
CALLS = """
.global .align 4 .b32 table[4] = {1, 2, 3}; .const .b64 where = table;
.func (.reg .b32 out) twice(.reg .b32 in) { add.u32 out, in, in; ret; }"""
CALL = """
    .reg .b32 %i; mov.u32 %i, 0; call (%r1), twice, (%x); ld.global.u32 %r2, [table + 4];
 L: add.u32 %i, %i, 1; setp.lt.u32 %p1, %i, 9; @%p1 bra L; T: .branchtargets A, B;
    and.b32 %r3, %x, 1; brx.idx %r3, T; A: { .reg .b32 %i; mov.u32 %i, 5; }
 B: st.global.u32 [%o], %i;"""
NUMBERS = "0 1 3 4 16 31 32 33 64 255 1024 65536 2147483648 4294967296 9223372036854775808 -1 08"
NUMBERS += " 99999999999999999999999 1.5 1e999 0x7F 0f7F800000 0dFFFFFFFFFFFFFFFF 0b1"
WORDS = '{ } ( ) [ ] < > | ! - + @ ; , : = _ . /* // " .reg .shared .local .global .const .param'
WORDS += " .align .func .entry .b8 .b16 .b64 .b128 .pred .f32 .v4 .target .branchtargets call ret"
WORDS += (
    " exit trap bra brx.idx mov.b64 mov.b128 mov.pred div.s32 rem.u64 %tid.x %laneid %p1 %r1 %d1"
)


OPERANDS = """%r1 %r2 %d1 %d2 %b1 %p1 %q1 %x %t %o %a0 %z 0 1 -1 3 255 65536 4294967296 1.5
 0f3F800000 0d3FF0000000000000 [%a0] [%d1] [%r1] [%a0+4] [%a0+1] [s] [l+60] [s+1024] [0] [mb] [p0]
 [%t] s l mb table where twice W A %tid.x %laneid %clock64 _ !%p1 !%r1 {%r1,%r2} {%r1,%r2,%r3,%r4}
 {%d1,%d2} {%b1,%b2} {_,%r1} {} %r1|%p1 %p1|%p2 (%r1) [%a0,%r1] [%a0,{%r1,%r2}] nowhere"""
MODS = """b8 b16 b32 b64 b128 u8 s16 u32 s32 u64 s64 f16 bf16 f32 f64 f16x2 pred v2 v4 v8 shared
 global local param const sync aligned sat ftz rn rz hi lo wide cc x1 x4 relu volatile acquire
 release cta gpu sys cluster noinc relaxed shared::cta shared::cluster e4m3x2 e2m1x2 m16n8k16 trans
 nc"""
REPEATED = ("{", "}", "[", "(", "!", "/* ", "{ ", "(", " call f, ", "[1]", "-", "A|", "L: ")
STATEMENT = re.compile(r"(?P<opcode>\b[a-z][\w.:]*\.[\w.:]+)\s+(?P<operands>[^;]*);")
COMMA = re.compile(r",(?![^{}\[\]()]*[}\])])")


@cache
def corpus() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The sound texts, all words in them, and all instructions."""
    array = np.zeros(1024, np.uint32)
    texts = [
        kit.ptx(SMALL, [array, array]),
        kit.ptx(MEMORY, [array, array]),
        kit.ptx(CALL, [array], module=CALLS),
        *(path.read_text().replace("@TARGET@", "sm_100a") for path in sorted(ROOT.glob(FILES))),
    ]
    weighted = [text for text in texts for _ in range(1 if len(text) > 20_000 else 4)]
    words = {word for text in texts for word in TOKEN.findall(text) if not word.isspace()}
    instructions = {match.group() for text in texts for match in STATEMENT.finditer(text)}
    return tuple(weighted), tuple(sorted(words)), tuple(sorted(instructions))


def change_statement(rng: random.Random, text: str) -> str:
    """Change one instruction: its modifiers, or an operand, or take another one."""
    found = list(STATEMENT.finditer(text))
    if not found:
        return text
    at = rng.choice(found)
    opcode, operands = at["opcode"], COMMA.split(at["operands"])
    parts = opcode.split(".")
    k = rng.randrange(len(operands))
    match rng.randrange(9):
        case 0 | 1 | 2:
            operands[k] = rng.choice(OPERANDS.split())
        case 3:
            del operands[k]
        case 4:
            operands.insert(k, rng.choice(OPERANDS.split()))
        case 5:
            parts[rng.randrange(1, len(parts))] = rng.choice(MODS.split())
        case 6:
            if rng.random() < 0.5:
                del parts[rng.randrange(len(parts))]
            else:
                parts.insert(rng.randrange(1, len(parts) + 1), rng.choice(MODS.split()))
        case 7:
            rng.shuffle(operands)
        case _:
            other = STATEMENT.fullmatch(rng.choice(corpus()[2]))
            assert other is not None
            if rng.random() < 0.5:
                parts = other["opcode"].split(".")
            else:
                operands = COMMA.split(other["operands"])
    made = f"{'.'.join(parts)} {', '.join(operands)};"
    return text[: at.start()] + made + text[at.end() :]


def change(rng: random.Random, tokens: list[str]) -> None:
    """Change some tokens in place."""
    at = rng.randrange(len(tokens))
    end = min(len(tokens), at + rng.choice([1, 1, 2, 6, 30]))
    words = corpus()[1]
    match rng.randrange(10):
        case 0:
            del tokens[at:end]
        case 1:
            tokens[at:at] = tokens[at:end]
        case 2:
            tokens[at:end] = rng.sample(tokens[at:end], end - at)
        case 3:
            tokens[at] = rng.choice(words)
        case 4:
            tokens[at] = rng.choice(WORDS.split())
        case 5:
            tokens[at:at] = [rng.choice(WORDS.split()), " "]
        case 6:
            numbers = [i for i, token in enumerate(tokens) if token[0].isdigit()] or [at]
            tokens[rng.choice(numbers)] = rng.choice(NUMBERS.split())
        case 7:
            text = tokens[at]
            k = rng.randrange(len(text))
            tokens[at] = text[:k] + chr(rng.choice([0, 9, 34, 46, 65, 233, 0x4E00])) + text[k + 1 :]
        case 8:
            other = TOKEN.findall(rng.choice(corpus()[0]))
            k = rng.randrange(len(other))
            tokens[at:at] = other[k : k + rng.choice([1, 5, 20])]
        case _:
            names = [i for i, token in enumerate(tokens) if token[0] == "%"] or [at]
            tokens[rng.choice(names)] = tokens[rng.choice(names)]


def repeated(rng: random.Random, tokens: list[str]) -> str:
    """Tokens with one part of them very often."""
    at = rng.randrange(len(tokens))
    end = min(len(tokens), at + rng.choice([1, 2, 8, 40]))
    part = "".join(tokens[at:end])
    if rng.random() < 0.5:
        part = rng.choice(REPEATED)
    times = rng.choice([2, 40, 1000, 100_000 // len(part) + 1])
    return "".join([*tokens[:at], part * times, *tokens[at:]])


def attempt(rng: random.Random, folder: Path) -> str:
    """Launch a changed text with arguments that fit its parameters."""
    text = rng.choice(corpus()[0])
    for _ in range(rng.choice([1, 1, 2, 3])):
        text = change_statement(rng, text)
    tokens = TOKEN.findall(text)
    kind = rng.random()
    if kind < 0.15:
        text = repeated(rng, tokens)
    elif kind < 0.4:
        for _ in range(rng.choice([1, 1, 2, 6])):
            if tokens:
                change(rng, tokens)
        text = "".join(tokens)
    if rng.random() < 0.03:
        text = text[: rng.randrange(len(text) + 1)]
    (folder / "kernel.ptx").write_text(text)
    kernels = [f for f in parse(text).functions.values() if f.entry]
    entry = rng.choice(kernels) if kernels else None
    args = []
    for param in entry.params if entry else []:
        size = 8 if isinstance(param, tuple) else param.size
        args.append(np.zeros(2048, np.uint32) if size == 8 else bytes(size))
    emulator.launch(
        text,
        entry=entry.name if entry else None,
        grid=rng.choice([1, 2, (2, 2)]),
        block=rng.choice([32, 64, 128, 128, 33, (8, 8)]),
        args=args,
        seed=rng.randrange(3),
        max_instructions=20_000,
        dynamic_smem=rng.choice([0, 48 * 1024, 200 * 1024]),
    )
    return "ran"
