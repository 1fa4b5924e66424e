"""blockscale.layouts: DeepGEMM's scales, gate and up in turns, Marlin's scales; each way back."""

import numpy as np
import pytest
import torch

from blockscale import layouts
from tests.kit.helpers import as_bytes, rejects, same_bytes
from tests.kit.pairwise import each


def distinct(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


# ---- DeepGEMM -----------------------------------------------------------------------------------


def by_address(made):
    """Return the memory of words [E, rows, words], as bytes, in the order of their addresses."""
    e, rows, words = made.shape
    pitch = -(-rows // 4) * 4
    flat = torch.as_strided(made, (e * words * pitch,), (1,))
    return flat.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_deepgemm_addresses(permute, dtype):
    """Every byte at 4 * (word * rows + permuted row) + block % 4 of its expert."""
    scales = distinct(2, 256, 12)
    made = layouts.deepgemm_scales(scales.view(dtype), permute=permute)
    assert (made.dtype, made.shape) == (torch.int32, (2, 256, 3))
    assert made.stride() == (3 * 256, 1, 256)
    memory = by_address(made).reshape(2, 3 * 256 * 4)
    for e, r, b in np.ndindex(2, 256, 12):
        at = r // 128 * 128 + 4 * (r % 32) + r % 128 // 32 if permute else r
        assert memory[e, 4 * (b // 4 * 256 + at) + b % 4] == scales[e, r, b]
    same_bytes(layouts.undo_deepgemm_scales(made, permute=permute).numpy(), scales.numpy())


def test_deepgemm_is_the_128x4_atom():
    """128 rows of one word are the 512 bytes that tcgen05's scale layout has (specification)."""
    scales = distinct(1, 128, 4)
    memory = by_address(layouts.deepgemm_scales(scales))
    for r, b in np.ndindex(128, 4):
        assert memory[16 * (r % 32) + 4 * (r // 32) + b] == scales[0, r, b]


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
def test_deepgemm_ragged_rows(rows):
    """Rows are padded to 16 bytes, with zeros; two axes stay two."""
    scales = distinct(rows, 8)
    made = layouts.deepgemm_scales(scales, permute=False)
    pitch = -(-rows // 4) * 4
    assert made.shape == (rows, 2)
    assert made.stride() == (1, pitch)
    memory = by_address(made[None]).reshape(2, pitch, 4)
    same_bytes(memory[:, :rows].transpose(1, 0, 2).reshape(rows, 8), scales.numpy())
    assert not memory[:, rows:].any()
    same_bytes(layouts.undo_deepgemm_scales(made, permute=False).numpy(), scales.numpy())


def test_bad_deepgemm():
    with rejects("100 rows", "128", "permute=False"):
        layouts.deepgemm_scales(distinct(100, 4))
    with rejects("6 blocks", "multiple of 4"):
        layouts.deepgemm_scales(distinct(128, 6))
    with rejects("empty"):
        layouts.deepgemm_scales(distinct(0, 4))
    with rejects("float32"):
        layouts.deepgemm_scales(torch.ones(128, 4))
    with rejects("int32"):
        layouts.undo_deepgemm_scales(distinct(128, 4))
    with rejects("100 rows", "128"):
        layouts.undo_deepgemm_scales(torch.zeros(100, 1, dtype=torch.int32))
    with rejects(r"\[128\]"):
        layouts.undo_deepgemm_scales(torch.zeros(128, dtype=torch.int32))


def test_own_memory():
    """Results are copies, also where the order changes nothing; odd addresses are read."""
    value = distinct(16, 8)
    words = layouts.deepgemm_scales(value[:, :4].contiguous(), permute=False)
    results = [
        (value, layouts.interleave_gate_up(value, "halves")),
        (value, layouts.deinterleave_gate_up(value, 8)),
        (words, layouts.undo_deepgemm_scales(words, permute=False)),
    ]
    for given, made in results:
        assert given.untyped_storage().data_ptr() != made.untyped_storage().data_ptr()
    odd = torch.empty(129, dtype=torch.uint8)[1:].view(16, 8).copy_(value)
    made = layouts.deepgemm_scales(odd, permute=False)
    same_bytes(layouts.undo_deepgemm_scales(made, permute=False).numpy(), value.numpy())


# ---- Gate and up --------------------------------------------------------------------------------


@pytest.mark.parametrize("granule", [8, 16, 64, "halves"])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_gate_up(granule, experts):
    """Row g * i + j of gate comes at 2g * i + j, of up g later; and back."""
    half, g = 128, 128 if granule == "halves" else granule
    value = distinct(*experts, 2 * half, 6)
    made = layouts.interleave_gate_up(value, granule)
    assert made.is_contiguous()
    for row in range(half):
        at = 2 * g * (row // g) + row % g
        assert torch.equal(made[..., at, :], value[..., row, :])
        assert torch.equal(made[..., at + g, :], value[..., half + row, :])
    assert torch.equal(layouts.deinterleave_gate_up(made, granule), value)


def test_gate_up_of_float8():
    """Scales of eight-bit floats pass as they are."""
    value = distinct(32, 4).view(torch.float8_e4m3fn)
    made = layouts.interleave_gate_up(value, 8)
    same_bytes(as_bytes(made), as_bytes(layouts.interleave_gate_up(value.view(torch.uint8), 8)))


def test_bad_gate_up():
    for function in (layouts.interleave_gate_up, layouts.deinterleave_gate_up):
        with rejects("24 rows", r"2 \* 8"):
            function(distinct(24, 4), 8)
        with rejects("granule=12", "halves"):
            function(distinct(48, 4), 12)
        with rejects(r"\[48\]"):
            function(distinct(48), 8)
        with rejects("3 rows"):
            function(distinct(3, 4), "halves")


# ---- Marlin -------------------------------------------------------------------------------------


def marlin_position(order, m):
    """Return where scale m of a piece goes."""
    if order == "group":
        return 8 * (m % 8) + m // 8
    if order == "e4m3":  # m // 8 with its two low bits exchanged (specification)
        j = m // 8
        return 8 * (m % 8) + (j & 4 | (j & 1) << 1 | (j & 2) >> 1)
    return 8 * (m % 8 // 2) + 2 * (m // 8) + m % 2


@each(order=["group", "column", "e4m3"], dtype=[torch.uint8, torch.float8_e4m3fn, torch.float16])
def test_marlin(order, dtype):
    """Every scale at its position of the piece; dtype and shape stay; and back."""
    piece = 32 if order == "column" else 64
    plain = distinct(2, 3, 192)
    scales = plain.half() if dtype == torch.float16 else plain.view(dtype)
    made = layouts.marlin_scales(scales, order)
    assert (made.dtype, made.shape) == (dtype, scales.shape)
    got = made.to(torch.uint8) if dtype == torch.float16 else made.view(torch.uint8)
    for m in range(192):
        at = m // piece * piece + marlin_position(order, m % piece)
        same_bytes(got[..., at].numpy(), plain[..., m].numpy())
    back = layouts.undo_marlin_scales(made, order)
    same_bytes(as_bytes(back), as_bytes(scales))


def test_bad_marlin():
    for function in (layouts.marlin_scales, layouts.undo_marlin_scales):
        with rejects(r"\[2, 96\]", "64", "128"):
            function(distinct(2, 96))
        with rejects("order='single'", "'column'"):
            function(distinct(2, 64), "single")
        with rejects("int32"):
            function(distinct(2, 64).int())
