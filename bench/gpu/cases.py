"""What `bench.gpu` measures: the data, the exact result, the contenders, and what is asked.

Data are named as the parameters of our kernels are.  ``asked`` of a case: "of_copy": least part of
the copy's bandwidth; "of_compile", "of_triton": largest part of their time; "us": longest time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench import reference
from bench.measure import Buffer, Data
from bench.peers.ops import PEERS, QUANTISED, Peer
from blockscale.specs import Dequantize, Quantize, ScaleSweep, Swizzle, Unswizzle
from blockscale.specs.fused import ActQuantize, NormQuantize

FORMAT = 1
HIDDEN = (2048, 2880, 4096, 5120, 7168, 8192, 16384)
ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
PEER_HIDDEN = (4096, 7168)
SMALL = 64  # rows up to which a launch is short of work
PEER_ROWS = (1, 16, 64)
BARS = ((4096, 0.95), (1024, 0.9), (256, 0.85))  # rows from which a part of the copy is asked
WIDE, WIDE_US, SMALL_US = 7168, 8192, 3.2
NORMS = {  # beside linear NVFP4
    ("nvfp4", "128x4"): (2048, 4096, 7168, 8192, 16384),
    ("mxfp4", "linear"): (4096, 7168),
}
CHUNK = 1 << 25  # elements whose reference is computed at a time: float64 of them take 0.25 GiB
SWEEP_US, SWEEP_EXCESS, SWEEP_DIFFERENT = 2100.0, 1e-6, 1e-3
SILU_TOLERATED = 2e-4  # each target has its own exp: products next to a tie round otherwise
BF16 = torch.bfloat16

Judge = Callable[[Data, Data], dict[str, Any]]
"""From the data before the call, and those after it, to what stands in the results."""


@dataclass(frozen=True)
class Case:
    """One task; ``shared`` data are the same in every call, ``buffers`` rotate."""

    op: str
    label: str
    kernel: str
    shape: dict[str, int]
    buffers: dict[str, Buffer]
    shared: Callable[[], Data]
    judge: Judge
    reread: tuple[str, ...] = ()  # buffers that are read and written
    peers: tuple[Peer, ...] = ()
    asked: dict[str, float] = field(default_factory=dict)
    tolerated: float = 0.0  # part of the bytes in which ours may differ

    @property
    def name(self) -> str:
        """For example "add_rmsnorm 4096x7168 nvfp4"."""
        return f"{self.op} {self.label}"

    @property
    def footprint(self) -> int:
        """Bytes of one set of data."""
        return sum(buffer.bytes for buffer in self.buffers.values())

    @property
    def moved(self) -> int:
        """Bytes read and written, each once."""
        return self.footprint + sum(self.buffers[name].bytes for name in self.reread)


def normal(pool: Tensor) -> Tensor:
    """Fill with normal numbers."""
    return pool.normal_()


def random_bytes(low: int = 0, high: int = 256) -> Callable[[Tensor], Tensor]:
    """Return what fills with random numbers from ``low`` to below ``high``."""
    return lambda pool: pool.random_(low, high)


def _scalar(value: float) -> Callable[[str], Tensor]:
    return lambda device: torch.tensor([value], dtype=torch.float32, device=device)


def differing(got: Tensor, expected: Tensor) -> int:
    """Return how many bytes differ; both are contiguous and of the same size."""
    return int((got.reshape(-1).view(torch.uint8) != expected.reshape(-1).view(torch.uint8)).sum())


Expected = Callable[[Data], Mapping[str, Tensor]]


def exact(expected: Expected, by_row: tuple[str, ...], outputs: tuple[str, ...]) -> Judge:
    """Return the judge that counts the differing bytes of ``outputs``.

    ``by_row``: inputs that the reference takes a chunk of rows at a time; none: whole.
    """

    def judge(before: Data, after: Data) -> dict[str, Any]:
        rows = before[by_row[0]].shape[0] if by_row else 1
        width = sum(before[name].numel() for name in by_row) // max(1, rows)
        step = max(1, CHUNK // max(1, width)) if by_row else rows
        differ = 0
        for start in range(0, rows, step):
            part = slice(start, start + step)
            chunk = {n: t[part] if n in by_row else t for n, t in before.items()}
            for name, truth in expected(chunk).items():
                differ += differing(after[name][part] if by_row else after[name], truth)
        size = sum(after[name].numel() * after[name].element_size() for name in outputs)
        return {"differ": differ, "of": size}

    return judge


def _with_bar(case: Case) -> Case:
    """Return the case with what is asked of its rows: a part of the copy's bandwidth, or a time.

    A part of 256 rows is asked where a row is wide, a time of few rows up to `WIDE_US`.
    """
    rows, width = case.shape["rows"], case.shape.get("hidden") or case.shape["cols"]
    bar = next((bar for least, bar in BARS if rows >= least), None)
    if bar is not None and (rows >= 1024 or width >= WIDE):
        return replace(case, asked={"of_copy": bar, **case.asked})
    if rows <= SMALL and width <= WIDE_US:
        return replace(case, asked={"us": SMALL_US, **case.asked})
    return case


def dequantise(rows: int, cols: int, device: str, peers: bool = False) -> Case:
    """Return NVFP4 to bfloat16."""
    g = _scalar(0.0123)

    def expected(d: Data) -> dict[str, Tensor]:
        return {"out": reference.dequantize(d["packed"], d["block_scale"], d["global_scale"])}

    case = Case(
        "dequantize",
        f"{rows}x{cols} nvfp4",
        Dequantize("nvfp4", "bfloat16").name,
        {"rows": rows, "cols": cols},
        {
            "packed": Buffer((rows, cols // 2), torch.uint8, random_bytes()),
            "block_scale": Buffer((rows, cols // 16), torch.uint8, random_bytes(0x08, 0x48)),
            "out": Buffer((rows, cols), BF16),
        },
        lambda: {"global_scale": g(device)},
        exact(expected, QUANTISED, ("out",)),
        peers=PEERS["dequantize"] if peers else (),
    )
    return _with_bar(case)


def _quantised(rows: int, cols: int, block: int, layout: str) -> dict[str, Buffer]:
    count = cols // block
    shape = (rows, count) if layout == "linear" else (-(-rows // 128) * 128, -(-count // 4) * 4)
    return {
        "packed": Buffer((rows, cols // 2), torch.uint8),
        "block_scale": Buffer(shape, torch.uint8),
    }


def _in_layout(packed: Tensor, scale: Tensor, layout: str) -> dict[str, Tensor]:
    placed = scale if layout == "linear" else reference.swizzle(scale)
    return {"packed": packed, "block_scale": placed}


def _rows_of(layout: str, *names: str) -> tuple[str, ...]:
    return names if layout == "linear" else ()  # swizzled scales have no rows


def quantise(
    rows: int, cols: int, device: str, layout: str = "linear", peers: bool = False
) -> Case:
    """Return bfloat16 to NVFP4."""
    g = _scalar(5 / (448 * 6))

    def expected(d: Data) -> dict[str, Tensor]:
        return _in_layout(*reference.quantize(d["x"], d["global_scale"]), layout)

    case = Case(
        "quantize",
        f"{rows}x{cols} nvfp4 {layout}",
        Quantize("nvfp4", "bfloat16", layout).name,
        {"rows": rows, "cols": cols},
        {"x": Buffer((rows, cols), BF16, normal), **_quantised(rows, cols, 16, layout)},
        lambda: {"global_scale": g(device)},
        exact(expected, _rows_of(layout, "x"), QUANTISED),
        peers=PEERS["quantize"] if peers else (),
    )
    return _with_bar(case)


def norm(rows: int, hidden: int, device: str, fmt: str = "nvfp4", layout: str = "linear") -> Case:
    """Return add_rmsnorm_fp4quant, the residual updated in place."""
    block, scale_format = (16, "e4m3") if fmt == "nvfp4" else (32, "ue8m0")
    g = _scalar(1 / 400)

    def expected(d: Data) -> dict[str, Tensor]:
        codes, scale, residual = reference.add_rmsnorm(
            d["input"], d["residual"], d["weight"], d["global_scale"], fmt
        )
        return {"residual": residual, **_in_layout(codes, scale, layout)}

    compared = hidden in PEER_HIDDEN and fmt == "nvfp4" and layout == "linear"
    peers = compared and (rows in PEER_ROWS or (rows, hidden) == (4096, 7168))
    case = Case(
        "add_rmsnorm",
        f"{rows}x{hidden} {fmt}{'' if layout == 'linear' else ' ' + layout}",
        NormQuantize(hidden, block, scale_format, "bfloat16", layout=layout).name,
        {"rows": rows, "hidden": hidden},
        {
            "input": Buffer((rows, hidden), BF16, normal),
            "residual": Buffer((rows, hidden), BF16, normal),
            "weight": Buffer((hidden,), BF16, normal),
            **_quantised(rows, hidden, block, layout),
        },
        lambda: {"global_scale": g(device)},
        exact(expected, _rows_of(layout, "input", "residual"), (*QUANTISED, "residual")),
        ("residual",),
        PEERS["add_rmsnorm"] if peers else (),
        {"of_compile": 0.7, "of_triton": 1.0} if peers and rows <= SMALL else {},
    )
    return _with_bar(case)


def silu(rows: int, cols: int, device: str, layout: str = "linear", peers: bool = False) -> Case:
    """Return silu_and_mul_fp4quant of [rows, 2 * cols]."""
    g = _scalar(1 / 200)

    def expected(d: Data) -> dict[str, Tensor]:
        return _in_layout(*reference.silu_and_mul(d["input"], d["global_scale"]), layout)

    case = Case(
        "silu_and_mul",
        f"{rows}x{cols} nvfp4{'' if layout == 'linear' else ' ' + layout}",
        ActQuantize("silu", 16, "e4m3", "bfloat16", layout=layout).name,
        {"rows": rows, "cols": cols},
        {
            "input": Buffer((rows, 2 * cols), BF16, normal),
            **_quantised(rows, cols, 16, layout),
        },
        lambda: {"global_scale": g(device)},
        exact(expected, _rows_of(layout, "input"), QUANTISED),
        peers=PEERS["silu_and_mul"] if peers else (),
        tolerated=SILU_TOLERATED,
    )
    return _with_bar(case)


def swizzle(rows: int, cols: int, device: str, back: bool = False) -> Case:
    """Return scales to the 128x4 layout, or ``back``."""

    def expected(d: Data) -> dict[str, Tensor]:
        if back:
            return {"out": reference.unswizzle(d["scale"], rows, cols)}
        return {"out": reference.swizzle(d["scale"])}

    case = Case(
        "unswizzle" if back else "swizzle",
        f"{rows}x{cols}",
        (Unswizzle() if back else Swizzle()).name,
        {"rows": rows, "cols": cols},
        {
            "scale": Buffer((rows, cols), torch.uint8, random_bytes()),
            "out": Buffer((rows, cols), torch.uint8),
        },
        dict,
        exact(expected, (), ("out",)),
        peers=() if back else PEERS["swizzle"],
    )
    return _with_bar(case)


def sweep(rows: int, cols: int, device: str) -> Case:
    """Return the scale sweep of a bfloat16 weight: 126 candidates for every block of 16."""

    def shared() -> Data:
        values = torch.arange(1, 127, dtype=torch.int32, device=device)
        candidates = reference.e4m3_values(values) / torch.full((1,), 448.0, device=device)
        return {"global_amax": _scalar(5.5)(device), "candidates": candidates}

    def judge(before: Data, after: Data) -> dict[str, Any]:
        x, amax, candidates = (before[n] for n in ("x", "global_amax", "candidates"))
        index, least = reference.sweep(x, amax, candidates)
        found = torch.searchsorted(candidates * amax, after["best_amax"]).clamp(max=125)
        known = bool((candidates[found] * amax == after["best_amax"]).all())
        step = candidates[found] * amax / torch.full_like(amax, 6)
        losses = reference.sweep_losses(x.abs().double(), step.unsqueeze(-1))
        excess = float(((losses - least) / least.clamp(min=1e-300)).max())
        other = float((found != index).double().mean())
        right = known and excess <= SWEEP_EXCESS and other < SWEEP_DIFFERENT
        size = after["best_amax"].numel() * 4
        return {
            "differ": 0 if right else size,
            "of": size,
            "excess": excess,
            "other_candidate": other,
        }

    blocks = rows * cols // 16
    return Case(
        "sweep",
        f"{rows}x{cols}",
        ScaleSweep("bfloat16").name,
        {"rows": rows, "cols": cols},
        {
            "x": Buffer((blocks, 16), BF16, normal),
            "best_amax": Buffer((blocks,), torch.float32),
        },
        shared,
        judge,
        asked={"us": SWEEP_US},
    )


def all_cases(device: str = "cuda") -> Iterator[Case]:
    """Yield every case; those with peers and the large ones first."""
    for rows in (4096, *PEER_ROWS):
        for hidden in PEER_HIDDEN:
            yield norm(rows, hidden, device)
    for size in (8192, 1024, 4096, 16384):
        yield dequantise(size, size, device, size == 8192)
    for rows, cols in ((8192, 8192), (65536, 4096), *((n, n) for n in (1024, 4096, 16384))):
        for layout in ("linear", "128x4"):
            yield quantise(rows, cols, device, layout, (rows, layout) == (8192, "linear"))
    yield silu(4096, 14336, device, peers=True)
    yield silu(4096, 14336, device, "128x4")
    yield silu(8192, 8192, device)
    yield silu(65536, 4096, device)
    yield swizzle(229376, 256, device)
    yield swizzle(229376, 256, device, back=True)
    yield sweep(8192, 4096, device)
    for (fmt, layout), widths in NORMS.items():
        for hidden in widths:
            for rows in (1, 64, 256, 1024, 4096, 16384):
                yield norm(rows, hidden, device, fmt, layout)
    for hidden in HIDDEN:
        for rows in ROWS:
            if hidden not in PEER_HIDDEN or rows not in (4096, *PEER_ROWS):
                yield norm(rows, hidden, device)


def bytes_of(case: Case, sets: int) -> int:
    """Return the memory that measuring takes: the data, the copy's, and a chunk's reference."""
    widest = max(math.prod(buffer.shape) for buffer in case.buffers.values())
    once = case.footprint + 100 * min(widest, 4 * CHUNK)
    return sets * (case.footprint + case.moved) + once
