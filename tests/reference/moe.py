"""float64 reference of the MoE layer: weights as stored, routing, activations, act_fmt, combine.

Slow and obvious.  Weights are in the plain layout of the interface: w13 [E, R, H / 2] with the gate
rows first, w2 [E, H, I / 2], scales [E, rows, cols / block], low nibble first.  Two truths:

* ``dtype=None``: real numbers, nothing is rounded but what act_fmt quantises;
* ``dtype="bfloat16"`` and so on: h, each expert's row and the result are rounded to it once.

Quantising activations (``act_fmt``) is defined by float32 steps, each a NumPy float32 operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference import core as ref

Array = NDArray[Any]
f32 = np.float32

FORMATS = ("nvfp4", "mxfp4", "int4")
ACTIVATIONS = ("swiglu", "swiglu_oai", "gelu_tanh", "relu2")
ACT_FORMATS = (None, "fp8", "fp8_tensor", "nvfp4")


# ---------------------------------------------------------------------------------------- weights
def block_weight(packed: Array, byte: Array, fmt: str) -> NDArray[np.float64]:
    """Return [..., K] of E2M1 codes and scale bytes (nvfp4, mxfp4), without the global scale."""
    return ref.e2m1_decode(ref.unpack(packed)) * np.repeat(
        ref.scale_value(byte, fmt), ref.BLOCK[fmt], axis=-1
    )


def int4_weight(packed: Array, scale: Array, zero: Array | None = None) -> NDArray[np.float64]:
    """Return [..., K]: (q - zero) * scale; zero is 8 where none is given."""
    q = ref.unpack(packed).astype(np.float64)
    group = q.shape[-1] // scale.shape[-1]
    shift = 8.0 if zero is None else np.repeat(np.asarray(zero, np.float64), group, axis=-1)
    return (q - shift) * np.repeat(np.asarray(scale, np.float64), group, axis=-1)


def expert_weight(
    packed: Array, scale: Array, fmt: str, zero: Array | None, factor: Array | None
) -> NDArray[np.float64]:
    """Return [E, rows, K]; ``factor`` (global scale): [E], or [E, 2] of both halves of the rows."""
    if fmt == "nvfp4, rounded":
        pairs = zip(packed, scale, strict=True)
        w = np.stack([ref.rounded_weight(ref.unpack(codes), byte) for codes, byte in pairs])
    elif fmt == "int4":
        w = int4_weight(packed, scale, zero)
    else:
        w = block_weight(packed, scale, fmt)
    if factor is None:
        return w
    factor = np.asarray(factor, np.float64)
    if factor.ndim == 1:
        return w * factor[:, None, None]
    return w * np.repeat(factor, w.shape[1] // 2, axis=1)[:, :, None]


# ------------------------------------------------------------------------------------ activations
def sigmoid(x: Array) -> NDArray[np.float64]:
    """Return 1 / (1 + e^-x) in float64."""
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> NDArray[np.float64]:
    """Return the tanh form of GELU."""
    x = np.asarray(x, np.float64)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def activate(
    product: Array, activation: str, alpha: float | None = None, limit: float | None = None
) -> NDArray[np.float64]:
    """Return h [..., I] of [..., 2 I] (gate first), or of [..., I] for "relu2"."""
    product = np.asarray(product, np.float64)
    if activation == "relu2":
        return np.maximum(product, 0) ** 2
    gate, up = np.split(product, 2, axis=-1)
    if activation == "gelu_tanh":
        return gelu_tanh(gate) * up
    oai = activation == "swiglu_oai"
    limit = 7.0 if oai and limit is None else limit
    alpha = (1.702 if oai else 1.0) if alpha is None else alpha
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(alpha * gate) * (up + (1.0 if oai else 0.0))


def codes_of(
    x: Array, act_fmt: str, scale: float = 1.0
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return codes [rows, K] and scale bytes of blocks; ``scale``: the global one of nvfp4."""
    if act_fmt != "mxfp8":
        return ref.quantize(x, act_fmt, scale)
    blocks = np.asarray(x, f32).reshape(*x.shape[:-1], x.shape[-1] // 32, 32)
    with np.errstate(all="ignore"):
        byte = ref.ue8m0_encode_ceil(np.abs(blocks).max(-1) / f32(448))
        codes = ref.e4m3_encode(blocks / ref.ue8m0_decode(byte)[..., None])
    return codes.reshape(x.shape), byte


def coded(codes: Array, byte: Array, act_fmt: str, scale: float = 1.0) -> NDArray[np.float64]:
    """Return the numbers of codes and scale bytes."""
    if act_fmt != "mxfp8":
        return ref.weight(codes, byte, act_fmt, scale)
    return ref.e4m3_decode(codes) * np.repeat(ref.ue8m0_decode(byte), 32, axis=-1)


def qdq(x: Array, act_fmt: str | None, scale: float | None = None) -> NDArray[np.float64]:
    """Return x [rows, K] quantised as ``act_fmt`` says and taken back, factors included.

    fp8: s = amax / 448 of the row, e4m3(x / s) * s.  fp8_tensor: s is given.  nvfp4: blocks of 16,
    s = e4m3(amax / (6 scale)), e2m1(x / (s scale)) * s * scale.  mxfp4: blocks of 32, s the power
    of two at or above amax / 6, e2m1(x / s) * s; mxfp8: likewise amax / 448, e4m3.  Every step is
    one in float32; a scale of 0 gives zeros.
    """
    if act_fmt is None:
        return np.asarray(x, np.float64)
    x = np.asarray(x, f32)
    if act_fmt in ("nvfp4", "mxfp4", "mxfp8"):
        factor = 1.0 if scale is None else float(f32(scale))
        return coded(*codes_of(x, act_fmt, factor), act_fmt, factor)
    with np.errstate(all="ignore"):
        if act_fmt == "fp8":
            s = np.max(np.abs(x), axis=-1, keepdims=True, initial=0) / f32(448)
        else:
            s = np.full((len(x), 1), f32(scale))
        code = ref.e4m3_encode(np.where(s == 0, f32(0), x / s))
    return ref.e4m3_decode(code) * s.astype(np.float64)


def coded_rows(x: Array, act_fmt: str, scale: float | None = None) -> NDArray[np.uint8]:
    """Return rows x [T, H] as codes, then scales, then zeros up to a multiple of 16 bytes.

    fp8: E4M3 codes and the row's float32 factor.  nvfp4: two E2M1 codes a byte, the even element
    low, and the E4M3 scales of blocks of 16.  The numbers are those of `qdq`.
    """
    x = np.asarray(x, f32)
    if act_fmt == "nvfp4":
        codes, scales = codes_of(x, act_fmt, 1.0 if scale is None else float(f32(scale)))
        parts = [codes[:, ::2] | codes[:, 1::2] << 4, scales]
    else:
        factor = np.max(np.abs(x), axis=-1, keepdims=True, initial=0) / f32(448)
        with np.errstate(all="ignore"):
            codes = ref.e4m3_encode(np.where(factor == 0, f32(0), x / factor)).astype(np.uint8)
        parts = [codes, factor.view(np.uint8)]
    made = np.concatenate(parts, axis=1)
    return np.pad(made, [(0, 0), (0, -made.shape[1] % 16)])


def decoded_rows(
    rows: Array, act_fmt: str, hidden: int, scale: float | None = None
) -> NDArray[np.float32]:
    """Return the numbers [T, H] of `coded_rows`, each product rounded to float32."""
    if act_fmt == "nvfp4":
        half = rows[:, : hidden // 2]
        codes = np.stack([half & 15, half >> 4], -1).reshape(len(rows), hidden)
        scales = rows[:, hidden // 2 : hidden // 2 + hidden // 16]
        return ref.dequantize(codes, scales, "nvfp4", 1.0 if scale is None else scale)
    factor = np.ascontiguousarray(rows[:, hidden : hidden + 4]).view(f32)
    return ref.e4m3_decode(rows[:, :hidden]).astype(f32) * factor


# ---------------------------------------------------------------------------------------- routing
def best(values: Array, count: int) -> NDArray[np.int64]:
    """Return the indices of the ``count`` largest of each row, descending; ties: lower first."""
    return np.argsort(-np.asarray(values, np.float64), axis=-1, kind="stable")[..., :count]


def moe_route(
    logits: Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Array | None = None,
    n_group: int | None = None,
    topk_group: int | None = None,
    scale: float = 1.0,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ids and weights [T, top_k], best first.

    Scores are softmax or sigmoid of the logits; experts are chosen by score + correction_bias, out
    of the ``topk_group`` best groups: by a group's best choice, with a bias by the sum of its two
    best.  The weights are the scores without bias, divided by their sum if renormalised, times
    ``scale``.
    """
    logits = np.asarray(logits, np.float64)
    if scoring == "softmax":
        power = np.exp(logits - logits.max(axis=-1, keepdims=True, initial=-np.inf))
        score = power / power.sum(axis=-1, keepdims=True)
    else:
        score = sigmoid(logits)
    choice = score + (0 if correction_bias is None else np.asarray(correction_bias, np.float64))
    if n_group is not None and n_group > 1:
        groups = choice.reshape(len(choice), n_group, choice.shape[1] // n_group)
        counted = 1 if correction_bias is None else 2
        strength = -np.sort(-groups, axis=-1)[..., :counted].sum(-1)
        kept = np.zeros(strength.shape, bool)
        np.put_along_axis(kept, best(strength, topk_group), True, axis=-1)
        choice = np.where(kept[..., None], groups, -np.inf).reshape(choice.shape)
    ids = best(choice, top_k)
    weights = np.take_along_axis(score, ids, axis=-1)
    if renormalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return ids, weights * scale


# ------------------------------------------------------------------------------------------ layer
_PARTS = ("_scale", "_global_scale", "_bias", "_zero")
"""Of names of what belongs to a weight."""


@dataclass
class Layer:
    """Arguments of a MoE layer as stored (bytes as uint8), all but hidden, ids and weights."""

    w13: Array
    w2: Array
    w13_scale: Array
    w2_scale: Array
    fmt: str
    w13_global_scale: Array | None = None
    w2_global_scale: Array | None = None
    w13_bias: Array | None = None
    w2_bias: Array | None = None
    w13_zero: Array | None = None
    w2_zero: Array | None = None
    activation: str = "swiglu"
    alpha: float | None = None
    limit: float | None = None
    act_fmt: str | None = None
    a1_scale: float | None = None  # of fp8_tensor, or the global scale of nvfp4
    a2_scale: float | None = None
    rounded: bool = False  # weights of nvfp4 become E4M3 with a factor for each row
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(self.w13)

    def expert(self, number: int) -> Layer:
        """The layer of one expert alone."""
        names = [f"{w}{part}" for w in ("w13", "w2") for part in ("", *_PARTS)]
        given = {name: getattr(self, name) for name in names}
        own = {name: v[number : number + 1] for name, v in given.items() if v is not None}
        return replace(self, **own)

    def dense(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return w13 [E, R, H] and w2 [E, H, I] in float64, global scales included."""
        fmt = "nvfp4, rounded" if self.rounded else self.fmt
        first = (self.w13, self.w13_scale, fmt, self.w13_zero, self.w13_global_scale)
        second = (self.w2, self.w2_scale, fmt, self.w2_zero, self.w2_global_scale)
        return expert_weight(*first), expert_weight(*second)


def _rounded(value: Array, dtype: str | None) -> NDArray[np.float64]:
    exact = dtype is None or dtype == "float32"
    return np.asarray(value if exact else ref.round_to(value, dtype), np.float64)


def fused_moe(
    hidden: Array, layer: Layer, ids: Array, weights: Array, dtype: str | None = None
) -> NDArray[np.float64]:
    """Return y [T, H] in float64; ids outside of [0, E) are dropped."""
    hidden, ids = np.asarray(hidden, np.float64), np.asarray(ids)
    weights = np.asarray(weights, np.float64)
    w13, w2 = layer.dense()
    y = np.zeros((len(hidden), w2.shape[1]))
    x = qdq(hidden, layer.act_fmt, layer.a1_scale)
    parts = np.zeros((*ids.shape, w2.shape[1]))
    for e in range(layer.experts):
        token, slot = np.nonzero(ids == e)
        product = x[token] @ w13[e].T
        if layer.w13_bias is not None:
            product = product + np.asarray(layer.w13_bias[e], np.float64)
        h = activate(product, layer.activation, layer.alpha, layer.limit)
        h = qdq(_rounded(h, dtype), layer.act_fmt, layer.a2_scale)
        z = h @ w2[e].T
        if layer.w2_bias is not None:
            z = z + np.asarray(layer.w2_bias[e], np.float64)
        parts[token, slot] = _rounded(z, dtype)
    for slot in range(ids.shape[1]):
        y += weights[:, slot, None] * parts[:, slot]
    return _rounded(y, dtype)


# ----------------------------------------------------------------------------------- random cases
def _scales(rng: np.random.Generator, shape: tuple[int, ...], fmt: str, k: int) -> Array:
    """Return scales for which a row's dot product with normal numbers is of the order of 1."""
    mean = 2 * np.sqrt(k)  # a code's typical size is 2 to 4
    if fmt == "int4":
        return (np.exp2(rng.uniform(-1, 1, shape)) / (2 * mean)).astype(f32)
    if fmt == "nvfp4":
        return rng.integers(0x28, 0x48, shape, dtype=np.uint8)  # 0.25 .. 4, see global scales
    exponent = int(np.round(-np.log2(mean)))
    return rng.integers(126 + exponent, 129 + exponent, shape, dtype=np.uint8)


def random_layer(
    experts: int,
    hidden: int,
    intermediate: int,
    fmt: str = "nvfp4",
    *,
    group: int | None = None,
    activation: str = "swiglu",
    zeros: bool = False,
    bias: bool = False,
    act_fmt: str | None = None,
    scale_dtype: str = "float32",
    seed: int = 0,
    **options: Any,
) -> Layer:
    """Return random weights of any codes; ``options``: alpha, limit."""
    rng = np.random.default_rng([seed, experts, hidden, intermediate, FORMATS.index(fmt)])
    block = (group or 32) if fmt == "int4" else ref.BLOCK[fmt]
    rows = intermediate if activation == "relu2" else 2 * intermediate
    shapes = {"w13": (experts, rows, hidden), "w2": (experts, hidden, intermediate)}
    made: dict[str, Any] = {}
    for name, (e, n, k) in shapes.items():
        made[name] = rng.integers(0, 256, (e, n, k // 2), dtype=np.uint8)
        scale = _scales(rng, (e, n, k // block), fmt, k)
        made[f"{name}_scale"] = ref.round_to(scale, scale_dtype) if fmt == "int4" else scale
        if fmt == "int4" and zeros:
            made[f"{name}_zero"] = rng.integers(0, 16, (e, n, k // block), dtype=np.uint8)
        if fmt == "nvfp4":
            halves = (e, 2) if name == "w13" and activation != "relu2" else (e,)
            size = np.exp2(rng.uniform(-0.5, 0.5, halves))
            made[f"{name}_global_scale"] = (size / (4 * np.sqrt(k))).astype(f32)
        if bias:
            made[f"{name}_bias"] = rng.standard_normal((e, n)).astype(f32) / 2
    if act_fmt in ("fp8_tensor", "nvfp4"):
        made["a1_scale"], made["a2_scale"] = (
            (4 / 448, 8 / 448) if act_fmt == "fp8_tensor" else (4 / 2688, 8 / 2688)
        )
    about = {"block": block, "hidden": hidden, "intermediate": intermediate}
    return Layer(fmt=fmt, activation=activation, act_fmt=act_fmt, about=about, **made, **options)


ROUTINGS = ("random", "one_expert", "each_its_own", "dropped", "half_dropped")


def random_routing(
    tokens: int, experts: int, top_k: int, kind: str = "random", seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return ids (distinct within a token) and weights [tokens, top_k] that add up to 1.

    ``kind``: random; one_expert: slot 0 of every token is the last expert; each_its_own: token t
    begins at expert t; dropped: all ids are outside; half_dropped: -1 and E here and there.
    """
    rng = np.random.default_rng([seed, tokens, experts, top_k])
    ids = np.argsort(rng.random((tokens, experts)), axis=-1)[:, :top_k].astype(np.int64)
    if kind == "one_expert":
        first = np.full((tokens, 1), experts - 1)
        ids = np.concatenate([first, ids % max(experts - 1, 1)], axis=1)[:, :top_k]
    elif kind == "each_its_own":
        ids = (np.arange(tokens)[:, None] + np.arange(top_k)) % experts
    elif kind == "dropped":
        ids = np.where(ids % 2, -1, experts + ids)
    elif kind == "half_dropped":
        out = rng.choice([-1, experts, -(2**31), 2**31 - 1], ids.shape)
        ids = np.where(rng.random(ids.shape) < 0.5, out, ids)
    weights = rng.random((tokens, top_k)) + 0.1
    return ids.astype(np.int64), (weights / weights.sum(axis=-1, keepdims=True)).astype(f32)


def random_hidden(tokens: int, hidden: int, dtype: str = "float32", seed: int = 0) -> Array:
    """Return normal float32 values [tokens, hidden] that are numbers of ``dtype``."""
    rng = np.random.default_rng([seed, tokens, hidden])
    return ref.round_to(rng.standard_normal((tokens, hidden)), dtype)
