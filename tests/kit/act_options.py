"""FlashInfer's options of quantisers: data, and what comes of them.  Imports no tvm."""

import numpy as np
import torch

from blockscale.specs.fused import FP8, SPAN
from tests.kit.helpers import tensor, widen
from tests.reference import fused as fused


def inputs(spec, rows, blocks, seed=0):
    """Return input and global_scale: blocks of several sizes; but for FP8, a row of zeros."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-3, 3, (rows, blocks))).repeat(spec.block, -1)
    values = rng.standard_normal(size.shape) * size
    scales = np.float32(37.3) * np.exp2(np.arange(rows) / 3)
    count = rows if spec.scaling == "rows" else 1
    given = {"global_scale": torch.tensor(scales[:count], dtype=torch.float32)}
    if spec.finds_scale:
        given["global_scale"] = torch.tensor([1 / SPAN])
    if spec.dtype == FP8:
        fp8 = torch.tensor(values * 10).to(torch.float8_e4m3fn)
        return {"input": fp8.view(torch.uint8), **given}
    values[rows // 2] = 0
    return {"input": tensor(values, spec.dtype), **given}


def expected(spec, given, span=SPAN):
    """Return codes, scale bytes and, of "token", the stored scales of rows."""
    x, g = given["input"], given["global_scale"].numpy()
    if spec.dtype == FP8:
        return fused.byte_mode(x.numpy(), spec.block, spec.scale_format, g)
    x, more, top = widen(x), (), None
    if spec.finds_scale:
        g, *more, top = fused.token_scales(x, g[0])
    if spec.search != "none":
        return *fused.four_over_six(x, g, spec.search, span, top), *more
    rows = zip(x[:, None], np.broadcast_to(g, len(x)), strict=True)
    made = [fused.exact_mode(row, spec.block, spec.scale_format, own) for row, own in rows]
    return *map(np.concatenate, zip(*made, strict=True)), *more
