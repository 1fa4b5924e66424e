"""Which weights of a checkpoint are the experts of one MoE module, by their names.

A module is called "….experts", or "….mlp" by OpenAI.  Its weights are stored expert by expert
("….experts.3.up_proj", or "….experts.up_proj.3"), or all experts in one tensor.  A `Group` is what
names say; a `Bundle` is a group that is whole, expert by expert, for converting it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.entry import CODES, PLAIN, Entry, Facts
from blockscale.checkpoints.files.safetensors import TensorInfo, shown
from blockscale.checkpoints.weight import ROWS, Weight

ALL = -1
"""In place of an expert's number: one tensor has all of them."""

ROUTERS = ("gate", "router", "router.layer", "router.linear", "router.classifier", "gate.wg")
"""What a router is called, beside the experts."""
_LEAVES = {
    "gate": ("gate_proj", "w1", "gate"),
    "up": ("up_proj", "w3", "up"),
    "down": ("down_proj", "w2", "down", "linear_fc2", "output_linear", "mlp2", "down_projs"),
    "gate_up": ("gate_up_proj", "w13", "linear_fc1", "input_linear", "mlp1", "gate_up_projs"),
}
_ROLE = {leaf: role for role, leaves in _LEAVES.items() for leaf in leaves}
_LEAF = "|".join(sorted(_ROLE, key=len, reverse=True))
_MODULE = r"(?P<module>(?:.*\.)?(?:experts|local_experts|block_sparse_moe|mlp))"
_NAME = re.compile(
    rf"{_MODULE}\.(?:(?P<before>\d{{1,6}})\.)?(?P<leaf>{_LEAF})(?:\.(?P<after>\d{{1,6}}))?"
    r"(?:_blocks)?(?:[._](?P<kind>weight|bias))?"
)
"""transformers 5 leaves "_blocks" in the names of gpt-oss' experts that it saves dequantised."""
_TRANSPOSED = ("llama4", "llama4_text", "gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text")
"""Model types that store plain experts as [E, in, out]; asked only where shapes cannot say it."""
_ROLES = ({"gate_up", "down"}, {"gate", "up", "down"}, {"up", "down"})
_LAID = ("w13", "w2")
"""Roles of `schemes.tiles`, which hold all experts."""
_PER_EXPERT = ("global_scale", "global_divisor", "input_scale", "input_divisor")


@dataclass
class Group:
    """The weights and biases of one module: {role: {expert: entry}}; expert `ALL`: of all."""

    name: str
    weights: dict[str, dict[int, Entry]] = field(default_factory=dict)
    biases: dict[str, dict[int, Entry]] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        """Return how many experts there are; 0: tensors say it."""
        return max((e for found in self.weights.values() for e in found), default=ALL) + 1

    @property
    def total(self) -> int:
        """Return how many experts there are, as numbers in names or sizes of tensors say."""
        lone = [found[ALL].shape[0] for found in self.weights.values() if ALL in found]
        return self.experts or max(lone, default=0)


def find_modules(entries: Iterable[Entry]) -> dict[str, Group]:
    """Return the modules that have experts, by name."""
    found: dict[str, Group] = {}
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None or (match["before"] and match["after"]):
            continue
        if (match["before"] or match["after"]) and not match["module"].endswith("experts"):
            continue  # layers of one dense MLP
        module, role = match["module"], _ROLE[match["leaf"]]
        number = match["before"] or match["after"]
        bias = match["kind"] == "bias"
        dims = (2 if number is None else 1) if bias else (3 if number is None else 2)
        if len(entry.shape) != dims:  # of a dense layer, or not of an expert
            continue
        group = found.setdefault(module, Group(module))
        kind = group.biases if bias else group.weights
        e = ALL if number is None else int(number)
        before = kind.setdefault(role, {}).get(e)
        if before is not None:
            raise CheckpointError(
                f"{module}: {before.name} and {entry.name} are both {role} of expert {e}; remove "
                "the one that does not belong to the checkpoint"
            )
        kind[role][e] = entry
    return {
        name: group
        for name, group in found.items()
        if "down" in group.weights and group.weights.keys() - {"down"}
    }


def candidates(name: str) -> list[str]:
    """Return the modules that ``name`` may mean, with or without ".experts" at its end."""
    name = name.rstrip(".")
    found = [name, f"{name}.experts", f"{name}.experts.local_experts", f"{name}.local_experts"]
    if name.endswith(".experts"):
        found.append(name.removesuffix(".experts"))
    return found


def check_group(group: Group) -> None:
    """Refuse a module in which a weight of an expert is missing, or that is stored twice over."""
    roles = group.weights.keys()
    if "gate_up" in roles and roles & {"gate", "up"}:
        raise CheckpointError(
            f"{group.name} has gate_up and also gate or up; remove what does not belong to the "
            "checkpoint"
        )
    for kind, stored in (("weight", group.weights), ("bias", group.biases)):
        for role, found in stored.items():
            if ALL in found and len(found) == 1:
                continue
            missing = set(range(group.experts)) - found.keys()
            if ALL in found or missing:
                what = f"of expert {min(missing)}" if missing else "of all experts twice"
                raise CheckpointError(
                    f"{group.name}: the {role} {kind} {what} is {'not ' if missing else ''}there, "
                    f"of {group.experts} experts; copy all files of the checkpoint"
                )


def pick(group: Group, experts: Sequence[int]) -> Group:
    """Return the module with some experts alone, in this order; the others' data are not read.

    Raises:
        CheckpointError: the module lacks a weight.
        ValueError: there is no such expert.
    """
    check_group(group)
    kinds = group.weights, group.biases
    stored = [found for kind in kinds for found in kind.values()]
    counts = {found[ALL].shape[0] if ALL in found else len(found) for found in stored}
    if len(counts) > 1:
        raise CheckpointError(
            f"{group.name}: weights and biases are of {sorted(counts)} experts, but must all be of "
            "as many; copy all files of the checkpoint"
        )
    wrong = [e for e in experts if not 0 <= e < group.total]
    if wrong or not experts:
        raise ValueError(
            f"{group.name} has {group.total} experts, but those asked for are "
            f"{shown(list(experts))}; pass one or more from 0 to {group.total - 1}"
        )
    picked = [{role: _picked(found, experts) for role, found in kind.items()} for kind in kinds]
    return Group(group.name, *picked)


def runs(experts: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``experts`` as one range, first and end, if they follow each other; else one each."""
    first, end = experts[0], experts[0] + len(experts)
    together = list(experts) == list(range(first, end))
    return [(first, end)] if together else [(e, e + 1) for e in experts]


def _picked(found: dict[int, Entry], experts: Sequence[int]) -> dict[int, Entry]:
    if ALL not in found:
        return {i: found[e] for i, e in enumerate(experts)}
    if len(ranges := runs(experts)) == 1:
        return {ALL: some(found[ALL], *ranges[0])}
    return {i: one(found[ALL], e) for i, e in enumerate(experts)}


def is_turned(up: Weight | Entry, down: Weight | Entry, facts: Facts) -> tuple[bool, str]:
    """Return whether tensors of all experts hold [E, in, out], and how that was found.

    Only plain and FP8 ones can: of the others, scales tell it.  If ``up`` is gate and up together,
    one of its sizes is 2 I, and shapes decide.  Else the width of the model does.

    Raises:
        CheckpointError: the shapes are not of one layer.
    """
    if any(weight.fmt in CODES or len(weight.shape) != 3 for weight in (up, down)):
        return False, ""
    (_, a, b), (_, c, d) = up.shape, down.shape
    straight, turned = b == c, a == d  # H of both, or I of both: gate and up together have 2 I
    why = "as their shapes say"
    if straight and turned:
        if facts.hidden in (a, b) and a != b:
            turned = a == facts.hidden
            why = f"as hidden_size {facts.hidden} says"
        else:
            turned = facts.model in _TRANSPOSED
            why = f"as models of type {facts.model!r} do"
    elif not straight and not turned:
        raise CheckpointError(
            f"{up.name} is {list(up.shape)} and {down.name} {list(down.shape)}, which are no "
            "weights of one layer: [E, 2 I, H] and [E, H, I], or both transposed; copy them again"
        )
    order = "[E, in, out]" if turned else "[E, out, in]"
    return turned, f"experts are stored as {order}, {why}"


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
    lone = all(len(found) == 1 and found[0].fmt in PLAIN for found in roles.values())
    first = next((roles[role] for role in ("gate_up", "up", "gate") if role in roles), None)
    if not lone or first is None or "down" not in roles:
        return roles
    if not is_turned(first[0], roles["down"][0], facts)[0]:
        return roles
    return {
        role: (replace(e, shape=(e.shape[0], e.shape[2], e.shape[1]), transposed=True),)
        for role, (e,) in roles.items()
    }


def one(entry: Entry, e: int) -> Entry:
    """Return expert ``e`` of an entry of all experts, [1, N, K]."""
    return some(entry, e, e + 1)


def some(entry: Entry, first: int, last: int) -> Entry:
    """Return the experts from ``first`` to before ``last`` of an entry of all, [E, N, K]."""
    experts, count = entry.shape[0], last - first
    parts = {role: _part(role, part, experts, first, last) for role, part in entry.parts.items()}
    return replace(entry, parts=parts, shape=(count, *entry.shape[1:]))


def _part(role: str, part: TensorInfo, experts: int, first: int, last: int) -> TensorInfo:
    count = last - first
    if role in ROWS or role.startswith(_LAID):
        return part.piece(first, last, experts, (count, *part.shape[1:]))
    if role in _PER_EXPERT and prod(part.shape) in (experts, 2 * experts):
        each = prod(part.shape) // experts  # 2: of gate and of up
        return part.piece(first, last, experts, (count, each))
    return part
