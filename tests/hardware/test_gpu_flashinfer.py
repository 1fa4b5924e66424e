"""FlashInfer's options of quantisers on a GPU, bit for bit; some on the CPU, where the same holds.

FP8 input, global scales of rows, those that rows find, four-over-six, and shuffled rows.
"""

import pytest
import torch

from blockscale.compat import flashinfer as fi
from blockscale.specs import Spec
from blockscale.specs.fused import FP8
from tests.hardware.kernels import FI_OPTIONS
from tests.hardware.test_gpu_ops import ON_BOTH, both
from tests.kit import gpu_checks
from tests.kit.act_options import expected, inputs
from tests.kit.acts import stored
from tests.kit.gpu_checks import bytes_of
from tests.kit.helpers import same_bytes
from tests.reference import core as ref

SIZES = ((1, 1), (7, 3), (130, 5), (33, 33), (257, 24))
"""Rows and blocks."""

MANY = (5000, 64)
"""Rows and blocks of more than the GPU has warps."""

LAYOUTS = {
    "linear": fi.SfLayout.layout_linear,
    "128x4": fi.SfLayout.layout_128x4,
    "8x4": fi.SfLayout.layout_8x4,
}
ON_CPU = (
    "quantize_nvfp4_rows_8x4_fi_f8",
    "quantize_nvfp4_4over6_mae_fi_bf16",
    "quantize_nvfp4_token_4over6_mse_8x4_fi_bf16",
)


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    gpu_checks.only_listed(monkeypatch)


def recipe_of(spec):
    """Return FlashInfer's recipe of the search; None: there is none."""
    if spec.search == "none":
        return None
    mode, _, scaled = spec.search.partition("_")
    return fi.NVFP44Over6Config(448, mode, bool(scaled))


def called(spec, given, device, **options):
    """Return what FlashInfer's function for the spec gives."""
    x, g = given["input"].to(device), given["global_scale"].to(device)
    if spec.dtype == FP8:
        x = x.view(torch.float8_e4m3fn)
    layout, recipe = spec.layout, recipe_of(spec)
    if spec.finds_scale:
        return fi.nvfp4_quantize(
            x, g, LAYOUTS[layout], per_token_activation=True, nvfp4_4over6=recipe, **options
        )
    options |= {"nvfp4_4over6": recipe} if spec.block == 16 else {}
    return fi.fp4_quantize(
        *(x, g, spec.block, spec.block == 32, layout != "linear", layout == "8x4"), **options
    )


def check(name, rows, blocks, device, **options):
    """Compare every byte with the reference."""
    spec = Spec.parse(name)
    given = inputs(spec, rows, blocks, seed=rows)
    packed, scale, *row = called(spec, given, device, **options)
    assert packed.device.type == device
    codes, byte, *found = expected(spec, given)
    same_bytes(bytes_of(packed), ref.pack(codes))
    same_bytes(bytes_of(scale).ravel(), stored(spec, byte).ravel())
    assert len(row) == len(found)
    for got, want in zip(row, found, strict=True):
        same_bytes(got.cpu().numpy().view("u1"), want.view("u1"))


@both(FI_OPTIONS, ON_CPU)
def test_options(device, name):
    """Sizes of every kind, with and without PDL."""
    sizes = SIZES[1:] if Spec.parse(name).scaling == "rows" else SIZES  # one scale is no row's
    for number, (rows, blocks) in enumerate(sizes):
        check(name, rows, blocks, device, enable_pdl=(None, True, False)[number % 3])


@both(
    [
        "quantize_nvfp4_128x4_fi_f8",
        "quantize_nvfp4_token_128x4_fi_f16",
        "quantize_nvfp4_token_4over6_mae_fi_f16",
    ]
)
def test_many_rows(device, name):
    check(name, *MANY, device)


@ON_BOTH
@pytest.mark.parametrize(
    "name", ["quantize_nvfp4_token_fi_bf16", "quantize_nvfp4_4over6_mae_fi_bf16"]
)
def test_shuffle(device, name):
    """Of every 32 rows, row 4 i + j goes to place 8 j + i; scales go with it."""
    spec, rows = Spec.parse(name), 256
    given = inputs(spec, rows, 8, seed=1)
    plain = called(spec, given, device)
    x, g = given["input"].to(device), given["global_scale"].to(device)
    options = {"per_token_activation": spec.finds_scale, "nvfp4_4over6": recipe_of(spec)}
    shuffled = fi.nvfp4_quantize(x, g, do_shuffle=True, **options)
    places = [32 * (r // 32) + 8 * (r % 4) + r % 32 // 4 for r in range(rows)]
    assert len(shuffled) == len(plain)
    for number, (got, want) in enumerate(zip(shuffled, plain, strict=True)):
        moved = got.cpu().numpy()
        if number == 1:
            moved = ref.unswizzle(moved, rows, 8)
        assert (moved[places] == want.cpu().numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FI_OPTIONS)
def test_a_graph_has_them(name):
    """A captured call gives the bytes of an eager one, of inputs that changed since."""
    spec = Spec.parse(name)
    first, second = (inputs(spec, 33, 5, seed=seed) for seed in (1, 2))
    static = {key: value.cuda() for key, value in first.items()}
    called(spec, static, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = called(spec, static, "cuda")
    for key, value in second.items():
        static[key].copy_(value)
    graph.replay()
    for got, want in zip(made, called(spec, second, "cuda"), strict=True):
        same_bytes(bytes_of(got.view(torch.uint8)), bytes_of(want.view(torch.uint8)))
