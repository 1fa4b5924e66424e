"""The short forms of CUDA's headers in lower/native/nvcc: PTX is that of CUDA's own."""

import subprocess

import pytest

from blockscale.base import formats
from blockscale.base.errors import CompileError
from blockscale.building.builder import build
from blockscale.lower import nvcc
from tests.kit.pairwise import few

SM80, SM90, SM120 = "sm_80", "sm_90a", "sm_120a"


def sources_of(name: str, arch: str, tmp_path, monkeypatch) -> list[str]:
    """Return the CUDA sources of a function."""
    found, own = [], nvcc.compile_cuda_source

    def keep(source: str, *told: str, **options: bool) -> nvcc.Compiled:
        found.append(source)
        return own(source, *told, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nvcc, "compile_cuda_source", keep)
        build([name], tmp_path / "x.so", level=arch, logs_dirs=[])
    return found


def ptx(source: str, arch: str, includes, folder) -> str:
    """Return the PTX that nvcc makes with ``includes``."""
    assert nvcc.INCLUDES[0].name == "nvcc"
    (folder / "formats.h").write_text(formats.header())
    text, out, virtual = folder / "kernel.cu", folder / "kernel.ptx", arch.replace("sm", "compute")
    text.write_text(source)
    told = [*nvcc.FLAGS, *(f"-I{path}" for path in (*includes, folder)), "-ptx"]
    told += ["-gencode", f"arch={virtual},code={virtual}", str(text), "-o", str(out)]
    subprocess.run([str(nvcc.nvcc()), *told], check=True, capture_output=True)
    return out.read_text()


@pytest.mark.parametrize(
    ("name", "arch"),
    few(
        [
            ("add_rmsnorm_mxfp4_h256_128x4_y_f16", SM80),
            ("add_rmsnorm_nvfp4_h512_both_y_bf16", SM90),
            ("silu_and_mul_nvfp4_128x4_bf16", SM120),
            ("quantize_mxfp4_f32", SM80),
            ("dequantize_nvfp4_128x4_f16", SM90),
            ("edgellm_down_h64_i64_silu_f16", SM90),
            ("moe_route_e8_k2_softmax_bf16", SM90),
        ]
    ),
)
def test_ptx_is_that_of_cudas_headers(name, arch, tmp_path, monkeypatch):
    """Minima, shuffles, libdevice's functions, pairs of float16."""
    for source in sources_of(name, arch, tmp_path, monkeypatch):
        assert ptx(source, arch, nvcc.INCLUDES, tmp_path) == ptx(
            source, arch, nvcc.INCLUDES[1:], tmp_path
        )


CONVERSIONS = """#include <{header}>
extern "C" __global__ void k({dtype} *x, float *y) {{
  y[0] = {widen}(x[0]);
  y[1] = float(x[1]);
  x[2] = {round}(y[2]);
  x[3] = {round}_rn(y[3]);
  x[4] = {dtype}(y[4]);
}}"""


@pytest.mark.parametrize("arch", [SM80, SM90])
@pytest.mark.parametrize(
    "names",
    [
        {"header": "cuda_bf16.h", "dtype": "nv_bfloat16", "widen": "__bfloat162float",
         "round": "__float2bfloat16"},
        {"header": "cuda_fp16.h", "dtype": "half", "widen": "__half2float",
         "round": "__float2half"},
    ],
    ids=["bf16", "fp16"],
)  # fmt: skip
def test_conversions_are_those_of_cudas_headers(names, arch, tmp_path):
    """Which kernels' sources rarely have: most convert by instructions of their own."""
    source = CONVERSIONS.format(**names)
    own = ptx(source, arch, nvcc.INCLUDES, tmp_path)
    assert own == ptx(source, arch, nvcc.INCLUDES[1:], tmp_path)


@pytest.mark.parametrize("header", ["cuda_bf16.h", "cuda_fp16.h"])
@pytest.mark.parametrize("sign", "+-*/")
def test_arithmetic_of_16_bits_is_an_error_and_not_float32s(header, sign):
    dtype = {"cuda_bf16.h": "nv_bfloat16", "cuda_fp16.h": "half"}[header]
    body = f"x[0] = x[1] {sign} x[2];"
    source = f'#include <{header}>\nextern "C" __global__ void k({dtype} *x) {{ {body} }}'
    with pytest.raises(CompileError, match="deleted function"):
        nvcc.compile_cuda_source(source, SM90)


def test_a_function_that_is_not_there_is_an_error_of_the_compiler():
    source = 'extern "C" __global__ void k(float *x) { *x = cbrtf(*x); }'
    with pytest.raises(CompileError, match='"cbrtf" is undefined'):
        nvcc.compile_cuda_source(source, SM90)
