"""A grouped GEMM of an MoE layer on a GPU: its sizes, and the shapes that its tiles may have.

Weights are the rows of the MMA (its M), tokens its columns (its N): `y[token, row] = x[token, k] *
w[row, k]`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import GPU_TARGETS
from blockscale.specs.plans import tensor_memory

SMEM_BYTES = GPU_TARGETS["sm_90a"].cta_shared
"""Shared memory that one CTA may use on sm_90."""

CTRL_BYTES = 1024
"""Shared memory for mbarriers and alignment: operands of wgmma start at multiples of 1024."""

TILE_K = 64
"""K of a block of weights: 16 consecutive k of each of a quad's threads; a 128-byte row of x."""

WARP_ROWS = 16
"""Rows of a warp's MMA."""

MOST_STAGES = 16
"""Of a ring; deeper ones gain nothing."""

MMA_TOKENS = (8, 16, 24, 32, 48, 64)
"""Tokens of a tile, unit mma."""

WGMMA_TOKENS = (
    *(8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 104, 112, 128),
    *(136, 144, 152, 160, 176, 192, 208, 224, 256),
)
"""Tokens of a tile, unit wgmma."""

LOADER_REGISTERS = 56
"""Of a thread that loads, where the others take what it leaves."""

PARTIAL_REGISTERS = 168
"""Sums of a thread that leave registers for two banks of 16, codes and addresses."""

ACTIVATIONS = ("none", "swiglu", "swiglu_oai", "gelu_tanh", "relu2")
"""What the epilogue does; all but none and relu2 take pairs of rows (gate, up)."""

DTYPES = ("bfloat16", "float16")

E4M3 = "float8_e4m3fn"
"""Dtype of operands of 8 bits."""

BYTE_BLOCKS = (2, 4)
"""Blocks of 64 k in a stage of operands of 8 bits."""

BYTE_SUMS = {False: ((4, 256), (2, 128)), True: ((4, 0), (2, 0))}
"""Blocks of 64 k of a stage and `MoeTile.partial` that are tried, without and with fast sums."""

BYTE_GROUPS = {"mxfp4": (32,), "nvfp4": (16,), "int4": (64, 128)}
"""Weights that layout "tiles64e" holds, nvfp4 rounded, and their groups: of int4 those of whole
blocks of 64 k, whose products MMAs of 8 bits sum up."""

BYTE_FORMS = "fmt='mxfp4', 'nvfp4', or 'int4' with groups of 64 or 128"
"""The same in words."""

PREFERRED = {("mxfp4", 32), ("int4", 128)}
"""Formats and groups of weights that are in it once act_fmt is told; other ones if the layout is:
of int4 in groups of 64 8 bits were slower than 16 on an H200."""

TERM = 2
"""Kind of zeros of int4 weights that are added to products; 1: subtracted from codes; 0: none."""

ATTRIBUTE = "blockscale.moe"
"""Function attribute: the fields of `MoeGemm`."""

FAST = "blockscale.fast_accum"
"""Function attribute: MMAs of 8 bits, whose sums have some 14 bits, may sum up all of K."""

AFTER = "blockscale.after"
"""Function attribute: parameters that the kernel before it in the stream writes, which it may not
read before that one has ended; without the attribute all."""


ADDRESSED = "blockscale.addressed"
"""Function attribute: parameters given as addresses of their rows, which lie anywhere."""


@dataclass(frozen=True)
class MoeGemm:
    """One of the two GEMMs of an MoE layer; the true sizes, but rows and K multiples of 64.

    ``zeros``: 0: none, 1: points that are subtracted from codes, `TERM`: terms that are added to
    products; ``rows``: of the weights of an expert, gate and up counted both; ``cols``: of out,
    where that has fewer than rows make; ``bytewise``: layout "tiles64e", words whose codes become
    bytes, and a factor for each row; ``operand``: dtype of x and of decoded weights, if it is not
    ``dtype``: `E4M3`; ``fast``: whether sums of such operands may be those of MMAs (`FAST`);
    ``sent``: whether rows of out are `ADDRESSED`, as those in other GPUs' memory are.
    """

    fmt: str
    group: int
    zeros: int
    dtype: str
    activation: str
    experts: int
    rows: int
    k: int
    top_k: int
    cols: int = 0
    bytewise: bool = False
    operand: str = ""
    fast: bool = False
    sent: bool = False

    @staticmethod
    def of(func: Any) -> MoeGemm:
        """Return what the attribute of a function of `moe_tiles` says."""
        said = dict(func.attrs[ATTRIBUTE])
        text = {key: str(said[key]) for key in ("fmt", "dtype", "activation")}
        sizes = {key: int(said[key]) for key in ("group", "experts", "rows", "k", "top_k", "cols")}
        more: dict[str, Any] = {"bytewise": bool(said.get("bytewise", False))}
        more |= {name: bool(said.get(name, False)) for name in ("fast", "sent")}
        more["operand"] = str(said.get("operand", ""))
        return MoeGemm(**text, **sizes, **more, zeros=int(said["zeros"]))  # type: ignore[arg-type]

    def attribute(self) -> dict[str, Any]:
        """Return its fields, but those that most layers leave as they are."""
        more = {"bytewise", "operand", "fast", "sent"}
        return {key: value for key, value in asdict(self).items() if key not in more or value}

    @property
    def multiplied(self) -> str:
        """Dtype of x and of decoded weights."""
        return self.operand or self.dtype

    @property
    def item(self) -> int:
        """Bytes of an element of x."""
        return 1 if self.operand else 2

    @property
    def order(self) -> str:
        """Of K among threads and MMAs; see `tir.intrin.warp.decode`."""
        return "bytes" if self.bytewise else "positions"

    @property
    def gather(self) -> bool:
        """Whether it is GEMM 1."""
        return self.activation != "none"

    @property
    def gated(self) -> bool:
        """Whether rows are pairs of gate and up."""
        return self.activation not in ("none", "relu2")

    @property
    def columns(self) -> int:
        """Of out."""
        return self.cols or (self.rows // 2 if self.gated else self.rows)

    @property
    def scaled_sums(self) -> bool:
        """Whether scales are multiplied with sums of groups; see `tir.moe.tiles.scaled_sums`."""
        return self.fmt == "int4" and bool(self.operand)

    @property
    def scale_dtype(self) -> str:
        """Of the scales: those of int4 are numbers."""
        return self.dtype if self.fmt == "int4" else "uint8"

    @property
    def scales(self) -> int:
        """Numbers in `scale_dtype` that a tile of 16 rows has for 64 k, zero points among them."""
        return scale_count(self.fmt, self.group, self.zeros)


def scale_count(fmt: str, group: int, zeros: int) -> int:
    """Numbers that a tile of 16 rows has for 64 k: scales, and zero points."""
    if fmt != "int4":
        return 16 * 64 // group
    return 16 * (2 if zeros else 1) * (2 if group == 32 else 1)


def scale_bytes(fmt: str, group: int, zeros: int) -> int:
    """Bytes of scales of 64 rows that a block of 64 k reads."""
    return 4 * scale_count(fmt, group, zeros) * (2 if fmt == "int4" else 1)


def byte_sums(fmt: str, group: int, fast: bool) -> tuple[tuple[int, int], ...]:
    """Return `BYTE_SUMS` of a weight: of int4 those of its groups, fast sums or not."""
    return ((4, group), (2, group)) if fmt == "int4" else BYTE_SUMS[fast]


def illegal_bytes(blocks_k: int, partial: int, tiles_m: int, tokens: int) -> str | None:
    """Return why a tile of 8-bit operands has no kernel, or None; see `MoeTile`."""
    if blocks_k not in BYTE_BLOCKS:
        return f"a stage of operands of 8 bits has {' or '.join(map(str, BYTE_BLOCKS))} blocks of K"
    if partial % TILE_K or (partial and blocks_k % (partial // TILE_K)):
        return f"{partial} channels do not divide the {blocks_k * TILE_K} of a stage"
    sums = (tiles_m + bool(partial)) * tokens // 2
    if sums > PARTIAL_REGISTERS:
        return f"{sums} sums of a thread are more than {PARTIAL_REGISTERS}"
    return None


def illegal_groups(fmt: str, group: int, blocks_k: int, partial: int, tiles_m: int) -> str | None:
    """Return why there are no such sums of 8-bit operands, or None; see `MoeTile`."""
    if fmt != "int4":
        return None
    if group not in BYTE_GROUPS[fmt] or partial != group:
        return f"8-bit products of int4 in groups of {group} are not summed up by {partial}"
    # Of one tile and two blocks a group of 128 makes one run of products of a stage, which would be
    # decoded into the fragments that the stage before multiplies; groups of 64 ptxas serialises.
    if tiles_m == 1 and blocks_k < 4:
        return "of one tile of 16 rows of a warp, a stage with sums of groups has four blocks of K"
    return None


@dataclass(frozen=True)
class MoeTile:
    """The shape of a tile of a grouped GEMM.

    Attributes:
        unit: "mma" (mma.sync, warps share K), "wgmma" (warpgroups of 64 rows) or "tcgen05".
        rows: of weights in a CTA's tile.
        tokens: the most of a tile.
        slices: of a stage's K, each multiplied by other warps (mma), which add up at the end; of
            tcgen05 decoded by other warps.
        blocks_k: blocks of 64 k in a stage; a multiple of slices.
        partial: operands of 8 bits: channels whose products the MMA, whose sums have some 14 bits,
            sums up by themselves before float32 registers add them; 0: those of all.
    """

    unit: str
    rows: int
    tokens: int
    slices: int
    blocks_k: int
    partial: int = field(default=0, kw_only=True)

    # ---- Warps ------------------------------------------------------------------------------

    @property
    def tensor(self) -> bool:
        """Whether decoded weights and sums are in tensor memory."""
        return self.unit == "tcgen05"

    @property
    def part_rows(self) -> int:
        """Tokens whose sums a warp reads from tensor memory at a time; 0: none."""
        return tensor_memory.part_rows(self.tokens, self.slices) if self.tensor else 0

    @property
    def tiles_m(self) -> int:
        """Tiles of 16 rows of a warp."""
        if self.tensor:
            return self.rows // (WARP_ROWS * tensor_memory.WARPS)
        if self.unit == "wgmma":
            return max(1, self.rows // 128)
        return max(1, self.rows * self.slices // (WARP_ROWS * 8))

    @property
    def warps(self) -> int:
        """That share the rows."""
        return self.rows // (WARP_ROWS * self.tiles_m)

    @property
    def ctas(self) -> int:
        """That share K: no others."""
        return 1

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.warps * self.slices

    # ---- Shared memory ----------------------------------------------------------------------

    def weight_stage(self) -> int:
        """Bytes of codes of a stage."""
        return self.rows * TILE_K // 2 * self.blocks_k

    def scale_stage(self, gemm: MoeGemm) -> int:
        """Bytes of scales of a stage; two blocks of k share those of groups of 128."""
        blocks = ceil_div(self.blocks_k, 2) if gemm.group == 128 else self.blocks_k
        return self.rows * scale_bytes(gemm.fmt, gemm.group, gemm.zeros) // 64 * blocks

    def stage_bytes(self, gemm: MoeGemm) -> int:
        """Shared memory of a stage, in which tokens, rows of 128 bytes, start at 1024 times n."""
        weights = round_up(self.weight_stage() + self.scale_stage(gemm), 1024)
        return weights + self.tokens * TILE_K * gemm.item * self.blocks_k

    def reduce_bytes(self) -> int:
        """Shared memory in which slices add up: fp32 of all but the first."""
        return 0 if self.tensor else (self.slices - 1) * self.rows * self.tokens * 4

    def shared(self, gemm: MoeGemm, stages: int) -> int:
        """Dynamic shared memory of a CTA."""
        found = CTRL_BYTES + 1024 + stages * self.stage_bytes(gemm) + self.reduce_bytes()
        return max(found, tensor_memory.ALONE) if self.tensor and stages else found

    def stages_in(self, gemm: MoeGemm, room: int) -> int:
        """The most stages with which a CTA takes at most ``room`` bytes."""
        return min(MOST_STAGES, (room - self.shared(gemm, 0)) // self.stage_bytes(gemm))

    # ---- What exists ------------------------------------------------------------------------

    def illegal(self, gemm: MoeGemm) -> str | None:
        """Return why there is no such kernel with a ring of two stages, or None."""
        wgmma = self.unit == "wgmma"
        if self.tensor:
            return self._illegal_tensor(gemm)
        if self.unit not in ("mma", "wgmma"):
            return f"unit {self.unit!r} is neither mma, wgmma nor tcgen05"
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
        if gemm.group == 128 and self.blocks_k % 2:
            return "a stage has whole groups of 128"
        if self.tiles_m * self.tokens > (320 if wgmma else 256):
            return "accumulators do not fit into registers"
        if gemm.operand:
            return self._illegal_bytes(gemm)
        if wgmma and self.tiles_m * self.blocks_k % 2:
            return "a stage of wgmma has an even number of units of 64 rows and 64 k"
        if wgmma and self.blocks_k > 2:
            return "a stage of wgmma has one or two blocks of 64 k"
        return self._too_large(gemm)

    def _illegal_tensor(self, gemm: MoeGemm) -> str | None:
        """The same of tcgen05."""
        if gemm.operand:
            return "tcgen05 takes operands of 16 bits"
        if gemm.group == 128 and self.blocks_k % 2:
            return "a stage has whole groups of 128"
        sizes = self.rows, self.tokens, self.warps, self.slices, self.blocks_k
        return tensor_memory.illegal(*sizes) or self._too_large(gemm)

    def _illegal_bytes(self, gemm: MoeGemm) -> str | None:
        """The same of operands of 8 bits, of which only wgmma multiplies tiles of MoE layers."""
        if self.unit != "wgmma" or self.consumers != 8 or self.tiles_m > 2:
            return "operands of 8 bits are multiplied by eight warps of wgmma, 128 or 256 rows"
        sums = self.blocks_k, self.partial, self.tiles_m
        reason = illegal_bytes(*sums, self.tokens)
        reason = reason or illegal_groups(gemm.fmt, gemm.group, *sums)
        return reason or self._too_large(gemm)

    def _too_large(self, gemm: MoeGemm) -> str | None:
        if self.shared(gemm, 2) > SMEM_BYTES:
            return f"{self.shared(gemm, 2)} bytes of shared memory are more than {SMEM_BYTES}"
        return None
