"""Zstandard decompression (RFC 8878): nvcc and fatbinary compress PTX with it unless told not to.

Small and slow (about 1 MB/s): a kernel's PTX is some hundred kilobytes, and Python has no decoder
before 3.14.  Dictionaries are not supported, and checksums are not checked: the size is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MAGIC = 0xFD2FB528

# RFC 8878, 3.1.1.3.2.1.1: additional bits and baseline of the codes beyond the literal ones.
_LENGTH_BITS = [0] * 16 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
_MATCH_BITS = [0] * 32 + [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
_LENGTH_BASE = [*range(16), 16, 18, 20, 22, 24, 28, 32, 40, 48] + [64 << i for i in range(11)]
_MATCH_BASE = [*range(3, 35), 35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99] + [
    (128 << i) + 3 for i in range(10)
]

# 3.1.1.3.2.2: the predefined distributions; -1: a probability below one.
_LENGTH_DEFAULT = [4, 3] + [2] * 11 + [1] * 3 + [2] * 9 + [3, 2] + [1] * 5 + [-1] * 4
_MATCH_DEFAULT = [1, 4, 3] + [2] * 6 + [1] * 37 + [-1] * 7
_OFFSET_DEFAULT = [1] * 6 + [2] * 3 + [1] * 15 + [-1] * 5


@dataclass(frozen=True)
class _Table:
    """A finite-state table (4.1): per state a symbol, the bits to read, and what to add to them."""

    log: int
    symbols: list[int]
    bits: list[int]
    bases: list[int]


@dataclass
class _State:
    """What later blocks of a frame may refer to."""

    out: bytearray = field(default_factory=bytearray)
    repeats: list[int] = field(default_factory=lambda: [1, 4, 8])
    huffman: tuple[int, list[int], list[int]] | None = None
    tables: dict[str, _Table] = field(default_factory=dict)


class _Backward:
    """A bit stream that is read from its last bit to its first (4.1); zeros follow its end."""

    def __init__(self, data: bytes) -> None:
        if not data or not data[-1]:
            raise ValueError("zstd: a bit stream has no end mark")
        self.data = bytes(8) + data
        self.left = (len(data) - 1) * 8 + data[-1].bit_length() - 1

    def peek(self, count: int) -> int:
        """Return the next `count` bits (at most 56)."""
        at = self.left - count + 64
        if at < 0:
            raise ValueError("zstd: a bit stream is too short")
        return int.from_bytes(self.data[at >> 3 : (at >> 3) + 8], "little") >> (at & 7) & (
            (1 << count) - 1
        )

    def read(self, count: int) -> int:
        value = self.peek(count)
        self.left -= count
        return value


def decompress(data: bytes, size: int) -> bytes:
    """Return the ``size`` bytes that a Zstandard frame stands for.

    Raises:
        ValueError: the frame is damaged or needs a dictionary.
        IndexError: the frame ends early.
    """
    if int.from_bytes(data[:4], "little") != _MAGIC:
        raise ValueError(f"zstd: the frame begins with {data[:4].hex()}, not with 28b52ffd")
    descriptor = data[4]
    single, dictionary = descriptor >> 5 & 1, descriptor & 3
    if dictionary:
        raise ValueError("zstd: the frame needs a dictionary")
    size_bytes = (single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (not single) + size_bytes
    state, last = _State(), False
    while not last:
        if at + 3 > len(data):
            raise IndexError("zstd: the last block is missing")
        header = int.from_bytes(data[at : at + 3], "little")
        last, kind, length = bool(header & 1), header >> 1 & 3, header >> 3
        at += 3
        if kind == 0:
            state.out += data[at : at + length]
        elif kind == 1:
            state.out += data[at : at + 1] * length
        elif kind == 2:
            _block(state, data[at : at + length])
        else:
            raise ValueError("zstd: a block has the reserved type 3")
        at += 1 if kind == 1 else length
    if len(state.out) != size:
        raise ValueError(f"zstd: {len(state.out)} bytes instead of {size}")
    return bytes(state.out)


def _block(state: _State, data: bytes) -> None:
    literals, at = _literals(state, data)
    count = data[at]
    at += 1
    if count == 255:
        count, at = data[at] + (data[at + 1] << 8) + 0x7F00, at + 2
    elif count >= 128:
        count, at = (count - 128 << 8) + data[at], at + 1
    if not count:
        state.out += literals
        return
    modes = data[at]
    at += 1
    for name, shift, log, default in (
        ("length", 6, 6, _LENGTH_DEFAULT),
        ("offset", 4, 5, _OFFSET_DEFAULT),
        ("match", 2, 6, _MATCH_DEFAULT),
    ):
        mode = modes >> shift & 3
        if mode == 0:
            state.tables[name] = _table(log, default)
        elif mode == 1:
            state.tables[name] = _Table(0, [data[at]], [0], [0])
            at += 1
        elif mode == 2:
            log, counts, at = _distribution(data, at)
            state.tables[name] = _table(log, counts)
        elif name not in state.tables:
            raise ValueError(f"zstd: the first block repeats a {name} table")
    _sequences(state, literals, count, _Backward(data[at:]))


def _sequences(state: _State, literals: bytes, count: int, bits: _Backward) -> None:
    """Execute the sequences: copy some literals, then some bytes of what was made (3.1.1.4)."""
    lengths, offsets, matches = (state.tables[k] for k in ("length", "offset", "match"))
    read, out, used = bits.read, state.out, 0
    length_at, offset_at, match_at = read(lengths.log), read(offsets.log), read(matches.log)
    for left in range(count - 1, -1, -1):
        code = offsets.symbols[offset_at]
        value = (1 << code) + read(code)
        code = matches.symbols[match_at]
        copy = _MATCH_BASE[code] + read(_MATCH_BITS[code])
        code = lengths.symbols[length_at]
        length = _LENGTH_BASE[code] + read(_LENGTH_BITS[code])
        if left:
            length_at = lengths.bases[length_at] + read(lengths.bits[length_at])
            match_at = matches.bases[match_at] + read(matches.bits[match_at])
            offset_at = offsets.bases[offset_at] + read(offsets.bits[offset_at])
        out += literals[used : used + length]
        used += length
        distance = _distance(state.repeats, value, length)
        if not 0 < distance <= len(out):
            raise ValueError(f"zstd: a match reaches {distance} bytes back of {len(out)}")
        start = len(out) - distance
        while copy > 0:  # a match may overlap what it makes
            piece = out[start : start + copy]
            out += piece
            copy -= len(piece)
    out += literals[used:]


def _distance(repeats: list[int], value: int, length: int) -> int:
    """Return the distance of a match, and keep it among the last three (3.1.1.5)."""
    if value > 3:
        repeats[:] = value - 3, repeats[0], repeats[1]
        return repeats[0]
    which = value - 1 + (length == 0)
    if which == 0:
        return repeats[0]
    distance = repeats[which] if which < 3 else repeats[0] - 1
    if which == 1:
        repeats[:2] = distance, repeats[0]
    else:
        repeats[:] = distance, repeats[0], repeats[1]
    return distance


def _literals(state: _State, data: bytes) -> tuple[bytes, int]:
    """Return the literals of a block and where they end (3.1.1.3.1)."""
    kind, form = data[0] & 3, data[0] >> 2 & 3
    if kind < 2:
        header = (1, 2, 1, 3)[form]
        size = int.from_bytes(data[:header], "little") >> (3 if header == 1 else 4)
        if kind == 1:
            return data[header : header + 1] * size, header + 1
        return data[header : header + size], header + size
    header, width = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
    fields = int.from_bytes(data[:header], "little") >> 4
    size, compressed = fields & (1 << width) - 1, fields >> width
    end = header + compressed
    body = data[header:end]
    if kind == 2:
        weights, used = _weights(body)
        state.huffman = _huffman(weights)
        body = body[used:]
    if state.huffman is None:
        raise ValueError("zstd: the first block repeats a Huffman table")
    if form == 0:
        return _decode(state.huffman, body, size), end
    jumps = [int.from_bytes(body[i : i + 2], "little") for i in (0, 2, 4)]
    ends = [6, 6 + jumps[0], 6 + jumps[0] + jumps[1], 6 + sum(jumps), len(body)]
    quarter = (size + 3) // 4
    sizes = [quarter, quarter, quarter, size - 3 * quarter]
    parts = [_decode(state.huffman, body[ends[i] : ends[i + 1]], sizes[i]) for i in range(4)]
    return b"".join(parts), end


def _decode(huffman: tuple[int, list[int], list[int]], data: bytes, size: int) -> bytes:
    log, symbols, lengths = huffman
    bits, out = _Backward(data), bytearray(size)
    for i in range(size):
        code = bits.peek(log)
        out[i] = symbols[code]
        bits.left -= lengths[code]
    if bits.left:
        raise ValueError("zstd: a literal stream does not end where it should")
    return bytes(out)


def _weights(data: bytes) -> tuple[list[int], int]:
    """Return the weights of a Huffman tree and the bytes that they took (4.2.1)."""
    head = data[0]
    if head >= 128:
        count = head - 127
        used = 1 + (count + 1) // 2
        nibbles = [n for byte in data[1:used] for n in (byte >> 4, byte & 15)]
        return nibbles[:count], used
    log, counts, at = _distribution(data[: head + 1], 1)
    table, bits = _table(log, counts), _Backward(data[at : head + 1])
    states, weights = [bits.read(log), bits.read(log)], []
    turn = 0
    while True:
        current = states[turn]
        weights.append(table.symbols[current])
        if bits.left < table.bits[current]:
            weights.append(table.symbols[states[1 - turn]])
            return weights, head + 1
        states[turn] = table.bases[current] + bits.read(table.bits[current])
        turn = 1 - turn


def _huffman(weights: list[int]) -> tuple[int, list[int], list[int]]:
    """Return (longest code, symbol by code, length by code); the last weight is implied (4.2.1)."""
    total = sum(1 << w >> 1 for w in weights)
    log = total.bit_length()
    rest = (1 << log) - total
    if rest & rest - 1:
        raise ValueError("zstd: the weights of a Huffman tree leave no power of two")
    weights = [*weights, rest.bit_length()]
    symbols: list[int] = []
    lengths: list[int] = []
    for weight in range(1, log + 1):
        for symbol, own in enumerate(weights):
            if own == weight:
                symbols += [symbol] * (1 << weight - 1)
                lengths += [log + 1 - weight] * (1 << weight - 1)
    return log, symbols, lengths


def _distribution(data: bytes, at: int) -> tuple[int, list[int], int]:
    """Return accuracy and distribution as written at ``at``, and where they end (4.1.1)."""
    value, bit = int.from_bytes(data[at:], "little"), 4
    log = (value & 15) + 5
    left, counts = 1 << log, []
    while left > 0:
        if bit > 8 * (len(data) - at):
            raise IndexError("zstd: a distribution ends early")
        width = (left + 1).bit_length()
        number = value >> bit & (1 << width) - 1
        short = (1 << width) - 1 - (left + 1)  # so many values take one bit less
        low = number & (1 << width - 1) - 1
        if low < short:
            number, bit = low, bit + width - 1
        else:
            number, bit = number - short if number >= 1 << width - 1 else number, bit + width
        counts.append(number - 1)
        left -= abs(number - 1)
        while number == 1:  # a zero: two bits say how many more follow
            more = value >> bit & 3
            bit += 2
            counts += [0] * more
            if more < 3:
                break
    if left:
        raise ValueError("zstd: a distribution does not add up")
    return log, counts, at + (bit + 7) // 8


def _table(log: int, counts: list[int]) -> _Table:
    """Spread the symbols over the states (4.1.1)."""
    size = 1 << log
    symbols, high = [0] * size, size - 1
    for symbol, count in enumerate(counts):
        if count == -1:
            symbols[high] = symbol
            high -= 1
    at, step = 0, (size >> 1) + (size >> 3) + 3
    for symbol, count in enumerate(counts):
        for _ in range(count):
            symbols[at] = symbol
            at = at + step & size - 1
            while at > high:
                at = at + step & size - 1
    following = [1 if count == -1 else count for count in counts]
    bits, bases = [0] * size, [0] * size
    for i, symbol in enumerate(symbols):
        number = following[symbol]
        following[symbol] += 1
        bits[i] = log - number.bit_length() + 1
        bases[i] = (number << bits[i]) - size
    return _Table(log, symbols, bits, bases)
