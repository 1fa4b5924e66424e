"""Linear layers on 4-bit or dense weights, alone or from a checkpoint: `Linear`, `Int4Linear`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.entry import CODES, PLAIN
from blockscale.checkpoints.files.safetensors import DTYPES
from blockscale.checkpoints.moves import joined
from blockscale.checkpoints.weight import Weight
from blockscale.nn.prepared import Device, Prepared, checked_device, opened, own
from blockscale.ops import checks
from blockscale.ops.int4 import products
from blockscale.ops.int4.weight import Int4Weight, prepare
from blockscale.ops.linear.layer import finished, linear
from blockscale.ops.linear.weights import ACTS, TENSORS, Given, LinearWeights, prepared
from blockscale.ops.quant import quantize
from blockscale.ops.weights import PreparedWeights
from blockscale.specs.gemm import ACTIVATIONS

Tensor = torch.Tensor


class Linear(Prepared):
    """`blockscale.linear` on a 4-bit weight, or the same on a dense one.

    A 4-bit weight is in the layout of the device that it was prepared for, and moves there alone.
    A dense one is multiplied in the dtype of x, and the product rounded to it before anything else.
    """

    _names: tuple[str, ...] = (*TENSORS, "weight", "pre_quant_scale")
    _kind: type[PreparedWeights] | None = LinearWeights
    packed: Tensor | None
    block_scale: Tensor | None
    global_scale: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        packed: Tensor | LinearWeights | None = None,
        block_scale: Tensor | None = None,
        fmt: str = "nvfp4",
        global_scale: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        pre_quant_scale: Tensor | None = None,
        activation: str = "none",
        gated: bool = False,
        act_fmt: str | None = None,
        fast_accum: bool = False,
        rounded: bool = False,
    ) -> None:
        """Take prepared weights, what `blockscale.quantize` makes, or a dense weight.

        Args:
            packed: of `blockscale.prepare_linear_weights`, with all that follows up to bias, and
                gated; or codes [N, K / 2]; None: to be loaded.
            block_scale: [N, K / block], linear layout.
            fmt: "nvfp4" or "mxfp4"; "dense": ``weight`` is given instead.
            global_scale: [1] float32, gated also [2]; None: 1.
            bias: [N]; None: 0.
            weight: [N, K], of any float dtype.
            pre_quant_scale: [K], what x is multiplied with first; None: 1.
            activation, gated, act_fmt, fast_accum: as in `blockscale.linear`; a dense weight has no
                act_fmt.
            rounded: of codes, as in `blockscale.prepare_linear_weights`.

        Raises:
            TypeError, ValueError: an argument that does not fit, as `blockscale.linear` says.
        """
        super().__init__()
        checks.choice("Linear", "fmt", fmt, (*QUANTIZED, "dense"))
        checks.choice("Linear", "activation", activation, ACTIVATIONS)
        tensors: dict[str, Tensor | None] = {"weight": weight, "bias": bias}
        meta: dict[str, Any] = {"fmt": fmt, "gated": gated}
        whole = isinstance(packed, LinearWeights)
        if rounded and (whole or packed is None):
            what = "a prepared weight" if whole else "no codes"
            raise ValueError(
                f"Linear: rounded=True is given with {what}, but codes are what is rounded; pass "
                "them, or rounded=True to prepare_linear_weights()"
            )
        if isinstance(packed, LinearWeights):
            _nothing_beside(packed, fmt, gated, block_scale, global_scale, bias, weight)
        elif packed is not None:
            given = Given(packed, block_scale, fmt, global_scale, bias, gated)
            packed = prepared("Linear", given, torch.bfloat16, None, act_fmt, rounded)
        if packed is not None:
            meta, tensors = packed.meta(), dict(packed.tensors())
            gated = packed.gated
        if gated and activation == "none":
            raise ValueError(
                "Linear: activation='none', but the weight is gated; pass that of the gates, such "
                "as 'silu'"
            )
        checks.choice("Linear", "act_fmt", act_fmt, (None, *ACTS))
        if act_fmt is not None and fmt == "dense":
            raise ValueError(
                f"Linear: act_fmt={act_fmt!r} is for 4-bit weights, but fmt='dense'; leave it out"
            )
        if fast_accum and act_fmt != "fp8":
            raise ValueError(
                f"Linear: fast_accum=True is for act_fmt='fp8', not for act_fmt={act_fmt!r}; leave "
                "it out"
            )
        self.activation, self.act_fmt, self.fast_accum = activation, act_fmt, fast_accum
        if weight is not None and bias is not None:
            checks.sized("Linear", "bias", bias, [weight.shape[:1]], "; pass one number a row")
        if pre_quant_scale is not None and (weight is not None or packed is not None):
            k = meta["k"] if weight is None else weight.shape[1]
            rest = "; pass one number for each column of x"
            checks.sized("Linear", "pre_quant_scale", pre_quant_scale, [(k,)], rest)
        tensors |= {"pre_quant_scale": pre_quant_scale}
        self._hold(meta, {k: None if v is None else v.detach() for k, v in tensors.items()})

    @classmethod
    def from_float(cls, weight: Tensor | torch.nn.Linear, fmt: str = "nvfp4") -> Linear:
        """Return a layer whose weight [N, K] is the given one, or that of a layer, quantised."""
        bias: Tensor | None = None
        if isinstance(weight, torch.nn.Linear):
            bias, weight = weight.bias, weight.weight
        values = _quantised("Linear.from_float", weight, fmt)
        return cls(*values, None if bias is None else bias.detach().float())

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path | Checkpoint,
        name: str | Sequence[str],
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        fmt: str | None = None,
        activation: str = "none",
        gated: bool | None = None,
        layout: str | None = None,
        act_fmt: str | None = None,
        fast_accum: bool = False,
        rounded: bool = False,
    ) -> Linear:
        """Return the layer ``name`` of a checkpoint, with its bias and its pre_quant_scale.

        NVFP4 and MXFP4 weights run as they are stored, without any rounding but that of the
        reciprocal of a global scale that divides (compressed-tensors); an INT4 weight without an
        activation becomes an `Int4Linear`.  Plain and FP8 weights stay dense unless ``fmt`` asks
        for them to be quantised.

        Args:
            checkpoint: a folder, a file, or what `blockscale.checkpoints.open` returned.
            name: of the module or its weight; of a list the rows are put one below the other,
                which takes one format.
            device: where the weights go; None: the CPU.
            dtype: of a dense weight; None: as stored, bfloat16 if it is dequantised.  Of INT4 on
                CUDA: of x, to which scales are rounded; None: bfloat16.
            fmt: None; "nvfp4" or "mxfp4": what a weight of more bits is quantised to; "dense": the
                values of any weight.
            activation: as in `blockscale.linear`.
            gated: None: whether there is an activation, and ``name`` a list of two: gate and up.
            layout: of a 4-bit weight, "linear" or "tiles64"; None: that of the device and act_fmt.
            act_fmt, fast_accum: of the calls, as in `blockscale.linear`; an INT4 weight with an
                act_fmt becomes a `Linear`.
            rounded: of an NVFP4 weight, as in `blockscale.prepare_linear_weights`.

        Raises:
            CheckpointError: the checkpoint has no such weight (`UnknownNameError`), it is of
                another kind, or damaged.
            ValueError: there is no such device.
        """
        where = "Linear.from_checkpoint"
        device = checked_device(where, device)
        checks.choice(where, "activation", activation, ACTIVATIONS)
        options = Options(fmt, dtype, activation, gated, layout, act_fmt, fast_accum, rounded)
        made = load(opened(checkpoint), name, options, device)
        return made if device is None else made.to(device)

    @property
    def fmt(self) -> str:
        """Return "nvfp4", "mxfp4", "int4" or "dense"."""
        return str(self._meta["fmt"])

    @property
    def gated(self) -> bool:
        """Return whether the weight has rows of gates and of ups."""
        return bool(self._meta.get("gated"))

    @property
    def out_features(self) -> int:
        """Return the columns of the result; 0 before there is a weight."""
        rows = self._meta.get("n", 0) if self.weight is None else len(self.weight)
        return int(rows) // (2 if self.gated else 1)

    @property
    def in_features(self) -> int:
        """Return K; 0 before there is a weight."""
        return int(self._meta.get("k", 0) if self.weight is None else self.weight.shape[1])

    @property
    def weights(self) -> LinearWeights:
        """The prepared weight: the module's buffers."""
        if self._buffers["packed"] is None:  # as an attribute it takes ten times as long
            given = "weight" if self.fmt == "dense" else "packed and block_scale"
            raise ValueError(f"Linear: it has no weight yet; load a state_dict, or pass {given}")
        return self._held(LinearWeights)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [..., out_features] of x [..., K], of any strides, in the dtype of x.

        ``residual``: like the result, added to it; None: 0.
        """
        x = x.contiguous()  # a model's last hidden states are rows of all of them
        smooth, weight = self._buffers["pre_quant_scale"], self._buffers["weight"]
        if smooth is not None:
            x = (x.float() * smooth.float()).to(x.dtype)
        if weight is None:
            return linear(
                *(x, self.weights),
                activation=self.activation,
                residual=residual,
                act_fmt=self.act_fmt,
                fast_accum=self.fast_accum,
            )
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = torch.nn.functional.linear(x, weight.to(x.dtype), bias)
        if residual is not None:
            wide = *x.shape[:-1], self.out_features
            checks.like("Linear", "residual", residual, (x.dtype,), "x", x, wide)
            residual = residual.view(wide)
        elif self.activation == "none":
            return y
        return finished(y, self.activation, self.gated, residual, x.dtype)

    def _take(self, meta: dict[str, Any], state: Mapping[str, Any], prefix: str) -> None:
        packed = state.get(prefix + "packed")
        fmt = meta.get("fmt")
        if packed is not None and fmt in QUANTIZED and "layout" not in meta:  # of version 0.1.0
            group = QUANTIZED[fmt].block
            sizes = {"n": packed.shape[0], "k": 2 * packed.shape[1], "group": group}
            meta = (
                {"gated": False, "zeros": False, "layout": "linear", "dtype": None} | meta | sizes
            )
        super()._take(meta, state, prefix)

    def _may_have(self, meta: Mapping[str, Any], name: str) -> bool:
        if name == "weight":
            return meta.get("fmt") == "dense"
        return name in ("bias", "pre_quant_scale") or meta.get("fmt") != "dense"

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        if meta.get("fmt") not in (*QUANTIZED, "int4", "dense"):
            raise ValueError(
                f"the state has fmt={meta.get('fmt')!r}, which is no format of a Linear; load it "
                "into a module of the kind that saved it"
            )
        if bool(meta.get("gated")) != self.gated:
            raise ValueError(
                f"the state has gated={bool(meta.get('gated'))}, but the module has gated="
                f"{self.gated}, activation={self.activation!r}; load it into a module of its kind"
            )

    def extra_repr(self) -> str:
        """Return sizes, format, and what is done to the product."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, fmt={self.fmt}"
        if self.act_fmt is not None:
            sizes += f", act_fmt={self.act_fmt}{', fast_accum' if self.fast_accum else ''}"
        if self.activation == "none":
            return sizes
        return f"{sizes}, activation={self.activation}{', gated' if self.gated else ''}"


def _nothing_beside(weights: LinearWeights, fmt: str, gated: bool, *given: Tensor | None) -> None:
    """Raise ValueError if more is given than a prepared weight, which has all."""
    names = "block_scale", "global_scale", "bias", "weight"
    more = [name for name, value in zip(names, given, strict=True) if value is not None]
    more += ["fmt"] * (fmt not in ("nvfp4", weights.fmt)) + ["gated"] * (gated > weights.gated)
    if more:
        raise ValueError(
            f"Linear: the weight is prepared, but {', '.join(more)} is given too; leave it out, or "
            "pass it to prepare_linear_weights()"
        )


def _quantised(where: str, weight: object, fmt: str) -> tuple[Tensor, Tensor, str, Tensor | None]:
    """Return codes, block scales, format and global scale of a weight [N, K]."""
    checks.choice(where, "fmt", fmt, QUANTIZED)
    if isinstance(weight, torch.Tensor):
        weight = weight.detach().contiguous()
    values = checks.tensor(where, "weight", weight, checks.ACTIVATIONS, dims=2)
    checks.block_multiple(where, "weight", values.shape[-1], fmt)
    scale = None
    if fmt == "nvfp4":  # so that the largest block scale is the largest E4M3 value
        scale = (values.abs().amax().float() / (448 * 6)).clamp(min=1e-30).reshape(1)
    packed, block_scale = quantize(values, fmt, scale)
    return packed, block_scale, fmt, scale


class Int4Linear(Linear):
    """``y = x' @ w + bias`` of a prepared weight; see `blockscale.int4.linear`.

    The weight is in the layout of the device that it was prepared for, and moves there alone.  With
    ``act_fmt`` set to "fp8" calls are those of a `Linear` on the same weight, of which the first
    makes a second copy; `Linear.from_checkpoint` with an act_fmt has that one alone.
    """

    _names = Int4Weight.names
    _kind = Int4Weight
    _quantising: tuple[torch.dtype, list[int], list[Tensor], LinearWeights] | None = None
    """What calls with an act_fmt multiply; before it what it was made of, to see it changed."""

    def __init__(self, weight: Int4Weight | None = None) -> None:
        """Take what `blockscale.int4.prepare` makes of one weight; None: to be loaded."""
        torch.nn.Module.__init__(self)
        if weight is not None and not isinstance(weight, Int4Weight):
            raise TypeError(
                f"Int4Linear: weight is a {type(weight).__name__}, not a prepared one; pass what "
                "int4.prepare() returns for it"
            )
        self.activation, self.act_fmt, self.fast_accum = "none", None, False
        meta = {} if weight is None else weight.meta()
        self._hold({**meta, "fmt": "int4"}, {} if weight is None else dict(weight.tensors()))

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        if meta.get("fmt") != "int4":
            raise ValueError(
                f"the state has fmt={meta.get('fmt')!r}, but an Int4Linear has INT4 weights; load "
                "it into a Linear"
            )

    @property
    def prepared(self) -> Int4Weight:
        """The weight: the module's buffers."""
        if self.packed is None:
            raise ValueError("Int4Linear: it has no weight yet; load a state_dict, or pass one")
        return self._held(Int4Weight)

    @property
    def out_features(self) -> int:
        """Return N; 0 before there is a weight."""
        return int(self._meta.get("n", 0))

    @property
    def in_features(self) -> int:
        """Return K; 0 before there is a weight."""
        return int(self._meta.get("k", 0))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return [..., N] of x [..., K], in the dtype of x; ``residual``, like it, is added."""
        x = x.contiguous()
        if self.act_fmt is not None:
            smooth = self._buffers["pre_quant_scale"]
            if smooth is not None:
                x = (x.float() * smooth[0].float()).to(x.dtype)
            return linear(
                *(x, self._of_codes(x.dtype)),
                residual=residual,
                act_fmt=self.act_fmt,
                fast_accum=self.fast_accum,
            )
        y = products.linear(x, self.prepared)
        if residual is None:
            return y
        checks.like("Int4Linear", "residual", residual, (x.dtype,), "x", x, y.shape)
        return y + residual.view(y.shape)

    def _hold(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
        self._quantising = None  # a state may be copied to buffers that stay
        super()._hold(meta, tensors)

    def _of_codes(self, dtype: torch.dtype) -> LinearWeights:
        """The weight as a `Linear` has it, made when it is needed first."""
        buffers = [tensor for tensor in self._buffers.values() if tensor is not None]
        changes = [0 if tensor.is_inference() else tensor._version for tensor in buffers]
        held = self._quantising
        if held is None or held[:2] != (dtype, changes) or not all(map(is_, held[2], buffers)):
            rows = self.prepared.to_rows()
            if rows.group_index is not None:
                raise ValueError(
                    f"Int4Linear: act_fmt={self.act_fmt!r}, but the weight has its groups in "
                    "another order (act-order), which kernels with an act_fmt do not have; set "
                    "act_fmt to None"
                )
            given = Given(rows.packed, rows.scale, "int4", None, rows.bias, zero=_points(rows.zero))
            wide = torch.bfloat16 if dtype == torch.float32 else dtype
            made = prepared("Int4Linear", given, wide, None, self.act_fmt)
            held = self._quantising = dtype, changes, buffers, made
        return held[-1]


# ---- From a checkpoint --------------------------------------------------------------------------


class Options(NamedTuple):
    """What a layer of a checkpoint is to be; see `Linear.from_checkpoint`."""

    fmt: str | None = None
    dtype: torch.dtype | None = None
    activation: str = "none"
    gated: bool | None = None
    layout: str | None = None
    act_fmt: str | None = None
    fast_accum: bool = False
    rounded: bool = False


def load(
    ckpt: Checkpoint,
    names: str | Sequence[str],
    options: Options | None = None,
    device: Device = None,
) -> Linear:
    """Return the layer of one weight, or of several that are one above the other."""
    options = options or Options()
    listed = [names] if isinstance(names, str) else [*names]
    if not listed:
        raise ValueError("Linear.from_checkpoint: no name is given; pass one, or a list of them")
    checks.choice("Linear.from_checkpoint", "fmt", options.fmt, (None, "dense", *QUANTIZED))
    if options.gated is None:
        two = len(listed) == 2 and options.activation != "none"
        options = options._replace(gated=two)
    found = [_matrix(ckpt, name) for name in listed]
    bias = stacked_biases(ckpt, found)
    kinds = {weight.fmt for weight in found} if options.fmt is None else {options.fmt}
    if options.rounded and kinds != {"nvfp4"}:
        raise ValueError(
            f"Linear.from_checkpoint: rounded=True, but {', '.join(listed)} is "
            f"{' and '.join(sorted(kinds))}, and nvfp4 alone is rounded; leave it out"
        )
    if options.fmt is None and all(weight.fmt == "int4" for weight in found):
        return int4_layer(found, bias, options, device)
    parts = [_part(weight, options) for weight in found]
    return _layer(_stacked(listed, parts, bool(options.gated)), bias, options, device)


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


class _Part(NamedTuple):
    """Rows of a layer's weight, 4-bit or dense."""

    fmt: str
    packed: Tensor | None = None
    block_scale: Tensor | None = None
    global_scale: Tensor | None = None
    weight: Tensor | None = None
    pre_quant_scale: Tensor | None = None


def _part(weight: Weight, options: Options) -> _Part:
    fmt, smooth = options.fmt, _float(weight.pre_quant_scale)
    if weight.fmt in QUANTIZED and fmt in (None, weight.fmt):
        top = weight.global_scale
        top = None if top is None else top.reshape(1).float()
        held = own(weight.packed), own(weight.block_scale), top
        return _Part(weight.fmt, *held, pre_quant_scale=smooth)
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
        values = weight.dequantize(stored or torch.float32)
        packed, scale, _, top = _quantised("Linear.from_checkpoint", values, fmt)
        return _Part(fmt, packed, scale, top, pre_quant_scale=smooth)
    dense = weight.dequantize(options.dtype or stored or torch.bfloat16)
    held_dense = own(dense) if dense is weight.data else dense
    return _Part("dense", weight=held_dense, pre_quant_scale=smooth)


def _stacked(names: Sequence[str], parts: Sequence[_Part], gated: bool) -> _Part:
    """Return the rows of several parts as one.

    Global scales that differ are those of gates and ups, or one for each row.

    Raises:
        CheckpointError: their formats or pre_quant_scales differ.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for name, other in zip(names[1:], parts[1:], strict=True):
        what = _different(first, other, "pre_quant_scale")
        if gated and len(parts) != 2 and what is None:
            what = _different(first, other, "global_scale")
        if other.fmt != first.fmt or what is not None:
            raise CheckpointError(
                f"{names[0]!r} and {name!r} differ in {what or 'format'}, so their rows cannot be "
                "one weight without rounding; load them one by one and concatenate what they give"
            )
    if len({part.weight.dtype for part in parts if part.weight is not None}) > 1:
        raise CheckpointError(
            f"{', '.join(map(repr, names))} have different dtypes; pass dtype= for all of them"
        )
    top = first.global_scale
    if any(_different(first, other, "global_scale") is not None for other in parts[1:]):
        ones = torch.ones(1)
        scales = [ones if part.global_scale is None else part.global_scale for part in parts]
        if not (gated and len(parts) == 2):
            counts = [len(part.packed) for part in parts if part.packed is not None]
            scales = [s.expand(n) for s, n in zip(scales, counts, strict=True)]
        top = torch.cat(scales)
    rows: dict[str, Any] = {
        name: joined([getattr(part, name) for part in parts])
        for name in ("packed", "block_scale", "weight")
    }
    return first._replace(**rows, global_scale=top)


def _layer(part: _Part, bias: Tensor | None, options: Options, device: Device) -> Linear:
    """Return the layer of a part, its weight prepared on the device."""
    to: dict[str, Any] = {"activation": options.activation, "pre_quant_scale": part.pre_quant_scale}
    to |= {"act_fmt": options.act_fmt, "fast_accum": options.fast_accum}
    gated = bool(options.gated)
    if part.packed is None:
        return Linear(fmt="dense", bias=bias, weight=part.weight, gated=gated, **to)
    moved: tuple[Tensor | None, ...] = (part.packed, part.block_scale, part.global_scale, bias)
    if device is not None:
        moved = tuple(None if value is None else value.to(device) for value in moved)
    packed, scale, top, bias = moved
    given = Given(packed, scale, part.fmt, top, bias, gated)
    dtype = options.dtype or torch.bfloat16
    how = options.layout, options.act_fmt, options.rounded
    made = prepared("Linear.from_checkpoint", given, dtype, *how)
    return Linear(made, **to)


def int4_layer(
    weights: Sequence[Weight], bias: Tensor | None, options: Options, device: Device
) -> Linear:
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
    dtype, smooth = options.dtype or torch.bfloat16, _float(first.pre_quant_scale)
    if options.activation != "none" or options.act_fmt is not None:
        if first.group_index is not None:
            raise CheckpointError(
                f"{first.name} has its groups in another order (act-order), which kernels with an "
                "activation or an act_fmt do not have; leave both out, and apply an activation to "
                "the result"
            )
        if device is not None:  # whose layout it gets
            moved = [None if value is None else value.to(device) for value in (*tensors, bias)]
            *tensors, bias = moved
        packed, scale, zero = tensors
        given = packed, scale, "int4", None, bias, bool(options.gated)
        part = Given(*given, zero=_points(zero))
        made = prepared("Linear.from_checkpoint", part, dtype, options.layout, options.act_fmt)
        to: dict[str, Any] = {"activation": options.activation, "act_fmt": options.act_fmt}
        return Linear(made, **to, fast_accum=options.fast_accum, pre_quant_scale=smooth)
    return Int4Linear(
        prepare(
            *tensors,
            group_size=first.group_size,
            layout="rows",
            group_index=first.group_index,
            pre_quant_scale=smooth,
            bias=bias,
            dtype=dtype,
            target=None if device is None else torch.device(device).type,
        )
    )


def _points(zero: Tensor | None) -> Tensor | None:
    """Return zero points; None: all are 8, that of symmetric codes, whose kernels are faster."""
    return None if zero is None or bool((zero == 8).all()) else zero


def stacked_biases(ckpt: Checkpoint, weights: Sequence[Weight]) -> Tensor | None:
    """Return the biases of all weights [N, K], one after the other; None: there is none at all."""
    biases = [bias_of(ckpt, weight) for weight in weights]
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([torch.zeros(w.shape[0]) if bias is None else bias for bias, w in pairs])


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
