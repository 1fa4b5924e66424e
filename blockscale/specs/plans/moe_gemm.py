"""Sizes of one grouped GEMM of an MoE layer; nothing here imports tvm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "blockscale.moe"
"""Function attribute: the fields of `MoeGemm`."""


@dataclass(frozen=True)
class MoeGemm:
    """One of the two GEMMs of an MoE layer; the true sizes, but rows and K multiples of 64.

    ``rows``: of the weights of an expert, gate and up counted both.
    """

    fmt: str
    group: int
    zeros: bool
    dtype: str
    activation: str
    experts: int
    rows: int
    k: int
    top_k: int

    @staticmethod
    def of(func: Any) -> MoeGemm:
        """Return what the attribute of a function of `moe_tiles` says."""
        said = dict(func.attrs[ATTRIBUTE])
        text = {key: str(said[key]) for key in ("fmt", "dtype", "activation")}
        sizes = {key: int(said[key]) for key in ("group", "experts", "rows", "k", "top_k")}
        return MoeGemm(**text, **sizes, zeros=bool(said["zeros"]))  # type: ignore[arg-type]

    @property
    def gather(self) -> bool:
        """Whether it is GEMM 1."""
        return self.activation != "none"

    @property
    def gated(self) -> bool:
        """Whether rows are pairs of gate and up."""
        return self.activation not in ("none", "relu2")

    @property
    def scale_dtype(self) -> str:
        """Of the scales: those of int4 are numbers."""
        return self.dtype if self.fmt == "int4" else "uint8"

    @property
    def scales(self) -> int:
        """Numbers in `scale_dtype` that a tile of 16 rows has for 64 k, zero points among them."""
        return scale_count(self.fmt, self.group, self.zeros)


def scale_count(fmt: str, group: int, zeros: bool) -> int:
    """Numbers that a tile of 16 rows has for 64 k: scales, and zero points."""
    if fmt == "nvfp4":
        return 64
    if fmt == "mxfp4":
        return 32
    return 16 * (2 if zeros else 1) * (2 if group == 32 else 1)
