"""Names of the kernels that test_gpu_formats uses: ``$(python -m tests.hardware.formats)``."""

from blockscale.specs.layout import LAYOUTS

NAMES = (
    *(f"relayout_{name}{back}" for name in LAYOUTS for back in ("", "_back")),
    *("edgellm_up_h320_i192_f16", "edgellm_down_h320_i192_silu_f32"),
    *("dequantize_nvfp4_bf16", "dequantize_mxfp4_bf16"),
)

if __name__ == "__main__":
    print(*NAMES)
