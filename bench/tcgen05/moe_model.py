"""What the model of a B200 says of MoE layers whose GEMMs multiply codes by codes.

``python -m bench.tcgen05.moe_model`` prints two tables and fills docs/mega_moe.md: of each GEMM the
best point of its space; of both in one launch the best pair that goes together, less a launch; of
both as they are tuned, each alone; of the three kernels around them their bytes at HBM's speed, or
a launch.  The second table has layers whose times others have published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path

import click

from bench.report import ROOT, fill_page, markdown_table, show, us_text
from blockscale.base.formats import GEMM
from blockscale.base.sizes import round_up
from blockscale.schedules.gemm import tcgen05_tiles as tiles
from blockscale.specs import FusedMoe
from blockscale.specs.plans.b200 import B200, Modelled, time_us
from blockscale.specs.plans.gemm import SMEM_BYTES, GemmPlan

TOKENS = (1, 16, 128, 1024, 4096)


@dataclass(frozen=True)
class Layer:
    """A layer on one GPU; ``sizes``: experts, top k, hidden, intermediate."""

    name: str
    sizes: tuple[int, int, int, int]
    fmt: str
    act_fmt: str

    def spec(self, experts: int | None = None) -> FusedMoe:
        """The layer's kernels, with other experts than its own."""
        own, top_k, hidden, intermediate = self.sizes
        sizes = experts or own, hidden, intermediate, top_k
        return FusedMoe(*sizes, self.fmt, act_fmt=self.act_fmt, layout="128x4")

    @property
    def formats(self) -> str:
        """Of weights and rows."""
        return f"{self.fmt} x {self.act_fmt}"


LAYERS = (
    Layer("Qwen3-30B-A3B", (128, 8, 2048, 768), "nvfp4", "nvfp4"),
    Layer("DeepSeek-V3, 32 experts", (32, 8, 7168, 2048), "nvfp4", "nvfp4"),
    Layer("gpt-oss-120b", (128, 4, 2880, 2880), "mxfp4", "mxfp8"),
)


@dataclass(frozen=True)
class Published:
    """Times that others have published of a layer of which each GPU has some experts.

    Attributes:
        layer: the experts of one GPU.
        whose: key of `SOURCES`.
        ranks: GPUs, each with all of T tokens; 0: one stands for several, and has T tokens of all.
        experts: of all GPUs.
        times: us by T.
    """

    layer: Layer
    whose: str
    ranks: int
    experts: int
    times: tuple[tuple[int, float], ...]

    def work(self, tokens: int) -> tuple[int, int]:
        """Return slots that come to one GPU, and experts that are likely to have some.

        Routing is uniform: what comes to a GPU is its share.
        """
        local, top_k = self.layer.sizes[:2]
        everything = tokens * max(1, self.ranks)
        busy = local * (1 - (1 - top_k / self.experts) ** everything)
        return max(1, round(everything * top_k * local / self.experts)), max(1, round(busy))


SOURCES = {
    "a": "DeepGEMM, mega kernel on 8 B200, exchange included (deepseek-ai/DeepGEMM pull 316)",
    "b": "the same kernel on one B200 (mlc-ai/tirx-kernels, baseline.md)",
    "c": "NVFP4 mega kernel on 4 GB200, exchange included (FlashInfer, TUNING of cutedsl_megamoe)",
    "d": "DeepGEMM's on the same 4 GB200 (the same page)",
    "e": "mega kernels of fw-ai/DeepGEMM on one B200",
    "f": "TensorRT-LLM's NVFP4 kernels, one B200 with the experts of one of 8 ranks, routing "
    "included (flashinfer-ai/flashinfer pull 5301)",
}

_W4A8, _W4A4 = ("mxfp4", "mxfp8"), ("nvfp4", "nvfp4")
_FLASH, _PRO, _DEEPSEEK = (32, 6, 4096, 2048), (48, 6, 7168, 3072), (64, 8, 7168, 2048)
_SMALL, _LARGE = (32, 4, 4096, 1536), (256, 8, 7168, 2560)
PUBLISHED = (
    Published(
        Layer("DeepSeek-V4-Flash", _FLASH, *_W4A8), "a", 8, 256,
        ((1, 56.5), (512, 146.5), (8192, 1283.1), (32768, 4855.5)),
    ),
    Published(
        Layer("DeepSeek-V4-Pro", _PRO, *_W4A8), "a", 8, 384,
        ((1, 108.1), (512, 369.6), (8192, 2818.5), (32768, 10655.2)),
    ),
    Published(
        Layer("DeepSeek-V4-Pro", (384, *_PRO[1:]), *_W4A8), "b", 1, 384,
        ((64, 1290.2), (8192, 3418.0)),
    ),
    Published(
        Layer("DeepSeek-V3", _DEEPSEEK, *_W4A4), "c", 4, 256,
        ((8, 222.2), (64, 287.7), (512, 359.3), (1024, 428.6), (2048, 621.5), (4096, 1001.5),
         (8192, 1896.4)),
    ),
    Published(
        Layer("DeepSeek-V3", _DEEPSEEK, *_W4A8), "d", 4, 256,
        ((8, 215.0), (64, 288.8), (512, 346.1), (1024, 474.1), (2048, 822.3), (4096, 1501.7),
         (8192, 3072.9)),
    ),
    Published(
        Layer("DeepSeek-V3", (32, *_DEEPSEEK[1:]), *_W4A4), "f", 0, 256,
        ((1, 25.7), (16, 77.4), (128, 143.6), (1024, 293.8), (4096, 312.0), (16384, 622.6)),
    ),
    Published(Layer("4096 x 1536", _SMALL, *_W4A4), "e", 1, 32, ((1024, 122.4),)),
    Published(Layer("4096 x 1536", _SMALL, "mxfp4", "mxfp4"), "e", 1, 32, ((1024, 117.2),)),
    Published(Layer("4096 x 1536", _SMALL, *_W4A8), "e", 1, 32, ((1024, 124.6),)),
    Published(Layer("7168 x 2560", _LARGE, *_W4A4), "e", 1, 256, ((1024, 1322.7),)),
    Published(Layer("7168 x 2560", _LARGE, *_W4A8), "e", 1, 256, ((1024, 1347.7),)),
)  # fmt: skip


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


def together(first: GemmPlan, second: GemmPlan) -> bool:
    """Whether both go into one launch: as `lower.pipe.phases.apart` says of their kernels.

    Rings lie on each other; tables of experts and barriers do not.
    """
    alike = first.cta_group == second.cta_group and first.split_k == second.split_k == 1
    rings = (plan.stages * plan.stage_bytes + plan.store_bytes for plan in (first, second))
    tables = [16 * (plan.experts + 1) + 24 * plan.stages + 160 for plan in (first, second)]
    return alike and max(rings) + round_up(tables[0], 16) + tables[1] <= SMEM_BYTES


def in_one_launch(first: Timed, second: Timed) -> float:
    """Return the least modelled time of both GEMMs in one launch, us.

    What the second gains by beginning while the first ends is not modelled.
    """
    least = float("inf")
    for plan, one in first:
        if one.us + second[0][1].us >= least:
            break
        others = (m.us for own, m in second if together(plan, own))
        least = min(least, one.us + next(others, least))
    return least - B200.launch_us


def around(spec: FusedMoe, tokens: int, slots: int) -> float:
    """Return the time of sort, gather and combine, us: bytes at HBM's speed, or a launch each."""
    hidden = spec.hidden
    codes = slots * hidden // GEMM[spec.product].a.per_byte
    moved = (8 * slots, 2 * tokens * hidden + codes, 2 * (slots + tokens) * hidden)
    return sum(max(B200.launch_us, size / B200.hbm_tbps / 1e6) for size in moved)


def tuned(first: Timed, second: Timed) -> tuple[float, tuple[Modelled, Modelled]]:
    """Return the time of the points that the tuner chooses, each GEMM's alone, and each GEMM's.

    GEMM 2 in the other's launch has none of its own; if both do not go together, it has.
    """

    def alone(timed: tuple[GemmPlan, Modelled]) -> float:
        return timed[1].us - (B200.launch_us if timed[0].split_k == 1 else 0)

    (one, of_one), (other, of_other) = first[0], min(second, key=alone)
    saved = B200.launch_us if together(one, other) else 0
    return of_one.us + of_other.us - saved, (of_one, of_other)


@dataclass(frozen=True)
class Row:
    """Modelled times of a layer, us: of each GEMM alone, of both, of the other kernels."""

    first: Modelled
    second: Modelled
    joined: float
    tuned: float
    others: float
    limits: str

    @property
    def us(self) -> float:
        """All of the layer, as it is tuned."""
        return self.tuned + self.others


def modelled(spec: FusedMoe, tokens: int, slots: int) -> Row:
    """Return what the model says; ``limits``: what bounds both GEMMs as they are tuned."""
    found = [timed(spec, part, slots) for part in (1, 2)]
    (_, first), (_, second) = (own[0] for own in found)
    us, both = tuned(*found)
    limits = ", ".join(own.limit for own in both)
    return Row(first, second, in_one_launch(*found), us, around(spec, tokens, slots), limits)


HEADINGS = (
    *("layer", "weights x rows", "limits"),
    *("T", "GEMM 1", "GEMM 2", "two launches", "one launch", "tuned", "others", "sum"),
)


def rows() -> Iterator[list[str]]:
    """Yield a row for each layer and number of tokens."""
    for layer, tokens in product(LAYERS, TOKENS):
        spec = layer.spec()
        row = modelled(spec, tokens, tokens * spec.top_k)
        apart = row.first.us + row.second.us
        yield [
            *(layer.name, layer.formats, row.limits, f"{tokens:,}"),
            *(us_text(time) for time in (row.first.us, row.second.us, apart, row.joined)),
            *(us_text(time) for time in (row.tuned, row.others, row.us)),
        ]


PUBLISHED_HEADINGS = (
    *("layer", "weights x rows", "whose", "limits"),
    *("T", "experts with rows", "rows of each", "modelled", "published", "modelled / published"),
)


def published_rows() -> Iterator[tuple[list[str], float]]:
    """Yield a row for each published time, and the ratio."""
    for each in PUBLISHED:
        for tokens, us in each.times:
            slots, busy = each.work(tokens)
            row = modelled(each.layer.spec(busy), tokens, slots)
            yield (
                [
                    *(each.layer.name, each.layer.formats, each.whose, row.limits),
                    *(f"{tokens:,}", str(busy), f"{slots / busy:,.0f}"),
                    *(us_text(row.us), us_text(us), f"{row.us / us:.2f}"),
                ],
                row.us / us,
            )


def said(ratios: dict[str, list[float]]) -> str:
    """Return in a sentence what the ratios are, and the sources."""
    each = [ratio for own in ratios.values() for ratio in own]
    mean = exp(sum(map(log, each)) / len(each))
    late = sum(ratio > 1.1 for ratio in each)
    first = (
        f"{len(each)} published times: modelled / published is {min(each):.2f} to {max(each):.2f}, "
        f"{mean:.2f} in the geometric mean; {late or 'none'} of them above 1.10."
    )
    return "\n".join([first, "", *(f"* {key}: {text}" for key, text in SOURCES.items())])


@click.command()
@click.option(
    "--docs",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    default=ROOT / "docs" / "mega_moe.md",
    help="The page to fill.",
)
def main(docs: Path) -> None:
    """Print the modelled times of MoE layers.

    Example: python -m bench.tcgen05.moe_model
    """
    text = markdown_table(HEADINGS, list(rows()), left=3)
    found = list(published_rows())
    beside = markdown_table(PUBLISHED_HEADINGS, [row for row, _ in found], left=4)
    ratios: dict[str, list[float]] = {}
    for row, ratio in found:
        ratios.setdefault(row[2], []).append(ratio)
    summary = said(ratios)
    for part in (text, beside, summary):
        show(part)
    fill_page(docs, {"codes": text, "published": beside, "published_said": summary})


if __name__ == "__main__":
    main()
