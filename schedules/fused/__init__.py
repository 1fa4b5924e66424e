"""Schedules of norms and activations."""
