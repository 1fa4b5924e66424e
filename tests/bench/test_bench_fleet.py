"""The bench of fleets: what it says of results, and a run with servers of this CPU."""

import json

import pytest

fleet = pytest.importorskip(
    "bench.gpu.fleet", reason="bench/ is part of the checkout, not of the wheel"
)
from blockscale.base import host  # noqa: E402

KERNEL = "quantize_nvfp4_f32"


def run(servers, wall, **more):
    found = {
        "servers": servers,
        "process_s": wall + 2,
        "wall_s": wall,
        "first_trial_s": 8.0,
        "trials": 500,
        "trials_per_minute": 60 * 500 / wall,
        "client_cpu_s": wall / 4,
        "builders_cpu_s": 16 * wall,
        "exhausted": True,
        "failed": 3,
        "best_us": {"a_m1": 10.0, "b_m1": 20.0},
    }
    return found | more


def told(*runs):
    return "\n".join(fleet.summary({"cores": 32, "runs": runs}))


def test_what_two_servers_gain():
    said = told(run(1, 100.0), run(2, 54.0, best_us={"a_m1": 10.2, "b_m1": 19.0}))
    assert "2 servers take 0.54 of one's wall time (asked: 0.55, met); the same number" in said
    assert "slower by more than 3%: none" in said
    assert "best times are 0.984 of one's in the mean of 2 workloads" in said
    assert "the client's process was busy for 25%, builders for 50% of 32 cores" in said
    said = told(run(1, 100.0), run(2, 56.0, best_us={"a_m1": 11.0, "b_m1": None}, trials=499))
    assert "(asked: 0.55, MISSED); NOT THE SAME number of trials" in said
    assert "in the mean of 1 workloads, slower by more than 3%: a_m1 1.100" in said
    assert "asked: 0.3, met" in told(run(4, 29.0), run(1, 100.0))
    ended = told(run(1, 235.0, exhausted=False), run(2, 100.0))
    assert "ENDED BY TIME" in ended
    assert "NOT THE SAME" in ended


def test_a_fleet_that_fails_leaves_the_other(tmp_path, monkeypatch, capsys):
    """Results are written after each; the exit status says so."""

    def tuned(names, servers, options):
        if servers == 2:
            return {"servers": 2, "failed_with": "RuntimeError: no GPU 1"}
        assert not json.loads(place.read_text())["runs"][1:]  # the first one's are there
        return run(1, 100.0)

    place = tmp_path / "found.json"
    monkeypatch.setattr(fleet, "tuned", tuned)
    status = fleet.main(["--out", str(place), "--target", "avx2", "--servers", "2", "1"])
    assert status == 1
    found = json.loads(place.read_text())
    assert [each["servers"] for each in found["runs"]] == [2, 1]
    assert len(found["kernels"]) == 22
    assert "2 server(s): FAILED: RuntimeError: no GPU 1" in capsys.readouterr().out


def test_where_no_server_comes_the_error_is_kept(monkeypatch):
    monkeypatch.setattr(fleet, "_START_S", 0.0)
    found = fleet.tuned([KERNEL], 1, {"target": host.level(), "seconds": 1.0})
    assert "servers did not register in 0 s" in found["failed_with"]


@pytest.mark.exhaustive
def test_with_servers_of_this_cpu(tmp_path):
    options = ["--target", host.level(), "--kernels", KERNEL, "--trials-each", "3"]
    assert fleet.main(["--out", str(tmp_path), *options, "--seconds", "200"]) == 0
    [path] = tmp_path.glob("fleet-*.json")
    found = json.loads(path.read_text())
    one, two = found["runs"]
    assert (one["servers"], two["servers"]) == (1, 2)
    assert one["trials"] == two["trials"] > 0
    assert set(one["best_us"]) == set(two["best_us"])
    assert all(one["best_us"].values())
    assert one["exhausted"]
    assert one["client_cpu_s"] > 0
    assert one["builders_cpu_s"] > 0
