"""Modules on weights that are buffers: a linear layer, a router, a shared expert.

`blockscale.nn` says what they have in common.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockscale.ops import checks
from blockscale.ops import gemm as ops_gemm
from blockscale.ops.quant import dequantize, quantize

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint

Tensor = torch.Tensor

META = "meta"
"""Under which name a state has the description of its weights."""


class Prepared(torch.nn.Module):
    """A module whose weights are buffers that keep their dtypes, and a description of them."""

    _names: tuple[str, ...] = ()
    _meta: dict[str, Any]

    def _hold(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
        self._meta = dict(meta)
        for name in self._names:
            self.register_buffer(name, tensors.get(name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        text = json.dumps(self._meta).encode()
        destination[prefix + META] = torch.tensor([*text], dtype=torch.uint8)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take the weights over from ``state_dict``, on the device of those that are here."""
        *_, missing, _, errors = arguments
        bytes_ = state_dict.pop(prefix + META, None)
        if bytes_ is None:
            missing.append(prefix + META)
        else:
            try:
                self._take(json.loads(bytes(bytes_.tolist())), state_dict, prefix)
            except (KeyError, TypeError, ValueError) as error:
                errors.append(f"{prefix or type(self).__name__}: {error}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _take(self, meta: dict[str, Any], state: Mapping[str, Any], prefix: str) -> None:
        """Make buffers as large as those of the state, which are copied to them afterwards.

        Those that fit stay: captured CUDA graphs read them.
        """
        self._check_meta(meta)
        devices = {value.device for value in self.buffers(recurse=False)}
        device = devices.pop() if devices else None
        made: dict[str, Tensor | None] = {}
        for name in self._names:
            old, new = self._buffers.get(name), state.get(prefix + name)
            if old is not None and new is not None and _alike(old, new):
                made[name] = old
            else:
                made[name] = None if new is None else torch.empty_like(new, device=device)
        self._hold(meta, made)

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        """ValueError unless the module can run on such weights."""


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def stacked(values: Sequence[Tensor | None]) -> Tensor | None:
    """Return the rows of all tensors, one below the other; None where there is none."""
    found = [v for v in values if v is not None]
    if not found:
        return None
    bits = [v.view(torch.uint8) if v.element_size() == 1 else v for v in found]
    return torch.cat(bits).view(found[0].dtype)


def equal(a: Tensor | int | None, b: Tensor | int | None) -> bool:
    """Return whether both are the same, or hold the same."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a is b or a == b


class Linear(Prepared):
    """``y = x @ w.T + bias`` on an NVFP4 or MXFP4 weight (see `blockscale.linear`), or a dense one.

    A dense weight is multiplied in the dtype of x.  On CUDA others are dequantised to it in every
    call, by the kernel of `blockscale.dequantize`, and multiplied by torch: memory is saved, time
    is not.
    """

    _names: tuple[str, ...] = (
        *("packed", "block_scale", "global_scale", "bias", "weight", "pre_quant_scale"),
    )
    packed: Tensor | None
    block_scale: Tensor | None
    global_scale: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        packed: Tensor | None = None,
        block_scale: Tensor | None = None,
        fmt: str = "nvfp4",
        global_scale: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        pre_quant_scale: Tensor | None = None,
    ) -> None:
        """Take what `blockscale.quantize` makes, or a dense weight.

        Args:
            packed: [N, K / 2]; None: to be loaded.
            block_scale: [N, K / block], linear layout.
            fmt: "nvfp4" or "mxfp4"; "dense": ``weight`` is given instead.
            global_scale: [1] float32; None: 1.
            bias: [N]; None: 0.
            weight: [N, K], of any float dtype.
            pre_quant_scale: [K], what x is multiplied with first; None: 1.
        """
        super().__init__()
        tensors = (packed, block_scale, global_scale, bias, weight, pre_quant_scale)
        kept = [None if value is None else value.detach() for value in tensors]
        self._hold({"fmt": fmt}, dict(zip(self._names, kept, strict=True)))

    @classmethod
    def from_float(cls, weight: Tensor | torch.nn.Linear, fmt: str = "nvfp4") -> Linear:
        """Return a layer whose weight [N, K] is the given one, or that of a layer, quantised."""
        bias: Tensor | None = None
        if isinstance(weight, torch.nn.Linear):
            bias, weight = weight.bias, weight.weight
        values = checks.tensor("Linear.from_float", "weight", weight, checks.ACTIVATIONS, dims=2)
        values = values.detach().contiguous()
        scale = None
        if fmt == "nvfp4":  # so that the largest block scale is the largest E4M3 value
            scale = (values.abs().amax().float() / (448 * 6)).clamp(min=1e-30).reshape(1)
        packed, block_scale = quantize(values, fmt, scale)
        return cls(packed, block_scale, fmt, scale, None if bias is None else bias.detach().float())

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path | Checkpoint,
        name: str | Sequence[str],
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        fmt: str | None = None,
    ) -> Linear:
        """Return the layer ``name`` of a checkpoint, with its bias and its pre_quant_scale.

        NVFP4 and MXFP4 weights run as they are stored, without any rounding but that of the
        reciprocal of a global scale that divides (compressed-tensors); an INT4 weight becomes an
        `Int4Linear`.  Plain and FP8 weights stay dense unless ``fmt`` asks for them to be
        quantised.

        Args:
            checkpoint: a folder, a file, or what `blockscale.checkpoints.open` returned.
            name: of the module or its weight; of a list the rows are put one below the other,
                which takes one format and one global scale.
            device: where the weights go; None: the CPU.
            dtype: of a dense weight; None: as stored, bfloat16 if it is dequantised.  Of INT4 on
                CUDA: of x, to which scales are rounded; None: bfloat16.
            fmt: None; "nvfp4" or "mxfp4": what a weight of more bits is quantised to; "dense": the
                values of any weight.

        Raises:
            KeyError: the checkpoint has no such weight.
            CheckpointError: the weight is of another kind, or damaged.
        """
        from blockscale.nn import checkpoint as nn_checkpoint

        ckpt = nn_checkpoint.opened(checkpoint)
        made = nn_checkpoint.linear(ckpt, name, fmt, dtype, device)
        return made if device is None else made.to(device)

    @property
    def fmt(self) -> str:
        """Return "nvfp4", "mxfp4", "int4" or "dense"."""
        return str(self._meta["fmt"])

    @property
    def out_features(self) -> int:
        """Return N; 0 before there is a weight."""
        held = self.weight if self.fmt == "dense" else self.packed
        return 0 if held is None else len(held)

    @property
    def in_features(self) -> int:
        """Return K; 0 before there is a weight."""
        if self.fmt == "dense":
            return 0 if self.weight is None else self.weight.shape[1]
        return 0 if self.packed is None else 2 * self.packed.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] of x [..., K], in the dtype of x."""
        if self.pre_quant_scale is not None:
            x = (x.float() * self.pre_quant_scale.float()).to(x.dtype)
        if self.fmt == "dense" and self.weight is not None:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return torch.nn.functional.linear(x, self.weight.to(x.dtype), bias)
        if self.packed is None or self.block_scale is None:
            raise ValueError("Linear: it has no weight yet; load a state_dict, or pass packed")
        if x.is_cuda:
            return self._dequantized(x, self.packed, self.block_scale)
        return ops_gemm.linear(
            x, self.packed, self.block_scale, self.fmt, self.global_scale, self.bias
        )

    def _dequantized(self, x: Tensor, packed: Tensor, block_scale: Tensor) -> Tensor:
        """Return the product with the weight in the dtype of x, as CUDA has no kernel of both."""
        weight = dequantize(packed, block_scale, self.fmt, self.global_scale, dtype=x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    def extra_repr(self) -> str:
        """Return sizes and format."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, fmt={self.fmt}"


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
