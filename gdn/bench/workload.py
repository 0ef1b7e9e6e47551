"""Arrays of a timed case, and the calls on them: several sets of inputs over one pool and one ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gdn import ops
from gdn.bench.cases import PENDING_REGIMES, BenchCase
from gdn.bench.machine import Machine
from gdn.bench.timing import Call
from gdn.bench.values import bits, fill, values_for
from gdn.geometry import PAD_SLOT

#: Regimes of one verify.
_VERIFIES = ("verify", *PENDING_REGIMES)


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of one call, in the order of its arguments.

    ring_rows: None without a ring. pending_rows, num_pending: None for a call that is told of nothing pending.
    """

    qkv_conv_output: Any
    decay_per_token: Any
    beta_per_token: Any
    slot_idx: Any
    input_row_offsets: Any
    out: Any
    ring_rows: Any
    pending_rows: Any = None
    num_pending: Any = None


@dataclass(frozen=True, slots=True)
class InputSet:
    """What one timed call uses of a workload: a window for each layer, and the tables of a fold.

    For a step of a loop the layers are the sets of the rotation, which the step goes through one after the other.
    """

    windows: tuple[Window, ...]
    row_ids: Any
    ring_row_ids: Any
    num_accepted: Any


@dataclass(frozen=True, slots=True)
class Workload:
    """The arrays of a case on one machine.

    is_cold: whether a rotation touches more than the cache holds. loop: the steps of a loop from its beginning.
    workspace: that of chunked calls, one for all sets as they run one after the other.
    """

    case: BenchCase
    machine: Machine
    pool: Any
    ring: Any
    sets: tuple[InputSet, ...]
    is_cold: bool
    loop: tuple[InputSet, ...] = ()
    workspace: Any = None

    def forward(self, window: Window, pool: Any = None) -> None:
        """Run a window plainly, on the workload's pool unless another is given."""
        ops.gated_delta_recurrence_fwd(*self._six(window, pool), out=window.out, **self._algorithm)

    def verify(self, inputs: InputSet) -> None:
        """Verify the windows of all layers."""
        for window in inputs.windows:
            self.verify_window(window)

    def verify_window(self, window: Window) -> None:
        """Verify the window of one layer, whose pending records come first where it has some."""
        ops.gated_delta_recurrence_verify_ring(*self._eight(window), **_pending(window), out=window.out)

    def fold(self, inputs: InputSet) -> None:
        """Fold what is accepted, all layers at once."""
        ops.gated_delta_state_fold(*self._five(inputs))

    def bound(self, part: str) -> Call:
        """The op of a regime of one op, bound to arrays of the first set: of a verify, those of its first layer."""
        inputs = self.sets[0]
        window = inputs.windows[0]
        if part == "fold":
            return ops.bind(ops.gated_delta_state_fold, *self._five(inputs))
        if part in _VERIFIES:
            arguments, pending = self._eight(window), _pending(window)
            return ops.bind(ops.gated_delta_recurrence_verify_ring, *arguments, **pending, out=window.out)
        return ops.bind(ops.gated_delta_recurrence_fwd, *self._six(window), out=window.out, **self._algorithm)

    @property
    def _algorithm(self) -> dict[str, Any]:
        """The keywords that choose an algorithm, none for what has no choice."""
        if not self.case.is_chunked:
            return {}
        return {"algorithm": self.case.algorithm, "workspace": self.workspace}

    def _six(self, window: Window, pool: Any = None) -> tuple[Any, ...]:
        """The arguments that all recurrence functions take first."""
        return (
            window.qkv_conv_output,
            window.decay_per_token,
            window.beta_per_token,
            self.pool if pool is None else pool,
            window.slot_idx,
            window.input_row_offsets,
        )

    def _eight(self, window: Window) -> tuple[Any, ...]:
        """The arguments of a verify."""
        return *self._six(window), self.ring, window.ring_rows

    def _five(self, inputs: InputSet) -> tuple[Any, ...]:
        """The arguments of a fold."""
        return self.pool, inputs.row_ids, self.ring, inputs.ring_row_ids, inputs.num_accepted

    def step(self, inputs: InputSet) -> None:
        """Verify, then fold."""
        self.verify(inputs)
        self.fold(inputs)

    def run_loop(self, steps: slice) -> None:
        """Some steps of the loop."""
        run = self.step if self.case.form == "separate" else self.verify
        for inputs in self.loop[steps]:
            run(inputs)

    def calls(self, part: str) -> list[Call]:
        """One call for each set. `part` is a regime."""
        return [self._call(part, inputs) for inputs in self.sets]

    def _call(self, part: str, inputs: InputSet) -> Call:
        if part in _VERIFIES:
            return lambda: self.verify(inputs)
        if part == "fold":
            return lambda: self.fold(inputs)
        if part == "step":
            return lambda: self.step(inputs)
        (window,) = inputs.windows
        return lambda: self.forward(window)

    def repeat_records(self) -> None:
        """Copy the records in the first set's ring rows to those of all others."""
        ring, first = bits(self.ring), self._live_ring_rows(self.sets[0])
        for inputs in self.sets[1:]:
            ring[self._live_ring_rows(inputs)] = ring[first]

    def _live_ring_rows(self, inputs: InputSet) -> Any:
        """Ring rows of a set as int64, padding left out."""
        tables = [inputs.ring_row_ids, *(w.pending_rows for w in inputs.windows if w.pending_rows is not None)]
        rows = np.concatenate([self.machine.get(table).view(np.uint32).ravel() for table in tables])
        return self.machine.put(rows[rows != PAD_SLOT].astype(np.int64))

    def reset(self) -> None:
        """Put the states back that the workload began with."""
        fill(self.pool, self.machine.put(values_for(self.case).recurrent_state))


def _pending(window: Window) -> dict[str, Any]:
    """The keywords that tell a call of a window what is pending."""
    if window.num_pending is None:
        return {}
    return {"pending_ring_slot_idx": window.pending_rows, "num_pending": window.num_pending}
