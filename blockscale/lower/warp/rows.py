"""Linear layers that quantise their rows -> host C and CUDA C++: GEMMs, a kernel before each."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from blockscale.base.targets import GPU_TARGETS
from blockscale.lower.code import KernelCode
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.moe.small import code_of
from blockscale.lower.pipe.host import LAUNCH, Bucket, derived, merged
from blockscale.lower.warp.derive import derive
from blockscale.lower.warp.emit import emit
from blockscale.lower.warp.host import entry, kernel_params
from blockscale.lower.warp.kernel import Kernel
from blockscale.specs.gemm import Linear
from blockscale.specs.plans.launches import (
    LINEAR_PARTS,
    LINEAR_QUANTIZE,
    TEAM,
    initializers,
    listed,
)

HEADER = '#include "linear_rows.cuh"\n'

FOLLOWS = (*LAUNCH, "tirx.use_programtic_dependent_launch")
"""Launch of a GEMM that may begin before the kernel before it, of the same call, has ended."""

_NUMBERS = {"bfloat16": "BsBf16", "float16": "BsF16"}

_LOOKUP = "extern int TVMFFIEnvModLookupFromImports(void *context, const char *name, void **out);"


def sources(
    bodies: Sequence[tuple[int | None, tirx.PrimFunc]], spec: Linear, arch: str, name: str
) -> Source:
    """Return host and device code of the exported function ``name``.

    Args:
        bodies: scheduled functions, each with the most rows that it is for (None: any), ascending.
        spec: with `Linear.copies_rows`.
        arch: the one that schedules chose tiles for, with `targets.BULK_COPIES`.
        name: of the exported function.

    Raises:
        LoweringError: a schedule is no GEMM of warps; the message says where.
    """
    buckets = merged(derived(bodies, derive), name, emit)
    names = {form: f"{name}_quantize_{form}" for form in dict.fromkeys(map(_form, buckets))}
    texts = [bucket.text for bucket in buckets]
    texts += [HEADER, *(_quantize_source(own, form, spec) for form, own in names.items())]
    codes = [KernelCode(b.name, kernel_params(b.kernel), FOLLOWS) for b in buckets if b.text]
    codes += [code_of(own, LINEAR_QUANTIZE) for own in names.values()]
    host = _host_code(symbol(name, arch), spec, buckets, names, arch)
    return Source(host, "\n".join(texts), tuple(codes))


def _form(bucket: Bucket[Kernel]) -> str:
    """Return how a GEMM wants its rows, as `linear_rows.cuh` calls it."""
    if bucket.kernel.by_bytes:
        return "bytes"
    return "permuted" if bucket.kernel.form.order == "bytes" else "natural"


def _quantize_source(name: str, form: str, spec: Linear) -> str:
    """Return the kernel before GEMMs that want rows in this form."""
    made = spec.dtype if form == "natural" else "bfloat16"
    options = f"{_NUMBERS[spec.dtype]}, {_NUMBERS[made]}, BS_ROWS_{form.upper()}"
    return (
        f'extern "C" __global__ void __launch_bounds__({TEAM}) {name}({listed(LINEAR_QUANTIZE)}) '
        f"{{\n  bs_linear_quantize<{options}>({{x, to, row_scale, rows, cols, pitch}});\n}}\n"
    )


def _host_code(
    symbol: str,
    spec: Linear,
    buckets: Sequence[Bucket[Kernel]],
    names: dict[str, str],
    arch: str,
) -> str:
    """Return the C source of host function ``symbol``."""
    given = {param.name: i for i, param in enumerate(spec.params())}
    places = given | {part: len(given) + i for i, part in enumerate(LINEAR_PARTS)}
    gemms = ",\n".join(entry(bucket, places, GPU_TARGETS[arch].sm_shared) for bucket in buckets)
    before = []
    for form in map(_form, buckets):
        rows = TEAM // 32 if form == "bytes" else 1
        pitch = spec.k if form == "natural" else spec.padded_k
        before.append(f'{{.name = "{names[form]}", .rows = {rows}, .pitch = {pitch}}}')
    return f"""#include "cuda_linear.h"
{_LOOKUP}

static const BsGemm gemms[] = {{
{gemms}
}};
static const BsQuantize quantize[] = {{{", ".join(before)}}};
static const BsPart parts[] = {{{initializers(spec.workspace)}}};

int32_t __tvm_ffi_{symbol}(void *self, void *args, int32_t count, void *result) {{
  static const BsLinear layer = {{.gemms = {{.gemms = gemms,
      .lookup = TVMFFIEnvModLookupFromImports, .count = {len(buckets)}, .a_scale = -1}},
    .quantize = quantize, .parts = parts, .k = {spec.k},
    .x = {given["x"]}, .workspace = {given["workspace"]}, .params = {len(given)}}};
  (void)count, (void)result;
  return blockscale_linear(self, &layer, args);
}}
"""
