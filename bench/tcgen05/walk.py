"""Fill in docs/gemm.md, one GEMM from TensorIR to SASS: ``python -m bench.tcgen05.walk``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from tvm import tirx
from tvm.s_tir import Schedule

from bench.report import ROOT, fill_page, markdown_table
from bench.tcgen05 import sass
from blockscale import catalog
from blockscale.lower import nvcc
from blockscale.lower.gemm.maps import Size, gemm_maps
from blockscale.lower.gemm.read import read
from blockscale.lower.gemm.source import source
from blockscale.specs import MmFp4
from blockscale.specs.plans.gemm import SMEM_BYTES, TMEM_COLUMNS, GemmPlan

ARCH = "sm_100a"
SPEC = MmFp4(4096, 7168, "nvfp4", "bfloat16")
ENTRY = "mm_nvfp4"
PAGE = ROOT / "docs" / "gemm.md"
WIDTH = 108


def shortened(lines: Iterable[str]) -> str:
    """Join lines of TVMScript without the types of integers, cut at `WIDTH` columns."""
    made = []
    for line in lines:
        text = re.sub(r"T\.int64\((-?\d+)\)", r"\1", line.rstrip())
        made.append(text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ...")
    return "\n".join(made)


def block(script: str, name: str, before: int) -> list[str]:
    """Return the lines of TVMScript of block ``name`` and ``before`` lines ahead of it."""
    lines = script.splitlines()
    at = next(i for i, line in enumerate(lines) if f'T.sblock("{name}")' in line)
    indent = len(lines[at]) - len(lines[at].lstrip())
    end = at + 1
    while end < len(lines) and len(lines[end]) - len(lines[end].lstrip()) > indent:
        end += 1
    cut = len(lines[at - before]) - len(lines[at - before].lstrip())
    return [line[cut:] for line in lines[at - before : end]]


def skeleton(script: str) -> list[str]:
    """Return the loops, blocks and intrinsics of a scheduled function: no regions, no bindings."""
    kept = []
    for line in script.splitlines():
        text = line.strip()
        if '"root"' in text:
            continue
        call = re.match(r'T\.cuda\.func_call\("([\w<>]+)"', text)
        if call:
            kept.append(line[: len(line) - len(text)] + f"{call[1]}(...)")
        elif text.startswith(("for ", "with T.sblock(")) or "sblock_alloc_buffer" in text:
            kept.append(line)
    indent = min(len(line) - len(line.lstrip()) for line in kept)
    return [line[indent:] for line in kept]


def plan_table(plan: GemmPlan) -> str:
    """Return the decisions and what they cost."""
    tensor_memory = (
        f"{plan.used_columns} of {TMEM_COLUMNS} columns, of which the accumulators share "
        f"{plan.overlap} and scales take {plan.scale_columns}"
    )
    costs = {
        "bytes of a stage: X, Y, scales": f"{plan.x_bytes}, {plan.y_bytes}, {plan.scale_bytes}",
        "shared memory": f"{plan.smem_bytes} of {SMEM_BYTES} bytes",
        "tensor memory": tensor_memory,
    }
    rows = [[f"`{name}`", str(value)] for name, value in asdict(plan).items()]
    return markdown_table(("decision", "value"), [*rows, *map(list, costs.items())], left=2)


def map_table(plan: GemmPlan) -> str:
    """Return the five tensor maps."""
    rows = [
        [
            *(name, made.tensor, made.dtype),
            " x ".join(_size(size) for size in made.dims),
            " x ".join(map(str, made.box)),
            f"{made.swizzle} bytes" if made.swizzle else "none",
        ]
        for name, made in zip(("x", "y", "sx", "sy", "d"), gemm_maps(plan).all(), strict=True)
    ]
    return markdown_table(("map", "tensor", "dtype", "sizes", "box", "swizzle"), rows, left=6)


def _size(size: Size) -> str:
    return {"": str(size.value), "m": "M", "atoms": "ceil(M / 128)"}[size.unit]


def ptx_kinds(text: str) -> str:
    """Return the tensor instructions of a kernel and how often they are written."""
    name = r"\b(tcgen05\.[\w:.]+|cp\.async\.bulk\.tensor[\w:.]+)"
    found = Counter(hit[1] for line in text.splitlines() if (hit := re.search(name, line)))
    return "\n".join(f"{count:4} x {name}" for name, count in sorted(found.items()))


def loop_text(turn: Sequence[sass.Instruction]) -> str:
    """Return a turn of the main loop as SASS, up to the second MMA, and the commit."""
    mmas = [i for i, ins in enumerate(turn) if sass.is_mma(ins)]
    lines = []
    for i, ins in enumerate(turn):
        if i > mmas[1] and not sass.is_commit(ins):
            continue
        if sass.is_commit(ins):
            lines.append("...")
        guard = f"@{ins.guard} " if ins.guard else ""
        lines.append(f"{guard}{ins.opcode} {ins.operands}".rstrip())
    return "\n".join(lines)


def fenced(text: str, language: str = "") -> str:
    """Return a block of code."""
    return f"```{language}\n{text}\n```"


def excerpts() -> dict[str, str]:
    """Return what docs/gemm.md shows, by marker."""
    workload = catalog.workloads(SPEC, ARCH)[-1]
    sch = Schedule(workload.symbolic(ARCH))
    plain = sch.mod.script()
    workload.default(sch, ARCH)
    func = sch.mod["main"]
    assert isinstance(func, tirx.PrimFunc)
    plan = read(func)
    text = source(plan, ENTRY)
    cubin = nvcc.compile_cuda_source(text, ARCH)
    ptx = nvcc.compile_cuda_source(text, ARCH, ptx=True).image.decode()
    turn = sass.disassemble(cubin.image, ENTRY).main_loop()
    [used] = cubin.resources
    return {
        "what": f"`{SPEC.name}`, the bucket of {workload.rows} rows with its default schedule, for "
        f"{ARCH} (nvcc {nvcc.version()}, nvdisasm {sass.version()}).",
        "plain": fenced(shortened(block(plain, "gemm", 1)), "python"),
        "scheduled": fenced(shortened(skeleton(sch.mod.script())), "python"),
        "plan": plan_table(plan),
        "maps": map_table(plan),
        "source": fenced('extern "C"' + text.split('extern "C"')[1].rstrip(), "cuda"),
        "ptx": fenced(ptx_kinds(ptx)),
        "used": f"ptxas: {used['registers']} registers, {used['spills']} bytes of spills. One turn "
        f"of the main loop is a stage of K: {turn.mmas} MMAs, "
        f"{len(turn.instructions) / turn.mmas:.1f} instructions each.",
        "sass": fenced(loop_text(turn.instructions)),
    }


@click.command()
@click.option("--page", type=click.Path(dir_okay=False, exists=True, path_type=Path), default=PAGE)
def main(page: Path) -> None:
    """Fill in the excerpts of docs/gemm.md.

    Example: python -m bench.tcgen05.walk
    """
    fill_page(page, excerpts())
    click.echo(f"filled in {page}")


if __name__ == "__main__":
    main(prog_name="python -m bench.tcgen05.walk")
