"""From a float32 checkpoint to NVFP4: every encoder Linear, block scales chosen by the sweep.

The file written is one safetensors file: for each Linear `<prefix>.packed` (uint8 [N, K/2]),
`<prefix>.block_scale` (float8_e4m3fn [N, K/16]), `<prefix>.global_scale` (float32 [1]) and
`<prefix>.bias`; all other tensors that the encoder needs as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import files, metrics
from .model import BertConfig, checkpoint_name

FORMAT = "blockscale-demo-nvfp4-1"  # in the file's metadata; changes when the names above change
LARGEST = 448 * 6  # E4M3's and E2M1's largest values: global_scale = amax / (448 * 6)


@dataclass(frozen=True)
class Quantised:
    """One Linear in NVFP4: packed uint8, block_scale float8_e4m3fn, global_scale float32 [1]."""

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor

    def decoded(self) -> Tensor:
        """Return the weights [N, K] float64 that the bytes stand for."""
        return metrics.decode_nvfp4(self.packed, self.block_scale, self.global_scale)


def _quantise(weight: Tensor, global_scale: Tensor, block_amax: Tensor | None) -> Quantised:
    import blockscale as bs

    packed, scale = bs.quantize(
        weight, fmt="nvfp4", global_scale=global_scale, block_amax=block_amax
    )
    return Quantised(packed.view(torch.uint8), scale.view(torch.float8_e4m3fn), global_scale)


def quantise_linear(weight: Tensor) -> tuple[Quantised, dict[str, float]]:
    """Return `weight` [N, K] float32 in NVFP4, and what the sweep gained over plain maxima.

    The figures: "weight_error" and "weight_error_max" are ||w' - w|| / ||w|| with swept scales and
    with every block's own maximum; "sweep_gain" is 1 - MSE(swept) / MSE(maximum).
    """
    import blockscale as bs

    amax = weight.abs().max()
    global_scale = (amax / LARGEST).reshape(1)
    swept = _quantise(weight, global_scale, bs.nvfp4_fp8_scale_sweep(weight, amax))
    plain = _quantise(weight, global_scale, None)
    size = weight.double().norm()
    error, error_max = (
        ((q.decoded() - weight.double()).norm() / size).item() for q in (swept, plain)
    )
    return swept, {
        "weight_error": error,
        "weight_error_max": error_max,
        "sweep_gain": 1 - (error / error_max) ** 2,
    }


def check_decoder(quantised: Quantised) -> None:
    """Raise AssertionError unless `bs.dequantize` and this demo's own exact decoder agree."""
    import blockscale as bs

    ours = bs.dequantize(
        quantised.packed,
        quantised.block_scale,
        fmt="nvfp4",
        global_scale=quantised.global_scale,
        dtype=torch.float32,
    )
    exact = quantised.decoded()
    # Two roundings to float32, of scale * global scale and of that times the code: 2 * 2^-24.
    off = (ours.double() - exact).abs() > exact.abs() * 2.0**-23
    assert not off.any(), f"dequantize and decode_nvfp4 disagree in {int(off.sum())} weights"


def quantise_model(
    config: BertConfig,
    tensors: Mapping[str, Tensor],
    out: Path,
    done: Callable[[str], object] = lambda name: None,
) -> list[dict[str, Any]]:
    """Write the quantised model to `out` and return one row of figures for each Linear.

    `done` is called with the short name of every finished Linear.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    saved = {
        name: tensor.contiguous()
        for name, tensor in tensors.items()
        if name.startswith("embeddings.") and not name.endswith("position_ids")
    }
    saved |= {name: t.contiguous() for name, t in tensors.items() if ".LayerNorm." in name}
    rows: list[dict[str, Any]] = []
    for name, (n, k) in config.linears().items():
        prefix = checkpoint_name(name)
        quantised, figures = quantise_linear(tensors[f"{prefix}.weight"].contiguous())
        if not rows:
            check_decoder(quantised)
        saved[f"{prefix}.packed"] = quantised.packed
        saved[f"{prefix}.block_scale"] = quantised.block_scale
        saved[f"{prefix}.global_scale"] = quantised.global_scale
        saved[f"{prefix}.bias"] = tensors[f"{prefix}.bias"].contiguous()
        rows.append({"layer": name, "n": n, "k": k, **figures})
        done(name)
    try:
        files.write_atomically(out, lambda new: save_file(saved, new, metadata={"format": FORMAT}))
    except SafetensorError as error:  # a full disk, too
        raise files.PrerequisiteError(
            f"demo: {out} cannot be written ({error}); make room there, or name another folder"
        ) from error
    return rows


def load_quantised(
    config: BertConfig, path: Path
) -> tuple[dict[str, Tensor], dict[str, Quantised]]:
    """Return all tensors of `path` by checkpoint name, and the encoder Linears by short name.

    Raises PrerequisiteError when the file is damaged or was written in another form.
    """
    from safetensors import SafetensorError, safe_open

    remedy = "run `make demo` to write it again"
    try:
        with safe_open(path, "pt") as opened:
            form = (opened.metadata() or {}).get("format")
            # copies: torch aligns its own memory to 64 bytes, a mapped file does not
            names = opened.keys()
            tensors = {name: opened.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError) as error:
        raise files.PrerequisiteError(
            f"demo: {path} is not a readable safetensors file ({error}); {remedy}"
        ) from error
    if form != FORMAT:
        raise files.PrerequisiteError(
            f"demo: {path} has the format {form!r}, this program reads {FORMAT!r}; {remedy}"
        )
    linears = {}
    for name in config.linears():
        prefix = checkpoint_name(name)
        missing = [
            f
            for f in ("packed", "block_scale", "global_scale", "bias")
            if f"{prefix}.{f}" not in tensors
        ]
        if missing:
            raise files.PrerequisiteError(
                f"demo: {path} has no {prefix}.{missing[0]}, which every encoder Linear needs; "
                f"{remedy}"
            )
        linears[name] = Quantised(
            tensors[f"{prefix}.packed"],
            tensors[f"{prefix}.block_scale"],
            tensors[f"{prefix}.global_scale"],
        )
    return tensors, linears
