"""What a kernel of mma.sync must obey, judged on its derived form before it is printed."""

from __future__ import annotations

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe import check
from blockscale.lower.pipe.kernel import Kernel
from blockscale.lower.pipe.simulate import Barrier, Role, deadlock, next_place, stepped
from blockscale.lower.sync.kernel import SyncKernel
from blockscale.specs.plans.sync import WARPS, Y_ROWS


def checked(kernel: SyncKernel) -> SyncKernel:
    """Return the kernel; LoweringError says which rule it breaks, with the number."""
    reason = illegal(kernel)
    if reason is not None:
        raise LoweringError(f"no such kernel: {reason}")
    return kernel


def illegal(kernel: SyncKernel) -> str | None:
    """Why there is no such kernel; None if there is."""
    if kernel.mma.n not in Y_ROWS:
        return f"{kernel.mma.n} rows of Y are none of {Y_ROWS}"
    if kernel.cluster * kernel.acc_stages > 1:
        return "warps multiply for their own CTA alone, into one set of registers"
    for rule in check.CHECKS:
        if rule not in check.OF_TENSOR_MEMORY:
            reason = rule(kernel)
            if reason is not None:
                return reason
    return deadlock(kernel, _stuck)


def _stuck(kernel: Kernel, tiles: int, k_stages: int) -> list[str]:
    """The roles that do not end: one warp loads, four multiply."""
    full = [Barrier(1) for _ in range(kernel.stages)]
    empty = [Barrier(WARPS) for _ in range(kernel.stages)]

    def load() -> Role:
        stage = parity = 0
        for _ in range(tiles * k_stages):
            yield empty[stage], parity ^ 1
            full[stage].arrive(1)
            stage, parity = next_place(stage, parity, kernel.stages)

    def multiply() -> Role:
        stage = parity = 0
        for _ in range(tiles * k_stages):
            yield full[stage], parity
            empty[stage].arrive(1)
            stage, parity = next_place(stage, parity, kernel.stages)

    return stepped({"loads": load(), **{f"warp {w}": multiply() for w in range(WARPS)}})
