"""Scheduled TensorIR of warp-specialised GEMMs -> the text of their kernels.

`read`: blocks, their loops, instructions and operands, as expressions in a tile's coordinates.
`derive`: roles, slots of shared and tensor memory, the ring, the accumulators (`kernel.Kernel`).
`check`: what every kernel must obey.  `text`, `emit`, `store`: the kernel's CUDA C++.
`maps`, `host`: tensor maps and host code.
"""
