"""The decisions of GEMM kernels as plain data, which schedules and the lowering share."""

PREFIX = "blockscale."
"""Of the keys of the annotations by which schedules hand decisions to the lowering."""

ONCE = PREFIX + "once"
"""Block annotation of a load: no other tile of rows reads what it brings, where there is one."""
