"""Processes that are started after CUDA was used: spawned ones work, forked ones say why not."""

import os
import subprocess
import sys

import pytest
import torch

from tests.kit.pairwise import few
from tests.kit.paths import ROOT

SCRIPT = """
import multiprocessing, os, signal, sys
import torch
import blockscale as bs

def tensors(device):
    scale = torch.arange(60, dtype=torch.uint8).reshape(12, 5).to(device)
    return scale, torch.empty(128, 8, dtype=torch.uint8, device=device)

def work(device, method, loads):
    signal.alarm(100)
    if loads:
        bs.load(loads)
    scale, out = GIVEN if method == "inherited" else tensors(device)
    bs.swizzle_scales(scale, out=out)
    want = bs.swizzle_scales(scale.cpu())
    assert torch.equal(out.cpu(), want)
    print("worked", flush=True)

if __name__ == "__main__":
    device, method, library = sys.argv[1:]
    if library:
        bs.load(library)
    GIVEN = tensors(device)
    bs.swizzle_scales(GIVEN[0], out=GIVEN[1])
    if device == "cuda":
        torch.cuda.synchronize()
    context = multiprocessing.get_context("spawn" if method == "spawn" else "fork")
    child = context.Process(target=work, args=(device, method, library))
    child.start()
    child.join()
    bs.swizzle_scales(GIVEN[0], out=GIVEN[1])  # the parent goes on
    assert torch.equal(GIVEN[1].cpu(), bs.swizzle_scales(GIVEN[0].cpu()))
    print("child", child.exitcode)
"""


def started(tmp_path, config, device, method):
    """Run the script, which spawns or forks a child; return all that both said."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    library = (*config.getoption("--library"), "")[0]
    done = subprocess.run(
        [sys.executable, str(path), device, method, library],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("method", few(["spawn", "fork", "inherited"], every=3))
def test_on_the_cpu(tmp_path, pytestconfig, method):
    """The script is right: every child works there."""
    said = started(tmp_path, pytestconfig, "cpu", method)
    assert said.split()[-3:] == ["worked", "child", "0"], said


@pytest.mark.gpu
def test_a_spawned_child_works(tmp_path, pytestconfig):
    assert torch.cuda.is_available()
    said = started(tmp_path, pytestconfig, "cuda", "spawn")
    assert said.split()[-3:] == ["worked", "child", "0"], said


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fork", "inherited"])
def test_a_forked_child_is_refused_at_once(tmp_path, pytestconfig, method):
    """By torch where the child makes tensors, by the library where it has its parent's."""
    said = started(tmp_path, pytestconfig, "cuda", method)
    assert "spawn" in said
    assert "worked" not in said
    assert said.split()[-2:] == ["child", "1"], said
