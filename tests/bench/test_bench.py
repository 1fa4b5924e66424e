"""The benchmark: fair turns, formulas that are right, wrong kernels without a time, tables."""

import json
import re
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from tests.kit.helpers import random_matrix, same_bytes, tensor, widen
from tests.kit.paths import ROOT
from tests.reference import core as ref

cpu = pytest.importorskip(
    "bench.cpu.__main__", reason="bench/ is part of the checkout, not of the wheel"
)
from bench import measure, readme, reference, report  # noqa: E402
from bench.cpu import cases  # noqa: E402
from bench.cpu import report as tables  # noqa: E402
from blockscale.demo import timing  # noqa: E402

SMALL = {
    "sweep": partial(cases.sweep, 64, 64),
    "dequantise": partial(cases.dequantise, 64, 64),
    "quantise": partial(cases.quantise, 64, 64),
    "swizzle": partial(cases.swizzle, 128, 8),
    "linear rows 1": partial(cases.linear, 64, 64, 1, {torch.float32: 1e-9, torch.bfloat16: 1e9}),
    "linear rows 3": partial(cases.linear, 64, 64, 3, {}),
}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A cache of 64 KiB, short samples, a quiet machine; no case of another size."""
    monkeypatch.setattr(timing.Watched, "disturbed", lambda self: "")
    monkeypatch.setattr(measure, "last_cache_bytes", lambda: 64 << 10)
    monkeypatch.setattr(timing, "LEAST_SAMPLE_S", 1e-5)
    monkeypatch.setattr(cases, "all_cases", lambda: SMALL)
    cases._weight.cache_clear()


def run(*arguments):
    """Run the command; return its result."""
    return CliRunner().invoke(cpu.main, arguments)


def test_contenders_take_turns(monkeypatch):
    """A, B, A, B, ...; every call gets the next number, so the next copy of the data."""
    monkeypatch.setattr(timing, "LONG_CALL_S", 0.0)  # no untimed calls
    monkeypatch.setattr(timing, "LEAST_SAMPLE_S", 0.0)  # one call a sample
    seen = []
    contenders = {name: lambda number, name=name: seen.append((name, number)) for name in "AB"}
    times, _ = timing.interleaved(contenders, repeats=5)
    assert [name for name, _ in seen[-10:]] == ["A", "B"] * 5
    for name in "AB":
        assert [number for who, number in seen if who == name] == list(range(len(seen) // 2))
        assert (times[name].samples, times[name].calls) == (5, 1)
        assert 0 < times[name].low <= times[name].median <= times[name].high


def test_copies_fill_the_cache_and_share_nothing():
    original = torch.arange(1000, dtype=torch.float32).view(10, 100)
    found = measure.copies(original)
    assert len(found) * 4000 > measure.CPU_CACHES * (64 << 10)
    assert all(torch.equal(copy, original) and copy.is_contiguous() for copy in found)
    assert len({copy.data_ptr() for copy in [original, *found]}) == len(found) + 1


@pytest.mark.parametrize("g", [1.0, 0.0123])
def test_the_eager_formulas_are_the_reference(g):
    """Random blocks of all sizes, a zero block, a block too small for its scale, exact ties."""
    values = random_matrix((33, 64), "nvfp4", seed=5, spread=12)
    values[3, 16:32], values[4, :16] = 0.0, 1e-9
    values[5, :16] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -0.0, 0, -5, 4, 3, 2]
    x, scalar = tensor(values, "bfloat16"), torch.tensor([g])
    packed, scale = reference.quantize_eager(x, scalar)
    codes, byte = ref.quantize(widen(x), "nvfp4", np.float32(g))
    same_bytes(scale.view(torch.uint8).numpy(), byte)
    same_bytes(packed.numpy(), ref.pack(codes))
    for rows in (1, 8, 40):
        chunked = reference.quantize_chunked(x, scalar, rows)
        assert torch.equal(chunked[0], packed)
        assert torch.equal(chunked[1].view(torch.uint8), scale.view(torch.uint8))
    decoded = reference.dequantize(packed, scale.view(torch.uint8), scalar, torch.float32)
    assert np.array_equal(decoded.numpy(), ref.dequantize(codes, byte, "nvfp4", np.float32(g)))


def test_every_case_is_right_and_timed(tmp_path):
    """The real cases on small shapes, through the command, to JSON and into a README."""
    out = tmp_path / "results"
    done = run("--json", "--out", str(out), "--repeats", "3")
    assert done.exit_code == 0, done.output
    [path] = out.iterdir()
    results = json.loads(path.read_text())
    assert json.loads(done.stdout) == results
    place = measure.place(out, "cpu", results["machine"]["cpu"], results["date"])
    assert path == place
    assert path.name.startswith("cpu-")
    assert {"cpu", "cores", "level", "torch_threads"} <= set(results["machine"])
    assert {"torch", "TVM", "tvm-ffi"} <= set(results["versions"])
    assert [case["name"] for case in results["cases"]] == list(SMALL)
    judged = [
        (c["kind"], c["bar"], c["met"]) for case in results["cases"] for c in case["comparisons"]
    ]
    assert ("seconds", 2.0, True) in judged
    assert ("faster", 1e-9, True) in judged
    assert ("faster", 1e9, False) in judged
    assert ("faster", None, None) in judged

    page = tmp_path / "README.md"
    page.write_text("a\n<!-- bench:start -->\nold\n<!-- bench:end -->\nz\n")
    assert CliRunner().invoke(readme.main, [str(page), "--bench", str(path)]).exit_code == 0
    text = page.read_text()
    assert text.startswith("a\n<!-- bench:start -->\n| case | ours |")
    assert text.endswith("<!-- bench:end -->\nz\n")
    assert "old" not in text
    assert f"(results/{path.name})" in text
    assert "| 64 x 64 | 3 |" in text


def test_a_wrong_kernel_has_no_time(monkeypatch):
    """Its sentence stands in the results, and the exit code is 1."""

    def broken():
        case = cases.linear(64, 64, 3, {})
        calls = {name: lambda number: torch.zeros(3, 64) for name in case.contenders}
        for name in calls:
            case.contenders[name] = calls[name]
        return case

    monkeypatch.setattr(cases, "all_cases", lambda: {"broken": broken})
    done = run("--json", "--repeats", "3")
    assert done.exit_code == 1
    assert "ours fp32 errs by 1.0e+00, allowed 1e-05" in done.stderr
    [case] = json.loads(done.stdout)["cases"]
    assert "times" not in case
    assert "errs by" in case["wrong"]
    assert "Wrong results, not timed: broken" in run("--repeats", "3").stdout


def test_disturbed_times_are_not_compared(monkeypatch):
    """They stay; ratio and verdict do not, in the results, the table and the README's text."""
    monkeypatch.setattr(timing.Watched, "disturbed", lambda self: "others took 50%")
    only = {name: SMALL[name] for name in ("swizzle", "linear rows 3")}
    monkeypatch.setattr(cases, "all_cases", lambda: only)
    results = json.loads(run("--json", "--repeats", "3").stdout)
    for case in results["cases"]:
        assert case["watched"]["disturbed"] == "others took 50%"
        assert {(c["ratio"], c["met"]) for c in case["comparisons"]} == {(None, None)}
        assert all(time["median"] > 0 for time in case["times"].values())
    text = tables.section(results, "r.json")
    assert "| not meaningful |  |  |\n" in text  # the swizzle
    [linear] = [line for line in text.splitlines() if line.startswith("| 64 x 64 | 3 |")]
    assert linear.count("not meaningful") == 2
    assert not re.search(r"\d x ", text.replace("64 x 64", ""))
    assert "The machine was busy, and ratios are not meaningful:" in text
    assert "swizzle: others took 50%" in text


def test_only_takes_a_text_or_a_glob():
    assert report.chosen(SMALL, "linear", "case") == ["linear rows 1", "linear rows 3"]
    assert report.chosen(SMALL, "l*3", "case") == ["linear rows 3"]
    done = run("--only", "conv")
    assert done.exit_code == 1
    assert "'conv' matches no case; the cases are sweep, dequantise" in done.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no markers", "needs the lines <!-- bench:start --> and <!-- bench:end -->"),
        ("<!-- bench:end --><!-- bench:start -->", "once and in this order"),
    ],
)
def test_a_page_without_markers_is_left_alone(tmp_path, text, sentence):
    page, results = tmp_path / "README.md", tmp_path / "r.json"
    page.write_text(text)
    empty = {"machine": cpu.machine(), "versions": {}, "date": "2026-01-01", "cases": []}
    results.write_text(json.dumps({"format": 1, "repeats": 3, "cache_multiple": 4, **empty}))
    done = CliRunner().invoke(readme.main, [str(page), "--bench", str(results)])
    assert done.exit_code == 1
    assert sentence in done.stderr
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("content", "sentence"), [("{", "is not JSON"), ('{"format": 9}', "has format 9, this program")]
)
def test_damaged_results(tmp_path, content, sentence):
    results = tmp_path / "r.json"
    results.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        report.read(results, cpu.FORMAT)


def test_demo_section():
    """One row for each variant; the figures are those of the file."""
    variants = ("torch_f32", "torch_bf16", "ours_f32", "ours_bf16")
    figures = {v: {"median": i / 100, "top1": 1 - i / 10} for i, v in enumerate(variants)}
    result = {
        "model": "m",
        "date": "2026-01-02T00:00:00",
        "sentences": {"count": 7},
        "machine": {"cpu": "c", "cores": 2, "torch_threads": 2},
        "versions": {"torch": "2"},
        "end_to_end": figures,
        "bytes": {"fp32": 4 << 20, "bf16": 2 << 20, "nvfp4": 1 << 19},
        "latency": [
            {"input": "one", "sentences": 1, "tokens": 5, "ms": dict.fromkeys(variants, 2)}
        ],
    }
    text = readme.demo_section(result)
    assert "| torch bf16 | 1.00 % | 90.0 % | 2.0 MiB | 2.00 ms |" in text
    assert "| NVFP4 bf16 | 3.00 % | 70.0 % | 0.5 MiB | 2.00 ms |" in text
    assert "2026-01-02" in text
    assert "busy" not in text
    result["latency"][0]["watched"] = {"disturbed": "others took 50%"}
    text = readme.demo_section(result)
    assert "ratios nothing: the machine was busy (in 1 of 1 measurements; in the first" in text
    assert "others took 50%" in text


def test_scattered_times_are_told():
    quiet, loud = (
        {"name": "n", "times": {"ours": {"median": 1.0, "low": 0.9, "high": high}}}
        for high in (1.1, 1.2)
    )
    head = {"machine": cpu.machine(), "versions": {}, "date": "2026-01-01"}
    head |= {"repeats": 3, "cache_multiple": 4}
    assert "Not quiet" not in tables.section({**head, "cases": [quiet, quiet]}, "r.json")
    text = tables.section({**head, "cases": [quiet, loud]}, "r.json")
    assert "Not quiet: for 1 of 2 times the quartiles are more than 25% of the median" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000123, "12.3 us"), (0.000412, "412 us"), (0.00123, "1.23 ms"), (2.5, "2.50 s")],
)
def test_time_text(seconds, text):
    assert report.time_text(seconds) == text


def test_the_page_shows_the_committed_logs():
    page = (report.ROOT / readme.TUNED).read_text()
    shown = page.split("<!-- tuned:start -->")[1].split("<!-- tuned:end -->")[0]
    assert shown.strip() == readme.tuned_section(report.ROOT / "tuning_logs")


def test_a_row_of_tuned_workloads():
    """A workload whose default was not measured counts as one, but has no speed-up."""
    machine = {"gpu": "GPU", "date": "2026-01-02"}
    times = {"a": (3.0, 2.0), "b": (2.0, 2.0), "c": (4.0, 1.0), "d": (None, 7.0)}
    work = {tag: machine | {"default_us": d, "best_us": b} for tag, (d, b) in times.items()}
    cells = readme.tuned_row({"op": "x", "level": "sm_90a", "workloads": work})
    assert cells[:4] == ["`x`", "sm_90a: GPU, 2026-01-02", "4", "1.50"]
    assert cells[4:] == ["4.00", "`c`", "4.00", "1.00"]
    modelled = {"modelled": True, "date": "2026-01-02", "best_modelled_us": 5.0}
    told = readme.tuned_row({"op": "x", "level": "sm_100a", "workloads": {"a": modelled}})
    assert told[1:] == ["sm_100a: the model of a B200, 2026-01-02", "1", *[""] * 5]


def test_tables_of_fp8_rows():
    """Of linear layers what is right, and how many results are not; of MoE layers all."""
    head = {
        "machine": {"gpu": "GPU", "driver_version": "1"},
        "versions": {"CUDA": "13", "torch": "2"},
        "date": "2026-01-02T03",
        "libraries": [{"functions": 5, "tuned": 2}],
    }
    us = {"16 bits": 90.0, "fp8 in 16 bits": 95.0, "fp8": 60.0, "torch": 80.0, "_scaled_mm": 50.0}
    row = {"weight": "int4g128", "n": 64, "k": 128, "rows": 512, "us": us, "right": True}
    row["errors"] = {"fp8": 1.7e-3}
    text = readme.linear_fp8_section(head | {"rows": [row, {"right": False}]}, "r.json")
    assert (
        "| int4g128 | 64 x 128 | 512 | 90.0 | 95.0 | 60.0 | 1.50 | 80.0 | 50.0 | 1.7e-03 |" in text
    )
    assert "1 results were wrong" in text
    assert "logged schedules for all sizes in 2 of 5 functions, in the others for some" in text
    head["libraries"] = [{"buckets": 4, "tuned_buckets": 3}, {"buckets": 1, "tuned_buckets": 1}]
    times = {
        f"{road}{part}": {"us": value}
        for part, more in (("", 10.0), (", GEMMs", 0.0))
        for road, value in (
            ("16 bits", 300 + more),
            ("fp8 in 16 bits", 310 + more),
            ("fp8", 250 + more),
        )
    }
    case = {"model": "m", "weights": "int4", "tokens": 64, "times": times}
    case["errors"] = {"fp8": {"median": 2e-3, "worst": 4e-3}}
    faster = case | {
        "weights": "mxfp4",
        "errors": case["errors"] | {"fp8 fast": {"median": 1e-2, "worst": 2e-2}},
    }
    faster["times"] = times | {"fp8 fast, GEMMs": {"us": 200.0}, "fp8 fast": {"us": 210.0}}
    other = deepcopy(faster) | {"model": "n"}
    other["times"]["16 bits, GEMMs"]["us"] = 600.0
    other["times"] |= {"humming-kernels, a": {"us": 400.0}, "humming-kernels, b": {"us": 300.0}}
    text = readme.moe_fp8_section(head | {"cases": [case, faster, other]}, "r.json")
    assert "| m | int4 | 64 | 300 | 310 | 250 (1.20 x) |  |  | 310 | 260 |  | 2.0 (4) |  |" in text
    fast = "| 250 (1.20 x) | 200 (1.50 x) |  | 310 | 260 | 210 | 2.0 (4) | 10.0 (20) |"
    assert f"| m | mxfp4 | 64 | 300 | 310 {fast}" in text
    assert "| 200 (3.00 x) | 300 (1.20; 1.50) | 310 |" in text
    assert "| int4 | 8 bits, to 16 bits | 1.20 |" in text
    assert "| mxfp4 | 8 bits, to 16 bits | 1.70 |" in text  # the root of 1.2 * 2.4
    assert "| mxfp4 | fast, to humming-kernels | 1.50 |" in text
    assert "logged schedules in 4 of 5 kernels by size" in text
    assert "int4 | fast" not in text


def test_the_table_of_two_files_is_that_of_the_results():
    """In docs/cpu.md, 1 and 16 threads: times, and the ratios that the files hold, or none."""
    text = (ROOT / "docs/cpu.md").read_text(encoding="utf-8")
    text = text.split("## On 16 cores of a Xeon")[1]
    rows = [line.split(" | ") for line in re.findall(r"^\| (\d.*) \|$", text, re.M)]
    links = dict(re.findall(r"\[(\d+)\]\(\.\./(bench/results/\S+\.json)\)", text))
    wanted = []
    for threads, link in links.items():
        for case in json.loads((ROOT / link).read_text())["cases"]:
            cells = [threads, str(case["shape"]["rows"])]
            for each in case["comparisons"]:
                cells += [
                    report.time_text(case["times"][each[who]]["median"])
                    for who in ("ours", "other")
                ]
                ratio = each["ratio"]
                cells.append(tables.BUSY if ratio is None else f"{ratio:.2f} x")
            wanted.append(cells)
    assert rows == wanted
