"""Calls every function of CUDA libraries on small random tensors, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python -m tests.hardware.sanitize kernels.so
    compute-sanitizer --tool racecheck python -m tests.hardware.sanitize kernels.so

Each tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1 is set here), so that an
access beside it is seen.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import blockscale
from blockscale.base.shapes import UnboundSymbolError
from blockscale.specs import FusedMoe, Linear, NormQuantize, Spec

SIZES = (
    {"rows": 1, "cols": 64, "blocks": 5, "experts": 2, "count": 126},
    {"rows": 130, "cols": 1056, "blocks": 300, "experts": 3, "count": 126},
)
"""Values of the symbols in shapes: the smallest, and one that fills no tile."""

NORM_ROWS = (1, 130, 1030, 2050)
"""Rows of norms: each bucket's kernels run (catalog.fused), those that store rows in bulk, too."""

MOE_ROWS = (1, 5, 15, 30, 60, 90, 130, 200, 270, 400, 550, 800, 1100, 1700)
"""Tokens of MoE layers: each bucket's kernels run (catalog.moe)."""


def argument(param, sizes):
    """Return a random tensor, or the scalar's default."""
    if param.shape is None:
        return param.default
    shape = [dim.evaluate(sizes) for dim in param.dims]
    if param.dtype == "uint8":
        return torch.randint(0, 120, shape, dtype=torch.uint8, device="cuda")
    if param.name == "topk_ids":  # some slots are dropped
        return torch.randint(
            -1, sizes.get("all_experts", 1), shape, dtype=torch.int32, device="cuda"
        )
    if param.dtype == "int32":
        return torch.full(shape, sizes["rows"] // 2, dtype=torch.int32, device="cuda")
    return torch.rand(shape, device="cuda").to(getattr(torch, param.dtype)) + 0.5


def call(function, sizes):
    """Call ``function`` once, in place where it updates an input."""
    given, spec = {}, Spec.parse(function.name)
    if isinstance(spec, FusedMoe):
        memory = spec.workspace_bytes(sizes["rows"])
        sizes = {**sizes, "workspace_bytes": memory, "all_experts": spec.experts}
    if isinstance(spec, Linear) and spec.copies_rows:
        sizes = {**sizes, "bytes": spec.workspace_bytes(sizes["rows"])}
    for param in function.params:
        alias = getattr(param, "alias", None)
        given[param.name] = given[alias] if alias else argument(param, sizes)
    function(*given.values())
    torch.cuda.synchronize()


def sizes_of(function):
    """Return the values of symbols to call ``function`` with."""
    if isinstance(Spec.parse(function.name), FusedMoe):
        return [{"rows": rows} for rows in MOE_ROWS]
    if isinstance(Spec.parse(function.name), NormQuantize):
        return [{"rows": rows} for rows in NORM_ROWS]
    return SIZES


def main(paths):
    """Call everything; a shape that a function cannot have is left out."""
    calls = 0
    for path in paths:
        for function in blockscale.load(path).functions.values():
            for sizes in sizes_of(function):
                try:
                    call(function, sizes)
                except UnboundSymbolError as error:
                    print(f"{function.name}: no value for {error.args[0]}", file=sys.stderr)
                    return 1
                calls += 1
    print(f"{calls} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
