"""Tensor intrinsics that call our device functions."""
