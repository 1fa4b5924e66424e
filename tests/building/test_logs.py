"""Logs: what is committed, what is found, and what `check` says about damage."""

from __future__ import annotations

import json
import lzma
import math
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from blockscale.base import host
from blockscale.building import logs, records
from blockscale.building.commit import commit, merge
from blockscale.building.logs import LogError
from blockscale.building.space import Space, new_schedule, replay, trace_json
from blockscale.building.store import HISTORY, Store, folder_of, read_history
from tests.kit.fake_workload import FakeSpec, FakeWorkload, from_meta

LEVEL = "avx2"
WORKLOAD = FakeWorkload(rows=4)


def record(work_dir: Path, times: list[float], workload: FakeWorkload = WORKLOAD, level=LEVEL):
    """Write a trial of each of the first points of the space, with these times in microseconds."""
    store = Store(folder_of(work_dir, "row_sum", level), print)
    entry, _ = store.open(workload, level)
    space = Space(workload.mod(level), workload.space(level))
    for number, us in enumerate(times):
        trace = replay(workload.mod(level), space.trace(space.all()[number])).trace
        times = [] if math.isinf(us) else [us / 1e6]
        line = {"workload": workload.tag, "us": us, "kind": "default", "failed": math.isinf(us)}
        store.append(entry, trace, times, workload.target(level), line)


@pytest.fixture
def committed(tmp_path):
    record(tmp_path / "work", [9.0, 5.0, math.inf, 7.0, 8.0])
    commit(tmp_path / "work", tmp_path / "logs")
    return tmp_path / "logs"


def folder(root: Path) -> Path:
    return folder_of(root, "row_sum", LEVEL)


def times(root: Path) -> list[float]:
    return [round(r.us, 3) for r in records.read_records(folder(root))]


def test_commit_keeps_the_best_valid_records_and_says_where_they_come_from(committed):
    assert times(committed) == [5.0, 7.0, 8.0]
    assert sorted(p.name for p in folder(committed).iterdir()) == sorted(
        [records.PACKED_WORKLOADS, records.RECORDS, records.META]
    )
    [entry] = records.read_meta(folder(committed))["workloads"].values()
    assert entry["best_us"] == 5.0
    assert (entry["trials"], entry["failed"]) == (5, 1)
    assert entry["spec"] == WORKLOAD.spec.to_json()
    for key in ("target", "cpu", "cores", "tvm", "tvm_ffi", "llvm", "date", "default_us"):
        assert entry[key] is not None, key
    assert logs.check([committed], from_meta) == []


def test_committing_again_changes_nothing(committed, tmp_path):
    before = {p.name: p.read_bytes() for p in folder(committed).iterdir()}
    assert commit(tmp_path / "work", committed) == {}
    assert {p.name: p.read_bytes() for p in folder(committed).iterdir()} == before


def test_a_worse_record_never_replaces_a_better_one(committed, tmp_path):
    record(tmp_path / "slow", [20.0, 30.0, 40.0, 50.0])
    assert commit(tmp_path / "slow", committed) == {}
    assert times(committed) == [5.0, 7.0, 8.0]


def test_a_better_record_is_merged_without_duplicates(committed, tmp_path):
    record(tmp_path / "fast", [6.0, 4.0])  # the same traces as 9.0 and 5.0
    assert commit(tmp_path / "fast", committed) == {WORKLOAD.tag: pytest.approx(4.0)}
    assert times(committed) == [4.0, 6.0, 7.0]
    assert logs.check([committed], from_meta) == []


def test_workloads_of_one_op_share_a_folder(committed, tmp_path):
    other = FakeWorkload(FakeSpec(cols=256), rows=4)
    record(tmp_path / "other", [3.0], other)
    commit(tmp_path / "other", committed)
    assert logs.find(other, LEVEL, [committed]).us == pytest.approx(3.0)
    assert logs.find(WORKLOAD, LEVEL, [committed]).us == pytest.approx(5.0)
    assert logs.check([committed], from_meta) == []


def test_find_returns_a_trace_that_applies(committed):
    hit = logs.find(WORKLOAD, LEVEL, [committed])
    assert hit.us == pytest.approx(5.0)
    assert hit.source == f"{folder(committed) / records.RECORDS}:1"
    from tvm.s_tir import Schedule

    sch = Schedule(WORKLOAD.mod(LEVEL))
    hit.trace.apply_to_schedule(sch, remove_postproc=False)
    assert "parallel" in sch.mod.script()


def test_the_first_folder_with_a_hit_wins(committed, tmp_path):
    record(tmp_path / "own", [50.0])
    hit = logs.find(WORKLOAD, LEVEL, [tmp_path / "none", tmp_path / "own", committed])
    assert hit.us == pytest.approx(50.0)


def test_find_misses_another_level_shape_or_folder(committed, tmp_path):
    assert logs.find(WORKLOAD, "plain", [committed]) is None
    assert logs.find(FakeWorkload(rows=8), LEVEL, [committed]) is None
    assert logs.find(WORKLOAD, LEVEL, [tmp_path / "nowhere"]) is None
    assert logs.find(WORKLOAD, LEVEL, []) is None


@dataclass(frozen=True)
class Retargeted(FakeWorkload):
    """The same IR for another CPU."""

    def target(self, level):
        return super().target("avx512")


@dataclass(frozen=True)
class MoreCores(FakeWorkload):
    """The same level on a machine with more cores."""

    def target(self, level):
        import tvm

        return tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 64})


def test_the_target_is_compared_but_not_the_number_of_cores(committed):
    assert logs.find(Retargeted(rows=4), LEVEL, [committed]) is None
    assert logs.find(MoreCores(rows=4), LEVEL, [committed]) is not None
    [*problems] = logs.check([committed], lambda e: Retargeted(FakeSpec(**e["spec"]), e["rows"]))
    assert len(problems) == 3
    assert "is for target" in problems[0].what
    assert "x86-64-v3" in problems[0].what


def test_check_reports_an_op_whose_ir_has_changed(committed):
    changed = FakeSpec(trap="build")  # another attribute, so another IR
    problems = logs.check([committed], lambda e: FakeWorkload(changed, e["rows"]))
    assert any("no record hits" in p.what for p in problems)
    assert any("belongs to no" in p.what or "describes" in p.what for p in problems)


def test_a_stale_workload_is_replaced_by_the_next_commit(committed, tmp_path):
    meta = json.loads((folder(committed) / records.META).read_text())
    path = folder(committed) / records.PACKED_WORKLOADS
    line = json.loads(lzma.decompress(path.read_bytes()))
    other = json.dumps(["12345", line[1]]) + "\n"  # as if the IR had been another
    path.write_bytes(lzma.compress(other.encode()))
    meta["workloads"][WORKLOAD.tag]["workload"] = "12345"
    (folder(committed) / records.META).write_text(json.dumps(meta))
    assert logs.check([committed], from_meta) != []
    record(tmp_path / "new", [60.0])
    assert commit(tmp_path / "new", committed) == {WORKLOAD.tag: pytest.approx(60.0)}
    assert times(committed) == [60.0]
    assert logs.check([committed], from_meta) == []


def test_a_failing_commit_leaves_the_log_as_it_was(committed, tmp_path, monkeypatch):
    record(tmp_path / "fast", [1.0])
    before = {p.name: p.read_bytes() for p in folder(committed).iterdir()}
    monkeypatch.setattr(records.Record, "to_line", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        commit(tmp_path / "fast", committed)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder(committed).iterdir()} == before
    assert logs.check([committed], from_meta) == []


def test_a_commit_removes_what_a_killed_one_left(committed, tmp_path):
    left = folder(committed).with_name(f".{folder(committed).name}.4711")
    others = [left.with_name(name) for name in (".cpu-avx2", ".notes.4711", "cpu-avx2.4711")]
    for path in (left, *others):
        path.mkdir()
        (path / records.RECORDS).write_text("[0, [[")
    assert commit(tmp_path / "work", committed) == {}
    assert not left.exists()
    assert all(path.exists() for path in others)


def on(root: Path, times: list[float], cpu: str, workload: FakeWorkload = WORKLOAD) -> Path:
    """Return a work folder that was tuned on a machine with this CPU."""
    record(root, times, workload)
    meta = records.read_meta(folder(root))
    (folder(root) / records.META).write_text(json.dumps(meta | {"machine": {"cpu": cpu}}))
    return root


OTHER = FakeWorkload(FakeSpec(cols=256), rows=4)


@pytest.mark.parametrize("packed", [False, True])
def test_a_merge_says_where_times_come_from(tmp_path, packed):
    """Of each workload the fastest wins, whatever comes first; logs stay as they are."""
    roots = [on(tmp_path / "a", [9.0, 5.0], "A"), on(tmp_path / "b", [4.0, 6.0], "B")]
    on(tmp_path / "a", [3.0], "A", OTHER)
    if packed:
        for root in roots:
            commit(root, root.with_suffix(".log"))
        roots = [root.with_suffix(".log") for root in roots]
    before = {path: path.read_bytes() for root in roots for path in root.rglob("*.json")}
    changes, passed = merge(roots, tmp_path / "out", from_meta)
    assert passed == []
    found = {c.tag: (c.place, round(c.us, 3), c.entry["cpu"], c.source, c.old) for c in changes}
    place = "row_sum/cpu-avx2"
    assert found == {
        WORKLOAD.tag: (place, 4.0, "B", roots[1], None),
        OTHER.tag: (place, 3.0, "A", roots[0], None),
    }
    meta = records.read_meta(folder(tmp_path / "out"))["workloads"]
    assert [meta[w.tag]["cpu"] for w in (WORKLOAD, OTHER)] == ["B", "A"]
    assert [meta[w.tag]["trials"] for w in (WORKLOAD, OTHER)] == [2, 1]
    assert logs.check([tmp_path / "out"], from_meta) == []
    assert merge(roots[::-1], tmp_path / "out", from_meta) == ([], [])
    assert {path: path.read_bytes() for path in before} == before
    assert (roots[0] / ".lock").exists() is not packed
    [change], _ = merge([on(tmp_path / "c", [2.0], "C")], tmp_path / "out", from_meta)
    assert (change.old["cpu"], change.entry["cpu"], change.entry["best_us"]) == ("B", "C", 2.0)


def test_a_work_folder_says_whose_cpu_measures(tmp_path):
    """It may be merged elsewhere; a machine that a fleet has told of stays."""
    record(tmp_path, [9.0])
    store = Store(folder(tmp_path), print)
    store.measured_on(None)
    [known] = [records.read_meta(folder(tmp_path))["machine"]]
    assert known["cpu"] == host.cpu_model()
    store.measured_on({"cpu": "B"})
    store.measured_on(None)
    assert records.read_meta(folder(tmp_path))["machine"] == {"cpu": "B"}


def test_a_merge_takes_nothing_of_an_older_ir(committed, tmp_path):
    """It would displace what fits, as a tuner's newer IR does."""
    record(tmp_path / "old", [1.0], FakeWorkload(FakeSpec(trap="build"), rows=4))
    path = folder(tmp_path / "old") / records.META
    meta = json.loads(path.read_text())
    [entry] = meta["workloads"].values()
    path.write_text(json.dumps(meta | {"workloads": {WORKLOAD.tag: entry | WORKLOAD.entry()}}))
    changes, [problem] = merge([tmp_path / "old"], committed, from_meta)
    assert changes == []
    assert problem.what == f"'{WORKLOAD.tag}' passed over: its IR has changed; tune it again"
    assert times(committed) == [5.0, 7.0, 8.0]
    _, [problem] = merge([tmp_path / "old"], committed)  # the catalogue has no row sums
    assert "names no kernel" in problem.what


def test_a_merge_refuses_times_of_two_gpus(tmp_path):
    """Nothing is written; what is there already counts as well."""
    for name in ("H200", "H100"):
        record(tmp_path / name, [9.0])
        path = folder(tmp_path / name) / records.META
        meta = records.read_meta(path.parent)
        path.write_text(json.dumps(meta | {"machine": {"gpu": f"NVIDIA {name}"}}))
    roots = [tmp_path / "H200", tmp_path / "H100"]
    sentence = "was measured on NVIDIA H200 in .* and on NVIDIA H100 in .*; merge each GPU's logs"
    with pytest.raises(ValueError, match=sentence):
        merge(roots, tmp_path / "out", from_meta)
    assert not (tmp_path / "out").exists()
    merge(roots[:1], tmp_path / "out", from_meta)
    with pytest.raises(ValueError, match=sentence):
        merge(roots[1:], tmp_path / "out", from_meta)


def test_a_merge_wants_entries_and_another_folder(committed, tmp_path):
    with pytest.raises(ValueError, match="row_sum has no entry; name a folder that holds"):
        merge([committed / "row_sum"], tmp_path / "out")
    with pytest.raises(ValueError, match="is the folder to write as well; name the others only"):
        merge([committed], committed)


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        (records.RECORDS, lambda b: b[:-30], r"record\.json:3: the line is not JSON"),
        (records.RECORDS, lambda b: b.replace(b"[0,[[", b"[7,[[", 1), "points to workload 7 of 1"),
        (records.RECORDS, lambda b: b"{}\n" + b, r"record\.json:1: the line is not \[workload"),
        (records.RECORDS, lambda b: b"\xff\xfe" + b, r"record\.json:1: the line is not JSON"),
        (
            records.PACKED_WORKLOADS,
            lambda b: lzma.compress(lzma.decompress(b)[:100]),
            r"workload\.json\.xz:1: the line is not JSON",
        ),
        (records.PACKED_WORKLOADS, lambda b: b[:100], r"workload\.json\.xz: is damaged \(.*\);"),
        (records.PACKED_WORKLOADS, None, r"workload\.json: the file is missing, as is .*\.xz"),
        (records.RECORDS, None, r"record\.json: the file is missing"),
    ],
)
def test_a_damaged_log_is_an_error_with_file_line_and_remedy(committed, name, damage, sentence):
    path = folder(committed) / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LogError, match=sentence) as caught:
        logs.find(WORKLOAD, LEVEL, [committed])
    assert "restore the folder from version control" in str(caught.value)
    [problem] = logs.check([committed], from_meta)
    assert name.removesuffix(".xz") in problem.where


def gone(root: Path, lines: int) -> None:
    """Let the traces of the first records name a block that is not there."""
    path = folder(root) / records.RECORDS
    text = path.read_text().splitlines(keepends=True)
    text[:lines] = [line.replace('"row_sum"', '"gone"') for line in text[:lines]]
    path.write_text("".join(text))


def test_a_record_that_does_not_apply_is_passed_over(committed, caplog):
    gone(committed, 1)
    assert logs.find(WORKLOAD, LEVEL, [committed]).us == pytest.approx(7.0)
    [warning] = caplog.records
    assert (warning.name, warning.levelname) == ("blockscale", "WARNING")
    where = f"{folder(committed) / records.RECORDS}:1"
    assert warning.message.startswith(f"{where}: passed over: the trace does not apply to ")
    assert WORKLOAD.tag in warning.message
    assert "Cannot find a block with the specified name" in warning.message
    gone(committed, 3)
    assert logs.find(WORKLOAD, LEVEL, [committed]) is None
    assert logs.check([committed], from_meta)[0].where == where


@pytest.mark.parametrize("lines", [1, 3])
def test_a_commit_drops_records_that_do_not_apply(committed, tmp_path, lines):
    gone(committed, lines)
    record(tmp_path / "slow", [60.0])
    better = commit(tmp_path / "slow", committed)
    assert better == ({} if lines == 1 else {WORKLOAD.tag: pytest.approx(60.0)})
    assert times(committed) == ([7.0, 8.0, 60.0] if lines == 1 else [60.0])
    [entry] = records.read_meta(folder(committed))["workloads"].values()
    assert entry["best_us"] == times(committed)[0]
    assert logs.check([committed], from_meta) == []


def test_a_record_has_the_key_of_its_trace(tmp_path):
    """TVM writes the probability of the only candidate, 1.0, as 1: a session knows it again."""
    sch = new_schedule(WORKLOAD.mod(LEVEL))
    sch.sample_categorical([3], [1.0])
    store = Store(folder(tmp_path), print)
    entry, _ = store.open(WORKLOAD, LEVEL)
    store.append(entry, sch.trace, [1e-6], WORKLOAD.target(LEVEL), {})
    [again] = records.read_records(folder(tmp_path))
    assert again.key == records.trace_key(trace_json(sch.trace))


def test_records_are_added_by_a_database_that_has_read_none(tmp_path):
    record(tmp_path, [9.0, 5.0])
    assert not list(Store(folder(tmp_path), print).database.get_all_tuning_records())
    record(tmp_path, [7.0])
    assert times(tmp_path) == [9.0, 5.0, 7.0]


def test_the_files_are_what_tvm_writes(tmp_path):
    """Byte for byte; TVM's database goes on with them."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    record(tmp_path, [9.0, 5.0])
    record(tmp_path, [7.0], FakeWorkload(FakeSpec(cols=256), rows=4))
    (tmp_path / "tvm").mkdir()
    theirs = JSONDatabase(work_dir=str(tmp_path / "tvm"))
    for each in JSONDatabase(work_dir=str(folder(tmp_path))).get_all_tuning_records():
        entry = theirs.commit_workload(each.workload.mod)
        made = TuningRecord(each.trace, entry, each.run_secs, each.target, each.args_info)
        theirs.commit_tuning_record(made)
    for name in (records.WORKLOADS, records.RECORDS):
        ours = (folder(tmp_path) / name).read_bytes().splitlines(keepends=True)
        assert sorted(ours) == sorted((tmp_path / "tvm" / name).read_bytes().splitlines(True))


@contextmanager
def full(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as on a disk that has no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_leaves_no_part_of_a_line(tmp_path):
    record(tmp_path, [9.0])
    path = folder(tmp_path) / records.RECORDS
    size = path.stat().st_size
    history = path.with_name(HISTORY).read_bytes()
    store = Store(path.parent, print)
    entry, _ = store.open(WORKLOAD, LEVEL)
    trace = new_schedule(WORKLOAD.mod(LEVEL)).trace
    trial = entry, trace, [1e-6], WORKLOAD.target(LEVEL), {"workload": WORKLOAD.tag}
    sentence = (
        r"record\.json: a line cannot be added \(File too large\), and no part of it is there"
    )
    with full(size + 50), pytest.raises(RuntimeError, match=sentence):
        store.append(*trial)
    assert path.stat().st_size == size
    assert path.with_name(HISTORY).read_bytes() == history
    store.append(*trial)  # there is room again
    assert times(tmp_path) == [9.0, 1.0]


def test_a_workload_that_a_full_disk_does_not_take(tmp_path):
    path = folder(tmp_path) / records.WORKLOADS
    with (
        full(300),
        pytest.raises(RuntimeError, match=r"workload\.json: a line cannot be added"),
    ):
        Store(path.parent, print).open(WORKLOAD, LEVEL)
    assert not path.exists() or not path.read_bytes()
    record(tmp_path, [9.0])
    assert times(tmp_path) == [9.0]


def test_a_torn_history_is_cut_and_not_written_again(tmp_path):
    """Who is killed in between has lost none of it."""
    record(tmp_path, [9.0])
    path = folder(tmp_path) / HISTORY
    whole = path.read_bytes() * 4000
    path.write_bytes(whole + b'{"workl')
    with full(len(whole) // 2):  # no such file could be written
        Store(folder(tmp_path), print)
    assert path.read_bytes() == whole
    assert len(read_history(folder(tmp_path))) == 4000


def test_a_commit_takes_no_record_that_does_not_apply(committed, tmp_path):
    record(tmp_path / "new", [1.0, 4.0])
    gone(tmp_path / "new", 1)
    assert commit(tmp_path / "new", committed) == {WORKLOAD.tag: pytest.approx(4.0)}
    assert times(committed) == [4.0, 7.0, 8.0]


def test_a_work_folder_sets_records_aside_that_do_not_apply(tmp_path):
    """With one of them MetaSchedule's database would not open."""
    record(tmp_path, [9.0, 5.0, 7.0])
    gone(tmp_path, 2)
    said: list[str] = []
    store = Store(folder(tmp_path), said.append)
    _, known = store.open(WORKLOAD, LEVEL)
    assert [r.us for r in known] == [pytest.approx(7.0)]
    assert times(tmp_path) == [7.0]
    aside = folder(tmp_path) / f"{records.RECORDS}.unfit"
    assert aside.read_text().count('"gone"') >= 2
    assert len(aside.read_text().splitlines()) == 2
    [message] = said
    assert "records that no longer apply: 2; moved to" in message


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text.replace('"row_sum"', '"gone"'), "the trace does not replay"),
        (lambda text: text.replace("[5e-06]", "[1e10]"), "run times .* are not valid"),
        (lambda text: text.replace("[5e-06]", "[NaN]"), "run times .* are not valid"),
    ],
)
def test_check_reports_a_record_that_is_not_usable(committed, damage, sentence):
    path = folder(committed) / records.RECORDS
    assert damage(path.read_text()) != path.read_text()
    path.write_text(damage(path.read_text()))
    problems = logs.check([committed], from_meta)
    assert re.search(sentence, str(problems[0]))


def test_a_record_without_a_valid_time_is_no_hit(tmp_path):
    record(tmp_path, [math.inf, math.inf])
    assert logs.find(WORKLOAD, LEVEL, [tmp_path]) is None
    assert commit(tmp_path, tmp_path / "logs") == {}


def test_an_op_that_was_opened_but_never_measured(tmp_path):
    """Time was up, or the tuner was killed, before its first trial had ended."""
    Store(folder(tmp_path), print).open(WORKLOAD, LEVEL)
    assert logs.find(WORKLOAD, LEVEL, [tmp_path]) is None
    assert commit(tmp_path, tmp_path / "logs") == {}
    assert logs.check([tmp_path], from_meta) == []
    assert Store(folder(tmp_path), print).open(WORKLOAD, LEVEL)[1] == []


def test_check_reports_a_committed_workload_without_a_record(committed):
    path = folder(committed) / records.RECORDS
    path.write_text("")
    assert any("it has none; tune it again" in p.what for p in logs.check([committed], from_meta))


def during_a_read(monkeypatch, happens):
    """Let something happen once, between the reads of two files."""
    read = records._read

    def first(path):
        monkeypatch.setattr(records, "_read", read)
        found = read(path)
        happens()
        return found

    monkeypatch.setattr(records, "_read", first)


def test_a_log_that_is_replaced_while_it_is_read(committed, tmp_path, monkeypatch):
    other = FakeWorkload(FakeSpec(cols=256), rows=4)  # its workload comes first in the new log
    record(tmp_path / "more", [3.0], other)
    during_a_read(monkeypatch, lambda: commit(tmp_path / "more", committed))
    workloads, found = records.read(folder(committed))
    assert len(workloads) == 2
    assert [(r.workload, round(r.us, 3)) for r in found] == [(0, 3.0), (1, 5.0), (1, 7.0), (1, 8.0)]


def test_a_work_folder_that_grows_while_it_is_read(tmp_path, monkeypatch):
    record(tmp_path, [9.0])
    other = FakeWorkload(FakeSpec(cols=256), rows=4)
    during_a_read(monkeypatch, lambda: record(tmp_path, [3.0], other))
    assert logs.find(WORKLOAD, LEVEL, [tmp_path]).us == pytest.approx(9.0)
    assert logs.find(other, LEVEL, [tmp_path]).us == pytest.approx(3.0)


def test_a_torn_last_line_of_a_work_folder(tmp_path, caplog):
    """A build passes it over, since a tuner may be writing it; a commit, which locks, drops it."""
    record(tmp_path, [9.0, 5.0])
    path = folder(tmp_path) / records.RECORDS
    path.write_bytes(path.read_bytes()[:-40])
    assert logs.find(WORKLOAD, LEVEL, [tmp_path]).us == pytest.approx(9.0)
    [warning] = caplog.records
    assert warning.message.startswith(f"{path}:2: passed over: the last line is torn")
    assert commit(tmp_path, tmp_path / "logs") == {WORKLOAD.tag: pytest.approx(9.0)}
    assert caplog.records[-1].message.startswith(f"{path}:2: dropped a torn last line")
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"\n")


def test_check_wants_meta_json(committed):
    (folder(committed) / records.META).unlink()
    [problem] = logs.check([committed], from_meta)
    assert problem.where.endswith(records.META)
    assert "the file is missing" in problem.what


def test_check_wants_entries(committed, tmp_path):
    assert logs.entries(committed) == 1
    for root in (folder(committed), folder(committed).parent):  # one or two folders too deep
        [problem] = logs.check([root], from_meta)
        assert problem.where == str(root)
        assert "has no entry; name a folder that holds <op>/cpu-<level>/meta.json" in problem.what


def test_check_of_a_folder_that_is_not_there(tmp_path):
    [problem] = logs.check([tmp_path / "nowhere"])
    assert str(problem) == f"{tmp_path / 'nowhere'}: is not a folder; name the folder of the logs"


def test_a_changed_log_is_read_again(committed, tmp_path):
    assert logs.find(WORKLOAD, LEVEL, [committed]).us == pytest.approx(5.0)
    record(tmp_path / "fast", [6.0, 4.0])
    commit(tmp_path / "fast", committed)
    assert logs.find(WORKLOAD, LEVEL, [committed]).us == pytest.approx(4.0)
    shutil.rmtree(folder(committed))
    assert logs.find(WORKLOAD, LEVEL, [committed]) is None


def test_a_work_folder_is_checked_before_tvm_reads_it(committed, tmp_path):
    """On lines that are no records tvm's reader crashes: neither may a file hide them from us."""
    with pytest.raises(LogError, match=r"workload\.json\.xz: is of committed logs.* work folder"):
        Store(folder(committed), print)
    record(tmp_path / "work", [9.0])
    (folder(tmp_path / "work") / records.WORKLOADS).unlink()
    with pytest.raises(LogError, match=r"database_workload\.json: the file is missing, as is"):
        Store(folder(tmp_path / "work"), print)
    record(tmp_path / "other", [9.0])
    path = folder(tmp_path / "other") / records.WORKLOADS
    path.write_text(json.dumps(["1", json.loads(path.read_text())[1]]) + "\n")
    with pytest.raises(LogError, match="has row_sum_c512_m4 under another hash than"):
        Store(folder(tmp_path / "other"), print).open(WORKLOAD, LEVEL)


BROKEN_RECORDS = {
    "deep": ("[" * 100_000, "is not JSON"),
    "list": ("[0, 1]", r"is not \[workload, \[trace, times, target, arguments\]\]"),
    "target": ("[0, [[[], []], [1.0], 3, null]]", "is not"),
    "target text": ('[0, [[[], []], [1.0], "x", null]]', "is no record"),
    "map": ('[0, [[["{"], []], [1.0], {}, null]]', "is no record"),
    "levels": (
        f"[0, [[[{'[' * 99}{']' * 99}], []], [1.0], {{}}, null]]",
        "is no record.*deeper than 64",
    ),
    "time": (f"[0, [[[], []], [1{'0' * 400}], {{}}, null]]", "is no record"),
}


@pytest.mark.parametrize("case", BROKEN_RECORDS)
def test_a_line_that_is_no_record_is_an_error(tmp_path, case):
    record(tmp_path, [9.0])
    line, sentence = BROKEN_RECORDS[case]
    (folder(tmp_path) / records.RECORDS).write_text(line + "\n")
    with pytest.raises(LogError, match=rf"tuning_record\.json:1: the line {sentence}") as caught:
        logs.find(WORKLOAD, LEVEL, [tmp_path])
    assert len(str(caught.value)) < 600
    with pytest.raises(LogError):
        Store(folder(tmp_path), print)


def test_a_small_file_does_not_unpack_to_a_huge_one(monkeypatch, committed):
    monkeypatch.setattr(records, "MOST_BYTES", 1 << 24)
    path = folder(committed) / records.PACKED_WORKLOADS
    path.write_bytes(lzma.compress(bytes(1 << 22), preset=0) * 100)
    with pytest.raises(LogError, match="holds more than 16777216 bytes"):
        logs.find(WORKLOAD, LEVEL, [committed])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workloads": 3}, "has no format, op, level and table"),
        ({"op": None}, "has no format, op, level and table"),
        ({"workloads": {"x": 3}}, "has an entry 'x' that names no workload"),
        ({"machine": 3}, "has a machine that is no object"),
    ],
)
def test_a_meta_json_of_another_form_is_an_error(committed, change, sentence):
    path = folder(committed) / records.META
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(LogError, match=sentence):
        records.read_meta(folder(committed))
    assert any(sentence in str(problem) for problem in logs.check([committed], from_meta))
