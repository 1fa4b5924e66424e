"""The experts of an MoE module as two weights, however a checkpoint stores them.

Gate and up become one weight whose rows are gate first, then up; global scales stay of each expert
and, where they differ, of gate and of up.  Codes and scales are moved, never rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.entry import CODES, Entry, Facts, alternates
from blockscale.checkpoints.experts.modules import ALL, Group, check_group, is_turned
from blockscale.checkpoints.experts.stack import (
    each,
    gate_first,
    gather,
    join,
    single,
    split_rows,
    stack,
    turned,
)
from blockscale.checkpoints.schemes.fp4 import quantized
from blockscale.checkpoints.schemes.kinds import load
from blockscale.checkpoints.weight import Weight
from blockscale.ops.moe.weights import MoeWeights, prepare_moe_weights

Tensor = torch.Tensor

_SMALLEST = 1e-30


class Pair(NamedTuple):
    """One thing of both weights of an MoE layer."""

    gate_up: Tensor | None
    down: Tensor | None


class Shapes(NamedTuple):
    """The dense shapes [E, 2 I, H] (ungated: [E, I, H]) and [E, H, I]."""

    gate_up: tuple[int, ...]
    down: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Experts:
    """Both weights of an MoE layer, each in one meaning: see `Weight`.

    Attributes:
        name: of the module, e.g. "model.layers.0.mlp.experts".
        gate_up: [E, 2 I, H], gate rows first; [E, I, H] if not gated.  Its global scale is [E], or
            [E, 2] of gate and up.
        down: [E, H, I], with a global scale [E].
        gate_up_bias: [E, 2 I] in the order of the rows, or None.
        down_bias: [E, H] or None.
        gated: whether there are gate rows.
        notes: what was decided on the way.
    """

    name: str
    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gated: bool = True
    notes: tuple[str, ...] = ()

    @property
    def fmt(self) -> str:
        """Return the format of both; "a+b" if gate_up has a and down has b."""
        one, two = self.gate_up.fmt, self.down.fmt
        return one if one == two else f"{one}+{two}"

    @property
    def packed(self) -> Pair:
        """Return the codes of both weights; None where a weight has none."""
        return Pair(self.gate_up.packed, self.down.packed)

    @property
    def block_scale(self) -> Pair:
        """Return the block scales of both weights."""
        return Pair(self.gate_up.block_scale, self.down.block_scale)

    @property
    def global_scale(self) -> Pair:
        """Return the global scales [E] or [E, 2], and [E]."""
        return Pair(self.gate_up.global_scale, self.down.global_scale)

    @property
    def zero(self) -> Pair:
        """Return the zeros of int4."""
        return Pair(self.gate_up.zero, self.down.zero)

    @property
    def shape(self) -> Shapes:
        """Return the dense shapes of both weights."""
        return Shapes(self.gate_up.shape, self.down.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Pair:
        """Return the values of both weights, computed in float32 and rounded once."""
        return Pair(self.gate_up.dequantize(dtype), self.down.dequantize(dtype))

    def quantized(self, fmt: str = "nvfp4") -> Experts:
        """Return experts of ``fmt``, "nvfp4" or "mxfp4", made of the values of these.

        The global scale of each expert, and of gate and up, is its amax / 2688.
        """
        parts = 2 if self.gated else 1
        up = _quantized(self.gate_up, fmt, parts)
        return replace(self, gate_up=up, down=_quantized(self.down, fmt, 1))

    def prepare(
        self,
        dtype: torch.dtype = torch.bfloat16,
        layout: str | None = None,
        *,
        activation: str | None = None,
        device: str | torch.device | None = None,
        act_fmt: str | None = None,
        rounded: bool = False,
    ) -> MoeWeights:
        """Return the weights as kernels load them, by `blockscale.prepare_moe_weights`.

        Args:
            dtype: of the activations.
            layout: "linear" or "tiles64"; None: that of the device.
            activation: None: "swiglu" if gated, else "relu2".
            device: where they go, and are converted; None: the CPU.
            act_fmt, rounded: of the calls that are to follow, and of nvfp4, as there.

        Raises:
            CheckpointError: the format is none of the kernels', or a weight has smoothing or
                act-order, which they do not know.
            ValueError: sizes that no kernel takes.
        """
        for weight in (self.gate_up, self.down):
            _check_prepared(self, weight)
        up, down = self.gate_up, self.down
        zeros = up.zero, down.zero
        if all(zero is None or bool((zero == 8).all()) for zero in zeros):
            zeros = None, None
        tensors = {
            "w13": up.packed,
            "w2": down.packed,
            "w13_scale": up.block_scale,
            "w2_scale": down.block_scale,
            "w13_global_scale": up.global_scale,
            "w2_global_scale": down.global_scale,
            "w13_bias": self.gate_up_bias,
            "w2_bias": self.down_bias,
            "w13_zero": zeros[0],
            "w2_zero": zeros[1],
        }
        moved: dict[str, Any] = {
            name: value if value is None or device is None else value.to(device)
            for name, value in tensors.items()
        }
        return prepare_moe_weights(
            **moved,
            fmt=up.fmt,
            activation=activation or ("swiglu" if self.gated else "relu2"),
            group_size=up.group_size if up.fmt == "int4" else None,
            dtype=dtype,
            layout=layout,
            act_fmt=act_fmt,
            rounded=rounded,
        )

    def __repr__(self) -> str:
        e, rows, hidden = self.gate_up.shape
        return f"<Experts {self.name!r}: {e} of {self.fmt}, {rows} rows of {hidden}>"


def load_experts(group: Group, facts: Facts) -> Experts:
    """Return the experts of one module.

    Raises:
        CheckpointError: weights are missing, or do not fit each other.
    """
    check_group(group)
    found = {role: _weights(stored, facts) for role, stored in group.weights.items()}
    notes: list[str] = []
    first = next(found[role][0] for role in ("gate_up", "up", "gate") if role in found)
    is_other, note = is_turned(first, found["down"][0], facts)
    if note:
        notes.append(note)
    if is_other:
        found = {role: [turned(w) for w in ws] for role, ws in found.items()}
    (down,) = _stacked(f"{group.name}.down", found.pop("down"))
    gated = True
    if "gate_up" in found:
        (up,) = _stacked(f"{group.name}.gate_up", found["gate_up"])
        gated = up.shape[-2] != down.shape[-1]
    else:
        names = [role for role in ("gate", "up") if role in found]
        gated = len(names) == 2
        up = _gate_and_up(f"{group.name}.gate_up", [found[role] for role in names])
    bias = biases_of(group, gated, facts)
    both = next(iter(group.weights.get("gate_up", {}).values()), None)
    if gated and both is not None and alternates(both, facts):
        notes.append("rows of gate and up alternate in the checkpoint; here gate comes first")
        up = gate_first(up)
        bias = Pair(None if bias.gate_up is None else split_rows(bias.gate_up), bias.down)
    up = replace(each(up), gate_up="halves" if gated else None)
    made = Experts(group.name, up, each(down), *bias, gated, tuple(notes))
    _check_sizes(made)
    return made


def _weights(stored: dict[int, Entry], facts: Facts) -> list[Weight]:
    """Return the weights of one role, in the order of experts; one weight may be of all."""
    found = [load(stored[e], facts) for e in sorted(stored)]
    if len(found) > 1 and len(found[0].shape) == 3:  # picked from a tensor of all
        return [gather(found[0].name, found)]
    return found


def _stacked(name: str, found: list[Weight]) -> tuple[Weight]:
    if len(found) == 1 and len(found[0].shape) == 3:
        return (replace(found[0], name=name),)
    return (stack(name, found),)


def _gate_and_up(name: str, roles: list[list[Weight]]) -> Weight:
    """Return gate and up as one weight; each is given as one of all experts, or one by one."""
    split = [
        [single(ws[0], e) for e in range(ws[0].shape[0])] if len(ws[0].shape) == 3 else ws
        for ws in roles
    ]
    counts = [len(ws) for ws in split]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"{name}: gate has {counts[0]} experts, but up has {counts[1]}; copy all files of the "
            "checkpoint"
        )
    if len(roles) == 1 and len(roles[0][0].shape) == 3:
        return replace(roles[0][0], name=name)
    return join(name, list(zip(*split, strict=True)))


def biases_of(group: Group, gated: bool, facts: Facts) -> Pair:
    """Return the biases of gate and up rows and of down rows; None where there is none."""
    made = {role: _bias(group, role, stored, facts) for role, stored in group.biases.items()}
    up = made.get("gate_up")
    if up is None:
        pair = [made.get(role) for role in ("gate", "up")]
        found = [value for value in pair if value is not None]
        if gated and len(found) == 1:
            raise CheckpointError(
                f"{group.name}: only one of gate and up has a bias; copy all files of the "
                "checkpoint"
            )
        up = torch.cat(found, 1) if found else None
    return Pair(up, made.get("down"))


def _bias(group: Group, role: str, stored: dict[int, Entry], facts: Facts) -> Tensor:
    found = [load(stored[e], facts).data for e in sorted(stored)]
    values = [value for value in found if value is not None and value.is_floating_point()]
    same = {(v.dtype, v.shape) for v in values}
    if len(values) != len(stored) or len(same) != 1 or role not in group.weights:
        raise CheckpointError(
            f"{group.name}: the biases of {role} are not floats of one shape, with a weight to "
            "them; convert the checkpoint again"
        )
    if ALL in stored:
        return values[0]
    return torch.cat([value.reshape(1, -1) for value in values])


def _check_sizes(made: Experts) -> None:
    up, down = made.shape
    rows = (2 if made.gated else 1) * down[-1]
    if up != (down[0], rows, down[1]):
        raise CheckpointError(
            f"{made.name}: gate and up are {list(up)} and down is {list(down)}, but must be "
            f"[E, {'2 I' if made.gated else 'I'}, H] and [E, H, I]; convert the checkpoint again"
        )
    for name, bias, wanted in (
        ("gate_up", made.gate_up_bias, up[:2]),
        ("down", made.down_bias, down[:2]),
    ):
        if bias is not None and tuple(bias.shape) != wanted:
            raise CheckpointError(
                f"{made.name}: the bias of {name} is {list(bias.shape)}, but must be "
                f"{list(wanted)}; convert the checkpoint again"
            )


def _check_prepared(made: Experts, weight: Weight) -> None:
    if made.fmt not in CODES or made.gate_up.group_size != made.down.group_size:
        groups = {made.gate_up.group_size, made.down.group_size}
        raise CheckpointError(
            f"{made.name} has experts of {made.fmt} with groups of {sorted(groups)}, but kernels "
            f"take one of {', '.join(CODES)} with one size; quantise the values: .quantized()"
        )
    for what, value in (("smoothing", weight.pre_quant_scale), ("act-order", weight.group_index)):
        if value is not None:
            raise CheckpointError(
                f"{made.name}: {weight.name} has {what}, which no kernel of an MoE layer knows; "
                "quantise the values again without it"
            )


def _quantized(weight: Weight, fmt: str, parts: int) -> Weight:
    experts, rows, _ = weight.shape
    tops = torch.ones((experts, parts), dtype=torch.float32, device="cpu")
    step = rows // parts

    def pieces() -> Iterator[tuple[int, Tensor, Tensor | None]]:
        for i, start in enumerate(range(0, experts * rows, step)):
            values, top = weight.rows(start, start + step), tops.view(-1)[i : i + 1]
            if fmt == "nvfp4":
                top[:] = (values.abs().amax() / (448 * 6)).clamp(min=_SMALLEST)
            yield start, values, top if fmt == "nvfp4" else None

    packed, scale = quantized(fmt, weight.shape, pieces())
    return Weight(
        weight.name,
        fmt,
        weight.shape,
        packed=packed,
        block_scale=scale,
        global_scale=None if fmt == "mxfp4" else tops if parts > 1 else tops[:, 0].contiguous(),
        group_size=QUANTIZED[fmt].block,
        gate_up=weight.gate_up,
    )
