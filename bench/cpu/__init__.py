"""Kernels of a CPU: ``python -m bench.cpu``."""
