"""The experts of a checkpoint prepared for kernels, quantised, or refused in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockscale.base.errors import CheckpointError
from tests.kit import checkpoint_files as files
from tests.kit.checkpoint_files import BF16, fp4, words

E, H, I = 3, 64, 32  # noqa: E741 - experts, hidden, intermediate, as everywhere


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("zero_point", [8, 16])
def test_prepared_experts_are_those_of_the_checkpoint(opened, rng, zero_point):
    """Bytes of `prepare` in layout "linear" are the checkpoint's; zeros of 16 go through.

    Where all zeros are 8, which codes without zeros have too, neither weight keeps them.
    """
    tensors = {}
    for e in range(E):
        for p, (out, inner) in (("w1", (I, H)), ("w3", (I, H)), ("w2", (H, I))):
            codes, zero, scale, _ = files.int4(rng, out, inner, 32)
            zero[:] = zero_point
            base = f"m.experts.{e}.{p}."
            stored = words((zero - 1).T, files.STRAIGHT)
            tensors |= {
                f"{base}qweight": np.ascontiguousarray(words(codes, files.STRAIGHT).T),
                f"{base}qzeros": stored,
                f"{base}scales": np.ascontiguousarray(scale.T),
            }
    found = opened(tensors)["m"]
    weights = found.prepare(layout="linear")
    assert torch.equal(weights.w13, found.packed.gate_up)
    tiles = found.prepare(torch.float16, layout="tiles64").to_linear()
    assert torch.equal(tiles.w13, found.packed.gate_up)
    for made in (weights, tiles):
        assert made.zero == (zero_point != 8)
        for zero in (made.w13_zero, made.w2_zero):
            assert zero is None if zero_point == 8 else (zero == zero_point).all()


def test_prepared_nvfp4_keeps_global_scales_of_gate_and_up(opened, rng):
    tensors = {}
    for e in range(E):
        for p, shape in (("w1", (I, H)), ("w3", (I, H)), ("w2", (H, I))):
            parts, _ = fp4(rng, *shape)
            tensors |= {f"m.experts.{e}.{p}.{name}": value for name, value in parts.items()}
    found = opened(tensors)["m"]
    weights = found.prepare(layout="linear")
    assert torch.equal(weights.w13_global, found.global_scale.gate_up)
    assert torch.equal(weights.w2_global, found.global_scale.down)
    assert torch.equal(weights.w2_scale, found.block_scale.down.view(torch.uint8))


@pytest.mark.parametrize(("fmt", "bound"), [("nvfp4", 0.1), ("mxfp4", 0.16)])
def test_plain_experts_are_quantised_each_with_its_own_scales(opened, rng, fmt, bound):
    """Relative error of each row: E2M1 has one bit of mantissa, so about 9 % (nvfp4)."""
    both = rng.standard_normal((E, 2 * I, H)) * np.logspace(-3, 3, 2 * E).repeat(I).reshape(
        E, -1, 1
    )
    down = rng.standard_normal((E, H, I))
    tensors = {
        "m.experts.gate_up_proj": both.astype(BF16),
        "m.experts.down_proj": down.astype(BF16),
    }
    found = opened(tensors)["m"]
    made = found.quantized(fmt)
    for new, old in zip(made.dequantize(), found.dequantize(), strict=True):
        error = (new - old).norm(dim=-1) / old.norm(dim=-1)
        assert error.max() < 1.6 * bound
        assert error.mean() < bound
    if fmt == "nvfp4":
        assert made.global_scale.gate_up.shape == (E, 2)
        amax = both.astype(BF16).astype(np.float32).reshape(E, 2, -1)
        wanted = np.abs(amax).max(-1) / np.float32(2688)
        np.testing.assert_array_equal(made.global_scale.gate_up, wanted)
    assert made.prepare(layout="linear").fmt == fmt


def experts_of(rng, **changes) -> dict[str, np.ndarray]:
    """Two experts in NVFP4; ``changes`` replace or, as None, remove tensors."""
    tensors = {}
    for e in range(2):
        for p, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            parts, _ = fp4(rng, *shape)
            tensors |= {f"m.experts.{e}.{p}.{name}": value for name, value in parts.items()}
    return tensors


def without(tensors, start) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors.items() if not name.startswith(start)}


def test_experts_that_do_not_fit_each_other_are_refused(opened, rng):
    whole = experts_of(rng)
    with pytest.raises(CheckpointError, match="the up weight of expert 1 is not there, of 2 exp"):
        opened(without(whole, "m.experts.1.up_proj"))["m"]
    plain = {"m.experts.1.up_proj.weight": np.ones((I, H), BF16)}
    with pytest.raises(CheckpointError, match="expert 1 has fmt bf16, but expert 0 has nvfp4"):
        opened({**without(whole, "m.experts.1.up_proj"), **plain})["m"]
    plain = {f"m.experts.{e}.up_proj.weight": np.ones((I, H), BF16) for e in range(2)}
    ups = without(without(whole, "m.experts.1.up_proj"), "m.experts.0.up_proj")
    with pytest.raises(CheckpointError, match="up of expert 0 has fmt bf16, but gate has nvfp4"):
        opened({**ups, **plain})["m"]
    with pytest.raises(CheckpointError, match="has gate_up and also gate or up"):
        opened({**whole, "m.experts.gate_up_proj": np.ones((2, H, H), BF16)})["m"]
    with pytest.raises(CheckpointError, match="the down weight of all experts twice is there"):
        opened({**whole, "m.experts.down_proj": np.ones((2, H, I), BF16)})["m"]
    with pytest.raises(CheckpointError, match="only one of gate and up has a bias"):
        opened({**whole, **{f"m.experts.{e}.up_proj.bias": np.ones(I) for e in range(2)}})["m"]
    with pytest.raises(CheckpointError, match="bias of down is"):
        opened({**whole, "m.experts.down_proj_bias": np.ones((2, 7), BF16)})["m"]
    down = {f"m.experts.{e}.down_proj.weight": np.ones((H, 16), BF16) for e in range(2)}
    cut = without(without(whole, "m.experts.0.down"), "m.experts.1.down")
    with pytest.raises(CheckpointError, match=r"but must be \[E, 2 I, H\] and \[E, H, I\]"):
        opened({**cut, **down})["m"]


def test_smoothing_is_kept_if_it_is_one_and_refused_by_kernels(opened, rng):
    whole = experts_of(rng)
    smooth = rng.uniform(0.5, 2, (2, H)).astype(BF16)
    for e in range(2):
        for p in ("gate_proj", "up_proj"):
            whole[f"m.experts.{e}.{p}.pre_quant_scale"] = smooth[e]
    found = opened(whole)["m"]
    np.testing.assert_array_equal(found.gate_up.pre_quant_scale.float(), smooth.astype("f4"))
    with pytest.raises(CheckpointError, match="has smoothing, which no kernel of an MoE layer"):
        found.prepare()
    whole["m.experts.0.up_proj.pre_quant_scale"] = smooth[1]
    with pytest.raises(CheckpointError, match="pre_quant_scale of expert 0 is not that of the oth"):
        opened(whole)["m"]


def test_plain_experts_of_no_layer_are_refused(opened):
    tensors = {
        "m.experts.gate_up_proj": np.ones((2, 24, 10), BF16),
        "m.experts.down_proj": np.ones((2, 7, 5), BF16),
    }
    with pytest.raises(CheckpointError, match="which are no weights of one layer"):
        opened(tensors)["m"]


def test_dense_layers_and_shared_experts_are_no_experts(opened):
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.shared_experts.down_proj")
    ckpt = opened({f"l.0.{name}.weight": np.ones((4, 4), BF16) for name in names})
    assert ckpt.modules == []
    with pytest.raises(KeyError, match="but 4 below it"):
        ckpt["l.0.mlp"]
    with pytest.raises(KeyError, match="has no weight"):
        ckpt.experts("l.0.mlp")
