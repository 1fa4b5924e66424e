"""The experts of one MoE layer, each by itself, for converting them one after the other.

`checkpoint_modules` finds them by name; a tensor of all experts is read expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.entry import Entry, Facts
from blockscale.checkpoints.experts.modules import check_group, find_modules
from blockscale.checkpoints.experts.rows import is_turned
from blockscale.checkpoints.files.safetensors import TensorInfo
from blockscale.checkpoints.schemes.kinds import PLAIN
from blockscale.checkpoints.weight import Weight

Tensor = torch.Tensor

_ROLES = ({"gate_up", "down"}, {"gate", "up", "down"}, {"up", "down"})
_BY_EXPERT = frozenset(("packed", "block_scale", "zero", "data"))
_LAID = ("w13", "w2")
"""Roles of `blockscale.checkpoints.schemes.tiles`, which hold all experts."""
_PER_EXPERT = frozenset(("global_scale", "global_divisor", "input_scale", "input_divisor"))


class Matrices(NamedTuple):
    """One expert: gate (None: not gated), up [I, H] and down [H, I], each 2-D."""

    gate: Weight | None
    up: Weight
    down: Weight


@dataclass(frozen=True)
class Bundle:
    """The weights of the experts of one layer, by role: "gate", "up", "gate_up", "down".

    A role has one entry of all experts, or as many as there are experts.
    """

    head: str
    experts: int
    roles: dict[str, tuple[Entry, ...]]

    @property
    def entries(self) -> list[Entry]:
        """Return all entries, experts one after the other."""
        most = max(len(found) for found in self.roles.values())
        return [found[e] for e in range(most) for found in self.roles.values() if e < len(found)]

    @property
    def gated(self) -> bool:
        """Whether there are gates."""
        return "up" not in self.roles or "gate" in self.roles

    def of(self, role: str, e: int) -> Entry:
        """Return the entry of expert ``e``."""
        found = self.roles[role]
        return found[e] if len(found) > 1 or len(found[0].shape) == 2 else one(found[0], e)

    def together(self, entry: Entry, e: int) -> list[Entry]:
        """Return the matrices of expert ``e`` that share a global scale with ``entry``."""
        pair = [role for role in ("gate", "up") if role in self.roles]
        found = [self.of(role, e) for role in pair]
        return found if any(entry.name == other.name for other in found) else []


def bundles(entries: Iterable[Entry], facts: Facts) -> dict[str, Bundle]:
    """Return the layers of experts by the name of the module that holds their weights.

    Left out are layers that lack a weight, e.g. of one expert, or whose sizes are not of one layer.
    """
    found = {}
    for name, group in find_modules(entries).items():
        try:
            check_group(group)
            roles = {k: tuple(v[e] for e in sorted(v)) for k, v in sorted(group.weights.items())}
            made = _bundle(name, _oriented(roles, facts))
        except CheckpointError:
            continue
        if made is not None:
            found[name] = made
    return found


def _bundle(name: str, roles: dict[str, tuple[Entry, ...]]) -> Bundle | None:
    """Return the bundle, unless sizes do not fit each other."""
    if set(roles) not in _ROLES:
        return None
    counts = {v[0].shape[0] if len(v[0].shape) == 3 else len(v) for v in roles.values()}
    shapes = {k: {e.shape[-2:] for e in v} for k, v in roles.items()}
    if len(counts) > 1 or any(len(shape) > 1 for shape in shapes.values()):
        return None
    hidden, inner = next(iter(shapes["down"]))
    if shapes.get("gate_up") == {(inner, hidden)}:  # without gates, whatever its name
        roles = {"up" if role == "gate_up" else role: v for role, v in roles.items()}
        shapes["up"] = shapes.pop("gate_up")
    rows = {"gate_up": 2 * inner, "gate": inner, "up": inner}
    if any(shapes[role] != {(rows[role], hidden)} for role in roles if role != "down"):
        return None
    return Bundle(name, counts.pop(), roles)


def _oriented(roles: dict[str, tuple[Entry, ...]], facts: Facts) -> dict[str, tuple[Entry, ...]]:
    """Return plain weights that are stored as [E, K, N] as transposed ones [E, N, K]."""
    lone = all(len(found) == 1 and found[0].fmt in PLAIN.values() for found in roles.values())
    first = next((roles[role] for role in ("gate_up", "up", "gate") if role in roles), None)
    if not lone or first is None or "down" not in roles:
        return roles
    up, down = (Weight(e.name, e.fmt, e.shape) for e in (first[0], roles["down"][0]))
    if not is_turned(up, down, facts)[0]:
        return roles
    return {
        role: (replace(e, shape=(e.shape[0], e.shape[2], e.shape[1]), transposed=True),)
        for role, (e,) in roles.items()
    }


def one(entry: Entry, e: int) -> Entry:
    """Return expert ``e`` of an entry of all experts, [1, N, K]."""
    experts = entry.shape[0]
    parts = {role: _part(role, part, experts, e) for role, part in entry.parts.items()}
    return replace(entry, parts=parts, shape=(1, *entry.shape[1:]))


def _part(role: str, part: TensorInfo, experts: int, e: int) -> TensorInfo:
    by_expert = role in _BY_EXPERT or role.startswith(_LAID)
    if not by_expert and not (role in _PER_EXPERT and prod(part.shape) == experts):
        return part
    size = part.nbytes // experts
    shape = (1, *part.shape[1:]) if by_expert else (1,)
    start = part.start + e * size
    return part._replace(shape=shape, start=start, stop=start + size)


def flat(weight: Weight) -> Weight:
    """Return the weight of one expert [1, N, K] as a matrix [N, K]."""
    if len(weight.shape) == 2:
        return weight
    moved = {
        field: value[0]
        for field in ("data", "packed", "block_scale", "zero")
        if (value := getattr(weight, field)) is not None
    }
    return replace(weight, shape=weight.shape[1:], **moved)


def halves(weight: Weight) -> tuple[Weight, Weight]:
    """Return gate and up of a matrix that holds both, in whichever order."""
    inner = weight.shape[0] // 2
    made = []
    for part in (0, 1):
        rows = slice(part, None, 2)
        if weight.gate_up != "interleaved":
            rows = slice(part * inner, (part + 1) * inner)
        moved = {
            field: value[rows]
            for field in ("data", "packed", "block_scale", "zero")
            if (value := getattr(weight, field)) is not None
        }
        shape = (inner, *weight.shape[1:])
        made.append(replace(weight, shape=shape, gate_up=None, **moved))
    return made[0], made[1]
