"""A process that has scheduled nothing, for traces that name intrinsics: a fork of one per run."""

import atexit
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

from tests.kit.paths import without_torch

SERVER = """
import json, os, sys
from blockscale.tir import intrin
from tvm.s_tir import TensorIntrin
for line in sys.stdin:
    child = os.fork()
    if not child:
        names = json.loads(line)
        intrin.register_named(repr(names))
        for name in names:
            TensorIntrin.get(name)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    """Return the process that imports the compiler, once, and forks for each question."""
    pipe = subprocess.PIPE
    options = {"stdin": pipe, "stdout": pipe, "text": True, "env": without_torch()}
    made = subprocess.Popen([sys.executable, "-c", SERVER], **options)
    atexit.register(made.communicate)
    return made


def registers(names: Iterable[str]) -> bool:
    """Return whether a process registers the intrinsics that a trace with ``names`` needs."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(sorted(names)), file=server.stdin, flush=True)
    return server.stdout.readline() == "0\n"
