"""Norms and activations that quantise their result."""
