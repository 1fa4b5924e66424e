"""Two GEMMs in one launch: the second one's tiles begin when the first one's rows are there.

Each role of a CTA does all its tiles of the first GEMM, then those of the second, so that no CTA
waits for tiles that nobody has begun; all CTAs are resident.  The storing warps of the first
count, for each 128x4 tile of scales, the parts of its rows that are stored; the loading warps of
the second wait for the rows that a tile needs.  Both GEMMs share the ring's memory and tensor
memory, so roles wait between them until the first is through with both in their own CTA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blockscale.base.errors import LoweringError
from blockscale.base.sizes import round_up
from blockscale.lower.pipe import store
from blockscale.lower.pipe.check import checked
from blockscale.lower.pipe.emit import Body, Emitter, transfers
from blockscale.lower.pipe.kernel import LANES, STORE_WARPS, Kernel, shared_share
from blockscale.lower.pipe.text import indented
from blockscale.specs.plans.launches import ROW_GROUP

SECOND = "second_"
"""What names of the second GEMM's parameters begin with."""


@dataclass(frozen=True, eq=False)
class Phases:
    """Two GEMMs of one launch, whose rows are the same; see `joined`."""

    first: Kernel
    second: Kernel

    @property
    def tmem_columns(self) -> int:
        """Columns of tensor memory that both use in turn."""
        return max(self.first.tmem_columns, self.second.tmem_columns)

    @property
    def launch_bytes(self) -> int:
        """Dynamic shared memory: as large a share as of columns, for single CTAs, too.

        All CTAs wait for each other's rows, as those of a cluster do (`Kernel.launch_bytes`): one
        that waits for columns, which another kernel's has, would stop them all.
        """
        share = shared_share(self.tmem_columns)
        return max(self.first.launch_bytes, self.second.launch_bytes, share)

    @property
    def target(self) -> int:
        """Parts that the rows of a tile of scales are stored in."""
        return STORE_WARPS * self.first.col_tiles


def apart(first: Kernel, second: Kernel) -> str | None:
    """Why two GEMMs do not go into one launch; None if they do."""
    for kernel, which in ((first, "first"), (second, "second")):
        if kernel.split > 1 or kernel.cluster != kernel.group or not kernel.experts:
            return (
                f"the {which} one divides K or tiles among CTAs, or has no experts; leave split_k "
                "at 1 and the cluster at the pair"
            )
    if first.group != second.group or first.experts != second.experts:
        return (
            f"{first.group} and {second.group} CTAs multiply together, of {first.experts} and "
            f"{second.experts} experts; choose the same"
        )
    if first.swap or first.epilogue.stores:
        return "the first one does not store its rows directly, each CTA 128 of them"
    end = _placed(first, second)[1].places["end"]
    if end > second.gpu.cta_shared:
        return (
            f"with a table of {first.experts} experts and barriers for each they take {end} bytes "
            f"of shared memory, and {second.gpu.cta_shared} are the limit; take fewer stages"
        )
    return None


def _placed(first: Kernel, second: Kernel) -> tuple[Kernel, Kernel]:
    """Rings on each other; behind both the first one's table and barriers, then the second's."""
    first = replace(first, control_at=max(k.places["table"] for k in (first, second)))
    return first, replace(second, control_at=round_up(first.places["end"], 16))


def joined(first: Kernel, second: Kernel) -> Phases:
    """Return both GEMMs as one launch.

    LoweringError: the schedules do not go together.
    """
    reason = apart(first, second)
    if reason is not None:
        raise LoweringError(f"two GEMMs in one launch: {reason}")
    return Phases(*(checked(kernel) for kernel in _placed(first, second)))


def emit_phases(of: Phases, name: str) -> str:
    """Return the CUDA text of the kernel ``name``."""
    first, second = Emitter(of.first, more=True), Emitter(of.second)
    first.tile.after_stores = _signal(of.first)
    second.tile.before_loads = _await(of.second, of.target)
    names = _aliases(second)

    def roles(one: list[str], other: list[str]) -> list[str]:
        made = []
        for emitter, lines in ((first, one), (second, [*names, *other])):
            made += ["{", *indented([*emitter.tile.total(), *lines]), "}"]
        return made

    return first.whole(
        name,
        Body(
            headers=[*store.headers(of.first), *store.headers(of.second)],
            params=_params(of),
            init=[*first.init(), "{", *indented([*names, *second.init()]), "}"],
            tables=[*first.tile.table(), *second.tile.table()],
            load=roles(first.load(), second.load()),
            multiply=roles(first.multiply(), second.multiply()),
            stores=roles(store.store(of.first, first.tile), store.store(of.second, second.tile)),
            after=[],
            columns=of.tmem_columns,
        ),
    )


def phase_parts(of: Phases) -> list[tuple[str, Kernel]]:
    """Return the prefix of names and the kernel of each GEMM, in the order of parameters."""
    return [("", of.first), (SECOND, of.second)]


def _params(of: Phases) -> str:
    maps = [
        f"const __grid_constant__ BsTensorMap {prefix}map_{t.view.name}"
        for prefix, kernel in phase_parts(of)
        for t in transfers(kernel)
    ]
    given = [
        f"{kind}{prefix}{name}"
        for prefix, kernel in phase_parts(of)
        for kind, name in Emitter(kernel).given()
    ]
    numbers = [
        f"float {prefix}{var.name}" for prefix, kernel in phase_parts(of) for var in kernel.scalars
    ]
    rest = [*given, "int *ready", "const int *offsets", *numbers, "int m"]
    return ",\n    ".join([", ".join(maps), ", ".join(rest)])


def _aliases(second: Emitter) -> list[str]:
    """The second GEMM's parameters by the names that its own text has."""
    k = second.kernel
    lines = [
        f"[[maybe_unused]] const BsTensorMap &map_{t.view.name} = {SECOND}map_{t.view.name};"
        for t in transfers(k)
    ]
    lines += [f"[[maybe_unused]] {kind}{name} = {SECOND}{name};" for kind, name in second.given()]
    lines += [f"[[maybe_unused]] const float {var.name} = {SECOND}{var.name};" for var in k.scalars]
    return lines


def _signal(k: Kernel) -> list[str]:
    """A storing warp is done with its part of a tile."""
    cta = " + cta" if k.group == 2 else ""
    group = f"row_tile * {k.x_tile // LANES}{cta}"
    return [
        f"const int row_group = {group};",
        "__syncwarp();",
        f"if (lane == 0 && row_group * {ROW_GROUP} < rows)",
        "  bs_signal_rows(ready + first_atom + row_group);",
    ]


def _await(k: Kernel, target: int) -> list[str]:
    """Rows that a tile's loads read are stored."""
    if k.swap:
        begin, count = f"row_tile * {k.y_tile}", k.y_tile
    else:
        begin = f"row_tile * {k.x_tile}" + (f" + cta * {LANES}" if k.group == 2 else "")
        count = LANES
    return [
        f"const int needed = {begin};",
        f"for (int i = needed / {ROW_GROUP}; i * {ROW_GROUP} < min(needed + {count}, rows); ++i)",
        f"  bs_await_rows(ready + first_atom + i, {target});",
    ]
