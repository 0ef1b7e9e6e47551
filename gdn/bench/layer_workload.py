"""Calls of the ops around the recurrence that are timed: convolution, commit and gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn import ops
from gdn.bench.cases import BenchCase
from gdn.bench.machine import Machine
from gdn.bench.timing import Call


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: what it is called with, and the arrays among that which it fills."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: tuple[Any, ...]

    def run(self) -> None:
        """Call the op."""
        self.op(*self.arguments, **self.keywords)


@dataclass(frozen=True, slots=True)
class LayerWorkload:
    """The calls of a case on one machine, each that of a layer of its own: tokens, windows, weights and outputs.

    conv_state: the windows of all sets, None for gates. is_cold: whether a rotation touches more than the cache holds.
    """

    case: BenchCase
    machine: Machine
    conv_state: Any
    sets: tuple[OpCall, ...]
    is_cold: bool

    def calls(self, part: str) -> list[Call]:
        """One call for each set. `part` is the regime."""
        return [call.run for call in self.sets]

    def bound(self, part: str) -> Call:
        """The op bound to the arrays of the first set. `part` is the regime."""
        first = self.sets[0]
        return ops.bind(first.op, *first.arguments, **first.keywords)
