"""The CUDA toolkit that tests compare with: its programs and headers, and how a test asks for them.

Nothing here runs on a GPU. Without any toolkit the tests skip and say what to install; a toolkit
that is there in part is an error, which test_tools.py reports.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.kit import compiled

RELEASE = (13, 0)  # the oldest whose ptxas reads PTX ISA 9.0
INSTALL = "install the CUDA toolkit 13.0 (nvcc, ptxas, headers) and g++, and put both on PATH"
HEADERS = ("cuda.h", "cuda_fp4.hpp")
DEFAULT_INCLUDE = Path("/usr/local/cuda/include")


def reason(name: str) -> str:
    """Return why a test skips that needs the program or the file ``name``."""
    return f"{name} is not there; {INSTALL}"


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason=reason("nvcc"))
needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason=reason("ptxas"))


def program(name: str) -> str:
    """Return the path of ``name``; where it is missing the test skips."""
    return shutil.which(name) or pytest.skip(reason(name))


def nvcc() -> str:
    return program("nvcc")


def ptxas() -> str:
    return program("ptxas")


def find_include() -> Path | None:
    """Return the folder of the toolkit's headers, which nvcc names if it is there."""
    places = [DEFAULT_INCLUDE]
    found = shutil.which("nvcc")
    if found:
        command = [found, "--dryrun", "-x", "cu", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        named = re.findall(r"^.*\bINCLUDES=(.*)$", told, re.M)
        places[:0] = [Path(word.strip('"')[2:]) for line in named for word in line.split()]
    return next((p for p in places if all((p / name).is_file() for name in HEADERS)), None)


def include() -> Path:
    """Return the folder of the toolkit's headers; where they are missing the test skips."""
    return find_include() or pytest.skip(reason(" or ".join(HEADERS)))


def release(name: str) -> tuple[int, ...]:
    """Return the release that nvcc or ptxas says it is of: (13, 0)."""
    command = [shutil.which(name), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    [number] = re.findall(r"release (\d+\.\d+)", told)
    return tuple(map(int, number.split(".")))


def lacking() -> list[str]:
    """Return what this machine lacks of a toolkit and its host compiler."""
    parts = {name: shutil.which(name) for name in ("nvcc", "ptxas", "g++")}
    return [name for name, at in {**parts, "headers": find_include()}.items() if at is None]


def half_found() -> str | None:
    """Return what to do about a toolkit that is there in part, or None if it is whole or absent."""
    missing = lacking()
    if not missing or {"nvcc", "ptxas", "headers"} <= set(missing):
        return None
    return f"a CUDA toolkit without {', '.join(missing)}: the tests would skip; {INSTALL}"


def assemble(text: str, arch: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Return what ptxas says about a PTX text; it is asked once."""
    command = [ptxas(), f"-arch={arch}", *flags, "kernel.ptx", "-o", "kernel.cubin"]

    def ask() -> str:
        with tempfile.TemporaryDirectory(prefix="blockscale-ptxas-") as folder:
            (Path(folder) / "kernel.ptx").write_text(text)
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        return json.dumps([done.returncode, done.stdout, done.stderr])

    said = json.loads(compiled.text(ask, compiled.version(command[0]), *command, text))
    return subprocess.CompletedProcess(command, *said)


def refused(header: str, lines: list[str], arch: str, *flags: str) -> set[int]:
    """Return the numbers of the ``lines`` that ptxas refuses in a kernel that begins as ``header``.

    ptxas names the line of every instruction that it rejects, so one module tries hundreds; errors
    of syntax alone may hide later ones.
    """
    done = assemble(header + "\n".join(lines) + "\nret;\n}\n", arch, *flags)
    output = done.stdout + done.stderr
    named = re.findall(r"line (\d+); *(?:error|fatal)", output)
    found = {int(number) - header.count("\n") - 1 for number in named}
    assert (done.returncode == 0) == (not found) == ("error" not in output), output
    assert found <= set(range(len(lines))), output
    return found
