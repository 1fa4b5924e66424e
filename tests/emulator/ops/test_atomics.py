"""atom and red: every operation and type, against loops in Python."""

from __future__ import annotations

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator import kit
from tests.emulator.kit import SEEDS

PLACES = ["global", "shared", ""]
CELLS = 8


def loop(op, kind, cells, values):
    """Return memory and old values after applying `values` in lane order; for exact operations."""
    old = []
    cells = cells.copy()
    for i, v in enumerate(values):
        at = i % len(cells)
        now = cells[at]
        old.append(now)
        new = {
            "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b,
            "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "exch": lambda a, b: b,
            "inc": lambda a, b: 0 if a >= b else a + 1,
            "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        }[op](int(now) if kind[0] in "usb" else now, int(v) if kind[0] in "usb" else v)  # fmt: skip
        if kind[0] in "usb":
            bits = 8 * cells.dtype.itemsize
            new &= (1 << bits) - 1
            new -= (new >> (bits - 1) & 1) << bits if kind[0] == "s" else 0
        cells[at] = new
    return cells, np.array(old, cells.dtype)


INTEGERS = [
    *[("add", k) for k in ("u32", "s32", "u64")],
    *[(op, k) for op in ("min", "max") for k in ("u32", "s32", "u64", "s64")],
    *[(op, k) for op in ("and", "or", "xor") for k in ("b32", "b64")],
    ("inc", "u32"), ("dec", "u32"), ("exch", "b32"), ("exch", "b64"),
]  # fmt: skip


def kernel(op, kind, size, place, red=False):
    """Every thread applies its value to cell t % CELLS; the last argument gets the old values."""
    reg = {2: "%b", 4: "%r", 8: "%d"}[size]
    dot = f".{place}" if place else ""
    where = "mov.u64 %d2, %a0;"
    before = after = ""
    if place == "shared":
        where = "mov.u64 %d2, cells;"
        copy = f"setp.lt.u32 %p0, %x, {CELLS}; mad.wide.u32 %d5, %x, {size}, %a0; "
        copy += f"mov.u64 %d6, cells; mad.wide.u32 %d6, %x, {size}, %d6;"
        kinds = f"b{8 * size}"
        before = (
            f"{copy} @%p0 ld.global.{kinds} {reg}20, [%d5]; @%p0 st.shared.{kinds} [%d6], {reg}20;"
        )
        before += "bar.sync 0;"
        after = "bar.sync 0;"
        after += f"@%p0 ld.shared.{kinds} {reg}20, [%d6]; @%p0 st.global.{kinds} [%d5], {reg}20;"
    name = f"red{dot}.{op}.{kind}" if red else f"atom{dot}.{op}.{kind}"
    first = "" if red else f"{reg}11, "
    return f"""
        {before}
        {where}
        rem.u32 %r1, %t, {CELLS}; mad.wide.u32 %d2, %r1, {size}, %d2;
        mad.wide.u32 %d3, %t, {size}, %a1; mad.wide.u32 %d4, %t, {size}, %a2;
        ld.global.b{8 * size} {reg}10, [%d3];
        {name} {first}[%d2], {reg}10;
        {"" if red else f"st.global.b{8 * size} [%d4], {reg}11;"}
        {after}
    """


def cells_and_values(op, dtype, seed, threads):
    rng = np.random.default_rng(seed)
    if op in ("inc", "dec"):
        return rng.integers(0, 5, CELLS).astype(dtype), rng.integers(0, 7, threads).astype(dtype)
    raw = rng.integers(0, 1 << 32, 2 * (CELLS + threads), dtype=np.uint32).view(dtype)
    return raw[:CELLS].copy(), raw[CELLS : CELLS + threads].copy()


SHARED = f".shared .align 8 .b8 cells[{8 * CELLS}];"


@pytest.mark.parametrize(("op", "kind"), INTEGERS)
@pytest.mark.parametrize("place", PLACES)
def test_integers_in_lane_order(op, kind, place):
    """With seed 0 the lanes come in order: memory and every old value are known."""
    size = int(kind[1:]) // 8
    dtype = f"{'i' if kind[0] == 's' else 'u'}{size}"
    cells, values = cells_and_values(op, dtype, 1, 64)
    want, old = loop(op, kind, cells, values)
    out = np.zeros(64, dtype)
    report = kit.run(kernel(op, kind, size, place), cells, values, out, block=64, module=SHARED)
    assert not report.hazards
    assert (cells == want).all()
    assert (out == old).all()


@pytest.mark.parametrize(
    ("op", "kind"), [i for i in INTEGERS if i[0] not in ("inc", "dec", "exch")]
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", SEEDS)
def test_reductions_in_any_order(op, kind, place, seed):
    size = int(kind[1:]) // 8
    dtype = f"{'i' if kind[0] == 's' else 'u'}{size}"
    cells, values = cells_and_values(op, dtype, seed, 80)
    want, _ = loop(op, kind, cells, values)
    body = kernel(op, kind, size, place, red=True)
    report = kit.run(body, cells, values, np.zeros(1, dtype), block=80, module=SHARED, seed=seed)
    assert not report.hazards
    assert (cells == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_thread_gets_its_own_ticket(seed):
    """The old values of a counter are a permutation, whatever the order: nothing is lost."""
    count = np.zeros(1, np.uint32)
    got = kit.values("atom.global.add.u32 %r1, [%a0], 1; st.global.b32 [%o], %r1;", count,
                     block=96, grid=3, count=288, seed=seed)  # fmt: skip
    assert count[0] == 288
    assert (np.sort(got) == np.arange(288)).all()


def halves(kind, numbers):
    """Return numbers as 16-bit items of f16 or bf16 (exact ones only)."""
    if kind.startswith("f16"):
        return np.asarray(numbers, np.float16).view(np.uint16)
    return (np.asarray(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)


FLOATS = ["f32", "f64", "noftz.f16", "noftz.bf16", "noftz.f16x2", "noftz.bf16x2"]


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_float_sums(kind, place, seed):
    """Sums of small integers are exact in every type and every order."""
    name = kind.split(".")[-1]
    size = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}.get(name, 4)
    rng = np.random.default_rng(seed)
    lanes = 2 if name.endswith("x2") else 1
    a, b = rng.integers(-3, 4, (CELLS, lanes)), rng.integers(-3, 4, (64, lanes))
    want = a + b.reshape(-1, CELLS, lanes).sum(0)
    if name in ("f32", "f64"):
        make = lambda v: v.astype(f"f{size}").reshape(-1).copy()  # noqa: E731
    else:
        make = lambda v: halves(name, v).reshape(-1).copy()  # noqa: E731
    cells, values = make(a), make(b)
    kit.run(kernel("add", kind, size, place, red=True), cells, values, np.zeros(1, f"u{size}"),
            block=64, module=SHARED, seed=seed)  # fmt: skip
    assert (cells == make(want)).all()


@pytest.mark.parametrize(
    ("name", "n", "item"),
    [("add.v2.f32", 2, "f4"), ("add.v4.f32", 4, "f4"), ("add.noftz.v2.f16", 2, "f2"),
     ("add.noftz.v8.f16", 8, "f2"), ("min.noftz.v4.f16", 4, "f2"), ("max.noftz.v2.f16x2", 4, "f2"),
     ("add.noftz.v4.f16x2", 8, "f2")],
)  # fmt: skip
@pytest.mark.parametrize("red", [True, False])
def test_vector_atomics(name, n, item, red):
    """sm_90: vectors in global memory; item by item the scalar operation."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(-9, 9, (2, 32, n)).astype(item)
    size = np.dtype(item).itemsize
    regs = n if "x2" not in name else n // 2
    width = n * size // regs
    reg = "%b" if width == 2 else "%r"
    first = ", ".join(f"{reg}{i + 4}" for i in range(regs))
    old = ", ".join(f"{reg}{i + 14}" for i in range(regs))
    kind = f"b{8 * width}"
    body = f"""
        mad.wide.u32 %d0, %t, {n * size}, %a0; mad.wide.u32 %d1, %t, {n * size}, %a1;
        mad.wide.u32 %d2, %t, {n * size}, %a2;
    """
    for i in range(regs):
        body += f"ld.global.{kind} {reg}{i + 4}, [%d1+{i * width}];"
    if red:
        body += f"red.relaxed.gpu.global.{name} [%d0], {{{first}}};"
    else:
        body += f"atom.relaxed.gpu.global.{name} {{{old}}}, [%d0], {{{first}}};"
        for i in range(regs):
            body += f"st.global.{kind} [%d2+{i * width}], {reg}{i + 14};"
    cells, out = a.copy(), np.zeros_like(a)
    kit.run(body, cells, b, out)
    want = {"add": a + b, "min": np.minimum(a, b), "max": np.maximum(a, b)}[name.split(".")[0]]
    assert (cells == want).all()
    assert red or (out == a).all()


@pytest.mark.parametrize(("space", "flushed"), [("global", True), ("shared", False)])
def test_f32_sums_flush_subnormals_in_global_memory_only(space, flushed):
    """PTX ISA 9.7.13.13; ptxas 13.0 prints ATOMG.ADD.F32.FTZ, and FADD without .FTZ for shared."""
    tiny = np.array([0x00000003, 0x80000005], np.uint32)
    out = kit.words(2)
    body = """
        setp.ge.u32 %p1, %x, 2; @%p1 ret; ld.global.b32 %r1, [%a0+4]; ld.global.b32 %r2, [%a0];
        mad.wide.u32 %d0, %x, 4, %a1; st.global.b32 [%d0], %r2;
        mov.u64 %d1, sh; mad.wide.u32 %d1, %x, 4, %d1; st.shared.b32 [%d1], %r2;
    """
    body += (
        "red.shared.add.f32 [%d1], %r1; ld.shared.b32 %r3, [%d1]; st.global.b32 [%d0], %r3;"
        if space == "shared" else "red.global.add.f32 [%d0], %r1;"
    )  # fmt: skip
    kit.run(body, tiny, out, module=".shared .b32 sh[2];")
    assert (out & 0x7FFFFFFF == (0 if flushed else 2)).all()


@pytest.mark.parametrize("kind", ["b16", "b32", "b64"])
@pytest.mark.parametrize("seed", SEEDS)
def test_compare_and_swap(kind, seed):
    """A cell passes from 0 to 1 to 2 ...: every thread retries until its turn has come."""
    size = int(kind[1:]) // 8
    reg = {2: "%b", 4: "%r", 8: "%d"}[size]
    body = f"""
        cvt.u16.u32 %b10, %x; cvt.u64.u32 %d10, %x; mov.u32 %r10, %x;
        add.u16 %b11, %b10, 1; add.u64 %d11, %d10, 1; add.u32 %r11, %r10, 1;
    RETRY:
        atom.relaxed.gpu.global.cas.{kind} {reg}12, [%a0], {reg}10, {reg}11;
        setp.ne.{"u16" if size == 2 else kind} %p0, {reg}12, {reg}10; @%p0 bra RETRY;
        st.global.b32 [%o], %x;
    """
    cell = np.zeros(1, f"u{size}")
    got = kit.values(body, cell, block=40, count=40, seed=seed)
    assert cell[0] == 40
    assert (got == np.arange(40)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("place", ["global", "shared"])
def test_128_bits(seed, place):
    body = f"""
        cvt.u64.u32 %d10, %x; mul.lo.u64 %d11, %d10, 3; add.u64 %d12, %d10, 1;
        mul.lo.u64 %d13, %d12, 3;
        mov.b128 %q0, {{%d10, %d11}}; mov.b128 %q1, {{%d12, %d13}};
        mov.u64 %d0, {"sh" if place == "shared" else "%a0"};
        setp.eq.u32 %p1, %x, 0; mov.u64 %d5, 0; mov.b128 %q3, {{%d5, %d5}};
        @%p1 atom.{place}.exch.b128 %q4, [%d0], %q3;
        bar.sync 0;
    RETRY:
        atom.{place}.cas.b128 %q2, [%d0], %q0, %q1;
        mov.b128 {{%d1, %d2}}, %q2;
        setp.ne.u64 %p0, %d1, %d10; @%p0 bra RETRY;
        st.global.b64 [%o8], %d2;
    """
    cell = np.zeros(2, np.uint64)
    got = kit.values(body, cell, block=20, count=20, seed=seed, dtype=np.uint64,
                     module=".shared .align 16 .b64 sh[2];")  # fmt: skip
    assert (got == np.arange(20) * 3).all()
    assert place == "shared" or cell.tolist() == [20, 60]


SPELLINGS = [
    "atom.add.u32", "atom.global.add.u32", "atom.relaxed.gpu.add.u32", "atom.acquire.sys.add.u32",
    "atom.release.cluster.global.add.u32", "atom.acq_rel.cta.global.add.u32",
]  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_semantics_and_scopes_are_understood(name):
    cell = np.zeros(1, np.uint32)
    kit.run(f"{name} %r1, [%a0], 2;", cell)
    assert cell[0] == 64


def test_cache_policy_of_atomics():
    cell = np.zeros(1, np.uint32)
    kit.run("createpolicy.fractional.L2::evict_first.b64 %d0, 0.5;"
            "red.global.add.L2::cache_hint.u32 [%a0], 1, %d0;"
            "atom.global.add.L2::cache_hint.u32 %r0, [%a0], 1, %d0;", cell)  # fmt: skip
    assert cell[0] == 64


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_reach_other_ctas_of_the_cluster(seed):
    """Every thread adds to the counter of the CTA with the rank behind its own (PTX ISA 5.1.6)."""
    body = """
        setp.eq.u32 %p0, %x, 0; @%p0 st.shared.b32 [count], 0;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        mov.u32 %r0, %cluster_ctarank; add.u32 %r0, %r0, 1; and.b32 %r0, %r0, 3;
        mov.u32 %r1, count; mapa.shared::cluster.u32 %r2, %r1, %r0;
        add.u32 %r3, %r0, 1;
        red.relaxed.cluster.shared::cluster.add.u32 [%r2], %r3;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        ld.shared.u32 %r4, [count]; st.global.b32 [%o], %r4;
    """
    got = kit.values(body, block=40, grid=4, cluster=4, count=160, seed=seed,
                     module=".shared .b32 count;")  # fmt: skip
    assert (got == np.repeat(40 * np.arange(1, 5), 40)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    "name", ["atom.shared.add.u32 %r3,", "atom.add.u32 %r3,", "red.shared.add.u32"]
)
def test_every_block_has_a_counter_of_its_own(seed, cluster, name):
    """Blocks run in lockstep and give the same shared address: it is another cell in each."""
    body = f"""
        setp.eq.u32 %p0, %x, 0; @%p0 st.shared.b32 [count], %t; bar.sync 0;
        mov.u64 %d0, count; {"" if ".shared" in name else "cvta.shared.u64 %d0, %d0;"}
        mov.u32 %r1, %ctaid.x; {name} [%d0], %r1; bar.sync 0;
        ld.shared.b32 %r2, [count]; st.global.b32 [%o], %r2;
    """
    got = kit.values(body, block=40, grid=4, cluster=cluster, count=160, seed=seed,
                     module=".shared .b32 count;")  # fmt: skip
    assert (got == np.repeat([0, 80, 160, 240], 40)).all()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("atom.global.foo.u32 %r0, [%a0], 1;", r"no modifier \.foo"),
        ("atom.global.inc.u64 %d0, [%a0], 1;", r"\.inc has type \.u32 only"),
        ("atom.global.add.b128 %q0, [%a0], %q1;", "128-bit atomic add"),
        (".local .b32 own; red.local.add.u32 [own], 1;", "global and .shared"),
        ("red.global.add.v2.f32 [%a0+4], {%r0, %r1};", "misaligned"),
        ("multimem.red.relaxed.sys.global.add.u32 [%a0], %r0;", "several devices"),
        ("atom.global.cas.b32 %r0, [%a0], 1;", "too few operands"),
    ],
)
def test_bad_atomics(body, sentence):
    with pytest.raises(emulator.EmulationError, match=sentence) as error:
        kit.run(body, np.zeros(64, np.uint32))
    assert error.value.place.line
    assert error.value.place.kernel == "kernel"
