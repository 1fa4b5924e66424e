"""Tensor maps: names, every rule by its sentence, the 128 bytes and their edits."""

import random
import re

import numpy as np
import pytest

from blockscale.emulator.errors import IllegalOperation
from blockscale.emulator.tma import TensorMap, decode, replace
from blockscale.emulator.tma.modes import DataType, Interleave, OobFill, Swizzle, parse, spelling

# cuda.h's enumerations in order, without what all names of one begin with.
CUDA_H = {
    DataType: "UINT8 UINT16 UINT32 INT32 UINT64 INT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16 FLOAT32_FTZ "
    "TFLOAT32 TFLOAT32_FTZ 16U4_ALIGN8B 16U4_ALIGN16B 16U6_ALIGN16B",
    Interleave: "NONE 16B 32B",
    Swizzle: "NONE 32B 64B 128B 128B_ATOM_32B 128B_ATOM_32B_FLIP_8B 128B_ATOM_64B",
    OobFill: "NONE NAN_REQUEST_ZERO_FMA",
}
PREFIX = {
    DataType: "DATA_TYPE_",
    Interleave: "INTERLEAVE_",
    Swizzle: "SWIZZLE_",
    OobFill: "FLOAT_OOB_FILL_",
}
GOOD = {
    "dtype": "FLOAT16",
    "global_dim": (256, 64),
    "global_strides_bytes": (512,),
    "box_dim": (64, 32),
    "swizzle": "128B",
}


def make(address=0x7F00_0000_0000, **changes):
    return TensorMap.at(address, **(GOOD | changes))


@pytest.mark.parametrize("enum", CUDA_H)
def test_every_name_of_cuda_h_in_every_spelling(enum):
    for number, name in enumerate(CUDA_H[enum].split()):
        spellings = [number, name, name.lower(), PREFIX[enum] + name]
        spellings.append("CU_TENSOR_MAP_" + PREFIX[enum] + name)
        assert {int(parse(enum, text, "mode")) for text in spellings} == {number}
        assert spelling(enum(number)) == name


RULES = [
    ({"dtype": "FLOAT8"}, "dtype='FLOAT8' is not in cuda.h's enumeration; use one of UINT8"),
    ({"swizzle": 7}, "swizzle=7 is not in cuda.h's enumeration"),
    ({"global_dim": ()}, "global_dim has 0 dimensions, the rank must be 1 to 5"),
    ({"global_dim": (256,) * 6}, "global_dim has 6 dimensions, the rank must be 1 to 5"),
    (
        {"interleave": "16B", "swizzle": "NONE"},
        "2 dimensions, the rank must be 3 to 5 with interleave=16B",
    ),
    ({"global_strides_bytes": ()}, "global_strides_bytes has 0 entries for rank 2; give 1"),
    ({"box_dim": (64,)}, "box_dim has 1 entries for rank 2; give 2, one per dimension"),
    ({"element_strides": (1, 1, 1)}, "element_strides has 3 entries for rank 2"),
    ({"global_dim": (256, 0)}, r"global_dim[1]=0 is not within 1..2^32"),
    ({"global_dim": (256, 2**32 + 1)}, r"global_dim[1]=4294967297 is not within 1..2^32"),
    ({"global_strides_bytes": (520,)}, "global_strides_bytes[0]=520 is not a multiple of 16"),
    ({"global_strides_bytes": (2**40,)}, "global_strides_bytes[0]=1099511627776 is not within 0.."),
    ({"box_dim": (64, 257)}, "box_dim[1]=257 is not within 1..256"),
    ({"box_dim": (0, 32)}, "box_dim[0]=0 is not within 1..256"),
    ({"element_strides": (1, 9)}, "element_strides[1]=9 is not within 1..8"),
    ({"element_strides": (1, 0)}, "element_strides[1]=0 is not within 1..8"),
    ({"box_dim": (60, 32)}, "box_dim[0]=60 of FLOAT16 is 120 bytes, not a multiple of 16"),
    ({"box_dim": (72, 32)}, "is 144 bytes, more than the 128 of swizzle 128B; use box_dim[0]<=64"),
    ({"swizzle": "32B"}, "more than the 32 of swizzle 32B"),
    ({"swizzle": "64B"}, "more than the 64 of swizzle 64B"),
    ({"swizzle": "128B_ATOM_64B", "box_dim": (128, 1)}, "more than the 128 of swizzle 128B_ATOM"),
    (
        {"dtype": "16U4_ALIGN8B", "global_dim": (255, 64), "box_dim": (128, 1)},
        "global_dim[0]=255 elements is not a multiple of 2",
    ),
    (
        {"dtype": "16U4_ALIGN8B", "box_dim": (48, 1)},
        "box_dim[0]=48 of 16U4_ALIGN8B is 24 bytes, not a multiple of 16; use a multiple of 32",
    ),
    (
        {"dtype": "16U4_ALIGN16B", "global_dim": (192, 64), "box_dim": (128, 1)},
        "global_dim[0]=192 elements is not a multiple of 128 as 16U4_ALIGN16B needs",
    ),
    (
        {"dtype": "16U6_ALIGN16B", "box_dim": (64, 1)},
        "box_dim[0]=64 elements, and 16U6_ALIGN16B needs exactly 128",
    ),
    (
        {"dtype": "16U4_ALIGN16B", "box_dim": (128, 1), "global_strides_bytes": (528,)},
        "global_strides_bytes[0]=528 is not a multiple of 32",
    ),
    (
        {"dtype": "16U4_ALIGN16B", "box_dim": (128, 1), "swizzle": "128B_ATOM_64B"},
        "swizzle=128B_ATOM_64B does not exist for dtype 16U4_ALIGN16B",
    ),
    (
        {"dtype": "16U6_ALIGN16B", "box_dim": (128, 1), "swizzle": "128B_ATOM_32B_FLIP_8B"},
        "swizzle=128B_ATOM_32B_FLIP_8B does not exist for dtype 16U6_ALIGN16B",
    ),
    (
        {
            "interleave": "32B",
            "global_dim": (8, 8, 8),
            "box_dim": (4, 4, 4),
            "global_strides_bytes": (512, 4096),
        },
        "swizzle=128B with interleave=32B, which needs swizzle 32B",
    ),
    (
        {
            "interleave": "16B",
            "dtype": "16U4_ALIGN8B",
            "global_dim": (8, 8, 8),
            "box_dim": (4, 4, 4),
            "global_strides_bytes": (512, 4096),
        },
        "dtype=16U4_ALIGN8B with interleave=16B; sub-byte types need interleave NONE",
    ),
    (
        {"dtype": "UINT16", "oob_fill": "NAN_REQUEST_ZERO_FMA"},
        "oob_fill=NAN_REQUEST_ZERO_FMA with dtype UINT16, which is no floating-point type",
    ),
    ({"address": 1 << 57}, "address 0x200000000000000 is no multiple of 16 below 2^57"),
    ({"address": 0x7F00_0000_0008}, "address 0x7f0000000008 is no multiple of 16"),
    (
        {"address": 0x1010, "dtype": "16U4_ALIGN16B", "box_dim": (128, 1)},
        "address 0x1010 is no multiple of 32",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), RULES, ids=range(len(RULES)))
def test_a_broken_rule_is_named(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        make(**changes)
    assert len(str(raised.value).splitlines()) == 1
    assert ";" in str(raised.value)  # a remedy follows


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"box_dim": 3}, "box_dim=3 is no sequence of integers"),
        ({"box_dim": (64.0, 32)}, "is no sequence of integers"),
        ({"swizzle": None}, "swizzle=None is a NoneType"),
    ],
)
def test_a_wrong_type_is_named(changes, sentence):
    with pytest.raises(TypeError, match=re.escape(sentence)):
        make(**changes)


def test_limits_are_legal():
    make(global_dim=(2**32, 2**32), global_strides_bytes=(2**40 - 16,))
    make(dtype=13, global_dim=(2, 1), global_strides_bytes=(16,), box_dim=(256, 256))
    make(element_strides=(77, 8))  # without interleave the first one is ignored
    make(global_strides_bytes=(0,))  # rows that overlap: broadcasts and windows do that


def test_a_map_has_no_address_until_it_is_bound():
    array = np.zeros((64, 256), np.float16)
    tensor = TensorMap(array, **GOOD)
    assert tensor.array is array
    assert "unbound" in repr(tensor)
    with pytest.raises(ValueError, match="no address yet; pass one or call bind"):
        tensor.encode()
    tensor.bind(0x1000)
    assert tensor.encode() == tensor.encode(0x1000) == make(0x1000).encode()
    assert "FLOAT16 256x64, box 64x32, swizzle 128B" in repr(tensor)


def random_arguments(rng):
    """Legal arguments of cuTensorMapEncodeTiled without a swizzle."""
    rank = rng.randint(1, 5)
    dtype = rng.choice(["UINT8", "UINT16", "INT32", "FLOAT64", "BFLOAT16", "TFLOAT32"])
    size = {"UINT8": 1, "UINT16": 2, "BFLOAT16": 2, "FLOAT64": 8}.get(dtype, 4)
    dims = tuple(rng.randint(1, 40) for _ in range(rank))
    strides, row = [], dims[0] * size
    for dim in dims[1:]:
        strides.append(-(-row // 16) * 16 + 16 * rng.randint(0, 2))
        row = strides[-1] * dim
    box = (16 // size * rng.randint(1, 3), *(rng.randint(1, 5) for _ in range(rank - 1)))
    return {
        "dtype": dtype,
        "global_dim": dims,
        "global_strides_bytes": strides,
        "box_dim": box,
        "element_strides": [rng.randint(1, 3) for _ in range(rank)],
        "l2_promotion": rng.randint(0, 3),
    }


def test_encoded_maps_come_back():
    rng = random.Random(7)
    for _ in range(300):
        tensor = TensorMap.at(rng.randrange(1 << 52) * 32, **random_arguments(rng))
        data = tensor.encode()
        assert len(data) == 128
        back = TensorMap.decode(data)
        assert (back.tiling, back.address) == (tensor.tiling, tensor.address)
        assert hash(back.tiling) == hash(tensor.tiling)
    for swizzle in range(7):
        assert (
            TensorMap.decode(make(swizzle=swizzle, box_dim=(16, 8)).encode()).tiling.swizzle
            == swizzle
        )


@pytest.mark.parametrize("data", [bytes(128), bytes(range(128)), b"", make().encode()[:64]])
def test_other_bytes_are_no_map(data):
    with pytest.raises(IllegalOperation, match=r"are no tensor map \(PTX ISA 5.5.8\); pass"):
        decode(data)


ELEMTYPE = "UINT8 UINT16 UINT32 INT32 UINT64 INT64 FLOAT16 FLOAT32 FLOAT32_FTZ FLOAT64 BFLOAT16 "
ELEMTYPE += "TFLOAT32 TFLOAT32_FTZ 16U4_ALIGN8B 16U4_ALIGN16B 16U6_ALIGN16B"  # PTX ISA, Table 33


@pytest.mark.parametrize("blank", [True, False])
def test_replacing_every_field_builds_a_map(blank):
    """From 128 zero bytes, as Triton's kernels do, or over another map, as grouped GEMMs do."""
    want = make(
        0xABCD00,
        dtype="BFLOAT16",
        global_dim=(40, 50, 60),
        global_strides_bytes=(160, 8000),
        box_dim=(16, 5, 6),
        element_strides=(1, 2, 3),
        swizzle="128B_ATOM_64B",
        oob_fill=1,
    )
    edits = [("global_address", 0xABCD00, 0), ("rank", 2, 0), ("elemtype", 10, 0)]
    edits += [("interleave_layout", 0, 0), ("swizzle_mode", 3, 0), ("swizzle_atomicity", 3, 0)]
    edits += [("fill_mode", 1, 0), ("global_stride", 160, 0), ("global_stride", 8000, 1)]
    for name, values in (
        ("box_dim", (16, 5, 6)),
        ("global_dim", (40, 50, 60)),
        ("element_stride", (1, 2, 3)),
    ):
        edits += [(name, value, index) for index, value in enumerate(values)]
    random.Random(3).shuffle(edits)
    data = bytes(128) if blank else make(swizzle="NONE").encode()
    for field, value, ordinal in edits:
        data = replace(data, field, value, ordinal)
    got = TensorMap.decode(data)
    assert (got.tiling, got.address) == (want.tiling, want.address)


def test_element_types_are_numbered_as_in_ptx():
    names = ELEMTYPE.split()
    base = make(global_dim=(256, 64), box_dim=(128, 8), swizzle="NONE").encode()
    for number, name in enumerate(names):
        assert spelling(decode(replace(base, "elemtype", number))[0].dtype) == name


@pytest.mark.parametrize(
    ("field", "value", "ordinal", "sentence"),
    [
        ("rank", 5, 0, "new value 5 is not within 0..4"),
        ("elemtype", 16, 0, "new value 16 is not within 0..15"),
        ("swizzle_mode", 4, 0, "new value 4 is not within 0..3"),
        ("global_stride", 16, 4, "ordinal 4 is not within 0..3"),
        ("box_dim", 16, 5, "ordinal 5 is not within 0..4"),
        ("element_stride", 9, 0, "new value 9 is not within 1..8"),
        ("colour", 1, 0, "no such field"),
    ],
)
def test_wrong_edits_are_named(field, value, ordinal, sentence):
    with pytest.raises(IllegalOperation, match=sentence):
        replace(make().encode(), field, value, ordinal)


def test_what_edits_leave_is_checked_at_the_copy():
    data = replace(make().encode(), "box_dim", 128, 0)
    with pytest.raises(
        IllegalOperation, match=r"more than the 128 .* as tensormap.replace left it"
    ):
        decode(data)
    data = replace(replace(make().encode(), "swizzle_mode", 1), "swizzle_atomicity", 1)
    with pytest.raises(IllegalOperation, match="only the 128B swizzle has atomicities"):
        decode(data)
    with pytest.raises(IllegalOperation, match="address 0x8 is no multiple of 16"):
        decode(replace(make().encode(), "global_address", 8))
    with pytest.raises(IllegalOperation, match="are no tensor map; copy one there first"):
        replace(b"\1" * 128, "rank", 1)
