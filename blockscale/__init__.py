"""4-bit block-scaled kernels: quantise, multiply, build once, call from torch.

``import blockscale`` is cheap: torch is imported with the first function that needs it, and TVM,
the compiler, only when a kernel has to be built.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockscale.ops import (
        dequantize,
        fp8_scale_candidates,
        linear,
        nvfp4_fp8_scale_sweep,
        quantize,
        swizzle_scales,
        unswizzle_scales,
    )
    from blockscale.runtime import Library, load

__version__ = "0.1.0"

__all__ = [
    "Library",
    "__version__",
    "dequantize",
    "fp8_scale_candidates",
    "linear",
    "load",
    "nvfp4_fp8_scale_sweep",
    "quantize",
    "swizzle_scales",
    "unswizzle_scales",
]

# A wheel holds tir/, schedules/ and tuning_logs/ in this folder; a checkout, beside it.
if not (_Path(__file__).parent / "tir").is_dir():
    __path__.append(str(_Path(__file__).resolve().parent.parent))

_RUNTIME = ("Library", "load")


def __getattr__(name: str) -> object:
    """Import the home of a public name on its first use; later uses find the name here."""
    if name not in __all__:
        raise AttributeError(f"module 'blockscale' has no attribute {name!r}; it has {__all__}")
    module = _import_module("blockscale.runtime" if name in _RUNTIME else "blockscale.ops")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
