"""Open a checkpoint's folder and read its weights, one at a time, in one meaning each.

``ckpt = blockscale.checkpoints.open("folder")`` finds out what the folder holds: NVFP4 of ModelOpt
(dense, of each expert, or of all experts in one tensor) and of compressed-tensors, MXFP4 of both
and of gpt-oss, INT4 of AWQ and GPTQ, FP8 with one scale, and plain tensors; ``ckpt.notes`` says
what it found.  Only headers are read then, and checked in full.  ``ckpt[name]`` reads one
`blockscale.checkpoint_weight.Weight`.
"""

from __future__ import annotations

import difflib
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockscale.checkpoint_folder import Folder, read_folder
from blockscale.checkpoint_kinds import Entry, facts, find_entries
from blockscale.errors import CheckpointError

if TYPE_CHECKING:
    from blockscale.checkpoint_weight import Weight

_EXPERT = re.compile(r"(?P<head>.*\.experts)\.(?P<expert>\d{1,6})\.(?P<tail>.*)")


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
        self._stacks: dict[str, dict[int, Entry]] | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of all weights, layer 2 before layer 10."""
        return list(self.entries)

    @property
    def stacks(self) -> list[str]:
        """Return the names under which `__getitem__` stacks weights stored expert by expert."""
        return list(self._experts())

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            name in self.entries or name + ".weight" in self.entries or name in self._experts()
        )

    def __getitem__(self, name: str) -> Weight:
        """Return the weight ``name``, with or without ".weight" at its end.

        "….experts.down_proj" is all of "….experts.0.down_proj.weight", …, stacked.

        Raises:
            KeyError: there is none of this name.
            CheckpointError: its data are none of its format, or its file changed.
        """
        from blockscale.checkpoint_weight import load

        entry = self.entries.get(name) or self.entries.get(name + ".weight")
        if entry is not None:
            return load(entry, self.facts)
        experts = self._experts().get(name)
        if experts is None:
            raise KeyError(self._unknown(name))
        from blockscale.checkpoint_stack import stack

        found = [load(experts[e], self.facts) for e in range(len(experts))]
        return stack(name, found)

    def below(self, prefix: str) -> list[str]:
        """Return the names of the weights of one module, e.g. "model.layers.0.mlp"."""
        return [name for name in self.entries if name.startswith(prefix.rstrip(".") + ".")]

    def _experts(self) -> dict[str, dict[int, Entry]]:
        if self._stacks is None:
            found: dict[str, dict[int, Entry]] = {}
            for entry in self.entries.values():
                match = _EXPERT.fullmatch(entry.name)
                if match:
                    name = f"{match['head']}.{match['tail'].removesuffix('.weight')}"
                    found.setdefault(name, {})[int(match["expert"])] = entry
            self._stacks = {
                name: experts
                for name, experts in found.items()
                if name not in self.entries and experts.keys() == set(range(len(experts)))
            }
        return self._stacks

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


__all__: list[Any] = ["Checkpoint", "CheckpointError", "open"]
