"""cvt to and from small formats equals CUDA's own host emulation, for every half and dense floats.

The reference is compiled here from cuda_fp4.hpp, cuda_fp6.hpp, cuda_fp8.hpp, cuda_bf16.hpp and
cuda_fp16.hpp: a host program that writes what each conversion gives.

The host emulation is not the instruction where an input is NaN and the result has several NaNs:
the hardware writes 0x7fff, __float2half_rz keeps payload and sign, and so does the conversion of
e5m2's NaN codes to half.  Those lanes are compared as NaN.  Numbers are compared bit by bit.
"""

import subprocess

import numpy as np
import pytest

from blockscale.emulator.alu import lookup
from tests.emulator.kit import tools

MODES = {"rn": "cudaRoundNearest", "rz": "cudaRoundZero", "rp": "cudaRoundPosInf"}
FP6 = {"e2m3": "__NV_E2M3", "e3m2": "__NV_E3M2"}
FP8 = {"e4m3": "__NV_E4M3", "e5m2": "__NV_E5M2"}


def small(source, argument):
    """The columns of one source type: name, C++ type, expression."""
    for fmt, calls in (({"e2m1": "__NV_E2M1"}, "fp4"), (FP6, "fp6")):
        for name, kind in fmt.items():
            call = f"__nv_cvt_{source}_to_{calls}({argument}, {kind}, cudaRoundNearest)"
            yield f"rn.satfinite.{name}", "uint8_t", call
    for name, kind in FP8.items():
        call = f"__nv_cvt_{source}_to_fp8({argument}, __NV_SATFINITE, {kind})"
        yield f"rn.satfinite.{name}", "uint8_t", call
    if source == "halfraw":
        return
    for mode in ("rz", "rp"):
        for mod, saturation in ((".satfinite", "__NV_SATFINITE"), ("", "__NV_NOSAT")):
            call = f"__nv_cvt_{source}_to_e8m0({argument}, {saturation}, {MODES[mode]})"
            yield f"{mode}{mod}.ue8m0", "uint8_t", call


def columns():
    """Every column: key, C++ type, count of inputs (0: the floats), expression."""
    for name, kind, call in small("float", "x[i]"):
        yield ("f32", name), kind, 0, call
    for mode, short in (("rn", "rn"), ("rz", "rz"), ("rm", "rd"), ("rp", "ru")):
        for to, name in (("bf16", "bfloat16"), ("f16", "half")):
            yield ("f32", f"{mode}.{to}"), "uint16_t", 0, f"raw(__float2{name}_{short}(x[i]))"
    for name, kind, call in small("halfraw", "f16(i)"):
        yield ("f16", name), kind, 65536, call
    yield ("f16", "rn.bf16"), "uint16_t", 65536, "raw(__float2bfloat16_rn(__half2float(f16(i))))"
    for name, kind, call in small("bfloat16raw", "bf16(i)"):
        yield ("bf16", name), kind, 65536, call
    for name, count, call in (
        ("e2m1", 16, "__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)"),
        ("e2m3", 64, "__nv_cvt_fp6_to_halfraw(code, __NV_E2M3)"),
        ("e3m2", 64, "__nv_cvt_fp6_to_halfraw(code, __NV_E3M2)"),
        ("e4m3", 256, "__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)"),
        ("e5m2", 256, "__nv_cvt_fp8_to_halfraw(code, __NV_E5M2)"),
        ("ue8m0", 256, "__nv_cvt_e8m0_to_bf16raw(code)"),
    ):
        yield ("codes", name), "uint16_t", count, call + ".x"


SOURCE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cuda_fp8.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
template <class H> static uint16_t raw(H h) { uint16_t r; memcpy(&r, &h, 2); return r; }
static __half_raw f16(size_t i) { __half_raw r; r.x = (unsigned short)i; return r; }
static __nv_bfloat16_raw bf16(size_t i) { __nv_bfloat16_raw r; r.x = (unsigned short)i; return r; }
template <class T, class F> static void column(size_t n, F f) {
  std::vector<T> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = f(i, (uint8_t)i);
  fwrite(out.data(), sizeof(T), n, stdout);
}
int main() {
  std::vector<float> x;
  float buffer[4096];
  for (size_t got; (got = fread(buffer, 4, 4096, stdin)) > 0;)
    x.insert(x.end(), buffer, buffer + got);
  %s
  return 0;
}
"""


def floats():
    """About 420 000 f32 values: every format's values and ties with neighbours, both signs."""
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint32)
    halves = every.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    around = [every << 16, (every << 16) | 0x8000, halves, halves + 0x1000]
    bits = np.concatenate(around)
    beside = [a[::3] + step for a in around for step in (np.uint32(1), np.uint32(0xFFFFFFFF))]
    bits = np.concatenate([bits, *beside])
    subnormal = rng.integers(0, 1 << 23, 4000, dtype=np.uint32)
    random = rng.integers(0, 1 << 32, 40000, dtype=np.uint32)
    near = rng.uniform(-500, 500, 20000).astype(np.float32).view(np.uint32)
    return np.concatenate([bits, subnormal, subnormal | 0x80000000, random, near]).view(np.float32)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """What CUDA's host code makes of the inputs: key -> array; 'x' is the floats."""
    include, compiler = tools.include(), tools.program("g++")
    folder = tmp_path_factory.mktemp("cuda_host")
    table = list(columns())
    body = "\n  ".join(
        f"column<{kind}>({count or 'x.size()'}, [&](size_t i, uint8_t code) {{ return {call}; }});"
        for _, kind, count, call in table
    )
    (folder / "cvt.cpp").write_text(SOURCE % body)
    command = [compiler, "-O1", "-w", f"-I{include}", "-o", folder / "cvt", folder / "cvt.cpp"]
    subprocess.run(command, check=True)
    x = floats()
    raw = subprocess.run(
        [folder / "cvt"], input=x.tobytes(), capture_output=True, check=True
    ).stdout
    found, offset = {"x": x}, 0
    for key, kind, count, _ in table:
        dtype, count = ("u1" if kind == "uint8_t" else "u2"), count or len(x)
        found[key] = np.frombuffer(raw, dtype, count, offset)
        offset += count * int(dtype[1])
    assert offset == len(raw)
    return found


def run(opcode, *ins):
    alu = lookup(opcode)
    with np.errstate(all="ignore"):
        return alu.fn(*[np.ascontiguousarray(x).view(d) for x, d in zip(ins, alu.ins, strict=True)])


def same(got, expected, dtype=None):
    """Equal codes; with dtype NaNs of any payload are one."""
    bad = got != expected
    if dtype == "f16":
        bad &= ~(np.isnan(got.view("f2")) & np.isnan(expected.view("f2")))
    if dtype == "bf16":
        bad &= ~((got & 0x7FFF > 0x7F80) & (expected & 0x7FFF > 0x7F80))
    assert not bad.any(), (int(bad.sum()), got[bad][:5], expected[bad][:5])


SMALL = [name for name, _, _ in small("float", "")]


@pytest.mark.parametrize("name", SMALL)
def test_pairs_from_floats(cuda, name):
    x, expected = cuda["x"], cuda["f32", name].astype(np.uint16)
    assert len(x) >= 200_000
    shift = 4 if "e2m1" in name else 8
    word = run(f"cvt.{name}x2.f32", x, np.roll(x, 1))
    same(word, (expected << shift | np.roll(expected, 1)).astype(word.dtype))


HALF = [(name, "f16") for name, _, _ in small("halfraw", "")] + [(name, "bf16") for name in SMALL]


@pytest.mark.parametrize(("name", "source"), HALF)
def test_pairs_from_every_half(cuda, name, source):
    every = np.arange(1 << 16, dtype=np.uint32)
    other = every[::-1]
    expected = cuda[source, name].astype(np.uint16)
    shift = 4 if "e2m1" in name else 8
    word = run(f"cvt.{name}x2.{source}x2", every << 16 | other)
    same(word, (expected << shift | expected[::-1]).astype(word.dtype))


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_halves_from_floats(cuda, mode, fmt):
    x, expected = cuda["x"], cuda["f32", f"{mode}.{fmt}"]
    same(run(f"cvt.{mode}.{fmt}.f32", x).view("u2"), expected, fmt)
    if mode in ("rn", "rz"):
        word = run(f"cvt.{mode}.{fmt}x2.f32", x, np.roll(x, 7))
        same((word >> 16).astype("u2"), expected, fmt)
        same((word & 0xFFFF).astype("u2"), np.roll(expected, 7), fmt)


def test_bf16_from_every_half(cuda):
    every = np.arange(1 << 16, dtype=np.uint16)
    same(run("cvt.rn.bf16.f16", every), cuda["f16", "rn.bf16"], "bf16")


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "ue8m0"])
def test_back(cuda, name):
    expected = cuda["codes", name]
    codes = np.arange(len(expected), dtype=np.uint16)
    shift = 4 if name == "e2m1" else 8
    pair = (codes << shift | codes[::-1]).astype("u1" if name == "e2m1" else "u2")
    to = "bf16" if name == "ue8m0" else "f16"
    word = run(f"cvt.rn.{to}x2.{name}x2", pair)
    same((word >> 16).astype("u2"), expected, to)
    same((word & 0xFFFF).astype("u2"), expected[::-1], to)
    nan = np.isnan((word >> 16).astype("u2").view("f2")) if to == "f16" else codes == 255
    assert ((word >> 16)[nan] == 0x7FFF).all()  # the canonical NaN
