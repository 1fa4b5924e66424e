"""The demo's report and tables: they render, show the figures, and need nothing from elsewhere."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from blockscale.demo import variants


def sample() -> dict:
    """Figures of the form that the demo writes, with numbers that are easy to find."""
    by = dict(zip(variants.LABELS, (40.0, 20.0, 10.0, 8.0), strict=True))
    spread = {"median": 0.0911, "max": 0.2}
    keys = ("torch_bf16", "ours_f32", "ours_bf16", "kernel_ours_f32", "kernel_ours_bf16")
    shapes = [("0.query", 384, 384), ("0.output", 384, 1536)]
    layers = [{"layer": a, "n": n, "k": k, "weight_error": 0.08} for a, n, k in shapes]
    embeddings = {**spread, "top1": 0.5, "top5": 0.75, "group": 0.9}
    trial = {"trial": 0, "elapsed_s": 1.0, "us": 9.0, "best_us": 9.0, "failed": False}
    tag = "linear_nvfp4_n384_k384_f32_m1"
    gains = {"weight_error_max": 0.1, "sweep_gain": 0.36}
    return {
        "date": "2001-02-03T04:05:06+00:00",
        "machine": {"cpu": "Sample <CPU> 9000", "cores": 2, "torch_threads": 2},
        "versions": {"torch": "1.2.3"},
        "sentences": {"count": 4, "groups": 2, "tokens": 40},
        "layers": [{**layer, **dict.fromkeys(keys, spread)} for layer in layers],
        "end_to_end": dict.fromkeys(variants.LABELS, embeddings),
        "ops": [{"n": 384, "k": k, "rows": r, "us": by} for k in (384, 1536) for r in (1, 12)],
        "latency": [{"input": "one sentence", "sentences": 1, "tokens": 12, "ms": by}],
        "bytes": {"fp32": 64 << 20, "bf16": 32 << 20, "nvfp4": 9 << 20, "rest": 1 << 20},
        "quantised": [{**layer, **gains} for layer in layers],
        "tvm_imported": False,
        "tuned": {"a": True, "b": False},
        "search": {
            "history": [
                {"workload": tag, **trial},
                {"workload": tag, **trial, "us": None, "failed": True},
                {"workload": "linear_x_bf16_m1", **trial, "us": None, "failed": True},
                {"workload": tag, **trial, "elapsed_s": 3.0, "us": 6.0, "best_us": 6.0},
            ],
            "best": {tag: 6.0, "linear_x_bf16_m1": None},
            "default": {tag: 9.0, "linear_x_bf16_m1": math.inf},
        },
    }


def language() -> dict:
    """Figures of the language model."""
    rates = dict(zip(variants.LABELS, (400.0, 300.0, 350.0, 512.0), strict=True))
    ppl = dict(zip(variants.LABELS, (61.04, 61.2, 64.71, 64.9), strict=True))
    text = dict.fromkeys(variants.LABELS, " is <b>evaluated</b> [first]")
    return {
        "tokens": 1234,
        "perplexity": {**ppl, "decoded": 64.71},
        "same_token": dict.fromkeys(variants.LABELS, 0.875),
        "speed": [
            {"what": what, "tokens_s": rates, "watched": {}} for what in ("reading", "writing")
        ],
        "bytes": {"fp32": 64 << 20, "bf16": 32 << 20, "nvfp4": 9 << 20, "parameters": 5_500_000},
        "samples": [{"prompt": "The value", "texts": text}],
        "kind": "modelopt-nvfp4",
        "training": {"seconds": 60.2, "steps": 471, "tokens": 241152, "read": 89000},
        "tvm_imported": False,
    }


def test_report_shows_the_figures():
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from blockscale.demo import report

    html = report.render(sample())
    assert html.count("data:image/svg+xml;base64,") == 4
    for text in (
        "7.11 x<",
        "9.1 %",
        "Sample &lt;CPU&gt; 9000",
        "torch 1.2.3",
        "2001-02-03 04:05 UTC",
        "without tvm",
    ):
        assert text in html
    assert "4 candidates built and measured, 2 failed; the best are 1.50 x as fast" in html
    assert "http" not in html.replace("https://www.w3.org", "")  # nothing is loaded from elsewhere

    searchless = {**sample(), "search": {"history": [], "best": {}, "default": {}}}
    assert "did not search" in report.render(searchless)
    with pytest.raises(ValueError, match="have no layers, machine"):
        report.render({k: v for k, v in sample().items() if k not in ("layers", "machine")})


def test_report_command_writes_both_files(tmp_path: Path):
    pytest.importorskip("matplotlib")
    testing = pytest.importorskip("click.testing")
    from blockscale.demo import report

    source = tmp_path / "figures.json"
    source.write_text(json.dumps(sample()))
    html, png = tmp_path / "report.html", tmp_path / "report.png"
    arguments = [str(source), "--html", str(html), "--png", str(png)]
    done = testing.CliRunner().invoke(report.main, arguments)
    assert done.exit_code == 0, done.output
    assert png.read_bytes().startswith(b"\x89PNG")
    assert html.read_text().rstrip().endswith("</html>")


def test_tables_show_the_figures():
    rich = pytest.importorskip("rich.console")
    from blockscale.demo import tables

    console = rich.Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    tables.print_all(console, sample())
    console.print(tables.quantised(sample()["quantised"]))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in (
        "9.1 (20.0)",
        "9.11 %",
        "4.50",
        "5.00 x",
        "36.0 %",
        "tvm imported in this process: no",
    ):
        assert part in text


def test_the_language_model_is_told():
    """In the report and the console, whatever the model writes; an older file has none."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    rich = pytest.importorskip("rich.console")
    from blockscale.demo import report, tables

    html = report.render({**sample(), "language": language()})
    for part in ("64.90", "512", "87.5 %", "471 steps", "modelopt-nvfp4", "5.5 million", "9.0 MiB"):
        assert part in html
    assert html.count("The value</b> is &lt;b&gt;evaluated&lt;/b&gt; [first]") == 2
    assert "language model" not in report.render(sample())
    console = rich.Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    busy = language()
    busy["speed"][1]["watched"] = {"disturbed": "other programs took 51% of the cores' time"}
    tables.print_language(console, busy)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for part in ("61.04", "512", "87.5 %", "The value is <b>evaluated</b> [first]", "busy"):
        assert part in text
    assert "without tvm" in html
    assert "tvm imported in this process: no" in text


def disturbed_sample() -> dict:
    """The same figures from a machine with other work: no ratio of times means anything."""
    busy = {"others": 0.51, "disturbed": "other programs took 51% of the cores' time"}
    found = sample()
    for row in [*found["ops"][1:], *found["latency"]]:
        row["watched"] = busy
    found["ops"][0]["watched"] = {"others": 0.01}
    found["search"]["disturbed"] = busy["disturbed"]
    return found


def test_tables_of_a_busy_machine_show_no_speed_ups():
    rich = pytest.importorskip("rich.console")
    from blockscale.demo import tables

    console = rich.Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    tables.print_all(console, disturbed_sample())
    text = " ".join(console.export_text().split())
    assert text.count("5.00 x") == 1  # of the one row that was measured in peace
    assert text.count("busy busy") == 4
    assert "The machine was busy, so speed-ups mean nothing: in 3 of 4 measurements" in text
    assert "in 1 of 1 measurements; in the first of them other programs took 51% of" in text
    assert "40.0" in text  # the times are told
    told = tables.search(disturbed_sample()["search"])
    assert "x as fast" not in told
    assert "4 candidates built and measured, 2 failed; what they gained is not known" in told


def test_the_report_of_a_busy_machine_shows_no_speed_ups():
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from blockscale.demo import report

    quiet, busy = report.render(sample()), report.render(disturbed_sample())
    assert "5.00 x the speed of torch fp32" in quiet
    assert "x as fast" in quiet
    assert "busy," not in quiet
    assert "x the speed" not in busy
    assert "x as fast" not in busy
    assert busy.count("The machine was busy, so speed-ups mean nothing") == 2
    assert "8.0 ms" in busy


def test_wrong_kernels_are_found():
    from blockscale.demo.infer import wrong_kernels

    layers = sample()["layers"]
    good = {"median": 1e-7, "max": 1e-7}
    right = [{**row, "kernel_ours_f32": good, "kernel_ours_bf16": good} for row in layers]
    assert wrong_kernels(right) == []
    right[1]["kernel_ours_f32"] = {"median": 1e-7, "max": math.nan}
    (sentence,) = wrong_kernels(right)
    assert sentence == "layer 0.output: ours_f32 differs from float64 by nan, allowed 1e-05"
