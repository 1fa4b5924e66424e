"""GPU kernels of the fused ops, played by the emulator: the bits that the CPU's kernels give.

What is compared is in `test_norm_quantize` and `test_act_quantize`, whose reference both follow.
"""

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule

from blockscale import catalog
from blockscale.catalog import Bucket, fused, registry
from blockscale.emulator import run_module
from blockscale.lower import cuda, nvcc
from blockscale.schedules.fused import gpu as gpu_fused
from blockscale.schedules.steps import preferred
from blockscale.specs import Param, Spec
from tests.fused import test_act_options as options
from tests.fused import test_act_quantize as acts
from tests.fused import test_norm_quantize as norms
from tests.kit import fused_kernels
from tests.kit.gpu_library import library
from tests.kit.pairwise import few

SM90, SM100 = "sm_90a", "sm_100a"
BOTH = pytest.mark.parametrize("arch", [SM90, SM100])


ONE_BUCKET = "one bucket"


@pytest.fixture(autouse=True)
def _one_bucket(monkeypatch):
    """Build one body of each function: the buckets differ by tuning alone."""
    for name in ("NORM_BUCKETS", "ACT_BUCKETS"):
        monkeypatch.setattr(fused, name, (Bucket(8192, None),))


def emulated(arch, changed=ONE_BUCKET):
    """Return what takes the place of `fused_kernels.kernel`: the emulator says what is illegal."""

    def kernel(spec, level):
        return on_emulator(library([spec], arch, changed), spec, arch)

    return kernel


def on_emulator(path, spec, arch):
    """Return a function of CPU tensors: they are copied to memory aligned as on a GPU, and back."""

    def call(*values):
        there = {}
        given = []
        for value in values:
            if isinstance(value, torch.Tensor):
                key = value.data_ptr() or id(value)  # empty tensors are nowhere
                value = there.setdefault(key, (value.clone(), value))[0]
            given.append(value)
        run = run_module(path, spec.name, *given, target=arch)
        assert not [hazard for report in run.reports for hazard in report.hazards]
        for copy, value in there.values():
            value.copy_(copy)

    return call


@pytest.fixture
def use(monkeypatch):
    """Return a function that lets `fused_kernels.run` use the kernels for an architecture."""
    return lambda arch: monkeypatch.setattr(fused_kernels, "kernel", emulated(arch))


NORMS = [
    (SM90, 1, "add_rmsnorm_nvfp4_h256_bf16"),
    (SM100, 7, "add_rmsnorm_nvfp4_h256_bf16"),
    (SM90, 7, "add_rmsnorm_nvfp4_h1536_both_y_fi_bf16"),
    (SM100, 7, "add_rmsnorm_nvfp4_h1536_128x4_y_f16"),
    (SM90, 128, "add_rmsnorm_mxfp4_h512_128x4_bf16"),
    (SM100, 130, "add_rmsnorm_nvfp4_h512_both_bf16"),
    (SM90, 7, "add_rmsnorm_nvfp4_h2880_128x4_y_bf16"),
    (SM100, 7, "add_rmsnorm_e4m3b32_h4096_y_f16"),
    (SM90, 7, "rmsnorm_nvfp4_h4096_fi_bf16"),
    (SM90, 3, "add_rmsnorm_nvfp4_h16384_bf16"),
    (SM100, 2, "add_rmsnorm_mxfp4_h32768_both_y_fi_bf16"),
    (SM100, 7, "rmsnorm_nvfp4_h512_y_fi_f16"),
    (SM90, 7, "rmsnorm_mxfp4_h1536_both_fi_bf16"),
    (SM100, 3, "rmsnorm_e4m3b32_h96_both_y_fi_bf16"),
    (SM90, 5, "add_rmsnorm_nvfp4_h80_128x4_y_bf16"),
]


@pytest.mark.parametrize(
    ("arch", "rows", "name"), few(NORMS, every=5), ids=[f"{n}-{r}" for _, r, n in NORMS]
)
def test_norm(use, arch, rows, name):
    """Whole warps and parts of them, one block a thread and several, padding everywhere."""
    use(arch)
    spec = Spec.parse(name)
    norms.check(spec, norms.inputs(spec, rows, seed=rows), global_scale=0.013)


@BOTH
def test_sums_of_squares(monkeypatch, arch):
    """Every bit of S counts: see the test of the CPU's kernels.  Libraries refuse such an eps."""
    monkeypatch.setattr(Param, "least", None)
    monkeypatch.setattr(fused_kernels, "kernel", emulated(arch, "one bucket, any eps"))
    spec = Spec.parse("add_rmsnorm_nvfp4_h64_y_bf16")
    for seed in range(16):
        given = norms.inputs(spec, 1, seed, spread=0)
        h = norms.widen(given["input"]) + norms.widen(given["residual"])
        mean = norms.fused.square_sums(h)[0] / np.float32(spec.hidden)
        norms.check(spec, given, eps=float(mean * np.float32(2.0**-19 - 1)))


@pytest.mark.parametrize("g", few([1.2e-38, 1e-30, 305.0, 1e6, 3e8, 1e38], every=4))
def test_global_scale(use, g):
    use(SM90)
    for name in ("add_rmsnorm_nvfp4_h256_bf16", "add_rmsnorm_mxfp4_h256_bf16"):
        spec = Spec.parse(name)
        norms.check(spec, norms.inputs(spec, 5), g)


def test_scales_at_ties(use):
    """The order of the products: see the test of the CPU's kernels."""
    use(SM90)
    norms.test_scales_at_ties()


def test_no_rows(use):
    use(SM90)
    norms.test_no_rows()
    acts.test_no_rows()


def test_eps_and_no_alias(use):
    use(SM90)
    spec = Spec.parse("add_rmsnorm_nvfp4_h256_bf16")
    given = norms.inputs(spec, 5, spread=0)
    given["input"][3:], given["residual"][3:] = 0, 0
    for eps in (0.0, 1.0, 1e30):
        norms.check(spec, {name: value.clone() for name, value in given.items()}, eps=eps)
    norms.check(spec, norms.inputs(spec, 7), in_place=False)


SPECIAL = [
    (SM90, "add_rmsnorm_nvfp4_h128_y_bf16"),
    (SM100, "add_rmsnorm_nvfp4_h128_y_fi_f16"),
    (SM90, "add_rmsnorm_mxfp4_h128_y_bf16"),
    (SM100, "rmsnorm_mxfp4_h128_y_fi_bf16"),
    (SM90, "rmsnorm_nvfp4_h128_y_fi_f16"),
]


@pytest.mark.parametrize(("arch", "name"), few(SPECIAL, every=3), ids=[name for _, name in SPECIAL])
def test_special_values(use, arch, name):
    """NaN, infinity, zeros and the ends of the range, alone and in whole blocks and rows."""
    use(arch)
    norms.test_special_values(name)


@pytest.mark.always
@pytest.mark.parametrize(
    ("arch", "fmt"), few([(SM90, "e4m316"), (SM90, "e4m332"), (SM100, "ue8m032")])
)
def test_golden(use, arch, fmt):
    """FlashInfer's data: robust entries of the kernel's model, the residual bit for bit."""
    use(arch)
    norms.test_golden(fmt, "gs")
    norms.test_golden(fmt, "nogs")


@pytest.mark.always
@pytest.mark.parametrize(("arch", "case"), [(SM90, "e4m316_gs672"), (SM100, "ue8m032_gs1")])
def test_golden_edges(use, arch, case):
    use(arch)
    norms.test_golden_edges("bf16", case)


ACTS = [
    (SM90, 1, 1, "silu_and_mul_nvfp4_bf16"),
    (SM100, 7, 130, "silu_and_mul_nvfp4_bf16"),
    (SM90, 7, 5, "silu_and_mul_nvfp4_128x4_bf16"),
    (SM100, 130, 9, "silu_and_mul_nvfp4_128x4_fi_f16"),
    (SM90, 17, 4, "swiglu_mxfp4_fi_bf16"),
    (SM100, 9, 6, "gelu_tanh_and_mul_e4m3b32_8x4_f16"),
    (SM90, 5, 9, "quantize_mxfp4_grouped_128x4_fi_f16"),
    (SM90, 130, 4, "swiglu_nvfp4_grouped_128x4_bf16"),
    (SM100, 8, 4, "quantize_nvfp4_fi_bf16"),
    (SM100, 129, 3, "quantize_nvfp4_grouped_128x4_bf16"),
    (SM90, 3, 3, "quantize_e4m3b32_128x4_bf16"),
    (SM90, 128, 16, "gelu_tanh_and_mul_nvfp4_fi_bf16"),
]


@pytest.mark.parametrize(
    ("arch", "rows", "blocks", "name"), few(ACTS, every=4), ids=[f"{n}-{r}" for _, r, _, n in ACTS]
)
def test_activation(use, arch, rows, blocks, name):
    use(arch)
    spec = Spec.parse(name)
    acts.check(spec, acts.inputs(spec, rows, blocks, seed=rows))


OPTIONS = [
    (SM90, 5, 9, "quantize_nvfp4_fi_f8"),
    (SM100, 130, 4, "quantize_mxfp4_128x4_fi_f8"),
    (SM90, 7, 5, "quantize_nvfp4_rows_128x4_fi_bf16"),
    (SM90, 9, 6, "quantize_nvfp4_4over6_mae_fi_bf16"),
    (SM100, 9, 6, "quantize_nvfp4_4over6_mse_scaled_8x4_fi_f16"),
    (SM90, 130, 7, "quantize_nvfp4_token_128x4_fi_f16"),
    (SM90, 3, 300, "quantize_nvfp4_token_fi_bf16"),
    (SM100, 9, 6, "quantize_nvfp4_token_4over6_mse_fi_bf16"),
    (SM90, 9, 6, "quantize_nvfp4_token_4over6_mae_scaled_8x4_fi_f16"),
]


@pytest.mark.parametrize(
    ("arch", "rows", "blocks", "name"),
    few(OPTIONS, every=4),
    ids=[f"{n}-{r}" for _, r, _, n in OPTIONS],
)
def test_options(use, arch, rows, blocks, name):
    """FP8 input, scales of rows, searches; rows of more blocks than a CTA has threads."""
    use(arch)
    spec = Spec.parse(name)
    options.check(spec, options.inputs(spec, rows, blocks, seed=rows))


def test_special_options(use):
    """NaN, infinity and the ends of the range, in rows that find their scale."""
    use(SM90)
    options.test_ends_of_the_range("bf16", "_4over6_mse")
    options.test_not_a_number()


@pytest.mark.parametrize("cols", [48, 50, 65])
def test_halves_that_are_no_whole_blocks(cols):
    """Refused by the library itself: kernels would access misaligned memory."""
    spec = Spec.parse("silu_and_mul_nvfp4_bf16")
    packed, scale = (torch.zeros(4, cols // by, dtype=torch.uint8) for by in (4, 32))
    with pytest.raises(ValueError, match=rf"input has size {cols} .*2 \* cols.* multiple of 32; p"):
        emulated(SM90)(spec, None)(torch.zeros(4, cols).bfloat16(), None, packed, scale)


@pytest.mark.parametrize("g", [1e-6, 77.0, 3e8])
def test_global_scale_of_activations(use, g):
    use(SM90)
    for name in ("silu_and_mul_nvfp4_bf16", "quantize_nvfp4_fi_bf16"):
        spec = Spec.parse(name)
        acts.check(spec, acts.inputs(spec, 5, 10), g)


def test_special_activations(use):
    """NaN in gate or up; gates whose exponential overflows; zeros, infinities, masks."""
    use(SM90)
    acts.test_not_a_number("silu_and_mul_nvfp4_bf16")
    acts.test_not_a_number("swiglu_mxfp4_fi_bf16")
    acts.test_large_gates("silu_and_mul_nvfp4_bf16")
    for name in acts.ENDS:
        acts.test_zeros_and_infinities(name)
    acts.test_masks_beyond_the_rows()


def test_golden_activations(use):
    """FlashInfer's exact mode, bit for bit."""
    use(SM90)
    acts.test_golden("m3_k128", "bf16", "boundary")
    acts.test_scales_at_ties()


SPACE = [
    ("add_rmsnorm_nvfp4_h2880_128x4_y_bf16", 5, 0),
    ("silu_and_mul_nvfp4_128x4_bf16", 130, 9),
    ("swiglu_nvfp4_grouped_128x4_bf16", 33, 70),
]


@pytest.mark.parametrize("pick", few(range(3), every=3))
@pytest.mark.parametrize(("name", "rows", "blocks"), SPACE, ids=[name for name, _, _ in SPACE])
def test_space(monkeypatch, name, rows, blocks, pick):
    """Every sketch and every number of threads that it may choose."""
    spec = Spec.parse(name)
    [workload] = catalog.workloads(spec, SM90)
    sketches = workload.sketches(SM90)

    def choose(sch, candidates, prefer):
        uniform = [1.0 / len(candidates)] * len(candidates)
        return sch.sample_categorical(candidates, uniform, decision=pick % len(candidates))

    monkeypatch.setattr(registry, "preferred", choose)
    chosen = [sketches[pick % len(sketches)]]
    monkeypatch.setattr(catalog.Workload, "sketches", lambda *_: chosen)
    kernel = on_emulator(library([spec], SM90, f"{ONE_BUCKET}, pick {pick}"), spec, SM90)
    monkeypatch.setattr(fused_kernels, "kernel", lambda spec, level: kernel)
    if spec.op == "norm_quantize":
        norms.check(spec, norms.inputs(spec, rows))
    else:
        acts.check(spec, acts.inputs(spec, rows, blocks))


BULK = [
    (SM90, "add_rmsnorm_nvfp4_h80_y_bf16", 3, "norm_in_bulk", {"order": "rows"}),
    (SM90, "add_rmsnorm_nvfp4_h2880_128x4_bf16", 130, "norm_in_bulk", {"order": "tiles"}),
    (SM100, "add_rmsnorm_mxfp4_h1536_both_f16", 7, "norm_in_bulk", {"order": "rows"}),
]

SKETCHES = [
    (SM90, "add_rmsnorm_nvfp4_h256_128x4_bf16", 130, "norm_quantize", {"order": "tiles"}),
    (SM90, "add_rmsnorm_nvfp4_h2048_y_bf16", 5, "norm_of_warps", {}),
    (SM90, "rmsnorm_nvfp4_h80_128x4_fi_bf16", 131, "norm_of_warps", {}),
    (SM90, "add_rmsnorm_nvfp4_h256_128x4_bf16", 5, "norm_quantize", {"branch_free": False}),
    (SM100, "add_rmsnorm_mxfp4_h1536_both_y_f16", 5, "norm_quantize", {"order": "rows"}),
    (SM100, "add_rmsnorm_mxfp4_h1536_both_bf16", 7, "norm_of_warps", {}),
]


def chosen_sketch(sketches, name, wanted):
    """Return the first sketch of a function whose arguments are as ``wanted``."""
    found = (s for s in sketches if s.func.__name__ == name)
    return next(s for s in found if wanted.items() <= s.keywords.items())


@pytest.mark.parametrize(
    ("arch", "name", "rows", "sketch", "wanted"),
    [*BULK, *few(SKETCHES, every=3)],
    ids=[f"{name}-{sketch}-{rows}" for _, name, rows, sketch, _ in [*BULK, *SKETCHES]],
)
def test_sketches_of_norms(monkeypatch, arch, name, rows, sketch, wanted):
    """Rows of padding, warps without a row; five blocks, of which the last has no neighbour."""
    spec = Spec.parse(name)
    chosen = [chosen_sketch(catalog.workloads(spec, arch)[0].sketches(arch), sketch, wanted)]
    monkeypatch.setattr(catalog.Workload, "sketches", lambda *_: chosen)
    kernel = on_emulator(library([spec], arch, f"{ONE_BUCKET}, {sketch} {wanted}"), spec, arch)
    monkeypatch.setattr(fused_kernels, "kernel", lambda spec, level: kernel)
    norms.check(spec, norms.inputs(spec, rows))


def test_rows_of_a_sector():
    """A CTA's scales are next to those of the CTA before it: 8 of them fill a sector."""
    spec = Spec.parse("add_rmsnorm_nvfp4_h256_128x4_bf16")
    next_to = "((((int64_t)blockIdx.x) & (int64_t)127) * (int64_t)4)"  # of a tile's 128 CTAs
    [workload] = catalog.workloads(spec, SM90)
    for order in ("rows", "tiles"):
        sch = Schedule(workload.symbolic(SM90))
        chosen_sketch(workload.sketches(SM90), "norm_quantize", {"order": order})(
            sch, registry.preferred
        )
        device = cuda.sources(sch.mod["main"], spec.name, SM90).device
        assert (next_to in device) == (order == "tiles")


def test_warps_take_rows_that_fit():
    """A lane holds at most 64 elements: wider rows have no such sketch."""
    for hidden, there in ((2048, True), (2064, False), (64, True)):
        spec = Spec.parse(f"rmsnorm_nvfp4_h{hidden}_bf16")
        sketches = gpu_fused.norm_quantize_sketches(spec, 8, SM90)
        assert any(s.func is gpu_fused.norm_of_warps for s in sketches) == there
        assert not any(s.keywords.get("order") == "tiles" for s in sketches)


@pytest.mark.parametrize("hidden", [64, 96, 2880, 7168, 16384, 28672, 32768, 131072])
def test_threads_of_a_row(hidden):
    """Whole warps, of which none is without a block."""
    for block in (16, 32):
        blocks = hidden // block
        for threads in gpu_fused.row_threads(blocks, block):
            parts = -(-blocks // threads)
            assert 32 <= threads <= 1024
            assert threads % 32 == 0
            assert blocks > (parts - 1) * threads


def test_reductions_name_whole_warps():
    """180 blocks among 192 threads: after the loads of 20 lanes, all 32 take part in the sum."""
    spec = Spec.parse("rmsnorm_nvfp4_h2880_bf16")
    device = cuda.sources(catalog.exported(spec, SM90, {})[spec.name], spec.name, SM90).device
    assert "__shfl_down_sync" in device
    assert "0xFFFFFFFFu" in device
    assert "__activemask" not in device


RESOURCES = [
    *[f"add_rmsnorm_nvfp4_h{hidden}_bf16" for hidden in (64, 2880, 4096, 7168, 16384, 32768)],
    "add_rmsnorm_mxfp4_h7168_both_y_f16",
    "silu_and_mul_nvfp4_128x4_bf16",
    "swiglu_mxfp4_grouped_128x4_fi_f16",
]


@pytest.mark.parametrize("branch_free", [False, True])
def test_a_row_waits_in_16_bits(branch_free):
    """Between its sum and its codes h takes half a register an element: else there are 168.

    ptxas sees that both sides of the reduction round the same numbers, if no branch is between.
    """
    spec = Spec.parse("add_rmsnorm_nvfp4_h2048_bf16")
    [workload] = catalog.workloads(spec, SM90)
    sch = Schedule(workload.symbolic(SM90))
    wanted = {"branch_free": branch_free}
    chosen_sketch(workload.sketches(SM90), "norm_quantize", wanted)(sch, preferred)
    device = cuda.sources(sch.mod["main"], spec.name, SM90).device
    [used] = nvcc.compile_cuda_source(device, SM90).resources
    assert (used["registers"] <= 128) == branch_free


DEFAULTS = [
    ("rmsnorm_nvfp4_h7168_bf16", [448, 448, 128, 128]),
    ("rmsnorm_nvfp4_h2048_bf16", [128, 128, 32, 32]),
    ("rmsnorm_nvfp4_h16384_bf16", [1024, 256, 256, 256]),
    ("rmsnorm_nvfp4_h7168_128x4_bf16", [448, 448, 448, 224]),
    ("rmsnorm_mxfp4_h7168_bf16", [224, 224, 224, 224]),
    ("add_rmsnorm_nvfp4_h7168_128x4_bf16", [448, 448, 224, 224]),
    ("add_rmsnorm_nvfp4_h2048_bf16", [128, 128, 128, 128]),
    ("add_rmsnorm_mxfp4_h7168_bf16", [224, 224, 224, 224]),
]


@pytest.mark.parametrize(("name", "threads"), DEFAULTS, ids=[name for name, _ in DEFAULTS])
def test_default_threads(name, threads):
    """What was fastest on an H200, for 8, 256, 1024 and 8192 rows."""
    spec = Spec.parse(name)
    found = []
    for rows in (8, 256, 1024, 8192):
        prefer = gpu_fused.norm_quantize_sketches(spec, rows, SM90)[0].keywords["prefer"]
        candidates = gpu_fused.row_threads(spec.blocks, spec.block)
        found.append(min(candidates, key=lambda threads, prefer=prefer: abs(threads - prefer)))
    assert found == threads


def test_default_stores():
    """Of many rows with 128x4 scales NVFP4 is stored as MXFP4 is: to stay in the cache."""
    hints = {
        (fmt, layout, rows): gpu_fused.norm_quantize_sketches(
            Spec.parse(f"rmsnorm_{fmt}_h7168{layout}_bf16"), rows, SM90
        )[0].keywords["hint"]
        for fmt in ("nvfp4", "mxfp4")
        for layout in ("", "_128x4")
        for rows in (1024, 4096)
    }
    gone = {case for case, hint in hints.items() if hint == "BS_STREAM"}
    assert gone == {("nvfp4", "", 1024), ("nvfp4", "", 4096), ("nvfp4", "_128x4", 1024)}


def test_rows_stored_in_bulk():
    """From 1024 rows on, where there are bulk copies and a row fits static shared memory."""
    for arch, name, rows, first, there in [
        (SM90, "add_rmsnorm_nvfp4_h7168_bf16", 1024, True, True),
        (SM100, "add_rmsnorm_mxfp4_h16384_128x4_bf16", 8192, True, True),
        (SM90, "add_rmsnorm_nvfp4_h7168_bf16", 256, False, True),
        ("sm_89", "add_rmsnorm_nvfp4_h7168_bf16", 1024, False, False),
        (SM90, "rmsnorm_nvfp4_h7168_bf16", 1024, False, False),
        (SM90, "add_rmsnorm_nvfp4_h24576_bf16", 1024, False, False),
    ]:
        sketches = gpu_fused.norm_quantize_sketches(Spec.parse(name), rows, arch)
        bulk = [sketch.func is gpu_fused.norm_in_bulk for sketch in sketches]
        assert (bulk[0], any(bulk)) == (first, there), (arch, name, rows)


def test_rows_in_bulk_have_no_branches():
    """Their roots are those of `test_a_row_waits_in_16_bits`."""
    spec = Spec.parse("add_rmsnorm_nvfp4_h7168_bf16")
    workload = catalog.workloads(spec, SM90)[-1]
    sch = Schedule(workload.symbolic(SM90))
    chosen_sketch(workload.sketches(SM90), "norm_in_bulk", {})(sch, preferred)
    assert "bs_inverse_root(" in cuda.sources(sch.mod["main"], spec.name, SM90).device


@pytest.mark.parametrize("name", few(RESOURCES, every=4))
def test_registers(name):
    """Default schedules keep everything in registers, few enough for their threads."""
    spec = Spec.parse(name)
    func = catalog.exported(spec, SM90, {})[spec.name]
    compiled = nvcc.compile_cuda_source(cuda.sources(func, spec.name, SM90).device, SM90)
    for used in compiled.resources:
        assert used["stack"] == used["spills"] == 0
        assert used["registers"] <= (128 if spec.op == "norm_quantize" else 48)
