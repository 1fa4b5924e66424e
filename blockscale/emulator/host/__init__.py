"""The host side of an exported GPU library, run on a machine without a GPU."""

from blockscale.emulator.host.library import Run, run_module

__all__ = ["Run", "run_module"]
