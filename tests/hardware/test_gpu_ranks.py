"""Expert parallelism on the GPUs of this host: `bench.ep.checks`, on two of them or on all.

Libraries with the kernels of `bench.ep.reference` are those of docs/ep.md; without them each rank
builds what it needs at first use.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.kit.paths import ROOT

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs of one host")
@pytest.mark.parametrize(
    ("dispatch", "combine"),
    [("bf16", "slots"), ("bf16", "sums"), ("fp8", "slots"), ("nvfp4", "slots")],
)
@pytest.mark.parametrize("ranks", sorted({2, GPUS} - {0, 1}))
def test_checks(ranks, dispatch, combine, tmp_path, pytestconfig):
    out = tmp_path / "found.json"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command += ["-m", "bench.ep.checks", *map(os.path.abspath, pytestconfig.getoption("--library"))]
    command += ["--dispatch", dispatch, "--combine", combine, "--routings", "200"]
    command += ["--calls", "10000", "--out", str(out)]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(out.read_text())
    assert {"routings", "replicas", "graph", "many calls", "failures", "death"} <= found.keys()
