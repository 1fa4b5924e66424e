r"""Edge-LLM's decode ops on a GPU: right first, then GB/s of weights read.

    blockscale build --target sm_90a -o dist/edgellm.so $(python -m bench.edgellm --names)
    python -m bench.edgellm --library dist/edgellm.so --out edgellm-gpu.json

Each pass runs on other experts than the one before (128 of them, 360 MB a weight, more than an L2
cache holds), in a CUDA graph of 20 calls.  The bytes are those of the chosen experts' codes and
scales; the copy that they are compared with counts bytes read plus written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import measure, reference
from blockscale.compat import edgellm

FORMAT = 1
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2688, 1856, 128, 6
TOKENS = (1, 2, 4, 8, 16)
CALLS, REPEATS = 20, 15
TOLERANCE = 1e-5
KERNELS = (
    "edgellm_up_h2688_i1856_f16",
    "edgellm_up_h2688_i1856_nvfp4",
    "edgellm_down_h2688_i1856_relu2_f32",
)


def weights(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return payload [E, K, N / 2], decode scales [E, K / 16, N] and global scales [E]."""
    payload = torch.randint(0, 256, (EXPERTS, k, n // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(40, 80, (EXPERTS, k // 16, n), dtype=torch.uint8, device="cuda")
    return payload, scales, torch.rand(EXPERTS, device="cuda") * 1e-4


def dense(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return a weight [K, N] in float64, from its bytes."""
    value = reference.e2m1_values(reference.unpack(payload).int()).double()
    half = (scales.to(torch.int16) << 7).view(torch.float16).double()
    return value * half.repeat_interleave(16, 0)


def distinct_ids(tokens: int) -> torch.Tensor:
    """Return ids [T, K_top], all different as far as there are experts."""
    count = tokens * TOP_K
    order = torch.cat([torch.randperm(EXPERTS) for _ in range(-(-count // EXPERTS))])
    return order[:count].reshape(tokens, TOP_K).int().cuda()


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [T, H] float16 and the experts' weights [T, K_top]."""
    x = torch.randn(tokens, HIDDEN, device="cuda").half()
    return x, torch.rand(tokens, TOP_K, device="cuda")


def views(up: tuple, down: tuple) -> tuple[edgellm.Nvfp4Tensor, edgellm.Nvfp4Tensor]:
    """Return both weights as the ops take them."""
    return (
        edgellm.Nvfp4Tensor.up_weights(up[0], up[2]),
        edgellm.Nvfp4Tensor.down_weights(down[0], down[2]),
    )


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median time of a call, all of them in one graph."""
    return measure.capture(calls, len(calls)).median_us(REPEATS) / 1e6


def check(up: tuple, down: tuple, tokens: int) -> dict[str, float]:
    """Return the relative errors of both passes; AssertionError if they are too large."""
    ids = distinct_ids(tokens)
    x, share = inputs(tokens)
    view_up, view_down = views(up, down)
    z = edgellm.decode_up(x, view_up, up[1], ids)
    out = edgellm.decode_down(z, view_down, down[1], ids, share)
    want_z, want = torch.zeros_like(z).double(), torch.zeros_like(out).double()
    for t, j in ((t, j) for t in range(tokens) for j in range(TOP_K)):
        e = int(ids[t, j])
        want_z[t, j] = x[t].double() @ dense(up[0][e], up[1][e]) * up[2][e].double()
        gated = z[t, j].double().clamp(min=0) ** 2
        factor = down[2][e].double() * share[t, j].double()
        want[t] += gated @ dense(down[0][e], down[1][e]) * factor
    errors = {"up": measure.row_error(z, want_z), "down": measure.row_error(out, want)}
    again = edgellm.decode_down(z, view_down, down[1], ids, share)
    assert torch.equal(out, again), "the same call gave other bits"
    assert max(errors.values()) < TOLERANCE, errors
    return errors


def measured(up: tuple, down: tuple, tokens: int) -> dict[str, float]:
    """Return microseconds and GB/s of each pass."""
    many = [distinct_ids(tokens) for _ in range(CALLS)]
    x, share = inputs(tokens)
    view_up, view_down = views(up, down)
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


def line(row: dict[str, Any]) -> str:
    """Return a line of the table."""
    passes = (("up", "up"), ("W4A4", "up_w4a4"), ("down", "down"))
    times = "; ".join(f"{said} {row[f'{p}_us']:.1f} us {row[f'{p}_gbs']:.0f}" for said, p in passes)
    size = f"{row['tokens']:2} tokens, {row['megabytes']:.1f} MB"
    return f"{size}: {times}; copy {row['copy_gbs']:.0f} GB/s"


def main(given: Sequence[str] | None = None) -> int:
    """Measure: print a line for each number of tokens, write a JSON file."""
    parser = measure.parser("bench.edgellm", __doc__)
    parser.set_defaults(out=Path("edgellm-gpu.json"))
    options = measure.parsed(parser, given)
    if options.names:
        print(*KERNELS)
        return 0
    if measure.refused("bench.edgellm"):
        return 2
    name = torch.cuda.get_device_name()
    session = measure.Session("edgellm", options, FORMAT, rows="rows", gpu=name)
    torch.manual_seed(0)
    up, down = weights(HIDDEN, INTERMEDIATE), weights(INTERMEDIATE, HIDDEN)
    session.note("errors", check(up, down, 3))
    for tokens in TOKENS:
        row = measured(up, down, tokens)
        row["copy_gbs"] = copy_rate(int(row["megabytes"] * 1e6))
        session.add(row, line(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
