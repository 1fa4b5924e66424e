"""Schedules of MoE layers."""
