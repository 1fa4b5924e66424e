"""The decisions of GEMM kernels as plain data, which schedules and the lowering share."""

PREFIX = "blockscale."
"""Of the keys of the annotations by which schedules hand decisions to the lowering."""
