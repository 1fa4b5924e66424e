"""Torch functions that end in FP4: RMS norm or activation and quantisation in one kernel.

Arithmetic: `fused.norm_quantize` and `.act_quantize`.  `compat.flashinfer` has
the same functions with FlashInfer's conventions.  What they share:

* Outputs that are given are written and returned; those left out are allocated.  Dimensions before
  the last may be flattened in any of them.
* y_fp4: [..., K / 2] float4_e2m1fn_x2 or uint8, the even element in the low nibble.  Allocated as
  float4_e2m1fn_x2 where torch has it, else uint8.
* block_scale: one byte per block: float8_e4m3fn or uint8 for E4M3, uint8 or float8_e8m0fnu for
  UE8M0, the first of them where it is allocated.  Linear: [..., K / block_size].  128x4, the layout
  of tcgen05: ceil_to(rows, 128) * ceil_to(K / block_size, 4) bytes, flat (as allocated) or with
  these two dimensions; padding is written as zero.
* global_scale: float32 that divides values before they are quantised; None: 1.
* block_size, scale_format: 16 and "e4m3" (NVFP4), 32 and "ue8m0" (MXFP4), or 32 and "e4m3"; a
  scale_format of None is the first for its block size.
* enable_pdl: True or None: the kernel may start before the one before it in the stream has ended
  (programmatic dependent launch), and touches no memory until then.  No meaning on the CPU.
* Errors: TypeError for an argument that is no tensor or of another dtype; ValueError for an unknown
  option, a shape, stride, device or alignment that does not fit, and tensors that overlap.
"""
