"""4-bit block-scaled kernels: quantise, multiply, build once, call from torch.

``import blockscale`` is cheap: torch is imported with the first function that needs it, and TVM,
the compiler, only when a kernel has to be built.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale import checkpoints as checkpoints
    from blockscale import edgellm as edgellm
    from blockscale import int4 as int4
    from blockscale import layouts as layouts
    from blockscale import nn as nn
    from blockscale import specs as specs
    from blockscale.facade import build, tune
    from blockscale.moe_weights import MoeWeights, prepare_moe_weights
    from blockscale.ops import dequantize, quantize, swizzle_scales, unswizzle_scales
    from blockscale.ops_fused import (
        add_rmsnorm_fp4quant,
        gelu_tanh_and_mul_fp4quant,
        grouped_quantize,
        rmsnorm_fp4quant,
        silu_and_mul_fp4quant,
        silu_and_mul_grouped_fp4quant,
        swiglu_fp4quant,
    )
    from blockscale.ops_gemm import grouped_mm_fp4, mm_fp4
    from blockscale.ops_moe import fused_moe
    from blockscale.ops_route import moe_route
    from blockscale.ops_weights import fp8_scale_candidates, linear, nvfp4_fp8_scale_sweep
    from blockscale.runtime import Library, load

__version__ = "0.1.0"

__all__ = [
    "Library",
    "MoeWeights",
    "__version__",
    "add_rmsnorm_fp4quant",
    "build",
    "dequantize",
    "fp8_scale_candidates",
    "fused_moe",
    "gelu_tanh_and_mul_fp4quant",
    "grouped_mm_fp4",
    "grouped_quantize",
    "linear",
    "load",
    "mm_fp4",
    "moe_route",
    "nvfp4_fp8_scale_sweep",
    "prepare_moe_weights",
    "quantize",
    "rmsnorm_fp4quant",
    "silu_and_mul_fp4quant",
    "silu_and_mul_grouped_fp4quant",
    "swiglu_fp4quant",
    "swizzle_scales",
    "tune",
    "unswizzle_scales",
]

# A wheel holds tir/, schedules/ and tuning_logs/ in this folder; a checkout, beside it.
if not (_Path(__file__).parent / "tir").is_dir():
    __path__.append(str(_Path(__file__).resolve().parent.parent))

_HOMES = {
    "runtime": ("Library", "load"),
    "facade": ("build", "tune"),
    "moe_weights": ("MoeWeights", "prepare_moe_weights"),
    "ops_gemm": ("grouped_mm_fp4", "mm_fp4"),
    "ops_moe": ("fused_moe",),
    "ops_route": ("moe_route",),
    "ops_weights": ("fp8_scale_candidates", "linear", "nvfp4_fp8_scale_sweep"),
    "ops_fused": (
        "add_rmsnorm_fp4quant",
        "gelu_tanh_and_mul_fp4quant",
        "grouped_quantize",
        "rmsnorm_fp4quant",
        "silu_and_mul_fp4quant",
        "silu_and_mul_grouped_fp4quant",
        "swiglu_fp4quant",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}  # others: ops


def __getattr__(name: str) -> object:
    """Import the home of a public name on its first use; later uses find the name here."""
    if name in ("checkpoints", "edgellm", "int4", "layouts", "nn", "specs"):  # modules
        return _import_module(f"blockscale.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'blockscale' has no attribute {name!r}; it has {__all__}")
    home = _HOME.get(name, "ops")
    module = _import_module(f"blockscale.{home}")
    if home.startswith("ops"):  # so that all of torch.ops.blockscale is there
        for other in ("ops", *(h for h in _HOMES if h.startswith("ops"))):
            _import_module(f"blockscale.{other}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
