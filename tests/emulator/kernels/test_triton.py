"""Triton's kernels for sm_100a on the emulator, against float64.

Exact data: every product is a multiple of 2^-g and the sum of absolute values of each output stays
below 2^(24 - g), so float32 gives the same sum in any order (`exact_in_f32` checks it).
Wide data: at most `TOLERANCE` relative error a row, 2^-19, for the float32 sums of up to 512 terms.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from blockscale import emulator
from tests.emulator.kit.exhaustive import each_once, some_seeds
from tests.reference import core as reference

triton = pytest.importorskip(
    "triton", reason="triton is not installed: no compiler for its kernels"
)

from tests.emulator.kernels import gluon_kernels  # noqa: E402
from tests.emulator.kernels import triton_kernels as tk  # noqa: E402

TOLERANCE = 2e-6
OTHERS = (90, 120)  # sm_90a: wgmma; sm_120a: mma.sync
SEEDS = some_seeds(2, 20)  # correct kernels are right on 20
PROFILE = None  # Triton's second scratch pointer


def launch(kernel: tk.Compiled, grid: tuple[int, ...], *args: object, seed: int = 0):
    """Run the kernel and assert that a compiler's correct kernel has no error among its hazards."""
    ctas = int(np.prod(grid))
    scratch = np.zeros(kernel.scratch * ctas, np.uint8) if kernel.scratch else None
    report = emulator.launch(
        kernel.ptx,
        entry=kernel.entry,
        grid=(*grid, 1, 1)[:3],
        block=(kernel.threads, 1, 1),
        cluster=(kernel.cluster, 1, 1),
        dynamic_smem=kernel.shared,
        args=[*args, scratch, PROFILE],
        seed=seed,
    )
    errors = [hazard for hazard in report.hazards if hazard.severity == "error"]
    assert not errors, errors
    return report


def row_error(got, want):
    """Return the largest ||got - want|| / ||want|| of a row."""
    return (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max()


def exact_in_f32(a, b, g):
    """Whether every sum of products is a multiple of 2^-g and fits into 24 bits in any order."""
    return (np.abs(a) @ np.abs(b).T).max() < 2.0 ** (24 - g)


# ------------------------------------------------------------------------------- scaled products
FORMATS = {  # name: formats of A and B, elements a scale
    "nvfp4": ("e2m1", "e2m1", 16),
    "mxfp4": ("e2m1", "e2m1", 32),
    "mxfp8 x mxfp4": ("e4m3", "e2m1", 32),
    "mxfp8": ("e4m3", "e4m3", 32),
}
BITS = {"nvfp4": 8, "mxfp4": 4, "mxfp8 x mxfp4": 8, "mxfp8": 12}  # g of the exact data
TILES = (  # M, N, K, BM, BN, BK, warps, stages
    (128, 128, 256, 128, 128, 256, 4, 1),
    (256, 128, 256, 128, 64, 128, 4, 3),
    (128, 128, 384, 128, 128, 128, 8, 2),
)
POINTER = {"e2m1": "*u8", "e4m3": "*fp8e4nv"}


@cache
def scaled_kernel(name, tile, arch):
    a, b, v = FORMATS[name]
    scale = "*fp8e4nv" if v == 16 else "*u8"
    types = {"a": POINTER[a], "b": POINTER[b], "sa": scale, "sb": scale, "c": "*fp32"}
    sizes = dict(zip(("M", "N", "K", "BM", "BN", "BK"), tile[:6], strict=True))
    constants = sizes | {"V": v, "AF": a, "BF": b}
    options = {"warps": tile[6], "stages": tile[7], "arch": arch}
    return tk.build(tk.scaled_gemm, types, constants, **options)


def operand(rng, rows, k, fmt, v, *, exact):
    """Return bytes, scale bytes and float64 values [rows, k] of one operand."""
    if fmt == "e2m1":
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        data, value = codes[:, ::2] | codes[:, 1::2] << 4, reference.e2m1_decode(codes)
    else:  # exact: multiples of 1/8 up to 3.75
        low, high = (0x20, 0x48) if exact else (0, 0x7F)
        data = rng.integers(low, high, (rows, k), dtype=np.uint8)
        data |= rng.integers(0, 2, (rows, k), dtype=np.uint8) << 7
        if exact:
            data &= 0xFE  # two bits of mantissa
        value = reference.e4m3_decode(data)
    shape = (rows, k // v)
    if v == 16:  # E4M3: exact 0.5 .. 3.75, wide: all finite ones
        scale = rng.integers(0x30, 0x48, shape) & 0xFE if exact else rng.integers(1, 0x7F, shape)
        factor = reference.e4m3_decode(scale)
    else:
        scale = rng.integers(126, 129, shape) if exact else rng.integers(110, 140, shape)
        factor = reference.ue8m0_decode(scale)
    return data, scale.astype(np.uint8), value * np.repeat(factor, v, axis=1)


def run_scaled(name, tile, rng, *, exact, seed, arch=tk.BLACKWELL):
    """Return C of the kernel and the two operands' float64 values."""
    a, b, v = FORMATS[name]
    rows, columns, k, bm, bn = tile[:5]
    x, xs, left = operand(rng, rows, k, a, v, exact=exact)
    y, ys, right = operand(rng, columns, k, b, v, exact=exact)
    c = np.full((rows, columns), np.nan, np.float32)
    grid = (rows // bm, columns // bn)
    launch(scaled_kernel(name, tile, arch), grid, x, y, xs, ys, c, seed=seed)
    return c, left, right


@pytest.mark.always
@pytest.mark.parametrize(("name", "tile"), each_once([*FORMATS], TILES))
def test_scaled_product_is_exact(name, tile, rng):
    """Bit for bit, whichever moment the machine chooses for asynchronous work."""
    for seed in range(2):
        c, left, right = run_scaled(name, tile, rng, exact=True, seed=seed)
        assert exact_in_f32(left, right, BITS[name])
        np.testing.assert_array_equal(c, left @ right.T)


@pytest.mark.parametrize("name", FORMATS)
def test_scaled_product_of_all_codes(name, rng):
    """Every finite code and scale: within the tolerance of float32 sums."""
    c, left, right = run_scaled(name, TILES[0], rng, exact=False, seed=3)
    assert row_error(c, left @ right.T) < TOLERANCE


@pytest.mark.parametrize(("name", "arch"), each_once([*FORMATS], OTHERS))
def test_scaled_product_elsewhere(name, arch, rng):
    """Hopper multiplies in bf16 after unpacking; sm_120 has mma.sync with block scales."""
    tile = (64, 64, 256, 64, 64, 128, 4, 2)
    c, left, right = run_scaled(name, tile, rng, exact=True, seed=1, arch=arch)
    np.testing.assert_array_equal(c, left @ right.T)


# -------------------------------------------------------------------------------- plain products
GEMMS = (  # M, N, K, BM, BN, BK, warps, stages
    (128, 128, 256, 128, 128, 64, 4, 3),  # tcgen05, pipelined
    (256, 128, 192, 128, 64, 32, 4, 4),
    (100, 72, 200, 64, 32, 32, 4, 2),  # ragged, masked loads
    (65, 33, 51, 64, 32, 32, 4, 2),  # and not aligned
    (32, 32, 64, 16, 16, 32, 1, 2),  # mma.sync
)


@pytest.mark.parametrize(("shape", "arch"), each_once(GEMMS, [tk.BLACKWELL, *OTHERS]))
def test_f16_product(shape, arch, rng):
    m, n, k, bm, bn = shape[:5]
    grid = (-(-m // bm), -(-n // bn))
    for seed in range(2):
        a, b = (rng.integers(-16, 17, (rows, k)).astype(np.float16) / 8 for rows in (m, n))
        c = np.full((m, n), np.nan, np.float32)
        launch(tk.gemm_kernel(shape, "fp16", arch), grid, a, b, c, seed=seed)
        left, right = a.astype(np.float64), b.astype(np.float64)
        assert exact_in_f32(left, right, 6)
        np.testing.assert_array_equal(c, left @ right.T)


def elements(rng, kind, shape):
    """Return stored elements of Triton's type ``kind`` and their float64 values."""
    if kind == "i8":
        data = rng.integers(-128, 128, shape).astype(np.int8)
        return data, data.astype(np.float64)
    if kind == "fp8e4nv":
        data = rng.integers(0x28, 0x48, shape).astype(np.uint8)
        return data, reference.e4m3_decode(data)
    value = rng.integers(-16, 17, shape) / 8.0
    if kind == "bf16":
        return (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), value
    return value, value


@pytest.mark.parametrize(
    ("kind", "sizes"),
    each_once(["i8", "fp8e4nv", "bf16", "fp64"], [(128, 64, 64, False), (64, 32, 128, True)]),
)
def test_products_of_other_types(kind, sizes, rng):
    """tcgen05.mma of kinds i8, f8f6f4 and f16 with M and N innermost; double precision mma.sync."""
    m, n, k, turned = sizes
    result = {"i8": "i32", "fp64": "fp64"}.get(kind, "fp32")
    constants = {"M": m, "N": n, "K": k, "TURNED": turned}
    types = {"a": f"*{kind}", "b": f"*{kind}", "c": f"*{result}"}
    kernel = tk.build(tk.one_product, types, constants)
    a, left = elements(rng, kind, (k, m) if turned else (m, k))
    b, right = elements(rng, kind, (k, n))
    c = np.full((m, n), -1, {"i32": np.int32, "fp32": np.float32, "fp64": np.float64}[result])
    launch(kernel, (1,), a, b, c)
    np.testing.assert_array_equal(c, (left.T if turned else left) @ right)


def test_f32_product_in_tf32(rng):
    """Inputs of 11 significant bits pass through TF32 unchanged."""
    shape = GEMMS[0]
    m, n, k = shape[:3]
    a, b = (rng.integers(-1024, 1025, (rows, k)).astype(np.float32) / 64 for rows in (m, n))
    c = np.full((m, n), np.nan, np.float32)
    launch(tk.gemm_kernel(shape, "fp32"), (1, 1), a, b, c)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    assert row_error(c, want) < TOLERANCE


@cache
def tma_kernel(warp_specialize, ctas):
    types = {"a": "tensordesc<fp16[128,64]>", "b": "tensordesc<fp16[128,64]>"}
    types["c"] = "tensordesc<fp32[128,128]>"
    constants = {"K": 256, "BM": 128, "BN": 128, "BK": 64, "WS": warp_specialize}
    return tk.build(tk.gemm_tma, types, constants, ctas=ctas)


def descriptor_arguments(array, about):
    """Return what Triton's launcher passes for a row-major 2D descriptor: map, shape, strides."""
    rows, columns = array.shape
    tensor_map = emulator.TensorMap(
        array,
        dtype=about["elem_type"],
        global_dim=(columns, rows),
        global_strides_bytes=(array.strides[0],),
        box_dim=tuple(reversed(about["block_size"])),
        element_strides=(1, 1),
        interleave=0,
        swizzle=about["swizzle"],
        oob_fill=0,
    )
    return [tensor_map, rows, columns, columns, 1]


@pytest.mark.parametrize(("warp_specialize", "ctas"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize("seeds", SEEDS)
def test_product_of_tensor_maps(warp_specialize, ctas, seeds, rng):
    """TMA loads and stores; with 2 CTAs a cluster computes one tile."""
    kernel = tma_kernel(warp_specialize, ctas)
    for seed in seeds:
        a, b = (rng.integers(-16, 17, (256, 256)).astype(np.float16) / 8 for _ in range(2))
        c = np.full((256, 256), np.nan, np.float32)
        arrays = zip((a, b, c), kernel.descriptors, strict=True)
        args = [value for both in arrays for value in descriptor_arguments(*both)]
        launch(kernel, (2 * ctas, 2), *args, seed=seed)
        np.testing.assert_array_equal(c, a.astype(np.float64) @ b.astype(np.float64).T)


@pytest.mark.parametrize("seeds", some_seeds(2, 4))
@pytest.mark.parametrize(("pair", "n"), [(True, 128), (False, 64)])
def test_product_of_two_ctas(pair, n, seeds, rng):
    """cta_group::2, or TMA multicast with commits to both CTAs' barriers."""
    kernel = gluon_kernels.build(320, 256, n, pair=pair)
    for seed in seeds:
        a, b = (rng.integers(-16, 17, (rows, 320)).astype(np.float16) / 8 for rows in (512, 2 * n))
        c = np.full((512, 2 * n), np.nan, np.float32)
        arrays = zip((a, b, c), kernel.descriptors, strict=True)
        args = [value for both in arrays for value in descriptor_arguments(*both)]
        launch(kernel, (4, 2), *args, seed=seed)
        np.testing.assert_array_equal(c, a.astype(np.float64) @ b.astype(np.float64).T)


def test_product_of_maps_made_on_the_device(rng):
    """tensormap.replace and its proxy fences; the last rows of A and C are outside."""
    constants = {"M": 200, "N": 128, "K": 192, "BM": 128, "BN": 64, "BK": 64}
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp32"}
    kernel = tk.build(tk.gemm_device_maps, types, constants)
    for seed in range(2):
        a, b = (rng.integers(-16, 17, (rows, 192)).astype(np.float16) / 8 for rows in (200, 128))
        c = np.full((200, 128), np.nan, np.float32)
        launch(kernel, (2, 2), a, b, c, seed=seed)
        np.testing.assert_array_equal(c, a.astype(np.float64) @ b.astype(np.float64).T)


def test_attention(rng):
    """Two chained products, P rounded to f16 and fed back: 2^-11 relative to each weight."""
    constants = {"L": 256, "D": 64, "BM": 128, "BN": 64}
    types = dict.fromkeys("qkv", "*fp16") | {"o": "*fp32", "scale": "fp32"}
    kernel = tk.build(tk.attention, types, constants)
    q, k, v = (rng.standard_normal((256, 64)).astype(np.float16) for _ in range(3))
    o = np.full((256, 64), np.nan, np.float32)
    launch(kernel, (2,), q, k, v, o, np.float32(0.125))
    s = q.astype(np.float64) @ k.astype(np.float64).T / 8
    p = np.exp(s - s.max(1, keepdims=True))
    assert row_error(o, p / p.sum(1, keepdims=True) @ v.astype(np.float64)) < 5e-4


# ------------------------------------------------------------------- reductions and elementwise
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("rows", "columns", "warps"), [(4, 100, 4), (16, 33, 1), (2, 1000, 8)])
def test_row_reductions(rows, columns, warps, seeds, rng):
    types = {"x": "*fp32", "total": "*fp32", "top": "*fp32", "where": "*i32", "count": "*i32"}
    constants = {"ROWS": rows, "WIDTH": int(2 ** np.ceil(np.log2(columns)))}
    kernel = tk.build(tk.reduce_rows, types | {"columns": "i32"}, constants, warps=warps)
    for seed in seeds:
        x = rng.integers(-50, 51, (3 * rows, columns)).astype(np.float32) / 4
        total, top = np.full((2, 3 * rows), np.nan, np.float32)
        where, count = np.full(3 * rows, -1, np.int32), np.zeros(1, np.int32)
        launch(kernel, (3,), x, total, top, where, count, columns, seed=seed)
        np.testing.assert_array_equal(total, x.astype(np.float64).sum(1))
        np.testing.assert_array_equal(top, x.max(1))
        np.testing.assert_array_equal(where, x.argmax(1))
        assert count[0] == (x > 0).sum()


@pytest.mark.parametrize(("columns", "warps"), [(64, 2), (777, 4)])
def test_softmax(columns, warps, rng):
    width = int(2 ** np.ceil(np.log2(columns)))
    types = {"x": "*fp32", "y": "*fp32", "columns": "i32"}
    kernel = tk.build(tk.softmax, types, {"WIDTH": width}, warps=warps)
    x = rng.normal(0, 4, (5, columns)).astype(np.float32)
    y = np.full_like(x, np.nan)
    launch(kernel, (5,), x, y, columns)
    p = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert row_error(y, p / p.sum(1, keepdims=True)) < TOLERANCE  # ex2.approx: 2 ulp + the argument


@pytest.mark.parametrize(("columns", "warps"), [(50, 1), (600, 4)])
def test_scan(columns, warps, rng):
    width = int(2 ** np.ceil(np.log2(columns)))
    types = {"x": "*i32", "y": "*i32", "columns": "i32"}
    kernel = tk.build(tk.scan_rows, types, {"WIDTH": width}, warps=warps)
    x = rng.integers(-(2**31), 2**31, (3, columns), dtype=np.int64).astype(np.int32)
    y = np.zeros_like(x)
    launch(kernel, (3,), x, y, columns)
    np.testing.assert_array_equal(y, np.cumsum(x, axis=1, dtype=np.int32))


def test_quantise_mxfp8(rng):
    """Scale 2^ceil(log2(amax / 448)); payload rounded to nearest even: bit for bit."""
    types = {"x": "*fp32", "y": "*fp8e4nv", "scale": "*u8"}
    kernel = tk.build(tk.quantise_mxfp8, types, {"BLOCKS": 64})
    x = rng.standard_normal((256, 32)) * 2.0 ** rng.integers(-40, 40, (256, 1))
    x = x.astype(np.float32)
    y, scale = np.full((256, 32), 0xFF, np.uint8), np.full(256, 0xFF, np.uint8)
    launch(kernel, (4,), x, y, scale)
    ratio = np.abs(x).max(1) / np.float32(448)
    exponent = np.ceil(np.log2(ratio.astype(np.float64)))
    np.testing.assert_array_equal(scale, exponent + 127)
    want = reference.e4m3_encode((x / 2.0 ** exponent[:, None]).astype(np.float32))
    np.testing.assert_array_equal(y, want)
