"""Waits, arrivals and fences of emitted kernels, in order: golden lists for each kind of channel.

The emulator cannot miss all of them: it makes barriers visible when they are initialised, and runs
what one thread issued in order.  Each list is read against the
PTX manual (9.7.13 mbarrier, 9.7.9.27 bulk copies, 9.7.16.6 tcgen05 memory consistency).
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest

from blockscale.lower.pipe.emit import emit
from blockscale.lower.pipe.kernel import Kernel
from tests.kit import gemm_harness as harness

BARRIERS = ("full", "empty", "packed", "done", "free")
CALLS = {
    "bs_mbar_init": "init {bar} {last}",
    "bs_mbar_init_fence": "init fence",
    "bs_cluster_sync": "cluster sync",
    "__syncthreads": "block sync",
    "__syncwarp": "warp sync",
    "bs_tcgen05_alloc": "alloc",
    "bs_tcgen05_dealloc": "dealloc",
    "bs_tcgen05_fence_before": "fence before",
    "bs_tcgen05_fence_after": "fence after",
    "bs_grid_wait": "grid wait",
    "bs_grid_launch": "grid launch",
    "bs_build_table": "table",
    "bs_mbar_wait": "wait {bar}: {last}",
    "bs_mbar_wait_from<false>": "wait {bar}: {last}",
    "bs_mbar_wait_from<true>": "wait for peers {bar}: {last}",
    "bs_mbar_expect": "expect {last}",
    "bs_mbar_arrive_cluster": "arrive {bar}",
    "bs_fence_async": "fence async",
    "bs_bulk_wait_read<1>": "store read 1",
    "bs_bulk_wait<0>": "store done",
    "bs_bulk_commit": "store commit",
    "bs_sum_cluster": "sum of peers",
    "for (int t": "TILES",
    "for (int k": "STAGES",
    "for (int i = 0; i < parts": "PARTS",
    "for (int c": "PARTS",
    "for (int piece": "PIECES",
    "for (; behind": "REST",
    "for (int i = 0; i < stages": "DRAIN",
}
PREFIXES = {
    "bs_tma_load_": "load",
    "bs_spread_rows": "spread",
    "bs_tcgen05_cp": "copy",
    "bs_tcgen05_mma_": "multiply",
    "bs_tcgen05_commit": "commit {bar}",
    "bs_tcgen05_ld": "read",
    "bs_tcgen05_wait_ld": "read done",
    "bs_stage_run": "stage",
    "bs_store_shared": "stage",
    "bs_store16_shared": "share",
    "bs_store_run": "store",
    "bs_store_element": "store",
    "bs_tma_store_": "TMA store",
}
"""What a kernel's text does that others wait for; addresses and templates are no part of it."""

_CALL = re.compile(
    r"(?P<loop>for \((?:int [tkc]\b|int piece|; behind|int i = 0; i < \w+))"
    r"|(?P<name>(?:bs_|__sync)\w+(?:<[^<>(]*>)?)\((?P<args>.*?)\);"
)


def actions(kernel: Kernel) -> list[str]:
    """Return what a kernel's text does, in order; of the same one after the other, one."""
    places = kernel.places
    starts = sorted((places[name], name) for name in BARRIERS)
    text = emit(kernel, "gemm").replace(",\n", ", ")
    text = re.sub(rf"i < {kernel.epilogue.chunks}; \+\+i\) {{$", "i < parts; ", text, flags=re.M)
    text = re.sub(rf"i < {kernel.stages}; \+\+i\) {{$", "i < stages; ", text, flags=re.M)
    known = {"free": "free", "bar": "?"}
    found = []
    for line in text.splitlines():
        for name in known:
            if f"uint32_t {name} =" in line:
                known[name] = _barrier(line, starts, known)
        for hit in _CALL.finditer(line):
            name = hit["loop"] or hit["name"]
            form = CALLS.get(name) or CALLS.get(name.partition("<")[0])
            form = form or next((f for start, f in PREFIXES.items() if name.startswith(start)), "")
            args = hit["args"] or ""
            last = args.rpartition(", ")[2]
            if form:
                found.append(form.format(bar=_barrier(args, starts, known), last=last))
    return [each for each, _ in groupby(found)]


def _barrier(text: str, starts: list[tuple[int, str]], known: dict[str, str]) -> str:
    """Return the name of the barrier whose address is in ``text``."""
    number = re.search(r"smem \+ (\d+)", text)
    if number is None:
        return next((known[name] for name in known if re.search(rf"\b{name}\b", text)), "?")
    return next((name for at, name in reversed(starts) if at <= int(number[1])), "?")


INIT = "init full 1, init empty {senders}, init done 1, init free {frees}, init fence, "
ALONE = "alloc, fence before, warp sync, block sync, fence after, grid wait, "
CLUSTER = "alloc, fence before, warp sync, cluster sync, fence after, grid wait, "
STARTED = "warp sync, cluster sync, "  # both CTAs of a pair, before either allocates
LOAD = "TILES, STAGES, wait empty: parity ^ 1, expect {bytes}, load, grid launch, "
DRAIN = "DRAIN, wait empty: parity ^ 1, "
STAGE = "wait full: parity, fence after, copy, multiply, commit empty, warp sync, "
MULTIPLY = f"TILES, wait free: freed, STAGES, {STAGE}commit done, warp sync, "
READ = "TILES, wait done: number / 2 & 1, fence after, PARTS, read, read done, "
FREE = "fence before, warp sync, arrive free, "
SEND = "fence async, warp sync, TMA store, store commit, store done, "
END = "warp sync, fence before, {meet} sync, fence after, dealloc"
SPREAD = "wait packed: late_parity, spread, fence async, warp sync, arrive full, "
PEERS = MULTIPLY.replace("wait free", "wait for peers free")

GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    "loads, MMAs, direct stores": (
        {"n": 256},
        INIT.format(senders=1, frees=4)
        + ALONE
        + LOAD.format(bytes=2 * 128 * 64 + 2 * 1024)
        + MULTIPLY
        + READ
        + FREE
        + "store, "
        + END.format(meet="block"),
    ),
    "a pair, stores by TMA": (
        {"cta_group": 2, "mma_n": 256, "block_k": 256, "store": "tma", "out_dtype": "bfloat16"},
        INIT.format(senders=1, frees=8)
        + STARTED
        + CLUSTER
        + LOAD.format(bytes=2 * (128 * 128 + 128 * 128 + 3 * 2048))
        + DRAIN
        + PEERS
        + READ
        + FREE
        + "store read 1, warp sync, stage, "
        + SEND
        + END.format(meet="cluster"),
    ),
    "multicast": (
        {"cluster_x": 2, "cluster_y": 2},
        INIT.format(senders=3, frees=4)
        + CLUSTER
        + LOAD.format(bytes=2 * 128 * 64 + 2 * 1024)
        + DRAIN
        + MULTIPLY
        + READ
        + FREE
        + "store, "
        + END.format(meet="cluster"),
    ),
    "split K": (
        {"split_k": 2, "acc_stages": 1, "mma_n": 64},
        INIT.format(senders=1, frees=4)
        + CLUSTER
        + LOAD.format(bytes=(128 + 64) * 64 + 2 * 1024)
        + DRAIN
        + MULTIPLY
        + "wait done: 0, fence after, PARTS, read, read done, share, fence before, warp sync, "
        + "cluster sync, PIECES, sum of peers, store, "
        + END.format(meet="cluster").removeprefix("warp sync, "),
    ),
    "a pair, codes spread by its loading warps, K that ends within a stage": (
        {"fmt": "mxfp8xmxfp4", "cta_group": 2, "mma_n": 64, "k": 416},
        INIT.format(senders=1, frees=8).replace("full 1", "full 2").replace(
            "init done", "init packed 1, init done"
        )
        + STARTED
        + CLUSTER
        + "TILES, STAGES, wait empty: parity ^ 1, expect 19456, load, warp sync, "
        + SPREAD
        + "grid launch, REST, "
        + SPREAD
        + DRAIN
        + PEERS.replace(STAGE, 2 * STAGE).replace("wait full", "wait for peers full")
        + READ
        + FREE
        + "store, "
        + END.format(meet="cluster"),
    ),
    "experts, whose last rows are stored one by one": (
        {"experts": 3, "store": "tma"},
        INIT.format(senders=1, frees=4)
        + ALONE
        + "table, "
        + LOAD.format(bytes=2 * 128 * 64 + 2 * 1024)
        + MULTIPLY
        + READ
        + FREE
        + "store read 1, warp sync, stage, store, "
        + SEND
        + END.format(meet="block"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(GOLDEN))
def test_what_others_wait_for(name: str) -> None:
    """Each barrier, wait and fence of a kernel, in the order of its text."""
    changes, wanted = GOLDEN[name]
    assert actions(harness.kernel(harness.plan(**changes))) == wanted.split(", ")


@pytest.mark.parametrize("split", [False, True])
def test_alloc_and_dealloc_are_of_one_warp(split: bool) -> None:
    """The MMA warp allocates and frees as many columns, and lets others allocate between."""
    changes = {"split_k": 2, "acc_stages": 1} if split else {"cta_group": 2, "mma_n": 256}
    kernel = harness.kernel(harness.plan(**changes))
    text = emit(kernel, "gemm")
    (alloc,) = re.findall(r"if \(warp == 5\) \{\n\s*bs_tcgen05_alloc<(\d)>\(.*, (\d+)\);", text)
    (dealloc,) = re.findall(r"if \(warp == 5\) bs_tcgen05_dealloc<(\d)>\(tmem, (\d+)\);", text)
    assert alloc == dealloc == (str(kernel.group), str(kernel.tmem_columns))
    assert text.count(f"bs_tcgen05_relinquish<{kernel.group}>();") == 1


def test_who_waits_where_is_uniform() -> None:
    """Warps meet outside of elected threads: nothing that a whole warp does is below them."""
    for changes, _ in GOLDEN.values():
        depth = None
        for line in emit(harness.kernel(harness.plan(**changes)), "gemm").splitlines():
            indent = len(line) - len(line.lstrip())
            if depth is not None and indent <= depth:
                depth = None
            elif depth is not None:
                assert not re.search(r"__sync|_sync\(|tcgen05_(ld|alloc|wait|relinq)", line), line
            if re.match(r"\s*if \((warp == 4 && )?(bs_elect\(\)|issues|lane == 0)\) \{$", line):
                depth = indent
