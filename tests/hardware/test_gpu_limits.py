"""Sizes that are empty or huge, views, and bad input: the same sentence on the CPU and on a GPU."""

import re

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.specs import Spec
from tests.kit import gpu_checks, norms
from tests.kit.gpu_checks import FP4, U8, bytes_of, floats, norm_call, one
from tests.kit.helpers import same, same_bytes
from tests.reference import core as ref

GPU = pytest.mark.gpu
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
NORM = Spec.parse("add_rmsnorm_nvfp4_h512_both_y_f16")


@pytest.fixture(autouse=True)
def _only_listed(monkeypatch):
    gpu_checks.only_listed(monkeypatch)


# ----------------------------------------------------------------------------------- sizes, views
@ON_BOTH
@pytest.mark.parametrize("lead", [(0,), (3, 0)])
def test_no_rows(device, lead):
    """Empty in, empty out."""
    x = torch.empty(*lead, 512, dtype=torch.float16, device=device)
    weight = torch.ones(512, dtype=torch.float16, device=device)
    for _ in range(2):
        given = {"input": x, "residual": x.clone(), "weight": weight}
        y_fp4, scale, linear = norm_call(NORM, given, y_out=torch.empty_like(x))
        assert y_fp4.dtype == FP4
        assert (y_fp4.shape, scale.shape, linear.shape) == ((*lead, 256), (0,), (*lead, 32))
        packed, scale = bs.quantize(x, scale_layout="128x4")
        assert (packed.shape, scale.shape) == ((*lead, 256), (0, 32))
        back = bs.dequantize(packed, scale, "nvfp4", None, "128x4", torch.float16)
        assert back.shape == x.shape
        assert bs.swizzle_scales(linear).shape == (0, 32)
        assert bs.silu_and_mul_fp4quant(x, is_sf_swizzled_layout=True)[0].shape == (*lead, 128)
        empty = x.to(torch.bfloat16)
        assert bs.nvfp4_fp8_scale_sweep(empty, one(1.0, device)).shape == (0,)


@ON_BOTH
def test_views_with_an_offset(device):
    """Rows out of larger tensors, whose first byte lies at a multiple of 16, are used in place."""
    given = norms.inputs(NORM, 12)
    part = {k: v if k == "weight" else v[3:8] for k, v in given.items()}
    want = norms.expected(NORM, part)
    on = {key: value.clone().to(device) for key, value in given.items()}
    views = {k: v if k == "weight" else v[3:8] for k, v in on.items()}
    codes = torch.full((12, 256), 0xFF, dtype=U8, device=device)
    y = torch.zeros(12, 512, dtype=torch.float16, device=device)
    scales = torch.arange(4, dtype=torch.float32, device=device)
    for offset in (0, 8):  # elements: 16 bytes
        shifted = torch.empty(5 * 512 + offset, dtype=torch.float16, device=device)[offset:]
        views["input"] = shifted.view(5, 512).copy_(on["input"][3:8])
        views["residual"].copy_(given["residual"][3:8])
        outputs = {"y_fp4": codes[3:8], "y_out": y[3:8]}
        got = norm_call(NORM, views, scales[1:2], **outputs)
        gpu_checks.compare_norm(NORM, (5,), got, want, views["residual"], y[3:8])
    same(floats(on["residual"][:3]), floats(given["residual"][:3]))
    same(floats(on["residual"][8:]), floats(given["residual"][8:]))
    assert bool((codes[:3] == 0xFF).all() and (codes[8:] == 0xFF).all())
    assert not y[:3].any()
    assert not y[8:].any()


def misaligned(device, *shape, dtype=torch.float16):
    """Return a contiguous view of one element's alignment and no more."""
    count = int(np.prod(shape))
    return torch.zeros(count + 1, dtype=dtype, device=device)[1:].view(shape)


MISALIGNED = {
    "input": lambda x, r, w: bs.add_rmsnorm_fp4quant(misaligned("cuda", 4, 512), r, w, **more(x)),
    "residual": lambda x, r, w: bs.add_rmsnorm_fp4quant(
        x, misaligned("cuda", 4, 512), w, **more(x)
    ),
    "weight": lambda x, r, w: bs.add_rmsnorm_fp4quant(x, r, misaligned("cuda", 512), **more(x)),
    "y_out": lambda x, r, w: bs.add_rmsnorm_fp4quant(
        x, r, w, output_both_sf_layouts=True, y_out=misaligned("cuda", 4, 512)
    ),
    "packed": lambda x, r, w: bs.add_rmsnorm_fp4quant(
        x, r, w, misaligned("cuda", 4, 256, dtype=U8), **more(x)
    ),
    "block_scale": lambda x, r, w: bs.add_rmsnorm_fp4quant(
        x, r, w, None, misaligned("cuda", 128 * 32, dtype=U8), **more(x)
    ),
    "scale": lambda x, r, w: bs.swizzle_scales(misaligned("cuda", 4, 32, dtype=U8)),
}


def more(x):
    return {"output_both_sf_layouts": True, "y_out": torch.empty_like(x)}


@GPU
@pytest.mark.parametrize("name", MISALIGNED)
def test_misaligned_views(name):
    """By name, before anything is written, and the call after that works."""
    x = torch.ones(4, 512, dtype=torch.float16, device="cuda")
    r, w = x * 3, torch.ones(512, dtype=torch.float16, device="cuda")
    sentence = (
        rf"^\w+: {name} lies at address 0x[0-9a-f]+, which is not a multiple of 16 bytes, as the "
        rf"kernel relies on; pass a copy of {name}$"
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=sentence):
            MISALIGNED[name](x, r, w)
        assert bool((r == 3).all())
        bs.add_rmsnorm_fp4quant(x, r.clone(), w, **more(x))


# ---------------------------------------------------------------------------------------- bad input
ADD = bs.add_rmsnorm_fp4quant
WHERE = "add_rmsnorm_fp4quant: "
SHAPE = "; pass a tensor of this shape, or leave it out to have it allocated"


class Given:
    """Good arguments, from which the bad ones are made."""

    def __init__(self, device):
        self.device = device
        self.x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
        self.r, self.w = self.x * 3, self.x[0].clone()
        self.y = torch.zeros(4, 128, dtype=U8, device=device)
        self.s = torch.zeros(4, 16, dtype=U8, device=device)


BAD = {
    "y_fp4": (
        lambda t: ADD(t.x, t.r, t.w, t.y[:3]),
        WHERE + "y_fp4 has shape [3, 128], but must have [4, 128]" + SHAPE,
    ),
    "block_scale": (
        lambda t: ADD(t.x, t.r, t.w, t.y, t.s[:, :8].contiguous()),
        WHERE + "block_scale has shape [4, 8], but must have [4, 16]" + SHAPE,
    ),
    "swizzled": (
        lambda t: ADD(t.x, t.r, t.w, t.y, t.s, is_sf_swizzled_layout=True),
        WHERE + "block_scale has shape [4, 16], but must have [2048] or [128, 16]" + SHAPE,
    ),
    "unswizzled": (
        lambda t: ADD(t.x, t.r, t.w, output_both_sf_layouts=True, block_scale_unswizzled=t.s[:3]),
        WHERE + "block_scale_unswizzled has shape [3, 16], but must have [4, 16]" + SHAPE,
    ),
    "y_out": (
        lambda t: ADD(t.x, t.r, t.w, y_out=t.x[:2].clone()),
        WHERE + "y_out has shape [2, 256], but must have [4, 256]" + SHAPE,
    ),
    "alias": (
        lambda t: ADD(t.r, t.r, t.w),
        WHERE + "residual overlaps input in memory, but is written while input is read; pass a "
        "copy, input.clone()",
    ),
    "alias in part": (
        lambda t: ADD(t.r[1:], t.r[:-1], t.w),
        WHERE + "residual overlaps input in memory, but is written while input is read; pass a "
        "copy, input.clone()",
    ),
    "strides": (
        lambda t: ADD(t.x, t.r.repeat(1, 2)[:, ::2], t.w),
        WHERE + "residual of shape [4, 256] has strides [512, 2], but must be contiguous; pass "
        "residual.contiguous()",
    ),
    "scale dtype": (
        lambda t: ADD(t.x, t.r, t.w, t.y, t.s.float()),
        WHERE + "block_scale has dtype float32, but must have float8_e4m3fn or uint8; allocate it "
        "with that dtype, or leave it out",
    ),
    "scale dtype of blocks of 32": (
        lambda t: ADD(
            *(t.x, t.r, t.w, t.y),
            t.s[:, :8].clone().view(torch.float8_e4m3fn),
            block_size=32,
        ),
        WHERE + "block_scale has dtype float8_e4m3fn, but must have uint8 or float8_e8m0fnu; "
        "allocate it with that dtype, or leave it out",
    ),
    "residual dtype": (
        lambda t: ADD(t.x, t.r.half(), t.w),
        WHERE + "residual has dtype float16, but must have bfloat16; pass "
        "residual.to(torch.bfloat16)",
    ),
    "hidden": (
        lambda t: ADD(t.x[:, :200].clone(), t.r, t.w),
        WHERE + "hidden=200, the last dimension of input, must be a multiple of block_size=16 and "
        "at least 64; pad the rows to 208",
    ),
    "columns": (
        lambda t: bs.silu_and_mul_fp4quant(t.x[:, :144].clone()),
        "silu_and_mul_fp4quant: input has 144 columns, but must have two halves of a multiple of "
        "16, the block size; pad the rows to 160",
    ),
    "quantize": (
        lambda t: bs.quantize(t.x, packed=t.y[:3]),
        "quantize: packed has shape [3, 128], but must have [4, 128]" + SHAPE,
    ),
    "swizzle": (
        lambda t: bs.swizzle_scales(t.s, out=t.s),
        "swizzle_scales: out has shape [4, 16], but must have [128, 16] or [2048]" + SHAPE,
    ),
}


def refused(call, sentence, given):
    """Expect the sentence, and the residual as it was."""
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        call(given)
    assert bool((given.r == 3).all())


@ON_BOTH
@pytest.mark.parametrize("name", BAD)
def test_bad_input(device, name):
    """In the first call of its kind and after a good one."""
    given = Given(device)
    refused(*BAD[name], given)
    ADD(given.x, given.r.clone(), given.w)
    bs.silu_and_mul_fp4quant(given.x)
    bs.swizzle_scales(bs.quantize(given.x)[1])
    refused(*BAD[name], given)


REMEDY = "pass all tensors on one device, for example"
DEVICES = {
    "residual": lambda t: ADD(t.x, t.r.cpu(), t.w),
    "weight": lambda t: ADD(t.x, t.r, t.w.cpu()),
    "y_fp4": lambda t: ADD(t.x, t.r, t.w, t.y.cpu()),
    "block_scale": lambda t: ADD(t.x, t.r, t.w, t.y, t.s.cpu()),
    "y_out": lambda t: ADD(t.x, t.r, t.w, y_out=t.x.cpu()),
    "global_scale": lambda t: ADD(t.x, t.r, t.w, global_scale=torch.ones(1)),
}


@GPU
@pytest.mark.parametrize("name", DEVICES)
def test_tensors_on_the_cpu(name):
    """Both devices are named, in the first call and after a good one."""
    given = Given("cuda:0")
    sentence = f"{WHERE}{name} is on device cpu, but input is on cuda:0; {REMEDY} "
    for _ in range(2):
        refused(DEVICES[name], f"{sentence}{name}.to(input.device)", given)
        ADD(given.x, given.r.clone(), given.w)


@GPU
def test_input_on_the_cpu():
    given = Given("cuda:0")
    sentence = f"{WHERE}residual is on device cuda:0, but input is on cpu; {REMEDY} "
    refused(lambda t: ADD(t.x.cpu(), t.r, t.w), f"{sentence}residual.to(input.device)", given)


@GPU
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_the_second_device():
    """Tensors there are worked on there, whatever device is current; two devices are refused."""
    name = "add_rmsnorm_nvfp4_h256_bf16"
    gpu_checks.check_norm(name, norms.inputs(Spec.parse(name), 9), [(9,)], "cuda:1")
    given = Given("cuda:0")
    sentence = f"{WHERE}residual is on device cuda:1, but input is on cuda:0; {REMEDY} "
    refused(
        lambda t: ADD(t.x, t.r.to("cuda:1"), t.w), f"{sentence}residual.to(input.device)", given
    )


# --------------------------------------------------------------------------------- 2^31 elements
ROWS, COLS = 65536, 32768
SPOTS = [0, 1, 2, 32767, 32768, 32769, 49151, 65407, 65534, 65535]
"""Rows that are compared: beside them, every row, with a call on each half of the tensor."""


@pytest.fixture
def enough_memory():
    """Skip where 2^31 elements and their copies find no room; give all back in the end."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 40 << 30:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, and 2^31 elements need 40")
    yield
    torch.cuda.empty_cache()


def halves(*tensors):
    """Return the tensors' upper and lower half of rows."""
    return [tuple(t[start : start + len(t) // 2] for t in tensors) for start in (0, ROWS // 2)]


@GPU
@pytest.mark.usefixtures("enough_memory")
def test_norm_of_2_31_elements():
    """Spot rows against the reference, all others against calls on 2^30 elements."""
    spec = Spec.parse("add_rmsnorm_nvfp4_h32768_bf16")
    x = torch.randn(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(COLS, dtype=torch.bfloat16, device="cuda")
    before = residual.clone()
    given = {"input": x[SPOTS].cpu(), "residual": residual[SPOTS].cpu(), "weight": weight.cpu()}
    want = norms.expected(spec, given)
    packed, scale = bs.add_rmsnorm_fp4quant(x, residual, weight)
    spots = [packed.view(U8)[SPOTS].view(FP4), scale.view(U8)[SPOTS]]
    gpu_checks.compare_norm(spec, (len(SPOTS),), spots, want, residual[SPOTS])
    for part in halves(x, before, residual, packed.view(U8), scale.view(U8)):
        codes, byte = bs.add_rmsnorm_fp4quant(*part[:2], weight)
        assert torch.equal(part[1], part[2])
        assert torch.equal(codes.view(U8), part[3])
        assert torch.equal(byte.view(U8), part[4])


@GPU
@pytest.mark.usefixtures("enough_memory")
def test_quantize_of_2_31_elements():
    """There and back, SiLU too; spot rows, and the same bytes as of halves."""
    x = torch.randn(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    packed, scale = bs.quantize(x)
    codes, byte = ref.quantize(floats(x[SPOTS]), "nvfp4")
    same_bytes(bytes_of(packed[SPOTS]), ref.pack(codes))
    same_bytes(bytes_of(scale.view(U8)[SPOTS]), byte)
    y = bs.dequantize(packed, scale)
    same(floats(y[SPOTS]), ref.dequantize(codes, byte, "nvfp4", 1.0, "bfloat16"))
    silu = [part.view(U8) for part in bs.silu_and_mul_fp4quant(x)]
    for part in halves(x, packed, scale, y, *silu):
        for got, want in zip(bs.quantize(part[0]), part[1:3], strict=True):
            assert torch.equal(got.view(U8), want.view(U8))
        assert torch.equal(bs.dequantize(*part[1:3]).view(U8), part[3].view(U8))
        for got, want in zip(bs.silu_and_mul_fp4quant(part[0]), part[4:], strict=True):
            assert torch.equal(got.view(U8), want)


@GPU
@pytest.mark.usefixtures("enough_memory")
def test_swizzle_of_2_31_scales():
    """There and back, and the last rows against the reference."""
    scale = torch.randint(1, 256, (ROWS, COLS), dtype=U8, device="cuda")
    swizzled = bs.swizzle_scales(scale)
    same_bytes(bytes_of(swizzled[-128:]), ref.swizzle(bytes_of(scale[-128:])))
    same_bytes(bytes_of(swizzled[:128]), ref.swizzle(bytes_of(scale[:128])))
    assert torch.equal(bs.unswizzle_scales(swizzled, ROWS, COLS), scale)
