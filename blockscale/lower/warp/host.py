"""The host code of GEMMs of warps: C tables for `native/cuda_gemm.c`, which has all the logic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx

from blockscale.base.targets import GPU_TARGETS
from blockscale.lower.code import KernelCode
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.pipe.host import LAUNCH, Bucket, derived, map_entry, merged, table
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit, pointers, tensor_maps
from blockscale.lower.warp.kernel import Kernel


def sources(
    bodies: Sequence[tuple[int | None, tirx.PrimFunc]],
    name: str,
    arch: str,
    params: Sequence[str],
) -> Source:
    """Return host and device code of the exported function ``name``.

    Args:
        bodies: scheduled functions, each with the most rows that it is for (None: any), ascending.
        name: of the exported function.
        arch: the one that schedules chose tiles for.
        params: names of its parameters.

    Raises:
        LoweringError: a schedule is no GEMM of warps; the message says where.
    """
    buckets = merged(derived(bodies, derive), name, emit)
    places = {param: i for i, param in enumerate(params)}
    rows = [entry(bucket, places, GPU_TARGETS[arch].sm_shared) for bucket in buckets]
    known = f".a = {places['x']}, .a_scale = -1"
    codes = tuple(
        KernelCode(b.name, kernel_params(b.kernel), LAUNCH, b.kernel.after is not None)
        for b in buckets
        if b.text
    )
    text = "\n".join(bucket.text for bucket in buckets)
    return Source(table(symbol(name, arch), rows, known), text, codes)


def kernel_params(kernel: Kernel) -> tuple[str, ...]:
    """Return the types of a kernel's parameters: tensor maps, pointers, numbers, rows of x.

    Of rows that experts have there are two pointers, a table of tiles and their number.
    """
    maps = ("tensormap",) * len(tensor_maps(kernel))
    numbers = ("float32",) * len(kernel.scalars)
    handles = ("handle",) * (len(pointers(kernel)) + kernel.grouped)
    return (*maps, *handles, *numbers, *(() if kernel.grouped else ("int32",)))


def entry(bucket: Bucket[Kernel], places: Mapping[str, int], sm_shared: int) -> str:
    """Return the initialiser of one BsGemm, whose tensors are numbered as in ``places``."""
    kernel = bucket.kernel
    given = [places.get(name, -1) for name in pointers(kernel)]
    maps = [map_entry(each, places) for each in tensor_maps(kernel)]
    fields = {
        "name": f'"{bucket.name}"',
        "limit": 0 if bucket.limit is None else bucket.limit,
        "map_count": len(maps),
        "pointer_count": len(given),
        "pointers": f"{{{', '.join(map(str, given))}}}",
        "cluster_rows": kernel.rows_tile,
        "cluster_cols": kernel.tile_groups,
        "cluster": kernel.cluster,
        "threads": kernel.threads,
        "shared": kernel.shared,
        "persistent": int(kernel.ctas == 1),
        "sm_shared": sm_shared,
    }
    listed = ", ".join(f".{name} = {value}" for name, value in fields.items())
    return f"  {{{listed}, .maps = {{{', '.join(maps) or '{0}'}}}}}"
