"""GPU kernels of quantise, dequantise and swizzle, played by the emulator, against the reference.

Arguments lie between bytes of 0xFF, as in `kernels`; outputs start as 0xFF.
"""

import re

import numpy as np
import pytest
import torch
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from blockscale import catalog
from blockscale.catalog import Bucket, quant, registry
from blockscale.emulator import run_module
from blockscale.lower import cuda, nvcc
from blockscale.schedules.quant import gpu as gpu_memory
from blockscale.specs import Spec
from tests.kit.gpu_library import library
from tests.kit.helpers import DTYPES, packed_tensor, random_matrix, same, same_bytes, tensor
from tests.kit.helpers import widen as wide
from tests.kit.kernels import byte_tensor
from tests.kit.pairwise import each, few, those
from tests.reference import core as ref

CHANGED = ""
"""What `with_choices` has changed."""


def emulated(name, arch):
    """Return a function that runs kernel ``name``; the emulator finds what is wrong with it."""

    def run(*values):
        played = run_module(library([name], arch, CHANGED), name, *values, target=arch)
        assert not [hazard for report in played.reports for hazard in report.hazards]

    return run


GUARD = 64  # bytes around an argument; allocations of torch begin at multiples of 64


def call(kernel, inputs, outputs):
    """Call a kernel with copies of ``inputs``; return outputs like those given."""
    memory = []
    for value in (*inputs, *outputs):
        size = value.numel() * value.element_size()
        memory.append(torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8))
    views = [
        bytes_[GUARD:-GUARD].view(value.dtype).view(value.shape)
        for bytes_, value in zip(memory, (*inputs, *outputs), strict=True)
    ]
    for view, value in zip(views, inputs, strict=False):
        view.copy_(value)
    kernel(*views)
    for bytes_ in memory:
        assert (bytes_[:GUARD] == 0xFF).all()
        assert (bytes_[-GUARD:] == 0xFF).all()
    return views[len(inputs) :]


def blocks_at_the_edges(spec, g):
    """Return x [rows, 8 blocks] for which a shortcut would go wrong at global scale ``g``.

    Zeros of both signs, NaN, infinity, maxima on both sides of where a scale is 0, subnormal,
    saturated, and elements next to what rounds to another code.
    """
    block, rng = spec.block, np.random.default_rng(5)
    with np.errstate(all="ignore"):
        sizes = np.float32(g) * np.exp2(np.arange(-14.0, 14)).astype(np.float32)
        x = rng.standard_normal((len(sizes), block)).astype(np.float32) * sizes[:, None]
        ties = np.float32(g) * np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * (block // 8))
        special = np.zeros((12, block), np.float32)
        special[1] = -0.0
        special[2, 3], special[3, 1], special[4, 0] = np.nan, np.inf, -np.inf
        special[5, ::2] = -0.0
        special[5, 1] = 1e-30
        special[6], special[7] = ties, -ties
        special[8] = ties * np.float32(1.0078125)
        special[9, 2], special[10] = 3e38, 1e-38
        special[11, 5] = -np.nan
        return np.concatenate([x, special]).reshape(-1, 8 * block)


def check_quantize(spec, arch, x, g):
    """Compare codes and scale bytes of ``x``, a tensor."""
    amax = ref.block_amax(wide(x), spec.fmt) * np.float32(0.7) if spec.given_amax else None
    codes, byte = ref.quantize(wide(x), spec.fmt, g, amax, spec.rounding)
    byte = byte if spec.layout == "linear" else ref.swizzle(byte)
    given = [torch.from_numpy(amax.reshape(-1))] if spec.given_amax else []
    outputs = [byte_tensor(len(x), x.shape[1] // 2), byte_tensor(*byte.shape)]
    packed, scale = call(emulated(spec.name, arch), [x, *given, tensor([g])], outputs)
    same_bytes(scale.numpy(), byte)
    same_bytes(packed.numpy(), ref.pack(codes))


QUANTIZE = [
    ("quantize_nvfp4_bf16", "sm_90a"),
    ("quantize_nvfp4_bf16", "sm_100a"),
    ("quantize_nvfp4_f16", "sm_90a"),
    ("quantize_nvfp4_f32", "sm_100a"),
    ("quantize_mxfp4_f32", "sm_90a"),
    ("quantize_mxfp4_floor_f16", "sm_90a"),
    ("quantize_nvfp4_amax_bf16", "sm_90a"),
    ("quantize_nvfp4_128x4_bf16", "sm_90a"),
    ("quantize_nvfp4_128x4_amax_f16", "sm_100a"),
    ("quantize_mxfp4_128x4_bf16", "sm_100a"),
]


@pytest.mark.parametrize(("name", "arch"), few(QUANTIZE, every=3))
def test_quantize_at_the_edges(name, arch):
    """Also at global scales with which intermediate numbers overflow or underflow."""
    spec = Spec.parse(name)
    for g in (1.0, 0.0137, 1e-30, 1e30) if spec.layout == "linear" else (0.0137,):
        check_quantize(spec, arch, tensor(blocks_at_the_edges(spec, g), spec.dtype), g)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_quotients_that_are_ties(arch):
    """Scales of 8 to 15: x / d is a tie where x times the rounded 1 / d is none."""
    spec, scale = Spec.parse("quantize_nvfp4_f16"), np.arange(8.0, 16.0)[:, None]
    quarters = np.array([24, 1, 3, 5, 7, 10, 14, 20])  # 24 / 4 is the block's maximum
    for g in (4.0, 68.0):
        x = np.concatenate([quarters, -quarters]) / 4 * scale * g
        check_quantize(spec, arch, tensor(x, "float16"), g)


@those(
    lambda rows, blocks: (rows, blocks) in ((1, 258), (7, 1), (128, 5), (130, 5)),
    rows=[1, 7, 128, 130],
    blocks=[1, 5, 258],
)
def test_quantize_shapes(rows, blocks):
    """Also with padding in both directions, which one kernel writes with the scales.

    A CTA takes 256 blocks of a row: the threads of the last one are beyond the padding.
    """
    for name, arch in (QUANTIZE[0], QUANTIZE[7]):
        spec = Spec.parse(name)
        x = random_matrix((rows, blocks * spec.block), spec.fmt, rows)
        check_quantize(spec, arch, tensor(x, spec.dtype), 0.37)


@pytest.mark.parametrize(("name", "cols"), [(QUANTIZE[0][0], 24), (QUANTIZE[7][0], 8)])
def test_columns_that_are_no_whole_blocks(name, cols):
    """Refused by the library itself: TVM's host code takes cols // 16 scales for enough."""
    x, padded = torch.zeros(4, cols, dtype=torch.bfloat16), name == QUANTIZE[7][0]
    scale = byte_tensor(128, 4 * (cols // 16)) if padded else byte_tensor(4, cols // 16)
    sentence = rf"x has size {cols} in dimension 1 of bfloat16\[rows, cols\], which is not a mult"
    with pytest.raises(ValueError, match=f"^{name}: {sentence}iple of 16; pad it"):
        emulated(name, "sm_90a")(x, tensor([1.0]), byte_tensor(4, cols // 2), scale)


DEQUANTIZE = [
    ("dequantize_nvfp4_bf16", "sm_90a"),
    ("dequantize_nvfp4_128x4_f32", "sm_100a"),
    ("dequantize_mxfp4_f16", "sm_90a"),
    ("dequantize_mxfp4_128x4_bf16", "sm_90a"),
]


@pytest.mark.parametrize(("name", "arch"), DEQUANTIZE)
def test_dequantize(name, arch):
    """Every scale byte, NaN and negative ones too, with random codes."""
    spec, rng = Spec.parse(name), np.random.default_rng(3)
    for rows, blocks, g in ((1, 1, 1.0), (7, 5, 0.37), (130, 9, 1e-30), (4, 64, 1e30)):
        codes = rng.integers(0, 16, (rows, blocks * spec.block), dtype=np.uint8)
        byte = np.resize(rng.permutation(256).astype(np.uint8), (rows, blocks))
        stored = torch.from_numpy(byte if spec.layout == "linear" else ref.swizzle(byte))
        inputs = [packed_tensor(codes), stored, tensor([g])]
        out = torch.empty(codes.shape, dtype=DTYPES[spec.dtype])
        [out] = call(emulated(name, arch), inputs, [out])
        same(wide(out), ref.dequantize(codes, byte, spec.fmt, g, spec.dtype))


def test_dequantize_of_columns_that_are_no_whole_blocks():
    """Its last units would read scales of another row, or beside the tensor."""
    out = torch.zeros(4, 24, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out has size 24 in dimension 1 .* multiple of 16; pad"):
        emulated(DEQUANTIZE[0][0], "sm_90a")(
            byte_tensor(4, 12), byte_tensor(4, 1), tensor([1.0]), out
        )


def check_swizzle(name, rows, cols):
    """Compare the bytes of random scales."""
    scale = np.random.default_rng(rows).integers(1, 256, (rows, cols), dtype=np.uint8)
    pair = [torch.from_numpy(scale), torch.from_numpy(ref.swizzle(scale))]
    given, wanted = pair if name == "swizzle_128x4" else pair[::-1]
    [out] = call(emulated(name, "sm_90a"), [given], [torch.empty_like(wanted)])
    same_bytes(out.numpy(), wanted.numpy())


@each(cols=[1, 6, 12, 16, 35, 70, 180, 272], name=["swizzle_128x4", "unswizzle_128x4"])
def test_swizzle(name, cols):
    """Each of the three kernels, at all places of a tile; padding is zero."""
    for rows in (7, 130):
        check_swizzle(name, rows, cols)


SPACE = [
    "quantize_nvfp4_bf16",
    "quantize_mxfp4_128x4_amax_f32",
    "dequantize_nvfp4_f16",
    "dequantize_mxfp4_128x4_bf16",
    "swizzle_128x4",
    "unswizzle_128x4",
]


@pytest.mark.parametrize("name", few(SPACE))
def test_space(request, name):
    """Sampled schedules are legal for static and for symbolic shapes, by the same trace."""
    workload = catalog.workloads(Spec.parse(name), "sm_90a")[-1]
    texts = set()
    for seed in range(3 if request.config.getoption("--exhaustive") else 1):
        for sch in workload.space("sm_90a")(Schedule(workload.mod("sm_90a"), seed=seed + 1)):
            symbolic = Schedule(workload.symbolic("sm_90a"))
            Trace.apply_json_to_schedule(sch.trace.as_json(), symbolic)
            for scheduled in (sch, symbolic):
                made = cuda.sources(scheduled.mod["main"], "kernel", "sm_90a")
                assert "bs_" in made.device
            texts.add(made.device)
    assert len(texts) > seed  # decisions differ


RAGGED = [
    ("quantize_nvfp4_128x4_bf16", 67),  # CTAs of 64 columns
    ("quantize_nvfp4_128x4_amax_f16", 129),  # of 128
    ("quantize_mxfp4_128x4_bf16", 257),  # of 256
    ("quantize_nvfp4_128x4_f32", 514),  # of 512
]


@pytest.fixture
def with_choices(monkeypatch):
    """Return a function that lets default schedules take candidate ``pick`` of each choice."""

    def use(pick):
        def choose(sch, candidates, prefer):
            count = len(candidates)
            return sch.sample_categorical(candidates, [1 / count] * count, pick % count)

        monkeypatch.setattr(registry, "preferred", choose)
        monkeypatch.setattr(quant, "CUDA_BLOCKS", (Bucket(8192, None),))
        monkeypatch.setitem(globals(), "CHANGED", f"one bucket, pick {pick}")

    return use


@pytest.mark.parametrize(
    ("pick", "name", "blocks"), few([(i, *case) for i, case in enumerate(RAGGED)])
)
def test_threads_beyond_a_swizzled_grid(with_choices, pick, name, blocks):
    """Every number of warps and of rows: no check but the kernel's own keeps threads in bounds."""
    with_choices(pick)
    spec = Spec.parse(name)
    for rows in (1, 130):
        x = random_matrix((rows, blocks * spec.block), spec.fmt, rows)
        check_quantize(spec, "sm_90a", tensor(x, spec.dtype), 0.37)


@each(pick=range(3), name=["swizzle_128x4", "unswizzle_128x4"])
def test_swizzle_by_other_threads(with_choices, name, pick):
    """CTAs of every width and height, the last one of a row beyond the columns."""
    with_choices(pick)
    for cols in (68, 260, 272, 1040):
        check_swizzle(name, 130, cols)


def test_sampled_schedules_keep_everything_in_registers():
    """The largest block, as many as a thread may take, spills nothing."""
    workload = catalog.workloads(Spec.parse("quantize_mxfp4_128x4_bf16"), "sm_90a")[-1]
    sch = Schedule(workload.symbolic("sm_90a"))

    def most(sch, candidates, prefer):
        uniform = [1 / len(candidates)] * len(candidates)
        return sch.sample_categorical(candidates, uniform, decision=len(candidates) - 1)

    gpu_memory.quantize_sketches(workload.spec)[0](sch, most)
    made = cuda.sources(sch.mod["main"], "kernel", "sm_90a")
    [used] = nvcc.compile_cuda_source(made.device, "sm_90a").resources
    assert (used["stack"], used["spills"]) == (0, 0)
    assert used["registers"] <= 128  # 512 threads have 65536


WAITING = [
    *("quantize_nvfp4_bf16", "dequantize_mxfp4_128x4_f16", "swizzle_128x4", "unswizzle_128x4"),
    *(
        "add_rmsnorm_nvfp4_h64_both_y_bf16",
        "swiglu_nvfp4_grouped_128x4_bf16",
        "scale_sweep_b16_bf16",
    ),
]


@pytest.mark.parametrize("name", few(WAITING))
def test_every_kernel_waits_for_the_one_before(name):
    """Programmatic launches: no access of memory comes before the wait."""
    spec = Spec.parse(name)
    made = cuda.sources(catalog.exported(spec, "sm_90a", {})[spec.name], spec.name, "sm_90a")
    ptx = nvcc.compile_cuda_source(made.device, "sm_90a", ptx=True).image.decode()
    kernels = ptx.split(".entry")[1:]
    assert len(kernels) == len(made.kernels)
    for kernel in kernels:
        first = re.search(r"griddepcontrol\.wait|\b(ld|st|atom|red|cp)\.(?!param)", kernel)
        assert first[0] == "griddepcontrol.wait"
