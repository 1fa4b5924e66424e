"""The committed cases of other compilers' kernels, unpacked into a folder with all their arrays.

`tests/golden/ptx_cases` holds kernels and inputs; the expected outputs follow from the inputs, and
digests say that they are the ones that came with the cases.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from tests.reference import core as reference

FOLDER = Path(__file__).resolve().parents[2] / "golden" / "ptx_cases"
NAMES = ("tri_nvfp4", "tri_mxfp8_mxfp4")
DIGESTS = {  # sha256 of the float64 expected outputs, the first eight bytes
    "tri_nvfp4": "c31e2499aea035b6",
    "tri_nvfp4_wide": "d548763c3c08ec29",
    "tri_mxfp8_mxfp4": "81d5d0d6ca295951",
    "tri_mxfp8_mxfp4_wide": "891bff5d4fb810e6",
}


def operand(codes: np.ndarray, scales: np.ndarray, kind: str, scale_kind: str) -> np.ndarray:
    """Return the values of an operand [rows, K] times its block scales."""
    if kind == "e2m1":
        values = reference.e2m1_decode(reference.unpack(codes))
    else:
        values = reference.e4m3_decode(codes)
    decode = reference.e4m3_decode if scale_kind == "ue4m3" else reference.ue8m0_decode
    return values * np.repeat(decode(scales), values.shape[1] // scales.shape[1], axis=1)


def expected(arrays: dict[str, np.ndarray], problem: dict, suffix: str) -> np.ndarray:
    """Return C = (A * SFA) (B * SFB)^T in float64."""
    a, b, sfa, sfb = (arrays[name + suffix] for name in ("a", "b", "sfa", "sfb"))
    scale = problem["scale"]
    return operand(a, sfa, problem["A"], scale) @ operand(b, sfb, problem["B"], scale).T


def unpack(name: str, folder: Path) -> Path:
    """Write a case with all its .npy files into a new folder; return the folder."""
    source, made = FOLDER / name, folder / name
    made.mkdir()
    for file in ("kernel.ptx", "case.json", "case_wide.json"):
        shutil.copyfile(source / file, made / file)
    problem = json.loads((source / "case.json").read_text())["problem"]
    with np.load(source / "inputs.npz") as stored:
        arrays = dict(stored)
    for suffix in ("", "_wide"):
        arrays[f"c_expected{suffix}"] = expected(arrays, problem, suffix)
    arrays["c_expected_bits"] = arrays["c_expected"].astype(np.float32)
    arrays["c_init"] = np.full((problem["M"], problem["N"]), 0xFFFFFFFF, np.uint32).view(np.float32)
    for key, array in arrays.items():
        np.save(made / f"{key}.npy", array)
    return made


def digest(array: np.ndarray) -> str:
    """Return the start of the sha256 of an array's bytes."""
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]
