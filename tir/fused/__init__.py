"""Norms and activations, then quantise."""
