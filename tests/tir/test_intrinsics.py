"""Tensor intrinsics: description and implementation, compiled, agree on the same random bits.

Some add in another order than their description.  They agree bit for bit where no sum has to
be rounded, and elsewhere within 2^-24 of the sum of magnitudes for each rounding of the two.
"""

from importlib import import_module
from pkgutil import iter_modules

import numpy as np
import pytest
import torch
import tvm
from tvm import tirx
from tvm.s_tir import TensorIntrin

from blockscale import catalog
from blockscale.tir import intrin
from blockscale.tir.intrin import operands, x86
from blockscale.tir.intrin.x86 import (
    edgellm as x86_edgellm,
)
from blockscale.tir.intrin.x86 import (
    fused as x86_fused,
)
from blockscale.tir.intrin.x86 import (
    gemm as x86_gemm,
)
from blockscale.tir.intrin.x86 import (
    int4 as x86_int4,
)
from blockscale.tir.intrin.x86 import (
    panels as x86_panels,
)
from blockscale.tir.intrin.x86 import (
    rows as x86_rows,
)
from blockscale.tir.intrin.x86 import (
    words as x86_words,
)
from tests.kit.kernels import LEVELS, needs

WIDE = ("avx512", "avx2", "plain")
DTYPES = {"float32": np.float32, "int32": np.int32, "uint16": np.uint16, "uint8": np.uint8}

PANELS = [
    (level, compute, depth, block)
    for level in WIDE
    for compute in (("float32", "bfloat16") if level == "avx512" else ("float32",))
    for depth in x86_panels.panel_depths(level)
    for block in (16, 32)
]
EXACT = [
    *((panel[0], x86_panels.decode_panel, panel) for panel in PANELS),
    *(
        (level, x86_panels.decode_panel_scales, (level, fmt, group))
        for level in WIDE
        for fmt in ("nvfp4", "mxfp4")
        for group in x86_panels.SCALE_GROUPS
    ),
    *((level, x86_rows.decode_row, (level, c)) for level in WIDE for c in ("float32", "bfloat16")),
    *((level, x86_gemm.decode_words, (level, block)) for level in WIDE for block in (16, 32)),
    *(
        (level, x86_gemm.decode_panel_e4m3, (level, depth, 32))
        for level in WIDE
        for depth in (x86_gemm.e4m3_depth(level, 64), x86_panels.BLOCK_CODES)
    ),
    *((level, x86_rows.lane_max, (count,)) for level in LEVELS for count in (16, 32)),
    *((level, x86_rows.pack_row, (count,)) for level in LEVELS for count in (16, 32)),
    *(
        (level, x86_int4.decode_columns, (level, lanes, flip, 96))
        for level, lanes in (("avx512", 16), ("avx2", 16), ("plain", 8))
        for flip in (0, 8)
    ),
    *(("avx512", x86_int4.decode_column_pairs, (96, flip)) for flip in (0, 8)),
]
WORDS = ((16, 1), (32, 2))
"""Elements a scale and rows."""

SUMS = [
    *((level, x86_rows.lane_sum, (level,)) for level in WIDE),
    *((level, x86_rows.dot_row, (level, block)) for level in WIDE for block in (16, 32)),
    ("avx512bf16", x86_panels.dot_bf16, ()),
    *((level, x86_fused.square_sum, (block,)) for level in WIDE for block in (16, 32)),
    *((level, x86_words.dot_words, (level, "e2m1", b, r)) for level in WIDE for b, r in WORDS),
]
WHOLE = [
    (level, x86_words.dot_words, (level, code, block, rows))
    for level in WIDE
    for (code, block), rows in zip(x86_words.KINDS[2:], (1, 2) * 3, strict=True)
]
WHOLE += [
    (level, x86_int4.dot_rows, (level.removesuffix("bf16"), 16, flip, rows, compute, 64))
    for level, compute in (
        *(("avx512", "float32"), ("avx2", "float32"), ("avx512bf16", "bfloat16")),
    )
    for flip in (0, 8)
    for rows in (1, 3)
]
"""Sums of INT4, whose codes have no magnitude to bound roundings with."""

FIRST = [(level, x86_edgellm.dot, (level,)) for level in ("avx512", "avx2")]
"""Sums whose first parameter is added to."""

SCALES = (x86_edgellm.scale,)
"""Those that `test_scales` has."""


def cases(table):
    """Return the decorator that runs a test on every intrinsic of ``table``."""
    ids = ["-".join(map(str, (make.__name__, level, *key))) for level, make, key in table]
    return pytest.mark.parametrize(("level", "make", "key"), table, ids=ids)


class Pair:
    """Description and implementation of an intrinsic, compiled for ``level``."""

    def __init__(self, level, name, output=-1):
        needs(level)
        self.output = output
        pair = TensorIntrin.get(name)
        self.buffers = [param.ty for param in pair.desc.params]
        self.shapes = [tuple(int(size) for size in buffer.shape) for buffer in self.buffers]
        self.dtypes = [DTYPES[str(buffer.dtype)] for buffer in self.buffers]
        functions = {"desc": pair.desc, "impl": self._importing(pair.impl)}
        named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
        self.module = tirx.build(tvm.IRModule(named), catalog.target(level))

    @staticmethod
    def _importing(func):
        """Return ``func`` in a loop that imports the LLVM code of `dot_bf16`, as schedules do."""
        once, pragma = tirx.Var("once", "int32"), {"pragma_import_llvm": x86_panels.DOT_BF16_LLVM}
        return func.with_body(
            tirx.For(once, 0, 1, tirx.ForKind.SERIAL, func.body, annotations=pragma)
        )

    def __call__(self, part, values):
        """Return what ``part`` ("desc" or "impl") makes of the last (the output) of ``values``."""
        given = [
            self._view(value, buffer) for value, buffer in zip(values, self.buffers, strict=True)
        ]
        self.module[part](*given)
        return given[self.output].numpy()

    @staticmethod
    def _view(value, buffer):
        """Return ``value`` as a tensor: bytes at odd addresses and with a stride where allowed."""
        tensor = torch.from_numpy(value.copy())
        if value.dtype != np.uint8:
            return tensor
        gap = 5 if len(buffer.strides) else 0
        rows = value.reshape(-1, value.shape[-1])
        memory = torch.zeros(rows.shape[0] * (rows.shape[1] + gap) + 3, dtype=torch.uint8)
        strides = (rows.shape[1] + gap, 1)[-value.ndim :]
        return memory.as_strided(value.shape, strides, 3).copy_(tensor)

    def random(self, rng, codes=False):
        """Return random bits for every parameter; ``codes``: integers are E2M1 codes."""
        values = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            bits = rng.integers(0, 256, (*shape, dtype().itemsize), dtype=np.uint8)
            value = bits.view(dtype)[..., 0]
            values.append(value & 15 if codes and dtype == np.int32 else value)
        return values


def test_every_intrinsic_is_here():
    """A new one needs a line in `EXACT` or `SUMS`; those of GPUs have test files of their own."""
    names = [f"{x86.__name__}.{module.name}" for module in iter_modules(x86.__path__)]
    values = [value for name in names for value in vars(import_module(name)).values()]
    made = {value for value in values if hasattr(value, "__wrapped__")} - {operands.nest}
    assert made == {make for _, make, _ in (*EXACT, *SUMS, *WHOLE, *FIRST)} | {*SCALES}


@pytest.mark.parametrize(
    "name",
    [
        "int4_columns_avx2_8_1024_flip0",
        "int4_column_pairs_2048_flip8",
        "int4_dot_avx512_16_flip0_r5_bfloat16_192",
    ],
)
def test_traces_with_int4_are_read(name):
    """Sizes are in the names, from which they are registered when a trace is read.

    A record has its target beside it, whose warps are no intrinsics.
    """
    intrin.register_named(f'["Tensorize",["b0"],["{name}",true],[]], {{"thread_warp_size": 32}}')
    assert TensorIntrin.get(name, allow_missing=True) is not None


@cases(EXACT)
def test_same_bits(rng, level, make, key):
    """Floats are any bits: NaN, infinities and subnormals are among them."""
    pair = Pair(level, make(*key))
    for _ in range(8):
        values = pair.random(rng, codes=make is x86_rows.pack_row)
        desc, impl = (pair(part, values) for part in ("desc", "impl"))
        assert desc.tobytes() == impl.tobytes()
        assert desc.tobytes() != values[-1].tobytes() or make is x86_rows.lane_max


def bfloat16(values):
    """Return the bits of float32 ``values`` cut to bfloat16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def summands(pair, rng, integers):
    """Return arguments whose products and sums need no rounding, or normal numbers."""
    values = pair.random(rng)
    for i, (shape, dtype) in enumerate(zip(pair.shapes, pair.dtypes, strict=True)):
        if dtype != np.uint8:
            drawn = rng.integers(-9, 10, shape) if integers else rng.standard_normal(shape)
            drawn = drawn.astype(np.float32)
            values[i] = bfloat16(drawn) if dtype == np.uint16 else drawn
    return values


@cases(SUMS + WHOLE + FIRST)
def test_same_sums(rng, level, make, key):
    """Integers and half integers below 2^24: no order of the additions rounds."""
    pair = Pair(level, make(*key), 0 if make is x86_edgellm.dot else -1)
    changed = False
    for _ in range(8):
        values = summands(pair, rng, integers=True)
        desc, impl = (pair(part, values) for part in ("desc", "impl"))
        assert (desc == impl).all()
        changed |= bool((desc != values[pair.output]).any())
    assert changed


@pytest.mark.parametrize("level", ["avx512", "avx2"])
def test_scales(rng, level):
    """Every finite S0E5M3 byte, times integers, which is exact."""
    pair = Pair(level, x86_edgellm.scale(level), 0)
    total, sums, scales = pair.random(rng)
    for start in range(0, 0xF8, 31):
        scales[:] = np.resize(np.arange(start, start + 31, dtype=np.uint8), scales.shape)
        sums[:] = rng.integers(-9, 10, sums.shape)
        total[:] = 0
        half = (scales.astype(np.uint16) << 7).view(np.float16).astype(np.float32)
        want = sums * half.reshape(sums.shape[1], -1).T
        for part in ("desc", "impl"):
            assert (pair(part, [total, sums, scales]) == want).all()


ROUNDINGS = 21
"""Of one term, on both sides together: lane_sum 16 + 5, dot_row 10 + 10, dot_bf16 2 + 2."""


@cases(SUMS)
def test_close_sums(rng, level, make, key):
    """Normal numbers: the two differ by roundings, each 2^-24 of the sum of magnitudes."""
    pair = Pair(level, make(*key))
    for _ in range(8):
        values = summands(pair, rng, integers=False)
        desc, impl = (pair(part, values) for part in ("desc", "impl"))
        size = pair("desc", [MAGNITUDE[v.dtype.type](v) for v in values])
        assert (np.abs(desc.astype(np.float64) - impl) <= ROUNDINGS * 2.0**-24 * size).all()


MAGNITUDE = {
    np.float32: np.abs,
    np.uint16: lambda bits: bits & 0x7FFF,  # bfloat16
    np.uint8: lambda codes: codes & 0x77,  # two E2M1
}
