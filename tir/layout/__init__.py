"""Kernels made of index maps."""
