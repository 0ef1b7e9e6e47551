"""Steps of a decode loop, held against forward calls over what is accepted by equality of bits, for any pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gdn.bench.loops import LoopTables, loop_tables
from gdn.bench.oracle_check import check_forward
from gdn.bench.places import Places, last_tokens, poison, with_tokens
from gdn.bench.values import bits
from gdn.bench.workload import InputSet, Window, Workload
from gdn.testing.buffers import Array
from gdn.testing.compare import Comparison, bitwise


def check_loop(workload: Workload) -> Iterator[Comparison]:
    """Run the first layer from the loop's first step to the one after its first fold.

    A scratch pool advances by forward calls over tokens when they are folded, not before, so that 16-bit states are
    rounded where the loop rounds them. Every step must leave the states of that pool, and read out what one forward
    call over pending and window tokens reads out.
    """
    told = loop_tables(workload.case)
    walk = _Walk(workload)
    for idx, step in enumerate(workload.loop[: _num_checked(told)]):
        window = step.windows[0]
        walk.fold(window, told.folds[idx])
        poison(window.out)
        workload.verify_window(window)
        yield walk.compare("loop: states after a verify")
        yield from walk.read_out(window, with_oracle=idx == 0)
        walk.accept(told.num_accepted[idx])
        if workload.case.form == "separate":
            walk.fold(window, told.num_accepted[idx] > 0)
            workload.fold(_first_layer(step))
            yield walk.compare("loop: states after a fold")


def _num_checked(told: LoopTables) -> int:
    folding = np.flatnonzero(told.folds.any(axis=1))
    return int(folding[0]) + 2 if folding.size else 2


def _first_layer(step: InputSet) -> InputSet:
    return InputSet(step.windows[:1], step.row_ids[:1], step.ring_row_ids[:1], step.num_accepted)


class _Walk:
    """Where forward calls alone have brought the states of the first layer, and the tokens yet to be folded."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._places = Places(workload)
        self._states = self._places.new_scratch()
        self._ahead = self._places.new_scratch()
        self._places.gather(self._states)
        self._pending = [_NO_TOKENS] * workload.case.batch_size

    def compare(self, name: str) -> Comparison:
        """Whether the workload's states are where the walk is."""
        return self._places.compare(self._states, self._places.live, name)

    def fold(self, window: Window, folds: Array) -> None:
        """Advance the states of some sequences over their pending tokens."""
        self._forward(window, [own if is_folded else _NO_TOKENS for own, is_folded in self._each(folds)], self._states)
        self._pending = [_NO_TOKENS if is_folded else own for own, is_folded in self._each(folds)]

    def accept(self, counts: Array) -> None:
        """The first tokens of each window are pending from now on."""
        self._pending = [np.append(own, np.arange(count)) for own, count in self._each(counts)]

    def read_out(self, window: Window, *, with_oracle: bool) -> Iterator[Comparison]:
        """Hold the readout that a verify left in a window against a forward call from a copy of the states."""
        readout = last_tokens(self._workload, window)
        bits(self._ahead)[...] = bits(self._states)
        both = [np.append(own, np.arange(length)) for own, length in self._each(self._workload.case.call.lengths)]
        plain = with_tokens(self._workload, self._places.on_scratch(window, 0), both)
        if with_oracle:
            yield from check_forward(self._workload, plain, self._ahead)
        else:
            self._workload.forward(plain, self._ahead)
        yield bitwise(last_tokens(self._workload, plain), readout, "loop: readout against forward")

    def _forward(self, window: Window, tokens: Sequence[Array], pool: Any) -> None:
        if any(map(len, tokens)):
            self._workload.forward(with_tokens(self._workload, self._places.on_scratch(window, 0), tokens), pool)

    def _each(self, values: Any) -> Iterator[tuple[Array, Any]]:
        return zip(self._pending, values, strict=True)


_NO_TOKENS: Array = np.zeros(0, np.int64)
