"""The report: hazards counted once each, what `check` raises, tables and JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest
from rich.console import Console

from blockscale.emulator.errors import EmulationError
from blockscale.emulator.report import ENGINES, MEMORIES, Event, Hazard, HazardError, Report

RACE = Hazard(
    "race",
    "error",
    "lane 5 reads 4 bytes at shared 0x410 that warp 1 wrote without a barrier in between; "
    "put bar.sync between them",
    kernel="gemm",
    line=120,
    opcode="ld.shared.b32",
    cta=0,
    warp=3,
    lane=5,
    other="line 88, warp 1",
    other_line=88,
)
LATE = Hazard("unwaited tcgen05.ld", "warning", "registers are read early", line=7, warp=0)


def filled() -> Report:
    report = Report("gemm", (2, 1, 1), (128, 1, 1), (2, 1, 1), seed=3)
    for index, opcode in enumerate(["add.s32", "mov.b32", "ld.shared.b32", "bra"]):
        report.instructions[opcode] += np.int64(10**index)
    report.warp_instructions = 1111
    report.moved("shared", read=512, written=128)
    report.operated("tma.load", 16384, 2)
    report.banked(40, wavefronts=8, ideal=1)
    report.banked(40, wavefronts=8, ideal=1)
    report.banked(41, wavefronts=1, ideal=1)
    report.events.append(Event("CTA 0 / warp 0", np.float64(0), 5.0, "compute"))
    report.cycles, report.wall_seconds = np.float64(1234), 0.5
    report.smem_bytes, report.tmem_columns_high_water = 36872, 128
    return report


def shown(report: Report, opcodes: int = 15) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(opcodes))
    return console.export_text()


def test_a_hazard_is_reported_once_per_place_and_counted():
    report = filled()
    assert report.add(RACE) is True
    again = Hazard("race", "error", "another lane", line=120, lane=9, other="warp 2", other_line=88)
    assert report.add(again) is False
    elsewhere = Hazard("race", "error", "another line", line=120, other_line=89)
    assert report.add(elsewhere) is True
    assert report.add(LATE) is True
    assert report.hazards == [RACE, elsewhere, LATE]
    assert [report.count(h) for h in report.hazards] == [2, 1, 1]
    assert report.errors == [RACE, elsewhere]
    assert report.warnings == [LATE]
    assert not report.ok


def test_check_returns_a_good_report_and_raises_with_every_error_named():
    report = filled()
    report.add(LATE)
    assert report.check() is report
    report.add(RACE)
    report.add(RACE)
    report.add(
        Hazard("tmem not freed", "error", "64 columns at 0 are still allocated", cta=(1, 0, 0))
    )
    with pytest.raises(EmulationError) as raised:
        report.check()
    assert type(raised.value) is HazardError
    text = str(raised.value)
    assert text.startswith("gemm: 2 hazards with seed 3:\n")
    assert (
        "2 x race at line 120, ld.shared.b32, CTA 0, warp 3, lane 5; the other access: line 88, "
        "warp 1: lane 5 reads" in text
    )
    assert "tmem not freed at CTA (1, 0, 0): 64 columns" in text
    assert "unwaited" not in text


def test_json_is_plain_and_complete():
    report = filled()
    report.add(RACE)
    data = json.loads(json.dumps(report.to_json(events=True)))
    assert list(data["instructions"]) == ["bra", "ld.shared.b32", "mov.b32", "add.s32"]
    assert set(data["bytes"]) == set(MEMORIES)
    assert set(data["engines"]) == set(ENGINES)
    assert data["bytes"]["shared"] == {"read": 512, "written": 128}
    assert data["engines"]["tma.load"] == {"operations": 2, "bytes": 16384}
    assert data["bank_conflicts"][0] == {"line": 40, "accesses": 2, "wavefronts": 16, "ideal": 2}
    assert data["hazards"][0]["count"] == 1
    assert data["hazards"][0]["line"] == 120
    assert data["events"][0]["track"] == "CTA 0 / warp 0"
    assert data["ok"] is False
    assert "events" not in report.to_json()


def test_tables_show_what_happened_and_leave_out_what_did_not():
    report = filled()
    text = shown(report, opcodes=2)
    for part in (
        "gemm  grid 2 x 1 x 1, block 128 x 1 x 1, cluster 2 x 1 x 1, seed 3",
        "1,111 warp-instructions in 0.50 s (2,222/s), 1,234 virtual cycles",
        "shared memory 36,872 bytes, TMEM 128 columns",
        "2 other opcodes",
        "tma.load",
        "16,384",
        "no hazard",
    ):
        assert part in text
    assert "cp.async" not in text
    assert "local" not in text
    conflict = next(line for line in text.splitlines() if line.startswith("40"))
    assert conflict.split() == ["40", "2", "16", "2", "8.0"]
    assert not any(line.startswith("41 ") for line in text.splitlines())
    report.add(LATE)
    report.add(RACE)
    report.add(RACE)
    text = shown(report)
    assert text.index("error") < text.index("warning")
    assert "2 times" in text
    assert "other: line 88, warp 1" in text


def test_text_of_opcodes_is_not_markup():
    report = Report("k")
    report.instructions["ld.global[red]"] += 1
    assert "ld.global[red]" in shown(report)


def test_one_line_summary():
    report = filled()
    assert str(report) == (
        "gemm, seed 3: 1,111 warp-instructions, 1,234 virtual cycles, 0.50 s, no hazard"
    )
    report.add(RACE)
    report.add(LATE)
    assert str(report).endswith("1 errors, 1 warnings")
