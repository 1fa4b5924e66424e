"""CUDA text of the kernels around an MoE layer's GEMMs: prepare, requantise, combine; and routing.

Sizes of the layer are arguments, so that a source depends on dtypes and formats alone; those of
routing are constants.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockscale.lower.code import KernelCode
from blockscale.specs.plans.launches import (
    COMBINE,
    GATHER,
    PREPARE,
    REQUANTIZE,
    REQUANTIZE_BYTES,
    ROUTE,
    ROUTE_WARPS,
    SORT,
    SORT_CLUSTER,
    SORT_THREADS,
    TEAM,
    Params,
    kinds,
    listed,
)

_FLOAT = {"float32": "BsF32", "bfloat16": "BsBf16", "float16": "BsF16"}
_ACT = {
    None: "BS_ACT_NONE",
    "fp8": "BS_ACT_FP8",
    "fp8_tensor": "BS_ACT_FP8_TENSOR",
    "nvfp4": "BS_ACT_NVFP4",
    "mxfp4": "BS_ACT_MXFP4",
    "mxfp8": "BS_ACT_MXFP8",
}

HEADER = '#include "moe_rows.cuh"\n'
CODES_HEADER = '#include "moe_codes.cuh"\n#include "moe_rows.cuh"\n'
ROUTE_HEADER = '#include "moe_route.cuh"\n'


def code_of(
    name: str, params: Params, *, shared: bool = False, follows: bool = False
) -> KernelCode:
    """Return what the export must know of a kernel.

    Args:
        name: of the kernel.
        params: its parameters.
        shared: whether it takes dynamic shared memory.
        follows: whether it may begin before its predecessor, of the same call, has ended.
    """
    launch = ["blockIdx.x", "threadIdx.x"] + ["tirx.use_dyn_shared_memory"] * shared
    launch += ["tirx.use_programtic_dependent_launch"] * follows
    return KernelCode(name, kinds(params), tuple(launch))


def _kernel(name: str, params: Params, threads: int, body: str, cluster: int = 1) -> str:
    bounds = f"__launch_bounds__({threads})"
    if cluster > 1:
        bounds = f"__cluster_dims__({cluster}) {bounds}"
    return f'extern "C" __global__ void {bounds} {name}({listed(params)}) {{\n{body}}}\n'


def prepare_source(
    name: str,
    dtype: str,
    act_fmt: str | None,
    *,
    many: bool = False,
    by_bytes: bool = False,
    coded: bool = False,
) -> str:
    """Return the kernel that sorts ids, and permutes (and quantises) rows of hidden.

    With ``many``, that of any number of slots, whose grid consists of clusters; else of 4096.
    ``by_bytes``: rows become codes of 8 bits.  ``coded``: rows of hidden are quantised already.
    """
    own = "bs_moe_prepare_bytes" if by_bytes else "bs_moe_prepare"
    ctas = SORT_CLUSTER if many else 1
    more = ", true" if coded else ""
    body = (
        "  BsMoePrepare p = {{{ids, experts, wide}, rows * top_k, order, "
        "{{blocks1, count1, tokens1}, {blocks2, count2, tokens2}}},\n"
        "                    hidden, scale, x, row_scale, rows, cols, pitch};\n"
        f"  {own}<{_FLOAT[dtype]}, {_ACT[act_fmt]}, {ctas}{more}>(p);\n"
    )
    return _kernel(name, PREPARE, SORT_THREADS, body, ctas)


def requantize_source(name: str, dtype: str, act_fmt: str) -> str:
    """Return the kernel that quantises the rows between the GEMMs in place."""
    call = f"bs_moe_requantize<{_FLOAT[dtype]}, {_ACT[act_fmt]}>"
    return _kernel(name, REQUANTIZE, TEAM, f"  {call}(y, scale, row_scale, count, pitch);\n")


def requantize_bytes_source(name: str, dtype: str, act_fmt: str) -> str:
    """Return the kernel that quantises the rows between the GEMMs to codes of 8 bits."""
    call = f"bs_moe_requantize_bytes<{_FLOAT[dtype]}, {_ACT[act_fmt]}>"
    body = f"  {call}(y, scale, row_scale, count, codes, pitch);\n"
    return _kernel(name, REQUANTIZE_BYTES, TEAM, body)


def combine_source(name: str, dtype: str, *, placed: bool = False) -> str:
    """Return the kernel that adds up a token's rows; ``placed``: they are not in its slots."""
    return _kernel(
        name,
        COMBINE,
        TEAM,
        "  BsMoeCombine p = {y, {ids, experts, wide}, weights, place, out, rows, cols, top_k};\n"
        f"  bs_moe_combine<{_FLOAT[dtype]}, {str(placed).lower()}>(p);\n",
    )


def sort_source(name: str, *, many: bool = False) -> str:
    """Return the kernel that sorts ids by expert; ``many`` as in `prepare_source`."""
    ctas = SORT_CLUSTER if many else 1
    body = (
        "  BsMoeSort s = {{ids, experts, 0}, count, order, {}, offsets, atoms};\n"
        f"  bs_moe_sort_offsets<{ctas}>(s);\n"
    )
    return _kernel(name, SORT, SORT_THREADS, body, ctas)


def gather_source(name: str, dtype: str, act_fmt: str) -> str:
    """Return the kernel that quantises rows into the experts' order."""
    body = (
        "  BsMoeGather p = {hidden, scale, {ids, experts, 0}, order, offsets, atoms, place,\n"
        "                   codes, scales, ready, top_k, cols, pitch, groups};\n"
        f"  bs_moe_gather<BsCodes{act_fmt.capitalize()}<{_FLOAT[dtype]}>>(p);\n"
    )
    return _kernel(name, GATHER, TEAM, body)


def route_source(name: str, dtype: str, constants: Mapping[str, int]) -> str:
    """Return the kernel that chooses experts; ``constants``: those of BsRoute's P."""
    lines = [f"  static constexpr int {key} = {int(value)};" for key, value in constants.items()]
    struct = "\n".join([f"struct {name}_spec {{", f"  using Logit = {_FLOAT[dtype]};", *lines])
    call = f"  bs_moe_route<{name}_spec>(logits, bias, scale, ids, weights, rows);\n"
    return f"{struct}\n}};\n" + _kernel(name, ROUTE, 32 * ROUTE_WARPS, call)
