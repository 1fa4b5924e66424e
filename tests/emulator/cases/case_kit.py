"""A stand-in for the machine, and a case.json with every kind of argument, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from blockscale.emulator.report import Event, Hazard, Report

REFERENCE = np.arange(1, 13, dtype=np.float64).reshape(3, 4)
GOT = REFERENCE.astype(np.float32)


class Machine:
    """A stand-in for the emulator: remembers the call; its kernel writes what it is told."""

    def __init__(self):
        self.calls: list[SimpleNamespace] = []
        self.result = REFERENCE.astype(np.float32)
        self.hazards: list[Hazard] = []
        self.error: Exception | None = None

    def launch(self, ptx, **keywords):
        self.calls.append(SimpleNamespace(ptx=ptx, **keywords))
        if self.error is not None:
            raise self.error
        keywords["args"][1][...] = self.result
        report = Report("k", keywords["grid"], seed=keywords["seed"], cycles=10.0)
        report.events.append(Event("CTA 0 / warp 0", 0.0, 10.0, "compute"))
        for hazard in self.hazards:
            report.add(hazard)
        return report

    @staticmethod
    def tensor_map(array, **keywords):
        return SimpleNamespace(array=array, keywords=keywords)

    @staticmethod
    def struct(content, pointers):
        return SimpleNamespace(content=content, pointers=pointers)


MAP = {"global_dim": [4, 3], "global_strides_bytes": [16], "box_dim": [4, 3], "swizzle": "NONE"}


def case_data() -> dict:
    buffer = {"kind": "buffer", "role": "in", "align": 256}
    return {
        "entry": "k",
        "grid": [2, 1, 1],
        "block": [128, 1, 1],
        "cluster": [2, 1, 1],
        "dynamic_smem": 1024,
        "args": [
            buffer | {"file": "a.npy", "dtype": "bfloat16", "shape": [3, 4]},
            buffer | {"file": "c.npy", "dtype": "float32", "shape": [3, 4], "role": "out"},
            {"kind": "null", "what": "scratch"},
            {"kind": "i32", "value": -5},
            {"kind": "i64", "value": 1 << 40},
            {"kind": "u64", "value": "0xffffffffffffffff"},
            {"kind": "f32", "value": 0.1},
            {"kind": "tensormap", "file": "a.npy", "dtype": "BFLOAT16", **MAP},
            {
                "kind": "struct",
                "size": 24,
                "hex": "00" * 8 + "ff" * 16,
                "pointers": [{"offset": 8, "file": "c.npy"}, {"offset": 16, "file": "a.npy"}],
            },
        ],
        "outputs": [
            {
                "arg": 1,
                "dtype": "float32",
                "expected": "c_expected.npy",
                "expected_bits": "c_bits.npy",
                "exact": True,
                "max_rel_row_error": 0.0,
            }
        ],
    }


def write(folder: Path, data: dict) -> Path:
    np.save(folder / "a.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    np.save(folder / "c_expected.npy", REFERENCE)
    np.save(folder / "c_bits.npy", REFERENCE.astype(np.float32))
    (folder / "kernel.ptx").write_text(".version 8.8\n// beside the case\n")
    path = folder / "case.json"
    path.write_text(json.dumps(data))
    return path
