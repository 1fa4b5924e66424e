"""MoE layers: weights, options, calls, routing."""
