"""What host code and kernels of MoE layers, INT4 products and linear layers agree on, said once.

Parameters of kernels, parts of workspaces, and sizes of launches.  C and CUDA code include them as
``blockscale/runtime/native/cuda_launches.h``, which `write` writes and a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blockscale.base.files import HOST_C
from blockscale.base.sizes import round_up

HEADER = HOST_C / "cuda_launches.h"
"""The header that is written."""

CHUNK = 8192
"""Tokens that an MoE function takes at a time; more are so many chunks in one workspace."""

MAX_TOP_K = 64
"""Experts of a token."""

MIN_TOKENS = 8
"""The fewest rows of x in a tile, so S slots make at most experts + S / 8 tiles."""

PART = 256
"""Parts of a workspace begin at multiples of so many bytes."""

SORT_THREADS = 1024
"""Threads of a CTA of prepare (native/moe/moe_sort.cuh)."""

SORT_SLOTS = 4096
"""Slots that one CTA sorts; more are sorted by a cluster."""

SORT_CLUSTER = 8
"""CTAs that sort many slots: what every GPU's clusters may have (CUDA C++ Programming Guide)."""

ROW_GROUP = 128
"""Rows of a tile of scales; an expert's rows begin at one of their own."""

TEAM = 256
"""Threads that share a row (native/moe/moe_rows.cuh): a CTA of requantise and combine."""

ROUTE_WARPS = 4
"""Warps of a CTA of routing, of which each has a token (native/moe/moe_route.cuh)."""

_CONSTANTS = (
    *("CHUNK", "MAX_TOP_K", "MIN_TOKENS", "PART", "SORT_THREADS", "SORT_SLOTS", "SORT_CLUSTER"),
    *("ROW_GROUP", "TEAM", "ROUTE_WARPS"),
)

Params = tuple[tuple[str, str], ...]
"""Parameters of a kernel: type in CUDA C++, and name."""

GEMM: Params = (
    *(("const void *", "x"), ("const uint8_t *", "w"), ("const void *", "ws")),
    *(("const float *", "global"), ("const float *", "bias"), ("const float *", "row_scale")),
    *(("const int *", "order"), ("const int4 *", "blocks"), ("const int *", "n_blocks")),
    *(("void *", "out"), ("float ", "alpha"), ("float ", "limit")),
)
"""Of `moe_tiles`, as `lower.warp` takes them; GEMM 2 has neither alpha nor limit."""

PREPARE: Params = (
    *(("const void *", "ids"), ("const void *", "hidden"), ("const float *", "scale")),
    *(("int *", "order"), ("int4 *", "blocks1"), ("int *", "count1")),
    *(("int4 *", "blocks2"), ("int *", "count2"), ("void *", "x"), ("float *", "row_scale")),
    *(("int ", "wide"), ("int ", "experts"), ("int ", "top_k"), ("int ", "rows")),
    *(("int ", "cols"), ("int ", "pitch"), ("int ", "tokens1"), ("int ", "tokens2")),
)

REQUANTIZE: Params = (
    *(("void *", "y"), ("const float *", "scale"), ("float *", "row_scale")),
    *(("const int *", "count"), ("int ", "pitch")),
)

REQUANTIZE_BYTES: Params = (
    *(("const void *", "y"), ("const float *", "scale"), ("float *", "row_scale")),
    *(("const int *", "count"), ("void *", "codes"), ("int ", "pitch")),
)

LINEAR_QUANTIZE: Params = (
    *(("const void *", "x"), ("void *", "to"), ("float *", "row_scale")),
    *(("int ", "rows"), ("int ", "cols"), ("int ", "pitch")),
)

COMBINE: Params = (
    *(("const void *", "y"), ("const void *", "ids"), ("const float *", "weights")),
    *(("const int *", "place"), ("void *", "out"), ("int ", "wide"), ("int ", "experts")),
    *(("int ", "top_k"), ("int ", "rows"), ("int ", "cols")),
)

SORT: Params = (
    *(("const void *", "ids"), ("int *", "order"), ("int *", "offsets"), ("int *", "atoms")),
    *(("int ", "experts"), ("int ", "count")),
)

GATHER: Params = (
    *(("const void *", "hidden"), ("const float *", "scale"), ("const void *", "ids")),
    *(("const int *", "order"), ("const int *", "offsets"), ("const int *", "atoms")),
    *(("int *", "place"), ("void *", "codes"), ("uint8_t *", "scales"), ("int *", "ready")),
    *(("int ", "experts"), ("int ", "top_k"), ("int ", "cols"), ("int ", "pitch")),
    ("int ", "groups"),
)

ROUTE: Params = (
    *(("const void *", "logits"), ("const float *", "bias"), ("float ", "scale")),
    *(("int *", "ids"), ("float *", "weights"), ("int ", "rows")),
)

INT4_PREPARE: Params = (
    *(("const int *", "offsets"), ("int4 *", "blocks"), ("int *", "count")),
    *(("const void *", "x"), ("const void *", "scale"), ("void *", "to")),
    *(("int ", "tokens"), ("int ", "experts"), ("int ", "rows"), ("int ", "cols")),
    *(("int ", "pitch"), ("int ", "scales")),
)

INT4_DENSE: Params = (
    *(("const void *", "x"), ("const uint8_t *", "w"), ("const void *", "ws")),
    *(("const float *", "alpha"), ("const float *", "bias"), ("void *", "out")),
    ("int ", "rows"),
)
INT4_GROUPED: Params = (
    *INT4_DENSE[:-1],
    *(("const int4 *", "blocks"), ("const int *", "n_blocks")),
)
"""Of `int4_tiles`, as `lower.warp` takes them."""

_KERNELS = {
    "GEMM": GEMM,
    "PREPARE": PREPARE,
    "LINEAR_QUANTIZE": LINEAR_QUANTIZE,
    "REQUANTIZE": REQUANTIZE,
    "REQUANTIZE_BYTES": REQUANTIZE_BYTES,
    "COMBINE": COMBINE,
    "SORT": SORT,
    "GATHER": GATHER,
    "ROUTE": ROUTE,
    "INT4_PREPARE": INT4_PREPARE,
    "INT4_DENSE": INT4_DENSE,
    "INT4_GROUPED": INT4_GROUPED,
}


def kinds(params: Params) -> tuple[str, ...]:
    """Return "handle", "int32" or "float32" for each parameter, as launches pass them."""
    return tuple({"int ": "int32", "float ": "float32"}.get(kind, "handle") for kind, _ in params)


def listed(params: Params) -> str:
    """Return the parameters as a kernel's definition in CUDA C++ lists them."""
    return ", ".join(f"{kind}{name}" for kind, name in params)


class Part(NamedTuple):
    """A part of a workspace: bytes for each token, slot (a token's row of an expert) and tile."""

    name: str
    token: int = 0
    slot: int = 0
    tile: int = 0
    fixed: int = 0

    def size(self, tokens: int, slots: int, tiles: int) -> int:
        """Return the bytes that it takes, up to the next part."""
        used = self.token * tokens + self.slot * slots + self.tile * tiles + self.fixed
        return round_up(used, PART)


MOE_PARTS = (
    *("blocks1", "count1", "blocks2", "count2", "order"),
    *("x", "row_scale1", "y1", "row_scale2", "y2", "y1_codes"),
)
"""Of an MoE layer: tables of tiles, the slots' order, rows before, between and after the GEMMs, and
E4M3 codes of those between."""

MOE_CODES_PARTS = (
    *("offsets", "atoms", "order", "place", "x", "x_scale"),
    *("y1", "y1_scale", "y2", "ready"),
)
"""Of an MoE layer of quantised rows: where experts' rows and tiles of scales begin, the slots'
order and back, codes and scales of the rows before the GEMMs, the rows after them, and how many
parts of `ROW_GROUP` rows of an expert GEMM 1 has stored."""

CODES_GEMM1 = (
    *("a", "b", "a_scale", "b_scale", "offsets", "w13_global", "a1_scale", "bias"),
    *("a2_scale", "alpha", "limit", "block_scale", "packed"),
)
CODES_GEMM2 = (*("a", "b", "a_scale", "b_scale", "offsets", "w2_global", "a2_scale", "bias", "d"),)
CODES_LAYER = (
    *CODES_GEMM1,
    *(f"second_{name}" for name in CODES_GEMM2 if name != "offsets"),
    "ready",
)
"""What the tables of such a layer's GEMMs choose maps and pointers from; of both in one launch."""

INT4_PARTS = ("blocks", "count", "x")
"""Of an INT4 product: the table of tiles, copies of rows."""


LINEAR_PARTS = ("x", "row_scale")
"""Of a linear layer that quantises its rows: these, and their scales."""


def most_tiles(slots: int, experts: int) -> int:
    """Return the most tiles that so many rows make: an expert's last one may not be full."""
    return min(slots, experts + slots // MIN_TOKENS)


def workspace_bytes(parts: Sequence[Part], tokens: int, slots: int, tiles: int) -> int:
    """Return the bytes of all parts."""
    return sum(part.size(tokens, slots, tiles) for part in parts)


def initializers(parts: Sequence[Part]) -> str:
    """Return the parts as C initialises an array of BsPart."""
    return ", ".join(f"{{{', '.join(map(str, part[1:]))}}}" for part in parts)


def header() -> str:
    """Return the text of ``cuda_launches.h``."""
    enums = [_enum("sizes", [f"BS_{name} = {globals()[name]}" for name in _CONSTANTS])]
    for kernel, params in _KERNELS.items():
        names = [f"BS_{kernel}_{name.upper()}" for _, name in params]
        enums.append(_enum(f"parameters of {kernel.lower()}", [*names, f"BS_{kernel}_PARAMS"]))
    for gemm, tensors in (
        ("CODES_GEMM1", CODES_GEMM1),
        ("CODES_GEMM2", CODES_GEMM2),
        ("CODES_LAYER", CODES_LAYER),
    ):
        names = [f"BS_{gemm}_{name.upper()}" for name in tensors]
        enums.append(_enum(f"tensors of {gemm.lower()}", [*names, f"BS_{gemm}_PARAMS"]))
    for owner, parts in (
        *(("MOE", MOE_PARTS), ("MOE_CODES", MOE_CODES_PARTS)),
        *(("INT4", INT4_PARTS), ("LINEAR", LINEAR_PARTS)),
    ):
        names = [f"BS_{owner}_WS_{name.upper()}" for name in parts]
        enums.append(_enum(f"parts of the workspace of {owner}", [*names, f"BS_{owner}_WS_PARTS"]))
    return (
        "/* Written by blockscale.specs.plans.launches.write(): do not change it here. */\n"
        "#ifndef BLOCKSCALE_CUDA_LAUNCHES_H\n#define BLOCKSCALE_CUDA_LAUNCHES_H\n\n"
        + "\n\n".join(enums)
        + "\n\n#endif\n"
    )


def _enum(what: str, names: Sequence[str]) -> str:
    return f"enum {{ /* {what} */\n" + "".join(f"  {name},\n" for name in names) + "};"


def write() -> None:
    """Write `header` to its file."""
    HEADER.write_text(header())
