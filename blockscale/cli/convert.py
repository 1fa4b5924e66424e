"""`blockscale convert`: a checkpoint in this package's layout, resumable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from blockscale.cli.common import JSON, counted, echo, escaped, print_json

if TYPE_CHECKING:
    from blockscale.checkpoints.convert.plan import Step

_MIB = 1 << 20
_ROUNDED = "_interleaved"
"""End of the name of scales that are bfloat16 whatever they were."""


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CHECKPOINT")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder to write: new, empty, or of the same conversion, which is then finished.",
)
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["nvfp4", "mxfp4"]),
    default="nvfp4",
    show_default=True,
    help="What the weights of a plain checkpoint become; 4-bit weights keep their format.",
)
@click.option(
    "--layout",
    type=click.Choice(["linear", "128x4", "deepgemm", "marlin", "tiles64", "trtllm"]),
    help="How codes and scales lie in the files; by default, as the target's kernels read them.",
)
@click.option(
    "--target",
    metavar="NAME",
    help="What the weights are for: cpu (linear), sm_90a (experts in tiles64), sm_100a (128x4), …; "
    "by default any.",
)
@click.option(
    "--activation",
    type=click.Choice(["a16", "a8"]),
    default="a16",
    show_default=True,
    help="Layout trtllm: for kernels with 16-bit or with FP8 activations.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Leave weights as they are whose names match, for example '*.layers.0.*'; embeddings, "
    "lm_head, norms and routers always are. 4-bit weights that match stay linear.",
)
@click.option(
    "--shard-mib",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Size of the files.",
)
@JSON
def convert(
    checkpoint: Path,
    output: Path,
    fmt: str,
    layout: str | None,
    target: str | None,
    activation: str,
    keep: tuple[str, ...],
    shard_mib: int,
    as_json: bool,
) -> None:
    """Quantise a plain checkpoint, or re-pack the 4-bit weights of any other.

    Weights go through memory one at a time. Run the command again when it was interrupted: it goes
    on, and the bytes are the same. Nothing is rounded that is 4 bits already; what a kernel needs
    rounded is written beside it, and said.

    Example: blockscale convert my-model -o my-model-nvfp4 --format nvfp4
    """
    from blockscale import checkpoints
    from blockscale.checkpoints.convert.convert import run
    from blockscale.checkpoints.convert.plan import Options, make_plan

    options = Options(fmt, keep, shard_mib * _MIB, layout, target, activation)

    found = checkpoints.open(checkpoint)
    planned = make_plan(found, options)
    steps = planned.steps
    screen = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as progress:
        task = progress.add_task("converting", total=sum(step.nbytes for step in steps))
        run(found, output, planned, lambda nbytes: progress.advance(task, nbytes))
    count = Counter(step.action for step in steps for _ in step.entries)
    size = sum(step.nbytes for step in steps)
    rounded = sum(_rounded(step, role) for step in steps for role in step.outputs)
    if as_json:
        facts = {"source": str(checkpoint), "kind": found.kind, "output": str(output)}
        print_json(
            {
                **facts,
                "files": planned.names,
                "bytes": size,
                "weights": dict(count),
                "layout": options.chosen,
                "rounded": rounded,
                "notes": found.notes,
            }
        )
        return
    echo(
        f"{output}: {counted(len(planned.names), 'file')}, {size / _MIB:.1f} MiB, from "
        f"{checkpoint} ({found.kind})"
    )
    for note in found.notes:
        echo(f"note: {escaped(note)}")
    echo(
        f"{count['quantize']} weights quantised to {fmt}, {count['repack']} re-packed, "
        f"{count['copy']} copied"
    )
    laid = sum(len(step.entries) for step in steps if step.layout != "linear")
    if laid:
        echo(f"{counted(laid, 'weight')} in layout {options.chosen}")
    if rounded:
        echo(
            f"{counted(rounded, 'tensor')} of scales also rounded to bfloat16 (…{_ROUNDED}), as "
            "the W4A8 kernel of sm_90 reads them; the exact ones are beside them"
        )


def _rounded(step: Step, role: str) -> bool:
    """Return whether a tensor has scales in fewer bits than those beside it."""
    exact = step.outputs.get(role.removesuffix(_ROUNDED))
    return role.endswith(_ROUNDED) and exact is not None and exact.dtype != "BF16"
