"""Which weights of a checkpoint become which modules of a model, from headers alone.

transformers knows under which names a model was saved, and which of its weights were merged from
several (`conversion_mapping`); a weight of the checkpoint belongs where its dense form would go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.base.formats import QUANTIZED
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.convert.plan import KEPT
from blockscale.checkpoints.entry import CODES, PLAIN, Entry, alternates
from blockscale.checkpoints.experts.modules import ALL, Group
from blockscale.integrations.hf_config import BlockscaleConfig
from blockscale.integrations.hf_experts import Act, activation_of, is_experts
from blockscale.integrations.hf_fused import Fusions, mlp_activation
from blockscale.integrations.hf_interfaces import (
    WeightConverter,
    WeightRenaming,
    get_model_conversion_mapping,
    rename_source_key,
)
from blockscale.nn.kernels import GATES, MERGED
from blockscale.specs.int4 import TILE_GROUPS

_NUMBER = re.compile(r"(?<=\\\.)\d+(?=\\\.)")


class Pending(torch.nn.Module):
    """In place of a module until its weights are read: transformers sees none to load."""

    def extra_repr(self) -> str:
        """Return what it is."""
        return "not loaded yet"


@dataclass(frozen=True)
class Job:
    """One module of the model and the weights of the checkpoint that it gets.

    Attributes:
        module: its name in the model.
        source: of a layer, the name of its weight in the checkpoint; of experts, their module's.
        fmt: what plain weights are quantised to; None: they are taken as they are stored.
        group: int4: values that share a scale, if they are quantised.
    """

    module: str
    source: str
    fmt: str | None = None
    group: int = 0


@dataclass(frozen=True)
class LinearJob(Job):
    """A linear layer of 4 bits."""


@dataclass(frozen=True)
class MergedJob(Job):
    """Linear layers whose weights become rows of one.

    Attributes:
        parts: the layers, in the order of their rows.
        sizes: how many rows each has.
        activation: of gates; "none": they are no gates and ups.
    """

    parts: tuple[LinearJob, ...] = ()
    sizes: tuple[int, ...] = ()
    activation: str = "none"

    @property
    def gated(self) -> bool:
        """Return whether the parts are gates and ups."""
        return self.activation != "none"


@dataclass(frozen=True)
class ExpertsJob(Job):
    """Experts of 4 bits.

    Attributes:
        act: what is between their GEMMs.
        names, biases: of the tensors by role, in the order of experts.
        whole: roles whose tensor has all experts.
        alternating: rows of gate and up take turns in the checkpoint.
    """

    act: Act = field(default_factory=lambda: Act("swiglu"))
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    alternating: bool = False


@dataclass(frozen=True)
class DenseJob(Job):
    """A module that stays what it is, of weights whose values are stored as FP8."""

    stock: torch.nn.Module = field(default_factory=torch.nn.Identity)


def plan(model: Any, ckpt: Checkpoint, config: BlockscaleConfig) -> list[Job]:
    """Return what is to be done for the modules of ``model``, whose weights are on "meta".

    Raises:
        CheckpointError: a quantised weight has no place in the model, or its size is another.
    """
    quantise = config.stored is None and not any(e.fmt in CODES for e in ckpt.entries.values())
    planner = _Planner(model, ckpt, config, quantise)
    jobs = [*planner.experts(), *planner.layers()]
    lost = next((e.name for e in ckpt.entries.values() if e.fmt in CODES), None)
    if lost is not None and not jobs:
        raise CheckpointError(
            f"{ckpt.path}: {type(model).__name__} has none of the 4-bit weights, e.g. {lost}; "
            "config.json is of another model, or key_mapping= is needed, which blockscale does not "
            "see: rename the tensors in the files"
        )
    _check_tied(model, jobs)
    return jobs


def merged(model: Any, ckpt: Checkpoint, jobs: Iterable[Job], fused: Fusions) -> list[Job]:
    """Return the jobs with those together whose layers may be one: see `MERGED`.

    The model has its own modules still, which are tried.
    """
    found = list(jobs)
    linear = {job.module: job for job in found if isinstance(job, LinearJob)}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in linear):
        for leaves, whole in MERGED.items():
            parts = tuple(linear[f"{parent}.{n}"] for n in leaves if f"{parent}.{n}" in linear)
            if len(parts) < len(leaves) or not _one_kind(ckpt, parts):
                continue
            act = "none"
            if leaves == GATES and _kind(ckpt, parts[0])[0] in QUANTIZED:
                module = model.get_submodule(parent)
                act = (mlp_activation(module) if fused.mlps else None) or "none"
            if act == "none" and not fused.projections:
                continue
            sizes = tuple(ckpt.entries[part.source].shape[0] for part in parts)
            first = parts[0]
            made = MergedJob(
                *(f"{parent}.{whole}", first.source, first.fmt, first.group, parts, sizes, act)
            )
            found[found.index(first)] = made
            found = [job for job in found if job not in parts]
            break
    return found


def _one_kind(ckpt: Checkpoint, parts: Iterable[LinearJob]) -> bool:
    return len({_kind(ckpt, part) for part in parts}) == 1


def _kind(ckpt: Checkpoint, part: LinearJob) -> tuple[Any, ...]:
    """Return what layers must have in common for one kernel: format, group, K and parts."""
    entry = ckpt.entries[part.source]
    fmt = part.fmt or entry.fmt
    group = part.group if part.fmt else entry.group
    return fmt, group, entry.shape[1], tuple(sorted(entry.parts)), part.fmt is None


def ignored(model: Any, jobs: Iterable[Job]) -> set[str]:
    """Return patterns of names that transformers need not call unexpected: jobs read them."""
    base = f"{model.base_model_prefix}."
    found = {re.escape(job.module.removeprefix(base) + ".") for job in jobs}
    return {rf"(^|\.){_NUMBER.sub(lambda _: r'[0-9]+', name)}" for name in found}


class _Planner:
    """What is asked of the model and of the checkpoint for each weight."""

    def __init__(
        self, model: Any, ckpt: Checkpoint, config: BlockscaleConfig, quantise: bool
    ) -> None:
        self.model, self.ckpt, self.config, self.quantise = model, ckpt, config, quantise
        mapping = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.state = model.state_dict()
        self.done: set[str] = set()

    def target(self, name: str) -> tuple[str, bool]:
        """Return the model's name of a weight of the checkpoint, and whether it is merged there."""
        found, pattern = rename_source_key(
            name, self.renamings, self.converters, self.model.base_model_prefix, self.state
        )
        return found, pattern is not None

    # ---- Experts --------------------------------------------------------------------------------

    def experts(self) -> Iterator[Job]:
        """Yield what modules of experts become; their weights are `done`, if so."""
        for name in self.ckpt.modules:
            group = self.ckpt.group(name)
            assert group is not None
            stored = [entry for found in group.weights.values() for entry in found.values()]
            firsts = [next(iter(found.values())) for found in group.weights.values()]
            targets = {self.target(entry.name)[0] for entry in firsts}
            places = {target.rpartition(".")[0] for target in targets}
            if not targets <= self.state.keys() or len(places) > 1:
                continue  # not of this model, or the model has each expert by itself
            place = places.pop()
            module = self.model.get_submodule(place)
            if isinstance(module, torch.nn.Linear):
                continue
            job = self._experts(place, module, name, group, {entry.fmt for entry in stored})
            if job is not None:
                biases = (e for found in group.biases.values() for e in found.values())
                self.done.update(entry.name for entry in (*stored, *biases))
                yield job

    def _experts(
        self, place: str, module: torch.nn.Module, name: str, group: Group, formats: set[str]
    ) -> Job | None:
        packed, plain = formats <= {*CODES}, formats <= {*PLAIN}
        if plain and not (self.quantise and not self._left(place, name)):
            return None
        if not is_experts(module):
            if plain:
                return None
            raise CheckpointError(
                f"{name}: {place} of the model is a {type(module).__name__}, which is not called "
                "with hidden states, experts and weights as transformers calls experts from "
                "5.17 on, so its 4-bit weights have no kernel; use blockscale.nn.FusedMoE"
            )
        if len(formats) > 1:
            raise CheckpointError(
                f"{name} has experts of {' and '.join(sorted(formats))}, but all of a layer must "
                "have one format; quantise them again, all of them or none"
            )
        self._check_experts(place, module, name, group)
        if formats == {"fp8"}:
            return DenseJob(place, name, stock=module)
        if not packed and not plain:
            return None
        fmt, size = None, 0
        if plain:
            hidden, inner = _sizes(module)
            fmt, size = self._format(hidden, inner)
            if fmt is None:
                return None
        both = group.weights.get("gate_up", {})
        first = next(iter(both.values()), None)
        return ExpertsJob(
            *(place, name, fmt, size),
            act=activation_of(place, module),
            names={role: _names(found) for role, found in group.weights.items()},
            biases={role: _names(found) for role, found in group.biases.items()},
            whole=frozenset(role for role, found in group.weights.items() if ALL in found),
            alternating=first is not None and alternates(first, self.ckpt.facts),
        )

    def _check_experts(self, place: str, module: torch.nn.Module, name: str, group: Group) -> None:
        """Refuse experts of other numbers or sizes than the model's."""
        hidden, inner = _sizes(module)
        count = len(_parameter(module, "down_proj"))
        down = group.weights["down"]
        entry = next(iter(down.values()))
        found = entry.shape[0] if ALL in down else group.experts
        wanted = {(hidden, inner)}
        if entry.fmt not in CODES and ALL in down:
            wanted.add((inner, hidden))
        if found != count or entry.shape[-2:] not in wanted:
            raise CheckpointError(
                f"{name} has {found} experts with {entry.name} {list(entry.shape)}, but {place} of "
                f"the model has {count} with [{hidden}, {inner}]; config.json is of another model"
            )

    # ---- Linear layers --------------------------------------------------------------------------

    def layers(self) -> Iterator[Job]:
        """Yield what linear layers become."""
        for entry in self.ckpt.entries.values():
            packed, eight = entry.fmt in CODES, entry.fmt == "fp8"
            plain = self.quantise and entry.fmt in PLAIN and len(entry.shape) == 2
            if entry.name in self.done or not (packed or eight or plain):
                continue
            target, merged = self.target(entry.name)
            place, _, leaf = target.rpartition(".")
            if target not in self.state:
                continue  # as for all weights that the model does not have, transformers says so
            module = self.model.get_submodule(place)
            linear = isinstance(module, torch.nn.Linear) and leaf == "weight" and not merged
            if not plain:
                self._check_layer(entry, target, module, linear)
            if plain:
                if linear and not self._left(place, entry.name):
                    yield from self._quantised(place, entry)
            elif eight:
                yield DenseJob(place, entry.name, stock=module)
            else:
                yield LinearJob(place, entry.name)

    def _check_layer(
        self, entry: Entry, target: str, module: torch.nn.Module, linear: bool
    ) -> None:
        if not linear or type(module).forward is not torch.nn.Linear.forward:
            raise CheckpointError(
                f"{entry.name} is {entry.fmt}, but {target} of the model is a weight of a "
                f"{type(module).__name__}, which is no linear layer of its own, so no kernel of "
                "blockscale takes it; quantise the model again without this weight"
            )
        shape = tuple(self.state[target].shape)
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.name} is {list(entry.shape)}, but {target} of the model is "
                f"{list(shape)}; config.json is of another model"
            )

    def _quantised(self, place: str, entry: Entry) -> Iterator[Job]:
        rows, cols = entry.shape
        fmt, group = self._format(cols)
        if fmt is not None and not (fmt == "int4" and rows % 2):
            yield LinearJob(place, entry.name, fmt, group)

    # ---- What is quantised ----------------------------------------------------------------------

    def _left(self, place: str, name: str) -> bool:
        """Return whether a plain weight stays as it is."""
        tied = self.model.all_tied_weights_keys
        if f"{place}.weight" in {*tied.keys(), *tied.values()}:
            return True
        if any(fnmatchcase(name, pattern) for pattern in KEPT):
            return True
        said = [p for skip in self.config.skip for p in (skip, f"*.{skip}")]
        patterns = [p for each in said for p in (each, f"{each}.*")]
        return any(fnmatchcase(known, p) for known in (place, name) for p in patterns)

    def _format(self, *sizes: int) -> tuple[str | None, int]:
        """Return the format, and the group of int4, that K of all ``sizes`` hold; None: none."""
        fmt = self.config.fmt
        if fmt in QUANTIZED:
            block = QUANTIZED[fmt].block
            return (None, 0) if any(size % block for size in sizes) else (fmt, block)
        asked = self.config.group_size
        groups = sorted(TILE_GROUPS, reverse=True) if asked is None else [asked]
        fit = [group for group in groups if all(size % group == 0 for size in sizes)]
        return (fmt, fit[0]) if fit else (None, 0)


def _names(found: Mapping[int, Entry]) -> tuple[str, ...]:
    return tuple(found[e].name for e in sorted(found))


def _parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    value = getattr(module, name, None)
    if not isinstance(value, torch.Tensor) or value.dim() != 3:
        raise CheckpointError(
            f"{type(module).__name__} of the model has no weight {name} of all experts, so they "
            "have no kernel here; load the model without blockscale"
        )
    return value


def _sizes(module: Any) -> tuple[int, int]:
    """Return H and I of a module of experts."""
    first, second = _parameter(module, "down_proj").shape[1:]
    return (second, first) if module.is_transposed else (first, second)


def _check_tied(model: Any, jobs: Iterable[Job]) -> None:
    tied = model.all_tied_weights_keys
    names = {*tied.keys(), *tied.values()}
    for job in jobs:
        if f"{job.module}.weight" in names:
            raise CheckpointError(
                f"{job.source} is quantised, but config.json says that {job.module} shares its "
                "weight with the embeddings, which are not; set tie_word_embeddings to false there"
            )
