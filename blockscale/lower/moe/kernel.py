"""MoE functions -> host C and CUDA C++: plans of their GEMMs, and the kernels around these.

Each distinct plan is compiled once; sizes of the layer are arguments of all kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockscale.base.targets import GPU_TARGETS, WGMMA
from blockscale.lower.cuda import Source, symbol
from blockscale.lower.moe import small as moe_small
from blockscale.lower.moe.host import Bucket, gemm_code, host_code, route_host_code
from blockscale.lower.moe.source import source
from blockscale.specs.moe import FusedMoe, MoeRoute
from blockscale.specs.plans import launches
from blockscale.specs.plans.moe import MoePlan


def sources(
    buckets: Sequence[tuple[int | None, MoePlan, MoePlan]], spec: FusedMoe, arch: str
) -> Source:
    """Return host and device code of the exported function of ``spec``.

    Args:
        buckets: the most tokens (None: any number), and plans of GEMM 1 and GEMM 2, ascending.
        spec: of layout "tiles64".
        arch: one with `targets.BULK_COPIES`.

    Raises:
        PlanError: there is no such kernel.
        TypeError: the weights' layout, or instructions of a plan, are not those of ``arch``.
    """
    name = spec.name
    check_layout(spec)
    kernels: dict[MoePlan, str] = {}
    found = []
    for limit, first, second in buckets:
        for plan in (first, second):
            _check(plan, spec, arch)
            kernels.setdefault(plan, f"{name}_gemm{len(kernels)}")
        found.append(Bucket(limit, first, second, kernels[first], kernels[second]))
    small = {role: f"{name}_{role}" for role in ("prepare", "prepare_many", "combine")}
    texts = [
        *(source(plan, kernel) for plan, kernel in kernels.items()),
        moe_small.HEADER,
        moe_small.prepare_source(small["prepare"], spec.dtype, spec.act_fmt),
        moe_small.prepare_source(small["prepare_many"], spec.dtype, spec.act_fmt, many=True),
        moe_small.combine_source(small["combine"], spec.dtype),
    ]
    codes = [
        *(gemm_code(kernel) for kernel in kernels.values()),
        moe_small.code_of(small["prepare"], launches.PREPARE, shared=True),
        moe_small.code_of(small["prepare_many"], launches.PREPARE, shared=True),
        moe_small.code_of(small["combine"], launches.COMBINE, follows=True),
    ]
    if spec.act_fmt is not None:
        small["requantize"] = f"{name}_requantize"
        texts.append(moe_small.requantize_source(small["requantize"], spec.dtype, spec.act_fmt))
        codes.append(moe_small.code_of(small["requantize"], launches.REQUANTIZE, follows=True))
    host = host_code(symbol(name, arch), spec, found, small, arch)
    return Source(host, "\n".join(texts), tuple(codes))


def check_layout(spec: FusedMoe) -> None:
    """TypeError unless GPU kernels read the weights of ``spec``."""
    if spec.layout != "tiles64":
        raise TypeError(
            f"{spec.name}: weights are in layout {spec.layout!r}, which GPU kernels do not read; "
            "build the spec with layout='tiles64', or for a CPU level"
        )


def _check(plan: MoePlan, spec: FusedMoe, arch: str) -> None:
    plan.check()
    if plan.unit == "wgmma" and WGMMA not in GPU_TARGETS[arch].features:
        raise TypeError(
            f"{spec.name}: a plan multiplies with wgmma, which {arch} lacks; choose plans with "
            "unit 'mma' for it"
        )
    if (plan.fmt, plan.group, plan.zeros) != (spec.fmt, spec.group, spec.zero):
        raise TypeError(
            f"{spec.name}: a plan is for {plan.fmt} with groups of {plan.group}, zeros "
            f"{plan.zeros}; choose plans for the spec's weights"
        )
    if plan.dtype != spec.dtype:
        raise TypeError(
            f"{spec.name}: a plan is for {plan.dtype}; choose plans for {spec.dtype} activations"
        )


def route_sources(spec: MoeRoute, arch: str) -> Source:
    """Return host and device code of the exported function of ``spec``."""
    kernel = f"{spec.name}_kernel"
    constants = {
        "EXPERTS": spec.experts,
        "TOP_K": spec.top_k,
        "SIGMOID": spec.scoring == "sigmoid",
        "NORM": spec.renormalize,
        "BIAS": spec.bias,
        "GROUPS": spec.n_group,
        "KEPT": spec.topk_group,
    }
    text = moe_small.ROUTE_HEADER + moe_small.route_source(kernel, spec.dtype, constants)
    host = route_host_code(symbol(spec.name, arch), spec, kernel)
    return Source(host, text, (moe_small.code_of(kernel, launches.ROUTE),))
