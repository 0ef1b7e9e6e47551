"""What the steps of a decode loop are told: drawn acceptance, and the ring rows and counts that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gdn.bench.cases import BenchCase, Loop
from gdn.speculative import PendingWindows
from gdn.testing.buffers import Array

_MAX_STEPS = 256


@dataclass(frozen=True, slots=True)
class LoopTables:
    """Tables [steps, batch_size]: those of the steps that lead to a steady state, then those that are timed.

    own: which of its two ring rows a sequence's window records in. pending: which holds its pending records.
    """

    own: Array
    pending: Array
    num_pending: Array
    num_accepted: Array
    first_timed: int

    @property
    def num_timed(self) -> int:
        """Steps that are timed."""
        return len(self.own) - self.first_timed

    @property
    def folds(self) -> Array:
        """Where a verify folds what is pending."""
        result: Array = (self.own != self.pending) & (self.num_pending > 0)
        return result


def loop_of(case: BenchCase) -> Loop:
    """The loop of a case that is one."""
    if case.loop is None:
        raise TypeError(f"{case.regime} of {case.call.name} is no loop")
    return case.loop


@lru_cache(maxsize=64)
def loop_tables(case: BenchCase) -> LoopTables:
    """The tables of a loop. Acceptance is drawn from one seed whatever the form.

    Where all or nothing is accepted, the steps that are timed are whole periods: they can follow upon themselves. With
    other rates a replay begins with counts that belong to other records than the last step left, which costs the same.
    """
    loop, call = loop_of(case), case.ring_call
    period = _period(case)
    steps = period * math.ceil(max(loop.min_steps, min(period / max(loop.accept, 0.05), _MAX_STEPS)) / period)
    window, batch_size = call.lengths[0], case.batch_size
    random = np.random.default_rng([call.seed, window, batch_size])
    accepted = random.binomial(window, loop.accept, (period + steps, batch_size))
    own, pending, counts = np.zeros((3, *accepted.shape), np.int64)
    rows = np.repeat(np.arange(2, dtype=np.uint32), batch_size).reshape(2, 1, batch_size)
    windows = PendingWindows(rows, call.ring_len, lazy=loop.form == "lazy")
    offsets = np.arange(batch_size + 1, dtype=np.uint32) * np.uint32(window)
    for step in range(len(accepted) if loop.form != "separate" else 0):
        windows.begin(offsets)
        own[step], pending[step] = windows.ring_slot_idx[0], windows.pending_ring_slot_idx[0]
        counts[step] = windows.num_pending
        windows.accept(accepted[step].astype(np.uint32))
    return LoopTables(own, pending, counts, accepted, first_timed=period)


def _period(case: BenchCase) -> int:
    """Steps after which a loop that accepts everything is back in the same ring rows with the same counts."""
    form = loop_of(case).form
    if form == "separate":
        return 1
    return 2 * (case.ring_call.ring_len // case.call.lengths[0]) if form == "lazy" else 2
