"""Scheduled TensorIR of tcgen05 GEMMs -> host C and CUDA C++: `gemm_read`, then the kernel's text.

TVM's own lowering has no tensor memory and no warp roles, so it is not asked: the schedule says
what the kernel is (`GemmPlan`), `native/gemm_sm100.cuh` how that is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from blockscale.lower.cuda import Source, symbol
from blockscale.lower.gemm.host import Bucket, host_code, kernel_codes
from blockscale.lower.gemm.read import read
from blockscale.lower.gemm.source import source


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
        arch: one with `targets.TCGEN05`.
        params: names of its parameters.

    Raises:
        LoweringError: a schedule is no tcgen05 GEMM; the message says where.
    """
    buckets: list[Bucket] = []
    for limit, func in bodies:
        plan = read(func).check()
        if buckets and buckets[-1].plan == plan:
            buckets[-1] = buckets[-1]._replace(limit=limit)
        else:
            buckets.append(Bucket(f"{name}_kernel{len(buckets)}", plan, limit))
    device = "\n".join(source(bucket.plan, bucket.name) for bucket in buckets)
    return Source(host_code(symbol(name, arch), buckets, params), device, kernel_codes(buckets))
