"""Data layouts and numerics of the tcgen05 instructions (PTX ISA 9.7.16), without machine state."""
