"""Opcodes of asynchronous copies and of tensor maps, taken apart (PTX ISA 9.7.9.25 to 9.7.9.27).

`parse` turns "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes" into
fields and the roles of its operands. ptxas accepts the modifiers after the name in any order, so
does this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from blockscale.emulator.errors import PtxError


@dataclass(frozen=True)
class AsyncOp:
    """One opcode. `kind` is the name without modifiers; fields that do not apply keep defaults."""

    opcode: str
    kind: str
    dim: int = 0  # tensor copies: 1 to 5
    dst: str = ""  # shared::cta, shared::cluster or global
    src: str = ""
    load_mode: str = "tile"  # tile, tile::gather4, tile::scatter4, im2col, im2col::w, ...
    completion: str = ""  # mbarrier or bulk_group
    multicast: bool = False
    cta_group: int = 1
    cache_hint: bool = False
    cache: str = ""  # cp.async: ca or cg
    prefetch_bytes: int = 0  # cp.async: 64, 128 or 256, a hint
    cp_mask: bool = False
    ignore_oob: bool = False
    reduction: str = ""  # add, min, max, inc, dec, and, or, xor
    element: str = ""  # bulk reductions: u32, f16, ...; tensormap.replace: b32 or b64
    noftz: bool = False
    noinc: bool = False  # cp.async.mbarrier.arrive
    read: bool = False  # wait_group.read
    field: str = ""  # tensormap.replace
    space: str = ""  # tensormap.replace, prefetch.tensormap, mbarrier: "" is generic
    scope: str = ""  # tensormap.cp_fenceproxy: cta, cluster, gpu, sys
    operands: tuple[str, ...] = ()  # roles in order; a trailing "?" marks one that may be missing

    @property
    def is_load(self) -> bool:
        """Data goes from global to shared memory."""
        return self.src == "global" and self.dst.startswith("shared")

    @property
    def coordinates(self) -> int:
        """Length of the tensor coordinates' vector."""
        return 5 if self.load_mode.endswith("4") else self.dim

    @property
    def im2col_info(self) -> int:
        """Length of the im2col vector, 0 without one."""
        if self.load_mode == "im2col":
            return self.dim - 2
        return 2 if self.load_mode.startswith("im2col::w") else 0


Setting = dict[str, object]
Table = dict[str, Setting]

_SHARED_CTA: Setting = {"space": "shared::cta"}
_HINT: Table = {"L2::cache_hint": {"cache_hint": True}}
_DIM: Table = {f"{dim}d": {"dim": dim} for dim in range(1, 6)}
_COMPLETION: Table = {
    "mbarrier::complete_tx::bytes": {"completion": "mbarrier"},
    "bulk_group": {"completion": "bulk_group"},
}
_MULTICAST: Table = {"multicast::cluster": {"multicast": True}}
_LOADS = ("tile", "tile::gather4", "im2col", "im2col::w", "im2col::w::128")
_STORES = ("tile", "tile::scatter4", "im2col_no_offs")
_REDUCTIONS: Table = {
    name: {"reduction": name} for name in ("add", "min", "max", "inc", "dec", "and", "or", "xor")
}
_ELEMENTS: Table = {
    name: {"element": name}
    for name in ("b32", "u32", "s32", "b64", "u64", "s64", "f16", "bf16", "f32", "f64")
}
_INTEGERS = ("u32", "s32", "u64")
# (destination, reduction): element types of cp.reduce.async.bulk.
_REDUCIBLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("shared::cluster", "add"): _INTEGERS,
    ("shared::cluster", "min"): ("u32", "s32"),
    ("shared::cluster", "inc"): ("u32",),
    ("shared::cluster", "and"): ("b32",),
    ("global", "add"): (*_INTEGERS, "f32", "f64", "f16", "bf16"),
    ("global", "min"): (*_INTEGERS, "s64", "f16", "bf16"),
    ("global", "inc"): ("u32",),
    ("global", "and"): ("b32", "b64"),
}
_SAME_AS = {"max": "min", "dec": "inc", "or": "and", "xor": "and"}
_SPACES: Table = {"global": {}, "shared::cta": {}, "shared::cluster": {}}
_WIDE_FIELDS = ("global_address", "global_stride")
_ORDINAL_FIELDS = ("box_dim", "global_dim", "global_stride", "element_stride")
_FIELDS = (
    *("global_address", "rank", *_ORDINAL_FIELDS),
    *("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"),
)


def _modes(names: tuple[str, ...]) -> Table:
    return {name: {"load_mode": name} for name in names}


def _bad(opcode: str, problem: str, remedy: str) -> PtxError:
    return PtxError(f"{opcode}: {problem}; {remedy}")


def _read(op: AsyncOp, modifiers: list[str], table: Table) -> AsyncOp:
    """`op` with every modifier's settings, each field set at most once."""
    seen: set[str] = set()
    for name in modifiers:
        if name not in table:
            known = ", ".join("." + other for other in table)
            raise _bad(op.opcode, f"unknown modifier .{name} for {op.kind}", f"it takes {known}")
        settings = table[name]
        if name in seen or seen & settings.keys():
            raise _bad(op.opcode, f"modifier .{name} conflicts with an earlier one", "keep one")
        seen |= {name, *settings}
        op = replace(op, **settings)  # type: ignore[arg-type]
    return op


def _direction(op: AsyncOp, modifiers: list[str], allowed: tuple[tuple[str, str], ...]) -> AsyncOp:
    """`op` with .dst.src, which stand in this order among the other modifiers."""
    spaces = tuple(name for name in modifiers if name in _SPACES)
    if spaces not in allowed:
        ways = " or ".join("." + ".".join(way) for way in allowed)
        got = "." + ".".join(spaces) if spaces else "no state spaces"
        raise _bad(op.opcode, f"{got} as destination and source of {op.kind}", f"use {ways}")
    return replace(op, dst=spaces[0], src=spaces[1])


def _completes(op: AsyncOp, wanted: str) -> None:
    if op.completion != wanted:
        name = "mbarrier::complete_tx::bytes" if wanted == "mbarrier" else "bulk_group"
        got = op.completion or "none"
        raise _bad(op.opcode, f"completion mechanism {got} for .{op.dst}.{op.src}", f"use .{name}")


def _policy(op: AsyncOp) -> tuple[str, ...]:
    return ("cache_policy",) if op.cache_hint else ()


def _bulk(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.async.bulk (9.7.9.25.4.1)."""
    flags: Table = {"cp_mask": {"cp_mask": True}, "ignore_oob": {"ignore_oob": True}}
    op = _read(op, modifiers, _SPACES | _COMPLETION | _MULTICAST | _HINT | flags)
    ways = (
        ("shared::cta", "global"),
        ("shared::cluster", "global"),
        ("shared::cluster", "shared::cta"),
        ("global", "shared::cta"),
    )
    op = _direction(op, modifiers, ways)
    _completes(op, "bulk_group" if op.dst == "global" else "mbarrier")
    only = {
        ".cp_mask": (op.cp_mask, ways[3:]),
        ".ignore_oob": (op.ignore_oob, ways[:1]),
        ".multicast::cluster": (op.multicast, ways[1:2]),
        ".L2::cache_hint": (op.cache_hint, (*ways[:2], ways[3])),
    }
    for name, (given, where) in only.items():
        if given and (op.dst, op.src) not in where:
            raise _bad(op.opcode, f"{name} with .{op.dst}.{op.src}", "leave it away")
    roles: tuple[str, ...] = ("dst", "src", "size")
    if op.dst == "global":
        return replace(op, operands=(*roles, *_policy(op), *("byte_mask",) * op.cp_mask))
    roles += ("ignore_left", "ignore_right") * op.ignore_oob
    return replace(op, operands=(*roles, "mbar", *("cta_mask",) * op.multicast, *_policy(op)))


def _bulk_reduce(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.reduce.async.bulk (9.7.9.25.4.2)."""
    table: Table = {"noftz": {"noftz": True}}
    table |= _SPACES | _COMPLETION | _HINT | _REDUCTIONS | _ELEMENTS
    op = _read(op, modifiers, table)
    op = _direction(op, modifiers, (("shared::cluster", "shared::cta"), ("global", "shared::cta")))
    _completes(op, "bulk_group" if op.dst == "global" else "mbarrier")
    types = _REDUCIBLE.get((op.dst, _SAME_AS.get(op.reduction, op.reduction)), ())
    if op.element not in types:
        got = f"reduction .{op.reduction or '?'} of .{op.element or '?'} into .{op.dst}"
        raise _bad(op.opcode, got, "use " + (", ".join(types) or "a reduction such as .add"))
    if op.noftz != (op.reduction == "add" and op.element in ("f16", "bf16")):
        raise _bad(
            op.opcode,
            f".{op.reduction}.{op.element} with{'' if op.noftz else 'out'} .noftz",
            ".add of .f16 and .bf16 needs .noftz, nothing else takes it",
        )
    if op.cache_hint and op.dst != "global":
        raise _bad(op.opcode, ".L2::cache_hint without global memory", "leave it away")
    last = _policy(op) if op.dst == "global" else ("mbar",)
    return replace(op, operands=("dst", "src", "size", *last))


def _bulk_prefetch(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.async.bulk.prefetch.L2.global (9.7.9.25.4.3)."""
    table: Table = {"L2": {}, "global": {"src": "global"}}
    op = _read(op, modifiers, table | _HINT)
    _needs(op, modifiers, "L2", "global")
    return replace(op, operands=("src", "size", *_policy(op)))


def _needs(op: AsyncOp, modifiers: list[str], *names: str) -> None:
    for name in names:
        if name not in modifiers:
            raise _bad(op.opcode, f"modifier .{name} is missing", f"write {op.kind} with .{name}")


def _tensor_shape(op: AsyncOp) -> None:
    """.dim fits .load_mode."""
    if not op.dim:
        raise _bad(op.opcode, "no .1d to .5d", "name the map's rank")
    if op.load_mode.startswith("im2col") and op.dim < 3:
        raise _bad(op.opcode, f".{op.load_mode} of .{op.dim}d", "im2col needs .3d, .4d or .5d")
    if op.load_mode.endswith("4") and op.dim != 2:
        raise _bad(op.opcode, f".{op.load_mode} of .{op.dim}d", "it needs .2d")


def _tensor(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.async.bulk.tensor (9.7.9.25.5.2)."""
    groups: Table = {f"cta_group::{size}": {"cta_group": size} for size in (1, 2)}
    table: Table = _SPACES | _COMPLETION | _MULTICAST | _HINT | _DIM | groups
    op = _read(op, modifiers, table | _modes(_LOADS) | _modes(_STORES))
    ways = (("shared::cta", "global"), ("shared::cluster", "global"), ("global", "shared::cta"))
    op = _direction(op, modifiers, ways)
    _completes(op, "mbarrier" if op.is_load else "bulk_group")
    _tensor_shape(op)
    if op.load_mode not in (_LOADS if op.is_load else _STORES):
        raise _bad(
            op.opcode, f".{op.load_mode} with .{op.dst}.{op.src}", "use the other direction's mode"
        )
    if op.multicast and op.dst != "shared::cluster":
        raise _bad(op.opcode, f".multicast::cluster into .{op.dst}", "use .shared::cluster")
    if not op.is_load:
        if groups.keys() & set(modifiers):
            raise _bad(op.opcode, ".cta_group on a store", "leave it away")
        return replace(op, operands=("tensor", "src", *_policy(op)))
    info = ("im2col",) if op.im2col_info else ()
    mask = ("cta_mask",) if op.multicast else ()
    return replace(op, operands=("dst", "tensor", "mbar", *info, *mask, *_policy(op)))


def _tensor_reduce(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.reduce.async.bulk.tensor (9.7.9.25.5.3)."""
    table: Table = _SPACES | _COMPLETION | _HINT | _DIM | _REDUCTIONS
    op = _read(op, modifiers, table | _modes(_STORES))  # ptxas takes tile::scatter4, too
    op = _direction(op, modifiers, (("global", "shared::cta"),))
    _completes(op, "bulk_group")
    _tensor_shape(op)
    if not op.reduction:
        raise _bad(op.opcode, "no reduction", "write .add, .min, .max, .inc, .dec, .and, .or, .xor")
    return replace(op, operands=("tensor", "src", *_policy(op)))


def _tensor_prefetch(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.async.bulk.prefetch.tensor (9.7.9.25.5.4)."""
    table: Table = {"L2": {}, "global": {"src": "global"}}
    op = _read(op, modifiers, table | _HINT | _DIM | _modes(_LOADS))
    _needs(op, modifiers, "L2", "global")
    _tensor_shape(op)
    info = ("im2col",) if op.im2col_info else ()
    return replace(op, operands=("tensor", *info, *_policy(op)))


def _cp_async(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.async (9.7.9.25.3.1): .ca or .cg, 4, 8 or 16 bytes."""
    table: Table = {name: {"cache": name} for name in ("ca", "cg")}
    table |= {name: {"dst": "shared::cta"} for name in ("shared", "shared::cta")}
    table |= {f"L2::{size}B": {"prefetch_bytes": size} for size in (64, 128, 256)}
    op = _read(op, modifiers, table | _HINT | {"global": {"src": "global"}})
    if not (op.cache and op.dst and op.src):
        raise _bad(op.opcode, "needs .ca or .cg, .shared and .global", "cp.async.cg.shared.global")
    return replace(op, operands=("dst", "src", "size", "src_size?", *_policy(op)))


def _mbarrier_arrive(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """cp.async.mbarrier.arrive (9.7.13.16.17)."""
    table: Table = {"noinc": {"noinc": True}, "b64": {"element": "b64"}}
    op = _read(op, modifiers, table | {"shared": _SHARED_CTA, "shared::cta": _SHARED_CTA})
    _needs(op, modifiers, "b64")
    return replace(op, operands=("mbar",))


def _replace(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """tensormap.replace (9.7.9.26)."""
    table: Table = {"tile": {}, "b1024": {}, "b32": {"element": "b32"}, "b64": {"element": "b64"}}
    table |= {name: {"field": name} for name in _FIELDS}
    table |= {"global": {"space": "global"}, "shared::cta": _SHARED_CTA}
    op = _read(op, modifiers, table)
    _needs(op, modifiers, "tile", "b1024")
    wanted = "b64" if op.field in _WIDE_FIELDS else "b32"
    if not op.field or op.element != wanted:
        got = f"field {op.field or 'none'} of type .{op.element or '?'}"
        raise _bad(op.opcode, got, f"name a field and .{wanted}")
    ordinal = ("ordinal",) if op.field in _ORDINAL_FIELDS else ()
    return replace(op, operands=("address", *ordinal, "value"))


def _fence_copy(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
    """tensormap.cp_fenceproxy (9.7.13.17)."""
    fixed = ("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
    scopes: Table = {name: {"scope": name} for name in ("cta", "cluster", "gpu", "sys")}
    table: Table = {name: {} for name in fixed}
    op = _read(op, modifiers, table | scopes)
    _needs(op, modifiers, *fixed)
    if not op.scope:
        raise _bad(op.opcode, "no scope", "write .cta, .cluster, .gpu or .sys")
    return replace(op, dst="global", src="shared::cta", operands=("dst", "src", "size"))


def _fixed(*operands: str, table: Table | None = None) -> Callable[[AsyncOp, list[str]], AsyncOp]:
    """A parser of a name without modifiers but those of `table`."""

    def parser(op: AsyncOp, modifiers: list[str]) -> AsyncOp:
        return replace(_read(op, modifiers, table or {}), operands=operands)

    return parser


# Names, longest first where one begins with another.
_PARSERS: dict[str, Callable[[AsyncOp, list[str]], AsyncOp]] = {
    "cp.async.bulk.commit_group": _fixed(),
    "cp.async.bulk.wait_group": _fixed("count", table={"read": {"read": True}}),
    "cp.async.bulk.prefetch.tensor": _tensor_prefetch,
    "cp.async.bulk.prefetch": _bulk_prefetch,
    "cp.async.bulk.tensor": _tensor,
    "cp.async.bulk": _bulk,
    "cp.async.commit_group": _fixed(),
    "cp.async.wait_group": _fixed("count"),
    "cp.async.wait_all": _fixed(),
    "cp.async.mbarrier.arrive": _mbarrier_arrive,
    "cp.async": _cp_async,
    "cp.reduce.async.bulk.tensor": _tensor_reduce,
    "cp.reduce.async.bulk": _bulk_reduce,
    "tensormap.replace": _replace,
    "tensormap.cp_fenceproxy": _fence_copy,
    "prefetch.tensormap": _fixed("address"),
    "prefetch.param.tensormap": _fixed("address"),
    "prefetch.const.tensormap": _fixed("address"),
}


@lru_cache(maxsize=1024)
def parse(opcode: str) -> AsyncOp | None:
    """The opcode's fields; None if it is no asynchronous copy, `PtxError` if it is a wrong one."""
    if opcode.startswith(("multimem.cp.async", "multimem.cp.reduce")):
        raise PtxError(
            f"{opcode}: multimem addresses name memory of several GPUs, and this model has one; "
            "use cp.async.bulk or cp.reduce.async.bulk without multimem"
        )
    for name, parser in _PARSERS.items():
        if opcode == name or opcode.startswith(name + "."):
            rest = opcode[len(name) + 1 :]
            op = AsyncOp(opcode, name)
            if name.startswith("prefetch."):
                space = name.split(".")[1]
                op = AsyncOp(
                    opcode, "prefetch.tensormap", space=space if space != "tensormap" else ""
                )
            return parser(op, rest.split(".") if rest else [])
    if opcode.startswith(("cp.", "tensormap.")):
        raise PtxError(f"{opcode}: no such instruction; known are {', '.join(_PARSERS)}")
    return None
