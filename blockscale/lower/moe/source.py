"""`MoePlan` -> CUDA source of its kernel: a struct of constants and native/moe_*.cuh."""

from __future__ import annotations

from blockscale.lower.warp.multiply import wgmma
from blockscale.specs.plans.launches import GEMM, listed
from blockscale.specs.plans.moe import LOADER_REGISTERS, MoePlan


def constants(plan: MoePlan) -> dict[str, str | int]:
    """Return what the kernel knows when it is compiled, by the names of native/moe_gemm.cuh."""
    return {
        "FORMAT": f"BS_MOE_{plan.fmt.upper()}",
        "GROUP": plan.group,
        "ZEROS": plan.zero_kind,
        "BF16": int(plan.dtype == "bfloat16"),
        "ACTIVATION": f"BS_MOE_{plan.activation.upper()}",
        "GATED": int(plan.gated),
        "GATHER": int(plan.gather),
        "DIRECT": int(plan.direct),
        "ONE": int(plan.one),
        "ROWS": plan.rows,
        "TOKENS": plan.tokens,
        "SLICES": plan.slices,
        "STAGES": plan.stages,
        "BLOCKS_K": plan.blocks_k,
        "TILES_M": plan.tiles_m,
        "CONSUMERS": plan.consumers,
        "TOKEN_WARPS": plan.producers - 1,
        "SCALE_BYTES": plan.scale_bytes,
        "MORE_REGISTERS": plan.consumer_registers,
        "FEWER_REGISTERS": LOADER_REGISTERS,
    }


def source(plan: MoePlan, kernel_name: str) -> str:
    """Return the CUDA text of the kernel ``kernel_name`` of a legal plan.

    Raises:
        PlanError: the plan is not legal.
    """
    plan.check()
    struct = f"{kernel_name}_plan"
    lines = [f"  static constexpr int {name} = {value};" for name, value in constants(plan).items()]
    if plan.unit == "wgmma":
        wrappers = [wgmma(plan.dtype == "bfloat16", plan.tokens)]
    else:
        wrappers = []
    return "\n".join(
        [
            f'#include "moe_{plan.unit}.cuh"',
            *wrappers,
            f"struct {struct} {{",
            *lines,
            "};",
            "",
            f'extern "C" __global__ void __launch_bounds__({plan.threads}, 1) {kernel_name}(',
            f"    {listed(GEMM)}) {{",
            "  BsMoe a{static_cast<const uint16_t *>(x), w, static_cast<const uint8_t *>(ws),",
            "          global, bias, row_scale, order, blocks, n_blocks,",
            "          static_cast<uint16_t *>(out), rows, k, x_pitch, out_pitch, out_cols, top_k,",
            "          alpha, limit};",
            f"  using Ring = BsMoeRing<{struct}>;",
            "  auto consume = [&](Ring ring, int tiles, int row_tiles, int warp, int lane) {",
            f"    bs_moe_consume_{plan.unit}<{struct}>(a, ring, tiles, row_tiles, warp, lane);",
            "  };",
            f"  bs_moe_run<{struct}>(a, consume);",
            "}",
            "",
        ]
    )
