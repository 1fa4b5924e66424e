"""A library of tiny kernels for tests of the runtime: compiled and linked once per session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tvm
import tvm_ffi
from tvm.script import tirx as T

from blockscale.base import abi
from blockscale.base.manifest import BLOCKSCALE_ABI, append_manifest
from blockscale.building.export import write_library

WIDTH = 64


@T.prim_func(s_tir=True)
def scale_f32(x: T.handle, scale: T.handle, y: T.handle):
    """y = x * scale + 1, in parallel, through a workspace of 256 bytes a row."""
    rows = T.int64()
    X = T.match_buffer(x, (rows, 64), "float32", align=4)
    S = T.match_buffer(scale, (1,), "float32", align=4)
    Y = T.match_buffer(y, (rows, 64), "float32", align=4)
    W = T.alloc_buffer((rows, 64), "float32")
    for i in T.parallel(rows):
        for j in T.vectorized(64):
            with T.sblock("scaled"):
                vi, vj = T.axis.remap("SS", [i, j])
                W[vi, vj] = X[vi, vj] * S[0]
    for i in T.parallel(rows):
        for j in T.vectorized(64):
            with T.sblock("shifted"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = W[vi, vj] + T.float32(1)


@T.prim_func(s_tir=True)
def scale_bf16(x: T.handle, scale: T.handle, y: T.handle):
    """The same for bfloat16, without the workspace."""
    rows = T.int64()
    X = T.match_buffer(x, (rows, 64), "bfloat16", align=2)
    S = T.match_buffer(scale, (1,), "float32", align=4)
    Y = T.match_buffer(y, (rows, 64), "bfloat16", align=2)
    for i, j in T.grid(rows, 64):
        with T.sblock("scaled"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = T.cast(T.cast(X[vi, vj], "float32") * S[0] + T.float32(1), "bfloat16")


@T.prim_func(s_tir=True)
def unpack(packed: T.handle, codes: T.handle, total: T.handle):
    """Two outputs: the nibbles of each row, low one first, and their sum."""
    rows, half = T.int64(), T.int64()
    P = T.match_buffer(packed, (rows, half), "uint8", align=1)
    C = T.match_buffer(codes, (rows, half * 2), "uint8", align=1)
    S = T.match_buffer(total, (rows,), "float32", align=4)
    for i, j in T.grid(rows, half * 2):
        with T.sblock("nibble"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = T.shift_right(P[vi, vj // 2], T.cast(vj % 2 * 4, "uint8")) & T.uint8(15)
    for i, j in T.grid(rows, half * 2):
        with T.sblock("total"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                S[vi] = T.float32(0)
            S[vi] = S[vi] + T.cast(C[vi, vj], "float32")


@T.prim_func(s_tir=True)
def crop(padded: T.handle, out: T.handle):
    """The first rows: how many is known from the output only."""
    rows, many = T.int64(), T.int64()
    P = T.match_buffer(padded, (many, 4), "uint8", align=1)
    O = T.match_buffer(out, (rows, 4), "uint8", align=1)  # noqa: E741
    for i, j in T.grid(rows, 4):
        with T.sblock("copy"):
            vi, vj = T.axis.remap("SS", [i, j])
            O[vi, vj] = P[vi, vj]


@T.prim_func(s_tir=True)
def greedy(x: T.handle, y: T.handle):
    """Every task wants a workspace of rows * 256 TiB, and gets it for no rows only."""
    rows = T.int64()
    X = T.match_buffer(x, (rows, 64), "float32", align=4)
    Y = T.match_buffer(y, (rows, 64), "float32", align=4)
    for i in T.parallel(rows):
        with T.sblock("row"):
            vi = T.axis.spatial(rows, i)
            T.reads(X[vi, 0:64])
            T.writes(Y[vi, 0:64])
            W = T.alloc_buffer((rows * 70368744177664,), "float32")
            for j in range(64):  # data-dependent places, so that TVM cannot shrink W
                W[T.cast(X[vi, j], "int64")] = X[vi, j]
            for j in range(64):
                Y[vi, j] = W[T.cast(X[vi, 0], "int64")]


def _param(name: str, dtype: str, shape: list[int | str], **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape, **more}


def _scale(dtype: str) -> list[dict[str, Any]]:
    return [
        _param("x", dtype, ["rows", WIDTH]),
        _param("scale", "float32", [1], default=1.0),
        _param("y", dtype, ["rows", WIDTH], output=True),
    ]


_PARAMS = {
    "scale_f32": ("scale", _scale("float32")),
    "scale_bf16": ("scale", _scale("bfloat16")),
    "unpack": (
        "unpack",
        [
            _param("packed", "uint8", ["rows", "cols // 2"], storage="e2m1x2"),
            _param("codes", "uint8", ["rows", "cols"], output=True),
            _param("total", "float32", ["rows"], output=True),
        ],
    ),
    "crop": (
        "crop",
        [
            _param("padded", "uint8", ["ceil_to(rows, 8)", 4], storage="byte"),
            _param("out", "uint8", ["rows", 4], output=True, storage="byte"),
        ],
    ),
    "greedy": (
        "greedy",
        [_param("x", "float32", ["rows", 64]), _param("y", "float32", ["rows", 64], output=True)],
    ),
}
_FUNCTIONS = {f.__name__: f for f in (scale_f32, scale_bf16, unpack, crop, greedy)}


def manifest() -> dict[str, Any]:
    """Return a manifest that fits the library; the caller may change it."""
    functions = {
        name: {"base": base, "params": params, "buckets": [{"rows": 1, "tuned": name == "crop"}]}
        for name, (base, params) in _PARAMS.items()
    }
    contents = {
        "format": 1,
        "blockscale": "0.1.0",
        "abi": {
            "tvm_ffi": tvm_ffi.__version__,
            "facts": abi.declared(),
            "blockscale": BLOCKSCALE_ABI,
        },
        "target": {"kind": "cpu", "level": "plain", "features": []},
        "built": {"tvm": tvm.__version__},
        "functions": functions,
        "meta": {"note": "tiny"},
    }
    return copy.deepcopy(contents)


@cache
def object_file() -> Path:
    """Return the object file that TVM makes of all kernels."""
    functions = {name: _FUNCTIONS[name].with_attr("global_symbol", name) for name in _PARAMS}
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    path = Path(mkdtemp(prefix="blockscale-test-")) / "kernels.o"
    tvm.compile(tvm.IRModule(functions), target=target).mod.write_to_file(str(path), "o")
    return path


@cache
def library_file() -> Path:
    """Return the linked library; do not change it."""
    return write_library([object_file()], manifest(), object_file().with_suffix(".so"))


@cache
def library_bytes() -> bytes:
    """Return the contents of `library_file`."""
    return library_file().read_bytes()


@cache
def elf_bytes() -> bytes:
    """Return the ELF image alone: before the manifest and the footer of 56 bytes."""
    length = int.from_bytes(library_bytes()[-56:-48], "little")
    return library_bytes()[: -56 - length]


def variant(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write the library with its manifest changed by ``change(manifest)``, and return ``path``."""
    contents = manifest()
    change(contents)
    path.write_bytes(append_manifest(elf_bytes(), contents))
    return path
