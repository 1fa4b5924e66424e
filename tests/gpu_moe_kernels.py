"""Names of the MoE kernels that test_gpu_moe uses; see gpu_kernels.

blockscale build --target sm_90a -o moe.so $(python tests/gpu_moe_kernels.py)
pytest -m gpu --library moe.so tests/test_gpu_moe.py
"""

LAYERS = (
    "fused_moe_nvfp4_e16_k4_h320_i352_swiglu_tiles64_bf16",
    "fused_moe_nvfp4_e16_k4_h320_i352_relu2_bias_tiles64_f16",
    "fused_moe_nvfp4_e5_k1_h16_i16_swiglu_oai_tiles64_bf16",
    "fused_moe_mxfp4_e16_k4_h320_i352_swiglu_oai_bias_tiles64_bf16",
    "fused_moe_mxfp4_e16_k8_h320_i352_gelu_tanh_tiles64_f16",
    "fused_moe_int4g32z_e16_k4_h320_i352_gelu_tanh_tiles64_f16",
    "fused_moe_int4g64_e16_k4_h320_i384_relu2_tiles64_bf16",
    "fused_moe_int4g128_e16_k4_h384_i256_swiglu_tiles64_bf16",
    "fused_moe_int4g128z_e16_k4_h384_i256_swiglu_oai_bias_tiles64_bf16",
    "fused_moe_nvfp4_e16_k4_h320_i352_swiglu_afp8_tiles64_bf16",
    "fused_moe_mxfp4_e16_k4_h320_i352_swiglu_oai_afp8_tensor_bias_tiles64_bf16",
    "fused_moe_nvfp4_e16_k4_h320_i352_swiglu_anvfp4_tiles64_f16",
    "fused_moe_nvfp4_e32_k8_h2048_i768_swiglu_tiles64_bf16",
)
"""Every format, activation, dtype and option somewhere; sizes that are no multiples of tiles, the
smallest, and those of Qwen3-30B-A3B with fewer experts."""

ROUTES = (
    "moe_route_e16_k4_softmax_norm_f32",
    "moe_route_e16_k1_softmax_bf16",
    "moe_route_e128_k8_softmax_norm_bf16",
    "moe_route_e256_k8_sigmoid_norm_bias_g8x4_f32",
    "moe_route_e160_k6_softmax_g8x3_f16",
    "moe_route_e5_k3_sigmoid_f32",
)

NAMES = (*LAYERS, *ROUTES)

if __name__ == "__main__":
    print(*NAMES)
