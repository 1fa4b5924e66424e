"""Run pytest again and again, and import modules once: ``python tests/kit/forked.py torch tvm``.

Reads one JSON object a line: ``cwd``, ``arguments`` of pytest, ``environ``, ``limit_s``.  Each runs
in a fork that has imported nothing of this project.  The answer is one line, too: ``status`` (null
beyond the limit), ``test``, the first that failed, or else the one that ran last, ``skipped``, how
many were, and ``output``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import Any, BinaryIO

POLL_S = 0.02


class Told:
    """Writes down what becomes of tests, so that it is known of a process that crashed, too."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.failed, self.skipped = False, 0

    def _tell(self, test: str) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.file.write(json.dumps({"test": test, "skipped": self.skipped}).encode())
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name the test that runs, while none has failed."""
        if not self.failed:
            self._tell(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Name the first that failed."""
        self.skipped += report.skipped and not hasattr(report, "wasxfail")
        if not self.failed:
            self.failed = report.failed
            self._tell(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Name a module that could not be imported."""
        self.pytest_runtest_logreport(report)


def _test(cwd: str, arguments: list[str], environ: dict[str, str], out: int, told: Told) -> None:
    """Be the fork: run pytest, and end."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    status = 70  # of a fork that could not run pytest
    try:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[0] = cwd
        sys.argv = ["pytest", *arguments]
        import pytest

        status = int(pytest.main(arguments, plugins=[told]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def answered(
    cwd: str, arguments: list[str], environ: dict[str, str], limit_s: float
) -> dict[str, Any]:
    """Run pytest in a fork, for at most ``limit_s`` seconds; return what the module says."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as told:
        pid = os.fork()
        if not pid:
            _test(cwd, arguments, environ, output.fileno(), Told(told))
        status, until = None, time.monotonic() + limit_s
        while status is None and time.monotonic() < until:
            done, code = os.waitpid(pid, os.WNOHANG)
            if done:
                status = os.waitstatus_to_exitcode(code)
            else:
                time.sleep(POLL_S)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        output.seek(0)
        told.seek(0)
        tests = json.loads(told.read() or '{"test": null, "skipped": 0}')
        return tests | {"status": status, "output": output.read().decode(errors="replace")}


def main() -> None:
    """Answer until the input ends."""
    for name in ("pytest", *sys.argv[1:]):
        __import__(name)
    for line in sys.stdin:
        print(json.dumps(answered(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
