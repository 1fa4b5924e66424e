"""Linear layers that quantise their rows to FP8: kernels, what comes before them, calls.

Truth is float64 on quantised rows and dequantised weights: the emulator's sums are float32, so that
rows agree to 1e-3 where results are not rounded to 16 bits.
"""

from __future__ import annotations

from typing import Any

import pytest

from blockscale.specs import Linear
from blockscale.specs.plans.linear import LinearTile
from tests.kit.linear_harness import run

LIMITS = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-5}


def spec(n: int, k: int, dtype: str = "bfloat16", **more: Any) -> Linear:
    options = {"layout": "tiles64e", "act_fmt": "fp8", **more}
    return Linear(n, k, options.pop("fmt", "mxfp4"), dtype, **options)


def mma(rows: int, tokens: int, warps: int, slices: int = 1, ctas: int = 1) -> LinearTile:
    return LinearTile("mma", rows, tokens, warps, slices, ctas, 4)


def wgmma(rows: int, tokens: int, warps: int, ctas: int = 1) -> LinearTile:
    return LinearTile("wgmma", rows, tokens, warps, 1, ctas, 2)


def byte(rows: int, tokens: int, ctas: int = 1, raster: str = "rows") -> LinearTile:
    return LinearTile("wgmma", rows, tokens, rows // 32, 1, ctas, 2, raster, by_bytes=True)


GATED = {"activation": "silu", "gated": True}
FLOAT = {"out_dtype": "float32"}
CASES = {
    "bytes": (spec(320, 704, **FLOAT), byte(256, 64), 70),
    "bytes, 16 bits out": (spec(195, 512, residual=True), byte(128, 32), 41),
    "bytes, cols": (spec(512, 320, "float16"), byte(256, 112, raster="cols"), 230),
    "bytes, ctas": (spec(200, 1408, **FLOAT, residual=True), byte(128, 40, 2), 33),
    "bytes, uneven ctas": (spec(128, 2880, "float16", **FLOAT), byte(128, 16, 4), 17),
    "bytes, gated": (spec(330, 416, **GATED, **FLOAT, residual=True), byte(256, 48), 50),
    "bytes, relu2": (spec(129, 96, activation="relu2"), byte(128, 80), 81),
    "mma": (spec(192, 512, **FLOAT), mma(64, 8, 2, 2), 5),
    "mma, gated": (spec(66, 672, "float16", **GATED, residual=True), mma(64, 16, 2, 2), 13),
    "mma, ctas": (spec(195, 1440, **FLOAT), mma(64, 8, 4, 1, 2), 8),
    "wgmma": (spec(320, 672, **FLOAT), wgmma(128, 40, 4), 77),
    "wgmma, ctas": (spec(128, 1024, "float16", activation="gelu_tanh"), wgmma(64, 32, 4, 2), 30),
    "16 bits of any format": (
        spec(128, 512, fmt="nvfp4", layout="tiles64", **FLOAT),
        mma(64, 8, 2, 2),
        9,
    ),
    "16 bits, by row": (
        spec(195, 720, "float16", fmt="nvfp4", layout="tiles64", by_row=True, **FLOAT),
        wgmma(128, 24, 4),
        30,
    ),
    "16 bits of int4": (
        spec(128, 512, "float16", fmt="int4", group=128, layout="tiles64"),
        wgmma(128, 16, 4),
        19,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_multiply(name: str) -> None:
    of, tile, rows = CASES[name]
    run(of, tile, rows).judge(LIMITS[of.out_dtype])
