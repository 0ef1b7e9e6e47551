"""Every field case of docs/field-cases.md has its test, and two of its kind beside it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "field-cases.md"
_MENTION = re.compile(r"(beside )?field cases? (\d+(?:(?:-|, | and )\d+)*)", re.IGNORECASE)


def numbers(text: str) -> set[int]:
    """Those of "12, 13", "11 and 84" or "56-59, 63"."""
    found: set[int] = set()
    for part in re.split(r", | and ", text):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def rows() -> list[set[int]]:
    """The cases of each row of the page."""
    lines = re.findall(r"^\| (\d[\d, -]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [numbers(line) for line in lines]


def docstrings() -> Iterator[tuple[str, str]]:
    """Name and docstring of every test."""
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.name}::{node.name}", " ".join((ast.get_docstring(node) or "").split())


def mentions(docstring: str) -> Iterator[tuple[bool, set[int]]]:
    """Whether the case stands beside field cases, and which."""
    for beside, cases in _MENTION.findall(docstring):
        yield bool(beside), numbers(cases)


def counted(*, beside: bool) -> Counter[int]:
    """How many tests a row of the page has, by the row's place."""
    places = {case: place for place, row in enumerate(rows()) for case in row}
    found: Counter[int] = Counter()
    for name, docstring in docstrings():
        own: set[int] = set()
        for is_beside, cases in mentions(docstring):
            assert cases <= places.keys(), name
            own |= {places[case] for case in cases} if is_beside is beside else set()
        found.update(own)
    return found


def test_every_case_has_a_test() -> None:
    found = counted(beside=False)
    assert [sorted(row) for place, row in enumerate(rows()) if not found[place]] == []


def test_every_case_has_two_neighbours() -> None:
    found = counted(beside=True)
    assert [sorted(row) for place, row in enumerate(rows()) if found[place] < 2] == []


def test_rows_are_apart() -> None:
    assert len(rows()) == 56
    assert sum(map(len, rows())) == len(set().union(*rows()))


def test_mentions_are_read_as_they_are_written() -> None:
    text = "Field cases 11 and 84: this. Beside field cases 56-59, 63: that."
    assert list(mentions(text)) == [(False, {11, 84}), (True, {56, 57, 58, 59, 63})]
