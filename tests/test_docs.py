"""README and docs say what the code does: their Python runs, their commands are taken, the names in them exist."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

import gdn.layer
import gdn.ops
import gdn.speculative
from gdn.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "py", "sh", "text", "{toctree}", "{eval-rst}"}
#: `python` runs here as it stands, but for this page, which wants PyTorch or JAX, and a GPU: test_frameworks.py.
FRAMEWORKS = "frameworks.md"
#: `py` wants something around it, which test_readme.py and test_frameworks.py put there for so many blocks of a page.
PY_BLOCKS = {"README.md": 3, FRAMEWORKS: 1}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The blocks of a page in these languages, each with as many empty lines in front as stand above it there."""
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        if block[1] in languages:
            yield "\n" * text.count("\n", 0, block.start(2)) + block[2]


@every_page
def test_every_block_has_a_language_that_is_tested(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[1::2]) <= {""}
    assert set(fences[0::2]) <= LANGUAGES
    assert fences.count("py") == PY_BLOCKS.get(page.name, 0)


@pytest.mark.parametrize("name", ["README.md", "layouts.md", "numerics.md", "speculative.md"])
def test_python_runs(name: str) -> None:
    """The blocks of a page, in order, in one namespace. What else they should do their own tests and asserts say."""
    (page,) = (page for page in PAGES if page.name == name)
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    assert any(callable(value) for value in names.values())


def test_no_page_with_python_is_left_out() -> None:
    ran = test_python_runs.pytestmark[0].args[1]  # type: ignore[attr-defined]  # pytest sets it
    with_python = {page.name for page in PAGES if any(blocks(page, "python"))}
    assert with_python == {*ran, FRAMEWORKS}


@every_page
def test_commands_are_taken(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of `gdn` takes each documented command; files that one reads are there."""
    monkeypatch.chdir(tmp_path)
    Path("mine.json").touch()
    for line in "".join(blocks(page, "sh")).splitlines():
        for command in line.partition("#")[0].split("&&"):
            program, *arguments = shlex.split(command) or [""]
            if Path(program).name == "gdn":
                context = main.make_context("gdn", list(arguments))
                name, subcommand, rest = main.resolve_command(context, arguments)
                assert isinstance(subcommand, click.Command)
                subcommand.make_context(name, rest, parent=context)


@every_page
def test_names_of_the_library_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    dotted = set(re.findall(r"`(gdn(?:\.\w+)+)", text))
    dotted |= {f"gdn.speculative.{name}" for name in re.findall(r"`(PendingWindows\.\w+)", text)}
    assert [name for name in dotted if not is_found(name)] == []


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in backticks, from the root of the checkout, from gdn/ or from docs/; links are for the build to see."""
    named = re.findall(r"`([\w/]+/[\w.*-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not any(any((ROOT / base).glob(path)) for base in ("", "gdn", "docs"))] == []


def is_found(name: str) -> bool:
    """Whether a dotted name is that of a module or of something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


# ---- Docstrings, which the page of the contract is made of ----


def public_functions() -> Iterator[Callable[..., Any]]:
    """Functions, and methods of classes, that docs/contract.md shows of the modules that take arrays."""
    for module in (gdn.ops, gdn.layer, gdn.speculative):
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            members = vars(value).values() if inspect.isclass(value) else [value]
            yield from (member for member in members if inspect.isfunction(member))


def test_docstrings_explain_the_parameters_that_there_are() -> None:
    """Each `Args` section names every parameter once and nothing else."""
    explained = 0
    for function in public_functions():
        docstring = inspect.getdoc(function) or ""
        section = re.search(r"^Args:\n((?: .*\n|\n)*)", docstring + "\n", re.MULTILINE)
        if section is None:
            continue
        entries = re.findall(r"^    (\S[^:]*):", section[1], re.MULTILINE)
        named = [name.strip(" *") for entry in entries for name in entry.split(",")]
        assert sorted(named) == sorted(set(inspect.signature(function).parameters) - {"self"}), function.__qualname__
        explained += 1
    assert explained > 15
