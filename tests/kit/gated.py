"""A grouped GEMM with a gated activation and quantisation: operands, and what is sure of results.

Codes and scales are such that every product and every sum is exact in float32: c, the product
rounded to 16 bits, is known bit for bit, and what is after it judged as in `tests.kit.acts`.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tests.kit.acts import COMPARED, encoded, surely, values
from tests.kit.gemm_operands import tensor
from tests.kit.helpers import same_bytes
from tests.reference import core as ref

NUMBERS = (0.75, 0.5, 2.5)
"""Of "swiglu": none of them is the default."""


def interleaved(rows):
    """Return of [gates, ups] the rows in the order of b: 16 gates, 16 ups, and so on."""
    halves = np.split(np.asarray(rows), 2)
    pieces = [part[i : i + 16] for i in range(0, len(halves[0]), 16) for part in halves]
    return np.concatenate(pieces)


def numbers(spec):
    """The numbers that a kernel takes."""
    return NUMBERS if spec.activation == "swiglu" else ()


@dataclass
class Case:
    """What the kernel takes, and c [rows, gates then ups] in float32 (NaN: of no expert)."""

    offsets: list[int]
    a: torch.Tensor
    b: torch.Tensor
    a_scale: torch.Tensor
    b_scale: torch.Tensor
    alpha: torch.Tensor
    global_scale: torch.Tensor
    c: np.ndarray

    def tensors(self):
        """Inputs in the order of the kernel's parameters; `numbers` follow."""
        ends = torch.tensor(self.offsets, dtype=torch.int32)
        return [self.a, self.b, self.a_scale, self.b_scale, ends, self.alpha, self.global_scale]

    def outputs(self, spec):
        """Room for results; two more tiles of scales than are needed lie behind those of a."""
        shape = len(self.a_scale), spec.n // 2 // spec.block
        packed = torch.full((len(self.a), spec.n // 4), 0xFF, dtype=torch.uint8)
        return [packed, torch.full(shape, 0xFF, dtype=torch.uint8)]


def exact(rng, rows, k, fmt):
    """Return codes [rows, k] and scale bytes of a half, one and two."""
    block = ref.GEMM[fmt][2]
    scales = [0x30, 0x38, 0x40] if fmt == "nvfp4" else [126, 127, 128]
    codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
    return codes, rng.choice(np.array(scales, np.uint8), (rows, k // block))


def case(spec, offsets, rows, seed=0):
    """Return random operands; ``rows`` of a, some of which may be of no expert."""
    rng = np.random.default_rng([seed, rows, spec.n, spec.k])
    a_codes, a_byte = exact(rng, rows, spec.k, spec.fmt)
    alpha = np.exp2(rng.integers(-8, -5, spec.experts)).astype(np.float32)
    c = np.full((rows, spec.n), np.nan, np.float32)
    b, b_scale = [], []
    for e in range(spec.experts):
        codes, byte = exact(rng, spec.n, spec.k, spec.fmt)
        own = slice(offsets[e], offsets[e + 1])
        left = ref.operand(a_codes[own], a_byte[own], spec.fmt, "a")
        product = ref.mm(left, ref.operand(codes, byte, spec.fmt, "b"), alpha[e])
        c[own] = ref.round_to(product.astype(np.float32), spec.dtype)
        b.append(ref.pack(interleaved(codes)))
        b_scale.append(ref.swizzle(interleaved(byte)))
    nan = 0x7F if spec.fmt == "nvfp4" else 0xFF
    scales = ref.group_scales(a_byte, offsets)
    # Rows that fill an expert's last 128 may be anything; columns that fill K may not.
    scales[ref.group_scales(np.ones((rows, scales.shape[1])), offsets) == 0] = nan
    spare = np.full((256, scales.shape[1]), nan, np.uint8)
    factors = np.exp2(rng.uniform(-6, -2, spec.experts)).astype(np.float32)
    return Case(
        list(offsets), tensor(ref.pack(a_codes)), tensor(np.stack(b)),
        tensor(np.concatenate([scales, spare])), tensor(np.stack(b_scale)), tensor(alpha),
        tensor(factors), c,
    )  # fmt: skip


def judge(spec, given, packed, block_scale):
    """Compare codes and scales; zeros fill an expert's 128 rows, all else is as it was, 0xFF."""
    wanted_codes, wanted_scales = (np.full(t.shape, 0xFF, np.uint8) for t in (packed, block_scale))
    got = packed.numpy()
    sure_codes = np.ones((len(got), spec.n // 2), bool)
    sure_scales, at = np.ones(wanted_scales.shape, bool), 0
    sure: list[tuple[np.ndarray, np.ndarray]] = []
    for e in range(spec.experts):
        own = slice(given.offsets[e], given.offsets[e + 1])
        if own.start == own.stop:
            continue
        found = values(spec.rule, given.c[own], numbers(spec))
        blocks, sure_codes[own] = surely(spec.rule, *found)
        sure.append((blocks, sure_codes[own]))
        codes, byte = encoded(spec.rule, found[0], np.float32(given.global_scale[e]))
        wanted_codes[own] = ref.pack(codes)
        tiles = ref.swizzle(byte)
        there = slice(at, at + len(tiles))
        wanted_scales[there], sure_scales[there] = tiles, ref.swizzle(~blocks) == 0
        at += len(tiles)
    # Of all rows: one expert's may be a single one, with an unsure element in each of its blocks.
    parts = [float(np.concatenate(each).mean()) for each in zip(*sure, strict=True)]
    assert not parts or min(parts) >= COMPARED, (
        f"of {spec.name} {parts[0]:.3f} of the blocks and {parts[1]:.3f} of the codes are sure, "
        f"which is less than {COMPARED}; take other operands"
    )
    want = ref.unpack(wanted_codes)
    same_bytes(np.where(sure_codes, ref.unpack(got), want), want)
    same_bytes(np.where(sure_scales, block_scale.numpy(), wanted_scales), wanted_scales)
