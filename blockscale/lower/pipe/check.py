"""What every kernel must obey, judged on its derived form, before a line of it is printed.

Each check is a function from a kernel to a reason, or None.  What reaches hardware wrongly without
an error (a byte that nobody loads, a barrier that is told of too few bytes) is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from blockscale.base.errors import LoweringError
from blockscale.lower.pipe.kernel import LANES, SM100, Kernel, Stage
from blockscale.lower.pipe.share import share
from blockscale.lower.pipe.simulate import deadlock

MAX_CLUSTER = 8
"""CTAs of a cluster that every sm_100 runs without opting in."""

MAX_BOX = 256
"""Elements of a box of a tensor map in a dimension."""

MAX_EXPERTS = 1024
"""Experts of a grouped GEMM, whose table is kept in shared memory."""

STEP_BYTES = 32
"""Of a row of an operand that one MMA reads."""

Y_COLUMNS = (32, 64, 128, 192, 256)
"""Columns of the MMA: where a tile begins within a 128x4 tile of scales, whole columns of tensor
memory (of 32 rows) must begin; 192 begins at multiples of 64."""


def checked(kernel: Kernel) -> Kernel:
    """Return the kernel; LoweringError says which rule it breaks, with the number."""
    reason = illegal(kernel)
    if reason is not None:
        raise LoweringError(f"no such kernel: {reason}")
    return kernel


def illegal(kernel: Kernel) -> str | None:
    """Why there is no such kernel; None if there is."""
    for check in CHECKS:
        reason = check(kernel)
        if reason is not None:
            return reason
    return None


# ---- Shapes -----------------------------------------------------------------------------------


def _shape(k: Kernel) -> str | None:
    if k.group not in (1, 2):
        return f"{k.group} CTAs multiply together; 1 or 2 can"
    if k.mma.n not in Y_COLUMNS:
        return f"{k.mma.n} columns of the MMA are none of {Y_COLUMNS}"
    if k.stages < 2:
        return f"stages={k.stages}: loads overlap with MMAs from 2 stages on"
    if k.acc_stages not in (1, 2):
        return f"acc_stages={k.acc_stages} is neither 1 nor 2"
    if k.experts > MAX_EXPERTS:
        return f"{k.experts} experts are more than {MAX_EXPERTS}"
    if k.band < 1:
        return f"group={k.band} is no number of clusters"
    return None


def _cluster(k: Kernel) -> str | None:
    if k.cluster > MAX_CLUSTER:
        return f"a cluster of {k.cluster} CTAs is larger than {MAX_CLUSTER}"
    if k.cluster_x % k.group:
        return f"cluster_x={k.cluster_x} is no multiple of the {k.group} CTAs of a pair"
    for load in k.loads[:2]:
        rows = load.slot.shape[-2] / share(k, load).many
        if rows % 8:
            return (
                f"a multicast slice of {rows:g} rows of {load.view.name} is no multiple of 8, the "
                "rows of a swizzle atom; take a smaller cluster"
            )
    if k.experts and k.cluster // k.split > k.group:
        return (
            "tiles of a grouped GEMM belong to different experts, so CTAs of a cluster along rows "
            "or columns have nothing to share; leave cluster_x at the pair and cluster_y at 1"
        )
    return None


def _split(k: Kernel) -> str | None:
    if k.split == 1:
        return None
    if k.group > 1 or k.cluster != k.split:
        return f"split_k={k.split} takes the whole cluster, of single CTAs"
    if k.split > k.k_stages:
        return f"split_k={k.split} leaves CTAs without K, which has {k.k_stages} stages"
    if k.acc_stages > 1 or k.epilogue.stores:
        return "split_k computes one tile a cluster and stores directly; acc_stages is 1"
    return None


# ---- Slots ------------------------------------------------------------------------------------


def _boxes(k: Kernel) -> str | None:
    """I4: what a load brings is what its slot holds, and no box is larger than TMA's."""
    for load in (*k.loads, *k.epilogue.stores.values()):
        held = {"UINT32": 4, "FLOAT32": 4, "BFLOAT16": 2, "FLOAT16": 2}.get(load.dtype, 1)
        brought = prod(dim.box for dim in load.dims) * held
        if brought != (load.slot.bytes // 2 if load.packed else load.slot.bytes):
            return f"a box of {load.view.name} has {brought} bytes, its slot {load.slot.bytes}"
        many = share(k, load).many if load.wide and load in k.loads else 1
        boxes = [dim.box for dim in load.dims[:-1]] + [load.dims[-1].box // many]
        if max(boxes) > MAX_BOX:
            return f"a box of {boxes} elements of {load.view.name} exceeds {MAX_BOX}"
    return None


def _operands(k: Kernel) -> str | None:
    """I1: the MMAs of a stage read every byte of a row once, and nothing that was not loaded."""
    for side, load in zip("xy", k.loads[:2], strict=True):
        wanted = list(range(0, load.slot.row_bytes, STEP_BYTES))
        for name, stage in _stages(k):
            found = [getattr(step, side) for step in stage.multiplies]
            if found != wanted[: len(found)] or (name == "whole" and found != wanted):
                return (
                    f"MMAs of a stage read {load.view.name} at bytes {found}, and its rows are "
                    f"loaded in steps {wanted}"
                )
    return None


def _scales(k: Kernel) -> str | None:
    """I1: scales that an MMA reads are copied before it, each tile of 512 bytes to its place."""
    for side, slot, load in (("x", k.sx, k.loads[2]), ("y", k.sy, k.loads[3])):
        line = slot.shape[-1] // 4
        for name, stage in _stages(k):
            copies = {c.column: c.source for c in stage.copies if c.side == side}
            needed = {getattr(step, f"s{side}") // line * line for step in stage.multiplies}
            columns = {at + 4 * tile for at in needed for tile in range(line // 4)}
            if not columns <= set(copies):
                return f"MMAs read scales in columns {sorted(columns - set(copies))}, never copied"
            if len(set(copies.values())) != len(copies):
                return f"a tile of {load.view.name} is copied twice"
            if name == "whole" and len(copies) * 512 != load.slot.bytes:
                return (
                    f"{len(copies)} tiles of {load.view.name} are copied, and "
                    f"{load.slot.bytes // 512} are loaded"
                )
            last = max(copies, default=0)
            if last + 4 > slot.columns or max(copies.values(), default=0) + 512 > load.slot.bytes:
                return f"a copy of {load.view.name} lies outside of its slot"
    return None


def _stages(k: Kernel) -> Iterator[tuple[str, Stage]]:
    yield "whole", k.whole
    if k.last is not None:
        yield "last", k.last


# ---- Barriers ---------------------------------------------------------------------------------


def _bytes(k: Kernel) -> str | None:
    """I4: every CTA's stage gets all of its bytes, from those that load for it, once."""
    for load in k.loads:
        shared = share(k, load)
        for rank in range(k.cluster // k.split):
            senders = [r for r in range(k.cluster // k.split) if rank in shared.members(r)]
            if not load.wide:
                senders = [r for r in senders if shared.number(r) == 0]
            parts = len(senders) if load.wide else 1
            if len(senders) != (shared.many if load.wide else 1) or parts != (
                shared.many if load.wide else 1
            ):
                return (
                    f"CTA {rank} of a cluster gets {load.view.name} from {senders}, and "
                    f"{shared.many} share it"
                )
    return None


def _senders(k: Kernel) -> str | None:
    """I4: a stage is empty when all pairs have read what this CTA loaded into their slots."""
    ctas = range(k.cluster // k.split)
    for rank in ctas:
        reached = {rank}
        for load in k.loads:
            reached |= set(share(k, load).members(rank))
        pairs = {r // k.group for r in reached}
        if len(pairs) != k.senders:
            return f"CTA {rank} loads for pairs {sorted(pairs)}, and {k.senders} report to it"
    return None


def _progress(k: Kernel) -> str | None:
    """I6: no role waits for ever, whatever the numbers of tiles and stages."""
    return deadlock(k)


# ---- Memory -----------------------------------------------------------------------------------


def _shared(k: Kernel) -> str | None:
    if k.smem_bytes > k.gpu.cta_shared:
        stage = sum(load.slot.bytes for load in k.loads)
        return (
            f"{k.stages} stages of {stage} bytes, {k.staging} of the epilogue and others are "
            f"{k.smem_bytes} bytes of shared memory, and {k.gpu.cta_shared} are the limit; take "
            "fewer stages"
        )
    if k.places["end"] > k.smem_bytes:
        return f"barriers end at {k.places['end']}, behind {k.smem_bytes} bytes of shared memory"
    for name, load in zip(("x", "y"), k.loads[:2], strict=True):
        if k.places[name] % 1024 or load.slot.bytes % 1024:
            return f"slots of {load.view.name} do not begin at multiples of 1024 bytes"
    return None


def _tensor_memory(k: Kernel) -> str | None:
    if k.used_columns > SM100.tensor_columns:
        return (
            f"{k.used_columns} columns of tensor memory, and {SM100.tensor_columns} are the limit; "
            "take fewer accumulators"
        )
    if k.overlap > k.mma.n // 2:
        return (
            f"two accumulators of {k.mma.n} columns would share {k.overlap}, more than half; take "
            "one accumulator"
        )
    return None


def _epilogue(k: Kernel) -> str | None:
    e = k.epilogue
    if e.columns not in (16, 32, 64) or k.mma.n % e.columns:
        return f"parts of {e.columns} columns are not 16, 32 or 64, or do not divide {k.mma.n}"
    if e.columns % e.width:
        return f"reads of {e.width} columns do not divide parts of {e.columns}"
    for move in e.stores.values():
        wide = move.slot.row_bytes
        if not k.swap and wide not in (32, 64, 128):
            return f"a TMA store of rows of {wide} bytes has no swizzle; it has for 32, 64 and 128"
        pitch = move.dims[1].pitch
        if pitch % 16:
            return f"rows of {move.view.name} of {pitch} bytes are no multiple of 16, as TMA wants"
    if k.x_tile != LANES * k.group:
        return f"tiles of {k.x_tile} lanes; {k.group} CTAs have {LANES * k.group}"
    return None


CHECKS: tuple[Callable[[Kernel], str | None], ...] = (
    *(_shape, _cluster, _split, _boxes, _operands, _scales, _bytes, _senders),
    *(_tensor_memory, _shared, _epilogue, _progress),
)
"""In the order in which they are asked."""

OF_TENSOR_MEMORY = frozenset({_tensor_memory, _progress})
"""Those that ask for tensor memory, and for the roles around it."""
