"""Groups of processes over gloo: the same function on every rank, its results by rank.

The processes are forks of one that has imported what they need, and has run nothing.
"""

import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 120
"""Seconds for which processes may run, start and imports included, on a loaded machine."""


def _main(rank, ranks, file, results, function, args):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", f"file://{file}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        results.put((rank, function(rank, ranks, *args)))
    except BaseException:
        results.put((rank, "raised\n" + traceback.format_exc()))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    os._exit(0)  # a group that failed does not end in order


def run(ranks, folder, function, *args, silent=0):
    """Return what ``function(rank, ranks, *args)`` returned, by rank.

    ``silent``: so many ranks say nothing, as they end within the function.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    results = context.Queue()
    file = folder / f"store{time.monotonic_ns()}"
    given = [(rank, ranks, file, results, function, args) for rank in range(ranks)]
    processes = [context.Process(target=_main, args=each) for each in given]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=PATIENCE) for _ in range(ranks - silent))
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return found
