"""Tensor copies against the slow reference: loads, stores, four rows, fills and reductions."""

import itertools
import random
import time

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma import TensorMap, plan
from tests.emulator.reference.tma import BASE, SIZE, SPAN, TABLES, placed, reference


def random_case(rng, swizzle):
    """Legal arguments, coordinates partly outside, a shared address, and the size of the tensor."""
    dtype = rng.choice(["UINT8", "UINT16", "FLOAT16", "BFLOAT16", "INT32", "UINT64", "FLOAT64"])
    size, rank = SIZE.get(dtype, 4), rng.randint(1, 5)
    chunks = rng.randint(1, {"NONE": 9, "32B": 2, "64B": 4}.get(swizzle, 8))
    box = [min(256, chunks * 16 // size)] + [rng.randint(1, 5) for _ in range(rank - 1)]
    dims = [rng.randint(1, 3 * box[0])] + [rng.randint(1, 8) for _ in range(rank - 1)]
    strides, row = [], dims[0] * size
    for dim in dims[1:]:
        strides.append(-(-row // 16) * 16 + 16 * rng.randint(0, 1))
        row = strides[-1] * dim
    coordinates = [rng.randint(-length, dim) for length, dim in zip(box, dims, strict=True)]
    if rng.random() < 0.3:
        coordinates = [rng.randint(0, max(0, d - b)) for d, b in zip(dims, box, strict=True)]
    arguments = {
        "dtype": dtype,
        "global_dim": dims,
        "global_strides_bytes": strides,
        "box_dim": box,
        "swizzle": swizzle,
        "element_strides": [rng.randint(1, 3) for _ in range(rank)],
    }
    return arguments, coordinates, 0x400 + 128 * rng.randint(0, 15), max(row, 16)


@pytest.mark.parametrize("swizzle", TABLES)
def test_random_loads(swizzle):
    rng = random.Random(f"load {swizzle}")
    for _ in range(40):
        arguments, coordinates, shared_address, length = random_case(rng, swizzle)
        memory = np.frombuffer(rng.randbytes(length + 64), np.uint8).copy()
        want = np.full(1 << 17, 0xAA, np.uint8)
        got = want.copy()
        moves = reference(arguments, coordinates, shared_address)
        for source, target in moves:
            want[target] = 0 if source is None else memory[source]
        transfer = plan(TensorMap.at(BASE, **arguments), coordinates, shared_address | 3 << 24)
        transfer.write_shared(got, transfer.read_global(memory, BASE))
        assert (got == want).all()
        assert transfer.tx_bytes == len(moves)
        inside = sorted(source + BASE for source, _ in moves if source is not None)
        assert sorted(transfer.global_bytes()) == inside
        assert transfer.moved_bytes == len(inside)
        assert sorted(transfer.shared_bytes()) == sorted(t | 3 << 24 for _, t in moves)


@pytest.mark.parametrize("swizzle", [mode for mode in TABLES if "FLIP" not in mode])
def test_random_stores_and_reductions(swizzle):
    rng = random.Random(f"store {swizzle}")
    for _ in range(40):
        arguments, coordinates, shared_address, length = random_case(rng, swizzle)
        coordinates = [abs(c) for c in coordinates]
        shared = np.frombuffer(rng.randbytes(1 << 17), np.uint8).copy()
        want = np.frombuffer(rng.randbytes(length + 64), np.uint8).copy()
        got, added = want.copy(), want.copy()
        for target, source in reference(arguments, coordinates, shared_address):
            if target is not None:
                want[target] = shared[source]
        tensor = TensorMap.at(BASE, **arguments)
        transfer = plan(tensor, coordinates, shared_address, load=False)
        transfer.write_global(got, BASE, transfer.read_shared(shared))
        assert (got == want).all()
        if arguments["dtype"] == "UINT64":
            before = added.copy()
            transfer.reduce_global(added, BASE, transfer.read_shared(shared), "xor")
            changed = np.zeros(added.size, bool)
            changed[transfer.global_bytes() - BASE] = True
            assert (added == np.where(changed, before ^ want, before)).all()


def test_each_side_may_be_outside():
    """A 5-D box that leaves the tensor on one side of a dimension: that part is filled."""
    arguments = {
        "dtype": "UINT16",
        "global_dim": [24, 4, 4, 4, 4],
        "global_strides_bytes": [48, 192, 768, 3072],
        "box_dim": [16, 3, 3, 3, 3],
    }
    memory = np.random.default_rng(1).integers(1, 255, 3072 * 4).astype(np.uint8)
    tensor = TensorMap.at(BASE, **arguments)
    for axis, side in itertools.product(range(5), (-1, 1)):
        at = [4, 0, 0, 0, 0]
        at[axis] = -8 if (axis, side) == (0, -1) else 16 if axis == 0 else side * 2
        transfer = plan(tensor, at, 0)
        data = transfer.read_global(memory, BASE).ravel()
        want = [0 if s is None else memory[s] for s, _ in reference(arguments, at, 0)]
        assert data.tolist() == want
        assert 0 < transfer.moved_bytes < transfer.tx_bytes == 16 * 81 * 2


def test_a_box_outside_is_all_fill():
    tensor = TensorMap.at(
        BASE, dtype="FLOAT32", global_dim=[8, 8], global_strides_bytes=[32], box_dim=[8, 8]
    )
    huge = TensorMap.at(
        BASE,
        dtype="UINT8",
        global_dim=[16] * 3,
        global_strides_bytes=[1 << 39] * 2,
        box_dim=[16] * 3,
    )
    assert plan(huge, (0, 2**31 - 1, -(2**31)), 0).moved_bytes == 0
    for at in ([-8, 0], [8, 0], [0, 8], [0, -8], [2**31 - 1, 0], [-(2**31), -(2**31)]):
        transfer = plan(tensor, at, 0)
        assert transfer.moved_bytes == 0
        assert transfer.tx_bytes == 256
        assert not transfer.read_global(np.ones(256, np.uint8), BASE).any()
        assert transfer.global_bytes().size == 0


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("FLOAT16", "f2"), ("FLOAT32", "f4"), ("FLOAT64", "f8"), ("FLOAT32_FTZ", "f4")],
)
def test_nan_fill(dtype, kind):
    """0x7FF7 in every 16 bits, measured on an sm_120 device; the manual only says a special NaN."""
    columns = 16 // np.dtype(kind).itemsize
    tensor = TensorMap.at(
        BASE,
        dtype=dtype,
        global_dim=[columns, 2],
        global_strides_bytes=[16],
        box_dim=[columns, 2],
        oob_fill="NAN_REQUEST_ZERO_FMA",
    )
    memory = np.arange(2 * columns).astype(kind).view(np.uint8)
    data = plan(tensor, [1, 1], 0).read_global(memory, BASE).ravel().view(kind)
    assert data[: columns - 1].tolist() == list(range(columns + 1, 2 * columns))
    assert np.isnan(data[columns - 1 :]).all()
    assert set(data[columns:].view(np.uint16)) == {0x7FF7}


def test_tf32_loads_round():
    """Bits measured on an sm_120 device: ties to even, NaN canonical, infinities and zeros kept."""
    pairs = [(0x3F801001, 0x3F802000), (0x3F803000, 0x3F804000), (0x3F805000, 0x3F804000)]
    pairs += [(0x80000001, 0x80000000), (0x007FFFFF, 0x00800000), (0x7F800001, 0x7FFFE000)]
    pairs += [(0xFF800001, 0x7FFFE000), (0x7F800000, 0x7F800000), (0xFF800000, 0xFF800000)]
    pairs += [(0xBF801000, 0xBF800000), (0x3FFFFFFF, 0x40000000), (0x2000, 0x2000)]
    source = np.array([bits for bits, _ in pairs], np.uint32).view(np.uint8)
    tensor = TensorMap.at(BASE, dtype="TFLOAT32", global_dim=[12], box_dim=[12])
    data = plan(tensor, [0], 0).read_global(source, BASE)
    assert data.ravel().view(np.uint32).tolist() == [bits for _, bits in pairs]


def four_rows(rng, load):
    """A map for gather4 / scatter4, its coordinates and the (global, shared) pairs."""
    swizzle = rng.choice([mode for mode in TABLES if load or "FLIP" not in mode])
    chunks = rng.randint(1, {"32B": 2, "64B": 4}.get(swizzle, 8))
    arguments = {
        "dtype": "UINT16",
        "global_dim": [rng.randint(8, 80), rng.randint(1, 9)],
        "global_strides_bytes": [176],
        "box_dim": [chunks * 8, 1],
        "swizzle": swizzle,
    }
    low = -3 if load else 0
    at = [rng.choice([0, 8, rng.randint(low, 40)]), *(rng.randint(low, 10) for _ in range(4))]
    shared = 0x400 + 128 * rng.randint(0, 7)
    pitch = max(chunks * 16, SPAN.get(swizzle, 128))
    pairs = []
    for row in range(4):
        moves = reference(arguments | {"swizzle": "NONE"}, [at[0], at[row + 1]], 0)
        pairs += [
            (source, placed(shared + row * pitch + offset, swizzle))
            for offset, (source, _) in enumerate(moves)
        ]
    return TensorMap.at(BASE, **arguments), at, shared, pairs


def test_gather4():
    rng = random.Random(4)
    memory = np.frombuffer(rng.randbytes(176 * 10), np.uint8)
    for _ in range(100):
        tensor, at, shared, pairs = four_rows(rng, load=True)
        want = np.full(1 << 13, 0xAA, np.uint8)
        got = want.copy()
        for source, target in pairs:
            want[target] = 0 if source is None else memory[source]
        transfer = plan(tensor, at, shared, mode="tile::gather4")
        transfer.write_shared(got, transfer.read_global(memory, BASE))
        assert (got == want).all()
        assert transfer.tx_bytes == len(pairs)


def test_scatter4():
    rng = random.Random(5)
    memory = np.frombuffer(rng.randbytes(1 << 13), np.uint8)
    for _ in range(100):
        tensor, at, shared, pairs = four_rows(rng, load=False)
        want = np.zeros(176 * 11, np.uint8)
        got = want.copy()
        for target, source in pairs:
            if target is not None:
                want[target] = memory[source]
        transfer = plan(tensor, at, shared, load=False, mode="tile::scatter4")
        transfer.write_global(got, BASE, transfer.read_shared(memory))
        assert (got == want).all()


@pytest.mark.parametrize(
    ("dtype", "operation", "kind"),
    [("INT32", "min", np.int32), ("UINT32", "add", np.uint32), ("FLOAT32", "add", np.float32)],
)
def test_reductions_meet_overlapping_rows(dtype, operation, kind):
    """With stride 0 every row of the box meets the same elements: all of them count."""
    tensor = TensorMap.at(
        BASE, dtype=dtype, global_dim=[8, 5], global_strides_bytes=[0], box_dim=[8, 5]
    )
    rng = np.random.default_rng(6)
    old, source = (rng.integers(-50, 50, size).astype(kind) for size in (8, (5, 8)))
    memory = old.copy()
    transfer = plan(tensor, (0, 0), 0, load=False)
    assert not transfer.distinct
    data = transfer.read_shared(source.view(np.uint8).ravel())
    transfer.reduce_global(memory.view(np.uint8), BASE, data, operation)
    both = np.vstack([old[None, :], source])
    want = both.min(axis=0) if operation == "min" else both.sum(axis=0, dtype=kind)
    assert (memory == want).all()


def test_reductions_take_their_type_from_the_map():
    tensor = TensorMap.at(BASE, dtype="FLOAT64", global_dim=[2], box_dim=[2])
    transfer = plan(tensor, (0,), 0, load=False)
    with pytest.raises(IllegalOperation, match=r"\.add of dtype FLOAT64 .* only u32, s32"):
        transfer.reduce_global(np.zeros(16, np.uint8), BASE, np.zeros((1, 16), np.uint8), "add")


def test_a_plan_is_fast():
    """128 x 128 bytes, 128B swizzle: plan, read and write in under 1 ms (measured: 0.04 ms)."""
    tensor = TensorMap.at(
        BASE,
        dtype="UINT8",
        global_dim=[4096, 512],
        global_strides_bytes=[4096],
        box_dim=[128, 128],
        swizzle="128B",
    )
    memory, shared = np.zeros(4096 * 512, np.uint8), np.zeros(1 << 16, np.uint8)
    spent = []
    for step in range(30):
        start = time.perf_counter()
        transfer = plan(tensor, (128 * (step % 30), step), 0x400)
        transfer.write_shared(shared, transfer.read_global(memory, BASE))
        spent.append(time.perf_counter() - start)
    assert min(spent) < 1e-3
