"""Modules whose weights come from a checkpoint: `nn.Linear.from_checkpoint` and the like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockscale import checkpoints
from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.experts.experts import biases_of
from blockscale.checkpoints.experts.rows import split_rows
from blockscale.checkpoints.files.safetensors import read
from blockscale.checkpoints.schemes.layout import Laid
from blockscale.checkpoints.schemes.tiles import FLOATS
from blockscale.nn import int4 as nn_int4
from blockscale.nn.config import moe_options
from blockscale.nn.parts import equal, stacked
from blockscale.ops.moe.weights import TENSORS, MoeWeights, with_biases

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint
    from blockscale.checkpoints.experts.experts import Experts
    from blockscale.checkpoints.experts.modules import Group
    from blockscale.checkpoints.weight import Weight
    from blockscale.nn import FusedMoE, Linear, Router, SharedExpert

Tensor = torch.Tensor
Device = str | torch.device | None

CODES = ("nvfp4", "mxfp4")
_PLAIN = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_ROUTERS = ("gate", "router", "router.layer", "router.linear", "router.classifier", "gate.wg")
_CORRECTIONS = (
    *("gate.e_score_correction_bias", "e_score_correction_bias"),
    *("router.e_score_correction_bias", "moe_statics.e_score_correction_bias"),
)
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_LATENT = ("fc1_latent_proj", "fc2_latent_proj")


def opened(checkpoint: str | Path | Checkpoint) -> Checkpoint:
    """Return the checkpoint, opened if a folder is given."""
    if isinstance(checkpoint, (str, Path)):
        return checkpoints.open(checkpoint)
    return checkpoint


# ---- Linear -------------------------------------------------------------------------------------


def linear(
    ckpt: Checkpoint,
    names: str | Sequence[str],
    fmt: str | None,
    dtype: torch.dtype | None,
    device: Device,
) -> Linear:
    """Return the layer of one weight, or of several that are one above the other."""
    listed = [names] if isinstance(names, str) else [*names]
    if not listed:
        raise ValueError("Linear.from_checkpoint: no name is given; pass one, or a list of them")
    if fmt not in (None, "dense", *CODES):
        raise ValueError(
            f"Linear.from_checkpoint: fmt={fmt!r}, but must be None, 'dense', "
            f"{' or '.join(map(repr, CODES))}"
        )
    found = [_matrix(ckpt, name) for name in listed]
    biases = [_bias(ckpt, w) for w in found]
    if fmt is None and all(w.fmt == "int4" for w in found):
        return nn_int4.of_weights(found, biases, dtype, device)
    made = [_layer(w, b, fmt, dtype) for w, b in zip(found, biases, strict=True)]
    return made[0] if len(made) == 1 else _joined(listed, made)


def _matrix(ckpt: Checkpoint, name: str) -> Weight:
    weight = ckpt.weight(name)
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.name} has the shape {list(weight.shape)}, but a linear layer's weight is "
            "[N, K]; experts are for FusedMoE.from_checkpoint"
        )
    return weight


def _bias(ckpt: Checkpoint, weight: Weight) -> Tensor | None:
    name = weight.name.removesuffix(".weight") + ".bias"
    if name not in ckpt.entries:
        return None
    bias = ckpt.weight(name)
    if bias.data is None or bias.shape != weight.shape[:1] or not bias.data.is_floating_point():
        raise CheckpointError(
            f"{name} is {bias.fmt} {list(bias.shape)}, but must be {weight.shape[0]} floats, one "
            f"of each row of {weight.name}; copy the checkpoint again"
        )
    return bias.data.float()


def _layer(
    weight: Weight, bias: Tensor | None, fmt: str | None, dtype: torch.dtype | None
) -> Linear:
    from blockscale.nn import Linear

    smooth = weight.pre_quant_scale
    if weight.fmt in CODES and fmt in (None, weight.fmt):
        top = weight.global_scale
        return Linear(
            _own(weight.packed),
            _own(weight.block_scale),
            weight.fmt,
            None if top is None else top.reshape(1).float(),
            bias,
            pre_quant_scale=None if smooth is None else smooth.float(),
        )
    if fmt is None and weight.fmt == "int4":
        raise CheckpointError(
            f"{weight.name} is int4 and others are not, so their rows cannot be one weight; load "
            "them one by one and concatenate what they give, or pass fmt='dense'"
        )
    if weight.fmt in CODES and fmt in CODES:
        raise CheckpointError(
            f"{weight.name} is {weight.fmt} already, and rounding it to {fmt} as well would lose "
            "more; leave fmt out, or pass fmt='dense'"
        )
    plain = weight.fmt in _PLAIN
    if not plain and weight.fmt not in (*CODES, "int4", "fp8"):
        raise CheckpointError(
            f"{weight.name} is {weight.fmt}, which is no weight of a linear layer; choose another"
        )
    if fmt in CODES:
        made = Linear.from_float(weight.dequantize(_PLAIN.get(weight.fmt, torch.float32)), fmt)
        values = (made.packed, made.block_scale, fmt, made.global_scale, bias)
        return Linear(*values, pre_quant_scale=None if smooth is None else smooth.float())
    dense = weight.dequantize(dtype or _PLAIN.get(weight.fmt, torch.bfloat16))
    return Linear(
        fmt="dense",
        bias=bias,
        weight=dense if dense is not weight.data else _own(dense),
        pre_quant_scale=None if smooth is None else smooth.float(),
    )


def _own(value: Tensor | None) -> Tensor | None:
    """Return the tensor in memory of its own, so that no file has to stay as it is."""
    return None if value is None else value.clone(memory_format=torch.contiguous_format)


def _joined(names: Sequence[str], made: Sequence[Linear]) -> Linear:
    """Return one layer of the rows of several.

    Raises:
        CheckpointError: their formats, global scales or pre_quant_scales differ.
    """
    from blockscale.nn import Linear

    first = made[0]
    for name, other in zip(names[1:], made[1:], strict=True):
        same = ("global_scale", "pre_quant_scale")
        what = next((f for f in same if not equal(getattr(first, f), getattr(other, f))), None)
        if other.fmt != first.fmt or what is not None:
            raise CheckpointError(
                f"{names[0]!r} and {name!r} differ in {what or 'format'}, so their rows cannot be "
                "one weight without rounding; load them one by one and concatenate what they give"
            )
    dtypes = {layer.weight.dtype for layer in made if layer.weight is not None}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{', '.join(map(repr, names))} have different dtypes; pass dtype= for all of them"
        )
    parts = {
        name: stacked([getattr(layer, name) for layer in made])
        for name in ("packed", "block_scale", "weight")
    }
    bias = None
    if any(layer.bias is not None for layer in made):
        bias = torch.cat(
            [
                torch.zeros(layer.out_features) if layer.bias is None else layer.bias
                for layer in made
            ]
        )
    return Linear(
        **parts,
        fmt=first.fmt,
        global_scale=first.global_scale,
        bias=bias,
        pre_quant_scale=first.pre_quant_scale,
    )


# ---- FusedMoE -----------------------------------------------------------------------------------


def moe(
    ckpt: Checkpoint,
    name: str,
    device: Device,
    dtype: torch.dtype,
    fmt: str | None,
    layout: str | None,
    options: dict[str, Any],
) -> FusedMoE:
    """Return the MoE layer ``name``: experts, router and shared expert."""
    from blockscale.nn import FusedMoE

    stem = name.rstrip(".").removesuffix(".experts")
    latent = next((k for k in _LATENT if f"{stem}.{k}.weight" in ckpt.entries), None)
    if latent is not None:
        raise CheckpointError(
            f"{stem} projects its tokens before and after the experts ({latent}), which FusedMoE "
            "does not; load the parts one by one"
        )
    cuda = device is not None and torch.device(device).type == "cuda"
    layout = layout or ("tiles64" if cuda else "linear")
    weights, experts = _tiled(ckpt, stem), None
    if weights is None:
        experts = _experts(ckpt, stem, fmt)
        gated = experts.gated
    else:
        gated = weights.gated
        weights = _with_biases(ckpt, weights, stem)
    said = moe_options(ckpt.configs.get("config.json", {}), gated, options, stem)
    if experts is not None:
        weights = experts.prepare(dtype, layout, activation=said["activation"])
    assert weights is not None
    if layout == "linear":
        weights = weights.to_linear()
    router = said.pop("router", None) or _router(ckpt, stem, weights.experts)
    shared = said.pop("shared", None) or _shared(ckpt, stem, said["activation"], device)
    if said.get("correction_bias") is None:
        said["correction_bias"] = _correction(ckpt, stem, weights.experts)
    made = FusedMoE(weights, **said, router=router, shared=shared)
    return made if device is None else made.to(device)


def _experts(ckpt: Checkpoint, stem: str, fmt: str | None) -> Experts:
    if stem not in ckpt and f"{stem}.experts" not in ckpt:
        raise CheckpointError(
            f"{ckpt.path} has no experts below {stem!r}; give the name of an MoE layer, one of "
            f"{', '.join(ckpt.modules[:3]) or 'which there is none'}"
        )
    found = ckpt.experts(stem)
    if found.fmt in (*CODES, "int4"):
        if fmt not in (None, found.fmt):
            raise CheckpointError(
                f"{found.name} is {found.fmt} already, and rounding it to {fmt} as well would lose "
                "more; leave fmt out"
            )
        return found
    if fmt is None:
        raise CheckpointError(
            f"{found.name} is {found.fmt}, but kernels take 4-bit experts; pass fmt='nvfp4' or "
            "'mxfp4' to quantise it, or run `blockscale convert` once"
        )
    return found.quantized(fmt)


def _tiled(ckpt: Checkpoint, stem: str) -> MoeWeights | None:
    """Return experts that are stored in layout "tiles64", as they are, but without biases."""
    laid = next(
        (
            entry
            for entry in ckpt.entries.values()
            if isinstance(entry, Laid)
            and entry.layout == "tiles64"
            and entry.name.startswith(f"{stem}.")
        ),
        None,
    )
    if laid is None:
        return None
    facts, parts = laid.facts, laid.facts["whole"]
    tensors = {name: _own(read(parts[name])) for name in TENSORS if name in parts}
    ones = torch.ones(facts["experts"])
    tensors.setdefault("w13_global", ones[:, None].repeat(1, 2))
    tensors.setdefault("w2_global", ones)
    int4 = facts["fmt"] == "int4"
    dtype = str(FLOATS[facts["scale_dtype"]]).removeprefix("torch.") if int4 else None
    names = ("fmt", "group", "experts", "hidden", "intermediate", "gated")
    meta = {name: facts[name] for name in names}
    return MoeWeights.of({**meta, "zero": int4, "layout": "tiles64", "dtype": dtype}, tensors)


def _with_biases(ckpt: Checkpoint, weights: MoeWeights, stem: str) -> MoeWeights:
    """Return tiled weights with the biases of the checkpoint, which are stored as they were."""
    group = ckpt.group(stem)
    if group is None or not group.biases:
        return weights
    up, down = biases_of(group, weights.gated, ckpt.facts)
    if up is not None and weights.gated and _interleaved(group):
        up = split_rows(up)
    return with_biases(weights, up, down)


def _interleaved(group: Group) -> bool:
    """Return whether gate and up rows of experts in a layout alternated before."""
    found = [e for stored in group.weights.values() for e in stored.values()]
    return any(isinstance(e, Laid) and e.facts.get("interleaved") for e in found)


def _router(ckpt: Checkpoint, stem: str, experts: int) -> Router | None:
    from blockscale.nn import Router

    for leaf in _ROUTERS:
        if f"{stem}.{leaf}.weight" in ckpt.entries:
            weight = ckpt.weight(f"{stem}.{leaf}.weight")
            if len(weight.shape) != 2 or weight.shape[0] != experts:
                raise CheckpointError(
                    f"{weight.name} is {list(weight.shape)}, but {stem} has {experts} experts; "
                    "copy the checkpoint again"
                )
            return Router(weight.dequantize(torch.float32), _bias(ckpt, weight))
    return None


def _correction(ckpt: Checkpoint, stem: str, experts: int) -> Tensor | None:
    for leaf in _CORRECTIONS:
        name = f"{stem}.{leaf}"
        if name in ckpt.entries:
            value = ckpt.weight(name).dequantize(torch.float32).reshape(-1)
            if value.numel() != experts:
                raise CheckpointError(
                    f"{name} has {value.numel()} values, but there are {experts} experts; copy "
                    "the checkpoint again"
                )
            return value.clone()
    return None


def _shared(ckpt: Checkpoint, stem: str, activation: str, device: Device) -> SharedExpert | None:
    from blockscale.nn import SharedExpert

    for leaf in _SHARED:
        head = f"{stem}.{leaf}"
        if not ckpt.below(head):
            continue
        names = [f"{head}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        gate, up, down = (linear(ckpt, n, None, None, device) if n in ckpt else None for n in names)
        if up is None or down is None or (gate is None) != (activation == "relu2"):
            raise CheckpointError(
                f"{head} has {', '.join(ckpt.below(head)[:4])}, but must have up_proj and "
                "down_proj, and gate_proj if experts have gates; pass shared= to the call"
            )
        factor = f"{stem}.{leaf}_gate.weight"
        scale = ckpt.weight(factor).dequantize(torch.float32) if factor in ckpt.entries else None
        return SharedExpert(gate, up, down, scale, activation)
    return None
