"""`kernel.Kernel` -> numbers: what the cost model sees of a kernel of warps."""

from __future__ import annotations

from tvm.s_tir import Schedule

from blockscale.lower.warp.derive import derive
from blockscale.specs.plans import PREFIX

_NAMES = (
    *("rows_tile", "cols_tile", "slices", "ctas", "multicast", "stages", "blocks", "consumers"),
    *("stage_bytes", "shared"),
)


def decisions(sch: Schedule) -> dict[str, float]:
    """Return the kernel of a scheduled GEMM as numbers, under the keys of annotations.

    Raises:
        LoweringError: it is no such schedule.
    """
    kernel = derive(sch.mod["main"])
    found = {name: float(getattr(kernel, name)) for name in _NAMES}
    found |= {unit: float(kernel.unit == unit) for unit in ("wgmma", "tcgen05")}
    found |= {"by_rows": float(kernel.fastest == "rows")}
    return {f"{PREFIX}{name}": value for name, value in found.items()}
