"""What compilers made, kept in ``.cache`` of the checkout under a hash of all that it is made of.

``make clean`` removes it.  A compiler counts by what it says of itself, a source by its text: who
asks names every text that is read, and every flag.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".cache" / "emulator-test"
ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH")


def kept(make: Callable[[], str], *parts: str) -> str:
    """Return the text that ``make`` makes of ``parts``, which are all that it depends on."""
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    path = FOLDER / key
    if path.is_file():
        return path.read_text()
    text = make()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=FOLDER, prefix=".new-", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
    return text


@cache
def version(program: str) -> str:
    """Return what a compiler of the CUDA toolkit says of itself, and what it takes from outside."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return "\n".join([program, told, *(os.environ.get(name, "") for name in ENVIRONMENT)])
