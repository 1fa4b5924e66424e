"""What run.sh wrote on the GPU -> ../mma_h200.npz, compared with the emulator; see generate.py.

    .venv/bin/python -m tests.emulator.mma.hardware.golden build/mma_h200.bin [another.npz]

Cases that differ are printed, and those that should not differ make the exit status 1. The file is
written all the same: it says what the GPU computed, so what differs is a bug of the emulator (or of
the case), and test_hardware.py fails until it is mended.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.emulator.mma import replay

GOLDEN = Path(__file__).resolve().parents[1] / "mma_h200.npz"


def read(raw: bytes) -> dict[str, np.ndarray]:
    """The named arrays uint32 [n]: length of the name, name, n, words, and so on to the end."""
    arrays: dict[str, np.ndarray] = {}
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(raw):
            raise ValueError(f"golden.py: the file ends at byte {len(raw)}, inside an array")
        at += size
        return raw[at - size : at]

    while at < len(raw):
        name = take(int.from_bytes(take(4), "little")).decode()
        words = take(4 * int.from_bytes(take(4), "little"))
        arrays[name] = np.frombuffer(words, "<u4")
    return arrays


def main(source: str, target: str = str(GOLDEN)) -> int:
    """Write the archive; return 1 if a case differs that should not."""
    arrays = read(Path(source).read_bytes())
    np.savez_compressed(target, **arrays)
    return int(bool(replay.report(arrays)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) in (2, 3) else __doc__)
