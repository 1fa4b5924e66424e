"""Layouts, INT4 products, Edge-LLM's tensors and modules from checkpoints on a GPU.

The same functions in the emulator: test_relayout, test_int4_ops, test_gpu_edgellm.  What the CPU's
kernels give is checked there against references; here bytes must be theirs, and sums near float64.
Functions that no library has are built; to build those that need TVM's headers before:

    blockscale build --target sm_90a -o formats.so $(python -m tests.hardware.formats)
    pytest -m gpu --library formats.so tests/hardware/test_gpu_formats.py
"""

import shutil

import pytest
import torch

import blockscale as bs
from blockscale import edgellm, int4, layouts, nn
from blockscale.checkpoints.convert.convert import convert
from tests.kit.paths import CHECKPOINTS as GOLDEN

pytestmark = pytest.mark.gpu
MODES = [
    *({"sm": 80}, {"sm": 89, "activation": "a8"}, {"sm": 90, "moe": False}, {"sm": 80, "bits": 8}),
    *({"sm": 90, "moe": False, "activation": "a8"}, {"sm": 90, "activation": "a8"}),
    *({"sm": 90, "moe": False, "bits": 8}, {"sm": 100, "moe": False, "bits": 8}),
]


def on_gpu(function, value, *arguments, **options):
    """What a function gives on the GPU, after a check that it is what the CPU gives."""
    want = function(value, *arguments, **options)
    moved = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
    got = function(value.cuda(), *moved, **options)
    assert got.is_cuda
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    assert torch.equal(bits(got.cpu()), bits(want))
    return want


def bits(value):
    return value.contiguous().view(torch.uint8)


def some_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def near(got, want, bound):
    """Rows differ from float64 by less than ``bound`` of their length."""
    got, want = got.double().cpu(), want.double()
    length = want.norm(dim=-1)
    error = (got - want).norm(dim=-1)
    assert (error[length == 0] == 0).all()
    worst = (error / length)[length > 0].max().item() if (length > 0).any() else 0.0
    assert worst < bound, worst


# ---------------------------------------------------------------------------------------- layouts
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 200, 20), (2, 384, 257), (1, 1000, 256)])
def test_block_scales(shape):
    scales = some_bytes(*shape)
    for there, back in (
        (layouts.to_128x4, layouts.from_128x4),
        (layouts.to_8x4, layouts.from_8x4),
    ):
        laid = on_gpu(there, scales)
        assert torch.equal(on_gpu(back, laid, *shape[1:]), scales)


@pytest.mark.parametrize(("rows", "permute"), [(256, True), (12, False), (1027, False)])
def test_deepgemm(rows, permute):
    scales = some_bytes(3, rows, 24)
    words = on_gpu(layouts.deepgemm_scales, scales, permute=permute)
    plain = layouts.undo_deepgemm_scales(words.cuda(), permute=permute)
    assert torch.equal(plain.cpu(), scales)


def test_rows_and_columns():
    value = some_bytes(2, 512, 96)
    for granule in layouts.GRANULES:
        turned = on_gpu(layouts.interleave_gate_up, value, granule)
        assert torch.equal(on_gpu(layouts.deinterleave_gate_up, turned, granule), value)
    for order in ("group", "column", "e4m3"):
        given = some_bytes(7, 192) if order == "e4m3" else torch.randn(7, 192).half()
        made = on_gpu(layouts.marlin_scales, given, order)
        assert torch.equal(bits(on_gpu(layouts.undo_marlin_scales, made, order)), bits(given))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_preprocessed_weights(mode):
    dense = mode.get("moe", True) is False
    for k, n in ((128, 64), (1024, 320)):
        width = n if mode.get("bits") == 8 else n // 2
        plain = some_bytes(k, width) if dense else some_bytes(3, k, width)
        made = on_gpu(int4.preprocess_weights, plain, **mode)
        assert torch.equal(on_gpu(int4.unprocess_weights, made, **mode), plain)


def test_interleaved_scales():
    for groups in (4, 6, 5):
        scales = torch.randn(2, groups, 192).bfloat16()
        made = on_gpu(int4.interleave_scales, scales, 128)
        assert torch.equal(int4.uninterleave_scales(made.cuda(), 192, 128).cpu(), scales)


# ------------------------------------------------------------------------------------------- INT4
def int4_weight(k, n, group, zeros, experts=()):
    packed = some_bytes(*experts, k, n // 2)
    scale = torch.rand(*experts, k // group, n).bfloat16() * 0.1
    zero = None
    if zeros == "point":
        zero = torch.randint(0, 17, scale.shape, dtype=torch.uint8)
    elif zeros == "term":
        zero = (torch.randn(scale.shape) * 0.1).bfloat16()
    return packed, scale, zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zeros", [None, "point", "term"])
@pytest.mark.parametrize("activation", ["a16", "a8"])
def test_int4_linear(dtype, zeros, activation):
    """Any number of rows, in a captured graph too, without waiting for the GPU."""
    k, n, group = 512, 320, 128
    packed, scale, zero = int4_weight(k, n, group, zeros)
    dense = int4.dequantize(packed, scale, zero, group, torch.float32).double()
    bias, smooth = torch.randn(n), torch.rand(k) + 0.5
    given = {"alpha": 0.5, "bias": bias.cuda(), "pre_quant_scale": smooth.to(dtype).cuda()}
    moved = [None if v is None else v.cuda() for v in (packed, scale, zero)]
    weight = int4.prepare(*moved, group_size=group, activation=activation, dtype=dtype, **given)
    assert weight.layout == "tiles64"
    for m in (0, 1, 3, 17, 64, 65, 300):
        x = torch.randn(m, k).to(dtype)
        smoothed = (x.float() * smooth.to(dtype).float()).to(dtype)
        if activation == "a8":
            smoothed = smoothed.to(torch.float8_e4m3fn)
        want = 0.5 * (smoothed.double() @ dense) + bias.double()
        given_x = x.cuda()
        near(int4.linear(given_x, weight), want, 1e-2)
        if m != 17:
            continue
        graph, out = torch.cuda.CUDAGraph(), torch.empty(m, n, dtype=dtype, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                int4.linear(given_x, weight, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        out.fill_(float("nan"))
        graph.replay()
        near(out, want, 1e-2)


def test_int4_of_experts():
    """Experts with many rows, one, none; TensorRT-LLM's layout, converted in the call."""
    packed, scale, zero = int4_weight(256, 192, 64, "term", (4,))
    dense = int4.dequantize(packed, scale, zero, 64, torch.float32).double()
    made = int4.preprocess_weights(packed, sm=90)
    offsets = torch.tensor([0, 100, 100, 101, 164], dtype=torch.int32)
    x = torch.randn(164, 256).bfloat16()
    want = torch.cat(
        [x[a:b].double() @ w for a, b, w in zip(offsets, offsets[1:], dense, strict=False)]
    )
    options = {"group_size": 64, "layout": "preprocessed", "sm": 90}
    moved = (v.cuda() for v in (x, made, scale, offsets, zero))
    near(int4.grouped_mm(*moved, **options), want, 1e-2)


# --------------------------------------------------------------------------------------- Edge-LLM
def test_edgellm():
    """The CPU's numbers but for the order of sums; the same bits in each call."""
    experts, hidden, inner, tokens, top_k = 5, 320, 192, 7, 3
    weights = []
    for k, n in ((hidden, inner), (inner, hidden)):
        packed = some_bytes(experts, n, k // 2)
        scale = (torch.rand(experts, n, k // 16) * 2).to(torch.float8_e4m3fn)
        weights += edgellm.pack_weight(packed, scale)
    tops = torch.rand(2, experts) * 0.1
    ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32)
    factors = torch.rand(tokens, top_k)
    x = torch.randn(tokens, hidden).half()

    def run(device):
        p13, s13, p2, s2 = (w.to(device) for w in weights)
        up = edgellm.Nvfp4Tensor.up_weights(p13, tops[0].to(device))
        down = edgellm.Nvfp4Tensor.down_weights(p2, tops[1].to(device))
        rest = (v.to(device) for v in (ids, factors))
        return edgellm.decode_moe(x.to(device), up, s13, down, s2, *rest, activation="silu")

    want, got = run("cpu"), run("cuda")
    near(got, want, 1e-5)
    assert torch.equal(got, run("cuda"))


# ---------------------------------------------------------------------------------------- modules
def folder(name, path):
    """A golden export without its expectation."""
    path.mkdir(parents=True)
    for file in (GOLDEN / name).iterdir():
        if file.suffix in (".safetensors", ".json") and file.name != "original_names.safetensors":
            shutil.copy(file, path / file.name)
    return path


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("modelopt_qwen3moe_nvfp4_default_cfg", "model.layers.0.mlp"),
        ("gptoss_mxfp4", "model.layers.0.mlp"),
    ],
)
def test_moe_from_a_checkpoint(tmp_path, name, layer):
    """Near the CPU's float32; a folder converted for this GPU gives the same bits."""
    source = folder(name, tmp_path / "in")
    x = torch.randn(33, 64)
    want = nn.FusedMoE.from_checkpoint(source, layer, dtype=torch.float32)(x.bfloat16().float())
    made = nn.FusedMoE.from_checkpoint(source, layer, device="cuda")
    got = made(x.bfloat16().cuda())
    near(got, want, 2e-2)
    convert(bs.checkpoints.open(source), tmp_path / "out", target="sm_90a")
    other = nn.FusedMoE.from_checkpoint(tmp_path / "out", layer, device="cuda")
    assert torch.equal(other(x.bfloat16().cuda()), got)


@pytest.mark.parametrize(
    "name", ["autoawq_llama_g32", "gptqmodel_llama_v1_act_order", "ct_llama_nvfp4_int4"]
)
def test_int4_layers_of_checkpoints(tmp_path, name):
    """Every INT4 layer of an export."""
    ckpt = bs.checkpoints.open(folder(name, tmp_path / "in"))
    found = [n for n, entry in ckpt.entries.items() if entry.fmt == "int4"]
    assert found
    for weight in found:
        values = ckpt.weight(weight).dequantize().double()
        layer = nn.Linear.from_checkpoint(ckpt, weight, device="cuda")
        x = torch.randn(19, values.shape[1]).bfloat16()
        near(layer(x.cuda()), x.double() @ values.T, 1e-2)


@pytest.mark.parametrize("name", ["modelopt_qwen3moe_nvfp4_default_cfg", "modelopt_mixtral_mxfp4"])
def test_fp4_layers_of_checkpoints(tmp_path, name):
    """Every NVFP4 or MXFP4 matrix of an export, in bfloat16."""
    ckpt = bs.checkpoints.open(folder(name, tmp_path / "in"))
    found = [n for n, e in ckpt.entries.items() if e.fmt in ("nvfp4", "mxfp4")]
    assert found
    for weight in found:
        values = ckpt.weight(weight).dequantize().double()
        layer = nn.Linear.from_checkpoint(ckpt, weight, device="cuda")
        x = torch.randn(19, values.shape[1]).bfloat16()
        near(layer(x.cuda()), x.double() @ values.T, 1e-2)
