"""The toolkit that other tests compare with is whole, or they say what to install."""

from __future__ import annotations

import re

import pytest

from tests.emulator.kit import tools


def test_the_toolkit_is_whole_or_absent():
    """Half a toolkit would let tests skip that CI has to run."""
    assert tools.half_found() is None, tools.half_found()


@pytest.mark.parametrize("name", ["nvcc", "ptxas"])
def test_the_toolkit_is_new_enough(name):
    tools.program(name)
    assert tools.release(name) >= tools.RELEASE


@pytest.mark.parametrize("present", [("nvcc", "g++"), ("ptxas",), ("nvcc", "ptxas")])
def test_half_a_toolkit_is_named(present, tmp_path, monkeypatch):
    """Stubs that do nothing, and no headers."""
    monkeypatch.setattr(tools, "DEFAULT_INCLUDE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.half_found() is None
    for name in present:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    missing = [name for name in ("nvcc", "ptxas", "g++", "headers") if name not in present]
    sentence = f"a CUDA toolkit without {', '.join(missing)}: the tests would skip; install the"
    with pytest.raises(AssertionError, match=re.escape(sentence)):
        test_the_toolkit_is_whole_or_absent()


def test_headers_alone_are_half_a_toolkit(tmp_path, monkeypatch):
    """As where the toolkit's bin folder is not on PATH."""
    for name in tools.HEADERS:
        (tmp_path / name).touch()
    monkeypatch.setattr(tools, "DEFAULT_INCLUDE", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert "without nvcc, ptxas, g++" in tools.half_found()


@pytest.mark.parametrize("ask", [tools.nvcc, tools.ptxas, tools.include])
def test_without_a_toolkit_tests_skip_and_say_what_to_install(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "DEFAULT_INCLUDE", tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.skip.Exception, match=r"install the CUDA toolkit 13.0.* on PATH"):
        ask()
