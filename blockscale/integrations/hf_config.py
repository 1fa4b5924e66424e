"""Which checkpoints are ours: `BlockscaleConfig`, and how transformers finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from blockscale.checkpoints.entry import weight_groups
from blockscale.checkpoints.files.folder import quantization_in
from blockscale.integrations.hf_interfaces import (
    CONFIGS,
    PreTrainedConfig,
    QuantizationConfigMixin,
    register_quantization_config,
)
from blockscale.ops import checks

METHOD = "blockscale"
FORMATS = ("nvfp4", "mxfp4", "int4")
METHODS = ("modelopt", "compressed-tensors", "mxfp4", "awq", "gptq")
"""Names of other tools in ``quant_method`` that are looked at here first."""

_WHERE = "BlockscaleConfig"
_MARK = "_blockscale"


class BlockscaleConfig(QuantizationConfigMixin):
    """What a model becomes while `from_pretrained` loads it: pass it as ``quantization_config``.

    Every `torch.nn.Linear` and every module of experts of a plain checkpoint is quantised, one at a
    time.  Left as they are: embeddings, lm_head, weights that are tied, norms, routers, what
    ``skip`` names, and sizes that the format does not hold.  A checkpoint that is quantised needs
    none; weights of 4 bits stay as they are stored.

    Attributes:
        fmt: "nvfp4", "mxfp4" or "int4" (with zero points).
        skip: names of modules, or of what is above them, with or without the beginning, also
            patterns: "o_proj", "model.layers.0", "*.shared_expert".
        group_size: int4: 32, 64 or 128 values that share a scale; None: the most that divides K.
    """

    quant_method = METHOD

    def __init__(
        self,
        fmt: str = "nvfp4",
        skip: Sequence[str] = (),
        group_size: int | None = None,
        *,
        stored: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the format, and what is left out.

        Args:
            fmt, skip, group_size: see the class.
            stored: what the configuration of a quantised checkpoint says; from_pretrained sets it.

        Raises:
            ValueError: there is no such format, or group of it.
            TypeError: skip is no sequence of names.
        """
        checks.choice(_WHERE, "fmt", fmt, FORMATS)
        allowed = (None, 32, 64, 128) if fmt == "int4" else (None,)
        checks.choice(_WHERE, "group_size", group_size, allowed)
        if isinstance(skip, str) or not all(isinstance(name, str) for name in skip):
            raise TypeError(f"{_WHERE}: skip={skip!r} is no list of names; pass ['o_proj'], say")
        self.quant_method = METHOD
        self.fmt, self.skip, self.group_size = fmt, tuple(skip), group_size
        self.stored = None if stored is None else dict(stored)

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the configuration of what config.json says, and ``kwargs`` if asked for them."""
        if config_dict.get("quant_method") == METHOD and "fmt" in config_dict:
            names = ("fmt", "skip", "group_size")
            made = cls(**{name: config_dict[name] for name in names if name in config_dict})
        else:
            made = cls(stored=config_dict)
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json is to say."""
        if self.stored is not None:
            return {**self.stored}
        said = {"quant_method": METHOD, "fmt": self.fmt, "skip": [*self.skip]}
        return said if self.group_size is None else {**said, "group_size": self.group_size}


def is_ours(said: Mapping[str, Any]) -> bool:
    """Return whether the weights that config.json describes have a kernel here."""
    method = str(said.get("quant_method"))
    if method in ("awq", "gptq"):
        form = str(said.get("version") or "gemm").lower()
        return said.get("bits", said.get("w_bit")) == 4 and (method == "gptq" or form == "gemm")
    if method == "compressed-tensors":
        return any(weights.get("num_bits") == 4 for weights in weight_groups(dict(said)))
    return method in (METHOD, *METHODS)


class _Chosen:
    """In place of the class of one ``quant_method``: ours where `is_ours`, else the one before."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def from_dict(self, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Return the configuration of what config.json says."""
        chosen = BlockscaleConfig if is_ours(config_dict) else self.before
        return chosen.from_dict(config_dict, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)


def register() -> None:
    """Let transformers ask us first; what is not ours goes the way it went before."""
    if METHOD not in CONFIGS:
        register_quantization_config(METHOD)(BlockscaleConfig)
    for method in METHODS:
        before = CONFIGS.get(method, BlockscaleConfig)
        if before is not BlockscaleConfig and not isinstance(before, _Chosen):
            CONFIGS[method] = _Chosen(before)
        elif method not in CONFIGS:
            CONFIGS[method] = BlockscaleConfig
    original = PreTrainedConfig.get_config_dict
    if not hasattr(original, _MARK):
        PreTrainedConfig.get_config_dict = classmethod(_reading_others(original.__func__))


def _reading_others(original: Any) -> Any:
    """Return ``get_config_dict`` that also reads hf_quant_config.json and the like of a folder.

    ModelOpt and older tools write them, and some exports have no word of it in config.json.
    """

    @wraps(original)
    def get_config_dict(cls: Any, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        found, rest = original(cls, pretrained_model_name_or_path, **kwargs)
        folder = Path(str(pretrained_model_name_or_path))
        if found and "quantization_config" not in found and folder.is_dir():
            said = quantization_in(folder)
            if said and is_ours(said):
                found = {**found, "quantization_config": said}
        return found, rest

    setattr(get_config_dict, _MARK, True)
    return get_config_dict
