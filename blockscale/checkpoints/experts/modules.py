"""Which weights of a checkpoint are the experts of one MoE module, by their names.

A module is called "….experts", or "….mlp" by OpenAI.  Its weights are stored expert by expert
("….experts.3.up_proj", or "….experts.up_proj.3"), or all experts in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.entry import Entry

ALL = -1
"""In place of an expert's number: one tensor has all of them."""

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
_NUMBERED = re.compile(r"\.\d{1,6}(\.|$)")


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
