"""Kernel libraries under several releases of apache-tvm-ffi: ``python -m tests.kit.ffi_matrix``.

Builds two libraries with this environment, one for the CPU and one for a GPU, and calls with their
results.  Then, for each release, an environment of its own that has it, torch and what a program
needs that only loads (no apache-tvm), made by pip; in it `ffi_smoke` loads both and compares every
result, bit for bit.  One line a release; ends with status 1 if one failed.

Needs a package index, some minutes, and 2 GB of disk for each release (``--keep`` keeps them).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.paths import ROOT

VERSIONS = ("0.1.11", "0.1.14.post0", "0.1.15.post2")
"""The one that vLLM 0.33 pins, the one that builds, the newest."""

NEEDED = ("torch", "numpy", "click", "rich")
"""What loads and calls kernels, as pyproject.toml has it, of the versions in constraints.txt."""

SPECS = (
    *("quantize_nvfp4", "quantize_mxfp4_bf16", "quantize_nvfp4_128x4_bf16"),
    *("dequantize_nvfp4_bf16", "swizzle_128x4", "linear_nvfp4_n64_k128_bf16"),
    *("add_rmsnorm_nvfp4_h256_bf16", "silu_and_mul_nvfp4_bf16"),
    "quantize_nvfp4_token_4over6_mse_128x4_fi_bf16",
)
GPU_SPECS = ("quantize_nvfp4_bf16", "add_rmsnorm_nvfp4_h256_bf16")
ARCHS = ("sm_90a",)


def _calls() -> list[tuple[str, str, list[object], dict[str, object]]]:
    """Return calls: where a function is found, its name, and its arguments."""
    import torch

    import blockscale as bs
    from blockscale.compat.flashinfer import NVFP44Over6Config

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 256, generator=generator)
    half, g = x.bfloat16(), torch.tensor([0.01])
    packed, scale = bs.quantize(half, "nvfp4", g)
    weight = torch.randn(64, 128, generator=generator)
    codes = bs.quantize(weight, "nvfp4")
    recipe = {"per_token_activation": True, "nvfp4_4over6": NVFP44Over6Config(err_mode="MSE")}
    return [
        ("bs", "quantize", [x, "nvfp4", g], {}),
        ("bs", "quantize", [half, "mxfp4"], {}),
        ("bs", "quantize", [half, "nvfp4", g, "128x4"], {}),
        ("bs", "dequantize", [packed, scale, "nvfp4", g], {}),
        ("bs", "swizzle_scales", [scale], {}),
        ("bs", "linear", [half[:, :128].contiguous(), *codes], {}),
        ("bs", "add_rmsnorm_fp4quant", [half, half.clone(), torch.ones(256).bfloat16()], {}),
        ("bs", "silu_and_mul_fp4quant", [half], {}),
        ("library", "dequantize_nvfp4_bf16", [packed, scale, g], {}),
        ("flashinfer", "nvfp4_quantize", [half, 1 / 2688], recipe),
    ]


def make(folder: Path) -> None:
    """Write the libraries, and calls with their results."""
    import copy

    import torch

    import blockscale as bs
    from blockscale.building.builder import build
    from blockscale.compat import flashinfer

    build(SPECS, folder / "kernels.so", level="plain")
    build(GPU_SPECS, folder / "kernels-gpu.so", level=ARCHS)
    doors = {"bs": bs, "flashinfer": flashinfer, "library": bs.load(folder / "kernels.so")}
    calls = []
    for door, name, given, named in _calls():
        place = doors[door]
        function = place[name] if door == "library" else getattr(place, name)
        made = function(*copy.deepcopy(given), **named)
        calls.append((door, name, given, named, list(made) if isinstance(made, tuple) else [made]))
    torch.save(calls, folder / "calls.pt")


def environment(folder: Path, version: str) -> Path:
    """Return the Python of an environment with that release, without the compiler."""
    python = folder / version / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / version)], check=True)
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("apache-tvm")
    ]
    constraints = folder / f"{version}.txt"
    constraints.write_text("\n".join([*pins, f"apache-tvm-ffi=={version}"]))
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    subprocess.run([*pip, "-c", str(constraints), *NEEDED, "apache-tvm-ffi"], check=True)
    return python


def main() -> int:
    """Run the matrix; return the number of releases that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=", ".join(VERSIONS))
    parser.add_argument("--keep", type=Path, help="make the environments here, and leave them")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder, kept = Path(temporary), options.keep or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        make(folder)
        paths = {**os.environ, "PYTHONPATH": str(ROOT)}
        for version in options.versions:
            smoke = [str(ROOT / "tests" / "kit" / "ffi_smoke.py"), str(folder), version]
            done = subprocess.run(
                [environment(kept, version), *smoke], env=paths, text=True, capture_output=True
            )
            said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            print(
                f"{version}: {'ok' if done.returncode == 0 else 'FAILED'}: {said[-1]}", flush=True
            )
            failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
