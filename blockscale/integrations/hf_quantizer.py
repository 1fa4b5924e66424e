"""The quantiser that `from_pretrained` calls: what happens before, after and with the weights.

Before transformers reads anything, the folder is opened by `blockscale.checkpoints`, which checks
all headers, and modules that get 4-bit weights are taken out of the model.  transformers loads what
is left; then the modules are built from the checkpoint, one at a time, and put in.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import torch

from blockscale.base.errors import CheckpointError
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.checkpoint import open as open_checkpoint
from blockscale.integrations.hf_build import put
from blockscale.integrations.hf_config import METHOD, BlockscaleConfig
from blockscale.integrations.hf_fused import chosen, fuse_norms
from blockscale.integrations.hf_interfaces import (
    HfQuantizer,
    register_quantizer,
    revert_weight_conversion,
)
from blockscale.integrations.hf_plan import DenseJob, Job, Pending, ignored, merged, plan
from blockscale.integrations.hf_save import quantization, tensors_of

Tensor = torch.Tensor

_WHERE = "from_pretrained"
_ANY_MAP = ("auto", "balanced", "balanced_low_0", "sequential")


class BlockscaleQuantizer(HfQuantizer):
    """Puts `blockscale.nn` modules into a model that transformers loads.

    Attributes:
        quantization_config: `BlockscaleConfig`.
        notes: what was found in the checkpoint, see `blockscale.checkpoints.checkpoint.Checkpoint`.
    """

    requires_calibration = False
    quantization_config: BlockscaleConfig
    pre_quantized: bool

    def __init__(self, quantization_config: BlockscaleConfig, **options: Any) -> None:
        """Take the configuration of the checkpoint, or what it is to become."""
        # a copy, since what is saved goes into it, and callers may pass theirs once more
        super().__init__(copy(quantization_config), **options)
        self.notes: list[str] = []
        self._ckpt: Checkpoint | None = None
        self._jobs: list[Job] = []
        self._dtype, self._device = torch.bfloat16, torch.device("cpu")
        self._conversions: Any = None
        self._fused = chosen()
        self._was_quantised = self.pre_quantized

    # ---- What transformers asks -----------------------------------------------------------------

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the model, which is that of activations."""
        self._dtype = dtype
        return dtype

    def update_device_map(self, device_map: Any) -> Any:
        """Return where the model goes: "auto" and the like mean the one device that there is."""
        if not isinstance(device_map, str) or device_map not in _ANY_MAP:
            return device_map
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count > 1:
            raise ValueError(
                f"{_WHERE}: device_map={device_map!r} with {count} GPUs, but blockscale loads a "
                "model onto one; pass device_map='cuda:0'"
            )
        return {"": torch.device("cuda:0" if count else "cpu")}

    def is_serializable(self) -> bool:
        """Return that `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return that there is no backward."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Return that `torch.compile` takes the modules."""
        return True

    # ---- Loading --------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self,
        model: Any,
        device_map: Any = None,
        checkpoint_files: list[str] | None = None,
        use_kernels: bool = False,
        **others: Any,
    ) -> Any:
        """Take the modules out that get weights from us.

        Raises:
            CheckpointError: the folder is damaged, or a weight does not fit the model.
            ValueError: an argument of from_pretrained that has no meaning here.
        """
        self._check_arguments(model, use_kernels)
        self._device = _one_device(device_map)
        if self._device.type == "cuda" and self._dtype == torch.float32:
            raise ValueError(
                f"{_WHERE}: dtype=torch.float32, but kernels on CUDA take 16-bit activations; pass "
                "dtype=torch.bfloat16"
            )
        with torch.device("cpu"):  # this runs under torch.device("meta")
            self._ckpt = _opened(checkpoint_files)
            self.notes = [*self._ckpt.notes]
            jobs = plan(model, self._ckpt, self.quantization_config)
            self._jobs = merged(model, self._ckpt, jobs, self._fused)
        for job in jobs:
            model.set_submodule(job.module, Pending())
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*known, *ignored(model, jobs)}
        # What is left is plain, and wants the model's dtype: of a checkpoint that is quantised,
        # transformers 5.17 leaves the dtype of weights whose names change.
        self._was_quantised, self.pre_quantized = self.pre_quantized, False
        return model

    def _check_arguments(self, model: Any, use_kernels: bool) -> None:
        if use_kernels:
            raise ValueError(
                f"{_WHERE}: use_kernels=True would replace layers that blockscale has replaced; "
                "leave it out"
            )
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                f"{_WHERE}: a model on several devices (tp_plan, distributed_config) is not known "
                "to blockscale; leave it out, for one device"
            )

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> Any:
        """Put the modules in, with their weights."""
        self.pre_quantized = self._was_quantised
        ckpt, self._ckpt = self._ckpt, None
        assert ckpt is not None
        done: list[Job] = []
        for job in self._jobs:
            with torch.device("cpu"):  # whatever the caller's default is
                done += put(model, ckpt, job, self._device, self._dtype)
        self._jobs = [job for job in done if not isinstance(job, DenseJob)]
        if not self._jobs:
            self.remove_quantization_config(model)
            return model
        if self._fused.norms:
            fuse_norms(model, self._dtype)
        model.requires_grad_(False)  # or a call outside of torch.no_grad() would be refused
        self._conversions = model._weight_conversions
        self.quantization_config.stored = quantization(model, self._jobs, ())
        return model

    # ---- Saving ---------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors that are saved: 4-bit weights as `blockscale convert` writes them."""
        ours = tuple(f"{job.module}." for job in self._jobs)
        tied = model.all_tied_weights_keys
        state = {
            name: value
            for name, value in model.state_dict().items()
            if not name.startswith(ours) and name not in tied
        }
        model._weight_conversions = self._conversions
        try:
            state = revert_weight_conversion(model, state)
        finally:
            model._weight_conversions = []  # transformers does not rename these once more
        plain = [
            name.removesuffix(".weight")
            for name, value in state.items()
            if name.endswith(".weight") and value.dim() == 2
        ]
        self.quantization_config.stored = quantization(model, self._jobs, plain)
        return state | tensors_of(model, self._jobs), {}


def _opened(files: list[str] | None) -> Checkpoint:
    """Return the checkpoint whose files transformers has found."""
    folders = {Path(file).parent for file in files or ()}
    if len(folders) != 1:
        raise CheckpointError(
            f"{_WHERE}: weights come from {len(folders)} folders, but must be the files of one "
            "checkpoint; save them into one folder, and leave state_dict= out"
        )
    assert files is not None
    # transformers takes model.safetensors even if there is an index, e.g. of what was saved before
    return open_checkpoint(folders.pop() if len(files) > 1 else files[0])


def _one_device(device_map: Any) -> torch.device:
    """Return the device that a map gives to all modules; None: the CPU."""
    if device_map is None:
        return torch.device("cpu")
    places = {*device_map.values()} if isinstance(device_map, dict) else {device_map}
    if len(places) > 1 or "disk" in places:
        shown = ", ".join(sorted(map(str, places)))
        raise ValueError(
            f"{_WHERE}: device_map has {shown}, but blockscale loads a model onto one device, and "
            "not to the disk; pass device_map='cuda:0', or leave it out for the CPU"
        )
    place = places.pop()
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def register() -> None:
    """Let transformers find the quantiser by the configuration's ``quant_method``."""
    register_quantizer(METHOD)(BlockscaleQuantizer)
