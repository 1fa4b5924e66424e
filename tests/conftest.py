"""What every test shares: fixed seeds, the gpu marker, one kernel cache per checkout.

Kernels that tests build on demand are kept in ``.cache/blockscale-test`` of this checkout, never in
the user's own cache, and stay there between runs: the first run builds, later ones are fast.  What
compilers make of anything else lies in ``.cache/test-compiled`` (`tests.kit.compiled`), and what
emulated launches did (`tests.kit.emulated`).  ``make clean`` removes all; ``--fresh`` begins with
empty caches.

Tests marked ``exhaustive`` (full products of parameters, many seeds, long fuzzing) are left out
without ``--exhaustive``; so are those that a room's ``exhaustive.txt`` names, because cheaper ones
run the same code (`tests.kit.cover` measures, chooses and writes them).
"""

import gc
import itertools
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Workers share the cores: threads that wait must not spin, which OpenBLAS's always do (a third of
# the time of tests that emulate GEMMs).  Read when torch and numpy are loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Nor does a test need torch's AMX, which ends processes on some machines (blockscale.demo.timing).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import pytest

import blockscale
from tests.kit import compiled, cover, emulated
from tests.kit.paths import ROOT


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the tests of the ops run their kernels on a GPU."""
    if not pluginmanager.hasplugin("timeout"):  # as where only the tests of hardware run
        parser.addini("timeout", "seconds of a test: means nothing without pytest-timeout")
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where kernels run")
    parser.addoption("--library", action="append", default=[], help="kernel library to load first")
    parser.addoption("--exhaustive", action="store_true", help="run what is marked exhaustive, too")
    parser.addoption("--listed", action="store_true", help="run what exhaustive.txt names, too")
    parser.addoption("--fresh", action="store_true", help="compile all: begin with empty caches")


def pytest_configure(config: pytest.Config) -> None:
    """Set what child processes inherit, before any test module is imported."""
    gc.disable()  # until all are
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: means nothing without pytest-timeout")
    if config.getoption("--fresh") and not hasattr(config, "workerinput"):  # workers inherit it
        os.environ["BLOCKSCALE_TEST_CACHE"] = tempfile.mkdtemp(prefix="blockscale-test-")
    beside = compiled.folder() if config.getoption("--fresh") else ROOT / ".cache"
    os.environ["BLOCKSCALE_CACHE"] = str(beside / "blockscale-test")
    compiled.install()
    # Inductor's cache does not see that an operator's schema has changed.
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    # Nor shall it compile a program to see which vector instructions there are (what the CPU says
    # suffices), or start processes for a few lines of C++: ten seconds of each worker.
    os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    package = Path(blockscale.__file__).resolve().parent
    if package.parent == ROOT:  # MetaSchedule's workers must import this checkout, not another one
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for library in config.getoption("--library"):
        blockscale.load(library)
    if config.getoption("--device") != "cpu":
        from tests.kit import kernels

        kernels.device = config.getoption("--device")


def pytest_report_header() -> list[str]:
    """Say which code is tested and where its kernels are kept."""
    return [
        f"blockscale: {blockscale.__version__} from {Path(blockscale.__file__).parent}",
        f"kernel cache: {os.environ['BLOCKSCALE_CACHE']}",
        f"what compilers made: {compiled.folder()}",
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Leave out what is marked exhaustive, or listed so, unless it is asked for."""
    compiled.install_tvm()  # the test modules have imported it by now, and the emulator
    compiled.install_emulator()
    emulated.install()
    listed = set() if config.getoption("--listed") else cover.listed()
    for item in items:
        if not listed.isdisjoint((item.nodeid, cover.function(item.nodeid))):
            item.add_marker(pytest.mark.exhaustive)
    yield
    if config.getoption("--exhaustive"):
        return
    out = [item for item in items if item.get_closest_marker("exhaustive")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and tests: a fifth of the time went there."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Keep the cache small; one process does that, after the workers."""
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--fresh"):
        shutil.rmtree(compiled.folder(), ignore_errors=True)
    else:
        compiled.trim()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu where there is no CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: torch.cuda.is_available() is False on this machine")


def _seed(request: pytest.FixtureRequest) -> int:
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture(autouse=True)
def fixed_seeds(request: pytest.FixtureRequest) -> None:
    """Seed every global generator from the test's name: same numbers in any order and selection."""
    seed = _seed(request)
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # what that also does for devices that are not there takes 2 ms
            torch.default_generator.manual_seed(seed)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator of the test's own, seeded from its name."""
    return np.random.default_rng(_seed(request))


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """Return a function from tensors, and what config.json says on them, to the checkpoint."""
    from tests.kit import checkpoint_files as files

    numbers = itertools.count()

    def made(tensors: Any, quantization: Any = None, **config: Any) -> Any:
        if quantization is not None:
            config["quantization_config"] = quantization
        folder = files.folder(tmp_path / f"c{next(numbers)}", tensors, config)
        return blockscale.checkpoints.open(folder)

    return made
