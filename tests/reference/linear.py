"""float64 reference of a linear layer on a 4-bit weight: what follows the product of `core`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.moe import gelu_tanh, sigmoid

Array = NDArray[Any]


def activate(value: Array, activation: str) -> NDArray[np.float64]:
    """Return the activation of each element."""
    value = np.asarray(value, np.float64)
    if activation == "silu":
        return value * sigmoid(value)
    if activation == "gelu_tanh":
        return gelu_tanh(value)
    return np.maximum(value, 0) ** 2 if activation == "relu2" else value


def layer(
    x: Array,
    w: Array,
    bias: Array | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: Array | None = None,
) -> NDArray[np.float64]:
    """Return act(x @ w.T + bias) + residual; gated: the first half of the rows of w are gates."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    y = y if bias is None else y + np.asarray(bias, np.float64)
    if gated:
        gate, up = np.split(y, 2, axis=-1)
        y = activate(gate, activation) * up
    else:
        y = activate(y, activation)
    return y if residual is None else y + np.asarray(residual, np.float64)
