"""Mutates a library, and inspects and loads what comes out: a batch of `test_library_fuzz`.

``python -m tests.runtime.fuzz_libraries LIB.so SEED COUNT`` may use 2 GiB beside what torch takes
(a CUDA build alone 3 GiB of addresses).  It names every mutation before it tries it, so the last
line tells which one ended the process.
"""

from __future__ import annotations

import io
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from blockscale.base.errors import LibraryError
from blockscale.base.manifest import parse
from blockscale.cli import command
from blockscale.runtime.library import open_library
from tests.kit.fuzz import addresses
from tests.kit.library_seal import image_and_text, seal

MOST_BYTES = 2 << 30
MOST_SECONDS = 10
NASTY: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 2**31, 2**63, 2**64, 10**400, "", [], {}, [[]], {"": None}),
    *(
        "\x1b[2J\x1b]0;owned\x07",
        "\x9b31m",
        "\u202egnp.exe",
        "a\nblockscale: all is well",
        "\ud800",
    ),
    *("x" * 100_000, "rows // 0", "1+" * 50_000 + "1", "(" * 3000, "rows", "\0", "__class__"),
    *([0] * 10_000, ["rows"] * 1000, float("nan"), float("inf"), "NaN", "y", "float32", "cuda"),
]


def deep(levels: int) -> Any:
    made: Any = 0
    for i in range(levels):
        made = [made] if i % 2 else {"a": made}
    return made


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) within a JSON value."""
    found, waiting = [], [value]
    while waiting:
        inner = waiting.pop()
        keys = inner if isinstance(inner, dict) else range(len(inner))
        for key in list(keys):
            found.append((inner, key))
            if isinstance(inner[key], (dict, list)):
                waiting.append(inner[key])
    return found


def change_manifest(rng: Random, text: bytes) -> bytes:
    contents = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = places(contents)
        if not at:
            break
        inner, key = rng.choice(at)
        action = rng.choice(("set", "set", "swap", "drop", "key", "copy", "deep"))
        if action == "drop":
            del inner[key]
        elif action == "key" and isinstance(inner, dict):
            inner[rng.choice(["", "x", "\x1b[2J", "output", "alias", "a b", "\ud800"])] = inner[key]
        elif action == "copy" and isinstance(inner, list):
            inner += [inner[key]] * rng.choice((1, 2, 300))
        elif action == "swap":
            other, place = rng.choice(at)
            with suppress(LookupError):  # which an earlier change took out
                inner[key] = json.loads(json.dumps(other[place]))
        elif action == "deep":
            inner[key] = deep(rng.choice((10, 70, 400)))
        else:
            inner[key] = deepcopy(rng.choice(NASTY))
    return json.dumps(contents).encode()


def change_bytes(rng: Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 3, 20))):
        at, count = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 400))
        new = rng.randbytes(rng.choice((0, count, count, 2 * count)))
        data = data[:at] + new + data[at + count :]
    return data


def change_image(rng: Random, image: bytes) -> bytes:
    """Cut the image off, or let its header and tables point elsewhere."""
    if rng.random() < 0.4:
        return image[: rng.randrange(len(image))]
    changed, segments = bytearray(image), int.from_bytes(image[56:58], "little")
    fields = [(32, 8), (40, 8), (54, 2), (56, 2), (58, 2), (60, 2)]
    fields += [(64 + 56 * i + at, 8) for i in range(segments) for at in (8, 32)]
    for _ in range(rng.choice((1, 1, 2))):
        at, size = rng.choice(fields)
        value = rng.choice(
            (2**63, 2**64 - 1, len(image), 2 * len(image), 2**40, rng.getrandbits(64))
        )
        changed[at : at + size] = (value % 256**size).to_bytes(size, "little")
    return bytes(changed)


def mutated(rng: Random, library: bytes) -> tuple[str, bytes]:
    image, text = image_and_text(library)
    kind = rng.choice(("bytes", "manifest", "manifest", "text", "image", "length"))
    if kind == "bytes":
        return kind, change_bytes(rng, library)
    if kind == "manifest":
        text = change_manifest(rng, text)
    elif kind == "text":
        text = change_bytes(rng, text) if rng.random() < 0.9 else b"[" * 200_000
    elif kind == "image":
        image = change_image(rng, image)
    length = rng.choice((0, len(text) // 2, 2**32, 2**63, 2**64 - 1)) if kind == "length" else None
    return kind, seal(image, text, length)


def inspect(path: Path, *options: str) -> str:
    """Run ``blockscale inspect`` and return "shown" or "refused"."""
    out = io.StringIO()
    sys.argv[1:] = ["inspect", str(path), *options]
    try:
        with redirect_stdout(out), redirect_stderr(out):
            command.main()
    except SystemExit as stop:
        status = stop.code
    text = out.getvalue()
    assert "Traceback" not in text
    assert text.replace("\n", "").isprintable(), ascii(text)
    return {0: "shown", 2: "refused"}[status]


def load(path: Path) -> str:
    try:
        library = open_library(path)
    except LibraryError:
        return "refused"
    repr(library)
    return "loaded"


def main(library: bytes, seed: str, count: int) -> None:
    most = addresses() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            kind, data = mutated(Random(f"{seed} {i}"), library)
            print(f"seed {seed!r}, mutation {i}, {kind}", flush=True)
            path = Path(folder) / f"{i}.so"
            path.write_bytes(data)
            start = time.monotonic()
            shown = inspect(path)
            assert inspect(path, "--json") == shown
            loaded = load(path)
            assert time.monotonic() - start < MOST_SECONDS
            if kind == "bytes" and data != library:
                assert (shown, loaded) == ("refused", "refused")
            if shown == "shown":
                parse(data, "again")
            else:
                assert loaded == "refused"
            seen[f"{kind}: {shown}, {loaded}"] += 1
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_bytes(), sys.argv[2], int(sys.argv[3]))
