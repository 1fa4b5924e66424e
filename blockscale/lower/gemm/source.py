"""`GemmPlan` -> CUDA source of its kernel: a struct of constants and native/gemm_sm100.cuh."""

from __future__ import annotations

from blockscale.specs.plans.gemm import GemmPlan

THREADS = 192
"""Threads of a CTA: four warps that store, one that loads, one that multiplies."""

HEADER = '#include "gemm_sm100.cuh"\n'

_OUT = {"bfloat16": "BS_BF16", "float16": "BS_F16", "float32": "BS_F32"}


def constants(plan: GemmPlan) -> dict[str, str | int]:
    """Return what the kernel knows when it is compiled, by the names of native/gemm_sm100.cuh."""
    fmt = plan.format
    return {
        "KIND": f"BS_{fmt.kind.upper()}",
        "OUT": _OUT[plan.out_dtype],
        "A_BITS": fmt.a.bits,
        "B_BITS": fmt.b.bits,
        "BLOCK": fmt.block,
        "STEP": fmt.step,
        "N": plan.n,
        "K": plan.k,
        "EXPERTS": plan.experts,
        "SWAP": int(plan.swap),
        "G": plan.cta_group,
        "MMA_N": plan.mma_n,
        "BLOCK_K": plan.block_k,
        "STAGES": plan.stages,
        "CX": plan.cluster_x,
        "CY": plan.cluster_y,
        "SPLIT": plan.split_k,
        "ACC": plan.acc_stages,
        "OVERLAP": plan.overlap,
        "EPI": plan.epi_cols,
        "TMA_STORE": int(plan.store == "tma"),
        "RASTER_X": int(plan.raster == "x"),
        "GROUP": plan.group,
        "ROW_BYTES": plan.row_bytes,
        "ATOMS_K": plan.atoms_k,
        "Y_ATOMS": plan.y_atoms,
        "X_BYTES": plan.x_bytes,
        "Y_BYTES": plan.y_bytes,
        "STORE_BYTES": plan.store_bytes,
        "SMEM_BYTES": plan.smem_bytes,
        "TMEM_COLUMNS": plan.tmem_columns,
    }


def source(plan: GemmPlan, kernel_name: str) -> str:
    """Return the CUDA text of the kernel ``kernel_name`` of a legal plan.

    Raises:
        PlanError: the plan is not legal.
    """
    plan.check()
    lines = [f"  static constexpr int {name} = {value};" for name, value in constants(plan).items()]
    cluster = f"__cluster_dims__({plan.cluster}, 1, 1) " if plan.cluster > 1 else ""
    maps = ", ".join(f"const __grid_constant__ BsTensorMap {name}" for name in _MAPS)
    given = ", ".join(f"&{name}" for name in _MAPS)
    struct = f"{kernel_name}_plan"
    return "\n".join(
        [
            HEADER,
            f"struct {struct} {{",
            *lines,
            "};",
            "",
            f'extern "C" __global__ void __launch_bounds__({THREADS}, 1) {cluster}{kernel_name}(',
            f"    {maps},",
            "    const float *alpha, const float *bias, const int *offsets, void *out, int m) {",
            f"  bs_gemm_sm100<{struct}>({given}, alpha, bias, offsets, out, m);",
            "}",
            "",
        ]
    )


_MAPS = ("x", "y", "sx", "sy", "d")
