"""Measurements of MoE layers across GPUs."""
