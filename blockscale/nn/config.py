"""What config.json says on MoE layers: how experts are chosen, what is between their GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockscale.base.errors import CheckpointError

Config = Mapping[str, Any]

_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models of several modalities keep the configuration of their text."""
_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k"),
    *("experts_per_token", "num_selected_experts"),
)
_ACTS = ("hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function")
_SWIGLU, _GELU, _RELU2 = ("silu", "swish", "swiglu"), ("gelu_pytorch_tanh", "gelu_new"), ("relu2",)

_SOFTMAX = {"scoring": "softmax"}
_CORRECTED = {"scoring": "sigmoid", "renormalize": True, "groups": True}
_KNOWN: dict[str, dict[str, Any]] = {
    # scoring and renormalize: where config.json has no key for them, or leaves the default out
    "mixtral": {**_SOFTMAX, "renormalize": True},
    "qwen2_moe": {**_SOFTMAX, "renormalize": False},
    "qwen3_moe": {**_SOFTMAX, "renormalize": False},
    "qwen3_next": {**_SOFTMAX, "renormalize": True},
    "qwen3_5_moe_text": {**_SOFTMAX, "renormalize": True},
    "qwen3_vl_moe_text": {**_SOFTMAX, "renormalize": True},
    "qwen3_omni_moe_text": {**_SOFTMAX, "renormalize": True},
    "olmoe": {**_SOFTMAX, "renormalize": False},
    "granitemoe": {**_SOFTMAX, "renormalize": True},
    "gpt_oss": {
        **_SOFTMAX,
        "renormalize": True,
        "activation": "swiglu_oai",
        "alpha": 1.702,
        "limit": 7.0,
    },
    "deepseek_v2": {**_SOFTMAX, "renormalize": False, "groups": True},
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), _CORRECTED),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "dots1", "nemotron_h"), _CORRECTED),
    "minimax_m2": {"scoring": "sigmoid", "renormalize": True},
    "llama4_text": {"scoring": "sigmoid", "renormalize": False, "weight_on_input": True},
}
_ALIASES = {
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "llama4": "llama4_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
}
_NEEDED = ("top_k", "scoring", "renormalize", "activation")


def text_config(config: Config) -> Config:
    """Return the part of config.json that describes the text model."""
    for name in _INNER:
        inner = config.get(name)
        if isinstance(inner, dict):
            found = text_config(inner)
            return {"model_type": config.get("model_type"), **found}
    return config


def moe_options(
    config: Config, gated: bool, given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return the options of `blockscale.nn.FusedMoE` by config.json; ``given`` ones are not asked.

    Raises:
        CheckpointError: config.json does not say one, or says what no kernel does.
    """
    config = text_config(config)
    model = str(config.get("model_type") or "")
    known = _KNOWN.get(_ALIASES.get(model, model), {})
    found: dict[str, Any] = {
        k: known[k] for k in ("scoring", "renormalize", "weight_on_input") if k in known
    }
    top_k = next((config[k] for k in _TOP_K if type(config.get(k)) is int), None)
    if top_k is not None:
        found["top_k"] = top_k
    if isinstance(config.get("norm_topk_prob"), bool) and model != "mixtral":
        found["renormalize"] = config["norm_topk_prob"]
    if config.get("scoring_func") is not None:
        found["scoring"] = config["scoring_func"]
    found.update(_activation(config, known, gated, {**given}, where))
    if known.get("groups") or "scoring_func" in config:
        found.update(_groups(config))
    factor = config.get("routed_scaling_factor")
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        found["scale"] = float(factor)
    merged = {**found, **{k: v for k, v in given.items() if v is not None}}
    missing = [name for name in _NEEDED if name not in merged]
    if missing:
        raise CheckpointError(
            f"{where}: config.json has model_type {model!r} and does not say "
            f"{', '.join(missing)}; pass {', '.join(f'{name}=' for name in missing)}"
        )
    if merged["scoring"] not in ("softmax", "sigmoid"):
        raise CheckpointError(
            f"{where}: config.json has scoring_func {merged['scoring']!r}, which the router does "
            "not know; pass scoring='softmax' or 'sigmoid' if one of them is meant"
        )
    return merged


def dense_activation(config: Config) -> str | None:
    """Return the activation of gates in dense MLPs, as in `blockscale.linear`; None: another."""
    config = text_config(config)
    said = next((config[name] for name in _ACTS if config.get(name)), None)
    known = dict.fromkeys(_SWIGLU, "silu") | dict.fromkeys(_GELU, "gelu_tanh")
    return {**known, **dict.fromkeys(_RELU2, "relu2")}.get(str(said))


def _groups(config: Config) -> dict[str, Any]:
    """Return the groups of experts, unless each token chooses among all."""
    count, kept = config.get("n_group"), config.get("topk_group")
    if config.get("topk_method") == "greedy" or not count or count == 1:
        return {}
    return {"n_group": count, "topk_group": kept or count}


def _activation(
    config: Config, known: Config, gated: bool, given: Config, where: str
) -> dict[str, Any]:
    if "activation" in known:
        made = {name: known[name] for name in ("activation", "alpha", "limit")}
        for name in ("alpha", "limit"):
            said = config.get(f"swiglu_{name}")
            if isinstance(said, (int, float)) and not isinstance(said, bool):
                made[name] = float(said)
        return made
    act = next((config[name] for name in _ACTS if config.get(name)), None)
    if act is None or given.get("activation") is not None:
        return {}
    if gated and act in _SWIGLU:
        return {"activation": "swiglu"}
    if gated and act in _GELU:
        return {"activation": "gelu_tanh"}
    if not gated and act in _RELU2:
        return {"activation": "relu2"}
    raise CheckpointError(
        f"{where}: config.json says {act!r} for experts {'with' if gated else 'without'} gates, "
        f"which no kernel does; it must be {', '.join((*_SWIGLU, *_GELU))} with gates, or relu2 "
        "without; pass activation= if one of them is meant"
    )
