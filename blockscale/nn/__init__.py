"""Torch modules on 4-bit weights: a linear layer, and an MoE layer with its router.

Weights are buffers, not parameters: kernels have no backward, so call modules under
``torch.no_grad()`` or ``torch.inference_mode()``.  ``state_dict`` holds the prepared weights and,
as a tensor of bytes, what they are; a module loads whatever weights of its kind a state has, whose
sizes need not be those that it had.  ``module.to(dtype)`` moves weights, but keeps their dtypes.
"""

from blockscale.nn.linear import Int4Linear, Linear
from blockscale.nn.moe import FusedMoE, Router, SharedExpert
from blockscale.nn.prepared import META

__all__ = ["META", "FusedMoE", "Int4Linear", "Linear", "Router", "SharedExpert"]
