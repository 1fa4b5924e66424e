"""Asynchronous work meets few seeds by default."""

from __future__ import annotations

import pytest

from tests.emulator.kit import async_ptx
from tests.emulator.kit.exhaustive import EXHAUSTIVE

FEW_CAUGHT, FEW_SILENT = 4, 6


@pytest.fixture(params=["few seeds", pytest.param("all seeds", marks=EXHAUSTIVE)])
def seeds(request, monkeypatch):
    """Let `async_ptx.caught` and `silent` run few seeds where a test names none, or all."""
    if request.param == "few seeds":
        monkeypatch.setattr(async_ptx, "CAUGHT", FEW_CAUGHT)
        monkeypatch.setattr(async_ptx, "SILENT", FEW_SILENT)
