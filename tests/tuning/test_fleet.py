"""A fleet on loopback: TVM's tracker, and servers of which some die, hang, lie or do not fit."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import tvm_ffi

from blockscale.base import host
from blockscale.building import records
from blockscale.building.store import folder_of
from blockscale.tuning import fleet, site, task
from blockscale.tuning.components import pool
from blockscale.tuning.tuner import tune
from blockscale.tuning.worker import Measurement
from tests.kit.fake_workload import EXPORTER, FakeSpec, FakeWorkload
from tests.kit.paths import without_torch

LEVEL = host.level()
KEY = "cpu"


@pytest.fixture(autouse=True)
def _no_rechecks(monkeypatch):
    """A default is measured again when it seems slow: the machine's load must not decide here.

    Nor which server is late.
    """
    monkeypatch.setattr(task, "_SUSPECT", math.inf)
    monkeypatch.setattr(site, "_GRACE_S", 300.0)


@contextmanager
def started(*commands: list[str]):
    """Run Python modules as processes of their own, and end all that they started."""
    made = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=without_torch(),
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    try:
        yield made
    finally:
        for process in made:
            for pid in {process.pid, *_descendants(process.pid)}:
                with_signal(pid, signal.SIGKILL)
            process.wait()


def with_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, whichever thread started them."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return [each for child in found for each in (child, *_descendants(child))]


@pytest.fixture(scope="module")
def tracker():
    """Return the address of a tracker."""
    pytest.importorskip("tornado", reason="TVM's tracker needs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", port, "--silent"]
    with started([*command, "--port-end", str(int(port) + 1)]):
        yield f"127.0.0.1:{port}"


def server(
    tracker: str, port: int, key: str = KEY, module: str = "blockscale.tuning.server"
) -> list[str]:
    told = ["--tracker", tracker, "--key", key, "--host", "127.0.0.1", "--port", str(port)]
    return [module, *told, "--port-end", str(port + 1), "--custom-addr", "127.0.0.1"]


def registered(tracker: str, count: int, key: str = KEY) -> None:
    """Wait until the tracker knows so many free servers."""
    from tvm import rpc

    where, port = tracker.split(":")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((where, int(port))):
            break
        time.sleep(0.05)
    while time.monotonic() < deadline:
        told = rpc.connect_tracker(where, int(port)).summary()["queue_info"]
        if told.get(key, {}).get("free", 0) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"no {count} servers")


def run(tracker: str, work_dir: Path, workloads=None, **options):
    options = {"seconds": 300.0, "progress": False, "exporter": EXPORTER} | options
    options = {"target": LEVEL, "tracker": tracker, "key": KEY, "workers": 2} | options
    return tune(workloads or [FakeWorkload(rows=4)], work_dir=work_dir, **options)


def harmed(tracker, ports, key, work_dir, workloads, after, **options):
    """Tune on three servers, of which one is killed and one made to hang after so many trials."""
    with started(*(server(tracker, port, key) for port in ports)) as servers:
        registered(tracker, 3, key)
        seen: list[dict] = []

        def harm(line):
            seen.append(line)
            victims = dict(zip(after, [(0, signal.SIGKILL), (1, signal.SIGSTOP)], strict=True))
            if len(seen) in victims:
                victim, number = victims[len(seen)]
                for pid in (servers[victim].pid, *_descendants(servers[victim].pid)):
                    with_signal(pid, number)

        result = run(tracker, work_dir, workloads, progress=harm, key=key, **options)
    found = records.read_records(folder_of(work_dir, "row_sum", LEVEL))
    assert len({(record.workload, record.key) for record in found}) == len(found) == result.trials
    assert [h["us"] for h in seen] == [h["us"] for h in result.history]
    return result


@pytest.mark.always
def test_of_three_servers_one_is_killed_and_one_hangs(tracker, tmp_path, capfd, monkeypatch):
    """The task ends, nothing that was measured is lost, and the message says which server."""
    monkeypatch.setattr(fleet, "SLACK_S", 3.0)
    ports, workload = (19191, 19192, 19193), FakeWorkload(FakeSpec(trap="fault"), rows=4)
    options = {"timeouts": (30.0, 3.0)}
    result = harmed(tracker, ports, "three", tmp_path, [workload], (2, 5), **options)
    told = capfd.readouterr().err
    assert "server 127.0.0.1:19191: is gone" in told
    assert "server 127.0.0.1:19192: does not answer" in told
    assert result.trials == 3 * 4 + 1
    assert [h["error"] for h in result.history if h["failed"]] == ["run: crashed with SIGSEGV"] * 3
    meta = records.read_meta(folder_of(tmp_path, "row_sum", LEVEL))
    assert meta["machine"]["cpu"] == host.cpu_model()


@pytest.mark.exhaustive
def test_every_task_ends_when_servers_do_not(tracker, tmp_path, capfd):
    """With the product's own time limits."""
    ports = (19195, 19196, 19197)
    workloads = [FakeWorkload(FakeSpec(cols), rows=1 << 6) for cols in (128, 256, 512)]
    result = harmed(tracker, ports, "many", tmp_path, workloads, (10, 30), trials_each=25)
    told = capfd.readouterr().err
    assert "server 127.0.0.1:19195: is gone" in told
    assert "server 127.0.0.1:19196: does not answer" in told
    assert result.trials == 75
    assert result.failed == {workload.tag: 0 for workload in workloads}


def test_a_server_outlives_its_sessions_and_leaves_nothing(tracker):
    """One that was killed, as for want of memory, ended the service; the server's end did not."""
    from tvm import rpc

    where, port = tracker.split(":")
    seen: set[int] = set()
    with started(server(tracker, 19198, "one")) as [own]:
        for _ in range(2):
            registered(tracker, 1, "one")
            session = rpc.connect_tracker(where, int(port)).request("one")
            assert session.get_function(fleet.PLACE)().split()[0] == "127.0.0.1:19198"
            left = _descendants(own.pid)
            assert len(left) == 2
            assert not seen & set(left)
            if not seen:
                with_signal(left[1], signal.SIGKILL)
                seen |= set(left)
        own.terminate()
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{pid}").exists() for pid in left):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_server_measures_in_one_process(tmp_path, monkeypatch):
    """A new one takes seconds to find its GPU, and measures nothing meanwhile."""
    monkeypatch.setattr(fleet, "_crew", [])
    monkeypatch.setattr(tvm_ffi, "get_global_func", lambda name: tmp_path.joinpath)
    request = pickle.dumps((os.getpid, (), 60.0, "tvm"))
    assert len({pickle.loads(fleet.serve(request)).value for _ in range(300)}) == 1
    [crew] = fleet._crew
    crew.__exit__()


def test_who_is_no_server_is_named(tracker, tmp_path):
    with pytest.raises(RuntimeError, match=r"knows no free server of key 'cpu' \(0 in use\)"):
        run(tracker, tmp_path)
    with started(server(tracker, 19194, module="tvm.exec.rpc_server")):
        registered(tracker, 1)
        with pytest.raises(RuntimeError, match=r"it runs TVM's rpc_server without blockscale"):
            run(tracker, tmp_path)


def test_bad_addresses_are_errors(tmp_path):
    with pytest.raises(ValueError, match="tracker='here' is no address; write host:port"):
        run("here", tmp_path)
    with pytest.raises(ValueError, match="needs a key"):
        run("127.0.0.1:1", tmp_path, key=None)
    with pytest.raises(ValueError, match="key='h' names servers of a tracker, and there is none"):
        run(None, tmp_path, key="h")


class Link:
    """A server that says what it is told to."""

    name = "far:9090"

    def __init__(self, said):
        self.said = said

    def put(self, path):
        return path

    def remove(self, path):
        pass

    def call(self, function, arguments, timeout):
        time.sleep(0.01)
        return pool.Answer(self.said)


@pytest.mark.parametrize(
    "said",
    [
        None,
        Measurement((float("nan"),)),
        Measurement((0.0,)),
        Measurement((-1e-6,)),
        Measurement(()),
        Measurement((5.0,)),
        Measurement((1e-6,), "wrong result"),
    ],
)
def test_what_cannot_be_is_a_lie(monkeypatch, said):
    monkeypatch.setattr(fleet, "_links", [Link(said)])
    with pytest.raises(fleet.Lost, match="server far:9090: says what cannot be"):
        fleet.measure(len, ("a.so", "b.so"), 1.0)
    good = Measurement((1e-6, 2e-6))
    monkeypatch.setattr(fleet, "_links", [Link(good)])
    assert fleet.measure(len, ("a.so", "b.so"), 1.0) == good


def test_a_machine_without_the_level_is_refused(monkeypatch):
    monkeypatch.setattr(host, "features", lambda: frozenset({"sse4_2"}))
    with pytest.raises(RuntimeError, match=r"its CPU .* lacks .*, which avx2 needs"):
        fleet.describe("avx2")


def test_a_machine_without_openmp_is_refused(monkeypatch):
    """Its times would be those of one core."""

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(RuntimeError, match=r"no libgomp.so.1, .* install it \(Debian: libgomp1\)"):
        fleet.describe(LEVEL)
    with pytest.raises(RuntimeError, match="this machine has no libgomp"):
        site.Site(LEVEL).ask(pool.Workers([], []))


def asks(far, workers, jobs):
    """Have each of the workers do one of ``jobs`` to describe itself."""
    far.describing = lambda: None
    far.ask(workers)
    far._asked = dict(zip(workers.measurers, jobs, strict=True))


def test_servers_of_another_machine_are_not_used(monkeypatch):
    told: list[str] = []

    class Process:
        dead, place = None, ""

        def kill(self):
            pass

    workers = SimpleNamespace(measurers=[Process(), Process(), Process()], say=told.append)
    far = fleet.Fleet(LEVEL, "127.0.0.1:1", KEY)
    cpus = {"a:1": "Epyc", "b:2": "Xeon", "c:3": "Epyc"}
    answers = [pool.Answer({"server": s, "cpu": c}) for s, c in cpus.items()]
    asks(far, workers, [pool.Job(len, (), answer=answer) for answer in answers])
    assert far.judged(workers) == {"cpu": "Epyc"}
    assert [each.dead is None for each in workers.measurers] == [True, False, True]
    assert told == [
        "not used: server b:2: has a Xeon, and most others a Epyc, whose times do not compare"
    ]


@pytest.fixture
def three(tmp_path):
    """Return a fleet, three workers of it and what they say."""
    told: list[str] = []
    measurers = [pool.Worker(tmp_path / "log", "json") for _ in range(3)]
    far = fleet.Fleet(LEVEL, "127.0.0.1:1", KEY)
    far._known = ["a:1", "b:2", "c:3"]
    with pool.Workers([], measurers, False, say=told.append) as own:
        yield far, own, told


def test_a_server_that_hangs_is_not_waited_for(three, monkeypatch, tmp_path):
    """The session begins with who is there; one that comes late joins, and the third is named."""
    monkeypatch.setattr(site, "_GRACE_S", 0.1)
    far, own, told = three
    late = "([_ for _ in iter(lambda: path.exists() or sleep(0.01), True)], b)[1]"
    names = {"path": tmp_path / "go", "sleep": time.sleep, "b": {"server": "b:2", "cpu": "Epyc"}}
    jobs = [pool.Job(eval, ("{'server': 'a:1', 'cpu': 'Epyc'}",))]
    jobs += [pool.Job(eval, (late, names)), pool.Job(time.sleep, (60.0,))]
    asks(far, own, jobs)
    for worker, job in far._asked.items():
        worker.send(job)
    assert far.describe(own)["cpu"] == "Epyc"
    where = "(key 'cpu' at tracker 127.0.0.1:1)"
    assert told == [f"not used before they answer: 2 of the servers b:2, c:3 {where}"]
    (tmp_path / "go").touch()
    assert own.wait(lambda: jobs[1].done() and own.measurers[2].ready)
    own.measurers[2].deadline = 0.0
    assert own.wait(jobs[2].done)
    assert [each.place for each in own.measurers[:2]] == ["server a:1", "server b:2"]
    assert [each.dead is None for each in own.measurers] == [True, True, False]
    assert told[1:] == [f"not used: one of the servers c:3 {where}: {jobs[2].answer.error}"]
    assert jobs[2].answer.error.startswith("timeout")


def test_nothing_is_known_of_machines_that_were_not_waited_for(three):
    """A folder keeps what it says of those of before Ctrl-C."""
    far, own, _ = three
    asks(far, own, [pool.Job(len, ("",)) for _ in own.measurers])
    own.abandon(KeyboardInterrupt())
    assert far.describe(own) is None


def test_a_tracker_that_hangs_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(fleet, "_TRACKER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"tracker {where} does not answer .*timed out"):
            fleet.Fleet(LEVEL, where, KEY).measurers(tmp_path / "log")
    assert socket.getdefaulttimeout() is None
