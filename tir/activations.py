"""Activations as TensorIR expressions, in float32.

Of one number (`of`):

    silu:       x / (1 + exp(-x))
    gelu_tanh:  x / (1 + exp(-t)),  t = x * (1.5957691 + 0.07135481 * x^2), which is
                0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
    relu2:      max(x, 0)^2; a NaN stays one

Gated (`gated`):

    silu:       gate / (1 + exp(-gate)) * up
    gelu_tanh:  gelu_tanh(gate) * up
    swiglu:     g / (1 + exp(-alpha * g)) * (u + beta),  g = gate but at most limit, u = up within
                -limit .. limit; NaNs stay (gpt-oss: alpha 1.702, beta 1, limit 7)
    relu2:      max(gate, 0)^2 * up; NaNs stay

exp is within 2 units in the last place; a CPU may fuse its products and sums.  So may a GPU, whose
exp is another one: results agree after rounding to 16 bits, but for values next to a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr as PrimExpr

from blockscale.tir import formats

_LOG2E = 1.44269504
_LN2 = (0.693359375, -2.12194440e-4)  # the first is short: its product with n is exact
_TAYLOR = (1.9875691e-4, 1.3981999e-3, 8.3334519e-3, 4.1665796e-2, 1.6666666e-1, 0.5)
_EXP_RANGE = (-104.0, 89.0)  # below 2^-150, above the largest float32
_ROUNDER = 1.5 * 2.0**23  # the sum with it has unit 1
_ROUNDER_BITS = 0x4B400000
_GELU = (1.5957691216, 0.0713548162726)


def _f32(value: float) -> PrimExpr:
    return tirx.const(value, "float32")


def _power_of_two(n: PrimExpr) -> PrimExpr:
    return formats.from_bits((n + tirx.const(127, "int32")) << tirx.const(23, "int32"))


def exp(x: PrimExpr) -> PrimExpr:
    """e^x of a float32 number, within 2 units in the last place; subnormal results too."""
    x = tirx.Max(tirx.Min(x, _f32(_EXP_RANGE[1])), _f32(_EXP_RANGE[0]))
    shifted = x * _f32(_LOG2E) + _f32(_ROUNDER)
    n = formats.bits_of(shifted) - tirx.const(_ROUNDER_BITS, "int32")
    whole = formats.cast(n, "float32")  # shifted - _ROUNDER, which TVM would simplify
    r = (x - whole * _f32(_LN2[0])) - whole * _f32(_LN2[1])
    series = _f32(_TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        series = series * r + _f32(coefficient)
    result = series * (r * r) + r + _f32(1.0)
    low = n >> tirx.const(1, "int32")  # 2^n itself may be neither finite nor normal
    return result * _power_of_two(low) * _power_of_two(n - low)


def of(activation: str, x: PrimExpr, exp: Callable[[PrimExpr], PrimExpr] = exp) -> PrimExpr:
    """Return ``activation(x)``, "none" x itself; ``exp``: the exponential function of a target."""
    if activation == "none":
        return x
    if activation == "relu2":
        positive = tirx.Select(x < _f32(0.0), _f32(0.0), x)
        return positive * positive
    exponent = x if activation == "silu" else _gelu_exponent(x)
    return x / (_f32(1.0) + exp(-exponent))


def _gelu_exponent(x: PrimExpr) -> PrimExpr:
    return x * (_f32(_GELU[0]) + _f32(_GELU[1]) * (x * x))


def gated(
    activation: str, gate: PrimExpr, up: PrimExpr, numbers: Sequence[PrimExpr] = ()
) -> PrimExpr:
    """Return ``activation(gate) * up``; ``numbers``: alpha, beta and limit of "swiglu"."""
    if activation != "swiglu":
        return of(activation, gate) * up
    alpha, beta, limit = numbers
    gate, up = limited(gate, up, limit)
    return gate / (_f32(1.0) + exp(-(alpha * gate))) * (up + beta)


def limited(g: PrimExpr, u: PrimExpr, limit: PrimExpr) -> tuple[PrimExpr, PrimExpr]:
    """A gate ``g`` but at most ``limit``, its up ``u`` within -limit .. limit; NaNs stay.

    A Min or Max, which a GPU makes fminf or fmaxf, would turn a NaN into the limit.
    """
    low = -limit
    within = tirx.Select(u > limit, limit, tirx.Select(u < low, low, u))
    return tirx.Select(g > limit, limit, g), within
