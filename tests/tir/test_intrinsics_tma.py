"""TMA intrinsics: desc, compiled for the CPU, and impl, emulated, agree bit for bit."""

import numpy as np
import pytest

from blockscale.emulator import TensorMap
from blockscale.tir.intrin import tma
from tests.kit.tcgen05_kernels import call_text, kernel, padded, run, run_desc, swizzled


def tma_load_kernel(call, group, size, loaded):
    """Return a kernel whose CTAs load tiles of ``loaded`` bytes and show shared memory."""
    body = f"""
  for (int i = threadIdx.x; i < {size}; i += 128) smem[i] = 0x55;
  bs_fence_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    uint32_t D = bs_shared(smem);
    bs_mbar_expect(f.bar, {loaded});
    {call};
  }}
  f.wait();
  for (int i = threadIdx.x; i < {size}; i += 128) out[f.rank * {size} + i] = smem[i];
"""
    params = "const __grid_constant__ CUtensorMap map, uint8_t *out, int x, int y"
    return kernel("load", group, body, params)


LOADS = [  # rows, bytes of a row in global and in shared memory, CTAs, whether of an expert
    (128, 128, 128, 1, False),
    (128, 64, 64, 2, False),
    (32, 128, 128, 1, True),
    (16, 64, 64, 1, False),
    (96, 64, 128, 2, False),
    (64, 64, 128, 1, True),
]


def swizzle_name(row_bytes):
    """Name of the swizzle over rows of so many bytes."""
    return f"{row_bytes}B"


def load_case(rows, width, row_bytes, group, expert, swizzle):
    """Whether the impl puts into shared memory what the desc says, where the swizzle says."""
    name = tma.load(rows, width, row_bytes, group, expert)
    rng = np.random.default_rng(rows)
    tensor = rng.integers(0, 256, (3 * rows, 4 * width), dtype=np.uint8)
    spread = row_bytes != width
    box = TensorMap(
        tensor,
        dtype="16U4_ALIGN16B" if spread else "UINT8",
        global_dim=(tensor.shape[1] * (2 if spread else 1), tensor.shape[0]),
        global_strides_bytes=(tensor.shape[1],),
        box_dim=(row_bytes, rows),
        swizzle=swizzle,
    )
    source = f"&map, x, y + f.rank * {rows}, f.bar"
    call = call_text(name).replace(f", S, {row_bytes})", f", {source})")
    assert source in call
    size = rows * row_bytes
    out = np.full((group, size), 0x55, np.uint8)
    x, y = 2 * row_bytes, rows // 2
    # A barrier counts the bytes of packed codes.
    run(tma_load_kernel(call, group, size, rows * width), [box, out, x, y], group, size)
    for rank in range(group):
        top, left = y + rank * rows, 2 * width
        tile = np.ascontiguousarray(tensor[top : top + rows, left : left + width])
        want = np.zeros_like(tile)
        table = {"E": np.zeros(1, np.int32)} if name.endswith("_expert") else {}
        run_desc(name, S=tile, D=want, **table)
        spread_rows = padded(want) if spread else want
        got = out[rank].reshape(rows, row_bytes)
        placed = swizzled(spread_rows)
        if spread:  # the padding is nobody's
            codes = swizzled(padded(np.full_like(want, 255))) != 0
            got, placed = got[codes], placed[codes]
        if not np.array_equal(got, placed):
            return False
    return True


@pytest.mark.parametrize("case", LOADS, ids=str)
def test_tma_load(case):
    """Bytes and padded codes, with both swizzles, for one CTA and for a pair."""
    assert load_case(*case, swizzle_name(case[2]))


def test_tma_load_with_another_swizzle():
    """The other swizzle puts the bytes elsewhere."""
    assert not load_case(*LOADS[1], "NONE")


@pytest.mark.parametrize(("group", "expert"), [(1, False), (2, False), (1, True)])
def test_tma_load_scales(group, expert):
    """A 128x4 tile is 512 bytes in a row, from a map of 32-bit words."""
    name = tma.load_scales(group, expert)
    rng = np.random.default_rng(1)
    tensor = rng.integers(0, 256, (3, 5, 512), dtype=np.uint8)  # row tiles, tiles along K
    box = TensorMap(
        tensor,
        dtype="UINT32",
        global_dim=(128, 5, 3),
        global_strides_bytes=(512, 5 * 512),
        box_dim=(128, 1, 1),
    )
    call = call_text(name).replace(", S)", ", &map, 0, x, y + f.rank, f.bar)")
    out = np.zeros((group, 512), np.uint8)
    run(tma_load_kernel(call, group, 512, 512), [box, out, 3, 1], group, 512)
    for rank in range(group):
        want = np.zeros(512, np.uint8)
        table = {"E": np.zeros(1, np.int32)} if expert else {}
        run_desc(name, S=tensor[1 + rank, 3].copy(), D=want, **table)
        assert np.array_equal(out[rank], want)


STORES = [  # of a warp: its rows, with a swizzle; its columns, without
    (32, 32, "bfloat16", "64B"),
    (32, 64, "float16", "128B"),
    (32, 32, "float32", "128B"),
    (16, 32, "bfloat16", "NONE"),
    (64, 32, "float32", "NONE"),
]


def stored(rows, cols, dtype, swizzle, placed):
    """Run the impl on random bits; return the tensor and what it is to be.

    ``placed`` tells where the bytes of the tile are in shared memory.
    """
    size = 4 if dtype == "float32" else 2
    name, width = tma.store(rows, cols, dtype), cols * size
    tile = np.random.default_rng(cols).integers(0, 256, (rows, width), dtype=np.uint8)
    tensor, want = (np.zeros((2 * rows, 3 * width), np.uint8) for _ in range(2))
    box = TensorMap(
        tensor,
        dtype=dtype.upper(),
        global_dim=(3 * cols, 2 * rows),
        global_strides_bytes=(3 * width,),
        box_dim=(cols, rows),
        swizzle=swizzle,
    )
    source = f"&map, {cols}, {rows // 2}, S"
    call = call_text(name).replace("(D, S)", f"({source})")
    assert source in call
    body = f"""
  fill(0, tile, {tile.size});
  __syncthreads();
  if (threadIdx.x == 0) {{
    uint32_t S = bs_shared(smem);
    {call};
    bs_bulk_commit();
    bs_bulk_wait<0>();
  }}
"""
    params = "const __grid_constant__ CUtensorMap map, const uint8_t *tile"
    run(kernel("store", 1, body, params), [box, placed(tile)], smem=tile.size)
    out = np.zeros((rows, cols), "uint16" if size == 2 else "float32")
    run_desc(name, S=tile.view(out.dtype), D=out)
    want[rows // 2 : rows // 2 + rows, width : 2 * width] = out.view(np.uint8)
    return tensor, want


@pytest.mark.parametrize("case", STORES, ids=str)
def test_tma_store(case):
    """The tile is stored to its place and to no other."""
    assert np.array_equal(*stored(*case, np.copy if case[3] == "NONE" else swizzled))


def test_tma_store_with_another_swizzle():
    """The other swizzle stores other bytes."""
    assert not np.array_equal(*stored(32, 32, "bfloat16", "NONE", swizzled))
