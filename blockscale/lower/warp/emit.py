"""`kernel.Kernel` -> CUDA C++: flat text, every size a literal."""

from __future__ import annotations

from blockscale.base.sizes import round_up
from blockscale.base.targets import CTA_RESERVED, GPU_TARGETS
from blockscale.lower.pipe.maps import MapPlan
from blockscale.lower.pipe.text import declarations, indented
from blockscale.lower.warp.frame import Frame
from blockscale.lower.warp.kernel import Kernel
from blockscale.lower.warp.load import Loads
from blockscale.lower.warp.multiply import Products, wgmma
from blockscale.lower.warp.tensor import TensorProducts
from blockscale.specs.plans.moe import E4M3, LOADER_REGISTERS
from blockscale.tir.gemm.tiles import EXPERT

POINTERS = {
    "float32": "float",
    "bfloat16": "uint16_t",
    "float16": "uint16_t",
    "int32": "int",
    E4M3: "uint8_t",
}
"""Types of elements; codes and scales are addressed in bytes."""

LARGEST = {"bulk": "sm_90a", "async": "sm_80"}
"""Of the architectures for which there are such copies, one with the largest shared memory."""

ADDRESSES = 44
"""Registers of a thread for addresses, barriers, scales and what is decoded."""

MANY_TILES = 4
"""Tiles of 16 rows of a warp whose codes and scales, loaded together, take registers, too: without
them 5 of 374 kernels of few rows spilled on sm_90a."""


def pointers(kernel: Kernel) -> list[str]:
    """Return the parameters that a kernel takes as pointers, in order."""
    mapped = {kernel.rows.view.name} if kernel.rows.tma else set()
    return [name for name in kernel.views if name not in mapped]


def tensor_maps(kernel: Kernel) -> list[MapPlan]:
    """Return the tensor maps that a kernel takes before its pointers."""
    rows = kernel.rows
    if not rows.tma:
        return []
    extent, item = rows.view.dims[-1].extent or 0, rows.slot.item
    dims, box = ((extent, 1), (None, 1)), (64, kernel.rows_tile)
    dtype = "UINT8" if rows.view.dtype == E4M3 else rows.view.dtype.upper()
    return [MapPlan(rows.view.name, dtype, dims, (item * extent,), box, rows.box_row)]


def emit(kernel: Kernel, name: str) -> str:
    """Return the CUDA text of the kernel ``name``."""
    return _Emitter(kernel, name).text()


class _Emitter(Frame):
    """Prints one kernel."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self.name, self.written = name, str(kernel.epilogue.writes().name)
        self.loads = Loads(kernel, name)
        self.products = (TensorProducts if kernel.tensor else Products)(kernel, name)

    def text(self) -> str:
        """All of it."""
        k = self.kernel
        body = [
            "extern __shared__ __align__(1024) char bs_smem[];",
            "const uint32_t smem = (bs_shared(bs_smem) + 1023) / 1024 * 1024;",
            "const int warp_id = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);",
            "const int lane = threadIdx.x % 32;",
            *(["const int cta = bs_cluster_rank();"] if k.ctas > 1 else []),
            *(["const int mate = bs_cluster_rank();"] if k.multicast > 1 else []),
            "if (threadIdx.x == 0) {",
            *indented(self._barriers()),
            "}",
            *self._allocated(),
            "__syncthreads();",
            *(["bs_tcgen05_fence_after();"] if k.tensor else []),
            *(["bs_cluster_arrive();"] if k.cluster > 1 else []),
            *(["bs_grid_wait();"] if self.waits_first() else []),
            *(["bs_grid_launch();"] if k.after is not None else []),
            *self._tiles(),
            f"if (warp_id < {k.consumers}) {{",
            *indented(self.products.lines()),
            *self._issuer(),
            "} else {",
            *indented(self._fewer()),
            *indented(self._loader()),
            "}",
            *self._freed(),
            # No CTA ends while others of its cluster load into it, or arrive at its mbarriers.
            *(["__syncwarp();", "bs_cluster_sync();"] if k.multicast > 1 else []),
        ]
        bounds = f"{k.threads}, {self._together()}"
        return "\n".join(
            [
                *self._headers(),
                *self._struct(),
                f'extern "C" __global__ void __launch_bounds__({bounds}) {self.name}(',
                f"    {', '.join(self._params())}) {{",
                *indented(body),
                "}",
                "",
            ]
        )

    def _allocated(self) -> list[str]:
        """Tensor memory, by the warp that multiplies, which frees it, too."""
        k = self.kernel
        if not k.tensor:
            return []
        return [
            f"if (warp_id == {k.issuer}) {{",
            f"  bs_tcgen05_alloc<1>(smem + {k.tmem_at}, {k.columns});",
            "  bs_tcgen05_relinquish<1>();",
            "  bs_tcgen05_fence_before();",
            "}",
        ]

    def _issuer(self) -> list[str]:
        """The warp that multiplies by tcgen05."""
        if not isinstance(self.products, TensorProducts):
            return []
        number = self.kernel.issuer
        return [f"}} else if (warp_id == {number}) {{", *indented(self.products.issues())]

    def _freed(self) -> list[str]:
        k = self.kernel
        if not k.tensor:
            return []
        return [
            "__syncwarp();",
            "bs_tcgen05_fence_before();",
            "__syncthreads();",
            f"if (warp_id == {k.issuer}) {{",
            "  bs_tcgen05_fence_after();",
            f"  bs_tcgen05_dealloc<1>(bs_load4_shared(smem + {k.tmem_at}), {k.columns});",
            "}",
        ]

    def _params(self) -> list[str]:
        """Declarations of the parameters: tensor maps, pointers, numbers."""
        k = self.kernel
        bulk = {k.weights.view.name, k.scales.view.name}
        params = []
        if k.rows.tma:
            params.append(f"const __grid_constant__ BsTensorMap map_{k.rows.view.name}")
        for name in pointers(k):
            if name == EXPERT:  # blocks of rows, and how many there are
                params += ["const int4 *blocks", "const int *n_blocks"]
                continue
            if name in k.addressed:
                params.append(f"const int64_t *{name}")
                continue
            kind = "uint8_t" if name in bulk else POINTERS[k.views[name].dtype]
            params.append(f"{'' if name == self.written else 'const '}{kind} *{name}")
        params += [f"float {scalar.name}" for scalar in k.scalars]
        return [*params, *([] if k.grouped else ["int m"])]

    def _tiles(self) -> list[str]:
        """How many tiles there are."""
        k = self.kernel
        if k.grouped:
            return [f"const int tiles = __ldg(n_blocks) * {k.col_tiles};"]
        return [
            f"const int row_tiles = (m + {k.rows_tile - 1}) / {k.rows_tile};",
            f"const int tiles = row_tiles * {k.tile_groups};",
        ]

    def _loader(self) -> list[str]:
        """The warp that loads, the first of four where registers move."""
        lines, k = self.loads.lines(), self.kernel
        if k.moves_registers and not k.row_loaders:
            lines = [f"if (warp_id == {k.consumers}) {{", *indented(lines), "}"]
            if k.multicast > 1:
                lines[-1:] = ["} else {", "  bs_cluster_wait();", "}"]
        return [*lines, *(["__syncwarp();", "bs_cluster_wait();"] if k.ctas > 1 else [])]

    def _together(self) -> int:
        """CTAs of an SM for which registers are divided: those that share its memory.

        Not so many that sums, fragments and addresses have too few.
        """
        k = self.kernel
        if k.unit != "mma" or k.has_first:
            return 1
        fragments = 16 * k.tiles_m + 16 if k.in_pairs else k.rows_tile
        many = k.tiles_m >= MANY_TILES
        fits = k.rows_tile == 8 and k.form.dtype == "bfloat16" and not k.form.zeros
        fragments += 2 * k.tiles_m if many and not fits else 0
        registers = round_up(k.tiles_m * k.rows_tile // 2 + fragments + ADDRESSES, 8)
        room = GPU_TARGETS[LARGEST[k.copies]].sm_shared // (k.shared + CTA_RESERVED)
        threads = 65536 // registers
        if k.copies == "async" or many:  # of whole warps of a quarter of an SM; others: as measured
            threads = 16384 // (32 * registers) * 128
        return max(1, min(room, threads // k.threads))

    def _headers(self) -> list[str]:
        k = self.kernel
        body = k.epilogue.body
        assert body is not None
        own = ["mma", "moe_decode", "gemm_tiles", "warp_sums", "warp_steps"]
        own += ["moe_bytes"] if k.form.order == "bytes" else []
        own += ["warp_async"] if k.copies == "async" else []
        own += ["warp_groups"] if k.has_first else []
        own += ["tensor_fragments"] if k.tensor else []
        named = [*(f'#include "{name}.cuh"' for name in own), *declarations(body.value)]
        lines = [*dict.fromkeys(named)]
        if k.unit == "wgmma":
            lines.append(wgmma(k.form.dtype, k.rows_tile))
        return lines

    def _struct(self) -> list[str]:
        """What `BsDecode` knows of the weights."""
        form = self.kernel.form
        values = {
            "FORMAT": f"BS_MOE_{form.fmt.upper()}",
            "GROUP": form.group,
            "ZEROS": form.zeros,
            "BF16": int(form.dtype == "bfloat16"),
        }
        if form.order == "bytes":
            values["E4M3"] = int(self.kernel.by_bytes)
        lines = [f"  static constexpr int {name} = {value};" for name, value in values.items()]
        return [f"struct {self.format} {{", *lines, "};"]

    def _barriers(self) -> list[str]:
        k = self.kernel
        loads = 32 if k.copies == "async" else 1 + 32 * k.row_loaders  # lanes that arrive
        free = 1 if k.tensor else k.consumers * k.multicast
        lines = [
            f"for (int i = 0; i < {k.stages}; ++i) {{",
            f"  bs_mbar_init(smem + 8 * i, {loads});",
            f"  bs_mbar_init(smem + {8 * k.stages} + 8 * i, {free});",
            "}",
        ]
        if k.tensor:
            decoded, free, sums, read = k.tensor_bars
            lines += [
                f"for (int i = 0; i < {2 * k.blocks}; ++i) {{",
                f"  bs_mbar_init(smem + {decoded} + 8 * i, {k.warps});",
                f"  bs_mbar_init(smem + {free} + 8 * i, 1);",
                "}",
                f"bs_mbar_init(smem + {sums}, 1);",
                f"bs_mbar_init(smem + {read}, {k.consumers});",
            ]
        if k.ctas > 1:
            lines += [
                f"bs_mbar_init(smem + {k.sums_bar}, 1);",
                f"bs_mbar_expect(smem + {k.sums_bar}, {k.sums_type}::bytes(cta));",
            ]
        # cp.async sees what the CTA's barrier orders; bulk copies belong to another proxy, and
        # others of a cluster are not in its barrier.
        alone = k.copies == "async" and k.ctas == 1
        return [*lines, *([] if alone else ["bs_mbar_init_fence();"])]

    def _fewer(self) -> list[str]:
        few = self.registers()
        return [f"bs_fewer_registers<{LOADER_REGISTERS}>();"] if few else []
