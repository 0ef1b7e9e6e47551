"""Names and numbers that a user types: parameter types with suggestions and shell completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MOST_SHOWN = 12  # names in an error message


def joined(names: Sequence[str], last: str) -> str:
    """The names as prose has them: "a, b or c" where `last` is "or"."""
    return f" {last} ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: those it resembles, else those there are."""
    known = list(known)
    spelt = {each.lower(): each for each in known}
    similar = [spelt[match] for match in get_close_matches(name.lower(), spelt)]
    if similar:
        return f"did you mean {joined(similar, 'or')}?"
    if len(known) <= _MOST_SHOWN:
        return f"expected one of {', '.join(known)}"
    return f"expected a name such as {', '.join(known[:3])}"


class Name(click.ParamType):  # type: ignore[type-arg] # takes one in new releases of click only
    """One of a list of names, or another that `also` accepts.

    kind: what the names are, for messages. more: what to say of names that are not in the list.
    """

    def __init__(
        self,
        kind: str,
        known: Iterable[str],
        also: Callable[[str], bool] = lambda name: False,
        more: str = "",
    ) -> None:
        self.name = kind
        self.known = tuple(known)
        self.also = also
        self.more = more

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text not in self.known and not self.also(text):
            self.fail(f"unknown {self.name} {text!r}; {suggestion(text, self.known)}{self.more}", param, ctx)
        return text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self.known if name.startswith(incomplete)]


class Names(Name):
    """Several such names with commas between them."""

    def convert(  # type: ignore[override] # a tuple, as each of several values
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):  # click may convert a value twice
            return value
        return tuple(Name.convert(self, part, param, ctx) for part in str(value).split(","))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(before + comma + name) for name in self.known if name.startswith(last)]


class PairOfCounts(click.ParamType):  # type: ignore[type-arg] # as above
    """Two counts with a comma between them, such as 16,32."""

    name = "pair"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):  # click may convert a value twice
            return value
        parts = str(value).split(",")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
            self.fail(f"expected two counts with a comma between them, such as 16,32, got {value!r}", param, ctx)
        first, second = (int(part) for part in parts)
        return first, second


class Shares(click.ParamType):  # type: ignore[type-arg] # as above
    """Numbers from 0 to 1 with commas between them, such as 0,0.5,1."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):  # click may convert a value twice
            return value
        try:
            shares = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            shares = ()
        if not shares or not all(0 <= share <= 1 for share in shares):
            self.fail(f"expected numbers from 0 to 1, with commas between several, got {value!r}", param, ctx)
        return shares


class Counts(click.ParamType):  # type: ignore[type-arg] # as above
    """Counts of at least one with commas between them, such as 1,8,32."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):  # click may convert a value twice
            return value
        parts = str(value).split(",")
        if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) for part in parts):
            self.fail(f"expected counts of at least 1, with commas between several, got {value!r}", param, ctx)
        return tuple(int(part) for part in parts)


def heads_options(help_of_heads: str) -> Callable[[_Command], _Command]:
    """The options --heads and --head-dims of a command."""

    def add(command: _Command) -> _Command:
        dims = click.option(
            "--head-dims", type=PairOfCounts(), metavar="KD,VD", help="Sizes of a key and a value head."
        )
        return click.option("--heads", type=PairOfCounts(), metavar="NK,NV", help=help_of_heads)(dims(command))

    return add
