"""Build: spec -> tuning log -> schedule -> machine code -> one ``.so`` with its manifest.

A library is for one CPU level, or for one or more GPU architectures; no GPU is needed to build it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from blockscale import catalog
from blockscale.base import abi, files, host, manifest, targets
from blockscale.base.version import VERSION
from blockscale.building import export, logs
from blockscale.building.export_cuda import write_cuda_library
from blockscale.lower import cuda, nvcc
from blockscale.lower.code import FunctionCode
from blockscale.lower.cpu import compile_cpu
from blockscale.specs import Spec

LOGGER = logging.getLogger("blockscale")

committed_logs = logs.committed


def build(
    specs: Sequence[Spec | str],
    out: Path | str,
    *,
    level: str | Sequence[str] | None = None,
    logs_dirs: Sequence[Path | str] | None = None,
    meta: Mapping[str, Any] | None = None,
    ptx: bool = False,
) -> dict[str, Any]:
    """Compile ``specs`` into the library ``out`` and return its manifest.

    Args:
        specs: kernels, as specs or names (a base name stands for all its activation dtypes).
        out: the ``.so`` to write; it appears complete or not at all.
        level: a CPU level to build for (`blockscale.base.targets.CPU_TARGETS`), or one or more GPU
            architectures (`blockscale.base.targets.GPU_TARGETS`); this machine's CPU when None.
        logs_dirs: where schedules are looked up, first one first; the package's logs when None.  A
            bucket that no log knows is reported and gets the default schedule.
        meta: anything JSON, kept under "meta" in the manifest.
        ptx: embed PTX, which the driver (or the emulator) compiles, instead of machine code.

    Raises:
        ValueError: an unknown name or level, or no spec at all.
        LogError: a log is damaged.
        LinkError: the C compiler is missing or fails.
        CompileError: the CUDA compiler is missing or fails.
        OSError: ``out`` cannot be written: this is checked first.
    """
    levels = [level or host.level()] if level is None or isinstance(level, str) else [*level]
    kinds = {targets.kind(name) for name in levels}
    if len(kinds) > 1 or (kinds == {"cpu"} and len(levels) > 1):
        raise ValueError(
            f"build: {', '.join(levels)} do not go into one library, which is for one CPU level or "
            "for GPU architectures; build one library for each"
        )
    wanted = _resolve(specs)
    export.check_folder(Path(out))
    dirs = [committed_logs()] if logs_dirs is None else list(logs_dirs)
    if kinds == {"cuda"}:
        return _build_cuda(wanted, [*dict.fromkeys(levels)], Path(out), dirs, dict(meta or {}), ptx)
    return _build_cpu(wanted, levels[0], Path(out), dirs, dict(meta or {}))


def _build_cpu(
    wanted: Sequence[Spec],
    level: str,
    out: Path,
    dirs: Sequence[Path | str],
    meta: dict[str, Any],
) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    with files.temporary_folder() as folder:
        objects = []
        for spec in wanted:
            traces, buckets = _traces(spec, level, dirs)
            functions[spec.name] = _entry(spec, level, buckets)
            compiled = compile_cpu(catalog.exported(spec, level, traces), catalog.target(level))
            objects.append(folder / f"{spec.name}.o")
            compiled.write_to_file(str(objects[-1]), "o")
        _report_misses(wanted, {level: functions}, targets.log_folder(level))
        features = sorted(targets.cpu(level).features)
        target = {"kind": "cpu", "level": level, "features": features}
        contents = contents_of(target, {"cpu": host.cpu_model()}, functions, meta)
        export.write_library(objects, contents, out)
    return contents


def _build_cuda(
    wanted: Sequence[Spec],
    archs: Sequence[str],
    out: Path,
    dirs: Sequence[Path | str],
    meta: dict[str, Any],
    ptx: bool,
) -> dict[str, Any]:
    functions: dict[str, Any] = {}
    jobs = []
    for spec in wanted:
        entries = []
        for arch in archs:
            traces, buckets = _traces(spec, arch, dirs)
            entries += [{**bucket, "arch": arch} for bucket in buckets]
            jobs.append((spec.name, arch, catalog.cuda_source(spec, arch, traces)))
        functions[spec.name] = _entry(spec, archs[0], entries)

    def compiled(job: tuple[str, str, cuda.Source]) -> FunctionCode:
        name, arch, source = job
        return cuda.compile_sources(source, name, arch, ptx=ptx)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for processes of the compiler
        codes = list(pool.map(compiled, jobs))
    _report_misses(wanted, dict.fromkeys(archs, functions), ", ".join(archs))
    target = {"kind": "cuda", "level": "+".join(archs), "features": [], "archs": [*archs]}
    contents = contents_of(target, {"nvcc": nvcc.version()}, functions, meta)
    write_cuda_library(codes, contents, out)
    return contents


def contents_of(
    target: dict[str, Any], built: dict[str, Any], functions: dict[str, Any], meta: dict[str, Any]
) -> dict[str, Any]:
    """Return the manifest."""
    return {
        "format": manifest.FORMAT,
        "blockscale": VERSION,
        "abi": {
            "tvm_ffi": metadata.version("apache-tvm-ffi"),
            "facts": abi.declared(),
            "blockscale": manifest.BLOCKSCALE_ABI,
        },
        "target": target,
        "built": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "tvm": metadata.version("apache-tvm"),
            **built,
        },
        "functions": functions,
        "meta": meta,
    }


def _resolve(specs: Sequence[Spec | str]) -> list[Spec]:
    found: dict[str, Spec] = {}
    for item in specs:
        for spec in [item] if isinstance(item, Spec) else Spec.parse_all(item):
            found[spec.name] = spec
    if not found:
        raise ValueError("build: no kernel was asked for; name at least one, see 'blockscale list'")
    return list(found.values())


def _traces(
    spec: Spec, level: str, dirs: Sequence[Path | str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the winning trace of every bucket that a log knows, and the manifest's buckets."""
    traces: dict[str, Any] = {}
    buckets = []
    for workload in catalog.workloads(spec, level):
        found = (logs.find(w, level, dirs) for w in (workload, *workload.kin(level)))
        hit = next((hit for hit in found if hit is not None), None)
        bucket: dict[str, Any] = {"rows": workload.rows, "limit": workload.limit(level)}
        bucket["tuned"] = hit is not None
        if hit is not None:
            traces[workload.tag] = hit.trace
            time = "us" if hit.model is None else "modelled_us"
            bucket |= {"log": _short(hit.source, dirs), time: round(hit.us, 3)}
        buckets.append(bucket)
    return traces, buckets


def _entry(spec: Spec, level: str, buckets: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest's entry of a function."""
    alignments = catalog.road(spec, level).alignments(spec)
    params = [param.to_manifest() for param in spec.params()]
    for param in params:
        if param["name"] in alignments:
            param["align"] = alignments[param["name"]]
    return {
        "spec": spec.to_json(),
        "base": spec.base_name,
        "params": params,
        "buckets": buckets,
    }


def _report_misses(specs: Sequence[Spec], levels: Mapping[str, Any], where: str) -> None:
    """Warn once of all workloads that no log knows; ``levels``: the functions of each."""
    known: list[tuple[str, bool]] = []
    for level, functions in levels.items():
        for spec in specs:
            buckets = functions[spec.name]["buckets"]
            own = [bucket for bucket in buckets if bucket.get("arch", level) == level]
            tags = [workload.tag for workload in catalog.workloads(spec, level)]
            end = f" ({level})" if len(levels) > 1 else ""
            known += [(tag + end, b["tuned"]) for tag, b in zip(tags, own, strict=True)]
    missed = [tag for tag, tuned in known if not tuned]
    if missed:
        listed = ", ".join(missed[:4]) + (", ..." if len(missed) > 4 else "")
        LOGGER.warning(
            "%d of %d workloads have no log for %s and get default schedules: %s",
            len(missed),
            len(known),
            where,
            listed,
        )


def _short(source: str, dirs: Sequence[Path | str]) -> str:
    """``source`` relative to its log folder: a library does not tell where it was built."""
    for root in dirs:
        prefix = f"{Path(root)}/"
        if source.startswith(prefix):
            return source.removeprefix(prefix)
    return Path(source).name
