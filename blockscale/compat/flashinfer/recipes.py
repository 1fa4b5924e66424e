"""Four-over-six: which recipe a call asks for, by its argument or by the environment.

The environment's switches are FlashInfer's, read at every call that leaves ``nvfp4_4over6`` out:
FLASHINFER_NVFP4_4OVER6 ("1": on), FLASHINFER_NVFP4_4OVER6_ERR_MODE ("MAE", "MSE"),
FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH and FLASHINFER_NVFP4_4OVER6_E4M3_USE_256 ("1").
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch

from blockscale.compat.flashinfer.errors import public

_HERE = __name__.rpartition(".")[0]
_SWITCH = "FLASHINFER_NVFP4_4OVER6"
_E2M1_MAX = 6.0
_E4M3_MAX = 448
_PAIRING = 1e-3
"""Relative difference up to which a base belongs to a recipe."""


class NVFP44Over6ErrMode(IntEnum):
    """By which sum of errors a block chooses: of absolute ones, or of squares."""

    MAE = 0
    MSE = 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True)
class NVFP44Over6Config:
    """A recipe of four-over-six.

    Attributes:
        e4m3_max: the block scale, 448 or 256, of the largest value, in global scales.
        err_mode: by what a block chooses; a name is taken too.
        err_use_fast_math: errors of values times the global scale, whose codes times scales need no
            more than float16, and not of the values themselves.
    """

    e4m3_max: int = _E4M3_MAX
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self) -> None:
        if self.e4m3_max not in (256, _E4M3_MAX):
            raise ValueError(
                f"NVFP44Over6Config: e4m3_max={self.e4m3_max!r}, but it must be 256 or 448"
            )
        mode = self.err_mode
        try:
            known = (
                NVFP44Over6ErrMode[mode.upper()]
                if isinstance(mode, str)
                else NVFP44Over6ErrMode(mode)
            )
            object.__setattr__(self, "err_mode", known)
        except (KeyError, ValueError):
            raise ValueError(
                f"NVFP44Over6Config: err_mode={mode!r}, but it must be MAE or MSE"
            ) from None

    @property
    def err_mode_name(self) -> str:
        """For example "MAE"."""
        mode = self.err_mode
        return mode if isinstance(mode, str) else mode.name

    def __repr__(self) -> str:
        defaults = {field.name: field.default for field in fields(NVFP44Over6Config)}
        said = {name: getattr(self, name) for name in defaults}
        parts = [f"{name}={value!r}" for name, value in said.items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(parts)})"


class _Unset:
    """Type of `UNSET`, which stays one object when it is copied or pickled."""

    def __repr__(self) -> str:
        return f"<left out: {_SWITCH} decides>"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()
"""The default of ``nvfp4_4over6``: the environment decides."""


def _of_environment() -> NVFP44Over6Config | None:
    def on(suffix: str = "") -> bool:
        return os.environ.get(_SWITCH + suffix) == "1"

    if not on():
        return None
    return NVFP44Over6Config(
        256 if on("_E4M3_USE_256") else _E4M3_MAX,
        os.environ.get(f"{_SWITCH}_ERR_MODE", "MAE"),
        on("_ERR_USE_FAST_MATH"),
    )


def _outside() -> int:
    """Return the stack level, for warnings of the calling function, of the first other package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_HERE):
        level, frame = level + 1, frame.f_back
    return level


def resolve_nvfp4_4over6(setting: NVFP44Over6Config | None = UNSET) -> NVFP44Over6Config | None:
    """Return the recipe of a call, None where four-over-six is off.

    Args:
        setting: the call's argument; left out: what the environment says, with a FutureWarning
            where it turns four-over-six on.

    Raises:
        TypeError: it is neither a recipe nor None.
        ValueError: the environment names an unknown mode.
    """
    if setting is UNSET:
        config = _of_environment()
        if config is not None:
            warnings.warn(
                f"{_SWITCH} and its companions are deprecated; pass nvfp4_4over6={config!r}",
                FutureWarning,
                stacklevel=_outside(),
            )
        return config
    if setting is not None and not isinstance(setting, NVFP44Over6Config):
        raise TypeError(
            f"nvfp4_4over6 is a {type(setting).__name__}; pass an NVFP44Over6Config, or None for "
            "none, or leave it out"
        )
    return setting


def of_call(
    where: str, setting: NVFP44Over6Config | None, x: torch.Tensor, strict: bool = False
) -> NVFP44Over6Config | None:
    """Return the recipe with which a public function quantises ``x``.

    Of FP8 input there is none: the environment's is ignored, unless ``strict``.

    Raises:
        ValueError: the caller asks for one of FP8 input.
        TypeError: as `resolve_nvfp4_4over6`.
    """
    config = resolve_nvfp4_4over6(setting)
    if config is None or x.dtype != torch.float8_e4m3fn:
        return config
    if setting is UNSET and not strict:
        return None
    raise ValueError(
        f"{where}: nvfp4_4over6={config!r} does not go with input of float8_e4m3fn; pass bfloat16 "
        "or float16, or nvfp4_4over6=None"
    )


def searched(config: NVFP44Over6Config | None) -> str:
    """Return the recipe as `ActQuantize.search` says it."""
    if config is None:
        return "none"
    return config.err_mode_name.lower() + "_scaled" * bool(config.err_use_fast_math)


def span(config: NVFP44Over6Config | None) -> float:
    """Return what the largest value becomes when it is encoded."""
    return (_E4M3_MAX if config is None else config.e4m3_max) * _E2M1_MAX


def check_base(where: str, base: float, config: NVFP44Over6Config | None) -> None:
    """ValueError unless ``base``, of a row's own scales, is the one of the recipe."""
    expected = 1.0 / span(config)
    if abs(base - expected) > _PAIRING * expected:
        raise ValueError(
            f"{where}: a_global_sf={base!r}, but the recipe {config!r} implies {expected!r}; make "
            "it by make_nvfp4_global_scale(a, True, nvfp4_4over6_config=...) of the same recipe"
        )


@public
def make_nvfp4_global_scale(
    input_tensor: torch.Tensor,
    per_token_activation: bool,
    global_scale: float | None = None,
    nvfp4_4over6_config: NVFP44Over6Config | None = None,
) -> torch.Tensor:
    """Return the global scale [1] float32 for a quantiser with that recipe.

    Args:
        input_tensor: whose largest magnitude decides, where nothing else does.
        per_token_activation: return the base of rows' own scales.
        global_scale: return this one.
        nvfp4_4over6_config: the recipe; None: four-over-six is off.
    """
    if per_token_activation:
        scale = 1.0 / span(nvfp4_4over6_config)
    elif global_scale is not None:
        scale = global_scale
    else:
        if not input_tensor.numel():
            raise ValueError(
                "flashinfer.make_nvfp4_global_scale: input_tensor has no elements, so no largest "
                "magnitude; pass global_scale"
            )
        amax = input_tensor.float().abs().max()
        largest = torch.full_like(amax, torch.finfo(torch.float32).max)
        found = torch.where(amax == 0, largest, span(nvfp4_4over6_config) / amax)
        return found.reshape(1)
    return torch.tensor([scale], dtype=torch.float32, device=input_tensor.device)
