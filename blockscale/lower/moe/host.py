"""The host code of MoE functions: C tables for `native/cuda_moe.c`, which has all the logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from blockscale.base.targets import GPU_TARGETS
from blockscale.lower.code import KernelCode
from blockscale.lower.warp.host import kernel_params
from blockscale.lower.warp.kernel import Kernel
from blockscale.specs.moe import FusedMoe, MoeRoute
from blockscale.specs.plans.launches import initializers

_GEMM_LAUNCH = (
    *("blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory"),
    "tirx.use_programtic_dependent_launch",
)

_ROLES = (
    *("hidden", "topk_ids", "topk_weights", "w13", "w13_scale", "w13_global", "w13_bias"),
    *("w2", "w2_scale", "w2_global", "w2_bias", "a1_scale", "a2_scale", "alpha", "limit"),
    *("share", "out", "to", "workspace"),
)
_ROUTE_ROLES = ("logits", "correction_bias", "scale", "topk_ids", "topk_weights")

_LOOKUP = "extern int TVMFFIEnvModLookupFromImports(void *context, const char *name, void **out);"


class Bucket(NamedTuple):
    """The GEMMs for up to ``limit`` tokens (None: any number), and their kernels' names."""

    limit: int | None
    gemm1: Kernel
    gemm2: Kernel
    name1: str
    name2: str


def gemm_code(name: str, kernel: Kernel) -> KernelCode:
    """Return what the export must know of a GEMM's kernel."""
    return KernelCode(name, kernel_params(kernel), _GEMM_LAUNCH)


def host_code(
    symbol: str, spec: FusedMoe, buckets: Sequence[Bucket], names: Mapping[str, str], arch: str
) -> str:
    """Return the C source of host function ``symbol``.

    Args:
        symbol: the host function.
        spec: of the exported function.
        buckets: ascending.
        names: kernels "prepare", "prepare_many", "combine", and "requantize" if activations are
            quantised.
        arch: whose SMs have the shared memory over which CTAs are spread.
    """
    rows = ",\n".join(_bucket(bucket) for bucket in buckets)
    table = f"static const BsMoeBucket buckets[] = {{\n{rows}\n}};"
    room = GPU_TARGETS[arch].sm_shared
    known = f".buckets = buckets, .count = {len(buckets)}, .sm_shared = {room}"
    return _function(symbol, spec, table, known, names)


def codes_host_code(
    symbol: str, spec: FusedMoe, tables: Sequence[Sequence[str]], names: Mapping[str, str]
) -> str:
    """Return the C source of host function ``symbol``, whose GEMMs multiply codes by codes.

    Args:
        symbol: the host function.
        spec: of the exported function.
        tables: of GEMM 1, GEMM 2 and both in one launch, initialisers of BsGemm, ascending.
        names: kernels "prepare", "prepare_many", "gather" and "combine".
    """
    gemms, known = [], []
    for field, rows in zip(("gemm1", "gemm2", "both"), tables, strict=True):
        listed = ",\n".join(rows)
        gemms.append(f"static const BsGemm {field}[] = {{\n{listed}\n}};")
        known.append(
            f".{field} = {{.gemms = {field}, .lookup = TVMFFIEnvModLookupFromImports, "
            f".count = {len(rows)}}}"
        )
    others = {role: name for role, name in names.items() if role != "gather"}
    gather = f'.gather = "{names["gather"]}"'
    made = f"static const BsMoeCodes codes = {{{', '.join([gather, *known])}}};"
    return _function(symbol, spec, "\n".join([*gemms, made]), ".codes = &codes", others)


def _function(
    symbol: str, spec: FusedMoe, tables: str, known: str, names: Mapping[str, str]
) -> str:
    """Return the C source of an MoE function.

    ``tables``: of its GEMMs, ``known``: how BsMoe names them, ``names``: its other kernels.
    """
    sizes = ", ".join(
        f".{name} = {getattr(spec, name)}"
        for name in (
            *("experts", "top_k", "hidden"),
            *("padded_rows", "padded_hidden", "padded_intermediate", "row_bytes"),
        )
    )
    kernels = ", ".join(f'.{role} = "{name}"' for role, name in names.items())
    return f"""#include "cuda_moe.h"
{_LOOKUP}

{tables}
static const BsPart parts[] = {{{initializers(spec.workspace)}}};

int32_t __tvm_ffi_{symbol}(void *self, void *args, int32_t count, void *result) {{
  static const BsMoe moe = {{{known}, .parts = parts,
    .lookup = TVMFFIEnvModLookupFromImports,
    {kernels},
    {sizes},
    .at = {{{_places(spec, _ROLES)}}}}};
  (void)count, (void)result;
  return blockscale_moe(self, &moe, args);
}}
"""


def route_host_code(symbol: str, spec: MoeRoute, kernel: str) -> str:
    """Return the C source of host function ``symbol``, which launches ``kernel``."""
    return f"""#include "cuda_moe.h"
{_LOOKUP}

int32_t __tvm_ffi_{symbol}(void *self, void *args, int32_t count, void *result) {{
  static const BsMoeRouting routing = {{.lookup = TVMFFIEnvModLookupFromImports,
    .kernel = "{kernel}", .at = {{{_places(spec, _ROUTE_ROLES)}}}}};
  (void)count, (void)result;
  return blockscale_moe_route(self, &routing, args);
}}
"""


def _places(spec: FusedMoe | MoeRoute, roles: Sequence[str]) -> str:
    """Return the initialisers of the parameters' numbers; -1 for what the function lacks."""
    places = {param.name: i for i, param in enumerate(spec.params())}
    return ", ".join(f".{role} = {places.get(role, -1)}" for role in roles)


def _bucket(bucket: Bucket) -> str:
    limit = 0 if bucket.limit is None else bucket.limit
    first, second = initializer(bucket.name1, bucket.gemm1), initializer(bucket.name2, bucket.gemm2)
    by_bytes = ", .by_bytes = 1" if bucket.gemm1.by_bytes else ""
    return f"  {{.limit = {limit}, .gemm1 = {first},\n   .gemm2 = {second}{by_bytes}}}"


def initializer(name: str, kernel: Kernel) -> str:
    """Return the initialiser of a BsMoeGemm."""
    return (
        f'{{"{name}", .rows = {kernel.cols_tile}, .tokens = {kernel.rows_tile}, '
        f".threads = {kernel.threads}, .shared = {kernel.shared}}}"
    )
