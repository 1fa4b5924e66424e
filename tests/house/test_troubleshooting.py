"""docs/troubleshooting.md quotes errors as the code words them."""

import ast
import re
from functools import cache

import pytest

from tests.kit.paths import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
if not PAGE.is_file():
    pytest.skip("no checkout around the tests, so no docs/", allow_module_level=True)
VALUE = "\0"
"""What stands for a value within a string of the code; quotes have ``...`` there."""


def quotes():
    """Return every quotation of the table's first column."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE.read_text(), re.M)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


@cache
def strings():
    """Return the strings of the code; of a formatted one, values as `VALUE`."""
    found = []
    for path in sorted((ROOT / "blockscale").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else VALUE for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    natives = sorted((ROOT / "blockscale" / "runtime" / "native").glob("*.c"))
    for path in natives:
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
        found.append(re.sub(r"%(?:ll)?[a-z]", VALUE, joined))
    found.append((ROOT / "Makefile").read_text())
    return "\n".join(found)


@pytest.mark.parametrize("quote", quotes())
def test_the_code_has_what_the_page_quotes(quote):
    for part in quote.split("..."):
        assert part.strip() in strings(), part


def test_the_page_has_quotes():
    assert len(quotes()) > 30
