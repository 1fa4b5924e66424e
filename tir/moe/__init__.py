"""MoE layers."""
