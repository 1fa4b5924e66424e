"""Stands in for what measures MoE GEMMs on a GPU: a time made of the plan, or an error."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from blockscale.tuning.worker import Measurement, Timing

MACHINE = {"gpu": "Fake GPU", "driver": "1.2", "cuda": "13.0", "torch": "0", "l2_bytes": 1 << 20}


def describe(arch: str) -> dict[str, Any]:
    return MACHINE


def seconds(plan: dict[str, Any], tokens: int) -> float:
    """Return a time that is the same for the same plan and tokens."""
    text = json.dumps([sorted(plan.items()), tokens]).encode()
    return 1e-3 + 1e-9 * int(hashlib.sha256(text).hexdigest()[:4], 16)


def measure(library: str, gemm: Any, tokens: int, timing: Timing, reference: str) -> Measurement:
    plan = json.loads(Path(library).read_text())
    assert Path(reference).exists()
    assert plan["fmt"] == gemm.fmt
    return Measurement((seconds(plan, tokens),) * 3)


def export(module: Any, target: str, out: Path) -> None:
    """Write the kernel's decisions alone: nothing is compiled."""
    out.write_text(json.dumps(plan_of(module["main"])))


def plan_of(func: Any) -> dict[str, Any]:
    """Return format, tile and depth of the kernel of a scheduled GEMM."""
    from dataclasses import asdict

    from blockscale.catalog.moe import tile_of
    from blockscale.lower.warp.derive import derive

    made = derive(func)
    return {"fmt": made.form.fmt, "stages": made.stages, **asdict(tile_of(made))}
