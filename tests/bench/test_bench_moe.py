"""The MoE benchmark without a GPU: cases, data, routing metadata, graphs, the report."""

import json
import re
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

moe = pytest.importorskip(
    "bench.moe.__main__", reason="bench/ is part of the checkout, not of the wheel"
)
from bench.measure import row_error  # noqa: E402
from bench.moe import cases as moe_cases  # noqa: E402
from bench.moe import data as moe_data  # noqa: E402
from bench.moe import fp8 as moe_fp8  # noqa: E402
from bench.moe import ours  # noqa: E402
from bench.moe import report as moe_report  # noqa: E402
from bench.report import read  # noqa: E402
from tests.kit.paths import ROOT  # noqa: E402

SMALL = replace(
    moe_cases.MODELS["qwen3"], experts=8, top_k=2, hidden=128, intermediate=256, hit=(2, 6, 8, 8, 8)
)


def test_cases_have_the_floors_of_the_table():
    """Bytes and FLOP give the figures in brackets, which count gate and up rows as written too."""
    cases = moe_cases.find()
    assert len(cases) == 45 == len({case.name for case in cases})
    for case in cases:
        assert case.floor_us == pytest.approx(case.asked_floor, rel=0.035, abs=0.5), case.name
        assert case.floor_us < case.best_peer
    assert [case.tokens for case in moe_cases.find(["mixtral int4"])] == [1, 8, 64, 512, 4096]
    case = moe_cases.find(["gpt-oss mxfp4 T=8"])[0]
    assert case.weight_bytes == 28 * 3 * 2880 * 2880 * 17 // 32
    assert case.flop == 2 * 32 * 3 * 2880 * 2880
    assert (case.bound, moe_cases.find(["T=4096"])[0].bound) == ("bytes", "FLOP")


def test_routings_hit_as_many_experts_as_stated():
    for case in moe_cases.find(["nvfp4 T=1", "nvfp4 T=8", "nvfp4 T=64"]):
        ids = moe_cases.routings(case)
        assert all(each.shape == (case.tokens, case.model.top_k) for each in ids)
        assert all(each.dtype == torch.int32 for each in ids)
        assert {moe_cases.hit_by(each) for each in ids} == {case.hit}
        if case.tokens == 1:  # no call finds weights of the one before in a cache
            together = torch.cat(ids).flatten()
            assert together.unique().numel() == together.numel()
            assert len(ids) * case.weight_bytes > 4 * 60 << 20
    with pytest.raises(ValueError, match=r"hits 1 experts; correct Model\.hit"):
        moe_cases.routings(moe_cases.Case(replace(SMALL, hit=(2, 1, 8, 8, 8)), "nvfp4", 8))


def test_routing_metadata():
    """Slots by expert; blocks filled up with the number of slots, as vLLM's kernels take them."""
    ids = torch.tensor([[2, 0], [2, 3], [2, 1]], dtype=torch.int32)
    order, counts = moe_cases.sorted_slots(ids, 4)
    assert order.tolist() == [1, 5, 0, 2, 4, 3]
    assert counts.tolist() == [1, 1, 3, 1]
    slots, owners = moe_cases.aligned_blocks(ids, 4, 2)
    assert slots.tolist() == [1, 6, 5, 6, 0, 2, 4, 6, 3, 6]
    assert owners.tolist() == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("fmt", moe_cases.FORMATS)
def test_weights_are_of_moderate_size(fmt):
    """Codes are dequantised as checkpoints mean them; rows of x give results of size about 1."""
    weights = moe_data.random_weights(SMALL, fmt, "cpu")
    w = moe_data.dequantised(weights, "w13", 3)
    assert w.shape == (512, 128)
    assert 0.5 < (w.norm(dim=1).square().mean().sqrt() / 1).item() < 2.5
    code, scale = int(weights.w13[3, 7, 5]), weights.w13_scale[3, 7, 10 // moe_cases.GROUP[fmt]]
    low, high = code & 15, code >> 4
    if fmt == "int4":
        wanted = [(q - 8) * float(scale) for q in (low, high)]
    else:
        magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        values = [*magnitudes, *(-v for v in magnitudes)]
        factor = 2.0 ** (int(scale) - 127)
        if fmt == "nvfp4":
            assert weights.w13_global is not None
            factor = (1 + int(scale) % 8 / 8) * 2.0 ** (int(scale) // 8 - 7)
            factor *= float(weights.w13_global[3])
        wanted = [values[q] * factor for q in (low, high)]
    assert w[7, 10:12].tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("model", [SMALL, replace(SMALL, activation="swiglu_oai")])
def test_reference_of_the_layer(model):
    """Against all experts at once, in float64; h is rounded to bfloat16 as the layer does."""
    case = moe_cases.Case(model, "nvfp4", 8)
    weights = moe_data.random_weights(model, "nvfp4", "cpu")
    inputs = moe_data.random_inputs(case, moe_cases.uniform_ids(model, 8, 0), "cpu")
    w13 = torch.stack([moe_data.dequantised(weights, "w13", e) for e in range(8)]).double()
    w2 = torch.stack([moe_data.dequantised(weights, "w2", e) for e in range(8)]).double()
    x = inputs.x[5].double()
    gate, up = (w13 @ x).chunk(2, dim=1)
    if model.activation == "swiglu":
        h = torch.nn.functional.silu(gate) * up
    else:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    results = torch.einsum("ehi,ei->eh", w2, h.float().bfloat16().double())
    wanted = (inputs.weights[5, :, None] * results[inputs.ids[5].long()]).sum(0)
    assert row_error(moe_data.layer_of(weights, inputs, 5), wanted) < 1e-5
    assert row_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_a_wrong_peer_is_noticed():
    """Rows of another expert, or gate and up exchanged, are far beyond what is allowed."""
    weights = moe_data.random_weights(SMALL, "int4", "cpu")
    ids = moe_cases.uniform_ids(SMALL, 8, 0)
    x = torch.randn(16, 128, dtype=torch.bfloat16)
    flat = ids.flatten().tolist()
    right = torch.cat([moe_data.times(weights, "w13", e, x[s : s + 1]) for s, e in enumerate(flat)])

    def error(y):
        get = y.bfloat16().__getitem__
        return moe_data.gemm_error(weights, "w13", ids, x.__getitem__, get)

    assert error(right) < moe_data.ROW_ERROR
    assert error(right.roll(1, 0)) > 0.5
    assert error(torch.cat(right.chunk(2, dim=1)[::-1], dim=1)) > 0.5


class Graph:
    """A driver with one graph: nodes are numbers, kernels have names."""

    def __init__(self, names, edges):
        self.names, self.links = dict(enumerate(names, 1)), list(edges)

    def nodes(self, graph):
        return sorted(self.names, reverse=True)  # the driver promises no order

    def edges(self, graph):
        return dict.fromkeys(self.links, b"")

    def disconnect(self, graph, start, end):
        self.links.remove((start, end))

    def raw_cuda_graph(self):
        return 0

    def name(self, node):
        return self.names[node]

    def remove(self, node):
        del self.names[node]
        self.links = [edge for edge in self.links if node not in edge]

    def connect(self, graph, start, end):
        self.links.append((start, end))


def test_other_kernels_are_taken_out_of_a_graph():
    names = ["moe_sort", "moe_gemm1", "moe_gemm2", "moe_combine", None] * 2
    graph = Graph(names, [(i, i + 1) for i in range(1, 10)])
    kept = ours.keep_kernels(graph, 0, lambda name: ours.WORD in name)
    assert kept == [(2, "moe_gemm1"), (3, "moe_gemm2"), (7, "moe_gemm1"), (8, "moe_gemm2")]
    assert sorted(graph.names) == [2, 3, 7, 8]
    assert sorted(graph.links) == [(2, 3), (3, 7), (7, 8)]


def test_gemms_of_a_call_side_by_side(monkeypatch):
    """Both wait for both of the call before, and for nothing of their own."""
    graph = Graph(["moe_gemm1", "moe_gemm2"] * 2, [(1, 2), (2, 3), (3, 4)])
    monkeypatch.setattr(ours, "Driver", lambda: graph)
    ours.loose_gemms(graph, 2)
    assert sorted(graph.links) == [(1, 3), (1, 4), (2, 3), (2, 4)]


def made_up():
    """Return results: ours 10 % faster than the best peer, in one cell 40 % slower."""
    cases = []
    for case in moe_cases.find():
        us = case.best_peer / 1.1
        slow = case.name == "mixtral int4 T=4096"
        times = {moe.GEMMS: us * (1.54 if slow else 1), moe.LAYER: us * 1.1 + 5}
        if case.fmt == "mxfp4":
            times["triton_kernels, 8 warps"] = case.best_peer * 1.5
            times["triton_kernels, 4 warps"] = case.best_peer * 0.8
        times["humming-kernels, indexed"] = case.best_peer * 1.2
        failed = {}
        if case.name == "qwen3 int4 T=64":
            failed = {moe.GEMMS: "failed: RuntimeError: no"}
            times = {}
        timings = {name: {"us": t, "low": t, "high": t} for name, t in times.items()}
        errors = dict.fromkeys(times, 0.004)
        about = moe.about(case)
        cases.append({**about, "times": timings, "errors": errors, "failed": failed})
    machine = {
        "gpu": "NVIDIA H200",
        "capability": "9.0",
        "multiprocessors": 132,
        "l2_bytes": 60 << 20,
        "driver_version": "1.2.3",
    }
    return {
        "format": moe.FORMAT,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": machine,
        "versions": {"torch": "2.11"},
        "replays": 21,
        "cases": cases,
    }


def test_report(tmp_path):
    """Through the command: the page, both plots; figures are those of the file."""
    (tmp_path / "moe.md").write_text("a\n<!-- moe:start -->\nold\n<!-- moe:end -->\nz\n")
    (tmp_path / "r.json").write_text(json.dumps(made_up()))
    paths = [str(tmp_path / "r.json"), "--docs", str(tmp_path)]
    done = CliRunner().invoke(moe_report.main, paths)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "moe.md").read_text()
    assert page.startswith("a\n<!-- moe:start -->\nNVIDIA H200 (capability 9.0, 132 multi")
    assert page.endswith("[r.json](r.json).\n<!-- moe:end -->\nz\n")
    assert "In the 44 cells of the table below our gemm1 + gemm2 takes 0.97 of the best" in page
    assert "best times of 2026-11-20 alone the mean is 0.92 (slowest cell 1.40)" in page
    assert "slowest cell 1.40 of it (Mixtral-8x7B, INT4 g128, T = 4,096; the goal was" in page
    assert "**6,119 (0.71 x)** |" in page
    qwen = "| Qwen3-30B-A3B (E 128, top 8, H 2048, I 768) |"
    assert f"{qwen} NVFP4 | 27.3 (1.10 x) | 68.2 (1.10 x) |" in page
    assert f"{qwen} MXFP4 | 27.3 (0.88 x) |" in page  # triton_kernels was faster there
    assert "* qwen3 int4 T=64, ours: failed: RuntimeError: no" in page
    assert "Largest relative error of a checked row: ours 4.0e-03, humming-kernels" in page
    assert "| 8 | 30.4 | bytes | 65.5 | 77.0 | 86.4 | 57.6 | 72.0 | 1.14 | 46 % |" in page
    assert "| 4,096 | 9 |" in page
    drawn = [(tmp_path / f"moe_{name}.svg").read_bytes() for name in ("speed", "floor")]
    assert all(b"<svg" in each for each in drawn)
    assert CliRunner().invoke(moe_report.main, paths).exit_code == 0
    assert drawn == [(tmp_path / f"moe_{name}.svg").read_bytes() for name in ("speed", "floor")]


def test_the_verdict_has_the_means_of_formats_and_tokens():
    """A cell is 2 times as fast as its peer in NVFP4, 8 times in MXFP4; 3 times that from T = 8."""
    results = made_up()
    for case in results["cases"]:
        faster = {"nvfp4": 2, "mxfp4": 8, "int4": 1}[case["fmt"]] * (3 if case["tokens"] > 1 else 1)
        case["times"] = {moe.GEMMS: {"us": 1.0}, "humming-kernels, indexed": {"us": faster}}
    text = moe_report.page(results, "r.json")
    assert "(NVFP4 4.82, MXFP4 19.27, INT4 g128 2.41, T = 1 2.16, T = 8 6.48," in text


def test_a_report_of_nothing_says_so():
    results = made_up()
    for case in results["cases"]:
        case["times"].pop(moe.GEMMS, None)
    assert "\n\nOurs has no time.\n\n" in moe_report.page(results, "r.json")


def test_the_page_shows_the_results_it_names():
    text = (ROOT / "docs/moe.md").read_text(encoding="utf-8")
    section = text.split("<!-- moe:start -->")[1].split("<!-- moe:end -->")[0].strip()
    source = re.search(r"\]\((\.\./bench/results/moe-\S+\.json)\)", section)
    if source is None:
        assert not [*(ROOT / "bench" / "results").glob("moe-*.json")], (
            "docs/moe.md names no results; see `python -m bench.moe.report --help`"
        )
        pytest.skip("bench/results has no MoE results of a GPU yet")
    results = read(ROOT / "docs" / source[1], moe.FORMAT)
    assert section == moe_report.page(results, source[1]).strip()


def test_wrong_rows_in_fp8_are_noticed():
    """The run's status names them; the published run has none."""
    path = ROOT / "bench/results/moe-fp8-nvidia-h200-2026-11-24.json"
    cases = read(path, moe_fp8.FORMAT)["cases"]
    assert not [road for case in cases for road in moe_fp8.wrong(case)]
    worst = {"16 bits": 0.02, "fp8": float("inf"), "fp8 fast": 0.02}
    errors = {road: {"worst": error} for road, error in worst.items()}
    assert moe_fp8.wrong({"errors": errors}) == ["16 bits", "fp8"]
