"""Building: several kernels in one library, what its manifest says, and where it may be loaded."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from tvm.s_tir import Schedule

import blockscale
from blockscale.base import host, manifest
from blockscale.base.targets import CPU_TARGETS
from blockscale.building import builder, logs, records
from blockscale.building.builder import build, committed_logs
from blockscale.building.commit import commit
from blockscale.building.store import Store, folder_of
from blockscale.catalog import workloads
from blockscale.runtime.library import LibraryError, open_library
from blockscale.specs import FusedMoe, Linear, Quantize, ScaleSweep, Spec, Swizzle
from blockscale.tuning.tuner import tune
from tests.kit.kernels import LEVELS, check, needs

LINEAR = Linear(16, 32, dtype="bfloat16")
TUNED = workloads(LINEAR, "plain")[0]


@pytest.fixture(scope="module")
def log_folder(tmp_path_factory):
    """Return a folder whose only record is of one bucket of `LINEAR`: 12.5 microseconds."""
    work, out = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("logs")
    store = Store(folder_of(work, TUNED.op, host.level()), print)
    entry, _ = store.open(TUNED, host.level())
    sch = Schedule(TUNED.mod(host.level()))
    TUNED.default(sch, host.level())
    line = {"workload": TUNED.tag, "us": 12.5, "kind": "default", "failed": False}
    store.append(entry, sch.trace, [12.5e-6], TUNED.target(host.level()), line)
    commit(work, out)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory, log_folder):
    """Return the path and the manifest of a library of four kernels for this machine."""
    path = tmp_path_factory.mktemp("build") / "kernels.so"
    names = [LINEAR, "swizzle_128x4", Quantize("mxfp4"), LINEAR.name]
    contents = build(names, path, logs_dirs=[log_folder], meta={"note": "four"})
    return path, contents


def test_all_functions_work(built):
    """Once each, in the order asked for, however often named."""
    library = open_library(built[0])
    assert list(library) == [LINEAR.name, "swizzle_128x4", "quantize_mxfp4_f32"]
    for name, function in library.functions.items():
        assert [p.name for p in function.params] == [p.name for p in Spec.parse(name).params()]
        check(lambda *args, f=function: args[-1].numel() and f(*args), Spec.parse(name))


def test_manifest(built):
    """What `build` returns is what the file holds and what this machine is."""
    path, contents = built
    assert manifest.read_manifest(path) == json.loads(json.dumps(contents))
    assert contents["format"] == manifest.FORMAT
    assert contents["blockscale"] == blockscale.__version__
    assert contents["target"]["kind"] == "cpu"
    assert contents["target"]["level"] == host.level()
    assert contents["target"]["features"] == sorted(CPU_TARGETS[host.level()].features)
    assert contents["built"]["cpu"] == host.cpu_model()
    assert contents["meta"] == {"note": "four"}
    for name, entry in contents["functions"].items():
        spec = Spec.from_json(entry["spec"])
        assert spec.name == name
        assert entry["base"] == spec.base_name


def test_buckets_say_what_is_tuned(built, log_folder):
    """The bucket with a record names it and its time; the others have their default schedule."""
    path, contents = built
    tuned, *rest = contents["functions"][LINEAR.name]["buckets"]
    log = tuned.pop("log")
    assert tuned == {
        "rows": TUNED.rows,
        "limit": TUNED.limit(host.level()),
        "tuned": True,
        "us": 12.5,
    }
    assert not Path(log).is_absolute()
    file, _, line = log.rpartition(":")
    assert len((log_folder / file).read_text().splitlines()) == int(line)
    others = workloads(LINEAR, host.level())[1:]
    assert rest == [
        {"rows": w.rows, "limit": w.limit(host.level()), "tuned": False} for w in others
    ]
    assert rest[-1]["limit"] is None
    assert not open_library(path).functions[LINEAR.name].tuned


def test_trace_of_the_log_is_applied(tmp_path, monkeypatch, log_folder):
    """And a bucket without one is reported."""
    from blockscale.building import builder as module

    seen = {}
    exported = module.catalog.exported

    def spy(spec, level, traces):
        seen.update(traces)
        return exported(spec, level, traces)

    monkeypatch.setattr(module.catalog, "exported", spy)
    build([LINEAR], tmp_path / "one.so", logs_dirs=[tmp_path, log_folder])
    hit = logs.find(TUNED, host.level(), [log_folder])
    assert list(seen) == [TUNED.tag]
    assert str(seen[TUNED.tag]) == str(hit.trace)


def test_a_trace_that_no_longer_applies_is_replaced_by_tuning(tmp_path, log_folder, caplog):
    """An intrinsic was renamed: the default schedule, with a warning, until it is tuned again."""
    broken, level = tmp_path / "logs", host.level()
    shutil.copytree(log_folder, broken)
    path = folder_of(broken, TUNED.op, level) / records.RECORDS
    text = path.read_text()
    intrinsics = re.findall(r'"Tensorize",\[[^]]*\],\["(\w+)"', text)
    for name in intrinsics or ["matmul"]:  # level "plain" has none: a block
        text = text.replace(f'"{name}"', f'"gone_{name}"')
    path.write_text(text)
    contents = build([LINEAR], tmp_path / "one.so", logs_dirs=[broken])
    assert f"{path}:1: passed over: the trace does not apply to {TUNED.tag}" in caplog.text
    assert not contents["functions"][LINEAR.name]["buckets"][0]["tuned"]
    function = open_library(tmp_path / "one.so").functions[LINEAR.name]
    check(lambda *args: args[-1].numel() and function(*args), LINEAR, rows=1)
    assert "does not replay" in str(logs.check([broken])[0])
    options = {"trials": 2, "progress": False, "seed_logs": [broken]}
    tune([TUNED], work_dir=tmp_path / "work", **options)
    assert list(commit(tmp_path / "work", broken)) == [TUNED.tag]
    assert logs.check([broken]) == []
    assert logs.find(TUNED, level, [broken]) is not None


def test_default_schedules_are_reported(tmp_path, caplog):
    build([Swizzle()], tmp_path / "one.so", logs_dirs=[])
    [tag] = [workload.tag for workload in workloads(Swizzle(), host.level())]
    assert f"1 of 1 workloads have no log for cpu-{host.level()}" in caplog.text
    assert tag in caplog.text


def test_parts_of_a_function_are_reported_by_name(caplog):
    spec = FusedMoe(4, 128, 64, 2, act_fmt="nvfp4", layout="128x4")
    tags = [workload.tag for workload in workloads(spec, "sm_100a")]
    buckets = [{"tuned": i == 0, "arch": "sm_100a"} for i in range(len(tags))]
    functions = {spec.name: {"buckets": [{"tuned": False, "arch": "sm_90a"}, *buckets]}}
    builder._report_misses([spec], {"sm_100a": functions}, "sm_100a")
    assert f"5 of 6 workloads have no log for sm_100a and get default schedules: {tags[1]}" in (
        caplog.text
    )
    assert tags[0] not in caplog.text


def test_logs_of_the_package_are_the_default():
    assert committed_logs().is_dir()
    assert (committed_logs() / "__init__.py").is_file()


def test_base_name_stands_for_every_dtype(tmp_path):
    build(["scale_sweep_b16"], tmp_path / "sweeps.so", logs_dirs=[])
    library = open_library(tmp_path / "sweeps.so")
    assert set(library) == {ScaleSweep(dtype).name for dtype in ("float32", "bfloat16", "float16")}
    x, g = torch.ones(3, 16, dtype=torch.bfloat16), torch.tensor([1.0])
    assert library["scale_sweep_b16"](x, g, torch.tensor([0.5, 1.0])).tolist() == [1.0] * 3


@pytest.mark.parametrize("level", LEVELS)
def test_every_level(tmp_path, level):
    """Any machine builds for any level; one that lacks its features refuses the library."""
    path = tmp_path / "kernels.so"
    contents = build([Swizzle()], path, level=level, logs_dirs=[])
    assert contents["target"]["level"] == level
    for i, poorer in enumerate(LEVELS):
        present = CPU_TARGETS[poorer].features
        if i <= LEVELS.index(level):
            continue
        with pytest.raises(LibraryError) as caught:
            open_library(path, cpu_features=present)
        missing = sorted(set(CPU_TARGETS[level].features) - set(present))
        assert f"level '{level}' needs the CPU features {', '.join(missing)}" in str(caught.value)
        assert f"build the library with level '{poorer}'" in str(caught.value)
    needs(level)
    check(open_library(path).functions["swizzle_128x4"]._compiled, Swizzle())


@pytest.mark.parametrize(
    ("specs", "options", "error", "sentence"),
    [
        ([], {}, ValueError, "no kernel was asked for; name at least one, see 'blockscale list'"),
        (["gemm"], {}, ValueError, "'gemm' names no kernel; names look like grouped_mm_nvfp4"),
        (["linear_nvfp4_n4_k8_f32"], {}, ValueError, "k=8 is not a multiple of 16"),
        ([Swizzle()], {"level": "sse9"}, ValueError, r"'sse9' is neither a CPU level \(.*avx2"),
        ([Swizzle()], {"meta": {"x": object()}}, TypeError, "not JSON serializable"),
    ],
)
def test_bad_input(tmp_path, specs, options, error, sentence):
    """Nothing is written."""
    with pytest.raises(error, match=sentence):
        build(specs, tmp_path / "kernels.so", logs_dirs=[], **options)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none is not a folder, so .*\.so .*create it"):
        build([Swizzle()], tmp_path / "none" / "kernels.so", logs_dirs=[])


def test_damaged_log(tmp_path, log_folder):
    """The library that was there before stays."""
    folder = folder_of(tmp_path, TUNED.op, host.level())
    folder.mkdir(parents=True)
    for path in folder_of(log_folder, TUNED.op, host.level()).iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[:-20])
    out = tmp_path / "kernels.so"
    out.write_bytes(b"before")
    with pytest.raises(logs.LogError, match="database"):
        build([LINEAR], out, logs_dirs=[tmp_path])
    assert out.read_bytes() == b"before"


def test_build_stays_a_function():
    """Though the package of that name has been imported, here at the top."""
    import blockscale as bs

    assert bs.build.__module__ == "blockscale.runtime.jit"
    assert vars(bs).get("build", bs.build) is bs.build
