"""PTX text to tokens (PTX ISA 4.2 to 4.5)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from blockscale.emulator.errors import Place, PtxError

TOKEN = re.compile(
    r"""
    [ \t]*(?:
    (?P<skip>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<unended>/\*)
  | (?P<string>"[^"\n]*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d+U?)
  | (?P<directive>\.[A-Za-z_][\w$]*(?:::[\w$]+)*)
  | (?P<name>(?:[A-Za-z]|[_$%][\w$%]|_)[\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<punct><<|>>|==|!=|<=|>=|&&|\|\||[{}()\[\],;:@!+\-|=<>*/%~&^?])
  | (?P<other>.)
    )
    """,
    re.VERBOSE | re.DOTALL,
)
MAX_TEXT = 8 << 20  # characters; the PTX of one kernel has thousands of times less
MAX_NAME = 1 << 15  # characters; mangled names of C++ templates have some thousands
# Debug directives end at the end of their line, everything else at a semicolon.
LINE_DIRECTIVE = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*", re.MULTILINE)


class Token(NamedTuple):
    """One token: kind is "string", "number", "directive", "name", "punct" or "end"."""

    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """Return the tokens of `text`, without comments and debug lines, and an "end" token."""
    if len(text) > MAX_TEXT:
        raise PtxError(
            f"the text has {len(text)} characters and the emulator reads at most {MAX_TEXT}; pass "
            "the kernel alone, with the functions that it calls"
        )
    text = LINE_DIRECTIVE.sub("", text.rstrip("\0"))
    result: list[Token] = []
    line = 1
    for match in TOKEN.finditer(text):
        kind = str(match.lastgroup)
        word = match[kind]
        if kind == "skip":
            line += word.count("\n")
            continue
        if kind == "other":
            at = match.start(kind)
            near = text[at : at + 20].split("\n")[0]
            raise PtxError(
                f"{near!r} is not PTX; pass the text that nvcc, NVRTC or Triton print"
            ).at(Place(line=line))
        if len(word) > MAX_NAME and kind in ("name", "directive"):
            raise PtxError(f"a name of {len(word)} characters; the emulator reads {MAX_NAME}").at(
                Place(line=line)
            )
        if kind == "unended":
            raise PtxError("the comment that begins with /* has no end; write */").at(
                Place(line=line)
            )
        result.append(Token(kind, word, line))
    result.append(Token("end", "", line))
    return result


def number(text: str) -> tuple[int | float, str]:
    """Return a literal's value and kind ("int", "f32", "f64": bits; "dec": a decimal float).

    ValueError: it is none; an integer has at most 64 bits (4.5.1).
    """
    lowered = text.lower()
    if lowered.startswith("0f") and len(text) == 10:
        return int(text[2:], 16), "f32"
    if lowered.startswith("0d") and len(text) == 18:
        return int(text[2:], 16), "f64"
    digits = text.rstrip("Uu")
    if not lowered.startswith(("0x", "0b")) and any(c in lowered for c in ".e"):
        if not math.isfinite(float(text)):
            raise ValueError("it is beyond the range of .f64")
        return float(text), "dec"
    octal = digits.isdigit() and len(digits) > 1 and digits[0] == "0"
    value = int(f"0o{digits}" if octal else digits, 0)
    if value >> 64:
        raise ValueError("it has more than 64 bits")
    return value, "int"
