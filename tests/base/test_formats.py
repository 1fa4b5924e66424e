"""The table of formats: adding a format whose numbers are known is adding a row."""

from subprocess import run as execute
from sys import executable
from textwrap import dedent

import pytest

from blockscale.base import formats
from blockscale.base.formats import E2M1, E4M3, UE8M0
from tests.kit.paths import without_torch


def test_numbers_have_the_values_that_their_names_say():
    assert (E2M1.max_value, E4M3.max_value, UE8M0.max_value) == (6.0, 448.0, 2.0**127)
    assert [number.per_byte for number in (E2M1, E4M3, UE8M0)] == [2, 1, 1]
    assert [len(number.values) * (1 + number.signed) for number in (E2M1, E4M3, UE8M0)] == [
        *(16, 256, 256),
    ]


def test_rows_are_found_by_op():
    assert tuple(formats.QUANTIZED) == ("nvfp4", "mxfp4")
    assert tuple(formats.GEMM) == ("nvfp4", "mxfp4", "mxfp8xmxfp4", "mxfp8")
    assert {name: row.blocks for name, row in formats.MOE.items()} == {
        "nvfp4": (16,),
        "mxfp4": (32,),
        "int4": (32, 64, 128),
    }
    assert [row.name for row in formats.FUSED.values()] == ["nvfp4", "mxfp4", "e4m3b32"]


NEW_ROW = dedent("""
    from blockscale.base import formats
    row = formats.Format("mxfp4b16", formats.E2M1, formats.UE8M0, (16,), ("quantize",))
    formats.ROWS += (row,)
    formats.QUANTIZED["mxfp4b16"] = row
""")
"""What a line more in `formats.ROWS` would do, before anything else is imported."""


def in_new_process(text, env=None):
    """Run Python after the row was added."""
    command = [executable, "-c", NEW_ROW + dedent(text)]
    done = execute(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_one_row_makes_a_format_that_quantises_and_dequantises():
    """E2M1 codes, UE8M0 scales of 16: as MXFP4, of which every block of 32 is two equal ones."""
    in_new_process("""
        import torch
        import blockscale as bs
        half = torch.randn(9, 64).bfloat16().view(9, 4, 1, 16)
        x = half.expand(9, 4, 2, 16).reshape(9, 128)
        packed, scale = bs.quantize(x, "mxfp4b16")
        other, wide = bs.quantize(x, "mxfp4")
        assert torch.equal(packed, other) and scale.dtype == wide.dtype == torch.uint8
        assert scale.shape == (9, 8) and torch.equal(scale, wide.repeat_interleave(2, -1))
        back = bs.dequantize(packed, scale, "mxfp4b16", dtype=torch.float32)
        assert torch.equal(back, bs.dequantize(other, wide, "mxfp4", dtype=torch.float32))
        weight, w_scale = bs.quantize(torch.randn(8, 128), "mxfp4b16")
        values = bs.dequantize(weight, w_scale, "mxfp4b16", dtype=torch.float32)
        y = bs.linear(x.float(), weight, w_scale, fmt="mxfp4b16")
        assert torch.allclose(y, x.float() @ values.T, rtol=1e-5, atol=1e-5)
        assert bs.specs.Spec.parse("quantize_mxfp4b16_floor_bf16").block == 16
    """)


def test_one_row_makes_a_format_of_cuda_kernels():
    """Its device code compiles; only UE8M0 scales have two roundings."""
    from blockscale.base.errors import CompileError
    from blockscale.lower import nvcc

    try:
        nvcc.nvcc()
    except CompileError as error:
        pytest.skip(str(error))
    text = """
        import tempfile
        import blockscale as bs
        from tests.kit import compiled
        compiled.install()
        names = ["quantize_mxfp4b16_floor_bf16", "dequantize_mxfp4b16_f32"]
        with tempfile.TemporaryDirectory() as folder:
            bs.build(names, f"{folder}/k.so", target="sm_90a")
    """
    in_new_process(text, without_torch())
