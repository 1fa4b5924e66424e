"""Products of INT4 weights -> host C and CUDA C++: a kernel for each number of rows, one before it.

The products are derived from their schedules (`lower.warp`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx import PrimFunc

from blockscale.base.targets import GPU_TARGETS
from blockscale.lower.code import KernelCode
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.moe import small as moe_small
from blockscale.lower.moe.host import initializer
from blockscale.lower.pipe.host import Bucket, derived, merged
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.lower.warp.host import kernel_params
from blockscale.lower.warp.kernel import Kernel
from blockscale.specs.int4 import Int4Mm
from blockscale.specs.plans.launches import INT4_PREPARE, SORT_THREADS, initializers, listed

HEADER = '#include "int4_rows.cuh"\n'

ALONE = ("blockIdx.x", "threadIdx.x", "tirx.use_dyn_shared_memory")
FOLLOWS = (*ALONE, "tirx.use_programtic_dependent_launch")
"""Launches of a GEMM; one that loads weights early may follow our own kernel, and no other."""

_ROLES = (
    *("x", "offsets", "packed", "scale", "pre_quant_scale", "alpha", "bias", "out"),
    "workspace",
)
_LOOKUP = "extern int TVMFFIEnvModLookupFromImports(void *context, const char *name, void **out);"


def sources(
    bodies: Sequence[tuple[int | None, PrimFunc]], spec: Int4Mm, arch: str, name: str
) -> Source:
    """Return host and device code of the exported function ``name`` of ``spec``.

    Args:
        bodies: scheduled functions, each with the most rows that it is for (None: any), ascending.
        spec: of layout "tiles64".
        arch: one with `targets.BULK_COPIES`.

    Raises:
        LoweringError: a schedule is no such product; the message says where.
    """
    prepare = f"{name}_prepare" if spec.experts or spec.copies_rows else None
    buckets = merged(derived(bodies, derive), name, emit)
    texts = [bucket.text for bucket in buckets]
    launch = ALONE if prepare is None else FOLLOWS
    codes = [
        KernelCode(b.name, kernel_params(b.kernel), launch, b.kernel.after is not None)
        for b in buckets
        if b.text
    ]
    if prepare is not None:
        texts += [HEADER, _prepare_source(prepare, spec)]
        codes.append(moe_small.code_of(prepare, INT4_PREPARE))
    host = _host_code(symbol(name, arch), spec, buckets, prepare, arch)
    return Source(host, "\n".join(texts), tuple(codes))


def _prepare_source(name: str, spec: Int4Mm) -> str:
    """Return the kernel before a product: the table of tiles, copies of rows."""
    flags = (spec.pre_quant, spec.activation == "a8", spec.group == 32)
    options = ", ".join(str(flag).lower() for flag in flags)
    kind = {"bfloat16": "BsBf16", "float16": "BsF16"}[spec.dtype]
    return (
        f'extern "C" __global__ void __launch_bounds__({SORT_THREADS}) {name}'
        f"({listed(INT4_PREPARE)}) {{\n"
        "  BsInt4Prepare p = {offsets, {blocks, count, tokens}, x, scale, to, experts, rows,\n"
        "                     cols, pitch, scales};\n"
        f"  bs_int4_prepare<{kind}, {options}>(p);\n}}\n"
    )


def _host_code(
    symbol: str,
    spec: Int4Mm,
    buckets: Sequence[Bucket[Kernel]],
    prepare: str | None,
    arch: str,
) -> str:
    """Return the C source of host function ``symbol``."""
    rows = ",\n".join(
        f"  {{.limit = {bucket.limit or 0}, .gemm = {initializer(bucket.name, bucket.kernel)}}}"
        for bucket in buckets
    )
    places = {param.name: i for i, param in enumerate(spec.params())}
    at = ", ".join(f".{role} = {places.get(role, -1)}" for role in _ROLES)
    sizes = ", ".join(
        f".{size} = {getattr(spec, size)}" for size in ("experts", "n", "k", "padded_n", "padded_k")
    )
    before = "NULL" if prepare is None else f'"{prepare}"'
    return f"""#include "cuda_int4.h"
{_LOOKUP}

static const BsInt4Bucket buckets[] = {{
{rows}
}};
static const BsPart parts[] = {{{initializers(spec.workspace)}}};

int32_t __tvm_ffi_{symbol}(void *self, void *args, int32_t count, void *result) {{
  static const BsInt4 mm = {{.buckets = buckets, .parts = parts,
    .lookup = TVMFFIEnvModLookupFromImports,
    .prepare = {before}, .count = {len(buckets)}, {sizes}, .copies = {int(spec.copies_rows)},
    .sm_shared = {GPU_TARGETS[arch].sm_shared},
    .at = {{{at}}}}};
  (void)count, (void)result;
  return blockscale_int4(self, &mm, args);
}}
"""
