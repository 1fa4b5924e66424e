"""Kernels made of any index map of `blockscale.base.index_maps`: into the layout, and back.

    into: laid[place(i)] = plain[i] ^ flip, and zero where the layout pads;  back: the inverse.

`elements` says what, in plain loops over the digits.  `tiles` has the same bytes as threads and
vectors walk them, for sizes that fill the words of a `relayout_plan.Plan`, and `elements` for all
others: a tile's words are loaded from one side, elements are exchanged among them as bits of their
numbers (a register's bit with a bit of the place in a word: two registers exchange halves), and
words are stored to the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr as PrimExpr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import PrimFunc
from tvm.tirx.script.builder import ir as T

from blockscale.base.index_maps import Digit
from blockscale.specs.layout import Relayout
from blockscale.tir.common import fix_shape, i64
from blockscale.tir.layout.plan import (
    WORD_BITS,
    Exchange,
    Plan,
    Side,
    exchanges,
    low_bits,
    plain_order,
)
from blockscale.tir.layout.plan import sizes as digit_bits
from blockscale.tir.layout.walk import Tensors, Values, Walk, mask_of, permuted, word_of


def elements(spec: Relayout, shape: tuple[int, ...] | None = None) -> PrimFunc:
    """Kernel from ``plain`` to ``laid``, or back, one element after the other."""
    return _function(spec, [], False, shape)


def tiles(
    spec: Relayout, plans: Sequence[Plan], lanes_last: bool, shape: tuple[int, ...] | None = None
) -> PrimFunc:
    """Kernel from ``plain`` to ``laid``, or back: the first plan that fits the sizes, or elements.

    Blocks of plan i are ``load_i``, ``take_i``, ``exchange_i_*``, ``give_i``, ``store_i``.

    ``lanes_last``: lanes are the inner loop of every step (vectors), not around all (threads).
    """
    return _function(spec, plans, lanes_last, shape)


def block_names(func: PrimFunc) -> list[str]:
    """Return the names of all blocks, sorted."""
    found: list[str] = []

    def visit(node: Any) -> None:
        if type(node).__name__ == "SBlock":
            found.append(str(node.name_hint))

    tvm_ffi.structural_walk(func.body, visit)
    return sorted(found)


def of_plan(names: Sequence[str], number: int) -> list[str]:
    """Return the blocks of plan ``number``."""
    return [name for name in names if name.split("_")[1:2] == [str(number)]]


def _function(
    spec: Relayout, plans: Sequence[Plan], lanes_last: bool, shape: tuple[int, ...] | None
) -> PrimFunc:
    layout = spec.map
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            names = ("laid", "plain") if spec.inverse else ("plain", "laid")
            handles = {name: T.arg(name, T.handle()) for name in names}
            T.func_attr({"tirx.noalias": True})
            axes = [tirx.Var(name, "int64") for name in spec.symbols]
            known = T.match_buffer(handles["plain"], axes, "uint8")
            full = (*axes[:-1], _elements_of(axes[-1], layout.bits))
            padded = layout.padded(full) if layout.pads else axes
            assert not layout.pads or layout.bits == 8, f"{layout.name}: bytes are padded"
            laid = T.match_buffer(handles["laid"], padded, "uint8")
            IRBuilder.name("plain", known)
            IRBuilder.name("laid", laid)
            tensors = Tensors(layout, known, laid, full, spec.inverse)
            earlier: list[PrimExpr] = []
            for number, plan in enumerate(plans):
                fits = _fits(tensors, plan, number)
                runs = fits if not earlier else tirx.all(fits, *map(tirx.Not, earlier))
                _tiles(tensors, plan, number, runs, lanes_last)
                earlier.append(fits)
            _elements(tensors, earlier)
    func = builder.get()
    return func if shape is None else fix_shape(func, "plain", shape)


def _elements_of(size: PrimExpr, bits: int) -> PrimExpr:
    """Elements in ``size`` bytes."""
    if bits <= 8:
        return size * i64(8 // bits) if bits < 8 else size
    return tirx.floordiv(size, i64(bits // 8))


# ---- One element after the other ----------------------------------------------------------------


def _elements(tensors: Tensors, not_if: Sequence[PrimExpr]) -> None:
    """The loops of `elements`, a byte of two for codes of four bits; none if a plan fits."""
    layout, inverse = tensors.layout, tensors.inverse
    order = plain_order(layout) if inverse else layout.digits
    packed = layout.bits == 4
    low = low_bits(layout, order, 1) if packed else ()
    walk = Walk(tensors, {low[0][:2]: 1} if packed else {})
    bits = max(8, layout.bits)
    given = tensors.words(not inverse, bits)
    made = tensors.words(inverse, bits)
    runs = tirx.all(*map(tirx.Not, not_if)) if not_if else None
    with walk.loops(runs) as outer, T.sblock("element"):
        at = walk.axes(outer)
        digits = [walk.values(at, [(low, i64(k))]) for k in range(2 if packed else 1)]
        parts = []
        for values in digits:
            valid = walk.within(values, whole=())
            off = tensors.offset(not inverse, values)
            if packed:
                byte = given[tirx.floordiv(off, i64(2))]
                byte = byte >> tirx.Cast("uint8", tirx.floormod(off, i64(2)) * i64(4))
                value = byte & tirx.const(15, "uint8")
            else:
                value = given[off]
            value = value ^ tirx.const(layout.flip, value.ty.dtype)
            pads = layout.pads and not inverse and valid is not None
            parts.append(
                tirx.if_then_else(valid, value, tirx.const(0, value.ty.dtype)) if pads else value
            )
        made_at = tensors.offset(inverse, digits[0])
        if packed:
            parts[0] = parts[0] | (parts[1] << tirx.const(4, "uint8"))
            made_at = tirx.floordiv(made_at, i64(2))
        drop = walk.within(digits[0], whole=()) if inverse and layout.pads else None
        with _if(drop):
            T.buffer_store(made, parts[0], [made_at])


@contextmanager
def _if(condition: PrimExpr | None) -> Iterator[None]:
    """A branch, or none for None."""
    if condition is None:
        yield
    else:
        with T.If(condition), T.Then():
            yield


# ---- Tiles --------------------------------------------------------------------------------------


def _fits(tensors: Tensors, plan: Plan, number: int) -> PrimExpr:
    """Whether the sizes fill the words and vectors of ``plan`` on both sides.

    The call of C's abs keeps TVM from dropping the kernels that a static instance does not use: the
    traces of static and symbolic instances would differ.  ``number`` makes tests of several plans
    differ, or TVM would find that one excludes the other.
    """
    tests = []
    plus = tirx.IntImm("int32", number)

    def multiple(size: PrimExpr, of: int) -> None:
        small = tirx.Cast("int32", tirx.floormod(size, i64(of)))
        tests.append(tirx.EQ(tirx.call_pure_extern("int32", "abs", small + plus), plus))

    multiple(tensors.sizes[-1], 2 ** plan.exact[0])
    opened: dict[Digit, int] = {}
    bits = digit_bits(plan.layout)
    for name, i, j in low_bits(plan.layout, plan.layout.digits, plan.exact[1]):
        if bits[name, i] is None:
            opened[name, i] = j + 1
    for digit, count in opened.items():
        multiple(tensors.extents[digit], 2**count)
    return tirx.all(*tests)


def _whole(plan: Plan) -> list[Digit]:
    """Open digits of which the plan's tile never has more than there are; see `_fits`."""
    bits, found = digit_bits(plan.layout), []
    orders = plain_order(plan.layout), plan.layout.digits
    for order, count in zip(orders, plan.exact, strict=True):
        for name, i, j in low_bits(plan.layout, order, count):
            if bits[name, i] is None and j + 1 >= plan.taken.get((name, i), 0):
                found.append((name, i))
        last = plan.layout.axes[-1]
        lower = sum(bits[last[0], i] or 0 for i in range(last[1].index(None) + 1, len(last[1])))
        opened = (last[0], last[1].index(None))
        if order is orders[0] and count >= lower and not plan.taken.get(opened):
            found.append(opened)  # no padding in its lower digits
    return found


def _tiles(tensors: Tensors, plan: Plan, number: int, runs: PrimExpr, lanes_last: bool) -> None:
    """The loops of one plan."""
    walk = Walk(tensors, plan.taken)
    steps = _Steps(tensors, plan, walk, number, lanes_last)
    with walk.loops(runs) as outer:
        if lanes_last:
            steps.emit(outer, None)
        else:
            with T.serial(i64(steps.lanes)) as lane:
                steps.emit(outer, lane)


class _Steps:
    """The steps of a tile: load, take, exchange, give, store."""

    def __init__(
        self, tensors: Tensors, plan: Plan, walk: Walk, number: int, lanes_last: bool
    ) -> None:
        self.tensors, self.plan, self.walk, self.number = tensors, plan, walk, number
        self.lanes_last = lanes_last
        self.lanes, self.regs = 2 ** len(plan.lanes), 2 ** len(plan.plain.regs)
        inverse = tensors.inverse
        self.source, self.target = (plan.laid, plan.plain) if inverse else (plan.plain, plan.laid)
        self.whole = _whole(plan)
        self.given = tensors.words(not inverse, WORD_BITS)
        self.made = tensors.words(inverse, WORD_BITS)

    def buffer(self) -> Any:
        """Registers of a tile, of all tiles."""
        inner = (self.regs, self.lanes) if self.lanes_last else (self.lanes, self.regs)
        return T.sblock_alloc_buffer((*self.walk.extents, *map(i64, inner)), "uint32")

    def emit(self, outer: list[Any], lane: Any) -> None:
        """All steps, inside of the loops around a tile."""
        raw = self.buffer()
        self.load(raw, outer, lane)
        bits, stages = exchanges(self.plan.word, self.source, self.target)
        made = raw
        if self.masks():
            made = self.buffer()
            with self.step(f"take_{self.number}", outer, lane) as (at, vl, vr):
                T.buffer_store(made, self.taken(raw, at, vl, vr), self.spot(at, vl, vr))
        for count, stage in enumerate(stages):
            before, made = made, self.buffer()
            with self.step(f"exchange_{self.number}_{count}", outer, lane) as (at, vl, vr):
                value = self.exchanged(before, stage, at, vl, vr)
                T.buffer_store(made, value, self.spot(at, vl, vr))
        before, made = made, self.buffer()
        with self.step(f"give_{self.number}", outer, lane) as (at, vl, vr):
            source = permuted(vr, self.target.regs, bits)
            value = before[tuple(self.spot(at, vl, source))]
            if self.plan.layout.flip:
                value = value ^ word_of(self.plan.layout.flip, self.plan.layout.bits)
            T.buffer_store(made, value, self.spot(at, vl, vr))
        self.store(made, outer, lane)

    def spot(self, at: Sequence[Any], lane: Any, reg: Any) -> list[Any]:
        """Index of a register."""
        return [*at, reg, lane] if self.lanes_last else [*at, lane, reg]

    @contextmanager
    def step(self, name: str, outer: list[Any], lane: Any) -> Iterator[tuple[list[Any], Any, Any]]:
        """Loops over registers and lanes, and a block: axes of the four loops, lane, register."""
        if self.lanes_last:
            with T.grid(i64(self.regs), i64(self.lanes)) as (r, own), T.sblock(name):
                yield (
                    self.walk.axes(outer),
                    T.axis.spatial(i64(self.lanes), own),
                    T.axis.spatial(i64(self.regs), r),
                )
        else:
            with T.serial(i64(self.regs)) as r, T.sblock(name):
                yield (
                    self.walk.axes(outer),
                    T.axis.spatial(i64(self.lanes), lane),
                    T.axis.spatial(i64(self.regs), r),
                )

    def masks(self) -> bool:
        """Whether words beside the tensor become zero."""
        return self.plan.layout.pads and not self.tensors.inverse

    def digits(self, side: Side, at: Sequence[Any], lane: Any, vector: Any) -> Values:
        """Digits of the first element of a vector of words."""
        high = side.regs[self.plan.vector(side) :]
        return self.walk.values(at, [(self.plan.lanes, lane), (high, vector)])

    def taken(self, raw: Any, at: Sequence[Any], lane: Any, reg: Any) -> PrimExpr:
        """The word of a register, zero where it is padding."""
        vector = tirx.floordiv(reg, i64(2 ** self.plan.vector(self.source)))
        valid = self.walk.within(self.digits(self.source, at, lane, vector), self.whole)
        value = raw[tuple(self.spot(at, lane, reg))]
        if valid is None:
            return value
        return tirx.Select(valid, value, tirx.const(0, "uint32"))

    def exchanged(
        self, before: Any, stage: Exchange, at: Sequence[Any], lane: Any, reg: Any
    ) -> PrimExpr:
        """The word of a register after a stage."""
        element = self.plan.layout.bits
        shift = tirx.const(element << stage.place, "uint32")
        own = before[tuple(self.spot(at, lane, reg))]
        if stage.other is not None:  # two places of the same word
            wide = tirx.const((element << stage.other) - (element << stage.place), "uint32")
            kept = mask_of(element, on=stage.place, off=stage.other)
            change = ((own >> wide) ^ own) & kept
            return own ^ change ^ (change << wide)
        assert stage.reg is not None
        low = mask_of(element, off=stage.place)
        step = 2**stage.reg
        bit = tirx.floormod(tirx.floordiv(reg, i64(step)), i64(2))
        partner = before[tuple(self.spot(at, lane, reg + i64(step) - bit * i64(2 * step)))]
        high = tirx.const(0xFFFFFFFF ^ int(low.value), "uint32")
        return tirx.Select(
            tirx.EQ(bit, i64(0)),
            (own & low) | ((partner << shift) & high),
            ((partner >> shift) & low) | (own & high),
        )

    def load(self, raw: Any, outer: list[Any], lane: Any) -> None:
        """Vectors of words from the source; beside the tensor any word that exists."""
        with self.vectors(f"load_{self.number}", self.source, outer, lane) as step:
            at, vl, vector, i = step
            values = self.digits(self.source, at, vl, vector)
            inverse = self.tensors.inverse
            check = self.walk.laid_within if inverse else self.walk.within
            valid = check(values, self.whole)
            words = self.tensors.offset(not inverse, values, self.plan.word)
            last = self.given.shape[0] - i64(2 ** self.plan.vector(self.source))
            base = words if valid is None else tirx.Min(words, last)
            reg = vector * i64(2 ** self.plan.vector(self.source)) + i
            T.reads(self.given[base + i])
            T.writes(raw[tuple(self.spot(at, vl, reg))])
            T.buffer_store(raw, self.given[base + i], self.spot(at, vl, reg))

    def store(self, made: Any, outer: list[Any], lane: Any) -> None:
        """Vectors of words to the target, where it has them."""
        inverse = self.tensors.inverse
        check = self.walk.within if inverse else self.walk.laid_within
        count = i64(2 ** self.plan.vector(self.target))
        with self.vectors(f"store_{self.number}", self.target, outer, lane, check) as step:
            at, vl, vector, i = step
            values = self.digits(self.target, at, vl, vector)
            words = self.tensors.offset(inverse, values, self.plan.word)
            reg = vector * count + i
            T.buffer_store(self.made, made[tuple(self.spot(at, vl, reg))], [words + i])

    @contextmanager
    def vectors(
        self, name: str, side: Side, outer: list[Any], lane: Any, check: Any = None
    ) -> Iterator[tuple[list[Any], Any, Any, Any]]:
        """Loops over the vectors of a side and their words, and a block in which ``check`` holds.

        Threads: vectors, words.  Lanes last: vectors, then lanes, then words.
        """
        width = 2 ** self.plan.vector(side)
        count = self.regs // width
        loops = [i64(count)] if not self.lanes_last else [i64(count), i64(self.lanes)]
        with T.grid(*loops) as found:
            h, own = (found, lane) if not self.lanes_last else found
            if check is None:
                with T.serial(i64(width)) as w, T.sblock(name):
                    yield (
                        self.walk.axes(outer),
                        T.axis.spatial(i64(self.lanes), own),
                        T.axis.spatial(i64(count), h),
                        T.axis.spatial(i64(width), w),
                    )
                return
            with T.sblock(f"{name}_vector"):
                at = self.walk.axes(outer)
                vl = T.axis.spatial(i64(self.lanes), own)
                vh = T.axis.spatial(i64(count), h)
                valid = check(self.digits(side, at, vl, vh), self.whole)
                with _if(valid), T.serial(i64(width)) as w, T.sblock(name):
                    yield at, vl, vh, T.axis.spatial(i64(width), w)
