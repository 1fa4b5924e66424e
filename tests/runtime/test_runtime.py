"""Calling the functions of a library: results, defaults, and one clear error per broken rule."""

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm_ffi

from blockscale.runtime.library import Function, load
from tests.kit.tiny_kernels import WIDTH, library_file, variant

NAN = float("nan")


@pytest.fixture(scope="module")
def lib():
    return load(library_file())


def rows(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, WIDTH, generator=generator).to(dtype)


def expected(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x * scale + 1, rounded as the kernel does; exact for a power of two."""
    return (x.float() * scale + 1).to(x.dtype)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
@pytest.mark.parametrize(
    ("name", "dtype"), [("scale_f32", torch.float32), ("scale_bf16", torch.bfloat16)]
)
def test_torch(lib, name, dtype, count):
    x, scale = rows(count, dtype), torch.tensor([2.0])
    y = torch.full_like(x, NAN)
    assert lib[name](x, scale, y) is y
    assert torch.equal(y, expected(x, 2))
    assert torch.equal(lib[name](x, scale), y)
    assert torch.equal(lib[name](scale=scale, x=x), y)
    assert torch.equal(lib[name](x, y=y.fill_(NAN)), expected(x, 1))


def test_numpy(lib):
    x = rows(5).numpy()
    y = np.full_like(x, np.nan)
    assert lib["scale_f32"](x, y=y) is y
    assert (y == x + 1).all()
    out = lib["scale_f32"](x, np.array([4], np.float32))
    assert isinstance(out, np.ndarray)
    assert (out == x * 4 + 1).all()


def test_numpy_read_only_input(lib):
    x = rows(5).numpy()
    x.flags.writeable = False
    assert (lib["scale_f32"](x) == x + 1).all()


def test_numpy_bfloat16(lib):
    x = rows(5, torch.bfloat16)
    array = x.float().numpy().astype(ml_dtypes.bfloat16)
    for frozen in (False, True):
        array.flags.writeable = not frozen
        out = lib["scale_bf16"](array)
        assert out.dtype == ml_dtypes.bfloat16
        assert (out.astype(np.float32) == expected(x, 1).float().numpy()).all()


def test_numpy_bfloat16_without_ml_dtypes(lib, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    x = tvm_ffi.from_dlpack(rows(3, torch.bfloat16))
    with pytest.raises(TypeError, match=r"scale_bf16: y is to be bfloat16, but NumPy has no bfl"):
        lib["scale_bf16"](x)


def test_other_dlpack_tensors(lib):
    class Foreign:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **kwargs):
            return self.tensor.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    x, y = rows(4), torch.full((4, WIDTH), NAN)
    out = Foreign(y)
    assert lib["scale_f32"](Foreign(x), None, out) is out
    assert torch.equal(y, x + 1)
    assert (lib["scale_f32"](tvm_ffi.from_dlpack(x)) == x.numpy() + 1).all()


def test_several_outputs_and_a_size_from_an_expression(lib):
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    codes, total = lib["unpack"](packed)
    want = torch.stack([packed % 16, packed // 16], -1).reshape(16, 32)
    assert torch.equal(codes, want)
    assert torch.equal(total, want.sum(1).float())
    mine = torch.empty(16, 32, dtype=torch.uint8)
    assert lib["unpack"](packed, codes=mine)[0] is mine
    assert torch.equal(mine, want)


def test_size_that_only_the_caller_knows(lib):
    padded = torch.arange(64, dtype=torch.uint8).reshape(16, 4)
    assert torch.equal(lib["crop"](padded, rows=9), padded[:9])
    out = torch.empty(11, 4, dtype=torch.uint8)
    assert torch.equal(lib["crop"](padded, out), padded[:11])
    with pytest.raises(TypeError, match=r"crop: out is missing, and its shape .*the size rows="):
        lib["crop"](padded)
    with pytest.raises(ValueError, match=r"must be ceil_to\(rows, 8\) = 8 \(rows = 8 as given\)"):
        lib["crop"](padded, rows=8)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
def test_float8_bytes(lib, dtype):
    data = torch.arange(32, dtype=torch.uint8).reshape(8, 4)
    out = torch.zeros(8, 4, dtype=torch.uint8).view(getattr(torch, dtype))
    assert lib["crop"](data.view(getattr(torch, dtype)), out) is out
    assert torch.equal(out.view(torch.uint8), data)
    array = data.numpy().view(getattr(ml_dtypes, dtype))
    assert (lib["crop"](array, rows=8) == data.numpy()).all()


def test_float4_bytes(lib):
    data = torch.arange(32, dtype=torch.uint8).reshape(8, 4)
    codes, _ = lib["unpack"](data.view(torch.float4_e2m1fn_x2))
    assert torch.equal(codes, lib["unpack"](data)[0])
    with pytest.raises(TypeError, match=r"expected uint8 or float4_e2m1fn_x2; pass the bytes that"):
        lib["unpack"](data.view(torch.float8_e4m3fn))


def test_empty_tensors_are_not_launched(lib):
    assert lib["scale_f32"](rows(0)).shape == (0, WIDTH)
    assert lib["scale_f32"](rows(0).numpy()).shape == (0, WIDTH)
    codes, total = lib["unpack"](torch.empty(0, 16, dtype=torch.uint8))
    assert (codes.shape, total.shape) == ((0, 32), (0,))
    y = rows(0)
    assert lib["scale_f32"](rows(0), None, y) is y


def test_empty_inner_dimension(lib):
    """A compiled reduction over nothing would leave the output as it was allocated."""
    with pytest.raises(ValueError, match=r"packed has shape \(3, 0\), so no elements, but the out"):
        lib["unpack"](torch.empty(3, 0, dtype=torch.uint8))


def test_overloads(lib):
    scale = lib["scale"]
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(2):  # the second call knows the way
            assert torch.equal(scale(rows(3, dtype)), expected(rows(3, dtype), 1))
        assert torch.equal(scale(x=rows(3, dtype)), expected(rows(3, dtype), 1))
    assert [f.name for f in scale] == ["scale_f32", "scale_bf16"]
    with pytest.raises(TypeError, match=r"scale: x is float64, which fits none of scale_f32, sc"):
        scale(rows(3, torch.float64))
    with pytest.raises(TypeError, match=r"scale: x is None, which fits none of"):
        scale()


def test_overloads_by_output_dtype(tmp_path):
    def change(contents):
        functions = contents["functions"]
        for name in ("unpack", "crop"):
            functions[name]["base"] = "both"
        functions["unpack"]["params"] = functions["unpack"]["params"][:1] + [
            {"name": "total", "dtype": "float32", "shape": ["rows"], "output": True}
        ]

    both = load(variant(tmp_path / "both.so", change))["both"]
    data = torch.zeros(8, 4, dtype=torch.uint8)
    assert both.select(data, torch.zeros(8)).name == "unpack"
    assert both.select(data, out=data).name == "crop"
    with pytest.raises(TypeError, match=r"is uint8, which fits none of unpack, crop; call one by"):
        both(data)


def test_introspection(lib):
    assert repr(lib).startswith(f"<blockscale.Library '{library_file()}', cpu plain, 1 of 5 tuned")
    assert lib["scale_f32"].doc == (
        "scale_f32(x: float32[rows, 64], scale: float32[1] = 1) -> y: float32[rows, 64]"
    )
    assert repr(lib["crop"]).endswith("-> out: uint8[rows, 4]>")
    assert repr(lib["scale_f32"]).endswith("(not tuned)>")
    assert "scale_f32" in lib
    assert "scale" in lib
    assert "linear" not in lib
    assert len(lib) == len([*lib]) == 5
    with pytest.raises(KeyError, match=r"has no function 'scal_f32'.*near are scale_f32"):
        lib["scal_f32"]


X, Y = rows(4), torch.full((4, WIDTH), NAN)
WIDE = torch.zeros(4, 2 * WIDTH)

BAD_CALLS = {
    "no argument": (lambda f: f(y=Y), TypeError, r"x is missing; pass a tensor of float32\[rows"),
    "too many": (lambda f: f(X, None, Y, Y), TypeError, r"got 4 arguments for 3 param.*last 1"),
    "twice": (lambda f: f(X, x=X, y=Y), TypeError, "x is given twice, as argument number 0"),
    "unknown": (lambda f: f(X, scales=X, y=Y), TypeError, "names no parameter; did you mean scale"),
    "list": (lambda f: f(X, [1.0], Y), TypeError, r"scale is \[1.0\], not a tensor; pass a torch"),
    "number": (lambda f: f(X, 1.0, Y), TypeError, "scale is 1.0, not a tensor"),
    "dtype": (lambda f: f(X.double(), None, Y), TypeError, r"x has dtype float64, expected float3"),
    "numpy dtype": (lambda f: f(X.double().numpy(), y=Y), TypeError, r"pass x.astype\(float32\)"),
    "output dtype": (lambda f: f(X, None, Y.int()), TypeError, "y has dtype int32.*allocate it"),
    "device": (lambda f: f(X.to("meta"), None, Y), ValueError, "x is on meta, but this library"),
    "stride": (lambda f: f(WIDE[:, ::2], None, Y), ValueError, r"pass x.contiguous\(\)"),
    "numpy stride": (lambda f: f(WIDE.numpy()[:, ::2], y=Y), ValueError, "ascontiguousarray"),
    "output stride": (lambda f: f(X, None, WIDE[:, ::2]), ValueError, "pass a contiguous output"),
    "sparse": (
        lambda f: f(X.to_sparse(), None, Y),
        ValueError,
        "x with shape .* is not cont",
    ),
    "columns": (
        lambda f: f(WIDE, None, Y),
        ValueError,
        r"x has shape \(4, 128\), but shape\[1\]",
    ),
    "rows": (lambda f: f(X, None, rows(5)), ValueError, r"must be rows = 4 \(rows = 4 from x.sh"),
    "rank": (lambda f: f(X[None], None, Y), ValueError, r"so 3 dimensions.*x.reshape\(-1, 64\)"),
    "scalar": (lambda f: f(X, torch.tensor(2.0), Y), ValueError, r"pass scale.reshape\(-1\)"),
    "negative": (lambda f: f(torch._neg_view(X), y=Y), ValueError, r"pass x.resolve_neg\(\)"),
    "negative scale": (
        lambda f: f(X, torch._neg_view(torch.ones(1)), Y),
        ValueError,
        "scale is a view with the negative bit, which kernels do not see",
    ),
    "negative output": (lambda f: f(X, None, torch._neg_view(Y)), ValueError, "y is a view with t"),
    "mask": (
        lambda f: f(np.ma.masked_array(X.numpy(), mask=X.numpy() > 0)),
        ValueError,
        r"x is a masked array, and kernels see no masks; pass x.filled\(value\), or x.data",
    ),
    "byte order": (
        lambda f: f(X.numpy().astype(">f4")),
        ValueError,
        r"x is big-endian; pass x.astype\(x.dtype.newbyteorder\('='\)\)",
    ),
    "grad": (lambda f: f(X.clone().requires_grad_(), None, Y), ValueError, r"pass x.detach\(\)"),
    "aliased": (lambda f: f(Y, None, Y), ValueError, "y overlaps x in memory.*memory of its own"),
    "overlap": (
        lambda f: f(WIDE.view(8, WIDTH)[:4], None, WIDE.view(8, WIDTH)[3:7]),
        ValueError,
        "y overlaps x in memory",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(lib, case):
    call, error, sentence = BAD_CALLS[case]
    WIDE.fill_(NAN)
    for _ in range(2):  # no signature of a bad call is remembered as good
        with pytest.raises(error, match=f"scale_f32: .*{sentence}"):
            call(lib["scale_f32"])
    assert Y.isnan().all()
    assert WIDE.isnan().all()


def test_subclasses_of_arrays(lib, tmp_path):
    """Those that add nothing to the numbers run like arrays, even where a masked one was called."""
    f, x = lib["scale_f32"], rows(3).numpy()
    kept = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    kept[:] = x
    for array in (x, kept):
        assert (np.asarray(f(array)) == x + 1).all()
        with pytest.raises(ValueError, match="x is a masked array"):
            f(np.ma.masked_array(array))


def test_odd_but_legal_arguments(lib):
    f, x = lib["scale_f32"], rows(1)
    scale = torch.tensor([2.0, 9.0, 4.0])
    assert torch.equal(f(x, scale[::2][:1]), x * 2 + 1)  # stride 2, but one element
    assert torch.equal(f(WIDE.fill_(1)[:1, :WIDTH]), torch.full((1, WIDTH), 2.0))  # one row
    assert torch.equal(f(rows(9)[3:5]), rows(9)[3:5] + 1)
    shifted = torch.zeros(WIDTH + 1)[1:].reshape(1, WIDTH)  # 4 bytes after a 64-byte boundary
    assert torch.equal(f(shifted), torch.ones(1, WIDTH))
    with torch.no_grad():
        parameter = torch.nn.Parameter(x)
        assert torch.equal(f(parameter), x + 1)
    with pytest.raises(ValueError, match="x requires grad"):
        f(parameter)


def test_odd_but_legal_default_device(lib):
    x = rows(3)
    with torch.device("meta"):
        assert torch.equal(lib["scale_f32"](x), x + 1)


def test_unaligned_tensors_are_refused(lib):
    """An argument lies at a multiple of its element's bytes; nothing more is asked."""
    raw = bytearray(4 * WIDTH + 64)
    view = {"dtype": np.float32, "count": WIDTH}
    for offset in (0, 4, 12):
        assert (lib["scale_f32"](np.frombuffer(raw, offset=offset, **view)[None]) == 1).all()
    odd = torch.frombuffer(raw, dtype=torch.float32, offset=2, count=WIDTH)[None]
    for misaligned in (odd, np.frombuffer(raw, offset=2, **view)[None]):
        with pytest.raises(ValueError, match=r"x lies at address 0x.* not a multiple of 4 bytes"):
            lib["scale_f32"](misaligned)


def test_read_only_output(lib):
    y = np.zeros((4, WIDTH), np.float32)
    y.flags.writeable = False
    with pytest.raises(ValueError, match="y is read-only, but the kernel writes it; pass a copy"):
        lib["scale_f32"](X, None, y)


def test_size_that_does_not_divide(tmp_path):
    def change(contents):
        contents["functions"]["unpack"]["params"][2]["shape"] = ["cols // 16"]

    unpack = load(variant(tmp_path / "k.so", change))["unpack"]
    with pytest.raises(ValueError, match=r"to be cols // 16, but cols = 6 is not a multiple of 16"):
        unpack(torch.zeros(2, 3, dtype=torch.uint8))


def test_workspace_that_does_not_fit(lib):
    """An error in a worker thread reaches the caller, and the next call works."""
    for count in (1, 8):
        x = torch.zeros(count, WIDTH)
        with pytest.raises(MemoryError, match=r"no memory for a kernel workspace of \d{15,} bytes"):
            lib["greedy"](x)
    assert torch.equal(lib["scale_f32"](X), X + 1)


def test_signatures_are_forgotten_in_the_end(lib, monkeypatch):
    monkeypatch.setattr("blockscale.runtime.function.MAX_PLANS", 3)
    f: Function = lib["scale_bf16"]
    for count in range(1, 9):
        assert torch.equal(f(rows(count, torch.bfloat16)), expected(rows(count, torch.bfloat16), 1))
        assert len(f._plans) <= 3
