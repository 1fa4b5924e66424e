"""FlashInfer's FP4 functions on our kernels: change ``from flashinfer`` to this package.

Names, order and defaults of arguments, returned shapes and dtypes, and conventions are FlashInfer's
(0.7.2): ``global_scale`` *multiplies* values before they are quantised, and UE8M0 scales of 16-bit
values ignore it.  Norms compute what its kernels with one CTA per row do, `rmsnorm_fp4quant` its
other order; quantisers compute its exact mode (FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH=1), which its
tests compare with: whatever that variable says.  Four-over-six is asked for by ``nvfp4_4over6``, or
where that is left out by FLASHINFER_NVFP4_4OVER6 and its companions, as there (`recipes`).

What differs:

* padding of the 128x4 and 8x4 layouts is always zero, and so are scales of rows beyond a mask;
* a residual that is not contiguous is an error; its update is never lost;
* bad arguments are ValueError and TypeError with a reason, which are AssertionError and
  RuntimeError as well, as FlashInfer's checks in Python and in C++ raise them, and its
  BackendSupportedError in a program that has imported it (`errors`); more of them are found:
  overlaps, wrong shapes and devices, E8M0 scales of blocks of 16;
* of FP8 input, a scale block that rounds to zero has codes of zero, never of infinity, and
  reciprocals are rounded right where FlashInfer approximates them;
* a NaN makes its block's scale NaN; it has no part in a row's own global scale;
* ``expanded_idx_to_permuted_idx`` is checked, and all rows are quantised, not only its rows;
* everything runs on CPU tensors too, and results of dequantisation stay on the device;
* scale byte 0 of UE8M0 means 2^-127 in dequantisation, not 0;
* every ``backend`` is the same kernel, and refuses what FlashInfer's backend of that name refuses
  of a recipe or of rows' scales; ``enable_pdl=None`` is True.
"""

from blockscale.compat.flashinfer.experts import (
    nvfp4_batched_quantize,
    scaled_fp4_grouped_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from blockscale.compat.flashinfer.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from blockscale.compat.flashinfer.quantize import (
    fp4_quantize,
    mxfp4_quantize,
    nvfp4_quantize,
    silu_and_mul_nvfp4_quantize,
)
from blockscale.compat.flashinfer.recipes import (
    NVFP44Over6Config,
    NVFP44Over6ErrMode,
    make_nvfp4_global_scale,
    resolve_nvfp4_4over6,
)
from blockscale.compat.flashinfer.scales import (
    SfLayout,
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    mxfp4_dequantize_host,
    nvfp4_block_scale_interleave,
    shuffle_matrix_a,
    shuffle_matrix_sf_a,
)

__all__ = [
    "NVFP44Over6Config",
    "NVFP44Over6ErrMode",
    "SfLayout",
    "add_rmsnorm_fp4quant",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "make_nvfp4_global_scale",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_quantize",
    "resolve_nvfp4_4over6",
    "rmsnorm_fp4quant",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]
