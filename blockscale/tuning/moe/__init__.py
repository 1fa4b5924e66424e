"""Measuring the GEMMs of MoE layers."""
