"""Linear layers, and GEMMs of two quantised operands, grouped or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm.s_tir import Schedule
from tvm.tirx import PrimFunc

from blockscale.base.sizes import ceil_div, round_up
from blockscale.base.targets import BULK_COPIES, GPU_TARGETS, SCALED, SCALED_MMA, gpu
from blockscale.catalog.registry import Body, Bucket, Facts, Road, Workload, register
from blockscale.lower.cuda import Source
from blockscale.lower.pipe import facts as pipe_facts
from blockscale.lower.pipe import host
from blockscale.lower.pipe.maps import SPREAD_ALIGNMENT, spreads_codes
from blockscale.lower.sync.emit import SCALED_MMA as BY_WARPS
from blockscale.lower.warp import facts as warp_facts
from blockscale.lower.warp import host as warp_host
from blockscale.lower.warp import rows as warp_rows
from blockscale.lower.warp.derive import derive
from blockscale.schedules.gemm import cpu, cpu_linear, sync, tcgen05
from blockscale.schedules.gemm import linear as gpu_linear
from blockscale.schedules.gemm.linear_gpu_tiles import multiplies_bytes
from blockscale.schedules.steps import Sketch, preferred
from blockscale.specs import FusedMoe, GroupedMmActFp4Quant, GroupedMmFp4, Linear, MmFp4
from blockscale.specs.plans.linear import LinearTile
from blockscale.tir.gemm.gated_tiles import gated_tiles
from blockscale.tir.gemm.grouped_act import grouped_gemm_act
from blockscale.tir.gemm.grouped_mm import grouped_gemm
from blockscale.tir.gemm.linear import linear
from blockscale.tir.gemm.linear_tiles import linear_tiles
from blockscale.tir.gemm.mm import gemm
from blockscale.tir.gemm.tiles import gemm_tiles

LINEAR_BUCKETS = (Bucket(1, 1, 1), Bucket(4, 4, 4), Bucket(16, 48, 8), Bucket(128, None, 12))
"""On a CPU: decode (one row), a few rows, small batches, prefill."""

GPU_ROWS = (
    *(8, 16, 32, 64, 128, 256, 320, 384, 512, 640, 768),
    *(1024, 1280, 1536, 2048, 2560, 3072),
)
"""Rows up to which a weight has a kernel of its own on a GPU: which tile fills the SMs well changes
with them, and 512 rows of 4096 x 4096 took 42 us by the tile of 1024 rows, 256 rows 16.5 (an H200).
Equal kernels are one.
"""
LINEAR_GPU_BUCKETS = (Bucket(1, 1), *(Bucket(rows, rows) for rows in GPU_ROWS), Bucket(4096, None))
"""Decode, small batches (the sizes of tiles), prefill."""

FEW_ROWS = 8
"""Rows of an expert up to which lanes run along k, as for few rows of a linear layer."""

GEMM_BUCKETS = (
    *(Bucket(16, 32), Bucket(64, 64), Bucket(128, 128), Bucket(256, 256)),
    *(Bucket(1024, 1024), Bucket(8192, None)),
)
"""On a GPU.  Up to 256 rows the weight's rows are the MMA's, as tiles of 128 tokens would be
padding; above, tiles of tokens fill the SMs, and then do so several times."""

GROUPED_ROWS = (16, 64, 256)
"""Rows of an expert, on average, for which a grouped GEMM has buckets on a GPU; each ends at twice
as many, the last one never."""

Gemm = MmFp4 | GroupedMmFp4


def _cpu_grouped_buckets(spec: GroupedMmFp4 | GroupedMmActFp4Quant) -> tuple[Bucket, ...]:
    """Few rows an expert, on average, and more."""
    return (
        Bucket(4 * spec.experts, FEW_ROWS * spec.experts, 4),
        Bucket(64 * spec.experts, None, 8),
    )


def _cuda_buckets(spec: Gemm | GroupedMmActFp4Quant) -> tuple[Bucket, ...]:
    return GEMM_BUCKETS if isinstance(spec, MmFp4) else grouped_buckets(spec.experts)


def grouped_buckets(experts: int) -> tuple[Bucket, ...]:
    """Return the buckets of a grouped GEMM on a GPU, by the rows of all experts."""
    *most, last = (rows * experts for rows in GROUPED_ROWS)
    return (*(Bucket(rows, 2 * rows) for rows in most), Bucket(last, None))


def _linear(spec: Linear, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    if spec.layout != "linear":
        raise TypeError(
            f"catalog: {spec.name} has a weight in layout {spec.layout}, that of CUDA kernels; "
            "take Linear(layout='linear') for a CPU"
        )
    compute = cpu_linear.compute_type(spec, level, bucket.tile)
    pair = cpu_linear.pair_width(spec, level, bucket.tile)
    return linear(spec, bucket.tile, compute, rows, pair)


def check_tiled(spec: Linear | FusedMoe) -> None:
    """TypeError unless GPU kernels read the weight of ``spec``; the message names one they do."""
    if spec.tiled:
        return
    said = f"{spec.name}: the weight is in layout {spec.layout!r}, which GPU kernels do not read"
    # of a name without dtype float32 is the first, and has no kernel
    dtypes = [field for field in ("dtype", "out_dtype") if getattr(spec, field, "") == "float32"]
    few = spec.dtype == "float32"
    changes = dict.fromkeys(dtypes if few else (), "bfloat16") | {"layout": "tiles64"}
    try:
        tiled = replace(spec, **changes)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{said}, and in layout 'tiles64' there is none: {error}") from error
    name = f"{tiled.base_name} (bf16 and f16)" if few else tiled.name
    raise TypeError(f"{said}; build {name}, or for a CPU level")


def _linear_on_gpu(spec: Linear, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    check_tiled(spec)
    by_bytes = multiplies_bytes(spec, bucket.rows, GPU_TARGETS[level])
    return linear_tiles(spec, rows, by_bytes=by_bytes)


def _linear_sources(spec: Linear, arch: str, bodies: Sequence[Body], name: str) -> Source:
    if spec.copies_rows:
        return warp_rows.sources(bodies, spec, arch, name)
    return warp_host.sources(bodies, name, arch, [param.name for param in spec.params()])


def _linear_kin(spec: Linear, part: int | None) -> list[Linear]:
    """Return the layers whose kernels are as fast as its own: what follows the sums is little.

    They differ in dtype, activation and residual; of layout "tiles64" also in whether rows are
    quantised before.
    """
    if not spec.tiled:
        return []
    plain = Linear(
        *(spec.n, spec.k, spec.fmt, "bfloat16", spec.group, spec.zero, spec.layout),
        activation="silu" if spec.gated else "none",
        gated=spec.gated,
        act_fmt=spec.act_fmt if spec.layout == "tiles64e" else "",
        fast_accum=spec.fast_accum,
    )
    return [plain] if plain != spec else []


def _linear_adopt(sch: Schedule, own: Workload, level: str, of: PrimFunc) -> None:
    """Schedule the layer as another one is; where it has no such tile, in its default schedule."""
    made = derive(of)
    tile = LinearTile(
        *(made.unit, made.cols_tile, made.rows_tile, made.warps, made.slices, made.ctas),
        *(made.blocks, made.fastest, made.copies, made.by_bytes, made.apart, made.multicast),
    )
    assert isinstance(own.spec, Linear)
    if tile.illegal(own.spec, GPU_TARGETS[level]) is None:
        gpu_linear.decided(sch, own.spec, tile, made.stages)
    else:
        own.sketches(level)[0](sch, preferred)


def _mm(spec: Gemm, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    if isinstance(spec, MmFp4):
        return gemm(spec, bucket.tile, cpu.compute_type(spec, level, bucket.tile), rows)
    return grouped_gemm(spec, bucket.tile, cpu.compute_type(spec.matrix, level, bucket.tile), rows)


def _mm_act(spec: GroupedMmActFp4Quant, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    compute = cpu.compute_type(spec.product.matrix, level, bucket.tile)
    return grouped_gemm_act(spec, bucket.tile, compute, rows)


def _sizes(spec: Gemm) -> tuple[str, str, int, int, int]:
    """Format, dtype of d, n, k, experts (0: not grouped)."""
    experts = spec.experts if isinstance(spec, GroupedMmFp4) else 0
    return spec.fmt, spec.out_dtype, spec.n, spec.k, experts


def _tiles(spec: Gemm, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    extra = (spec.activation, spec.residual) if isinstance(spec, MmFp4) else ()
    func = gemm_tiles(*_sizes(spec), rows, *extra)
    # Whole tiles are the same for several row counts, whose best schedules are not.
    return func if rows is None else func.with_attr("blockscale.rows", rows)


def by_warps(level: str) -> bool:
    """Whether block-scaled MMAs of an architecture are those of warps, mma.sync; else tcgen05."""
    return SCALED_MMA in gpu(level).features


def lowering(level: str) -> host.Lowering:
    """How kernels of block-scaled MMAs come of their schedules."""
    return BY_WARPS if by_warps(level) else host.TCGEN05


def _tile_sketches(spec: Gemm, bucket: Bucket, level: str) -> list[Sketch]:
    schedules = sync if by_warps(level) else tcgen05
    return schedules.gemm_sketches(*_sizes(spec), bucket.rows)


def _gated(spec: GroupedMmActFp4Quant, bucket: Bucket, level: str, rows: int | None) -> PrimFunc:
    func = gated_tiles(spec.fmt, spec.rule, spec.n, spec.k, spec.experts, rows)
    return func if rows is None else func.with_attr("blockscale.rows", rows)


def _gated_sketches(spec: GroupedMmActFp4Quant, bucket: Bucket, level: str) -> list[Sketch]:
    sizes = spec.n, spec.k, spec.experts, bucket.rows
    schedules = sync if by_warps(level) else tcgen05
    return schedules.gated_sketches(spec.fmt, spec.rule, *sizes)


def _tile_sources(
    spec: Gemm | GroupedMmActFp4Quant, arch: str, bodies: Sequence[Body], name: str
) -> Source:
    names = [param.name for param in spec.params()]
    return host.sources(bodies, name, arch, names, lowering(arch))


def _tile_sizes(spec: Gemm | GroupedMmActFp4Quant, rows: int) -> dict[str, int]:
    """Rows, and those of a's scales where experts, with as many rows each, have tiles of 128."""
    if isinstance(spec, MmFp4):
        return {"rows": rows}
    return {"rows": rows, "scale_rows": spec.experts * round_up(ceil_div(rows, spec.experts), 128)}


def tile_facts(level: str) -> Facts | None:
    """The plan is that of tcgen05; of mma.sync no model knows one."""
    return None if by_warps(level) else pipe_facts.decisions


def _tile_alignments(spec: Gemm) -> dict[str, int]:
    return {"b": SPREAD_ALIGNMENT} if spreads_codes(spec.fmt, spec.k) else {}


CODES = Road(
    buckets=_cuda_buckets,
    body=_tiles,
    sketches=_tile_sketches,
    lower=_tile_sources,
    facts=tile_facts,
    sizes=_tile_sizes,
    needs=frozenset({SCALED}),
    alignments=_tile_alignments,
)

LINEAR = Road(
    buckets=lambda spec: LINEAR_GPU_BUCKETS,
    body=_linear_on_gpu,
    sketches=lambda spec, bucket, level: gpu_linear.linear_sketches(spec, bucket.rows, level),
    lower=_linear_sources,
    facts=lambda level: warp_facts.decisions,
    sizes=lambda spec, rows: {"rows": rows},
    kin=_linear_kin,
    adopt=_linear_adopt,
    alignments=lambda spec: dict.fromkeys((*"xy", "packed", "block_scale", "residual"), 16),
)
"""A linear layer whose kernel reads rows of x as they are."""

LINEAR_ROWS = replace(
    LINEAR,
    sizes=lambda spec, rows: {"rows": rows, "bytes": spec.workspace_bytes(rows)},
    alignments=lambda spec: LINEAR.alignments(spec) | {"workspace": 16},
    needs=frozenset({BULK_COPIES}),
)
"""One before whose kernel another quantises them."""

register(
    Linear,
    cpu=Road(
        buckets=lambda spec: LINEAR_BUCKETS,
        body=_linear,
        sketches=lambda spec, bucket, level: cpu_linear.linear_sketches(spec, level, bucket.tile),
    ),
    cuda=lambda spec: LINEAR_ROWS if spec.copies_rows else LINEAR,
)
register(
    MmFp4,
    cpu=Road(
        buckets=lambda spec: LINEAR_BUCKETS,
        body=_mm,
        sketches=lambda spec, bucket, level: cpu.gemm_sketches(spec, level, bucket.tile),
    ),
    cuda=CODES,
)
register(
    GroupedMmFp4,
    cpu=Road(
        buckets=_cpu_grouped_buckets,
        body=_mm,
        sketches=lambda spec, bucket, level: cpu.gemm_sketches(spec.matrix, level, bucket.tile),
    ),
    cuda=CODES,
)
register(
    GroupedMmActFp4Quant,
    cpu=Road(
        buckets=_cpu_grouped_buckets,
        body=_mm_act,
        sketches=lambda spec, bucket, level: cpu.gemm_act_sketches(spec, level, bucket.tile),
    ),
    cuda=Road(
        buckets=_cuda_buckets,
        body=_gated,
        sketches=_gated_sketches,
        lower=_tile_sources,
        facts=tile_facts,
        sizes=_tile_sizes,
        needs=frozenset({SCALED}),
    ),
)
