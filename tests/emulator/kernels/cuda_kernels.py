"""The CUDA kernels of cuda/*.cu: compiled to PTX by nvcc, launched on the emulator, judged.

A `Case` is one launch with its data and what it has to write.  Outputs start as NaN (or -1), so
that an element that nobody wrote is wrong.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from blockscale import emulator
from tests.emulator.kit import tools

FOLDER = Path(__file__).resolve().parent / "cuda"
ARCHITECTURE = {"hopper": "sm_90a", "sm120": "sm_120a"}  # all others: sm_100a
ATOM = 512  # bytes of the scales of 128 rows x 4


def architecture(name: str) -> str:
    """Return the target of cuda/<name>.cu."""
    return ARCHITECTURE.get(name, "sm_100a")


@cache
def ptx(name: str, broken: str | None = None) -> str:
    """Return the PTX of cuda/<name>.cu, with one thing broken on purpose if named."""
    flags = ["-ptx", "-std=c++17", f"-arch={architecture(name)}"]
    flags += [f"-DBROKEN={broken}"] if broken else []
    source = FOLDER / f"{name}.cu"

    with tempfile.TemporaryDirectory(prefix="blockscale-kernels-") as folder:
        out = Path(folder) / "kernel.ptx"
        command = [tools.nvcc(), *flags, "-o", str(out), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        return out.read_text()


@dataclass
class Case:
    """One launch of ``entry`` in cuda/<source>.cu."""

    source: str
    entry: str
    args: Sequence[Any]
    judge: Callable[[], str | None]
    """After the run: what is wrong with the outputs, or None."""
    grid: tuple[int, ...] = (1,)
    threads: int = 128
    cluster: int = 1
    shared: int = 0
    text: str = ""
    """PTX of a kernel that is not in this folder."""

    def ptx(self, broken: str | None = None) -> str:
        """Return the text of the kernel, whole or with one thing broken on purpose."""
        return self.text or ptx(self.source, broken)

    def run(self, seed: int = 0, *, text: str | None = None, broken: str | None = None) -> Any:
        """Launch (``text`` instead of the compiled source) and return the report."""
        return emulator.launch(
            text or self.ptx(broken),
            entry=self.entry,
            grid=(*self.grid, 1, 1)[:3],
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            dynamic_smem=self.shared,
            args=self.args,
            seed=seed,
        )


def equal(*pairs: tuple[np.ndarray, np.ndarray]) -> Callable[[], str | None]:
    """Return a judge: every first array has to equal the second one, value by value."""

    def judge() -> str | None:
        for number, (got, want) in enumerate(pairs):
            bad = ~((got == want) | ((got != got) & (want != want)))
            if bad.any():
                at = tuple(int(i) for i in np.argwhere(bad)[0])
                where = f"output {number}: {bad.sum()} of {bad.size} wrong, the first at {at}"
                return f"{where}: {got[at]} instead of {want[at]}"
        return None

    return judge


def tensor_map(
    array: np.ndarray, dtype: str, box: Sequence[int], swizzle: str = "NONE", *, columns: int = 0
) -> Any:
    """Return a tensor map of all of ``array``; innermost dimension first in ``box``.

    ``columns``: elements in a row where they are not items of the array (4 and 6 bits).
    """
    dims = list(array.shape[::-1])
    dims[0] = columns or dims[0]
    return emulator.TensorMap(
        array,
        dtype=dtype,
        global_dim=dims,
        global_strides_bytes=array.strides[-2::-1],
        box_dim=box,
        element_strides=[1] * len(dims),
        interleave="NONE",
        swizzle=swizzle,
        oob_fill="NONE",
    )


def nans(*shape: int) -> np.ndarray:
    """Return a float32 output that nobody has written."""
    return np.full(shape, np.nan, np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
UE4M3 = {0x28: 0.25, 0x30: 0.5, 0x38: 1.0, 0x3C: 1.5, 0x40: 2.0}


def pack(codes: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Return two codes a byte, the even one in the low nibble."""
    low, high = codes[:, 0::2], codes[:, 1::2]
    return (high | low << 4) if high_first else (low | high << 4)


def atoms(scale: np.ndarray) -> np.ndarray:
    """Return scales [rows, columns] in atoms of 128 x 4: [rows / 128, columns / 4, 512]."""
    rows, columns = scale.shape
    parts = scale.reshape(
        rows // 128, 4, 32, columns // 4, 4
    )  # row = 128 a + 32 b + c, column = 4 d + e
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 1, 4)).reshape(
        rows // 128, columns // 4, ATOM
    )


def nvfp4(rng: np.random.Generator, rows: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [rows, k], scale bytes [rows, k / 16] and float64 values [rows, k].

    Values are multiples of 1/8: products have 6 bits behind the point, sums of 512 fit in 24 bits.
    """
    codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
    scale = rng.choice(np.array(list(UE4M3), np.uint8), (rows, k // 16))
    factor = np.vectorize(UE4M3.get)(scale)
    return codes, scale, E2M1[codes] * np.repeat(factor, 16, axis=1)
