"""DeepGEMM's mega MoE calls: bytes of weights as its own code makes them, results in float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from blockscale.compat import deepgemm
from blockscale.ops import layouts
from tests.kit.helpers import golden
from tests.kit.pairwise import few
from tests.reference import core as ref
from tests.reference import moe

E, H, INNER, TOP_K = 3, 256, 128, 2
KINDS = {"fp8xfp4": "mxfp4", "fp4xfp4": "nvfp4"}


def layer_of(mma_type: str) -> moe.Layer:
    """A random layer whose weights have no global scales."""
    layer = moe.random_layer(E, H, INNER, KINDS[mma_type])
    layer.w13_global_scale = layer.w2_global_scale = None
    return layer


def tensors(layer: moe.Layer) -> tuple[Any, Any]:
    """Codes and scale bytes of both weights."""
    names = (("w13", "w13_scale"), ("w2", "w2_scale"))
    first, second = ([torch.from_numpy(getattr(layer, n)) for n in pair] for pair in names)
    return (first[0].view(torch.int8), first[1]), (second[0].view(torch.int8), second[1])


def rows(mma_type: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as DeepGEMM takes them: bytes, scale bytes, and their values in float64."""
    x = np.random.default_rng(seed).normal(0, 1, (count, H)).astype(np.float32)
    act_fmt = deepgemm.MMA_TYPES[mma_type].act_fmt
    codes, byte = moe.codes_of(x, act_fmt, 1.0)
    stored = codes if act_fmt == "mxfp8" else ref.pack(codes)
    return stored, byte, moe.coded(codes, byte, act_fmt, 1.0)


def buffer_of(mma_type: str, count: int) -> tuple[deepgemm.SymmBuffer, np.ndarray, np.ndarray]:
    """A filled buffer, values of its rows, ids."""
    made = deepgemm.get_symm_buffer_for_mega_moe(
        None, E, count, TOP_K, H, INNER, mma_type=mma_type, device="cpu"
    )
    stored, byte, value = rows(mma_type, count)
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(E)[:TOP_K] for _ in range(count)])
    ids[rng.random(ids.shape) < 0.2] = -1
    made.x[:count].view(torch.uint8).copy_(torch.from_numpy(stored))
    made.x_sf[:count] = torch.from_numpy(np.ascontiguousarray(byte)).view(torch.int32)
    made.topk_idx[:count] = torch.from_numpy(ids)
    made.topk_weights[:count] = torch.from_numpy(rng.random(ids.shape).astype(np.float32))
    return made, value, ids


@pytest.mark.parametrize("mma_type", KINDS)
def test_bytes_of_transformed_weights(mma_type: str) -> None:
    """Gate 0-7, up 0-7, gate 8-15 ...; a word's rows of every 128 as 4 (r % 32) + r / 32."""
    layer = layer_of(mma_type)
    first, second = deepgemm.transform_weights_for_mega_moe(*tensors(layer), mma_type=mma_type)
    order = []
    for begin in range(0, INNER, 8):
        order += [*range(begin, begin + 8), *range(INNER + begin, INNER + begin + 8)]
    codes = layer.w13[:, order]
    np.testing.assert_array_equal(first[0].numpy().view(np.uint8), codes)
    np.testing.assert_array_equal(second[0].numpy().view(np.uint8), layer.w2)
    for made, scales in ((first[1], layer.w13_scale[:, order]), (second[1], layer.w2_scale)):
        count, words = scales.shape[1], scales.shape[2] // 4
        assert made.shape == (E, count, words)
        assert made.stride() == (count * words, 1, count)
        got = np.frombuffer(made.transpose(1, 2).contiguous().numpy().tobytes(), np.uint8).reshape(
            E, words, count // 128, 512
        )
        for e, w, r in product(range(E), range(words), range(count)):
            at = 16 * (r % 128 % 32) + 4 * (r % 128 // 32)  # as in an atom of the 128x4 layout
            want = scales[e, r, 4 * w : 4 * w + 4]
            assert (got[e, w, r // 128, at : at + 4] == want).all()


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("mma_type", KINDS)
def test_bytes_of_deepgemm(mma_type: str, words: bool) -> None:
    """What its own transform_weights_for_mega_moe made of the same codes and scales."""
    kept = golden("deepgemm_mega_moe_weights")

    def stored(name: str) -> torch.Tensor:
        return torch.from_numpy(kept[f"{mma_type}/{name}"])

    given = []
    for name in ("l1", "l2"):
        sf = stored(f"{name}_sf")
        sf = layouts.deepgemm_scales(sf, permute=False) if words else sf
        given.append((stored(name).view(torch.int8), sf))
    made = deepgemm.transform_weights_for_mega_moe(*given, mma_type=mma_type)
    for name, (codes, sf) in zip(("l1", "l2"), made, strict=True):
        assert torch.equal(codes.view(torch.uint8), stored(f"{name}_made"))
        assert sf.dtype == torch.int32
        _, rows, columns = sf.shape
        assert sf.stride() == (rows * columns, 1, rows)
        assert torch.equal(sf.transpose(1, 2), stored(f"{name}_sf_made"))


@pytest.mark.parametrize("mma_type", KINDS)
def test_words_are_taken_too(mma_type: str) -> None:
    """Scales as other calls of DeepGEMM have them: int32, rows innermost, none moved."""
    l1, l2 = tensors(layer_of(mma_type))
    words = [(w, layouts.deepgemm_scales(sf, permute=False)) for w, sf in (l1, l2)]
    ours, theirs = (
        deepgemm.transform_weights_for_mega_moe(*given, mma_type=mma_type)
        for given in ((l1, l2), words)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def call(mma_type: str, y: Any, l1: Any, l2: Any, buffer: Any, **more: Any) -> None:
    """Call the function of a type."""
    name = "fp8_fp4_mega_moe" if mma_type == "fp8xfp4" else "fp4_fp4_mega_moe"
    getattr(deepgemm, name)(y, l1, l2, buffer, **more)


def expected(
    layer: moe.Layer, mma_type: str, value: np.ndarray, buffer: Any, ids: np.ndarray, **more: Any
) -> np.ndarray:
    """The layer in float64 on the quantised operands, rounded where the calls round."""
    act_fmt = deepgemm.MMA_TYPES[mma_type].act_fmt
    factors, g2 = more.get("factors", (np.ones((E, 2)), np.ones(E))), more.get("g2", 1.0)
    w13, w2 = layer.dense()
    out = np.zeros((len(value), H))
    for t, j in product(range(len(value)), range(TOP_K)):
        e = ids[t, j]
        if e < 0:
            continue
        both = (value[t] @ w13[e].T) * np.repeat(factors[0][e], INNER)
        h = moe.activate(both[None], "swiglu", 1.0, more.get("limit"))
        codes, byte = moe.codes_of(ref.round_to(h, "bfloat16"), act_fmt, g2)
        middle = moe.coded(codes, byte, act_fmt, g2)[0]
        row = ref.round_to(middle @ w2[e].T * factors[1][e], "bfloat16")
        out[t] += float(buffer.topk_weights[t, j]) * row
    return out


@pytest.mark.parametrize("mma_type", few(list(KINDS)))
def test_results(mma_type: str) -> None:
    """Rows of y; what experts received is added to the counts; T below the buffer's rows."""
    layer, count = layer_of(mma_type), 9
    buffer, value, ids = buffer_of(mma_type, count + 4)
    assert buffer.x.shape[0] == 384
    l1, l2 = deepgemm.transform_weights_for_mega_moe(*tensors(layer), mma_type=mma_type)
    stats = torch.tensor([5, 0, 7], dtype=torch.int32)
    y = torch.full((count, H), float("nan"), dtype=torch.bfloat16)
    call(
        mma_type, y, l1, l2, buffer, cumulative_local_expert_recv_stats=stats, activation_clamp=2.0
    )
    want = expected(layer, mma_type, value[:count], buffer, ids[:count], limit=2.0)
    error = ref.row_error(y.float().numpy(), want)
    assert error.max() < 0.03  # codes between the GEMMs may fall to the other side of a tie
    assert np.median(error) < 4e-3
    received = np.bincount(ids[:count][ids[:count] >= 0], minlength=E)
    assert stats.tolist() == [5 + received[0], received[1], 7 + received[2]]
    again = torch.full_like(y, float("nan"))
    call(mma_type, again, tuple(l1), tuple(l2), buffer, activation_clamp=2.0)  # bytes alone
    assert torch.equal(again, y)
    buffer.destroy()
    assert buffer.x.numel() == 0


def test_global_scales() -> None:
    """Alphas of gate, up and the second GEMM, each expert's; a power of two cancels bit for bit."""
    layer, mma_type = layer_of("fp4xfp4"), "fp4xfp4"
    buffer, value, ids = buffer_of(mma_type, 7)
    l1, l2 = deepgemm.transform_weights_for_mega_moe(*tensors(layer), mma_type=mma_type)
    first = torch.tensor([[0.5, 1.5], [1.0, 0.75], [2.0, 0.25]])
    second, g2 = torch.tensor([0.25, 3.0, 1.5]), torch.full((E,), 0.125)
    y = torch.full((7, H), float("nan"), dtype=torch.bfloat16)
    deepgemm.fp4_fp4_mega_moe(
        y, l1, l2, buffer, l1_alphas=first, l2_alphas=second * g2, a2_scales=g2
    )
    factors = first.double().numpy(), second.double().numpy()
    want = expected(layer, mma_type, value, buffer, ids, factors=factors, g2=0.125)
    error = ref.row_error(y.float().numpy(), want)
    assert error.max() < 0.05
    assert np.median(error) < 4e-3
    plain, moved = (torch.empty_like(y) for _ in range(2))
    deepgemm.fp4_fp4_mega_moe(plain, l1, l2, buffer)
    deepgemm.fp4_fp4_mega_moe(
        moved, l1, l2, buffer, l2_alphas=torch.full((E,), 4.0), a2_scales=torch.ones(E)
    )
    assert torch.equal(moved.float(), 4 * plain.float())
    rolled = torch.empty_like(y)
    deepgemm.fp4_fp4_mega_moe(
        rolled, l1, l2, buffer, l1_alphas=first.roll(1, 0), l2_alphas=second * g2, a2_scales=g2
    )
    assert not torch.equal(rolled, y)


def test_what_is_refused() -> None:
    """In words."""
    make = deepgemm.get_symm_buffer_for_mega_moe
    with pytest.raises(ValueError, match=r"mma_type='bf16xbf16' is none of \['fp8xfp4', 'fp4xfp4'"):
        make(None, E, 8, 2, H, INNER, mma_type="bf16xbf16")
    with pytest.raises(ValueError, match="hidden=192 is not a multiple of 128"):
        make(None, E, 8, 2, 192, INNER)
    with pytest.raises(ValueError, match="activation='situ'"):
        make(None, E, 8, 2, H, INNER, activation="situ")

    class Ranks:
        def size(self) -> int:
            return 4

    with pytest.raises(ValueError, match="group has 4 ranks, and one is computed"):
        make(Ranks(), E, 8, 2, H, INNER)
    buffer, *_ = buffer_of("fp4xfp4", 5)
    l1, l2 = deepgemm.transform_weights_for_mega_moe(
        *tensors(layer_of("fp4xfp4")), mma_type="fp4xfp4"
    )
    y = torch.empty((5, H), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"buffer\.mma_type is 'fp4xfp4', not 'fp8xfp4'"):
        deepgemm.fp8_fp4_mega_moe(y, l1, l2, buffer)
    with pytest.raises(ValueError, match=r"recipe is \(1, 1, 32\), not \(1, 1, 16\)"):
        deepgemm.fp4_fp4_mega_moe(y, l1, l2, buffer, recipe=(1, 1, 32))
    with pytest.raises(ValueError, match="y has 400 rows, and the buffer 384"):
        deepgemm.fp4_fp4_mega_moe(y.new_empty((400, H)), l1, l2, buffer)
    with pytest.raises(ValueError, match="a2_scales differ"):
        deepgemm.fp4_fp4_mega_moe(y, l1, l2, buffer, a2_scales=torch.tensor([1.0, 2.0, 1.0]))
    buffer.x[3] &= 0x33
    with pytest.raises(ValueError, match="of row 3 of x has the largest code 3, not 7"):
        deepgemm.fp4_fp4_mega_moe(y, l1, l2, buffer)
    with pytest.raises(ValueError, match="activation='relu2'"):
        deepgemm.transform_weights_for_mega_moe(*tensors(layer_of("fp4xfp4")), "relu2", "fp4xfp4")
