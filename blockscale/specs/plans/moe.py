"""A grouped GEMM of an MoE layer on Hopper: its sizes, every decision of its schedule, its room.

The lowering reads a `MoePlan` off the scheduled TensorIR (`moe_read`), the kernel of
`native/moe_gemm.cuh` is compiled for it (`moe_source`).  Weights are the rows of the MMA (its M),
tokens its columns (its N): `y[token, row] = x[token, k] * w[row, k]`.  Sizes of the model are
arguments of the kernel, so one compiled kernel serves every model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockscale.base import formats
from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import GPU_TARGETS

SMEM_BYTES = GPU_TARGETS["sm_90a"].cta_shared
"""Shared memory that one CTA may use on sm_90."""

CTRL_BYTES = 1024
"""Shared memory for mbarriers and alignment: operands of wgmma start at multiples of 1024."""

TILE_K = 64
"""K of a block of weights: 16 consecutive k of each of a quad's threads; a 128-byte row of x."""

WARP_ROWS = 16
"""Rows of a warp's MMA."""

MMA_TOKENS = (8, 16, 24, 32, 48, 64)
"""Tokens of a tile, unit mma."""

WGMMA_TOKENS = (
    *(8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128),
    *(136, 144, 152, 160, 176, 192, 208, 224, 256),
)
"""Tokens of a tile, unit wgmma."""

LOADER_REGISTERS = 56
"""Of a thread that loads, where the others take what it leaves."""

ACTIVATIONS = ("none", "swiglu", "swiglu_oai", "gelu_tanh", "relu2")
"""What the epilogue does; all but none and relu2 take pairs of rows (gate, up)."""

DTYPES = ("bfloat16", "float16")


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
    if fmt != "int4":
        return 16 * 64 // group
    return 16 * (2 if zeros else 1) * (2 if group == 32 else 1)


def scale_bytes(fmt: str, group: int, zeros: bool) -> int:
    """Bytes of scales of 64 rows that a block of 64 k reads."""
    return 4 * scale_count(fmt, group, zeros) * (2 if fmt == "int4" else 1)


class PlanError(ValueError):
    """A combination of decisions that the hardware or the kernel does not have."""


@dataclass(frozen=True)
class MoePlan:
    """One kernel.

    Attributes:
        unit: "mma" (mma.sync, warps share K) or "wgmma" (warpgroups of 64 rows).
        fmt: key of `formats.MOE`.
        group: elements of K that share a scale.
        zeros: int4 with zero points.
        dtype: of x and out, of `DTYPES`.
        activation: of `ACTIVATIONS`.
        gather: rows of x are found through ``order`` (GEMM 1); else x is sorted and rows of out
            are scattered through it (GEMM 2).
        rows: of weights in a CTA's tile.
        tokens: the most of a tile.
        slices: of a stage's K, each multiplied by other warps (mma), which add up at the end.
        stages: of the ring from memory to MMA.
        blocks_k: blocks of 64 k in a stage; a multiple of slices.
    """

    unit: str
    fmt: str
    group: int
    zeros: bool
    dtype: str
    activation: str
    gather: bool
    rows: int
    tokens: int
    slices: int
    stages: int
    blocks_k: int

    # ---- Sizes ------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether rows are pairs of gate and up."""
        return self.activation not in ("none", "relu2")

    @property
    def zero_kind(self) -> int:
        """0: none, 1: points subtracted from codes, 2: terms added to products."""
        return int(self.zeros)

    @property
    def direct(self) -> bool:
        """Whether rows of x and of out are sorted as they are: no GEMM of an MoE layer."""
        return False

    @property
    def one(self) -> bool:
        """Whether there is one expert, which needs no table."""
        return False

    @property
    def tiles_m(self) -> int:
        """16-row (mma) or 64-row (wgmma) tiles that one warp (warpgroup) multiplies."""
        if self.unit == "wgmma":
            return max(1, self.rows // 128)
        return max(1, self.rows * self.slices // (WARP_ROWS * 8))

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        if self.unit == "wgmma":
            return 4 * self.rows // (64 * self.tiles_m)
        return self.rows * self.slices // (WARP_ROWS * self.tiles_m)

    @property
    def producers(self) -> int:
        """Warps that load: one weights, the others tokens."""
        return 4 if self.unit == "wgmma" else 2

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumers + self.producers)

    @property
    def consumer_registers(self) -> int:
        """Of a thread that multiplies, once the loading ones gave theirs up; 0: nothing is moved.

        A CTA starts with as many for each thread as an SM has; the sum must stay the same, for a
        warp that asks for more waits for ever.
        """
        if self.unit != "wgmma" or self.consumers == 4:
            return 0
        all_of_them = 65536 // self.threads // 8 * 8 * self.threads
        rest = all_of_them - LOADER_REGISTERS * 32 * self.producers
        return rest // (32 * self.consumers) // 8 * 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales of 64 rows that a block of 64 k reads."""
        return scale_bytes(self.fmt, self.group, self.zeros)

    @property
    def weight_stage(self) -> int:
        """Bytes of codes of a stage."""
        return self.rows * TILE_K // 2 * self.blocks_k

    @property
    def scale_stage(self) -> int:
        """Bytes of scales of a stage; two blocks of k share those of groups of 128."""
        blocks = ceil_div(self.blocks_k, 2) if self.group == 128 else self.blocks_k
        return self.rows * self.scale_bytes // 64 * blocks

    @property
    def token_stage(self) -> int:
        """Bytes of x of a stage: 128-byte rows."""
        return self.tokens * TILE_K * 2 * self.blocks_k

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage, in which tokens start at a multiple of 1024."""
        return round_up(self.weight_stage + self.scale_stage, 1024) + self.token_stage

    @property
    def reduce_bytes(self) -> int:
        """Shared memory in which slices add up: fp32 of all but the first."""
        return (self.slices - 1) * self.rows * self.tokens * 4

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return CTRL_BYTES + 1024 + self.stages * self.stage_bytes + self.reduce_bytes

    # ---- What exists ------------------------------------------------------------------------

    def illegal(self) -> str | None:
        """Return why there is no such kernel, or None."""
        return self._illegal_choice() or self._illegal_tile()

    def _illegal_choice(self) -> str | None:
        if self.unit not in ("mma", "wgmma"):
            return f"unit {self.unit!r} is neither mma nor wgmma"
        if self.fmt not in formats.MOE or self.group not in formats.MOE[self.fmt].blocks:
            return f"there is no {self.fmt!r} with groups of {self.group}"
        if self.zeros and self.fmt != "int4":
            return "only int4 has zero points"
        if self.activation not in ACTIVATIONS or self.dtype not in DTYPES:
            return f"there is no activation {self.activation!r} of {self.dtype!r}"
        if self.gather != (self.activation != "none"):
            return "GEMM 1 gathers and has an activation, GEMM 2 neither"
        return None

    def _illegal_tile(self) -> str | None:
        wgmma = self.unit == "wgmma"
        if self.tokens not in (WGMMA_TOKENS if wgmma else MMA_TOKENS):
            return f"no {self.unit} kernel of {self.tokens} tokens"
        if wgmma and (self.rows not in (64, 128, 256) or self.slices != 1):
            return "wgmma takes 64, 128 or 256 rows, K in one slice"
        if not wgmma and self.rows not in (16, 32, 64, 128, 256):
            return f"no mma kernel of {self.rows} rows"
        if not wgmma and self.slices not in (1, 2, 4, 8):
            return f"no kernel of {self.slices} slices of K"
        if self.blocks_k % self.slices or self.blocks_k not in (1, 2, 4, 8):
            return f"{self.blocks_k} blocks of 64 k do not make {self.slices} slices"
        if self.tiles_m * self.tokens > (320 if wgmma else 256):
            return "accumulators do not fit into registers"
        if wgmma and self.tiles_m * self.blocks_k % 2:
            return "a stage of wgmma has an even number of units of 64 rows and 64 k"
        if wgmma and self.blocks_k > 2:
            return "a stage of wgmma has one or two blocks of 64 k"
        if not 2 <= self.stages <= 16:
            return f"{self.stages} stages are not between 2 and 16"
        if self.smem_bytes > SMEM_BYTES:
            return f"{self.smem_bytes} bytes of shared memory are more than {SMEM_BYTES}"
        return None

    def check(self) -> MoePlan:
        """Return self; PlanError unless there is such a kernel."""
        reason = self.illegal()
        if reason:
            raise PlanError(f"{self}: {reason}")
        return self
