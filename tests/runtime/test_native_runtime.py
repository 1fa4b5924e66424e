"""The C runtime of a library by itself: launches, barriers, errors, workspaces."""

import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("native_runtime.c")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")


@pytest.mark.parametrize("flags", [("-O2",), SANITIZE], ids=["fast", "sanitized"])
def test_native_runtime(tmp_path, flags):
    program = tmp_path / "native_runtime"
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-fopenmp", *flags, SOURCE, "-o", program]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if flags is SANITIZE and "cannot find" in built.stderr:
        pytest.skip(f"this compiler comes without the sanitizers: {built.stderr.strip()}")
    assert built.returncode == 0, built.stderr
    assert not built.stderr, built.stderr
    environment = {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0"}
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, timeout=120, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr
