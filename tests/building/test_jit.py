"""Kernels built on demand: when one is built, when it is found, and what is said."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import blockscale as bs
from blockscale.base import files, host
from blockscale.building import builder
from blockscale.building.builder import build
from blockscale.ops import call
from blockscale.runtime import jit
from blockscale.runtime import library as runtime
from blockscale.specs import Linear, Spec, Swizzle
from tests.house.test_rooms import MODULES, graph
from tests.kit.paths import ROOT
from tests.reference import core as ref

NAME = "swizzle_128x4"
SCALE = torch.arange(60, dtype=torch.uint8).reshape(12, 5)


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """Return the list of builds; the cache is empty, nothing is loaded, nothing is remembered."""
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_FUNCTIONS", {})
    call.remembered.clear()
    monkeypatch.setattr(runtime, "_in_use", [])
    done = []

    def counting(specs, path, **options):
        done.append(path)
        return build(specs, path, **options)

    monkeypatch.setattr(builder, "build", counting)
    return done


def swizzle():
    """Call the kernel and compare."""
    assert (bs.swizzle_scales(SCALE).numpy() == ref.swizzle(SCALE.numpy())).all()


def forget(monkeypatch):
    """Make the next call look at the disk, as a new process does."""
    monkeypatch.setattr(jit, "_FUNCTIONS", {})
    call.remembered.clear()


def test_built_once(builds, monkeypatch, tmp_path, capfd):
    """The first call builds and says so; later calls and processes find the file, silently."""
    swizzle()
    text = (
        f"blockscale: building {NAME} for {host.level()} (first use; kept in {tmp_path / 'cache'})"
    )
    assert capfd.readouterr() == ("", text + "\n")
    [path] = (tmp_path / "cache").glob("*.so")
    assert path.name.startswith(f"{NAME}-")
    assert path.suffix == ".so"
    swizzle()
    forget(monkeypatch)
    swizzle()
    assert [built.name for built in builds] == [path.name]
    assert capfd.readouterr() == ("", "")


def damage(path, how):
    """Replace the library by one that is cut, empty, changed in one bit, or of another name."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    fresh = {"cut": data[:1000], "empty": b"", "changed": data}[how]
    path.unlink()
    path.write_bytes(fresh)


@pytest.mark.parametrize("how", ["cut", "empty", "changed"])
def test_corrupted_file_is_built_again(builds, monkeypatch, tmp_path, capfd, how):
    """One line says what was wrong with the file, one that it is built."""
    swizzle()
    [path] = (tmp_path / "cache").glob("*.so")
    damage(path, how)
    forget(monkeypatch)
    capfd.readouterr()
    swizzle()
    reason, building = capfd.readouterr().err.splitlines()
    assert reason.startswith(f"blockscale: {path}: ")
    assert reason.endswith("; building it again")
    assert building.startswith(f"blockscale: building {NAME}")
    assert len(builds) == 2
    forget(monkeypatch)
    swizzle()
    assert len(builds) == 2


def test_sources_decide(builds, monkeypatch, tmp_path):
    """Another digest of sources, logs and level is another file; the old one stays."""
    swizzle()
    forget(monkeypatch)
    monkeypatch.setattr(jit, "_digest", lambda target: "0123456789abcdef")
    swizzle()
    assert len(builds) == 2
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


def test_digest_depends_on_sources_and_level(monkeypatch, tmp_path):
    source, other = tmp_path / "a.py", tmp_path / "b.py"
    source.write_text("one")
    other.write_text("one")
    digests = set()
    for sources, level in (
        ([source], "sm_90a"),
        ([source], "plain"),
        ([other], "plain"),
        ([source, other], "plain"),
    ):
        monkeypatch.setattr(jit, "_sources", lambda sources=sources: sources)
        digests.add(jit._digest.__wrapped__(level))
    source.write_text("two")
    digests.add(jit._digest.__wrapped__("plain"))
    assert len(digests) == 5


def test_half_made_logs_decide_nothing(monkeypatch, tmp_path):
    """A commit that was killed leaves such folders."""
    for name in ("cpu-plain", ".cpu-plain.4711"):
        (tmp_path / "tuning_logs" / "swizzle" / name).mkdir(parents=True)
        (tmp_path / "tuning_logs" / "swizzle" / name / "meta.json").write_text("{}")
    monkeypatch.setattr(jit, "source_folders", lambda: (tmp_path,))
    assert jit._sources() == [tmp_path / "tuning_logs" / "swizzle" / "cpu-plain" / "meta.json"]


def test_sources_of_machine_code():
    """All that the builder imports decides the digest, and so does the C and CUDA that it compiles.

    What calls kernels, reads checkpoints or parses command lines does not: a change there is no
    reason to build again.
    """
    found = {path.relative_to(ROOT).as_posix() for path in jit._sources()}
    reached: set[str] = set()
    waiting = ["blockscale.building.builder"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph()[name]
    assert len(reached) > 100
    for name in reached - {"blockscale"}:
        assert MODULES[name].relative_to(ROOT).as_posix() in found, name
    native = ("lower/native", "runtime/native")
    files = [f for part in native for f in (ROOT / "blockscale" / part).rglob("*.*")]
    assert len(files) > 25
    assert {file.relative_to(ROOT).as_posix() for file in files} <= found
    assert any(name.endswith(".json.xz") for name in found)
    others = ("cli", "demo", "nn", "checkpoints", "ops", "compat", "emulator")
    assert not [name for name in found if name.split("/")[1] in others]


WITHOUT_COMPILER = """
import sys
sys.modules["tvm"] = None
import torch
import blockscale as bs

scale = torch.arange(60, dtype=torch.uint8).reshape(12, 5)
swizzled = bs.swizzle_scales(scale)  # from the cache
for path in (None, sys.argv[1]):
    if path:
        bs.load(path)
    try:
        print(torch.equal(bs.unswizzle_scales(swizzled, 12, 5), scale))
    except RuntimeError as error:
        print(error)
for function in (lambda: bs.build(["swizzle_128x4"], "out.so"), lambda: bs.tune(["swizzle_128x4"])):
    try:
        function()
    except RuntimeError as error:
        print(error)
"""


def test_without_the_compiler(builds, tmp_path):
    """Cached and loaded kernels run; for any other, one sentence says what is missing and why."""
    swizzle()
    build(["unswizzle_128x4"], tmp_path / "kernels.so")
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(tmp_path / "kernels.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    install = "pip install '.[build]' in a checkout of blockscale"
    needed = f"it needs tvm, which is not installed; {install}"
    assert done.stdout.splitlines() == [
        "unswizzle_128x4: no loaded library has it (blockscale.load() loads one), and to be built "
        f"{needed}, or build it where that is: blockscale build unswizzle_128x4 --level "
        f"{host.level()} -o kernels.so",
        "True",
        *(f"{name}: {needed}" for name in ("build", "tune")),
    ]
    assert "building" not in done.stderr


def test_loaded_library_comes_first(builds, tmp_path):
    """Before the cache: nothing is built, and no cache is made."""
    path = tmp_path / "kernels.so"
    build([Swizzle()], path)
    library = bs.load(path)
    assert jit.function(Swizzle()) is library.functions[NAME]
    swizzle()
    assert not (tmp_path / "cache").exists()
    assert builds == []


def test_library_loaded_later_comes_first(builds, tmp_path):
    """Also before the function that was built already."""
    swizzle()
    assert len(builds) == 1
    libraries = []
    for name in ("one.so", "two.so"):
        build([Swizzle()], tmp_path / name)
        libraries.append(bs.load(tmp_path / name))
        assert jit.function(Swizzle()) is libraries[-1].functions[NAME]
    swizzle()
    assert len(builds) == 1


def test_linear_remembers_its_kernel_until_a_library_is_loaded(builds, tmp_path):
    """The short way of repeated calls does not go past a library that was loaded since."""
    spec, packed = Linear(16, 16), torch.zeros(16, 8, dtype=torch.uint8)
    scale = torch.zeros(16, 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for _ in range(3):
        assert not bs.linear(torch.ones(2, 16), packed, scale).any()
    assert len(builds) == 1
    build([spec], tmp_path / "kernels.so")
    calls = []
    bs.load(tmp_path / "kernels.so").functions[spec.name]._compiled = lambda *_: calls.append(1)
    for _ in range(3):
        bs.linear(torch.ones(2, 16), packed, scale)
    assert len(calls) == 3
    assert len(builds) == 1


def test_open_library_is_private(builds, tmp_path):
    """Only `load` makes the torch functions use a library."""
    build([Swizzle()], tmp_path / "kernels.so")
    runtime.open_library(tmp_path / "kernels.so")
    swizzle()
    assert len(builds) == 1


def test_library_without_the_kernel(builds, tmp_path):
    """It is passed over, and the kernel is built."""
    build(["unswizzle_128x4"], tmp_path / "kernels.so")
    library = bs.load(tmp_path / "kernels.so")
    swizzle()
    assert len(builds) == 1
    linear = bs.unswizzle_scales(bs.swizzle_scales(SCALE), 12, 5)
    assert np.array_equal(linear.numpy(), SCALE.numpy())
    assert list(library) == ["unswizzle_128x4"]
    assert len(builds) == 1


def test_a_library_of_something_else(builds, monkeypatch, tmp_path, capfd):
    """Under the right name: said, and replaced."""
    swizzle()
    [path] = (tmp_path / "cache").glob("*.so")
    path.unlink()
    build(["unswizzle_128x4"], path)
    forget(monkeypatch)
    swizzle()
    assert f"{path}: is a library without {NAME}; building it again" in capfd.readouterr().err
    assert len(builds) == 2


def test_for_this_process_alone(builds, monkeypatch, tmp_path, capfd):
    """Where nothing can be kept, kernels run all the same, and no file of theirs is left."""
    (tmp_path / "cache").write_bytes(b"")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "tmp"))
    swizzle()
    why, building = capfd.readouterr().err.splitlines()
    assert why.startswith(f"blockscale: the cache folder cannot be used ({tmp_path / 'cache'}: ")
    assert building.endswith("(first use; for this process alone)")
    assert not list((tmp_path / "tmp").iterdir())
    swizzle()
    assert len(builds) == 1


def child(work) -> str:
    """Return what ``work`` returns, or the error it raises, in a forked child."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(60)
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        said = file.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    return said


def test_fork_while_another_thread_builds(builds, monkeypatch):
    """The child runs kernels that are in the cache, and says why it builds no other."""
    swizzle()
    forget(monkeypatch)
    started, go_on = threading.Event(), threading.Event()

    def slow(specs, path, **options):
        started.set()
        assert go_on.wait(60)
        return build(specs, path, **options)

    monkeypatch.setattr(builder, "build", slow)
    other = Spec.parse("unswizzle_128x4")
    thread = threading.Thread(target=jit.function, args=(other,))
    thread.start()
    assert started.wait(60)
    try:
        assert child(lambda: jit.function(Swizzle()).name) == NAME
        assert child(lambda: jit.function(Spec.parse("relayout_8x4")).name) == (
            "RuntimeError: relayout_8x4: this process was forked while another thread of its "
            "parent built a kernel, and the compiler does not survive that; build or load kernels "
            "before forking, or start processes with multiprocessing's 'spawn'"
        )
    finally:
        go_on.set()
        thread.join()
    assert jit.function(other).name == other.name
    assert child(lambda: jit.function(other).name) == other.name


def test_fork_after_builds(builds):
    """A child builds as its parent did."""
    swizzle()
    assert child(lambda: jit.function(Spec.parse("unswizzle_128x4")).name) == "unswizzle_128x4"
