"""What `bench.gpu.report` makes of results: tables, verdicts, the plot, the README."""

import json

import pytest
from click.testing import CliRunner

gpu = pytest.importorskip(
    "bench.gpu.__main__", reason="bench/ is part of the checkout, not of the wheel"
)
from bench.gpu import cases as gpu_cases  # noqa: E402
from bench.gpu import report as gpu_report  # noqa: E402
from bench.gpu.counters import COUNTERS  # noqa: E402


def case_result(case, **us):
    moved = case.moved
    verdict = {"differ": 0, "of": 1000, "exact": True, "right": True}
    return {
        "name": case.name,
        "op": case.op,
        "shape": case.shape,
        "kernel": case.kernel,
        "bytes": moved,
        "asked": case.asked,
        "tuned": True,
        "times": {n: {"us": t, "low": t, "high": t} for n, t in us.items()},
        "checks": {n: {**verdict, "excess": 0.0, "other_candidate": 0.0} for n in us},
        "variants": {},
        "gb_s": {n: moved / (1e3 * t) for n, t in us.items()},
        "of_copy": us["copy"] / us["ours"],
    }


@pytest.fixture
def results():
    """A made-up result file: two bars met, two not."""
    norms = [
        case_result(gpu_cases.norm(rows, hidden, "cpu"), ours=rows / 10 + 2, copy=rows / 11 + 2)
        for rows in (4, 4096)
        for hidden in (2048, 4096)
    ]
    norms.append(
        case_result(
            gpu_cases.norm(64, 7168, "cpu"),
            **{"ours": 6.0, "copy": 5.0, "torch.compile": 14.0, "triton": 5.5},
        )
    )
    large = case_result(gpu_cases.dequantise(8192, 8192, "cpu"), ours=45.0, early=44.0, copy=43.0)
    large["checks"]["ours"] = {"differ": 12, "of": 134217728, "exact": False, "right": False}
    return {
        "format": gpu.FORMAT,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {
            "gpu": "NVIDIA H200",
            "capability": "9.0",
            "multiprocessors": 132,
            "l2_bytes": 60 << 20,
            "driver_version": "1.2.3",
        },
        "versions": {"torch": "2.11"},
        "replays": 21,
        "cache_multiple": 3,
        "cases": [
            *norms,
            large,
            case_result(gpu_cases.sweep(64, 64, "cpu"), ours=2000.0, copy=1.0),
            {"name": "quantize 1x16", "op": "quantize", "skipped": "needs 999 GiB"},
        ],
        "host": {
            "us": {"function": 3.5, "empty": 0.2, "compiled": 2.5, "compiled, no rows": 1.0},
            "failed": {},
        },
        "counters": [
            {
                "name": "add_rmsnorm 4096x7168 nvfp4 128x4",
                "asked": 0.95,
                "of_copy": 0.898,
                "counters": dict.fromkeys(COUNTERS, 50.0)
                | {"dram": 71.1, "waves": 7.76, "all": 200.0},
            }
        ],
        "uses": {"quantize": {"graph": True, "compile": "TypeError: no | fake"}},
    }


def test_report(results, tmp_path):
    """Through the command: the page, the plot twice, the README; figures are those of the file."""
    (tmp_path / "gpu.md").write_text("a\n<!-- gpu:start -->\nold\n<!-- gpu:end -->\nz\n")
    (tmp_path / "README.md").write_text("b\n<!-- gpu:start -->\n<!-- gpu:end -->\n")
    (tmp_path / "r.json").write_text(json.dumps(results))
    paths = [str(tmp_path / "r.json"), "--docs", str(tmp_path)]
    done = CliRunner().invoke(gpu_report.main, [*paths, "--readme", str(tmp_path / "README.md")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("a\n<!-- gpu:start -->\nNVIDIA H200 (capability 9.0, 132 multi")
    assert page.endswith("[r.json](r.json).\n<!-- gpu:end -->\nz\n")
    assert (
        "| dequantize 8192x8192 nvfp4 | 164.0 | 45.0 | 44.0 | 3.82 | 43.0 | 95.6 % | "
        "**all but 12 of 134,217,728** | >= 95% of the copy | yes |"
    ) in page
    assert "| 4 | 2.40 (98) | 2.40 (98) |  |" in page
    assert "| 4,096 | 412 (91) | 412 (91) |  |" in page
    assert (
        "| add_rmsnorm 64x7168 nvfp4 | 6.00 | 14.0 | 0.43 | 0.0e+00 | 5.50 | 1.09 | 0.0e+00 | "
        "<= 3.20 us; <= 0.7 x torch.compile's time; <= 1 x Triton's | **no** |"
    ) in page
    assert "The 3.50 us of our function (the goal of at most 4 us is met) are" in page
    assert "0.80 for finding the kernel and checking the arguments" in page
    assert "| quantize | yes | TypeError: no / fake |" in page
    counted = "| 89.8 | 95 | 71 | 50 | 50 | 50 | 50 | 7.76 | 25 | 25 |"
    assert f"| add_rmsnorm 4096x7168 nvfp4 128x4 {counted}" in page
    assert "* quantize 1x16: needs 999 GiB" in page
    assert (tmp_path / "gpu_copy.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "gpu_copy.svg").read_bytes()
    assert b"<svg" in drawn
    assert CliRunner().invoke(gpu_report.main, paths).exit_code == 0
    assert (tmp_path / "gpu_copy.svg").read_bytes() == drawn  # no date, no random names
    short = (tmp_path / "README.md").read_text()
    assert "| dequantize 8192x8192 nvfp4 | 45.0 | 3.82 | 96 % |  |  |" in short
    assert "| add_rmsnorm 64x7168 nvfp4 | 6.00 | " in short
    assert "Wrong bytes: dequantize 8192x8192 nvfp4." in short
    assert "costs the host 3.50 us" in short


def test_what_has_no_time_is_said(results):
    """A case that failed, one of ours that is wrong when launched early, others and why."""
    by_name = {case["name"]: case for case in results["cases"]}
    lost = results["cases"][0]
    failed = {key: lost[key] for key in ("name", "op", "shape", "kernel", "bytes", "asked")}
    results["cases"][0] = {**failed, "failed": "RuntimeError: CUDA error"}
    case = by_name["dequantize 8192x8192 nvfp4"]
    case["checks"]["ours"]["right"], case["checks"]["early"]["right"] = True, False
    wrong = {"failed": "ArithmeticError: 7 of 9 bytes differ"}
    case["variants"] = {"torch.compile": {"default": wrong, "max-autotune": wrong}}
    blank = "dequantize 8192x8192 nvfp4, torch.compile: 7 of 9 bytes differ"
    page = gpu_report.page(results, "r.json")
    assert f"* {blank}\n" in page
    assert f"* {lost['name']}: RuntimeError: CUDA error\n" in page
    assert "Wrong bytes of ours: dequantize 8192x8192 nvfp4." in page
    short = gpu_report.readme_section(results, "r.json")
    assert f"Not timed: {lost['name']}: RuntimeError: CUDA error; quantize 1x16: needs" in short
    assert f"Without a time, for wrong results or an error: {blank}." in short
    assert "Wrong bytes: dequantize 8192x8192 nvfp4." in short


def test_bars_are_judged(results):
    cases = {case["name"]: case for case in results["cases"]}
    assert [*gpu_report.judged(cases["dequantize 8192x8192 nvfp4"])] == [
        (">= 95% of the copy", True)
    ]
    assert [*gpu_report.judged(cases["sweep 64x64"])] == [("<= 2,100 us", True)]
    small = [met for _, met in gpu_report.judged(cases["add_rmsnorm 64x7168 nvfp4"])]
    assert small == [False, True, False]
    short = gpu_report.readme_section(results, "r.json")
    verdicts = [met for c in gpu_report.timed(results) for _, met in gpu_report.judged(c)]
    assert f"Of {len(verdicts)} speed goals in" in short
    assert f"{sum(verdicts)} were reached" in short
