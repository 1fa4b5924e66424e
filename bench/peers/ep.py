"""Another's dispatch and combine on one host: UCCL-EP (wheel ``uccl``), DeepEP's kernels and API.

    torchrun --nproc-per-node 2 -m bench.peers.ep [--parts normal worst low_latency]
        [--tokens 1 8 64 128 512 4096] [--sms 20] [--seconds 150] [--out FILE]

Rows and routings are those of `bench.ep`'s "exchange": `TIMED`, 16 bits, both directions.  Parts:

* "normal": as its users call it.  The host waits for the number of rows that come, so calls cannot
  be captured: times are those between two events around each call, what the host does included;
* "worst": the same kernels with room for all rows (``num_worst_tokens``), in CUDA graphs;
* "low_latency": a row for each slot, into buffers of the largest size, in CUDA graphs.  What other
  hosts would get by RDMA goes through the same memory, here by NVLink alone.

Microseconds are medians, of the slowest rank: "dispatch" (with its layout) and "combine" are calls
of one direction in a row, which their kernels allow, "both" is the one after the other.  Results
are checked with experts that return their input.

A part has processes of its own, as the peer may abort, or wait forever; what failed is printed, a
line each.  LOCAL_RANK 0 starts them all, other processes of torchrun return at once.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench import measure
from bench.ep.__main__ import CALLS, LAYERS, TIMED, TOKENS, Batch, Ranks
from blockscale.demo.files import write_json

Tensor = torch.Tensor

FORMAT = 1
UCCL = "0.1.1"  # the wheel whose calls these are
SMS = 20  # UCCL's default; DeepEP's is 24
SEND, RECEIVE = {"dispatch": 24, "combine": 10}, 256  # rows of a chunk, of a ring: for 2 ranks
RDMA = 6, 128  # the same of other hosts: not used here
BFLOAT16 = 6  # its number of the dtype
TIMES, WARM = 24, 3
MOST_LOW_LATENCY = 512  # tokens: buffers are 15 MB for each
LIMIT = 0.01  # relative error of a row: two roundings to 16 bits


# ---- The peer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Came:
    """Rows that came, and what the way back needs.

    ids count the rank's own experts, -1: none; rows behind the last one that came have only -1.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    kept: tuple[Tensor, ...]


class Runtime:
    """Its buffer of a rank, with those of the other ranks mapped.

    Its proxies, threads that talk to network cards, are made, as it asks for them, but not started.
    """

    def __init__(self, ranks: Ranks, nvl_bytes: int, far_bytes: int = 0) -> None:
        own = import_module("uccl.ep")
        index, count, low_latency = ranks.device.index, ranks.count, far_bytes > 0
        own.set_device(index)  # its CUDA runtime is another one than torch's
        # Its own allocator takes host memory where no card can register the GPU's, and nothing
        # would go by NVLink.  A large tensor begins where its allocation begins, as IPC asks for.
        self.far = torch.zeros(max(far_bytes, 32 << 20), dtype=torch.uint8, device=ranks.device)
        self.proxies = [
            own.Proxy(
                thread_idx=thread,
                gpu_buffer_addr=self.far.data_ptr(),
                total_size=self.far.numel(),
                rank=ranks.rank,
                node_idx=0,
                local_rank=index,
                num_experts=0,
                num_ranks=count,
                num_nodes=1,
                use_normal_mode=not low_latency,
                is_intranode=True,
            )
            for thread in range(own.get_num_proxy_threads())
        ]
        own.register_proxies(index, self.proxies)
        self.buffer = own.Buffer(
            rank=ranks.rank,
            num_ranks=count,
            num_nvl_bytes=nvl_bytes,
            num_rdma_bytes=far_bytes,
            low_latency_mode=low_latency,
            explicitly_destroy=True,
            num_local_ranks=count,
        )
        far_handle = None
        if low_latency:
            self.buffer.set_rdma_buffer(self.far.data_ptr())
            far_handle = self.buffer.get_local_rdma_ipc_handle()
            # Counters too would be in host memory without a card.
            self.counters = torch.zeros(1 << 20, dtype=torch.uint8, device=ranks.device)
            for proxy in self.proxies:
                proxy.set_atomic_buffer_ptr(_capsule(self.counters.data_ptr()))
        mine = self.buffer.get_local_device_id(), self.buffer.get_local_ipc_handle(), far_handle
        of_all: list[Any] = [None] * count
        dist.all_gather_object(of_all, mine)
        devices, handles, far_handles = (list(part) for part in zip(*of_all, strict=True))
        self.buffer.sync(devices, handles, None, far_handles)
        own.connect_atomic_buffer(self.proxies[0], self.buffer)
        torch.cuda.set_device(index)
        torch.cuda.synchronize()
        dist.barrier()


def _capsule(pointer: int) -> Any:
    """Return a pointer as nanobind's functions take it."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return make(pointer, b"nb_handle", None)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


class Uccl:
    """Its normal mode: rows go through rings in the receiver's memory, once for each rank.

    ids are int64, weights float32.  ``worst``: room for all ranks' ``bound`` tokens, so that the
    host need not know how many come.
    """

    def __init__(
        self,
        ranks: Ranks,
        experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        *,
        worst: bool = False,
        sms: int = SMS,
    ) -> None:
        config = import_module("uccl.ep").Config
        self.ranks, self.experts, self.top_k = ranks, experts, top_k
        self.bound, self.worst, self.channels = max_tokens, worst, sms // 2
        self.configs = {which: config(sms, rows, RECEIVE, *RDMA) for which, rows in SEND.items()}
        sizes = [
            one.get_nvl_buffer_size_hint(2 * hidden, ranks.count) for one in self.configs.values()
        ]
        self.buffer = self._runtime(max(sizes), hidden)

    def _runtime(self, nvl_bytes: int, hidden: int) -> Any:
        self.runtime = Runtime(self.ranks, nvl_bytes)
        return self.runtime.buffer

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Came:
        """Send rows [T, H] to the ranks of their experts."""
        assert ids.dtype == torch.int64
        count, (tokens, hidden), stream = self.ranks.count, x.shape, _stream()

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=x.device)

        to_rank, to_expert = ints(count), ints(self.experts)
        goes = torch.empty((tokens, count), dtype=torch.bool, device=x.device)
        layout = {
            "num_tokens_per_rank_ptr": to_rank.data_ptr(),
            "num_tokens_per_expert_ptr": to_expert.data_ptr(),
            "is_token_in_rank_ptr": goes.data_ptr(),
        }
        self.buffer.get_dispatch_layout(
            topk_idx_ptr=ids.data_ptr(),
            num_tokens=tokens,
            num_topk=self.top_k,
            num_experts=self.experts,
            num_tokens_per_rdma_rank_ptr=0,
            compute_stream_ptr=stream,
            **layout,
        )
        by_rank, sent, came = (
            ints(count, count),
            ints(count, self.channels),
            ints(count, self.channels),
        )
        how = {
            "num_tokens": tokens,
            "num_experts": self.experts,
            "num_worst_tokens": count * self.bound if self.worst else 0,
            "config": self.configs["dispatch"],
            "rank_prefix_matrix_ptr": by_rank.data_ptr(),
            "channel_prefix_matrix_ptr": sent.data_ptr(),
            "is_token_in_rank_ptr": goes.data_ptr(),
            "compute_stream_ptr": stream,
        }
        rows = self.buffer.intranode_prepare(expert_alignment=1, **(layout | how))[0]
        room = max(rows, 1)
        source, head = ints(room), ints(tokens, count)
        new = x.new_empty((room, hidden))
        new_ids = ids.new_empty((room, self.top_k))
        new_weights = weights.new_empty((room, self.top_k))
        self.buffer.intranode_dispatch(
            x_ptr=x.data_ptr(),
            hidden=hidden,
            x_element_size=x.element_size(),
            x_scales_ptr=0,
            num_scales=0,
            scale_token_stride=0,
            scale_hidden_stride=0,
            topk_idx_ptr=ids.data_ptr(),
            num_topk=self.top_k,
            topk_weights_ptr=weights.data_ptr(),
            cached_mode=False,
            num_recv_tokens=rows,
            recv_x_ptr=new.data_ptr(),
            recv_x_scales_ptr=0,
            recv_topk_idx_ptr=new_ids.data_ptr(),
            recv_topk_weights_ptr=new_weights.data_ptr(),
            recv_channel_prefix_matrix_ptr=came.data_ptr(),
            recv_src_idx_ptr=source.data_ptr(),
            send_head_ptr=head.data_ptr(),
            **how,
        )
        return Came(new[:rows], new_ids[:rows], new_weights[:rows], (source, by_rank, came, head))

    def combine(self, y: Tensor, came: Came) -> Tensor:
        """Add up each token's rows, one of every rank it went to."""
        source, by_rank, channels, head = came.kept
        out = y.new_empty((len(head), came.hidden.shape[1]))
        held = y if len(y) else out  # where no row came: null pointers are refused
        self.buffer.intranode_combine(
            x_ptr=held.data_ptr(),
            num_tokens=len(y),
            hidden=out.shape[1],
            x_dtype_code=BFLOAT16,
            x_element_size=y.element_size(),
            topk_weights_ptr=0,
            num_topk=0,
            bias_0_ptr=0,
            bias_1_ptr=0,
            src_idx_ptr=source.data_ptr(),
            num_recv_tokens=len(head),
            rank_prefix_matrix_ptr=by_rank.data_ptr(),
            channel_prefix_matrix_ptr=channels.data_ptr(),
            send_head_ptr=head.data_ptr(),
            config=self.configs["combine"],
            recv_x_ptr=out.data_ptr(),
            recv_topk_weights_ptr=0,
            compute_stream_ptr=_stream(),
        )
        return out

    def returned(self, came: Came) -> Tensor:
        """Return what experts make of the rows that return their input."""
        factors = torch.where(came.ids >= 0, came.weights, 0).sum(1, keepdim=True)
        return (came.hidden.float() * factors).to(came.hidden.dtype)

    def dispatch_and_combine(
        self, x: Tensor, ids: Tensor, weights: Tensor, run: Callable[[Came], Tensor] | None = None
    ) -> Tensor:
        """Send rows and bring them back, as ``run`` made them."""
        came = self.dispatch(x, ids, weights)
        return self.combine(came.hidden if run is None else run(came), came)


class UcclLowLatency(Uccl):
    """Its low-latency mode: a row for each slot, in a block for each expert and source."""

    def _runtime(self, nvl_bytes: int, hidden: int) -> Any:
        size = import_module("uccl.ep").get_low_latency_rdma_size_hint
        self.runtime = Runtime(
            self.ranks, 0, size(self._room, hidden, self.ranks.count, self.experts)
        )
        return self.runtime.buffer

    @property
    def _room(self) -> int:
        return -(-self.bound // 4) * 4  # rows of a block: what TMA takes

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Came:
        """Send rows [T, H] to their experts."""
        assert ids.dtype == torch.int64
        count, local = self.ranks.count, self.experts // self.ranks.count
        hidden = x.new_empty((local, count * self._room, x.shape[1]))
        number = torch.empty(local, dtype=torch.int32, device=x.device)
        source = number.new_empty(hidden.shape[:2])
        ranges = torch.empty((local, count), dtype=torch.int64, device=x.device)
        self.buffer.low_latency_dispatch(
            x_ptr=x.data_ptr(),
            x_rows=x.shape[0],
            x_cols=x.shape[1],
            topk_idx_ptr=ids.data_ptr(),
            topk_rows=ids.shape[0],
            topk_cols=ids.shape[1],
            packed_recv_x_ptr=hidden.data_ptr(),
            packed_recv_x_scales_ptr=0,
            packed_recv_count_ptr=number.data_ptr(),
            packed_recv_src_info_ptr=source.data_ptr(),
            packed_recv_layout_range_ptr=ranges.data_ptr(),
            compute_stream_ptr=_stream(),
            num_max_dispatch_tokens_per_rank=self._room,
            num_experts=self.experts,
            use_fp8=False,
        )
        return Came(hidden, ids, weights, (source, ranges, number))

    def combine(self, y: Tensor, came: Came) -> Tensor:
        """Add up the rows of each token's slots, times their weights."""
        source, ranges, _ = came.kept
        tokens, top_k = came.ids.shape
        out = y.new_empty((tokens, y.shape[2]))
        self.buffer.low_latency_combine(
            x_ptr=y.data_ptr(),
            x_dim0=y.shape[0],
            x_dim1=y.shape[1],
            x_dim2=y.shape[2],
            topk_idx_ptr=came.ids.data_ptr(),
            topk_rows=tokens,
            topk_cols=top_k,
            topk_weights_ptr=came.weights.data_ptr(),
            src_info_ptr=source.data_ptr(),
            src_info_dim0=source.shape[0],
            src_info_dim1=source.shape[1],
            layout_range_ptr=ranges.data_ptr(),
            layout_range_dim0=ranges.shape[0],
            layout_range_dim1=ranges.shape[1],
            compute_stream_ptr=_stream(),
            num_max_dispatch_tokens_per_rank=self._room,
            num_experts=self.experts,
            out_ptr=out.data_ptr(),
        )
        return out

    def returned(self, came: Came) -> Tensor:
        """Return what experts make of the rows that return their input."""
        return came.hidden


# ---- A part, in a process of each rank ----------------------------------------------------------


def _calls(ranks: Ranks, call: Callable[[], Any]) -> float:
    """Return microseconds of calls that the host waits for, of the slowest rank."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMES)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = [1000 * begin.elapsed_time(end) for begin, end in marks]
    slowest = torch.tensor([median(times)], device=ranks.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 2)


@dataclass(frozen=True)
class Part:
    """One way to call the peer."""

    make: Callable[..., Uccl]
    timed: Callable[[Ranks, Callable[[], Any]], float]
    most: int = 1 << 30


PARTS = {
    "normal": Part(Uccl, _calls),
    "worst": Part(lambda *sizes, sms: Uccl(*sizes, worst=True, sms=sms), Ranks.us),
    "low_latency": Part(UcclLowLatency, Ranks.us, MOST_LOW_LATENCY),
}


def _measured(ranks: Ranks, own: Uccl, part: Part, tokens: int) -> dict[str, Any]:
    """Return error and times of so many tokens of each rank."""
    batch = Batch(ranks, LAYERS[TIMED], tokens)
    x, ids, weights = batch.x, batch.ids.long(), batch.weights
    own.bound = tokens
    wanted = x.float() * weights.sum(1, keepdim=True)
    y = own.dispatch_and_combine(x, ids, weights, own.returned)
    worst = torch.tensor([measure.row_error(y, wanted)], device=ranks.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    found: dict[str, Any] = {"tokens": tokens, "rows": batch.rows, "error": float(worst)}
    if not found["error"] < LIMIT:
        raise ValueError(f"a row differs by {found['error']:.3g} of its length")
    came = own.dispatch(x, ids, weights)
    torch.cuda.synchronize()
    found["dispatch"] = part.timed(ranks, lambda: own.dispatch(x, ids, weights))
    found["combine"] = part.timed(ranks, lambda: own.combine(came.hidden, came))
    found["both"] = part.timed(ranks, lambda: own.dispatch_and_combine(x, ids, weights))
    torch.cuda.synchronize()
    dist.barrier()
    return found


def run_part(name: str, every: list[int], sms: int, into: Path) -> int:
    """Measure a part; print what failed; return the exit status."""
    doing, found = "start", []
    try:
        ranks, part, layer = Ranks(), PARTS[name], LAYERS[TIMED]
        counts = [tokens for tokens in every if tokens <= part.most]
        if ranks.rank == 0 and len(counts) < len(every):
            _say(f"uccl, {name}: more than {part.most} tokens: not measured, buffers too large")
        doing = "buffers"
        sizes = layer.experts, layer.hidden, layer.top_k, max(counts, default=1)
        own = part.make(ranks, *sizes, sms=sms)
        for tokens in counts:
            doing = f"{tokens} tokens"
            found.append(_measured(ranks, own, part, tokens))
            if ranks.rank == 0:
                _say(f"uccl, {name}: {found[-1]}")
                into.write_text(json.dumps(found))
    except Exception as error:  # of another's library
        rank = os.environ["RANK"]
        line = f"rank {rank}: {doing}: {measure.describe(error)}"
        _say(f"uccl, {name}, {line}")
        into.with_suffix(f".{rank}").write_text(line)
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # at once: ranks share the output
    sys.stdout.flush()


# ---- All parts ----------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[str]:
    """Wait for a part's processes, end those that hang, return what was wrong."""
    last = time.monotonic() + seconds
    while any(one.poll() is None for one in processes) and time.monotonic() < last:
        if any(one.poll() for one in processes):
            last = min(last, time.monotonic() + 10)
        time.sleep(0.1)
    wrong = []
    for rank, one in enumerate(processes):
        code = one.poll()
        if code is None:
            one.kill()
            one.wait()
            wrong.append(f"rank {rank}: still ran, was ended")
        elif code < 0:
            wrong.append(f"rank {rank}: ended by signal {-code}")
        elif code:
            wrong.append(f"rank {rank}: ended with status {code}")
    return wrong


def _started(args: list[str], count: int) -> list[subprocess.Popen[bytes]]:
    kept = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    command = [sys.executable, "-m", "bench.peers.ep", *args]
    return [
        subprocess.Popen(command, env=kept | common | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(count)
    ]


def run_all(args: argparse.Namespace) -> None:
    """Run all parts, the one after the other; write what they found."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    results: dict[str, Any] = {
        "format": FORMAT,
        "date": measure.now(),
        "machine": measure.machine(),
        "versions": measure.gpu_versions(),
        "uccl": UCCL,
        "ranks": count,
        "sms": args.sms,
        "calls": {"normal": TIMES, "graph": CALLS},
        "parts": {},
        "failed": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in args.parts:
            into = Path(folder) / f"{name}.json"
            tokens = [str(number) for number in args.tokens]
            given = ["--parts", name, "--into", str(into), "--sms", str(args.sms)]
            processes = _started([*given, "--tokens", *tokens], count)
            try:
                wrong = _wait(processes, args.seconds)
            finally:
                for one in processes:
                    one.kill()
            for line in wrong:
                _say(f"uccl, {name}, {line}")
            results["parts"][name] = json.loads(into.read_text()) if into.exists() else []
            errors = [into.with_suffix(f".{rank}") for rank in range(count)]
            results["failed"][name] = [one.read_text() for one in errors if one.exists()] + wrong
            if args.out is not None:
                write_json(args.out, results)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sms", type=int, default=SMS, help="of a kernel in normal mode")
    parser.add_argument("--seconds", type=float, default=150, help="that a part may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.into is not None:
        status = run_part(args.parts[0], args.tokens, args.sms, args.into)
        ctypes.CDLL(None).fflush(None)  # what its C++ and its kernels printed
        os._exit(status)  # its destructors wait for the other ranks
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        run_all(args)


if __name__ == "__main__":
    main()
