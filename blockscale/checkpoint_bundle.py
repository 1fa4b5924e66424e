"""The experts of one MoE layer, however a checkpoint names them, and each of them by itself.

Found from names and shapes alone: an expert a tensor (gate_proj, up_proj, down_proj; w1, w3, w2),
or all experts in one (gate_up_proj and down_proj, mlp1_weight and mlp2_weight, or three of them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from blockscale.checkpoint_entry import Entry, Facts
from blockscale.checkpoint_kinds import PLAIN
from blockscale.checkpoint_weight import Weight, load
from blockscale.errors import CheckpointError
from blockscale.safetensors_file import TensorInfo

if TYPE_CHECKING:
    from blockscale.checkpoints import Checkpoint

Tensor = torch.Tensor

_ROLES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_FUSED = {
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "gate_proj": "gate",
    "up_proj": "up",
    "mlp1_weight": "gate_up",
    "mlp2_weight": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_EACH = re.compile(
    rf"(?P<head>.*experts)\.(?P<expert>\d{{1,6}})\.(?P<leaf>{'|'.join(_ROLES)})\.weight"
)
_ALL = re.compile(rf"(?P<head>.*)\.(?P<leaf>{'|'.join(_FUSED)})(\.weight)?")
_BY_EXPERT = frozenset(("packed", "block_scale", "zero", "data"))
_LAID = ("w13", "w2")
"""Roles of `blockscale.checkpoint_tiles`, which hold all experts."""
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


def bundles(entries: Iterable[Entry]) -> dict[str, Bundle]:
    """Return the layers of experts by the name of the module that holds their weights.

    Layers that lack a weight, e.g. of one expert, are left out.
    """
    each: dict[str, dict[str, dict[int, Entry]]] = {}
    whole: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        match = _EACH.fullmatch(entry.name)
        if match and len(entry.shape) == 2:
            roles = each.setdefault(match["head"], {})
            roles.setdefault(_ROLES[match["leaf"]], {})[int(match["expert"])] = entry
            continue
        match = _ALL.fullmatch(entry.name)
        if match and len(entry.shape) == 3:
            whole.setdefault(match["head"], {})[_FUSED[match["leaf"]]] = entry
    found = {}
    for head, roles in each.items():
        numbers = roles.get("down", {}).keys()
        if "up" in roles and all(set(r) == set(range(len(numbers))) for r in roles.values()):
            ordered = {k: tuple(r[e] for e in sorted(r)) for k, r in sorted(roles.items())}
            found[head] = Bundle(head, len(numbers), ordered)
    for head, kinds in whole.items():
        counts = {entry.shape[0] for entry in kinds.values()}
        complete = "down" in kinds and ("gate_up" in kinds) != ("up" in kinds)
        if head not in found and complete and len(counts) == 1:
            oriented = _oriented(kinds)
            singles = {k: (oriented[k],) for k in sorted(kinds)}
            found[head] = Bundle(head, counts.pop(), singles)
    return found


def _oriented(kinds: dict[str, Entry]) -> dict[str, Entry]:
    """Return plain weights [E, K, N] as transposed ones [E, N, K].

    gpt-oss, Llama 4 and others hold plain experts so.  2I rows and I columns, or the reverse, tell.
    """
    if any(e.fmt not in PLAIN.values() or e.transposed for e in kinds.values()):
        return kinds
    up, down = kinds.get("gate_up"), kinds["down"]
    if up is None or up.shape[1] != down.shape[2] or up.shape[2] != 2 * down.shape[1]:
        return kinds
    return {
        role: replace(e, shape=(e.shape[0], e.shape[2], e.shape[1]), transposed=True)
        for role, e in kinds.items()
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


def layer(ckpt: Checkpoint, name: str) -> tuple[Bundle, str]:
    """Return the experts below the module ``name``, and the name of their module.

    Raises:
        CheckpointError: there are none, or they are not complete.
    """
    stem = name.rstrip(".")
    wanted = [stem, *(f"{stem}.{tail}" for tail in ("experts", "mlp.experts"))]
    wanted += [f"{stem}.{tail}.experts" for tail in ("block_sparse_moe", "feed_forward")]
    found = bundles(e for e in ckpt.entries.values() if e.name.startswith(stem + "."))
    for head in wanted:
        if head in found:
            return found[head], head
    below = ckpt.below(stem)
    hint = f"it has {len(below)} weights, e.g. {below[0]!r}" if below else "it has none"
    raise CheckpointError(
        f"{ckpt.path}: no complete set of experts below {stem!r} ({hint}); give the name of an MoE "
        "layer's module, for example 'model.layers.0.mlp'"
    )


def matrices(bundle: Bundle, e: int, facts: Facts) -> Matrices:
    """Return the weights of expert ``e``; what is mapped stays so."""
    found = {role: flat(load(bundle.of(role, e), facts)) for role in bundle.roles}
    if "gate_up" in found:
        gate, up = halves(found["gate_up"])
        return Matrices(gate, up, found["down"])
    return Matrices(found.get("gate"), found["up"], found["down"])
