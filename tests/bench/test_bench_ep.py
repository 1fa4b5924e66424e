"""Tables of expert parallelism, and what more ranks would take."""

import pytest

from bench import readme
from bench.ep import scaling
from bench.ep.__main__ import LAYERS, TIMED

START, BANDWIDTH = 8.0, 350_000.0
"""Of made-up exchanges: microseconds, bytes a microsecond."""


def results(bandwidth=BANDWIDTH):
    """Return results as `bench.ep` writes them, of exchanges that lie on a line."""
    hidden = LAYERS[TIMED].hidden
    rows = []
    for tokens in (1, 128, 4096):
        row = {"tokens": tokens, "rows": tokens, "slots": 4 * tokens}
        for form, key, goes in scaling.directions(hidden).values():
            sent = goes.row * row["slots" if goes.by_slot else "rows"]
            row.setdefault(form, {})[key] = START + sent / bandwidth
        rows.append(row | {"nccl, 2 bytes": 10.0, "nccl, 1 bytes": 9.0})
    layers = [
        {"tokens": t, "all_to_all": 200.0, "bf16, slots": 100.0, "bf16, sums": 80.0}
        for t in (1, 128, 4096)
    ]
    machine = {"gpu": "made-up GPU", "driver_version": "1"}
    facts = {"ranks": 2, "date": "2026-11-25", "replays": 7, "machine": machine}
    facts["versions"] = {"CUDA": "13.0", "torch": "2.11.0"}
    peer = {"uccl": "0.1.1", "parts": {"worst": [{"tokens": 1, "dispatch": 34.2, "combine": 31.1}]}}
    return facts | {"exchange": rows, "layers": {"qwen": layers}, "beside": peer}


def test_a_line_is_found_again():
    sizes = LAYERS[TIMED]
    found = scaling.predicted(results()["exchange"], sizes.experts, sizes.hidden, sizes.top_k)
    assert found.keys() == scaling.directions(sizes.hidden).keys()
    for line in found.values():
        assert line["start"] == pytest.approx(START)
        assert line["gb_s"] == pytest.approx(BANDWIDTH / 1000)
    [one, _, many] = found["combine, slots"]["times"][8]
    assert one == pytest.approx(START + 7 * 14336 / BANDWIDTH)  # 7 of 8 slots lie elsewhere
    assert many == pytest.approx(START + 4096 * 7 * 14336 / BANDWIDTH)


def test_ranks_of_a_token():
    """As drawing without replacement has it: one of two others; all of those with one expert."""
    assert scaling.reached(2, 4, 1) == pytest.approx(0.5)
    assert scaling.reached(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert scaling.reached(8, 8, 3) == pytest.approx(7 * 3 / 8)


def test_the_section_has_a_row_for_each_way():
    text = readme.ep_section(results(), "figures.json")
    assert "| qwen | ours | 100 (2.00) | 100 (2.00) | 100 (2.00) |" in text
    assert '| qwen | ours, `combine="sums"` | 80.0 (2.50) |' in text
    assert "| NCCL, 2 bytes an element | 10.0 | 10.0 | 10.0 |" in text
    assert "| UCCL-EP, normal, captured, sums, dispatch | 34.2 | | |" in text
    assert "2 x made-up GPU" in text
    assert "(figures.json)" in text
