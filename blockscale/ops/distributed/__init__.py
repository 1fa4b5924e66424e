"""MoE layers whose experts lie on several ranks; docs/ep.md has use, sizes and protocol."""

from blockscale.ops.distributed.parallel import Dispatched, ExpertParallel

__all__ = ["Dispatched", "ExpertParallel"]
