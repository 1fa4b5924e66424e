"""What a grouped GEMM of an MoE layer may be on Hopper and later: tiles for a number of tokens.

A `MoeTile` is a sketch of its own, for it names tensor intrinsics; the depth of its ring is left
to choose.  Which tiles make sense depends on the tokens that an expert gets; `MoeTile.illegal` says
what hardware and lowering forbid.  There are few of them, some 40 for all numbers of tokens: each
is a kernel that nvcc compiles for seconds.
"""

from __future__ import annotations

from itertools import product
from math import sqrt

from blockscale.base import targets
from blockscale.base.targets import CTA_RESERVED, GPU_TARGETS, Gpu
from blockscale.specs.plans import tensor_memory
from blockscale.specs.plans.moe import MoeGemm, MoeTile, byte_sums

HOPPER = GPU_TARGETS["sm_90a"]
"""An H100 SXM or H200; architectures without wgmma multiply many tokens by mma.sync, too."""

WGMMA_STAGES = 8
"""Of a ring of wgmma: from 4 to 9 it gained 1 % on an H200."""

MMA = {
    8: (
        *((64, 2, 4), (64, 2, 2), (64, 4, 4), (32, 4, 4), (32, 8, 8), (128, 2, 4), (128, 1, 2)),
        *((128, 2, 2), (256, 1, 2), (256, 1, 1)),
    ),
    16: ((128, 2, 4), (128, 1, 2), (64, 2, 4), (64, 2, 2), (256, 1, 2)),
    24: ((256, 1, 2), (128, 1, 2), (64, 2, 2)),
    32: ((256, 1, 2), (128, 1, 2), (64, 2, 2)),
    64: ((128, 1, 2), (64, 2, 2), (128, 2, 2)),
}
"""Rows, slices and blocks of 64 k of a stage that are tried with mma.sync, by tokens of a tile."""

WGMMA = ((256, 2),)
"""Rows and blocks of 64 k of a stage that are tried with wgmma.

On an H200 half as many rows took 1.05 to 1.25 as long, stages of one block up to 1.1, for any
number of tokens from 24 on.
"""

TOKENS: tuple[tuple[float, tuple[int, ...], tuple[int, ...]], ...] = (
    (2.0, (8,), ()),
    (9.0, (8, 16), ()),
    (12.0, (16, 8, 24), (16, 24)),
    (24.0, (24,), (24, 32, 16, 40)),
    (30.0, (32,), (32, 40, 24)),
    (38.0, (32,), (40, 32, 48)),
    (48.0, (32,), (48, 40, 64, 32)),
    (60.0, (64,), (64, 48, 80)),
    (78.0, (64,), (80, 64, 96)),
    (94.0, (64,), (96, 112, 80, 128)),
    (110.0, (64,), (112, 128, 96)),
    (126.0, (64,), (128, 112, 144, 152)),
    (float("inf"), (64,), (152, 144, 160, 136, 128, 112)),
)
"""Tokens of a tile that are tried, for mma.sync and wgmma, up to so many tokens of an expert.

The number is the mean of the experts that have any, and its root: what most of them have.  The
default has the first of wgmma, or of mma.sync without one.
"""

FEW_BYTES: tuple[tuple[float, tuple[tuple[int, int], ...]], ...] = (
    (1.0, ((128, 8), (256, 8), (256, 16))),
    (4.0, ((256, 16), (256, 8), (128, 8))),
    (12.0, ((256, 24), (256, 32), (256, 16), (256, 48))),
    (30.0, ((256, 32), (256, 40), (256, 24), (256, 48))),
    (36.0, ((256, 40), (256, 48), (256, 32))),
    (48.0, ((256, 48), (256, 40), (256, 64), (256, 32))),
    (60.0, ((256, 64), (256, 48), (256, 80))),
    (80.0, ((256, 80), (256, 96), (256, 64), (256, 112))),
)
BYTE_TOKENS = (
    *FEW_BYTES,
    (112.0, ((256, 112), (256, 96), (256, 80), (128, 152))),
    (152.0, ((128, 152), (128, 144), (128, 160), (256, 80))),
    (float("inf"), ((256, 104), (256, 112), (256, 96), (128, 160), (128, 152), (128, 144))),
)
"""Rows and tokens of a tile with operands of 8 bits; sums apart have registers of their own.

On an H200 half the rows were faster where they save the experts a second tile; of 256 rows 104 and
112 tokens were 1.06 times as fast as 96 in large layers, and 0.99 and 0.95 in Qwen3's.  For 16
tokens an expert (NVFP4) 48 of a tile took 1.08 times as long as 32.
"""

TWO_TILES, DEEP = (256.0, 288.0), 4096
"""Tokens of an expert that fill two tiles of 128 rows and 144 tokens, and K from which on these are
the default: on an H200 Mixtral's GEMMs took 0.94 (MXFP4) and 0.93 (INT4) of the time of those of
256 rows, those of DeepSeek-V3 0.97 and 0.99, Qwen3's, whose K is 2048 and 768, 1.06 (INT4).
"""

FAST_TOKENS = (
    *FEW_BYTES,
    (112.0, ((256, 112), (256, 96), (256, 128))),
    (152.0, ((256, 152), (256, 144), (256, 160))),
    (float("inf"), ((256, 152), (256, 144), (256, 136), (256, 160), (256, 128))),
)
"""The same where MMAs may sum up all of K."""

GROUP_TOKENS = (
    *FEW_BYTES,
    (112.0, ((256, 112), (256, 104), (256, 96), (128, 128))),
    (152.0, ((128, 152), (128, 144), (256, 80), (256, 72))),
    (288.0, ((256, 96), (128, 144), (256, 104), (128, 152))),
    (600.0, ((256, 104), (128, 144), (256, 96), (128, 176))),
    (float("inf"), ((128, 152), (256, 104), (128, 176), (256, 96))),
)
"""The same of int4, whose groups have sums of their own.

On an H200 128 rows and 152 tokens took 0.81, 0.93 and 0.87 of the time of 256 and 80 with 128
tokens an expert (Mixtral, Qwen3, DeepSeek-V3), 144 tokens 0.80, 0.97 and 0.92; with 1024 (Mixtral,
DeepSeek-V3) 152 took 0.97 and 0.97 of that of 256 rows and 104 tokens, with 512 0.98 and 1.05.  Of
256 rows 104 tokens took 0.95 of the time of 96 and of 112 (Mixtral, 4096), of Qwen3 1.08 (of 96).
"""

TENSOR_WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Tokens of a tile of tcgen05; the first that holds what most experts get is the default."""

TENSOR_LEAST = 24.0
"""Tokens of an expert from which on tiles of tcgen05 are tried, and one is the default.

Not measured: by the model of `schedules.gemm.linear_tensor_tiles` mma.sync takes longer from 16 on,
and its CTAs share SMs, which hides what few tokens wait for.
"""

HIGHER = ((1400, 64), (float("inf"), 128))
"""Rows of the default with mma.sync, up to so many tiles of 64 rows of all experts, on an H200."""
FEW = 4.0
"""Tokens of an expert up to which that holds; with more, 64 rows took up to 1.2 times as long."""


def busy_experts(gemm: MoeGemm, tokens: int) -> float:
    """Return how many experts ``tokens`` tokens are routed to if that is random."""
    share = gemm.top_k / gemm.experts
    return gemm.experts * (1 - (1 - share) ** tokens)


def expected_tokens(gemm: MoeGemm, tokens: int) -> float:
    """Return how many tokens most of the busy experts have at most."""
    mean = tokens * gemm.top_k / busy_experts(gemm, tokens)
    return mean + sqrt(mean) if mean > 1.5 else mean


def depths(gemm: MoeGemm, tile: MoeTile, arch: Gpu = HOPPER) -> tuple[int, ...]:
    """Return the depths of the ring that are tried, the preferred one first.

    With mma.sync as deep as lets three to five or two CTAs share an SM: while one stores, the
    others load.  Registers of eight warps of wgmma leave no room for a second CTA; its ring need
    not be deep.
    """
    deepest = tile.stages_in(gemm, arch.cta_shared)
    if tile.tensor or (tile.unit == "wgmma" and tile.consumers == 8):
        found = [min(n, deepest) for n in (WGMMA_STAGES, 4, 3)]
    else:
        shares = [arch.sm_shared // ctas - CTA_RESERVED for ctas in (3, 4, 5, 2, 1)]
        found = [tile.stages_in(gemm, share) for share in shares]
        found = [n for n in found[:4] if n >= 3] or found[4:]
    return tuple(n for n in dict.fromkeys(found) if 2 <= n <= deepest)


def tiles(gemm: MoeGemm, tokens: int, arch: Gpu = HOPPER) -> dict[MoeTile, str | None]:
    """Return the tiles for about ``tokens`` tokens, and why one is illegal."""
    wanted = expected_tokens(gemm, tokens)
    if gemm.operand:
        return _of_bytes(gemm, wanted, arch)
    few, many = next((few, many) for limit, few, many in TOKENS if wanted <= limit)
    if targets.TCGEN05 in arch.features and wanted >= TENSOR_LEAST:
        return _of_tensor_memory(gemm, wanted, arch)
    if targets.WGMMA not in arch.features:
        many = ()
    elif few and few[0] >= 64:
        few = ()  # an instruction of wgmma is never slower
    shapes = [("wgmma", width, rows, 1, k) for rows, k in WGMMA for width in many]
    shapes += [("mma", width, *shape) for width in few for shape in MMA[width]]
    found: dict[MoeTile, str | None] = {}
    for unit, width, rows, slices, blocks in shapes:
        tile = MoeTile(unit, rows, width, slices, blocks)
        fits = None if depths(gemm, tile, arch) else "no ring of it fits"
        found[tile] = tile.illegal(gemm) or fits
    return found


def _of_tensor_memory(gemm: MoeGemm, wanted: float, arch: Gpu) -> dict[MoeTile, str | None]:
    """Return `tiles` of tcgen05: two widths, decoded by eight warps or by four."""
    widths = [width for width in TENSOR_WIDTHS if width >= wanted] or [TENSOR_WIDTHS[-1]]
    found: dict[MoeTile, str | None] = {}
    for width, slices in product(widths[:2], (2, 1)):
        tile = MoeTile("tcgen05", tensor_memory.ROWS, width, slices, 2)
        fits = None if depths(gemm, tile, arch) else "no ring of it fits"
        found[tile] = tile.illegal(gemm) or fits
    return found


def _of_bytes(gemm: MoeGemm, wanted: float, arch: Gpu) -> dict[MoeTile, str | None]:
    """Return `tiles` of operands of 8 bits."""
    found: dict[MoeTile, str | None] = {}
    table, sums = BYTE_TOKENS, byte_sums(gemm.fmt, gemm.group, gemm.fast)
    if gemm.scaled_sums or gemm.fast:
        table = GROUP_TOKENS if gemm.scaled_sums else FAST_TOKENS
    shapes = next(shapes for limit, shapes in table if wanted <= limit)
    if not gemm.fast and TWO_TILES[0] < wanted <= TWO_TILES[1] and gemm.k >= DEEP:
        shapes = ((128, 144), *shapes)
    if gemm.fast and wanted > FEW_BYTES[-1][0]:  # wide tiles with long stages: 0.93 of the speed
        sums = sums[::-1]
    for (rows, width), (blocks, part) in product(shapes, sums):
        tile = MoeTile("wgmma", rows, width, 1, blocks, partial=part)
        fits = None if depths(gemm, tile, arch) else "no ring of it fits"
        found[tile] = tile.illegal(gemm) or fits
    return found


def legal_tiles(gemm: MoeGemm, tokens: int, arch: Gpu = HOPPER) -> list[MoeTile]:
    """Return the legal ones of `tiles`, the default's first."""
    legal = [tile for tile, reason in tiles(gemm, tokens, arch).items() if reason is None]
    if legal[0].unit == "mma" and legal[0].tokens == 8:
        few = expected_tokens(gemm, tokens) <= FEW
        count = busy_experts(gemm, tokens) * gemm.rows / 64 if few else float("inf")
        rows = next(rows for limit, rows in HIGHER if count <= limit)
        legal.sort(key=lambda tile: (tile.tokens, tile.rows != rows))
    return legal
