"""`blockscale emulate`: what it prints and writes, its exit codes. `launch` is a stand-in."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from blockscale.cli import command as cli
from blockscale.emulator import case
from blockscale.emulator.errors import Deadlock, PtxError
from blockscale.emulator.report import Hazard
from tests.emulator.cases.case_kit import GOT, Machine, case_data, write


@pytest.fixture
def machine(monkeypatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(case, "launch", made.launch)
    monkeypatch.setattr(case, "TensorMap", made.tensor_map)
    monkeypatch.setattr(case, "Struct", made.struct)
    return made


@pytest.fixture
def path(tmp_path) -> Path:
    return write(tmp_path, case_data())


def call(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """Run `blockscale emulate`; return its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["blockscale", "emulate", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_command_of_a_good_kernel(machine, path, tmp_path, monkeypatch, capsys):
    ptx = tmp_path / "elsewhere" / "mine.ptx"
    ptx.parent.mkdir()
    ptx.write_text("// mine\n")
    out_json, svg = tmp_path / "out.json", tmp_path / "out.svg"
    options = (
        "--seed",
        4,
        "--timeline",
        svg,
        "--window",
        0,
        5,
        "--json",
        out_json,
        "--max-instructions",
        50,
    )
    code, out, _ = call(monkeypatch, capsys, ptx, "--case", path, *options)
    assert code == 0
    (made,) = machine.calls
    assert (made.ptx, made.seed, made.max_instructions) == ("// mine\n", 4, 50)
    for part in ("k  grid 2 x 1 x 1", "no hazard", "c.npy: equal by value", "passed with seed 4"):
        assert part in out
    assert svg.read_text().startswith("<?xml")
    data = json.loads(out_json.read_text())
    assert data["passed"] is True
    assert data["runs"][0]["outputs"][0]["max_rel_row_error"] == 0.0
    assert data["runs"][0]["report"]["seed"] == 4


def test_command_of_a_kernel_with_wrong_numbers(machine, path, monkeypatch, capsys):
    machine.result = GOT + 1
    code, out, _ = call(monkeypatch, capsys, path.parent / "kernel.ptx", "--case", path)
    assert code == 1
    assert "12 of 12 elements differ" in out
    assert out.rstrip().endswith("FAILED")


def test_command_of_a_kernel_with_a_hazard(machine, path, monkeypatch, capsys):
    machine.hazards = [Hazard("race", "error", "two warps write", line=3)]
    code, out, _ = call(monkeypatch, capsys, path.parent / "kernel.ptx", "--case", path)
    assert code == 1
    assert "two warps write" in out
    machine.hazards = [Hazard("race", "warning", "perhaps", line=3)]
    assert call(monkeypatch, capsys, path.parent / "kernel.ptx", "--case", path)[0] == 0


def test_command_with_several_seeds_shows_the_first_failure(machine, path, monkeypatch, capsys):
    launch = machine.launch

    def sometimes(ptx, **keywords):
        machine.hazards = [Hazard("race", "error", "x", line=3)] if keywords["seed"] == 2 else []
        return launch(ptx, **keywords)

    monkeypatch.setattr(case, "launch", sometimes)
    ptx = path.parent / "kernel.ptx"
    code, out, _ = call(monkeypatch, capsys, ptx, "--case", path, "--seeds", 4)
    assert code == 1
    assert [c.seed for c in machine.calls] == [0, 1, 2, 3]
    assert "cluster 1 x 1 x 1, seed 2" in out
    assert "FAILED with 1 of 4 seeds" in out


def test_command_of_a_kernel_that_breaks_a_rule(machine, path, monkeypatch, capsys):
    ptx = path.parent / "kernel.ptx"
    machine.error = Deadlock("k: warp 0 waits at line 9")
    code, out, _ = call(monkeypatch, capsys, ptx, "--case", path, "--seeds", 2)
    assert code == 1
    assert "Deadlock: k: warp 0 waits at line 9" in out
    machine.error = PtxError("line 3: unknown opcode frobnicate")
    code, out, err = call(monkeypatch, capsys, ptx, "--case", path)
    assert (code, out) == (2, "")
    assert err == "blockscale: line 3: unknown opcode frobnicate\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--seed", "1", "--seeds", "2"], "--seed and --seeds exclude each other"),
        (["--seeds", "0"], "0 is not in the range x>=1"),
        (["--window", "0", "5"], "--window is of the picture that --timeline draws; give both"),
        (["--timeline", "t.pdf"], "--timeline t.pdf: a picture ends in .svg or .png"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere; make it first"),
    ],
)
def test_bad_usage(machine, path, monkeypatch, capsys, options, sentence):
    ptx = path.parent / "kernel.ptx"
    code, out, err = call(monkeypatch, capsys, ptx, "--case", path, *options)
    assert code == 2
    assert sentence in out + err
    assert not machine.calls


def test_errors_are_a_line_where_json_is_a_file(path, tmp_path, monkeypatch, capsys):
    library, out_json = tmp_path / "kernels.so", tmp_path / "out.json"
    library.write_bytes(b"\x7fELF\xff\xfe")
    code, out, err = call(monkeypatch, capsys, library, "--case", path, "--json", out_json)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"blockscale: {library}: holds no text, but PTX is text; name the kernel's .ptx"
    )
    assert not out_json.exists()


def test_bad_case_on_the_command_line(machine, path, monkeypatch, capsys):
    path.write_text("[]")
    code, _, err = call(monkeypatch, capsys, path.parent / "kernel.ptx", "--case", path)
    assert code == 2
    assert "a case is one JSON object" in err
