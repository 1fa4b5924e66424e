"""What every spec is: a frozen dataclass that names a kernel and lists its parameters.

`blockscale.specs` has the specs themselves, one per op, and fills the registry of this module.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import SequenceMatcher
from functools import cached_property
from itertools import takewhile
from string import ascii_letters
from typing import Any, ClassVar, Literal

from blockscale.base import formats, shapes, words
from blockscale.base.formats import Format
from blockscale.base.sizes import round_up

DTYPE_SUFFIX: dict[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Activation dtypes that kernels read and write, and how a function's name spells them."""

Layout = Literal["linear", "128x4"]
Rounding = Literal["ceil", "floor"]


@dataclass(frozen=True)
class Param:
    """One parameter of an exported function, as spec and manifest describe it.

    ``shape`` holds integers, symbols (``"rows"``), or expressions of symbols (``"cols // 16"``,
    ``"ceil_to(rows, 128)"``); None: a number passed by value.  ``default`` is the constant that
    stands for ``None`` (None: required).  ``storage`` says what the bytes of a uint8 parameter
    encode.  ``alias`` names the input that this output may be the very same tensor as; a caller
    who leaves the output out passes that input, which is then updated in place.  ``align``: the
    bytes of which the data address must be a multiple; None: those of an element.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None
    output: bool = False
    default: float | None = None
    storage: str | None = None
    alias: str | None = None
    align: int | None = None

    @staticmethod
    def from_manifest(entry: Mapping[str, Any]) -> Param:
        """Return the parameter that a manifest describes."""
        shape = entry["shape"]
        return Param(**{**entry, "shape": None if shape is None else tuple(shape)})

    def to_manifest(self) -> dict[str, Any]:
        """Return how a manifest describes the parameter."""
        said = asdict(self)
        return said if self.align is not None else {k: v for k, v in said.items() if k != "align"}

    @property
    def scalar(self) -> bool:
        """Whether it is a number passed by value."""
        return self.shape is None

    @property
    def least(self) -> float | None:
        """The least number that makes sense; by name, as manifests do not say it."""
        return 0.0 if self.scalar and self.name in ("eps", "limit") else None

    @property
    def flattens(self) -> bool:
        """Whether leading dimensions beyond the declared ones are taken as one (on CUDA)."""
        return bool(self.dims) and self.dims[0].symbol is not None

    @property
    def alignment(self) -> int:
        """Bytes of which the data address must be a multiple."""
        return self.align or self.itemsize

    @cached_property
    def dims(self) -> tuple[shapes.Dim, ...]:
        """The shape, parsed; empty for a scalar."""
        return tuple(shapes.parse(dim) for dim in self.shape or ())

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.dtype.lstrip(ascii_letters)) // 8

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that an argument may have: the declared one, and those with the same bytes."""
        words = (self.storage or "").split() if self.dtype == "uint8" else []
        found = (dtype for word in words for dtype in formats.STORAGE_DTYPES.get(word, ()))
        return tuple(dict.fromkeys((self.dtype, *found)))

    @property
    def type(self) -> str:
        """For example ``float32[rows, 384]``, or ``float32`` for a scalar."""
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        default = "" if self.default is None else f" = {self.default:g}"
        return f"{self.name}: {self.type}{default}"


TILE_ROWS, TILE_COLS = {"128x4": 128, "8x4": 8}, 4
"""Tiles of block scales: rows by layout, and columns."""

GLOBAL_SCALE = Param("global_scale", "float32", (1,), default=1.0)
"""The one scale of a whole tensor."""


def scales(
    name: str,
    storage: str,
    lead: tuple[int | str, ...],
    blocks: int | str,
    layout: str = "linear",
    *,
    output: bool = False,
) -> Param:
    """Return the parameter of scales [*lead, blocks]; tiled layouts pad the last two sizes."""
    shape = (*lead, blocks)
    if layout != "linear":
        shape = (*lead[:-1], _padded(lead[-1], TILE_ROWS[layout]), _padded(blocks, TILE_COLS))
        storage = f"{storage} {layout}"
    return Param(name, "uint8", shape, output=output, storage=storage)


def _padded(size: int | str, step: int) -> int | str:
    return round_up(size, step) if isinstance(size, int) else f"ceil_to({size}, {step})"


def check_choice(where: str, name: str, value: object, allowed: Iterable[object]) -> None:
    """ValueError unless ``value`` is one of ``allowed``."""
    choices = list(allowed)
    if value not in choices:
        remedy = words.choose(value, choices)
        raise ValueError(f"{where}: {name}={value!r} is not known; {remedy}")


def check_positive(where: str, name: str, value: object) -> None:
    """ValueError unless ``value`` is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{where}: {name}={value!r} is not a positive integer; pass an int of 1 or more"
        )


def check_multiple(where: str, name: str, value: int, step: int, what: str, advice: str) -> None:
    """ValueError unless ``value`` is a multiple of ``step``; ``{}`` of ``advice`` is the next."""
    if value % step:
        advice = advice.format(round_up(value, step))
        raise ValueError(f"{where}: {name}={value} is not a multiple of {step}, {what}; {advice}")


def flag(text: str) -> dict[bool, str]:
    """Return how a name spells a field that is True where the name has ``text``."""
    return {False: "", True: text}


Texts = Mapping[str, Mapping[Any, str] | Sequence[str]]
"""By field: how a name spells its values; a sequence: values that spell themselves."""


class _Field:
    """A part of a name: the text of a field's value, or of a pair of fields."""

    def __init__(self, key: str, texts: Mapping[Any, str] | None) -> None:
        self.names = key.split(",")
        self.number = texts is None
        pair = len(self.names) > 1
        self.texts = {value if pair else (value,): text for value, text in (texts or {}).items()}
        self.pattern = r"(\d+)" if self.number else f"({'|'.join(self.texts.values())})"

    def spell(self, fields: Mapping[str, Any]) -> str:
        """Return its text in the name of a spec with these fields."""
        values = tuple(fields[name] for name in self.names)
        return str(values[0]) if self.number else self.texts[values]

    def read(self, text: str) -> dict[str, Any]:
        """Return the fields of which it is the text."""
        if self.number:
            return {self.names[0]: int(text)}
        values = next(values for values, known in self.texts.items() if known == text)
        return dict(zip(self.names, values, strict=True))


class _Piece:
    """A stretch of a name that is there as a whole, or, if ``optional``, not at all."""

    def __init__(
        self, template: str, texts: Mapping[str, Mapping[Any, str]], *, optional: bool
    ) -> None:
        parts = re.split(r"[{}]", template)
        self.fields = [_Field(key, texts.get(key)) for key in parts[1::2]]
        self.optional = optional
        self._format = "{}".join(parts[::2])
        pattern = self._format.format(*(field.pattern for field in self.fields))
        self.pattern = f"(?:{pattern})?" if optional else pattern

    def spell(self, fields: Mapping[str, Any], absent: Mapping[str, Any]) -> str:
        """Return its text, which is none where its fields are those of names without it."""
        own = {name: fields[name] for field in self.fields for name in field.names}
        if self.optional and own.items() <= absent.items():
            return ""
        return self._format.format(*(field.spell(own) for field in self.fields))


class Name:
    """How names spell the fields of a spec: it spells and parses names, and checks fields.

    ``template`` is a name in which ``{field}`` stands for a field: for the text that ``texts`` has
    for its value, or else for a number; ``{one,two}`` stands for a pair of fields with one text.
    A piece in brackets is left out where its fields have the values that ``absent`` returns for
    them, made of the other fields; where it returns none, the piece is always there.
    """

    def __init__(
        self,
        template: str,
        *examples: str,
        texts: Texts | None = None,
        absent: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda fields: {},
    ) -> None:
        self.examples = examples
        self._absent = absent
        self._texts = {
            key: table if isinstance(table, Mapping) else dict(zip(table, table, strict=True))
            for key, table in (texts or {}).items()
        }
        pieces = re.split(r"[][]", template)  # every second one was in brackets
        self._pieces = [
            _Piece(text, self._texts, optional=i % 2 == 1) for i, text in enumerate(pieces)
        ]
        self._regex = re.compile("".join(piece.pattern for piece in self._pieces))
        self.template = template

    def texts(self, key: str) -> Mapping[Any, str]:
        """How names spell the values of a field, or of a pair of fields."""
        return self._texts[key]

    @property
    def choices(self) -> dict[str, list[str]]:
        """How names spell the fields that are no numbers, by what the template calls them."""
        fields = (part for piece in self._pieces for part in piece.fields if not part.number)
        return {",".join(part.names): [*part.texts.values()] for part in fields}

    @cached_property
    def _words(self) -> tuple[list[str], re.Pattern[str]]:
        """What such names are made of, between underscores; and what such parts look like."""
        texts = [text for table in self._texts.values() for text in table.values()]
        parts = [part for text in texts for part in text.split("_")]
        parts += re.split(r"[][_]|{[^}]*}", self.template)
        known = [*dict.fromkeys(filter(None, parts))]
        return known, re.compile(rf"(?:{'|'.join(map(re.escape, known))}|\d+)+")

    def respelt(self, word: str) -> str:
        """Return the part of such names that ``word`` is, or was probably meant to be."""
        known, form = self._words
        right = word in known or (form.fullmatch(word) and any(map(str.isdigit, word)))
        return word if right else words.near(word, known) or word

    def spell(self, fields: Mapping[str, Any]) -> str:
        """Return the name of the spec with these fields."""
        absent = self._absent(fields)
        return "".join(piece.spell(fields, absent) for piece in self._pieces)

    def parse(self, name: str) -> dict[str, Any] | None:
        """Return the fields of the only spec that may be called ``name``; None: there is none."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        parts = [part for piece in self._pieces for part in piece.fields]
        said: dict[str, Any] = {}
        for part, text in zip(parts, found.groups(), strict=True):
            said |= {} if text is None else part.read(text)
        said = self._absent(said) | said
        return said if all(name in said for part in parts for name in part.names) else None

    def check(self, where: str, fields: Mapping[str, Any]) -> None:
        """ValueError unless tables have the values, and numbers outside of brackets are sizes."""
        for key, table in self._texts.items():
            if key in fields:
                check_choice(where, key, fields[key], table)
        for part in (part for piece in self._pieces if not piece.optional for part in piece.fields):
            if part.number:
                check_positive(where, part.names[0], fields[part.names[0]])


class Spec(ABC):
    """Base of all specs; subclasses are frozen dataclasses of plain values."""

    op: ClassVar[str]
    pattern: ClassVar[Name]

    def __post_init__(self) -> None:
        self.pattern.check(type(self).__name__, vars(self))

    @property
    def name(self) -> str:
        """Exported symbol, for example ``linear_nvfp4_n384_k384_bf16``."""
        return self.pattern.spell(vars(self))

    @property
    def base_name(self) -> str:
        """The name without its activation dtype: the overload set that it belongs to."""
        return re.sub(r"_(f32|bf16|f16)$", "", self.name)

    @abstractmethod
    def params(self) -> tuple[Param, ...]:
        """Parameters in the order of the exported function: inputs, then outputs."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `from_json` makes an equal spec."""
        return {"op": self.op, **asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(data: dict[str, Any]) -> Spec:
        """Return the spec that `to_json` described; ValueError names a field that does not fit."""
        check_choice("Spec", "op", data.get("op"), SPECS)
        cls = SPECS[data["op"]]
        values = {key: value for key, value in data.items() if key != "op"}
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        if not set(values) <= known:
            unknown = sorted(set(values) - known)
            raise ValueError(f"{cls.__name__}: unknown fields {unknown}; known are {sorted(known)}")
        needed = {f.name for f in fields(cls) if f.default is MISSING}  # type: ignore[arg-type]
        if not needed <= set(values):
            raise ValueError(
                f"{cls.__name__}: the fields {sorted(needed - set(values))} are missing; give them"
            )
        return cls(**values)

    @staticmethod
    def parse(name: str) -> Spec:
        """Return the spec whose `name` is ``name``.

        Raises:
            ValueError: there is none: the message says what was perhaps meant; or its sizes are
                none that a kernel has.
        """
        spec = _called(name)
        if spec is None:
            raise ValueError(_unknown(name))
        return spec

    @staticmethod
    def parse_all(name: str) -> list[Spec]:
        """Return the spec called ``name``, or, for a base name, one spec per activation dtype."""
        found: list[Spec] = []
        refusal: ValueError | None = None
        for one in (name, *_overloads(name)):
            try:
                spec = _called(one)
            except ValueError as error:  # a name of the right form says more than that it is none
                refusal = refusal or error
                continue
            if spec is not None and one == name:
                return [spec]
            found += [] if spec is None else [spec]
        if not found:
            raise refusal or ValueError(_unknown(name))
        return found


def _overloads(name: str) -> list[str]:
    """Return a base name with each dtype."""
    return [f"{name}_{suffix}" for suffix in DTYPE_SUFFIX.values()]


def _called(name: str) -> Spec | None:
    """Return the spec called ``name``; ValueError where its fields do not go together."""
    for cls in SPECS.values():
        said = cls.pattern.parse(name)
        if said is not None and (spec := cls(**said)).name == name:
            return spec
    return None


LONGEST = 120
"""Characters of a name that are compared with those of kernels."""


def _unknown(name: str) -> str:
    """Return the error for a name of no kernel."""
    low = name.strip().lower()[:LONGEST]
    near = {meant for meant in _variants(low) if _of_right_form(meant)}
    if near:
        best = max(sorted(near), key=lambda meant: SequenceMatcher(None, low, meant).ratio())
        return f"{name!r} names no kernel; did you mean {best}?"

    def likeness(example: str) -> tuple[int, float]:
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(low, example, strict=False))
        return len([*shared]), SequenceMatcher(None, low, example).ratio()

    shown = sorted(NAME_EXAMPLES, key=likeness, reverse=True)[: words.SHOWN]
    return (
        f"{name!r} names no kernel; names look like {', '.join(shown)}; "
        "see 'blockscale list' for the others"
    )


def _variants(name: str) -> Iterator[str]:
    """Return names that ``name`` may stand for: with words respelt, and one elsewhere."""
    spelt = {"_".join(map(cls.pattern.respelt, name.split("_"))) for cls in SPECS.values()}
    yield from spelt
    for text in spelt:
        parts = text.split("_")
        for i, part in enumerate(parts):
            rest = parts[:i] + parts[i + 1 :]
            for j in range(len(parts)):
                yield "_".join((*rest[:j], part, *rest[j:]))


def _of_right_form(name: str) -> bool:
    """Return whether a name, or one with a dtype, reads like that of a kernel, sizes apart."""
    patterns = [cls.pattern for cls in SPECS.values()]
    return any(p.parse(one) is not None for one in (name, *_overloads(name)) for p in patterns)


class FormatSpec(Spec):
    """Base of specs with a field ``fmt``."""

    fmt: str

    @property
    def format(self) -> Format:
        """The row of its format."""
        return _FORMATS[self.fmt]

    @property
    def block(self) -> int:
        """Elements per block scale."""
        return self.format.block


_FORMATS = {row.name: row for row in formats.ROWS}

SPECS: dict[str, type[Spec]] = {}
"""Every op, by name, in the order of trying their names."""

NAME_EXAMPLES: list[str] = []
"""One name of each kind, for help texts and errors."""


def register(*specs: type[Spec]) -> None:
    """Make specs known."""
    for cls in specs:
        SPECS[cls.op] = cls
        NAME_EXAMPLES.extend(cls.pattern.examples)
