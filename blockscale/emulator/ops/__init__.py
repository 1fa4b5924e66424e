"""Instructions that are not scalar, by prefix of their opcode.

A handler takes (gang, mask); where an instruction may have to wait it takes (gang, mask,
fragment) and returns True (done), False (not yet) or one key per warp (the gang must be split,
and each part tries again).  A module registers its builders when it is imported
(`core.register`).
"""

from blockscale.emulator.ops.copies import (  # noqa: F401 - the import registers the handlers
    bulk,
    cp_async,
    launchcontrol,
    remote,
    tensors,
)
from blockscale.emulator.ops.core import find, may_wait
from blockscale.emulator.ops.memory import atomic, loadstore  # noqa: F401
from blockscale.emulator.ops.tensor import (  # noqa: F401
    allocation,
    matrix,
    mma,
    movement,
    wgmma,
)
from blockscale.emulator.ops.threads import barrier, control, fence, mbarrier, warp  # noqa: F401

__all__ = ["find", "may_wait"]
