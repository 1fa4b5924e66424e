"""The GEMM for Blackwell, without one: machine code, emulator, model of a B200."""
