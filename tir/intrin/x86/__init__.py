"""Tensor intrinsics of x86-64 CPUs."""
