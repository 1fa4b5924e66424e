"""Checkpoints of other tools: ``blockscale.checkpoints.open("folder")`` finds out what it holds."""

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.checkpoint import Checkpoint, open

__all__ = ["Checkpoint", "CheckpointError", "open"]
