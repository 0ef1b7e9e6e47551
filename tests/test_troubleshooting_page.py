"""docs/troubleshooting.md has every message of every error that the library makes, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from gdn import errors

PACKAGE = Path(errors.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FAMILY = {name for name, value in vars(errors).items() if isinstance(value, type)}
#: Of switches that only tests of the kernels set.
NOT_FOR_USERS = {'sanitize="…" needs the … sanitizer\'s runtime in LD_PRELOAD'}


def test_every_message_is_on_the_page_under_its_kind() -> None:
    in_code, reasons, on_page = set(messages_of_errors()), set(reasons_in_code()), set(messages_of_page())
    assert (len(in_code) > 90, len(reasons) > 3) == (True, True)
    elsewhere = {text for heading, text in on_page if heading not in FAMILY}
    under_kinds = {(heading, text) for heading, text in on_page if heading in FAMILY and text not in reasons}
    assert {(kind, text) for kind, text in in_code if text not in elsewhere | NOT_FOR_USERS} == under_kinds
    assert elsewhere - reasons - {text for _, text in in_code} == set()
    assert reasons - {text for _, text in on_page} == set()


def test_every_message_has_its_cause_and_cure() -> None:
    """At least a sentence stands between a block of messages and the next block or heading."""
    behind = re.findall(r"```text\n.*?```\n\n(.*?)(?=\n```|\n## |\Z)", PAGE, re.DOTALL)
    assert len(behind) == PAGE.count("```text\n")
    assert [text for text in behind if "." not in text] == []


def test_messages_are_read_out_of_the_code() -> None:
    """The reading of the code is right about messages of each form, as raised."""
    in_code = set(messages_of_errors())
    assert ("GdnError", "activation: expected None or 'silu', got …") in in_code  # of constants
    assert ("LayoutError", "…: expected a writable array, got a read-only one") in in_code  # of an attribute
    assert ("ShapeError", "…: expected …a multiple of 8 from 8 to 256, got …") in in_code  # of a name and constants
    assert ("GdnError", "ring_len: expected at most 64, the longest ring, got …") in in_code  # of either branch
    assert ("LayoutError", "…: expected a first stride of at least … elements, got …") in in_code  # of a changed name
    assert ("KernelCompileError", "… does not compile for the CPU: …") in in_code  # the first line of several


def messages_of_page() -> Iterator[tuple[str, str]]:
    """(heading, message) of the blocks of the page, with `…` for what stands in <...>."""
    for section in PAGE.split("\n## ")[1:]:
        heading = section.partition("\n")[0]
        for block in re.findall(r"```text\n(.*?)```", section, re.DOTALL):
            for line in block.splitlines():
                yield heading, re.sub("<[^<>]*>", "…", line)


# ---- The messages as the code has them, with `…` for what a call puts in ----


def messages_of_errors() -> Iterator[tuple[str, str]]:
    """(kind, first line of the message) of every error of the family that `gdn` makes."""
    for path, module in modules():
        for function in functions(path):
            for node in ast.walk(function):
                kind = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
                if isinstance(node, ast.Call) and kind in FAMILY and ast.unparse(node.args[0]) != "reason":
                    for text in Texts(function, module).of(node.args[0], node.lineno):
                        yield kind, re.sub("…+", "…", text.partition("\n")[0])


def reasons_in_code() -> Iterator[str]:
    """Why something cannot run here, as functions named ..._reason return it, for errors and for `gdn info`."""
    for path, module in modules():
        for function in functions(path):
            for node in ast.walk(function) if function.name.endswith("_reason") else ():
                match node:
                    case ast.Return(value=ast.JoinedStr() | ast.Constant(value=str()) as text):
                        yield from Texts(function, module).of(text, node.lineno)
                    case ast.Return(value=ast.Call(func=ast.Name("rejection")) as text):
                        yield from Texts(function, module).of(text, node.lineno)


def modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ".".join(("gdn", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Functions and methods of a file; one inside another belongs to that."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                yield inner


class Texts:
    """What an expression of a function may be as text, as far as the code alone says it."""

    def __init__(self, function: ast.FunctionDef, module: str) -> None:
        self._module = import_module(module)
        self._assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign)]

    def of(self, node: ast.expr, line: int) -> list[str]:
        match node:
            case ast.Constant():
                return [str(node.value)]
            case ast.JoinedStr():
                return self._joined(node.values, line)
            case ast.FormattedValue(value=ast.Name() | ast.IfExp() as value):  # else a number, or an object's name
                return self.of(value, line)
            case ast.BinOp(op=ast.Add()):
                return self._joined([node.left, node.right], line)
            case ast.IfExp():
                return [*self.of(node.body, line), *self.of(node.orelse, line)]
            case ast.Call(func=ast.Name("rejection")):
                parts = product(*(self.of(part, line) for part in node.args))
                return [f"{argument}: expected {expected}, got {got}" for argument, expected, got in parts]
            case ast.Name():
                return self._named(node.id, line)
            case _:
                return ["…"]

    def _joined(self, parts: list[ast.expr], line: int) -> list[str]:
        return ["".join(texts) for texts in product(*(self.of(part, line) for part in parts))]

    def _named(self, name: str, line: int) -> list[str]:
        """The text of a name: what was last assigned to it above, or a constant of the module."""
        before = [node for node in self._assigned if node.lineno < line and assigns(node, name)]
        if before:
            last = max(before, key=lambda node: node.lineno)
            return self.of(last.value, last.lineno) if isinstance(last, ast.Assign) else ["…"]
        constant: Any = getattr(self._module, name, None)
        return [str(constant)] if isinstance(constant, int | str) else ["…"]


def assigns(node: ast.Assign | ast.AugAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
