"""Fill in docs/gemm.md, one GEMM from TensorIR to SASS: ``python -m bench.tcgen05.walk``."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from tvm import tirx
from tvm.s_tir import Schedule

from bench.report import ROOT, fill_page, markdown_table
from bench.tcgen05 import sass
from blockscale import catalog
from blockscale.lower import nvcc
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.kernel import SM100, Kernel
from blockscale.lower.pipe.maps import tensor_maps
from blockscale.lower.pipe.share import share
from blockscale.specs import MmFp4

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


def kernel_table(kernel: Kernel) -> str:
    """Return what has been derived, and what it costs."""
    rows = []
    for side, load in zip(("X", "Y", "X's scales", "Y's scales"), kernel.loads, strict=True):
        slot, shared = load.slot, share(kernel, load)
        how = f"{load.view.name}, {' x '.join(map(str, slot.shape[-2:]))}: {slot.bytes:,} bytes"
        how += f", swizzled over {slot.row_bytes}" if load.wide else ""
        if shared.many > 1:
            sent = f"a slice for each of {shared.many} CTAs" if load.wide else "for both CTAs"
            how += f", {sent}"
        rows.append((f"a stage of {side}", how))
    acc = f"{kernel.acc_stages} of {kernel.mma.n} columns"
    if kernel.overlap:
        acc += f", which share {kernel.overlap}; the epilogue empties these first"
    mma = f"`{kernel.mma.function}<{kernel.group}>`, {kernel.mma.m} x {kernel.mma.n}"
    count = f"{len(kernel.whole.copies)} copies of scales, {len(kernel.whole.multiplies)} MMAs"
    epilogue, arrivals = kernel.epilogue, 4 * kernel.group
    stores = ", ".join(move.view.name for move in epilogue.stores.values()) or "none"
    rows += [
        ("the MMA", mma),
        ("K of a tile", f"{kernel.k_stages} stages of {kernel.stage_k}, each {count}"),
        ("the ring", f"{kernel.stages} stages; {kernel.senders} arrival empties one"),
        ("accumulators", f"{acc}; {arrivals} warps free one"),
        ("the epilogue", f"{epilogue.chunks} parts of {epilogue.columns} columns; "
         f"blocks {', '.join(site.name for site in epilogue.sites)}; TMA stores {stores}"),
        ("tiles", f"{kernel.cluster_tile('rows')} x {kernel.cluster_tile('cols')} of d a cluster "
         f"of {kernel.cluster}, in bands of {kernel.band}"),
        ("shared memory", f"{kernel.smem_bytes:,} of {SM100.cta_shared:,} bytes"),
        ("tensor memory", f"{kernel.used_columns} of {SM100.tensor_columns} columns"),
    ]  # fmt: skip
    return markdown_table(("what", "derived"), [list(row) for row in rows], left=2)


def map_table(kernel: Kernel) -> str:
    """Return the tensor maps."""
    units = {1: "M", 128: "ceil(M / 128)"}
    rows = [
        [
            *(made.tensor, made.dtype),
            " x ".join(units[unit] if size is None else str(size) for size, unit in made.dims),
            " x ".join(map(str, made.box)),
            f"{made.swizzle} bytes" if made.swizzle else "none",
        ]
        for made in tensor_maps(kernel)
    ]
    return markdown_table(("tensor", "dtype", "sizes", "box", "swizzle"), rows, left=5)


def part(text: str, first: str, last: str) -> str:
    """Return the lines of a kernel from the one that holds ``first`` to the next with ``last``."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i in range(start, len(lines)) if last in lines[i])
    made = []
    for line in textwrap.dedent("\n".join(lines[start : end + 1])).splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        made += textwrap.wrap(line, WIDTH, initial_indent="", subsequent_indent=indent + "    ")
    return "\n".join(made)


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
    kernel = checked(derive(func))
    text = emit(kernel, ENTRY)
    loads, multiplies, stores = text[text.rindex("bs_grid_wait") :].split(" else ", 2)
    cubin = nvcc.compile_cuda_source(text, ARCH)
    ptx = nvcc.compile_cuda_source(text, ARCH, ptx=True).image.decode()
    turn = sass.disassemble(cubin.image, ENTRY).main_loop()
    [used] = cubin.resources
    return {
        "what": f"`{SPEC.name}`, the bucket of {workload.rows} rows with its default schedule, for "
        f"{ARCH} (nvcc {nvcc.version()}, nvdisasm {sass.version()}).",
        "plain": fenced(shortened(block(plain, "gemm", 1)), "python"),
        "epilogue": fenced(shortened(block(plain, "epilogue", 1)), "python"),
        "scheduled": fenced(shortened(skeleton(sch.mod.script())), "python"),
        "kernel": kernel_table(kernel),
        "maps": map_table(kernel),
        "load": fenced(part(loads, "for (int t = ", "++stage"), "cuda"),
        "multiply": fenced(part(multiplies, "for (int k = ", "++stage"), "cuda"),
        "store": fenced(part(stores, "uint32_t acc[", "bs_bulk_commit"), "cuda"),
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
