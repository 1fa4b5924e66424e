r"""Edge-LLM's decode ops on a GPU: right first, then GB/s of weights read.

    blockscale build --target sm_90a -o dist/edgellm.so edgellm_up_h2688_i1856_f16 \
        edgellm_up_h2688_i1856_nvfp4 edgellm_down_h2688_i1856_relu2_f32
    python -m bench.edgellm_gpu --library dist/edgellm.so --out edgellm-gpu.json

Each pass runs on other experts than the one before (128 of them, 360 MB a weight, more than an L2
cache holds), in a CUDA graph of 20 calls.  The bytes are those of the chosen experts' codes and
scales; the copy that they are compared with counts bytes read plus written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

import blockscale
from blockscale.compat import edgellm

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2688, 1856, 128, 6
TOKENS = (1, 2, 4, 8, 16)
CALLS, REPEATS = 20, 15
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
TOLERANCE = 1e-5


def weights(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return payload [E, K, N / 2], decode scales [E, K / 16, N] and global scales [E]."""
    payload = torch.randint(0, 256, (EXPERTS, k, n // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 80, (EXPERTS, k // 16, n), dtype=torch.uint8, device="cuda")
    return payload, scales, torch.rand(EXPERTS, device="cuda") * 1e-4


def dense(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return a weight [K, N] in float64, from its bytes."""
    codes = torch.stack((payload & 15, payload >> 4), -1).reshape(len(payload), -1).long()
    value = torch.tensor(E2M1, dtype=torch.float64, device="cuda")[codes]
    half = (scales.to(torch.int16) << 7).view(torch.float16).double()
    return value * half.repeat_interleave(16, 0)


def distinct_ids(tokens: int) -> torch.Tensor:
    """Return ids [T, K_top], all different as far as there are experts."""
    count = tokens * TOP_K
    order = torch.cat([torch.randperm(EXPERTS) for _ in range(-(-count // EXPERTS))])
    return order[:count].reshape(tokens, TOP_K).int().cuda()


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median time of a call, all of them in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative error of a row."""
    wide = got.double().flatten(0, -2)
    rows = want.flatten(0, -2)
    return float(((wide - rows).norm(dim=1) / rows.norm(dim=1)).max())


def check(up: tuple, down: tuple, tokens: int) -> dict[str, float]:
    """Return the relative errors of both passes; AssertionError if they are too large."""
    ids = distinct_ids(tokens)
    share = torch.rand(tokens, TOP_K, device="cuda")
    x = torch.randn(tokens, HIDDEN, device="cuda").half()
    view_up = edgellm.Nvfp4Tensor.up_weights(up[0], up[2])
    view_down = edgellm.Nvfp4Tensor.down_weights(down[0], down[2])
    z = edgellm.decode_up(x, view_up, up[1], ids)
    out = edgellm.decode_down(z, view_down, down[1], ids, share)
    want_z, want = torch.zeros_like(z).double(), torch.zeros_like(out).double()
    for t, j in ((t, j) for t in range(tokens) for j in range(TOP_K)):
        e = int(ids[t, j])
        want_z[t, j] = x[t].double() @ dense(up[0][e], up[1][e]) * up[2][e].double()
        gated = z[t, j].double().clamp(min=0) ** 2
        factor = down[2][e].double() * share[t, j].double()
        want[t] += gated @ dense(down[0][e], down[1][e]) * factor
    errors = {"up": row_error(z, want_z), "down": row_error(out, want)}
    again = edgellm.decode_down(z, view_down, down[1], ids, share)
    assert torch.equal(out, again), "the same call gave other bits"
    assert max(errors.values()) < TOLERANCE, errors
    return errors


def measure(up: tuple, down: tuple, tokens: int) -> dict[str, float]:
    """Return microseconds and GB/s of each pass."""
    many = [distinct_ids(tokens) for _ in range(CALLS)]
    share = torch.rand(tokens, TOP_K, device="cuda")
    x = torch.randn(tokens, HIDDEN, device="cuda").half()
    view_up = edgellm.Nvfp4Tensor.up_weights(up[0], up[2])
    view_down = edgellm.Nvfp4Tensor.down_weights(down[0], down[2])
    coded = edgellm.quantize_activation(x, 0.01)
    z = edgellm.decode_up(x, view_up, up[1], many[0])
    passes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "up": lambda ids: edgellm.decode_up(x, view_up, up[1], ids),
        "up_w4a4": lambda ids: edgellm.decode_up(coded, view_up, up[1], ids),
        "down": lambda ids: edgellm.decode_down(z, view_down, down[1], ids, share),
    }
    size = tokens * TOP_K * (up[0][0].numel() + up[1][0].numel())
    row: dict[str, float] = {"tokens": tokens, "megabytes": size / 1e6}
    for name, run in passes.items():
        time = seconds([partial(run, ids) for ids in many])
        row[f"{name}_us"], row[f"{name}_gbs"] = time * 1e6, size / time / 1e9
    return row


def copy_rate(size: int) -> float:
    """Return GB/s, read plus written, of copies of ``size`` bytes in all."""
    count = max(CALLS, int(4e8) // size)
    source = torch.empty(count, size // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    calls = [partial(target[i].copy_, source[i]) for i in range(count)]
    return size / seconds(calls) / 1e9


def main() -> None:
    """Print a table; write a JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--out", type=Path, default=Path("edgellm-gpu.json"))
    options = parser.parse_args()
    blockscale.load(options.library)
    torch.manual_seed(0)
    up, down = weights(HIDDEN, INTERMEDIATE), weights(INTERMEDIATE, HIDDEN)
    gpu, errors = torch.cuda.get_device_name(), check(up, down, 3)
    rows = []
    print(gpu, errors)
    print("tokens    MB |  up us   GB/s | w4a4 us   GB/s | down us   GB/s | copy GB/s")
    for tokens in TOKENS:
        row = measure(up, down, tokens)
        row["copy_gbs"] = copy_rate(int(row["megabytes"] * 1e6))
        rows.append(row)
        print(
            f"{tokens:6} {row['megabytes']:5.1f} | {row['up_us']:6.1f} {row['up_gbs']:6.0f} | "
            f"{row['up_w4a4_us']:7.1f} {row['up_w4a4_gbs']:6.0f} | {row['down_us']:7.1f} "
            f"{row['down_gbs']:6.0f} | {row['copy_gbs']:6.0f}",
            flush=True,
        )
    options.out.write_text(json.dumps({"gpu": gpu, "errors": errors, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
