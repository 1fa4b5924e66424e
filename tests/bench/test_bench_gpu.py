"""The GPU benchmark without a GPU: its cases, wrong kernels, host costs."""

import subprocess
import sys
from functools import partial
from importlib import util
from types import SimpleNamespace

import pytest
import torch

gpu = pytest.importorskip(
    "bench.gpu.__main__", reason="bench/ is part of the checkout, not of the wheel"
)
import blockscale  # noqa: E402
from bench import measure, reference  # noqa: E402
from bench.gpu import cases as gpu_cases  # noqa: E402
from bench.gpu import contest, counters, host, uses  # noqa: E402
from bench.gpu import report as gpu_report  # noqa: E402
from bench.peers.ops import Peer  # noqa: E402
from blockscale.runtime.function_cuda import PROGRAMMATIC  # noqa: E402
from blockscale.specs import Spec  # noqa: E402
from tests.kit.paths import ROOT  # noqa: E402


def test_every_case_fits_its_kernel():
    """Kernel names parse; data are parameters of the kernel, of its dtype, and all it needs."""
    cases = [*gpu_cases.all_cases("cpu")]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        params = {param.name: param for param in Spec.parse(case.kernel).params()}
        data = {**case.buffers, **case.shared()}
        assert set(data) <= set(params), case.name
        for name, value in data.items():
            assert str(value.dtype).removeprefix("torch.") == params[name].dtype, case.name
        needed = [n for n, p in params.items() if p.default is None and p.alias is None]
        assert set(needed) <= set(data), case.name
    named = {case.name for case in cases}
    for rows in (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536):
        for hidden in (2048, 2880, 4096, 5120, 7168, 8192, 16384):
            assert f"add_rmsnorm {rows}x{hidden} nvfp4" in named
    assert set(gpu_report.README_CASES) <= named


def test_bytes_and_bars():
    """FlashInfer's formula for the norm: 2 M H 2 + 2 H read; M H 2 + M H / 2 + M H / 16 written."""
    case = gpu_cases.norm(4096, 7168, "cpu")
    size = 4096 * 7168
    assert case.moved == 4 * size + 2 * 7168 + 2 * size + size // 2 + size // 16
    assert case.asked == {"of_copy": 0.95}
    assert gpu_cases.norm(1024, 2048, "cpu", "mxfp4").asked == {"of_copy": 0.9}
    assert gpu_cases.norm(256, 7168, "cpu").asked == {"of_copy": 0.85}
    assert gpu_cases.norm(256, 5120, "cpu").asked == {}
    assert gpu_cases.norm(64, 16384, "cpu").asked == {}
    assert gpu_cases.norm(4, 4096, "cpu").asked == {"us": 3.2}
    peers = {"of_compile": 0.7, "of_triton": 1.0}
    assert gpu_cases.norm(16, 4096, "cpu").asked == {"us": 3.2, **peers}
    assert gpu_cases.dequantise(8192, 8192, "cpu").asked == {"of_copy": 0.95}
    assert gpu_cases.quantise(65536, 4096, "cpu").asked == {"of_copy": 0.95}
    assert gpu_cases.dequantise(1024, 1024, "cpu").asked == {"of_copy": 0.9}
    assert gpu_cases.swizzle(229376, 256, "cpu").asked == {"of_copy": 0.95}


def test_data_rotate():
    buffers = gpu_cases.norm(1, 2880, "cpu").buffers
    sets = measure.rotating(buffers, 3, "cpu")
    addresses = [t.data_ptr() for data in sets for t in data.values()]
    assert len(set(addresses)) == len(addresses)
    for name, buffer in buffers.items():
        first, second = sets[0][name], sets[1][name]
        assert first.shape == buffer.shape
        assert (second.data_ptr() - first.data_ptr()) % measure.ALIGNMENT == 0
        assert (buffer.fill is None) == torch.equal(first, second)
    assert measure.cold_sets(100 << 20, 60 << 20) == 2
    assert measure.cold_sets(1 << 20, 60 << 20) == 181
    for moved in (1 << 14, 1 << 20, 1 << 28):
        sets = measure.cold_sets(moved, 60 << 20)
        assert measure.launches_of(measure.guess_us(moved), sets) % sets == 0


class Clock:
    """Calls run once; a call's time is that which it was given by name."""

    def __init__(self, **us):
        self.us = us

    def capture(self, calls, launches):
        calls[0]()
        us = self.us.get(getattr(calls[0].func, "label", ""), 1.0)
        return SimpleNamespace(median_us=lambda: us, us=us, launches=launches, sets=len(calls))

    def interleaved(self, contenders, replays):
        return {
            name: measure.Timing(c.us, c.us, c.us, replays, c.launches, c.sets)
            for name, c in contenders.items()
        }


class Kernel:
    """Stands for a kernel of a library: the reference writes its outputs."""

    tuned = True

    def __init__(self, name, run):
        self.name, self.params, self.run = name, Spec.parse(name).params(), run
        self.flags = set()

    def __call__(self, *args, flags=0):
        self.flags.add(flags)
        values = dict(zip((p.name for p in self.params), args, strict=True))
        for name, result in self.run(values).items():
            values[name].copy_(result.view(values[name].shape))


def norm_kernel(fmt="nvfp4", layout="linear"):
    def run(v):
        names = ("input", "residual", "weight", "global_scale")
        packed, scale, residual = reference.add_rmsnorm(*(v[n] for n in names), fmt)
        scale = reference.swizzle(scale) if layout == "128x4" else scale
        return {"packed": packed, "block_scale": scale, "residual": residual}

    return run


def sweep_kernel(v):
    index, _ = reference.sweep(v["x"], v["global_amax"], v["candidates"])
    return {"best_amax": v["candidates"][index] * v["global_amax"]}


SMALL = {
    "norm": (gpu_cases.norm(5, 128, "cpu"), norm_kernel()),
    "norm 128x4": (gpu_cases.norm(5, 128, "cpu", layout="128x4"), norm_kernel(layout="128x4")),
    "norm mxfp4": (gpu_cases.norm(5, 128, "cpu", fmt="mxfp4"), norm_kernel("mxfp4")),
    "dequantise": (
        gpu_cases.dequantise(6, 64, "cpu"),
        lambda v: {"out": reference.dequantize(v["packed"], v["block_scale"], v["global_scale"])},
    ),
    "quantise": (
        gpu_cases.quantise(6, 64, "cpu"),
        lambda v: dict(
            zip(
                ("packed", "block_scale"),
                reference.quantize(v["x"], v["global_scale"]),
                strict=True,
            )
        ),
    ),
    "silu": (
        gpu_cases.silu(6, 64, "cpu"),
        lambda v: dict(
            zip(
                ("packed", "block_scale"),
                reference.silu_and_mul(v["input"], v["global_scale"]),
                strict=True,
            )
        ),
    ),
    "swizzle": (
        gpu_cases.swizzle(128, 8, "cpu"),
        lambda v: {"out": reference.swizzle(v["scale"])},
    ),
    "unswizzle": (
        gpu_cases.swizzle(128, 8, "cpu", back=True),
        lambda v: {"out": reference.unswizzle(v["scale"], 128, 8)},
    ),
    "sweep": (gpu_cases.sweep(4, 64, "cpu"), sweep_kernel),
}


def settings(peers=False, **changes):
    given = {"device": "cpu", "cache_bytes": 1000, "clock": Clock()}
    return contest.Settings(peers=peers, **{**given, **changes})


@pytest.mark.parametrize("name", SMALL)
def test_right_and_wrong_kernels(name, monkeypatch):
    """The reference itself is exact; one wrong byte is seen; rows are judged in chunks."""
    monkeypatch.setattr(gpu_cases, "CHUNK", 300)  # two rows or so
    case, run = SMALL[name]
    kernel = Kernel(case.kernel, run)
    found = contest.measured(case, {case.kernel: kernel}, settings())
    assert found.get("failed") is None
    assert kernel.flags == {0, PROGRAMMATIC}
    assert found["checks"]["ours"]["exact"]
    assert found["checks"]["ours"]["right"]
    assert set(found["times"]) == {"ours", "early", "copy", *measure.COPIES}

    def wrong(values):
        results = {k: v.clone() for k, v in run(values).items()}
        last = results[[*results][-1]].view(-1).view(torch.uint8)
        last[-1] ^= 1
        return results

    found = contest.measured(case, {case.kernel: Kernel(case.kernel, wrong)}, settings())
    check = found["checks"]["ours"]
    assert not check["exact"]
    assert not check["right"]
    assert check["differ"] == 1 or name == "sweep"
    assert gpu.line(found).endswith("bytes differ  WRONG")


def test_a_kernel_that_is_wrong_when_it_begins_early_is_noticed():
    """The functions launch it so: its bytes are compared, too."""
    case, run = SMALL["swizzle"]

    class Hasty(Kernel):
        def __call__(self, *args, flags=0):
            super().__call__(*args, flags=flags)
            if flags == PROGRAMMATIC:
                args[-1].view(-1).view(torch.uint8)[0] ^= 1

    found = contest.measured(case, {case.kernel: Hasty(case.kernel, run)}, settings())
    assert found["checks"]["ours"]["right"]
    assert not found["checks"]["early"]["right"]
    assert gpu.line(found).endswith("WRONG")


def test_what_cannot_be_measured_says_why():
    case, run = SMALL["swizzle"]

    def broken(values):
        raise RuntimeError("no image for this device\nmore")

    kernels = {case.kernel: Kernel(case.kernel, broken)}
    assert "swizzle_128x4" in contest.measured(case, {}, settings())["skipped"]
    failed = contest.measured(case, kernels, settings())["failed"]
    assert failed == "RuntimeError: no image for this device"
    small = settings(memory_bytes=10)
    assert "of device memory" in contest.measured(case, kernels, small)["skipped"]
    kernel = Kernel(case.kernel, run)
    with pytest.raises(ValueError, match=r"has the parameters .* but the case has data for"):
        measure.bound(kernel, {"scale": 1, "weight": 2})


def labelled(label, run):
    run.label = label
    return run


def test_the_fastest_right_variant_counts():
    case, run = SMALL["swizzle"]
    right = lambda d: {"out": reference.swizzle(d["scale"])}  # noqa: E731
    variants = {
        "slow": lambda: labelled("slow", lambda d: right(d)),
        "fast": lambda: labelled("fast", lambda d: right(d)),
        "wrong": lambda: labelled("wrong", lambda d: {"out": d["scale"]}),
        "broken": lambda: 1 / 0,
        "max-autotune": lambda: labelled("fast", lambda d: right(d)),
    }
    changed = {**vars(case), "peers": (Peer("triton", variants),), "asked": {"of_triton": 1.0}}
    case = gpu_cases.Case(**changed)
    clock = Clock(slow=9.0, fast=2.0, wrong=0.1)
    chosen = settings(peers=True, compile_s=0.0, clock=clock)
    found = contest.measured(case, {case.kernel: Kernel(case.kernel, run)}, chosen)
    assert found["times"]["triton"]["us"] == 2.0
    assert found["checks"]["triton"]["variant"] == "fast"
    told = found["variants"]["triton"]
    assert told["slow"] == {"us": 9.0}
    assert "bytes differ" in told["wrong"]["failed"]
    assert "ZeroDivisionError" in told["broken"]["failed"]
    assert "no time left" in told["max-autotune"]["skipped"]
    assert [*gpu_report.judged(found)] == [("<= 1 x Triton's", True)]


WITH_PEERS = (
    gpu_cases.norm(1, 4096, "cpu"),
    gpu_cases.dequantise(6, 64, "cpu", peers=True),
    gpu_cases.quantise(6, 64, "cpu", peers=True),
    gpu_cases.silu(6, 256, "cpu", peers=True),
    gpu_cases.swizzle(128, 8, "cpu"),
)


@pytest.mark.parametrize("case", WITH_PEERS, ids=lambda case: case.op)
def test_peers_compute_the_same_function(case, monkeypatch):
    """The formulas as torch.compile gets them, run as they are; Triton kernels are only made."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    [data] = measure.rotating(case.buffers, 1, "cpu")
    data |= case.shared()
    compiled, triton = case.peers
    for label, make in compiled.variants.items():
        verdict = contest.checked(case, make(), data, 1e-2)
        assert verdict["right"], (label, verdict)
        assert verdict["differ"] == 0 or case.op in ("add_rmsnorm", "silu_and_mul")
    if util.find_spec("triton"):
        assert all(callable(make()) for make in triton.variants.values())


def test_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--library", "x.so", "--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err


# ---------------------------------------------------------------------------- host costs and uses
class Direct(Kernel):
    """A kernel object around the library's own function."""

    def __init__(self):
        super().__init__(host.KERNEL, lambda values: {})
        self.seen = []
        self.direct = lambda *values: self.seen.append(values)


def test_host_costs(monkeypatch):
    """The library's function gets every parameter, and the same without rows."""
    kernel = Direct()

    def function(x, residual, weight, codes=None, scale=None, *, global_scale):
        return (torch.zeros(1), torch.zeros(1)) if codes is None else (codes, scale)

    monkeypatch.setattr(host, "CALLS", 20)
    monkeypatch.setattr(host, "CHUNK", 10)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(blockscale, "add_rmsnorm_fp4quant", function, raising=False)
    found = host.costs({host.KERNEL: kernel}, "cpu")
    assert {"function", "empty", "kernel", "compiled", "compiled, no rows"} <= set(found["us"])
    assert set(found["us"]) <= set(host.LABELS)
    assert all(us > 0 for us in found["us"].values())
    assert set(found["failed"]) == {"triton"}  # there is no device to launch on
    assert {len(values) for values in kernel.seen} == {len(kernel.params)}
    rows = {values[0].shape[0] for values in kernel.seen}
    assert rows == {0, 1}
    assert {values[2].shape[0] for values in kernel.seen} == {host.HIDDEN}


def test_host_table(monkeypatch):
    """Each way is called, one that fails is told, and a family that cannot be made as well."""
    monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(host, "IN_A_ROW", 3)
    monkeypatch.setattr(host.measure, "capture", lambda calls, launches: 1 / 0)
    kernel, seen = Direct(), []

    def family(kernels, device):
        x, y = torch.zeros(1, host.HIDDEN), torch.zeros(1)
        weight = torch.ones(host.HIDDEN)
        return host.Family(
            *("norm", lambda *given, **options: seen.append(options), (x, x, weight)),
            *({"global_scale": y}, {"y_fp4": y}, kernel, [x, x, weight, y, 1e-6, y, y, None], 2),
            lambda: None,
        )

    def broken(kernels, device):
        raise KeyError("no such kernel")

    monkeypatch.setattr(host, "FAMILIES", (family, broken))
    monkeypatch.setattr(blockscale, "bind", lambda *_, **__: lambda *rows: None, raising=False)
    notes = {}
    host.table({}, "cpu", lambda: None, notes.__setitem__)
    found = notes["norm"]
    measured = {host.ADD, *host.WAYS} - {"launch", "graph", "kernel"}
    assert found["us"].keys() >= measured
    assert all(0 < us["least"] <= us["us"] for us in found["us"].values())
    assert "ZeroDivisionError" in found["failed"]["graph"]
    assert {"global_scale", "y_fp4"} in [set(options) for options in seen]
    assert {values[0].shape[0] for values in kernel.seen} == {0, 1}
    assert "no such kernel" in notes["broken"]["failed"]["all"]


def test_the_section_of_host_time():
    """A launch is what a compiled call takes beyond one without; goals are judged."""

    def family(name, bound):
        ways = {"compiled": 4.75, "compiled, no launch": 1.25, "bound": bound}
        return {
            "name": name,
            "us": {way: {"us": us, "least": us - 0.5} for way, us in ways.items()},
        }

    results = {
        "families": [family("norm", 4.4), family("linear", 4.9), family("MoE", 13.0)],
        "machine": {"gpu": "G", "driver_version": "1"},
        "versions": {"CUDA": "13", "torch": "2"},
        "date": "2026-11-24T00:00:00",
        "rounds": 61,
        "in_a_row": 100,
    }
    text = host.section(results, "x.json")
    assert "| call | norm | linear | MoE |" in text
    assert "| a bound call | 4.40 (3.90) | 4.90 (4.40) | 13.00 (12.50) |" in text
    assert "the difference of these two | 3.50 | 3.50 | 3.50 |" in text
    assert "`torch.ops.blockscale` |  |  |  |" in text
    assert "bound calls take less." in text
    results["families"][1] = family("linear", 5.1)
    assert "bound calls miss this." in host.section(results, "x.json")


def test_uses(monkeypatch):
    """Updated inputs count; an error is told, not raised."""
    assert uses.same((torch.zeros(2), None), [torch.zeros(2)])
    assert not uses.same(torch.zeros(2), -torch.zeros(2))
    assert not uses.same(torch.zeros(2), (torch.zeros(2), torch.zeros(2)))

    def made():
        return [torch.randn(4)]

    # Inductor would have C++ compiled, 8 s; test_torch_compile.py has what it makes of our calls.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert uses.compiled(lambda x: x.add_(1), made)

    def broken(x):
        raise TypeError("no kernel")

    monkeypatch.setattr(uses, "functions", lambda device: {"broken": (broken, made)})
    entry = uses.uses("cpu")["broken"]
    assert set(entry) == {"graph", "compile"}
    assert "no kernel" in entry["compile"]


def test_runs_where_only_the_runtime_is():
    """The GPU machine has neither the compiler nor the packages of commands and plots."""
    code = (
        "import sys\n"
        "for name in ('tvm', 'click', 'rich', 'matplotlib', 'triton'): sys.modules[name] = None\n"
        "import bench.gpu.__main__, bench.moe.__main__\n"
        "print(len([*bench.gpu.__main__.all_cases('cpu')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 63


NCU = """==PROF== Connected to process 7
"ID","Kernel Name",{names}
"","",{units}
"0","norm",{first}
"1","norm",{second}
"""


def test_counters_of_missed_cases():
    """Cases below their part of the copy, and ncu's table of their launches."""
    names = [*counters.COUNTERS.values()]
    units = ["ns" if name.startswith("gpu__") else "%" for name in names]
    first, second = ([f"{at + 1000 * k:,}" for at in range(len(names))] for k in (1, 2))
    text = NCU.format(
        names=",".join(f'"{name}"' for name in names),
        units=",".join(f'"{unit}"' for unit in units),
        first=",".join(f'"{value}"' for value in first),
        second=",".join(f'"{value}"' for value in second),
    )
    one, two = counters.counted(text)
    assert one["us"] == pytest.approx(1.0)
    assert two["us"] == pytest.approx(2.0)
    assert (one["dram"], two["all"]) == (1001, 2000 + len(names) - 1)
    cases = [
        {"name": "met", "times": {}, "asked": {"of_copy": 0.9}, "of_copy": 0.9},
        {"name": "missed", "times": {}, "asked": {"of_copy": 0.9}, "of_copy": 0.89},
        {"name": "slow", "times": {}, "asked": {"us": 3.0}, "of_copy": 0.1},
        {"name": "failed", "asked": {"of_copy": 0.9}},
    ]
    assert counters.below({"cases": cases}) == ["missed"]
