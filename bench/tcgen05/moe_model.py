"""What the model of a B200 says of MoE layers whose GEMMs multiply codes by codes.

``python -m bench.tcgen05.moe_model`` prints the table and fills docs/moe_codes.md: of each GEMM the
best point of its space, as the tuner would rank it; of both in one launch the best pair that goes
together, less a launch; of the three kernels around them their bytes at HBM's speed, or a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import click

from bench.report import ROOT, fill_page, markdown_table, show, us_text
from blockscale.base.formats import GEMM
from blockscale.schedules.gemm import tcgen05_tiles as tiles
from blockscale.specs import FusedMoe
from blockscale.specs.plans.b200 import B200, Modelled, time_us
from blockscale.specs.plans.gemm import GemmPlan

TOKENS = (1, 16, 128, 1024, 4096)


@dataclass(frozen=True)
class Layer:
    """A layer, and times that others have published for one B200.

    Attributes:
        published: us by tokens and formats, from the source.
    """

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    fmt: str
    act_fmt: str
    tokens: tuple[int, ...] = TOKENS
    published: tuple[tuple[int, float], ...] = ()

    @property
    def spec(self) -> FusedMoe:
        """The layer's kernels."""
        sizes = self.experts, self.hidden, self.intermediate, self.top_k
        return FusedMoe(*sizes, self.fmt, act_fmt=self.act_fmt, layout="128x4")


_FW_SMALL = (32, 4, 4096, 1536)
_FW_LARGE = (256, 8, 7168, 2560)
LAYERS = (
    Layer("Qwen3-30B-A3B", 128, 8, 2048, 768, "nvfp4", "nvfp4"),
    Layer("gpt-oss-120b", 128, 4, 2880, 2880, "mxfp4", "mxfp8"),
    Layer("32 experts, 4096 x 1536", *_FW_SMALL, "nvfp4", "nvfp4", (1024,), ((1024, 122.4),)),
    Layer("32 experts, 4096 x 1536", *_FW_SMALL, "mxfp4", "mxfp4", (1024,), ((1024, 117.2),)),
    Layer("32 experts, 4096 x 1536", *_FW_SMALL, "mxfp4", "mxfp8", (1024,), ((1024, 124.6),)),
    Layer("256 experts, 7168 x 2560", *_FW_LARGE, "nvfp4", "nvfp4", (1024,), ((1024, 1322.7),)),
    Layer("256 experts, 7168 x 2560", *_FW_LARGE, "mxfp4", "mxfp8", (1024,), ((1024, 1347.7),)),
)
"""Published: github.com/fw-ai/DeepGEMM, one B200, its mega kernel."""


def plans(spec: FusedMoe, part: int, slots: int) -> Iterator[GemmPlan]:
    """Yield the points of a GEMM's space for so many slots."""
    if part == 1:
        block, sizes = GEMM[spec.product].block, (spec.padded_rows, spec.padded_hidden)
        shapes = tiles.gated_tiles(spec.product, block, *sizes, spec.experts, slots)
    else:
        sizes = spec.hidden, spec.padded_intermediate
        shapes = tiles.legal_tiles(spec.product, spec.dtype, *sizes, spec.experts, slots)
    for shape in shapes:
        candidates = tiles.options(shape, slots).candidates
        for values in product(*candidates.values()):
            plan = tiles.decided(shape, dict(zip(candidates, values, strict=True)))
            if plan.illegal() is None:
                yield plan


Timed = list[tuple[GemmPlan, Modelled]]


def timed(spec: FusedMoe, part: int, slots: int) -> Timed:
    """Return the points of a GEMM's space with their modelled times, the least first."""
    found = ((plan, time_us(plan, slots)) for plan in plans(spec, part, slots))
    return sorted(found, key=lambda pair: pair[1].us)


def in_one_launch(first: Timed, second: Timed) -> float:
    """Return the least modelled time of both GEMMs in one launch, us.

    What the second gains by beginning while the first ends is not modelled.
    """

    def least(timed: Timed, group: int) -> float:
        fit = (m.us for p, m in timed if p.split_k == 1 and p.cta_group == group)
        return next(fit, float("inf"))

    return min(least(first, g) + least(second, g) for g in (1, 2)) - B200.launch_us


def around(spec: FusedMoe, tokens: int) -> float:
    """Return the time of sort, gather and combine, us: bytes at HBM's speed, or a launch each."""
    slots, hidden = tokens * spec.top_k, spec.hidden
    codes = slots * hidden // GEMM[spec.product].a.per_byte
    moved = (8 * slots, 2 * tokens * hidden + codes, 2 * (slots + tokens) * hidden)
    return sum(max(B200.launch_us, size / B200.hbm_tbps / 1e6) for size in moved)


HEADINGS = (
    *("layer", "weights x rows", "limits"),
    *("T", "GEMM 1", "GEMM 2", "in one launch", "others", "sum", "published"),
)


def rows() -> Iterator[list[str]]:
    """Yield a row for each layer and number of tokens."""
    for layer in LAYERS:
        spec, published = layer.spec, dict(layer.published)
        for tokens in layer.tokens:
            slots = tokens * layer.top_k
            found = [timed(spec, part, slots) for part in (1, 2)]
            (_, first), (_, second) = (own[0] for own in found)
            rest, joined = around(spec, tokens), in_one_launch(*found)
            yield [
                layer.name,
                f"{layer.fmt} x {layer.act_fmt}",
                f"{first.limit}, {second.limit}",
                f"{tokens:,}",
                *(us_text(time) for time in (first.us, second.us, joined, rest)),
                us_text(min(first.us + second.us, joined) + rest),
                us_text(published.get(tokens)),
            ]


@click.command()
@click.option(
    "--docs",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    default=ROOT / "docs" / "moe_codes.md",
    help="The page to fill.",
)
def main(docs: Path) -> None:
    """Print the modelled times of MoE layers.

    Example: python -m bench.tcgen05.moe_model
    """
    text = markdown_table(HEADINGS, list(rows()), left=3)
    show(text)
    fill_page(docs, {"codes": text})


if __name__ == "__main__":
    main()
