"""The host code of GEMM kernels: C tables for `native/cuda_gemm.c`, which has all the logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from tvm import tirx

from blockscale.base.errors import LoweringError
from blockscale.lower.code import KernelCode
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.derive import derive
from blockscale.lower.pipe.emit import emit, pointers, transfers
from blockscale.lower.pipe.kernel import THREADS, Kernel
from blockscale.lower.pipe.maps import DTYPES, SWIZZLES, MapPlan, tensor_maps
from blockscale.lower.pipe.phases import Phases, phase_parts

LAUNCH = ("blockIdx.x", "threadIdx.x", "clusterCtaIdx.x", "tirx.use_dyn_shared_memory")

TOGETHER = (*LAUNCH, "tirx.use_cooperative_launch")
"""Of a kernel whose CTAs wait for each other: all of them are on the GPU at a time, or none."""

MAX_MAPS, MAX_POINTERS, MAX_NUMBERS = 12, 24, 4
"""BS_GEMM_MAPS, BS_GEMM_POINTERS and BS_GEMM_NUMBERS of native/cuda_gemm.h."""

K = TypeVar("K")

_SIZES = {1: "BS_OF_ROWS", 128: "BS_OF_SCALES"}
"""Sizes known when a kernel is called, by the rows that they count in."""


class Bucket(NamedTuple, Generic[K]):
    """A kernel and the most rows that it is for; None: any number."""

    name: str
    kernel: K
    text: str
    limit: int | None


def derived(
    bodies: Iterable[tuple[int | None, tirx.PrimFunc]], derive: Callable[[tirx.PrimFunc], K]
) -> list[tuple[int | None, K]]:
    """Return limits and kernels of scheduled functions; one that several share is derived once."""
    once = cache(derive)
    return [(limit, once(func)) for limit, func in bodies]


UNNAMED = "@kernel@"
"""Stands for the name of a kernel in its text until it is known; in no text otherwise."""


def merged(
    kernels: Iterable[tuple[int | None, K]], name: str, emit: Callable[[K, str], str]
) -> list[Bucket[K]]:
    """Return the buckets of exported function ``name``; neighbours of the same kernel are one.

    Others of the same kernel have its name, and no text.

    ``kernels``: each with the most rows that it is for, ascending; ``emit(kernel, name)``: a text.
    """
    buckets: list[Bucket[K]] = []
    names: dict[str, str] = {}
    known = [*kernels]
    apart = {id(kernel): kernel for _, kernel in known}  # several limits may share one
    printed = {own: emit(kernel, UNNAMED) for own, kernel in apart.items()}
    for limit, kernel in known:
        key = printed[id(kernel)]
        if buckets and buckets[-1].name == names.get(key):
            buckets[-1] = buckets[-1]._replace(limit=limit)
            continue
        own = names.setdefault(key, f"{name}_kernel{len(names)}")
        there = any(bucket.name == own for bucket in buckets)
        buckets.append(Bucket(own, kernel, "" if there else key.replace(UNNAMED, own), limit))
    return buckets


class Lowering(NamedTuple):
    """How kernels come of scheduled functions: what is derived and checked, and its text."""

    kernel: Callable[[tirx.PrimFunc], Kernel]
    emit: Callable[[Kernel, str], str]


TCGEN05 = Lowering(lambda func: checked(derive(func)), emit)


def sources(
    bodies: Sequence[tuple[int | None, tirx.PrimFunc]],
    name: str,
    arch: str,
    params: Sequence[str],
    how: Lowering = TCGEN05,
) -> Source:
    """Return host and device code of the exported function ``name``.

    Args:
        bodies: scheduled functions, each with the most rows that it is for (None: any), ascending.
        name: of the exported function.
        arch: one that ``how`` is for.
        params: names of its parameters.
        how: kernels are derived and printed.

    Raises:
        LoweringError: a schedule is no such GEMM; the message says where.
    """
    buckets = merged(derived(bodies, how.kernel), name, how.emit)
    device = "\n".join(bucket.text for bucket in buckets)
    codes = tuple(KernelCode(b.name, kernel_params(b.kernel), LAUNCH) for b in buckets if b.text)
    return Source(host_code(symbol(name, arch), buckets, params), device, codes)


def kernel_params(kernel: Kernel) -> tuple[str, ...]:
    """Return the types of a kernel's parameters: tensor maps, pointers, rows of a."""
    handles = len(pointers(kernel)) + (kernel.experts > 0)
    numbers = ("float32",) * len(kernel.scalars)
    return ("tensormap",) * len(transfers(kernel)) + ("handle",) * handles + numbers + ("int32",)


def host_code(symbol: str, buckets: Sequence[Bucket[Kernel]], params: Sequence[str]) -> str:
    """Return the C source of host function ``symbol``, which chooses one of ``buckets``.

    ``params`` are the names of the function's parameters, in order.
    """
    places = {name: i for i, name in enumerate(params)}
    known = f".a = {places['a']}, .a_scale = {places['a_scale']}"
    return table(symbol, tables(buckets, params), known)


def tables(buckets: Sequence[Bucket[Kernel]], params: Sequence[str]) -> list[str]:
    """Return the initialisers of BsGemm, whose tensors are numbered as in ``params``."""
    places = {name: i for i, name in enumerate(params)}
    return [_row(bucket, places) for bucket in buckets]


def table(symbol: str, kernels: Sequence[str], known: str) -> str:
    """Return the C source of host function ``symbol``.

    ``kernels``: initialisers of BsGemm, ascending; ``known``: of BsGemms, a and its scales.
    """
    rows = ",\n".join(kernels)
    return f"""#include "cuda_gemm.h"
extern int TVMFFIEnvModLookupFromImports(void *context, const char *name, void **out);

static const BsGemm gemms[] = {{
{rows}
}};

int32_t __tvm_ffi_{symbol}(void *self, void *args, int32_t count, void *result) {{
  static const BsGemms known = {{.gemms = gemms, .lookup = TVMFFIEnvModLookupFromImports,
    .count = {len(kernels)}, {known}}};
  (void)count, (void)result;
  return blockscale_gemm(self, &known, args);
}}
"""


def _row(bucket: Bucket[Kernel], places: dict[str, int]) -> str:
    """Return the initialiser of one BsGemm."""
    kernel = bucket.kernel
    given = [places.get(name, -1) for name in pointers(kernel)]
    given += [places["offsets"]] if kernel.experts else []
    numbers = [places[str(var.name)] for var in kernel.scalars]
    maps = [map_entry(made, places) for made in tensor_maps(kernel)]
    launch = {
        "cluster_rows": kernel.cluster_tile("rows"),
        "cluster_cols": kernel.col_tiles,
        "ragged": kernel.experts,
        "cluster": kernel.cluster,
        "shared": kernel.launch_bytes,
        "persistent": int(kernel.split == 1),
        "threads": kernel.threads,
    }
    return _entry(bucket.name, bucket.limit, maps, given, numbers, launch)


def phases_table(buckets: Sequence[Bucket[Phases | None]], params: Sequence[str]) -> list[str]:
    """Return the initialisers of BsGemm of two GEMMs each; without a name where there is none."""
    places = {name: i for i, name in enumerate(params)}
    return [_phases_row(bucket, places) for bucket in buckets]


def _phases_row(bucket: Bucket[Phases | None], places: dict[str, int]) -> str:
    of = bucket.kernel
    if of is None:
        return f"  {{.limit = {bucket.limit or 0}}}"
    maps, given, numbers = [], [], []
    for prefix, kernel in phase_parts(of):
        own = {
            name.removeprefix(prefix): i for name, i in places.items() if name.startswith(prefix)
        }
        maps += [map_entry(made, own) for made in tensor_maps(kernel)]
        given += [own.get(name, -1) for name in pointers(kernel)]
        numbers += [own[str(var.name)] for var in kernel.scalars]
    given += [places["ready"], places["offsets"]]
    launch = {
        "cluster_rows": min(k.cluster_tile("rows") for k in (of.first, of.second)),
        "cluster_cols": max(of.first.col_tiles, of.second.col_tiles),
        "ragged": of.first.experts,
        "cluster": of.first.group,
        "shared": of.launch_bytes,
        "persistent": 1,
        "threads": THREADS,
    }
    return _entry(bucket.name, bucket.limit, maps, given, numbers, launch)


def phases_params(of: Phases) -> tuple[str, ...]:
    """Return the types of the parameters of two GEMMs in one launch."""
    kernels = [kernel for _, kernel in phase_parts(of)]
    maps = sum(len(transfers(kernel)) for kernel in kernels)
    handles = sum(len(pointers(kernel)) for kernel in kernels) + 2
    numbers = sum(len(kernel.scalars) for kernel in kernels)
    kinds = ("tensormap",) * maps + ("handle",) * handles
    return kinds + ("float32",) * numbers + ("int32",)


def _entry(
    name: str,
    limit: int | None,
    maps: Sequence[str],
    given: Sequence[int],
    numbers: Sequence[int],
    launch: Mapping[str, int],
) -> str:
    """Return the initialiser of one BsGemm.

    ``maps``: initialisers of BsGemmMap; ``given``, ``numbers``: places of pointers and numbers;
    ``launch``: what else there is.
    """
    if len(maps) > MAX_MAPS or len(given) > MAX_POINTERS or len(numbers) > MAX_NUMBERS:
        raise LoweringError(
            f"{name}: {len(maps)} tensor maps, {len(given)} pointers and {len(numbers)} "
            f"numbers; {MAX_MAPS}, {MAX_POINTERS} and {MAX_NUMBERS} are the most"
        )
    fields = {
        "name": f'"{name}"',
        "limit": 0 if limit is None else limit,
        "map_count": len(maps),
        "pointer_count": len(given),
        "pointers": f"{{{', '.join(map(str, given))}}}",
        "number_count": len(numbers),
        "numbers": f"{{{', '.join(map(str, numbers or [0]))}}}",
        **launch,
    }
    listed = ", ".join(f".{field} = {value}" for field, value in fields.items())
    described = ",\n    ".join(maps)
    return f"  {{{listed}, .maps = {{\n    {described}}}}}"


def map_entry(made: MapPlan, places: Mapping[str, int]) -> str:
    """Return the initialiser of one BsGemmMap."""
    dims = ", ".join(_SIZES[unit] if extent is None else str(extent) for extent, unit in made.dims)
    strides, box = (", ".join(map(str, values)) for values in (made.strides, made.box))
    return (
        f"{{.param = {places[made.tensor]}, .dtype = {DTYPES[made.dtype]}, "
        f".rank = {len(made.dims)}, .swizzle = {SWIZZLES[made.swizzle]}, .dims = {{{dims}}}, "
        f".strides = {{{strides}}}, .box = {{{box}}}}}"
    )
