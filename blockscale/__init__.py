"""4-bit block-scaled kernels: quantise, multiply, build once, call from torch.

``import blockscale`` is cheap: torch is imported with the first function that needs it, and TVM,
the compiler, only when a kernel has to be built.
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.abc import Loader as _Loader
from importlib.abc import MetaPathFinder as _MetaPathFinder
from importlib.machinery import ModuleSpec as _ModuleSpec
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

from blockscale.base import forks as _forks  # noqa: F401 - watches from now on
from blockscale.base.version import VERSION as __version__

if TYPE_CHECKING:
    from blockscale import checkpoints as checkpoints
    from blockscale import nn as nn
    from blockscale import specs as specs
    from blockscale.compat import edgellm as edgellm
    from blockscale.ops import distributed as distributed
    from blockscale.ops import int4 as int4
    from blockscale.ops import layouts as layouts
    from blockscale.ops.bound import BoundCall, bind
    from blockscale.ops.fused.act import (
        gelu_tanh_and_mul_fp4quant,
        grouped_quantize,
        silu_and_mul_fp4quant,
        silu_and_mul_grouped_fp4quant,
        swiglu_fp4quant,
    )
    from blockscale.ops.fused.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
    from blockscale.ops.gemm import grouped_mm_fp4, mm_fp4
    from blockscale.ops.gemm_act import grouped_mm_act_fp4quant, interleave_gate_up
    from blockscale.ops.linear.layer import linear
    from blockscale.ops.linear.weights import LinearWeights, prepare_linear_weights
    from blockscale.ops.moe.layer import fused_moe, moe_route
    from blockscale.ops.moe.weights import MoeWeights, prepare_moe_weights
    from blockscale.ops.quant import (
        dequantize,
        fp8_scale_candidates,
        nvfp4_fp8_scale_sweep,
        quantize,
        swizzle_scales,
        unswizzle_scales,
    )
    from blockscale.runtime.jit import build
    from blockscale.runtime.library import Library, load
    from blockscale.tuning import tune

__all__ = [
    "BoundCall",
    "Library",
    "LinearWeights",
    "MoeWeights",
    "__version__",
    "add_rmsnorm_fp4quant",
    "bind",
    "build",
    "dequantize",
    "fp8_scale_candidates",
    "fused_moe",
    "gelu_tanh_and_mul_fp4quant",
    "grouped_mm_act_fp4quant",
    "grouped_mm_fp4",
    "grouped_quantize",
    "interleave_gate_up",
    "linear",
    "load",
    "mm_fp4",
    "moe_route",
    "nvfp4_fp8_scale_sweep",
    "prepare_linear_weights",
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

_MODULES = {
    "checkpoints": "checkpoints",
    "edgellm": "compat.edgellm",
    "int4": "ops.int4",
    "layouts": "ops.layouts",
    "distributed": "ops.distributed",
    "nn": "nn",
    "specs": "specs",
}
"""Public modules, and where they are."""

_HOMES = {
    "ops.quant": (
        "dequantize",
        "fp8_scale_candidates",
        "nvfp4_fp8_scale_sweep",
        "quantize",
        "swizzle_scales",
        "unswizzle_scales",
    ),
    "ops.bound": ("BoundCall", "bind"),
    "ops.gemm": ("grouped_mm_fp4", "mm_fp4"),
    "ops.gemm_act": ("grouped_mm_act_fp4quant", "interleave_gate_up"),
    "ops.linear.layer": ("linear",),
    "ops.linear.weights": ("LinearWeights", "prepare_linear_weights"),
    "ops.fused.norm": ("add_rmsnorm_fp4quant", "rmsnorm_fp4quant"),
    "ops.fused.act": (
        "gelu_tanh_and_mul_fp4quant",
        "grouped_quantize",
        "silu_and_mul_fp4quant",
        "silu_and_mul_grouped_fp4quant",
        "swiglu_fp4quant",
    ),
    "ops.moe.layer": ("fused_moe", "moe_route"),
    "ops.moe.weights": ("MoeWeights", "prepare_moe_weights"),
    "runtime.jit": ("build",),
    "runtime.library": ("Library", "load"),
    "tuning": ("tune",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import the home of a public name on its first use; later uses find the name here."""
    if name in _MODULES:
        return _import_module(f"blockscale.{_MODULES[name]}")
    if name not in __all__:
        from blockscale.base.words import near

        meant = near(name, [*__all__, *_MODULES])
        hint = "dir(blockscale) lists what there is" if meant is None else f"did you mean {meant}?"
        raise AttributeError(f"module 'blockscale' has no attribute {name!r}; {hint}")
    home = _HOME[name]
    module = _import_module(f"blockscale.{home}")
    if home.startswith("ops"):  # so that all of torch.ops.blockscale is there
        for other in _HOMES:
            if other.startswith("ops"):
                _import_module(f"blockscale.{other}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})


class _PublicModules(_MetaPathFinder, _Loader):
    """Lets ``import blockscale.int4`` find the module that ``blockscale.int4`` is."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> _ModuleSpec | None:
        package, _, module = name.rpartition(".")
        known = package == "blockscale" and _MODULES.get(module, module) != module
        return _ModuleSpec(name, self) if known else None

    def create_module(self, spec: _ModuleSpec) -> Any:
        module = _import_module(f"blockscale.{_MODULES[spec.name.rpartition('.')[2]]}")
        self.spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self.spec


_sys.meta_path.append(_PublicModules())
