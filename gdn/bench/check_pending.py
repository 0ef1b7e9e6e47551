"""Calls with pending records, held against forward calls by equality of bits, for any type of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gdn.bench.oracle_check import check_forward
from gdn.bench.places import Places, last_tokens, poison, with_tokens
from gdn.bench.workload import Window, Workload
from gdn.testing.buffers import Array
from gdn.testing.compare import Comparison, bitwise


def check_pending(workload: Workload) -> Iterator[Comparison]:
    """Run the first set behind records that a verify has just left, then fold what it recorded itself.

    Fused: a forward over the pending tokens leaves the same states, and one over the window the same readout. Lazy: the
    states are as before, and one forward over pending and window tokens has the same readout. Either way the fold must
    end where the forward calls do.
    """
    case, (window,) = workload.case, workload.sets[0].windows
    regime = case.regime
    places = Places(workload)
    scratch = places.new_scratch()
    places.gather(scratch)
    before = [np.arange(case.pending) % length for length in case.call.lengths]
    if case.pending:
        leave_records(workload, window, before)
    poison(window.out)
    workload.verify(workload.sets[0])
    readout = last_tokens(workload, window)
    plain = places.on_scratch(window, 0)
    if regime == "lazy":
        plain = with_tokens(workload, plain, [np.append(own, np.arange(case.call.lengths[0])) for own in before])
    elif case.pending:
        workload.forward(with_tokens(workload, plain, before), scratch)
    yield places.compare(scratch, places.live, f"{regime}: states after the call")
    yield from check_forward(workload, plain, scratch)
    yield bitwise(last_tokens(workload, plain), readout, f"{regime}: readout against forward")
    workload.fold(workload.sets[0])
    yield places.compare(scratch, places.live, f"{regime}: states after folding its records")


def leave_records(workload: Workload, window: Window, tokens: list[Array]) -> None:
    """Verify some tokens of a window from its states, so that their records are what is pending of it."""
    earlier = with_tokens(workload, window, tokens)
    workload.verify_window(replace(earlier, ring_rows=window.pending_rows, pending_rows=None, num_pending=None))
