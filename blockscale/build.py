"""Build: spec -> tuning log -> schedule -> LLVM object -> one ``.so`` with its manifest."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from blockscale import __version__, catalog, export, host, logs, manifest
from blockscale.lowering import compile_cpu
from blockscale.specs import Spec

LOGGER = logging.getLogger("blockscale")

committed_logs = logs.committed


def build(
    specs: Sequence[Spec | str],
    out: Path | str,
    *,
    level: str | None = None,
    logs_dirs: Sequence[Path | str] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compile ``specs`` into the library ``out`` and return its manifest.

    Args:
        specs: kernels, as specs or names (a base name stands for all its activation dtypes).
        out: the ``.so`` to write; it appears complete or not at all.
        level: CPU level to build for (`blockscale.host.LEVEL_FEATURES`); this machine's when None.
        logs_dirs: where schedules are looked up, first one first; the package's logs when None.  A
            bucket that no log knows is reported and gets the default schedule.
        meta: anything JSON, kept under "meta" in the manifest.

    Raises:
        ValueError: an unknown name or level, or no spec at all.
        LogError: a log is damaged.
        LinkError: the C compiler is missing or fails.
    """
    level = level or host.level()
    features = list(host.required_features(level))
    wanted = _resolve(specs)
    dirs = [committed_logs()] if logs_dirs is None else list(logs_dirs)
    functions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="blockscale-build-") as folder:
        objects = []
        for spec in wanted:
            compiled, functions[spec.name] = _compile(spec, level, dirs)
            objects.append(Path(folder) / f"{spec.name}.o")
            compiled.write_to_file(str(objects[-1]), "o")
        _report_misses(functions, level)
        contents = {
            "format": manifest.FORMAT,
            "blockscale": __version__,
            "abi": {
                "tvm_ffi": metadata.version("apache-tvm-ffi"),
                "blockscale": manifest.BLOCKSCALE_ABI,
            },
            "target": {"kind": "cpu", "level": level, "features": features},
            "built": {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "tvm": metadata.version("apache-tvm"),
                "cpu": host.cpu_model(),
            },
            "functions": functions,
            "meta": dict(meta or {}),
        }
        export.write_library(objects, contents, out)
    return contents


def _resolve(specs: Sequence[Spec | str]) -> list[Spec]:
    found: dict[str, Spec] = {}
    for item in specs:
        for spec in [item] if isinstance(item, Spec) else Spec.parse_all(item):
            found[spec.name] = spec
    if not found:
        raise ValueError("build: no kernel was asked for; name at least one, see 'blockscale list'")
    return list(found.values())


def _compile(spec: Spec, level: str, dirs: Sequence[Path | str]) -> tuple[Any, dict[str, Any]]:
    """Return the compiled module of ``spec`` and its manifest entry."""
    traces: dict[str, Any] = {}
    buckets = []
    for workload in catalog.workloads(spec):
        hit = logs.find(workload, level, dirs)
        bucket: dict[str, Any] = {"rows": workload.rows, "limit": workload.limit}
        bucket["tuned"] = hit is not None
        if hit is not None:
            traces[workload.tag] = hit.trace
            bucket.update(log=_short(hit.source, dirs), us=round(hit.us, 3))
        buckets.append(bucket)
    compiled = compile_cpu(catalog.exported(spec, level, traces), catalog.target(level))
    return compiled, {
        "spec": spec.to_json(),
        "base": spec.base_name,
        "params": [asdict(param) for param in spec.params()],
        "buckets": buckets,
    }


def _report_misses(functions: Mapping[str, Any], level: str) -> None:
    """Warn once of all buckets that no log knows."""
    buckets = [(name, b) for name, entry in functions.items() for b in entry["buckets"]]
    missed = [f"{name}_m{bucket['rows']}" for name, bucket in buckets if not bucket["tuned"]]
    if missed:
        listed = ", ".join(missed[:4]) + (", ..." if len(missed) > 4 else "")
        LOGGER.warning(
            "%d of %d workloads have no log for cpu-%s and get default schedules: %s",
            len(missed),
            len(buckets),
            level,
            listed,
        )


def _short(source: str, dirs: Sequence[Path | str]) -> str:
    """``source`` relative to its log folder: a library does not tell where it was built."""
    for root in dirs:
        prefix = f"{Path(root)}/"
        if source.startswith(prefix):
            return source.removeprefix(prefix)
    return Path(source).name
