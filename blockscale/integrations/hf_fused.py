"""What may be one kernel in a model of transformers, and the modules that make it so.

* `Part`: layers that read the same tensor (q, k and v) are rows of one weight.  The first that is
  called multiplies with all of them, and hands the others what is theirs.
* `GatedMlp`: gate, up, the activation and their product are one kernel.
* Norms: `torch.nn.RMSNorm`, one kernel on a GPU, in place of modules of several.

What a module does is found by trying it on some numbers; one that does something else stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from blockscale.nn.linear import Linear

Tensor = torch.Tensor

_SAME = 1e-5
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_TRIED = 8, 6
"""Columns of the input, and of gate and up, of the MLP that is tried."""
_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    "relu2": lambda gate: gate.relu().square(),
}
_EPS = ("variance_epsilon", "eps")
_REFUSED = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What modules raise that are called in another way than those that are looked for."""


@dataclass(frozen=True)
class Fusions:
    """What `from_pretrained` makes one kernel of: see `fusing`."""

    projections: bool = True
    mlps: bool = True
    norms: bool = True


_chosen: ContextVar[Fusions] = ContextVar("blockscale fusions", default=Fusions())  # noqa: B039


def chosen() -> Fusions:
    """Return what is fused by models that are loaded now."""
    return _chosen.get()


@contextmanager
def fusing(*, projections: bool = True, mlps: bool = True, norms: bool = True) -> Iterator[Fusions]:
    """Choose what models that are loaded within fuse; outside, all of it.

    Args:
        projections: q, k and v (and the like), 4-bit, are one product.
        mlps: gate, up and what is between them and down, 4-bit, are one kernel.
        norms: RMS norms are `torch.nn.RMSNorm`, which rounds to 16 bits once instead of twice.
    """
    token = _chosen.set(Fusions(projections, mlps, norms))
    try:
        yield _chosen.get()
    finally:
        _chosen.reset(token)


# ---- Layers that read the same tensor -----------------------------------------------------------


class Shared:
    """The layer of several parts, and what was computed for those that have not asked yet.

    No module, so that the layer is one of the model's once, where its parent has it.
    """

    def __init__(self, layer: Linear, sizes: Sequence[int]) -> None:
        """Take the layer, and the columns of its parts."""
        self.layer, self.sizes = layer, tuple(sizes)
        self.held: tuple[Tensor, int | None, tuple[Tensor | None, ...]] | None = None

    def part(self, x: Tensor, number: int) -> Tensor:
        """Return the columns of one part, [..., size] of x [..., K].

        What is kept belongs to the very tensor that it was computed of, as it was then; a part that
        is called with another one, or once more, computes all anew.  It is replaced as a whole, so
        that another thread finds all of it or nothing.
        """
        held, version = self.held, _version(x)
        made: tuple[Tensor | None, ...] = ()
        if held is not None and held[0] is x and held[1] == version:
            made = held[2]
        if not made or made[number] is None:
            made = self.layer(x).split(self.sizes, -1)
        found = made[number]
        assert found is not None
        left = tuple(None if i == number else y for i, y in enumerate(made))
        self.held = None if all(y is None for y in left) else (x, version, left)
        return found


def _version(x: Tensor) -> int | None:
    """Return how often x was written to; None: torch does not count, or traces the writes."""
    return None if is_compiling() or x.is_inference() else x._version


class Part(torch.nn.Module):
    """One of several linear layers whose weights are rows of one; it has no weight of its own."""

    def __init__(self, shared: Shared, number: int) -> None:
        """Take what it shares, and which of the parts it is."""
        super().__init__()
        self.shared, self.number = shared, number

    @property
    def in_features(self) -> int:
        """Return K."""
        return self.shared.layer.in_features

    @property
    def out_features(self) -> int:
        """Return the columns of its result."""
        return self.shared.sizes[self.number]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] of x [..., K], columns of a larger tensor."""
        return self.shared.part(x, self.number)

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


# ---- MLPs ---------------------------------------------------------------------------------------


class GatedMlp(torch.nn.Module):
    """``down(act(gate(x)) * up(x))``; what is inside of ``down`` is one layer."""

    def __init__(self, gate_up: Linear, down: torch.nn.Module) -> None:
        """Take the gated layer, and the one after it."""
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] of x [..., H]."""
        made: Tensor = self.down_proj(self.gate_up_proj(x))
        return made


def mlp_activation(module: torch.nn.Module) -> str | None:
    """Return the activation of gates, if the module is ``down(act(gate(x)) * up(x))``; else None.

    It is tried with small layers in place of its own, which may have no weights yet.
    """
    children = dict(module.named_children())
    others = [child for name, child in children.items() if name not in _PROJECTIONS]
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    held += [value for child in others for value in (*child.parameters(), *child.buffers())]
    if held or not all(name in children for name in _PROJECTIONS):
        return None
    rng = torch.Generator().manual_seed(0)
    wide, inner = _TRIED

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu")

    with torch.no_grad(), torch.device("cpu"):  # the model is being made on the device "meta"
        layers = dict.fromkeys(_PROJECTIONS[:2], (inner, wide)) | {"down_proj": (wide, inner)}
        tried = {name: _layer(random(*shape)) for name, shape in layers.items()}
        x = random(64, wide)
        found = _tried(module, x, _modules={**module._modules, **tried})
        gate, up, down = (tried[name] for name in _PROJECTIONS)
        for name, formula in _ACTS.items():
            if _alike(found, down(formula(gate(x)) * up(x))):
                return name
    return None


def _layer(weight: Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float32)
    made.weight.copy_(weight)
    return made


def _tried(module: torch.nn.Module, x: Tensor, **state: Any) -> Tensor | None:
    """Return what the module makes of x with other parts of its state; None: nothing."""
    trial = copy.copy(module)
    trial.__dict__.update(state, training=False)
    try:
        found = trial(x)
    except _REFUSED:
        return None
    return found if isinstance(found, torch.Tensor) else None


def _alike(found: Tensor | None, wanted: Tensor) -> bool:
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return torch.allclose(found, wanted, rtol=_SAME, atol=_SAME)


# ---- Norms --------------------------------------------------------------------------------------


def fuse_norms(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Put `torch.nn.RMSNorm` in place of modules that compute it, with their weights.

    ``dtype``: of activations; a weight of another may make the result one of its own.
    """
    for name, module in [*model.named_modules()]:
        eps = norm_eps(module)
        weight = next(module.parameters(recurse=False), None)
        if eps is None or weight is None or weight.dtype != dtype:
            continue
        made = torch.nn.RMSNorm(weight.shape[0], eps, device="meta", dtype=weight.dtype)
        made.weight = weight
        model.set_submodule(name, made.train(module.training))


def norm_eps(module: torch.nn.Module) -> float | None:
    """Return eps of a module that is ``x / sqrt(mean(x^2) + eps) * weight``; None: it is none."""
    held = [*module.named_parameters(), *module.named_buffers(), *module.named_children()]
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
    shape = weight.shape if isinstance(weight, torch.nn.Parameter) else ()
    if isinstance(module, torch.nn.RMSNorm) or len(held) != 1 or len(shape) != 1:
        return None
    if not isinstance(eps, float):
        return None
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        size = torch.logspace(-4, 1, 16)[:, None]  # of the smallest rows eps is the most
        x = torch.randn(16, shape[0], generator=rng) * size
        other = torch.nn.Parameter(torch.randn(shape, generator=rng))
        found = _tried(module, x, _parameters={"weight": other})
        wanted = torch.nn.functional.rms_norm(x, shape, other, eps)
        return eps if _alike(found, wanted) else None
