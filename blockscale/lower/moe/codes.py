"""MoE functions whose GEMMs multiply codes by codes -> host C and CUDA C++.

The GEMMs are derived from their schedules, as `mm_fp4`'s are (`lower/pipe`, `lower/sync`); around
them are native/moe/moe_codes.cuh and moe_rows.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from blockscale.lower.code import KernelCode
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.moe import small
from blockscale.lower.moe.host import codes_host_code
from blockscale.lower.pipe import host
from blockscale.lower.pipe.kernel import Kernel
from blockscale.lower.pipe.phases import Phases, apart, emit_phases, joined
from blockscale.specs.moe import FusedMoe
from blockscale.specs.plans import launches

Bodies = Sequence[tuple[int | None, tirx.PrimFunc]]
"""Scheduled functions, each with the most slots that it is for (None: any number), ascending."""


def _joined(first: Kernel, second: Kernel) -> Phases | None:
    """Both GEMMs as one launch, if GEMM 2's schedule says so and they go together."""
    wanted = second.one_launch and apart(first, second) is None
    return joined(first, second) if wanted else None


def sources(
    first: Bodies,
    second: Bodies,
    spec: FusedMoe,
    arch: str,
    how: host.Lowering = host.TCGEN05,
) -> Source:
    """Return host and device code of the exported function of ``spec``.

    Args:
        first, second: GEMM 1 and GEMM 2.
        spec: of layout "128x4".
        arch: one that ``how`` is for.
        how: kernels are derived and printed.

    Raises:
        LoweringError: a schedule is no such GEMM; the message says where.
    """
    name = spec.name
    kernels1, kernels2 = (host.derived(bodies, how.kernel) for bodies in (first, second))
    gemms = [
        host.merged(own, f"{name}_{part}", how.emit)
        for part, own in (("gemm1", kernels1), ("gemm2", kernels2))
    ]
    both = host.merged(
        (
            (limit, _joined(one, other))
            for (limit, one), (_, other) in zip(kernels1, kernels2, strict=True)
        ),
        f"{name}_gemms",
        lambda of, own: "" if of is None else emit_phases(of, own),
    )
    kernels = {role: f"{name}_{role}" for role in ("prepare", "prepare_many", "gather", "combine")}
    texts = [bucket.text for buckets in gemms for bucket in buckets]
    texts += [bucket.text for bucket in both]
    texts += [
        small.CODES_HEADER,
        small.sort_source(kernels["prepare"]),
        small.sort_source(kernels["prepare_many"], many=True),
        small.gather_source(kernels["gather"], spec.dtype, spec.act_fmt or ""),
        small.combine_source(kernels["combine"], spec.dtype, placed=True),
    ]
    codes = [
        KernelCode(bucket.name, host.kernel_params(bucket.kernel), host.LAUNCH)
        for buckets in gemms
        for bucket in buckets
        if bucket.text
    ]
    codes += [
        KernelCode(bucket.name, host.phases_params(bucket.kernel), host.TOGETHER)
        for bucket in both
        if bucket.kernel is not None and bucket.text
    ]
    codes += [
        small.code_of(kernels["prepare"], launches.SORT, shared=True),
        small.code_of(kernels["prepare_many"], launches.SORT, shared=True),
        small.code_of(kernels["gather"], launches.GATHER, follows=True),
        small.code_of(kernels["combine"], launches.COMBINE, follows=True),
    ]
    tables = [
        host.tables(buckets, params)
        for buckets, params in zip(gemms, (launches.CODES_GEMM1, launches.CODES_GEMM2), strict=True)
    ]
    tables.append(host.phases_table(both, launches.CODES_LAYER))
    text = codes_host_code(symbol(name, arch), spec, tables, kernels)
    return Source(text, "\n".join(texts), tuple(codes))
