"""Whether this process was forked from one that may have used OpenMP's threads.

Imported with the package, since a fork is seen only by those who were there.
"""

from __future__ import annotations

import os
import sys

threads_lost = False
"""The threads of libgomp do not survive a fork, and launches of this process must do without."""


def _after_fork_in_child() -> None:
    global threads_lost
    threads_lost |= "torch" in sys.modules or "tvm_ffi" in sys.modules


os.register_at_fork(after_in_child=_after_fork_in_child)
