"""Open a checkpoint's folder and read its weights, one at a time, in one meaning each.

``ckpt = blockscale.checkpoints.open("folder")`` finds out what the folder holds: NVFP4 of ModelOpt
(dense, of each expert, or of all experts in one tensor) and of compressed-tensors, MXFP4 of both
and of gpt-oss, INT4 of AWQ, GPTQ, compressed-tensors and ModelOpt, FP8, and plain tensors;
``ckpt.notes`` says what it found.  Only headers are read then, and checked in full.  ``ckpt[name]``
reads one `blockscale.checkpoints.weight.Weight`, or, of the name of an MoE module, its
`Experts`.  docs/checkpoints.md has the kinds and their tensors.
"""

from __future__ import annotations

import difflib
import gc
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from blockscale.base.errors import CheckpointError, UnknownNameError
from blockscale.checkpoints.entry import Entry
from blockscale.checkpoints.experts.experts import Experts, load_experts
from blockscale.checkpoints.experts.modules import Group, candidates, find_modules, pick
from blockscale.checkpoints.experts.stack import stack
from blockscale.checkpoints.files.folder import Folder, read_folder
from blockscale.checkpoints.schemes.kinds import facts, find_entries, load
from blockscale.checkpoints.weight import Weight

_EXPERT = re.compile(r"(?P<head>(?:.*\.)?experts)\.(?P<expert>\d{1,6})\.(?P<tail>.*)")
_WRAPPER = "_orig_mod."


class Checkpoint:
    """The weights of one checkpoint by name; reading one keeps nothing.

    Attributes:
        path: the folder, or the one file.
        kind: e.g. "modelopt-nvfp4", "gpt-oss-mxfp4", "awq-int4" or "plain".
        notes: sentences on what was found, ignored or contradicted.
        entries: what is known of each weight without reading it.
    """

    def __init__(self, folder: Folder) -> None:
        self.path = folder.path
        self.kind, entries, self.notes = find_entries(folder)
        self.entries: dict[str, Entry] = {}
        for entry in entries:
            if entry.name in self.entries:
                raise CheckpointError(
                    f"{folder.path}: {entry.name} is there twice, as "
                    f"{self.entries[entry.name].fmt} and as {entry.fmt}; remove the one "
                    "that does not belong to the checkpoint"
                )
            self.entries[entry.name] = entry
        self.shards = folder.shards
        self.configs = folder.configs
        self.facts = facts(folder)

    @property
    def names(self) -> list[str]:
        """Return the names of all weights, layer 2 before layer 10."""
        return list(self.entries)

    @property
    def stacks(self) -> list[str]:
        """Return the names under which `__getitem__` stacks weights stored expert by expert."""
        return list(self._stacks)

    @property
    def modules(self) -> list[str]:
        """Return the names of the MoE modules that `experts` reads."""
        return list(self._modules)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return self._entry(name) is not None or name in self._stacks or bool(self.group(name))

    def __getitem__(self, name: str) -> Any:
        """Return a `Weight`, or the `Experts` of an MoE module.

        A weight's name may lack ".weight" at its end.  "….experts.down_proj" is all of
        "….experts.0.down_proj.weight", …, stacked; "….experts", or the name of what has them, e.g.
        "model.layers.0.mlp", is all weights of the experts, as `Experts`.

        Raises:
            UnknownNameError: there is none of this name; a CheckpointError and a KeyError.
            CheckpointError: its data are none of its format, or its file changed.
        """
        if self._entry(name) is None and name not in self._stacks and self.group(name):
            return self.experts(name)
        return self.weight(name)

    def weight(self, name: str) -> Weight:
        """Return the weight ``name``, as `__getitem__` does, but never `Experts`."""
        entry = self._entry(name)
        if entry is not None:
            return load(entry, self.facts)
        experts = self._stacks.get(name)
        if experts is None:
            raise UnknownNameError(self._unknown(name))
        found = [load(experts[e], self.facts) for e in range(len(experts))]
        return stack(name, found)

    def experts(self, name: str, only: Sequence[int] | None = None) -> Experts:
        """Return the experts of the MoE module ``name``, with or without ".experts" at its end.

        ``only``: of these experts, in this order; the data of others are not read.
        """
        group = self.group(name)
        if group is None:
            raise UnknownNameError(self._unknown(name))
        return load_experts(group if only is None else pick(group, only), self.facts)

    def below(self, prefix: str) -> list[str]:
        """Return the names of the weights of one module, e.g. "model.layers.0.mlp"."""
        return [name for name in self.entries if name.startswith(prefix.rstrip(".") + ".")]

    def _entry(self, name: str) -> Entry | None:
        found = self.entries.get(name) or self.entries.get(f"{name}.weight")
        found = found or self.entries.get(f"{name}_blocks")  # gpt-oss, saved dequantised
        if found is not None or not isinstance(name, str):
            return found
        other = self._aliases.get(name) or self._aliases.get(f"{name}.weight")
        return None if other is None else self.entries[other]

    def group(self, name: str) -> Group | None:
        """Return the entries of the experts of module ``name``; None: it has none."""
        if not isinstance(name, str):
            return None
        found = (self._modules.get(module) for module in candidates(name))
        return next((group for group in found if group is not None), None)

    @cached_property
    def _modules(self) -> dict[str, Group]:
        return find_modules(self.entries.values())

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Names without what torch.compile puts into them, which may be left out."""
        return {n.replace(_WRAPPER, ""): n for n in self.entries if _WRAPPER in n}

    @cached_property
    def _stacks(self) -> dict[str, dict[int, Entry]]:
        found: dict[str, dict[int, Entry]] = {}
        for entry in self.entries.values():
            match = _EXPERT.fullmatch(entry.name)
            if match:
                name = f"{match['head']}.{match['tail'].removesuffix('.weight')}"
                found.setdefault(name, {})[int(match["expert"])] = entry
        return {
            name: experts
            for name, experts in found.items()
            if name not in self.entries and experts.keys() == set(range(len(experts)))
        }

    def _unknown(self, name: object) -> str:
        text = f"{self.path} has no weight {name!r}"
        if not isinstance(name, str):
            return text
        members = self.below(name)
        if members:
            return f"{text}, but {len(members)} below it; ask for one, e.g. {members[0]!r}"
        close = difflib.get_close_matches(name, list(self.entries)[:10_000], n=1)
        return text + (f"; did you mean {close[0]!r}?" if close else "; see .names")

    def __repr__(self) -> str:
        return f"<Checkpoint {str(self.path)!r}: {self.kind}, {len(self)} weights>"


def open(path: str | Path) -> Checkpoint:
    """Return the checkpoint at ``path``: a folder, or one .safetensors file.

    Raises:
        CheckpointError: it is damaged, incomplete or in an unknown format; the message says where.
    """
    collecting = gc.isenabled()
    gc.disable()  # with 10^6 tensors it looks at all of them again and again
    try:
        return Checkpoint(read_folder(Path(path)))
    finally:
        if collecting:
            gc.enable()
