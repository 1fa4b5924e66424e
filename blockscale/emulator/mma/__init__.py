"""Warp-level and warpgroup-level matrix instructions as functions of registers and bytes.

PTX ISA 9.2, sections 9.7.14 "Warp Level Matrix Multiply-Accumulate Instructions" and 9.7.15
"Asynchronous Warpgroup Level Matrix Instructions".  Nothing here knows a machine: registers are
uint32 arrays [W, 32, n] of W warps, shared memory is what the caller gathered.
"""
