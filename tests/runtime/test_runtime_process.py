"""A kernel's place in its process: threads, forks, other libraries, and what is not imported.

What a fresh process must do runs in one, with this checkout's kernels.
"""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from blockscale.runtime.library import load
from tests.kit.pairwise import each
from tests.kit.paths import ROOT
from tests.kit.tiny_kernels import WIDTH, library_file

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is blocked by the test")

sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *blocked: str) -> str:
    """Run code in a fresh interpreter where some packages cannot be imported; return its output."""
    text = f"LIBRARY = {str(library_file())!r}\nWIDTH = {WIDTH}\n" + textwrap.dedent(code)
    text = BLOCK.format(names=blocked) + text
    package = load.__code__.co_filename  # tests may run against an installed wheel
    path = str(Path(package).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_without_tvm():
    run(
        """
        import torch
        from blockscale.runtime.library import load

        f = load(LIBRARY)["scale_f32"]
        x = torch.randn(500, WIDTH)
        assert torch.equal(f(x, torch.tensor([2.0])), x * 2 + 1)
        assert not [name for name in sys.modules if name.partition(".")[0] == "tvm"]
        assert "libtvm_runtime" not in open("/proc/self/maps").read()
        """,
        "tvm",
    )


def test_numpy_without_torch():
    run(
        """
        import numpy as np
        from blockscale.runtime.library import load

        f = load(LIBRARY)["scale_f32"]
        x = np.random.default_rng(0).standard_normal((500, WIDTH), np.float32)
        assert (f(x, np.array([2], np.float32)) == x * 2 + 1).all()
        assert "torch" not in sys.modules
        """,
        "tvm",
        "torch",
        "ml_dtypes",
    )


def test_tvm_ffi_with_local_symbols():
    """The library finds libtvm_ffi by its soname, so its visibility does not matter."""
    run(
        """
        import ctypes
        ctypes.RTLD_GLOBAL = ctypes.RTLD_LOCAL
        import numpy as np
        from blockscale.runtime.library import load

        try:
            ctypes.CDLL(None).TVMFFIErrorSetRaised
        except AttributeError:
            pass
        else:
            raise SystemExit("the test does not test anything: the symbols are global")
        f = load(LIBRARY)["scale_f32"]
        assert (f(np.ones((50, WIDTH), np.float32)) == 2).all()
        """,
        "torch",
    )


def test_libraries_beside_tvm():
    """TVM in the same process does not redirect the launches to a thread pool of its own."""
    run(
        """
        import torch, tvm, os
        from blockscale.runtime.library import load

        torch.set_num_threads(2)
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        before = len(os.listdir("/proc/self/task"))
        f = load(LIBRARY)["scale_f32"]
        x = torch.randn(500, WIDTH)
        assert torch.equal(f(x), x + 1)
        assert len(os.listdir("/proc/self/task")) == before, "a second pool of threads"
        """
    )


def test_set_num_threads():
    """One thread makes no pool; two share torch's; a Python thread inherits the number."""
    run(
        """
        import os, threading, time, torch
        from blockscale.runtime.library import load

        tasks = lambda: len(os.listdir("/proc/self/task"))

        def settled(count):
            # A thread that was joined may take a moment to go.
            end = time.monotonic() + 10
            while tasks() != count and time.monotonic() < end:
                time.sleep(0.01)
            return tasks() == count

        f = load(LIBRARY)["scale_f32"]
        x = torch.randn(100, WIDTH)
        torch.set_num_threads(1)
        start = tasks()
        assert torch.equal(f(x), x + 1)
        assert tasks() == start, "a launch on one thread made threads"

        seen = []
        def call():
            assert torch.equal(f(x), x + 1)
            seen.append(tasks())
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert seen == [start + 1], seen
        assert settled(start), tasks()

        torch.set_num_threads(3)
        assert torch.equal(f(x), x + 1)
        assert settled(start + 2), (start, tasks())
        """
    )


@pytest.mark.always
@each(by=["kernel", "torch", "numpy"], loaded=["before", "after"])
def test_fork_after_threads_ran(by, loaded):
    """libgomp's threads do not survive a fork; a child that waited for them would hang.

    They were started by a kernel or by torch, or where torch is not; the child calls a kernel of a
    library that its parent had loaded, or that it loads itself.
    """
    run(
        f"""
        import os, shutil, signal, tempfile, numpy as np
        os.environ["OMP_NUM_THREADS"] = "2"
        import blockscale as bs

        by, loaded = {by!r}, {loaded!r}
        other = tempfile.mkdtemp() + "/other.so"  # another file: loaded for itself
        shutil.copy(LIBRARY, other)
        x = np.ones((100, WIDTH), np.float32)
        if by != "numpy":
            import torch
            torch.set_num_threads(2)
        if by != "torch" or loaded == "before":
            f = bs.load(LIBRARY)["scale_f32"]
        before = len(os.listdir("/proc/self/task"))
        torch.ones(1 << 20).exp() if by == "torch" else f(x)
        assert len(os.listdir("/proc/self/task")) > before, "it ran on one thread"
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            if loaded == "after":
                f = bs.load(other)["scale_f32"]
            os._exit(0 if (f(x) == 2).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        shutil.rmtree(os.path.dirname(other))
        if by != "torch" or loaded == "before":
            assert (f(x) == 2).all()
        """
    )


def test_fork_while_another_thread_loads():
    """The child's lock is free."""
    run(
        """
        import os, signal, threading
        from blockscale.runtime import library

        held, done = threading.Event(), threading.Event()

        def hold():
            with library._lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            library.load(LIBRARY)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        done.set()
        thread.join()
        """
    )


@pytest.mark.parametrize("forked", [False, True])
def test_a_daemon_closes_what_it_inherits(forked):
    """Descriptors get numbers again; the next library is its own file all the same."""
    run(
        f"""
        import os, shutil, signal, tempfile, numpy as np
        from blockscale.runtime.library import load

        folder = tempfile.mkdtemp()
        copies = [shutil.copy(LIBRARY, f"{{folder}}/{{i}}.so") for i in range(4)]
        x = np.ones((3, WIDTH), np.float32)
        load(LIBRARY)["scale_f32"](x)
        child = os.fork() if {forked} else 0
        if child == 0:
            signal.alarm(60)
            for i, path in enumerate(copies):
                os.closerange(3, 256)
                assert (load(path)["scale_f32"](x) == 2).all()
                assert (load(LIBRARY)["scale_f32"](x) == 2).all()
                maps = open("/proc/self/maps").read()
                assert all((other in maps) == (j <= i) for j, other in enumerate(copies)), maps
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        shutil.rmtree(folder)
        """,
        "torch",
    )


def test_threads_of_python():
    """Four Python threads at once, each with sizes and scales of its own, get their own numbers."""
    f = load(library_file())["scale_f32"]
    errors: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        end = time.monotonic() + 2
        calls = 0
        while time.monotonic() < end or calls < 50:
            x = torch.randn(1 + (seed * 37 + calls * 11) % 97, WIDTH, generator=generator)
            y = torch.full_like(x, float("nan"))
            f(x, torch.tensor([float(2**seed)]), y)
            if not torch.equal(y, x * 2**seed + 1):
                errors.append(f"thread {seed}, call {calls}")
            calls += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_many_threads_return_their_workspaces():
    """A thread's workspace goes when the thread ends."""
    f = load(library_file())["scale_f32"]
    x = torch.ones(20_000, WIDTH)  # a workspace of 5 MB
    y = torch.empty_like(x)
    resident = []
    for _ in range(2):
        for _ in range(60):
            thread = threading.Thread(target=f, args=(x, None, y))
            thread.start()
            thread.join()
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert resident[1] - resident[0] < 100e6, "60 threads leaked their workspaces, 300 MB"


@pytest.mark.parametrize("count", [1, 64])
def test_call_overhead_is_small(count):
    """A call with known shapes costs microseconds; the bound leaves room for a busy machine."""
    f = load(library_file())["scale_bf16"]
    x = torch.zeros(count, WIDTH, dtype=torch.bfloat16)
    scale = torch.ones(1)
    y = torch.empty_like(x)
    f(x, scale, y)
    best = min(_timed(f, x, scale, y) - _timed(f._compiled, x, scale, y) for _ in range(300))
    assert best < 50e-6, f"{best * 1e6:.1f} us above the compiled function's own time"


def _timed(function, *args) -> float:
    start = time.perf_counter()
    for _ in range(20):
        function(*args)
    return (time.perf_counter() - start) / 20
