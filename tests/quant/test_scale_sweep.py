"""blockscale.nvfp4_fp8_scale_sweep: the index of the best of 126 scales per block.

Two candidates can be equally good in real numbers; which of them wins then depends on rounding.  So
an index is right when it is the reference's, or when the float64 losses of both agree to 1e-6
relative, and fewer than 1e-3 of the blocks may need that.  Random float32 data in blocks of 16 has
no such ties: equality.
"""

import numpy as np
import pytest
import torch

import blockscale as bs
from tests.kit.helpers import (
    DTYPES,
    fill_freed_memory,
    golden,
    random_matrix,
    rejects,
    same,
    tensor,
    widen,
)
from tests.reference import core as ref

SWEEPS = ("fp4_midpoints", "randn_bfloat16_n1024_s1", "randn_float32_n4_s0", "zero_blocks")


def sweep(x, g, **options):
    """Return the index of each block's result in the table of fl(g * candidate), and the result."""
    candidates = options.get("candidates")
    table = ref.fp8_scale_candidates() if candidates is None else candidates.numpy()
    before = x.clone()
    fill_freed_memory(x.numel() // options.get("block_size", 16) * 4)
    got = bs.nvfp4_fp8_scale_sweep(x, torch.tensor(g, dtype=torch.float32), **options)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert got.dtype == torch.float32
    assert got.shape == (x.numel() // options.get("block_size", 16),)
    table = table * np.float32(g)
    index = np.argmax(got.numpy()[:, None] == table, axis=1)
    same(got.numpy(), table[index])  # every result is a table entry, bit for bit
    return index


def judge(index, x, g, block_size=16, share=1e-3):
    """Hold the indices against the reference by the rule above; return how many differ.

    The floor is for losses near zero (blocks of 1 and 2).  An error d of a weight w is rounded by
    up to 2^-24 w, so its square by 2^-23 |w| |d|, in each of the two candidates.
    """
    expected, _ = ref.scale_sweep(widen(x), g, block_size)
    wrong = np.flatnonzero(index != expected)
    blocks = widen(x).reshape(-1, block_size)[wrong]
    losses = ref.sweep_losses(blocks, ref.sweep_scales(g, ref.fp8_scale_candidates()), np.float64)
    column = np.arange(len(wrong))
    ours, theirs = losses[index[wrong], column], losses[expected[wrong], column]
    larger, energy = np.maximum(ours, theirs), (blocks.astype(np.float64) ** 2).sum(axis=1)
    floor = 2 * 2.0**-23 * np.sqrt(energy * larger) if block_size <= 2 else 0
    assert (np.abs(ours - theirs) <= np.maximum(1e-6 * larger, floor)).all()
    assert len(wrong) <= share * len(index)
    return len(wrong)


@pytest.mark.parametrize("case", SWEEPS)
def test_against_modelopt(case):
    """Goldens of ModelOpt's kernel and of its Python calibrator: float32 exactly."""
    data = golden(f"modelopt_sweep_{case}")
    dtype = str(data["x_dtype"])
    x, g = tensor(data["x_f32"], dtype), float(data["global_amax"])
    index = sweep(x, g)
    if dtype == "float32":
        assert (index == data["best_idx_fused"]).all()
        assert (index == data["best_idx_ref"]).all()
    judge(index, x, g)


def test_real_export_against_modelopt():
    """bf16 weights [64, 128] with zeros, outliers and tiny blocks."""
    data = golden("modelopt_nvfp4_static_bf16")
    x, g = tensor(data["w_f32"], "bfloat16"), float(data["global_amax"])
    index = sweep(x, g)
    judge(index, x, g)
    assert (index != data["sweep_best_idx"]).sum() <= 1  # the same rule: 1e-3 of 512 blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_random(dtype):
    """4096 blocks of differing size; global_amax is the true maximum, half of it, and twice it."""
    x = tensor(random_matrix((64, 1024), "nvfp4", 0, spread=3), dtype)
    top = float(x.abs().max())
    for g in (top, top / 2, top * 2):
        wrong = judge(sweep(x, g), x, g)
        assert wrong == 0 or dtype != "float32"


@pytest.mark.parametrize(
    ("block_size", "share"),
    [(1, 0.15), (2, 0.06), (4, 0.01), (8, 1e-3), (32, 1e-3), (64, 1e-3), (128, 1e-3)],
)
def test_block_sizes(block_size, share):
    """Powers of two.  In short blocks ties are common: 1 x 1.5 s and 1.5 x s are the same number.

    Summing in float64 instead of float32 changes 9 %, 3.6 % and 0.4 % of the blocks of 1, 2 and 4.
    """
    x = tensor(np.random.default_rng(1).standard_normal((32, 256)))
    g = float(x.abs().max())
    judge(sweep(x, g, block_size=block_size), x, g, block_size, share)


@pytest.mark.parametrize("shape", [(16,), (7, 16), (3, 5, 48), (4, 8), (2, 24, 2)])
def test_shapes(shape):
    """x is flattened row by row; a row need not be a multiple of the block."""
    x = tensor(np.random.default_rng(2).standard_normal(shape))
    assert judge(sweep(x, 4.0), x, 4.0) == 0


@pytest.mark.parametrize("shape", [(0,), (0, 16)])
def test_empty(shape):
    assert sweep(torch.empty(shape), 1.0).shape == (0,)


def test_edge_blocks():
    """Zero, too small, NaN, inf and overflowing blocks give index 0; neighbours are not touched."""
    x = tensor(np.random.default_rng(3).standard_normal((8, 16)))
    normal = sweep(x, 4.0)
    x[1], x[2] = 0.0, 1e-9
    x[3, 5], x[4, 0], x[5, 7], x[6, 1] = np.nan, np.inf, -np.inf, 1e20
    index = sweep(x, 4.0)
    assert index[1:7].tolist() == [0] * 6
    assert index[[0, 7]].tolist() == normal[[0, 7]].tolist()
    assert (normal > 0).all()


def test_zero_block_keeps_the_smallest_candidate():
    """Not 0: the exported scale byte of a zero block is 1."""
    got = bs.nvfp4_fp8_scale_sweep(torch.zeros(2, 16), torch.tensor([448.0]))
    assert got.tolist() == [2.0**-9, 2.0**-9]


def test_edge_globals():
    """global_amax 0 gives 0, NaN gives NaN; a tiny one works as any other."""
    x = tensor(np.random.default_rng(4).standard_normal((5, 16)))
    assert bs.nvfp4_fp8_scale_sweep(x, torch.tensor(0.0)).tolist() == [0.0] * 5
    assert bs.nvfp4_fp8_scale_sweep(x, torch.tensor(float("nan"))).isnan().all()
    assert judge(sweep(x * 1e-7, 3e-7), x * 1e-7, 3e-7) == 0
    assert (sweep(x * 1e3, 1.0) == 125).all()


def test_a_scale_that_underflows_is_one():
    """With g = 1e-43 the smallest scales are 0, hence 1: they fit 0.3, the others do not."""
    x = torch.full((2, 16), 0.3)
    got = bs.nvfp4_fp8_scale_sweep(x, torch.tensor(1e-43))
    same(got.numpy(), ref.scale_sweep(x.numpy(), 1e-43)[1])
    assert got.tolist() == [0.0, 0.0]  # index 0; the first scale that is not 0 would give 1e-45


def test_a_scale_of_zero_competes_as_one():
    """At 1 the error of 0.75 is 0.25; at 0.7 it is 0.05, and at 0.5 it would be 0."""
    x, candidates = torch.full((2, 16), 0.75), torch.tensor([0.0, 0.7])
    got = bs.nvfp4_fp8_scale_sweep(x, torch.tensor(6.0), candidates=candidates)
    same(got.numpy(), candidates[[1, 1]].numpy() * np.float32(6))
    got = bs.nvfp4_fp8_scale_sweep(2 * x, torch.tensor(6.0), candidates=candidates)
    assert got.tolist() == [0.0, 0.0]  # 1.5 is exact at 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_global_amax_of_any_float_type(dtype):
    """One element of any float type and shape; it is widened to float32."""
    x = tensor(np.random.default_rng(5).standard_normal((5, 16)))
    for g in (torch.tensor(3.25), torch.tensor([3.25]), torch.tensor([[3.25]])):
        got = bs.nvfp4_fp8_scale_sweep(x, g.to(getattr(torch, dtype)))
        same(got.numpy(), ref.scale_sweep(widen(x), 3.25)[1])


def test_own_candidates():
    """They serve as scales and as results, in the order given; the first of equals wins."""
    candidates = torch.tensor([1.0, 0.25, 0.5, 0.75, 0.1])
    x = tensor(np.random.default_rng(6).standard_normal((64, 16)))
    got = bs.nvfp4_fp8_scale_sweep(x, torch.tensor(4.0), candidates=candidates)
    same(got.numpy(), ref.scale_sweep(widen(x), 4.0, 16, candidates.numpy())[1])
    zero = bs.nvfp4_fp8_scale_sweep(torch.zeros(16), torch.tensor(4.0), candidates=candidates)
    assert zero.tolist() == [4.0]
    candidates[0] = np.nan  # its loss is NaN, which is not smaller than any other
    got = bs.nvfp4_fp8_scale_sweep(x, torch.tensor(4.0), candidates=candidates)
    same(got.numpy(), ref.scale_sweep(widen(x), 4.0, 16, candidates.numpy())[1])
    assert not got.isnan().any()
    default = bs.nvfp4_fp8_scale_sweep(x, torch.tensor(4.0), candidates=bs.fp8_scale_candidates())
    same(default.numpy(), bs.nvfp4_fp8_scale_sweep(x, torch.tensor(4.0)).numpy())


X, G = torch.ones(4, 16), torch.tensor([1.0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bs.nvfp4_fp8_scale_sweep(X, G, block_size=0), ["block_size", r"\b0\b"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X, G, block_size=-1), ["block_size", "-1"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X, G, block_size=2.5), ["block_size", r"2\.5"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X, G, block_size="16"), ["block_size", "'16'"]),
        (
            lambda: bs.nvfp4_fp8_scale_sweep(X[:1, :15].contiguous(), G),
            ["15", "not divisible", "16"],
        ),
        (lambda: bs.nvfp4_fp8_scale_sweep(X.reshape(-1)[:15], G, block_size=0), ["block_size"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X.double(), G), [r"\bx\b", "float64", "float32"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X.tolist(), G), [r"\bx\b", "list", "tensor"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X.to("meta"), G), [r"\bx\b", "meta", "cpu"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X[::2], G), [r"\bx\b", r"contiguous\(\)"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X, torch.ones(2)), ["global_amax", "one element"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X, torch.tensor(3)), ["global_amax", "int64"]),
        (lambda: bs.nvfp4_fp8_scale_sweep(X, G, candidates=torch.ones(0)), ["candidates"]),
        (
            lambda: bs.nvfp4_fp8_scale_sweep(X, G, candidates=torch.ones(2, 63)),
            ["candidates", "2, 63"],
        ),
        (
            lambda: bs.nvfp4_fp8_scale_sweep(X, G, candidates=torch.ones(126).double()),
            ["candidates", "float64", "float32"],
        ),
    ],
)
def test_bad_input(call, words):
    """One sentence: the argument, its value, the rule and the remedy."""
    with rejects("nvfp4_fp8_scale_sweep", *words):
        call()
