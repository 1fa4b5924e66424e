"""Operands of tcgen05 and wgmma in shared memory against swizzle atoms in plain loops."""

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tcgen05.descriptor import SmemDescriptor
from blockscale.emulator.tcgen05.operand import tile_offsets
from blockscale.emulator.tcgen05.unpack import from_shared, from_tensor_memory, unpack_chunks

CODES = {"none": 0, "128B_base32B": 1, "128B": 2, "64B": 4, "32B": 6}
WGMMA = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def descriptor(start, leading, stride, swizzle, base_offset=0, generation="tcgen05"):
    """The 64 bits, field by field as in PTX ISA 9.7.16.4.1, Table 40."""
    bits = (start & 0x3FFFF) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | base_offset << 49
    if generation == "wgmma":
        return bits | WGMMA[swizzle] << 62
    return bits | 1 << 46 | CODES[swizzle] << 61


def atom_chunk(swizzle, line, chunk):
    """Place of a 16-byte chunk of a line in one swizzle atom: the figures of 9.7.16.10.6."""
    if swizzle == "none":
        return line * 16  # one chunk per line
    if swizzle == "32B":
        return line * 32 + (chunk ^ (line >> 2 & 1)) * 16
    if swizzle == "64B":
        return line * 64 + (chunk ^ (line >> 1 & 3)) * 16
    if swizzle == "128B":
        return line * 128 + (chunk ^ line) * 16
    pair, half = divmod(chunk, 2)  # atoms of 32 bytes
    return line * 128 + (pair ^ (line & 3)) * 32 + half * 16


CHUNKS = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B_base32B": 8}


def k_major_byte(swizzle, leading, stride, base, first_chunk, row, byte):
    """Rows are lines; atoms of 8 lines stand SBO bytes apart."""
    chunk = byte // 16
    if swizzle == "none":
        return base + row // 8 * stride + row % 8 * 16 + chunk * leading + byte % 16
    place = atom_chunk(swizzle, row % 8, first_chunk + chunk)
    return base + row // 8 * stride + place + byte % 16


def mn_major_byte(swizzle, leading, stride, base, size, row, byte):
    """K is the line; atoms are LBO apart along M or N, SBO along K (no swizzle: reversed)."""
    k, inner = divmod(byte, size)
    position = row * size + inner
    chunk = position // 16
    if swizzle == "none":
        return base + chunk * stride + k // 8 * leading + k % 8 * 16 + position % 16
    lines = 4 if swizzle == "128B_base32B" else 8
    atom = chunk // CHUNKS[swizzle] * leading + k // lines * stride
    return base + atom + atom_chunk(swizzle, k % lines, chunk % CHUNKS[swizzle]) + position % 16


@pytest.mark.parametrize("generation", ["tcgen05", "wgmma"])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("base", [1024, 0x400 * 7, 0x2C000])
def test_k_major_reads_the_atoms_of_the_manual(swizzle, base, generation):
    """All steps along K inside the swizzle's row, random SBO (and LBO where it counts)."""
    rng = np.random.default_rng(7)
    steps = range(1) if swizzle == "none" else range(CHUNKS[swizzle] // 2)
    for step in steps:
        atom = 128 * CHUNKS[swizzle]  # bytes of 8 lines
        stride = atom * int(rng.integers(1, 9))
        leading = 128 * int(rng.integers(1, 30))
        value = descriptor(base + 32 * step, leading, stride, swizzle, generation=generation)
        got = tile_offsets(SmemDescriptor.decode(value, generation), 40, 32)
        for row in range(40):
            for byte in range(32):
                want = k_major_byte(swizzle, leading, stride, base, 2 * step, row, byte)
                assert got[row, byte] == want & 0x3FFFF, (row, byte)


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B", "128B_base32B"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_mn_major_reads_the_atoms_of_the_manual(swizzle, size):
    rng = np.random.default_rng(size)
    rows, k = 256 // size, 32 // size
    atom = 512 if swizzle == "128B_base32B" else 128 * CHUNKS[swizzle]
    stride, leading = (atom * int(x) for x in rng.integers(1, 6, 2))
    value = descriptor(2048, leading, stride, swizzle)
    got = tile_offsets(SmemDescriptor.decode(value), rows, k * size, size * 8, "MN")
    for row in range(rows):
        for byte in range(k * size):
            assert got[row, byte] == mn_major_byte(swizzle, leading, stride, 2048, size, row, byte)


def test_every_byte_of_a_tile_is_read_once():
    for swizzle in ("32B", "64B", "128B"):
        for major in ("K", "MN"):
            width = CHUNKS[swizzle] * 16
            value = descriptor(1024, 8 * width, 8 * width if major == "K" else 8192, swizzle)
            rows, row_bytes = (64, width) if major == "K" else (64, 8)
            got = tile_offsets(SmemDescriptor.decode(value), rows, row_bytes, 8, major)
            assert len(np.unique(got)) == got.size


def test_base_offset_moves_the_phase_of_the_pattern():
    """A 128-byte pattern that starts at 0x300 more than a multiple of 1024 has base offset 6."""
    start = 0x2300
    value = descriptor(start, 0, 1024, "128B", base_offset=start >> 7 & 7)
    got = tile_offsets(SmemDescriptor.decode(value), 16, 16)
    for row in range(16):
        want = start + row * 128
        # the pattern's line is the row counted from the start, the address bits are the real ones
        want = (want & ~0x70) | ((want >> 4 & 7) ^ (row % 8)) << 4
        assert got[row, 0] == want
    plain = tile_offsets(SmemDescriptor.decode(descriptor(start, 0, 1024, "128B")), 16, 16)
    assert (plain != got).any()


def test_triton_descriptors():
    """1073758272 << 32 is the high word of both sample kernels: SBO 1024, 128-byte swizzle."""
    decoded = SmemDescriptor.decode(1073758272 << 32 | 0x1234)
    assert decoded == SmemDescriptor(0x12340, 0, 1024, 0, "128B")


@pytest.mark.parametrize(
    ("value", "generation", "message"),
    [
        (0, "tcgen05", "this is a wgmma descriptor; set bit 46"),
        (1 << 46 | 3 << 61, "tcgen05", "swizzle code 3 is invalid"),
        (1 << 46 | 1 << 14, "tcgen05", "bits 14-15 are reserved"),
        (1 << 46 | 1 << 31, "tcgen05", "bits 30-31 are reserved"),
        (1 << 46 | 1 << 55, "tcgen05", "bits 53-60 are 0x4"),
        (1 << 46 | 1 << 52, "tcgen05", "needs sm_103a"),
        (1 << 46, "wgmma", "bits 46-48 are reserved"),
        (1 << 54, "wgmma", "bits 52-61 are reserved"),
    ],
)
def test_illegal_descriptors(value, generation, message):
    with pytest.raises(IllegalOperation, match=message):
        SmemDescriptor.decode(value, generation)


def test_sixteen_elements_of_four_bits_in_sixteen_bytes():
    """The container of mxf8f6f4: 16 nibbles in 8 bytes, then 8 bytes of padding (9.7.16.10.4.4)."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (5, 32), dtype=np.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = from_shared(raw, "mxf8f6f4", "e2m1")
    for row in range(5):
        for k in range(32):
            byte = raw[row, k // 16 * 16 + k % 16 // 2]
            code = byte >> 4 if k % 2 else byte & 15
            assert got[row, k] == values[code & 7] * (-1 if code & 8 else 1)


def test_sixteen_elements_of_six_bits_in_sixteen_bytes():
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (4, 32), dtype=np.uint8)
    codes = unpack_chunks(raw, 6)
    for row in range(4):
        for chunk in range(2):
            bits = int.from_bytes(raw[row, chunk * 16 : chunk * 16 + 12].tobytes(), "little")
            for i in range(16):
                assert codes[row, chunk * 16 + i] == bits >> 6 * i & 63


def test_transposed_chunks_run_along_the_rows():
    """M/N-major 4-bit operands: 16 rows share a chunk."""
    raw = np.random.default_rng(3).integers(0, 256, (32, 6), dtype=np.uint8)
    got = from_shared(raw, "f8f6f4", "e2m1", "MN")
    assert (got == from_shared(np.ascontiguousarray(raw.T), "f8f6f4", "e2m1").T).all()


def test_tensor_memory_containers():
    """mxf4: pairs in a byte; f8f6f4: e2m1 in bits 2-5 and six-bit codes in bits 0-5 of a byte."""
    words = np.array([[0x12345678]], dtype=np.uint32)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert (from_tensor_memory(words, "mxf4", "e2m1") == table[[8, 7, 6, 5, 4, 3, 2, 1]]).all()
    words = np.array([[0x3C201404]], dtype=np.uint32)
    assert (from_tensor_memory(words, "f8f6f4", "e2m1") == table[[1, 5, 8, 15]]).all()
    words = np.array([[0x3F080102]], dtype=np.uint32)
    want = [0.25, 0.125, 1.0, -7.5]
    assert (from_tensor_memory(words, "f8f6f4", "e2m3") == want).all()
