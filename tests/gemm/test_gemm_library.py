"""tcgen05 GEMMs as users get them: built into a library, its host code and kernels emulated.

What the kernel does by itself is in test_gemm_kernel.py; here is which kernel a call gets, with
which tensor maps and grid, and what is refused.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from blockscale import emulator
from blockscale.base.formats import GEMM
from blockscale.building.builder import build
from blockscale.specs import GroupedMmFp4, MmFp4
from tests.kit import gemm_harness as harness
from tests.kit.gpu_library import library as gpu_library
from tests.kit.pairwise import few

PLAIN = MmFp4(384, 448, "nvfp4", "float32")
MIXED = MmFp4(64, 512, "mxfp8xmxfp4", "bfloat16")
GROUPED = GroupedMmFp4(4, 256, 512, "nvfp4", "float32")
SPLIT = MmFp4(264, 1024, "nvfp4", "float32")
SPLIT_GROUPED = GroupedMmFp4(3, 64, 1024, "nvfp4", "float32")
SMS = 4


def library(of):
    """Return the library that has this function."""
    return gpu_library([of], "sm_100a")


def operands(spec, groups):
    """Random a, b and their scales, and the values of a and b, as `gemm_harness.operand`."""
    rng, fmt = np.random.default_rng(sum(groups)), GEMM[spec.fmt]
    experts = getattr(spec, "experts", 1)
    a = harness.operand(rng, fmt.a.bits, fmt.scale.name, fmt.block, groups, spec.k)
    b = harness.operand(rng, fmt.b.bits, fmt.scale.name, fmt.block, [spec.n] * experts, spec.k)
    return a, b


def scales(operand, experts=None):
    """The scales of an operand in the shape of the function's parameter."""
    tiles, along, _ = operand.scale.shape
    found = torch.from_numpy(operand.scale).reshape(tiles * 128, along * 4)
    return found if experts is None else found.reshape(experts, -1, along * 4)


def call(spec, *args, sms=SMS, built=None):
    run = emulator.run_module(
        built or library(spec), spec.name, *args, target="sm_100a", multiprocessors=sms
    )
    run.check()
    return run


def errors(got, want):
    return np.sqrt(((got - want) ** 2).sum(1) / (want**2).sum(1))


@pytest.mark.parametrize("rows", [1, 32, 40, *few([200, 100, 300], every=3)])
def test_each_bucket(rows):
    """Every kernel of the function computes alpha * a b^T + bias for the rows that are its own."""
    a, b = operands(PLAIN, [rows])
    alpha, bias = torch.tensor([0.375]), torch.arange(PLAIN.n, dtype=torch.float32) * 16
    d = torch.full((rows, PLAIN.n), float("nan"))
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    run = call(PLAIN, *stored, scales(a), scales(b), alpha, bias, d)
    [launch] = run.launches
    number = [32, 64, 128, 256, 1024].index(next(x for x in (32, 64, 128, 256, 1024) if rows <= x))
    assert launch.kernel.endswith(f"kernel{number}")
    want = 0.375 * (a.value @ b.value.T) + bias.numpy()
    assert errors(d.numpy().astype(np.float64), want).max() < 1e-5


@pytest.mark.always
def test_persistent_grid():
    """Clusters are as many as the device holds, and no more than tiles."""
    a, b = operands(PLAIN, [300])
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    grids = []
    for sms in (2, 64):
        d = torch.full((300, PLAIN.n), float("nan"))
        run = call(PLAIN, *stored, scales(a), scales(b), None, None, d, sms=sms)
        grids.append(run.launches[0].grid[0])
        assert errors(d.numpy().astype(np.float64), a.value @ b.value.T).max() < 1e-5
    assert grids[0] == 2
    assert 2 < grids[1] <= 64


@pytest.mark.parametrize("rows", [3, 130])
def test_mixed_formats(rows):
    """E4M3 activations with E2M1 weights, rounded once to bfloat16."""
    a, b = operands(MIXED, [rows])
    d = torch.full((rows, MIXED.n), float("nan"), dtype=torch.bfloat16)
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    call(MIXED, *stored, scales(a), scales(b), None, None, d)
    want = torch.from_numpy(a.value @ b.value.T).to(torch.bfloat16).float().numpy()
    assert errors(d.float().numpy(), want).max() < 1e-3  # float32 sums: ties of bfloat16 only
    assert (d.float().numpy() == want).mean() > 0.999


@pytest.mark.parametrize("groups", [(0, 1, 128, 300), (5, 0, 0, 9), (0, 0, 0, 2)])
def test_grouped(groups):
    """Each expert's rows meet its own weights and alpha; empty experts cost and write nothing."""
    a, b = operands(GROUPED, groups)
    ends = np.cumsum([0, *groups]).astype(np.int32)
    alpha = torch.tensor([2.0, 0.5, 1.0, -1.0])
    d = torch.full((ends[-1], GROUPED.n), float("nan"))
    weights = torch.from_numpy(b.stored).reshape(4, GROUPED.n, -1)
    call(
        GROUPED,
        *(torch.from_numpy(a.stored), weights, scales(a), scales(b, 4)),
        *(torch.from_numpy(ends), alpha, d),
    )
    want = np.concatenate(
        [
            float(alpha[e]) * a.value[ends[e] : ends[e + 1]] @ b.value[e * 256 : e * 256 + 256].T
            for e in range(4)
        ]
    )
    assert errors(d.numpy().astype(np.float64), want).max() < 1e-5


def test_no_rows():
    """Without rows nothing is launched."""
    _, b = operands(PLAIN, [1])
    empty = torch.empty((0, PLAIN.k // 2), dtype=torch.uint8)
    no_scales, d = torch.empty((0, 28), dtype=torch.uint8), torch.empty((0, PLAIN.n))
    weights = torch.from_numpy(b.stored)
    run = call(PLAIN, empty, weights, no_scales, scales(b), None, None, d)
    assert run.launches == []


@pytest.mark.parametrize(
    ("which", "shape", "message"),
    [
        (0, (5, 128), r"a has size 128 in dimension 1, but 224 is expected"),
        (1, (385, 224), r"b has size 385 in dimension 0, but 384 is expected"),
        (2, (256, 28), r"a_scale has size 256 in dimension 0, but 128 is expected"),
        (2, (128, 32), r"a_scale has size 32 in dimension 1, but 28 is expected"),
        (6, (6, 384), r"d has size 6 in dimension 0, but 5 is expected"),
    ],
)
def test_wrong_shapes(which, shape, message):
    a, b = operands(PLAIN, [5])
    d = torch.zeros((5, PLAIN.n))
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    args = [*stored, scales(a), scales(b), None, None, d]
    args[which] = torch.zeros(shape, dtype=args[which].dtype)
    with pytest.raises(ValueError, match=message):
        call(PLAIN, *args)
    assert (d == 0).all()


def test_ragged_scale_rows():
    """Scales of grouped rows come in whole tiles of 128 rows."""
    a, b = operands(GROUPED, (1, 1, 1, 1))
    d = torch.zeros((4, GROUPED.n))
    weights = torch.from_numpy(b.stored).reshape(4, GROUPED.n, -1)
    ends = torch.arange(5, dtype=torch.int32)
    a_scale = scales(a)[:-1].contiguous()
    with pytest.raises(ValueError, match="a_scale has 511 rows, no multiple of 128"):
        call(
            GROUPED,
            *(torch.from_numpy(a.stored), weights, a_scale, scales(b, 4), ends, None, d),
        )


def test_one_library_for_three_targets(tmp_path):
    """Machine code for sm_100a, sm_103a and the family sm_100f in one file."""
    archs = ["sm_100a", "sm_103a", "sm_100f"]
    spec = GroupedMmFp4(2, 64, 128, "nvfp4", "bfloat16")
    made = build([spec], tmp_path / "k.so", level=archs)
    assert made["target"]["archs"] == archs
    data = (tmp_path / "k.so").read_bytes()
    assert data.count(b"\x7fELF") == 1 + len(archs)


def test_other_targets(tmp_path):
    message = "no kernel of mm_fp4 for sm_90a, which has no block-scaled tensor cores.*sm_121a"
    with pytest.raises(TypeError, match=message):
        build([PLAIN], tmp_path / "k.so", level="sm_90a")
    assert not (tmp_path / "k.so").exists()


def test_without_tensorize(tmp_path, monkeypatch):
    """A schedule whose MMA is plain loops is refused, and no library is written."""
    from blockscale.schedules.gemm import tcgen05 as sm100

    monkeypatch.setattr(sm100.tcgen05, "mma", lambda shape: None)
    tensorize = sm100.Schedule.tensorize
    monkeypatch.setattr(
        sm100.Schedule,
        "tensorize",
        lambda self, where, name, **k: name and tensorize(self, where, name, **k),
    )
    with pytest.raises(ValueError, match="is not tensorized"):
        build([MIXED], tmp_path / "k.so", level="sm_100a", ptx=True)
    assert not (tmp_path / "k.so").exists()


def test_codes_that_tma_spreads_are_aligned():
    """TMA spreads 4-bit codes from addresses that are multiples of 32 bytes; others are refused."""
    a, b = operands(MIXED, [2])
    room = torch.zeros(b.stored.size + 16, dtype=torch.uint8)
    room[16:] = torch.from_numpy(b.stored).reshape(-1)
    d = torch.zeros((2, MIXED.n), dtype=torch.bfloat16)
    moved = room[16:].reshape(b.stored.shape)
    with pytest.raises(
        ValueError, match=r"b lies at address .*, which is not a multiple of 32 byte"
    ):
        call(MIXED, torch.from_numpy(a.stored), moved, scales(a), scales(b), None, None, d)


def test_build_of_specs(tmp_path):
    """`blockscale.build` takes specs and a target, and returns the library, loaded."""
    import blockscale as bs

    spec = bs.specs.GroupedMmFp4(2, 64, 128, "nvfp4", "bfloat16")
    lib = bs.build([spec], target="sm_100a", output=tmp_path / "k.so", ptx=True)
    assert lib.manifest["target"]["archs"] == ["sm_100a"]
    a, b = operands(spec, [1, 2])
    weights = torch.from_numpy(b.stored).reshape(2, spec.n, -1)
    d = torch.full((3, spec.n), float("nan"), dtype=torch.bfloat16)
    ends = torch.tensor([0, 1, 3], dtype=torch.int32)
    stored = (torch.from_numpy(a.stored), weights, scales(a), scales(b, 2))
    call(spec, *stored, ends, None, d, built=tmp_path / "k.so")
    want = np.concatenate([a.value[:1] @ b.value[:64].T, a.value[1:] @ b.value[64:].T])
    assert errors(d.float().numpy().astype(np.float64), want).max() < 2**-8


@pytest.mark.always
def test_split_k():
    """Where CTAs of a cluster share K, there is a cluster for each tile, resident or not."""
    a, b = operands(SPLIT, [7])
    d = torch.full((7, SPLIT.n), float("nan"))
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    run = call(SPLIT, *stored, scales(a), scales(b), None, None, d)
    assert run.launches[0].grid[0] == 3 * 4  # tiles of 128 columns, quarters of K
    assert errors(d.numpy().astype(np.float64), a.value @ b.value.T).max() < 1e-5


def test_grouped_split_k():
    """Each expert's rows begin a tile, which is known on the device alone."""
    a, b = operands(SPLIT_GROUPED, (1, 2, 1))
    weights, d = torch.from_numpy(b.stored).reshape(3, 64, -1), torch.full((4, 64), float("nan"))
    ends = torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    given = (torch.from_numpy(a.stored), weights, scales(a), scales(b, 3), ends, None, d)
    run = call(SPLIT_GROUPED, *given)
    assert run.launches[0].grid[0] > SMS
    want = np.concatenate(
        [a.value[ends[e] : ends[e + 1]] @ b.value[64 * e : 64 * e + 64].T for e in range(3)]
    )
    assert errors(d.numpy().astype(np.float64), want).max() < 1e-5


@pytest.mark.parametrize(("active", "sms"), [(1, 62), (99, 3)])  # of no other test: asked once
def test_no_more_clusters_than_run_at_a_time(monkeypatch, active, sms):
    """SMs that no cluster fits on are not counted: the driver is asked how many run.

    Where it says that several CTAs of a kernel fit on an SM, one of them is launched.
    """
    from blockscale.emulator.host import launches

    a, b = operands(PLAIN, [300])
    stored = (torch.from_numpy(a.stored), torch.from_numpy(b.stored))
    d = torch.full((300, PLAIN.n), float("nan"))
    monkeypatch.setattr(launches, "active_clusters", lambda *_: active)
    run = call(PLAIN, *stored, scales(a), scales(b), None, None, d, sms=sms)
    assert run.launches[0].grid[0] == run.launches[0].cluster[0] > 1
    assert errors(d.numpy().astype(np.float64), a.value @ b.value.T).max() < 1e-5
