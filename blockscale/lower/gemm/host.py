"""The host code of tcgen05 GEMMs: C tables for `native/cuda_gemm.c`, which has all the logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blockscale.base.sizes import ceil_div
from blockscale.lower.code import KernelCode
from blockscale.lower.gemm.maps import DTYPES, SWIZZLES, Size, TensorMapPlan, gemm_maps
from blockscale.lower.gemm.source import THREADS
from blockscale.specs.plans.gemm import GemmPlan

KERNEL_PARAMS = ("tensormap",) * 5 + ("handle",) * 4 + ("int32",)
"""Tensor maps of X, Y, their scales and d; alpha, bias, offsets, d; rows of a."""

LAUNCH = ("blockIdx.x", "threadIdx.x", "clusterCtaIdx.x", "tirx.use_dyn_shared_memory")

_SIZES = {"m": "BS_OF_ROWS", "atoms": "BS_OF_SCALES"}


class Bucket(NamedTuple):
    """A kernel and the most rows of a that it is for; None: any number."""

    name: str
    plan: GemmPlan
    limit: int | None


def kernel_codes(buckets: Sequence[Bucket]) -> tuple[KernelCode, ...]:
    """Return what the export must know of the kernels."""
    return tuple(KernelCode(bucket.name, KERNEL_PARAMS, LAUNCH) for bucket in buckets)


def host_code(symbol: str, buckets: Sequence[Bucket], params: Sequence[str]) -> str:
    """Return the C source of host function ``symbol``, which chooses one of ``buckets``.

    ``params`` are the names of the function's parameters, in order.
    """
    places = {name: i for i, name in enumerate(params)}
    roles = ("a", "a_scale", "alpha", "bias", "offsets", "d")
    known = ", ".join(f".{role} = {places.get(role, -1)}" for role in roles)
    rows = ",\n".join(_row(bucket, places) for bucket in buckets)
    return f"""#include "cuda_gemm.h"
extern int TVMFFIEnvModLookupFromImports(void *context, const char *name, void **out);

static const BsGemm gemms[] = {{
{rows}
}};

int32_t __tvm_ffi_{symbol}(void *self, void *args, int32_t count, void *result) {{
  static const BsGemms known = {{.gemms = gemms, .lookup = TVMFFIEnvModLookupFromImports,
    .count = {len(buckets)}, {known}}};
  (void)count, (void)result;
  return blockscale_gemm(self, &known, args);
}}
"""


def _row(bucket: Bucket, places: dict[str, int]) -> str:
    """Return the initialiser of one BsGemm."""
    plan = bucket.plan
    swap, x, y = plan.swap, 128 * plan.cluster_x, plan.mma_n * plan.cluster_y
    cluster_rows, cluster_cols = (y, x) if swap else (x, y)
    made = gemm_maps(plan)
    described = [_map(each, places) for each in (made.x, made.y, made.sx, made.sy)]
    described.append(_map(made.d, places) if plan.store == "tma" else "{.rank = 0}")
    maps = ",\n    ".join(described)
    fields = {
        "name": f'"{bucket.name}"',
        "limit": 0 if bucket.limit is None else bucket.limit,
        "cluster_rows": cluster_rows,
        "cluster_cols": ceil_div(plan.n, cluster_cols),
        "ragged": plan.experts,
        "cluster": plan.cluster,
        "threads": THREADS,
        "shared": plan.launch_bytes,
        "persistent": int(plan.split_k == 1),
    }
    listed = ", ".join(f".{name} = {value}" for name, value in fields.items())
    return f"  {{{listed}, .maps = {{\n    {maps}}}}}"


def _map(made: TensorMapPlan, places: dict[str, int]) -> str:
    """Return the initialiser of one BsGemmMap."""
    tensor = "d" if made.tensor == "out" else made.tensor
    dims = ", ".join(_size(size) for size in made.dims)
    strides = ", ".join(map(str, made.strides))
    box = ", ".join(map(str, made.box))
    return (
        f"{{.param = {places[tensor]}, .dtype = {DTYPES[made.dtype]}, .rank = {len(made.dims)}, "
        f".swizzle = {SWIZZLES[made.swizzle]}, .dims = {{{dims}}}, .strides = {{{strides}}}, "
        f".box = {{{box}}}}}"
    )


def _size(size: Size) -> str:
    if not size.unit:
        return str(size.value)
    assert size.value == 1, "sizes known when called are those of a whole tensor"
    return _SIZES[size.unit]
