"""Schedules of layout kernels."""
