"""Weights of an MoE layer as its kernels load them, converted once.

`prepare_moe_weights` takes both weights as checkpoints hold them; the `MoeWeights` that it returns
is what `blockscale.fused_moe` and `blockscale.nn.FusedMoE` run on.  Layouts:

* "linear" (CPU): the tensors as given, scales of int4 as float32.
* "tiles64" (CUDA): `moe.tiles`, docs/moe.md.  Experts are converted one after the other.

Both hold the same values, up to the rounding of int4 scales to the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from blockscale.ops import checks
from blockscale.ops.checks import dtype_name
from blockscale.ops.moe.check import Given, Sizes, check_weights
from blockscale.ops.moe.convert import to_linear, to_tiles
from blockscale.specs.moe import LAYOUTS

Tensor = torch.Tensor

SIGN_BITS = 0x88
"""What turns two's complement codes into those from 0 to 15: both of a byte plus 8."""

TENSORS = (
    *("w13", "w13_scale", "w13_zero", "w13_global", "w13_bias"),
    *("w2", "w2_scale", "w2_zero", "w2_global", "w2_bias"),
)
"""Names of a `MoeWeights`' tensors, in the order of a kernel's parameters."""

_META = ("fmt", "group", "experts", "hidden", "intermediate", "gated", "zero", "layout", "dtype")


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """Both weights of an MoE layer, ready for kernels; None: the layer has no such tensor.

    Attributes:
        w13, w2: codes, uint8.
        w13_scale, w2_scale: block scales; of int4, zeros are in them in layout "tiles64".
        w13_zero, w2_zero: uint8, in layout "linear" only.
        w13_global, w2_global: float32 [E, 2] (gate, up) and [E].
        w13_bias, w2_bias: float32; both or neither.
        fmt: "nvfp4", "mxfp4" or "int4".
        group: elements of K that share a scale.
        experts, hidden, intermediate: the sizes E, H, I, without padding.
        gated: whether w13 has gate and up rows.
        zero: whether int4 codes have zeros other than 8.
        layout: "linear" or "tiles64".
        dtype: of int4 scales in layout "tiles64", so that activations must have it too; else None.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_zero: Tensor | None
    w13_global: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scale: Tensor
    w2_zero: Tensor | None
    w2_global: Tensor
    w2_bias: Tensor | None
    fmt: str
    group: int
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    zero: bool
    layout: str
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.w13.device

    @property
    def rows(self) -> int:
        """Rows of w13 without padding: 2 * intermediate if gated."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def bias(self) -> bool:
        """Whether there are biases."""
        return self.w13_bias is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for _, value in self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return name and tensor of those that there are."""
        for name in TENSORS:
            value = getattr(self, name)
            if value is not None:
                yield name, value

    def meta(self) -> dict[str, Any]:
        """Return everything but the tensors, as plain values."""
        values = {name: getattr(self, name) for name in _META}
        values["dtype"] = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return values

    @staticmethod
    def of(meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> MoeWeights:
        """Return the weights of which `meta` and `tensors` are these."""
        values = {name: meta[name] for name in _META}
        if values["dtype"] is not None:
            values["dtype"] = getattr(torch, values["dtype"])
        return MoeWeights(**{name: tensors.get(name) for name in TENSORS}, **values)  # type: ignore[arg-type]

    def to(self, device: str | torch.device) -> MoeWeights:
        """Return them on another device, in the same layout."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors()}
        return replace(self, **moved)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors by name, and under "meta" the rest; `load_state_dict` takes it."""
        return {**dict(self.tensors()), "meta": self.meta()}

    @staticmethod
    def load_state_dict(state: Mapping[str, Any]) -> MoeWeights:
        """Return the weights that `state_dict` described."""
        return MoeWeights.of(state["meta"], {n: v for n, v in state.items() if n != "meta"})

    def to_linear(self) -> MoeWeights:
        """Return weights of the same values in layout "linear", on the same device.

        Codes under a scale of zero come back as zero.  Scales of mxfp4 may be others whose products
        with the global scale are the same.
        """
        if self.layout == "linear":
            return self
        return to_linear(self)


def prepare_moe_weights(
    w13: Tensor,
    w2: Tensor,
    *,
    fmt: str = "nvfp4",
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_global_scale: Tensor | None = None,
    w2_global_scale: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "swiglu",
    group_size: int | None = None,
    w13_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
    int4_signed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    layout: str | None = None,
) -> MoeWeights:
    """Return the weights as kernels load them; keep it, and pass it in place of ``w13``.

    Args:
        w13: codes [E, 2 I, H / 2] uint8 or float4_e2m1fn_x2, even k in the low nibble; gate rows,
            then up rows.  [E, I, H / 2] for "relu2".
        w2: codes [E, H, I / 2].
        fmt: "nvfp4" (blocks of 16), "mxfp4" (blocks of 32) or "int4".
        w13_scale: [E, rows of w13, H / block]: E4M3 (nvfp4) or E8M0 (mxfp4) bytes, or, for int4,
            float32, bfloat16 or float16.
        w2_scale: [E, H, I / block], likewise.
        w13_global_scale: float32 [E], or [E, 2] for gate and up, multiplied; None: 1.
        w2_global_scale: float32 [E]; None: 1.
        w13_bias: [E, rows of w13] float32, bfloat16 or float16; None: 0.
        w2_bias: [E, H]; None: 0.
        activation: as in `fused_moe`; whether w13 has gate rows depends on it.
        group_size: int4: 32, 64 or 128; None: what the scales' shapes say.
        w13_zero: int4: uint8 [E, rows of w13, H / group], from 0 to 15, not packed; None: 8, the
            symmetric codes of AWQ, GPTQ and Marlin.
        w2_zero: uint8 [E, H, I / group]; both or neither.
        int4_signed: int4 codes are two's complement, from -8 to 7, instead of 0 to 15.
        dtype: of the activations: on CUDA int4 scales are rounded to it.
        layout: "linear" or "tiles64"; None: that of the tensors' device.

    Raises:
        TypeError, ValueError: an argument that does not fit, a scale that no kernel can multiply
            with (NaN, or below zero for nvfp4).
    """
    given = Given(
        *(w13, w2, fmt, w13_scale, w2_scale, w13_global_scale, w2_global_scale),
        *(w13_bias, w2_bias, activation, group_size, w13_zero, w2_zero, int4_signed),
    )
    return prepared("prepare_moe_weights", given, dtype, layout)


def prepared(where: str, given: Given, dtype: torch.dtype, layout: str | None) -> MoeWeights:
    """Return the weights of ``given``; errors begin with ``where``."""
    sizes = check_weights(where, given)
    if dtype not in checks.ACTIVATIONS:
        allowed = ", ".join(dtype_name(known) for known in checks.ACTIVATIONS)
        raise TypeError(f"{where}: dtype={dtype} is no activation's; choose one of {allowed}")
    layout = layout or ("linear" if given.w13.device.type == "cpu" else "tiles64")
    checks.choice(where, "layout", layout, LAYOUTS)
    plain = _plain(given, sizes)
    if layout == "linear":
        return plain
    if dtype == torch.float32:
        raise TypeError(
            f"{where}: dtype=float32 has no kernel on CUDA; choose bfloat16 or float16, which the "
            "activations must have"
        )
    return to_tiles(where, plain, dtype)


def _plain(given: Given, sizes: Sizes) -> MoeWeights:
    """Return the weights in layout "linear"."""
    experts, hidden, rows = sizes.experts, sizes.hidden, sizes.rows
    bias = given.w13_bias is not None or given.w2_bias is not None
    return MoeWeights(
        *(_codes(given.w13, given), _scales(given.w13_scale, given.fmt), given.w13_zero),
        _paired(_factor(given.w13_global_scale, experts, given.w13)),
        _bias(given.w13_bias, (experts, rows), given.w13) if bias else None,
        *(_codes(given.w2, given), _scales(given.w2_scale, given.fmt), given.w2_zero),
        _factor(given.w2_global_scale, experts, given.w2),
        _bias(given.w2_bias, (experts, hidden), given.w2) if bias else None,
        fmt=given.fmt,
        group=sizes.group,
        experts=experts,
        hidden=hidden,
        intermediate=sizes.intermediate,
        gated=sizes.gated,
        zero=given.w13_zero is not None,
        layout="linear",
    )


def _codes(value: Tensor, given: Given) -> Tensor:
    codes = value.detach().view(torch.uint8)
    return codes ^ SIGN_BITS if given.int4_signed else codes


def _scales(value: Tensor, fmt: str) -> Tensor:
    return value.detach().float() if fmt == "int4" else value.detach().view(torch.uint8)


def _factor(value: Tensor | None, experts: int, like: Tensor) -> Tensor:
    if value is None:
        return torch.ones(experts, dtype=torch.float32, device=like.device)
    return value.detach()


def _paired(value: Tensor) -> Tensor:
    """Return the global scales [E, 2] of gate and up."""
    return value if value.dim() == 2 else value[:, None].repeat(1, 2)


def _bias(value: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    if value is None:
        return torch.zeros(shape, dtype=torch.float32, device=like.device)
    return value.detach().float()
