"""Specs of Edge-LLM's decode ops: two passes of GEMVs on N-major NVFP4 experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockscale.base.sizes import round_up
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    SUFFIX_DTYPE,
    Param,
    Spec,
    check_choice,
    check_positive,
    register,
)

TILE = 64
"""What hidden and intermediate sizes are multiples of: values of a tile."""

BLOCK = 16
ACTIVATIONS = ("relu2", "silu")
_SUFFIX = {**DTYPE_SUFFIX, "nvfp4": "nvfp4"}


def _check_sizes(where: str, hidden: object, intermediate: object) -> None:
    for name, value in (("hidden", hidden), ("intermediate", intermediate)):
        check_positive(where, name, value)
        assert isinstance(value, int)
        if value % TILE:
            raise ValueError(
                f"{where}: {name}={value} is not a multiple of {TILE}, the values of a tile; pad "
                f"the weights to {round_up(value, TILE)}"
            )


def _weights(rows: int, columns: int) -> tuple[Param, ...]:
    """Payload, decode scales and global scale of experts [rows, columns]."""
    return (
        Param("payload", "uint8", ("experts", rows, columns // 2), storage="e2m1x2"),
        Param("decode_scales", "uint8", ("experts", rows // BLOCK, columns), storage="s0e5m3"),
        Param("global_scale", "float32", ("experts",), default=1.0),
    )


@dataclass(frozen=True)
class EdgeUp(Spec):
    """``z[t, j] = (x[t] @ w[topk_ids[t, j]]) * global_scale``, zero where there is no such expert.

    ``dtype``: of x, or "nvfp4": x is packed codes with a scale of 16 and one of all.
    """

    hidden: int
    intermediate: int
    dtype: str = "float16"
    op: ClassVar[str] = "edgellm_up"

    def __post_init__(self) -> None:
        check_choice("EdgeUp", "dtype", self.dtype, _SUFFIX)
        _check_sizes("EdgeUp", self.hidden, self.intermediate)

    @property
    def rows(self) -> int:
        """Rows of an expert, along which is summed."""
        return self.hidden

    @property
    def columns(self) -> int:
        """Columns of an expert."""
        return self.intermediate

    @property
    def name(self) -> str:
        """For example ``edgellm_up_h2688_i1856_bf16``."""
        return f"edgellm_up_h{self.hidden}_i{self.intermediate}_{_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """x, (x_scale, x_global_scale), the weights, topk_ids, z."""
        if self.dtype == "nvfp4":
            x: tuple[Param, ...] = (
                Param("x", "uint8", ("tokens", self.hidden // 2), storage="e2m1x2"),
                Param(
                    "x_scale", "uint8", ("tokens", self.hidden // BLOCK), storage="s0e5m3 exchanged"
                ),
                Param("x_global_scale", "float32", (1,), default=1.0),
            )
        else:
            x = (Param("x", self.dtype, ("tokens", self.hidden)),)
        return (
            *x,
            *_weights(self.hidden, self.intermediate),
            Param("topk_ids", "int32", ("tokens", "slots")),
            Param("z", "float32", ("tokens", "slots", self.intermediate), output=True),
        )


@dataclass(frozen=True)
class EdgeDown(Spec):
    """``out[t] = sum over j of topk_weights[t, j] * (act(z[t, j]) @ w[topk_ids[t, j]])``, scaled.

    ``partial`` holds the terms of the sum.
    """

    hidden: int
    intermediate: int
    activation: str = "relu2"
    dtype: str = "float32"
    op: ClassVar[str] = "edgellm_down"

    def __post_init__(self) -> None:
        check_choice("EdgeDown", "activation", self.activation, ACTIVATIONS)
        check_choice("EdgeDown", "dtype", self.dtype, DTYPE_SUFFIX)
        _check_sizes("EdgeDown", self.hidden, self.intermediate)

    @property
    def rows(self) -> int:
        """Rows of an expert, along which is summed."""
        return self.intermediate

    @property
    def columns(self) -> int:
        """Columns of an expert."""
        return self.hidden

    @property
    def name(self) -> str:
        """For example ``edgellm_down_h2688_i1856_relu2_f32``."""
        sizes = f"h{self.hidden}_i{self.intermediate}"
        return f"edgellm_down_{sizes}_{self.activation}_{DTYPE_SUFFIX[self.dtype]}"

    def params(self) -> tuple[Param, ...]:
        """z, the weights, topk_ids, topk_weights, partial, out."""
        partial = ("tokens", "slots", self.hidden)
        return (
            Param("z", "float32", ("tokens", "slots", self.intermediate)),
            *_weights(self.intermediate, self.hidden),
            Param("topk_ids", "int32", ("tokens", "slots")),
            Param("topk_weights", "float32", ("tokens", "slots")),
            Param("partial", "float32", partial, output=True),
            Param("out", self.dtype, ("tokens", self.hidden), output=True),
        )


def register_edgellm() -> None:
    """Make the specs of this module known."""
    sizes = r"h(?P<hidden>\d+)_i(?P<intermediate>\d+)"
    register(
        EdgeUp,
        ("edgellm_up_h2688_i1856_f16",),
        rf"edgellm_up_{sizes}_(?P<dtype>f32|bf16|f16|nvfp4)",
        lambda hidden, intermediate, dtype: EdgeUp(
            int(hidden), int(intermediate), dtype if dtype == "nvfp4" else SUFFIX_DTYPE[dtype]
        ),
    )
    register(
        EdgeDown,
        ("edgellm_down_h2688_i1856_relu2_f32",),
        rf"edgellm_down_{sizes}_(?P<activation>relu2|silu)_(?P<dtype>f32|bf16|f16)",
        lambda hidden, intermediate, activation, dtype: EdgeDown(
            int(hidden), int(intermediate), activation, SUFFIX_DTYPE[dtype]
        ),
    )
