"""CUDA intrinsics of blocks of MXFP8: one thread on one block, in its registers."""

from __future__ import annotations

from functools import partial

from blockscale.tir.common import i64
from blockscale.tir.fused import mxfp8
from blockscale.tir.intrin.cuda.blocks import CLASS, ONE, call, local, mapped, scalar_step
from blockscale.tir.intrin.operands import intrinsic


@intrinsic
def scale_of() -> str:
    """Register and name: the scale byte of a block's largest magnitude."""
    return scalar_step(
        "cuda_scale_mxfp8",
        [local("A", (ONE,), "int32")],
        "int32",
        mxfp8.block_byte,
        partial(call, "bs_scale_mxfp8", dtype="int32"),
    )


@intrinsic
def divisor_of() -> str:
    """Register and name: a scale byte's value."""
    return scalar_step(
        "cuda_divisor_mxfp8",
        [local("A", (ONE,), "int32")],
        "float32",
        mxfp8.divisor,
        partial(call, "bs_ue8m0_value", dtype="float32"),
    )


@intrinsic
def encode(dtype: str, block: int) -> str:
    """Register and name: E4M3 codes of a block's elements over a divisor."""
    return mapped(
        f"cuda_encode_mxfp8_{dtype}x{block}",
        "pack",
        [local("V", (i64(block),), dtype), local("D", (ONE,), "float32")],
        local("P", (i64(block),), "uint8", "w"),
        mxfp8.code,
        partial(call, f"bs_encode_mxfp8<{CLASS[dtype]}, {block}>"),
    )
