"""The scale sweep's GPU kernels, run as PTX in the emulator: the CPU kernel's result, bit for bit.

The GPU skips candidates by bounds on the loss and evaluates most others in cheaper arithmetic, so
the data here are what that could go wrong on: ties, midpoints of the grid, clipped blocks, scales
at the ends of their range.  Where the CPU has no FMA its rounding differs; the rule of
test_scale_sweep.py holds then.
"""

import re
from functools import cache, partial

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

from blockscale.base import host
from blockscale.emulator import launch
from blockscale.lower import cuda, nvcc
from blockscale.schedules.quant import gpu_sweep
from blockscale.schedules.steps import preferred, sampled
from blockscale.specs import ScaleSweep
from blockscale.tir.quant.scale_sweep import scale_sweep_threads
from tests.kit.helpers import DTYPES, same, tensor
from tests.kit.kernels import compiled
from tests.kit.pairwise import few, those
from tests.quant.test_scale_sweep import judge
from tests.reference import core as ref

ARCHS = ("sm_90a", "sm_100a")
FUSES = "fma" in host.features()
TABLE = ref.fp8_scale_candidates()


class Kernel:
    """A scheduled sweep as PTX."""

    def __init__(self, spec, arch, sketch=0, choose=preferred, seed=1):
        sch = Schedule(scale_sweep_threads(spec), seed=seed)
        loops = partial(gpu_sweep.scale_sweep, spec=spec, unroll=None)
        [*gpu_sweep.scale_sweep_sketches(spec), loops][sketch](sch, choose)
        made = cuda.sources(sch.mod["main"], "sweep", arch)
        self.ptx = nvcc.compile_cuda_source(made.device, arch, ptx=True).image.decode()
        [kernel] = made.kernels
        self.entry = kernel.name
        [found] = re.findall(rf"{kernel.name}\(([^)]*)\) {{", made.device)
        self.params = [re.findall(r"\w+", param)[-1] for param in found.split(",")]
        self.threads = int(re.search(r"__launch_bounds__\((\d+)\)", made.device)[1])
        self.parts = 1
        if part := re.search(r"b_1 < \(int64_t\)(\d+)", made.device):
            self.parts = int(part[1])

    def __call__(self, x, g, candidates):
        """Return best_amax of ``x`` [blocks, size], a torch tensor; it starts as NaN."""
        blocks = len(x)
        best = np.full(blocks + 1, np.nan, np.float32)
        words = x.contiguous().view(torch.uint8).numpy().reshape(-1).copy()
        values = {
            "best_amax_ptr": best,
            "candidates_ptr": candidates.copy(),
            "global_amax_ptr": np.array([g], np.float32),
            "x_ptr": words,
            "blocks": blocks,
            "count": len(candidates),
        }
        report = launch(
            self.ptx,
            entry=self.entry,
            grid=-(-blocks // (self.threads * self.parts)),
            block=self.threads,
            args=[values[name] for name in self.params],
        )
        assert not report.hazards
        assert np.isnan(best[blocks])
        return best[:blocks]


kernel = cache(Kernel)


@cache
def cpu(spec):
    return compiled(spec, host.level())


def expected(spec, x, g, candidates):
    """Return the CPU kernel's result."""
    best = torch.full((len(x),), np.nan)
    given = torch.tensor([g], dtype=torch.float32)
    cpu(spec)(x.contiguous(), given, torch.from_numpy(candidates), best)
    return best.numpy()


def check(run, spec, x, g, candidates=TABLE):
    """Hold a kernel against the CPU's."""
    got = run(x, g, candidates)
    if FUSES or candidates is not TABLE:
        same(got, expected(spec, x, g, candidates))
    else:
        index = np.argmax(got[:, None] == TABLE * np.float32(g), axis=1)
        judge(index, x, g, spec.block_size, share=0.05)


def random_blocks(rng):
    """Return blocks of normal, heavy-tailed, widely spread, sparse and constant weights."""
    normal = rng.standard_normal((128, 16))
    normal[32:48] /= np.sqrt(rng.random((16, 16)))
    normal[48:72] *= np.exp2(-24 * rng.random((24, 1)))
    normal[72:88] *= rng.random((16, 16)) < 0.1
    normal[88:96] = rng.random((8, 1))
    normal[96:112, 1:] = 0
    return normal


def grid_blocks(rng, g, count):
    """Return blocks of E2M1 values and midpoints, exactly and an ulp beside, of many scales."""
    points = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6])
    scale = (TABLE * np.float32(g) / np.float32(6))[rng.integers(0, 120, (count, 1))]
    values = (points[rng.integers(0, 15, (count, 16))] * scale).astype(np.float32)
    low = slice(count // 2, None)
    values[low] = points[1 + 2 * rng.integers(0, 4, values[low].shape)] * scale[low]
    return values * (1 + 2.0**-23 * rng.integers(-1, 2, values.shape))


def edge_blocks(rng):
    """Return zeros, tiny and huge weights, NaN and infinity, alone and among others."""
    blocks = rng.standard_normal((24, 16))
    blocks[0], blocks[1], blocks[2] = 0, np.nan, np.inf
    blocks[3] *= 1e-9
    blocks[4] *= 1e-30
    for row, value in enumerate((np.nan, np.inf, -np.inf, 1e20, 1e30, 3e38, 6e4, 3e9), start=5):
        blocks[row, row % 16] = value
    blocks[13:16] *= 1e4
    return blocks


def data(dtype, g, unit=None):
    """Return some 210 blocks of ``dtype``; ``unit``: the size of the random ones (g / 4)."""
    rng = np.random.default_rng(round(abs(np.log2(g)) * 64))
    unit = g / 4 if unit is None else unit
    parts = (random_blocks(rng) * unit, grid_blocks(rng, g, 64), edge_blocks(rng) * unit)
    with np.errstate(over="ignore"):
        return tensor(np.concatenate(parts), dtype)


@pytest.mark.always
@those(
    lambda dtype, arch: (dtype, arch) in (("float32", ARCHS[0]), ("bfloat16", ARCHS[1])),
    dtype=list(DTYPES),
    arch=ARCHS,
)
def test_default_candidates(dtype, arch):
    """Everything above, with g the true size of the data, and so small that blocks are clipped."""
    spec = ScaleSweep(dtype)
    check(kernel(spec, arch), spec, data(dtype, 3.1), 3.1)
    check(kernel(spec, arch), spec, data(dtype, 0.05, unit=0.1)[::3], 0.05)


NEAR_TIES = {
    "quick losses": [4431, 12627, 14786, 18323, 35836, 36456, 49290],
    "sums of two roundings": [14807, 19389, 23830, 26677, 34365, 39435, 46976, 50542, 64560],
    "errors of two roundings": [457, 1331, 4749, 18450, 19705, 20480, 22226, 24348, 24814],
}
"""Blocks among 100 000 in which other arithmetic than the definition's has another winner."""


@pytest.mark.skipif(not FUSES, reason="this CPU lacks fma: its kernel rounds otherwise")
@pytest.mark.parametrize("arch", ARCHS)
def test_near_ties(arch):
    """Blocks on midpoints, where the arithmetic decides."""
    spec, rows = ScaleSweep("float32"), np.concatenate(list(NEAR_TIES.values()))
    x = tensor(grid_blocks(np.random.default_rng(0), 3.1, 100_000)[rows])
    check(kernel(spec, arch), spec, x, 3.1)


@pytest.mark.parametrize("g", [2.0**-40, 2.0**62, 2.0**-14])
def test_ends_of_the_range_of_bounds(g):
    """The smallest and the largest global amax for which candidates are skipped."""
    spec = ScaleSweep("float32")
    check(kernel(spec, "sm_90a"), spec, data("float32", g), g)


@pytest.mark.parametrize("g", [2.0**-40.01, 2.0**62.01, 1e-43, 0.0, 3e38, np.nan, np.inf, -1.0])
def test_global_amax_out_of_range(g):
    """All candidates are evaluated, with divisions."""
    spec = ScaleSweep("float32")
    x = tensor(np.random.default_rng(7).standard_normal((20, 16)))
    x[:8] *= min(abs(float(np.nan_to_num(g, posinf=1.0))), 1e37)
    x[8:10] = torch.tensor([[0.0], [np.nan]])
    check(kernel(spec, "sm_90a"), spec, x, g)


def changed(at, value):
    """Return the default candidates but one."""
    table = TABLE.copy()
    table[at] = value
    return table


OWN = {
    "five": np.array([1.0, 0.25, 0.5, 0.75, 0.1], np.float32),
    "one": np.array([0.3], np.float32),
    "nan first": changed(0, np.nan),
    "last an ulp less": changed(125, np.nextafter(TABLE[125], 0, dtype=np.float32)),
    "middle": changed(60, 1.0),
    "descending": TABLE[::-1].copy(),
    "one less": TABLE[:125].copy(),
    "one more": np.append(TABLE, np.float32(0.21)),
    "more, first of equals": np.append(TABLE[::-1], TABLE[:17]).astype(np.float32),
}


@pytest.mark.parametrize("name", OWN)
def test_own_candidates(name):
    """The table is compared bit by bit with the default one: any other is evaluated as a whole."""
    spec, candidates = ScaleSweep("bfloat16"), OWN[name]
    x = data("bfloat16", 4.0)[::9]
    check(kernel(spec, "sm_90a"), spec, x, 4.0, candidates)


@pytest.mark.parametrize(("at", "value"), [(0, 1.0), (120, 0.3), (126, 0.3)])
def test_one_changed_candidate_wins(at, value):
    """Bounds would skip it: blocks that only the changed, or added, scale fits."""
    best = np.float32(value) * np.float32(0.25)
    x = torch.full((3, 16), float(best))
    candidates = changed(at, value) if at < len(TABLE) else np.append(TABLE, np.float32(value))
    got = kernel(ScaleSweep("float32"), "sm_90a")(x, 0.25, candidates)
    same(got, np.full(3, best, np.float32))


@pytest.mark.parametrize(
    ("dtype", "size"),
    few(
        [("float32", 1), ("float16", 7), ("bfloat16", 32), ("float32", 48), ("bfloat16", 128)],
        every=4,
    ),
)
def test_other_block_sizes(dtype, size):
    """Every candidate, in plain loops; blocks above 32 are not held in registers."""
    spec = ScaleSweep(dtype, size)
    x = tensor(np.random.default_rng(size).standard_normal((13, size)), dtype)
    x[3], x[4, 0] = 0, np.nan
    check(kernel(spec, "sm_90a"), spec, x, 3.5)


@pytest.mark.parametrize("dtype", few(list(DTYPES)))
def test_description_of_the_intrinsic(dtype):
    """The same blocks without the device function: its plain loops are the definition."""
    spec = ScaleSweep(dtype)
    check(kernel(spec, "sm_90a", sketch=-1), spec, data(dtype, 3.1)[::9], 3.1)


@pytest.mark.parametrize("sketch", few(range(len(gpu_sweep.scale_sweep_sketches(ScaleSweep())))))
def test_sampled_schedules(sketch):
    """Every sketch with drawn decisions; the last CTA, or its last part, is not full."""
    spec = ScaleSweep("bfloat16")
    run = Kernel(spec, "sm_90a", sketch, sampled, seed=sketch + 1)
    check(run, spec, data("bfloat16", 3.1).repeat(2, 1)[: run.threads + 5], 3.1)


def test_the_flag_is_for_the_packages_candidates():
    """What the kernel compares with is what callers get by default."""
    import blockscale as bs

    same(bs.fp8_scale_candidates().numpy(), TABLE)
