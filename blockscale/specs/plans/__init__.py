"""The decisions of GEMM kernels as plain data, which schedules and the lowering share."""

PREFIX = "blockscale."
"""Of the keys of the annotations by which schedules hand decisions to the lowering."""

ONCE = PREFIX + "once"
"""Block annotation of a load: what it brings is read by no other tile of rows, where there is one."""
