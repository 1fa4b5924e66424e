"""Machine code of kernels of every structure, beside that of the templates which they replaced.

The templates are gone; their figures, by the same nvcc and nvdisasm, are kept in bench/results/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.tcgen05 import sass
from bench.tcgen05.kernels import STRUCTURES, derived
from blockscale.lower import nvcc
from blockscale.lower.pipe.emit import emit
from blockscale.specs.plans.gemm import OUT_BYTES

ARCH, ENTRY = "sm_100a", "gemm"
Figures = Mapping[str, Any]
SLACK = 0.01
"""Of a figure: what counts as equal."""


def figures(text: str, item: int, in_flight: int) -> dict[str, Any]:
    """Return the figures of a kernel in CUDA C++.

    Args:
        text: the source; its kernel is `ENTRY`.
        item: bytes of an element of d.
        in_flight: bytes of shared memory that loads may fill ahead of the MMAs.
    """
    made = nvcc.compile_cuda_source(text, ARCH)
    (used,) = made.resources
    code = sass.disassemble(made.image, ENTRY)
    main, loads, stores = code.main_loop(), code.load_loops(), code.store_loops()
    return {
        "per_mma": len(main.instructions) / main.mmas,
        "per_load": sum(len(turn.instructions) / turn.count(sass.is_load) for turn in loads),
        "per_element": sum(len(turn.instructions) / turn.elements(item) for turn in stores),
        "registers": used["registers"],
        "spilled_bytes": used["spills"],
        "in_flight_bytes": in_flight,
        "devices": {
            "multiply, a stage": _each(main, main.count(sass.is_commit)),
            "load, a stage": _each(loads[0], loads[0].count(sass.is_wait)),
            "store, a part": _each(stores[0], 1),
        },
    }


def _each(turn: sass.Turn, times: int) -> dict[str, float]:
    return {opcode: count / times for opcode, count in turn.devices.items()}


def measured(
    kept: Mapping[str, Figures], names: Iterable[str] = tuple(STRUCTURES)
) -> dict[str, Any]:
    """Return figures of structures after, and those before that are ``kept``."""
    found = {}
    for name in names:
        plan = STRUCTURES[name]
        kernel = derived(plan)
        in_flight = kernel.stages * sum(load.slot.bytes for load in kernel.loads)
        after = figures(emit(kernel, ENTRY), OUT_BYTES[plan.out_dtype], in_flight)
        found[name] = {"before": kept[name]["before"], "after": after}
    return found


# ---- What is shown --------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A figure of two kernels; less is better, or more (``better`` 1)."""

    head: str
    name: str
    text: Callable[[Any], str] = "{:,}".format
    better: int = -1

    def worse(self, before: Figures, after: Figures) -> bool:
        """Whether it is worse by more than `SLACK`."""
        lost = self.better * (before[self.name] - after[self.name])
        return bool(lost > SLACK * before[self.name])

    def cell(self, before: Figures, after: Figures) -> str:
        """Both figures; what is worse stands out."""
        shown = self.text(after[self.name])
        end = f"**{shown}**" if self.worse(before, after) else shown
        return f"{self.text(before[self.name])} → {end}"


COLUMNS = (
    Column("SASS per MMA", "per_mma", "{:.2f}".format),
    Column("SASS per TMA load", "per_load", "{:.2f}".format),
    Column("SASS per stored element", "per_element", "{:.2f}".format),
    Column("registers", "registers"),
    Column("spilled bytes", "spilled_bytes"),
    Column("bytes in flight", "in_flight_bytes", better=1),
)
HEADS = ("kernel", *(column.head for column in COLUMNS))


def rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each structure."""
    for name, kernels in found.items():
        yield [name, *(column.cell(**kernels) for column in COLUMNS)]


def worse(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (structure, figure) of all that is worse."""
    return [
        (name, column.name)
        for name, kernels in found.items()
        for column in COLUMNS
        if column.worse(**kernels)
    ]


def other(found: Mapping[str, Any]) -> list[str]:
    """Return, as text, instructions of tensor units, TMA and barriers that differ in number."""
    lines = []
    for name, kernels in found.items():
        for role, before in kernels["before"]["devices"].items():
            after = kernels["after"]["devices"][role]
            for opcode in sorted({*before, *after}):
                was, now = before.get(opcode, 0), after.get(opcode, 0)
                if was != now:
                    lines.append(f"{name}: {role}: `{opcode}` {was:g} → {now:g}")
    return lines
