"""Linear layers on 4-bit or dense weights, alone or from a checkpoint: `Linear`, `Int4Linear`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.entry import CODES, PLAIN
from blockscale.checkpoints.files.safetensors import DTYPES
from blockscale.checkpoints.moves import joined
from blockscale.checkpoints.weight import Weight
from blockscale.nn.prepared import Device, Prepared, checked_device, opened, own
from blockscale.ops import checks, gemm
from blockscale.ops.int4 import products
from blockscale.ops.int4.weight import TENSORS, Int4Weight, prepare
from blockscale.ops.quant import dequantize, quantize

Tensor = torch.Tensor

_OF_ROWS = ("packed", "block_scale", "weight")


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
        checks.choice("Linear", "fmt", fmt, (*QUANTIZED, "dense"))
        tensors = (packed, block_scale, global_scale, bias, weight, pre_quant_scale)
        kept = [None if value is None else value.detach() for value in tensors]
        self._hold({"fmt": fmt}, dict(zip(self._names, kept, strict=True)))

    @classmethod
    def from_float(cls, weight: Tensor | torch.nn.Linear, fmt: str = "nvfp4") -> Linear:
        """Return a layer whose weight [N, K] is the given one, or that of a layer, quantised."""
        bias: Tensor | None = None
        if isinstance(weight, torch.nn.Linear):
            bias, weight = weight.bias, weight.weight
        where = "Linear.from_float"
        checks.choice(where, "fmt", fmt, QUANTIZED)
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().contiguous()
        values = checks.tensor(where, "weight", weight, checks.ACTIVATIONS, dims=2)
        checks.block_multiple(where, "weight", values.shape[-1], fmt)
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
            CheckpointError: the checkpoint has no such weight (`UnknownNameError`), it is of
                another kind, or damaged.
            ValueError: there is no such device.
        """
        device = checked_device("Linear.from_checkpoint", device)
        made = load(opened(checkpoint), name, fmt, dtype, device)
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
            given = "weight" if self.fmt == "dense" else "packed and block_scale"
            raise ValueError(f"Linear: it has no weight yet; load a state_dict, or pass {given}")
        if x.is_cuda:
            return self._dequantized(x, self.packed, self.block_scale)
        return gemm.linear(x, self.packed, self.block_scale, self.fmt, self.global_scale, self.bias)

    def _dequantized(self, x: Tensor, packed: Tensor, block_scale: Tensor) -> Tensor:
        """Return the product with the weight in the dtype of x, as CUDA has no kernel of both."""
        weight = dequantize(packed, block_scale, self.fmt, self.global_scale, dtype=x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    def extra_repr(self) -> str:
        """Return sizes and format."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, fmt={self.fmt}"


class Int4Linear(Linear):
    """``y = x' @ w + bias`` of a prepared weight; see `blockscale.int4.linear`.

    The weight is in the layout of the device that it was prepared for, and moves there alone.
    """

    _names = TENSORS

    def __init__(self, weight: Int4Weight | None = None) -> None:
        """Take what `blockscale.int4.prepare` makes of one weight; None: to be loaded."""
        torch.nn.Module.__init__(self)
        if weight is not None and not isinstance(weight, Int4Weight):
            raise TypeError(
                f"Int4Linear: weight is a {type(weight).__name__}, not a prepared one; pass what "
                "int4.prepare() returns for it"
            )
        meta = {} if weight is None else weight.meta()
        self._hold({**meta, "fmt": "int4"}, {} if weight is None else dict(weight.tensors()))

    @property
    def prepared(self) -> Int4Weight:
        """The weight: the module's buffers."""
        if self.packed is None:
            raise ValueError("Int4Linear: it has no weight yet; load a state_dict, or pass one")
        return Int4Weight.of(self._meta, {name: self._buffers[name] for name in TENSORS})

    @property
    def out_features(self) -> int:
        """Return N; 0 before there is a weight."""
        return int(self._meta.get("n", 0))

    @property
    def in_features(self) -> int:
        """Return K; 0 before there is a weight."""
        return int(self._meta.get("k", 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] of x [..., K], in the dtype of x."""
        return products.linear(x, self.prepared)


# ---- From a checkpoint --------------------------------------------------------------------------


def load(
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
    checks.choice("Linear.from_checkpoint", "fmt", fmt, (None, "dense", *QUANTIZED))
    found = [_matrix(ckpt, name) for name in listed]
    biases = [bias_of(ckpt, weight) for weight in found]
    if fmt is None and all(weight.fmt == "int4" for weight in found):
        return _int4(found, biases, dtype, device)
    made = [_layer(w, b, fmt, dtype) for w, b in zip(found, biases, strict=True)]
    return made[0] if len(made) == 1 else _stacked(listed, made)


def _matrix(ckpt: Checkpoint, name: str) -> Weight:
    weight = ckpt.weight(name)
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.name} has the shape {list(weight.shape)}, but a linear layer's weight is "
            "[N, K]; experts are for FusedMoE.from_checkpoint"
        )
    return weight


def bias_of(ckpt: Checkpoint, weight: Weight) -> Tensor | None:
    """Return the bias [N] of a layer's weight [N, K] as float32; None: it has none."""
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
    smooth = _float(weight.pre_quant_scale)
    if weight.fmt in QUANTIZED and fmt in (None, weight.fmt):
        top = weight.global_scale
        return Linear(
            own(weight.packed),
            own(weight.block_scale),
            weight.fmt,
            None if top is None else top.reshape(1).float(),
            bias,
            pre_quant_scale=smooth,
        )
    if fmt is None and weight.fmt == "int4":
        raise CheckpointError(
            f"{weight.name} is int4 and others are not, so their rows cannot be one weight; load "
            "them one by one and concatenate what they give, or pass fmt='dense'"
        )
    if weight.fmt in QUANTIZED and fmt in QUANTIZED:
        raise CheckpointError(
            f"{weight.name} is {weight.fmt} already, and rounding it to {fmt} as well would lose "
            "more; leave fmt out, or pass fmt='dense'"
        )
    if weight.fmt not in (*PLAIN, *CODES, "fp8"):
        raise CheckpointError(
            f"{weight.name} is {weight.fmt}, which is no weight of a linear layer; choose another"
        )
    stored = DTYPES[weight.fmt.upper()] if weight.fmt in PLAIN else None
    if fmt in QUANTIZED:
        made = Linear.from_float(weight.dequantize(stored or torch.float32), fmt)
        values = (made.packed, made.block_scale, fmt, made.global_scale, bias)
        return Linear(*values, pre_quant_scale=smooth)
    dense = weight.dequantize(dtype or stored or torch.bfloat16)
    held = own(dense) if dense is weight.data else dense
    return Linear(fmt="dense", bias=bias, weight=held, pre_quant_scale=smooth)


def _stacked(names: Sequence[str], made: Sequence[Linear]) -> Linear:
    """Return one layer of the rows of several.

    Raises:
        CheckpointError: their formats, global scales or pre_quant_scales differ.
    """
    first = made[0]
    for name, other in zip(names[1:], made[1:], strict=True):
        what = _different(first, other, "global_scale", "pre_quant_scale")
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
    return Linear(
        **{name: joined([getattr(layer, name) for layer in made]) for name in _OF_ROWS},
        fmt=first.fmt,
        global_scale=first.global_scale,
        bias=_bias([layer.bias for layer in made], [layer.out_features for layer in made]),
        pre_quant_scale=first.pre_quant_scale,
    )


def _int4(
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    dtype: torch.dtype | None,
    device: Device,
) -> Int4Linear:
    """Return the layer of INT4 weights that are one above the other.

    Raises:
        CheckpointError: they differ in groups, their order, or pre_quant_scale.
    """
    first = weights[0]
    for other in weights[1:]:
        what = _different(first, other, "group_size", "group_index", "pre_quant_scale")
        if what is not None:
            raise CheckpointError(
                f"{first.name} and {other.name} differ in {what}, so their rows cannot be one "
                "weight; load them one by one and concatenate what they give"
            )
    fields = ("packed", "block_scale", "zero")
    tensors: list[Any] = [joined([getattr(w, name) for w in weights]) for name in fields]
    return Int4Linear(
        prepare(
            *tensors,
            group_size=first.group_size,
            layout="rows",
            group_index=first.group_index,
            pre_quant_scale=_float(first.pre_quant_scale),
            bias=_bias(biases, [weight.shape[0] for weight in weights]),
            dtype=dtype or torch.bfloat16,
            target=None if device is None else torch.device(device).type,
        )
    )


def _bias(biases: Sequence[Tensor | None], rows: Sequence[int]) -> Tensor | None:
    """Return all biases, one after the other; None: there is none at all."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, rows, strict=True)
    return torch.cat([torch.zeros(count) if bias is None else bias for bias, count in pairs])


def _float(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.float()


def _different(one: object, other: object, *names: str) -> str | None:
    """Return the first attribute that is not the same in both; None: they are alike."""
    for name in names:
        a, b = getattr(one, name), getattr(other, name)
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        if not (torch.equal(a, b) if both else a is b or a == b):
            return name
    return None
