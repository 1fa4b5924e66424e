"""Names of the kernels that test_gpu_{ops,calls,bound,limits,linear,flashinfer}.py use.

Functions that a loaded library lacks are built when they are first called.  To build all of them
at once, before the tests:

    blockscale build --target sm_90a -o all.so $(python -m tests.hardware.kernels)
    cd tests/hardware
    pytest -m gpu --library ../../all.so test_gpu_{ops,calls,bound,limits,linear,flashinfer}.py
"""

NORMS = (
    "add_rmsnorm_nvfp4_h256_bf16",
    "add_rmsnorm_nvfp4_h512_both_y_f16",
    "add_rmsnorm_nvfp4_h1536_128x4_bf16",
    "add_rmsnorm_nvfp4_h4096_both_y_bf16",
    "add_rmsnorm_nvfp4_h16384_128x4_y_f16",
    "add_rmsnorm_nvfp4_h32768_bf16",
    "add_rmsnorm_mxfp4_h256_128x4_y_f16",
    "add_rmsnorm_mxfp4_h512_both_bf16",
    "add_rmsnorm_mxfp4_h4096_f16",
    "add_rmsnorm_mxfp4_h32768_both_y_bf16",
    "add_rmsnorm_e4m3b32_h1536_y_bf16",
    "add_rmsnorm_e4m3b32_h16384_both_f16",
    "rmsnorm_nvfp4_h256_both_y_f16",
    "rmsnorm_nvfp4_h4096_128x4_bf16",
    "rmsnorm_nvfp4_h32768_f16",
    "rmsnorm_mxfp4_h1536_bf16",
    "rmsnorm_mxfp4_h16384_both_y_bf16",
    "rmsnorm_e4m3b32_h512_128x4_bf16",
)
"""Every hidden size with every format, dtype, layout and option somewhere."""

FI_NORMS = (
    "add_rmsnorm_nvfp4_h512_both_y_fi_bf16",
    "add_rmsnorm_mxfp4_h512_both_y_fi_bf16",
    "add_rmsnorm_e4m3b32_h512_both_y_fi_bf16",
    "add_rmsnorm_nvfp4_h512_both_y_fi_f16",
    "add_rmsnorm_mxfp4_h512_both_y_fi_f16",
    "rmsnorm_nvfp4_h4096_128x4_fi_bf16",
    "rmsnorm_mxfp4_h512_fi_f16",
)
"""In FlashInfer's convention: those of the golden data, and its norm without a residual."""

BLOCKS = (
    "quantize_nvfp4_bf16",
    "quantize_nvfp4_128x4_f16",
    "quantize_nvfp4_128x4_amax_f32",
    "quantize_mxfp4_f32",
    "quantize_mxfp4_128x4_bf16",
    "quantize_mxfp4_floor_bf16",
    "quantize_mxfp4_amax_floor_f16",
)

DEQUANTIZES = (
    "dequantize_nvfp4_bf16",
    "dequantize_nvfp4_128x4_f16",
    "dequantize_mxfp4_f32",
    "dequantize_mxfp4_128x4_bf16",
)

COPIES = ("swizzle_128x4", "unswizzle_128x4")

ACTS = (
    "silu_and_mul_nvfp4_bf16",
    "silu_and_mul_nvfp4_128x4_f16",
    "silu_and_mul_mxfp4_128x4_bf16",
    "gelu_tanh_and_mul_nvfp4_128x4_bf16",
    "gelu_tanh_and_mul_e4m3b32_f16",
    "swiglu_nvfp4_f16",
    "swiglu_mxfp4_128x4_bf16",
    "silu_and_mul_nvfp4_grouped_128x4_bf16",
    "quantize_nvfp4_grouped_128x4_bf16",
    "quantize_mxfp4_grouped_128x4_f16",
    "quantize_e4m3b32_grouped_128x4_bf16",
    "silu_and_mul_nvfp4_8x4_fi_bf16",
    "quantize_mxfp4_fi_bf16",
)

FI_GOLDEN = tuple(
    f"quantize_nvfp4{layout}_fi_{dtype}" for layout in ("", "_128x4") for dtype in ("bf16", "f16")
)
"""FlashInfer's exact quantiser."""

FI_OPTIONS = (
    "quantize_nvfp4_fi_f8",
    "quantize_nvfp4_128x4_fi_f8",
    "quantize_mxfp4_128x4_fi_f8",
    "quantize_nvfp4_rows_8x4_fi_f8",
    "quantize_nvfp4_rows_128x4_fi_bf16",
    "quantize_nvfp4_4over6_mae_fi_bf16",
    "quantize_nvfp4_4over6_mse_8x4_fi_f16",
    "quantize_nvfp4_4over6_mae_scaled_128x4_fi_f16",
    "quantize_nvfp4_rows_4over6_mse_scaled_fi_bf16",
    "quantize_nvfp4_token_fi_bf16",
    "quantize_nvfp4_token_128x4_fi_f16",
    "quantize_nvfp4_token_4over6_mae_fi_f16",
    "quantize_nvfp4_token_4over6_mse_8x4_fi_bf16",
    "quantize_nvfp4_token_4over6_mae_scaled_fi_bf16",
    "quantize_nvfp4_token_4over6_mse_scaled_fi_bf16",
)
"""Its quantisers of FP8, with a scale of each row, given or found, and with four-over-six."""

SWEEPS = ("scale_sweep_b16_bf16", "scale_sweep_b16_f32", "scale_sweep_b32_f16")

LINEAR = (
    "linear_nvfp4_n4096_k4096_tiles64_bf16",
    "linear_nvfp4_n4096_k4096_tiles64_f16",
    "linear_nvfp4_n4096_k4096_tiles64_to_f32_bf16",
    "linear_nvfp4_n2880_k2880_tiles64_bf16",
    "linear_nvfp4_n512_k7168_tiles64_bf16",
    "linear_nvfp4_n196_k720_tiles64_bf16",
    "linear_nvfp4_n28672_k4096_silu_gated_tiles64_bf16",
    "linear_mxfp4_n2880_k2880_tiles64_bf16",
    "linear_mxfp4_n195_k2880_gelu_tanh_res_tiles64_bf16",
    "linear_int4g128_n4096_k4096_tiles64_bf16",
    "linear_int4g64_n2880_k2880_tiles64_bf16",
    "linear_int4g32z_n4096_k4096_tiles64_bf16",
    "linear_mxfp4_n2880_k2880_fp8_tiles64e_to_f32_bf16",
    "linear_mxfp4_n2880_k2880_fp8_tiles64_to_f32_bf16",
    "linear_mxfp4_n28672_k4096_silu_gated_fp8_tiles64e_bf16",
    "linear_mxfp4_n195_k2880_gelu_tanh_res_fp8_tiles64e_f16",
    *("quantize_mxfp4_bf16", "dequantize_nvfp4_f32", "dequantize_mxfp4_bf16"),
)
"""With what quantises their weights, beside the kernels above."""

NAMES = (
    *NORMS,
    *FI_NORMS,
    *BLOCKS,
    *DEQUANTIZES,
    *COPIES,
    *ACTS,
    *FI_GOLDEN,
    *FI_OPTIONS,
    *SWEEPS,
    *LINEAR,
)

if __name__ == "__main__":
    print(*NAMES)
