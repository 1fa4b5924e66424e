"""Tuning logs that are sound, but for some changes; found, checked, committed and tuned on."""

from __future__ import annotations

import json
import lzma
import random
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from blockscale.building import logs, records
from blockscale.building.commit import commit
from blockscale.building.logs import LogError
from blockscale.building.space import Space, replay
from blockscale.building.store import Store, folder_of
from tests.kit.fake_workload import FakeWorkload, from_meta
from tests.kit.fuzz import changed_bytes, changed_json

ERRORS = (LogError,)
LEVEL = "avx2"
WORKLOAD = FakeWorkload(rows=4)


@cache
def sound() -> dict[str, bytes]:
    """The files of a work folder with three trials."""
    with tempfile.TemporaryDirectory() as name:
        place = folder_of(Path(name), "row_sum", LEVEL)
        store = Store(place, print)
        entry, _ = store.open(WORKLOAD, LEVEL)
        space = Space(WORKLOAD.mod(LEVEL), WORKLOAD.space(LEVEL))
        for number, point in enumerate(space.all()[:3]):
            trace = replay(WORKLOAD.mod(LEVEL), space.trace(point)).trace
            line = {"workload": WORKLOAD.tag, "us": 5.0, "kind": "search", "failed": False}
            store.append(entry, trace, [(5 + number) * 1e-6], WORKLOAD.target(LEVEL), line)
        return {path.name: path.read_bytes() for path in place.glob("[!.]*")}


def changed_line(rng: random.Random, line: bytes) -> bytes:
    value: Any = json.loads(line)
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = changed_json(rng, value)
    return json.dumps(value).encode()


def changed(rng: random.Random, name: str, data: bytes) -> bytes:
    """One of the files with something changed in it."""
    kind = rng.random()
    if kind < 0.3:
        return changed_bytes(rng, data)
    if name == records.META:
        return changed_line(rng, data)
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    if kind < 0.8:
        lines[at] = changed_line(rng, lines[at])
    elif kind < 0.9:
        lines[at:at] = [rng.choice(lines)] * rng.choice([1, 3, 50])
    else:
        del lines[at]
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


def named(entry: dict[str, Any]) -> FakeWorkload:
    """The workload of an entry; unlike a spec, that of the tests would take any sizes."""
    made = from_meta(entry)
    if made != WORKLOAD:
        raise ValueError("the entry names no kernel")
    return made


def attempt(rng: random.Random, folder: Path) -> str:
    files = dict(sound())
    for name in rng.sample(sorted(files), rng.choice([1, 1, 2])):
        files[name] = changed(rng, name, files[name])
    if rng.random() < 0.05:
        del files[rng.choice(sorted(files))]
    place = folder_of(folder / "logs", "row_sum", LEVEL)
    place.mkdir(parents=True)
    packed = rng.random()
    if packed < 0.3 and records.WORKLOADS in files:
        data = lzma.compress(files.pop(records.WORKLOADS), preset=0)
        if packed < 0.02:  # each of 10 kB; 6 GB in all
            data = lzma.compress(bytes(64 << 20), preset=0) * 100
        elif packed < 0.1:
            data = changed_bytes(rng, data)
        files[records.PACKED_WORKLOADS] = data
    for name, data in files.items():
        (place / name).write_bytes(data)
    logs.check([folder / "logs"], named)  # tells of all damage, and raises none
    logs.entries(folder / "logs")
    ends = []
    for step in (
        lambda: logs.find(WORKLOAD, LEVEL, [folder / "logs"]),
        lambda: commit(folder / "logs", folder / "committed"),
        lambda: Store(place, lambda text: None).open(WORKLOAD, LEVEL),
    ):
        with suppress(LogError):
            step()
            ends.append("used")
    return f"{len(ends)} of 3 used it"
