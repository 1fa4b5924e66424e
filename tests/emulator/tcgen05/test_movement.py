"""tcgen05.ld, .st, .cp and .shift against their fragments written out element by element."""

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05 import movement
from blockscale.emulator.tcgen05.movement import cp_plan, ld_cells


def fragment(shape, num, split):
    """{(thread, register): (lane, column)}, cell by cell as the manual's figures show them."""
    places = {}
    if shape == "32x32b":
        for lane in range(32):
            for column in range(num):
                places[lane, column] = (lane, column)
    elif shape == "16x32bx2":
        for lane in range(16):
            for column in range(num):
                places[lane, column] = (lane, column)
                places[lane + 16, column] = (lane, column + split)
    for repeat in range(num):
        for lane in range(16):
            if shape == "16x64b":  # rows 0-7 in even threads, rows 8-15 in odd ones
                for column in range(2):
                    thread = lane % 8 * 4 + column * 2 + lane // 8
                    places[thread, repeat] = (lane, 2 * repeat + column)
            elif shape == "16x128b":
                for column in range(4):
                    thread = lane % 8 * 4 + column
                    places[thread, 2 * repeat + lane // 8] = (lane, 4 * repeat + column)
            elif shape == "16x256b":
                for column in range(8):
                    thread = lane % 8 * 4 + column // 2
                    register = 4 * repeat + 2 * (lane // 8) + column % 2
                    places[thread, register] = (lane, 8 * repeat + column)
    return places


@pytest.mark.parametrize("shape", movement.FRAGMENTS)
@pytest.mark.parametrize("num", [1, 2, 8, 32])
@pytest.mark.parametrize("split", [0, 24])
def test_fragments(shape, num, split):
    places = fragment(shape, num, split)
    cells = ld_cells(shape, num, split=split)
    registers = cells.lane.shape[1]
    assert len(places) == 32 * registers
    packed = ld_cells(shape, num, packed=True)
    plain = fragment(shape, num, 0)
    for (thread, register), place in places.items():
        assert (cells.lane[thread, register], cells.column[thread, register]) == place
        lane, column = plain[thread, register]
        for half in range(2):
            at = (thread, register, half)
            if shape == "16x32bx2" or split == 0:
                assert (packed.lane[at], packed.column[at]) == (lane, 2 * column + half)


def test_packing():
    cells = np.array([[[0x11112222, 0x33334444]]], dtype=np.uint32)
    assert movement.pack16(cells) == [[0x44442222]]
    assert (movement.unpack16(np.array([0x44442222], np.uint32)) == [[0x2222, 0x4444]]).all()


def test_reduction_of_a_load():
    values = np.array([[1.5, -3.0, np.nan, 2.0]], np.float32).view(np.uint32)
    assert movement.reduce_columns(values, "max", "f32").view(np.float32) == 2
    assert movement.reduce_columns(values, "max", "f32", absolute=True).view(np.float32) == 3
    assert movement.reduce_columns(values, "min", "f32", nan=True) == 0x7FFFFFFF
    words = np.array([[5, 0xFFFFFFFF]], np.uint32)
    assert movement.reduce_columns(words, "max", "u32") == 0xFFFFFFFF
    assert movement.reduce_columns(words, "min", "s32") == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("shape", "address", "warp", "lane"),
    [
        ("32x32b", 0x0000_0010, 6, 64),  # TVM leaves the lane field 0
        ("32x32b", 0x0040_0010, 2, 64),  # Triton and CuTe add (warp % 4) << 21
        ("16x256b", 0x0010_0000, 3, 112),
        ("16x256b", 0x0070_0000, 3, 112),
    ],
)
def test_lanes_of_a_warp(shape, address, warp, lane):
    assert movement.check_ld_address(shape, 1, False, 0, address, warp) == lane


@pytest.mark.parametrize(
    ("shape", "num", "address", "warp", "message"),
    [
        ("32x32b", 1, 0x0020_0000, 0, "has lane 32, and the warp reaches lanes 0 to 31"),
        ("32x32b", 1, 0x0010_0000, 0, "has lane 16"),
        ("16x64b", 1, 0x0008_0000, 0, "has lane 8"),
        ("32x32b", 128, 385, 0, "reaches column 512"),
    ],
)
def test_illegal_load_addresses(shape, num, address, warp, message):
    with pytest.raises(IllegalOperation, match=message):
        movement.check_ld_address(shape, num, False, 0, address, warp)


COPIES = [
    ("128x256b", "", lambda row: [row]),
    ("128x128b", "", lambda row: [row]),
    ("4x256b", "", lambda row: [32 * row]),
    ("64x128b", "warpx2::02_13", lambda row: [row, row + 64]),
    (
        "64x128b",
        "warpx2::01_23",
        lambda row: [row % 32 + row // 32 * 64, row % 32 + row // 32 * 64 + 32],
    ),
    ("32x128b", "warpx4", lambda row: [row, row + 32, row + 64, row + 96]),
]


@pytest.mark.parametrize(("shape", "multicast", "lanes"), COPIES)
@pytest.mark.parametrize("source", ["", "b4x16_p64", "b6x16_p32"])
def test_copies(shape, multicast, lanes, source):
    """No swizzle: 8 rows of 16 bytes together, SBO to the next 8 rows, LBO to the next bytes."""
    smem = np.random.default_rng(5).integers(0, 256, 1 << 15, dtype=np.uint8)
    start, leading, stride = 0x800, 0x1000, 0x180
    descriptor = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46
    plan = cp_plan(shape, multicast, descriptor, source)
    tmem = np.zeros((128, 8), np.uint32)
    tmem[plan.lane, plan.column] = plan.words(smem[plan.offsets])
    rows, bits = (int(x) for x in shape[:-1].split("x"))
    for row in range(rows):
        for chunk in range(bits // 128):
            at = start + row // 8 * stride + row % 8 * 16 + chunk * leading
            data = smem[at : at + 16].tobytes()
            if source:
                width = int(source[1])
                number = int.from_bytes(data[: 2 * width], "little")
                codes = [number >> width * i & ((1 << width) - 1) for i in range(16)]
                data = bytes(code << 2 if width == 4 else code for code in codes)
            for lane in lanes(row):
                assert tmem[lane, 4 * chunk : 4 * chunk + 4].tobytes() == data


def test_scale_factors_of_128_rows_copied_for_an_mma():
    """The 512-byte atom of 128 x 4 factors: row r, factor j at 16 (r % 32) + 4 (r // 32) + j."""
    smem = np.zeros(4096, np.uint8)
    for r in range(128):
        for j in range(4):
            smem[0x400 + 16 * (r % 32) + 4 * (r // 32) + j] = (r + 50 * j) % 251
    plan = cp_plan("32x128b", "warpx4", 0x400 >> 4 | 128 >> 4 << 32 | 1 << 46)
    tmem = np.zeros((128, 4), np.uint32)
    tmem[plan.lane, plan.column] = plan.words(smem[plan.offsets])
    for partition in range(4):
        for r in range(128):
            word = int(tmem[32 * partition + r % 32, r // 32])
            assert list(word.to_bytes(4, "little")) == [(r + 50 * j) % 251 for j in range(4)]


def test_copy_and_shift_addresses():
    assert movement.check_cp_address("4x256b", 31 << 16 | 504) == (31, 504)
    with pytest.raises(IllegalOperation, match="the lane must be 0"):
        movement.check_cp_address("128x128b", 16 << 16)
    with pytest.raises(IllegalOperation, match="lane must be a multiple of 32"):
        movement.check_shift_address(16 << 16)


def test_shift_down():
    source, target = movement.shift_cells()
    memory = np.arange(32 * 8).reshape(32, 8)
    shifted = memory.copy()
    shifted[target.lane, target.column] = memory[source.lane, source.column]
    assert (shifted[:31] == memory[1:]).all()
    assert (shifted[31] == memory[31]).all()
