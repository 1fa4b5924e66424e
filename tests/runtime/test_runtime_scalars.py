"""Functions of CPU libraries that take numbers by value, and outputs that may be an input."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm.script import tirx as T

from blockscale.building.export import write_library
from blockscale.runtime.library import load
from tests.kit import tiny_kernels

WIDTH = 64


@T.prim_func(s_tir=True)
def blend(x: T.handle, a: T.float32, k: T.int32, y: T.handle, out: T.handle, y_out: T.handle):
    """out = x + k, y_out = a * y + x; y_out may be y."""
    rows = T.int64()
    X = T.match_buffer(x, (rows, 64), "bfloat16", align=2)
    Y = T.match_buffer(y, (rows, 64), "bfloat16", align=2)
    O = T.match_buffer(out, (rows, 64), "float32", align=4)  # noqa: E741
    U = T.match_buffer(y_out, (rows, 64), "bfloat16", align=2)
    for i, j in T.grid(rows, 64):
        with T.sblock("blend"):
            vi, vj = T.axis.remap("SS", [i, j])
            O[vi, vj] = T.cast(X[vi, vj], "float32") + T.cast(k, "float32")
            U[vi, vj] = T.cast(
                a * T.cast(Y[vi, vj], "float32") + T.cast(X[vi, vj], "float32"), "bfloat16"
            )


@cache
def library():
    folder = Path(mkdtemp(prefix="blockscale-test-"))
    function = blend.with_attr("global_symbol", "blend").with_attr("tirx.noalias", False)
    module = tvm.compile(tvm.IRModule({"blend": function}), target="llvm").mod
    module.write_to_file(str(folder / "blend.o"), "o")
    contents = tiny_kernels.manifest()

    def param(name, dtype, shape=("rows", WIDTH), **more):
        return {"name": name, "dtype": dtype, "shape": shape and [*shape], **more}

    params = [
        param("x", "bfloat16"),
        param("a", "float32", None, default=0.5),
        param("k", "int32", None, default=3),
        param("y", "bfloat16"),
        param("out", "float32", output=True),
        param("y_out", "bfloat16", output=True, alias="y"),
    ]
    contents["functions"] = {"blend": {"base": "blend", "params": params}}
    return load(write_library([folder / "blend.o"], contents, folder / "blend.so"))


def data(rows=3):
    x, y = torch.randint(-9, 9, (2, rows, WIDTH)).to(torch.bfloat16)
    return x, y, torch.full((rows, WIDTH), float("nan"))


def test_numbers_and_their_defaults():
    f = library()["blend"]
    assert f.kind == "cpu"
    for a, k in ((2, 5), (None, None), (np.float32(2), np.int64(5)), (True, False)):
        x, y, out = data()
        want = x + y * (0.5 if a is None else float(a))
        for _ in range(2):  # the second call knows the signature, whatever the numbers
            updated = torch.full_like(y, float("nan"))
            assert f(x, a, k, y, out, updated)[1] is updated
            assert torch.equal(updated, want)
            assert torch.equal(out, x.float() + (3 if k is None else float(k)))
    assert len(f._plans) == 1


def test_in_place():
    f = library()["blend"]
    for give in (False, True):
        for _ in range(2):
            x, y, out = data()
            want = x + y * 2
            results = f(x, 2.0, y=y, out=out, y_out=y if give else None)
            assert results[1] is y
            assert torch.equal(y, want)


def test_what_is_updated_in_place_overlaps_no_other():
    """Whether the output is given or left out: rows would be written before they are read."""
    f, both = library()["blend"], torch.zeros(4, WIDTH, dtype=torch.bfloat16)
    for given in (None, both[1:]):
        for x in (both[:3], both[1:]):
            for _ in range(2):
                with pytest.raises(ValueError, match="blend: y_out overlaps x in memory"):
                    f(x, 2.0, 0, both[1:], None, given)
    assert not both.any()


def test_in_place_in_numpy():
    x, y, _ = (t.float().numpy().astype(ml_dtypes.bfloat16) for t in data())
    want = x.astype("f4") + y.astype("f4") * 2
    out, updated = library()["blend"](x, 2.0, 0, y)
    assert updated is y
    assert (y.astype("f4") == want).all()
    assert (out == x.astype("f4")).all()
    y.flags.writeable = False
    with pytest.raises(ValueError, match=r"blend: y is read-only, but without y_out it is updated"):
        library()["blend"](x, 2.0, 0, y)


def test_in_place_in_another_dlpack_tensor():
    x, y, _ = data()
    want = x + y * 2
    view = tvm_ffi.from_dlpack(y)
    assert library()["blend"](x, 2.0, 0, view)[1] is view
    assert torch.equal(y, want)


X, Y, OUT = data()
BAD_CALLS = {
    "text": ((X, "2", 1, Y), TypeError, "a is '2', expected a number of float32; pass a Python fl"),
    "tensor": ((X, torch.ones(()), 1, Y), TypeError, r"a is tensor\(1.\), expected a number"),
    "fraction": ((X, 1, 2.5, Y), TypeError, "k is 2.5, expected a number of int32; pass a Python"),
    "range": ((X, 1, 2**31, Y), ValueError, "k is 2147483648, which is no int32; pass a number fr"),
    "nan": ((X, float("nan"), 1, Y), ValueError, "a is nan; pass a number"),
    "missing": ((X, 1, 2), TypeError, "y is missing"),
    "overlap": (
        (X, 1, 1, Y, OUT, OUT.view(torch.bfloat16).view(-1)[: 3 * WIDTH].view(3, WIDTH)),
        ValueError,
        "out overlaps y_out in memory",
    ),
    "partly": (
        (X[:2], 1, 1, Y[:2], OUT[:2], Y[1:]),
        ValueError,
        "y_out overlaps y in memory",
    ),
    "other": ((X, 1, 1, Y, OUT, X), ValueError, "y_out overlaps x in memory"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(case):
    arguments, error, sentence = BAD_CALLS[case]
    with pytest.raises(error, match=f"^blend: {sentence}"):
        library()["blend"](*arguments)


def test_signature():
    assert library()["blend"].doc == (
        "blend(x: bfloat16[rows, 64], a: float32 = 0.5, k: int32 = 3, y: bfloat16[rows, 64])"
        " -> out: float32[rows, 64], y_out: bfloat16[rows, 64]"
    )
