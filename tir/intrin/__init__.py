"""Tensor intrinsics: what an instruction computes (plain loops) and the instruction itself."""
