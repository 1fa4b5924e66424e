"""The byte layout of INT4 and INT8 weights of TensorRT-LLM's mixed GEMMs, and the way back.

A plain weight is [E, K, N] in two's complement, row by row, two int4 a byte (low nibble: even n).
The kernels read 32-bit words of ``ew`` = 32 / bits weights of one column.  Word w of a column holds
the rows k' = ew * w + j, where row k' of a block of B = 128 / bits rows is row P[k'] of the weight,
and lies in the expert at word

    (n // I) * (K // ew) * I + (w // T) * T * I + (n % I) * T + w % T

with T words a tile.  `layout_of` has P, I, T of every architecture; most also add
2^(bits-1) to the codes, and move slot 2s of a word to s, slot 2s + 1 to s + ew / 2 (``biased``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from blockscale import checks

Tensor = torch.Tensor

ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
"""Compute capabilities whose layout is known."""

ROW_ORDER = {
    # (activation bits, weight bits): row of the weight that comes t-th in a block
    (16, 4): tuple(8 * (t % 8 // 2) + t % 2 + 2 * (t // 8) for t in range(32)),
    (8, 4): tuple(16 * (t % 8 // 4) + t % 4 + 4 * (t // 8) for t in range(32)),
    (16, 8): tuple(8 * (t % 4 // 2) + t % 2 + 2 * (t // 4) for t in range(16)),
}

ACTIVATION_BITS = {"a16": 16, "a8": 8}
CODES = (torch.uint8, torch.int8)
SLAB_BYTES = 2**16
"""Bytes that a CPU converts at a time: too few for torch to start its threads, whose waiting for
each other cost more than they gained (235 MB, 2 busy EPYC cores: 1 to 10 s with, 0.4 s without)."""

GPU_SLAB_BYTES = 2**26
"""The same on a GPU."""


@dataclass(frozen=True)
class WeightLayout:
    """Where `preprocess_weights` puts a weight; see the module's formula."""

    bits: int
    order: tuple[int, ...] | None
    """Rows of a block; None: as they are."""
    columns: int
    """I, columns that are interleaved; 1: none."""
    tile: int
    """Rows of a tile, T * ew; means nothing where no columns are interleaved."""
    biased: bool
    """Whether codes become unsigned and the slots of a word are moved."""

    @property
    def slots(self) -> int:
        """Weights of a word."""
        return 32 // self.bits

    @property
    def block(self) -> int:
        """Rows that any conversion keeps together."""
        return self.tile if self.columns > 1 else 128 // self.bits

    @property
    def n_multiple(self) -> int:
        """What N must be a multiple of: 8 bytes of a row."""
        return 64 // self.bits

    def rows(self) -> list[int]:
        """Return the rows of a block, slot by slot and word by word."""
        half = self.slots // 2
        slots = [2 * s if s < half else 2 * (s - half) + 1 for s in range(self.slots)]
        found = []
        for at in range(self.block):
            k = at // self.slots * self.slots
            k += slots[at % self.slots] if self.biased else at % self.slots
            base = 0 if self.order is None else k // len(self.order) * len(self.order)
            found.append(k if self.order is None else base + self.order[k - base])
        return found


def layout_of(
    *, sm: int = 80, activation: str = "a16", moe: bool = True, bits: int = 4, where: str = ""
) -> WeightLayout:
    """Return the layout that the kernels of an architecture read.

    Dense weights of sm 100 and 103 are only transposed, as TensorRT-LLM's Python code of 2026 does;
    its C++ code uses the layout of ``sm=80`` there.

    Raises:
        ValueError: an unknown argument, or a combination that no kernel of TensorRT-LLM reads.
    """
    where = where or "int4.layout_of"
    check_sm(where, sm)
    checks.choice(where, "activation", activation, tuple(ACTIVATION_BITS))
    check_bits(where, bits)
    if activation == "a8":
        _check_a8(where, sm, moe, bits)
    acts = ACTIVATION_BITS[activation]
    full = WeightLayout(bits, ROW_ORDER.get((acts, bits)), acts // bits, 1024 // acts, True)
    transposed = WeightLayout(bits, None, 1, full.tile, False)
    if sm == 90 and moe and activation == "a8":
        return transposed
    if moe or sm < 90 or sm >= 120:
        return full
    return WeightLayout(bits, full.order, 1, full.tile, True) if sm == 90 else transposed


def check_sm(where: str, sm: int) -> None:
    """ValueError unless ``sm`` is one of `ARCHITECTURES`."""
    if sm not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"{where}: sm={sm!r} is not known; choose one of {known}")


def check_bits(where: str, bits: int) -> None:
    """ValueError unless ``bits`` is 4 or 8."""
    if bits not in (4, 8):
        raise ValueError(f"{where}: bits={bits!r}, but weights have 4 or 8; pass bits=4 or bits=8")


def _check_a8(where: str, sm: int, moe: bool, bits: int) -> None:
    """ValueError where TensorRT-LLM has no kernel with FP8 activations."""
    if bits == 8:
        raise ValueError(
            f"{where}: bits=8 with activation='a8' has no layout: FP8 activations go with 4-bit "
            "weights; pass activation='a16' or bits=4"
        )
    if sm < 89:
        raise ValueError(
            f"{where}: activation='a8' on sm={sm}, but FP8 activations need sm 89 or later; pass "
            "activation='a16', or the sm of the GPU that will run it"
        )
    if moe and sm in (100, 103):
        raise ValueError(
            f"{where}: activation='a8' with moe=True on sm={sm}, for which TensorRT-LLM has no "
            "kernel; pass activation='a16', or sm=89 or sm=90 for the layouts of those kernels"
        )


# ---- Weights ------------------------------------------------------------------------------------


def preprocess_weights(
    packed: Tensor, *, sm: int = 80, activation: str = "a16", moe: bool = True, bits: int = 4
) -> Tensor:
    """Return the bytes that TensorRT-LLM's kernels read, in the shape and dtype of ``packed``.

    The shape of the result only names its size: each expert is one run of 32-bit words.  The MoE
    kernel with FP8 activations of sm 90 gets a layout of its own (its caller in TensorRT-LLM has to
    ask for that with ``do_weight_interleave=False``).

    Args:
        packed: uint8 or int8, signed codes, [E, K, N/2] for 4 bits, [E, K, N] for 8; a dense weight
            may come without E.
        sm: compute capability of the GPU, one of `ARCHITECTURES`.
        activation: "a16" for float16 and bfloat16, "a8" for FP8.
        moe: for a grouped GEMM; False for a dense one.
        bits: 4 or 8.

    Raises:
        ValueError, TypeError: an argument that TensorRT-LLM refuses, or would convert to something
            that no kernel reads.
    """
    where = "int4.preprocess_weights"
    layout = layout_of(sm=sm, activation=activation, moe=moe, bits=bits, where=where)
    source = weight_bytes(where, packed, layout, moe, bits)
    out = torch.empty_like(source)
    for expert, made in zip(source, out, strict=True):
        _preprocess(expert, made, layout)
    return out.view(packed.dtype).view(packed.shape)


def unprocess_weights(
    processed: Tensor, *, sm: int = 80, activation: str = "a16", moe: bool = True, bits: int = 4
) -> Tensor:
    """Return the plain weight of which `preprocess_weights` made ``processed``; arguments alike."""
    where = "int4.unprocess_weights"
    layout = layout_of(sm=sm, activation=activation, moe=moe, bits=bits, where=where)
    source = weight_bytes(where, processed, layout, moe, bits)
    out = torch.empty_like(source)
    for expert, made in zip(source, out, strict=True):
        restore(expert, made, layout)
    return out.view(processed.dtype).view(processed.shape)


def weight_bytes(
    where: str, packed: Tensor, layout: WeightLayout | None, moe: bool, bits: int
) -> Tensor:
    """Return a weight, plain if it has no layout, as uint8 [E, K, bytes of N], after all checks."""
    value = checks.tensor(where, "packed", packed, CODES, 2)
    got = list(value.shape)
    wanted = "[E, K, N/2]" if bits == 4 else "[E, K, N]"
    if value.dim() > 3 or (moe and value.dim() == 2):
        remedy = "add the axis of experts, or pass moe=False for a dense weight [K, ...]"
        raise ValueError(f"{where}: packed has shape {got}, but must be {wanted}; {remedy}")
    if not value.numel():
        raise ValueError(
            f"{where}: packed has shape {got}, which is empty; leave such a weight out"
        )
    sizes = (("K", got[-2]), ("N", got[-1] * 8 // bits))
    multiples = (1, 1) if layout is None else (layout.block, layout.n_multiple)
    for (name, size), multiple in zip(sizes, multiples, strict=True):
        if size % multiple:
            up = -(-size // multiple) * multiple
            raise ValueError(
                f"{where}: {name}={size} of packed {got} is not a multiple of {multiple}, as this "
                f"layout needs; pad the weight with zeros to {name}={up}"
            )
    return value.view(torch.uint8).view(-1, *got[-2:])


def _preprocess(source: Tensor, out: Tensor, layout: WeightLayout) -> None:
    """Write one expert's layout to ``out``; both are bytes [K, bytes of N]."""
    words = _words(source)
    stream = _stream(out.view(torch.int32), layout)
    for rows, tiles, columns in _slabs(words, layout):
        slab = words[:, columns].index_select(0, rows)
        _transpose(slab, layout)
        if layout.biased:
            slab ^= _sign_bits(layout.bits)
        target = stream[columns, :, tiles]
        target.copy_(_as_stream(slab, target.shape))


def restore(source: Tensor, out: Tensor, layout: WeightLayout) -> None:
    """Write the plain weight of one expert to ``out``; both are bytes [K, bytes of N]."""
    words = out.view(torch.int32)
    stream = _stream(_words(source), layout)
    for rows, tiles, columns in _slabs(words, layout):
        taken = stream[columns, :, tiles]
        slab = words.new_empty((len(rows), len(taken)))
        _as_stream(slab, taken.shape).copy_(taken)
        if layout.biased:
            slab ^= _sign_bits(layout.bits)
        _transpose(slab, layout)
        words[:, columns].index_copy_(0, rows, slab)


def _words(expert: Tensor) -> Tensor:
    """Return bytes [K, bytes] as int32 [K, bytes / 4]."""
    aligned = expert if expert.storage_offset() % 4 == 0 else expert.clone()
    return aligned.view(torch.int32)


def _stream(words: Tensor, layout: WeightLayout) -> Tensor:
    """Return the words of an expert as [N/ew, ew/I, tiles, I, T]: where the layout has them."""
    tile = layout.block // layout.slots
    i = layout.columns
    if i == 1:  # words of a column follow each other, so tiles can have any size
        return words.view(words.shape[1], layout.slots, -1, 1, tile)
    return words.view(words.shape[1], layout.slots // i, -1, i, tile)


def _as_stream(slab: Tensor, shape: torch.Size) -> Tensor:
    """Return words [words of a column * ew, N/ew] of whole tiles as `_stream` numbers them."""
    c, groups, tiles, columns, tile = shape
    return slab.view(tiles, tile, groups, columns, c).permute(4, 2, 0, 3, 1)


def _slabs(words: Tensor, layout: WeightLayout) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield the rows of some tiles, slot by slot, these tiles, and some columns of words."""
    limit = (GPU_SLAB_BYTES if words.is_cuda else SLAB_BYTES) // 4
    k, width = words.shape
    tiles = k // layout.block
    columns = min(width, max(1, limit // layout.block))
    step = max(1, limit // (layout.block * columns))
    order = torch.tensor(layout.rows(), device=words.device)
    for first in range(0, tiles, step):
        last = min(first + step, tiles)
        starts = torch.arange(first, last, device=words.device) * layout.block
        rows = (starts[:, None] + order).view(-1)
        for left in range(0, width, columns):
            yield rows, slice(first, last), slice(left, left + columns)


def _transpose(slab: Tensor, layout: WeightLayout) -> None:
    """Exchange rows and columns of every square of codes, in place.

    The square is ``ew`` rows times one word.  Per step the off-diagonal quarters of squares twice
    as large as the last change places; the result of the same steps is the way back.
    """
    half = layout.slots // 2
    while half:
        shift = half * layout.bits
        mask = sum(((1 << shift) - 1) << at for at in range(0, 32, 2 * shift))
        pairs = slab.view(-1, 2, half, slab.shape[1])
        upper, lower = pairs[:, 0], pairs[:, 1]
        change = upper >> shift
        change ^= lower
        change &= mask
        lower ^= change
        change <<= shift
        upper ^= change
        half //= 2


def _sign_bits(bits: int) -> int:
    """Return the top bit of every code of a word, as an int32."""
    return (0x88888888 if bits == 4 else 0x80808080) - 2**32
