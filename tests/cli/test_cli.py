"""The command line: what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import blockscale as bs
from blockscale import specs
from blockscale.base import abi, host
from blockscale.base.manifest import BLOCKSCALE_ABI, append_manifest
from blockscale.cli import command as cli
from blockscale.cli import common
from blockscale.tuning.tuner import Interrupted, TuneResult
from tests.kit import warm
from tests.kit.library_seal import seal
from tests.kit.paths import CHECKPOINTS

NAME = "linear_nvfp4_n64_k64_f32"
COMMANDS = [
    [],
    ["tune"],
    ["build"],
    ["inspect"],
    ["convert"],
    ["logs"],
    ["logs", "check"],
    ["logs", "merge"],
    ["list"],
    ["emulate"],
]


def call(monkeypatch, capsys, *arguments: str, columns: int = 120) -> tuple[int, str, str]:
    """Run the command on a terminal of this width; return its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["blockscale", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def environment() -> dict[str, str]:
    """Variables for a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def manifest() -> dict:
    spec = specs.Spec.parse(NAME)
    params = [{**p.to_manifest(), "shape": list(p.shape)} for p in spec.params()]
    buckets = [{"rows": 1, "tuned": True}, {"rows": 16, "tuned": False}]
    entry = {"spec": spec.to_json(), "params": params, "base": spec.base_name, "buckets": buckets}
    return {
        "format": 1,
        "blockscale": "0.1.0",
        "abi": {"tvm_ffi": "0.1.14.post0", "facts": abi.declared(), "blockscale": BLOCKSCALE_ABI},
        "target": {"kind": "cpu", "level": "avx512", "features": ["avx512f"]},
        "built": {"date": "2026-01-01"},
        "functions": {NAME: entry},
    }


@pytest.fixture
def library(tmp_path) -> Path:
    """A file with a manifest and no code: `inspect` must not load it."""
    path = tmp_path / "kernels.so"
    path.write_bytes(append_manifest(b"\x7fELF" + bytes(60), manifest()))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_text_shows_an_example(monkeypatch, capsys, command):
    code, out, err = call(monkeypatch, capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert f"Example: blockscale {' '.join(command)}".strip() in " ".join(out.split())


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_example_of_the_group_runs_as_printed(monkeypatch, capsys, tmp_path):
    _, out, _ = call(monkeypatch, capsys, "--help")
    example = out.partition("Example: ")[2].partition("Options:")[0]
    assert example.count("blockscale ") == 2
    example = example.replace("k384", "k64_f32").replace("384", "64")
    example = example.replace("--seconds 30", "--trials 5 --seconds 250")
    example = example.replace(
        "blockscale ", f"{shlex.quote(sys.executable)} -m blockscale.cli.command "
    )
    done = subprocess.run(
        ["sh", "-c", example], cwd=tmp_path, capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done
    assert (tmp_path / "kernels.so").is_file()
    assert re.search("[1-4] of 4", done.stdout)  # one bucket at least


@pytest.mark.parametrize("command", ["--help", "list", "inspect {library}", "inspect nowhere.so"])
def test_commands_that_only_read_import_neither_tvm_nor_torch(library, command):
    code = (
        "import sys; from blockscale import cli; sys.argv[1:] = sys.argv[1:]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('tvm', 'tvm_ffi', 'torch') if m in sys.modules])"
    )
    arguments = command.format(library=library).split()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.splitlines()[-1] == "[]", done


def test_inspect_shows_functions_shapes_target_and_what_is_tuned(monkeypatch, capsys, library):
    code, out, _ = call(monkeypatch, capsys, "inspect", str(library))
    assert code == 0
    text = re.sub(r"[\s│]+", " ", out)
    assert "kernels.so: 1 function, " in text
    assert "level avx512" in text
    assert "needs the CPU features avx512f" in text
    rows = [line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│")]
    assert " ".join(rows) == (
        "x[rows, 64] float32, packed[64, 32] uint8 (e2m1x2), block_scale[64, 4] uint8 (e4m3), "
        "global_scale[1] float32 = 1, bias[64] float32 = 0 -> y[rows, 64] float32"
    )
    assert "1 of 2" in text


def test_inspect_json_is_the_manifest(monkeypatch, capsys, library):
    code, out, _ = call(monkeypatch, capsys, "inspect", str(library), "--json")
    assert code == 0
    assert json.loads(out) == {"library": str(library), **manifest()}


HOSTILE = ("\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202e\x00\nblockscale: all is well", "\ud800")


def places(value):
    """Return every string within a JSON value as a function that replaces it."""
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, str):
            found.append(lambda new, key=key: value.__setitem__(key, new))
        elif isinstance(inner, (dict, list)):
            found += places(inner)
    return found


@pytest.mark.parametrize("hostile", HOSTILE, ids=["controls", "surrogate"])
@pytest.mark.parametrize("terminal", [False, True])
def test_inspect_escapes_what_a_library_says(monkeypatch, capsys, library, terminal, hostile):
    """In text, tables, errors and JSON, each string in turn: no control character comes out."""
    if terminal:
        monkeypatch.setattr(common._Console, "is_terminal", True)
    data = json.dumps(manifest())
    shown = 0
    for i in range(len(places(json.loads(data)))):
        contents = json.loads(data)
        places(contents)[i](hostile)
        library.write_bytes(seal(b"\x7fELF" + bytes(60), json.dumps(contents).encode()))
        codes = set()
        for options in ([], ["--json"]):
            code, out, err = call(monkeypatch, capsys, "inspect", str(library), *options)
            said = re.sub(r"\x1b\[[01]?m" if terminal else "\n", "", out + err)  # rich's own bold
            assert said.replace("\n", "").isprintable(), ascii(said)
            assert not [line for line in out.splitlines() if line.startswith("blockscale: all")]
            codes.add(code)
        shown += codes == {0}
        assert codes in ({0}, {2})
    assert shown > 10


def test_a_path_is_escaped_too(monkeypatch, capsys, tmp_path):
    name = "\x1b[2J.so"
    _, _, err = call(monkeypatch, capsys, "inspect", str(tmp_path / name))
    assert err == f"blockscale: {tmp_path}/\\x1b[2J.so: No such file or directory\n"


def test_list_is_a_line_a_family(monkeypatch, capsys):
    _, out, _ = call(monkeypatch, capsys, "list")
    lines, _, hint = out.partition("\n\n")
    assert [line.split()[0] for line in lines.splitlines()] == [*specs.SPECS]
    assert all(line.split()[1] in specs.NAME_EXAMPLES for line in lines.splitlines())
    assert "blockscale list FILTER" in hint
    _, out, _ = call(monkeypatch, capsys, "list", "--all")
    assert all(f"  {name}\n" in out for name in specs.NAME_EXAMPLES)
    _, out, _ = call(monkeypatch, capsys, "list", "--json")
    assert [e["name"] for e in json.loads(out)["examples"]] == list(specs.NAME_EXAMPLES)


@pytest.mark.parametrize(
    ("filters", "families"),
    [
        ("moe", ["fused_moe", "moe_route"]),
        ("MOE route", ["moe_route"]),
        ("quant", ["quantize", "dequantize", "swizzle", "unswizzle", "scale_sweep"]),
        ("linear", ["linear"]),
        ("linear_nvfp4_n64_k64", ["linear"]),
    ],
)
def test_list_shows_all_about_what_is_asked_for(monkeypatch, capsys, filters, families):
    """By a word of a name, of a family, or by the name of any kernel."""
    code, out, _ = call(monkeypatch, capsys, "list", *filters.split())
    assert code == 0
    shown = [line.partition(":")[0] for line in out.splitlines() if line[:1].strip()]
    assert shown[: len(families)] == families
    unbroken = out.replace("\n    ", "")
    for family in families:
        assert f"{family}: {specs.SPECS[family].pattern.template}\n" in unbroken
    _, out, _ = call(monkeypatch, capsys, "list", *filters.split(), "--json")
    names = [example["name"] for example in json.loads(out)["examples"]]
    assert {specs.Spec.parse(name).op for name in names} >= {*families}
    if "n64" in filters:
        assert names == [f"{filters}_{dtype}" for dtype in ("f32", "bf16", "f16")]


@pytest.mark.parametrize("columns", [80, 200])  # names, of up to 60 letters, are not broken
def test_output_is_as_wide_as_the_terminal(monkeypatch, capsys, library, columns):
    for arguments in (["list"], ["list", "linear"], ["inspect", str(library)]):
        _, out, _ = call(monkeypatch, capsys, *arguments, columns=columns)
        widest = max(len(line) for line in out.splitlines() if str(library) not in line)
        assert widest <= columns, out
    assert widest > columns // 2


@pytest.mark.parametrize(
    ("words", "completion"),
    [
        ("blockscale t", "tune"),
        ("blockscale build mo", "moe_route_e256_k8_sigmoid_norm_bias_g8x4_f32"),
    ],
)
def test_a_shell_completes(words, completion):
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; sys.argv = ['blockscale']; from blockscale.cli import main; main()"
    variables |= {**environment(), "_BLOCKSCALE_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.stdout.splitlines() == [f"plain,{completion}"], done


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tune", "no_such_kernel"], "'no_such_kernel' names no kernel; names look like "),
        (["tune"], "Missing argument 'NAMES...'"),
        (["tune", NAME, "--seconds", "0"], "seconds=0.0 is no time to measure in; give 0.1"),
        (["tune", NAME, "--key", "h"], "key='h' names servers of a tracker, and there is none"),
        (["tune", NAME, "--level", "avx1024"], "'avx1024' is not one of"),
        (["build", NAME], "Missing option '-o'"),
        (["build", NAME, "-o", "x.so", "--ptx"], "--ptx is for GPUs; name their architecture with"),
        (["build", "linear_nvfp4_n8_k8_f32", "-o", "x.so"], "k=8 is not a multiple of 16"),
        (["list", "linear_nvfp4_n64_k60"], "k=60 is not a multiple of 16"),
        (["list", "lienar_nvfp4_n64_k64"], "did you mean linear_nvfp4_n64_k64?"),
        (["inspect", "nowhere.so"], "nowhere.so: No such file or directory"),
        (["inspect", __file__], "not with the ELF magic"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(monkeypatch, capsys, arguments, sentence):
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("blockscale: ")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["linear_nvfp4_n384_k384", "fused_moe_nvfp4_e8_k2_h64_i64_swiglu"])
@pytest.mark.parametrize(
    ("dtype", "tiled"), [("", "_tiles64 (bf16 and f16)"), ("_f16", "_tiles64_f16")]
)
def test_a_layout_that_no_gpu_reads_is_answered_by_a_name(
    monkeypatch, capsys, tmp_path, name, dtype, tiled
):
    """Without its dtype a name stands for float32 as well, which is not what is wrong with it."""
    out = str(tmp_path / "a.so")
    code, _, err = call(monkeypatch, capsys, "build", name + dtype, "--target", "sm_90a", "-o", out)
    said = "the weight is in layout 'linear', which GPU kernels do not read"
    assert (code, f"{said}; build {name}{tiled}, or for a CPU level\n" in err) == (2, True), err


@pytest.mark.parametrize("target", [[], ["--target", "sm_90a"]])
def test_a_library_that_cannot_be_written_is_not_built(monkeypatch, capsys, tmp_path, target):
    def never(*_):
        raise AssertionError("scheduled")

    monkeypatch.setattr("blockscale.building.builder._traces", never)
    name = NAME.replace("f32", "bf16")
    code, _, err = call(
        monkeypatch, capsys, "build", name, "-o", str(tmp_path / "no" / "a.so"), *target
    )
    assert (code, "no is not a folder, so a.so cannot be written there" in err) == (2, True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    code, _, err = call(monkeypatch, capsys, "build", name, "-o", str(tmp_path / "a.so"), *target)
    assert (code, f"{tmp_path} is not writable" in err) == (2, True)


def test_build_names_what_it_would_build(monkeypatch, capsys):
    """Of names and of a checkpoint, without a library and without the compiler."""
    monkeypatch.setitem(sys.modules, "blockscale.building.builder", None)
    checkpoint = str(CHECKPOINTS / "modelopt_qwen3moe_nvfp4_default_cfg")
    base = "linear_nvfp4_n64_k64"
    options = (base, "--checkpoint", checkpoint, "--target", "sm_90a", "--names")
    code, out, err = call(monkeypatch, capsys, "build", *options)
    names = out.splitlines()
    assert (code, err) == (0, "")
    assert names[:3] == [f"{base}_{dtype}" for dtype in ("f32", "bf16", "f16")]
    assert sorted({specs.Spec.parse(name).op for name in names}) == [
        *("fused_moe", "linear", "moe_route")
    ]
    assert all("_tiles64_bf16" in name or "route" in name for name in names[3:])
    code, out, _ = call(monkeypatch, capsys, "build", *options, "--json")
    assert (code, json.loads(out)) == (0, {"names": names})


def test_the_packages_logs_come_last(monkeypatch, capsys, tmp_path):
    """The command looks where `blockscale.build` does."""
    seen = []

    def build(wanted, out, *, logs_dirs, **_):
        seen.append(list(logs_dirs))
        return manifest()

    monkeypatch.setattr("blockscale.building.builder.build", build)
    monkeypatch.setattr("blockscale.runtime.library.load", lambda path: None)
    out = str(tmp_path / "a.so")
    for given in ([], [tmp_path]):
        bs.build([NAME], out, logs=given)
        options = [word for folder in given for word in ("--logs", str(folder))]
        assert call(monkeypatch, capsys, "build", NAME, "-o", out, "--json", *options)[0] == 0
    assert seen == 2 * [[common.committed()]] + 2 * [[tmp_path, common.committed()]]


def test_an_error_as_json(monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "inspect", "nowhere.so", "--json")
    assert (code, err) == (2, "")
    assert json.loads(out) == {"error": "nowhere.so: No such file or directory"}


def test_a_truncated_library_is_an_error(monkeypatch, capsys, library):
    library.write_bytes(library.read_bytes()[:-20])
    code, _, err = call(monkeypatch, capsys, "inspect", str(library))
    assert code == 2
    assert "truncated or changed" in err


def test_logs_check(monkeypatch, capsys, tmp_path):
    code, out, _ = call(monkeypatch, capsys, "logs", "check", str(tmp_path))
    assert code == 1
    assert out.splitlines() == [
        f"{tmp_path}: has no entry; name a folder that holds <op>/cpu-<level>/meta.json",
        f"{tmp_path}: 0 entries, 1 problem",
    ]
    damaged = tmp_path / "linear" / "cpu-avx2"
    damaged.mkdir(parents=True)
    (damaged / "database_workload.json").write_text('["123", "trunc')
    code, out, _ = call(monkeypatch, capsys, "logs", "check", str(tmp_path), "--json")
    assert code == 1
    [problem] = json.loads(out)["problems"]
    assert str(damaged) in problem["where"]


def test_logs_merge(monkeypatch, capsys, tmp_path):
    """A line a workload that changed, as text and as JSON; logs of this package's own kernels."""
    source, out = tmp_path / "a", tmp_path / "out"
    place = Path("linear", "cpu-avx512")
    shutil.copytree(common.committed() / place, source / place)
    code, text, _ = call(monkeypatch, capsys, "logs", "merge", str(source), "-o", str(out))
    *lines, last = text.splitlines()
    assert (code, last) == (0, f"{out}: {len(lines)} workloads changed")
    tag = "linear_nvfp4_n1536_k384_bf16_m1"
    origin = "9.60 us (AMD EPYC, 2026-11-20)"
    assert f"{place}: {tag}: {origin} from {source}; new" in lines
    meta = json.loads((source / place / "meta.json").read_text())
    written = json.loads((out / place / "meta.json").read_text())
    assert written == meta
    meta["workloads"] = {tag: meta["workloads"][tag] | {"workload": "1"}}
    (source / place / "meta.json").write_text(json.dumps(meta))
    other = str(tmp_path / "other")
    code, text, _ = call(monkeypatch, capsys, "logs", "merge", str(out), "-o", other, "--json")
    changed = json.loads(text)["changed"]
    assert (code, len(changed)) == (0, len(lines))
    assert {change["source"] for change in changed} == {str(out)}
    command = ("logs", "merge", str(source), "-o", str(out))
    code, text, _ = call(monkeypatch, capsys, *command)
    first, last = text.splitlines()
    assert f"{tag!r} passed over: its IR has changed; tune it again" in first
    assert (code, last) == (0, f"{out}: 0 workloads changed, 1 entry passed over")
    code, text, _ = call(monkeypatch, capsys, *command, "--json")
    assert (code, json.loads(text)["changed"], len(json.loads(text)["passed_over"])) == (0, [], 1)
    code, _, err = call(monkeypatch, capsys, "logs", "merge", str(out), "-o", str(out))
    assert (code, "is the folder to write as well" in err) == (2, True)


@pytest.mark.timeout(600)
def test_tune_commits_and_prints_json(monkeypatch, capsys, tmp_path):
    work, logs = tmp_path / "work", tmp_path / "tuned"
    options = ["--work-dir", str(work), "--logs", str(logs), "--json", "--commit"]
    with warm.workers():
        code, out, _ = call(
            monkeypatch, capsys, "tune", NAME, *options, "--trials", "5", "--seconds", "250"
        )
    assert code == 0
    report = json.loads(out)
    assert report["trials"] == 5
    assert report["interrupted"] is False
    assert set(report["committed"]) <= set(report["best_us"])
    assert report["committed"]
    assert (logs / "linear" / f"cpu-{host.level()}" / "meta.json").exists()
    # In a process where no search space has registered an intrinsic yet.
    command = [sys.executable, "-m", "blockscale.cli.command", "logs", "check", str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done
    assert re.fullmatch(rf"{logs}: (1 entry fits|\d+ entries fit)\n", done.stdout)


def test_an_interrupted_tuning_says_what_was_saved(monkeypatch, capsys, tmp_path):
    def interrupted(*_args, **_options):
        raise Interrupted(
            TuneResult(best={"w": 2.0}, default={"w": 3.0}, failed={"w": 0}, trials=7)
        )

    monkeypatch.setattr("blockscale.tuning.tuner.tune", interrupted)
    code, out, err = call(monkeypatch, capsys, "tune", NAME, "--work-dir", str(tmp_path))
    assert code == 130
    assert "7 trials" in out
    assert "every finished trial is saved" in err


def test_workloads_that_nothing_was_measured_of_have_no_time(monkeypatch, capsys):
    inf = float("inf")
    times = {"tried": (2.0, 3.0), "not": (inf, inf), "grown": (2.0, inf)}
    best, default = ({tag: pair[i] for tag, pair in times.items()} for i in (0, 1))
    found = TuneResult(best=best, default=default, failed=dict.fromkeys(times, 0), trials=1)
    monkeypatch.setattr("blockscale.tuning.tuner.tune", lambda *_args, **_options: found)
    _, out, _ = call(monkeypatch, capsys, "tune", NAME)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["tried", "3.0", "2.0", "1.50x", "0"] in rows
    assert ["not", "-", "-", "-", "0"] in rows
    assert ["grown", "-", "2.0", "-", "0"] in rows
    _, out, _ = call(monkeypatch, capsys, "tune", NAME, "--json")
    assert json.loads(out)["best_us"] == {"tried": 2.0, "not": None, "grown": 2.0}


def test_ctrl_c_exits_130_and_keeps_the_trials(tmp_path):
    command = [
        sys.executable,
        "-m",
        "blockscale.cli.command",
        "tune",
        "linear_nvfp4_n1024_k1024_bf16",
    ]
    process = subprocess.Popen(
        [*command, "--seconds", "120", "--work-dir", str(tmp_path), "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background job ignores SIGINT, and its children would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    path = tmp_path / "linear" / f"cpu-{host.level()}" / "database_tuning_record.json"
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_bytes().count(b"\n") < 2:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["trials"] == path.read_bytes().count(b"\n")
    assert "Traceback" not in err


def test_a_gpu_is_named_by_its_architecture(monkeypatch, capsys):
    seen = []

    def tune(wanted, **options):
        seen.append((wanted, options["target"], options["trials_each"]))
        return TuneResult()

    monkeypatch.setattr("blockscale.tuning.tuner.tune", tune)
    options = ("tune", NAME, "--target", "sm_90a")
    assert call(monkeypatch, capsys, *options, "--trials-each", "7")[0] == 0
    assert seen == [([specs.Spec.parse(NAME)], "sm_90a", 7)]
    code, _, err = call(monkeypatch, capsys, *options, "--level", "avx2")
    assert (code, len(seen)) == (2, 1)
    assert "--level avx2 is for a CPU and --target sm_90a for a GPU; give one of them" in err
    code, _, err = call(monkeypatch, capsys, "tune", NAME, "--target", "hopper")
    assert (code, len(seen)) == (2, 1)
    assert "'hopper' is no architecture of a GPU; write for example sm_90a" in err
