"""``python -m blockscale.tuning.server``: TVM's ``rpc_server`` with what measures kernels.

For each GPU of a host start one with its own ``CUDA_VISIBLE_DEVICES``.  The address and port at
which it listens are open to everybody who can connect: use it in a network of your own.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial

from tvm import rpc

from blockscale.tuning import fleet


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description="Measure kernels for `blockscale tune --tracker`.")
    parser.add_argument("--tracker", required=True, help="host:port of tvm.exec.rpc_tracker")
    parser.add_argument("--key", required=True, help="what `blockscale tune --key` asks for")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen at")
    parser.add_argument("--port", type=int, default=9090)
    parser.add_argument("--port-end", type=int, default=9199, help="the first port not to try")
    parser.add_argument("--custom-addr", help="this host's address as the tracker is to tell it")
    return parser.parse_args(words)


def main() -> None:
    """Serve until it is killed, and what serves with it."""
    args = arguments()
    where, _, port = args.tracker.rpartition(":")
    while True:
        server = rpc.Server(
            args.host,
            args.port,
            args.port_end,
            tracker_addr=(where, int(port)),
            key=args.key,
            custom_addr=args.custom_addr,
            server_init_callback=partial(fleet.register, os.getpid()),
        )
        server.proc.join()
        why = f"a session was killed, or no tracker answers at {args.tracker}"
        print(f"server of key {args.key!r} starts anew: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
