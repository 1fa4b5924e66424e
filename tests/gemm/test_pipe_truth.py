"""Kernels are what their TensorIR says: edits of a function or a schedule change what is computed.

Each edit of the GEMM's text is scheduled, lowered and run in the emulator like the original; its
reference is the edited formula in NumPy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm

from blockscale.base.errors import LoweringError
from blockscale.building.space import new_schedule
from blockscale.lower.nvcc import compile_cuda_source
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import emit
from blockscale.schedules.gemm import tcgen05
from blockscale.tir.gemm.tiles import OPTIONAL, PARAMS, gemm_tiles
from tests.kit import gemm_harness as harness
from tests.kit.pairwise import each

N, K, ROWS = 200, 256, 150
VALUE = "T.fma(C[vt, vi, vj], alpha[0], bias[vj])"
PLANS: dict[str, dict[str, Any]] = {
    "rows": {"store": "tma"},
    "rows_direct": {"epi_cols": 16},
    "columns": {"swap": True, "mma_n": 64},
    "pair": {"cta_group": 2, "mma_n": 128, "store": "tma"},
    "split": {"split_k": 2, "acc_stages": 1, "mma_n": 64},
}


@dataclass
class Edit:
    """Replacements in the function's text, and d from the sum, alpha, bias and a residual."""

    value: str
    reference: Callable[..., np.ndarray]
    replaced: tuple[tuple[str, str], ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    arrays: Callable[[dict[str, Any]], dict[str, Any]] = lambda named: named
    null: tuple[str, ...] = ()


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU by tanh."""
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


GELU = (
    "{v} * T.float32(0.5) * (T.float32(1) + T.tanh(T.float32(0.7978845608) * ({v} + "
    "T.float32(0.044715) * {v} * {v} * {v})))"
)
SCALED = f"T.float32(0.01) * {VALUE}"
RESIDUAL = (
    ("d: T.Buffer", 'r: T.Buffer((tiles, T.int64(768), T.int64(768)), "float32"), d: T.Buffer'),
)
RESIDUAL_SHAPE = [("rows", 1, -1, 2), ("cols", 1, N, 1)]
K_MAJOR = (
    ("b_scale: T.Buffer((T.int64(6), T.int64(2048))",
     "b_scale: T.Buffer((T.int64(4), T.int64(3072))"),
    ("b_scale[vo, va * T.int64(512) +", "b_scale[va, vo * T.int64(512) +"),
)  # fmt: skip
EDITS = {
    "as it is": Edit(VALUE, lambda c, alpha, bias, r: c * alpha + bias),
    "twice alpha": Edit(
        VALUE.replace("alpha[0]", "alpha[0] * T.float32(2)"),
        lambda c, alpha, bias, r: 2 * c * alpha + bias,
    ),
    "no bias": Edit("C[vt, vi, vj] * alpha[0]", lambda c, alpha, bias, r: c * alpha),
    "bias first": Edit(
        "(C[vt, vi, vj] + bias[vj]) * alpha[0]", lambda c, alpha, bias, r: (c + bias) * alpha
    ),
    "relu": Edit(
        f"T.max({VALUE}, T.float32(0))", lambda c, alpha, bias, r: np.maximum(c * alpha + bias, 0)
    ),
    "relu squared": Edit(
        f"T.max({SCALED}, T.float32(0)) * T.max({SCALED}, T.float32(0))",
        lambda c, alpha, bias, r: np.maximum(0.01 * (c * alpha + bias), 0) ** 2,
    ),
    "gelu": Edit(
        GELU.replace("{v}", f"({SCALED})"),
        lambda c, alpha, bias, r: gelu(0.01 * (c * alpha + bias)),
    ),
    "clamp": Edit(
        f"T.min(T.max({VALUE}, T.float32(-50)), T.float32(50))",
        lambda c, alpha, bias, r: np.clip(c * alpha + bias, -50, 50),
    ),
    "select": Edit(
        f"T.if_then_else(vj < T.int64(100), {VALUE}, C[vt, vi, vj])",
        lambda c, alpha, bias, r: np.where(np.arange(N) < 100, c * alpha + bias, c),
    ),
    "residual": Edit(
        f"{VALUE} + r[vt, vi, vj]",
        lambda c, alpha, bias, r: c * alpha + bias + r,
        RESIDUAL,
        {PARAMS: {"r": RESIDUAL_SHAPE}},
    ),
    "residual of 16 bits": Edit(
        f'{VALUE} + T.Cast("float32", h[vt, vi, vj])',
        lambda c, alpha, bias, r: c * alpha + bias + np.round(r),
        tuple((old, new.replace("r: T", "h: T").replace("float32", "float16"))
              for old, new in RESIDUAL),
        {PARAMS: {"h": RESIDUAL_SHAPE}},
    ),
    "no alpha is a half": Edit(
        VALUE,
        lambda c, alpha, bias, r: 0.5 * c + bias,
        attrs={OPTIONAL: {"alpha": 0.5}},
        null=("alpha",),
    ),
    "scales of b along K first": Edit(
        VALUE,
        lambda c, alpha, bias, r: c * alpha + bias,
        K_MAJOR,
        {PARAMS: {"b_scale": [("k", 64, 4, 1), ("cols", 1, 1024, 1)]}},
        lambda named: named | {"b_scale": named["b_scale"].transpose(1, 0, 2).copy()},
    ),
}  # fmt: skip


def edited(edit: Edit) -> Any:
    """The GEMM with an edit of its text."""
    func = gemm_tiles("nvfp4", "float32", N, K)
    text = func.script()
    for old, new in ((VALUE, edit.value), *edit.replaced):
        assert old in text, old
        text = text.replace(old, new)
    made = tvm.script.from_source(text)
    views = dict(func.attrs[PARAMS]) | edit.attrs.get(PARAMS, {})
    last = views.pop("d")
    optional = dict(func.attrs[OPTIONAL]) | edit.attrs.get(OPTIONAL, {})
    return made.with_attrs({PARAMS: views | {"d": last}, OPTIONAL: optional})


@each(name=list(EDITS), plan=list(PLANS))
def test_the_kernel_follows_its_function(name: str, plan: str) -> None:
    """Its numbers are those of the edited formula."""
    edit, of = EDITS[name], harness.plan(n=N, k=K, **PLANS[plan])
    sch = new_schedule(tvm.IRModule({"main": edited(edit)}))
    tcgen05.decided(sch, of)
    kernel = checked(derive(sch.mod["main"]))
    text = compile_cuda_source(emit(kernel, "gemm"), "sm_100a", ptx=True).image.decode()
    rng = np.random.default_rng(7)
    a = harness.operand(rng, 4, "e4m3", 16, [ROWS], K)
    b = harness.operand(rng, 4, "e4m3", 16, [N], K)
    out = np.full((ROWS, N), harness.UNWRITTEN["float32"], np.uint32)
    named = {
        "a": a.stored, "b": b.stored, "a_scale": a.scale, "b_scale": b.scale, "d": out,
        "alpha": np.float32([1.5]), "bias": rng.normal(0, 30, N).astype(np.float32),
        "r": rng.normal(0, 30, (ROWS, N)).astype(np.float32),
    }  # fmt: skip
    named["h"] = np.round(named["r"]).astype(np.float16).view(np.uint16)  # whole numbers are exact
    given = edit.arrays(named | dict.fromkeys(edit.null))
    tiles = harness.clusters_of(of, [ROWS])
    report = harness.launch(kernel, text, given, ROWS, tiles if of.split_k > 1 else min(2, tiles))
    report.check()
    assert not report.hazards
    c = a.value @ b.value.T
    want = edit.reference(c, 1.5, named["bias"].astype(float), named["r"].astype(float))
    got = out.view(np.float32)
    allowed = 1e-5 * np.abs(want) + 1e-6 * np.abs(c).max()
    assert (np.abs(got - want) <= allowed).all()


def lowered(value: str) -> str:
    """The text of a kernel with this epilogue."""
    sch = new_schedule(tvm.IRModule({"main": edited(Edit(value, lambda *_: np.zeros(1)))}))
    tcgen05.decided(sch, harness.plan(n=N, k=K))
    return emit(derive(sch.mod["main"]), "gemm")


def test_what_cannot_be_lowered_is_said() -> None:
    """A value in another lane's registers, a function that CUDA has no name for here."""
    with pytest.raises((LoweringError, tvm.s_tir.ScheduleError), match=r"block|lane"):
        lowered("C[vt, vi, vj] + C[vt, T.bitwise_xor(vi, T.int64(1)), vj]")
    with pytest.raises(LoweringError, match=r"no CUDA for tirx\.sin"):
        lowered("T.sin(C[vt, vi, vj])")
