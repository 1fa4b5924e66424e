"""tcgen05 intrinsics: desc, compiled for the CPU, and impl, emulated, on random bits.

Copies agree bit for bit.  An MMA sums K products exactly and rounds; its desc rounds twice for each
scale and once a sum: they agree within 2^-23 of the sum of magnitudes for each of K + 4 roundings.
"""

from functools import cache

import numpy as np
import pytest

from blockscale.base.formats import E2M1, E4M3, GEMM
from blockscale.emulator import EmulationError, launch
from blockscale.tir.intrin import tcgen05
from tests.kit.pairwise import few, seeds
from tests.kit.tcgen05_kernels import call_text, compiled, kernel, padded, run, run_desc, swizzled

# ---- MMA --------------------------------------------------------------------------------------

WIDTHS = (32, 64, 128, 192, 256)
MMAS = [
    *(tcgen05.Mma("nvfp4", m, n, 128, False) for m in (128, 256) for n in WIDTHS),
    *(
        tcgen05.Mma(fmt, m, n, row_bytes, swap)
        for fmt in ("mxfp4", "mxfp8xmxfp4", "mxfp8")
        for m, n, row_bytes, swap in (
            (128, 192, 128, False),
            (256, 256, 128, False),
            (128, 64, 128, True),
            (256, 32, 128, True),
        )
    ),
    *(tcgen05.Mma(fmt, 128, 64, 64, swap) for fmt in ("nvfp4", "mxfp4") for swap in (True, False)),
]
SFX, SFY, D = 0, 16, 256
"""Columns of tensor memory."""


def mma_kernel(shape, call, entry):
    """Return a kernel that accumulates one MMA into d, in tensor memory."""
    group, x, y = shape.m // 128, *(("B", "A") if shape.swap else ("A", "B"))
    x_bytes, y_bytes = 128 * shape.row_bytes, shape.n // group * shape.row_bytes
    body = f"""
  fill(0, x + f.rank * {x_bytes}, {x_bytes});
  fill({x_bytes}, y + f.rank * {y_bytes}, {y_bytes});
  for (int c = 0; c < 4; ++c) put(f.lanes({SFX} + c), sfx[(f.rank * 4 + c) * 32 + f.lane]);
  for (int c = 0; c < {shape.n // 32}; ++c) put(f.lanes({SFY} + c), sfy[c * 32 + f.lane]);
  for (int c = 0; c < {shape.n}; ++c)
    put(f.lanes({D} + c), __float_as_uint(d[f.row * {shape.n} + c]));
  put_done();
  f.meet();
  if (f.issues()) {{
    uint32_t D = f.tmem + {D}, S{x} = f.tmem + {SFX}, S{y} = f.tmem + {SFY};
    uint32_t {x} = bs_shared(smem) + offset, {y} = bs_shared(smem) + {x_bytes} + offset;
    int byte_of_SA = byte, byte_of_SB = byte;
    {call};
    f.commit();
  }}
  f.wait();
  for (int c = 0; c < {shape.n}; ++c)
    d[f.row * {shape.n} + c] = __uint_as_float(take(f.lanes({D} + c)));
"""
    params = (
        "const uint8_t *x, const uint8_t *y, const uint32_t *sfx, const uint32_t *sfy, float *d, "
        "int offset, int byte"
    )
    return kernel(entry, group, body, params)


@cache
def mma_ptx():
    """Return the PTX of all MMAs."""
    calls = [call_text(tcgen05.mma(shape)) for shape in MMAS]
    return compiled(
        [mma_kernel(s, c, f"mma{i}") for i, (s, c) in enumerate(zip(MMAS, calls, strict=True))]
    )


def operand(rng, code, rows, shape):
    """Return rows of random codes as one instruction takes them, and as they are in a stage."""
    step = GEMM[shape.fmt].step
    codes = code.per_byte
    wide = GEMM[shape.fmt].a.bits == 8
    steps = shape.row_bytes // 32
    packed = rng.integers(0, 256, (steps, rows, step // codes), dtype=np.uint8)
    if code is E4M3:
        packed[packed & 0x7F == 0x7F] = 0x2A  # no NaN
    spread = [padded(part) if wide and code is E2M1 else part for part in packed]
    return packed, swizzled(np.concatenate(spread, axis=1))


def scale_bytes(rng, fmt, rows):
    """Return random scales [32, rows / 8]: those of row r are bytes r / 32 * 4 of row r % 32.

    No NaN; E8M0 from 2^-20 to 2^20, so that the desc's products are in the range of float32.
    """
    low, high = (0, 0x7F) if GEMM[fmt].scale is E4M3 else (107, 148)
    return rng.integers(low, high, (32, rows // 8)).astype(np.uint8)


def words(scales):
    """Return scales as 32-bit columns [columns, 32]."""
    return np.ascontiguousarray(np.ascontiguousarray(scales).view(np.uint32).T)


def mma_case(shape, rng):
    """Return the kernel's arguments, and what d is to be, and within what."""
    row = GEMM[shape.fmt]
    a_rows, b_rows = (shape.n, shape.m) if shape.swap else (shape.m, shape.n)
    a, a_stage = operand(rng, row.a, a_rows, shape)
    b, b_stage = operand(rng, row.b, b_rows, shape)
    sa, sb = scale_bytes(rng, shape.fmt, a_rows), scale_bytes(rng, shape.fmt, b_rows)
    columns = row.step // row.block
    byte = int(rng.integers(4 // columns)) * columns
    at = int(rng.integers(len(a)))
    d = rng.standard_normal((shape.m, shape.n)).astype(np.float32)
    ends = [byte + s.shape[1] - 4 + columns for s in (sa, sb)]
    own = [np.ascontiguousarray(s[:, byte:end]) for s, end in zip((sa, sb), ends, strict=True)]
    name, want, size = tcgen05.mma(shape), d.copy(), np.abs(d)
    run_desc(name, A=a[at], SA=own[0], B=b[at], SB=own[1], D=want)
    signs = [np.uint8(0x77 if code is E2M1 else 0x7F) for code in (row.a, row.b)]
    run_desc(name, A=a[at] & signs[0], SA=own[0], B=b[at] & signs[1], SB=own[1], D=size)
    stages, scales = (a_stage, b_stage), (words(sa), words(sb))
    turn = -1 if shape.swap else 1
    args = [*stages[::turn], *scales[::turn], d, 32 * at, byte]
    return args, d, want, size * (row.step + 4) * 2.0**-23


def run_mma(ptx, entry, shape, rng):
    """Whether the kernel's d is within the tolerance."""
    args, d, want, tolerance = mma_case(shape, rng)
    group = shape.m // 128
    smem = (128 + shape.n // group) * shape.row_bytes
    report = launch(
        ptx, entry=entry, grid=group, block=128, cluster=group, args=args, dynamic_smem=smem
    )
    assert not report.hazards
    return bool((np.abs(d.astype(np.float64) - want) <= tolerance).all())


@pytest.mark.parametrize("number", few(range(len(MMAS))), ids=[shape.name for shape in MMAS])
@seeds(3)
def test_mma(number, seed):
    """Every kind, M 128 and 256, N from 32 to 256, both orders of operands."""
    assert run_mma(mma_ptx(), f"mma{number}", MMAS[number], np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("fmt", "other"),
    [("nvfp4", "mxf4"), ("mxfp4", "mxf4nvf4"), ("mxfp8", "mxf4"), ("mxfp8xmxfp4", "mxf4nvf4")],
)
def test_mma_of_another_kind(fmt, other):
    """The instruction of another format is refused, or computes something else."""
    shape = tcgen05.Mma(fmt, 128, 64, 128, False)
    call = call_text(tcgen05.mma(shape))
    kind = GEMM[fmt].kind
    assert f"bs_tcgen05_mma_{kind}<1>" in call
    ptx = compiled([mma_kernel(shape, call.replace(f"mma_{kind}<", f"mma_{other}<"), "other")])
    try:
        right = run_mma(ptx, "other", shape, np.random.default_rng(0))
    except EmulationError:
        right = False
    assert not right


def scale_copy_lanes(name, group, exchange=("", "")):
    """Run the impl on random tiles; return what 128 lanes hold of each CTA, and the tiles."""
    tiles = np.random.default_rng(2).integers(0, 256, (group, 512), dtype=np.uint8)
    call = call_text(name).replace(*exchange)
    body = f"""
  fill(0, tile + f.rank * 512, 512);
  f.meet();
  if (f.issues()) {{
    uint32_t D = f.tmem + 8, S = bs_shared(smem);
    {call};
    f.commit();
  }}
  f.wait();
  for (int c = 0; c < 4; ++c) out[f.row * 4 + c] = take(f.lanes(8 + c));
"""
    out = np.zeros((group * 128, 4), np.uint32)
    entry = kernel("copy", group, body, "const uint8_t *tile, uint32_t *out")
    run(entry, [tiles, out], group, 512)
    return out.view(np.uint8).reshape(group, 4, 32, 16), tiles


@pytest.mark.parametrize("group", [1, 2])
def test_scale_copy(group):
    """All four sub-partitions hold the 32 rows of 16 bytes; of a pair each CTA its own."""
    name = tcgen05.scale_copy(group)
    lanes, tiles = scale_copy_lanes(name, group)
    for rank in range(group):
        want = np.zeros((32, 16), np.uint8)
        run_desc(name, S=tiles[rank], D=want)
        assert all(np.array_equal(part, want) for part in lanes[rank])


def test_scale_copy_through_another_descriptor():
    """Rows of 32 bytes instead of 16 are other bytes, or none."""
    name = tcgen05.scale_copy(1)
    want = np.zeros((32, 16), np.uint8)
    try:
        lanes, tiles = scale_copy_lanes(name, 1, ("bs_scale_desc(", "bs_matrix_desc<32>("))
    except EmulationError:
        return
    run_desc(name, S=tiles[0], D=want)
    assert not all(np.array_equal(part, want) for part in lanes[0])


def read_rows(columns, call):
    """Fill tensor memory with random bits; return it, and what the threads of each warp read."""
    bits = np.random.default_rng(columns).integers(0, 2**32, (128, 64), dtype=np.uint32)
    body = f"""
  for (int c = 0; c < 64; ++c) put(f.lanes(32 + c), bits[f.row * 64 + c]);
  put_done();
  f.meet();
  uint32_t D[{columns}], S = f.lanes(32 + 16);
  {call};
  bs_tcgen05_wait_ld();
  for (int c = 0; c < {columns}; ++c) out[f.row * {columns} + c] = D[c];
"""
    out = np.zeros((128, columns), np.uint32)
    run(kernel("read", 1, body, "const uint32_t *bits, uint32_t *out"), [bits, out])
    return bits, out


@pytest.mark.parametrize("columns", tcgen05.READ_COLUMNS)
def test_read_accumulator(columns):
    """Each warp reads its 32 lanes, bit for bit."""
    name = tcgen05.read_accumulator(columns)
    bits, out = read_rows(columns, call_text(name))
    for warp in range(4):
        lanes = np.ascontiguousarray(bits[32 * warp : 32 * warp + 32, 16 : 16 + columns])
        want = np.zeros((32, columns), np.float32)
        run_desc(name, S=lanes.view(np.float32), D=want)
        assert np.array_equal(out[32 * warp : 32 * warp + 32], want.view(np.uint32))


def test_read_fewer_columns():
    """Half of the columns leave the others as they were."""
    bits, out = read_rows(32, call_text(tcgen05.read_accumulator(16)))
    assert np.array_equal(out[:, :16], bits[:, 16:32])
    assert not np.array_equal(out[:, 16:], bits[:, 32:48])
