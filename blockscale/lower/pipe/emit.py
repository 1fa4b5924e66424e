"""`kernel.Kernel` -> the CUDA C++ of its kernel: flat text, literals, one branch for each role.

Every role keeps its place in the ring, (stage, parity) from (0, 0), over all tiles: who waits for a
full stage waits for `parity`, who waits for an empty one for `parity ^ 1`.
"""

from __future__ import annotations

from typing import NamedTuple

from blockscale.lower.pipe import store
from blockscale.lower.pipe.kernel import (
    LOAD_WARP,
    MMA_WARP,
    STORE_WARPS,
    THREADS,
    Kernel,
    Stage,
    Transfer,
)
from blockscale.lower.pipe.share import share
from blockscale.lower.pipe.split import store_split
from blockscale.lower.pipe.text import indented, variables
from blockscale.lower.pipe.tile import Tile

HEADER = '#include "gemm_tiles.cuh"'

_POINTERS = {"float32": "float", "bfloat16": "uint16_t", "float16": "uint16_t", "int32": "int"}
_POINTERS |= {"uint8": "uint8_t"}


def emit(kernel: Kernel, name: str) -> str:
    """Return the CUDA text of ``kernel``, whose function is ``name``."""
    return Emitter(kernel).text(name)


def transfers(kernel: Kernel) -> list[Transfer]:
    """What has a tensor map, in the order of the kernel's parameters."""
    return [*kernel.loads, *kernel.epilogue.stores.values()]


def pointers(kernel: Kernel) -> list[str]:
    """Parameters that the kernel takes as pointers, in order; they follow the tensor maps."""
    return store.pointers(kernel)


class Body(NamedTuple):
    """What differs between kernels of one GEMM and of several; lines of text."""

    headers: list[str]
    """What declares the instructions of threads."""
    params: str
    init: list[str]
    """By one thread."""
    tables: list[str]
    """By all threads, before they part."""
    load: list[str]
    multiply: list[str]
    stores: list[str]
    """Of the roles; no stores: all threads store, `after` them."""
    after: list[str]
    columns: int
    """Of tensor memory."""


class Emitter:
    """Prints one kernel; ``more``: its warps go on to another one in the same launch."""

    def __init__(self, kernel: Kernel, more: bool = False) -> None:
        self.kernel, self.tile, self.more = kernel, Tile(kernel), more
        self.at = kernel.places
        self.pair = kernel.group == 2
        if more:
            self.tile.at_end = self._drain()

    # ---- The whole --------------------------------------------------------------------------

    def text(self, name: str) -> str:
        """The kernel."""
        k = self.kernel
        return self.whole(
            name,
            Body(
                headers=store.headers(k),
                params=self._params(),
                init=self.init(),
                tables=[*self.tile.table(), *self.tile.total()],
                load=self.load(),
                multiply=self.multiply(),
                stores=[] if k.split > 1 else store.store(k, self.tile),
                after=store_split(k, self.tile) if k.split > 1 else [],
                columns=k.tmem_columns,
            ),
        )

    def whole(self, name: str, of: Body) -> str:
        """The text of a kernel of these parts, whose cluster and barriers are this one's."""
        k, tmem = self.kernel, self.at["tmem"]
        cluster = f"__cluster_dims__({k.cluster}, 1, 1) " if k.cluster > 1 else ""
        lines = [
            *dict.fromkeys((HEADER, *of.headers)),
            "",
            f'extern "C" __global__ void __launch_bounds__({THREADS}, 1) {cluster}{name}(',
            f"    {of.params}) {{",
            "  extern __shared__ __align__(1024) char bs_smem[];",
            "  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // uniform",
            "  const int lane = threadIdx.x % 32;",
            "  const uint32_t smem = bs_shared(bs_smem);",
            *indented(self.place()),
            f"  if (warp == {LOAD_WARP} && bs_elect()) {{",
            *indented(of.init, 2),
            "  }",
            *(["  __syncwarp();", "  bs_cluster_sync();  // both CTAs have started: tcgen05.alloc"]
              if self.pair else []),
            f"  if (warp == {MMA_WARP}) {{",
            f"    bs_tcgen05_alloc<{k.group}>(smem + {tmem}, {of.columns});",
            f"    bs_tcgen05_relinquish<{k.group}>();",
            "    bs_tcgen05_fence_before();",
            "  }",
            "  __syncwarp();",
            f"  {self._meet()}",
            "  bs_tcgen05_fence_after();",
            f"  const uint32_t tmem = *reinterpret_cast<const uint32_t *>(bs_smem + {tmem});",
            "  bs_grid_wait();",
            *indented(of.tables),
            f"  if (warp == {LOAD_WARP}) {{",
            *indented(of.load, 2),
            f"  }} else if (warp == {MMA_WARP}) {{",
            *indented(of.multiply, 2),
            "  }" + (" else {" if of.stores else ""),
            *([*indented(of.stores, 2), "  }"] if of.stores else []),
            "  __syncwarp();",
            *indented(of.after),
            "  bs_tcgen05_fence_before();",
            f"  {self._meet()}  // others' MMAs and loads are done with this CTA",
            "  bs_tcgen05_fence_after();",
            f"  if (warp == {MMA_WARP}) bs_tcgen05_dealloc<{k.group}>(tmem, {of.columns});",
            "}",
            "",
        ]  # fmt: skip
        return "\n".join(lines)

    def _params(self) -> str:
        k = self.kernel
        maps = [f"const __grid_constant__ BsTensorMap map_{t.view.name}" for t in transfers(k)]
        given = [f"{kind}{name}" for kind, name in self.given()]
        offsets = ["const int *offsets"] if k.experts else []
        numbers = [f"float {var.name}" for var in k.scalars]
        return ",\n    ".join([", ".join(maps), ", ".join([*given, *offsets, *numbers, "int m"])])

    def given(self) -> list[tuple[str, str]]:
        """Type and name of each pointer."""
        k, written = self.kernel, store.written(self.kernel)
        kinds = {name: _POINTERS[k.views[name].dtype] for name in pointers(k)}
        return [
            (f"{'' if name in written else 'const '}{kind} *", name) for name, kind in kinds.items()
        ]

    def place(self) -> list[str]:
        """Where this CTA stands in its cluster."""
        k = self.kernel
        if k.cluster == 1:
            return []
        lines = ["const uint32_t rank = bs_cluster_rank();"]
        if k.split > 1:
            return lines
        if k.cluster_y > 1:
            lines.append(f"const int cta_x = rank % {k.cluster_x}, cta_y = rank / {k.cluster_x};")
        else:
            lines.append("const int cta_x = rank;")
        return [*lines, "const int cta = cta_x % 2;"] if self.pair else lines

    def _meet(self) -> str:
        return "bs_cluster_sync();" if self.kernel.cluster > 1 else "__syncthreads();"

    def init(self) -> list[str]:
        """Barriers."""
        k, at = self.kernel, self.at
        lines = [
            f"for (int i = 0; i < {many}; ++i) bs_mbar_init(smem + {at[name]} + 8 * i, {count});"
            for name, many, count in self.barriers()
        ]
        lines.append("bs_mbar_init_fence();")
        return lines + [f"bs_tma_prefetch_map(&map_{t.view.name});" for t in transfers(k)]

    def barriers(self) -> list[tuple[str, int, int]]:
        """Names, how many, and arrivals that each counts."""
        k = self.kernel
        return [
            ("full", k.stages, k.group if k.unpacks else 1),
            ("empty", k.stages, k.senders),
            *([("packed", k.stages, 1)] if k.unpacks else []),
            ("done", k.acc_stages, 1),
            ("free", k.frees, STORE_WARPS * k.group),
            *([("drained", 1, STORE_WARPS * k.group)] if self.more else []),
        ]

    # ---- The loading warp -------------------------------------------------------------------

    def _ring(self, name: str = "stage", parity: str = "parity") -> str:
        """The next stage."""
        return f"if (++{name} == {self.kernel.stages}) {name} = 0, {parity} ^= 1;"

    def _bounds(self) -> tuple[str, str]:
        """First stage of K of a CTA, and the one behind its last."""
        k = self.kernel
        if k.split == 1:
            return "0", str(k.k_stages)
        return (
            f"int(rank) * {k.k_stages} / {k.split}",
            f"int(rank + 1) * {k.k_stages} / {k.split}",
        )

    def load(self) -> list[str]:
        """All tiles' loads, by one thread, or by a warp that spreads codes too."""
        k, at = self.kernel, self.at
        first, last = self._bounds()
        empty = f"bs_mbar_wait(smem + {at['empty']} + 8 * stage, parity ^ 1);"
        drain = [] if k.cluster == 1 and not self.more else [
            "// MMAs still report to this CTA's barriers, and read what they loaded.",
            f"for (int i = 0; i < {k.stages}; ++i) {{",
            f"  {empty}",
            f"  {self._ring()}",
            "}",
        ]  # fmt: skip
        spread = self._spread() if k.unpacks else []
        ahead = k.stages - 1 if k.stages > 3 else k.stages
        issue = self._loads()
        if k.unpacks:
            issue = ["if (lane == 0) {", *indented(issue), "}", "__syncwarp();"]
        lines = [
            "uint32_t stage = 0, parity = 0;",
            *(["uint32_t late = 0, late_parity = 0;", "int behind = 0;"] if k.unpacks else []),
            *self._masks(),
            *self.tile.loop(
                [
                    *self.tile.before_loads,
                    *self._first_rows(),
                    # Left alone, nvcc unrolls a cluster's loop sixteen times.
                    *(["#pragma unroll 8"] if k.cluster > 1 and not k.unpacks else []),
                    f"for (int k = {first}; k < {last}; ++k) {{",
                    f"  {empty}",
                    *indented(issue),
                    f"  {self._ring()}",
                    *([f"  if (++behind < {ahead}) continue;", *indented(spread), "  --behind;"]
                      if k.unpacks else []),
                    "}",
                ]
            ),
            *([] if self.more else ["bs_grid_launch();"]),
            *(["for (; behind > 0; --behind) {", *indented(spread), "}"] if k.unpacks else []),
            *drain,
        ]  # fmt: skip
        return lines if k.unpacks else ["if (bs_elect()) {", *indented(lines), "}"]

    def _masks(self) -> list[str]:
        lines = []
        for load in self.kernel.loads:
            shared = share(self.kernel, load)
            if shared.many > 1:
                mask = shared.mask_text(self.kernel.cluster_y > 1)
                lines.append(f"const uint32_t mask_{load.view.name} = {mask};")
        return lines

    def _first_rows(self) -> list[str]:
        """What a tile's loads have in common."""
        lines = []
        for load in self.kernel.loads:
            row = load.dims[-1]
            shared = share(self.kernel, load)
            if self._along_k(load):
                continue
            text = self.tile.coordinate(row)
            if self.kernel.swap and self.pair and load is self.kernel.loads[1]:
                # A pair's MMA of fewer columns takes half of them from each CTA.
                text = f"{self.tile.coordinate(row, cta='0')} + cta * (columns / 2)"
            if shared.many > 1 and load.wide:
                text += f" + {shared.number_text} * {load.slot.shape[-2] // shared.many}"
            lines.append(f"const int {load.view.name}_row = {text};")
        if any(self._hinted(load) for load in self.kernel.loads):
            lines.append(f"const uint64_t policy = bs_policy({self.tile.only_rows()});")
        return lines

    def _along_k(self, load: Transfer) -> bool:
        """Whether a load's outermost index differs between stages."""
        return any(v.same_as(self.kernel.at.k) for v in variables(load.dims[-1].at))

    def _hinted(self, load: Transfer) -> bool:
        return load.once and share(self.kernel, load).many == 1

    def _loads(self) -> list[str]:
        """One stage's."""
        k, at = self.kernel, self.at
        packed = k.unpacks
        group = 1 if packed else k.group
        count = group * sum(load.count for load in k.loads)
        lines = [f"uint32_t bar = smem + {at['packed' if packed else 'full']} + 8 * stage;"]
        expect = f"bs_mbar_expect(bar, {count});"
        lines.append(f"if (cta == 0) {expect}" if group == 2 else expect)
        if group == 2:
            lines.append("bar &= 0xFEFFFFFF;  // of the leader, the even CTA")
        for place, load in zip(("x", "y", "sx", "sy"), k.loads, strict=True):
            lines.append(self._one_load(place, load, group))
        return lines

    def _one_load(self, place: str, load: Transfer, group: int) -> str:
        shared = share(self.kernel, load)
        sliced = load.slot.shape[-2] // shared.many if load.wide else 0
        to = f"smem + {self.at[place] + (load.slot.bytes // 2 if load.packed else 0)}"
        to += f" + stage * {load.slot.bytes}"
        if shared.many > 1 and load.wide:
            row_bytes = load.slot.row_bytes // (2 if load.packed else 1)
            to += f" + {shared.number_text} * {sliced * row_bytes}"
        where = [self.tile.coordinate(dim) for dim in load.dims]
        if not self._along_k(load):
            where[-1] = f"{load.view.name}_row"
        name = f"bs_tma_load_{len(load.dims)}d"
        args = [to, f"&map_{load.view.name}", *where, "bar"]
        if shared.many > 1:
            name, args = f"{name}_multicast", [*args, f"mask_{load.view.name}"]
        elif self._hinted(load):
            name, args = f"{name}_hint", [*args, "policy"]
        text = f"{name}<{group}>({', '.join(args)});"
        return (
            f"if ({shared.number_text} == 0) {text}" if shared.many > 1 and not load.wide else text
        )

    def _spread(self) -> list[str]:
        """The packed operand of the oldest stage whose bytes are there, to bytes."""
        k, at = self.kernel, self.at
        lines = [f"bs_mbar_wait(smem + {at['packed']} + 8 * late, late_parity);"]
        for place, load in zip("xy", k.loads[:2], strict=True):
            if load.packed:
                rows = load.slot.shape[-2]
                lines.append(
                    f"bs_spread_rows<{rows}>(smem + {at[place]} + late * {load.slot.bytes}, lane);"
                )
        full = f"smem + {at['full']} + 8 * late"
        leader = "rank / 2 * 2" if self.pair else "rank" if k.cluster > 1 else "0"
        return [
            *lines,
            "bs_fence_async();",
            "__syncwarp();",
            f"if (lane == 0) bs_mbar_arrive_cluster(bs_map_rank({full}, {leader}));",
            self._ring("late", "late_parity"),
        ]

    # ---- The multiplying warp ---------------------------------------------------------------

    def multiply(self) -> list[str]:
        """All tiles' MMAs, by a whole warp with uniform loops, of which one thread issues."""
        k, at = self.kernel, self.at
        first, last = self._bounds()
        whole = k.k_stages - (k.last is not None)
        unroll = 2 if k.split > 1 else next(u for u in (4, 3, 2, 1) if whole % u == 0)
        pitch, column = k.acc_pitch, k.sy_column
        shift = self.tile.text(k.sy_shift)
        more = "k > k_first" if k.split > 1 else "k > 0"
        done = f"smem + {at['done']} + 8 * slot"
        end = str(whole) if k.split == 1 else f"min(k_last, {whole})"
        begin = "0" if k.split == 1 else "k_first"
        bounds = [f"const int k_first = {first}, k_last = {last};"] if k.split > 1 else []
        tail = []
        if k.last is not None:
            rest = self._take(k.last, f"{whole} > k_first" if k.split > 1 else str(int(whole > 0)))
            tail = (
                [f"if (k_last == {k.k_stages}) {{", *indented(rest), "}"]
                if k.split > 1
                else ["{", *indented(rest), "}"]
            )
        lines = [
            "const bool issues = bs_elect();",
            "uint32_t stage = 0, parity = 0, number = 0;",
            f"const uint64_t x_rows = bs_matrix_desc<{k.loads[0].slot.row_bytes}>(0);",
            f"const uint64_t y_rows = bs_matrix_desc<{k.loads[1].slot.row_bytes}>(0);",
            "const uint64_t scales = bs_scale_desc(0);",
            *self._senders(),
            *self.tile.loop(
                [
                    f"const uint32_t slot = number % {k.acc_stages}, acc = tmem + slot * {pitch};",
                    f"const uint32_t sfx = tmem + {k.sx_column}, sfy = tmem + {column} + {shift};",
                    f"const uint32_t free = smem + {at['free']} + 8 * (number % {k.frees});",
                    f"const uint32_t freed = (number / {k.frees} & 1) ^ 1;",
                    f"bs_mbar_wait_from<{str(self.pair).lower()}>(free, freed);",
                    *bounds,
                    *([f"#pragma unroll({unroll})",
                       f"for (int k = {begin}; k < {end}; ++k) {{",
                       *indented(self._take(k.whole, more)),
                       "}"] if whole else []),
                    *tail,
                    f"if (issues) {self._commit(done, self._own())};",
                    "__syncwarp();",
                ],
                count="number",
            ),
            *(self._drained() if self.more else []),
        ]  # fmt: skip
        if k.group == 1:
            return lines
        return ["if (cta == 0) {", *indented(lines), "}"]

    def _drained(self) -> list[str]:
        """Wait until all accumulators have been read: those that overlap are free before that."""
        return [
            f"bs_mbar_wait_from<{str(self.pair).lower()}>(smem + {self.at['drained']}, 0);",
            "bs_tcgen05_fence_after();",
        ]

    def _drain(self) -> list[str]:
        """A storing warp has read its part of all accumulators."""
        bar = f"smem + {self.at['drained']}"
        leader = f"bs_map_rank({bar}, rank & ~1u)" if self.pair else bar
        return [
            "bs_tcgen05_fence_before();",
            "__syncwarp();",
            f"if (lane == 0) bs_mbar_arrive_cluster({leader});",
        ]

    def _own(self) -> str:
        k = self.kernel
        return f"{(1 << k.group) - 1}u << rank" if k.cluster // k.split > 1 else ""

    def _senders(self) -> list[str]:
        """CTAs that load for this pair wait for it: those of its row and of its columns."""
        k = self.kernel
        if k.cluster // k.split == 1:
            return []
        pair = (1 << k.group) - 1
        row = (1 << k.cluster_x) - 1
        column = sum(pair << (y * k.cluster_x) for y in range(k.cluster_y))
        at_row = f"{row}u << (cta_y * {k.cluster_x})" if k.cluster_y > 1 else f"{row}u"
        return [f"const uint32_t senders = {at_row} | {column}u << cta_x;"]

    def _commit(self, bar: str, mask: str) -> str:
        k = self.kernel
        if k.cluster // k.split > 1:
            return f"bs_tcgen05_commit_multicast<{k.group}>({bar}, {mask})"
        return f"bs_tcgen05_commit<{k.group}>({bar})"

    def _take(self, stage: Stage, more: str) -> list[str]:
        """The next stage of the ring when it is full; then those that load may fill it again."""
        k, at = self.kernel, self.at
        remote = str(self.pair and k.unpacks).lower()
        lines = []
        for name, load, of in zip(
            ("x", "y", "sx", "sy"), k.loads, ("x_rows", "y_rows", "scales", "scales"), strict=True
        ):
            address = f"smem / 16 + {at[name] // 16} + stage * {load.slot.bytes // 16}"
            lines.append(f"const uint64_t {name} = bs_desc_at({of}, {address});")
        for copy in stage.copies:
            side = copy.side
            lines.append(
                f"bs_tcgen05_cp<{k.group}>({self._scale_column(side, copy.column)}, "
                f"s{side} + {copy.source // 16});"
            )
        desc = k.mma
        for number, step in enumerate(stage.multiplies):
            n = 0 if k.swap else desc.n
            word = (
                f"bs_instruction_desc({desc.m}, {n}, {desc.x_format}, {desc.y_format}, "
                f"{desc.ue8m0}, {step.x_byte}, {step.y_byte})"
            )
            word += " | columns << 14" if k.swap else ""
            lines.append(
                f"{desc.function}<{k.group}>(acc, x + {step.x // 16}, y + {step.y // 16}, {word}, "
                f"sfx + {step.sx}, sfy + {step.sy}, {more if number == 0 else 1});"
            )
        empty = f"smem + {at['empty']} + 8 * stage"
        mask = "senders" if k.cluster // k.split > 1 else ""
        return [
            f"bs_mbar_wait_from<{remote}>(smem + {at['full']} + 8 * stage, parity);",
            "bs_tcgen05_fence_after();",
            "if (issues) {",
            *indented(lines),
            f"  {self._commit(empty, mask)};",
            "}",
            "__syncwarp();",
            self._ring(),
        ]

    def _scale_column(self, side: str, column: int) -> str:
        k = self.kernel
        return f"tmem + {(k.sx_column if side == 'x' else k.sy_column) + column}"
