"""Tensor intrinsics: what an instruction computes (plain loops) and the instruction itself."""

from __future__ import annotations

import re
from functools import cache


def register_named(trace: str) -> None:
    """Register the intrinsics that ``trace`` may name: TVM must know them to read it."""
    if re.search(r"\bwarp_", trace):  # a GPU's target has "thread_warp_size"
        from blockscale.tir.intrin import warp

        warp.register_named(trace)
        return
    if "sync_" in trace:
        from blockscale.tir.intrin import sync

        sync.register_named(trace)
    if "tcgen05_" in trace or "sync_" in trace:
        from blockscale.tir.intrin import tcgen05

        tcgen05.register_named(trace)
    if "int4_" in trace:
        from blockscale.tir.intrin.x86 import int4 as x86_int4

        x86_int4.register_named(trace)
    from blockscale.tir.intrin.operands import describing, registered

    if "cuda_" in trace:
        from blockscale.tir.intrin.cuda import blocks as cuda_blocks

        cuda_blocks.register_rows(trace)
    with describing():
        describe_cpu()
        if "_dots_" in trace:
            describe_moe()
        if "edgellm_" in trace:
            describe_edgellm()
        if "cuda_" in trace:
            describe_gpu()
    registered(set(re.findall(r"\w+", trace)))


@cache
def describe_gpu() -> None:
    """Describe every CUDA intrinsic."""
    from blockscale.tir.intrin.cuda import act as cuda_act
    from blockscale.tir.intrin.cuda import blocks as cuda_blocks
    from blockscale.tir.intrin.cuda import edgellm as cuda_edgellm
    from blockscale.tir.intrin.cuda import fused as cuda_fused
    from blockscale.tir.intrin.cuda import sweep as cuda_sweep

    for module in (cuda_act, cuda_blocks, cuda_edgellm, cuda_fused, cuda_sweep):
        module.register_all()


@cache
def describe_moe() -> None:
    """Describe the x86 intrinsics of MoE layers."""
    from blockscale.tir.intrin.x86 import words as x86_words

    x86_words.register_all()


@cache
def describe_edgellm() -> None:
    """Describe the x86 intrinsics of Edge-LLM."""
    from blockscale.tir.intrin.x86 import edgellm as x86_edgellm

    x86_edgellm.register_all()


@cache
def describe_cpu() -> None:
    """Describe every x86 intrinsic but those of MoE layers, INT4 and Edge-LLM."""
    from blockscale.base.formats import QUANTIZED
    from blockscale.tir.intrin.x86 import fused as x86_fused
    from blockscale.tir.intrin.x86 import gemm as x86_gemm
    from blockscale.tir.intrin.x86 import panels as x86_panels
    from blockscale.tir.intrin.x86 import rows as x86_rows
    from blockscale.tir.intrin.x86 import width as x86

    for width in {width.level: width for width in x86.WIDTHS.values()}.values():
        for compute in ("float32", "bfloat16"):
            x86_rows.decode_row(width.level, compute)
        for depth in x86_gemm.e4m3_depths(width.level):
            x86_gemm.decode_panel_e4m3(width.level, depth, x86_gemm.E4M3_BLOCK)
        x86_rows.lane_sum(width.level)
        for fmt, row in QUANTIZED.items():
            x86_rows.dot_row(width.level, row.block)
            x86_gemm.decode_words(width.level, row.block)
            for group in x86_panels.SCALE_GROUPS:
                x86_panels.decode_panel_scales(width.level, fmt, group)
            for depth in x86_panels.panel_depths(width.level):
                computes = ("float32", "bfloat16") if width.level == "avx512" else ("float32",)
                for compute in computes:
                    x86_panels.decode_panel(width.level, compute, depth, row.block)
    for row in QUANTIZED.values():
        x86_rows.lane_max(row.block)
        x86_rows.pack_row(row.block)
        x86_fused.square_sum(row.block)
    x86_panels.dot_bf16()
