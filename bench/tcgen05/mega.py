"""The kernel of both GEMMs of an MoE layer: ``python -m bench.tcgen05.mega``; needs nvcc, nvdisasm.

Fills docs/mega_moe.md: what a CTA holds, who waits for whom, what the compiler made of it, beside
`mm_fp4` of the same tiles; and draws docs/mega_moe_timeline.svg, one pair of CTAs through both
GEMMs in the emulator.  No GPU takes part, and nothing here is a time.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

import blockscale as bs
from bench.report import ROOT, fill_page, markdown_table, show
from bench.tcgen05 import kernels, sass
from blockscale import emulator
from blockscale.building.builder import build
from blockscale.catalog import moe as catalog_moe
from blockscale.catalog import workloads
from blockscale.catalog.moe import PARTS
from blockscale.emulator import timeline
from blockscale.emulator.report import Report
from blockscale.lower import nvcc
from blockscale.lower.moe.codes import sources
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import Emitter, emit
from blockscale.lower.pipe.facts import facts
from blockscale.lower.pipe.kernel import SM100, Kernel
from blockscale.lower.pipe.phases import Phases, apart, emit_phases, joined
from blockscale.schedules.gemm import tcgen05
from blockscale.schedules.moe.codes import ONE_LAUNCH
from blockscale.schedules.steps import preferred
from blockscale.specs import FusedMoe

ARCH, ENTRY = "sm_100a", "gemms"
PAGE = ROOT / "docs" / "mega_moe.md"
PICTURE = ROOT / "docs" / "mega_moe_timeline.svg"
FEW, MANY = 0, -1
"""Buckets of rows: the fewest, the most."""


def layer(experts: int, hidden: int, intermediate: int, top_k: int, **kind: Any) -> FusedMoe:
    """Return a layer of NVFP4, or of another kind."""
    options = {"act_fmt": "nvfp4", "layout": "128x4"} | kind
    return FusedMoe(experts, hidden, intermediate, top_k, **options)


W4A8 = {"fmt": "mxfp4", "act_fmt": "mxfp8"}
LAYERS = {
    "Qwen3-30B-A3B": layer(128, 2048, 768, 8),
    "DeepSeek-V3, 32 experts": layer(32, 7168, 2048, 8),
    "gpt-oss-120b": layer(128, 2880, 2880, 4, activation="swiglu_oai", bias=True, **W4A8),
}
SHOWN = "Qwen3-30B-A3B"
"""Of which barriers and memory are shown."""

DRAWN = layer(1, 512, 256, 1)
DRAWN_TOKENS = 256


def bodies(spec: FusedMoe, bucket: int) -> tuple[PrimFunc, PrimFunc]:
    """Return GEMM 1 in its default schedule, and GEMM 2 in the first one that goes with it."""
    found = [[w for w in workloads(spec, ARCH) if w.part == part] for part in PARTS]
    first, second = (own[bucket] for own in found)
    sch = Schedule(first.symbolic(ARCH))
    first.sketches(ARCH)[0](sch, preferred)
    gated = sch.mod["main"]
    kernel = derive(gated)
    for sketch in second.sketches(ARCH):
        assert isinstance(sketch, partial)
        sch = Schedule(second.symbolic(ARCH))
        tile, slots = (sketch.keywords[name] for name in ("tile", "slots"))
        sch.annotate(tcgen05.gemm(sch, preferred, tile, slots), ONE_LAUNCH, 1)
        if apart(kernel, derive(sch.mod["main"])) is None:
            return gated, sch.mod["main"]
    raise ValueError(f"bench.tcgen05.mega: no schedules of {spec.name} go together")


def both(spec: FusedMoe, bucket: int) -> Phases:
    """Return the kernel of both GEMMs."""
    first, second = (checked(derive(func)) for func in bodies(spec, bucket))
    return joined(first, second)


# ---- What the compiler made of it ---------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Of a kernel: what ptxas says, and instructions per MMA of its main loops, in order."""

    registers: int
    spills: int
    per_mma: list[float]


def figures(text: str) -> Figures:
    """Return the figures of a kernel in CUDA C++."""
    made = nvcc.compile_cuda_source(text, ARCH)
    [used] = made.resources
    turns = sass.disassemble(made.image, ENTRY).main_loops()
    per_mma = [len(turn.instructions) / turn.mmas for turn in turns]
    return Figures(int(used["registers"]), int(used["spills"]), per_mma)


def alone(kernel: Kernel) -> Figures:
    """Return those of `mm_fp4` with the tile, ring and accumulators of a GEMM of a layer."""
    plan = replace(facts(kernel), experts=0, out_dtype="bfloat16")
    return figures(emit(kernels.derived(plan.check()), ENTRY))


def tile_text(kernel: Kernel) -> str:
    """Return a kernel's tile: rows by columns of the product, and its ring."""
    rows, cols = kernel.cluster_tile("rows"), kernel.cluster_tile("cols")
    pair = "pair, " if kernel.group == 2 else ""
    return f"{pair}{rows} x {cols}, {kernel.stages} x {kernel.stage_k}"


HEADINGS = (
    *("layer", "rows of an expert", "GEMM 1: tile, stages x K", "GEMM 2", "registers", "spills"),
    *("shared memory, bytes", "tensor memory, columns"),
    *("SASS per MMA, GEMM 1", "mm_fp4", "GEMM 2", "mm_fp4"),
)


def kernel_rows() -> Iterator[list[str]]:
    """Yield a row for each layer and bucket."""
    for name, spec in LAYERS.items():
        for bucket in (FEW, MANY):
            made = both(spec, bucket)
            [workload] = [w for w in workloads(spec, ARCH) if w.part == 1][bucket:][:1]
            own = figures(emit_phases(made, ENTRY))
            assert len(own.per_mma) == 2
            peers = [alone(kernel).per_mma[0] for kernel in (made.first, made.second)]
            yield [
                name,
                f"{workload.rows / spec.experts:.0f}",
                *(tile_text(kernel) for kernel in (made.first, made.second)),
                *(str(own.registers), str(own.spills)),
                *(f"{made.launch_bytes:,}", str(made.tmem_columns)),
                *(f"{own.per_mma[0]:.2f}", f"{peers[0]:.2f}"),
                *(f"{own.per_mma[1]:.2f}", f"{peers[1]:.2f}"),
            ]


# ---- Who waits for whom, and where --------------------------------------------------------------

ROLES = {
    "full": ("TMA, of so many bytes", "the multiplying warp"),
    "empty": ("MMAs of the stage", "the loading warp"),
    "packed": ("TMA, of so many bytes", "the loading warp, which spreads codes"),
    "done": ("MMAs of the tile", "the storing warps"),
    "free": ("the storing warps", "the multiplying warp"),
    "drained": ("the storing warps, through with GEMM 1", "the multiplying warp, before GEMM 2"),
}
"""Of barriers: who arrives, who waits."""


def barrier_rows(made: Phases) -> Iterator[list[str]]:
    """Yield a row for each kind of barrier in shared memory."""
    of = [Emitter(made.first, more=True).barriers(), Emitter(made.second).barriers()]
    known = [{name: f"{many} x {count}" for name, many, count in own} for own in of]
    for name, (arrives, waits) in ROLES.items():
        cells = [own.get(name, "") for own in known]
        if any(cells):
            yield [name, arrives, waits, *cells]


PLACES = {
    "x": "ring: X",
    "y": "ring: Y",
    "out": "what TMA stores",
    "sx": "ring: X's scales",
    "sy": "ring: Y's scales",
    "table": "table of experts, barriers",
}


def memory_rows(made: Phases) -> Iterator[list[str]]:
    """Yield a row for each part of shared memory: where it lies, and how long it is."""
    spans = []
    for kernel in (made.first, made.second):
        names = [name for name in kernel.places if name in PLACES]
        ends = [kernel.places[name] for name in names[1:]] + [kernel.places["end"]]
        used = kernel.loads[-1].slot.bytes * kernel.stages
        own = {}
        for name, end in zip(names, ends, strict=True):
            begin = kernel.places[name]
            size = used if name == "sy" else end - begin
            own[name] = f"{begin:,} + {size:,}" if size else ""
        spans.append(own)
    for name, said in PLACES.items():
        yield [said, *(own[name] for own in spans)]
    for said, part in (("accumulators", _accumulators), ("scales of X and Y", _scale_columns)):
        yield [f"tensor memory: {said}", *(part(k) for k in (made.first, made.second))]


def _accumulators(kernel: Kernel) -> str:
    shared = f", which share {kernel.overlap}" if kernel.overlap else ""
    return f"{kernel.acc_stages} x {kernel.mma.n}{shared}"


def _scale_columns(kernel: Kernel) -> str:
    return f"{kernel.sx_column} + {kernel.sx.columns}, {kernel.sy_column} + {kernel.sy.columns}"


# ---- The picture --------------------------------------------------------------------------------


def run(spec: FusedMoe, tokens: int, seed: int) -> Report:
    """Return the report of both GEMMs' launch on one pair of CTAs; wrong results raise."""
    rng = np.random.default_rng(seed)
    shapes = (2 * spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)
    codes = [rng.integers(0, 256, (spec.experts, n, k // 2), dtype=np.uint8) for n, k in shapes]
    scales = [rng.integers(24, 40, (spec.experts, n, k // 16), dtype=np.uint8) for n, k in shapes]
    stored = [torch.from_numpy(value) for value in (*codes, *scales)]
    weights = bs.prepare_moe_weights(
        *stored[:2], w13_scale=stored[2], w2_scale=stored[3], layout="128x4"
    )
    x = torch.from_numpy(rng.standard_normal((tokens, spec.hidden), np.float32)).bfloat16()
    ids = torch.arange(tokens * spec.top_k, dtype=torch.int32).reshape(tokens, -1) % spec.experts
    factors = torch.full(ids.shape, 1 / spec.top_k)
    y = torch.full_like(x, float("nan"))
    static = [torch.tensor([size], dtype=torch.float32) for size in (4 / 2688, 8 / 2688)]
    workspace = torch.zeros(spec.workspace_bytes(tokens), dtype=torch.uint8)
    no_bounds = None, None  # of the activation
    given = [x, ids, factors, *weights.passed, *static, *no_bounds, y, workspace]
    with tempfile.TemporaryDirectory(prefix="blockscale-mega-") as folder:
        path = _library(spec, Path(folder))
        made = emulator.run_module(
            path, spec.name, *given, target=ARCH, seed=seed, multiprocessors=2
        )
    made.check()
    want = bs.fused_moe(
        *(x, weights.to_linear(), ids, factors),
        act_fmt="nvfp4",
        a1_scale=static[0],
        a2_scale=static[1],
    )
    if not (y.float() - want.float()).norm() < 0.02 * want.float().norm():
        raise ValueError(f"bench.tcgen05.mega: {spec.name} is wrong in the emulator, seed {seed}")
    [found] = [
        report
        for launch, report in zip(made.launches, made.reports, strict=True)
        if "gemms" in launch.kernel
    ]
    return found


def _library(spec: FusedMoe, folder: Path) -> Path:
    first, second = bodies(spec, MANY)
    made = sources([(None, first)], [(None, second)], spec, ARCH)
    road = replace(catalog_moe.CODES, bodies=lambda *_: [], lower=lambda *_: made)
    path = folder / "layer.so"
    with mock.patch.object(catalog_moe, "CODES", road):
        build([spec.name], path, level=ARCH, logs_dirs=[], ptx=True)
    return path


def draw(path: Path, seed: int) -> Path:
    """Draw one pair of CTAs through both GEMMs."""
    kernel = both(DRAWN, MANY)
    title = (
        f"Both GEMMs of an NVFP4 layer, {DRAWN_TOKENS} rows of an expert: a "
        f"pair of CTAs; tiles, stages x K: {tile_text(kernel.first)}, then "
        f"{tile_text(kernel.second)}; seed {seed}"
    )
    return timeline.draw(run(DRAWN, DRAWN_TOKENS, seed), path, title=title)


def tables() -> dict[str, str]:
    """Return what docs/mega_moe.md shows, by marker."""
    made = both(LAYERS[SHOWN], MANY)
    heads = ("barrier", "arrives", "waits", "GEMM 1", "GEMM 2")
    places = ("part", "GEMM 1", "GEMM 2")
    return {
        "mega_kernels": markdown_table(HEADINGS, list(kernel_rows()), left=4),
        "mega_barriers": markdown_table(heads, list(barrier_rows(made)), left=3),
        "mega_memory": markdown_table(places, list(memory_rows(made))),
        "mega_shown": f"{SHOWN}, the most rows: a launch takes {made.launch_bytes:,} of "
        f"{SM100.cta_shared:,} bytes of shared memory and {made.tmem_columns} of "
        f"{SM100.tensor_columns} columns of tensor memory (nvcc {nvcc.version()}, nvdisasm "
        f"{sass.version()}).",
    }


@click.command()
@click.option("--page", type=click.Path(dir_okay=False, exists=True, path_type=Path), default=PAGE)
@click.option("--out", type=click.Path(path_type=Path), default=PICTURE, help=".svg or .png")
@click.option("--seed", default=0, show_default=True)
def main(page: Path, out: Path, seed: int) -> None:
    """Fill docs/mega_moe.md and draw its picture.

    Example: python -m bench.tcgen05.mega
    """
    made = tables()
    for text in made.values():
        show(text)
    fill_page(page, made)
    click.echo(f"filled in {page}, drew {draw(out, seed)}")


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m bench.tcgen05.mega"))
