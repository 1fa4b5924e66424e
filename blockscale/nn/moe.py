"""MoE layers: `FusedMoE` with its `Router` and `SharedExpert`, alone or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.entry import CODES
from blockscale.checkpoints.experts.experts import Experts, biases_of
from blockscale.checkpoints.experts.modules import ROUTERS, Group, pick, runs
from blockscale.checkpoints.experts.stack import split_rows
from blockscale.checkpoints.files.safetensors import DTYPES, TensorInfo, read
from blockscale.checkpoints.schemes.layout import Laid
from blockscale.nn import linear
from blockscale.nn.config import moe_options
from blockscale.nn.prepared import Device, Prepared, checked_device, opened
from blockscale.ops import checks
from blockscale.ops.moe import layer as ops_moe
from blockscale.ops.moe import tiles
from blockscale.ops.moe.layer import Options
from blockscale.ops.moe.weights import TENSORS, MoeWeights, laid_out, with_biases
from blockscale.ops.weights import check_rounded
from blockscale.specs.moe import ACTIVATIONS, BYTE_ACTS, GATED, LAYOUTS, SCORINGS
from blockscale.specs.plans.moe import PREFERRED

Tensor = torch.Tensor

WHERE = "FusedMoE.from_checkpoint"

_CORRECTIONS = (
    *("gate.e_score_correction_bias", "e_score_correction_bias"),
    *("router.e_score_correction_bias", "moe_statics.e_score_correction_bias"),
)
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_LATENT = ("fc1_latent_proj", "fc2_latent_proj")


class FusedMoE(Prepared):
    """The experts of an MoE layer, with what chooses them and what is added to them.

    The result is ``fused_moe(hidden, weights, *moe_route(logits, top_k))``, plus that of the shared
    expert where there is one.
    """

    _names = TENSORS
    _more = ("correction_bias", "a1_scale", "a2_scale")
    _kind = MoeWeights
    w13: Tensor | None
    correction_bias: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None

    def __init__(
        self,
        weights: MoeWeights | None,
        top_k: int,
        *,
        activation: str = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        act_fmt: str | None = None,
        a1_scale: Tensor | None = None,
        a2_scale: Tensor | None = None,
        fast_accum: bool = False,
        scoring: str = "softmax",
        renormalize: bool = True,
        correction_bias: Tensor | None = None,
        n_group: int | None = None,
        topk_group: int | None = None,
        scale: float = 1.0,
        router: torch.nn.Module | None = None,
        shared: torch.nn.Module | None = None,
        shared_experts: int = 0,
        weight_on_input: bool = False,
        ep: Any = None,
    ) -> None:
        """Take prepared weights and the options of the functions.

        Args:
            weights: of `blockscale.prepare_moe_weights`; None: to be loaded.
            top_k: experts of a token.
            activation, alpha, limit, act_fmt, a1_scale, a2_scale, fast_accum: as in
                `blockscale.fused_moe`.
            scoring, renormalize, correction_bias, n_group, topk_group, scale: as in
                `blockscale.moe_route`.
            router: makes logits [T, E] of hidden; None: the caller passes logits, or ids and
                weights.
            shared: what is added for every token: a module from [T, H] to [T, H].
            shared_experts: of the weights' experts, the last so many have every token, with weight
                1: shared experts in the same launches as the others.  The router knows the first
                ones alone, and top_k counts these.
            weight_on_input: top_k=1 only: the weight multiplies the expert's input and not its
                result, as in Llama 4.
            ep: `blockscale.distributed.ExpertParallel`: the weights are those of this rank's
                experts, all else is of the whole layer; shared runs beside the exchange.
        """
        super().__init__()
        checks.choice("FusedMoE", "activation", activation, ACTIVATIONS)
        checks.choice("FusedMoE", "scoring", scoring, SCORINGS)
        if not isinstance(weights, MoeWeights | None):
            raise TypeError(
                f"FusedMoE: weights is a {type(weights).__name__}, not prepared weights; pass what "
                "prepare_moe_weights() returns for them"
            )
        if weights is None:
            self._hold({"gated": activation in GATED}, {})
        else:
            self._hold(weights.meta(), dict(weights.tensors()))
        self.top_k = top_k
        self.activation, self.alpha, self.limit = activation, alpha, limit
        self.act_fmt, self.fast_accum = act_fmt, fast_accum
        self.scoring, self.renormalize = scoring, renormalize
        self.n_group, self.topk_group, self.scale = n_group, topk_group, scale
        if weight_on_input and top_k != 1:
            raise ValueError(
                f"FusedMoE: weight_on_input=True with top_k={top_k}, but a token's input is the "
                "same for all its experts; pass top_k=1"
            )
        if ep is not None:
            ep.check_act_fmt("FusedMoE", act_fmt)
        if shared_experts and (weight_on_input or ep is not None):
            raise ValueError(
                f"FusedMoE: shared_experts={shared_experts} goes neither with weight_on_input nor "
                "with ep, whose experts have other tokens; pass them as a module, shared="
            )
        self.weight_on_input, self.ep = weight_on_input, ep
        self.shared_experts = shared_experts
        self.register_buffer("correction_bias", correction_bias)
        self.register_buffer("a1_scale", a1_scale)
        self.register_buffer("a2_scale", a2_scale)
        self.router, self.shared = router, shared

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path | Checkpoint,
        name: str,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.bfloat16,
        fmt: str | None = None,
        layout: str | None = None,
        rounded: bool = False,
        **options: Any,
    ) -> FusedMoE:
        """Return the MoE layer ``name`` of a checkpoint: experts, router and shared expert.

        How experts are chosen, and the activation, come from config.json.

        Args:
            checkpoint: a folder, a file, or what `blockscale.checkpoints.open` returned.
            name: of the module, e.g. "model.layers.0.mlp".
            device: where the weights go; None: the CPU.
            dtype: of the activations.
            fmt: "nvfp4" or "mxfp4": what experts of more bits are quantised to; None: 4-bit ones
                only, which are not rounded.
            layout: as in `prepare_moe_weights`; None: that of the device.
            rounded: of NVFP4 experts and an act_fmt among the options, as there.
            options: of the constructor, in place of what config.json says; ``router`` and
                ``shared`` in place of the checkpoint's.  With ``ep`` this rank's experts alone are
                read and prepared.

        Raises:
            CheckpointError: there are no experts of this name or they do not fit each other, or
                config.json does not say how they are chosen.
            ValueError: there is no such device, or ep is of another number of experts.
        """
        device = checked_device(WHERE, device)
        checks.choice(WHERE, "layout", layout, (None, *LAYOUTS))
        how = layout, rounded
        return _load(opened(checkpoint), name, device, dtype, fmt, how, options)

    @property
    def weights(self) -> MoeWeights:
        """The prepared weights: the module's buffers."""
        if self.w13 is None:
            raise ValueError(
                "FusedMoE: it has no weights yet; load a state_dict, or pass prepared weights"
            )
        return self._held(MoeWeights)

    def forward(
        self,
        hidden: Tensor,
        logits: Tensor | None = None,
        *,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        """Return [..., H] of hidden [..., H].

        Args:
            hidden: rows of tokens.
            logits: [..., E]; None: the router makes them.
            topk_ids, topk_weights: [..., k], of a router of the caller's, in place of logits.
        """
        weights = self.weights  # first: that they are missing matters more than what a router says
        rows = hidden.reshape(-1, hidden.shape[-1])
        if topk_ids is None:
            logits = self._logits(rows) if logits is None else logits
            experts = weights.experts if self.ep is None else self.ep.config.experts
            experts -= self.shared_experts
            if 0 < experts != logits.shape[-1]:
                raise ValueError(
                    f"FusedMoE: logits has {logits.shape[-1]} columns, but the layer has {experts} "
                    "experts to choose from; pass one for each"
                )
            topk_ids, topk_weights = self.route(logits.reshape(-1, logits.shape[-1]))
        elif topk_weights is not None:
            topk_ids = topk_ids.reshape(-1, topk_ids.shape[-1])
            topk_weights = topk_weights.reshape(-1, topk_weights.shape[-1])
        if self.shared_experts and topk_ids is not None and topk_weights is not None:
            topk_ids, topk_weights = self._with_shared(weights, topk_ids, topk_weights)
        options = Options(
            *(self.activation, self.alpha, self.limit, self.act_fmt, self.fast_accum),
            *(self.a1_scale, self.a2_scale),
        )
        inputs = rows
        if self.weight_on_input and topk_weights is not None:
            if topk_weights.shape[-1] != 1:
                raise ValueError(
                    f"FusedMoE: topk_weights has {topk_weights.shape[-1]} columns, but with "
                    "weight_on_input a token has one expert; pass [..., 1]"
                )
            inputs = (rows.float() * topk_weights.float()).to(rows.dtype)
            topk_weights = torch.ones_like(topk_weights)
        shared = self.shared
        if self.ep is not None:
            beside = None if shared is None else (lambda: shared(rows))
            y = self.ep.run(inputs, weights, topk_ids, topk_weights, options, None, beside)
            return y.reshape(hidden.shape)
        y = ops_moe.run_experts(inputs, weights, topk_ids, topk_weights, options, None)
        if self.shared is not None:
            y.add_(self.shared(rows))
        return y.reshape(hidden.shape)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights of logits [T, E], by the module's options."""
        return ops_moe.moe_route(
            logits,
            self.top_k,
            scoring=self.scoring,
            renormalize=self.renormalize,
            correction_bias=self.correction_bias,
            n_group=self.n_group,
            topk_group=self.topk_group,
            scale=self.scale,
        )

    def _with_shared(
        self, weights: MoeWeights, ids: Tensor, factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids and weights with a column for each shared expert; others have no token by an id."""
        first = weights.experts - self.shared_experts
        if not 0 < first < weights.experts:
            raise ValueError(
                f"FusedMoE: shared_experts={self.shared_experts} of {weights.experts} experts; "
                f"pass 1 to {weights.experts - 1}, or 0 for none"
            )
        own = torch.arange(first, weights.experts, dtype=ids.dtype, device=ids.device)
        ids = torch.where((ids >= 0) & (ids < first), ids, -1)
        ones = factors.new_ones((len(factors), self.shared_experts))
        return torch.cat((ids, own.expand(len(ids), -1)), 1), torch.cat((factors, ones), 1)

    def _logits(self, rows: Tensor) -> Tensor:
        if self.router is None:
            raise ValueError(
                "FusedMoE: neither logits nor topk_ids are given, and the module has no router; "
                "pass one of them, or a router to the constructor"
            )
        made: Tensor = self.router(rows)
        return made

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        if meta.get("gated") != self._meta["gated"]:
            raise ValueError(
                f"the state has gated={meta.get('gated')} experts, but the module's activation "
                f"is {self.activation!r}; load a state of the same activation"
            )

    def extra_repr(self) -> str:
        """Return sizes and formats."""
        names = ("experts", "hidden", "intermediate", "fmt", "layout")
        known = ", ".join(f"{name}={self._meta.get(name)}" for name in names)
        return f"{known}, top_k={self.top_k}, activation={self.activation}"


class Router(Prepared):
    """Logits of experts, float32 [T, E] of rows [T, H]: ``x @ w.T + bias``, all in float32."""

    _names = ("weight", "bias")
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take a weight [E, H] and a bias [E] or None."""
        super().__init__()
        floats = None if bias is None else bias.detach().float()
        self._hold({}, {"weight": weight.detach().float(), "bias": floats})

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return torch.nn.functional.linear(x.float(), self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"hidden={self.weight.shape[1]}, experts={self.weight.shape[0]}"


class SharedExpert(Prepared):
    """``down(act(gate(x), up(x)))``, times ``sigmoid(x @ factor.T)`` where there is a factor."""

    _names = ("factor",)
    factor: Tensor | None

    def __init__(
        self,
        gate: torch.nn.Module | None,
        up: torch.nn.Module,
        down: torch.nn.Module,
        factor: Tensor | None = None,
        activation: str = "swiglu",
    ) -> None:
        """Take layers from [T, H] to [T, I] and back.

        Args:
            gate: None with "relu2".
            up, down: layers.
            factor: [1, H], or None.
            activation: "swiglu", "gelu_tanh" or "relu2", as in `blockscale.fused_moe`.
        """
        super().__init__()
        checks.choice("SharedExpert", "activation", activation, ("swiglu", "gelu_tanh", "relu2"))
        self._hold({}, {"factor": None if factor is None else factor.detach().float()})
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] of x [T, H]; what is between the layers is float32."""
        up = self.up(x).float()
        if self.gate is None:
            h = up.relu().square()
        elif self.activation == "swiglu":
            h = torch.nn.functional.silu(self.gate(x).float()) * up
        else:
            h = torch.nn.functional.gelu(self.gate(x).float(), approximate="tanh") * up
        y: Tensor = self.down(h.to(x.dtype))
        if self.factor is None:
            return y
        share = torch.nn.functional.linear(x.float(), self.factor).sigmoid()
        return (y.float() * share).to(x.dtype)


# ---- From a checkpoint --------------------------------------------------------------------------


def _load(
    ckpt: Checkpoint,
    name: str,
    device: Device,
    dtype: torch.dtype,
    fmt: str | None,
    how: tuple[str | None, bool],
    options: dict[str, Any],
) -> FusedMoE:
    """Return the MoE layer ``name``: experts, router, shared expert; ``how``: layout, rounded."""
    stem = name.rstrip(".").removesuffix(".experts")
    latent = next((k for k in _LATENT if f"{stem}.{k}.weight" in ckpt.entries), None)
    if latent is not None:
        raise CheckpointError(
            f"{stem} projects its tokens before and after the experts ({latent}), which FusedMoE "
            "does not; load the parts one by one"
        )
    cuda = device is not None and torch.device(device).type == "cuda"
    (layout, rounded), act_fmt, ep = how, options.get("act_fmt"), options.get("ep")
    laid, group = _laid(ckpt, stem), ckpt.group(stem)
    total = laid.facts["experts"] if laid is not None else 0 if group is None else group.total
    mine = None if ep is None or not total else _own_experts(ep, act_fmt, stem, total)
    chosen = cuda and layout is None and act_fmt in BYTE_ACTS and not rounded
    if laid is not None and chosen and (laid.fmt, laid.group) in PREFERRED:
        laid = None  # its layout is the one that prepare() chooses
    if laid is None:
        experts = _experts(ckpt, stem, fmt, mine)
        said = moe_options(ckpt.configs.get("config.json", {}), experts.gated, options, stem)
        how_prepared = {"activation": said["activation"], "device": device, "act_fmt": act_fmt}
        weights = experts.prepare(dtype, layout, **how_prepared, rounded=rounded)
    else:
        if rounded:
            check_rounded(WHERE, laid.fmt, BYTE_ACTS, (act_fmt, layout), not cuda)
        weights = _with_biases(ckpt, _tiled(laid, mine), stem, mine)
        said = moe_options(ckpt.configs.get("config.json", {}), weights.gated, options, stem)
        wanted = "tiles64e" if rounded else layout or ("tiles64" if cuda else "linear")
        if weights.layout != wanted:
            weights = laid_out(WHERE, weights.to_linear(), dtype, wanted, rounded)
    router = said.pop("router", None) or _router(ckpt, stem, total)
    shared = said.pop("shared", None) or _shared(ckpt, stem, said["activation"], device)
    if said.get("correction_bias") is None:
        said["correction_bias"] = _correction(ckpt, stem, total)
    made = FusedMoE(weights, **said, router=router, shared=shared)
    return made if device is None else made.to(device)


def _own_experts(ep: Any, act_fmt: str | None, stem: str, total: int) -> Sequence[int]:
    """Return the experts of this rank, after what can be checked before any is read."""
    ep.check_act_fmt(WHERE, act_fmt)
    if ep.config.experts != total:
        raise ValueError(
            f"{WHERE}: {stem} has {total} experts, but ep is of {ep.config.experts}; construct it "
            f"with experts={total}"
        )
    mine: Sequence[int] = ep.local_experts
    return mine


def _experts(ckpt: Checkpoint, stem: str, fmt: str | None, mine: Sequence[int] | None) -> Experts:
    if stem not in ckpt and f"{stem}.experts" not in ckpt:
        raise CheckpointError(
            f"{ckpt.path} has no experts below {stem!r}; give the name of an MoE layer, one of "
            f"{', '.join(ckpt.modules[:3]) or 'which there is none'}"
        )
    found = ckpt.experts(stem, mine)
    if found.fmt in CODES:
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


def _laid(ckpt: Checkpoint, stem: str) -> Laid | None:
    """Return one of the weights of experts that are stored in layout "tiles64"."""
    return next(
        (
            entry
            for entry in ckpt.entries.values()
            if isinstance(entry, Laid)
            and entry.layout == "tiles64"
            and entry.name.startswith(f"{stem}.")
        ),
        None,
    )


def _tiled(laid: Laid, mine: Sequence[int] | None) -> MoeWeights:
    """Return experts that are stored in layout "tiles64", as they are, but without biases."""
    facts, parts = laid.facts, laid.facts["whole"]
    tensors = {name: _read(parts[name], mine) for name in TENSORS if name in parts}
    count = facts["experts"] if mine is None else len(mine)
    ones = torch.ones(count)
    tensors.setdefault("w13_global", ones[:, None].repeat(1, 2))
    tensors.setdefault("w2_global", ones)
    int4 = facts["fmt"] == "int4"
    dtype = str(DTYPES[facts["scale_dtype"]]).removeprefix("torch.") if int4 else None
    names = ("fmt", "group", "experts", "hidden", "intermediate", "gated")
    meta = {name: facts[name] for name in names} | {"experts": count}
    meta |= {"zero": int4, "layout": "tiles64", "revision": tiles.REVISION, "dtype": dtype}
    return MoeWeights.of(meta, tensors)


def _read(info: TensorInfo, mine: Sequence[int] | None) -> Tensor:
    """Return a tensor of all experts, or of some, in memory of its own."""
    total, rest = info.shape[0], info.shape[1:]
    wanted = [(0, total)] if mine is None else runs(mine)
    return torch.cat([read(info.piece(a, b, total, (b - a, *rest))) for a, b in wanted])


def _with_biases(
    ckpt: Checkpoint, weights: MoeWeights, stem: str, mine: Sequence[int] | None
) -> MoeWeights:
    """Return tiled weights with the biases of the checkpoint, which are stored as they were."""
    group = ckpt.group(stem)
    if group is None or not group.biases:
        return weights
    group = group if mine is None else pick(group, mine)
    up, down = biases_of(group, weights.gated, ckpt.facts)
    if up is not None and weights.gated and _interleaved(group):
        up = split_rows(up)
    return with_biases(weights, up, down)


def _interleaved(group: Group) -> bool:
    """Return whether gate and up rows of experts in a layout alternated before."""
    found = [e for stored in group.weights.values() for e in stored.values()]
    return any(isinstance(e, Laid) and e.facts.get("interleaved") for e in found)


def _router(ckpt: Checkpoint, stem: str, experts: int) -> Router | None:
    for leaf in ROUTERS:
        if f"{stem}.{leaf}.weight" in ckpt.entries:
            weight = ckpt.weight(f"{stem}.{leaf}.weight")
            if len(weight.shape) != 2 or weight.shape[0] != experts:
                raise CheckpointError(
                    f"{weight.name} is {list(weight.shape)}, but {stem} has {experts} experts; "
                    "copy the checkpoint again"
                )
            return Router(weight.dequantize(torch.float32), linear.bias_of(ckpt, weight))
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
    for leaf in _SHARED:
        head = f"{stem}.{leaf}"
        if not ckpt.below(head):
            continue
        names = [f"{head}.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
        gate, up, down = (linear.load(ckpt, n, device=device) if n in ckpt else None for n in names)
        if up is None or down is None or (gate is None) != (activation == "relu2"):
            raise CheckpointError(
                f"{head} has {', '.join(ckpt.below(head)[:4])}, but must have up_proj and "
                "down_proj, and gate_proj if experts have gates; pass shared= to the call"
            )
        factor = f"{stem}.{leaf}_gate.weight"
        scale = ckpt.weight(factor).dequantize(torch.float32) if factor in ckpt.entries else None
        return SharedExpert(gate, up, down, scale, activation)
    return None
