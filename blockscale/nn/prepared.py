"""What the modules have in common: weights that are buffers, and how a checkpoint is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from operator import is_
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.checkpoint import open as open_checkpoint
from blockscale.ops.checks import dtype_name
from blockscale.ops.weights import PreparedWeights

Tensor = torch.Tensor
Device = str | torch.device | None
Kind = TypeVar("Kind", bound=PreparedWeights)

META = "meta"
"""Under which name a state has the description of its weights."""


TENSORS = "tensors"
"""Under which name a description has dtypes and shapes of the tensors that a state is to have."""

Like = tuple[torch.dtype, tuple[int, ...]]


class Prepared(torch.nn.Module):
    """A module whose weights are buffers that keep their dtypes, and a description of them.

    A state may come in parts, of which one has the description, in any order.
    """

    _names: tuple[str, ...] = ()
    _more: tuple[str, ...] = ()
    """Buffers beside the weights, which a module keeps when a state has none of them."""
    _kind: type[PreparedWeights] | None = None
    _meta: dict[str, Any]
    _known: tuple[list[Tensor | None], Any]
    """The buffers of the last call, and the weights that they are, which take 9 us to make."""
    _told: bool | None = None
    """Whether the description that was loaded lists tensors, as all do now; None: none was."""
    _early: Mapping[str, Tensor] = {}
    """Tensors that were loaded before any description and are not like the buffers that are here:
    they become buffers with the description that has them."""

    def _hold(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> None:
        self._meta, self._known = dict(meta), ([], None)
        for name in self._names:
            self.register_buffer(name, tensors.get(name))

    def _held(self, kind: type[Kind]) -> Kind:
        """Return the module's buffers as prepared weights."""
        buffers = self._buffers
        held = [buffers[name] for name in kind.names]
        if is_compiling():
            return kind.of(self._meta, dict(zip(kind.names, held, strict=True)))
        tensors, known = self._known
        if known is None or not all(map(is_, tensors, held)):
            known = kind.of(self._meta, dict(zip(kind.names, held, strict=True)))
            self._known = held, known
        found: Kind = known
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    @property
    def meta(self) -> Tensor:
        """The description of the weights, as a state has it: bytes of JSON."""
        here = {
            name: [dtype_name(value.dtype), [*value.shape]]
            for name in (*self._names, *self._more)
            if (value := self._buffers[name]) is not None
        }
        text = json.dumps({**self._meta, TENSORS: here}).encode()
        return torch.tensor([*text], dtype=torch.uint8, device="cpu")

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + META] = self.meta

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take the weights over from ``state_dict``, on the device of those that are here."""
        *_, missing, _, errors = arguments
        bytes_ = state_dict.pop(prefix + META, None)
        if bytes_ is None:
            missing.append(prefix + META)
            self._take_part(state_dict, prefix)
        else:
            try:
                self._take(_parsed(bytes_), state_dict, prefix)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                errors.append(f"{prefix or type(self).__name__}: {error}")
                return  # what is here stays whole
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _take(self, meta: dict[str, Any], state: Mapping[str, Any], prefix: str) -> None:
        """Make buffers like those that the state has, which are copied to them afterwards.

        Those that fit stay: captured CUDA graphs read them.  So do, or are made, those that another
        part of the state has; torch reports them as missing from this one.
        """
        listed = _listed(meta.pop(TENSORS, None))
        names = *self._names, *self._more
        given = {name: state[prefix + name] for name in names if prefix + name in state}
        self._check_kind(meta, {*given, *(listed or ())})
        self._check_meta(meta)
        devices = {value.device for value in self.buffers(recurse=False)}
        devices = devices or {value.device for value in given.values()}
        device = devices.pop() if devices else None
        made: dict[str, Tensor | None] = {}
        for name in names:
            old, new, early = self._buffers.get(name), given.get(name), self._early.get(name)
            if new is not None:
                like: Like | None = _like(new)
            elif listed is not None:
                like = listed.get(name)
            else:
                like = None if early is None else _like(early)
            if like is None:
                stays = self._may_have(meta, name) if listed is None else name in self._more
                made[name] = old if stays else None
            elif old is not None and _like(old) == like:
                made[name] = old
            elif new is not None:
                made[name] = torch.empty_like(new, device=device)
            elif early is not None and _like(early) == like:
                made[name] = early.to(device)
            else:
                made[name] = _unwritten(like, device)
        self._hold(meta, made)
        for name in self._more:
            self.register_buffer(name, made[name])
        self._told, self._early = listed is not None, {}

    def _take_part(self, state: dict[str, Any], prefix: str) -> None:
        """Make room for what a state without a description has, or keep it until one comes."""
        for name in (*self._names, *self._more):
            old, new = self._buffers.get(name), state.get(prefix + name)
            if new is None:
                continue
            if old is not None and old.shape == new.shape:
                if old.itemsize == new.itemsize == 1:
                    state[prefix + name] = new.view(old.dtype)  # bytes of any name, not numbers
                if old.is_floating_point() == new.is_floating_point():
                    continue
            if self._told is None:
                self._early = {**self._early, name: state.pop(prefix + name).detach().clone()}
            elif not self._told and old is None:  # no list said that there would be one
                here = next((b.device for b in self.buffers(recurse=False)), None)
                self.register_buffer(name, torch.empty_like(new, device=here))

    def _may_have(self, meta: Mapping[str, Any], name: str) -> bool:
        """Whether a state with this description, and without a list, may have such a tensor."""
        return True

    def _check_kind(self, meta: Mapping[str, Any], names: Collection[str]) -> None:
        """ValueError unless a module of this kind saved the description of these tensors."""
        lacking: tuple[str, ...] = ()
        wrong = self._kind is None and bool(meta)
        if self._kind is not None:
            known = (*self._kind.described_by, "dtype") if self._kind.names[0] in names else ()
            lacking = tuple(name for name in known if name not in meta)
            wrong = bool(lacking)
        if wrong:
            without = f" without {', '.join(lacking)}" if lacking else ""
            raise ValueError(
                f"the state describes {meta.get('fmt', 'other')} weights{without}, so it is not "
                f"that of a {type(self).__name__}; load it into a module of the kind that saved it"
            )

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        """ValueError unless the module can run on such weights."""


def _parsed(description: object) -> dict[str, Any]:
    """Return what `Prepared.meta` describes."""
    if not isinstance(description, Tensor) or description.is_meta:
        what = "on device meta" if isinstance(description, Tensor) else "no tensor"
        raise ValueError(
            f"the description of its weights, {META!r}, is {what}, but its bytes are needed; load "
            "a state that has data, as state_dict() returns it"
        )
    found = json.loads(bytes(description.tolist()))
    if not isinstance(found, dict):
        raise ValueError(f"{META!r} is not a description of weights; save the state again")
    return found


def _listed(tensors: Any) -> dict[str, Like] | None:
    """Return dtypes and shapes of the tensors of a state; None: it was saved without a list."""
    if tensors is None:
        return None
    try:
        found = {name: (getattr(torch, of), tuple(size)) for name, (of, size) in tensors.items()}
        for dtype, size in found.values():
            torch.empty(size, dtype=dtype, device="meta")
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"the list of tensors in {META!r} is damaged ({error}); save the state again"
        ) from None
    return found


def _like(value: Tensor) -> Like:
    return value.dtype, tuple(value.shape)


def _unwritten(like: Like, device: Device) -> Tensor:
    """Return a tensor that is to be loaded: NaN until then, but no index, which would be read."""
    dtype, shape = like
    made = torch.zeros(shape, dtype=dtype, device=device or "cpu")
    if dtype.is_floating_point or dtype.itemsize == 1:
        made.reshape(-1).view(torch.uint8).fill_(0xFF)
    return made


def opened(checkpoint: str | Path | Checkpoint) -> Checkpoint:
    """Return the checkpoint, opened if a folder is given."""
    if isinstance(checkpoint, (str, Path)):
        return open_checkpoint(checkpoint)
    return checkpoint


def checked_device(where: str, device: Device) -> Device:
    """Return ``device`` if there is one; ValueError before anything is read, if not."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{where}: device={device!r} names none ({reason}); pass 'cuda'") from None
    if found.type == "cuda":
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= number:
            raise ValueError(
                f"{where}: device={device!r}: torch {torch.__version__} finds {number} CUDA GPUs "
                "here; leave device out for the CPU, or use a machine and a build of torch with "
                "CUDA"
            )
    return found


def own(value: Tensor | None) -> Tensor | None:
    """Return the tensor in memory of its own, so that no file has to stay as it is."""
    return None if value is None else value.clone(memory_format=torch.contiguous_format)
