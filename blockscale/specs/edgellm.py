"""Specs of Edge-LLM's decode ops: two passes of GEMVs on N-major NVFP4 experts."""

from __future__ import annotations

from dataclasses import dataclass

from blockscale.specs.spec import DTYPE_SUFFIX, Name, Param, Spec, check_multiple

TILE = 64
"""What hidden and intermediate sizes are multiples of: values of a tile."""

BLOCK = 16
ACTIVATIONS = ("relu2", "silu")


class _Edge(Spec):
    """What both specs have."""

    hidden: int
    intermediate: int

    def __post_init__(self) -> None:
        super().__post_init__()
        where, what, advice = type(self).__name__, "the values of a tile", "pad the weights to {}"
        check_multiple(where, "hidden", self.hidden, TILE, what, advice)
        check_multiple(where, "intermediate", self.intermediate, TILE, what, advice)


def _weights(rows: int, columns: int) -> tuple[Param, ...]:
    """Payload, decode scales and global scale of experts [rows, columns]."""
    return (
        Param("payload", "uint8", ("experts", rows, columns // 2), storage="e2m1x2"),
        Param("decode_scales", "uint8", ("experts", rows // BLOCK, columns), storage="s0e5m3"),
        Param("global_scale", "float32", ("experts",), default=1.0),
    )


@dataclass(frozen=True)
class EdgeUp(_Edge):
    """``z[t, j] = (x[t] @ w[topk_ids[t, j]]) * global_scale``, zero where there is no such expert.

    ``dtype``: of x, or "nvfp4": x is packed codes with a scale of 16 and one of all.
    """

    hidden: int
    intermediate: int
    dtype: str = "float16"
    op = "edgellm_up"
    pattern = Name(
        "edgellm_up_h{hidden}_i{intermediate}_{dtype}",
        "edgellm_up_h2688_i1856_f16",
        texts={"dtype": {**DTYPE_SUFFIX, "nvfp4": "nvfp4"}},
    )

    @property
    def rows(self) -> int:
        """Rows of an expert, along which is summed."""
        return self.hidden

    @property
    def columns(self) -> int:
        """Columns of an expert."""
        return self.intermediate

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
class EdgeDown(_Edge):
    """``out[t] = sum over j of topk_weights[t, j] * (act(z[t, j]) @ w[topk_ids[t, j]])``, scaled.

    ``partial`` holds the terms of the sum.
    """

    hidden: int
    intermediate: int
    activation: str = "relu2"
    dtype: str = "float32"
    op = "edgellm_down"
    pattern = Name(
        "edgellm_down_h{hidden}_i{intermediate}_{activation}_{dtype}",
        "edgellm_down_h2688_i1856_relu2_f32",
        texts={"activation": ACTIVATIONS, "dtype": DTYPE_SUFFIX},
    )

    @property
    def rows(self) -> int:
        """Rows of an expert, along which is summed."""
        return self.intermediate

    @property
    def columns(self) -> int:
        """Columns of an expert."""
        return self.hidden

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
