"""What the modules have in common: weights that are buffers, and how a checkpoint is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import is_
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling

from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.checkpoint import open as open_checkpoint
from blockscale.ops.weights import PreparedWeights

Tensor = torch.Tensor
Device = str | torch.device | None
Kind = TypeVar("Kind", bound=PreparedWeights)

META = "meta"
"""Under which name a state has the description of its weights."""


class Prepared(torch.nn.Module):
    """A module whose weights are buffers that keep their dtypes, and a description of them."""

    _names: tuple[str, ...] = ()
    _meta: dict[str, Any]
    _known: tuple[list[Tensor | None], Any]
    """The buffers of the last call, and the weights that they are, which take 9 us to make."""

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

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        text = json.dumps(self._meta).encode()
        destination[prefix + META] = torch.tensor([*text], dtype=torch.uint8)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take the weights over from ``state_dict``, on the device of those that are here."""
        *_, missing, _, errors = arguments
        bytes_ = state_dict.pop(prefix + META, None)
        if bytes_ is None:
            missing.append(prefix + META)
        else:
            try:
                self._take(json.loads(bytes(bytes_.tolist())), state_dict, prefix)
            except (KeyError, TypeError, ValueError) as error:
                errors.append(f"{prefix or type(self).__name__}: {error}")
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _take(self, meta: dict[str, Any], state: Mapping[str, Any], prefix: str) -> None:
        """Make buffers as large as those of the state, which are copied to them afterwards.

        Those that fit stay: captured CUDA graphs read them.
        """
        self._check_meta(meta)
        devices = {value.device for value in self.buffers(recurse=False)}
        device = devices.pop() if devices else None
        made: dict[str, Tensor | None] = {}
        for name in self._names:
            old, new = self._buffers.get(name), state.get(prefix + name)
            if old is not None and new is not None and _alike(old, new):
                made[name] = old
            else:
                made[name] = None if new is None else torch.empty_like(new, device=device)
        self._hold(meta, made)

    def _check_meta(self, meta: Mapping[str, Any]) -> None:
        """ValueError unless the module can run on such weights."""


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


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
