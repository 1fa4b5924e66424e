"""The host side of an exported GPU library, run on a machine without a GPU."""

from blockscale.emulator.host.library import Run, run_module
from blockscale.emulator.host.world import LibraryWorld

__all__ = ["LibraryWorld", "Run", "run_module"]
