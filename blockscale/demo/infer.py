"""The demo's second process: load the library, run the model, measure, print; never import tvm."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import click

from . import files, timing

# Largest error of a row against float64: float32 sums of up to 1536 terms; half an ulp of bfloat16.
KERNEL_BOUND = {"ours_f32": 1e-5, "ours_bf16": 4e-3}


def wrong_kernels(layers: list[dict[str, Any]]) -> list[str]:
    """Return one sentence for each layer whose kernel errs more than the rounding of its output."""
    return [
        f"layer {row['layer']}: {variant} differs from float64 by {worst:.1e}, allowed {bound:.0e}"
        for row in layers
        for variant, bound in KERNEL_BOUND.items()
        if not (worst := row[f"kernel_{variant}"]["max"]) <= bound  # NaN is wrong too
    ]


def run(library: Path, weights: Path, seconds: float, console: Any) -> dict[str, Any]:
    """Return all measurements of `library` on the model in `weights`; `console` shows the progress.

    Raises PrerequisiteError when a file, a package or a function of the library is missing.
    """
    files.need_modules("safetensors", "tokenizers", "torch", "tvm_ffi")
    remedy = "run `make demo`, which builds it"
    files.need_file(library, "the library", remedy)
    files.need_file(weights, "the quantised model", remedy)
    model_files = files.find_model()

    from safetensors.torch import load_file

    import blockscale as bs

    from .measure import Measurement
    from .model import BertConfig
    from .quantise import load_quantised
    from .variants import check_library

    try:
        loaded = bs.load(library)
    except (ValueError, OSError) as error:
        raise files.PrerequisiteError(f"demo: {library} does not load: {error}") from error
    config = BertConfig.read(model_files.config)
    check_library(config, loaded.functions, library)
    stored, quantised = load_quantised(config, weights)
    fp32 = load_file(model_files.weights)
    measurement = Measurement(config, fp32, stored, quantised, loaded.functions)
    measurement.read_sentences(model_files.tokenizer)
    result = measurement.all(seconds, console)
    result["kernels_wrong"] = wrong_kernels(result["layers"])
    result["tuned"] = {name: bool(f.tuned) for name, f in loaded.functions.items()}
    result["tvm_imported"] = "tvm" in sys.modules
    assert not result["tvm_imported"], "the inference process imported tvm"
    return result


@click.command()
@click.option(
    "--library", type=click.Path(path_type=Path), required=True, help="The built library (.so)."
)
@click.option(
    "--weights", type=click.Path(path_type=Path), required=True, help="The quantised model."
)
@click.option("--seconds", default=25.0, show_default=True, help="Time for the speed measurements.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures here as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, not as tables.")
def main(library: Path, weights: Path, seconds: float, out: Path | None, as_json: bool) -> None:
    """Run the quantised MiniLM with the kernels of a library and compare it with torch.

    Example: python -m blockscale.demo.infer --library dist/minilm-nvfp4-cpu.so
    --weights dist/minilm-nvfp4.safetensors
    """
    files.replace_what_cannot_be_printed()
    machine = timing.machine()  # with the load before this process adds to it
    try:
        files.need_modules("rich", "torch")
        import torch
        from rich.console import Console

        from . import tables

        console = Console(stderr=as_json)
        result = run(library, weights, seconds, console)
        packages = ("torch", "numpy", "apache-tvm-ffi", "apache-tvm")
        versions = timing.versions({name: name for name in packages})
        result = {
            "machine": {**machine, "torch_threads": torch.get_num_threads()},
            "versions": {"python": platform.python_version(), **versions},
            **result,
        }
        if out is not None:
            files.write_json(out, result)
    except files.FAILURES as error:
        raise click.ClickException(files.sentence(error)) from error
    if as_json:
        click.echo(json.dumps(files.plain(result)))
    else:
        tables.print_all(console, result)
    if result["kernels_wrong"]:
        raise click.ClickException("; ".join(result["kernels_wrong"]))


if __name__ == "__main__":
    main()
