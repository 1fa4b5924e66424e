"""A reader that behaves in another way with each input, for the test of `fuzz`."""

from __future__ import annotations

import os
import random
from pathlib import Path

ERRORS = (ValueError,)


def attempt(rng: random.Random, folder: Path) -> str:
    """Do what the input's number says."""
    match folder.name:
        case "1":
            raise ValueError("refused")
        case "2":
            raise KeyError("our own mistake")
        case "3":
            bytearray(3 << 30)
        case "4":
            raise ValueError("x" * 20_000)
        case "5":
            os.abort()
    return "read"
