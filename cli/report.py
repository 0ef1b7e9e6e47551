"""What the commands show things with. Results go to stdout, progress to stderr, and any stream will do.

A stream may be a terminal of any width, a pipe or a file, colourless (NO_COLOR), dumb (TERM=dumb), or of an
encoding that has neither lines nor bars. Text of our own is ASCII, so only rules and foreign text need care.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click
from rich.box import SIMPLE_HEAD, Box
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gdn.cli.files import discard, save_text

#: Columns of a pipe or file. A reader such as grep wants one line a row, however long.
_UNFOLDED = 1000
_SECONDS_BETWEEN_LINES = 10
_ASCII_HEAD = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the closed pipe to `gdn.cli.main`; rich itself would end with exit code 1, a failed check."""
        raise  # noqa: PLE0704 - called by rich while it handles the BrokenPipeError


def output() -> Console:
    """The console for results."""
    return _console(sys.stdout)


def progress_output() -> Console:
    """The console for what is only of interest while a command runs."""
    return _console(sys.stderr)


def _console(stream: TextIO | None) -> Console:
    if stream is None:  # the caller closed it
        stream = io.StringIO()
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        # A path or a compiler's message may hold letters that the stream's encoding lacks.
        reconfigure(errors="backslashreplace")
    folded = stream.isatty() or "COLUMNS" in os.environ
    return _Console(file=stream, width=None if folded else _UNFOLDED, highlight=False, markup=False, emoji=False)


def print_json(document: Any) -> None:
    """Write a document to stdout as JSON in ASCII; numbers that JSON lacks become "inf", "-inf" and "nan"."""
    click.echo(_json(document))


def save_and_show(document: Any, path: Path | None, *, as_json: bool, show: Callable[[], None]) -> None:
    """Write a document to a file, if one is given, and print it, or call `show`, even where it cannot be written.

    Raises ClickException where that is so.
    """
    try:
        if path is not None:
            save_text(path, _json(document) + "\n")
    finally:
        if as_json:
            print_json(document)
        else:
            show()


def _json(document: Any) -> str:
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def size(num_bytes: int) -> str:
    """Bytes in the unit that leaves a short number."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. min_width: how wide a console must be to have room for it."""

    title: str
    right: bool = False
    min_width: int = 0


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, head: bool = True
) -> None:
    """Print the columns that suit the console's width. What is still too long is folded, never cut off; numbers, which
    stand on the right, keep one line."""
    shown = [position for position, column in enumerate(columns) if column.min_width <= console.width]
    is_unicode = console.encoding.startswith("utf")
    table = Table(
        box=(SIMPLE_HEAD if is_unicode else _ASCII_HEAD) if head else None,
        show_header=head,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0) if head else (0, 2, 0, 0),
        header_style="bold",
    )
    for position in shown:
        column = columns[position]
        justify: JustifyMethod = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, overflow="fold", no_wrap=column.right)
    for row in rows:
        cells = (row[position] for position in shown)
        table.add_row(*(_spelt_out(console, cell) if isinstance(cell, str) else cell for cell in cells))
    _print(console, table)


def _spelt_out(console: Console, text: str) -> str:
    """The text as the stream will show letters that its encoding lacks, so that it is folded by its true length."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def print_indented(
    console: Console, text: str, *, indent: int = 2, style: str = "", verdict: tuple[str, str] = ("", "")
) -> None:
    """Print a paragraph whose lines, folded ones too, are indented. verdict: what comes first, in its own style."""
    shown = Text.assemble(verdict, (_spelt_out(console, text), style), overflow="fold")
    _print(console, Padding(shown, (0, 0, 0, indent), expand=False))


def print_verdict(console: Console, text: str, *, passed: bool) -> None:
    """Print the last paragraph of a report."""
    print_indented(console, text, indent=0, style="bold green" if passed else "bold red")


def _print(console: Console, block: RenderableType) -> None:
    """Print without the blanks that rich puts at the end of lines, which would be in every copy."""
    with console.capture() as capture:
        console.print(block)
    for line in capture.get().splitlines():
        console.file.write(line.rstrip() + "\n")
    console.file.flush()


def print_command(console: Console, label: str, command: str) -> None:
    """Print a command to copy: in one line, whatever the width."""
    console.print(Text.assemble(f"  {label} ", (command, "bold")), soft_wrap=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show how far something is, on stderr: a bar on a terminal, else a line every few seconds.

    Yields a function to call with the name of each part that is done.
    """
    console = progress_output()
    show = _bar if console.is_interactive else _lines
    with show(console, what, total) as advance:
        yield advance


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    # What is done last comes last, so that its length moves nothing.
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=1, description=done)


@contextmanager
def _lines(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    start = last_shown = time.monotonic()
    num_done = 0

    def advance(done: str) -> None:
        nonlocal last_shown, num_done
        num_done += 1
        now = time.monotonic()
        if now - last_shown >= _SECONDS_BETWEEN_LINES:
            last_shown = now
            try:
                console.print(f"{what}: {num_done} of {total} done in {now - start:.0f} s")
            except OSError:  # a closed pipe or a full disk there must not end the work
                discard(sys.stderr)

    yield advance
