"""Tensor copies of packed and interleaved tensors, and what is illegal."""

import itertools

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma import TensorMap, plan
from tests.emulator.reference.tma import BASE, placed


@pytest.mark.parametrize("swizzle", ["NONE", "128B", "128B_ATOM_32B"])
@pytest.mark.parametrize(("dtype", "group"), [("16U4_ALIGN16B", 8), ("16U6_ALIGN16B", 12)])
def test_padded_types(dtype, group, swizzle):
    """16 elements in each 16 bytes; the gaps are left alone and do not count (PTX ISA 5.5.1.1)."""
    memory = np.random.default_rng(2).integers(0, 256, 4 * 256).astype(np.uint8)
    tensor = TensorMap.at(
        BASE,
        dtype=dtype,
        global_dim=[256, 4],
        global_strides_bytes=[256],
        box_dim=[128, 3],
        swizzle=swizzle,
    )
    got = np.full(4096, 0xAA, np.uint8)
    want = got.copy()
    for row, chunk, byte in itertools.product(range(3), range(8), range(group)):
        target = placed(0x480 + row * 128 + chunk * 16 + byte, swizzle)
        source = memory[(row + 2) * 256 + (8 + chunk) * group + byte] if row < 2 else 0
        want[target] = source
    transfer = plan(tensor, [128, 2], 0x480)
    transfer.write_shared(got, transfer.read_global(memory, BASE))
    assert (got == want).all()
    assert transfer.tx_bytes == 3 * 8 * group
    assert transfer.shared_bytes().size == 3 * 8 * group


def test_packed_fp4_is_a_copy_of_bytes():
    """16U4_ALIGN8B counts nibbles and moves bytes, as UINT8 over half the elements does."""
    memory = np.random.default_rng(3).integers(0, 256, 96 * 20).astype(np.uint8)
    fp4 = TensorMap.at(
        BASE,
        dtype="16U4_ALIGN8B",
        global_dim=[190, 20],
        global_strides_bytes=[96],
        box_dim=[128, 8],
        swizzle="64B",
    )
    plain = TensorMap.at(
        BASE,
        dtype="UINT8",
        global_dim=[95, 20],
        global_strides_bytes=[96],
        box_dim=[64, 8],
        swizzle="64B",
    )
    for nibble, row in ((0, 0), (64, 15), (126, 3), (-34, -2)):
        smem = np.zeros((2, 1024), np.uint8)
        for out, tensor, first in ((smem[0], fp4, nibble), (smem[1], plain, nibble // 2)):
            transfer = plan(tensor, [first, row], 0)
            transfer.write_shared(out, transfer.read_global(memory, BASE))
            assert transfer.tx_bytes == 512
        assert (smem[0] == smem[1]).all()
    with pytest.raises(IllegalOperation, match="first coordinate 33 with 16U4_ALIGN8B starts with"):
        plan(fp4, [33, 0], 0)


@pytest.mark.parametrize("swizzle", ["NONE", "128B", "128B_ATOM_64B"])
def test_six_bit_stores_pack(swizzle):
    """Stores take the low six bits of every byte (PTX ISA 5.5.1.1, .b6p2x16)."""
    shared = np.random.default_rng(4).integers(0, 256, 4096).astype(np.uint8)
    tensor = TensorMap.at(
        BASE,
        dtype="16U6_ALIGN16B",
        global_dim=[128, 3],
        global_strides_bytes=[96],
        box_dim=[128, 3],
        swizzle=swizzle,
    )
    got = np.zeros(288, np.uint8)
    transfer = plan(tensor, [0, 1], 0x400, load=False)
    transfer.write_global(got, BASE, transfer.read_shared(shared))
    for row in range(2):
        values = [int(shared[placed(0x400 + row * 128 + i, swizzle)]) & 63 for i in range(128)]
        number = sum(value << 6 * i for i, value in enumerate(values))
        start = 96 * (row + 1)
        assert bytes(got[start : start + 96]) == number.to_bytes(96, "little")
    assert not got[:96].any()
    assert transfer.moved_bytes == 192


@pytest.mark.parametrize("mode", ["16B", "32B"])
def test_interleaved_slices(mode):
    """NC/8HWC8: dimensions W, H, C, N; whole slices of 16 or 32 bytes move (PTX ISA 5.5.6)."""
    width, channels = (16, 8) if mode == "16B" else (32, 16)
    dims = [7, 5, 20, 2]  # 20 channels: three slices of 8, or two of 16
    slices = -(-20 // channels)
    strides = [7 * width, 35 * width, 35 * width * slices]
    memory = np.random.default_rng(5).integers(0, 256, 70 * width * slices).astype(np.uint8)
    tensor = TensorMap.at(
        BASE,
        dtype="UINT16",
        global_dim=dims,
        global_strides_bytes=strides,
        box_dim=[4, 3, channels + 1, 1],
        element_strides=[2, 1, 1, 1],
        interleave=mode,
        swizzle="NONE" if mode == "16B" else "32B",
    )
    got = np.full(4096, 0xAA, np.uint8)
    want = got.copy()
    at, offset = (5, 3, channels, 1), 0
    for c, h, w, byte in itertools.product(range(2), range(3), range(2), range(width)):
        x, y, z = at[0] + 2 * w, at[1] + h, 1 + c
        inside = x < 7 and y < 5 and z < slices
        source = x * width + y * strides[0] + z * strides[1] + strides[2] + byte
        target = placed(0x400 + offset, "NONE" if mode == "16B" else "32B")
        want[target] = memory[source] if inside else 0
        offset += 1
    transfer = plan(tensor, at, 0x400)
    transfer.write_shared(got, transfer.read_global(memory, BASE))
    assert (got == want).all()
    assert transfer.tx_bytes == offset


def test_interleave_as_measured():
    """An sm_120 device: u32, dimensions (32, 4, 2), box (16, 2, 1), 32-byte slices: 512 bytes."""
    tensor = TensorMap.at(
        BASE,
        dtype="UINT32",
        global_dim=[32, 4, 2],
        global_strides_bytes=[128, 512],
        box_dim=[16, 2, 1],
        interleave="32B",
        swizzle="32B",
    )
    memory = np.arange(1, 1025, dtype=np.uint32).view(np.uint8)
    shared = np.zeros(512, np.uint8)
    transfer = plan(tensor, [4, 0, 0], 0)
    transfer.write_shared(shared, transfer.read_global(memory, BASE))
    words = shared.view(np.uint32)
    assert transfer.tx_bytes == 512
    assert words[:32].tolist() == list(range(33, 65))
    assert words[32:40].tolist() == [69, 70, 71, 72, 65, 66, 67, 68]


def test_short_rows_take_a_whole_row_of_the_pattern():
    """An sm_120 device: 32-byte rows with the 128B swizzle lie 128 bytes apart and count 32."""
    tensor = TensorMap.at(
        BASE,
        dtype="UINT32",
        global_dim=[32, 8],
        global_strides_bytes=[128],
        box_dim=[8, 5],
        element_strides=[1, 2],
        swizzle="128B",
    )
    memory = np.arange(1, 257, dtype=np.uint32).view(np.uint8)
    shared = np.zeros(512, np.uint8)
    transfer = plan(tensor, [0, 0], 0)
    transfer.write_shared(shared, transfer.read_global(memory, BASE))
    words = shared.view(np.uint32)
    assert transfer.tx_bytes == 96
    assert np.flatnonzero(words).tolist() == [*range(8), *range(32, 40), *range(72, 80)]
    assert words[32:40].tolist() == [69, 70, 71, 72, 65, 66, 67, 68]
    assert words[72:80].tolist() == list(range(129, 137))


GOOD = {
    "dtype": "UINT8",
    "global_dim": [256, 64],
    "global_strides_bytes": [256],
    "box_dim": [128, 1],
}
PADDED = {"dtype": "16U4_ALIGN16B", "global_strides_bytes": [512]}
BROKEN = [
    ({}, (0, 0), 0x440, {}, "shared address 0x440 is not a multiple of 128"),
    ({}, (0,), 0, {}, "1 coordinates for a map of rank 2"),
    ({}, (0, -1), 0, {"load": False}, r"coordinates \(0, -1\) of a store have a negative one"),
    ({}, (0, 0), 0, {"mode": "im2col"}, "needs a map of cuTensorMapEncodeIm2col"),
    ({}, (0,) * 5, 0, {"mode": "tile::scatter4"}, r"\.tile::scatter4 on a load .*gather4"),
    ({}, (0, 0), 0, {"mode": "tile::gather4"}, "takes a column and four rows, got 2"),
    ({"box_dim": [128, 4]}, (0,) * 5, 0, {"mode": "tile::gather4"}, r"box_dim\[1\] = 1"),
    (PADDED, (64, 0), 0, {}, "first coordinate 64 with 16U4_ALIGN16B must be a multiple of 128"),
    (PADDED, (0, 0), 0, {"load": False}, "a store with 16U4_ALIGN16B .* only loads"),
    (
        {"swizzle": "128B_ATOM_32B_FLIP_8B"},
        (0, 0),
        0,
        {"load": False},
        "a store with swizzle 128B_ATOM_32B_FLIP_8B",
    ),
    (
        {"dtype": "16U6_ALIGN16B", "swizzle": "128B_ATOM_64B", "global_strides_bytes": [512]},
        (0, 0),
        0,
        {},
        "a load of 16U6_ALIGN16B with swizzle 128B_ATOM_64B",
    ),
]


@pytest.mark.parametrize(("changes", "at", "shared", "how", "sentence"), BROKEN)
def test_illegal_copies_are_named(changes, at, shared, how, sentence):
    tensor = TensorMap.at(BASE, **(GOOD | changes))
    with pytest.raises(IllegalOperation, match=sentence) as raised:
        plan(tensor, at, shared, **how)
    assert len(str(raised.value).splitlines()) == 1
    assert ";" in str(raised.value)


def test_an_unaligned_box_is_only_doubtful():
    tensor = TensorMap.at(BASE, **GOOD)
    assert plan(tensor, (16, 0), 0).warnings == ()
    assert "3 bytes past a 16-byte boundary" in plan(tensor, (-13, 0), 0).warnings[0]
