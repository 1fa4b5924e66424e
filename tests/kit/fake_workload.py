"""A workload for tests of the tuner: a row sum whose space has schedules that fail on purpose."""

from __future__ import annotations

import ctypes
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blockscale.specs import Param
from blockscale.specs.plans.gemm import GemmPlan
from blockscale.tuning import worker
from blockscale.tuning.worker import Measurement

ROWS, COLS = 64, 512
EXPORTER = "tests.kit.fake_workload:export"


@dataclass(frozen=True)
class FakeSpec:
    cols: int = COLS
    trap: str = "none"
    op = "row_sum"

    @property
    def name(self) -> str:
        return f"row_sum_c{self.cols}" + ("" if self.trap == "none" else f"_{self.trap}")

    def params(self) -> tuple[Param, ...]:
        return (
            Param("x", "float32", ("rows", self.cols)),
            Param("y", "float32", ("rows",), output=True),
        )

    def to_json(self) -> dict[str, Any]:
        return {"cols": self.cols, "trap": self.trap}


@dataclass(frozen=True)
class FakeWorkload:
    """``spec.trap``: what happens to every schedule whose unroll step is 8."""

    spec: FakeSpec = FakeSpec()
    rows: int = ROWS
    op = "row_sum"

    @property
    def tag(self) -> str:
        return f"{self.spec.name}_m{self.rows}"

    def target(self, level: str) -> Any:
        import tvm

        mcpu = {"avx2": "x86-64-v3", "plain": "x86-64"}.get(level, "x86-64-v4")
        return tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2})

    def entry(self) -> dict[str, Any]:
        return {"spec": self.spec.to_json(), "rows": self.rows}

    def kin(self, level: str) -> list[Any]:
        return []

    def facts(self, level: str) -> None:
        return None

    def sizes(self, level: str, mod: Any) -> dict[str, int]:
        return {"rows": self.rows}

    def mod(self, level: str) -> Any:
        import tvm
        from tvm.script import tirx as T

        rows, cols, attrs = self.rows, self.spec.cols, {"trap": self.spec.trap}

        @T.prim_func(s_tir=True)
        def main(x: T.Buffer((rows, cols), "float32"), y: T.Buffer((rows,), "float32")):
            T.func_attr(attrs)
            for i, k in T.grid(rows, cols):
                with T.sblock("row_sum"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        y[vi] = T.float32(0)
                    y[vi] = y[vi] + x[vi, vk]

        return tvm.IRModule({"main": main.with_attr("global_symbol", "main")})

    def symbolic(self, level: str) -> Any:
        if self.spec.trap == "bodyless":
            raise TypeError("it has no body for GPUs")
        return self.mod(level)

    def space(self, level: str):
        def draw(sch: Any) -> None:
            block = sch.get_sblock("row_sum")
            sch.cache_write(block, 0, "global")
            sch.transform_layout(block, ("write", 0), lambda i: (i // 2, i % 2))
            row, col = sch.get_loops(block)
            outer, _ = sch.split(row, sch.sample_perfect_tile(row, n=2, max_innermost_factor=64))
            step = sch.sample_categorical([1, 2, 4, 8], [0.25] * 4)
            _, inner = sch.split(col, [None, step])
            sch.annotate(inner, "step", step)
            sch.unroll(inner)
            sch.parallel(outer)

        return draw

    def default(self, sch: Any, level: str) -> None:
        row, _ = sch.get_loops(sch.get_sblock("row_sum"))
        sch.parallel(row)


def from_meta(entry: dict[str, Any]) -> FakeWorkload:
    return FakeWorkload(FakeSpec(**entry["spec"]), entry["rows"])


def export(module: Any, target: str, out: Path) -> None:
    """Build with TVM's runtime; spring the trap of candidates with step 8."""
    import tvm

    trap = str(module["main"].attrs["trap"])
    if trap != "none" and '"step": 8' in module.script():
        if trap == "build":
            raise RuntimeError("trap: no such instruction")
        if trap == "crash":
            ctypes.string_at(0)
        if trap == "hang":
            time.sleep(1000)
        if trap in ("wrong", "fault"):
            module = _damaged(module, trap)
    tvm.compile(module, target=tvm.target.Target(target)).export_library(str(out))


def measure(library: str, arguments: Any, timing: Any, reference: str) -> Measurement:
    """Measure on this CPU; the default takes ten times as long, so that a log has another best."""
    found = worker.measure(library, arguments, timing, reference)
    if library == reference:
        found = replace(found, run_secs=tuple(10 * seconds for seconds in found.run_secs))
    return found


DECODE = GemmPlan(
    fmt="nvfp4",
    out_dtype="bfloat16",
    n=4096,
    k=7168,
    experts=0,
    swap=True,
    cta_group=1,
    mma_n=32,
    block_k=256,
    stages=8,
    cluster_x=1,
    cluster_y=1,
    split_k=1,
    acc_stages=1,
    epi_cols=32,
    store="direct",
    raster="x",
    group=8,
)
"""A tcgen05 GEMM for few rows."""


def export_plan(module: Any, target: str, out: Path) -> None:
    """Write what `blockscale.tuning.modelled` times: a plan with more stages for larger steps."""
    script = module.script()
    step = next((s for s in (1, 2, 4, 8) if f'"step": {s}' in script), 1)
    if "modelled-" not in target:
        raise RuntimeError(f"no sign of the model in {target}")
    plan = replace(DECODE, stages=2 + step // 2)
    out.write_text(json.dumps({"plan": asdict(plan), "kernels": []}))


def export_no_default(module: Any, target: str, out: Path) -> None:
    """Build candidates of the search only."""
    if '"step"' not in module.script():
        raise RuntimeError("no default today")
    export(module, target, out)


def _damaged(module: Any, trap: str) -> Any:
    import tvm

    old, new = {
        "wrong": ("T.float32(0.0)", "T.float32(1.0)"),
        "fault": ("x[vi, vk]", "x[vi + 4000000, vk]"),
    }[trap]
    text = module.script()
    assert old in text, text
    return tvm.script.from_source(text.replace(old, new))
