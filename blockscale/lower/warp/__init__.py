"""GEMMs whose 4-bit weights become fragments of warps: scheduled TensorIR to CUDA C++."""
