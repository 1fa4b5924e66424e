"""The command line: ``blockscale``."""

from blockscale.cli.command import main

__all__ = ["main"]
