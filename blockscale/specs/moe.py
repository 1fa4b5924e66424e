"""Specs of the MoE layer: the router, and the experts' two grouped GEMMs on 4-bit weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockscale.base import formats
from blockscale.base.sizes import round_up
from blockscale.specs.gemm import check_experts
from blockscale.specs.plans.coded import ALIGNMENT, CODED_FORMATS, CodedRow
from blockscale.specs.plans.launches import (
    CHUNK,
    MAX_TOP_K,
    MOE_CODES_PARTS,
    MOE_PARTS,
    PART,
    Part,
    most_tiles,
    workspace_bytes,
)
from blockscale.specs.plans.moe import BYTE_FORMS, BYTE_GROUPS, scale_bytes
from blockscale.specs.spec import (
    DTYPE_SUFFIX,
    FormatSpec,
    Name,
    Param,
    Spec,
    check_choice,
    check_multiple,
    check_positive,
    flag,
)

ACTIVATIONS = ("swiglu", "swiglu_oai", "gelu_tanh", "relu2")
"""What is between the two GEMMs."""

GATED = ("swiglu", "swiglu_oai", "gelu_tanh")
"""Activations of pairs of gate and up."""

ACT_FORMATS = ("fp8", "fp8_tensor", "nvfp4", "mxfp4", "mxfp8")
"""What the operands of both GEMMs are rounded to, if to anything."""

MX_FORMATS = ("mxfp4", "mxfp8")
"""Those whose scales are powers of two, which float16 cannot hold."""

MX_BLOCK = formats.MOE["mxfp4"].block
"""Elements of a row that share such a scale."""

PRODUCTS = {
    ("nvfp4", "nvfp4"): "nvfp4",
    ("mxfp4", "mxfp4"): "mxfp4",
    ("mxfp4", "mxfp8"): "mxfp8xmxfp4",
}
"""What tensor cores multiply, key of `formats.GEMM`, by formats of weights and of activations."""

STATIC_SCALES = ("fp8_tensor", "nvfp4")
"""Formats of activations with a scale that the caller gives."""

LAYOUTS = ("linear", "tiles64", "tiles64e", "128x4")
"""Layouts of the weights: of CPU kernels, of CUDA kernels that decode them, of those that also
decode them to E4M3, and of those whose tensor cores multiply codes and block scales."""

TILED = ("tiles64", "tiles64e")
"""Layouts that kernels decode."""

BYTE_ACTS = ("fp8", "fp8_tensor")
"""Formats of activations whose codes are E4M3, which kernels of "tiles64e" multiply as such."""

ROW_TILE, COL_TILE = 128, 4
"""Rows and columns of a tile of scales in layout "128x4"."""


SCORINGS = ("softmax", "sigmoid")

TILE = 64
"""Rows and columns of a block of layout tiles64."""

TILE_CODES = 2048
"""Bytes of codes of a block."""

ALPHA = {"swiglu_oai": 1.702}
"""Factor in the sigmoid, where it is not 1."""

LIMIT = {"swiglu_oai": 7.0}
"""Bound of gate and up, where there is one without being asked for."""

NO_LIMIT = 3.4028234663852886e38
"""The largest float32, which manifests can hold."""


def _check_experts(where: str, experts: int, top_k: int) -> None:
    check_experts(where, experts)
    check_positive(where, "top_k", top_k)
    if top_k > MAX_TOP_K:
        raise ValueError(
            f"{where}: top_k={top_k} is more than {MAX_TOP_K}; divide the slots of a token among "
            "several calls and add their results"
        )


def _only_group(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a name means without a group: a format with several has to be said with one."""
    blocks = formats.MOE[fields["fmt"]].blocks
    return {"group": blocks[0], "zero": False} if len(blocks) == 1 else {}


@dataclass(frozen=True)
class FusedMoe(FormatSpec):
    """``out[t] = sum_j weights[t, j] * (act(hidden[t] @ w13[e].T) @ w2[e].T)``, e = ids[t, j].

    Slots with an id outside [0, experts) contribute nothing.

    Attributes:
        group: elements along K that share a block scale; 0: as usual, 128 of int4.
        act_fmt: what the operands of both GEMMs are rounded to: None, "fp8" (a scale per row),
            "fp8_tensor" (static scales), "nvfp4" (E4M3 scales of 16, static global scales), "mxfp4"
            or "mxfp8" (E8M0 scales of 32).
        zero: int4 with zero points.
        bias: both GEMMs have biases.
        layout: of the weights, "linear" (CPU), "tiles64" (CUDA), or "128x4", for `PRODUCTS` on
            GPUs whose tensor cores multiply codes and block scales.
        slots: the result is that of each slot, unweighted, ``out[t, j]``; of slots that are left
            out, anything. There are no weights then.
        sent: the result of a slot is stored to the address that it has, of at least ``hidden``
            elements and a multiple of 16, in this GPU's memory or in one that it can store to.
        coded: hidden [T, bytes] holds rows that ``act_fmt`` has coded already (`CodedRow`).
        fast_accum: in layout "tiles64e", MMAs of 8 bits may sum up all of K, in some 14 bits
            (Hopper); what is multiplied in 16 bits is the same.  Not of int4, whose sums are those
            of groups.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    fmt: str = "nvfp4"
    group: int = 0
    activation: str = "swiglu"
    dtype: str = "bfloat16"
    act_fmt: str | None = None
    zero: bool = False
    bias: bool = False
    layout: str = "linear"
    slots: bool = False
    coded: bool = False
    fast_accum: bool = False
    sent: bool = False
    op = "fused_moe"
    pattern = Name(
        "fused_moe_{fmt}[g{group}{zero}]_e{experts}_k{top_k}_h{hidden}_i{intermediate}"
        "_{activation}{act_fmt}{fast_accum}{bias}{layout}{slots}{sent}{coded}_{dtype}",
        "fused_moe_nvfp4_e8_k2_h1024_i2816_swiglu_bf16",
        "fused_moe_int4g128_e128_k8_h2048_i768_swiglu_tiles64_bf16",
        texts={
            "fmt": tuple(formats.MOE),
            "activation": ACTIVATIONS,
            "act_fmt": {None: "", **{fmt: f"_a{fmt}" for fmt in ACT_FORMATS}},
            "layout": {
                "linear": "",
                "tiles64": "_tiles64",
                "tiles64e": "_tiles64e",
                "128x4": "_128x4",
            },
            "dtype": DTYPE_SUFFIX,
            "zero": flag("z"),
            "bias": flag("_bias"),
            "slots": flag("_slots"),
            "sent": flag("_sent"),
            "coded": flag("_coded"),
            "fast_accum": flag("_fast"),
        },
        absent=_only_group,
    )

    def __post_init__(self) -> None:
        where = "FusedMoe"
        _check_experts(where, self.experts, self.top_k)
        check_choice(where, "fmt", self.fmt, formats.MOE)
        if self.group == 0:
            object.__setattr__(self, "group", self.format.blocks[-1])
        check_choice(where, "group", self.group, self.format.blocks)
        super().__post_init__()
        if self.layout != "linear" and self.dtype == "float32":
            raise ValueError(
                f"{where}: dtype='float32' has no kernel with layout={self.layout!r}; choose "
                "'bfloat16' or 'float16'"
            )
        if self.act_fmt in MX_FORMATS and self.dtype == "float16":
            raise ValueError(
                f"{where}: act_fmt={self.act_fmt!r} has scales that dtype='float16' cannot hold; "
                "choose 'bfloat16'"
            )
        if self.layout == "128x4":
            self._check_codes(where)
        if self.layout == "tiles64e":
            self._check_bytes(where)
        if self.coded:
            self._check_coded(where)
        if self.sent and not (self.slots and self.tiled):
            raise ValueError(
                f"{where}: sent=True is for results of slots on GPUs, not for slots={self.slots}, "
                f"layout={self.layout!r}; pass slots=True and layout='tiles64', or leave it out"
            )
        if self.fast_accum and self.fmt == "int4":
            raise ValueError(
                f"{where}: fast_accum=True, but sums of int4 are those of groups; leave it out"
            )
        if self.fast_accum and not self.by_bytes:
            raise ValueError(
                f"{where}: fast_accum=True is for layout='tiles64e' and act_fmt "
                f"{' or '.join(map(repr, BYTE_ACTS))}, not for layout={self.layout!r} and "
                f"act_fmt={self.act_fmt!r}, whose sums are float32; leave it out"
            )
        if self.zero and self.fmt != "int4":
            raise ValueError(
                f"{where}: zero=True with fmt={self.fmt!r}, whose codes have no zero points; leave "
                "it out, or choose fmt='int4'"
            )
        what, advice = "the elements of a block scale", "pad it to {} when quantising the weights"
        block = max(self.group, MX_BLOCK if self.act_fmt in MX_FORMATS else 1)
        check_multiple(where, "hidden", self.hidden, block, what, advice)
        check_multiple(where, "intermediate", self.intermediate, block, what, advice)

    def _check_codes(self, where: str) -> None:
        """ValueError unless tensor cores multiply both operands' codes."""
        if self.slots:
            raise ValueError(
                f"{where}: slots=True has no kernel with layout='128x4', which adds up the slots "
                "of a token; choose layout='tiles64'"
            )
        if (self.fmt, self.act_fmt) not in PRODUCTS:
            known = ", ".join(f"{fmt} with {act}" for fmt, act in PRODUCTS)
            raise ValueError(
                f"{where}: layout='128x4' is for products of codes, not for fmt={self.fmt!r} with "
                f"act_fmt={self.act_fmt!r}; choose one of {known}, or layout='tiles64'"
            )
        if not self.gated:
            raise ValueError(
                f"{where}: activation={self.activation!r} has no kernel with layout='128x4'; "
                f"choose one of {', '.join(GATED)}, or layout='tiles64'"
            )

    def _check_coded(self, where: str) -> None:
        """ValueError unless there are kernels that take coded rows."""
        if self.act_fmt not in CODED_FORMATS or self.layout == "128x4":
            raise ValueError(
                f"{where}: coded=True is for act_fmt {' or '.join(map(repr, CODED_FORMATS))} and "
                f"layouts other than '128x4', not for act_fmt={self.act_fmt!r}, "
                f"layout={self.layout!r}; leave it out"
            )
        CodedRow(self.act_fmt, self.hidden).check(where)

    def _check_bytes(self, where: str) -> None:
        """ValueError unless codes can become E4M3."""
        known = self.group in BYTE_GROUPS.get(self.fmt, ()) and self.dtype == "bfloat16"
        if not known or self.act_fmt not in (None, *BYTE_ACTS):
            raise ValueError(
                f"{where}: layout='tiles64e' is for {BYTE_FORMS}, dtype='bfloat16' and act_fmt "
                f"{' or '.join(map(repr, (None, *BYTE_ACTS)))}, not for fmt={self.fmt!r}, group="
                f"{self.group}, dtype={self.dtype!r}, act_fmt={self.act_fmt!r}; choose "
                "layout='tiles64'"
            )

    @property
    def tiled(self) -> bool:
        """Whether kernels decode the weights."""
        return self.layout in TILED

    @property
    def by_bytes(self) -> bool:
        """Whether many tokens are multiplied as E4M3."""
        return self.layout == "tiles64e" and self.act_fmt in BYTE_ACTS

    @property
    def product(self) -> str:
        """What tensor cores multiply in layout "128x4", key of `formats.GEMM`."""
        return PRODUCTS[self.fmt, self.act_fmt or ""]

    @property
    def gated(self) -> bool:
        """Whether w13 has rows of gate and up."""
        return self.activation in GATED

    @property
    def rows(self) -> int:
        """Rows of w13 of an expert."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def _multiple(self) -> int:
        """Of the padded sizes: blocks of tiles64, or whole rows of 128x4 tiles of scales."""
        return COL_TILE * self.group if self.layout == "128x4" else TILE

    @property
    def padded_hidden(self) -> int:
        """H in layouts of CUDA kernels."""
        return round_up(self.hidden, self._multiple)

    @property
    def padded_intermediate(self) -> int:
        """I in layouts of CUDA kernels."""
        return round_up(self.intermediate, self._multiple)

    @property
    def padded_rows(self) -> int:
        """Rows of w13 of an expert in layouts of CUDA kernels."""
        return self.padded_intermediate * (2 if self.gated else 1)

    @property
    def scale_bytes(self) -> int:
        """Bytes of block scales of 64 rows that a block of K has, in layout tiles64."""
        return scale_bytes(self.fmt, self.group, self.zero)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of hidden."""
        if self.coded:
            assert self.act_fmt is not None
            return CodedRow(self.act_fmt, self.hidden).bytes
        return self.hidden * (4 if self.dtype == "float32" else 2)

    @property
    def static_scales(self) -> bool:
        """Whether the activations have scales that the caller gives."""
        return self.act_fmt in STATIC_SCALES

    def _codes_workspace(self) -> tuple[Part, ...]:
        """In layout "128x4"; a "tile" is an expert that has rows, whose last 128 may be padding."""
        hidden, intermediate = self.padded_hidden, self.padded_intermediate
        scales1, scales2 = hidden // self.group, intermediate // self.group
        per_byte = formats.GEMM[self.product].a.per_byte
        sizes: dict[str, dict[str, int]] = {
            "offsets": {"fixed": 4 * (self.experts + 1)},
            "atoms": {"fixed": 4 * self.experts},
            "order": {"slot": 4},
            "place": {"slot": 4},
            "x": {"slot": hidden // per_byte},
            "x_scale": {"slot": scales1, "tile": (ROW_TILE - 1) * scales1},
            "y1": {"slot": intermediate // per_byte},
            "y1_scale": {"slot": scales2, "tile": (ROW_TILE - 1) * scales2},
            "y2": {"slot": 2 * self.hidden},
            "ready": {"slot": 1, "tile": 4},  # 4 for each 128 rows
        }
        return tuple(Part(name, **sizes[name]) for name in MOE_CODES_PARTS)

    @property
    def workspace(self) -> tuple[Part, ...]:
        """Parts of the memory that a CUDA kernel needs besides its tensors."""
        if self.layout == "128x4":
            return self._codes_workspace()
        sizes: dict[str, dict[str, int]] = {
            "blocks1": {"tile": 16},
            "count1": {"fixed": PART},
            "blocks2": {"tile": 16},
            "count2": {"fixed": PART},
            "order": {"slot": 4},
            "x": {"token": 2 * self.padded_hidden},
            "row_scale1": {"token": 4},
            "y1": {"slot": 2 * self.padded_intermediate},
            "row_scale2": {"slot": 4},
            "y2": {} if self.slots else {"slot": 2 * self.hidden},
            "y1_codes": {"slot": self.padded_intermediate if self.by_bytes else 0},
        }
        return tuple(Part(name, **sizes[name]) for name in MOE_PARTS)

    def workspace_bytes(self, tokens: int) -> int:
        """Return the bytes of `workspace` for so many tokens, of which `CHUNK` count at most."""
        tokens = min(tokens, CHUNK)
        slots = tokens * self.top_k
        tiles = most_tiles(slots, self.experts)
        if self.layout == "128x4":
            tiles = min(slots, self.experts)
        return workspace_bytes(self.workspace, tokens, slots, tiles)

    def params(self) -> tuple[Param, ...]:
        """Hidden, ids and weights, both weights of the layer, scales, alpha and limit, out."""
        on_gpu = self.layout != "linear"
        out = ("rows", *((self.top_k,) if self.slots else ()), self.hidden)
        static = (
            Param("a1_scale", "float32", (1,), default=1.0),
            Param("a2_scale", "float32", (1,), default=1.0),
        )
        hidden = Param("hidden", self.dtype, ("rows", self.hidden))
        if self.coded:
            hidden = Param("hidden", "uint8", ("rows", self.row_bytes), align=ALIGNMENT)
        return (
            hidden,
            Param("topk_ids", "int32", ("rows", self.top_k)),
            *(() if self.slots else (Param("topk_weights", "float32", ("rows", self.top_k)),)),
            *self._weight("w13", self.rows, self.hidden),
            *self._weight("w2", self.hidden, self.intermediate),
            *(static if self.static_scales else ()),
            Param("alpha", "float32", None, default=ALPHA.get(self.activation, 1.0)),
            Param("limit", "float32", None, default=LIMIT.get(self.activation, NO_LIMIT)),
            *((Param("share", "float32", None, default=1.0),) if self.slots and on_gpu else ()),
            Param("to", "int64", ("rows", self.top_k))
            if self.sent
            else Param("out", self.dtype, out, output=True),
            *((Param("workspace", "uint8", ("workspace_bytes",), output=True),) if on_gpu else ()),
        )

    def _weight(self, name: str, rows: int, cols: int) -> tuple[Param, ...]:
        """Return codes, scale, zero, global scales and bias of one of the weights."""
        count = (self.experts, 2) if name == "w13" else (self.experts,)
        tiles = self.tiled
        shape: tuple[int, ...] = (self.experts, rows, cols // self.group)
        codes = Param(
            name, "uint8", (self.experts, rows, cols // 2), storage=self.format.codes.storage
        )
        scale = Param(f"{name}_scale", "uint8", shape, storage=self.format.scale.storage)
        if tiles:
            rows = self.padded_rows if name == "w13" else self.padded_hidden
            lead, across = (self.experts, rows // TILE), round_up(cols, TILE)
            codes = Param(name, "uint8", (*lead, across // TILE, TILE_CODES), storage=self.layout)
            shape = (*lead, across // max(TILE, self.group), self.scale_bytes)
            scale = replace(scale, shape=shape, storage=self.layout)
            if self.layout == "tiles64e":
                count = (self.experts, rows)
        elif self.layout == "128x4":
            rows = self.padded_rows if name == "w13" else rows
            across = self.padded_hidden if name == "w13" else self.padded_intermediate
            codes = replace(codes, shape=(self.experts, rows, across // 2))
            shape = (self.experts, round_up(rows, ROW_TILE), across // self.group)
            scale = replace(scale, shape=shape)
        elif self.fmt == "int4":
            scale = Param(scale.name, "float32", shape)
        return (
            codes,
            scale,
            *((Param(f"{name}_zero", "uint8", shape),) if self.zero and not tiles else ()),
            Param(f"{name}_global", "float32", count),
            *((Param(f"{name}_bias", "float32", (self.experts, rows)),) if self.bias else ()),
        )


@dataclass(frozen=True)
class MoeRoute(Spec):
    """The top_k experts of each token by the score of its logits, and their weights.

    Attributes:
        dtype: of the logits.
        scoring: "softmax" over all experts, or "sigmoid".
        renormalize: weights are divided by their sum.
        bias: a correction is added to scores when experts are chosen, not to weights.
        n_group: neighbouring experts make so many groups, of which the `topk_group` best stay.
    """

    experts: int
    top_k: int
    dtype: str = "float32"
    scoring: str = "softmax"
    renormalize: bool = True
    bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    op = "moe_route"
    pattern = Name(
        "moe_route_e{experts}_k{top_k}_{scoring}{renormalize}{bias}[_g{n_group}x{topk_group}]"
        "_{dtype}",
        "moe_route_e256_k8_sigmoid_norm_bias_g8x4_f32",
        texts={
            "dtype": DTYPE_SUFFIX,
            "scoring": SCORINGS,
            "renormalize": flag("_norm"),
            "bias": flag("_bias"),
        },
        absent=lambda fields: {"n_group": 1, "topk_group": 1},
    )

    def __post_init__(self) -> None:
        where = "MoeRoute"
        _check_experts(where, self.experts, self.top_k)
        super().__post_init__()
        check_positive(where, "n_group", self.n_group)
        check_positive(where, "topk_group", self.topk_group)
        if self.experts % self.n_group:
            raise ValueError(
                f"{where}: experts={self.experts} do not make n_group={self.n_group} groups of one "
                "size; choose a divisor"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"{where}: topk_group={self.topk_group} is more than n_group={self.n_group}; choose"
                " at most as many groups as there are"
            )
        left = self.experts // self.n_group * self.topk_group
        if self.top_k > left:
            raise ValueError(
                f"{where}: top_k={self.top_k} is more than {left}, the experts of "
                f"{self.topk_group} of {self.n_group} groups; choose fewer experts, or more groups"
            )

    def params(self) -> tuple[Param, ...]:
        """Logits, the correction, the factor of all weights; ids and weights."""
        correction = (Param("correction_bias", "float32", (self.experts,)),)
        return (
            Param("logits", self.dtype, ("rows", self.experts)),
            *(correction if self.bias else ()),
            Param("scale", "float32", None, default=1.0),
            Param("topk_ids", "int32", ("rows", self.top_k), output=True),
            Param("topk_weights", "float32", ("rows", self.top_k), output=True),
        )
